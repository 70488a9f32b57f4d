/* Schedules: what runs where, what is kept, what is written in place. The oracle
 * (tests/oracle/test_schedule_oracle.c) says they are right; this says they are what was meant. */
#include "interpreter.h"
#include "random_graph.h"

/* A hand-made step: r is empty but for one axis of `rows` rows. */
static void begin(random_graph *r, int64_t rows)
{
    rg_begin(r, NULL, 0);
    rg_axis(r, rows);
    CHECK(r->status == KOILA_OK);
}
static koila_meta f32(random_graph *r, int64_t a, int64_t b)
{
    return rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ a, b }, NULL);
}
static koila_value leaf(random_graph *r, koila_leaf_kind kind, int64_t a, int64_t b)
{
    rg_leaf(r, kind, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ a, b });
    return r->values[r->n_values - 1];
}
static koila_value mm(random_graph *r, koila_value a, koila_value b)
{
    return rg_call(r, "aten::mm", 0, f32(r, rg_meta(r, a)->size[0], rg_meta(r, b)->size[1]), false,
                   "tt", a, b);
}
static koila_value same(random_graph *r, const char *name, koila_value a)
{
    return rg_call(r, name, 0, koila_value_get(r->g, a).meta, false, "t", a);
}
static koila_value pair(random_graph *r, const char *name, koila_value a, koila_value b)
{
    return rg_call(r, name, 0, koila_value_get(r->g, a).meta, false, "tt", a, b);
}
static koila_value write_to(random_graph *r, const char *name, koila_value a, koila_value b)
{
    return rg_call(r, name, 0, KOILA_NONE, false, "tt", a, b);
}
static koila_value t_of(random_graph *r, koila_value a)
{
    const koila_meta_info *m = rg_meta(r, a);
    return rg_call(r, "aten::t", KOILA_OP_VIEW,
                   rg_shape(r, m->dtype, 2, (int64_t[]){ m->size[1], m->size[0] },
                            (int64_t[]){ m->stride[1], m->stride[0] }),
                   false, "t", a);
}
static koila_value sum_to(random_graph *r, koila_value a, int64_t dim)
{
    const koila_meta_info *m = rg_meta(r, a);
    return rg_call(r, "aten::sum.dim_IntList", 0,
                   f32(r, dim ? m->size[0] : 1, dim ? 1 : m->size[1]), false, "tlb", a, 1, dim, 1);
}

typedef struct made {
    koila__placed *p;
    koila__schedule s;
} made;
typedef koila_status (*place_fn)(const koila_graph *, const koila_value *, uint32_t,
                                 const koila_allocator *, koila__placed **, koila_error *);
static made schedule_placed_by(place_fn place, random_graph *r, koila__keep keep)
{
    made m = { 0 };
    koila_error err = KOILA_ERROR_INIT;
    koila_value targets[RG_MAX_VALUES];
    CHECK(r->status == KOILA_OK &&
          place(r->g, r->targets, r->n_targets, NULL, &m.p, &err) == KOILA_OK);
    for (uint32_t i = 0; i < r->n_targets; i++)
        targets[i] = m.p->lowered[r->targets[i]];
    CHECK(koila__schedule_init(&m.s, m.p, targets, r->n_targets, keep, NULL, &err) == KOILA_OK);
    CHECK_STR(err.text, "");
    return m;
}
static made schedule(random_graph *r, koila__keep keep)
{
    return schedule_placed_by(koila__place, r, keep);
}
static void unmake(made *m)
{
    koila__schedule_deinit(&m->s);
    koila__placed_free(m->p);
}
/* Instructions of a kind, of an operator when name is not NULL; *last: the last one found. */
static uint32_t n_of(const made *m, koila_instr_kind kind, const char *name, koila_instr *last)
{
    uint32_t n = 0;
    for (uint32_t k = 0; k < m->s.n_stages; k++)
        for (uint32_t i = 0; i < m->s.stages[k].stage.n_instrs; i++) {
            const koila_instr in = m->s.stages[k].stage.instrs[i];
            if (in.kind != kind ||
                (name &&
                 strcmp(koila_op_name(m->p->graph->table, koila__node_sig(m->p->graph, in.id)->op),
                        name) != 0))
                continue;
            if (last)
                *last = in;
            n++;
        }
    return n;
}
static void want(random_graph *r, koila_value v) { r->targets[r->n_targets++] = v; }

