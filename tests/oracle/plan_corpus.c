/* plan_corpus.c — one hash of very many plans, to show that a change of the planner changed none.
 *
 * It makes random steps: those of random_graph.h; the same with bf16, larger batches and tensors
 * that are transposed, expanded or have gaps; and nets, forward and backward. It also reads the
 * graphs named on the command line. Each graph is planned under every entry of `cases`: budget,
 * rows, keep policy, workspace, `accepts`. Everything that the public interface tells about a plan
 * goes into the hash, its print and drawing included. A refusal goes in with its status; the texts
 * of refusals have a hash of their own. Only koila.h is used, so the same source builds against two
 * trees:
 *
 *     for tree in old new; do
 *         cc -O2 -D_GNU_SOURCE -I $tree/include -I tests/unit tests/oracle/plan_corpus.c \
 *            $tree/build/libkoila_core.a -lm -o corpus_$tree
 *         ./corpus_$tree 2100 tests/data/mlp.kgraph tests/data/encoder.kgraph > $tree.txt
 *     done
 *     diff old.txt new.txt
 *
 * For the tree at hand `ninja -C build plan_corpus` builds it. Usage:
 *
 *     plan_corpus [graphs [file.kgraph ...]]   a line for every 10 graphs and every file, and sums
 *     plan_corpus seed <n>                     a line for every case of graph n: which one differs
 *     plan_corpus seed <n> <case>              the graph and the plan of one case, as text
 */
#include <inttypes.h>
#include <stdio.h>

#include "random_graph.h"

enum { N_GRAPHS = 2100, N_A_LINE = 10, MAX_TARGETS = 4, MAX_GRAPH_NODES = 5000 };

/* ---- the hash */

static void mix(uint64_t *h, uint64_t word)
{
    *h = (*h ^ word) * 0x9e3779b97f4a7c15u;
    *h ^= *h >> 29;
}

static int mix_text(void *user, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        mix(user, (uint8_t)text[i]);
    return 0;
}

static void mix_double(uint64_t *h, double d)
{
    uint64_t word;
    memcpy(&word, &d, sizeof word);
    mix(h, word);
}

static void mix_share(uint64_t *h, koila_share s)
{
    mix(h, s.kind);
    mix(h, s.partial);
    mix(h, s.dim);
    mix(h, s.axis);
    mix(h, (uint64_t)s.outer);
    mix(h, (uint64_t)s.inner);
}

static void mix_info(uint64_t *h, koila_plan_info info)
{
    mix(h, (uint64_t)info.batch);
    mix(h, (uint64_t)info.rows);
    mix(h, info.n_slices);
    mix(h, info.peak_bytes);
    mix(h, info.budget_bytes);
    mix(h, info.n_stages);
    mix(h, info.n_loops);
    mix(h, info.n_recorded);
    mix_double(h, info.replay_ratio);
    mix(h, info.n_gathers);
    mix(h, info.peak_node);
}

static void mix_stage(uint64_t *h, const koila_plan *p, const koila_stage *s)
{
    mix(h, s->is_loop);
    mix(h, s->axis);
    mix(h, s->n_instrs);
    for (uint32_t i = 0; i < s->n_instrs; i++) {
        const koila_instr in = s->instrs[i];
        mix(h, in.kind);
        mix(h, in.flags);
        mix(h, in.steal);
        mix(h, in.id);
        if (in.kind == KOILA_DO_SLICE) {
            mix(h, in.user);
            mix_share(h, koila_plan_need(p, in.user, in.steal));
        }
    }
}

