/* random_graph.h — random recorded steps for the schedule oracle and the fuzzers: a few real
 * operators (so that the real rules place them) over tensors of one or two dimensions, some batched
 * over one of two axes, with views, writes in place, through views and over the old contents,
 * values used after they were written over, factories, reductions, and operators that gather. Every
 * choice takes a byte of `data`, or of a generator when data is NULL. Sizes are unkind: all
 * different but one that equals the batch. */
#ifndef KOILA_TEST_RANDOM_GRAPH_H
#define KOILA_TEST_RANDOM_GRAPH_H

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "koila/koila.h"

enum { RG_MAX_VALUES = 256 };

typedef struct random_graph {
    koila_table *t;
    koila_graph *g;
    koila_status status; /* the first failure: NO_MEMORY */
    const uint8_t *data;
    size_t n_data, at;
    uint64_t seed;
    koila_value values[RG_MAX_VALUES]; /* existing values, to choose from */
    uint8_t is_view[RG_MAX_VALUES];
    uint32_t n_values;
    int64_t extent[6]; /* sizes to choose from; [0], [1]: the axes */
    koila_link link[2];
    uint32_t n_links;
    koila_value targets[RG_MAX_VALUES];
    uint32_t n_targets;
} random_graph;

/* An empty step, whose choices follow from the seed. Also after a failure: rg_deinit(). */
static void rg_begin(random_graph *r, const koila_allocator *mem, uint64_t seed)
{
    memset(r, 0, sizeof *r);
    r->seed = seed * 0x9e3779b97f4a7c15u + 1;
    r->status = koila_table_new(mem, &r->t);
    if (r->status == KOILA_OK)
        r->status = koila_graph_new(r->t, mem, &r->g);
}

/* One axis more, of so many rows. */
static void rg_axis(random_graph *r, int64_t rows)
{
    uint16_t axis;
    if (r->status == KOILA_OK)
        r->status = koila_graph_axis(r->g, rows, &axis);
}

static uint32_t rg_pick(random_graph *r, uint32_t n)
{
    if (r->data)
        return (r->at < r->n_data ? r->data[r->at++] : 0) % n;
    r->seed ^= r->seed << 13;
    r->seed ^= r->seed >> 7;
    r->seed ^= r->seed << 17;
    return (uint32_t)(r->seed >> 33) % n;
}

static const koila_meta_info *rg_meta(const random_graph *r, koila_value v)
{
    return koila_meta_get(r->t, koila_value_get(r->g, v).meta);
}
static koila_meta rg_shape(random_graph *r, koila_dtype dtype, uint32_t n, const int64_t *size,
                           const int64_t *stride)
{
    koila_meta m = 0;
    if (r->status == KOILA_OK)
        r->status = koila_table_meta(r->t, dtype, 0, n, size, stride, &m);
    return m;
}

/* One call: t tensor, i int, b bool, l list of ints (count, then values). A name that ends in '_'
 * before the dot writes its first tensor. */
static koila_value rg_call(random_graph *r, const char *name, uint32_t flags, koila_meta out,
                           bool overwrites, const char *fmt, ...)
{
    koila_arg tok[16];
    koila_value in[4], first = 0;
    uint32_t n_tok = 0, n_in = 0, n_pos = 0;
    va_list ap;
    va_start(ap, fmt);
    for (; *fmt; fmt++, n_pos++) {
        koila_arg a = { 0 };
        int n_list = 0;
        switch (*fmt) {
        case 't':
            in[n_in] = va_arg(ap, koila_value);
            a.kind = KOILA_ARG_TENSOR;
            a.u.id = koila_value_get(r->g, in[n_in++]).meta;
            break;
        case 'i':
            a.kind = KOILA_ARG_INT;
            a.u.i = va_arg(ap, int64_t);
            break;
        case 'b':
            a.kind = KOILA_ARG_BOOL;
            a.u.i = va_arg(ap, int);
            break;
        case 'l':
            a.kind = KOILA_ARG_LIST;
            a.n = (uint32_t)(n_list = va_arg(ap, int));
            break;
        default:
            abort();
        }
        tok[n_tok++] = a;
        for (int i = 0; i < n_list; i++)
            tok[n_tok++] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = va_arg(ap, int64_t) };
    }
    va_end(ap);
    const size_t dot = strcspn(name, ".");
    const bool writes = name[dot - 1] == '_';
    const koila_write w = {
        .input = 0, .overwrites = overwrites, .n_links = r->n_links, .links = r->link
    };
    koila_sig_info d = { .n_tokens = n_tok,
                         .n_pos = n_pos,
                         .tokens = tok,
                         .n_fresh = !writes,
                         .outputs = &out,
                         .result_kind = writes ? 3 : 0,
                         .n_writes = writes,
                         .writes = &w,
                         .grad_mode = 1 };
    koila_sig sig = 0;
    if (r->status == KOILA_OK)
        r->status = koila_table_op(r->t, name, flags | (writes ? KOILA_OP_INPLACE : 0), &d.op);
    if (r->status == KOILA_OK)
        r->status = koila_table_sig(r->t, &d, &sig);
    if (r->status == KOILA_OK)
        r->status = koila_graph_node(r->g, sig, in, KOILA_NONE, &first);
    r->n_links = 0;
    if (r->status == KOILA_OK && r->n_values < RG_MAX_VALUES) {
        r->is_view[r->n_values] = (flags & KOILA_OP_VIEW) != 0;
        r->values[r->n_values++] = first;
    }
    return first;
}

