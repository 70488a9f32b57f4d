/* rules_windows.c — convolutions: each result is a sum over a window of the input.
 *
 * Images of the batch are independent, where they are not taken for channels, or groups of them.
 * Along a spatial dimension that is cut, there are two cases:
 *   windows that do not overlap   (as wide as their stride or narrower, no padding: patches, 1 x 1,
 *                                 the way up of a U-Net) a slice of the input gives a slice of the
 *                                 result, as the batch does
 *   windows that overlap          a slice of the result needs rows of its neighbours: the input is
 *                                 whole, and each slice reads its rows of it and the few beyond,
 *                                 its halo (koila::conv_rows in pseudo.def)
 * The gradient of the input is a convolution of the same kind, with the whole gradient for input:
 * transposed where the recorded one is not. The gradient of the weight is a sum over positions of
 * the side without padding, the small side: the result, or the input where the convolution is
 * transposed. That side is cut, the other one is whole, and each slice has a share.
 *
 * Extents of input and result differ by the stride: each must be a multiple of the rows of an axis
 * of the step, else the call is gathered. Where these are two axes the input is whole, whatever the
 * windows. */
#include "placement/rewrite.h"

enum { N_OUTER = 2, MOST_SPATIAL = 3 }; /* dimensions before the spatial ones: batch and channels */

/* The arguments of a convolution, by spatial dimension. */
typedef struct window {
    uint32_t n; /* spatial dimensions */
    int64_t stride[MOST_SPATIAL], padding[MOST_SPATIAL], dilation[MOST_SPATIAL];
    int64_t output_padding[MOST_SPATIAL], groups;
    bool transposed;
    const koila_meta_info *input, *weight, *result;
} window;

/* A list of ints for n dimensions; one number stands for all. */
static bool numbers(const koila__case *c, uint32_t pos, uint32_t n, int64_t *out)
{
    const koila_arg *list = koila__arg(c, pos);
    if (!list || list->kind != KOILA_ARG_LIST || (list->n != n && list->n != 1))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        const koila_arg *a = &list[1 + (list->n == 1 ? 0 : i)];
        if (a->kind != KOILA_ARG_INT)
            return false;
        out[i] = a->u.i;
    }
    return true;
}

/* (..., stride, padding, dilation, transposed, output_padding, groups) from position `pos`. */
static bool read_window(const koila__case *c, uint32_t pos, window *w)
{
    w->n = w->input->n_dims - N_OUTER;
    return w->n >= 1 && w->n <= MOST_SPATIAL && w->weight->n_dims == w->input->n_dims &&
           w->result && w->result->n_dims == w->input->n_dims && numbers(c, pos, w->n, w->stride) &&
           numbers(c, pos + 1, w->n, w->padding) && numbers(c, pos + 2, w->n, w->dilation) &&
           koila__arg_bool(c, pos + 3, false, &w->transposed) &&
           numbers(c, pos + 4, w->n, w->output_padding) &&
           koila__arg_int(c, pos + 5, 1, &w->groups);
}

/* Is p a cut along a spatial dimension, in slices of neighbours? */
static bool is_spatial(koila_placement p)
{
    return koila__is_s(p) && p.dim >= N_OUTER && p.outer == 1;
}

/* The same cut, which is of the call's own axis. */
static bool cut_here(const koila__case *c, const koila_meta_info *m, uint32_t dim,
                     koila_placement *out)
{
    return koila__emit_cut(c, m, dim, out) && out->axis == c->axis;
}

/* Do the windows along dimension `dim` lie side by side, so that rows of the input make rows of the
 * result and nothing else? */
static bool are_apart(const window *w, uint32_t dim)
{
    const uint32_t d = dim - N_OUTER;
    const int64_t stride = w->stride[d];
    const int64_t extent = (w->weight->size[dim] - 1) * w->dilation[d] + 1;
    const int64_t in = w->input->size[dim];
    const int64_t out = w->result->size[dim];
    if (w->padding[d] || extent > stride)
        return false;
    return w->transposed ? extent + w->output_padding[d] == stride && out == in * stride
                         : w->output_padding[d] == 0 && in == out * stride;
}

static void emit_window(koila__call *k, const window *w, bool transposed, const int64_t *extra)
{
    koila__emit_ints(k, w->stride, w->n);
    koila__emit_ints(k, w->padding, w->n);
    koila__emit_ints(k, w->dilation, w->n);
    koila__emit_bool(k, transposed);
    koila__emit_ints(k, extra, w->n);
    koila__emit_int(k, w->groups);
}

/* koila::conv_rows(x, weight, bias?, stride, padding, dilation, transposed, output_padding, groups,
 * dim, first, n) with result `out`, cut along `dim`. */
