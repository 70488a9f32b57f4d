/* factories.c — torch.zeros, ones, full, empty and arange between lazy() and backward.
 *
 *   outputs = torch.zeros(T, B, V)           # of every sequence-to-sequence tutorial
 *   for t in range(T):
 *       outputs[t] = step(...)               # lazy data
 *
 * If `outputs` were plain, every write into it would make the written data concrete at once, and
 * nothing after that could be sliced. So while a step is open these four return a lazy factory, as
 * x.new_zeros() does: a node without data edges, made at the size of a slice when the step runs.
 * They do so only where it can matter and no mode or transform is involved; see open_here() and
 * make(). When in doubt the result is the plain tensor.
 *
 * A table of tokens by tokens (a mask, relative positions) is made from arange(n). If that were
 * plain, the table would be whole where the tokens of a sample are cut. So where n is near the size
 * of a long dimension of the batch, other than its rows, arange is a factory too.
 *
 * Note [Why the function itself]. A TorchFunctionMode costs microseconds on every torch call, and
 * other modes see it. Another object at torch.zeros would be missing from every table of functions
 * (Dynamo, TorchScript, torch.overrides, the constructors that `with torch.device()` changes), and
 * `from torch import zeros` would still give the old one. Turning the plain tensor into a lazy one
 * when lazy data is written comes too late: the dispatcher already holds it. So the function
 * *object* stays, and so does its method definition, from which CPython computes its hash. Only its
 * vectorcall pointer changes. CPython calls a function through that pointer if it is set; torch
 * leaves it NULL, and koila sets it while a step is open, see factory_switch.c. While a function
 * mode is active, our entry only passes the call on; the mode then calls again, with itself off and
 * its device filled in.
 *
 * Note [Settling]. The program asked for a plain tensor and may use it in ways that a lazy one does
 * not support: take its pointer, share it with numpy, resize it. Then the tensor *settles*: the
 * same Python object gets real memory by torch's own `x.data = memory`, which leaves version
 * counter, autograd and views as they are; views of it get the same memory. Only the class of the
 * lazy tensor remains. Torch still calls dispatch() first, which runs the operator on that memory
 * (on_settled() in _settled.py). From then on the tensor behaves as it would without koila: it is
 * exact, and lazy data written into it is made concrete, unsliced. It also settles when something
 * that is not lazy is written into it: a plain tensor, or a number into a part without a batch
 * dimension. `total += weights` and `mask[i, :n] = 1` in a loop over samples are known data, and a
 * node for each sample would be waste. A number written into a part with the batch, or a parameter
 * (`outputs[0] = start`), is recorded.
 */
#include "capture/capture.h"

#include <frameobject.h> /* PyFrame_GetBack on 3.10 */
#include <math.h>
#include <unistd.h>

enum { ZEROS, ONES, FULL, EMPTY, ARANGE };

/* Of a sample: a table of shorter ones is small. */
enum { LONG = 64 };

/* What koila needs of torch; all owned. */
static struct torch_facts {
    PyObject *n_function_modes, *n_dispatch_modes, *is_excluded, *autograd_key, *tracing_state,
        *functorch_level, *default_dtype, *default_device, *strided, *device;
    PyObject *full, *empty_strided, *arange; /* operators */
    PyObject *current_cuda_device;
    char *libraries[2]; /* directories of torch and koila, each with its final slash */
} facts;

/* ---- when a call gives a factory */

static void add_lengths(koila__tape *t, const koila_meta_info *batch)
{
    for (uint32_t d = 0; d < batch->n_dims; d++) {
        uint32_t i = 0;
        while (i < t->n_lengths && t->lengths[i] != batch->size[d])
            i++;
        if (i == t->n_lengths && i < sizeof t->lengths / sizeof *t->lengths &&
            batch->size[d] >= LONG)
            t->lengths[t->n_lengths++] = batch->size[d];
    }
}

