/* plan.c — the fewest slices that fit. One slice is the recorded order as it is (bit-equal to eager). Otherwise the graph is placed, scheduled under
 * a few keep policies (schedule.h), and simulated for 2, 4, 8, … slices until one fits the budget; of the policies that fit the cheapest in work wins.
 * Schedules do not depend on the number of rows, so each is made once. */
#include "koila/plan.h"

#include "live.h"
#include "plan_costs.h"
#include "table.h"

#include <math.h>

#define MAX_POLICIES 6

struct koila_plan {
    koila_allocator mem;
    koila__placed *placed;
    koila__schedule schedule;
    koila_plan_info info;
    koila_value *targets;
    int64_t *rows; /* [axes] */
    koila_gather *gathers;
    koila_gather *largest;
    uint32_t n_largest;
    koila_curve_point *curve;
    uint32_t n_curve;
    koila__arena arena;
};

typedef struct candidate {
    koila__schedule schedule;
    bool made;
} candidate;

static koila__live simulate(const koila__placed *p, const koila__schedule *s, const koila_plan_options *o, const int64_t *rows, uint64_t *stage_peaks)
{
    const koila__live_options live = { rows, o->workspace, o->user };
    return koila__live_simulate(p, s, &live, stage_peaks, NULL, NULL);
}

/* The axis with the most loop nodes; 0 when nothing is in a loop. */
static uint16_t main_axis(const koila__placed *p)
{
    uint32_t best = 0;
    uint16_t axis = 0;
    for (uint32_t a = 0; a < p->graph->axes.n; a++) {
        uint32_t n = 0;
        for (uint32_t k = 0; k < p->graph->nodes.n; k++) n += p->node[k].in_loop && p->node[k].axis == a;
        if (n > best) best = n, axis = (uint16_t)a;
    }
    return axis;
}

static koila_status map_targets(const koila__placed *p, const koila_value *targets, uint32_t n, koila_value *out)
{
    for (uint32_t i = 0; i < n; i++)
        if ((out[i] = p->lowered[targets[i]]) == KOILA_NONE) return KOILA_BAD_ARGUMENT;
    return KOILA_OK;
}

/* Rows of a slice of every axis when the main one is cut into n. */
static void rows_for(const koila_graph *g, int64_t n_slices, int64_t *rows)
{
    for (uint32_t a = 0; a < g->axes.n; a++) {
        rows[a] = (g->axes.at[a] + n_slices - 1) / n_slices;
        if (rows[a] < 1) rows[a] = 1;
    }
}

static uint32_t policies(const koila__schedule *all, uint32_t keep, koila__keep *out)
{
    uint32_t n = 0;
    if (keep != KOILA_KEEP_NONE) out[n++] = (koila__keep){ .horizon = UINT32_MAX };
    if (keep != KOILA_KEEP_ALL) {
        const double factors[] = KOILA_SPACING_FACTORS, root = sqrt((double)all->n_loops);
        if (keep == KOILA_KEEP_AUTO && all->n_loops > 4)
            for (size_t i = 0; i < KOILA_COUNT(factors); i++) {
                const uint32_t spacing = (uint32_t)(root * factors[i] + 0.5);
                out[n++] = (koila__keep){ .horizon = spacing + 2, .spacing = spacing };
            }
        out[n++] = (koila__keep){ .horizon = 0 };
    }
    return n;
}

static bool fill_curve(void *user, uint32_t stage, koila_node node, uint64_t bytes)
{
    koila_plan *p = user;
    if (p->n_curve < UINT32_MAX && p->curve) p->curve[p->n_curve++] = (koila_curve_point){ stage, node, bytes };
    return true;
}
static bool count_curve(void *user, uint32_t stage, koila_node node, uint64_t bytes)
{
    (void)stage, (void)node, (void)bytes;
    ++*(uint32_t *)user;
    return true;
}

