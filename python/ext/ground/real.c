/* real.c — see real.h. */
#include "ground/real.h"

#include <dlfcn.h>
#include <string.h>

#include "base/idset.h"
#include "ground/errors.h"
#include "ground/helpers.h"

static PyObject *torch_tensor_base; /* torch._C.TensorBase */
static PyObject *torch_device;      /* torch.device */
static PyObject *dtypes[KOILA_N_DTYPES];
static int8_t dtype_of_code[256]; /* torch's ScalarType → koila_dtype, -1: unknown */
static PyObject *devices_other;   /* list: device 0xff00 + i */
static PyObject *devices_cuda;    /* list: cuda:i */
static PyObject *device_cpu;
static getter version_getter, layout_getter, data_getter;
static void *version_closure, *layout_closure, *data_closure;
static Py_ssize_t storage_at; /* offset of storage_ in a TensorImpl; 0: not known */
/* The function that frees memory which was handed to torch by Python (numpy, DLPack, the buffer
 * protocol), and the word of a StorageImpl that has it. 0: not known. */
static struct {
    uintptr_t frees;
    uint32_t word;
} borrowed;
static PyObject *is_grad_enabled, *set_grad_enabled;

koila_table *koila__table;
uint32_t koila__n_ids_held;
Py_ssize_t koila__cdata;
PyObject *koila__strided;
koila__shim_tensors koila__shim;
static struct shim {
    int32_t (*get_dim)(tensor_handle, int64_t *);
    int32_t (*get_sizes)(tensor_handle, int64_t **);
    int32_t (*get_strides)(tensor_handle, int64_t **);
    int32_t (*get_dtype)(tensor_handle, int32_t *);
    int32_t (*get_device_type)(tensor_handle, int32_t *);
    int32_t (*get_device_index)(tensor_handle, int32_t *);
    int32_t (*get_data_ptr)(tensor_handle, void **);
    int32_t (*get_storage_size)(tensor_handle, int64_t *);
    int32_t (*get_layout)(tensor_handle, int32_t *);
    int32_t (*get_offset)(tensor_handle, int64_t *);
    int64_t (*version)(tensor_handle);       /* throws for tensors of inference mode */
    int32_t (*strided)(void);                /* the layout of dense tensors */
    bool (*requires_grad)(const void *impl); /* of a TensorImpl */
    bool (*grad_mode)(void);
    void (*set_grad_mode)(bool);
    bool (*inference_mode)(void);
    int8_t (*default_dtype)(void); /* a torch::ScalarType */
    const void *(*context)(void);  /* at::globalContext() */
    bool (*deterministic)(const void *context);
    bool (*deterministic_warns)(const void *context);
    bool works;
} shim;

/* Where a TensorImpl of a plain tensor on the CPU keeps what read_plain() reads: offsets. */
static struct layout {
    uint16_t sizes; /* the number of dimensions; the sizes follow */
    uint16_t strides;
    uint16_t dtype;    /* its number, two bytes */
    uint16_t autograd; /* 0: not known */
    uint16_t keys;     /* 0: nothing is known */
    uint64_t plain_keys;
} lies;

bool koila__is_tensor(PyObject *o)
{
    return PyType_IsSubtype(Py_TYPE(o), (PyTypeObject *)torch_tensor_base);
}

KOILA__HOT bool koila__requires_grad(PyObject *tensor)
{
    if (lies.autograd && !*(void **)(*(char **)koila__tensor_handle(tensor) + lies.autograd))
        return false; /* nothing of it is autograd's */
    if (shim.works && shim.requires_grad)
        return shim.requires_grad(*(void **)koila__tensor_handle(tensor));
    PyObject *r = PyObject_GetAttrString(tensor, "requires_grad");
    const bool yes = r != Py_False;
    Py_XDECREF(r);
    PyErr_Clear();
    return yes;
}

KOILA__HOT bool koila__grad_mode(void)
{
    if (shim.grad_mode)
        return shim.grad_mode();
    PyObject *r = PyObject_CallNoArgs(is_grad_enabled);
    const bool on = r == Py_True;
    Py_XDECREF(r);
    PyErr_Clear();
    return on;
}

int koila__set_grad_mode(bool on)
{
    if (shim.set_grad_mode) {
        shim.set_grad_mode(on);
        return 0;
    }
    PyObject *r = PyObject_CallOneArg(set_grad_enabled, on ? Py_True : Py_False);
    Py_XDECREF(r);
    return r ? 0 : -1;
}

/* ---- the settings that recorded calls depend on */

enum { CODE_OF_F32 = 6, N_DEFAULT_DTYPES = 4 };
static const koila_dtype default_dtypes[N_DEFAULT_DTYPES] = { KOILA_DTYPE_F32, KOILA_DTYPE_F64,
                                                              KOILA_DTYPE_F16, KOILA_DTYPE_BF16 };

KOILA__HOT static uint8_t default_dtype_now(void)
{
    const int8_t code = shim.default_dtype ? shim.default_dtype() : CODE_OF_F32;
    if (code == CODE_OF_F32 || code < 0)
        return 0;
    for (uint8_t i = 0; i < N_DEFAULT_DTYPES; i++)
        if (dtype_of_code[code] == (int8_t)default_dtypes[i])
            return i;
    return 0;
}

