/* report.c — lists every tensor with its name and its storage, and the tensors that only autograd's
 * graph holds.
 *
 *   1  find      all tensor objects (find_tensors.c).
 *   2  name      the caller's roots first (parameters, buffers, optimizer states), each followed by
 *      its parts and its .grad; then the rest, oldest first, with numbers that a live tensor keeps
 *      and that are never reused.
 *   3  graph     from every grad_fn along next_functions; each node's _raw_saved_* fields. A saved
 *      tensor with an unpack hook is not read: that would run the user's hook, and re-run a
 *      checkpointed forward.
 * A storage belongs to the first row that shows it; later rows show 0 bytes. Whether only autograd
 * holds a tensor is decided by its references, not by the existence of a Python object, since
 * reading a saved tensor makes one that stays. From torch 2.10 on, C++ has one reference to a
 * tensor object that it owns; if Python has none, only C++ owns it. Such a tensor that no graph
 * shows comes last.
 */
#include "memlab/memlab.h"

#include "base/text.h"
#include "base/vec.h"
#include "ground/cpu_bytes.h"
#include "memlab/ptrmap.h"
#include "memlab/tensors.h"

/* The cells of a row. bytes: of the storage in its first row, 0 in later ones; -1: opaque. first:
 * the name of the storage's first row, None in that row itself. The tensor: only on request. */
enum {
    ROW_NAME,
    ROW_KIND,
    ROW_SHAPE,
    ROW_NUMEL,
    ROW_DTYPE,
    ROW_DEVICE,
    ROW_BYTES,
    ROW_STORAGE_BYTES,
    ROW_STORAGE,
    ROW_DATA,
    ROW_OFFSET,
    ROW_FIRST,
    ROW_OWNER,
    ROW_TENSOR,
    ROW_CELLS = ROW_TENSOR
};

/* ---- rows */

typedef struct span_of {
    uintptr_t from, to;
} span_of;

