/* rules_reduce.c — sums and their kin: over another dimension the slice is untouched, over the
 * batch the result is partial.
 *
 * A mean over the batch is the sum, divided when it is whole: the accuracy of a batch that is all
 * right is 1, and not 1 but for a rounding of each slice. Where a sum would overflow that the mean
 * does not (half precision), it runs as recorded on the slice, times b / batch: (mean of b rows) *
 * b / batch == sum / batch, a partial sum. */
#include "placement/rewrite.h"

/* The position of dimension d of the input after reducing `set`. */
static uint32_t after(uint32_t set, bool keepdim, uint32_t d)
{
    uint32_t gone = 0;
    for (uint32_t k = 0; k < d; k++)
        gone += (set >> k) & 1;
    return keepdim ? d : d - gone;
}

typedef enum over_batch { OVER_SUM, OVER_MEAN, OVER_MAX, OVER_MIN, OVER_NONE } over_batch;

/* Reduce input 0 over `set` (all dims when empty). */
static bool reduce(koila__case *c, uint32_t set, bool keepdim, over_batch how)
{
    const koila_placement p = c->in[0];
    const uint32_t n_dims = c->in_meta[0]->n_dims;
    if (c->n_in != 1)
        return false;
    if (!set)
        set = (1u << n_dims) - 1;
    if (koila__is_p(p)) {
        const bool ok = ((how == OVER_SUM || how == OVER_MEAN) && p.combine == KOILA_SUM) ||
                        (how == OVER_MAX && p.combine == KOILA_MAX) ||
                        (how == OVER_MIN && p.combine == KOILA_MIN);
        return ok && koila__out_all(c, p);
    }
    if (!koila__is_s(p))
        return false;
    if (!((set >> p.dim) & 1))
        return koila__out_all(c, koila__moved(p, after(set, keepdim, p.dim)));
    if (how == OVER_NONE)
        return false;
    for (uint32_t j = 0; j < c->n_out && how == OVER_MEAN; j++)
        if (!koila__fix_add(c, KOILA__FIX_SCALE, 0, j))
            return false;
    koila_combine combine = KOILA_SUM;
    if (how == OVER_MAX)
        combine = KOILA_MAX;
    if (how == OVER_MIN)
        combine = KOILA_MIN;
    return koila__out_all(c, koila__p(c, combine));
}

static bool reduce_dims(koila__case *c, uint32_t pos_dims, uint32_t pos_keepdim, over_batch how)
{
    uint32_t set, n;
    bool keepdim;
    return koila__arg_dims(c, pos_dims, c->in_meta[0]->n_dims, &set, NULL, &n) &&
           koila__arg_bool(c, pos_keepdim, false, &keepdim) && reduce(c, set, keepdim, how);
}

/* sum, sum.dim_IntList, nansum, count_nonzero.dim_IntList */
bool koila__rule_sum(koila__case *c) { return reduce_dims(c, 1, 2, OVER_SUM); }
bool koila__rule_nansum(koila__case *c)
{
    return !koila__any_p(c) && reduce_dims(c, 1, 2, OVER_SUM);
}
bool koila__rule_count(koila__case *c)
{
    uint32_t set, n;
    return !koila__any_p(c) && koila__arg_dims(c, 1, c->in_meta[0]->n_dims, &set, NULL, &n) &&
           reduce(c, set, false, OVER_SUM);
}
bool koila__rule_amax(koila__case *c) { return reduce_dims(c, 1, 2, OVER_MAX); }
bool koila__rule_amin(koila__case *c) { return reduce_dims(c, 1, 2, OVER_MIN); }
bool koila__rule_max_all(koila__case *c)
{
    return c->sig->n_pos == 1 && reduce(c, 0, false, OVER_MAX);
}
bool koila__rule_min_all(koila__case *c)
{
    return c->sig->n_pos == 1 && reduce(c, 0, false, OVER_MIN);
}
bool koila__rule_any(koila__case *c)
{
    return !koila__any_p(c) && c->out_meta[0]->dtype == KOILA_DTYPE_BOOL &&
           reduce_dims(c, 1, 2, OVER_MAX);
}
bool koila__rule_all(koila__case *c)
{
    return !koila__any_p(c) && c->out_meta[0]->dtype == KOILA_DTYPE_BOOL &&
           reduce_dims(c, 1, 2, OVER_MIN);
}
/* prod, argmax, median, mode, ... over one dimension (or all when left out), with keepdim: only
 * when it is not the batch */
