/* monitor.c — reports the running line of each profiled function to src/memory/linetab.c.
 *
 * Unprofiled code must run at full speed, so nothing is switched on for all code if possible:
 *   3.12+       sys.monitoring, local events on the profiled code objects only: LINE, PY_START,
 *               PY_RESUME, PY_YIELD, PY_RETURN; the two that CPython offers globally only,
 *               PY_UNWIND and PY_THROW, cost nothing until an exception unwinds.
 *   3.10, 3.11  a frame-evaluation function (PEP 523) sees every entry, generator resumes too, and
 *               compares one pointer. For a profiled code it pushes an activation, lets the frame
 *               run with a C tracer on, and pops. While an unprofiled frame runs below a profiled
 *               one the tracer is off (cframe.use_tracing), unless a debugger or cProfile was there
 *               first: then all events are passed on.
 *   otherwise   (all tool ids taken) the plain C tracer on all threads.
 * All three call koila__lines_enter(), koila__lines_line() and koila__lines_leave().
 * Everything here runs with the GIL.
 */
#include "memlab/memlab.h"

#include <frameobject.h>

#define LINES (&koila__memlab_lines)

/* When the last profiler is disabled inside profiled code, only frame evaluation still sees the end
 * of that code. A stack of an older epoch is therefore emptied before it is used again. */
static uint64_t epoch;
static __thread uint64_t my_epoch;
static koila__stack *my_stack(void)
{
    koila__stack *s = koila__events_my_stack();
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

/* Is this the code of the top activation? */
static bool on_top(koila__stack *s, const void *code)
{
    koila__code *top = s ? koila__stack_top(s) : NULL;
    return top && top->key == code;
}

/* ==== the plain tracer: fallback everywhere, and the source of line events on 3.10 and 3.11 */

typedef struct tracer {
    Py_tracefunc before; /* the tracer before ours, which gets the events too; NULL: none */
    PyObject *before_obj;
    int depth; /* profiled frames on this thread that need the tracer */
} tracer;
static __thread tracer my_tracer;

static int pass_on(PyFrameObject *frame, int what, PyObject *arg)
{
    return my_tracer.before ? my_tracer.before(my_tracer.before_obj, frame, what, arg) : 0;
}

#if PY_VERSION_HEX < 0x030C0000
/* ==== 3.10 and 3.11: frame evaluation */

/* Results of resume_line() other than the line at which a generator resumes. NO_LINE: the call only
 * makes a generator object. */
enum { A_CALL = -1, NO_LINE = 0 };

#if PY_VERSION_HEX >= 0x030B0000
#include <opcode.h>
typedef struct _PyInterpreterFrame frame_type;
/* The first fields of CPython 3.11's struct _PyInterpreterFrame; the layout is the same in all of
 * 3.11. */
typedef struct frame_head {
    PyFunctionObject *f_func;
    PyObject *f_globals, *f_builtins, *f_locals;
    PyCodeObject *f_code;
    PyFrameObject *frame_obj;
    void *previous;
    _Py_CODEUNIT *prev_instr;
} frame_head;
static PyCodeObject *code_of(frame_type *frame) { return ((frame_head *)frame)->f_code; }
/* The first fields of its PyFrameObject. */
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
    int line = ((frame_object_head *)frame)->f_lineno; /* set while a line is being traced */
    return line ? line : PyFrame_GetLineNumber(frame);
}
static int resume_line(frame_type *frame)
{
    const frame_head *f = (const frame_head *)frame;
    const _Py_CODEUNIT *first = (const _Py_CODEUNIT *)f->f_code->co_code_adaptive;
    bool makes_generator = f->f_code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR);
    if (f->prev_instr < first)
        return makes_generator ? NO_LINE : A_CALL;
    if (!makes_generator)
        return A_CALL; /* prev_instr may be after the set-up of cell and free variables */
    if (_Py_OPCODE(*f->prev_instr) == RETURN_GENERATOR)
        return A_CALL;
    return PyCode_Addr2Line(f->f_code, (int)((const char *)f->prev_instr - (const char *)first));
}
#else
typedef PyFrameObject frame_type;
static PyCodeObject *code_of(frame_type *frame) { return frame->f_code; }
static int resume_line(frame_type *frame)
{
    return frame->f_lasti < 0 ? A_CALL : PyFrame_GetLineNumber(frame);
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

/* the evaluator before ours; set while the hook is installed */
static _PyFrameEvalFunction next_eval;
enum { TRACING = 255 }; /* cframe.use_tracing */

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
    Py_INCREF(code); /* a generator releases its code when it ends */
    tracer_on(ts);
    int tracing = ts->cframe->use_tracing;
    ts->cframe->use_tracing = TRACING;
    koila__lines_enter(LINES, s, c, line == A_CALL ? c->first_line : line, line == A_CALL);
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
        return line == NO_LINE ? next_eval(ts, frame, throwing)
                               : eval_profiled(ts, frame, throwing, c, line);
    }
    if (!ts->cframe->use_tracing || ts->c_tracefunc != trace_lines || ts->c_profilefunc ||
        !my_tracer.depth || my_tracer.before)
        return next_eval(ts, frame, throwing);
    ts->cframe->use_tracing = 0;
    PyObject *r = next_eval(ts, frame, throwing);
    ts->cframe->use_tracing = ts->c_tracefunc || ts->c_profilefunc ? TRACING : 0;
    return r;
}

