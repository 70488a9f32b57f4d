/* koila/cache.h — PyTorch's CUDA caching allocator, simulated byte for byte, without a GPU.
 *
 * A koila_cache is one device. It receives a program's requests (malloc, release, record_stream,
 * ...) and answers with the addresses, segments, events and statistics of torch.cuda's own
 * allocator. One thread at a time; no global state.
 *
 *   koila_cache_config conf;
 *   koila_cache_config_init(&conf, "2.13");
 *   conf.total_bytes = 24ull << 30;
 *   koila_cache_new(&conf, NULL, &cache, NULL);
 *   if (koila_cache_malloc(cache, 1000, 0, KOILA_POOL_DEFAULT, &addr) == KOILA_OOM) ...
 */
#ifndef KOILA_CACHE_H
#define KOILA_CACHE_H

#include "koila/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct koila_cache koila_cache;

/* Growing. Structs the caller fills or owns begin with `struct_size`, set to their sizeof, so that
 * an older caller and a newer library (or the reverse) agree on their length; new fields are only
 * added at the end. A struct that a function returns by value states its length in struct_size, and
 * grows with a new soname only. The exceptions, and why they are safe:
 *   koila_pool     two words, passed by value like a number: it never grows
 *   koila_block    one per live tensor, so the owner of an array states its stride once
 *                  (koila_segment.block_size); a block passed to a callback belongs to the library
 *                  and may be longer than the caller knows
 *   koila_counter  part of koila_cache_stat, whose struct_size counts it */

/** A memory pool as torch names it: {0, 0} is the default, {0, n} a torch.cuda.MemPool or what
 * torch.cuda.graph_pool_handle() gives, {n, 0} that of a graph capture that was given none. */
typedef struct koila_pool {
    uint64_t owner, id;
} koila_pool;
#ifdef __cplusplus
#define KOILA_POOL_DEFAULT (koila_pool{ 0, 0 })
#else
#define KOILA_POOL_DEFAULT ((koila_pool){ 0, 0 })
#endif

#define KOILA_NO_LIMIT UINT64_MAX

/* Differences between torch versions: name, bit, meaning. The table of versions is in
 * src/allocator/cache_config.c. */
#define KOILA_CACHE_RULE_MAP(X)                                                                    \
    X(ROUNDING_SETTABLE, 0, "max_non_split_rounding_mb is a setting, not 20 MiB")                  \
    X(NEW_CAP, 1, "a fraction of 1.0 sets no cap; otherwise trunc(fraction * totalGlobalMem)")     \
    X(SKIP_EXPANDABLE, 2, "release-available and garbage collection skip expandable blocks")       \
    X(OOM_POOLS_LAST, 3, "use_on_oom pools are searched after everything was released")            \
    X(OOM_POOLS_FIRST, 4, "use_on_oom pools are searched before anything is released")             \
    X(NO_SPLIT_POOLS, 5, "a MemPool can forbid splitting")                                         \
    X(LARGE_SEGMENT, 6, "large_segment_size_mb is a setting, not 20 MiB")                          \
    X(ROUTING_KEEPS_RETRY, 7,                                                                      \
      "only a real graph capture, not a MemPool in use, stops release-all")                        \
    X(OOM_REJECT, 8, "throw_on_cudamalloc_oom")                                                    \
    X(POOL_ID_IN_TRACE, 9, "trace entries name their pool")                                        \
    X(SEARCH_AFTER_RELEASE, 10,                                                                    \
      "free blocks are searched again after release-all (no torch does this yet)")                 \
    X(OLDEST_SEGMENT, 11, "of equal free blocks the oldest segment's goes first, then by address") \
    X(POOL_DEATH_FREES, 12, "a MemPool's memory goes back when its last holder is gone")           \
    X(OLDEST_BLOCK, 13, "of equal free blocks the one that was split off first goes first")
typedef enum koila_cache_rule {
#define KOILA_CACHE_RULE_ENUM(name, bit, text) KOILA_RULE_##name = 1 << (bit),
    KOILA_CACHE_RULE_MAP(KOILA_CACHE_RULE_ENUM)
#undef KOILA_CACHE_RULE_ENUM
} koila_cache_rule;

typedef enum koila_completion {
    /** frees that wait for another stream complete at the next sync, retry or empty_cache, in the
     * order of freeing */
    KOILA_COMPLETE_WORST,
    KOILA_COMPLETE_BEST /**< they complete before the next malloc */
} koila_completion;

