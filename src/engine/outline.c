/* outline.c — which storages of the forward pass are dropped, and what that leaves at least.
 *
 * What runs again is decided backwards from `at`. A dropped storage is wanted, so its maker runs
 * again, so what that reads is wanted too, or stays: leaves, what another segment made, and what
 * must not run twice (random draws, writes, modules that run as they are, partial sums). Storages
 * stay or go, not values: a view of what stays costs nothing.
 *
 * This is checkpointing by segments (Chen et al. 2016) of a recorded graph: operators, not modules,
 * and the segments end where the fewest bytes cross.
 *
 * The bound is one walk over the nodes, in the order in which recompute.c writes them: each storage
 * counts from its maker to its last reader. It never exceeds the peak of the schedule:
 *   - of a step in one loop, or in none, all nodes run in that order. In several loops, only what
 *     the last one surely runs is counted: nodes behind all barriers. What such a node reads is
 *     there from its maker on, for that runs in the loop too, or its pieces were kept;
 *   - a result of a write counts from the node after it, for it may take over its base's storage;
 *   - a view alone does not hold its storage: it may be made earlier than it was recorded;
 *   - sums and collected values, those of earlier loops too, count from the second slice on, and so
 *     do whole values that the backward pass reads there. */
#include "engine/outline.h"

#include "base/vec.h"
#include "engine/cost.h"
#include "engine/live.h"
#include "engine/plan_costs.h"
#include "graph/table.h"

/* A storage, named by the value that makes it. */
typedef struct store {
    koila_value value;
    koila_node made;
    uint64_t n_bytes;      /* of a slice, as far as the bound counts it */
    koila_node last_back;  /* the last node after `at` that surely reads it, or KOILA_NONE */
    koila_node first_back; /* the first node after `at` that reads it at all, or KOILA_NONE */
    koila_node last_view;  /* the last view of it up to `at` that a node after `at` reads */
    bool is_held;          /* a node after `at` wants it */
    bool is_fixed;         /* stays in any case */
    bool is_write;         /* of a write */
    bool is_written;       /* a later node writes to it */
    bool is_result;        /* of the step */
    bool is_sure;          /* its maker runs in the loop that is counted */
} store;

/* A node up to `at` that makes storages. */
typedef struct maker {
    koila_node node;
    uint32_t first_store, n_stores, first_edge, n_edges;
    double work;
    bool may_repeat, is_expensive;
} maker;

/* A maker reads a storage. */
typedef struct edge {
    uint32_t store;
    bool takes; /* it may read a second one */
} edge;

struct koila__outline {
    const koila__placed *p;
    const koila_graph *g;
    koila__outline_options options;
    koila_allocator mem;
    koila__arena arena;
    koila_node at;
    uint32_t n_nodes;
    koila_value *root;    /* [value] */
    bool *is_part;        /* [value] of a write to a part of a storage, or to what that left */
    uint32_t *store_of;   /* [value] as root: index + 1; 0: not made in the forward pass */
    koila_node *last_use; /* [value] as root: the last node up to `at` that uses it */
    VEC(store) stores;
    VEC(maker) makers;
    VEC(edge) edges;
    double work; /* of the step as recorded */
    bool uses_host, is_whole;
    bool is_one;         /* all that runs in slices runs in one loop, or nothing does */
    bool *is_needed;     /* [node] it runs at all */
    bool *is_sure;       /* [node] it surely runs in the loop that is counted */
    uint64_t *workspace; /* [node]; NULL: none */
    uint16_t last_axis;  /* of the loop that is counted, which is the last */
    uint64_t collected;  /* bytes that are there from its second slice on */
    uint64_t results;    /* bytes */

    uint64_t *held, *crossing; /* [node up to at] bytes for the backward pass; see weigh() */
    uint64_t all_held;
    uint32_t *segment; /* [node up to at] */
    uint32_t last_segment, n_segments;

    /* the choice */
    uint8_t *fate;   /* [store] */
    bool *wanted;    /* [store] */
    bool *stays;     /* [store] */
    bool *may_wait;  /* [store] */
    bool *is_spared; /* [maker] its results stay */
    /* [store] how a choice begins: what the backward pass wants, for which node, what stays by its
     * segment, and what is read in the forward pass too if it stays */
    bool *wanted0, *stays0, *is_read0;
    koila_node *need0;
    bool any;          /* something is dropped */
    koila_node *need;  /* [store] the first node after `at` for which it is wanted */
    koila_node *needs; /* [maker] the first one for which it runs again */
    bool *is_again;    /* [maker] */
    bool *is_first;    /* [maker] it runs in the forward pass too: something there needs it */
    bool *is_read;     /* [store] by what runs in the forward pass, or what runs again */
    koila_node *last;  /* [store] the last node up to `at` that surely reads it, or KOILA_NONE */
    double chosen_work;

    /* the bound */
    uint64_t most;                     /* of the step as recorded */
    uint64_t *rise0, *fall0;           /* [node] bytes that begin, and end: made after `at` */
    uint64_t *rise, *fall;             /* [node] with what the choice adds */
    uint64_t *rise_again, *fall_again; /* [maker] the same when it runs again */
    uint64_t *end;                     /* [store] key_of() its last reader so far; 0: none */
    uint64_t *end0;                    /* [store] of the backward pass */
    uint32_t *head, *next;             /* [node], [maker] + 1: who runs again before it */
};

#define TRY_ALLOC(x)                                                                               \
    do {                                                                                           \
        if (!(x))                                                                                  \
            return KOILA_NO_MEMORY;                                                                \
    } while (0)

