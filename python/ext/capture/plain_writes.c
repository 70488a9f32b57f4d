/* plain_writes.c — writes of plain tensors between lazy() and backward.
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
 * classes to come copy ours. Functions that write: plain_functions.c.
 *
 * Only for tensors that the open step has recorded as they are and that are no batch. Of one that
 * requires a gradient, only where it was read without autograd and the results are still to be
 * computed (a teacher that nobody froze): weights are large, and writing those that autograd saved
 * is an error in eager too. A write that is not seen here, of an operator called below `torch.ops`
 * or in C++, leaves the version counter to tell: StaleValueError. So nothing is wrong where CPython
 * or torch call such a method in another way.
 */
#include "capture/capture.h"

#include "base/vec.h"

/* How torch declares methods; each way has one entry of CPython's. */
enum { NO_ARGUMENTS, ONE_ARGUMENT, POSITIONAL, WITH_NAMES, N_WAYS };
static vectorcallfunc theirs[N_WAYS];
static objobjargproc their_assignment;

/* ---- what is about to be written */

/* Storages, each at one address, sorted by it. */
typedef VEC(const void *) storages;

/* Those of the plain tensors in `written`: a tensor, or lists of them, `depth` deep. -1: no memory.
 */
static int add_storages(storages *s, PyObject *written, int depth)
{
    if (depth && (PyList_Check(written) || PyTuple_Check(written))) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(written); i++)
            if (add_storages(s, PySequence_Fast_GET_ITEM(written, i), depth - 1) < 0)
                return -1;
        return 0;
    }
    const void *storage = NULL;
    if (koila__is_tensor(written) && !koila__is_lazy(written))
        storage = koila__storage_of(written);
    return !storage || koila__vec_push(&koila__libc, s, storage) ? 0 : -1;
}

static int by_address(const void *a, const void *b)
{
    const uintptr_t x = (uintptr_t)*(const void *const *)a;
    const uintptr_t y = (uintptr_t)*(const void *const *)b;
    return (x > y) - (x < y);
}

static storages storages_of(PyObject *written)
{
    enum { DEEPEST = 3 }; /* a list of what is written, such as lists of lists of all_gather() */
    storages s = { 0 };
    if (add_storages(&s, written, DEEPEST) < 0)
        koila__vec_free(&koila__libc, &s);
    if (s.n > 1)
        qsort(s.at, s.n, sizeof *s.at, by_address);
    return s;
}

static bool is_among(const storages *s, const void *storage)
{
    if (s->n == 1)
        return s->at[0] == storage;
    return storage && bsearch(&storage, s->at, s->n, sizeof *s->at, by_address);
}

/* Does the slot tell a tensor in one of these storages? It is borrowed, and gone where the leaf has
 * got another. */
static bool is_there(const koila__tape *t, const tape_leaf *leaf, const storages *s)
{
    return leaf->real && koila_value_get(t->graph, leaf->value).node == KOILA_NONE &&
           t->values[leaf->value].real == leaf->real && is_among(s, koila__storage_of(leaf->real));
}

/* And is it as it was recorded? */
static bool is_unwritten(const tape_leaf *leaf)
{
    uint32_t version;
    return koila__version_of(leaf->real, &version) == 0 && version == leaf->version;
}

/* Of a value: what is still to be computed for lazy tensors that live reads it; so does a call that
 * was recorded with autograd. */
enum { IS_NEEDED = 1, HAS_GRADIENT = 2 };

/* PyMem: these marks of all values of t. NULL: no memory. */
static uint8_t *marks_of(const koila__tape *t)
{
    const koila_graph *g = t->graph;
    const uint32_t n = koila_graph_n_values(g);
    uint8_t *marks = n <= t->n_values_alloc ? PyMem_Calloc(n + 1, sizeof *marks) : NULL;
    for (koila_value v = 0; marks && v < n; v++)
        if (t->values[v].n_handles)
            marks[v] = IS_NEEDED;
    for (koila_node i = marks ? koila_graph_n_nodes(g) : 0; i-- > 0;) {
        const koila_node_info info = koila_node_get(g, i);
        const koila_sig_info *sig = koila_sig_get(koila__table, info.sig);
        bool is_needed = false;
        for (uint32_t o = 0; o < sig->n_outputs; o++) {
            const koila_value v = info.first_output + o;
            is_needed |= (marks[v] & IS_NEEDED) && !t->values[v].real;
        }
        for (uint32_t k = 0; is_needed && k < sig->n_inputs; k++)
            marks[koila_node_inputs(g, i)[k]] |=
                IS_NEEDED | (sig->grad_mode & 1 ? HAS_GRADIENT : 0);
    }
    return marks;
}

