/* rules_resample.c — pooling and resampling: dimensions before the spatial ones are independent.
 *
 * Along a spatial dimension that is cut, the same two cases as in rules_windows.c: windows that lie
 * apart make rows of the result of rows of the input; those that overlap read beyond their slice,
 * so the input is whole (koila::max_pool_rows and the like in pseudo.def). The indices of a maximum
 * count the elements of the whole image, so a slice needs the number of its first row anyway. Where
 * the lengths of input and result are rows of two axes, the input is whole too. */
#include "placement/rewrite.h"

/* Pooling and the like over the last `n_spatial` dims: all dims before them are independent, for
 * every tensor and result alike. */
static bool images(koila__case *c, uint32_t n_spatial)
{
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || lead == KOILA_NONE)
        return false;
    const koila_placement p = c->in[lead];
    const uint32_t n_dims = c->in_meta[lead]->n_dims;
    if (p.dim + n_spatial >= n_dims)
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (c->in_meta[i]->n_dims != n_dims || !koila__need(c, i, p))
            return false;
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j] && c->out_meta[j]->n_dims != n_dims)
            return false;
    return koila__out_all(c, p);
}
bool koila__rule_images1(koila__case *c) { return images(c, 1); }
bool koila__rule_images2(koila__case *c) { return images(c, 2); }
bool koila__rule_images3(koila__case *c) { return images(c, 3); }

/* ---- pixels that are channels */

/* pixel_shuffle(x[..., C * k * k, H, W], k) -> [..., C, H * k, W * k], and back: a row is k rows */
static bool pixels(koila__case *c, bool shuffle)
{
    int64_t k;
    const koila_placement x = c->in[0];
    if (koila__any_p(c) || c->n_in != 1 || !koila__is_s(x) || x.dim + 2u < c->in_meta[0]->n_dims)
        return images(c, 3);
    if (!koila__arg_int(c, 1, 1, &k) || k < 1 || (!shuffle && x.inner % k))
        return false;
    c->out[0] = x;
    c->out[0].inner = shuffle ? x.inner * k : x.inner / k;
    return koila__fits(c, c->out[0], c->out_meta[0]);
}
bool koila__rule_pixel_shuffle(koila__case *c) { return pixels(c, true); }
bool koila__rule_pixel_unshuffle(koila__case *c) { return pixels(c, false); }

/* ---- pooling along a spatial dimension */

enum { MOST_SPATIAL = 3 };

/* The window of a pooling along the dimension that is cut. */
typedef struct pool {
    uint32_t dim;                     /* of x */
    int64_t size, padding;            /* of x there */
    int64_t window, stride, dilation; /* window: from its first row to its last */
    koila_placement x, result;        /* how they are cut */
    bool apart;
} pool;

/* Number d of a list of n; one stands for all. `otherwise` where the list is left out or empty. */
static bool number_at(const koila__case *c, uint32_t pos, uint32_t n, uint32_t d, int64_t otherwise,
                      int64_t *out)
{
    const koila_arg *list = koila__arg(c, pos);
    *out = otherwise;
    if (koila__is_absent(c, pos) || (list->kind == KOILA_ARG_LIST && list->n == 0))
        return true;
    if (list->kind != KOILA_ARG_LIST || (list->n != n && list->n != 1))
        return false;
    const koila_arg *a = &list[1 + (list->n == 1 ? 0 : d)];
    *out = a->u.i;
    return a->kind == KOILA_ARG_INT;
}