static const koila_sig_info *sig_of(const koila__outline *o, koila_node n)
{
    return koila__node_sig(o->g, n);
}

static koila_node producer(const koila__outline *o, koila_value v)
{
    return o->g->values.at[v].node;
}

static koila_value input_of(const koila__outline *o, koila_node n, uint32_t i)
{
    return o->g->inputs.at[o->g->nodes.at[n].first_input + i];
}

static koila_value output_of(const koila__outline *o, koila_node n, uint32_t j)
{
    return o->g->nodes.at[n].first_output + j;
}

/* Does node n read input i as its producer left it: no barrier, and no slice of a whole value? */
static bool is_local(const koila__outline *o, koila_node n, uint32_t i)
{
    const koila_value v = input_of(o, n, i);
    const koila_node m = producer(o, v);
    return m != KOILA_NONE && o->p->node[m].in_loop == o->p->node[n].in_loop &&
           o->p->node[m].axis == o->p->node[n].axis &&
           koila__placement_equal(o->p->need[o->g->nodes.at[n].first_input + i], o->p->value[v]);
}

/* As its producer left it, or rows that a loop makes whole. Nothing crosses loops while it waits in
 * host memory. */
bool koila__outline_may_take(const koila__outline *o, koila_node n, uint32_t i)
{
    const koila_value v = input_of(o, n, i);
    const koila_node m = producer(o, v);
    return is_local(o, n, i) || (!o->uses_host && m != KOILA_NONE && o->p->node[m].in_loop &&
                                 o->p->value[v].kind == KOILA_S);
}

/* ---- storages */

static bool is_view(const koila__outline *o, koila_node n)
{
    const koila_sig_info *s = sig_of(o, n);
    return !s->n_writes && s->n_inputs &&
           ((koila_op_flags(o->g->table, s->op) & KOILA_OP_VIEW) ||
            (koila_op_facts(o->g->table, s->op) & KOILA_FACT_MAY_ALIAS));
}

static void find_roots(koila__outline *o)
{
    for (koila_value v = 0; v < o->g->values.n; v++)
        o->root[v] = v;
    for (koila_node n = 0; n < o->n_nodes; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t j = 0; is_view(o, n) && j < s->n_outputs; j++)
            o->root[output_of(o, n, j)] = o->root[input_of(o, n, 0)];
        for (uint32_t w = 0; w < s->n_writes; w++) {
            const koila_value base = input_of(o, n, s->writes[w].input);
            o->is_part[output_of(o, n, s->n_fresh + w)] = o->root[base] != base || o->is_part[base];
        }
    }
}

/* Is its result its input, in a slice of all rows? */
static bool is_alias(const koila__outline *o, koila_node n)
{
    const koila__fix *f = o->p->node[n].fix;
    for (; f < o->p->node[n].fix + KOILA__MAX_FIXES && f->kind; f++)
        if (f->kind == KOILA__FIX_ALIAS)
            return true;
    return false;
}

/* What the bound counts of result j of node n, which lies in a storage of its own. A write takes
 * over its base, or makes a copy; if the base is a part of a storage, it is no bytes of its own. */
static uint64_t bytes_of(const koila__outline *o, koila_node n, uint32_t j)
{
    const koila_sig_info *s = sig_of(o, n);
    const koila_value v = output_of(o, n, j);
    if (is_alias(o, n) || o->g->values.at[v].meta == KOILA_NONE)
        return 0;
    if (o->is_part[v] || (j >= s->n_fresh && s->n_writes != 1))
        return 0;
    return o->is_whole ? koila__value_meta(o->g, v)->n_storage_bytes
                       : koila__live_bytes(o->p, v, o->options.rows[o->p->node[n].axis]);
}

static uint64_t storage_bytes(const koila__outline *o, koila_value v)
{
    return o->g->values.at[v].meta == KOILA_NONE ? 0 : koila__value_meta(o->g, v)->n_storage_bytes;
}

/* May the node run a second time, as far as its operator goes? */
static bool may_repeat(const koila__outline *o, koila_node n)
{
    const koila_sig_info *s = sig_of(o, n);
    if (s->n_writes || (koila_op_flags(o->g->table, s->op) & (KOILA_OP_RANDOM | KOILA_OP_OPAQUE)))
        return false;
    for (uint32_t j = 0; j < s->n_outputs; j++)
        if (o->p->value[output_of(o, n, j)].kind == KOILA_P)
            return false;
    return true;
}

/* ---- which nodes the bound counts */

static void find_needed(koila__outline *o, const koila_value *targets, uint32_t n_targets)
{
    for (uint32_t i = 0; i < n_targets; i++)
        if (producer(o, targets[i]) != KOILA_NONE)
            o->is_needed[producer(o, targets[i])] = true;
    for (koila_node n = o->n_nodes; n-- > 0;) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t i = 0; i < s->n_inputs && o->is_needed[n]; i++) {
            const koila_node m = producer(o, input_of(o, n, i));
            if (m != KOILA_NONE && koila__reads(s, i))
                o->is_needed[m] = true;
        }
    }
}

