/* tensor_facts.c — reads the facts of one tensor: name, shape, storage, owner, parts, gradient.
 *
 * All attributes are read through torch's own descriptors of TensorBase, under the caller's
 * DisableTorchFunction: overrides in subclasses do not run. Sizes and addresses of storages are
 * read from the StorageImpl. For plain tensors the storage, the offset in it and whether autograd
 * knows them are read from the TensorImpl. The offsets of these fields are found by experiment on
 * known storages and tensors; if the experiment fails, torch's slower objects are used.
 */
#include "memlab/tensors.h"

#include <string.h>

#include "base/base.h"
#include "memlab/memlab.h"

/* ---- torch's own descriptors, found once */

PyTypeObject *koila__tensor_base;
static struct {
    /* getters */
    PyObject *shape, *dtype, *device, *layout, *grad, *grad_fn, *is_leaf, *retains_grad, *is_nested,
        *requires_grad, *is_cpu;
    /* methods */
    PyObject *use_count, *storage_offset, *untyped_storage, *indices, *values, *crow, *ccol, *col,
        *row, *nested_values, *is_pinned;
    PyObject *storage_address, *has_storage; /* functions of torch._C */
    PyObject *strided;
} of;
static long at_bytes, at_data; /* offsets in a StorageImpl; 0: unknown */
/* indices of words: at_impl in a Python object, the others in a TensorImpl; 0: unknown */
static long at_impl, at_storage, at_offset, at_autograd;

static PyObject *base_attribute(const char *name)
{
    PyObject *o = PyDict_GetItemString(koila__tensor_base->tp_dict, name); // borrowed
    for (Py_ssize_t i = 0; !o && i < PyTuple_GET_SIZE(koila__tensor_base->tp_mro); i++)
        o = PyDict_GetItemString(
            ((PyTypeObject *)PyTuple_GET_ITEM(koila__tensor_base->tp_mro, i))->tp_dict, name);
    return Py_XNewRef(o);
}

/* The value of a getter on t, as if t were a plain tensor; NULL with the error cleared. */
static PyObject *get(PyObject *descriptor, PyObject *t)
{
    descrgetfunc read = descriptor ? Py_TYPE(descriptor)->tp_descr_get : NULL;
    PyObject *r = read ? read(descriptor, t, (PyObject *)Py_TYPE(t)) : NULL;
    if (!r)
        PyErr_Clear();
    return r;
}
static PyObject *call(PyObject *function, PyObject *t)
{
    PyObject *r = function ? PyObject_CallOneArg(function, t) : NULL;
    if (!r)
        PyErr_Clear();
    return r;
}
static bool is_true(PyObject *o)
{
    bool yes = o == Py_True;
    Py_XDECREF(o);
    return yes;
}
static uint64_t as_number(PyObject *o, uint64_t otherwise)
{
    uint64_t v = o && PyLong_Check(o) ? PyLong_AsUnsignedLongLongMask(o) : otherwise;
    if (PyErr_Occurred()) {
        PyErr_Clear();
        v = otherwise;
    }
    Py_XDECREF(o);
    return v;
}

/* The index of the only bit that is set, or 0. */
static long only_bit(uint64_t bits)
{
    return bits && !(bits & (bits - 1)) ? __builtin_ctzll(bits) : 0;
}
static uint64_t as_address(PyObject *o)
{
    uint64_t v = o ? (uint64_t)(uintptr_t)PyLong_AsVoidPtr(o) : 0;
    Py_XDECREF(o);
    PyErr_Clear();
    return v;
}

/* Words to search: a StorageImpl, a tensor's Python object and a TensorImpl have more in every
 * version since 2.0. The words before FIRST in the latter two are known. */
enum { STORAGE_WORDS = 10, OBJECT_FIRST = 2, OBJECT_WORDS = 7, IMPL_FIRST = 1, IMPL_WORDS = 21 };

/* Bit i: words[i] is `wanted`, for first <= i < n. */
static uint64_t words_that_are(const uint64_t *words, int first, int n, uint64_t wanted)
{
    uint64_t found = 0;
    for (int i = first; i < n; i++)
        found |= (uint64_t)(words[i] == wanted) << i;
    return found;
}

/* Finds the offsets of size and address in a StorageImpl: those that agree for storages of three
 * sizes. */