bool koila__rule_reduce_other(koila__case *c)
{
    return !koila__any_p(c) && reduce_dims(c, 1, 2, OVER_NONE);
}

/* koila::moments(x, dims) -> [3, the other sizes]: see pseudo.def */
bool koila__rule_moments(koila__case *c)
{
    uint32_t set, n;
    if (koila__any_p(c) || c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dims(c, 1, c->in_meta[0]->n_dims, &set, NULL, &n) || n == 0)
        return false;
    c->out[0] = (set >> c->in[0].dim) & 1
                    ? koila__p(c, KOILA_MOMENTS)
                    : koila__moved(c->in[0], 1 + after(set, false, c->in[0].dim));
    return true;
}

/* ---- reductions over the batch that are no sums, or not only: rewritten */

/* input 0 reduced over `set`: its sizes with 1 (keepdim) or without them */
static uint32_t reduced_sizes(const koila__case *c, uint32_t set, bool keepdim, int64_t *size)
{
    uint32_t n = 0;
    const koila_meta_info *m = c->in_meta[0];
    for (uint32_t d = 0; d < m->n_dims; d++) {
        const bool gone = (set >> d) & 1;
        if (!gone || keepdim)
            size[n++] = gone ? 1 : m->size[d];
    }
    return n;
}

static koila_value reduced(koila__case *c, const char *op, koila_value x, uint32_t set,
                           bool keepdim, koila_dtype dtype)
{
    int64_t dims[KOILA_MAX_DIMS], size[KOILA_MAX_DIMS];
    uint32_t n = 0;
    for (uint32_t d = 0; d < c->in_meta[0]->n_dims; d++)
        if ((set >> d) & 1)
            dims[n++] = d;
    const uint32_t n_dims = reduced_sizes(c, set, keepdim, size);
    koila__call k;
    koila__emit_begin(c, &k, op, 0);
    koila__emit_value(&k, x);
    koila__emit_ints(&k, dims, n);
    koila__emit_bool(&k, keepdim);
    return koila__emit_end(&k, koila__emit_meta(c, c->in_meta[0], dtype, n_dims, size));
}

/* Replaces result j by v, cast to its dtype and with exactly its meta */
static bool replace(koila__case *c, uint32_t j, koila_value v)
{
    const koila_meta_info *m = koila__emit_meta_of(c, v);
    if (!m)
        return false;
    if (koila__emit_meta_id(c, v) != c->sig->outputs[j])
        v = m->dtype == c->out_meta[j]->dtype
                ? koila__emit_view(c, v, c->out_meta[j]->n_dims, c->out_meta[j]->size)
                : koila__emit_cast_as(c, v, c->sig->outputs[j]);
    c->replaced[j] = v;
    return v != KOILA_NONE && koila__emit_meta_id(c, v) == c->sig->outputs[j];
}

static bool is_wide_float(koila_dtype t) { return t == KOILA_DTYPE_F32 || t == KOILA_DTYPE_F64; }

/* mean, mean.dim (x, dims?, keepdim?, *, dtype) */
bool koila__rule_mean(koila__case *c)
{
    uint32_t set, n;
    bool keepdim;
    const koila_meta_info *m = c->in_meta[0];
    if (!koila__arg_dims(c, 1, m->n_dims, &set, NULL, &n) ||
        !koila__arg_bool(c, 2, false, &keepdim))
        return false;
    if (!set)
        set = (1u << m->n_dims) - 1;
    const bool crosses = koila__is_s(c->in[0]) && (set >> c->in[0].dim) & 1;
    if (!crosses || !c->may_emit || !is_wide_float(m->dtype) || m->dtype != c->out_meta[0]->dtype)
        return reduce(c, set, keepdim, OVER_MEAN);
    int64_t count = 1;
    for (uint32_t d = 0; d < m->n_dims; d++)
        count *= (set >> d) & 1 ? m->size[d] : 1;
    const koila_value sum =
        reduced(c, "aten::sum.dim_IntList", c->in_value[0], set, keepdim, m->dtype);
    const koila_meta_info *its = koila__emit_meta_of(c, sum);
    return its && replace(c, 0,
                          koila__emit_scalar(c, "aten::div.Tensor", sum, (double)count,
                                             koila__emit_meta_like(c, its, m->dtype)));
}