/* Arguments kernel, stride, padding and perhaps dilation from position `pos`. */
static bool read_pool(const koila__case *c, const koila_meta_info *x, const koila_meta_info *result,
                      uint32_t n_spatial, uint32_t pos, bool dilates, uint32_t dim, pool *w)
{
    int64_t kernel;
    const uint32_t before = x->n_dims - n_spatial;
    *w = (pool){ .dim = dim, .dilation = 1 };
    if (!result || x->n_dims <= n_spatial || result->n_dims != x->n_dims || dim < before ||
        !koila__emit_cut(c, x, dim, &w->x) || !koila__emit_cut(c, result, dim, &w->result) ||
        !number_at(c, pos, n_spatial, dim - before, 0, &kernel) || kernel < 1 ||
        !number_at(c, pos + 1, n_spatial, dim - before, kernel, &w->stride) ||
        !number_at(c, pos + 2, n_spatial, dim - before, 0, &w->padding) ||
        (dilates && !number_at(c, pos + 3, n_spatial, dim - before, 1, &w->dilation)))
        return false;
    w->size = x->size[dim];
    w->window = (kernel - 1) * w->dilation + 1;
    w->apart = w->padding == 0 && w->window <= w->stride &&
               w->size == result->size[dim] * w->stride && w->x.axis == w->result.axis;
    return true;
}

/* The dimension, and the numbers that fixes set: the first row of what the slice is given, the
 * first row that it makes, and how many. */
static void emit_rows(koila__call *k, uint32_t dim, int64_t n)
{
    koila__emit_int(k, dim);
    koila__emit_int(k, 0);
    koila__emit_int(k, 0);
    koila__emit_int(k, n);
}

/* Fixes the last three of them, which begin at position `pos`. The first `n_given` inputs are cut
 * as `given` if windows lie apart, else whole. All results are cut as `made`. */
static bool place_rows(koila__case *c, uint32_t pos, uint32_t n_given, bool apart,
                       koila_placement given, koila_placement made)
{
    if (made.axis != c->axis)
        return false;
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (!apart || i >= n_given)
            koila__need_r(c, i);
        else if (!koila__need(c, i, given))
            return false;
    }
    return (!apart || koila__fix_add(c, KOILA__FIX_FIRST, pos, KOILA__FIX_OF_INPUT)) &&
           koila__fix_add(c, KOILA__FIX_FIRST, pos + 1, 0) &&
           koila__fix_add(c, KOILA__FIX_EXTENT, pos + 2, 0) && koila__out_all(c, made);
}

/* Is the input cut along a spatial dimension, in slices of neighbours? */
static bool is_spatial(const koila__case *c, uint32_t i, uint32_t n_spatial)
{
    return koila__is_s(c->in[i]) && c->in[i].outer == 1 &&
           c->in[i].dim + n_spatial >= c->in_meta[i]->n_dims;
}

/* A list of the kind that number_at() reads, with all of its numbers. `otherwise`: of a stride, the
 * position of the kernel. */
static void emit_list(koila__case *c, koila__call *k, uint32_t pos, uint32_t n, int64_t otherwise,
                      uint32_t otherwise_pos)
{
    int64_t at[MOST_SPATIAL] = { 0 };
    for (uint32_t d = 0; d < n && d < MOST_SPATIAL; d++) {
        if (otherwise_pos)
            number_at(c, otherwise_pos, n, d, otherwise, &otherwise);
        if (!number_at(c, pos, n, d, otherwise, &at[d]))
            k->bad = true;
    }
    koila__emit_ints(k, at, n);
}

/* The kernel, stride and padding of the recorded call from position `pos`. */
static void emit_window(koila__case *c, koila__call *k, uint32_t pos, uint32_t n)
{
    emit_list(c, k, pos, n, 0, 0);
    emit_list(c, k, pos + 1, n, 0, pos);
    emit_list(c, k, pos + 2, n, 0, 0);
}

/* The arguments ceil_mode, count_include_pad and divisor_override of a mean, from `pos` on. */
static void emit_mean(koila__case *c, koila__call *k, uint32_t pos)
{
    bool ceil_mode = false;
    bool counts_padding = true;
    if (!koila__arg_bool(c, pos, false, &ceil_mode) ||
        !koila__arg_bool(c, pos + 1, true, &counts_padding))
        k->bad = true;
    koila__emit_bool(k, ceil_mode);
    koila__emit_bool(k, counts_padding);
    if (koila__arg(c, pos + 2))
        koila__emit_copy(k, pos + 2);
    else
        koila__emit_none(k);
}

