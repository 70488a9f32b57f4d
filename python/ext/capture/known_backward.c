/* known_backward.c — a backward that was recorded before is not recorded again.
 *
 * A training loop records the same step again and again, and more than half of what is recorded is
 * the backward: torch's engine calls every operator of it, and each call comes here. What the
 * engine does is decided by what it finds:
 *
 *   the calls before it    all nodes and leaves of the tape, numbers and modes included
 *   the backward graph     its form, see backward_form.h, and which of its leaves is which
 *   the plain part         what was computed from plain tensors alone (a transposed weight,
 *                          embedded positions) is not on the tape: its nodes say what they saved
 *   the question           of which values, with which gradients, whether the graph is kept
 *
 * When all of that equals a backward that was recorded before, its nodes are copied to the tape,
 * the gradients are wrapped, and torch lets go of what its nodes saved, as its engine would have
 * done. All that follows is as always: what is run, and how, is decided from the graph alone.
 *
 * Whatever the comparison does not see makes a backward unknown, and it is recorded: hooks,
 * functions of Python (but for koila's own, of modules that run as they are), gradients of lazy
 * leaves, tensors written since they were recorded, modes (_known_backward.py). And only a backward
 * is remembered that did nothing but append nodes, and leaves that are views of leaves from before,
 * or of what plain nodes saved (the engine transposes a plain weight).
 *
 * A backward is looked at when the calls before it are seen for the second time: ever-new steps
 * cost nothing. It is a part of the graph of the tape in which it was recorded, which outlives that
 * tape. Ids of a graph are never given to others while it lives, see Note [Ids] in bounds.c.
 */
#include "capture/record.h"
#include "ground/accumulate.h"
#include "ground/backward_form.h"

/* One view between the storage of a gradient and the gradient. */
typedef struct view {
    koila_link link;
    koila_meta meta;
    int64_t offset; /* in the storage, elements */
    koila_value value;
} view;

typedef struct gradient {
    koila_value base; /* of its storage; KOILA_NONE: the leaf has no gradient */
    koila_meta base_meta;
    view *views; /* owned [n_views], from the storage on */
    uint32_t n_views;
} gradient;

/* A leaf that the backward added: a view of an earlier one, or of what a plain node saved. */
typedef struct leaf_view {
    koila_value value;
    koila_value of; /* KOILA_NONE: of saved[saved_at] */
    Py_ssize_t saved_at;
    int64_t offset; /* beyond that of the other one, elements */
} leaf_view;

/* What decides a backward, but for the calls before it and the form. */
typedef struct question {
    uint64_t hash; /* of the graph before it */
    uint32_t n_nodes, n_values;
    uint32_t mode; /* koila__call_mode(), and whether the graph is kept */
    /* owned [n_ends * 2 + n_leaves]: outputs, their gradients, leaves */
    koila_value *value;
    uint32_t n_ends, n_leaves;
    PyObject *plain; /* owned text of the plain part; NULL: there is none */
} question;

typedef struct known {
    uint32_t refs;
    question q;
    koila__form form;
    PyObject *saved; /* owned list of tensors, until it is remembered: what plain nodes saved */
    koila__recording *in; /* owned reference; NULL: not recorded yet */
    gradient *gradients;  /* owned [q.n_leaves] */
    leaf_view *leaves;    /* owned [n_leaves], by value */
    uint32_t n_leaves, n_nodes_after;
    uint64_t used;
} known;

enum { N_KNOWN = 16, N_SEEN = 256 };
static known *all[N_KNOWN];
static uint64_t seen[N_SEEN]; /* hashes of the calls before backwards, the last of each slot */
static uint64_t clock_of_uses;
static uint64_t n_copied; /* backwards that were known */
static bool doubts;       /* for tests: known ones are recorded too, and compared */

/* ---- what is remembered */

static void known_release(known *k)
{
    if (!k || --k->refs)
        return;
    if (k->in)
        koila__recording_release(k->in);
    koila__form_free(&k->form);
    Py_XDECREF(k->saved);
    for (uint32_t i = 0; i < k->q.n_leaves && k->gradients; i++)
        PyMem_Free(k->gradients[i].views);
    PyMem_Free(k->gradients);
    PyMem_Free(k->leaves);
    PyMem_Free(k->q.value);
    Py_XDECREF(k->q.plain);
    PyMem_Free(k);
}

static bool same_question(const question *a, const question *b)
{
    return a->hash == b->hash && a->n_nodes == b->n_nodes && a->n_values == b->n_values &&
           a->mode == b->mode && a->n_ends == b->n_ends && a->n_leaves == b->n_leaves &&
           memcmp(a->value, b->value, (2u * a->n_ends + a->n_leaves) * sizeof *a->value) == 0 &&
           !a->plain == !b->plain && (!a->plain || PyUnicode_Compare(a->plain, b->plain) == 0);
}