/* Does the leaf get a copy? One that wants a gradient only where it was read without autograd, as
 * of a teacher. *marks: NULL, or what marks_of() has given. */
static bool is_copied(const koila__tape *t, const tape_leaf *leaf, uint8_t **marks)
{
    if (!koila__requires_grad(leaf->real))
        return true;
    if (!*marks)
        *marks = marks_of(t);
    return *marks && (*marks)[leaf->value] == IS_NEEDED;
}

/* New list: the leaves there that get a copy. NULL: there are none, or an exception. */
static PyObject *values_on(const koila__tape *t, const storages *s)
{
    PyObject *values = NULL;
    uint8_t *marks = NULL;
    for (uint32_t i = 0; i < t->n_leaf_slots; i++) {
        const tape_leaf *leaf = &t->leaves[i];
        if (!is_there(t, leaf, s) || !is_unwritten(leaf) || !is_copied(t, leaf, &marks))
            continue;
        if (!values)
            values = PyList_New(0);
        PyObject *v = values ? PyLong_FromUnsignedLong(leaf->value) : NULL;
        const int rc = v ? PyList_Append(values, v) : -1;
        Py_XDECREF(v);
        if (rc < 0) {
            Py_CLEAR(values);
            break;
        }
    }
    PyMem_Free(marks);
    return values;
}

static void copy_leaves(koila__tape *t, const storages *s)
{
    PyObject *values = values_on(t, s);
    if (!values)
        return;
    Py_INCREF(t);
    Py_XDECREF(koila__ask("keep_contents", (PyObject *)t, values, NULL));
    Py_DECREF(t);
    Py_DECREF(values);
}

bool koila__keep_contents(PyObject *written)
{
    if (!koila__tapes || koila__is_lazy(written))
        return true;
    const koila__context *c = koila__context_lent() ? NULL : koila__context_peek();
    koila__tape *t = c ? (koila__tape *)c->open : NULL;
    if (!t || !t->n_leaf_slots || t->planned)
        return true;
    storages s = storages_of(written);
    if (s.n)
        copy_leaves(t, &s);
    koila__vec_free(&koila__libc, &s);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return false;
    PyErr_Clear();
    return true;
}

static void values_are_gone(koila__tape *t, const storages *s)
{
    for (uint32_t i = 0; i < t->n_leaf_slots; i++)
        if (is_there(t, &t->leaves[i], s))
            t->leaves[i].version = UINT32_MAX;
    const uint32_t n = koila_graph_n_values(t->graph);
    for (koila_value v = 0; v < n && v < t->n_values_alloc; v++)
        if (t->values[v].real && is_among(s, koila__storage_of(t->values[v].real)))
            t->values[v].version = UINT32_MAX;
}

void koila__contents_gone(PyObject *written)
{
    if (!koila__tapes)
        return;
    storages s = storages_of(written);
    for (koila__tape *t = koila__tapes; t && s.n; t = t->next_tape)
        if (!t->let_go && !t->planned)
            values_are_gone(t, &s);
    koila__vec_free(&koila__libc, &s);
}

/* ---- methods */

static PyObject *called(int way, PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    if (PyVectorcall_NARGS(n) > 0 && !koila__keep_contents(values[0]))
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
    return koila__keep_contents(tensor) ? their_assignment(tensor, index, value) : -1;
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

bool koila__writes_by_name(const char *name)
{
    static const char *const others[] = { "detach_", "requires_grad_", "rename_", "share_memory_",
                                          NULL };
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
    return n > 1 && name[n - 1] == '_' && name[n - 2] != '_';
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
        if (way < 0 || !d->vectorcall || !koila__writes_by_name(d->d_method->ml_name) ||
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