typedef struct walk {
    PyObject *rows;  /* list of tuples, see add_row() */
    PyObject *names; /* names[i]: the first row of the i-th storage */
    /* tensors that reading has made (parts, gradients): kept until the end, since their address
     * identifies them */
    PyObject *kept;
    koila__ptrmap storages;     /* StorageImpl -> index in names */
    koila__ptrmap tensors;      /* tensor objects with rows */
    koila__ptrmap owned;        /* tensor objects listed as part of another */
    PyObject *devices, *dtypes; /* str of each, kept */
    PyObject *cpu;              /* "cpu" */
    PyObject *saved_names;      /* "MulBackward0.self" -> number of uses */
    PyObject *saved_fields;     /* node type -> names of its _raw_saved_ attributes */
    VEC(span_of) borrowed;      /* sorted, disjoint */
    bool shared_saved;          /* also list saved tensors that share a listed storage */
    bool both_owners;           /* torch 2.10 and later: see the head of this file */
    /* end each row with its tensor, a strong reference */
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

/* The first borrowed span that ends at or after `from`. */
static uint32_t first_span(const walk *w, uintptr_t from)
{
    uint32_t lo = 0;
    uint32_t hi = w->borrowed.n;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (w->borrowed.at[mid].to < from)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The number of bytes in [from, to) that no borrowed storage covers yet. They are covered from now
 * on, unless there is no memory. */
static uint64_t cover(walk *w, uintptr_t from, uintptr_t to)
{
    const uint32_t lo = first_span(w, from);
    uint64_t fresh = to - from;
    uint32_t end = lo;
    span_of merged = { from, to };
    for (; end < w->borrowed.n && w->borrowed.at[end].from <= to; end++) {
        span_of s = w->borrowed.at[end];
        uintptr_t a = s.from > from ? s.from : from;
        uintptr_t b = s.to < to ? s.to : to;
        if (b > a)
            fresh -= b - a;
        if (s.from < merged.from)
            merged.from = s.from;
        if (s.to > merged.to)
            merged.to = s.to;
    }
    if (!koila__vec_reserve(&koila__libc, &w->borrowed, 1))
        return fresh;
    /* `merged` replaces the spans [lo, end), which it contains */
    span_of *at = w->borrowed.at;
    memmove(at + lo + 1, at + end, (w->borrowed.n - end) * sizeof *at);
    w->borrowed.n = w->borrowed.n - (end - lo) + 1;
    at[lo] = merged;
    koila_assert(fresh <= to - from);
    koila_assert(lo == 0 || at[lo - 1].to < merged.from);
    return fresh;
}

/* One of the few words in rows; each is made once. */
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

static const char *const owner_names[] = {
    [KOILA__OWNER_ALLOCATOR] = "allocator",
    [KOILA__OWNER_OLDER] = "older",
    [KOILA__OWNER_BORROWED] = "borrowed",
};

/* The cells of a row about its storage. */
typedef struct place {
    PyObject *first; /* borrowed from w->names, or None */
    long long n_bytes;
    uint64_t offset;
    koila__owner owner;
} place;

/* Fills the first row of a CPU storage whose allocation koila did not see. */
static void place_unknown(walk *w, PyObject *t, const koila__storage *s, place *p)
{
    p->owner = koila__facts_owner_of_unknown(t);
    if (p->owner == KOILA__OWNER_BORROWED)
        p->n_bytes = (long long)cover(w, s->data, s->data + s->n_bytes);
}

/* false: no memory. */
static bool place_of(walk *w, PyObject *name, PyObject *t, bool on_cpu, const koila__storage *s,
                     place *p)
{
    bool added;
    uint64_t n;
    uint64_t *index = koila__ptrmap_put(&w->storages, s->impl, &added);
    if (!index)
        return false;
    if (added) {
        *index = (uint64_t)PyList_GET_SIZE(w->names);
        if (PyList_Append(w->names, name) < 0)
            return false;
        if (p->n_bytes && on_cpu && !koila__cpu_bytes_find((const void *)s->data, &n, NULL))
            place_unknown(w, t, s, p);
    } else {
        koila_assert(*index < (uint64_t)PyList_GET_SIZE(w->names));
        p->first = PyList_GET_ITEM(w->names, (Py_ssize_t)*index);
        p->n_bytes = 0;
    }
    if (s->n_bytes)
        p->offset = koila__facts_offset(t);
    return true;
}

/* The str of t's device; NULL with an exception set. */
static PyObject *device_text(walk *w, PyObject *t, bool on_cpu)
{
    if (on_cpu)
        return Py_NewRef(w->cpu);
    PyObject *device = koila__facts_device(t);
    PyObject *text = cached_str(w->devices, device);
    Py_XDECREF(device);
    return text;
}
static PyObject *dtype_text(walk *w, PyObject *t)
{
    PyObject *dtype = koila__facts_dtype(t);
    PyObject *text = cached_str(w->dtypes, dtype);
    Py_XDECREF(dtype);
    return text;
}

/* Appends one row. False: an exception is set, or no memory. */
static bool add_row(walk *w, PyObject *name, const char *kind, PyObject *t, bool opaque,
                    const koila__storage *s)
{
    uint64_t numel;
    place p = { .first = Py_None, .n_bytes = opaque ? -1 : (long long)s->n_bytes };
    const bool on_cpu = koila__facts_is_on_cpu(t);
    if (!opaque && s->impl && !place_of(w, name, t, on_cpu, s, &p))
        return false;
    const Py_ssize_t n_cells = ROW_CELLS + w->with_tensors;
    PyObject *row = PyTuple_New(n_cells);
    if (!row)
        return false;
    PyObject *cells[] = {
        [ROW_NAME] = Py_NewRef(name),
        [ROW_KIND] = word(kind),
        [ROW_SHAPE] = koila__facts_shape(t, &numel),
        [ROW_DTYPE] = dtype_text(w, t),
        [ROW_DEVICE] = device_text(w, t, on_cpu),
        [ROW_BYTES] = PyLong_FromLongLong(p.n_bytes),
        [ROW_STORAGE_BYTES] = PyLong_FromUnsignedLongLong(s->n_bytes),
        [ROW_STORAGE] = PyLong_FromVoidPtr(s->impl),
        [ROW_DATA] = PyLong_FromVoidPtr((void *)s->data),
        [ROW_OFFSET] = PyLong_FromUnsignedLongLong(p.offset),
        [ROW_FIRST] = Py_NewRef(p.first),
        [ROW_OWNER] = word(owner_names[p.owner]),
        [ROW_TENSOR] = w->with_tensors ? Py_NewRef(t) : NULL,
    };
    cells[ROW_NUMEL] = PyLong_FromUnsignedLongLong(numel);
    bool ok = true;
    for (Py_ssize_t i = 0; i < n_cells; i++) {
        ok &= cells[i] != NULL;
        PyTuple_SET_ITEM(row, i, cells[i]);
    }
    ok = ok && PyList_Append(w->rows, row) == 0;
    Py_DECREF(row);
    return ok;
}

static bool add_tensor(walk *w, PyObject *name, const char *kind, PyObject *t);

/* Adds the rows of "name.part"; t may be NULL. */
static bool add_part(walk *w, PyObject *name, const char *part, const char *kind, PyObject *t)
{
    if (!t)
        return true;
    PyObject *full = PyUnicode_FromFormat("%U.%s", name, part);
    bool ok = full && add_tensor(w, full, kind, t);
    Py_XDECREF(full);
    return ok;
}
static bool add_parts(walk *w, PyObject *name, const char *kind, koila__parts *parts)
{
    bool ok = true;
    for (int i = 0; ok && i < KOILA__PARTS; i++)
        ok = add_part(w, name, parts->name[i], kind, parts->part[i]);
    koila__parts_free(parts);
    return ok;
}

typedef struct inner_request {
    walk *w;
    PyObject *name;
    const char *kind;
    bool ok;
} inner_request;
static bool add_inner(void *user, PyObject *key, PyObject *inner)
{
    inner_request *r = user;
    const char *part = PyUnicode_AsUTF8(key);
    if (!part)
        PyErr_Clear();
    r->ok = !part || add_part(r->w, r->name, part + (part[0] == '_'), r->kind, inner);
    return r->ok;
}
/* Adds the tensors inside a wrapper, or a row for the wrapper itself if there are none. */
static bool add_wrapper(walk *w, PyObject *name, const char *kind, PyObject *t, bool opaque,
                        const koila__storage *s)
{
    inner_request inner = { w, name, kind, true };
    int n = koila__facts_each_inner(t, add_inner, &inner);
    return inner.ok && (n > 0 || add_row(w, name, kind, t, opaque, s));
}

/* Adds the row of t, or those of its parts. */
static bool add_itself(walk *w, PyObject *name, const char *kind, PyObject *t)
{
    koila__storage s;
    koila__parts parts;
    const bool has = koila__facts_storage(t, &s);
    const bool plain = koila__facts_is_plain(t);
    if (!has && koila__facts_is_sparse(t)) {
        if (koila__facts_sparse_parts(t, &parts))
            return add_parts(w, name, kind, &parts);
        return add_row(w, name, kind, t, true, &s);
    }
    if (!has)
        return add_wrapper(w, name, kind, t, true, &s);
    if (plain && koila__facts_is_nested(t) && koila__facts_nested_parts(t, &parts))
        return add_parts(w, name, kind, &parts);
    if (!plain && s.n_bytes == 0)
        return add_wrapper(w, name, kind, t, false, &s);
    return add_row(w, name, kind, t, false, &s);
}

/* Adds the rows of one tensor, unless it has them: itself or its parts, then its gradient. */
static bool add_tensor(walk *w, PyObject *name, const char *kind, PyObject *t)
{
    bool added;
    if (!koila__ptrmap_put(&w->tensors, t, &added))
        return false;
    if (!added)
        return true;
    if (PyList_Append(w->kept, t) < 0)
        return false;
    if (Py_EnterRecursiveCall(" while listing the parts of a tensor"))
        return false;
    bool ok = add_itself(w, name, kind, t);
    PyObject *grad = ok ? koila__facts_grad(t) : NULL;
    if (grad)
        ok = add_part(w, name, "grad", "grad", grad);
    Py_XDECREF(grad);
    Py_LeaveRecursiveCall();
    return ok;
}

/* ---- the graph */

#define SAVED_PREFIX "_raw_saved_"
enum { SAVED_PREFIX_LENGTH = sizeof SAVED_PREFIX - 1 };

/* Names of a saved tensor's and a node's attributes, interned; kept for good. */
static struct {
    PyObject *unpack_hook, *data, *next_functions;
} name_of;
static bool prepare_names(void)
{
    if (!name_of.unpack_hook)
        name_of.unpack_hook = PyUnicode_InternFromString("unpack_hook");
    if (!name_of.data)
        name_of.data = PyUnicode_InternFromString("data");
    if (!name_of.next_functions)
        name_of.next_functions = PyUnicode_InternFromString("next_functions");
    return name_of.unpack_hook && name_of.data && name_of.next_functions;
}

/* Appends the names in `dict` that begin with SAVED_PREFIX. */
static bool add_saved_names(PyObject *list, PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (dict && PyDict_Next(dict, &position, &key, &value)) {
        const char *name = PyUnicode_Check(key) ? PyUnicode_AsUTF8(key) : NULL;
        if (name && strncmp(name, SAVED_PREFIX, SAVED_PREFIX_LENGTH) == 0 &&
            PyList_Append(list, key) < 0)
            return false;
    }
    return true;
}
/* The names of the _raw_saved_ attributes of a node type: a tuple, kept in `cache` by type.
 * Borrowed; NULL with an exception set. */
static PyObject *saved_fields(PyObject *cache, PyTypeObject *type)
{
    PyObject *fields = PyDict_GetItemWithError(cache, (PyObject *)type);
    if (fields || PyErr_Occurred())
        return fields;
    PyObject *list = PyList_New(0);
    bool ok = list != NULL;
    for (Py_ssize_t i = 0; ok && type->tp_mro && i < PyTuple_GET_SIZE(type->tp_mro); i++)
        ok = add_saved_names(list, ((PyTypeObject *)PyTuple_GET_ITEM(type->tp_mro, i))->tp_dict);
    if (ok && PyList_Sort(list) == 0)
        fields = PyList_AsTuple(list);
    Py_XDECREF(list);
    if (fields && PyDict_SetItem(cache, (PyObject *)type, fields) < 0)
        Py_CLEAR(fields);
    Py_XDECREF(fields); /* the cache holds it */
    return fields;
}

/* "MulBackward0.self", with "[index]" unless index < 0, and "#2" when it is the second of this
 * name. */
static PyObject *saved_name(walk *w, PyObject *node, const char *field, Py_ssize_t index)
{
    const char *type = Py_TYPE(node)->tp_name;
    const char *dot = strrchr(type, '.');
    char full[256], subscript[32] = "";
    if (index >= 0)
        snprintf(subscript, sizeof subscript, "[%zd]", index);
    snprintf(full, sizeof full, "%s.%s%s", dot ? dot + 1 : type, field, subscript);
    PyObject *name = PyUnicode_DecodeUTF8(full, (Py_ssize_t)strlen(full), "replace");
    if (!name)
        return NULL;
    PyObject *before = PyDict_GetItemWithError(w->saved_names, name); // borrowed
    long n = before ? PyLong_AsLong(before) + 1 : 1;
    PyObject *count = PyLong_FromLong(n);
    if (!count || PyDict_SetItem(w->saved_names, name, count) < 0)
        Py_CLEAR(name);
    Py_XDECREF(count);
    if (name && n > 1)
        Py_SETREF(name, PyUnicode_FromFormat("%U#%ld", name, n));
    return name;
}

/* The tensor that a SavedTensor holds; NULL, without an exception, if it holds none or has an
 * unpack hook. */
static PyObject *saved_tensor(PyObject *saved)
{
    PyObject *hook = PyObject_GetAttr(saved, name_of.unpack_hook);
    PyObject *t = hook == Py_None ? PyObject_GetAttr(saved, name_of.data) : NULL;
    Py_XDECREF(hook);
    PyErr_Clear();
    if (t && !koila__facts_is_tensor(t))
        Py_CLEAR(t);
    return t;
}

static bool add_saved(walk *w, PyObject *node, const char *field, Py_ssize_t index, PyObject *saved)
{
    PyObject *t = saved_tensor(saved);
    bool ok = true;
    koila__storage s;
    if (t && koila__facts_storage(t, &s) &&
        (w->shared_saved || !koila__ptrmap_get(&w->storages, s.impl))) {
        PyObject *name = saved_name(w, node, field, index);
        ok = name && add_row(w, name, "saved", t, false, &s);
        Py_XDECREF(name);
    }
    Py_XDECREF(t);
    return ok;
}

/* Adds the tensors that a node saved. After backward they are freed, and reading a field raises. */
static bool visit_node(walk *w, PyObject *node)
{
    PyObject *fields = saved_fields(w->saved_fields, Py_TYPE(node)); // borrowed from the cache
    if (!fields)
        return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields); i++) {
        PyObject *field = PyTuple_GET_ITEM(fields, i);
        PyObject *value = PyObject_GetAttr(node, field);
        const char *name = PyUnicode_AsUTF8(field) + SAVED_PREFIX_LENGTH;
        bool ok = true;
        if (value && PyTuple_Check(value)) {
            for (Py_ssize_t k = 0; ok && k < PyTuple_GET_SIZE(value); k++)
                ok = add_saved(w, node, name, k, PyTuple_GET_ITEM(value, k));
        } else if (value && value != Py_None) {
            ok = add_saved(w, node, name, -1, value);
        }
        Py_XDECREF(value);
        if (!ok)
            return false;
        PyErr_Clear();
    }
    return true;
}

