/* cache.h — functions of the cache for replay and the planner, beyond the public ones. */
#ifndef KOILA_SRC_CACHE_H
#define KOILA_SRC_CACHE_H

#include "base/base.h"
#include "koila/cache.h"

/* Size of a device when none is given. Only the length of reservations depends on it. */
#define ASSUMED_DEVICE ((uint64_t)24 << 30)

/* Replaces the CUDA driver: replay returns recorded addresses here, and fails where cudaMalloc must
 * have failed. These two may call koila_cache_complete and nothing else. */
typedef struct koila__cache_driver {
    void *user;
    /* A new segment (cudaMalloc), a new reservation (`size` is its address space) or pages at a
     * known address. false: no memory. `*addr` is proposed, and may be changed for the first two.
     */
    bool (*give)(void *user, koila_event_kind kind, uint64_t size, uint64_t stream, uint64_t *addr);
    /* All waiting blocks are about to be completed; the driver may complete some first, in another
     * order. */
    void (*before_sync)(void *user);
} koila__cache_driver;
enum { KOILA__RESERVATION = 100 }; /* a koila_event_kind of give() only */
/* NULL: back to limits and default addresses */
void koila__cache_set_driver(koila_cache *c, const koila__cache_driver *driver);

/* koila_cache_malloc, but KOILA_BAD_ARGUMENT unless a free block gives `expected` at once; the
 * state is then as it was. */
koila_status koila__cache_malloc_at(koila_cache *c, uint64_t bytes, uint64_t stream,
                                    koila_pool pool, uint64_t expected);
/* What a MemPool's death does: complete what waits in the pool, release its free memory. Expected:
 * KOILA_NO_MEMORY. */
koila_status koila__cache_free_pool(koila_cache *c, koila_pool id);
/* Garbage collection with an unknown cap: `n_rounds` rounds. Expected: KOILA_NO_MEMORY. */
koila_status koila__cache_collect(koila_cache *c, size_t n_rounds);
/* keeps the state; same large segment size */
void koila__cache_set_settings(koila_cache *c, const koila_cache_config *conf);

/* koila_cache_config.torch_version */
uint32_t koila__cache_torch_version(const koila_cache *c);

/* For a what-if, behind a mark: peaks start from here, and `margin` bytes of the device (if it has
 * a limit) are not there. */
void koila__cache_begin(koila_cache *c, uint64_t margin);
/* Bytes neither handed out nor waiting to be free: an upper bound for requests. UINT64_MAX: no
 * limit. */
uint64_t koila__cache_left(const koila_cache *c);
/* A fingerprint of the blocks' places and states: two moments of one cache with the same number
 * behave alike afterwards. 0: unknown. */
uint64_t koila__cache_layout(const koila_cache *c);

/* An empty reservation of expandable memory at `addr`, for requests like this one: torch leaves one
 * behind when it cannot map pages in it. Expected: KOILA_NO_MEMORY, KOILA_BAD_ARGUMENT (something
 * is there, or the pool is not expandable). */
koila_status koila__cache_add_reservation(koila_cache *c, uint64_t bytes, uint64_t stream,
                                          koila_pool pool, uint64_t addr);

/* The ages of segments, oldest first: each is named by an address in it. For a cache that was just
 * made by koila_cache_from_segments(); without effect where ties go by address alone. */
void koila__cache_set_ages(koila_cache *c, const uint64_t *list, size_t n);

/* handed out, or freed and waiting for another stream */
bool koila__cache_is_out(const koila_cache *c, uint64_t addr);
const koila_cache_stat *koila__cache_stats_ref(const koila_cache *c); /* borrowed, live */

/* Every invariant of cache_state.h's first screen. debug_level 3 runs it around each public call.
 */
bool koila__cache_check(const koila_cache *c);
/* A number that is equal for two caches iff their visible state is equal: blocks, segments,
 * counters. For tests of rewind. */
uint64_t koila__cache_fingerprint(const koila_cache *c);
/* Tests plant a fault here: shortens one block. */
void koila__cache_break(koila_cache *c);

#endif
