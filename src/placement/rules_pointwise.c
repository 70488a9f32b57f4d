/* rules_pointwise.c — element by element, with broadcasting: rows are independent, so S follows the
 * aligned dimension.
 *
 * Partial sums go through what is linear in them: f(p1) + f(p2) == f(p1 + p2). mul and div by whole
 * values, add and sub of two P, casts that lose nothing, the gradient argument of derivatives. P +
 * R is not linear, and P beside S is refused: the running partial means nothing to a row. */
#include "placement/rules.h"

/* The S of the result, if it must be S: that of the largest S input, aligned from the right, or the
 * wanted one. */
static bool lead_of(const koila__case *c, uint32_t n_dims, koila_placement *p)
{
    const uint32_t lead = koila__lead(c);
    if (lead == KOILA_NONE) {
        if (!c->want || c->want->kind != KOILA_S)
            return false;
        *p = *c->want;
        return true;
    }
    if (c->in_meta[lead]->n_dims > n_dims)
        return false;
    *p = koila__moved(c->in[lead], c->in[lead].dim + n_dims - c->in_meta[lead]->n_dims);
    return true;
}

bool koila__rule_pointwise(koila__case *c)
{
    koila_placement p;
    if (koila__any_p(c) || c->n_out == 0 || !c->out_meta[0])
        return false;
    const uint32_t n_dims = c->out_meta[0]->n_dims;
    if (!lead_of(c, n_dims, &p) || !koila__out_all(c, p))
        return false;
    for (uint32_t j = 1; j < c->n_out; j++)
        if (c->out_meta[j] && c->out_meta[j]->n_elements && c->out_meta[j]->n_dims != n_dims)
            return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        koila__need_aligned(c, i, p, n_dims);
    return true;
}

static bool one_p(const koila__case *c, uint32_t i) /* input i is a partial sum, all others whole */
{
    for (uint32_t k = 0; k < c->n_in; k++)
        if (k == i ? !koila__is_sum(c->in[k]) : !koila__is_r(c->in[k]))
            return false;
    return i < c->n_in;
}

static bool keeps_p(koila__case *c)
{
    for (uint32_t i = 0; i < c->n_in; i++)
        c->need[i] = koila__is_p(c->in[i]) ? c->in[i] : koila__r();
    return koila__out_all(c, koila__p(c, KOILA_SUM));
}

/* The call is linear in input 0, which stays P. Every other input is whole, by a barrier if it is P
 * too (the denominator of a mean). */
static bool keeps_first_p(koila__case *c)
{
    if (c->n_in == 0 || !koila__is_sum(c->in[0]))
        return false;
    for (uint32_t i = 1; i < c->n_in; i++) {
        if (koila__is_s(c->in[i]))
            return false;
        koila__need_r(c, i);
    }
    return koila__out_all(c, koila__p(c, KOILA_SUM));
}

bool koila__rule_linear(koila__case *c)
{
    if (!koila__any_p(c))
        return koila__rule_pointwise(c);
    return keeps_first_p(c);
}

/* clone, detach-like copies: any combination passes */
bool koila__rule_same(koila__case *c)
{
    if (!koila__any_p(c))
        return koila__rule_pointwise(c);
    return c->n_in == 1 && koila__out_all(c, c->in[0]);
}

/* add(a, b, alpha): P + P -> P; zeros are P too. The other operand must be a tensor: P + 1 adds 1
 * in every slice. */
bool koila__rule_additive(koila__case *c)
{
    if (!koila__any_p(c))
        return koila__rule_pointwise(c);
    if (c->n_in != 2)
        return false;
    for (uint32_t i = 0; i < 2; i++)
        if (!koila__is_sum(c->in[i]) && !c->zero[i])
            return false;
    for (uint32_t i = 0; i < 2; i++)
        c->need[i] = koila__p(c, KOILA_SUM);
    return koila__out_all(c, koila__p(c, KOILA_SUM));
}

/* a * b is linear in each */
bool koila__rule_mul(koila__case *c)
{
    if (!koila__any_p(c))
        return koila__rule_pointwise(c);
    return (one_p(c, 0) || (c->n_in == 2 && one_p(c, 1))) && keeps_p(c);
}

/* a / b is linear in a */
bool koila__rule_div(koila__case *c)
{
    if (!koila__any_p(c))
        return koila__rule_pointwise(c);
    return koila__input_at(c, 0) == 0 && keeps_first_p(c);
}

/* Does type b hold every number of type a exactly? Then a sum may be converted term by term.
 */
static bool widens(koila_dtype a, koila_dtype b)
{
    const uint32_t from = koila_dtype_bytes(a);
    const uint32_t to = koila_dtype_bytes(b);
    if (a == b)
        return true;
    if (koila__dtype_is_float(a))
        return koila__dtype_is_float(b) && to > from &&
               koila__dtype_is_complex(a) <= koila__dtype_is_complex(b);
    if (koila__dtype_is_float(b))
        return to >= koila_dtype_bytes(KOILA_DTYPE_F32);
    return to >= from && b != KOILA_DTYPE_BOOL;
}