/* Appends a node to the list unless it is there. */
static bool add_node(koila__ptrmap *seen, PyObject *nodes, PyObject *node)
{
    bool added;
    return koila__ptrmap_put(seen, node, &added) && (!added || PyList_Append(nodes, node) == 0);
}
static bool add_next_nodes(koila__ptrmap *seen, PyObject *nodes, PyObject *node)
{
    PyObject *next = PyObject_GetAttr(node, name_of.next_functions);
    bool ok = true;
    Py_ssize_t n = next && PyTuple_Check(next) ? PyTuple_GET_SIZE(next) : 0;
    for (Py_ssize_t i = 0; ok && i < n; i++) {
        PyObject *pair = PyTuple_GET_ITEM(next, i);
        PyObject *to = PyTuple_Check(pair) ? PyTuple_GET_ITEM(pair, 0) : Py_None;
        if (to != Py_None)
            ok = add_node(seen, nodes, to);
    }
    Py_XDECREF(next);
    if (ok)
        PyErr_Clear();
    return ok;
}

/* Visits every node from the tensors' grad_fn on, breadth first. Wrappers are kept alive meanwhile,
 * since their address identifies the node. */
static bool walk_graph(walk *w, PyObject *tensors)
{
    PyObject *nodes = PyList_New(0);
    koila__ptrmap seen = { 0 };
    bool ok = nodes && prepare_names();
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *node = koila__facts_grad_fn(PyList_GET_ITEM(tensors, i));
        ok = !node || add_node(&seen, nodes, node);
        Py_XDECREF(node);
    }
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(nodes); i++) {
        PyObject *node = PyList_GET_ITEM(nodes, i);
        ok = visit_node(w, node) && add_next_nodes(&seen, nodes, node);
    }
    Py_XDECREF(nodes);
    koila__ptrmap_free(&seen);
    return ok;
}

