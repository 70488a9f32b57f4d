/* arguments.c — walks a call's arguments once and collects the tensors and the tokens. The tokens,
 * with each tensor replaced by its meta, are the call's signature. */
#include "capture/record.h"

/* ---- opaque arguments: devices, layouts, memory formats, complex numbers, generators */

/* dict (type, object) → [id]; [None]: forgotten, koila__opaques_drop() takes the key out */
static PyObject *opaque_ids;
static PyObject *opaque_objects; /* list by id; None: forgotten */

/* Table and list change together: no Python code runs between, which may enter another object. */
static int remember_opaque(const char *text, PyObject *o, uint32_t *id)
{
    const Py_ssize_t n = PyList_GET_SIZE(opaque_objects);
    if (PyList_Append(opaque_objects, Py_None) < 0)
        return -1;
    const koila_status s = koila_table_opaque(koila__table, text, id);
    if (s == KOILA_OK) {
        koila_assert(*id <= (uint32_t)n && PyList_GET_ITEM(opaque_objects, *id) == Py_None);
        PyList_SetItem(opaque_objects, *id, Py_NewRef(o));
    } else {
        *id = KOILA_NONE;
        koila__raise(s);
    }
    /* the place at the end is taken, or was made for nothing */
    if (*id != (uint32_t)n) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (PyList_SetSlice(opaque_objects, n, n + 1, NULL) < 0)
            PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return s == KOILA_OK ? 0 : -1;
}

/* The id in an item of opaque_ids; KOILA_NONE: forgotten. */
static uint32_t id_in(PyObject *item)
{
    PyObject *id = PyList_GET_ITEM(item, 0);
    return id == Py_None ? KOILA_NONE : (uint32_t)PyLong_AsUnsignedLong(id);
}

uint32_t koila__opaque_id(PyObject *o)
{
    PyObject *key = PyTuple_Pack(2, Py_TYPE(o), o);
    if (!key)
        return KOILA_NONE;
    PyObject *found = PyDict_GetItemWithError(opaque_ids, key);
    uint32_t id = found ? id_in(found) : KOILA_NONE;
    if (id == KOILA_NONE && !PyErr_Occurred()) {
        PyObject *label = PyObject_Str(o);
        const char *text = label ? PyUnicode_AsUTF8(label) : NULL;
        if (text && remember_opaque(text, o, &id) == 0) {
            PyObject *n = Py_BuildValue("[I]", id);
            if (!n || PyDict_SetItem(opaque_ids, key, n) < 0)
                id = KOILA_NONE;
            Py_XDECREF(n);
        }
        Py_XDECREF(label);
    }
    Py_DECREF(key);
    return id;
}

/* The keys stay: a dict finds them by their own functions, which may be written in Python. */
void koila__opaques_forget(PyObject *gone)
{
    Py_ssize_t at = 0;
    PyObject *key, *item;
    while (PyDict_Next(opaque_ids, &at, &key, &item)) {
        const uint32_t id = id_in(item);
        if (id == KOILA_NONE || koila_table_has_opaque(koila__table, id))
            continue;
        if (PyList_Append(gone, PyList_GET_ITEM(opaque_objects, id)) < 0) {
            PyErr_Clear();
            Py_INCREF(PyList_GET_ITEM(opaque_objects, id)); /* no memory: it stays */
        }
        PyList_SetItem(opaque_objects, id, Py_NewRef(Py_None));
        PyList_SetItem(item, 0, Py_NewRef(Py_None));
    }
}

void koila__opaques_drop(void)
{
    PyObject *keys = PyDict_Keys(opaque_ids);
    for (Py_ssize_t i = 0; keys && i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i);
        PyObject *item = PyDict_GetItemWithError(opaque_ids, key);
        if (item && id_in(item) == KOILA_NONE && PyDict_DelItem(opaque_ids, key) < 0)
            PyErr_Clear();
    }
    PyErr_Clear();
    Py_XDECREF(keys);
}

PyObject *koila__opaque_object(uint32_t id) { return PyList_GetItem(opaque_objects, id); }