void koila__factories_step(koila__tape *t, koila_meta batch)
{
    const uint16_t device = koila_meta_get(koila__table, batch)->device;
    add_lengths(t, koila_meta_get(koila__table, batch));
    const uint32_t most = sizeof t->devices / sizeof *t->devices;
    uint32_t i = 0;
    t->process = getpid();
    while (i < t->n_devices && t->devices[i] != device)
        i++;
    if (i < t->n_devices || i == most)
        return;
    t->devices[t->n_devices++] = device;
    if (t->n_devices == 1 && koila__tape_is_open(t))
        koila__switch_batch(1);
}

int koila__factories_hold(bool more)
{
    koila__context *c = koila__context_now();
    if (!c)
        return -1;
    koila_assert(more || c->n_holds > 0);
    c->n_holds += more ? 1 : -1;
    return 0;
}

/* Borrowed: the step in which the running code gets factories, or NULL. A thread that only works
 * for another's context gets none. */
static koila__tape *step_here(void)
{
    const koila__context *c = koila__context_lent() ? NULL : koila__context_peek();
    koila__tape *t = c && !c->n_holds ? (koila__tape *)c->open : NULL;
    return t && t->n_devices && t->process == getpid() && !koila__step_is_over(t) ? t : NULL;
}

/* Does the open step still have lazy data? Factories and concrete values are none. */
static bool has_lazy_data(const koila__tape *t)
{
    for (const koila__handle *h = t->handles; h; h = h->next_in_tape) {
        if (h->group->no_lazy_data)
            continue;
        if (h->value == KOILA_NONE || !t->values[h->value].real)
            return true;
        const koila_value_info v = koila_value_get(t->graph, h->group->cur);
        if (v.node == KOILA_NONE && v.leaf_kind == KOILA_LEAF_BATCH)
            return true;
    }
    return false;
}

static bool gives(PyObject *f, long wanted)
{
    PyObject *n = PyObject_CallNoArgs(f);
    const bool yes = n && PyLong_CheckExact(n) && PyLong_AsLong(n) == wanted;
    Py_XDECREF(n);
    return yes;
}

static bool is_none(PyObject *f)
{
    PyObject *r = f == Py_None ? Py_NewRef(f) : PyObject_CallNoArgs(f);
    const bool yes = r == Py_None;
    Py_XDECREF(r);
    return yes;
}

/* Does the user's program make this call? Torch's own code (parameters, optimizers, compilers,
 * samplers) and koila's keep their plain tensors. The frame of a mode only passes a call on and is
 * skipped. */
static bool program_calls(void)
{
    PyFrameObject *f = (PyFrameObject *)Py_XNewRef((PyObject *)PyEval_GetFrame());
    while (f) {
        PyCodeObject *code = PyFrame_GetCode(f);
        const char *file = PyUnicode_AsUTF8(code->co_filename);
        const char *name = PyUnicode_AsUTF8(code->co_name);
        const bool mode = name && !strcmp(name, "__torch_function__");
        bool yes = file && strncmp(file, "<eval_with_key>", 15); /* not a graph that torch traced */
        for (int i = 0; i < 2 && yes; i++)
            yes = strncmp(file, facts.libraries[i], strlen(facts.libraries[i])) != 0;
        PyFrameObject *back = mode ? PyFrame_GetBack(f) : NULL;
        Py_DECREF(code);
        Py_DECREF(f);
        if (!mode)
            return yes;
        f = back;
    }
    return false;
}

/* Does nothing but the open step `t` decide the call's result: no mode, no vmap, no tracer, and not
 * below autograd, inside an operator written in Python? Never in inference mode, whose tensors are
 * of another kind. */
static bool decides(const koila__tape *t)
{
    if (koila__maybe_inference())
        return false;
    const long own_modes = koila__is_planning(); /* koila.plan() watches what the step writes */
    if (!gives(facts.n_function_modes, 0) || !gives(facts.n_dispatch_modes, own_modes) ||
        !is_none(facts.tracing_state) || !is_none(facts.functorch_level))
        return false;
    PyObject *excluded = PyObject_CallOneArg(facts.is_excluded, facts.autograd_key);
    const bool above = excluded == Py_False;
    Py_XDECREF(excluded);
    return above && program_calls() && has_lazy_data(t);
}