/* ---- all rows */

static bool walk_init(walk *w)
{
    w->rows = PyList_New(0);
    w->names = PyList_New(0);
    w->kept = PyList_New(0);
    w->devices = PyDict_New();
    w->dtypes = PyDict_New();
    w->saved_names = PyDict_New();
    w->saved_fields = PyDict_New();
    w->cpu = PyUnicode_InternFromString("cpu");
    return w->rows && w->names && w->kept && w->devices && w->dtypes && w->saved_names &&
           w->saved_fields && w->cpu;
}
/* Releases everything except the rows. */
static void walk_deinit(walk *w)
{
    Py_XDECREF(w->kept);
    Py_XDECREF(w->names);
    Py_XDECREF(w->devices);
    Py_XDECREF(w->dtypes);
    Py_XDECREF(w->saved_names);
    Py_XDECREF(w->saved_fields);
    Py_XDECREF(w->cpu);
    koila__ptrmap_free(&w->storages);
    koila__ptrmap_free(&w->tensors);
    koila__ptrmap_free(&w->owned);
    koila__vec_free(&koila__libc, &w->borrowed);
}

/* roots: [(name, kind, tensor)] */
static bool add_roots(walk *w, PyObject *roots)
{
    bool ok = true;
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(roots); i++) {
        PyObject *name, *t;
        const char *kind;
        ok = PyArg_ParseTuple(PyList_GET_ITEM(roots, i), "UsO", &name, &kind, &t) &&
             (!koila__facts_is_tensor(t) || add_tensor(w, name, kind, t));
    }
    return ok;
}

