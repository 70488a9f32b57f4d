/* plan.c — the fewest slices that fit. One slice is the recorded order as it is (bit-equal to
 * eager). Otherwise the graph is placed, scheduled under a few keep policies (schedule.h), and
 * simulated for 2, 4, 8, … slices until one fits the budget; of the policies that fit the cheapest
 * in work wins. A policy is only scheduled when it may win: their work is known before, and the
 * cheapest that fits needs no rival. Keeping all is the least work, for what any policy keeps it
 * keeps too, and recomputing everything the most, for it runs what any other runs. All this is done
 * twice where something is gathered: what comes after it may stay whole, or be sliced again (Note
 * [After a gather] in place.c). What cannot fit is not made to see it: the whole step when a count
 * of its bytes (koila__schedule_whole_bytes) is above the budget; slices when the results alone
 * are, which leaves the smallest peak to be told; a policy that holds more between two loops than
 * the best one needs at its peak. A step that cannot be scheduled in slices (thousands of barriers)
 * runs whole, which is always right. Where the sum of live bytes is not the whole truth (a caching
 * allocator) somebody else decides about what fits by its sum: options.accepts. Schedules do not
 * depend on the number of rows, so each is made once. */
#include "koila/plan.h"

#include "engine/live.h"
#include "engine/plan_costs.h"
#include "engine/share.h"
#include "graph/table.h"

#include <math.h>

#define MAX_POLICIES 6

struct koila_plan {
    koila_allocator mem;
    koila__placed *placed;
    koila__schedule schedule;
    koila_plan_info info;
    koila_value *targets;
    uint32_t n_targets;
    int64_t *rows; /* [axes] */
    koila_gather *gathers;
    koila_gather *largest;
    uint32_t n_largest;
    koila_curve_point *curve;
    uint32_t n_curve, n_curve_max;
    koila__arena arena;
};