/* ---- reading the call and recording the factory */

typedef struct call {
    int64_t size[KOILA_MAX_DIMS];
    uint32_t n_dims;
    PyObject *fill, *dtype, *device; /* borrowed; NULL: not given */
} call;

/* Appends one size. False: there is nothing to slice, or torch has an error to raise. */
static bool read_size(PyObject *o, call *c)
{
    if (c->n_dims == KOILA_MAX_DIMS)
        return false;
    PyObject *i = NULL;
    if (PyLong_CheckExact(o))
        i = Py_NewRef(o);
    else if (!koila__is_tensor(o)) /* a tensor would have to be made concrete */
        i = PyNumber_Index(o);
    if (!i)
        return false;
    const long long n = PyLong_AsLongLong(i);
    Py_DECREF(i);
    if (n > 0)
        c->size[c->n_dims++] = n;
    return n > 0;
}

static bool is_one_of(const char *key, const char *const *names)
{
    for (; *names; names++)
        if (!strcmp(key, *names))
            return true;
    return false;
}

/* Reads one keyword of the call. `size=` is stored in *size, borrowed. False: the call is left to
 * torch. */
static bool read_keyword(int kind, PyObject *name, PyObject *value, call *c, PyObject **size)
{
    static const char *const switches[] = { "requires_grad", "pin_memory", NULL };
    static const char *const absent[] = { "out", "names", "memory_format", NULL };
    const char *key = PyUnicode_AsUTF8(name);
    if (!key)
        return false;
    const bool none = value == Py_None;
    if (!strcmp(key, "dtype"))
        c->dtype = none ? NULL : value;
    else if (!strcmp(key, "device"))
        c->device = none ? NULL : value;
    else if (!strcmp(key, "size"))
        *size = value;
    else if (!strcmp(key, "fill_value") && kind == FULL)
        c->fill = value;
    else if (!strcmp(key, "layout"))
        return none || value == facts.strided;
    else if (is_one_of(key, switches))
        return none || value == Py_False;
    else
        return none && is_one_of(key, absent);
    return true;
}

/* Sizes come as one list or, except for full(), as the positional arguments themselves. */
static bool read_sizes(int kind, PyObject *args, PyObject *size, call *c)
{
    if (size && (PyTuple_Check(size) || PyList_Check(size))) {
        if (kind != FULL && PyTuple_GET_SIZE(args) > 1)
            return false;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(size); i++)
            if (!read_size(PySequence_Fast_GET_ITEM(size, i), c))
                return false;
        return true;
    }
    if (!size || kind == FULL)
        return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!read_size(PyTuple_GET_ITEM(args, i), c))
            return false;
    return true;
}

/* Reads the call. False: it has something that koila does not know, and is left to torch. */
static bool read_call(int kind, PyObject *args, PyObject *kwargs, call *c)
{
    *c = (call){ 0 };
    PyObject *size = NULL, *name, *value;
    const Py_ssize_t n = PyTuple_GET_SIZE(args);
    Py_ssize_t at = 0;
    while (kwargs && PyDict_Next(kwargs, &at, &name, &value))
        if (!read_keyword(kind, name, value, c, &size))
            return false;
    if (n && size)
        return false;
    if (n)
        size = PyTuple_GET_ITEM(args, 0);
    if (kind == FULL && (n > 2 || (n == 2 && c->fill)))
        return false;
    if (kind == FULL && n == 2)
        c->fill = PyTuple_GET_ITEM(args, 1);
    return read_sizes(kind, args, size, c);
}

typedef enum { NO_FILL, BOOL_FILL, INT_FILL, FLOAT_FILL, OTHER_FILL } fill_kind;

