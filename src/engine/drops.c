/* drops.c — which results of the forward pass are dropped and computed again, or wait in host
 * memory, where nothing fits as it was recorded. recompute.c rewrites the step; this tries how much
 * of it. */
#include "engine/drops.h"

#include "engine/live.h"
#include "engine/plan_costs.h"
#include "engine/recompute.h"
#include "engine/search.h"
#include "engine/spare.h"
#include "engine/unroll.h"
#include "graph/table.h"

/* Finds the recorded node at which the step as it was recorded holds the most; KOILA_NONE: nothing
 * runs. What operators use inside does not count: in slices it is less. */
koila_status koila__drop_turn(koila__planning *q, koila_node *turn)
{
    const koila__way *whole;
    *turn = KOILA_NONE;
    KOILA_TRY(koila__way_whole(q, &whole));
    const koila__live_options live = { .rows = whole->rows };
    const koila_node at =
        koila__live_simulate(whole->placed, &whole->schedule, &live, NULL, NULL, NULL).peak_node;
    *turn = at == KOILA_NONE ? at : whole->placed->node[at].recorded;
    return KOILA_OK;
}

/* The last node that comes from the recorded one, or from one before. */
static koila_node last_from(const koila__placed *p, koila_node recorded)
{
    koila_node last = 0;
    for (koila_node n = 0; n < p->graph->nodes.n; n++)
        if (p->node[n].recorded <= recorded)
            last = n;
    return last;
}

/* Of the step that is recomputed: with more, what each loop keeps for the next decides the peak. */
enum { MOST_LOOPS_RECOMPUTED = 4 };

/* What is dropped. Of equal work the first is taken. */
static const koila__recompute ladder[] = {
    { .n_segments = 2, .keeps_expensive = true },
    { .n_segments = 8, .keeps_expensive = true },
    { .n_segments = 32, .keeps_expensive = true },
    { .n_segments = 2 },
    { .n_segments = 3 },
    { .n_segments = 4 },
    { .n_segments = 6 },
    { .n_segments = 8 },
    { .n_segments = 12 },
    { .n_segments = 16 },
    { .n_segments = 24 },
    { .n_segments = 32 },
};

/* So many rungs of the ladder are filled, in a large step. */
enum { MOST_FILLED = 3 };

/* The same with host memory. */
static const koila__recompute host_ladder[] = {
    { .n_segments = 1, .n_offloaded = 2, .ahead = true },
    { .n_segments = 1, .n_offloaded = 4, .ahead = true },
    { .n_segments = 1, .n_offloaded = 6, .ahead = true },
    { .n_segments = 1, .n_offloaded = 8, .ahead = true },
    { .n_segments = 1, .n_offloaded = 11, .ahead = true },
    { .n_segments = 1, .n_offloaded = 15, .ahead = true },
    { .n_segments = 1, .n_offloaded = 15 },
    { .n_segments = 32, .keeps_expensive = true, .n_offloaded = 4, .ahead = true },
    { .n_segments = 32, .keeps_expensive = true, .n_offloaded = 8, .ahead = true },
    { .n_segments = 32, .keeps_expensive = true, .n_offloaded = 11, .ahead = true },
    { .n_segments = 32, .keeps_expensive = true, .n_offloaded = 15, .ahead = true },
    { .n_segments = 32, .keeps_expensive = true, .n_offloaded = 15 },
    { .n_segments = 8, .n_offloaded = 8, .ahead = true },
    { .n_segments = 8, .n_offloaded = 15, .ahead = true },
    { .n_segments = 16, .n_offloaded = 15, .ahead = true },
    { .n_segments = 32, .n_offloaded = 15 },
};

/* Above this the peak of a rung need not be exact; 0: it must. */
static uint64_t bound_of_rung(const koila__planning *q, const koila__way *best)
{
    const uint64_t budget = q->options->budget_bytes;
    if (!best->placed)
        return 0;
    return best->accepted || best->peak < budget ? budget : best->peak;
}

/* Does a value go from one loop to another while it waits in host memory? A copy there has no rows
 * that could be kept. */
static bool crosses_loops(const koila__way *s)
{
    const koila_graph *g = s->placed->graph;
    for (uint32_t k = 0; k < s->schedule.n_stages; k++) {
        const koila_stage *st = &s->schedule.stages[k].stage;
        for (uint32_t i = 0; i < st->n_instrs; i++) {
            const uint8_t kind = st->instrs[i].kind;
            if (kind == KOILA_DO_RUN || kind == KOILA_DO_FREE)
                continue;
            const koila_node n = g->values.at[st->instrs[i].id].node;
            if (n != KOILA_NONE && s->placed->node[n].offloads)
                return true;
        }
    }
    return false;
}

/* `way` is the step of `o` with results dropped. A call that runs later alone is recorded too,
 * though not where it was. */
static void recorded_as(koila__way *way, const koila__outline *o)
{
    way->schedule.work_recorded = koila__outline_recorded(o, &way->schedule.n_needed);
}

/* Is it less work than the best way so far, if that fits? */
static bool is_less(double work, const koila__way *best)
{
    return !best->accepted || work < best->schedule.work;
}

/* One way to drop results of `base`. */
typedef struct rung {
    koila__recompute how;
    koila__outline *outline; /* of those with, or without, host memory */
    const koila__path *path; /* NULL: as `how` says */
    uint32_t choice;         /* of the path */
    uint64_t bound;          /* its peak is no less */
    uint64_t waiting;        /* koila__outline_waiting(); 0: not known */
    uint64_t gap;            /* it is likely to need so much beyond that; 0: not known */
    double work;             /* nor is its work */
    double work_of_all;      /* nor that, which is more; 0: not known */
    bool is_out;             /* tried, or nothing to try */
} rung;

