/* capture_module.c — the functions of koila._core that Python calls on lazy tensors, tapes and the
 * memo. */
#include "ground/random.h"
#include "capture/executor.h"
#include "capture/record.h"

static koila__handle *handle_arg(PyObject *o)
{
    if (!koila__lazy_class || !koila__is_lazy(o)) {
        PyErr_Format(PyExc_TypeError, "expected a LazyTensor, got %s", Py_TYPE(o)->tp_name);
        return NULL;
    }
    koila__handle *h = koila__handle_of(o);
    if (!h)
        PyErr_SetString(PyExc_RuntimeError, "koila: this lazy tensor has no value yet");
    return h;
}

static PyObject *py_setup(PyObject *module, PyObject *args)
{
    PyObject *lazy_class;
    int owners_show;
    if (!PyArg_ParseTuple(args, "Op", &lazy_class, &owners_show))
        return NULL;
    PyObject *torch = PyImport_ImportModule("torch");
    const bool ok = torch && koila__real_setup(torch) == 0 &&
                    koila__wrapper_setup(torch, lazy_class) == 0 && koila__whose_setup() == 0;
    Py_XDECREF(torch);
    if (!ok)
        return NULL;
    koila__owners_show = owners_show;
    Py_RETURN_NONE;
}

/* wrapper_pair((dtype, device, sizes, strides, offset)) */
static PyObject *py_wrapper_pair(PyObject *module, PyObject *tuple)
{
    koila_meta meta;
    int64_t offset;
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 5) {
        PyErr_SetString(PyExc_TypeError, "wrapper_pair((dtype, device, sizes, strides, offset))");
        return NULL;
    }
    koila__hold_ids();
    PyObject *r =
        koila__meta_from(tuple, &meta, &offset) < 0 ? NULL : koila__wrapper_pair(meta, offset);
    koila__release_ids();
    return r;
}

static PyObject *py_learn_keys(PyObject *module, PyObject *args)
{
    PyObject *lazy, *made;
    unsigned long long lazy_keys, made_keys;
    if (!PyArg_ParseTuple(args, "O!KO!K", koila__lazy_class, &lazy, &lazy_keys, koila__lazy_class,
                          &made, &made_keys))
        return NULL;
    return PyBool_FromLong(koila__learn_keys(lazy, lazy_keys, made, made_keys));
}

static PyObject *py_wrap_by_parts(PyObject *module, PyObject *on)
{
    const int v = PyObject_IsTrue(on);
    if (v < 0)
        return NULL;
    const bool old = koila__by_parts;
    koila__by_parts = v;
    return PyBool_FromLong(old);
}

static PyObject *py_tape_open(PyObject *module, PyObject *unused)
{
    return Py_XNewRef((PyObject *)koila__tape_current());
}
static PyObject *py_current_tape(PyObject *module, PyObject *unused)
{
    koila__tape *t = koila__tape_open();
    return Py_NewRef(t ? (PyObject *)t : Py_None);
}

static PyObject *py_axis(PyObject *module, PyObject *arg)
{
    const long long size = PyLong_AsLongLong(arg);
    if (size == -1 && PyErr_Occurred())
        return NULL;
    if (size < 0) {
        PyErr_SetString(PyExc_ValueError, "axis(): the size must be at least 0");
        return NULL;
    }
    koila__forget_when_due();
    koila__tape *t = koila__tape_for_lazy();
    uint16_t axis;
    if (!t || koila__tape_axis(t, 0, size, &axis) < 0)
        return NULL;
    t->waiting = true;
    return PyLong_FromUnsignedLong(axis);
}

/* Before the first lazy tensor: guards the functions through which plain tensors meet lazy data. */
static int guard_doors(void)
{
    static bool guarded;
    if (guarded)
        return 0;
    PyObject *done = koila__ask("install", NULL, NULL, NULL);
    guarded = done != NULL;
    Py_XDECREF(done);
    return guarded ? 0 : -1;
}

