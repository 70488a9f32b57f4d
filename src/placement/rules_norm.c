/* rules_norm.c — normalisations and softmax. Over other dimensions they are row by row; training
 * BatchNorm couples the rows, and is rewritten:
 *
 *   m = koila::moments(x, all dims but 1)
 *         f[3, C]: count, mean, M2; partial, the only barrier of the forward pass
 *   out = _native_batch_norm_legit_no_training(x, weight, bias, mean, M2 / count, momentum, eps)
 *   save_invstd = (M2 / count + eps) ** -0.5; new running statistics = (1 - momentum) * old +
 *       momentum * (mean, M2 / (count - 1))
 *
 * and its gradient, with sums over all dims but 1 as the only barrier, both from one call of the
 * operator in eval mode (mean in the place of the running mean, invstd ** -2 in that of the
 * variance, eps 0), which gives gw = sum dy * (x - mean) * invstd and gb = sum dy:
 *   gx = (dy - gb / n) * invstd * weight  -  (x - mean) * (gw * invstd / n) * invstd * weight
 * Statistics are kept in the accumulate type and merged pairwise (koila::moments in pseudo.def), so
 * no digit is lost to splitting. Group norm along a spatial dimension is rewritten alike. */
#include "placement/rewrite.h"

/* ---- layer norm: the last dims named by `shape` are one row */

static bool rows_only(const koila__case *c, koila_placement p, uint32_t pos_shape)
{
    const koila_arg *shape = koila__arg(c, pos_shape);
    const uint32_t n_dims = c->in_meta[0]->n_dims;
    return shape && shape->kind == KOILA_ARG_LIST && koila__is_s(p) && shape->n <= n_dims &&
           p.dim < n_dims - shape->n;
}

/* native_layer_norm(x, shape, weight?, bias?, eps) -> out, mean, rstd; _fused_rms_norm(x, shape,
 * weight?, eps) -> out, rstd */
bool koila__rule_layer_norm(koila__case *c)
{
    if (koila__any_p(c) || !rows_only(c, c->in[0], 1))
        return false;
    for (uint32_t i = 1; i < c->n_in; i++)
        koila__need_r(c, i);
    return koila__out_all(c, c->in[0]);
}

/* native_layer_norm_backward(grad, x, shape, mean, rstd, weight?, bias?, mask) -> gx, gw, gb */
static bool norm_backward(koila__case *c, uint32_t n_rows, uint32_t pos_shape)
{
    const uint32_t lead = koila__lead_among(c, n_rows);
    if (koila__any_p(c) || lead == KOILA_NONE || !rows_only(c, c->in[lead], pos_shape))
        return false;
    return koila__need_rows(c, n_rows, c->in[lead]) && koila__out_rows_and_sums(c, c->in[lead]);
}
bool koila__rule_layer_norm_backward(koila__case *c)
{
    return koila__input_at(c, 3) == 2 && koila__input_at(c, 4) == 3 && norm_backward(c, 4, 2);
}
bool koila__rule_rms_norm_backward(koila__case *c)
{
    return koila__input_at(c, 3) == 2 && norm_backward(c, 3, 2);
}

/* ---- batch norm */

/* Dims of x but the channels, as koila::moments wants them. */
static koila_value moments(koila__case *c, koila_value x, koila_dtype dtype)
{
    const koila_meta_info *m = koila__emit_meta_of(c, x);
    int64_t dims[KOILA_MAX_DIMS], n = 0;
    const int64_t size[2] = { 3, m->size[1] };
    for (uint32_t d = 0; d < m->n_dims; d++)
        if (d != 1)
            dims[n++] = d;
    koila__call k;
    koila__emit_begin(c, &k, "koila::moments", 0);
    koila__emit_value(&k, x);
    koila__emit_ints(&k, dims, (uint32_t)n);
    return koila__emit_end(&k, koila__emit_meta(c, m, dtype, 2, size));
}

static koila_value row(koila__case *c, koila_value m, int64_t i) /* m[i] */
{
    const koila_meta_info *info = koila__emit_meta_of(c, m);
    if (!info)
        return KOILA_NONE;
    koila__call k;
    koila__emit_begin(c, &k, "aten::select.int", KOILA_OP_VIEW);
    koila__emit_value(&k, m);
    koila__emit_int(&k, 0);
    koila__emit_int(&k, i);
    return koila__emit_end(
        &k, koila__emit_meta(c, info, info->dtype, info->n_dims - 1u, info->size + 1));
}

static koila_value lerp_stat(koila__case *c, koila_value old, koila_value fresh, double momentum,
                             koila_meta out)
{
    const koila_meta_info *m = koila_meta_get(c->table, out);
    koila_value kept = koila__emit_scalar(c, "aten::mul.Tensor", old, 1.0 - momentum, out);
    fresh = koila__emit_cast(c, fresh, m->dtype);
    koila__call k;
    koila__emit_begin(c, &k, "aten::add.Tensor", 0);
    koila__emit_value(&k, kept);
    koila__emit_value(&k, fresh);
    koila__emit_kw(&k, "alpha");
    koila__emit_float(&k, momentum);
    return koila__emit_end(&k, out);
}

