/* capture.c — one dispatched operator becomes one node.
 *
 * torch calls koila._core.dispatch(func, types, args, kwargs) for every ATen operator that meets a LazyTensor, below autograd, forward and backward alike.
 * The arguments are walked once into tokens (the call's *signature*, tensors replaced by their metas) and inputs (the tensors). The tokens are looked up in
 * a memo that knows the interned signature and what the results look like; then a node of 12 bytes is appended and the results are wrapped. Only a call never
 * seen before asks Python, which asks FakeTensor what comes out: the plain meta kernels give wrong strides for some operators.
 *
 * Note [Kinds]. What an operator is, is decided once, in Python (_tensor.describe):
 *   PLAIN    fresh results                          SAME     detach, alias: the same value, another wrapper
 *   VIEW     results in the group of the argument   STRIDED  as_strided: its chain restarts at the base
 *   WRITE    in-place and out=                      FACTORY  only metadata is read: rewritten into a call without tensors
 *   INDEX    plain, unless a mask or row numbers    SPECIAL  a Python function decides (data-dependent, composite, random, ...)
 *
 * Everything the walk needs lies on the C stack, because a miss runs Python, and Python may come back here.
 */
#include "capture.h"
#include "memlab.h"
#include "random.h"

#include <frameobject.h> /* PyFrame_GetBack on 3.10 */

enum { PLAIN, VIEW, SAME, WRITE, SPECIAL, STRIDED, FACTORY, INDEX };

koila_table *koila__table;
PyObject *koila__helpers;

typedef struct op_info {
    PyObject *func; /* owned OpOverload; the key */
    koila_op id;
    uint8_t kind, result_kind, overwrites;
    bool is_view;            /* also of a SPECIAL one, when its handler records it */
    bool elementwise;        /* each element written depends on the same element of each argument only */
    uint64_t written;        /* bit i: positional argument i is written */
    PyObject *written_kw;    /* owned tuple of names */
    int8_t source[8];        /* result j is argument source[j]; -1: fresh; -2 - k: keyword written_kw[k] */
    uint8_t n_results;       /* of the schema; a list counts as one */
    PyObject *handler;       /* owned; SPECIAL and INDEX */
    struct op_info *next;    /* with the same hash */
} op_info;

#define OP_SLOTS 4096
static op_info *op_slots[OP_SLOTS];
static PyObject **op_objects; /* [n_op_objects] by koila_op: owned OpOverload or NULL */
static uint32_t n_op_objects;

PyObject *koila__raise(koila_status s)
{
    if (s == KOILA_NO_MEMORY) return PyErr_NoMemory();
    PyErr_Format(s == KOILA_BAD_ARGUMENT ? PyExc_SystemError : PyExc_RuntimeError, "koila: %s", koila_status_text(s));
    return NULL;
}

PyObject *koila__helper(const char *name)
{
    if (!koila__helpers) {
        koila__helpers = PyImport_ImportModule("koila._tensor");
        if (!koila__helpers) return NULL;
    }
    return PyObject_GetAttrString(koila__helpers, name);
}

static PyObject *call_helper(const char *name, PyObject *a, PyObject *b, PyObject *c)
{
    PyObject *f = koila__helper(name);
    if (!f) return NULL;
    PyObject *r = PyObject_CallFunctionObjArgs(f, a, b, c, NULL);
    Py_DECREF(f);
    return r;
}

static PyObject *unsupported(const char *format, ...)
{
    PyObject *e = koila__helper("UnsupportedError");
    if (!e) return NULL;
    va_list args;
    va_start(args, format);
    PyErr_FormatV(e, format, args);
    va_end(args);
    Py_DECREF(e);
    return NULL;
}

/* ---- operators */

static int remember_object(koila_op id, PyObject *func)
{
    if (id >= n_op_objects) {
        const uint32_t n = (id + 1) * 2;
        PyObject **p = PyMem_Realloc(op_objects, n * sizeof *p);
        if (!p) return PyErr_NoMemory(), -1;
        memset(p + n_op_objects, 0, (n - n_op_objects) * sizeof *p);
        op_objects = p;
        n_op_objects = n;
    }
    if (!op_objects[id]) op_objects[id] = Py_NewRef(func);
    return 0;
}

PyObject *koila__op_object(koila_op op)
{
    if (op < n_op_objects && op_objects[op]) return op_objects[op];
    PyObject *name = PyUnicode_FromString(koila_op_name(koila__table, op)), *func = name ? call_helper("op_by_name", name, NULL, NULL) : NULL;
    Py_XDECREF(name);
    if (!func) return NULL;
    const int rc = remember_object(op, func);
    Py_DECREF(func);
    return rc < 0 ? NULL : op_objects[op];
}

static op_info *describe(PyObject *func)
{
    PyObject *d = call_helper("describe", func, NULL, NULL);
    if (!d) return NULL;
    op_info *op = PyMem_Calloc(1, sizeof *op);
    const char *name;
    unsigned flags, kind, result_kind;
    unsigned long long written;
    PyObject *kw, *source, *handler;
    int overwrites, elementwise;
    if (!op) {
        PyErr_NoMemory();
        goto fail;
    }
    if (!PyArg_ParseTuple(d, "sIIKO!O!IppO", &name, &flags, &kind, &written, &PyTuple_Type, &kw, &PyTuple_Type, &source, &result_kind, &overwrites, &elementwise,
                          &handler)) goto fail;
    const koila_status s = koila_table_op(koila__table, name, flags, &op->id);
    if (s) {
        koila__raise(s);
        goto fail;
    }
    if (remember_object(op->id, func) < 0) goto fail;
    op->kind = (uint8_t)kind;
    op->result_kind = (uint8_t)result_kind;
    op->is_view = (flags & KOILA_OP_VIEW) && kind != STRIDED;
    op->overwrites = (uint8_t)overwrites;
    op->elementwise = elementwise;
    op->written = written;
    op->n_results = (uint8_t)PyTuple_GET_SIZE(source);
    for (int i = 0; i < op->n_results && i < 8; i++) op->source[i] = (int8_t)PyLong_AsLong(PyTuple_GET_ITEM(source, i));
    op->written_kw = Py_NewRef(kw);
    op->handler = handler == Py_None ? NULL : Py_NewRef(handler);
    op->func = Py_NewRef(func);
    Py_DECREF(d);
    const uint32_t i = (uint32_t)((uintptr_t)func >> 4) & (OP_SLOTS - 1);
    op->next = op_slots[i];
    op_slots[i] = op;
    return op;
fail:
    PyMem_Free(op);
    Py_DECREF(d);
    return NULL;
}

static inline op_info *op_of(PyObject *func)
{
    for (op_info *op = op_slots[(uint32_t)((uintptr_t)func >> 4) & (OP_SLOTS - 1)]; op; op = op->next)
        if (op->func == func) return op;
    return describe(func);
}

/* ---- opaque arguments: devices, layouts, memory formats, complex numbers, generators */

static PyObject *opaque_ids;     /* dict (type, object) → id */
static PyObject *opaque_objects; /* list by id */

uint32_t koila__opaque_id(PyObject *o)
{
    PyObject *key = PyTuple_Pack(2, Py_TYPE(o), o);
    if (!key) return KOILA_NONE;
    PyObject *found = PyDict_GetItemWithError(opaque_ids, key);
    uint32_t id = KOILA_NONE;
    if (found) {
        id = (uint32_t)PyLong_AsUnsignedLong(found);
    } else if (!PyErr_Occurred()) {
        PyObject *label = PyObject_Str(o);
        const char *text = label ? PyUnicode_AsUTF8(label) : NULL;
        if (text) {
            const koila_status s = koila_table_opaque(koila__table, text, &id);
            PyObject *n = s ? koila__raise(s) : PyLong_FromUnsignedLong(id);
            if (!n || PyDict_SetItem(opaque_ids, key, n) < 0 || PyList_Append(opaque_objects, o) < 0) id = KOILA_NONE;
            Py_XDECREF(n);
        }
        Py_XDECREF(label);
    }
    Py_DECREF(key);
    return id;
}

PyObject *koila__opaque_object(uint32_t id) { return PyList_GetItem(opaque_objects, id); }

