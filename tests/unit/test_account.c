/* Accounts against a plain model: one thread, helpers, others, and all of them at once. Built with
 * -fsanitize=thread these are the threads that call the allocator's hooks without Python's lock. */
#include <pthread.h>
#include <stdlib.h>

#include "memory/account.h"
#include "memory/ledger.h"

#include "harness.h"

static _Thread_local bool runs_python;
static bool is_other(void) { return runs_python; }

/* An event as the allocator tells it. */
static void event(int64_t bytes)
{
    uint64_t limit;
    koila__account_add(koila__account_now(&limit), bytes);
}

static void *helps(void *bytes)
{
    event((int64_t)(intptr_t)bytes);
    return NULL;
}
static void *is_beside(void *bytes)
{
    runs_python = true;
    event((int64_t)(intptr_t)bytes);
    return NULL;
}
/* Works itself, and stays in its work until told to leave. */
static pthread_barrier_t entered, leave;
static void *works(void *bytes)
{
    koila__use use;
    int64_t peak, now;
    CHECK(koila__work_begin());
    koila__use_begin(&use);
    pthread_barrier_wait(&entered);
    event((int64_t)(intptr_t)bytes);
    pthread_barrier_wait(&leave);
    CHECK(koila__use_end(&use, &peak, &now));
    CHECK_EQ(now, (intptr_t)bytes);
    CHECK_EQ(peak, now);
    koila__work_end();
    return NULL;
}
static void on_thread(void *(*fn)(void *), int64_t bytes)
{
    pthread_t t;
    pthread_create(&t, NULL, fn, (void *)(intptr_t)bytes);
    pthread_join(t, NULL);
}

TEST(account__a_use_is_the_peak_beyond_its_beginning)
{
    koila__use outer, inner;
    int64_t peak, now;
    koila__accounts_init(is_other);
    CHECK(koila__work_begin());
    event(1000);
    koila__use_begin(&outer);
    event(500);
    event(-400);
    koila__use_begin(&inner);
    event(50);
    event(-150); /* frees what was there before */
    CHECK(koila__use_end(&inner, &peak, &now));
    CHECK_EQ(peak, 50);
    CHECK_EQ(now, -100);
    CHECK(koila__use_end(&outer, &peak, &now));
    CHECK_EQ(peak, 500);
    CHECK_EQ(now, 0);
    event(-1000);
    koila__work_end();
}

TEST(account__helpers_count_and_others_do_not)
{
    koila__use use;
    int64_t peak, now;
    koila__accounts_init(is_other);
    on_thread(helps, 7); /* nobody works: nobody's */
    CHECK(koila__work_begin());
    koila__use_begin(&use);
    event(100);
    on_thread(is_beside, 1 << 30);
    on_thread(helps, 300);
    on_thread(helps, -300);
    on_thread(is_beside, -(1 << 30));
    event(-100);
    CHECK(koila__use_end(&use, &peak, &now));
    CHECK_EQ(peak, 400);
    CHECK_EQ(now, 0);
    koila__work_end();
}

TEST(account__a_helper_beside_two_who_work_makes_it_unclear)
{
    koila__use use;
    int64_t peak, now;
    pthread_t t;
    koila__accounts_init(is_other);
    pthread_barrier_init(&entered, NULL, 2);
    pthread_barrier_init(&leave, NULL, 2);
    CHECK(koila__work_begin());
    pthread_create(&t, NULL, works, (void *)(intptr_t)999);
    pthread_barrier_wait(&entered);
    koila__use_begin(&use);
    event(10);
    pthread_barrier_wait(&leave);
    pthread_join(t, NULL);
    CHECK(koila__use_end(&use, &peak, &now)); /* both own accounts: nothing is unclear */
    CHECK_EQ(now, 10);

    pthread_create(&t, NULL, works, (void *)(intptr_t)0);
    pthread_barrier_wait(&entered);
    pthread_barrier_wait(&leave);
    pthread_join(t, NULL);
    koila__use_begin(&use);
    koila__work_end();
    CHECK(koila__work_begin());
    CHECK(koila__use_end(&use, &peak, &now));
    koila__work_end();
    pthread_barrier_destroy(&entered);
    pthread_barrier_destroy(&leave);
}

static void *works_with_a_helper(void *unused)
{
    koila__use use;
    int64_t peak, now;
    (void)unused;
    CHECK(koila__work_begin());
    koila__use_begin(&use);
    pthread_barrier_wait(&entered);
    on_thread(helps, 5);
    pthread_barrier_wait(&leave);
    CHECK(!koila__use_end(&use, &peak, &now));
    koila__work_end();
    return NULL;
}
TEST(account__what_a_helper_allocates_beside_two_counts_for_neither)
{
    pthread_t t[2];
    koila__accounts_init(is_other);
    pthread_barrier_init(&entered, NULL, 2);
    pthread_barrier_init(&leave, NULL, 2);
    for (int i = 0; i < 2; i++)
        pthread_create(&t[i], NULL, works_with_a_helper, NULL);
    for (int i = 0; i < 2; i++)
        pthread_join(t[i], NULL);
    pthread_barrier_destroy(&entered);
    pthread_barrier_destroy(&leave);
}

