/* request.c — one request for values, start to end.
 *
 *   targets = wanted, the effects' values, held   # n_must are needed, the rest is merely held
 *   until it is decided, try:
 *       part = extract(tape.graph, targets)       # values that are concrete or kept are its leaves
 *       no leaf was written since                 # or StaleValueError
 *       of a read: what it computes is kept, and thus a target too       # reads.c
 *       plan = plan_for(part, room, rows)         # or OutOfMemory; what is kept gives way first
 *       strict() allows it                        # or GatherError
 *       the other ranks will make the same calls  # sharded modules only
 *       results = exec_plan(plan)
 *   tape.values[target].real = results            # last: nothing before this line can be seen
 *   the effects happen
 *
 * A stage that fails says what to try next: the same targets in smaller slices (the plan was too
 * optimistic; all ranks together where they share the step), or fewer of the targets that are
 * merely held, for those must not stop a step. What cannot be done raises, with nothing changed.
 */
#include "run/run.h"
#include "ground/clock.h"
#include "ground/shield.h"

enum {
    MAX_RETRIES = 64,
    N_LARGEST_TOLD = 3,
    CALM_AFTER = 16, /* runs that taught nothing: no longer are the calls of each measured */
    MEASURED_OF = 16 /* but one in so many */
};

typedef enum next {
    GO_ON,   /* with the next stage of this try */
    RETRY,   /* with the rows and the targets that the request has now */
    MADE,    /* results are there */
    PLANNED, /* koila.plan(): that was all */
    NOTHING, /* no target is left to make */
    FAILED   /* with an exception */
} next;

typedef struct request {
    koila__tape *tape;
    koila_value *targets; /* [n] of the tape; the first n_must are needed, others merely held */
    uint32_t n, n_must, n_all;
    bool is_wanted;  /* somebody asks for some of them */
    int64_t rows;    /* of a slice, for the next plan; 0: as many as fit */
    uint32_t axes;   /* koila_axes: of those rows */
    bool recomputes; /* results may be dropped and computed again */
    bool offloads;   /* or wait in host memory */
    /* bytes left out of the room, since a plan that drops results or cuts rows ran out of memory */
    uint64_t less;
    PyObject *ranks;  /* that make the same calls; None: nothing is sharded; NULL: not asked yet */
    bool rows_agreed; /* all ranks plan with these rows */
    bool no_extra;    /* leave nothing free for what libraries may take */
    bool is_awaited;  /* other ranks wait for this one in the exchange (ranks.c) */
    bool is_read;     /* in the middle of a step */
    bool may_keep;    /* a read: what it computes */
    const koila__wanted *asked;
    koila__step step; /* what is to be told of it; asked_by stands from the beginning */
    /* of one try */
    koila__part part;
    koila__keeping keeping;
    koila__room room;
    cached *c;
    PyObject **results; /* [n + keeping.n] new references, or NULL each */
    uint64_t key;       /* of the step */
    koila__turn turn;
} request;

static int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

/* ---- what to try next */

static next retry_with_rows(request *q, int64_t rows)
{
    koila_assert(rows > 0);
    q->rows = rows;
    return RETRY;
}

static next retry_with_targets(request *q, uint32_t n)
{
    koila_assert(q->n_must <= n && n < q->n);
    q->n = n;
    return n ? RETRY : NOTHING;
}

static uint64_t bytes_of(const request *q, koila_value v)
{
    return koila_meta_get(koila__table, koila_value_get(q->tape->graph, v).meta)->n_bytes;
}

/* pre: something is merely held. */
static next retry_without_largest(request *q)
{
    uint32_t largest = q->n_must;
    for (uint32_t i = q->n_must; i < q->n; i++)
        if (bytes_of(q, q->targets[i]) > bytes_of(q, q->targets[largest]))
            largest = i;
    const koila_value last = q->targets[q->n - 1];
    q->targets[q->n - 1] = q->targets[largest];
    q->targets[largest] = last;
    return retry_with_targets(q, q->n - 1);
}

/* The exception that is set is perhaps that of a value that is merely held: it is dropped, and so
 * are they. FAILED when nothing is merely held. */
