/* direct.c — a recorded call through torch's stable C ABI (`torch_call_dispatcher` and what belongs
 * to it, since torch 2.13): the same dispatch as that of OpOverload._op, without the parsing of
 * Python arguments, which takes longer than a small operator does.
 *
 * Torch tells of a failure there by a code alone, so whoever calls runs the operator again through
 * `_op`, which raises torch's own exception. Therefore only operators of ATen come here that write
 * nothing and draw nothing, on the CPU or on GPUs, with arguments that the ABI knows: tensors,
 * whole and real numbers, flags, dtypes, devices, layouts, memory formats, lists and absent ones.
 * It has no form for a `Scalar`; but full() of 0 or 1, the most frequent call with one, is zeros()
 * or ones().
 */
#include <dlfcn.h>
#include <math.h>

#include "run/run.h"

enum {
    MOST_ARGUMENTS = 32,
    MOST_RESULTS = 8,
    BRIEF_ELEMENTS = 4096, /* of all tensors of a call that is over in some microseconds */
};

typedef uint64_t stable; /* torch's StableIValue */

static struct functions {
    int32_t (*call)(const char *name, const char *overload, stable *stack, uint64_t version);
    int32_t (*new_tensor)(tensor_handle, tensor_handle *);
    int32_t (*new_optional)(stable **);
    int32_t (*delete_optional)(stable *);
    int32_t (*new_list)(size_t, void **);
    int32_t (*push)(void *, stable);
    int32_t (*delete_list)(void *);
    void *lib;
    uint64_t version; /* of torch, as its ABI packs it; 0: not known, no call is direct */
} torch_abi;

typedef enum argument_kind {
    A_TENSOR = 'T',
    AN_INT = 'I',
    A_FLOAT = 'F',
    A_BOOL = 'B',
    A_DTYPE = 'D',
    A_DEVICE = 'V', /* the CPU, or a GPU */
    A_LAYOUT = 'L', /* dense */
    A_MEMORY_FORMAT = 'M',
    A_SCALAR = 'S',
    UNKNOWN = '?'
} argument_kind;

/* One argument of the schema. */
typedef struct form {
    argument_kind kind;
    bool is_optional, is_list;
    bool is_absent;  /* None is given for an optional one */
    uint32_t n;      /* items of the list */
    uint32_t input;  /* a tensor: index in the inputs of the call; a list's first one */
    stable one;      /* the constant */
    stable *several; /* owned [n] constants of a list */
} form;

struct koila__direct {
    char *name, *overload; /* owned */
    bool needs_dtype;      /* a call of it without one is another */
    bool is_brief;         /* other threads can wait for its end */
    uint32_t n, n_results;
    form at[MOST_ARGUMENTS];
};

/* Looks torch's functions up, once. */
static void look_up_abi(void)
{
    static bool is_done;
    long major, minor;
    Dl_info torch;
    if (is_done)
        return;
    is_done = true;
    if (!koila__shim.wrap || !dladdr((void *)koila__shim.drop, &torch))
        return;
    if (!PyArg_ParseTuple(koila__torch.version, "ll", &major, &minor)) {
        PyErr_Clear();
        return;
    }
    void *lib = dlopen(torch.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!lib)
        return;
#define FIND(function, name) *(void **)&torch_abi.function = dlsym(lib, name)
    FIND(call, "torch_call_dispatcher");
    FIND(new_tensor, "aoti_torch_new_tensor_handle");
    FIND(new_optional, "torch_new_stable_ivalue");
    FIND(delete_optional, "torch_delete_stable_ivalue");
    FIND(new_list, "torch_new_list_reserve_size");
    FIND(push, "torch_list_push_back");
    FIND(delete_list, "torch_delete_list");
#undef FIND
    if (torch_abi.call && torch_abi.new_tensor && torch_abi.new_optional &&
        torch_abi.delete_optional && torch_abi.new_list && torch_abi.push &&
        torch_abi.delete_list) {
        torch_abi.lib = lib;
        torch_abi.version = (uint64_t)major << 56 | (uint64_t)minor << 48;
    }
}

/* ---- the form of a call, once a signature */

void koila__direct_free(koila__direct *d)
{
    if (!d)
        return;
    for (uint32_t i = 0; i < d->n; i++)
        PyMem_Free(d->at[i].several);
    PyMem_Free(d->name);
    PyMem_Free(d->overload);
    PyMem_Free(d);
}