/* The loop behind all barriers holds the nodes of the highest level. */
static koila_status find_sure(koila__outline *o, const koila_value *targets, uint32_t n_targets)
{
    uint32_t *level = koila__arena_array(&o->arena, o->n_nodes + 1, sizeof *level);
    uint32_t top = 0;
    uint16_t axis = 0;
    TRY_ALLOC(level);
    find_needed(o, targets, n_targets);
    for (koila_node n = 0; n < o->n_nodes; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t i = 0; i < s->n_inputs && o->is_needed[n]; i++) {
            const koila_node m = producer(o, input_of(o, n, i));
            if (m == KOILA_NONE || !koila__reads(s, i))
                continue;
            const uint32_t from = level[m] + (o->p->node[m].in_loop && !is_local(o, n, i));
            level[n] = from > level[n] ? from : level[n];
        }
        if (!o->is_needed[n] || !o->p->node[n].in_loop || level[n] < top)
            continue;
        if (level[n] > top || o->p->node[n].axis > axis)
            axis = o->p->node[n].axis;
        top = level[n];
    }
    o->last_axis = axis;
    for (koila_node n = 0; n < o->n_nodes; n++)
        o->is_sure[n] = o->is_needed[n] &&
                        (o->is_whole ||
                         (o->p->node[n].in_loop && level[n] == top && o->p->node[n].axis == axis));
    return KOILA_OK;
}

static koila_status find_workspace(koila__outline *o)
{
    if (!o->options.workspace)
        return KOILA_OK;
    o->workspace = koila__arena_array(&o->arena, o->n_nodes + 1, sizeof *o->workspace);
    TRY_ALLOC(o->workspace);
    for (koila_node n = 0; n < o->n_nodes; n++) {
        const uint16_t axis = o->p->node[n].axis;
        if (o->is_sure[n] && !is_view(o, n)) /* views may run earlier */
            o->workspace[n] = o->options.workspace(o->options.user, o->g->nodes.at[n].sig,
                                                   o->is_whole ? 0 : o->options.rows[axis],
                                                   o->is_whole ? 0 : o->g->axes.at[axis]);
    }
    return KOILA_OK;
}

/* ---- the stores, and who reads them */

static uint64_t key_of(koila_node n) { return (uint64_t)n << 32 | UINT32_MAX; }

static koila_status add_makers(koila__outline *o)
{
    for (koila_node n = 0; n <= o->at; n++) {
        const koila_sig_info *s = sig_of(o, n);
        maker m = { .node = n, .first_store = o->stores.n, .first_edge = o->edges.n };
        for (uint32_t j = 0; j < s->n_outputs; j++) {
            const koila_value v = output_of(o, n, j);
            if (o->root[v] != v)
                continue;
            const store x = { .value = v,
                              .made = n,
                              .n_bytes = bytes_of(o, n, j),

                              .last_back = KOILA_NONE,
                              .first_back = KOILA_NONE,
                              .is_write = j >= s->n_fresh,
                              .is_sure = o->is_sure[n] };
            if (!koila__vec_push(&o->mem, &o->stores, x))
                return KOILA_NO_MEMORY;
            o->store_of[v] = o->stores.n;
            m.n_stores++;
        }
        if (!m.n_stores)
            continue;
        m.may_repeat = may_repeat(o, n);
        if (!koila__vec_push(&o->mem, &o->makers, m))
            return KOILA_NO_MEMORY;
    }
    return KOILA_OK;
}

/* May a second value reach node n as its input i, through all the views between? */
static bool takes(const koila__outline *o, koila_node n, uint32_t i)
{
    koila_value v = input_of(o, n, i);
    if (!koila__outline_may_take(o, n, i))
        return false;
    for (; o->root[v] != v; v = input_of(o, producer(o, v), 0))
        if (!may_repeat(o, producer(o, v)) || !koila__outline_may_take(o, producer(o, v), 0))
            return false;
    return true;
}

/* Node n, up to `at`, reads storages; m: it makes some, or NULL. */
static koila_status read_forward(koila__outline *o, koila_node n, maker *m)
{
    const koila_sig_info *s = sig_of(o, n);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value root = o->root[input_of(o, n, i)];
        const uint32_t at = o->store_of[root];
        o->last_use[root] = n;
        if (!at)
            continue;
        if (m && koila__reads(s, i) &&
            !koila__vec_push(&o->mem, &o->edges, ((edge){ at - 1, takes(o, n, i) })))
            return KOILA_NO_MEMORY;
    }
    if (m)
        m->n_edges = o->edges.n - m->first_edge;
    return KOILA_OK;
}

/* Node n, after `at`, reads storages of the forward pass. */
static void read_backward(koila__outline *o, koila_node n)
{
    const koila_sig_info *s = sig_of(o, n);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value v = input_of(o, n, i);
        const uint32_t at = o->store_of[o->root[v]];
        store *x = at ? &o->stores.at[at - 1] : NULL;
        if (!x || (s->n_writes && !koila__reads(s, i)))
            continue;
        if (o->is_sure[n] && !is_view(o, n))
            x->last_back = n;
        if (producer(o, v) > o->at) /* a view that the backward pass made */
            continue;
        if (x->first_back == KOILA_NONE)
            x->first_back = n;
        if (o->root[v] != v && producer(o, v) > x->last_view)
            x->last_view = producer(o, v);
        x->is_held |= koila__outline_may_take(o, n, i);
        x->is_fixed |= !takes(o, n, i);
    }
}

static koila_status find_readers(koila__outline *o)
{
    uint32_t next = 0;
    for (koila_node n = 0; n <= o->at; n++) {
        maker *m = next < o->makers.n && o->makers.at[next].node == n ? &o->makers.at[next] : NULL;
        next += m != NULL;
        if (m)
            m->first_edge = o->edges.n;
        KOILA_TRY(read_forward(o, n, m));
    }
    for (koila_node n = o->at + 1; n < o->n_nodes; n++)
        if (o->is_needed[n])
            read_backward(o, n);
    return KOILA_OK;
}

