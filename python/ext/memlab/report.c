/* report.c — every tensor there is, under which name, and which storage it fills; and what only
 * autograd's graph holds.
 *
 *   1  find      all tensor objects the garbage collector knows, by type and not by isinstance (no
 *      foreign __class__ runs); after gc.freeze() also those reachable from modules and frames.
 *   2  name      the caller's roots first (parameters, buffers, optimizer states), each followed by
 *      its parts and its .grad; then the rest, oldest first, under numbers that stay with a live
 *      tensor and are never used again.
 *   3  graph     from every grad_fn along next_functions; each node's _raw_saved_* fields. A saved
 *      tensor with an unpack hook is not touched: reading it would run the user's hook, and re-run
 *      a checkpointed forward.
 * A storage belongs to the first row that shows it; later rows show 0 bytes. "Only autograd holds
 * it" is decided by who owns references, not by whether a Python object happens to exist, for
 * reading a saved tensor makes one that stays: since torch 2.10 a tensor object that C++ owns too
 * has one reference of C++'s; with none of Python's besides, it is C++'s alone.
 *
 * All attributes are read through torch's own descriptors of TensorBase, under DisableTorchFunction
 * (the caller's): overrides in subclasses are not run. Sizes and addresses of storages are read
 * from the StorageImpl itself, and of plain tensors the storage, the offset in it and whether
 * autograd knows them from the TensorImpl, at places found by experiment on storages and tensors we
 * know; if the experiment fails, through torch's slower objects.
 */
#include "memlab/memlab.h"

#include <frameobject.h>
#include <stdlib.h>

#include "base/text.h"
#include "ground/cpu_bytes.h"

/* ---- a set and a map of pointers: open addressing, 0 is empty, values are indices */

typedef struct ptrmap {
    struct {
        uintptr_t key;
        size_t value;
    } *slots;
    size_t n_slots, n;
} ptrmap;

static size_t ptrmap_home(const ptrmap *m, uintptr_t key)
{
    return ((key >> 4) * 0x9E3779B97F4A7C15u >> 24) & (m->n_slots - 1);
}
/* The slot of key, which may be empty. NULL: no memory. */
static size_t *ptrmap_put(ptrmap *m, const void *p, bool *added)
{
    uintptr_t key = (uintptr_t)p;
    if ((m->n + 1) * 2 > m->n_slots) {
        ptrmap wider = { .n_slots = m->n_slots ? m->n_slots * 2 : 1024, .n = m->n };
        wider.slots = calloc(wider.n_slots, sizeof *wider.slots);
        if (!wider.slots)
            return NULL;
        for (size_t i = 0; i < m->n_slots; i++) {
            if (!m->slots[i].key)
                continue;
            size_t k = ptrmap_home(&wider, m->slots[i].key);
            while (wider.slots[k].key)
                k = (k + 1) & (wider.n_slots - 1);
            wider.slots[k] = m->slots[i];
        }
        free(m->slots);
        *m = wider;
    }
    size_t k = ptrmap_home(m, key);
    while (m->slots[k].key && m->slots[k].key != key)
        k = (k + 1) & (m->n_slots - 1);
    *added = !m->slots[k].key;
    if (*added) {
        m->slots[k].key = key;
        m->slots[k].value = 0;
        m->n++;
    }
    return &m->slots[k].value;
}
static const size_t *ptrmap_get(const ptrmap *m, const void *p)
{
    if (!m->n)
        return NULL;
    size_t k = ptrmap_home(m, (uintptr_t)p);
    while (m->slots[k].key && m->slots[k].key != (uintptr_t)p)
        k = (k + 1) & (m->n_slots - 1);
    return m->slots[k].key ? &m->slots[k].value : NULL;
}
static void ptrmap_free(ptrmap *m) { free(m->slots); }

/* ---- torch's own descriptors, found once */

static PyTypeObject *tensor_base;
static struct {
    /* getters */
    PyObject *shape, *dtype, *device, *layout, *grad, *grad_fn, *is_leaf, *retains_grad, *is_nested,
        *requires_grad, *is_cpu;
    /* methods */
    PyObject *use_count, *storage_offset, *untyped_storage, *indices, *values, *crow, *ccol, *col,
        *row, *nested_values;
    PyObject *storage_address, *has_storage; /* functions of torch._C */
    PyObject *strided;
    /* names of a saved tensor's and a node's attributes */
    PyObject *unpack_hook, *data, *next_functions;
} of;
static long at_bytes, at_data; /* offsets in a StorageImpl; 0: unknown */
/* words: of a TensorImpl in the Python object, the others in a TensorImpl; 0: unknown */
static long at_impl, at_storage, at_offset, at_autograd;
static bool counts_both_owners; /* torch 2.10 and later: see the essay */

