/* exec.c — executes a plan on real tensors: stages, slices, instructions (koila/plan.h).
 *
 * Out of memory. A slice that runs out is dropped, and its rows are run again in halves.
 * Accumulators that it had already added to are remembered and skipped. Complete slices are never
 * run again, and the pieces that a slice fetched are released only when it is complete. Any other
 * failure is left to the caller (request.c), with the exception set and nothing outside changed.
 * A slice whose rows lie in one piece is not halved.
 * Where other ranks run the same calls at the same time (ranks.c), no rank halves a slice alone.
 *
 * Invariant: when a slice is complete, no local value is left (koila_plan_check checks this of
 * every plan).
 */
#include "run/exec.h"

#include "ground/shield.h"
#include "memlab/credit.h"

enum { MOST_TOLD = 64 }; /* stages of which is told whether they ran compiled */

/* ---- one slice, one stage */

/* Node n raised: adds a note with its operator, line and rows to the exception. (Before Python 3.11
 * exceptions have no notes.) */
static void add_note(const exec *x, koila_node n, bool in_loop)
{
    PyObject *type, *value, *trace, *text, *done = NULL;
    /* will be retried, or gets its text elsewhere */
    if (koila__is_out_of_memory() || !PyErr_ExceptionMatches(PyExc_Exception))
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    const uint32_t line = koila_node_get(x->c->part, koila__exec_recorded(x, n)).line;
    const char *file = line == KOILA_NONE ? NULL : koila_graph_line_file(x->c->part, line);
    char rows[96] = "";
    if (in_loop)
        snprintf(rows, sizeof rows, ", on rows %lld to %lld of %lld", (long long)x->begin,
                 (long long)x->end - 1, (long long)x->batch);
    text =
        file
            ? PyUnicode_FromFormat(
                  "koila: raised by %s of %s:%u%s",
                  koila_op_name(x->table, koila_sig_get(x->table, koila_node_get(x->g, n).sig)->op),
                  file, koila_graph_line_number(x->c->part, line), rows)
            : NULL;
    if (text && value && PyObject_HasAttrString(value, "add_note"))
        done = PyObject_CallMethod(value, "add_note", "O", text);
    Py_XDECREF(done);
    Py_XDECREF(text);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* Runs a call that all ranks make now, after meeting them. Inside it the budget is not enforced: a
 * rank that raised there would leave the others waiting. */
static int run_shared(exec *x, const koila_instr *in, bool in_loop)
{
    if (koila__ranks_meet(x->ranks) < 0) {
        x->failure_announced = true;
        return -1;
    }
    const bool refuses = koila__resident_refuses_here();
    koila__cpu_bytes_lift_limit(true);
    koila__resident_refuse_here(false);
    const int status = koila__exec_node(x, in, in_loop);
    koila__resident_refuse_here(refuses);
    koila__cpu_bytes_lift_limit(false);
    x->failed_inside_call = status < 0;
    return status;
}

/* What the module that this thread runs as it is (koila._opaque) asks and tells. */
static _Thread_local struct {
    bool no_graph;     /* nothing reads its graph */
    bool was_compiled; /* meanwhile: this call's memory is not the next one's */
    bool tells;        /* `used_up` is known */
    uint64_t used_up;
} module_run;

bool koila__wants_graph(void) { return !module_run.no_graph; }
void koila__note_compiled(void) { module_run.was_compiled = true; }

void koila__note_used_up(uint64_t bytes)
{
    module_run.tells = true;
    module_run.used_up = bytes;
}

static bool is_backward_of_module(const exec *x, const koila_instr *in)
{
    const koila_sig sig = koila_node_get(x->g, in->id).sig;
    return koila_op_facts(x->table, koila_sig_get(x->table, sig)->op) & KOILA_FACT_OPAQUE_BACKWARD;
}

/* Bytes of the graph that the backward of a module which runs as it is uses up. They are the plan's
 * until it is over; in a first step, the plan has but a guess. */
static uint64_t used_up_by(const exec *x, const koila_instr *in, bool in_loop)
{
    enum { KEPT = 3 }; /* position of the list that ends with the graph */
    const koila_sig_info *s = koila_sig_get(x->table, koila_node_get(x->g, in->id).sig);
    if (!is_backward_of_module(x, in) || s->n_pos <= KEPT)
        return 0;
    if (module_run.tells)
        return module_run.used_up;
    uint32_t n = 0; /* tensors before the list's end */
    const koila_arg *list = &s->tokens[s->start[KEPT]];
    for (const koila_arg *a = s->tokens; a <= list + list->n; a++)
        n += a->kind == KOILA_ARG_TENSOR;
    if (list->kind != KOILA_ARG_LIST || !list->n)
        return 0;
    const uint64_t bytes = koila_meta_get(x->table, s->inputs[n - 1])->n_bytes;
    return in_loop ? bytes / (uint64_t)x->batch * (uint64_t)koila__exec_n_rows(x) : bytes;
}

/* A node has run, which took `peak` bytes at most where `left` are left of it. */
static void learn_exactly(const exec *x, const koila_instr *in, int64_t peak, int64_t left)
{
    const koila_sig sig = koila_node_get(x->g, in->id).sig;
    const bool once = koila_plan_runs_once(x->plan, in->id);
    const int64_t rows = once ? 0 : koila__exec_n_rows(x);
    const int64_t batch = once ? 0 : x->batch;
    const bool is_less = peak < left;
    koila__learn(sig, rows, batch, is_less ? 0 : (uint64_t)(peak - left), KOILA__MEASURED_HERE);
    if (is_backward_of_module(x, in))
        koila__learn_spared(sig, rows, batch, is_less ? (uint64_t)(left - peak) : 0);
}

/* A node was refused memory, with the exception set: what it held and asked for, at most, beyond
 * its results is the least that it uses inside. The next plan counts with that. */
static void learn_at_least(const exec *x, const koila_instr *in, bool in_loop, int64_t peak)
{
    const bool once = koila_plan_runs_once(x->plan, in->id);
    const uint64_t results =
        koila__slice_result_bytes(x->plan, in->id, in_loop ? koila__exec_n_rows(x) : x->batch);
    if (peak > 0 && (uint64_t)peak > results)
        koila__learn(koila_node_get(x->g, in->id).sig, once ? 0 : koila__exec_n_rows(x),
                     once ? 0 : x->batch, (uint64_t)peak - results, KOILA__MEASURED_HERE);
}

/* Runs a node that is measured. The collector waits: what it frees in the middle of an operator
 * would look like bytes that the operator used inside. Not in a module that runs as it is, which is
 * a program of its own. */
static int run_alone(exec *x, const koila_instr *in, bool in_loop)
{
    const koila_op op = koila_sig_get(x->table, koila_node_get(x->g, in->id).sig)->op;
    const uint32_t of_module = KOILA_FACT_OPAQUE_CALL | KOILA_FACT_OPAQUE_BACKWARD;
    const bool is_module = koila_op_facts(x->table, op) & of_module;
    const bool collects = !is_module && PyGC_Disable();
    const int status = koila__exec_node(x, in, in_loop);
    if (collects)
        PyGC_Enable();
    return status;
}

/* Runs a node and measures its workspace: what this thread and its helpers allocated for it. A
 * shared call that used more than the budget fails here: inside it the budget is not enforced, so
 * overuse is detected when the call returns. */
static int run_measured(exec *x, const koila_instr *in, bool in_loop, bool is_shared)
{
    koila__use use;
    int64_t peak, now;
    const uint64_t limit = is_shared ? koila__cpu_bytes_get_limit() : UINT64_MAX;
    const int window = is_shared ? koila__cpu_bytes_open() : -1;
    koila__use_begin(&use);
    const int status = is_shared ? run_shared(x, in, in_loop) : run_alone(x, in, in_loop);
    const bool is_known = koila__use_end(&use, &peak, &now);
    const uint64_t held = koila__cpu_bytes_close(window);
    const koila_sig sig = koila_node_get(x->g, in->id).sig;
    /* a view is planned with no memory at all, so bytes that it took were a copy */
    const bool is_view = koila_op_flags(x->table, koila_sig_get(x->table, sig)->op) & KOILA_OP_VIEW;
    const int64_t left = (is_view && now > 0 ? 0 : now) + (int64_t)used_up_by(x, in, in_loop);
    if (status == 0 && is_known && !module_run.was_compiled)
        learn_exactly(x, in, peak, left);
    else if (status < 0 && is_known && koila__is_out_of_memory())
        learn_at_least(x, in, in_loop, peak);
    if (status == 0 && is_shared && held > limit) {
        PyErr_Format(koila__torch.oom_type,
                     "a sharded module used %llu bytes more than the budget allows",
                     (unsigned long long)(held - limit));
        return -1;
    }
    return status;
}

/* What a call on a GPU is to the executor; asked once a call. */
typedef enum gpu_call {
    GPU_PLAIN, /* or not on a GPU */
    GPU_PRODUCT,
    GPU_BY_LIBRARY, /* a library of the GPU's vendor chooses what it uses inside */
} gpu_call;

static gpu_call call_on_gpu(const exec *x, const koila_instr *in)
{
    if (x->c->gpu < 0)
        return GPU_PLAIN;
    const koila_op op = koila_sig_get(x->table, koila_node_get(x->g, in->id).sig)->op;
    if (koila_op_facts(x->table, op) & KOILA_FACT_OPAQUE_CALL)
        return GPU_BY_LIBRARY;
    switch (koila_facts_dense(koila_op_facts(x->table, op))) {
    case KOILA_FACT_DENSE_CONTRACT:
    case KOILA_FACT_DENSE_CONTRACT_BIASED:
        return GPU_PRODUCT;
    case KOILA_FACT_DENSE_CONV:
    case KOILA_FACT_DENSE_CONV_BACKWARD:
    case KOILA_FACT_DENSE_ATTENTION:
    case KOILA_FACT_DENSE_ATTENTION_BACKWARD:
        return GPU_BY_LIBRARY;
    default: /* opaque: cuDNN's recurrent layers */
        return koila_op_flags(x->table, op) & KOILA_OP_OPAQUE ? GPU_BY_LIBRARY : GPU_PLAIN;
    }
}

/* Is it unknown what the call uses inside? It is measured until two runs agree, for each number of
 * rows, since asking takes time. */
static bool is_news(const exec *x, const koila_instr *in)
{
    const bool once = koila_plan_runs_once(x->plan, in->id);
    return !koila__learned_surely(koila_node_get(x->g, in->id).sig,
                                  once ? 0 : koila__exec_n_rows(x), once ? 0 : x->batch);
}

/* run_measured() of a GPU. */
static int run_measured_on_gpu(exec *x, const koila_instr *in, bool in_loop)
{
    koila__gpu_count before, after;
    koila__measured how;
    const bool is_read = koila__gpu_bytes(x->c->gpu, &before);
    const int status = run_alone(x, in, in_loop);
    const bool once = koila_plan_runs_once(x->plan, in->id);
    if (status < 0 || !is_read || module_run.was_compiled || !koila__gpu_bytes(x->c->gpu, &after))
        return status;
    after.now += used_up_by(x, in, in_loop);
    const uint64_t bytes = koila__gpu_inside(&before, &after, &how);
    koila__learn(koila_node_get(x->g, in->id).sig, once ? 0 : koila__exec_n_rows(x),
                 once ? 0 : x->batch, bytes, how);
    return 0;
}

static int run_one(exec *x, const koila_instr *in, bool in_loop)
{
    int status;
    module_run.no_graph = in->flags & KOILA_INSTR_NO_GRAPH;
    module_run.was_compiled = false;
    module_run.tells = false;
    const bool is_shared = koila__ranks_share(x->ranks, x->g, in->id);
    const gpu_call call = call_on_gpu(x, in);
    if (x->measure)
        status = run_measured(x, in, in_loop, is_shared);
    else if (call == GPU_BY_LIBRARY && !is_shared && is_news(x, in))
        status = run_measured_on_gpu(x, in, in_loop);
    else
        status = is_shared ? run_shared(x, in, in_loop) : koila__exec_node(x, in, in_loop);
    module_run.no_graph = false;
    if (status < 0) {
        add_note(x, in->id, in_loop);
        return -1;
    }
    if (call == GPU_PRODUCT)
        koila__gpu_ran_product(x->c->gpu);
    return koila__check_signals();
}

/* A call that adds to a sum while it computes. It fails before it begins, or not at all: it asks
 * for its memory first. */
static int add_onto(exec *x, const koila_instr *in, bool in_loop)
{
    if (koila__exec_add_onto(x, in, in_loop) < 0) {
        add_note(x, in->id, in_loop);
        return -1;
    }
    if (call_on_gpu(x, in) == GPU_PRODUCT)
        koila__gpu_ran_product(x->c->gpu);
    return koila__check_signals();
}

/* A call of a loop whose result goes into an accumulator. */
static int run_addend(exec *x, const koila_instr *in)
{
    const bool adds_to_rows = x->acc[in->user] && (x->inner || !koila__exec_is_whole(x));
    if (!(in->flags & KOILA_INSTR_ONTO) || !adds_to_rows)
        return run_one(x, in, true) < 0 ? -1 : koila__exec_take_addend(x, in);
    return add_onto(x, in, true);
}

static int run_inner(exec *x, const koila_inner *inner);

/* Instruction i: a call that makes an addend, or a sum or a view of what is added up already. */
static int run_sum(exec *x, const koila_instr *in, uint32_t i, bool in_loop)
{
    const bool is_told = in->flags & KOILA_INSTR_TOLD;
    x->n_run += is_told;
    if (!in_loop) {
        const koila_value v = koila_node_get(x->g, in->id).first_output;
        if (!is_told && add_onto(x, in, false) < 0)
            return -1;
        x->whole[v] = Py_NewRef(x->whole[in->user]);
        return 0;
    }
    if (is_told)
        return 0;
    if (!x->done[i] && run_addend(x, in) < 0)
        return -1;
    x->done[i] = 1;
    return 0;
}

static int run_instr(exec *x, const koila_stage *st, uint32_t i)
{
    const koila_instr *in = &st->instrs[i];
    const koila_value v = in->id;
    const bool is_owned = in->flags & KOILA_INSTR_OWNED;
    switch ((koila_instr_kind)in->kind) {
    case KOILA_DO_RUN:
        if (in->flags & (KOILA_INSTR_ADDS | KOILA_INSTR_TOLD))
            return run_sum(x, in, i, st->is_loop);
        if (st->is_loop && !koila_plan_runs_in(x->plan, in->id, x->begin, x->end))
            return 0;
        return run_one(x, in, st->is_loop);
    case KOILA_DO_SLICE:
        x->local[v] = koila__exec_slice(x, v, koila_plan_need(x->plan, in->user, in->steal));
        return x->local[v] ? 0 : -1;
    case KOILA_DO_FETCH:
        x->local[v] = koila__exec_fetch(x, v);
        return x->local[v] ? 0 : -1;
    case KOILA_DO_KEEP:
        return koila__exec_keep(x, v);
    case KOILA_DO_PUT:
        return koila__exec_put(x, v, is_owned);
    case KOILA_DO_INNER:
        return run_inner(x, st->inner);
    case KOILA_DO_ADD:
        if (x->done[i] || in->flags & (KOILA_INSTR_ADDED | KOILA_INSTR_TOLD))
            return 0;
        if (koila__exec_add(x, v, is_owned) < 0)
            return -1;
        x->done[i] = 1;
        return 0;
    case KOILA_DO_FREE:
        if (st->is_loop)
            Py_CLEAR(x->local[v]);
        else
            Py_CLEAR(x->whole[v]);
        return 0;
    }
    koila_assert(!"a kind of instruction");
    return 0;
}

static int run_instrs(exec *x, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++)
        if (run_instr(x, st, i) < 0)
            return -1;
    return 0;
}

