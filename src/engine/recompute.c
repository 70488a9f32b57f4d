/* recompute.c — results are dropped in the forward pass, and computed again for the backward pass;
 * or they wait for it in host memory.
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
 *
 * A value that waits in host memory is also two values, and four nodes lie between them:
 *
 *     x = ...                made, as recorded
 *     h = offload(x)         right behind that: the copy starts, beside the kernels that follow
 *     ...                    the forward pass uses x
 *     h' = offloaded(h, x)   after the last use of x there: what comes now waits for the copy, so
 *                            that x is dead from here on, for kernels as well as for the plan
 *     ...
 *     y = fetch(h')          its memory, and the copy back starts
 *     x' = fetched(y, h')    before the first use in the backward pass: what comes now waits
 *
 * With how.ahead both waits are one copy late: offloaded() of a value stands behind the last use of
 * the next one, fetch() before fetched() of the one before it. A copy then has the time in which
 * the next value is made or used, at the price of its bytes. h and h' are no bytes of the device.
 */
#include "engine/recompute.h"

#include "base/vec.h"
#include "engine/cost.h"
#include "engine/plan_costs.h"
#include "graph/table.h"

#include <stdlib.h>

/* A value that waits in host memory. */
typedef struct waiting {
    koila_value value; /* of `from`; a storage of its own */
    koila_node last;   /* its last use in the forward pass */
    koila_node due;    /* behind this node its copy must be complete */
    koila_value h, y;  /* of `to`: the copy; what it is copied back to, or KOILA_NONE */
    bool is_complete;  /* h is offloaded() */
    uint32_t turn;     /* as which it is fetched */
} waiting;

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
    /* [node up to at] bytes that it makes for the backward pass; the sum of all */
    uint64_t *held;
    uint64_t all_held;
    bool *is_held;       /* [value] as root: some of it is wanted by the backward pass itself */
    koila_node *last;    /* [value] as root: the last node up to `at` that uses it */
    bool *wanted;        /* [value] a second one is wanted */
    bool *is_again;      /* [node] runs again */
    koila_value *first;  /* [value] of `to` */
    koila_value *second; /* [value] of `to`, or KOILA_NONE */
    VEC(koila_node) demand;
    bool *is_demanded;  /* [node] */
    bool *may_wait;     /* [value] as root: in host memory */
    VEC(waiting) waits; /* in the order of `last` */
    uint32_t *wait_of;  /* [value] its index in `waits` + 1; 0: it does not wait */
    uint32_t *turns;    /* [waits] in the order in which they are fetched */
    uint32_t n_landed, n_turns, n_fetching; /* of `waits`, `turns`, `turns` so far */
    koila_op op_offload, op_offloaded, op_fetch, op_fetched;
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

/* May node n read a second value as input i: as its producer left it, or rows that a loop makes
 * whole? Nothing crosses loops while it waits in host memory. */
static bool may_take(const rewriter *r, koila_node n, uint32_t i)
{
    const koila_value v = input_of(r, n, i);
    const koila_node m = producer(r, v);
    return is_local(r, n, i) || (!r->how.n_offloaded && m != KOILA_NONE &&
                                 r->from->node[m].in_loop && r->from->value[v].kind == KOILA_S);
}

/* ---- storages */

static bool is_view(const rewriter *r, koila_node n)
{
    const koila_sig_info *s = sig_of(r, n);
    return !s->n_writes && s->n_inputs &&
           ((koila_op_flags(r->g->table, s->op) & KOILA_OP_VIEW) ||
            (koila_op_facts(r->g->table, s->op) & KOILA_FACT_MAY_ALIAS));
}

static void find_roots(rewriter *r)
{
    for (koila_value v = 0; v < r->g->values.n; v++)
        r->root[v] = v;
    for (koila_node n = 0; n < r->g->nodes.n; n++)
        for (uint32_t j = 0; is_view(r, n) && j < sig_of(r, n)->n_outputs; j++)
            r->root[output_of(r, n, j)] = r->root[input_of(r, n, 0)];
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
            if (may_take(r, n, i))
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

/* Finds what is held. crossing[n]: bytes made up to n that later nodes of the forward pass read. */
static koila_status weigh(rewriter *r, uint64_t *crossing)
{
    const koila_node end = r->how.at + 1;
    bool *is_held = r->is_held = koila__arena_array(&r->tmp, r->g->values.n, sizeof *is_held);
    koila_node *last = r->last = koila__arena_array(&r->tmp, r->g->values.n, sizeof *last);
    uint64_t *held = r->held = koila__arena_array(&r->tmp, end, sizeof *held);
    TRY_ALLOC(is_held && last && held);
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
        r->all_held += held[n];
    }
    return KOILA_OK;
}