static PyObject *base_attribute(const char *name)
{
    PyObject *o = PyDict_GetItemString(tensor_base->tp_dict, name); // borrowed
    for (Py_ssize_t i = 0; !o && i < PyTuple_GET_SIZE(tensor_base->tp_mro); i++)
        o = PyDict_GetItemString(
            ((PyTypeObject *)PyTuple_GET_ITEM(tensor_base->tp_mro, i))->tp_dict, name);
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

/* Where a StorageImpl keeps its size and its address: the same two offsets must show them for
 * storages of three sizes. */
static void find_offsets(PyObject *torch)
{
    static const unsigned sizes[] = { 4099, 12345, 77 };
    uint64_t sees_bytes = ~0ull, sees_data = ~0ull; /* bit i: word i has always held it */
    for (size_t k = 0; k < KOILA_COUNT(sizes); k++) {
        PyObject *s = PyObject_CallMethod(torch, "UntypedStorage", "I", sizes[k]);
        PyObject *impl = s ? PyObject_GetAttrString(s, "_cdata") : NULL;
        PyObject *data = s ? PyObject_CallMethod(s, "data_ptr", NULL) : NULL;
        const uint64_t *words = impl ? PyLong_AsVoidPtr(impl) : NULL;
        uint64_t address = data ? (uint64_t)(uintptr_t)PyLong_AsVoidPtr(data) : 0;
        for (int i = 0; i < 64; i++) {
            /* a StorageImpl is larger than this in every version since 2.0 */
            bool inside = words && i < 10;
            if (!inside || words[i] != sizes[k])
                sees_bytes &= ~(1ull << i);
            if (!inside || words[i] != address)
                sees_data &= ~(1ull << i);
        }
        Py_XDECREF(data);
        Py_XDECREF(impl);
        Py_XDECREF(s);
        PyErr_Clear();
    }
    at_bytes = sees_bytes ? __builtin_ctzll(sees_bytes) : 0;
    at_data = sees_data ? __builtin_ctzll(sees_data) : 0;
}

static uint64_t as_address(PyObject *o)
{
    uint64_t v = o ? (uint64_t)(uintptr_t)PyLong_AsVoidPtr(o) : 0;
    Py_XDECREF(o);
    PyErr_Clear();
    return v;
}
static long only_bit(uint64_t bits)
{
    return bits && !(bits & (bits - 1)) ? __builtin_ctzll(bits) : 0;
}

/* The same for tensors: where the Python object keeps its TensorImpl, and that its storage, its
 * offset in it, and autograd's part of it. The last is the one word that is zero until somebody
 * asks for a gradient. */
static void find_tensor_offsets(PyObject *torch)
{
    static const int offsets[] = { 4099, 1237, 77 };
    /* words that are there in every version */
    uint64_t sees_impl = 0x7c, sees_storage = 0x1ffffe, sees_offset = 0x1ffffe,
             sees_autograd = 0x1ffffe;
    for (size_t k = 0; k < KOILA_COUNT(offsets); k++) {
        PyObject *fresh = PyObject_CallMethod(torch, "empty", "i", 5000);
        PyObject *t = fresh ? PyObject_CallMethod(fresh, "narrow", "iii", 0, offsets[k], 1) : NULL;
        uint64_t impl = t ? as_address(PyObject_GetAttrString(t, "_cdata")) : 0;
        uint64_t fresh_impl = t ? as_address(PyObject_GetAttrString(fresh, "_cdata")) : 0;
        uint64_t storage = t ? as_number(call(of.storage_address, t), 0) : 0;
        uint64_t before[21] = { 0 };
        const uint64_t *words = (const uint64_t *)(uintptr_t)impl;
        const uint64_t *fresh_words = (const uint64_t *)(uintptr_t)fresh_impl;
        if (fresh_words)
            memcpy(before, fresh_words, sizeof before);
        PyObject *wanted = fresh_words ? PyObject_CallMethod(fresh, "requires_grad_", NULL) : NULL;
        for (int i = 0; i < 21; i++) {
            if (!wanted || (i < 7 && ((const uint64_t *)t)[i] != impl))
                sees_impl &= ~(1ull << i);
            if (!wanted || words[i] != storage)
                sees_storage &= ~(1ull << i);
            if (!wanted || words[i] != (uint64_t)offsets[k])
                sees_offset &= ~(1ull << i);
            if (!wanted || before[i] || !fresh_words[i])
                sees_autograd &= ~(1ull << i);
        }
        Py_XDECREF(wanted);
        Py_XDECREF(t);
        Py_XDECREF(fresh);
        PyErr_Clear();
    }
    at_impl = only_bit(sees_impl);
    at_storage = only_bit(sees_storage);
    at_offset = only_bit(sees_offset);
    at_autograd = only_bit(sees_autograd);
}

static int prepare(PyObject *torch)
{
    if (tensor_base)
        return 0;
    PyObject *c = PyObject_GetAttrString(torch, "_C");
    PyObject *base = c ? PyObject_GetAttrString(c, "TensorBase") : NULL;
    if (!base || !PyType_Check(base)) {
        Py_XDECREF(c);
        Py_XDECREF(base);
        return -1;
    }
    tensor_base = (PyTypeObject *)base;
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
        { &of.nested_values, "values" },
    };
    for (size_t i = 0; i < KOILA_COUNT(attributes); i++)
        *attributes[i].at = base_attribute(attributes[i].name);
    if (!of.grad)
        of.grad = base_attribute("grad");
    of.storage_address = PyObject_GetAttrString(c, "_storage_address");
    of.has_storage = PyObject_GetAttrString(c, "_has_storage");
    of.strided = PyObject_GetAttrString(torch, "strided");
    of.unpack_hook = PyUnicode_InternFromString("unpack_hook");
    of.data = PyUnicode_InternFromString("data");
    of.next_functions = PyUnicode_InternFromString("next_functions");
    Py_DECREF(c);
    PyErr_Clear();
    find_offsets(torch);
    find_tensor_offsets(torch);
    return 0;
}

/* ---- 1: find */

static bool is_tensor(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    PyObject *mro = type->tp_flags & Py_TPFLAGS_HEAPTYPE ? type->tp_mro : NULL;
    for (Py_ssize_t i = 0; mro && i < PyTuple_GET_SIZE(mro); i++)
        if (PyTuple_GET_ITEM(mro, i) == (PyObject *)tensor_base)
            return true;
    return false;
}

typedef struct finding {
    PyObject *list;
    ptrmap seen;
    bool failed;
} finding;
static int add_tensor(finding *f, PyObject *o)
{
    bool added;
    if (!is_tensor(o))
        return 1;
    if (!ptrmap_put(&f->seen, o, &added) || (added && PyList_Append(f->list, o) < 0))
        f->failed = true;
    return !f->failed;
}

static bool add_generation(finding *f, PyObject *gc, int generation)
{
    PyObject *function = PyObject_GetAttrString(gc, "get_objects");
    PyObject *args = PyTuple_New(0);
    PyObject *kwargs = Py_BuildValue("{si}", "generation", generation);
    PyObject *all = function && args && kwargs ? PyObject_Call(function, args, kwargs) : NULL;
    for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(all); i++)
        add_tensor(f, PyList_GET_ITEM(all, i));
    bool ok = all != NULL;
    Py_XDECREF(all);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    Py_XDECREF(function);
    return ok;
}

#if PY_VERSION_HEX >= 0x030C0000
static int visit_heap(PyObject *o, void *f) { return add_tensor(f, o); }
#endif