/* The rungs of one base, and what they are drawn from. */
typedef struct rungs {
    koila_allocator mem;
    koila__arena arena; /* of the paths: gone when one is taken */
    VEC(rung) all;
    koila__outline *usual, *host;
    uint64_t budget;
    uint64_t told;    /* of a rung that needs more, it does not matter how much */
    bool in_any_case; /* they are made also where none fits, for their bounds */
    uint64_t limit;   /* choices of paths that are bound to need more are not tried */
    uint64_t part;    /* of a bound, by which the next limit is lower */
    /* what does not fit needs so much beyond what waits, as far as was tried */
    uint64_t gap;
    bool fits_undropped; /* along another axis, the step fits with nothing dropped */
    koila__effort *effort;
    uint32_t n_nodes;
} rungs;

static bool choose_rung(const rung *r)
{
    return r->path ? koila__path_choose(r->outline, r->path, r->choice)
                   : koila__outline_choose(r->outline, &r->how);
}

/* No rungs of `base` yet; end them with free_rungs(). */
static rungs no_rungs(const koila__planning *q, const koila__way *base)
{
    rungs r = { .mem = q->plan->mem,
                .limit = UINT64_MAX,
                .part = 512,
                .budget = q->options->budget_bytes,
                .told = q->options->budget_bytes,
                .effort = q->effort,
                .n_nodes = base->placed->graph->nodes.n };
    koila__arena_init(&r.arena, &q->plan->mem);
    return r;
}

static void free_rungs(rungs *r)
{
    koila__outline_free(r->usual);
    koila__outline_free(r->host);
    koila__vec_free(&r->mem, &r->all);
    koila__arena_deinit(&r->arena);
}

/* No rung of r needs less. */
static uint64_t least_of(const rungs *r)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < r->all.n; i++)
        least = r->all.at[i].bound < least ? r->all.at[i].bound : least;
    return least;
}

/* Has the step so few calls that it takes the time to refine each way? */
static bool is_small_step(const rungs *r)
{
    return koila__outline_n_makers(r->usual) <= KOILA_COST_SMALL_STEP;
}

/* A rung in which more than `most_waiting` waits is left out. A bound is exact where it is told,
 * and within the budget or the least so far: nothing else is asked of it. */
static koila_status add_rung(rungs *r, koila__outline *outline, koila__recompute how,
                             uint64_t most_waiting)
{
    rung x = { .how = how, .outline = outline };
    const uint64_t least = least_of(r);
    const uint64_t asked = least > r->budget ? least : r->budget;
    const uint64_t limit = asked < r->told ? asked : r->told;
    if (!koila__outline_choose_within(outline, &how, most_waiting))
        return KOILA_OK;
    x.waiting = koila__outline_waiting(outline);
    if (x.waiting > most_waiting)
        return KOILA_OK;
    x.bound = koila__outline_bound_up_to(outline, limit);
    x.work = koila__outline_work(outline);
    return koila__vec_push(&r->mem, &r->all, x) ? KOILA_OK : KOILA_NO_MEMORY;
}

/* Nothing is lost with a path whose choices cannot fit. But their bounds may be asked for; and
 * before the time for planning is over looks count as time, on which it depends what is compared
 * later. What waits is asked of paths of one choice only. */
static koila__path_limits limits_of_path(const rungs *r, koila__direction direction)
{
    const bool is_all = r->in_any_case || is_small_step(r) || !koila__is_spent(r->effort);
    const uint64_t most = is_all ? UINT64_MAX : r->budget;
    const bool is_one = direction == KOILA__FILLS;
    return (koila__path_limits){ .fills = r->budget,
                                 .bound = is_one ? UINT64_MAX : most,
                                 .waiting = is_one ? most : UINT64_MAX };
}

/* The choices of a path from what was chosen last become rungs. */
static koila_status add_path(rungs *r, koila_node at, koila__direction direction,
                             koila__path_limits limits)
{
    koila__path *path = koila__arena_alloc(&r->arena, sizeof *path);
    if (!path)
        return KOILA_NO_MEMORY;
    KOILA_TRY(koila__path_make(r->usual, direction, limits, &r->arena, path));
    koila__spend(r->effort, KOILA_COST_NS_CHOICE * path->n_looks, r->n_nodes);
    const uint64_t waiting = path->n == 1 ? koila__outline_waiting(r->usual) : 0; /* chosen last */
    if (!koila__vec_reserve(&r->mem, &r->all, path->n))
        return KOILA_NO_MEMORY;
    for (uint32_t i = 0; i < path->n; i++)
        r->all.at[r->all.n++] = (rung){ .how = { .at = at },
                                        .outline = r->usual,
                                        .path = path,
                                        .choice = i,
                                        .bound = path->at[i].gauge.bound,
                                        .waiting = waiting,
                                        .work = path->at[i].work };
    return KOILA_OK;
}

/* The rung of the least work that may fit, of those not seen; NULL: there is none. */
static const rung *next_to_fill(const rungs *r, uint32_t n, const bool *is_seen, uint64_t budget)
{
    const rung *best = NULL;
    for (uint32_t i = 0; i < n; i++)
        if (!is_seen[i] && r->all.at[i].bound <= budget &&
            (!best || r->all.at[i].work < best->work))
            best = &r->all.at[i];
    return best;
}

/* Are the ways compared with a plan that fits? */
static bool is_compared(const koila__planning *q)
{
    return q->plan->info.peak_bytes <= q->options->budget_bytes &&
           (q->accepted || !q->options->accepts);
}