/* The first n_full inputs are like x, sharded on dimension 1; all others are vectors of channels,
 * as are all results but the first. */
static bool per_channel_rows(koila__case *c, koila_placement x, uint32_t n_full)
{
    const koila_placement v = koila__moved(x, 0);
    for (uint32_t i = 0; i < c->n_in; i++)
        if (!koila__need(c, i, i < n_full ? x : v))
            return false;
    for (uint32_t j = 0; j < c->n_out; j++) {
        if (!c->out_meta[j])
            continue;
        if (j == 0)
            c->out[j] = x;
        else
            c->out[j] = c->out_meta[j]->n_elements ? v : koila__p(c, KOILA_SUM);
        if (koila__is_s(c->out[j]) && !koila__fits(c, c->out[j], c->out_meta[j]))
            return false;
    }
    return true;
}

/* Of a batch, with the two numbers that a training step of batch norm uses them with. */
typedef struct statistics {
    double momentum, eps;
    koila_meta stat;             /* [C] in the type of the moments */
    koila_value count, mean, m2; /* of x over all dims but the channels */
    koila_value var;             /* m2 / count */
} statistics;

static bool batch_statistics(koila__case *c, statistics *t)
{
    const koila_dtype acc = koila__moments_type(c->in_meta[0]->dtype);
    const koila_value whole = moments(c, c->in_value[0], acc);
    const koila_meta_info *w = koila__emit_meta_of(c, whole);
    if (!w)
        return false;
    t->stat = koila__emit_meta(c, w, acc, 1, w->size + 1);
    t->count = row(c, whole, 0);
    t->mean = row(c, whole, 1);
    t->m2 = row(c, whole, 2);
    t->var = koila__emit_binary(c, "aten::div.Tensor", t->m2, t->count, t->stat);
    return true;
}

/* Results 1 and 2: the mean and 1 / sqrt(variance + eps). */
static void save_statistics(koila__case *c, const statistics *t)
{
    const koila_dtype type = koila_meta_get(c->table, c->sig->outputs[1])->dtype;
    const koila_value var_eps = koila__emit_scalar(c, "aten::add.Tensor", t->var, t->eps, t->stat);
    const koila_value invstd = koila__emit_unary(c, "aten::rsqrt", var_eps, t->stat);
    c->replaced[1] = koila__emit_cast(c, t->mean, type);
    c->replaced[2] = koila__emit_cast(c, invstd, type);
}

/* Result 0: batch norm in eval mode, with the statistics of the batch. */
static bool normalise(koila__case *c, const statistics *t)
{
    const uint32_t weight = koila__input_at(c, 1);
    const koila_dtype type = weight == KOILA_NONE
                                 ? koila_meta_get(c->table, c->sig->outputs[1])->dtype
                                 : c->in_meta[weight]->dtype;
    /* the statistics that it returns are not asked for: each row is by itself */
    const koila_meta out[3] = { c->sig->outputs[0], KOILA_NONE, KOILA_NONE };
    koila_value result[3];
    koila__call k;
    koila__emit_begin(c, &k, "aten::_native_batch_norm_legit_no_training", 0);
    koila__emit_copy(&k, 0);
    koila__emit_copy(&k, 1);
    koila__emit_copy(&k, 2);
    koila__emit_value(&k, koila__emit_cast(c, t->mean, type));
    koila__emit_value(&k, koila__emit_cast(c, t->var, type));
    koila__emit_float(&k, t->momentum);
    koila__emit_float(&k, t->eps);
    if (!koila__emit_end_n(&k, 3, out, result))
        return false;
    c->replaced[0] = result[0];
    return true;
}

/* Results 3 and 4: the running statistics as new values; the variance of those is unbiased. */
static bool run_statistics(koila__case *c, const statistics *t, uint32_t pos_mean)
{
    const uint32_t mean = koila__input_at(c, pos_mean);
    const uint32_t var = koila__input_at(c, pos_mean + 1);
    if (mean == KOILA_NONE || var == KOILA_NONE)
        return false;
    const koila_value less_one = koila__emit_scalar(c, "aten::sub.Tensor", t->count, 1.0, t->stat);
    const koila_value unbiased =
        koila__emit_binary(c, "aten::div.Tensor", t->m2, less_one, t->stat);
    c->replaced[3] = lerp_stat(c, c->in_value[mean], t->mean, t->momentum, c->sig->outputs[3]);
    c->replaced[4] = lerp_stat(c, c->in_value[var], unbiased, t->momentum, c->sig->outputs[4]);
    return true;
}

static bool all_replaced(const koila__case *c)
{
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j] && c->replaced[j] == KOILA_NONE)
            return false;
    return true;
}

static bool batch_norm_training(koila__case *c, uint32_t pos_mean, uint32_t pos_training)
{
    statistics t = { 0 };
    if (!c->may_emit || c->n_out < 3 || !c->out_meta[0] || !c->out_meta[1] || !c->out_meta[2])
        return false;
    if (!koila__arg_number(c, pos_training + 1, 0.1, &t.momentum) ||
        !koila__arg_number(c, pos_training + 2, 1e-5, &t.eps))
        return false;
    const bool runs = c->n_out == 5 && c->out_meta[3] && c->out_meta[4];
    if (!batch_statistics(c, &t))
        return false;
    save_statistics(c, &t);
    if (!normalise(c, &t))
        return false;
    if (runs ? !run_statistics(c, &t, pos_mean) : c->n_out > 3)
        return false;
    return all_replaced(c);
}

