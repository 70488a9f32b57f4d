/* lines.c — the line profiler's eyes: which line of which function runs now, told to
 * src/memory/linetab.c.
 *
 * Unprofiled code must run at full speed, so nothing global is switched on:
 *   3.12+       sys.monitoring, local events on the profiled code objects only: LINE, PY_START,
 *               PY_RESUME, PY_YIELD, PY_RETURN; the two that CPython offers globally only,
 *               PY_UNWIND and PY_THROW, cost nothing until an exception unwinds.
 *   3.10, 3.11  a frame-evaluation function (PEP 523) sees every entry, generator resumes too, and
 *               compares one pointer. For a profiled code it pushes an activation, lets the frame
 *               run with a C tracer on, and pops. While an unprofiled frame runs below a profiled
 *               one the tracer is off (cframe.use_tracing), unless a debugger or cProfile was there
 *               first: then all events are passed on.
 *   otherwise   (all tool ids taken) the plain C tracer on all threads.
 * Every way ends in three calls: koila__lines_enter(), _line(), _leave(). Everything here runs with
 * the GIL.
 *
 * LineTable is equivalent to:
 *     class LineTable:                    # what one profiler has recorded def add(self, code,
 *                                         name, file, first_line, source): ...    # -> False if it
 *                                         was there def enable(self) / disable(self) / clear(self)
 *                                         def render(self, format, columns, device=-1, which=None,
 *                                         all=False) -> str def records(self, device=-1,
 *                                         which=None) -> list[dict] names: list[str]; enabled:
 *                                         bool; target, stats_mode: int
 */
#include "memlab/memlab.h"

#include <frameobject.h>
#include <structmember.h>

#include "memory/columns.h"
#include "memory/linetext.h"

#define LINES (&koila__memlab_lines)

/* When the last profiler is disabled inside profiled code, the end of that code is not seen any
 * more (but by frame evaluation). A stack of an older epoch is therefore emptied before it is used
 * again. */
static uint64_t epoch;
static __thread uint64_t my_epoch;
static koila__stack *my_stack(void)
{
    koila__stack *s = koila__memlab_my_stack();
    if (s && my_epoch != epoch) {
        koila__stack_clear(LINES, s);
        my_epoch = epoch;
    }
    return s;
}

static koila__code *find_wanted(const void *code)
{
    koila__code *c = koila__lines_find(LINES, code);
    return c && koila__code_wanted(c) ? c : NULL;
}

/* Is c recorded, or was it when the top activation began? */
static bool on_top(koila__stack *s, const void *code)
{
    koila__code *top = s ? koila__stack_top(s) : NULL;
    return top && top->key == code;
}

/* ==== the plain tracer: fallback everywhere, and the source of line events on 3.10 and 3.11 */

typedef struct tracer {
    Py_tracefunc before; /* whose events we pass on; NULL: nobody's */
    PyObject *before_obj;
    int depth; /* profiled frames on this thread that need it */
} tracer;
static __thread tracer my_tracer;

static int pass_on(PyFrameObject *frame, int what, PyObject *arg)
{
    return my_tracer.before ? my_tracer.before(my_tracer.before_obj, frame, what, arg) : 0;
}

#if PY_VERSION_HEX < 0x030C0000
/* ==== 3.10 and 3.11: frame evaluation */

#if PY_VERSION_HEX >= 0x030B0000
#include <opcode.h>
typedef struct _PyInterpreterFrame frame_type;
/* The first fields of CPython 3.11's struct _PyInterpreterFrame; its layout is fixed for the life
 * of 3.11. */
typedef struct frame_head {
    PyFunctionObject *f_func;
    PyObject *f_globals, *f_builtins, *f_locals;
    PyCodeObject *f_code;
    PyFrameObject *frame_obj;
    void *previous;
    _Py_CODEUNIT *prev_instr;
} frame_head;
static PyCodeObject *code_of(frame_type *frame) { return ((frame_head *)frame)->f_code; }
/* And of its PyFrameObject. */
typedef struct frame_object_head {
    PyObject_HEAD
    PyFrameObject *f_back;
    frame_head *f_frame;
    PyObject *f_trace;
    int f_lineno;
} frame_object_head;
static const void *traced_code(PyFrameObject *frame)
{
    return ((frame_object_head *)frame)->f_frame->f_code;
}
static int traced_line(PyFrameObject *frame)
{
    int line = ((frame_object_head *)frame)->f_lineno; /* set while a line is traced */
    return line ? line : PyFrame_GetLineNumber(frame);
}
/* The line a generator resumes at; -1: it is a call; 0: only a generator object is made, no line
 * runs. */
