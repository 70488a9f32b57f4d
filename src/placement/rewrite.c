/* rewrite.c — the builder for rewrites (see rewrite.h). It interns a signature like the recorder
 * does and hands the call to the walk. */
#include "placement/rewrite.h"
#include "placement/placer.h"

/* The operator of that name, which is looked up once. */
static koila_status find_op(koila__placer *p, const char *name, uint32_t flags, koila_op *op)
{
    koila__named *known = &p->named[(uintptr_t)name / 4 % KOILA__NAMES];
    if (known->name != name) {
        KOILA_TRY(koila_table_op(p->table, name, flags, &known->op));
        known->name = name;
    }
    *op = known->op;
    return KOILA_OK;
}

void koila__emit_begin(koila__case *c, koila__call *k, const char *op, uint32_t op_flags)
{
    memset(k, 0, sizeof *k);
    k->c = c;
    k->list = KOILA_NONE;
    k->axis = KOILA_NONE;
    const koila_status s = find_op(c->placer, op, op_flags, &k->op);
    if (s != KOILA_OK) {
        c->placer->status = s;
        k->bad = true;
    }
}

static void add(koila__call *k, koila_arg a)
{
    if (k->n_tokens == KOILA__CALL_TOKENS) {
        k->bad = true;
        return;
    }
    k->token[k->n_tokens++] = a;
    if (!k->n_kw)
        k->n_pos++;
}

void koila__emit_value(koila__call *k, koila_value v)
{
    if (v == KOILA_NONE || k->n_values == KOILA__CALL_VALUES) {
        k->bad = true;
        return;
    }
    k->value[k->n_values++] = v;
    add(k,
        (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = koila_value_get(k->c->placer->to, v).meta });
}

void koila__emit_none(koila__call *k) { add(k, (koila_arg){ .kind = KOILA_ARG_ABSENT }); }
void koila__emit_optional(koila__call *k, uint32_t input)
{
    if (input == KOILA_NONE)
        koila__emit_none(k);
    else
        koila__emit_value(k, k->c->in_value[input]);
}
void koila__emit_int(koila__call *k, int64_t i)
{
    add(k, (koila_arg){ .kind = KOILA_ARG_INT, .u.i = i });
}
void koila__emit_float(koila__call *k, double f)
{
    add(k, (koila_arg){ .kind = KOILA_ARG_FLOAT, .u.f = f });
}
void koila__emit_bool(koila__call *k, bool b)
{
    add(k, (koila_arg){ .kind = KOILA_ARG_BOOL, .u.i = b });
}
void koila__emit_dtype(koila__call *k, koila_dtype d)
{
    add(k, (koila_arg){ .kind = KOILA_ARG_DTYPE, .u.id = d });
}

static void add_list(koila__call *k, const koila_arg *at, uint32_t n)
{
    const uint32_t n_pos = k->n_pos;
    add(k, (koila_arg){ .kind = KOILA_ARG_LIST, .n = n });
    for (uint32_t i = 0; i < n; i++)
        add(k, at[i]);
    if (!k->n_kw)
        k->n_pos = n_pos + 1;
}

void koila__emit_ints(koila__call *k, const int64_t *at, uint32_t n)
{
    koila_arg a[KOILA_MAX_DIMS] = { 0 };
    if (n > KOILA_MAX_DIMS) {
        k->bad = true;
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        a[i] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = at[i] };
    add_list(k, a, n);
}

