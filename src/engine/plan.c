/* plan.c — the choice: the fewest slices that fit.
 *
 * One slice is the recorded order as it is (bit-equal to eager), so it is tried first. Otherwise
 * the graph is placed, scheduled under a few keep policies (schedule.h), and simulated in 2, 4, 8,
 * … slices until a policy fits the budget. Among those that fit, the policy with the least work
 * wins. They are tried in order of work, so the first that fits needs no rival, and the others are
 * never scheduled. Keeping everything is the least work, since every other policy keeps less and
 * runs more; recomputing everything is the most. A schedule does not depend on the number of rows:
 * each is made once.
 *
 * If something is gathered, all this is done twice: the values after the gather stay whole, or are
 * sliced again (Note [After a gather] in place.c). The better plan wins.
 *
 * A plan that provably cannot fit is never built:
 *   - the whole step, when a lower bound of its bytes (koila__schedule_whole_bytes) exceeds the
 *   budget;
 *   - slices, when the results alone exceed it: then only the smallest peak is sought, for the
 *   error;
 *   - a policy that holds more between two loops than the best one needs at its peak.
 *
 * If no number of rows fits, other axes of the batch are tried, where the caller allows it: the
 * likeliest first, each placed once, with gathered values sliced again. The first that fits at
 * moderate work is taken, else the least work of those that fit. src/engine/axes.c finds them. If
 * none fits with all rows in a slice, the rows run one by one, each cut along another axis:
 * src/engine/both.c.
 *
 * A step that cannot be scheduled in slices (thousands of barriers) runs whole, which is always
 * right. With a caching allocator the sum of live bytes does not decide alone: options.accepts is
 * called for each plan whose sum fits. */
#include "engine/plan_inside.h"

#include "engine/axes.h"
#include "engine/both.h"
#include "engine/live.h"
#include "engine/plan_costs.h"
#include "engine/recompute.h"
#include "graph/table.h"

#include <math.h>

#define MAX_POLICIES 6

typedef struct candidate {
    koila__keep keep;
    koila__schedule schedule;
    enum { UNTRIED, CARRIED_OUT, REFUSED } state; /* REFUSED: impossible, or worse than another */
    bool never_fits;
    /* with the most slices; set if it never fits and has the least peak of such candidates */
    uint64_t last_peak;
} candidate;

/* Rows of a slice of every axis when the main one is cut into n. */
static void rows_for(const koila_graph *g, int64_t n_slices, int64_t *rows)
{
    for (uint32_t a = 0; a < g->axes.n; a++) {
        rows[a] = (g->axes.at[a] + n_slices - 1) / n_slices;
        if (rows[a] < 1)
            rows[a] = 1;
    }
}

/* Do m slices and n slices have the same rows? With two axes, one may agree and the other not. */
static bool same_rows(const koila_graph *g, int64_t m, int64_t n)
{
    for (uint32_t a = 0; a < g->axes.n; a++)
        if ((g->axes.at[a] + m - 1) / m != (g->axes.at[a] + n - 1) / n)
            return false;
    return true;
}

/* Rows of a slice of every axis as the options force them. */
static void rows_as_forced(const koila_graph *g, const koila_plan_options *o, int64_t *rows)
{
    for (uint32_t a = 0; a < g->axes.n; a++)
        rows[a] = o->rows < g->axes.at[a] ? o->rows : g->axes.at[a];
}

/* Does no number of slices fit the budget, even without workspaces? With no ragged slice, fewer
 * rows never hold more: bytes that grow with the rows of a slice shrink, and earlier slices leave
 * the bytes of the same rows. */
static bool never_fits(const koila__placed *p, const koila__schedule *s,
                       const koila_plan_options *o, int64_t most_slices, int64_t *rows)
{
    for (uint32_t a = 0; a < p->graph->axes.n; a++)
        if (p->graph->axes.at[a] & (p->graph->axes.at[a] - 1) || (p->cut && p->cut[a]))
            return false;
    const koila__live_options live = { .rows = rows, .bytes_only = true, .limit = o->budget_bytes };
    rows_for(p->graph, most_slices, rows);
    return koila__live_simulate(p, s, &live, NULL, NULL, NULL).peak_bytes > o->budget_bytes;
}

/* The axis with the most loop nodes; 0 when nothing is in a loop. */
static uint16_t main_axis(const koila__placed *p)
{
    uint32_t best = 0;
    uint16_t axis = 0;
    for (uint32_t a = 0; a < p->graph->axes.n; a++) {
        uint32_t n = 0;
        for (uint32_t k = 0; k < p->graph->nodes.n; k++)
            n += p->node[k].in_loop && p->node[k].axis == a;
        if (n > best) {
            best = n;
            axis = (uint16_t)a;
        }
    }
    return axis;
}

static koila_status map_targets(const koila__placed *p, const koila_value *targets, uint32_t n,
                                koila_value *out, koila_error *err)
{
    for (uint32_t i = 0; i < n; i++) {
        out[i] = p->lowered[targets[i]];
        if (out[i] == KOILA_NONE)
            return koila__fail(err, KOILA_BAD_ARGUMENT, 0, "plan: target %u does not exist",
                               targets[i]);
    }
    return KOILA_OK;
}

/* Sums of bytes need no check for overflow once this holds. Every value is alive at most once
 * whole, once in slices, once kept, and once as an accumulator, which is at most twice as wide. */
static bool bytes_add_up(const koila_graph *g)
{
    enum { MOST_TIMES = 6 };
    uint64_t sum = 0;
    for (koila_value v = 0; v < g->values.n; v++) {
        if (g->values.at[v].meta == KOILA_NONE)
            continue;
        const koila_meta_info *m = koila__value_meta(g, v);
        const uint64_t once = m->n_bytes > m->n_storage_bytes ? m->n_bytes : m->n_storage_bytes;
        uint64_t most;
        if (!koila__mul(once, MOST_TIMES, &most) || !koila__add(sum, most, &sum) || sum > INT64_MAX)
            return false;
    }
    return true;
}

/* Least work first, most work last. */
static uint32_t policies(uint32_t n_loops, uint32_t keep, koila__keep *out)
{
    uint32_t n = 0;
    if (keep != KOILA_KEEP_NONE)
        out[n++] = (koila__keep){ .horizon = UINT32_MAX };
    if (keep != KOILA_KEEP_ALL) {
        const double factors[] = KOILA_SPACING_FACTORS;
        const double root = sqrt((double)n_loops);
        if (keep == KOILA_KEEP_AUTO && n_loops > 4)
            for (size_t i = 0; i < KOILA_COUNT(factors); i++) {
                const uint32_t spacing = (uint32_t)(root * factors[i] + 0.5);
                out[n++] = (koila__keep){ .horizon = spacing + 2, .spacing = spacing };
            }
        out[n++] =
            (koila__keep){ .horizon = 0,
                           .max_instrs = keep == KOILA_KEEP_AUTO ? KOILA_COST_MAX_INSTRS_AUTO : 0 };
    }
    return n;
}

