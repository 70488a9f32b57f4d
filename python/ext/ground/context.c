/* context.c — see context.h.
 *
 * A context is the value of a context variable. A copy of a contextvars.Context (a new asyncio
 * task) holds the same value; so each context remembers which one it was made for, and a copy gets
 * one of its own when it first uses koila. What follows from that:
 *
 *   thread            its own            ended: its open step ends with its last lazy tensor
 *   asyncio task      its own            the same, wherever it is continued
 *   asyncio.to_thread its own            settings are those of the task
 *   autograd's device thread, parallel_apply: none; they work for the one whose tensors they were
 *   given, see koila__context_lend()
 *
 * The look-up is remembered for each thread until it enters or leaves a contextvars.Context, by the
 * counter with which contextvars remembers its own. Only koila__context_now() sets the variable.
 */
#include "ground/context.h"

#include <structmember.h>

#include "base/base.h"

static PyTypeObject context_type;
static PyObject *variable; /* contextvars.ContextVar */

static _Thread_local koila__context *lent; /* kept alive by whoever lent it */
static _Thread_local struct {
    uint64_t thread, version; /* of the PyThreadState, which counts from 1 */
    koila__context *found;    /* borrowed: the context keeps it */
} known;

/* Was `c` made for the context that runs now, and not for the one that this is a copy of? */
static bool is_of(const koila__context *c, const PyThreadState *thread)
{
#if PY_VERSION_HEX >= 0x030d0000
    PyObject *of = NULL;
    const bool same = PyWeakref_GetRef(c->of, &of) == 1 && of == thread->context;
    Py_XDECREF(of);
    return same;
#else
    return PyWeakref_GetObject(c->of) == thread->context;
#endif
}

static void remember(koila__context *c)
{
    const PyThreadState *thread = PyThreadState_Get();
    known.thread = thread->id;
    known.version = thread->context_ver;
    known.found = c;
}

KOILA__HOT koila__context *koila__context_peek(void)
{
    if (lent)
        return lent;
    const PyThreadState *thread = PyThreadState_Get();
    if (known.thread == thread->id && known.version == thread->context_ver)
        return known.found;
    PyObject *found = NULL;
    if (thread->context && PyContextVar_Get(variable, NULL, &found) < 0)
        PyErr_Clear();
    koila__context *c = (koila__context *)found;
    if (c && !is_of(c, thread))
        c = NULL;
    remember(c);
    Py_XDECREF(found); /* the context keeps it */
    return c;
}

static koila__context *context_new(PyObject *of)
{
    koila__context *c = PyObject_New(koila__context, &context_type);
    if (!c)
        return NULL;
    memset((char *)c + offsetof(koila__context, of), 0, sizeof *c - offsetof(koila__context, of));
    c->backward = Py_NewRef(Py_None);
    c->of = PyWeakref_NewRef(of, NULL);
    if (!c->of)
        Py_CLEAR(c);
    return c;
}

/* Gives the thread a context of contextvars, if it has none yet, by setting a variable. */
static int begin_contextvars(void)
{
    if (PyThreadState_Get()->context)
        return 0;
    PyObject *token = PyContextVar_Set(variable, Py_None);
    const int status = token ? PyContextVar_Reset(variable, token) : -1;
    Py_XDECREF(token);
    return status;
}

koila__context *koila__context_now(void)
{
    koila__context *c = koila__context_peek();
    if (c)
        return c;
    if (begin_contextvars() < 0)
        return NULL;
    c = context_new(PyThreadState_Get()->context);
    PyObject *token = c ? PyContextVar_Set(variable, (PyObject *)c) : NULL;
    if (token)
        remember(c);
    Py_XDECREF(token);
    Py_XDECREF(c); /* kept by the context */
    return token ? c : NULL;
}

koila__context *koila__context_lend(koila__context *c)
{
    koila__context *before = lent;
    if (c != koila__context_peek())
        lent = c;
    return before;
}

void koila__context_give_back(koila__context *before) { lent = before; }

koila__context *koila__context_lent(void) { return lent; }

/* `var` in the context that `c` was made for. */
static PyObject *get_from(const koila__context *c, PyObject *var)
{
    PyObject *of = PyObject_CallNoArgs(c->of);
    PyObject *value = of && of != Py_None ? PyObject_GetItem(of, var) : NULL;
    Py_XDECREF(of);
    PyErr_Clear();
    return value;
}

PyObject *koila__context_get(PyObject *var)
{
    PyObject *value = NULL;
    if (lent)
        return get_from(lent, var);
    if (PyThreadState_Get()->context && PyContextVar_Get(var, NULL, &value) < 0)
        PyErr_Clear();
    return value;
}

/* ---- class Context */

static void context_dealloc(koila__context *c)
{
    Py_XDECREF(c->of);
    Py_XDECREF(c->open);
    Py_XDECREF(c->backward);
    Py_XDECREF(c->waiting_file);
    if (c->past)
        c->past_free(c->past);
    if (c->aside)
        c->aside_free(c->aside);
    PyMem_Free(c->tunings);
    PyObject_Free(c);
}

static PyMemberDef members[] = {
    { "backward", T_OBJECT, offsetof(koila__context, backward), 0,
      "the state of its backward, or None" },
    { "explains", T_BOOL, offsetof(koila__context, explains), 0, "does explain() record here?" },
    { NULL, 0, 0, 0, NULL },
};

static PyTypeObject context_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.Context",
    .tp_basicsize = sizeof(koila__context),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)context_dealloc,
    .tp_members = members,
    .tp_doc = "What koila keeps for one thread or asyncio task.",
};

static PyObject *py_context(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    return Py_XNewRef((PyObject *)koila__context_now());
}

static PyObject *py_lend(PyObject *self, PyObject *o)
{
    (void)self;
    if (!Py_IS_TYPE(o, &context_type)) {
        PyErr_SetString(PyExc_TypeError, "lend() takes a Context");
        return NULL;
    }
    PyObject *before = (PyObject *)koila__context_lend((koila__context *)o);
    return Py_NewRef(before ? before : Py_None);
}

static PyObject *py_give_back(PyObject *self, PyObject *o)
{
    (void)self;
    koila__context_give_back(Py_IS_TYPE(o, &context_type) ? (koila__context *)o : NULL);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "context", py_context, METH_NOARGS, "The context of the running thread or task." },
    { "lend", py_lend, METH_O,
      "lend(context) -> what give_back() takes: this thread works for it. The caller keeps both "
      "alive." },
    { "give_back", py_give_back, METH_O, "give_back(what lend() gave)" },
    { NULL, NULL, 0, NULL },
};

int koila__context_add_module(PyObject *m)
{
    if (!variable && !(variable = PyContextVar_New("koila", NULL)))
        return -1;
    if (PyType_Ready(&context_type) < 0 ||
        PyModule_AddObjectRef(m, "Context", (PyObject *)&context_type) < 0)
        return -1;
    return PyModule_AddFunctions(m, methods);
}
