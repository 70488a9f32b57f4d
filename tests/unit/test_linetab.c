/* The line table against a brute-force model: random events on three threads (simulated: a stack
 * each, one real thread), two profilers, two devices, recursion. The model keeps the whole history
 * of the current bytes and recomputes every window from it. */
#include "memory/columns.h"
#include "memory/linetab.h"

#include "harness.h"

static uint64_t rng_state = 88172645463325252u;
static uint64_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    return rng_state ^= rng_state << 17;
}

enum { N_DEVICES = 2, N_THREADS = 3, N_CODES = 3, N_ROWS = 5, N_STEPS = 40000, DEPTH = 12 };

static uint64_t history[N_DEVICES][N_STEPS + 1]; /* bytes after event t */
static int event_device[N_STEPS + 1];
static int64_t event_delta[N_STEPS + 1];
static uint64_t given_to[N_STEPS + 1]; /* bit per thread */
static size_t now_t;

typedef struct model_window {
    int code, row;
    size_t start;
} model_window;
typedef struct model_row {
    uint64_t hits, peak[N_DEVICES], current[N_DEVICES], allocated[N_DEVICES], freed[N_DEVICES],
        rise[N_DEVICES], alloc[N_DEVICES], freed_sum[N_DEVICES];
    int64_t delta[N_DEVICES];
    bool recorded;
} model_row;
static model_row model[N_CODES][N_ROWS];
static model_window windows[N_THREADS][DEPTH];
static size_t depth[N_THREADS];

static void max_to(uint64_t *slot, uint64_t v)
{
    if (*slot < v)
        *slot = v;
}

static void model_close(int thread, size_t level)
{
    model_window *w = &windows[thread][level];
    if (w->row < 0)
        return;
    model_row *r = &model[w->code][w->row];
    bool outermost = true;
    for (size_t i = 0; i < level; i++)
        outermost &= !(windows[thread][i].code == w->code && windows[thread][i].row == w->row);
    r->recorded = true;
    for (int d = 0; d < N_DEVICES; d++) {
        uint64_t start = history[d][w->start];
        uint64_t peak = start;
        uint64_t in = 0;
        uint64_t out = 0;
        for (size_t t = w->start + 1; t <= now_t; t++) {
            max_to(&peak, history[d][t]);
            if (event_device[t] != d || !(given_to[t] >> thread & 1))
                continue;
            if (event_delta[t] > 0)
                in += (uint64_t)event_delta[t];
            else
                out += (uint64_t)-event_delta[t];
        }
        max_to(&r->peak[d], peak);
        max_to(&r->current[d], history[d][now_t]);
        max_to(&r->allocated[d], in);
        max_to(&r->freed[d], out);
        max_to(&r->rise[d], peak - start);
        if (outermost) {
            r->alloc[d] += in;
            r->freed_sum[d] += out;
            r->delta[d] += (int64_t)(history[d][now_t] - start);
        }
    }
}

static koila__meter meter;
static koila__lines lines;
static koila__stack *stacks[N_THREADS];
static int keys[N_CODES];

/* Run N random steps; lose or double the event number `plant` of them to see whether the comparison
 * notices. */
