/* plan.c — the choice: the fewest slices that fit.
 *
 * One slice is the recorded order as it is (bit-equal to eager), so it is tried first, unless a
 * lower bound of its bytes (koila__schedule_whole_bytes) exceeds the budget. Otherwise the graph is
 * placed, and search.c finds the fewest slices. If something is gathered, this is done twice: the
 * values after the gather stay whole, or are sliced again (Note [After a gather] in place_call.c).
 * The better plan wins.
 *
 * If no number of rows fits, results of the forward pass are dropped (src/engine/drops.c), or each
 * row becomes a step of its own, which is planned alike (src/engine/both.c): where the rows need
 * several loops. Before such a row is cut along other axes, which takes the most time, all rows are
 * tried with results dropped (koila__rival). Other axes of the batch (src/engine/axes.c) are tried
 * too, where the caller allows it: the likeliest first, each placed once, with gathered values
 * sliced again. If nothing fits, results are dropped along those as well, and last of all in the
 * loops of rows that need many. Of all that fits the least time is taken; but once planning has
 * taken long (src/engine/effort.h), what fits in little time is not compared with more.
 *
 * A way that is bound to need more than the budget is not made. Where nothing fits, the error tells
 * the least that was made all the same; the least there is takes plans within larger budgets
 * (src/engine/least.c).
 *
 * A step that cannot be scheduled in slices (thousands of barriers) runs whole, which is always
 * right. With a caching allocator the sum of live bytes does not decide alone: options.accepts is
 * called for each plan whose sum fits. */
#include "engine/ways.h"

#include "engine/axes.h"
#include "engine/both.h"
#include "engine/drops.h"
#include "engine/floor.h"
#include "engine/least.h"
#include "engine/narrow.h"
#include "engine/outline.h"
#include "engine/live.h"
#include "engine/plan_costs.h"
#include "engine/search.h"
#include "engine/stacked.h"
#include "engine/unroll.h"
#include "graph/table.h"

/* Plans the step as recorded, in one slice. *fits: within the budget, and accepted. */
static koila_status plan_whole(koila__planning *q, bool *fits)
{
    koila_plan *p = q->plan;
    const koila__way *whole;
    KOILA_TRY(koila__way_whole(q, &whole));
    p->placed = whole->placed;
    p->schedule = whole->schedule;
    p->targets = whole->targets;
    p->rows = whole->rows;
    const uint64_t peak =
        koila__plan_peak(p->placed, &p->schedule, q->options, p->rows, q->options->budget_bytes);
    q->whole_fits = peak <= q->options->budget_bytes;
    *fits =
        q->whole_fits && koila__is_accepted(q, p->placed, &p->schedule, p->targets, p->rows, peak);
    q->accepted = *fits;
    koila__plan_set_info(p, q);
    p->info.batch = q->largest_axis;
    p->info.rows = q->largest_axis;
    p->info.n_slices = 1;
    return KOILA_OK;
}

/* Is b the better way? Fewer slices if they fit, then less work; for a frugal plan, the smaller
 * peak at moderately more work. */