static void mix_adapts(uint64_t *h, const koila_plan *p, koila_node n, int32_t link, int64_t rows)
{
    koila_adapt adapts[KOILA_MAX_ADAPTS];
    const uint32_t n_adapts = koila_plan_adapt(p, n, link, rows, adapts);
    mix(h, n_adapts);
    for (uint32_t i = 0; i < n_adapts; i++) {
        const koila_adapt *a = &adapts[i];
        const bool has_ints = a->kind == KOILA_ADAPT_INTS || a->kind == KOILA_ADAPT_INT ||
                              a->kind == KOILA_ADAPT_SQUEEZE;
        mix(h, a->kind);
        if (a->kind == KOILA_ADAPT_INTS || a->kind == KOILA_ADAPT_INT)
            mix(h, a->arg);
        if (a->kind == KOILA_ADAPT_SCALE)
            mix(h, a->output);
        if (!has_ints)
            continue;
        mix(h, a->n);
        for (uint32_t k = 0; k < (a->kind == KOILA_ADAPT_INT ? 1 : a->n); k++)
            mix(h, (uint64_t)a->ints[k]);
    }
}

static void mix_node(uint64_t *h, const koila_plan *p, koila_node n)
{
    const koila_graph *g = koila_plan_graph(p);
    const koila_sig_info *sig = koila_sig_get(koila_graph_table(g), koila_node_get(g, n).sig);
    const bool in_loop = koila_plan_in_loop(p, n);
    const int64_t rows = koila_plan_get(p).rows;
    mix(h, koila_plan_recorded(p, n));
    mix(h, in_loop);
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        mix_share(h, koila_plan_need(p, n, i));
    if (!in_loop)
        return;
    mix_adapts(h, p, n, -1, rows);
    mix_adapts(h, p, n, -1, 1);
    for (uint32_t w = 0; w < sig->n_writes; w++)
        for (uint32_t link = 0; link < sig->writes[w].n_links; link++)
            mix_adapts(h, p, n, (int32_t)link, rows);
}

static void mix_gather(uint64_t *h, koila_gather x)
{
    mix(h, x.node);
    mix(h, x.value);
    mix(h, x.bytes);
}

/* What is there of a plan when `accepts` is asked too. */
static void mix_schedule(uint64_t *h, const koila_plan *p, uint32_t n_targets)
{
    const koila_graph *g = koila_plan_graph(p);
    const koila_plan_info info = koila_plan_get(p);
    mix(h, info.n_stages);
    for (uint32_t k = 0; k < info.n_stages; k++)
        mix_stage(h, p, koila_plan_stage(p, k));
    for (uint32_t i = 0; i < n_targets; i++)
        mix(h, koila_plan_target(p, i));
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++)
        mix_node(h, p, n);
    for (koila_value v = 0; v < koila_graph_n_values(g); v++) {
        mix_share(h, koila_plan_share(p, v));
        mix(h, koila_plan_value_bytes(p, v, info.rows));
    }
}

static uint64_t hash_plan(const koila_plan *p, uint32_t n_targets)
{
    enum { N_POINTS = 64, N_LARGEST = 8 };
    uint64_t h = 1;
    koila_curve_point points[N_POINTS];
    koila_gather largest[N_LARGEST];
    const koila_graph *g = koila_plan_graph(p);
    const koila_plan_info info = koila_plan_get(p);
    mix_info(&h, info);
    mix_schedule(&h, p, n_targets);
    for (uint32_t k = 0; k < info.n_stages; k++)
        mix(&h, koila_plan_stage(p, k)->peak_bytes);
    for (uint16_t a = 0; a < koila_graph_n_axes(g); a++) {
        mix(&h, koila_plan_slices(p, a));
        mix(&h, (uint64_t)koila_plan_axis_rows(p, a));
    }
    for (uint32_t i = 0; i < info.n_gathers; i++)
        mix_gather(&h, koila_plan_gather(p, i));
    const uint32_t n_points = koila_plan_curve(p, points, N_POINTS);
    for (uint32_t i = 0; i < n_points; i++) {
        mix(&h, points[i].stage);
        mix(&h, points[i].node);
        mix(&h, points[i].bytes);
    }
    const uint32_t n_largest = koila_plan_largest(p, largest, N_LARGEST);
    for (uint32_t i = 0; i < n_largest; i++)
        mix_gather(&h, largest[i]);
    if (koila_plan_print(p, mix_text, &h) || koila_plan_dot(p, mix_text, &h) ||
        koila_graph_print(g, mix_text, &h))
        abort();
    return h;
}