static koila_value emit_rows(koila__case *c, const window *w, koila_value x, koila_value weight,
                             uint32_t bias, bool transposed, uint32_t dim, koila_meta out)
{
    static const int64_t none[MOST_SPATIAL] = { 0 };
    const bool is_gradient = transposed != w->transposed;
    int64_t extra[MOST_SPATIAL] = { 0 };
    koila_placement made;
    koila__call k;
    if (!koila__emit_cut(c, koila_meta_get(c->table, out), dim, &made))
        return KOILA_NONE;
    /* a transposed convolution that is a gradient: as many rows more as the input has beyond those
     * that windows begin at */
    for (uint32_t d = 0; d < w->n && is_gradient && transposed; d++)
        extra[d] = w->input->size[N_OUTER + d] -
                   ((w->result->size[N_OUTER + d] - 1) * w->stride[d] - 2 * w->padding[d] +
                    w->dilation[d] * (w->weight->size[N_OUTER + d] - 1) + 1);
    koila__emit_begin(c, &k, "koila::conv_rows", 0);
    koila__emit_along(&k, made);
    koila__emit_value(&k, x);
    koila__emit_value(&k, weight);
    koila__emit_optional(&k, bias);
    if (is_gradient)
        emit_window(&k, w, transposed, transposed ? extra : none);
    else
        emit_window(&k, w, transposed, w->output_padding);
    koila__emit_int(&k, dim);
    koila__emit_int(&k, 0); /* FIRST_ROW */
    koila__emit_int(&k, koila_meta_get(c->table, out)->size[dim]);
    return koila__emit_end(&k, out);
}

/* The positions of the first row and the number of rows. */
enum { ROWS_DIM = 9, FIRST_ROW = 10, N_ROWS = 11 };

bool koila__rule_conv_rows(koila__case *c)
{
    int64_t dim;
    koila_placement out;
    if (koila__any_p(c) || !koila__arg_int(c, ROWS_DIM, 0, &dim) || dim < N_OUTER ||
        dim >= c->out_meta[0]->n_dims || !cut_here(c, c->out_meta[0], (uint32_t)dim, &out))
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        koila__need_r(c, i);
    c->out[0] = out;
    return koila__fix_add(c, KOILA__FIX_FIRST, FIRST_ROW, 0) &&
           koila__fix_add(c, KOILA__FIX_EXTENT, N_ROWS, 0);
}

/* koila::conv_rows_weight(small, large, weight, stride, padding, dilation, groups, dim, first) ->
 * gw */
enum { WEIGHT_DIM = 7, WEIGHT_FIRST = 8 };

bool koila__rule_conv_rows_weight(koila__case *c)
{
    int64_t dim;
    koila_placement small;
    if (koila__any_p(c) || c->n_in != 3 || !koila__arg_int(c, WEIGHT_DIM, 0, &dim) ||
        dim < N_OUTER || dim >= c->in_meta[0]->n_dims ||
        !cut_here(c, c->in_meta[0], (uint32_t)dim, &small) || !koila__need(c, 0, small))
        return false;
    koila__need_r(c, 1);
    koila__need_r(c, 2);
    c->out[0] = koila__p(c, KOILA_SUM);
    return koila__fix_add(c, KOILA__FIX_FIRST, WEIGHT_FIRST, KOILA__FIX_OF_INPUT);
}

/* Along a spatial dimension: x is cut there. */
static bool convolution_rows(koila__case *c, uint32_t bias)
{
    window w = { .input = c->in_meta[0], .weight = c->in_meta[1], .result = c->out_meta[0] };
    const uint32_t dim = c->in[0].dim;
    koila_placement out;
    if (!is_spatial(c->in[0]) || !read_window(c, 3, &w) || !koila__emit_cut(c, w.result, dim, &out))
        return false;
    if (out.axis != c->axis || !are_apart(&w, dim)) {
        if (!c->may_emit)
            return false;
        c->replaced[0] = emit_rows(c, &w, c->in_value[0], c->in_value[1], bias, w.transposed, dim,
                                   c->sig->outputs[0]);
        return c->replaced[0] != KOILA_NONE;
    }
    for (uint32_t i = 1; i < c->n_in; i++)
        koila__need_r(c, i);
    c->out[0] = out;
    return true;
}

/* The rows of the batch as groups: the images of all rows are the channels of one, and each has a
 * weight of its own, as in modulated and conditional convolutions. The channels of a group lie side
 * by side in the input, the weight and the result, so a slice has its groups of each. */
static bool has_rows_as_groups(const koila__case *c, uint32_t pos, koila_placement lead,
                               uint32_t dim)
{
    int64_t groups;
    return koila__is_s(lead) && lead.dim == dim && lead.outer == 1 && c->batch > 0 &&
           koila__arg_int(c, pos, 1, &groups) && groups > 1 && groups % c->batch == 0;
}