int koila__op_sources(koila_op id, const int8_t **source)
{
    PyObject *func = koila__op_object(id);
    const op_info *op = func ? op_of(func) : NULL;
    if (!op) return -1;
    *source = op->source;
    return op->n_results;
}

/* ---- the walk over the arguments */

#define N_TOKENS 192
#define N_INPUTS 64

typedef struct input {
    PyObject *object;  /* borrowed from the arguments */
    koila__handle *h;  /* of a lazy one, else NULL */
    koila_value value;
    uint32_t token;
    bool written;
} input;

typedef struct walk {
    koila_arg *tok;
    input *in;
    uint32_t n_tok, cap_tok, n_in, cap_in, n_lazy, n_pos, n_kw, n_written, n_written_real;
    bool writing; /* the argument being walked is written */
    koila__tape *tape;
    PyObject *instead; /* owned: set by miss() without an exception: call this in place of recording */
    uint32_t kw[32];
    koila_arg tok_inline[N_TOKENS];
    input in_inline[N_INPUTS];
} walk;

static void walk_init(walk *w)
{
    memset(w, 0, offsetof(walk, tok_inline));
    w->tok = w->tok_inline;
    w->in = w->in_inline;
    w->cap_tok = N_TOKENS;
    w->cap_in = N_INPUTS;
}

static void walk_deinit(walk *w)
{
    if (w->tok != w->tok_inline) PyMem_Free(w->tok);
    if (w->in != w->in_inline) PyMem_Free(w->in);
    Py_XDECREF(w->instead);
}

static koila_arg *push(walk *w, uint8_t kind)
{ /* NULL + error. The token is all zero but its kind, padding too: tokens are hashed as bytes. */
    if (w->n_tok == w->cap_tok) {
        koila_arg *p = PyMem_Malloc(w->cap_tok * 4 * sizeof *p);
        if (!p) return PyErr_NoMemory(), NULL;
        memcpy(p, w->tok, w->n_tok * sizeof *p);
        if (w->tok != w->tok_inline) PyMem_Free(w->tok);
        w->tok = p;
        w->cap_tok *= 4;
    }
    koila_arg *t = &w->tok[w->n_tok++];
    memset(t, 0, sizeof *t);
    t->kind = kind;
    return t;
}

static int push_input(walk *w, PyObject *o, koila__handle *h)
{
    if (w->n_in == w->cap_in) {
        input *p = PyMem_Malloc(w->cap_in * 4 * sizeof *p);
        if (!p) return PyErr_NoMemory(), -1;
        memcpy(p, w->in, w->n_in * sizeof *p);
        if (w->in != w->in_inline) PyMem_Free(w->in);
        w->in = p;
        w->cap_in *= 4;
    }
    koila_arg *t = push(w, KOILA_ARG_TENSOR);
    if (!t) return -1;
    w->in[w->n_in++] = (input){ o, h, KOILA_NONE, w->n_tok - 1, w->writing };
    if (h) {
        w->n_lazy++;
        t->u.id = h->meta;
    }
    if (w->writing) {
        w->n_written++;
        if (!h) w->n_written_real++;
    }
    return 0;
}

static int walk_rare(walk *w, PyObject *o)
{
    koila_arg *t;
    const int d = koila__dtype_of(o);
    if (d >= 0) {
        if (!(t = push(w, KOILA_ARG_DTYPE))) return -1;
        t->u.id = (uint32_t)d;
        return 0;
    }
    if (PyUnicode_Check(o)) {
        const char *s = PyUnicode_AsUTF8(o);
        uint32_t id;
        if (!s || !(t = push(w, KOILA_ARG_STR))) return -1;
        const koila_status status = koila_table_text(koila__table, s, &id);
        if (status) return koila__raise(status), -1;
        t->u.id = id;
        return 0;
    }
    if (PyLong_Check(o) || PyFloat_Check(o)) { /* subclasses */
        if (PyFloat_Check(o)) {
            if (!(t = push(w, KOILA_ARG_FLOAT))) return -1;
            t->u.f = PyFloat_AS_DOUBLE(o);
            return 0;
        }
        const long long i = PyLong_AsLongLong(o);
        if (i == -1 && PyErr_Occurred()) return -1;
        if (!(t = push(w, KOILA_ARG_INT))) return -1;
        t->u.i = i;
        return 0;
    }
    const uint32_t id = koila__opaque_id(o);
    if (id == KOILA_NONE) return -1;
    if (!(t = push(w, KOILA_ARG_OPAQUE))) return -1;
    t->u.id = id;
    return 0;
}

static int walk_value(walk *w, PyObject *o, bool in_list)
{
    koila_arg *t;
    PyTypeObject *type = Py_TYPE(o);
    if (type == koila__lazy_class) {
        koila__handle *h = koila__handle_of(o);
        if (!h) return PyErr_SetString(PyExc_RuntimeError, "koila: a lazy tensor that was never filled"), -1;
        h->wrapper = o;
        return push_input(w, o, h);
    }
    if (type == &PyLong_Type) {
        int overflow;
        const long long i = PyLong_AsLongLongAndOverflow(o, &overflow);
        if (overflow) return PyLong_AsLongLong(o), -1;
        if (!(t = push(w, KOILA_ARG_INT))) return -1;
        t->u.i = i;
        return 0;
    }
    if (type == &PyList_Type || type == &PyTuple_Type) {
        if (in_list) return unsupported("an operator with nested lists of arguments"), -1;
        const Py_ssize_t n = PySequence_Fast_GET_SIZE(o);
        if (!(t = push(w, KOILA_ARG_LIST))) return -1;
        t->n = (uint32_t)n;
        for (Py_ssize_t i = 0; i < n; i++)
            if (walk_value(w, PySequence_Fast_GET_ITEM(o, i), true) < 0) return -1;
        return 0;
    }
    if (o == Py_None) return push(w, KOILA_ARG_ABSENT) ? 0 : -1;
    if (type == &PyBool_Type) {
        if (!(t = push(w, KOILA_ARG_BOOL))) return -1;
        t->u.i = o == Py_True;
        return 0;
    }
    if (type == &PyFloat_Type) {
        if (!(t = push(w, KOILA_ARG_FLOAT))) return -1;
        t->u.f = PyFloat_AS_DOUBLE(o);
        return 0;
    }
    if (koila__is_tensor(o)) {
        koila__handle *h = NULL;
        if (koila__is_lazy(o)) {
            h = koila__handle_of(o);
            if (!h) return PyErr_SetString(PyExc_RuntimeError, "koila: a lazy tensor that was never filled"), -1;
        }
        return push_input(w, o, h);
    }
    return walk_rare(w, o);
}

static int walk_call(walk *w, const op_info *op, PyObject *args, PyObject *kwargs)
{
    w->n_pos = (uint32_t)PyTuple_GET_SIZE(args);
    for (uint32_t i = 0; i < w->n_pos; i++) {
        w->writing = op->written >> i & 1;
        if (walk_value(w, PyTuple_GET_ITEM(args, i), false) < 0) return -1;
    }
    w->writing = false;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        Py_ssize_t at = 0;
        PyObject *name, *value;
        while (PyDict_Next(kwargs, &at, &name, &value)) {
            if (w->n_kw == 32) return unsupported("an operator with more than 32 keyword arguments"), -1;
            const char *text = PyUnicode_AsUTF8(name);
            if (!text) return -1;
            const koila_status s = koila_table_text(koila__table, text, &w->kw[w->n_kw++]);
            if (s) return koila__raise(s), -1;
            w->writing = false;
            for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(op->written_kw); k++)
                if (PyUnicode_Compare(PyTuple_GET_ITEM(op->written_kw, k), name) == 0) w->writing = true;
            if (walk_value(w, value, false) < 0) return -1;
        }
        w->writing = false;
    }
    return 0;
}

/* ---- which tape a call belongs to */

static bool is_batch_leaf(const koila__handle *h)
{
    const koila__group *g = h->group;
    const koila_value_info v = koila_value_get(g->tape->graph, g->cur);
    return v.node == KOILA_NONE && v.leaf_kind == KOILA_LEAF_BATCH;
}