/* Gathers of needed nodes; facts for people; stage peaks. */
static koila_status describe(koila_plan *p, const koila_plan_options *o)
{
    const koila_graph *g = p->placed->graph;
    const koila__live_options live = { p->rows, o->workspace, o->user };
    uint32_t n_gathers = 0, n_points = 0;
    for (int pass = 0; pass < 2; pass++) {
        n_gathers = 0;
        for (uint32_t n = 0; n < g->nodes.n; n++) {
            if (!p->placed->node[n].gathered) continue;
            const koila_sig_info *s = koila__node_sig(g, n);
            for (uint32_t i = 0; i < s->n_inputs; i++) {
                const koila_value v = g->inputs.at[g->nodes.at[n].first_input + i];
                const koila_node q = g->values.at[v].node;
                if (q == KOILA_NONE || !p->placed->node[q].in_loop || p->placed->value[v].kind != KOILA_S) continue;
                if (pass) p->gathers[n_gathers] = (koila_gather){ n, v, koila__value_meta(g, v)->n_bytes };
                n_gathers++;
            }
        }
        if (!pass && !(p->gathers = koila__arena_array(&p->arena, n_gathers, sizeof *p->gathers))) return KOILA_NO_MEMORY;
    }
    p->info.n_gathers = n_gathers;
    uint64_t *peaks = koila__arena_array(&p->arena, p->schedule.n_stages, sizeof *peaks);
    if (!peaks) return KOILA_NO_MEMORY;
    const koila__live result = koila__live_simulate(p->placed, &p->schedule, &live, peaks, count_curve, &n_points);
    if (!(p->curve = koila__arena_array(&p->arena, n_points, sizeof *p->curve))) return KOILA_NO_MEMORY;
    koila__live_simulate(p->placed, &p->schedule, &live, NULL, fill_curve, p);
    for (uint32_t k = 0; k < p->schedule.n_stages; k++) p->schedule.stages[k].stage.peak_bytes = peaks[k];
    p->info.peak_bytes = result.peak_bytes;
    p->info.peak_node = result.peak_node;
    enum { N_LARGEST = 32 };
    koila_value values[N_LARGEST];
    uint64_t bytes[N_LARGEST];
    p->n_largest = koila__live_at_peak(p->placed, &p->schedule, &live, result.peak_bytes, &p->mem, values, bytes, N_LARGEST);
    if (!(p->largest = koila__arena_array(&p->arena, p->n_largest, sizeof *p->largest))) return KOILA_NO_MEMORY;
    for (uint32_t i = 0; i < p->n_largest; i++) p->largest[i] = (koila_gather){ g->values.at[values[i]].node, values[i], bytes[i] };
    return KOILA_OK;
}

/* "234.6 KiB" */
static const char *size_text(char out[32], uint64_t bytes)
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    double n = (double)bytes;
    uint32_t u = 0;
    for (; n >= 1024 && u < 4; u++) n /= 1024;
    snprintf(out, 32, u ? "%.1f %s" : "%.0f %s", n, units[u]);
    return out;
}

/* Names the largest values, each as "f32[64, 128] 32.0 KiB aten::mm train.py:12" while there is room. */
static void word_no_fit(koila_error *err, const koila_plan *p, const koila_graph *recorded, uint64_t budget)
{
    char largest[160] = "", needs[32], there[32], bytes[32];
    size_t used = 0;
    for (uint32_t i = 0; i < p->n_largest && i < 3; i++) {
        const koila_graph *g = p->placed->graph;
        const koila_node n = p->largest[i].node;
        const koila_meta_info *m = koila__value_meta(g, p->largest[i].value);
        char one[160], shape[64] = "";
        size_t at = 0;
        for (uint32_t d = 0; d < m->n_dims && at < sizeof shape; d++)
            at += (size_t)snprintf(shape + at, sizeof shape - at, "%s%lld", d ? ", " : "", (long long)m->size[d]);
        const uint32_t line = n == KOILA_NONE ? KOILA_NONE : koila_node_get(recorded, koila_plan_recorded(p, n)).line;
        const char *file = line == KOILA_NONE ? "" : koila_graph_line_file(recorded, line), *slash = strrchr(file, '/');
        int k = snprintf(one, sizeof one, "%s%s[%s] %s %s", i ? ", " : "", koila_dtype_text(m->dtype), shape, size_text(bytes, p->largest[i].bytes),
                         n == KOILA_NONE ? "input" : koila_op_name(g->table, koila__node_sig(g, n)->op));
        if (k > 0 && (size_t)k < sizeof one && line != KOILA_NONE)
            k += snprintf(one + k, sizeof one - (size_t)k, " %s:%u", slash ? slash + 1 : file, koila_graph_line_number(recorded, line));
        if (k < 0 || used + (size_t)k >= sizeof largest) break;
        memcpy(largest + used, one, (size_t)k + 1);
        used += (size_t)k;
    }
    koila__fail(err, KOILA_OOM, 0, "a slice of %lld row(s) needs %s, %s are there, %llu bytes short; largest: %s", (long long)p->info.rows,
                size_text(needs, p->info.peak_bytes), size_text(there, budget), (unsigned long long)(p->info.peak_bytes - budget), largest);
}

