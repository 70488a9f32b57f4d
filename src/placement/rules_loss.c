/* rules_loss.c — losses that reduce inside. The graph is recorded at full size, so 1/N uses the
 * whole N; a slice must not use its own.
 *
 *   reduction none   row by row
 *   reduction sum    a partial sum
 *   reduction mean   the call on the slice, times b / batch: a partial sum (plain means), or, where
 *                    the denominator depends on the data (nll_loss: weights and ignore_index),
 *                    rewritten as sum / total weight, and the total weight from targets and class
 *                    weights only, so that a first cheap loop can make it whole before the real
 *                    one. */
#include "placement/rewrite.h"

enum { NONE = 0, MEAN = 1, SUM = 2 };

/* loss(input, target, ..., reduction at pos): all arguments before the reduction are broadcast
 * against each other */
static bool pointwise_loss(koila__case *c, uint32_t pos)
{
    int64_t reduction;
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || lead == KOILA_NONE || !koila__arg_int(c, pos, MEAN, &reduction))
        return false;
    uint32_t n_dims = 0;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (c->in_meta[i]->n_dims > n_dims)
            n_dims = c->in_meta[i]->n_dims;
    const koila_placement p =
        koila__moved(c->in[lead], c->in[lead].dim + n_dims - c->in_meta[lead]->n_dims);
    bool grows = false; /* a size-1 batch broadcast to more: the result does not follow it */
    for (uint32_t i = 0; i < c->n_in; i++) {
        const koila_meta_info *m = c->in_meta[i];
        const uint32_t missing = n_dims - m->n_dims;
        if (p.dim >= missing &&
            m->size[p.dim - missing] != c->in_meta[lead]->size[c->in[lead].dim] &&
            m->size[p.dim - missing] != 1)
            grows = true;
        koila__need_aligned(c, i, p, n_dims);
    }
    if (grows)
        return false;
    if (reduction == NONE) {
        c->out[0] = p;
        return koila__fits(c, p, c->out_meta[0]);
    }
    c->out[0] = koila__p(c, KOILA_SUM);
    return reduction == SUM || (reduction == MEAN && koila__fix_add(c, KOILA__FIX_SCALE, 0, 0));
}
/* mse_loss, smooth_l1_loss, huber_loss, soft_margin_loss (x, y, reduction, ...) */
bool koila__rule_loss2(koila__case *c) { return pointwise_loss(c, 2); }
/* binary_cross_entropy (x, y, weight, reduction) */
bool koila__rule_loss3(koila__case *c) { return pointwise_loss(c, 3); }
/* binary_cross_entropy_with_logits (x, y, weight, pos_weight, reduction) */
bool koila__rule_loss4(koila__case *c) { return pointwise_loss(c, 4); }

/* loss_backward(grad, input, target, ..., reduction at pos): with mean the operator divides by the
 * slice's own N; the factor b / batch makes that the whole N */
static bool pointwise_loss_backward(koila__case *c, uint32_t pos)
{
    int64_t reduction;
    koila_placement p;
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || lead == KOILA_NONE || !koila__arg_int(c, pos, MEAN, &reduction) ||
        !c->out_meta[0])
        return false;
    const uint32_t n_dims = c->out_meta[0]->n_dims;
    if (c->in_meta[lead]->n_dims > n_dims)
        return false;
    p = koila__moved(c->in[lead], c->in[lead].dim + n_dims - c->in_meta[lead]->n_dims);
    if (!koila__fits(c, p, c->out_meta[0]) || n_dims != c->in_meta[1]->n_dims)
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        koila__need_aligned(c, i, p, n_dims);
    c->out[0] = p;
    return reduction != MEAN || koila__fix_add(c, KOILA__FIX_SCALE, 0, 0);
}
/* (grad, x, y, reduction, ...) */
bool koila__rule_loss3_backward(koila__case *c) { return pointwise_loss_backward(c, 3); }
/* (grad, x, y, weight, reduction) */
bool koila__rule_loss4_backward(koila__case *c) { return pointwise_loss_backward(c, 4); }

/* ---- nll_loss_forward(x[N, C, ...], target[N, ...], weight?, reduction, ignore_index) -> loss,
 * total_weight */

