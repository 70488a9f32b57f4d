/* ptrtab.h — which block has which size: address -> (bytes, tag), for threads that allocate and
 * free at the same time.
 *
 * 16 shards, each an open-addressing table under its own spinlock; the high bits of the hash choose
 * the shard, the low bits the slot. A deletion shifts the followers back, so there are no
 * tombstones and a table that has been full stays as fast as a new one. It is no koila__idset: size
 * and tag lie in the slot itself, so that an allocation touches one cache line of the table.
 *   for every shard: n_used <= capacity * 3/4, and every entry can be reached from its home
 *       slot without crossing an empty one
 * The tag (20 bits) is the caller's: memlab keeps there which source line asked for the block; 0
 * means nobody knows.
 */
#ifndef KOILA_SRC_PTRTAB_H
#define KOILA_SRC_PTRTAB_H

#include <stdatomic.h>

#include "base/alloc.h"

/* few, so that the shards themselves stay in the nearest cache */
#define KOILA__PTRTAB_SHARD_BITS 4
#define KOILA__PTRTAB_SHARDS (1 << KOILA__PTRTAB_SHARD_BITS)
#define KOILA__PTRTAB_MAX_BYTES (((uint64_t)1 << 44) - 1)
#define KOILA__PTRTAB_MAX_TAG (((uint32_t)1 << 20) - 1)

typedef struct koila__ptrtab_entry {
    uintptr_t p; /* 0: empty */
    uint64_t n_bytes : 44;
    uint64_t tag : 20;
} koila__ptrtab_entry;

typedef struct koila__ptrtab_shard {
    _Alignas(64) atomic_flag busy;
    koila__ptrtab_entry *entries; /* NULL until the first put */
    size_t capacity, n_used;      /* capacity is 0 or a power of two */
    /* ever, since the last clear: counted here, where the lock is held anyway */
    uint64_t n_put, n_gone;
} koila__ptrtab_shard;

typedef struct koila__ptrtab {
    koila_allocator mem;
    koila__ptrtab_shard shards[KOILA__PTRTAB_SHARDS];
} koila__ptrtab;

void koila__ptrtab_init(koila__ptrtab *t, const koila_allocator *mem);
void koila__ptrtab_deinit(koila__ptrtab *t);

/* Remember p. false, and nothing changed, when the host is out of memory or n_bytes exceeds
 * KOILA__PTRTAB_MAX_BYTES. If p was there already its entry is replaced and *replaced_bytes is set
 * to what stood there, else to UINT64_MAX. pre: p != NULL */
bool koila__ptrtab_put(koila__ptrtab *t, const void *p, uint64_t n_bytes, uint32_t tag,
                       uint64_t *replaced_bytes);
/* Forget p: true and *n_bytes if it was known. */
bool koila__ptrtab_del(koila__ptrtab *t, const void *p, uint64_t *n_bytes, uint32_t *tag);
bool koila__ptrtab_get(koila__ptrtab *t, const void *p, uint64_t *n_bytes, uint32_t *tag);

/* Call fn for every entry, one shard locked at a time: fn must not touch the table. Stops when fn
 * returns false. */
void koila__ptrtab_each(koila__ptrtab *t, bool (*fn)(void *user, const koila__ptrtab_entry *e),
                        void *user);
size_t koila__ptrtab_count(koila__ptrtab *t);
uint64_t koila__ptrtab_n_put(koila__ptrtab *t), koila__ptrtab_n_gone(koila__ptrtab *t);

/* Around fork: hold all shards, so that the child never inherits one half changed. `_fork_child`
 * also forgets every entry. */
void koila__ptrtab_fork_prepare(koila__ptrtab *t);
void koila__ptrtab_fork_parent(koila__ptrtab *t);
void koila__ptrtab_fork_child(koila__ptrtab *t);
void koila__ptrtab_clear(koila__ptrtab *t);

/* The equation above, for tests and debug builds. */
bool koila__ptrtab_check(koila__ptrtab *t);

#endif