/* ---- the graphs */

/* Rows contiguous, columns contiguous, with gaps between rows, with gaps between elements, or one
 * row for all. */
static void set_strides(random_graph *r, const int64_t *size, int64_t *stride)
{
    static const int64_t row_factor[] = { 1, 1, 2, 2, 0 };
    static const int64_t column[] = { 1, 1, 1, 2, 1 };
    const uint32_t form = rg_pick(r, 5);
    const bool transposed = form == 1;
    stride[0] = transposed ? 1 : row_factor[form] * (size[1] > 1 ? size[1] : 1);
    stride[1] = transposed ? (size[0] > 1 ? size[0] : 1) : column[form];
}

static void strided_leaf(random_graph *r, koila_leaf_kind kind, uint16_t axis, uint32_t dim,
                         koila_dtype dtype, const int64_t *size)
{
    int64_t stride[2];
    koila_value v = 0;
    set_strides(r, size, stride);
    const koila_meta m = rg_shape(r, dtype, 2, size, stride);
    if (r->status == KOILA_OK)
        r->status = koila_graph_leaf(r->g, m, kind, axis, dim, NULL, &v);
    if (r->status != KOILA_OK)
        return;
    r->is_view[r->n_values] = 1;
    r->values[r->n_values++] = v;
}

/* A pointwise call whose result is laid out in an unusual way. */
static void strided_step(random_graph *r)
{
    int64_t stride[2];
    const koila_value v = rg_value(r, 2, false, false);
    if (v == KOILA_NONE)
        return;
    const koila_meta_info *m = rg_meta(r, v);
    const int64_t size[2] = { m->size[0], m->size[1] };
    const koila_dtype dtype = m->dtype;
    set_strides(r, size, stride);
    if (stride[0] == 0)
        stride[0] = size[1] > 1 ? size[1] : 1;
    rg_call(r, "aten::relu", 0, rg_shape(r, dtype, 2, size, stride), false, "t", v);
}

/* As rg_init(), with half precisions of both kinds, larger batches and any strides. */
static void strided_init(random_graph *r, uint64_t seed, uint32_t n_steps)
{
    static const koila_dtype dtypes[] = { KOILA_DTYPE_BF16, KOILA_DTYPE_F16, KOILA_DTYPE_F32,
                                          KOILA_DTYPE_BF16, KOILA_DTYPE_F64 };
    rg_begin(r, NULL, seed);
    const uint32_t n_axes = 1 + (rg_pick(r, 3) == 0);
    const int64_t rows = 1 + rg_pick(r, seed % 3 ? 9 : 40);
    const int64_t extent[] = { rows, n_axes > 1 ? rows + 3 : 2, 3, rows, 1, 8 };
    memcpy(r->extent, extent, sizeof extent);
    const koila_dtype dtype = dtypes[rg_pick(r, 5)];
    for (uint32_t k = 0; k < n_axes && r->status == KOILA_OK; k++) {
        rg_axis(r, extent[k]);
        for (int i = 0; i < 3; i++) {
            const uint32_t dim = rg_pick(r, 3) == 0;
            int64_t size[2];
            size[dim] = extent[k];
            size[!dim] = extent[2 + rg_pick(r, 4)];
            strided_leaf(r, KOILA_LEAF_BATCH, (uint16_t)k, dim, dtype, size);
        }
    }
    strided_leaf(r, KOILA_LEAF_REAL, 0, 0, dtype, (int64_t[]){ 3, 8 });
    for (uint32_t i = 0; i < n_steps * 2 && r->status == KOILA_OK &&
                         koila_graph_n_nodes(r->g) < n_steps && r->n_values < RG_MAX_VALUES - 2;
         i++) {
        if (rg_pick(r, 8) == 0)
            strided_step(r);
        else
            rg_step(r);
    }
    const uint32_t n_wanted = 1 + rg_pick(r, 3);
    for (uint32_t i = 0; i < n_wanted; i++)
        r->targets[r->n_targets++] = r->values[r->n_values - 1 - rg_pick(r, r->n_values) / 3];
}

