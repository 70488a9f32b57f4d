/* Plans: the fewest slices that fit, errors that say what is missing, the same plan twice, and the
 * invariants that plant-and-see proves. */
#include "interpreter.h"
#include "random_graph.h"
#include "same_plan.h"

#include "engine/floor.h"
#include "engine/plan_inside.h"
#include "engine/recompute.h"

#include <math.h>

static koila_plan_options options(uint64_t budget, int64_t rows)
{
    return (koila_plan_options){ .struct_size = sizeof(koila_plan_options),
                                 .budget_bytes = budget,
                                 .rows = rows };
}

/* relu(x w) summed over the batch, and its gradient: x [rows, 64], w [64, 32] */
static koila_status chain(random_graph *r, const koila_allocator *mem, int64_t rows)
{
    rg_begin(r, mem, 0);
    rg_axis(r, rows);
    rg_leaf(r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ rows, 64 });
    rg_leaf(r, KOILA_LEAF_REAL, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ 64, 32 });
    if (r->status != KOILA_OK)
        return r->status;
    const koila_value x = r->values[0];
    const koila_value w = r->values[1];
    const koila_meta y = rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ rows, 32 }, NULL);
    const koila_meta xt =
        rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ 64, rows }, (int64_t[]){ 1, 64 });
    const koila_value h = rg_call(r, "aten::mm", 0, y, false, "tt", x, w);
    const koila_value a = rg_call(r, "aten::relu", 0, y, false, "t", h);
    if (r->status != KOILA_OK)
        return r->status;
    const koila_value sum = rg_call(r, "aten::sum.dim_IntList", 0,
                                    rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ 1, 32 }, NULL),
                                    false, "tlb", a, 1, (int64_t)0, 1);
    if (r->status != KOILA_OK)
        return r->status;
    const koila_value t = rg_call(r, "aten::t", KOILA_OP_VIEW, xt, false, "t", x);
    if (r->status != KOILA_OK)
        return r->status;
    const koila_value g =
        rg_call(r, "aten::mm", 0, rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ 64, 32 }, NULL),
                false, "tt", t, a);
    r->targets[r->n_targets++] = sum;
    r->targets[r->n_targets++] = g;
    return r->status;
}
static koila_status plan_of(const random_graph *r, koila_plan_options o, koila_plan **p,
                            koila_error *err)
{
    return koila_plan_new(r->g, r->targets, r->n_targets, &o, NULL, p, err);
}
static koila_plan_info info_of(const random_graph *r, koila_plan_options o)
{
    koila_plan *p = NULL;
    koila_plan_info info = { 0 };
    if (plan_of(r, o, &p, NULL) == KOILA_OK) {
        CHECK(koila_plan_check(p, NULL));
        info = koila_plan_get(p);
    }
    koila_plan_free(p);
    return info;
}

TEST(plan__what_fits_whole_runs_whole_and_a_byte_less_does_not)
{
    random_graph r;
    CHECK(chain(&r, NULL, 100) == KOILA_OK);
    const koila_plan_info whole = info_of(&r, options(UINT64_MAX, 0));
    CHECK(whole.n_slices == 1 && whole.rows == 100 && whole.batch == 100 && whole.n_loops == 0 &&
          whole.replay_ratio == 1);
    CHECK_EQ(whole.peak_bytes, 100 * 32 * 4 * 2 > 100 * 32 * 4 + 128 + 64 * 32 * 4
                                   ? 100 * 32 * 4 * 2
                                   : 100 * 32 * 4 + 128 + 64 * 32 * 4);
    CHECK_EQ(info_of(&r, options(whole.peak_bytes, 0)).n_slices, 1);
    uint64_t budget = whole.peak_bytes - 1;
    uint32_t n_slices = 1;
    for (;;) { /* ever less: ever more slices, and each peak fits */
        const koila_plan_info i = info_of(&r, options(budget, 0));
        if (!i.struct_size)
            break;
        CHECK(i.peak_bytes <= budget && i.n_slices > n_slices && i.n_recorded == whole.n_recorded &&
              i.replay_ratio == 1);
        n_slices = i.n_slices;
        budget = i.peak_bytes - 1;
    }
    CHECK_EQ(n_slices, 100); /* to the last row */
    rg_deinit(&r);
}

TEST(plan__what_never_fits_is_said_with_its_numbers)
{
    random_graph r;
    koila_plan *p = (koila_plan *)&r;
    koila_error err = KOILA_ERROR_INIT;
    CHECK(chain(&r, NULL, 100) == KOILA_OK);
    CHECK_EQ(plan_of(&r, options(100, 0), &p, &err), KOILA_OOM);
    CHECK(p == (koila_plan *)&r && err.code == KOILA_OOM); /* untouched */
    CHECK(strstr(err.text, "a slice of 1 row(s) needs ") && strstr(err.text, " 100 B are free, ") &&
          strstr(err.text, " bytes short; largest: ") && strstr(err.text, "aten::mm"));
    char said[64];
    snprintf(said, sizeof said, " %llu bytes short", (unsigned long long)err.missing_bytes);
    CHECK(err.missing_bytes > 0 && strstr(err.text, said));
    /* a caller from before missing_bytes: its buffer ends there */
    err.struct_size = offsetof(koila_error, missing_bytes);
    err.missing_bytes = 12345;
    CHECK_EQ(plan_of(&r, options(100, 0), &p, &err), KOILA_OOM);
    CHECK(strstr(err.text, said) && err.missing_bytes == 12345);
    /* what is not about memory is short of none */
    err.struct_size = sizeof err;
    r.targets[0] = 9999;
    CHECK_EQ(plan_of(&r, options(100, 0), &p, &err), KOILA_BAD_ARGUMENT);
    CHECK_EQ(err.missing_bytes, 0);
    rg_deinit(&r);
}

static int count_bytes(void *user, const char *text, size_t n)
{
    (void)text;
    *(size_t *)user += n;
    return 0;
}
static bool print_and_refuse(void *user, const koila_plan *p)
{
    size_t *n_bytes = user;
    const koila_plan_info info = koila_plan_get(p);
    CHECK(info.struct_size == sizeof info && info.n_stages > 0 && info.peak_node == KOILA_NONE);
    CHECK(koila_plan_check(p, NULL));
    CHECK(koila_plan_print(p, count_bytes, n_bytes) == KOILA_OK);
    return false;
}

TEST(plan__a_plan_can_be_read_while_it_is_asked_about)
{
    for (uint64_t seed = 1; seed <= 100; seed++) {
        random_graph r;
        size_t n_bytes = 0;
        koila_plan_options o = options(UINT64_MAX, 0);
        o.accepts = print_and_refuse;
        o.accepts_user = &n_bytes;
        CHECK(rg_init(&r, NULL, seed, NULL, 0, 20) == KOILA_OK);
        info_of(&r, o);
        CHECK(n_bytes > 0);
        rg_deinit(&r);
    }
}

TEST(plan__only_a_sum_of_half_precision_in_several_slices_is_accumulated_wider)
{
    const koila_share sum = { .kind = KOILA_SHARE_PARTIAL, .partial = KOILA_PARTIAL_SUM };
    const koila_share max = { .kind = KOILA_SHARE_PARTIAL, .partial = KOILA_PARTIAL_MAX };
    const koila_share whole = { .kind = KOILA_SHARE_WHOLE };
    CHECK_EQ(koila_accumulator_dtype(KOILA_DTYPE_F16, sum, false), KOILA_DTYPE_F32);
    CHECK_EQ(koila_accumulator_dtype(KOILA_DTYPE_BF16, sum, false), KOILA_DTYPE_F32);
    CHECK_EQ(koila_accumulator_dtype(KOILA_DTYPE_BF16, sum, true), KOILA_DTYPE_BF16);
    CHECK_EQ(koila_accumulator_dtype(KOILA_DTYPE_F16, max, false), KOILA_DTYPE_F16);
    CHECK_EQ(koila_accumulator_dtype(KOILA_DTYPE_F16, whole, false), KOILA_DTYPE_F16);
    CHECK_EQ(koila_accumulator_dtype(KOILA_DTYPE_F64, sum, false), KOILA_DTYPE_F64);
}

