/* settle.c — turns a lazy factory into a plain tensor, in the same Python object, see Note
 * [Settling] in factories.c. Also decides which calls make one settle, and which results count as
 * factories. */
#include "capture/capture.h"
#include "capture/executor.h"
#include "ground/shield.h"

/* ---- settling */

static bool has_rows(const koila__group *g)
{
    const koila_meta_info *m = koila_meta_get(koila__table, g->meta);
    return koila__tape_has_batch(g->tape, m->size, m->n_dims);
}

bool koila__is_known(const koila__group *g)
{
    return g->factory && g->no_lazy_data && !has_rows(g);
}

/* The base's contents as a plain tensor, a new reference. *fresh: nothing else refers to it. */
static PyObject *contents(koila__group *g, bool *fresh)
{
    koila__tape *t = g->tape;
    const koila_value v = g->cur;
    const koila_value_info info = koila_value_get(t->graph, v);
    *fresh = false;
    if (!t->values[v].real && info.node != KOILA_NONE) {
        const koila_sig sig = koila_node_get(t->graph, info.node).sig;
        if (koila_sig_get(koila__table, sig)->n_inputs == 0) {
            /* never written: make it again */
            PyObject *f = koila__helper("enter_modes");
            PyObject *modes = f ? PyObject_CallNoArgs(f) : NULL;
            PyObject *out = NULL;
            const int rc = modes ? koila__executor->call(sig, &out) : -1;
            Py_XDECREF(f);
            Py_XDECREF(modes);
            *fresh = !koila__maybe_inference();
            return rc < 0 ? NULL : out;
        }
    }
    if (!t->values[v].real) {
        const bool is_known = koila__is_known(g);
        const int rc =
            is_known ? koila__executor->run_whole(t, &v, 1) : koila__executor->run(t, &v, 1, false);
        t->ran |= !is_known;
        if (rc < 0)
            return NULL;
    }
    return Py_XNewRef(t->values[v].real);
}

/* Lists every wrapper of the group and its place in the base: (sizes, strides, offset). The
 * wrappers first, which runs no Python code: after that others may come and go. */
static int find_places(const koila__group *g, PyObject *wrappers, PyObject *places)
{
    if (koila__group_wrappers(g, wrappers) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(wrappers); i++) {
        const koila__handle *h = koila__handle_of(PyList_GET_ITEM(wrappers, i));
        PyObject *m = koila__meta_object(h->meta);
        PyObject *place = NULL;
        if (m)
            place = Py_BuildValue("(OOL)", PyTuple_GET_ITEM(m, 2), PyTuple_GET_ITEM(m, 3),
                                  (long long)h->offset);
        const int bad = !place || PyList_Append(places, place) < 0;
        Py_XDECREF(m);
        Py_XDECREF(place);
        if (bad)
            return -1;
    }
    return 0;
}

/* Gives wrappers[i] the memory of views[i]. Nothing can fail after the first assignment. */
static int give_memory(PyObject *wrappers, PyObject *views, PyObject *alias_of)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(wrappers); i++) {
        PyObject *w = PyList_GET_ITEM(wrappers, i);
        PyObject *ok = koila__ask("set_data", w, PyList_GET_ITEM(views, i), NULL);
        PyObject *plain = ok ? PyObject_CallOneArg(alias_of, w) : NULL;
        Py_XDECREF(ok);
        if (!plain)
            return -1;
        koila__handle_make_plain(koila__handle_of(w), plain);
        Py_DECREF(plain);
    }
    return 0;
}

/* Makes all wrappers of the group plain tensors on the memory of `base`. */
static int settle_on(koila__group *g, PyObject *base, bool fresh)
{
    PyObject *meta = koila__meta_object(g->meta);
    PyObject *wrappers = PyList_New(0);
    PyObject *places = PyList_New(0);
    PyObject *alias_of = koila__helper("alias_of");
    PyObject *settled_views = koila__helper("settled_views");
    PyObject *views = NULL;
    int rc = -1;
    if (meta && wrappers && places && alias_of && settled_views &&
        find_places(g, wrappers, places) == 0)
        views = PyObject_CallFunctionObjArgs(settled_views, base, meta, fresh ? Py_True : Py_False,
                                             places, NULL);
    if (views)
        rc = give_memory(wrappers, views, alias_of);
    Py_XDECREF(meta);
    Py_XDECREF(wrappers);
    Py_XDECREF(places);
    Py_XDECREF(alias_of);
    Py_XDECREF(settled_views);
    Py_XDECREF(views);
    return rc;
}