static next retry_without_held(request *q)
{
    if (q->n == q->n_must)
        return FAILED;
    PyErr_Clear();
    return retry_with_targets(q, q->n_must);
}

/* ---- the stages of a try */

static next find_part(request *q)
{
    if (koila__part_make(q->tape, q->targets, q->n, true, &q->part) < 0)
        return FAILED;
    if (!q->ranks) {
        q->ranks = koila__ranks_of(q->part.graph);
        if (!q->ranks)
            return FAILED;
        q->is_awaited = q->ranks != Py_None && !koila__is_planning();
    }
    if (koila__part_check_versions(q->tape, &q->part) == 0)
        return GO_ON;
    return koila__is_stale() ? retry_without_held(q) : FAILED;
}

static next find_room(request *q)
{
    if (koila__room_for(q->part.graph, koila__step_need(q->key), &q->room) < 0)
        return FAILED;
    q->room.is_budget &= q->ranks == Py_None; /* ranks agree on slices: none cuts again alone */
    if (koila__is_planning()) {               /* what the step reads will be held beside it */
        uint64_t held;
        if (koila__part_leaf_bytes(q->tape, &q->part, &held) < 0)
            return FAILED;
        koila__room_holds(&q->room, held);
    }
    if (q->no_extra)
        koila__room_without_extra(&q->room);
    if (q->less && q->room.bytes != UINT64_MAX)
        q->room.bytes -= q->less < q->room.bytes ? q->less : q->room.bytes;
    return GO_ON;
}

/* What the run makes beside the targets, for the next one. */
static next find_what_to_keep(request *q)
{
    /* of a module that ranks share all must keep the same */
    if (!q->may_keep || q->ranks != Py_None)
        return GO_ON;
    const int changed =
        koila__reads_choose(q->tape, &q->part, q->targets, q->n, &q->room, q->asked, &q->keeping);
    if (changed < 0)
        return FAILED;
    return changed ? RETRY : GO_ON;
}

/* The plan is in slices, or (ran_out) it does not fit: keep less than until now? */
static bool keep_less(request *q, bool ran_out)
{
    koila__tape *t = q->tape;
    const bool is_kept = q->keeping.n || q->part.kept;
    if (!t->kept.tight && (is_kept || q->is_read)) {
        koila__reads_tighten(t, q->is_read ? q->asked : NULL);
        return is_kept;
    }
    if (q->part.has_only_whole) {
        koila__reads_drop_only_whole(t, &q->part);
        return true;
    }
    if (!ran_out || !is_kept)
        return false;
    if (!q->keeping.n)
        koila__unkeep_all(t);
    q->may_keep = false;
    return true;
}

/* Something has to be cut: is there more room when the C library gives back what it retains? */
static bool settle_room(const request *q)
{
    return !koila__is_planning() && q->room.resident.limit != UINT64_MAX &&
           koila__resident_settle(q->room.held);
}

/* May the batch be cut along other axes than its rows? Ranks agree on rows. */
static bool may_cut_otherwise(const request *q)
{
    return koila__settings_now().axes != KOILA__CUT_BATCH && q->ranks == Py_None;
}

/* Which axes are cut when no number of rows fits. */
static uint32_t last_axes(const request *q)
{
    return may_cut_otherwise(q) ? KOILA_AXES_ANY : KOILA_AXES_ROWS;
}

/* No number of rows fits, whatever was given up for it: all of that comes back, other axes are
 * tried, and results are dropped and computed again. */
static next retry_at_last(request *q)
{
    q->axes = last_axes(q);
    q->recomputes = true;
    q->offloads = koila__host_price(q->room.gpu) > 0; /* measures it, before the next look */
    q->n = q->n_all;
    q->no_extra = false;
    return RETRY;
}

/* There is no plan, for want of memory or as `err` says. Whole because the order of what is tried
 * matters. */