/* The state that the parts of koila_plan_new() share. */
typedef struct planning {
    const koila_graph *graph;
    const koila_value *targets;
    uint32_t n_targets;
    const koila_plan_options *options;
    const koila_allocator *mem;
    koila_error *err;
    koila_plan *plan;
    int64_t largest_axis;
    bool is_empty;          /* an axis has no rows: nothing to slice */
    bool whole_fits;        /* one slice fits by its sum of live bytes */
    bool accepted;          /* the caller takes the plan */
    uint32_t dim;           /* as koila_plan_info.dim */
    int64_t unit;           /* as koila_plan_info.unit */
    const uint8_t *seeds;   /* of another axis: koila__along.seeds */
    bool drops_along;       /* results may be dropped along another axis */
    const uint8_t *adds_on; /* [targets] koila__plan_row(); NULL: none is */
    koila__least other, both;
} planning;

typedef koila_status (*place_fn)(const koila_graph *, const koila_value *, uint32_t,
                                 const koila_allocator *, koila__placed **, koila_error *);

static koila_status place(const planning *q, place_fn how, koila_value *targets,
                          koila__placed **out)
{
    koila__placed *placed = NULL;
    if (q->seeds)
        KOILA_TRY(koila__place_along(q->graph, q->seeds, q->targets, q->n_targets, q->mem, &placed,
                                     q->err));
    else
        KOILA_TRY(how(q->graph, q->targets, q->n_targets, q->mem, &placed, q->err));
    koila_check(koila__placed_check(placed, NULL));
    koila_status status = map_targets(placed, q->targets, q->n_targets, targets, q->err);
    if (status == KOILA_OK && !bytes_add_up(placed->graph))
        status = koila__fail(q->err, KOILA_UNSUPPORTED, 0,
                             "plan: the sizes of all values add up to more than 64 bits");
    if (status == KOILA_OK && q->adds_on)
        status = koila__both_mark(placed, q->adds_on, targets, q->n_targets);
    if (status == KOILA_OK)
        *out = placed;
    else
        koila__placed_free(placed);
    return status;
}

static bool is_copy_to_host(const koila_graph *g, koila_node n)
{
    const koila_sig_info *s = koila__node_sig(g, n);
    return !(koila_op_flags(g->table, s->op) & KOILA_OP_VIEW) &&
           koila__meta(g->table, s->outputs[0])->device == 0;
}

static void count_offloaded(koila_plan *p)
{
    const koila_graph *g = p->placed->graph;
    for (koila_node n = 0; n < g->nodes.n; n++) {
        if (!p->placed->node[n].offloads || !is_copy_to_host(g, n))
            continue;
        const koila_value from = g->inputs.at[g->nodes.at[n].first_input];
        p->info.n_offloaded++;
        p->info.offloaded_bytes +=
            koila__live_bytes(p->placed, from, p->rows[p->placed->node[n].axis]);
    }
}

/* Sets the facts of a plan that need no simulation; p->rows is set. */
static void set_info(koila_plan *p, const planning *q)
{
    const koila_graph *g = p->placed->graph;
    const koila__schedule *s = &p->schedule;
    const uint16_t axis = main_axis(p->placed);
    p->info.struct_size = sizeof p->info;
    p->info.batch = g->axes.n ? g->axes.at[axis] : 1;
    p->info.rows = g->axes.n ? p->rows[axis] : 1;
    p->info.n_slices = koila__n_slices(p->info.batch, p->info.rows);
    if (p->placed->cut)
        p->info.n_slices = koila__count_slices(p->placed, axis, p->rows[axis], &p->info.rows);
    p->info.budget_bytes = q->options->budget_bytes;
    p->info.n_stages = s->n_stages;
    p->info.n_loops = s->n_loops;
    p->info.n_recorded = s->n_needed;
    p->info.work = s->work;
    p->info.work_recorded = s->work_recorded;
    p->info.replay_ratio = s->work_recorded > 0 ? s->work / s->work_recorded : 1;
    p->info.peak_node = KOILA_NONE;
    p->info.dim = q->dim;
    p->info.unit = q->unit;
    for (koila_node n = 0; n < g->nodes.n; n++)
        p->info.n_again += p->placed->node[n].is_again;
    count_offloaded(p);
}

/* Are forced rows the only limit? Then the plan minimises memory; with a budget it minimises work.
 */
static bool is_frugal(const koila_plan_options *o)
{
    return o->rows > 0 && o->budget_bytes == UINT64_MAX;
}

/* Does the caller take a plan that fits by its sum? */
static bool accepted(const planning *q, koila__placed *placed, const koila__schedule *schedule,
                     koila_value *targets, int64_t *rows, uint64_t peak_bytes)
{
    if (!q->options->accepts || is_frugal(q->options))
        return true;
    koila_plan view = *q->plan; /* borrows everything, during the call */
    view.placed = placed;
    view.schedule = *schedule;
    view.targets = targets;
    view.rows = rows;
    set_info(&view, q);
    view.info.peak_bytes = peak_bytes;
    return q->options->accepts(q->options->accepts_user, &view);
}

/* Plans the step as recorded, in one slice. *fits: within the budget, and accepted. */
static koila_status plan_whole(planning *q, bool *fits)
{
    koila_plan *p = q->plan;
    KOILA_TRY(place(q, koila__place_whole, p->targets, &p->placed));
    KOILA_TRY(koila__schedule_init(&p->schedule, p->placed, p->targets, q->n_targets,
                                   (koila__keep){ .horizon = UINT32_MAX }, q->mem, q->err));
    rows_for(q->graph, 1, p->rows);
    const uint64_t peak =
        koila__plan_peak(p->placed, &p->schedule, q->options, p->rows, q->options->budget_bytes);
    q->whole_fits = peak <= q->options->budget_bytes;
    *fits = q->whole_fits && accepted(q, p->placed, &p->schedule, p->targets, p->rows, peak);
    q->accepted = *fits;
    set_info(p, q);
    p->info.batch = q->largest_axis;
    p->info.rows = q->largest_axis;
    p->info.n_slices = 1;
    return KOILA_OK;
}

/* A way to run the step in slices. */
typedef struct sliced {
    koila__placed *placed;
    koila__schedule schedule;
    koila_value *targets;
    int64_t *rows; /* [axes] */
    uint64_t peak;
    bool accepted;
} sliced;

static void swap_ways(sliced *a, sliced *b)
{
    const sliced was = *a;
    *a = *b;
    *b = was;
}

static void sliced_free(sliced *s)
{
    if (!s->placed)
        return;
    koila__schedule_deinit(&s->schedule);
    koila__placed_free(s->placed);
}