static bool is_better(const koila__planning *q, const koila__way *b, const koila__way *a)
{
    const koila_plan_options *o = q->options;
    const bool fits_a = a->peak <= o->budget_bytes;
    const bool fits_b = b->peak <= o->budget_bytes;
    if (koila__is_frugal(o))
        return b->peak < a->peak && b->schedule.work <= KOILA_COST_MODERATE * a->schedule.work;
    if (fits_a != fits_b)
        return fits_b;
    if (!fits_a)
        return b->peak < a->peak;
    if (a->accepted != b->accepted)
        return b->accepted;
    const int64_t rows_a = a->rows[koila__main_axis(a->placed)];
    const int64_t rows_b = b->rows[koila__main_axis(b->placed)];
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
static bool are_as_forced(const koila__planning *q, const koila__way *s)
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
static bool is_as_little_work(const koila__planning *q, const koila__way *b, const koila__way *a)
{
    return !koila__is_frugal(q->options) && b->peak <= q->options->budget_bytes &&
           (b->accepted || !a->accepted) && b->schedule.work <= a->schedule.work;
}

/* Plans with rows that stay in their slice; *best becomes that plan where it is better. */
static koila_status try_pieces(koila__planning *q, koila__way *best)
{
    koila__way pieces = { 0 };
    const koila_status status = koila__search(q, koila__place_pieces, &pieces);
    if (status == KOILA_OK && pieces.placed->cut && are_as_forced(q, &pieces) &&
        (is_better(q, &pieces, best) || is_as_little_work(q, &pieces, best))) {
        koila__way_swap(best, &pieces);
    }
    koila__way_free(&pieces);
    return status;
}

/* The plan is that way from now on. */
static void adopt(koila__planning *q, const koila__way *way)
{
    koila_plan *p = q->plan;
    if (p->placed != q->whole.placed) {
        koila__placed_free(p->placed);
        koila__both_free(&p->schedule);
        koila__schedule_deinit(&p->schedule);
    }
    p->placed = way->placed;
    p->schedule = way->schedule;
    p->targets = way->targets;
    p->rows = way->rows;
    q->accepted = way->accepted;
    q->by_rows = q->is_plain = false;
    p->n_curve = 0;
    p->info = (koila_plan_info){ 0 };
    koila__plan_set_info(p, q);
}

/* Plans in slices; if something is gathered, also with gathered values koila__way again. On
 * KOILA_UNSUPPORTED the plan is unchanged. */
static koila_status plan_sliced(koila__planning *q)
{
    koila__way best = { 0 }, again = { 0 };
    koila_status status = koila__search(q, koila__place, &best);
    if (status != KOILA_OK)
        return status;
    const koila__placed *first = best.placed;
    const bool fewest = best.peak <= q->options->budget_bytes && q->options->rows <= 0 &&
                        q->largest_axis <= 2 * best.rows[koila__main_axis(best.placed)];
    if (!fewest && gathers(best.placed)) {
        status = koila__search(q, koila__place_cut, &again);
        if (status == KOILA_OK && is_better(q, &again, &best)) {
            koila__way_swap(&best, &again);
        }
        koila__way_free(&again);
        if (status != KOILA_OK && status != KOILA_UNSUPPORTED) {
            koila__way_free(&best);
            return status;
        }
    }
    if (!fewest && koila__takes_rows(best.placed)) {
        status = try_pieces(q, &best);
        if (status != KOILA_OK && status != KOILA_UNSUPPORTED) {
            koila__way_free(&best);
            return status;
        }
    }
    if (q->whole_fits && best.peak > q->options->budget_bytes) {
        koila__way_free(&best);
        return KOILA_UNSUPPORTED; /* whole it fits, and was only not accepted */
    }
    adopt(q, &best);
    q->by_rows = best.placed == first;
    q->is_plain = q->by_rows && (best.schedule.n_loops <= 1 || !best.schedule.n_keeps);
    return KOILA_OK;
}

static koila_status check_targets(const koila__planning *q)
{
    for (uint32_t i = 0; i < q->n_targets; i++) {
        const koila_value v = q->targets[i];
        if (v >= q->graph->values.n || q->graph->values.at[v].meta == KOILA_NONE)
            return koila__fail(q->err, KOILA_BAD_ARGUMENT, 0,
                               "plan: target %u is no value of the graph", v);
    }
    return KOILA_OK;
}

static void find_largest_axis(koila__planning *q)
{
    q->largest_axis = 1;
    for (uint32_t i = 0; i < q->graph->axes.n; i++) {
        if (q->graph->axes.at[i] > q->largest_axis)
            q->largest_axis = q->graph->axes.at[i];
        q->is_empty |= q->graph->axes.at[i] == 0;
    }
}

/* Whole if that fits, else in slices; if that is not possible, whole. */
static koila_status choose_way(koila__planning *q)
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

/* Does the way take more than so many times the time of the step as recorded? */
static bool is_slower(const koila__way *way, double times)
{
    return koila__way_time(way) > times * koila__recorded_time(&way->schedule);
}

/* The plan is described later, for another one may take its place; its peak is known. */
static void leave_bare(koila__planning *q)
{
    koila_plan *p = q->plan;
    p->info.peak_bytes = koila__plan_peak(p->placed, &p->schedule, q->options, p->rows, 0);
    q->is_bare = true;
}

static double time_so_far(const koila__planning *q)
{
    const koila__way now = koila__way_so_far(q);
    return koila__way_time(&now);
}

/* The step under one of them, and the best way to run it so. */
struct koila__tried {
    koila__axis axis;
    koila__retold retold;
    bool is_narrowed; /* further axes are rows that are taken of it */
    koila__along view;
    koila__way way;
};

/* The step that is cut: as recorded, or narrowed. */
static const koila_graph *graph_of(const koila__planning *q, const koila__tried *t)
{
    return t->retold.graph ? t->retold.graph : q->graph;
}

static void narrow_planning(const koila__tried *t, koila__planning *along)
{
    along->is_narrowed = t->is_narrowed;
    if (!t->retold.graph)
        return;
    along->targets = t->retold.targets;
    along->retold = &t->retold;
}

/* Planning along it; *options: room for its own. */
static koila__planning planning_along(const koila__planning *q, const koila__tried *t,
                                      koila_plan_options *options)
{
    koila__planning along = *q;
    const int64_t unit = t->axis.size / t->axis.rows;
    *options = *q->options;
    if (options->rows > 0) /* entries */
        options->rows = (options->rows + unit - 1) / unit;
    along.options = options;
    along.graph = &t->view.graph;
    along.seeds = t->view.seeds;
    narrow_planning(t, &along);
    along.largest_axis = t->axis.rows;
    along.dim = t->axis.dim;
    along.unit = unit;
    along.is_lazy = q->options->axes != KOILA_AXES_OTHER;
    return along;
}

static void untry(koila__planning *q, koila__tried *t)
{
    koila__way_free(&t->way);
    koila__along_deinit(&t->view, &q->plan->mem);
    koila__retold_deinit(&t->retold);
}

/* The step under the axis again. */
static koila_status look_along(const koila__planning *q, koila__tried *t)
{
    koila__along_deinit(&t->view, &q->plan->mem);
    t->view = (koila__along){ .n_values = 0 };
    return koila__along_init(graph_of(q, t), &t->axis, &q->plan->mem, &t->view);
}

/* The step of *t is told anew, as *next, if that has a graph; *next is ended. */
static koila_status retell(const koila__planning *q, koila__tried *t, koila__retold *next)
{
    koila_status status = KOILA_OK;
    if (!next->graph)
        return KOILA_OK;
    if (!t->retold.graph) {
        t->retold = *next;
        return KOILA_OK;
    }
    status = koila__retold_again(&t->retold, q->n_targets, next);
    koila__retold_deinit(next);
    return status;
}

static const koila_value *targets_of(const koila__planning *q, const koila__tried *t)
{
    return t->retold.graph ? t->retold.targets : q->targets;
}

/* The step is narrowed along axis number `a` of *t. */
static koila_status narrow_along(const koila__planning *q, uint16_t a, koila__tried *t)
{
    koila__retold next;
    bool takes_rows;
    koila__spend(q->effort, KOILA_COST_NS_PLACE, q->graph->nodes.n);
    KOILA_TRY(koila__narrow(graph_of(q, t), &t->view, a, targets_of(q, t), q->n_targets,
                            &q->plan->mem, &next, &takes_rows));
    t->is_narrowed |= takes_rows;
    KOILA_TRY(retell(q, t, &next));
    return look_along(q, t);
}

/* *t: the step along that axis, and along those of what is taken of its rows. It is untried by the
 * caller, also after a failure. */
static koila_status begin_along(const koila__planning *q, const koila__axis *axis, koila__tried *t)
{
    koila__retold next;
    *t = (koila__tried){ .axis = *axis };
    KOILA_TRY(koila__stack_entries(q->graph, q->targets, q->n_targets, &q->plan->mem, &next));
    KOILA_TRY(retell(q, t, &next));
    if (axis->rows == axis->size && !axis->n_others)
        koila__narrow_lengths(graph_of(q, t), &t->axis);
    const uint32_t n_taken = t->axis.n_others - axis->n_others;
    KOILA_TRY(look_along(q, t));
    for (uint16_t a = 0; n_taken && a <= n_taken; a++)
        KOILA_TRY(narrow_along(q, a, t));
    if (!n_taken || t->is_narrowed)
        return KOILA_OK;
    t->axis = *axis; /* they are taken of something else */
    return look_along(q, t);
}

static koila__least least_along(const koila__tried *t)
{
    const int64_t unit = t->axis.size / t->axis.rows;
    return (koila__least){ .peak_bytes = t->way.peak,
                           .is_bound = t->way.is_bound,
                           .dim = t->axis.dim,
                           .rows = t->way.rows[0] * unit,
                           .size = t->axis.size };
}

static void note_least(koila__planning *q, const koila__tried *t)
{
    if (!t->way.is_bound && t->way.peak < q->other.peak_bytes)
        q->other = least_along(t);
}

/* Is it with results dropped so good that no other axis is tried so? */
static bool is_cheap(const koila__planning *q, const koila__tried *t)
{
    return koila__way_fits(q, &t->way) &&
           t->way.schedule.work <= KOILA_COST_MODERATE * t->way.schedule.work_recorded;
}

/* Does it fit, in no more time than computing the forward pass again takes? Then nothing else that
 * cuts another axis is tried: each takes the time of planning once more. */
static bool is_quick(const koila__planning *q, const koila__tried *t)
{
    return koila__way_fits(q, &t->way) && !is_slower(&t->way, KOILA_COST_FORWARD_AGAIN);
}

static void forget_tried(koila__planning *q)
{
    for (uint32_t i = 0; i < q->n_tried; i++)
        untry(q, &q->tried[i]);
    q->n_tried = 0;
}

/* Does the plan so far not fit, or does the caller not take it? */
static bool rows_do_not_fit(const koila__planning *q)
{
    const koila_plan_options *o = q->options;
    return q->plan->info.peak_bytes > o->budget_bytes || (o->accepts && !q->accepted);
}

/* Finds the best way along each axis, up to the first that is quick; if one fits, as long as there
 * is time. */
static koila_status try_axes(koila__planning *q)
{
    koila__axis axes[KOILA__MOST_WAYS];
    uint32_t n;
    forget_tried(q);
    KOILA_TRY(koila__axes_find(q->graph, &q->plan->mem, axes, &n));
    q->tried = koila__arena_array(&q->plan->arena, KOILA__MOST_WAYS, sizeof *q->tried);
    if (!q->tried)
        return KOILA_NO_MEMORY;
    for (uint32_t i = 0; i < n; i++) {
        koila__tried *t = &q->tried[q->n_tried];
        koila_plan_options options;
        koila_status status = begin_along(q, &axes[i], t);
        koila__planning along = planning_along(q, t, &options);
        if (status == KOILA_OK)
            status = koila__search(&along, koila__place_cut, &t->way);
        if (status != KOILA_OK)
            untry(q, t);
        if (status == KOILA_UNSUPPORTED)
            continue;
        if (status != KOILA_OK)
            return status;
        q->n_tried++;
        note_least(q, t);
        if (is_quick(q, t) || koila__is_enough(q, &t->way))
            break;
    }
    return KOILA_OK;
}

/* Of the ways that were tried, the one that needs the least comes first: dropping results helps it
 * soonest. */
static void put_least_first(koila__planning *q)
{
    for (uint32_t i = 1; i < q->n_tried; i++)
        for (uint32_t k = i; k > 0 && q->tried[k].way.peak < q->tried[k - 1].way.peak; k--) {
            const koila__tried was = q->tried[k];
            q->tried[k] = q->tried[k - 1];
            q->tried[k - 1] = was;
        }
}

/* The same with results dropped, where a way does not fit without, or loops compute much again. */
static koila_status drop_along_axes(koila__planning *q)
{
    koila_node turn;
    if (!q->n_tried)
        return KOILA_OK;
    KOILA_TRY(koila__drop_turn(q, &turn));
    put_least_first(q);
    for (uint32_t i = 0; i < q->n_tried && turn != KOILA_NONE; i++) {
        koila__tried *t = &q->tried[i];
        koila_plan_options options;
        koila__planning along = planning_along(q, t, &options);
        if (!koila__way_fits(q, &t->way) || is_slower(&t->way, KOILA_COST_FORWARD_AGAIN))
            KOILA_TRY(koila__drop_along(&along, turn, &t->way));
        note_least(q, t);
        if (is_cheap(q, t) || (koila__way_fits(q, &t->way) && koila__is_spent(q->effort)))
            break;
    }
    return KOILA_OK;
}

static koila__tried *best_tried(koila__planning *q)
{
    koila__tried *best = NULL;
    for (uint32_t i = 0; i < q->n_tried; i++)
        if (q->tried[i].way.placed &&
            (!best || koila__way_is_better(q, &q->tried[i].way, &best->way)))
            best = &q->tried[i];
    return best;
}

/* Is the way better than the plan so far, which may fit? */
static bool is_improvement(const koila__planning *q, const koila__way *way)
{
    return koila__way_fits(q, way) && (rows_do_not_fit(q) || koila__way_time(way) < time_so_far(q));
}

/* Takes another axis where one fits, and takes less time than a plan that does; in any case if the
 * caller asks for one. */
static koila_status take_other_axis(koila__planning *q)
{
    koila__tried *best = best_tried(q);
    const bool in_any_case = q->options->axes == KOILA_AXES_OTHER;
    if (!best && in_any_case)
        return koila__fail(q->err, KOILA_UNSUPPORTED, 0, "plan: the batch has no other axis");
    if (!best || !(in_any_case || is_improvement(q, &best->way)))
        return KOILA_OK;
    q->dim = best->axis.dim;
    q->unit = best->axis.size / best->axis.rows;
    adopt(q, &best->way);
    best->way.placed = NULL; /* the plan's now */
    q->taken = best;
    q->plan->info.peak_bytes = best->way.peak;
    q->is_bare = koila__way_fits(q, &best->way); /* then another may still be better */
    return q->is_bare ? KOILA_OK : koila__plan_describe(q->plan, q->options, 0);
}

/* The way along another axis that the plan is becomes one of those that were tried again. The plan
 * has none until one of them is taken, and one is: it fits. */
static void give_back(koila__planning *q)
{
    koila_plan *p = q->plan;
    koila_assert(q->dim != KOILA_NONE && q->taken && !q->taken->way.placed);
    q->taken->way = koila__way_so_far(q);
    p->placed = NULL;
    p->schedule = (koila__schedule){ 0 };
    p->info.peak_bytes = UINT64_MAX;
    q->accepted = false;
}

static koila_status plan_other_axis(koila__planning *q)
{
    KOILA_TRY(try_axes(q));
    return take_other_axis(q);
}

/* ---- rows and another axis */

/* Is the plan one of slices of one row? */
static bool is_row_by_row(const koila__planning *q)
{
    const koila_plan_info *info = &q->plan->info;
    return q->largest_axis > 1 && !q->is_empty && info->dim == KOILA_NONE && info->rows == 1 &&
           info->n_slices > 1 && info->n_loops > 0;
}

/* The step in the most slices of rows, with results dropped: made once. */
static koila_status drop_in_slices(koila__planning *q)
{
    if (q->is_sliced)
        return KOILA_OK;
    KOILA_TRY(koila__drop_in_slices(q, &q->sliced));
    q->is_sliced = true;
    return KOILA_OK;
}

/* Bytes of the results of the step. */
static uint64_t results_of(const koila__planning *q)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < q->n_targets; i++)
        if (q->graph->values.at[q->targets[i]].node != KOILA_NONE)
            sum += koila__value_meta(q->graph, q->targets[i])->n_bytes;
    return sum;
}

