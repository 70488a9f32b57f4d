/* wrapper.c — makes the torch.Tensor without storage that wraps a Value. This is most of the cost
 * of capture.
 *
 * torch.Tensor._make_wrapper_subclass parses 15 arguments, and a second call makes data pointers
 * throw: together several times the cost of the tensor itself. So both happen only once for each
 * dtype and device, for a prototype. Torch's C shim then makes tensors of any sizes on the
 * prototype's storage (which is empty, throws on access and claims to be larger than any tensor),
 * and the function that wraps every tensor for Python puts them into LazyTensor. Only C++ can set
 * the two dispatch keys that lead to Python, so they are set in memory, at an offset that is learnt
 * from two tensors whose keys torch reports. Where any of this is missing, or the result differs in
 * any way (learn_wrappers() in _tensor.py), each wrapper is made by arguments.
 */
#include "capture/capture.h"

#include <structmember.h>

PyTypeObject *koila__lazy_class;
Py_ssize_t koila__slot;
bool koila__by_parts;

static PyCFunctionWithKeywords make_wrapper;
static PyObject *set_throw; /* torch._C._set_throw_on_mutable_data_ptr */

/* [n_wraps], by meta id */
static struct wrap {
    /* owned arguments of make_wrapper, all positional: torch looks up a keyword per parameter */
    PyObject *args;
    tensor_handle like; /* borrowed from a prototype; NULL: made by arguments */
} *wraps;
static uint32_t n_wraps;

static uint32_t keys_at; /* byte offset of the dispatch keys in a TensorImpl; 0: not known */
static uint64_t python_keys;

static struct prototype {
    PyObject *wrapper; /* owned */
    koila_dtype dtype;
    uint16_t device;
} *prototypes;
static uint32_t n_prototypes;

/* Arguments for sizes and strides (NULL: contiguous) that start at `offset`. */
static PyObject *wrap_args(PyObject *size, PyObject *stride, int64_t offset, koila_dtype dtype,
                           uint16_t device)
{
    PyObject *d = koila__device_object(device);
    PyObject *at = d ? PyLong_FromLongLong(offset) : NULL;
    PyObject *r = NULL;
    if (!at)
        return NULL;
    if (!stride)
        stride = Py_None;
    if (device)
        r = PyTuple_Pack(8, koila__lazy_class, size, stride, offset ? at : Py_None, Py_None,
                         koila__dtype_object(dtype), koila__strided, d);
    else
        r = PyTuple_Pack(6, koila__lazy_class, size, stride, offset ? at : Py_None, Py_None,
                         koila__dtype_object(dtype));
    Py_DECREF(at);
    return r;
}

static PyObject *wrap_by_arguments(PyObject *args)
{
    PyObject *w = args ? make_wrapper(NULL, args, NULL) : NULL;
    /* asking for the data pointer of empty storage is an error then, not a crash */
    PyObject *ok = w ? PyObject_CallOneArg(set_throw, w) : NULL;
    if (!ok) {
        Py_XDECREF(w);
        return NULL;
    }
    Py_DECREF(ok);
    return w;
}

/* A tensor whose storage the wrappers of this dtype and device share. NULL without an error:
 * none. */
static tensor_handle prototype_of(koila_dtype dtype, uint16_t device)
{
    if (!koila__shim.wrap || !koila__shim.reinterpret || !koila__shim.drop)
        return NULL;
    for (uint32_t i = 0; i < n_prototypes; i++)
        if (prototypes[i].dtype == dtype && prototypes[i].device == device)
            return koila__tensor_handle(prototypes[i].wrapper);
    PyObject *size = Py_BuildValue("(L)", 1LL << 58);
    PyObject *args = size ? wrap_args(size, NULL, 0, dtype, device) : NULL;
    PyObject *w = wrap_by_arguments(args);
    Py_XDECREF(args);
    Py_XDECREF(size);
    if (!w) {
        PyErr_Clear();
        return NULL;
    }
    /* after the last line that may run Python, which may have added others */
    struct prototype *p = PyMem_Realloc(prototypes, (n_prototypes + 1) * sizeof *p);
    if (!p) {
        Py_DECREF(w);
        return NULL;
    }
    prototypes = p;
    /* it refers to nothing, and gc.get_objects() must not list it as the user's */
    PyObject_GC_UnTrack(w);
    prototypes[n_prototypes++] = (struct prototype){ w, dtype, device };
    return koila__tensor_handle(w);
}

/* Torch's wrapping function throws a C++ exception when it gets no object, and C cannot catch it.
 * So the object is allocated before the call. */
static PyObject *spare;