/* sum over the targets of weight[target], ignored ones 0: from targets and class weights alone */
static koila_value total_weight(koila__case *c, koila_value target, uint32_t weight, int64_t ignore,
                                koila_dtype dtype)
{
    const koila_meta_info *t = c->in_meta[1];
    const koila_meta seen_meta = koila__emit_meta(c, t, KOILA_DTYPE_BOOL, t->n_dims, t->size);
    koila__call k;
    koila__emit_begin(c, &k, "aten::ne.Scalar", 0);
    koila__emit_value(&k, target);
    koila__emit_int(&k, ignore);
    koila_value w = koila__emit_end(&k, seen_meta);
    if (weight != KOILA_NONE) {
        const koila_value index = koila__emit_binary(
            c, "aten::mul.Tensor", target, w, koila__emit_meta(c, t, t->dtype, t->n_dims, t->size));
        const koila_meta taken_meta =
            koila__emit_meta(c, t, c->in_meta[weight]->dtype, t->n_dims, t->size);
        const koila_value taken =
            koila__emit_binary(c, "aten::take", c->in_value[weight], index, taken_meta);
        w = koila__emit_binary(c, "aten::mul.Tensor", taken, w, taken_meta);
    }
    koila__emit_begin(c, &k, "aten::sum", 0);
    koila__emit_value(&k, w);
    koila__emit_kw(&k, "dtype");
    koila__emit_dtype(&k, dtype);
    return koila__emit_end(&k, koila__emit_meta(c, t, dtype, 0, NULL));
}

/* The classes are sliced: x[N, C] is S along C, as for the logits of a contrastive loss, which is
 * taken along both dimensions. Each slice has some classes of every row, so the targets are needed
 * whole, and a row's loss is found in the slice that has its class: a partial sum.
 *
 * The value is true where x's class is not its row's target, or the row is ignored. It is FREE, so
 * that it is never made whole. */
static koila_value not_target(koila__case *c, uint32_t x, koila_value target, int64_t ignore)
{
    const koila_meta_info *m = c->in_meta[x];
    const koila_meta_info *t = koila__emit_meta_of(c, target);
    const int64_t n = m->size[0];
    const int64_t n_classes = m->size[1];
    const int64_t column[2] = { n, 1 };
    const int64_t row[2] = { 1, n_classes };
    const int64_t full[2] = { n, n_classes };
    const int64_t list[2] = { n_classes, 1 };
    if (!t)
        return KOILA_NONE;
    const koila_meta ints = koila__emit_meta(c, t, t->dtype, 1, &n);
    const koila_meta classes = koila__emit_meta(c, t, t->dtype, 1, &n_classes);
    koila__call k;
    koila__emit_begin(c, &k, "aten::ne.Scalar", 0);
    koila__emit_value(&k, target);
    koila__emit_int(&k, ignore);
    const koila_value seen = koila__emit_end(&k, koila__emit_meta(c, t, KOILA_DTYPE_BOOL, 1, &n));
    koila__emit_begin(c, &k, "aten::new_ones", 0);
    koila__emit_value(&k, target);
    koila__emit_ints(&k, &n_classes, 1);
    const koila_value ones = koila__emit_end(&k, classes);
    koila__emit_begin(c, &k, "aten::cumsum", 0);
    koila__emit_value(&k, ones);
    koila__emit_int(&k, 0);
    /* 1 .. C, so that an ignored row's 0 is no class */
    const koila_value number = koila__emit_end(&k, classes);
    /* looked up, so that a target out of range raises, as in the operator */
    koila__emit_begin(c, &k, "aten::embedding", 0);
    koila__emit_value(&k, koila__emit_view(c, number, 2, list));
    koila__emit_value(&k, koila__emit_binary(c, "aten::mul.Tensor", target, seen, ints));
    const koila_meta column_meta = koila__emit_meta(c, t, t->dtype, 2, column);
    const koila_value found = koila__emit_end(&k, column_meta);
    const koila_value mine = koila__emit_binary(c, "aten::mul.Tensor", found,
                                                koila__emit_view(c, seen, 2, column), column_meta);
    const koila_value across = koila__emit_expand(c, koila__emit_view(c, number, 2, row), 2, full);
    return koila__emit_binary(c, "aten::ne.Tensor", across, mine,
                              koila__emit_meta(c, t, KOILA_DTYPE_BOOL, 2, full));
}

