/* recompute.c — results are dropped in the forward pass, and computed again for the backward pass;
 * or they wait for it in host memory.
 *
 * A call that runs again is a second node with second results, so that schedule, liveness and
 * executor know nothing of it: the first results die at their last use in the forward pass, the
 * second ones live from there to the backward pass. Only the uses after `at` change.
 *
 * outline_choice.c decides which storages are dropped; this writes the step that follows from it.
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
#include "engine/outline.h"
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
    const koila__outline *o;
    const koila__placed *from;
    const koila_graph *g; /* of from */
    koila__recompute how;
    koila_allocator mem;
    koila__arena tmp;
    bool *wanted;        /* [value] a second one is wanted */
    bool *is_again;      /* [node] runs again */
    koila_value *first;  /* [value] of `to` */
    koila_value *second; /* [value] of `to`, or KOILA_NONE */
    VEC(koila_node) demand;
    bool *is_demanded;  /* [node] */
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
    uint32_t n_again, n_again_values, n_again_inputs;
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

/* May node n read a second value as input i? */
static bool may_take(const rewriter *r, koila_node n, uint32_t i)
{
    return koila__outline_may_take(r->o, n, i);
}

/* ---- what runs again */

static koila__fate fate_of(const rewriter *r, koila_value v)
{
    return koila__outline_fate(r->o, koila__outline_root(r->o, v));
}

/* The backward pass wants second values of what does not stay. */
static void want(rewriter *r)
{
    for (koila_node n = r->how.at + 1; n < r->g->nodes.n; n++) {
        const koila_sig_info *s = sig_of(r, n);
        for (uint32_t i = 0; i < s->n_inputs && koila__outline_is_needed(r->o, n); i++) {
            const koila_value v = input_of(r, n, i);
            const koila_node m = producer(r, v);
            if (m != KOILA_NONE && m <= r->how.at && (!s->n_writes || koila__reads(s, i)))
                r->wanted[v] |= fate_of(r, v) != KOILA__STAYS;
        }
    }
}

/* Result v of node n is wanted, and waits in host memory. */
static koila_status wait(rewriter *r, koila_node n, koila_value v)
{
    const koila_node last = koila__outline_last(r->o, v);
    const waiting w = { .value = v, .last = last > n ? last : n };
    return koila__vec_push(&r->mem, &r->waits, w) ? KOILA_OK : KOILA_NO_MEMORY;
}

/* Finds the nodes that run again, views of what is made again among them, and what waits. */
static koila_status choose(rewriter *r)
{
    for (koila_node n = r->how.at + 1; n-- > 0;) {
        bool is_again = false;
        for (uint32_t j = 0; j < sig_of(r, n)->n_outputs; j++) {
            const koila_value v = output_of(r, n, j);
            const bool waits = koila__outline_root(r->o, v) == v && fate_of(r, v) == KOILA__WAITS;
            if (r->wanted[v] && waits)
                KOILA_TRY(wait(r, n, v));
            is_again |= r->wanted[v] && !waits;
        }
        if (!is_again)
            continue;
        r->is_again[n] = true;
        r->n_again++;
        r->n_again_values += sig_of(r, n)->n_outputs;
        r->n_again_inputs += sig_of(r, n)->n_inputs;
        for (uint32_t i = 0; i < sig_of(r, n)->n_inputs; i++)
            r->wanted[input_of(r, n, i)] |= fate_of(r, input_of(r, n, i)) != KOILA__STAYS;
    }
    return KOILA_OK;
}

/* ---- what waits in host memory */

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

/* The placed links of node n's writes, in the arena of the result: the first step may be freed
 * before the second. */
static koila_status copy_links(rewriter *r, koila_node n, koila__placed_node *node)
{
    const koila_sig_info *s = sig_of(r, n);
    uint32_t n_links = 0;
    for (uint32_t w = 0; w < s->n_writes; w++)
        n_links += s->writes[w].n_links;
    if (!node->link || !n_links)
        return KOILA_OK;
    node->link = koila__arena_copy(&r->keep, node->link, n_links * sizeof *node->link);
    return node->link ? KOILA_OK : KOILA_NO_MEMORY;
}