/* Has the loop that is counted another slice after its first? */
static bool has_second_slice(const koila__outline *o)
{
    return !o->is_whole && o->g->axes.n &&
           2 * o->options.rows[o->last_axis] <= o->g->axes.at[o->last_axis];
}

/* Of n_bytes that are there, those that the walk does not count as storage `root`: a loop's own
 * results are there besides. */
static uint64_t beyond_walk(const koila__outline *o, koila_value root, uint64_t n_bytes)
{
    const koila_node n = producer(o, root);
    if (n == KOILA_NONE || o->is_sure[n])
        return n_bytes;
    const uint64_t walked = bytes_of(o, n, root - output_of(o, n, 0));
    return n_bytes > walked ? n_bytes - walked : 0;
}

/* Results stay. *seen[values]: all false before. */
static void hold_targets(koila__outline *o, const koila_value *targets, uint32_t n_targets,
                         bool *seen)
{
    for (uint32_t i = 0; i < n_targets; i++) {
        const koila_value v = targets[i];
        const koila_value root = o->root[v];
        const koila_node n = producer(o, v);
        if (o->store_of[root]) {
            o->stores.at[o->store_of[root] - 1].is_fixed = true;
            o->stores.at[o->store_of[root] - 1].is_result = true;
        }
        if (n == KOILA_NONE || o->g->values.at[v].meta == KOILA_NONE || seen[root])
            continue;
        seen[root] = true;
        o->results += koila__adds_on(o->p, v) ? 0 : koila__value_meta(o->g, v)->n_bytes;
        if (has_second_slice(o) && o->p->node[n].in_loop && !koila__adds_on(o->p, v))
            o->collected += beyond_walk(o, root, koila__value_meta(o->g, v)->n_bytes);
    }
}

/* Bytes of v, which the loop that is counted reads, but does not make. 0: not known. */
static uint64_t whole_bytes_of(const koila__outline *o, koila_value v)
{
    const koila_value root = o->root[v];
    const koila_node n = producer(o, v);
    if (n == KOILA_NONE || o->g->values.at[v].meta == KOILA_NONE)
        return 0;
    if (o->p->node[n].in_loop) /* collected */
        return koila__value_meta(o->g, v)->n_bytes;
    if (producer(o, root) == KOILA_NONE || o->p->node[producer(o, root)].in_loop ||
        o->is_part[root])
        return 0;
    return storage_bytes(o, root);
}

/* What the loop that is counted needs whole is there in all of its slices. Of the forward pass it
 * may be something else that needs it. *seen[values]: of hold_targets(). */
static void hold_whole(koila__outline *o, bool *seen)
{
    for (koila_node n = o->at + 1; n < o->n_nodes && has_second_slice(o); n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t i = 0; i < s->n_inputs && o->is_sure[n]; i++) {
            const koila_value v = input_of(o, n, i);
            if (!koila__reads(s, i) || seen[o->root[v]] || is_local(o, n, i))
                continue;
            seen[o->root[v]] = true;
            o->collected += beyond_walk(o, o->root[v], whole_bytes_of(o, v));
        }
    }
}

/* Counts what the backward pass makes: the same, whatever is dropped. is_result[values as root]. */
static koila_status count_backward(koila__outline *o, const bool *is_result)
{
    koila_node *last = koila__arena_array(&o->arena, o->g->values.n + 1, sizeof *last);
    TRY_ALLOC(last);
    for (koila_node n = o->at + 1; n < o->n_nodes; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t i = 0; i < s->n_inputs && o->is_sure[n] && !is_view(o, n); i++)
            if (koila__reads(s, i))
                last[o->root[input_of(o, n, i)]] = n;
    }
    for (koila_node n = o->at + 1; n < o->n_nodes; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t j = 0; j < s->n_outputs; j++) {
            const koila_value v = output_of(o, n, j);
            const koila_node begin = n + (j >= s->n_fresh);
            const bool to_end = o->is_whole && is_result[v];
            const uint64_t n_bytes = bytes_of(o, n, j);
            if (o->root[v] != v || !n_bytes || (!last[v] && !to_end && !o->is_sure[n]))
                continue;
            if (last[v] < begin && begin > n)
                continue;
            o->rise0[begin] += n_bytes;
            if (!to_end)
                o->fall0[last[v] > n ? last[v] : n] += n_bytes;
        }
    }
    return KOILA_OK;
}

/* ---- segments */

/* Finds what is held: sums up to each node. crossing[n]: bytes made up to n that later nodes of the
 * forward pass read. */
static koila_status weigh(koila__outline *o)
{
    const koila_node end = o->at + 1;
    uint64_t now = 0;
    uint64_t *ending = koila__arena_array(&o->arena, end, sizeof *ending);
    TRY_ALLOC(ending);
    for (uint32_t k = 0; k < o->makers.n; k++) {
        const maker *m = &o->makers.at[k];
        for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++) {
            const koila_value v = o->stores.at[s].value;
            const uint64_t n_bytes = storage_bytes(o, v);
            o->held[m->node] += o->stores.at[s].is_held ? n_bytes : 0;
            if (o->last_use[v] > m->node) {
                o->crossing[m->node] += n_bytes;
                ending[o->last_use[v]] += n_bytes;
            }
        }
    }
    for (koila_node n = 0; n < end; n++) {
        now += o->crossing[n] - ending[n];
        o->crossing[n] = now;
        o->held[n] += n ? o->held[n - 1] : 0;
    }
    o->all_held = o->held[end - 1];
    return KOILA_OK;
}