/* Of all that is dropped, and of the rungs of the ladder that may fit, what may stay stays. */
static koila_status add_fills(const koila__planning *q, rungs *r, koila_node at)
{
    bool is_seen[KOILA_COUNT(ladder)] = { 0 };
    const uint64_t budget = q->options->budget_bytes;
    const uint32_t n = r->all.n;
    const uint32_t most = is_compared(q) ? 1 : MOST_FILLED;
    const koila__path_limits limits = limits_of_path(r, KOILA__FILLS);
    /* from where all is dropped it is made even so, while no rung is within the budget */
    const koila__path_limits none = { budget, UINT64_MAX, UINT64_MAX };
    memset(koila__outline_spared(r->usual), 0, koila__outline_n_makers(r->usual));
    if (koila__outline_choose_makers(r->usual))
        KOILA_TRY(add_path(r, at, KOILA__FILLS, least_of(r) <= budget ? limits : none));
    const rung *x = next_to_fill(r, n, is_seen, budget);
    for (uint32_t i = 0; i < most && x; i++, x = next_to_fill(r, n, is_seen, budget)) {
        is_seen[x - r->all.at] = true;
        koila__outline_choose(r->usual, &x->how);
        KOILA_TRY(add_path(r, at, KOILA__FILLS, limits)); /* moves the rungs */
    }
    return KOILA_OK;
}

/* A path from rung i of the ladder. */
static koila_status add_path_of_rung(rungs *r, koila_node at, uint32_t i,
                                     koila__direction direction)
{
    koila__outline_choose(r->usual, &r->all.at[i].how);
    return add_path(r, at, direction, limits_of_path(r, direction));
}

/* A path from where all is dropped, or back. */
static koila_status add_path_of_all(rungs *r, koila_node at, koila__direction direction)
{
    memset(koila__outline_spared(r->usual), 0, koila__outline_n_makers(r->usual));
    if (!koila__outline_choose_makers(r->usual))
        return KOILA_OK;
    return add_path(r, at, direction, limits_of_path(r, direction));
}

/* Might another choice fit, if one needs so much? */
static bool is_in_reach(const koila__planning *q, uint64_t n_bytes)
{
    return (double)n_bytes <= KOILA_COST_IN_REACH * (double)q->options->budget_bytes;
}

/* Is the budget so far off that another axis is tried first? */
static bool is_left_to_axes(const koila__planning *q, const rungs *r)
{
    return q->options->axes == KOILA_AXES_ANY && q->options->rows <= 0 && !q->tried &&
           !q->is_rival &&
           (double)least_of(r) > KOILA_COST_LEFT_TO_AXES * (double)q->options->budget_bytes;
}

/* In a large step: what fills the budget; a path down from where nothing is dropped only where
 * nothing else may fit, and one up where that is near. */
static koila_status add_few_choices(const koila__planning *q, rungs *r, koila_node at)
{
    const uint64_t budget = q->options->budget_bytes;
    const uint32_t n = r->all.n;
    if (is_left_to_axes(q, r))
        return KOILA_OK;
    KOILA_TRY(add_fills(q, r, at));
    if (least_of(r) <= budget)
        return KOILA_OK;
    KOILA_TRY(add_path_of_all(r, at, KOILA__DROPS));
    if (!n || least_of(r) <= budget || !is_in_reach(q, least_of(r)))
        return KOILA_OK;
    return add_path_of_rung(r, at, 0, KOILA__SPARES_DEAR);
}

/* Choices beside those of the ladder, which are all that there are so far. In a small step all
 * paths; in a larger one what fills the budget, and two paths. None where the budget is out of
 * reach. */
static koila_status add_choices(const koila__planning *q, rungs *r, koila_node at)
{
    const uint64_t budget = q->options->budget_bytes;
    const bool is_small = is_small_step(r);
    const uint32_t n = r->all.n;
    if (is_compared(q) && koila__is_spent(q->effort))
        return KOILA_OK;
    if (koila__outline_is_hopeless(r->usual, least_of(r), budget))
        return KOILA_OK;
    koila__outline_measure(r->usual);
    if (r->n_nodes > KOILA_COST_LARGE_STEP)
        return add_few_choices(q, r, at);
    if (!is_small)
        KOILA_TRY(add_fills(q, r, at));
    if (!is_small && is_compared(q) && least_of(r) <= budget)
        return KOILA_OK;
    for (uint32_t i = 0; i < (is_small ? n : n > 0); i++)
        KOILA_TRY(add_path_of_rung(r, at, i, KOILA__SPARES_DEAR));
    KOILA_TRY(add_path_of_all(r, at, KOILA__DROPS));
    if (!is_small)
        return KOILA_OK;
    KOILA_TRY(add_path_of_all(r, at, KOILA__SPARES_DEAR));
    KOILA_TRY(add_path_of_all(r, at, KOILA__SPARES_HIGH));
    for (uint32_t i = 0; i < n && least_of(r) > budget; i++)
        KOILA_TRY(add_path_of_rung(r, at, i, KOILA__SPARES_HIGH));
    return KOILA_OK;
}

/* Bounds are compared with the budget, and with some times of it. Where they are asked for, all are
 * told. */
static uint64_t most_told(const rungs *r)
{
    const uint64_t results = koila__outline_results(r->usual);
    const double left_to_axes = KOILA_COST_LEFT_TO_AXES * (double)r->budget;
    if (r->in_any_case || r->budget > UINT64_MAX / 4)
        return UINT64_MAX;
    const uint64_t free = r->budget > results ? r->budget - results : 0;
    const uint64_t hopeless = results + KOILA_COST_HOPELESS * (free + 1);
    return hopeless > (uint64_t)left_to_axes ? hopeless : (uint64_t)left_to_axes + 1;
}