koila_status koila_plan_new(const koila_graph *graph, const koila_value *targets, uint32_t n_targets, const koila_plan_options *options,
                            const koila_allocator *mem, koila_plan **out, koila_error *err)
{
    const koila_allocator a = koila__allocator(mem);
    koila__placed *whole = NULL, *placed = NULL;
    candidate candidates[MAX_POLICIES] = { 0 };
    koila__schedule one = { 0 };
    bool one_made = false;
    koila_status status;
    koila_plan *p = koila__realloc(&a, NULL, 0, sizeof *p);
    if (!p) return koila__fail(err, KOILA_NO_MEMORY, 0, "plan: the host is out of memory");
    memset(p, 0, sizeof *p);
    p->mem = a;
    koila__arena_init(&p->arena, mem);
    p->targets = koila__arena_array(&p->arena, n_targets, sizeof *p->targets);
    p->rows = koila__arena_array(&p->arena, graph->axes.n + 1, sizeof *p->rows);
    int64_t *rows = koila__arena_array(&p->arena, graph->axes.n + 1, sizeof *rows);
    status = KOILA_NO_MEMORY;
    if (!p->targets || !p->rows || !rows) goto done;
    for (uint32_t i = 0; i < n_targets; i++)
        if (targets[i] >= graph->values.n) {
            status = koila__fail(err, KOILA_BAD_ARGUMENT, 0, "plan: target %u is no value of the graph", targets[i]);
            goto done;
        }
    int64_t largest_axis = 1;
    for (uint32_t i = 0; i < graph->axes.n; i++)
        if (graph->axes.at[i] > largest_axis) largest_axis = graph->axes.at[i];

    bool chosen = false;
    uint32_t policy = 0;
    int64_t n_slices = 1;
    if (options->rows <= 0 || options->rows >= largest_axis) { /* as it was recorded */
        if ((status = koila__place_whole(graph, targets, n_targets, mem, &whole, err)) != KOILA_OK) goto done;
        if ((status = map_targets(whole, targets, n_targets, p->targets)) != KOILA_OK) goto done;
        if ((status = koila__schedule_init(&one, whole, p->targets, n_targets, (koila__keep){ .horizon = UINT32_MAX }, mem, err)) != KOILA_OK) goto done;
        one_made = true;
        rows_for(graph, 1, rows);
        const koila__live live = simulate(whole, &one, options, rows, NULL);
        chosen = live.peak_bytes <= options->budget_bytes || options->rows > 0 || largest_axis <= 1;
    }
    if (!chosen) {
        if ((status = koila__place(graph, targets, n_targets, mem, &placed, err)) != KOILA_OK) goto done;
        koila_check(koila__placed_check(placed, NULL));
        if ((status = map_targets(placed, targets, n_targets, p->targets)) != KOILA_OK) goto done;
        koila__keep keeps[MAX_POLICIES] = { { .horizon = UINT32_MAX } };
        if ((status = koila__schedule_init(&candidates[0].schedule, placed, p->targets, n_targets, keeps[0], mem, err)) != KOILA_OK) goto done;
        candidates[0].made = true;
        const uint32_t n_policies = policies(&candidates[0].schedule, options->keep, keeps);
        for (uint32_t k = 0; k < n_policies; k++) {
            if (candidates[k].made && k == 0 && keeps[0].horizon == UINT32_MAX) continue;
            if (candidates[k].made) koila__schedule_deinit(&candidates[k].schedule), candidates[k].made = false;
            if ((status = koila__schedule_init(&candidates[k].schedule, placed, p->targets, n_targets, keeps[k], mem, err)) != KOILA_OK) goto done;
            candidates[k].made = true;
        }
        double least_work = candidates[0].schedule.work;
        for (uint32_t k = 1; k < n_policies; k++)
            if (candidates[k].schedule.work < least_work) least_work = candidates[k].schedule.work;
        const int64_t batch = graph->axes.n ? graph->axes.at[main_axis(placed)] : 1;
        for (n_slices = options->rows > 0 ? 0 : 2;; n_slices = n_slices * 2 < batch ? n_slices * 2 : batch) {
            if (options->rows > 0)
                for (uint32_t i = 0; i < graph->axes.n; i++) rows[i] = options->rows < graph->axes.at[i] ? options->rows : graph->axes.at[i];
            else
                rows_for(graph, n_slices, rows);
            /* with no limit but forced rows, little memory is what was asked for; with a limit, little work */
            const bool frugal = options->rows > 0 && options->budget_bytes == UINT64_MAX;
            double best = -1, least_peak = -1;
            uint32_t smallest = 0;
            for (uint32_t k = 0; k < n_policies; k++) {
                const koila__schedule *s = &candidates[k].schedule;
                const koila__live live = simulate(placed, s, options, rows, NULL);
                if (least_peak < 0 || (double)live.peak_bytes < least_peak) least_peak = (double)live.peak_bytes, smallest = k;
                if (live.peak_bytes > options->budget_bytes || (frugal && s->work > KOILA_COST_MODERATE * least_work)) continue;
                const double score = frugal ? (double)live.peak_bytes : s->work;
                if (best < 0 || score < best) best = score, policy = k;
            }
            if (best >= 0) break;
            policy = smallest;
            if (options->rows > 0 || n_slices >= batch) break; /* the caller learns by the peak */
        }
        p->placed = placed;
        p->schedule = candidates[policy].schedule;
        candidates[policy].made = false;
        placed = NULL;
    } else {
        p->placed = whole;
        p->schedule = one;
        one_made = false;
        whole = NULL;
    }
    memcpy(p->rows, rows, (graph->axes.n + 1) * sizeof *rows);
    const uint16_t axis = chosen ? 0 : main_axis(p->placed);
    p->info = (koila_plan_info){ .struct_size = sizeof p->info, .budget_bytes = options->budget_bytes, .n_stages = p->schedule.n_stages,
                                 .n_loops = p->schedule.n_loops, .n_recorded = p->schedule.n_needed };
    p->info.batch = chosen ? largest_axis : graph->axes.at[axis];
    p->info.rows = chosen ? largest_axis : p->rows[axis];
    p->info.n_slices = chosen ? 1 : koila__n_slices(p->info.batch, p->info.rows);
    p->info.replay_ratio = p->schedule.work_recorded > 0 ? p->schedule.work / p->schedule.work_recorded : 1;
    if ((status = describe(p, options)) != KOILA_OK) goto done;
    koila_check(koila_plan_check(p, NULL));
    if (p->info.peak_bytes > options->budget_bytes) {
        status = KOILA_OOM;
        word_no_fit(err, p, graph, options->budget_bytes);
    }
done:
    for (uint32_t k = 0; k < MAX_POLICIES; k++)
        if (candidates[k].made) koila__schedule_deinit(&candidates[k].schedule);
    if (one_made) koila__schedule_deinit(&one);
    koila__placed_free(whole);
    koila__placed_free(placed);
    if (status != KOILA_OK) {
        koila_plan_free(p);
        return status;
    }
    *out = p;
    return KOILA_OK;
}