static int resume_line(frame_type *frame)
{
    const frame_head *f = (const frame_head *)frame;
    const _Py_CODEUNIT *first = (const _Py_CODEUNIT *)f->f_code->co_code_adaptive;
    bool makes_generator = f->f_code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR);
    if (f->prev_instr < first)
        return makes_generator ? 0 : -1;
    if (!makes_generator)
        return -1; /* prev_instr may stand after cell and free variable set-up */
    if (_Py_OPCODE(*f->prev_instr) == RETURN_GENERATOR)
        return -1;
    return PyCode_Addr2Line(f->f_code, (int)((const char *)f->prev_instr - (const char *)first));
}
#else
typedef PyFrameObject frame_type;
static PyCodeObject *code_of(frame_type *frame) { return frame->f_code; }
static int resume_line(frame_type *frame)
{
    return frame->f_lasti < 0 ? -1 : PyFrame_GetLineNumber(frame);
}
static const void *traced_code(PyFrameObject *frame) { return frame->f_code; }
static int traced_line(PyFrameObject *frame) { return PyFrame_GetLineNumber(frame); }
#endif

static int trace_lines(PyObject *obj, PyFrameObject *frame, int what, PyObject *arg)
{
    koila__stack *s = koila__memlab_stack;
    if (what == PyTrace_LINE && on_top(s, traced_code(frame)))
        koila__lines_line(LINES, s, koila__stack_top(s), traced_line(frame));
    return pass_on(frame, what, arg);
}

static _PyFrameEvalFunction next_eval; /* whom we hand frames to; set while the hook is in */

static void tracer_on(PyThreadState *ts)
{
    if (my_tracer.depth++ && ts->c_tracefunc == trace_lines)
        return;
    if (ts->c_tracefunc != trace_lines) {
        my_tracer.before = ts->c_tracefunc;
        my_tracer.before_obj = ts->c_traceobj;
        Py_XINCREF(my_tracer.before_obj);
        /* the same object, so that sys.gettrace() answers as before */
        PyEval_SetTrace(trace_lines, ts->c_traceobj);
    }
}
static void tracer_off(PyThreadState *ts)
{
    if (--my_tracer.depth)
        return;
    PyObject *type, *value, *where;
    PyErr_Fetch(&type, &value, &where);
    if (ts->c_tracefunc == trace_lines)
        PyEval_SetTrace(my_tracer.before, my_tracer.before_obj);
    my_tracer.before = NULL;
    Py_CLEAR(my_tracer.before_obj);
    PyErr_Restore(type, value, where);
}

static PyObject *eval_profiled(PyThreadState *ts, frame_type *frame, int throwing, koila__code *c,
                               int line)
{
    koila__stack *s = my_stack();
    if (!s)
        return next_eval(ts, frame, throwing);
    PyCodeObject *code = code_of(frame);
    Py_INCREF(code); /* generators give up their code when they end */
    tracer_on(ts);
    int tracing = ts->cframe->use_tracing;
    ts->cframe->use_tracing = 255;
    koila__lines_enter(LINES, s, c, line < 0 ? c->first_line : line, line < 0);
    PyObject *r = next_eval(ts, frame, throwing);
    koila__lines_leave(LINES, s);
    ts->cframe->use_tracing = tracing;
    tracer_off(ts);
    Py_DECREF(code);
    return r;
}

static PyObject *eval_frame(PyThreadState *ts, frame_type *frame, int throwing)
{
    koila__code *c = find_wanted(code_of(frame));
    if (c) {
        int line = resume_line(frame);
        return line ? eval_profiled(ts, frame, throwing, c, line) : next_eval(ts, frame, throwing);
    }
    if (!ts->cframe->use_tracing || ts->c_tracefunc != trace_lines || ts->c_profilefunc ||
        !my_tracer.depth || my_tracer.before)
        return next_eval(ts, frame, throwing);
    ts->cframe->use_tracing = 0;
    PyObject *r = next_eval(ts, frame, throwing);
    ts->cframe->use_tracing = ts->c_tracefunc || ts->c_profilefunc ? 255 : 0;
    return r;
}