/* _to_copy and its like: a partial sum may be widened, not rounded */
bool koila__rule_cast(koila__case *c)
{
    if (!koila__any_p(c))
        return koila__rule_pointwise(c);
    return c->n_in == 1 && koila__is_sum(c->in[0]) &&
           widens(c->in_meta[0]->dtype, c->out_meta[0]->dtype) && keeps_p(c);
}

/* where(cond, a, b): linear in (a, b) together when cond is whole */
bool koila__rule_where(koila__case *c)
{
    if (!koila__any_p(c))
        return koila__rule_pointwise(c);
    if (c->n_in != 3 || koila__is_s(c->in[0]))
        return false;
    koila__need_r(c, 0);
    for (uint32_t i = 1; i < 3; i++)
        if (!koila__is_sum(c->in[i]) && !c->zero[i])
            return false;
    c->need[1] = koila__p(c, KOILA_SUM);
    c->need[2] = koila__p(c, KOILA_SUM);
    return koila__out_all(c, koila__p(c, KOILA_SUM));
}

/* masked_fill(a, mask, 0) is linear in a */
bool koila__rule_masked_fill(koila__case *c)
{
    double value;
    if (!koila__any_p(c))
        return koila__rule_pointwise(c);
    return koila__arg_number(c, 2, 1, &value) && value == 0 && keeps_first_p(c);
}

/* copy(self, src): self's values are gone, src is broadcast to it. addcmul and addcdiv are plain
 * pointwise. */
bool koila__rule_copy(koila__case *c)
{
    if (!koila__any_p(c))
        return koila__rule_pointwise(c);
    if (c->n_in != 2)
        return false;
    const koila_meta_info *self = c->in_meta[0];
    const koila_meta_info *src = c->in_meta[1];
    if (self->dtype != src->dtype &&
        !(koila__dtype_is_float(src->dtype) && koila__dtype_is_float(self->dtype) &&
          koila_dtype_bytes(self->dtype) > koila_dtype_bytes(src->dtype)))
        return false;
    if (!koila__is_sum(c->in[1]) || !(koila__is_sum(c->in[0]) || c->in[0].kind == KOILA_FREE))
        return false;
    const koila_write *w = c->sig->n_writes == 1 ? &c->sig->writes[0] : NULL;
    if (w && w->overwrites)
        c->need[0] = koila__r();
    else if (koila__is_sum(c->in[0]) || c->zero[0])
        c->need[0] = koila__p(c, KOILA_SUM);
    else
        return false;
    c->need[1] = koila__p(c, KOILA_SUM);
    return koila__out_all(c, koila__p(c, KOILA_SUM));
}

/* Random in-place fills: the numbers depend on the position of each element in the whole, not on
 * its old value. Into a view, or with a tensor of parameters, they are drawn whole. */
bool koila__rule_fill(koila__case *c)
{
    const koila_sig_info *s = c->sig;
    if (c->n_in != 1 || koila__is_sum(c->in[0]) || s->n_writes != 1 || !s->writes[0].overwrites)
        return false;
    return koila__rule_pointwise(c);
}

/* zero(x): the zeros of a partial sum are one */
bool koila__rule_fill_zero(koila__case *c)
{
    if (c->n_in == 1 && koila__is_sum(c->in[0]))
        return koila__out_all(c, c->in[0]);
    return koila__rule_pointwise(c);
}

/* fill.Scalar(x, number) */
bool koila__rule_fill_number(koila__case *c)
{
    double value;
    if (c->n_in == 1 && koila__is_sum(c->in[0]))
        return koila__arg_number(c, 1, 1, &value) && value == 0 && koila__out_all(c, c->in[0]);
    return koila__rule_pointwise(c);
}

/* fill.Tensor(x, value) */
bool koila__rule_fill_tensor(koila__case *c)
{
    return !(c->n_in == 1 && koila__is_sum(c->in[0])) && koila__rule_pointwise(c);
}

/* native_dropout, recorded on an empty tensor for the mask alone (a GPU's draws go by position):
 * only the shape counts, and each slice takes its rows */
bool koila__rule_draw(koila__case *c)
{
    return c->n_in == 1 && !koila__is_sum(c->in[0]) && koila__rule_pointwise(c);
}

/* bucketize(x, boundaries), isin(x, set): the second input is a table */
bool koila__rule_bucketize(koila__case *c)
{
    if (koila__any_p(c) || c->n_in != 2 || !koila__is_s(c->in[0]))
        return false;
    koila__need_r(c, 1);
    c->out[0] = c->in[0];
    return true;
}

/* searchsorted(sorted, x, sorter=...): a table for all, or one for each row of the same leading
 * dimensions */
bool koila__rule_searchsorted(koila__case *c)
{
    const uint32_t last = c->n_in >= 2 ? c->in_meta[1]->n_dims - 1u : 0;
    if (koila__any_p(c) || c->n_in < 2 || koila__input_at(c, 1) != 1)
        return false;
    const uint32_t lead = koila__is_s(c->in[1]) ? 1 : 0;
    const koila_placement p = c->in[lead];
    const bool is_of_table = c->in_meta[0]->n_dims > 1 && p.dim < last;
    if (!koila__is_s(p) || (!is_of_table && lead != 1))
        return false;
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (i != 1 && !is_of_table)
            koila__need_r(c, i);
        else if (!koila__need(c, i, p))
            return false;
    }
    return koila__out_all(c, p);
}
