/* graph_maker.h — graphs in a line or two for the tests of placement:
 *
 *     maker m; maker_init(&m, NULL);
 *     koila_value x = batch(&m, 0, f32(7, 5)), w = real(&m, f32(5, 3));
 *     koila_value y = call(&m, "aten::mm", f32(7, 3), "tt", x, w);
 *
 * The format has a letter per argument: t tensor (koila_value), i int, d double, b bool, n None, l
 * list of ints (count, then values), T list of tensors (count, then values), y dtype, and k keyword
 * (a name; its value's letter follows). An op name that ends in '_' before the dot writes its first
 * tensor; '!' in front of the format says it overwrites. */
#ifndef KOILA_TEST_GRAPH_MAKER_H
#define KOILA_TEST_GRAPH_MAKER_H

#include <stdarg.h>

#include "harness.h"
#include "placement/place.h"
#include "placement/rules.h"

typedef struct maker {
    koila_table *table;
    koila_graph *graph;
    koila__placed *placed;
    koila_status status;
    uint16_t device; /* of every tensor made from now on, as koila_meta_info has it; 0: the CPU */
    const koila_allocator *mem;
    koila_link link[4]; /* chain of the next write */
    uint32_t n_links;
} maker;

typedef struct shape {
    koila_dtype dtype;
    uint32_t n;
    int64_t size[6];
} shape;
#define SHAPE(d, ...)                                                                              \
    ((shape){                                                                                      \
        d, (uint32_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), { __VA_ARGS__ } })
#define f16(...) SHAPE(KOILA_DTYPE_F16, __VA_ARGS__)
#define f32(...) SHAPE(KOILA_DTYPE_F32, __VA_ARGS__)
#define i64(...) SHAPE(KOILA_DTYPE_I64, __VA_ARGS__)
#define scalar ((shape){ KOILA_DTYPE_F32, 0, { 0 } })
#define NO_RESULT ((shape){ KOILA_N_DTYPES, 0, { 0 } })

__attribute__((unused)) static void maker_init(maker *m, const koila_allocator *mem)
{
    memset(m, 0, sizeof *m);
    m->mem = mem;
    m->status = koila_table_new(mem, &m->table);
    if (m->status == KOILA_OK)
        m->status = koila_graph_new(m->table, mem, &m->graph);
}
__attribute__((unused)) static void maker_deinit(maker *m)
{
    koila__placed_free(m->placed);
    koila_graph_free(m->graph);
    koila_table_free(m->table);
    memset(m, 0, sizeof *m);
}
__attribute__((unused)) static koila_meta meta_of(maker *m, shape s)
{
    koila_meta id = KOILA_NONE;
    if (m->status == KOILA_OK && s.dtype != KOILA_N_DTYPES)
        m->status = koila_table_meta(m->table, s.dtype, m->device, s.n, s.size, NULL, &id);
    return id;
}
__attribute__((unused)) static uint16_t axis(maker *m, int64_t size)
{
    uint16_t a = 0;
    if (m->status == KOILA_OK)
        m->status = koila_graph_axis(m->graph, size, &a);
    return a;
}
__attribute__((unused)) static koila_value leaf(maker *m, koila_leaf_kind kind, uint16_t ax,
                                                uint32_t dim, shape s)
{
    koila_value v = 0;
    const koila_meta id = meta_of(m, s);
    if (m->status == KOILA_OK)
        m->status = koila_graph_leaf(m->graph, id, kind, ax, dim, NULL, &v);
    return v;
}
/* a batched leaf along `dim` of axis 0, which it makes when it is the first */
__attribute__((unused)) static koila_value batch(maker *m, uint32_t dim, shape s)
{
    if (m->status == KOILA_OK && koila_graph_n_axes(m->graph) == 0)
        axis(m, s.size[dim]);
    return leaf(m, KOILA_LEAF_BATCH, 0, dim, s);
}
__attribute__((unused)) static koila_value real(maker *m, shape s)
{
    return leaf(m, KOILA_LEAF_REAL, 0, 0, s);
}