static koila_slice_kind form(int64_t row_stride, int64_t column_stride, uint8_t dim, int64_t outer,
                             bool all_rows)
{
    koila_table *t = NULL;
    koila_meta m = 0;
    const koila_share cut = { .kind = KOILA_SHARE_SLICE, .dim = dim, .outer = outer, .inner = 1 };
    const int64_t size[] = { 6, 4 };
    const int64_t stride[] = { row_stride, column_stride };
    CHECK(koila_table_new(NULL, &t) == KOILA_OK &&
          koila_table_meta(t, KOILA_DTYPE_F32, 0, 2, size, stride, &m) == KOILA_OK);
    const koila_slice_kind kind = koila_slice_form(koila_meta_get(t, m), cut, all_rows);
    koila_table_free(t);
    return kind;
}

TEST(plan__a_slice_is_a_view_where_its_rows_lie_together)
{
    CHECK_EQ(form(4, 1, 0, 1, false), KOILA_SLICE_VIEW);
    CHECK_EQ(form(4, 1, 1, 1, false), KOILA_SLICE_COPY);
    CHECK_EQ(form(4, 1, 1, 1, true), KOILA_SLICE_VIEW);
    CHECK_EQ(form(1, 6, 0, 1, false), KOILA_SLICE_COPY); /* transposed */
    CHECK_EQ(form(1, 6, 1, 1, false), KOILA_SLICE_VIEW);
    CHECK_EQ(form(1, 12, 0, 1, false), KOILA_SLICE_VIEW); /* not dense */
    CHECK_EQ(form(4, 1, 0, 2, false), KOILA_SLICE_COPY);  /* several blocks */
    CHECK_EQ(form(4, 1, 0, 2, true), KOILA_SLICE_COPY);
}

/* What operators use inside, any way but in order of the rows. */
static uint64_t uneven(void *user, koila_sig sig, int64_t rows, int64_t batch)
{
    return *(uint64_t *)user ? ((uint64_t)sig * 7919 + (uint64_t)(rows * 31) % 17 * 64) % 2048
                             : 0 * (uint64_t)batch;
}

TEST(plan__the_choice_is_the_first_of_all_numbers_of_slices_that_fits)
/* one after another with forced rows, which looks at no other number, and a budget: the same plan,
 * or the same words about what is short */
{
    uint32_t n_sliced = 0, n_short = 0, n_even = 0;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        random_graph r;
        uint64_t inside = seed % 2;
        CHECK(rg_init(&r, NULL, seed, NULL, 0, 40) == KOILA_OK);
        int64_t largest = 1;
        bool even = true;
        for (uint32_t a = 0; a < r.g->axes.n; a++) {
            const int64_t n = r.g->axes.at[a];
            largest = n > largest ? n : largest;
            even &= n > 0 && (n & (n - 1)) == 0;
        }
        const uint64_t whole = info_of(&r, options(UINT64_MAX, 0)).peak_bytes;
        /* with two axes forced rows are other rows */
        for (uint64_t part = 1; part <= 4 && r.g->axes.n == 1 && largest > 1; part++) {
            koila_plan_options o = options(whole * part / 5, 0);
            koila_plan *p = NULL, *q = NULL;
            koila_error err = KOILA_ERROR_INIT, other = KOILA_ERROR_INIT;
            o.workspace = uneven;
            o.user = &inside;
            const koila_status status = plan_of(&r, o, &p, &err);
            koila_status expected = KOILA_OOM;
            koila_plan_options forced = o;
            forced.rows = largest; /* whole first */
            expected = plan_of(&r, forced, &q, &other);
            for (int64_t n = 2; expected == KOILA_OOM && n <= largest; n = n < largest / 2 ? n * 2
                                                                           : n < largest ? largest
                                                                                         : n + 1) {
                forced.rows = (largest + n - 1) / n;
                expected = plan_of(&r, forced, &q, &other);
            }
            CHECK_EQ(status, expected);
            if (status == KOILA_OK && expected == KOILA_OK) {
                const koila_plan_info a = koila_plan_get(p);
                const koila_plan_info b = koila_plan_get(q);
                CHECK(a.n_slices == b.n_slices && a.rows == b.rows);
                CHECK(a.peak_bytes <= o.budget_bytes && b.peak_bytes <= o.budget_bytes);
                n_sliced += a.n_slices > 1;
            } else if (status == KOILA_OOM) {
                CHECK(strcmp(err.text, other.text) == 0);
                n_short++;
                n_even += even;
            }
            koila_plan_free(p);
            koila_plan_free(q);
        }
        rg_deinit(&r);
    }
    CHECK(n_sliced > 100 && n_short > 100 && n_even > 100);
}

/* Accepts slices of at most `most` rows of the smaller loop's axis; remembers what it said yes to.
 */
typedef struct judge {
    int64_t most, rows[2];
    uint64_t peak;
} judge;
static bool judges(void *user, const koila_plan *p)
{
    judge *j = user;
    const int64_t rows[2] = { koila_plan_axis_rows(p, 0), koila_plan_axis_rows(p, 1) };
    if (rows[1] > j->most)
        return false;
    memcpy(j->rows, rows, sizeof rows);
    j->peak = koila_plan_get(p).peak_bytes;
    return true;
}

