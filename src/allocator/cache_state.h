/* cache_state.h — the state of a simulated cache, and the only functions that write it. Shared by
 * cache.c and the cache_*.c beside it.
 *
 *   block     a run of bytes of one segment: free, handed out ("used"), waiting for another stream
 *             ("pending"), or unmapped
 *   segment   memory that the driver gave in one piece; for expandable memory a whole reservation
 *             of address space
 *   lane      the free blocks of one (pool, small or large, stream), ordered by (size, age of the
 *             segment or of the block, address); and its unmapped ones by address
 *
 * These hold between any two calls, in these names, and koila__cache_check() asserts them:
 *   per segment      sum of block.size == segment.size,  blocks are linked in address order
 *   neighbours       no two free blocks and no two unmapped blocks of a segment touch: they would
 *                    have merged
 *   totals           reserved_bytes == sum of mapped block sizes;  allocated <= active <= reserved
 *                    allocated_bytes == sum of used,  active_bytes == sum of used and pending
 *   lanes            hold exactly the free (unmapped) blocks, in order
 *
 * Memory. A public call first reserves the block slots and undo space of its worst case; after that
 * nothing can fail, so when host memory runs out the cache is unchanged. Everything is an index
 * into arrays, never a pointer.
 *
 * What-if. After koila_cache_mark() every block is saved once, before its first change (tag <
 * epoch), and every root, hash slot and segment with each change; rewind plays that log backwards.
 * Scalars live in one struct that a mark copies. So a rewind costs the changes since, not the size
 * of the cache. All writes to blocks go through wr(), to trees through set_link().
 */
#ifndef KOILA_SRC_CACHE_STATE_H
#define KOILA_SRC_CACHE_STATE_H

#include "base/alloc.h"
#include "allocator/cache.h"

#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)

#define UNIT ((uint64_t)512) /* every size is rounded to this */
#define SMALL_MAX MIB        /* rounded requests up to this come from the small pool */
#define SMALL_SEGMENT (2 * MIB)
#define LARGE_EXACT (10 * MIB) /* from here on a segment is made to measure */
/* the driver's and the made-to-measure segments' rounding */
#define GRANULE (2 * MIB)
#define REQUEST_MAX ((uint64_t)1 << 60) /* such requests are out of memory at once */
/* the end of our address space, and the memory of an unlimited device */
#define SPACE_MAX ((uint64_t)1 << 62)

enum { N_BINS = 896, N_BIN_WORDS = N_BINS / 64, UNMAPPED_BIN = N_BINS, MAX_BINNED_LANES = 64 };
enum { LEFT, RIGHT };

typedef struct block {
    /* requested: while release-all collects free blocks, the next one */
    uint64_t addr, size, requested;
    uint32_t prev, next; /* neighbours in the segment, 0 = none */
    /* free, unmapped: children in the treap. pending: queue neighbours. dead: link[0] is the next
     * dead slot */
    uint32_t link[2];
    uint32_t seg, lane;
    uint32_t uses; /* list of other streams recorded on it, 0 = none */
    uint32_t tag;  /* epoch it was last saved in */
    uint32_t born; /* the pool's search counter when it was inserted; its age counts from here */
    uint32_t state : 3;
    uint32_t number : 29; /* in the order in which blocks were made; all 0 where that is no rule */
} block;
enum { LAST_NUMBER = (1 << 29) - 1 }; /* later blocks share it: their ties go by address */
enum { DEAD = KOILA_BLOCK_UNMAPPED + 1 };

typedef struct segment {
    uint64_t addr, size;
    /* in the order in which they were made; all 0 where ties go by address alone */
    uint64_t number;
    uint32_t first; /* block; dead segments: 0 */
    uint32_t lane;
    uint32_t next_dead;
    bool expandable;
} segment;