void koila__emit_bools(koila__call *k, const bool *at, uint32_t n)
{
    koila_arg a[KOILA_MAX_DIMS] = { 0 };
    if (n > KOILA_MAX_DIMS) {
        k->bad = true;
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        a[i] = (koila_arg){ .kind = KOILA_ARG_BOOL, .u.i = at[i] };
    add_list(k, a, n);
}

void koila__emit_values(koila__call *k, const koila_value *at, uint32_t n)
{
    koila_arg a[KOILA__CALL_VALUES] = { 0 };
    if (n > KOILA__CALL_VALUES - k->n_values) {
        k->bad = true;
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (at[i] == KOILA_NONE) {
            k->bad = true;
            return;
        }
        k->value[k->n_values++] = at[i];
        a[i] = (koila_arg){ .kind = KOILA_ARG_TENSOR,
                            .u.id = koila_value_get(k->c->placer->to, at[i]).meta };
    }
    add_list(k, a, n);
}

void koila__emit_copy(koila__call *k, uint32_t pos)
{
    const koila_arg *a = koila__arg(k->c, pos);
    if (!a)
        return;
    uint32_t input = 0;
    for (const koila_arg *t = k->c->sig->tokens; t < a; t++)
        input += t->kind == KOILA_ARG_TENSOR;
    if (a->kind == KOILA_ARG_TENSOR)
        koila__emit_value(k, k->c->in_value[input]);
    else if (a->kind != KOILA_ARG_LIST)
        add(k, *a);
    else {
        for (uint32_t i = 1; i <= a->n && !k->bad; i++) {
            if (a[i].kind != KOILA_ARG_TENSOR)
                continue;
            k->bad = k->n_values == KOILA__CALL_VALUES;
            if (!k->bad)
                k->value[k->n_values++] = k->c->in_value[input++];
        }
        add_list(k, a + 1, a->n);
    }
}

void koila__emit_kw(koila__call *k, const char *name)
{
    uint32_t text;
    const koila_status s = koila_table_text(k->c->placer->table, name, &text);
    if (s != KOILA_OK || k->n_kw == KOILA_COUNT(k->kw_name)) {
        if (s != KOILA_OK)
            k->c->placer->status = s;
        k->bad = true;
        return;
    }
    k->kw_name[k->n_kw++] = text;
}

bool koila__emit_end_n(koila__call *k, uint32_t n_out, const koila_meta *out, koila_value *results)
{
    for (uint32_t j = 0; j < n_out; j++)
        results[j] = KOILA_NONE;
    if (k->bad || k->c->placer->status != KOILA_OK)
        return false;
    const koila_sig_info desc = {
        .op = k->op,
        .n_tokens = k->n_tokens,
        .n_pos = k->n_pos,
        .n_kw = k->n_kw,
        .tokens = k->token,
        .kw_names = k->kw_name,
        .n_fresh = n_out,
        .outputs = out,
        .result_kind = n_out > 1,
        .grad_mode = k->c->sig->grad_mode,
    };
    return koila__placer_call(k->c->placer, &desc, k->value, k->axis, results);
}

bool koila__emit_cut(const koila__case *c, const koila_meta_info *m, uint32_t dim,
                     koila_placement *out)
{
    return koila__placer_cut(c->placer, m, dim, c->axis, out);
}

void koila__emit_along(koila__call *k, koila_placement made)
{
    if (k->c->placer->seeds)
        k->axis = made.axis;
}

/* Dimensions of more than one element from outermost to innermost in memory. */
static uint32_t memory_order(const koila_meta_info *m, int64_t *order)
{
    uint32_t n = 0;
    for (uint32_t d = 0; d < m->n_dims; d++) {
        if (m->size[d] == 1)
            continue;
        uint32_t at = n++;
        for (; at > 0 && m->stride[order[at - 1]] < m->stride[d]; at--)
            order[at] = order[at - 1];
        order[at] = d;
    }
    return n;
}

/* Note [Layouts]. A recorded view of a result needs the recorded memory order, but the emitted
 * calls may give another: a softmax is always contiguous, while the quotient that replaces it has
 * its input's layout. A call of one result as large as an input gets the layout of the first such
 * input that is not expanded (TensorIterator's rule); if `out` has another layout, a copy is added.
 */
static bool laid_out(const koila__call *k, const koila_meta_info *out)
{
    int64_t mine[KOILA_MAX_DIMS], its[KOILA_MAX_DIMS];
    const uint32_t n = memory_order(out, mine);
    if ((koila_op_flags(k->c->table, k->op) & KOILA_OP_VIEW) ||
        out->n_storage_bytes != out->n_bytes)
        return true;
    for (uint32_t i = 0; i < k->n_values; i++) {
        const koila_meta_info *m = koila__emit_meta_of(k->c, k->value[i]);
        bool as_large = m->n_dims == out->n_dims;
        for (uint32_t d = 0; as_large && d < m->n_dims; d++)
            as_large = m->size[d] == out->size[d] && (m->size[d] == 1 || m->stride[d] != 0);
        if (as_large)
            return memory_order(m, its) == n && memcmp(mine, its, n * sizeof *mine) == 0;
    }
    return true;
}

koila_value koila__emit_end(koila__call *k, koila_meta out)
{
    koila_value v = KOILA_NONE;
    if (out == KOILA_NONE || !koila__emit_end_n(k, 1, &out, &v))
        return KOILA_NONE;
    const koila_meta_info *m = koila_meta_get(k->c->table, out);
    if (laid_out(k, m))
        return v;
    int64_t order[KOILA_MAX_DIMS];
    uint32_t n = memory_order(m, order);
    for (uint32_t d = 0; d < m->n_dims; d++)
        if (m->size[d] == 1)
            order[n++] = d;
    koila__call copy;
    koila__emit_begin(k->c, &copy, "koila::laid_out", 0);
    koila__emit_value(&copy, v);
    koila__emit_ints(&copy, order, n);
    return koila__emit_end_n(&copy, 1, &out, &v) ? v : KOILA_NONE;
}

koila_meta koila__emit_meta(koila__case *c, const koila_meta_info *like, koila_dtype dtype,
                            uint32_t n_dims, const int64_t *size)
{
    koila_meta m;
    const int64_t one = 1;
    const koila_status s = koila_table_meta(c->placer->table, dtype, like->device, n_dims,
                                            n_dims ? size : &one, NULL, &m);
    if (s == KOILA_OK)
        return m;
    c->placer->status = s;
    return KOILA_NONE;
}

const koila_meta_info *koila__emit_meta_of(const koila__case *c, koila_value v)
{
    return v == KOILA_NONE ? NULL
                           : koila_meta_get(c->table, koila_value_get(c->placer->to, v).meta);
}

koila_meta koila__emit_meta_id(const koila__case *c, koila_value v)
{
    return v == KOILA_NONE ? KOILA_NONE : koila_value_get(c->placer->to, v).meta;
}

koila_value koila__emit_whole(koila__case *c, koila_value v)
{
    koila_value whole;
    if (v == KOILA_NONE || c->placer->status != KOILA_OK)
        return KOILA_NONE;
    if (koila__is_r(koila__placer_placement(c->placer, v)))
        return v;
    return koila__placer_whole(c->placer, v, &whole) ? whole : KOILA_NONE;
}

koila_value koila__emit_sliced(koila__case *c, koila_value v, koila_placement want)
{
    if (v == KOILA_NONE || c->placer->status != KOILA_OK)
        return KOILA_NONE;
    koila__placer_slice(c->placer, v, want);
    return c->placer->status == KOILA_OK ? v : KOILA_NONE;
}

koila_placement koila__emit_placement(const koila__case *c, koila_value v)
{
    return koila__placer_placement(c->placer, v);
}

koila_value koila__emit_unary(koila__case *c, const char *op, koila_value a, koila_meta out)
{
    koila__call k;
    koila__emit_begin(c, &k, op, 0);
    koila__emit_value(&k, a);
    return koila__emit_end(&k, out);
}

koila_value koila__emit_binary(koila__case *c, const char *op, koila_value a, koila_value b,
                               koila_meta out)
{
    koila__call k;
    koila__emit_begin(c, &k, op, 0);
    koila__emit_value(&k, a);
    koila__emit_value(&k, b);
    return koila__emit_end(&k, out);
}

koila_value koila__emit_scalar(koila__case *c, const char *op, koila_value a, double b,
                               koila_meta out)
{
    koila__call k;
    koila__emit_begin(c, &k, op, 0);
    koila__emit_value(&k, a);
    koila__emit_float(&k, b);
    return koila__emit_end(&k, out);
}

koila_value koila__emit_view(koila__case *c, koila_value a, uint32_t n_dims, const int64_t *size)
{
    const koila_meta_info *m = koila__emit_meta_of(c, a);
    koila__call k;
    koila__emit_begin(c, &k, "aten::view", KOILA_OP_VIEW);
    koila__emit_value(&k, a);
    koila__emit_ints(&k, size, n_dims);
    return m ? koila__emit_end(&k, koila__emit_meta(c, m, m->dtype, n_dims, size)) : KOILA_NONE;
}

koila_value koila__emit_expand(koila__case *c, koila_value a, uint32_t n_dims, const int64_t *size)
{
    const koila_meta_info *m = koila__emit_meta_of(c, a);
    int64_t stride[KOILA_MAX_DIMS];
    koila_meta out;
    if (!m || m->n_dims != n_dims)
        return KOILA_NONE;
    for (uint32_t d = 0; d < n_dims; d++)
        stride[d] = m->size[d] == size[d] ? m->stride[d] : 0;
    const koila_status s =
        koila_table_meta(c->placer->table, m->dtype, m->device, n_dims, size, stride, &out);
    if (s != KOILA_OK) {
        c->placer->status = s;
        return KOILA_NONE;
    }
    koila__call k;
    koila__emit_begin(c, &k, "aten::expand", KOILA_OP_VIEW);
    koila__emit_value(&k, a);
    koila__emit_ints(&k, size, n_dims);
    return koila__emit_end(&k, out);
}

koila_meta koila__emit_meta_like(koila__case *c, const koila_meta_info *like, koila_dtype dtype)
{
    koila_meta m;
    const koila_status s = koila_table_meta(c->placer->table, dtype, like->device, like->n_dims,
                                            like->size, like->stride, &m);
    if (s == KOILA_OK)
        return m;
    c->placer->status = s;
    return KOILA_NONE;
}

koila_value koila__emit_cast(koila__case *c, koila_value a, koila_dtype d)
{
    const koila_meta_info *m = koila__emit_meta_of(c, a);
    if (!m)
        return KOILA_NONE;
    return m->dtype == d ? a : koila__emit_cast_as(c, a, koila__emit_meta_like(c, m, d));
}

koila_value koila__emit_cast_as(koila__case *c, koila_value a, koila_meta out)
{
    if (out == KOILA_NONE)
        return KOILA_NONE;
    koila__call k;
    koila__emit_begin(c, &k, "aten::_to_copy", 0);
    koila__emit_value(&k, a);
    koila__emit_kw(&k, "dtype");
    koila__emit_dtype(&k, koila_meta_get(c->table, out)->dtype);
    return koila__emit_end(&k, out);
}