KOILA__HOT uint8_t koila__call_mode(void)
{
    uint8_t mode = (uint8_t)(koila__grad_mode() | default_dtype_now() << 1);
    if (shim.context) {
        const void *context = shim.context();
        if (shim.deterministic(context))
            mode |= shim.deterministic_warns(context) ? 2 << 3 : 1 << 3;
    }
    return mode;
}

int koila__set_call_mode(uint8_t mode)
{
    const uint8_t now = koila__call_mode();
    if ((now ^ mode) >> 1) {
        PyObject *dtype = koila__dtype_object(default_dtypes[mode >> 1 & 3]);
        PyObject *deterministic = PyLong_FromLong(mode >> 3);
        PyObject *done = deterministic ? koila__ask("set_torch", dtype, deterministic, NULL) : NULL;
        Py_XDECREF(deterministic);
        Py_XDECREF(done);
        if (!done)
            return -1;
    }
    return (now ^ mode) & 1 ? koila__set_grad_mode(mode & 1) : 0;
}

KOILA__HOT bool koila__maybe_inference(void)
{
    return !shim.inference_mode || shim.inference_mode();
}

PyObject *koila__dtype_object(koila_dtype d) { return dtypes[d]; }

int koila__dtype_code(koila_dtype d)
{
    for (int code = 0; code < 128; code++)
        if (dtype_of_code[code] == (int8_t)d)
            return code;
    return -1;
}

int koila__dtype_of(PyObject *o)
{
    for (int i = 0; i < KOILA_N_DTYPES; i++)
        if (dtypes[i] == o)
            return i;
    return -1;
}

bool koila__dtype_is_whole(int dtype)
{
    switch (dtype) {
    case KOILA_DTYPE_BOOL:
    case KOILA_DTYPE_U8:
    case KOILA_DTYPE_U16:
    case KOILA_DTYPE_U32:
    case KOILA_DTYPE_U64:
    case KOILA_DTYPE_I8:
    case KOILA_DTYPE_I16:
    case KOILA_DTYPE_I32:
    case KOILA_DTYPE_I64:
        return true;
    default:
        return false;
    }
}

PyObject *koila__device_object(uint16_t device)
{
    if (device == 0)
        return device_cpu;
    if (device >> 8 == 0xff)
        return PyList_GetItem(devices_other, device & 0xff);
    while (PyList_GET_SIZE(devices_cuda) <= (device & 0xff)) {
        const Py_ssize_t n = PyList_GET_SIZE(devices_cuda);
        PyObject *d = PyObject_CallFunction(torch_device, "sn", "cuda", n);
        /* the collector may have run somebody who added it */
        const bool is_next = n == PyList_GET_SIZE(devices_cuda);
        const bool ok = d && (!is_next || PyList_Append(devices_cuda, d) == 0);
        Py_XDECREF(d);
        if (!ok)
            return NULL;
    }
    return PyList_GET_ITEM(devices_cuda, device & 0xff);
}

static uint16_t meta_device; /* 0: none was met */

bool koila__is_meta_device(uint16_t device) { return device && device == meta_device; }

int koila__device_of(PyObject *o, uint16_t *out)
{
    PyObject *type = PyObject_GetAttrString(o, "type");
    PyObject *index = type ? PyObject_GetAttrString(o, "index") : NULL;
    int rc = -1;
    if (!index)
        goto done;
    const char *name = PyUnicode_AsUTF8(type);
    if (!name)
        goto done;
    if (!strcmp(name, "cpu")) {
        *out = 0;
        rc = 0;
    } else if (!strcmp(name, "cuda")) {
        const long i = index == Py_None ? 0 : PyLong_AsLong(index);
        if (i >= 0 && i < 255) {
            *out = (uint16_t)(0x100 + i);
            rc = 0;
        }
    } else {
        Py_ssize_t n = PyList_GET_SIZE(devices_other);
        Py_ssize_t i = 0;
        for (; i < n; i++) {
            const int same = PyObject_RichCompareBool(PyList_GET_ITEM(devices_other, i), o, Py_EQ);
            if (same < 0)
                goto done;
            if (same)
                break;
        }
        if (i == n && PyList_Append(devices_other, o) < 0)
            goto done;
        *out = (uint16_t)(0xff00 + i);
        if (!strcmp(name, "meta"))
            meta_device = *out;
        rc = 0;
    }
done:
    Py_XDECREF(type);
    Py_XDECREF(index);
    return rc;
}

PyObject *koila__ints_object(const int64_t *v, uint8_t n)
{
    PyObject *r = PyTuple_New(n);
    for (uint8_t i = 0; r && i < n; i++) {
        PyObject *x = PyLong_FromLongLong(v[i]);
        if (x)
            PyTuple_SET_ITEM(r, i, x);
        else
            Py_CLEAR(r);
    }
    return r;
}

PyObject *koila__meta_object(koila_meta meta)
{
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    koila__hold_ids();
    PyObject *size = koila__ints_object(m->size, m->n_dims);
    PyObject *stride = size ? koila__ints_object(m->stride, m->n_dims) : NULL;
    PyObject *device = koila__device_object(m->device);
    PyObject *r = stride && device ? PyTuple_Pack(4, dtypes[m->dtype], device, size, stride) : NULL;
    koila__release_ids();
    Py_XDECREF(size);
    Py_XDECREF(stride);
    return r;
}