static bool has_no_local(const exec *x)
{
    for (uint32_t v = 0; v < x->n_values; v++)
        if (x->local[v])
            return false;
    return true;
}

static void clear_local(exec *x)
{
    for (uint32_t v = 0; v < x->n_values; v++)
        Py_CLEAR(x->local[v]);
}

static int run_rows(exec *x, uint32_t k, int64_t begin, int64_t end, int64_t rows,
                    const uint8_t *already);

/* After a complete slice: releases the pieces that it fetched for the last time. */
static void end_slice(exec *x, const koila_stage *st)
{
    koila_assert(has_no_local(x));
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind == KOILA_DO_FETCH && in->flags & KOILA_INSTR_LAST)
            koila__exec_give_up(x, in->id, x->begin, x->end);
    }
}

/* The slice failed, with the exception set. If it ran out of memory, its rows run again in halves,
 * without adding again to accumulators that it had added to. */
static int run_in_halves(exec *x, uint32_t k)
{
    const koila_stage *st = koila_plan_stage(x->plan, k);
    const int64_t begin = x->begin;
    const int64_t end = x->end;
    const int64_t half = (end - begin + 1) / 2;
    const bool may_halve = koila__is_out_of_memory() && !x->ranks && !x->failed_in_body &&
                           koila_plan_slice_end(x->plan, st->axis, begin, half) < end;
    if (may_halve)
        PyErr_Clear();
    clear_local(x);
    if (!may_halve)
        return -1;
    for (uint32_t i = 0; i < st->n_instrs; i++)
        if (st->instrs[i].kind == KOILA_DO_KEEP)
            koila__exec_give_up(x, st->instrs[i].id, begin, end);
    x->retries++;
    uint8_t *added = PyMem_Malloc(st->n_instrs);
    if (!added) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(added, x->done, st->n_instrs);
    const int status = run_rows(x, k, begin, end, half, added);
    PyMem_Free(added);
    return status;
}