/* The search over one placement: which policy, in how many slices. */
typedef struct search {
    planning *q;
    koila__scheduler *scheduler;
    candidate candidates[MAX_POLICIES];
    uint32_t n_policies;
    int64_t batch;  /* rows of the main axis */
    bool is_sorted; /* the candidates are sorted by work */
    /* the placement and its targets; rows and peak of the taken candidate; at the end also its
     * schedule */
    sliced found;
    uint32_t taken; /* the taken candidate */
    /* the candidate with the least peak of those that never fit, for the error; the others are
     * dropped at once */
    candidate *hopeless;
    struct {              /* the last candidate that fitted by its sum and was not accepted */
        int64_t n_slices; /* 0: there was none */
        uint64_t peak;
        uint32_t k;
    } refused;
} search;

/* Makes the schedule of a policy, unless that was tried before. */
static koila_status make_candidate(search *x, candidate *c)
{
    if (c->state != UNTRIED)
        return KOILA_OK;
    /* its work is cheaper to find than its instructions */
    if (c->keep.max_instrs && isinf(koila__schedule_work(x->scheduler, c->keep))) {
        c->state = REFUSED;
        return KOILA_OK;
    }
    const koila_status status =
        koila__schedule_make(x->scheduler, c->keep, &c->schedule, x->q->err);
    c->state = status == KOILA_OK ? CARRIED_OUT : REFUSED;
    return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
}

/* Sorts the policies between the first and the last: least work first. */
static void sort_candidates(search *x)
{
    candidate *c = x->candidates;
    double work[MAX_POLICIES];
    if (x->is_sorted)
        return;
    x->is_sorted = true;
    for (uint32_t i = 1; i + 1 < x->n_policies; i++) {
        const candidate mine = c[i];
        const double w = koila__schedule_work(x->scheduler, mine.keep);
        uint32_t k = i;
        for (; k > 1 && work[k - 1] > w; k--) {
            c[k] = c[k - 1];
            work[k] = work[k - 1];
        }
        c[k] = mine;
        work[k] = w;
    }
}

static void give_up(search *x, candidate *c)
{
    koila_assert(c->state == CARRIED_OUT);
    koila__schedule_recycle(x->scheduler, &c->schedule);
    c->state = REFUSED;
}

static void set_rows(search *x, int64_t n_slices)
{
    if (x->q->options->rows > 0)
        rows_as_forced(x->q->graph, x->q->options, x->found.rows);
    else
        rows_for(x->q->graph, n_slices, x->found.rows);
}

/* The peak of a candidate in the rows that are set; exact where it is at most `bound` (0: always).
 */
static uint64_t search_peak(const search *x, const candidate *c, uint64_t bound)
{
    return koila__plan_peak(x->found.placed, &c->schedule, x->q->options, x->found.rows, bound);
}

/* Takes candidate k, whose peak in the current rows is `peak`. */
static void take(search *x, uint32_t k, uint64_t peak)
{
    koila_assert(k < x->n_policies && x->candidates[k].state == CARRIED_OUT);
    x->taken = k;
    x->found.peak = peak;
}

static bool is_accepted(const search *x, const candidate *c, uint64_t peak)
{
    return accepted(x->q, x->found.placed, &c->schedule, x->found.targets, x->found.rows, peak);
}

/* Takes the first candidate that fits in n_slices slices and is accepted. */
static koila_status take_accepted(search *x, int64_t n_slices, bool *any)
{
    const uint64_t budget = x->q->options->budget_bytes;
    *any = false;
    for (uint32_t k = 0; k < x->n_policies && !*any; k++) {
        candidate *c = &x->candidates[k];
        KOILA_TRY(make_candidate(x, c));
        if (c->state != CARRIED_OUT || c->never_fits)
            continue;
        set_rows(x, n_slices);
        const uint64_t peak = search_peak(x, c, budget);
        *any = peak <= budget && is_accepted(x, c, peak);
        if (*any)
            take(x, k, peak);
    }
    return KOILA_OK;
}

/* `low` slices were refused, `high` taken: finds fewer slices that are taken by bisection, then
 * tries the next two smaller numbers, since fitting is not monotone. On return, rows and peak
 * belong to the smallest accepted slice count. A number that gives every axis the rows of an
 * earlier number is not tried again. */
static koila_status refine(search *x, int64_t low, int64_t high)
{
    enum { N_MORE_TRIES = 2 };
    const koila_graph *g = x->q->graph;
    bool any;
    while (high - low > 1) {
        const int64_t n = low + (high - low) / 2;
        if (same_rows(g, n, high)) {
            high = n;
            continue;
        }
        if (same_rows(g, n, low)) {
            low = n;
            continue;
        }
        KOILA_TRY(take_accepted(x, n, &any));
        if (any)
            high = n;
        else
            low = n;
    }
    int n_tries = 0;
    /* high - 1 was refused, or has the rows of a refused number */
    for (int64_t n = high - 2; n > 1 && n_tries < N_MORE_TRIES; n--) {
        if (same_rows(g, n, n + 1))
            continue;
        n_tries++;
        KOILA_TRY(take_accepted(x, n, &any));
        if (any)
            high = n;
    }
    set_rows(x, high);
    return KOILA_OK;
}

/* Facts of policy 0, which keeps everything, for take_least(). */
typedef struct most_kept {
    double work;      /* the least of all policies; 0: not known yet */
    koila__kept kept; /* by it */
    bool goes_last;
} most_kept;

static most_kept know_first(search *x)
{
    most_kept first = { 0 };
    if (x->n_policies > 1 && koila__scheduler_n_loops(x->scheduler) > 1) {
        first.work = koila__schedule_work(x->scheduler, x->candidates[0].keep);
        first.kept = koila__scheduler_kept(x->scheduler);
    }
    if (!first.kept.any)
        x->n_policies = 1; /* nothing is worth keeping: all policies are one */
    first.goes_last = x->n_policies > 1 && first.kept.is_sure && !isinf(first.work);
    if (!first.goes_last)
        first.work = 0;
    return first;
}

/* Can a policy be rejected before its instructions are written? It would exceed its work limit, or
 * keep more bytes than the peak of the taken candidate. */
static bool loses_unmade(search *x, const candidate *c)
{
    const double work = koila__schedule_work(x->scheduler, c->keep);
    if (isinf(work) || (c->keep.max_work > 0 && work > c->keep.max_work))
        return true;
    return x->taken != KOILA_NONE && koila__scheduler_kept(x->scheduler).n_bytes > x->found.peak;
}

/* Candidate k replaces the taken one if its peak is smaller; policy 0 also if it is equal.
 */
static void take_if_less(search *x, uint32_t k)
{
    const bool any = x->taken != KOILA_NONE;
    const uint64_t peak = search_peak(x, &x->candidates[k], any ? x->found.peak : 0);
    if (any && (peak > x->found.peak || (peak == x->found.peak && k > 0))) {
        give_up(x, &x->candidates[k]);
        return;
    }
    if (any)
        give_up(x, &x->candidates[x->taken]);
    take(x, k, peak);
}

/* In the current rows, takes the policy with the smallest peak, among equals the first. `moderate`:
 * only policies that cost little more than the first. Policy 0 is tried last when its work is known
 * without its schedule, since its kept values alone are often too much. */
