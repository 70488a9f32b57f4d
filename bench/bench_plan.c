/* bench_plan.c — how long planning takes: microseconds per thousand nodes, for nets of growing
 * depth, forward and backward written out as a recording has them. Ordinary layers (everything
 * shares the last loop) and layers with statistics over the batch (a barrier forward and one
 * backward each).
 *
 *   bench_plan [layers ...]           default 96 385 2000: about 5,000, 20,000 and 100,000 nodes */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "random_graph.h"

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

enum { BATCH = 64, TIME = 16, WIDTH = 256, HIDDEN = 1024 };
static koila_meta rows_meta, hidden_meta, column_meta, w1_meta, w1t_meta, w2_meta, w2t_meta,
    vector_meta, x_t_meta, h_t_meta;

static koila_value weight(random_graph *r, koila_meta m)
{
    koila_value v = 0;
    if (r->status == KOILA_OK)
        r->status = koila_graph_leaf(r->g, m, KOILA_LEAF_REAL, 0, 0, NULL, &v);
    return v;
}
#define CALL(name, out, ...) rg_call(r, name, 0, out, false, __VA_ARGS__)
#define VIEW(name, out, ...) rg_call(r, name, KOILA_OP_VIEW, out, false, __VA_ARGS__)

typedef struct layer {
    koila_value x, normal, scale, h, a, w1, w2, gain;
} layer;

/* y = x + w2 gelu(w1 norm(x)); the norm's statistics over the row, or (`over_batch`) over all rows
 */
static koila_value forward(random_graph *r, layer *l, koila_value x, bool over_batch)
{
    const koila_meta stat = over_batch ? vector_meta : column_meta;
    const int64_t dim = over_batch ? 0 : 1;
    l->x = x;
    l->w1 = weight(r, w1_meta);
    l->w2 = weight(r, w2_meta);
    l->gain = weight(r, vector_meta);
    const koila_value mean = CALL("aten::mean.dim", stat, "tlb", x, 1, dim, 1);
    const koila_value centred = CALL("aten::sub.Tensor", rows_meta, "tt", x, mean);
    const koila_value square = CALL("aten::mul.Tensor", rows_meta, "tt", centred, centred);
    const koila_value variance = CALL("aten::mean.dim", stat, "tlb", square, 1, dim, 1);
    l->scale = CALL("aten::rsqrt", stat, "t", variance);
    l->normal = CALL("aten::mul.Tensor", rows_meta, "tt", centred, l->scale);
    const koila_value gained = CALL("aten::mul.Tensor", rows_meta, "tt", l->normal, l->gain);
    l->h = CALL("aten::mm", hidden_meta, "tt", gained, VIEW("aten::t", w1t_meta, "t", l->w1));
    l->a = CALL("aten::gelu", hidden_meta, "t", l->h);
    const koila_value out =
        CALL("aten::mm", rows_meta, "tt", l->a, VIEW("aten::t", w2t_meta, "t", l->w2));
    return CALL("aten::add.Tensor", rows_meta, "tt", x, out);
}

/* Gradients of the weights are targets; returns the gradient of x. */
static koila_value backward(random_graph *r, const layer *l, koila_value g, bool over_batch,
                            koila_value *targets, uint32_t *n_targets)
{
    const koila_meta stat = over_batch ? vector_meta : column_meta;
    const int64_t dim = over_batch ? 0 : 1;
    const koila_value gw2 =
        CALL("aten::mm", w2_meta, "tt", VIEW("aten::t", x_t_meta, "t", g), l->a);
    const koila_value ga = CALL("aten::mm", hidden_meta, "tt", g, l->w2);
    const koila_value gh = CALL("aten::mul.Tensor", hidden_meta, "tt", ga,
                                CALL("aten::sigmoid", hidden_meta, "t", l->h));
    const koila_value gained = CALL("aten::mul.Tensor", rows_meta, "tt", l->normal, l->gain);
    const koila_value gw1 =
        CALL("aten::mm", w1_meta, "tt", VIEW("aten::t", h_t_meta, "t", gh), gained);
    const koila_value gn = CALL("aten::mm", rows_meta, "tt", gh, l->w1);
    const koila_value gg =
        CALL("aten::sum.dim_IntList", vector_meta, "tlb",
             CALL("aten::mul.Tensor", rows_meta, "tt", gn, l->normal), 1, (int64_t)0, 1);
    const koila_value gx = CALL("aten::mul.Tensor", rows_meta, "tt", gn, l->gain);
    const koila_value m1 = CALL("aten::mean.dim", stat, "tlb", gx, 1, dim, 1);
    const koila_value m2 =
        CALL("aten::mean.dim", stat, "tlb",
             CALL("aten::mul.Tensor", rows_meta, "tt", gx, l->normal), 1, dim, 1);
    const koila_value d =
        CALL("aten::sub.Tensor", rows_meta, "tt", CALL("aten::sub.Tensor", rows_meta, "tt", gx, m1),
             CALL("aten::mul.Tensor", rows_meta, "tt", l->normal, m2));
    targets[(*n_targets)++] = gw1;
    targets[(*n_targets)++] = gw2;
    targets[(*n_targets)++] = gg;
    return CALL("aten::add.Tensor", rows_meta, "tt", g,
                CALL("aten::mul.Tensor", rows_meta, "tt", d, l->scale));
}