/* 0: record in w->tape, to which every lazy argument now belongs. 1: all are concrete and nobody writes: run on the real tensors. -1: error. */
static int choose_tape(walk *w, const op_info *op)
{
    koila__tape *one = NULL;
    bool mixed = false;
    for (uint32_t i = 0; i < w->n_in; i++)
        if (w->in[i].h) {
            koila__tape *t = w->in[i].h->group->tape;
            if (!one) one = t;
            else if (t != one) mixed = true;
        }
    if (one && !mixed && !one->closed) {
        w->tape = one;
        return 0;
    }
    if (!one) {
        w->tape = koila__tape_current();
        return w->tape ? 0 : -1;
    }
    koila__tape *open = koila__open && !koila__open->closed ? koila__open : NULL, *to = NULL;
    bool any_leaf = false, concrete = true;
    for (uint32_t i = 0; i < w->n_in; i++)
        if (w->in[i].h) {
            koila__handle *h = w->in[i].h;
            if (h->group->tape == open) to = open;
            if (is_batch_leaf(h)) any_leaf = true;
            const koila_value v = koila__value_of(h);
            if (v == KOILA_NONE) return -1;
            if (!h->group->tape->values[v].real) concrete = false;
        }
    if (!to && any_leaf) to = koila__tape_current();
    else if (!to && concrete && !w->n_written) return 1;
    else if (!to && !mixed) to = one;
    else if (!to && !w->n_written) return 1;
    else if (!to) to = koila__tape_current();
    if (!to) return -1;
    Py_INCREF(to);
    for (uint32_t i = 0; i < w->n_in; i++) {
        if (!w->in[i].h) continue;
        if (koila__move_to(w->in[i].h, to) < 0) return Py_DECREF(to), -1;
        w->tok[w->in[i].token].u.id = w->in[i].h->meta;
    }
    w->tape = to;
    Py_DECREF(to); /* kept by the handles now in it, or by koila__open */
    return 0;
}

/* A tensor could not become a leaf, an exception says why. Is it sparse or nested? Then the operator runs now, on real tensors: gathered. -1 either way. */
static int not_dense(walk *w, PyObject *real)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *dense = call_helper("is_dense", real, NULL, NULL);
    if (dense == Py_False) w->instead = koila__helper("value_dependent");
    Py_XDECREF(dense);
    if (w->instead) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    } else {
        PyErr_Restore(type, value, trace);
    }
    return -1;
}

static int resolve_inputs(walk *w)
{
    for (uint32_t i = 0; i < w->n_in; i++) {
        input *in = &w->in[i];
        koila__handle *h = in->h;
        if (h) {
            in->value = h->gen == h->group->gen && h->value != KOILA_NONE ? h->value : koila__value_of(h);
        } else {
            koila_meta m;
            in->value = koila__tape_leaf_real(w->tape, in->object, &m);
            w->tok[in->token].u.id = m;
        }
        if (in->value == KOILA_NONE) return h ? -1 : not_dense(w, in->object);
    }
    return 0;
}

/* ---- the memo: call → signature and results */

typedef struct result {
    koila_meta meta;    /* KOILA_NONE: not a tensor */
    int64_t offset;     /* of a view: beyond its argument's; of as_strided: in the storage */
    PyObject *constant; /* owned; of a result that is no tensor */
} result;

typedef struct entry {
    uint64_t hash;
    uint32_t n_key, n_results;
    koila_sig sig;
    uint8_t result_kind;
    bool no_inputs;    /* a factory: the node reads nothing */
    bool no_node;      /* every result is a constant */
    PyObject *fill;    /* owned (func, args after self, kwargs) to write a fresh factory with, or NULL */
    result *results;   /* fresh ones only */
    koila_arg key[];
} entry;

#define MEMO_CAP 65536 /* entries; then everything is forgotten: a program that makes new constants all the time */
static entry **memo;
static uint32_t n_memo, n_memo_slots;

static void entry_free(entry *e)
{
    for (uint32_t i = 0; i < e->n_results; i++) Py_XDECREF(e->results[i].constant);
    Py_XDECREF(e->fill);
    PyMem_Free(e->results);
    PyMem_Free(e);
}

static uint64_t hash_key(const koila_arg *key, uint32_t n)
{
    uint64_t h = 0x9e3779b97f4a7c15u, w[2];
    for (uint32_t i = 0; i < n; i++) {
        memcpy(w, &key[i], sizeof w);
        h = (h ^ w[0]) * 0xff51afd7ed558ccdu;
        h = (h ^ (h >> 32) ^ w[1]) * 0xc4ceb9fe1a85ec53u;
    }
    return h ^ (h >> 29);
}

static entry *memo_find(const koila_arg *key, uint32_t n, uint64_t hash)
{
    if (!n_memo_slots) return NULL;
    for (uint32_t i = (uint32_t)hash & (n_memo_slots - 1); memo[i]; i = (i + 1) & (n_memo_slots - 1))
        if (memo[i]->hash == hash && memo[i]->n_key == n && !memcmp(memo[i]->key, key, n * sizeof *key)) return memo[i];
    return NULL;
}

static void memo_clear(void)
{ /* entries in use further up the stack are not: record() copies what it needs before Python can run */
    entry **old = memo;
    const uint32_t n = n_memo_slots;
    memo = NULL;
    n_memo = n_memo_slots = 0;
    for (uint32_t i = 0; i < n; i++)
        if (old[i]) entry_free(old[i]);
    PyMem_Free(old);
}

static int memo_add(entry *e)
{
    if (n_memo >= MEMO_CAP) memo_clear();
    if ((n_memo + 1) * 2 > n_memo_slots) {
        const uint32_t n = n_memo_slots ? n_memo_slots * 2 : 1024;
        entry **fresh = PyMem_Calloc(n, sizeof *fresh);
        if (!fresh) return PyErr_NoMemory(), -1;
        for (uint32_t i = 0; i < n_memo_slots; i++)
            if (memo[i]) {
                uint32_t j = (uint32_t)memo[i]->hash & (n - 1);
                while (fresh[j]) j = (j + 1) & (n - 1);
                fresh[j] = memo[i];
            }
        PyMem_Free(memo);
        memo = fresh;
        n_memo_slots = n;
    }
    uint32_t i = (uint32_t)e->hash & (n_memo_slots - 1);
    while (memo[i]) i = (i + 1) & (n_memo_slots - 1);
    memo[i] = e;
    n_memo++;
    return 0;
}

/* The key: tokens, keyword names, chains of written arguments, operator and grad mode. Call after resolve_inputs(). Appends to w->tok; w->n_tok stays. */
static int make_key(walk *w, const op_info *op, bool grad, uint32_t *n_key)
{
    const uint32_t n = w->n_tok;
    koila_arg *t;
    for (uint32_t k = 0; k < w->n_kw; k++) {
        if (!(t = push(w, 100))) return -1;
        t->u.id = w->kw[k];
    }
    if (w->n_written)
        for (uint32_t i = 0; i < w->n_in; i++) {
            if (!w->in[i].written) continue;
            const koila__handle *h = w->in[i].h;
            if (!(t = push(w, 101))) return -1;
            t->u.id = h->group->meta;
            t->n = h->chain ? h->chain->n_links : 0;
            for (const koila__chain *c = h->chain; c; c = c->parent) {
                if (!(t = push(w, 102))) return -1;
                t->n = c->link.sig;
                t->u.id = c->link.output;
            }
        }
    if (!(t = push(w, (uint8_t)(103 + grad)))) return -1;
    t->n = w->n_pos;
    t->u.id = op->id;
    *n_key = w->n_tok;
    w->n_tok = n;
    return 0;
}

