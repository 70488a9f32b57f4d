/* cache.c — PyTorch's CUDA caching allocator as a pure function of what it is asked, rule for rule (docs/allocator.md says which).
 *
 *   block     a run of bytes of one segment: free, handed out ("used"), waiting for another stream ("pending"), or unmapped
 *   segment   what came from the driver in one piece; for expandable memory a whole reservation of address space
 *   lane      the free blocks of one (pool, small or large, stream), ordered by (size, address); and its unmapped ones by address
 *
 * These hold between any two calls, in these names, and koila__cache_check() asserts them:
 *   per segment      sum of block.size == segment.size,  blocks are linked in address order
 *   neighbours       no two free blocks and no two unmapped blocks of a segment touch: they would have merged
 *   totals           reserved_bytes == sum of mapped block sizes;  allocated <= active <= reserved
 *                    allocated_bytes == sum of used,  active_bytes == sum of used and pending
 *   lanes            hold exactly the free (unmapped) blocks, in order
 *
 * Free blocks. Best fit needs "the smallest block >= r, ties to the lowest address" in an ordered set. One tree per lane is ten cache
 * misses deep; so a lane has one bin per size class (32 to an octave, in units of 512 B), a bitmap of non-empty bins, and in each bin a
 * treap of the few blocks there. The treap lives in the blocks (left, right), its priorities are a hash of the block's index: inserting
 * never allocates, the shape does not depend on history, and a bin of ten thousand equal blocks still costs a logarithm.
 *
 * Memory. A public call first reserves the block slots and undo space it could need at worst; after that nothing can fail, so running out
 * of host memory leaves the cache as it was. Everything is an index into arrays, never a pointer.
 *
 * What-if. After koila_cache_mark() every block is saved once, before its first change (tag < epoch), and every root, hash slot and
 * segment with each change; rewind plays that log backwards. Scalars live in one struct that a mark copies. So a rewind costs the changes
 * since, not the size of the cache. All writes to blocks go through wr(), to trees through set_link().
 */
#include "cache.h"

#include "alloc.h"

#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)

#define UNIT ((uint64_t)512)             /* every size is rounded to this */
#define SMALL_MAX MIB                    /* rounded requests up to this come from the small pool */
#define SMALL_SEGMENT (2 * MIB)
#define LARGE_EXACT (10 * MIB)           /* from here on a segment is made to measure */
#define GRANULE (2 * MIB)                /* the driver's and the made-to-measure segments' rounding */
#define REQUEST_MAX ((uint64_t)1 << 60)  /* such requests are out of memory at once */
#define SPACE_MAX ((uint64_t)1 << 62)    /* the end of our address space, and the memory of an unlimited device */

enum { N_BINS = 896, N_BIN_WORDS = N_BINS / 64, UNMAPPED_BIN = N_BINS, MAX_BINNED_LANES = 64 };
enum { LEFT, RIGHT };

typedef struct block {
    uint64_t addr, size, requested; /* requested: while release-all collects free blocks, the next one */
    uint32_t prev, next; /* neighbours in the segment, 0 = none */
    uint32_t link[2];    /* free, unmapped: children in the treap. pending: queue neighbours. dead: link[0] is the next dead slot */
    uint32_t seg, lane;
    uint32_t uses; /* list of other streams recorded on it, 0 = none */
    uint32_t tag;  /* epoch it was last saved in */
    uint32_t born; /* the pool's search counter when it was inserted; its age counts from here */
    uint32_t state;
} block;
enum { DEAD = KOILA_BLOCK_UNMAPPED + 1 };

typedef struct segment {
    uint64_t addr, size;
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
    uint64_t *log;                  /* undo log: payload words, then one header word (kind, index) */
    uint64_t log_n, log_cap;
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

static void log_put(koila_cache *c, uint64_t kind, uint64_t index, const void *p, size_t n_bytes)
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
    if (c->n_marks) log_put(c, LOG_SEG, s, &c->segs[s], sizeof(segment));
    return &c->segs[s];
}
static inline use *wr_use(koila_cache *c, uint32_t u)
{
    if (c->n_marks) log_put(c, LOG_USE, u, &c->uses[u], sizeof(use));
    return &c->uses[u];
}
static inline pool *wr_pool(koila_cache *c, uint32_t p)
{
    pool *q = &c->pools[p];
    if (c->n_marks) {
        saved_pool old = { q->n_holders, { q->n_searches[0], q->n_searches[1] }, q->flags, q->n_segments };
        log_put(c, LOG_POOL, p, &old, sizeof old);
    }
    return q;
}

/* ---- lanes: ordered sets of free blocks */

static inline uint32_t bin_of(const lane *l, uint64_t size)
{
    if (!l->binned) return 0;
    uint64_t u = size / UNIT;
    if (u < 32) return (uint32_t)u;
    uint32_t octave = 63 - (uint32_t)__builtin_clzll(u);
    uint32_t bin = 32 * (octave - 4) + (uint32_t)(u >> (octave - 5) & 31);
    return bin < N_BINS ? bin : N_BINS - 1;
}

static inline bool before(const block *x, const block *y, bool by_size)
{
    if (by_size && x->size != y->size) return x->size < y->size;
    return x->addr < y->addr;
}

static inline uint32_t priority(uint32_t b) { return b * 2654435761u; }

static inline uint32_t root_of(const lane *l, uint32_t bin) { return bin == UNMAPPED_BIN ? l->unmapped : l->root[bin]; }

static void set_root_raw(lane *l, uint32_t bin, uint32_t to)
{
    if (bin == UNMAPPED_BIN) {
        l->unmapped = to;
        return;
    }
    l->root[bin] = to;
    uint64_t bit = (uint64_t)1 << (bin & 63), word = bin >> 6;
    if (to) l->bits[word] |= bit;
    else l->bits[word] &= ~bit;
    if (l->bits[word]) l->words |= (uint64_t)1 << word;
    else l->words &= ~((uint64_t)1 << word);
}

static inline void set_link(koila_cache *c, uint32_t lane_i, uint32_t bin, uint32_t parent, int side, uint32_t to)
{
    if (parent) {
        wr(c, parent)->link[side] = to;
        return;
    }
    lane *l = c->lanes[lane_i];
    if (c->n_marks) {
        uint32_t old = root_of(l, bin);
        log_put(c, LOG_ROOT, (uint64_t)lane_i << 12 | bin, &old, sizeof old);
    }
    set_root_raw(l, bin, to);
}

static void tree_insert(koila_cache *c, uint32_t b, uint32_t bin)
{
    block *x = wr(c, b);
    const uint32_t lane_i = x->lane;
    const bool by_size = bin != UNMAPPED_BIN;
    uint32_t parent = 0, at = root_of(c->lanes[lane_i], bin);
    int side = 0;
    while (at && priority(at) >= priority(b)) {
        parent = at;
        side = before(&c->blocks[at], x, by_size);
        at = c->blocks[at].link[side];
    }
    set_link(c, lane_i, bin, parent, side, b);
    /* split what hung there into what is before and after b */
    uint32_t hook[2] = { b, b };
    int hook_side[2] = { LEFT, RIGHT };
    while (at) {
        int s = before(&c->blocks[at], x, by_size) ? LEFT : RIGHT;
        wr(c, hook[s])->link[hook_side[s]] = at;
        hook[s] = at;
        hook_side[s] = !s;
        at = c->blocks[at].link[!s];
    }
    wr(c, hook[LEFT])->link[hook_side[LEFT]] = 0;
    wr(c, hook[RIGHT])->link[hook_side[RIGHT]] = 0;
}

static void tree_erase(koila_cache *c, uint32_t b, uint32_t bin)
{
    const block *x = &c->blocks[b];
    const uint32_t lane_i = x->lane;
    const bool by_size = bin != UNMAPPED_BIN;
    uint32_t parent = 0, at = root_of(c->lanes[lane_i], bin);
    int side = 0;
    while (at != b) {
        koila_assert(at);
        parent = at;
        side = before(&c->blocks[at], x, by_size);
        at = c->blocks[at].link[side];
    }
    uint32_t l = x->link[LEFT], r = x->link[RIGHT];
    while (l && r) {
        if (priority(l) >= priority(r)) {
            set_link(c, lane_i, bin, parent, side, l);
            parent = l, side = RIGHT, l = c->blocks[l].link[RIGHT];
        } else {
            set_link(c, lane_i, bin, parent, side, r);
            parent = r, side = LEFT, r = c->blocks[r].link[LEFT];
        }
    }
    set_link(c, lane_i, bin, parent, side, l ? l : r);
}

static inline void free_insert(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    const lane *l = c->lanes[x->lane];
    x->state = KOILA_BLOCK_FREE;
    x->born = c->pools[l->pool >> 1].n_searches[l->pool & 1];
    tree_insert(c, b, bin_of(l, x->size));
}
static inline void free_erase(koila_cache *c, uint32_t b) { tree_erase(c, b, bin_of(c->lanes[c->blocks[b].lane], c->blocks[b].size)); }

/* first in a bin with (size, addr) >= the key */
static inline uint32_t bin_at_least(const koila_cache *c, const lane *l, uint32_t bin, uint64_t size, uint64_t addr)
{
    uint32_t best = 0;
    for (uint32_t at = l->root[bin]; at;) {
        const block *x = &c->blocks[at];
        if (x->size > size || (x->size == size && x->addr >= addr)) best = at, at = x->link[LEFT];
        else at = x->link[RIGHT];
    }
    return best;
}

static uint32_t bin_end(const koila_cache *c, const lane *l, uint32_t bin, int side)
{
    uint32_t at = l->root[bin];
    while (c->blocks[at].link[side]) at = c->blocks[at].link[side];
    return at;
}

static inline uint32_t lane_at_least(const koila_cache *c, const lane *l, uint64_t size, uint64_t addr)
{
    uint32_t bin = bin_of(l, size);
    uint32_t found = l->root[bin] ? bin_at_least(c, l, bin, size, addr) : 0;
    if (found || !l->binned) return found;
    uint32_t word = (bin + 1) >> 6;
    if (word >= N_BIN_WORDS) return 0;
    uint64_t bits = l->bits[word] & (~(uint64_t)0 << ((bin + 1) & 63));
    if (!bits) {
        uint64_t words = word + 1 < 64 ? l->words & (~(uint64_t)0 << (word + 1)) : 0;
        if (!words) return 0;
        word = (uint32_t)__builtin_ctzll(words);
        bits = l->bits[word];
    }
    return bin_end(c, l, word * 64 + (uint32_t)__builtin_ctzll(bits), LEFT);
}
static inline uint32_t lane_next(const koila_cache *c, const lane *l, uint32_t b) { return lane_at_least(c, l, c->blocks[b].size, c->blocks[b].addr + 1); }