/* Ends each segment near its share of the held bytes, where the fewest bytes cross. */
static koila_status cut(rewriter *r)
{
    const koila_node end = r->how.at + 1;
    const double n_segments = r->how.n_segments;
    uint64_t *crossing = koila__arena_array(&r->tmp, end, sizeof *crossing);
    TRY_ALLOC(crossing);
    KOILA_TRY(weigh(r, crossing));
    const uint64_t *held = r->held;
    const uint64_t all = r->all_held;
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
    if (s->n_writes || (flags & (KOILA_OP_RANDOM | KOILA_OP_OPAQUE)))
        return false;
    for (uint32_t j = 0; j < s->n_outputs; j++)
        if (r->from->value[output_of(r, n, j)].kind == KOILA_P)
            return false;
    if (is_view(r, n) && r->may_wait[r->root[output_of(r, n, 0)]])
        return true;
    if (r->segment[n] == r->last_segment)
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
        const bool is_near = r->segment[producer(r, v)] == r->segment[n];
        if (may_take(r, n, i) && (is_near || r->may_wait[r->root[v]]))
            r->wanted[v] = true;
        else
            r->stays[r->root[v]] = true;
    }
}

/* Node n does not run again: those of its results that are wanted wait in host memory, or stay. */
static koila_status leave(rewriter *r, koila_node n)
{
    for (uint32_t j = 0; j < sig_of(r, n)->n_outputs; j++) {
        const koila_value v = output_of(r, n, j);
        if (!r->wanted[v])
            continue;
        if (r->may_wait[v]) {
            const waiting w = { .value = v, .last = r->last[v] > n ? r->last[v] : n };
            if (!koila__vec_push(&r->mem, &r->waits, w))
                return KOILA_NO_MEMORY;
            continue;
        }
        r->stays[r->root[v]] = true;
        r->wanted[v] = false;
    }
    return KOILA_OK;
}

static koila_status choose(rewriter *r)
{
    for (koila_node n = r->how.at + 1; n-- > 0;) {
        bool is_wanted = false;
        bool any_waits = false;
        for (uint32_t j = 0; j < sig_of(r, n)->n_outputs; j++) {
            const koila_value v = output_of(r, n, j);
            r->wanted[v] &= !r->stays[r->root[v]];
            is_wanted |= r->wanted[v];
            any_waits |= r->wanted[v] && r->may_wait[v];
        }
        if (!is_wanted)
            continue;
        if (any_waits || !can_run_again(r, n)) {
            KOILA_TRY(leave(r, n));
            continue;
        }
        r->is_again[n] = true;
        r->n_again++;
        want_inputs(r, n);
    }
    return KOILA_OK;
}

/* ---- what waits in host memory */

/* Host memory that torch takes for a copy: its pinned blocks are powers of two. */
static uint64_t host_bytes(uint64_t n_bytes)
{
    uint64_t n = 1;
    while (n < n_bytes && n <= UINT64_MAX / 2)
        n *= 2;
    return n;
}

/* A storage that the forward pass makes and never writes again, all in one form. */
static bool could_wait(const rewriter *r, koila_value v)
{
    const koila_placement p = r->from->value[v];
    if (!r->is_held[v] || r->stays[v] || r->g->values.at[v].meta == KOILA_NONE)
        return false;
    const koila_meta_info *m = koila__value_meta(r->g, v);
    return m->device == r->how.host.device && koila_meta_is_dense(m) &&
           m->n_bytes > r->all_held / KOILA_COST_FEWEST_OFFLOADED &&
           (p.kind == KOILA_R || (p.kind == KOILA_S && p.outer > 0));
}

