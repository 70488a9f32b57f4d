/* snapshot.h — the result of the reader, for replay.c, and the builder that the pickle and JSON
 * readers share.
 *
 *   entry     48 bytes, in chunks that never move:   time 8 | addr 8 | size 8 | stream 8 | stack 4
 *             | pool 4 | kind 1 (has_pool 1)
 *   trace     first entry and count, one per device
 *   stack     id -> first frame id, count;  frames are (name, file, line), all interned
 *   string    id -> offset into one text arena
 */
#ifndef KOILA_SRC_SNAPSHOT_H
#define KOILA_SRC_SNAPSHOT_H

#include "base/idset.h"
#include "koila/snapshot.h"

typedef struct snap_entry {
    int64_t time_us;
    uint64_t addr, size, stream;
    uint32_t stack, pool;
    uint8_t kind, has_pool;
} snap_entry;
enum { ENTRY_CHUNK_BITS = 14, ENTRY_CHUNK = 1 << ENTRY_CHUNK_BITS };

typedef struct snap_range {
    uint64_t first, n;
} snap_range;

typedef struct snap_segment {
    uint64_t addr, size, allocated, active, requested, stream;
    uint32_t device, pool, blocks, stack; /* blocks: id of a range */
    bool is_small, is_expandable, has_sums;
} snap_segment;

typedef struct snap_block {
    uint64_t addr, size, requested;
    uint32_t stack;
    uint8_t state;
    bool has_addr;
} snap_block;

typedef struct snap_frame {
    uint32_t name, file, line;
} snap_frame;

typedef struct snap_annotation {
    int64_t time_us;
    uint32_t name, stage, device;
} snap_annotation;

typedef struct snap_settings {
    bool present, expandable, has_divisions, release_lock, has_fraction, oom_reject;
    uint32_t conf;     /* string */
    int64_t max_split; /* bytes, < 0 none */
    bool has_max_split;
    double gc, fraction;
    uint32_t divisions[16];
    bool has_new_keys; /* per_process_memory_fraction: 2.9 or later */
    /* keys that tell the version: from 2.10 on, and from 2.13 on */
    bool has_capture_reuse, has_pinned_cached;
} snap_settings;

struct koila_snapshot {
    koila_allocator mem;
    uint64_t used, budget, budget_cap; /* host bytes; the cap is the caller's */
    bool over_budget;
    /* strings */
    char *text;
    uint64_t text_n, text_cap;
    uint64_t *strs; /* offsets */
    uint32_t n_strs, strs_cap;
    koila__idset str_set;
    /* records */
    snap_entry **chunks;
    uint32_t n_chunks, chunks_cap;
    uint64_t n_entries;
    snap_segment *segments;
    uint32_t n_segments, segments_cap;
    snap_block *blocks;
    uint32_t n_blocks, blocks_cap;
    snap_frame *frames;
    uint32_t n_frames, frames_cap;
    koila__idset frame_set;
    snap_range *stacks;
    uint32_t n_stacks, stacks_cap;
    uint32_t *stack_ids, n_stack_ids, stack_ids_cap;
    koila__idset stack_set;
    snap_range *ranges;
    uint32_t n_ranges, ranges_cap;
    koila_pool *pools;
    uint32_t n_pools, pools_cap;
    snap_annotation *annotations;
    uint32_t n_annotations, annotations_cap;
    snap_range *traces; /* one per device */
    uint32_t n_traces, traces_cap, n_devices;
    snap_settings settings;
    uint64_t n_unknown_keys, n_skipped, n_bytes;
    bool is_json, has_traces, has_pool_ids;
    bool has_host_traces; /* from 2.14 on */
    /* what the caller sees */
    koila_segment *out_segments;
    uint32_t n_out_segments, *device_first, n_device_first; /* device_first[d] .. [d + 1] */
    koila_block *out_blocks;
    uint32_t *out_stacks;
    uint32_t n_out_blocks;
};

static inline const snap_entry *snap_entry_at(const koila_snapshot *s, uint64_t i)
{
    return &s->chunks[i >> ENTRY_CHUNK_BITS][i & (ENTRY_CHUNK - 1)];
}
static inline const char *snap_str(const koila_snapshot *s, uint32_t id)
{
    return id < s->n_strs ? s->text + s->strs[id] : "";
}

#endif