static void find_storage_offsets(PyObject *torch)
{
    static const unsigned sizes[] = { 4099, 12345, 77 };
    uint64_t sees_bytes = ~0ull, sees_data = ~0ull; /* bit i: word i has held it every time */
    for (size_t k = 0; k < KOILA_COUNT(sizes); k++) {
        PyObject *s = PyObject_CallMethod(torch, "UntypedStorage", "I", sizes[k]);
        const uint64_t impl = s ? as_address(PyObject_GetAttrString(s, "_cdata")) : 0;
        const uint64_t data = s ? as_address(PyObject_CallMethod(s, "data_ptr", NULL)) : 0;
        const uint64_t *words = (const uint64_t *)(uintptr_t)impl;
        sees_bytes &= words ? words_that_are(words, 0, STORAGE_WORDS, sizes[k]) : 0;
        sees_data &= words ? words_that_are(words, 0, STORAGE_WORDS, data) : 0;
        Py_XDECREF(s);
        PyErr_Clear();
    }
    at_bytes = sees_bytes ? __builtin_ctzll(sees_bytes) : 0;
    at_data = sees_data ? __builtin_ctzll(sees_data) : 0;
}

/* Bit masks: the words that have held each field in every tensor so far. */
typedef struct sightings {
    uint64_t impl, storage, offset, autograd;
} sightings;

/* Looks into a new tensor at `offset` of its own storage. Autograd's word is zero until a gradient
 * is requested. */
static void look_into(PyObject *torch, int offset, sightings *always)
{
    sightings now = { 0 };
    uint64_t before[IMPL_WORDS];
    PyObject *fresh = PyObject_CallMethod(torch, "empty", "i", 5000);
    PyObject *t = fresh ? PyObject_CallMethod(fresh, "narrow", "iii", 0, offset, 1) : NULL;
    const uint64_t impl = t ? as_address(PyObject_GetAttrString(t, "_cdata")) : 0;
    const uint64_t fresh_impl = t ? as_address(PyObject_GetAttrString(fresh, "_cdata")) : 0;
    const uint64_t *words = (const uint64_t *)(uintptr_t)impl;
    const uint64_t *fresh_words = (const uint64_t *)(uintptr_t)fresh_impl;
    PyObject *wanted = NULL;
    if (words && fresh_words) {
        memcpy(before, fresh_words, sizeof before);
        wanted = PyObject_CallMethod(fresh, "requires_grad_", NULL);
    }
    if (wanted) {
        const uint64_t storage = as_number(call(of.storage_address, t), 0);
        now.impl = words_that_are((const uint64_t *)t, OBJECT_FIRST, OBJECT_WORDS, impl);
        now.storage = words_that_are(words, IMPL_FIRST, IMPL_WORDS, storage);
        now.offset = words_that_are(words, IMPL_FIRST, IMPL_WORDS, (uint64_t)offset);
        now.autograd = words_that_are(before, IMPL_FIRST, IMPL_WORDS, 0) &
                       ~words_that_are(fresh_words, IMPL_FIRST, IMPL_WORDS, 0);
    }
    always->impl &= now.impl;
    always->storage &= now.storage;
    always->offset &= now.offset;
    always->autograd &= now.autograd;
    Py_XDECREF(wanted);
    Py_XDECREF(t);
    Py_XDECREF(fresh);
    PyErr_Clear();
}

/* Finds the word of the TensorImpl in the Python object; and in the TensorImpl those of the
 * storage, the offset in it, and autograd's data. */
static void find_tensor_offsets(PyObject *torch)
{
    static const int offsets[] = { 4099, 1237, 77 };
    sightings always = { ~0ull, ~0ull, ~0ull, ~0ull };
    for (size_t k = 0; k < KOILA_COUNT(offsets); k++)
        look_into(torch, offsets[k], &always);
    at_impl = only_bit(always.impl);
    at_storage = only_bit(always.storage);
    at_offset = only_bit(always.offset);
    at_autograd = only_bit(always.autograd);
}