/* last with (size, addr) < the key */
static uint32_t lane_below(const koila_cache *c, const lane *l, uint64_t size, uint64_t addr)
{
    uint32_t bin = bin_of(l, size), best = 0;
    for (uint32_t at = l->root[bin]; at;) {
        const block *x = &c->blocks[at];
        if (x->size < size || (x->size == size && x->addr < addr)) best = at, at = x->link[RIGHT];
        else at = x->link[LEFT];
    }
    if (best || !bin) return best;
    uint32_t word = (bin - 1) >> 6;
    uint64_t bits = l->bits[word] & (~(uint64_t)0 >> (63 - ((bin - 1) & 63)));
    if (!bits) {
        uint64_t words = l->words & (((uint64_t)1 << word) - 1);
        if (!words) return 0;
        word = 63 - (uint32_t)__builtin_clzll(words);
        bits = l->bits[word];
    }
    return bin_end(c, l, word * 64 + 63 - (uint32_t)__builtin_clzll(bits), RIGHT);
}

/* first unmapped at or above an address */
static uint32_t unmapped_at_least(const koila_cache *c, const lane *l, uint64_t addr)
{
    uint32_t best = 0;
    for (uint32_t at = l->unmapped; at;) {
        const block *x = &c->blocks[at];
        if (x->addr >= addr) best = at, at = x->link[LEFT];
        else at = x->link[RIGHT];
    }
    return best;
}

/* ---- host memory: everything is reserved before a call changes anything */

static bool grow(koila_cache *c, void *array, uint32_t *cap, uint32_t want, size_t size)
{
    void **p = array;
    if (want <= *cap) return true;
    if (want > UINT32_MAX / 4) return false;
    uint32_t n = *cap ? *cap : (KOILA_DEBUG_LEVEL >= 3 ? 1 : 16);
    while (n < want) n *= 2;
    void *fresh = koila__realloc(&c->mem, *p, *cap * size, n * size);
    if (!fresh) return false;
    *p = fresh;
    *cap = n;
    return true;
}

static uint32_t hash_home(const koila_cache *c, uint64_t addr) { return (uint32_t)((addr >> 9) * 0x9E3779B97F4A7C15u >> (64 - c->hash_bits)); }

static bool grow_hash(koila_cache *c)
{
    uint32_t bits = c->hash_bits ? c->hash_bits + 1 : 6, mask = ((uint32_t)1 << bits) - 1;
    if (bits > 31) return false;
    slot *fresh = koila__realloc(&c->mem, NULL, 0, sizeof(slot) << bits);
    if (!fresh) return false;
    memset(fresh, 0, sizeof(slot) << bits);
    slot *old = c->hash;
    uint32_t n_old = old ? (uint32_t)1 << c->hash_bits : 0;
    c->hash = fresh;
    c->hash_bits = bits;
    for (uint32_t i = 0; i < n_old; i++) {
        if (!old[i].block) continue;
        uint32_t h = hash_home(c, old[i].addr);
        while (fresh[h].block) h = (h + 1) & mask;
        fresh[h] = old[i];
    }
    koila__release(&c->mem, old, n_old * sizeof(slot));
    return true;
}

/* Room for one call: at worst it unmaps every free expandable block (two new blocks each), and with a mark touches everything. */
static bool reserve(koila_cache *c)
{
    uint64_t blocks = (uint64_t)c->s.n_slots_used + 8 + (c->s.n_reservations ? 2 * (uint64_t)c->s.n_blocks : 0);
    if (blocks > c->blocks_cap && (blocks > UINT32_MAX / 8 || !grow(c, &c->blocks, &c->blocks_cap, (uint32_t)blocks, sizeof(block)))) return false;
    if (c->s.n_segs + 2 > c->segs_cap && !grow(c, &c->segs, &c->segs_cap, c->s.n_segs + 2, sizeof(segment))) return false;
    if (c->s.n_uses + 2 > c->uses_cap && !grow(c, &c->uses, &c->uses_cap, c->s.n_uses + 2, sizeof(use))) return false;
    if (((uint64_t)c->s.n_out + 2) * 2 > (c->hash ? (uint64_t)1 << c->hash_bits : 0) && !grow_hash(c)) return false;
    if (c->n_marks) {
        /* per block at worst three times: itself, six roots, two segments, two hash changes, uses */
        uint64_t want = c->log_n + ((uint64_t)c->s.n_blocks * 3 + 64) * (WORDS(block) + 1 + 6 * 2 + 2 * (WORDS(segment) + 1) + 8 + 8);
        if (want > c->log_cap) {
            if (want > SIZE_MAX / 32) return false;
            uint64_t *log = koila__realloc(&c->mem, c->log, (size_t)c->log_cap * 8, (size_t)want * 2 * 8);
            if (!log) return false;
            c->log = log;
            c->log_cap = want * 2;
        }
    }
    return true;
}

/* ---- the hash of handed-out and pending blocks, by address */

static void hash_put_raw(koila_cache *c, uint64_t addr, uint32_t b)
{
    uint32_t mask = ((uint32_t)1 << c->hash_bits) - 1, h = hash_home(c, addr);
    while (c->hash[h].block) h = (h + 1) & mask;
    c->hash[h] = (slot){ addr, b };
}

static uint32_t hash_find(const koila_cache *c, uint64_t addr)
{
    if (!c->hash) return 0;
    uint32_t mask = ((uint32_t)1 << c->hash_bits) - 1, h = hash_home(c, addr);
    while (c->hash[h].block && c->hash[h].addr != addr) h = (h + 1) & mask;
    return c->hash[h].block;
}

static void hash_drop_raw(koila_cache *c, uint64_t addr)
{
    uint32_t mask = ((uint32_t)1 << c->hash_bits) - 1, h = hash_home(c, addr);
    while (c->hash[h].addr != addr || !c->hash[h].block) h = (h + 1) & mask;
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
    if (c->n_marks) log_put(c, LOG_HASHED, 0, &addr, sizeof addr);
    hash_put_raw(c, addr, b);
    c->s.n_out++;
}
static inline void hash_drop(koila_cache *c, uint64_t addr, uint32_t b)
{
    if (c->n_marks) log_put(c, LOG_UNHASHED, b, &addr, sizeof addr);
    hash_drop_raw(c, addr);
    c->s.n_out--;
}

/* ---- pools and lanes. They are made when first named and stay: an empty one means nothing. */

static pool *pool_find(const koila_cache *c, koila_pool id)
{
    for (uint32_t i = 0; i < c->n_pools; i++)
        if (c->pools[i].id.owner == id.owner && c->pools[i].id.id == id.id) return &c->pools[i];
    return NULL;
}

static pool *pool_get(koila_cache *c, koila_pool id)
{
    pool *p = pool_find(c, id);
    if (p || !grow(c, &c->pools, &c->pools_cap, c->n_pools + 1, sizeof(pool))) return p;
    p = &c->pools[c->n_pools++];
    memset(p, 0, sizeof *p);
    p->id = id;
    return p;
}

static uint32_t lane_slot(const koila_cache *c, const pool *p, bool small, uint64_t stream)
{
    uint32_t lo = 0, hi = p->n_lanes[small];
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (c->lanes[p->lanes[small][mid]]->stream < stream) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

#define NO_LANE UINT32_MAX
static uint32_t lane_find(const koila_cache *c, const pool *p, bool small, uint64_t stream)
{
    uint32_t at = lane_slot(c, p, small, stream);
    return at < p->n_lanes[small] && c->lanes[p->lanes[small][at]]->stream == stream ? p->lanes[small][at] : NO_LANE;
}

static size_t lane_bytes(bool binned) { return sizeof(lane) + (binned ? N_BINS : 1) * sizeof(uint32_t); }

static uint32_t lane_get(koila_cache *c, pool *p, bool small, uint64_t stream)
{
    uint32_t at = lane_slot(c, p, small, stream), *list = p->lanes[small], n = p->n_lanes[small];
    if (at < n && c->lanes[list[at]]->stream == stream) return list[at];
    if (!grow(c, &p->lanes[small], &p->lanes_cap[small], n + 1, sizeof(uint32_t))) return NO_LANE;
    if (!grow(c, &c->lanes, &c->lanes_cap, c->n_lanes + 1, sizeof(lane *))) return NO_LANE;
    bool binned = c->n_lanes < MAX_BINNED_LANES;
    lane *l = koila__realloc(&c->mem, NULL, 0, lane_bytes(binned));
    if (!l) return NO_LANE;
    memset(l, 0, lane_bytes(binned));
    l->stream = stream;
    l->pool = 2 * (uint32_t)(p - c->pools) + small;
    l->binned = binned;
    list = p->lanes[small];
    memmove(list + at + 1, list + at, (n - at) * sizeof *list);
    list[at] = c->n_lanes;
    p->n_lanes[small]++;
    c->lanes[c->n_lanes] = l;
    return c->n_lanes++;
}

static inline pool *pool_of(const koila_cache *c, uint32_t b) { return &c->pools[c->lanes[c->blocks[b].lane]->pool >> 1]; }
static inline bool is_small(const koila_cache *c, uint32_t b) { return c->lanes[c->blocks[b].lane]->pool & 1; }
static inline bool in_expandable(const koila_cache *c, uint32_t b) { return c->segs[c->blocks[b].seg].expandable; }
static inline bool is_alone(const koila_cache *c, uint32_t b) { return !c->blocks[b].prev && !c->blocks[b].next; }

/* ---- statistics and events */

static inline void up(koila_counter *s, uint64_t n)
{
    s->current += n;
    s->allocated += n;
    if (s->current > s->peak) s->peak = s->current;
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
    down(&c->s.stat.of[kind][KOILA_STAT_ALL], n);
    down(&c->s.stat.of[kind][small ? KOILA_STAT_SMALL : KOILA_STAT_LARGE], n);
}
static inline void stat_move(koila_cache *c, int kind, bool small, int64_t by)
{
    if (by > 0) stat_up(c, kind, small, (uint64_t)by);
    else if (by < 0) stat_down(c, kind, small, (uint64_t)-by);
}

static inline uint64_t reserved(const koila_cache *c) { return c->s.stat.of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL].current; }