static char *copy_text(const char *from)
{
    char *to = from ? PyMem_Malloc(strlen(from) + 1) : NULL;
    return to ? strcpy(to, from) : NULL;
}

/* The CPU, or a GPU, whose types in the codes of koila/graph.h are c10::DeviceType's. */
static bool is_known_device(uint16_t device) { return device >> 8 <= 1; }

/* torch.preserve_format and its like, by the function of the ABI that is named after it. */
static bool memory_format(PyObject *o, stable *out)
{
    char name[80];
    PyObject *text = PyObject_Str(o);
    const char *is = text ? PyUnicode_AsUTF8(text) : NULL;
    int32_t (*code)(void) = NULL;
    if (is && strncmp(is, "torch.", 6) == 0) {
        snprintf(name, sizeof name, "aoti_torch_memory_format_%s", is + 6);
        *(void **)&code = dlsym(torch_abi.lib, name);
    }
    Py_XDECREF(text);
    *out = code ? (stable)(uint32_t)code() : 0;
    return code != NULL;
}

/* Type and index of the device: the CPU, or a GPU, perhaps the current one. false: another. */
static bool device_value(PyObject *o, stable *out)
{
    uint16_t device;
    PyObject *index = PyObject_GetAttrString(o, "index");
    const uint32_t at = index && index != Py_None ? (uint32_t)PyLong_AsLong(index) : UINT32_MAX;
    Py_XDECREF(index);
    if (PyErr_Occurred() || koila__device_of(o, &device) < 0)
        return false;
    *out = (stable)(device >> 8) << 32 | at;
    return is_known_device(device);
}

/* Constant `o` of this kind; false: it is none. */
static bool constant(argument_kind kind, PyObject *o, stable *out)
{
    double real;
    switch (kind) {
    case AN_INT:
        if (!PyLong_CheckExact(o))
            return false;
        *out = (stable)PyLong_AsLongLong(o);
        return !PyErr_Occurred();
    case A_FLOAT:
        if (!PyFloat_CheckExact(o))
            return false;
        real = PyFloat_AS_DOUBLE(o);
        memcpy(out, &real, sizeof real);
        return true;
    case A_BOOL:
        *out = o == Py_True;
        return PyBool_Check(o);
    case A_DTYPE: {
        const int dtype = koila__dtype_of(o);
        const int code = dtype < 0 ? -1 : koila__dtype_code((koila_dtype)dtype);
        *out = (stable)code;
        return code >= 0;
    }
    case A_DEVICE:
        return device_value(o, out);
    case A_LAYOUT:
        *out = 0;
        return o == koila__strided;
    case A_MEMORY_FORMAT:
        return memory_format(o, out);
    default:
        return false;
    }
}

/* The form of constant `o`, a list or not. */
static bool constants(form *f, PyObject *o)
{
    f->is_absent = o == Py_None;
    if (f->is_absent)
        return f->is_optional;
    if (!f->is_list)
        return constant(f->kind, o, &f->one);
    if (!PyList_CheckExact(o))
        return false;
    f->n = (uint32_t)PyList_GET_SIZE(o);
    f->several = PyMem_Malloc((f->n + 1) * sizeof *f->several);
    for (uint32_t i = 0; i < f->n && f->several; i++)
        if (!constant(f->kind, PyList_GET_ITEM(o, i), &f->several[i]))
            return false;
    return f->several != NULL;
}

/* The form of an argument that is recorded as `token`; `at` is the index of its first tensor. */
static bool recorded(form *f, const koila_arg *token, PyObject *object, uint32_t *at)
{
    if (token->kind == KOILA_ARG_TENSOR) {
        f->input = (*at)++;
        return f->kind == A_TENSOR && !f->is_list;
    }
    if (object)
        return constants(f, object);
    f->input = *at;
    f->n = token->n;
    *at += f->n;
    for (uint32_t i = 1; i <= token->n; i++)
        if (token[i].kind != KOILA_ARG_TENSOR)
            return false;
    return f->kind == A_TENSOR && f->is_list;
}

/* What (name, kind, is optional, is a list, has a default, default) says of an argument. */
static bool described(form *f, PyObject *argument, PyObject **name, PyObject **otherwise)
{
    int letter, optional, list, has;
    if (!PyArg_ParseTuple(argument, "UCpppO", name, &letter, &optional, &list, &has, otherwise))
        return false;
    *f = (form){ .kind = (argument_kind)letter, .is_optional = optional, .is_list = list };
    if (!has)
        *otherwise = NULL;
    return true;
}