/* (dtype, device, sizes, strides[, offset]) → meta */
int koila__meta_from(PyObject *tuple, koila_meta *out, int64_t *offset)
{
    int64_t size[64], stride[64];
    PyObject *sizes = PyTuple_GetItem(tuple, 2);
    PyObject *strides = PyTuple_GetItem(tuple, 3);
    if (!sizes || !strides)
        return -1;
    const int d = koila__dtype_of(PyTuple_GET_ITEM(tuple, 0));
    const Py_ssize_t n = PySequence_Size(sizes);
    if (n < 0)
        return -1;
    if (d < 0 || n > KOILA_MAX_DIMS) {
        if (d < 0)
            koila__unsupported("a tensor of %R cannot be lazy", PyTuple_GET_ITEM(tuple, 0));
        else
            koila__unsupported("a tensor of %zd dimensions cannot be lazy; at most %d", n,
                               KOILA_MAX_DIMS);
        return -1;
    }
    uint16_t device;
    if (koila__device_of(PyTuple_GET_ITEM(tuple, 1), &device) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *a = PySequence_GetItem(sizes, i);
        PyObject *b = PySequence_GetItem(strides, i);
        size[i] = a ? PyLong_AsLongLong(a) : -1;
        stride[i] = b ? PyLong_AsLongLong(b) : -1;
        Py_XDECREF(a);
        Py_XDECREF(b);
        if (PyErr_Occurred())
            return -1;
    }
    const koila_status s =
        koila_table_meta(koila__table, (koila_dtype)d, device, (uint32_t)n, size, stride, out);
    if (s) {
        koila__raise(s);
        return -1;
    }
    if (offset) {
        *offset = PyTuple_GET_SIZE(tuple) > 4 ? PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, 4)) : 0;
        if (*offset == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* ---- plain tensors on the CPU, read where they lie
 *
 * Torch's shim tells one thing a call, and each call is code that nothing else runs: once a step it
 * is in no cache. What it tells lies in two lines of memory, so where those are is learnt from
 * tensors that are known. All others, which have other dispatch keys, are told by the shim.
 */

enum { MOST_INLINE_DIMS = 5 }; /* sizes of more lie elsewhere */

typedef struct plain_facts {
    const int64_t *size, *stride;
    uint32_t n_dims;
    koila_dtype dtype;
} plain_facts;

/* False: it is no such tensor, or torch must tell. */
KOILA__HOT static bool is_plain(PyObject *real)
{
    const char *impl = *(const char **)koila__tensor_handle(real);
    return lies.keys && *(const uint64_t *)(impl + lies.keys) == lies.plain_keys;
}

KOILA__HOT static bool read_plain(PyObject *real, plain_facts *out)
{
    if (!is_plain(real))
        return false;
    const char *impl = *(const char **)koila__tensor_handle(real);
    const uint64_t n_dims = *(const uint64_t *)(impl + lies.sizes);
    const uint16_t code = *(const uint16_t *)(impl + lies.dtype);
    if (n_dims > MOST_INLINE_DIMS || code > 255 || dtype_of_code[code] < 0)
        return false;
    out->n_dims = (uint32_t)n_dims;
    out->size = (const int64_t *)(impl + lies.sizes + sizeof n_dims);
    out->stride = (const int64_t *)(impl + lies.strides);
    out->dtype = (koila_dtype)dtype_of_code[code];
    return true;
}

KOILA__HOT bool koila__is_like(PyObject *real, koila_meta meta)
{
    plain_facts f;
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    if (!m || m->device || !read_plain(real, &f) || f.dtype != m->dtype || f.n_dims != m->n_dims)
        return false;
    for (uint32_t d = 0; d < f.n_dims; d++)
        if (f.size[d] != m->size[d] || f.stride[d] != m->stride[d])
            return false;
    return true;
}

static int shim_meta(PyObject *real, koila_meta *out)
{
    tensor_handle h = koila__tensor_handle(real);
    int64_t n, *size, *stride;
    int32_t dtype, type;
    if (shim.get_dim(h, &n) || shim.get_sizes(h, &size) || shim.get_dtype(h, &dtype) ||
        shim.get_device_type(h, &type))
        return -1;
    if (dtype < 0 || dtype > 255 || dtype_of_code[dtype] < 0 || n > KOILA_MAX_DIMS || type > 1)
        return -1;
    if (shim.get_strides(h, &stride))
        return -1;
    uint16_t device = 0;
    if (type == 1) {
        int32_t i;
        if (shim.get_device_index(h, &i) || i > 254)
            return -1;
        device = (uint16_t)(0x100 + i);
    }
    return koila_table_meta(koila__table, (koila_dtype)dtype_of_code[dtype], device, (uint32_t)n,
                            size, stride, out) == KOILA_OK
               ? 0
               : -1;
}

/* The shim has sizes and strides for sparse tensors too. */
static bool is_dense(PyObject *real)
{
    int32_t code;
    if (shim.works && shim.strided && shim.get_layout &&
        shim.get_layout(koila__tensor_handle(real), &code) == 0)
        return code == shim.strided();
    PyObject *layout = layout_getter(real, layout_closure);
    if (!layout)
        PyErr_Clear();
    Py_XDECREF(layout);
    return layout == koila__strided;
}

int koila__meta_of(PyObject *real, koila_meta *out)
{
    plain_facts plain;
    if (read_plain(real, &plain) && koila_table_meta(koila__table, plain.dtype, 0, plain.n_dims,
                                                     plain.size, plain.stride, out) == KOILA_OK)
        return 0;
    if (shim.works && is_dense(real) && shim_meta(real, out) == 0)
        return 0;
    PyObject *f = koila__helper("real_meta");
    PyObject *t = f ? PyObject_CallOneArg(f, real) : NULL;
    const int rc = t ? koila__meta_from(t, out, NULL) : -1;
    Py_XDECREF(t);
    Py_XDECREF(f);
    return rc;
}

int koila__bytes_of(PyObject *real, uint64_t *out)
{
    plain_facts plain;
    koila_meta meta;
    if (!read_plain(real, &plain)) {
        const int rc = koila__meta_of(real, &meta);
        const koila_meta_info *m = rc < 0 ? NULL : koila_meta_get(koila__table, meta);
        *out = m ? (uint64_t)m->n_elements * koila_dtype_bytes(m->dtype) : 0;
        return rc;
    }
    *out = koila_dtype_bytes(plain.dtype);
    for (uint32_t d = 0; d < plain.n_dims; d++)
        *out *= (uint64_t)plain.size[d];
    return 0;
}

bool koila__lie_alike(koila_meta a, koila_meta b)
{
    if (a == b)
        return true;
    const koila_meta_info *x = koila_meta_get(koila__table, a);
    const koila_meta_info *y = koila_meta_get(koila__table, b);
    bool same = x->dtype == y->dtype && x->device == y->device && x->n_dims == y->n_dims;
    for (uint32_t d = 0; same && d < x->n_dims; d++)
        same = x->size[d] == y->size[d] && (x->size[d] == 1 || x->stride[d] == y->stride[d]);
    return same;
}

static bool is_row_major(uint32_t n_dims, const int64_t *size, const int64_t *stride)
{
    int64_t step = 1;
    for (uint32_t d = n_dims; d--;) {
        if (size[d] > 1 && stride[d] != step)
            return false;
        step *= size[d];
    }
    return true;
}

bool koila__lies_as(PyObject *real, const koila_meta_info *m)
{
    const tensor_handle h = koila__tensor_handle(real);
    int64_t n_dims, *size, *stride, expect[KOILA_MAX_DIMS];
    if (!shim.works || shim.get_dim(h, &n_dims) || n_dims != m->n_dims ||
        shim.get_sizes(h, &size) || shim.get_strides(h, &stride))
        return true;
    if (is_row_major(m->n_dims, m->size, m->stride) && is_row_major(m->n_dims, size, stride))
        return true;
    if (!koila_meta_is_dense(m))
        return true;
    koila_dense_strides(m, size, expect);
    for (uint32_t d = 0; d < m->n_dims; d++)
        if (size[d] > 1 && stride[d] != expect[d])
            return false;
    return true;
}

int koila__storage_offset(PyObject *real, int64_t *out)
{
    if (shim.works && shim.get_offset && shim.get_offset(koila__tensor_handle(real), out) == 0)
        return 0;
    PyObject *name = koila__name("storage_offset");
    PyObject *o = name ? PyObject_CallMethodNoArgs(real, name) : NULL;
    *out = o ? PyLong_AsLongLong(o) : -1;
    Py_XDECREF(o);
    return PyErr_Occurred() ? -1 : 0;
}

int koila__version_of(PyObject *real, uint32_t *out)
{
    if (shim.version && is_plain(real)) {
        *out = (uint32_t)shim.version(koila__tensor_handle(real));
        return 0;
    }
    PyObject *v = version_getter(real, version_closure);
    if (!v) { /* inference tensors have no version counter */
        PyErr_Clear();
        *out = KOILA__NO_VERSION;
        return 0;
    }
    *out = (uint32_t)PyLong_AsUnsignedLong(v);
    Py_DECREF(v);
    return 0;
}

/* ---- memory */

const void *koila__storage_of(PyObject *tensor)
{
    if (!storage_at || !koila__cdata)
        return NULL;
    const char *impl = *(const char **)koila__tensor_handle(tensor);
    return impl ? *(const void *const *)(impl + storage_at) : NULL;
}

bool koila__is_borrowed(PyObject *tensor)
{
    const uintptr_t *storage = borrowed.frees ? koila__storage_of(tensor) : NULL;
    return storage && storage[borrowed.word] == borrowed.frees;
}

PyObject *koila__data_of(PyObject *tensor)
{
    if (!koila__is_tensor(tensor)) {
        PyErr_SetString(PyExc_TypeError, "data_of(tensor)");
        return NULL;
    }
    return data_getter(tensor, data_closure);
}

/* The two halves of the product of two words, folded. */
static inline uint64_t fold(uint64_t a, uint64_t b)
{
    const unsigned __int128 p = (unsigned __int128)a * b;
    return (uint64_t)p ^ (uint64_t)(p >> 64);
}

static uint64_t print_bytes(const unsigned char *at, size_t n, uint64_t h)
{
    enum { LANES = 4, BLOCK = 16 * LANES };
    static const uint64_t odd[2] = { 0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu };
    uint64_t lane[LANES] = { h, h ^ 1, h ^ 2, h ^ 3 }, w[2 * LANES];
    h ^= n;
    while (n) {
        const size_t some = n < BLOCK ? n : BLOCK;
        if (some < BLOCK)
            memset(w, 0, sizeof w);
        memcpy(w, at, some);
        for (int i = 0; i < LANES; i++)
            lane[i] = fold(w[2 * i] ^ odd[0] ^ lane[i], w[2 * i + 1] ^ odd[1]) + lane[i];
        at += some;
        n -= some;
    }
    for (int i = 0; i < LANES; i++)
        h = fold(h ^ lane[i], odd[i & 1]) + lane[i];
    return h;
}

/* Dimensions [d, n_dims), in the order of `order`. */
static uint64_t print_dims(const koila_meta_info *m, const uint32_t *order, uint32_t d,
                           const unsigned char *at, uint64_t h)
{
    const size_t bytes = koila_dtype_bytes(m->dtype);
    if (d == m->n_dims)
        return print_bytes(at, bytes, h);
    const int64_t size = m->size[order[d]];
    const int64_t stride = m->stride[order[d]];
    if (d + 1 == m->n_dims && stride == 1)
        return print_bytes(at, (size_t)size * bytes, h);
    for (int64_t i = 0; i < size && (i == 0 || stride); i++)
        h = print_dims(m, order, d + 1, at + (size_t)(i * stride) * bytes, h);
    return h;
}

uint64_t koila__storage_bytes(PyObject *real)
{
    int64_t n_bytes = 0;
    if (!shim.works || !shim.get_storage_size ||
        shim.get_storage_size(koila__tensor_handle(real), &n_bytes))
        return 0;
    return n_bytes > 0 ? (uint64_t)n_bytes : 0;
}

uint64_t koila__memory_of(PyObject *real)
{
    void *at = NULL;
    if (shim.works && shim.get_data_ptr)
        return shim.get_data_ptr(koila__tensor_handle(real), &at) ? 0 : (uintptr_t)at;
    PyObject *address = PyObject_CallMethod(real, "data_ptr", NULL);
    const uint64_t told = address ? PyLong_AsUnsignedLongLong(address) : 0;
    Py_XDECREF(address);
    const bool fails = PyErr_Occurred() != NULL;
    PyErr_Clear();
    return fails ? 0 : told;
}

static int print_elsewhere(PyObject *real, koila_meta meta, uint64_t *out)
{
    PyObject *sums = koila__ask("device_print", real, NULL, NULL);
    if (!sums)
        return -1;
    const int known = Py_IsNone(sums) ? 0 : koila__fingerprint(sums, out);
    Py_DECREF(sums);
    *out = koila__mix(*out, meta);
    return known;
}

int koila__fingerprint(PyObject *real, uint64_t *out)
{
    koila_meta meta;
    void *at = NULL;
    *out = 0;
    if (!shim.works || !shim.get_data_ptr || koila__meta_of(real, &meta) < 0) {
        PyErr_Clear();
        return 0;
    }
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    if (!m->n_elements)
        return 1;
    if (m->device)
        return print_elsewhere(real, meta, out);
    if (shim.get_data_ptr(koila__tensor_handle(real), &at))
        return 0;
    if (!at)
        return 1;
    if (koila_meta_is_dense(m)) {
        *out = print_bytes(at, (size_t)m->n_elements * koila_dtype_bytes(m->dtype), meta);
        return 1;
    }
    uint32_t order[KOILA_MAX_DIMS]; /* outermost first */
    for (uint32_t d = 0; d < m->n_dims; d++) {
        uint32_t i = d;
        for (; i && m->stride[order[i - 1]] < m->stride[d]; i--)
            order[i] = order[i - 1];
        order[i] = d;
    }
    *out = print_dims(m, order, 0, at, meta);
    return 1;
}

/* ---- start-up */

/* A tensor of sizes and strides that are easily told apart; see shim_tells_the_truth(). */
static PyObject *make_probe(PyObject *torch)
{
    return PyObject_CallMethod(torch, "empty_strided", "((iii)(iii))", 2, 3, 4, 12, 1, 3);
}

/* Finds the TensorImpl * among the first words of a tensor object. -1 with an exception. */
static int learn_cdata(PyObject *probe)
{
    PyObject *cdata = PyObject_GetAttrString(probe, "_cdata");
    void *impl = cdata ? PyLong_AsVoidPtr(cdata) : NULL;
    Py_XDECREF(cdata);
    if (!impl)
        return -1;
    koila__cdata = 0;
    for (Py_ssize_t at = sizeof(PyObject); at <= (Py_ssize_t)sizeof(PyObject) + 16; at += 8)
        if (*(void **)((char *)probe + at) == impl) {
            koila__cdata = at;
            break;
        }
    return 0;
}

/* Handle of libtorch_cpu, which is loaded already; NULL without an exception: not found. */
static void *open_libtorch(PyObject *torch)
{
    PyObject *file = PyObject_GetAttrString(torch, "__file__");
    const char *name = file ? PyUnicode_AsUTF8(file) : NULL;
    const char *cut = name ? strrchr(name, '/') : NULL;
    char path[4096];
    void *lib = NULL;
    if (cut && snprintf(path, sizeof path, "%.*s/lib/libtorch_cpu.so", (int)(cut - name), name) <
                   (int)sizeof path)
        lib = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    Py_XDECREF(file);
    PyErr_Clear();
    return lib;
}

/* Looks up the shim. False: a function that is always needed is missing. */
static bool find_functions(void *lib)
{
#define FIND(function, name) *(void **)&function = dlsym(lib, name)
    FIND(shim.get_dim, "aoti_torch_get_dim");
    FIND(shim.get_sizes, "aoti_torch_get_sizes");
    FIND(shim.get_strides, "aoti_torch_get_strides");
    FIND(shim.get_dtype, "aoti_torch_get_dtype");
    FIND(shim.get_device_type, "aoti_torch_get_device_type");
    FIND(shim.get_device_index, "aoti_torch_get_device_index");
    FIND(shim.get_data_ptr, "aoti_torch_get_data_ptr");
    FIND(shim.get_storage_size, "aoti_torch_get_storage_size");
    FIND(shim.get_layout, "aoti_torch_get_layout");
    FIND(shim.get_offset, "aoti_torch_get_storage_offset");
    FIND(shim.strided, "aoti_torch_layout_strided");
    FIND(shim.grad_mode, "aoti_torch_grad_mode_is_enabled");
    FIND(shim.set_grad_mode, "aoti_torch_grad_mode_set_enabled");
    FIND(koila__shim.reinterpret, "aoti_torch__reinterpret_tensor");
    FIND(koila__shim.drop, "aoti_torch_delete_tensor_object");
    FIND(koila__shim.empty, "aoti_torch_empty_strided");
    /* two C++ names; without them gradients are accumulated by torch's engine */
    FIND(koila__shim.hooks, "_ZN5torch8autograd4impl5hooksERKN2at6TensorE");
    FIND(koila__shim.later_hooks, "_ZN5torch8autograd4impl19post_acc_grad_hooksERKN2at6TensorE");
    koila__shim.get_dtype = shim.get_dtype;
    koila__shim.get_data_ptr = shim.get_data_ptr;
    /* these three are C++ names; without them Python is asked */
    FIND(shim.inference_mode, "_ZN3c1013InferenceMode10is_enabledEv");
    FIND(shim.requires_grad, "_ZNK3c1010TensorImpl13requires_gradEv");
    FIND(shim.version, "_ZNK2at10TensorBase8_versionEv");
    /* without them a change between recording and run is not seen */
    FIND(shim.default_dtype, "_ZN3c1031get_default_dtype_as_scalartypeEv");
    FIND(shim.context, "_ZN2at13globalContextEv");
    FIND(shim.deterministic, "_ZNK2at7Context23deterministicAlgorithmsEv");
    FIND(shim.deterministic_warns, "_ZNK2at7Context31deterministicAlgorithmsWarnOnlyEv");
    if (!shim.deterministic || !shim.deterministic_warns)
        shim.context = NULL;
    Dl_info python; /* the library that holds the getters of tensor attributes */
    lib = dladdr((void *)version_getter, &python)
              ? dlopen(python.dli_fname, RTLD_LAZY | RTLD_NOLOAD)
              : NULL;
    if (lib) { /* without the first wrappers are made by arguments */
        FIND(koila__shim.wrap, "_Z16THPVariable_WrapRKN2at10TensorBaseEP11_typeobject");
        FIND(koila__shim.wrap_moved, "_Z16THPVariable_WrapON2at10TensorBaseE");
    }
#undef FIND
    return shim.get_dim && shim.get_sizes && shim.get_strides && shim.get_dtype &&
           shim.get_device_type && shim.get_device_index;
}

/* Torch's number of complex32. A constant, because making such a tensor prints a warning. */
#define CODE_OF_C32 8

/* Learns torch's number of each dtype from a tensor of that dtype. Appends those to `tensors`. */
static void learn_dtype_codes(PyObject *torch, PyObject *tensors)
{
    memset(dtype_of_code, -1, sizeof dtype_of_code);
    for (int d = 0; d < KOILA_N_DTYPES; d++) {
        if (dtypes[d] == Py_None)
            continue;
        if (d == KOILA_DTYPE_C32) {
            dtype_of_code[CODE_OF_C32] = (int8_t)d;
            continue;
        }
        PyObject *empty = PyObject_CallMethod(torch, "empty", "i", 0);
        PyObject *typed = empty ? PyObject_CallMethod(empty, "to", "O", dtypes[d]) : NULL;
        int32_t code;
        if (typed && shim.get_dtype(koila__tensor_handle(typed), &code) == 0 && code >= 0 &&
            code < 256)
            dtype_of_code[code] = (int8_t)d;
        if (typed)
            PyList_Append(tensors, typed);
        PyErr_Clear();
        Py_XDECREF(empty);
        Py_XDECREF(typed);
    }
}

static bool shim_tells_the_truth(PyObject *probe)
{
    int64_t n = 0, *size = NULL, *stride = NULL;
    tensor_handle h = koila__tensor_handle(probe);
    if (shim.requires_grad && shim.requires_grad(*(void **)h))
        return false;
    return shim.get_dim(h, &n) == 0 && n == 3 && shim.get_sizes(h, &size) == 0 &&
           shim.get_strides(h, &stride) == 0 && size[0] == 2 && size[1] == 3 && size[2] == 4 &&
           stride[0] == 12 && stride[1] == 1 && stride[2] == 3;
}

/* Finds storage_ among the first words of a TensorImpl. Without it writes by the back door are not
 * seen. */
static void learn_storage(PyObject *probe)
{
    PyObject *storage = PyObject_CallMethod(probe, "untyped_storage", NULL);
    PyObject *cdata = storage ? PyObject_GetAttrString(storage, "_cdata") : NULL;
    void *impl = cdata ? PyLong_AsVoidPtr(cdata) : NULL;
    for (Py_ssize_t at = 8; impl && at <= 64 && !storage_at; at += 8)
        if (*(void **)(*(char **)koila__tensor_handle(probe) + at) == impl)
            storage_at = at;
    PyErr_Clear();
    Py_XDECREF(cdata);
    Py_XDECREF(storage);
}

/* New: a tensor whose memory is a bytearray's. */
static PyObject *over_bytes(PyObject *torch)
{
    PyObject *frombuffer = PyObject_GetAttrString(torch, "frombuffer");
    PyObject *bytes = PyByteArray_FromStringAndSize("koila", 5);
    PyObject *args = bytes ? PyTuple_Pack(1, bytes) : NULL;
    PyObject *named = Py_BuildValue("{s:O}", "dtype", dtypes[KOILA_DTYPE_U8]);
    PyObject *t = frombuffer && args && named ? PyObject_Call(frombuffer, args, named) : NULL;
    Py_XDECREF(named);
    Py_XDECREF(args);
    Py_XDECREF(bytes);
    Py_XDECREF(frombuffer);
    return t;
}

/* Finds `borrowed`: two tensors over bytes have that word in common, and neither a tensor in memory
 * of torch's own nor one in a part of that storage has it. Without it writes into a numpy array
 * that a tensor was made of are not seen. */
static void learn_borrowed(PyObject *torch)
{
    enum { FIRST = 2, END = 6 }; /* words of a DataPtr: behind the table of functions and counts */
    PyObject *a = over_bytes(torch);
    PyObject *b = a ? over_bytes(torch) : NULL;
    PyObject *own = b ? PyObject_CallMethod(b, "clone", NULL) : NULL;
    PyObject *storage = own ? PyObject_CallMethod(own, "untyped_storage", NULL) : NULL;
    PyObject *part = storage ? PySequence_GetSlice(storage, 0, 5) : NULL;
    PyObject *cdata = part ? PyObject_GetAttrString(part, "_cdata") : NULL;
    const uintptr_t *of_part = cdata ? PyLong_AsVoidPtr(cdata) : NULL;
    const uintptr_t *of_own = of_part ? koila__storage_of(own) : NULL;
    if (of_own) {
        const uintptr_t *of_a = koila__storage_of(a);
        const uintptr_t *of_b = koila__storage_of(b);
        for (uint32_t i = FIRST; i < END && !borrowed.frees; i++)
            if (of_a[i] == of_b[i] && of_a[i] != of_own[i] && of_a[i] != of_part[i]) {
                borrowed.frees = of_a[i];
                borrowed.word = i;
            }
    }
    PyErr_Clear();
    Py_XDECREF(cdata);
    Py_XDECREF(part);
    Py_XDECREF(storage);
    Py_XDECREF(own);
    Py_XDECREF(b);
    Py_XDECREF(a);
}

enum { LOOKED_AT = 22 * 8 }; /* bytes of a TensorImpl that each version of torch has at least */

static const char *impl_of(PyObject *tensor)
{
    return *(const char **)koila__tensor_handle(tensor);
}

/* The offset of these n words; 0: they are not there. */
static uint16_t offset_of(const char *impl, const int64_t *words, size_t n)
{
    for (size_t at = 8; at + n * 8 <= LOOKED_AT; at += 8)
        if (memcmp(impl + at, words, n * 8) == 0)
            return (uint16_t)at;
    return 0;
}

/* Does a number of two bytes at this offset tell the dtype of all of `tensors`, one a dtype? */
static bool tells_dtype(PyObject *tensors, size_t at)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *t = PyList_GET_ITEM(tensors, i);
        int32_t code;
        if (shim.get_dtype(koila__tensor_handle(t), &code) ||
            *(const uint16_t *)(impl_of(t) + at) != code)
            return false;
    }
    return PyList_GET_SIZE(tensors) > 3;
}