/* In evaluation, with the running statistics. The CPU's kernels return empty ones, a GPU's those
 * that were given: they are the same in each slice. */
static bool batch_norm_given(koila__case *c, uint32_t pos_mean, uint32_t pos_momentum)
{
    uint64_t n_saved = 0;
    for (uint32_t j = 1; j < c->n_out; j++)
        n_saved += c->out_meta[j] ? c->out_meta[j]->n_elements : 0;
    if (n_saved == 0)
        return koila__out_rows_and_sums(c, c->in[0]);
    if (!c->may_emit || c->n_out != 3 || pos_mean == KOILA_NONE)
        return false;
    const uint32_t mean = koila__input_at(c, pos_mean);
    const uint32_t var = koila__input_at(c, pos_mean + 1);
    if (mean == KOILA_NONE || var == KOILA_NONE)
        return false;
    statistics t = { .stat = c->sig->outputs[1] };
    const koila_dtype type = koila_meta_get(c->table, t.stat)->dtype;
    t.mean = koila__emit_scalar(c, "aten::mul.Tensor", koila__emit_cast(c, c->in_value[mean], type),
                                1.0, t.stat);
    t.var = koila__emit_cast(c, c->in_value[var], type);
    if (!koila__arg_number(c, pos_momentum, 0.1, &t.momentum) ||
        !koila__arg_number(c, pos_momentum + 1, 1e-5, &t.eps))
        return false;
    save_statistics(c, &t);
    return normalise(c, &t);
}

/* Positions: input 0, weight 1, bias 2, running_mean pos_mean (KOILA_NONE: none), running_var
 * pos_mean + 1, then training, momentum, eps. */
static bool batch_norm(koila__case *c, uint32_t pos_mean, uint32_t pos_training)
{
    bool training;
    const koila_placement x = c->in[0];
    if (!koila__arg_bool(c, pos_training, false, &training) || koila__any_p(c))
        return false;
    /* InstanceNorm: the samples are channels, each by itself */
    if (koila__is_s(x) && x.dim == 1)
        return per_channel_rows(c, x, 1);
    if (!koila__is_s(x))
        return false;
    for (uint32_t i = 1; i < c->n_in; i++)
        if (!koila__is_r(c->in[i]))
            return false;
    return training ? batch_norm_training(c, pos_mean, pos_training)
                    : batch_norm_given(c, pos_mean, pos_training + 1);
}

/* x, w, b, rm, rv, training, momentum, eps */
bool koila__rule_batch_norm(koila__case *c) { return batch_norm(c, 3, 5); }
/* x, w, b, training, momentum, eps */
bool koila__rule_batch_norm_no_stats(koila__case *c) { return batch_norm(c, KOILA_NONE, 3); }

/* _native_batch_norm_legit_no_training: x, w, b, rm, rv, momentum, eps */
bool koila__rule_batch_norm_eval(koila__case *c)
{
    if (koila__any_p(c) || !koila__is_s(c->in[0]) || c->in[0].dim == 1)
        return false;
    for (uint32_t i = 1; i < c->n_in; i++)
        koila__need_r(c, i);
    return batch_norm_given(c, 3, 5);
}

/* A channel vector [C] as [1, C, 1, ...] beside x */
static koila_value per_channel(koila__case *c, koila_value v, uint32_t n_dims)
{
    const koila_meta_info *m = koila__emit_meta_of(c, v);
    int64_t size[KOILA_MAX_DIMS];
    if (!m)
        return KOILA_NONE;
    for (uint32_t d = 0; d < n_dims; d++)
        size[d] = d == 1 ? m->size[0] : 1;
    return koila__emit_view(c, v, n_dims, size);
}

/* Inputs of native_batch_norm_backward(grad, x, weight?, rm?, rv?, save_mean?, save_invstd?, train,
 * eps, mask) -> gx, gw, gb in training mode. */
typedef struct gradient {
    koila_value dy, x, mean, invstd;
    uint32_t weight;     /* input, or KOILA_NONE */
    koila_meta stat;     /* of mean and invstd */
    koila_value sums[3]; /* by result: gw and gb over the batch; [0] is none */
} gradient;

/* Both sums in one kernel: the gradient in eval mode, with the mean of the batch in the place of
 * the running mean, invstd ** -2 in that of the variance, and eps 0. The CPU's kernel reads these;
 * CUDA's reads the saved statistics in every mode, and asserts that they are there. */
