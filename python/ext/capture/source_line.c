/* source_line.c — finds the user's line that records now: the nearest frame with a file that is
 * neither torch's nor koila's. A GPU's backward runs on a thread of torch's, where there is no such
 * frame: there it is the line that waits for that backward. */
#include "memlab/credit.h"
#include "capture/record.h"

#include <frameobject.h> /* PyFrame_GetBack on 3.10 */

int koila__lines_on = 1;
/* dict address of a code object → (the object, None (library) or file name). By address, since code
 * of two files, or of a cell that ran twice, may be equal. At MOST_CODES it is begun anew, for some
 * programs make code all the time. */
static PyObject *line_files;
#define MOST_CODES 8192
#define LINE_SLOTS 8192
static struct line_slot {
    PyCodeObject *code; /* borrowed from line_files */
    uint64_t tape;      /* uid (addresses are reused) of the tape whose graph gave `id` */
    int lasti;
    uint32_t line, id;
} line_slots[LINE_SLOTS];
static struct code_slot {
    PyCodeObject *code; /* borrowed from line_files */
    PyObject *file;     /* borrowed from line_files; NULL: library */
} code_slots[LINE_SLOTS];

/* When line_files is full. Objects that die may run Python: everything is empty by then. */
static void forget_codes(void)
{
    PyObject *fresh = PyDict_GET_SIZE(line_files) < MOST_CODES ? NULL : PyDict_New();
    if (!fresh) {
        PyErr_Clear();
        return;
    }
    memset(line_slots, 0, sizeof line_slots);
    memset(code_slots, 0, sizeof code_slots);
    Py_SETREF(line_files, fresh);
}

/* Asks Python whose file that of `code` is, and remembers the answer. -1 + error */
static int ask_for_file(PyCodeObject *code, PyObject *address)
{
    PyObject *f = koila__helper("user_file");
    PyObject *answer = f ? PyObject_CallOneArg(f, code->co_filename) : NULL;
    PyObject *known = answer ? PyTuple_Pack(2, (PyObject *)code, answer) : NULL;
    const int rc = known ? PyDict_SetItem(line_files, address, known) : -1;
    Py_XDECREF(f);
    Py_XDECREF(answer);
    Py_XDECREF(known);
    return rc;
}

/* Borrowed until Python runs; NULL: library. */
static PyObject *file_of(PyCodeObject *code, bool *failed)
{
    struct code_slot *s = &code_slots[((uintptr_t)code >> 5) & (LINE_SLOTS - 1)];
    if (s->code == code)
        return s->file;
    forget_codes();
    PyObject *address = PyLong_FromVoidPtr(code);
    PyObject *known = address ? PyDict_GetItemWithError(line_files, address) : NULL;
    if (!known && address && !PyErr_Occurred() && ask_for_file(code, address) == 0)
        known = PyDict_GetItemWithError(line_files, address);
    Py_XDECREF(address);
    if (!known) {
        PyErr_Clear();
        *failed = true;
        return NULL;
    }
    PyObject *file = PyTuple_GET_ITEM(known, 1);
    s->code = code;
    s->file = file == Py_None ? NULL : file;
    return s->file;
}

/* The user's nearest frame on this thread, a new reference, and its file, borrowed until Python
 * runs; NULL: there is none. */
static PyFrameObject *user_frame(PyObject **file)
{
    PyFrameObject *f = PyEval_GetFrame();
    Py_XINCREF(f);
    bool failed = false;
    for (int depth = 0; f && depth < 64; depth++) {
        PyCodeObject *code = PyFrame_GetCode(f);
        Py_DECREF(code); /* the frame keeps it */
        *file = file_of(code, &failed);
        if (*file)
            return f;
        PyFrameObject *back = failed ? NULL : PyFrame_GetBack(f);
        Py_DECREF(f);
        f = back;
    }
    Py_XDECREF(f);
    return NULL;
}