/* What net_init() keeps of a layer for its way back. */
typedef struct net_layer {
    uint32_t kind;
    koila_value in, weight;
} net_layer;
enum { LINEAR, LINEAR_RELU, OVER_BATCH, OVER_ROW, N_LAYER_KINDS, MAX_LAYERS = 14 };

static koila_value net_real(random_graph *r, koila_meta m)
{
    koila_value v = 0;
    if (r->status == KOILA_OK)
        r->status = koila_graph_leaf(r->g, m, KOILA_LEAF_REAL, 0, 0, NULL, &v);
    return v;
}

/* x minus its sum over `dim`: over the batch a barrier. */
static koila_value centred(random_graph *r, koila_value x, koila_meta m, koila_meta sums,
                           int64_t dim)
{
    const koila_value sum =
        rg_call(r, "aten::sum.dim_IntList", 0, sums, false, "tlb", x, 1, dim, 1);
    return rg_call(r, "aten::sub.Tensor", 0, m, false, "tt", x, sum);
}

/* A step as models have them: layers forward, some with statistics over the batch, and backward,
 * with the gradient of each weight a target. */
static void net_init(random_graph *r, uint64_t seed)
{
    static const koila_dtype dtypes[] = { KOILA_DTYPE_F32, KOILA_DTYPE_F16, KOILA_DTYPE_BF16 };
    rg_begin(r, NULL, seed);
    net_layer layers[MAX_LAYERS];
    const uint32_t n_layers = 1 + rg_pick(r, MAX_LAYERS);
    const koila_dtype dtype = dtypes[rg_pick(r, 3)];
    const int64_t rows = rg_pick(r, 2) ? (int64_t)4 << rg_pick(r, 5) : 3 + rg_pick(r, 40);
    const int64_t width = 2 + rg_pick(r, 7);
    const koila_meta x_meta = rg_shape(r, dtype, 2, (int64_t[]){ rows, width }, NULL);
    const koila_meta x_t_meta =
        rg_shape(r, dtype, 2, (int64_t[]){ width, rows }, (int64_t[]){ 1, width });
    const koila_meta w_meta = rg_shape(r, dtype, 2, (int64_t[]){ width, width }, NULL);
    const koila_meta w_t_meta =
        rg_shape(r, dtype, 2, (int64_t[]){ width, width }, (int64_t[]){ 1, width });
    const koila_meta row_meta = rg_shape(r, dtype, 2, (int64_t[]){ 1, width }, NULL);
    const koila_meta column_meta = rg_shape(r, dtype, 2, (int64_t[]){ rows, 1 }, NULL);
    koila_value x = 0;
    rg_axis(r, rows);
    if (r->status == KOILA_OK)
        r->status = koila_graph_leaf(r->g, x_meta, KOILA_LEAF_BATCH, 0, 0, NULL, &x);
    for (uint32_t i = 0; i < n_layers; i++) {
        net_layer *l = &layers[i];
        *l = (net_layer){ .kind = rg_pick(r, N_LAYER_KINDS), .in = x };
        if (l->kind <= LINEAR_RELU) {
            l->weight = net_real(r, w_meta);
            x = rg_call(r, "aten::mm", 0, x_meta, false, "tt", x, l->weight);
        }
        if (l->kind == LINEAR_RELU)
            x = rg_call(r, "aten::relu", 0, x_meta, false, "t", x);
        if (l->kind == OVER_BATCH)
            x = centred(r, x, x_meta, row_meta, 0);
        if (l->kind == OVER_ROW)
            x = centred(r, x, x_meta, column_meta, 1);
    }
    koila_value g = rg_call(r, "aten::mul.Tensor", 0, x_meta, false, "tt", x, x);
    r->targets[r->n_targets++] =
        rg_call(r, "aten::sum.dim_IntList", 0, row_meta, false, "tlb", g, 1, (int64_t)0, 1);
    for (uint32_t i = n_layers; i-- > 0;) {
        const net_layer *l = &layers[i];
        if (l->kind <= LINEAR_RELU) {
            const koila_value in_t =
                rg_call(r, "aten::t", KOILA_OP_VIEW, x_t_meta, false, "t", l->in);
            r->targets[r->n_targets++] = rg_call(r, "aten::mm", 0, w_meta, false, "tt", in_t, g);
            const koila_value w_t =
                rg_call(r, "aten::t", KOILA_OP_VIEW, w_t_meta, false, "t", l->weight);
            g = rg_call(r, "aten::mm", 0, x_meta, false, "tt", g, w_t);
        } else {
            const bool over_batch = l->kind == OVER_BATCH;
            g = rg_call(r, "aten::mul.Tensor", 0, x_meta, false, "tt", g, l->in);
            g = centred(r, g, x_meta, over_batch ? row_meta : column_meta, !over_batch);
        }
    }
}