static known *find(const known *k, const koila_graph *g)
{
    for (uint32_t i = 0; i < N_KNOWN; i++) {
        known *other = all[i];
        if (other && same_question(&other->q, &k->q) && koila__form_equal(&other->form, &k->form) &&
            koila_graph_begin_alike(other->in->graph, g, k->q.n_nodes, k->q.n_values))
            return other;
    }
    return NULL;
}

/* ---- the question */

/* The value of lazy tensor `o` in t; KOILA_NONE: it has none there at the moment. */
static koila_value value_in(const koila__tape *t, PyObject *o)
{
    if (!koila__is_lazy(o))
        return KOILA_NONE;
    const koila__handle *h = koila__handle_of(o);
    return h && h->group->tape == t && h->gen == h->group->gen ? h->value : KOILA_NONE;
}

/* Adds the node that computed real tensor `t` to the list, unless it is one of autograd's leaves,
 * or the transpose of one, which every linear layer makes. 1; 0: torch does not tell it, for what t
 * is a view of was written since (by an optimizer, between two backwards of a tape); -1 + error */
static int add_plain_node(PyObject *t, PyObject *nodes)
{
    PyObject *node = koila__attribute(t, "grad_fn");
    int rc = node ? 1 : -1;
    if (!node && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        rc = 0;
    }
    if (node && node != Py_None && !koila__form_is_transpose(node) &&
        PyList_Append(nodes, node) < 0)
        rc = -1;
    Py_XDECREF(node);
    return rc;
}

/* *nodes: new list of the nodes that computed the tape's real leaves from plain tensors. 1; 0: they
 * cannot be told; -1 + error */
static int plain_nodes(const koila__tape *t, PyObject **nodes)
{
    *nodes = PyList_New(0);
    int rc = *nodes ? 1 : -1;
    const uint32_t n = koila_graph_n_values(t->graph);
    for (koila_value v = 0; v < n && rc > 0; v++)
        if (koila_value_get(t->graph, v).node == KOILA_NONE && t->values[v].real)
            rc = add_plain_node(t->values[v].real, *nodes);
    return rc;
}

/* What they compute: q->plain, and *saved, a new list of the tensors that they have saved, or NULL.
 * 1; 0: it cannot be told; -1 + error. */
static int ask_plain(question *q, const koila__tape *t, PyObject **saved)
{
    PyObject *nodes;
    int rc = plain_nodes(t, &nodes);
    if (rc > 0 && PyList_GET_SIZE(nodes)) {
        PyObject *told = koila__ask("plain_part", nodes, NULL, NULL);
        rc = told ? told != Py_None : -1;
        if (rc > 0 && !PyArg_ParseTuple(told, "UO!", &q->plain, &PyList_Type, saved))
            rc = -1;
        if (rc > 0) {
            Py_INCREF(q->plain);
            Py_INCREF(*saved);
        }
        Py_XDECREF(told);
    }
    Py_XDECREF(nodes);
    return rc;
}

/* The values of outputs, gradients and leaves into q. A leaf may have none: its transpose has. 1;
 * 0: an output or a gradient has none; -1 + error. */
static int ask_values(question *q, const koila__tape *t, PyObject *outputs, PyObject *gradients,
                      PyObject *leaves)
{
    q->n_ends = (uint32_t)PyTuple_GET_SIZE(outputs);
    q->n_leaves = (uint32_t)PyList_GET_SIZE(leaves);
    q->value = PyMem_Malloc((2u * q->n_ends + q->n_leaves) * sizeof *q->value);
    if (!q->value) {
        PyErr_NoMemory();
        return -1;
    }
    koila_value *v = q->value;
    for (uint32_t i = 0; i < q->n_ends; i++) {
        *v++ = value_in(t, PyTuple_GET_ITEM(outputs, i));
        *v++ = value_in(t, PyTuple_GET_ITEM(gradients, i));
    }
    for (uint32_t i = 0; i < q->n_leaves; i++) {
        if (koila__has_slot(PyList_GET_ITEM(leaves, i)))
            return 0; /* its hooks are called while the backward is recorded */
        *v++ = koila__tape_leaf_known(t, PyList_GET_ITEM(leaves, i));
    }
    for (uint32_t i = 0; i < 2 * q->n_ends; i++)
        if (q->value[i] == KOILA_NONE)
            return 0;
    return 1;
}

/* 1: k->q and k->form are what decides the backward; 0: nobody knows what does; -1 + error. */
static int ask(known *k, koila__tape *t, PyObject *outputs, PyObject *gradients, PyObject *leaves,
               bool retain, const koila__nodes *nodes)
{
    if (t->odd_backward || t->has_exit || t->planned)
        return 0;
    k->q.hash = koila_graph_hash(t->graph);
    k->q.n_nodes = koila_graph_n_nodes(t->graph);
    k->q.n_values = koila_graph_n_values(t->graph);
    k->q.mode = koila__call_mode() | (uint32_t)retain << 8;
    int rc = ask_values(&k->q, t, outputs, gradients, leaves);
    if (rc > 0)
        rc = ask_plain(&k->q, t, &k->saved);
    if (rc > 0)
        rc = koila__form_of(nodes, leaves, &k->form);
    /* a function that is copied does not know that its backward was run, as the next one must */
    return rc > 0 && retain && k->form.n_functions ? 0 : rc;
}