/* v where the class is the row's target, 0 elsewhere */
static koila_value where_target(koila__case *c, koila_value v, koila_value elsewhere,
                                koila_meta out)
{
    koila__call k;
    koila__emit_begin(c, &k, "aten::masked_fill.Scalar", 0);
    koila__emit_value(&k, v);
    koila__emit_value(&k, elsewhere);
    koila__emit_int(&k, 0);
    return koila__emit_end(&k, out);
}

/* v times the weights of the classes */
static koila_value by_class(koila__case *c, koila_value v, uint32_t weight, koila_dtype type,
                            koila_meta out)
{
    if (weight == KOILA_NONE)
        return v;
    const int64_t row[2] = { 1, c->in_meta[weight]->size[0] };
    return koila__emit_binary(
        c, "aten::mul.Tensor", v,
        koila__emit_view(c, koila__emit_cast(c, c->in_value[weight], type), 2, row), out);
}

static bool is_whole_or_absent(const koila__case *c, uint32_t input)
{
    return input == KOILA_NONE || koila__is_r(c->in[input]);
}

static bool by_rows_of_classes(const koila__case *c, uint32_t x, uint32_t target, uint32_t weight)
{
    return c->may_emit && koila__is_s(c->in[x]) && c->in[x].dim == 1 &&
           c->in_meta[x]->n_dims == 2 && c->in_meta[target]->n_dims == 1 &&
           c->in_meta[target]->dtype == KOILA_DTYPE_I64 &&
           koila__dtype_is_float(c->in_meta[x]->dtype) && is_whole_or_absent(c, weight);
}

static bool nll_loss_of_classes(koila__case *c, uint32_t weight, int64_t reduction, int64_t ignore)
{
    const koila_meta_info *x = c->in_meta[0];
    const koila_dtype type = c->out_meta[0]->dtype;
    const koila_dtype acc = koila__accumulate_type(type);
    const koila_meta full = koila__emit_meta(c, x, acc, 2, x->size);
    const koila_meta scalar = koila__emit_meta(c, x, acc, 0, NULL);
    const koila_value target = koila__emit_whole(c, c->in_value[1]);
    const koila_value tw = total_weight(c, target, weight, ignore, acc);
    const koila_value elsewhere = not_target(c, 0, target, ignore);
    const koila_value x_acc = koila__emit_cast(c, c->in_value[0], acc);
    const koila_value picked = where_target(c, x_acc, elsewhere, full);
    const koila_value weighed = by_class(c, picked, weight, acc, full);
    const koila_value losses = koila__emit_unary(c, "aten::neg", weighed, full);
    koila__call k;
    koila__emit_begin(c, &k, reduction == NONE ? "aten::sum.dim_IntList" : "aten::sum", 0);
    koila__emit_value(&k, losses);
    if (reduction == NONE)
        koila__emit_ints(&k, &(int64_t){ 1 }, 1);
    koila_value loss =
        koila__emit_end(&k, reduction == NONE ? koila__emit_meta(c, x, acc, 1, x->size) : scalar);
    if (reduction == MEAN)
        loss = koila__emit_binary(c, "aten::div.Tensor", loss, tw, scalar);
    c->replaced[0] = koila__emit_cast(c, loss, type);
    c->replaced[1] = koila__emit_cast(
        c, reduction == NONE ? koila__emit_scalar(c, "aten::mul.Scalar", tw, 0, scalar) : tw,
        c->out_meta[1]->dtype);
    return c->replaced[0] != KOILA_NONE && c->replaced[1] != KOILA_NONE;
}