static int ignore(void *user, const char *s, size_t n)
{
    (void)s;
    *(size_t *)user += n;
    return 0;
}

/* The same planned on a GPU's live cache, in which every fourth of 40 blocks is handed out: one
 * simulated step, and a plan with what it asks. */
static void run_live(random_graph *r, const koila_value *targets, uint32_t n_targets,
                     uint64_t whole)
{
    koila_cache_config conf;
    koila_cache *live = NULL;
    koila_device *d = NULL;
    koila_error err = KOILA_ERROR_INIT;
    uint64_t addr[40];
    koila_cache_config_init(&conf, NULL);
    conf.device_bytes = (uint64_t)1 << 45;
    if (koila_device_builtin("a100-40gb", NULL, &d, &err) ||
        koila_cache_new(&conf, NULL, &live, &err))
        exit(1);
    for (int i = 0; i < 40; i++)
        if (koila_cache_malloc(live, 9u << 20, 0, KOILA_POOL_DEFAULT, &addr[i]))
            exit(1);
    for (int i = 0; i < 40; i++)
        if (i % 4)
            koila_cache_release(live, addr[i]);
    for (int k = 0; k < 3; k++) {
        static const char *const names[] = { "it fits", "half the memory", "a sixth" };
        static const uint64_t shares[] = { 200, 50, 17 };
        koila_plan_options o = { .struct_size = sizeof o, .budget_bytes = UINT64_MAX };
        koila_plan *p = NULL;
        koila_fit fit = { 0 }, one = { 0 };
        double best = 0, best_one = 0;
        koila_status status = KOILA_OK;
        koila_cache_set_limit(live, ((uint64_t)420 << 20) + whole / 100 * shares[k], 0, 0);
        for (int i = 0; i < 5; i++) {
            koila_plan_free(p);
            p = NULL;
            const double a = now_us();
            status =
                koila_plan_live(r->g, targets, n_targets, &o, d, live, NULL, NULL, &p, &fit, &err);
            const double b = now_us();
            if (!p || koila_fits_plan(p, d, live, NULL, &one, &err))
                break;
            const double c = now_us();
            if (i == 0 || b - a < best)
                best = b - a;
            if (i == 0 || c - b < best_one)
                best_one = c - b;
        }
        if (p)
            printf("  live, %-15s %6.2f ms a simulation, %6.2f ms a plan: %u simulations, %u "
                   "slices, %s\n",
                   names[k], best_one / 1e3, best / 1e3, fit.n_simulations,
                   koila_plan_get(p).n_slices, fit.fits ? "fits" : "does not fit");
        else
            printf("  live, %-15s %s %s\n", names[k], koila_status_name(status), err.text);
        koila_plan_free(p);
    }
    koila_cache_free(live);
    koila_device_free(d);
}