static int make_sig(walk *w, const op_info *op, bool grad, const koila_meta *outputs, uint32_t n_out, uint8_t result_kind, koila_sig *out)
{
    koila_sig_info d = { .op = op->id, .n_tokens = w->n_tok, .n_pos = w->n_pos, .n_kw = w->n_kw, .tokens = w->tok, .kw_names = w->kw, .n_fresh = n_out,
                         .outputs = outputs, .result_kind = result_kind, .grad_mode = grad };
    koila_write writes[64];
    koila_link *links = NULL;
    uint32_t n_links = 0, n_writes = 0, *restore = NULL;
    int rc = -1;
    if (w->n_written) {
        if (w->n_written > 64) return unsupported("an operator that writes more than 64 tensors"), -1;
        for (uint32_t i = 0; i < w->n_in; i++)
            if (w->in[i].written && w->in[i].h->chain) n_links += w->in[i].h->chain->n_links;
        links = PyMem_Malloc((n_links + 1) * sizeof *links);
        restore = PyMem_Malloc(w->n_in * sizeof *restore);
        if (!links || !restore) {
            PyErr_NoMemory();
            goto done;
        }
        n_links = 0;
        for (uint32_t i = 0; i < w->n_in; i++) {
            restore[i] = w->tok[w->in[i].token].u.id;
            if (!w->in[i].written) continue;
            koila__handle *h = w->in[i].h;
            const uint32_t n = h->chain ? h->chain->n_links : 0;
            uint32_t k = n;
            for (const koila__chain *c = h->chain; c; c = c->parent) links[n_links + --k] = c->link;
            writes[n_writes++] = (koila_write){ .input = i, .overwrites = op->overwrites && !n, .n_links = n, .links = links + n_links };
            n_links += n;
            w->tok[w->in[i].token].u.id = h->group->meta; /* the node reads the base, see Note [Writes] in graph.h */
        }
        d.writes = writes;
        d.n_writes = n_writes;
    }
    const koila_status s = koila_table_sig(koila__table, &d, out);
    if (s) koila__raise(s);
    else rc = 0;
    if (w->n_written)
        for (uint32_t i = 0; i < w->n_in; i++) w->tok[w->in[i].token].u.id = restore[i];
done:
    PyMem_Free(links);
    PyMem_Free(restore);
    return rc;
}

/* A call never seen: ask Python what it gives. Owned by the memo on success. */
static entry *miss(walk *w, const op_info *op, PyObject *args, PyObject *kwargs, bool grad, uint32_t n_key, uint64_t hash)
{
    entry *e = PyMem_Calloc(1, sizeof *e + n_key * sizeof(koila_arg));
    koila_meta *metas = NULL;
    PyObject *shape = NULL;
    walk *factory = NULL;
    if (!e) return PyErr_NoMemory(), NULL;
    memcpy(e->key, w->tok, n_key * sizeof *e->key);
    e->hash = hash;
    e->n_key = n_key;
    if (op->kind == FACTORY) { /* (func, args, kwargs, meta, fill) */
        PyObject *func, *a, *k, *meta, *fill;
        shape = call_helper("factory", op->func, args, kwargs);
        if (!shape || !PyArg_ParseTuple(shape, "OO!O!O!O", &func, &PyTuple_Type, &a, &PyDict_Type, &k, &PyTuple_Type, &meta, &fill)) goto fail;
        const op_info *base = op_of(func);
        factory = PyMem_Malloc(sizeof *factory);
        e->results = PyMem_Calloc(1, sizeof *e->results);
        if (!base || !factory || !e->results) {
            if (base) PyErr_NoMemory();
            goto fail;
        }
        e->n_results = 1;
        walk_init(factory);
        if (walk_call(factory, base, a, k) < 0 || koila__meta_from(meta, &e->results[0].meta, NULL) < 0) goto fail;
        if (make_sig(factory, base, grad, &e->results[0].meta, 1, 0, &e->sig) < 0) goto fail;
        e->no_inputs = true;
        e->fill = fill == Py_None ? NULL : Py_NewRef(fill);
    } else { /* (result kind, [(0, None) | (1, meta) | (2, constant), ...]) of the fresh results */
        PyObject *list;
        int result_kind;
        shape = call_helper("shape", op->func, args, kwargs);
        if (!shape) goto fail;
        if (!PyTuple_Check(shape)) { /* the results depend on data: (callable) says what to do instead; see record() */
            w->instead = shape;
            shape = NULL;
            goto fail;
        }
        if (!PyArg_ParseTuple(shape, "iO!", &result_kind, &PyList_Type, &list)) goto fail;
        e->result_kind = (uint8_t)result_kind;
        e->n_results = (uint32_t)PyList_GET_SIZE(list);
        e->results = PyMem_Calloc(e->n_results + 1, sizeof *e->results);
        metas = PyMem_Malloc((e->n_results + 1) * sizeof *metas);
        if (!e->results || !metas) {
            PyErr_NoMemory();
            goto fail;
        }
        e->no_node = !w->n_written;
        for (uint32_t j = 0; j < e->n_results; j++) {
            int tag;
            PyObject *what;
            if (!PyArg_ParseTuple(PyList_GET_ITEM(list, j), "iO", &tag, &what)) goto fail;
            metas[j] = e->results[j].meta = KOILA_NONE;
            if (tag == 1) {
                if (koila__meta_from(what, &e->results[j].meta, &e->results[j].offset) < 0) goto fail;
                metas[j] = e->results[j].meta;
                e->no_node = false;
            } else {
                e->results[j].constant = Py_NewRef(what);
            }
        }
        if (!e->no_node && make_sig(w, op, grad, metas, e->n_results, e->result_kind, &e->sig) < 0) goto fail;
    }
    if (memo_add(e) < 0) goto fail;
    Py_DECREF(shape);
    PyMem_Free(metas);
    if (factory) walk_deinit(factory);
    PyMem_Free(factory);
    return e;
fail:
    Py_XDECREF(shape);
    PyMem_Free(metas);
    if (factory) walk_deinit(factory);
    PyMem_Free(factory);
    entry_free(e);
    return NULL;
}

/* ---- source lines */

int koila__lines_on = 1;
static PyObject *line_files; /* dict code object → None (library) or file name; keeps the code objects alive */
#define LINE_SLOTS 8192
static struct line_slot {
    PyCodeObject *code; /* borrowed from line_files' keys */
    uint64_t tape; /* uid: addresses are reused */
    int lasti;
    uint32_t id;
} line_slots[LINE_SLOTS];
static struct code_slot {
    PyCodeObject *code; /* borrowed from line_files' keys */
    const char *file;   /* NULL: library */
} code_slots[LINE_SLOTS];

static const char *file_of(PyCodeObject *code, bool *failed)
{
    struct code_slot *s = &code_slots[((uintptr_t)code >> 5) & (LINE_SLOTS - 1)];
    if (s->code == code) return s->file;
    PyObject *file = PyDict_GetItemWithError(line_files, (PyObject *)code);
    if (!file) {
        PyObject *f = PyErr_Occurred() ? NULL : koila__helper("user_file");
        PyObject *answer = f ? PyObject_CallOneArg(f, code->co_filename) : NULL;
        Py_XDECREF(f);
        if (!answer || PyDict_SetItem(line_files, (PyObject *)code, answer) < 0) {
            Py_XDECREF(answer);
            PyErr_Clear();
            *failed = true;
            return NULL;
        }
        Py_DECREF(answer);
        file = PyDict_GetItem(line_files, (PyObject *)code);
        if (!file) return *failed = true, NULL;
    }
    s->code = code;
    s->file = file == Py_None ? NULL : PyUnicode_AsUTF8(file);
    return s->file;
}

uint32_t koila__line_now(koila__tape *t)
{
    koila_graph *g = t->graph;
    if (koila__lines_enabled) koila__nodes_captured(t->uid, koila_graph_n_nodes(g)); /* for koila.memlab; the node comes next */
    if (!koila__lines_on) return KOILA_NONE;
    PyFrameObject *f = PyEval_GetFrame();
    if (!f) return KOILA_NONE;
    Py_INCREF(f);
    uint32_t id = KOILA_NONE;
    for (int depth = 0; f && depth < 64; depth++) {
        PyCodeObject *code = PyFrame_GetCode(f);
        Py_DECREF(code); /* the frame keeps it */
        bool failed = false;
        const char *file = file_of(code, &failed);
        if (failed) break;
        if (file) {
#if PY_VERSION_HEX >= 0x030b0000
            const int lasti = PyFrame_GetLasti(f);
#else
            const int lasti = -PyFrame_GetLineNumber(f) - 1;
#endif
            struct line_slot *s = &line_slots[(((uintptr_t)code >> 5) * 31 + (unsigned)lasti) & (LINE_SLOTS - 1)];
            if (s->code == code && s->tape == t->uid && s->lasti == lasti) {
                id = s->id;
                break;
            }
            if (koila_graph_line(g, file, (uint32_t)PyFrame_GetLineNumber(f), &id) == KOILA_OK) *s = (struct line_slot){ code, t->uid, lasti, id };
            else id = KOILA_NONE;
            break;
        }
        PyFrameObject *back = PyFrame_GetBack(f);
        Py_DECREF(f);
        f = back;
    }
    Py_XDECREF(f);
    return id;
}

