/* rules.c — the helpers that placement rules are written with: reading arguments, aligning
 * broadcasts. It has no rules. */
#include "placement/rules.h"

bool koila__any_p(const koila__case *c)
{
    for (uint32_t i = 0; i < c->n_in; i++)
        if (koila__is_p(c->in[i]))
            return true;
    return false;
}

uint32_t koila__lead(const koila__case *c) { return koila__lead_among(c, c->n_in); }
uint32_t koila__lead_among(const koila__case *c, uint32_t n)
{
    uint32_t best = KOILA_NONE;
    for (uint32_t i = 0; i < n && i < c->n_in; i++)
        if (koila__is_s(c->in[i]) &&
            (best == KOILA_NONE || c->in_meta[i]->n_elements > c->in_meta[best]->n_elements))
            best = i;
    return best;
}

bool koila__fits(const koila__case *c, koila_placement p, const koila_meta_info *m)
{
    if (p.kind != KOILA_S || p.dim >= m->n_dims || p.outer < 0 || p.inner < 0)
        return false;
    if (koila__is_opaque(p))
        return true;
    int64_t n;
    if (__builtin_mul_overflow(p.outer, p.inner, &n) || __builtin_mul_overflow(n, c->batch, &n))
        return false;
    return m->size[p.dim] == n;
}

bool koila__need(koila__case *c, uint32_t i, koila_placement p)
{
    if (i >= c->n_in || !koila__fits(c, p, c->in_meta[i]))
        return false;
    c->need[i] = p;
    return true;
}

void koila__need_r(koila__case *c, uint32_t i) { c->need[i] = koila__r(); }

void koila__need_aligned(koila__case *c, uint32_t i, koila_placement p, uint32_t n_dims)
{
    const koila_meta_info *m = c->in_meta[i];
    koila_placement q = koila__r();
    if (m->n_dims <= n_dims) {
        const uint32_t missing = n_dims - m->n_dims;
        if (p.dim >= missing && koila__fits(c, koila__moved(p, p.dim - missing), m))
            q = koila__moved(p, p.dim - missing);
    }
    c->need[i] = q;
}

bool koila__out_all(koila__case *c, koila_placement p)
{
    for (uint32_t j = 0; j < c->n_out; j++) {
        if (!c->out_meta[j])
            continue;
        const bool fits = p.kind != KOILA_S || koila__fits(c, p, c->out_meta[j]);
        if (!fits && c->out_meta[j]->n_elements)
            return false;
        /* empty results (a buffer that this device does not use) add up to an empty one */
        c->out[j] = fits ? p : koila__p(c, KOILA_SUM);
    }
    return true;
}

bool koila__out_like(koila__case *c, uint32_t i)
{
    c->out[0] = c->in[i];
    return true;
}

bool koila__out_rows_and_sums(koila__case *c, koila_placement p)
{
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j])
            c->out[j] = j == 0 ? p : koila__p(c, KOILA_SUM);
    return true;
}

bool koila__linear_in_first(koila__case *c)
{
    if (!koila__is_sum(c->in[0]))
        return false;
    for (uint32_t i = 1; i < c->n_in; i++)
        if (!koila__is_r(c->in[i]))
            return false;
    return koila__out_like(c, 0);
}

bool koila__linear_in_all(koila__case *c)
{
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (!koila__is_sum(c->in[i]) && !c->zero[i])
            return false;
        c->need[i] = koila__p(c, KOILA_SUM);
    }
    return koila__out_all(c, koila__p(c, KOILA_SUM));
}

bool koila__need_rows(koila__case *c, uint32_t n, koila_placement p)
{
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (i >= n)
            koila__need_r(c, i);
        else if (!koila__need(c, i, p))
            return false;
    }
    return true;
}

const koila_arg *koila__arg(const koila__case *c, uint32_t pos)
{
    return pos < c->sig->n_pos ? &c->sig->tokens[c->sig->start[pos]] : NULL;
}

const koila_arg *koila__kw(const koila__case *c, const char *name)
{
    for (uint32_t k = 0; k < c->sig->n_kw; k++)
        if (strcmp(koila_text(c->table, c->sig->kw_names[k]), name) == 0)
            return &c->sig->tokens[c->sig->start[c->sig->n_pos + k]];
    return NULL;
}

static uint32_t n_tensors_before(const koila__case *c, uint32_t token)
{
    uint32_t n = 0;
    for (uint32_t t = 0; t < token; t++)
        n += c->sig->tokens[t].kind == KOILA_ARG_TENSOR;
    return n;
}

uint32_t koila__input_at(const koila__case *c, uint32_t pos)
{
    const koila_arg *a = koila__arg(c, pos);
    if (!a || a->kind != KOILA_ARG_TENSOR)
        return KOILA_NONE;
    return n_tensors_before(c, c->sig->start[pos]);
}

bool koila__arg_tensors(const koila__case *c, uint32_t pos, uint32_t *first, uint32_t *n)
{
    const koila_arg *a = koila__arg(c, pos);
    if (!a || a->kind != KOILA_ARG_LIST)
        return false;
    for (uint32_t k = 1; k <= a->n; k++)
        if (a[k].kind != KOILA_ARG_TENSOR)
            return false;
    *first = n_tensors_before(c, c->sig->start[pos]);
    *n = a->n;
    return true;
}