/* Whole because the model walks beside the table, step by step. */
static bool equals_brute_force(size_t n_steps, size_t plant, int how)
{
    static const koila_allocator none;
    koila__wish on = { .enabled = true, .target = 1, .stats_mode = KOILA__STATS_HOOK };
    koila__wish off = on;
    koila__func *funcs[N_CODES], *second[N_CODES];
    off.target = 0;
    koila__meter_init(&meter, N_DEVICES);
    koila__lines_init(&lines, &meter, &none);
    memset(model, 0, sizeof model);
    memset(depth, 0, sizeof depth);
    memset(history, 0, sizeof history);
    now_t = 0;
    for (int c = 0; c < N_CODES; c++) {
        koila__func_new(&lines, &keys[c], 10 * c, N_ROWS, &on, &funcs[c]);
        koila__func_new(&lines, &keys[c], 10 * c, N_ROWS, &off, &second[c]);
    }
    koila__flow *flows[N_THREADS - 1], *worker_flow = koila__meter_take_flow(&meter);
    for (int t = 0; t < N_THREADS; t++)
        stacks[t] = koila__stack_new(&lines);
    for (int t = 0; t < N_THREADS - 1; t++)
        stacks[t]->thread.flow = flows[t] = koila__meter_take_flow(&meter);
    bool ok = true;
    size_t n_events = 0;
    for (size_t step = 0; step < n_steps; step++) {
        int t = (int)(rng() % N_THREADS);
        int what = (int)(rng() % 10);
        if (what < 4) {
            int d = (int)(rng() % N_DEVICES);
            int worker = rng() % 4 == 0;
            uint64_t held = history[d][now_t];
            int64_t delta =
                rng() % 2 && held ? -(int64_t)(rng() % held + 1) : (int64_t)(rng() % 3000000 + 1);
            now_t++;
            for (int k = 0; k < N_DEVICES; k++)
                history[k][now_t] = history[k][now_t - 1];
            history[d][now_t] += (uint64_t)delta;
            event_device[now_t] = d;
            event_delta[now_t] = delta;
            bool own = !worker && depth[t] > 0;
            given_to[now_t] = 0;
            for (int k = 0; k < N_THREADS; k++)
                if (own ? k == t : depth[k] > 0)
                    given_to[now_t] |= 1u << k;
            /* the last thread has no flow of its own */
            koila__thread *self = worker ? NULL : &stacks[t]->thread;
            koila__flow *flow = t < N_THREADS - 1 ? flows[t] : NULL;
            if (worker)
                flow = rng() % 2 ? worker_flow : NULL;
            if (++n_events != plant || how == 2)
                koila__meter_event(&meter, flow, self, d, delta, history[d][now_t], UINT64_MAX);
            if (n_events == plant && how == 2)
                koila__meter_event(&meter, flow, self, d, delta, history[d][now_t], UINT64_MAX);
        } else if (what < 7 && depth[t]) {
            model_window *w = &windows[t][depth[t] - 1];
            int row = (int)(rng() % (N_ROWS + 1)); /* one beyond: a line that opens no window */
            model_close(t, depth[t] - 1);
            w->row = row < N_ROWS ? row : -1;
            w->start = now_t;
            if (row && row < N_ROWS)
                model[w->code][row].hits++;
            koila__code *c = koila__stack_top(stacks[t]);
            ok = ok && c && c->key == &keys[w->code];
            koila__lines_line(&lines, stacks[t], c, 10 * w->code + row);
        } else if (what < 8 && depth[t] < DEPTH) {
            int code = (int)(rng() % N_CODES);
            windows[t][depth[t]++] = (model_window){ code, 0, now_t };
            model[code][0].hits++;
            koila__lines_enter(&lines, stacks[t], koila__lines_find(&lines, &keys[code]), 0, true);
        } else if (depth[t]) {
            model_close(t, depth[t] - 1);
            depth[t]--;
            koila__lines_leave(&lines, stacks[t]);
        }
        if (step % 1000 == 0)
            for (int k = 0; k < N_THREADS; k++)
                ok = ok && koila__stack_check(&lines, stacks[k]);
    }
    for (int t = 0; t < N_THREADS; t++)
        while (depth[t]) {
            model_close(t, depth[t] - 1);
            depth[t]--;
            koila__lines_leave(&lines, stacks[t]);
        }
    for (int c = 0; c < N_CODES; c++)
        for (int r = 0; r < N_ROWS; r++) {
            const koila__row *row = &funcs[c]->rows[r];
            const model_row *m = &model[c][r];
            ok = ok && row->recorded == m->recorded && row->n_hits == m->hits &&
                 second[c]->rows[r].n_hits == m->hits;
            for (int d = 0; m->recorded && d < N_DEVICES; d++) {
                const koila__rec *rec = koila__row_rec(&lines, row, d);
                ok = ok && rec->peak[0] == m->peak[d] && rec->current[0] == m->current[d] &&
                     rec->rise == m->rise[d];
                ok = ok && rec->allocated[0] == m->allocated[d] && rec->freed[0] == m->freed[d];
                ok = ok && rec->sum_alloc == m->alloc[d] && rec->sum_freed == m->freed_sum[d] &&
                     rec->sum_delta == m->delta[d];
            }
            if (m->recorded) { /* the targets' views */
                ok = ok && koila__row_rec(&lines, row, -1)->peak[0] == m->peak[1];
                ok = ok && koila__row_rec(&lines, &second[c]->rows[r], -1)->peak[0] == m->peak[0];
            }
        }
    koila__lines_deinit(&lines);
    for (int t = 0; t < N_THREADS; t++) {
        for (size_t i = 0; i < stacks[t]->n_made; i++)
            free(stacks[t]->activations[i]);
        free(stacks[t]->activations);
        free(stacks[t]);
    }
    return ok;
}

