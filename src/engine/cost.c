/* cost.c — what a node costs, roughly: bytes read and written plus multiply-adds of dense kernels
 * (units in plan_costs.h). */
#include "engine/cost.h"
#include "engine/plan_costs.h"
#include "graph/table.h"

static double elements(const koila_meta_info *m) { return (double)m->n_elements; }

/* Every element of the result adds up products along the last dimension of the left operand. */
static double contraction(const koila_meta_info *out, const koila_meta_info *left)
{
    return out && left->n_dims ? elements(out) * (double)left->size[left->n_dims - 1] : 0;
}

/* Every element of the result meets one filter: elements of the weight / output channels. */
static double convolution(const koila_meta_info *out, const koila_meta_info *weight)
{
    if (!out || !weight->n_dims || !weight->size[0])
        return 0;
    return elements(out) * elements(weight) / (double)weight->size[0];
}

/* Two products of the forward's size. */
static double convolution_backward(const koila_meta_info *grad, const koila_meta_info *weight)
{
    if (!weight || !weight->n_dims || !weight->size[0])
        return 0;
    return 2.0 * elements(grad) * elements(weight) / (double)weight->size[0];
}

/* Every element of the result compares the elements of its window, one by one. */
static double pooling(const koila_sig_info *s, const koila_meta_info *out)
{
    const koila_arg *list = s->n_pos > 1 ? &s->tokens[s->start[1]] : NULL;
    double window = 1;
    if (!out)
        return 0;
    for (uint32_t i = 0; list && list->kind == KOILA_ARG_LIST && i < list->n; i++)
        window *= (double)list[1 + i].u.i;
    return elements(out) * window * KOILA_COST_MULTIPLY_ADDS_PER_COMPARISON;
}

/* n_products of query and keys, both [batch, heads, length, features]. */
static double attention(double n_products, const koila_meta_info *query,
                        const koila_meta_info *keys)
{
    if (query->n_dims != 4 || !keys || keys->n_dims != 4)
        return 0;
    return n_products * elements(query) * (double)keys->size[2];
}

/* The rows of each step meet all weights: (elements of the input / features) * elements of the
 * weights, which are the inputs of two dimensions. */
static double recurrence(const koila_table *t, const koila_sig_info *s, const koila_meta_info *in)
{
    double weights = 0;
    if (!in->n_dims || !in->size[in->n_dims - 1])
        return 0;
    for (uint32_t i = 1; i < s->n_inputs; i++)
        if (koila__meta(t, s->inputs[i])->n_dims == 2)
            weights += elements(koila__meta(t, s->inputs[i]));
    return weights * elements(in) / (double)in->size[in->n_dims - 1];
}

static double multiply_adds(const koila_table *t, const koila_sig_info *s)
{
    const uint32_t kind = koila_facts_dense(koila__facts_of_op(t, s->op));
    const koila_meta_info *in[3] = { 0 };
    const koila_meta_info *out = NULL;
    if (kind == 0 || (s->n_inputs < 2 && kind != KOILA_FACT_DENSE_POOL))
        return 0;
    for (uint32_t i = 0; i < KOILA_COUNT(in) && i < s->n_inputs; i++)
        in[i] = koila__meta(t, s->inputs[i]);
    if (s->n_outputs && s->outputs[0] != KOILA_NONE)
        out = koila__meta(t, s->outputs[0]);
    switch (kind) {
    case KOILA_FACT_DENSE_CONTRACT:
        return contraction(out, in[0]);
    case KOILA_FACT_DENSE_CONTRACT_BIASED:
        return contraction(out, in[2] ? in[1] : in[0]);
    case KOILA_FACT_DENSE_CONV:
        return convolution(out, in[1]);
    case KOILA_FACT_DENSE_CONV_BACKWARD: /* grad_output, input, weight */
        return convolution_backward(in[0], in[2]);
    case KOILA_FACT_DENSE_POOL:
        return pooling(s, out);
    case KOILA_FACT_DENSE_ATTENTION: /* query, key, value */
        return attention(2, in[0], in[1]);
    case KOILA_FACT_DENSE_ATTENTION_BACKWARD: /* grad_output, query, key */
        return attention(5, in[0], in[2]);
    case KOILA_FACT_DENSE_RNN:
    case KOILA_FACT_DENSE_RNN_BACKWARD:
        return recurrence(t, s, in[0]);
    default:
        return 0;
    }
}

/* Of a call that does nothing but draw, as many as its result has elements. */
static double draws(const koila_table *t, const koila_sig_info *s)
{
    const bool is_drawn = koila__flags_of_op(t, s->op) & KOILA_OP_RANDOM && s->n_inputs < 2;
    const koila_meta out = s->n_outputs ? s->outputs[0] : KOILA_NONE;
    return is_drawn && out != KOILA_NONE ? elements(koila__meta(t, out)) : 0;
}

/* A copy to host memory or back. */
static double offload(const koila_table *t, const koila_sig_info *s)
{
    const double there = (double)koila__meta(t, s->inputs[0])->n_bytes;
    const double back = (double)koila__meta(t, s->outputs[0])->n_bytes;
    return koila__offload_work(there > back ? there : back, s->tokens[s->start[1]].u.f);
}

koila__cost koila__cost_of(const koila_table *t, const koila_sig_info *s)
{
    if (koila__flags_of_op(t, s->op) & KOILA_OP_VIEW)
        return (koila__cost){ 0, false };
    if (koila__facts_of_op(t, s->op) & KOILA_FACT_OFFLOADS)
        return (koila__cost){ offload(t, s), false };
    double n_bytes = 0;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        n_bytes += (double)koila__meta(t, s->inputs[i])->n_bytes;
    for (uint32_t i = 0; i < s->n_outputs; i++)
        if (s->outputs[i] != KOILA_NONE)
            n_bytes += (double)koila__meta(t, s->outputs[i])->n_bytes;
    const double dense = multiply_adds(t, s) * KOILA_COST_BYTES_PER_MULTIPLY_ADD;
    const uint32_t kind = koila_facts_dense(koila__facts_of_op(t, s->op));
    const bool is_conv = kind == KOILA_FACT_DENSE_CONV || kind == KOILA_FACT_DENSE_CONV_BACKWARD;
    const double drawn =
        draws(t, s) * KOILA_COST_MULTIPLY_ADDS_PER_DRAW * KOILA_COST_BYTES_PER_MULTIPLY_ADD;
    return (koila__cost){ n_bytes + dense + drawn,
                          dense > KOILA_COST_EXPENSIVE_RATIO * n_bytes || (dense > 0 && is_conv) };
}
