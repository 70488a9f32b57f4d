/* recompute.c — results are dropped in the forward pass, and computed again for the backward pass.
 *
 * A call that runs again is a second node with second results, so that schedule, liveness and
 * executor know nothing of it: the first results die at their last use in the forward pass, the
 * second ones live from there to the backward pass. Only the uses after `at` change.
 *
 * Which nodes run again is decided backwards from `at`. A dropped result is wanted, so its node
 * runs again, so its inputs are wanted too, or stay: leaves, what another segment made, and what
 * must not run twice (random draws, writes, modules that run as they are, partial sums). Storages
 * stay or go, not values: a view of what stays costs nothing.
 *
 * This is checkpointing by segments (Chen et al. 2016) of a recorded graph: operators, not modules,
 * and the segments end where the fewest bytes cross.
 */
#include "engine/recompute.h"

#include "base/vec.h"
#include "engine/cost.h"
#include "graph/table.h"

#include <stdlib.h>

typedef struct rewriter {
    const koila__placed *from;
    const koila_graph *g; /* of from */
    koila__recompute how;
    koila_allocator mem;
    koila__arena tmp;
    koila_value *root; /* [value] whose storage it lies in */
    bool *stays;       /* [value] as root: the storage is not dropped */
    uint32_t *segment; /* [node up to at] */
    uint32_t last_segment;
    bool *wanted;        /* [value] a second one is wanted */
    bool *is_again;      /* [node] runs again */
    koila_value *first;  /* [value] of `to` */
    koila_value *second; /* [value] of `to`, or KOILA_NONE */
    VEC(koila_node) demand;
    bool *is_demanded; /* [node] */
    /* the result */
    koila_graph *to;
    VEC(koila_placement) value, need;
    VEC(koila__placed_node) node;
    koila__arena keep;
    uint32_t n_again;
} rewriter;

#define TRY_ALLOC(p)                                                                               \
    do {                                                                                           \
        if (!(p))                                                                                  \
            return KOILA_NO_MEMORY;                                                                \
    } while (0)

static const koila_sig_info *sig_of(const rewriter *r, koila_node n)
{
    return koila__node_sig(r->g, n);
}

static koila_node producer(const rewriter *r, koila_value v) { return r->g->values.at[v].node; }

static koila_value input_of(const rewriter *r, koila_node n, uint32_t i)
{
    return r->g->inputs.at[r->g->nodes.at[n].first_input + i];
}

static koila_value output_of(const rewriter *r, koila_node n, uint32_t j)
{
    return r->g->nodes.at[n].first_output + j;
}

/* Does node n read input i as its producer left it: no barrier, and no slice of a whole value? */
static bool is_local(const rewriter *r, koila_node n, uint32_t i)
{
    const koila_value v = input_of(r, n, i);
    const koila_node m = producer(r, v);
    return m != KOILA_NONE && r->from->node[m].in_loop == r->from->node[n].in_loop &&
           r->from->node[m].axis == r->from->node[n].axis &&
           koila__placement_equal(r->from->need[r->g->nodes.at[n].first_input + i],
                                  r->from->value[v]);
}

/* ---- storages */

static void find_roots(rewriter *r)
{
    for (koila_value v = 0; v < r->g->values.n; v++)
        r->root[v] = v;
    for (koila_node n = 0; n < r->g->nodes.n; n++) {
        const koila_sig_info *s = sig_of(r, n);
        const bool is_view = (koila_op_flags(r->g->table, s->op) & KOILA_OP_VIEW) ||
                             (koila_op_facts(r->g->table, s->op) & KOILA_FACT_MAY_ALIAS);
        for (uint32_t j = 0; is_view && !s->n_writes && s->n_inputs && j < s->n_outputs; j++)
            r->root[output_of(r, n, j)] = r->root[input_of(r, n, 0)];
    }
}

static bool is_forward(const rewriter *r, koila_value v)
{
    const koila_node n = producer(r, v);
    return n != KOILA_NONE && n <= r->how.at;
}