TEST(linetab__rows_equal_a_brute_force_model_over_random_events)
{
    for (int round = 0; round < 3; round++)
        CHECK(equals_brute_force(3000, 0, 0));
    CHECK(equals_brute_force(12000, 0, 0));
}

TEST(linetab__a_lost_or_doubled_event_is_noticed)
{
    int n_noticed = 0;
    for (size_t plant = 20; plant < 40; plant++)
        n_noticed += !equals_brute_force(800, plant, plant % 2 ? 1 : 2);
    CHECK(n_noticed >= 18); /* an event outside every window changes no row */
}

TEST(linetab__every_host_allocation_may_fail)
{
    static int key[8];
    for (failing_allocator f = { .at = 1 };; f.at++) {
        koila_allocator mem = { failing_realloc, &f };
        koila__wish on = { .enabled = true };
        f.n_calls = 0;
        koila__meter_init(&meter, 1);
        koila__lines_init(&lines, &meter, &mem);
        koila__stack *s = koila__stack_new(&lines);
        for (int k = 0; k < 8; k++) {
            koila__func *func, *copy;
            if (koila__func_new(&lines, &key[k], 1, 4, &on, &func) != KOILA_OK)
                continue;
            for (int i = 0; s && i < 3; i++) {
                koila__lines_enter(&lines, s, func->code, 1, true);
                koila__meter_event(&meter, NULL, &s->thread, 0, 100, 100, UINT64_MAX);
                koila__lines_line(&lines, s, koila__lines_find(&lines, &key[k]), 2);
            }
            for (int i = 0; s && i < 3; i++)
                koila__lines_leave(&lines, s);
            if (s)
                CHECK(koila__stack_check(&lines, s) && s->n == 0 && s->n_lost == 0);
            (void)koila__func_copy(&lines, func, &on, &copy);
        }
        uint64_t n_calls = f.n_calls;
        /* while the meter knows the stack, which nobody frees but this test */
        koila__lines_deinit(&lines);
        if (s) {
            for (size_t i = 0; i < s->n_made; i++)
                koila__release(&mem, s->activations[i], sizeof *s->activations[i]);
            koila__release(&mem, s->activations, s->capacity * sizeof *s->activations);
            koila__release(&mem, s, sizeof *s);
        }
        CHECK_EQ(f.n_live_bytes, 0);
        if (n_calls < f.at)
            break;
    }
}