/* ---- copying */

/* Has the tensor of value v, if there is one, not been written since it was recorded? 1, 0; -1 +
 * error. */
static int is_unwritten(koila__tape *t, koila_value v)
{
    PyObject *real = t->values[v].real;
    uint32_t now;
    if (!real)
        return 1;
    if (koila__version_of(real, &now) < 0)
        return -1;
    return now == t->values[v].version && !(t->n_watches && koila__is_written_behind(t, v));
}

/* The same of all tensors that the nodes read. Else what a call does with them is another, or an
 * error. */
static int are_unwritten(koila__tape *t, const known *k)
{
    int rc = 1;
    for (uint32_t i = 0; i < k->n_leaves && rc > 0; i++)
        if (k->leaves[i].of != KOILA_NONE)
            rc = is_unwritten(t, k->leaves[i].of);
    for (koila_node n = k->q.n_nodes; n < k->n_nodes_after && rc > 0; n++) {
        const koila_value *in = koila_node_inputs(k->in->graph, n);
        const koila_sig_info *sig =
            koila_sig_get(koila__table, koila_node_get(k->in->graph, n).sig);
        for (uint32_t i = 0; i < sig->n_inputs && rc > 0; i++)
            if (in[i] < k->q.n_values)
                rc = is_unwritten(t, in[i]);
    }
    return rc;
}

/* The view of the earlier leaf, as the backward's operators see it. New; NULL + error */
static PyObject *view_of(PyObject *earlier, const koila_meta_info *m, int64_t offset)
{
    int64_t at;
    if (koila__storage_offset(earlier, &at) < 0)
        return NULL;
    PyObject *size = koila__ints_object(m->size, m->n_dims);
    PyObject *stride = size ? koila__ints_object(m->stride, m->n_dims) : NULL;
    PyObject *r = NULL;
    const bool grad = koila__grad_mode();
    if (stride && koila__set_grad_mode(false) == 0) {
        PyObject *name = koila__name("as_strided"), *from = PyLong_FromLongLong(at + offset);
        if (name && from)
            r = PyObject_CallMethodObjArgs(earlier, name, size, stride, from, NULL);
        Py_XDECREF(from);
        if (koila__set_grad_mode(grad) < 0)
            Py_CLEAR(r);
    }
    Py_XDECREF(size);
    Py_XDECREF(stride);
    return r;
}

static int copy_leaf(koila__tape *t, const known *k, const leaf_view *l, PyObject *saved)
{
    PyObject *other =
        l->of == KOILA_NONE ? PyList_GET_ITEM(saved, l->saved_at) : t->values[l->of].real;
    koila_meta meta = koila_value_get(k->in->graph, l->value).meta;
    PyObject *real = view_of(other, koila_meta_get(koila__table, meta), l->offset);
    const koila_value v = real ? koila__tape_leaf_real(t, real, &meta) : KOILA_NONE;
    Py_XDECREF(real);
    if (v != KOILA_NONE && v != l->value)
        koila__moved_meanwhile();
    return v == l->value ? 0 : -1;
}

static int copy_nodes(koila__tape *t, const known *k, PyObject *saved)
{
    const uint32_t line = koila__line_now(t);
    uint32_t i = 0;
    for (koila_node n = k->q.n_nodes; n < k->n_nodes_after; n++) {
        const koila_node_info info = koila_node_get(k->in->graph, n);
        koila_value first;
        for (; i < k->n_leaves && k->leaves[i].value < info.first_output; i++)
            if (copy_leaf(t, k, &k->leaves[i], saved) < 0)
                return -1;
        const koila_status s =
            koila_graph_node(t->graph, info.sig, koila_node_inputs(k->in->graph, n), line, &first);
        if (s) {
            koila__raise(s);
            return -1;
        }
        if (first != info.first_output) {
            koila__moved_meanwhile();
            return -1;
        }
    }
    return koila__tape_reserve(t);
}

/* The chain of views from the storage of g on; *failed: there is no memory. */
static koila__chain *chain_of(const gradient *g, uint32_t gen, bool *failed)
{
    koila__chain *c = NULL;
    for (uint32_t i = 0; i < g->n_views && !*failed; i++) {
        const view *v = &g->views[i];
        koila__chain *next = koila__chain_new(c, v->link, v->meta, v->offset, gen, v->value);
        *failed = !next;
        if (next) {
            next->refs++;
            koila__chain_release(c); /* `next` has it */
            c = next;
        }
    }
    return c;
}

