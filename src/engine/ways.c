/* ways.c — a way to run the step: placed, scheduled, in slices of some rows. What all choices of
 * plan.c, search.c and drops.c have in common. */
#include "engine/ways.h"

#include "engine/addends.h"
#include "engine/both.h"
#include "engine/live.h"
#include "engine/retold.h"
#include "engine/plan_costs.h"
#include "graph/table.h"

/* Rows of a slice of every axis when the main one is cut into n. */
void koila__rows_for(const koila_graph *g, int64_t n_slices, int64_t *rows)
{
    for (uint32_t a = 0; a < g->axes.n; a++) {
        rows[a] = (g->axes.at[a] + n_slices - 1) / n_slices;
        if (rows[a] < 1)
            rows[a] = 1;
    }
}

/* Rows of a slice of every axis as the options force them. */
void koila__rows_as_forced(const koila_graph *g, const koila_plan_options *o, int64_t *rows)
{
    for (uint32_t a = 0; a < g->axes.n; a++)
        rows[a] = o->rows < g->axes.at[a] ? o->rows : g->axes.at[a];
}

/* The axis with the most loop nodes; 0 when nothing is in a loop. */
uint16_t koila__main_axis(const koila__placed *p)
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

uint16_t koila__told_axis(const koila__planning *q, const koila__placed *p)
{
    return q->dim == KOILA_NONE ? koila__main_axis(p) : 0;
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

koila_status koila__way_place(const koila__planning *q, koila__place_fn how, koila_value *targets,
                              koila__placed **out)
{
    koila__placed *placed = NULL;
    koila__spend(q->effort, KOILA_COST_NS_PLACE, q->graph->nodes.n);
    if (q->seeds)
        KOILA_TRY(koila__place_along(q->graph, q->seeds, q->is_narrowed, q->targets, q->n_targets,
                                     q->mem, &placed, q->err));
    else
        KOILA_TRY(how(q->graph, q->targets, q->n_targets, q->mem, &placed, q->err));
    koila_check(koila__placed_check(placed, NULL));
    koila_status status = map_targets(placed, q->targets, q->n_targets, targets, q->err);
    if (status == KOILA_OK && !bytes_add_up(placed->graph))
        status = koila__fail(q->err, KOILA_UNSUPPORTED, 0,
                             "plan: the sizes of all values add up to more than 64 bits");
    if (status == KOILA_OK && q->retold)
        status = koila__retold_name(q->retold, placed);
    if (status == KOILA_OK && q->adds_on)
        status = koila__both_mark(placed, q->adds_on, targets, q->n_targets);
    if (status == KOILA_OK)
        status = koila__addends_find(placed, targets, q->n_targets, q->mem);
    if (status == KOILA_OK)
        *out = placed;
    else
        koila__placed_free(placed);
    return status;
}

static bool is_copy_to_host(const koila_graph *g, koila_node n)
{
    const koila_sig_info *s = koila__node_sig(g, n);
    return !(koila__flags_of_op(g->table, s->op) & KOILA_OP_VIEW) &&
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
void koila__plan_set_info(koila_plan *p, const koila__planning *q)
{
    const koila_graph *g = p->placed->graph;
    const koila__schedule *s = &p->schedule;
    const uint16_t axis = koila__told_axis(q, p->placed);
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
bool koila__is_frugal(const koila_plan_options *o)
{
    return o->rows > 0 && o->budget_bytes == UINT64_MAX;
}

/* Does the caller take a plan that fits by its sum? */
bool koila__is_accepted(const koila__planning *q, koila__placed *placed,
                        const koila__schedule *schedule, koila_value *targets, int64_t *rows,
                        uint64_t peak_bytes)
{
    if (!q->options->accepts || koila__is_frugal(q->options))
        return true;
    koila_plan view = *q->plan; /* borrows everything, during the call */
    view.placed = placed;
    view.schedule = *schedule;
    view.targets = targets;
    view.rows = rows;
    view.info = (koila_plan_info){ 0 }; /* not of the plan so far */
    koila__plan_set_info(&view, q);
    view.info.peak_bytes = peak_bytes;
    return q->options->accepts(q->options->accepts_user, &view);
}

bool koila__way_fits(const koila__planning *q, const koila__way *s)
{
    return s->peak <= q->options->budget_bytes &&
           (s->accepted || !q->options->accepts || koila__is_frugal(q->options));
}

/* Calls of a stage in all slices; of an inner step, those of each row. */
static double calls_of(const koila__placed *p, const koila_stage *st, const int64_t *rows)
{
    const double n_slices =
        st->is_loop ? koila__n_slices(p->graph->axes.at[st->axis], rows[st->axis]) : 1;
    double n = 0;
    for (uint32_t i = 0; i < st->n_instrs; i++)
        n += st->instrs[i].kind == KOILA_DO_RUN;
    for (uint32_t k = 0; st->inner && k < st->inner->plan->schedule.n_stages; k++)
        n += calls_of(st->inner->plan->placed, &st->inner->plan->schedule.stages[k].stage,
                      st->inner->plan->rows);
    return n * n_slices;
}

double koila__way_time(const koila__way *w)
{
    double time = w->schedule.work;
    for (uint32_t k = 0; k < w->schedule.n_stages; k++)
        time +=
            KOILA_COST_BYTES_PER_CALL * calls_of(w->placed, &w->schedule.stages[k].stage, w->rows);
    return time;
}

double koila__recorded_time(const koila__schedule *s)
{
    return s->work_recorded + KOILA_COST_BYTES_PER_CALL * s->n_needed;
}

bool koila__is_enough(const koila__planning *q, const koila__way *w)
{
    const double recorded = koila__recorded_time(&w->schedule);
    const double least = q->rows_time > recorded ? q->rows_time : recorded;
    return koila__is_spent(q->effort) && koila__way_fits(q, w) &&
           koila__way_time(w) <= KOILA_COST_FORWARD_AGAIN * least &&
           w->schedule.work <= KOILA_COST_FORWARD_AGAIN * w->schedule.work_recorded;
}

/* Is way b along another axis better than a, of which either may not fit? */
bool koila__way_is_better(const koila__planning *q, const koila__way *b, const koila__way *a)
{
    const bool fits_a = koila__way_fits(q, a);
    const bool fits_b = koila__way_fits(q, b);
    if (fits_a != fits_b)
        return fits_b;
    if (fits_a && !koila__is_frugal(q->options))
        return koila__way_time(b) < koila__way_time(a);
    if (a->is_bound || b->is_bound)
        return b->bound < a->bound;
    return b->peak < a->peak;
}

koila__way koila__way_so_far(const koila__planning *q)
{
    const koila_plan *p = q->plan;
    return (koila__way){ .placed = p->placed,
                         .schedule = p->schedule,
                         .targets = p->targets,
                         .rows = p->rows,
                         .peak = p->info.peak_bytes,
                         .accepted = q->accepted };
}

void koila__way_swap(koila__way *a, koila__way *b)
{
    const koila__way was = *a;
    *a = *b;
    *b = was;
}

void koila__way_free(koila__way *s)
{
    if (!s->placed)
        return;
    koila__schedule_deinit(&s->schedule);
    koila__placed_free(s->placed);
}

/* Room for the targets and rows of *s. */
koila_status koila__way_room(const koila__planning *q, koila__way *s)
{
    koila__arena *arena = &q->plan->arena;
    s->targets = koila__arena_array(arena, q->n_targets, sizeof *s->targets);
    s->rows = koila__arena_array(arena, (size_t)q->graph->axes.n + 1, sizeof *s->rows);
    return s->targets && s->rows ? KOILA_OK : KOILA_NO_MEMORY;
}

/* Schedules s->placed, keeping all. */
koila_status koila__way_keep_all(const koila__planning *q, koila__way *s)
{
    koila__spend(q->effort, KOILA_COST_NS_LOOPS + KOILA_COST_NS_SCHEDULE,
                 s->placed->graph->nodes.n);
    return koila__schedule_init(&s->schedule, s->placed, s->targets, q->n_targets,
                                (koila__keep){ .horizon = UINT32_MAX }, q->mem, q->err);
}

koila_status koila__way_whole(koila__planning *q, const koila__way **out)
{
    koila__way w = { 0 };
    *out = &q->whole;
    if (q->whole.placed)
        return KOILA_OK;
    KOILA_TRY(koila__way_room(q, &w));
    KOILA_TRY(koila__way_place(q, koila__place_whole, w.targets, &w.placed));
    koila__rows_for(q->graph, 1, w.rows);
    const koila_status status = koila__way_keep_all(q, &w);
    if (status == KOILA_OK)
        q->whole = w;
    else
        koila__placed_free(w.placed);
    return status;
}

/* The node that runs at the peak of s in s->rows, or KOILA_NONE. */
koila_node koila__way_peak_node(const koila__planning *q, const koila__way *s)
{
    const koila__live_options live = { .rows = s->rows,
                                       .workspace = q->options->workspace,
                                       .spared = q->options->spared,
                                       .user = q->options->user };
    return koila__live_simulate(s->placed, &s->schedule, &live, NULL, NULL, NULL).peak_node;
}