static bool batch_norm_sums(koila__case *c, gradient *g)
{
    const koila_meta sum = g->weight == KOILA_NONE ? g->stat : c->sig->inputs[g->weight];
    const koila_dtype type = koila_meta_get(c->table, sum)->dtype;
    const bool on_cpu = koila_meta_get(c->table, g->stat)->device == 0;
    const koila_value inv2 =
        koila__emit_binary(c, "aten::mul.Tensor", g->invstd, g->invstd, g->stat);
    const koila_value var = koila__emit_unary(c, "aten::reciprocal", inv2, g->stat);
    const bool mask[3] = { false, true, true };
    const koila_meta out[3] = { KOILA_NONE, sum, sum };
    koila__call k;
    koila__emit_begin(c, &k, "aten::native_batch_norm_backward", 0);
    koila__emit_value(&k, g->dy);
    koila__emit_value(&k, g->x);
    /* CUDA allocates gw like the weight. The sums do not depend on its values. */
    if (on_cpu)
        koila__emit_optional(&k, g->weight);
    else
        koila__emit_value(&k, g->weight == KOILA_NONE ? g->invstd : c->in_value[g->weight]);
    koila__emit_value(&k, koila__emit_cast(c, g->mean, type));
    koila__emit_value(&k, koila__emit_cast(c, var, type));
    /* the CPU's kernel refuses float statistics beside a weight of half precision */
    if (on_cpu) {
        koila__emit_none(&k);
        koila__emit_none(&k);
    } else {
        koila__emit_value(&k, g->mean);
        koila__emit_value(&k, g->invstd);
    }
    koila__emit_bool(&k, false);
    koila__emit_float(&k, 0.0);
    koila__emit_bools(&k, mask, 3);
    if (!koila__emit_end_n(&k, 3, out, g->sums))
        return false;
    for (uint32_t j = 1; j < 3; j++) {
        if (!c->out_meta[j])
            continue;
        c->replaced[j] = g->sums[j];
        if (c->sig->outputs[j] != sum)
            return false;
    }
    return true;
}

/* gx = (dy - gb / n) * invstd * weight - (x - mean) * (gw * invstd / n) * invstd * weight */
static bool batch_norm_rows(koila__case *c, const gradient *g)
{
    const koila_meta_info *m = c->in_meta[1];
    const uint32_t n_dims = m->n_dims;
    const koila_dtype acc = koila_meta_get(c->table, g->stat)->dtype;
    const double n = (double)(m->n_elements / (uint64_t)(m->size[1] ? m->size[1] : 1));
    const koila_value gb = koila__emit_cast(c, g->sums[2], acc);
    const koila_value gw = koila__emit_cast(c, g->sums[1], acc);
    const koila_value shift = koila__emit_scalar(c, "aten::div.Tensor", gb, n, g->stat);
    koila_value slope = koila__emit_scalar(c, "aten::div.Tensor", gw, n, g->stat);
    slope = koila__emit_binary(c, "aten::mul.Tensor", slope, g->invstd, g->stat);
    koila_value scale = g->invstd;
    if (g->weight != KOILA_NONE) {
        const koila_value weight = koila__emit_cast(c, c->in_value[g->weight], acc);
        scale = koila__emit_binary(c, "aten::mul.Tensor", g->invstd, weight, g->stat);
    }
    slope = koila__emit_binary(c, "aten::mul.Tensor", slope, scale, g->stat);
    const koila_meta wide = koila__emit_meta_like(c, m, acc); /* x's layout */
    if (wide == KOILA_NONE)
        return false;
    const koila_value centred =
        koila__emit_binary(c, "aten::sub.Tensor", g->x, per_channel(c, g->mean, n_dims), wide);
    const koila_value shifted =
        koila__emit_binary(c, "aten::sub.Tensor", g->dy, per_channel(c, shift, n_dims), wide);
    const koila_value scaled =
        koila__emit_binary(c, "aten::mul.Tensor", shifted, per_channel(c, scale, n_dims), wide);
    const bool is_wide = acc == c->out_meta[0]->dtype;
    koila__call k;
    koila__emit_begin(c, &k, "aten::addcmul", 0);
    koila__emit_value(&k, scaled);
    koila__emit_value(&k, centred);
    koila__emit_value(&k, per_channel(c, slope, n_dims));
    koila__emit_kw(&k, "value");
    koila__emit_float(&k, -1.0);
    const koila_value gx = koila__emit_end(&k, is_wide ? c->sig->outputs[0] : wide);
    c->replaced[0] = is_wide ? gx : koila__emit_cast_as(c, gx, c->sig->outputs[0]);
    return true;
}

static bool batch_norm_backward_training(koila__case *c)
{
    const uint32_t mean = koila__input_at(c, 5);
    const uint32_t invstd = koila__input_at(c, 6);
    if (!c->may_emit || mean == KOILA_NONE || invstd == KOILA_NONE)
        return false;
    for (uint32_t i = 2; i < c->n_in; i++)
        if (!koila__is_r(c->in[i]))
            return false;
    gradient g = { .dy = c->in_value[0],
                   .x = c->in_value[1],
                   .mean = c->in_value[mean],
                   .invstd = c->in_value[invstd],
                   .weight = koila__input_at(c, 2),
                   .stat = c->sig->inputs[mean] };
    if (!batch_norm_sums(c, &g) || (c->out_meta[0] && !batch_norm_rows(c, &g)))
        return false;
    return all_replaced(c);
}

