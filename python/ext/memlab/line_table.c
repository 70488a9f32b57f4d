/* line_table.c — the table of a line profiler for Python: its functions, and access to the rows,
 * which are in src/memory/linetab.c.
 *
 * LineTable is equivalent to:
 *     class LineTable:                    # what one profiler has recorded
 *         def add(self, code, name, file, first_line, n_lines, source): ...  # False: was there
 *         def enable(self) / disable(self) / clear(self)
 *         def render(self, format, columns, device=-1, which=None, all=False) -> str
 *         def table_records(self, device=-1, which=None) -> list[dict]
 *         def frozen(self, which=None) -> LineTable
 *         names: list[str]; codes: list; enabled: bool; target_device, stats_mode: int
 */
#include "memlab/memlab.h"

#include <structmember.h>

#include "base/vec.h"
#include "memory/columns.h"
#include "memory/linetext.h"

#define LINES (&koila__memlab_lines)

typedef struct entry {
    PyObject *code, *name, *file, *source; /* source: list of str, or None */
    int first_line;
    koila__func *func;
} entry;

typedef struct line_table {
    PyObject_HEAD
    koila__wish wish;
    VEC(entry) entries;
} line_table;

/* Starts or stops watching the code of an entry, as the enabled profilers need it. Code that runs
 * stays watched, so that its end is seen. */
static int refresh(entry *e)
{
    koila__code *c = e->func->code;
    bool runs = c->n_activations && koila__lines_enabled;
    return koila__monitor_code(e->code, runs || koila__code_wanted(c));
}

/* Releases the codes that no profiler needs and that do not run. */
static void reap(void)
{
    const void *key = koila__lines_reap(LINES);
    for (; key; key = koila__lines_reap(LINES))
        Py_DECREF((PyObject *)key);
}

/* Must the code of an entry stay watched when the entry goes? */
static bool is_wanted_by_others(const entry *e)
{
    const koila__code *c = e->func->code;
    if (c->n_activations && koila__lines_enabled)
        return true;
    for (const koila__func *f = c->funcs; f; f = f->next)
        if (f != e->func && f->wish->enabled)
            return true;
    return false;
}

static void drop_entries(line_table *t)
{
    for (uint32_t i = 0; i < t->entries.n; i++) {
        entry *e = &t->entries.at[i];
        if (t->wish.enabled && !is_wanted_by_others(e) && koila__monitor_code(e->code, false) < 0)
            PyErr_Clear();
        if (koila__func_free(LINES, e->func))
            Py_DECREF(e->code); /* the reference that LINES held */
        Py_DECREF(e->code);
        Py_DECREF(e->name);
        Py_DECREF(e->file);
        Py_DECREF(e->source);
    }
    koila__vec_free(&koila__libc, &t->entries);
    reap();
}

static PyObject *table_add(line_table *t, PyObject *args)
{
    PyObject *code, *name, *file, *source;
    int first_line, n_lines;
    if (!PyArg_ParseTuple(args, "O!UUiiO:add", &PyCode_Type, &code, &name, &file, &first_line,
                          &n_lines, &source))
        return NULL;
    if (source != Py_None && !PyList_Check(source))
        return PyErr_Format(PyExc_TypeError, "add: source must be a list or None");
    for (uint32_t i = 0; i < t->entries.n; i++)
        if (t->entries.at[i].code == code)
            Py_RETURN_FALSE;
    if (!koila__vec_reserve(&koila__libc, &t->entries, 1))
        return PyErr_NoMemory();
    reap();
    bool known = koila__lines_find(LINES, code) != NULL;
    koila__func *func;
    if (koila__func_new(LINES, code, first_line, n_lines, &t->wish, &func) != KOILA_OK)
        return PyErr_NoMemory();
    koila_assert(func->code->key == code);
    if (!known)
        Py_INCREF(code); /* for LINES; drop_entries() or reap() releases it */
    entry *e = &t->entries.at[t->entries.n++];
    *e = (entry){ Py_NewRef(code),   Py_NewRef(name), Py_NewRef(file),
                  Py_NewRef(source), first_line,      func };
    if (t->wish.enabled && (refresh(e) < 0 || koila__monitor_any(true) < 0))
        return NULL;
    Py_RETURN_TRUE;
}

