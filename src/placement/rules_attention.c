/* rules_attention.c — fused attention: batch and heads are independent, and so are the queries.
 *
 * q, k and v are [B, H, L, E], k and v of another L perhaps. Three cuts:
 *   batch or heads   every operand is cut alike, and so is every result
 *   queries (L)      q, the output and its gradient are cut; k and v are whole, and their gradients
 *                    are partial sums
 *   a causal mask    lets row i see the keys up to i, and kernels count i from the first query they
 *                    are given. So a slice needs the number of its first row: the call becomes
 *                    koila::query_rows (pseudo.def), which has it as an argument. So does a kernel
 *                    that pads its logsumexp to a length of its own.
 * k and v cut alone, with whole queries, are gathered. */
#include "placement/rewrite.h"

/* All q, k, v (and in backward grad, out, logsumexp) share dims 0 (batch) and 1 (heads); attn_mask
 * is broadcast to [B, H, L, S]. */
static bool heads(koila__case *c, uint32_t n_same, uint32_t mask)
{
    const uint32_t lead = koila__lead_among(c, n_same);
    if (koila__any_p(c) || lead == KOILA_NONE || c->in[lead].dim > 1 || c->in_meta[0]->n_dims != 4)
        return false;
    const koila_placement p = c->in[lead];
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (i == mask)
            koila__need_aligned(c, i, p, 4);
        else if (i < n_same) {
            if (!koila__need(c, i, p))
                return false;
        } else
            return false;
    }
    return true;
}

static uint32_t mask_input(const koila__case *c, uint32_t n_before)
{
    const koila_arg *m = koila__kw(c, "attn_mask");
    return m && m->kind == KOILA_ARG_TENSOR ? n_before : KOILA_NONE;
}

/* ---- queries cut, keys and values whole */

/* The kernels of koila::query_rows, by number. That of cuDNN has a logsumexp of its own shape, and
 * is gathered. */
typedef enum query_kernel { FLASH_CPU, FLASH, EFFICIENT, CUDNN } query_kernel;

/* A call whose queries are cut: its inputs, or KOILA_NONE. In forward there is no grad, out and
 * sums. */
typedef struct query_call {
    query_kernel kernel;
    uint32_t grad, q, k, v, bias, out, sums;
    bool is_causal;
} query_call;

/* Are the queries cut? k and v may be, but are not alone. */
static bool cuts_queries(const koila__case *c, const query_call *x)
{
    const koila_placement q = c->in[x->q];
    return koila__is_s(q) && q.dim == 2 && c->in_meta[x->q]->n_dims == 4;
}

static bool is_unread(const koila__case *c, uint32_t i) { return i < 32 && ((c->unread >> i) & 1); }

/* The operands that have a row for each query are cut like q, a bias as far as it has one, and all
 * else is whole. */
static bool need_queries(koila__case *c, const query_call *x)
{
    const koila_placement p = c->in[x->q];
    for (uint32_t i = 0; i < c->n_in; i++)
        if (!is_unread(c, i))
            koila__need_r(c, i);
    if (x->bias != KOILA_NONE)
        koila__need_aligned(c, x->bias, p, 4);
    const uint32_t cut[] = { x->grad, x->q, x->out, x->sums };
    for (uint32_t k = 0; k < KOILA_COUNT(cut); k++)
        if (cut[k] != KOILA_NONE && !koila__need(c, cut[k], p))
            return false;
    return true;
}

/* That of a bias is a sum over more than the queries. */
static bool gives_query_gradients(const koila__case *c)
{
    for (uint32_t j = 3; j < c->n_out; j++)
        if (c->out_meta[j])
            return false;
    return c->n_out >= 3 && c->out_meta[0] && c->out_meta[1] && c->out_meta[2];
}

/* Gradient of q, and the shares of all queries in those of k and v. */
static bool query_gradients(koila__case *c, koila_placement q)
{
    c->out[0] = q;
    c->out[1] = koila__p(c, KOILA_SUM);
    c->out[2] = koila__p(c, KOILA_SUM);
    return true;
}

static void emit_scale(koila__case *c, koila__call *k)
{
    const koila_arg *scale = koila__kw(c, "scale");
    if (scale && scale->kind == KOILA_ARG_FLOAT)
        koila__emit_float(k, scale->u.f);
    else
        koila__emit_none(k);
}

