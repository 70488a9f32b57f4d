/* bench_plan.c — how long planning takes: microseconds per thousand nodes, for nets of growing
 * depth, forward and backward written out as a recording has them. Ordinary layers (everything
 * shares the last loop) and layers with statistics over the batch (a barrier forward and one
 * backward each).
 *
 *   bench_plan [layers ...]           default 180 720 3600: about 6,000, 24,000 and 119,000 nodes
 *   bench_plan ladders [layers ...]   each way to plan by itself; default 9 36 180: 300 to 6,000
 *   bench_plan graphs <file.kgraph ...>
 *       recorded steps, which Plan.save() writes, planned below one row: ms per thousand nodes at
 *       budgets that are the results and so much of what the whole step needs beyond them
 *   bench_plan least <file.kgraph ...>
 *       how much the least budget in which they fit has beyond the results, as a part of what
 *       slices of one row need beyond them
 *   bench_plan once <way> <layers>    one of them, planned once, to count its instructions:
 *       valgrind --tool=callgrind --toggle-collect=koila_plan_new build/bench_plan once both 36 */
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

#define MIB 1048576.0

enum { BATCH = 64, TIME = 16, WIDTH = 256, HIDDEN = 1024 };
static koila_meta rows_meta, hidden_meta, w1_meta, w1t_meta, w2_meta, w2t_meta, vector_meta,
    x_t_meta, h_t_meta;

#define CALL(name, out, ...) rg_call(r, name, 0, out, false, __VA_ARGS__)
#define VIEW(name, out, ...) rg_call(r, name, KOILA_OP_VIEW, out, false, __VA_ARGS__)

typedef struct layer {
    rg_norm norm;
    koila_value h, a, w1, w2, gain;
} layer;

/* y = x + w2 gelu(w1 norm(x)); statistics over the row, or (`over_batch`) over all rows */
static koila_value forward(random_graph *r, layer *l, koila_value x, bool over_batch)
{
    l->w1 = rg_weight(r, HIDDEN, WIDTH);
    l->w2 = rg_weight(r, WIDTH, HIDDEN);
    l->gain = rg_weight(r, 1, WIDTH);
    l->norm = rg_normalise(r, x, over_batch ? 0 : 1);
    const koila_value gained = CALL("aten::mul.Tensor", rows_meta, "tt", l->norm.normal, l->gain);
    l->h = CALL("aten::mm", hidden_meta, "tt", gained, VIEW("aten::t", w1t_meta, "t", l->w1));
    l->a = CALL("aten::gelu", hidden_meta, "t", l->h);
    const koila_value out =
        CALL("aten::mm", rows_meta, "tt", l->a, VIEW("aten::t", w2t_meta, "t", l->w2));
    return CALL("aten::add.Tensor", rows_meta, "tt", x, out);
}

/* Gradients of the weights are targets; returns the gradient of x. */
static koila_value backward(random_graph *r, const layer *l, koila_value g, koila_value *targets,
                            uint32_t *n_targets)
{
    const koila_value gw2 =
        CALL("aten::mm", w2_meta, "tt", VIEW("aten::t", x_t_meta, "t", g), l->a);
    const koila_value ga = CALL("aten::mm", hidden_meta, "tt", g, l->w2);
    const koila_value gh = CALL("aten::mul.Tensor", hidden_meta, "tt", ga,
                                CALL("aten::sigmoid", hidden_meta, "t", l->h));
    const koila_value gained = CALL("aten::mul.Tensor", rows_meta, "tt", l->norm.normal, l->gain);
    const koila_value gw1 =
        CALL("aten::mm", w1_meta, "tt", VIEW("aten::t", h_t_meta, "t", gh), gained);
    const koila_value gn = CALL("aten::mm", rows_meta, "tt", gh, l->w1);
    const koila_value gg =
        CALL("aten::sum.dim_IntList", vector_meta, "tlb",
             CALL("aten::mul.Tensor", rows_meta, "tt", gn, l->norm.normal), 1, (int64_t)0, 1);
    const koila_value gx = CALL("aten::mul.Tensor", rows_meta, "tt", gn, l->gain);
    targets[(*n_targets)++] = gw1;
    targets[(*n_targets)++] = gw2;
    targets[(*n_targets)++] = gg;
    return CALL("aten::add.Tensor", rows_meta, "tt", g, rg_normalise_back(r, &l->norm, gx));
}