/* var, std, var_mean, std_mean .correction(x, dim?, *, correction, keepdim) */
static bool variance(koila__case *c, bool root, bool with_mean)
{
    uint32_t set, n;
    int64_t keepdim;
    double correction;
    const koila_meta_info *m = c->in_meta[0];
    if (koila__any_p(c) || c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dims(c, 1, m->n_dims, &set, NULL, &n))
        return false;
    if (!koila__kw_int(c, "keepdim", 0, &keepdim) ||
        !koila__kw_number(c, "correction", 1, &correction))
        return false;
    if (!set)
        set = (1u << m->n_dims) - 1;
    if (!((set >> c->in[0].dim) & 1))
        return koila__out_all(c, koila__moved(c->in[0], after(set, keepdim, c->in[0].dim)));
    if (!c->may_emit || !koila__dtype_is_float(m->dtype) || koila__dtype_is_complex(m->dtype))
        return false;
    int64_t dims[KOILA_MAX_DIMS];
    int64_t size[KOILA_MAX_DIMS + 1];
    int64_t count = 1;
    n = 0;
    for (uint32_t d = 0; d < m->n_dims; d++)
        if ((set >> d) & 1) {
            dims[n++] = d;
            count *= m->size[d];
        }
    if (count <= correction)
        return false; /* gathered: eager warns and gives nan or inf */
    const koila_dtype acc = koila__moments_type(m->dtype);
    size[0] = 3;
    const uint32_t n_dims = reduced_sizes(c, set, false, size + 1);
    koila__call k;
    koila__emit_begin(c, &k, "koila::moments", 0);
    koila__emit_value(&k, c->in_value[0]);
    koila__emit_ints(&k, dims, n);
    const koila_value whole = koila__emit_end(&k, koila__emit_meta(c, m, acc, n_dims + 1, size));
    koila_value row[3];
    const koila_meta one = koila__emit_meta(c, m, acc, n_dims, size + 1);
    for (int64_t i = 1; i < 3; i++) {
        koila__emit_begin(c, &k, "aten::select.int", KOILA_OP_VIEW);
        koila__emit_value(&k, whole);
        koila__emit_int(&k, 0);
        koila__emit_int(&k, i);
        row[i] = koila__emit_end(&k, one);
    }
    koila_value v =
        koila__emit_scalar(c, "aten::div.Tensor", row[2], (double)count - correction, one);
    if (root)
        v = koila__emit_unary(c, "aten::sqrt", v, one);
    uint32_t kept = reduced_sizes(c, set, keepdim, size);
    if (keepdim) {
        v = koila__emit_view(c, v, kept, size);
        row[1] = koila__emit_view(c, row[1], kept, size);
    }
    return replace(c, 0, v) && (!with_mean || replace(c, 1, row[1]));
}
bool koila__rule_var(koila__case *c) { return variance(c, false, false); }
bool koila__rule_std(koila__case *c) { return variance(c, true, false); }
bool koila__rule_var_mean(koila__case *c) { return variance(c, false, true); }
bool koila__rule_std_mean(koila__case *c) { return variance(c, true, true); }

/* logsumexp(x, dims, keepdim) = log(sum(exp(x - max))) + max, with a maximum of +-inf taken as 0 */
bool koila__rule_logsumexp(koila__case *c)
{
    uint32_t set, n;
    bool keepdim;
    const koila_meta_info *m = c->in_meta[0];
    if (koila__any_p(c) || c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dims(c, 1, m->n_dims, &set, NULL, &n) || n == 0)
        return false;
    if (!koila__arg_bool(c, 2, false, &keepdim))
        return false;
    if (!((set >> c->in[0].dim) & 1))
        return koila__out_all(c, koila__moved(c->in[0], after(set, keepdim, c->in[0].dim)));
    if (!c->may_emit || !koila__dtype_is_float(m->dtype) || koila__dtype_is_complex(m->dtype))
        return false;
    const koila_dtype acc = koila__accumulate_type(m->dtype);
    int64_t size[KOILA_MAX_DIMS];
    const uint32_t kept = reduced_sizes(c, set, true, size);
    const koila_value x = koila__emit_cast(c, c->in_value[0], acc);
    const koila_value max = reduced(c, "aten::amax", x, set, true, acc);
    const koila_meta one = koila__emit_meta(c, m, acc, kept, size);
    const koila_meta full = koila__emit_meta_like(c, m, acc);
    const koila_value inf = koila__emit_unary(c, "aten::isinf", max,
                                              koila__emit_meta(c, m, KOILA_DTYPE_BOOL, kept, size));
    koila__call k;
    koila__emit_begin(c, &k, "aten::masked_fill.Scalar", 0);
    koila__emit_value(&k, max);
    koila__emit_value(&k, inf);
    koila__emit_float(&k, 0.0);
    const koila_value shift = koila__emit_end(&k, one);
    const koila_value e = koila__emit_unary(
        c, "aten::exp", koila__emit_binary(c, "aten::sub.Tensor", x, shift, full), full);
    const koila_value sum = reduced(c, "aten::sum.dim_IntList", e, set, true, acc);
    koila_value v = koila__emit_binary(c, "aten::add.Tensor",
                                       koila__emit_unary(c, "aten::log", sum, one), shift, one);
    if (!keepdim)
        v = koila__emit_view(c, v, c->out_meta[0]->n_dims, c->out_meta[0]->size);
    return replace(c, 0, v);
}