/* Where a TensorImpl keeps what plain_facts has. probe: of make_probe(). tensors: a plain tensor of
 * each dtype. keys: the dispatch keys of the probe. */
static void learn_layout(PyObject *probe, PyObject *tensors, uint64_t keys)
{
    static const int64_t sizes[] = { 3, 2, 3, 4 }, strides[] = { 12, 1, 3 };
    struct layout found = { .plain_keys = keys };
    const int64_t word = (int64_t)keys;
    found.sizes = offset_of(impl_of(probe), sizes, 4);
    found.strides = offset_of(impl_of(probe), strides, 3);
    found.keys = offset_of(impl_of(probe), &word, 1);
    if (found.strides != found.sizes + 8 + MOST_INLINE_DIMS * 8 || found.keys < found.strides)
        return;
    for (size_t at = found.strides + MOST_INLINE_DIMS * 8; at < found.keys; at += 2)
        if (tells_dtype(tensors, at)) {
            found.dtype = (uint16_t)at;
            lies = found;
            return;
        }
}

/* The dispatch keys of `probe`, if it is a plain tensor on the CPU, which has a version. False: no,
 * or torch does not tell. */
static bool keys_of(PyObject *torch, PyObject *probe, uint64_t *out)
{
    int32_t device;
    if (koila__maybe_inference() || Py_TYPE(probe)->tp_base != (PyTypeObject *)torch_tensor_base ||
        shim.get_device_type(koila__tensor_handle(probe), &device) || device)
        return false;
    PyObject *c = PyObject_GetAttrString(torch, "_C");
    PyObject *keys = c ? PyObject_CallMethod(c, "_dispatch_keys", "O", probe) : NULL;
    PyObject *number = keys ? PyObject_CallMethod(keys, "raw_repr", NULL) : NULL;
    *out = number ? PyLong_AsUnsignedLongLong(number) : 0;
    Py_XDECREF(number);
    Py_XDECREF(keys);
    Py_XDECREF(c);
    return *out && !PyErr_Occurred();
}