/* One slice of stage k: its compiled body, or its instructions. The times of both are compared, on
 * the CPU in processor time: other work on the machine, and what is compiled meanwhile, does not
 * count. */
static int run_slice(exec *x, uint32_t k, bool is_full)
{
    const bool is_compiled = x->has_body && is_full;
    const bool is_timed = is_full && x->c->bodies && x->c->gpu < 0 && !x->outer;
    const double started = is_timed ? koila__stopwatch_now().busy : 0;
    if (is_compiled)
        x->compiled |= k < MOST_TOLD ? (uint64_t)1 << k : 0;
    const int status =
        is_compiled ? koila__body_run(x, k) : run_instrs(x, koila_plan_stage(x->plan, k));
    if (is_timed && status == 0)
        koila__body_took(x->c, k, is_compiled, koila__stopwatch_now().busy - started);
    return status;
}

/* Runs rows [begin, end) of a loop in slices of at most `rows`. already[instrs], or NULL:
 * accumulators that these rows were added to before. */
static int run_rows(exec *x, uint32_t k, int64_t begin, int64_t end, int64_t rows,
                    const uint8_t *already)
{
    const koila_stage *st = koila_plan_stage(x->plan, k);
    const int64_t planned = koila_plan_axis_rows(x->plan, st->axis);
    koila_assert(rows > 0 && st->n_instrs > 0);
    x->batch = koila_graph_axis_size(x->g, st->axis);
    for (int64_t at = begin, next; at < end; at = next) {
        next = koila_plan_slice_end(x->plan, st->axis, at, rows);
        next = next < end ? next : end;
        x->begin = at;
        x->end = next;
        if (already)
            memcpy(x->done, already, st->n_instrs);
        else
            memset(x->done, 0, st->n_instrs);
        if (run_slice(x, k, !already && next - at == planned) == 0) {
            end_slice(x, st);
            if (x->progress)
                koila__progress_slice(x->progress);
        } else if (run_in_halves(x, k) < 0)
            return -1;
        else if (next - at == rows) /* the next slices are as large: not once more in vain */
            rows = (rows + 1) / 2;
    }
    return 0;
}