static inline void tell(koila_cache *c, koila_event_kind kind, uint64_t addr, uint64_t size, uint32_t lane_i)
{
    c->s.stat.n_events++;
    if (!c->observer) return;
    const lane *l = c->lanes[lane_i];
    koila_event e = { kind, addr, size, l->stream, c->pools[l->pool >> 1].id };
    c->observer(c->observer_user, &e);
}

/* ---- blocks and segments */

static uint32_t block_new(koila_cache *c, uint32_t seg, uint32_t lane_i, uint64_t addr, uint64_t size)
{
    uint32_t b = c->s.dead_block;
    if (b) c->s.dead_block = c->blocks[b].link[0];
    else {
        b = c->s.n_slots_used++;
        koila_assert(b < c->blocks_cap);
        c->blocks[b].tag = c->epoch; /* nothing to save: before, this slot did not exist */
    }
    block *x = wr(c, b);
    uint32_t tag = x->tag;
    *x = (block){ .addr = addr, .size = size, .seg = seg, .lane = lane_i, .tag = tag, .state = DEAD };
    c->s.n_blocks++;
    return b;
}

static void block_drop(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    x->state = DEAD;
    x->link[0] = c->s.dead_block;
    c->s.dead_block = b;
    c->s.n_blocks--;
}

/* Put `b` between `prev` and `next`, which touch. */
static void splice(koila_cache *c, uint32_t b, uint32_t prev, uint32_t next)
{
    block *x = wr(c, b);
    x->prev = prev;
    x->next = next;
    if (prev) wr(c, prev)->next = b;
    else wr_seg(c, x->seg)->first = b;
    if (next) wr(c, next)->prev = b;
}

static uint32_t seg_new(koila_cache *c, uint32_t lane_i, uint64_t addr, uint64_t size, bool expandable)
{
    uint32_t s = c->s.dead_seg;
    if (s) c->s.dead_seg = c->segs[s].next_dead;
    else s = c->s.n_segs++;
    *wr_seg(c, s) = (segment){ .addr = addr, .size = size, .lane = lane_i, .expandable = expandable };
    c->s.n_reservations += expandable;
    uint32_t b = block_new(c, s, lane_i, addr, size);
    wr_seg(c, s)->first = b;
    wr_pool(c, c->lanes[lane_i]->pool >> 1)->n_segments++;
    return s;
}

static void seg_drop(koila_cache *c, uint32_t s)
{
    segment *g = wr_seg(c, s);
    c->s.n_reservations -= g->expandable;
    wr_pool(c, c->lanes[g->lane]->pool >> 1)->n_segments--;
    g->first = 0;
    g->next_dead = c->s.dead_seg;
    c->s.dead_seg = s;
}

static uint64_t granules(uint64_t n) { return (n + GRANULE - 1) & ~(GRANULE - 1); }

static void device_up(koila_cache *c, uint64_t n)
{
    c->s.stat.device_bytes += n;
    if (c->s.stat.device_bytes > c->s.stat.peak_device_bytes) c->s.stat.peak_device_bytes = c->s.stat.device_bytes;
}

/* The driver: memory for a segment or for pages of one. */
static bool driver_gives(koila_cache *c, koila_event_kind kind, uint64_t size, uint64_t stream, uint64_t *addr)
{
    if (c->driver.give) return c->driver.give(c->driver.user, kind, size, stream, addr);
    uint64_t limit = c->s.total ? c->s.total : SPACE_MAX;
    return c->s.outside <= limit && c->s.stat.device_bytes <= limit - c->s.outside && granules(size) <= limit - c->s.outside - c->s.stat.device_bytes;
}

/* Absorb a neighbour that touches `dst` and is as free as dst is. Returns the bytes won. */
static uint64_t try_merge(koila_cache *c, uint32_t dst, uint32_t src, koila_block_state kind)
{
    if (!src || c->blocks[src].state != (uint32_t)kind) return 0;
    const uint64_t won = c->blocks[src].size;
    if (kind == KOILA_BLOCK_FREE) free_erase(c, src);
    else tree_erase(c, src, UNMAPPED_BIN);
    block *d = wr(c, dst);
    const block *s = &c->blocks[src];
    if (d->prev == src) {
        d->addr = s->addr;
        d->prev = s->prev;
        if (d->prev) wr(c, d->prev)->next = dst;
        else wr_seg(c, d->seg)->first = dst;
    } else {
        d->next = s->next;
        if (d->next) wr(c, d->next)->prev = dst;
    }
    d->size += won;
    block_drop(c, src);
    return won;
}

/* Give a free block without neighbours back to the driver. */
static void release_block(koila_cache *c, uint32_t b)
{
    const block *x = &c->blocks[b];
    const bool small = is_small(c, b);
    koila_assert(is_alone(c, b) && !in_expandable(c, b));
    tell(c, KOILA_EVENT_SEGMENT_FREE, x->addr, x->size, x->lane);
    c->s.stat.num_device_free++;
    stat_down(c, KOILA_STAT_SEGMENT, small, 1);
    stat_down(c, KOILA_STAT_RESERVED_BYTES, small, x->size);
    if (x->size >= c->conf.max_split_bytes) down(&c->s.stat.oversize_segments, 1);
    c->s.stat.device_bytes -= granules(x->size);
    free_erase(c, b);
    seg_drop(c, x->seg);
    block_drop(c, b);
}

/* ---- expandable segments */

static uint64_t page_of(const koila_cache *c, bool small) { return small ? SMALL_SEGMENT : c->conf.large_segment_bytes; }

/* Map the first pages of an unmapped block, enough for `size`, and merge. Returns the free block that then holds them (in its lane), 0 if
 * there is no memory. */
static uint32_t map_pages(koila_cache *c, uint32_t b, uint64_t size)
{
    const bool small = is_small(c, b);
    const uint64_t page = page_of(c, small), whole = (size + page - 1) / page * page;
    const uint64_t bytes = whole < c->blocks[b].size ? whole : c->blocks[b].size; /* less only if a given state has ranges that are no whole pages */
    const uint32_t lane_i = c->blocks[b].lane;
    uint64_t addr = c->blocks[b].addr;
    if (!driver_gives(c, KOILA_EVENT_SEGMENT_MAP, bytes, c->lanes[lane_i]->stream, &addr)) return 0;
    tree_erase(c, b, UNMAPPED_BIN);
    block *x = wr(c, b);
    x->state = DEAD;
    if (bytes < x->size) {
        uint32_t rest = block_new(c, x->seg, lane_i, x->addr + bytes, x->size - bytes);
        splice(c, rest, b, x->next);
        wr(c, rest)->state = KOILA_BLOCK_UNMAPPED;
        tree_insert(c, rest, UNMAPPED_BIN);
        wr(c, b)->size = bytes;
    }
    try_merge(c, b, c->blocks[b].prev, KOILA_BLOCK_FREE);
    try_merge(c, b, c->blocks[b].next, KOILA_BLOCK_FREE);
    free_insert(c, b);
    stat_up(c, KOILA_STAT_RESERVED_BYTES, small, bytes);
    c->s.stat.num_device_alloc++;
    device_up(c, granules(bytes));
    tell(c, KOILA_EVENT_SEGMENT_MAP, addr, bytes, lane_i);
    return b;
}

/* Unmap the whole pages inside a free block; what sticks out at both ends stays free. */
static void unmap_pages(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    const bool small = is_small(c, b);
    const uint64_t page = page_of(c, small), base = c->segs[x->seg].addr;
    const uint64_t from = base + (x->addr - base + page - 1) / page * page, to = base + (x->addr + x->size - base) / page * page;
    const uint32_t seg = x->seg, lane_i = x->lane;
    if (from >= to) return;
    free_erase(c, b);
    x->state = DEAD;
    if (from > x->addr) {
        uint32_t low = block_new(c, seg, lane_i, x->addr, from - x->addr);
        splice(c, low, c->blocks[b].prev, b);
        free_insert(c, low);
    }
    if (to < x->addr + x->size) {
        uint32_t high = block_new(c, seg, lane_i, to, x->addr + x->size - to);
        splice(c, high, b, c->blocks[b].next);
        free_insert(c, high);
    }
    x = wr(c, b);
    x->addr = from;
    x->size = to - from;
    try_merge(c, b, x->prev, KOILA_BLOCK_UNMAPPED);
    try_merge(c, b, c->blocks[b].next, KOILA_BLOCK_UNMAPPED);
    wr(c, b)->state = KOILA_BLOCK_UNMAPPED;
    tree_insert(c, b, UNMAPPED_BIN);
    stat_down(c, KOILA_STAT_RESERVED_BYTES, small, to - from);
    c->s.stat.num_device_free++;
    c->s.stat.device_bytes -= granules(to - from);
    tell(c, KOILA_EVENT_SEGMENT_UNMAP, from, to - from, lane_i);
    if (is_alone(c, b)) { /* the reservation is empty */
        tree_erase(c, b, UNMAPPED_BIN);
        block_drop(c, b);
        seg_drop(c, seg);
    }
}

static bool is_room(const koila_cache *c, uint32_t b)
{
    return b && (c->blocks[b].state == KOILA_BLOCK_FREE || c->blocks[b].state == KOILA_BLOCK_UNMAPPED);
}