int koila__facts_prepare(PyObject *torch)
{
    if (koila__tensor_base)
        return 0;
    PyObject *c = PyObject_GetAttrString(torch, "_C");
    PyObject *base = c ? PyObject_GetAttrString(c, "TensorBase") : NULL;
    if (!base || !PyType_Check(base)) {
        Py_XDECREF(c);
        Py_XDECREF(base);
        return -1;
    }
    koila__tensor_base = (PyTypeObject *)base;
    static const struct {
        PyObject **at;
        const char *name;
    } attributes[] = {
        { &of.shape, "shape" },          { &of.dtype, "dtype" },
        { &of.device, "device" },        { &of.layout, "layout" },
        { &of.grad, "_grad" },           { &of.grad_fn, "grad_fn" },
        { &of.is_leaf, "is_leaf" },      { &of.retains_grad, "retains_grad" },
        { &of.is_nested, "is_nested" },  { &of.requires_grad, "requires_grad" },
        { &of.use_count, "_use_count" }, { &of.storage_offset, "storage_offset" },
        { &of.is_cpu, "is_cpu" },        { &of.untyped_storage, "untyped_storage" },
        { &of.indices, "_indices" },     { &of.values, "_values" },
        { &of.crow, "crow_indices" },    { &of.ccol, "ccol_indices" },
        { &of.col, "col_indices" },      { &of.row, "row_indices" },
        { &of.nested_values, "values" }, { &of.is_pinned, "is_pinned" },
    };
    for (size_t i = 0; i < KOILA_COUNT(attributes); i++)
        *attributes[i].at = base_attribute(attributes[i].name);
    if (!of.grad)
        of.grad = base_attribute("grad");
    of.storage_address = PyObject_GetAttrString(c, "_storage_address");
    of.has_storage = PyObject_GetAttrString(c, "_has_storage");
    of.strided = PyObject_GetAttrString(torch, "strided");
    Py_DECREF(c);
    PyErr_Clear();
    find_storage_offsets(torch);
    find_tensor_offsets(torch);
    return 0;
}

/* ---- type and storage */

bool koila__facts_is_plain(PyObject *t)
{
    PyTypeObject *type = Py_TYPE(t);
    return type == koila__tensor_base || type->tp_base == koila__tensor_base ||
           strcmp(type->tp_name, "Parameter") == 0 || strcmp(type->tp_name, "Buffer") == 0;
}

/* The words of a plain tensor's TensorImpl; NULL: read it through torch. */
static const uint64_t *words_of(PyObject *t)
{
    return at_impl && koila__facts_is_plain(t) ? ((const uint64_t *const *)t)[at_impl] : NULL;
}
/* Was a gradient of t never requested? Then it has none, and no grad_fn. */
static bool is_unknown_to_autograd(PyObject *t)
{
    const uint64_t *words = at_autograd ? words_of(t) : NULL;
    return words && !words[at_autograd];
}

bool koila__facts_is_on_cpu(PyObject *t) { return is_true(get(of.is_cpu, t)); }
PyObject *koila__facts_device(PyObject *t) { return get(of.device, t); }
PyObject *koila__facts_dtype(PyObject *t) { return get(of.dtype, t); }

PyObject *koila__facts_shape(PyObject *t, uint64_t *numel)
{
    PyObject *size = get(of.shape, t);
    PyObject *shape =
        size && PyTuple_Check(size) ? PyTuple_GetSlice(size, 0, PyTuple_GET_SIZE(size)) : NULL;
    if (size && !shape)
        shape = PySequence_Tuple(size);
    Py_XDECREF(size);
    PyErr_Clear();
    *numel = shape ? 1 : 0;
    if (!shape)
        return PyTuple_New(0);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++) {
        PyObject *n = PyTuple_GET_ITEM(shape, i);
        *numel *= PyLong_CheckExact(n) ? (uint64_t)PyLong_AsLongLong(n) : 0;
    }
    return shape;
}

/* Reads the StorageImpl itself. False: t has none. words: as words_of(), if they hold the
 * StorageImpl. */
static bool read_storage(PyObject *t, const uint64_t *words, koila__storage *s)
{
    const uint64_t address = words ? words[at_storage] : as_number(call(of.storage_address, t), 0);
    s->impl = (void *)(uintptr_t)address;
    if (!s->impl)
        return false;
    const int64_t n = ((const int64_t *)s->impl)[at_bytes];
    s->n_bytes = n < 0 ? 0 : (uint64_t)n; /* negative: a symbolic size, no bytes */
    s->data = ((const uintptr_t *)s->impl)[at_data];
    return true;
}
/* The same through torch's storage object. */
static bool ask_storage(PyObject *t, koila__storage *s)
{
    PyObject *storage = call(of.untyped_storage, t);
    if (!storage)
        return false;
    s->impl = (void *)(uintptr_t)as_number(PyObject_GetAttrString(storage, "_cdata"), 0);
    s->n_bytes = as_number(PyObject_CallMethod(storage, "nbytes", NULL), 0);
    s->data = (uintptr_t)as_number(PyObject_CallMethod(storage, "data_ptr", NULL), 0);
    PyErr_Clear();
    Py_DECREF(storage);
    return s->impl != NULL;
}

bool koila__facts_storage(PyObject *t, koila__storage *s)
{
    *s = (koila__storage){ 0 };
    const uint64_t *words = at_storage ? words_of(t) : NULL;
    if (!words && of.has_storage && !is_true(call(of.has_storage, t)))
        return false;
    bool readable = at_bytes && at_data && (words || of.storage_address);
    if (!(readable ? read_storage(t, words, s) : ask_storage(t, s)))
        return false;
    koila_assert(s->impl);
    if (!s->data)
        s->n_bytes = 0; /* meta, fake, wrappers: a size without memory */
    return true;
}