/* ---- recording */

static PyObject *give(const result *r, koila__tape *t, koila_value v, koila__handle *view_of, bool strided, koila_link link)
{
    if (!view_of) {
        koila__group *g = koila__group_new(t, v, r->meta);
        if (!g) return NULL;
        PyObject *w = koila__wrapper_new(g, NULL, v, r->meta, 0);
        if (!w) koila__group_free(g);
        return w;
    }
    koila__group *g = view_of->group;
    const int64_t offset = r->offset + (strided ? 0 : view_of->offset);
    koila__chain *c = koila__chain_new(strided ? NULL : view_of->chain, link, r->meta, offset, g->gen, v);
    if (!c) return NULL;
    c->refs++;
    PyObject *w = koila__wrapper_new(g, c, v, r->meta, offset);
    koila__chain_release(c);
    return w;
}

static PyObject *pack(uint8_t kind, PyObject **items, uint32_t n)
{ /* steals the items */
    if (kind == 0 && n == 1) return items[0];
    PyObject *r = kind == 2 ? PyList_New(n) : PyTuple_New(n);
    for (uint32_t i = 0; i < n; i++) {
        if (!r) Py_DECREF(items[i]);
        else if (kind == 2) PyList_SET_ITEM(r, i, items[i]);
        else PyTuple_SET_ITEM(r, i, items[i]);
    }
    return r;
}

/* The written arguments, as the schema's results name them. */
static PyObject *give_written(const op_info *op, PyObject *args, PyObject *kwargs, PyObject **fresh, uint32_t n_fresh)
{
    PyObject *items[8];
    uint32_t n = 0, at = 0;
    for (int j = 0; j < op->n_results && j < 8; j++) {
        const int s = op->source[j];
        PyObject *o = NULL;
        if (s >= 0) o = Py_XNewRef(s < PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, s) : NULL);
        else if (s <= -2) o = Py_XNewRef(kwargs ? PyDict_GetItem(kwargs, PyTuple_GET_ITEM(op->written_kw, -2 - s)) : NULL);
        else if (at < n_fresh) o = fresh[at++];
        items[n++] = o ? o : Py_NewRef(Py_None);
    }
    while (at < n_fresh) Py_DECREF(fresh[at++]);
    if (n == 0) Py_RETURN_NONE;
    return pack(n == 1 ? 0 : 1, items, n);
}

static int check_strided(const koila__group *g, const result *r)
{
    const koila_meta_info *base = koila_meta_get(koila__table, g->meta), *m = koila_meta_get(koila__table, r->meta);
    const uint64_t bytes = koila_dtype_bytes(base->dtype);
    if (r->offset < 0 || (m->n_storage_bytes && (uint64_t)r->offset * bytes + m->n_storage_bytes > base->n_storage_bytes)) {
        unsupported("as_strided: storage offset %lld and %llu bytes are out of bounds for the lazy tensor's %llu bytes", (long long)r->offset,
                    (unsigned long long)m->n_storage_bytes, (unsigned long long)base->n_storage_bytes);
        return -1;
    }
    return 0;
}

static bool grad_required(PyObject *tensor)
{
    if (!koila__grad_mode()) return false;
    PyObject *r = PyObject_GetAttrString(tensor, "requires_grad");
    const bool yes = r == Py_True;
    Py_XDECREF(r);
    PyErr_Clear();
    return yes;
}

static PyObject *run_on_reals(const op_info *op, PyObject *args, PyObject *kwargs) { return call_helper("run_on_reals", op->func, args, kwargs); }

static PyObject *record(const op_info *op, PyObject *args, PyObject *kwargs)
{
    walk w;
    PyObject *r = NULL;
    walk_init(&w);
    if (walk_call(&w, op, args, kwargs) < 0) goto done;
    if (w.n_written_real) {
        r = call_helper("write_real", op->func, args, kwargs);
        goto done;
    }
    const int where = choose_tape(&w, op);
    if (where < 0) goto done;
    if (where > 0) {
        r = run_on_reals(op, args, kwargs);
        goto done;
    }
    koila__tape *t = w.tape;
    Py_INCREF(t);
    if (resolve_inputs(&w) < 0) {
        if (w.instead) r = PyObject_CallFunctionObjArgs(w.instead, op->func, args, kwargs, NULL);
        goto leave;
    }
    koila__handle *first = w.n_in ? w.in[0].h : NULL;
    if (op->kind == STRIDED && first) { /* it reads the storage, that is the base */
        if (first->chain && grad_required(w.in[0].object)) {
            PyObject *f = koila__helper("check_strided"), *ok = f ? PyObject_CallObject(f, args) : NULL;
            Py_XDECREF(f);
            if (!ok) goto leave;
            Py_DECREF(ok);
        }
        const koila_value base = first->group->cur;
        w.in[0].value = base;
        w.tok[w.in[0].token].u.id = first->group->meta;
    }
    for (uint32_t i = 0; w.n_written && i < w.n_in; i++) {
        if (!w.in[i].written) continue;
        for (uint32_t j = 0; j < i; j++)
            if (w.in[j].written && w.in[j].h->group == w.in[i].h->group) {
                unsupported("%s writes two lazy tensors that share memory", koila_op_name(koila__table, op->id));
                goto leave;
            }
    }
    for (uint32_t i = 0; w.n_written && i < w.n_in; i++) { /* x.add_(a view of x), x.addmm_(x, x): eager refuses some of these */
        const koila__handle *a = w.in[i].h;
        for (uint32_t j = 0; w.in[i].written && j < w.n_in; j++) {
            const koila__handle *b = w.in[j].h;
            if (w.in[j].written || !b || b->group != a->group || (op->elementwise && b->offset == a->offset && b->meta == a->meta)) continue;
            PyObject *ok = call_helper("check_overlap", op->func, args, kwargs);
            if (!ok) goto leave;
            Py_DECREF(ok);
            ok = call_helper("check_shared", op->func, w.in[i].object, w.in[j].object);
            if (!ok) goto leave;
            Py_DECREF(ok);
        }
    }
    const bool grad = koila__grad_mode();
    uint32_t n_key;
    if (make_key(&w, op, grad, &n_key) < 0) goto leave;
    const uint64_t hash = hash_key(w.tok, n_key);
    entry *e = memo_find(w.tok, n_key, hash);
    if (!e && !(e = miss(&w, op, args, kwargs, grad, n_key, hash))) {
        if (w.instead) r = PyObject_CallFunctionObjArgs(w.instead, op->func, args, kwargs, NULL);
        goto leave;
    }
    if (e->no_node) {
        PyObject *items[64];
        const uint32_t n = e->n_results < 64 ? e->n_results : 64;
        for (uint32_t i = 0; i < n; i++) items[i] = Py_NewRef(e->results[i].constant);
        r = e->result_kind == 3 ? Py_NewRef(Py_None) : pack(e->result_kind, items, n);
        goto leave;
    }
    koila_value values[N_INPUTS], *input_values = values, first_out;
    if (w.n_in > N_INPUTS && !(input_values = PyMem_Malloc(w.n_in * sizeof *input_values))) {
        PyErr_NoMemory();
        goto leave;
    }
    for (uint32_t i = 0; i < w.n_in; i++) input_values[i] = w.in[i].written ? w.in[i].h->group->cur : w.in[i].value;
    const koila_status s = koila_graph_node(t->graph, e->sig, e->no_inputs ? NULL : input_values, koila__line_now(t), &first_out);
    if (input_values != values) PyMem_Free(input_values);
    if (s) {
        koila__raise(s);
        goto leave;
    }
    if (koila__tape_reserve(t) < 0) goto leave;

    /* results; making a wrapper can run Python (the collector), which can clear the memo: copy what is needed */
    const uint32_t n = e->n_results;
    const uint8_t result_kind = e->result_kind;
    const koila_sig sig = e->sig;
    PyObject *fill = Py_XNewRef(e->fill);
    result few[8], *results = n <= 8 ? few : PyMem_Malloc(n * sizeof *results);
    PyObject *some[8], **items = n <= 8 ? some : PyMem_Malloc(n * sizeof *items);
    bool ok = results && items;
    if (ok) {
        for (uint32_t j = 0; j < n; j++) {
            results[j] = e->results[j];
            Py_XINCREF(results[j].constant);
        }
        if (op->kind == STRIDED && first && check_strided(first->group, &results[0]) < 0) ok = false;
        for (uint32_t j = 0; j < n; j++) items[j] = NULL;
        for (uint32_t j = 0; j < n && ok; j++) {
            if (results[j].meta == KOILA_NONE) items[j] = Py_NewRef(results[j].constant);
            else items[j] = give(&results[j], t, first_out + j, op->is_view || op->kind == STRIDED ? first : NULL, op->kind == STRIDED, (koila_link){ sig, j });
            if (!items[j]) ok = false;
        }
    } else {
        PyErr_NoMemory();
    }
    if (ok && w.n_written) {
        uint32_t k = 0;
        for (uint32_t i = 0; i < w.n_in; i++)
            if (w.in[i].written) koila__group_written(w.in[i].h->group, first_out + n + k++);
        r = give_written(op, args, kwargs, items, n);
    } else if (ok && result_kind == 3) {
        r = Py_NewRef(Py_None);
    } else if (ok) {
        r = pack(result_kind, items, n);
    } else if (items) {
        for (uint32_t j = 0; j < n; j++) Py_XDECREF(items[j]);
    }
    if (results)
        for (uint32_t j = 0; j < n; j++) Py_XDECREF(results[j].constant);
    if (results != few) PyMem_Free(results);
    if (items != some) PyMem_Free(items);
    if (fill && r) { /* a factory that must be filled: (func, args, kwargs) with the fresh tensor in front */
        PyObject *func, *rest, *kw;
        if (PyArg_ParseTuple(fill, "OO!O!", &func, &PyTuple_Type, &rest, &PyDict_Type, &kw)) {
            PyObject *self = PyTuple_Pack(1, r), *all = self ? PySequence_Concat(self, rest) : NULL, *done = NULL;
            if (all) done = call_helper("redispatch", func, all, kw);
            if (!done) Py_CLEAR(r);
            Py_XDECREF(done);
            Py_XDECREF(all);
            Py_XDECREF(self);
        } else {
            Py_CLEAR(r);
        }
    }
    Py_XDECREF(fill);
leave:
    Py_DECREF(t);
done:
    walk_deinit(&w);
    return r;
}

