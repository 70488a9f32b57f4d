/* source_line.c — finds the user's line that records now: the nearest frame with a file that is
 * neither torch's nor koila's. */
#include "memlab/credit.h"
#include "capture/record.h"

#include <frameobject.h> /* PyFrame_GetBack on 3.10 */

int koila__lines_on = 1;
/* dict code object → None (library) or file name; keeps the code objects alive */
static PyObject *line_files;
#define LINE_SLOTS 8192
static struct line_slot {
    PyCodeObject *code; /* borrowed from line_files' keys */
    uint64_t tape;      /* uid (addresses are reused) of the tape whose graph gave `id` */
    int lasti;
    uint32_t line, id;
} line_slots[LINE_SLOTS];
static struct code_slot {
    PyCodeObject *code; /* borrowed from line_files' keys */
    const char *file;   /* NULL: library */
} code_slots[LINE_SLOTS];

static const char *file_of(PyCodeObject *code, bool *failed)
{
    struct code_slot *s = &code_slots[((uintptr_t)code >> 5) & (LINE_SLOTS - 1)];
    if (s->code == code)
        return s->file;
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
        if (!file) {
            *failed = true;
            return NULL;
        }
    }
    s->code = code;
    s->file = file == Py_None ? NULL : PyUnicode_AsUTF8(file);
    return s->file;
}

uint32_t koila__line_now(koila__tape *t)
{
    koila_graph *g = t->graph;
    /* koila.memlab learns how many nodes there were before this one */
    if (koila__lines_enabled)
        koila__nodes_captured(t->uid, koila_graph_n_nodes(g));
    if (!koila__lines_on)
        return KOILA_NONE;
    PyFrameObject *f = PyEval_GetFrame();
    if (!f)
        return KOILA_NONE;
    Py_INCREF(f);
    uint32_t id = KOILA_NONE;
    for (int depth = 0; f && depth < 64; depth++) {
        PyCodeObject *code = PyFrame_GetCode(f);
        Py_DECREF(code); /* the frame keeps it */
        bool failed = false;
        const char *file = file_of(code, &failed);
        if (failed)
            break;
        if (file) {
#if PY_VERSION_HEX >= 0x030b0000
            const int lasti = PyFrame_GetLasti(f);
#else
            const int lasti = -PyFrame_GetLineNumber(f) - 1;
#endif
            struct line_slot *s =
                &line_slots[(((uintptr_t)code >> 5) * 31 + (unsigned)lasti) & (LINE_SLOTS - 1)];
            const bool known = s->code == code && s->lasti == lasti;
            if (known && s->tape == t->uid) {
                id = s->id;
                break;
            }
            /* slow: it walks the code's table of lines from the start */
            const uint32_t line = known ? s->line : (uint32_t)PyFrame_GetLineNumber(f);
            if (koila_graph_line(g, file, line, &id) == KOILA_OK)
                *s = (struct line_slot){ code, t->uid, lasti, line, id };
            else
                id = KOILA_NONE;
            break;
        }
        PyFrameObject *back = PyFrame_GetBack(f);
        Py_DECREF(f);
        f = back;
    }
    Py_XDECREF(f);
    return id;
}

int koila__source_line_init(void)
{
    line_files = PyDict_New();
    return line_files ? 0 : -1;
}