static koila_value rg_leaf(random_graph *r, koila_leaf_kind kind, uint16_t axis, uint32_t dim,
                           koila_dtype dtype, uint32_t n, const int64_t *size)
{
    koila_value v = 0;
    const koila_meta m = rg_shape(r, dtype, n, size, NULL);
    if (r->status == KOILA_OK)
        r->status = koila_graph_leaf(r->g, m, kind, axis, dim, NULL, &v);
    if (r->status != KOILA_OK || r->n_values >= RG_MAX_VALUES)
        return v;
    r->is_view[r->n_values] = 1; /* a leaf is never written: it is not ours */
    r->values[r->n_values++] = v;
    return v;
}

/* ---- what steps are written of by hand: f32 matrices, dense, and a layer norm */

__attribute__((unused)) static koila_meta rg_matrix(random_graph *r, int64_t rows, int64_t columns)
{
    return rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ rows, columns }, NULL);
}
/* A view of a matrix [columns, rows], transposed. */
__attribute__((unused)) static koila_meta rg_turned(random_graph *r, int64_t rows, int64_t columns)
{
    return rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ rows, columns }, (int64_t[]){ 1, rows });
}
__attribute__((unused)) static koila_value rg_weight(random_graph *r, int64_t rows, int64_t columns)
{
    return rg_leaf(r, KOILA_LEAF_REAL, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ rows, columns });
}

/* A matrix normalised with the mean and variance along `dim`; what its gradient needs. */
typedef struct rg_norm {
    koila_value normal, scale;
    koila_meta full, stat;
    int64_t dim;
} rg_norm;

__attribute__((unused)) static rg_norm rg_normalise(random_graph *r, koila_value x, int64_t dim)
{
    int64_t size[2] = { rg_meta(r, x)->size[0], rg_meta(r, x)->size[1] };
    rg_norm n = { .full = rg_matrix(r, size[0], size[1]), .dim = dim };
    size[dim] = 1;
    n.stat = rg_matrix(r, size[0], size[1]);
    const koila_value mean = rg_call(r, "aten::mean.dim", 0, n.stat, false, "tlb", x, 1, dim, 1);
    const koila_value centred = rg_call(r, "aten::sub.Tensor", 0, n.full, false, "tt", x, mean);
    const koila_value square =
        rg_call(r, "aten::mul.Tensor", 0, n.full, false, "tt", centred, centred);
    const koila_value variance =
        rg_call(r, "aten::mean.dim", 0, n.stat, false, "tlb", square, 1, dim, 1);
    n.scale = rg_call(r, "aten::rsqrt", 0, n.stat, false, "t", variance);
    n.normal = rg_call(r, "aten::mul.Tensor", 0, n.full, false, "tt", centred, n.scale);
    return n;
}
/* The gradient of what was normalised, from that of n->normal. */
__attribute__((unused)) static koila_value rg_normalise_back(random_graph *r, const rg_norm *n,
                                                             koila_value g)
{
    const koila_value m1 = rg_call(r, "aten::mean.dim", 0, n->stat, false, "tlb", g, 1, n->dim, 1);
    const koila_value product =
        rg_call(r, "aten::mul.Tensor", 0, n->full, false, "tt", g, n->normal);
    const koila_value m2 =
        rg_call(r, "aten::mean.dim", 0, n->stat, false, "tlb", product, 1, n->dim, 1);
    const koila_value less = rg_call(r, "aten::mul.Tensor", 0, n->full, false, "tt", n->normal, m2);
    const koila_value centred = rg_call(r, "aten::sub.Tensor", 0, n->full, false, "tt", g, m1);
    const koila_value d = rg_call(r, "aten::sub.Tensor", 0, n->full, false, "tt", centred, less);
    return rg_call(r, "aten::mul.Tensor", 0, n->full, false, "tt", d, n->scale);
}

