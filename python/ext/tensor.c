/* tensor.c — the Value in a LazyTensor's slot, and the wrapper round it.
 *
 *   class Value:                   # one per wrapper, owned by the wrapper's slot `_v`, dies with it
 *       group, chain               # which storage, and which view of it
 *       value                      # what it was at group.gen
 *
 * A wrapper is a torch.Tensor without storage; to make one is most of what capture itself costs, see "wrappers" below. It is done through PyTorch's C shim (aoti_torch_*, found
 * with dlsym and checked at start-up), where metadata of real tensors comes from too; where the shim is missing, torch's Python functions and attributes serve.
 */
#include "capture.h"

uint64_t koila__n_handles;
uint32_t koila__n_settled;

#include <dlfcn.h>
#include <structmember.h>

PyTypeObject *koila__lazy_class;
Py_ssize_t koila__slot;

static PyObject *torch_tensor_base;     /* torch._C.TensorBase */
static PyObject *torch_device;          /* torch.device */
static PyObject *dtypes[KOILA_N_DTYPES];
static int8_t dtype_of_code[256];       /* torch's ScalarType → koila_dtype, -1: unknown */
static PyObject *devices_other;         /* list: device 0xff00 + i */
static PyObject *devices_cuda;          /* list: cuda:i */
static PyObject *device_cpu;
static PyCFunctionWithKeywords make_wrapper;
static PyObject *set_throw;             /* torch._C._set_throw_on_mutable_data_ptr */
static Py_ssize_t cdata_offset;         /* of the TensorImpl * in a tensor object */
static getter version_getter, layout_getter;
static void *version_closure, *layout_closure;
static PyObject *data_descriptor;       /* torch._C.TensorBase.data */
static PyObject *strided;               /* torch.strided */
static PyObject *is_grad_enabled, *set_grad_enabled;

typedef void *tensor_handle;
static struct shim {
    int32_t (*get_dim)(tensor_handle, int64_t *);
    int32_t (*get_sizes)(tensor_handle, int64_t **);
    int32_t (*get_strides)(tensor_handle, int64_t **);
    int32_t (*get_dtype)(tensor_handle, int32_t *);
    int32_t (*get_device_type)(tensor_handle, int32_t *);
    int32_t (*get_device_index)(tensor_handle, int32_t *);
    bool (*grad_mode)(void);
    void (*set_grad_mode)(bool);
    bool (*inference_mode)(void);
    int32_t (*reinterpret)(tensor_handle, int64_t, const int64_t *, const int64_t *, int64_t, tensor_handle *);
    int32_t (*drop)(tensor_handle);
    PyObject *(*wrap)(tensor_handle, PyTypeObject *);
    bool works;
} shim;
bool koila__by_parts;

/* ---- real tensors */

bool koila__is_tensor(PyObject *o) { return PyType_IsSubtype(Py_TYPE(o), (PyTypeObject *)torch_tensor_base); }

bool koila__grad_mode(void)
{
    if (shim.grad_mode) return shim.grad_mode();
    PyObject *r = PyObject_CallNoArgs(is_grad_enabled);
    const bool on = r == Py_True;
    Py_XDECREF(r);
    PyErr_Clear();
    return on;
}

int koila__set_grad_mode(bool on)
{
    if (shim.set_grad_mode) return shim.set_grad_mode(on), 0;
    PyObject *r = PyObject_CallOneArg(set_grad_enabled, on ? Py_True : Py_False);
    Py_XDECREF(r);
    return r ? 0 : -1;
}

bool koila__maybe_inference(void) { return !shim.inference_mode || shim.inference_mode(); }

PyObject *koila__dtype_object(koila_dtype d) { return dtypes[d]; }

int koila__dtype_of(PyObject *o)
{
    for (int i = 0; i < KOILA_N_DTYPES; i++)
        if (dtypes[i] == o) return i;
    return -1;
}

PyObject *koila__device_object(uint16_t device)
{
    if (device == 0) return device_cpu;
    if (device >> 8 == 0xff) return PyList_GetItem(devices_other, device & 0xff);
    while (PyList_GET_SIZE(devices_cuda) <= (device & 0xff)) {
        PyObject *d = PyObject_CallFunction(torch_device, "sn", "cuda", PyList_GET_SIZE(devices_cuda));
        if (!d || PyList_Append(devices_cuda, d) < 0) return Py_XDECREF(d), NULL;
        Py_DECREF(d);
    }
    return PyList_GET_ITEM(devices_cuda, device & 0xff);
}