static const koila__keep keep_all = { .horizon = UINT32_MAX }, keep_none = { .horizon = 0 };

TEST(schedule__an_ordinary_step_is_one_loop_that_runs_everything_once)
{
    random_graph r;
    begin(&r, 7);
    const koila_value x = leaf(&r, KOILA_LEAF_BATCH, 7, 5);
    const koila_value w1 = leaf(&r, KOILA_LEAF_REAL, 5, 3);
    const koila_value w2 = leaf(&r, KOILA_LEAF_REAL, 3, 4);
    const koila_value h = mm(&r, x, w1);
    const koila_value a = same(&r, "aten::relu", h);
    const koila_value y = mm(&r, a, w2);
    want(&r, sum_to(&r, y, 0));
    const koila_value gw2 = mm(&r, t_of(&r, a), y);
    const koila_value ga = mm(&r, y, t_of(&r, w2));
    const koila_value gw1 = mm(&r, t_of(&r, x), ga);
    want(&r, t_of(&r, t_of(&r, gw2)));
    want(&r, gw1);
    made m = schedule(&r, keep_all);
    CHECK_EQ(m.s.n_loops, 1);
    CHECK_EQ(n_of(&m, KOILA_DO_RUN, NULL, NULL), m.s.n_needed);
    CHECK(m.s.work == m.s.work_recorded);
    CHECK_EQ(n_of(&m, KOILA_DO_ADD, NULL, NULL), 3);
    CHECK_EQ(n_of(&m, KOILA_DO_KEEP, NULL, NULL) + n_of(&m, KOILA_DO_FETCH, NULL, NULL) +
                 n_of(&m, KOILA_DO_PUT, NULL, NULL),
             0);
    /* the gradient's views run right behind it, and it is added and gone before the next product
     * starts */
    const koila__stage *loop = NULL;
    for (uint32_t k = 0; k < m.s.n_stages; k++)
        if (m.s.stages[k].stage.is_loop)
            loop = &m.s.stages[k];
    bool adding = false;
    for (uint32_t i = 0; loop && i < loop->stage.n_instrs; i++) {
        if (loop->stage.instrs[i].kind != KOILA_DO_ADD)
            continue;
        adding = true;
        /* a copy of nothing: each accumulator is the first slice's own result */
        CHECK(loop->stage.instrs[i].flags & KOILA_INSTR_OWNED);
        CHECK_EQ(loop->stage.instrs[i + 1].kind, KOILA_DO_FREE);
    }
    CHECK(adding);
    unmake(&m);
    rg_deinit(&r);
}

TEST(schedule__a_dead_base_is_written_in_place_and_a_live_one_in_a_copy)
{
    for (int alive = 0; alive < 4; alive++) {
        random_graph r;
        begin(&r, 6);
        const koila_value x = leaf(&r, KOILA_LEAF_BATCH, 6, 6);
        const koila_value h = same(&r, "aten::neg", x);
        const koila_value view = alive == 2 ? t_of(&r, h) : KOILA_NONE;
        const koila_value base = alive == 3 ? x : h; /* 3: a leaf is not ours */
        const koila_value y = write_to(&r, "aten::add_.Tensor", base, x);
        want(&r, sum_to(&r, y, 0));
        if (alive == 1)
            want(&r, sum_to(&r, same(&r, "aten::relu", h), 0));
        if (alive == 2)
            want(&r, sum_to(&r, same(&r, "aten::relu", view), 1));
        made m = schedule(&r, keep_all);
        koila_instr run = { 0 };
        CHECK_EQ(n_of(&m, KOILA_DO_RUN, "aten::add_.Tensor", &run), 1);
        CHECK_EQ(run.steal, alive == 0);
        unmake(&m);
        rg_deinit(&r);
    }
}

TEST(schedule__what_is_written_over_is_not_made)
{
    random_graph r;
    begin(&r, 6);
    const koila_value x = leaf(&r, KOILA_LEAF_BATCH, 6, 5);
    const koila_value h = same(&r, "aten::neg", x);
    want(&r, sum_to(&r, rg_call(&r, "aten::copy_", 0, KOILA_NONE, true, "tt", h, x), 0));
    made m = schedule(&r, keep_all);
    CHECK_EQ(n_of(&m, KOILA_DO_RUN, "aten::neg", NULL), 0);
    CHECK_EQ(n_of(&m, KOILA_DO_RUN, "aten::copy_", NULL), 1);
    unmake(&m);
    rg_deinit(&r);
}