static PyObject *wrap(koila__tape *t, const gradient *g, koila__group *group)
{
    bool failed = false;
    koila__chain *c = chain_of(g, group->gen, &failed);
    const view *last = g->n_views ? &g->views[g->n_views - 1] : NULL;
    PyObject *w = NULL;
    if (!failed)
        w = koila__wrapper_new(group, c, last ? last->value : g->base,
                               last ? last->meta : g->base_meta, last ? last->offset : 0);
    koila__chain_release(c);
    return w;
}

/* The group of gradient i, as that of an earlier one with the same storage, or new. NULL + error */
static koila__group *group_for(koila__tape *t, const known *k, uint32_t i, PyObject *wrapped)
{
    for (uint32_t j = 0; j < i; j++)
        if (k->gradients[j].base == k->gradients[i].base)
            return koila__handle_of(PyList_GET_ITEM(wrapped, j))->group;
    return koila__group_new(t, k->gradients[i].base, k->gradients[i].base_meta);
}

/* New list of the gradients of the leaves. */
static PyObject *wrap_all(koila__tape *t, const known *k)
{
    PyObject *r = PyList_New(0);
    for (uint32_t i = 0; i < k->q.n_leaves && r; i++) {
        const gradient *g = &k->gradients[i];
        PyObject *w = Py_None;
        if (g->base == KOILA_NONE) {
            Py_INCREF(w);
        } else {
            koila__group *group = group_for(t, k, i, r);
            w = group ? wrap(t, g, group) : NULL;
            if (!w && group && !group->refs)
                koila__group_free(group);
        }
        if (!w || PyList_Append(r, w) < 0)
            Py_CLEAR(r);
        Py_XDECREF(w);
    }
    return r;
}

/* The nodes that make the gradients into t. saved: what plain nodes saved in this step, or NULL. 1;
 * 0: a tensor was written; -1 + error */
static int copy(koila__tape *t, const known *k, PyObject *saved)
{
    const int unwritten = are_unwritten(t, k);
    return unwritten > 0 && copy_nodes(t, k, saved) < 0 ? -1 : unwritten;
}

/* The backward is over, but for its run. */
static void copied(const known *k, const koila__nodes *nodes)
{
    if (!(k->q.mode >> 8))
        koila__form_release(nodes);
    n_copied++;
}

static void gradients_dealloc(koila__known_gradients *g)
{
    PyMem_Free(g->value);
    Py_XDECREF((PyObject *)g->tape);
    PyObject_Free(g);
}

PyTypeObject koila__known_gradients_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.KnownGradients",
    .tp_basicsize = sizeof(koila__known_gradients),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)gradients_dealloc,
    .tp_doc = "Gradients of a backward that was recorded before, which no tensor stands for.",
};

/* Those of the leaves that have one. */
static koila__known_gradients *gradients_new(koila__tape *t, const known *k)
{
    koila__known_gradients *g = PyObject_New(koila__known_gradients, &koila__known_gradients_type);
    if (!g)
        return NULL;
    g->tape = (koila__tape *)Py_NewRef((PyObject *)t);
    g->n = 0;
    g->value = PyMem_Malloc((2u * k->q.n_leaves + 1) * sizeof *g->value);
    if (!g->value) {
        Py_DECREF(g);
        PyErr_NoMemory();
        return NULL;
    }
    for (uint32_t i = 0; i < k->q.n_leaves; i++) {
        const gradient *of = &k->gradients[i];
        if (of->base == KOILA_NONE)
            continue;
        g->value[2 * g->n] = of->n_views ? of->views[of->n_views - 1].value : of->base;
        g->value[2 * g->n + 1] = of->base;
        g->n++;
    }
    return g;
}

/* ---- remembering */

/* What must not have changed while a backward was recorded, if it did nothing but append nodes. */
typedef struct side_effects {
    uint32_t n_effects, n_random, n_reads, n_axes;
    Py_ssize_t n_early;
    bool has_exit, odd_backward, closed;
} side_effects;

/* A backward that is recorded: what backward_known() gives and backward_remember() takes. */
typedef struct pending {
    PyObject_HEAD
    koila__tape *tape; /* owned */
    known *k;          /* owned */
    known *twin;       /* owned; with `doubts`: this one should come out */
    side_effects before;
} pending;

static side_effects side_effects_of(const koila__tape *t)
{
    return (side_effects){ .n_effects = t->n_effects,
                           .n_random = t->n_random,
                           .n_reads = t->kept.n_reads,
                           .n_axes = t->n_axis_ids,
                           .n_early = t->early ? PyList_GET_SIZE(t->early) : 0,
                           .has_exit = t->has_exit,
                           .odd_backward = t->odd_backward,
                           .closed = t->closed };
}

static bool only_appended(const pending *p)
{
    const side_effects a = p->before, b = side_effects_of(p->tape);
    if (a.n_effects != b.n_effects || a.n_random != b.n_random || a.n_reads != b.n_reads ||
        a.n_axes != b.n_axes || a.n_early != b.n_early || a.has_exit != b.has_exit ||
        a.odd_backward != b.odd_backward || a.closed != b.closed)
        return false;
    const koila_graph *g = p->tape->graph;
    for (koila_node n = p->k->q.n_nodes; n < koila_graph_n_nodes(g); n++)
        if (koila_sig_get(koila__table, koila_node_get(g, n).sig)->n_writes)
            return false;
    return true;
}

