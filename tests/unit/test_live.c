/* Liveness: the walk that skips slices equals the walk that does not; what is largest adds up;
 * accumulators and workspaces count. */
#include "interpreter.h"
#include "random_graph.h"

/* The same step over an axis of `rows` rows: a random graph recorded again, with that size wherever
 * the batch was. */
typedef struct made {
    random_graph r;
    koila__placed *p;
    koila__schedule s;
} made;
static bool make_random(made *m, uint64_t seed, koila__keep keep)
{
    memset(m, 0, sizeof *m);
    if (rg_init(&m->r, NULL, seed, NULL, 0, 40) != KOILA_OK)
        abort();
    koila_value targets[RG_MAX_VALUES];
    CHECK(koila__place(m->r.g, m->r.targets, m->r.n_targets, NULL, &m->p, NULL) == KOILA_OK);
    for (uint32_t i = 0; i < m->r.n_targets; i++)
        targets[i] = m->p->lowered[m->r.targets[i]];
    return koila__schedule_init(&m->s, m->p, targets, m->r.n_targets, keep, NULL, NULL) == KOILA_OK;
}
static void unmake(made *m)
{
    koila__schedule_deinit(&m->s);
    koila__placed_free(m->p);
    rg_deinit(&m->r);
}

static uint64_t thousand(void *user, koila_sig sig, int64_t rows, int64_t batch)
{
    uint64_t *n = user;
    ++*n;
    CHECK(rows <= batch);
    return sig == 0 ? UINT64_MAX : 1000;
}

TEST(live__the_largest_values_at_the_peak_add_up_to_it)
{
    uint32_t n_checked = 0;
    for (uint64_t seed = 1; seed <= 800; seed++) {
        made m;
        if (!make_random(&m, seed,
                         (koila__keep){ .horizon = seed % 2 ? UINT32_MAX : 2,
                                        .spacing = (uint32_t)(seed % 3),
                                        .cheap = true }))
            continue;
        for (int64_t rows = 1; rows < 4; rows++) {
            int64_t of_axis[2];
            for (uint32_t a = 0; a < m.r.g->axes.n; a++)
                of_axis[a] = rows < m.r.g->axes.at[a] ? rows : m.r.g->axes.at[a];
            uint64_t *stage = calloc(m.s.n_stages + 1, sizeof *stage);
            uint64_t bytes[RG_MAX_VALUES];
            uint64_t sum = 0;
            koila_value values[RG_MAX_VALUES];
            koila__live_top top = { .cap = RG_MAX_VALUES, .value = values, .bytes = bytes };
            koila__live_options o = { .rows = of_axis };
            const koila__live live = koila__live_simulate(m.p, &m.s, &o, stage, NULL, NULL);
            top.at_bytes = live.peak_bytes;
            o.top = &top;
            /* looking changes nothing */
            const koila__live again = koila__live_simulate(m.p, &m.s, &o, stage, NULL, NULL);
            CHECK(again.peak_bytes == live.peak_bytes && again.peak_stage == live.peak_stage &&
                  again.peak_node == live.peak_node);
            for (uint32_t i = 0; i < top.n; i++) {
                CHECK(i == 0 || bytes[i] <= bytes[i - 1]);
                sum += bytes[i];
            }
            uint64_t inside = 0; /* a combination that makes a new accumulator is nobody's value */
            for (uint32_t v = 0; v < m.p->graph->values.n; v++)
                if (m.p->value[v].kind == KOILA_P && m.p->value[v].combine != KOILA_SUM &&
                    koila__value_meta(m.p->graph, v)->n_bytes > inside)
                    inside = koila__value_meta(m.p->graph, v)->n_bytes;
            CHECK(sum <= live.peak_bytes && live.peak_bytes <= sum + inside);
            n_checked += sum == live.peak_bytes;
            uint64_t highest = 0;
            for (uint32_t k = 0; k < m.s.n_stages; k++)
                if (stage[k] > highest)
                    highest = stage[k];
            CHECK_EQ(highest, live.peak_bytes);
            koila__live_options bytes_only = { .rows = of_axis, .bytes_only = true };
            CHECK_EQ(koila__live_simulate(m.p, &m.s, &bytes_only, NULL, NULL, NULL).peak_bytes,
                     live.peak_bytes);
            bytes_only.limit = live.peak_bytes / 2; /* it may end early, but not below */
            const uint64_t above =
                koila__live_simulate(m.p, &m.s, &bytes_only, NULL, NULL, NULL).peak_bytes;
            CHECK(above <= live.peak_bytes &&
                  (above > bytes_only.limit || above == live.peak_bytes));
            CHECK(live.peak_bytes == 0 || stage[live.peak_stage] == live.peak_bytes);
            free(stage);
        }
        unmake(&m);
    }
    CHECK(n_checked > 1000);
}