/* Fewer are frozen than torch's own modules have: then it was before torch was imported, and no
 * tensor is among them. CPython 3.12.0 and .1 start with 375. */
enum { FROZEN_WITHOUT_TORCH = 20000 };
/* What gc.freeze() hid: everything that can be reached from the modules and the running frames. */
typedef struct reaching {
    ptrmap seen;
    PyObject **todo; /* owned references */
    size_t n, capacity;
    bool failed;
} reaching;
static int reach(PyObject *o, void *user)
{
    reaching *r = user;
    bool added;
    /* asyncio shows its free list: a reference to one of those, given up, would free it again */
    if (!o || Py_REFCNT(o) == 0 || !PyObject_IS_GC(o))
        return 0;
    if (!ptrmap_put(&r->seen, o, &added)) {
        r->failed = true;
        return 1;
    }
    if (!added)
        return 0;
    if (r->n == r->capacity) {
        size_t wider = r->capacity ? r->capacity * 2 : 4096;
        PyObject **todo = realloc(r->todo, wider * sizeof *todo);
        if (!todo) {
            r->failed = true;
            return 1;
        }
        r->todo = todo;
        r->capacity = wider;
    }
    r->todo[r->n++] = Py_NewRef(o);
    return 0;
}
static void add_reachable(finding *f)
{
    reaching r = { { NULL, 0, 0 }, NULL, 0, 0, false };
    reach(PyImport_GetModuleDict(), &r);
    PyObject *frames = PySys_GetObject("_current_frames");
    PyObject *all = frames ? PyObject_CallNoArgs(frames) : NULL;
    if (all)
        reach(all, &r);
    while (r.n && !r.failed) {
        PyObject *o = r.todo[--r.n];
        add_tensor(f, o);
        /* older frames, and the locals: a running frame does not traverse them */
        if (PyFrame_Check(o)) {
            PyFrameObject *back = PyFrame_GetBack((PyFrameObject *)o);
            PyObject *locals = PyObject_GetAttrString(o, "f_locals");
            PyObject *values = locals ? PyMapping_Values(locals) : NULL; /* from 3.13 on a proxy */
            if (back)
                reach((PyObject *)back, &r);
            for (Py_ssize_t i = 0; values && i < PyList_GET_SIZE(values); i++)
                reach(PyList_GET_ITEM(values, i), &r);
            Py_XDECREF(back);
            Py_XDECREF(values);
            Py_XDECREF(locals);
            PyErr_Clear();
        }
        traverseproc traverse = Py_TYPE(o)->tp_traverse;
        if (traverse)
            traverse(o, reach, &r);
        Py_DECREF(o);
    }
    while (r.n)
        Py_DECREF(r.todo[--r.n]);
    free(r.todo);
    ptrmap_free(&r.seen);
    Py_XDECREF(all);
    PyErr_Clear();
}

/* A list of all tensor objects, oldest first as far as the collector knows. */
static PyObject *find_all(void)
{
    finding f = { PyList_New(0), { NULL, 0, 0 }, false };
    PyObject *gc = f.list ? PyImport_ImportModule("gc") : NULL;
    if (!gc)
        goto end;
#if PY_VERSION_HEX >= 0x030C0000
    PyUnstable_GC_VisitObjects(visit_heap, &f);
    (void)add_generation;
#else
    for (int g = 2; g >= 0; g--)
        if (!add_generation(&f, gc, g))
            PyErr_Clear();
#endif
    if (as_number(PyObject_CallMethod(gc, "get_freeze_count", NULL), 0) > FROZEN_WITHOUT_TORCH)
        add_reachable(&f);
    Py_DECREF(gc);
    if (f.failed)
        Py_CLEAR(f.list);
    if (f.failed && !PyErr_Occurred())
        PyErr_NoMemory();
end:
    ptrmap_free(&f.seen);
    return f.list;
}

/* ---- 2: rows */

typedef struct span_of {
    uintptr_t from, to;
} span_of;

typedef struct walk {
    PyObject *rows;  /* list of tuples, see emit_row() */
    PyObject *names; /* names[i] of the i-th storage seen: the row it belongs to */
    /* tensors made by looking (parts, gradients): alive until the end, for their address is their
     * identity */
    PyObject *kept;
    ptrmap storages; /* StorageImpl -> index in names */
    ptrmap tensors;  /* tensor objects that have their rows, or will have as part of another */
    PyObject *devices, *dtypes; /* str of each, kept */
    PyObject *cpu;              /* "cpu" */
    PyObject *saved_names;      /* "MulBackward0.self" -> how often */
    span_of *borrowed;          /* sorted, disjoint */
    size_t n_borrowed, capacity;
    bool shared_saved; /* list saved tensors that share a listed storage too */
    /* end each row with its tensor: a strong reference, for the caller's moment */
    bool with_tensors;
} walk;

static PyObject *cached_str(PyObject *cache, PyObject *o)
{
    if (!o)
        return PyUnicode_FromString("?");
    PyObject *s = PyDict_GetItemWithError(cache, o); // borrowed
    if (s)
        return Py_NewRef(s);
    PyErr_Clear();
    s = PyObject_Str(o);
    if (s && PyDict_SetItem(cache, o, s) < 0)
        PyErr_Clear();
    return s;
}

/* How many of the bytes [from, to) are not yet covered by other borrowed storages; they are from
 * now on. */