/* The same call as koila::query_rows or its backward: all results, in their places. */
static bool emit_queries(koila__case *c, const query_call *x)
{
    koila__call k;
    if (!c->may_emit || c->in[x->q].outer != 1 || (x->is_causal && x->bias != KOILA_NONE))
        return false;
    const bool is_backward = x->grad != KOILA_NONE;
    koila__emit_begin(c, &k, is_backward ? "koila::query_rows_backward" : "koila::query_rows", 0);
    if (is_backward)
        koila__emit_value(&k, c->in_value[x->grad]);
    koila__emit_value(&k, c->in_value[x->q]);
    koila__emit_value(&k, c->in_value[x->k]);
    koila__emit_value(&k, c->in_value[x->v]);
    koila__emit_optional(&k, x->bias);
    if (is_backward) {
        koila__emit_value(&k, c->in_value[x->out]);
        koila__emit_value(&k, c->in_value[x->sums]);
    }
    koila__emit_int(&k, 0); /* the first query: FIRST_QUERY */
    koila__emit_int(&k, x->kernel);
    koila__emit_bool(&k, x->is_causal);
    emit_scale(c, &k);
    if (!is_backward)
        koila__emit_bool(&k, c->out_meta[1] && c->out_meta[1]->n_elements);
    return koila__emit_end_n(&k, c->n_out, c->sig->outputs, c->replaced);
}

/* The CPU's kernel takes any queries, if no mask counts them. */
static bool runs_on_slices(const query_call *x) { return x->kernel == FLASH_CPU && !x->is_causal; }

/* Results out and logsumexp, and perhaps a state that nobody reads. */
static bool queries(koila__case *c, const query_call *x)
{
    const koila_placement p = c->in[x->q];
    if (koila__any_p(c) || x->kernel == CUDNN)
        return false;
    for (uint32_t j = 0; j < 2; j++)
        if (c->out_meta[j] && c->out_meta[j]->n_elements && !koila__fits(c, p, c->out_meta[j]))
            return false;
    return runs_on_slices(x) ? need_queries(c, x) && koila__out_all(c, p) : emit_queries(c, x);
}

static bool queries_backward(koila__case *c, const query_call *x)
{
    if (x->kernel == CUDNN || !gives_query_gradients(c))
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (koila__is_p(c->in[i]) && !is_unread(c, i))
            return false;
    return runs_on_slices(x) ? need_queries(c, x) && query_gradients(c, c->in[x->q])
                             : emit_queries(c, x);
}

/* The position of the first query's number among the arguments. */
enum { FIRST_QUERY = 4, FIRST_QUERY_BACKWARD = 7 };

/* query_rows(q, k, v, bias?, first, kernel, is_causal, scale?, with_sums) -> out, sums, ... */
bool koila__rule_query_rows(koila__case *c)
{
    const query_call x = { .grad = KOILA_NONE,
                           .q = 0,
                           .out = KOILA_NONE,
                           .sums = KOILA_NONE,
                           .bias = koila__input_at(c, 3) };
    const koila_placement p = c->in[0];
    if (koila__any_p(c) || !cuts_queries(c, &x) || p.outer != 1 || !need_queries(c, &x))
        return false;
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j])
            c->out[j] = j < 2 && c->out_meta[j]->n_elements ? p : koila__p(c, KOILA_SUM);
    return koila__fix_add(c, KOILA__FIX_FIRST, FIRST_QUERY, KOILA__FIX_OF_INPUT);
}

/* query_rows_backward(grad, q, k, v, bias?, out, sums, first, kernel, is_causal, scale?) -> gq, gk,
 * gv */
bool koila__rule_query_rows_backward(koila__case *c)
{
    const query_call x = { .grad = 0,
                           .q = 1,
                           .bias = koila__input_at(c, 4),
                           .out = koila__input_at(c, 5),
                           .sums = koila__input_at(c, 6) };
    return !koila__any_p(c) && cuts_queries(c, &x) && c->in[1].outer == 1 &&
           gives_query_gradients(c) && need_queries(c, &x) && query_gradients(c, c->in[1]) &&
           koila__fix_add(c, KOILA__FIX_FIRST, FIRST_QUERY_BACKWARD, KOILA__FIX_OF_INPUT + 1);
}

/* ---- kernels of the CPU */