TEST(plan__with_two_axes_what_was_accepted_is_what_is_planned)
/* the main axis has as many rows a slice in 9 slices as in 16; the other, which is larger, 12 and 7
 */
{
    static const char text[] = "koila graph 1\naxis 17\naxis 100\n%0 = batch axis 0 dim 0 f32[17, "
                               "8] \"x\"\n%1 = batch axis 1 dim 0 f32[100, 64] \"y\"\n"
                               "%2 = aten::relu(%0) -> f32[17, 8]\n%3 = aten::neg(%2) -> f32[17, "
                               "8]\n%4 = aten::exp(%3) -> f32[17, 8]\n%5 = aten::sum(%4) -> f32[]\n"
                               "%6 = aten::relu(%1) -> f32[100, 64]\n%7 = aten::sum(%6) -> "
                               "f32[]\n%8 = aten::add.Tensor(%5, %7) -> f32[]\n";
    koila_table *t = NULL;
    koila_graph *g = NULL;
    CHECK(koila_table_new(NULL, &t) == KOILA_OK &&
          koila_graph_parse(t, text, strlen(text), &g, NULL) == KOILA_OK);
    const koila_value target = koila_graph_n_values(g) - 1;
    uint32_t n_apart = 0;
    for (int64_t most = 1; most <= 60; most++)
        /* with all memory there is, and with just as much as the first answer takes */
        for (int tight = 0; tight < 2; tight++) {
            judge j = { .most = most };
            koila_plan_options o = options(UINT64_MAX, 0);
            o.accepts = judges;
            o.accepts_user = &j;
            koila_plan *p = NULL;
            CHECK_EQ(koila_plan_new(g, &target, 1, &o, NULL, &p, NULL), KOILA_OK);
            if (tight) {
                o.budget_bytes = koila_plan_get(p).peak_bytes;
                koila_plan_free(p);
                p = NULL;
                CHECK_EQ(koila_plan_new(g, &target, 1, &o, NULL, &p, NULL), KOILA_OK);
            }
            if (p && most >= 6) { /* 17 slices are the most there are */
                CHECK_EQ(koila_plan_axis_rows(p, 0), j.rows[0]);
                CHECK_EQ(koila_plan_axis_rows(p, 1), j.rows[1]);
                CHECK_EQ(koila_plan_get(p).peak_bytes, j.peak);
                n_apart += j.rows[1] * 17 > j.rows[0] * 100;
            }
            koila_plan_free(p);
        }
    CHECK(n_apart > 0);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(plan__forced_rows_are_used_and_the_last_slice_is_ragged)
{
    random_graph r;
    koila_plan *p = NULL;
    CHECK(chain(&r, NULL, 100) == KOILA_OK);
    CHECK_EQ(plan_of(&r, options(UINT64_MAX, 7), &p, NULL), KOILA_OK);
    CHECK(koila_plan_get(p).rows == 7 && koila_plan_get(p).n_slices == 15 &&
          koila_plan_axis_rows(p, 0) == 7 && koila_plan_slices(p, 0) == 15);
    koila_plan_free(p);
    CHECK_EQ(info_of(&r, options(UINT64_MAX, 1000)).n_slices, 1);
    rg_deinit(&r);
}

TEST(plan__an_empty_batch_and_a_batch_of_one_run_whole)
{
    for (int64_t rows = 0; rows < 2; rows++) {
        random_graph r;
        CHECK(chain(&r, NULL, rows) == KOILA_OK);
        CHECK_EQ(info_of(&r, options(UINT64_MAX, 0)).n_slices, 1);
        CHECK_EQ(info_of(&r, options(UINT64_MAX, 1)).n_slices, 1);
        koila_plan *p = NULL;
        CHECK_EQ(plan_of(&r, options(10, 0), &p, NULL), KOILA_OOM);
        rg_deinit(&r);
    }
}

TEST(plan__sizes_whose_sum_is_no_number_are_refused)
{
    random_graph r;
    koila_plan *p = NULL;
    koila_error err = KOILA_ERROR_INIT;
    rg_begin(&r, NULL, 0);
    rg_axis(&r, 4);
    CHECK(r.status == KOILA_OK);
    const int64_t huge[] = { 4, (int64_t)1 << 57 };
    rg_leaf(&r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 2, huge);
    koila_value v = r.values[0];
    for (int i = 0; i < 9; i++)
        v = rg_call(&r, "aten::neg", 0, koila_value_get(r.g, v).meta, false, "t", v);
    r.targets[r.n_targets++] = v;
    CHECK(r.status == KOILA_OK);
    CHECK_EQ(plan_of(&r, options(UINT64_MAX, 0), &p, &err), KOILA_UNSUPPORTED);
    CHECK(err.text[0]);
    rg_deinit(&r);
}

TEST(plan__targets_must_exist)
{
    random_graph r;
    koila_plan *p = NULL;
    koila_error err = KOILA_ERROR_INIT;
    CHECK(chain(&r, NULL, 10) == KOILA_OK);
    r.targets[0] = koila_graph_n_values(r.g);
    CHECK_EQ(plan_of(&r, options(UINT64_MAX, 0), &p, &err), KOILA_BAD_ARGUMENT);
    CHECK(strstr(err.text, "target"));
    r.targets[0] = 0; /* a leaf may be asked for, and the same twice */
    r.targets[2] = r.targets[1];
    r.n_targets = 3;
    for (int64_t rows = 0; rows < 4; rows += 3) {
        CHECK_EQ(plan_of(&r, options(UINT64_MAX, rows), &p, NULL), KOILA_OK);
        CHECK(koila_plan_target(p, 0) == koila_plan_leaf(p, 0) &&
              koila_plan_target(p, 1) == koila_plan_target(p, 2));
        koila_plan_free(p);
    }
    r.n_targets = 0;
    CHECK_EQ(plan_of(&r, options(UINT64_MAX, 2), &p, NULL), KOILA_OK);
    koila_plan_free(p);
    rg_deinit(&r);
}

static int count(void *user, const char *s, size_t n)
{
    *(size_t *)user += n;
    return s == NULL;
}

TEST(plan__random_steps_plan_the_same_twice_and_hold_their_invariants)
{
    for (uint64_t seed = 1; seed <= 600; seed++) {
        random_graph r;
        if (rg_init(&r, NULL, seed, NULL, 0, 30) != KOILA_OK)
            abort();
        const uint64_t whole = info_of(&r, options(UINT64_MAX, 0)).peak_bytes;
        for (int k = 0; k < 4; k++) {
            koila_plan *a = NULL, *b = NULL;
            koila_error err = KOILA_ERROR_INIT;
            koila_plan_options o = options(k == 0 ? whole / 2 : UINT64_MAX, k);
            o.keep = (uint32_t)(seed % 3);
            const koila_status status = plan_of(&r, o, &a, &err);
            CHECK_EQ(plan_of(&r, o, &b, NULL), status);
            CHECK(status == KOILA_OK || (k == 0 && status == KOILA_OOM && err.text[0]));
            if (a && b) {
                size_t n_text = 0;
                CHECK(same_plan(a, b) && koila_plan_check(a, &err));
                CHECK(koila_plan_print(a, count, &n_text) == KOILA_OK &&
                      koila_plan_dot(a, count, &n_text) == KOILA_OK &&
                      koila_graph_dot(r.g, count, &n_text) == KOILA_OK && n_text > 100);
                koila_curve_point points[5], all[4096];
                const uint32_t n = koila_plan_curve(a, all, 4096);
                const uint32_t few = koila_plan_curve(a, points, 5);
                uint64_t high = 0, high_few = 0;
                for (uint32_t i = 0; i < n; i++)
                    high = all[i].bytes > high ? all[i].bytes : high;
                for (uint32_t i = 0; i < few; i++)
                    high_few = points[i].bytes > high_few ? points[i].bytes : high_few;
                /* thinned, the highest stays */
                CHECK(high == high_few && high <= koila_plan_get(a).peak_bytes &&
                      few == (n < 5 ? n : 5));
                koila_adapt adapt[KOILA_MAX_ADAPTS];
                for (uint32_t m = 0; m < koila_graph_n_nodes(koila_plan_graph(a)); m++)
                    if (koila_plan_in_loop(a, m))
                        CHECK(koila_plan_adapt(a, m, -1, 1, adapt) <= KOILA_MAX_ADAPTS);
            }
            koila_plan_free(a);
            koila_plan_free(b);
        }
        rg_deinit(&r);
    }
}

/* Places the step, drops results at node `at`, schedules that in slices of `rows`, and runs it.
 * *n_again: nodes that run again, or (with host memory) values that wait there. */
static bool is_the_same_recomputed(const random_graph *r, bool whole, koila__recompute how,
                                   int64_t rows_of_all, tensor *const *truth, uint32_t *n_again)
{
    koila__placed *base = NULL;
    koila_value targets[RG_MAX_VALUES], again[RG_MAX_VALUES];
    int64_t rows[4] = { 0 };
    koila_plan p = { .targets = again, .rows = rows };
    bool same = true;
    CHECK((whole ? koila__place_whole : koila__place)(r->g, r->targets, r->n_targets, NULL, &base,
                                                      NULL) == KOILA_OK);
    for (uint32_t i = 0; i < r->n_targets; i++)
        targets[i] = base->lowered[r->targets[i]];
    for (uint32_t a = 0; a < r->g->axes.n; a++)
        rows[a] = whole || rows_of_all > r->g->axes.at[a] ? r->g->axes.at[a] : rows_of_all;
    how.at %= base->graph->nodes.n + 1;
    *n_again = 0;
    if (how.at < base->graph->nodes.n) {
        koila__outline *o;
        CHECK(koila__outline_new(&o, base, targets, r->n_targets, how.at,
                                 &(koila__outline_options){ .uses_host = how.n_offloaded > 0 },
                                 NULL) == KOILA_OK &&
              koila__outline_begin(o) == KOILA_OK);
        if (koila__outline_choose(o, &how))
            CHECK(koila__recompute_new(o, base, targets, r->n_targets, how, NULL, &p.placed,
                                       again) == KOILA_OK);
        koila__outline_free(o);
    }
    if (p.placed) {
        const koila__live_options live = { .rows = rows };
        uint32_t n_offloads = 0;
        for (koila_node n = 0; n < p.placed->graph->nodes.n; n++) {
            *n_again += p.placed->node[n].is_again;
            n_offloads += p.placed->node[n].offloads;
        }
        CHECK(p.placed->graph->nodes.n == base->graph->nodes.n + *n_again + n_offloads);
        CHECK(n_offloads % 4 == 0 && (how.n_offloaded || !n_offloads));
        if (how.n_offloaded)
            *n_again = n_offloads / 4;
        CHECK(koila__schedule_init(&p.schedule, p.placed, again, r->n_targets,
                                   (koila__keep){ .horizon = UINT32_MAX }, NULL, NULL) == KOILA_OK);
        p.info.peak_bytes =
            koila__live_simulate(p.placed, &p.schedule, &live, NULL, NULL, NULL).peak_bytes;
        same = gives_the_truth(&p, r->g, truth, r->targets, r->n_targets);
        koila__schedule_deinit(&p.schedule);
    }
    koila__placed_free(p.placed);
    koila__placed_free(base);
    return same;
}

/* A random step, and what its recorded graph gives: owned. */
typedef struct known_step {
    random_graph r;
    heap h;
    tensor **truth;
} known_step;

static void known_step_init(known_step *x, uint64_t seed, uint32_t n_nodes)
{
    *x = (known_step){ 0 };
    if (rg_init(&x->r, NULL, seed, NULL, 0, n_nodes) != KOILA_OK)
        abort();
    x->truth = truth_of(&x->h, x->r.g);
}

static void known_step_deinit(known_step *x)
{
    truth_free(x->r.g, x->truth);
    rg_deinit(&x->r);
}

/* Wherever the forward pass is said to end, in slices and whole. */
TEST(plan__results_that_are_computed_again_are_the_same)
{
    uint32_t n_with = 0, n_seen = 0;
    for (uint64_t seed = 1; seed <= 600; seed++) {
        known_step x;
        known_step_init(&x, seed, 40);
        for (uint32_t k = 0; k < 8; k++) {
            const koila__recompute how = { .at = (koila_node)(seed * 7 + k * 11),
                                           .n_segments = 2 + k % 4,
                                           .keeps_expensive = k & 1 };
            uint32_t n_again;
            CHECK(is_the_same_recomputed(&x.r, k & 2, how, 1 + k % 3, x.truth, &n_again));
            if (!n_again)
                continue;
            n_with++;
            /* a planted fault: one number of a result is another */
            uint64_t *number = element(x.truth[x.r.targets[0]], 0);
            const uint64_t right = *number;
            *number = right ? right - 1 : 1;
            n_seen += !is_the_same_recomputed(&x.r, k & 2, how, 1 + k % 3, x.truth, &n_again);
            *number = right;
        }
        known_step_deinit(&x);
    }
    CHECK(n_with > 300 && n_seen > 300);
    printf("  %u steps with results that are computed again\n", n_with);
}

/* What a bound says, and what the schedule needs. */
typedef struct bounded {
    uint64_t floor, bound, peak;
    double least_work, work_of_all, work; /* work_of_all: 0: not known */
    bool any;                             /* something is dropped */
} bounded;

/* Bounds the step with results dropped in slices of `rows`, then schedules it in slices of
 * `run_rows`. keep: NULL: all, with uneven workspaces; else none are counted. */
static bounded bound_of(const random_graph *r, bool whole, koila__recompute how, int64_t rows,
                        int64_t run_rows, const koila__keep *keep)
{
    koila__placed *base = NULL, *again = NULL;
    koila__schedule s;
    koila__outline *o = NULL;
    koila_value targets[RG_MAX_VALUES], at_end[RG_MAX_VALUES];
    int64_t b_rows[4] = { 0 }, r_rows[4] = { 0 };
    bounded x = { 0 };
    const koila__keep all = { .horizon = UINT32_MAX };
    uint64_t (*const workspace)(void *, koila_sig, int64_t, int64_t) = keep ? NULL : uneven;
    uint64_t inside = how.at / 4 % 2;
    CHECK((whole ? koila__place_whole : koila__place)(r->g, r->targets, r->n_targets, NULL, &base,
                                                      NULL) == KOILA_OK);
    for (uint32_t i = 0; i < r->n_targets; i++)
        targets[i] = base->lowered[r->targets[i]];
    for (uint32_t a = 0; a < r->g->axes.n; a++) {
        const int64_t batch = r->g->axes.at[a];
        b_rows[a] = whole || rows > batch ? batch : rows;
        r_rows[a] = whole || run_rows > batch ? batch : run_rows;
    }
    CHECK(koila__schedule_init(&s, base, targets, r->n_targets, keep ? *keep : all, NULL, NULL) ==
          KOILA_OK);
    koila__outline_options options = { .rows = b_rows,
                                       .workspace = workspace,
                                       .user = &inside,
                                       .n_loops = s.n_loops,
                                       .uses_host = how.n_offloaded > 0 };
    koila__schedule_deinit(&s);
    how.at %= base->graph->nodes.n + 1;
    if (how.at < base->graph->nodes.n) {
        CHECK(koila__outline_new(&o, base, targets, r->n_targets, how.at, &options, NULL) ==
                  KOILA_OK &&
              koila__outline_begin(o) == KOILA_OK);
        x.any = koila__outline_choose(o, &how);
        x.bound = koila__outline_bound(o);
        x.floor = koila__outline_floor(o);
        for (uint32_t i = 0; i < 2 && x.bound; i++) /* also once it knows where too much is held */
            CHECK(koila__outline_may_fit(o, x.bound) && !koila__outline_may_fit(o, x.bound - 1));
        CHECK(koila__outline_bound_up_to(o, x.bound) == x.bound);
        CHECK(!x.bound || koila__outline_bound_up_to(o, x.bound - 1) == x.bound);
        x.least_work = koila__outline_work(o);
        x.work_of_all = how.n_offloaded ? 0 : koila__outline_work_of_all(o);
    }
    if (x.any) {
        const koila__live_options live = { .rows = r_rows,
                                           .workspace = workspace,
                                           .user = &inside };
        CHECK(koila__recompute_new(o, base, targets, r->n_targets, how, NULL, &again, at_end) ==
              KOILA_OK);
        CHECK(koila__schedule_init(&s, again, at_end, r->n_targets, keep ? *keep : all, NULL,
                                   NULL) == KOILA_OK);
        x.peak = koila__live_simulate(again, &s, &live, NULL, NULL, NULL).peak_bytes;
        x.work = s.work;
        koila__schedule_deinit(&s);
    }
    koila__outline_free(o);
    koila__placed_free(again);
    koila__placed_free(base);
    return x;
}

/* A way is ruled out by its bounds: they must not be above what it needs. Most are exact. */
TEST(plan__bounds_of_recomputing_are_never_above_the_peak_and_the_work)
{
    const double more = 1 + 1e-9;
    uint32_t n_with = 0, n_exact = 0, n_high = 0, n_seen = 0;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        random_graph r;
        if (rg_init(&r, NULL, seed, NULL, 0, 60) != KOILA_OK)
            abort();
        for (uint32_t k = 0; k < 8; k++) {
            const koila__recompute how = { .at = (koila_node)(seed * 7 + k * 11),
                                           .n_segments = 1 + k % 4,
                                           .keeps_expensive = k & 1,
                                           .n_offloaded = seed % 3 ? 0 : 7,
                                           .ahead = k & 4,
                                           .host = { .n_bytes = UINT64_MAX, .price = 1e-9 } };
            const bounded x = bound_of(&r, k & 2, how, 1 + k % 3, 1 + k % 3, NULL);
            if (!x.any)
                continue;
            n_with++;
            n_exact += x.bound == x.peak;
            n_high += x.floor > x.bound / 4 * 3;
            CHECK(x.floor <= x.bound && x.bound <= x.peak && x.least_work <= x.work * more);
            if (x.work_of_all > 0) {
                const bool is_whole = k & 2;
                CHECK(x.least_work <= x.work_of_all * more && x.work_of_all <= x.work * more);
                CHECK(!is_whole || x.work <= x.work_of_all * more); /* each call runs once */
            }
            /* a planted fault: it bounds slices of one row more */
            const bounded wrong = bound_of(&r, k & 2, how, 2 + k % 3, 1 + k % 3, NULL);
            n_seen += wrong.bound > wrong.peak;
        }
        rg_deinit(&r);
    }
    CHECK(n_with > 1000 && 2 * n_exact > n_with && 10 * n_high > n_with && n_seen > 50);
    printf("  %u ways bounded, %u exactly, %u little more than their floor\n", n_with, n_exact,
           n_high);
}

