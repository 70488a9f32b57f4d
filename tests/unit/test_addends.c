/* Gradients of weights that are used several times, in one loop, in several, and outside loops:
 * their terms are added up at once (engine/addends.c), and the sums are those of the recorded
 * graph, in the bytes that were predicted. */
#include "interpreter.h"
#include "random_graph.h"

#include "engine/plan_inside.h"

enum { WIDTH = 5, MOST_USES = 4 };

#define CALL(name, out, ...) rg_call(r, name, 0, out, false, __VA_ARGS__)
#define VIEW(name, out, ...) rg_call(r, name, KOILA_OP_VIEW, out, false, __VA_ARGS__)

typedef struct step {
    random_graph r;
    koila_value targets[3];
    heap h;
    tensor **truth;
} step;

/* x [n, WIDTH] is multiplied by a matrix of all its rows: what follows is of another loop. */
static koila_value behind_barrier(random_graph *r, koila_value x, int64_t n)
{
    const koila_meta one = rg_matrix(r, 1, WIDTH), all = rg_matrix(r, n, WIDTH);
    const koila_value sum = CALL("aten::sum.dim_IntList", one, "tlb", x, 1, (int64_t)0, 1);
    return CALL("aten::mul.Tensor", all, "tt", x, sum);
}

/* The term of a weight's gradient, as a linear layer leaves it: a product, turned twice. */
static koila_value term(random_graph *r, koila_value gradient, koila_value input, int64_t n)
{
    const koila_meta weight = rg_matrix(r, WIDTH, WIDTH);
    const koila_value turned = VIEW("aten::t", rg_turned(r, WIDTH, n), "t", gradient);
    const koila_value product = CALL("aten::mm", weight, "tt", turned, input);
    const koila_value once = VIEW("aten::t", rg_turned(r, WIDTH, WIDTH), "t", product);
    return VIEW("aten::t", weight, "t", once);
}

/* A weight that is used `n_uses` times, and one that is used once. Some terms are of no product,
 * some are made behind barriers, some outside loops. */
static void step_init(step *x, uint64_t seed, int64_t rows)
{
    random_graph *r = &x->r;
    *x = (step){ 0 };
    rg_begin(r, NULL, seed);
    rg_axis(r, rows);
    const koila_meta weight = rg_matrix(r, WIDTH, WIDTH);
    const uint32_t n_uses = 2 + rg_pick(r, MOST_USES - 1);
    koila_value g =
        rg_leaf(r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ rows, WIDTH });
    const koila_value fixed = rg_weight(r, WIDTH, WIDTH);
    koila_value sum = KOILA_NONE;
    for (uint32_t k = 0; k < n_uses; k++) {
        const uint32_t kind = rg_pick(r, 6);
        koila_value t = KOILA_NONE;
        if (rg_pick(r, 3) == 0)
            g = behind_barrier(r, g, rows);
        if (kind == 0) /* outside loops */
            t = CALL("aten::mm", weight, "tt", fixed, fixed);
        else
            t = term(r, g, g, rows);
        if (kind == 1) /* made by no product */
            t = CALL("aten::neg", weight, "t", t);
        sum = sum == KOILA_NONE ? t : CALL("aten::add.Tensor", weight, "tt", sum, t);
        g = CALL("aten::mm", rg_matrix(r, rows, WIDTH), "tt", g, fixed);
    }
    x->targets[0] = sum;
    x->targets[1] = term(r, g, g, rows);
    x->targets[2] =
        CALL("aten::sum.dim_IntList", rg_matrix(r, 1, WIDTH), "tlb", g, 1, (int64_t)0, 1);
    if (r->status != KOILA_OK)
        abort();
    x->truth = truth_of(&x->h, r->g);
}

static void step_deinit(step *x)
{
    truth_free(x->r.g, x->truth);
    rg_deinit(&x->r);
}

typedef struct seen {
    uint32_t n_plans, n_once, n_onto, n_second, n_second_calls, n_faults, n_caught;
} seen;

/* What the plan does at once; one of it is undone, as a planted fault that must be seen. */
static void look_at(const step *x, koila_plan *p, seen *s)
{
    for (uint32_t k = 0; k < p->schedule.n_stages; k++) {
        const koila_stage *st = &p->schedule.stages[k].stage;
        for (uint32_t i = 0; i < st->n_instrs; i++) {
            koila_instr *in = (koila_instr *)&st->instrs[i];
            const koila_instr was = *in;
            const bool adds = in->kind == KOILA_DO_RUN && in->flags & KOILA_INSTR_ADDS;
            const bool is_second = in->kind == KOILA_DO_ADD && in->flags & KOILA_INSTR_SECOND;
            s->n_once += adds && st->is_loop;
            s->n_onto += adds && st->is_loop && in->flags & KOILA_INSTR_ONTO;
            s->n_second_calls += adds && !st->is_loop;
            s->n_second += is_second;
            if (!is_second && !(adds && st->is_loop))
                continue;
            in->flags &= (uint8_t)~(KOILA_INSTR_ADDS | KOILA_INSTR_SECOND);
            s->n_faults++;
            s->n_caught += !gives_the_truth(p, x->r.g, x->truth, x->targets, 3);
            *in = was;
        }
    }
}

/* Wherever that is asked for: rows, results computed again. */
static void check_step(uint64_t seed, seen *s)
{
    const int64_t batch = 2 + (int64_t)(seed % 4);
    step x;
    step_init(&x, seed, batch);
    for (int64_t rows = 1; rows <= batch; rows++) {
        const koila_plan_options o = { .struct_size = sizeof o,
                                       .budget_bytes = UINT64_MAX,
                                       .axes = KOILA_AXES_ROWS,
                                       .rows = rows };
        koila_plan *p = NULL;
        CHECK(koila_plan_new(x.r.g, x.targets, 3, &o, NULL, &p, NULL) == KOILA_OK);
        CHECK(koila_plan_check(p, NULL));
        CHECK(gives_the_truth(p, x.r.g, x.truth, x.targets, 3));
        s->n_plans++;
        look_at(&x, p, s);
        koila_plan_free(p);
    }
    step_deinit(&x);
}

TEST(addends__are_the_gradients_of_weights_that_are_used_several_times)
{
    seen s = { 0 };
    for (uint64_t seed = 1; seed <= 400; seed++)
        check_step(seed, &s);
    CHECK(s.n_onto > 1000 && s.n_once > s.n_onto && s.n_second > 100 && s.n_second_calls > 20);
    CHECK(s.n_faults > 1000 && s.n_caught == s.n_faults);
    printf("  %u plans: %u addends at once, %u of them as they were made; %u second terms, %u of "
           "calls outside loops; %u of %u faults seen\n",
           s.n_plans, s.n_once, s.n_onto, s.n_second, s.n_second_calls, s.n_caught, s.n_faults);
}