/* The mean: the sum over the rows, divided by the total weight of the targets. */
static bool nll_loss_mean(koila__case *c, uint32_t weight, int64_t ignore)
{
    const koila_dtype type = c->out_meta[0]->dtype;
    /* a sum of halves overflows where their mean does not */
    const koila_dtype acc = koila__accumulate_type(type);
    const koila_meta scalar = koila__emit_meta(c, c->in_meta[0], acc, 0, NULL);
    const koila_value tw = total_weight(c, c->in_value[1], weight, ignore, acc);
    const koila_meta out[2] = { scalar, scalar };
    koila_value sum[2];
    koila__call k;
    koila__emit_begin(c, &k, koila_op_name(c->table, c->sig->op), 0);
    koila__emit_value(&k, koila__emit_cast(c, c->in_value[0], acc));
    koila__emit_value(&k, c->in_value[1]);
    if (weight == KOILA_NONE)
        koila__emit_none(&k);
    else
        koila__emit_value(&k, koila__emit_cast(c, c->in_value[weight], acc));
    koila__emit_int(&k, SUM);
    koila__emit_int(&k, ignore);
    if (!koila__emit_end_n(&k, 2, out, sum))
        return false;
    const koila_value loss = koila__emit_binary(c, "aten::div.Tensor", sum[0], tw, scalar);
    c->replaced[0] = koila__emit_cast(c, loss, type);
    c->replaced[1] = koila__emit_cast(c, tw, c->out_meta[1]->dtype);
    return c->replaced[0] != KOILA_NONE && c->replaced[1] != KOILA_NONE;
}

/* Converts the S of targets [N, ...] to that of scores x[N, C, ...]: the classes are dimension 1 of
 * x. */
static koila_placement of_scores(koila_placement targets)
{
    return koila__moved(targets, targets.dim + (targets.dim >= 1));
}
static koila_placement of_targets(koila_placement scores)
{
    return koila__moved(scores, scores.dim - (scores.dim > 1));
}

static bool are_scores_and_targets(const koila_meta_info *x, const koila_meta_info *t)
{
    return t->n_dims > 0 && t->n_dims + 1u == x->n_dims;
}

/* Places the results when rows are not averaged. */
static bool nll_loss_results(koila__case *c, int64_t reduction, koila_placement targets)
{
    c->out[0] = reduction == NONE ? targets : koila__p(c, KOILA_SUM);
    c->out[1] = koila__p(c, KOILA_SUM); /* without reduction every slice gives 0: the sum is 0 */
    if (reduction == NONE)
        return c->out_meta[1]->n_elements <= 1 && koila__fits(c, targets, c->out_meta[0]);
    return reduction == SUM;
}

bool koila__rule_nll_loss(koila__case *c)
{
    int64_t reduction, ignore;
    const uint32_t weight = koila__input_at(c, 2);
    const uint32_t lead = koila__lead_among(c, 2); /* x or the targets; the weights are whole */
    if (koila__any_p(c) || c->n_out != 2 || c->n_in < 2 || !c->out_meta[0] || !c->out_meta[1])
        return false;
    if (!koila__arg_int(c, 3, MEAN, &reduction) || !koila__arg_int(c, 4, -100, &ignore))
        return false;
    if (!are_scores_and_targets(c->in_meta[0], c->in_meta[1]) || lead == KOILA_NONE ||
        !is_whole_or_absent(c, weight))
        return false;
    const koila_placement px = lead == 0 ? c->in[0] : of_scores(c->in[1]);
    const koila_placement pt = of_targets(px);
    if (lead == 0 && px.dim == 1)
        return by_rows_of_classes(c, 0, 1, weight) &&
               nll_loss_of_classes(c, weight, reduction, ignore);
    if (!koila__need(c, 0, px) || !koila__need(c, 1, pt))
        return false;
    return nll_loss_results(c, reduction, pt) ||
           (reduction == MEAN && c->may_emit && nll_loss_mean(c, weight, ignore));
}

/* The gradient is -grad * weight / total weight at the class of the target, and 0 elsewhere.
 * Nothing of x is read, so it is FREE, and sliced as x is. */