static koila_status make_rungs(const koila__planning *q, const koila__way *base, koila_node at,
                               rungs *r)
{
    const koila_plan_options *o = q->options;
    koila__outline_options how = { .rows = base->rows,
                                   .workspace = o->workspace,
                                   .user = o->user,
                                   .n_loops = base->schedule.n_loops,
                                   .repeats_writes = q->repeats_writes };
    KOILA_TRY(
        koila__outline_new(&r->usual, base->placed, base->targets, q->n_targets, at, &how, q->mem));
    koila__spend(q->effort, KOILA_COST_NS_OUTLINE, r->n_nodes);
    if (!r->in_any_case && koila__outline_floor(r->usual) > o->budget_bytes)
        return KOILA_OK;
    KOILA_TRY(koila__outline_begin(r->usual));
    r->told = most_told(r);
    for (size_t i = 0; i < KOILA_COUNT(ladder); i++) {
        koila__recompute x = ladder[i];
        x.at = at;
        KOILA_TRY(add_rung(r, r->usual, x, UINT64_MAX));
    }
    koila__spend(q->effort, KOILA_COST_NS_CHOICE * KOILA_COUNT(ladder), r->n_nodes);
    KOILA_TRY(add_choices(q, r, at));
    if (!(o->host_price > 0))
        return KOILA_OK;
    how.uses_host = true;
    KOILA_TRY(
        koila__outline_new(&r->host, base->placed, base->targets, q->n_targets, at, &how, q->mem));
    KOILA_TRY(koila__outline_begin(r->host));
    for (size_t i = 0; i < KOILA_COUNT(host_ladder); i++) {
        koila__recompute x = host_ladder[i];
        x.at = at;
        x.host = (koila__host){ .n_bytes = o->host_bytes,
                                .price = o->host_price,
                                .device = o->host_device };
        KOILA_TRY(add_rung(r, r->host, x, UINT64_MAX));
    }
    return KOILA_OK;
}

/* The way `base`, with the results dropped that were chosen last for rung r. out->placed stays NULL
 * where it cannot be taken, and out->accepted false where it is no better than *best. */
static koila_status make_way(const koila__planning *q, const koila__way *base, const rung *r,
                             const koila__way *best, koila__way *out)
{
    *out = (koila__way){ .rows = base->rows };
    out->targets = koila__arena_array(&q->plan->arena, q->n_targets, sizeof *out->targets);
    if (!out->targets)
        return KOILA_NO_MEMORY;
    koila__spend(q->effort, KOILA_COST_NS_AGAIN, base->placed->graph->nodes.n);
    KOILA_TRY(koila__recompute_new(r->outline, base->placed, base->targets, q->n_targets, r->how,
                                   q->mem, &out->placed, out->targets));
    koila_assert(out->placed);
    const koila_status status = koila__way_keep_all(q, out);
    if (status != KOILA_OK) {
        koila__placed_free(out->placed);
        return status;
    }
    recorded_as(out, r->outline);
    out->peak = koila__plan_peak(out->placed, &out->schedule, q->options, out->rows,
                                 bound_of_rung(q, best));
    koila_assert(out->peak >= koila__outline_bound(r->outline) ||
                 out->peak > bound_of_rung(q, best));
    koila_assert(r->how.n_offloaded || /* rounded otherwise where work is no whole number */
                 out->schedule.work >= 0.999999 * koila__outline_work_of_all(r->outline));
    if (r->how.n_offloaded && crosses_loops(out)) {
        koila__way_free(out);
        out->placed = NULL;
        return KOILA_OK;
    }
    out->accepted =
        out->peak <= q->options->budget_bytes && is_less(out->schedule.work, best) &&
        koila__is_accepted(q, out->placed, &out->schedule, out->targets, out->rows, out->peak);
    return KOILA_OK;
}

/* *best becomes the way of what was chosen last for the rung, if it is better. *needs: its peak, or
 * a number above the budget; 0: not known. */
static koila_status try_way(const koila__planning *q, const koila__way *base, const rung *r,
                            koila__way *best, uint64_t *needs)
{
    koila__way way;
    KOILA_TRY(make_way(q, base, r, best, &way));
    *needs = way.placed ? way.peak : 0;
    if (way.placed && (way.accepted || !best->placed || (!best->accepted && way.peak < best->peak)))
        koila__way_swap(best, &way);
    koila__way_free(&way);
    return KOILA_OK;
}

/* What is needed beyond what waits differs by so many-th parts of it; less along another axis,
 * where more segments are tried first; and where a call outside loops decides: the same is there
 * beside it. */
enum { GAP_PART = 4, GAP_PART_ALONG = 16, GAP_PART_AT_CALL = 32 };

/* Does it depend on what waits whether a rung is likely to fit? Bounds of several loops are weak,
 * but what is needed beyond what waits differs little between choices: those that were tried tell
 * it. That is not so where the step fits as it is, by loops that compute all again: then little
 * need wait for them. */
static bool asks_for_gap(const rungs *r) { return !r->fits_undropped && !r->effort->tries_all; }

/* May rung x fit, and is that likely? */
static bool is_likely(const rungs *r, const rung *x)
{
    const uint64_t gap = r->gap > x->gap ? r->gap : x->gap;
    const bool is_in_gap = gap <= r->budget && x->waiting <= r->budget - gap;
    return !x->is_out && x->bound <= r->budget && (is_in_gap || !asks_for_gap(r));
}

/* Rung x needs so much, and does not fit. Others may need a part of it less beyond what waits and
 * the results, which are the same for all. */
static void learn_gap(rungs *r, const rung *x, uint64_t needs, uint64_t part)
{
    const uint64_t results = koila__outline_results(r->usual);
    const uint64_t gap = needs > x->waiting ? needs - x->waiting : 0;
    const uint64_t less = gap > results ? (gap - results) / part : 0;
    r->gap = gap - less > r->gap ? gap - less : r->gap;
}