typedef struct koila_cache_config {
    uint32_t struct_size;
    uint32_t torch_version; /**< 100 * major + minor of the row of rules in use, for example 210 */
    uint32_t rules;         /**< koila_cache_rule bits */
    /** how that row is known; static storage. "simulated": recordings of that version's own
     * allocator on a simulated device are replayed without a difference. "read" in its source,
     * "told" by a change's description. "later": the newest row, for a version after it */
    const char *verified;
    /** device memory cudaMalloc can hand out, 0 = no limit; `outside_bytes` is part of it */
    uint64_t total_bytes;
    uint64_t outside_bytes; /**< context, other processes, libraries' own memory */
    uint64_t cap_bytes;     /**< set_per_process_memory_fraction, in bytes; 0 = none */
    /** totalGlobalMem: gives the size of expandable reservations; 0 = total_bytes, or 24 GiB */
    uint64_t device_bytes;
    uint64_t first_address;                /**< of the first segment; default 0x700000000000 */
    uint64_t max_split_bytes;              /**< KOILA_NO_LIMIT = not set */
    uint64_t max_non_split_rounding_bytes; /**< default = large_segment_bytes */
    uint64_t large_segment_bytes;          /**< default 20 MiB */
    double gc_threshold;                   /**< 0 = off */
    /** from the configuration string, 0 = not set; see koila_cache_config_fraction */
    double memory_fraction;
    uint32_t divisions[16]; /**< roundup_power2_divisions; 0 and 1 are off */
    /** max_non_split_rounding_bytes was given; otherwise it follows large_segment_bytes */
    uint8_t rounding_set;
    uint8_t expandable;
    uint8_t oom_reject; /**< throw_on_cudamalloc_oom */
    /** release_lock_on_cudamalloc: no effect here, but a recording with threads may not be
     * checkable */
    uint8_t release_lock;
    uint8_t completion; /**< koila_completion */
} koila_cache_config;

/** Defaults of one torch version: "2.4" ... "2.13", also "2.13.0+cu130"; NULL is the newest known.
 * A later version gets the newest row.
 * Expected: KOILA_BAD_ARGUMENT (no version in the string), KOILA_UNSUPPORTED (before 2.0); `c` is
 * then untouched. */
KOILA_API koila_status koila_cache_config_init(koila_cache_config *c, const char *torch_version);
/** Apply a PYTORCH_CUDA_ALLOC_CONF string. `strict` != 0 is for a string typed by a user: unknown
 * keys, trailing text and numbers out of range are refused, and '=' may stand for ':'. `strict` ==
 * 0 is for a string from a snapshot: it is read as torch reads it. NULL and "" change nothing.
 * Expected: KOILA_BAD_INPUT (`e` names key and range), KOILA_UNSUPPORTED (backends that are not
 * this allocator). */
KOILA_API koila_status koila_cache_config_parse(koila_cache_config *c, const char *conf, int strict,
                                                koila_error *e);
/** Set cap_bytes from a fraction in (0, 1], by the version's rule. `total_global` is
 * totalGlobalMem, `info_total` cudaMemGetInfo's. */
KOILA_API koila_status koila_cache_config_fraction(koila_cache_config *c, double fraction,
                                                   uint64_t total_global, uint64_t info_total);
/** What such a word says, as the end of "the rules of torch 2.13 are ...". */
KOILA_API const char *koila_cache_verified_words(const char *verified);
/** Row i of the version table, newest last. Returns what is new in words; `verified` says how that
 * is known. NULL past the end. */
KOILA_API const char *koila_cache_profile(size_t i, uint32_t *version, const char **verified);

/** An empty cache. `c` and `mem` are copied (`mem` NULL: the C library). On success `*out` is
 * yours: koila_cache_free().
 * Expected: KOILA_BAD_ARGUMENT, KOILA_UNSUPPORTED (settings under which that torch version
 * crashes), KOILA_NO_MEMORY. */
KOILA_API koila_status koila_cache_new(const koila_cache_config *c, const koila_allocator *mem,
                                       koila_cache **out, koila_error *e);

typedef enum koila_block_state {
    KOILA_BLOCK_FREE,
    KOILA_BLOCK_USED,
    KOILA_BLOCK_PENDING,
    KOILA_BLOCK_UNMAPPED
} koila_block_state;

typedef struct koila_block {
    /** requested: 0 unless used or pending; 0 also where a snapshot does not say */
    uint64_t addr, size, requested;
    koila_block_state state;
    uint32_t segment; /**< in koila_cache_walk: 0, 1, 2, ... in address order */
    uint64_t stream;
    koila_pool pool;
    bool is_small, is_expandable;
} koila_block;

