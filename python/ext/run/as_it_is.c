/* as_it_is.c — what koila._opaque asks and tells of each slice of a module that runs as it is. Are
 * its tables, its parameters and its gradients what they most often are? No means: look closer,
 * which Python does, and which takes longer.
 */
#include "ground/accumulate.h"
#include "ground/helpers.h"
#include "ground/real.h"
#include "run/run.h"

/* Has the table these items, in this order? */
static bool is_as_seen(PyObject *table, PyObject *items)
{
    PyObject *key, *object;
    Py_ssize_t at = 0;
    if (2 * PyDict_GET_SIZE(table) != PyTuple_GET_SIZE(items))
        return false;
    for (Py_ssize_t k = 0; PyDict_Next(table, &at, &key, &object); k += 2)
        if (key != PyTuple_GET_ITEM(items, k) || object != PyTuple_GET_ITEM(items, k + 1))
            return false;
    return true;
}

/* are_as_seen([(table, its items), ...]) → has each table these keys and objects, and no others?
 * Items are a tuple: key, object, key, object, ... */
static PyObject *py_are_as_seen(PyObject *self, PyObject *tables)
{
    (void)self;
    if (!PyList_Check(tables)) {
        PyErr_SetString(PyExc_TypeError, "are_as_seen([(table, its items), ...])");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tables); i++) {
        PyObject *pair = PyList_GET_ITEM(tables, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
            !PyDict_Check(PyTuple_GET_ITEM(pair, 0)) || !PyTuple_Check(PyTuple_GET_ITEM(pair, 1))) {
            PyErr_SetString(PyExc_TypeError, "are_as_seen(): a table is a dict with a tuple");
            return NULL;
        }
        if (!is_as_seen(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static bool are_equal_names(PyObject *a, PyObject *b)
{
    return a == b || (PyUnicode_Check(a) && PyUnicode_Check(b) && PyUnicode_Compare(a, b) == 0);
}

/* are_own({name: parameter}, names, parameters, needed, torch.nn.Parameter) → are these the same
 * parameters in the same order, which need gradients as `needed` says, and that nobody watches? */
static PyObject *py_are_own(PyObject *self, PyObject *args)
{
    PyObject *found, *names, *parameters, *needed, *class, *name, *p;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!:are_own", &PyDict_Type, &found, &PyList_Type, &names,
                          &PyList_Type, &parameters, &PyList_Type, &needed, &PyType_Type, &class))
        return NULL;
    const Py_ssize_t n = PyDict_GET_SIZE(found);
    if (PyList_GET_SIZE(names) != n || PyList_GET_SIZE(parameters) != n ||
        PyList_GET_SIZE(needed) != n)
        Py_RETURN_FALSE;
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; PyDict_Next(found, &at, &name, &p); i++) {
        const bool is_needed = PyList_GET_ITEM(needed, i) == Py_True;
        if (p != PyList_GET_ITEM(parameters, i) || !Py_IS_TYPE(p, (PyTypeObject *)class) ||
            !are_equal_names(name, PyList_GET_ITEM(names, i)) ||
            koila__requires_grad(p) != is_needed || koila__leaf_has_hooks(p))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* n_values({key: [value, ...]}) → how many values are in these lists? */
static PyObject *py_n_values(PyObject *self, PyObject *lists)
{
    PyObject *key, *list;
    Py_ssize_t at = 0, n = 0;
    (void)self;
    if (!PyDict_Check(lists)) {
        PyErr_SetString(PyExc_TypeError, "n_values({key: [value, ...]})");
        return NULL;
    }
    while (PyDict_Next(lists, &at, &key, &list))
        n += PyList_Check(list) ? PyList_GET_SIZE(list) : 0;
    return PyLong_FromSsize_t(n);
}

/* Does only `tensor` use its memory, and all of it? use_count: torch's, of a storage. -1 with an
 * exception. */
static int has_memory_alone(PyObject *tensor, PyObject *use_count)
{
    uint64_t n_bytes;
    const void *storage = koila__storage_of(tensor);
    if (!storage || koila__bytes_of(tensor, &n_bytes) < 0)
        return PyErr_Occurred() ? -1 : 0;
    if (koila__storage_bytes(tensor) != n_bytes)
        return 0;
    PyObject *at = PyLong_FromVoidPtr((void *)storage);
    PyObject *n = at ? PyObject_CallOneArg(use_count, at) : NULL;
    const long count = n ? PyLong_AsLong(n) : -1;
    Py_XDECREF(at);
    Py_XDECREF(n);
    return PyErr_Occurred() ? -1 : count == 1;
}

/* are_alone([tensor | None, ...], use_count) → are they tensors, each with memory that no other
 * tensor uses, and that it fills? */
static PyObject *py_are_alone(PyObject *self, PyObject *args)
{
    PyObject *tensors, *use_count;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O:are_alone", &PyList_Type, &tensors, &use_count))
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *t = PyList_GET_ITEM(tensors, i);
        /* somebody else's, or in the list twice */
        const int alone =
            koila__is_tensor(t) && Py_REFCNT(t) == 1 ? has_memory_alone(t, use_count) : 0;
        if (alone <= 0)
            return alone < 0 ? NULL : Py_NewRef(Py_False);
    }
    Py_RETURN_TRUE;
}

static PyObject *py_wants_graph(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    return PyBool_FromLong(koila__wants_graph());
}

static PyObject *py_note_compiled(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    koila__note_compiled();
    Py_RETURN_NONE;
}

static PyObject *py_note_used_up(PyObject *self, PyObject *bytes)
{
    (void)self;
    const uint64_t n = PyLong_AsUnsignedLongLong(bytes);
    if (PyErr_Occurred())
        return NULL;
    koila__note_used_up(n);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "are_as_seen", py_are_as_seen, METH_O,
      "are_as_seen([(table, its items), ...]): has each table these keys and objects, and no "
      "others?" },
    { "are_own", py_are_own, METH_VARARGS,
      "are_own({name: parameter}, names, parameters, needed, torch.nn.Parameter): are they the "
      "same parameters, which need gradients as told, and that nobody watches?" },
    { "n_values", py_n_values, METH_O,
      "n_values({key: [value, ...]}): how many values are in these lists?" },
    { "are_alone", py_are_alone, METH_VARARGS,
      "are_alone([tensor | None, ...], use_count): are they tensors, each with memory that no "
      "other tensor uses, and that it fills?" },
    { "wants_graph", py_wants_graph, METH_NOARGS,
      "wants_graph(): does the plan read the graph of the module that this thread runs now?" },
    { "note_compiled", py_note_compiled, METH_NOARGS,
      "note_compiled(): the module that this thread runs now was compiled meanwhile." },
    { "note_used_up", py_note_used_up, METH_O,
      "note_used_up(bytes): so many waited for the backward that this thread runs now." },
    { NULL, NULL, 0, NULL },
};

int koila__as_it_is_add(PyObject *m) { return PyModule_AddFunctions(m, methods); }