static koila_status take_least(search *x, bool moderate)
{
    x->taken = KOILA_NONE;
    most_kept first = know_first(x);
    for (uint32_t i = 0; i < x->n_policies; i++) {
        const uint32_t k = first.goes_last ? (i + 1) % x->n_policies : i;
        const bool any = x->taken != KOILA_NONE;
        candidate *c = &x->candidates[k];
        if (first.goes_last && k == 0 && any && first.kept.n_bytes > x->found.peak)
            break;
        if (moderate && k > 0 && first.work > 0)
            c->keep.max_work = KOILA_COST_MODERATE * first.work;
        if (k > 0 && (any || k + 1 == x->n_policies) && loses_unmade(x, c))
            continue;
        KOILA_TRY(make_candidate(x, c));
        if (c->state != CARRIED_OUT)
            continue;
        if (!(first.work > 0))
            first.work = c->schedule.work;
        take_if_less(x, k);
    }
    return x->taken == KOILA_NONE ? KOILA_UNSUPPORTED : KOILA_OK;
}

/* The outcome of trying every policy in one number of slices. */
typedef struct attempt {
    int64_t n_slices;
    bool is_last; /* no larger number of slices exists */
    uint32_t n_carried_out;
    uint32_t n_hopeless; /* candidates that fit in no number of slices */
    uint32_t best;       /* the candidate with the smallest peak, or KOILA_NONE */
    uint64_t least_peak; /* its peak; exact in the last attempt only */
} attempt;

/* Does a new candidate fit in no number of slices? Of such candidates the one with the least peak
 * is kept, for the error message. Changes the rows. */
static bool is_hopeless(search *x, candidate *c)
{
    if (!never_fits(x->found.placed, &c->schedule, x->q->options, x->batch, x->found.rows))
        return false;
    c->never_fits = true;
    c->last_peak = search_peak(x, c, x->hopeless ? x->hopeless->last_peak : 0);
    if (x->hopeless && c->last_peak >= x->hopeless->last_peak) {
        give_up(x, c);
        return true;
    }
    if (x->hopeless)
        give_up(x, x->hopeless);
    x->hopeless = c;
    return true;
}

/* Above this a candidate's peak need not be exact. */
static uint64_t bound_of(const search *x, const attempt *r)
{
    if (!r->is_last)
        return x->q->options->budget_bytes;
    return r->best == KOILA_NONE ? 0 : r->least_peak;
}

/* Simulates candidate k. If it fits it is taken, and found.accepted is the caller's answer. */
static void try_candidate(search *x, attempt *r, uint32_t k)
{
    const koila_plan_options *o = x->q->options;
    candidate *c = &x->candidates[k];
    set_rows(x, r->n_slices);
    const uint64_t peak = c->never_fits ? c->last_peak : search_peak(x, c, bound_of(x, r));
    uint32_t lost = k;
    if (r->best == KOILA_NONE || peak < r->least_peak) {
        lost = r->best;
        r->least_peak = peak;
        r->best = k;
    }
    if (peak <= o->budget_bytes) {
        take(x, k, peak);
        x->found.accepted = is_accepted(x, c, peak);
        if (x->found.accepted)
            return;
        x->refused.n_slices = r->n_slices;
        x->refused.peak = peak;
        x->refused.k = k;
    }
    if (r->is_last && lost != KOILA_NONE && !o->accepts)
        give_up(x, &x->candidates[lost]);
}

/* Tries every policy; ends with the first that fits and is accepted (found.accepted). */
static koila_status try_slices(search *x, attempt *r)
{
    for (uint32_t k = 0; k < x->n_policies; k++) {
        candidate *c = &x->candidates[k];
        if (k == 1)
            sort_candidates(x);
        const bool is_new = c->state == UNTRIED;
        KOILA_TRY(make_candidate(x, c));
        if (c->state != CARRIED_OUT)
            continue;
        if (k == 0 && c->schedule.n_keeps == 0)
            x->n_policies = 1; /* nothing is worth keeping: all policies are one */
        r->n_carried_out++;
        if (c->never_fits && !r->is_last) {
            r->n_hopeless++;
            continue;
        }
        try_candidate(x, r, k);
        if (x->found.accepted)
            return KOILA_OK;
        if (!r->is_last && is_new && is_hopeless(x, c))
            r->n_hopeless++;
    }
    return KOILA_OK;
}

/* The last attempt ended without an accepted plan. A plan that fits by its sum but was refused is
 * better than one that does not fit. When nothing fits, the peak tells the caller. */
static void take_best_of_last(search *x, const attempt *r)
{
    if (x->refused.n_slices && r->least_peak > x->q->options->budget_bytes) {
        set_rows(x, x->refused.n_slices);
        take(x, x->refused.k, x->refused.peak);
        return;
    }
    take(x, r->best, r->least_peak);
}

/* Finds the fewest slices that fit, and the best policy for them; when nothing fits, the smallest
 * peak with the most slices. */
static koila_status choose(search *x)
{
    const koila_plan_options *o = x->q->options;
    const bool forced = o->rows > 0;
    const bool results_fit =
        forced || koila__scheduler_results_bytes(x->scheduler) <= o->budget_bytes;
    if (is_frugal(o) || !results_fit) {
        set_rows(x, x->batch > 2 ? x->batch : 2);
        return take_least(x, forced);
    }
    int64_t before = 1;
    int64_t n_slices = 2;
    for (;;) {
        attempt r = { .n_slices = n_slices,
                      .is_last = forced || n_slices >= x->batch,
                      .best = KOILA_NONE };
        KOILA_TRY(try_slices(x, &r));
        if (x->found.accepted)
            return o->accepts && !forced ? refine(x, before, n_slices) : KOILA_OK;
        if (!r.n_carried_out)
            return KOILA_UNSUPPORTED;
        if (r.is_last) {
            take_best_of_last(x, &r);
            return KOILA_OK;
        }
        if (r.n_hopeless == r.n_carried_out)
            n_slices = x->batch; /* the last try, for the reported peak */
        before = n_slices;
        n_slices = n_slices < x->batch / 2 ? n_slices * 2 : x->batch;
    }
}

/* The fewest slices of the placed step, and the best of the policies, for which *s has room; on
 * KOILA_OK s->schedule is yours. s->placed stays the caller's. */
static koila_status search_placed(planning *q, const koila__keep *keeps, uint32_t n, sliced *s)
{
    search x = { .q = q, .found = *s, .n_policies = n };
    koila_status status = koila__scheduler_new(&x.scheduler, s->placed, s->targets, q->n_targets,
                                               false, q->mem, q->err);
    if (status == KOILA_OK) {
        koila__keep usual[MAX_POLICIES];
        if (!n) {
            x.n_policies = policies(koila__scheduler_n_loops(x.scheduler), q->options->keep, usual);
            keeps = usual;
        }
        x.batch = q->graph->axes.n ? q->graph->axes.at[main_axis(s->placed)] : 1;
        for (uint32_t i = 0; i < x.n_policies; i++)
            x.candidates[i].keep = keeps[i];
        status = choose(&x);
        if (status == KOILA_OK) {
            x.found.schedule = x.candidates[x.taken].schedule;
            x.candidates[x.taken].state = UNTRIED;
            *s = x.found;
        }
    }
    for (uint32_t k = 0; k < MAX_POLICIES; k++)
        if (x.candidates[k].state == CARRIED_OUT)
            koila__schedule_deinit(&x.candidates[k].schedule);
    koila__scheduler_free(x.scheduler);
    return status;
}