TEST(live__slices_skipped_are_slices_walked)
{ /* the oracle counts bytes slice by slice; here with so many slices that nearly all are skipped */
    for (uint64_t seed = 1; seed <= 60; seed++) {
        random_graph r = { .seed = seed * 77 + 1 };
        uint16_t axis;
        r.status = koila_table_new(NULL, &r.t);
        if (r.status == KOILA_OK)
            r.status = koila_graph_new(r.t, NULL, &r.g);
        const int64_t rows = 50 + (int64_t)seed;
        const int64_t extent[] = { rows, 2, 3, rows, 1, 2 };
        memcpy(r.extent, extent, sizeof extent);
        if (r.status == KOILA_OK)
            r.status = koila_graph_axis(r.g, rows, &axis);
        rg_leaf(&r, KOILA_LEAF_BATCH, 0, 0, seed % 2 ? KOILA_DTYPE_F16 : KOILA_DTYPE_F32, 2,
                (int64_t[]){ rows, 3 });
        rg_leaf(&r, KOILA_LEAF_BATCH, 0, 0, seed % 2 ? KOILA_DTYPE_F16 : KOILA_DTYPE_F32, 2,
                (int64_t[]){ rows, 2 });
        for (int i = 0; i < 50; i++)
            rg_step(&r);
        r.targets[r.n_targets++] = r.values[r.n_values - 1];
        r.targets[r.n_targets++] = r.values[r.n_values / 2];
        koila__placed *p = NULL;
        koila__schedule s;
        CHECK(koila__place(r.g, r.targets, r.n_targets, NULL, &p, NULL) == KOILA_OK);
        const koila_value targets[] = { p->lowered[r.targets[0]], p->lowered[r.targets[1]] };
        CHECK(koila__schedule_init(&s, p, targets, 2,
                                   (koila__keep){ .horizon = 3, .spacing = 2, .cheap = true }, NULL,
                                   NULL) == KOILA_OK);
        uint64_t *leaf = calloc(p->graph->values.n + 1, sizeof *leaf);
        for (int64_t n = 1; n < rows; n = n * 3 + 1) {
            interpreter x = { .p = p, .s = &s, .rows = &n };
            CHECK(interpret(&x, leaf));
            CHECK_STR(x.why, "");
            CHECK_EQ(
                koila__live_simulate(p, &s, &(koila__live_options){ .rows = &n }, NULL, NULL, NULL)
                    .peak_bytes,
                x.h.peak);
            interpreter_deinit(&x);
            CHECK_EQ(x.h.n_stores, 0);
        }
        free(leaf);
        koila__schedule_deinit(&s);
        koila__placed_free(p);
        rg_deinit(&r);
    }
}

TEST(live__a_workspace_counts_while_its_operator_runs_and_saturates)
{
    made m;
    CHECK(make_random(&m, 4, (koila__keep){ .horizon = UINT32_MAX }));
    const int64_t rows[2] = { 1, 1 };
    uint64_t n_asked = 0;
    koila__live_options o = { .rows = rows };
    const koila__live plain = koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL);
    o.workspace = thousand;
    o.user = &n_asked;
    const koila__live more = koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL);
    CHECK(n_asked > 0 && more.peak_bytes >= 1000 && more.peak_bytes > plain.peak_bytes &&
          more.peak_node != KOILA_NONE);
    unmake(&m);
}

static uint64_t hundred(void *user, koila_sig sig, int64_t rows, int64_t batch)
{
    (void)user;
    (void)sig;
    (void)rows;
    (void)batch;
    return 100;
}

/* All results in slices are taken to be made by backwards that free as they go. */
static void make_inside(koila__schedule *s)
{
    for (uint32_t k = 0; k < s->n_stages; k++)
        for (uint32_t i = s->stages[k].n_events; i-- > 1;) {
            const koila__event_kind next = s->stages[k].events[i].kind;
            koila__event *e = &s->stages[k].events[i - 1];
            if (e->kind == KOILA__LOCAL_ALLOC && (next == KOILA__RUN || next == KOILA__LOCAL_MADE))
                e->kind = KOILA__LOCAL_MADE;
        }
}

