/* origin.c — where a value comes from, for rules whose answer depends on it: numbers of rows
 * (an arange that was converted and broadcast), steps of an arange, and whether rows were taken
 * out of tensors of some sizes.
 */
#include "placement/walk.h"

static bool is_int(const koila_sig_info *sig, uint32_t pos, int64_t value)
{
    return pos < sig->n_pos && sig->tokens[sig->start[pos]].kind == KOILA_ARG_INT &&
           sig->tokens[sig->start[pos]].u.i == value;
}

/* An arange of whole numbers from 0 in steps of 1: *n of them. */
static bool is_range(const koila__placer *p, const koila_sig_info *sig, int64_t *n)
{
    const uint32_t facts = koila__placer_facts(p, sig);
    const bool has_start = facts & KOILA_FACT_ARANGE_START;
    if (sig->n_outputs != 1)
        return false;
    const koila_meta_info *m = koila__meta(p->table, sig->outputs[0]);
    if (has_start && !is_int(sig, 0, 0))
        return false;
    if ((facts & KOILA_FACT_ARANGE_STEP) && sig->n_pos >= 3 && !is_int(sig, 2, 1))
        return false;
    *n = m->n_dims == 1 ? m->size[0] : 0;
    return m->n_dims == 1 && is_int(sig, has_start ? 1 : 0, *n) && !koila__dtype_is_float(m->dtype);
}

/* Does this call of one input keep whole numbers, and their row-major order? */
static bool keeps_numbers(const koila__placer *p, const koila_sig_info *sig)
{
    const uint32_t facts = koila__placer_facts(p, sig);
    if (sig->n_inputs != 1 || sig->n_outputs != 1 || sig->n_writes)
        return false;
    const koila_meta_info *m = koila__meta(p->table, sig->outputs[0]);
    const koila_meta_info *from = koila__meta(p->table, sig->inputs[0]);
    if (koila__dtype_is_float(m->dtype) || koila_dtype_bytes(m->dtype) < 4)
        return false;
    if (facts & KOILA_FACT_ADDS)
        return is_int(sig, 1, 0);
    if (!(facts & KOILA_FACT_RESHAPES))
        return facts & (KOILA_FACT_BROADCASTS | KOILA_FACT_SAME_VALUES);
    for (uint32_t d = 0; d < m->n_dims; d++) /* only dims of size 1 come and go */
        if (m->size[d] != 1 && (uint64_t)m->size[d] != from->n_elements)
            return false;
    return from->n_elements == m->n_elements;
}

enum { MAX_STEPS_UP = 16 }; /* from a value to the arange it comes from */

static const koila_sig_info *maker(const koila__placer *p, koila_value v)
{
    const koila_node node = p->to->values.at[v].node;
    return node == KOILA_NONE ? NULL : koila__sig(p->table, p->to->nodes.at[node].sig);
}

static koila_value first_input(const koila__placer *p, koila_value v)
{
    return koila_node_inputs(p->to, p->to->values.at[v].node)[0];
}

/* Which dimension of v holds the numbers of the range(n) from which it was made? Nothing is
 * reshaped after a broadcast, since the sizes no longer allow it. So it is the dimension, counted
 * from the right, that holds them just before the broadcasts, where exactly one dimension is not 1.
 */
static bool carrying_dim(const koila__placer *p, koila_value v, int64_t n, uint32_t *from_right)
{
    const uint32_t through = KOILA_FACT_BROADCASTS | KOILA_FACT_SAME_VALUES;
    for (uint32_t step = 0; step < MAX_STEPS_UP; step++) {
        const koila_sig_info *sig = maker(p, v);
        const koila_meta_info *m = koila__meta(p->table, sig->outputs[0]);
        if (m->n_elements == (uint64_t)n) {
            for (uint32_t d = m->n_dims; d-- > 0;)
                if (m->size[d] == n) {
                    *from_right = m->n_dims - 1 - d;
                    return true;
                }
            return false;
        }
        if (!(koila__placer_facts(p, sig) & through))
            return false;
        v = first_input(p, v);
    }
    return false;
}

bool koila__is_row_numbers(const koila__case *c, uint32_t i, uint32_t *dim)
{
    const koila__placer *p = c->placer;
    c->placer->looked_up = true;
    if (!c->in_value)
        return false;
    koila_value v = c->in_value[i];
    const koila_meta_info *m = koila__meta(p->table, p->to->values.at[v].meta);
    const koila_sig_info *sig = maker(p, v);
    uint32_t from_right;
    int64_t n;
    for (uint32_t step = 1; sig && !(koila__placer_facts(p, sig) & KOILA_FACT_ARANGE); step++) {
        if (step == MAX_STEPS_UP || !keeps_numbers(p, sig))
            return false;
        v = first_input(p, v);
        sig = maker(p, v);
    }
    if (!sig || !is_range(p, sig, &n) || n < 2)
        return false;
    if (!carrying_dim(p, c->in_value[i], n, &from_right) || from_right >= m->n_dims)
        return false;
    *dim = m->n_dims - 1u - from_right;
    return m->size[*dim] == n;
}

static bool has_taking(const koila__placer *p, const koila_meta_info *m, uint32_t d)
{
    for (uint32_t i = 0; i < p->n_takings; i++) {
        const koila__taking *t = &p->taking[i];
        if (t->dim == d && t->n_dims == m->n_dims &&
            !memcmp(t->size, m->size, m->n_dims * sizeof *t->size))
            return true;
    }
    return false;
}

bool koila__was_taken(const koila__case *c, const koila_meta_info *m, uint32_t d)
{
    return c->placer->n_takings == KOILA__TAKINGS || has_taking(c->placer, m, d);
}

void koila__take_note(const koila__case *c, const koila_meta_info *m, uint32_t d)
{
    koila__placer *p = c->placer;
    if (koila__was_taken(c, m, d))
        return;
    koila__taking *t = &p->taking[p->n_takings++];
    t->n_dims = m->n_dims;
    t->dim = d;
    memcpy(t->size, m->size, m->n_dims * sizeof *t->size);
}

bool koila__is_steps(const koila__case *c, uint32_t i, int64_t *step)
{
    const koila__placer *p = c->placer;
    c->placer->looked_up = true;
    const koila_sig_info *sig = c->in_value ? maker(p, c->in_value[i]) : NULL;
    const koila_meta_info *m = c->in_meta[i];
    if (!sig || !(koila__placer_facts(p, sig) & KOILA_FACT_ARANGE_STEP) || m->n_dims != 1 ||
        koila__dtype_is_float(m->dtype) || !is_int(sig, 0, 0))
        return false;
    if (sig->n_pos < 3 || sig->tokens[sig->start[2]].kind != KOILA_ARG_INT)
        return false;
    *step = sig->tokens[sig->start[2]].u.i;
    return *step > 0 && *step <= INT64_MAX / (m->size[0] + 1) && is_int(sig, 1, m->size[0] * *step);
}