static uint64_t cover(walk *w, uintptr_t from, uintptr_t to)
{
    size_t lo = 0;
    size_t hi = w->n_borrowed;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (w->borrowed[mid].to < from)
            lo = mid + 1;
        else
            hi = mid;
    }
    uint64_t fresh = to - from;
    size_t end = lo;
    span_of merged = { from, to };
    for (; end < w->n_borrowed && w->borrowed[end].from <= to; end++) {
        span_of s = w->borrowed[end];
        uintptr_t a = s.from > from ? s.from : from;
        uintptr_t b = s.to < to ? s.to : to;
        if (b > a)
            fresh -= b - a;
        if (s.from < merged.from)
            merged.from = s.from;
        if (s.to > merged.to)
            merged.to = s.to;
    }
    if (lo == end) {
        if (w->n_borrowed == w->capacity) {
            size_t wider = w->capacity ? w->capacity * 2 : 16;
            span_of *more = realloc(w->borrowed, wider * sizeof *more);
            if (!more)
                return fresh;
            w->borrowed = more;
            w->capacity = wider;
        }
        memmove(w->borrowed + lo + 1, w->borrowed + lo, (w->n_borrowed - lo) * sizeof *w->borrowed);
        w->n_borrowed++;
    } else {
        memmove(w->borrowed + lo + 1, w->borrowed + end,
                (w->n_borrowed - end) * sizeof *w->borrowed);
        w->n_borrowed -= end - lo - 1;
    }
    w->borrowed[lo] = merged;
    return fresh;
}

static bool is_plain(PyObject *t)
{
    PyTypeObject *type = Py_TYPE(t);
    return type == tensor_base || (type->tp_base == tensor_base) ||
           strcmp(type->tp_name, "Parameter") == 0 || strcmp(type->tp_name, "Buffer") == 0;
}

/* The TensorImpl's words of a plain tensor; NULL: to be asked through torch. */
static const uint64_t *words_of(PyObject *t)
{
    return at_impl && is_plain(t) ? ((const uint64_t *const *)t)[at_impl] : NULL;
}
/* Has nobody ever asked for t's gradient? Then it has none, and no grad_fn. */
static bool is_unknown_to_autograd(PyObject *t)
{
    const uint64_t *words = at_autograd ? words_of(t) : NULL;
    return words && !words[at_autograd];
}

/* Size, address and ownership of the storage of t. */
typedef struct storage_facts {
    void *impl;
    uint64_t n_bytes;
    uintptr_t data;
    const char *owner; /* "allocator", "older" (than the hook), "borrowed" */
} storage_facts;

static bool storage_of(PyObject *t, storage_facts *s)
{
    *s = (storage_facts){ .owner = "allocator" };
    const uint64_t *words = at_storage ? words_of(t) : NULL;
    if (!words && of.has_storage && !is_true(call(of.has_storage, t)))
        return false;
    PyObject *slow = NULL;
    if (at_bytes && at_data && (words || of.storage_address)) {
        s->impl = words ? (void *)(uintptr_t)words[at_storage]
                        : (void *)(uintptr_t)as_number(call(of.storage_address, t), 0);
        if (!s->impl)
            return false;
        int64_t n = ((const int64_t *)s->impl)[at_bytes];
        s->n_bytes = n < 0 ? 0 : (uint64_t)n; /* negative: a symbolic size, no bytes */
        s->data = ((const uintptr_t *)s->impl)[at_data];
    } else {
        slow = call(of.untyped_storage, t);
        if (!slow)
            return false;
        s->impl = (void *)(uintptr_t)as_number(PyObject_GetAttrString(slow, "_cdata"), 0);
        s->n_bytes = as_number(PyObject_CallMethod(slow, "nbytes", NULL), 0);
        s->data = (uintptr_t)as_number(PyObject_CallMethod(slow, "data_ptr", NULL), 0);
        PyErr_Clear();
        Py_DECREF(slow);
    }
    if (!s->data)
        s->n_bytes = 0; /* meta, fake, wrappers: a size without memory */
    return s->impl != NULL;
}

/* Who owns a CPU storage that our count does not know? */
static const char *owner_of(PyObject *t)
{
    PyObject *s = call(of.untyped_storage, t);
    if (!s)
        return "borrowed";
    PyObject *resizable = PyObject_CallMethod(s, "resizable", NULL);
    PyObject *shared = PyObject_CallMethod(s, "is_shared", NULL);
    PyErr_Clear();
    bool can = is_true(resizable);
    bool mapped = is_true(shared);
    Py_DECREF(s);
    return can && !mapped ? "older" : "borrowed";
}

static PyObject *shape_of(PyObject *t, uint64_t *numel)
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

/* One of the few words a row has; made once. */
static PyObject *word(const char *text)
{
    static const char *const texts[] = { "parameter", "buffer",    "grad",  "optimizer", "saved",
                                         "tensor",    "allocator", "older", "borrowed" };
    static PyObject *made[KOILA_COUNT(texts)];
    for (size_t i = 0; i < KOILA_COUNT(texts); i++) {
        if (strcmp(text, texts[i]) != 0)
            continue;
        if (!made[i])
            made[i] = PyUnicode_InternFromString(text);
        return Py_XNewRef(made[i]);
    }
    return PyUnicode_FromString(text);
}

/* (name, kind, shape, numel, dtype, device, bytes, storage_bytes, storage, data, offset, first,
 * owner): bytes are the storage's for its first row and 0 after; -1: opaque. first: name of the
 * storage's first row, None for itself. */