typedef struct candidate {
    koila__keep keep;
    koila__schedule schedule;
    enum { UNTRIED, CARRIED_OUT, REFUSED } state; /* REFUSED: or lost */
    bool never_fits;
    uint64_t last_peak; /* of the most slices, when it never fits and no other such has less */
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

/* Are slices the same in m as in n? With two axes one may be cut the same and the other not. */
static bool same_rows(const koila_graph *g, int64_t m, int64_t n)
{
    for (uint32_t a = 0; a < g->axes.n; a++)
        if ((g->axes.at[a] + m - 1) / m != (g->axes.at[a] + n - 1) / n)
            return false;
    return true;
}

/* Rows of a slice of every axis as they are asked for. */
static void rows_as_forced(const koila_graph *g, const koila_plan_options *o, int64_t *rows)
{
    for (uint32_t a = 0; a < g->axes.n; a++)
        rows[a] = o->rows < g->axes.at[a] ? o->rows : g->axes.at[a];
}

/* Does no number of slices fit the budget, whatever operators use inside? Fewer rows hold no more
 * when no slice is ragged: what grows with the rows of a slice shrinks, and what the slices before
 * have left is made up of the same rows. */
static bool never_fits(const koila__placed *p, const koila__schedule *s,
                       const koila_plan_options *o, int64_t most_slices, int64_t *rows)
{
    for (uint32_t a = 0; a < p->graph->axes.n; a++)
        if (p->graph->axes.at[a] & (p->graph->axes.at[a] - 1))
            return false;
    const koila__live_options live = { .rows = rows, .bytes_only = true, .limit = o->budget_bytes };
    rows_for(p->graph, most_slices, rows);
    return koila__live_simulate(p, s, &live, NULL, NULL, NULL).peak_bytes > o->budget_bytes;
}

/* The peak; above `limit` (0: none) only that it is above. */
static uint64_t peak_of(const koila__placed *p, const koila__schedule *s,
                        const koila_plan_options *o, const int64_t *rows, uint64_t limit)
{
    const koila__live_options live = {
        .rows = rows, .workspace = o->workspace, .user = o->user, .bytes_only = true, .limit = limit
    };
    return koila__live_simulate(p, s, &live, NULL, NULL, NULL).peak_bytes;
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
    for (uint32_t i = 0; i < n; i++)
        if ((out[i] = p->lowered[targets[i]]) == KOILA_NONE)
            return koila__fail(err, KOILA_BAD_ARGUMENT, 0, "plan: target %u does not exist",
                               targets[i]);
    return KOILA_OK;
}

/* Sums of bytes are taken without a check once this holds: every value is alive at most once whole,
 * once in slices, once kept, and once more as a wider accumulator. */
static bool bytes_add_up(const koila_graph *g)
{
    uint64_t sum = 0, four;
    for (uint32_t v = 0; v < g->values.n; v++) {
        if (g->values.at[v].meta == KOILA_NONE)
            continue;
        const koila_meta_info *m = koila__value_meta(g, v);
        if (!koila__mul(m->n_bytes > m->n_storage_bytes ? m->n_bytes : m->n_storage_bytes, 6,
                        &four) ||
            !koila__add(sum, four, &sum) || sum > INT64_MAX)
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

static bool fill_curve(void *user, uint32_t stage, koila_node node, uint64_t bytes)
{
    koila_plan *p = user;
    koila_assert(p->n_curve < p->n_curve_max);
    p->curve[p->n_curve++] = (koila_curve_point){ stage, node, bytes };
    return true;
}

/* Gathers: what is collected though it has a share in every slice, each value once, by the first
 * that needs it whole. */
static koila_status find_gathers(koila_plan *p)
{
    const koila_graph *g = p->placed->graph;
    uint32_t n_gathers = 0;
    uint8_t *seen = koila__arena_array(&p->arena, g->values.n, 1); /* in this pass */
    if (!seen)
        return KOILA_NO_MEMORY;
    for (int pass = 0; pass < 2; pass++) {
        n_gathers = 0;
        for (uint32_t n = 0; n < g->nodes.n; n++) {
            if (!p->placed->node[n].gathered)
                continue;
            const koila_sig_info *s = koila__node_sig(g, n);
            for (uint32_t i = 0; i < s->n_inputs; i++) {
                const koila_value v = g->inputs.at[g->nodes.at[n].first_input + i];
                const koila_node q = g->values.at[v].node;
                if (q == KOILA_NONE ||
                    p->placed->need[g->nodes.at[n].first_input + i].kind != KOILA_R ||
                    p->placed->value[v].kind != KOILA_S)
                    continue;
                if (seen[v] > pass)
                    continue;
                seen[v] = (uint8_t)(pass + 1);
                if (pass)
                    p->gathers[n_gathers] =
                        (koila_gather){ n, v, koila__value_meta(g, v)->n_bytes };
                n_gathers++;
            }
        }
        if (!pass && !(p->gathers = koila__arena_array(&p->arena, n_gathers, sizeof *p->gathers)))
            return KOILA_NO_MEMORY;
    }
    p->info.n_gathers = n_gathers;
    return KOILA_OK;
}

/* Room for every point of the curve. */
static koila_status make_curve(koila_plan *p)
{
    uint64_t n_points = 0;
    /* at most five slices of a loop are walked: live.c */
    for (uint32_t k = 0; k < p->schedule.n_stages; k++) {
        const koila_stage *st = &p->schedule.stages[k].stage;
        const int64_t n_slices =
            st->is_loop ? koila__n_slices(p->placed->graph->axes.at[st->axis], p->rows[st->axis])
                        : 1;
        uint64_t n_runs = 0;
        for (uint32_t i = 0; i < st->n_instrs; i++)
            n_runs += st->instrs[i].kind == KOILA_DO_RUN;
        n_points += n_runs * (uint64_t)(n_slices < 5 ? n_slices : 5);
    }
    if (n_points >= UINT32_MAX ||
        !(p->curve = koila__arena_room(&p->arena, n_points * sizeof *p->curve)))
        return KOILA_NO_MEMORY;
    p->n_curve_max = (uint32_t)n_points;
    return KOILA_OK;
}

/* Facts for people; of a plan that does not fit, and nobody gets, only what the error tells. */
static koila_status describe(koila_plan *p, const koila_plan_options *o)
{
    enum { N_LARGEST = 32 };
    koila_value values[N_LARGEST];
    uint64_t bytes[N_LARGEST];
    const uint64_t peak = peak_of(p->placed, &p->schedule, o, p->rows, 0);
    const bool fits = peak <= o->budget_bytes;
    koila__live_top top = {
        .at_bytes = peak, .mem = &p->mem, .cap = N_LARGEST, .value = values, .bytes = bytes
    };
    const koila__live_options live = { .rows = p->rows,
                                       .workspace = o->workspace,
                                       .user = o->user,
                                       .top = &top,
                                       .limit = fits ? 0 : peak - 1 };
    uint64_t *peaks = koila__arena_array(&p->arena, p->schedule.n_stages, sizeof *peaks);
    if (!peaks)
        return KOILA_NO_MEMORY;
    if (fits) {
        KOILA_TRY(find_gathers(p));
        KOILA_TRY(make_curve(p));
    }
    const koila__live result =
        koila__live_simulate(p->placed, &p->schedule, &live, peaks, fits ? fill_curve : NULL, p);
    koila_assert(result.peak_bytes == peak);
    for (uint32_t k = 0; k < p->schedule.n_stages; k++)
        p->schedule.stages[k].stage.peak_bytes = peaks[k];
    p->info.peak_bytes = result.peak_bytes;
    p->info.peak_node = result.peak_node;
    p->n_largest = top.n;
    if (!(p->largest = koila__arena_array(&p->arena, p->n_largest, sizeof *p->largest)))
        return KOILA_NO_MEMORY;
    for (uint32_t i = 0; i < p->n_largest; i++)
        p->largest[i] =
            (koila_gather){ p->placed->graph->values.at[values[i]].node, values[i], bytes[i] };
    return KOILA_OK;
}

/* "234.6 KiB" */
static const char *size_text(char out[32], uint64_t bytes)
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    double n = (double)bytes;
    uint32_t u = 0;
    for (; n >= 1024 && u < 4; u++)
        n /= 1024;
    snprintf(out, 32, u ? "%.1f %s" : "%.0f %s", n, units[u]);
    return out;
}

/* Names the largest values, each as "f32[64, 128] 32.0 KiB aten::mm train.py:12" while there is
 * room. */
static void word_no_fit(koila_error *err, const koila_plan *p, const koila_graph *recorded,
                        uint64_t budget)
{
    char largest[150] = "", needs[32], there[32], bytes[32];
    size_t used = 0;
    for (uint32_t i = 0; i < p->n_largest && i < 3; i++) {
        const koila_graph *g = p->placed->graph;
        const koila_node n = p->largest[i].node;
        const koila_meta_info *m = koila__value_meta(g, p->largest[i].value);
        char one[160], shape[64] = "";
        size_t at = 0;
        for (uint32_t d = 0; d < m->n_dims && at < sizeof shape; d++)
            at += (size_t)snprintf(shape + at, sizeof shape - at, "%s%lld", d ? ", " : "",
                                   (long long)m->size[d]);
        const uint32_t line =
            n == KOILA_NONE ? KOILA_NONE : koila_node_get(recorded, koila_plan_recorded(p, n)).line;
        const char *file = line == KOILA_NONE ? "" : koila_graph_line_file(recorded, line);
        const char *slash = strrchr(file, '/');
        int k = snprintf(one, sizeof one, "%s%s[%s] %s %s", i ? ", " : "",
                         koila_dtype_text(m->dtype), shape, size_text(bytes, p->largest[i].bytes),
                         n == KOILA_NONE ? "input"
                                         : koila_op_name(g->table, koila__node_sig(g, n)->op));
        if (k > 0 && (size_t)k < sizeof one && line != KOILA_NONE)
            k += snprintf(one + k, sizeof one - (size_t)k, " %s:%u", slash ? slash + 1 : file,
                          koila_graph_line_number(recorded, line));
        if (k < 0 || used + (size_t)k >= sizeof largest)
            break;
        memcpy(largest + used, one, (size_t)k + 1);
        used += (size_t)k;
    }
    const uint64_t missing = p->info.peak_bytes - budget;
    koila__fail_short(err, missing,
                      "a slice of %lld row(s) needs %s, %s are free, %llu bytes short; largest: %s",
                      (long long)p->info.rows, size_text(needs, p->info.peak_bytes),
                      size_text(there, budget), (unsigned long long)missing, largest);
}

/* What the parts of koila_plan_new() share. */
typedef struct planning {
    const koila_graph *graph;
    const koila_value *targets;
    uint32_t n_targets;
    const koila_plan_options *options;
    const koila_allocator *mem;
    koila_error *err;
    koila_plan *plan;
    int64_t largest_axis;
    bool is_empty;   /* an axis has no rows: nothing to slice */
    bool whole_fits; /* in one slice, by its sum */
} planning;

typedef koila_status (*place_fn)(const koila_graph *, const koila_value *, uint32_t,
                                 const koila_allocator *, koila__placed **, koila_error *);

static koila_status place(planning *q, place_fn how, koila_value *targets, koila__placed **out)
{
    koila__placed *placed = NULL;
    KOILA_TRY(how(q->graph, q->targets, q->n_targets, q->mem, &placed, q->err));
    koila_check(koila__placed_check(placed, NULL));
    koila_status status = map_targets(placed, q->targets, q->n_targets, targets, q->err);
    if (status == KOILA_OK && !bytes_add_up(placed->graph))
        status = koila__fail(q->err, KOILA_UNSUPPORTED, 0,
                             "plan: the sizes of all values do not add up to a number of bytes");
    if (status == KOILA_OK)
        *out = placed;
    else
        koila__placed_free(placed);
    return status;
}

static void set_slices(koila_plan *p, int64_t batch, int64_t rows)
{
    p->info.batch = batch;
    p->info.rows = rows;
    p->info.n_slices = koila__n_slices(batch, rows);
}

/* Is there no limit but forced rows? Then little memory is what was asked for; with a limit, little
 * work. */
static bool is_frugal(const koila_plan_options *o)
{
    return o->rows > 0 && o->budget_bytes == UINT64_MAX;
}

/* Is what fits by its sum taken? */
static bool accepted(const planning *q, koila__placed *placed, const koila__schedule *schedule,
                     koila_value *targets, int64_t *rows, uint64_t peak_bytes)
{
    if (!q->options->accepts || is_frugal(q->options))
        return true;
    koila_plan view = *q->plan;
    const uint16_t axis = main_axis(placed);
    view.placed = placed;
    view.schedule = *schedule;
    view.targets = targets;
    view.rows = rows;
    view.info.peak_bytes = peak_bytes;
    view.info.n_stages = schedule->n_stages;
    view.info.n_loops = schedule->n_loops;
    set_slices(&view, q->graph->axes.n ? q->graph->axes.at[axis] : 1,
               q->graph->axes.n ? rows[axis] : 1);
    return q->options->accepts(q->options->accepts_user, &view);
}

/* As it was recorded, in one slice. *fits: within the budget, and accepted. */
static koila_status plan_whole(planning *q, bool *fits)
{
    koila_plan *p = q->plan;
    KOILA_TRY(place(q, koila__place_whole, p->targets, &p->placed));
    KOILA_TRY(koila__schedule_init(&p->schedule, p->placed, p->targets, q->n_targets,
                                   (koila__keep){ .horizon = UINT32_MAX }, q->mem, q->err));
    rows_for(q->graph, 1, p->rows);
    const uint64_t peak =
        peak_of(p->placed, &p->schedule, q->options, p->rows, q->options->budget_bytes);
    q->whole_fits = peak <= q->options->budget_bytes;
    *fits = q->whole_fits && accepted(q, p->placed, &p->schedule, p->targets, p->rows, peak);
    p->info.batch = p->info.rows = q->largest_axis;
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

static void sliced_free(sliced *s)
{
    if (!s->placed)
        return;
    koila__schedule_deinit(&s->schedule);
    koila__placed_free(s->placed);
}

/* The search for a way over one placement: which policy, in how many slices. */
typedef struct search {
    planning *q;
    koila__scheduler *scheduler;
    candidate candidates[MAX_POLICIES];
    uint32_t n_policies;
    int64_t batch;  /* the main axis */
    bool is_sorted; /* the candidates are, by work */
    /* the placement and its targets, and of the candidate that is taken the rows and the peak; its
     * schedule at the end */
    sliced found;
    uint32_t taken; /* that candidate */
    /* of those that never fit the one that needs least: the others are given up at once */
    candidate *hopeless;
    struct { /* where a candidate last fitted by its sum, and was not accepted */
        int64_t n_slices;
        uint64_t peak;
        uint32_t k;
    } refused;
} search;

/* Carries a policy out, unless that was tried before. */
static koila_status make_candidate(search *x, candidate *c)
{
    if (c->state != UNTRIED)
        return KOILA_OK;
    /* seen before a long list is written */
    if (c->keep.max_instrs && isinf(koila__schedule_work(x->scheduler, c->keep))) {
        c->state = REFUSED;
        return KOILA_OK;
    }
    const koila_status status =
        koila__schedule_make(x->scheduler, c->keep, &c->schedule, x->q->err);
    c->state = status == KOILA_OK ? CARRIED_OUT : REFUSED;
    return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
}

/* The policies between the first and the last: least work first. */
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

/* Of a candidate in the rows that are set; exact where it is at most `bound`. */
static uint64_t search_peak(const search *x, const candidate *c, uint64_t bound)
{
    return peak_of(x->found.placed, &c->schedule, x->q->options, x->found.rows, bound);
}

/* Candidate k is taken, with that peak in the rows that are set. */
static void take(search *x, uint32_t k, uint64_t peak)
{
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

/* `low` slices were refused, `high` taken: bisection, then the two next numbers below its answer,
 * for fitting is not monotone. Leaves the rows at the fewest taken, and the peak at theirs: a
 * number that was not asked about has the rows of one that was, of every axis. */
static koila_status refine(search *x, int64_t low, int64_t high)
{
    bool any;
    while (high - low > 1) {
        const int64_t n = low + (high - low) / 2;
        if (same_rows(x->q->graph, n, high))
            high = n;
        else if (same_rows(x->q->graph, n, low))
            low = n;
        else {
            KOILA_TRY(take_accepted(x, n, &any));
            if (any)
                high = n;
            else
                low = n;
        }
    }
    for (int64_t n = high - 1, tries = 0; n > 2 && tries < 2; n--) {
        if (same_rows(x->q->graph, n - 1, n))
            continue;
        tries++;
        KOILA_TRY(take_accepted(x, n - 1, &any));
        if (any)
            high = n - 1;
    }
    set_rows(x, high);
    return KOILA_OK;
}

/* In the rows that are set: the smallest peak, of equals the first policy's. `moderate`: of those
 * that do not cost much more than the first. What keeps all comes last when its work is known
 * without its schedule: what it keeps alone is often too much. */
static koila_status take_least(search *x, bool moderate)
{
    double least_work = 0;
    koila__kept kept = { 0 };
    x->taken = KOILA_NONE;
    if (x->n_policies > 1 && koila__scheduler_n_loops(x->scheduler) > 1) {
        least_work = koila__schedule_work(x->scheduler, x->candidates[0].keep);
        kept = koila__scheduler_kept(x->scheduler);
    }
    if (!kept.any)
        x->n_policies = 1; /* all policies are one */
    const bool is_known = x->n_policies > 1 && kept.is_sure && !isinf(least_work);
    if (!is_known)
        least_work = 0;
    for (uint32_t i = 0; i < x->n_policies; i++) {
        const uint32_t k = is_known ? (i + 1) % x->n_policies : i;
        const bool any = x->taken != KOILA_NONE;
        candidate *c = &x->candidates[k];
        if (is_known && k == 0 && any && kept.n_bytes > x->found.peak)
            break;
        /* more is not wanted */
        if (moderate && k > 0 && least_work > 0)
            c->keep.max_work = KOILA_COST_MODERATE * least_work;
        if (k > 0 && (any || k + 1 == x->n_policies)) { /* seen before a long list is written */
            const double work = koila__schedule_work(x->scheduler, c->keep);
            if (isinf(work) || (c->keep.max_work > 0 && work > c->keep.max_work))
                continue;
            if (any && koila__scheduler_kept(x->scheduler).n_bytes > x->found.peak)
                continue;
        }
        KOILA_TRY(make_candidate(x, c));
        if (c->state != CARRIED_OUT)
            continue;
        if (!(least_work > 0))
            least_work = c->schedule.work;
        const uint64_t peak = search_peak(x, c, any ? x->found.peak : 0);
        if (any && !(peak < x->found.peak || (k == 0 && peak == x->found.peak))) {
            give_up(x, c);
            continue;
        }
        if (any)
            give_up(x, &x->candidates[x->taken]);
        take(x, k, peak);
    }
    return x->taken == KOILA_NONE ? KOILA_UNSUPPORTED : KOILA_OK;
}

/* What came of trying every policy in one number of slices. */
typedef struct attempt {
    int64_t n_slices;
    bool is_last;                       /* there are no more slices to be had */
    uint32_t n_carried_out, n_hopeless; /* n_hopeless of them fit in no number of slices */
    /* the candidate with the smallest peak, which is exact in the last attempt only; KOILA_NONE:
     * none */
    uint32_t best;
    uint64_t least_peak;
} attempt;

/* Sees whether a new candidate fits in no number of slices. Of those the one that needs least
 * stays, for the peak that is told. Changes the rows. */
static bool is_hopeless(search *x, candidate *c)
{
    if (!never_fits(x->found.placed, &c->schedule, x->q->options, x->batch, x->found.rows))
        return false;
    c->never_fits = true;
    c->last_peak = search_peak(x, c, x->hopeless ? x->hopeless->last_peak : 0);
    if (x->hopeless && c->last_peak >= x->hopeless->last_peak)
        give_up(x, c);
    else {
        if (x->hopeless)
            give_up(x, x->hopeless);
        x->hopeless = c;
    }
    return true;
}

/* Ends with the first candidate that fits and is accepted: then it is taken, and found.accepted. */
static koila_status try_slices(search *x, attempt *r)
{
    const koila_plan_options *o = x->q->options;
    for (uint32_t k = 0; k < x->n_policies; k++) {
        candidate *c = &x->candidates[k];
        if (k == 1)
            sort_candidates(x);
        const bool is_new = c->state == UNTRIED;
        KOILA_TRY(make_candidate(x, c));
        if (c->state != CARRIED_OUT)
            continue;
        /* nothing is worth keeping: all policies are one */
        if (k == 0 && c->schedule.n_keeps == 0)
            x->n_policies = 1;
        r->n_carried_out++;
        if (c->never_fits && !r->is_last) {
            r->n_hopeless++;
            continue;
        }
        set_rows(x, r->n_slices);
        const uint64_t bound = !r->is_last             ? o->budget_bytes
                               : r->best == KOILA_NONE ? 0
                                                       : r->least_peak;
        const uint64_t peak = c->never_fits ? c->last_peak : search_peak(x, c, bound);
        uint32_t lost = k;
        if (r->best == KOILA_NONE || peak < r->least_peak) {
            lost = r->best;
            r->least_peak = peak;
            r->best = k;
        }
        if (peak <= o->budget_bytes) {
            take(x, k, peak);
            if ((x->found.accepted = is_accepted(x, c, peak)))
                return KOILA_OK;
            x->refused.n_slices = r->n_slices;
            x->refused.peak = peak;
            x->refused.k = k;
        }
        if (r->is_last && lost != KOILA_NONE && !o->accepts)
            give_up(x, &x->candidates[lost]);
        if (!r->is_last && is_new && is_hopeless(x, c))
            r->n_hopeless++;
    }
    return KOILA_OK;
}

/* The fewest slices that fit, and of the policies that fit then the best; when nothing does, the
 * smallest peak of the most slices. */
static koila_status choose(search *x)
{
    const koila_plan_options *o = x->q->options;
    const bool forced = o->rows > 0;
    /* nothing will fit: only the peak is left to be told */
    if (is_frugal(o) ||
        (!forced && koila__scheduler_results_bytes(x->scheduler) > o->budget_bytes)) {
        set_rows(x, x->batch > 2 ? x->batch : 2);
        return take_least(x, forced);
    }
    for (int64_t n_slices = 2, before = 1;;
         before = n_slices, n_slices = n_slices < x->batch / 2 ? n_slices * 2 : x->batch) {
        attempt r = { .n_slices = n_slices,
                      .is_last = forced || n_slices >= x->batch,
                      .best = KOILA_NONE };
        KOILA_TRY(try_slices(x, &r));
        if (x->found.accepted)
            return o->accepts && !forced ? refine(x, before, n_slices) : KOILA_OK;
        if (!r.n_carried_out)
            return KOILA_UNSUPPORTED;
        /* what fits by its sum and was refused is better than what does not fit at all */
        if (r.is_last && x->refused.n_slices && r.least_peak > o->budget_bytes) {
            set_rows(x, x->refused.n_slices);
            take(x, x->refused.k, x->refused.peak);
            return KOILA_OK;
        }
        if (r.is_last) {
            take(x, r.best, r.least_peak);
            return KOILA_OK; /* when it does not fit the caller learns by the peak */
        }
        /* the last try, for the peak that is told */
        if (r.n_hopeless == r.n_carried_out)
            n_slices = x->batch;
    }
}

/* Placed in that way, the fewest slices under the best policy; *out is yours on KOILA_OK:
 * sliced_free(). */
static koila_status slice(planning *q, place_fn how, sliced *out)
{
    search x = { .q = q };
    sliced *s = &x.found;
    s->targets = koila__arena_array(&q->plan->arena, q->n_targets, sizeof *s->targets);
    s->rows = koila__arena_array(&q->plan->arena, (size_t)q->graph->axes.n + 1, sizeof *s->rows);
    if (!s->targets || !s->rows)
        return KOILA_NO_MEMORY;
    KOILA_TRY(place(q, how, s->targets, &s->placed));
    koila_status status = koila__scheduler_new(&x.scheduler, s->placed, s->targets, q->n_targets,
                                               false, q->mem, q->err);
    if (status == KOILA_OK) {
        koila__keep keeps[MAX_POLICIES];
        x.n_policies = policies(koila__scheduler_n_loops(x.scheduler), q->options->keep, keeps);
        x.batch = q->graph->axes.n ? q->graph->axes.at[main_axis(s->placed)] : 1;
        for (uint32_t i = 0; i < x.n_policies; i++)
            x.candidates[i].keep = keeps[i];
        status = choose(&x);
        if (status == KOILA_OK) {
            s->schedule = x.candidates[x.taken].schedule;
            x.candidates[x.taken].state = UNTRIED;
            *out = *s;
        }
    }
    for (uint32_t k = 0; k < MAX_POLICIES; k++)
        if (x.candidates[k].state == CARRIED_OUT)
            koila__schedule_deinit(&x.candidates[k].schedule);
    koila__scheduler_free(x.scheduler);
    if (status != KOILA_OK)
        koila__placed_free(s->placed);
    return status;
}

/* Is b the better way? Fewer slices if they fit, then less work; where memory is what counts, the
 * smaller peak, for moderately more work. */
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

/* In slices; where something is gathered, also with what was gathered sliced again. On
 * KOILA_UNSUPPORTED nothing of the plan has changed. */
static koila_status plan_sliced(planning *q)
{
    koila_plan *p = q->plan;
    sliced best = { 0 }, again = { 0 };
    koila_status status = slice(q, koila__place, &best);
    if (status != KOILA_OK)
        return status;
    const bool fewest = best.peak <= q->options->budget_bytes && q->options->rows <= 0 &&
                        q->largest_axis <= 2 * best.rows[main_axis(best.placed)];
    if (!fewest && gathers(best.placed)) {
        status = slice(q, koila__place_cut, &again);
        if (status == KOILA_OK && is_better(q, &again, &best)) {
            const sliced swap = best;
            best = again;
            again = swap;
        }
        sliced_free(&again);
        if (status != KOILA_OK && status != KOILA_UNSUPPORTED) {
            sliced_free(&best);
            return status;
        }
    }
    if (q->whole_fits && best.peak > q->options->budget_bytes) {
        sliced_free(&best);
        return KOILA_UNSUPPORTED; /* whole it was only not accepted */
    }
    koila__placed_free(p->placed);
    koila__schedule_deinit(&p->schedule);
    p->placed = best.placed;
    p->schedule = best.schedule;
    p->targets = best.targets;
    p->rows = best.rows;
    const uint16_t axis = main_axis(p->placed);
    set_slices(p, q->graph->axes.n ? q->graph->axes.at[axis] : 1,
               q->graph->axes.n ? p->rows[axis] : 1);
    return KOILA_OK;
}

static koila_status make_plan(planning *q)
{
    koila_plan *p = q->plan;
    const koila_plan_options *o = q->options;
    const koila_allocator *mem = q->mem;
    koila__arena_init(&p->arena, mem);
    p->targets = koila__arena_array(&p->arena, q->n_targets, sizeof *p->targets);
    p->rows = koila__arena_array(&p->arena, (size_t)q->graph->axes.n + 1, sizeof *p->rows);
    if (!p->targets || !p->rows)
        return KOILA_NO_MEMORY;
    p->n_targets = q->n_targets;
    for (uint32_t i = 0; i < q->n_targets; i++)
        if (q->targets[i] >= q->graph->values.n ||
            q->graph->values.at[q->targets[i]].meta == KOILA_NONE)
            return koila__fail(q->err, KOILA_BAD_ARGUMENT, 0,
                               "plan: target %u is no value of the graph", q->targets[i]);
    q->largest_axis = 1;
    for (uint32_t i = 0; i < q->graph->axes.n; i++) {
        if (q->graph->axes.at[i] > q->largest_axis)
            q->largest_axis = q->graph->axes.at[i];
        q->is_empty |= q->graph->axes.at[i] == 0;
    }
    const bool one_slice = q->is_empty || q->largest_axis <= 1 || o->rows >= q->largest_axis;
    bool fits = false;
    uint64_t whole_bytes = 0;
    if (o->rows <= 0 && !one_slice && o->budget_bytes < UINT64_MAX)
        KOILA_TRY(
            koila__schedule_whole_bytes(q->graph, q->targets, q->n_targets, mem, &whole_bytes));
    /* else it is not even tried */
    if (one_slice || (o->rows <= 0 && whole_bytes <= o->budget_bytes))
        KOILA_TRY(plan_whole(q, &fits));
    if (!fits && !one_slice) {
        koila_status status = plan_sliced(q);
        /* whole was not tried; it is right too */
        if (status == KOILA_UNSUPPORTED && !p->placed)
            status = plan_whole(q, &fits);
        else if (status == KOILA_UNSUPPORTED)
            status = KOILA_OK;
        KOILA_TRY(status);
    }
    p->info.struct_size = sizeof p->info;
    p->info.budget_bytes = o->budget_bytes;
    p->info.n_stages = p->schedule.n_stages;
    p->info.n_loops = p->schedule.n_loops;
    p->info.n_recorded = p->schedule.n_needed;
    p->info.replay_ratio =
        p->schedule.work_recorded > 0 ? p->schedule.work / p->schedule.work_recorded : 1;
    KOILA_TRY(describe(p, o));
    koila_check(koila_plan_check(p, NULL));
    if (p->info.peak_bytes <= o->budget_bytes)
        return KOILA_OK;
    word_no_fit(q->err, p, q->graph, o->budget_bytes);
    return KOILA_OOM;
}

koila_status koila_plan_new(const koila_graph *graph, const koila_value *targets,
                            uint32_t n_targets, const koila_plan_options *options,
                            const koila_allocator *mem, koila_plan **out, koila_error *err)
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
                       .plan = p };
        status = make_plan(&q);
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

void koila_plan_free(koila_plan *p)
{
    if (!p)
        return;
    const koila_allocator mem = p->mem;
    koila__schedule_deinit(&p->schedule);
    koila__placed_free(p->placed);
    koila__arena_deinit(&p->arena);
    koila__release(&mem, p, sizeof *p);
}

koila_plan_info koila_plan_get(const koila_plan *p) { return p->info; }
const koila_graph *koila_plan_graph(const koila_plan *p) { return p->placed->graph; }
const koila_stage *koila_plan_stage(const koila_plan *p, uint32_t stage)
{
    return &p->schedule.stages[stage].stage;
}
koila_value koila_plan_target(const koila_plan *p, uint32_t target) { return p->targets[target]; }
koila_value koila_plan_leaf(const koila_plan *p, koila_value recorded)
{
    return p->placed->lowered[recorded];
}
koila_node koila_plan_recorded(const koila_plan *p, koila_node lowered)
{
    return p->placed->node[lowered].recorded;
}
bool koila_plan_in_loop(const koila_plan *p, koila_node n) { return p->placed->node[n].in_loop; }
int64_t koila_plan_axis_rows(const koila_plan *p, uint16_t axis) { return p->rows[axis]; }
uint32_t koila_plan_slices(const koila_plan *p, uint16_t axis)
{
    return koila__n_slices(p->placed->graph->axes.at[axis], p->rows[axis]);
}
koila_gather koila_plan_gather(const koila_plan *p, uint32_t i) { return p->gathers[i]; }
uint64_t koila_plan_value_bytes(const koila_plan *p, koila_value v, int64_t rows)
{
    return koila__live_bytes(p->placed, v, rows);
}

koila_share koila_plan_share(const koila_plan *p, koila_value v)
{
    return koila__share_of(p->placed->value[v]);
}
koila_share koila_plan_need(const koila_plan *p, koila_node n, uint32_t input)
{
    return koila__share_of(p->placed->need[p->placed->graph->nodes.at[n].first_input + input]);
}

uint32_t koila_plan_curve(const koila_plan *p, koila_curve_point *out, uint32_t cap)
{
    if (p->n_curve <= cap) {
        if (p->n_curve)
            memcpy(out, p->curve, p->n_curve * sizeof *out);
        return p->n_curve;
    }
    /* of each run of points the highest, so the peak survives */
    for (uint32_t i = 0; i < cap; i++) {
        const uint64_t begin = (uint64_t)i * p->n_curve / cap;
        const uint64_t end = (uint64_t)(i + 1) * p->n_curve / cap;
        out[i] = p->curve[begin];
        for (uint64_t k = begin; k < end; k++)
            if (p->curve[k].bytes > out[i].bytes)
                out[i] = p->curve[k];
    }
    return cap;
}

uint32_t koila_plan_largest(const koila_plan *p, koila_gather *out, uint32_t cap)
{
    const uint32_t n = p->n_largest < cap ? p->n_largest : cap;
    if (n)
        memcpy(out, p->largest, n * sizeof *out);
    return n;
}

/* ---- adapting a call to its slice */

static void slice_sizes(const koila_meta_info *m, koila_placement x, int64_t rows, int64_t *size)
{
    for (uint32_t d = 0; d < m->n_dims; d++)
        size[d] = m->size[d];
    if (x.kind == KOILA_S)
        size[x.dim] = koila__extent(x, rows);
}

uint32_t koila_plan_adapt(const koila_plan *p, koila_node n, int32_t link, int64_t rows,
                          koila_adapt *out)
{
    const koila_graph *g = p->placed->graph;
    const koila_table *t = g->table;
    const koila__placed_node *pn = &p->placed->node[n];
    const koila_sig_info *s = koila__node_sig(g, n);
    const koila__fix *fix = pn->fix;
    if (link >= 0) {
        if (!pn->link)
            return 0;
        fix = pn->link[link].fix;
        int32_t at = link;
        for (uint32_t w = 0; w < s->n_writes; w++) {
            if (at < (int32_t)s->writes[w].n_links) {
                s = koila__sig(t, s->writes[w].links[at].sig);
                break;
            }
            at -= (int32_t)s->writes[w].n_links;
        }
    }
    uint32_t n_out = 0;
    for (uint32_t k = 0; k < KOILA__MAX_FIXES && fix[k].kind != KOILA__FIX_NONE; k++) {
        koila_adapt *a = &out[n_out++];
        *a = (koila_adapt){ .arg = fix[k].arg, .output = fix[k].output };
        const bool of_input = fix[k].output >= KOILA__FIX_OF_INPUT;
        const uint32_t which =
            of_input ? fix[k].output - (uint32_t)KOILA__FIX_OF_INPUT : fix[k].output;
        koila_placement x = { 0 };
        const koila_meta_info *m;
        if (link >= 0) {
            x = pn->link[link].out;
            m = koila__meta(t, s->outputs[which < s->n_outputs ? which : 0]);
        } else if (of_input) {
            x = p->placed->need[g->nodes.at[n].first_input + which];
            m = koila__meta(t, s->inputs[which]);
        } else {
            x = p->placed->value[g->nodes.at[n].first_output + which];
            m = s->outputs[which] != KOILA_NONE ? koila__meta(t, s->outputs[which]) : NULL;
        }
        int64_t size[KOILA_MAX_DIMS];
        switch ((koila__fix_kind)fix[k].kind) {
        case KOILA__FIX_SIZES: {
            const koila_arg *list = &s->tokens[s->start[fix[k].arg]];
            a->kind = KOILA_ADAPT_INTS;
            a->n = list->n;
            for (uint32_t i = 0; i < list->n && i < KOILA_MAX_DIMS; i++)
                a->ints[i] = list[1 + i].u.i;
            if (x.kind == KOILA_S && x.dim < list->n && a->ints[x.dim] != -1)
                a->ints[x.dim] = koila__extent(x, rows);
            break;
        }
        case KOILA__FIX_STRIDES:
            a->kind = KOILA_ADAPT_INTS;
            a->n = m->n_dims;
            slice_sizes(m, x, rows, size);
            koila_dense_strides(m, size, a->ints);
            break;
        case KOILA__FIX_EXTENT:
            a->kind = KOILA_ADAPT_INT;
            a->n = 1;
            a->ints[0] = koila__extent(x, rows);
            break;
        case KOILA__FIX_ROWS: {
            const koila_arg *first = &s->tokens[s->start[fix[k].arg]];
            const bool is_list = first->kind == KOILA_ARG_LIST;
            const int64_t batch = p->placed->graph->axes.at[pn->axis];
            a->kind = is_list ? KOILA_ADAPT_INTS : KOILA_ADAPT_INT;
            a->n = is_list ? first->n : 1;
            for (uint32_t i = 0; i < a->n && i < KOILA_MAX_DIMS; i++)
                a->ints[i] = batch ? first[is_list + i].u.i / batch * rows : 0;
            break;
        }
        case KOILA__FIX_SCALE:
            a->kind = KOILA_ADAPT_SCALE;
            break;
        case KOILA__FIX_ALIAS:
            a->kind = KOILA_ADAPT_ALIAS;
            break;
        case KOILA__FIX_DIMS: {
            a->kind = KOILA_ADAPT_SQUEEZE;
            const koila_meta_info *in = koila__meta(t, s->inputs[0]);
            const koila_arg *named = s->n_pos > 1 ? &s->tokens[s->start[1]] : NULL;
            const uint32_t n_named = !named                          ? in->n_dims
                                     : named->kind == KOILA_ARG_LIST ? named->n
                                                                     : 1;
            for (uint32_t i = 0; i < n_named; i++) {
                int64_t d = !named                          ? i
                            : named->kind == KOILA_ARG_LIST ? named[1 + i].u.i
                                                            : named->u.i;
                if (d < 0)
                    d += in->n_dims;
                if (d >= 0 && d < in->n_dims && in->size[d] == 1 && a->n < KOILA_MAX_DIMS)
                    a->ints[a->n++] = d;
            }
            break;
        }
        default:
            n_out--;
            break;
        }
    }
    return n_out;
}

/* ---- the invariants: replay the instructions with flags instead of tensors */

/* WHOLE, LOCAL, KEPT: there is such a tensor of v now; MADE: it is being collected and is whole
 * when the loop ends. */
enum { WHOLE = 1, LOCAL = 2, KEPT = 4, MADE = 8 };

/* Follows one stage. n_local: local values there are; n_kept: pieces. */
static bool check_stage(const koila_plan *p, uint32_t k, uint8_t *flags, uint32_t *n_kept,
                        koila_error *err)
{
    const koila_graph *g = p->placed->graph;
    const koila_stage *st = &p->schedule.stages[k].stage;
    const uint8_t mine = st->is_loop ? LOCAL : WHOLE;
    uint32_t n_local = 0;
#define HOLDS(e, ...)                                                                              \
    do {                                                                                           \
        if (!(e))                                                                                  \
            return koila__fail(err, KOILA_BAD_INPUT, k, __VA_ARGS__), false;                       \
    } while (0)
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr in = st->instrs[i];
        const uint32_t v = in.id;
        switch ((koila_instr_kind)in.kind) {
        case KOILA_DO_RUN: {
            const koila_sig_info *s = koila__node_sig(g, in.id);
            const koila_node_info *n = &g->nodes.at[in.id];
            for (uint32_t u = 0; u < s->n_inputs; u++) {
                const koila_value x = g->inputs.at[n->first_input + u];
                bool is_read = true;
                for (uint32_t w = 0; w < s->n_writes; w++)
                    is_read &= s->writes[w].input != u || !s->writes[w].overwrites;
                const bool whole =
                    !st->is_loop || p->placed->need[n->first_input + u].kind == KOILA_R;
                HOLDS(!is_read || flags[x] & (whole ? WHOLE | LOCAL : LOCAL),
                      "node %u (%s): input %u is not there", in.id, koila_op_name(g->table, s->op),
                      u);
            }
            for (uint32_t o = 0; o < s->n_outputs; o++) {
                if (s->outputs[o] == KOILA_NONE)
                    continue;
                HOLDS(!(flags[n->first_output + o] & mine),
                      "node %u (%s): result %u is there already", in.id,
                      koila_op_name(g->table, s->op), o);
                flags[n->first_output + o] |= mine;
                n_local++;
            }
            break;
        }
        case KOILA_DO_SLICE:
            HOLDS(st->is_loop && flags[v] & WHOLE && !(flags[v] & LOCAL),
                  "value %u is sliced before it is whole, or twice", v);
            flags[v] |= LOCAL;
            n_local++;
            break;
        case KOILA_DO_FETCH:
            HOLDS(st->is_loop && flags[v] & KEPT && !(flags[v] & LOCAL),
                  "value %u is fetched but not kept, or twice", v);
            flags[v] |= LOCAL;
            n_local++;
            break;
        case KOILA_DO_KEEP:
            HOLDS(st->is_loop && flags[v] & LOCAL && !(flags[v] & KEPT),
                  "value %u is kept before it is made, or twice", v);
            flags[v] |= KEPT;
            ++*n_kept;
            break;
        case KOILA_DO_ADD:
        case KOILA_DO_PUT:
            HOLDS(st->is_loop && flags[v] & LOCAL && !(flags[v] & (WHOLE | MADE)),
                  "value %u is collected before it is made, or twice", v);
            flags[v] |= MADE;
            break;
        case KOILA_DO_FREE:
            HOLDS(flags[v] & mine && g->values.at[v].meta != KOILA_NONE,
                  "value %u is freed but not there", v);
            HOLDS(st->is_loop || g->values.at[v].node != KOILA_NONE,
                  "value %u is freed but is not ours", v);
            flags[v] &= (uint8_t)~mine;
            n_local--;
            break;
        }
    }
    HOLDS(!st->is_loop || n_local == 0, "%u values outlive their slice", n_local);
    for (uint32_t i = 0; i < st->n_instrs && st->is_loop; i++) {
        const uint32_t v = st->instrs[i].id;
        if (st->instrs[i].kind == KOILA_DO_ADD || st->instrs[i].kind == KOILA_DO_PUT)
            flags[v] = (uint8_t)((flags[v] & ~MADE) | WHOLE);
        if (st->instrs[i].kind != KOILA_DO_FETCH || !(st->instrs[i].flags & KOILA_INSTR_LAST))
            continue;
        HOLDS(flags[v] & KEPT, "value %u is given up twice", v);
        flags[v] &= (uint8_t)~KEPT;
        --*n_kept;
    }
#undef HOLDS
    return true;
}

bool koila_plan_check(const koila_plan *p, koila_error *err)
{
    const koila_graph *g = p->placed->graph;
    const size_t n_bytes = (size_t)g->values.n + 1;
    uint32_t n_kept = 0;
    uint8_t *flags = koila__realloc(&p->mem, NULL, 0, n_bytes);
    if (!flags)
        return true; /* cannot tell */
    for (uint32_t v = 0; v < g->values.n; v++)
        flags[v] = g->values.at[v].node == KOILA_NONE ? WHOLE : 0;
    bool ok = true;
    for (uint32_t k = 0; k < p->schedule.n_stages && ok; k++)
        ok = check_stage(p, k, flags, &n_kept, err);
    if (ok && n_kept) {
        ok = false;
        koila__fail(err, KOILA_BAD_INPUT, 0, "%u kept values are never given up", n_kept);
    }
    for (uint32_t i = 0; i < p->n_targets && ok; i++)
        if (!(flags[p->targets[i]] & WHOLE)) {
            ok = false;
            koila__fail(err, KOILA_BAD_INPUT, 0, "target %u (value %u) is not there at the end", i,
                        p->targets[i]);
        }
    koila__release(&p->mem, flags, n_bytes);
    return ok;
}