bool koila__rule_batch_norm_backward(koila__case *c)
{
    bool train;
    const uint32_t lead = koila__lead_among(c, 2);
    if (koila__any_p(c) || c->n_out != 3 || lead == KOILA_NONE ||
        !koila__arg_bool(c, 7, false, &train))
        return false;
    if (c->in[lead].dim == 1)
        return per_channel_rows(c, c->in[lead], 2);
    if (train)
        return batch_norm_backward_training(c);
    return koila__need_rows(c, 2, c->in[lead]) && koila__out_rows_and_sums(c, c->in[lead]);
}

/* ---- group norm: (x[N, C, ...], weight?, bias?, N, C, HxW, groups, eps) -> out, mean[N, groups],
 * rstd[N, groups]. Samples are independent. Along a spatial dimension:
 *
 *   m = koila::moments(x, spatial dims)     f[3, N, C], partial; those of a group come from it
 *   out = bias + (x - mean) * rstd * weight
 *   gx = dy * rstd * weight - (x - mean) * rstd^3 * a / n - rstd * b / n
 *   gw = sum over N of ds * rstd, gb = sum over N of db
 *   with ds = sum dy * (x - mean), db = sum dy, both [N, C] and partial; a and b: sums of
 *   ds * weight and of db * weight over the channels of a group; n: elements of a group */

/* Numbers of a call, and the metas of what a group norm is written out with. */
typedef struct grouped {
    koila__case *c;
    const koila_meta_info *x;
    int64_t n_samples, n_channels, n_groups;
    double n_area;                     /* elements of a channel */
    koila_dtype type;                  /* in which is computed */
    koila_meta wide, channels, groups; /* of x, of [N, C], of [N, groups] */
} grouped;

static bool grouped_init(grouped *g, koila__case *c, uint32_t x, uint32_t pos_groups)
{
    const koila_meta_info *m = c->in_meta[x];
    if (!c->may_emit || m->n_dims < 3 || !koila__dtype_is_float(m->dtype))
        return false;
    *g = (grouped){ .c = c,
                    .x = m,
                    .n_samples = m->size[0],
                    .n_channels = m->size[1],
                    .type = koila__accumulate_type(m->dtype) };
    if (!koila__arg_int(c, pos_groups, 1, &g->n_groups) || g->n_groups < 1 || g->n_channels < 1 ||
        g->n_channels % g->n_groups || m->n_elements == 0)
        return false;
    const int64_t of_channels[2] = { g->n_samples, g->n_channels };
    const int64_t of_groups[2] = { g->n_samples, g->n_groups };
    g->n_area = (double)(m->n_elements / (uint64_t)(g->n_samples * g->n_channels));
    g->wide = koila__emit_meta_like(c, m, g->type);
    g->channels = koila__emit_meta(c, m, g->type, 2, of_channels);
    g->groups = koila__emit_meta(c, m, g->type, 2, of_groups);
    return g->wide != KOILA_NONE && g->channels != KOILA_NONE && g->groups != KOILA_NONE;
}

/* op(v, dims, keepdim = false) */
static koila_value reduced(const grouped *g, const char *op, koila_value v, const int64_t *dims,
                           uint32_t n, koila_meta out)
{
    koila__call k;
    koila__emit_begin(g->c, &k, op, 0);
    koila__emit_value(&k, v);
    koila__emit_ints(&k, dims, n);
    koila__emit_bool(&k, false);
    return koila__emit_end(&k, out);
}

/* op over the channels of each group: v[N, C] -> [N, groups]. */
static koila_value by_group(const grouped *g, const char *op, koila_value v, koila_meta out)
{
    const int64_t size[3] = { g->n_samples, g->n_groups, g->n_channels / g->n_groups };
    const int64_t last = 2;
    return reduced(g, op, koila__emit_view(g->c, v, 3, size), &last, 1, out);
}

/* v[N, groups] for each channel: [N, C]. */
static koila_value to_channels(const grouped *g, koila_value v, koila_meta out)
{
    koila__call k;
    koila__emit_begin(g->c, &k, "aten::repeat_interleave.self_int", 0);
    koila__emit_value(&k, v);
    koila__emit_int(&k, g->n_channels / g->n_groups);
    koila__emit_int(&k, 1);
    return koila__emit_end(&k, out);
}

/* v[N, C], or a vector [C], beside x. */
static koila_value beside(const grouped *g, koila_value v)
{
    const koila_meta_info *m = koila__emit_meta_of(g->c, v);
    int64_t size[KOILA_MAX_DIMS];
    if (!m)
        return KOILA_NONE;
    for (uint32_t d = 0; d < g->x->n_dims; d++)
        size[d] = 1;
    size[0] = m->n_dims == 2 ? g->n_samples : 1;
    size[1] = g->n_channels;
    return koila__emit_view(g->c, v, g->x->n_dims, size);
}

static koila_value addcmul(const grouped *g, koila_value sum, koila_value a, koila_value b,
                           koila_meta out)
{
    koila__call k;
    koila__emit_begin(g->c, &k, "aten::addcmul", 0);
    koila__emit_value(&k, sum);
    koila__emit_value(&k, a);
    koila__emit_value(&k, b);
    return koila__emit_end(&k, out);
}