/* encode, see every other sample, go on from there per sample, and use the encoding again */
static void contrastive(random_graph *r)
{
    begin(r, 8);
    const koila_value x = leaf(r, KOILA_LEAF_BATCH, 8, 64);
    const koila_value w = leaf(r, KOILA_LEAF_REAL, 64, 64);
    const koila_value z = same(r, "aten::relu", mm(r, x, w));
    const koila_value logits = mm(r, z, t_of(r, z)); /* every row meets every row: z whole */
    want(r, mm(r, t_of(r, x), mm(r, logits, z)));
}

TEST(schedule__a_contrastive_loss_is_grad_cache_when_nothing_is_kept)
{
    random_graph r;
    contrastive(&r);
    made none = schedule(&r, keep_none);
    made all = schedule(&r, (koila__keep){ .horizon = UINT32_MAX, .cheap = true });
    CHECK_EQ(n_of(&none, KOILA_DO_KEEP, NULL, NULL), 0);
    /* the encoder runs for the logits, and again for the gradient */
    CHECK(n_of(&none, KOILA_DO_RUN, "aten::relu", NULL) > 1);
    CHECK_EQ(n_of(&all, KOILA_DO_RUN, "aten::relu", NULL), 1);
    CHECK(all.s.work <= none.s.work);
    unmake(&none);
    unmake(&all);
    rg_deinit(&r);
}

/* n layers that need a sum over the batch each, then a walk back that reads every layer's product
 * again */
static void deep(random_graph *r, int n, koila_value *last)
{
    begin(r, 64);
    koila_value x = leaf(r, KOILA_LEAF_BATCH, 64, 8);
    koila_value w = leaf(r, KOILA_LEAF_REAL, 8, 8);
    koila_value h[64];
    for (int i = 0; i < n; i++) {
        h[i] = mm(r, x, w);
        x = pair(r, "aten::sub.Tensor", h[i], sum_to(r, h[i], 0));
    }
    koila_value g = x;
    for (int i = n; i-- > 0;) {
        want(r, mm(r, t_of(r, h[i]), g));
        g = pair(r, "aten::mul.Tensor", g, h[i]);
        g = pair(r, "aten::sub.Tensor", g, sum_to(r, g, 0));
    }
    *last = g;
}

TEST(schedule__keeping_everything_expensive_runs_every_product_once)
{
    random_graph r;
    koila_value g;
    deep(&r, 12, &g);
    made all = schedule(&r, (koila__keep){ .horizon = UINT32_MAX, .cheap = true });
    made none = schedule(&r, keep_none);
    CHECK_EQ(all.s.n_loops, 24);
    CHECK_EQ(n_of(&all, KOILA_DO_RUN, "aten::mm", NULL), 24);
    CHECK(n_of(&none, KOILA_DO_RUN, "aten::mm", NULL) > 12 * 12);
    unmake(&all);
    unmake(&none);
    rg_deinit(&r);
}

TEST(schedule__checkpoints_hold_less_than_everything_and_run_less_than_all_again)
{
    random_graph r;
    koila_value g;
    deep(&r, 32, &g);
    const koila__keep some = { .horizon = 10, .spacing = 8, .cheap = true };
    made all = schedule(&r, (koila__keep){ .horizon = UINT32_MAX, .cheap = true });
    made middle = schedule(&r, some);
    made none = schedule(&r, keep_none);
    const int64_t rows = 1;
    const koila__live_options o = { .rows = &rows };
    const uint64_t a = koila__live_simulate(all.p, &all.s, &o, NULL, NULL, NULL).peak_bytes;
    const uint64_t b = koila__live_simulate(middle.p, &middle.s, &o, NULL, NULL, NULL).peak_bytes;
    const uint64_t c = koila__live_simulate(none.p, &none.s, &o, NULL, NULL, NULL).peak_bytes;
    CHECK(c < b && b < a);
    CHECK(all.s.work < middle.s.work && middle.s.work < 3 * all.s.work &&
          middle.s.work < none.s.work / 3);
    unmake(&all);
    unmake(&middle);
    unmake(&none);
    rg_deinit(&r);
}