static int settle_shielded(PyObject *o)
{
    if (koila__is_settled(o))
        return 1;
    koila__handle *h = koila__is_lazy(o) ? koila__handle_of(o) : NULL;
    if (!h || !h->group->factory)
        return 0;
    koila__group *g = h->group;
    koila__tape *t = g->tape;
    Py_INCREF(t);
    g->refs++; /* keeps the group alive while its wrappers leave */
    if (!g->no_lazy_data)
        koila__tape_has_exit(t); /* it keeps the graph of what was written into it */
    bool fresh;
    PyObject *base = contents(g, &fresh);
    const int rc = base ? settle_on(g, base, fresh) : -1;
    Py_XDECREF(base);
    if (--g->refs == 0)
        koila__group_free(g);
    Py_DECREF(t);
    /* the run may have moved the group to another tape, where it is concrete now: once more */
    return rc < 0 ? -1 : settle_shielded(o);
}

/* Torch gives a wrapper no memory of the meta device. What lies there and is known stays recorded:
 * nothing is computed, so no read of it can be out of date. */
static bool has_no_memory(PyObject *o)
{
    const koila__handle *h = koila__is_lazy(o) ? koila__handle_of(o) : NULL;
    return h && h->group &&
           koila__is_meta_device(koila_meta_get(koila__table, h->group->meta)->device);
}

/* Some of what it does is Python, where a signal would leave it half done. */
int koila__settle(PyObject *o)
{
    if (has_no_memory(o))
        return 0;
    if (koila__shield_enter() < 0)
        return -1;
    const int rc = settle_shielded(o);
    koila__shield_leave();
    return rc;
}

typedef struct met {
    PyObject *written[16]; /* borrowed: factories without lazy data that the call writes */
    uint32_t n_written;
    bool settled;         /* some argument is a settled tensor */
    bool lazy_data;       /* some argument that is read has lazy data */
    uint32_t n_factories; /* other factories without lazy data */
} met;

static void look(met *m, PyObject *o, bool written)
{
    if (PyList_Check(o) || PyTuple_Check(o)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); i++)
            look(m, PySequence_Fast_GET_ITEM(o, i), written);
        return;
    }
    if (!koila__has_slot(o))
        return;
    const koila__handle *h = koila__handle_of(o);
    if (!h)
        return;
    if (!h->group)
        m->settled = true;
    else if (!h->group->no_lazy_data)
        m->lazy_data |= !written;
    else if (written && m->n_written < 16)
        m->written[m->n_written++] = o;
    else
        m->n_factories++;
}

static void look_at_call(met *m, uint64_t written, PyObject *written_kw, PyObject *args,
                         PyObject *kwargs)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        look(m, PyTuple_GET_ITEM(args, i), i < 64 && written >> i & 1);
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (kwargs && PyDict_Next(kwargs, &at, &name, &value))
        look(m, value, written_kw && PySequence_Contains(written_kw, name) == 1);
}

/* Does the call read a plain tensor that is neither a scalar nor needs a gradient? A program
 * that adds up known data may overwrite that data next, and a recorded read would then be out of
 * date. */
static bool reads_known_data(PyObject *o, bool written)
{
    if (PyList_Check(o) || PyTuple_Check(o)) {
        bool yes = false;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o) && !yes; i++)
            yes = reads_known_data(PySequence_Fast_GET_ITEM(o, i), written);
        return yes;
    }
    if (written || !koila__is_tensor(o) || koila__has_slot(o) || koila__requires_grad(o))
        return false;
    koila_meta m;
    if (koila__meta_of(o, &m) < 0) {
        PyErr_Clear();
        return true;
    }
    return koila_meta_get(koila__table, m)->n_dims > 0;
}