int koila__monitor_code(PyObject *code, bool on) { return 0; }
int koila__monitor_any(bool on)
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
const char *koila__monitor_way(void) { return "frame evaluation"; }

#else
/* ==== 3.12 and later: monitoring */

enum { NO_TOOL = -1, ALL_TAKEN = -2 }; /* ALL_TAKEN: the plain tracer is on */
static int tool_id = NO_TOOL;
static int local_events, global_events;

static koila__stack *stack_for(PyObject *const *args, Py_ssize_t n, koila__code **c)
{
    *c = n >= 2 ? find_wanted(args[0]) : NULL;
    return *c ? my_stack() : NULL;
}
static int as_int(PyObject *number)
{
    /* only monitoring calls this, and it passes lines and offsets as ints */
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

enum { ON_LINE, ON_START, ON_RESUME, ON_END };
static PyMethodDef callbacks[] = {
    [ON_LINE] = { "on_line", (PyCFunction)(void (*)(void))on_line, METH_FASTCALL, NULL },
    [ON_START] = { "on_start", (PyCFunction)(void (*)(void))on_start, METH_FASTCALL, NULL },
    [ON_RESUME] = { "on_resume", (PyCFunction)(void (*)(void))on_resume, METH_FASTCALL, NULL },
    [ON_END] = { "on_end", (PyCFunction)(void (*)(void))on_end, METH_FASTCALL, NULL },
};
static const struct {
    const char *event;
    int callback;
    bool global;
} events[] = {
    { "LINE", ON_LINE, false },        { "PY_START", ON_START, false },
    { "PY_RESUME", ON_RESUME, false }, { "PY_YIELD", ON_END, false },
    { "PY_RETURN", ON_END, false },    { "PY_UNWIND", ON_END, true },
    { "PY_THROW", ON_RESUME, true },
};

static PyObject *monitoring(void) { return PySys_GetObject("monitoring"); } // borrowed

/* Takes a free tool id; ALL_TAKEN if there is none. -1: a Python error is set. */
static int take_id(PyObject *mon)
{
    static const int ids[] = { 4, 3, 2 }; /* 2 last: cProfile can use no other */
    for (size_t i = 0; i < KOILA_COUNT(ids); i++) {
        PyObject *r = PyObject_CallMethod(mon, "use_tool_id", "is", ids[i], "koila.memlab");
        if (r) {
            Py_DECREF(r);
            tool_id = ids[i];
            return 0;
        }
        if (!PyErr_ExceptionMatches(PyExc_ValueError))
            return -1;
        PyErr_Clear();
    }
    tool_id = ALL_TAKEN;
    return 0;
}

/* Registers the callback of one event; *bit: the event's number. -1: a Python error is set. */
static int register_event(PyObject *mon, PyObject *numbers, size_t event, int *bit)
{
    PyObject *number = PyObject_GetAttrString(numbers, events[event].event);
    PyObject *callback = PyCFunction_New(&callbacks[events[event].callback], NULL);
    PyObject *r = NULL;
    if (number && callback) {
        *bit = (int)PyLong_AsLong(number);
        r = PyObject_CallMethod(mon, "register_callback", "iiO", tool_id, *bit, callback);
    }
    Py_XDECREF(number);
    Py_XDECREF(callback);
    Py_XDECREF(r);
    return r ? 0 : -1;
}

static int take_tool(void)
{
    PyObject *mon = monitoring();
    if (!mon || take_id(mon) < 0)
        return -1;
    if (tool_id == ALL_TAKEN)
        return 0;
    PyObject *numbers = PyObject_GetAttrString(mon, "events");
    if (!numbers)
        return -1;
    local_events = 0;
    global_events = 0;
    int r = 0;
    for (size_t i = 0; r == 0 && i < KOILA_COUNT(events); i++) {
        int bit = 0;
        r = register_event(mon, numbers, i, &bit);
        *(events[i].global ? &global_events : &local_events) |= bit;
    }
    Py_DECREF(numbers);
    return r;
}

/* For the plain tracer, when no tool id is left: a generator whose last instruction is beyond its
 * prologue (in bytes) is being resumed, not called. */
enum { LAST_OF_PROLOGUE = 8 };
static int trace_all(PyObject *obj, PyFrameObject *frame, int what, PyObject *arg)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    koila__code *c = find_wanted(code);
    koila__stack *s = c ? my_stack() : koila__memlab_stack;
    if (s && c && what == PyTrace_CALL) {
        int lasti = PyFrame_GetLasti(frame);
        bool resumed = (code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)) &&
                       lasti > LAST_OF_PROLOGUE;
        koila__lines_enter(LINES, s, c, PyFrame_GetLineNumber(frame), !resumed);
    } else if (s && what == PyTrace_LINE && on_top(s, code)) {
        koila__lines_line(LINES, s, koila__stack_top(s), PyFrame_GetLineNumber(frame));
    } else if (s && what == PyTrace_RETURN && on_top(s, code)) {
        koila__lines_leave(LINES, s);
    }
    Py_DECREF(code);
    return pass_on(frame, what, arg);
}