static void emit_sizes(koila__call *k, const koila_meta_info *m, uint32_t n_spatial)
{
    koila__emit_ints(k, m->size + m->n_dims - n_spatial, n_spatial);
}

/* max_pool*d_with_indices(x, kernel, stride, padding, dilation, ceil_mode) -> values, indices */
static bool max_pool(koila__case *c, uint32_t n_spatial)
{
    pool w;
    bool ceil_mode;
    if (koila__any_p(c) || c->n_in != 1 || !is_spatial(c, 0, n_spatial))
        return images(c, n_spatial);
    if (!c->may_emit || c->n_out != 2 || !c->out_meta[1] ||
        !read_pool(c, c->in_meta[0], c->out_meta[0], n_spatial, 1, true, c->in[0].dim, &w) ||
        !koila__arg_bool(c, 5, false, &ceil_mode))
        return false;
    koila__call k;
    koila__emit_begin(c, &k, "koila::max_pool_rows", 0);
    koila__emit_along(&k, w.result);
    koila__emit_value(&k, c->in_value[0]);
    emit_window(c, &k, 1, n_spatial);
    emit_list(c, &k, 4, n_spatial, 1, 0);
    koila__emit_bool(&k, ceil_mode);
    koila__emit_int(&k, w.size);
    emit_rows(&k, w.dim, c->out_meta[0]->size[w.dim]);
    return koila__emit_end_n(&k, 2, c->sig->outputs, c->replaced);
}
bool koila__rule_max_pool2(koila__case *c) { return max_pool(c, 2); }
bool koila__rule_max_pool3(koila__case *c) { return max_pool(c, 3); }

/* koila::max_pool_rows(x, kernel, stride, padding, dilation, ceil_mode, size, dim, begin, first, n)
 * -> values, indices */
bool koila__rule_max_pool_rows(koila__case *c)
{
    pool w;
    int64_t dim;
    const koila_arg *kernel = koila__arg(c, 1);
    return !koila__any_p(c) && koila__arg_int(c, 7, 0, &dim) && kernel &&
           read_pool(c, c->in_meta[0], c->out_meta[0], kernel->n, 1, true, (uint32_t)dim, &w) &&
           place_rows(c, 8, 1, w.apart, w.x, w.result);
}

/* The cut of a gradient, or of what was recorded with it; KOILA_NONE: they are not cut along a
 * spatial dimension. */
static uint32_t spatial_lead(const koila__case *c, uint32_t n_spatial)
{
    const uint32_t lead = koila__lead(c);
    return lead == KOILA_NONE || !is_spatial(c, lead, n_spatial) ? KOILA_NONE : lead;
}

/* max_pool*d_with_indices_backward(grad, x, kernel, stride, padding, dilation, ceil_mode,
 * indices) */
static bool max_pool_backward(koila__case *c, uint32_t n_spatial)
{
    pool w;
    const uint32_t lead = spatial_lead(c, n_spatial);
    if (koila__any_p(c) || c->n_in != 3 || lead == KOILA_NONE)
        return images(c, n_spatial);
    if (!c->may_emit || !c->out_meta[0] ||
        !read_pool(c, c->in_meta[1], c->in_meta[0], n_spatial, 2, true, c->in[lead].dim, &w))
        return false;
    koila__call k;
    koila__emit_begin(c, &k, "koila::max_pool_rows_backward", 0);
    koila__emit_along(&k, w.x);
    koila__emit_value(&k, c->in_value[0]);
    koila__emit_value(&k, c->in_value[2]);
    emit_window(c, &k, 2, n_spatial);
    emit_list(c, &k, 5, n_spatial, 1, 0);
    emit_sizes(&k, c->in_meta[1], n_spatial);
    emit_rows(&k, w.dim, w.size);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}