/* Does `other` have the memory of `real`, and elements as wide? */
static bool shares(PyObject *other, PyObject *real, koila_dtype dtype)
{
    koila_meta m;
    const void *storage = koila__storage_of(real);
    return storage && koila__storage_of(other) == storage && koila__meta_of(other, &m) == 0 &&
           koila_meta_get(koila__table, m)->dtype == dtype;
}

/* The tensor that `real`, a leaf which the backward has added, is a view of, borrowed; l says which
 * it is. NULL: there is none. */
static PyObject *find_source(leaf_view *l, const pending *p, PyObject *real)
{
    const koila__tape *t = p->tape;
    const koila_meta meta = koila_value_get(t->graph, l->value).meta;
    const koila_dtype dtype = koila_meta_get(koila__table, meta)->dtype;
    for (koila_value v = 0; v < p->k->q.n_values; v++) {
        const koila_value_info info = koila_value_get(t->graph, v);
        if (info.node == KOILA_NONE && info.leaf_kind == KOILA_LEAF_REAL && t->values[v].real &&
            shares(t->values[v].real, real, dtype)) {
            l->of = v;
            return t->values[v].real;
        }
    }
    const Py_ssize_t n_saved = p->k->saved ? PyList_GET_SIZE(p->k->saved) : 0;
    for (l->saved_at = 0; l->saved_at < n_saved; l->saved_at++) {
        PyObject *saved = PyList_GET_ITEM(p->k->saved, l->saved_at);
        if (shares(saved, real, dtype))
            return saved;
    }
    return NULL;
}

/* Leaf v, which the backward has added, into *l. false: it is no view of what is known. */
static bool describe_leaf(leaf_view *l, const pending *p, koila_value v)
{
    PyObject *real = p->tape->values[v].real;
    int64_t at, from;
    *l = (leaf_view){ .value = v, .of = KOILA_NONE };
    PyObject *source = real ? find_source(l, p, real) : NULL;
    if (!source || koila__storage_offset(real, &at) < 0 ||
        koila__storage_offset(source, &from) < 0) {
        PyErr_Clear();
        return false;
    }
    l->offset = at - from;
    return true;
}

static bool describe_leaves(const pending *p)
{
    const koila_graph *g = p->tape->graph;
    known *k = p->k;
    for (koila_value v = k->q.n_values; v < koila_graph_n_values(g); v++)
        k->n_leaves += koila_value_get(g, v).node == KOILA_NONE;
    k->leaves = PyMem_Malloc((k->n_leaves + 1) * sizeof *k->leaves);
    if (!k->leaves)
        return false;
    uint32_t i = 0;
    for (koila_value v = k->q.n_values; v < koila_graph_n_values(g); v++)
        if (koila_value_get(g, v).node == KOILA_NONE && !describe_leaf(&k->leaves[i++], p, v))
            return false;
    return true;
}

/* Gradient `o` into *g. false: it is more than a new value, or a view of one. */
static bool describe(gradient *g, const pending *p, PyObject *o)
{
    *g = (gradient){ .base = KOILA_NONE };
    if (o == Py_None)
        return true;
    const koila_value v = value_in(p->tape, o);
    const koila__handle *h = v == KOILA_NONE ? NULL : koila__handle_of(o);
    if (!h || h->group->gen != 1 || h->group->factory || h->group->cur < p->k->q.n_values)
        return false;
    g->n_views = h->chain ? h->chain->n_links : 0;
    g->views = PyMem_Malloc((g->n_views ? g->n_views : 1) * sizeof *g->views);
    if (!g->views)
        return false;
    uint32_t i = g->n_views;
    for (const koila__chain *c = h->chain; c; c = c->parent) {
        if (c->memo_gen != 1 || c->memo == KOILA_NONE)
            return false;
        g->views[--i] = (view){ c->link, c->meta, c->offset, c->memo };
    }
    g->base = h->group->cur;
    g->base_meta = h->group->meta;
    return true;
}

static bool describe_all(const pending *p, PyObject *gradients)
{
    known *k = p->k;
    k->gradients = PyMem_Calloc(k->q.n_leaves + 1, sizeof *k->gradients);
    if (!k->gradients || PySequence_Fast_GET_SIZE(gradients) != k->q.n_leaves)
        return false;
    for (uint32_t i = 0; i < k->q.n_leaves; i++)
        if (!describe(&k->gradients[i], p, PySequence_Fast_GET_ITEM(gradients, i)))
            return false;
    return true;
}

static void put(known *k)
{
    known **slot = &all[0];
    for (uint32_t i = 0; i < N_KNOWN && *slot; i++)
        if (!all[i] || all[i]->used < (*slot)->used)
            slot = &all[i];
    known_release(*slot);
    *slot = k;
    k->used = ++clock_of_uses;
}