/* Makes the collected results whole values; sums that were accumulated in a wider dtype are cast
 * back. */
static int end_loop(exec *x, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_value v = st->instrs[i].id;
        const bool is_sum = st->instrs[i].kind == KOILA_DO_ADD;
        if ((!is_sum && st->instrs[i].kind != KOILA_DO_PUT) || !x->acc[v])
            continue;
        if (koila_plan_adds_on(x->plan, v)) /* the rows' */
            continue;
        const koila_dtype dtype = koila__exec_meta(x, v)->dtype;
        PyObject *is = is_sum ? PyObject_GetAttrString(x->acc[v], "dtype") : NULL;
        if (is && is != koila__dtype_object(dtype)) {
            PyObject *cast = koila__torch_cast(x->acc[v], dtype);
            if (cast)
                Py_SETREF(x->acc[v], cast);
        }
        Py_XDECREF(is);
        if (PyErr_Occurred())
            return -1;
        Py_XSETREF(x->whole[v], x->acc[v]);
        x->acc[v] = NULL;
    }
    return 0;
}

/* Sums that are added to whole values begin as these. */
static void begin_second_terms(exec *x, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind == KOILA_DO_ADD && in->flags & KOILA_INSTR_SECOND)
            Py_XSETREF(x->acc[in->id], Py_XNewRef(x->whole[in->user]));
    }
}