TEST(schedule__what_a_policy_holds_between_loops_is_known_before_it_is_scheduled)
{
    static const koila__keep keeps[] = { { .horizon = UINT32_MAX, .cheap = true },
                                         { .horizon = 10, .spacing = 8, .cheap = true },
                                         { .horizon = 0, .cheap = true } };
    random_graph r;
    koila_value g;
    koila__scheduler *w = NULL;
    deep(&r, 32, &g);
    for (size_t k = 0; k < KOILA_COUNT(keeps); k++) {
        made m = schedule(&r, keeps[k]);
        koila_value targets[RG_MAX_VALUES];
        for (uint32_t i = 0; i < r.n_targets; i++)
            targets[i] = m.p->lowered[r.targets[i]];
        CHECK_EQ(koila__scheduler_new(&w, m.p, targets, r.n_targets, true, NULL, NULL), KOILA_OK);
        CHECK(koila__schedule_work(w, keeps[k]) == m.s.work);
        const koila__kept kept = koila__scheduler_kept(w);
        CHECK(kept.is_sure && kept.any == (keeps[k].horizon > 0));
        for (int64_t rows = 1; rows <= 32; rows *= 32) {
            const uint64_t peak =
                koila__live_simulate(m.p, &m.s, &(koila__live_options){ .rows = &rows }, NULL, NULL,
                                     NULL)
                    .peak_bytes;
            /* with one row a slice that is most of it */
            CHECK(kept.n_bytes <= peak && (rows > 1 || kept.n_bytes > peak / 3 * 2));
        }
        koila__scheduler_free(w);
        unmake(&m);
    }
    rg_deinit(&r);
}

/* Calls that need all rows run between two loops; what they hold at once no loop holds. */
TEST(schedule__what_calls_between_two_loops_hold_is_known_before_it_is_scheduled)
{
    const koila__keep keep = { .horizon = UINT32_MAX, .cheap = true };
    const int64_t one = 1;
    random_graph r;
    koila__scheduler *w = NULL;
    rg_begin(&r, NULL, 0);
    rg_axis(&r, 8);
    CHECK(r.status == KOILA_OK);
    rg_leaf(&r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ 8, 1000 });
    const koila_meta all = rg_shape(&r, KOILA_DTYPE_F32, 2, (int64_t[]){ 8, 1000 }, NULL);
    const koila_meta sum = rg_shape(&r, KOILA_DTYPE_F32, 2, (int64_t[]){ 1, 1000 }, NULL);
    const koila_value x = rg_call(&r, "aten::relu", 0, all, false, "t", r.values[0]);
    const koila_value a = rg_call(&r, "test::needs_all", 0, all, false, "t", x);
    const koila_value b = rg_call(&r, "test::needs_all", 0, all, false, "t", a);
    const koila_value c = rg_call(&r, "test::needs_all_of_both", 0, all, false, "tt", a, b);
    const koila_value y = rg_call(&r, "aten::mul.Tensor", 0, all, false, "tt", r.values[0], c);
    r.targets[r.n_targets++] =
        rg_call(&r, "aten::sum.dim_IntList", 0, sum, false, "tlb", y, 1, (int64_t)0, 1);
    CHECK(r.status == KOILA_OK);
    made m = schedule(&r, keep);
    const koila_value target = m.p->lowered[r.targets[0]];
    CHECK_EQ(koila__scheduler_new(&w, m.p, &target, 1, true, NULL, NULL), KOILA_OK);
    CHECK_EQ(koila__scheduler_n_loops(w), 2);
    (void)koila__schedule_work(w, keep);
    CHECK_EQ(koila__scheduler_kept(w).n_bytes, 3 * 8 * 1000 * 4); /* a, b and c */
    CHECK_EQ(koila__scheduler_kept(w).of_calls, 3 * 8 * 1000 * 4);
    CHECK_EQ(
        koila__live_simulate(m.p, &m.s, &(koila__live_options){ .rows = &one }, NULL, NULL, NULL)
            .peak_bytes,
        3 * 8 * 1000 * 4);
    koila__scheduler_free(w);
    unmake(&m);
    rg_deinit(&r);
}