static fill_kind kind_of_fill(PyObject *fill)
{
    if (!fill)
        return NO_FILL;
    if (PyBool_Check(fill))
        return BOOL_FILL;
    if (PyLong_CheckExact(fill))
        return INT_FILL;
    return PyFloat_CheckExact(fill) ? FLOAT_FILL : OTHER_FILL;
}

/* The dtype that torch would choose; -1: one that koila lacks, perhaps with an exception. */
static int chosen_dtype(const call *c, fill_kind kind)
{
    if (c->dtype)
        return koila__dtype_of(c->dtype);
    if (kind == BOOL_FILL)
        return KOILA_DTYPE_BOOL;
    if (kind == INT_FILL)
        return KOILA_DTYPE_I64;
    PyObject *o = PyObject_CallNoArgs(facts.default_dtype);
    const int d = o ? koila__dtype_of(o) : -1;
    Py_XDECREF(o);
    return d;
}

/* The largest number that dtype d holds for certain; 0: only truth values; -1: koila lacks the
 * dtype. */
static double largest_of(int d)
{
    switch (d) {
    case KOILA_DTYPE_F64:
    case KOILA_DTYPE_C128:
        return HUGE_VAL;
    case KOILA_DTYPE_F32:
    case KOILA_DTYPE_BF16:
    case KOILA_DTYPE_C64:
        return 3.3e38;
    case KOILA_DTYPE_F16:
        return 65504.0;
    case KOILA_DTYPE_I64:
        return 9e15; /* a bound that a double holds exactly */
    case KOILA_DTYPE_I32:
        return 2147483647.0;
    case KOILA_DTYPE_I16:
    case KOILA_DTYPE_I8:
        return 127.0;
    case KOILA_DTYPE_U8:
        return 255.0;
    case KOILA_DTYPE_BOOL:
        return 0.0;
    default:
        return -1.0;
    }
}

/* The dtype that torch would choose. -1: koila lacks it, or it may not hold the value; torch raises
 * the error of a value out of range. */
static int dtype_of(const call *c)
{
    const fill_kind kind = kind_of_fill(c->fill);
    if (kind == OTHER_FILL) /* complex, or a tensor */
        return -1;
    const bool number = kind == INT_FILL || kind == FLOAT_FILL;
    const double x = number ? PyFloat_AsDouble(c->fill) : 0.0;
    if (PyErr_Occurred())
        return -1;
    const int d = chosen_dtype(c, kind);
    const double largest = largest_of(d);
    if (largest < 0.0)
        return -1;
    if (!number)
        return d;
    if (!koila__dtype_is_whole(d))
        return isfinite(x) && fabs(x) > largest ? -1 : d;
    const bool fits = kind == INT_FILL && largest > 0.0 && fabs(x) <= largest;
    return fits && (d != KOILA_DTYPE_U8 || x >= 0.0) ? d : -1;
}

/* The device that torch would choose, if a batch is on it: a new reference, else NULL. */
static PyObject *device_of(const koila__tape *t, const call *c)
{
    PyObject *given;
    if (c->device)
        given = Py_NewRef(c->device);
    else if (facts.default_device == Py_None)
        given = PyUnicode_FromString("cpu");
    else
        given = PyObject_CallNoArgs(facts.default_device);
    PyObject *o = given ? PyObject_CallOneArg(facts.device, given) : NULL;
    PyObject *index = o ? PyObject_GetAttrString(o, "index") : NULL;
    uint16_t device = UINT16_MAX;
    bool here = false;
    Py_XDECREF(given);
    if (index && koila__device_of(o, &device) == 0) {
        if (index == Py_None && device >> 8 == 1) {
            /* "cuda" means the current device */
            PyObject *i = facts.current_cuda_device == Py_None
                              ? NULL
                              : PyObject_CallNoArgs(facts.current_cuda_device);
            const long n = i ? PyLong_AsLong(i) : -1;
            device = n >= 0 && n < 255 ? (uint16_t)(0x100 + n) : UINT16_MAX;
            Py_XDECREF(i);
        }
        for (uint32_t i = 0; i < t->n_devices; i++)
            here |= t->devices[i] == device;
    }
    Py_XDECREF(o);
    Py_XDECREF(index);
    return here ? Py_XNewRef(koila__device_object(device)) : NULL;
}