/* Line `line` of `file` in the graph of `t`; KOILA_NONE: no memory. */
static uint32_t line_in(koila__tape *t, PyObject *file, uint32_t line)
{
    uint32_t id = KOILA_NONE;
    const char *name = PyUnicode_AsUTF8(file);
    if (!name)
        PyErr_Clear();
    else if (koila_graph_line(t->graph, name, line, &id) != KOILA_OK)
        id = KOILA_NONE;
    return id;
}

/* The module whose forward runs on this thread, by name; NULL: none, or nobody wants to know. */
static _Thread_local PyObject *module_now;

PyObject *koila__module_is(PyObject *name)
{
    PyObject *before = module_now ? module_now : Py_NewRef(Py_None);
    module_now = name == Py_None ? NULL : Py_NewRef(name);
    return before;
}

/* The same where that module is named beside the file: "train.py (layers.3.conv)". */
static uint32_t line_in_module(PyFrameObject *f, PyObject *file, koila__tape *t)
{
    PyObject *where = PyUnicode_FromFormat("%U (%U)", file, module_now);
    if (!where) {
        PyErr_Clear();
        return KOILA_NONE;
    }
    const uint32_t id = line_in(t, where, (uint32_t)PyFrame_GetLineNumber(f));
    Py_DECREF(where);
    return id;
}

/* The line of frame `f`, in the graph of `t`. */
static uint32_t line_of(PyFrameObject *f, PyObject *file, koila__tape *t)
{
    if (module_now)
        return line_in_module(f, file, t);
    PyCodeObject *code = PyFrame_GetCode(f);
    Py_DECREF(code); /* the frame keeps it */
#if PY_VERSION_HEX >= 0x030b0000
    const int lasti = PyFrame_GetLasti(f);
#else
    const int lasti = -PyFrame_GetLineNumber(f) - 1;
#endif
    struct line_slot *s =
        &line_slots[(((uintptr_t)code >> 5) * 31 + (unsigned)lasti) & (LINE_SLOTS - 1)];
    const bool known = s->code == code && s->lasti == lasti;
    if (known && s->tape == t->uid)
        return s->id;
    /* slow: it walks the code's table of lines from the start */
    const uint32_t line = known ? s->line : (uint32_t)PyFrame_GetLineNumber(f);
    const uint32_t id = line_in(t, file, line);
    if (id == KOILA_NONE)
        return KOILA_NONE;
    *s = (struct line_slot){ code, t->uid, lasti, line, id };
    return id;
}

uint32_t koila__line_now(koila__tape *t)
{
    /* koila.memlab learns how many nodes there were before this one */
    if (koila__lines_enabled)
        koila__nodes_captured(t->uid, koila_graph_n_nodes(t->graph));
    if (!koila__lines_on)
        return KOILA_NONE;
    PyObject *file = NULL;
    PyFrameObject *f = user_frame(&file);
    if (f) {
        const uint32_t id = line_of(f, file, t);
        Py_DECREF(f);
        return id;
    }
    const koila__context *c = koila__context_peek();
    if (!c)
        c = t->context;
    return c->waiting_file ? line_in(t, c->waiting_file, c->waiting_line) : KOILA_NONE;
}

void koila__line_waits(bool begins)
{
    koila__context *c = koila__context_now();
    if (!c) {
        PyErr_Clear(); /* its operators have no line */
        return;
    }
    Py_CLEAR(c->waiting_file);
    PyObject *file = NULL;
    PyFrameObject *f = begins && koila__lines_on ? user_frame(&file) : NULL;
    if (!f)
        return;
    Py_XSETREF(c->waiting_file, Py_NewRef(file));
    c->waiting_line = (uint32_t)PyFrame_GetLineNumber(f);
    Py_DECREF(f);
}

int koila__source_line_init(void)
{
    line_files = PyDict_New();
    return line_files ? 0 : -1;
}