static bool call_reads_known_data(uint64_t written, PyObject *args)
{
    bool yes = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && !yes; i++)
        yes = reads_known_data(PyTuple_GET_ITEM(args, i), i < 64 && written >> i & 1);
    return yes;
}

/* May a view of that shape be cut: along the rows, or, where the group has none, along a long
 * dimension? */
static bool may_be_cut(const koila__group *g, const koila_meta_info *view)
{
    if (has_rows(g))
        return koila__tape_has_batch(g->tape, view->size, view->n_dims);
    return koila__tape_has_length(g->tape, view->size, view->n_dims);
}

int koila__factories_meet(uint64_t written, PyObject *written_kw, PyObject *args, PyObject *kwargs)
{
    met m = { 0 };
    look_at_call(&m, written, written_kw, args, kwargs);
    for (uint32_t i = 0; i < m.n_written; i++) {
        const koila__handle *h = koila__handle_of(m.written[i]);
        if (!h->group)
            continue; /* settled together with an earlier one */
        if (m.lazy_data) {
            h->group->no_lazy_data = false;
            continue;
        }
        koila__hold_ids();
        const koila_meta_info *view = koila_meta_get(koila__table, h->meta);
        const bool settles = !koila__requires_grad(m.written[i]) &&
                             (h->group->tape->closed || !may_be_cut(h->group, view) ||
                              call_reads_known_data(written, args));
        koila__release_ids();
        if (!settles)
            continue;
        const int settled = koila__settle(m.written[i]);
        if (settled < 0)
            return -1;
        m.settled |= settled;
    }
    return m.settled;
}

/* Results computed from factories alone are factories too: without koila they would be plain. */
void koila__factories_derive(PyObject *args, PyObject *kwargs, PyObject *result)
{
    const bool many = PyTuple_Check(result) || PyList_Check(result);
    met m = { 0 };
    look_at_call(&m, 0, NULL, args, kwargs);
    if (m.lazy_data || !m.n_factories)
        return;
    for (Py_ssize_t i = 0; i < (many ? PySequence_Fast_GET_SIZE(result) : 1); i++) {
        PyObject *o = many ? PySequence_Fast_GET_ITEM(result, i) : result;
        if (!koila__has_slot(o) || !koila__is_lazy(o))
            continue;
        koila__group *g = koila__handle_of(o)->group;
        if (!g->factory)
            koila__group_is_factory(g, true);
    }
}

/* ---- what Python uses */

static PyObject *py_settle(PyObject *module, PyObject *o)
{
    const int rc = koila__settle(o);
    return rc < 0 ? NULL : PyBool_FromLong(rc);
}

/* settled(x): the plain tensor behind a settled one, or None */
static PyObject *py_settled(PyObject *module, PyObject *o)
{
    return Py_NewRef(koila__is_settled(o) ? koila__handle_of(o)->wrapper : Py_None);
}

/* resettle(x, plain): after the memory or the layout of x changed */
static PyObject *py_resettle(PyObject *module, PyObject *args)
{
    PyObject *o, *plain;
    if (!PyArg_ParseTuple(args, "OO", &o, &plain))
        return NULL;
    if (!koila__is_settled(o)) {
        PyErr_SetString(PyExc_TypeError, "expected a settled tensor");
        return NULL;
    }
    koila__handle_make_plain(koila__handle_of(o), plain);
    Py_RETURN_NONE;
}

static PyObject *py_is_factory(PyObject *module, PyObject *o)
{
    return PyBool_FromLong(koila__is_lazy(o) && koila__handle_of(o)->group->factory);
}

static PyMethodDef methods[] = {
    { "settle", py_settle, METH_O,
      "settle(x): a factory and its views become plain tensors, in place; is x one now?" },
    { "settled", py_settled, METH_O, "settled(x): the plain tensor behind a settled one, or None" },
    { "resettle", py_resettle, METH_VARARGS,
      "resettle(x, plain): after the memory or the layout of x changed" },
    { "is_factory", py_is_factory, METH_O, "is_factory(x): may it settle?" },
    { 0 },
};

int koila__settle_add(PyObject *m) { return PyModule_AddFunctions(m, methods); }
