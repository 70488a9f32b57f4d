/* rules_index.c — reading and writing by index. The index rows follow the slice; the table must be whole, and its gradient is a partial sum. */
#include "emit.h"

/* embedding(table, index[...]): rows of the index are rows of the result */
bool koila__rule_embedding(koila__case *c)
{
    if (c->n_in != 2) return false;
    if (koila__is_sum(c->in[0]) && koila__is_r(c->in[1])) return c->out[0] = c->in[0], true; /* linear in the table */
    if (koila__any_p(c) || !koila__is_s(c->in[1])) return false;
    koila__need_r(c, 0);
    c->out[0] = c->in[1];
    return true;
}

/* embedding_dense_backward(grad[..., E], index[...], n, padding_idx, scale_grad_by_freq) -> [n, E] */
bool koila__rule_embedding_backward(koila__case *c)
{
    bool by_freq;
    const uint32_t lead = koila__lead(c);
    if (c->n_in != 2 || !koila__arg_bool(c, 4, false, &by_freq) || by_freq) return false;
    if (koila__any_p(c)) return koila__is_sum(c->in[0]) && koila__is_r(c->in[1]) && (c->out[0] = c->in[0], true);
    if (lead == KOILA_NONE) return false;
    const koila_placement p = c->in[lead];
    if (p.dim >= c->in_meta[1]->n_dims || !koila__need(c, 0, p) || !koila__need(c, 1, p)) return false;
    c->out[0] = koila__p(c, KOILA_SUM);
    return true;
}

/* take(x, index): the result has the index's shape; x whole */
bool koila__rule_take(koila__case *c)
{
    if (c->n_in != 2 || koila__any_p(c) || !koila__is_s(c->in[1])) return false;
    koila__need_r(c, 0);
    c->out[0] = c->in[1];
    return true;
}