/* Does no row fit along another axis, nor do all of them? They need what each needs beyond the
 * results. */
static bool are_rows_too_much(const koila__planning *q)
{
    const uint64_t of_row = q->both.of_row, results = results_of(q);
    if (!q->row_is_too_much || q->both.peak_bytes == UINT64_MAX || of_row <= results)
        return false;
    const double all = (double)results + (double)q->largest_axis * (double)(of_row - results);
    return all > (double)q->options->budget_bytes;
}

/* The step whole, with results dropped, where that may fit. */
static koila_status drop_whole(koila__planning *q)
{
    uint64_t bound;
    if (q->is_whole_dropped || q->options->rows > 0)
        return KOILA_OK;
    q->is_whole_dropped = true;
    KOILA_TRY(koila__floor_whole(q->graph, q->targets, q->n_targets, q->mem, &bound));
    return bound > q->options->budget_bytes ? KOILA_OK : koila__drop_whole(q, &q->sliced);
}

/* Do the rows with results dropped fit, in at most so many times the time of the step as recorded?
 */
static bool is_dropped_in(const koila__planning *q, double times)
{
    return q->sliced.placed && q->sliced.accepted && !is_slower(&q->sliced, times);
}

static bool is_drawn(const koila_graph *g, koila_node n)
{
    return koila__flags_of_op(g->table, koila__node_sig(g, n)->op) & KOILA_OP_RANDOM;
}

