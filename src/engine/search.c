/* search.c — the search over one placement: under which keep policy (schedule.h), in how many
 * slices.
 *
 * The step is simulated in 2, 4, 8, … slices until a policy fits the budget. Among those that fit,
 * the policy with the least work wins. They are tried in order of work, so the first that fits
 * needs no rival, and the others are never scheduled. Keeping everything is the least work, since
 * every other policy keeps less and runs more; recomputing everything is the most. A schedule does
 * not depend on the number of rows: each is made once.
 *
 * What provably cannot fit is never built:
 *   - slices, when the results alone exceed the budget: then only the smallest peak is sought, for
 *   the error;
 *   - a policy that holds more between two loops than the budget, or than the best one needs at its
 *     peak;
 *   - any policy, along another axis than the rows, where none can fit: the bound is the answer
 *     (koila__way.is_bound). */
#include "engine/search.h"

#include "engine/live.h"
#include "engine/plan_costs.h"
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
    /* it never fits, for it holds so much; it is not made unless its peak may be the least. 0: not
     * known to */
    uint64_t at_least;
    uint64_t bound; /* its peak is no less; 0: not known */
    bool is_known;  /* what work_of() has found is below */
    double work;
    koila__kept kept;
} candidate;

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

/* Do m slices and n slices have the same rows? With two axes, one may agree and the other not. */
static bool same_rows(const koila_graph *g, int64_t m, int64_t n)
{
    for (uint32_t a = 0; a < g->axes.n; a++)
        if ((g->axes.at[a] + m - 1) / m != (g->axes.at[a] + n - 1) / n)
            return false;
    return true;
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
    koila__rows_for(p->graph, most_slices, rows);
    return koila__live_simulate(p, s, &live, NULL, NULL, NULL).peak_bytes > o->budget_bytes;
}

