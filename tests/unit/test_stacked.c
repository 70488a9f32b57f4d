/* Sums of the gradients of single entries: the step in which they are stacks (engine/stacked.h)
 * makes the same, in slices too, without a gradient of the whole length for each entry. */
#include "interpreter.h"
#include "random_graph.h"

#include "engine/plan_inside.h"
#include "engine/stacked.h"

/* Columns of [ROWS, LENGTH] are taken one by one. */
enum { ROWS = 7, LENGTH = 5, MOST_TERMS = 12 };

#define CALL(name, out, ...) rg_call(r, name, 0, out, false, __VA_ARGS__)
#define VIEW(name, out, ...) rg_call(r, name, KOILA_OP_VIEW, out, false, __VA_ARGS__)

typedef struct step {
    random_graph r;
    koila_value targets[2];
    uint32_t n_targets;
    bool is_stack; /* most entries have a gradient */
    heap h;
    tensor **truth;
} step;

/* The gradient of column `at`. */
static koila_value gradient(random_graph *r, koila_value x, uint32_t at)
{
    const int64_t rows = ROWS, apart = LENGTH;
    const koila_meta column = rg_shape(r, KOILA_DTYPE_F32, 1, &rows, NULL);
    const koila_meta taken = rg_shape(r, KOILA_DTYPE_F32, 1, &rows, &apart);
    koila_value g = VIEW("aten::select.int", taken, "tii", x, (int64_t)1, (int64_t)at);
    g = CALL("aten::neg", column, "t", g);
    return CALL("aten::select_backward", rg_matrix(r, ROWS, LENGTH), "tlii", g, 2, (int64_t)ROWS,
                (int64_t)LENGTH, (int64_t)1, (int64_t)at);
}

/* Adds any two of the terms up, until one is left. */
static koila_value add_up(random_graph *r, koila_value *terms, uint32_t n)
{
    for (; n > 1; n--) {
        const uint32_t a = rg_pick(r, n);
        const uint32_t b = (a + 1 + rg_pick(r, n - 1)) % n;
        terms[a] = CALL("aten::add.Tensor", rg_matrix(r, ROWS, LENGTH), "tt", terms[a], terms[b]);
        terms[b] = terms[n - 1];
    }
    return terms[0];
}

static void step_init(step *x, uint64_t seed)
{
    random_graph *r = &x->r;
    koila_value terms[MOST_TERMS];
    uint32_t n = 0;
    *x = (step){ 0 };
    rg_begin(r, NULL, seed);
    rg_axis(r, ROWS);
    const koila_meta full = rg_matrix(r, ROWS, LENGTH);
    const koila_value in =
        rg_leaf(r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ ROWS, LENGTH });
    for (uint32_t t = 0; t < LENGTH; t++)
        for (uint32_t again = rg_pick(r, 4); again > 0; again /= 2) /* none, one or two */
            terms[n++] = gradient(r, in, t);
    x->is_stack = n >= 2 && 2 * n >= LENGTH;
    if (n < 2 || rg_pick(r, 2)) /* what is no such gradient */
        terms[n++] = CALL("aten::mul.Tensor", full, "tt", in, in);
    if (n < 2)
        terms[n++] = CALL("aten::neg", full, "t", in);
    const koila_value sum = add_up(r, terms, n);
    const koila_value times = CALL("aten::mul.Tensor", full, "tt", sum, in);
    x->targets[x->n_targets++] =
        CALL("aten::sum.dim_IntList", rg_matrix(r, ROWS, 1), "tlb", times, 1, (int64_t)1, 1);
    if (rg_pick(r, 3) == 0)
        x->targets[x->n_targets++] = sum;
    if (r->status != KOILA_OK)
        abort();
    x->truth = truth_of(&x->h, r->g);
}

static void step_deinit(step *x)
{
    truth_free(x->r.g, x->truth);
    rg_deinit(&x->r);
}

static bool is_op(const koila_graph *g, koila_node n, const char *name)
{
    return strcmp(koila_op_name(g->table, koila__node_sig(g, n)->op), name) == 0;
}

/* Two different entries of the stack change places. */
static bool plant(koila_graph *g)
{
    for (koila_node n = 0; n < g->nodes.n; n++) {
        koila_value *in = &g->inputs.at[g->nodes.at[n].first_input];
        const koila_sig_info *s = koila__node_sig(g, n);
        for (uint32_t i = 1; is_op(g, n, "aten::stack") && i < s->n_inputs; i++) {
            const koila_value was = in[0];
            if (in[i] == was || s->inputs[i] != s->inputs[0])
                continue;
            in[0] = in[i];
            in[i] = was;
            return true;
        }
    }
    return false;
}

typedef struct seen {
    uint32_t n_steps, n_stacks, n_faults, n_caught, n_plans;
} seen;

static void check_stacked(const step *x, seen *s)
{
    koila__retold n;
    CHECK(koila__stack_entries(x->r.g, x->targets, x->n_targets, NULL, &n) == KOILA_OK);
    CHECK((n.graph != NULL) == x->is_stack);
    if (!n.graph)
        return;
    CHECK(retold_makes_the_truth(&n, x->r.g, x->truth, x->targets, x->n_targets));
    for (koila_node k = 0; k < n.graph->nodes.n; k++)
        CHECK(!is_op(n.graph, k, "aten::select_backward"));
    s->n_stacks++;
    if (plant(n.graph)) {
        s->n_faults++;
        s->n_caught += !retold_makes_the_truth(&n, x->r.g, x->truth, x->targets, x->n_targets);
    }
    koila__retold_deinit(&n);
}

TEST(stacked__gradients_of_entries_are_their_sum)
{
    seen s = { 0 };
    for (uint64_t seed = 1; seed <= 400; seed++) {
        step x;
        step_init(&x, seed);
        check_stacked(&x, &s);
        s.n_plans += check_along(x.r.g, LENGTH, x.truth, x.targets, x.n_targets);
        step_deinit(&x);
        s.n_steps++;
    }
    CHECK(s.n_stacks > s.n_steps / 2 && s.n_faults > s.n_stacks / 2 && s.n_caught == s.n_faults);
    printf("  %u steps, %u with a stack; %u plans; %u of %u faults seen\n", s.n_steps, s.n_stacks,
           s.n_plans, s.n_caught, s.n_faults);
}

TEST(stacked__the_nth_allocation_may_fail)
{
    failing_allocator fail = { 0 };
    const koila_allocator mem = { failing_realloc, &fail };
    step x;
    step_init(&x, 3);
    CHECK(x.is_stack);
    for (uint64_t at = 1;; at++) {
        koila__retold n;
        fail = (failing_allocator){ .at = at };
        const koila_status status = koila__stack_entries(x.r.g, x.targets, x.n_targets, &mem, &n);
        CHECK(status == (fail.n_calls < at ? KOILA_OK : KOILA_NO_MEMORY));
        koila__retold_deinit(&n);
        CHECK_EQ(fail.n_live_bytes, 0);
        if (fail.n_calls < at)
            break;
    }
    step_deinit(&x);
}
