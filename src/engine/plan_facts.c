/* plan_facts.c — the facts of a plan: its getters, peaks, the curve, the largest values, gathers,
 * and why a plan does not fit. */
#include "engine/plan_inside.h"

#include "engine/both.h"
#include "engine/live.h"
#include "engine/share.h"
#include "engine/ways.h"
#include "graph/table.h"

static bool fill_curve(void *user, uint32_t stage, koila_node node, uint64_t bytes)
{
    koila_plan *p = user;
    koila_assert(p->n_curve < p->n_curve_max);
    p->curve[p->n_curve++] = (koila_curve_point){ stage, node, bytes };
    return true;
}

/* Does node n need its input i whole, though every slice has a share of it? */
static bool is_gathered(const koila__placed *p, koila_node n, uint32_t i)
{
    const koila_graph *g = p->graph;
    const uint32_t at = g->nodes.at[n].first_input + i;
    const koila_value v = g->inputs.at[at];
    return g->values.at[v].node != KOILA_NONE && p->need[at].kind == KOILA_R &&
           koila__is_of_rows(p->value[v]);
}

/* Each gathered value once, with the first node that needs it whole. */
static koila_status find_gathers(koila_plan *p)
{
    const koila_graph *g = p->placed->graph;
    uint32_t most = 0;
    for (koila_node n = 0; n < g->nodes.n; n++)
        if (p->placed->node[n].gathered)
            most += koila__node_sig(g, n)->n_inputs;
    most += koila__both_gathers(p, NULL, 0);
    bool *seen = koila__arena_array(&p->arena, g->values.n, sizeof *seen);
    p->gathers = koila__arena_array(&p->arena, most, sizeof *p->gathers);
    if (!seen || !p->gathers)
        return KOILA_NO_MEMORY;
    for (koila_node n = 0; n < g->nodes.n; n++) {
        if (!p->placed->node[n].gathered)
            continue;
        for (uint32_t i = 0; i < koila__node_sig(g, n)->n_inputs; i++) {
            const koila_value v = g->inputs.at[g->nodes.at[n].first_input + i];
            if (seen[v] || !is_gathered(p->placed, n, i))
                continue;
            seen[v] = true;
            koila_assert(p->info.n_gathers < most);
            p->gathers[p->info.n_gathers++] =
                (koila_gather){ n, v, koila__value_meta(g, v)->n_bytes };
        }
    }
    p->info.n_gathers +=
        koila__both_gathers(p, p->gathers + p->info.n_gathers, most - p->info.n_gathers);
    return KOILA_OK;
}

/* Room for every point of the curve. */
static koila_status make_curve(koila_plan *p)
{
    uint64_t n_points = 0;
    for (uint32_t k = 0; k < p->schedule.n_stages; k++) {
        const koila_stage *st = &p->schedule.stages[k].stage;
        uint64_t n_slices = 1;
        uint64_t n_runs = 0;
        uint64_t n_once = 0; /* runs of pieces */
        if (st->is_loop)
            n_slices = koila__count_slices(p->placed, st->axis, p->rows[st->axis], NULL);
        if (n_slices > KOILA__LIVE_MAX_WALKED && !(p->placed->cut && p->placed->cut[st->axis]))
            n_slices = KOILA__LIVE_MAX_WALKED;
        n_runs += st->inner != NULL;
        for (uint32_t i = 0; i < st->n_instrs; i++)
            if (st->instrs[i].kind == KOILA_DO_RUN) {
                const bool is_piece = p->placed->node[st->instrs[i].id].end > 0;
                n_once += is_piece;
                n_runs += !is_piece;
            }
        n_points += n_runs * n_slices + n_once;
    }
    if (n_points >= UINT32_MAX)
        return KOILA_NO_MEMORY;
    p->curve = koila__arena_room(&p->arena, n_points * sizeof *p->curve);
    if (!p->curve)
        return KOILA_NO_MEMORY;
    p->n_curve_max = (uint32_t)n_points;
    return KOILA_OK;
}