static int watch(PyObject *code, bool on) { return 0; }
static int watch_any(bool on)
{
    PyInterpreterState *interp = PyInterpreterState_Get();
    _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interp);
    if (on && now != eval_frame) {
        next_eval = now;
        _PyInterpreterState_SetEvalFrameFunc(interp, eval_frame);
    } else if (!on && now == eval_frame) {
        _PyInterpreterState_SetEvalFrameFunc(interp, next_eval);
    }
    return 0;
}
static const char *way(void) { return "frame evaluation"; }

#else
/* ==== 3.12 and later: monitoring */

static int tool_id = -1; /* -1: none yet; -2: all taken, the plain tracer is on */
static int local_events, global_events;

static koila__stack *stack_for(PyObject *const *args, Py_ssize_t n, koila__code **c)
{
    *c = n >= 2 ? find_wanted(args[0]) : NULL;
    return *c ? my_stack() : NULL;
}
static int as_int(PyObject *number)
{
    /* monitoring passes lines and offsets as ints, and nobody else calls */
    PyLongObject *n = (PyLongObject *)number;
    return PyUnstable_Long_IsCompact(n) ? (int)PyUnstable_Long_CompactValue(n)
                                        : (int)PyLong_AsLong(number);
}
static int line_at(PyObject *code, PyObject *offset)
{
    return PyCode_Addr2Line((PyCodeObject *)code, as_int(offset));
}

static PyObject *on_line(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    koila__stack *s = koila__memlab_stack;
    if (n == 2 && on_top(s, args[0])) {
        koila__lines_line(LINES, s, koila__stack_top(s), as_int(args[1]));
    } else {
        koila__code *c;
        s = stack_for(args, n, &c);
        if (s)
            koila__lines_line(LINES, s, c, as_int(args[1]));
    }
    Py_RETURN_NONE;
}
static PyObject *on_start(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    koila__code *c;
    koila__stack *s = stack_for(args, n, &c);
    if (s)
        koila__lines_enter(LINES, s, c, c->first_line, true);
    Py_RETURN_NONE;
}
static PyObject *on_resume(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    koila__code *c;
    koila__stack *s = stack_for(args, n, &c);
    if (s)
        koila__lines_enter(LINES, s, c, line_at(args[0], args[1]), false);
    Py_RETURN_NONE;
}
static PyObject *on_end(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    if (n && on_top(koila__memlab_stack, args[0]))
        koila__lines_leave(LINES, koila__memlab_stack);
    Py_RETURN_NONE;
}

static PyMethodDef callbacks[] = {
    { "on_line", (PyCFunction)(void (*)(void))on_line, METH_FASTCALL, NULL },
    { "on_start", (PyCFunction)(void (*)(void))on_start, METH_FASTCALL, NULL },
    { "on_resume", (PyCFunction)(void (*)(void))on_resume, METH_FASTCALL, NULL },
    { "on_end", (PyCFunction)(void (*)(void))on_end, METH_FASTCALL, NULL },
};
/* event, callback, global */
static const struct {
    const char *event;
    int callback;
    bool global;
} events[] = {
    { "LINE", 0, false },     { "PY_START", 1, false },  { "PY_RESUME", 2, false },
    { "PY_YIELD", 3, false }, { "PY_RETURN", 3, false }, { "PY_UNWIND", 3, true },
    { "PY_THROW", 2, true },
};

static PyObject *monitoring(void) { return PySys_GetObject("monitoring"); } // borrowed

