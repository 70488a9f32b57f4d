/* placed_check.c — the equations of place.h, held against a placed graph. */
#include "placement/rules.h"

static bool is_slice_of(const koila_graph *g, koila_placement p, const koila_meta_info *m)
{
    return p.dim < m->n_dims &&
           m->size[p.dim] == koila__extent(p, koila_graph_axis_size(g, p.axis));
}

static bool check_value(const koila__placed *p, koila_value v, koila_error *err)
{
    const koila_graph *g = p->graph;
    const koila_placement q = p->value[v];
    const koila_value_info info = koila_value_get(g, v);
    KOILA__HOLDS(err, q.kind != KOILA_FREE, "value %u: still FREE", v);
    if (q.kind == KOILA_R)
        return true;
    KOILA__HOLDS(err, info.meta != KOILA_NONE, "value %u: a result that does not exist is placed",
                 v);
    KOILA__HOLDS(err, q.axis < koila_graph_n_axes(g), "value %u: no axis %u", v, q.axis);
    if (q.kind == KOILA_P || koila__is_opaque(q))
        return true;
    KOILA__HOLDS(err, is_slice_of(g, q, koila_meta_get(koila_graph_table(g), info.meta)),
                 "value %u: size[%u] is not outer * batch * inner", v, q.dim);
    return true;
}

static bool check_need(const koila__placed *p, koila_node n, uint32_t i, koila_error *err)
{
    const koila_graph *g = p->graph;
    const koila_table *t = koila_graph_table(g);
    const koila_node_info info = koila_node_get(g, n);
    const koila_placement need = p->need[info.first_input + i];
    const koila_placement is = p->value[koila_node_inputs(g, n)[i]];
    if (need.kind == KOILA_R)
        return true;
    KOILA__HOLDS(err, need.axis == p->node[n].axis, "node %u: input %u is of another axis", n, i);
    KOILA__HOLDS(err,
                 koila__placement_equal(need, is) || (need.kind == KOILA_S && is.kind == KOILA_R),
                 "node %u: input %u cannot become what is needed", n, i);
    if (need.kind == KOILA_S && !koila__is_opaque(need))
        KOILA__HOLDS(err,
                     is_slice_of(g, need, koila_meta_get(t, koila_sig_get(t, info.sig)->inputs[i])),
                     "node %u: input %u: no such slice", n, i);
    return true;
}

/* Note [Pieces]: what a node needs is in its slice, and what it leaves there is known to be absent
 * elsewhere. */
static bool check_pieces(const koila__placed *p, koila_node n, koila_error *err)
{
    const koila_node_info info = koila_node_get(p->graph, n);
    const koila_sig_info *sig = koila_sig_get(koila_graph_table(p->graph), info.sig);
    const koila__placed_node *node = &p->node[n];
    const bool sees_all = node->joins || node->sums;
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_placement need = p->need[info.first_input + i];
        if (!koila__is_piece(need) || sees_all)
            continue;
        KOILA__HOLDS(err,
                     node->end == 0 ? p->absent[koila_node_inputs(p->graph, n)[i]]
                                    : node->begin <= need.outer && need.inner <= node->end,
                     "node %u: input %u is a piece of another slice", n, i);
    }
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        const koila_value v = info.first_output + j;
        if (sig->outputs[j] == KOILA_NONE)
            continue;
        KOILA__HOLDS(err, !node->end || (node->in_loop && p->absent[v]),
                     "node %u: result %u is absent", n, j);
        KOILA__HOLDS(err,
                     !koila__is_piece(p->value[v]) ||
                         (p->value[v].outer == node->begin && p->value[v].inner == node->end),
                     "node %u: result %u is a piece of another slice", n, j);
    }
    return true;
}

static bool check_node(const koila__placed *p, koila_node n, koila_error *err)
{
    const koila_node_info info = koila_node_get(p->graph, n);
    const koila_sig_info *sig = koila_sig_get(koila_graph_table(p->graph), info.sig);
    const koila_value *in = koila_node_inputs(p->graph, n);
    bool loop = false;
    bool whole_result = false;
    bool gathered = false;
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_placement need = p->need[info.first_input + i];
        loop |= need.kind != KOILA_R;
        gathered |= need.kind == KOILA_R && koila__is_of_rows(p->value[in[i]]);
        if (!check_need(p, n, i, err))
            return false;
    }
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        const koila_placement is = p->value[info.first_output + j];
        if (sig->outputs[j] == KOILA_NONE)
            continue;
        loop |= is.kind != KOILA_R;
        whole_result |= is.kind == KOILA_R;
        KOILA__HOLDS(err, is.kind == KOILA_R || is.axis == p->node[n].axis,
                     "node %u: result %u is of another axis", n, j);
    }
    KOILA__HOLDS(err, loop == (p->node[n].in_loop != 0), "node %u: in_loop", n);
    KOILA__HOLDS(err, !(loop && whole_result), "node %u: a whole result made in a loop", n);
    KOILA__HOLDS(err, gathered == (p->node[n].gathered != 0), "node %u: gathered", n);
    return check_pieces(p, n, err);
}

bool koila__placed_check(const koila__placed *p, koila_error *err)
{
    if (!koila_graph_check(p->graph, err))
        return false;
    for (uint32_t v = 0; v < koila_graph_n_values(p->graph); v++)
        if (!check_value(p, v, err))
            return false;
    for (uint32_t n = 0; n < koila_graph_n_nodes(p->graph); n++)
        if (!check_node(p, n, err))
            return false;
    return true;
}