/* Room for the targets and rows of *s. */
static koila_status make_room(const planning *q, sliced *s)
{
    koila__arena *arena = &q->plan->arena;
    s->targets = koila__arena_array(arena, q->n_targets, sizeof *s->targets);
    s->rows = koila__arena_array(arena, (size_t)q->graph->axes.n + 1, sizeof *s->rows);
    return s->targets && s->rows ? KOILA_OK : KOILA_NO_MEMORY;
}

/* Places with `how`, then finds the fewest slices and the best policy; *out is yours on KOILA_OK:
 * sliced_free(). */
static koila_status slice(planning *q, place_fn how, sliced *out)
{
    sliced s = { 0 };
    KOILA_TRY(make_room(q, &s));
    KOILA_TRY(place(q, how, s.targets, &s.placed));
    const koila_status status = search_placed(q, NULL, 0, &s);
    if (status == KOILA_OK)
        *out = s;
    else
        koila__placed_free(s.placed);
    return status;
}

/* Is b the better way? Fewer slices if they fit, then less work; for a frugal plan, the smaller
 * peak at moderately more work. */
static bool is_better(const planning *q, const sliced *b, const sliced *a)
{
    const koila_plan_options *o = q->options;
    const bool fits_a = a->peak <= o->budget_bytes;
    const bool fits_b = b->peak <= o->budget_bytes;
    if (is_frugal(o))
        return b->peak < a->peak && b->schedule.work <= KOILA_COST_MODERATE * a->schedule.work;
    if (fits_a != fits_b)
        return fits_b;
    if (!fits_a)
        return b->peak < a->peak;
    if (a->accepted != b->accepted)
        return b->accepted;
    const int64_t rows_a = a->rows[main_axis(a->placed)];
    const int64_t rows_b = b->rows[main_axis(b->placed)];
    return rows_a != rows_b ? rows_b > rows_a : b->schedule.work < a->schedule.work;
}

static bool gathers(const koila__placed *p)
{
    for (uint32_t n = 0; n < p->graph->nodes.n; n++)
        if (p->node[n].gathered)
            return true;
    return false;
}

/* May the slices of the plan be as long as its pieces ask for? Not if the caller chose the rows. */
static bool are_as_forced(const planning *q, const sliced *s)
{
    int64_t largest;
    for (uint16_t a = 0; a < q->graph->axes.n && q->options->rows > 0; a++) {
        koila__count_slices(s->placed, a, s->rows[a], &largest);
        if (largest > s->rows[a])
            return false;
    }
    return true;
}

/* Does b, which has pieces, fit too, at no more work? Its calls on pieces run once, in however many
 * slices, so their number is no measure. */
static bool is_as_little_work(const planning *q, const sliced *b, const sliced *a)
{
    return !is_frugal(q->options) && b->peak <= q->options->budget_bytes &&
           (b->accepted || !a->accepted) && b->schedule.work <= a->schedule.work;
}

/* Plans with rows that stay in their slice; *best becomes that plan where it is better. */
static koila_status try_pieces(planning *q, sliced *best)
{
    sliced pieces = { 0 };
    const koila_status status = slice(q, koila__place_pieces, &pieces);
    if (status == KOILA_OK && pieces.placed->cut && are_as_forced(q, &pieces) &&
        (is_better(q, &pieces, best) || is_as_little_work(q, &pieces, best))) {
        swap_ways(best, &pieces);
    }
    sliced_free(&pieces);
    return status;
}

/* The plan is that way from now on. */
static void adopt(planning *q, const sliced *way)
{
    koila_plan *p = q->plan;
    koila__placed_free(p->placed);
    koila__both_free(&p->schedule);
    koila__schedule_deinit(&p->schedule);
    p->placed = way->placed;
    p->schedule = way->schedule;
    p->targets = way->targets;
    p->rows = way->rows;
    q->accepted = way->accepted;
    p->n_curve = 0;
    p->info = (koila_plan_info){ 0 };
    set_info(p, q);
}

/* Plans in slices; if something is gathered, also with gathered values sliced again. On
 * KOILA_UNSUPPORTED the plan is unchanged. */
static koila_status plan_sliced(planning *q)
{
    sliced best = { 0 }, again = { 0 };
    koila_status status = slice(q, koila__place, &best);
    if (status != KOILA_OK)
        return status;
    const bool fewest = best.peak <= q->options->budget_bytes && q->options->rows <= 0 &&
                        q->largest_axis <= 2 * best.rows[main_axis(best.placed)];
    if (!fewest && gathers(best.placed)) {
        status = slice(q, koila__place_cut, &again);
        if (status == KOILA_OK && is_better(q, &again, &best)) {
            swap_ways(&best, &again);
        }
        sliced_free(&again);
        if (status != KOILA_OK && status != KOILA_UNSUPPORTED) {
            sliced_free(&best);
            return status;
        }
    }
    if (!fewest && koila__takes_rows(best.placed)) {
        status = try_pieces(q, &best);
        if (status != KOILA_OK && status != KOILA_UNSUPPORTED) {
            sliced_free(&best);
            return status;
        }
    }
    if (q->whole_fits && best.peak > q->options->budget_bytes) {
        sliced_free(&best);
        return KOILA_UNSUPPORTED; /* whole it fits, and was only not accepted */
    }
    adopt(q, &best);
    return KOILA_OK;
}

static koila_status check_targets(const planning *q)
{
    for (uint32_t i = 0; i < q->n_targets; i++) {
        const koila_value v = q->targets[i];
        if (v >= q->graph->values.n || q->graph->values.at[v].meta == KOILA_NONE)
            return koila__fail(q->err, KOILA_BAD_ARGUMENT, 0,
                               "plan: target %u is no value of the graph", v);
    }
    return KOILA_OK;
}

static void find_largest_axis(planning *q)
{
    q->largest_axis = 1;
    for (uint32_t i = 0; i < q->graph->axes.n; i++) {
        if (q->graph->axes.at[i] > q->largest_axis)
            q->largest_axis = q->graph->axes.at[i];
        q->is_empty |= q->graph->axes.at[i] == 0;
    }
}

