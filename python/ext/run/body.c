/* body.c — loops whose slices run as one compiled function: koila.compile().
 *
 * The body of a loop is what one full slice does, from its inputs to what it collects:
 *
 *   inputs    values that are whole; then the rows of SLICE and FETCH, one for each of these
 *             instructions; then the accumulators of the sums, which the body adds to in place
 *   results   one for each other instruction that collects: PUT, KEEP, and ADD of no sum
 *
 * body_trace.c has the function made. It is called for each full slice but runs beside the walk: a
 * slice of other rows is walked, and where the function raises, it is dropped, and the step runs
 * again as it always did (request.c). Nothing outside has changed by then: the accumulators belong
 * to the run. Where memory ran out it is not dropped: it is tried again where there is an eighth
 * more. It is dropped too where its slices take longer, as three comparisons with runs
 * without it must say.
 *
 * On the CPU each slice is timed, and each loop's peak measured. On a GPU the calls of a slice
 * return before it ends, so events before and after a loop's slices time it, read after the next
 * run without waiting, until the first comparison that the function wins; and torch's allocator
 * tells the peak of a whole run, where it rose.
 */
#include "run/body.h"

#include "ground/real.h"
#include "ground/shield.h"

enum {
    SLICES_TO_JUDGE = 12, /* of a body, until its fastest is compared with that of the walk */
    MOST_LOST = 3,        /* a body that was slower so many times in a row is dropped */
};
static const double slower = 1.05; /* more than what two equal ways differ by */

bool koila__body_is_sum(const koila_plan *p, const koila_instr *in)
{
    const koila_share s = koila_plan_share(p, in->id);
    return in->kind == KOILA_DO_ADD && !(in->flags & KOILA_INSTR_ADDED) &&
           s.kind == KOILA_SHARE_PARTIAL && s.partial == KOILA_PARTIAL_SUM &&
           !koila_plan_adds_on(p, in->id);
}

PyObject *koila__body_new_sum(const exec *x, koila_value v)
{
    koila_meta_info m = *koila__exec_meta(x, v);
    if (!koila_meta_is_dense(&m))
        m.stride = NULL;
    m.dtype = koila_accumulator_dtype(m.dtype, koila_plan_share(x->plan, v), false);
    return koila__torch_empty(&m, -1, -1);
}

int koila__body_append(PyObject *list, PyObject *o)
{
    const int status = o ? PyList_Append(list, o) : -1;
    Py_XDECREF(o);
    return status;
}

PyObject *koila__body_next(PyObject *list, Py_ssize_t *at)
{
    if (*at >= PyList_GET_SIZE(list)) {
        PyErr_SetString(PyExc_SystemError, "koila: a body has more values than it was given");
        return NULL;
    }
    ++*at;
    return Py_NewRef(PyList_GET_ITEM(list, *at - 1));
}

int koila__body_mode(const cached *c)
{
    const bool is_deterministic = koila__call_mode() >> 3;
    if (is_deterministic)
        return KOILA__COMPILE_OFF;
    return c->compiles ? KOILA__COMPILE_ON : (int)koila__settings_now().compile;
}

void koila__bodies_free(koila__bodies *bodies, uint32_t n_stages)
{
    for (uint32_t k = 0; bodies && k < n_stages; k++) {
        Py_XDECREF(bodies->at[k].function);
        Py_XDECREF(bodies->at[k].clock);
        PyMem_RawFree(bodies->at[k].wholes);
    }
    PyMem_RawFree(bodies);
}

/* ---- a body is run */

static bool is_used(const koila__body *b) { return b->function && !b->rests; }

bool koila__body_is_there(const exec *x, uint32_t stage)
{
    return x->c->bodies && is_used(&x->c->bodies->at[stage]);
}

/* Makes the sums begin at zero, and appends them. */
static int append_sums(exec *x, const koila_stage *st, PyObject *list)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_value v = st->instrs[i].id;
        if (!koila__body_is_sum(x->plan, &st->instrs[i]))
            continue;
        if (!x->acc[v]) {
            x->acc[v] = koila__body_new_sum(x, v);
            PyObject *done = x->acc[v]
                                 ? PyObject_CallFunctionObjArgs(koila__torch.zero_, x->acc[v], NULL)
                                 : NULL;
            Py_XDECREF(done);
            if (!done)
                return -1;
        }
        if (PyList_Append(list, x->acc[v]) < 0)
            return -1;
    }
    return 0;
}