static void run(uint32_t n_layers, bool over_batch)
{
    random_graph rg = { 0 }, *r = &rg;
    uint16_t axis;
    r->status = koila_table_new(NULL, &r->t);
    if (r->status == KOILA_OK)
        r->status = koila_graph_new(r->t, NULL, &r->g);
    const int64_t N = (int64_t)BATCH * TIME;
#define SHAPE2(a, b) rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ a, b }, NULL)
#define SHAPE2_T(a, b) rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ a, b }, (int64_t[]){ 1, a })
    rows_meta = SHAPE2(N, WIDTH);
    hidden_meta = SHAPE2(N, HIDDEN);
    column_meta = SHAPE2(N, 1);
    vector_meta = SHAPE2(1, WIDTH);
    w1_meta = SHAPE2(HIDDEN, WIDTH);
    w2_meta = SHAPE2(WIDTH, HIDDEN);
    w1t_meta = SHAPE2_T(WIDTH, HIDDEN);
    w2t_meta = SHAPE2_T(HIDDEN, WIDTH);
    x_t_meta = SHAPE2_T(WIDTH, N);
    h_t_meta = SHAPE2_T(HIDDEN, N);
    koila_value x = 0;
    const koila_meta in = rg_shape(r, KOILA_DTYPE_F32, 3, (int64_t[]){ BATCH, TIME, WIDTH }, NULL);
    if (r->status == KOILA_OK)
        r->status = koila_graph_axis(r->g, BATCH, &axis);
    if (r->status == KOILA_OK)
        r->status = koila_graph_leaf(r->g, in, KOILA_LEAF_BATCH, 0, 0, NULL, &x);
    layer *layers = calloc(n_layers, sizeof *layers);
    koila_value *targets = calloc(3 * n_layers + 1, sizeof *targets);
    uint32_t n_targets = 0;
    const double t0 = now_us();
    x = VIEW("aten::view", rows_meta, "tl", x, 2, N, (int64_t)WIDTH);
    for (uint32_t i = 0; i < n_layers; i++)
        x = forward(r, &layers[i], x, over_batch);
    targets[n_targets++] =
        CALL("aten::sum.dim_IntList", SHAPE2(1, 1), "tlb", x, 2, (int64_t)0, (int64_t)1, 1);
    for (uint32_t i = n_layers; i-- > 0;)
        x = backward(r, &layers[i], x, over_batch, targets, &n_targets);
    const double t1 = now_us();
    if (r->status != KOILA_OK) {
        printf("graph: %s\n", koila_status_name(r->status));
        exit(1);
    }
    const double thousands = koila_graph_n_nodes(r->g) / 1e3;
    printf("%s, %u layers, %u nodes: recorded %.0f us per 1000 nodes\n",
           over_batch ? "statistics over the batch" : "ordinary", n_layers,
           koila_graph_n_nodes(r->g), (t1 - t0) / thousands);
    uint64_t whole = 0;
    for (int k = 0; k < 5; k++) {
        static const char *const names[] = { "whole", "half the memory", "a sixth",
                                             "one row a slice", "nothing fits" };
        koila_plan_options o = { .struct_size = sizeof o, .budget_bytes = UINT64_MAX };
        koila_error err = KOILA_ERROR_INIT;
        koila_plan *p = NULL;
        if (k == 1)
            o.budget_bytes = whole / 2;
        if (k == 2)
            o.budget_bytes = whole / 6;
        if (k == 3)
            o.rows = 1;
        if (k == 4) {
            o.budget_bytes = 1;
            o.recomputes = true;
        }
        double best = 0;
        koila_status status = KOILA_OK;
        for (int i = 0; i < 3; i++) {
            koila_plan_free(p);
            p = NULL;
            const double a = now_us();
            status = koila_plan_new(r->g, targets, n_targets, &o, NULL, &p, &err);
            const double b = now_us() - a;
            if (i == 0 || b < best)
                best = b;
        }
        if (!p) {
            printf("  %-16s %8.0f us per 1000 nodes: %s %s\n", names[k], best / thousands,
                   koila_status_name(status), err.text);
            continue;
        }
        const koila_plan_info info = koila_plan_get(p);
        if (k == 0)
            whole = info.peak_bytes;
        printf("  %-16s %8.0f us per 1000 nodes: %u slices, %u loops, work %.2f, peak %.1f MiB\n",
               names[k], best / thousands, info.n_slices, info.n_loops, info.replay_ratio,
               (double)info.peak_bytes / 1048576);
        koila_plan_free(p);
    }
    run_live(r, targets, n_targets, whole);
    size_t n_text = 0;
    const double t2 = now_us();
    koila_graph_print(r->g, ignore, &n_text);
    printf("  text: %.1f MiB, %.0f us per 1000 nodes\n", (double)n_text / 1048576,
           (now_us() - t2) / thousands);
    free(layers);
    free(targets);
    rg_deinit(r);
}

int main(int argc, char **argv)
{
    const uint32_t usual[] = { 180, 720, 3600 };
    for (int over_batch = 0; over_batch < 2; over_batch++)
        for (int i = 0; i < (argc > 1 ? argc - 1 : 3); i++)
            run(argc > 1 ? (uint32_t)atoi(argv[i + 1]) : usual[i], over_batch);
    return 0;
}