/* ---- the walk over the arguments */

void koila__walk_init(call_walk *w)
{
    memset(w, 0, offsetof(call_walk, kw));
    w->tok = w->tok_inline;
    w->in = w->in_inline;
    w->cap_tok = KOILA__N_TOKENS;
    w->cap_in = KOILA__N_INPUTS;
}

void koila__walk_deinit(call_walk *w)
{
    if (w->tok != w->tok_inline)
        PyMem_Free(w->tok);
    if (w->in != w->in_inline)
        PyMem_Free(w->in);
    Py_XDECREF(w->instead);
}

/* All zero except its kind, and so is the padding: tokens are hashed as bytes. */
koila_arg *koila__walk_push(call_walk *w, uint8_t kind)
{
    if (w->n_tok == w->cap_tok) {
        koila_arg *p = PyMem_Malloc(w->cap_tok * 4 * sizeof *p);
        if (!p) {
            PyErr_NoMemory();
            return NULL;
        }
        memcpy(p, w->tok, w->n_tok * sizeof *p);
        if (w->tok != w->tok_inline)
            PyMem_Free(w->tok);
        w->tok = p;
        w->cap_tok *= 4;
    }
    koila_arg *t = &w->tok[w->n_tok++];
    memset(t, 0, sizeof *t);
    t->kind = kind;
    return t;
}

static int push_input(call_walk *w, PyObject *o, koila__handle *h)
{
    if (w->n_in == w->cap_in) {
        call_input *p = PyMem_Malloc(w->cap_in * 4 * sizeof *p);
        if (!p) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(p, w->in, w->n_in * sizeof *p);
        if (w->in != w->in_inline)
            PyMem_Free(w->in);
        w->in = p;
        w->cap_in *= 4;
    }
    koila_arg *t = koila__walk_push(w, KOILA_ARG_TENSOR);
    if (!t)
        return -1;
    w->in[w->n_in++] = (call_input){ o, h, KOILA_NONE, w->n_tok - 1, w->writing };
    if (h) {
        w->n_lazy++;
        t->u.id = h->meta;
    }
    if (w->writing) {
        w->n_written++;
        if (!h)
            w->n_written_real++;
    }
    return 0;
}

static int push_number(call_walk *w, uint8_t kind, int64_t i)
{
    koila_arg *t = koila__walk_push(w, kind);
    if (!t)
        return -1;
    t->u.i = i;
    return 0;
}

static int push_float(call_walk *w, double f)
{
    koila_arg *t = koila__walk_push(w, KOILA_ARG_FLOAT);
    if (!t)
        return -1;
    t->u.f = f;
    return 0;
}

static int push_id(call_walk *w, uint8_t kind, uint32_t id)
{
    koila_arg *t = koila__walk_push(w, kind);
    if (!t)
        return -1;
    t->u.id = id;
    return 0;
}

static int push_text(call_walk *w, PyObject *o)
{
    uint32_t id;
    const char *text = PyUnicode_AsUTF8(o);
    if (!text)
        return -1;
    const koila_status s = koila_table_text(koila__table, text, &id);
    if (s) {
        koila__raise(s);
        return -1;
    }
    return push_id(w, KOILA_ARG_STR, id);
}

/* Raises OverflowError beyond 64 bits. */
static int push_int(call_walk *w, PyObject *o)
{
    const long long i = PyLong_AsLongLong(o);
    return i == -1 && PyErr_Occurred() ? -1 : push_number(w, KOILA_ARG_INT, i);
}

static int walk_rare(call_walk *w, PyObject *o)
{
    const int dtype = koila__dtype_of(o);
    if (dtype >= 0)
        return push_id(w, KOILA_ARG_DTYPE, (uint32_t)dtype);
    if (PyUnicode_Check(o))
        return push_text(w, o);
    if (PyFloat_Check(o)) /* a subclass of float, as below */
        return push_float(w, PyFloat_AS_DOUBLE(o));
    if (PyLong_Check(o))
        return push_int(w, o);
    const uint32_t id = koila__opaque_id(o);
    return id == KOILA_NONE ? -1 : push_id(w, KOILA_ARG_OPAQUE, id);
}