static bool note_inner(void *user, PyObject *key, PyObject *inner)
{
    bool added;
    return koila__ptrmap_put(user, inner, &added) != NULL;
}
/* Parts and gradients are named after their owners, so they are marked before the rest is
 * numbered. */
static bool mark_owned(walk *w, PyObject *tensors)
{
    bool ok = true, added;
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *t = PyList_GET_ITEM(tensors, i);
        PyObject *grad = koila__facts_grad(t);
        ok = !grad || koila__ptrmap_put(&w->owned, grad, &added);
        Py_XDECREF(grad);
        if (!koila__facts_is_plain(t))
            koila__facts_each_inner(t, note_inner, &w->owned);
    }
    return ok;
}

/* Adds the tensors that have no rows yet and are not part of another, with numbers as names; not
 * those that only C++ owns. */
static bool add_rest(walk *w, PyObject *tensors, PyObject *numbers, PyObject *counter)
{
    bool ok = true;
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *t = PyList_GET_ITEM(tensors, i);
        if (koila__ptrmap_get(&w->tensors, t) || koila__ptrmap_get(&w->owned, t) ||
            koila__facts_only_cxx_owns(t, 1, w->both_owners))
            continue;
        PyObject *name = koila__facts_numbered_name(numbers, counter, t);
        ok = name && add_tensor(w, name, "tensor", t);
        Py_XDECREF(name);
    }
    return ok;
}