/* Does the backward pass read a view that another segment made of it? */
static bool is_viewed_elsewhere(const koila__outline *o, const store *x)
{
    return x->last_view && o->segment[x->last_view] != o->segment[x->made];
}

/* Ends each segment near its share of the held bytes, where the fewest bytes cross. */
static void find_segments(koila__outline *o, uint32_t n_segments)
{
    const koila_node end = o->at + 1;
    uint32_t number = 0;
    o->last_segment = KOILA_NONE;
    if (!n_segments) {
        memset(o->segment, 0, end * sizeof *o->segment);
        return;
    }
    for (koila_node n = 0; n < end && o->all_held; number++) {
        koila_node best = KOILA_NONE;
        for (koila_node k = n; k < end; k++) {
            const double share =
                (double)o->held[k] / (double)o->all_held * (double)n_segments - number;
            if (share > 1.25 && best != KOILA_NONE)
                break;
            if (share >= 0.75 && (best == KOILA_NONE || o->crossing[k] <= o->crossing[best]))
                best = k;
        }
        if (best == KOILA_NONE || number + 1 >= n_segments)
            best = end - 1;
        for (; n <= best; n++)
            o->segment[n] = number;
    }
    o->last_segment = number ? number - 1 : 0;
}

static void cut(koila__outline *o, uint32_t n_segments)
{
    if (o->n_segments == n_segments)
        return;
    o->n_segments = n_segments;
    find_segments(o, n_segments);
    for (uint32_t s = 0; s < o->stores.n; s++)
        o->stays0[s] = o->stores.at[s].is_fixed || is_viewed_elsewhere(o, &o->stores.at[s]);
}

/* ---- what runs again */

static bool can_run_again(const koila__outline *o, const maker *m, const koila__recompute *how)
{
    return m->may_repeat && o->segment[m->node] != o->last_segment &&
           !o->is_spared[m - o->makers.at] && !(how->keeps_expensive && m->is_expensive);
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
static bool could_wait(const koila__outline *o, const store *x, const koila__host *host)
{
    const koila_placement p = o->p->value[x->value];
    if (!x->is_held || x->is_fixed || o->g->values.at[x->value].meta == KOILA_NONE)
        return false;
    const koila_meta_info *m = koila__value_meta(o->g, x->value);
    return m->device == host->device && koila_meta_is_dense(m) &&
           m->n_bytes > o->all_held / KOILA_COST_FEWEST_OFFLOADED &&
           (p.kind == KOILA_R || (p.kind == KOILA_S && p.outer > 0));
}

/* Finds what may wait: the first made come first, for they wait longest. It does where moving it is
 * less work than making it again, and then a view by another segment does not hold it. */
static void find_waiting(koila__outline *o, const koila__recompute *how)
{
    const double share = (double)how->n_offloaded / KOILA__OFFLOAD_PARTS;
    const double most = share * (double)o->all_held;
    uint64_t in_host = 0;
    for (uint32_t k = 0; k < o->makers.n && how->n_offloaded; k++) {
        const maker *m = &o->makers.at[k];
        if ((double)o->held[m->node] > most)
            return;
        for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++) {
            const store *x = &o->stores.at[s];
            const double once =
                koila__offload_work((double)storage_bytes(o, x->value), how->host.price);
            if (!could_wait(o, x, &how->host) || (can_run_again(o, m, how) && 2 * once >= m->work))
                continue;
            const uint64_t n_bytes = host_bytes(storage_bytes(o, x->value));
            if (n_bytes > how->host.n_bytes - in_host)
                return;
            in_host += n_bytes;
            o->may_wait[s] = !x->is_written;
            o->stays[s] &= x->is_written;
        }
    }
}

/* ---- the choice */

/* Maker k runs again: what it reads is wanted, or stays. */
static void want_inputs(koila__outline *o, uint32_t k)
{
    const maker *m = &o->makers.at[k];
    koila_node need = KOILA_NONE;
    for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++)
        if (o->fate[s] == KOILA__AGAIN && o->need[s] < need)
            need = o->need[s];
    o->needs[k] = need;
    for (uint32_t e = m->first_edge; e < m->first_edge + m->n_edges; e++) {
        const edge x = o->edges.at[e];
        const bool is_near = o->segment[o->stores.at[x.store].made] == o->segment[m->node];
        if (!x.takes || !(is_near || o->may_wait[x.store])) {
            o->stays[x.store] = true;
            continue;
        }
        o->wanted[x.store] = true;
        if (need < o->need[x.store])
            o->need[x.store] = need;
    }
}

/* Decides about maker k, of which something is wanted. */
static void decide(koila__outline *o, uint32_t k, const koila__recompute *how)
{
    const maker *m = &o->makers.at[k];
    const uint32_t end = m->first_store + m->n_stores;
    bool any_waits = false;
    for (uint32_t s = m->first_store; s < end; s++)
        any_waits |= o->wanted[s] && o->may_wait[s];
    o->is_again[k] = !any_waits && can_run_again(o, m, how);
    for (uint32_t s = m->first_store; s < end; s++) {
        if (!o->wanted[s])
            continue;
        if (!o->is_again[k] && !o->may_wait[s])
            continue;
        o->any = true;
        o->fate[s] = o->is_again[k] ? KOILA__AGAIN : KOILA__WAITS;
        o->is_read[s] = o->fate[s] == KOILA__WAITS;
        if (o->fate[s] == KOILA__WAITS)
            o->chosen_work +=
                2 * koila__offload_work((double)storage_bytes(o, o->stores.at[s].value),
                                        how->host.price);
    }
    if (!o->is_again[k])
        return;
    o->chosen_work += m->work;
    want_inputs(o, k);
}

