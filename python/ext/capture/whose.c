/* whose.c — whose operator, whose backward: which context a call belongs to, when a thread of
 * torch's makes it or nothing lazy is in sight.
 *
 *   operator   of the running thread or task; a thread that never used koila works for the
 *              context whose tensors it was given (autograd's devices, parallel_apply)
 *   backward   of the running thread or task, or of the one whose backward autograd's engine runs:
 *              torch carries its thread-local objects to its devices' threads, and ours is among
 *              them while a backward is recorded, unless none of those threads can take part:
 *              torch copies all of these objects for each operator that is recorded
 *   plain      a backward that meets nothing lazy is none of ours: torch's own, at once
 *
 * A backward from a plain tensor can come upon lazy ones only where operators on lazy tensors gave
 * a plain result that autograd follows, or a torch.autograd.Function took the value of one: an
 * exit. Tapes remember that they have one.
 */
#include "capture/capture.h"

#include <frameobject.h> /* PyFrame_GetBack on 3.10 */

/* What koila needs of torch; all owned. */
static struct {
    PyObject *stash, *get, *has, *drop, *graph_task, *n_devices, *key;
    PyObject *apply; /* code of torch.autograd.Function.apply; NULL: this torch has another */
    bool takes_one;  /* stash() takes a reference from its caller, as torch 2.11 does */
    bool ready;
} torch_tls;

static uint32_t n_backwards; /* that are recorded now, in all threads */

/* Backwards nested deeper than 60 (MAX_DEPTH of torch/csrc/autograd/engine.h) go on in a thread of
 * a pool. */
enum { DEEP = 32 };

static _Thread_local struct {
    uint32_t depth;          /* backwards that were begun here, one within the other */
    koila__context *context; /* the innermost's; borrowed from who began it */
    bool has_device_threads; /* torch may go on in threads of devices */
} here;

static PyObject *function_of(PyObject *module, const char *name)
{
    PyObject *f = module ? PyObject_GetAttrString(module, name) : NULL;
    PyErr_Clear();
    return f;
}