/* Appends node n of the first step, with inputs `in` of the second. */
static koila_status append(rewriter *r, koila_node n, const koila_value *in, koila_value *first)
{
    const koila_node_info info = r->g->nodes.at[n];
    const koila_sig_info *s = sig_of(r, n);
    koila__placed_node node = r->from->node[n];
    KOILA_TRY(koila_graph_node(r->to, info.sig, in, info.line, first));
    KOILA_TRY(copy_links(r, n, &node));
    if (!koila__vec_reserve(&r->mem, &r->value, s->n_outputs) ||
        !koila__vec_reserve(&r->mem, &r->need, s->n_inputs) ||
        !koila__vec_push(&r->mem, &r->node, node))
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
    const bool is_copy = !(koila__flags_of_op(r->g->table, op) & KOILA_OP_VIEW);
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

/* Node `reader`, after `at` or again, wants its input i. */
static koila_status demand(rewriter *r, koila_node reader, uint32_t i)
{
    const koila_value v = input_of(r, reader, i);
    const koila_node n = producer(r, v);
    if (!r->wanted[v] || n == KOILA_NONE || r->is_demanded[n] ||
        !(r->is_again[n] || r->wait_of[v]) || !may_take(r, reader, i))
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
    for (uint32_t i = 0; i < s->n_inputs && koila__outline_is_needed(r->o, n); i++)
        if (!s->n_writes || koila__reads(s, i))
            KOILA_TRY(demand(r, n, i));
    for (uint32_t k = 0; k < r->demand.n; k++) {
        const koila_node again = r->demand.at[k];
        for (uint32_t i = 0; r->is_again[again] && i < sig_of(r, again)->n_inputs; i++)
            KOILA_TRY(demand(r, again, i));
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

/* What follows is larger by what runs again, and by four calls for each value that waits: of one
 * result each, and of six inputs together. */
static koila_status reserve(rewriter *r)
{
    const uint32_t n_nodes = r->g->nodes.n + r->n_again + 4 * r->waits.n;
    const uint32_t n_values = r->g->values.n + r->n_again_values + 4 * r->waits.n;
    const uint32_t n_inputs = r->g->inputs.n + r->n_again_inputs + 6 * r->waits.n;
    return koila__graph_reserve(r->to, n_nodes, n_inputs, n_values) &&
                   koila__vec_reserve(&r->mem, &r->node, n_nodes) &&
                   koila__vec_reserve(&r->mem, &r->value, n_values) &&
                   koila__vec_reserve(&r->mem, &r->need, n_inputs)
               ? KOILA_OK
               : KOILA_NO_MEMORY;
}

static koila_status copy_start(rewriter *r)
{
    KOILA_TRY(koila_graph_new(r->g->table, &r->mem, &r->to));
    KOILA_TRY(reserve(r));
    for (uint32_t a = 0; a < r->g->axes.n; a++) {
        uint16_t axis;
        KOILA_TRY(koila_graph_axis(r->to, r->g->axes.at[a], &axis));
    }
    KOILA_TRY(koila__graph_copy_lines(r->to, r->g));
    for (koila_value v = 0; v < r->g->values.n; v++) {
        if (r->g->values.at[v].node != KOILA_NONE)
            continue;
        KOILA_TRY(koila__graph_copy_leaf(r->to, r->g, v, &r->first[v]));
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
    const uint8_t *added = r->from->adds_on;
    uint8_t *adds_on = added ? koila__arena_array(&r->keep, n_values, 1) : NULL;
    const koila__addend *were = r->from->addends;
    koila__addend *addends = were ? koila__arena_array(&r->keep, n_values, sizeof *addends) : NULL;
    TRY_ALLOC(p && size && lowered && (adds_on || !added) && (addends || !were));
    for (koila_value v = 0; v < r->g->values.n; v++) {
        size[r->first[v]] = r->from->size[v];
        if (added) /* sums are made once */
            adds_on[r->first[v]] = added[v];
        if (were && were[v].kind) {
            addends[r->first[v]] = were[v];
            addends[r->first[v]].to = r->first[were[v].to];
        }
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
                          .adds_on = adds_on,
                          .addends = addends,
                          .again_apart = r->how.apart,
                          .again_behind = r->how.behind,
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
    r->wanted = koila__arena_array(&r->tmp, V, sizeof *r->wanted);
    r->first = koila__arena_array(&r->tmp, V, sizeof *r->first);
    r->second = koila__arena_array(&r->tmp, V, sizeof *r->second);
    r->is_again = koila__arena_array(&r->tmp, N, sizeof *r->is_again);
    r->is_demanded = koila__arena_array(&r->tmp, N, sizeof *r->is_demanded);
    r->wait_of = koila__arena_array(&r->tmp, V, sizeof *r->wait_of);
    TRY_ALLOC(r->wanted && r->first && r->second && r->is_again && r->is_demanded && r->wait_of);
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

static koila_status rewrite(rewriter *r, koila__placed **out)
{
    KOILA_TRY(make_arrays(r));
    want(r);
    KOILA_TRY(choose(r));
    if (!r->n_again && !r->waits.n)
        return KOILA_OK;
    KOILA_TRY(prepare_waits(r));
    KOILA_TRY(copy_nodes(r));
    return hand_over(r, out);
}

koila_status koila__recompute_new(const koila__outline *o, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets,
                                  koila__recompute how, const koila_allocator *mem,
                                  koila__placed **out, koila_value *again)
{
    const koila_allocator a = koila__allocator(mem);
    rewriter r = { .o = o, .from = p, .g = p->graph, .how = how, .mem = a };
    *out = NULL;
    koila__arena_init(&r.tmp, &a);
    koila__arena_init(&r.keep, &a);
    const koila_status status = rewrite(&r, out);
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