/* The reduction of |x| that gives the norm of an order; NULL: there is none, or the order is 2. */
static const char *norm_reduction(double ord)
{
    const double inf = __builtin_inf();
    if (ord == 1)
        return "aten::sum.dim_IntList";
    if (ord == inf)
        return "aten::amax";
    return ord == -inf ? "aten::amin" : NULL;
}

/* linalg_vector_norm(x, ord, dim?, keepdim, *, dtype), norm.ScalarOpt_dim(x, p?, dim, keepdim),
 * norm.Scalar(x, p): orders 1, 2 and +-inf over the batch */
static bool norm(koila__case *c, uint32_t pos_dims)
{
    uint32_t set = 0, n = 0;
    bool keepdim = false;
    double ord;
    const koila_meta_info *m = c->in_meta[0];
    if (koila__any_p(c) || c->n_in != 1 || !koila__is_s(c->in[0]))
        return false;
    if (koila__is_absent(c, 1))
        ord = 2;
    else if (!koila__arg_number(c, 1, 2, &ord))
        return false;
    if (pos_dims && (!koila__arg_dims(c, pos_dims, m->n_dims, &set, NULL, &n) ||
                     !koila__arg_bool(c, pos_dims + 1, false, &keepdim)))
        return false;
    if (!set)
        set = (1u << m->n_dims) - 1;
    if (!((set >> c->in[0].dim) & 1))
        return koila__out_all(c, koila__moved(c->in[0], after(set, keepdim, c->in[0].dim)));
    if (!c->may_emit || koila__kw(c, "dtype") || !koila__dtype_is_float(m->dtype) ||
        koila__dtype_is_complex(m->dtype) || (ord != 2 && !norm_reduction(ord)))
        return false;
    const koila_dtype acc = koila__accumulate_type(m->dtype);
    const koila_meta full = koila__emit_meta_like(c, m, acc);
    const koila_value x = koila__emit_cast(c, c->in_value[0], acc);
    if (ord == 2) {
        int64_t size[KOILA_MAX_DIMS];
        const uint32_t n_dims = reduced_sizes(c, set, keepdim, size);
        const koila_value squares = koila__emit_binary(c, "aten::mul.Tensor", x, x, full);
        const koila_value sum = reduced(c, "aten::sum.dim_IntList", squares, set, keepdim, acc);
        const koila_meta out = koila__emit_meta(c, m, acc, n_dims, size);
        return replace(c, 0, koila__emit_unary(c, "aten::sqrt", sum, out));
    }
    const koila_value abs = koila__emit_unary(c, "aten::abs", x, full);
    return replace(c, 0, reduced(c, norm_reduction(ord), abs, set, keepdim, acc));
}
bool koila__rule_vector_norm(koila__case *c) { return norm(c, 2); }
bool koila__rule_norm_all(koila__case *c) { return norm(c, 0); }

/* ---- along one dimension: rows must be whole along it */