static koila_value call_v(maker *m, const char *name, uint32_t flags, uint32_t n_out,
                          const shape *outs, koila_sig *sig_only, shape self, const char *fmt,
                          va_list ap)
{
    koila_arg tok[64];
    koila_value in[32], first = 0;
    uint32_t kw[8], n_tok = 0, n_in = 0, n_pos = 0, n_kw = 0;
    koila_meta out[16];
    const bool overwrites = *fmt == '!';
    const size_t dot = strcspn(name, ".");
    const bool writes = name[dot - 1] == '_';
    if (overwrites)
        fmt++;
    if (m->status != KOILA_OK)
        return 0;
    for (; *fmt; fmt++) {
        koila_arg a = { 0 };
        if (*fmt == 'k') {
            m->status = koila_table_text(m->table, va_arg(ap, const char *), &kw[n_kw]);
            if (m->status != KOILA_OK)
                return 0;
            n_kw++;
            continue;
        }
        switch (*fmt) {
        case 't':
            a.kind = KOILA_ARG_TENSOR;
            if (sig_only && n_in == 0) {
                a.u.id = meta_of(m, self);
                n_in++;
            } else {
                in[n_in] = va_arg(ap, koila_value);
                a.u.id = koila_value_get(m->graph, in[n_in++]).meta;
            }
            break;
        case 'i':
            a.kind = KOILA_ARG_INT;
            a.u.i = va_arg(ap, int);
            break;
        case 'b':
            a.kind = KOILA_ARG_BOOL;
            a.u.i = va_arg(ap, int);
            break;
        case 'd':
            a.kind = KOILA_ARG_FLOAT;
            a.u.f = va_arg(ap, double);
            break;
        case 'y':
            a.kind = KOILA_ARG_DTYPE;
            a.u.id = (uint32_t)va_arg(ap, int);
            break;
        case 'n':
            a.kind = KOILA_ARG_ABSENT;
            break;
        case 'l':
        case 'T':
            a.kind = KOILA_ARG_LIST;
            a.n = (uint32_t)va_arg(ap, int);
            tok[n_tok++] = a;
            for (uint32_t k = 0; k < a.n; k++) {
                koila_arg e = { 0 };
                if (*fmt == 'l') {
                    e.kind = KOILA_ARG_INT;
                    e.u.i = va_arg(ap, int);
                } else {
                    in[n_in] = va_arg(ap, koila_value);
                    e.kind = KOILA_ARG_TENSOR;
                    e.u.id = koila_value_get(m->graph, in[n_in++]).meta;
                }
                tok[n_tok++] = e;
            }
            if (!n_kw)
                n_pos++;
            continue;
        default:
            abort();
        }
        tok[n_tok++] = a;
        if (!n_kw)
            n_pos++;
    }
    const koila_write w = {
        .input = 0, .overwrites = overwrites, .n_links = m->n_links, .links = m->link
    };
    for (uint32_t j = 0; j < n_out; j++)
        out[j] = meta_of(m, outs[j]);
    koila_sig_info d = { .n_tokens = n_tok,
                         .n_pos = n_pos,
                         .n_kw = n_kw,
                         .tokens = tok,
                         .kw_names = kw,
                         .n_fresh = writes ? 0 : n_out,
                         .outputs = out,
                         .result_kind = n_out > 1,
                         .n_writes = writes,
                         .writes = &w,
                         .grad_mode = 1 };
    koila_sig sig;
    if (m->status == KOILA_OK)
        m->status = koila_table_op(m->table, name, flags | (writes ? KOILA_OP_INPLACE : 0), &d.op);
    if (m->status == KOILA_OK)
        m->status = koila_table_sig(m->table, &d, &sig);
    if (sig_only) {
        *sig_only = sig;
        return 0;
    }
    if (m->status == KOILA_OK)
        m->status = koila_graph_node(m->graph, sig, in, KOILA_NONE, &first);
    m->n_links = 0;
    return first;
}
__attribute__((unused)) static koila_value call(maker *m, const char *name, shape out,
                                                const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    const koila_value v = call_v(
        m, name,
        strstr(name, "empty") || strstr(name, "zeros") || strstr(name, "full") ? KOILA_OP_FACTORY
                                                                               : 0,
        1, &out, NULL, scalar, fmt, ap);
    va_end(ap);
    return v;
}
/* several results: the first; the others follow */
__attribute__((unused)) static koila_value calls(maker *m, const char *name, uint32_t n_out,
                                                 const shape *outs, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    const koila_value v = call_v(m, name, 0, n_out, outs, NULL, scalar, fmt, ap);
    va_end(ap);
    return v;
}
/* one view call more in the chain of the next write; the first 't' is the base, of shape `self`,
 * and takes no argument */
__attribute__((unused)) static void chain(maker *m, const char *name, shape self, shape out,
                                          const char *fmt, ...)
{
    va_list ap;
    koila_sig sig = 0;
    va_start(ap, fmt);
    call_v(m, name, KOILA_OP_VIEW, 1, &out, &sig, self, fmt, ap);
    va_end(ap);
    if (m->status == KOILA_OK)
        m->link[m->n_links++] = (koila_link){ sig, 0 };
}
__attribute__((unused)) static void place(maker *m, koila_value target)
{
    if (m->status == KOILA_OK)
        m->status = koila__place(m->graph, &target, 1, m->mem, &m->placed, NULL);
    if (m->status == KOILA_OK)
        CHECK(koila__placed_check(m->placed, NULL));
}
__attribute__((unused)) static void place_cut(maker *m, koila_value target)
{
    if (m->status == KOILA_OK)
        m->status = koila__place_cut(m->graph, &target, 1, m->mem, &m->placed, NULL);
    if (m->status == KOILA_OK)
        CHECK(koila__placed_check(m->placed, NULL));
}
__attribute__((unused)) static koila_placement at(const maker *m, koila_value v)
{
    return m->placed->value[m->placed->lowered[v]];
}
__attribute__((unused)) static koila_placement S(uint32_t dim, int64_t outer, int64_t inner)
{
    return (
        koila_placement){ .kind = KOILA_S, .dim = (uint8_t)dim, .outer = outer, .inner = inner };
}
static const koila_placement R_ __attribute__((unused)) = { .kind = KOILA_R },
                                P_ __attribute__((unused)) = { .kind = KOILA_P };
#define CHECK_AT(m, v, want) CHECK(koila__placement_equal(at((m), (v)), (want)))
__attribute__((unused)) static uint32_t n_gathered(const maker *m)
{
    uint32_t n = 0;
    for (uint32_t k = 0; k < koila_graph_n_nodes(m->placed->graph); k++)
        n += m->placed->node[k].gathered;
    return n;
}
__attribute__((unused)) static uint32_t n_nodes_named(const maker *m, const char *name)
{
    uint32_t n = 0;
    for (uint32_t k = 0; k < koila_graph_n_nodes(m->placed->graph); k++)
        n += strcmp(koila_op_name(
                        m->table,
                        koila_sig_get(m->table, koila_node_get(m->placed->graph, k).sig)->op),
                    name) == 0;
    return n;
}

#endif