/* Grow expandable memory until `size` bytes lie free in one block, and take that block out of its lane. */
static uint32_t expand(koila_cache *c, uint32_t lane_i, uint64_t size)
{
    const lane *l = c->lanes[lane_i];
    const bool small = l->pool & 1;
    uint32_t at = 0;
    for (uint32_t u = unmapped_at_least(c, l, 0); u && !at; u = unmapped_at_least(c, l, c->blocks[u].addr + 1)) {
        uint32_t first = is_room(c, c->blocks[u].prev) ? c->blocks[u].prev : u;
        uint64_t room = 0;
        for (uint32_t b = first; room < size && is_room(c, b); b = c->blocks[b].next) room += c->blocks[b].size;
        if (room >= size) at = first;
    }
    if (!at) {
        const uint64_t page = page_of(c, small), t = c->conf.device_bytes ? c->conf.device_bytes : c->s.total ? c->s.total : 24 * KIB * MIB;
        if (t > SPACE_MAX / 4) return 0;
        const uint64_t space = (t + t / 8 + page - 1) / page * page;
        uint64_t addr = c->s.next_addr;
        if (size > space) {
            /* torch would trip over an assertion; no device has this much */
            return 0;
        }
        if (addr > SPACE_MAX - granules(space)) return 0;
        if (c->driver.give && !c->driver.give(c->driver.user, (koila_event_kind)KOILA__RESERVATION, space, l->stream, &addr)) return 0;
        if (!c->driver.give) c->s.next_addr += granules(space);
        uint32_t s = seg_new(c, lane_i, addr, space, true);
        at = c->segs[s].first;
        wr(c, at)->state = KOILA_BLOCK_UNMAPPED;
        tree_insert(c, at, UNMAPPED_BIN);
    }
    if (c->blocks[at].state == KOILA_BLOCK_UNMAPPED) {
        uint64_t want = c->blocks[at].size < size ? c->blocks[at].size : size;
        if (!(at = map_pages(c, at, want))) return 0;
    }
    while (c->blocks[at].size < size) {
        uint32_t next = c->blocks[at].next;
        uint64_t missing = size - c->blocks[at].size, want = c->blocks[next].size < missing ? c->blocks[next].size : missing;
        if (!(at = map_pages(c, next, want))) return 0;
    }
    free_erase(c, at);
    return at;
}

/* ---- giving back */

static void complete(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    const bool small = is_small(c, b), expandable = in_expandable(c, b);
    const uint64_t size = x->size, requested = x->requested;
    tell(c, KOILA_EVENT_FREE_COMPLETED, x->addr, requested, x->lane);
    hash_drop(c, x->addr, b);
    x->requested = 0;
    int64_t n = 0, bytes = 0;
    for (int side = 0; side < 2; side++) {
        uint64_t won = try_merge(c, b, side ? c->blocks[b].next : c->blocks[b].prev, KOILA_BLOCK_FREE);
        if (won) n--, bytes -= (int64_t)won;
    }
    free_insert(c, b);
    if (!is_alone(c, b)) n++, bytes += (int64_t)c->blocks[b].size;
    if (!expandable) {
        stat_move(c, KOILA_STAT_INACTIVE_SPLIT, small, n);
        stat_move(c, KOILA_STAT_INACTIVE_SPLIT_BYTES, small, bytes);
    }
    stat_down(c, KOILA_STAT_ACTIVE, small, 1);
    stat_down(c, KOILA_STAT_ACTIVE_BYTES, small, size);
    stat_down(c, KOILA_STAT_REQUESTED_BYTES, small, requested);
}

static void queue_put(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    x->state = KOILA_BLOCK_PENDING;
    x->link[0] = c->s.pending_last;
    x->link[1] = 0;
    if (c->s.pending_last) wr(c, c->s.pending_last)->link[1] = b;
    else c->s.pending_first = b;
    c->s.pending_last = b;
}

static void queue_take(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    uint32_t older = x->link[0], newer = x->link[1];
    if (older) wr(c, older)->link[1] = newer;
    else c->s.pending_first = newer;
    if (newer) wr(c, newer)->link[0] = older;
    else c->s.pending_last = older;
    while (x->uses) {
        use *u = wr_use(c, x->uses);
        uint32_t next = u->next;
        u->next = c->s.dead_use;
        c->s.dead_use = x->uses;
        x->uses = next;
    }
    x->state = DEAD;
}

static void complete_pending(koila_cache *c)
{
    while (c->s.pending_first) {
        uint32_t b = c->s.pending_first;
        queue_take(c, b);
        complete(c, b);
    }
}

/* Every free block of a pool that the driver can take back, in (stream, size, address) order. Expandable ones after the others. */
static void release_pool(koila_cache *c, const pool *p, bool small)
{
    for (uint32_t i = 0; i < p->n_lanes[small]; i++) {
        const lane *l = c->lanes[p->lanes[small][i]];
        for (uint32_t b = lane_at_least(c, l, 0, 0), next; b; b = next) {
            next = lane_next(c, l, b);
            if (!in_expandable(c, b) && is_alone(c, b)) release_block(c, b);
        }
    }
    if (!c->s.n_reservations) return;
    uint32_t first = 0, last = 0;
    for (uint32_t i = 0; i < p->n_lanes[small]; i++) {
        const lane *l = c->lanes[p->lanes[small][i]];
        for (uint32_t b = lane_at_least(c, l, 0, 0); b; b = lane_next(c, l, b)) {
            if (!in_expandable(c, b)) continue;
            if (last) wr(c, last)->requested = b;
            else first = b;
            last = b;
        }
    }
    for (uint32_t b = first; b;) {
        uint32_t next = (uint32_t)c->blocks[b].requested;
        wr(c, b)->requested = 0;
        unmap_pages(c, b);
        b = next;
    }
}

static void release_all(koila_cache *c)
{
    if (c->driver.before_sync) c->driver.before_sync(c->driver.user);
    c->s.stat.num_sync_all_streams++;
    complete_pending(c);
    release_pool(c, &c->pools[0], false);
    release_pool(c, &c->pools[0], true);
    for (uint32_t i = 1; i < c->n_pools; i++) {
        if (c->pools[i].n_holders || !c->pools[i].n_segments) continue;
        release_pool(c, &c->pools[i], true);
        release_pool(c, &c->pools[i], false);
    }
}

/* Only with max_split_size: release just enough oversize blocks of the stream. True if a new segment may fit now. */
static bool release_available(koila_cache *c, uint32_t lane_i, uint64_t r)
{
    const lane *l = c->lanes[lane_i];
    const uint64_t max_split = c->conf.max_split_bytes, k = r > max_split ? r : max_split;
    if (max_split == KOILA_NO_LIMIT) return false;
    for (uint32_t b = lane_at_least(c, l, k, 0); b; b = lane_next(c, l, b)) {
        if (in_expandable(c, b) || !is_alone(c, b)) continue;
        release_block(c, b);
        return true;
    }
    uint64_t total = 0;
    for (uint32_t b = lane_below(c, l, KOILA_NO_LIMIT, 0), next; b && total < k && c->blocks[b].size >= max_split; b = next) {
        next = lane_below(c, l, c->blocks[b].size, c->blocks[b].addr);
        if (in_expandable(c, b) || !is_alone(c, b)) continue;
        total += c->blocks[b].size;
        release_block(c, b);
    }
    return total >= k;
}

/* Release the older half of the unsplit large blocks, and again, until `target` bytes are back. */
static size_t collect(koila_cache *c, uint64_t target, size_t n_rounds)
{
    const pool *p = &c->pools[0];
    const uint32_t now = p->n_searches[0];
    uint64_t age = 0, n = 0, won = 0;
    size_t n_released = 0;
    for (uint32_t i = 0; i < p->n_lanes[0]; i++) {
        const lane *l = c->lanes[p->lanes[0][i]];
        for (uint32_t b = lane_at_least(c, l, 0, 0); b; b = lane_next(c, l, b))
            if (is_alone(c, b) && !in_expandable(c, b)) age += (uint32_t)(now - c->blocks[b].born), n++;
    }
    for (bool any = true; won < target && any && n && n_rounds; n_rounds--) {
        const double mean = (double)age / (double)n;
        any = false;
        for (uint32_t i = 0; i < p->n_lanes[0]; i++) {
            const lane *l = c->lanes[p->lanes[0][i]];
            for (uint32_t b = lane_at_least(c, l, 0, 0), next; b; b = next) {
                next = lane_next(c, l, b);
                const uint32_t its_age = now - c->blocks[b].born;
                if (!is_alone(c, b) || in_expandable(c, b) || (double)its_age < mean) continue;
                any = true;
                won += c->blocks[b].size;
                age -= its_age;
                n--;
                n_released++;
                release_block(c, b);
            }
        }
    }
    return n_released;
}

static void collect_if_needed(koila_cache *c)
{
    const uint64_t limit = (uint64_t)(c->conf.gc_threshold * (double)c->s.cap);
    if (reserved(c) > limit) collect(c, reserved(c) - limit, SIZE_MAX);
}

size_t koila__cache_collect(koila_cache *c, size_t n_rounds) { return reserve(c) ? collect(c, KOILA_NO_LIMIT, n_rounds) : 0; }

/* ---- malloc */

static bool is_power_of_two(uint64_t n) { return !(n & (n - 1)); }

static inline uint64_t round_size(const koila_cache_config *conf, uint64_t n)
{
    if (n < UNIT) return UNIT;
    uint32_t log = 63 - (uint32_t)__builtin_clzll(n), entry = log <= 20 ? 0 : log >= 35 ? 15 : log - 20;
    const uint64_t d = conf->divisions[entry];
    if (d > 1 && n > UNIT * d) {
        if (is_power_of_two(n)) return n;
        const uint64_t step = ((uint64_t)1 << log) / d;
        return (n + step - 1) & ~(step - 1);
    }
    return (n + UNIT - 1) & ~(UNIT - 1);
}

static inline uint64_t segment_size(const koila_cache_config *conf, uint64_t r)
{
    return r <= SMALL_MAX ? SMALL_SEGMENT : r < LARGE_EXACT ? conf->large_segment_bytes : granules(r);
}

void koila_cache_sizes(const koila_cache_config *c, uint64_t n, uint64_t *rounded, uint64_t *new_segment)
{
    uint64_t r = n && n < REQUEST_MAX ? round_size(c, n) : 0;
    if (rounded) *rounded = r;
    if (new_segment) *new_segment = r ? segment_size(c, r) : 0;
}

typedef struct request {
    uint64_t bytes, r, segment;
    uint32_t lane;
    bool small, expandable;
} request;

static inline bool collects(const koila_cache *c) { return c->s.cap && c->conf.gc_threshold > 0.0; }

