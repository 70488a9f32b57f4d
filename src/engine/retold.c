/* retold.c — a recorded step written down anew, with the same results. */
#include "engine/retold.h"

#include "engine/slice_call.h"
#include "graph/table.h"

#include <string.h>

void koila__retold_deinit(koila__retold *x)
{
    koila_graph_free(x->graph);
    x->graph = NULL;
    koila__arena_deinit(&x->keep);
}

koila_status koila__retold_again(koila__retold *x, uint32_t n_targets, koila__retold *next)
{
    const uint32_t n_nodes = next->graph->nodes.n;
    koila_node *node = koila__arena_array(&x->keep, n_nodes, sizeof *node);
    TRY_ALLOC(node);
    for (koila_node n = 0; n < n_nodes; n++)
        node[n] = x->node[next->node[n]];
    for (koila_value v = 0; v < x->n_values; v++)
        if (x->value[v] != KOILA_NONE)
            x->value[v] = next->value[x->value[v]];
    memcpy(x->targets, next->targets, n_targets * sizeof *x->targets);
    x->node = node;
    koila_graph_free(x->graph);
    x->graph = next->graph;
    next->graph = NULL;
    return KOILA_OK;
}

koila_status koila__retold_name(const koila__retold *x, koila__placed *p)
{
    koila_value *lowered = koila__arena_array(&p->arena, x->n_values, sizeof *lowered);
    TRY_ALLOC(lowered);
    for (koila_value v = 0; v < x->n_values; v++)
        lowered[v] = x->value[v] == KOILA_NONE ? KOILA_NONE : p->lowered[x->value[v]];
    for (koila_node n = 0; n < p->graph->nodes.n; n++)
        p->node[n].recorded = x->node[p->node[n].recorded];
    p->lowered = lowered;
    p->n_recorded_values = x->n_values;
    return KOILA_OK;
}

/* ---- writing one */

koila_status koila__reteller_init(koila__reteller *r, const koila_graph *from,
                                  const koila_allocator *mem)
{
    *r = (koila__reteller){ .from = from, .table = from->table, .mem = koila__allocator(mem) };
    koila__arena_init(&r->tmp, &r->mem);
    KOILA_TRY(koila_graph_new(r->table, &r->mem, &r->to));
    r->value = koila__arena_array(&r->tmp, from->values.n, sizeof *r->value);
    TRY_ALLOC(r->value &&
              koila__graph_reserve(r->to, from->nodes.n, from->inputs.n, from->values.n));
    memset(r->value, 0xff, from->values.n * sizeof *r->value);
    for (uint32_t a = 0; a < from->axes.n; a++) {
        uint16_t axis;
        KOILA_TRY(koila_graph_axis(r->to, from->axes.at[a], &axis));
    }
    KOILA_TRY(koila__graph_copy_lines(r->to, from));
    for (koila_value v = 0; v < from->values.n; v++)
        if (from->values.at[v].node == KOILA_NONE)
            KOILA_TRY(koila__graph_copy_leaf(r->to, from, v, &r->value[v]));
    return KOILA_OK;
}

void koila__reteller_deinit(koila__reteller *r)
{
    koila_graph_free(r->to);
    koila__vec_free(&r->mem, &r->nodes);
    koila__arena_deinit(&r->tmp);
}

koila_status koila__retell(koila__reteller *r, koila_sig sig, const koila_value *in,
                           koila_value *first)
{
    KOILA_TRY(koila_graph_node(r->to, sig, in, r->from->nodes.at[r->now].line, first));
    return koila__vec_push(&r->mem, &r->nodes, r->now) ? KOILA_OK : KOILA_NO_MEMORY;
}

koila_status koila__retell_on(koila__reteller *r, koila_op op, koila_value in,
                              const koila_arg *args, uint32_t n_pos, uint32_t n_args,
                              koila_meta out, koila_value *result)
{
    koila_sig sig;
    KOILA_TRY(
        koila__tell_on(r->table, op, r->to->values.at[in].meta, args, n_pos, n_args, out, &sig));
    return koila__retell(r, sig, &in, result);
}

koila_status koila__retell_as_it_is(koila__reteller *r, const koila_value *in)
{
    const koila_node_info *info = &r->from->nodes.at[r->now];
    const koila_sig_info *s = koila__node_sig(r->from, r->now);
    const koila__mark before = koila__arena_mark(&r->tmp);
    koila_meta *metas = koila__arena_array(&r->tmp, s->n_inputs, sizeof *metas);
    koila_value first;
    koila_sig sig;
    TRY_ALLOC(metas);
    for (uint32_t i = 0; i < s->n_inputs; i++)
        metas[i] = r->to->values.at[in[i]].meta;
    KOILA_TRY(koila__tell_metas(r->table, info->sig, metas, &r->tmp, &sig));
    koila__arena_rewind(&r->tmp, before);
    KOILA_TRY(koila__retell(r, sig, in, &first));
    const uint32_t n_outputs = koila__node_sig(r->from, r->now)->n_outputs;
    for (uint32_t o = 0; o < n_outputs; o++)
        r->value[info->first_output + o] = first + o;
    return KOILA_OK;
}

koila_status koila__reteller_finish(koila__reteller *r, const koila_value *targets,
                                    uint32_t n_targets, koila__retold *out)
{
    *out = (koila__retold){ .n_values = r->from->values.n };
    koila__arena_init(&out->keep, &r->mem);
    out->targets = koila__arena_copy(&out->keep, targets, n_targets * sizeof *targets);
    out->value = koila__arena_copy(&out->keep, r->value, out->n_values * sizeof *r->value);
    out->node = koila__arena_copy(&out->keep, r->nodes.at, r->nodes.n * sizeof *r->nodes.at);
    if (!out->targets || !out->value || !out->node) {
        koila__retold_deinit(out);
        return KOILA_NO_MEMORY;
    }
    out->graph = r->to;
    r->to = NULL;
    return KOILA_OK;
}
