/* rules_factory.c — tensors made from sizes alone: FREE until a use needs them sharded, then made
 * at the slice's size.
 *
 * Factories whose elements do not depend on their position have such a rule, and arange(0, n), of
 * which a slice makes its own numbers; linspace, eye and tril_indices are made whole, once. Random
 * factories do have it: the executor draws the rows of the whole tensor that belong to the slice.
 */
#include "placement/rules.h"

/* Argument `sizes` is the list of sizes. */
static bool factory(koila__case *c, uint32_t sizes)
{
    if (c->n_in > 1 || (c->n_in && !koila__is_r(c->in[0])) || c->n_out != 1 || !c->want ||
        c->want->kind != KOILA_S || !koila__fits(c, *c->want, c->out_meta[0]))
        return false;
    if (c->n_in)
        koila__need_r(c, 0); /* new_zeros(x): for its type and device */
    const koila_arg *a = koila__arg(c, sizes);
    if (!a || a->kind != KOILA_ARG_LIST || a->n != c->out_meta[0]->n_dims)
        return false;
    c->out[0] = *c->want;
    return koila__fix_add(c, KOILA__FIX_SIZES, sizes, 0);
}

bool koila__rule_factory(koila__case *c) { return factory(c, 0); }
bool koila__rule_factory_sizes_1(koila__case *c) { return factory(c, 1); }
bool koila__rule_factory_sizes_2(koila__case *c) { return factory(c, 2); }

/* empty_strided(sizes, strides) */
bool koila__rule_factory_strided(koila__case *c)
{
    return factory(c, 0) && koila__fix_add(c, KOILA__FIX_STRIDES, 1, 0);
}

/* arange(0, n) */
bool koila__rule_range(koila__case *c)
{
    int64_t start, end;
    if (c->n_in != 0 || c->n_out != 1 || !c->want || c->want->kind != KOILA_S ||
        c->want->outer != 1 || !koila__fits(c, *c->want, c->out_meta[0]))
        return false;
    if (!koila__arg_int(c, 0, -1, &start) || !koila__arg_int(c, 1, -1, &end) || start != 0 ||
        c->out_meta[0]->n_dims != 1 || end != c->out_meta[0]->size[0])
        return false;
    c->out[0] = *c->want;
    return koila__fix_add(c, KOILA__FIX_FIRST, 0, 0) && koila__fix_add(c, KOILA__FIX_AFTER, 1, 0);
}