static void *sees_no_limit(void *unused)
{
    uint64_t limit;
    (void)unused;
    runs_python = true;
    CHECK(koila__account_now(&limit) == NULL && limit == UINT64_MAX);
    return NULL;
}
static void *sees_the_limit(void *unused)
{
    uint64_t limit;
    (void)unused;
    CHECK(koila__account_now(&limit) != NULL && limit == 12345);
    return NULL;
}
TEST(account__a_limit_holds_for_its_thread_and_those_that_help_it)
{
    uint64_t limit;
    koila__accounts_init(is_other);
    koila__account_set_limit(12345);
    CHECK(koila__work_begin());
    CHECK(koila__account_now(&limit) && limit == 12345);
    on_thread(sees_no_limit, 0);
    on_thread(sees_the_limit, 0);
    koila__work_end();
    koila__account_set_limit(UINT64_MAX);
    koila__account_now(&limit);
    CHECK(limit == UINT64_MAX && koila__account_get_limit() == UINT64_MAX);
}

/* ---- all at once, with a real ledger: each measures itself exactly */

static koila__ledger shared;
enum { N_THREADS = 6, N_ROUNDS = 3000, N_SLOTS = 32 };

static void alloc(uintptr_t base, uint64_t *sizes, size_t k, uint64_t n)
{
    uint64_t now, limit;
    koila__account *a = koila__account_now(&limit);
    CHECK(koila__ledger_reserve_within(&shared, n, limit, &now));
    CHECK(koila__ledger_commit(&shared, (void *)(base + (k + 1) * 64), n, 0, now));
    koila__account_add(a, (int64_t)n);
    sizes[k] = n;
}
static void release(uintptr_t base, uint64_t *sizes, size_t k)
{
    uint64_t now, n, limit;
    CHECK(koila__ledger_release(&shared, (void *)(base + (k + 1) * 64), &n, &now));
    koila__account_add(koila__account_now(&limit), -(int64_t)n);
    CHECK_EQ(n, sizes[k]);
    sizes[k] = 0;
}

/* Of each thread's windows. The peak of all is not told before that of a window: another thread
 * counts its bytes first, and raises the peak after. */
static uint64_t highest[N_THREADS];

static void *measures(void *arg)
{
    const uintptr_t base = (uintptr_t)arg << 40;
    uint64_t sizes[N_SLOTS] = { 0 };
    uint64_t r = (uintptr_t)arg;
    runs_python = true;
    for (int round = 0; round < N_ROUNDS; round++) {
        koila__use use;
        int64_t model = 0, top = 0, peak, now;
        const int window = koila__ledger_open(&shared);
        CHECK(koila__work_begin());
        koila__use_begin(&use);
        for (int i = 0; i < 20; i++) {
            r = r * 6364136223846793005u + 1442695040888963407u;
            const size_t k = (r >> 33) % N_SLOTS;
            if (sizes[k]) {
                model -= (int64_t)sizes[k];
                release(base, sizes, k);
            } else {
                alloc(base, sizes, k, 1 + (r >> 40) % 10000);
                model += (int64_t)sizes[k];
            }
            top = model > top ? model : top;
        }
        CHECK(koila__use_end(&use, &peak, &now));
        CHECK_EQ(now, model);
        CHECK_EQ(peak, top);
        koila__work_end();
        const uint64_t high = koila__ledger_close(&shared, window);
        CHECK((int64_t)high >= model);
        if (high > highest[(uintptr_t)arg - 1])
            highest[(uintptr_t)arg - 1] = high;
    }
    for (size_t k = 0; k < N_SLOTS; k++)
        if (sizes[k])
            release(base, sizes, k);
    return NULL;
}

TEST(account__threads_beside_each_other_measure_what_each_would_alone)
{
    pthread_t t[N_THREADS];
    koila__accounts_init(is_other);
    koila__ledger_init(&shared, NULL);
    for (uintptr_t i = 0; i < N_THREADS; i++)
        pthread_create(&t[i], NULL, measures, (void *)(i + 1));
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(t[i], NULL);
    for (int i = 0; i < N_THREADS; i++)
        CHECK(highest[i] <= shared.peak);
    CHECK_EQ(shared.current, 0);
    CHECK_EQ(shared.windows, 0);
    CHECK_EQ(shared.windows_taken, 0);
    koila__ledger_deinit(&shared);
}

TEST(ledger__a_window_has_its_own_peak)
{
    koila__ledger l;
    uint64_t now, n;
    koila__ledger_init(&l, NULL);
    CHECK(koila__ledger_reserve(&l, 500, &now) &&
          koila__ledger_commit(&l, (void *)64, 500, 0, now));
    CHECK(koila__ledger_release(&l, (void *)64, &n, &now));
    const int outer = koila__ledger_open(&l);
    CHECK(koila__ledger_reserve(&l, 100, &now) &&
          koila__ledger_commit(&l, (void *)64, 100, 0, now));
    const int inner = koila__ledger_open(&l);
    CHECK(outer != inner);
    CHECK(koila__ledger_reserve(&l, 30, &now) && koila__ledger_commit(&l, (void *)128, 30, 0, now));
    CHECK(koila__ledger_release(&l, (void *)64, &n, &now));
    CHECK_EQ(koila__ledger_close(&l, inner), 130);
    CHECK_EQ(koila__ledger_close(&l, outer), 130);
    CHECK_EQ(l.peak, 500);
    int all[KOILA__LEDGER_WINDOWS];
    for (int i = 0; i < KOILA__LEDGER_WINDOWS; i++)
        all[i] = koila__ledger_open(&l);
    CHECK_EQ(koila__ledger_open(&l), -1);
    CHECK_EQ(koila__ledger_close(&l, -1), l.current);
    for (int i = 0; i < KOILA__LEDGER_WINDOWS; i++)
        CHECK_EQ(koila__ledger_close(&l, all[i]), 30);
    koila__ledger_deinit(&l);
}