/* Position of the value that the call gives for argument i, named `name`; or n_pos + n_kw. */
static uint32_t position(const koila_sig_info *s, uint32_t i, PyObject *name)
{
    if (i < s->n_pos)
        return i;
    for (uint32_t k = 0; k < s->n_kw; k++)
        if (PyUnicode_CompareWithASCIIString(name, koila_text(koila__table, s->kw_names[k])) == 0)
            return s->n_pos + k;
    return s->n_pos + s->n_kw;
}

/* The index of the first tensor of each value of the call: `first`[n_pos + n_kw]. */
static void count_inputs(const koila_sig_info *s, uint32_t *first)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_pos + s->n_kw; i++) {
        const koila_arg *token = s->tokens + s->start[i];
        first[i] = n;
        n += token->kind == KOILA_ARG_TENSOR;
        for (uint32_t k = 1; token->kind == KOILA_ARG_LIST && k <= token->n; k++)
            n += token[k].kind == KOILA_ARG_TENSOR;
    }
}

/* Is d a call of full() with the number `o`, which zeros() or ones() is too? It is from then on.
 * Without a dtype they differ in that of their results. */
static bool fills(koila__direct *d, PyObject *o)
{
    if (strcmp(d->name, "aten::full") || d->overload[0] || !o ||
        !(PyBool_Check(o) || PyLong_CheckExact(o) || PyFloat_CheckExact(o)))
        return false;
    const double number = PyFloat_AsDouble(o);
    if (PyErr_Occurred() || signbit(number) || (number != 0 && number != 1))
        return false;
    char *name = copy_text(number == 0 ? "aten::zeros" : "aten::ones");
    if (!name)
        return false;
    PyMem_Free(d->name);
    d->name = name;
    d->needs_dtype = true;
    return true;
}

static bool fill_in(koila__direct *d, const koila_sig_info *s, PyObject *const *objects,
                    PyObject *arguments)
{
    uint32_t first[MOST_ARGUMENTS], n_given = 0;
    const uint32_t n_values = s->n_pos + s->n_kw;
    count_inputs(s, first);
    for (uint32_t i = 0; i < PyTuple_GET_SIZE(arguments); i++) {
        PyObject *name, *otherwise;
        form *f = &d->at[d->n];
        if (!described(f, PyTuple_GET_ITEM(arguments, i), &name, &otherwise))
            return false;
        const uint32_t k = position(s, i, name);
        n_given += k < n_values;
        if (f->kind == A_SCALAR && k < n_values && fills(d, objects[k]))
            continue;
        d->n++; /* what it owns is freed with d */
        const bool known = k < n_values
                               ? recorded(f, s->tokens + s->start[k], objects[k], &first[k])
                               : otherwise && constants(f, otherwise);
        if (!known || (d->needs_dtype && f->kind == A_DTYPE && f->is_absent))
            return false;
    }
    return n_given == n_values;
}

static bool are_on_known_devices(const koila_meta *metas, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (metas[i] != KOILA_NONE &&
            !is_known_device(koila_meta_get(koila__table, metas[i])->device))
            return false;
    return true;
}

/* Is the call over at once: a view, or one on the CPU of few elements, which torch does not share
 * with other threads? Then giving the GIL away and getting it back, which torch does in it once
 * more for each tensor that Python has, takes longer than the call. */
static bool is_brief(const koila_sig_info *s)
{
    uint64_t n_elements = 0;
    if (koila_op_flags(koila__table, s->op) & KOILA_OP_VIEW)
        return true;
    for (uint32_t i = 0; i < s->n_inputs + s->n_outputs; i++) {
        const koila_meta meta = i < s->n_inputs ? s->inputs[i] : s->outputs[i - s->n_inputs];
        const koila_meta_info *m = meta == KOILA_NONE ? NULL : koila_meta_get(koila__table, meta);
        if (m && m->device)
            return false;
        n_elements += m ? m->n_elements : 0;
    }
    return n_elements <= BRIEF_ELEMENTS;
}