static PyObject *lazy_alloc(PyTypeObject *type, Py_ssize_t n)
{
    PyObject *o = spare;
    spare = NULL;
    return o ? o : PyType_GenericAlloc(type, n);
}

/* A wrapper made from a prototype's parts; NULL with or without an exception. */
static PyObject *wrap_by_parts(tensor_handle like, const koila_meta_info *m, int64_t offset)
{
    tensor_handle h;
    if (koila__shim.reinterpret(like, m->n_dims, m->size, m->stride, offset, &h))
        return NULL;
    if (keys_at)
        *(uint64_t *)(*(char **)h + keys_at) |= python_keys;
    PyObject *w = PyType_GenericAlloc(koila__lazy_class, 0);
    if (w) {
        spare = w;
        w = koila__shim.wrap(h, koila__lazy_class);
    }
    koila__shim.drop(h);
    return w;
}

static PyObject *args_of(const koila_meta_info *m, int64_t offset)
{
    bool contiguous = offset == 0; /* torch accepts an offset only together with strides */
    int64_t expect = 1;
    for (int i = m->n_dims - 1; i >= 0; i--) {
        if (m->stride[i] != expect)
            contiguous = false;
        expect *= m->size[i] > 1 ? m->size[i] : 1;
    }
    PyObject *size = koila__ints_object(m->size, m->n_dims);
    PyObject *stride = !size || contiguous ? NULL : koila__ints_object(m->stride, m->n_dims);
    PyObject *r = size && (stride || contiguous)
                      ? wrap_args(size, stride, offset, m->dtype, m->device)
                      : NULL;
    Py_XDECREF(size);
    Py_XDECREF(stride);
    return r;
}

static int wrap_fill(koila_meta meta)
{
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    PyObject *args = args_of(m, 0);
    if (!args)
        return -1;
    const tensor_handle like = prototype_of(m->dtype, m->device);
    /* from here on no Python code runs, which may fill in others */
    if (meta >= n_wraps) {
        const uint32_t n = (meta + 1) * 2 < 64 ? 64 : (meta + 1) * 2;
        struct wrap *w = PyMem_Realloc(wraps, n * sizeof *w);
        if (!w) {
            Py_DECREF(args);
            PyErr_NoMemory();
            return -1;
        }
        memset(w + n_wraps, 0, (n - n_wraps) * sizeof *w);
        wraps = w;
        n_wraps = n;
    }
    if (wraps[meta].args)
        Py_DECREF(args); /* filled in meanwhile */
    else
        wraps[meta] = (struct wrap){ args, like };
    return 0;
}

void koila__wraps_forget(PyObject *gone)
{
    for (koila_meta m = 0; m < n_wraps; m++) {
        if (!wraps[m].args || koila_meta_get(koila__table, m))
            continue;
        if (PyList_Append(gone, wraps[m].args) < 0)
            PyErr_Clear(); /* no memory: it stays */
        else
            Py_DECREF(wraps[m].args);
        wraps[m] = (struct wrap){ 0 };
    }
}

PyObject *koila__wrapper_alone(koila_meta meta, int64_t offset)
{
    if ((meta >= n_wraps || !wraps[meta].args) && wrap_fill(meta) < 0)
        return NULL;
    if (koila__by_parts && wraps[meta].like) {
        PyObject *w = wrap_by_parts(wraps[meta].like, koila_meta_get(koila__table, meta), offset);
        if (w || PyErr_Occurred())
            return w;
    }
    if (offset == 0)
        return wrap_by_arguments(wraps[meta].args);
    PyObject *args = args_of(koila_meta_get(koila__table, meta), offset);
    PyObject *w = wrap_by_arguments(args);
    Py_XDECREF(args);
    return w;
}

/* The same tensor made both ways. The second is None where torch lacks the parts. */
PyObject *koila__wrapper_pair(koila_meta meta, int64_t offset)
{
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    PyObject *args = args_of(m, offset);
    PyObject *a = wrap_by_arguments(args);
    PyObject *b = NULL;
    Py_XDECREF(args);
    if (!a)
        return NULL;
    const tensor_handle like = prototype_of(m->dtype, m->device);
    if (like)
        b = wrap_by_parts(like, m, offset);
    if (!b && PyErr_Occurred()) {
        Py_DECREF(a);
        return NULL;
    }
    return Py_BuildValue("NN", a, b ? b : Py_NewRef(Py_None));
}