static void make_graph(random_graph *r, uint64_t seed)
{
    const uint32_t n_steps = seed % 25 == 0 ? 180 : seed % 4 == 0 ? 60 : 6 + (uint32_t)(seed % 25);
    if (seed % 5 >= 3)
        net_init(r, seed);
    else if (seed % 2)
        strided_init(r, seed, n_steps);
    else
        rg_init(r, NULL, seed, NULL, 0, n_steps);
    if (r->status != KOILA_OK)
        abort();
}

static void read_graph(random_graph *r, const char *path)
{
    koila_error err = KOILA_ERROR_INIT;
    memset(r, 0, sizeof *r);
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END)) {
        fprintf(stderr, "plan_corpus: cannot read %s\n", path);
        exit(1);
    }
    const size_t n = (size_t)ftell(f);
    char *text = malloc(n + 1);
    rewind(f);
    if (!text || fread(text, 1, n, f) != n || koila_table_new(NULL, &r->t) ||
        koila_graph_parse(r->t, text, n, &r->g, &err)) {
        fprintf(stderr, "plan_corpus: %s: %s\n", path, err.text);
        exit(1);
    }
    fclose(f);
    free(text);
    if (koila_graph_n_nodes(r->g) > MAX_GRAPH_NODES)
        exit(1);
    for (koila_value v = koila_graph_n_values(r->g); v-- > 0 && r->n_targets < MAX_TARGETS;)
        if (koila_value_get(r->g, v).meta != KOILA_NONE)
            r->targets[r->n_targets++] = v;
}

/* ---- the cases */

enum { ALL_MEMORY = 16 }; /* of the budget: sixteenths of what the whole step needs */
typedef struct corpus_case {
    int sixteenths; /* ALL_MEMORY and rows 0: no budget; -1: no budget */
    int rows;       /* -1: all */
    int keep;
    bool workspace;
    int accepts; /* 0: not asked; n: every n-th plan is taken */
} corpus_case;

#define EACH_KEEP(sixteenths, rows)                                                                \
    { sixteenths, rows, KOILA_KEEP_AUTO, false, 0 },                                               \
        { sixteenths, rows, KOILA_KEEP_ALL, false, 0 },                                            \
        { sixteenths, rows, KOILA_KEEP_NONE, false, 0 }