/** A segment as torch.cuda.memory_snapshot() lists it (expandable memory: one entry per mapped
 * range). */
typedef struct koila_segment {
    /** sizeof(koila_segment): also the stride of an array of them, all alike */
    uint32_t struct_size;
    uint32_t block_size; /**< sizeof(koila_block): the stride of `blocks` */
    uint64_t addr, size, stream;
    koila_pool pool;
    bool is_small, is_expandable;
    /** addr, size, requested, state are read; ascending, tiling the segment */
    const koila_block *blocks;
    size_t n_blocks;
} koila_segment;
/* its first two fields */
#define KOILA_SEGMENT_SIZES (uint32_t)sizeof(koila_segment), (uint32_t)sizeof(koila_block)

/** A cache in a given state. Segments may come in any order; everything is copied. Statistics start
 * from this state, which is also their peak. The bounds of expandable reservations are inferred:
 * one per pool and stream, as far as its address space reaches.
 * Expected: KOILA_BAD_INPUT (`e->offset` = index of the segment: blocks that do not tile, overlap,
 * a size of 2^60 or more); KOILA_BAD_ARGUMENT (struct_size, block_size not set). */
KOILA_API koila_status koila_cache_from_segments(const koila_cache_config *c,
                                                 const koila_allocator *mem, const koila_segment *s,
                                                 size_t n, koila_cache **out, koila_error *e);
/** NULL is fine. */
KOILA_API void koila_cache_free(koila_cache *c);

/** `bytes` == 0 gives address 0 and is no event.
 * Expected: KOILA_OOM; the state is then the one torch leaves. KOILA_NO_MEMORY. */
KOILA_API koila_status koila_cache_malloc(koila_cache *c, uint64_t bytes, uint64_t stream,
                                          koila_pool pool, uint64_t *addr);
/** Address 0 is fine. Expected: KOILA_BAD_ARGUMENT (not handed out); behind a mark
 * KOILA_NO_MEMORY. */
KOILA_API koila_status koila_cache_release(koila_cache *c, uint64_t addr);
/** Tensor.record_stream: the block's next release waits for `stream`.
 * Expected: KOILA_BAD_ARGUMENT, KOILA_NO_MEMORY. */
KOILA_API koila_status koila_cache_record_stream(koila_cache *c, uint64_t addr, uint64_t stream);
/** Completes the free of one released block that waits for another stream.
 * Expected: KOILA_BAD_ARGUMENT (not waiting); behind a mark KOILA_NO_MEMORY. */
KOILA_API koila_status koila_cache_complete(koila_cache *c, uint64_t addr);
/** Completes the free of every waiting block. Expected: behind a mark KOILA_NO_MEMORY. */
KOILA_API koila_status koila_cache_sync(koila_cache *c);
/** torch.cuda.empty_cache(). Expected: KOILA_NO_MEMORY. */
KOILA_API koila_status koila_cache_empty(koila_cache *c);
/** In bytes, 0 = none; as in koila_cache_config. Holds for later calls. */
KOILA_API koila_status koila_cache_set_limit(koila_cache *c, uint64_t total, uint64_t outside,
                                             uint64_t cap);
/** Switch expandable segments for later calls, as torch can at run time. */
KOILA_API void koila_cache_set_expandable(koila_cache *c, bool on);

typedef enum koila_pool_flags {
    KOILA_POOL_NO_SPLIT = 1,       /**< MemPool(no_split=True) */
    KOILA_POOL_USE_ON_OOM = 2,     /**< MemPool(use_on_oom=True) */
    KOILA_POOL_USER_ALLOCATOR = 4, /**< has its own allocator: never expandable */
    /** a MemPool: from torch 2.13 on its memory goes back with its last holder, at once */
    KOILA_POOL_FREED_AT_DEATH = 8
} koila_pool_flags;
/** Adds a holder (a graph or MemPool) of a private pool, and makes the pool if it is new. Its
 * memory can be returned only when the last holder has dropped it: at the next release-all, or at
 * once with KOILA_POOL_FREED_AT_DEATH. */
KOILA_API koila_status koila_cache_pool_hold(koila_cache *c, koila_pool pool, uint32_t flags);
KOILA_API koila_status koila_cache_pool_drop(koila_cache *c, koila_pool pool);
/** The numbers of graph captures and pool routings in progress. */
KOILA_API void koila_cache_set_capturing(koila_cache *c, uint32_t n_captures, uint32_t n_routings);