/* An outline of a random step, and choices of it. */
typedef struct spares {
    koila__placed *placed;
    koila__outline *o; /* NULL: there is none */
    koila_value targets[RG_MAX_VALUES];
    int64_t rows[4];
    uint64_t inside;
    uint32_t n_makers, random;
} spares;

static void spares_init(spares *x, const random_graph *r, bool whole, koila_node at, int64_t rows)
{
    koila__schedule s;
    *x = (spares){ .inside = at / 4 % 2, .random = at };
    CHECK((whole ? koila__place_whole : koila__place)(r->g, r->targets, r->n_targets, NULL,
                                                      &x->placed, NULL) == KOILA_OK);
    for (uint32_t i = 0; i < r->n_targets; i++)
        x->targets[i] = x->placed->lowered[r->targets[i]];
    for (uint32_t a = 0; a < r->g->axes.n; a++)
        x->rows[a] = whole || rows > r->g->axes.at[a] ? r->g->axes.at[a] : rows;
    CHECK(koila__schedule_init(&s, x->placed, x->targets, r->n_targets,
                               (koila__keep){ .horizon = UINT32_MAX }, NULL, NULL) == KOILA_OK);
    const koila__outline_options options = {
        .rows = x->rows, .workspace = uneven, .user = &x->inside, .n_loops = s.n_loops
    };
    koila__schedule_deinit(&s);
    at %= x->placed->graph->nodes.n + 1;
    if (at == x->placed->graph->nodes.n)
        return;
    CHECK(koila__outline_new(&x->o, x->placed, x->targets, r->n_targets, at, &options, NULL) ==
              KOILA_OK &&
          koila__outline_begin(x->o) == KOILA_OK);
    x->n_makers = koila__outline_n_makers(x->o);
}