/* With `doubts`: did the recorded backward come out as it was remembered? -1 + error */
static int compare(const pending *p)
{
    const koila_graph *g = p->tape->graph;
    const known *k = p->k, *twin = p->twin;
    bool same =
        koila_graph_n_nodes(g) == twin->n_nodes_after &&
        koila_graph_begin_alike(twin->in->graph, g, twin->n_nodes_after, koila_graph_n_values(g));
    for (uint32_t i = 0; i < k->q.n_leaves && same; i++) {
        const gradient *a = &k->gradients[i], *b = &twin->gradients[i];
        same = a->base == b->base && a->n_views == b->n_views;
        for (uint32_t j = 0; j < a->n_views && same; j++)
            same =
                a->views[j].value == b->views[j].value && a->views[j].offset == b->views[j].offset;
    }
    n_copied += same;
    if (same)
        return 0;
    PyErr_SetString(PyExc_AssertionError,
                    "koila: a backward that seemed to be known came out otherwise");
    return -1;
}

static void pending_dealloc(pending *p)
{
    known_release(p->k);
    known_release(p->twin);
    Py_XDECREF((PyObject *)p->tape);
    PyObject_Free(p);
}

static PyTypeObject pending_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.PendingBackward",
    .tp_basicsize = sizeof(pending),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)pending_dealloc,
    .tp_doc = "A backward that is recorded now, and may be known the next time.",
};

/* backward_remember(what backward_known() gave, [gradient, ...]) */
static PyObject *py_remember(PyObject *module, PyObject *args)
{
    PyObject *of, *given;
    if (!PyArg_ParseTuple(args, "O!O", &pending_type, &of, &given))
        return NULL;
    pending *p = (pending *)of;
    PyObject *gradients = PySequence_Fast(given, "backward_remember(): a sequence of gradients");
    if (!gradients)
        return NULL;
    bool good = p->k && only_appended(p) && describe_leaves(p) && describe_all(p, gradients);
    Py_DECREF(gradients);
    if (p->twin) {
        if (!good) {
            PyErr_SetString(PyExc_AssertionError,
                            "koila: a known backward did more than append nodes");
            return NULL;
        }
        if (compare(p) < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    if (good)
        p->k->in = koila__tape_recording(p->tape);
    if (good && p->k->in) {
        Py_CLEAR(p->k->saved);
        p->k->n_nodes_after = koila_graph_n_nodes(p->tape->graph);
        put(p->k);
        p->k = NULL;
    }
    Py_RETURN_NONE;
}

/* ---- the answer */

/* Takes k and twin over. */
static PyObject *new_pending(koila__tape *t, known *k, known *twin)
{
    pending *p = PyObject_New(pending, &pending_type);
    if (!p) {
        known_release(k);
        known_release(twin);
        return NULL;
    }
    p->tape = (koila__tape *)Py_NewRef((PyObject *)t);
    p->k = k;
    p->twin = twin;
    p->before = side_effects_of(t);
    return (PyObject *)p;
}

/* The nodes that made the outputs. 1; 0: not known, -1 + error */
static int nodes_behind(PyObject *outputs, koila__nodes *nodes)
{
    const Py_ssize_t n = PyTuple_GET_SIZE(outputs);
    PyObject *roots = PyTuple_New(n);
    int rc = roots ? 1 : -1;
    for (Py_ssize_t i = 0; i < n && rc > 0; i++) {
        PyObject *node = koila__attribute(PyTuple_GET_ITEM(outputs, i), "grad_fn");
        rc = node ? node != Py_None : -1;
        if (node)
            PyTuple_SET_ITEM(roots, i, node);
    }
    if (rc > 0)
        rc = koila__nodes_behind(PySequence_Fast_ITEMS(roots), n, nodes);
    Py_XDECREF(roots);
    return rc;
}

/* The slot for the calls of the tape: it holds their hash if they were made before, in an earlier
 * step. */
static uint64_t *slot_of(const koila__tape *t)
{
    return &seen[(koila_graph_hash(t->graph) >> 32) % N_SEEN];
}

/* Were they? From now on they were. */
static bool is_seen(const koila__tape *t)
{
    uint64_t *slot = slot_of(t);
    const bool yes = *slot == koila_graph_hash(t->graph);
    *slot = koila_graph_hash(t->graph);
    return yes;
}

static known *new_known(void)
{
    known *k = PyMem_Calloc(1, sizeof *k);
    if (k)
        k->refs = 1;
    else
        PyErr_NoMemory();
    return k;
}

/* The gradients that `same` gives, where k is what was asked. NULL without an error: a tensor was
 * written. */
static PyObject *copy_of(koila__tape *t, known *same, const known *k, const koila__nodes *nodes)
{
    same->refs++; /* Python may run, and others be remembered */
    same->used = ++clock_of_uses;
    PyObject *r = copy(t, same, k->saved) > 0 ? wrap_all(t, same) : NULL;
    if (r)
        copied(same, nodes);
    known_release(same);
    return r;
}

/* Are all of these plain tensors that want a gradient, and that nobody watches? */
static bool are_plain_ends(PyObject *leaves)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaves); i++) {
        PyObject *leaf = PyList_GET_ITEM(leaves, i);
        if (koila__is_lazy(leaf) || !koila__requires_grad(leaf) || koila__leaf_has_hooks(leaf))
            return false;
    }
    return true;
}