/* Whole if that fits, else in slices; if that is not possible, whole. */
static koila_status choose_way(planning *q)
{
    const koila_plan_options *o = q->options;
    const bool one_slice = q->is_empty || q->largest_axis <= 1 || o->rows >= q->largest_axis;
    const bool forced = o->rows > 0;
    bool fits = false;
    uint64_t whole_bytes = 0;
    if (!forced && !one_slice && o->budget_bytes < UINT64_MAX)
        KOILA_TRY(
            koila__schedule_whole_bytes(q->graph, q->targets, q->n_targets, q->mem, &whole_bytes));
    if (one_slice || (!forced && whole_bytes <= o->budget_bytes))
        KOILA_TRY(plan_whole(q, &fits));
    if (fits || one_slice)
        return KOILA_OK;
    const koila_status status = plan_sliced(q);
    if (status != KOILA_UNSUPPORTED)
        return status;
    return q->plan->placed ? KOILA_OK : plan_whole(q, &fits);
}

/* ---- other axes */

/* Schedules s->placed, keeping all. */
static koila_status schedule_all_kept(const planning *q, sliced *s)
{
    return koila__schedule_init(&s->schedule, s->placed, s->targets, q->n_targets,
                                (koila__keep){ .horizon = UINT32_MAX }, q->mem, q->err);
}

/* The node that runs at the peak of s in s->rows, or KOILA_NONE. */
static koila_node node_at_peak(const planning *q, const sliced *s)
{
    const koila__live_options live = { .rows = s->rows,
                                       .workspace = q->options->workspace,
                                       .user = q->options->user };
    return koila__live_simulate(s->placed, &s->schedule, &live, NULL, NULL, NULL).peak_node;
}

/* Finds the recorded node at which the step as it was recorded holds the most; KOILA_NONE: nothing
 * runs. */