static PyObject *inputs_of(exec *x, const koila_stage *st, const koila__body *b)
{
    PyObject *list = PyList_New(0);
    int status = list ? 0 : -1;
    for (uint32_t i = 0; i < b->n_wholes && status == 0; i++) {
        PyObject *t = x->whole[b->wholes[i]];
        if (!t)
            PyErr_SetString(PyExc_SystemError, "koila: a whole input of a body is missing");
        status = t ? PyList_Append(list, t) : -1;
    }
    for (uint32_t i = 0; i < st->n_instrs && status == 0; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind == KOILA_DO_SLICE)
            status = koila__body_append(
                list, koila__exec_slice(x, in->id, koila_plan_need(x->plan, in->user, in->steal)));
        else if (in->kind == KOILA_DO_FETCH)
            status = koila__body_append(list, koila__exec_fetch(x, in->id));
    }
    if (status == 0)
        status = append_sums(x, st, list);
    if (status < 0)
        Py_CLEAR(list);
    return list;
}

static int collect(exec *x, const koila_stage *st, PyObject *results)
{
    Py_ssize_t at = 0;
    int status = 0;
    for (uint32_t i = 0; i < st->n_instrs && status == 0; i++) {
        const koila_instr *in = &st->instrs[i];
        const bool adds = in->kind == KOILA_DO_ADD && !koila__body_is_sum(x->plan, in);
        if (!adds && in->kind != KOILA_DO_KEEP && in->kind != KOILA_DO_PUT)
            continue;
        Py_XSETREF(x->local[in->id], koila__body_next(results, &at));
        if (!x->local[in->id])
            return -1;
        if (adds)
            status = koila__exec_add(x, in->id, false);
        else
            status = in->kind == KOILA_DO_KEEP ? koila__exec_keep(x, in->id)
                                               : koila__exec_put(x, in->id, false);
    }
    for (uint32_t i = 0; i < st->n_instrs; i++)
        if (st->instrs[i].kind == KOILA_DO_KEEP || st->instrs[i].kind == KOILA_DO_PUT ||
            st->instrs[i].kind == KOILA_DO_ADD)
            Py_CLEAR(x->local[st->instrs[i].id]);
    return status;
}

static _Thread_local exec *running; /* whose body this thread runs; NULL: none */

PyObject *koila__body_draw(koila_node n)
{
    if (!running || n >= koila_graph_n_nodes(running->g)) {
        PyErr_SetString(PyExc_RuntimeError, "koila: random numbers of a loop that does not run");
        return NULL;
    }
    const koila_value v = koila_node_get(running->g, n).first_output;
    const int drawn = koila__exec_prepare_random(running, n, true);
    PyObject *numbers = drawn == 1 ? running->local[v] : NULL;
    if (numbers)
        running->local[v] = NULL;
    else if (drawn >= 0)
        PyErr_SetString(PyExc_SystemError, "koila: a random call of a body drew nothing");
    return numbers;
}

/* Calls `function` with the list `inputs`, which it may empty. */
static PyObject *call_body(exec *x, PyObject *function, PyObject *inputs)
{
    exec *before = running;
    running = x;
    PyObject *results = PyObject_CallOneArg(function, inputs);
    running = before;
    return results;
}

int koila__body_run(exec *x, uint32_t stage)
{
    const koila_stage *st = koila_plan_stage(x->plan, stage);
    const koila__body *b = &x->c->bodies->at[stage];
    PyObject *function = Py_XNewRef(b->function);
    PyObject *inputs = function ? inputs_of(x, st, b) : NULL;
    if (!function) /* another thread's run has dropped it meanwhile */
        PyErr_SetString(PyExc_RuntimeError, "koila: the body of a loop is gone");
    PyObject *results = inputs ? call_body(x, function, inputs) : NULL;
    Py_XDECREF(inputs);
    Py_XDECREF(function);
    int status = results ? collect(x, st, results) : -1;
    Py_XDECREF(results);
    if (status < 0)
        x->failed_in_body = true;
    for (uint32_t i = 0; i < st->n_instrs; i++)
        x->n_run += st->instrs[i].kind == KOILA_DO_RUN;
    return status < 0 ? -1 : koila__check_signals();
}

/* ---- when a body is used */

/* Did memory run out with hardly less of it? */
static bool is_too_little(const koila__bodies *bodies, const koila__room *room)
{
    const uint64_t at = bodies->ran_out_at;
    return at && room->bytes - at / 8 <= at;
}

bool koila__bodies_fit(const cached *c, const koila__room *room)
{
    if (!c->bodies || koila__body_mode(c) == KOILA__COMPILE_OFF || is_too_little(c->bodies, room))
        return false;
    bool any = false;
    for (uint32_t k = 0; k < c->info.n_stages; k++) {
        if (!is_used(&c->bodies->at[k]))
            continue;
        if (c->bodies->at[k].peak_bytes > room->bytes)
            return false;
        any = true;
    }
    return any;
}

uint64_t koila__bodies_peak(const cached *c)
{
    uint64_t most = 0;
    if (c->bodies->gpu_peak_bytes)
        return c->bodies->gpu_peak_bytes;
    for (uint32_t k = 0; k < c->info.n_stages; k++) {
        const koila__body *b = &c->bodies->at[k];
        const uint64_t peak =
            is_used(b) && b->peak_bytes ? b->peak_bytes : koila_plan_stage(c->plan, k)->peak_bytes;
        most = peak > most ? peak : most;
    }
    return most;
}

