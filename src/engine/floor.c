/* floor.c — bytes that no plan of a family goes below.
 *
 * Where nothing fits, each family of plans would be searched for the error alone. What is always
 * there says sooner that one is not worth it: a call's operands and results, and the results of the
 * step that were made before. Each is one walk over the recorded nodes or the targets; nothing is
 * placed or scheduled for it.
 *
 * Calls of which these bounds know too little count as nothing: writes, which may take over their
 * base, and results that may be views of an input. */
#include "engine/floor.h"

#include "engine/addends.h"
#include "graph/table.h"

typedef struct floor_walk {
    const koila_graph *g;
    koila_value *root; /* [value] the value that names its storage */
    bool *is_needed;   /* [node] */
    bool *is_result;   /* [value as root] */
    bool *is_term;     /* [value] of a sum, which a call can add to the other one: addends.c */
    koila_node *seen;  /* [value as root] the node that counted it last, + 1 */
    uint64_t held;     /* results so far */
} floor_walk;

static const koila_sig_info *sig_of(const koila_graph *g, koila_node n)
{
    return koila__node_sig(g, n);
}

/* May the results of node n be its first input, or views of it? */
static bool is_view(const koila_graph *g, koila_node n)
{
    const koila_op op = sig_of(g, n)->op;
    return (koila__flags_of_op(g->table, op) & KOILA_OP_VIEW) ||
           (koila__facts_of_op(g->table, op) & KOILA_FACT_MAY_ALIAS);
}

/* Bytes that v takes at least. */
static uint64_t bytes_of(const koila_graph *g, koila_value v)
{
    if (g->values.at[v].meta == KOILA_NONE)
        return 0;
    const koila_meta_info *m = koila__value_meta(g, v);
    return m->n_bytes < m->n_storage_bytes ? m->n_bytes : m->n_storage_bytes;
}

static void find_roots(floor_walk *w)
{
    const koila_graph *g = w->g;
    for (koila_value v = 0; v < g->values.n; v++)
        w->root[v] = v;
    for (koila_node n = 0; n < g->nodes.n; n++) {
        const koila_sig_info *s = sig_of(g, n);
        const koila_node_info *info = &g->nodes.at[n];
        for (uint32_t o = 0; s->n_inputs && is_view(g, n) && o < s->n_fresh; o++)
            w->root[info->first_output + o] = w->root[g->inputs.at[info->first_input]];
    }
}

static void find_terms(floor_walk *w)
{
    const koila_graph *g = w->g;
    for (koila_node n = 0; n < g->nodes.n; n++)
        for (uint32_t i = 0; i < 2 && koila__adds_two(g->table, sig_of(g, n)); i++) {
            const koila_value v = g->inputs.at[g->nodes.at[n].first_input + i];
            const koila_node m = g->values.at[v].node;
            w->is_term[v] = m != KOILA_NONE && koila__adds_onto(g->table, sig_of(g, m));
        }
}

static void find_needed(floor_walk *w, const koila_value *targets, uint32_t n_targets)
{
    const koila_graph *g = w->g;
    for (uint32_t i = 0; i < n_targets; i++) {
        w->is_result[w->root[targets[i]]] = true;
        if (g->values.at[targets[i]].node != KOILA_NONE)
            w->is_needed[g->values.at[targets[i]].node] = true;
    }
    for (koila_node n = g->nodes.n; n-- > 0;) {
        const koila_sig_info *s = sig_of(g, n);
        for (uint32_t i = 0; i < s->n_inputs && w->is_needed[n]; i++) {
            const koila_node m = g->values.at[g->inputs.at[g->nodes.at[n].first_input + i]].node;
            if (m != KOILA_NONE && koila__reads(s, i))
                w->is_needed[m] = true;
        }
    }
}

/* Bytes of storage `root` at node n, counted once, beside results that are held. */
static uint64_t count(floor_walk *w, koila_node n, koila_value root)
{
    const bool is_held = w->is_result[root] && w->seen[root];
    if (w->g->values.at[root].node == KOILA_NONE || w->seen[root] == n + 1 || is_held)
        return 0;
    w->seen[root] = n + 1;
    return bytes_of(w->g, root);
}