static int run_stage(exec *x, uint32_t k)
{
    const koila_stage *st = koila_plan_stage(x->plan, k);
    if (!st->is_loop) {
        x->begin = x->end = x->batch = 0;
        return run_instrs(x, st);
    }
    if (!st->n_instrs)
        return 0;
    koila_assert(!x->done && has_no_local(x));
    x->done = PyMem_Malloc(st->n_instrs);
    if (!x->done) {
        PyErr_NoMemory();
        return -1;
    }
    begin_second_terms(x, st);
    /* as it is for all slices: the body's sums begin otherwise than the walk's */
    x->has_body = x->uses_bodies && koila__body_is_there(x, k);
    const bool is_on_cpu = x->c->gpu < 0;
    const bool is_clocked = !is_on_cpu && koila__clock_begins(x->c, k, x->has_body);
    const uint32_t n_retries = x->retries;
    const int window = x->has_body && is_on_cpu ? koila__cpu_bytes_open() : -1;
    const int64_t n_all = koila_graph_axis_size(x->g, st->axis);
    const int64_t rows = koila_plan_axis_rows(x->plan, st->axis);
    const int status = run_rows(x, k, 0, n_all, rows, NULL);
    const uint64_t peak = koila__cpu_bytes_close(window);
    if (is_clocked)
        koila__clock_ends(x->c, k,
                          status == 0 && x->retries == n_retries ? (uint32_t)(n_all / rows) : 0);
    if (status == 0 && x->has_body && is_on_cpu)
        koila__body_saw(x->c, k, peak > x->base_bytes ? peak - x->base_bytes : 0);
    PyMem_Free(x->done);
    x->done = NULL;
    return status < 0 ? -1 : end_loop(x, st);
}