static int ignore(void *user, const char *s, size_t n)
{
    (void)s;
    *(size_t *)user += n;
    return 0;
}

/* The same planned on a GPU's live cache, in which every fourth of 40 blocks is handed out: one
 * simulated step, and a plan with what it asks. */
static void run_live(const random_graph *r, const koila_value *targets, uint32_t n_targets,
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

/* A recorded net. */
typedef struct net {
    random_graph rg;
    koila_value *targets;
    uint32_t n_targets;
} net;

static void net_init(net *x, uint32_t n_layers, int64_t batch, int64_t time, bool over_batch)
{
    *x = (net){ 0 };
    random_graph *r = &x->rg;
    rg_begin(r, NULL, 0);
    rg_axis(r, batch);
    const int64_t N = batch * time;
    rows_meta = rg_matrix(r, N, WIDTH);
    hidden_meta = rg_matrix(r, N, HIDDEN);
    vector_meta = rg_matrix(r, 1, WIDTH);
    w1_meta = rg_matrix(r, HIDDEN, WIDTH);
    w2_meta = rg_matrix(r, WIDTH, HIDDEN);
    w1t_meta = rg_turned(r, WIDTH, HIDDEN);
    w2t_meta = rg_turned(r, HIDDEN, WIDTH);
    x_t_meta = rg_turned(r, WIDTH, N);
    h_t_meta = rg_turned(r, HIDDEN, N);
    koila_value v =
        rg_leaf(r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 3, (int64_t[]){ batch, time, WIDTH });
    layer *layers = calloc(n_layers, sizeof *layers);
    x->targets = calloc(3 * n_layers + 1, sizeof *x->targets);
    v = VIEW("aten::view", rows_meta, "tl", v, 2, N, (int64_t)WIDTH);
    for (uint32_t i = 0; i < n_layers; i++)
        v = forward(r, &layers[i], v, over_batch);
    x->targets[x->n_targets++] =
        CALL("aten::sum.dim_IntList", rg_matrix(r, 1, 1), "tlb", v, 2, (int64_t)0, (int64_t)1, 1);
    for (uint32_t i = n_layers; i-- > 0;)
        v = backward(r, &layers[i], v, x->targets, &x->n_targets);
    free(layers);
    if (r->status != KOILA_OK) {
        printf("graph: %s\n", koila_status_name(r->status));
        exit(1);
    }
}

static void net_deinit(net *x)
{
    free(x->targets);
    rg_deinit(&x->rg);
}

/* ---- each way by itself */

/* A way, and the budget at which it is the one that is taken: bytes of the gradients, and so many
 * ten-thousandths of what the whole step needs beyond. 0: a byte in all. */
typedef struct way {
    const char *name;
    int64_t batch, time;
    bool over_batch, host;
    uint32_t axes, share;
} way;
static const way ways[] = {
    { "rows", 64, 16, false, false, KOILA_AXES_ANY, 3000 },
    { "axis", 1, 1024, false, false, KOILA_AXES_ANY, 3000 },
    { "both", 4, 256, false, false, KOILA_AXES_BOTH, 1000 },
    { "recompute", 1, 1024, false, false, KOILA_AXES_ROWS, 5000 },
    { "along", 1, 1024, true, false, KOILA_AXES_ANY, 3000 },
    { "host", 1, 1024, false, true, KOILA_AXES_ROWS, 3000 },
    { "nothing", 64, 16, false, false, KOILA_AXES_ANY, 1 },
    { "nothing-one", 1, 1024, false, false, KOILA_AXES_ANY, 1 },
    { "nothing-along", 1, 1024, true, false, KOILA_AXES_ANY, 1 },
    { "nothing-host", 64, 16, false, true, KOILA_AXES_ANY, 1 },
    { "a-byte", 64, 16, false, false, KOILA_AXES_ANY, 0 },
};

static void plan_way(const way *w, uint32_t n_layers, int n_times)
{
    net x;
    net_init(&x, n_layers, w->batch, w->time, w->over_batch);
    koila_plan_options o = { .struct_size = sizeof o,
                             .budget_bytes = 1,
                             .recomputes = true,
                             .axes = w->axes,
                             .host_bytes = UINT64_MAX,
                             .host_price = w->host ? 0.4 : 0 };
    const uint64_t gradients = (uint64_t)n_layers * (2 * WIDTH * HIDDEN + WIDTH) * 4;
    const uint64_t whole =
        gradients + (uint64_t)n_layers * w->batch * w->time * (3 * WIDTH + 2 * HIDDEN) * 4;
    if (w->share)
        o.budget_bytes = gradients + (whole - gradients) / 10000 * w->share;
    if (w->axes == KOILA_AXES_BOTH)
        o.rows = w->time / 4;
    koila_plan *p = NULL;
    koila_error err = KOILA_ERROR_INIT;
    koila_status status = KOILA_OK;
    double best = 0;
    for (int i = 0; i < n_times; i++) {
        koila_plan_free(p);
        p = NULL;
        const double a = now_us();
        status = koila_plan_new(x.rg.g, x.targets, x.n_targets, &o, NULL, &p, &err);
        const double b = now_us() - a;
        if (i == 0 || b < best)
            best = b;
    }
    printf("  %-14s %5u nodes %6.2f ms, %5.2f ms per 1000: ", w->name, koila_graph_n_nodes(x.rg.g),
           best / 1e3, best / koila_graph_n_nodes(x.rg.g));
    if (p) {
        const koila_plan_info info = koila_plan_get(p);
        printf("%u slices, %u inner, %u again, %u in host memory, %u loops, work %.2f\n",
               info.n_slices, info.n_inner, info.n_again, info.n_offloaded, info.n_loops,
               info.replay_ratio);
    } else {
        printf("%s\n", koila_status_name(status));
    }
    koila_plan_free(p);
    net_deinit(&x);
}

static int ladders(int argc, char **argv)
{
    static const uint32_t usual[] = { 9, 36, 180 };
    const bool once = argc == 4 && strcmp(argv[1], "once") == 0;
    for (size_t k = 0; k < sizeof ways / sizeof *ways; k++) {
        if (once && strcmp(argv[2], ways[k].name) == 0)
            plan_way(&ways[k], (uint32_t)atoi(argv[3]), 1);
        for (int i = 0; !once && i < (argc > 2 ? argc - 2 : 3); i++)
            plan_way(&ways[k], argc > 2 ? (uint32_t)atoi(argv[i + 2]) : usual[i], 5);
    }
    return 0;
}

/* ---- recorded steps */

static koila_graph *read_graph(koila_table *t, const char *path)
{
    koila_error err = KOILA_ERROR_INIT;
    koila_graph *g = NULL;
    char *text = NULL;
    size_t n = 0, room = 0;
    FILE *f = fopen(path, "rb");
    for (size_t got = 1; f && got; n += got) {
        if (n == room)
            text = realloc(text, room = 2 * room + 4096);
        if (!text)
            exit(1);
        got = fread(text + n, 1, room - n, f);
    }
    if (!f || koila_graph_parse(t, text, n, &g, &err)) {
        fprintf(stderr, "bench_plan: %s: %s\n", path, f ? err.text : "cannot be read");
        exit(1);
    }
    fclose(f);
    free(text);
    return g;
}

/* What no call reads is a result. targets[values]; returns how many there are. */
static uint32_t find_results(const koila_graph *g, koila_value *targets)
{
    const uint32_t n_values = koila_graph_n_values(g);
    uint32_t n = 0;
    bool *is_read = calloc(n_values + 1, sizeof *is_read);
    for (koila_node k = 0; k < koila_graph_n_nodes(g); k++) {
        const koila_sig_info *s = koila_sig_get(koila_graph_table(g), koila_node_get(g, k).sig);
        for (uint32_t i = 0; i < s->n_inputs; i++)
            is_read[koila_node_inputs(g, k)[i]] = true;
    }
    for (koila_value v = 0; v < n_values; v++)
        if (!is_read[v] && koila_value_get(g, v).meta != KOILA_NONE &&
            koila_value_get(g, v).node != KOILA_NONE)
            targets[n++] = v;
    free(is_read);
    return n;
}

typedef struct recorded {
    koila_table *table;
    koila_graph *g;
    koila_value *targets;
    uint32_t n_targets;
    uint64_t results; /* bytes */
} recorded;

static recorded read_step(const char *path)
{
    recorded r = { 0 };
    if (koila_table_new(NULL, &r.table))
        exit(1);
    r.g = read_graph(r.table, path);
    r.targets = calloc(koila_graph_n_values(r.g) + 1, sizeof *r.targets);
    r.n_targets = find_results(r.g, r.targets);
    for (uint32_t k = 0; k < r.n_targets; k++)
        r.results += koila_meta_get(r.table, koila_value_get(r.g, r.targets[k]).meta)->n_bytes;
    return r;
}

static void free_step(recorded *r)
{
    free(r->targets);
    koila_graph_free(r->g);
    koila_table_free(r->table);
}

/* rows: 0, or as koila_plan_options.rows. What does not fit has no slices. */
static koila_plan_info plan_step(const recorded *r, uint64_t budget, int64_t rows)
{
    const koila_plan_options o = { .struct_size = sizeof o,
                                   .budget_bytes = budget,
                                   .rows = rows,
                                   .recomputes = true,
                                   .axes = rows ? KOILA_AXES_ROWS : KOILA_AXES_ANY };
    koila_plan *p = NULL;
    koila_plan_new(r->g, r->targets, r->n_targets, &o, NULL, &p, NULL);
    const koila_plan_info info = p ? koila_plan_get(p) : (koila_plan_info){ 0 };
    koila_plan_free(p);
    return info;
}

/* The least of three, in ms per thousand nodes. */
static double time_plan(const recorded *r, uint64_t budget, koila_plan_info *info)
{
    double best = 0;
    for (int i = 0; i < 3; i++) {
        const double a = now_us();
        *info = plan_step(r, budget, 0);
        const double b = now_us() - a;
        if (i == 0 || b < best)
            best = b;
    }
    return best / koila_graph_n_nodes(r->g);
}

static int graphs(int n_paths, char **paths)
{
    static const double shares[] = { 0, 0.02, 0.1, 0.2, 0.5 };
    for (int i = 0; i < n_paths; i++) {
        recorded r = read_step(paths[i]);
        koila_plan_info info;
        time_plan(&r, UINT64_MAX, &info);
        const double beyond = (double)info.peak_bytes - (double)r.results;
        printf("%s, %u nodes:\n", paths[i], koila_graph_n_nodes(r.g));
        for (size_t k = 0; k < sizeof shares / sizeof *shares && beyond > 0; k++) {
            const uint64_t budget = r.results + (uint64_t)(beyond * shares[k]);
            const double ms = time_plan(&r, budget, &info);
            printf("  %3.0f %%: %6.2f ms per 1000, %s\n", 100 * shares[k], ms,
                   info.n_slices ? "fits" : "nothing fits");
        }
        free_step(&r);
    }
    return 0;
}

/* By halves, to a thousandth. */
static int least(int n_paths, char **paths)
{
    for (int i = 0; i < n_paths; i++) {
        recorded r = read_step(paths[i]);
        koila_plan_info fits = plan_step(&r, UINT64_MAX, 1);
        const double beyond = (double)fits.peak_bytes - (double)r.results;
        double too_little = 0;
        double enough = 1;
        while (beyond > 0 && enough - too_little > 0.001) {
            const double share = (too_little + enough) / 2;
            const koila_plan_info info = plan_step(&r, r.results + (uint64_t)(beyond * share), 0);
            if (info.n_slices) {
                enough = share;
                fits = info;
            } else {
                too_little = share;
            }
        }
        printf("%s: %.2f of %.0f MiB, at %.2f of the work\n", paths[i], enough, beyond / MIB,
               fits.replay_ratio);
        free_step(&r);
    }
    return 0;
}

/* ---- all of it */

static void run(uint32_t n_layers, bool over_batch)
{
    net x;
    const double t0 = now_us();
    net_init(&x, n_layers, BATCH, TIME, over_batch);
    const double t1 = now_us();
    const random_graph *r = &x.rg;
    const koila_value *targets = x.targets;
    const uint32_t n_targets = x.n_targets;
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
    net_deinit(&x);
}

int main(int argc, char **argv)
{
    if (argc > 1 && (strcmp(argv[1], "ladders") == 0 || strcmp(argv[1], "once") == 0))
        return ladders(argc, argv);
    if (argc > 2 && strcmp(argv[1], "graphs") == 0)
        return graphs(argc - 2, argv + 2);
    if (argc > 2 && strcmp(argv[1], "least") == 0)
        return least(argc - 2, argv + 2);
    const uint32_t usual[] = { 180, 720, 3600 };
    for (int over_batch = 0; over_batch < 2; over_batch++)
        for (int i = 0; i < (argc > 1 ? argc - 1 : 3); i++)
            run(argc > 1 ? (uint32_t)atoi(argv[i + 1]) : usual[i], over_batch);
    return 0;
}