static int take_tool(void)
{
    static const int ids[] = { 4, 3, 2 }; /* 2 last: cProfile insists on it */
    PyObject *mon = monitoring();
    if (!mon)
        return -1;
    for (size_t i = 0; tool_id == -1 && i < KOILA_COUNT(ids); i++) {
        PyObject *r = PyObject_CallMethod(mon, "use_tool_id", "is", ids[i], "koila.memlab");
        if (r)
            tool_id = ids[i];
        else if (PyErr_ExceptionMatches(PyExc_ValueError))
            PyErr_Clear();
        else
            return -1;
        Py_XDECREF(r);
    }
    if (tool_id == -1) {
        tool_id = -2;
        return 0;
    }
    PyObject *numbers = PyObject_GetAttrString(mon, "events");
    if (!numbers)
        return -1;
    local_events = global_events = 0;
    for (size_t i = 0; i < KOILA_COUNT(events); i++) {
        PyObject *number = PyObject_GetAttrString(numbers, events[i].event);
        PyObject *callback = PyCFunction_New(&callbacks[events[i].callback], NULL);
        int bit = number ? (int)PyLong_AsLong(number) : 0;
        PyObject *r = number && callback ? PyObject_CallMethod(mon, "register_callback", "iiO",
                                                               tool_id, bit, callback)
                                         : NULL;
        Py_XDECREF(number);
        Py_XDECREF(callback);
        Py_XDECREF(r);
        if (!r) {
            Py_DECREF(numbers);
            return -1;
        }
        *(events[i].global ? &global_events : &local_events) |= bit;
    }
    Py_DECREF(numbers);
    return 0;
}

/* the plain tracer, when there is no tool id left */
static int trace_all(PyObject *obj, PyFrameObject *frame, int what, PyObject *arg)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    koila__code *c = find_wanted(code);
    koila__stack *s = c ? my_stack() : koila__memlab_stack;
    if (s && c && what == PyTrace_CALL) {
        int lasti = PyFrame_GetLasti(frame);
        bool resumed =
            (code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)) && lasti > 8;
        koila__lines_enter(LINES, s, c, PyFrame_GetLineNumber(frame), !resumed);
    } else if (s && what == PyTrace_LINE && on_top(s, code)) {
        koila__lines_line(LINES, s, koila__stack_top(s), PyFrame_GetLineNumber(frame));
    } else if (s && what == PyTrace_RETURN && on_top(s, code)) {
        koila__lines_leave(LINES, s);
    }
    Py_DECREF(code);
    return pass_on(frame, what, arg);
}

/* Threads that start later: threading calls this for their first Python call, as the tracer it was
 * given. */
static PyObject *begin_thread(PyObject *self, PyObject *args)
{
    if (tool_id == -2)
        PyEval_SetTrace(trace_all, NULL);
    Py_RETURN_NONE;
}
static PyMethodDef begin_thread_def = { "begin_thread", begin_thread, METH_VARARGS, NULL };
static PyObject *threads_before; /* threading.gettrace() before us; NULL: we are not in */

/* The tracer on this thread's and everybody's calls, in place of what was there; off: as it was on
 * this thread. */
static int trace_everywhere(bool on)
{
    PyThreadState *ts = PyThreadState_Get();
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *r = NULL;
    if (!threading)
        return -1;
    if (on && !threads_before) {
        PyObject *ours = PyCFunction_New(&begin_thread_def, NULL);
        threads_before = PyObject_CallMethod(threading, "gettrace", NULL);
        if (ours && threads_before)
            r = PyObject_CallMethod(threading, "settrace", "O", ours);
        Py_XDECREF(ours);
        my_tracer.before = ts->c_tracefunc;
        my_tracer.before_obj = Py_XNewRef(ts->c_traceobj);
        PyEval_SetTraceAllThreads(trace_all, NULL);
        /* the same object, so that sys.gettrace() answers as before */
        PyEval_SetTrace(trace_all, my_tracer.before_obj);
    } else if (!on && threads_before) {
        r = PyObject_CallMethod(threading, "settrace", "O", threads_before);
        Py_CLEAR(threads_before);
        PyEval_SetTraceAllThreads(NULL, NULL);
        PyEval_SetTrace(my_tracer.before, my_tracer.before_obj);
        my_tracer.before = NULL;
        Py_CLEAR(my_tracer.before_obj);
    } else {
        r = Py_NewRef(Py_None);
    }
    Py_DECREF(threading);
    Py_XDECREF(r);
    return r ? 0 : -1;
}