/* The free block torch would take, left in its lane; 0 = miss. */
static inline uint32_t search(const koila_cache *c, uint32_t lane_i, const request *q)
{
    const lane *l = c->lanes[lane_i];
    const uint64_t r = q->r, max_split = c->conf.max_split_bytes;
    uint32_t b = lane_at_least(c, l, r, 0);
    if (!b) return 0;
    if (c->s.n_reservations && in_expandable(c, b)) {
        if (c->s.expandable) {
            /* a block counts at the size it can grow to */
            uint64_t grown = 0;
            for (uint32_t at = b, prev = 0; at; prev = at, at = lane_next(c, l, at)) {
                const block *x = &c->blocks[at];
                uint64_t size = x->size + (x->next && c->blocks[x->next].state == KOILA_BLOCK_UNMAPPED ? c->blocks[x->next].size : 0);
                if (prev && size >= grown) break;
                b = at;
                grown = size;
                if (!in_expandable(c, at)) break;
            }
        } else {
            do b = lane_next(c, l, b);
            while (b && in_expandable(c, b));
            if (!b) return 0;
        }
    }
    const uint64_t size = c->blocks[b].size;
    if (r < max_split && size >= max_split) return 0;
    if (r >= max_split && size >= r + c->conf.max_non_split_rounding_bytes) return 0;
    return b;
}

/* Hand out a block that is in no lane. */
static inline uint64_t hand_out(koila_cache *c, uint32_t b, const request *q)
{
    block *x = wr(c, b);
    const bool small = is_small(c, b), was_split = !is_alone(c, b), expandable = in_expandable(c, b);
    const uint64_t rest = x->size - q->r;
    const uint32_t lane_i = x->lane;
    bool split = small || q->expandable ? rest >= UNIT : q->r < c->conf.max_split_bytes && rest > MIB;
    if (pool_of(c, b)->flags & KOILA_POOL_NO_SPLIT) split = false;
    if (split) {
        uint32_t high = block_new(c, x->seg, lane_i, x->addr + q->r, rest);
        splice(c, high, b, c->blocks[b].next);
        x = wr(c, b);
        x->size = q->r;
        free_insert(c, high);
        if (was_split && !expandable) {
            stat_down(c, KOILA_STAT_INACTIVE_SPLIT_BYTES, small, q->r);
        } else if (!expandable) {
            stat_up(c, KOILA_STAT_INACTIVE_SPLIT_BYTES, small, rest);
            stat_up(c, KOILA_STAT_INACTIVE_SPLIT, small, 1);
        }
    } else if (was_split && !expandable) {
        stat_down(c, KOILA_STAT_INACTIVE_SPLIT_BYTES, small, x->size);
        stat_down(c, KOILA_STAT_INACTIVE_SPLIT, small, 1);
    }
    x = wr(c, b);
    x->state = KOILA_BLOCK_USED;
    x->requested = q->bytes;
    x->uses = 0;
    hash_put(c, x->addr, b);
    tell(c, KOILA_EVENT_ALLOC, x->addr, q->bytes, lane_i);
    stat_up(c, KOILA_STAT_ALLOCATION, small, 1);
    stat_up(c, KOILA_STAT_ALLOCATED_BYTES, small, x->size);
    stat_up(c, KOILA_STAT_ACTIVE, small, 1);
    stat_up(c, KOILA_STAT_ACTIVE_BYTES, small, x->size);
    stat_up(c, KOILA_STAT_REQUESTED_BYTES, small, q->bytes);
    if (x->size >= c->conf.max_split_bytes) up(&c->s.stat.oversize_allocations, 1);
    return x->addr;
}

static bool over_cap(const koila_cache *c, uint64_t n) { return c->s.cap && (reserved(c) > c->s.cap || n > c->s.cap - reserved(c)); }

/* Step 6: a new segment, or more pages. The block is in no lane; 0 = failed. */
static uint32_t new_segment(koila_cache *c, const request *q)
{
    if (over_cap(c, q->segment)) return 0;
    if (q->expandable) return expand(c, q->lane, q->r);
    const lane *l = c->lanes[q->lane];
    uint64_t addr = c->s.next_addr;
    if (!c->driver.give && addr > SPACE_MAX - granules(q->segment)) return 0;
    if (!driver_gives(c, KOILA_EVENT_SEGMENT_ALLOC, q->segment, l->stream, &addr)) return 0;
    if (!c->driver.give) c->s.next_addr += granules(q->segment);
    uint32_t s = seg_new(c, q->lane, addr, q->segment, false);
    stat_up(c, KOILA_STAT_SEGMENT, q->small, 1);
    stat_up(c, KOILA_STAT_RESERVED_BYTES, q->small, q->segment);
    if (q->segment >= c->conf.max_split_bytes) up(&c->s.stat.oversize_segments, 1);
    c->s.stat.num_device_alloc++;
    device_up(c, granules(q->segment));
    tell(c, KOILA_EVENT_SEGMENT_ALLOC, addr, q->segment, q->lane);
    return c->segs[s].first;
}

static uint32_t search_oom_pools(koila_cache *c, const request *q)
{
    const lane *own = c->lanes[q->lane];
    if (own->pool >> 1) return 0; /* default pool only */
    for (uint32_t i = 1; i < c->n_pools; i++) {
        if (!(c->pools[i].flags & KOILA_POOL_USE_ON_OOM)) continue;
        uint32_t lane_i = lane_find(c, &c->pools[i], q->small, own->stream);
        uint32_t b = lane_i == NO_LANE ? 0 : search(c, lane_i, q);
        if (b) return free_erase(c, b), b;
    }
    return 0;
}

/* Steps 5 to 10, when no free block fits. */
static uint32_t make_room(koila_cache *c, const request *q)
{
    const uint32_t rules = c->conf.rules;
    if (collects(c)) collect_if_needed(c);
    uint32_t b = new_segment(c, q);
    if (b) return b;
    if ((rules & KOILA_RULE_OOM_REJECT) && c->conf.oom_reject && over_cap(c, q->segment)) {
        c->s.stat.num_oom_rejections++;
        return 0;
    }
    if ((rules & KOILA_RULE_OOM_POOLS_FIRST) && (b = search_oom_pools(c, q))) return b;
    if (release_available(c, q->lane, q->r) && (b = new_segment(c, q))) return b;
    const bool held_back = c->s.n_captures || (c->s.n_routings && !(rules & KOILA_RULE_ROUTING_KEEPS_RETRY));
    if (!held_back) {
        release_all(c);
        if ((rules & KOILA_RULE_SEARCH_AFTER_RELEASE) && (b = search(c, q->lane, q))) return free_erase(c, b), b;
        c->s.stat.num_alloc_retries++;
        if ((b = new_segment(c, q))) return b;
    }
    if (rules & KOILA_RULE_OOM_POOLS_LAST) b = search_oom_pools(c, q);
    return b;
}

static koila_status prepare(koila_cache *c, uint64_t bytes, uint64_t stream, koila_pool id, request *q)
{
    if (!reserve(c)) return KOILA_NO_MEMORY;
    pool *p = id.owner || id.id ? pool_get(c, id) : &c->pools[0];
    if (!p) return KOILA_NO_MEMORY;
    q->bytes = bytes;
    q->r = round_size(&c->conf, bytes);
    q->small = q->r <= SMALL_MAX;
    q->segment = segment_size(&c->conf, q->r);
    q->expandable = c->s.expandable && !(p->flags & KOILA_POOL_USER_ALLOCATOR);
    const uint32_t *list = p->lanes[q->small];
    q->lane = p->n_lanes[q->small] && c->lanes[list[0]]->stream == stream ? list[0] : lane_get(c, p, q->small, stream);
    return q->lane == NO_LANE ? KOILA_NO_MEMORY : KOILA_OK;
}

static inline void count_search(koila_cache *c, const request *q)
{
    if (collects(c)) wr_pool(c, c->lanes[q->lane]->pool >> 1)->n_searches[q->small]++;
}