/* Results of the forward pass that the backward pass reads are wanted, or stay where it reads them
 * otherwise than they were left. Results of the step stay. */
static void want(rewriter *r, const koila_value *targets, uint32_t n_targets)
{
    for (uint32_t i = 0; i < n_targets; i++)
        r->stays[r->root[targets[i]]] = true;
    for (koila_node n = r->how.at + 1; n < r->g->nodes.n; n++) {
        const koila_sig_info *s = sig_of(r, n);
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const koila_value v = input_of(r, n, i);
            if (!is_forward(r, v) || (s->n_writes && !koila__reads(s, i)))
                continue;
            if (is_local(r, n, i))
                r->wanted[v] = true;
            else
                r->stays[r->root[v]] = true;
        }
    }
}

/* ---- segments */

static uint64_t bytes_of(const rewriter *r, koila_value v)
{
    return r->g->values.at[v].meta == KOILA_NONE ? 0 : koila__value_meta(r->g, v)->n_storage_bytes;
}

/* held[n]: bytes that node n makes for the backward pass. crossing[n]: bytes made up to n that
 * later nodes of the forward pass read. */
static koila_status weigh(rewriter *r, uint64_t *held, uint64_t *crossing)
{
    const koila_node end = r->how.at + 1;
    bool *is_held = koila__arena_array(&r->tmp, r->g->values.n, sizeof *is_held);
    koila_node *last = koila__arena_array(&r->tmp, r->g->values.n, sizeof *last);
    TRY_ALLOC(is_held && last);
    for (koila_value v = 0; v < r->g->values.n; v++)
        if (r->wanted[v])
            is_held[r->root[v]] = true;
    for (koila_node n = 0; n < end; n++)
        for (uint32_t i = 0; i < sig_of(r, n)->n_inputs; i++)
            last[r->root[input_of(r, n, i)]] = n;
    uint64_t now = 0;
    uint64_t *ending = koila__arena_array(&r->tmp, end, sizeof *ending);
    TRY_ALLOC(ending);
    for (koila_node n = 0; n < end; n++) {
        for (uint32_t j = 0; j < sig_of(r, n)->n_outputs; j++) {
            const koila_value v = output_of(r, n, j);
            if (r->root[v] != v)
                continue;
            held[n] += is_held[v] ? bytes_of(r, v) : 0;
            if (last[v] > n) {
                now += bytes_of(r, v);
                ending[last[v]] += bytes_of(r, v);
            }
        }
        now -= ending[n];
        crossing[n] = now;
    }
    return KOILA_OK;
}

/* Ends each segment near its share of the held bytes, where the fewest bytes cross. */
static koila_status cut(rewriter *r)
{
    const koila_node end = r->how.at + 1;
    const double n_segments = r->how.n_segments;
    uint64_t *held = koila__arena_array(&r->tmp, end, sizeof *held);
    uint64_t *crossing = koila__arena_array(&r->tmp, end, sizeof *crossing);
    TRY_ALLOC(held && crossing);
    KOILA_TRY(weigh(r, held, crossing));
    uint64_t all = 0;
    for (koila_node n = 0; n < end; n++)
        all += held[n];
    uint64_t sum = 0;
    uint32_t number = 0;
    for (koila_node n = 0; n < end && all; number++) {
        koila_node best = KOILA_NONE;
        for (koila_node k = n; k < end; k++) {
            const double share = (double)(sum += held[k]) / (double)all * n_segments - number;
            if (share > 1.25 && best != KOILA_NONE)
                break;
            if (share >= 0.75 && (best == KOILA_NONE || crossing[k] <= crossing[best]))
                best = k;
        }
        if (best == KOILA_NONE || number + 1 >= r->how.n_segments)
            best = end - 1;
        for (sum = 0; n <= best; n++)
            r->segment[n] = number;
        for (koila_node k = 0; k < n; k++)
            sum += held[k];
    }
    r->last_segment = number ? number - 1 : 0;
    return KOILA_OK;
}