/* Is moving v, which node n makes, less work than running n again? */
static bool is_cheaper_moved(const rewriter *r, koila_node n, koila_value v)
{
    const double once = koila__offload_work((double)bytes_of(r, v), r->how.host.price);
    return !can_run_again(r, n) || 2 * once < koila__cost_of(r->g->table, sig_of(r, n)).work;
}

/* Finds what may wait: the first made come first, for they wait longest. */
static void find_waiting(rewriter *r)
{
    const double share = (double)r->how.n_offloaded / KOILA__OFFLOAD_PARTS;
    const koila_node end = r->how.n_offloaded ? r->how.at + 1 : 0;
    uint64_t sum = 0;
    uint64_t in_host = 0;
    for (koila_node n = 0; n < end; n++) {
        sum += r->held[n];
        if ((double)sum > share * (double)r->all_held)
            break;
        for (uint32_t j = 0; j < sig_of(r, n)->n_outputs; j++) {
            const koila_value v = output_of(r, n, j);
            if (!could_wait(r, v) || !is_cheaper_moved(r, n, v))
                continue;
            const uint64_t n_bytes = host_bytes(bytes_of(r, v));
            if (n_bytes > r->how.host.n_bytes - in_host)
                return;
            in_host += n_bytes;
            r->may_wait[v] = true;
        }
    }
    for (koila_node n = 0; n < end; n++)
        for (uint32_t w = 0; w < sig_of(r, n)->n_writes; w++)
            r->may_wait[r->root[input_of(r, n, sig_of(r, n)->writes[w].input)]] = false;
}

static int compare_waits(const void *a, const void *b)
{
    const waiting *x = a, *y = b;
    return x->last != y->last ? (x->last > y->last) - (x->last < y->last)
                              : (x->value > y->value) - (x->value < y->value);
}

