/* test_recompute_oracle.c — what the planner computes again, against the least work that there is.
 *
 * Small random training steps, of one sample: a forward pass of products, activations, sums and
 * residuals over tensors of uneven widths, and its backward pass. Brute force tries every set of
 * forward calls to run again (each is dropped after its last use there, and runs again directly
 * before the backward pass first needs it), counts bytes and work by a walk of its own, and knows
 * the least work for every budget. The planner must find a way where there is one, and take little
 * more work.
 *
 * The planner may run calls of the backward pass again too, so it may be better; segments are
 * coarse, so it may miss what fits. */
#include "harness.h"
#include "random_graph.h"

#include "engine/cost.h"
#include "engine/plan_inside.h"
#include "graph/table.h"

#include <math.h>

enum { MOST_FORWARD = 12, MOST_NODES = 96, MOST_VALUES = 160, N_BUDGETS = 50, TIME = 64 };

/* ---- the steps */

/* A forward call: y = f(a), or f(a, b). */
typedef struct call {
    enum { PRODUCT, KEEPS_INPUT, KEEPS_OUTPUT, SUM, TIMES } kind;
    koila_value a, b, y, weight;
} call;

typedef struct step {
    random_graph r;
    call calls[MOST_FORWARD];
    uint32_t n_calls;
    koila_node end; /* the last node of the forward pass */
} step;

static int64_t width(const random_graph *r, koila_value v) { return rg_meta(r, v)->size[1]; }

/* An earlier result as wide as `v`; `v` where there is no other. */
static koila_value as_wide(step *x, koila_value v)
{
    for (uint32_t i = 0; i < 8 && x->n_calls; i++) {
        const koila_value y = x->calls[rg_pick(&x->r, x->n_calls)].y;
        if (width(&x->r, y) == width(&x->r, v))
            return y;
    }
    return v;
}

static koila_value add_call(step *x, koila_value from)
{
    static const int64_t widths[] = { 64, 96, 128, 192, 256, 512 };
    random_graph *r = &x->r;
    call *c = &x->calls[x->n_calls];
    const int64_t w = width(r, from);
    *c = (call){ .kind = rg_pick(r, 5), .a = from, .b = from };
    const koila_meta same = rg_matrix(r, TIME, w);
    if (c->kind == PRODUCT) {
        const int64_t wide = widths[rg_pick(r, 6)];
        c->weight = rg_weight(r, w, wide);
        c->y = rg_call(r, "aten::mm", 0, rg_matrix(r, TIME, wide), false, "tt", from, c->weight);
    } else if (c->kind == KEEPS_INPUT) {
        c->y = rg_call(r, "aten::gelu", 0, same, false, "t", from);
    } else if (c->kind == KEEPS_OUTPUT) {
        c->y = rg_call(r, "aten::sigmoid", 0, same, false, "t", from);
    } else {
        c->b = as_wide(x, from);
        c->y = rg_call(r, c->kind == SUM ? "aten::add.Tensor" : "aten::mul.Tensor", 0, same, false,
                       "tt", from, c->b);
    }
    x->n_calls++;
    return c->y;
}

static void add_gradient(random_graph *r, koila_value *g, koila_value of, koila_value more)
{
    g[of] = g[of] == KOILA_NONE
                ? more
                : rg_call(r, "aten::add.Tensor", 0, rg_matrix(r, TIME, width(r, of)), false, "tt",
                          g[of], more);
}