/* Is rung x one of those that are tried, as far as its bytes go? */
static bool may_be_tried(const koila__planning *q, const rungs *r, const rung *x)
{
    return is_likely(r, x) && (!x->path || x->bound <= r->limit);
}

/* The rung of the least work that may fit, or NULL. */
static rung *least_work(const koila__planning *q, rungs *r)
{
    rung *best = NULL;
    for (uint32_t i = 0; i < r->all.n; i++) {
        rung *x = &r->all.at[i];
        if (may_be_tried(q, r, x) && (!best || x->work < best->work))
            best = x;
    }
    return best;
}

/* May a rung that is still to be tried be less work than the best way so far? */
static bool any_is_less(const koila__planning *q, rungs *r, const koila__way *best)
{
    for (uint32_t i = 0; i < r->all.n; i++) {
        rung *x = &r->all.at[i];
        if (!may_be_tried(q, r, x) || !is_less(x->work, best))
            continue;
        if (!best->accepted || x->outline == r->host)
            return true;
        if (!x->work_of_all)
            x->work_of_all = choose_rung(x) ? koila__outline_work_of_all(x->outline) : x->work;
        if (is_less(x->work_of_all, best))
            return true;
    }
    return false;
}

/* Where the choice of a path does not fit, or is not accepted, those that need as much, or a little
 * less, are not tried: there are many alike. Each time it is twice as much less. */
static koila_status try_rung(const koila__planning *q, const koila__way *base, rungs *r, rung *x,
                             koila__way *best)
{
    uint64_t needs;
    x->is_out = true;
    if (!choose_rung(x))
        return KOILA_OK;
    KOILA_TRY(try_way(q, base, x, best, &needs));
    if (base->schedule.n_loops > 1 && needs > q->options->budget_bytes)
        learn_gap(r, x, needs, GAP_PART);
    if (x->path && !best->accepted) {
        r->limit = x->bound - x->bound / r->part;
        r->part = r->part > 2 ? r->part / 2 : 2;
    }
    return KOILA_OK;
}

/* The least work of all rungs of `base` that fit; of those that were tried and do not, the one with
 * the least peak, if that is below *best's. A rung is built only where it may fit. */
static koila_status climb(const koila__planning *q, const koila__way *base, rungs *r,
                          koila__way *best)
{
    while (any_is_less(q, r, best))
        KOILA_TRY(try_rung(q, base, r, least_work(q, r), best));
    return KOILA_OK;
}

/* Other ends of the forward pass than that at which the step holds the most. */
enum { MOST_OTHER_TURNS = 2 };

/* Results of `base`, which is scheduled, are dropped; its forward pass ends with node `at`. *bound:
 * no choice of them needs less; 0: not known. asks_bound: choices that cannot fit are made for it.
 * *n_others: how many other ends may be worth trying. */
static koila_status drop_up_to(const koila__planning *q, const koila__way *base, koila_node at,
                               koila__way *best, bool asks_bound, uint64_t *bound,
                               uint32_t *n_others)
{
    const uint64_t budget = q->options->budget_bytes;
    rungs r = no_rungs(q, base);
    r.in_any_case = asks_bound || q->options->host_price > 0;
    koila_status status = make_rungs(q, base, at, &r);
    if (status == KOILA_OK) {
        *bound = r.all.n ? least_of(&r) : 0;
        status = climb(q, base, &r, best);
        const bool is_missed =
            q->by_rows && base->schedule.n_loops > 0 && !(best->placed && best->accepted);
        *n_others = 0;
        if (!koila__outline_is_hopeless(r.usual, *bound, budget))
            *n_others = is_small_step(&r) ? MOST_OTHER_TURNS : is_missed;
    }
    free_rungs(&r);
    return status;
}

/* Between two nodes, where a step holds the least; of equals the last. */
typedef struct valley {
    koila_node from, to; /* both not in it */
    koila_node lowest;   /* or KOILA_NONE */
    uint64_t bytes;
} valley;

static bool see_valley(void *user, uint32_t stage, koila_node node, uint64_t bytes)
{
    valley *x = user;
    (void)stage;
    if (node == KOILA_NONE || node <= x->from || node >= x->to)
        return true;
    if (x->lowest == KOILA_NONE || bytes <= x->bytes) {
        x->lowest = node;
        x->bytes = bytes;
    }
    return true;
}

/* Where else than at `highest` may the forward pass of `base` end? With the first result; and where
 * the least is held from there on: what waits there for its next use waits for long.
 * turns[MOST_OTHER_TURNS]; returns how many there are. */
static uint32_t other_turns(const koila__planning *q, const koila__way *base, koila_node highest,
                            koila_node *turns)
{
    const koila_graph *g = base->placed->graph;
    const koila__live_options live = { .rows = base->rows };
    valley x = { .from = KOILA_NONE, .to = highest, .lowest = KOILA_NONE };
    uint32_t n = 0;
    for (uint32_t i = 0; i < q->n_targets; i++)
        if (g->values.at[base->targets[i]].node < x.from)
            x.from = g->values.at[base->targets[i]].node;
    if (x.from != KOILA_NONE && x.from != highest)
        turns[n++] = x.from;
    koila__live_simulate(base->placed, &base->schedule, &live, NULL, see_valley, &x);
    if (x.lowest != KOILA_NONE)
        turns[n++] = x.lowest;
    return n;
}

/* Results of `base`, which is scheduled, are dropped. The forward pass ends where the step holds
 * the most; other ends are tried too in a small step, and one in a large step in slices that does
 * not fit so: sums that take no second addend move the most into the backward pass there.
 * asks_bound, *bound: as drop_up_to(). */