TEST(schedule__every_piece_kept_is_given_up_once_and_in_a_later_loop)
{
    static const koila__keep keeps[] = { { .horizon = UINT32_MAX, .cheap = true },
                                         { .horizon = 1, .cheap = true },
                                         { .horizon = 3, .spacing = 1, .cheap = true },
                                         { .horizon = 4, .spacing = 2, .cheap = true } };
    uint32_t n_kept = 0;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        random_graph r;
        if (rg_init(&r, NULL, seed, NULL, 0, 40) != KOILA_OK)
            abort();
        made m = schedule(&r, keeps[seed % KOILA_COUNT(keeps)]);
        uint8_t *kept = calloc(m.p->graph->values.n + 1, 1);
        for (uint32_t k = 0; k < m.s.n_stages; k++)
            for (uint32_t i = 0; i < m.s.stages[k].stage.n_instrs; i++) {
                const koila_instr in = m.s.stages[k].stage.instrs[i];
                if (in.kind == KOILA_DO_KEEP) {
                    CHECK(!kept[in.id]);
                    kept[in.id] = 1;
                    n_kept++;
                }
                if (in.kind == KOILA_DO_FETCH)
                    CHECK(kept[in.id]);
                if (in.kind == KOILA_DO_FETCH && in.flags & KOILA_INSTR_LAST)
                    kept[in.id] = 0;
            }
        for (uint32_t v = 0; v < m.p->graph->values.n; v++)
            CHECK(!kept[v]);
        free(kept);
        unmake(&m);
        rg_deinit(&r);
    }
    CHECK(n_kept > 100);
}

/* The first stage of operators outside loops from `stage` on: there whole values end. */
static uint32_t next_whole(const made *m, uint32_t stage)
{
    while (stage < m->s.n_stages && m->s.stages[stage].stage.is_loop)
        stage++;
    return stage;
}

static bool is_made_in_loop(const made *m, koila_value v)
{
    const koila_node n = m->p->graph->values.at[v].node;
    return n != KOILA_NONE && m->p->node[n].in_loop;
}

/* [value] the last stage that reads it whole or slices it; the stage that frees what a loop made
 * whole, else 0. */
static void find_ends(const made *m, uint32_t *last, uint32_t *freed)
{
    const koila_graph *g = m->p->graph;
    for (uint32_t k = 0; k < m->s.n_stages; k++) {
        const koila_stage *stage = &m->s.stages[k].stage;
        for (uint32_t x = 0; x < stage->n_instrs; x++) {
            const koila_instr in = stage->instrs[x];
            if (in.kind == KOILA_DO_SLICE)
                last[in.id] = k;
            if (in.kind == KOILA_DO_FREE && !stage->is_loop && is_made_in_loop(m, in.id))
                freed[in.id] = k;
            const koila_sig_info *s = koila__node_sig(g, in.kind == KOILA_DO_RUN ? in.id : 0);
            for (uint32_t i = 0; in.kind == KOILA_DO_RUN && i < s->n_inputs; i++) {
                const koila_node_info *node = &g->nodes.at[in.id];
                const bool is_read = !s->n_writes || koila__reads(s, i);
                if (is_read &&
                    (!stage->is_loop || m->p->need[node->first_input + i].kind == KOILA_R))
                    last[g->inputs.at[node->first_input + i]] = k;
            }
        }
    }
}

TEST(schedule__a_whole_value_ends_with_the_last_loop_that_reads_it)
{
    static const koila__keep keeps[] = { { .horizon = UINT32_MAX, .cheap = true },
                                         { .horizon = 1, .cheap = true },
                                         { .horizon = 3, .spacing = 1, .cheap = true },
                                         { .horizon = 0, .cheap = true } };
    uint32_t n_ends = 0;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        random_graph r;
        if (rg_init(&r, NULL, seed, NULL, 0, 40) != KOILA_OK)
            abort();
        made m = schedule(&r, keeps[seed % KOILA_COUNT(keeps)]);
        const uint32_t n_values = m.p->graph->values.n;
        uint32_t *last = calloc(n_values + 1, sizeof *last);
        uint32_t *freed = calloc(n_values + 1, sizeof *freed);
        find_ends(&m, last, freed);
        for (koila_value v = 0; v < n_values; v++)
            if (freed[v]) {
                CHECK(last[v] <= freed[v]);
                CHECK(freed[v] <= next_whole(&m, last[v] + 1) || freed[v] == last[v]);
                n_ends++;
            }
        free(last);
        free(freed);
        unmake(&m);
        rg_deinit(&r);
    }
    CHECK(n_ends > 500);
}