/* The search over one placement: which policy, in how many slices. */
typedef struct search {
    koila__planning *q;
    koila__scheduler *scheduler;
    candidate candidates[MAX_POLICIES];
    uint32_t n_policies;
    int64_t batch;  /* rows of the main axis */
    bool is_sorted; /* the candidates are sorted by work */
    /* ways are compared by it: along another axis, and with results dropped */
    bool by_time;
    /* the placement and its targets; rows and peak of the taken candidate; at the end also its
     * schedule */
    koila__way found;
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

/* koila__schedule_work() of an untried policy, and what it keeps: found once, for that walks over
 * all loops. */
static double work_of(search *x, candidate *c)
{
    if (!c->is_known) {
        koila__spend(x->q->effort, KOILA_COST_NS_POLICY, x->found.placed->graph->nodes.n);
        c->work = koila__schedule_work(x->scheduler, c->keep);
        c->kept = koila__scheduler_kept(x->scheduler);
        c->is_known = true;
    }
    return c->work;
}

/* Does an untried policy keep what another one does that was tried? Then its schedule is the same.
 */
static bool was_tried(const search *x, const candidate *c)
{
    for (uint32_t k = 0; c->is_known && c->kept.is_sure && k < x->n_policies; k++) {
        const candidate *b = &x->candidates[k];
        if (b->state != UNTRIED && b->is_known && b->kept.is_sure && b->work == c->work &&
            b->kept.choices == c->kept.choices)
            return true;
    }
    return false;
}

/* Makes the schedule of a policy, unless that was tried before. */
static koila_status make_candidate(search *x, candidate *c)
{
    if (c->state != UNTRIED)
        return KOILA_OK;
    if (was_tried(x, c)) {
        c->state = REFUSED;
        return KOILA_OK;
    }
    /* its work is cheaper to find than its instructions */
    if (c->keep.max_instrs && isinf(work_of(x, c))) {
        c->state = REFUSED;
        return KOILA_OK;
    }
    koila__spend(x->q->effort, KOILA_COST_NS_SCHEDULE, x->found.placed->graph->nodes.n);
    const koila_status status =
        koila__schedule_make(x->scheduler, c->keep, &c->schedule, x->q->err);
    c->state = status == KOILA_OK ? CARRIED_OUT : REFUSED;
    return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
}

/* Sorts the policies between the first and the last: least work first. */
static void sort_candidates(search *x)
{
    candidate *c = x->candidates;
    if (x->is_sorted)
        return;
    x->is_sorted = true;
    for (uint32_t i = 1; i + 1 < x->n_policies; i++) {
        const double work = work_of(x, &c[i]);
        const candidate mine = c[i];
        uint32_t k = i;
        for (; k > 1 && c[k - 1].work > work; k--)
            c[k] = c[k - 1];
        c[k] = mine;
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
        koila__rows_as_forced(x->q->graph, x->q->options, x->found.rows);
    else
        koila__rows_for(x->q->graph, n_slices, x->found.rows);
}

/* The peak of a candidate in the rows that are set; exact where it is at most `bound` (0: always).
 */
static uint64_t search_peak(const search *x, const candidate *c, uint64_t bound)
{
    koila__spend(x->q->effort, KOILA_COST_NS_LIVE, x->found.placed->graph->nodes.n);
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
    return koila__is_accepted(x->q, x->found.placed, &c->schedule, x->found.targets, x->found.rows,
                              peak);
}

/* Is an untried candidate known not to fit, before it is made? */
static bool holds_too_much(search *x, candidate *c)
{
    if (c->state != UNTRIED || c->at_least || koila__scheduler_n_loops(x->scheduler) < 2)
        return c->state == UNTRIED && c->at_least;
    if (isinf(work_of(x, c)))
        return false;
    c->bound = c->kept.n_bytes;
    c->at_least = c->bound > x->q->options->budget_bytes ? c->bound : 0;
    return c->at_least;
}

/* Nothing fits, and nothing is scheduled: takes the candidate that seems to need the least. */
static koila_status take_bound(search *x)
{
    const candidate *least = NULL;
    for (uint32_t k = 0; k < x->n_policies; k++) {
        candidate *c = &x->candidates[k];
        if (holds_too_much(x, c) && (!least || c->at_least < least->at_least))
            least = c;
    }
    if (!least)
        return KOILA_UNSUPPORTED;
    set_rows(x, x->batch);
    x->found.is_bound = true;
    x->found.of_calls = least->kept.of_calls;
    x->found.keep = least->keep;
    x->found.peak = least->at_least;
    x->found.schedule = (koila__schedule){ .n_loops = koila__scheduler_n_loops(x->scheduler) };
    return KOILA_OK;
}

/* Takes the first candidate that fits in n_slices slices and is accepted. */
static koila_status take_accepted(search *x, int64_t n_slices, bool *any)
{
    const uint64_t budget = x->q->options->budget_bytes;
    *any = false;
    for (uint32_t k = 0; k < x->n_policies && !*any; k++) {
        candidate *c = &x->candidates[k];
        if (holds_too_much(x, c))
            continue;
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
        first.work = work_of(x, &x->candidates[0]);
        first.kept = x->candidates[0].kept;
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
static bool loses_unmade(search *x, candidate *c)
{
    const double work = work_of(x, c);
    if (isinf(work) || (c->keep.max_work > 0 && work > c->keep.max_work))
        return true;
    return x->taken != KOILA_NONE && c->kept.n_bytes > x->found.peak;
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

/* In the last attempt: makes those that were not made, where their peak may be the least. */
static koila_status try_unmade(search *x, attempt *r)
{
    for (uint32_t k = 0; k < x->n_policies; k++) {
        candidate *c = &x->candidates[k];
        if (c->state != UNTRIED)
            continue;
        if (r->best != KOILA_NONE &&
            (c->at_least > r->least_peak || (c->at_least == r->least_peak && k > r->best)))
            continue;
        KOILA_TRY(make_candidate(x, c));
        if (c->state != CARRIED_OUT)
            continue;
        r->n_carried_out++;
        c->never_fits = true;
        set_rows(x, r->n_slices);
        c->last_peak = search_peak(x, c, r->best == KOILA_NONE ? 0 : r->least_peak);
        if (r->best != KOILA_NONE &&
            (c->last_peak > r->least_peak || (c->last_peak == r->least_peak && k > r->best))) {
            give_up(x, c);
            continue;
        }
        if (r->best != KOILA_NONE && !x->q->options->accepts)
            give_up(x, &x->candidates[r->best]);
        r->least_peak = c->last_peak;
        r->best = k;
    }
    return KOILA_OK;
}

/* Tries every policy; ends with the first that fits and is accepted (found.accepted). */
static koila_status try_slices(search *x, attempt *r)
{
    for (uint32_t k = 0; k < x->n_policies; k++) {
        candidate *c = &x->candidates[k];
        if (k == 1)
            sort_candidates(x);
        if (holds_too_much(x, c)) {
            r->n_carried_out += !r->is_last;
            r->n_hopeless += !r->is_last;
            continue;
        }
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
    return r->is_last && !x->q->is_lazy ? try_unmade(x, r) : KOILA_OK;
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

static double time_of_taken(const search *x)
{
    return koila__way_time(&(koila__way){ .placed = x->found.placed,
                                          .schedule = x->candidates[x->taken].schedule,
                                          .rows = x->found.rows });
}

/* n_slices were taken with a policy that is not of the least work. Those of less work, which need
 * more slices, may take less time all the same. */
static void try_thinner(search *x, int64_t n_slices)
{
    const uint64_t budget = x->q->options->budget_bytes;
    const uint32_t n = x->taken;
    const double time = time_of_taken(x);
    const koila__way was = x->found;
    for (uint32_t k = 0; k < n; k++) {
        const candidate *c = &x->candidates[k];
        if (c->state != CARRIED_OUT || c->never_fits)
            continue;
        set_rows(x, 2 * n_slices < x->batch ? 2 * n_slices : x->batch);
        const uint64_t peak = search_peak(x, c, budget);
        if (peak > budget)
            continue;
        take(x, k, peak);
        if (time_of_taken(x) < time)
            return;
        take(x, n, was.peak);
    }
    set_rows(x, n_slices);
}

/* n_slices are taken, `before` were not. */
static koila_status improve(search *x, int64_t before, int64_t n_slices)
{
    if (x->q->options->accepts)
        return refine(x, before, n_slices);
    if (x->by_time)
        try_thinner(x, n_slices);
    return KOILA_OK;
}

/* Finds the fewest slices that fit, and the best policy for them; when nothing fits, the smallest
 * peak with the most slices. */
static koila_status choose(search *x)
{
    const koila_plan_options *o = x->q->options;
    const bool forced = o->rows > 0;
    if (!forced)
        x->found.results = koila__scheduler_results_bytes(x->scheduler);
    const bool results_fit = x->found.results <= o->budget_bytes;
    if (x->q->is_lazy && !results_fit && koila__scheduler_n_loops(x->scheduler) > 1)
        return take_bound(x);
    if (koila__is_frugal(o) || !results_fit) {
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
            return forced ? KOILA_OK : improve(x, before, n_slices);
        if (x->q->is_lazy && r.n_hopeless == r.n_carried_out && !x->hopeless)
            return take_bound(x);
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

/* No candidate needs less, as far as that is known. */
static uint64_t bound_of_all(const search *x)
{
    uint64_t least = 0;
    for (uint32_t k = 0; k < x->n_policies; k++)
        if (x->candidates[k].bound && (!least || x->candidates[k].bound < least))
            least = x->candidates[k].bound;
    return least ? least : x->found.peak;
}

/* The fewest slices of the placed step, and the best of the policies, for which *s has room; on
 * KOILA_OK s->schedule is yours. s->placed stays the caller's. */
koila_status koila__search_placed(koila__planning *q, const koila__keep *keeps, uint32_t n,
                                  koila__way *s)
{
    search x = { .q = q, .found = *s, .n_policies = n, .by_time = q->seeds || n };
    koila__spend(q->effort, KOILA_COST_NS_LOOPS, s->placed->graph->nodes.n);
    koila_status status = koila__scheduler_new(&x.scheduler, s->placed, s->targets, q->n_targets,
                                               false, q->mem, q->err);
    if (status == KOILA_OK) {
        koila__keep usual[MAX_POLICIES];
        if (!n) {
            x.n_policies = policies(koila__scheduler_n_loops(x.scheduler), q->options->keep, usual);
            keeps = usual;
        }
        x.batch = q->graph->axes.n ? q->graph->axes.at[koila__told_axis(q, s->placed)] : 1;
        for (uint32_t i = 0; i < x.n_policies; i++)
            x.candidates[i].keep = keeps[i];
        status = choose(&x);
        if (status == KOILA_OK && !x.found.is_bound) {
            x.found.schedule = x.candidates[x.taken].schedule;
            x.candidates[x.taken].state = UNTRIED;
        }
        x.found.bound = bound_of_all(&x);
        if (status == KOILA_OK)
            *s = x.found;
    }
    for (uint32_t k = 0; k < MAX_POLICIES; k++)
        if (x.candidates[k].state == CARRIED_OUT)
            koila__schedule_deinit(&x.candidates[k].schedule);
    koila__scheduler_free(x.scheduler);
    return status;
}

/* Places with `how`, then finds the fewest slices and the best policy; *out is yours on KOILA_OK:
 * koila__way_free(). */
koila_status koila__search(koila__planning *q, koila__place_fn how, koila__way *out)
{
    koila__way s = { 0 };
    KOILA_TRY(koila__way_room(q, &s));
    KOILA_TRY(koila__way_place(q, how, s.targets, &s.placed));
    const koila_status status = koila__search_placed(q, NULL, 0, &s);
    if (status == KOILA_OK)
        *out = s;
    else
        koila__placed_free(s.placed);
    return status;
}