static int watch(PyObject *code, bool on)
{
    if (tool_id == -1 && on && take_tool() < 0)
        return -1;
    if (tool_id < 0)
        return 0;
    PyObject *r = PyObject_CallMethod(monitoring(), "set_local_events", "iOi", tool_id, code,
                                      on ? local_events : 0);
    Py_XDECREF(r);
    return r ? 0 : -1;
}
static int watch_any(bool on)
{
    if (!on)
        epoch++;
    if (tool_id == -1)
        return 0;
    if (tool_id == -2) {
        int r = trace_everywhere(on);
        if (!on)
            tool_id = -1;
        return r;
    }
    PyObject *r =
        PyObject_CallMethod(monitoring(), "set_events", "ii", tool_id, on ? global_events : 0);
    if (r && !on) { /* others may want the id */
        Py_DECREF(r);
        r = PyObject_CallMethod(monitoring(), "free_tool_id", "i", tool_id);
        tool_id = -1;
    }
    Py_XDECREF(r);
    return r ? 0 : -1;
}
static const char *way(void) { return tool_id == -2 ? "tracer" : "monitoring"; }
#endif

int koila__lines_enabled; /* line tables */

/* ---- captured work that runs on this thread, and the line it was captured on */

void koila__lines_work_for(const char *file, int line)
{
    struct koila__work *work = &koila__memlab_work;
    work->key = NULL;
    work->path = (koila__origin_path){ 0 };
    int first = 0;
    /* the innermost function around that line */
    for (koila__code *c = koila__lines_enabled && file ? LINES->codes : NULL; c; c = c->next) {
        if (line < c->first_line || line >= c->first_line + c->n_rows || c->first_line < first ||
            !koila__code_wanted(c))
            continue;
        if (PyUnicode_CompareWithASCIIString(((PyCodeObject *)c->key)->co_filename, file) != 0)
            continue;
        work->key = c->key;
        first = c->first_line;
    }
    work->line = line;
}

/* ==== LineTable */

typedef struct entry {
    PyObject *code, *name, *file, *source; /* source: list of str, or None */
    int first_line;
    koila__func *func;
} entry;

typedef struct line_table {
    PyObject_HEAD
    koila__wish wish;
    entry *entries;
    Py_ssize_t n, capacity;
} line_table;

/* Switch the events of one code on or off, as the profilers want it now. While it runs they stay
 * on, to see it end. */
static int refresh(entry *e)
{
    koila__code *c = e->func->code;
    return watch(e->code, koila__code_wanted(c) || (c->n_activations && koila__lines_enabled));
}

static void reap(void)
{
    for (const void *key; (key = koila__lines_reap(LINES));)
        Py_DECREF((PyObject *)key);
}