/* ---- the whole plan */

void koila__exec_free(exec *x)
{
    for (uint32_t v = 0; v < x->n_values; v++) {
        if (x->whole)
            Py_XDECREF(x->whole[v]);
        if (x->local)
            Py_XDECREF(x->local[v]);
        if (x->acc)
            Py_XDECREF(x->acc[v]);
        if (x->kept) {
            for (uint32_t i = 0; i < x->kept[v].n; i++)
                Py_DECREF(x->kept[v].at[i].tensor);
            koila__vec_free(&koila__libc, &x->kept[v]);
        }
    }
    PyMem_Free(x->whole);
    PyMem_Free(x->local);
    PyMem_Free(x->acc);
    PyMem_Free(x->kept);
    koila__exec_free_random(x);
}

int koila__exec_init(exec *x)
{
    x->n_values = koila_graph_n_values(x->g);
    x->whole = PyMem_Calloc(x->n_values + 1, sizeof *x->whole);
    x->local = PyMem_Calloc(x->n_values + 1, sizeof *x->local);
    x->acc = PyMem_Calloc(x->n_values + 1, sizeof *x->acc);
    x->kept = PyMem_Calloc(x->n_values + 1, sizeof *x->kept);
    if (!x->whole || !x->local || !x->acc || !x->kept) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void set_leaf(exec *x, koila_value leaf, PyObject *tensor)
{
    if (leaf != KOILA_NONE && koila_value_get(x->g, leaf).node == KOILA_NONE)
        Py_XSETREF(x->whole[leaf], Py_XNewRef(tensor));
}

static int run_all_stages(exec *x)
{
    const uint32_t n_stages = koila_plan_get(x->plan).n_stages;
    int status = 0;
    for (uint32_t k = 0; k < n_stages && status == 0; k++)
        status = run_stage(x, k);
    return status;
}

/* Sums that the step of a row adds to: they are its accumulators while it runs. */
static void lend_sums(exec *x, exec *inner, bool there)
{
    const koila_inner *step = inner->inner;
    for (uint32_t i = 0; i < step->n_results; i++) {
        const koila_value to = step->results[i].inner;
        const koila_value from = step->results[i].outer;
        if (!step->results[i].adds_on)
            continue;
        koila_assert(there ? !inner->acc[to] : !x->acc[from]);
        if (there) {
            inner->acc[to] = x->acc[from];
            x->acc[from] = NULL;
        } else {
            x->acc[from] = inner->acc[to];
            inner->acc[to] = NULL;
        }
    }
}

/* The calls of a row as a step of their own. Where it fails, the sums of the rows are worthless,
 * and so is the run. */
static int run_inner(exec *x, const koila_inner *step)
{
    exec y = { .outer = x,
               .inner = step,
               .tape = x->tape,
               .c = x->c,
               .plan = step->plan,
               .g = koila_plan_graph(step->plan),
               .table = x->table,
               .node_from = x->node_from,
               .measure = x->measure };
    koila_assert(!x->ranks && !x->outer && koila__exec_n_rows(x) == 1);
    int status = koila__exec_init(&y);
    for (uint32_t i = 0; i < step->n_leaves && status == 0; i++)
        set_leaf(&y, step->leaves[i].inner,
                 (step->leaves[i].is_local ? x->local : x->whole)[step->leaves[i].outer]);
    if (status == 0) {
        lend_sums(x, &y, true);
        status = run_all_stages(&y);
        lend_sums(x, &y, false);
    }
    for (uint32_t i = 0; i < step->n_results && status == 0; i++) {
        const koila_value v = step->results[i].outer;
        if (step->results[i].adds_on)
            continue;
        x->local[v] = Py_XNewRef(y.whole[step->results[i].inner]);
        if (!x->local[v]) {
            PyErr_SetString(PyExc_SystemError, "koila: a result of a row was not made");
            status = -1;
        }
    }
    x->n_run += y.n_run;
    x->retries += y.retries;
    koila__exec_free(&y);
    return status;
}

static int take_results(const exec *x, uint32_t n, PyObject **results)
{
    for (uint32_t i = 0; i < n; i++) {
        results[i] = Py_XNewRef(x->whole[koila_plan_target(x->plan, i)]);
        if (!results[i]) {
            PyErr_SetString(PyExc_SystemError, "koila: a target was not made");
            return -1;
        }
    }
    return 0;
}

static int run_stages(exec *x, uint32_t n, PyObject **results)
{
    PyObject *guard = PyObject_CallNoArgs(koila__torch.guards);
    int status = guard ? 0 : -1;
    const bool before = koila__calls_need_no_functions(status == 0);
    status = status == 0 ? run_all_stages(x) : -1;
    koila__calls_need_no_functions(before);
    if (status == 0)
        status = take_results(x, n, results);
    if (koila__lines_enabled)
        koila__lines_work_for(NULL, 0);
    if (koila__exec_give_generators_back(x) < 0)
        status = -1;
    Py_XDECREF(guard);
    return status;
}

/* Tells all ranks the result. A failure is announced unless it happened inside a call that they
 * share. Returns the common status. */
static int tell_ranks(exec *x, int status, koila__announced *announced)
{
    if (!x->ranks)
        return status;
    if (status == 0) {
        status = koila__ranks_meet(x->ranks);
        x->failure_announced = status < 0;
    } else if (!x->failure_announced && !x->failed_inside_call && koila__ranks_failed(x->ranks))
        *announced = KOILA__ANNOUNCED_BY_US;
    if (x->failure_announced)
        *announced = KOILA__ANNOUNCED_BY_ANOTHER;
    return status;
}

int koila__exec_plan(koila__tape *t, const koila__part *p, const cached *c, PyObject *ranks,
                     bool uses_bodies, uint32_t n, PyObject **results, koila__exec_report *report)
{
    koila__progress progress = koila__progress_begin(c->plan);
    exec x = { .tape = t,
               .c = c,
               .plan = c->plan,
               .g = koila_plan_graph(c->plan),
               .table = koila__table,
               .progress = &progress,
               .node_from = p->node_from,
               .measure = koila__cpu_bytes_ok() && c->gpu < 0 && !c->rests,
               .ranks = ranks,
               .uses_bodies = uses_bodies,
               .base_bytes = koila__cpu_bytes_current() };
    const bool works = koila__work_begin();
    koila__learned_run();
    int status = koila__exec_init(&x);
    for (uint32_t i = 0; i < p->n_leaves && status == 0; i++)
        set_leaf(&x, koila_plan_leaf(c->plan, i), koila__part_leaf(t, p, i));
    if (status == 0)
        status = run_stages(&x, n, results);
    if (works)
        koila__work_end();
    koila__progress_end(&progress);
    koila__exec_free(&x);
    *report = (koila__exec_report){ .n_run = x.n_run,
                                    .retries = x.retries,
                                    .compiled = x.compiled,
                                    .failed_in_body = x.failed_in_body };
    status = tell_ranks(&x, status, &report->announced);
    for (uint32_t i = 0; i < n && status < 0; i++)
        Py_CLEAR(results[i]);
    return status;
}