/* Does the step write to what it has made, but for masks of dropout, which are scaled in place? */
static bool writes_in_place(const koila_graph *g)
{
    for (koila_node n = 0; n < g->nodes.n; n++) {
        const koila_sig_info *s = koila__node_sig(g, n);
        if (!s->n_writes || is_drawn(g, n))
            continue;
        const uint32_t at = g->nodes.at[n].first_input + s->writes[0].input;
        const koila_node maker = g->values.at[g->inputs.at[at]].node;
        if (maker != KOILA_NONE && !is_drawn(g, maker))
            return true;
    }
    return false;
}

/* The rows with results dropped: whole, and in the most slices, where that may be less work. */
static koila_status drop_in_rows_once(koila__planning *q)
{
    KOILA_TRY(drop_whole(q));
    if (q->largest_axis <= 1 || q->is_empty || is_dropped_in(q, KOILA_COST_COMPARED))
        return KOILA_OK;
    const koila_status status = drop_in_slices(q);
    return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
}

/* The same, with what is written in place dropped too: made once. */
static koila_status drop_written(koila__planning *q)
{
    const uint64_t least = q->whole_dropped;
    if (q->is_written_dropped)
        return KOILA_OK;
    q->is_written_dropped = q->repeats_writes = true;
    q->is_sliced = q->is_whole_dropped = false;
    const koila_status status = drop_in_rows_once(q);
    q->repeats_writes = false;
    if (least && least < q->whole_dropped)
        q->whole_dropped = least;
    return status;
}