static koila_status find_turn(const planning *q, koila_node *turn)
{
    sliced whole = { 0 };
    *turn = KOILA_NONE;
    KOILA_TRY(make_room(q, &whole));
    KOILA_TRY(place(q, koila__place_whole, whole.targets, &whole.placed));
    rows_for(q->graph, 1, whole.rows);
    const koila_status status = schedule_all_kept(q, &whole);
    if (status == KOILA_OK) {
        const koila_node at = node_at_peak(q, &whole);
        *turn = at == KOILA_NONE ? at : whole.placed->node[at].recorded;
        koila__schedule_deinit(&whole.schedule);
    }
    koila__placed_free(whole.placed);
    return status;
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

static bool fits_and_is_accepted(const planning *q, const sliced *s)
{
    return s->peak <= q->options->budget_bytes &&
           (s->accepted || !q->options->accepts || is_frugal(q->options));
}

/* Is way b along another axis better than a, of which either may not fit? */
static bool is_better_axis(const planning *q, const sliced *b, const sliced *a)
{
    const bool fits_a = fits_and_is_accepted(q, a);
    const bool fits_b = fits_and_is_accepted(q, b);
    if (fits_a != fits_b)
        return fits_b;
    return fits_a && !is_frugal(q->options) ? b->schedule.work < a->schedule.work
                                            : b->peak < a->peak;
}

/* `way` with results dropped, in the fewest slices, under the best of the policies. next->placed
 * stays NULL where nothing can be dropped, or not scheduled then. */
static koila_status drop(planning *q, const sliced *way, koila__recompute how,
                         const koila__keep *keeps, uint32_t n_keeps, sliced *next)
{
    KOILA_TRY(make_room(q, next));
    KOILA_TRY(koila__recompute_new(way->placed, way->targets, q->n_targets, how, q->mem,
                                   &next->placed, next->targets));
    if (!next->placed)
        return KOILA_OK;
    const koila_status status = search_placed(q, keeps, n_keeps, next);
    if (status == KOILA_OK)
        return KOILA_OK;
    koila__placed_free(next->placed);
    next->placed = NULL;
    return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
}

/* Does it fit in slices that are not so thin that calling their operators takes the time? */
static bool is_quick(const sliced *way)
{
    return way->accepted && way->rows[0] >= KOILA_COST_THIN_SLICE;
}

/* `way` needs too much with all that its loops hold. So results of the forward pass are dropped and
 * computed again, barriers included; *way becomes the first that fits, else that of the least peak.
 * More segments leave more and run less again, down to where one segment holds too much. */
static koila_status drop_along(planning *q, koila_node turn, sliced *way)
{
    static const uint32_t n_segments[] = { 32, 24, 16, 12, 8, 6, 5, 4, 3, 2 };
    static const koila__keep keeps[] = { { .horizon = UINT32_MAX },
                                         { .horizon = 1 },
                                         { .horizon = UINT32_MAX, .drops_forward = true },
                                         { .horizon = 1, .drops_forward = true } };
    koila__recompute how = { .at = last_from(way->placed, turn) };
    sliced best = { 0 };
    koila_status status = KOILA_OK;
    uint32_t n_worse = 0; /* in a row */
    for (size_t i = 0; i < KOILA_COUNT(n_segments) && !is_quick(&best) && n_worse < 2; i++) {
        sliced next = { 0 };
        how.n_segments = n_segments[i];
        status = drop(q, way, how, keeps, KOILA_COUNT(keeps), &next);
        if (status != KOILA_OK)
            break;
        const bool is_better =
            next.placed && (!best.placed || is_quick(&next) || is_better_axis(q, &next, &best));
        if (is_better)
            swap_ways(&best, &next);
        n_worse = is_better || !best.placed ? 0 : n_worse + 1;
        sliced_free(&next);
    }
    if (status == KOILA_OK && best.placed && is_better_axis(q, &best, way))
        swap_ways(way, &best);
    sliced_free(&best);
    return status;
}

/* Plans along one of them; on KOILA_OK *out is yours. */
static koila_status slice_along(const planning *q, const koila__axis *axis, sliced *out)
{
    koila__along view;
    KOILA_TRY(koila__along_init(q->graph, axis, &q->plan->mem, &view));
    planning along = *q;
    koila_plan_options options = *q->options;
    const int64_t unit = axis->size / axis->rows;
    if (options.rows > 0) /* entries */
        options.rows = (options.rows + unit - 1) / unit;
    along.options = &options;
    along.graph = &view.graph;
    along.seeds = view.seeds;
    along.largest_axis = axis->rows;
    along.dim = axis->dim;
    along.unit = unit;
    koila_status status = slice(&along, koila__place_cut, out);
    if (status == KOILA_OK && q->drops_along && !fits_and_is_accepted(q, out)) {
        koila_node turn;
        status = find_turn(q, &turn);
        if (status == KOILA_OK && turn != KOILA_NONE)
            status = drop_along(&along, turn, out);
        if (status != KOILA_OK)
            sliced_free(out);
    }
    koila__along_deinit(&view, &q->plan->mem);
    return status;
}

static void note_least(planning *q, const koila__axis *axis, const sliced *way)
{
    if (way->peak < q->other.peak_bytes)
        q->other = (koila__least){ way->peak, axis->dim, way->rows[0] * (axis->size / axis->rows),
                                   axis->size };
}

/* The best way along another axis; best->placed stays NULL where there is none. */
static koila_status find_other_axis(planning *q, sliced *best, koila__axis *taken)
{
    koila__axis axes[KOILA__MOST_AXES];
    uint32_t n;
    bool is_cheap = false;
    KOILA_TRY(koila__axes_find(q->graph, &q->plan->mem, axes, &n));
    for (uint32_t i = 0; i < n && !is_cheap; i++) {
        sliced way = { 0 };
        const koila_status status = slice_along(q, &axes[i], &way);
        if (status == KOILA_UNSUPPORTED)
            continue;
        if (status != KOILA_OK)
            return status;
        note_least(q, &axes[i], &way);
        if (!best->placed || is_better_axis(q, &way, best)) {
            swap_ways(best, &way);
            *taken = axes[i];
        }
        sliced_free(&way);
        is_cheap = fits_and_is_accepted(q, best) &&
                   best->schedule.work <= KOILA_COST_MODERATE * best->schedule.work_recorded;
    }
    return KOILA_OK;
}

/* Takes another axis where one fits; in any case if the caller asks for one. */
static koila_status plan_other_axis(planning *q)
{
    sliced best = { 0 };
    koila__axis axis = { .size = 1, .rows = 1, .dim = KOILA_NONE };
    const bool in_any_case = q->options->axes == KOILA_AXES_OTHER;
    const koila_status status = find_other_axis(q, &best, &axis);
    if (status == KOILA_OK && !best.placed && in_any_case)
        return koila__fail(q->err, KOILA_UNSUPPORTED, 0, "plan: the batch has no other axis");
    if (status != KOILA_OK || !best.placed || !(in_any_case || fits_and_is_accepted(q, &best))) {
        sliced_free(&best);
        return status;
    }
    q->dim = axis.dim;
    q->unit = axis.size / axis.rows;
    adopt(q, &best);
    return koila__plan_describe(q->plan, q->options);
}

/* Does the plan so far not fit, or does the caller not take it? */
static bool rows_do_not_fit(const planning *q)
{
    const koila_plan_options *o = q->options;
    return q->plan->info.peak_bytes > o->budget_bytes || (o->accepts && !q->accepted);
}

/* ---- rows and another axis */

/* Is the plan one of slices of one row? */
static bool is_row_by_row(const planning *q)
{
    const koila_plan_info *info = &q->plan->info;
    return q->largest_axis > 1 && !q->is_empty && info->dim == KOILA_NONE && info->rows == 1 &&
           info->n_slices > 1 && info->n_loops > 0;
}

/* The rows one by one, each a step of its own: the plan changes if each of them fits. */
static koila_status plan_both(planning *q)
{
    koila_plan *p = q->plan;
    const koila_plan_options *o = q->options;
    if (!is_row_by_row(q))
        return KOILA_UNSUPPORTED;
    KOILA_TRY(koila__both_cut(p, o, &q->both));
    p->n_curve = p->info.n_gathers = 0;
    KOILA_TRY(koila__plan_describe(p, o));
    q->accepted =
        p->info.peak_bytes <= o->budget_bytes && (!o->accepts || o->accepts(o->accepts_user, p));
    return KOILA_OK;
}

/* The same, in any case. */
static koila_status plan_both_as_forced(planning *q)
{
    const koila_plan_options *o = q->options;
    koila_plan_options by_rows = *o;
    by_rows.axes = KOILA_AXES_ROWS;
    by_rows.rows = 1;
    q->options = &by_rows;
    find_largest_axis(q);
    koila_status status = choose_way(q);
    if (status == KOILA_OK)
        status = koila__plan_describe(q->plan, &by_rows);
    q->options = o;
    if (status == KOILA_OK)
        status = plan_both(q);
    if (status == KOILA_UNSUPPORTED)
        koila__fail(q->err, status, 0, "plan: rows and another axis cannot be cut together");
    return status;
}

/* ---- dropped and computed again */

/* Of the step that is recomputed: with more, what each loop keeps for the next decides the peak. */
enum { MOST_LOOPS_RECOMPUTED = 4 };

/* What is dropped, least work first. */
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

/* The same with host memory; the order does not matter. */
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
static uint64_t bound_of_rung(const planning *q, const sliced *best)
{
    const uint64_t budget = q->options->budget_bytes;
    if (!best->placed)
        return 0;
    return best->accepted || best->peak < budget ? budget : best->peak;
}

/* Does a value go from one loop to another while it waits in host memory? A copy there has no rows
 * that could be kept. */
static bool crosses_loops(const sliced *s)
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

/* Is it less work than the best way so far, if that fits? */
static bool is_less_work(const sliced *s, const sliced *best)
{
    return !best->accepted || s->schedule.work < best->schedule.work;
}

/* The way `base`, with one of its rungs; out->placed stays NULL where nothing can be dropped, and
 * out->accepted false where it is no better than *best. */
static koila_status take_rung(const planning *q, const sliced *base, koila__recompute how,
                              const sliced *best, sliced *out)
{
    *out = (sliced){ .rows = base->rows };
    out->targets = koila__arena_array(&q->plan->arena, q->n_targets, sizeof *out->targets);
    if (!out->targets)
        return KOILA_NO_MEMORY;
    KOILA_TRY(koila__recompute_new(base->placed, base->targets, q->n_targets, how, q->mem,
                                   &out->placed, out->targets));
    if (!out->placed)
        return KOILA_OK;
    const koila_status status = schedule_all_kept(q, out);
    if (status != KOILA_OK) {
        koila__placed_free(out->placed);
        return status;
    }
    out->peak = koila__plan_peak(out->placed, &out->schedule, q->options, out->rows,
                                 bound_of_rung(q, best));
    if (how.n_offloaded && crosses_loops(out)) {
        sliced_free(out);
        out->placed = NULL;
        return KOILA_OK;
    }
    out->accepted = out->peak <= q->options->budget_bytes && is_less_work(out, best) &&
                    accepted(q, out->placed, &out->schedule, out->targets, out->rows, out->peak);
    return KOILA_OK;
}

/* *best becomes the way of that rung, if it is better. */
static koila_status try_rung(const planning *q, const sliced *base, koila__recompute how,
                             sliced *best)
{
    sliced way;
    KOILA_TRY(take_rung(q, base, how, best, &way));
    if (way.placed &&
        (way.accepted || !best->placed || (!best->accepted && way.peak < best->peak))) {
        swap_ways(best, &way);
    }
    sliced_free(&way);
    return KOILA_OK;
}

/* The first rung of `base` that fits; with host memory, the least work of all that fit; else the
 * one with the least peak, if that is below *best's. */
static koila_status climb(const planning *q, const sliced *base, koila_node at, sliced *best)
{
    const koila_plan_options *o = q->options;
    for (size_t i = 0; i < KOILA_COUNT(ladder) && (!best->accepted || o->host_price > 0); i++) {
        koila__recompute how = ladder[i];
        how.at = at;
        KOILA_TRY(try_rung(q, base, how, best));
    }
    for (size_t i = 0; i < KOILA_COUNT(host_ladder) && o->host_price > 0; i++) {
        koila__recompute how = host_ladder[i];
        how.at = at;
        how.host = (koila__host){ .n_bytes = o->host_bytes,
                                  .price = o->host_price,
                                  .device = o->host_device };
        KOILA_TRY(try_rung(q, base, how, best));
    }
    return KOILA_OK;
}

/* The step placed by `how`, in n_slices slices of one loop or whole, with results dropped. */
static koila_status recompute(const planning *q, place_fn how, int64_t n_slices, sliced *best)
{
    sliced base = { 0 };
    KOILA_TRY(make_room(q, &base));
    KOILA_TRY(place(q, how, base.targets, &base.placed));
    if (q->options->rows > 0)
        rows_as_forced(q->graph, q->options, base.rows);
    else
        rows_for(q->graph, n_slices, base.rows);
    koila_status status = schedule_all_kept(q, &base);
    if (status != KOILA_OK) {
        koila__placed_free(base.placed);
        return status;
    }
    const koila_node at = node_at_peak(q, &base);
    if (base.schedule.n_loops <= MOST_LOOPS_RECOMPUTED && at != KOILA_NONE)
        status = climb(q, &base, at, best);
    sliced_free(&base);
    return status;
}

/* Is it better than the plan so far, which may fit along another axis? */
static bool is_better_recomputed(const planning *q, const sliced *way)
{
    const koila_plan_info *now = &q->plan->info;
    if (rows_do_not_fit(q))
        return way->accepted || way->peak < now->peak_bytes;
    return way->accepted && way->schedule.work < now->work;
}

/* Is another axis cut at more work than computing the forward pass again takes? */
static bool is_costly_axis(const planning *q)
{
    const koila_plan_info *info = &q->plan->info;
    return (q->dim != KOILA_NONE || info->n_inner) && info->replay_ratio > KOILA_COST_FORWARD_AGAIN;
}

/* Nothing fits as recorded: results of the forward pass are dropped and computed again, in the most
 * slices, or in one. The plan changes if that needs less. */
static koila_status plan_recomputed(planning *q)
{
    koila_plan *p = q->plan;
    sliced best = { 0 };
    koila_status status = KOILA_OK;
    if (q->largest_axis > 1 && !q->is_empty)
        status = recompute(q, koila__place, q->largest_axis, &best);
    if (status == KOILA_OK && !best.accepted && q->options->rows <= 0)
        status = recompute(q, koila__place_whole, 1, &best);
    if (status != KOILA_OK || !best.placed || !is_better_recomputed(q, &best)) {
        sliced_free(&best);
        return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
    }
    q->dim = KOILA_NONE;
    q->unit = 1;
    adopt(q, &best);
    return koila__plan_describe(p, q->options);
}

/* ---- all of it */

static koila_status plan_rows(planning *q)
{
    find_largest_axis(q);
    KOILA_TRY(choose_way(q));
    return koila__plan_describe(q->plan, q->options);
}

/* Rows; where these do not fit, another axis; then both; then another axis with results dropped. */
static koila_status plan_axes(planning *q)
{
    const koila_plan_options *o = q->options;
    if (o->axes == KOILA_AXES_BOTH)
        return plan_both_as_forced(q);
    if (o->axes == KOILA_AXES_OTHER)
        return plan_other_axis(q);
    KOILA_TRY(plan_rows(q));
    if (o->axes == KOILA_AXES_ROWS || o->rows > 0 || !rows_do_not_fit(q))
        return KOILA_OK;
    KOILA_TRY(plan_other_axis(q));
    if (!o->recomputes || !rows_do_not_fit(q))
        return KOILA_OK;
    const koila_status status = plan_both(q);
    if (status != KOILA_OK && status != KOILA_OOM && status != KOILA_UNSUPPORTED)
        return status;
    q->drops_along = rows_do_not_fit(q);
    return q->drops_along ? plan_other_axis(q) : KOILA_OK;
}

static koila_status make_plan(planning *q)
{
    koila_plan *p = q->plan;
    const koila_plan_options *o = q->options;
    koila__arena_init(&p->arena, q->mem);
    p->targets = koila__arena_array(&p->arena, q->n_targets, sizeof *p->targets);
    p->rows = koila__arena_array(&p->arena, (size_t)q->graph->axes.n + 1, sizeof *p->rows);
    if (!p->targets || !p->rows)
        return KOILA_NO_MEMORY;
    p->n_targets = q->n_targets;
    KOILA_TRY(check_targets(q));
    KOILA_TRY(plan_axes(q));
    if (o->recomputes && (rows_do_not_fit(q) || is_costly_axis(q)))
        KOILA_TRY(plan_recomputed(q));
    p->info.has_other_axes = koila__axes_any(q->graph);
    koila_check(koila_plan_check(p, NULL));
    if (p->info.peak_bytes <= o->budget_bytes)
        return KOILA_OK;
    return koila__plan_no_fit(p, q->graph, &q->other, &q->both, q->err);
}

/* The least that any way that was tried needs. */
static koila__least least_of(const planning *q)
{
    const koila_plan_info *info = &q->plan->info;
    if (q->other.peak_bytes < info->peak_bytes)
        return q->other;
    return (koila__least){ info->peak_bytes, info->dim, info->rows * info->unit,
                           info->batch * info->unit };
}

koila_status koila__plan_row(const koila_graph *graph, const koila_value *targets,
                             uint32_t n_targets, const uint8_t *adds_on,
                             const koila_plan_options *options, const koila_allocator *mem,
                             koila_plan **out, koila__least *least, koila_error *err)
{
    const koila_allocator a = koila__allocator(mem);
    koila_plan *p = koila__realloc(&a, NULL, 0, sizeof *p);
    koila_status status = KOILA_NO_MEMORY;
    if (p) {
        memset(p, 0, sizeof *p);
        p->mem = a;
        planning q = { .graph = graph,
                       .targets = targets,
                       .n_targets = n_targets,
                       .options = options,
                       .mem = mem,
                       .err = err,
                       .plan = p,
                       .dim = KOILA_NONE,
                       .unit = 1,
                       .adds_on = adds_on,
                       .other = { .peak_bytes = UINT64_MAX },
                       .both = { .peak_bytes = UINT64_MAX } };
        status = make_plan(&q);
        if (least)
            *least = least_of(&q);
    }
    if (status == KOILA_NO_MEMORY)
        koila__fail(err, status, 0, "plan: %s", koila_status_text(status));
    if (status != KOILA_OK) {
        koila_plan_free(p);
        return status;
    }
    *out = p;
    return KOILA_OK;
}

koila_status koila_plan_new(const koila_graph *graph, const koila_value *targets,
                            uint32_t n_targets, const koila_plan_options *options,
                            const koila_allocator *mem, koila_plan **out, koila_error *err)
{
    return koila__plan_row(graph, targets, n_targets, NULL, options, mem, out, NULL, err);
}

void koila_plan_free(koila_plan *p)
{
    if (!p)
        return;
    const koila_allocator mem = p->mem;
    koila__both_free(&p->schedule);
    koila__schedule_deinit(&p->schedule);
    koila__placed_free(p->placed);
    koila__arena_deinit(&p->arena);
    koila__release(&mem, p, sizeof *p);
}