static bool nll_loss_backward_of_classes(koila__case *c, uint32_t weight, int64_t reduction)
{
    int64_t ignore;
    const koila_meta_info *x = c->in_meta[1];
    const koila_dtype type = c->out_meta[0]->dtype;
    const koila_dtype acc = koila__accumulate_type(type);
    const int64_t column[2] = { reduction == NONE ? x->size[0] : 1, 1 };
    if (!koila__arg_int(c, 5, -100, &ignore) || koila__is_s(c->in[0]))
        return false;
    const koila_meta full = koila__emit_meta(c, x, acc, 2, x->size);
    const koila_meta one = koila__emit_meta(c, x, acc, c->in_meta[0]->n_dims, c->in_meta[0]->size);
    koila_value scale =
        koila__emit_unary(c, "aten::neg", koila__emit_cast(c, c->in_value[0], acc), one);
    if (reduction == MEAN)
        scale =
            koila__emit_binary(c, "aten::div.Tensor", scale,
                               koila__emit_cast(c, c->in_value[koila__input_at(c, 6)], acc), one);
    scale = koila__emit_expand(c, koila__emit_view(c, scale, 2, column), 2, x->size);
    const koila_value target = koila__emit_whole(c, c->in_value[2]);
    const koila_value at = where_target(c, scale, not_target(c, 1, target, ignore), full);
    const koila_value gx = koila__emit_cast(c, by_class(c, at, weight, acc, full), type);
    c->replaced[0] = koila__emit_sliced(c, gx, c->in[1]);
    return c->replaced[0] != KOILA_NONE &&
           koila__emit_meta_id(c, c->replaced[0]) == c->sig->outputs[0];
}

/* Some input other than `except` is P. */
static bool reads_p(const koila__case *c, uint32_t except)
{
    for (uint32_t i = 0; i < c->n_in; i++)
        if (i != except && koila__is_p(c->in[i]))
            return true;
    return false;
}

/* The total weight is read for a mean only: else that of the slice will do. */
static void need_total(koila__case *c, uint32_t total, int64_t reduction)
{
    const bool is_local = reduction != MEAN && total < 32 && koila__is_p(c->in[total]);
    if (!is_local) {
        koila__need_r(c, total);
        return;
    }
    c->need[total] = c->in[total];
    c->unread |= 1u << total;
}

/* nll_loss_backward(grad, x, target, weight?, reduction, ignore_index, total_weight) -> gx: with
 * the whole total weight, where it reads that, it works on a slice */
bool koila__rule_nll_loss_backward(koila__case *c)
{
    int64_t reduction;
    const uint32_t weight = koila__input_at(c, 3);
    const uint32_t total = koila__input_at(c, 6);
    const uint32_t lead = koila__lead(c);
    if (total == KOILA_NONE || !koila__arg_int(c, 4, MEAN, &reduction) ||
        !are_scores_and_targets(c->in_meta[1], c->in_meta[2]))
        return false;
    if (reads_p(c, reduction == MEAN ? KOILA_NONE : total)) /* read for a mean only */
        return false;
    if (lead == 1 && c->in[1].dim == 1)
        return by_rows_of_classes(c, 1, 2, weight) &&
               nll_loss_backward_of_classes(c, weight, reduction);
    const bool leads = lead == 1 || lead == 2 || (lead == 0 && reduction == NONE);
    if (!leads)
        return false;
    const koila_placement px = lead == 1 ? c->in[1] : of_scores(c->in[lead]);
    const koila_placement pt = of_targets(px);
    if (!koila__need(c, 1, px) || !koila__need(c, 2, pt))
        return false;
    if (reduction != NONE)
        koila__need_r(c, 0);
    else if (!koila__need(c, 0, pt))
        return false;
    if (weight != KOILA_NONE)
        koila__need_r(c, weight);
    need_total(c, total, reduction);
    c->out[0] = px;
    return koila__fits(c, px, c->out_meta[0]);
}

/* ---- losses over the classes of one sample: input [N, C], target [N] or [N, C], mean over N */

static bool row_loss(koila__case *c, uint32_t n_rows, uint32_t pos)
{
    int64_t reduction;
    const uint32_t lead = koila__lead_among(c, n_rows);
    if (koila__any_p(c) || lead == KOILA_NONE || c->in[lead].dim != 0 ||
        c->in_meta[0]->n_dims != 2 || !koila__arg_int(c, pos, MEAN, &reduction))
        return false;
    if (!koila__need_rows(c, n_rows, c->in[lead]))
        return false;
    /* further results (is_target) have a row per sample */
    for (uint32_t j = 0; j < c->n_out; j++) {
        if (!c->out_meta[j])
            continue;
        c->out[j] = j == 0 && reduction != NONE ? koila__p(c, KOILA_SUM) : c->in[lead];
    }
    return reduction != MEAN || koila__fix_add(c, KOILA__FIX_SCALE, 0, 0);
}
/* (x, target, p, margin, weight?, reduction) */
bool koila__rule_multi_margin(koila__case *c) { return row_loss(c, 2, 5); }
/* (x, target, reduction) -> loss, is_target */
bool koila__rule_multilabel_margin(koila__case *c) { return row_loss(c, 2, 2); }