/* Both, as long as there is time for planning. */
static koila_status drop_in_rows(koila__planning *q)
{
    KOILA_TRY(drop_in_rows_once(q));
    return koila__is_spent(q->effort) || !writes_in_place(q->graph) ? KOILA_OK : drop_written(q);
}

/* koila__rival.try of a row: all rows with results dropped. Whole they hold no less than a row
 * does, whatever is dropped, but for what waits in host memory, which no row uses. That is only
 * used once the time for planning is over: what is made counts as time. */
static koila_status try_dropped(void *user, uint64_t of_row, bool *fits)
{
    koila__planning *q = user;
    q->is_rival = true;
    if (of_row > q->options->budget_bytes && !(q->options->host_price > 0))
        q->is_whole_dropped |= koila__is_spent(q->effort);
    KOILA_TRY(drop_in_rows(q));
    *fits = is_dropped_in(q, KOILA_COST_FORWARD_AGAIN);
    return KOILA_OK;
}

/* The rows one by one, each a step of its own: the plan changes if each of them fits. */
static koila_status plan_both(koila__planning *q)
{
    koila_plan *p = q->plan;
    const koila_plan_options *o = q->options;
    uint64_t bound;
    if (!is_row_by_row(q))
        return KOILA_UNSUPPORTED;
    KOILA_TRY(koila__floor_both(p, &bound));
    if (o->axes != KOILA_AXES_BOTH && bound > o->budget_bytes) {
        q->both = (koila__least){ .peak_bytes = bound, .is_bound = true };
        return KOILA_OOM;
    }
    const uint32_t n_loops = p->info.n_loops; /* between several loops all rows wait */
    const koila__rival dropped = { try_dropped, q };
    const bool has_rival = o->recomputes && o->axes == KOILA_AXES_ANY && o->rows <= 0;
    const koila_status status =
        koila__both_cut(p, o, q->effort, has_rival ? &dropped : NULL, &q->both);
    q->row_is_too_much = status == KOILA_OOM && n_loops <= KOILA__FEW_LOOPS;
    KOILA_TRY(status);
    p->n_curve = p->info.n_gathers = 0;
    q->is_bare = false;
    KOILA_TRY(koila__plan_describe(p, o, 0));
    q->accepted =
        p->info.peak_bytes <= o->budget_bytes && (!o->accepts || o->accepts(o->accepts_user, p));
    return KOILA_OK;
}