static void drop_entries(line_table *t)
{
    for (Py_ssize_t i = 0; i < t->n; i++) {
        entry *e = &t->entries[i];
        koila__code *c = e->func->code;
        bool still = c->n_activations && koila__lines_enabled;
        for (koila__func *f = c->funcs; f; f = f->next)
            still |= f != e->func && f->wish->enabled;
        if (t->wish.enabled && !still && watch(e->code, false) < 0)
            PyErr_Clear();
        if (koila__func_free(LINES, e->func))
            Py_DECREF(e->code);
        Py_DECREF(e->code);
        Py_DECREF(e->name);
        Py_DECREF(e->file);
        Py_DECREF(e->source);
    }
    PyMem_Free(t->entries);
    t->entries = NULL;
    t->n = t->capacity = 0;
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
    for (Py_ssize_t i = 0; i < t->n; i++)
        if (t->entries[i].code == code)
            Py_RETURN_FALSE;
    if (t->n == t->capacity) {
        Py_ssize_t wider = t->capacity ? t->capacity * 2 : 4;
        entry *grown = PyMem_Realloc(t->entries, (size_t)wider * sizeof *grown);
        if (!grown)
            return PyErr_NoMemory();
        t->entries = grown;
        t->capacity = wider;
    }
    reap();
    bool known = koila__lines_find(LINES, code) != NULL;
    koila__func *func;
    if (koila__func_new(LINES, code, first_line, n_lines, &t->wish, &func) != KOILA_OK)
        return PyErr_NoMemory();
    if (!known)
        Py_INCREF(code);
    entry *e = &t->entries[t->n++];
    *e = (entry){ Py_NewRef(code),   Py_NewRef(name), Py_NewRef(file),
                  Py_NewRef(source), first_line,      func };
    if (t->wish.enabled && (refresh(e) < 0 || watch_any(true) < 0))
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
    koila__lines_enabled += on ? 1 : -1;
    for (Py_ssize_t i = 0; i < t->n; i++)
        if (refresh(&t->entries[i]) < 0)
            return -1;
    koila__nodes_listen(koila__lines_enabled > 0);
    if (on || koila__lines_enabled == 0)
        return watch_any(on);
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

/* ---- what is shown */

/* Entries chosen by a sequence of indices, or all. A malloc'd array of pointers; NULL with an
 * exception set. */
static entry **chosen(line_table *t, PyObject *which, Py_ssize_t *n)
{
    PyObject *list =
        which == Py_None ? NULL : PySequence_Fast(which, "which: expected a sequence of indices");
    if (which != Py_None && !list)
        return NULL;
    *n = list ? PySequence_Fast_GET_SIZE(list) : t->n;
    entry **out = PyMem_Malloc((size_t)(*n + 1) * sizeof *out);
    for (Py_ssize_t i = 0; out && i < *n; i++) {
        Py_ssize_t k = list ? PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(list, i)) : i;
        if (k < 0 || k >= t->n) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "which: %zd is not in range(%zd)", k, t->n);
            PyMem_Free(out);
            out = NULL;
            break;
        }
        out[i] = &t->entries[k];
    }
    if (!out && !PyErr_Occurred())
        PyErr_NoMemory();
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
        koila_error err = KOILA_ERROR_INIT;
        PyObject *item = PySequence_Fast_GET_ITEM(list, i); // borrowed
        const char *name = PyUnicode_Check(item) ? PyUnicode_AsUTF8(item) : NULL;
        bool ok = name && koila__column_parse(name, &out[i], &err) == KOILA_OK;
        if (!ok) {
            if (!PyErr_Occurred()) {
                if (name)
                    PyErr_SetString(PyExc_ValueError, err.text);
                else
                    PyErr_Format(PyExc_TypeError, "columns: expected names, got %R", item);
            }
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
    koila__format f = strcmp(format, "html") == 0   ? KOILA__FORMAT_HTML
                      : strcmp(format, "json") == 0 ? KOILA__FORMAT_JSON
                      : strcmp(format, "csv") == 0  ? KOILA__FORMAT_CSV
                                                    : KOILA__FORMAT_TEXT;
    Py_ssize_t n_columns, n = 0;
    koila__column *columns = parse_columns(column_names, &n_columns);
    entry **entries = columns ? chosen(t, which, &n) : NULL;
    koila__view *views = entries ? PyMem_Calloc((size_t)n + 1, sizeof *views) : NULL;
    koila__text out;
    koila__text_init(&out, NULL);
    bool ok = views != NULL;
    for (Py_ssize_t i = 0; ok && i < n; i++) {
        entry *e = entries[i];
        const char *name = PyUnicode_AsUTF8(e->name);
        const char *file = name ? PyUnicode_AsUTF8(e->file) : NULL;
        views[i] = (koila__view){ name, file, e->first_line, e->func, 0, NULL };
        if (name && file)
            views[i].code = source_of(e, &views[i].n_code);
        ok = views[i].code != NULL;
    }
    if (ok) {
        koila__lines_write(LINES, f, views, (size_t)n, columns, (size_t)n_columns, device, all,
                           &out);
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

/* A table that stays as this one is now, of the chosen entries. Always a plain LineTable. */
static PyTypeObject *table_type;
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
        copy->entries = PyMem_Malloc((size_t)(n + 1) * sizeof *copy->entries);
        copy->capacity = n + 1;
    }
    bool ok = copy && copy->entries;
    for (Py_ssize_t i = 0; ok && i < n; i++) {
        entry *e = entries[i];
        koila__func *func;
        ok = koila__func_copy(LINES, e->func, &copy->wish, &func) == KOILA_OK;
        if (!ok)
            break;
        copy->entries[copy->n++] =
            (entry){ Py_NewRef(e->code),   Py_NewRef(e->name), Py_NewRef(e->file),
                     Py_NewRef(e->source), e->first_line,      func };
    }
    PyMem_Free(entries);
    if (!ok) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        Py_CLEAR(copy);
    }
    return (PyObject *)copy;
}