static void add_backward(step *x, const call *c, koila_value *g)
{
    random_graph *r = &x->r;
    const koila_value gy = g[c->y];
    const int64_t w = width(r, c->a), wide = width(r, c->y);
    const koila_meta same = rg_matrix(r, TIME, w);
    if (c->kind == PRODUCT) {
        const koila_value t =
            rg_call(r, "aten::t", KOILA_OP_VIEW, rg_turned(r, wide, TIME), false, "t", gy);
        r->targets[r->n_targets++] =
            rg_call(r, "aten::mm", 0, rg_matrix(r, wide, w), false, "tt", t, c->a);
        const koila_value back = rg_weight(r, wide, w);
        add_gradient(r, g, c->a, rg_call(r, "aten::mm", 0, same, false, "tt", gy, back));
    } else if (c->kind == SUM) {
        add_gradient(r, g, c->a, gy);
        add_gradient(r, g, c->b, gy);
    } else if (c->kind == TIMES) {
        add_gradient(r, g, c->a, rg_call(r, "aten::mul.Tensor", 0, same, false, "tt", gy, c->b));
        add_gradient(r, g, c->b, rg_call(r, "aten::mul.Tensor", 0, same, false, "tt", gy, c->a));
    } else {
        const koila_value kept = c->kind == KEEPS_INPUT ? c->a : c->y;
        add_gradient(r, g, c->a, rg_call(r, "aten::mul.Tensor", 0, same, false, "tt", gy, kept));
    }
}

static void step_init(step *x, uint64_t seed)
{
    random_graph *r = &x->r;
    koila_value g[MOST_VALUES];
    x->n_calls = 0;
    rg_begin(r, NULL, seed);
    rg_axis(r, 1);
    if (r->status != KOILA_OK)
        abort();
    koila_value v = rg_weight(r, TIME, 128);
    const uint32_t n = 6 + rg_pick(r, MOST_FORWARD - 5);
    while (x->n_calls < n)
        v = add_call(x, v);
    r->targets[r->n_targets++] = rg_call(r, "aten::sum.dim_IntList", 0, rg_matrix(r, 1, 1), false,
                                         "tlb", v, 2, (int64_t)0, (int64_t)1, 1);
    x->end = koila_graph_n_nodes(r->g) - 1;
    for (uint32_t i = 0; i < MOST_VALUES; i++)
        g[i] = KOILA_NONE;
    g[v] = rg_weight(r, TIME, width(r, v));
    for (uint32_t i = x->n_calls; i-- > 0;)
        if (g[x->calls[i].y] != KOILA_NONE)
            add_backward(x, &x->calls[i], g);
    if (r->status != KOILA_OK || koila_graph_n_nodes(r->g) > MOST_NODES ||
        koila_graph_n_values(r->g) > MOST_VALUES)
        abort();
}

/* ---- brute force */

typedef struct cost {
    uint64_t peak;
    double work;
} cost;

/* One run of a node: values of the second time are numbered behind those of the first. */
typedef struct run {
    koila_node n;
    bool is_second, is_needed;
} run;

typedef struct walk {
    const koila_graph *g;
    koila_node end;
    uint32_t again; /* a bit for each node that runs again */
    bool is_demanded[MOST_NODES];
    run runs[2 * MOST_NODES];
    uint32_t n_runs;
    uint32_t last[2 * MOST_VALUES]; /* the run after the last one that reads the storage */
} walk;

static bool is_view(const walk *w, koila_node n)
{
    return koila_op_flags(w->g->table, koila__node_sig(w->g, n)->op) & KOILA_OP_VIEW;
}

static koila_value input(const walk *w, koila_node n, uint32_t i)
{
    return w->g->inputs.at[w->g->nodes.at[n].first_input + i];
}

static bool runs_again(const walk *w, koila_node n)
{
    return n != KOILA_NONE && n < 32 && (w->again >> n & 1);
}

/* The storage that run x reads as its input i. */
static uint32_t read_by(const walk *w, const run *x, uint32_t i)
{
    koila_value v = input(w, x->n, i);
    koila_node m = w->g->values.at[v].node;
    const bool takes = (x->is_second || x->n > w->end) && runs_again(w, m);
    if (m != KOILA_NONE && is_view(w, m))
        v = input(w, m, 0); /* only views of gradients */
    return takes ? MOST_VALUES + v : v;
}

/* Adds the nodes that must run again for node n: bits. */
static void demand(walk *w, koila_node n, uint32_t *demanded)
{
    for (uint32_t i = 0; i < koila__node_sig(w->g, n)->n_inputs; i++) {
        const koila_node m = w->g->values.at[input(w, n, i)].node;
        if (!runs_again(w, m) || w->is_demanded[m])
            continue;
        w->is_demanded[m] = true;
        *demanded |= 1u << m;
        demand(w, m, demanded);
    }
}

