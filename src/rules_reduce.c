/* rules_reduce.c — sums and their kin: over another dimension the slice is untouched, over the batch the result is partial.
 *
 * A mean over the batch runs as recorded on the slice, times b / batch: (mean of b rows) * b / batch == sum / batch, exactly a partial sum. */
#include "emit.h"

/* Where dimension d of the input is after reducing `set`. */
static uint32_t after(uint32_t set, bool keepdim, uint32_t d)
{
    uint32_t gone = 0;
    for (uint32_t k = 0; k < d; k++) gone += (set >> k) & 1;
    return keepdim ? d : d - gone;
}

typedef enum over_batch { OVER_SUM, OVER_MEAN, OVER_MAX, OVER_MIN, OVER_NONE } over_batch;

/* Reduce input 0 over `set` (all dims when empty). */
static bool reduce(koila__case *c, uint32_t set, bool keepdim, over_batch how)
{
    const koila_placement p = c->in[0];
    const uint32_t n_dims = c->in_meta[0]->n_dims;
    if (c->n_in != 1) return false;
    if (!set) set = (1u << n_dims) - 1;
    if (koila__is_p(p)) {
        const bool ok = ((how == OVER_SUM || how == OVER_MEAN) && p.combine == KOILA_SUM) || (how == OVER_MAX && p.combine == KOILA_MAX) ||
                        (how == OVER_MIN && p.combine == KOILA_MIN);
        return ok && koila__out_all(c, p);
    }
    if (!koila__is_s(p)) return false;
    if (!((set >> p.dim) & 1)) return koila__out_all(c, koila__moved(p, after(set, keepdim, p.dim)));
    if (how == OVER_NONE) return false;
    for (uint32_t j = 0; j < c->n_out && how == OVER_MEAN; j++)
        if (!koila__fix_add(c, KOILA__FIX_SCALE, 0, j)) return false;
    return koila__out_all(c, koila__p(c, how == OVER_MAX ? KOILA_MAX : how == OVER_MIN ? KOILA_MIN : KOILA_SUM));
}

static bool reduce_dims(koila__case *c, uint32_t pos_dims, uint32_t pos_keepdim, over_batch how)
{
    uint32_t set, n;
    bool keepdim;
    return koila__arg_dims(c, pos_dims, c->in_meta[0]->n_dims, &set, NULL, &n) && koila__arg_bool(c, pos_keepdim, false, &keepdim) &&
           reduce(c, set, keepdim, how);
}

bool koila__rule_sum(koila__case *c) { return reduce_dims(c, 1, 2, OVER_SUM); } /* sum, sum.dim_IntList, nansum, count_nonzero.dim_IntList */
bool koila__rule_count(koila__case *c)
{
    uint32_t set, n;
    return !koila__any_p(c) && koila__arg_dims(c, 1, c->in_meta[0]->n_dims, &set, NULL, &n) && reduce(c, set, false, OVER_SUM);
}
bool koila__rule_mean(koila__case *c) { return reduce_dims(c, 1, 2, OVER_MEAN); }
bool koila__rule_amax(koila__case *c) { return reduce_dims(c, 1, 2, OVER_MAX); }
bool koila__rule_amin(koila__case *c) { return reduce_dims(c, 1, 2, OVER_MIN); }
bool koila__rule_max_all(koila__case *c) { return c->sig->n_pos == 1 && reduce(c, 0, false, OVER_MAX); }
bool koila__rule_min_all(koila__case *c) { return c->sig->n_pos == 1 && reduce(c, 0, false, OVER_MIN); }
bool koila__rule_any(koila__case *c) { return !koila__any_p(c) && c->out_meta[0]->dtype == KOILA_DTYPE_BOOL && reduce_dims(c, 1, 2, OVER_MAX); }
bool koila__rule_all(koila__case *c) { return !koila__any_p(c) && c->out_meta[0]->dtype == KOILA_DTYPE_BOOL && reduce_dims(c, 1, 2, OVER_MIN); }
/* prod, argmax, median, mode, ... over one dimension (or all when left out), with keepdim: only when it is not the batch */
bool koila__rule_reduce_other(koila__case *c) { return !koila__any_p(c) && reduce_dims(c, 1, 2, OVER_NONE); }

/* koila::moments(x, dims) -> [3, the other sizes]: see pseudo.def */
bool koila__rule_moments(koila__case *c)
{
    uint32_t set, n;
    if (koila__any_p(c) || c->n_in != 1 || !koila__is_s(c->in[0]) || !koila__arg_dims(c, 1, c->in_meta[0]->n_dims, &set, NULL, &n) || n == 0) return false;
    c->out[0] = (set >> c->in[0].dim) & 1 ? koila__p(c, KOILA_MOMENTS) : koila__moved(c->in[0], 1 + after(set, false, c->in[0].dim));
    return true;
}