/* autograd_meta_ is the word behind storage_. It is empty until autograd needs it. */
static void learn_autograd(PyObject *probe)
{
    const uint16_t at = (uint16_t)(storage_at + 8);
    if (!storage_at || *(void *const *)(impl_of(probe) + at))
        return;
    PyObject *done = PyObject_CallMethod(probe, "requires_grad_", NULL);
    const bool is_there = done && *(void *const *)(impl_of(probe) + at);
    PyErr_Clear();
    Py_XDECREF(done);
    if (is_there && *(void *const *)(impl_of(probe) + at + 8) == NULL)
        lies.autograd = at;
}

/* Sets up the shim; it stays unused if anything is missing. -1 with an exception. */
static int learn_shim(PyObject *torch)
{
    uint64_t keys;
    PyObject *probe = make_probe(torch);
    if (!probe)
        return -1;
    const int rc = learn_cdata(probe);
    if (rc == 0 && koila__cdata)
        learn_storage(probe);
    if (storage_at)
        learn_borrowed(torch);
    void *lib = rc == 0 && koila__cdata ? open_libtorch(torch) : NULL;
    PyObject *tensors = lib && find_functions(lib) ? PyList_New(0) : NULL;
    if (tensors) {
        learn_dtype_codes(torch, tensors);
        shim.works = shim_tells_the_truth(probe);
    }
    if (shim.works && keys_of(torch, probe, &keys))
        learn_layout(probe, tensors, keys);
    if (shim.works)
        learn_autograd(probe);
    PyErr_Clear();
    Py_XDECREF(tensors);
    Py_DECREF(probe);
    return rc;
}