koila_status koila_cache_malloc(koila_cache *c, uint64_t bytes, uint64_t stream, koila_pool id, uint64_t *addr)
{
    koila_check(koila__cache_check(c));
    if (bytes == 0) return *addr = 0, KOILA_OK;
    if (bytes >= REQUEST_MAX) return KOILA_OOM;
    request q;
    KOILA_TRY(prepare(c, bytes, stream, id, &q));
    if (c->conf.completion == KOILA_COMPLETE_BEST && !c->s.n_captures && !c->s.n_routings) complete_pending(c);
    count_search(c, &q);
    uint32_t b = search(c, q.lane, &q);
    if (b) free_erase(c, b);
    else b = make_room(c, &q);
    if (!b) {
        c->s.stat.num_ooms++;
        tell(c, KOILA_EVENT_OOM, 0, q.r, q.lane);
        koila_check(koila__cache_check(c));
        return KOILA_OOM;
    }
    *addr = hand_out(c, b, &q);
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

koila_status koila__cache_malloc_at(koila_cache *c, uint64_t bytes, uint64_t stream, koila_pool id, uint64_t expected)
{
    request q;
    if (bytes == 0 || bytes >= REQUEST_MAX) return KOILA_BAD_ARGUMENT;
    KOILA_TRY(prepare(c, bytes, stream, id, &q));
    uint32_t b = search(c, q.lane, &q);
    if (!b || c->blocks[b].addr != expected) return KOILA_BAD_ARGUMENT;
    count_search(c, &q);
    free_erase(c, b);
    hand_out(c, b, &q);
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

/* ---- the other calls */

koila_status koila_cache_release(koila_cache *c, uint64_t addr)
{
    if (!addr) return KOILA_OK;
    uint32_t b = hash_find(c, addr);
    if (!b || c->blocks[b].state != KOILA_BLOCK_USED) return KOILA_BAD_ARGUMENT;
    if (c->n_marks && !reserve(c)) return KOILA_NO_MEMORY;
    block *x = wr(c, b);
    const bool small = is_small(c, b);
    x->state = DEAD;
    stat_down(c, KOILA_STAT_ALLOCATION, small, 1);
    stat_down(c, KOILA_STAT_ALLOCATED_BYTES, small, x->size);
    tell(c, KOILA_EVENT_FREE_REQUESTED, x->addr, x->requested, x->lane);
    if (x->size >= c->conf.max_split_bytes) down(&c->s.stat.oversize_allocations, 1);
    if (x->uses) queue_put(c, b);
    else complete(c, b);
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

koila_status koila_cache_record_stream(koila_cache *c, uint64_t addr, uint64_t stream)
{
    uint32_t b = hash_find(c, addr);
    if (!b || c->blocks[b].state != KOILA_BLOCK_USED) return KOILA_BAD_ARGUMENT;
    if (c->lanes[c->blocks[b].lane]->stream == stream) return KOILA_OK;
    for (uint32_t u = c->blocks[b].uses; u; u = c->uses[u].next)
        if (c->uses[u].stream == stream) return KOILA_OK;
    if (!reserve(c)) return KOILA_NO_MEMORY;
    uint32_t u = c->s.dead_use;
    if (u) c->s.dead_use = c->uses[u].next;
    else u = c->s.n_uses++;
    *wr_use(c, u) = (use){ stream, c->blocks[b].uses };
    wr(c, b)->uses = u;
    return KOILA_OK;
}

koila_status koila_cache_complete(koila_cache *c, uint64_t addr)
{
    uint32_t b = hash_find(c, addr);
    if (!b || c->blocks[b].state != KOILA_BLOCK_PENDING) return KOILA_BAD_ARGUMENT;
    if (c->n_marks && !reserve(c)) return KOILA_NO_MEMORY;
    queue_take(c, b);
    complete(c, b);
    return KOILA_OK;
}

void koila_cache_sync(koila_cache *c)
{
    if (c->n_marks && !reserve(c)) return;
    complete_pending(c);
    koila_check(koila__cache_check(c));
}

koila_status koila_cache_empty(koila_cache *c)
{
    if (!reserve(c)) return KOILA_NO_MEMORY;
    release_all(c);
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

koila_status koila_cache_set_limit(koila_cache *c, uint64_t total, uint64_t outside, uint64_t cap)
{
    c->s.total = total;
    c->s.outside = outside;
    c->s.cap = cap;
    return KOILA_OK;
}

void koila_cache_set_expandable(koila_cache *c, bool on) { c->s.expandable = on; }
void koila__cache_set_driver(koila_cache *c, const koila__cache_driver *driver) { c->driver = driver ? *driver : (koila__cache_driver){ 0 }; }
void koila__cache_set_settings(koila_cache *c, const koila_cache_config *conf)
{
    c->conf = *conf;
    c->s.expandable = conf->expandable;
}

koila_status koila_cache_pool_hold(koila_cache *c, koila_pool id, uint32_t flags)
{
    if (!id.owner && !id.id) return KOILA_BAD_ARGUMENT;
    if (!reserve(c)) return KOILA_NO_MEMORY;
    pool *p = pool_get(c, id);
    if (!p) return KOILA_NO_MEMORY;
    p = wr_pool(c, (uint32_t)(p - c->pools));
    if (!(c->conf.rules & KOILA_RULE_NO_SPLIT_POOLS)) flags &= ~(uint32_t)KOILA_POOL_NO_SPLIT;
    p->flags |= flags;
    p->n_holders++;
    return KOILA_OK;
}

koila_status koila_cache_pool_drop(koila_cache *c, koila_pool id)
{
    pool *p = id.owner || id.id ? pool_find(c, id) : NULL;
    if (!p || !p->n_holders) return KOILA_BAD_ARGUMENT;
    if (!reserve(c)) return KOILA_NO_MEMORY;
    wr_pool(c, (uint32_t)(p - c->pools))->n_holders--;
    return KOILA_OK;
}

void koila_cache_set_capturing(koila_cache *c, uint32_t n_captures, uint32_t n_routings)
{
    c->s.n_captures = n_captures;
    c->s.n_routings = n_routings;
}

void koila_cache_observe(koila_cache *c, koila_event_fn f, void *user)
{
    c->observer = f;
    c->observer_user = user;
}

void koila_cache_stats(const koila_cache *c, koila_cache_stat *out)
{
    size_t n = out->struct_size && out->struct_size < sizeof *out ? out->struct_size : sizeof *out;
    memcpy(out, &c->s.stat, n);
    out->struct_size = (uint32_t)n;
}

bool koila__cache_is_out(const koila_cache *c, uint64_t addr) { return hash_find(c, addr) != 0; }
const koila_cache_stat *koila__cache_stats_ref(const koila_cache *c) { return &c->s.stat; }

bool koila_cache_stat_at(const koila_cache_stat *s, size_t i, char name[64], uint64_t *value)
{
    static const char *const kinds[] = {
#define KEY(name, key) key,
        KOILA_CACHE_STAT_MAP(KEY)
#undef KEY
    };
    static const char *const pools[] = { "all", "small_pool", "large_pool" }, *const fields[] = { "current", "peak", "allocated", "freed" };
    static const char *const single[] = { "num_alloc_retries", "num_ooms", "num_oom_rejections", "num_device_alloc", "num_device_free", "num_sync_all_streams" };
    const size_t n_of = KOILA_N_STATS * KOILA_N_STAT_POOLS * 4;
    const koila_counter *k;
    if (i < n_of) {
        k = &s->of[i / 12][i / 4 % 3];
        snprintf(name, 64, "%s.%s.%s", kinds[i / 12], pools[i / 4 % 3], fields[i % 4]);
    } else if (i < n_of + 8) {
        k = i < n_of + 4 ? &s->oversize_allocations : &s->oversize_segments;
        snprintf(name, 64, "oversize_%s.%s", i < n_of + 4 ? "allocations" : "segments", fields[i % 4]);
    } else if (i < n_of + 8 + KOILA_COUNT(single)) {
        const uint64_t values[] = { s->num_alloc_retries, s->num_ooms, s->num_oom_rejections, s->num_device_alloc, s->num_device_free, s->num_sync_all_streams };
        snprintf(name, 64, "%s", single[i - n_of - 8]);
        *value = values[i - n_of - 8];
        return true;
    } else {
        return false;
    }
    *value = i % 4 == 0 ? k->current : i % 4 == 1 ? k->peak : i % 4 == 2 ? k->allocated : k->freed;
    return true;
}

/* ---- what-if */

uint64_t koila_cache_mark(koila_cache *c)
{
    if (!grow(c, &c->marks, &c->marks_cap, c->n_marks + 1, sizeof(mark))) return 0;
    c->n_marks++;
    if (!reserve(c)) {
        c->n_marks--;
        return 0;
    }
    c->marks[c->n_marks - 1] = (mark){ c->next_mark, c->log_n, c->s };
    c->epoch++;
    return c->next_mark++;
}

static uint32_t mark_find(const koila_cache *c, uint64_t id)
{
    for (uint32_t i = c->n_marks; i > 0; i--)
        if (c->marks[i - 1].id == id) return i;
    return 0;
}

koila_status koila_cache_rewind(koila_cache *c, uint64_t id)
{
    uint32_t m = mark_find(c, id);
    if (!m) return KOILA_BAD_ARGUMENT;
    const mark *to = &c->marks[m - 1];
    while (c->log_n > to->log_at) {
        const uint64_t head = c->log[--c->log_n], index = head & (((uint64_t)1 << 56) - 1);
        uint64_t addr;
        uint32_t root;
        saved_pool sp;
        pool *p;
#define POP(p, type) (c->log_n -= WORDS(type), (void)memcpy((p), c->log + c->log_n, sizeof(type)))
        switch (head >> 56) {
        case LOG_BLOCK: POP(&c->blocks[index], block); break;
        case LOG_SEG: POP(&c->segs[index], segment); break;
        case LOG_USE: POP(&c->uses[index], use); break;
        case LOG_HASHED:
            POP(&addr, uint64_t);
            hash_drop_raw(c, addr);
            break;
        case LOG_UNHASHED:
            POP(&addr, uint64_t);
            hash_put_raw(c, addr, (uint32_t)index);
            break;
        case LOG_ROOT:
            POP(&root, uint32_t);
            set_root_raw(c->lanes[index >> 12], index & 4095, root);
            break;
        default:
            POP(&sp, saved_pool);
            p = &c->pools[index];
            p->n_holders = sp.n_holders;
            p->flags = sp.flags;
            p->n_segments = sp.n_segments;
            memcpy(p->n_searches, sp.n_searches, sizeof sp.n_searches);
        }
#undef POP
    }
    c->s = to->s;
    c->n_marks = m;
    c->epoch++; /* tags of this epoch were restored to older ones, or belong to slots that do not exist any more */
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

koila_status koila_cache_forget(koila_cache *c, uint64_t id)
{
    uint32_t m = mark_find(c, id);
    if (!m) return KOILA_BAD_ARGUMENT;
    c->n_marks = m - 1;
    if (!c->n_marks) c->log_n = 0;
    return KOILA_OK;
}

/* ---- looking */

koila_status koila_cache_walk(const koila_cache *c, koila_block_fn f, void *user)
{
    uint32_t n = 0;
    if (c->s.n_segs <= 1) return KOILA_OK;
    uint32_t *order = koila__realloc(&c->mem, NULL, 0, c->s.n_segs * sizeof *order);
    if (!order) return KOILA_NO_MEMORY;
    for (uint32_t i = 1; i < c->s.n_segs; i++)
        if (c->segs[i].first) order[n++] = i;
    /* heap sort: no recursion, no worst case */
    for (uint32_t end = n, start = n / 2; end > 1;) {
        if (start) start--;
        else {
            end--;
            uint32_t t = order[0];
            order[0] = order[end], order[end] = t;
        }
        for (uint32_t at = start, child; (child = 2 * at + 1) < end; at = child) {
            if (child + 1 < end && c->segs[order[child]].addr < c->segs[order[child + 1]].addr) child++;
            if (c->segs[order[at]].addr >= c->segs[order[child]].addr) break;
            uint32_t t = order[at];
            order[at] = order[child], order[child] = t;
        }
    }
    bool on = true;
    for (uint32_t i = 0; i < n && on; i++) {
        const segment *g = &c->segs[order[i]];
        const lane *l = c->lanes[g->lane];
        for (uint32_t b = g->first; b && on; b = c->blocks[b].next) {
            const block *x = &c->blocks[b];
            koila_block out = { x->addr, x->size, x->requested, (koila_block_state)x->state, i, l->stream, c->pools[l->pool >> 1].id, l->pool & 1, g->expandable };
            on = f(user, &out);
        }
    }
    koila__release(&c->mem, order, c->s.n_segs * sizeof *order);
    return KOILA_OK;
}

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}
typedef struct hashing {
    uint64_t h;
} hashing;
static bool mix_block(void *user, const koila_block *b)
{
    hashing *x = user;
    const uint64_t v[] = { b->addr, b->size, b->requested, b->state, b->stream, b->pool.owner, b->pool.id, b->is_small, b->is_expandable };
    for (size_t i = 0; i < KOILA_COUNT(v); i++) x->h = mix(x->h, v[i]);
    return true;
}

uint64_t koila__cache_fingerprint(const koila_cache *c)
{
    hashing x = { 1469598103934665603u };
    if (koila_cache_walk(c, mix_block, &x) != KOILA_OK) return 0;
    char name[64];
    uint64_t value;
    for (size_t i = 0; koila_cache_stat_at(&c->s.stat, i, name, &value); i++) x.h = mix(x.h, value);
    for (uint32_t b = c->s.pending_first; b; b = c->blocks[b].link[1]) x.h = mix(x.h, c->blocks[b].addr);
    for (uint32_t i = 1; i < c->s.n_slots_used; i++) {
        const block *b = &c->blocks[i];
        if (b->state == KOILA_BLOCK_USED || b->state == KOILA_BLOCK_PENDING) {
            x.h += mix(b->addr, hash_find(c, b->addr) == i);
            for (uint32_t u = b->uses; u; u = c->uses[u].next) x.h += mix(c->uses[u].stream, b->addr);
        } else if (b->state == KOILA_BLOCK_FREE) {
            const lane *l = c->lanes[b->lane];
            x.h += mix(c->pools[l->pool >> 1].n_searches[l->pool & 1] - b->born, b->addr);
        }
    }
    const uint64_t v[] = { c->s.next_addr, c->s.total, c->s.outside, c->s.cap, c->s.n_out, c->s.stat.device_bytes, c->s.stat.peak_device_bytes, c->s.expandable };
    for (size_t i = 0; i < KOILA_COUNT(v); i++) x.h = mix(x.h, v[i]);
    return x.h;
}

bool koila__cache_check(const koila_cache *c)
{
#define HOLDS(e)                                                                                              \
    do {                                                                                                      \
        if (!(e)) return false;                                                                               \
    } while (0)
    uint64_t bytes[KOILA_BLOCK_UNMAPPED + 1] = { 0 }, count[KOILA_BLOCK_UNMAPPED + 1] = { 0 };
    uint64_t n_split = 0, split_bytes = 0, n_plain = 0, plain_bytes = 0, device = 0, mapped = 0, n_out = 0, requested = 0;
    for (uint32_t s = 1; s < c->s.n_segs; s++) {
        const segment *g = &c->segs[s];
        if (!g->first) continue;
        uint64_t at = g->addr;
        uint32_t prev = 0;
        for (uint32_t b = g->first; b; prev = b, b = c->blocks[b].next) {
            const block *x = &c->blocks[b];
            HOLDS(x->addr == at && x->size > 0 && x->prev == prev && x->seg == s && x->lane == g->lane && x->state <= KOILA_BLOCK_UNMAPPED);
            const bool room = x->state == KOILA_BLOCK_FREE || x->state == KOILA_BLOCK_UNMAPPED;
            HOLDS(!prev || !room || c->blocks[prev].state != x->state);
            HOLDS(x->state != KOILA_BLOCK_UNMAPPED || g->expandable);
            if (room) HOLDS(!x->uses && !x->requested);
            else HOLDS(hash_find(c, x->addr) == b);
            n_out += !room;
            requested += x->requested;
            if (x->state == KOILA_BLOCK_FREE && !g->expandable && !is_alone(c, b)) n_split++, split_bytes += x->size;
            bytes[x->state] += x->size;
            count[x->state]++;
            if (g->expandable && x->state != KOILA_BLOCK_UNMAPPED) mapped += x->size;
            at += x->size;
        }
        HOLDS(at == g->addr + g->size);
        if (!g->expandable) n_plain++, plain_bytes += g->size, device += granules(g->size);
    }
    const koila_cache_stat *s = &c->s.stat;
    for (int k = 0; k < KOILA_N_STATS; k++) {
        const koila_counter *all = &s->of[k][KOILA_STAT_ALL], *small = &s->of[k][KOILA_STAT_SMALL], *large = &s->of[k][KOILA_STAT_LARGE];
        HOLDS(all->current == small->current + large->current && all->allocated == small->allocated + large->allocated);
        HOLDS(all->current == all->allocated - all->freed && all->current <= all->peak);
    }
#define NOW(kind) s->of[KOILA_STAT_##kind][KOILA_STAT_ALL].current
    HOLDS(NOW(RESERVED_BYTES) == plain_bytes + mapped && NOW(SEGMENT) == n_plain);
    HOLDS(NOW(ALLOCATED_BYTES) == bytes[KOILA_BLOCK_USED] && NOW(ALLOCATION) == count[KOILA_BLOCK_USED]);
    HOLDS(NOW(ACTIVE_BYTES) == bytes[KOILA_BLOCK_USED] + bytes[KOILA_BLOCK_PENDING] && NOW(ACTIVE) == count[KOILA_BLOCK_USED] + count[KOILA_BLOCK_PENDING]);
    HOLDS(NOW(REQUESTED_BYTES) == requested && NOW(ALLOCATED_BYTES) <= NOW(ACTIVE_BYTES) && NOW(ACTIVE_BYTES) <= NOW(RESERVED_BYTES));
    HOLDS(NOW(INACTIVE_SPLIT) == n_split && NOW(INACTIVE_SPLIT_BYTES) == split_bytes);
    HOLDS(s->device_bytes >= device && n_out == c->s.n_out);
#undef NOW
    uint64_t n_free = 0, n_unmapped = 0, n_pending = 0;
    for (uint32_t i = 0; i < c->n_lanes; i++) {
        const lane *l = c->lanes[i];
        for (uint32_t b = lane_at_least(c, l, 0, 0), next; b; b = next) {
            HOLDS(c->blocks[b].state == KOILA_BLOCK_FREE && c->blocks[b].lane == i);
            next = lane_next(c, l, b);
            HOLDS(!next || before(&c->blocks[b], &c->blocks[next], true));
            HOLDS(++n_free <= count[KOILA_BLOCK_FREE]);
        }
        for (uint32_t b = unmapped_at_least(c, l, 0); b; b = unmapped_at_least(c, l, c->blocks[b].addr + 1)) {
            HOLDS(c->blocks[b].state == KOILA_BLOCK_UNMAPPED && c->blocks[b].lane == i);
            HOLDS(++n_unmapped <= count[KOILA_BLOCK_UNMAPPED]);
        }
    }
    for (uint32_t b = c->s.pending_first; b; b = c->blocks[b].link[1]) {
        HOLDS(c->blocks[b].state == KOILA_BLOCK_PENDING && ++n_pending <= count[KOILA_BLOCK_PENDING]);
    }
    HOLDS(n_free == count[KOILA_BLOCK_FREE] && n_unmapped == count[KOILA_BLOCK_UNMAPPED] && n_pending == count[KOILA_BLOCK_PENDING]);
#undef HOLDS
    return true;
}

void koila__cache_break(koila_cache *c)
{
    for (uint32_t i = 1; i < c->s.n_slots_used; i++) {
        if (c->blocks[i].state > KOILA_BLOCK_UNMAPPED) continue;
        c->blocks[i].size -= UNIT;
        return;
    }
}

/* ---- birth and death */

static koila_status check_config(const koila_cache_config *c, koila_error *e)
{
    if (c->struct_size != sizeof *c) return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "koila_cache_config.struct_size: call koila_cache_config_init first");
    if (c->large_segment_bytes <= 10 * MIB || c->large_segment_bytes > (uint64_t)1 << 50 || c->large_segment_bytes % UNIT)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "large_segment_bytes out of range");
    if (c->max_split_bytes < c->large_segment_bytes) return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "max_split_bytes below large_segment_bytes");
    if (c->first_address >= SPACE_MAX / 2 || c->total_bytes > SPACE_MAX || c->device_bytes > SPACE_MAX / 4) return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "a size of 2^60 or more");
    if (!(c->gc_threshold >= 0.0 && c->gc_threshold < 1.0)) return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "gc_threshold outside [0, 1)");
    for (int i = 0; i < 16; i++)
        if (!is_power_of_two(c->divisions[i]) || c->divisions[i] > 1u << 30) return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "divisions[%d] is no power of two", i);
    if (c->expandable && !(c->rules & KOILA_RULE_SKIP_EXPANDABLE) && (c->max_split_bytes != KOILA_NO_LIMIT || c->gc_threshold > 0.0))
        return koila__fail(e, KOILA_UNSUPPORTED, 0, "torch %u.%u can crash with expandable_segments and %s together (fixed in 2.9)", c->torch_version / 100, c->torch_version % 100,
                           c->gc_threshold > 0.0 ? "garbage_collection_threshold" : "max_split_size_mb");
    return KOILA_OK;
}