/* (sizes, contiguous strides) as lists, new references; false: an exception, or too large. */
static bool lists_of(const call *c, PyObject **size, PyObject **stride)
{
    int64_t step_of = 1;
    *size = PyList_New(c->n_dims);
    *stride = PyList_New(c->n_dims);
    for (uint32_t d = c->n_dims; d-- && *size && *stride;) {
        PyList_SET_ITEM(*size, d, PyLong_FromLongLong(c->size[d]));
        PyList_SET_ITEM(*stride, d, PyLong_FromLongLong(step_of));
        if (__builtin_mul_overflow(step_of, c->size[d], &step_of))
            return false;
    }
    return *size && *stride && !PyErr_Occurred();
}

/* The call as it is recorded: empty_strided(size, stride), full(size, value) or arange(0, n). */
static PyObject *record_factory(int kind, const call *c, PyObject *size, PyObject *stride,
                                PyObject *kwargs)
{
    PyObject *args;
    PyObject *op = facts.full;
    if (kind == EMPTY) {
        op = facts.empty_strided;
        args = PyTuple_Pack(2, size, stride);
    } else if (kind == ARANGE) {
        op = facts.arange;
        args = Py_BuildValue("(iL)", 0, (long long)c->size[0]);
    } else if (kind == FULL)
        args = PyTuple_Pack(2, size, c->fill);
    else
        args = Py_BuildValue("(Oi)", size, kind == ONES);
    PyObject *r = NULL;
    if (args)
        r = koila__record(op, args, kwargs);
    if (r && koila__is_lazy(r))
        koila__group_is_factory(koila__handle_of(r)->group, true);
    Py_XDECREF(args);
    return r;
}

/* May the call's result be cut? */
static bool may_be_cut(const koila__tape *t, int kind, const call *c)
{
    return kind == ARANGE ? koila__tape_has_length(t, c->size, c->n_dims)
                          : koila__tape_has_batch(t, c->size, c->n_dims);
}

/* Reads arange(n), as one size; of whole numbers only. */
static bool read_range(PyObject *args, PyObject *kwargs, call *c)
{
    *c = (call){ 0 };
    PyObject *size = NULL, *name, *value;
    Py_ssize_t at = 0;
    while (kwargs && PyDict_Next(kwargs, &at, &name, &value))
        if (!read_keyword(ARANGE, name, value, c, &size))
            return false;
    return PyTuple_GET_SIZE(args) == 1 && !size && PyLong_CheckExact(PyTuple_GET_ITEM(args, 0)) &&
           read_size(PyTuple_GET_ITEM(args, 0), c);
}

/* The dtype of arange(n), I64 if none is given; -1: another one than of whole numbers that hold n.
 */
static int range_dtype(const call *c)
{
    const int d = c->dtype ? koila__dtype_of(c->dtype) : KOILA_DTYPE_I64;
    return d == KOILA_DTYPE_I64 || (d == KOILA_DTYPE_I32 && c->size[0] <= INT32_MAX) ? d : -1;
}