/* ---- what runs again */

static bool can_run_again(const rewriter *r, koila_node n)
{
    const koila_sig_info *s = sig_of(r, n);
    const uint32_t flags = koila_op_flags(r->g->table, s->op);
    if (s->n_writes || (flags & (KOILA_OP_RANDOM | KOILA_OP_OPAQUE)) ||
        r->segment[n] == r->last_segment)
        return false;
    for (uint32_t j = 0; j < s->n_outputs; j++)
        if (r->from->value[output_of(r, n, j)].kind == KOILA_P)
            return false;
    return !r->how.keeps_expensive || !koila__cost_of(r->g->table, s).expensive;
}

/* Node n runs again: its inputs are wanted, or stay. */
static void want_inputs(rewriter *r, koila_node n)
{
    for (uint32_t i = 0; i < sig_of(r, n)->n_inputs; i++) {
        const koila_value v = input_of(r, n, i);
        if (producer(r, v) == KOILA_NONE)
            continue;
        if (is_local(r, n, i) && r->segment[producer(r, v)] == r->segment[n])
            r->wanted[v] = true;
        else
            r->stays[r->root[v]] = true;
    }
}

static void choose(rewriter *r)
{
    for (koila_node n = r->how.at + 1; n-- > 0;) {
        const uint32_t n_outputs = sig_of(r, n)->n_outputs;
        bool is_wanted = false;
        for (uint32_t j = 0; j < n_outputs; j++) {
            const koila_value v = output_of(r, n, j);
            r->wanted[v] &= !r->stays[r->root[v]];
            is_wanted |= r->wanted[v];
        }
        if (!is_wanted)
            continue;
        if (can_run_again(r, n)) {
            r->is_again[n] = true;
            r->n_again++;
            want_inputs(r, n);
            continue;
        }
        for (uint32_t j = 0; j < n_outputs; j++) {
            const koila_value v = output_of(r, n, j);
            if (r->wanted[v])
                r->stays[r->root[v]] = true;
            r->wanted[v] = false;
        }
    }
}

/* ---- the second step */

/* Appends node n of the first step, with inputs `in` of the second. */
static koila_status append(rewriter *r, koila_node n, const koila_value *in, koila_value *first)
{
    const koila_node_info info = r->g->nodes.at[n];
    const koila_sig_info *s = sig_of(r, n);
    KOILA_TRY(koila_graph_node(r->to, info.sig, in, info.line, first));
    if (!koila__vec_reserve(&r->mem, &r->value, s->n_outputs) ||
        !koila__vec_reserve(&r->mem, &r->need, s->n_inputs) ||
        !koila__vec_push(&r->mem, &r->node, r->from->node[n]))
        return KOILA_NO_MEMORY;
    for (uint32_t j = 0; j < s->n_outputs; j++)
        r->value.at[r->value.n++] = r->from->value[info.first_output + j];
    for (uint32_t i = 0; i < s->n_inputs; i++)
        r->need.at[r->need.n++] = r->from->need[info.first_input + i];
    return KOILA_OK;
}

/* The value that node n reads as input i: is_second: the second one, where there is one. */
static koila_value now(const rewriter *r, koila_node n, uint32_t i, bool is_second)
{
    const koila_value v = input_of(r, n, i);
    const bool takes = is_second && r->second[v] != KOILA_NONE && is_local(r, n, i);
    return takes ? r->second[v] : r->first[v];
}

static koila_status append_as(rewriter *r, koila_node n, bool is_second, koila_value *results)
{
    const koila_sig_info *s = sig_of(r, n);
    const koila__mark before = koila__arena_mark(&r->tmp);
    koila_value *in = koila__arena_room(&r->tmp, (s->n_inputs + 1) * sizeof *in);
    koila_value first = KOILA_NONE;
    TRY_ALLOC(in);
    for (uint32_t i = 0; i < s->n_inputs; i++)
        in[i] = now(r, n, i, is_second);
    const koila_status status = append(r, n, in, &first);
    for (uint32_t j = 0; status == KOILA_OK && j < s->n_outputs; j++)
        results[output_of(r, n, j)] = first + j;
    koila__arena_rewind(&r->tmp, before);
    return status;
}