static void spares_deinit(spares *x)
{
    koila__outline_free(x->o);
    koila__placed_free(x->placed);
}

/* Spares each of the makers that is not known to be with a chance of one in n. */
static void spare_some(spares *x, const bool *known, uint32_t n)
{
    bool *is_spared = koila__outline_spared(x->o);
    for (uint32_t k = 0; k < x->n_makers; k++) {
        x->random = x->random * 1664525 + 1013904223;
        is_spared[k] = (known && known[k]) || (x->random >> 16) % n == 0;
    }
}

typedef struct spared_score {
    uint32_t n, n_close, n_waiting_close, n_seen, n_waiting_seen;
} spared_score;

/* known[makers]: some are spared, or, as a path begins, those that do not run again by segments. */
static void choose_known(spares *x, koila__recompute how, bool *known)
{
    bool *is_spared = koila__outline_spared(x->o);
    if (how.n_segments) {
        koila__outline_choose(x->o, &how);
        for (uint32_t k = 0; k < x->n_makers; k++)
            is_spared[k] = !koila__outline_is_again(x->o, k);
    } else {
        spare_some(x, NULL, 2);
        koila__outline_choose_makers(x->o);
    }
    memcpy(known, is_spared, x->n_makers * sizeof *known);
}

/* What is spared at first, against choices that spare more; and a planted fault, against some that
 * spare others. */
static void compare_spared(spares *x, koila__recompute how, spared_score *s)
{
    bool *is_spared = koila__outline_spared(x->o);
    bool known[RG_MAX_VALUES];
    choose_known(x, how, known);
    const uint64_t waiting = koila__outline_waiting_at_least(x->o);
    s->n_waiting_close += waiting > koila__outline_waiting(x->o) / 4 * 3;
    for (uint32_t i = 0; i < 24; i++) {
        const bool is_wrong = i % 4 == 3;
        spare_some(x, is_wrong ? NULL : known, 1 + i);
        koila__outline_choose_makers(x->o);
        const uint64_t bound = koila__outline_bound(x->o);
        const uint64_t waits = koila__outline_waiting(x->o);
        memcpy(is_spared, known, x->n_makers * sizeof *known);
        const bool there = koila__outline_may_spare_there(x->o, bound);
        const bool may = koila__outline_may_spare(x->o, bound);
        s->n++;
        if (is_wrong) {
            s->n_seen += !may;
            s->n_waiting_seen += waiting > waits;
            continue;
        }
        CHECK(may && there && waiting <= waits);
        s->n_close += !koila__outline_may_spare(x->o, bound / 4 * 3);
    }
}

/* Choices are left out for what is spared alone, before they are made. */
TEST(plan__what_is_spared_needs_and_leaves_no_more_than_choices_that_spare_more)
{
    spared_score s = { 0 };
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        random_graph r;
        if (rg_init(&r, NULL, seed, NULL, 0, 60) != KOILA_OK)
            abort();
        for (uint32_t k = 0; k < 4; k++) {
            const koila__recompute how = { .n_segments = seed % 3 ? 0 : 2 + k,
                                           .keeps_expensive = k & 1 };
            spares x;
            spares_init(&x, &r, k & 2, (koila_node)(seed * 7 + k * 11), 1 + k % 3);
            if (x.o && x.n_makers)
                compare_spared(&x, how, &s);
            spares_deinit(&x);
        }
        rg_deinit(&r);
    }
    printf("  %u choices, %u need little more than what is spared; %u and %u faults seen; %u steps "
           "leave little more\n",
           s.n, s.n_close, s.n_seen, s.n_waiting_seen, s.n_waiting_close);
    CHECK(s.n > 50000 && 4 * s.n_close > s.n && s.n_seen > 500 && s.n_waiting_seen > 500);
    CHECK(s.n_waiting_close > 1000);
}

/* A call that may give a view, and is counted as one, takes the time of a copy all the same. */
TEST(plan__work_of_all_counts_what_may_be_a_view_where_it_runs_again)
{
    random_graph r;
    rg_begin(&r, NULL, 0);
    rg_axis(&r, 8);
    rg_leaf(&r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ 8, 16 });
    const koila_meta m = koila_value_get(r.g, r.values[0]).meta;
    const koila_value y = rg_call(&r, "aten::relu", 0, m, false, "t", r.values[0]);
    const koila_value z = rg_call(&r, "aten::contiguous", 0, m, false, "t", y);
    const koila_value u = rg_call(&r, "aten::sigmoid", 0, m, false, "t", z);
    r.targets[r.n_targets++] = rg_call(&r, "aten::neg", 0, m, false, "t", u);
    r.targets[r.n_targets++] = rg_call(&r, "aten::mul.Tensor", 0, m, false, "tt", u, z);
    CHECK(r.status == KOILA_OK);
    const koila__recompute how = { .at = 3 }; /* what `mul` reads is made again */
    const bounded x = bound_of(&r, true, how, 8, 8, &(koila__keep){ .horizon = UINT32_MAX });
    CHECK(x.any && x.least_work < x.work_of_all && x.work_of_all == x.work);
    rg_deinit(&r);
}

