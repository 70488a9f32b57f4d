/* idset.c — see idset.h. */
#include "base/idset.h"

#define FIRST_SLOTS 64
#define MAX_SLOTS ((uint32_t)1 << 31)

void koila__idset_insert(koila__idset *s, uint64_t hash, uint32_t id)
{
    koila_assert(id != KOILA__NO_ID);
    koila_assert(((uint64_t)s->n + 1) * 2 <= s->n_slots);
    const uint32_t mask = s->n_slots - 1;
    uint32_t i = (uint32_t)hash & mask;
    while (s->slot[i] != KOILA__NO_ID)
        i = (i + 1) & mask;
    s->slot[i] = id;
    s->n++;
}

static bool set_of_slots(const koila_allocator *mem, koila__idset *s, uint32_t n_slots)
{
    uint32_t *slot = koila__realloc(mem, NULL, 0, n_slots * sizeof *slot);
    if (!slot)
        return false;
    *s = (koila__idset){ slot, 0, n_slots };
    koila__idset_clear(s);
    return true;
}

bool koila__idset_init(const koila_allocator *mem, koila__idset *s, uint64_t n)
{
    if (n > MAX_SLOTS / 2)
        return false;
    uint32_t n_slots = FIRST_SLOTS;
    while (n_slots < n * 2)
        n_slots *= 2;
    return set_of_slots(mem, s, n_slots);
}

bool koila__idset_reserve(const koila_allocator *mem, koila__idset *s, koila__hash_fn hash_of,
                          const void *owner)
{
    if (((uint64_t)s->n + 1) * 2 <= s->n_slots)
        return true;
    if (s->n_slots >= MAX_SLOTS)
        return false;
    koila__idset grown;
    if (!set_of_slots(mem, &grown, s->n_slots ? s->n_slots * 2 : FIRST_SLOTS))
        return false;
    for (uint32_t i = 0; i < s->n_slots; i++)
        if (s->slot[i] != KOILA__NO_ID)
            koila__idset_insert(&grown, hash_of(owner, s->slot[i]), s->slot[i]);
    koila_assert(grown.n == s->n);
    koila__idset_free(mem, s);
    *s = grown;
    return true;
}

void koila__idset_remove(koila__idset *s, uint32_t id, koila__hash_fn hash_of, const void *owner)
{
    const uint32_t mask = s->n_slots - 1;
    uint32_t hole = (uint32_t)hash_of(owner, id) & mask;
    while (s->slot[hole] != id) {
        koila_assert(s->slot[hole] != KOILA__NO_ID);
        hole = (hole + 1) & mask;
    }
    for (uint32_t i = (hole + 1) & mask; s->slot[i] != KOILA__NO_ID; i = (i + 1) & mask) {
        const uint32_t home = (uint32_t)hash_of(owner, s->slot[i]) & mask;
        /* an id whose home is behind the hole is found without it */
        if (((i - home) & mask) < ((i - hole) & mask))
            continue;
        s->slot[hole] = s->slot[i];
        hole = i;
    }
    s->slot[hole] = KOILA__NO_ID;
    s->n--;
}

void koila__idset_clear(koila__idset *s)
{
    _Static_assert(KOILA__NO_ID == UINT32_MAX, "an empty slot is all ones");
    if (s->n_slots)
        memset(s->slot, 0xff, s->n_slots * sizeof *s->slot);
    s->n = 0;
}

void koila__idset_free(const koila_allocator *mem, koila__idset *s)
{
    koila__release(mem, s->slot, s->n_slots * sizeof *s->slot);
    *s = (koila__idset){ 0 };
}

typedef struct word_array {
    const void *words;
    size_t stride;
} word_array;

static uint64_t word_hash_of(const void *owner, uint32_t id)
{
    const word_array *a = owner;
    return koila__mix(0, koila__idset_word(a->words, a->stride, id));
}

bool koila__idset_reserve_word(const koila_allocator *mem, koila__idset *s, const void *words,
                               size_t stride)
{
    return koila__idset_reserve(mem, s, word_hash_of, &(word_array){ words, stride });
}

void koila__idset_remove_word(koila__idset *s, const void *words, size_t stride, uint32_t id)
{
    koila__idset_remove(s, id, word_hash_of, &(word_array){ words, stride });
}