static void order_waits(rewriter *r)
{
    if (r->waits.n > 1)
        qsort(r->waits.at, r->waits.n, sizeof *r->waits.at, compare_waits);
    for (uint32_t i = 0; i < r->waits.n; i++) {
        waiting *w = &r->waits.at[i];
        const bool any_next = i + 1 < r->waits.n;
        w->h = w->y = KOILA_NONE;
        w->due = any_next ? w[1].last : r->how.at;
        if (!r->how.ahead)
            w->due = w->last;
        r->wait_of[w->value] = i + 1;
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
    const bool takes = is_second && r->second[v] != KOILA_NONE && may_take(r, n, i);
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

/* Appends a call of one of the operators of host memory: in[n] -> a value of meta `out`, placed
 * like value v of the first step. */
static koila_status append_offload(rewriter *r, koila_op op, koila_value v, const koila_value *in,
                                   uint32_t n, koila_meta out, koila_value *result)
{
    const koila_node like = producer(r, v);
    const bool is_copy = !(koila_op_flags(r->g->table, op) & KOILA_OP_VIEW);
    koila_arg tokens[3];
    koila_sig sig;
    koila_assert(n <= 2);
    for (uint32_t i = 0; i < n; i++)
        tokens[i] = (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = r->to->values.at[in[i]].meta };
    tokens[n] = (koila_arg){ .kind = KOILA_ARG_FLOAT, .u.f = r->how.host.price };
    const koila_sig_info desc = { .op = op,
                                  .n_tokens = n + is_copy,
                                  .n_pos = n + is_copy,
                                  .tokens = tokens,
                                  .n_fresh = 1,
                                  .outputs = &out };
    const koila__placed_node node = { .axis = r->from->node[like].axis,
                                      .in_loop = r->from->node[like].in_loop,
                                      .recorded = r->from->node[like].recorded,
                                      .offloads = true };
    KOILA_TRY(koila_table_sig(r->g->table, &desc, &sig));
    KOILA_TRY(koila_graph_node(r->to, sig, in, r->g->nodes.at[like].line, result));
    bool is_ok = koila__vec_push(&r->mem, &r->node, node) &&
                 koila__vec_push(&r->mem, &r->value, r->from->value[v]);
    for (uint32_t i = 0; i < n && is_ok; i++)
        is_ok = koila__vec_push(&r->mem, &r->need, r->from->value[v]);
    return is_ok ? KOILA_OK : KOILA_NO_MEMORY;
}

/* The meta of a copy of v in host memory: it has the form of v where it is cut with it, and no
 * bytes of the device. */
static koila_status host_meta(const rewriter *r, koila_value v, koila_meta *out)
{
    static const int64_t none[KOILA_MAX_DIMS];
    const koila_meta_info *m = koila__value_meta(r->g, v);
    if (r->from->value[v].kind == KOILA_R)
        return koila_table_meta(r->g->table, m->dtype, 0, 1, none, NULL, out);
    return koila_table_meta(r->g->table, m->dtype, 0, m->n_dims, m->size, none, out);
}

/* Node n has run for the first time: copies of its results start. */
static koila_status append_offloads(rewriter *r, koila_node n)
{
    for (uint32_t j = 0; j < sig_of(r, n)->n_outputs; j++) {
        const koila_value v = output_of(r, n, j);
        koila_meta meta;
        if (!r->wait_of[v])
            continue;
        KOILA_TRY(host_meta(r, v, &meta));
        KOILA_TRY(append_offload(r, r->op_offload, v, &r->first[v], 1, meta,
                                 &r->waits.at[r->wait_of[v] - 1].h));
    }
    for (; r->n_landed < r->waits.n && r->waits.at[r->n_landed].due <= n; r->n_landed++) {
        waiting *w = &r->waits.at[r->n_landed];
        const koila_value in[2] = { w->h, r->first[w->value] };
        KOILA_TRY(append_offload(r, r->op_offloaded, w->value, in, 2, r->to->values.at[w->h].meta,
                                 &w->h));
    }
    return KOILA_OK;
}

/* The results of node n that wait in host memory are wanted now. */
static koila_status append_fetched(rewriter *r, koila_node n)
{
    for (uint32_t j = 0; j < sig_of(r, n)->n_outputs; j++) {
        const koila_value v = output_of(r, n, j);
        if (!r->wait_of[v])
            continue;
        waiting *w = &r->waits.at[r->wait_of[v] - 1];
        const uint32_t until = w->turn + 1 + r->how.ahead;
        for (; r->n_fetching < until && r->n_fetching < r->n_turns; r->n_fetching++) {
            waiting *next = &r->waits.at[r->turns[r->n_fetching]];
            KOILA_TRY(append_offload(r, r->op_fetch, next->value, &next->h, 1,
                                     r->g->values.at[next->value].meta, &next->y));
        }
        const koila_value in[2] = { w->y, w->h };
        KOILA_TRY(
            append_offload(r, r->op_fetched, v, in, 2, r->g->values.at[v].meta, &r->second[v]));
    }
    return KOILA_OK;
}

static koila_status demand(rewriter *r, koila_value v)
{
    const koila_node n = producer(r, v);
    if (!r->wanted[v] || n == KOILA_NONE || r->is_demanded[n] || !(r->is_again[n] || r->wait_of[v]))
        return KOILA_OK;
    r->is_demanded[n] = true;
    return koila__vec_push(&r->mem, &r->demand, n) ? KOILA_OK : KOILA_NO_MEMORY;
}

static int compare_nodes(const void *a, const void *b)
{
    const koila_node x = *(const koila_node *)a, y = *(const koila_node *)b;
    return (x > y) - (x < y);
}

/* Finds the nodes whose second results node n, after `at`, is the first to want: in order. */
static koila_status find_demand(rewriter *r, koila_node n)
{
    const koila_sig_info *s = sig_of(r, n);
    r->demand.n = 0;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if ((!s->n_writes || koila__reads(s, i)) && may_take(r, n, i))
            KOILA_TRY(demand(r, input_of(r, n, i)));
    for (uint32_t k = 0; k < r->demand.n; k++) {
        const koila_node again = r->demand.at[k];
        for (uint32_t i = 0; r->is_again[again] && i < sig_of(r, again)->n_inputs; i++)
            if (may_take(r, again, i))
                KOILA_TRY(demand(r, input_of(r, again, i)));
    }
    if (r->demand.n > 1)
        qsort(r->demand.at, r->demand.n, sizeof *r->demand.at, compare_nodes);
    return KOILA_OK;
}

/* Runs again what node n, after `at`, wants. */
static koila_status append_wanted(rewriter *r, koila_node n)
{
    KOILA_TRY(find_demand(r, n));
    for (uint32_t k = 0; k < r->demand.n; k++) {
        if (!r->is_again[r->demand.at[k]]) {
            KOILA_TRY(append_fetched(r, r->demand.at[k]));
            continue;
        }
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

/* Finds the order in which values come back from host memory. */
static koila_status order_turns(rewriter *r)
{
    for (koila_node n = r->how.at + 1; n < r->g->nodes.n && r->waits.n; n++) {
        KOILA_TRY(find_demand(r, n));
        for (uint32_t k = 0; k < r->demand.n; k++)
            for (uint32_t j = 0; j < sig_of(r, r->demand.at[k])->n_outputs; j++) {
                const uint32_t i = r->wait_of[output_of(r, r->demand.at[k], j)];
                if (!i)
                    continue;
                r->waits.at[i - 1].turn = r->n_turns;
                r->turns[r->n_turns++] = i - 1;
            }
    }
    koila_assert(r->n_turns == r->waits.n);
    memset(r->is_demanded, 0, r->g->nodes.n * sizeof *r->is_demanded);
    return KOILA_OK;
}

static koila_status copy_nodes(rewriter *r)
{
    KOILA_TRY(copy_start(r));
    for (koila_node n = 0; n < r->g->nodes.n; n++) {
        if (n > r->how.at)
            KOILA_TRY(append_wanted(r, n));
        KOILA_TRY(append_as(r, n, n > r->how.at, r->first));
        r->node.at[r->node.n - 1].is_backward = n > r->how.at;
        if (n <= r->how.at)
            KOILA_TRY(append_offloads(r, n));
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
    for (uint32_t i = 0; i < r->waits.n; i++) /* the copies in host memory are no bytes */
        if (r->waits.at[i].y != KOILA_NONE)
            size[r->waits.at[i].y] = r->from->size[r->waits.at[i].value];
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
    r->may_wait = koila__arena_array(&r->tmp, V, sizeof *r->may_wait);
    r->wait_of = koila__arena_array(&r->tmp, V, sizeof *r->wait_of);
    TRY_ALLOC(r->root && r->stays && r->wanted && r->first && r->second && r->segment &&
              r->is_again && r->is_demanded && r->may_wait && r->wait_of);
    for (uint32_t v = 0; v < V; v++)
        r->second[v] = KOILA_NONE;
    return KOILA_OK;
}

static koila_status prepare_waits(rewriter *r)
{
    const struct {
        koila_op *op;
        const char *name;
        uint32_t flags;
    } of[] = { { &r->op_offload, "koila::offload", 0 },
               { &r->op_offloaded, "koila::offloaded", KOILA_OP_VIEW },
               { &r->op_fetch, "koila::fetch", 0 },
               { &r->op_fetched, "koila::fetched", KOILA_OP_VIEW } };
    if (!r->waits.n)
        return KOILA_OK;
    for (size_t i = 0; i < KOILA_COUNT(of); i++)
        KOILA_TRY(koila_table_op(r->g->table, of[i].name, of[i].flags, of[i].op));
    r->turns = koila__arena_array(&r->tmp, r->waits.n, sizeof *r->turns);
    TRY_ALLOC(r->turns);
    order_waits(r);
    return order_turns(r);
}

static koila_status rewrite(rewriter *r, const koila_value *targets, uint32_t n_targets,
                            koila__placed **out)
{
    KOILA_TRY(make_arrays(r));
    find_roots(r);
    want(r, targets, n_targets);
    KOILA_TRY(cut(r));
    find_waiting(r);
    KOILA_TRY(choose(r));
    if (!r->n_again && !r->waits.n)
        return KOILA_OK;
    KOILA_TRY(prepare_waits(r));
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
    koila_assert(how.at < p->graph->nodes.n && how.n_segments >= 1 && !p->cut && !p->absent);
    *out = NULL;
    koila__arena_init(&r.tmp, &a);
    koila__arena_init(&r.keep, &a);
    const koila_status status = rewrite(&r, targets, n_targets, out);
    for (uint32_t i = 0; *out && i < n_targets; i++)
        again[i] = r.first[targets[i]];
    koila__vec_free(&a, &r.demand);
    koila__vec_free(&a, &r.waits);
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