static const corpus_case cases[] = {
    EACH_KEEP(-1, 0),
    EACH_KEEP(-1, 1),
    EACH_KEEP(-1, 2),
    EACH_KEEP(-1, 3),
    EACH_KEEP(-1, 5),
    EACH_KEEP(-1, -1),
    EACH_KEEP(14, 0),
    EACH_KEEP(12, 0),
    EACH_KEEP(8, 0),
    EACH_KEEP(5, 0),
    EACH_KEEP(3, 0),
    EACH_KEEP(0, 0),
    EACH_KEEP(8, 1),
    EACH_KEEP(12, 2),
    { -1, 0, KOILA_KEEP_AUTO, true, 0 },
    { 12, 0, KOILA_KEEP_AUTO, true, 0 },
    { 8, 0, KOILA_KEEP_ALL, true, 0 },
    { -1, 2, KOILA_KEEP_AUTO, true, 0 },
    { -1, 0, KOILA_KEEP_AUTO, false, 2 },
    { -1, 0, KOILA_KEEP_AUTO, false, 5 },
    { 14, 0, KOILA_KEEP_AUTO, false, 3 },
    { 10, 0, KOILA_KEEP_AUTO, true, 1000 },
    { 10, 0, KOILA_KEEP_NONE, false, 4 },
    { 10, 2, KOILA_KEEP_AUTO, false, 2 },
};
enum { N_CASES = sizeof cases / sizeof *cases };

static uint64_t workspace(void *user, koila_sig sig, int64_t rows, int64_t batch)
{
    (void)user;
    return (sig % 5) * 16 * (uint64_t)(batch ? rows : 7);
}

typedef struct accepter {
    uint64_t hash; /* of the plans it was asked about */
    uint32_t n_asked, every, n_targets;
} accepter;

static bool accepts(void *user, const koila_plan *p)
{
    accepter *a = user;
    const koila_plan_info info = koila_plan_get(p);
    mix(&a->hash, (uint64_t)info.rows);
    mix(&a->hash, info.n_slices);
    mix(&a->hash, info.peak_bytes);
    mix_schedule(&a->hash, p, a->n_targets);
    a->n_asked++;
    return a->n_asked % a->every == 0;
}

static uint64_t whole_bytes(const random_graph *r)
{
    koila_plan_options o = { .struct_size = sizeof o, .budget_bytes = UINT64_MAX };
    koila_plan *p = NULL;
    if (koila_plan_new(r->g, r->targets, r->n_targets, &o, NULL, &p, NULL))
        return 0;
    const uint64_t bytes = koila_plan_get(p).peak_bytes;
    koila_plan_free(p);
    return bytes;
}

static int show(void *user, const char *text, size_t n)
{
    (void)user;
    fwrite(text, 1, n, stdout);
    return 0;
}

/* What the cases came to: a corpus that never meets a thing says nothing about it. */
static struct {
    uint64_t plans, refused, sliced, loops, keeps, gathers, wide_sums, asked;
} seen;

static uint64_t refusals = 1; /* hash of their texts */

static void see(const koila_plan *p)
{
    const koila_graph *g = koila_plan_graph(p);
    const koila_plan_info info = koila_plan_get(p);
    bool keeps = false;
    bool wide = false;
    for (uint32_t k = 0; k < info.n_stages; k++) {
        const koila_stage *s = koila_plan_stage(p, k);
        for (uint32_t i = 0; i < s->n_instrs; i++) {
            const koila_instr in = s->instrs[i];
            keeps |= in.kind == KOILA_DO_KEEP;
            if (in.kind != KOILA_DO_ADD || info.n_slices < 2)
                continue;
            const koila_meta_info *m =
                koila_meta_get(koila_graph_table(g), koila_value_get(g, in.id).meta);
            wide |= m->dtype == KOILA_DTYPE_F16 || m->dtype == KOILA_DTYPE_BF16;
        }
    }
    seen.plans++;
    seen.sliced += info.n_slices > 1;
    seen.loops += info.n_loops > 1;
    seen.keeps += keeps;
    seen.gathers += info.n_gathers > 0;
    seen.wide_sums += wide;
}

