/* rules_seq.c — attention and recurrent layers: batch and heads are independent. */
#include "rules.h"

/* All q, k, v (and in backward grad, out, logsumexp) share dims 0 (batch) and 1 (heads); attn_mask is broadcast to [B, H, L, S]. */
static bool heads(koila__case *c, uint32_t n_same, uint32_t mask)
{
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || lead == KOILA_NONE || lead >= n_same || c->in[lead].dim > 1 || c->in_meta[0]->n_dims != 4) return false;
    const koila_placement p = c->in[lead];
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (i == mask) koila__need_aligned(c, i, p, 4);
        else if (i < n_same) {
            if (!koila__need(c, i, p)) return false;
        } else return false;
    }
    if (mask != KOILA_NONE && koila__is_s(c->in[mask]) && c->need[mask].kind == KOILA_R) return false;
    return true;
}

static uint32_t mask_input(const koila__case *c, uint32_t n_before)
{
    const koila_arg *m = koila__kw(c, "attn_mask");
    return m && m->kind == KOILA_ARG_TENSOR ? n_before : KOILA_NONE;
}

/* _scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, *, attn_mask, scale) -> out[B, H, L, E], logsumexp */
bool koila__rule_flash_cpu(koila__case *c)
{
    double dropout;
    if (c->n_in < 3 || c->n_out != 2 || !koila__arg_number(c, 3, 0, &dropout) || dropout != 0) return false;
    return heads(c, 3, mask_input(c, 3)) && koila__out_all(c, c->in[koila__lead(c)]);
}

/* ..._backward(grad, q, k, v, out, logsumexp, dropout_p, is_causal, *, attn_mask, scale) -> gq, gk, gv */
bool koila__rule_flash_cpu_backward(koila__case *c)
{
    double dropout;
    if (c->n_in < 6 || c->n_out != 3 || !koila__arg_number(c, 6, 0, &dropout) || dropout != 0) return false;
    return heads(c, 6, mask_input(c, 6)) && koila__out_all(c, c->in[koila__lead(c)]);
}