bool koila__bodies_have_run(const cached *c)
{
    if (c->gpu >= 0)
        return c->bodies->gpu_peak_bytes;
    for (uint32_t k = 0; k < c->info.n_stages; k++)
        if (is_used(&c->bodies->at[k]) && !c->bodies->at[k].peak_bytes)
            return false;
    return true;
}

void koila__body_saw(const cached *c, uint32_t stage, uint64_t peak_bytes)
{
    koila__body *b = &c->bodies->at[stage];
    if (peak_bytes > b->peak_bytes)
        b->peak_bytes = peak_bytes;
}

void koila__bodies_saw(const cached *c, uint64_t peak_bytes)
{
    c->bodies->gpu_peak_bytes = peak_bytes;
}

static void took(koila__body *b, bool is_compiled, uint32_t n_slices, double seconds_each)
{
    double *least = is_compiled ? &b->ran : &b->walked;
    b->n_ran += is_compiled ? n_slices : 0;
    if (!*least || seconds_each < *least)
        *least = seconds_each;
}

void koila__body_took(const cached *c, uint32_t stage, bool is_compiled, double seconds)
{
    took(&c->bodies->at[stage], is_compiled, 1, seconds);
}

/* ---- the times of loops on a GPU */

bool koila__clock_begins(const cached *c, uint32_t stage, bool is_compiled)
{
    koila__body *b = c->gpu >= 0 && c->bodies ? &c->bodies->at[stage] : NULL;
    const bool may_come = b && (c->bodies->n_awaited || !c->bodies->is_asked);
    const bool is_open = b && !b->has_won && (b->function || may_come);
    if (!is_open || b->clock) /* one that is not read yet is kept */
        return false;
    b->clock = koila__gpu_ask("Clock", c->gpu);
    b->n_clocked = 0;
    b->is_clocked_compiled = is_compiled;
    PyErr_Clear();
    return b->clock != NULL;
}

void koila__clock_ends(const cached *c, uint32_t stage, uint32_t n_slices)
{
    koila__body *b = &c->bodies->at[stage];
    if (!n_slices) { /* there may be an exception */
        Py_CLEAR(b->clock);
        return;
    }
    PyObject *done = b->clock ? PyObject_CallMethod(b->clock, "ends", NULL) : NULL;
    b->n_clocked = n_slices;
    if (!done)
        Py_CLEAR(b->clock);
    PyErr_Clear();
    Py_XDECREF(done);
}

/* Reads the clock of body b, if the GPU has come to the end of the loop. */
static void read_clock(koila__body *b)
{
    PyObject *r = b->clock ? PyObject_CallMethod(b->clock, "seconds", NULL) : NULL;
    const double seconds = r ? PyFloat_AsDouble(r) : -1;
    if (seconds >= 0)
        took(b, b->is_clocked_compiled, b->n_clocked, seconds / b->n_clocked);
    if (seconds >= 0 || PyErr_Occurred())
        Py_CLEAR(b->clock);
    PyErr_Clear();
    Py_XDECREF(r);
}

/* Enough slices ran with body b. One that lost is compared with a new walk, for the machine may
 * have been busier than at the last one. */
static void judge(koila__body *b)
{
    const bool is_lost = b->ran > slower * b->walked;
    b->n_ran = 0;
    b->has_won = !is_lost;
    b->n_lost = is_lost ? b->n_lost + 1 : 0;
    b->rests = is_lost;
    if (is_lost)
        b->walked = b->ran = 0;
    if (b->n_lost == MOST_LOST)
        Py_CLEAR(b->function);
}

void koila__bodies_judge(cached *c)
{
    for (uint32_t k = 0; k < c->info.n_stages; k++) {
        koila__body *b = &c->bodies->at[k];
        read_clock(b);
        if (b->rests && b->walked > 0)
            b->rests = false;
        else if (b->function && b->n_ran >= SLICES_TO_JUDGE && b->walked > 0)
            judge(b);
    }
}

void koila__bodies_raised(cached *c, const koila__room *room)
{
    PyObject *type, *value, *trace;
    const bool may_wait = c->bodies && koila__is_out_of_memory() && room->bytes != UINT64_MAX;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *module = PyImport_ImportModule("koila._compile");
    PyObject *waits = may_wait ? Py_True : Py_False; // borrowed
    PyObject *done = module ? PyObject_CallMethod(module, "raised", "OO", value, waits) : NULL;
    if (!done)
        PyErr_WriteUnraisable(NULL);
    Py_XDECREF(done);
    Py_XDECREF(module);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    if (may_wait && room->bytes > c->bodies->ran_out_at)
        c->bodies->ran_out_at = room->bytes;
    for (uint32_t k = 0; c->bodies && !may_wait && k < c->info.n_stages; k++)
        Py_CLEAR(c->bodies->at[k].function);
}
