/* dispatch.c — torch calls koila._core.dispatch(func, types, args, kwargs) for every ATen operator
 * that meets a LazyTensor, below autograd, forward and backward alike. Here is decided who takes
 * the call: node.c, which records it, a handler in Python, or the memory of tensors that have
 * settled (settle.c).
 */
#include "capture/record.h"

/* Is `o`, at place i of an index, a mask, or could it be the numbers of the `rows` (NULL: not lazy)
 * that are indexed? Those are looked at on the CPU (device type 0) and on CUDA (1). */
static bool selects_rows(PyObject *o, Py_ssize_t i, const koila_meta_info *rows)
{
    koila_meta m;
    const bool lazy = koila__is_lazy(o);
    if (lazy) {
        m = koila__handle_of(o)->meta;
    } else if (koila__meta_of(o, &m) < 0) {
        PyErr_Clear();
        return false;
    }
    const koila_meta_info *index = koila_meta_get(koila__table, m);
    if (index->dtype == KOILA_DTYPE_BOOL || index->dtype == KOILA_DTYPE_U8)
        return true;
    return i == 0 && rows && rows->n_dims && index->n_dims && index->device >> 8 <= 1 && !lazy &&
           index->n_elements == (uint64_t)rows->size[0];
}

/* index(self, indices, ...): is one of them a mask, or could the first be the row numbers of self?
 */
static bool index_is_special(PyObject *args)
{
    PyObject *list = PyTuple_GET_SIZE(args) > 1 ? PyTuple_GET_ITEM(args, 1) : NULL;
    if (!list || !(PyList_Check(list) || PyTuple_Check(list)))
        return false;
    PyObject *self = PyTuple_GET_ITEM(args, 0);
    const koila_meta_info *rows =
        koila__is_lazy(self) ? koila_meta_get(koila__table, koila__handle_of(self)->meta) : NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
        PyObject *o = PySequence_Fast_GET_ITEM(list, i);
        if (o != Py_None && koila__is_tensor(o) && selects_rows(o, i, rows))
            return true;
    }
    return false;
}

static PyObject *dispatch_op(const op_info *op, PyObject *args, PyObject *kwargs)
{
    switch (op->kind) {
    case PLAIN:
    case WRITE:
    case FACTORY:
        return koila__record_call(op, args, kwargs);
    case VIEW:
    case SAME:
        return koila__record_view(op, args, kwargs);
    case STRIDED:
        if (PyTuple_GET_SIZE(args) < 4 || PyTuple_GET_ITEM(args, 3) == Py_None ||
            PyDict_GET_SIZE(kwargs) || koila__begins_within(PyTuple_GET_ITEM(args, 0)))
            break;
        return koila__record_view(op, args, kwargs);
    case INDEX:
        koila__hold_ids();
        const bool is_special = index_is_special(args);
        koila__release_ids();
        if (!is_special)
            return koila__record_call(op, args, kwargs);
        break;
    default:
        break;
    }
    return PyObject_CallFunctionObjArgs(op->handler, op->func, args, kwargs, NULL);
}

/* Tensor classes beside ours are refused, by an exception. */
static int check_types(PyObject *func, PyObject *types)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); i++) {
        PyObject *type = PyTuple_GET_ITEM(types, i);
        if (type == (PyObject *)koila__lazy_class)
            continue;
        PyObject *ok = koila__ask("check_type", func, type, NULL);
        if (!ok)
            return -1;
        Py_DECREF(ok);
    }
    return 0;
}

static bool is_of_whole_numbers(PyObject *tensor)
{
    PyObject *dtype = koila__is_tensor(tensor) ? koila__attribute(tensor, "dtype") : NULL;
    const bool yes = dtype && koila__dtype_is_whole(koila__dtype_of(dtype));
    Py_XDECREF(dtype);
    PyErr_Clear();
    return yes;
}

/* Is `result` a lazy tensor, or some of them? Plain ones of whole numbers may be among these, for
 * autograd does not follow them: cuDNN's batch norm leaves one. */
static bool is_lazy_result(PyObject *result)
{
    if (Py_TYPE(result) == koila__lazy_class)
        return !koila__is_settled(result);
    if (!PyTuple_Check(result) && !PyList_Check(result))
        return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); i++) {
        PyObject *o = PySequence_Fast_GET_ITEM(result, i);
        if (o != Py_None && !is_lazy_result(o) && !is_of_whole_numbers(o))
            return false;
    }
    return true;
}

static PyObject *dispatch_here(PyObject *func, PyObject *args, PyObject *kwargs)
{
    const op_info *op = koila__op_of(func);
    if (!op)
        return NULL;
    int met = 0;
    if (koila__n_factories | koila__n_settled)
        met = koila__factories_meet(op->written, op->written_kw, args, kwargs);
    if (met < 0)
        return NULL;
    PyObject *r =
        met ? koila__ask("on_settled", func, args, kwargs) : dispatch_op(op, args, kwargs);
    if (r && koila__n_factories)
        koila__factories_derive(args, kwargs, r);
    if (r && !is_lazy_result(r))
        koila__note_exit(args, kwargs, r);
    return r;
}

static PyObject *dispatch_call(PyObject *func, PyObject *args, PyObject *kwargs)
{
    static _Thread_local bool is_own; /* calls of this thread are its own context's */
    if (is_own)
        return dispatch_here(func, args, kwargs);
    koila__context *to;
    if (koila__lend_for_call(args, kwargs, &to) < 0)
        return NULL;
    if (!to) {
        is_own = !koila__context_lent() && (koila__context_peek() || koila__settings_any());
        return dispatch_here(func, args, kwargs);
    }
    koila__context *before = koila__context_lend(to);
    PyObject *r = dispatch_here(func, args, kwargs);
    koila__context_give_back(before);
    Py_DECREF(to);
    return r;
}

PyObject *koila__dispatch(PyObject *module, PyObject *const *a, Py_ssize_t n)
{
    if (n < 3) {
        PyErr_SetString(PyExc_TypeError, "dispatch(func, types, args, kwargs)");
        return NULL;
    }
    PyObject *func = a[0], *types = a[1], *args = a[2];
    if (PyTuple_Check(types) && check_types(func, types) < 0)
        return NULL;
    if (n > 3 && a[3])
        return dispatch_call(func, args, a[3]);
    PyObject *kwargs = PyDict_New();
    PyObject *r = kwargs ? dispatch_call(func, args, kwargs) : NULL;
    Py_XDECREF(kwargs);
    return r;
}

/* record(func, args, kwargs): the default path, for Python's special cases */
PyObject *koila__py_record(PyObject *module, PyObject *const *a, Py_ssize_t n)
{
    if (n != 3 || !PyTuple_Check(a[1]) || !PyDict_Check(a[2])) {
        PyErr_SetString(PyExc_TypeError, "record(func, args, kwargs)");
        return NULL;
    }
    return koila__record(a[0], a[1], a[2]);
}