/* A call whose results only later calls of the forward pass would need, and these run again, does
 * not run there. */
static void find_first(koila__outline *o)
{
    memset(o->last, 0xff, o->stores.n * sizeof *o->last); /* KOILA_NONE */
    for (uint32_t k = 0; k < o->makers.n; k++)
        for (uint32_t e = 0; o->is_again[k] && e < o->makers.at[k].n_edges; e++) {
            const uint32_t s = o->edges.at[o->makers.at[k].first_edge + e].store;
            o->is_read[s] |= o->fate[s] == KOILA__STAYS;
        }
    for (uint32_t k = o->makers.n; k-- > 0;) {
        const maker *m = &o->makers.at[k];
        o->is_first[k] = false;
        for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++)
            o->is_first[k] |= o->is_read[s];
        if (!o->is_first[k]) {
            o->chosen_work -= o->is_needed[m->node] ? m->work : 0;
            continue;
        }
        for (uint32_t e = m->first_edge; e < m->first_edge + m->n_edges; e++) {
            const uint32_t s = o->edges.at[e].store;
            o->is_read[s] = true;
            if (o->last[s] == KOILA_NONE && o->is_sure[m->node])
                o->last[s] = m->node;
        }
    }
}

/* As `how` says, but for what is spared. */
static bool choose(koila__outline *o, const koila__recompute *how)
{
    const uint32_t S = o->stores.n;
    cut(o, how->n_segments);
    memset(o->fate, KOILA__STAYS, S * sizeof *o->fate);
    memset(o->may_wait, 0, S * sizeof *o->may_wait);
    memcpy(o->wanted, o->wanted0, S * sizeof *o->wanted);
    memcpy(o->need, o->need0, S * sizeof *o->need);
    memcpy(o->stays, o->stays0, S * sizeof *o->stays);
    memcpy(o->is_read, o->is_read0, S * sizeof *o->is_read);
    find_waiting(o, how);
    o->chosen_work = o->work;
    o->any = false;
    for (uint32_t k = o->makers.n; k-- > 0;) {
        const maker *m = &o->makers.at[k];
        bool is_wanted = false;
        o->is_again[k] = false;
        for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++) {
            o->wanted[s] &= !o->stays[s];
            is_wanted |= o->wanted[s];
        }
        if (is_wanted)
            decide(o, k, how);
    }
    find_first(o);
    return o->any;
}

bool koila__outline_choose(koila__outline *o, const koila__recompute *how)
{
    memset(o->is_spared, 0, o->makers.n * sizeof *o->is_spared);
    return choose(o, how);
}

/* ---- the bound */

/* Does maker k run again in the loop that is counted? What runs whole does so before that. */
static bool is_counted(const koila__outline *o, uint32_t k)
{
    return o->is_one && o->is_sure[o->makers.at[k].node];
}

/* What maker k, which runs again, reads ends not before that. */
static void hold_inputs(koila__outline *o, uint32_t k)
{
    const maker *m = &o->makers.at[k];
    const uint64_t key = (uint64_t)o->needs[k] << 32 | k;
    for (uint32_t e = m->first_edge; e < m->first_edge + m->n_edges; e++)
        if (o->end[o->edges.at[e].store] < key)
            o->end[o->edges.at[e].store] = key;
}

static void end_at(koila__outline *o, uint64_t key, uint64_t n_bytes)
{
    if ((uint32_t)key == UINT32_MAX)
        o->fall[key >> 32] += n_bytes;
    else
        o->fall_again[(uint32_t)key] += n_bytes;
}

/* Counts storage s of maker k as it was made first. */
static void count_first(koila__outline *o, uint32_t s, uint32_t k)
{
    const store *x = &o->stores.at[s];
    const bool to_end = o->is_whole && x->is_result;
    const bool stays = o->fate[s] == KOILA__STAYS;
    const koila_node begin = x->made + x->is_write;
    uint64_t end = x->is_sure && o->is_first[k] ? key_of(x->made) : 0;
    if (o->last[s] != KOILA_NONE)
        end = key_of(o->last[s]);
    if (stays && o->end[s] > end)
        end = o->end[s];
    if (!x->n_bytes || ((!end || end < key_of(begin)) && !to_end))
        return;
    o->rise[begin] += x->n_bytes;
    if (!to_end)
        end_at(o, end, x->n_bytes);
}

/* Counts storage s of maker k as it is made again, or comes back from host memory. */
static void count_second(koila__outline *o, uint32_t s, uint32_t k)
{
    const store *x = &o->stores.at[s];
    const uint64_t own = (uint64_t)o->needs[k] << 32 | k;
    if (o->fate[s] == KOILA__WAITS && o->end[s] >= key_of(o->need[s])) {
        o->rise[o->need[s]] += x->n_bytes;
        end_at(o, o->end[s], x->n_bytes);
    }
    if (o->fate[s] == KOILA__WAITS || !o->is_again[k] || (!is_counted(o, k) && !o->end[s]))
        return;
    o->rise_again[k] += x->n_bytes;
    end_at(o, o->fate[s] == KOILA__AGAIN && o->end[s] > own ? o->end[s] : own, x->n_bytes);
}