/* A random value of n dimensions (0: any), late ones more often; KOILA_NONE when none was found. */
static koila_value rg_value(random_graph *r, uint32_t n_dims, bool writable, bool contiguous)
{
    for (int i = 0; i < 6; i++) {
        uint32_t k = rg_pick(r, r->n_values);
        if (rg_pick(r, 2))
            k = r->n_values - 1 - k / 3;
        const koila_meta_info *m = rg_meta(r, r->values[k]);
        if (n_dims && m->n_dims != n_dims)
            continue;
        if (writable && r->is_view[k])
            continue;
        if (contiguous && m->n_dims == 2 &&
            (m->stride[1] != 1 || m->stride[0] != (m->size[1] > 1 ? m->size[1] : 1)))
            continue;
        return r->values[k];
    }
    return KOILA_NONE;
}
/* Another value with exactly this size. */
static koila_value rg_alike(random_graph *r, const koila_meta_info *m, bool writable)
{
    for (int i = 0; i < 12; i++) {
        const uint32_t k = rg_pick(r, r->n_values);
        const koila_meta_info *x = rg_meta(r, r->values[k]);
        if (x->n_dims == m->n_dims && memcmp(x->size, m->size, m->n_dims * sizeof *m->size) == 0 &&
            !(writable && r->is_view[k]))
            return r->values[k];
    }
    return KOILA_NONE;
}

/* One chained view call of a base of meta `m`; the view's meta. */
static koila_meta rg_chain(random_graph *r, koila_value base, bool select)
{
    const koila_meta_info *m = rg_meta(r, base);
    koila_arg tok[5] = { { .kind = KOILA_ARG_TENSOR, .u.id = koila_value_get(r->g, base).meta } };
    koila_sig_info d = { .tokens = tok, .n_fresh = 1, .grad_mode = 1 };
    koila_meta out;
    const int64_t at = rg_pick(r, (uint32_t)m->size[1]);
    tok[1] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = 1 };
    tok[2] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = at };
    if (select) {
        d.n_tokens = d.n_pos = 3;
        out = rg_shape(r, m->dtype, 1, m->size, m->stride);
    } else {
        tok[3] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = at + 1 };
        tok[4] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = 1 };
        d.n_tokens = d.n_pos = 5;
        out = rg_shape(r, m->dtype, 2, (int64_t[]){ m->size[0], 1 }, m->stride);
    }
    d.outputs = &out;
    if (r->status == KOILA_OK)
        r->status = koila_table_op(r->t, select ? "aten::select.int" : "aten::slice.Tensor",
                                   KOILA_OP_VIEW, &d.op);
    if (r->status == KOILA_OK)
        r->status = koila_table_sig(r->t, &d, &r->link[0].sig);
    r->link[0].output = 0;
    r->n_links = 1;
    return out;
}