static bool emit_row(walk *w, PyObject *name, const char *kind, PyObject *t, bool opaque,
                     const storage_facts *s)
{
    uint64_t numel;
    bool on_cpu = is_true(get(of.is_cpu, t));
    PyObject *shape = shape_of(t, &numel);
    PyObject *device_object = on_cpu ? NULL : get(of.device, t);
    PyObject *dtype_object = get(of.dtype, t);
    PyObject *device = on_cpu ? Py_NewRef(w->cpu) : cached_str(w->devices, device_object);
    PyObject *dtype = cached_str(w->dtypes, dtype_object);
    PyObject *first = Py_NewRef(Py_None);
    long long n_bytes = opaque ? -1 : (long long)s->n_bytes;
    const char *owner = s->owner;
    uint64_t offset = 0;
    bool ok = shape && device && dtype;
    if (ok && !opaque && s->impl) {
        bool added;
        size_t *index = ptrmap_put(&w->storages, s->impl, &added);
        if (!index)
            ok = false;
        else if (added) {
            *index = (size_t)PyList_GET_SIZE(w->names);
            ok = PyList_Append(w->names, name) == 0;
            uint64_t n;
            if (n_bytes && on_cpu && !koila__cpu_bytes_find((void *)s->data, &n, NULL)) {
                owner = owner_of(t);
                if (*owner == 'b')
                    n_bytes = (long long)cover(w, s->data, s->data + s->n_bytes);
            }
        } else {
            Py_SETREF(first, Py_NewRef(PyList_GET_ITEM(w->names, (Py_ssize_t)*index)));
            n_bytes = 0;
        }
        const uint64_t *words = at_offset ? words_of(t) : NULL;
        if (s->n_bytes)
            offset = words ? words[at_offset] : as_number(call(of.storage_offset, t), 0);
    }
    PyObject *row = ok ? PyTuple_New(13 + w->with_tensors) : NULL;
    ok = row != NULL;
    if (ok) {
        PyObject *cells[] = { Py_NewRef(name),
                              word(kind),
                              Py_NewRef(shape),
                              PyLong_FromUnsignedLongLong(numel),
                              Py_NewRef(dtype),
                              Py_NewRef(device),
                              PyLong_FromLongLong(n_bytes),
                              PyLong_FromUnsignedLongLong(s->n_bytes),
                              PyLong_FromVoidPtr(s->impl),
                              PyLong_FromVoidPtr((void *)s->data),
                              PyLong_FromUnsignedLongLong(offset),
                              Py_NewRef(first),
                              word(owner),
                              w->with_tensors ? Py_NewRef(t) : NULL };
        for (Py_ssize_t i = 0; i < 13 + w->with_tensors; i++) {
            ok &= cells[i] != NULL;
            PyTuple_SET_ITEM(row, i, cells[i]);
        }
        ok = ok && PyList_Append(w->rows, row) == 0;
    }
    Py_XDECREF(row);
    Py_XDECREF(first);
    Py_XDECREF(dtype);
    Py_XDECREF(device);
    Py_XDECREF(dtype_object);
    Py_XDECREF(device_object);
    Py_XDECREF(shape);
    return ok;
}

static bool emit(walk *w, PyObject *name, const char *kind, PyObject *t);

static bool emit_part(walk *w, PyObject *name, const char *part, const char *kind, PyObject *t)
{
    if (!t)
        return true;
    PyObject *full = PyUnicode_FromFormat("%U.%s", name, part);
    bool ok = full && emit(w, full, kind, t);
    Py_XDECREF(full);
    return ok;
}

/* The tensors inside a wrapper: values of its instance dictionary, looked at directly. Calls fn for
 * each; counts them. */
static int each_inner(PyObject *t, bool (*fn)(void *user, PyObject *key, PyObject *inner),
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
            if (is_tensor(value) && PyUnicode_Check(key) && ++n && !fn(user, key, value))
                break;
        Py_XDECREF(copy);
    }
#if PY_VERSION_HEX >= 0x030D0000
    Py_XDECREF(made);
#endif
    return n;
}
typedef struct inner_request {
    walk *w;
    PyObject *name;
    const char *kind;
    bool ok;
} inner_request;
static bool emit_inner(void *user, PyObject *key, PyObject *inner)
{
    inner_request *r = user;
    const char *part = PyUnicode_AsUTF8(key);
    if (!part)
        PyErr_Clear();
    r->ok = !part || emit_part(r->w, r->name, part + (part[0] == '_'), r->kind, inner);
    return r->ok;
}
static bool note_inner(void *user, PyObject *key, PyObject *inner)
{
    bool added;
    return ptrmap_put(user, inner, &added) != NULL;
}

/* The gradient of t, where reading it warns nobody. */
static PyObject *grad_of(PyObject *t)
{
    if (is_unknown_to_autograd(t))
        return NULL;
    bool leaf = !is_true(get(of.requires_grad, t)) || is_true(get(of.is_leaf, t));
    if (!leaf && !is_true(get(of.retains_grad, t)))
        return NULL;
    PyObject *g = get(of.grad, t);
    if (g && is_tensor(g))
        return g;
    Py_XDECREF(g);
    return NULL;
}

/* The rows of one tensor: itself, or its parts; then its gradient. Once. */
static bool emit(walk *w, PyObject *name, const char *kind, PyObject *t)
{
    bool added, ok = true;
    size_t *state = ptrmap_put(&w->tensors, t, &added);
    if (!state) {
        PyErr_NoMemory();
        return false;
    }
    if (*state)
        return true;
    *state = 1;
    if (PyList_Append(w->kept, t) < 0)
        return false;
    if (Py_EnterRecursiveCall(" while listing the parts of a tensor"))
        return false;
    storage_facts s;
    bool has = storage_of(t, &s);
    PyObject *layout = get(of.layout, t);
    inner_request inner = { w, name, kind, true };
    if (layout && of.strided && layout != of.strided && !has) {
        PyObject *text = PyObject_Str(layout);
        const char *l = text ? PyUnicode_AsUTF8(text) : "";
        bool coo = l && strcmp(l, "torch.sparse_coo") == 0;
        bool compressed = l && strncmp(l, "torch.sparse_", 13) == 0;
        bool by_row = compressed && (strstr(l, "csr") || strstr(l, "bsr"));
        PyObject *parts[3] = { NULL, NULL, NULL };
        const char *names[3] = { coo      ? "indices"
                                 : by_row ? "crow_indices"
                                          : "ccol_indices",
                                 coo      ? "values"
                                 : by_row ? "col_indices"
                                          : "row_indices",
                                 "values" };
        if (coo || compressed) {
            parts[0] = call(coo ? of.indices : by_row ? of.crow : of.ccol, t);
            parts[1] = call(coo ? of.values : by_row ? of.col : of.row, t);
            parts[2] = coo ? NULL : call(of.nested_values, t);
        }
        if (parts[0] || parts[1]) {
            for (int i = 0; ok && i < 3; i++)
                ok = emit_part(w, name, names[i], kind, parts[i]);
        } else {
            ok = emit_row(w, name, kind, t, true, &s);
        }
        for (int i = 0; i < 3; i++)
            Py_XDECREF(parts[i]);
        Py_XDECREF(text);
    } else if (is_true(get(of.is_nested, t)) && has && is_plain(t)) {
        PyObject *values = call(of.nested_values, t);
        PyObject *offsets = PyObject_CallMethod(t, "_nested_tensor_storage_offsets", NULL);
        PyErr_Clear();
        ok = values ? emit_part(w, name, "values", kind, values) &&
                          emit_part(w, name, "offsets", kind, offsets)
                    : emit_row(w, name, kind, t, false, &s);
        Py_XDECREF(values);
        Py_XDECREF(offsets);
    } else if (!has) {
        int n = each_inner(t, emit_inner, &inner);
        ok = inner.ok && (n > 0 || emit_row(w, name, kind, t, true, &s));
    } else if (s.n_bytes == 0 && !is_plain(t)) {
        int n = each_inner(t, emit_inner, &inner);
        ok = inner.ok && (n > 0 || emit_row(w, name, kind, t, false, &s));
    } else {
        ok = emit_row(w, name, kind, t, false, &s);
    }
    Py_XDECREF(layout);
    PyObject *grad = ok ? grad_of(t) : NULL;
    if (grad)
        ok = emit_part(w, name, "grad", "grad", grad);
    Py_XDECREF(grad);
    Py_LeaveRecursiveCall();
    return ok;
}