bool koila__rule_max_pool2_backward(koila__case *c) { return max_pool_backward(c, 2); }
bool koila__rule_max_pool3_backward(koila__case *c) { return max_pool_backward(c, 3); }

/* koila::max_pool_rows_backward(grad, indices, kernel, stride, padding, dilation, sizes, dim,
 * begin, first, n) -> gx */
bool koila__rule_max_pool_rows_backward(koila__case *c)
{
    pool w;
    int64_t dim;
    const koila_arg *kernel = koila__arg(c, 2);
    return !koila__any_p(c) && koila__arg_int(c, 7, 0, &dim) && kernel &&
           read_pool(c, c->out_meta[0], c->in_meta[0], kernel->n, 2, true, (uint32_t)dim, &w) &&
           place_rows(c, 8, 2, w.apart, w.result, w.x);
}

/* avg_pool*d(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override) */
static bool avg_pool(koila__case *c, uint32_t n_spatial)
{
    pool w;
    if (koila__any_p(c) || c->n_in != 1 || !is_spatial(c, 0, n_spatial))
        return images(c, n_spatial);
    if (!read_pool(c, c->in_meta[0], c->out_meta[0], n_spatial, 1, false, c->in[0].dim, &w))
        return false;
    c->out[0] = w.result;
    if (w.apart && w.result.axis == c->axis)
        return true;
    if (!c->may_emit)
        return false;
    koila__call k;
    koila__emit_begin(c, &k, "koila::avg_pool_rows", 0);
    koila__emit_along(&k, w.result);
    koila__emit_value(&k, c->in_value[0]);
    emit_window(c, &k, 1, n_spatial);
    emit_mean(c, &k, 4);
    emit_rows(&k, w.dim, c->out_meta[0]->size[w.dim]);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}
bool koila__rule_avg_pool2(koila__case *c) { return avg_pool(c, 2); }
bool koila__rule_avg_pool3(koila__case *c) { return avg_pool(c, 3); }

/* koila::avg_pool_rows(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor, dim,
 * begin, first, n) */
bool koila__rule_avg_pool_rows(koila__case *c)
{
    pool w;
    int64_t dim;
    const koila_arg *kernel = koila__arg(c, 1);
    return !koila__any_p(c) && koila__arg_int(c, 7, 0, &dim) && kernel &&
           read_pool(c, c->in_meta[0], c->out_meta[0], kernel->n, 1, false, (uint32_t)dim, &w) &&
           place_rows(c, 8, 1, w.apart, w.x, w.result);
}

/* avg_pool*d_backward(grad, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor) */
static bool avg_pool_backward(koila__case *c, uint32_t n_spatial)
{
    pool w;
    const uint32_t lead = spatial_lead(c, n_spatial);
    if (koila__any_p(c) || c->n_in != 2 || lead == KOILA_NONE)
        return images(c, n_spatial);
    if (!c->out_meta[0] ||
        !read_pool(c, c->in_meta[1], c->in_meta[0], n_spatial, 2, false, c->in[lead].dim, &w))
        return false;
    c->out[0] = w.x;
    if (w.apart && w.x.axis == c->axis)
        return koila__need(c, 0, w.result) && koila__need(c, 1, w.x);
    if (!c->may_emit)
        return false;
    koila__call k;
    koila__emit_begin(c, &k, "koila::avg_pool_rows_backward", 0);
    koila__emit_along(&k, w.x);
    koila__emit_value(&k, c->in_value[0]);
    emit_window(c, &k, 2, n_spatial);
    emit_mean(c, &k, 5);
    emit_sizes(&k, c->in_meta[1], n_spatial);
    emit_rows(&k, w.dim, w.size);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}
bool koila__rule_avg_pool2_backward(koila__case *c) { return avg_pool_backward(c, 2); }
bool koila__rule_avg_pool3_backward(koila__case *c) { return avg_pool_backward(c, 3); }