/* A lazy factory; NULL, perhaps with an exception: the call is left to torch. */
static PyObject *make(int kind, PyObject *args, PyObject *kwargs)
{
    call c;
    koila__tape *t = step_here();
    const bool is_read =
        t && (kind == ARANGE ? read_range(args, kwargs, &c) : read_call(kind, args, kwargs, &c));
    if (!is_read || (kind == FULL) != (c.fill != NULL) || !may_be_cut(t, kind, &c))
        return NULL;
    Py_INCREF(t);
    int dtype = -1;
    if (decides(t))
        dtype = kind == ARANGE ? range_dtype(&c) : dtype_of(&c);
    PyObject *device = dtype < 0 ? NULL : device_of(t, &c);
    const bool is_open = koila__tape_is_open(t);
    Py_DECREF(t);
    if (!device || !is_open) {
        Py_XDECREF(device);
        return NULL;
    }
    PyObject *size, *stride, *r = NULL;
    PyObject *kw =
        Py_BuildValue("{sOsO}", "dtype", koila__dtype_object((koila_dtype)dtype), "device", device);
    if (lists_of(&c, &size, &stride) && kw)
        r = record_factory(kind, &c, size, stride, kw);
    Py_XDECREF(size);
    Py_XDECREF(stride);
    Py_XDECREF(kw);
    Py_DECREF(device);
    return r;
}

static PyObject *called(int k, PyObject *const *values, size_t n_values, PyObject *names)
{
    const Py_ssize_t n = PyVectorcall_NARGS(n_values);
    const Py_ssize_t n_names = names ? PyTuple_GET_SIZE(names) : 0;
    PyObject *args = PyTuple_New(n);
    PyObject *kwargs = n_names ? PyDict_New() : NULL;
    PyObject *r = NULL;
    if (!args || (n_names && !kwargs))
        goto done;
    for (Py_ssize_t i = 0; i < n; i++)
        PyTuple_SET_ITEM(args, i, Py_NewRef(values[i]));
    for (Py_ssize_t i = 0; i < n_names; i++)
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(names, i), values[n + i]) < 0)
            goto done;
    PyObject *out = kwargs ? PyDict_GetItemString(kwargs, "out") : NULL;
    if (out && !koila__keep_contents(out))
        goto done;
    if (step_here()) {
        r = make(k, args, kwargs);
        if (r || (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)))
            goto done;
        PyErr_Clear(); /* torch raises a better error */
    }
    PyObject *f = koila__switch_function(k);
    r = ((PyCFunctionWithKeywords)(void (*)(void))PyCFunction_GET_FUNCTION(f))(
        PyCFunction_GET_SELF(f), args, kwargs);
done:
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return r;
}

static PyObject *zeros(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return called(ZEROS, values, n, names);
}
static PyObject *ones(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return called(ONES, values, n, names);
}
static PyObject *full(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return called(FULL, values, n, names);
}
static PyObject *empty(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return called(EMPTY, values, n, names);
}

static PyObject *arange(PyObject *f, PyObject *const *values, size_t n, PyObject *names)
{
    return called(ARANGE, values, n, names);
}

/* ---- start-up, and what Python uses */