/* Whole because it is one story. */
TEST(linetab__a_node_s_memory_is_credited_to_every_line_that_was_open_when_it_was_made)
{
    static koila__meter m;
    static koila__lines l;
    static int outer_key, inner_key;
    koila__wish wish = { .enabled = true };
    koila__wish late = { .enabled = true };
    koila__func *outer, *inner, *other;
    koila__meter_init(&m, 1);
    koila__lines_init(&l, &m, NULL);
    l.sees_nodes = true;
    CHECK(koila__func_new(&l, &outer_key, 10, 5, &wish, &outer) == KOILA_OK);
    CHECK(koila__func_new(&l, &inner_key, 100, 5, &wish, &inner) == KOILA_OK);
    koila__stack *s = koila__stack_new(&l);
    koila__lines_made(&l, s, 1, 6); /* outside: nobody's */
    koila__lines_enter(&l, s, outer->code, 10, true);
    koila__lines_line(&l, s, outer->code, 11);
    koila__lines_made(&l, s, 1, 7);
    koila__lines_made(&l, s, 1, 8);
    for (int i = 0; i < 3; i++) { /* a recursion: its row counts once */
        koila__lines_enter(&l, s, inner->code, 100, true);
        koila__lines_line(&l, s, inner->code, 102);
    }
    koila__lines_made(&l, s, 1, 9);
    for (int i = 0; i < 3; i++)
        koila__lines_leave(&l, s);
    koila__lines_line(&l, s, outer->code, 12);
    koila__lines_made(&l, s, 1, 10);
    koila__lines_leave(&l, s);
    koila__lines_made(&l, s, 1, 11);
    static const struct {
        uint64_t thread, number, bytes;
    } runs[] = { { 1, 6, 1 },   { 1, 7, 2 },   { 1, 8, 4 }, { 1, 9, 8 },
                 { 1, 10, 16 }, { 1, 11, 32 }, { 2, 9, 64 } };
    for (size_t i = 0; i < KOILA_COUNT(runs); i++)
        koila__lines_credit_node(&l, runs[i].thread, runs[i].number, 0, runs[i].bytes);
    CHECK_EQ(koila__row_credit(&l, &outer->rows[1], 0).backward, 2 + 4 + 8);
    CHECK_EQ(koila__row_credit(&l, &outer->rows[2], 0).backward, 16);
    CHECK_EQ(koila__row_credit(&l, &inner->rows[2], 0).backward, 8);
    /* who came later sees only what comes later */
    CHECK(koila__func_new(&l, &inner_key, 100, 5, &late, &other) == KOILA_OK);
    koila__lines_credit_node(&l, 1, 9, 0, 100);
    CHECK_EQ(koila__row_credit(&l, &other->rows[2], 0).backward, 100);
    CHECK_EQ(koila__row_credit(&l, &inner->rows[2], 0).backward, 108);
    koila__func *copy;
    CHECK(koila__func_copy(&l, inner, &late, &copy) == KOILA_OK);
    koila__func_free(&l, copy);
    koila__func_free(&l, other);
    koila__func_free(&l, inner);
    koila__lines_credit_node(&l, 1, 9, 0, 5); /* its innermost row is gone, the outer one is not */
    CHECK_EQ(koila__row_credit(&l, &outer->rows[1], 0).backward, 14 + 100 + 5);
    /* bounded: old ones are forgotten, new ones are right */
    for (uint64_t n = 0; n < 3 * KOILA__ORIGINS_MAX; n++) {
        koila__lines_enter(&l, s, outer->code, 10, true);
        koila__lines_line(&l, s, outer->code, 13);
        koila__lines_made(&l, s, 1, 1000 + n);
        koila__lines_leave(&l, s);
    }
    CHECK(s->n_origins <= KOILA__ORIGINS_MAX && l.paths.n < 10);
    koila__lines_credit_node(&l, 1, 1000 + 3 * KOILA__ORIGINS_MAX - 1, 0, 3);
    CHECK_EQ(koila__row_credit(&l, &outer->rows[3], 0).backward, 3);
    koila__func_free(&l, outer);
    CHECK_EQ(l.paths.n, 0);
    koila__lines_deinit(&l);
}