/* The keys are looked for in the 22 words of a TensorImpl, of which they are the last member. */
bool koila__learn_keys(PyObject *lazy, uint64_t lazy_keys, PyObject *made, uint64_t made_keys)
{
    const uint64_t *a = *(uint64_t **)(koila__tensor_handle(lazy));
    const uint64_t *b = *(uint64_t **)(koila__tensor_handle(made));
    if (keys_at)
        return true; /* learnt before: both tensors have the same keys now */
    if (!koila__cdata || lazy_keys == made_keys || (made_keys & ~lazy_keys))
        return false;
    for (uint32_t i = 2; i < 22; i++)
        if (a[i] == lazy_keys && b[i] == made_keys) {
            keys_at = i * 8;
            python_keys = lazy_keys & ~made_keys;
            return true;
        }
    return false;
}

/* ---- copies */

enum {
    SMALL_COPY = 1 << 16
}; /* bytes: torch copies more on all its threads, and without the GIL */

/* Have both the same dispatch keys: are both plain memory, neither negated nor conjugated? */
KOILA__HOT static bool same_keys(tensor_handle a, tensor_handle b)
{
    return keys_at && *(uint64_t *)(*(char **)a + keys_at) == *(uint64_t *)(*(char **)b + keys_at);
}

/* Torch's wrapping function cannot say that there is no memory for the object, see `spare`. A
 * second owner of a tensor that Python has takes the GIL when it goes, so the object is given what
 * the handle owns where torch can do that. */
KOILA__HOT PyObject *koila__wrap_plain(tensor_handle h)
{
    PyTypeObject *type = koila__lazy_class->tp_base;
    const size_t n_bytes = (size_t)type->tp_basicsize + 2 * sizeof(void *); /* the collector's */
    void *room = PyObject_Malloc(n_bytes);
    PyObject_Free(room);
    if (room && koila__shim.wrap_moved)
        return koila__shim.wrap_moved(h);
    return room ? koila__shim.wrap(h, type) : NULL;
}

/* NULL without an exception: it is not that simple. */
KOILA__HOT static PyObject *small_copy(PyObject *real, const koila_meta_info *m)
{
    tensor_handle copy, of = koila__tensor_handle(real);
    void *from, *to;
    int32_t dtype;
    if (!koila__by_parts || !koila__shim.empty || m->device || m->n_bytes > SMALL_COPY ||
        !m->n_bytes || !koila_meta_is_contiguous(m) || koila__shim.get_dtype(of, &dtype) ||
        koila__shim.get_data_ptr(of, &from) ||
        koila__shim.empty(m->n_dims, m->size, m->stride, dtype, 0, 0, &copy))
        return NULL;
    PyObject *made = NULL;
    if (same_keys(of, copy) && !koila__shim.get_data_ptr(copy, &to)) {
        memcpy(to, from, m->n_bytes);
        made = koila__wrap_plain(copy);
    }
    koila__shim.drop(copy);
    return made;
}

KOILA__HOT PyObject *koila__copy_of(PyObject *real, koila_meta meta)
{
    static PyObject *clone;
    PyObject *made = small_copy(real, koila_meta_get(koila__table, meta));
    if (made || PyErr_Occurred() || (!clone && !(clone = PyUnicode_InternFromString("clone"))))
        return made;
    return PyObject_CallMethodNoArgs(real, clone);
}

/* ---- start-up */

int koila__wrapper_setup(PyObject *torch, PyObject *lazy_class)
{
    PyObject *c = PyObject_GetAttrString(torch, "_C");
    PyObject *f = NULL;
    PyObject *slot = NULL;
    int rc = -1;
    set_throw = c ? PyObject_GetAttrString(c, "_set_throw_on_mutable_data_ptr") : NULL;
    if (!set_throw)
        goto done;
    f = PyObject_GetAttrString(lazy_class, "_make_wrapper_subclass");
    if (!f || !PyCFunction_Check(f) || !(PyCFunction_GET_FLAGS(f) & METH_KEYWORDS)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError,
                            "torch.Tensor._make_wrapper_subclass is not the function koila knows");
        goto done;
    }
    make_wrapper = (PyCFunctionWithKeywords)(void (*)(void))PyCFunction_GET_FUNCTION(f);
    slot = PyObject_GetAttrString(lazy_class, "_v");
    if (!slot || !Py_IS_TYPE(slot, &PyMemberDescr_Type)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "LazyTensor has no slot _v");
        goto done;
    }
    koila__slot = ((PyMemberDescrObject *)slot)->d_member->offset;
    koila__lazy_class = (PyTypeObject *)Py_NewRef(lazy_class);
    koila__lazy_class->tp_alloc = lazy_alloc;
    rc = 0;
done:
    Py_XDECREF(slot);
    Py_XDECREF(f);
    Py_XDECREF(c);
    return rc;
}