static int set_enabled(line_table *t, bool on)
{
    if (t->wish.enabled == on)
        return 0;
    if (on)
        koila__memlab_listen();
    t->wish.enabled = on;
    koila__credit_enable(on);
    for (uint32_t i = 0; i < t->entries.n; i++)
        if (refresh(&t->entries.at[i]) < 0)
            return -1;
    if (on || koila__lines_enabled == 0)
        return koila__monitor_any(on);
    return 0;
}
static PyObject *table_enable(line_table *t, PyObject *none)
{
    if (set_enabled(t, true) < 0)
        return NULL;
    Py_RETURN_NONE;
}
static PyObject *table_disable(line_table *t, PyObject *none)
{
    if (set_enabled(t, false) < 0)
        return NULL;
    Py_RETURN_NONE;
}
static PyObject *table_clear(line_table *t, PyObject *none)
{
    drop_entries(t);
    Py_RETURN_NONE;
}

/* ---- selecting and rendering rows */

/* Entry number `item` (NULL: i) of a table; NULL with an exception set. */
static entry *entry_at(line_table *t, PyObject *item, Py_ssize_t i)
{
    Py_ssize_t k = item ? PyLong_AsSsize_t(item) : i;
    if (k >= 0 && k < (Py_ssize_t)t->entries.n)
        return &t->entries.at[k];
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "which: %zd is not in range(%u)", k, (unsigned)t->entries.n);
    return NULL;
}

/* Entries chosen by a sequence of indices, or all. A PyMem array of pointers; NULL with an
 * exception set. */
static entry **chosen(line_table *t, PyObject *which, Py_ssize_t *n)
{
    PyObject *list = NULL;
    if (which != Py_None) {
        list = PySequence_Fast(which, "which: expected a sequence of indices");
        if (!list)
            return NULL;
    }
    *n = list ? PySequence_Fast_GET_SIZE(list) : (Py_ssize_t)t->entries.n;
    entry **out = PyMem_Malloc((size_t)(*n + 1) * sizeof *out);
    if (!out)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; out && i < *n; i++) {
        out[i] = entry_at(t, list ? PySequence_Fast_GET_ITEM(list, i) : NULL, i);
        if (!out[i]) {
            PyMem_Free(out);
            out = NULL;
        }
    }
    Py_XDECREF(list);
    return out;
}

static bool check_device(int device)
{
    if (device < LINES->meter->n_devices)
        return true;
    PyErr_Format(PyExc_ValueError, "device %d: there are %d", device, LINES->meter->n_devices);
    return false;
}

/* One column name; false with an exception set. */
static bool parse_column(PyObject *item, koila__column *out)
{
    koila_error err = KOILA_ERROR_INIT;
    if (!PyUnicode_Check(item)) {
        PyErr_Format(PyExc_TypeError, "columns: expected names, got %R", item);
        return false;
    }
    const char *name = PyUnicode_AsUTF8(item);
    if (name && koila__column_parse(name, out, &err) == KOILA_OK)
        return true;
    if (name)
        PyErr_SetString(PyExc_ValueError, err.text);
    return false;
}

/* Parse column names; a PyMem array, NULL with an exception set. */
static koila__column *parse_columns(PyObject *names, Py_ssize_t *n)
{
    PyObject *list = PySequence_Fast(names, "columns: expected a sequence of names");
    if (!list)
        return NULL;
    *n = PySequence_Fast_GET_SIZE(list);
    koila__column *out = PyMem_Malloc((size_t)(*n + 1) * sizeof *out);
    if (!out)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; out && i < *n; i++) {
        if (!parse_column(PySequence_Fast_GET_ITEM(list, i), &out[i])) {
            PyMem_Free(out);
            out = NULL;
        }
    }
    Py_DECREF(list);
    return out;
}

static PyObject *check_columns(PyObject *self, PyObject *names)
{
    Py_ssize_t n;
    koila__column *columns = parse_columns(names, &n);
    if (!columns)
        return NULL;
    bool needs = false;
    for (Py_ssize_t i = 0; i < n; i++)
        needs |= koila__column_needs_stats(&columns[i]);
    PyMem_Free(columns);
    return PyBool_FromLong(needs);
}