/* Adds, with numbers as names, the tensors that only C++ owns and that no node of a graph shows:
 * torch's checkpoint() keeps its inputs in saved tensors of its own. post: no storage with bytes
 * that a tensor of `tensors` has is without a row. */
static bool add_unseen(walk *w, PyObject *tensors, PyObject *numbers, PyObject *counter)
{
    bool ok = true;
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *t = PyList_GET_ITEM(tensors, i);
        koila__storage s;
        if (koila__ptrmap_get(&w->tensors, t) || koila__ptrmap_get(&w->owned, t) ||
            !koila__facts_storage(t, &s) || !s.n_bytes || koila__ptrmap_get(&w->storages, s.impl))
            continue;
        PyObject *name = koila__facts_numbered_name(numbers, counter, t);
        ok = name && add_tensor(w, name, "tensor", t);
        Py_XDECREF(name);
    }
    return ok;
}

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
        koila__facts_prepare(torch) < 0)
        return NULL;
    /* a hundred thousand row tuples would start many collections */
    int collecting = PyGC_Disable();
    walk w = { .shared_saved = shared_saved,
               .both_owners = both_owners,
               .with_tensors = with_tensors };
    bool ok = walk_init(&w);
    PyObject *all = koila__find_tensors();
    ok = ok && all && koila__facts_forget_dead(numbers) && add_roots(&w, roots) &&
         mark_owned(&w, all) && add_rest(&w, all, numbers, counter) && walk_graph(&w, all) &&
         add_unseen(&w, all, numbers, counter);
    Py_XDECREF(all);
    walk_deinit(&w);
    if (collecting)
        PyGC_Enable();
    if (!ok) {
        Py_CLEAR(w.rows);
        if (!PyErr_Occurred())
            PyErr_NoMemory();
    }
    return w.rows;
}