/* Is C++ the only owner of this object? `ours`: references that we hold ourselves. */
static bool only_cxx_owns(PyObject *t, Py_ssize_t ours)
{
    if (!counts_both_owners)
        return false;
    uint64_t owners = as_number(call(of.use_count, t), 1);
    return Py_REFCNT(t) - ours - (owners >= 2) <= 0;
}

/* "Tensor7": numbers is {id: (weakref, n)}, counter a list with the next number. */
static PyObject *numbered(PyObject *numbers, PyObject *counter, PyObject *t)
{
    PyObject *id = PyLong_FromVoidPtr(t);
    PyObject *entry = id ? PyDict_GetItemWithError(numbers, id) : NULL; // entry borrowed
    PyObject *number = NULL, *name = NULL;
    if (entry && PyObject_CallNoArgs(PyTuple_GET_ITEM(entry, 0)) == t) {
        Py_DECREF(t); /* the reference the weakref gave */
        number = Py_NewRef(PyTuple_GET_ITEM(entry, 1));
    } else {
        PyErr_Clear();
        PyObject *weak = PyWeakref_NewRef(t, NULL);
        number = Py_NewRef(PyList_GET_ITEM(counter, 0));
        PyObject *pair = weak ? PyTuple_Pack(2, weak, number) : NULL;
        if (!pair || PyDict_SetItem(numbers, id, pair) < 0)
            Py_CLEAR(number);
        Py_XDECREF(pair);
        Py_XDECREF(weak);
        PyObject *next = number ? PyLong_FromLong(PyLong_AsLong(number) + 1) : NULL;
        if (next)
            PyList_SetItem(counter, 0, next);
        else
            Py_CLEAR(number);
    }
    if (number) {
        const char *type = Py_TYPE(t)->tp_name;
        const char *dot = strrchr(type, '.');
        char full[256];
        snprintf(full, sizeof full, "%.200s%ld", dot ? dot + 1 : type, PyLong_AsLong(number));
        name = PyUnicode_DecodeUTF8(full, (Py_ssize_t)strlen(full), "replace");
    }
    Py_XDECREF(number);
    Py_XDECREF(id);
    return name;
}

/* Forget the numbers of tensors that are dead. */
static bool forget_dead(PyObject *numbers)
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

/* ---- 3: the graph */

/* The names of the _raw_saved_ attributes of a node type: a tuple, kept in `cache` by type.
 * Borrowed. */
static PyObject *saved_fields(PyObject *cache, PyTypeObject *type)
{
    PyObject *fields = PyDict_GetItemWithError(cache, (PyObject *)type);
    if (fields || PyErr_Occurred())
        return fields;
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && type->tp_mro && i < PyTuple_GET_SIZE(type->tp_mro); i++) {
        PyObject *dict = ((PyTypeObject *)PyTuple_GET_ITEM(type->tp_mro, i))->tp_dict, *key, *value;
        Py_ssize_t position = 0;
        while (dict && PyDict_Next(dict, &position, &key, &value)) {
            const char *name = PyUnicode_Check(key) ? PyUnicode_AsUTF8(key) : NULL;
            if (name && strncmp(name, "_raw_saved_", 11) == 0 && PyList_Append(list, key) < 0)
                Py_CLEAR(list);
            if (!list)
                break;
        }
    }
    if (list && PyList_Sort(list) < 0)
        Py_CLEAR(list);
    fields = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    if (fields && PyDict_SetItem(cache, (PyObject *)type, fields) < 0)
        Py_CLEAR(fields);
    Py_XDECREF(fields); /* the cache holds it */
    return fields;
}

static bool emit_saved(walk *w, PyObject *node, const char *field, Py_ssize_t index,
                       PyObject *saved)
{
    PyObject *hook = PyObject_GetAttr(saved, of.unpack_hook);
    PyObject *t = NULL;
    if (hook == Py_None)
        t = PyObject_GetAttr(saved, of.data);
    Py_XDECREF(hook);
    PyErr_Clear();
    bool ok = true;
    storage_facts s;
    if (t && is_tensor(t) && storage_of(t, &s)) {
        bool listed = ptrmap_get(&w->storages, s.impl) != NULL;
        if (!listed || w->shared_saved) {
            const char *type = Py_TYPE(node)->tp_name;
            const char *dot = strrchr(type, '.');
            char full[256];
            int n_full =
                index < 0
                    ? snprintf(full, sizeof full, "%s.%s", dot ? dot + 1 : type, field)
                    : snprintf(full, sizeof full, "%s.%s[%zd]", dot ? dot + 1 : type, field, index);
            PyObject *name = PyUnicode_DecodeUTF8(
                full, n_full < (int)sizeof full ? n_full : (int)sizeof full - 1, "replace");
            PyObject *before =
                name ? PyDict_GetItemWithError(w->saved_names, name) : NULL; // borrowed
            long n = before ? PyLong_AsLong(before) + 1 : 1;
            PyObject *count = PyLong_FromLong(n);
            ok = name && count && PyDict_SetItem(w->saved_names, name, count) == 0;
            if (ok && n > 1) {
                char text[24];
                snprintf(text, sizeof text, "#%ld", n);
                PyObject *suffix = PyUnicode_FromString(text);
                Py_SETREF(name, suffix ? PyUnicode_Concat(name, suffix) : NULL);
                Py_XDECREF(suffix);
            }
            ok = ok && name && emit_row(w, name, "saved", t, false, &s);
            Py_XDECREF(count);
            Py_XDECREF(name);
        }
    }
    Py_XDECREF(t);
    return ok;
}