/* Input `input` in the type in which is computed; KOILA_NONE: there is none. */
static koila_value widened(const grouped *g, uint32_t input)
{
    return input == KOILA_NONE ? KOILA_NONE
                               : koila__emit_cast(g->c, g->c->in_value[input], g->type);
}

/* a * v, with v a vector of channels; a, where there is none. */
static koila_value weighed(const grouped *g, koila_value a, koila_value v)
{
    return v == KOILA_NONE ? a : koila__emit_binary(g->c, "aten::mul.Tensor", a, v, g->channels);
}

static koila_value spatial_moments(const grouped *g, koila_dtype type)
{
    const int64_t size[3] = { 3, g->n_samples, g->n_channels };
    int64_t dims[KOILA_MAX_DIMS];
    koila__call k;
    for (uint32_t d = 2; d < g->x->n_dims; d++)
        dims[d - 2] = d;
    koila__emit_begin(g->c, &k, "koila::moments", 0);
    koila__emit_value(&k, g->c->in_value[0]);
    koila__emit_ints(&k, dims, g->x->n_dims - 2u);
    return koila__emit_end(&k, koila__emit_meta(g->c, g->x, type, 3, size));
}

/* The mean and 1 / sqrt(variance + eps) of each group, from the moments of its channels. */
static bool group_statistics(const grouped *g, double eps, koila_value *mean, koila_value *rstd)
{
    koila__case *c = g->c;
    const koila_dtype type = koila__moments_type(g->x->dtype);
    const int64_t of_channels[2] = { g->n_samples, g->n_channels };
    const int64_t of_groups[2] = { g->n_samples, g->n_groups };
    const koila_meta channels = koila__emit_meta(c, g->x, type, 2, of_channels);
    const koila_meta groups = koila__emit_meta(c, g->x, type, 2, of_groups);
    const koila_value m = spatial_moments(g, type);
    const koila_value means = row(c, m, 1);
    *mean = by_group(g, "aten::mean.dim", means, groups);
    const koila_value off =
        koila__emit_binary(c, "aten::sub.Tensor", means, to_channels(g, *mean, channels), channels);
    const koila_value off2 = koila__emit_binary(c, "aten::mul.Tensor", off, off, channels);
    const koila_value between =
        koila__emit_scalar(c, "aten::mul.Tensor", off2, g->n_area, channels);
    const koila_value squares =
        koila__emit_binary(c, "aten::add.Tensor", row(c, m, 2), between, channels);
    const double n = g->n_area * (double)(g->n_channels / g->n_groups);
    koila_value var = by_group(g, "aten::sum.dim_IntList", squares, groups);
    var = koila__emit_scalar(c, "aten::div.Tensor", var, n, groups);
    var = koila__emit_scalar(c, "aten::add.Tensor", var, eps, groups);
    *rstd = koila__emit_unary(c, "aten::rsqrt", var, groups);
    return *rstd != KOILA_NONE;
}

/* Result j of the recorded type. */
static void give(koila__case *c, uint32_t j, koila_value v)
{
    if (c->out_meta[j])
        c->replaced[j] = koila__emit_cast(c, v, c->out_meta[j]->dtype);
}

static bool group_norm_rows(koila__case *c)
{
    grouped g;
    double eps;
    koila_value mean, rstd;
    if (c->n_out != 3 || !c->out_meta[0] || !grouped_init(&g, c, 0, 6) ||
        !koila__arg_number(c, 7, 1e-5, &eps) || !group_statistics(&g, eps, &mean, &rstd))
        return false;
    give(c, 1, mean);
    give(c, 2, rstd);
    const koila_value bias = widened(&g, koila__input_at(c, 2));
    const koila_value x = koila__emit_cast(c, c->in_value[0], g.type);
    const koila_value centre =
        beside(&g, to_channels(&g, koila__emit_cast(c, mean, g.type), g.channels));
    const koila_value scale =
        beside(&g, weighed(&g, to_channels(&g, koila__emit_cast(c, rstd, g.type), g.channels),
                           widened(&g, koila__input_at(c, 1))));
    const koila_value off = koila__emit_binary(c, "aten::sub.Tensor", x, centre, g.wide);
    const koila_meta out = g.type == g.x->dtype ? c->sig->outputs[0] : g.wide;
    give(c, 0,
         bias == KOILA_NONE ? koila__emit_binary(c, "aten::mul.Tensor", off, scale, out)
                            : addcmul(&g, beside(&g, bias), off, scale, out));
    return all_replaced(c);
}

bool koila__rule_group_norm(koila__case *c)
{
    if (koila__any_p(c) || !koila__is_s(c->in[0]) || c->in[0].dim == 1)
        return false;
    if (c->in[0].dim > 1)
        return group_norm_rows(c);
    for (uint32_t i = 1; i < c->n_in; i++)
        koila__need_r(c, i);
    return koila__fix_add(c, KOILA__FIX_EXTENT, 3, 0) && koila__out_all(c, c->in[0]);
}

/* The gradient: its values, [N, C] but for those as large as x. */
typedef struct group_gradient {
    koila_value dy, off; /* x - mean */
    koila_value rstd, weight, ds, db;
} group_gradient;