static PyObject *same(PyObject *args)
{
    PyObject *self = PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, 0) : NULL;
    if (!self || !koila__is_lazy(self)) return Py_XNewRef(self);
    koila__handle *h = koila__handle_of(self);
    const koila_value v = koila__value_of(h);
    if (v == KOILA_NONE) return NULL;
    return koila__wrapper_new(h->group, h->chain, v, h->meta, h->offset);
}

/* index(self, indices, ...): is one of them a mask, or could the first be the row numbers of self? */
static bool index_is_special(PyObject *args)
{
    PyObject *list = PyTuple_GET_SIZE(args) > 1 ? PyTuple_GET_ITEM(args, 1) : NULL, *self = list ? PyTuple_GET_ITEM(args, 0) : NULL;
    if (!list || !(PyList_Check(list) || PyTuple_Check(list))) return false;
    const koila_meta_info *rows = koila__is_lazy(self) ? koila_meta_get(koila__table, koila__handle_of(self)->meta) : NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
        PyObject *o = PySequence_Fast_GET_ITEM(list, i);
        if (o == Py_None || !koila__is_tensor(o)) continue;
        koila_meta m;
        if (koila__is_lazy(o)) m = koila__handle_of(o)->meta;
        else if (koila__meta_of(o, &m) < 0) return PyErr_Clear(), false;
        const koila_meta_info *index = koila_meta_get(koila__table, m);
        if (index->dtype == KOILA_DTYPE_BOOL || index->dtype == KOILA_DTYPE_U8) return true;
        if (i == 0 && rows && rows->n_dims && index->n_dims && index->device == 0 && !koila__is_lazy(o) && index->n_elements == (uint64_t)rows->size[0]) return true;
    }
    return false;
}

/* In inference mode a view of a normal tensor is a normal tensor: its wrapper is made outside that mode. */
static PyObject *record_view(const op_info *op, PyObject *args, PyObject *kwargs)
{
    PyObject *context = Py_None, *type, *value, *trace;
    if (koila__maybe_inference() && PyTuple_GET_SIZE(args)) {
        context = call_helper("leave_inference", PyTuple_GET_ITEM(args, 0), NULL, NULL);
        if (!context) return NULL;
    } else {
        Py_INCREF(context);
    }
    PyObject *r = op->kind == SAME ? same(args) : record(op, args, kwargs);
    if (context != Py_None) {
        PyErr_Fetch(&type, &value, &trace);
        PyObject *ok = PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None);
        if (!ok) PyErr_Clear();
        Py_XDECREF(ok);
        PyErr_Restore(type, value, trace);
    }
    Py_DECREF(context);
    return r;
}

static PyObject *dispatch_op(const op_info *op, PyObject *args, PyObject *kwargs)
{
    switch (op->kind) {
    case PLAIN: case WRITE: case FACTORY: return record(op, args, kwargs);
    case VIEW: case SAME: return record_view(op, args, kwargs);
    case STRIDED:
        if (PyTuple_GET_SIZE(args) < 4 || PyTuple_GET_ITEM(args, 3) == Py_None || PyDict_GET_SIZE(kwargs)) break;
        return record_view(op, args, kwargs);
    case INDEX:
        if (!index_is_special(args)) return record(op, args, kwargs);
        break;
    default: break;
    }
    return PyObject_CallFunctionObjArgs(op->handler, op->func, args, kwargs, NULL);
}

static PyObject *dispatch(PyObject *module, PyObject *const *a, Py_ssize_t n)
{
    if (n < 3) return PyErr_SetString(PyExc_TypeError, "dispatch(func, types, args, kwargs)"), NULL;
    PyObject *func = a[0], *types = a[1], *args = a[2], *kwargs = n > 3 ? a[3] : NULL, *r, *own = NULL;
    if (PyTuple_Check(types))
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); i++) {
            PyObject *type = PyTuple_GET_ITEM(types, i);
            if (type == (PyObject *)koila__lazy_class) continue;
            PyObject *ok = call_helper("check_type", func, type, NULL);
            if (!ok) return NULL;
            Py_DECREF(ok);
        }
    if (!kwargs) {
        own = kwargs = PyDict_New();
        if (!own) return NULL;
    }
    op_info *op = op_of(func);
    r = op ? dispatch_op(op, args, kwargs) : NULL;
    Py_XDECREF(own);
    return r;
}

/* record(func, args, kwargs): the default path, for Python's special cases */
static PyObject *py_record(PyObject *module, PyObject *const *a, Py_ssize_t n)
{
    if (n != 3 || !PyTuple_Check(a[1]) || !PyDict_Check(a[2])) return PyErr_SetString(PyExc_TypeError, "record(func, args, kwargs)"), NULL;
    op_info *op = op_of(a[0]);
    if (!op) return NULL;
    if (op->is_view || op->kind == SAME || op->kind == STRIDED) return record_view(op, a[1], a[2]);
    return record(op, a[1], a[2]);
}

/* ---- what the Python face uses */

static koila__handle *handle_arg(PyObject *o)
{
    if (!koila__lazy_class || !koila__is_lazy(o)) return PyErr_Format(PyExc_TypeError, "expected a LazyTensor, got %s", Py_TYPE(o)->tp_name), NULL;
    koila__handle *h = koila__handle_of(o);
    if (!h) PyErr_SetString(PyExc_RuntimeError, "koila: a lazy tensor that was never filled");
    return h;
}