/* Reads the axis of dimension `dim` from axis_arg; None: none. -1 + error. */
static int read_axis(const koila__tape *t, koila_meta meta, PyObject *axis_arg, uint32_t dim,
                     uint16_t *axis)
{
    *axis = 0;
    if (axis_arg == Py_None)
        return 0;
    const unsigned long given = PyLong_AsUnsignedLong(axis_arg);
    if (PyErr_Occurred())
        return -1;
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    if (given >= koila_graph_n_axes(t->graph) || dim >= m->n_dims ||
        m->size[dim] != koila_graph_axis_size(t->graph, (uint16_t)given)) {
        PyErr_SetString(PyExc_ValueError, "lazy_leaf(): the tensor has no such axis");
        return -1;
    }
    *axis = (uint16_t)given;
    return 0;
}

/* A new lazy tensor for value v. It requires a gradient if `real` does. */
static PyObject *wrap_leaf(koila__tape *t, koila_value v, koila_meta meta, PyObject *real)
{
    koila__group *g = koila__group_new(t, v, meta);
    if (!g)
        return NULL;
    PyObject *w = koila__wrapper_new(g, NULL, v, meta, 0);
    if (!w) {
        koila__group_free(g);
        return NULL;
    }
    int64_t offset;
    if (koila__storage_offset(real, &offset) < 0) {
        Py_DECREF(w);
        return NULL;
    }
    g->begins_within = offset != 0;
    g->given_at = koila__memory_of(real);
    if (koila__requires_grad(real) && PyObject_SetAttrString(w, "requires_grad", Py_True) < 0)
        Py_CLEAR(w);
    return w;
}

static PyObject *make_leaf(PyObject *real, PyObject *axis_arg, unsigned dim)
{
    if (!koila__lazy_class || !koila__is_tensor(real) || koila__is_lazy(real)) {
        PyErr_SetString(PyExc_TypeError, "lazy_leaf() takes a plain tensor");
        return NULL;
    }
    if (guard_doors() < 0)
        return NULL;
    if (Py_TYPE(real) != koila__lazy_class->tp_base) {
        PyObject *ok = koila__ask("check_type", Py_None, (PyObject *)Py_TYPE(real), NULL);
        if (!ok)
            return NULL;
        Py_DECREF(ok);
    }
    koila__tape *t = koila__tape_current();
    koila_meta meta;
    uint16_t axis;
    if (!t || koila__meta_of(real, &meta) < 0 || read_axis(t, meta, axis_arg, dim, &axis) < 0)
        return NULL;
    const bool batched = axis_arg != Py_None;
    const koila_value v = koila__tape_leaf_new(
        t, real, meta, batched ? KOILA_LEAF_BATCH : KOILA_LEAF_REAL, axis, dim);
    PyObject *w = v == KOILA_NONE ? NULL : wrap_leaf(t, v, meta, real);
    if (!w)
        return NULL;
    t->waiting = false;
    if (batched)
        koila__factories_step(t, meta);
    return w;
}

/* lazy_leaf(tensor, axis, dim): axis None: not batched */
static PyObject *py_lazy_leaf(PyObject *module, PyObject *args)
{
    PyObject *real, *axis_arg;
    unsigned dim = 0;
    if (!PyArg_ParseTuple(args, "OO|I", &real, &axis_arg, &dim))
        return NULL;
    koila__hold_ids();
    PyObject *r = make_leaf(real, axis_arg, dim);
    koila__release_ids();
    return r;
}

static PyObject *py_is_conjugated(PyObject *module, PyObject *o)
{
    const koila__handle *h = koila__lazy_class && koila__is_lazy(o) ? koila__handle_of(o) : NULL;
    return PyBool_FromLong(h && koila__chain_conjugated(h->chain));
}

static PyObject *py_begins_within(PyObject *module, PyObject *o)
{
    return PyBool_FromLong(koila__begins_within(o));
}

static PyObject *py_is_lazy(PyObject *module, PyObject *o)
{
    return PyBool_FromLong(koila__lazy_class && koila__is_lazy(o));
}

static PyObject *py_concrete(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    if (!h)
        return NULL;
    koila__note_value_taken(h);
    return Py_XNewRef(koila__concrete(h));
}

