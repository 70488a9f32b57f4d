/* rules_matmul.c — products: rows of the result are independent, a contracted batch is a partial
 * sum (a weight gradient), and each product is linear in each factor. */
#include "placement/rules.h"

/* One factor of a product. */
typedef struct operand {
    uint32_t i;          /* input */
    uint32_t contracted; /* its dimension that is summed over */
    uint32_t kept;       /* its dimension that stays; KOILA_NONE for a vector */
    uint32_t result;     /* where `kept` goes; KOILA_NONE when there is none (a vector) */
} operand;

/* The product of a and b; dimensions below n_shared are a batch of matrices, shared by a, b and the
 * result. True with *out set. */
static bool product(koila__case *c, operand a, operand b, uint32_t n_shared, koila_placement *out)
{
    const koila_placement pa = c->in[a.i];
    const koila_placement pb = c->in[b.i];
    if (koila__is_p(pa) || koila__is_p(pb)) {
        if (!(koila__is_sum(pa) && koila__is_r(pb)) && !(koila__is_sum(pb) && koila__is_r(pa)))
            return false;
        *out = koila__p(c, KOILA_SUM);
        return true;
    }
    if (!koila__is_s(pa) && !koila__is_s(pb))
        return false;
    const bool a_leads = koila__is_s(pa) && (!koila__is_s(pb) || c->in_meta[a.i]->n_elements >=
                                                                     c->in_meta[b.i]->n_elements);
    const operand x = a_leads ? a : b;
    const operand y = a_leads ? b : a;
    const koila_placement p = c->in[x.i];
    /* a batch of products */
    if (p.dim < n_shared && p.dim != x.contracted && (x.kept == KOILA_NONE || p.dim != x.kept)) {
        *out = p;
        return koila__need(c, y.i, p);
    }
    if (p.dim == x.contracted) {
        *out = koila__p(c, KOILA_SUM);
        return koila__need(c, y.i, koila__moved(p, y.contracted));
    }
    if (x.result == KOILA_NONE)
        return false;
    koila__need_r(c, y.i); /* the other factor whole: a barrier if it is sharded some other way */
    *out = koila__moved(p, x.result);
    return true;
}

bool koila__rule_mm(koila__case *c)
{
    return c->n_in == 2 &&
           product(c, (operand){ 0, 1, 0, 0 }, (operand){ 1, 0, 1, 1 }, 0, &c->out[0]);
}

bool koila__rule_bmm(koila__case *c)
{
    return c->n_in == 2 &&
           product(c, (operand){ 0, 2, 1, 1 }, (operand){ 1, 1, 2, 2 }, 1, &c->out[0]);
}

bool koila__rule_mv(koila__case *c)
{
    return c->n_in == 2 && product(c, (operand){ 0, 1, 0, 0 },
                                   (operand){ 1, 0, KOILA_NONE, KOILA_NONE }, 0, &c->out[0]);
}

bool koila__rule_dot(koila__case *c)
{
    return c->n_in == 2 && product(c, (operand){ 0, 0, KOILA_NONE, KOILA_NONE },
                                   (operand){ 1, 0, KOILA_NONE, KOILA_NONE }, 0, &c->out[0]);
}

/* beta * self + alpha * (a @ b): self is broadcast to the result. Added once, so into a partial sum
 * only when it is one, or zeros. */
static bool with_bias(koila__case *c, operand a, operand b, uint32_t n_shared)
{
    if (c->n_in != 3 || !product(c, a, b, n_shared, &c->out[0]))
        return false;
    if (c->out[0].kind == KOILA_P) {
        c->need[0] = c->out[0];
        c->accumulates = true;
        return koila__is_sum(c->in[0]) || c->zero[0];
    }
    if (koila__is_p(c->in[0]))
        return false;
    koila__need_aligned(c, 0, c->out[0], c->out_meta[0]->n_dims);
    return true;
}

bool koila__rule_addmm(koila__case *c)
{
    return with_bias(c, (operand){ 1, 1, 0, 0 }, (operand){ 2, 0, 1, 1 }, 0);
}
bool koila__rule_baddbmm(koila__case *c)
{
    return with_bias(c, (operand){ 1, 2, 1, 1 }, (operand){ 2, 1, 2, 2 }, 1);
}
bool koila__rule_addmv(koila__case *c)
{
    return with_bias(c, (operand){ 1, 1, 0, 0 }, (operand){ 2, 0, KOILA_NONE, KOILA_NONE }, 0);
}

/* linear(x[..., k], w[m, k], b[m]?): whole in inference mode. Leading dimensions are rows. */
bool koila__rule_linear_layer(koila__case *c)
{
    const koila_placement x = c->in[0];
    if (koila__any_p(c) || !koila__is_s(x) || x.dim + 1 >= c->in_meta[0]->n_dims)
        return false;
    for (uint32_t i = 1; i < c->n_in; i++)
        koila__need_r(c, i);
    c->out[0] = x;
    return true;
}

/* Where the n_common dimensions of a trilinear are in input i, KOILA_NONE for one that it is
 * expanded along (the list at position 3 + i). */
static bool trilinear_dims(const koila__case *c, uint32_t i, uint32_t *n_common, uint32_t *dim_of)
{
    const koila_arg *e = koila__arg(c, 3 + i);
    uint32_t expand, n;
    uint32_t d = 0;
    if (!e || e->kind != KOILA_ARG_LIST)
        return false;
    const uint32_t total = c->in_meta[i]->n_dims + e->n;
    if (total > KOILA_MAX_DIMS || (i && total != *n_common) ||
        !koila__arg_dims(c, 3 + i, total, &expand, NULL, &n))
        return false;
    *n_common = total;
    for (uint32_t k = 0; k < total; k++) {
        const bool is_expanded = (expand >> k) & 1;
        dim_of[k] = is_expanded ? KOILA_NONE : d++;
    }
    return d == c->in_meta[i]->n_dims;
}

/* _trilinear(i1, i2, i3, expand1, expand2, expand3, sumdim): all three are unsqueezed at their
 * expand dims to common ones, multiplied, and summed over sumdim */
bool koila__rule_trilinear(koila__case *c)
{
    uint32_t dim_of[3][KOILA_MAX_DIMS];
    uint32_t sum, n;
    uint32_t common = KOILA_NONE;
    uint32_t n_common = 0;
    if (c->n_in != 3 || koila__any_p(c))
        return false;
    const uint32_t lead = koila__lead(c);
    for (uint32_t i = 0; i < 3; i++)
        if (!trilinear_dims(c, i, &n_common, dim_of[i]))
            return false;
    if (lead == KOILA_NONE || !koila__arg_dims(c, 6, n_common, &sum, NULL, &n))
        return false;
    for (uint32_t k = 0; k < n_common; k++)
        if (dim_of[lead][k] == c->in[lead].dim)
            common = k;
    for (uint32_t i = 0; i < 3; i++) {
        if (dim_of[i][common] == KOILA_NONE)
            koila__need_r(c, i);
        else if (!koila__need(c, i, koila__moved(c->in[lead], dim_of[i][common])))
            return false;
    }
    if ((sum >> common) & 1) {
        c->out[0] = koila__p(c, KOILA_SUM);
        return true;
    }
    uint32_t d = common;
    for (uint32_t k = 0; k < common; k++)
        d -= (sum >> k) & 1;
    c->out[0] = koila__moved(c->in[lead], d);
    return true;
}