int koila__device_of(PyObject *o, uint16_t *out)
{
    PyObject *type = PyObject_GetAttrString(o, "type"), *index = type ? PyObject_GetAttrString(o, "index") : NULL;
    int rc = -1;
    if (!index) goto done;
    const char *name = PyUnicode_AsUTF8(type);
    if (!name) goto done;
    if (!strcmp(name, "cpu")) {
        *out = 0, rc = 0;
    } else if (!strcmp(name, "cuda")) {
        const long i = index == Py_None ? 0 : PyLong_AsLong(index);
        if (i >= 0 && i < 255) *out = (uint16_t)(0x100 + i), rc = 0;
    } else {
        Py_ssize_t n = PyList_GET_SIZE(devices_other), i = 0;
        for (; i < n; i++) {
            const int same = PyObject_RichCompareBool(PyList_GET_ITEM(devices_other, i), o, Py_EQ);
            if (same < 0) goto done;
            if (same) break;
        }
        if (i == n && PyList_Append(devices_other, o) < 0) goto done;
        *out = (uint16_t)(0xff00 + i), rc = 0;
    }
done:
    Py_XDECREF(type);
    Py_XDECREF(index);
    return rc;
}

/* (dtype, device, sizes, strides[, offset]) → meta */
int koila__meta_from(PyObject *tuple, koila_meta *out, int64_t *offset)
{
    int64_t size[64], stride[64];
    PyObject *sizes = PyTuple_GetItem(tuple, 2), *strides = PyTuple_GetItem(tuple, 3);
    if (!sizes || !strides) return -1;
    const int d = koila__dtype_of(PyTuple_GET_ITEM(tuple, 0));
    const Py_ssize_t n = PySequence_Size(sizes);
    if (n < 0) return -1;
    if (d < 0 || n > KOILA_MAX_DIMS) {
        PyObject *e = koila__helper("UnsupportedError");
        if (e) {
            if (d < 0) PyErr_Format(e, "a tensor of %R cannot be lazy", PyTuple_GET_ITEM(tuple, 0));
            else PyErr_Format(e, "a tensor of %zd dimensions cannot be lazy; at most %d", n, KOILA_MAX_DIMS);
            Py_DECREF(e);
        }
        return -1;
    }
    uint16_t device;
    if (koila__device_of(PyTuple_GET_ITEM(tuple, 1), &device) < 0) return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *a = PySequence_GetItem(sizes, i), *b = PySequence_GetItem(strides, i);
        size[i] = a ? PyLong_AsLongLong(a) : -1;
        stride[i] = b ? PyLong_AsLongLong(b) : -1;
        Py_XDECREF(a);
        Py_XDECREF(b);
        if (PyErr_Occurred()) return -1;
    }
    const koila_status s = koila_table_meta(koila__table, (koila_dtype)d, device, (uint32_t)n, size, stride, out);
    if (s) return koila__raise(s), -1;
    if (offset) {
        *offset = PyTuple_GET_SIZE(tuple) > 4 ? PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, 4)) : 0;
        if (*offset == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static int shim_meta(PyObject *real, koila_meta *out)
{
    tensor_handle h = (char *)real + cdata_offset;
    int64_t n, *size, *stride;
    int32_t dtype, type;
    if (shim.get_dim(h, &n) || shim.get_sizes(h, &size) || shim.get_dtype(h, &dtype) || shim.get_device_type(h, &type)) return -1;
    if (dtype < 0 || dtype > 255 || dtype_of_code[dtype] < 0 || n > KOILA_MAX_DIMS || type > 1) return -1;
    if (shim.get_strides(h, &stride)) return -1;
    uint16_t device = 0;
    if (type == 1) {
        int32_t i;
        if (shim.get_device_index(h, &i) || i > 254) return -1;
        device = (uint16_t)(0x100 + i);
    }
    return koila_table_meta(koila__table, (koila_dtype)dtype_of_code[dtype], device, (uint32_t)n, size, stride, out) == KOILA_OK ? 0 : -1;
}

int koila__meta_of(PyObject *real, koila_meta *out)
{
    PyObject *layout = layout_getter(real, layout_closure); /* the shim gives sizes and strides of sparse tensors too */
    const bool dense = layout == strided;
    if (!layout) PyErr_Clear();
    Py_XDECREF(layout);
    if (dense && shim.works && shim_meta(real, out) == 0) return 0;
    PyObject *f = koila__helper("real_meta"), *t = f ? PyObject_CallOneArg(f, real) : NULL;
    const int rc = t ? koila__meta_from(t, out, NULL) : -1;
    Py_XDECREF(t);
    Py_XDECREF(f);
    return rc;
}

int koila__version_of(PyObject *real, uint32_t *out)
{
    PyObject *v = version_getter(real, version_closure);
    if (!v) { /* inference tensors have no version counter: they cannot be written outside inference mode */
        PyErr_Clear();
        *out = 0;
        return 0;
    }
    *out = (uint32_t)PyLong_AsUnsignedLong(v);
    Py_DECREF(v);
    return 0;
}

/* ---- wrappers
 *
 * torch.Tensor._make_wrapper_subclass parses 15 arguments, and that data pointers throw is asked for in a second call: together several times what the tensor itself costs.
 * So both happen once for each dtype and device, for a prototype. Torch's C shim makes tensors of any sizes that share its storage (nothing at all, but it throws,
 * and says to be larger than any tensor), and the function that wraps every tensor for Python puts them into our class. What only C++ can do is to set the two
 * dispatch keys that lead to Python; so we do it where the keys lie, which is learnt from two tensors whose keys torch tells. Where anything of this is missing, or
 * what comes out differs in the least (learn_wrappers() in _tensor.py), each wrapper is made by arguments. */

static struct wrap { /* [n_wraps], by meta id */
    PyObject *args;      /* owned, of make_wrapper: all by position, for torch looks a keyword up once per parameter */
    tensor_handle like;  /* borrowed from a prototype; NULL: by arguments */
} *wraps;
static uint32_t n_wraps;

static uint32_t keys_at;     /* where in a TensorImpl its dispatch keys lie; 0: not known */
static uint64_t python_keys;

static struct prototype {
    PyObject *wrapper; /* owned */
    koila_dtype dtype;
    uint16_t device;
} *prototypes;
static uint32_t n_prototypes;

/* Arguments for sizes and strides (NULL: contiguous) that start at `offset`. */
static PyObject *wrap_args(PyObject *size, PyObject *stride, int64_t offset, koila_dtype dtype, uint16_t device)
{
    PyObject *d = koila__device_object(device), *at = d ? PyLong_FromLongLong(offset) : NULL, *r = NULL;
    if (!at) return NULL;
    if (!stride) stride = Py_None;
    if (device) r = PyTuple_Pack(8, koila__lazy_class, size, stride, offset ? at : Py_None, Py_None, dtypes[dtype], strided, d);
    else r = PyTuple_Pack(6, koila__lazy_class, size, stride, offset ? at : Py_None, Py_None, dtypes[dtype]);
    Py_DECREF(at);
    return r;
}

static PyObject *wrap_by_arguments(PyObject *args)
{
    PyObject *w = args ? make_wrapper(NULL, args, NULL) : NULL;
    PyObject *ok = w ? PyObject_CallOneArg(set_throw, w) : NULL; /* whoever asks for the data pointer of nothing gets an error, not a crash */
    if (!ok) return Py_XDECREF(w), NULL;
    Py_DECREF(ok);
    return w;
}

static tensor_handle prototype_of(koila_dtype dtype, uint16_t device)
{ /* NULL: none, without an error */
    if (!shim.wrap || !shim.reinterpret || !shim.drop) return NULL;
    for (uint32_t i = 0; i < n_prototypes; i++)
        if (prototypes[i].dtype == dtype && prototypes[i].device == device) return (char *)prototypes[i].wrapper + cdata_offset;
    struct prototype *p = PyMem_Realloc(prototypes, (n_prototypes + 1) * sizeof *p);
    if (!p) return NULL;
    prototypes = p;
    PyObject *size = Py_BuildValue("(L)", 1LL << 58), *args = size ? wrap_args(size, NULL, 0, dtype, device) : NULL, *w = wrap_by_arguments(args);
    Py_XDECREF(args);
    Py_XDECREF(size);
    if (!w) return PyErr_Clear(), NULL;
    PyObject_GC_UnTrack(w); /* it holds nothing, and is no tensor of the user's to be found */
    prototypes[n_prototypes++] = (struct prototype){ w, dtype, device };
    return (char *)w + cdata_offset;
}

/* The function that wraps throws when it cannot have an object, and nothing here could catch that: it finds one made before. */
static PyObject *spare;

static PyObject *lazy_alloc(PyTypeObject *type, Py_ssize_t n)
{
    PyObject *o = spare;
    spare = NULL;
    return o ? o : PyType_GenericAlloc(type, n);
}

static PyObject *wrap_by_parts(tensor_handle like, const koila_meta_info *m, int64_t offset)
{ /* NULL with or without an exception */
    tensor_handle h;
    if (shim.reinterpret(like, m->n_dims, m->size, m->stride, offset, &h)) return NULL;
    if (keys_at) *(uint64_t *)(*(char **)h + keys_at) |= python_keys;
    PyObject *w = PyType_GenericAlloc(koila__lazy_class, 0);
    if (w) {
        spare = w;
        w = shim.wrap(h, koila__lazy_class);
    }
    shim.drop(h);
    return w;
}

static PyObject *list_of(const int64_t *v, uint8_t n)
{
    PyObject *r = PyTuple_New(n);
    for (uint8_t i = 0; r && i < n; i++) {
        PyObject *x = PyLong_FromLongLong(v[i]);
        if (x) PyTuple_SET_ITEM(r, i, x);
        else Py_CLEAR(r);
    }
    return r;
}

PyObject *koila__meta_object(koila_meta meta)
{
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    PyObject *size = list_of(m->size, m->n_dims), *stride = size ? list_of(m->stride, m->n_dims) : NULL, *device = koila__device_object(m->device);
    PyObject *r = stride && device ? PyTuple_Pack(4, dtypes[m->dtype], device, size, stride) : NULL;
    Py_XDECREF(size);
    Py_XDECREF(stride);
    return r;
}

static PyObject *args_of(const koila_meta_info *m, int64_t offset)
{
    bool contiguous = offset == 0; /* an offset is only taken with strides */
    int64_t expect = 1;
    for (int i = m->n_dims - 1; i >= 0; i--) {
        if (m->stride[i] != expect) contiguous = false;
        expect *= m->size[i] > 1 ? m->size[i] : 1;
    }
    PyObject *size = list_of(m->size, m->n_dims), *stride = !size || contiguous ? NULL : list_of(m->stride, m->n_dims);
    PyObject *r = size && (stride || contiguous) ? wrap_args(size, stride, offset, m->dtype, m->device) : NULL;
    Py_XDECREF(size);
    Py_XDECREF(stride);
    return r;
}

static int wrap_fill(koila_meta meta)
{
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    if (meta >= n_wraps) {
        const uint32_t n = (meta + 1) * 2 < 64 ? 64 : (meta + 1) * 2;
        struct wrap *w = PyMem_Realloc(wraps, n * sizeof *w);
        if (!w) return PyErr_NoMemory(), -1;
        memset(w + n_wraps, 0, (n - n_wraps) * sizeof *w);
        wraps = w, n_wraps = n;
    }
    wraps[meta].args = args_of(m, 0);
    if (!wraps[meta].args) return -1;
    wraps[meta].like = prototype_of(m->dtype, m->device);
    return 0;
}

static PyObject *wrapper_alone(koila_meta meta, int64_t offset)
{
    if ((meta >= n_wraps || !wraps[meta].args) && wrap_fill(meta) < 0) return NULL;
    if (koila__by_parts && wraps[meta].like) {
        PyObject *w = wrap_by_parts(wraps[meta].like, koila_meta_get(koila__table, meta), offset);
        if (w || PyErr_Occurred()) return w;
    }
    if (offset == 0) return wrap_by_arguments(wraps[meta].args);
    PyObject *args = args_of(koila_meta_get(koila__table, meta), offset), *w = wrap_by_arguments(args);
    Py_XDECREF(args);
    return w;
}

PyObject *koila__wrapper_pair(koila_meta meta, int64_t offset)
{ /* the same tensor made both ways; the second None: torch has not what that needs */
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    PyObject *args = args_of(m, offset), *a = wrap_by_arguments(args), *b = NULL;
    Py_XDECREF(args);
    if (!a) return NULL;
    const tensor_handle like = prototype_of(m->dtype, m->device);
    if (like) b = wrap_by_parts(like, m, offset);
    if (!b && PyErr_Occurred()) return Py_DECREF(a), NULL;
    return Py_BuildValue("NN", a, b ? b : Py_NewRef(Py_None));
}

bool koila__learn_keys(PyObject *lazy, uint64_t lazy_keys, PyObject *made, uint64_t made_keys)
{ /* The keys are the last member of a TensorImpl of 22 words. */
    const uint64_t *a = *(uint64_t **)((char *)lazy + cdata_offset), *b = *(uint64_t **)((char *)made + cdata_offset);
    if (keys_at) return true; /* once: from then on both have the same */
    if (!cdata_offset || lazy_keys == made_keys || (made_keys & ~lazy_keys)) return false;
    for (uint32_t i = 2; i < 22; i++)
        if (a[i] == lazy_keys && b[i] == made_keys) {
            keys_at = i * 8;
            python_keys = lazy_keys & ~made_keys;
            return true;
        }
    return false;
}

/* ---- the handle */

#define FREELIST 1024
static koila__handle *freelist[FREELIST];
static int n_free;

static void link_value(koila__handle *h, koila_value v)
{
    h->value = v;
    h->prev_of_value = NULL;
    h->next_of_value = NULL;
    if (v == KOILA_NONE) return;
    tape_value *tv = &h->group->tape->values[v];
    h->next_of_value = tv->handle;
    if (tv->handle) tv->handle->prev_of_value = h;
    tv->handle = h;
}

static void unlink_value(koila__handle *h)
{
    if (h->value == KOILA_NONE) return;
    if (h->prev_of_value) h->prev_of_value->next_of_value = h->next_of_value;
    else h->group->tape->values[h->value].handle = h->next_of_value;
    if (h->next_of_value) h->next_of_value->prev_of_value = h->prev_of_value;
    h->value = KOILA_NONE;
    h->next_of_value = h->prev_of_value = NULL;
}

void koila__handle_set_value(koila__handle *h, koila_value v)
{
    unlink_value(h);
    link_value(h, v);
}

static void attach(koila__handle *h, koila__group *g, koila__chain *c, koila_value v, koila_meta meta, int64_t offset)
{
    g->refs++;
    if (c) c->refs++;
    h->group = g;
    h->chain = c;
    h->gen = g->gen;
    h->meta = meta;
    h->offset = offset;
    h->prev_in_group = NULL;
    h->next_in_group = g->handles;
    if (g->handles) g->handles->prev_in_group = h;
    g->handles = h;
    koila__tape *t = g->tape;
    h->prev_in_tape = NULL;
    h->next_in_tape = t->handles;
    if (t->handles) t->handles->prev_in_tape = h;
    t->handles = h;
    t->n_handles++;
    koila__n_handles++;
    link_value(h, v);
}

/* Leave group, tape and value. Returns the group to free, if it was the last. Runs no Python code. */
static koila__group *detach(koila__handle *h)
{
    koila__group *g = h->group;
    koila__tape *t = g->tape;
    unlink_value(h);
    if (h->prev_in_group) h->prev_in_group->next_in_group = h->next_in_group;
    else g->handles = h->next_in_group;
    if (h->next_in_group) h->next_in_group->prev_in_group = h->prev_in_group;
    if (h->prev_in_tape) h->prev_in_tape->next_in_tape = h->next_in_tape;
    else t->handles = h->next_in_tape;
    if (h->next_in_tape) h->next_in_tape->prev_in_tape = h->prev_in_tape;
    t->n_handles--;
    koila__n_handles--;
    koila__chain_release(h->chain);
    h->group = NULL;
    h->chain = NULL;
    return --g->refs == 0 ? g : NULL;
}

static void settle(koila__tape *t)
{ /* nobody can ask for anything any more, but BatchNorm's statistics must still happen: see Note [Effects] in tape.c */
    if (t->n_handles || !t->n_effects) return;
    if (t->failed || t->planned) { /* a step that failed, or was only planned, changes nothing outside */
        Py_INCREF(t);
        koila__tape_give_up(t);
        Py_DECREF(t);
        return;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_INCREF(t);
    if (koila__tape_drop_overwritten(t) < 0 || (t->n_effects && koila__run(t, NULL, 0, true) < 0)) {
        PyObject *error, *said, *where;
        PyErr_Fetch(&error, &said, &where);
        PyObject *stale = koila__helper("StaleValueError");
        if (stale && error && PyErr_GivenExceptionMatches(error, stale)) {
            Py_CLEAR(error);
            Py_CLEAR(said);
            Py_CLEAR(where);
            if (PyErr_WarnFormat(PyExc_RuntimeWarning, 1,
                                 "koila: a training-mode forward pass was left without backward, and what it was computed from has been written since: its running statistics (%u) "
                                 "stay as they were",
                                 t->n_effects) == 0)
                koila__tape_give_up(t);
        }
        Py_XDECREF(stale);
        if (error) PyErr_Restore(error, said, where);
        if (PyErr_Occurred()) PyErr_WriteUnraisable((PyObject *)t);
    }
    Py_DECREF(t);
    PyErr_Restore(type, value, trace);
}

static void leave(koila__handle *h)
{
    koila__tape *t = h->group->tape;
    Py_INCREF(t);
    koila__group *last = detach(h);
    if (last) koila__group_free(last);
    if (t->n_effects) settle(t);
    if (t->closed && t->n_handles < 16) koila__tape_let_go(t);
    if (!t->n_handles && !t->n_effects && !t->waiting && koila__open == t) { /* nothing of it can be asked for: the next lazy() opens a new one */
        koila__open = NULL;
        Py_DECREF(t);
        koila__factories_watch();
    }
    Py_DECREF(t);
}

static void handle_dealloc(koila__handle *h)
{
    if (h->group) {
        leave(h);
    } else {
        koila__n_settled--;
        Py_CLEAR(h->wrapper);
    }
    if (n_free < FREELIST) freelist[n_free++] = h;
    else PyObject_Free(h);
}

void koila__handle_settle(koila__handle *h, PyObject *plain)
{
    if (h->group) {
        leave(h);
        koila__n_settled++;
        h->wrapper = NULL;
    }
    Py_XSETREF(h->wrapper, Py_NewRef(plain));
}

PyObject *koila__tensor_data_set(PyObject *self, PyObject *data) { return PyObject_CallMethod(data_descriptor, "__set__", "OO", self, data); }

void koila__handle_move(koila__handle *h, koila__group *g, koila__chain *c, koila_value v, koila_meta meta, int64_t offset)
{
    if (c) c->refs++; /* both may be what we leave */
    g->refs++;
    koila__group *last = detach(h);
    g->refs--;
    attach(h, g, c, v, meta, offset);
    if (c) c->refs--;
    if (last) koila__group_free(last);
}

PyTypeObject koila__handle_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.Value",
    .tp_basicsize = sizeof(koila__handle),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)handle_dealloc,
    .tp_doc = "What a LazyTensor stands for: a value of a tape.",
};