uint64_t koila__plan_peak(const koila__placed *p, const koila__schedule *s,
                          const koila_plan_options *o, const int64_t *rows, uint64_t limit)
{
    const koila__live_options live = { .rows = rows,
                                       .workspace = o->workspace,
                                       .spared = o->spared,
                                       .user = o->user,
                                       .bytes_only = true,
                                       .limit = limit };
    return koila__live_simulate(p, s, &live, NULL, NULL, NULL).peak_bytes;
}

static double time_ratio_of(const koila_plan *p)
{
    const koila__way way = { .placed = p->placed, .schedule = p->schedule, .rows = p->rows };
    const double recorded = koila__recorded_time(&p->schedule);
    return recorded > 0 ? koila__way_time(&way) / recorded : 1;
}

koila_status koila__plan_describe(koila_plan *p, const koila_plan_options *o, uint64_t known)
{
    enum { N_LARGEST = 32 };
    koila_value values[N_LARGEST];
    uint64_t bytes[N_LARGEST];
    const uint64_t peak = known ? known : koila__plan_peak(p->placed, &p->schedule, o, p->rows, 0);
    const bool fits = peak <= o->budget_bytes;
    koila__live_top top = {
        .at_bytes = peak, .mem = &p->mem, .cap = N_LARGEST, .value = values, .bytes = bytes
    };
    const koila__live_options live = { .rows = p->rows,
                                       .workspace = o->workspace,
                                       .spared = o->spared,
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
    p->info.time_ratio = time_ratio_of(p);
    p->info.peak_bytes = result.peak_bytes;
    p->info.peak_node = result.peak_node;
    p->largest = koila__arena_array(&p->arena, top.n, sizeof *p->largest);
    if (!p->largest)
        return KOILA_NO_MEMORY;
    p->n_largest = top.n;
    for (uint32_t i = 0; i < top.n; i++)
        p->largest[i] =
            (koila_gather){ p->placed->graph->values.at[values[i]].node, values[i], bytes[i] };
    return KOILA_OK;
}

/* ---- why it does not fit */

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

/* "f32[64, 128] 32.0 KiB aten::mm train.py:12", cut to the room. Returns its length before the cut.
 */
static size_t name_value(char *out, size_t room, const koila_plan *p, const koila_graph *recorded,
                         const koila_gather *value)
{
    const koila_graph *g = p->placed->graph;
    const koila_meta_info *m = koila__value_meta(g, value->value);
    const char *op = "input";
    uint32_t line = KOILA_NONE;
    char shape[64] = "";
    char bytes[32];
    size_t at = 0;
    for (uint32_t d = 0; d < m->n_dims && at < sizeof shape; d++)
        at += (size_t)snprintf(shape + at, sizeof shape - at, "%s%lld", d ? ", " : "",
                               (long long)m->size[d]);
    if (value->node != KOILA_NONE) {
        op = koila_op_name(g->table, koila__node_sig(g, value->node)->op);
        line = koila_node_get(recorded, koila_plan_recorded(p, value->node)).line;
    }
    size_t n = (size_t)snprintf(out, room, "%s[%s] %s %s", koila_dtype_text(m->dtype), shape,
                                size_text(bytes, value->bytes), op);
    if (n < room && line != KOILA_NONE) {
        const char *file = koila_graph_line_file(recorded, line);
        const char *slash = strrchr(file, '/');
        n += (size_t)snprintf(out + n, room - n, " %s:%u", slash ? slash + 1 : file,
                              koila_graph_line_number(recorded, line));
    }
    return n;
}

/* "; along dim 1 of the batch 1 of 1024 need 234.6 KiB, of one row 117.3 KiB", or nothing. */
static void name_other(char *out, size_t room, const koila__least *other, const koila__least *both)
{
    char needs[32];
    size_t at = 0;
    out[0] = 0;
    if (other->peak_bytes != UINT64_MAX)
        at = (size_t)snprintf(out, room, "; along dim %u of the batch %lld of %lld need %s%s",
                              other->dim, (long long)other->rows, (long long)other->size,
                              other->is_bound ? "at least " : "",
                              size_text(needs, other->peak_bytes));
    if (both->peak_bytes != UINT64_MAX && at < room)
        snprintf(out + at, room - at, "%s of one row %s%s", at ? "," : "; parts",
                 both->is_bound ? "at least " : "", size_text(needs, both->peak_bytes));
}

/* The first names of the largest values for which there is room. */
static void name_largest(char *out, size_t room, const koila_plan *p, const koila_graph *recorded)
{
    enum { N_NAMED = 3 };
    size_t used = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < p->n_largest && i < N_NAMED; i++) {
        char one[160];
        size_t n = (size_t)snprintf(one, sizeof one, "%s", i ? ", " : "");
        n += name_value(one + n, sizeof one - n, p, recorded, &p->largest[i]);
        if (used + n >= room)
            break;
        memcpy(out + used, one, n + 1);
        used += n;
    }
}