/* name, torch.cuda.memory_stats key */
#define KOILA_CACHE_STAT_MAP(X)                                                                    \
    X(ALLOCATION, "allocation")                                                                    \
    X(ALLOCATED_BYTES, "allocated_bytes")                                                          \
    X(ACTIVE, "active")                                                                            \
    X(ACTIVE_BYTES, "active_bytes")                                                                \
    X(REQUESTED_BYTES, "requested_bytes")                                                          \
    X(SEGMENT, "segment")                                                                          \
    X(RESERVED_BYTES, "reserved_bytes")                                                            \
    X(INACTIVE_SPLIT, "inactive_split")                                                            \
    X(INACTIVE_SPLIT_BYTES, "inactive_split_bytes")
enum koila_cache_stat_kind {
#define KOILA_CACHE_STAT_ENUM(name, key) KOILA_STAT_##name,
    KOILA_CACHE_STAT_MAP(KOILA_CACHE_STAT_ENUM)
#undef KOILA_CACHE_STAT_ENUM
        KOILA_N_STATS
};
enum { KOILA_STAT_ALL, KOILA_STAT_SMALL, KOILA_STAT_LARGE, KOILA_N_STAT_POOLS };

typedef struct koila_counter {
    uint64_t current, peak, allocated, freed; /**< current == allocated - freed <= peak */
} koila_counter;

typedef struct koila_cache_stat {
    uint32_t struct_size;
    koila_counter of[KOILA_N_STATS][KOILA_N_STAT_POOLS];
    koila_counter oversize_allocations, oversize_segments;
    uint64_t num_alloc_retries, num_ooms, num_oom_rejections, num_device_alloc, num_device_free,
        num_sync_all_streams;
    /** segments as the driver rounds them, without `outside_bytes` */
    uint64_t device_bytes, peak_device_bytes;
    uint64_t n_events; /**< events of any kind since the cache was made */
} koila_cache_stat;

/** The caller sets out->struct_size first: to its sizeof, or 0 for the whole. */
KOILA_API void koila_cache_stats(const koila_cache *c, koila_cache_stat *out);
/** The i-th statistic under its torch.cuda.memory_stats key, for example
 * "allocated_bytes.all.peak". False past the end. */
KOILA_API bool koila_cache_stat_at(const koila_cache_stat *s, size_t i, char name[64],
                                   uint64_t *value);

typedef enum koila_event_kind {
    KOILA_EVENT_ALLOC = 1,
    KOILA_EVENT_FREE_REQUESTED,
    KOILA_EVENT_FREE_COMPLETED,
    KOILA_EVENT_SEGMENT_ALLOC,
    KOILA_EVENT_SEGMENT_FREE,
    KOILA_EVENT_SEGMENT_MAP,
    KOILA_EVENT_SEGMENT_UNMAP,
    KOILA_EVENT_OOM,
    KOILA_EVENT_SNAPSHOT
} koila_event_kind;

/** Owned by the library; valid during the callback. */
typedef struct koila_event {
    uint32_t struct_size;
    koila_event_kind kind;
    /** alloc and frees: requested bytes; segments: real; oom: address 0, rounded request */
    uint64_t addr, size;
    uint64_t stream;
    koila_pool pool;
} koila_event;

/** Callbacks may call no function of the cache except koila_cache_stats. A block function returns
 * false to stop. */
typedef bool (*koila_block_fn)(void *user, const koila_block *block);
typedef void (*koila_event_fn)(void *user, const koila_event *event);
/** All blocks in address order, unmapped ones too. Expected: KOILA_NO_MEMORY. */
KOILA_API koila_status koila_cache_walk(const koila_cache *c, koila_block_fn f, void *user);
/** From now on `f` sees every event, in torch's order, after the statistics have counted it. NULL
 * stops this. */
KOILA_API void koila_cache_observe(koila_cache *c, koila_event_fn f, void *user);

/** Marks this state, to return to it. 0: no memory. Marks nest; until a mark is forgotten, every
 * later change costs memory. */
KOILA_API uint64_t koila_cache_mark(koila_cache *c);
/** Returns to the state at `mark`, which stays valid; later marks end. Time is proportional to the
 * events since.
 * Expected: KOILA_BAD_ARGUMENT (no such mark). */
KOILA_API koila_status koila_cache_rewind(koila_cache *c, uint64_t mark);
/** Ends `mark` and later ones; the state stays. */
KOILA_API koila_status koila_cache_forget(koila_cache *c, uint64_t mark);

/** The rounded size of a request of n bytes, and the size of a new segment for it. */
KOILA_API void koila_cache_sizes(const koila_cache_config *c, uint64_t n, uint64_t *rounded,
                                 uint64_t *segment);

#ifdef __cplusplus
}
#endif
#endif
