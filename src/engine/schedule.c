/* schedule.c — demands become loops.
 *
 * An edge that needs a whole value of something sharded or partial is a *barrier*. The level of a
 * node is the largest number of barriers on a path to it; the nodes of one level and axis can share
 * one loop over the slices. Loops are demand-driven: loop j makes its *targets* (results, and
 * values that a barrier needs), and runs the nodes that those need, in recorded order.
 *
 *   loops.c    which loops there are, and which loop makes what: once a step
 *   policy.c   what a loop keeps for later ones, what it runs then, and the work of that
 *   emit.c     the instructions and events of one policy
 *
 * schedule_state.h holds what they share. Here a scheduler begins and ends.
 *
 * Time: everything is a pass over nodes and uses, or over the loops that each node runs in (64 to a
 * cell), or over the instructions. A policy that recomputes so much that its instructions grow out
 * of proportion (KOILA_COST_MAX_INSTRS) is refused. */
#include "engine/schedule_state.h"

#include "graph/table.h"

koila_status koila__schedule_failed(koila_status status, koila_error *err)
{
    return koila__fail(err, status, 0, "schedule: %s",
                       status == KOILA_UNSUPPORTED ? "too many barriers in a row"
                                                   : koila_status_text(status));
}

koila_status koila__scheduler_new(koila__scheduler **out, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets, bool cheap,
                                  const koila_allocator *mem, koila_error *err)
{
    const koila_allocator a = koila__allocator(mem);
    koila__scheduler *w = koila__realloc(&a, NULL, 0, sizeof *w);
    if (!w)
        return koila__schedule_failed(KOILA_NO_MEMORY, err);
    *w = (koila__scheduler){ .p = p,
                             .g = p->graph,
                             .keep = { .cheap = cheap },
                             .mem = a,
                             .n_nodes = p->graph->nodes.n,
                             .n_values = p->graph->values.n };
    koila__arena_init(&w->tmp, mem);
    koila__arena_init(&w->spare, mem);
    const koila_status status = koila__loops_find(w, targets, n_targets);
    if (status != KOILA_OK) {
        koila__scheduler_free(w);
        return koila__schedule_failed(status, err);
    }
    *out = w;
    return KOILA_OK;
}

void koila__scheduler_free(koila__scheduler *w)
{
    if (!w)
        return;
    const koila_allocator mem = w->mem;
    koila__vec_free(&w->mem, &w->instrs);
    koila__vec_free(&w->mem, &w->events);
    koila__vec_free(&w->mem, &w->cells);
    koila__arena_deinit(&w->tmp);
    koila__arena_deinit(&w->spare);
    koila__release(&mem, w, sizeof *w);
}

uint32_t koila__scheduler_n_loops(const koila__scheduler *w) { return w->n_loops; }

koila_status koila__schedule_init(koila__schedule *out, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets, koila__keep keep,
                                  const koila_allocator *mem, koila_error *err)
{
    koila__scheduler *w = NULL;
    KOILA_TRY(koila__scheduler_new(&w, p, targets, n_targets, keep.cheap, mem, err));
    const koila_status status = koila__schedule_make(w, keep, out, err);
    koila__scheduler_free(w);
    return status;
}

/* State of koila__schedule_whole_bytes(). */
typedef struct whole_step {
    const koila_graph *g;
    /* [value] the node after the last one that uses its storage; KOILA_NONE: lives to the end; 0:
     * not needed */
    koila_node *end;
    /* [node] bytes that begin there minus bytes that end there, modulo 2^64 */
    uint64_t *rise;
    uint64_t sum; /* of all bytes */
    bool adds_up;
} whole_step;

/* Counts the results of node n, and how long its inputs are needed. Results of writes are left out:
 * they may be in place or copies. A sum may be written over a term, and counts from the next node
 * on. */
static void count_node(whole_step *x, koila_node n)
{
    const koila_graph *g = x->g;
    const koila_sig_info *s = koila__node_sig(g, n);
    const koila_node_info *info = &g->nodes.at[n];
    const bool alias = maybe_alias(g->table, s->op);
    const koila_node begin = n + koila__adds_two(g->table, s);
    koila_node last = 0;
    for (koila_value v = info->first_output; v < info->first_output + s->n_outputs; v++)
        last = x->end[v] > last ? x->end[v] : last;
    if (!last)
        return; /* nobody needs it */
    for (uint32_t o = 0; o < s->n_fresh && !alias; o++) {
        const koila_node end = x->end[info->first_output + o];
        if (s->outputs[o] == KOILA_NONE)
            continue;
        const uint64_t n_bytes = koila__meta(g->table, s->outputs[o])->n_storage_bytes;
        x->adds_up &= koila__add(x->sum, n_bytes, &x->sum);
        x->rise[begin] += n_bytes;
        if (end != KOILA_NONE)
            x->rise[end ? end : n + 1] -= n_bytes;
    }
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value v = g->inputs.at[info->first_input + i];
        const koila_node until = alias && i == 0 && !s->n_writes ? last : n + 1;
        if (x->end[v] < until && koila__reads(s, i))
            x->end[v] = until;
    }
}

koila_status koila__schedule_whole_bytes(const koila_graph *g, const koila_value *targets,
                                         uint32_t n_targets, const koila_allocator *mem,
                                         uint64_t *at_least)
{
    koila__arena tmp;
    koila__arena_init(&tmp, mem);
    whole_step x = { .g = g,
                     .end = koila__arena_array(&tmp, g->values.n, sizeof *x.end),
                     .rise = koila__arena_array(&tmp, (size_t)g->nodes.n + 1, sizeof *x.rise),
                     .adds_up = true };
    uint64_t live = 0;
    *at_least = 0;
    if (!x.end || !x.rise) {
        koila__arena_deinit(&tmp);
        return KOILA_NO_MEMORY;
    }
    for (uint32_t i = 0; i < n_targets; i++)
        x.end[targets[i]] = KOILA_NONE;
    for (koila_node n = g->nodes.n; n-- > 0;)
        count_node(&x, n);
    for (koila_node n = 0; n < g->nodes.n && x.adds_up; n++) {
        live += x.rise[n];
        koila_assert(live <= x.sum);
        if (live > *at_least)
            *at_least = live;
    }
    koila__arena_deinit(&tmp);
    return KOILA_OK;
}

void koila__schedule_recycle(koila__scheduler *w, koila__schedule *s)
{
    koila__arena_deinit(&w->spare);
    w->spare = s->arena;
    koila__arena_empty(&w->spare);
    *s = (koila__schedule){ 0 };
}

void koila__schedule_deinit(koila__schedule *s) { koila__arena_deinit(&s->arena); }
