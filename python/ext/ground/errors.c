/* errors.c — see errors.h.
 *
 * An out-of-memory is a torch.OutOfMemoryError (CUDA, HIP and MPS allocators), Python's
 * MemoryError, or a RuntimeError that only its text identifies. All of them mean the same to the
 * executor: fewer rows may fit.
 */
#include "ground/errors.h"

/* RuntimeErrors that mean "no memory", by a part of their text. */
static const struct {
    const char *library, *text;
} out_of_memory_texts[] = {
    { "CUDA, HIP, MPS and XPU", "out of memory" },
    { "cuBLAS", "CUBLAS_STATUS_ALLOC_FAILED" },
    { "hipBLAS", "HIPBLAS_STATUS_ALLOC_FAILED" },
    /* a workspace did not fit; PyTorch adds no text of its own */
    { "cuDNN", "CUDNN_STATUS_NOT_SUPPORTED" },
    { "cuDNN", "CUDNN_STATUS_ALLOC_FAILED" },
    /* the same, of a convolution none of whose algorithms found room */
    { "cuDNN", "Unable to find a valid cuDNN algorithm" },
    { "cuDNN", "unable to find an engine to execute this computation" },
    { "torch's CPU allocator", "can't allocate memory" },
    { "torch's CPU allocator on Windows", "not enough memory" },
    { "C++", "std::bad_alloc" },
    { "oneDNN", "could not create a primitive" },
    { "oneDNN", "could not create a memory" },
};
enum { N_TEXTS = sizeof out_of_memory_texts / sizeof *out_of_memory_texts };

/* ---- classes, looked up when first needed */

typedef struct error_class {
    const char *module, *name;
    PyObject *type; /* owned, never released; NULL: not looked up yet */
} error_class;
static error_class torch_out_of_memory = { "torch", "OutOfMemoryError", NULL };
static error_class out_of_memory = { "koila._errors", "OutOfMemory", NULL };
static error_class unsupported = { "koila._errors", "UnsupportedError", NULL };
static error_class stale = { "koila._errors", "StaleValueError", NULL };
static error_class gather = { "koila._errors", "GatherError", NULL };

/* Borrowed, or NULL with an exception. pre: no exception is set. */
static PyObject *type_of(error_class *c)
{
    if (!c->type) {
        PyObject *module = PyImport_ImportModule(c->module);
        c->type = module ? PyObject_GetAttrString(module, c->name) : NULL;
        Py_XDECREF(module);
    }
    return c->type;
}

/* Is the exception that is set one of class `c`? It stays set. */
static bool is_set(error_class *c)
{
    if (!PyErr_Occurred())
        return false;
    if (!c->type) {
        /* type_of() must not run while an exception is set */
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        type_of(c);
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return c->type && PyErr_ExceptionMatches(c->type);
}

/* ---- kinds of the exception that is set */

static bool has_out_of_memory_text(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *s = text ? PyUnicode_AsUTF8(text) : NULL;
    bool found = false;
    for (size_t i = 0; s && !found && i < N_TEXTS; i++)
        found = strstr(s, out_of_memory_texts[i].text) != NULL;
    Py_XDECREF(text);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return found;
}

bool koila__is_out_of_memory(void)
{
    if (!PyErr_Occurred())
        return false;
    if (PyErr_ExceptionMatches(PyExc_MemoryError) || is_set(&torch_out_of_memory))
        return true;
    return PyErr_ExceptionMatches(PyExc_RuntimeError) && has_out_of_memory_text();
}

bool koila__is_stale(void) { return is_set(&stale); }
bool koila__is_unsupported(void) { return is_set(&unsupported); }

/* ---- raising */

PyObject *koila__raise(koila_status s)
{
    if (s == KOILA_NO_MEMORY)
        return PyErr_NoMemory();
    PyErr_Format(s == KOILA_BAD_ARGUMENT ? PyExc_SystemError : PyExc_RuntimeError, "koila: %s",
                 koila_status_text(s));
    return NULL;
}

static void raise_formatted(error_class *c, const char *format, va_list args)
{
    PyObject *type = type_of(c);
    if (type)
        PyErr_FormatV(type, format, args);
}

PyObject *koila__unsupported(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    raise_formatted(&unsupported, format, args);
    va_end(args);
    return NULL;
}

int koila__raise_stale(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    raise_formatted(&stale, format, args);
    va_end(args);
    return -1;
}

int koila__raise_gather(PyObject *text)
{
    PyObject *type = text ? type_of(&gather) : NULL;
    if (type)
        PyErr_SetObject(type, text);
    Py_XDECREF(text);
    return -1;
}

int koila__raise_out_of_memory(const char *text, uint64_t missing_bytes)
{
    PyObject *type, *cause, *trace;
    PyErr_Fetch(&type, &cause, &trace);
    if (type)
        PyErr_NormalizeException(&type, &cause, &trace);
    PyObject *raised = type_of(&out_of_memory);
    PyObject *error = raised ? PyObject_CallFunction(raised, "s", text) : NULL;
    if (error) {
        PyObject *missing = PyLong_FromUnsignedLongLong(missing_bytes);
        if (missing)
            PyObject_SetAttrString(error, "missing_bytes", missing);
        Py_XDECREF(missing);
        if (cause)
            PyException_SetCause(error, Py_NewRef(cause));
        PyErr_SetObject(raised, error);
    }
    Py_XDECREF(error);
    Py_XDECREF(type);
    Py_XDECREF(cause);
    Py_XDECREF(trace);
    return -1;
}

int koila__raise_no_fit(koila_status status, const koila_error *err, const char *call)
{
    if (status == KOILA_OOM) {
        char text[520];
        snprintf(text, sizeof text, "%s: %s. Try: a larger budget, or a smaller model or sample",
                 call, err->text);
        return koila__raise_out_of_memory(text, err->missing_bytes);
    }
    if (status == KOILA_OK)
        return -1;
    if (err->text[0] && status != KOILA_NO_MEMORY)
        PyErr_Format(PyExc_RuntimeError, "koila: %s", err->text);
    else
        koila__raise(status);
    return -1;
}

/* ---- the module */

static PyObject *py_is_out_of_memory(PyObject *self, PyObject *error)
{
    (void)self;
    if (!PyExceptionInstance_Check(error))
        return PyErr_Format(PyExc_TypeError, "is_out_of_memory() takes an exception, not %.100s",
                            Py_TYPE(error)->tp_name);
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), Py_NewRef(error),
                  PyException_GetTraceback(error));
    const bool yes = koila__is_out_of_memory();
    PyErr_Clear();
    return PyBool_FromLong(yes);
}

static PyMethodDef methods[] = {
    { "is_out_of_memory", py_is_out_of_memory, METH_O,
      "is_out_of_memory(error): does it say that memory ran out?" },
    { NULL, NULL, 0, NULL },
};

int koila__errors_add_module(PyObject *m) { return PyModule_AddFunctions(m, methods); }