/* The same, in any case. */
static koila_status plan_both_as_forced(koila__planning *q)
{
    const koila_plan_options *o = q->options;
    koila_plan_options by_rows = *o;
    by_rows.axes = KOILA_AXES_ROWS;
    by_rows.rows = 1;
    q->options = &by_rows;
    find_largest_axis(q);
    koila_status status = choose_way(q);
    if (status == KOILA_OK)
        status = koila__plan_describe(q->plan, &by_rows, 0);
    q->options = o;
    if (status == KOILA_OK)
        status = plan_both(q);
    if (status == KOILA_UNSUPPORTED)
        koila__fail(q->err, status, 0, "plan: rows and another axis cannot be cut together");
    return status;
}

/* ---- dropped and computed again */

/* Is it better than the plan so far, which may fit along another axis? */
static bool is_better_recomputed(const koila__planning *q, const koila__way *way)
{
    const koila_plan_info *now = &q->plan->info;
    if (rows_do_not_fit(q))
        return way->accepted || way->peak < now->peak_bytes;
    return way->accepted && koila__way_time(way) < time_so_far(q);
}

/* Is another axis cut, at more than so many times the time of the step as recorded? */
static bool is_slower_axis(const koila__planning *q, double times)
{
    const koila__way now = koila__way_so_far(q);
    return (q->dim != KOILA_NONE || q->plan->info.n_inner) && is_slower(&now, times);
}

/* Is the plan not to be compared with more: because it fits in little more than the time of the
 * step as recorded, or because planning has taken long? */
static bool is_settled(const koila__planning *q)
{
    const koila__way now = koila__way_so_far(q);
    return !rows_do_not_fit(q) &&
           (koila__is_enough(q, &now) || !is_slower(&now, KOILA_COST_COMPARED));
}

/* Do loops of rows compute so much again that dropping results may take less time? */
static bool is_slow_in_rows(const koila__planning *q)
{
    const koila__way now = koila__way_so_far(q);
    return q->by_rows && q->options->rows <= 0 &&
           now.schedule.work > KOILA_SLOW_ROWS * now.schedule.work_recorded;
}

/* Are results dropped in any case, or compared with the plan so far? */
static bool asks_to_recompute(const koila__planning *q)
{
    const bool is_free = q->options->axes == KOILA_AXES_ANY && q->options->rows <= 0;
    return q->options->recomputes &&
           (rows_do_not_fit(q) || is_slow_in_rows(q) ||
            (!is_settled(q) &&
             is_slower_axis(q, is_free ? KOILA_COST_COMPARED : KOILA_COST_FORWARD_AGAIN)));
}

/* The bounds of the slices so far. */
typedef struct shrinking {
    uint64_t first, least, last;
    uint32_t n; /* how many are known */
} shrinking;

static void note_bound(shrinking *x, uint64_t bound)
{
    x->first = x->n ? x->first : bound;
    x->least = x->n && x->least < bound ? x->least : bound;
    x->last = bound;
    x->n++;
}

/* Do more slices change next to nothing, with the budget far off? */
static bool levels_off(const koila__planning *q, uint64_t results, const shrinking *x)
{
    const uint64_t budget = q->options->budget_bytes;
    return x->n > 1 && x->least > x->first - x->first / 16 && x->least > budget &&
           budget > results && (x->least - results) / 5 > (budget - results) / 4;
}

/* Along one other axis, or two of different leaves, in slices without loops: *best becomes that way
 * where it is better. */
static koila_status unroll_along(koila__planning *q, const koila__tried *t, koila__way *best)
{
    static const uint32_t n_slices[] = { 8, 16, 32, 64 }; /* each twice the one before */
    koila__along view;
    koila__planning along = *q;
    koila__placed *placed = NULL;
    koila__axis only = t->axis;
    if (!t->is_narrowed)
        only.n_others = only.with > 0; /* what has yet another length is whole */
    int64_t shortest = only.rows;
    for (uint32_t i = 0; i < only.n_others; i++)
        shortest = only.others[i] < shortest ? only.others[i] : shortest;
    koila_value *targets = koila__arena_array(&q->plan->arena, q->n_targets, sizeof *targets);
    if (!targets)
        return KOILA_NO_MEMORY;
    KOILA_TRY(koila__along_init(graph_of(q, t), &only, &q->plan->mem, &view));
    along.graph = &view.graph;
    along.seeds = view.seeds;
    narrow_planning(t, &along);
    koila_status status = koila__way_place(&along, koila__place_cut, targets, &placed);
    const uint64_t results = results_of(q);
    shrinking so_far = { .n = 0 };
    for (size_t i = 0; status == KOILA_OK && i < KOILA_COUNT(n_slices) && !best->accepted; i++) {
        uint64_t bound = 0;
        if (shortest < 2 * n_slices[i] || /* of one row, strides have no meaning */
            levels_off(q, results, &so_far))
            break;
        if (so_far.last > results) /* what is not held to the end halves with the slices, at most */
            so_far.last = results + (so_far.last - results) / 2;
        if (so_far.last > q->options->budget_bytes)
            continue;
        status = koila__drop_unrolled(q, placed, targets, n_slices[i], best, &bound);
        note_bound(&so_far, bound);
    }
    koila__placed_free(placed);
    koila__along_deinit(&view, &q->plan->mem);
    return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
}