/* Asks into k for the gradients of *leaves, and finds what is known of that: *same, or NULL.
 * *leaves NULL: all leaves, of which a new list is made, and which must be plain ends. 0: it cannot
 * be known; -1 + error */
static int look_up(known *k, koila__tape *t, PyObject *outputs, PyObject *gradients,
                   PyObject **leaves, bool retain, koila__nodes *nodes, known **same)
{
    int rc = nodes_behind(outputs, nodes);
    if (rc > 0 && !*leaves) {
        *leaves = koila__leaves_of(nodes);
        rc = *leaves ? are_plain_ends(*leaves) : -1;
    }
    if (rc > 0)
        rc = ask(k, t, outputs, gradients, *leaves, retain, nodes);
    *same = rc > 0 ? find(k, t->graph) : NULL;
    return rc;
}

/* The gradients, what backward_remember() takes, or None; t is entered. */
static PyObject *answer(koila__tape *t, PyObject *outputs, PyObject *gradients, PyObject *leaves,
                        bool retain)
{
    if (!is_seen(t))
        Py_RETURN_NONE;
    known *k = new_known();
    if (!k)
        return NULL;
    koila__nodes nodes = { 0 };
    known *same;
    const int rc = look_up(k, t, outputs, gradients, &leaves, retain, &nodes, &same);
    PyObject *r = NULL;
    if (same && !doubts) {
        r = copy_of(t, same, k, &nodes);
    } else if (rc > 0) {
        k->refs++;
        if (same)
            same->refs++;
        r = new_pending(t, k, same);
    }
    koila__nodes_free(&nodes);
    known_release(k);
    return r || PyErr_Occurred() ? r : Py_NewRef(Py_None);
}

/* Takes the leaves out that have no gradient. */
static int drop_absent(PyObject *leaves, const known *k)
{
    for (Py_ssize_t i = k->q.n_leaves; i-- > 0;)
        if (k->gradients[i].base == KOILA_NONE && PyList_SetSlice(leaves, i, i + 1, NULL) < 0)
            return -1;
    return 0;
}

static bool has_gradients(const known *k)
{
    for (uint32_t i = 0; i < k->q.n_leaves; i++)
        if (k->gradients[i].base != KOILA_NONE)
            return true;
    return false;
}

/* (leaves, gradients) that `same` gives; leaves without one are taken out of the list. NULL without
 * an error: a tensor was written. */
static PyObject *copy_at_once(koila__tape *t, known *same, const known *k,
                              const koila__nodes *nodes, PyObject *leaves)
{
    same->refs++; /* Python may run, and others be remembered */
    same->used = ++clock_of_uses;
    koila__known_gradients *g = copy(t, same, k->saved) > 0 ? gradients_new(t, same) : NULL;
    PyObject *r = NULL;
    if (g && drop_absent(leaves, same) == 0)
        r = PyTuple_Pack(2, leaves, (PyObject *)g);
    if (r)
        copied(same, nodes);
    Py_XDECREF((PyObject *)g);
    known_release(same);
    return r;
}

/* answer() of a backward to all leaves, where it is known: (leaves, gradients). Else None, and
 * nothing has changed. */
static PyObject *answer_at_once(koila__tape *t, PyObject *outputs, PyObject *gradients, bool retain)
{
    if (doubts || *slot_of(t) != koila_graph_hash(t->graph))
        Py_RETURN_NONE;
    known *k = new_known();
    if (!k)
        return NULL;
    koila__nodes nodes = { 0 };
    known *same;
    PyObject *leaves = NULL;
    (void)look_up(k, t, outputs, gradients, &leaves, retain, &nodes, &same);
    PyObject *r = NULL;
    if (same && has_gradients(same))
        r = copy_at_once(t, same, k, &nodes, leaves);
    Py_XDECREF(leaves);
    koila__nodes_free(&nodes);
    known_release(k);
    return r || PyErr_Occurred() ? r : Py_NewRef(Py_None);
}

/* saved_hooks(True): from now on, until the matching call with False, what autograd saves goes
 * through functions of the user's, which a backward calls again. */
static PyObject *py_saved_hooks(PyObject *module, PyObject *begins)
{
    if (begins == Py_True)
        koila__n_saved_hooks++;
    else if (koila__n_saved_hooks)
        koila__n_saved_hooks--;
    koila__tape *t = koila__tape_open();
    if (t)
        t->odd_backward = true;
    Py_RETURN_NONE;
}

