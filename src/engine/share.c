/* share.c — facts that the planner and an executor must agree on: where a value lives, in which
 * dtype a partial sum is accumulated, and whether a slice of a whole value is a view. */
#include "engine/share.h"

#include "graph/table.h"

koila_share koila__share_of(koila_placement x)
{
    koila_share s = { .axis = x.axis, .dim = x.dim, .outer = x.outer, .inner = x.inner };
    if (x.kind == KOILA_S)
        s.kind = KOILA_SHARE_SLICE;
    if (x.kind == KOILA_P) {
        s.kind = KOILA_SHARE_PARTIAL;
        s.partial = x.combine;
    }
    return s;
}

koila_dtype koila_accumulator_dtype(koila_dtype dtype, koila_share share, bool all_rows)
{
    const bool half = dtype == KOILA_DTYPE_F16 || dtype == KOILA_DTYPE_BF16;
    const bool sum = share.kind == KOILA_SHARE_PARTIAL && share.partial == KOILA_PARTIAL_SUM;
    return half && sum && !all_rows ? KOILA_DTYPE_F32 : dtype;
}

koila_slice_kind koila_slice_form(const koila_meta_info *whole, koila_share cut, bool all_rows)
{
    if (cut.outer != 1)
        return KOILA_SLICE_COPY;
    if (all_rows || !koila_meta_is_dense(whole))
        return KOILA_SLICE_VIEW;
    for (uint32_t d = 0; d < whole->n_dims; d++)
        if (d != cut.dim && whole->size[d] > 1 && whole->stride[d] > whole->stride[cut.dim])
            return KOILA_SLICE_COPY;
    return KOILA_SLICE_VIEW;
}

bool koila__accumulates_wider(const koila__placed *p, koila_value v)
{
    const koila_dtype dtype = koila__value_meta(p->graph, v)->dtype;
    return koila_accumulator_dtype(dtype, koila__share_of(p->value[v]), false) != dtype;
}