/* One node: what it saved. After backward the fields raise: freed. */
static bool visit_node(walk *w, PyObject *cache, PyObject *node)
{
    PyObject *fields = saved_fields(cache, Py_TYPE(node)); // borrowed from cache
    if (!fields)
        return !PyErr_Occurred();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields); i++) {
        PyObject *field = PyTuple_GET_ITEM(fields, i);
        PyObject *value = PyObject_GetAttr(node, field);
        const char *name = PyUnicode_AsUTF8(field) + 11;
        bool ok = true;
        if (value && PyTuple_Check(value)) {
            for (Py_ssize_t k = 0; ok && k < PyTuple_GET_SIZE(value); k++)
                ok = emit_saved(w, node, name, k, PyTuple_GET_ITEM(value, k));
        } else if (value && value != Py_None) {
            ok = emit_saved(w, node, name, -1, value);
        }
        Py_XDECREF(value);
        if (!ok)
            return false;
        PyErr_Clear();
    }
    return true;
}

/* Every node from the tensors' grad_fn on, breadth first. Wrappers are kept alive while walking:
 * their address is the node's identity. */
static bool walk_graph(walk *w, PyObject *tensors)
{
    PyObject *nodes = PyList_New(0);
    PyObject *cache = PyDict_New();
    ptrmap seen = { NULL, 0, 0 };
    bool ok = nodes && cache, added;
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *t = PyList_GET_ITEM(tensors, i), *node;
        if (is_unknown_to_autograd(t) || !is_true(get(of.requires_grad, t)))
            continue;
        node = get(of.grad_fn, t);
        if (node && node != Py_None)
            ok = ptrmap_put(&seen, node, &added) && (!added || PyList_Append(nodes, node) == 0);
        Py_XDECREF(node);
    }
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(nodes); i++) {
        PyObject *node = PyList_GET_ITEM(nodes, i);
        ok = visit_node(w, cache, node);
        PyObject *next = ok ? PyObject_GetAttr(node, of.next_functions) : NULL;
        for (Py_ssize_t k = 0; next && PyTuple_Check(next) && ok && k < PyTuple_GET_SIZE(next);
             k++) {
            PyObject *pair = PyTuple_GET_ITEM(next, k);
            PyObject *to = PyTuple_Check(pair) ? PyTuple_GET_ITEM(pair, 0) : Py_None;
            if (to != Py_None)
                ok = ptrmap_put(&seen, to, &added) && (!added || PyList_Append(nodes, to) == 0);
        }
        Py_XDECREF(next);
        PyErr_Clear();
    }
    Py_XDECREF(nodes);
    Py_XDECREF(cache);
    ptrmap_free(&seen);
    return ok;
}

/* ---- Python */

PyDoc_STRVAR(collect_doc, "collect(torch, roots, numbers, counter, shared_saved, both_owners, "
                          "with_tensors=False) -> rows\n\n"
                          "roots: [(name, kind, tensor)]; numbers: {}, counter: [0], both kept by "
                          "the caller between calls.\n"
                          "Rows: (name, kind, shape, numel, dtype, device, bytes, storage_bytes, "
                          "storage, data, offset, first, owner), and the\n"
                          "tensor if asked for.");
static PyObject *collect(PyObject *self, PyObject *args)
{
    PyObject *torch, *roots, *numbers, *counter;
    int shared_saved, both_owners, with_tensors = 0;
    if (!PyArg_ParseTuple(args, "OO!O!O!pp|p:collect", &torch, &PyList_Type, &roots, &PyDict_Type,
                          &numbers, &PyList_Type, &counter, &shared_saved, &both_owners,
                          &with_tensors) ||
        prepare(torch) < 0)
        return NULL;
    counts_both_owners = both_owners;
    /* a hundred thousand row tuples would set it off again and again */
    int collecting = PyGC_Disable();
    walk w = { .rows = PyList_New(0),
               .names = PyList_New(0),
               .kept = PyList_New(0),
               .devices = PyDict_New(),
               .dtypes = PyDict_New(),
               .saved_names = PyDict_New(),
               .cpu = PyUnicode_InternFromString("cpu"),
               .shared_saved = shared_saved,
               .with_tensors = with_tensors };
    PyObject *all = find_all();
    bool ok = w.rows && w.names && w.kept && w.devices && w.dtypes && w.saved_names && w.cpu &&
              all && forget_dead(numbers);
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(roots); i++) {
        PyObject *root = PyList_GET_ITEM(roots, i), *name, *t;
        const char *kind;
        ok = PyArg_ParseTuple(root, "UsO", &name, &kind, &t) &&
             (!is_tensor(t) || emit(&w, name, kind, t));
    }
    /* parts and gradients get their names from their owners: mark them before the rest is numbered
     */
    ptrmap owned = { NULL, 0, 0 };
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(all); i++) {
        PyObject *t = PyList_GET_ITEM(all, i);
        PyObject *grad = grad_of(t);
        bool added;
        if (grad && !ptrmap_put(&owned, grad, &added))
            ok = false;
        Py_XDECREF(grad);
        if (!is_plain(t))
            each_inner(t, note_inner, &owned);
    }
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(all); i++) {
        PyObject *t = PyList_GET_ITEM(all, i);
        const size_t *done = ptrmap_get(&w.tensors, t);
        if ((done && *done) || ptrmap_get(&owned, t) || only_cxx_owns(t, 1))
            continue;
        PyObject *name = numbered(numbers, counter, t);
        ok = name && emit(&w, name, "tensor", t);
        Py_XDECREF(name);
    }
    ptrmap_free(&owned);
    ok = ok && walk_graph(&w, all);
    Py_XDECREF(all);
    Py_XDECREF(w.kept);
    Py_XDECREF(w.names);
    Py_XDECREF(w.devices);
    Py_XDECREF(w.dtypes);
    Py_XDECREF(w.saved_names);
    Py_XDECREF(w.cpu);
    ptrmap_free(&w.storages);
    ptrmap_free(&w.tensors);
    free(w.borrowed);
    if (collecting)
        PyGC_Enable();
    if (!ok) {
        Py_CLEAR(w.rows);
        if (!PyErr_Occurred())
            PyErr_NoMemory();
    }
    return w.rows;
}

