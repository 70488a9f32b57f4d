/* The guard against real memory of this process: what it grants, gives back and refuses. */
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "memory/resident.h"

#include "harness.h"

#define MIB ((uint64_t)1 << 20)

static koila__resident guard;
static uint64_t handed_out;

static bool grants(uint64_t n)
{
    const bool yes = koila__resident_allows(&guard, n, handed_out + n);
    if (yes)
        handed_out += n;
    return yes;
}

static void start(uint64_t room)
{
    koila__resident_init(&guard);
    handed_out = 0;
    const uint64_t now = koila__resident_now(&guard, false);
    koila__resident_on(&guard, now + room, false, now, 0);
    koila__resident_refuse_here(true);
}

static void stop(void)
{
    koila__resident_off(&guard);
    koila__resident_refuse_here(false);
}

TEST(resident__memory_that_is_touched_counts_and_untouched_does_not)
{
    koila__resident_init(&guard);
    const uint64_t before = koila__resident_now(&guard, false);
    CHECK(before > 0 && koila__resident_now(&guard, true) >= before);
    char *block = mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(block != MAP_FAILED);
    CHECK(koila__resident_now(&guard, false) < before + 8 * MIB);
    memset(block, 1, 64 * MIB);
    CHECK(koila__resident_now(&guard, false) >= before + 60 * MIB);
    munmap(block, 64 * MIB);
}

TEST(resident__blocks_are_refused_where_they_would_pass_the_limit_although_none_was_touched)
{
    start(64 * MIB);
    CHECK(!grants(65 * MIB));
    CHECK(grants(40 * MIB));
    CHECK(!grants(40 * MIB));
    CHECK(grants(16 * MIB));
    CHECK_EQ(guard.n_refused, 2);
    CHECK_EQ(guard.refused_at, 40 * MIB);
    handed_out -= 40 * MIB;
    CHECK(grants(40 * MIB));
    stop();
    CHECK(grants(1024 * MIB)); /* nobody wants the limit kept */
}

TEST(resident__where_much_is_left_the_system_is_asked_seldom)
{
    start(1024 * MIB);
    for (int i = 0; i < 1000; i++)
        CHECK(grants(1000));
    CHECK_EQ(guard.n_looks, 1);
    CHECK(!guard.was_near);
    stop();
}

TEST(resident__other_threads_are_not_refused_but_with_for_all)
{
    start(MIB);
    koila__resident_refuse_here(false);
    CHECK(grants(64 * MIB));
    guard.for_all = true;
    CHECK(!grants(64 * MIB));
    stop();
}

#ifndef __SANITIZE_THREAD__ /* the sanitizer's malloc() gives nothing back */
TEST(resident__memory_that_the_c_library_keeps_is_given_back_before_a_block_is_refused)
{
    enum { N = 2000, BYTES = 64 << 10 };
    static void *blocks[N];
    start(192 * MIB);
    for (int i = 0; i < N; i++) {
        CHECK(grants(BYTES));
        blocks[i] = malloc(BYTES);
        memset(blocks[i], 1, BYTES);
    }
    for (int i = 0; i < N - 1; i++) { /* the last keeps the heap from shrinking by itself */
        free(blocks[i]);
        handed_out -= BYTES;
    }
    CHECK(koila__resident_now(&guard, false) > guard.base + 100 * MIB);
    CHECK(grants(150 * MIB));
    CHECK_EQ(guard.n_trims, 1);
    CHECK(koila__resident_now(&guard, false) < guard.base + 50 * MIB);
    free(blocks[N - 1]);
    stop();
}
#endif

static pthread_barrier_t together;

enum { N_BLOCKS = 8 };

/* Page faults of rounds in which each block is made, touched and freed, after two to warm up. */
static long faults_of_rounds(void)
{
    struct rusage before, after;
    for (int round = 0; round < 6; round++) {
        void *blocks[N_BLOCKS];
        if (round == 2)
            getrusage(RUSAGE_SELF, &before);
        for (int i = 0; i < N_BLOCKS; i++) {
            blocks[i] = malloc(4 * MIB);
            memset(blocks[i], 1, 4 * MIB);
        }
        for (int i = 0; i < N_BLOCKS; i++)
            free(blocks[i]);
    }
    getrusage(RUSAGE_SELF, &after);
    return after.ru_minflt - before.ru_minflt;
}

/* In a process of its own: what the C library does depends on all that was freed before. */
TEST(resident__what_is_freed_is_retained_and_comes_again_without_page_faults)
{
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    const pid_t child = fork();
    int status;
    if (child == 0) {
        koila__resident_trim();
        const long without = faults_of_rounds();
        koila__resident_retain();
        const long with = faults_of_rounds();
        _exit(without > 1000 && with < 16 ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

/* Allocates and frees as a step does, which ends now and then. */
static void *works(void *arg)
{
    _Atomic int64_t *held = arg;
    koila__resident_refuse_here(true);
    pthread_barrier_wait(&together);
    for (int i = 0; i < 3000; i++) {
        const uint64_t n = (uint64_t)(1 + i % 7) << 18;
        const int64_t now = atomic_fetch_add(held, (int64_t)n) + (int64_t)n;
        koila__resident_allows(&guard, n, (uint64_t)now);
        atomic_fetch_sub(held, (int64_t)n);
        const koila__resident_news news = koila__resident_news_of(&guard);
        CHECK(news.n_refused <= news.n_looks && !news.was_near);
        if (i % 10)
            continue;
        koila__resident_on(&guard, (uint64_t)1 << 40, false, koila__resident_now(&guard, false),
                           (uint64_t)now);
        atomic_store(&guard.for_all, i % 20 == 0);
        koila__resident_off(&guard);
    }
    koila__resident_refuse_here(false);
    return NULL;
}

/* What the thread sanitizer is to see: tools/hostile.sh threads. */
TEST(resident__threads_begin_and_end_steps_while_others_allocate)
{
    static _Atomic int64_t held;
    pthread_t t[4];
    start((uint64_t)1 << 40);
    pthread_barrier_init(&together, NULL, 4);
    for (int i = 0; i < 4; i++)
        pthread_create(&t[i], NULL, works, &held);
    for (int i = 0; i < 4; i++)
        pthread_join(t[i], NULL);
    pthread_barrier_destroy(&together);
    atomic_store(&guard.for_all, false);
    CHECK(koila__resident_news_of(&guard).n_looks > 0);
    CHECK_EQ(guard.n_refused, 0);
    stop();
}