/* koila::avg_pool_rows_backward(grad, kernel, stride, padding, ceil_mode, count_include_pad,
 * divisor, sizes, dim, begin, first, n) -> gx */
bool koila__rule_avg_pool_rows_backward(koila__case *c)
{
    pool w;
    int64_t dim;
    const koila_arg *kernel = koila__arg(c, 1);
    return !koila__any_p(c) && koila__arg_int(c, 8, 0, &dim) && kernel &&
           read_pool(c, c->out_meta[0], c->in_meta[0], kernel->n, 1, false, (uint32_t)dim, &w) &&
           place_rows(c, 9, 1, w.apart, w.result, w.x);
}

/* ---- upsampling along a spatial dimension */

/* As python/koila/_spatial_rows.py numbers them. */
typedef enum resampling { NEAREST, NEAREST_EXACT, LINEAR, N_MODES } resampling;

/* Does the k-fold of rows of the input make rows of the result, and nothing else? Factors that
 * floating-point numbers hold exactly are enough. */
static bool is_k_fold(int64_t in, int64_t out, double scale)
{
    const int64_t more = out >= in ? out : in;
    const int64_t fewer = out >= in ? in : out;
    const int64_t k = fewer > 0 ? more / fewer : 0;
    if (k < 1 || (k & (k - 1)) || more != k * fewer)
        return false;
    return scale == 0 || scale == (double)out / (double)in;
}

typedef struct resample {
    uint32_t dim;
    koila_placement input, result;
    bool apart;
} resample;

/* scales: the position of the first of n_spatial numbers. */
static bool read_resample(const koila__case *c, const koila_meta_info *input,
                          const koila_meta_info *result, resampling mode, uint32_t n_spatial,
                          uint32_t scales, uint32_t dim, resample *r)
{
    double scale = 0;
    *r = (resample){ .dim = dim };
    if (!input || !result || input->n_dims != result->n_dims || input->n_dims != n_spatial + 2u ||
        dim < 2 || !koila__emit_cut(c, input, dim, &r->input) ||
        !koila__emit_cut(c, result, dim, &r->result) ||
        (!koila__is_absent(c, scales + dim - 2) &&
         !koila__arg_number(c, scales + dim - 2, 0, &scale)))
        return false;
    r->apart = mode != LINEAR && is_k_fold(input->size[dim], result->size[dim], scale) &&
               r->input.axis == r->result.axis;
    return true;
}

/* mode, align_corners, dimension and rows, then the scales. */
static void emit_resampling(koila__case *c, koila__call *k, resampling mode, bool align,
                            const resample *r, int64_t n, uint32_t n_spatial, uint32_t scales)
{
    koila__emit_int(k, mode);
    koila__emit_bool(k, align);
    emit_rows(k, r->dim, n);
    for (uint32_t d = 0; d < n_spatial; d++) {
        double scale = 0;
        if (koila__is_absent(c, scales + d))
            koila__emit_none(k);
        else if (koila__arg_number(c, scales + d, 0, &scale))
            koila__emit_float(k, scale);
        else
            k->bad = true;
    }
}

/* upsample_*d(x, output_size, [align_corners], scales...) */
static bool upsample(koila__case *c, resampling mode, uint32_t n_spatial)
{
    resample r;
    bool align = false;
    const uint32_t scales = mode == LINEAR ? 3 : 2;
    if (koila__any_p(c) || c->n_in != 1 || !is_spatial(c, 0, n_spatial))
        return images(c, n_spatial);
    if (!c->may_emit || (mode == LINEAR && !koila__arg_bool(c, 2, false, &align)) ||
        !read_resample(c, c->in_meta[0], c->out_meta[0], mode, n_spatial, scales, c->in[0].dim, &r))
        return false;
    koila__call k;
    koila__emit_begin(c, &k, "koila::resample_rows", 0);
    koila__emit_along(&k, r.result);
    koila__emit_value(&k, c->in_value[0]);
    emit_sizes(&k, c->in_meta[0], n_spatial);
    emit_sizes(&k, c->out_meta[0], n_spatial);
    emit_resampling(c, &k, mode, align, &r, c->out_meta[0]->size[r.dim], n_spatial, scales);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}

