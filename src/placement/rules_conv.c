/* rules_conv.c — padding, unfolding and grids: images of the batch are independent. Along a
 * dimension that is padded a slice reads its rows of the whole input (koila::pad_rows in
 * pseudo.def). */
#include "placement/rewrite.h"

/* ---- padding: a list names dims from the last, two numbers each */

/* As python/koila/_spatial_rows.py numbers them. */
typedef enum padding { CONSTANT, REFLECT, REPLICATE } padding;

enum { MOST_PADDED = 3 }; /* dimensions of pads that are not constant */

/* Is dimension `dim` of n_dims left as it is? */
static bool is_not_padded(const koila_arg *pad, uint32_t n_dims, uint32_t dim)
{
    const uint32_t from_last = n_dims - 1u - dim;
    return 2 * from_last + 1 >= pad->n ||
           (pad[1 + 2 * from_last].u.i == 0 && pad[2 + 2 * from_last].u.i == 0);
}

/* The list of pads at position `pos`, NULL where it is none; of pads that are not constant, where
 * none is negative. */
static const koila_arg *pads_at(const koila__case *c, uint32_t pos, padding how)
{
    const koila_arg *pad = koila__arg(c, pos);
    if (!pad || pad->kind != KOILA_ARG_LIST || pad->n % 2 || pad->n > 2 * KOILA_MAX_DIMS)
        return NULL;
    for (uint32_t i = 1; i <= pad->n; i++)
        if (pad[i].kind != KOILA_ARG_INT || (how != CONSTANT && pad[i].u.i < 0))
            return NULL;
    return pad;
}

/* Neighbours of the input along a dimension that is padded. */
static bool is_padded_rows(const koila__case *c, uint32_t i, const koila_arg *pad)
{
    const koila_placement in = c->in[i];
    return koila__is_s(in) && in.outer == 1 && c->may_emit &&
           !is_not_padded(pad, c->in_meta[i]->n_dims, in.dim);
}

/* koila::pad_rows(x, pad, mode, value, dim, first, n) and koila::pad_rows_backward(grad, pad, mode,
 * dim, first, n): x whole, rows of the result */
enum { PAD_ROWS_DIM = 4, PAD_ROWS_BACKWARD_DIM = 3 };

static bool emit_pad(koila__case *c, padding how, bool is_backward, uint32_t dim)
{
    koila_placement made;
    koila__call k;
    if (!koila__emit_cut(c, c->out_meta[0], dim, &made))
        return false;
    koila__emit_begin(c, &k, is_backward ? "koila::pad_rows_backward" : "koila::pad_rows", 0);
    koila__emit_along(&k, made);
    koila__emit_value(&k, c->in_value[0]);
    koila__emit_copy(&k, is_backward ? 2 : 1);
    koila__emit_int(&k, how);
    if (!is_backward && how == CONSTANT && koila__arg(c, 2))
        koila__emit_copy(&k, 2);
    else if (!is_backward)
        koila__emit_int(&k, 0);
    koila__emit_int(&k, dim);
    koila__emit_int(&k, 0);
    koila__emit_int(&k, c->out_meta[0]->size[dim]);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}

static bool pad_rows(koila__case *c, uint32_t pos_dim)
{
    int64_t dim;
    koila_placement made;
    if (koila__any_p(c) || c->n_in != 1 || !koila__arg_int(c, pos_dim, 0, &dim) || dim < 0 ||
        dim >= c->out_meta[0]->n_dims ||
        !koila__emit_cut(c, c->out_meta[0], (uint32_t)dim, &made) || made.axis != c->axis)
        return false;
    koila__need_r(c, 0);
    c->out[0] = made;
    return koila__fix_add(c, KOILA__FIX_FIRST, pos_dim + 1, 0) &&
           koila__fix_add(c, KOILA__FIX_EXTENT, pos_dim + 2, 0);
}
bool koila__rule_pad_rows(koila__case *c) { return pad_rows(c, PAD_ROWS_DIM); }
bool koila__rule_pad_rows_backward(koila__case *c) { return pad_rows(c, PAD_ROWS_BACKWARD_DIM); }