/* Tries one random operator; nothing when what it drew does not fit together. */
__attribute__((unused)) static void rg_step(random_graph *r)
{
    const uint32_t what = rg_pick(r, 24);
    const koila_value a = rg_value(r, what == 10 || what == 11 ? 0 : 2, false, false);
    if (a == KOILA_NONE)
        return;
    const koila_meta_info *m = rg_meta(r, a);
    const int64_t dim = rg_pick(r, 2);
    int64_t size[2] = { m->size[0], m->n_dims > 1 ? m->size[1] : 1 };
    koila_value b;
    switch (what) {
    case 0:
    case 1:
    /* a product: with anything whose first size fits, or with a new weight, or with the transpose
     * of something */
    case 2:
        for (int i = 0; i < 8; i++) {
            b = rg_value(r, 2, false, false);
            if (b == KOILA_NONE || rg_meta(r, b)->size[0] != m->size[1] ||
                rg_meta(r, b)->dtype != m->dtype)
                continue;
            rg_call(
                r, "aten::mm", 0,
                rg_shape(r, m->dtype, 2, (int64_t[]){ m->size[0], rg_meta(r, b)->size[1] }, NULL),
                false, "tt", a, b);
            return;
        }
        size[0] = m->size[1];
        size[1] = r->extent[2 + rg_pick(r, 4)];
        const koila_dtype dtype = m->dtype;
        const int64_t rows = m->size[0];
        rg_leaf(r, KOILA_LEAF_REAL, 0, 0, dtype, 2, size);
        if (r->status == KOILA_OK)
            rg_call(r, "aten::mm", 0, rg_shape(r, dtype, 2, (int64_t[]){ rows, size[1] }, NULL),
                    false, "tt", a, r->values[r->n_values - 1]);
        return;
    case 3:
        rg_call(r, "aten::t", KOILA_OP_VIEW,
                rg_shape(r, m->dtype, 2, (int64_t[]){ m->size[1], m->size[0] },
                         (int64_t[]){ m->stride[1], m->stride[0] }),
                false, "t", a);
        return;
    case 4:
        size[dim] = 1;
        rg_call(r, "aten::sum.dim_IntList", 0, rg_shape(r, m->dtype, 2, size, NULL), false, "tlb",
                a, 1, dim, 1);
        return;
    case 5:
        size[dim] = 1;
        rg_call(r, "aten::mean.dim", 0, rg_shape(r, m->dtype, 2, size, NULL), false, "tlb", a, 1,
                dim, 1);
        return;
    case 6:
        size[dim] = 1;
        rg_call(r, "aten::amax", 0, rg_shape(r, m->dtype, 2, size, NULL), false, "tlb", a, 1, dim,
                1);
        return;
    case 7:
        rg_call(r, dim ? "aten::flip" : "aten::cumsum", 0, rg_shape(r, m->dtype, 2, size, NULL),
                false, dim ? "tl" : "ti", a, dim ? 1 : 0, (int64_t)0);
        return;
    case 8:
        rg_call(r, "aten::zeros_like", 0, rg_shape(r, m->dtype, 2, size, NULL), false, "t", a);
        return;
    case 9:
        rg_call(r, "aten::zeros", KOILA_OP_FACTORY, rg_shape(r, m->dtype, 2, size, NULL), false,
                "l", 2, size[0], size[1]);
        return;
    case 10:
        rg_call(r, "aten::relu", 0, rg_shape(r, m->dtype, m->n_dims, size, NULL), false, "t", a);
        return;
    case 11:
        rg_call(r, "aten::neg", 0, rg_shape(r, m->dtype, m->n_dims, size, NULL), false, "t", a);
        return;
    case 12: { /* a row or column is spread out again */
        if (m->size[dim] != 1)
            return;
        int64_t stride[2] = { m->stride[0], m->stride[1] };
        size[dim] = r->extent[rg_pick(r, 6)];
        stride[dim] = 0;
        rg_call(r, "aten::expand", KOILA_OP_VIEW, rg_shape(r, m->dtype, 2, size, stride), false,
                "tl", a, 2, size[0], size[1]);
        return;
    }
    case 13: { /* flattened: the batch becomes the outer or the inner part of a size */
        const koila_value c = rg_value(r, 2, false, true);
        if (c == KOILA_NONE)
            return;
        m = rg_meta(r, c);
        const int64_t n = m->size[0] * m->size[1];
        size[0] = dim ? n : 1;
        size[1] = dim ? 1 : n;
        rg_call(r, "aten::view", KOILA_OP_VIEW, rg_shape(r, m->dtype, 2, size, NULL), false, "tl",
                c, 2, size[0], size[1]);
        return;
    }
    case 14:
    case 15: { /* written in place, sometimes through a view */
        static const char *const inplace[] = { "aten::add_.Tensor", "aten::mul_.Tensor" };
        const koila_value base = rg_value(r, 2, true, false);
        if (base == KOILA_NONE)
            return;
        const bool chained = rg_pick(r, 3) == 0;
        const bool select = rg_pick(r, 2);
        const koila_meta view =
            chained ? rg_chain(r, base, select) : koila_value_get(r->g, base).meta;
        b = rg_alike(r, koila_meta_get(r->t, view), false);
        if (b == KOILA_NONE || r->status != KOILA_OK) {
            r->n_links = 0;
            return;
        }
        rg_call(r, inplace[dim], 0, KOILA_NONE, false, "tt", base, b);
        return;
    }
    case 16: {
        const koila_value base = rg_value(r, 2, true, false);
        if (base != KOILA_NONE)
            rg_call(r, "aten::relu_", 0, KOILA_NONE, false, "t", base);
        return;
    }
    case 17: { /* written over */
        const koila_value base = rg_alike(r, m, true);
        if (base != KOILA_NONE && base != a)
            rg_call(r, "aten::copy_", 0, KOILA_NONE, true, "tt", base, a);
        return;
    }
    case 22:
    /* normalised: a sum over the batch is a barrier, and what follows is sharded again */
    case 23: {
        const int64_t full[2] = { size[0], size[1] };
        const koila_dtype type = m->dtype;
        size[dim] = 1;
        const koila_value sum =
            rg_call(r, "aten::sum.dim_IntList", 0, rg_shape(r, type, 2, size, NULL), false, "tlb",
                    a, 1, dim, 1);
        if (r->status == KOILA_OK)
            rg_call(r, "aten::sub.Tensor", 0, rg_shape(r, type, 2, full, NULL), false, "tt", a,
                    sum);
        return;
    }
    default: { /* two of a size, or one broadcast over the other */
        static const char *const names[] = { "aten::add.Tensor", "aten::mul.Tensor",
                                             "aten::sub.Tensor", "aten::add.Tensor" };
        for (int i = 0; i < 8; i++) {
            b = rg_value(r, 2, false, false);
            if (b == KOILA_NONE)
                continue;
            const koila_meta_info *x = rg_meta(r, b);
            if (x->dtype != m->dtype || (x->size[0] != m->size[0] && x->size[0] != 1) ||
                (x->size[1] != m->size[1] && x->size[1] != 1))
                continue;
            rg_call(r, names[(what - 18) & 3], 0, rg_shape(r, m->dtype, 2, size, NULL), false, "tt",
                    a, b);
            return;
        }
    }
    }
}

