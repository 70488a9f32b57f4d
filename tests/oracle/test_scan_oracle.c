/* test_scan_oracle.c — what the rules of thumb cost that leave out choices of what is dropped.
 *
 * Along another axis results are dropped by 2 to 32 segments (koila__drop_along). Not all of these
 * numbers are tried: those that are unlikely to fit, by what others needed, are left out; and once
 * planning has taken long, two in a row that are no better end the scan, what fits in little time
 * ends it at once, and other axes are left. No bound proves these rules.
 *
 * Random training steps of one sample or two, of layers with and without statistics over the
 * tokens, are planned with the rules and without, within the same budgets. With them the same
 * budgets fit, and what is taken takes little more time. A planted fault, which misses what a
 * larger budget allows, must be told from the rules. */
#include "harness.h"
#include "random_graph.h"

#include "engine/plan_inside.h"

#include <math.h>

enum { MOST_LAYERS = 12, N_STEPS = 60, N_BUDGETS = 16 };

/* ---- the steps */

typedef struct layer {
    rg_norm norm;
    koila_value h, a, w1, w2;
    int64_t hidden;
    bool over_tokens; /* its statistics, else over each token */
} layer;

typedef struct step {
    random_graph r;
    int64_t rows, width; /* rows: the tokens of all samples */
    koila_value targets[2 * MOST_LAYERS + 1];
    uint32_t n_targets;
} step;

#define CALL(name, out, ...) rg_call(r, name, 0, out, false, __VA_ARGS__)
#define VIEW(name, out, ...) rg_call(r, name, KOILA_OP_VIEW, out, false, __VA_ARGS__)

/* y = x + w2 gelu(w1 norm(x)) */
static koila_value forward(step *x, layer *l, koila_value v)
{
    random_graph *r = &x->r;
    const koila_meta rows = rg_matrix(r, x->rows, x->width);
    const koila_meta hidden = rg_matrix(r, x->rows, l->hidden);
    l->w1 = rg_weight(r, l->hidden, x->width);
    l->w2 = rg_weight(r, x->width, l->hidden);
    l->norm = rg_normalise(r, v, l->over_tokens ? 0 : 1);
    const koila_value t1 = VIEW("aten::t", rg_turned(r, x->width, l->hidden), "t", l->w1);
    l->h = CALL("aten::mm", hidden, "tt", l->norm.normal, t1);
    l->a = CALL("aten::gelu", hidden, "t", l->h);
    const koila_value t2 = VIEW("aten::t", rg_turned(r, l->hidden, x->width), "t", l->w2);
    return CALL("aten::add.Tensor", rows, "tt", v, CALL("aten::mm", rows, "tt", l->a, t2));
}

/* Gradients of the weights are targets; returns that of what the layer read. */
static koila_value backward(step *x, const layer *l, koila_value g)
{
    random_graph *r = &x->r;
    const koila_meta rows = rg_matrix(r, x->rows, x->width);
    const koila_meta hidden = rg_matrix(r, x->rows, l->hidden);
    const koila_value gt = VIEW("aten::t", rg_turned(r, x->width, x->rows), "t", g);
    x->targets[x->n_targets++] =
        CALL("aten::mm", rg_matrix(r, x->width, l->hidden), "tt", gt, l->a);
    const koila_value ga = CALL("aten::mm", hidden, "tt", g, l->w2);
    const koila_value gh =
        CALL("aten::mul.Tensor", hidden, "tt", ga, CALL("aten::sigmoid", hidden, "t", l->h));
    const koila_value ht = VIEW("aten::t", rg_turned(r, l->hidden, x->rows), "t", gh);
    x->targets[x->n_targets++] =
        CALL("aten::mm", rg_matrix(r, l->hidden, x->width), "tt", ht, l->norm.normal);
    const koila_value gn = CALL("aten::mm", rows, "tt", gh, l->w1);
    return CALL("aten::add.Tensor", rows, "tt", g, rg_normalise_back(r, &l->norm, gn));
}

static void step_init(step *x, uint64_t seed, int64_t n_samples)
{
    static const int64_t widths[] = { 64, 128, 256, 1024 };
    random_graph *r = &x->r;
    layer layers[MOST_LAYERS];
    x->n_targets = 0;
    rg_begin(r, NULL, seed);
    rg_axis(r, n_samples);
    const int64_t time = (int64_t)512 << rg_pick(r, 4);
    x->rows = n_samples * time;
    x->width = widths[rg_pick(r, 3)];
    const uint32_t n = 7 + rg_pick(r, MOST_LAYERS - 6);
    const uint32_t share = rg_pick(r, 5); /* of four, how many have statistics over the tokens */
    const int64_t sizes[] = { n_samples, time, x->width };
    koila_value v = rg_leaf(r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 3, sizes);
    v = VIEW("aten::view", rg_matrix(r, x->rows, x->width), "tl", v, 2, x->rows, x->width);
    for (uint32_t i = 0; i < n; i++) {
        layers[i] =
            (layer){ .hidden = widths[rg_pick(r, 4)], .over_tokens = rg_pick(r, 4) < share };
        v = forward(x, &layers[i], v);
    }
    x->targets[x->n_targets++] =
        CALL("aten::sum.dim_IntList", rg_matrix(r, 1, 1), "tlb", v, 2, (int64_t)0, (int64_t)1, 1);
    for (uint32_t i = n; i-- > 0;)
        v = backward(x, &layers[i], v);
    if (r->status != KOILA_OK)
        abort();
}