/* replace_method(class of C's, name, function): classes of C refuse setattr(). */
static PyObject *py_replace_method(PyObject *module, PyObject *args)
{
    PyTypeObject *type;
    PyObject *name, *f;
    if (!PyArg_ParseTuple(args, "O!UO", &PyType_Type, &type, &name, &f) ||
        PyDict_SetItem(type->tp_dict, name, f) < 0)
        return NULL;
    PyType_Modified(type);
    Py_RETURN_NONE;
}

/* What answer(), or without leaves answer_at_once(), gives for a backward in the tape of the first
 * output. */
static PyObject *answer_in_tape(PyObject *outputs, PyObject *gradients, PyObject *leaves,
                                bool retain)
{
    PyObject *first = PyTuple_GET_SIZE(outputs) ? PyTuple_GET_ITEM(outputs, 0) : Py_None;
    if (!koila__forms_known() || !koila__is_lazy(first) ||
        PyTuple_GET_SIZE(outputs) != PyTuple_GET_SIZE(gradients))
        Py_RETURN_NONE;
    koila__handle *h = koila__handle_of(first);
    if (!h)
        Py_RETURN_NONE;
    koila__tape *t = (koila__tape *)Py_NewRef((PyObject *)h->group->tape);
    PyObject *r = NULL;
    if (koila__tape_enter(t) == 0) {
        r = leaves ? answer(t, outputs, gradients, leaves, retain)
                   : answer_at_once(t, outputs, gradients, retain);
        koila__tape_leave(t);
    }
    Py_DECREF((PyObject *)t);
    return r;
}

/* backward_known((output, ...), (its gradient, ...), [leaf, ...], is the graph kept?) */
static PyObject *py_known(PyObject *module, PyObject *args)
{
    PyObject *outputs, *gradients, *leaves;
    int retain;
    if (!PyArg_ParseTuple(args, "O!O!O!p", &PyTuple_Type, &outputs, &PyTuple_Type, &gradients,
                          &PyList_Type, &leaves, &retain))
        return NULL;
    return answer_in_tape(outputs, gradients, leaves, retain != 0);
}

/* backward_at_once((output, ...), (its gradient, ...), is the graph kept?) */
static PyObject *py_at_once(PyObject *module, PyObject *args)
{
    PyObject *outputs, *gradients;
    int retain;
    if (!PyArg_ParseTuple(args, "O!O!p", &PyTuple_Type, &outputs, &PyTuple_Type, &gradients,
                          &retain))
        return NULL;
    return answer_in_tape(outputs, gradients, NULL, retain != 0);
}

static void forget_all(void)
{
    for (uint32_t i = 0; i < N_KNOWN; i++) {
        known *k = all[i];
        all[i] = NULL;
        known_release(k);
    }
    memset(seen, 0, sizeof seen);
}

/* backwards_doubted(bool): forgets all; while true, known ones are recorded too, and compared. */
static PyObject *py_doubted(PyObject *module, PyObject *on)
{
    const int yes = PyObject_IsTrue(on);
    if (yes < 0)
        return NULL;
    forget_all();
    doubts = yes;
    Py_RETURN_NONE;
}

static PyObject *py_n_copied(PyObject *module, PyObject *none)
{
    return PyLong_FromUnsignedLongLong(n_copied);
}

static PyMethodDef methods[] = {
    { "backward_known", py_known, METH_VARARGS,
      "backward_known((output, ...), (its gradient, ...), [leaf, ...], retain) -> the gradients of "
      "a backward that was recorded before, as a list; what backward_remember() takes; or None: "
      "it cannot be known" },
    { "backward_at_once", py_at_once, METH_VARARGS,
      "backward_at_once((output, ...), (its gradient, ...), retain) -> ([leaf, ...], what "
      "run_known() takes) of a backward that was recorded before, where all leaves are plain "
      "tensors without hooks; else None, and nothing has changed" },
    { "backward_remember", py_remember, METH_VARARGS,
      "backward_remember(what backward_known() gave, gradients of the leaves)" },
    { "saved_hooks", py_saved_hooks, METH_O,
      "saved_hooks(bool): from now on, or no longer, what autograd saves goes through the user's "
      "functions" },
    { "replace_method", py_replace_method, METH_VARARGS,
      "replace_method(class of C's, name, function)" },
    { "backwards_doubted", py_doubted, METH_O,
      "backwards_doubted(bool): for tests. Forgets all; while true, known backwards are recorded "
      "too, and AssertionError says where they differ" },
    { "n_backwards_copied", py_n_copied, METH_NOARGS,
      "n_backwards_copied() -> backwards that were known, so far" },
    { 0 },
};

int koila__known_backward_add(PyObject *m)
{
    if (PyType_Ready(&pending_type) < 0 || PyType_Ready(&koila__known_gradients_type) < 0)
        return -1;
    return PyModule_AddFunctions(m, methods);
}