/* The groups of a slice in dimension `dim` of a value of meta m. */
static koila_placement groups_of(const koila__case *c, const koila_meta_info *m, uint32_t dim)
{
    return koila__s(c, dim, 1, m->size[dim] / c->batch);
}

enum { GROUPS = 8, BACKWARD_GROUPS = 9, BIAS_SIZES = 3 }; /* positions of arguments */

static bool convolution_groups(koila__case *c, uint32_t bias)
{
    if (bias != KOILA_NONE && !koila__need(c, bias, groups_of(c, c->in_meta[bias], 0)))
        return false;
    return koila__need(c, 0, groups_of(c, c->in_meta[0], 1)) &&
           koila__need(c, 1, groups_of(c, c->in_meta[1], 0)) &&
           koila__out_all(c, groups_of(c, c->out_meta[0], 1)) &&
           koila__fix_add(c, KOILA__FIX_ROWS, GROUPS, 0);
}

static bool convolution_backward_groups(koila__case *c)
{
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j])
            c->out[j] = groups_of(c, c->out_meta[j], j == 0 ? 1 : 0);
    return koila__need(c, 0, groups_of(c, c->in_meta[0], 1)) &&
           koila__need(c, 1, groups_of(c, c->in_meta[1], 1)) &&
           koila__need(c, 2, groups_of(c, c->in_meta[2], 0)) &&
           (!c->out_meta[2] || koila__fix_add(c, KOILA__FIX_SIZES, BIAS_SIZES, 2)) &&
           koila__fix_add(c, KOILA__FIX_ROWS, BACKWARD_GROUPS, 0);
}

/* The rows of the batch as channels, as in the gradient of a gradient, which takes a convolution's
 * gradient for the weight of another one: channels of the input are summed over, those of the
 * weight alone are the result's. */
static bool convolution_channels(koila__case *c)
{
    bool transposed;
    int64_t groups;
    if (!koila__arg_bool(c, 6, false, &transposed) || !koila__arg_int(c, 8, 1, &groups) ||
        groups != 1 || c->n_in != 2)
        return false;
    const uint32_t summed = transposed ? 0 : 1;
    const koila_placement x = c->in[0];
    const koila_placement weight = c->in[1];
    if (koila__is_s(x) ? x.dim == 1 : koila__is_s(weight) && weight.dim == summed) {
        const koila_placement p = koila__is_s(x) ? x : weight;
        return koila__need(c, 0, koila__moved(p, 1)) &&
               koila__need(c, 1, koila__moved(p, summed)) &&
               koila__out_all(c, koila__p(c, KOILA_SUM));
    }
    if (koila__is_s(x) || !koila__is_s(weight) || weight.dim != 1 - summed)
        return false;
    koila__need_r(c, 0);
    return koila__need(c, 1, weight) && koila__out_all(c, koila__moved(weight, 1));
}

/* convolution(x[N, ...], weight, bias?, stride, padding, dilation, transposed, output_padding,
 * groups): linear in x, and in weight, without a bias */
bool koila__rule_convolution(koila__case *c)
{
    const uint32_t bias = koila__input_at(c, 2);
    if (c->n_in < 2 || c->in_meta[0]->n_dims != c->in_meta[1]->n_dims)
        return false;
    if (koila__any_p(c)) {
        const bool one = (koila__is_sum(c->in[0]) && koila__is_r(c->in[1])) ||
                         (koila__is_sum(c->in[1]) && koila__is_r(c->in[0]));
        return one && bias == KOILA_NONE && koila__out_all(c, koila__p(c, KOILA_SUM));
    }
    if (has_rows_as_groups(c, GROUPS, c->in[0], 1) ||
        (!koila__is_s(c->in[0]) && has_rows_as_groups(c, GROUPS, c->in[1], 0)))
        return convolution_groups(c, bias);
    if (!koila__is_s(c->in[0]) || c->in[0].dim == 1)
        return convolution_channels(c);
    if (c->in[0].dim != 0)
        return convolution_rows(c, bias);
    for (uint32_t i = 1; i < c->n_in; i++)
        koila__need_r(c, i);
    c->out[0] = c->in[0];
    return true;
}

/* The gradient of the bias: a sum over all but the channels. */
static koila_value bias_gradient(koila__case *c, const window *w)
{
    int64_t dims[KOILA_MAX_DIMS];
    uint32_t n = 0;
    koila__call k;
    for (uint32_t d = 0; d < w->n + N_OUTER; d++)
        if (d != 1)
            dims[n++] = d;
    koila__emit_begin(c, &k, "aten::sum.dim_IntList", 0);
    koila__emit_value(&k, c->in_value[0]);
    koila__emit_ints(&k, dims, n);
    return koila__emit_end(&k, c->sig->outputs[2]);
}

