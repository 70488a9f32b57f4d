/* plain_writes.c — in-place methods of plain tensors between lazy() and backward.
 *
 *   q = embedding(codes, self.codebook)          # recorded
 *   self.codebook.copy_(average / count)         # plain, at once: q would be stale
 *   self.age[used] = 0                           # the same
 *
 * A write that has a lazy tensor among its arguments comes to koila, and what was recorded from the
 * written memory gets a copy of its own first (Note [Leaves]). A plain one does not. So the methods
 * of torch's tensors that write have another vectorcall entry, as torch.zeros has (Note [Why the
 * function itself] in factories.c), which makes that copy and then calls torch's. An assignment to
 * an item is a slot of the class, which each subclass has copied: theirs are exchanged too, and
 * classes to come copy ours.
 *
 * Only for tensors that the open step has recorded as they are, that require no gradient (weights
 * are large, and writing them between forward and backward is an error in eager too), and that are
 * no batch. A write that is not seen here, `out=` or a function with lists, leaves the version
 * counter to tell: StaleValueError. So nothing is wrong where CPython or torch call such a method
 * in another way.
 */
#include "capture/capture.h"

/* How torch declares methods; each way has one entry of CPython's. */
enum { NO_ARGUMENTS, ONE_ARGUMENT, POSITIONAL, WITH_NAMES, N_WAYS };
static vectorcallfunc theirs[N_WAYS];
static objobjargproc their_assignment;

/* Does the slot tell a tensor that lies in `storage`, wants no gradient and is as it was recorded?
 * Its tensor is borrowed, and gone where the leaf has got another. */
static bool is_on(const koila__tape *t, const tape_leaf *leaf, const void *storage)
{
    uint32_t version;
    return leaf->real && koila_value_get(t->graph, leaf->value).node == KOILA_NONE &&
           t->values[leaf->value].real == leaf->real && koila__storage_of(leaf->real) == storage &&
           !koila__requires_grad(leaf->real) && koila__version_of(leaf->real, &version) == 0 &&
           version == leaf->version;
}

/* New list: the leaves that were recorded from the memory of `written`, and are as they were
 * recorded. NULL: there are none, or an exception. */
static PyObject *values_on(const koila__tape *t, PyObject *written)
{
    const void *storage = koila__storage_of(written);
    PyObject *values = NULL;
    for (uint32_t i = 0; storage && i < t->n_leaf_slots; i++) {
        if (!is_on(t, &t->leaves[i], storage))
            continue;
        if (!values)
            values = PyList_New(0);
        PyObject *v = values ? PyLong_FromUnsignedLong(t->leaves[i].value) : NULL;
        const int rc = v ? PyList_Append(values, v) : -1;
        Py_XDECREF(v);
        if (rc < 0) {
            Py_CLEAR(values);
            break;
        }
    }
    return values;
}

/* False: an exception that is no error, as of a signal. If the copies fail, what was recorded is
 * stale. */
static bool keep_contents(PyObject *written)
{
    if (!koila__tapes || koila__is_lazy(written))
        return true;
    const koila__context *c = koila__context_lent() ? NULL : koila__context_peek();
    koila__tape *t = c ? (koila__tape *)c->open : NULL;
    if (!t || !t->n_leaf_slots || t->planned || !koila__is_tensor(written))
        return true;
    PyObject *values = values_on(t, written);
    PyObject *done = NULL;
    if (values) {
        Py_INCREF(t);
        done = koila__ask("keep_contents", (PyObject *)t, values, NULL);
        Py_DECREF(t);
        Py_DECREF(values);
    }
    Py_XDECREF(done);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return false;
    PyErr_Clear();
    return true;
}

static PyObject *called(int way, PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    if (PyVectorcall_NARGS(n) > 0 && !keep_contents(values[0]))
        return NULL;
    return theirs[way](f, values, n, names);
}

static PyObject *no_arguments(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return called(NO_ARGUMENTS, f, values, n, names);
}

static PyObject *one_argument(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return called(ONE_ARGUMENT, f, values, n, names);
}

static PyObject *positional(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return called(POSITIONAL, f, values, n, names);
}

static PyObject *with_names(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return called(WITH_NAMES, f, values, n, names);
}

static const vectorcallfunc ours[N_WAYS] = { no_arguments, one_argument, positional, with_names };

PyObject *koila__write_unseen(PyObject *method, PyObject *const *values, size_t n)
{
    const vectorcallfunc entry = PyVectorcall_Function(method);
    for (int way = 0; way < N_WAYS; way++)
        if (entry == ours[way])
            return theirs[way](method, values, n, NULL);
    return PyObject_Vectorcall(method, values, n, NULL);
}

