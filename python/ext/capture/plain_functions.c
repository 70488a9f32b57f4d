/* plain_functions.c — functions of torch that write plain tensors between lazy() and backward.
 *
 *   torch.mul(count, 0.9, out=self.count)             # out=, of any function
 *   torch.relu_(self.buffer)                          # what F.relu(inplace=True) calls
 *   torch._foreach_lerp_(averages, parameters, 0.1)   # lists
 *   torch.distributed.all_reduce(self.total)          # calls a method of the process group
 *
 * As with methods (plain_writes.c), what was recorded from the written memory gets a copy of its
 * own, and the function goes on as it would. Torch's functions have no vectorcall entry: CPython
 * makes a tuple and a dictionary of the arguments for them. Ours looks whether there is a step, and
 * has CPython do that: some nanoseconds, and none in a program that koila leaves alone, where
 * torch's functions are as they were (factory_switch.c).
 *
 * Batch norm and collectives count no version of what they write. There no version counter tells of
 * what got no copy (a weight, a step that is not open any more), so it is marked as gone.
 */
#include "capture/capture.h"

/* How CPython calls what has no vectorcall entry. Its headers declare it for itself since 3.13. */
PyAPI_FUNC(PyObject *)
    _PyObject_MakeTpCall(PyThreadState *, PyObject *, PyObject *const *, Py_ssize_t, PyObject *);

/* Calls torch's function as CPython would, had it no entry of ours. */
static PyObject *passed_on(PyObject *f, PyObject *const *values, size_t n_values, PyObject *names)
{
    const Py_ssize_t n = PyVectorcall_NARGS(n_values);
    if (PyCFunction_GET_FLAGS(f) & METH_FASTCALL)
        return ((_PyCFunctionFastWithKeywords)(void (*)(void))PyCFunction_GET_FUNCTION(f))(
            PyCFunction_GET_SELF(f), values, n, names);
    return _PyObject_MakeTpCall(PyThreadState_Get(), f, values, n, names);
}

/* The argument of that name, borrowed; NULL: there is none. */
static PyObject *named(const char *name, PyObject *const *values, size_t n, PyObject *names)
{
    const Py_ssize_t length = (Py_ssize_t)strlen(name);
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *o = PyTuple_GET_ITEM(names, i);
        if (PyUnicode_GET_LENGTH(o) == length && !PyUnicode_CompareWithASCIIString(o, name))
            return values[PyVectorcall_NARGS(n) + i];
    }
    return NULL;
}

/* Is there a step? */
static inline bool is_recording(void)
{
    if (!koila__tapes)
        koila__writers_idle();
    return koila__tapes;
}

/* f(..., out=tensor) */
static PyObject *any_function(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    PyObject *out = is_recording() && names ? named("out", values, n, names) : NULL;
    return out && !koila__keep_contents(out) ? NULL : passed_on(f, values, n, names);
}

/* relu_(tensor), _foreach_mul_(tensors, 2.0) */
static PyObject *in_place(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    if (is_recording()) {
        PyObject *written = PyVectorcall_NARGS(n) > 0 ? values[0] : NULL;
        if (!written)
            written = named("input", values, n, names);
        if (!written)
            written = named("self", values, n, names);
        if (written && !koila__keep_contents(written))
            return NULL;
    }
    return passed_on(f, values, n, names);
}

/* ---- writes that count no version */

/* f writes `written`, a new list; NULL with an exception. */
static PyObject *uncounted(PyObject *f, PyObject *const *values, size_t n, PyObject *names,
                           PyObject *written)
{
    PyObject *r = NULL;
    if (written && koila__keep_contents(written)) {
        r = passed_on(f, values, n, names);
        koila__contents_gone(written);
    }
    Py_XDECREF(written);
    return r;
}

static bool is_any_lazy(PyObject *const *values, Py_ssize_t n_given, PyObject *names)
{
    const Py_ssize_t n = n_given + (names ? PyTuple_GET_SIZE(names) : 0);
    for (Py_ssize_t i = 0; i < n; i++)
        if (koila__is_lazy(values[i]))
            return true;
    return false;
}

/* The running statistics are the arguments from `first` on, or have names. Those of lazy data are
 * effects of the step. */
static PyObject *moved(PyObject *f, PyObject *const *values, size_t n, PyObject *names,
                       Py_ssize_t first)
{
    const Py_ssize_t n_given = PyVectorcall_NARGS(n);
    if (is_any_lazy(values, n_given, names))
        return passed_on(f, values, n, names);
    PyObject *mean = n_given > first ? values[first] : named("running_mean", values, n, names);
    PyObject *variance =
        n_given > first + 1 ? values[first + 1] : named("running_var", values, n, names);
    return mean && variance ? uncounted(f, values, n, names, Py_BuildValue("[OO]", mean, variance))
                            : passed_on(f, values, n, names);
}

/* batch_norm(input, weight, bias, running_mean, running_var, training, ...) */
static PyObject *normalized(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    enum { MEAN = 3, TRAINING = 5 };
    const bool is_still = PyVectorcall_NARGS(n) > TRAINING && values[TRAINING] == Py_False;
    return !is_recording() || is_still ? passed_on(f, values, n, names)
                                       : moved(f, values, n, names, MEAN);
}