static koila_value weight_gradient(koila__case *c, const window *w, uint32_t dim)
{
    const uint32_t small = w->transposed ? 1 : 0;
    koila_placement cut;
    koila__call k;
    if (!koila__emit_cut(c, c->in_meta[small], dim, &cut))
        return KOILA_NONE;
    koila__emit_begin(c, &k, "koila::conv_rows_weight", 0);
    koila__emit_along(&k, cut);
    koila__emit_value(&k, c->in_value[small]);
    koila__emit_value(&k, c->in_value[1 - small]);
    koila__emit_value(&k, c->in_value[2]);
    koila__emit_ints(&k, w->stride, w->n);
    koila__emit_ints(&k, w->padding, w->n);
    koila__emit_ints(&k, w->dilation, w->n);
    koila__emit_int(&k, w->groups);
    koila__emit_int(&k, dim);
    koila__emit_int(&k, 0); /* WEIGHT_FIRST */
    return koila__emit_end(&k, c->sig->outputs[1]);
}

/* Along a spatial dimension: the gradient, the input or both are cut there. */
static bool convolution_backward_rows(koila__case *c, koila_placement lead)
{
    window w = { .input = c->in_meta[1], .weight = c->in_meta[2], .result = c->in_meta[0] };
    const uint32_t dim = lead.dim;
    koila_placement grad, x;
    if (!is_spatial(lead) || !read_window(c, 4, &w) || !koila__emit_cut(c, w.result, dim, &grad) ||
        !koila__emit_cut(c, w.input, dim, &x))
        return false;
    if (grad.axis == c->axis && x.axis == c->axis && are_apart(&w, dim)) {
        koila__need_r(c, 2);
        return koila__need(c, 0, grad) && koila__need(c, 1, x) && koila__out_rows_and_sums(c, x);
    }
    if (!c->may_emit)
        return false;
    if (c->out_meta[0])
        c->replaced[0] = emit_rows(c, &w, c->in_value[0], c->in_value[2], KOILA_NONE, !w.transposed,
                                   dim, c->sig->outputs[0]);
    if (c->out_meta[1])
        c->replaced[1] = weight_gradient(c, &w, dim);
    if (c->out_meta[2])
        c->replaced[2] = bias_gradient(c, &w);
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j] && c->replaced[j] == KOILA_NONE)
            return false;
    return true;
}

/* Of convolution_channels(). */
static bool convolution_backward_channels(koila__case *c)
{
    bool transposed;
    int64_t groups;
    if (!koila__arg_bool(c, 7, false, &transposed) || !koila__arg_int(c, 9, 1, &groups) ||
        groups != 1 || c->out_meta[2])
        return false;
    const uint32_t summed = transposed ? 0 : 1;
    const koila_placement grad = c->in[0];
    const koila_placement x = c->in[1];
    const bool sums = koila__is_s(x) && x.dim == 1 && koila__is_r(grad);
    if (!sums && (!koila__is_s(grad) || grad.dim != 1 || !koila__is_r(x)))
        return false;
    const koila_placement weight = sums ? koila__moved(x, summed) : koila__moved(grad, 1 - summed);
    if (c->out_meta[0])
        c->out[0] = sums ? x : koila__p(c, KOILA_SUM);
    if (c->out_meta[1])
        c->out[1] = weight;
    koila__need_r(c, sums ? 0 : 1);
    return koila__need(c, sums ? 1 : 0, sums ? x : grad) && koila__need(c, 2, weight);
}

/* convolution_backward(grad, x, weight, bias_sizes?, ..., mask) -> gx, gw, gb */
bool koila__rule_convolution_backward(koila__case *c)
{
    const uint32_t lead = koila__lead_among(c, 2);
    if (c->n_in != 3 || c->in_meta[0]->n_dims != c->in_meta[2]->n_dims)
        return false;
    if (koila__any_p(c)) /* linear in grad */
        return koila__is_sum(c->in[0]) && koila__is_r(c->in[1]) && koila__is_r(c->in[2]) &&
               koila__out_all(c, koila__p(c, KOILA_SUM));
    if (lead == KOILA_NONE)
        return false;
    if (has_rows_as_groups(c, BACKWARD_GROUPS, c->in[lead], 1))
        return convolution_backward_groups(c);
    if (c->in[lead].dim == 1)
        return convolution_backward_channels(c);
    if (c->in[lead].dim != 0)
        return convolution_backward_rows(c, c->in[lead]);
    if (!koila__need(c, 0, c->in[lead]) || !koila__need(c, 1, c->in[lead]))
        return false;
    koila__need_r(c, 2);
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j])
            c->out[j] = j == 0 ? c->in[lead] : koila__p(c, KOILA_SUM);
    return true;
}