static PyObject *py_values_on(PyObject *module, PyObject *args)
{
    PyObject *o, *device;
    if (!PyArg_ParseTuple(args, "OO:values_on", &o, &device))
        return NULL;
    koila__handle *h = handle_arg(o);
    return h ? koila__values_on(h, device) : NULL;
}

static PyObject *py_concrete_all(PyObject *module, PyObject *seq)
{
    PyObject *fast = PySequence_Fast(seq, "concrete_all() takes a sequence");
    if (!fast)
        return NULL;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    koila__handle **h = PyMem_Malloc((n + 1) * sizeof *h);
    PyObject *r = NULL;
    if (!h) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (!(h[i] = handle_arg(PySequence_Fast_GET_ITEM(fast, i))))
            goto done;
    for (Py_ssize_t i = 0; i < n; i++)
        koila__note_value_taken(h[i]);
    if (koila__concrete_many(h, (uint32_t)n) < 0)
        goto done;
    r = PyList_New(n);
    for (Py_ssize_t i = 0; r && i < n; i++) {
        PyObject *real = koila__concrete(h[i]);
        if (!real) {
            Py_CLEAR(r);
            break;
        }
        PyList_SET_ITEM(r, i, Py_NewRef(real));
    }
done:
    PyMem_Free(h);
    Py_DECREF(fast);
    return r;
}

static PyObject *py_handle_info(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    if (!h)
        return NULL;
    const koila_value v = koila__value_of(h);
    if (v == KOILA_NONE)
        return NULL;
    return Py_BuildValue("Ok", h->group->tape, (unsigned long)v);
}

static PyObject *py_tape_of(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    return h ? Py_NewRef((PyObject *)h->group->tape) : NULL;
}

static PyObject *py_is_concrete(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    if (!h)
        return NULL;
    const koila_value v = koila__value_of(h);
    return v == KOILA_NONE ? NULL : PyBool_FromLong(h->group->tape->values[v].real != NULL);
}