/* The tracer that threading sets in threads that start later: it runs at their first Python
 * call. */
static PyObject *begin_thread(PyObject *self, PyObject *args)
{
    if (tool_id == ALL_TAKEN)
        PyEval_SetTrace(trace_all, NULL);
    Py_RETURN_NONE;
}
static PyMethodDef begin_thread_def = { "begin_thread", begin_thread, METH_VARARGS, NULL };
static PyObject *threads_before; /* threading.gettrace() before ours; NULL: ours is not set */

/* on: traces all threads, replacing their tracers. off: restores the tracer of this thread. */
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

int koila__monitor_code(PyObject *code, bool on)
{
    if (tool_id == NO_TOOL && on && take_tool() < 0)
        return -1;
    if (tool_id < 0)
        return 0;
    PyObject *r = PyObject_CallMethod(monitoring(), "set_local_events", "iOi", tool_id, code,
                                      on ? local_events : 0);
    Py_XDECREF(r);
    return r ? 0 : -1;
}
int koila__monitor_any(bool on)
{
    if (!on)
        epoch++;
    if (tool_id == NO_TOOL)
        return 0;
    if (tool_id == ALL_TAKEN) {
        int r = trace_everywhere(on);
        if (!on)
            tool_id = NO_TOOL;
        return r;
    }
    PyObject *r =
        PyObject_CallMethod(monitoring(), "set_events", "ii", tool_id, on ? global_events : 0);
    if (r && !on) {
        /* other tools may need the id */
        Py_DECREF(r);
        r = PyObject_CallMethod(monitoring(), "free_tool_id", "i", tool_id);
        tool_id = NO_TOOL;
    }
    Py_XDECREF(r);
    return r ? 0 : -1;
}
const char *koila__monitor_way(void) { return tool_id == ALL_TAKEN ? "tracer" : "monitoring"; }
#endif