static int push_lazy(call_walk *w, PyObject *o)
{
    koila__handle *h = koila__handle_of(o);
    if (!h || !h->group) {
        PyErr_SetString(PyExc_RuntimeError, "koila: this lazy tensor has no value yet");
        return -1;
    }
    h->wrapper = o;
    return push_input(w, o, h);
}

static int walk_value(call_walk *w, PyObject *o, bool in_list);

static int walk_list(call_walk *w, PyObject *list)
{
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(list);
    koila_arg *t = koila__walk_push(w, KOILA_ARG_LIST);
    if (!t)
        return -1;
    t->n = (uint32_t)n;
    for (Py_ssize_t i = 0; i < n; i++)
        if (walk_value(w, PySequence_Fast_GET_ITEM(list, i), true) < 0)
            return -1;
    return 0;
}

/* Tests the commonest types first: this runs for every argument of every call. */
static int walk_value(call_walk *w, PyObject *o, bool in_list)
{
    PyTypeObject *type = Py_TYPE(o);
    if (type == koila__lazy_class)
        return push_lazy(w, o);
    if (type == &PyLong_Type)
        return push_int(w, o);
    if (type == &PyList_Type || type == &PyTuple_Type) {
        if (in_list) {
            koila__unsupported("an operator with nested lists of arguments");
            return -1;
        }
        return walk_list(w, o);
    }
    if (o == Py_None)
        return koila__walk_push(w, KOILA_ARG_ABSENT) ? 0 : -1;
    if (type == &PyBool_Type)
        return push_number(w, KOILA_ARG_BOOL, o == Py_True);
    if (type == &PyFloat_Type)
        return push_float(w, PyFloat_AS_DOUBLE(o));
    if (!koila__is_tensor(o))
        return walk_rare(w, o);
    return koila__is_lazy(o) ? push_lazy(w, o) : push_input(w, o, NULL);
}

static int walk_keyword(call_walk *w, const op_info *op, PyObject *name, PyObject *value)
{
    if (w->n_kw == KOILA__N_KEYWORDS) {
        koila__unsupported("an operator with more than %d keyword arguments", KOILA__N_KEYWORDS);
        return -1;
    }
    const char *text = PyUnicode_AsUTF8(name);
    if (!text)
        return -1;
    const koila_status s = koila_table_text(koila__table, text, &w->kw[w->n_kw++]);
    if (s) {
        koila__raise(s);
        return -1;
    }
    w->writing = false;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(op->written_kw); k++)
        if (PyUnicode_Compare(PyTuple_GET_ITEM(op->written_kw, k), name) == 0)
            w->writing = true;
    return walk_value(w, value, false);
}

int koila__walk_call(call_walk *w, const op_info *op, PyObject *args, PyObject *kwargs)
{
    w->n_pos = (uint32_t)PyTuple_GET_SIZE(args);
    for (uint32_t i = 0; i < w->n_pos; i++) {
        w->writing = op->written >> i & 1;
        if (walk_value(w, PyTuple_GET_ITEM(args, i), false) < 0)
            return -1;
    }
    w->writing = false;
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (kwargs && PyDict_Next(kwargs, &at, &name, &value))
        if (walk_keyword(w, op, name, value) < 0)
            return -1;
    w->writing = false;
    return 0;
}

/* Since the inputs were resolved Python may have run (a shape function, the collector, a line seen
 * for the first time), and have written them or moved them on. */
bool koila__walk_holds(const call_walk *w)
{
    for (uint32_t i = 0; i < w->n_in; i++) {
        const koila__handle *h = w->in[i].h;
        if (!h)
            continue;
        const koila__group *g = h->group;
        if (!g || g->tape != w->tape || h->gen != g->gen ||
            (w->in[i].value != h->value && w->in[i].value != g->cur))
            return false;
    }
    return true;
}

int koila__arguments_init(void)
{
    opaque_ids = PyDict_New();
    opaque_objects = PyList_New(0);
    return opaque_ids && opaque_objects ? 0 : -1;
}