/* The same along each axis that was tried and is taken entry by entry: two together first. */
static koila_status plan_unrolled(koila__planning *q, koila__way *best)
{
    for (uint32_t i = 0; i < 2 * q->n_tried && !best->accepted; i++) {
        const koila__tried *t = &q->tried[i % q->n_tried];
        const bool is_turn = (i < q->n_tried) == (t->axis.with > 0);
        if (is_turn && t->way.placed && koila__unroll_helps(t->way.placed))
            KOILA_TRY(unroll_along(q, t, best));
    }
    return KOILA_OK;
}

/* Of the ways along other axes that are not scheduled, the one that is bound to need the least; or
 * NULL. */
static const koila__tried *least_bound(const koila__planning *q)
{
    const koila__tried *least = NULL;
    for (uint32_t i = 0; i < q->n_tried; i++) {
        const koila__tried *t = &q->tried[i];
        const bool is_bound = t->way.placed && t->way.is_bound;
        if (is_bound && (!least || t->way.peak < least->way.peak))
            least = t;
    }
    return least;
}

/* The rows with results dropped become the plan where they fit. It is described later, for another
 * way may still be better. */
static koila_status take_dropped(koila__planning *q)
{
    const koila_status status = drop_in_rows(q);
    if (status != KOILA_OK || !q->sliced.placed || !q->sliced.accepted)
        return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
    adopt(q, &q->sliced);
    q->plan->info.peak_bytes = q->sliced.peak;
    q->sliced.placed = NULL; /* the plan's now */
    q->is_bare = true;
    return KOILA_OK;
}

/* The same in many loops, where that is not accepted so far. */
static koila_status drop_in_many_loops(koila__planning *q)
{
    return q->sliced.accepted ? KOILA_OK : koila__drop_in_loops(q, &q->sliced);
}

/* The last resort: both, with what is written in place dropped too. */
static koila_status drop_written_at_last(koila__planning *q)
{
    if (q->sliced.accepted || !rows_do_not_fit(q) || !writes_in_place(q->graph))
        return KOILA_OK;
    KOILA_TRY(drop_written(q));
    q->repeats_writes = true;
    const koila_status status = drop_in_many_loops(q);
    q->repeats_writes = false;
    return status;
}

/* Nothing fits as recorded: results of the forward pass are dropped and computed again, in the most
 * slices, or in one. The plan changes if that needs less. */
static koila_status plan_recomputed(koila__planning *q)
{
    koila_status status = drop_in_rows(q);
    if (status == KOILA_OK && !q->sliced.accepted && rows_do_not_fit(q) && !q->row_is_too_much &&
        q->options->axes == KOILA_AXES_ANY)
        status = plan_unrolled(q, &q->sliced);
    if (status == KOILA_OK)
        status = drop_in_many_loops(q);
    if (status == KOILA_OK)
        status = drop_written_at_last(q);
    if (status != KOILA_OK || !q->sliced.placed || !is_better_recomputed(q, &q->sliced))
        return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
    q->dim = KOILA_NONE;
    q->unit = 1;
    adopt(q, &q->sliced);
    q->sliced.placed = NULL; /* the plan's now */
    leave_bare(q);
    return KOILA_OK;
}

/* The plan fits along another axis, where its loops compute much of the forward pass once more in
 * each: with results dropped, which go through barriers too, that may be less work. */
static koila_status plan_cheaper_axis(koila__planning *q)
{
    if (q->plan->info.n_again) /* they are dropped already */
        return KOILA_OK;
    if (q->dim != KOILA_NONE)
        give_back(q);
    KOILA_TRY(drop_along_axes(q));
    return take_other_axis(q);
}

/* ---- all of it */

static koila_status plan_rows(koila__planning *q)
{
    find_largest_axis(q);
    KOILA_TRY(choose_way(q));
    leave_bare(q);
    q->rows_time = time_so_far(q);
    return KOILA_OK;
}

/* The step with results dropped, without cutting another axis: a row is a step of its own where all
 * rows need several loops, between which rows would wait. */
static koila_status drop_in_rows_first(koila__planning *q)
{
    if (!is_row_by_row(q) || q->plan->info.n_loops == 1)
        return take_dropped(q);
    q->is_both_tried = true;
    const koila_status status = plan_both(q);
    return status == KOILA_UNSUPPORTED || status == KOILA_OOM ? take_dropped(q) : status;
}

/* Is a rival taken before other axes are tried? */
static koila_status try_rival(const koila__planning *q, bool *fits)
{
    *fits = false;
    return q->rival ? q->rival->try(q->rival->user, q->whole_dropped, fits) : KOILA_OK;
}