/* The UTF-8 source lines of an entry, borrowed from its list; a PyMem array. */
static const char **source_of(const entry *e, size_t *n)
{
    *n = e->source == Py_None ? 0 : (size_t)PyList_GET_SIZE(e->source);
    const char **lines = PyMem_Calloc(*n + 1, sizeof *lines);
    for (size_t i = 0; lines && i < *n; i++) {
        PyObject *line = PyList_GET_ITEM(e->source, (Py_ssize_t)i); // borrowed
        lines[i] = PyUnicode_Check(line) ? PyUnicode_AsUTF8(line) : NULL;
        if (!lines[i]) {
            PyErr_Clear(); /* lone surrogates: show the line as empty rather than fail */
            lines[i] = "";
        }
    }
    return lines;
}

static koila__format format_of(const char *name)
{
    if (strcmp(name, "html") == 0)
        return KOILA__FORMAT_HTML;
    if (strcmp(name, "json") == 0)
        return KOILA__FORMAT_JSON;
    if (strcmp(name, "csv") == 0)
        return KOILA__FORMAT_CSV;
    return KOILA__FORMAT_TEXT;
}

/* Fills the input of koila__lines_write() for an entry: text borrowed from it, and view->code, a
 * PyMem array. False with an exception set. */
static bool view_of(const entry *e, koila__view *view)
{
    const char *name = PyUnicode_AsUTF8(e->name);
    const char *file = name ? PyUnicode_AsUTF8(e->file) : NULL;
    if (!file)
        return false;
    *view = (koila__view){ name, file, e->first_line, e->func, 0, NULL };
    view->code = source_of(e, &view->n_code);
    if (!view->code)
        PyErr_NoMemory();
    return view->code != NULL;
}

static PyObject *table_render(line_table *t, PyObject *args, PyObject *kwargs)
{
    static char *names[] = { "format", "columns", "device", "which", "all", NULL };
    const char *format;
    PyObject *column_names, *which = Py_None, *result = NULL;
    int device = -1, all = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO|iOp:render", names, &format, &column_names,
                                     &device, &which, &all))
        return NULL;
    if (!check_device(device))
        return NULL;
    Py_ssize_t n_columns, n = 0;
    koila__column *columns = parse_columns(column_names, &n_columns);
    entry **entries = columns ? chosen(t, which, &n) : NULL;
    koila__view *views = entries ? PyMem_Calloc((size_t)n + 1, sizeof *views) : NULL;
    koila__text out;
    koila__text_init(&out, NULL);
    bool ok = views != NULL;
    for (Py_ssize_t i = 0; ok && i < n; i++)
        ok = view_of(entries[i], &views[i]);
    if (ok) {
        koila__lines_write(LINES, format_of(format), views, (size_t)n, columns, (size_t)n_columns,
                           device, all, &out);
        if (koila__text_ok(&out))
            result = PyUnicode_DecodeUTF8(out.s ? out.s : "", (Py_ssize_t)out.n, "replace");
    }
    if (!result && !PyErr_Occurred())
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; views && i < n; i++)
        PyMem_Free((void *)views[i].code);
    koila__text_deinit(&out);
    PyMem_Free(views);
    PyMem_Free(entries);
    PyMem_Free(columns);
    return result;
}

/* The type of frozen tables, always a plain LineTable: a copy of the chosen entries as they are
 * now. */
static PyTypeObject *table_type;
static bool add_copy(line_table *copy, const entry *e)
{
    koila__func *func;
    if (!koila__vec_reserve(&koila__libc, &copy->entries, 1) ||
        koila__func_copy(LINES, e->func, &copy->wish, &func) != KOILA_OK) {
        PyErr_NoMemory();
        return false;
    }
    copy->entries.at[copy->entries.n++] =
        (entry){ Py_NewRef(e->code),   Py_NewRef(e->name), Py_NewRef(e->file),
                 Py_NewRef(e->source), e->first_line,      func };
    return true;
}
static PyObject *table_frozen(line_table *t, PyObject *args)
{
    PyObject *which = Py_None;
    if (!PyArg_ParseTuple(args, "|O:frozen", &which))
        return NULL;
    Py_ssize_t n;
    entry **entries = chosen(t, which, &n);
    line_table *copy = entries ? (line_table *)table_type->tp_alloc(table_type, 0) : NULL;
    if (copy) {
        copy->wish = t->wish;
        copy->wish.enabled = false;
    }
    for (Py_ssize_t i = 0; copy && i < n; i++)
        if (!add_copy(copy, entries[i]))
            Py_CLEAR(copy);
    PyMem_Free(entries);
    return (PyObject *)copy;
}