/* upsample_*d_backward(grad, output_size, input_size, [align_corners], scales...): the list of
 * input sizes follows the slice */
static bool upsample_backward(koila__case *c, resampling mode, uint32_t n_spatial)
{
    resample r;
    bool align = false;
    const uint32_t scales = mode == LINEAR ? 4 : 3;
    if (koila__any_p(c) || c->n_in != 1 || !is_spatial(c, 0, n_spatial))
        return c->n_in == 1 && images(c, n_spatial) && koila__fix_add(c, KOILA__FIX_SIZES, 2, 0);
    if (!c->may_emit || mode == N_MODES ||
        (mode == LINEAR && !koila__arg_bool(c, 3, false, &align)) ||
        !read_resample(c, c->out_meta[0], c->in_meta[0], mode, n_spatial, scales, c->in[0].dim, &r))
        return false;
    koila__call k;
    koila__emit_begin(c, &k, "koila::resample_rows_backward", 0);
    koila__emit_along(&k, r.input);
    koila__emit_value(&k, c->in_value[0]);
    emit_sizes(&k, c->out_meta[0], n_spatial);
    emit_sizes(&k, c->in_meta[0], n_spatial);
    emit_resampling(c, &k, mode, align, &r, c->out_meta[0]->size[r.dim], n_spatial, scales);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}

#define KOILA_UPSAMPLE(n)                                                                          \
    bool koila__rule_nearest##n(koila__case *c) { return upsample(c, NEAREST, n); }                \
    bool koila__rule_nearest_exact##n(koila__case *c) { return upsample(c, NEAREST_EXACT, n); }    \
    bool koila__rule_linear##n(koila__case *c) { return upsample(c, LINEAR, n); }                  \
    bool koila__rule_nearest##n##_backward(koila__case *c)                                         \
    {                                                                                              \
        return upsample_backward(c, NEAREST, n);                                                   \
    }                                                                                              \
    bool koila__rule_nearest_exact##n##_backward(koila__case *c)                                   \
    {                                                                                              \
        return upsample_backward(c, NEAREST_EXACT, n);                                             \
    }                                                                                              \
    bool koila__rule_linear##n##_backward(koila__case *c)                                          \
    {                                                                                              \
        return upsample_backward(c, LINEAR, n);                                                    \
    }
KOILA_UPSAMPLE(1)
KOILA_UPSAMPLE(2)
KOILA_UPSAMPLE(3)

/* Of other modes only the batch is cut. */
bool koila__rule_upsample2_backward(koila__case *c) { return upsample_backward(c, N_MODES, 2); }

/* koila::resample_rows(x, sizes, output sizes, mode, align_corners, dim, begin, first, n,
 * scales...); its backward(grad, ...) gives gx */
static bool resample_rows(koila__case *c, const koila_meta_info *input,
                          const koila_meta_info *result, bool is_backward)
{
    resample r;
    int64_t dim, mode;
    if (koila__any_p(c) || !koila__arg_int(c, 3, 0, &mode) || !koila__arg_int(c, 5, 0, &dim) ||
        !input || input->n_dims < 3 ||
        !read_resample(c, input, result, (resampling)mode, input->n_dims - 2u, 9, (uint32_t)dim,
                       &r))
        return false;
    return is_backward ? place_rows(c, 6, 1, r.apart, r.result, r.input)
                       : place_rows(c, 6, 1, r.apart, r.input, r.result);
}
bool koila__rule_resample_rows(koila__case *c)
{
    return resample_rows(c, c->in_meta[0], c->out_meta[0], false);
}
bool koila__rule_resample_rows_backward(koila__case *c)
{
    return resample_rows(c, c->out_meta[0], c->in_meta[0], true);
}