koila__direct *koila__direct_new(const koila_sig_info *s, PyObject *const *objects)
{
    const uint32_t flags = koila_op_flags(koila__table, s->op);
    if (koila__torch_setup() < 0) {
        PyErr_Clear();
        return NULL;
    }
    look_up_abi();
    if (!torch_abi.version || s->n_writes || flags & KOILA_OP_RANDOM ||
        !are_on_known_devices(s->inputs, s->n_inputs) ||
        !are_on_known_devices(s->outputs, s->n_outputs) || s->n_pos + s->n_kw > MOST_ARGUMENTS ||
        s->n_outputs > MOST_RESULTS)
        return NULL;
    PyObject *op = koila__op_object(s->op);
    PyObject *schema = op ? PyObject_CallOneArg(koila__torch.direct_schema, op) : NULL;
    PyObject *name, *overload, *arguments;
    koila__direct *d = NULL;
    int n_results;
    if (schema && schema != Py_None &&
        PyArg_ParseTuple(schema, "UUO!i", &name, &overload, &PyTuple_Type, &arguments,
                         &n_results) &&
        PyTuple_GET_SIZE(arguments) <= MOST_ARGUMENTS && n_results == (int)s->n_outputs)
        d = PyMem_Calloc(1, sizeof *d);
    if (d) {
        d->n_results = (uint32_t)n_results;
        d->is_brief = is_brief(s);
        d->name = copy_text(PyUnicode_AsUTF8(name));
        d->overload = copy_text(PyUnicode_AsUTF8(overload));
        if (!d->name || !d->overload || !fill_in(d, s, objects, arguments)) {
            koila__direct_free(d);
            d = NULL;
        }
    }
    Py_XDECREF(schema);
    PyErr_Clear();
    return d;
}

/* ---- a call */

static bool tensor_value(PyObject *tensor, stable *out)
{
    tensor_handle h;
    if (torch_abi.new_tensor(koila__tensor_handle(tensor), &h))
        return false;
    *out = (stable)(uintptr_t)h;
    return true;
}

static bool list_value(const form *f, PyObject *const *inputs, stable *out)
{
    void *list;
    if (torch_abi.new_list(f->n, &list))
        return false;
    bool all = true;
    for (uint32_t i = 0; i < f->n && all; i++) {
        stable one = f->several ? f->several[i] : 0;
        all = (f->several || tensor_value(inputs[f->input + i], &one)) &&
              torch_abi.push(list, one) == 0;
    }
    if (!all)
        torch_abi.delete_list(list);
    *out = (stable)(uintptr_t)list;
    return all;
}

/* Argument f, which torch takes over. */
static bool value_of(const form *f, PyObject *const *inputs, stable *out)
{
    stable *boxed;
    *out = 0;
    if (f->is_absent)
        return true;
    bool made;
    if (f->is_list) {
        made = list_value(f, inputs, out);
    } else if (f->kind == A_TENSOR) {
        made = tensor_value(inputs[f->input], out);
    } else {
        *out = f->one;
        made = true;
    }
    if (!made || !f->is_optional)
        return made;
    if (torch_abi.new_optional(&boxed))
        return false;
    *boxed = *out;
    *out = (stable)(uintptr_t)boxed;
    return true;
}

/* The results as objects: outputs[d->n_results] new references, None for an undefined tensor. */
static int wrap_results(const koila__direct *d, const stable *stack, PyObject **outputs)
{
    int status = 0;
    for (uint32_t i = 0; i < d->n_results; i++) {
        const tensor_handle h = (tensor_handle)(uintptr_t)stack[i];
        outputs[i] = status == 0 ? koila__wrap_plain(h) : NULL;
        if (!outputs[i])
            status = -1;
        koila__shim.drop(h);
    }
    for (uint32_t i = 0; i < d->n_results && status < 0; i++)
        Py_CLEAR(outputs[i]);
    if (status < 0 && !PyErr_Occurred())
        PyErr_NoMemory();
    return status;
}

int koila__direct_call(const koila__direct *d, PyObject *const *inputs, PyObject **outputs)
{
    stable stack[MOST_ARGUMENTS];
    for (uint32_t i = 0; i < d->n; i++)
        if (!value_of(&d->at[i], inputs, &stack[i]))
            return 0; /* no memory for an argument: those before it are lost */
    PyThreadState *thread = d->is_brief ? NULL : PyEval_SaveThread();
    const int32_t code = torch_abi.call(d->name, d->overload, stack, torch_abi.version);
    if (thread)
        PyEval_RestoreThread(thread);
    if (code) { /* if that was Python, its exception may have been left; the call is made again */
        if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
            return -1;
        PyErr_Clear();
        return 0;
    }
    return wrap_results(d, stack, outputs) < 0 ? -1 : 1;
}