/* What is never made for the error is ruled out by a floor: no plan goes below it. */
TEST(plan__no_way_to_run_the_step_whole_needs_less_than_its_floor)
{
    static const koila__keep all = { .horizon = UINT32_MAX };
    uint32_t n_with = 0, n_close = 0, n_seen = 0;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        random_graph r;
        uint64_t floor, wrong;
        if (rg_init(&r, NULL, seed, NULL, 0, 60) != KOILA_OK)
            abort();
        CHECK(koila__floor_whole(r.g, r.targets, r.n_targets, NULL, &floor) == KOILA_OK);
        /* a planted fault: all values are results */
        CHECK(koila__floor_whole(r.g, r.values, r.n_values, NULL, &wrong) == KOILA_OK);
        for (uint32_t k = 0; k < 4; k++) {
            const koila__recompute how = { .at = (koila_node)(seed * 7 + k * 11),
                                           .n_segments = 1 + k % 4 };
            const bounded x = bound_of(&r, true, how, 1, 1, &all);
            if (!x.any)
                continue;
            n_with++;
            n_close += floor > x.peak / 2;
            CHECK(floor <= x.peak);
            n_seen += wrong > x.peak;
        }
        rg_deinit(&r);
    }
    CHECK(n_with > 500 && 4 * n_close > n_with && n_seen > 50);
    printf("  %u ways, %u of less than twice the floor\n", n_with, n_close);
}

/* Layers h = w x, and the gradients of all w: x [rows, 16, width] */
static void tower_init(random_graph *r, uint64_t seed)
{
    enum { MOST_LAYERS = 3, LENGTH = 16 };
    koila_value in[MOST_LAYERS], w[MOST_LAYERS];
    rg_begin(r, NULL, seed);
    const int64_t rows = 2 + rg_pick(r, 3), width = 4 + rg_pick(r, 20);
    rg_axis(r, rows);
    rg_leaf(r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_F32, 3, (int64_t[]){ rows, LENGTH, width });
    const int64_t n = rows * LENGTH;
#define SHAPE(a, b) rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ a, b }, NULL)
#define TURNED(a, b) rg_shape(r, KOILA_DTYPE_F32, 2, (int64_t[]){ a, b }, (int64_t[]){ 1, a })
    koila_value x = rg_call(r, "aten::view", KOILA_OP_VIEW, SHAPE(n, width), false, "tl",
                            r->values[0], 2, n, width);
    const uint32_t n_layers = 1 + rg_pick(r, MOST_LAYERS);
    for (uint32_t i = 0; i < n_layers; i++) {
        rg_leaf(r, KOILA_LEAF_REAL, 0, 0, KOILA_DTYPE_F32, 2, (int64_t[]){ width, width });
        w[i] = r->values[r->n_values - 1];
        in[i] = x;
        x = rg_call(r, "aten::mm", 0, SHAPE(n, width), false, "tt", x, w[i]);
    }
    koila_value g = rg_call(r, "aten::relu", 0, SHAPE(n, width), false, "t", x);
    for (uint32_t i = n_layers; i-- > 0;) {
        const koila_value t =
            rg_call(r, "aten::t", KOILA_OP_VIEW, TURNED(width, n), false, "t", in[i]);
        r->targets[r->n_targets++] =
            rg_call(r, "aten::mm", 0, SHAPE(width, width), false, "tt", t, g);
        g = rg_call(r, "aten::mm", 0, SHAPE(n, width), false, "tt", g, w[i]);
    }
#undef SHAPE
#undef TURNED
    if (r->status != KOILA_OK)
        abort();
}

TEST(plan__rows_that_are_cut_along_another_axis_need_no_less_than_their_floor)
{
    uint32_t n_with = 0, n_close = 0, n_seen = 0;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        random_graph r;
        koila_plan *p = NULL;
        uint64_t floor;
        koila_plan_options o = options(UINT64_MAX, 1 + (int64_t)seed % 4);
        o.axes = KOILA_AXES_BOTH;
        tower_init(&r, seed);
        CHECK_EQ(plan_of(&r, o, &p, NULL), KOILA_OK);
        const koila_plan_info info = koila_plan_get(p);
        CHECK(info.n_inner == 1 && koila__floor_both(p, &floor) == KOILA_OK);
        n_with += floor > 0;
        n_close += floor > info.peak_bytes / 2;
        CHECK(floor <= info.peak_bytes);
        n_seen += floor + floor / r.n_targets > info.peak_bytes; /* a planted fault: another sum */
        koila_plan_free(p);
        rg_deinit(&r);
    }
    CHECK(n_with == 200 && n_close > 50 && n_seen > 20);
}

/* The plan of r, and what finding it took: of none that was allowed, or of more than enough. */
static koila_status plan_within(const random_graph *r, koila_plan_options o, bool is_allowed,
                                koila_plan **p, double *took)
{
    koila__effort effort = { .spent = 1, .allowed = is_allowed ? 1e15 : 0 };
    const koila_status status = koila__plan_row(r->g, r->targets, r->n_targets, NULL, &o, NULL,
                                                &effort, NULL, p, NULL, NULL);
    *took = effort.spent - 1;
    return status;
}

/* Where no time is allowed for planning, the first way that fits in little time is taken: but one
 * is found where one is with all the time. */
TEST(plan__what_fits_is_found_however_little_time_there_is_for_planning)
{
    uint32_t n_found = 0, n_refused = 0, n_shorter = 0;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        random_graph r;
        tower_init(&r, seed);
        koila_plan_options o = options(UINT64_MAX, 0);
        const uint64_t whole = info_of(&r, o).peak_bytes;
        o.axes = KOILA_AXES_ANY;
        o.recomputes = true;
        for (uint32_t i = 1; i <= 10; i++) {
            koila_plan *all = NULL, *first = NULL, *again = NULL;
            double took_all, took_first, took_again;
            o.budget_bytes = whole * i / 11;
            const koila_status status = plan_within(&r, o, true, &all, &took_all);
            CHECK_EQ(plan_within(&r, o, false, &first, &took_first), status);
            CHECK_EQ(plan_within(&r, o, true, &again, &took_again), status);
            CHECK(took_first <= took_all && took_again == took_all && took_first > 0);
            CHECK(status == KOILA_OK ? same_plan(all, again) : status == KOILA_OOM);
            n_found += status == KOILA_OK;
            n_refused += status == KOILA_OOM;
            n_shorter += took_first < took_all;
            koila_plan_free(all);
            koila_plan_free(first);
            koila_plan_free(again);
        }
        rg_deinit(&r);
    }
    CHECK(n_found > 500 && n_refused > 100 && n_shorter > 50);
    printf("  %u plans, %u budgets that none fits, %u found sooner\n", n_found, n_refused,
           n_shorter);
}

/* All rows with results dropped are compared with slices: where that fit within less, and where no
 * loop holds less at once, slices with results dropped are no more work. */
