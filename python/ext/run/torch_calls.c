/* torch_calls.c — the operators of torch and the functions of koila._run that the executor calls
 * itself, looked up once. */
#include "run/run.h"

struct koila__torch_calls koila__torch;

static const struct {
    PyObject **slot;
    const char *packet, *overload;
} operators[] = {
    { &koila__torch.narrow, "narrow", "default" },
    { &koila__torch.copy_, "copy_", "default" },
    { &koila__torch.add_, "add_", "Tensor" },
    { &koila__torch.clone, "clone", "default" },
    { &koila__torch.empty_strided, "empty_strided", "default" },
    { &koila__torch.maximum, "maximum", "default" },
    { &koila__torch.minimum, "minimum", "default" },
    { &koila__torch.unflatten, "unflatten", "int" },
    { &koila__torch.flatten, "flatten", "using_ints" },
    { &koila__torch.cat, "cat", "default" },
    { &koila__torch.to_copy, "_to_copy", "default" },
    { &koila__torch.mul_, "mul_", "Scalar" },
    { &koila__torch.zero_, "zero_", "default" },
    { &koila__torch.as_strided, "as_strided", "default" },
    { &koila__torch.squeeze_dims, "squeeze", "dims" },
};
enum { N_OPERATORS = sizeof operators / sizeof *operators };

/* *slot := from.name, unless it is there already. */
static bool look_up(PyObject **slot, PyObject *from, const char *name)
{
    if (!*slot && from)
        *slot = PyObject_GetAttrString(from, name);
    return *slot != NULL;
}

/* *slot := aten.packet.overload._op, unless it is there already. */
static bool look_up_operator(PyObject **slot, PyObject *aten, const char *packet,
                             const char *overload)
{
    PyObject *p = NULL, *o = NULL;
    const bool found =
        *slot || (look_up(&p, aten, packet) && look_up(&o, p, overload) && look_up(slot, o, "_op"));
    Py_XDECREF(p);
    Py_XDECREF(o);
    return found;
}

static bool look_up_all(PyObject *torch, PyObject *aten, PyObject *mine)
{
    for (size_t i = 0; i < N_OPERATORS; i++)
        if (!look_up_operator(operators[i].slot, aten, operators[i].packet, operators[i].overload))
            return false;
    return look_up(&koila__torch.oom_type, torch, "OutOfMemoryError") &&
           look_up(&koila__torch.guards, mine, "guards") &&
           look_up(&koila__torch.add_on, mine, "add_on") &&
           look_up(&koila__torch.addmm_, mine, "addmm_") &&
           look_up(&koila__torch.baddbmm_, mine, "baddbmm_") &&
           look_up(&koila__torch.add_rows, mine, "add_rows") &&
           look_up(&koila__torch.pseudo, mine, "PSEUDO") &&
           look_up(&koila__torch.direct_schema, mine, "direct_schema") &&
           look_up(&koila__torch.version, mine, "VERSION") &&
           look_up(&koila__torch.own_generator, mine, "own_generator") &&
           look_up(&koila__torch.n_dispatch_modes, mine, "n_dispatch_modes") &&
           look_up(&koila__torch.n_function_modes, mine, "n_function_modes") &&
           look_up(&koila__torch.modes_aside, mine, "ModesAside");
}

int koila__torch_setup(void)
{
    if (koila__torch.ready)
        return 0;
    /* without it: no measured peak, no learned workspaces, no limit; everything else works */
    koila__cpu_bytes_install();
    PyObject *ops = NULL, *aten = NULL;
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *mine = torch ? PyImport_ImportModule("koila._run") : NULL;
    koila__torch.ready = mine && look_up(&ops, torch, "ops") && look_up(&aten, ops, "aten") &&
                         look_up_all(torch, aten, mine);
    PyObject *c = koila__torch.ready ? PyObject_GetAttrString(torch, "_C") : NULL;
    if (!look_up(&koila__torch.skip_next, c, "_set_skip_next_torch_function"))
        PyErr_Clear();
    if (koila__torch.skip_next && !(PyCFunction_Check(koila__torch.skip_next) &&
                                    PyCFunction_GET_FLAGS(koila__torch.skip_next) == METH_O))
        Py_CLEAR(koila__torch.skip_next);
    Py_XDECREF(c);
    Py_XDECREF(torch);
    Py_XDECREF(ops);
    Py_XDECREF(aten);
    Py_XDECREF(mine);
    return koila__torch.ready ? 0 : -1;
}

PyObject *koila__pseudo_object(const char *name)
{
    if (koila__torch_setup() < 0)
        return NULL;
    PyObject *o = PyDict_GetItemString(koila__torch.pseudo, name);
    if (!o)
        PyErr_Format(PyExc_RuntimeError, "koila: no implementation of %s", name);
    return o;
}

PyObject *koila__torch_narrow(PyObject *t, int64_t dim, int64_t first, int64_t n)
{
    return PyObject_CallFunction(koila__torch.narrow, "OLLL", t, (long long)dim, (long long)first,
                                 (long long)n);
}

PyObject *koila__torch_empty(const koila_meta_info *m, int32_t dim, int64_t extent)
{
    int64_t size[KOILA_MAX_DIMS], stride[KOILA_MAX_DIMS];
    for (uint32_t d = 0; d < m->n_dims; d++)
        size[d] = (int32_t)d == dim && extent >= 0 ? extent : m->size[d];
    koila_dense_strides(m, size, stride);
    PyObject *dtype = koila__dtype_object(m->dtype);
    PyObject *device = dtype ? koila__device_object(m->device) : NULL;
    PyObject *s = device ? koila__ints_object(size, m->n_dims) : NULL;
    PyObject *t = s ? koila__ints_object(stride, m->n_dims) : NULL;
    PyObject *args = t ? PyTuple_Pack(2, s, t) : NULL;
    PyObject *kw = args ? Py_BuildValue("{s:O,s:O}", "dtype", dtype, "device", device) : NULL;
    PyObject *out = kw ? PyObject_Call(koila__torch.empty_strided, args, kw) : NULL;
    Py_XDECREF(s);
    Py_XDECREF(t);
    Py_XDECREF(args);
    Py_XDECREF(kw);
    return out;
}

PyObject *koila__torch_cast(PyObject *t, koila_dtype dtype)
{
    PyObject *args = PyTuple_Pack(1, t);
    PyObject *kw = args ? Py_BuildValue("{s:O}", "dtype", koila__dtype_object(dtype)) : NULL;
    PyObject *out = kw ? PyObject_Call(koila__torch.to_copy, args, kw) : NULL;
    Py_XDECREF(args);
    Py_XDECREF(kw);
    return out;
}