/* ---- sums over rows */

typedef struct loose_request {
    const koila__ptrmap *found;
    uint64_t n_bytes, n_blocks;
} loose_request;
static bool add_loose(void *user, const void *p, uint64_t n, uint32_t tag)
{
    loose_request *r = user;
    if (koila__ptrmap_get(r->found, p))
        return true;
    r->n_bytes += n;
    r->n_blocks++;
    return true;
}
static bool is_text(PyObject *row, int cell, const char *text)
{
    return PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(row, cell), text) == 0;
}
/* Sums over the rows of the CPU, and the counted blocks without a row: (listed, older, borrowed,
 * loose bytes, loose blocks). */
static PyObject *cpu_books(PyObject *self, PyObject *rows)
{
    if (!PyList_Check(rows))
        return PyErr_Format(PyExc_TypeError, "cpu_books: expected a list of rows");
    koila__ptrmap found = { 0 };
    bool added, ok = true;
    uint64_t listed = 0, older = 0, borrowed = 0;
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        const void *p = PyLong_AsVoidPtr(PyTuple_GET_ITEM(row, ROW_DATA));
        if (p)
            ok = koila__ptrmap_put(&found, p, &added) != NULL;
        long long n = PyLong_AsLongLong(PyTuple_GET_ITEM(row, ROW_BYTES));
        if (n <= 0 || !is_text(row, ROW_DEVICE, "cpu"))
            continue;
        bool is_borrowed = is_text(row, ROW_OWNER, owner_names[KOILA__OWNER_BORROWED]);
        *(is_borrowed ? &borrowed : &listed) += (uint64_t)n;
        if (is_text(row, ROW_OWNER, owner_names[KOILA__OWNER_OLDER]))
            older += (uint64_t)n;
    }
    loose_request r = { &found, 0, 0 };
    if (ok)
        koila__cpu_bytes_each(add_loose, &r);
    koila__ptrmap_free(&found);
    if (!ok)
        return PyErr_NoMemory();
    return Py_BuildValue("(KKKKK)", (unsigned long long)listed, (unsigned long long)older,
                         (unsigned long long)borrowed, (unsigned long long)r.n_bytes,
                         (unsigned long long)r.n_blocks);
}

/* ---- text */

enum { NAME_COLUMNS = 40, SHAPE_COLUMNS = 20, SIZE_COLUMNS = 10 };

