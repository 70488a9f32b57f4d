/* A history against the plainest model: the set of live blocks, kept as an array and summed up
 * after every event. */
#include "memory/history.h"

#include "harness.h"

static uint64_t state = 88172645463325252u;
static uint64_t rng(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

enum { N = 3000, PLACES = 40 };
typedef struct model {
    int64_t live[PLACES]; /* bytes at each address, 0: none */
    uint32_t tag[PLACES];
    uint64_t total;
} model;

static const char *name_of(void *user, uint32_t group)
{
    static const char *const names[] = { "", "a.py:1", "a.py:22", "<b>.py:3", "/deep/c.py:4" };
    return names[group];
}

/* Whole because the model walks beside the history, event by event. */
TEST(history__equals_a_model_that_keeps_the_set_of_live_blocks)
{
    static const uint32_t identity[] = { 0, 1, 2, 3, 4 };
    for (int round = 0; round < 50; round++) {
        static model now, at_peak;
        koila__history h;
        koila__history_init(&h, 100000, NULL);
        memset(&now, 0, sizeof now);
        size_t n_first = rng() % 20;
        uint64_t start = 0, peak = 0;
        bool known = false;
        for (int i = 0; i < N; i++) {
            if ((size_t)i == n_first) {
                koila__history_begin(&h);
                start = peak = now.total;
                at_peak = now;
                known = true;
            }
            int k = (int)(rng() % PLACES);
            const void *p = (const void *)(uintptr_t)(4096 + k * 64);
            int64_t n = 0;
            if (!now.live[k]) {
                n = 1 + (int64_t)(rng() % 1000);
                now.tag[k] = (uint32_t)(rng() % 5);
            } else if ((size_t)i >= n_first) {
                n = -now.live[k];
            }
            if (!n) {
                if (!known)
                    n_first++;
                continue;
            }
            koila__history_add(&h, (uint64_t)i * 10, p, n, n > 0 ? now.tag[k] : 99);
            now.live[k] += n;
            now.total += (uint64_t)n;
            if (known && now.total > peak) {
                peak = now.total;
                at_peak = now;
            }
            /* a free of nobody's block */
            if (rng() % 50 == 0 && known)
                koila__history_add(&h, (uint64_t)i * 10, (const void *)(uintptr_t)(1 << 20), -77,
                                   0);
        }
        CHECK(koila__history_solve(&h) == KOILA_OK);
        CHECK_EQ(h.start, start);
        CHECK_EQ(h.peak, peak);
        CHECK_EQ(h.end, now.total);
        int64_t seen[PLACES] = { 0 };
        for (size_t i = 0; h.peak_at != SIZE_MAX && i <= h.peak_at; i++) {
            if (!koila__history_is_live(&h, i, h.peak_at))
                continue;
            size_t k = ((uintptr_t)h.events[i].p - 4096) / 64;
            seen[k] += h.events[i].n_bytes;
            CHECK_EQ(h.events[i].tag, at_peak.tag[k]);
        }
        for (int k = 0; k < PLACES; k++)
            CHECK_EQ(seen[k], at_peak.live[k]);
        koila__text out;
        koila__text_init(&out, NULL);
        CHECK(koila__history_body(&h, identity, 5, name_of, NULL, &out) == KOILA_OK);
        CHECK(strstr(out.s, "&lt;b&gt;.py:3") && !strstr(out.s, "<b>.py"));
        CHECK(out.n < 400000);
        koila__text_deinit(&out);
        koila__history_deinit(&h);
    }
}

TEST(history__the_page_names_lines_that_held_something)
{
    static const uint32_t identity[] = { 0, 1, 2 };
    koila__history h;
    koila__text out;
    koila__history_init(&h, 10, NULL);
    koila__history_begin(&h);
    koila__history_add(&h, 1, (const void *)(uintptr_t)64, 100, 1);
    CHECK(koila__history_solve(&h) == KOILA_OK);
    koila__text_init(&out, NULL);
    CHECK(koila__history_body(&h, identity, 3, name_of, NULL, &out) == KOILA_OK);
    const char *legend = strstr(out.s, "at the peak</th>");
    CHECK(legend && strstr(legend, "a.py:1<") && !strstr(legend, "a.py:22") &&
          !strstr(legend, "line not known"));
    koila__text_deinit(&out);
    koila__history_deinit(&h);
}

TEST(history__ends_at_its_limit_and_says_how_much_is_missing)
{
    koila__history h;
    koila__history_init(&h, 10, NULL);
    for (int i = 0; i < 5; i++)
        koila__history_add(&h, 0, (const void *)(uintptr_t)(64 + i * 64), 100, 0);
    koila__history_begin(&h);
    for (int i = 5; i < 30; i++)
        koila__history_add(&h, 5, (const void *)(uintptr_t)(64 + i * 64), 1, 0);
    CHECK_EQ(h.n, 15);
    CHECK_EQ(h.n_lost, 15);
    CHECK(koila__history_solve(&h) == KOILA_OK);
    CHECK_EQ(h.peak, 510);
    koila__history_deinit(&h);
    koila__history_init(&h, 10, NULL);
    koila__history_begin(&h);
    CHECK(koila__history_solve(&h) == KOILA_OK && h.peak == 0 && h.peak_at == SIZE_MAX);
    koila__history_deinit(&h);
}

static int refuse_at;
static void *refusing(void *user, void *p, size_t old_size, size_t size)
{
    if (!size) {
        free(p);
        return NULL;
    }
    return --refuse_at == 0 ? NULL : realloc(p, size);
}

TEST(history__every_host_allocation_may_fail)
{
    static const uint32_t identity[] = { 0 };
    for (int k = 1; k < 12; k++) {
        koila_allocator mem = { .fn = refusing };
        koila__history h;
        refuse_at = k;
        koila__history_init(&h, 100000, &mem);
        for (int i = 0; i < 5000; i++)
            koila__history_add(&h, (uint64_t)i, (const void *)(uintptr_t)(64 + i * 64), 1, 0);
        CHECK(h.n + h.n_lost == 5000);
        if (koila__history_solve(&h) == KOILA_OK) {
            koila__text out;
            koila__text_init(&out, &mem);
            koila_status s = koila__history_body(&h, identity, 1, name_of, NULL, &out);
            CHECK(s == KOILA_OK || s == KOILA_NO_MEMORY);
            koila__text_deinit(&out);
        }
        koila__history_deinit(&h);
    }
}