bool koila__is_absent(const koila__case *c, uint32_t pos)
{
    const koila_arg *a = koila__arg(c, pos);
    return !a || a->kind == KOILA_ARG_ABSENT;
}

bool koila__arg_int(const koila__case *c, uint32_t pos, int64_t otherwise, int64_t *out)
{
    const koila_arg *a = koila__arg(c, pos);
    if (a && a->kind != KOILA_ARG_INT)
        return false;
    *out = a ? a->u.i : otherwise;
    return true;
}

bool koila__arg_bool(const koila__case *c, uint32_t pos, bool otherwise, bool *out)
{
    const koila_arg *a = koila__arg(c, pos);
    if (a && a->kind != KOILA_ARG_BOOL && a->kind != KOILA_ARG_INT)
        return false;
    *out = a ? a->u.i != 0 : otherwise;
    return true;
}

bool koila__arg_number(const koila__case *c, uint32_t pos, double otherwise, double *out)
{
    const koila_arg *a = koila__arg(c, pos);
    if (!a)
        *out = otherwise;
    else if (a->kind == KOILA_ARG_FLOAT)
        *out = a->u.f;
    else if (a->kind == KOILA_ARG_INT || a->kind == KOILA_ARG_BOOL)
        *out = (double)a->u.i;
    else
        return false;
    return true;
}

bool koila__kw_int(const koila__case *c, const char *name, int64_t otherwise, int64_t *out)
{
    const koila_arg *a = koila__kw(c, name);
    if (a && a->kind != KOILA_ARG_ABSENT && a->kind != KOILA_ARG_INT && a->kind != KOILA_ARG_BOOL)
        return false;
    *out = a && a->kind != KOILA_ARG_ABSENT ? a->u.i : otherwise;
    return true;
}

bool koila__kw_number(const koila__case *c, const char *name, double otherwise, double *out)
{
    const koila_arg *a = koila__kw(c, name);
    if (!a || a->kind == KOILA_ARG_ABSENT)
        *out = otherwise;
    else if (a->kind == KOILA_ARG_FLOAT)
        *out = a->u.f;
    else if (a->kind == KOILA_ARG_INT)
        *out = (double)a->u.i;
    else
        return false;
    return true;
}

static bool wrap(int64_t d, uint32_t n_dims, uint32_t *out)
{
    const int64_t n = n_dims ? n_dims : 1; /* a scalar accepts 0 and -1 */
    if (d < 0)
        d += n;
    if (d < 0 || d >= n)
        return false;
    *out = (uint32_t)d;
    return true;
}

bool koila__arg_dim(const koila__case *c, uint32_t pos, int64_t otherwise, uint32_t n_dims,
                    uint32_t *out)
{
    int64_t d;
    return koila__arg_int(c, pos, otherwise, &d) && wrap(d, n_dims, out);
}

bool koila__arg_dims(const koila__case *c, uint32_t pos, uint32_t n_dims, uint32_t *set,
                     uint32_t *list, uint32_t *n)
{
    const koila_arg *a = koila__arg(c, pos);
    uint32_t d;
    *set = 0;
    *n = 0;
    if (!a || a->kind == KOILA_ARG_ABSENT)
        return true;
    const uint32_t count = a->kind == KOILA_ARG_LIST ? a->n : 1;
    if (count > KOILA_MAX_DIMS)
        return false;
    for (uint32_t k = 0; k < count; k++) {
        const koila_arg *e = a->kind == KOILA_ARG_LIST ? a + 1 + k : a;
        if (e->kind != KOILA_ARG_INT || !wrap(e->u.i, n_dims, &d))
            return false;
        if (list)
            list[k] = d;
        *set |= 1u << d;
    }
    *n = count;
    return true;
}

bool koila__fix_add(koila__case *c, koila__fix_kind kind, uint32_t arg, uint32_t output)
{
    if (c->n_fix == KOILA__MAX_FIXES || arg > UINT8_MAX || output > UINT16_MAX)
        return false;
    c->fix[c->n_fix++] = (koila__fix){ (uint8_t)kind, (uint8_t)arg, (uint16_t)output };
    return true;
}

bool koila__dtype_is_complex(koila_dtype d)
{
    return d == KOILA_DTYPE_C32 || d == KOILA_DTYPE_C64 || d == KOILA_DTYPE_C128;
}
bool koila__dtype_is_float(koila_dtype d)
{
    switch (d) {
    case KOILA_DTYPE_F16:
    case KOILA_DTYPE_BF16:
    case KOILA_DTYPE_F32:
    case KOILA_DTYPE_F64:
    case KOILA_DTYPE_F8E5:
    case KOILA_DTYPE_F8E4:
        return true;
    default:
        return koila__dtype_is_complex(d);
    }
}

koila_dtype koila__accumulate_type(koila_dtype d)
{
    return d == KOILA_DTYPE_F16 || d == KOILA_DTYPE_BF16 ? KOILA_DTYPE_F32 : d;
}
koila_dtype koila__moments_type(koila_dtype d)
{
    return d == KOILA_DTYPE_F32 ? KOILA_DTYPE_F64 : koila__accumulate_type(d);
}
