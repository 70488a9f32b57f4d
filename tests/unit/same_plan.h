/* same_plan.h — do two plans do the same? Their facts, their stages, and each instruction. */
#ifndef KOILA_TEST_SAME_PLAN_H
#define KOILA_TEST_SAME_PLAN_H

#include "koila/koila.h"

static bool same_plan(const koila_plan *a, const koila_plan *b)
{
    const koila_plan_info x = koila_plan_get(a);
    const koila_plan_info y = koila_plan_get(b);
    if (x.n_stages != y.n_stages || x.peak_bytes != y.peak_bytes || x.rows != y.rows ||
        x.n_gathers != y.n_gathers || x.peak_node != y.peak_node)
        return false;
    for (uint32_t k = 0; k < x.n_stages; k++) {
        const koila_stage *s = koila_plan_stage(a, k);
        const koila_stage *t = koila_plan_stage(b, k);
        if (s->is_loop != t->is_loop || s->axis != t->axis || s->n_instrs != t->n_instrs ||
            s->peak_bytes != t->peak_bytes)
            return false;
        for (uint32_t i = 0; i < s->n_instrs; i++)
            if (s->instrs[i].kind != t->instrs[i].kind ||
                s->instrs[i].flags != t->instrs[i].flags ||
                s->instrs[i].steal != t->instrs[i].steal || s->instrs[i].id != t->instrs[i].id)
                return false;
    }
    return true;
}

#endif