static PyObject *py_setup(PyObject *module, PyObject *args)
{
    PyObject *lazy_class;
    int owners_show;
    if (!PyArg_ParseTuple(args, "Op", &lazy_class, &owners_show)) return NULL;
    if (koila__tensor_setup(lazy_class) < 0) return NULL;
    koila__owners_show = owners_show;
    Py_RETURN_NONE;
}

static PyObject *py_tape_open(PyObject *module, PyObject *unused) { return Py_XNewRef((PyObject *)koila__tape_current()); }
static PyObject *py_current_tape(PyObject *module, PyObject *unused)
{
    return Py_NewRef(koila__open && !koila__open->closed ? (PyObject *)koila__open : Py_None);
}

static PyObject *py_axis(PyObject *module, PyObject *arg)
{
    const long long size = PyLong_AsLongLong(arg);
    if (size == -1 && PyErr_Occurred()) return NULL;
    if (size < 0) return PyErr_SetString(PyExc_ValueError, "an axis has a size of at least 0"), NULL;
    koila__tape *t = koila__tape_for_lazy();
    uint16_t axis;
    if (!t || koila__tape_axis(t, 0, size, &axis) < 0) return NULL;
    t->waiting = true;
    return PyLong_FromUnsignedLong(axis);
}

/* lazy_leaf(tensor, axis, dim): axis None: not batched */
static PyObject *py_lazy_leaf(PyObject *module, PyObject *args)
{
    PyObject *real, *axis_arg, *shared = NULL;
    unsigned dim = 0;
    if (!PyArg_ParseTuple(args, "OO|IO", &real, &axis_arg, &dim, &shared)) return NULL;
    if (!koila__lazy_class || !koila__is_tensor(real) || koila__is_lazy(real)) return PyErr_SetString(PyExc_TypeError, "lazy_leaf() takes a plain tensor"), NULL;
    static bool guarded; /* the doors of plain tensors */
    if (!guarded) {
        PyObject *done = call_helper("install", NULL, NULL, NULL);
        if (!done) return NULL;
        Py_DECREF(done);
        guarded = true;
    }
    PyObject *ok = call_helper("check_type", Py_None, (PyObject *)Py_TYPE(real), NULL);
    if (!ok) return NULL;
    Py_DECREF(ok);
    koila__tape *t = koila__tape_current();
    koila_meta meta;
    if (!t || koila__meta_of(real, &meta) < 0) return NULL;
    unsigned long axis = 0;
    const bool batched = axis_arg != Py_None;
    if (batched) {
        axis = PyLong_AsUnsignedLong(axis_arg);
        if (PyErr_Occurred()) return NULL;
        const koila_meta_info *m = koila_meta_get(koila__table, meta);
        if (axis >= koila_graph_n_axes(t->graph) || dim >= m->n_dims || m->size[dim] != koila_graph_axis_size(t->graph, (uint16_t)axis))
            return PyErr_SetString(PyExc_ValueError, "lazy_leaf(): the tensor has no such axis"), NULL;
    }
    const koila_value v = koila__tape_leaf_new(t, real, meta, batched ? KOILA_LEAF_BATCH : KOILA_LEAF_REAL, (uint16_t)axis, dim);
    koila__group *g = v == KOILA_NONE ? NULL : koila__group_new(t, v, meta);
    if (!g) return NULL;
    PyObject *w = koila__wrapper_new(g, NULL, v, meta, 0);
    if (!w) return koila__group_free(g), NULL;
    t->waiting = false;
    PyObject *grad = PyObject_GetAttrString(real, "requires_grad");
    if (!grad || (grad == Py_True && PyObject_SetAttrString(w, "requires_grad", grad) < 0)) Py_CLEAR(w);
    Py_XDECREF(grad);
    return w;
}

static PyObject *py_is_lazy(PyObject *module, PyObject *o) { return PyBool_FromLong(koila__lazy_class && koila__is_lazy(o)); }

static PyObject *py_concrete(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    return h ? Py_XNewRef(koila__concrete(h)) : NULL;
}

static PyObject *py_concrete_all(PyObject *module, PyObject *seq)
{
    PyObject *fast = PySequence_Fast(seq, "concrete_all() takes a sequence");
    if (!fast) return NULL;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    koila__handle **h = PyMem_Malloc((n + 1) * sizeof *h);
    PyObject *r = NULL;
    if (!h) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (!(h[i] = handle_arg(PySequence_Fast_GET_ITEM(fast, i)))) goto done;
    if (koila__concrete_many(h, (uint32_t)n) < 0) goto done;
    r = PyList_New(n);
    for (Py_ssize_t i = 0; r && i < n; i++) {
        PyObject *real = koila__concrete(h[i]);
        if (!real) {
            Py_CLEAR(r);
            break;
        }
        PyList_SET_ITEM(r, i, Py_NewRef(real));
    }
done:
    PyMem_Free(h);
    Py_DECREF(fast);
    return r;
}

static PyObject *py_handle_info(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    if (!h) return NULL;
    const koila_value v = koila__value_of(h);
    if (v == KOILA_NONE) return NULL;
    return Py_BuildValue("Ok", h->group->tape, (unsigned long)v);
}

static PyObject *py_tape_of(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    return h ? Py_NewRef((PyObject *)h->group->tape) : NULL;
}

static PyObject *py_is_concrete(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    if (!h) return NULL;
    const koila_value v = koila__value_of(h);
    return v == KOILA_NONE ? NULL : PyBool_FromLong(h->group->tape->values[v].real != NULL);
}

/* run(tape, [lazies], commit): everything in one run */
static PyObject *py_run(PyObject *module, PyObject *args)
{
    koila__tape *t;
    PyObject *seq;
    int commit = 0;
    if (!PyArg_ParseTuple(args, "O!O|p", &koila__tape_type, &t, &seq, &commit)) return NULL;
    PyObject *fast = PySequence_Fast(seq, "run() takes a sequence of lazy tensors");
    if (!fast) return NULL;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    koila_value *v = PyMem_Malloc((n + 1) * sizeof *v);
    uint32_t m = 0;
    int rc = v ? 0 : (PyErr_NoMemory(), -1);
    for (Py_ssize_t i = 0; i < n && rc == 0; i++) {
        koila__handle *h = handle_arg(PySequence_Fast_GET_ITEM(fast, i));
        if (h && h->group->tape != t) {
            PyErr_SetString(PyExc_ValueError, "run(): a lazy tensor of another tape");
            h = NULL;
        }
        const koila_value value = h ? koila__value_of(h) : KOILA_NONE;
        if (value == KOILA_NONE) rc = -1;
        else if (!t->values[value].real) v[m++] = value;
    }
    if (rc == 0 && (m || commit)) {
        rc = koila__run(t, v, m, commit);
        t->ran = true;
    }
    PyMem_Free(v);
    Py_DECREF(fast);
    if (rc < 0) return NULL;
    Py_RETURN_NONE;
}

/* run_whole([lazy, ...]): by the simple executor, which checks that each call returns what was recorded; for tests */
static PyObject *py_run_whole(PyObject *module, PyObject *seq)
{
    PyObject *fast = PySequence_Fast(seq, "run_whole() takes a sequence of lazy tensors");
    if (!fast) return NULL;
    int rc = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast) && rc == 0; i++) {
        koila__handle *h = handle_arg(PySequence_Fast_GET_ITEM(fast, i));
        const koila_value v = h ? koila__value_of(h) : KOILA_NONE;
        rc = v == KOILA_NONE ? -1 : h->group->tape->values[v].real ? 0 : koila__run_whole(h->group->tape, &v, 1, false);
    }
    Py_DECREF(fast);
    if (rc < 0) return NULL;
    Py_RETURN_NONE;
}

/* effect(lazy, real): after the step, real's contents are lazy's */
static PyObject *py_effect(PyObject *module, PyObject *args)
{
    PyObject *lazy, *real;
    if (!PyArg_ParseTuple(args, "OO", &lazy, &real)) return NULL;
    koila__handle *h = handle_arg(lazy);
    const koila_value v = h ? koila__value_of(h) : KOILA_NONE;
    if (v == KOILA_NONE || koila__tape_effect(h->group->tape, real, v) < 0) return NULL;
    Py_RETURN_NONE;
}

