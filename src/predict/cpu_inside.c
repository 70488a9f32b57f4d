/* cpu_inside.c — what operators use inside on a CPU, where the shapes tell it.
 *
 * Copies in another dtype: TensorIterator computes in one dtype. Operands of another one are copied
 * first, whole, on a CPU (compute_types in TensorIterator.cpp); on CUDA kernels cast as they load.
 * Sums do the same with their input (ReduceOps.cpp) [read, and tried: tests/python/test_memory.py].
 *
 * CTC: its backward makes a table of sums like that of its forward (LossCTC.cpp) [read, and tried:
 * tests/python/test_ctc.py].
 */
#include "koila/predict.h"

#include "base/base.h"
#include "placement/rules.h"

/* The families of operators that cast. */
static const koila__rule families[] = {
    koila__rule_additive,  koila__rule_cumsum, koila__rule_div,
    koila__rule_linear,    koila__rule_mul,    koila__rule_nansum,
    koila__rule_pointwise, koila__rule_sum,    koila__rule_where,
};

/* Of two dtypes, that in which torch compares them, where one of them is it: whole numbers give way
 * to floating-point ones, fewer bytes to more. */
static koila_dtype stronger(koila_dtype a, koila_dtype b)
{
    const int rank_a = koila__dtype_is_float(a) + koila__dtype_is_complex(a);
    const int rank_b = koila__dtype_is_float(b) + koila__dtype_is_complex(b);
    if (rank_a != rank_b)
        return rank_a > rank_b ? a : b;
    return koila_dtype_bytes(a) >= koila_dtype_bytes(b) && a != KOILA_DTYPE_BOOL ? a : b;
}

/* In which dtype the call computes: its result's, but comparisons have flags as results. */
static koila_dtype computes_in(const koila_table *t, const koila_sig_info *s)
{
    koila_dtype dtype = koila_meta_get(t, s->outputs[0])->dtype;
    if (dtype == KOILA_DTYPE_BOOL)
        for (uint32_t i = 0; i < s->n_inputs; i++)
            dtype = stronger(dtype, koila_meta_get(t, s->inputs[i])->dtype);
    return dtype;
}

static uint64_t cast_bytes(const koila_table *t, const koila_sig_info *s, koila__rule rule)
{
    bool casts = false;
    for (size_t i = 0; i < KOILA_COUNT(families); i++)
        casts |= rule == families[i];
    if (!casts || s->n_writes || !s->n_outputs || s->outputs[0] == KOILA_NONE)
        return 0;
    const koila_dtype dtype = computes_in(t, s);
    uint64_t bytes = 0;
    for (uint32_t i = rule == koila__rule_where; i < s->n_inputs; i++) { /* not the condition */
        const koila_meta_info *m = koila_meta_get(t, s->inputs[i]);
        /* complex numbers are made of real ones without a cast */
        if (m->n_dims && m->dtype != dtype &&
            koila__dtype_is_complex(m->dtype) == koila__dtype_is_complex(dtype))
            bytes += m->n_elements * koila_dtype_bytes(dtype);
    }
    return bytes;
}

uint64_t koila_cpu_inside_bytes(const koila_table *t, koila_sig sig)
{
    const koila_sig_info *s = koila_sig_get(t, sig);
    const koila__rule rule = koila__rule_of(t, s->op);
    return rule == koila__rule_ctc_loss_backward
               ? koila_meta_get(t, s->inputs[s->n_inputs - 1])->n_bytes
               : cast_bytes(t, s, rule);
}
