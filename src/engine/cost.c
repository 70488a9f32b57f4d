/* cost.c — what a node costs, roughly: bytes read and written plus multiply-adds of dense kernels
 * (units in plan_costs.h). */
#include "engine/cost.h"
#include "engine/plan_costs.h"
#include "graph/table.h"

static double multiply_adds(const koila_table *t, const koila_sig_info *s)
{
    const uint32_t kind = koila_facts_dense(koila_op_facts(t, s->op));
    if (kind == 0 || (s->n_inputs < 2 && kind != KOILA_FACT_DENSE_POOL))
        return 0;
    const koila_meta_info *in[3] = { 0 };
    for (uint32_t i = 0; i < 3 && i < s->n_inputs; i++)
        in[i] = koila__meta(t, s->inputs[i]);
    const koila_meta_info *out =
        s->n_outputs && s->outputs[0] != KOILA_NONE ? koila__meta(t, s->outputs[0]) : NULL;
    switch (kind) {
    /* out elements times the contracted extent: the last dimension of the left operand */
    case KOILA_FACT_DENSE_CONTRACT:
    case KOILA_FACT_DENSE_CONTRACT_BIASED: {
        const bool has_bias = kind == KOILA_FACT_DENSE_CONTRACT_BIASED && s->n_inputs > 2;
        const koila_meta_info *a = has_bias ? in[1] : in[0];
        return out && a->n_dims ? (double)out->n_elements * (double)a->size[a->n_dims - 1] : 0;
    }
    case KOILA_FACT_DENSE_CONV: /* every output element meets one filter: weight elements / output channels */
        return out && in[1]->n_dims && in[1]->size[0]
                   ? (double)out->n_elements * (double)in[1]->n_elements / (double)in[1]->size[0]
                   : 0;
    case KOILA_FACT_DENSE_CONV_BACKWARD: /* grad_output, input, weight: two products of the forward's size */
        return in[2] && in[2]->n_dims && in[2]->size[0]
                   ? 2.0 * (double)in[0]->n_elements * (double)in[2]->n_elements /
                         (double)in[2]->size[0]
                   : 0;
    case KOILA_FACT_DENSE_POOL: { /* every output element looks at its window, one comparison after another */
        double window = 1;
        const koila_arg *list = s->n_pos > 1 ? &s->tokens[s->start[1]] : NULL;
        for (uint32_t i = 0; list && list->kind == KOILA_ARG_LIST && i < list->n; i++)
            window *= (double)list[1 + i].u.i;
        return out ? (double)out->n_elements * window * KOILA_COST_MULTIPLY_ADDS_PER_COMPARISON : 0;
    }
    case KOILA_FACT_DENSE_ATTENTION: /* q k^T and p v */
        return in[0]->n_dims == 4 && in[1]->n_dims == 4
                   ? 2.0 * (double)in[0]->n_elements * (double)in[1]->size[2]
                   : 0;
    case KOILA_FACT_DENSE_ATTENTION_BACKWARD: /* five products */
        return in[0]->n_dims == 4 && in[2] && in[2]->n_dims == 4
                   ? 5.0 * (double)in[0]->n_elements * (double)in[2]->size[2]
                   : 0;
    /* each step's rows meet all weights: (elements of the input / features) * weight elements */
    case KOILA_FACT_DENSE_RNN:
    case KOILA_FACT_DENSE_RNN_BACKWARD: {
        double weights = 0;
        for (uint32_t i = 1; i < s->n_inputs; i++)
            weights += koila__meta(t, s->inputs[i])->n_dims == 2
                           ? (double)koila__meta(t, s->inputs[i])->n_elements
                           : 0;
        return in[0]->n_dims && in[0]->size[in[0]->n_dims - 1]
                   ? weights * (double)in[0]->n_elements / (double)in[0]->size[in[0]->n_dims - 1]
                   : 0;
    }
    default:
        return 0;
    }
}

koila__cost koila__cost_of(const koila_table *t, const koila_sig_info *s)
{
    if (koila_op_flags(t, s->op) & KOILA_OP_VIEW)
        return (koila__cost){ 0, false };
    double n_bytes = 0;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        n_bytes += (double)koila__meta(t, s->inputs[i])->n_bytes;
    for (uint32_t i = 0; i < s->n_outputs; i++)
        if (s->outputs[i] != KOILA_NONE)
            n_bytes += (double)koila__meta(t, s->outputs[i])->n_bytes;
    const double dense = multiply_adds(t, s) * KOILA_COST_BYTES_PER_MULTIPLY_ADD;
    const uint32_t kind = koila_facts_dense(koila_op_facts(t, s->op));
    const bool is_conv = kind == KOILA_FACT_DENSE_CONV || kind == KOILA_FACT_DENSE_CONV_BACKWARD;
    return (koila__cost){ n_bytes + dense,
                          dense > KOILA_COST_EXPENSIVE_RATIO * n_bytes || (dense > 0 && is_conv) };
}