PyObject *koila__wrapper_new(koila__group *g, koila__chain *c, koila_value v, koila_meta meta, int64_t offset)
{
    PyObject *w = wrapper_alone(meta, offset);
    if (!w) return NULL;
    koila__handle *h = n_free ? freelist[--n_free] : PyObject_Malloc(sizeof *h);
    if (!h) return Py_DECREF(w), PyErr_NoMemory();
    PyObject_Init((PyObject *)h, &koila__handle_type);
    h->wrapper = w;
    attach(h, g, c, v, meta, offset);
    *(koila__handle **)((char *)w + koila__slot) = h;
    return w;
}

/* ---- groups and chains */

koila__group *koila__group_new(koila__tape *t, koila_value base, koila_meta meta)
{
    koila__group *g = PyObject_Malloc(sizeof *g);
    if (!g) return PyErr_NoMemory(), NULL;
    Py_INCREF(t);
    *g = (koila__group){ .tape = t, .cur = base, .meta = meta, .gen = 1 };
    return g;
}

void koila__group_free(koila__group *g)
{
    koila__tape *t = g->tape;
    koila__n_factories -= g->factory;
    PyObject_Free(g);
    Py_DECREF(t);
}

koila__chain *koila__chain_new(koila__chain *parent, koila_link link, koila_meta meta, int64_t offset, uint32_t gen, koila_value v)
{
    koila__chain *c = PyObject_Malloc(sizeof *c);
    if (!c) return PyErr_NoMemory(), NULL;
    if (parent) parent->refs++;
    *c = (koila__chain){ .n_links = parent ? parent->n_links + 1 : 1, .parent = parent, .link = link, .meta = meta, .offset = offset, .memo_gen = gen, .memo = v };
    return c;
}