TEST(schedule__a_policy_that_runs_everything_again_and_again_is_refused)
{
    random_graph r;
    koila_value g;
    deep(&r, 40, &g);
    koila__placed *p = NULL;
    koila__schedule s = { .n_stages = 77 };
    koila_value targets[RG_MAX_VALUES];
    koila_error err = KOILA_ERROR_INIT;
    CHECK(koila__place(r.g, r.targets, r.n_targets, NULL, &p, NULL) == KOILA_OK);
    for (uint32_t i = 0; i < r.n_targets; i++)
        targets[i] = p->lowered[r.targets[i]];
    const koila__keep keep = { .horizon = 0, .max_instrs = 1 };
    CHECK_EQ(koila__schedule_init(&s, p, targets, r.n_targets, keep, NULL, &err),
             KOILA_UNSUPPORTED);
    CHECK(s.n_stages == 77 && err.code == KOILA_UNSUPPORTED);
    koila__placed_free(p);
    rg_deinit(&r);
}

TEST(schedule__the_nth_allocation_may_fail)
{
    failing_allocator fail = { 0 };
    const koila_allocator mem = { failing_realloc, &fail };
    for (uint64_t seed = 40; seed < 44; seed++) {
        random_graph r;
        if (rg_init(&r, NULL, seed, NULL, 0, 40) != KOILA_OK)
            abort();
        koila__placed *p = NULL;
        koila_value targets[RG_MAX_VALUES];
        CHECK(koila__place(r.g, r.targets, r.n_targets, NULL, &p, NULL) == KOILA_OK);
        for (uint32_t i = 0; i < r.n_targets; i++)
            targets[i] = p->lowered[r.targets[i]];
        for (uint64_t at = 1;; at++) {
            fail = (failing_allocator){ .at = at };
            koila__schedule s = { 0 };
            const koila_status status = koila__schedule_init(
                &s, p, targets, r.n_targets,
                (koila__keep){ .horizon = 2, .spacing = 1, .cheap = true }, &mem, NULL);
            CHECK(status == (fail.n_calls < at ? KOILA_OK : KOILA_NO_MEMORY));
            if (status == KOILA_OK)
                koila__schedule_deinit(&s);
            CHECK_EQ(fail.n_live_bytes, 0);
            if (fail.n_calls < at)
                break;
        }
        koila__placed_free(p);
        rg_deinit(&r);
    }
}

/* Have two schedules the same loops, with the same instructions? */
static bool is_same(const koila__schedule *a, const koila__schedule *b)
{
    bool same = a->n_stages == b->n_stages && a->work == b->work && a->n_keeps == b->n_keeps;
    for (uint32_t i = 0; same && i < a->n_stages; i++) {
        const koila__stage *x = &a->stages[i];
        const koila__stage *y = &b->stages[i];
        same = x->stage.n_instrs == y->stage.n_instrs && x->n_events == y->n_events &&
               x->any_wide == y->any_wide;
        for (uint32_t k = 0; same && k < x->stage.n_instrs; k++) {
            const koila_instr u = x->stage.instrs[k];
            const koila_instr v = y->stage.instrs[k];
            same = u.kind == v.kind && u.flags == v.flags && u.id == v.id && u.user == v.user &&
                   u.steal == v.steal;
        }
    }
    return same;
}

/* A random step, placed, with a scheduler of it. targets[RG_MAX_VALUES] outlives it. */
static void make_scheduler(uint64_t seed, random_graph *r, koila__placed **p, koila_value *targets,
                           koila__scheduler **w)
{
    if (rg_init(r, NULL, seed, NULL, 0, 60) != KOILA_OK)
        abort();
    CHECK(koila__place(r->g, r->targets, r->n_targets, NULL, p, NULL) == KOILA_OK);
    for (uint32_t i = 0; i < r->n_targets; i++)
        targets[i] = (*p)->lowered[r->targets[i]];
    CHECK_EQ(koila__scheduler_new(w, *p, targets, r->n_targets, true, NULL, NULL), KOILA_OK);
}