TEST(linetab__captured_work_is_credited_once_and_never_twice)
{
    static koila__meter m;
    static koila__lines l;
    static int key;
    koila__wish wish = { .enabled = true };
    koila__func *f;
    koila__meter_init(&m, 1);
    koila__lines_init(&l, &m, NULL);
    CHECK(koila__func_new(&l, &key, 10, 5, &wish, &f) == KOILA_OK);
    koila__stack *s = koila__stack_new(&l);
    koila__lines_enter(&l, s, f->code, 10, true);
    koila__lines_line(&l, s, f->code, 12);
    koila__lines_credit_line(&l, &key, 11, 0, 100, 500);
    koila__lines_credit_line(&l, &key, 11, 0, -30, 470);
    koila__lines_credit_line(&l, &key, 12, 0, 50, 520); /* open: its window has the event */
    koila__lines_credit_line(&l, &key, 99, 0, 50, 600);
    koila__lines_credit_line(&l, &m, 11, 0, 50, 600);
    koila__lines_leave(&l, s);
    koila__credit a = koila__row_credit(&l, &f->rows[1], 0);
    koila__credit b = koila__row_credit(&l, &f->rows[2], 0);
    CHECK_EQ(a.alloc, 100);
    CHECK_EQ(a.freed, 30);
    CHECK_EQ(a.peak, 500);
    CHECK_EQ(b.alloc, 0);
    CHECK_EQ(b.peak, 520);
    koila__func_free(&l, f);
    koila__lines_deinit(&l);
}

TEST(meter__spans_nest_and_see_every_thread)
{
    koila__span a = { 0 }, b = { 0 };
    koila__meter_init(&meter, 2);
    koila__meter_event(&meter, NULL, NULL, 0, 50, 50, UINT64_MAX);
    CHECK(koila__span_open(&meter, &a, 0));
    koila__meter_event(&meter, NULL, NULL, 0, 100, 150, UINT64_MAX);
    CHECK(koila__span_open(&meter, &b, 0));
    koila__meter_event(&meter, NULL, NULL, 1, 999, 999, UINT64_MAX);
    koila__meter_event(&meter, NULL, NULL, 0, -100, 50, UINT64_MAX);
    koila__meter_event(&meter, NULL, NULL, 0, 10, 60, UINT64_MAX);
    koila__span_close(&meter, &b);
    koila__span_close(&meter, &a);
    koila__meter_event(&meter, NULL, NULL, 0, 5000, 5060, UINT64_MAX);
    CHECK_EQ(a.start_bytes, 50);
    CHECK_EQ(a.peak, 150);
    CHECK_EQ(b.start_bytes, 150);
    CHECK_EQ(b.peak, 150);
    CHECK_EQ(a.end_bytes, 60);
    CHECK_EQ(a.end.alloc_bytes[0] - a.start.alloc_bytes[0], 110);
    CHECK_EQ(b.end.n_frees[0] - b.start.n_frees[0], 1);
    static koila__span many[KOILA__SPANS_MAX];
    int n = 0;
    while (n < KOILA__SPANS_MAX && koila__span_open(&meter, &many[n], 0))
        n++;
    CHECK_EQ(n, KOILA__SPANS_MAX);
    CHECK(!koila__span_open(&meter, &a, 0));
}