static next without_plan(request *q, koila_status status, const koila_error *err)
{
    const bool has_none =
        status == KOILA_UNSUPPORTED && (q->axes == KOILA_AXES_OTHER || q->axes == KOILA_AXES_BOTH);
    if (has_none && !q->step.retries) {
        q->axes = KOILA_AXES_ROWS; /* only tests ask for another axis where there may be none */
        return RETRY;
    }
    if (has_none) /* the rows had run out of memory before */
        status = KOILA_OOM;
    const bool ran_out = status == KOILA_OOM;
    if (ran_out && !q->no_extra && koila__room_without_extra(&q->room)) {
        q->no_extra = true;
        return RETRY;
    }
    if (ran_out && q->n > q->n_must)
        return retry_without_largest(q);
    if (ran_out && !koila__is_planning() && koila__learned_misfit(q->key))
        return RETRY; /* once: now less is known of what operators use inside */
    if (ran_out && q->axes == KOILA_AXES_ROWS && !q->rows && !q->recomputes && q->ranks == Py_None)
        return retry_at_last(q);
    if (ran_out && !koila__is_planning() && koila__learned_bounds_misfit())
        return RETRY;
    if (!ran_out || q->room.gpu >= 0 || koila__held_fits("one step") == 0) {
        char resident[120], call[140];
        koila__room_tell(&q->room, resident, sizeof resident);
        snprintf(call, sizeof call, "one step%s", resident);
        koila__raise_no_fit(status, err, call);
    }
    return FAILED;
}

/* Does the step need more of the room than may rest on what the system said before? */
static bool asks_anew(const request *q)
{
    const bool is_ample = q->c && koila__room_is_ample(&q->room, &q->c->info);
    koila__step_needs(q->key, is_ample ? KOILA__NEEDS_LITTLE : KOILA__NEEDS_MUCH);
    return !is_ample && q->room.is_recalled;
}

/* May more slices than the fewest be tried? Where nobody else decides the rows. By default only of
 * a backward, on the CPU (on a GPU the time of its run is not known without waiting for it), and
 * where the clock may decide the last bits of a sum. */
static bool may_tune(const request *q)
{
    const koila__settings set = koila__settings_now();
    if (set.slices == KOILA__SLICES_FEWEST || q->rows || q->step.retries || q->recomputes ||
        q->rows_agreed || q->ranks != Py_None || q->axes != KOILA_AXES_ROWS || koila__is_planning())
        return false;
    const bool is_deterministic = koila__call_mode() >> 3;
    return set.slices == KOILA__SLICES_FASTEST ||
           (q->step.asked_by == KOILA__ASKED_BY_BACKWARD && q->room.gpu < 0 && !is_deterministic);
}

/* Does the plan fit in rows, but computes so much again that other ways are compared with it? */
static bool is_slow_in_rows(const request *q)
{
    return q->c->info.replay_ratio > KOILA_SLOW_ROWS && q->axes == KOILA_AXES_ROWS && !q->rows &&
           !q->recomputes && q->ranks == Py_None;
}

static next find_plan(request *q)
{
    koila_error err = KOILA_ERROR_INIT;
    koila_status status = KOILA_OK;
    q->key = koila_graph_hash(q->part.graph);
    if (find_room(q) == FAILED)
        return FAILED;
    const next kept = find_what_to_keep(q);
    if (kept != GO_ON)
        return kept;
    q->turn = (koila__turn){ 0 };
    const koila__cutting how = { .rows = q->rows,
                                 .turn = may_tune(q) ? &q->turn : NULL,
                                 .axes = q->axes,
                                 .recomputes = q->recomputes,
                                 .offloads = q->offloads,
                                 .or_known_last = !q->rows && q->axes == KOILA_AXES_ROWS,
                                 .last_axes = last_axes(q),
                                 .finds_least = q->recomputes && q->n == q->n_must };
    q->c = koila__plan_for(koila__part_give(&q->part), q->part.targets, q->n + q->keeping.n,
                           &q->room, how, &err, &status);
    if (q->c)
        q->c->compiles = q->tape->compiles;
    if (asks_anew(q))
        return RETRY;
    if (q->c && is_slow_in_rows(q))
        return retry_at_last(q);
    const bool ran_out = !q->c && status == KOILA_OOM;
    const bool is_cut = q->c && q->c->info.n_slices > 1;
    if ((is_cut || ran_out) && (settle_room(q) || keep_less(q, ran_out)))
        return RETRY;
    return q->c ? GO_ON : without_plan(q, status, &err);
}