TEST(plan__results_dropped_in_slices_are_no_more_work_than_those_of_all_rows)
{
    uint32_t n_compared = 0;
    for (uint64_t seed = 301; seed <= 600; seed++) {
        random_graph r;
        double whole_work = INFINITY; /* of those plans, the least so far */
        if (rg_init(&r, NULL, seed, NULL, 0, 6 + (uint32_t)(seed % 25)) != KOILA_OK)
            abort();
        koila_plan_options o = options(UINT64_MAX, 0);
        const uint64_t whole = info_of(&r, o).peak_bytes;
        o.axes = KOILA_AXES_ANY;
        o.recomputes = true;
        for (uint32_t i = 1; i <= 20; i++) {
            koila_plan *p = NULL;
            o.budget_bytes = whole * i / 20;
            if (plan_of(&r, o, &p, NULL) != KOILA_OK)
                continue;
            const koila_plan_info info = koila_plan_get(p);
            koila_plan_free(p);
            if (!info.n_again || info.n_inner || info.dim != KOILA_NONE)
                continue;
            n_compared += whole_work < INFINITY;
            CHECK(info.work <= whole_work * (1 + 1e-9));
            if (info.n_slices == 1 && info.work < whole_work)
                whole_work = info.work;
        }
        rg_deinit(&r);
    }
    CHECK(n_compared > 40);
    printf("  %u plans compared\n", n_compared);
}

/* Of slices of one row it is a bound of two slices or more, under each policy. */
TEST(plan__the_bound_of_one_row_is_one_of_all_slices)
{
    static const koila__keep keeps[] = { { .horizon = UINT32_MAX },
                                         { .horizon = 1 },
                                         { .horizon = UINT32_MAX, .drops_forward = true },
                                         { .horizon = 1, .drops_forward = true } };
    uint32_t n_with = 0, n_exact = 0, n_close = 0, n_seen = 0;
    for (uint64_t seed = 1; seed <= 1500; seed++) {
        random_graph r;
        if (rg_init(&r, NULL, seed, NULL, 0, 60) != KOILA_OK)
            abort();
        bool any_short = false; /* axes that are one slice */
        for (uint32_t k = 0; k < 8; k++) {
            const koila__recompute how = { .at = (koila_node)(seed * 7 + k * 11),
                                           .n_segments = 2 + k % 4 };
            const int64_t run_rows = 1 + k % 3;
            for (uint32_t a = 0; a < r.g->axes.n; a++)
                any_short |= r.g->axes.at[a] <= run_rows;
            if (any_short)
                continue;
            const bounded x = bound_of(&r, false, how, 1, run_rows, &keeps[k % 4]);
            if (!x.any)
                continue;
            n_with++;
            n_exact += x.bound == x.peak;
            n_close += x.bound > x.peak / 4 * 3;
            CHECK(x.bound <= x.peak);
            /* a planted fault: it bounds slices of more rows */
            const bounded wrong = bound_of(&r, false, how, run_rows + 1, run_rows, &keeps[k % 4]);
            n_seen += wrong.bound > wrong.peak;
        }
        rg_deinit(&r);
    }
    CHECK(n_with > 500 && n_exact > 50 && n_close > 1500 && n_seen > 50);
    printf("  %u ways bounded, %u exactly, %u closely\n", n_with, n_exact, n_close);
}

/* The gates of a cell: halves of one storage, each written twice in place. They are no bytes beside
 * it, though their strides span nearly all of it. */
TEST(plan__writes_to_parts_of_a_storage_are_no_bytes_of_their_own)
{
    static const char step[] = "koila graph 2\n"
                               "axis 3\n"
                               "op aten::relu_ inplace\n"
                               "%0 = batch axis 0 dim 0 f64[3, 8]\n"
                               "%1 = aten::neg(%0) -> f64[3, 8]\n"
                               "%2 = aten::neg(%0) -> f64[3, 8]\n"
                               "%3 %4 = aten::unsafe_split.Tensor(%2, 4, 1) -> "
                               "(f64[3, 4]{8, 1}, f64[3, 4]{8, 1})\n"
                               "%5 = aten::relu_(%3) -> {} writes 0\n"
                               "%6 = aten::relu_(%5) -> {} writes 0\n"
                               "%7 = aten::relu_(%4) -> {} writes 0\n"
                               "%8 = aten::relu_(%7) -> {} writes 0\n"
                               "%9 = aten::mul.Tensor(%6, %8) -> f64[3, 4]\n"
                               "%10 = aten::neg(%9) -> f64[3, 4]\n"
                               "%11 = aten::mul.Tensor(%1, %1) -> f64[3, 8]\n"
                               "%12 = aten::mul.Tensor(%10, %6) -> f64[3, 4]\n"
                               "%13 = aten::mul.Tensor(%12, %8) -> f64[3, 4]\n"
                               "end 14 12\n";
    koila_table *t = NULL;
    random_graph r = { .targets = { 11, 13 }, .n_targets = 2 };
    koila_error err = KOILA_ERROR_INIT;
    CHECK(koila_table_new(NULL, &t) == KOILA_OK);
    CHECK(koila_graph_parse(t, step, sizeof step - 1, &r.g, &err) == KOILA_OK);
    CHECK_STR(err.text, "");
    for (koila_node at = 0; at < 8; at++) {
        bounded x = bound_of(&r, true, (koila__recompute){ .at = at, .n_segments = 2 }, 3, 3, NULL);
        CHECK(!x.any || x.bound <= x.peak);
        CHECK(x.any || at != 7);
    }
    koila_graph_free(r.g);
    koila_table_free(t);
}

/* The same with host memory, in which nothing is counted: the interpreter's peak, which is checked,
 * has each value only from when it is made to its last use, and from the fetch on. */
TEST(plan__results_that_wait_in_host_memory_are_the_same)
{
    uint32_t n_with = 0, n_seen = 0, n_few = 0;
    for (uint64_t seed = 1; seed <= 600; seed++) {
        known_step x;
        known_step_init(&x, seed, 40);
        for (uint32_t k = 0; k < 8; k++) {
            koila__recompute how = { .at = (koila_node)(seed * 7 + k * 11),
                                     .n_segments = 1 + k % 4,
                                     .keeps_expensive = k & 1,
                                     .n_offloaded = 5 + 5 * (k % 3),
                                     .ahead = k & 4,
                                     .host = { .n_bytes = UINT64_MAX,
                                               .price = k & 2 ? 1e-9 : 1e9 } };
            uint32_t n_waiting, n;
            CHECK(is_the_same_recomputed(&x.r, k & 2, how, 1 + k % 3, x.truth, &n_waiting));
            if (!n_waiting)
                continue;
            n_with++;
            uint64_t *number = element(x.truth[x.r.targets[0]], 0);
            const uint64_t right = *number;
            *number = right ? right - 1 : 1;
            n_seen += !is_the_same_recomputed(&x.r, k & 2, how, 1 + k % 3, x.truth, &n);
            *number = right;
            how.host.n_bytes = 128;
            CHECK(is_the_same_recomputed(&x.r, k & 2, how, 1 + k % 3, x.truth, &n));
            CHECK(n <= n_waiting);
            n_few += n < n_waiting;
        }
        known_step_deinit(&x);
    }
    CHECK(n_with > 300 && n_seen > 300 && n_few > 30);
    printf("  %u steps with values in host memory\n", n_with);
}

TEST(plan__a_step_cut_along_another_axis_is_the_same_step)
{
    uint32_t n_cut = 0, n_seen = 0;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        known_step x;
        known_step_init(&x, seed, 20);
        for (int64_t rows = 1; rows <= 2; rows++) {
            koila_plan_options o = options(UINT64_MAX, rows);
            koila_plan *p = NULL;
            o.axes = KOILA_AXES_OTHER;
            const koila_status status = plan_of(&x.r, o, &p, NULL);
            CHECK(status == KOILA_OK || status == KOILA_UNSUPPORTED);
            if (status != KOILA_OK)
                continue;
            const koila_plan_info info = koila_plan_get(p);
            CHECK(koila_plan_check(p, NULL) && info.dim != KOILA_NONE);
            CHECK(info.rows == (rows < info.batch ? rows : info.batch));
            CHECK(gives_the_truth(p, x.r.g, x.truth, x.r.targets, x.r.n_targets));
            n_cut++;
            /* a planted fault: one number of a result is another */
            uint64_t *number = element(x.truth[x.r.targets[0]], 0);
            const uint64_t right = *number;
            *number = right ? right - 1 : 1;
            n_seen += !gives_the_truth(p, x.r.g, x.truth, x.r.targets, x.r.n_targets);
            *number = right;
            koila_plan_free(p);
        }
        known_step_deinit(&x);
    }
    CHECK(n_cut > 200 && n_seen > 200);
}