void koila__chain_release(koila__chain *c)
{
    while (c && --c->refs == 0) {
        koila__chain *parent = c->parent;
        PyObject_Free(c);
        c = parent;
    }
}

/* ---- start-up */

static int learn_shim(PyObject *torch)
{
    PyObject *probe = PyObject_CallMethod(torch, "empty_strided", "((iii)(iii))", 2, 3, 4, 12, 1, 3), *cdata = NULL;
    if (!probe) return -1;
    cdata = PyObject_GetAttrString(probe, "_cdata");
    void *impl = cdata ? PyLong_AsVoidPtr(cdata) : NULL;
    Py_XDECREF(cdata);
    if (!impl) return Py_DECREF(probe), -1;
    cdata_offset = 0;
    for (Py_ssize_t at = sizeof(PyObject); at <= (Py_ssize_t)sizeof(PyObject) + 16; at += 8)
        if (*(void **)((char *)probe + at) == impl) {
            cdata_offset = at;
            break;
        }
    PyObject *file = PyObject_GetAttrString(torch, "__file__");
    const char *name = file ? PyUnicode_AsUTF8(file) : NULL, *cut = name ? strrchr(name, '/') : NULL;
    char path[4096];
    void *lib = NULL;
    if (cut && snprintf(path, sizeof path, "%.*s/lib/libtorch_cpu.so", (int)(cut - name), name) < (int)sizeof path) lib = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    Py_XDECREF(file);
    PyErr_Clear();
    memset(&shim, 0, sizeof shim);
    if (!lib || !cdata_offset) return Py_DECREF(probe), 0;
#define FIND(field, name) *(void **)&shim.field = dlsym(lib, name)
    FIND(get_dim, "aoti_torch_get_dim");
    FIND(get_sizes, "aoti_torch_get_sizes");
    FIND(get_strides, "aoti_torch_get_strides");
    FIND(get_dtype, "aoti_torch_get_dtype");
    FIND(get_device_type, "aoti_torch_get_device_type");
    FIND(get_device_index, "aoti_torch_get_device_index");
    FIND(grad_mode, "aoti_torch_grad_mode_is_enabled");
    FIND(set_grad_mode, "aoti_torch_grad_mode_set_enabled");
    FIND(reinterpret, "aoti_torch__reinterpret_tensor");
    FIND(drop, "aoti_torch_delete_tensor_object");
    FIND(inference_mode, "_ZN3c1013InferenceMode10is_enabledEv"); /* C++ names, two; without this one Python is asked */
    Dl_info python;
    if (dladdr((void *)make_wrapper, &python) && (lib = dlopen(python.dli_fname, RTLD_LAZY | RTLD_NOLOAD)))
        FIND(wrap, "_Z16THPVariable_WrapRKN2at10TensorBaseEP11_typeobject"); /* without it wrappers are made by arguments */
#undef FIND
    if (!shim.get_dim || !shim.get_sizes || !shim.get_strides || !shim.get_dtype || !shim.get_device_type || !shim.get_device_index) return Py_DECREF(probe), 0;
    memset(dtype_of_code, -1, sizeof dtype_of_code);
    for (int d = 0; d < KOILA_N_DTYPES; d++) {
        if (dtypes[d] == Py_None) continue;
        if (d == KOILA_DTYPE_C32) { /* making one prints a warning */
            dtype_of_code[8] = (int8_t)d;
            continue;
        }
        PyObject *empty = PyObject_CallMethod(torch, "empty", "i", 0), *typed = NULL;
        if (empty) typed = PyObject_CallMethod(empty, "to", "O", dtypes[d]);
        int32_t code;
        if (typed && shim.get_dtype((char *)typed + cdata_offset, &code) == 0 && code >= 0 && code < 256) dtype_of_code[code] = (int8_t)d;
        PyErr_Clear();
        Py_XDECREF(empty);
        Py_XDECREF(typed);
    }
    /* does it tell the truth? */
    int64_t n = 0, *size = NULL, *stride = NULL;
    tensor_handle h = (char *)probe + cdata_offset;
    shim.works = shim.get_dim(h, &n) == 0 && n == 3 && shim.get_sizes(h, &size) == 0 && shim.get_strides(h, &stride) == 0 && size[0] == 2 && size[1] == 3 &&
                 size[2] == 4 && stride[0] == 12 && stride[1] == 1 && stride[2] == 3;
    Py_DECREF(probe);
    return 0;
}