static koila_status demand(rewriter *r, koila_value v)
{
    const koila_node n = producer(r, v);
    if (!r->wanted[v] || n == KOILA_NONE || !r->is_again[n] || r->second[v] != KOILA_NONE ||
        r->is_demanded[n])
        return KOILA_OK;
    r->is_demanded[n] = true;
    return koila__vec_push(&r->mem, &r->demand, n) ? KOILA_OK : KOILA_NO_MEMORY;
}

static int compare_nodes(const void *a, const void *b)
{
    const koila_node x = *(const koila_node *)a, y = *(const koila_node *)b;
    return (x > y) - (x < y);
}

/* Runs again what node n, after `at`, wants. */
static koila_status append_wanted(rewriter *r, koila_node n)
{
    const koila_sig_info *s = sig_of(r, n);
    r->demand.n = 0;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if ((!s->n_writes || koila__reads(s, i)) && is_local(r, n, i))
            KOILA_TRY(demand(r, input_of(r, n, i)));
    for (uint32_t k = 0; k < r->demand.n; k++) {
        const koila_node again = r->demand.at[k];
        for (uint32_t i = 0; i < sig_of(r, again)->n_inputs; i++)
            if (is_local(r, again, i))
                KOILA_TRY(demand(r, input_of(r, again, i)));
    }
    if (r->demand.n > 1)
        qsort(r->demand.at, r->demand.n, sizeof *r->demand.at, compare_nodes);
    for (uint32_t k = 0; k < r->demand.n; k++) {
        KOILA_TRY(append_as(r, r->demand.at[k], true, r->second));
        r->node.at[r->node.n - 1].is_again = true;
    }
    return KOILA_OK;
}

static koila_status copy_start(rewriter *r)
{
    KOILA_TRY(koila_graph_new(r->g->table, &r->mem, &r->to));
    for (uint32_t a = 0; a < r->g->axes.n; a++) {
        uint16_t axis;
        KOILA_TRY(koila_graph_axis(r->to, r->g->axes.at[a], &axis));
    }
    for (uint32_t l = 0; l < r->g->lines.n; l++) {
        uint32_t id;
        KOILA_TRY(koila_graph_line(r->to, koila_graph_line_file(r->g, l),
                                   koila_graph_line_number(r->g, l), &id));
        koila_assert(id == l);
    }
    for (koila_value v = 0; v < r->g->values.n; v++) {
        const koila_value_info info = r->g->values.at[v];
        const char *name = koila_graph_leaf_name(r->g, v);
        if (info.node != KOILA_NONE)
            continue;
        KOILA_TRY(koila_graph_leaf(r->to, info.meta, info.leaf_kind, info.axis, info.dim,
                                   name && *name ? name : NULL, &r->first[v]));
        if (!koila__vec_push(&r->mem, &r->value, r->from->value[v]))
            return KOILA_NO_MEMORY;
    }
    return KOILA_OK;
}

static koila_status copy_nodes(rewriter *r)
{
    KOILA_TRY(copy_start(r));
    for (koila_node n = 0; n < r->g->nodes.n; n++) {
        if (n > r->how.at)
            KOILA_TRY(append_wanted(r, n));
        KOILA_TRY(append_as(r, n, n > r->how.at, r->first));
    }
    return KOILA_OK;
}

/* ---- the result */