/* A graph of about n_steps operators. `two_axes`: leaves of a second axis too. */
__attribute__((unused)) static koila_status rg_init(random_graph *r, const koila_allocator *mem,
                                                    uint64_t seed, const uint8_t *data,
                                                    size_t n_data, uint32_t n_steps)
{
    rg_begin(r, mem, seed);
    r->data = data;
    r->n_data = n_data;
    const bool two_axes = rg_pick(r, 3) == 0;
    const int64_t rows = 1 + rg_pick(r, 9);
    const int64_t extent[] = { rows, two_axes ? rows + 2 : 2, 3, rows, 1, 4 };
    memcpy(r->extent, extent, sizeof extent);
    const koila_dtype dtype = rg_pick(r, 4) == 0 ? KOILA_DTYPE_F16 : KOILA_DTYPE_F32;
    for (int k = 0; k < (two_axes ? 2 : 1) && r->status == KOILA_OK; k++) {
        rg_axis(r, extent[k]);
        for (int i = 0; i < 2; i++) {
            const uint32_t dim = rg_pick(r, 4) == 0;
            const int64_t other = extent[2 + rg_pick(r, 4)];
            rg_leaf(r, KOILA_LEAF_BATCH, (uint16_t)k, dim, dtype, 2,
                    dim ? (int64_t[]){ other, extent[k] } : (int64_t[]){ extent[k], other });
        }
    }
    rg_leaf(r, KOILA_LEAF_REAL, 0, 0, dtype, 2, (int64_t[]){ 3, 4 });
    for (uint32_t i = 0; i < n_steps * 2 && r->status == KOILA_OK &&
                         koila_graph_n_nodes(r->g) < n_steps && r->n_values < RG_MAX_VALUES - 2;
         i++)
        rg_step(r);
    if (r->status != KOILA_OK)
        return r->status;
    const uint32_t n_wanted = 1 + rg_pick(r, 3);
    for (uint32_t i = 0; i < n_wanted; i++) {
        const uint32_t k = r->n_values - 1 - rg_pick(r, r->n_values) / 3;
        r->targets[r->n_targets++] = r->values[k];
    }
    return r->status;
}

__attribute__((unused)) static void rg_deinit(random_graph *r)
{
    koila_graph_free(r->g);
    koila_table_free(r->t);
}

#endif
