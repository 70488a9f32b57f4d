/* The pointer table against a plain array, and the ledger's equations, alone and under threads. */
#include <pthread.h>

#include "memory/ledger.h"

#include "harness.h"

static uint64_t rng_state = 88172645463325252u;
static uint64_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    return rng_state ^= rng_state << 17;
}

TEST(ptrtab__equals_a_plain_array_over_random_puts_and_dels)
{
    enum { N = 3000 };
    static uint64_t model[N]; /* 0: absent, else bytes + 1 */
    koila__ptrtab t;
    koila__ptrtab_init(&t, NULL);
    size_t n_live = 0;
    for (int step = 0; step < 200000; step++) {
        size_t k = rng() % N;
        void *p = (void *)((k + 1) * 64);
        uint64_t n = 77;
        uint32_t tag = 77;
        if (rng() % 2) {
            uint64_t fresh = rng() % 1000000, replaced;
            CHECK(koila__ptrtab_put(&t, p, fresh, (uint32_t)k, &replaced));
            CHECK(replaced == (model[k] ? model[k] - 1 : UINT64_MAX));
            n_live += !model[k];
            model[k] = fresh + 1;
        } else {
            bool known = koila__ptrtab_del(&t, p, &n, &tag);
            CHECK(known == (model[k] != 0));
            if (known)
                CHECK(n == model[k] - 1 && tag == k);
            n_live -= known;
            model[k] = 0;
        }
        if (step % 20000 == 0)
            CHECK(koila__ptrtab_check(&t));
    }
    CHECK_EQ(koila__ptrtab_count(&t), n_live);
    for (size_t k = 0; k < N; k++) {
        uint64_t n = 0;
        CHECK(koila__ptrtab_get(&t, (void *)((k + 1) * 64), &n, NULL) == (model[k] != 0));
        if (model[k])
            CHECK(n == model[k] - 1);
    }
    CHECK(koila__ptrtab_check(&t));
    koila__ptrtab_deinit(&t);
}

TEST(ptrtab__check_catches_an_entry_moved_by_hand)
{
    koila__ptrtab t;
    uint64_t r;
    koila__ptrtab_init(&t, NULL);
    CHECK(koila__ptrtab_put(&t, (void *)4096, 1, 0, &r));
    for (size_t k = 0; k < KOILA__PTRTAB_SHARDS; k++) {
        koila__ptrtab_shard *s = &t.shards[k];
        for (size_t i = 0; s->n_used && i < s->capacity; i++)
            if (s->entries[i].p) {
                s->entries[(i + 7) & (s->capacity - 1)] = s->entries[i];
                s->entries[i].p = 0;
                break;
            }
    }
    CHECK(!koila__ptrtab_check(&t));
    koila__ptrtab_deinit(&t);
}

TEST(ledger__every_host_allocation_may_fail_and_nothing_is_lost)
{
    for (failing_allocator f = { .at = 1 };; f.at++) {
        koila_allocator mem = { failing_realloc, &f };
        koila__ledger l;
        f.n_calls = 0;
        koila__ledger_init(&l, &mem);
        uint64_t held = 0;
        for (uintptr_t i = 1; i <= 500; i++) {
            uint64_t now;
            CHECK(koila__ledger_reserve(&l, i, &now));
            if (koila__ledger_commit(&l, (void *)(i * 16), i, 0, now))
                held += i;
        }
        CHECK_EQ(l.current, held);
        CHECK(koila__ptrtab_check(&l.blocks));
        uint64_t n_calls = f.n_calls;
        koila__ledger_deinit(&l);
        CHECK_EQ(f.n_live_bytes, 0);
        if (n_calls < f.at)
            break;
    }
}

TEST(ledger__limit_refuses_exactly_beyond_it)
{
    koila__ledger l;
    uint64_t now, n;
    koila__ledger_init(&l, NULL);
    atomic_store(&l.limit, 1000);
    CHECK(koila__ledger_reserve(&l, 1000, &now));
    CHECK_EQ(now, 1000);
    CHECK(koila__ledger_commit(&l, (void *)64, 1000, 3, now));
    CHECK(!koila__ledger_reserve(&l, 1, &now));
    CHECK(!koila__ledger_reserve(&l, UINT64_MAX, &now));
    CHECK(koila__ledger_reserve(&l, 0, &now));
    koila__ledger_cancel(&l, 0);
    CHECK(koila__ledger_release(&l, (void *)64, &n, &now));
    CHECK_EQ(n, 1000);
    CHECK_EQ(now, 0);
    CHECK(!koila__ledger_release(&l, (void *)64, &n, &now));
    CHECK_EQ(l.n_unknown, 1);
    CHECK_EQ(l.peak, 1000);
    CHECK_EQ(koila__ledger_granted(&l), 1);
    koila__ledger_deinit(&l);
}

TEST(ledger__fail_nth_refuses_one_allocation_only)
{
    koila__ledger l;
    uint64_t now;
    koila__ledger_init(&l, NULL);
    CHECK(koila__ledger_reserve(&l, 1, &now));
    koila__ledger_fail_nth(&l, 3);
    CHECK(koila__ledger_reserve(&l, 1, &now));
    CHECK(koila__ledger_reserve(&l, 1, &now));
    CHECK(!koila__ledger_reserve(&l, 1, &now));
    CHECK(koila__ledger_reserve(&l, 1, &now));
    koila__ledger_fail_nth(&l, 1);
    koila__ledger_fail_nth(&l, 0);
    CHECK(koila__ledger_reserve(&l, 1, &now));
    koila__ledger_deinit(&l);
}

static koila__ledger shared;
static _Atomic uint64_t over_limit;
static void *work(void *arg)
{
    uintptr_t base = (uintptr_t)arg << 40;
    uint64_t now, n;
    bool held[64] = { false };
    for (uint64_t i = 0, r = (uintptr_t)arg; i < 100000; i++) {
        r = r * 6364136223846793005u + 1442695040888963407u;
        size_t k = (r >> 33) % 64;
        void *p = (void *)(base + (k + 1) * 64);
        if (held[k]) {
            held[k] = !koila__ledger_release(&shared, p, &n, &now);
        } else if (koila__ledger_reserve(&shared, 100 + k, &now)) {
            if (now > 3500)
                over_limit++;
            held[k] = koila__ledger_commit(&shared, p, 100 + k, 0, now);
        }
    }
    for (size_t k = 0; k < 64; k++)
        if (held[k])
            koila__ledger_release(&shared, (void *)(base + (k + 1) * 64), &n, &now);
    return NULL;
}

TEST(ledger__threads_never_exceed_the_limit_and_end_balanced)
{
    pthread_t t[6];
    koila__ledger_init(&shared, NULL);
    atomic_store(&shared.limit, 3500);
    for (uintptr_t i = 0; i < 6; i++)
        pthread_create(&t[i], NULL, work, (void *)(i + 1));
    for (int i = 0; i < 6; i++)
        pthread_join(t[i], NULL);
    CHECK_EQ(over_limit, 0);
    CHECK_EQ(shared.current, 0);
    CHECK(shared.peak <= 3500 && shared.peak > 3300);
    CHECK(shared.n_refused > 0);
    CHECK_EQ(koila__ptrtab_count(&shared.blocks), 0);
    CHECK(koila__ptrtab_check(&shared.blocks));
    koila__ledger_deinit(&shared);
}