static bool along(koila__case *c, uint32_t set, bool is_linear)
{
    if (koila__any_p(c))
        return is_linear && c->n_in == 1 && koila__is_sum(c->in[0]) && koila__out_all(c, c->in[0]);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) || ((set >> c->in[0].dim) & 1))
        return false;
    return koila__out_all(c, c->in[0]);
}
static bool along_dim(koila__case *c, uint32_t pos, int64_t otherwise, bool is_linear)
{
    uint32_t d;
    return koila__arg_dim(c, pos, otherwise, c->in_meta[0]->n_dims, &d) &&
           along(c, 1u << d, is_linear);
}
/* sort, cumprod, cummax, glu, ... (x, dim) */
bool koila__rule_along1(koila__case *c) { return along_dim(c, 1, -1, false); }
/* topk, kthvalue (x, k, dim) */
bool koila__rule_along2(koila__case *c) { return along_dim(c, 2, -1, false); }
bool koila__rule_cumsum(koila__case *c)
{
    return !koila__is_absent(c, 1) && along_dim(c, 1, -1, !koila__kw(c, "dtype"));
}
bool koila__rule_sort_stable(koila__case *c)
{
    int64_t d;
    if (!koila__kw_int(c, "dim", -1, &d))
        return false;
    const koila_arg *pos = koila__arg(c, 1);
    if (pos)
        return false;
    const int64_t n = c->in_meta[0]->n_dims ? c->in_meta[0]->n_dims : 1;
    return d >= -n && d < n && along(c, 1u << (d < 0 ? d + n : d), false);
}
/* flip, _fft_c2c, _fft_r2c, _fft_c2r (x, dims, ...): linear */
bool koila__rule_flip(koila__case *c)
{
    uint32_t set, n;
    return !koila__is_absent(c, 1) &&
           koila__arg_dims(c, 1, c->in_meta[0]->n_dims, &set, NULL, &n) && along(c, set, true);
}
/* roll(x, shifts, dims); without dims it rolls the flattened tensor */
bool koila__rule_roll(koila__case *c)
{
    uint32_t set, n;
    return koila__arg_dims(c, 2, c->in_meta[0]->n_dims, &set, NULL, &n) && n > 0 &&
           along(c, set, true);
}
/* tril, triu and the like over the last two dims: linear */
bool koila__rule_tril(koila__case *c)
{
    return c->in_meta[0]->n_dims >= 2 && along(c, 3u << (c->in_meta[0]->n_dims - 2), true);
}

/* Decompositions and solvers of matrices in the last two dims: those before are independent. */
bool koila__rule_matrices(koila__case *c)
{
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || lead == KOILA_NONE || c->in[lead].dim + 2u >= c->in_meta[lead]->n_dims)
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (c->in_meta[i]->n_dims != c->in_meta[lead]->n_dims || !koila__need(c, i, c->in[lead]))
            return false;
    return koila__out_all(c, c->in[lead]);
}

/* linalg_lu_solve(LU, pivots, B), lu_unpack(LU, pivots), householder_product(A, tau): input 1 is a
 * vector for each matrix */
bool koila__rule_matrices_vector(koila__case *c)
{
    const uint32_t lead = koila__lead(c);
    const uint32_t n = c->in_meta[0]->n_dims;
    if (koila__any_p(c) || lead == KOILA_NONE || c->in[lead].dim + 2u >= n)
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (c->in_meta[i]->n_dims + (i == 1 ? 1u : 0u) != n || !koila__need(c, i, c->in[lead]))
            return false;
    return koila__out_all(c, c->in[lead]);
}

/* glu_backward(grad, x, dim): rows of both */
bool koila__rule_glu_backward(koila__case *c)
{
    uint32_t d;
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || c->n_in != 2 || lead == KOILA_NONE ||
        !koila__arg_dim(c, 2, -1, c->in_meta[1]->n_dims, &d) || c->in[lead].dim == d)
        return false;
    if (!koila__need(c, 0, c->in[lead]) || !koila__need(c, 1, c->in[lead]))
        return false;
    return koila__out_all(c, c->in[lead]);
}

/* aminmax(x, *, dim?, keepdim): over the batch the two results combine differently but alike:
 * maximum and minimum */
bool koila__rule_aminmax(koila__case *c)
{
    int64_t dim = 0, keepdim;
    const koila_arg *a = koila__kw(c, "dim");
    const int64_t n = c->in_meta[0]->n_dims;
    if (koila__any_p(c) || c->n_in != 1 || c->n_out != 2 || !koila__is_s(c->in[0]) ||
        !koila__kw_int(c, "dim", 0, &dim) || !koila__kw_int(c, "keepdim", 0, &keepdim))
        return false;
    if (dim < 0)
        dim += n;
    if (dim < 0 || dim >= n)
        return false;
    if (a && a->kind == KOILA_ARG_INT && dim != c->in[0].dim)
        return koila__out_all(c, koila__moved(c->in[0], after(1u << dim, keepdim, c->in[0].dim)));
    c->out[0] = koila__p(c, KOILA_MIN);
    c->out[1] = koila__p(c, KOILA_MAX);
    return true;
}

/* linalg_cross(a, b, *, dim): broadcast, vectors along dim */
bool koila__rule_cross(koila__case *c)
{
    int64_t dim;
    if (koila__any_p(c) || !koila__kw_int(c, "dim", -1, &dim) || !koila__rule_pointwise(c) ||
        c->out[0].kind != KOILA_S)
        return false;
    if (dim < 0)
        dim += c->out_meta[0]->n_dims;
    return c->out[0].dim != dim;
}