typedef struct lane {
    uint64_t stream;
    uint32_t pool; /* 2 * pool + is_small */
    bool binned;   /* one treap per size class, or (beyond MAX_BINNED_LANES) one for all */
    uint32_t unmapped;
    uint64_t words; /* which of bits[] are not 0 */
    uint64_t bits[N_BIN_WORDS];
    uint32_t root[]; /* N_BINS of them, or 1 */
} lane;

typedef struct pool {
    koila_pool id;
    uint32_t flags, n_holders, n_searches[2], n_segments;
    uint32_t *lanes[2], n_lanes[2], lanes_cap[2]; /* [is_small], by stream */
} pool;

typedef struct slot { /* of the hash of handed-out and pending blocks */
    uint64_t addr;
    uint32_t block;
} slot;

typedef struct use {
    uint64_t stream;
    uint32_t next;
} use;

/* All scalar state: a mark copies it. */
typedef struct scalars {
    koila_cache_stat stat;
    uint64_t total, outside, cap, next_addr;
    uint64_t n_made;                 /* segments or blocks ever made, where their age counts */
    uint32_t n_blocks, n_slots_used; /* live blocks; slots of blocks[] ever used, including 0 */
    uint32_t dead_block, dead_seg, n_segs, dead_use, n_uses;
    uint32_t pending_first, pending_last, n_out; /* n_out: hashed */
    uint32_t n_reservations, n_captures, n_routings;
    bool expandable;
} scalars;

typedef struct mark {
    uint64_t id, log_at;
    scalars s;
} mark;

struct koila_cache {
    scalars s;
    koila_cache_config conf;
    koila_allocator mem;
    koila_event_fn observer;
    void *observer_user;
    koila__cache_driver driver;
    block *blocks;
    segment *segs;
    slot *hash;
    use *uses;
    lane **lanes;
    pool *pools;
    uint32_t blocks_cap, segs_cap, hash_bits, uses_cap, lanes_cap, n_lanes, pools_cap, n_pools;
    /* undo log: payload words, then one header word (kind, index) */
    uint64_t *log;
    size_t log_n, log_cap;
    mark *marks;
    uint32_t n_marks, marks_cap, epoch;
    uint64_t next_mark;
};

/* ---- the undo log */

enum { LOG_BLOCK, LOG_SEG, LOG_ROOT, LOG_HASHED, LOG_UNHASHED, LOG_USE, LOG_POOL };
typedef struct saved_pool {
    uint32_t n_holders, n_searches[2], flags, n_segments;
} saved_pool;
#define WORDS(type) ((sizeof(type) + 7) / 8)

static inline void log_put(koila_cache *c, uint64_t kind, uint64_t index, const void *p,
                           size_t n_bytes)
{
    size_t words = (n_bytes + 7) / 8;
    koila_assert(c->log_n + words + 1 <= c->log_cap);
    memcpy(c->log + c->log_n, p, n_bytes);
    c->log_n += words;
    c->log[c->log_n++] = kind << 56 | index;
}

/* The one way to write a block. */
static inline block *wr(koila_cache *c, uint32_t b)
{
    block *p = &c->blocks[b];
    if (c->n_marks && p->tag != c->epoch) {
        log_put(c, LOG_BLOCK, b, p, sizeof *p);
        p->tag = c->epoch;
    }
    return p;
}
static inline segment *wr_seg(koila_cache *c, uint32_t s)
{
    if (c->n_marks)
        log_put(c, LOG_SEG, s, &c->segs[s], sizeof(segment));
    return &c->segs[s];
}
static inline use *wr_use(koila_cache *c, uint32_t u)
{
    if (c->n_marks)
        log_put(c, LOG_USE, u, &c->uses[u], sizeof(use));
    return &c->uses[u];
}
static inline pool *wr_pool(koila_cache *c, uint32_t p)
{
    pool *q = &c->pools[p];
    if (c->n_marks) {
        saved_pool old = {
            q->n_holders, { q->n_searches[0], q->n_searches[1] }, q->flags, q->n_segments
        };
        log_put(c, LOG_POOL, p, &old, sizeof old);
    }
    return q;
}

