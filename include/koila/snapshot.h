/* koila/snapshot.h — a PyTorch memory snapshot, read as data (never executed), and replayed through
 * the cache.
 *
 *   koila_source src = { .struct_size = sizeof src, .data = bytes, .n_bytes = n };
 *   koila_snapshot_open(&src, NULL, &snap, &err);
 *         torch.cuda.memory._snapshot(), as pickle or JSON
 *   koila_replay(snap, device, NULL, &result, &err);
 *         is the recording what the rules say, address by address?
 */
#ifndef KOILA_SNAPSHOT_H
#define KOILA_SNAPSHOT_H

#include "koila/cache.h"

#ifdef __cplusplus
extern "C" {
#endif

/* immutable once open, may be shared between threads */
typedef struct koila_snapshot koila_snapshot;

/** Where the bytes are: in memory (`data`), or behind `read`, which is called until its end, once
 * through. */
typedef struct koila_source {
    uint32_t struct_size;
    const void *data; /**< or NULL */
    uint64_t n_bytes; /**< of data */
    /** Reads up to n bytes into p; returns how many, 0 at the end, -1 on failure. */
    int64_t (*read)(void *user, void *p, size_t n);
    void *user;
} koila_source;

typedef struct koila_limits {
    uint32_t struct_size;
    uint32_t max_nesting;      /**< default 64 */
    uint64_t max_string_bytes; /**< default 16 MiB */
    /** total host memory; default and upper bound 32 x input + 64 MiB */
    uint64_t max_memory_bytes;
    koila_allocator mem; /**< empty: the C library's */
} koila_limits;

/** `lim` may be NULL. On success `*out` is yours: koila_snapshot_free(). The source is not needed
 * afterwards.
 * Expected: KOILA_BAD_INPUT (`e->offset` is the byte), KOILA_NO_MEMORY. Nothing stays allocated
 * then. */
KOILA_API koila_status koila_snapshot_open(const koila_source *src, const koila_limits *lim,
                                           koila_snapshot **out, koila_error *e);
KOILA_API void koila_snapshot_free(koila_snapshot *s);

#define KOILA_NO_STACK 0u

typedef struct koila_snapshot_info {
    uint32_t struct_size;
    uint32_t n_devices;
    uint64_t n_bytes, n_entries, n_segments, n_blocks, n_annotations, n_unknown_keys,
        n_skipped_entries;
    bool is_json, has_traces; /**< has_traces: false = state only */
    bool has_pool_ids;        /**< entries name their pool (torch 2.13) */
    bool has_settings;
    const char *conf; /**< PYTORCH_CUDA_ALLOC_CONF as recorded, "" if none; borrowed */
} koila_snapshot_info;
KOILA_API void koila_snapshot_get_info(const koila_snapshot *s, koila_snapshot_info *out);

typedef struct koila_entry {
    uint32_t struct_size; /**< set by the caller: this many bytes are filled */
    koila_event_kind kind;
    uint64_t addr, size, stream; /**< oom: addr = device_free */
    int64_t time_us;             /**< 0: not recorded */
    uint32_t stack;              /**< for koila_snapshot_frame; KOILA_NO_STACK: not recorded */
    bool has_pool;
    koila_pool pool;
} koila_entry;
/** Number of trace entries of one device. */
KOILA_API uint64_t koila_snapshot_n_entries(const koila_snapshot *s, uint32_t device);
/** `*out` (its struct_size set) gets entry i. False past the end. */
KOILA_API bool koila_snapshot_entry(const koila_snapshot *s, uint32_t device, uint64_t i,
                                    koila_entry *out);

/** The segments of one device when the snapshot was taken, by address; the next one is struct_size
 * bytes further on. Borrowed until koila_snapshot_free. */
KOILA_API const koila_segment *koila_snapshot_segments(const koila_snapshot *s, uint32_t device,
                                                       size_t *n);
/** The stack of a live block of such a segment; KOILA_NO_STACK if not recorded. */
KOILA_API uint32_t koila_snapshot_block_stack(const koila_snapshot *s, const koila_block *block);

typedef struct koila_frame {
    const char *name, *filename; /**< UTF-8, borrowed until koila_snapshot_free */
    uint32_t line;
} koila_frame;
/** The i-th frame of a stack, innermost first. False past the end. */
KOILA_API bool koila_snapshot_frame(const koila_snapshot *s, uint32_t stack, uint32_t i,
                                    koila_frame *out);

typedef struct koila_annotation {
    const char *name, *stage; /**< stage: START or END */
    int64_t time_us;
    uint32_t device;
} koila_annotation;
KOILA_API bool koila_snapshot_annotation(const koila_snapshot *s, uint64_t i,
                                         koila_annotation *out);

/** The settings the recording ran with, as far as the snapshot says. `torch_version` NULL: inferred
 * from the fields present.
 * Expected: KOILA_UNSUPPORTED (another allocator), KOILA_BAD_INPUT (a configuration string torch
 * cannot have accepted). */
KOILA_API koila_status koila_snapshot_config(const koila_snapshot *s, uint32_t device,
                                             const char *torch_version, koila_cache_config *out,
                                             koila_error *e);

/* ---- replay */

typedef enum koila_verdict {
    KOILA_EXACT,
    KOILA_EXACT_WITH_DECISIONS,
    KOILA_DIFFERS,
    KOILA_NOT_CHECKABLE,
    KOILA_STATE_ONLY
} koila_verdict;

/** What replay found and counted; all byte counts in bytes. */
typedef struct koila_replay_result {
    uint32_t struct_size;
    koila_verdict verdict;
    /** KOILA_DIFFERS: expected and recorded; KOILA_NOT_CHECKABLE: why; KOILA_EXACT: why the end was
     * not checked, or "" */
    char reason[240];
    uint64_t at_entry;                                               /**< of a difference */
    uint64_t n_entries, n_addresses, n_segment_events, n_end_blocks; /**< what was checked */
    /** external decisions */
    uint64_t n_retries, n_retry_or_empty, n_empty, n_cap_set, n_expandable_switched, n_collected;
    /** blocks live before the first entry, and those of them with an assumed size */
    uint64_t n_start_blocks, n_assumed;
    /** the bounds of an expandable reservation were inferred */
    bool reservations_inferred;
    bool end_checked;
    uint32_t torch_version;
    const char *verified;  /**< how the rules of that version are known */
    koila_cache_stat stat; /**< from the first entry on */
    /** peak_entry: the first entry with the highest reserved */
    uint64_t peak_allocated, peak_active, peak_reserved, peak_entry;
    uint64_t peak_allocated_entry;
    /** the peak of reserved comes after the entry where the replay stopped; it was added up from
     * the trace, so the lost bytes are not known */
    bool peak_added_up;
    /* bytes lost, by cause, when `reserved` was at its peak; with `waiting` they add up to reserved
     * - requested */
    uint64_t at_peak_requested, lost_rounding, lost_unsplit, lost_pinned, lost_whole, waiting;
    uint64_t n_ooms;
    uint64_t first_oom_entry; /**< UINT64_MAX: none */
    /** segments there before the first entry; 0 where the trace holds everything */
    uint64_t n_start_segments;
    /** of the external decisions: facts about the state before the first entry that were inferred
     * from what followed (which segment is older, how long a block was that died in the window) */
    uint64_t n_start_learned;
} koila_replay_result;

/** Replay the recorded requests of one device; `c` NULL: koila_snapshot_config. out->struct_size is
 * set by the call.
 * Expected: KOILA_NO_MEMORY, KOILA_UNSUPPORTED, KOILA_BAD_ARGUMENT (no such device),
 * KOILA_BAD_INPUT (a complete trace frees an address that is not allocated, or allocates one that
 * is). A difference is not an error. */
KOILA_API koila_status koila_replay(const koila_snapshot *s, uint32_t device,
                                    const koila_cache_config *c, koila_replay_result *out,
                                    koila_error *e);

typedef struct koila_whatif_result {
    uint32_t struct_size;
    /** approximate_start: the blocks live before the recording were laid out anew */
    bool fits, approximate_start;
    koila_cache_stat stat;                             /**< of the run, start included */
    uint64_t n_ooms, first_oom_entry, first_oom_bytes; /**< first_oom_entry: UINT64_MAX = none */
    uint64_t spare_bytes; /**< total - outside - peak device bytes, 0 without a total */
} koila_whatif_result;
/** The recorded requests under other settings and limits (those of `c`): would they fit? Requests
 * that fail are skipped. */
KOILA_API koila_status koila_whatif(const koila_snapshot *s, uint32_t device,
                                    const koila_cache_config *c, koila_whatif_result *out,
                                    koila_error *e);

/** The requests of a recording as a timeline: `f` is called after each entry, with the state at
 * that moment. For drawings; the rules are those of replay. */
typedef struct koila_moment {
    uint32_t struct_size;
    uint64_t entry;
    int64_t time_us;
    uint64_t allocated, active, reserved;
    koila_event_kind kind;
    uint64_t addr, size; /**< size: of the block, for alloc and frees */
    uint32_t stack;
} koila_moment;
typedef void (*koila_moment_fn)(void *user, const koila_moment *m);
/** Replays as far as the recording allows; after a difference the numbers of the trace are added
 * up. `c` NULL: koila_snapshot_config. After entry `until` (UINT64_MAX: the last) `blocks` (may be
 * NULL) sees every block of that moment if the replay reached it; `*exact` tells whether it did. */
KOILA_API koila_status koila_timeline(const koila_snapshot *s, uint32_t device,
                                      const koila_cache_config *c, koila_moment_fn f, void *f_user,
                                      uint64_t until, koila_block_fn blocks, void *blocks_user,
                                      bool *exact, koila_error *e);

#ifdef __cplusplus
}
#endif
#endif