/* Finds the C getter of a tensor attribute, which saves the look-up at each call. */
static int getset_of(const char *name, getter *get, void **closure)
{
    PyObject *d = PyDict_GetItemString(((PyTypeObject *)torch_tensor_base)->tp_dict, name);
    if (!d || !Py_IS_TYPE(d, &PyGetSetDescr_Type)) {
        PyErr_Format(PyExc_RuntimeError, "torch.Tensor.%s is not the attribute koila knows", name);
        return -1;
    }
    *get = ((PyGetSetDescrObject *)d)->d_getset->get;
    *closure = ((PyGetSetDescrObject *)d)->d_getset->closure;
    return 0;
}

int koila__real_setup(PyObject *torch)
{
    const koila_status status = koila__table ? KOILA_OK : koila_table_new(NULL, &koila__table);
    if (status) {
        koila__raise(status);
        return -1;
    }
    PyObject *c = PyObject_GetAttrString(torch, "_C");
    if (!c)
        return -1;
    torch_tensor_base = PyObject_GetAttrString(c, "TensorBase");
    set_grad_enabled = PyObject_GetAttrString(c, "_set_grad_enabled");
    Py_DECREF(c);
    torch_device = PyObject_GetAttrString(torch, "device");
    is_grad_enabled = PyObject_GetAttrString(torch, "is_grad_enabled");
    koila__strided = PyObject_GetAttrString(torch, "strided");
    devices_other = PyList_New(0);
    devices_cuda = PyList_New(0);
    if (!torch_tensor_base || !set_grad_enabled || !torch_device || !is_grad_enabled ||
        !koila__strided || !devices_other || !devices_cuda)
        return -1;
    device_cpu = PyObject_CallFunction(torch_device, "s", "cpu");
    if (!device_cpu)
        return -1;
    for (int d = 0; d < KOILA_N_DTYPES; d++) {
        dtypes[d] = PyObject_GetAttrString(torch, koila_dtype_torch((koila_dtype)d));
        if (dtypes[d])
            continue;
        PyErr_Clear();
        dtypes[d] = Py_NewRef(Py_None);
    }
    if (getset_of("_version", &version_getter, &version_closure) < 0 ||
        getset_of("layout", &layout_getter, &layout_closure) < 0 ||
        getset_of("data", &data_getter, &data_closure) < 0)
        return -1;
    return learn_shim(torch);
}
