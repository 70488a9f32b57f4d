/* rules_conv.c — padding, unfolding and grids: images of the batch are independent. */
#include "placement/rules.h"

/* constant_pad_nd(x, pad, value): pad names dims from the last, two numbers each */
bool koila__rule_pad(koila__case *c)
{
    const koila_arg *pad = koila__arg(c, 1);
    if (!pad || pad->kind != KOILA_ARG_LIST || c->n_in != 1)
        return false;
    if (koila__any_p(c)) {
        double value;
        return koila__arg_number(c, 2, 0, &value) && value == 0 && koila__linear_in_first(c);
    }
    if (!koila__is_s(c->in[0]))
        return false;
    const uint32_t from_last = c->in_meta[0]->n_dims - 1u - c->in[0].dim;
    if (2 * from_last + 1 < pad->n &&
        (pad[1 + 2 * from_last].u.i != 0 || pad[2 + 2 * from_last].u.i != 0))
        return false;
    c->out[0] = c->in[0];
    return true;
}

/* im2col(x[N, C, H, W]) -> [N, C * k, L] and back: only the batch */
bool koila__rule_im2col(koila__case *c)
{
    if (koila__any_p(c) || c->n_in != 1 || !koila__is_s(c->in[0]) || c->in[0].dim != 0 ||
        c->in_meta[0]->n_dims < 3)
        return false;
    if (c->out_meta[0]->n_dims < 3)
        return false;
    c->out[0] = c->in[0];
    return koila__fits(c, c->out[0], c->out_meta[0]);
}

/* grid_sampler(x[N, ...], grid[N, ...], ...) and backward (grad, x, grid, ..., mask): images of the
 * batch, each with its grid */
bool koila__rule_grid_sampler(koila__case *c)
{
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || lead == KOILA_NONE || c->in[lead].dim != 0)
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (!koila__need(c, i, c->in[lead]))
            return false;
    return koila__out_all(c, c->in[lead]);
}

/* _cdist_forward(a[..., P, D], b[..., Q, D], p, mode) -> [..., P, Q] */
bool koila__rule_cdist(koila__case *c)
{
    if (koila__any_p(c) || c->n_in != 2)
        return false;
    const uint32_t n = c->out_meta[0]->n_dims;
    if (c->in_meta[0]->n_dims != n || c->in_meta[1]->n_dims != n || n < 2)
        return false;
    const uint32_t lead = koila__lead(c);
    if (lead == KOILA_NONE)
        return false;
    const koila_placement p = c->in[lead];
    if (p.dim == n - 1u)
        return false;
    if (p.dim < n - 2u) {
        if (!koila__need(c, 0, p) || !koila__need(c, 1, p))
            return false;
        c->out[0] = p;
        return true;
    }
    koila__need_r(c, 1 - lead);
    c->out[0] = koila__moved(p, lead == 0 ? n - 2u : n - 1u);
    return true;
}

/* _cdist_backward(grad[..., P, Q], a, b, p, cdist) -> gradient of a */
bool koila__rule_cdist_backward(koila__case *c)
{
    if (koila__any_p(c) || c->n_in != 4)
        return false;
    const uint32_t n = c->out_meta[0]->n_dims;
    for (uint32_t i = 0; i < 4; i++)
        if (c->in_meta[i]->n_dims != n)
            return false;
    const uint32_t lead = koila__lead(c);
    if (lead == KOILA_NONE)
        return false;
    koila_placement p = c->in[lead];
    /* b's points are the columns of grad */
    if (lead == 2 && p.dim == n - 2u)
        p.dim = (uint8_t)(n - 1u);
    else if ((lead == 1 || lead == 2) && p.dim == n - 1u)
        return false;
    if (p.dim < n - 2u) {
        for (uint32_t i = 0; i < 4; i++)
            if (!koila__need(c, i, p))
                return false;
        c->out[0] = p;
        return true;
    }
    const bool columns = p.dim == n - 1u;
    if (!koila__need(c, 0, p) || !koila__need(c, 3, p) ||
        !koila__need(c, columns ? 2 : 1, koila__moved(p, n - 2u)))
        return false;
    koila__need_r(c, columns ? 1 : 2);
    c->out[0] = columns ? koila__p(c, KOILA_SUM) : p;
    return true;
}