/* Makes `o` the thread-local object of torch's under `key`. */
static int stash(PyObject *key, PyObject *o)
{
    if (torch_tls.takes_one)
        Py_INCREF(o);
    PyObject *done = PyObject_CallFunctionObjArgs(torch_tls.stash, key, o, NULL);
    if (!done && torch_tls.takes_one)
        Py_DECREF(o);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Takes it away. Where torch has no function for that, None takes its place. */
static int unstash(PyObject *key)
{
    if (!torch_tls.drop)
        return stash(key, Py_None);
    PyObject *done = PyObject_CallOneArg(torch_tls.drop, key);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Sees whether torch keeps a reference of its own to what is stashed, or takes one that it was not
 * given. */
static int learn_whose_reference(void)
{
    PyObject *key = PyUnicode_FromString("koila: whose reference?");
    PyObject *probe = PyList_New(0);
    int rc = key && probe ? stash(key, probe) : -1;
    if (rc == 0) {
        torch_tls.takes_one = Py_REFCNT(probe) == 1;
        if (torch_tls.takes_one)
            Py_INCREF(probe);
        rc = unstash(key);
    }
    Py_XDECREF(probe);
    Py_XDECREF(key);
    return rc;
}

int koila__whose_setup(void)
{
    PyObject *torch = PyImport_ImportModule("torch._C");
    PyObject *autograd = torch ? PyImport_ImportModule("torch.autograd.function") : NULL;
    PyObject *class = autograd ? PyObject_GetAttrString(autograd, "Function") : NULL;
    PyObject *apply = class ? PyObject_GetAttrString(class, "apply") : NULL;
    PyObject *accelerator = apply ? PyImport_ImportModule("torch.accelerator") : NULL;
    if (!apply || torch_tls.ready)
        goto done;
    torch_tls.apply = PyObject_GetAttrString(apply, "__code__"); /* a method gives its function's */
    PyErr_Clear();
    torch_tls.stash = function_of(torch, "_stash_obj_in_tls");
    torch_tls.get = function_of(torch, "_get_obj_in_tls");
    torch_tls.has = function_of(torch, "_is_key_in_tls");
    torch_tls.drop = function_of(torch, "_remove_obj_from_tls");
    torch_tls.graph_task = function_of(torch, "_current_graph_task_id");
    torch_tls.n_devices = function_of(accelerator, "device_count");
    torch_tls.key = PyUnicode_InternFromString("koila");
    torch_tls.ready = !torch_tls.stash || learn_whose_reference() == 0;
done:
    Py_XDECREF(torch);
    Py_XDECREF(autograd);
    Py_XDECREF(class);
    Py_XDECREF(apply);
    Py_XDECREF(accelerator);
    return PyErr_Occurred() ? -1 : 0;
}

/* A new reference to the context whose backward runs in this thread; NULL: none does, without an
 * exception. */
static koila__context *carried(void)
{
    if (here.context)
        return (koila__context *)Py_NewRef((PyObject *)here.context);
    if (!n_backwards || !torch_tls.stash || !torch_tls.has || !torch_tls.get)
        return NULL;
    PyObject *has = PyObject_CallOneArg(torch_tls.has, torch_tls.key);
    PyObject *c = has == Py_True ? PyObject_CallOneArg(torch_tls.get, torch_tls.key) : NULL;
    Py_XDECREF(has);
    PyErr_Clear();
    if (c == Py_None)
        Py_CLEAR(c);
    return (koila__context *)c;
}

/* ---- what a call is given */

/* Calls `see` for each lazy tensor in `o`, until it returns true. */
static bool any_lazy(PyObject *o, bool (*see)(void *user, PyObject *lazy), void *user)
{
    if (PyList_Check(o) || PyTuple_Check(o)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(o); i++)
            if (any_lazy(PySequence_Fast_GET_ITEM(o, i), see, user))
                return true;
        return false;
    }
    return koila__lazy_class && koila__is_lazy(o) && koila__handle_of(o) && see(user, o);
}

static bool any_of_call(PyObject *args, PyObject *kwargs, bool (*see)(void *user, PyObject *lazy),
                        void *user)
{
    Py_ssize_t at = 0;
    PyObject *name, *value;
    if (any_lazy(args, see, user))
        return true;
    while (kwargs && PyDict_Next(kwargs, &at, &name, &value))
        if (any_lazy(value, see, user))
            return true;
    return false;
}

static bool see_any(void *user, PyObject *lazy) { return true; }

static bool see_tape(void *user, PyObject *lazy)
{
    *(koila__tape **)user = koila__handle_of(lazy)->group->tape;
    return true;
}

/* ---- operators */

/* Does autograd's engine run here, in a backward that koila has not begun? Then gradients of plain
 * leaves would be lazy. */
static bool is_in_a_plain_backward(void)
{
    PyObject *id = torch_tls.graph_task ? PyObject_CallNoArgs(torch_tls.graph_task) : NULL;
    const bool in_engine = id && PyLong_AsLong(id) != -1;
    Py_XDECREF(id);
    PyErr_Clear();
    koila__context *c = in_engine ? carried() : NULL;
    Py_XDECREF((PyObject *)c);
    return in_engine && !c;
}

bool koila__may_work_for(const koila__tape *t)
{
    koila__context *before = koila__context_lend(t->context);
    const bool plans = koila__is_planning();
    koila__context_give_back(before);
    return plans == t->planned;
}

int koila__lend_for_call(PyObject *args, PyObject *kwargs, koila__context **to)
{
    koila__tape *t = NULL;
    *to = NULL;
    if (koila__context_lent() || koila__context_peek() || koila__settings_any())
        return 0;
    any_of_call(args, kwargs, see_tape, &t);
    if (!t || !koila__may_work_for(t))
        return 0;
    if (is_in_a_plain_backward()) {
        koila__unsupported("backward() of a plain tensor that was computed from lazy ones, in a "
                           "thread that has no lazy tensors of its own. Call it in the thread that "
                           "made them lazy, or detach the tensor there");
        return -1;
    }
    *to = (koila__context *)Py_NewRef((PyObject *)t->context);
    return 0;
}

static bool needs_gradient(PyObject *o)
{
    PyObject *r = koila__is_tensor(o) ? koila__attribute(o, "requires_grad") : NULL;
    const bool yes = r == Py_True;
    Py_XDECREF(r);
    PyErr_Clear();
    return yes;
}

/* *user: a bool, does another argument need a gradient? Its backward reads this one. */
static bool see_exit(void *user, PyObject *lazy)
{
    if ((user && *(bool *)user) || needs_gradient(lazy))
        koila__tape_has_exit(koila__handle_of(lazy)->group->tape);
    return false;
}

void koila__note_exit(PyObject *args, PyObject *kwargs, PyObject *result)
{
    if (!koila__grad_mode() || PyLong_Check(result) || PyFloat_Check(result))
        return;
    bool is_needed = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && !is_needed; i++)
        is_needed = needs_gradient(PyTuple_GET_ITEM(args, i));
    any_of_call(args, kwargs, see_exit, &is_needed);
}