TEST(schedule__a_scheduler_used_again_makes_what_a_fresh_one_makes_and_knows_the_work_before)
{
    static const koila__keep keeps[] = { { .horizon = 0, .max_instrs = 1, .cheap = true },
                                         { .horizon = UINT32_MAX, .cheap = true },
                                         { .horizon = 3, .spacing = 1, .cheap = true },
                                         { .horizon = 0, .cheap = true },
                                         { .horizon = 4, .spacing = 2, .cheap = true } };
    uint32_t n_exact = 0, n_many = 0, n_kept = 0, n_tight = 0, n_close = 0;
    for (uint64_t seed = 1; seed <= 150; seed++) {
        random_graph r;
        koila__placed *p = NULL;
        koila__scheduler *w = NULL;
        koila_value targets[RG_MAX_VALUES];
        make_scheduler(seed, &r, &p, targets, &w);
        double least = -1;
        for (size_t k = 0; k < KOILA_COUNT(keeps); k++) {
            koila__schedule again = { 0 }, fresh = { 0 };
            const koila_status status = koila__schedule_make(w, keeps[k], &again, NULL);
            CHECK_EQ(koila__schedule_init(&fresh, p, targets, r.n_targets, keeps[k], NULL, NULL),
                     status);
            if (status != KOILA_OK)
                continue;
            CHECK(is_same(&again, &fresh));
            const double before = koila__schedule_work(w, keeps[k]);
            CHECK(before <= again.work * (1 + 1e-12));
            n_exact += before >= again.work * (1 - 1e-12);
            const koila__kept kept = koila__scheduler_kept(w);
            CHECK(!kept.is_sure || before == again.work);
            CHECK(kept.any == (again.n_keeps > 0) || !kept.is_sure);
            n_kept += kept.n_bytes > 0;
            if (keeps[k].horizon == UINT32_MAX)
                least = again.work;
            CHECK(again.work >= least * (1 - 1e-12)); /* keeping all is the least work */
            n_many += again.work > least * 1.2;
            /* what is known before holds whatever the number of slices, and often it is all there
             * is */
            for (int64_t rows = 1; rows < 5; rows += 3) {
                const int64_t of_axis[2] = { rows < r.extent[0] ? rows : r.extent[0],
                                             rows < r.extent[1] ? rows : r.extent[1] };
                const uint64_t peak =
                    koila__live_simulate(p, &again, &(koila__live_options){ .rows = of_axis }, NULL,
                                         NULL, NULL)
                        .peak_bytes;
                CHECK(kept.n_bytes <= peak && koila__scheduler_results_bytes(w) <= peak);
                CHECK(kept.of_calls <= kept.n_bytes);
                n_tight += peak > 0 && koila__scheduler_results_bytes(w) == peak;
                n_close += koila__scheduler_n_loops(w) > 1 && kept.n_bytes > peak / 4 * 3;
            }
            koila__keep less = keeps[k];
            less.max_work = again.work / 2;
            koila__schedule none = { .n_stages = 77 };
            CHECK(again.work == 0 ||
                  (koila__schedule_make(w, less, &none, NULL) == KOILA_UNSUPPORTED &&
                   none.n_stages == 77));
            koila__schedule_deinit(&again);
            koila__schedule_deinit(&fresh);
        }
        koila__scheduler_free(w);
        koila__placed_free(p);
        rg_deinit(&r);
    }
    CHECK(n_exact > 400 && n_many > 50);
    CHECK(n_kept > 50 && n_tight > 20);
    CHECK(n_close > 80); /* whole values between loops count too */
}

TEST(schedule__policies_of_the_same_choices_make_the_same_schedule)
{
    static const koila__keep keeps[] = { { .horizon = UINT32_MAX, .cheap = true },
                                         { .horizon = 1, .cheap = true },
                                         { .horizon = 3, .spacing = 1, .cheap = true },
                                         { .horizon = 4, .spacing = 2, .cheap = true },
                                         { .horizon = 0, .cheap = true } };
    enum { N = KOILA_COUNT(keeps) };
    uint32_t n_same = 0, n_other = 0;
    for (uint64_t seed = 1; seed <= 150; seed++) {
        random_graph r;
        koila__placed *p = NULL;
        koila__scheduler *w = NULL;
        koila_value targets[RG_MAX_VALUES];
        make_scheduler(seed, &r, &p, targets, &w);
        koila__schedule made_by[N] = { 0 };
        koila__kept kept[N];
        bool is_made[N];
        for (uint32_t k = 0; k < N; k++) {
            koila__schedule_work(w, keeps[k]);
            kept[k] = koila__scheduler_kept(w);
            is_made[k] = koila__schedule_make(w, keeps[k], &made_by[k], NULL) == KOILA_OK;
        }
        for (uint32_t i = 0; i < N; i++)
            for (uint32_t k = 0; k < i; k++) {
                if (!is_made[i] || !is_made[k] || !kept[i].is_sure || !kept[k].is_sure)
                    continue;
                const bool same = kept[i].choices == kept[k].choices;
                CHECK(!same || is_same(&made_by[i], &made_by[k]));
                n_same += same && kept[i].any;
                n_other += !same;
            }
        for (uint32_t k = 0; k < N; k++)
            koila__schedule_deinit(&made_by[k]);
        koila__scheduler_free(w);
        koila__placed_free(p);
        rg_deinit(&r);
    }
    CHECK(n_same > 20 && n_other > 20);
}

