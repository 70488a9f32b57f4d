/* part.c — extracts the part of a tape that makes some targets: a graph of its own, whose leaves
 * are the values concrete by now, with maps back to the tape. */
#include "run/run.h"

void koila__part_free(koila__part *p)
{
    koila_graph_free(p->graph);
    PyMem_Free(p->value_of);
    PyMem_Free(p->leaf_from);
    PyMem_Free(p->node_from);
    PyMem_Free(p->targets);
    PyObject **const kept = p->kept;
    const uint32_t n = p->n_leaves;
    *p = (koila__part){ 0 };
    for (uint32_t i = 0; kept && i < n; i++)
        Py_XDECREF(kept[i]);
    PyMem_Free(kept);
}

/* What is still held when a planned step ends lives until then. Where there is no memory for that,
 * predictions are less exact. */
static void tell_held(const koila__tape *t, const koila__part *p)
{
    for (const koila__handle *h = t->handles; h; h = h->next_in_tape) {
        const koila_value v = koila__part_value(p, h->group->cur);
        if (v != KOILA_NONE)
            (void)koila_graph_drop(p->graph, v);
    }
}

/* The address of `real`'s StorageImpl, and its bytes. 0: torch does not say. */
static uintptr_t storage_of(PyObject *real, uint64_t *bytes)
{
    PyObject *s = koila__ask("untyped_storage", real, NULL, NULL);
    PyObject *at = s ? PyObject_GetAttrString(s, "_cdata") : NULL;
    PyObject *n = at ? PyObject_CallMethod(s, "nbytes", NULL) : NULL;
    uintptr_t address = 0;
    if (n) {
        *bytes = PyLong_AsUnsignedLongLong(n);
        address = (uintptr_t)PyLong_AsUnsignedLongLong(at);
    }
    if (PyErr_Occurred()) {
        PyErr_Clear();
        address = 0;
    }
    Py_XDECREF(n);
    Py_XDECREF(at);
    Py_XDECREF(s);
    return address;
}

/* The storages of the part's leaves, numbered by the first leaf in each. */
static void tell_storages(const koila__tape *t, const koila__part *p)
{
    uintptr_t *address = PyMem_Calloc(p->n_leaves + 1, sizeof *address);
    for (koila_value leaf = 0; address && leaf < p->n_leaves; leaf++) {
        uint64_t bytes = 0;
        uint32_t first = 0;
        if (!t->values[p->leaf_from[leaf]].real)
            continue;
        PyObject *real = Py_NewRef(t->values[p->leaf_from[leaf]].real); /* may run Python */
        address[leaf] = storage_of(real, &bytes);
        Py_DECREF(real);
        if (!address[leaf])
            continue;
        while (address[first] != address[leaf])
            first++;
        (void)koila_graph_stored(p->graph, leaf, p->leaf_from[first], bytes);
    }
    PyMem_Free(address);
}

static bool is_concrete(void *tape, koila_value v, koila_cut *cut)
{
    const koila__tape *t = tape;
    *cut = t->values[v].cut;
    return t->values[v].real != NULL;
}

static bool is_concrete_or_kept(void *tape, koila_value v, koila_cut *cut)
{
    const koila__tape *t = tape;
    const koila__kept *kept = t->values[v].real ? NULL : koila__kept_of(t, v);
    *cut = kept ? kept->cut : t->values[v].cut;
    return kept || t->values[v].real;
}

/* The part owns the kept values that it reads. Runs no Python code, as nothing did since it was
 * extracted. */
static int hold_kept(const koila__tape *t, koila__part *p)
{
    for (uint32_t i = 0; i < p->n_leaves; i++) {
        const koila_value v = p->leaf_from[i];
        const koila__kept *kept = t->values[v].real ? NULL : koila__kept_of(t, v);
        if (!kept)
            continue;
        if (!p->kept) {
            p->kept = PyMem_Calloc(p->n_leaves, sizeof *p->kept);
            if (!p->kept)
                return -1;
        }
        p->kept[i] = Py_NewRef(kept->tensor);
        p->has_only_whole |= kept->only_whole;
    }
    return 0;
}

static uint32_t n_leaves_of(const koila_graph *g)
{
    uint32_t n = 0;
    while (n < koila_graph_n_values(g) && koila_value_get(g, n).node == KOILA_NONE)
        n++;
    return n;
}

int koila__part_make(koila__tape *t, const koila_value *targets, uint32_t n, bool with_kept,
                     koila__part *out)
{
    const uint32_t n_values = koila_graph_n_values(t->graph);
    const uint32_t n_nodes = koila_graph_n_nodes(t->graph);
    *out = (koila__part){ .value_of = PyMem_Calloc(n_values + 1, sizeof *out->value_of),
                          .leaf_from = PyMem_Malloc((n_values + 1) * sizeof *out->leaf_from),
                          .node_from = PyMem_Malloc((n_nodes + 1) * sizeof *out->node_from),
                          .targets = PyMem_Malloc((n + 1) * sizeof *out->targets),
                          .n_values = n_values };
    koila_status status = KOILA_NO_MEMORY;
    if (out->value_of && out->leaf_from && out->node_from && out->targets)
        status = koila_graph_extract(
            t->graph, targets, n, with_kept && t->kept.n ? is_concrete_or_kept : is_concrete, t,
            NULL, &out->graph, out->value_of, out->leaf_from, out->node_from);
    if (status != KOILA_OK) {
        koila__part_free(out);
        koila__raise(status);
        return -1;
    }
    out->n_leaves = n_leaves_of(out->graph);
    if (with_kept && t->kept.n && hold_kept(t, out) < 0) {
        koila__part_free(out);
        PyErr_NoMemory();
        return -1;
    }
    if (t->planned) {
        tell_held(t, out);
        tell_storages(t, out);
    }
    for (uint32_t i = 0; i < n; i++) {
        out->targets[i] = koila__part_value(out, targets[i]);
        koila_assert(out->targets[i] != KOILA_NONE);
    }
    return 0;
}

