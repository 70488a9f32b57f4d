/* Rows that are taken of what a product made: the step in which they are taken before it
 * (engine/narrow.c) makes the same, and is cut along them. */
#include "interpreter.h"
#include "random_graph.h"

#include "engine/narrow.h"
#include "engine/plan_inside.h"

/* A step of `LENGTH` tokens, one a column: [HIDDEN, LENGTH] is multiplied to [WORDS, LENGTH]. */
enum { ROWS = 19, LENGTH = 11, HIDDEN = 13, WORDS = 17, MOST_TARGETS = 4 };

#define CALL(name, out, ...) rg_call(r, name, 0, out, false, __VA_ARGS__)
#define VIEW(name, out, ...) rg_call(r, name, KOILA_OP_VIEW, out, false, __VA_ARGS__)

typedef struct step {
    random_graph r;
    koila_value targets[MOST_TARGETS];
    uint32_t n_targets;
    int64_t begin, end;  /* of the tokens that are taken */
    bool is_read_whole;  /* and the others are read too */
    bool is_taken_again; /* some of those are */
    heap h;
    tensor **truth;
} step;

static koila_value column(random_graph *r) { return rg_weight(r, WORDS, 1); }

/* One layer that leaves tokens apart, of n of them; of all, it may write to them. */
static koila_value layer(random_graph *r, koila_value x, int64_t n, koila_value *saved)
{
    const koila_meta full = rg_matrix(r, WORDS, n);
    *saved = KOILA_NONE;
    switch (rg_pick(r, n == LENGTH ? 4 : 3)) {
    case 0:
        return CALL("aten::neg", full, "t", x);
    case 1:
        return CALL("aten::mul.Tensor", full, "tt", x, column(r));
    case 2:
        return *saved = CALL("aten::relu", full, "t", x);
    default:
        return rg_call(r, "aten::add_.Tensor", 0, full, false, "tt", x, column(r));
    }
}

/* Tokens begin .. end of a value that lies in rows of LENGTH. */
static koila_value taken(random_graph *r, koila_value of, int64_t begin, int64_t end)
{
    const koila_meta part = rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ WORDS, end - begin },
                                     (int64_t[]){ LENGTH, 1 });
    return VIEW("aten::slice.Tensor", part, "tiii", of, (int64_t)1, begin, end);
}

/* Its gradient: of n tokens. */
static koila_value padded(random_graph *r, koila_value g, int64_t begin, int64_t end, int64_t n)
{
    return CALL("aten::slice_backward", rg_matrix(r, WORDS, n), "tliiii", g, 2, (int64_t)WORDS, n,
                (int64_t)1, begin, end, (int64_t)1);
}

static void add_target(step *x, koila_value v) { x->targets[x->n_targets++] = v; }

/* What a step adds up: a sum over tokens. */
static koila_value sum_over(random_graph *r, koila_value x, int64_t rows)
{
    return CALL("aten::sum.dim_IntList", rg_matrix(r, rows, 1), "tlb", x, 1, (int64_t)1, 1);
}

static void step_init(step *x, uint64_t seed)
{
    random_graph *r = &x->r;
    koila_value saved;
    *x = (step){ 0 };
    rg_begin(r, NULL, seed);
    rg_axis(r, ROWS);
    x->begin = rg_pick(r, 4);
    x->end = x->begin + 2 + rg_pick(r, (uint32_t)(LENGTH - x->begin - 2));
    const koila_value in =
        rg_leaf(r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ ROWS, LENGTH });
    const koila_value first = rg_weight(r, HIDDEN, ROWS), head = rg_weight(r, WORDS, HIDDEN);
    const koila_value h = CALL("aten::mm", rg_matrix(r, HIDDEN, LENGTH), "tt", first, in);
    koila_value y = CALL("aten::mm", rg_matrix(r, WORDS, LENGTH), "tt", head, h);
    y = layer(r, y, LENGTH, &saved);
    koila_value z = taken(r, y, x->begin, x->end);
    const int64_t n = x->end - x->begin;
    int64_t n_last = n;
    x->is_taken_again = n > 4 && rg_pick(r, 3) == 0;
    if (x->is_taken_again) { /* all but the first and the last of these */
        z = taken(r, z, 1, n - 1);
        n_last = n - 2;
    } else if (rg_pick(r, 3) == 0) {
        z = CALL("aten::add.Tensor", rg_matrix(r, WORDS, n), "tt", z,
                 taken(r, y, x->begin, x->end));
    }
    koila_value ignored;
    z = layer(r, z, n_last, &ignored);
    add_target(x, sum_over(r, z, WORDS));
    x->is_read_whole = rg_pick(r, 4) == 0;
    if (x->is_read_whole)
        add_target(x, sum_over(r, y, WORDS));
    /* backward: z stands for its own gradient */
    koila_value g = x->is_taken_again ? padded(r, z, 1, n - 1, n) : z;
    const koila_value part = g;
    g = padded(r, part, x->begin, x->end, LENGTH);
    if (rg_pick(r, 3) == 0)
        g = CALL("aten::add.Tensor", rg_matrix(r, WORDS, LENGTH), "tt", g,
                 padded(r, part, x->begin, x->end, LENGTH));
    if (saved != KOILA_NONE)
        g = CALL("aten::mul.Tensor", rg_matrix(r, WORDS, LENGTH), "tt", g, saved);
    const koila_value turned = VIEW("aten::t", rg_turned(r, LENGTH, HIDDEN), "t", h);
    add_target(x, CALL("aten::mm", rg_matrix(r, WORDS, HIDDEN), "tt", g, turned));
    const koila_value back = VIEW("aten::t", rg_turned(r, HIDDEN, WORDS), "t", head);
    g = CALL("aten::mm", rg_matrix(r, HIDDEN, LENGTH), "tt", back, g);
    /* times what differs from token to token: zeros in other places make another sum */
    g = CALL("aten::mul.Tensor", rg_matrix(r, HIDDEN, LENGTH), "tt", g, h);
    add_target(x, sum_over(r, g, HIDDEN));
    if (r->status != KOILA_OK)
        abort();
    x->truth = truth_of(&x->h, r->g);
}