void koila__note_value_taken(koila__handle *h)
{
    PyFrameObject *f = (PyFrameObject *)Py_XNewRef((PyObject *)PyEval_GetFrame());
    bool found = false;
    while (f && torch_tls.apply && !found) {
        PyCodeObject *code = PyFrame_GetCode(f);
        found = (PyObject *)code == torch_tls.apply;
        Py_DECREF(code);
        PyFrameObject *back = PyFrame_GetBack(f);
        Py_DECREF(f);
        f = back;
    }
    Py_XDECREF((PyObject *)f);
    if (found)
        koila__tape_has_exit(h->group->tape);
}

/* ---- backwards: functions of koila._core */

/* backward_context(outputs, gradients) -> the context that records this backward, or None: it is
 * plain, and torch's own */
static PyObject *py_backward_context(PyObject *module, PyObject *args)
{
    PyObject *outputs, *gradients;
    if (!PyArg_ParseTuple(args, "OO", &outputs, &gradients))
        return NULL;
    koila__context *c = carried();
    if (c)
        return (PyObject *)c;
    if (any_lazy(outputs, see_any, NULL) || any_lazy(gradients, see_any, NULL))
        return Py_XNewRef((PyObject *)koila__context_now());
    c = koila__n_exits ? koila__context_peek() : NULL;
    return Py_NewRef(c ? (PyObject *)c : Py_None);
}

static int carry(PyObject *c)
{
    if (!torch_tls.stash)
        return 0;
    return c == Py_None ? unstash(torch_tls.key) : stash(torch_tls.key, c);
}

/* Are there devices whose threads autograd's engine may use? It starts those with its first
 * backward, so the answer stays. Asking starts none. A CUDA build on a machine without a GPU has an
 * accelerator all the same, but no device. */
static bool has_device_threads(void)
{
    static int has = -1; /* nobody knows yet */
    if (has >= 0)
        return has;
    PyObject *n = torch_tls.n_devices ? PyObject_CallNoArgs(torch_tls.n_devices) : NULL;
    if (n)
        has = PyObject_IsTrue(n);
    PyErr_Clear();
    Py_XDECREF(n);
    return has != 0;
}

static PyObject *py_has_device_threads(PyObject *module, PyObject *none)
{
    return PyBool_FromLong(here.depth ? here.has_device_threads : has_device_threads());
}

/* May the backward that begins or ends at here.depth go on in another thread? */
static bool may_change_thread(void) { return here.has_device_threads || here.depth >= DEEP; }

/* backward_begins(context) -> what backward_ends() takes: from here on operators and backwards that
 * autograd's engine calls, on whichever thread, are of this context. */
static PyObject *py_backward_begins(PyObject *module, PyObject *context)
{
    koila__context *before = carried();
    if (!here.depth)
        here.has_device_threads = has_device_threads();
    if (may_change_thread() && carry(context) < 0) {
        Py_XDECREF((PyObject *)before);
        return NULL;
    }
    here.depth++;
    here.context = (koila__context *)context;
    n_backwards++;
    return before ? (PyObject *)before : Py_NewRef(Py_None);
}

static PyObject *py_backward_ends(PyObject *module, PyObject *before)
{
    koila_assert(n_backwards > 0 && here.depth > 0);
    n_backwards--;
    here.depth--;
    here.context = here.depth ? (koila__context *)before : NULL;
    if (!may_change_thread())
        Py_RETURN_NONE;
    const bool is_first_deep = !here.has_device_threads && here.depth == DEEP;
    return carry(is_first_deep ? Py_None : before) < 0 ? NULL : Py_NewRef(Py_None);
}

/* has_exit(lazy): a plain tensor with a graph behind it is made of this one */
static PyObject *py_has_exit(PyObject *module, PyObject *o)
{
    any_lazy(o, see_exit, NULL);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "backward_context", py_backward_context, METH_VARARGS,
      "backward_context(outputs, gradients) -> the context that records this backward; None: it "
      "meets nothing lazy" },
    { "backward_begins", py_backward_begins, METH_O,
      "backward_begins(context) -> what backward_ends() takes" },
    { "backward_ends", py_backward_ends, METH_O, "backward_ends(what backward_begins() gave)" },
    { "has_device_threads", py_has_device_threads, METH_NOARGS,
      "has_device_threads() -> may autograd's engine go on in threads of devices?" },
    { "has_exit", py_has_exit, METH_O,
      "has_exit(lazy): a plain tensor that autograd follows is made of it" },
    { 0 },
};

int koila__whose_add(PyObject *m) { return PyModule_AddFunctions(m, methods); }