/* All runs, in order. */
static void list_runs(walk *w)
{
    for (koila_node n = 0; n < w->g->nodes.n; n++) {
        uint32_t demanded = 0;
        if (n > w->end)
            demand(w, n, &demanded);
        for (; demanded; demanded &= demanded - 1)
            w->runs[w->n_runs++] = (run){ (koila_node)__builtin_ctz(demanded), true, false };
        w->runs[w->n_runs++] = (run){ n, false, false };
    }
}

/* Finds the runs that are needed, and the last run that reads each storage. */
static void find_last(walk *w, const step *x)
{
    for (uint32_t i = 0; i < x->r.n_targets; i++)
        w->last[x->r.targets[i]] = UINT32_MAX;
    for (uint32_t k = w->n_runs; k-- > 0;) {
        run *r = &w->runs[k];
        const koila_value y = w->g->nodes.at[r->n].first_output;
        r->is_needed = w->last[r->is_second ? MOST_VALUES + y : y] || is_view(w, r->n);
        for (uint32_t i = 0; r->is_needed && i < koila__node_sig(w->g, r->n)->n_inputs; i++) {
            uint32_t *last = &w->last[read_by(w, r, i)];
            *last = *last ? *last : k + 1;
        }
    }
}

/* The storage of a term that the sum of run k is written over; KOILA_NONE: none. */
static uint32_t written_over(const walk *w, uint32_t k)
{
    const run *r = &w->runs[k];
    const koila_sig_info *s = koila__node_sig(w->g, r->n);
    if (!koila__adds_two(w->g->table, s) || read_by(w, r, 0) == read_by(w, r, 1))
        return KOILA_NONE;
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t v = read_by(w, r, i);
        const bool is_made = w->g->values.at[v % MOST_VALUES].node != KOILA_NONE;
        if (is_made && w->last[v] == k + 1 && s->inputs[i] == s->outputs[0])
            return v;
    }
    return KOILA_NONE;
}

/* What the step takes if those nodes run again behind node `end`. work[nodes]. */
static cost cost_of(const step *x, koila_node end, uint32_t again, const double *work)
{
    walk w = { .g = x->r.g, .end = end, .again = again };
    cost c = { 0 };
    uint64_t now = 0;
    list_runs(&w);
    find_last(&w, x);
    for (uint32_t k = 0; k < w.n_runs; k++) {
        const run *r = &w.runs[k];
        if (!r->is_needed || is_view(&w, r->n))
            continue;
        const uint32_t over = written_over(&w, k);
        if (over == KOILA_NONE)
            now += koila__value_meta(w.g, w.g->nodes.at[r->n].first_output)->n_bytes;
        c.peak = now > c.peak ? now : c.peak;
        c.work += work[r->n];
        for (uint32_t i = 0; i < koila__node_sig(w.g, r->n)->n_inputs; i++) {
            const uint32_t v = read_by(&w, r, i);
            if (w.last[v] != k + 1 || w.g->values.at[v % MOST_VALUES].node == KOILA_NONE)
                continue;
            if (v != over)
                now -= koila__value_meta(w.g, v % MOST_VALUES)->n_bytes;
            w.last[v] = 0; /* it may be read twice */
        }
    }
    return c;
}

/* All sets of forward calls, which run again behind the loss, or where the step holds the most. */
typedef struct table {
    cost at[2 << MOST_FORWARD];
    uint32_t n;
    uint64_t least; /* peak */
} table;

static void fill_table(const step *x, koila_node highest, table *t)
{
    double work[MOST_NODES];
    const koila_graph *g = x->r.g;
    const uint32_t n = 1u << x->n_calls;
    for (koila_node k = 0; k < g->nodes.n; k++)
        work[k] = koila__cost_of(g->table, koila__node_sig(g, k)).work;
    t->n = 2 * n;
    t->least = UINT64_MAX;
    for (uint32_t i = 0; i < t->n; i++) {
        t->at[i] = cost_of(x, i < n ? x->end : highest, i % n, work);
        t->least = t->at[i].peak < t->least ? t->at[i].peak : t->least;
    }
}

