/* ptrmap.h — a map from addresses to numbers, on the core's hash set. All zero is the empty map. */
#ifndef KOILA_EXT_PTRMAP_H
#define KOILA_EXT_PTRMAP_H

#include "base/idset.h"
#include "base/vec.h"

typedef struct koila__ptrmap_entry {
    uint64_t key; /* first: the word that the set compares */
    uint64_t value;
} koila__ptrmap_entry;
typedef struct koila__ptrmap {
    koila__idset set;
    VEC(koila__ptrmap_entry) entries;
} koila__ptrmap;

/* A pointer to the number of p, which is 0 if p is new (*added). Valid until the next call. NULL:
 * no memory. */
static inline uint64_t *koila__ptrmap_put(koila__ptrmap *m, const void *p, bool *added)
{
    const uint64_t key = (uint64_t)(uintptr_t)p;
    const size_t stride = sizeof *m->entries.at;
    uint32_t id = koila__idset_find_word(&m->set, m->entries.at, stride, key);
    *added = id == KOILA__NO_ID;
    if (*added) {
        if (!koila__vec_reserve(&koila__libc, &m->entries, 1) ||
            !koila__idset_reserve_word(&koila__libc, &m->set, m->entries.at, stride))
            return NULL;
        id = m->entries.n++;
        m->entries.at[id] = (koila__ptrmap_entry){ key, 0 };
        koila__idset_insert_word(&m->set, key, id);
    }
    return &m->entries.at[id].value;
}
/* The same without adding p; NULL: it is not in the map. */
static inline const uint64_t *koila__ptrmap_get(const koila__ptrmap *m, const void *p)
{
    const uint32_t id = koila__idset_find_word(&m->set, m->entries.at, sizeof *m->entries.at,
                                               (uint64_t)(uintptr_t)p);
    return id == KOILA__NO_ID ? NULL : &m->entries.at[id].value;
}
static inline void koila__ptrmap_free(koila__ptrmap *m)
{
    koila__idset_free(&koila__libc, &m->set);
    koila__vec_free(&koila__libc, &m->entries);
}

#endif