static uint64_t run_case(const random_graph *r, const corpus_case *c, uint64_t whole, bool loud)
{
    koila_plan_options o = { .struct_size = sizeof o,
                             .budget_bytes = UINT64_MAX,
                             .keep = (uint32_t)c->keep,
                             .rows = c->rows };
    accepter a = { 1, 0, (uint32_t)c->accepts, r->n_targets };
    koila_error err = KOILA_ERROR_INIT;
    koila_plan *p = NULL;
    if (c->sixteenths >= 0)
        o.budget_bytes = whole * (uint64_t)c->sixteenths / ALL_MEMORY;
    if (c->rows < 0)
        o.rows = koila_graph_n_axes(r->g) ? koila_graph_axis_size(r->g, 0) : 1;
    if (c->workspace)
        o.workspace = workspace;
    if (c->accepts) {
        o.accepts = accepts;
        o.accepts_user = &a;
    }
    const koila_status status = koila_plan_new(r->g, r->targets, r->n_targets, &o, NULL, &p, &err);
    uint64_t h = a.hash;
    mix(&h, status);
    mix(&h, a.n_asked);
    seen.asked += a.n_asked;
    if (status == KOILA_OK) {
        if (!koila_plan_check(p, &err))
            abort();
        mix(&h, hash_plan(p, r->n_targets));
        see(p);
    } else {
        seen.refused++;
        mix(&h, err.offset);
        mix_text(&refusals, err.text, strlen(err.text));
    }
    if (loud && status == KOILA_OK)
        koila_plan_print(p, show, NULL);
    else if (loud)
        printf("%s: %s\n", koila_status_name(status), err.text);
    koila_plan_free(p);
    return h;
}

static uint64_t run_graph(const random_graph *r)
{
    uint64_t h = 1;
    const uint64_t whole = whole_bytes(r);
    for (int i = 0; i < N_CASES; i++)
        mix(&h, run_case(r, &cases[i], whole, false));
    return h;
}

static int show_seed(uint64_t seed, int only)
{
    random_graph r;
    make_graph(&r, seed);
    const uint64_t whole = whole_bytes(&r);
    if (only >= 0 && only < N_CASES) {
        koila_graph_print(r.g, show, NULL);
        run_case(&r, &cases[only], whole, true);
    } else {
        for (int i = 0; i < N_CASES; i++)
            printf("case %2d %016" PRIx64 "\n", i, run_case(&r, &cases[i], whole, false));
    }
    rg_deinit(&r);
    return 0;
}

int main(int argc, char **argv)
{
    uint64_t total = 1, line = 1, n = 0;
    random_graph r;
    if (argc > 2 && strcmp(argv[1], "seed") == 0)
        return show_seed(strtoull(argv[2], NULL, 10), argc > 3 ? atoi(argv[3]) : -1);
    const uint64_t n_graphs = argc > 1 ? strtoull(argv[1], NULL, 10) : N_GRAPHS;
    for (uint64_t seed = 1; seed <= n_graphs; seed++) {
        make_graph(&r, seed);
        mix(&line, run_graph(&r));
        n += N_CASES;
        rg_deinit(&r);
        if (seed % N_A_LINE && seed != n_graphs)
            continue;
        printf("seeds to %5" PRIu64 " %016" PRIx64 "\n", seed, line);
        mix(&total, line);
        line = 1;
    }
    for (int i = 2; i < argc; i++) {
        const char *slash = strrchr(argv[i], '/');
        read_graph(&r, argv[i]);
        const uint64_t h = run_graph(&r);
        printf("%s %016" PRIx64 "\n", slash ? slash + 1 : argv[i], h);
        mix(&total, h);
        n += N_CASES;
        rg_deinit(&r);
    }
    printf("%" PRIu64 " plans: %" PRIu64 " in slices, %" PRIu64 " in several loops, %" PRIu64
           " keep, %" PRIu64 " gather, %" PRIu64 " add halves; %" PRIu64 " refused; %" PRIu64
           " asked about\n",
           seen.plans, seen.sliced, seen.loops, seen.keeps, seen.gathers, seen.wide_sums,
           seen.refused, seen.asked);
    printf("texts of refusals %016" PRIx64 "\n", refusals);
    printf("total of %" PRIu64 " cases %016" PRIx64 "\n", n, total);
    return 0;
}