static double least_work(const table *t, uint64_t budget)
{
    double least = INFINITY;
    for (uint32_t i = 0; i < t->n; i++)
        if (t->at[i].peak <= budget && t->at[i].work < least)
            least = t->at[i].work;
    return least;
}

/* ---- the planner */

/* .work is 0 where it finds no plan. recorded: the work of the step as it was; 0: not known.
 * *highest: where it holds the most; NULL: it is not asked. */
static cost planned(const step *x, uint64_t budget, double recorded, koila_node *highest)
{
    const koila_plan_options o = { .struct_size = sizeof o,
                                   .budget_bytes = budget,
                                   .recomputes = true };
    koila_plan *p = NULL;
    cost c = { 0 };
    const koila_status status =
        koila_plan_new(x->r.g, x->r.targets, x->r.n_targets, &o, NULL, &p, NULL);
    CHECK(status == KOILA_OK || status == KOILA_OOM);
    if (p)
        c = (cost){ koila_plan_get(p).peak_bytes, koila_plan_get(p).work };
    if (p && recorded > 0) /* a call that only runs later was recorded too */
        CHECK(fabs(koila_plan_get(p).work / koila_plan_get(p).replay_ratio - recorded) < 1);
    if (p && highest)
        *highest = koila_plan_get(p).peak_node;
    koila_plan_free(p);
    return c;
}

typedef struct score {
    uint32_t n, n_missed, n_over, n_seen, n_less; /* over: more than 1.1 times the least work */
    double sum, worst;
} score;

static bool is_over(double work, double least) { return work > 1.1 * least; }

static void compare(const step *x, const table *t, cost plain, score *s)
{
    uint64_t peak = 0;
    double most_work = 0, last_work = INFINITY;
    CHECK(plain.peak == t->at[0].peak && fabs(plain.work - t->at[0].work) < 1);
    for (uint32_t k = 0; k < N_BUDGETS; k++) {
        const uint64_t budget = t->least + (plain.peak - t->least) * k / N_BUDGETS;
        const double least = least_work(t, budget);
        const cost c = planned(x, budget, plain.work, NULL);
        s->n++;
        s->n_missed += !c.work;
        if (!c.work)
            continue;
        CHECK(c.peak <= budget);
        CHECK(c.peak >= peak && c.work <= last_work); /* monotone */
        peak = c.peak;
        last_work = c.work;
        s->n_over += is_over(c.work, least);
        s->n_less += c.work < least - 1;
        s->sum += c.work / least;
        s->worst = c.work / least > s->worst ? c.work / least : s->worst;
        /* a planted fault: the policy of the smallest budget for all */
        most_work = c.work > most_work ? c.work : most_work;
        s->n_seen += is_over(most_work, least) && !is_over(c.work, least);
    }
}

TEST(oracle__what_is_computed_again_is_almost_the_least_work_there_is)
{
    static table t;
    score s = { 0 };
    for (uint64_t seed = 1; seed <= 400; seed++) {
        step x;
        koila_node highest = KOILA_NONE;
        step_init(&x, seed);
        const cost plain = planned(&x, UINT64_MAX, 0, &highest);
        fill_table(&x, highest, &t);
        if (t.least < plain.peak)
            compare(&x, &t, plain, &s);
        rg_deinit(&x.r);
    }
    const uint32_t n = s.n - s.n_missed;
    printf("  %u budgets: %u found no plan; work is %.4f of the least, at most %.3f; %u over 1.1, "
           "%u below; %u planted faults seen\n",
           s.n, s.n_missed, s.sum / n, s.worst, s.n_over, s.n_less, s.n_seen);
    CHECK(n > 5000 && 500 * s.n_missed <= s.n);
    CHECK(!s.n_over && s.worst <= 1.1 && s.sum <= n && 20 * s.n_seen > n);
}