/* constant_pad_nd(x, pad, value) */
bool koila__rule_pad(koila__case *c)
{
    const koila_arg *pad = pads_at(c, 1, CONSTANT);
    if (!pad || c->n_in != 1)
        return false;
    if (koila__any_p(c)) {
        double value;
        return koila__arg_number(c, 2, 0, &value) && value == 0 && koila__linear_in_first(c);
    }
    if (!koila__is_s(c->in[0]))
        return false;
    if (is_padded_rows(c, 0, pad))
        return emit_pad(c, CONSTANT, false, c->in[0].dim);
    if (!is_not_padded(pad, c->in_meta[0]->n_dims, c->in[0].dim))
        return false;
    c->out[0] = c->in[0];
    return true;
}

/* reflection_pad*d(x, pad), replication_pad*d(x, pad), and their backward(grad, x, pad): dimensions
 * before the spatial ones are independent */
static bool pad_images(koila__case *c, padding how, uint32_t n_spatial, bool is_backward)
{
    const uint32_t lead = koila__lead(c);
    const koila_arg *pad = pads_at(c, is_backward ? 2 : 1, how);
    if (koila__any_p(c) || lead == KOILA_NONE || !c->out_meta[0] || c->n_out != 1)
        return false;
    const koila_placement p = c->in[lead];
    const uint32_t n_dims = c->in_meta[lead]->n_dims;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (c->in_meta[i]->n_dims != n_dims)
            return false;
    if (p.dim + n_spatial >= n_dims)
        return pad && pad->n == 2 * n_spatial && n_spatial <= MOST_PADDED &&
               is_padded_rows(c, lead, pad) && emit_pad(c, how, is_backward, p.dim);
    for (uint32_t i = 0; i < c->n_in; i++)
        if (!koila__need(c, i, p))
            return false;
    return koila__out_all(c, p);
}

#define KOILA_PADS(n)                                                                              \
    bool koila__rule_reflect##n(koila__case *c) { return pad_images(c, REFLECT, n, false); }       \
    bool koila__rule_reflect##n##_backward(koila__case *c)                                         \
    {                                                                                              \
        return pad_images(c, REFLECT, n, true);                                                    \
    }                                                                                              \
    bool koila__rule_replicate##n(koila__case *c) { return pad_images(c, REPLICATE, n, false); }   \
    bool koila__rule_replicate##n##_backward(koila__case *c)                                       \
    {                                                                                              \
        return pad_images(c, REPLICATE, n, true);                                                  \
    }
KOILA_PADS(1)
KOILA_PADS(2)
KOILA_PADS(3)

/* ---- unfolding and grids */

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

/* affine_grid_generator(theta[N, ...], [N, C, H, W], align_corners) -> grid[N, H, W, 2] */
bool koila__rule_affine_grid(koila__case *c)
{
    if (koila__any_p(c) || c->n_in != 1 || !koila__is_s(c->in[0]) || c->in[0].dim != 0)
        return false;
    c->out[0] = c->in[0];
    return koila__fits(c, c->out[0], c->out_meta[0]) && koila__fix_add(c, KOILA__FIX_SIZES, 1, 0);
}

/* Of grid_sampler() below: dimension d of a grid[N, H, W, 2] is d + 1 of its result. */
static bool grid_rows(koila__case *c)
{
    const uint32_t grid = c->n_in - 1;
    const bool is_backward = c->n_in == 3;
    koila_placement p = c->in[grid];
    if (!koila__is_s(p) && is_backward && koila__is_s(c->in[0]) && c->in[0].dim > 0)
        p = koila__moved(c->in[0], c->in[0].dim - 1u);
    if (c->n_in < 2 || !koila__is_s(p) || p.dim == 0 || p.dim + 1u >= c->in_meta[grid]->n_dims)
        return false;
    const koila_placement made = koila__moved(p, p.dim + 1u);
    koila__need_r(c, grid - 1);
    if (!koila__need(c, grid, p) || (is_backward && !koila__need(c, 0, made)))
        return false;
    if (!is_backward)
        return koila__out_all(c, made);
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j])
            c->out[j] = j == 0 ? koila__p(c, KOILA_SUM) : p;
    return true;
}

/* grid_sampler(x[N, ...], grid[N, ...], ...) and backward (grad, x, grid, ..., mask): images of the
 * batch, each with its grid; or rows of the grid, of a whole image */
bool koila__rule_grid_sampler(koila__case *c)
{
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || lead == KOILA_NONE)
        return false;
    if (c->in[lead].dim != 0)
        return grid_rows(c);
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