void koila_plan_free(koila_plan *p)
{
    if (!p) return;
    const koila_allocator mem = p->mem;
    koila__schedule_deinit(&p->schedule);
    koila__placed_free(p->placed);
    koila__arena_deinit(&p->arena);
    koila__release(&mem, p, sizeof *p);
}

koila_plan_info koila_plan_get(const koila_plan *p) { return p->info; }
const koila_graph *koila_plan_graph(const koila_plan *p) { return p->placed->graph; }
const koila_stage *koila_plan_stage(const koila_plan *p, uint32_t stage) { return &p->schedule.stages[stage].stage; }
koila_value koila_plan_target(const koila_plan *p, uint32_t target) { return p->targets[target]; }
koila_value koila_plan_leaf(const koila_plan *p, koila_value recorded) { return p->placed->lowered[recorded]; }
koila_node koila_plan_recorded(const koila_plan *p, koila_node lowered) { return p->placed->node[lowered].recorded; }
bool koila_plan_in_loop(const koila_plan *p, koila_node n) { return p->placed->node[n].in_loop; }
int64_t koila_plan_axis_rows(const koila_plan *p, uint16_t axis) { return p->rows[axis]; }
uint32_t koila_plan_slices(const koila_plan *p, uint16_t axis) { return koila__n_slices(p->placed->graph->axes.at[axis], p->rows[axis]); }
koila_gather koila_plan_gather(const koila_plan *p, uint32_t i) { return p->gathers[i]; }
uint64_t koila_plan_value_bytes(const koila_plan *p, koila_value v, int64_t rows) { return koila__live_bytes(p->placed, v, rows); }