/* _scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, *, attn_mask, scale)
 * -> out[B, H, L, E], logsumexp[B, H, L] */
bool koila__rule_flash_cpu(koila__case *c)
{
    double dropout;
    query_call x = { FLASH_CPU, KOILA_NONE, 0, 1, 2, mask_input(c, 3), KOILA_NONE, KOILA_NONE, 0 };
    if (c->n_in < 3 || c->n_out != 2 || !koila__arg_number(c, 3, 0, &dropout) || dropout != 0 ||
        !koila__arg_bool(c, 4, false, &x.is_causal))
        return false;
    if (cuts_queries(c, &x))
        return queries(c, &x);
    return heads(c, 3, x.bias) && koila__out_all(c, c->in[koila__lead_among(c, 3)]);
}

/* ..._backward(grad, q, k, v, out, logsumexp, dropout_p, is_causal, *, attn_mask, scale) -> gq, gk,
 * gv */
bool koila__rule_flash_cpu_backward(koila__case *c)
{
    double dropout;
    query_call x = { FLASH_CPU, 0, 1, 2, 3, mask_input(c, 6), 4, 5, false };
    if (c->n_in < 6 || c->n_out != 3 || !koila__arg_number(c, 6, 0, &dropout) || dropout != 0 ||
        !koila__arg_bool(c, 7, false, &x.is_causal))
        return false;
    if (cuts_queries(c, &x))
        return queries_backward(c, &x);
    return heads(c, 6, x.bias) && koila__out_all(c, c->in[koila__lead_among(c, 6)]);
}

/* ---- kernels of CUDA */

/* Without dropout the random state they return is never read: it is a P
 * that is never combined, and stays in its loop. */
static void rest_unread(koila__case *c, uint32_t first)
{
    for (uint32_t j = first; j < c->n_out; j++)
        if (c->out_meta[j])
            c->out[j] = koila__p(c, KOILA_SUM);
}

static bool unread(koila__case *c, uint32_t pos)
{
    const uint32_t i = koila__input_at(c, pos);
    if (i == KOILA_NONE)
        return koila__is_absent(c, pos);
    if (i >= 32)
        return false;
    c->need[i] = koila__is_r(c->in[i]) ? koila__r() : c->in[i];
    c->unread |= 1u << i;
    return true;
}

/* _scaled_dot_product_efficient_attention(q, k, v, attn_bias?, compute_lse, dropout_p, is_causal)
 * -> out, lse[B, H, L], seed, offset _scaled_dot_product_cudnn_attention(the same,
 * return_debug_mask), _scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, ...).
 * is_causal follows dropout_p. */
static bool attention(koila__case *c, query_kernel kernel, uint32_t pos_bias, uint32_t pos_dropout)
{
    double dropout;
    query_call x = { kernel, KOILA_NONE, 0, 1, 2, KOILA_NONE, KOILA_NONE, KOILA_NONE, false };
    if (pos_bias)
        x.bias = koila__input_at(c, pos_bias);
    if (!koila__arg_number(c, pos_dropout, 0, &dropout) || dropout != 0 || c->n_out < 2 ||
        c->n_in != 3u + (x.bias != KOILA_NONE) ||
        !koila__arg_bool(c, pos_dropout + 1, false, &x.is_causal))
        return false;
    if (cuts_queries(c, &x))
        return queries(c, &x);
    if (!heads(c, 3, x.bias))
        return false;
    const koila_placement p = c->in[koila__lead_among(c, 3)];
    for (uint32_t j = 0; j < 2; j++) {
        if (!c->out_meta[j])
            continue;
        c->out[j] = p;
        if (!koila__fits(c, p, c->out_meta[j])) {
            if (c->out_meta[j]->n_elements)
                return false;
            c->out[j] = koila__p(c, KOILA_SUM);
        }
    }
    rest_unread(c, 2);
    return true;
}
bool koila__rule_efficient_attention(koila__case *c) { return attention(c, EFFICIENT, 3, 5); }
bool koila__rule_cudnn_attention(koila__case *c) { return attention(c, CUDNN, 3, 5); }
bool koila__rule_flash_attention(koila__case *c) { return attention(c, FLASH, 0, 3); }

/* The largest S input among those that are read, except the bias; KOILA_NONE when there is none, or
 * one is P. */