static koila_status hand_over(rewriter *r, koila__placed **out)
{
    const uint32_t n_values = r->value.n;
    koila__placed *p = koila__arena_alloc(&r->keep, sizeof *p);
    koila__size *size = koila__arena_array(&r->keep, n_values, sizeof *size);
    koila_value *lowered =
        koila__arena_array(&r->keep, r->from->n_recorded_values, sizeof *lowered);
    TRY_ALLOC(p && size && lowered);
    for (koila_value v = 0; v < r->g->values.n; v++) {
        size[r->first[v]] = r->from->size[v];
        if (r->second[v] != KOILA_NONE)
            size[r->second[v]] = r->from->size[v];
    }
    for (uint32_t v = 0; v < r->from->n_recorded_values; v++) {
        const koila_value was = r->from->lowered[v];
        lowered[v] = was == KOILA_NONE ? KOILA_NONE : r->first[was];
    }
    *p = (koila__placed){ .graph = r->to,
                          .value = r->value.at,
                          .size = size,
                          .need = r->need.at,
                          .node = r->node.at,
                          .lowered = lowered,
                          .n_recorded_values = r->from->n_recorded_values,
                          .cap_values = r->value.cap,
                          .cap_needs = r->need.cap,
                          .cap_nodes = r->node.cap,
                          .arena = r->keep };
    *out = p;
    return KOILA_OK;
}

static koila_status make_arrays(rewriter *r)
{
    const uint32_t V = r->g->values.n + 1;
    const uint32_t N = r->g->nodes.n + 1;
    r->root = koila__arena_array(&r->tmp, V, sizeof *r->root);
    r->stays = koila__arena_array(&r->tmp, V, sizeof *r->stays);
    r->wanted = koila__arena_array(&r->tmp, V, sizeof *r->wanted);
    r->first = koila__arena_array(&r->tmp, V, sizeof *r->first);
    r->second = koila__arena_array(&r->tmp, V, sizeof *r->second);
    r->segment = koila__arena_array(&r->tmp, N, sizeof *r->segment);
    r->is_again = koila__arena_array(&r->tmp, N, sizeof *r->is_again);
    r->is_demanded = koila__arena_array(&r->tmp, N, sizeof *r->is_demanded);
    TRY_ALLOC(r->root && r->stays && r->wanted && r->first && r->second && r->segment &&
              r->is_again && r->is_demanded);
    for (uint32_t v = 0; v < V; v++)
        r->second[v] = KOILA_NONE;
    return KOILA_OK;
}

static koila_status rewrite(rewriter *r, const koila_value *targets, uint32_t n_targets,
                            koila__placed **out)
{
    KOILA_TRY(make_arrays(r));
    find_roots(r);
    want(r, targets, n_targets);
    KOILA_TRY(cut(r));
    choose(r);
    if (!r->n_again)
        return KOILA_OK;
    KOILA_TRY(copy_nodes(r));
    return hand_over(r, out);
}

koila_status koila__recompute_new(const koila__placed *p, const koila_value *targets,
                                  uint32_t n_targets, koila__recompute how,
                                  const koila_allocator *mem, koila__placed **out,
                                  koila_value *again)
{
    const koila_allocator a = koila__allocator(mem);
    rewriter r = { .from = p, .g = p->graph, .how = how, .mem = a };
    koila_assert(how.at < p->graph->nodes.n && how.n_segments >= 2 && !p->cut && !p->absent);
    *out = NULL;
    koila__arena_init(&r.tmp, &a);
    koila__arena_init(&r.keep, &a);
    const koila_status status = rewrite(&r, targets, n_targets, out);
    for (uint32_t i = 0; *out && i < n_targets; i++)
        again[i] = r.first[targets[i]];
    koila__vec_free(&a, &r.demand);
    koila__arena_deinit(&r.tmp);
    if (!*out) {
        koila_graph_free(r.to);
        koila__vec_free(&a, &r.value);
        koila__vec_free(&a, &r.need);
        koila__vec_free(&a, &r.node);
        koila__arena_deinit(&r.keep);
    }
    koila_check(!*out || koila__placed_check(*out, NULL));
    return status;
}