static koila_status drop_of(const koila__planning *q, const koila__way *base, koila__way *best,
                            bool asks_bound, uint64_t *bound)
{
    const koila_node highest = koila__way_peak_node(q, base);
    koila_node turns[MOST_OTHER_TURNS];
    uint32_t n_others = 0, n_more;
    *bound = 0;
    if (highest == KOILA_NONE)
        return KOILA_OK;
    KOILA_TRY(drop_up_to(q, base, highest, best, asks_bound, bound, &n_others));
    const uint32_t n = n_others ? other_turns(q, base, highest, turns) : 0;
    for (uint32_t i = 0; i < n && i < n_others; i++) {
        uint64_t other;
        KOILA_TRY(drop_up_to(q, base, turns[i], best, false, &other, &n_more));
        *bound = other < *bound ? other : *bound;
    }
    return KOILA_OK;
}

/* The step whole, with results dropped. */
koila_status koila__drop_whole(koila__planning *q, koila__way *best)
{
    const koila__way *whole;
    KOILA_TRY(koila__way_whole(q, &whole));
    return drop_of(q, whole, best, false, &q->whole_dropped);
}

/* Is the plan one of slices of rows that need more loops? */
static bool has_many_loops(const koila__planning *q)
{
    return q->by_rows && q->plan->schedule.n_loops > MOST_LOOPS_RECOMPUTED;
}

/* A step of many loops is not placed and scheduled again to learn that there are too many, but it
 * counts as time as if it were. */
static void spend_as_if_placed(const koila__planning *q)
{
    koila__spend(q->effort, KOILA_COST_NS_PLACE, q->graph->nodes.n);
    koila__spend(q->effort, KOILA_COST_NS_LOOPS + KOILA_COST_NS_SCHEDULE,
                 q->plan->placed->graph->nodes.n);
}

/* The step in the most slices, of few loops, with results dropped. */
koila_status koila__drop_in_slices(const koila__planning *q, koila__way *best)
{
    const bool is_plan = q->is_plain && !q->plan->info.n_inner;
    koila__way base = { 0 };
    uint64_t bound;
    if (!is_plan && has_many_loops(q)) {
        spend_as_if_placed(q);
        return KOILA_OK;
    }
    KOILA_TRY(koila__way_room(q, &base));
    if (q->options->rows > 0)
        koila__rows_as_forced(q->graph, q->options, base.rows);
    else
        koila__rows_for(q->graph, q->largest_axis, base.rows);
    if (is_plan) { /* as it is, in other rows */
        base.placed = q->plan->placed;
        base.schedule = q->plan->schedule;
        base.targets = q->plan->targets;
        return drop_of(q, &base, best, false, &bound);
    }
    KOILA_TRY(koila__way_place(q, koila__place, base.targets, &base.placed));
    koila_status status = koila__way_keep_all(q, &base);
    if (status != KOILA_OK) {
        koila__placed_free(base.placed);
        return status;
    }
    if (base.schedule.n_loops <= MOST_LOOPS_RECOMPUTED)
        status = drop_of(q, &base, best, false, &bound);
    koila__way_free(&base);
    return status;
}

/* The step placed along another axis, in n_slices slices without a loop, with results dropped. */
koila_status koila__drop_unrolled(const koila__planning *q, const koila__placed *along,
                                  const koila_value *targets, uint32_t n_slices, koila__way *best,
                                  uint64_t *bound)
{
    koila__way base = { 0 };
    KOILA_TRY(koila__way_room(q, &base));
    KOILA_TRY(koila__unroll_new(q->graph, along, targets, q->n_targets, n_slices, q->mem,
                                &base.placed, base.targets));
    koila__spend(q->effort, KOILA_COST_NS_UNROLL, base.placed->graph->nodes.n);
    koila__rows_for(q->graph, 1, base.rows);
    koila_status status = koila__way_keep_all(q, &base);
    if (status != KOILA_OK) {
        koila__placed_free(base.placed);
        return status;
    }
    status = drop_of(q, &base, best, true, bound);
    koila__way_free(&base);
    return status;
}

/* ---- in slices along another axis */

/* `way` with results dropped as rung r says, in the fewest slices, under the best of the policies.
 * next->placed stays NULL where it is not scheduled then. */
static koila_status drop(koila__planning *q, const koila__way *way, rung *r, koila__way *next)
{
    static const koila__keep keeps[] = { { .horizon = UINT32_MAX },
                                         { .horizon = 1 },
                                         { .horizon = UINT32_MAX, .drops_forward = true },
                                         { .horizon = 1, .drops_forward = true } };
    r->is_out = true;
    KOILA_TRY(koila__way_room(q, next));
    koila__outline_choose(r->outline, &r->how);
    koila__spend(q->effort, KOILA_COST_NS_AGAIN, way->placed->graph->nodes.n);
    KOILA_TRY(koila__recompute_new(r->outline, way->placed, way->targets, q->n_targets, r->how,
                                   q->mem, &next->placed, next->targets));
    const koila_status status = koila__search_placed(q, keeps, KOILA_COUNT(keeps), next);
    if (status == KOILA_OK) {
        recorded_as(next, r->outline);
        return KOILA_OK;
    }
    koila__placed_free(next->placed);
    next->placed = NULL;
    return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
}

/* What is likely there of one of so many segments, where at least way->peak is with nothing
 * dropped. */
static uint64_t bytes_of_segment(const rungs *r, const koila__way *way, uint32_t n_segments)
{
    const uint64_t results = koila__outline_results(r->usual);
    return way->peak > results ? (way->peak - results) / n_segments / 4 * 3 : 0;
}

/* What is needed beyond what waits, as far as that is known before anything is tried: the results,
 * or what calls outside loops hold, which is nearly the same with less kept. */