/* ---- the hash of handed-out and pending blocks, by address. It is no koila__idset: an address
 * leaves it with every free, and a look at the slot alone must tell whether it is the right one. */

static inline uint32_t hash_home(const koila_cache *c, uint64_t addr)
{
    return (uint32_t)((addr >> 9) * 0x9E3779B97F4A7C15u >> (64 - c->hash_bits));
}

static inline void hash_put_raw(koila_cache *c, uint64_t addr, uint32_t b)
{
    uint32_t mask = ((uint32_t)1 << c->hash_bits) - 1;
    uint32_t h = hash_home(c, addr);
    while (c->hash[h].block)
        h = (h + 1) & mask;
    c->hash[h] = (slot){ addr, b };
}

static inline uint32_t hash_find(const koila_cache *c, uint64_t addr)
{
    if (!c->hash)
        return 0;
    uint32_t mask = ((uint32_t)1 << c->hash_bits) - 1;
    uint32_t h = hash_home(c, addr);
    while (c->hash[h].block && c->hash[h].addr != addr)
        h = (h + 1) & mask;
    return c->hash[h].block;
}

static inline void hash_drop_raw(koila_cache *c, uint64_t addr)
{
    uint32_t mask = ((uint32_t)1 << c->hash_bits) - 1;
    uint32_t h = hash_home(c, addr);
    while (c->hash[h].addr != addr || !c->hash[h].block)
        h = (h + 1) & mask;
    for (uint32_t hole = h;;) { /* close the hole: move back whatever may stand nearer its home */
        h = (h + 1) & mask;
        if (!c->hash[h].block) {
            c->hash[hole].block = 0;
            return;
        }
        uint32_t home = hash_home(c, c->hash[h].addr);
        if (((h - home) & mask) >= ((h - hole) & mask)) {
            c->hash[hole] = c->hash[h];
            hole = h;
        }
    }
}

static inline void hash_put(koila_cache *c, uint64_t addr, uint32_t b)
{
    koila_assert(b && !hash_find(c, addr));
    if (c->n_marks)
        log_put(c, LOG_HASHED, 0, &addr, sizeof addr);
    hash_put_raw(c, addr, b);
    c->s.n_out++;
}
static inline void hash_drop(koila_cache *c, uint64_t addr, uint32_t b)
{
    koila_assert(hash_find(c, addr) == b && c->s.n_out > 0);
    if (c->n_marks)
        log_put(c, LOG_UNHASHED, b, &addr, sizeof addr);
    hash_drop_raw(c, addr);
    c->s.n_out--;
}

/* ---- small questions */

static inline pool *pool_of(const koila_cache *c, uint32_t b)
{
    return &c->pools[c->lanes[c->blocks[b].lane]->pool >> 1];
}
static inline bool is_small(const koila_cache *c, uint32_t b)
{
    return c->lanes[c->blocks[b].lane]->pool & 1;
}
static inline bool in_expandable(const koila_cache *c, uint32_t b)
{
    return c->segs[c->blocks[b].seg].expandable;
}
static inline bool is_alone(const koila_cache *c, uint32_t b)
{
    return !c->blocks[b].prev && !c->blocks[b].next;
}

static inline uint64_t granules(uint64_t n) { return (n + GRANULE - 1) & ~(GRANULE - 1); }

static inline uint64_t page_of(const koila_cache *c, bool small)
{
    return small ? SMALL_SEGMENT : c->conf.large_segment_bytes;
}

static inline uint64_t device_size(const koila_cache *c)
{
    if (c->conf.device_bytes)
        return c->conf.device_bytes;
    return c->s.total ? c->s.total : ASSUMED_DEVICE;
}
/* Address space that torch reserves at once for expandable memory: the device and an eighth of it,
 * in whole pages. */
