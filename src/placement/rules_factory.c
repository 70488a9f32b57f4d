/* rules_factory.c — tensors made from sizes alone: FREE until a use wants them sharded, then made
 * at the slice's size.
 *
 * Only factories whose elements do not depend on their position: arange, linspace, eye,
 * tril_indices have no line and are made whole, once. Random ones count: the executor draws the
 * rows of the whole tensor that belong to the slice. */
#include "placement/rules.h"

bool koila__rule_factory(koila__case *c)
{
    if (c->n_in != 0 || c->n_out != 1 || !c->want || c->want->kind != KOILA_S ||
        !koila__fits(c, *c->want, c->out_meta[0]))
        return false;
    const uint32_t sizes = strcmp(c->op, "aten::randint.low") == 0          ? 2
                           : strcmp(c->op, "aten::randint") == 0            ? 1
                           : strcmp(c->op, "aten::normal.float_float") == 0 ? 2
                                                                            : 0;
    const koila_arg *a = koila__arg(c, sizes);
    if (!a || a->kind != KOILA_ARG_LIST || a->n != c->out_meta[0]->n_dims)
        return false;
    c->out[0] = *c->want;
    if (!koila__fix_add(c, KOILA__FIX_SIZES, sizes, 0))
        return false;
    return strcmp(c->op, "aten::empty_strided") != 0 || koila__fix_add(c, KOILA__FIX_STRIDES, 1, 0);
}