koila_status koila_cache_new(const koila_cache_config *conf, const koila_allocator *mem, koila_cache **out, koila_error *e)
{
    KOILA_TRY(check_config(conf, e));
    koila_allocator m = koila__allocator(mem);
    koila_cache *c = koila__realloc(&m, NULL, 0, sizeof *c);
    if (!c) return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    memset(c, 0, sizeof *c);
    c->mem = m;
    c->conf = *conf;
    c->s = (scalars){ .total = conf->total_bytes, .outside = conf->outside_bytes, .cap = conf->cap_bytes, .next_addr = conf->first_address,
                      .n_slots_used = 1, .n_segs = 1, .n_uses = 1, .expandable = conf->expandable };
    c->s.stat.struct_size = (uint32_t)sizeof c->s.stat;
    c->epoch = 1;
    c->next_mark = 1;
    if (!pool_get(c, KOILA_POOL_DEFAULT) || !reserve(c)) {
        koila_cache_free(c);
        return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    }
    memset(&c->blocks[0], 0, sizeof(block));
    c->blocks[0].state = DEAD; /* "no block" is nobody's free neighbour */
    *out = c;
    return KOILA_OK;
}

void koila_cache_free(koila_cache *c)
{
    if (!c) return;
    koila_allocator m = c->mem;
    for (uint32_t i = 0; i < c->n_lanes; i++) koila__release(&m, c->lanes[i], lane_bytes(c->lanes[i]->binned));
    for (uint32_t i = 0; i < c->n_pools; i++)
        for (int small = 0; small < 2; small++) koila__release(&m, c->pools[i].lanes[small], c->pools[i].lanes_cap[small] * sizeof(uint32_t));
    koila__release(&m, c->lanes, c->lanes_cap * sizeof(lane *));
    koila__release(&m, c->pools, c->pools_cap * sizeof(pool));
    koila__release(&m, c->blocks, c->blocks_cap * sizeof(block));
    koila__release(&m, c->segs, c->segs_cap * sizeof(segment));
    koila__release(&m, c->uses, c->uses_cap * sizeof(use));
    koila__release(&m, c->hash, c->hash ? sizeof(slot) << c->hash_bits : 0);
    koila__release(&m, c->log, (size_t)c->log_cap * 8);
    koila__release(&m, c->marks, c->marks_cap * sizeof(mark));
    koila__release(&m, c, sizeof *c);
}