/* scale[N, C] * the sum over each group of v[N, C] * weight / n, for each channel. */
static koila_value share_of_group(const grouped *g, koila_value v, koila_value weight,
                                  koila_value scale)
{
    const double n = g->n_area * (double)(g->n_channels / g->n_groups);
    koila_value sum = by_group(g, "aten::sum.dim_IntList", weighed(g, v, weight), g->groups);
    sum = koila__emit_scalar(g->c, "aten::div.Tensor", sum, -n, g->groups);
    return koila__emit_binary(g->c, "aten::mul.Tensor", to_channels(g, sum, g->channels), scale,
                              g->channels);
}

static void group_norm_gx(const grouped *g, const group_gradient *t)
{
    koila__case *c = g->c;
    const char *mul = "aten::mul.Tensor";
    const koila_value rstd2 = koila__emit_binary(c, mul, t->rstd, t->rstd, g->channels);
    const koila_value rstd3 = koila__emit_binary(c, mul, rstd2, t->rstd, g->channels);
    const koila_value slope = share_of_group(g, t->ds, t->weight, rstd3);
    const koila_value shift = share_of_group(g, t->db, t->weight, t->rstd);
    const koila_value rest = addcmul(g, beside(g, shift), t->off, beside(g, slope), g->wide);
    const koila_meta out = g->type == g->x->dtype ? c->sig->outputs[0] : g->wide;
    give(c, 0, addcmul(g, rest, t->dy, beside(g, weighed(g, t->rstd, t->weight)), out));
}

/* (grad, x, mean, rstd, weight?, ...) */
static bool group_norm_backward_rows(koila__case *c)
{
    grouped g;
    const int64_t samples = 0;
    int64_t dims[KOILA_MAX_DIMS];
    if (c->n_out != 3 || !koila__is_r(c->in[2]) || !koila__is_r(c->in[3]) ||
        !grouped_init(&g, c, 1, 8))
        return false;
    for (uint32_t d = 2; d < g.x->n_dims; d++)
        dims[d - 2] = d;
    group_gradient t = { .dy = widened(&g, 0), .weight = widened(&g, koila__input_at(c, 4)) };
    const koila_value centre = beside(&g, to_channels(&g, widened(&g, 2), g.channels));
    t.rstd = to_channels(&g, widened(&g, 3), g.channels);
    t.off = koila__emit_binary(c, "aten::sub.Tensor", widened(&g, 1), centre, g.wide);
    const koila_value product = koila__emit_binary(c, "aten::mul.Tensor", t.dy, t.off, g.wide);
    const char *sum = "aten::sum.dim_IntList";
    t.ds = koila__emit_whole(c, reduced(&g, sum, product, dims, g.x->n_dims - 2u, g.channels));
    t.db = koila__emit_whole(c, reduced(&g, sum, t.dy, dims, g.x->n_dims - 2u, g.channels));
    if (c->out_meta[0])
        group_norm_gx(&g, &t);
    for (uint32_t j = 1; j < 3; j++) {
        const int64_t size[1] = { g.n_channels };
        const koila_value v = j == 1 ? weighed(&g, t.ds, t.rstd) : t.db;
        const koila_meta out = koila__emit_meta(c, g.x, g.type, 1, size);
        if (c->out_meta[j])
            give(c, j, reduced(&g, sum, v, &samples, 1, out));
    }
    return all_replaced(c);
}

/* (grad, x, mean, rstd, weight?, N, C, HxW, groups, mask) -> gx, gw, gb */
bool koila__rule_group_norm_backward(koila__case *c)
{
    const uint32_t lead = koila__lead_among(c, 4);
    if (koila__any_p(c) || c->n_in < 4 || lead == KOILA_NONE || c->in[lead].dim == 1)
        return false;
    if (c->in[lead].dim > 1)
        return group_norm_backward_rows(c);
    return koila__need_rows(c, 4, c->in[lead]) && koila__out_rows_and_sums(c, c->in[lead]) &&
           koila__fix_add(c, KOILA__FIX_EXTENT, 5, KOILA__FIX_OF_INPUT + lead);
}

/* ---- softmax: rows are along `dim`. Along the batch: maximum and sum are partial, the rest is
 * pointwise. */

typedef struct along { /* the calls of a rewrite along dimension d, in the accumulate type */
    koila__case *c;
    int64_t d;
    koila_dtype acc;
    koila_meta full, one; /* of x; of x with size 1 along d */
} along;

static bool along_init(along *a, koila__case *c, uint32_t x, uint32_t d)
{
    const koila_meta_info *m = c->in_meta[x];
    int64_t size[KOILA_MAX_DIMS];
    if (!c->may_emit || !koila__dtype_is_float(m->dtype))
        return false;
    *a = (along){ .c = c, .d = d, .acc = koila__accumulate_type(c->out_meta[0]->dtype) };
    for (uint32_t k = 0; k < m->n_dims; k++)
        size[k] = k == d ? 1 : m->size[k];
    a->full = koila__emit_meta_like(c, m, a->acc);
    a->one = koila__emit_meta(c, m, a->acc, m->n_dims, size);
    return a->full != KOILA_NONE && a->one != KOILA_NONE;
}