static void count_all(koila__outline *o)
{
    const size_t n_bytes = ((size_t)o->n_nodes + 1) * sizeof *o->rise;
    memcpy(o->rise, o->rise0, n_bytes);
    memcpy(o->fall, o->fall0, n_bytes);
    memset(o->rise_again, 0, o->makers.n * sizeof *o->rise_again);
    memset(o->fall_again, 0, o->makers.n * sizeof *o->fall_again);
    memset(o->head, 0, ((size_t)o->n_nodes + 1) * sizeof *o->head);
    memcpy(o->end, o->end0, o->stores.n * sizeof *o->end);
    for (uint32_t k = o->makers.n; k-- > 0;) {
        if (!o->is_again[k])
            continue;
        o->next[k] = o->head[o->needs[k]];
        o->head[o->needs[k]] = k + 1;
        if (is_counted(o, k))
            hold_inputs(o, k);
    }
    for (uint32_t k = 0; k < o->makers.n; k++) {
        const maker *m = &o->makers.at[k];
        for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++) {
            count_first(o, s, k);
            count_second(o, s, k);
        }
    }
}

/* The 16th power of what is held, of the most: of two moments, one with 5 % more bytes counts as
 * two of the other. */
static double strain_of(double share)
{
    share *= share;
    share *= share;
    share *= share;
    return share * share;
}

/* What is held, moment by moment. */
typedef struct moments {
    uint64_t now, peak, limit;
    double scale, strain; /* scale: 0: no strain is asked for */
} moments;

/* Node n runs, or its storages are only there. */
static void see(const koila__outline *o, koila_node n, bool runs, moments *m)
{
    const uint64_t now = m->now + (o->workspace && runs ? o->workspace[n] : 0);
    if (now > m->peak)
        m->peak = now;
    if (m->scale > 0)
        m->strain += strain_of((double)(int64_t)now * m->scale);
}

/* Walks over all moments, up to the first that holds more than the limit. */
static void walk(koila__outline *o, moments *m)
{
    uint32_t next = 0;
    count_all(o);
    m->now = m->peak = o->collected;
    for (koila_node n = 0; n < o->n_nodes && m->peak <= m->limit; n++) {
        bool runs = n > o->at;
        if (next < o->makers.n && o->makers.at[next].node == n)
            runs = o->is_first[next++];
        for (uint32_t k = o->head[n]; k; k = o->next[k - 1]) {
            m->now += o->rise_again[k - 1];
            see(o, o->makers.at[k - 1].node, true, m);
            m->now -= o->fall_again[k - 1];
        }
        m->now += o->rise[n];
        see(o, n, runs, m);
        koila_assert(m->now >= o->fall[n]);
        m->now -= o->fall[n];
    }
}

uint64_t koila__outline_bound(koila__outline *o)
{
    moments m = { .limit = UINT64_MAX };
    walk(o, &m);
    return m.peak;
}

bool koila__outline_may_fit(koila__outline *o, uint64_t n_bytes)
{
    moments m = { .limit = n_bytes };
    walk(o, &m);
    return m.peak <= n_bytes;
}

bool koila__outline_is_hopeless(const koila__outline *o, uint64_t bound, uint64_t budget)
{
    if (bound <= budget)
        return false;
    return budget <= o->results || (bound - o->results) / KOILA_COST_HOPELESS > budget - o->results;
}

koila__gauge koila__outline_gauge(koila__outline *o)
{
    moments m = { .limit = UINT64_MAX, .scale = o->most ? 1 / (double)o->most : 0 };
    walk(o, &m);
    return (koila__gauge){ m.peak, m.strain };
}

uint32_t koila__outline_n_makers(const koila__outline *o) { return o->makers.n; }

double koila__outline_maker_work(const koila__outline *o, uint32_t k)
{
    return o->makers.at[k].work;
}

uint64_t koila__outline_maker_bytes(const koila__outline *o, uint32_t k)
{
    const maker *m = &o->makers.at[k];
    uint64_t n_bytes = 0;
    for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++)
        n_bytes += o->stores.at[s].n_bytes;
    return n_bytes;
}

bool koila__outline_is_again(const koila__outline *o, uint32_t k) { return o->is_again[k]; }

bool *koila__outline_spared(koila__outline *o) { return o->is_spared; }

bool koila__outline_choose_makers(koila__outline *o)
{
    return choose(o, &(koila__recompute){ .at = o->at });
}

double koila__outline_work(const koila__outline *o) { return o->chosen_work; }

double koila__outline_recorded(const koila__outline *o, uint32_t *n_needed)
{
    *n_needed = 0;
    for (koila_node n = 0; n < o->n_nodes; n++)
        *n_needed += o->is_needed[n];
    return o->work;
}

/* ---- all of it */

static koila_status find_costs(koila__outline *o)
{
    const koila_table *t = o->g->table;
    koila__cost *cost = koila__arena_array(&o->arena, t->sigs.n, sizeof *cost);
    bool *known = koila__arena_array(&o->arena, t->sigs.n, sizeof *known);
    uint32_t next = 0;
    TRY_ALLOC(cost && known);
    for (koila_node n = 0; n < o->n_nodes; n++) {
        const koila_sig sig = o->g->nodes.at[n].sig;
        if (!known[sig])
            cost[sig] = koila__cost_of(t, sig_of(o, n));
        known[sig] = true;
        o->work += o->is_needed[n] ? cost[sig].work : 0;
        if (next >= o->makers.n || o->makers.at[next].node != n)
            continue;
        o->makers.at[next].work = cost[sig].work;
        o->makers.at[next++].is_expensive = cost[sig].expensive;
    }
    return KOILA_OK;
}