static bool put(PyObject *dict, const char *key, PyObject *value)
{
    int r = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return r == 0;
}

/* Adds every named column, and every metric.pool.stat of this row on this device. */
static bool put_columns(PyObject *dict, const koila__row *row, int device)
{
    koila__column c = { .word = KOILA__WORD_HITS };
    char name[64];
    double v;
    for (int w = 0; w < KOILA__WORD_METRIC; w++) {
        c.word = (enum koila__word)w;
        bool known = row && koila__column_value(LINES, &c, row, device, &v);
        if (!put(dict, koila__column_name(&c, name),
                 known ? PyLong_FromDouble(v) : Py_NewRef(Py_None)))
            return false;
    }
    c.word = KOILA__WORD_METRIC;
    for (int i = 0; i < KOILA__METRIC_N * KOILA__POOL_N * KOILA__STAT_N; i++) {
        c.metric = (enum koila__metric)(i / (KOILA__POOL_N * KOILA__STAT_N));
        c.pool = (enum koila__pool)(i / KOILA__STAT_N % KOILA__POOL_N);
        c.stat = (enum koila__stat)(i % KOILA__STAT_N);
        if (row && koila__column_value(LINES, &c, row, device, &v) &&
            !put(dict, koila__column_name(&c, name), PyLong_FromDouble(v)))
            return false;
    }
    return true;
}

/* The dict of one source line: its place, text and numbers. NULL with an exception set. */
static PyObject *record_of(const entry *e, Py_ssize_t r, int device)
{
    const koila__func *f = e->func;
    const koila__row *row = r < f->code->n_rows ? &f->rows[r] : NULL;
    bool has_text = e->source != Py_None && r < PyList_GET_SIZE(e->source);
    PyObject *text = has_text ? Py_NewRef(PyList_GET_ITEM(e->source, r)) : PyUnicode_FromString("");
    PyObject *d = PyDict_New();
    bool ok = d && put(d, "function", Py_NewRef(e->name)) && put(d, "file", Py_NewRef(e->file)) &&
              put(d, "line", PyLong_FromSsize_t(e->first_line + r)) &&
              put(d, "code", Py_XNewRef(text)) && put_columns(d, row, device);
    Py_XDECREF(text);
    if (!ok)
        Py_CLEAR(d);
    return d;
}

static bool add_records(PyObject *out, const entry *e, int device)
{
    Py_ssize_t n_code = e->source == Py_None ? 0 : PyList_GET_SIZE(e->source);
    Py_ssize_t n_rows = e->func->code->n_rows;
    bool ok = true;
    for (Py_ssize_t r = 0; ok && (r < n_code || r < n_rows); r++) {
        PyObject *d = record_of(e, r, device);
        ok = d && PyList_Append(out, d) == 0;
        Py_XDECREF(d);
    }
    return ok;
}

static PyObject *table_records(line_table *t, PyObject *args)
{
    int device = -1;
    PyObject *which = Py_None;
    if (!PyArg_ParseTuple(args, "|iO:records", &device, &which))
        return NULL;
    if (!check_device(device))
        return NULL;
    Py_ssize_t n;
    entry **entries = chosen(t, which, &n);
    PyObject *out = entries ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; out && i < n; i++)
        if (!add_records(out, entries[i], device))
            Py_CLEAR(out);
    PyMem_Free(entries);
    return out;
}