TEST(schedule__what_whole_needs_is_known_before_it_is_placed)
{
    uint32_t n_exact = 0, n_written = 0;
    for (uint64_t seed = 1; seed <= 600; seed++) {
        random_graph r;
        koila__placed *p = NULL;
        koila__schedule s;
        koila_value targets[RG_MAX_VALUES];
        uint64_t at_least = 0;
        int64_t rows[2];
        bool writes = false;
        if (rg_init(&r, NULL, seed, NULL, 0, seed % 2 ? 10 : 40) != KOILA_OK ||
            koila__place_whole(r.g, r.targets, r.n_targets, NULL, &p, NULL) != KOILA_OK)
            abort();
        for (uint32_t i = 0; i < r.n_targets; i++)
            targets[i] = p->lowered[r.targets[i]];
        for (uint32_t a = 0; a < r.g->axes.n; a++)
            rows[a] = r.g->axes.at[a];
        for (uint32_t n = 0; n < r.g->nodes.n; n++)
            writes |= koila__node_sig(r.g, n)->n_writes > 0 ||
                      koila__adds_two(r.g->table, koila__node_sig(r.g, n));
        CHECK_EQ(koila__schedule_init(&s, p, targets, r.n_targets,
                                      (koila__keep){ .horizon = UINT32_MAX }, NULL, NULL),
                 KOILA_OK);
        CHECK_EQ(koila__schedule_whole_bytes(r.g, r.targets, r.n_targets, NULL, &at_least),
                 KOILA_OK);
        const uint64_t peak =
            koila__live_simulate(p, &s, &(koila__live_options){ .rows = rows }, NULL, NULL, NULL)
                .peak_bytes;
        CHECK(at_least <= peak);
        CHECK(writes || at_least == peak);
        n_exact += peak > 0 && !writes;
        n_written += writes && at_least > 0;
        koila__schedule_deinit(&s);
        koila__placed_free(p);
        rg_deinit(&r);
    }
    CHECK(n_exact > 20 && n_written > 100);
}

/* Is there a loop in which v is sliced twice? */
static bool is_cut_twice(const made *m)
{
    for (uint32_t k = 0; k < m->s.n_stages; k++) {
        const koila_stage *st = &m->s.stages[k].stage;
        for (uint32_t i = 0; i < st->n_instrs; i++)
            for (uint32_t h = 0; h < i; h++)
                if (st->instrs[i].kind == KOILA_DO_SLICE && st->instrs[h].kind == KOILA_DO_SLICE &&
                    st->instrs[h].id == st->instrs[i].id)
                    return true;
    }
    return false;
}

TEST(schedule__a_slice_cut_again_is_new_storage_while_views_of_the_first_one_live)
{
    random_graph r;
    begin(&r, 6);
    rg_leaf(&r, KOILA_LEAF_BATCH, 0, 1, KOILA_DTYPE_F32, 2, (int64_t[]){ 6, 6 });
    /* cut by columns for a view that the product reads, and by rows for the product itself */
    const koila_value zeros = same(&r, "aten::zeros_like", r.values[0]);
    const koila_value product = mm(&r, zeros, zeros);
    want(&r, pair(&r, "aten::sub.Tensor", product, sum_to(&r, product, 1)));
    made m = schedule_placed_by(koila__place_cut, &r, keep_all);
    CHECK(is_cut_twice(&m));
    for (int64_t rows = 1; rows <= 6; rows++) {
        uint64_t *leaf_seed = calloc(m.p->graph->values.n + 1, sizeof *leaf_seed);
        interpreter x = { .p = m.p, .s = &m.s, .rows = &rows };
        CHECK(interpret(&x, leaf_seed));
        CHECK_STR(x.why, "");
        const koila__live_options o = { .rows = &rows };
        CHECK_EQ(koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL).peak_bytes, x.h.peak);
        interpreter_deinit(&x);
        CHECK_EQ(x.h.n_stores, 0);
        free(leaf_seed);
    }
    unmake(&m);
    rg_deinit(&r);
}