/* ---- a cache in a given state */

static koila_status bad_segment(koila_error *e, size_t i, const koila_segment *s, const char *what)
{
    return koila__fail(e, KOILA_BAD_INPUT, i, "segment 0x%llx: %s", (unsigned long long)s->addr, what);
}

static koila_status check_segment(const koila_segment *s, size_t i, koila_error *e)
{
    if (s->size == 0 || s->size >= REQUEST_MAX || s->addr == 0 || s->addr >= SPACE_MAX || s->addr + s->size > SPACE_MAX) return bad_segment(e, i, s, "address or size out of range");
    char sum[KOILA_GROUPED], size[KOILA_GROUPED];
    uint64_t at = s->addr;
    for (size_t k = 0; k < s->n_blocks; k++) {
        const koila_block *b = &s->blocks[k];
        if (b->size == 0 || b->addr != at || b->size > s->size - (at - s->addr) || b->requested >= REQUEST_MAX) return bad_segment(e, i, s, "blocks do not tile it");
        if (b->state > KOILA_BLOCK_PENDING) return bad_segment(e, i, s, "a block's state is not known");
        at += b->size;
    }
    if (at - s->addr != s->size)
        return koila__fail(e, KOILA_BAD_INPUT, i, "segment 0x%llx: blocks sum to %s, segment is %s", (unsigned long long)s->addr, koila__grouped(at - s->addr, sum), koila__grouped(s->size, size));
    return KOILA_OK;
}

/* Cut `size` bytes at the end of the segment's last block off into a block of their own; the first call takes the whole. */
static koila_status load_block(koila_cache *c, uint32_t *last, uint64_t size, uint64_t requested, uint32_t state)
{
    if (!reserve(c)) return KOILA_NO_MEMORY;
    uint32_t b = *last; /* holds all that is left */
    const uint64_t rest = c->blocks[b].size - size;
    uint32_t seg = c->blocks[b].seg, lane_i = c->blocks[b].lane, next = 0;
    if (rest) {
        next = block_new(c, seg, lane_i, c->blocks[b].addr + size, rest);
        splice(c, next, b, 0);
        c->blocks[b].size = size;
    }
    *last = next;
    const bool small = is_small(c, b);
    c->blocks[b].requested = requested;
    if (state == KOILA_BLOCK_FREE || state == KOILA_BLOCK_UNMAPPED) {
        c->blocks[b].requested = 0;
        try_merge(c, b, c->blocks[b].prev, (koila_block_state)state);
        c->blocks[b].state = state;
        if (state == KOILA_BLOCK_FREE) free_insert(c, b);
        else tree_insert(c, b, UNMAPPED_BIN);
        return KOILA_OK;
    }
    c->blocks[b].state = KOILA_BLOCK_USED;
    hash_put(c, c->blocks[b].addr, b);
    if (state == KOILA_BLOCK_USED) {
        stat_up(c, KOILA_STAT_ALLOCATION, small, 1);
        stat_up(c, KOILA_STAT_ALLOCATED_BYTES, small, size);
        if (size >= c->conf.max_split_bytes) up(&c->s.stat.oversize_allocations, 1);
    } else {
        queue_put(c, b);
    }
    stat_up(c, KOILA_STAT_ACTIVE, small, 1);
    stat_up(c, KOILA_STAT_ACTIVE_BYTES, small, size);
    stat_up(c, KOILA_STAT_REQUESTED_BYTES, small, requested);
    return KOILA_OK;
}

static koila_status load_blocks(koila_cache *c, uint32_t *last, const koila_segment *s)
{
    for (size_t k = 0; k < s->n_blocks; k++) KOILA_TRY(load_block(c, last, s->blocks[k].size, s->blocks[k].requested, s->blocks[k].state));
    return KOILA_OK;
}

static bool same_lane(const koila_segment *a, const koila_segment *b)
{
    return a->is_expandable && b->is_expandable && a->is_small == b->is_small && a->stream == b->stream && a->pool.owner == b->pool.owner && a->pool.id == b->pool.id;
}

/* `list` ascending. Loads list[i], and for expandable memory what follows in the same reservation; returns how many. */
static koila_status load_segment(koila_cache *c, const koila_segment **list, size_t n, size_t *used)
{
    const koila_segment *s = list[0];
    if (!reserve(c)) return KOILA_NO_MEMORY;
    pool *p = pool_get(c, s->pool);
    uint32_t lane_i = p ? lane_get(c, p, s->is_small, s->stream) : NO_LANE;
    if (lane_i == NO_LANE) return KOILA_NO_MEMORY;
    uint64_t size = s->size;
    *used = 1;
    if (s->is_expandable) {
        const uint64_t page = page_of(c, s->is_small), t = c->conf.device_bytes ? c->conf.device_bytes : c->s.total ? c->s.total : 24 * KIB * MIB;
        uint64_t space = (t + t / 8 + page - 1) / page * page;
        while (*used < n && same_lane(s, list[*used]) && list[*used]->addr - s->addr + list[*used]->size <= space && (list[*used]->addr - s->addr) % page == 0) ++*used;
        const uint64_t end = list[*used - 1]->addr + list[*used - 1]->size - s->addr; /* last byte in use */
        if (*used < n && space > list[*used]->addr - s->addr) space = (list[*used]->addr - s->addr) / page * page;
        if (s->addr + space > SPACE_MAX) space = SPACE_MAX - s->addr;
        size = space < end ? end : space;
    }
    uint32_t seg = seg_new(c, lane_i, s->addr, size, s->is_expandable), last = c->segs[seg].first;
    uint64_t at = s->addr;
    for (size_t i = 0; i < *used; i++) {
        if (list[i]->addr > at) KOILA_TRY(load_block(c, &last, list[i]->addr - at, 0, KOILA_BLOCK_UNMAPPED));
        KOILA_TRY(load_blocks(c, &last, list[i]));
        at = list[i]->addr + list[i]->size;
        stat_up(c, KOILA_STAT_RESERVED_BYTES, s->is_small, list[i]->size);
        device_up(c, granules(list[i]->size));
    }
    if (last) KOILA_TRY(load_block(c, &last, c->blocks[last].size, 0, KOILA_BLOCK_UNMAPPED));
    if (s->is_expandable) return KOILA_OK;
    stat_up(c, KOILA_STAT_SEGMENT, s->is_small, 1);
    if (s->size >= c->conf.max_split_bytes) up(&c->s.stat.oversize_segments, 1);
    for (uint32_t b = c->segs[seg].first; b; b = c->blocks[b].next) {
        if (c->blocks[b].state != KOILA_BLOCK_FREE || is_alone(c, b)) continue;
        stat_up(c, KOILA_STAT_INACTIVE_SPLIT, s->is_small, 1);
        stat_up(c, KOILA_STAT_INACTIVE_SPLIT_BYTES, s->is_small, c->blocks[b].size);
    }
    return KOILA_OK;
}

koila_status koila_cache_from_segments(const koila_cache_config *conf, const koila_allocator *mem, const koila_segment *s, size_t n, koila_cache **out, koila_error *e)
{
    for (size_t i = 0; i < n; i++) KOILA_TRY(check_segment(&s[i], i, e));
    koila_cache *c;
    KOILA_TRY(koila_cache_new(conf, mem, &c, e));
    koila_status status = KOILA_OK;
    if (n > SIZE_MAX / sizeof(koila_segment *)) return koila_cache_free(c), koila__fail(e, KOILA_BAD_ARGUMENT, 0, "too many segments");
    const koila_segment **list = n ? koila__realloc(&c->mem, NULL, 0, n * sizeof *list) : NULL;
    if (n && !list) status = KOILA_NO_MEMORY;
    for (size_t i = 0; i < n && list; i++) list[i] = &s[i];
    /* merge sort would need a copy; recordings come sorted or nearly so, hence a shell sort */
    for (size_t gap = n / 2; gap && list; gap /= 2)
        for (size_t i = gap; i < n; i++) {
            const koila_segment *x = list[i];
            size_t k = i;
            for (; k >= gap && list[k - gap]->addr > x->addr; k -= gap) list[k] = list[k - gap];
            list[k] = x;
        }
    for (size_t i = 1; i < n && !status; i++)
        if (list[i - 1]->addr + list[i - 1]->size > list[i]->addr)
            status = koila__fail(e, KOILA_BAD_INPUT, (uint64_t)(list[i] - s), "segment 0x%llx: overlaps segment 0x%llx", (unsigned long long)list[i]->addr, (unsigned long long)list[i - 1]->addr);
    for (size_t i = 0, used; i < n && !status; i += used) status = load_segment(c, list + i, n - i, &used);
    if (n && !status) {
        uint64_t end = granules(list[n - 1]->addr + list[n - 1]->size);
        for (uint32_t g = 1; g < c->s.n_segs; g++)
            if (c->segs[g].addr + c->segs[g].size > end) end = granules(c->segs[g].addr + c->segs[g].size);
        if (end > c->s.next_addr) c->s.next_addr = end;
    }
    if (list) koila__release(&c->mem, list, n * sizeof *list);
    if (status) {
        if (status == KOILA_NO_MEMORY) koila__fail(e, status, 0, "the host is out of memory");
        koila_cache_free(c);
        return status;
    }
    koila_check(koila__cache_check(c));
    *out = c;
    return KOILA_OK;
}