/* What is there while node n runs. */
static uint64_t count_node(floor_walk *w, koila_node n)
{
    const koila_graph *g = w->g;
    const koila_sig_info *s = sig_of(g, n);
    const koila_node_info *info = &g->nodes.at[n];
    uint64_t there = w->held;
    /* makes results while it frees what it is given, or writes over it */
    const bool frees = (koila__facts_of_op(g->table, s->op) & KOILA_FACT_OPAQUE_BACKWARD) ||
                       koila__adds_two(g->table, s);
    if (is_view(g, n) || s->n_writes)
        return 0;
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value root = w->root[g->inputs.at[info->first_input + i]];
        if (koila__reads(s, i) && !w->is_result[root] && !w->is_term[root])
            there += count(w, n, root);
    }
    for (uint32_t o = 0; o < s->n_fresh; o++) {
        const koila_value v = info->first_output + o;
        const uint64_t n_bytes = count(w, n, v);
        there += frees || w->is_term[v] ? 0 : n_bytes;
        w->held += w->is_result[v] ? n_bytes : 0;
    }
    return there;
}

koila_status koila__floor_whole(const koila_graph *g, const koila_value *targets,
                                uint32_t n_targets, const koila_allocator *mem, uint64_t *n_bytes)
{
    koila__arena tmp;
    koila__arena_init(&tmp, mem);
    floor_walk w = { .g = g,
                     .root = koila__arena_room(&tmp, g->values.n * sizeof *w.root + 1),
                     .is_needed = koila__arena_array(&tmp, g->nodes.n + 1, sizeof *w.is_needed),
                     .is_result = koila__arena_array(&tmp, g->values.n + 1, sizeof *w.is_result),
                     .is_term = koila__arena_array(&tmp, g->values.n + 1, sizeof *w.is_term),
                     .seen = koila__arena_array(&tmp, g->values.n + 1, sizeof *w.seen) };
    const bool is_there = w.root && w.is_needed && w.is_result && w.is_term && w.seen;
    *n_bytes = 0;
    if (is_there) {
        find_roots(&w);
        find_terms(&w);
        find_needed(&w, targets, n_targets);
    }
    for (koila_node n = 0; n < g->nodes.n && is_there; n++) {
        const uint64_t there = w.is_needed[n] ? count_node(&w, n) : 0;
        *n_bytes = there > *n_bytes ? there : *n_bytes;
    }
    koila__arena_deinit(&tmp);
    return is_there ? KOILA_OK : KOILA_NO_MEMORY;
}

/* From the second row on all sums are there, and what a row adds to one of them is as large, unless
 * it is added as it is made. */
koila_status koila__floor_both(const koila_plan *p, uint64_t *n_bytes)
{
    const koila__placed *placed = p->placed;
    const koila_graph *g = placed->graph;
    uint64_t sum = 0, largest = 0;
    koila__arena tmp;
    *n_bytes = 0;
    if (p->schedule.n_loops != 1)
        return KOILA_OK;
    koila__arena_init(&tmp, &p->mem);
    bool *seen = koila__arena_array(&tmp, g->values.n + 1, sizeof *seen);
    for (uint32_t i = 0; seen && i < p->n_targets; i++) {
        const koila_value v = p->targets[i];
        const koila_node n = g->values.at[v].node;
        if (n == KOILA_NONE || seen[v] || !placed->node[n].in_loop || is_view(g, n) ||
            sig_of(g, n)->n_writes || placed->value[v].kind != KOILA_P)
            continue;
        seen[v] = true;
        sum += bytes_of(g, v);
        if (!koila__is_addend(placed, v))
            largest = bytes_of(g, v) > largest ? bytes_of(g, v) : largest;
    }
    koila__arena_deinit(&tmp);
    *n_bytes = sum + largest;
    return seen ? KOILA_OK : KOILA_NO_MEMORY;
}