/* tensor[index] = value */
static int assignment(PyObject *tensor, PyObject *index, PyObject *value)
{
    return keep_contents(tensor) ? their_assignment(tensor, index, value) : -1;
}

/* ---- start-up */

/* Of a method's flags; -1: torch has none of that kind. */
static int way_of(int flags)
{
    switch (flags) {
    case METH_NOARGS:
        return NO_ARGUMENTS;
    case METH_O:
        return ONE_ARGUMENT;
    case METH_VARARGS:
        return POSITIONAL;
    case METH_VARARGS | METH_KEYWORDS:
        return WITH_NAMES;
    default:
        return -1;
    }
}

/* Does the method write contents, by its name? Those that change sizes or flags alone do not. */
static bool writes(const char *name)
{
    static const char *const others[] = {
        "detach_",     "requires_grad_", "rename_",   "resize_",   "resize_as_", "set_",
        "t_",          "transpose_",     "swapaxes_", "swapdims_", "squeeze_",   "unsqueeze_",
        "as_strided_", "share_memory_",  NULL,
    };
    static const char *const operators[] = {
        "__iadd__",      "__isub__",    "__imul__",    "__itruediv__", "__idiv__",
        "__ifloordiv__", "__imod__",    "__ipow__",    "__iand__",     "__ior__",
        "__ixor__",      "__ilshift__", "__irshift__", NULL,
    };
    for (int i = 0; operators[i]; i++)
        if (!strcmp(name, operators[i]))
            return true;
    for (int i = 0; others[i]; i++)
        if (!strcmp(name, others[i]))
            return false;
    const size_t n = strlen(name);
    return n > 1 && name[0] != '_' && name[n - 1] == '_' && name[n - 2] != '_';
}

static void watch_methods(PyObject *methods)
{
    PyObject *items = PyMapping_Items(methods);
    for (Py_ssize_t i = 0; items && i < PyList_GET_SIZE(items); i++) {
        PyObject *m = PyTuple_GET_ITEM(PyList_GET_ITEM(items, i), 1);
        if (!Py_IS_TYPE(m, &PyMethodDescr_Type))
            continue;
        PyMethodDescrObject *d = (PyMethodDescrObject *)m;
        const int way = way_of(d->d_method->ml_flags);
        if (way < 0 || !d->vectorcall || !writes(d->d_method->ml_name) ||
            d->vectorcall == ours[way] || (theirs[way] && theirs[way] != d->vectorcall))
            continue;
        theirs[way] = d->vectorcall;
        d->vectorcall = ours[way];
    }
    Py_XDECREF(items);
}

/* Of the class and of those that inherit its slot. */
static void watch_heirs(PyTypeObject *class)
{
    PyMappingMethods *slots = class->tp_as_mapping;
    if (!slots || slots->mp_ass_subscript != their_assignment)
        return;
    slots->mp_ass_subscript = assignment;
    PyObject *heirs = PyObject_CallMethod((PyObject *)class, "__subclasses__", NULL);
    for (Py_ssize_t i = 0; heirs && i < PyList_GET_SIZE(heirs); i++)
        watch_heirs((PyTypeObject *)PyList_GET_ITEM(heirs, i));
    Py_XDECREF(heirs);
}

/* The slots, and the method `__setitem__`, which holds what the slot of its class was. */
static void watch_assignments(PyTypeObject *class, PyObject *methods)
{
    PyMappingMethods *slots = class->tp_as_mapping;
    if (their_assignment || !slots || !slots->mp_ass_subscript)
        return;
    their_assignment = slots->mp_ass_subscript;
    watch_heirs(class);
    PyObject *m = PyMapping_GetItemString(methods, "__setitem__");
    if (m && Py_IS_TYPE(m, &PyWrapperDescr_Type)) {
        PyWrapperDescrObject *d = (PyWrapperDescrObject *)m;
        if (d->d_wrapped == (void *)their_assignment)
            d->d_wrapped = (void *)assignment;
    }
    Py_XDECREF(m);
}

int koila__plain_writes_setup(PyObject *class)
{
    PyObject *methods = PyObject_GetAttrString(class, "__dict__");
    if (methods) {
        watch_methods(methods);
        watch_assignments((PyTypeObject *)class, methods);
    }
    Py_XDECREF(methods);
    return PyErr_Occurred() ? -1 : 0;
}