TEST(meter__active_is_what_waits_too)
{
    enum { D = 1 };
    const int A = KOILA__Q_ACTIVE;
    static koila__thread t;
    static uint64_t outer[KOILA__DEVICES_MAX][KOILA__SAVED],
        inner[KOILA__DEVICES_MAX][KOILA__SAVED], now[KOILA__DEVICES_MAX][KOILA__Q_COUNT],
        peak[KOILA__DEVICES_MAX][KOILA__Q_COUNT];
    koila__meter_init(&meter, 2);
    CHECK(koila__meter_add_thread(&meter, &t));
    koila__meter_event(&meter, NULL, &t, D, 100, 100, 200);
    koila__meter_set_silent(&meter, D, 200, 200, (uint64_t[KOILA__WAITS]){ 30, 30, 0, 2, 2, 0 });
    CHECK_EQ(koila__meter_now(&meter, D, KOILA__Q_ACTIVE), 130);
    CHECK_EQ(koila__meter_now(&meter, D, (koila__q)(A + KOILA__Q_N_SMALL)), 3);
    koila__window_open(&meter, &t, outer);
    koila__meter_event(&meter, NULL, &t, D, 50, 150, 200);
    koila__meter_event(&meter, NULL, &t, D, -50, 100, 200);
    koila__window_open(&meter, &t, inner); /* nested: the outer one sees what it sees */
    koila__meter_event(&meter, NULL, &t, D, 70, 170, 300);
    koila__meter_event(&meter, NULL, &t, D, -70, 100, 300);
    koila__meter_set_silent(&meter, D, 300, 280, (uint64_t[KOILA__WAITS]){ 10, 10, 0, 1, 1, 0 });
    koila__window_next(&meter, &t, inner, now, peak);
    CHECK_EQ(now[D][A], 110);
    CHECK_EQ(peak[D][A], 180); /* 170 and the smaller of 30 and 10 */
    CHECK_EQ(now[D][KOILA__Q_RESERVED], 280);
    CHECK_EQ(peak[D][KOILA__Q_RESERVED], 300);
    koila__window_close(&meter, &t, inner);
    koila__window_next(&meter, &t, outer, now, peak);
    /* not 170 + 30: what waited in the first half may have been gone in the second */
    CHECK_EQ(peak[D][A], 180);
    CHECK_EQ(peak[D][A + KOILA__Q_N_ALL], 3);
    koila__window_close(&meter, &t, outer);
    /* read before an event that has told 280 since */
    koila__meter_set_silent(&meter, D, 200, 0, (uint64_t[KOILA__WAITS]){ 0 });
    CHECK_EQ(koila__meter_now(&meter, D, KOILA__Q_RESERVED), 280);
    uint64_t n_events = koila__meter_events(&meter);
    koila__meter_set_silent(&meter, D, 280, 280, (uint64_t[KOILA__WAITS]){ 0 });
    CHECK_EQ(koila__meter_events(&meter), n_events); /* nothing changed: lines may pass quietly */
    koila__meter_del_thread(&meter, &t);
}

TEST(columns__names_read_back_and_garbage_is_refused)
{
    static const char *const good[] = { "hits", "rss", "active.all.current",
                                        "inactive_split_bytes.large_pool.freed",
                                        "segment.small_pool.peak" };
    static const char *const bad[] = { "",
                                       ".",
                                       "..",
                                       "a.b.c",
                                       "active.all",
                                       "active.all.peak.",
                                       "active_bytes..peak",
                                       "hits ",
                                       "active.all.peaks" };
    char buffer[64];
    koila__column c;
    for (size_t i = 0; i < KOILA_COUNT(good); i++) {
        CHECK_EQ(koila__column_parse(good[i], &c, NULL), KOILA_OK);
        CHECK_STR(koila__column_name(&c, buffer), good[i]);
    }
    for (size_t i = 0; i < KOILA_COUNT(bad); i++) {
        koila_error err = KOILA_ERROR_INIT;
        CHECK_EQ(koila__column_parse(bad[i], &c, &err), KOILA_BAD_INPUT);
        CHECK(strlen(err.text) > 20);
    }
}

TEST(text__sizes_times_and_escapes)
{
    char buffer[32];
    CHECK_STR(koila__size_text(40400, buffer), "39.45K");
    CHECK_STR(koila__size_text(-1024, buffer), "-1.00K");
    CHECK_STR(koila__size_text(0, buffer), "0.00B");
    CHECK_STR(koila__time_text(999, buffer), "999ns");
    CHECK_STR(koila__time_text(1.5e9, buffer), "1.50s");
    koila__text t;
    koila__text_init(&t, NULL);
    koila__text_html(&t, "<a href='x'>&\"");
    koila__text_json(&t, "q\"\\\n<");
    koila__text_csv(&t, "a,\"b\"");
    CHECK_STR(t.s,
              "&lt;a href=&#39;x&#39;&gt;&amp;&quot;\"q\\\"\\\\\\u000a\\u003c\"\"a,\"\"b\"\"\"");
    koila__text_deinit(&t);
    for (failing_allocator f = { .at = 1 };; f.at++) {
        koila_allocator mem = { failing_realloc, &f };
        f.n_calls = 0;
        koila__text_init(&t, &mem);
        for (int i = 0; i < 200; i++)
            koila__text_printf(&t, "%d ", i);
        CHECK(koila__text_ok(&t) == (f.n_calls < f.at));
        koila__text_deinit(&t);
        CHECK_EQ(f.n_live_bytes, 0);
        if (f.n_calls < f.at)
            break;
    }
}