/* The text of a cell, or `otherwise` if it has none. */
static const char *text_of(PyObject *o, const char *otherwise)
{
    const char *text = o ? PyUnicode_AsUTF8(o) : NULL;
    if (!text)
        PyErr_Clear();
    return text ? text : otherwise;
}
/* The bytes of a row in whole units; -1: opaque. */
static long long shown_bytes(PyObject *row, uint64_t unit)
{
    long long n = PyLong_AsLongLong(PyTuple_GET_ITEM(row, ROW_BYTES));
    return n > 0 ? (long long)(((uint64_t)n + unit - 1) / unit * unit) : n;
}
/* One line of a report. no_shape: the text for the shape (). */
static void write_row(koila__text *out, PyObject *row, bool verbose, PyObject *no_shape,
                      long long bytes)
{
    PyObject *shape = PyTuple_GET_ITEM(row, ROW_SHAPE);
    PyObject *first = PyTuple_GET_ITEM(row, ROW_FIRST);
    PyObject *shown = PyObject_Repr(PyTuple_GET_SIZE(shape) ? shape : no_shape);
    const char *name = text_of(PyTuple_GET_ITEM(row, ROW_NAME), "?");
    const char *first_name = verbose && first != Py_None ? text_of(first, NULL) : NULL;
    char buffer[32], full[512];
    if (first_name) {
        snprintf(full, sizeof full, "%s(->%s)", name, first_name);
        name = full;
    }
    koila__text_left(out, name, NAME_COLUMNS);
    koila__text_right(out, text_of(shown, "?"), SHAPE_COLUMNS);
    koila__text_right(out, bytes < 0 ? "-" : koila__size_text((double)bytes, buffer), SIZE_COLUMNS);
    koila__text_puts(out, "\n");
    Py_XDECREF(shown);
    PyErr_Clear();
}
/* The lines of a report for one device, and their totals: (text, elements, bytes). rows: those of
 * the device. */
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
    PyObject *no_shape = Py_BuildValue("(i)", 1);
    for (Py_ssize_t i = 0; no_shape && i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        const long long bytes = shown_bytes(row, unit);
        write_row(&out, row, verbose, no_shape, bytes);
        n_elements += PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(row, ROW_NUMEL));
        if (bytes > 0 && !is_text(row, ROW_OWNER, owner_names[KOILA__OWNER_BORROWED]))
            n_bytes += (uint64_t)bytes;
        PyErr_Clear();
    }
    if (no_shape && koila__text_ok(&out))
        result = Py_BuildValue(
            "(NKK)", PyUnicode_DecodeUTF8(out.s ? out.s : "", (Py_ssize_t)out.n, "replace"),
            (unsigned long long)n_elements, (unsigned long long)n_bytes);
    else
        PyErr_NoMemory();
    Py_XDECREF(no_shape);
    koila__text_deinit(&out);
    return result;
}

/* Reads a number of Python, NumPy and the like. False: not a number; a symbolic size has a
 * `node`. */
static bool as_size(PyObject *size, double *out)
{
    bool exact = PyFloat_CheckExact(size) || PyLong_CheckExact(size);
    bool number = exact || (PyNumber_Check(size) && !PyObject_HasAttrString(size, "node"));
    PyObject *real = number ? PyNumber_Float(size) : NULL;
    if (real)
        *out = PyFloat_AsDouble(real);
    Py_XDECREF(real);
    PyErr_Clear();
    return real != NULL;
}
static PyObject *size_text(PyObject *self, PyObject *size)
{
    char buffer[32];
    double v;
    if (size == Py_None)
        return PyUnicode_FromString("");
    if (!as_size(size, &v))
        return PyObject_Str(size);
    return PyUnicode_FromString(koila__size_text(v, buffer));
}

/* ---- Python */

static PyObject *report_prepare(PyObject *self, PyObject *torch)
{
    if (koila__facts_prepare(torch) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "report_prepare", report_prepare, METH_O,
      "Find torch's descriptors and the layout of storages now." },
    { "collect", collect, METH_VARARGS, collect_doc },
    { "cpu_books", cpu_books, METH_O,
      "(listed, older, borrowed) bytes of these rows on the CPU; (bytes, blocks) without a row." },
    { "report_rows", report_rows, METH_VARARGS,
      "report_rows(rows, verbose, unit) -> (text, elements, bytes)." },
    { "size_text", size_text, METH_O, "'39.45K': a memory size as people read it." },
    { NULL, NULL, 0, NULL },
};

int koila__report_add_module(PyObject *m) { return PyModule_AddFunctions(m, methods); }