static next ask_strict(request *q)
{
    PyObject *type, *value, *trace;
    if (koila__strict_check(q->tape, q->c, q->n_must) == 0)
        return GO_ON;
    if (q->turn.size) { /* nobody asked for that many slices */
        PyErr_Clear();
        koila__turn_refuse(&q->turn);
        return RETRY;
    }
    if (q->part.kept || q->keeping.n) { /* it decides as if nothing were kept */
        PyErr_Clear();
        q->may_keep = false;
        koila__unkeep_all(q->tape);
        return RETRY;
    }
    if (q->is_wanted)
        return FAILED;
    /* lazy() would have made them in passing: only who asks for such a value is told */
    PyErr_Fetch(&type, &value, &trace);
    const uint32_t n_pass = koila__strict_pass(q->tape, q->targets, q->n_must, q->n);
    if (n_pass == q->n) {
        PyErr_Restore(type, value, trace);
        return FAILED;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return retry_with_targets(q, n_pass);
}

static next agree_with_ranks(request *q)
{
    uint32_t n_slices;
    if (!q->is_awaited)
        return GO_ON;
    koila_assert(q->ranks && q->ranks != Py_None);
    q->is_awaited = false; /* where the exchange fails, it fails on all */
    if (koila__ranks_agree(q->ranks, q->c, q->rows_agreed || koila__settings_now().rows,
                           &n_slices) < 0)
        return FAILED;
    if (!n_slices)
        return GO_ON;
    q->rows_agreed = q->is_awaited = true;
    return retry_with_rows(q, divided_up(q->c->info.batch, n_slices));
}

/* ---- running it */

/* Which line of the program asks, and which operator of it needs the value. */
static void tell_who_asks(request *q)
{
    const koila__context *here = koila__context_peek();
    if (here && here->gathers_for)
        snprintf(q->step.asked_by_op, sizeof q->step.asked_by_op, "%s", here->gathers_for);
    koila__line_text(q->tape->graph, koila__line_now(q->tape), q->step.asked_at,
                     sizeof q->step.asked_at);
}

/* What plans() tells from now on. Takes the plan over. */
static void report(request *q)
{
    tell_who_asks(q);
    q->step.c = q->c;
    const bool are_more = q->turn.size && q->turn.n_fewest < q->c->info.n_slices;
    q->step.n_fewest = are_more ? q->turn.n_fewest : 0;
    if (q->step.asked_by == KOILA__ASKED_BY_BACKWARD)
        koila__count_backward(q->tape, &q->part, &q->step);
    else if (q->step.asked_by != KOILA__ASKED_BY_PLAN)
        koila__count_read(q->tape, &q->part, q->c, q->step.n_run);
    q->c = NULL;
    q->step.n_reads = q->is_read ? 0 : q->tape->kept.n_reads;
    q->step.budget_bytes = q->room.limit;
    if (q->tape->early) {
        q->step.early = PyList_AsTuple(q->tape->early);
        if (!q->step.early)
            PyErr_Clear();
    }
    koila__last_step_is(&q->step);
    const koila__step *told = koila__past_step(0);
    if (told)
        koila__aside_ran(told, q->room.gpu, q->ranks == Py_None);
}

static next planned(request *q)
{
    q->step.base_bytes = q->room.held;
    report(q);
    return PLANNED;
}

static void raise_with_largest(const request *q, bool ranks_wait)
{
    char largest[300], resident[120], text[700];
    koila__largest_text(q->c, N_LARGEST_TOLD, largest, sizeof largest);
    koila__room_tell(&q->room, resident, sizeof resident);
    snprintf(text, sizeof text, "out of memory with slices of %lld %s; largest:%s%s%s",
             (long long)(q->c->info.rows * q->c->info.unit),
             q->c->info.dim == KOILA_NONE ? "row(s)" : "along another dimension of the batch",
             largest, resident,
             ranks_wait ? ". It ran out inside a sharded module, where the other ranks wait: give "
                          "all ranks a smaller koila.micro_batch(n)"
                        : "");
    koila__raise_out_of_memory(text, 0);
}

/* A plan that drops results, or cuts rows, ran out of memory: more are dropped, or cut finer. Where
 * the run has shown what operators use inside, a plan that counts with it comes first. */
static next retry_with_less(request *q)
{
    PyErr_Clear();
    q->step.retries++;
    q->recomputes = true;
    q->offloads &= koila__may_offload(q->room.gpu);
    if (q->c->generation == koila__learned_generation())
        q->less += q->c->info.peak_bytes / 8;
    return RETRY;
}

/* A plan of rows ran out of memory, and no fewer rows can be tried: another axis is, or all ways
 * where the run has shown what operators use inside. */
static next retry_along_other(request *q)
{
    const bool has_shown = q->c->generation != koila__learned_generation();
    q->rows = 0;
    q->axes = has_shown ? last_axes(q) : KOILA_AXES_OTHER;
    if (has_shown)
        return retry_with_less(q);
    PyErr_Clear();
    q->step.retries++;
    return RETRY;
}

/* The plan ran out of memory, with the exception set. Whole because the order of what is tried
 * matters. */
static next after_out_of_memory(request *q, koila__announced announced)
{
    const koila_plan_info *info = &q->c->info;
    const bool is_sharded = q->ranks != Py_None;
    const bool may_retry = q->step.retries < MAX_RETRIES;
    if (!is_sharded && keep_less(q, true)) {
        PyErr_Clear();
        return RETRY;
    }
    const bool is_last_resort = info->n_again || info->n_offloaded || info->n_inner;
    /* all ways are planned anew with what it has shown, not finer slices along that dimension */
    const bool has_shown = info->dim != KOILA_NONE && q->axes == KOILA_AXES_ANY &&
                           q->c->generation != koila__learned_generation();
    if (!is_sharded && may_retry && (is_last_resort || has_shown))
        return retry_with_less(q);
    /* twice the slices, on every rank; a rank that cannot withdraws from the exchange */
    if (announced && may_retry)
        q->rows_agreed = q->is_awaited = true;
    if ((!is_sharded || q->is_awaited) && may_retry && info->rows > 1 && info->batch > 1) {
        PyErr_Clear(); /* the plan was too optimistic */
        q->step.retries++;
        if (info->dim != KOILA_NONE)
            q->axes = KOILA_AXES_OTHER;
        return retry_with_rows(q, q->is_awaited
                                      ? divided_up(info->batch, 2 * (int64_t)info->n_slices)
                                      : divided_up(info->rows, 2) * info->unit);
    }
    if (may_retry && info->dim == KOILA_NONE && info->has_other_axes && may_cut_otherwise(q))
        return retry_along_other(q);
    if (announced != KOILA__ANNOUNCED_BY_ANOTHER &&
        (q->room.gpu >= 0 || koila__held_fits("one step") == 0))
        raise_with_largest(q, is_sharded && !q->is_awaited);
    return FAILED;
}

/* On a GPU torch's allocator keeps the highest peak since the user reset it, and koila does not
 * reset it: the step's own is known where it rose, or where it stood at what was held. A plan that
 * left it alone before will do so again below as high a peak, so nobody is asked. `before`: NULL
 * where it could not be read. */
static void measure_peak(request *q, uint64_t cpu_peak, const koila__gpu_count *before)
{
    koila__gpu_count after;
    if (q->room.gpu < 0) {
        q->step.measured = koila__cpu_bytes_ok();
        q->step.measured_peak_bytes = cpu_peak;
        return;
    }
    const uint64_t above = before ? before->peak - before->now : UINT64_MAX;
    const bool is_read = above < q->c->below_peak && koila__gpu_bytes(q->room.gpu, &after);
    q->step.measured = is_read && (after.peak > before->peak || !above);
    q->step.measured_peak_bytes = q->step.measured ? after.peak : 0;
    if (is_read && !q->step.measured)
        q->c->below_peak = above;
    if (q->step.measured && q->step.compiled)
        koila__bodies_saw(q->c, after.peak - q->room.held);
}

/* Room for the results. */
static next prepare(request *q)
{
    q->results = PyMem_Calloc((size_t)q->n + q->keeping.n + 1, sizeof *q->results);
    if (!q->results) {
        PyErr_NoMemory();
        return FAILED;
    }
    return koila__reads_begin(q->tape, &q->part, &q->keeping) < 0 ? FAILED : GO_ON;
}

/* The results are there. */
static next executed(request *q)
{
    koila__reads_end(q->tape, &q->part, q->c, q->n, q->results, q->asked, &q->keeping);
    if (q->is_read)
        koila__reads_cut(q->tape, q->c, q->targets, q->n);
    q->tape->kept.n_reads += q->is_read;
    report(q);
    return MADE;
}

/* May what calls use inside stay unmeasured in this run? Where it was the same for long, and the
 * step needs so little that no plan depends on it. */
static bool may_rest(const request *q, bool is_ample)
{
    return is_ample && q->c->n_calm >= CALM_AFTER && q->c->n_calm % MEASURED_OF;
}

/* The plan runs. Resident memory is guarded, where that is limited and the step needs much. */
static int exec_guarded(request *q, uint64_t base, bool uses_bodies, koila__exec_report *told)
{
    const bool is_ample = koila__room_is_ample(&q->room, &q->c->info);
    const bool is_limited = q->room.resident.limit != UINT64_MAX && !is_ample;
    if (q->room.gpu < 0)
        koila__resident_prepare(&q->room.resident, base);
    const bool inside = is_limited && koila__resident_begin(&q->room.resident, base);
    q->c->rests = may_rest(q, is_ample);
    const int status =
        koila__exec_plan(q->tape, &q->part, q->c, q->ranks == Py_None ? NULL : q->ranks,
                         uses_bodies, q->n + q->keeping.n, q->results, told);
    koila_assert((status < 0) == (PyErr_Occurred() != NULL));
    if (is_limited)
        koila__resident_end(inside, koila__cpu_bytes_current(), base + q->c->info.peak_bytes);
    else if (q->room.resident.limit != UINT64_MAX && status == 0)
        koila__resident_went_well();
    return status;
}

static bool may_run_without_bodies(const koila__exec_report *told)
{
    return told->failed_in_body && !koila__interrupted && PyErr_ExceptionMatches(PyExc_Exception);
}

/* A compiled body raised, for want of memory or since a tensor is not as it was recorded. */
static next retry_without_bodies(request *q)
{
    koila__bodies_raised(q->c, &q->room);
    return RETRY;
}

/* The plan ran, and `took` so many seconds by the stopwatch: all that is learned from it. */
static void learn(request *q, const koila__exec_report *told, bool went_well, double took)
{
    const bool is_settled = went_well && koila__bodies_ran(q->c, q->ranks != Py_None);
    const bool is_calm = went_well && q->c->generation == koila__learned_generation();
    q->c->n_calm = is_calm ? q->c->n_calm + 1 : 0;
    if (told->retries || (!went_well && koila__is_out_of_memory())) {
        koila__gpu_ran_out(q->c);
        koila__turn_refuse(&q->turn);
    } else if (is_settled && q->turn.key)
        koila__turn_took(&q->turn, took);
    if (went_well && q->c->generation != koila__learned_generation())
        koila__gpu_has_learned(q->c);
}

static next execute(request *q)
{
    koila__exec_report told;
    /* ranks have met since the room was looked at */
    koila__gpu_count gpu = q->room.count;
    const bool is_counted =
        q->room.gpu >= 0 && (q->ranks == Py_None || koila__gpu_bytes(q->room.gpu, &gpu));
    const uint64_t base = koila__cpu_bytes_current();
    const int window = koila__cpu_bytes_open();
    const bool is_timed = q->turn.key;
    const koila__stopwatch watch = is_timed ? koila__stopwatch_now() : (koila__stopwatch){ 0 };
    const double started = koila__seconds_now();
    koila__interrupted = false;
    const bool uses_bodies = koila__bodies_fit(q->c, &q->room);
    q->step.predicted_peak_bytes = uses_bodies ? koila__bodies_peak(q->c) : 0;
    q->step.predicted_uncompiled = uses_bodies && !koila__bodies_have_run(q->c);
    const int status = exec_guarded(q, base, uses_bodies, &told);
    q->step.seconds += koila__seconds_now() - started;
    q->step.retries += told.retries;
    q->step.n_run += told.n_run;
    q->step.compiled = told.compiled;
    const double took = is_timed && status == 0 ? koila__stopwatch_since(&watch) : 0;
    const uint64_t peak = koila__cpu_bytes_close(window);
    if (status < 0 && may_run_without_bodies(&told))
        return retry_without_bodies(q);
    learn(q, &told, status == 0, took);
    if (status < 0 && koila__is_out_of_memory())
        return after_out_of_memory(q, told.announced);
    if (status < 0)
        return q->ranks == Py_None && !koila__interrupted && PyErr_ExceptionMatches(PyExc_Exception)
                   ? retry_without_held(q)
                   : FAILED;
    measure_peak(q, peak, is_counted ? &gpu : NULL);
    q->step.base_bytes = q->room.gpu < 0 ? base : q->room.held;
    return executed(q);
}

static next try_once(request *q)
{
    next what = find_part(q);
    if (what == GO_ON)
        what = find_plan(q);
    if (what == GO_ON)
        what = ask_strict(q);
    if (what == GO_ON && koila__is_planning())
        return planned(q);
    if (what == GO_ON)
        what = agree_with_ranks(q);
    if (what == GO_ON)
        what = prepare(q);
    if (what == GO_ON)
        what = execute(q);
    koila_assert(what != GO_ON);
    return what;
}

static void end_try(request *q)
{
    koila__part_free(&q->part);
    koila__keeping_free(&q->keeping);
    koila__cached_release(q->c);
    PyMem_Free(q->results); /* no reference is left in it */
    q->c = NULL;
    q->results = NULL;
}

/* ---- the request */

enum { FEW_TARGETS = 64 };

/* met: which values were added; NULL: the targets are few, and looked through. */
static void add_target(request *q, koila_value v, bool *met)
{
    bool is_there = q->tape->values[v].real || (met && met[v]);
    for (uint32_t i = 0; !met && i < q->n && !is_there; i++)
        is_there = q->targets[i] == v;
    if (met)
        met[v] = true;
    if (!is_there)
        q->targets[q->n++] = v;
}

static int find_targets(request *q, const koila__wanted *w)
{
    const uint32_t n_effects = w->effects ? q->tape->n_effects : 0;
    const size_t most = (size_t)w->n_wanted + w->n_held + n_effects;
    const bool few = most <= FEW_TARGETS;
    bool *met = few ? NULL : PyMem_Calloc(koila_graph_n_values(q->tape->graph), sizeof *met);
    q->targets = PyMem_Malloc((most + 1) * sizeof *q->targets);
    if (!q->targets || (!few && !met)) {
        PyMem_Free(q->targets);
        PyMem_Free(met);
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < w->n_wanted; i++)
        add_target(q, w->wanted[i], met);
    for (uint32_t i = 0; i < n_effects; i++)
        add_target(q, q->tape->effects[i].value, met);
    q->n_must = q->n;
    for (uint32_t i = 0; i < w->n_held; i++)
        add_target(q, w->held[i], met);
    PyMem_Free(met);
    koila_assert(q->n_must <= q->n && q->n <= most);
    return 0;
}

/* What is kept of what somebody asks for is handed out as it is. */
static void take_kept(request *q)
{
    uint32_t n = 0, n_must = 0;
    for (uint32_t i = 0; i < q->n; i++) {
        const koila_value v = q->targets[i];
        const koila__kept *kept = koila__kept_of(q->tape, v);
        if (!kept || q->tape->values[v].real || i >= q->n_must) {
            n_must += i < q->n_must;
            q->targets[n++] = v;
            continue;
        }
        const void *storage = kept->storage;
        q->tape->values[v].cut = kept->cut;
        koila__tape_set_real(q->tape, v, Py_NewRef(kept->tensor));
        koila__unkeep_storage(q->tape, storage);
    }
    q->n = q->n_all = n;
    q->n_must = n_must;
}

/* From here on the values can be seen. */
static void hand_over(request *q)
{
    koila_assert(!PyErr_Occurred());
    for (uint32_t i = 0; i < q->n; i++) {
        koila_assert(q->results[i]);
        if (q->tape->values[q->targets[i]].real)
            Py_DECREF(q->results[i]); /* a hook asked for it meanwhile, and may have the tensor */
        else
            koila__tape_set_real(q->tape, q->targets[i], q->results[i]);
    }
}

/* Those that a step begins with: rows, unless a test asks for others. */
static uint32_t first_axes(void)
{
    switch (koila__settings_now().axes) {
    case KOILA__CUT_OTHER:
        return KOILA_AXES_OTHER;
    case KOILA__CUT_BOTH:
        return KOILA_AXES_BOTH;
    default:
        return KOILA_AXES_ROWS;
    }
}

static request request_for(koila__tape *t, const koila__wanted *w)
{
    const bool is_read = w->asked_by == KOILA__ASKED_BY_READ && !t->closed && !t->planned;
    request q = { .tape = t,
                  .is_wanted = w->n_wanted > 0,
                  .rows = koila__settings_now().rows,
                  .axes = first_axes(),
                  .is_read = is_read,
                  .may_keep = is_read,
                  .asked = w };
    q.step.asked_by = koila__is_planning() ? KOILA__ASKED_BY_PLAN : w->asked_by;
    return q;
}

static int run_request(koila__tape *t, const koila__wanted *w)
{
    request q = request_for(t, w);
    if (koila__torch_setup() < 0 || find_targets(&q, w) < 0)
        return -1;
    t->ran = true;
    take_kept(&q);
    if (t->kept.tight && !q.is_read) /* it runs in slices, and computes again what it needs */
        koila__unkeep_all(t);
    next what = q.n ? RETRY : NOTHING;
    while (what == RETRY) {
        end_try(&q);
        what = try_once(&q);
    }
    int status = what == FAILED ? -1 : 0;
    if (what == MADE)
        hand_over(&q);
    if (what == MADE || what == NOTHING) {
        if (w->effects && !w->later)
            status = koila__commit_effects(t);
    }
    if (what != PLANNED && w->effects && (status < 0 || !w->later))
        t->failed = status < 0;
    if (q.is_wanted)
        t->refused_at = status < 0 ? koila_graph_n_nodes(t->graph) + 1 : 0;
    if (q.is_awaited)
        koila__ranks_withdraw(q.ranks);
    end_try(&q);
    Py_XDECREF(q.ranks);
    PyMem_Free(q.targets);
    return status;
}

/* Operators written in Python make plain tensors meanwhile. */
static int run_held(koila__tape *t, const koila__wanted *w)
{
    PyObject *modes;
    int status = koila__modes_aside(&modes);
    if (status < 0)
        return -1;
    status = koila__factories_hold(true);
    if (status == 0) {
        status = run_request(t, w);
        koila__factories_hold(false);
    }
    return koila__modes_back(modes, status);
}

/* No other thread records in `t` or runs it meanwhile. */
static int run_alone(koila__tape *t, const koila__wanted *w)
{
    if (koila__shield_enter() < 0)
        return -1;
    int status = -1;
    if (koila__tape_enter(t) == 0) {
        status = run_held(t, w);
        koila__tape_leave(t);
        if (t->left_meanwhile)
            koila__step_left(t);
    }
    if (status == 0)
        koila__tell(); /* a signal that came there would be lost with the log's exceptions */
    koila__shield_leave();
    return status;
}

/* Signals stop it between operators, where nothing has changed yet; or they wait until it is
 * done. */
int koila__request(koila__tape *t, const koila__wanted *w)
{
    koila__context *before = koila__context_lent();
    Py_INCREF(t);
    /* a thread of torch's works for the step's context */
    if (!koila__context_peek() && !koila__settings_any() && koila__may_work_for(t))
        koila__context_lend(t->context);
    koila__settings_enforce();
    const int status = run_alone(t, w);
    if (status < 0)
        koila__aside_failed();
    koila__context_give_back(before);
    Py_DECREF(t);
    return status;
}
