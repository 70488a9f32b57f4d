/* part.c — extracts the part of a tape that makes some targets: a graph of its own, whose leaves
 * are the values concrete by now, with maps back to the tape. */
#include "run/run.h"

void koila__part_free(koila__part *p)
{
    koila_graph_free(p->graph);
    PyMem_Free(p->value_of);
    PyMem_Free(p->node_from);
    PyMem_Free(p->targets);
    *p = (koila__part){ 0 };
}

/* What is still held when a planned step ends lives until then. Where there is no memory for that,
 * predictions are less exact. */
static void tell_held(const koila__tape *t, const koila__part *p)
{
    for (const koila__handle *h = t->handles; h; h = h->next_in_tape) {
        const koila_value v = p->value_of[h->group->cur];
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
    const uint32_t n = p->n_values;
    uintptr_t *address = PyMem_Calloc(n + 1, sizeof *address);
    for (koila_value v = 0; address && v < n; v++) {
        uint64_t bytes = 0;
        uint32_t first = 0;
        if (p->value_of[v] == KOILA_NONE || !t->values[v].real)
            continue;
        PyObject *real = Py_NewRef(t->values[v].real); /* a class of the user's may run Python */
        address[v] = storage_of(real, &bytes);
        Py_DECREF(real);
        if (!address[v])
            continue;
        while (address[first] != address[v])
            first++;
        (void)koila_graph_stored(p->graph, p->value_of[v], first, bytes);
    }
    PyMem_Free(address);
}

int koila__part_make(koila__tape *t, const koila_value *targets, uint32_t n, koila__part *out)
{
    const uint32_t n_values = koila_graph_n_values(t->graph);
    const uint32_t n_nodes = koila_graph_n_nodes(t->graph);
    uint8_t *known = PyMem_Calloc(n_values + 1, 1);
    *out = (koila__part){ .value_of = PyMem_Malloc((n_values + 1) * sizeof *out->value_of),
                          .node_from = PyMem_Malloc((n_nodes + 1) * sizeof *out->node_from),
                          .targets = PyMem_Malloc((n + 1) * sizeof *out->targets),
                          .n_values = n_values };
    koila_status status = KOILA_NO_MEMORY;
    if (out->value_of && out->node_from && out->targets && known) {
        for (uint32_t v = 0; v < n_values; v++)
            known[v] = t->values[v].real != NULL;
        status = koila_graph_extract(t->graph, targets, n, known, NULL, &out->graph, out->value_of,
                                     out->node_from);
    }
    PyMem_Free(known);
    if (status != KOILA_OK) {
        koila__part_free(out);
        koila__raise(status);
        return -1;
    }
    if (t->planned) {
        tell_held(t, out);
        tell_storages(t, out);
    }
    for (uint32_t i = 0; i < n; i++) {
        out->targets[i] = out->value_of[targets[i]];
        koila_assert(out->targets[i] != KOILA_NONE);
    }
    return 0;
}

koila_graph *koila__part_give(koila__part *p)
{
    koila_graph *graph = p->graph;
    p->graph = NULL;
    return graph;
}

/* Is value v of the tape a recorded leaf, and also in the part? */
static bool is_recorded_leaf(const koila__tape *t, const koila__part *p, koila_value v)
{
    return p->value_of[v] != KOILA_NONE && t->values[v].real &&
           koila_value_get(t->graph, v).node == KOILA_NONE;
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
    for (koila_value v = 0; v < p->n_values; v++) {
        uint32_t now;
        char how[80];
        if (p->value_of[v] == KOILA_NONE || !t->values[v].real)
            continue;
        PyObject *real = Py_NewRef(t->values[v].real); /* a class of the user's may run Python */
        const int known = koila__version_of(real, &now);
        Py_DECREF(real);
        if (known < 0)
            return -1;
        if (now == t->values[v].version)
            continue;
        snprintf(how, sizeof how, "version %u, recorded at %u", now, t->values[v].version);
        return raise_stale_leaf(t, v, how);
    }
    const koila_value v = t->n_watches ? koila__written_behind(t, p->value_of) : KOILA_NONE;
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
    for (koila_value v = 0; leaves && v < p->n_values; v++) {
        if (!is_recorded_leaf(t, p, v))
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