/* Has a plan been made that needs less than `least`, and was not refused within the budget? */
static bool is_less(const koila__least *x, uint64_t budget, uint64_t least)
{
    return !x->is_bound && x->peak_bytes > budget && x->peak_bytes < least;
}

uint64_t koila__plan_least(const koila_plan *p, const koila__least *other, const koila__least *both)
{
    uint64_t least = p->info.peak_bytes;
    if (is_less(other, p->info.budget_bytes, least))
        least = other->peak_bytes;
    if (is_less(both, p->info.budget_bytes, least))
        least = both->peak_bytes;
    return least;
}

koila_status koila__plan_no_fit(const koila_plan *p, const koila_graph *recorded,
                                const koila__least *other, const koila__least *both, uint64_t least,
                                koila_error *err)
{
    char needs[32];
    char there[32];
    char unit[40] = "row(s)";
    char otherwise[140] = "";
    char largest[150];
    size_t at = 0;
    koila_assert(p->info.peak_bytes > p->info.budget_bytes && least > p->info.budget_bytes);
    if (!err)
        return KOILA_OOM;
    const uint64_t missing = least - p->info.budget_bytes;
    if (least != koila__plan_least(p, other, both))
        at = (size_t)snprintf(otherwise, sizeof otherwise, " of the least, %s",
                              size_text(needs, least));
    if (p->info.dim != KOILA_NONE)
        snprintf(unit, sizeof unit, "along dim %u of the batch", p->info.dim);
    else
        name_other(otherwise + at, sizeof otherwise - at, other, both);
    name_largest(largest, sizeof largest - strlen(otherwise), p, recorded);
    return koila__fail_short(
        err, missing, "a slice of %lld %s needs %s, %s are free, %llu bytes short%s; largest: %s",
        (long long)(p->info.rows * p->info.unit), unit, size_text(needs, p->info.peak_bytes),
        size_text(there, p->info.budget_bytes), (unsigned long long)missing, otherwise, largest);
}

/* ---- the getters */

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
    return koila__count_slices(p->placed, axis, p->rows[axis], NULL);
}
int64_t koila_plan_slice_end(const koila_plan *p, uint16_t axis, int64_t begin, int64_t rows)
{
    return koila__slice_end(p->placed, axis, begin, rows);
}
bool koila_plan_has_pieces(const koila_plan *p, uint16_t axis)
{
    return p->placed->cut && p->placed->cut[axis];
}
bool koila_plan_runs_in(const koila_plan *p, koila_node n, int64_t begin, int64_t end)
{
    return koila__runs_in(&p->placed->node[n], begin, end);
}
bool koila_plan_runs_once(const koila_plan *p, koila_node n) { return p->placed->node[n].end > 0; }
koila_absence koila_plan_absence(const koila_plan *p, koila_node n)
{
    const koila__placed_node *node = &p->placed->node[n];
    if (node->joins)
        return KOILA_ABSENT_SKIP;
    return node->sums ? KOILA_ABSENT_SUM : KOILA_ABSENT_ZEROS;
}
bool koila_plan_may_be_absent(const koila_plan *p, koila_value v)
{
    return p->placed->absent && p->placed->absent[v];
}
bool koila_plan_adds_on(const koila_plan *p, koila_value v) { return koila__adds_on(p->placed, v); }
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
    /* the highest of each group of points, so the peak survives */
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