static inline uint64_t reservation_size(const koila_cache *c, bool small)
{
    const uint64_t page = page_of(c, small);
    const uint64_t n = device_size(c);
    return (n + n / 8 + page - 1) / page * page;
}

/* ---- statistics and events */

static inline void up(koila_counter *s, uint64_t n)
{
    s->current += n;
    s->allocated += n;
    if (s->current > s->peak)
        s->peak = s->current;
}
static inline void down(koila_counter *s, uint64_t n)
{
    s->current -= n;
    s->freed += n;
}
static inline void stat_up(koila_cache *c, int kind, bool small, uint64_t n)
{
    up(&c->s.stat.of[kind][KOILA_STAT_ALL], n);
    up(&c->s.stat.of[kind][small ? KOILA_STAT_SMALL : KOILA_STAT_LARGE], n);
}
static inline void stat_down(koila_cache *c, int kind, bool small, uint64_t n)
{
    koila_assert(c->s.stat.of[kind][KOILA_STAT_ALL].current >= n);
    down(&c->s.stat.of[kind][KOILA_STAT_ALL], n);
    down(&c->s.stat.of[kind][small ? KOILA_STAT_SMALL : KOILA_STAT_LARGE], n);
}
static inline void stat_move(koila_cache *c, int kind, bool small, int64_t by)
{
    if (by > 0)
        stat_up(c, kind, small, (uint64_t)by);
    else if (by < 0)
        stat_down(c, kind, small, (uint64_t)-by);
}

static inline uint64_t reserved(const koila_cache *c)
{
    return c->s.stat.of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL].current;
}

static inline void tell(koila_cache *c, koila_event_kind kind, uint64_t addr, uint64_t size,
                        uint32_t lane_i)
{
    c->s.stat.n_events++;
    if (!c->observer)
        return;
    const lane *l = c->lanes[lane_i];
    koila_event e = { (uint32_t)sizeof e, kind, addr, size, l->stream, c->pools[l->pool >> 1].id };
    c->observer(c->observer_user, &e);
}

static inline void device_up(koila_cache *c, uint64_t n)
{
    c->s.stat.device_bytes += n;
    if (c->s.stat.device_bytes > c->s.stat.peak_device_bytes)
        c->s.stat.peak_device_bytes = c->s.stat.device_bytes;
}

/* Put `b` between `prev` and `next`, which touch. */
static inline void splice(koila_cache *c, uint32_t b, uint32_t prev, uint32_t next)
{
    block *x = wr(c, b);
    koila_assert(b && b != prev && b != next);
    x->prev = prev;
    x->next = next;
    if (prev)
        wr(c, prev)->next = b;
    else
        wr_seg(c, x->seg)->first = b;
    if (next)
        wr(c, next)->prev = b;
}

/* ---- cache.c, for the files beside it */

/* Reserves room for the worst case of one call; false: no host memory, nothing changed. */
bool koila__cache_reserve(koila_cache *c);
bool koila__cache_grow(koila_cache *c, void *array, uint32_t *cap, uint32_t want, size_t size);
/* Made at the first use. NULL and NO_LANE: no host memory. */
pool *koila__cache_pool(koila_cache *c, koila_pool id);
uint32_t koila__cache_lane(koila_cache *c, pool *p, bool small, uint64_t stream);
#define NO_LANE UINT32_MAX
/* These need koila__cache_reserve() before. A new segment has one block of its size, in state DEAD.
 */
uint32_t koila__cache_seg_new(koila_cache *c, uint32_t lane_i, uint64_t addr, uint64_t size,
                              bool expandable);
uint32_t koila__cache_block_new(koila_cache *c, uint32_t seg, uint32_t lane_i, uint64_t addr,
                                uint64_t size);
uint64_t koila__cache_try_merge(koila_cache *c, uint32_t dst, uint32_t src, koila_block_state kind);
void koila__cache_queue_put(koila_cache *c, uint32_t b);

#endif