static PyObject *py_hold_factories(PyObject *module, PyObject *on)
{
    const int more = PyObject_IsTrue(on);
    if (more < 0)
        return NULL;
    return koila__factories_hold(more) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *py_watching(PyObject *module, PyObject *unused)
{
    bool there = false;
    for (int k = 0; k < KOILA__N_FACTORY_KINDS; k++) {
        const PyCFunctionObject *f = (PyCFunctionObject *)koila__switch_function(k);
        there |= f && f->vectorcall;
    }
    return PyBool_FromLong(there && step_here());
}

/* The directory of a package as its code objects name it: "/a/torch/". PyMem; NULL + error. */
static char *directory_of(PyObject *module)
{
    PyObject *file = PyObject_GetAttrString(module, "__file__");
    const char *text = file ? PyUnicode_AsUTF8(file) : NULL;
    const char *last = text ? strrchr(text, '/') : NULL;
    char *r = last ? PyMem_Malloc((size_t)(last - text) + 2) : NULL;
    if (r) {
        memcpy(r, text, (size_t)(last - text) + 1);
        r[last - text + 1] = 0;
    }
    Py_XDECREF(file);
    return r;
}

/* A new reference to the attribute at a dotted path. An optional one that is missing is Py_None. */
static PyObject *path_of(PyObject *from, const char *dotted, bool optional)
{
    PyObject *o = Py_NewRef(from);
    char name[64];
    while (o && *dotted) {
        const size_t n = strcspn(dotted, ".");
        snprintf(name, sizeof name, "%.*s", (int)n, dotted);
        dotted += n + (dotted[n] == '.');
        PyObject *next = PyObject_GetAttrString(o, name);
        Py_DECREF(o);
        o = next;
    }
    if (!o && optional) {
        PyErr_Clear();
        return Py_NewRef(Py_None);
    }
    return o;
}

static const struct {
    const char *name;
    vectorcallfunc ours;
} kinds[KOILA__N_FACTORY_KINDS] = {
    { "zeros", zeros }, { "ones", ones }, { "full", full }, { "empty", empty }, { "arange", arange }
};

/* What is not there is left alone. */
static void watch_writes(PyObject *torch)
{
    PyObject *class = path_of(torch, "_C.TensorBase", false);
    if (!class || koila__plain_writes_setup(class) < 0)
        PyErr_Clear();
    Py_XDECREF(class);
    koila__plain_functions_setup(torch);
}

/* factories_setup(): once, at the first lazy(). A function that is not as expected is left
 * alone. */
static PyObject *py_factories_setup(PyObject *module, PyObject *unused)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *koila = torch ? PyImport_ImportModule("koila") : NULL;
    if (!koila || facts.device)
        goto done;
    const struct {
        PyObject **to;
        const char *path;
        bool optional;
    } wanted[] = {
        { &facts.n_function_modes, "_C._len_torch_function_stack", false },
        { &facts.n_dispatch_modes, "_C._len_torch_dispatch_stack", false },
        { &facts.is_excluded, "_C._dispatch_tls_is_dispatch_key_excluded", false },
        { &facts.autograd_key, "_C.DispatchKey.AutogradFunctionality", false },
        { &facts.tracing_state, "_C._get_tracing_state", false },
        { &facts.functorch_level, "_C._functorch.maybe_current_level", false },
        { &facts.default_dtype, "get_default_dtype", false },
        { &facts.default_device, "_C._get_default_device", true },
        { &facts.strided, "strided", false },
        { &facts.full, "ops.aten.full.default", false },
        { &facts.empty_strided, "ops.aten.empty_strided.default", false },
        { &facts.arange, "ops.aten.arange.start", false },
        { &facts.current_cuda_device, "cuda.current_device", true },
        { &facts.device, "device", false },
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        *wanted[i].to = path_of(torch, wanted[i].path, wanted[i].optional);
        if (!*wanted[i].to) {
            PyErr_Clear(); /* an unknown version of torch: nothing is replaced */
            goto done;
        }
    }
    facts.libraries[0] = directory_of(torch);
    facts.libraries[1] = directory_of(koila);
    if (!facts.libraries[0] || !facts.libraries[1]) {
        PyErr_Clear();
        goto done;
    }
    for (int k = 0; k < KOILA__N_FACTORY_KINDS; k++) {
        PyObject *f = PyObject_GetAttrString(torch, kinds[k].name);
        if (!f)
            PyErr_Clear();
        else if (PyCFunction_CheckExact(f) &&
                 (PyCFunction_GET_FLAGS(f) & ~METH_STATIC) == (METH_VARARGS | METH_KEYWORDS) &&
                 !((PyCFunctionObject *)f)->vectorcall) {
            koila__switch_add(k, f, kinds[k].ours);
        }
        Py_XDECREF(f);
    }
    watch_writes(torch);
done:
    Py_XDECREF(torch);
    Py_XDECREF(koila);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "hold_factories", py_hold_factories, METH_O,
      "hold_factories(on): while on, torch.zeros and its like make plain tensors" },
    { "watching_factories", py_watching, METH_NOARGS,
      "Do torch.zeros and its like return lazy factories now?" },
    { "factories_setup", py_factories_setup, METH_NOARGS, "Learn torch's functions; once." },
    { 0 },
};

int koila__factories_add(PyObject *m) { return PyModule_AddFunctions(m, methods); }