/* batch_norm_update_stats(input, running_mean, running_var, momentum) */
static PyObject *updated(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return is_recording() ? moved(f, values, n, names, 1) : passed_on(f, values, n, names);
}

/* group.allreduce(tensors, ...), group.allgather(output_tensors, input_tensors, ...) */
static PyObject *collective(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    enum { GROUP, RESULTS };
    if (!is_recording())
        return passed_on(f, values, n, names);
    const Py_ssize_t n_given = PyVectorcall_NARGS(n);
    PyObject *written = PyList_New(0);
    if (written && n_given > RESULTS && PyList_Append(written, values[RESULTS]) < 0)
        Py_CLEAR(written);
    for (Py_ssize_t i = 0; written && names && i < PyTuple_GET_SIZE(names); i++) {
        const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i));
        const bool is_result =
            name && (!strncmp(name, "tensor", strlen("tensor")) || !strncmp(name, "out", 3));
        if (!name || (is_result && PyList_Append(written, values[n_given + i]) < 0))
            Py_CLEAR(written);
    }
    return uncounted(f, values, n, names, written);
}

/* ---- start-up */

/* A function that takes a tuple and a dictionary, or, of collectives, the arguments as they are. */
static void watch(PyObject *function, vectorcallfunc entry)
{
    if (!function || !PyCFunction_CheckExact(function))
        return;
    for (int k = 0; k < KOILA__N_FACTORY_KINDS; k++)
        if (koila__switch_function(k) == function)
            return; /* factories.c has an entry of its own */
    const int way = PyCFunction_GET_FLAGS(function) & ~METH_STATIC;
    const bool has_entry = ((PyCFunctionObject *)function)->vectorcall != NULL;
    if ((way == (METH_VARARGS | METH_KEYWORDS) && !has_entry) ||
        (way == (METH_FASTCALL | METH_KEYWORDS) && entry == collective))
        koila__writers_add(function, entry);
}

static vectorcallfunc entry_for(const char *name)
{
    static const struct {
        const char *name;
        vectorcallfunc entry;
    } special[] = {
        { "batch_norm", normalized },
        { "_batch_norm_impl_index", normalized },
        { "native_batch_norm", normalized },
        { "_native_batch_norm_legit", normalized },
        { "cudnn_batch_norm", normalized },
        { "miopen_batch_norm", normalized },
        { "instance_norm", normalized },
        { "batch_norm_gather_stats", normalized },
        { "batch_norm_gather_stats_with_counts", normalized },
        { "batch_norm_update_stats", updated },
    };
    for (size_t i = 0; i < sizeof special / sizeof *special; i++)
        if (!strcmp(special[i].name, name))
            return special[i].entry;
    return koila__writes_by_name(name) ? in_place : any_function;
}

/* The functions that are attributes of `where`. */
static void watch_functions(PyObject *where)
{
    PyObject *names = PyObject_Dir(where);
    for (Py_ssize_t i = 0; names && i < PyList_GET_SIZE(names); i++) {
        const char *name = PyUnicode_AsUTF8(PyList_GET_ITEM(names, i));
        PyObject *f = name ? PyObject_GetAttrString(where, name) : NULL;
        watch(f, name ? entry_for(name) : NULL);
        Py_XDECREF(f);
        PyErr_Clear();
    }
    Py_XDECREF(names);
}

static void watch_collectives(PyObject *class)
{
    static const char *const names[] = {
        "broadcast",
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "allgather",
        "all_gather_single",
        "_allgather_base",
        "allgather_coalesced",
        "all_gather_single_coalesced",
        "allgather_into_tensor_coalesced",
        "gather",
        "scatter",
        "reduce_scatter",
        "reduce_scatter_single",
        "_reduce_scatter_base",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
        "alltoall_base",
        "alltoall",
        "recv",
        "recv_anysource",
    };
    PyObject *methods = PyObject_GetAttrString(class, "__dict__");
    for (size_t i = 0; methods && i < sizeof names / sizeof *names; i++) {
        PyObject *method = PyMapping_GetItemString(methods, names[i]);
        if (method && PyInstanceMethod_Check(method))
            watch(PyInstanceMethod_GET_FUNCTION(method), collective);
        Py_XDECREF(method);
        PyErr_Clear();
    }
    Py_XDECREF(methods);
}

void koila__plain_functions_setup(PyObject *torch)
{
    static const char *const places[] = {
        "_VariableFunctions", "_nn", "_linalg", "_fft", "_special", "_sparse", "_nested",
    };
    PyObject *c = PyObject_GetAttrString(torch, "_C");
    for (size_t i = 0; c && i < sizeof places / sizeof *places; i++) {
        PyObject *where = PyObject_GetAttrString(c, places[i]);
        if (where)
            watch_functions(where);
        Py_XDECREF(where);
        PyErr_Clear();
    }
    PyObject *c10d = c ? PyObject_GetAttrString(c, "_distributed_c10d") : NULL;
    PyObject *group = c10d ? PyObject_GetAttrString(c10d, "ProcessGroup") : NULL;
    PyObject *backend = group ? PyObject_GetAttrString(c10d, "Backend") : NULL;
    if (backend) {
        watch_collectives(group);
        watch_collectives(backend);
    }
    PyErr_Clear();
    Py_XDECREF(backend);
    Py_XDECREF(group);
    Py_XDECREF(c10d);
    Py_XDECREF(c);
}