static PyObject *table_names(line_table *t, void *closure)
{
    PyObject *list = PyList_New(t->entries.n);
    for (uint32_t i = 0; list && i < t->entries.n; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(t->entries.at[i].name));
    return list;
}
static PyObject *table_codes(line_table *t, void *closure)
{
    PyObject *list = PyList_New(t->entries.n);
    for (uint32_t i = 0; list && i < t->entries.n; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(t->entries.at[i].code));
    return list;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    line_table *t = (line_table *)type->tp_alloc(type, 0);
    if (t)
        t->wish.stats_mode = KOILA__STATS_AUTO;
    return (PyObject *)t;
}
static void table_dealloc(line_table *t)
{
    PyTypeObject *type = Py_TYPE(t);
    PyObject *error_type, *value, *where;
    PyErr_Fetch(&error_type, &value, &where);
    if (set_enabled(t, false) < 0)
        PyErr_Clear();
    drop_entries(t);
    PyErr_Restore(error_type, value, where);
    type->tp_free(t);
    Py_DECREF(type);
}

static PyMethodDef table_methods[] = {
    { "add", (PyCFunction)table_add, METH_VARARGS,
      "add(code, name, file, first_line, n_lines, source) -> bool: record this code too." },
    { "enable", (PyCFunction)table_enable, METH_NOARGS, "Record from now on." },
    { "disable", (PyCFunction)table_disable, METH_NOARGS, "Stop recording and keep the records." },
    { "clear", (PyCFunction)table_clear, METH_NOARGS, "Drop functions and records." },
    { "render", (PyCFunction)(void (*)(void))table_render, METH_VARARGS | METH_KEYWORDS,
      "render(format, columns, device=-1, which=None, all=False) -> str; format: text, html, json "
      "or csv." },
    { "frozen", (PyCFunction)table_frozen, METH_VARARGS,
      "frozen(which=None) -> LineTable: a copy with the present records." },
    { "table_records", (PyCFunction)table_records, METH_VARARGS,
      "table_records(device=-1, which=None) -> list of dicts, one per source line." },
    { NULL, NULL, 0, NULL },
};
static PyMemberDef table_members[] = {
    { "enabled", T_BOOL, offsetof(line_table, wish.enabled), READONLY, "Recording now?" },
    { "target_device", T_INT, offsetof(line_table, wish.target), 0,
      "Device whose numbers a row shows: 0 the CPU, 1 + i accelerator i." },
    { "stats_mode", T_INT, offsetof(line_table, wish.stats_mode), 0, "0 hook, 1 auto, 2 full." },
    { NULL, 0, 0, 0, NULL },
};
static PyGetSetDef table_getset[] = {
    { "names", (getter)table_names, NULL, "Qualified names, in order of registration.", NULL },
    { "codes", (getter)table_codes, NULL, "Their code objects.", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};
static PyType_Slot table_slots[] = {
    { Py_tp_doc, "What one line profiler has recorded; see line_table.c." },
    { Py_tp_new, table_new },
    { Py_tp_dealloc, table_dealloc },
    { Py_tp_methods, table_methods },
    { Py_tp_members, table_members },
    { Py_tp_getset, table_getset },
    { 0, NULL },
};
static PyType_Spec table_spec = { "koila._core.LineTable", sizeof(line_table), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, table_slots };

static PyObject *lines_way(PyObject *self, PyObject *none)
{
    return PyUnicode_FromString(koila__monitor_way());
}
static PyObject *lines_check(PyObject *self, PyObject *none)
{
    return PyBool_FromLong(!koila__memlab_stack || koila__stack_check(LINES, koila__memlab_stack));
}
static PyMethodDef methods[] = {
    { "check_columns", check_columns, METH_O,
      "check_columns(names) -> bool: does one need the allocator's statistics? ValueError if "
      "unknown." },
    { "lines_way", lines_way, METH_NOARGS,
      "How lines are observed: monitoring, frame evaluation or tracer." },
    { "lines_check", lines_check, METH_NOARGS, "Are this thread's activations consistent?" },
    { NULL, NULL, 0, NULL },
};

int koila__line_table_add_module(PyObject *m)
{
    PyObject *type = PyType_FromSpec(&table_spec);
    table_type = (PyTypeObject *)type;
    if (!type || PyModule_AddObject(m, "LineTable", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    return PyModule_AddFunctions(m, methods);
}