static void begin_gap(const koila__way *way, rungs *r)
{
    r->gap = koila__outline_results(r->usual);
    if (!is_small_step(r) && way->is_bound && way->of_calls > r->gap)
        r->gap = way->of_calls;
}

/* More segments leave more and run less again, down to where one segment holds too much. Bounds are
 * those of slices of one entry, so of any. */
static koila_status make_rungs_along(const koila__planning *q, const koila__way *way,
                                     koila_node turn, rungs *r)
{
    static const uint32_t n_segments[] = { 32, 24, 16, 12, 8, 6, 5, 4, 3, 2 };
    koila__outline_options how = { .n_loops = way->schedule.n_loops,
                                   .repeats_writes = q->repeats_writes };
    koila__recompute x = { .at = last_from(way->placed, turn) };
    int64_t *one = koila__arena_array(&q->plan->arena, (size_t)q->graph->axes.n + 1, sizeof *one);
    if (!one)
        return KOILA_NO_MEMORY;
    for (uint32_t a = 0; a < q->graph->axes.n; a++)
        one[a] = 1;
    how.rows = one;
    KOILA_TRY(
        koila__outline_new(&r->usual, way->placed, way->targets, q->n_targets, x.at, &how, q->mem));
    koila__spend(q->effort, KOILA_COST_NS_OUTLINE, r->n_nodes);
    if (koila__outline_floor(r->usual) > r->budget)
        return KOILA_OK;
    koila__spend(q->effort, KOILA_COST_NS_CHOICE * KOILA_COUNT(n_segments), r->n_nodes);
    begin_gap(way, r);
    const bool asks_gap = asks_for_gap(r);
    if (asks_gap && r->gap > r->budget)
        return KOILA_OK;
    KOILA_TRY(koila__outline_begin(r->usual));
    for (size_t i = 0; i < KOILA_COUNT(n_segments); i++) {
        x.n_segments = n_segments[i];
        KOILA_TRY(add_rung(r, r->usual, x, asks_gap ? r->budget - r->gap : UINT64_MAX));
    }
    for (uint32_t i = 0; i < r->all.n && way->is_bound; i++)
        r->all.at[i].gap = bytes_of_segment(r, way, r->all.at[i].how.n_segments);
    return KOILA_OK;
}

/* What came of a rung. */
typedef struct outcome {
    uint64_t needs;    /* 0: not known */
    uint64_t of_calls; /* koila__way.of_calls, where it is not scheduled */
    bool is_better;    /* than the best so far */
    bool at_call;      /* calls outside loops need too much, beside what waits */
} outcome;

/* Do calls outside loops need too much in w, which is rung x? As far as that is known. */
static bool is_over_at_call(const koila__planning *q, const rung *x, const koila__way *w)
{
    const uint64_t budget = q->options->budget_bytes;
    if (w->peak <= budget)
        return false;
    if (w->is_bound)
        return w->of_calls && w->of_calls + x->waiting > budget;
    const koila_node n = koila__way_peak_node(q, w);
    return n != KOILA_NONE && !w->placed->node[n].in_loop;
}

/* *best becomes `way` with the results of rung x dropped, if that is better. */
static koila_status try_along(koila__planning *q, const koila__way *way, rung *x, koila__way *best,
                              outcome *out)
{
    koila__way next = { 0 };
    *out = (outcome){ 0 };
    KOILA_TRY(drop(q, way, x, &next));
    if (!next.placed)
        return KOILA_OK;
    koila_assert(next.peak >= x->bound || next.peak > q->options->budget_bytes);
    *out = (outcome){ .needs = next.peak,
                      .of_calls = next.is_bound ? next.of_calls : 0,
                      .is_better = !best->placed || koila__way_is_better(q, &next, best),
                      .at_call = is_over_at_call(q, x, &next) };
    if (out->is_better)
        koila__way_swap(best, &next);
    koila__way_free(&next);
    return KOILA_OK;
}

/* The rung to be tried next, or NULL: of those that are likely to fit the one of the most segments,
 * which runs the least again. */
static rung *next_along(const koila__planning *q, rungs *r)
{
    for (uint32_t i = 0; i < r->all.n; i++)
        if (is_likely(r, &r->all.at[i]))
            return &r->all.at[i];
    return NULL;
}

/* Rung x does not fit. What calls outside loops hold alone is the same whatever is dropped. */
static void learn_from(rungs *r, const rung *x, const outcome *came, uint64_t part)
{
    const bool is_sharp = came->at_call && !came->of_calls; /* it is scheduled */
    learn_gap(r, x, came->needs, is_sharp ? GAP_PART_AT_CALL : part);
    r->gap = came->of_calls > r->gap ? came->of_calls : r->gap;
}

/* Other numbers of segments may drop the same: they are not tried too. */
static void leave_out_alike(rungs *r, const rung *x)
{
    for (uint32_t i = 0; i < r->all.n; i++) {
        rung *y = &r->all.at[i];
        y->is_out |= y->waiting == x->waiting && y->bound == x->bound && y->work == x->work;
    }
}

/* Is one of the two ways not compared with more? */
static bool is_any_enough(const koila__planning *q, const koila__way *way, const koila__way *best)
{
    return koila__is_enough(q, way) || (best->placed && koila__is_enough(q, best));
}

/* No rung was tried. Where some were left out for what one segment needs, the least of that is told
 * in place of what `way` needs with nothing dropped: it is too much too. */
static uint64_t least_told(const koila__planning *q, const rungs *r, const koila__way *way)
{
    const uint64_t budget = q->options->budget_bytes;
    uint64_t least = way->peak;
    for (uint32_t i = 0; i < r->all.n; i++) {
        const rung *x = &r->all.at[i];
        const uint64_t needs = x->waiting + x->gap;
        const bool is_left_out =
            x->bound <= budget && x->waiting + r->gap <= budget && needs > budget;
        if (is_left_out && needs < least)
            least = needs;
    }
    return least;
}