static koila_share share_of(koila_placement x)
{
    koila_share s = { .axis = x.axis, .dim = x.dim, .outer = x.outer, .inner = x.inner };
    if (x.kind == KOILA_S) s.kind = KOILA_SHARE_SLICE;
    if (x.kind == KOILA_P) s.kind = KOILA_SHARE_PARTIAL, s.partial = x.combine;
    return s;
}
koila_share koila_plan_share(const koila_plan *p, koila_value v) { return share_of(p->placed->value[v]); }
koila_share koila_plan_need(const koila_plan *p, koila_node n, uint32_t input)
{
    return share_of(p->placed->need[p->placed->graph->nodes.at[n].first_input + input]);
}

uint32_t koila_plan_curve(const koila_plan *p, koila_curve_point *out, uint32_t cap)
{
    if (p->n_curve <= cap) {
        if (p->n_curve) memcpy(out, p->curve, p->n_curve * sizeof *out);
        return p->n_curve;
    }
    for (uint32_t i = 0; i < cap; i++) { /* of each run of points the highest, so the peak survives */
        const uint64_t begin = (uint64_t)i * p->n_curve / cap, end = (uint64_t)(i + 1) * p->n_curve / cap;
        out[i] = p->curve[begin];
        for (uint64_t k = begin; k < end; k++)
            if (p->curve[k].bytes > out[i].bytes) out[i] = p->curve[k];
    }
    return cap;
}

uint32_t koila_plan_largest(const koila_plan *p, koila_gather *out, uint32_t cap)
{
    const uint32_t n = p->n_largest < cap ? p->n_largest : cap;
    if (n) memcpy(out, p->largest, n * sizeof *out);
    return n;
}

/* ---- adapting a call to its slice */

static void slice_sizes(const koila_meta_info *m, koila_placement x, int64_t rows, int64_t *size)
{
    for (uint32_t d = 0; d < m->n_dims; d++) size[d] = m->size[d];
    if (x.kind == KOILA_S) size[x.dim] = koila__extent(x, rows);
}

/* Strides of a dense tensor of `size` whose dimensions lie in memory in the order of m's strides. */
static void dense_strides(const koila_meta_info *m, const int64_t *size, int64_t *stride)
{
    int64_t step = 1;
    bool done[KOILA_MAX_DIMS] = { 0 };
    for (uint32_t k = 0; k < m->n_dims; k++) {
        uint32_t next = KOILA_NONE;
        for (uint32_t d = m->n_dims; d-- > 0;) /* innermost first; of equal strides the last dimension */
            if (!done[d] && (next == KOILA_NONE || m->stride[d] < m->stride[next])) next = d;
        done[next] = true;
        stride[next] = step;
        if (size[next] > 1) step *= size[next];
    }
}

uint32_t koila_plan_adapt(const koila_plan *p, koila_node n, int32_t link, int64_t rows, koila_adapt *out)
{
    const koila_graph *g = p->placed->graph;
    const koila_table *t = g->table;
    const koila__placed_node *pn = &p->placed->node[n];
    const koila_sig_info *s = koila__node_sig(g, n);
    const koila__fix *fix = pn->fix;
    if (link >= 0) {
        if (!pn->link) return 0;
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
        const bool of_input = fix[k].output >= 1000;
        const uint32_t which = of_input ? fix[k].output - 1000u : fix[k].output;
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
            for (uint32_t i = 0; i < list->n && i < KOILA_MAX_DIMS; i++) a->ints[i] = list[1 + i].u.i;
            if (x.kind == KOILA_S && x.dim < list->n && a->ints[x.dim] != -1) a->ints[x.dim] = koila__extent(x, rows);
            break;
        }
        case KOILA__FIX_STRIDES:
            a->kind = KOILA_ADAPT_INTS;
            a->n = m->n_dims;
            slice_sizes(m, x, rows, size);
            dense_strides(m, size, a->ints);
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
            for (uint32_t i = 0; i < a->n && i < KOILA_MAX_DIMS; i++) a->ints[i] = batch ? first[is_list + i].u.i / batch * rows : 0;
            break;
        }
        case KOILA__FIX_SCALE: a->kind = KOILA_ADAPT_SCALE; break;
        case KOILA__FIX_ALIAS: a->kind = KOILA_ADAPT_ALIAS; break;
        case KOILA__FIX_DIMS: {
            a->kind = KOILA_ADAPT_SQUEEZE;
            const koila_meta_info *in = koila__meta(t, s->inputs[0]);
            const koila_arg *named = s->n_pos > 1 ? &s->tokens[s->start[1]] : NULL;
            const uint32_t n_named = !named ? in->n_dims : named->kind == KOILA_ARG_LIST ? named->n : 1;
            for (uint32_t i = 0; i < n_named; i++) {
                int64_t d = !named ? i : named->kind == KOILA_ARG_LIST ? named[1 + i].u.i : named->u.i;
                if (d < 0) d += in->n_dims;
                if (d >= 0 && d < in->n_dims && in->size[d] == 1 && a->n < KOILA_MAX_DIMS) a->ints[a->n++] = d;
            }
            break;
        }
        default: n_out--; break;
        }
    }
    return n_out;
}