static void check_spared(made *m, const int64_t rows[2])
{
    uint64_t peak[2][2];
    for (uint32_t bytes_only = 0; bytes_only < 2; bytes_only++) {
        koila__live_options o = { .rows = rows, .workspace = hundred, .bytes_only = bytes_only };
        peak[bytes_only][0] = koila__live_simulate(m->p, &m->s, &o, NULL, NULL, NULL).peak_bytes;
        o.spared = hundred;
        peak[bytes_only][1] = koila__live_simulate(m->p, &m->s, &o, NULL, NULL, NULL).peak_bytes;
    }
    for (uint32_t i = 0; i < 2; i++)
        CHECK_EQ(peak[0][i], peak[1][i]);
    CHECK(peak[0][1] <= peak[0][0] && peak[0][0] - peak[0][1] <= 100);
}

TEST(live__what_a_backward_frees_as_it_goes_is_not_counted_and_both_walks_agree)
{
    uint32_t n_less = 0;
    for (uint64_t seed = 1; seed <= 100; seed++) {
        made m;
        const int64_t rows[2] = { 1 + (int64_t)(seed % 2), 1 };
        if (!make_random(&m, seed, (koila__keep){ .horizon = UINT32_MAX }))
            continue;
        koila__live_options o = { .rows = rows, .workspace = hundred };
        const uint64_t before = koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL).peak_bytes;
        make_inside(&m.s);
        /* nothing is spared: as if all were there at once */
        CHECK_EQ(koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL).peak_bytes, before);
        check_spared(&m, rows);
        o.spared = hundred;
        n_less += koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL).peak_bytes < before;
        unmake(&m);
    }
    CHECK(n_less > 10);
}

TEST(live__a_lost_free_is_seen)
{ /* planted: the equation live == made - freed must end at what is left */
    uint32_t n_planted = 0, n_seen = 0;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        made m;
        CHECK(make_random(&m, seed, (koila__keep){ .horizon = UINT32_MAX }));
        const int64_t rows[2] = { 1, 1 };
        const koila__live_options o = { .rows = rows };
        const uint64_t before = koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL).peak_bytes;
        uint32_t n = 0;
        for (uint32_t k = 0; k < m.s.n_stages; k++)
            for (uint32_t i = 0; i < m.s.stages[k].n_events; i++)
                if (m.s.stages[k].events[i].kind == KOILA__LOCAL_FREE) {
                    m.s.stages[k].events[i] = (koila__event){ KOILA__RUN, 0 };
                    n++;
                }
        n_planted += n > 0;
        n_seen += koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL).peak_bytes > before;
        unmake(&m);
    }
    CHECK(n_planted > 0 && n_seen * 10 >= n_planted * 9);
}

static bool count_points(void *user, uint32_t stage, koila_node node, uint64_t bytes)
{
    (void)stage;
    (void)node;
    uint64_t *most = user;
    if (bytes > *most)
        *most = bytes;
    return true;
}

TEST(live__nobody_looking_on_the_peak_is_the_same_and_a_limit_ends_the_walk_only_above_it)
{
    uint32_t n_at_run = 0;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        made m;
        if (!make_random(&m, seed,
                         (koila__keep){ .horizon = seed % 2 ? UINT32_MAX : 2,
                                        .spacing = (uint32_t)(seed % 3),
                                        .cheap = true }))
            continue;
        int64_t rows[2] = { 1, 1 };
        koila__live_options o = { .rows = rows };
        uint64_t most = 0;
        const koila__live brief = koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL);
        const koila__live walked = koila__live_simulate(m.p, &m.s, &o, NULL, count_points, &most);
        CHECK_EQ(brief.peak_bytes, walked.peak_bytes);
        CHECK_EQ(brief.peak_stage, walked.peak_stage);
        CHECK(most <= walked.peak_bytes &&
              (walked.peak_node == KOILA_NONE || most == walked.peak_bytes));
        CHECK((most == walked.peak_bytes) == (walked.peak_node != KOILA_NONE) ||
              walked.peak_bytes == 0);
        n_at_run += walked.peak_node != KOILA_NONE;
        for (uint64_t by = 0; by < 3 && brief.peak_bytes > 2; by++) {
            o.limit = brief.peak_bytes - by;
            const uint64_t seen = koila__live_simulate(m.p, &m.s, &o, NULL, NULL, NULL).peak_bytes;
            CHECK(by ? seen > o.limit : seen == brief.peak_bytes);
        }
        unmake(&m);
    }
    CHECK(n_at_run > 100);
}