static bool put(PyObject *dict, const char *key, PyObject *value)
{
    int r = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return r == 0;
}

/* Every word, and every metric.pool.stat that this row has on this device. */
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
    for (Py_ssize_t i = 0; out && i < n; i++) {
        entry *e = entries[i];
        Py_ssize_t n_code = e->source == Py_None ? 0 : PyList_GET_SIZE(e->source);
        Py_ssize_t n_rows = n_code > e->func->code->n_rows ? n_code : e->func->code->n_rows;
        for (Py_ssize_t r = 0; out && r < n_rows; r++) {
            const koila__row *row = r < e->func->code->n_rows ? &e->func->rows[r] : NULL;
            PyObject *d = PyDict_New();
            bool ok = d && put(d, "function", Py_NewRef(e->name)) &&
                      put(d, "file", Py_NewRef(e->file)) &&
                      put(d, "line", PyLong_FromSsize_t(e->first_line + r)) &&
                      put(d, "code",
                          r < n_code ? Py_NewRef(PyList_GET_ITEM(e->source, r))
                                     : PyUnicode_FromString("")) &&
                      put_columns(d, row, device) && PyList_Append(out, d) == 0;
            Py_XDECREF(d);
            if (!ok)
                Py_CLEAR(out);
        }
    }
    PyMem_Free(entries);
    return out;
}

static PyObject *table_names(line_table *t, void *closure)
{
    PyObject *list = PyList_New(t->n);
    for (Py_ssize_t i = 0; list && i < t->n; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(t->entries[i].name));
    return list;
}
static PyObject *table_codes(line_table *t, void *closure)
{
    PyObject *list = PyList_New(t->n);
    for (Py_ssize_t i = 0; list && i < t->n; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(t->entries[i].code));
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
    { "disable", (PyCFunction)table_disable, METH_NOARGS,
      "Stop recording; what was recorded stays." },
    { "clear", (PyCFunction)table_clear, METH_NOARGS, "Drop functions and records." },
    { "render", (PyCFunction)(void (*)(void))table_render, METH_VARARGS | METH_KEYWORDS,
      "render(format, columns, device=-1, which=None, all=False) -> str; format: text, html, json "
      "or csv." },
    { "frozen", (PyCFunction)table_frozen, METH_VARARGS,
      "frozen(which=None) -> LineTable that stays as this one is now." },
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
    { Py_tp_doc, "What one line profiler has recorded; see lines.c." },
    { Py_tp_new, table_new },
    { Py_tp_dealloc, table_dealloc },
    { Py_tp_methods, table_methods },
    { Py_tp_members, table_members },
    { Py_tp_getset, table_getset },
    { 0, NULL },
};
static PyType_Spec table_spec = { "koila._core.LineTable", sizeof(line_table), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, table_slots };

static PyObject *lines_way(PyObject *self, PyObject *none) { return PyUnicode_FromString(way()); }
static PyObject *lines_check(PyObject *self, PyObject *none)
{
    return PyBool_FromLong(!koila__memlab_stack || koila__stack_check(LINES, koila__memlab_stack));
}
static PyMethodDef methods[] = {
    { "check_columns", check_columns, METH_O,
      "check_columns(names) -> bool: must one be read from the allocator? ValueError if unknown." },
    { "lines_way", lines_way, METH_NOARGS,
      "How lines are seen: monitoring, frame evaluation or tracer." },
    { "lines_check", lines_check, METH_NOARGS, "Are this thread's activations consistent?" },
    { NULL, NULL, 0, NULL },
};

int koila__lines_add_module(PyObject *m)
{
    PyObject *type = PyType_FromSpec(&table_spec);
    table_type = (PyTypeObject *)type;
    if (!type || PyModule_AddObject(m, "LineTable", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    return PyModule_AddFunctions(m, methods);
}