static uint32_t lead_of_read(const koila__case *c, uint32_t bias)
{
    uint32_t lead = KOILA_NONE;
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (is_unread(c, i))
            continue;
        if (koila__is_p(c->in[i]))
            return KOILA_NONE;
        if (i != bias && koila__is_s(c->in[i]) &&
            (lead == KOILA_NONE || c->in_meta[i]->n_elements > c->in_meta[lead]->n_elements))
            lead = i;
    }
    return lead;
}

/* Inputs that share batch and heads are those of 4 dims and the logsumexp; the bias is broadcast;
 * the state is not read. */
static bool heads_backward(koila__case *c, uint32_t bias)
{
    const uint32_t lead = lead_of_read(c, bias);
    if (lead == KOILA_NONE || c->in[lead].dim > 1 || c->in_meta[0]->n_dims != 4)
        return false;
    const koila_placement p = c->in[lead];
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (is_unread(c, i))
            continue;
        if (i == bias)
            koila__need_aligned(c, i, p, 4);
        else if (!koila__need(c, i, p))
            return false;
    }
    for (uint32_t j = 0; j < c->n_out; j++) {
        if (!c->out_meta[j])
            continue;
        c->out[j] = p;
        /* gradient of a whole bias */
        if (j >= 3 && c->need[bias == KOILA_NONE ? 0 : bias].kind != KOILA_S)
            c->out[j] = koila__p(c, KOILA_SUM);
    }
    return true;
}

/* The arguments of a backward, whose first four are grad, q, k and v. */
typedef struct backward_form {
    query_kernel kernel;
    uint32_t bias, out, sums, dropout, is_causal; /* positions; no bias: 0 */
    uint32_t n_state, state[4];                   /* not read without dropout */
} backward_form;

static bool attention_backward(koila__case *c, const backward_form *f)
{
    double dropout;
    query_call x = { f->kernel, 0, 1, 2, 3, KOILA_NONE, 0, 0, false };
    if (f->bias)
        x.bias = koila__input_at(c, f->bias);
    x.out = koila__input_at(c, f->out);
    x.sums = koila__input_at(c, f->sums);
    if (!koila__arg_number(c, f->dropout, 0, &dropout) || dropout != 0 || c->n_in < 6 ||
        !koila__arg_bool(c, f->is_causal, false, &x.is_causal))
        return false;
    for (uint32_t k = 0; k < f->n_state; k++)
        if (!unread(c, f->state[k]))
            return false;
    return cuts_queries(c, &x) ? queries_backward(c, &x) : heads_backward(c, x.bias);
}
bool koila__rule_efficient_attention_backward(koila__case *c)
{ /* (grad, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal) */
    static const backward_form form = { EFFICIENT, 4, 5, 6, 9, 11, 2, { 7, 8 } };
    return attention_backward(c, &form);
}
bool koila__rule_flash_attention_backward(koila__case *c)
/* (grad, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset)
 */
{
    static const backward_form form = { FLASH, 0, 4, 5, 10, 11, 4, { 6, 7, 12, 13 } };
    return attention_backward(c, &form);
}
bool koila__rule_cudnn_attention_backward(koila__case *c)
/* (grad, q, k, v, out, lse, seed, offset, bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
 * is_causal) */
{
    static const backward_form form = { CUDNN, 8, 4, 5, 13, 14, 4, { 6, 7, 9, 10 } };
    return attention_backward(c, &form);
}

/* koila::dropout_attention(q, k, v, bias?, draws, ...) -> out, sums; its backward(grad, q, k, v,
 * bias?, out, sums, draws, ...) -> gq, gk, gv. `draws` says of each row of the batch where its
 * random numbers begin; only those of the first row of a slice are read, so a slice must be of rows
 * that follow each other. */
static bool dropout_attention(koila__case *c, uint32_t pos_bias)
{
    const uint32_t bias = koila__input_at(c, pos_bias);
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || lead == KOILA_NONE || c->in[lead].dim != 0 || c->in[lead].outer != 1)
        return false;
    const koila_placement p = c->in[lead];
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (i == bias)
            koila__need_aligned(c, i, p, 4);
        else if (!koila__need(c, i, p))
            return false;
    }
    return koila__out_all(c, p);
}
bool koila__rule_dropout_attention(koila__case *c) { return dropout_attention(c, 3); }
bool koila__rule_dropout_attention_backward(koila__case *c) { return dropout_attention(c, 4); }