static void step_deinit(step *x)
{
    truth_free(x->r.g, x->truth);
    rg_deinit(&x->r);
}

/* The first row of a call that takes rows or puts zeros around some is one more; *was: before. */
static bool plant(koila_graph *g, koila_node n, koila_sig *was)
{
    koila_sig_info s = *koila__node_sig(g, n);
    koila_arg tokens[16];
    const char *name = koila_op_name(g->table, s.op);
    const bool pads = !strcmp(name, "aten::slice_backward");
    if (!pads && strcmp(name, "aten::slice.Tensor") != 0)
        return false;
    memcpy(tokens, s.tokens, s.n_tokens * sizeof *tokens);
    int64_t *begin = &tokens[s.start[pads ? 3 : 2]].u.i;
    int64_t *end = &tokens[s.start[pads ? 4 : 3]].u.i;
    const int64_t by = *end < LENGTH ? 1 : -1;
    *begin += by;
    *end += by;
    if (*begin < 0)
        return false;
    s.tokens = tokens;
    *was = g->nodes.at[n].sig;
    return koila_table_sig(g->table, &s, &g->nodes.at[n].sig) == KOILA_OK;
}

typedef struct seen {
    uint32_t n_steps, n_narrowed, n_faults, n_caught, n_plans;
} seen;

static void check_narrowed(step *x, seen *s)
{
    const koila__axis axis = { .size = LENGTH, .rows = LENGTH, .dim = 1 };
    koila__axis found = axis;
    koila__along view;
    koila__retold n;
    bool takes_rows;
    koila__narrow_lengths(x->r.g, &found);
    CHECK(found.n_others == 1u + x->is_taken_again && found.others[0] == x->end - x->begin);
    CHECK(koila__along_init(x->r.g, &found, &x->r.g->mem, &view) == KOILA_OK);
    CHECK(koila__narrow(x->r.g, &view, 0, x->targets, x->n_targets, NULL, &n, &takes_rows) ==
          KOILA_OK);
    koila__along_deinit(&view, &x->r.g->mem);
    CHECK(takes_rows && n.graph); /* of the backward at least */
    CHECK(retold_makes_the_truth(&n, x->r.g, x->truth, x->targets, x->n_targets));
    bool any_wide = false;
    for (koila_value v = 0; v < n.graph->values.n; v++) {
        const koila_meta_info *m = koila__value_meta(n.graph, v);
        any_wide |= m->size[0] == WORDS && m->size[1] == LENGTH;
    }
    CHECK(any_wide == x->is_read_whole);
    s->n_narrowed += !any_wide;
    for (koila_node k = 0; k < n.graph->nodes.n; k++) {
        koila_sig was;
        if (!plant(n.graph, k, &was))
            continue;
        s->n_faults++;
        s->n_caught += !retold_makes_the_truth(&n, x->r.g, x->truth, x->targets, x->n_targets);
        n.graph->nodes.at[k].sig = was;
    }
    koila__retold_deinit(&n);
}

TEST(narrow__takes_rows_before_the_product)
{
    seen s = { 0 };
    for (uint64_t seed = 1; seed <= 300; seed++) {
        step x;
        step_init(&x, seed);
        check_narrowed(&x, &s);
        s.n_plans += check_along(x.r.g, LENGTH, x.truth, x.targets, x.n_targets);
        step_deinit(&x);
        s.n_steps++;
    }
    CHECK(s.n_narrowed > s.n_steps / 2 && s.n_faults > s.n_steps && s.n_caught == s.n_faults);
    printf("  %u steps, %u without a whole product; %u plans; %u of %u faults seen\n", s.n_steps,
           s.n_narrowed, s.n_plans, s.n_caught, s.n_faults);
}

TEST(narrow__the_nth_allocation_may_fail)
{
    failing_allocator fail = { 0 };
    const koila_allocator mem = { failing_realloc, &fail };
    uint32_t n_again = 0;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        step x;
        step_init(&x, seed);
        n_again += x.is_taken_again;
        for (uint64_t at = 1;; at++) {
            const koila_plan_options o = { .struct_size = sizeof o,
                                           .budget_bytes = UINT64_MAX,
                                           .axes = KOILA_AXES_OTHER,
                                           .rows = 2 };
            koila_plan *p = NULL;
            fail = (failing_allocator){ .at = at };
            const koila_status status =
                koila_plan_new(x.r.g, x.targets, x.n_targets, &o, &mem, &p, NULL);
            CHECK(
                status == (fail.n_calls < at ? KOILA_OK : KOILA_NO_MEMORY) ||
                (status == KOILA_OK && gives_the_truth(p, x.r.g, x.truth, x.targets, x.n_targets)));
            koila_plan_free(p);
            CHECK_EQ(fail.n_live_bytes, 0);
            if (fail.n_calls < at)
                break;
        }
        step_deinit(&x);
    }
    CHECK(n_again > 0);
}