uint64_t koila__facts_offset(PyObject *t)
{
    const uint64_t *words = at_offset ? words_of(t) : NULL;
    return words ? words[at_offset] : as_number(call(of.storage_offset, t), 0);
}

/* Has a GPU been started? To ask whether an address is pinned would start one. */
static bool is_a_gpu_started(void)
{
    bool started = false;
    PyObject *c = PyImport_ImportModule("torch._C");
    for (int d = 1; c && !started && d < koila__memlab_meter.n_devices; d++) {
        PyObject *has = PyObject_CallMethod(c, "_cuda_hasPrimaryContext", "i", d - 1);
        started = is_true(has);
        PyErr_Clear();
    }
    Py_XDECREF(c);
    PyErr_Clear();
    return started;
}

koila__owner koila__facts_owner_of_unknown(PyObject *t)
{
    if (is_a_gpu_started() && is_true(call(of.is_pinned, t)))
        return KOILA__OWNER_BORROWED;
    PyObject *s = call(of.untyped_storage, t);
    if (!s)
        return KOILA__OWNER_BORROWED;
    PyObject *resizable = PyObject_CallMethod(s, "resizable", NULL);
    PyObject *shared = PyObject_CallMethod(s, "is_shared", NULL);
    PyErr_Clear();
    bool can = is_true(resizable);
    bool mapped = is_true(shared);
    Py_DECREF(s);
    return can && !mapped ? KOILA__OWNER_OLDER : KOILA__OWNER_BORROWED;
}

/* ---- parts */

void koila__parts_free(koila__parts *p)
{
    for (int i = 0; i < KOILA__PARTS; i++)
        Py_CLEAR(p->part[i]);
}

bool koila__facts_is_sparse(PyObject *t)
{
    PyObject *layout = get(of.layout, t);
    bool sparse = layout && of.strided && layout != of.strided;
    Py_XDECREF(layout);
    return sparse;
}

static bool starts(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}
/* Takes the parts of a sparse layout; none if the layout is unknown. */
static void take_parts(PyObject *t, const char *layout, koila__parts *p)
{
    if (strcmp(layout, "torch.sparse_coo") == 0) {
        p->name[0] = "indices";
        p->name[1] = "values";
        p->part[0] = call(of.indices, t);
        p->part[1] = call(of.values, t);
    } else if (starts(layout, "torch.sparse_")) {
        bool by_row = strstr(layout, "csr") || strstr(layout, "bsr");
        p->name[0] = by_row ? "crow_indices" : "ccol_indices";
        p->name[1] = by_row ? "col_indices" : "row_indices";
        p->name[2] = "values";
        p->part[0] = call(by_row ? of.crow : of.ccol, t);
        p->part[1] = call(by_row ? of.col : of.row, t);
        p->part[2] = call(of.nested_values, t);
    }
}
bool koila__facts_sparse_parts(PyObject *t, koila__parts *p)
{
    *p = (koila__parts){ 0 };
    PyObject *layout = get(of.layout, t);
    PyObject *text = layout ? PyObject_Str(layout) : NULL;
    const char *name = text ? PyUnicode_AsUTF8(text) : NULL;
    if (name)
        take_parts(t, name, p);
    Py_XDECREF(text);
    Py_XDECREF(layout);
    PyErr_Clear();
    if (p->part[0] || p->part[1])
        return true;
    koila__parts_free(p);
    return false;
}

bool koila__facts_is_nested(PyObject *t) { return is_true(get(of.is_nested, t)); }
bool koila__facts_nested_parts(PyObject *t, koila__parts *p)
{
    *p = (koila__parts){ .name = { "values", "offsets", NULL } };
    p->part[0] = call(of.nested_values, t);
    if (!p->part[0])
        return false;
    p->part[1] = PyObject_CallMethod(t, "_nested_tensor_storage_offsets", NULL);
    PyErr_Clear();
    return true;
}