/* ---- the invariants: replay the instructions with flags instead of tensors */

bool koila_plan_check(const koila_plan *p, koila_error *err)
{
    const koila_graph *g = p->placed->graph;
    const uint32_t V = g->values.n + 1;
    uint8_t *flags = koila__realloc(&p->mem, NULL, 0, V);
    if (!flags) return true; /* cannot tell */
    enum { WHOLE = 1, LOCAL = 2, KEPT = 4, MADE = 8 };
    bool ok = true;
    memset(flags, 0, V);
#define HOLDS(e, ...)                                                          \
    do {                                                                       \
        if (ok && !(e)) ok = false, koila__fail(err, KOILA_BAD_INPUT, k, __VA_ARGS__); \
    } while (0)
    for (uint32_t v = 0; v < g->values.n; v++)
        if (g->values.at[v].node == KOILA_NONE) flags[v] = WHOLE;
    for (uint32_t k = 0; k < p->schedule.n_stages && ok; k++) {
        const koila_stage *st = &p->schedule.stages[k].stage;
        for (uint32_t i = 0; i < st->n_instrs && ok; i++) {
            const koila_instr in = st->instrs[i];
            const uint32_t v = in.id;
            switch ((koila_instr_kind)in.kind) {
            case KOILA_DO_RUN: {
                const koila_sig_info *s = koila__node_sig(g, in.id);
                for (uint32_t u = 0; u < s->n_inputs; u++) {
                    const koila_value x = g->inputs.at[g->nodes.at[in.id].first_input + u];
                    const bool whole = !st->is_loop || p->placed->need[g->nodes.at[in.id].first_input + u].kind == KOILA_R;
                    HOLDS(flags[x] & (whole ? WHOLE | LOCAL : LOCAL), "node %u (%s): input %u is not there", in.id, koila_op_name(g->table, s->op), u);
                }
                for (uint32_t o = 0; o < s->n_outputs; o++)
                    if (s->outputs[o] != KOILA_NONE) {
                        HOLDS(!(flags[g->nodes.at[in.id].first_output + o] & (st->is_loop ? LOCAL : WHOLE)), "node %u runs twice in a slice", in.id);
                        flags[g->nodes.at[in.id].first_output + o] |= st->is_loop ? LOCAL : WHOLE;
                    }
                break;
            }
            case KOILA_DO_SLICE: HOLDS(flags[v] & WHOLE, "value %u is sliced before it is whole", v); flags[v] |= LOCAL; break;
            case KOILA_DO_FETCH: HOLDS(flags[v] & KEPT, "value %u is fetched but not kept", v); flags[v] |= LOCAL; break;
            case KOILA_DO_KEEP: HOLDS(flags[v] & LOCAL, "value %u is kept before it is made", v); flags[v] |= KEPT; break;
            case KOILA_DO_ADD:
            case KOILA_DO_PUT: HOLDS(flags[v] & LOCAL, "value %u is collected before it is made", v); flags[v] |= MADE; break;
            case KOILA_DO_FREE:
                HOLDS(flags[v] & (st->is_loop ? LOCAL : WHOLE), "value %u is freed but not there", v);
                flags[v] &= (uint8_t)~(st->is_loop ? LOCAL : WHOLE);
                break;
            }
        }
        for (uint32_t v = 0; v < g->values.n && st->is_loop; v++) {
            HOLDS(!(flags[v] & LOCAL), "value %u outlives its slice", v);
            if (flags[v] & MADE) flags[v] = (uint8_t)((flags[v] & ~MADE) | WHOLE);
        }
    }
#undef HOLDS
    koila__release(&p->mem, flags, V);
    return ok;
}
