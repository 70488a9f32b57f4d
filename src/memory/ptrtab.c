/* ptrtab.c — see ptrtab.h.
 *
 * A spinlock and not a mutex: the critical section is a probe of one or two cache lines, it is
 * entered for every allocation of a training step, and a mutex measured 30-40 ns more. While a
 * shard grows it is held for the copy; others go on. After some failed tries the waiter yields its
 * core, because on a small machine the owner may be waiting for it.
 */
#include "memory/ptrtab.h"

#include <sched.h>

/* At level 3 every growth happens in tests. */
#define FIRST_CAPACITY (KOILA_DEBUG_LEVEL >= 3 ? 2 : 32)

static uint64_t hash(const void *p)
{
    uint64_t h = (uint64_t)(uintptr_t)p >> 4;
    h *= 0x9E3779B97F4A7C15u;
    return h ^ (h >> 29);
}

static koila__ptrtab_shard *shard_of(koila__ptrtab *t, uint64_t h)
{
    return &t->shards[h >> (64 - KOILA__PTRTAB_SHARD_BITS)];
}

static void lock(koila__ptrtab_shard *s)
{
    for (int n_tries = 0; atomic_flag_test_and_set_explicit(&s->busy, memory_order_acquire);)
        if (++n_tries % 64 == 0)
            sched_yield();
}
static void unlock(koila__ptrtab_shard *s)
{
    atomic_flag_clear_explicit(&s->busy, memory_order_release);
}

void koila__ptrtab_init(koila__ptrtab *t, const koila_allocator *mem)
{
    memset(t, 0, sizeof *t);
    t->mem = koila__allocator(mem);
    for (size_t i = 0; i < KOILA__PTRTAB_SHARDS; i++)
        atomic_flag_clear(&t->shards[i].busy);
}

void koila__ptrtab_deinit(koila__ptrtab *t)
{
    for (size_t i = 0; i < KOILA__PTRTAB_SHARDS; i++) {
        koila__ptrtab_shard *s = &t->shards[i];
        koila__release(&t->mem, s->entries, s->capacity * sizeof *s->entries);
        s->entries = NULL;
        s->capacity = s->n_used = 0;
    }
}

/* Slot of p, or the empty slot where it would go. pre: capacity > n_used */
KOILA__HOT static size_t find(const koila__ptrtab_shard *s, const void *p, uint64_t h)
{
    size_t i = h & (s->capacity - 1);
    while (s->entries[i].p && s->entries[i].p != (uintptr_t)p)
        i = (i + 1) & (s->capacity - 1);
    return i;
}

static bool grow(koila__ptrtab *t, koila__ptrtab_shard *s)
{
    koila__ptrtab_shard wider = { .capacity = s->capacity ? s->capacity * 2 : FIRST_CAPACITY };
    wider.entries = koila__realloc(&t->mem, NULL, 0, wider.capacity * sizeof *wider.entries);
    if (!wider.entries)
        return false;
    memset(wider.entries, 0, wider.capacity * sizeof *wider.entries);
    for (size_t i = 0; i < s->capacity; i++) {
        const void *p = (const void *)s->entries[i].p;
        if (p)
            wider.entries[find(&wider, p, hash(p))] = s->entries[i];
    }
    koila__release(&t->mem, s->entries, s->capacity * sizeof *s->entries);
    s->entries = wider.entries;
    s->capacity = wider.capacity;
    return true;
}

KOILA__HOT bool koila__ptrtab_put(koila__ptrtab *t, const void *p, uint64_t n_bytes, uint32_t tag,
                                  uint64_t *replaced_bytes)
{
    koila_assert(p);
    if (n_bytes > KOILA__PTRTAB_MAX_BYTES)
        return false;
    uint64_t h = hash(p);
    koila__ptrtab_shard *s = shard_of(t, h);
    lock(s);
    bool fits = (s->n_used + 1) * 4 <= s->capacity * 3 || grow(t, s);
    if (fits) {
        koila__ptrtab_entry *e = &s->entries[find(s, p, h)];
        *replaced_bytes = e->p ? e->n_bytes : UINT64_MAX;
        if (!e->p)
            s->n_used++;
        s->n_put++;
        *e = (koila__ptrtab_entry){ (uintptr_t)p, n_bytes, tag & KOILA__PTRTAB_MAX_TAG };
    }
    unlock(s);
    return fits;
}