/* ---- their plans */

typedef struct found {
    bool fits, is_along; /* another axis is cut, and results are dropped */
    uint64_t peak;
    double time, effort; /* relative to the step as recorded; what planning took */
} found;

static found planned(const step *x, uint64_t budget, koila__effort effort)
{
    const koila_plan_options o = {
        .struct_size = sizeof o, .budget_bytes = budget, .recomputes = true, .axes = KOILA_AXES_ANY
    };
    koila_plan *p = NULL;
    found f = { 0 };
    const koila_status status = koila__plan_row(x->r.g, x->targets, x->n_targets, NULL, &o, NULL,
                                                &effort, NULL, &p, NULL, NULL);
    CHECK(status == KOILA_OK || status == KOILA_OOM);
    f.effort = effort.spent;
    if (p) {
        const koila_plan_info info = koila_plan_get(p);
        f = (found){ true, info.dim != KOILA_NONE && info.n_again, info.peak_bytes, info.time_ratio,
                     effort.spent };
        CHECK(info.peak_bytes <= budget);
    }
    koila_plan_free(p);
    return f;
}

typedef struct score {
    uint32_t n, n_along, n_missed, n_other; /* other: it takes another time than without rules */
    double sum, worst, effort;
} score;

static void count(score *s, const found *with, const found *without)
{
    const double ratio = with->fits && without->fits ? with->time / without->time : 1;
    s->n++;
    s->n_along += without->is_along;
    s->n_missed += without->fits && !with->fits;
    s->n_other += fabs(ratio - 1) > 1e-9;
    s->sum += ratio;
    s->worst = ratio > s->worst ? ratio : s->worst;
    s->effort += with->effort / without->effort;
}

static void print(const char *name, const score *s)
{
    printf("  %s: of %u budgets (%u along an axis with results dropped) %u do not fit that would, "
           "%u take another time: %.4f of it on average, at most %.3f; planning takes %.2f of the "
           "time\n",
           name, s->n, s->n_along, s->n_missed, s->n_other, s->sum / s->n, s->worst,
           s->effort / s->n);
}

/* The least of these budgets holds the results alone, the last one almost the whole step. */
static uint64_t budget_of(const step *x, uint32_t k)
{
    const double share = pow((double)k / (N_BUDGETS + 1), 2); /* most are small */
    const uint64_t most =
        planned(x, UINT64_MAX, koila__effort_for(koila_graph_n_nodes(x->r.g))).peak;
    uint64_t least = 0;
    for (uint32_t i = 0; i < x->n_targets; i++)
        least += rg_meta(&x->r, x->targets[i])->n_bytes;
    return least + (uint64_t)((double)(most - least) * share);
}

/* What the rules cost, and a planted fault, in steps of so many samples. */
static void compare(int64_t n_samples, score *rules, score *fault)
{
    for (uint64_t seed = 1; seed <= N_STEPS; seed++) {
        step x;
        found before = { 0 };
        step_init(&x, seed, n_samples);
        for (uint32_t k = 1; k <= N_BUDGETS; k++) {
            const uint64_t budget = budget_of(&x, k);
            const found all = planned(&x, budget, (koila__effort){ .tries_all = true });
            const found with = planned(&x, budget, koila__effort_for(koila_graph_n_nodes(x.r.g)));
            count(rules, &with, &all);
            count(fault, before.fits ? &before : &with, &all);
            before = with;
        }
        rg_deinit(&x.r);
    }
    print("with the rules", rules);
    print("a planted fault", fault);
}

/* mean, worst: estimated time with the rules, of that without them. */
static void check_samples(int64_t n_samples, double mean, double worst)
{
    score rules = { 0 }, fault = { 0 };
    compare(n_samples, &rules, &fault);
    CHECK(rules.n_along > rules.n / 8 && rules.n_other > 0);
    CHECK(!rules.n_missed && rules.sum <= mean * rules.n && rules.worst <= worst);
    CHECK(fault.sum > 1.1 * fault.n && fault.worst > worst);
}

TEST(oracle__choices_left_out_cost_little_time_and_no_budget) { check_samples(1, 1.02, 2.5); }

/* More: where slices compute again (two samples), dropping results is compared with them, and what
 * finds the least of that without the rules takes more tries. */
TEST(oracle__so_do_those_of_several_samples) { check_samples(2, 1.025, 2.5); }