int koila__part_add_targets(koila__part *p, uint32_t n, const koila__kept *more, uint32_t n_more)
{
    koila_value *all = PyMem_Realloc(p->targets, ((size_t)n + n_more + 1) * sizeof *all);
    if (!all) {
        PyErr_NoMemory();
        return -1;
    }
    p->targets = all;
    for (uint32_t i = 0; i < n_more; i++) {
        all[n + i] = koila__part_value(p, more[i].value);
        koila_assert(all[n + i] != KOILA_NONE);
    }
    return 0;
}

koila_graph *koila__part_give(koila__part *p)
{
    koila_graph *graph = p->graph;
    p->graph = NULL;
    return graph;
}

static bool is_recorded_leaf(const koila__tape *t, koila_value v)
{
    return koila_value_get(t->graph, v).node == KOILA_NONE;
}

/* Writes ", read at file.py:12" for the first node that reads v; "" if no line is known. */
static void first_reader(const koila_graph *g, koila_value v, char *out, size_t room)
{
    out[0] = '\0';
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        const koila_node_info info = koila_node_get(g, n);
        const uint32_t n_inputs = koila_sig_get(koila__table, info.sig)->n_inputs;
        for (uint32_t i = 0; info.line != KOILA_NONE && i < n_inputs; i++)
            if (koila_node_inputs(g, n)[i] == v) {
                snprintf(out, room, ", read at %s:%u", koila_graph_line_file(g, info.line),
                         koila_graph_line_number(g, info.line));
                return;
            }
    }
}

/* how: what tells. */
static int raise_stale_leaf(const koila__tape *t, koila_value v, const char *how)
{
    const koila_meta_info *m = koila_meta_get(koila__table, koila_value_get(t->graph, v).meta);
    char shape[400] = "", where[400];
    for (uint32_t d = 0, at = 0; d < m->n_dims && at < sizeof shape; d++)
        at += (uint32_t)snprintf(shape + at, sizeof shape - at, "%s%lld", d ? ", " : "",
                                 (long long)m->size[d]);
    first_reader(t->graph, v, where, sizeof where);
    return koila__raise_stale(
        "this value depends on a tensor %s[%s]%s, which has been written since it was recorded "
        "(%s): a parameter after optimizer.step(), or a "
        "buffer. Call backward(), or ask for the value (print it, .item(), .torch()), before "
        "the write; or hold the value in a variable while backward() runs, which then "
        "computes and keeps it",
        koila_dtype_text(m->dtype), shape, where, how);
}

int koila__part_check_versions(koila__tape *t, const koila__part *p)
{
    for (uint32_t i = 0; i < p->n_leaves; i++) {
        const koila_value v = p->leaf_from[i];
        uint32_t now;
        char how[80];
        if (!t->values[v].real)
            continue;
        PyObject *real = Py_NewRef(t->values[v].real); /* a class of the user's may run Python */
        const int known = koila__version_of(real, &now);
        Py_DECREF(real);
        if (known < 0)
            return -1;
        if (now == t->values[v].version)
            continue;
        if (t->values[v].version == UINT32_MAX) /* see koila__tape_set_real() */
            snprintf(how, sizeof how, "in place, by operators that met no lazy tensor, at first");
        else
            snprintf(how, sizeof how, "version %u, recorded at %u", now, t->values[v].version);
        return raise_stale_leaf(t, v, how);
    }
    const koila_value v =
        t->n_watches ? koila__written_behind(t, p->value_of, p->n_values) : KOILA_NONE;
    return v == KOILA_NONE
               ? 0
               : raise_stale_leaf(t, v,
                                  "through .data, numpy, DLPack or its storage, which its "
                                  "version counter does not show");
}

/* [(tensor, is it a batch?), ...] */
static PyObject *leaves_of(const koila__tape *t, const koila__part *p)
{
    PyObject *leaves = PyList_New(0);
    for (uint32_t i = 0; leaves && i < p->n_leaves; i++) {
        const koila_value v = p->leaf_from[i];
        if (!is_recorded_leaf(t, v) || !t->values[v].real)
            continue;
        const bool is_batch = koila_value_get(t->graph, v).leaf_kind == KOILA_LEAF_BATCH;
        PyObject *real = Py_NewRef(t->values[v].real); /* the collector may run Python */
        PyObject *pair = PyTuple_Pack(2, real, is_batch ? Py_True : Py_False);
        Py_DECREF(real);
        if (!pair || PyList_Append(leaves, pair) < 0)
            Py_CLEAR(leaves);
        Py_XDECREF(pair);
    }
    return leaves;
}

int koila__part_leaf_bytes(koila__tape *t, const koila__part *p, uint64_t *out)
{
    PyObject *leaves = leaves_of(t, p);
    PyObject *mine = leaves ? PyImport_ImportModule("koila._run") : NULL;
    PyObject *n = mine ? PyObject_CallMethod(mine, "held_bytes", "O", leaves) : NULL;
    if (n)
        *out = PyLong_AsUnsignedLongLong(n);
    Py_XDECREF(leaves);
    Py_XDECREF(mine);
    Py_XDECREF(n);
    return PyErr_Occurred() ? -1 : 0;
}