/* random(lazy, generator, state, words): the newest node of lazy's tape draws from the generator in this state, so many words an element (0: not known) */
static PyObject *py_random(PyObject *module, PyObject *args)
{
    PyObject *lazy, *generator, *state;
    unsigned words;
    if (!PyArg_ParseTuple(args, "OOOI", &lazy, &generator, &state, &words)) return NULL;
    koila__handle *h = handle_arg(lazy);
    if (!h) return NULL;
    koila__tape *t = h->group->tape;
    const koila_value_info v = koila_value_get(t->graph, h->group->cur);
    if (v.node == KOILA_NONE) return PyErr_SetString(PyExc_SystemError, "koila: no random node"), NULL;
    PyObject *bytes = koila__state_bytes(state);
    const int status = bytes ? koila__tape_add_random(t, v.node, generator, bytes, words) : -1;
    Py_XDECREF(bytes);
    if (status < 0) return NULL;
    Py_RETURN_NONE;
}

/* become(lazy, other): lazy's slot now stands for what other's does */
static PyObject *py_become(PyObject *module, PyObject *args)
{
    PyObject *a, *b;
    if (!PyArg_ParseTuple(args, "OO", &a, &b)) return NULL;
    koila__handle *x = handle_arg(a), *y = x ? handle_arg(b) : NULL;
    if (!y) return NULL;
    koila__tape *kept = x->group->tape;
    Py_INCREF(kept);
    koila__handle_move(x, y->group, y->chain, koila__value_of(y), y->meta, y->offset);
    Py_DECREF(kept);
    Py_RETURN_NONE;
}

/* rewrap(lazy): after torch.utils.swap_tensors a handle lives in another wrapper */
static PyObject *py_rewrap(PyObject *module, PyObject *o)
{
    if (koila__lazy_class && koila__is_lazy(o) && koila__handle_of(o)) koila__handle_of(o)->wrapper = o;
    Py_RETURN_NONE;
}

/* group_info(lazy) → (is a view, how many wrappers the group has, which group: a number while one of them lives) */
static PyObject *py_group_info(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    if (!h) return NULL;
    return Py_BuildValue("OIK", h->chain ? Py_True : Py_False, h->group->refs, (unsigned long long)(uintptr_t)h->group);
}

/* group_wrappers(lazy) → [every lazy tensor that shares its memory, itself included] */
static PyObject *py_group_wrappers(PyObject *module, PyObject *o)
{
    koila__handle *h = handle_arg(o);
    PyObject *r = h ? PyList_New(0) : NULL;
    for (h = h ? h->group->handles : NULL; r && h; h = h->next_in_group)
        if (h->wrapper && PyList_Append(r, h->wrapper) < 0) Py_CLEAR(r);
    return r;
}

static PyObject *py_memo_info(PyObject *module, PyObject *unused)
{
    return Py_BuildValue("{sIsI}", "calls", n_memo, "signatures", koila__table ? koila_table_n_sigs(koila__table) : 0);
}

static PyObject *py_memo_clear(PyObject *module, PyObject *unused)
{
    memo_clear();
    Py_RETURN_NONE;
}

static PyObject *py_lines(PyObject *module, PyObject *on)
{
    const int v = PyObject_IsTrue(on);
    if (v < 0) return NULL;
    koila__lines_on = v;
    Py_RETURN_NONE;
}

/* forget_leaf(real, copy): what tapes recorded as leaf `real` keeps its old contents in `copy` */
static PyObject *py_leaves_on(PyObject *module, PyObject *args)
{ /* leaves_on(tape) → [(value id, real)], batch leaves too */
    koila__tape *t;
    if (!PyArg_ParseTuple(args, "O!", &koila__tape_type, &t)) return NULL;
    PyObject *r = PyList_New(0);
    const uint32_t n = koila_graph_n_values(t->graph);
    for (uint32_t v = 0; r && v < n; v++) {
        if (!t->values[v].real || koila_value_get(t->graph, v).node != KOILA_NONE) continue;
        PyObject *pair = Py_BuildValue("IO", v, t->values[v].real);
        if (!pair || PyList_Append(r, pair) < 0) Py_CLEAR(r);
        Py_XDECREF(pair);
    }
    return r;
}

static PyObject *py_replace_leaf(PyObject *module, PyObject *args)
{ /* replace_leaf(tape, value id, tensor): its contents now come from `tensor` */
    koila__tape *t;
    unsigned v;
    PyObject *real;
    if (!PyArg_ParseTuple(args, "O!IO", &koila__tape_type, &t, &v, &real)) return NULL;
    if (v >= koila_graph_n_values(t->graph)) return PyErr_SetString(PyExc_IndexError, "no such value"), NULL;
    for (uint32_t i = 0; i < t->n_leaf_slots; i++) /* never found again by the old object: its slot becomes one that no version matches */
        if (t->leaves[i].real && t->leaves[i].value == v) t->leaves[i].version = UINT32_MAX;
    Py_INCREF(real);
    koila__tape_set_real(t, v, real);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "dispatch", (PyCFunction)(void (*)(void))dispatch, METH_FASTCALL, "dispatch(func, types, args, kwargs): LazyTensor.__torch_dispatch__" },
    { "record", (PyCFunction)(void (*)(void))py_record, METH_FASTCALL, "record(func, args, kwargs): the default path" },
    { "setup", py_setup, METH_VARARGS, "setup(LazyTensor, whether C++ owners show as a Python reference)" },
    { "tape_open", py_tape_open, METH_NOARGS, "The open tape; opens one." },
    { "current_tape", py_current_tape, METH_NOARGS, "The open tape, or None." },
    { "axis", py_axis, METH_O, "axis(size): a new batch axis of the open tape" },
    { "lazy_leaf", py_lazy_leaf, METH_VARARGS, "lazy_leaf(tensor, axis | None, dim)" },
    { "is_lazy", py_is_lazy, METH_O, "is_lazy(x)" },
    { "concrete", py_concrete, METH_O, "concrete(lazy) -> Tensor" },
    { "concrete_all", py_concrete_all, METH_O, "concrete_all([lazy, ...]) -> [Tensor, ...], one run" },
    { "is_concrete", py_is_concrete, METH_O, "is_concrete(lazy)" },
    { "handle_info", py_handle_info, METH_O, "handle_info(lazy) -> (tape, value id)" },
    { "tape_of", py_tape_of, METH_O, "tape_of(lazy)" },
    { "run", py_run, METH_VARARGS, "run(tape, [lazy, ...], commit_effects=False)" },
    { "run_whole", py_run_whole, METH_O, "run_whole([lazy, ...]): the reference executor" },
    { "effect", py_effect, METH_VARARGS, "effect(lazy, real): after the step real's contents are lazy's" },
    { "random", py_random, METH_VARARGS, "random(lazy, generator, state, words): the node that made lazy draws from a generator in this state" },
    { "become", py_become, METH_VARARGS, "become(lazy, other): lazy stands for what other does" },
    { "rewrap", py_rewrap, METH_O, "rewrap(lazy): its handle moved" },
    { "group_info", py_group_info, METH_O, "group_info(lazy) -> (is a view, wrappers of the group, which group)" },
    { "group_wrappers", py_group_wrappers, METH_O, "group_wrappers(lazy) -> [every lazy tensor that shares its memory]" },
    { "leaves_on", py_leaves_on, METH_VARARGS, "leaves_on(tape) -> [(value id, tensor), ...]" },
    { "replace_leaf", py_replace_leaf, METH_VARARGS, "replace_leaf(tape, value id, tensor)" },
    { "memo_info", py_memo_info, METH_NOARGS, "Sizes of the memo." },
    { "memo_clear", py_memo_clear, METH_NOARGS, "Forget every call seen." },
    { "lines", py_lines, METH_O, "lines(on): record source lines" },
    { 0 },
};

int koila__module_add(PyObject *m)
{
    opaque_ids = PyDict_New();
    opaque_objects = PyList_New(0);
    line_files = PyDict_New();
    if (!opaque_ids || !opaque_objects || !line_files) return -1;
    if (PyType_Ready(&koila__tape_type) < 0 || PyType_Ready(&koila__handle_type) < 0) return -1;
    if (PyModule_AddObjectRef(m, "Tape", (PyObject *)&koila__tape_type) < 0) return -1;
    return PyModule_AddFunctions(m, methods);
}