int koila__facts_each_inner(PyObject *t, bool (*fn)(void *user, PyObject *key, PyObject *inner),
                            void *user)
{
    PyObject **at = _PyObject_GetDictPtr(t);
    PyObject *dict = at ? *at : NULL;
    PyObject *key;
    PyObject *value;
    Py_ssize_t position = 0;
    int n = 0;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *made = dict ? NULL : PyObject_GenericGetDict(t, NULL);
    if (!made)
        PyErr_Clear();
    if (made)
        dict = made;
#endif
    if (dict && PyDict_CheckExact(dict)) {
        PyObject *copy = PyDict_Copy(dict);
        while (copy && PyDict_Next(copy, &position, &key, &value))
            if (koila__facts_is_tensor(value) && PyUnicode_Check(key) && ++n &&
                !fn(user, key, value))
                break;
        Py_XDECREF(copy);
    }
#if PY_VERSION_HEX >= 0x030D0000
    Py_XDECREF(made);
#endif
    return n;
}

/* ---- gradients and owners */

PyObject *koila__facts_grad(PyObject *t)
{
    if (is_unknown_to_autograd(t))
        return NULL;
    bool leaf = !is_true(get(of.requires_grad, t)) || is_true(get(of.is_leaf, t));
    if (!leaf && !is_true(get(of.retains_grad, t)))
        return NULL;
    PyObject *g = get(of.grad, t);
    if (g && koila__facts_is_tensor(g))
        return g;
    Py_XDECREF(g);
    return NULL;
}

PyObject *koila__facts_grad_fn(PyObject *t)
{
    if (is_unknown_to_autograd(t) || !is_true(get(of.requires_grad, t)))
        return NULL;
    PyObject *node = get(of.grad_fn, t);
    if (node == Py_None)
        Py_CLEAR(node);
    return node;
}

bool koila__facts_only_cxx_owns(PyObject *t, Py_ssize_t ours, bool both_owners)
{
    if (!both_owners)
        return false;
    uint64_t owners = as_number(call(of.use_count, t), 1);
    return Py_REFCNT(t) - ours - (owners >= 2) <= 0;
}

/* ---- numbered names */

/* The number of t, if it has one, or NULL without an exception. */
static PyObject *known_number(PyObject *numbers, PyObject *id, PyObject *t)
{
    PyObject *entry = PyDict_GetItemWithError(numbers, id); // borrowed
    PyObject *alive = entry ? PyObject_CallNoArgs(PyTuple_GET_ITEM(entry, 0)) : NULL;
    PyObject *number = alive == t ? Py_NewRef(PyTuple_GET_ITEM(entry, 1)) : NULL;
    Py_XDECREF(alive);
    PyErr_Clear();
    return number;
}
/* The next number, which t has from now on; NULL with an exception set. */
static PyObject *next_number(PyObject *numbers, PyObject *id, PyObject *counter, PyObject *t)
{
    PyObject *number = Py_NewRef(PyList_GET_ITEM(counter, 0));
    PyObject *weak = PyWeakref_NewRef(t, NULL);
    PyObject *pair = weak ? PyTuple_Pack(2, weak, number) : NULL;
    bool ok = pair && PyDict_SetItem(numbers, id, pair) == 0;
    Py_XDECREF(pair);
    Py_XDECREF(weak);
    PyObject *next = ok ? PyLong_FromLong(PyLong_AsLong(number) + 1) : NULL;
    if (next)
        PyList_SetItem(counter, 0, next);
    else
        Py_CLEAR(number);
    return number;
}
PyObject *koila__facts_numbered_name(PyObject *numbers, PyObject *counter, PyObject *t)
{
    PyObject *id = PyLong_FromVoidPtr(t);
    if (!id)
        return NULL;
    PyObject *name = NULL;
    PyObject *number = known_number(numbers, id, t);
    if (!number)
        number = next_number(numbers, id, counter, t);
    if (number) {
        const char *type = Py_TYPE(t)->tp_name;
        const char *dot = strrchr(type, '.');
        char full[256];
        snprintf(full, sizeof full, "%.200s%ld", dot ? dot + 1 : type, PyLong_AsLong(number));
        name = PyUnicode_DecodeUTF8(full, (Py_ssize_t)strlen(full), "replace");
    }
    Py_XDECREF(number);
    Py_DECREF(id);
    return name;
}

bool koila__facts_forget_dead(PyObject *numbers)
{
    PyObject *key, *entry, *dead = PyList_New(0);
    Py_ssize_t position = 0;
    bool ok = dead != NULL;
    while (ok && PyDict_Next(numbers, &position, &key, &entry)) {
        PyObject *t = PyObject_CallNoArgs(PyTuple_GET_ITEM(entry, 0));
        ok = t && (t != Py_None || PyList_Append(dead, key) == 0);
        Py_XDECREF(t);
    }
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(dead); i++)
        ok = PyDict_DelItem(numbers, PyList_GET_ITEM(dead, i)) == 0;
    Py_XDECREF(dead);
    return ok;
}
