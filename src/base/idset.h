/* idset.h — the one hash set of the core: a set of 32-bit ids, open addressing, linear probing.
 *
 * The set keeps ids only. What an id stands for is kept by its owner, usually as element `id` of an
 * array: the owner hashes it and compares it. Finding is inline, so that the owner's comparison is
 * inlined into the loop.
 *
 *   koila__idset set = { 0 };
 *   id = koila__idset_find(&set, hash, same, owner, key);
 *   if (id == KOILA__NO_ID && koila__idset_reserve(mem, &set, hash_of, owner))
 *       koila__idset_insert(&set, hash, id = where the owner has put the key);
 *
 * Where the key is one 64-bit word (an address, a pair of ids), the *_word functions need neither
 * callback: they read the word of id i at `words` + i * `stride` bytes.
 *
 *   n * 2 <= n_slots; n_slots is 0 or a power of two; an empty slot holds KOILA__NO_ID
 */
#ifndef KOILA_SRC_IDSET_H
#define KOILA_SRC_IDSET_H

#include "base/alloc.h"

#define KOILA__NO_ID UINT32_MAX

typedef struct koila__idset {
    uint32_t *slot; /* owned: koila__idset_free */
    uint32_t n, n_slots;
} koila__idset;

/* Does `id` stand for `key`? */
typedef bool (*koila__same_fn)(const void *owner, uint32_t id, const void *key);
/* The hash of what `id` stands for. */
typedef uint64_t (*koila__hash_fn)(const void *owner, uint32_t id);

/* splitmix64's finaliser over a running sum: good enough for tables and plan keys, not against an
 * adversary. */
static inline uint64_t koila__mix(uint64_t h, uint64_t x)
{
    h += x * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    return h ^ (h >> 31);
}

/* The id that stands for `key`, whose hash is `hash`; KOILA__NO_ID when there is none. */
static inline uint32_t koila__idset_find(const koila__idset *s, uint64_t hash, koila__same_fn same,
                                         const void *owner, const void *key)
{
    if (!s->n_slots)
        return KOILA__NO_ID;
    const uint32_t mask = s->n_slots - 1;
    for (uint32_t i = (uint32_t)hash & mask;; i = (i + 1) & mask) {
        const uint32_t id = s->slot[i];
        if (id == KOILA__NO_ID || same(owner, id, key))
            return id;
    }
}

/* Room for one more id; rehashes when needed. False when the host is out of memory or the set holds
 * 2^30 ids; the set is then as before. */
bool koila__idset_reserve(const koila_allocator *mem, koila__idset *s, koila__hash_fn hash_of,
                          const void *owner);
/* Adds an id that is not in the set. After reserve; cannot fail. */
void koila__idset_insert(koila__idset *s, uint64_t hash, uint32_t id);
/* An empty set with room for `n` ids, so that adding them cannot fail. False when the host is out
 * of memory or n > 2^30. */
bool koila__idset_init(const koila_allocator *mem, koila__idset *s, uint64_t n);
/* Removes `id`, which is in the set and still stands for what it stood for when it was inserted. No
 * tombstone is left: the ids behind it move back. */
void koila__idset_remove(koila__idset *s, uint32_t id, koila__hash_fn hash_of, const void *owner);
/* Forgets all ids; the slots are kept. */
void koila__idset_clear(koila__idset *s);
/* Gives the slots back; the set is then empty and can be used again. */
void koila__idset_free(const koila_allocator *mem, koila__idset *s);

/* ---- keys of one word */

static inline uint64_t koila__idset_word(const void *words, size_t stride, uint32_t id)
{
    uint64_t word;
    memcpy(&word, (const char *)words + id * stride, sizeof word);
    return word;
}
static inline uint32_t koila__idset_find_word(const koila__idset *s, const void *words,
                                              size_t stride, uint64_t word)
{
    if (!s->n_slots)
        return KOILA__NO_ID;
    const uint32_t mask = s->n_slots - 1;
    for (uint32_t i = (uint32_t)koila__mix(0, word) & mask;; i = (i + 1) & mask) {
        const uint32_t id = s->slot[i];
        if (id == KOILA__NO_ID || koila__idset_word(words, stride, id) == word)
            return id;
    }
}
bool koila__idset_reserve_word(const koila_allocator *mem, koila__idset *s, const void *words,
                               size_t stride);
void koila__idset_remove_word(koila__idset *s, const void *words, size_t stride, uint32_t id);
static inline void koila__idset_insert_word(koila__idset *s, uint64_t word, uint32_t id)
{
    koila__idset_insert(s, koila__mix(0, word), id);
}

#endif