static bool fits_now(const koila__planning *q, const koila__way *best)
{
    return best->placed && koila__way_fits(q, best);
}

/* The rung that *best became last, or NULL; and did calls outside loops need too much in it? */
typedef struct taken {
    rung *rung;
    bool is_at_call;
} taken;

/* *best becomes the rung of the least time, of those that are likely to fit. Where one fits, others
 * are tried until the time for planning is over and two in a row were no better, in a small step
 * all. */
static koila_status climb_rungs(koila__planning *q, const koila__way *way, rungs *r,
                                koila__way *best, taken *last)
{
    const bool is_small = is_small_step(r);
    uint32_t n_in_a_row = 0;
    outcome came;
    for (rung *x = next_along(q, r); x; x = next_along(q, r)) {
        const bool is_late = !is_small && koila__is_spent(q->effort) && n_in_a_row >= 2;
        if (is_any_enough(q, way, best) || (fits_now(q, best) && is_late))
            break;
        KOILA_TRY(try_along(q, way, x, best, &came));
        if (came.needs > q->options->budget_bytes)
            learn_from(r, x, &came, GAP_PART_ALONG);
        leave_out_alike(r, x);
        if (came.is_better)
            *last = (taken){ x, came.at_call };
        n_in_a_row = came.is_better ? 0 : n_in_a_row + 1;
    }
    return KOILA_OK;
}

/* Nothing fits. What runs again depends on little, so it lies in early loops, beside what the
 * forward pass holds; now it waits for the calls that were recorded before it. The rung of the
 * fewest segments needs the least then, in most steps: others are tried for as long as that helps.
 */
static koila_status climb_behind(koila__planning *q, const koila__way *way, rungs *r,
                                 koila__way *best)
{
    taken last = { 0 };
    outcome came = { .is_better = true };
    begin_gap(way, r);
    for (uint32_t i = 0; i < r->all.n; i++) {
        r->all.at[i].is_out = false;
        r->all.at[i].how.apart = false;
        r->all.at[i].how.behind = true;
    }
    for (uint32_t i = r->all.n; i-- > 0 && came.is_better && !fits_now(q, best);) {
        rung *x = &r->all.at[i];
        if (!is_likely(r, x))
            continue;
        KOILA_TRY(try_along(q, way, x, best, &came));
        if (came.needs > q->options->budget_bytes)
            learn_from(r, x, &came, GAP_PART);
        leave_out_alike(r, x);
    }
    return fits_now(q, best) ? climb_rungs(q, way, r, best, &last) : KOILA_OK;
}

/* Where no rung fits, but nearly, the best one is tried with loops apart, unless a call outside
 * loops decides; then all are with what runs again behind what was before it. */
static koila_status climb_along(koila__planning *q, const koila__way *way, rungs *r,
                                koila__way *best)
{
    taken last = { 0 };
    outcome came;
    KOILA_TRY(climb_rungs(q, way, r, best, &last));
    if (last.rung && !last.is_at_call && !fits_now(q, best) && is_in_reach(q, best->peak)) {
        last.rung->how.apart = true;
        KOILA_TRY(try_along(q, way, last.rung, best, &came));
    }
    if (!fits_now(q, best))
        KOILA_TRY(climb_behind(q, way, r, best));
    return KOILA_OK;
}

/* Do the results need more than the budget? Then nothing is likely to fit. Only once the time for
 * planning is over, as in limits_of_path(): an outline counts as time. */
static bool are_results_too_much(const rungs *r, const koila__way *way)
{
    return asks_for_gap(r) && koila__is_spent(r->effort) && way->results > r->budget;
}

/* `way` needs too much with all that its loops hold. So results of the forward pass are dropped and
 * computed again, barriers included: *best becomes the best of what was tried. Where nothing was,
 * and `way` is not scheduled, *least becomes the least that is told of it. */
static koila_status drop_through_loops(koila__planning *q, koila_node turn, const koila__way *way,
                                       koila__way *best, uint64_t *least)
{
    rungs r = no_rungs(q, way);
    r.fits_undropped = koila__way_fits(q, way);
    if (are_results_too_much(&r, way)) /* nothing is made yet */
        return KOILA_OK;
    koila_status status = make_rungs_along(q, way, turn, &r);
    if (status == KOILA_OK)
        status = climb_along(q, way, &r, best);
    if (status == KOILA_OK && !best->placed && way->is_bound)
        *least = least_told(q, &r, way);
    free_rungs(&r);
    return status;
}

koila_status koila__drop_along(koila__planning *q, koila_node turn, koila__way *way)
{
    koila__way best = { 0 };
    const koila_status status = drop_through_loops(q, turn, way, &best, &way->peak);
    if (status == KOILA_OK && best.placed && koila__way_is_better(q, &best, way))
        koila__way_swap(way, &best);
    koila__way_free(&best);
    return status;
}

koila_status koila__drop_in_loops(koila__planning *q, koila__way *best)
{
    koila__way rows = koila__way_so_far(q);
    koila__way way = { 0 };
    koila_node turn;
    if (!has_many_loops(q))
        return KOILA_OK;
    KOILA_TRY(koila__drop_turn(q, &turn));
    if (turn == KOILA_NONE)
        return KOILA_OK;
    const koila_status status = drop_through_loops(q, turn, &rows, &way, &rows.peak);
    if (status == KOILA_OK && way.placed && (!best->placed || koila__way_is_better(q, &way, best)))
        koila__way_swap(best, &way);
    koila__way_free(&way);
    return status;
}
