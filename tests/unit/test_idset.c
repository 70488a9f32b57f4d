/* The set of ids finds what was inserted and nothing else, and says when the host is out of
 * memory; arrays grow by two. */
#include "harness.h"
#include "base/idset.h"
#include "base/vec.h"

typedef struct pair {
    const char *name;
    uint64_t key;
} pair;

static uint64_t name_hash(const char *name) { return koila__mix(0, (uint64_t)name[0] & 3); }
static bool name_same(const void *owner, uint32_t id, const void *key)
{
    const pair *pairs = owner;
    return strcmp(pairs[id].name, key) == 0;
}
static uint64_t name_hash_of(const void *owner, uint32_t id)
{
    const pair *pairs = owner;
    return name_hash(pairs[id].name);
}

TEST(idset__finds_what_was_inserted_among_equal_hashes)
{
    const pair pairs[] = { { "alpha", 0 }, { "aleph", 0 }, { "alef", 0 }, { "beta", 0 } };
    koila__idset s = { 0 };
    CHECK_EQ(koila__idset_find(&s, 0, name_same, pairs, "alpha"), KOILA__NO_ID);
    for (uint32_t i = 0; i < KOILA_COUNT(pairs); i++) {
        CHECK(koila__idset_reserve(&koila__libc, &s, name_hash_of, pairs));
        koila__idset_insert(&s, name_hash(pairs[i].name), i);
    }
    CHECK_EQ(s.n, 4);
    for (uint32_t i = 0; i < KOILA_COUNT(pairs); i++) {
        const char *name = pairs[i].name;
        CHECK_EQ(koila__idset_find(&s, name_hash(name), name_same, pairs, name), i);
    }
    CHECK_EQ(koila__idset_find(&s, name_hash("a"), name_same, pairs, "a"), KOILA__NO_ID);
    koila__idset_free(&koila__libc, &s);
}

static uint64_t word(uint32_t i) { return (uint64_t)i << 9; }

TEST(idset__words_survive_growth_and_clearing)
{
    enum { N = 5000 };
    static pair pairs[N];
    koila__idset s = { 0 };
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < N; i++) {
            pairs[i].key = word(i);
            CHECK(koila__idset_reserve_word(&koila__libc, &s, &pairs[0].key, sizeof *pairs));
            koila__idset_insert_word(&s, word(i), i);
        }
        CHECK_EQ(s.n, N);
        CHECK((uint64_t)s.n * 2 <= s.n_slots && (s.n_slots & (s.n_slots - 1)) == 0);
        for (uint32_t i = 0; i < N; i++)
            CHECK_EQ(koila__idset_find_word(&s, &pairs[0].key, sizeof *pairs, word(i)), i);
        CHECK_EQ(koila__idset_find_word(&s, &pairs[0].key, sizeof *pairs, word(N)), KOILA__NO_ID);
        koila__idset_clear(&s);
        CHECK_EQ(koila__idset_find_word(&s, &pairs[0].key, sizeof *pairs, word(0)), KOILA__NO_ID);
    }
    koila__idset_free(&koila__libc, &s);
    CHECK(!s.slot && !s.n && !s.n_slots);
}

TEST(idset__is_as_before_when_the_host_is_out_of_memory)
{
    failing_allocator fail = { .at = 2 };
    const koila_allocator mem = { failing_realloc, &fail };
    uint64_t keys[100];
    koila__idset s = { 0 };
    uint32_t n = 0;
    for (; n < KOILA_COUNT(keys); n++) {
        keys[n] = word(n);
        if (!koila__idset_reserve_word(&mem, &s, keys, sizeof *keys))
            break;
        koila__idset_insert_word(&s, word(n), n);
    }
    CHECK(n > 0 && n < KOILA_COUNT(keys));
    for (uint32_t i = 0; i < n; i++)
        CHECK_EQ(koila__idset_find_word(&s, keys, sizeof *keys, word(i)), i);
    koila__idset_free(&mem, &s);
    CHECK_EQ(fail.n_live_bytes, 0);
}

TEST(idset__what_is_removed_hides_nothing)
{
    enum { N = 700 };
    static uint64_t keys[N];
    static bool is_in[N];
    koila__idset s;
    uint64_t random = 1;
    CHECK(koila__idset_init(&koila__libc, &s, N));
    const uint32_t n_slots = s.n_slots;
    for (uint32_t i = 0; i < N; i++)
        keys[i] = word(i);
    for (int k = 0; k < 20 * N; k++) {
        random = koila__mix(random, (uint64_t)k);
        const uint32_t i = (uint32_t)(random % N);
        if (is_in[i])
            koila__idset_remove_word(&s, keys, sizeof *keys, i);
        else
            koila__idset_insert_word(&s, keys[i], i);
        is_in[i] = !is_in[i];
        if (k % N)
            continue;
        for (uint32_t j = 0; j < N; j++)
            CHECK_EQ(koila__idset_find_word(&s, keys, sizeof *keys, keys[j]),
                     is_in[j] ? j : KOILA__NO_ID);
    }
    CHECK_EQ(s.n_slots, n_slots);
    CHECK(!koila__idset_init(&koila__libc, &s, (uint64_t)1 << 40));
    koila__idset_free(&koila__libc, &s);
}

TEST(vec__grows_by_two_and_is_as_before_when_the_host_is_out_of_memory)
{
    failing_allocator fail = { .at = 3 };
    const koila_allocator mem = { failing_realloc, &fail };
    VEC(uint32_t) v = { 0 };
    for (uint32_t i = 0; koila__vec_push(&mem, &v, i); i++)
        CHECK(v.n <= v.cap);
    CHECK(v.n == v.cap && v.n > 1);
    for (uint32_t i = 0; i < v.n; i++)
        CHECK_EQ(v.at[i], i);
    CHECK(!koila__vec_reserve(&mem, &v, UINT32_MAX));
    koila__vec_free(&mem, &v);
    CHECK_EQ(fail.n_live_bytes, 0);
}

TEST(vec__pointer_and_capacity_may_be_kept_apart)
{
    double *at = NULL;
    size_t cap = 0;
    CHECK(koila__grow(&koila__libc, &at, &cap, 1, sizeof *at) && at && cap >= 1);
    const size_t first = cap;
    CHECK(koila__grow(&koila__libc, &at, &cap, first, sizeof *at) && cap == first);
    CHECK(koila__grow(&koila__libc, &at, &cap, first + 1, sizeof *at) && cap == 2 * first);
    CHECK(koila__grow(&koila__libc, &at, &cap, 9 * first, sizeof *at) && cap == 9 * first);
    CHECK(!koila__grow(&koila__libc, &at, &cap, SIZE_MAX, sizeof *at) && cap == 9 * first);
    koila__release(&koila__libc, at, cap * sizeof *at);
}