int koila__tensor_setup(PyObject *lazy_class)
{
    PyObject *torch = PyImport_ImportModule("torch"), *c = NULL, *f = NULL, *slot = NULL;
    int rc = -1;
    if (!torch) return -1;
    c = PyObject_GetAttrString(torch, "_C");
    if (!c) goto done;
    if (!koila__table) {
        const koila_status s = koila_table_new(NULL, &koila__table);
        if (s) {
            koila__raise(s);
            goto done;
        }
    }
    torch_tensor_base = PyObject_GetAttrString(c, "TensorBase");
    torch_device = PyObject_GetAttrString(torch, "device");
    set_throw = PyObject_GetAttrString(c, "_set_throw_on_mutable_data_ptr");
    is_grad_enabled = PyObject_GetAttrString(torch, "is_grad_enabled");
    set_grad_enabled = PyObject_GetAttrString(c, "_set_grad_enabled");
    devices_other = PyList_New(0);
    devices_cuda = PyList_New(0);
    if (!torch_tensor_base || !torch_device || !set_throw || !is_grad_enabled || !set_grad_enabled || !devices_other || !devices_cuda) goto done;
    device_cpu = PyObject_CallFunction(torch_device, "s", "cpu");
    if (!device_cpu) goto done;
    for (int d = 0; d < KOILA_N_DTYPES; d++) {
        dtypes[d] = PyObject_GetAttrString(torch, koila_dtype_torch((koila_dtype)d));
        if (!dtypes[d]) {
            PyErr_Clear();
            dtypes[d] = Py_NewRef(Py_None);
        }
    }
    f = PyObject_GetAttrString(lazy_class, "_make_wrapper_subclass");
    if (!f || !PyCFunction_Check(f) || !(PyCFunction_GET_FLAGS(f) & METH_KEYWORDS)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch.Tensor._make_wrapper_subclass is not the function koila knows");
        goto done;
    }
    make_wrapper = (PyCFunctionWithKeywords)(void (*)(void))PyCFunction_GET_FUNCTION(f);
    slot = PyObject_GetAttrString(lazy_class, "_v");
    if (!slot || !Py_IS_TYPE(slot, &PyMemberDescr_Type)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "LazyTensor has no slot _v");
        goto done;
    }
    koila__slot = ((PyMemberDescrObject *)slot)->d_member->offset;
    PyObject *version = PyDict_GetItemString(((PyTypeObject *)torch_tensor_base)->tp_dict, "_version");
    if (!version || !Py_IS_TYPE(version, &PyGetSetDescr_Type)) {
        PyErr_SetString(PyExc_RuntimeError, "torch.Tensor._version is not the attribute koila knows");
        goto done;
    }
    version_getter = ((PyGetSetDescrObject *)version)->d_getset->get;
    version_closure = ((PyGetSetDescrObject *)version)->d_getset->closure;
    PyObject *layout = PyDict_GetItemString(((PyTypeObject *)torch_tensor_base)->tp_dict, "layout");
    strided = PyObject_GetAttrString(torch, "strided");
    if (!strided || !layout || !Py_IS_TYPE(layout, &PyGetSetDescr_Type)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch.Tensor.layout is not the attribute koila knows");
        goto done;
    }
    layout_getter = ((PyGetSetDescrObject *)layout)->d_getset->get;
    layout_closure = ((PyGetSetDescrObject *)layout)->d_getset->closure;
    data_descriptor = PyObject_GetAttrString(torch_tensor_base, "data");
    if (!data_descriptor || learn_shim(torch) < 0) goto done;
    koila__lazy_class = (PyTypeObject *)Py_NewRef(lazy_class);
    koila__lazy_class->tp_alloc = lazy_alloc;
    rc = 0;
done:
    Py_XDECREF(slot);
    Py_XDECREF(f);
    Py_XDECREF(c);
    Py_DECREF(torch);
    return rc;
}