/* run(tape, [lazies], commit): everything in one run */
static PyObject *py_run(PyObject *module, PyObject *args)
{
    koila__tape *t;
    PyObject *seq;
    int commit = 0;
    if (!PyArg_ParseTuple(args, "O!O|p", &koila__tape_type, &t, &seq, &commit))
        return NULL;
    PyObject *fast = PySequence_Fast(seq, "run() takes a sequence of lazy tensors");
    if (!fast)
        return NULL;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    koila_value *v = PyMem_Malloc((n + 1) * sizeof *v);
    uint32_t m = 0;
    int rc = 0;
    if (!v) {
        PyErr_NoMemory();
        rc = -1;
    }
    for (Py_ssize_t i = 0; i < n && rc == 0; i++) {
        koila__handle *h = handle_arg(PySequence_Fast_GET_ITEM(fast, i));
        if (h && h->group->tape != t) {
            PyErr_SetString(PyExc_ValueError, "run(): a lazy tensor of another tape");
            h = NULL;
        }
        const koila_value value = h ? koila__value_of(h) : KOILA_NONE;
        if (value == KOILA_NONE)
            rc = -1;
        else if (!t->values[value].real)
            v[m++] = value;
    }
    if (rc == 0 && (m || commit)) {
        rc = koila__executor->run(t, v, m, commit);
        t->ran = true;
    }
    PyMem_Free(v);
    Py_DECREF(fast);
    if (rc < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* run_whole([lazy, ...]): runs them with the simple executor, which checks each result against the
 * recorded meta; for tests */
static PyObject *py_run_whole(PyObject *module, PyObject *seq)
{
    PyObject *fast = PySequence_Fast(seq, "run_whole() takes a sequence of lazy tensors");
    if (!fast)
        return NULL;
    int rc = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast) && rc == 0; i++) {
        koila__handle *h = handle_arg(PySequence_Fast_GET_ITEM(fast, i));
        const koila_value v = h ? koila__value_of(h) : KOILA_NONE;
        if (v == KOILA_NONE)
            rc = -1;
        else if (!h->group->tape->values[v].real)
            rc = koila__executor->run_whole(h->group->tape, &v, 1);
    }
    Py_DECREF(fast);
    if (rc < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* effect(lazy, real): after the step, real's contents are lazy's */
static PyObject *py_effect(PyObject *module, PyObject *args)
{
    PyObject *lazy, *real;
    if (!PyArg_ParseTuple(args, "OO", &lazy, &real))
        return NULL;
    koila__handle *h = handle_arg(lazy);
    const koila_value v = h ? koila__value_of(h) : KOILA_NONE;
    if (v == KOILA_NONE || koila__tape_effect(h->group->tape, real, v) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* random(lazy, generator, state, words): the newest node of lazy's tape draws from the generator in
 * this state, `words` words per element (0: not known) */
static PyObject *py_random(PyObject *module, PyObject *args)
{
    PyObject *lazy, *generator, *state;
    unsigned words;
    if (!PyArg_ParseTuple(args, "OOO!I", &lazy, &generator, &PyBytes_Type, &state, &words))
        return NULL;
    koila__handle *h = handle_arg(lazy);
    if (!h)
        return NULL;
    koila__tape *t = h->group->tape;
    const koila_value_info v = koila_value_get(t->graph, h->group->cur);
    if (v.node == KOILA_NONE) {
        PyErr_SetString(PyExc_SystemError, "koila: no random node");
        return NULL;
    }
    if (koila__tape_add_random(t, v.node, generator, state, words) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* become(lazy, other): lazy now stands for the same value as other */
static PyObject *py_become(PyObject *module, PyObject *args)
{
    PyObject *a, *b;
    if (!PyArg_ParseTuple(args, "OO", &a, &b))
        return NULL;
    koila__handle *x = handle_arg(a);
    koila__handle *y = x ? handle_arg(b) : NULL;
    if (!y)
        return NULL;
    koila__tape *kept = x->group->tape;
    Py_INCREF(kept);
    const koila_value v = koila__value_of(y);
    koila__handle_move(x, y->group, y->chain, v, y->meta, y->offset);
    Py_DECREF(kept);
    Py_RETURN_NONE;
}

/* rewrap(lazy): tells a handle its new wrapper after torch.utils.swap_tensors */
static PyObject *py_rewrap(PyObject *module, PyObject *o)
{
    if (koila__lazy_class && koila__is_lazy(o) && koila__handle_of(o))
        koila__handle_of(o)->wrapper = o;
    Py_RETURN_NONE;
}

static PyObject *py_unheld(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    if (!h)
        return NULL;
    h->is_unheld = true;
    Py_RETURN_NONE;
}

/* stand_beside(lazy, other): in the order by age (see group_wrappers) lazy is now next to other, as
 * the older of the two */
static PyObject *py_stand_beside(PyObject *module, PyObject *args)
{
    PyObject *a, *b;
    if (!PyArg_ParseTuple(args, "OO:stand_beside", &a, &b))
        return NULL;
    koila__handle *x = handle_arg(a);
    koila__handle *y = x ? handle_arg(b) : NULL;
    if (!y)
        return NULL;
    if (x->group != y->group || x == y)
        Py_RETURN_NONE;
    koila__handle_stand_beside(x, y);
    Py_RETURN_NONE;
}

/* group_info(lazy) → (is a view, number of wrappers in the group, id of the group while it
 * lives) */
static PyObject *py_group_info(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    if (!h)
        return NULL;
    return Py_BuildValue("OIK", h->chain ? Py_True : Py_False, h->group->refs,
                         (unsigned long long)(uintptr_t)h->group);
}

/* group_wrappers(lazy) → all lazy tensors that share its memory, itself too, newest first */
static PyObject *py_group_wrappers(PyObject *module, PyObject *o)
{
    PyObject *r = PyList_New(0); /* before the handle is looked at: the collector runs Python */
    const koila__handle *h = r ? handle_arg(o) : NULL;
    if (!h || koila__group_wrappers(h->group, r) < 0)
        Py_CLEAR(r);
    return r;
}

static PyObject *py_memo_info(PyObject *module, PyObject *unused)
{
    return Py_BuildValue("{sIsIsIsI}", "calls", koila__memo_n(), "signatures",
                         koila__table ? koila_table_n_sigs(koila__table) : 0, "known",
                         koila__table ? koila_table_n_known(koila__table) : 0, "forgotten",
                         koila__n_forgotten);
}

static PyObject *py_forget_after(PyObject *module, PyObject *arg)
{
    const unsigned long n = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred())
        return NULL;
    const uint32_t before = koila__forget_after;
    koila__forget_after = (uint32_t)n;
    return PyLong_FromUnsignedLong(before);
}

static PyObject *py_memo_clear(PyObject *module, PyObject *unused)
{
    koila__memo_clear();
    Py_RETURN_NONE;
}

static PyObject *py_fingerprint(PyObject *module, PyObject *o)
{
    uint64_t print;
    const int known = koila__is_tensor(o) && !koila__is_lazy(o) ? koila__fingerprint(o, &print) : 0;
    if (known < 0)
        return NULL;
    if (!known)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(print);
}

static PyObject *py_tapes(PyObject *module, PyObject *unused)
{
    PyObject *r = PyList_New(0);
    for (koila__tape *t = koila__tapes; r && t; t = t->next_tape)
        if (PyList_Append(r, (PyObject *)t) < 0)
            Py_CLEAR(r);
    for (koila__tape *t = koila__resting_tapes; r && t; t = t->next_tape)
        if (PyList_Append(r, (PyObject *)t) < 0)
            Py_CLEAR(r);
    return r;
}

static PyObject *py_forked(PyObject *module, PyObject *unused)
{
    koila__steps_forked();
    Py_RETURN_NONE;
}

static PyObject *py_lines(PyObject *module, PyObject *on)
{
    const int v = PyObject_IsTrue(on);
    if (v < 0)
        return NULL;
    koila__lines_on = v;
    Py_RETURN_NONE;
}

static PyObject *py_module_is(PyObject *module, PyObject *name)
{
    (void)module;
    if (name != Py_None && !PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "module_is() takes a name or None");
        return NULL;
    }
    return koila__module_is(name);
}

static PyObject *py_line_waits(PyObject *module, PyObject *arg)
{
    const int v = PyObject_IsTrue(arg);
    if (v < 0)
        return NULL;
    koila__line_waits(v);
    Py_RETURN_NONE;
}

/* leaves_on(tape) → [(value id, real)], including batch leaves */
static PyObject *py_leaves_on(PyObject *module, PyObject *args)
{
    koila__tape *t;
    if (!PyArg_ParseTuple(args, "O!", &koila__tape_type, &t))
        return NULL;
    PyObject *r = PyList_New(0);
    const uint32_t n = koila_graph_n_values(t->graph);
    for (uint32_t v = 0; r && v < n; v++) {
        if (!t->values[v].real || koila_value_get(t->graph, v).node != KOILA_NONE)
            continue;
        PyObject *pair = Py_BuildValue("IO", v, t->values[v].real);
        if (!pair || PyList_Append(r, pair) < 0)
            Py_CLEAR(r);
        Py_XDECREF(pair);
    }
    return r;
}

/* tapes_reading(real) → the tapes of steps that have not run, in all threads, with this leaf */
static PyObject *py_tapes_reading(PyObject *module, PyObject *real)
{
    PyObject *r = PyList_New(0);
    for (koila__tape *t = koila__tapes; r && t; t = t->next_tape)
        if (!t->closed && koila__tape_reads(t, real) && PyList_Append(r, (PyObject *)t) < 0)
            Py_CLEAR(r);
    return r;
}

/* replace_leaf(tape, value id, tensor): the leaf reads `tensor` from now on */
static PyObject *py_replace_leaf(PyObject *module, PyObject *args)
{
    koila__tape *t;
    unsigned v;
    PyObject *real;
    if (!PyArg_ParseTuple(args, "O!IO", &koila__tape_type, &t, &v, &real))
        return NULL;
    if (v >= koila_graph_n_values(t->graph)) {
        PyErr_SetString(PyExc_IndexError, "no such value");
        return NULL;
    }
    /* the old tensor must not find this leaf again: no version matches UINT32_MAX */
    for (uint32_t i = 0; i < t->n_leaf_slots; i++)
        if (t->leaves[i].real && t->leaves[i].value == v)
            t->leaves[i].version = UINT32_MAX;
    /* what autograd saved was written, of which torch's own backward tells */
    t->odd_backward = true;
    Py_INCREF(real);
    koila__tape_set_real(t, v, real);
    Py_RETURN_NONE;
}

/* ---- class Tape */

struct text {
    char *at;
    size_t n, cap;
};

static int put(void *user, const char *s, size_t n)
{
    struct text *t = user;
    if (t->n + n > t->cap) {
        const size_t cap = (t->n + n) * 2;
        char *p = PyMem_Realloc(t->at, cap);
        if (!p)
            return 1;
        t->at = p;
        t->cap = cap;
    }
    memcpy(t->at + t->n, s, n);
    t->n += n;
    return 0;
}

static PyObject *tape_text(koila__tape *t, PyObject *unused)
{
    struct text text = { 0 };
    const koila_status s = koila_graph_print(t->graph, put, &text);
    PyObject *r = s ? koila__raise(s) : PyUnicode_FromStringAndSize(text.at, (Py_ssize_t)text.n);
    PyMem_Free(text.at);
    return r;
}

static PyObject *tape_close(koila__tape *t, PyObject *unused)
{
    koila__tape_close(t);
    Py_RETURN_NONE;
}

static PyObject *tape_check(koila__tape *t, PyObject *unused)
{
    koila_error err = KOILA_ERROR_INIT;
    if (!koila_graph_check(t->graph, &err)) {
        PyErr_SetString(PyExc_AssertionError, err.text);
        return NULL;
    }
    Py_RETURN_TRUE;
}

static PyObject *tape_held(koila__tape *t, PyObject *unused)
{
    koila_value v[256];
    uint32_t n = koila__tape_held(t, NULL, 0, v, 256);
    if (n > 256)
        n = 256;
    PyObject *r = PyList_New(n);
    for (uint32_t i = 0; r && i < n; i++)
        PyList_SET_ITEM(r, i, PyLong_FromUnsignedLong(v[i]));
    return r;
}

static PyObject *get_n_nodes(koila__tape *t, void *c)
{
    return PyLong_FromUnsignedLong(koila_graph_n_nodes(t->graph));
}
static PyObject *get_n_values(koila__tape *t, void *c)
{
    return PyLong_FromUnsignedLong(koila_graph_n_values(t->graph));
}
static PyObject *get_n_handles(koila__tape *t, void *c)
{
    return PyLong_FromUnsignedLong(t->n_handles);
}
static PyObject *get_n_effects(koila__tape *t, void *c)
{
    return PyLong_FromUnsignedLong(t->n_effects);
}
static PyObject *get_n_random(koila__tape *t, void *c)
{
    return PyLong_FromUnsignedLong(t->n_random);
}
static PyObject *get_n_watches(koila__tape *t, void *c)
{
    return PyLong_FromUnsignedLong(t->n_watches);
}
static PyObject *get_hash(koila__tape *t, void *c)
{
    return PyLong_FromUnsignedLongLong(koila_graph_hash(t->graph));
}
static PyObject *get_closed(koila__tape *t, void *c) { return PyBool_FromLong(t->closed); }
static PyObject *get_ran(koila__tape *t, void *c) { return PyBool_FromLong(t->ran); }

static PyObject *get_compiles(koila__tape *t, void *c) { return PyBool_FromLong(t->compiles); }
static int set_compiles(koila__tape *t, PyObject *value, void *c)
{
    const int on = value ? PyObject_IsTrue(value) : 0;
    if (on < 0)
        return -1;
    t->compiles = on;
    return 0;
}

static PyGetSetDef tape_getset[] = {
    { "n_nodes", (getter)get_n_nodes, NULL, "number of recorded nodes", NULL },
    { "n_values", (getter)get_n_values, NULL, "number of values, including leaves", NULL },
    { "n_handles", (getter)get_n_handles, NULL, "number of live lazy tensors", NULL },
    { "n_effects", (getter)get_n_effects, NULL, "number of real tensors that the step will write",
      NULL },
    { "n_random", (getter)get_n_random, NULL, "number of random nodes", NULL },
    { "n_watches", (getter)get_n_watches, NULL, "number of watched aliases of its tensors", NULL },
    { "hash", (getter)get_hash, NULL, "hash of everything that decides a plan", NULL },
    { "closed", (getter)get_closed, NULL, "its step has run", NULL },
    { "ran", (getter)get_ran, NULL, "some value was made concrete", NULL },
    { "compiles", (getter)get_compiles, (setter)set_compiles,
      "its loops are compiled, whatever koila.compile() says", NULL },
    { 0 },
};
static PyMethodDef tape_methods[] = {
    { "text", (PyCFunction)tape_text, METH_NOARGS, "The graph in its text form." },
    { "close", (PyCFunction)tape_close, METH_NOARGS,
      "The step is over: the next lazy() opens a new tape." },
    { "check", (PyCFunction)tape_check, METH_NOARGS, "Assert every invariant of the graph." },
    { "held", (PyCFunction)tape_held, METH_NOARGS,
      "Ids of the lazy values that the user can still ask for." },
    { 0 },
};

/* ---- the module */

static PyMethodDef methods[] = {
    { "dispatch", (PyCFunction)(void (*)(void))koila__dispatch, METH_FASTCALL,
      "dispatch(func, types, args, kwargs): LazyTensor.__torch_dispatch__" },
    { "find_rule", (PyCFunction)(void (*)(void))koila__find_rule, METH_FASTCALL,
      "find_rule(func, class): torch's find_torch_dispatch_rule, quick for LazyTensor" },
    { "find_rules", koila__find_rules, METH_O,
      "find_rules(f): the function that find_rule calls for other classes" },
    { "record", (PyCFunction)(void (*)(void))koila__py_record, METH_FASTCALL,
      "record(func, args, kwargs): record the call as one node" },
    { "setup", py_setup, METH_VARARGS,
      "setup(LazyTensor, whether C++ owners show as a Python reference)" },
    { "wrapper_pair", py_wrapper_pair, METH_O,
      "wrapper_pair((dtype, device, sizes, strides, offset)) -> (by arguments, by parts or None)" },
    { "learn_keys", py_learn_keys, METH_VARARGS,
      "learn_keys(lazy, its keys, made, its keys) -> can dispatch keys be set in memory?" },
    { "wrap_by_parts", py_wrap_by_parts, METH_O, "wrap_by_parts(on) -> the setting before" },
    { "tape_open", py_tape_open, METH_NOARGS, "The open tape; opens one if there is none." },
    { "module_is", py_module_is, METH_O,
      "module_is(name | None) -> name | None: whose forward runs on this thread; the one before." },
    { "line_waits", py_line_waits, METH_O,
      "line_waits(begins): what another thread records belongs to the line that is running" },
    { "current_tape", py_current_tape, METH_NOARGS, "The open tape, or None." },
    { "axis", py_axis, METH_O, "axis(size): a new batch axis of the open tape" },
    { "lazy_leaf", py_lazy_leaf, METH_VARARGS, "lazy_leaf(tensor, axis | None, dim)" },
    { "is_lazy", py_is_lazy, METH_O, "is_lazy(x)" },
    { "begins_within", py_begins_within, METH_O,
      "begins_within(lazy): is its memory that of a leaf, which begins in the middle of it?" },
    { "is_conjugated", py_is_conjugated, METH_O,
      "is_conjugated(lazy): is it a conjugate view of its base?" },
    { "concrete", py_concrete, METH_O, "concrete(lazy) -> Tensor" },
    { "values_on", py_values_on, METH_VARARGS,
      "values_on(lazy, device) -> Tensor: computed there, if no tensor without values decides" },
    { "concrete_all", py_concrete_all, METH_O,
      "concrete_all([lazy, ...]) -> [Tensor, ...], one run" },
    { "is_concrete", py_is_concrete, METH_O, "is_concrete(lazy)" },
    { "handle_info", py_handle_info, METH_O, "handle_info(lazy) -> (tape, value id)" },
    { "tape_of", py_tape_of, METH_O, "tape_of(lazy)" },
    { "run", py_run, METH_VARARGS, "run(tape, [lazy, ...], commit_effects=False)" },
    { "run_whole", py_run_whole, METH_O, "run_whole([lazy, ...]): the reference executor" },
    { "effect", py_effect, METH_VARARGS,
      "effect(lazy, real): after the step real's contents are lazy's" },
    { "random", py_random, METH_VARARGS,
      "random(lazy, generator, state, words): the node that made lazy draws from the generator in "
      "this state" },
    { "become", py_become, METH_VARARGS,
      "become(lazy, other): lazy stands for the same value as other" },
    { "stand_beside", py_stand_beside, METH_VARARGS,
      "stand_beside(lazy, other): order lazy by age next to other, which shares its memory" },
    { "rewrap", py_rewrap, METH_O, "rewrap(lazy): its handle has a new wrapper" },
    { "unheld", py_unheld, METH_O,
      "unheld(lazy): no variable of the user reaches it, so no step saves its value for one" },
    { "group_info", py_group_info, METH_O,
      "group_info(lazy) -> (is a view, number of wrappers in the group, id of the group)" },
    { "group_wrappers", py_group_wrappers, METH_O,
      "group_wrappers(lazy) -> [every lazy tensor that shares its memory]" },
    { "leaves_on", py_leaves_on, METH_VARARGS, "leaves_on(tape) -> [(value id, tensor), ...]" },
    { "tapes_reading", py_tapes_reading, METH_O,
      "tapes_reading(tensor) -> the tapes of steps that have not run, in all threads, with this "
      "leaf" },
    { "replace_leaf", py_replace_leaf, METH_VARARGS, "replace_leaf(tape, value id, tensor)" },
    { "memo_info", py_memo_info, METH_NOARGS, "Sizes of the memo." },
    { "forget_after", py_forget_after, METH_O,
      "forget_after(n) -> before: calls that no step uses any more are forgotten when n new ids "
      "have come; for tests. 0: at the start of each step." },
    { "memo_clear", py_memo_clear, METH_NOARGS, "Forget every call seen." },
    { "data_of", koila__py_data_of, METH_O, "data_of(tensor): tensor.data, remembered" },
    { "handed_out", koila__py_handed_out, METH_VARARGS,
      "handed_out(tensor, memory, lasting): an alias without a version counter exists from now on; "
      "lasting: as long as the object `memory` lives" },
    { "written", koila__py_written, METH_VARARGS,
      "written(tensors, witness): what was recorded from them is stale when the version of witness "
      "moves" },
    { "fingerprint", py_fingerprint, METH_O,
      "fingerprint(tensor): a number that its elements decide; None: not of this tensor" },
    { "tapes", py_tapes, METH_NOARGS, "tapes() -> all live tapes" },
    { "forked", py_forked, METH_NOARGS, "forked(): let go of the parent's steps" },
    { "lines", py_lines, METH_O, "lines(on): record source lines" },
    { 0 },
};

int koila__module_add(PyObject *m)
{
    if (koila__arguments_init() < 0 || koila__source_line_init() < 0)
        return -1;
    koila__tape_type.tp_getset = tape_getset;
    koila__tape_type.tp_methods = tape_methods;
    if (PyType_Ready(&koila__tape_type) < 0 || PyType_Ready(&koila__handle_type) < 0)
        return -1;
    if (PyModule_AddObjectRef(m, "Tape", (PyObject *)&koila__tape_type) < 0)
        return -1;
    if (PyModule_AddFunctions(m, methods) < 0 || koila__settle_add(m) < 0 ||
        koila__whose_add(m) < 0 || koila__known_backward_add(m) < 0)
        return -1;
    return koila__factories_add(m);
}