typedef struct loose_request {
    const ptrmap *found;
    uint64_t n_bytes, n_blocks;
} loose_request;
static bool add_loose(void *user, const void *p, uint64_t n, uint32_t tag)
{
    loose_request *r = user;
    if (ptrmap_get(r->found, p))
        return true;
    r->n_bytes += n;
    r->n_blocks++;
    return true;
}
/* What the rows of the CPU say, and what they leave out: (listed, older, borrowed, loose bytes,
 * loose blocks). */
static PyObject *cpu_books(PyObject *self, PyObject *rows)
{
    if (!PyList_Check(rows))
        return PyErr_Format(PyExc_TypeError, "cpu_books: expected a list of rows");
    ptrmap found = { NULL, 0, 0 };
    bool added, ok = true;
    uint64_t listed = 0, older = 0, borrowed = 0;
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        const void *p = PyLong_AsVoidPtr(PyTuple_GET_ITEM(row, 9));
        if (p)
            ok = ptrmap_put(&found, p, &added) != NULL;
        long long n = PyLong_AsLongLong(PyTuple_GET_ITEM(row, 6));
        if (n <= 0 || PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(row, 5), "cpu") != 0)
            continue;
        const char *owner = PyUnicode_AsUTF8(PyTuple_GET_ITEM(row, 12));
        if (owner && *owner == 'b')
            borrowed += (uint64_t)n;
        else
            listed += (uint64_t)n;
        if (owner && *owner == 'o')
            older += (uint64_t)n;
    }
    loose_request r = { &found, 0, 0 };
    if (ok)
        koila__cpu_bytes_each(add_loose, &r);
    ptrmap_free(&found);
    if (!ok)
        return PyErr_NoMemory();
    return Py_BuildValue("(KKKKK)", (unsigned long long)listed, (unsigned long long)older,
                         (unsigned long long)borrowed, (unsigned long long)r.n_bytes,
                         (unsigned long long)r.n_blocks);
}

/* The lines of a report for one device: "{:<40s}{:>20s}{:>10s}", its totals after them. rows: those
 * of the device. */
static PyObject *report_rows(PyObject *self, PyObject *args)
{
    PyObject *rows;
    int verbose;
    unsigned long long unit;
    if (!PyArg_ParseTuple(args, "O!pK:report_rows", &PyList_Type, &rows, &verbose, &unit))
        return NULL;
    koila__text out;
    koila__text_init(&out, NULL);
    uint64_t n_elements = 0, n_bytes = 0;
    PyObject *result = NULL;
    PyObject *empty = Py_BuildValue("(i)", 1);
    for (Py_ssize_t i = 0; empty && i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        PyObject *shape = PyTuple_GET_ITEM(row, 2);
        PyObject *first = PyTuple_GET_ITEM(row, 11);
        const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(row, 0));
        const char *first_name = verbose && first != Py_None ? PyUnicode_AsUTF8(first) : NULL;
        PyObject *shown = PyObject_Repr(PyTuple_GET_SIZE(shape) ? shape : empty);
        const char *size = shown ? PyUnicode_AsUTF8(shown) : NULL;
        if (!name || PyErr_Occurred()) {
            PyErr_Clear();
            name = name ? name : "?";
        }
        long long bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(row, 6));
        char buffer[32], full[512];
        if (bytes > 0)
            bytes = (long long)(((uint64_t)bytes + unit - 1) / unit * unit);
        if (first_name) {
            snprintf(full, sizeof full, "%s(->%s)", name, first_name);
            name = full;
        }
        koila__text_left(&out, name, 40);
        koila__text_right(&out, size ? size : "?", 20);
        koila__text_right(&out, bytes < 0 ? "-" : koila__size_text((double)bytes, buffer), 10);
        koila__text_puts(&out, "\n");
        n_elements += PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(row, 3));
        if (bytes > 0 &&
            PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(row, 12), "borrowed") != 0)
            n_bytes += (uint64_t)bytes;
        Py_XDECREF(shown);
        PyErr_Clear();
    }
    Py_XDECREF(empty);
    if (koila__text_ok(&out))
        result = Py_BuildValue(
            "(NKK)", PyUnicode_DecodeUTF8(out.s ? out.s : "", (Py_ssize_t)out.n, "replace"),
            (unsigned long long)n_elements, (unsigned long long)n_bytes);
    else
        PyErr_NoMemory();
    koila__text_deinit(&out);
    return result;
}

static PyObject *find_tensors(PyObject *self, PyObject *torch)
{
    return prepare(torch) < 0 ? NULL : find_all();
}

static PyObject *report_prepare(PyObject *self, PyObject *torch)
{
    if (prepare(torch) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "report_prepare", report_prepare, METH_O,
      "Find torch's descriptors and the layout of storages now." },
    { "collect", collect, METH_VARARGS, collect_doc },
    { "cpu_books", cpu_books, METH_O,
      "(listed, older, borrowed) bytes of these rows on the CPU; (bytes, blocks) that none of them "
      "stands on." },
    { "report_rows", report_rows, METH_VARARGS,
      "report_rows(rows, verbose, unit) -> (text, elements, bytes)." },
    { "find_tensors", find_tensors, METH_O,
      "find_tensors(torch) -> every tensor object, oldest first." },
    { NULL, NULL, 0, NULL },
};

int koila__report_add_module(PyObject *m) { return PyModule_AddFunctions(m, methods); }