/* Empty slot i and move back every follower that would no longer be reachable from its home. */
KOILA__HOT static void erase(koila__ptrtab_shard *s, size_t i)
{
    size_t mask = s->capacity - 1;
    for (size_t j = (i + 1) & mask; s->entries[j].p; j = (j + 1) & mask) {
        size_t home = hash((const void *)s->entries[j].p) & mask;
        if (((j - home) & mask) >= ((j - i) & mask)) {
            s->entries[i] = s->entries[j];
            i = j;
        }
    }
    s->entries[i].p = 0;
    koila_assert(s->n_used > 0);
    s->n_used--;
    s->n_gone++;
}

KOILA__HOT static bool lookup(koila__ptrtab *t, const void *p, uint64_t *n_bytes, uint32_t *tag,
                              bool forget)
{
    uint64_t h = hash(p);
    koila__ptrtab_shard *s = shard_of(t, h);
    bool found = false;
    lock(s);
    if (s->n_used) {
        size_t i = find(s, p, h);
        if (s->entries[i].p) {
            found = true;
            *n_bytes = s->entries[i].n_bytes;
            if (tag)
                *tag = (uint32_t)s->entries[i].tag;
            if (forget)
                erase(s, i);
        }
    }
    unlock(s);
    return found;
}

KOILA__HOT bool koila__ptrtab_del(koila__ptrtab *t, const void *p, uint64_t *n_bytes, uint32_t *tag)
{
    return lookup(t, p, n_bytes, tag, true);
}
bool koila__ptrtab_get(koila__ptrtab *t, const void *p, uint64_t *n_bytes, uint32_t *tag)
{
    return lookup(t, p, n_bytes, tag, false);
}

void koila__ptrtab_each(koila__ptrtab *t, bool (*fn)(void *user, const koila__ptrtab_entry *e),
                        void *user)
{
    bool more = true;
    for (size_t k = 0; more && k < KOILA__PTRTAB_SHARDS; k++) {
        koila__ptrtab_shard *s = &t->shards[k];
        lock(s);
        for (size_t i = 0; more && i < s->capacity; i++)
            if (s->entries[i].p)
                more = fn(user, &s->entries[i]);
        unlock(s);
    }
}

#define SUM(t, field)                                                                              \
    uint64_t n = 0;                                                                                \
    for (size_t k = 0; k < KOILA__PTRTAB_SHARDS; k++) {                                            \
        lock(&(t)->shards[k]);                                                                     \
        n += (t)->shards[k].field;                                                                 \
        unlock(&(t)->shards[k]);                                                                   \
    }                                                                                              \
    return n
size_t koila__ptrtab_count(koila__ptrtab *t) { SUM(t, n_used); }
uint64_t koila__ptrtab_n_put(koila__ptrtab *t) { SUM(t, n_put); }
uint64_t koila__ptrtab_n_gone(koila__ptrtab *t) { SUM(t, n_gone); }

void koila__ptrtab_fork_prepare(koila__ptrtab *t)
{
    for (size_t k = 0; k < KOILA__PTRTAB_SHARDS; k++)
        lock(&t->shards[k]);
}
void koila__ptrtab_fork_parent(koila__ptrtab *t)
{
    for (size_t k = 0; k < KOILA__PTRTAB_SHARDS; k++)
        unlock(&t->shards[k]);
}
static void empty(koila__ptrtab_shard *s)
{
    if (s->n_used)
        memset(s->entries, 0, s->capacity * sizeof *s->entries);
    s->n_used = s->n_put = s->n_gone = 0;
}
void koila__ptrtab_fork_child(koila__ptrtab *t)
{
    for (size_t k = 0; k < KOILA__PTRTAB_SHARDS; k++) {
        empty(&t->shards[k]);
        unlock(&t->shards[k]);
    }
}
void koila__ptrtab_clear(koila__ptrtab *t)
{
    for (size_t k = 0; k < KOILA__PTRTAB_SHARDS; k++) {
        lock(&t->shards[k]);
        empty(&t->shards[k]);
        unlock(&t->shards[k]);
    }
}

bool koila__ptrtab_check(koila__ptrtab *t)
{
    bool ok = true;
    for (size_t k = 0; k < KOILA__PTRTAB_SHARDS; k++) {
        koila__ptrtab_shard *s = &t->shards[k];
        lock(s);
        size_t n = 0;
        ok = ok && s->n_used * 4 <= s->capacity * 3;
        for (size_t i = 0; i < s->capacity; i++) {
            const void *p = (const void *)s->entries[i].p;
            if (!p)
                continue;
            n++;
            ok = ok && shard_of(t, hash(p)) == s && find(s, p, hash(p)) == i;
        }
        ok = ok && n == s->n_used;
        unlock(s);
    }
    return ok;
}