static void find_written(koila__outline *o)
{
    for (koila_node n = 0; n <= o->at; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t w = 0; w < s->n_writes; w++) {
            const uint32_t at = o->store_of[o->root[input_of(o, n, s->writes[w].input)]];
            if (at)
                o->stores.at[at - 1].is_written = true;
        }
    }
}

static koila_status make_arrays(koila__outline *o)
{
    const uint32_t N = o->n_nodes + 1;
    const uint32_t V = o->g->values.n + 1;
#define MAKE(field, n)                                                                             \
    TRY_ALLOC(o->field = koila__arena_array(&o->arena, (size_t)(n), sizeof *o->field))
    MAKE(root, V);
    MAKE(is_part, V);
    MAKE(store_of, V);
    MAKE(last_use, V);
    MAKE(is_needed, N);
    MAKE(is_sure, N);
    MAKE(held, N);
    MAKE(crossing, N);
    MAKE(segment, N);
    MAKE(rise0, N);
    MAKE(fall0, N);
    MAKE(rise, N);
    MAKE(fall, N);
    MAKE(head, N);
    return KOILA_OK;
}

static koila_status make_choice(koila__outline *o)
{
    const uint32_t S = o->stores.n + 1;
    const uint32_t M = o->makers.n + 1;
    MAKE(fate, S);
    MAKE(wanted, S);
    MAKE(stays, S);
    MAKE(may_wait, S);
    MAKE(need, S);
    MAKE(end, S);
    MAKE(needs, M);
    MAKE(is_again, M);
    MAKE(is_spared, M);
    MAKE(is_first, M);
    MAKE(is_read, S);
    MAKE(last, S);
    MAKE(rise_again, M);
    MAKE(fall_again, M);
    MAKE(next, M);
    MAKE(wanted0, S);
    MAKE(stays0, S);
    MAKE(is_read0, S);
    MAKE(need0, S);
    MAKE(end0, S);
#undef MAKE
    for (uint32_t s = 0; s < o->stores.n; s++) {
        const store *x = &o->stores.at[s];
        o->wanted0[s] = x->first_back != KOILA_NONE;
        o->need0[s] = x->first_back;
        o->is_read0[s] = x->is_result || x->first_back != KOILA_NONE;
        o->end0[s] = x->last_back == KOILA_NONE ? 0 : key_of(x->last_back);
    }
    o->n_segments = KOILA_NONE; /* not cut yet */
    return KOILA_OK;
}

static koila_status fill(koila__outline *o, const koila_value *targets, uint32_t n_targets)
{
    KOILA_TRY(make_arrays(o));
    bool *is_result = koila__arena_array(&o->arena, o->g->values.n + 1, sizeof *is_result);
    TRY_ALLOC(is_result);
    find_roots(o);
    KOILA_TRY(find_sure(o, targets, n_targets));
    KOILA_TRY(find_workspace(o));
    KOILA_TRY(add_makers(o));
    KOILA_TRY(find_readers(o));
    find_written(o);
    hold_targets(o, targets, n_targets, is_result);
    KOILA_TRY(count_backward(o, is_result));
    hold_whole(o, is_result);
    KOILA_TRY(weigh(o));
    KOILA_TRY(find_costs(o));
    KOILA_TRY(make_choice(o));
    memset(o->is_spared, true, o->makers.n * sizeof *o->is_spared);
    koila__outline_choose_makers(o);
    o->most = koila__outline_bound(o);
    return KOILA_OK;
}

koila_status koila__outline_new(koila__outline **out, const koila__placed *p,
                                const koila_value *targets, uint32_t n_targets, koila_node at,
                                const koila__outline_options *options, const koila_allocator *mem)
{
    const koila_allocator a = koila__allocator(mem);
    koila__outline *o = koila__realloc(&a, NULL, 0, sizeof *o);
    if (!o)
        return KOILA_NO_MEMORY;
    koila_assert(at < p->graph->nodes.n && !p->cut && !p->absent);
    *o = (koila__outline){ .p = p,
                           .g = p->graph,
                           .options = *options,
                           .mem = a,
                           .at = at,
                           .n_nodes = p->graph->nodes.n,
                           .last_segment = KOILA_NONE,
                           .uses_host = options->uses_host,
                           .is_whole = options->n_loops == 0,
                           .is_one = options->n_loops <= 1 };
    koila__arena_init(&o->arena, &a);
    const koila_status status = fill(o, targets, n_targets);
    if (status != KOILA_OK) {
        koila__outline_free(o);
        return status;
    }
    *out = o;
    return KOILA_OK;
}

void koila__outline_free(koila__outline *o)
{
    if (!o)
        return;
    const koila_allocator mem = o->mem;
    koila__vec_free(&mem, &o->stores);
    koila__vec_free(&mem, &o->makers);
    koila__vec_free(&mem, &o->edges);
    koila__arena_deinit(&o->arena);
    koila__release(&mem, o, sizeof *o);
}

koila_value koila__outline_root(const koila__outline *o, koila_value v) { return o->root[v]; }

koila__fate koila__outline_fate(const koila__outline *o, koila_value root)
{
    const uint32_t at = o->store_of[root];
    return at ? (koila__fate)o->fate[at - 1] : KOILA__STAYS;
}

koila_node koila__outline_last(const koila__outline *o, koila_value root)
{
    return o->last_use[root];
}

bool koila__outline_is_needed(const koila__outline *o, koila_node n) { return o->is_needed[n]; }
