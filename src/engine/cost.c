/* cost.c — what a node costs, roughly: bytes read and written plus multiply-adds of dense kernels
 * (units in plan_costs.h). */
#include "engine/cost.h"
#include "engine/plan_costs.h"
#include "graph/table.h"

/* name, which formula */
typedef enum dense_kind {
    DENSE_NONE,
    DENSE_CONTRACT,
    DENSE_CONV,
    DENSE_CONV_BACKWARD,
    DENSE_ATTENTION,
    DENSE_ATTENTION_BACKWARD,
    DENSE_RNN,
    DENSE_POOL
} dense_kind;
static const struct {
    const char *name;
    dense_kind kind;
} dense_ops[] = {
    /* sorted */
    { "aten::_scaled_dot_product_efficient_attention", DENSE_ATTENTION },
    { "aten::_scaled_dot_product_efficient_attention_backward", DENSE_ATTENTION_BACKWARD },
    { "aten::_scaled_dot_product_flash_attention", DENSE_ATTENTION },
    { "aten::_scaled_dot_product_flash_attention_backward", DENSE_ATTENTION_BACKWARD },
    { "aten::_scaled_dot_product_flash_attention_for_cpu", DENSE_ATTENTION },
    { "aten::_scaled_dot_product_flash_attention_for_cpu_backward", DENSE_ATTENTION_BACKWARD },
    { "aten::addmm", DENSE_CONTRACT },
    { "aten::baddbmm", DENSE_CONTRACT },
    { "aten::bmm", DENSE_CONTRACT },
    { "aten::convolution", DENSE_CONV },
    { "aten::convolution_backward", DENSE_CONV_BACKWARD },
    { "aten::linear", DENSE_CONTRACT },
    { "aten::max_pool2d_with_indices", DENSE_POOL },
    { "aten::max_pool3d_with_indices", DENSE_POOL },
    { "aten::mkldnn_rnn_layer", DENSE_RNN },
    { "aten::mkldnn_rnn_layer_backward", DENSE_RNN },
    { "aten::mm", DENSE_CONTRACT },
    { "aten::mv", DENSE_CONTRACT },
};

static dense_kind dense_kind_of(const char *name)
{
    for (size_t low = 0, high = KOILA_COUNT(dense_ops); low < high;) {
        const size_t middle = (low + high) / 2;
        const int order = strcmp(name, dense_ops[middle].name);
        if (order == 0)
            return dense_ops[middle].kind;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return DENSE_NONE;
}

static double multiply_adds(const koila_table *t, const koila_sig_info *s)
{
    const dense_kind kind = dense_kind_of(koila_op_name(t, s->op));
    if (kind == DENSE_NONE || (s->n_inputs < 2 && kind != DENSE_POOL))
        return 0;
    const koila_meta_info *in[3] = { 0 };
    for (uint32_t i = 0; i < 3 && i < s->n_inputs; i++)
        in[i] = koila__meta(t, s->inputs[i]);
    const koila_meta_info *out =
        s->n_outputs && s->outputs[0] != KOILA_NONE ? koila__meta(t, s->outputs[0]) : NULL;
    switch (kind) {
    /* out elements times the contracted extent: the last dimension of the left operand */
    case DENSE_CONTRACT: {
        const bool has_bias = strstr(koila_op_name(t, s->op), "add") != NULL && s->n_inputs > 2;
        const koila_meta_info *a = has_bias ? in[1] : in[0];
        return out && a->n_dims ? (double)out->n_elements * (double)a->size[a->n_dims - 1] : 0;
    }
    case DENSE_CONV: /* every output element meets one filter: weight elements / output channels */
        return out && in[1]->n_dims && in[1]->size[0]
                   ? (double)out->n_elements * (double)in[1]->n_elements / (double)in[1]->size[0]
                   : 0;
    case DENSE_CONV_BACKWARD: /* grad_output, input, weight: two products of the forward's size */
        return in[2] && in[2]->n_dims && in[2]->size[0]
                   ? 2.0 * (double)in[0]->n_elements * (double)in[2]->n_elements /
                         (double)in[2]->size[0]
                   : 0;
    case DENSE_POOL: { /* every output element looks at its window, one comparison after another */
        double window = 1;
        const koila_arg *list = s->n_pos > 1 ? &s->tokens[s->start[1]] : NULL;
        for (uint32_t i = 0; list && list->kind == KOILA_ARG_LIST && i < list->n; i++)
            window *= (double)list[1 + i].u.i;
        return out ? (double)out->n_elements * window * KOILA_COST_MULTIPLY_ADDS_PER_COMPARISON : 0;
    }
    case DENSE_ATTENTION: /* q k^T and p v */
        return in[0]->n_dims == 4 && in[1]->n_dims == 4
                   ? 2.0 * (double)in[0]->n_elements * (double)in[1]->size[2]
                   : 0;
    case DENSE_ATTENTION_BACKWARD: /* five products */
        return in[0]->n_dims == 4 && in[2] && in[2]->n_dims == 4
                   ? 5.0 * (double)in[0]->n_elements * (double)in[2]->size[2]
                   : 0;
    /* each step's rows meet all weights: (elements of the input / features) * weight elements */
    case DENSE_RNN: {
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
    return (koila__cost){ n_bytes + dense,
                          dense > KOILA_COST_EXPENSIVE_RATIO * n_bytes ||
                              (dense > 0 && strstr(koila_op_name(t, s->op), "conv")) };
}