/* Another axis alone, or both together; if neither fits, another axis with results dropped. */
static koila_status plan_along_axes(koila__planning *q)
{
    const koila_plan_options *o = q->options;
    KOILA_TRY(try_axes(q));
    const koila__tried *best = best_tried(q);
    const bool is_enough = best && (is_quick(q, best) || koila__is_enough(q, &best->way));
    if (o->recomputes && rows_do_not_fit(q) && !q->is_both_tried && !is_enough) {
        const koila_status status = plan_both(q);
        if (status != KOILA_OK && status != KOILA_OOM && status != KOILA_UNSUPPORTED)
            return status;
    }
    KOILA_TRY(take_other_axis(q));
    if (!o->recomputes || !rows_do_not_fit(q) || q->row_is_too_much)
        return KOILA_OK;
    KOILA_TRY(drop_along_axes(q));
    return take_other_axis(q);
}

/* Rows; where these do not fit, rows with results dropped, or cut along another axis too; these are
 * compared with another axis alone. */
static koila_status plan_axes(koila__planning *q)
{
    const koila_plan_options *o = q->options;
    if (o->axes == KOILA_AXES_BOTH)
        return plan_both_as_forced(q);
    if (o->axes == KOILA_AXES_OTHER)
        return plan_other_axis(q);
    KOILA_TRY(plan_rows(q));
    if (o->axes == KOILA_AXES_ROWS || o->rows > 0 || !rows_do_not_fit(q))
        return KOILA_OK;
    if (o->recomputes)
        KOILA_TRY(drop_in_rows_first(q));
    if (is_settled(q) || are_rows_too_much(q))
        return KOILA_OK;
    bool fits;
    KOILA_TRY(try_rival(q, &fits));
    return fits ? KOILA_OOM : plan_along_axes(q);
}

/* Nothing fits. Of what is not scheduled, the error tells what it needs at least. */
static void name_bound(koila__planning *q)
{
    const koila__tried *bound = least_bound(q);
    if (bound && q->other.peak_bytes == UINT64_MAX)
        q->other = least_along(bound);
}

static koila_status make_plan(koila__planning *q)
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
    if (asks_to_recompute(q))
        KOILA_TRY(plan_recomputed(q));
    if (o->recomputes && o->axes == KOILA_AXES_ANY && !rows_do_not_fit(q) && !is_settled(q) &&
        is_slower_axis(q, KOILA_COST_FORWARD_AGAIN))
        KOILA_TRY(plan_cheaper_axis(q));
    if (q->is_bare && (q->err || p->info.peak_bytes <= o->budget_bytes)) /* else nobody asks */
        KOILA_TRY(koila__plan_describe(p, o, p->info.peak_bytes));
    p->info.has_other_axes = koila__axes_any(q->graph);
    koila_check(koila_plan_check(p, NULL));
    if (p->info.peak_bytes <= o->budget_bytes)
        return KOILA_OK;
    name_bound(q);
    uint64_t least = koila__plan_least(p, &q->other, &q->both);
    if (o->finds_least && o->rows <= 0)
        KOILA_TRY(koila__least_budget(q, &least));
    return koila__plan_no_fit(p, q->graph, &q->other, &q->both, least, q->err);
}

/* The least that any way that was tried needs. */
static koila__least least_of(const koila__planning *q)
{
    const koila_plan_info *info = &q->plan->info;
    const uint64_t other = q->other.peak_bytes;
    const uint64_t of_row = other < info->peak_bytes ? other : info->peak_bytes;
    if (!q->other.is_bound && other < info->peak_bytes) {
        koila__least least = q->other;
        least.of_row = of_row;
        return least;
    }
    return (koila__least){ .peak_bytes = info->peak_bytes,
                           .of_row = of_row,
                           .dim = info->dim,
                           .rows = info->rows * info->unit,
                           .size = info->batch * info->unit };
}

koila_status koila__plan_row(const koila_graph *graph, const koila_value *targets,
                             uint32_t n_targets, const uint8_t *adds_on,
                             const koila_plan_options *options, const koila_allocator *mem,
                             koila__effort *effort, const koila__rival *rival, koila_plan **out,
                             koila__least *least, koila_error *err)
{
    const koila_allocator a = koila__allocator(mem);
    koila__effort own = koila__effort_for(graph->nodes.n);
    koila_plan *p = koila__realloc(&a, NULL, 0, sizeof *p);
    koila_status status = KOILA_NO_MEMORY;
    if (p) {
        memset(p, 0, sizeof *p);
        p->mem = a;
        koila__planning q = { .graph = graph,
                              .targets = targets,
                              .n_targets = n_targets,
                              .options = options,
                              .mem = mem,
                              .err = err,
                              .plan = p,
                              .effort = effort ? effort : &own,
                              .dim = KOILA_NONE,
                              .unit = 1,
                              .adds_on = adds_on,
                              .rival = rival,
                              .other = { .peak_bytes = UINT64_MAX },
                              .both = { .peak_bytes = UINT64_MAX } };
        status = make_plan(&q);
        if (least)
            *least = least_of(&q);
        forget_tried(&q);
        koila__way_free(&q.sliced);
        if (q.whole.placed != p->placed)
            koila__way_free(&q.whole);
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
    return koila__plan_row(graph, targets, n_targets, NULL, options, mem, NULL, NULL, out, NULL,
                           err);
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