TEST(plan__rows_come_first_and_another_axis_where_none_fits)
{
    random_graph r;
    koila_plan *p = NULL;
    koila_error err = KOILA_ERROR_INIT;
    CHECK(chain(&r, NULL, 4) == KOILA_OK); /* the other axis: 64 columns of x */
    r.targets[0] = r.targets[--r.n_targets];
    koila_plan_options o = options(UINT64_MAX, 0);
    CHECK(info_of(&r, o).dim == KOILA_NONE && info_of(&r, o).has_other_axes);
    o.rows = 1;
    o.axes = KOILA_AXES_ANY;
    CHECK(info_of(&r, o).dim == KOILA_NONE); /* forced rows are rows */
    o.axes = KOILA_AXES_OTHER;
    const koila_plan_info along = info_of(&r, o);
    CHECK(along.dim == 1 && along.batch == 64 && along.rows == 1 && along.n_slices == 64);
    o = options(100, 0);
    o.axes = KOILA_AXES_ANY;
    CHECK_EQ(plan_of(&r, o, &p, &err), KOILA_OOM);
    CHECK(strstr(err.text, "a slice of 1 row(s) needs ") &&
          strstr(err.text, "; along dim 1 of the batch 1 of 32 need "));
    o.axes = KOILA_AXES_OTHER;
    CHECK_EQ(plan_of(&r, o, &p, &err), KOILA_OOM);
    CHECK(strstr(err.text, "a slice of 1 along dim 1 of the batch needs "));
    rg_deinit(&r);
}

/* Each kind of broken plan is seen by koila_plan_check(). */
TEST(plan__check_sees_planted_faults)
{
    uint32_t n_planted[6] = { 0 };
    for (uint64_t seed = 1; seed <= 60; seed++)
        for (int fault = 0; fault < 6; fault++) {
            random_graph r;
            koila_plan *p = NULL;
            if (rg_init(&r, NULL, seed, NULL, 0, 24) != KOILA_OK ||
                plan_of(&r, options(UINT64_MAX, 2), &p, NULL) != KOILA_OK)
                abort();
            CHECK(koila_plan_check(p, NULL));
            bool planted = false;
            for (uint32_t k = 0; k < koila_plan_get(p).n_stages && !planted; k++) {
                koila_stage *st = (koila_stage *)(uintptr_t)koila_plan_stage(p, k);
                koila_instr *in = (koila_instr *)(uintptr_t)st->instrs;
                for (uint32_t i = 0; i < st->n_instrs && st->is_loop && !planted; i++) {
                    const bool next_runs = i + 1 < st->n_instrs && in[i + 1].kind == KOILA_DO_RUN;
                    if (fault == 0 && in[i].kind == KOILA_DO_FREE) {
                        in[i] = in[--st->n_instrs];
                        planted = i != st->n_instrs || true; /* lost */
                    } else if (fault == 1 && in[i].kind == KOILA_DO_SLICE && next_runs) {
                        in[i].kind = KOILA_DO_FREE;
                        planted = true; /* not there */
                    } else if (fault == 2 && in[i].kind == KOILA_DO_SLICE) {
                        in[i].kind = KOILA_DO_FETCH;
                        planted = true; /* not kept */
                    } else if (fault == 3 && in[i].kind == KOILA_DO_RUN && next_runs) {
                        in[i + 1] = in[i];
                        planted = true; /* twice */
                    } else if (fault == 4 &&
                               (in[i].kind == KOILA_DO_PUT || in[i].kind == KOILA_DO_ADD) &&
                               i > 0) { /* before it is made */
                        const koila_instr was = in[0];
                        in[0] = in[i];
                        in[i] = was;
                        planted = true;
                    } else if (fault == 5 &&
                               in[i].kind == KOILA_DO_ADD) { /* nobody adds: not whole */
                        const koila_value v = in[i].id;
                        for (uint32_t t = 0; t < r.n_targets; t++)
                            planted |= koila_plan_target(p, t) == v;
                        if (planted) {
                            memmove(&in[i], &in[i + 1], (st->n_instrs - i - 1) * sizeof *in);
                            st->n_instrs--;
                        }
                    }
                }
            }
            koila_error err = KOILA_ERROR_INIT;
            if (planted) {
                n_planted[fault]++;
                const bool seen = !koila_plan_check(p, &err);
                CHECK(seen && err.text[0]);
                if (!seen)
                    printf("fault %d, seed %llu\n", fault, (unsigned long long)seed);
            }
            koila_plan_free(p);
            rg_deinit(&r);
        }
    for (int fault = 0; fault < 6; fault++)
        CHECK(n_planted[fault] > 5);
}

TEST(plan__the_nth_allocation_may_fail)
{
    failing_allocator fail = { 0 };
    const koila_allocator mem = { failing_realloc, &fail };
    random_graph r;
    if (rg_init(&r, NULL, 34, NULL, 0, 20) != KOILA_OK)
        abort();
    const uint64_t whole = info_of(&r, options(UINT64_MAX, 0)).peak_bytes;
    for (int k = 0; k < 3; k++)
        for (uint64_t at = 1;; at++) {
            fail = (failing_allocator){ .at = at };
            koila_plan *p = NULL;
            koila_error err = KOILA_ERROR_INIT;
            koila_plan_options o = options(k == 1 ? UINT64_MAX : whole * 9 / 10, k == 1);
            if (k == 2)
                o.budget_bytes = 1;
            o.axes = KOILA_AXES_ANY;
            o.recomputes = true;
            o.host_price = 1;
            o.host_bytes = UINT64_MAX;
            const koila_status status =
                koila_plan_new(r.g, r.targets, r.n_targets, &o, &mem, &p, &err);
            const bool failed = fail.n_calls >= at;
            CHECK(status == KOILA_OK || status == KOILA_OOM ||
                  (failed && status == KOILA_NO_MEMORY && err.text[0]));
            if (p) {
                size_t n = 0;
                const koila_status shown = koila_plan_dot(p, count, &n);
                CHECK(shown == KOILA_OK || shown == KOILA_NO_MEMORY);
            }
            koila_plan_free(p);
            CHECK_EQ(fail.n_live_bytes, 0);
            if (!failed && fail.n_calls < at)
                break;
        }
    rg_deinit(&r);
}

TEST(plan__half_precision_is_added_in_float32)
{
    random_graph r;
    rg_begin(&r, NULL, 0);
    rg_axis(&r, 8);
    CHECK(r.status == KOILA_OK);
    rg_leaf(&r, KOILA_LEAF_BATCH, 0, 0, KOILA_DTYPE_BF16, 2, (int64_t[]){ 8, 1000 });
    const koila_meta out = rg_shape(&r, KOILA_DTYPE_BF16, 2, (int64_t[]){ 1, 1000 }, NULL);
    r.targets[r.n_targets++] =
        rg_call(&r, "aten::sum.dim_IntList", 0, out, false, "tlb", r.values[0], 1, (int64_t)0, 1);
    CHECK(r.status == KOILA_OK);
    /* the accumulator, and at most one partial (or the cast result) beside it */
    CHECK_EQ(info_of(&r, options(UINT64_MAX, 1)).peak_bytes, 4000 + 2000);
    CHECK_EQ(info_of(&r, options(UINT64_MAX, 8)).peak_bytes, 2000);
    rg_deinit(&r);
}