/* (grad, x, target, ..., reduction, is_target?): grad is one number unless there is no reduction */
static bool row_loss_backward(koila__case *c, uint32_t pos, uint32_t is_target)
{
    int64_t reduction;
    uint32_t lead = KOILA_NONE;
    if (koila__any_p(c) || !koila__arg_int(c, pos, MEAN, &reduction) || c->in_meta[1]->n_dims != 2)
        return false;
    for (uint32_t i = 0; i < 3; i++)
        if (koila__is_s(c->in[i]) && (i > 0 || reduction == NONE))
            lead = i;
    if (lead == KOILA_NONE || c->in[lead].dim != 0)
        return false;
    for (uint32_t i = 0; i < c->n_in; i++) {
        const bool is_row = i == 1 || i == 2 || i == is_target || (i == 0 && reduction == NONE);
        if (!is_row)
            koila__need_r(c, i);
        else if (!koila__need(c, i, c->in[lead]))
            return false;
    }
    c->out[0] = c->in[lead];
    return reduction != MEAN || koila__fix_add(c, KOILA__FIX_SCALE, 0, 0);
}
bool koila__rule_multi_margin_backward(koila__case *c)
{
    return row_loss_backward(c, 6, KOILA_NONE);
}
bool koila__rule_multilabel_margin_backward(koila__case *c) { return row_loss_backward(c, 3, 3); }

/* ---- CTC, see python/koila/_ctc.py: rows are independent */

/* The samples that both operators are given, from position `at` on: log_probs[T, B, C], targets
 * [B, S] or [N], input_lengths[B], target_lengths[B], begins?[B]. *row: of what has one number, or
 * one row, for each. */
static bool ctc_samples(koila__case *c, uint32_t at, koila_placement *row)
{
    const uint32_t scores = koila__input_at(c, at), targets = koila__input_at(c, at + 1);
    if (scores == KOILA_NONE || targets == KOILA_NONE || koila__any_p(c))
        return false;
    const koila_placement p = c->in[scores];
    if (!koila__is_s(p) || koila__is_opaque(p) || p.dim != 1 || !koila__need(c, scores, p))
        return false;
    *row = koila__moved(p, 0);
    if (c->in_meta[targets]->n_dims == 1)
        koila__need_r(c, targets);
    else if (!koila__need(c, targets, *row))
        return false;
    for (uint32_t pos = at + 2; pos < at + 5; pos++) {
        const uint32_t i = koila__input_at(c, pos);
        if (i == KOILA_NONE ? !koila__is_absent(c, pos) : !koila__need(c, i, *row))
            return false;
    }
    return true;
}

/* ctc_loss(samples, ...) -> losses[B], the table of forward sums */
bool koila__rule_ctc_loss(koila__case *c)
{
    if (c->n_out != 2 || !c->out_meta[0] || !c->out_meta[1] || !ctc_samples(c, 0, &c->out[0]))
        return false;
    c->out[1] = koila__opaque(c);
    return koila__fits(c, c->out[0], c->out_meta[0]);
}

/* ctc_loss_backward(grad[B], samples, losses[B], table, ...) -> the gradient of log_probs */
bool koila__rule_ctc_loss_backward(koila__case *c)
{
    const uint32_t losses = koila__input_at(c, 6), table = koila__input_at(c, 7);
    koila_placement row;
    if (losses == KOILA_NONE || table == KOILA_NONE || !koila__is_opaque(c->in[table]) ||
        !ctc_samples(c, 1, &row) || !koila__need(c, 0, row) || !koila__need(c, losses, row))
        return false;
    c->out[0] = koila__moved(row, 1);
    return koila__fits(c, c->out[0], c->out_meta[0]);
}