static koila_value reduce_along(const along *a, const char *op, koila_value x)
{
    koila__call k;
    koila__emit_begin(a->c, &k, op, 0);
    koila__emit_value(&k, x);
    koila__emit_ints(&k, &a->d, 1);
    koila__emit_bool(&k, true);
    return koila__emit_end(&k, a->one);
}

static bool replace(koila__case *c, koila_value v) /* result 0, in its recorded dtype and layout */
{
    const koila_meta_info *m = koila__emit_meta_of(c, v);
    if (!m)
        return false;
    c->replaced[0] =
        m->dtype == c->out_meta[0]->dtype ? v : koila__emit_cast_as(c, v, c->sig->outputs[0]);
    if (c->replaced[0] == KOILA_NONE)
        return false;
    return koila__emit_meta_id(c, c->replaced[0]) == c->sig->outputs[0];
}

/* The dimensions the softmax is not over stay sliced; over the batch: rewritten. */
static bool softmax_rows(koila__case *c, uint32_t *dim)
{
    if (koila__any_p(c) || c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, dim))
        return false;
    if (*dim != c->in[0].dim)
        c->out[0] = c->in[0];
    return true;
}

/* _softmax(x, dim, half_to_float) = exp(x - max) / sum(exp(x - max)); _log_softmax: its logarithm
 */
static bool softmax(koila__case *c, bool is_log)
{
    uint32_t d;
    along a;
    if (!softmax_rows(c, &d))
        return false;
    if (d != c->in[0].dim)
        return true;
    if (!along_init(&a, c, 0, d))
        return false;
    const koila_value x = koila__emit_cast(c, c->in_value[0], a.acc);
    const koila_value shifted =
        koila__emit_binary(c, "aten::sub.Tensor", x, reduce_along(&a, "aten::amax", x), a.full);
    const koila_value e = koila__emit_unary(c, "aten::exp", shifted, a.full);
    const koila_value sum = reduce_along(&a, "aten::sum.dim_IntList", e);
    const koila_meta out = a.acc == c->out_meta[0]->dtype ? c->sig->outputs[0] : a.full;
    if (!is_log)
        return replace(c, koila__emit_binary(c, "aten::div.Tensor", e, sum, out));
    const koila_value log = koila__emit_unary(c, "aten::log", sum, a.one);
    return replace(c, koila__emit_binary(c, "aten::sub.Tensor", shifted, log, out));
}
bool koila__rule_softmax(koila__case *c) { return softmax(c, false); }
bool koila__rule_log_softmax(koila__case *c) { return softmax(c, true); }

/* _safe_softmax(x, dim, dtype?): rows that are all -inf give 0, which the formula above does not */
bool koila__rule_safe_softmax(koila__case *c)
{
    uint32_t d;
    return softmax_rows(c, &d) && d != c->in[0].dim;
}

/* _softmax_backward_data(grad, output, dim, dtype) = output * (grad - sum(grad * output));
 * _log_softmax: grad - exp(output) * sum(grad) */
static bool softmax_backward(koila__case *c, bool is_log)
{
    uint32_t d;
    along a;
    const uint32_t lead = koila__lead(c);
    if (c->n_in != 2 || !koila__arg_dim(c, 2, 0, c->in_meta[0]->n_dims, &d))
        return false;
    if (koila__any_p(c)) { /* linear in grad */
        if (!koila__is_sum(c->in[0]) || !koila__is_r(c->in[1]))
            return false;
        c->out[0] = c->in[0];
        return true;
    }
    if (lead == KOILA_NONE)
        return false;
    if (c->in[lead].dim != d) {
        if (!koila__need(c, 0, c->in[lead]) || !koila__need(c, 1, c->in[lead]))
            return false;
        c->out[0] = c->in[lead];
        return true;
    }
    if (!along_init(&a, c, 1, d))
        return false;
    const koila_value grad = koila__emit_cast(c, c->in_value[0], a.acc);
    const koila_value y = koila__emit_cast(c, c->in_value[1], a.acc);
    const koila_meta out = a.acc == c->out_meta[0]->dtype ? c->sig->outputs[0] : a.full;
    if (!is_log) {
        const koila_value weighed = koila__emit_binary(c, "aten::mul.Tensor", grad, y, a.full);
        const koila_value sum = reduce_along(&a, "aten::sum.dim_IntList", weighed);
        const koila_value rest = koila__emit_binary(c, "aten::sub.Tensor", grad, sum, a.full);
        return replace(c, koila__emit_binary(c, "aten::mul.Tensor", y, rest, out));
    }
    const koila_value sum = reduce_along(&a, "aten::sum.dim_IntList", grad);
    const koila_value p = koila__emit_unary(c, "aten::exp", y, a.full);
    const koila_value share = koila__emit_binary(c, "aten::mul.Tensor", p, sum, a.full);
    return replace(c, koila__emit_binary(c, "aten::sub.Tensor", grad, share, out));
}
bool koila__rule_softmax_backward(koila__case *c) { return softmax_backward(c, false); }
bool koila__rule_log_softmax_backward(koila__case *c) { return softmax_backward(c, true); }
