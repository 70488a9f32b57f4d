/* cache_lanes.h — ordered sets of free blocks, and of unmapped ones. In a header, so that the
 * search in cache.c is one piece of code.
 *
 * Free blocks. Best fit needs "the smallest block >= r, ties to the oldest segment, then to the
 * lowest address" in an ordered set (in torch 2.12 to the oldest block; before, all are of one
 * age). One tree per lane is ten cache misses deep; so a lane has one bin per size class (32 to an
 * octave, in units of 512 B), a bitmap of non-empty bins, and in each bin a treap of the few blocks
 * there. The treap lives in the blocks (left, right), its priorities are a hash of the block's
 * index: inserting never allocates, the shape does not depend on history, and a bin of ten thousand
 * equal blocks still costs a logarithm.
 */
#ifndef KOILA_SRC_CACHE_LANES_H
#define KOILA_SRC_CACHE_LANES_H

#include "allocator/cache_state.h"

static inline uint32_t bin_of(const lane *l, uint64_t size)
{
    if (!l->binned)
        return 0;
    uint64_t u = size / UNIT;
    if (u < 32)
        return (uint32_t)u;
    uint32_t octave = 63 - (uint32_t)__builtin_clzll(u);
    uint32_t bin = 32 * (octave - 4) + (uint32_t)(u >> (octave - 5) & 31);
    return bin < N_BINS ? bin : N_BINS - 1;
}

/* Free blocks are in the order (size, age of the segment or of the block, address), unmapped ones
 * by address. */
static inline bool before(const koila_cache *c, const block *x, const block *y, bool by_size)
{
    if (by_size) {
        if (x->size != y->size)
            return x->size < y->size;
        const uint64_t x_number = c->segs[x->seg].number;
        const uint64_t y_number = c->segs[y->seg].number;
        if (x_number != y_number)
            return x_number < y_number;
        if (x->number != y->number)
            return x->number < y->number;
    }
    return x->addr < y->addr;
}

static inline uint32_t priority(uint32_t b) { return b * 2654435761u; }

static inline uint32_t root_of(const lane *l, uint32_t bin)
{
    return bin == UNMAPPED_BIN ? l->unmapped : l->root[bin];
}

static inline void set_root_raw(lane *l, uint32_t bin, uint32_t to)
{
    if (bin == UNMAPPED_BIN) {
        l->unmapped = to;
        return;
    }
    l->root[bin] = to;
    uint64_t bit = (uint64_t)1 << (bin & 63);
    uint64_t word = bin >> 6;
    if (to)
        l->bits[word] |= bit;
    else
        l->bits[word] &= ~bit;
    if (l->bits[word])
        l->words |= (uint64_t)1 << word;
    else
        l->words &= ~((uint64_t)1 << word);
}

static inline void set_link(koila_cache *c, uint32_t lane_i, uint32_t bin, uint32_t parent,
                            int side, uint32_t to)
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

static inline void tree_insert(koila_cache *c, uint32_t b, uint32_t bin)
{
    block *x = wr(c, b);
    const uint32_t lane_i = x->lane;
    const bool by_size = bin != UNMAPPED_BIN;
    uint32_t parent = 0;
    uint32_t at = root_of(c->lanes[lane_i], bin);
    int side = 0;
    while (at && priority(at) >= priority(b)) {
        parent = at;
        side = before(c, &c->blocks[at], x, by_size);
        at = c->blocks[at].link[side];
    }
    set_link(c, lane_i, bin, parent, side, b);
    /* split what hung there into what is before and after b */
    uint32_t hook[2] = { b, b };
    int hook_side[2] = { LEFT, RIGHT };
    while (at) {
        int s = before(c, &c->blocks[at], x, by_size) ? LEFT : RIGHT;
        wr(c, hook[s])->link[hook_side[s]] = at;
        hook[s] = at;
        hook_side[s] = !s;
        at = c->blocks[at].link[!s];
    }
    wr(c, hook[LEFT])->link[hook_side[LEFT]] = 0;
    wr(c, hook[RIGHT])->link[hook_side[RIGHT]] = 0;
}

static inline void tree_erase(koila_cache *c, uint32_t b, uint32_t bin)
{
    const block *x = &c->blocks[b];
    const uint32_t lane_i = x->lane;
    const bool by_size = bin != UNMAPPED_BIN;
    uint32_t parent = 0;
    uint32_t at = root_of(c->lanes[lane_i], bin);
    int side = 0;
    while (at != b) {
        koila_assert(at);
        parent = at;
        side = before(c, &c->blocks[at], x, by_size);
        at = c->blocks[at].link[side];
    }
    uint32_t l = x->link[LEFT];
    uint32_t r = x->link[RIGHT];
    while (l && r) {
        if (priority(l) >= priority(r)) {
            set_link(c, lane_i, bin, parent, side, l);
            parent = l;
            side = RIGHT;
            l = c->blocks[l].link[RIGHT];
        } else {
            set_link(c, lane_i, bin, parent, side, r);
            parent = r;
            side = LEFT;
            r = c->blocks[r].link[LEFT];
        }
    }
    set_link(c, lane_i, bin, parent, side, l ? l : r);
}

static inline void free_insert(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    const lane *l = c->lanes[x->lane];
    koila_assert(x->size > 0);
    x->state = KOILA_BLOCK_FREE;
    x->born = c->pools[l->pool >> 1].n_searches[l->pool & 1];
    tree_insert(c, b, bin_of(l, x->size));
}
static inline void free_erase(koila_cache *c, uint32_t b)
{
    tree_erase(c, b, bin_of(c->lanes[c->blocks[b].lane], c->blocks[b].size));
}

/* The first of a bin with at least `size` bytes; 0: none. */
static inline uint32_t bin_at_least(const koila_cache *c, const lane *l, uint32_t bin,
                                    uint64_t size)
{
    uint32_t best = 0;
    for (uint32_t at = l->root[bin]; at;) {
        const block *x = &c->blocks[at];
        if (x->size >= size) {
            best = at;
            at = x->link[LEFT];
        } else
            at = x->link[RIGHT];
    }
    return best;
}

/* The nearest of a bin on one side of block b, which may be in it or not; 0: none. */
static inline uint32_t bin_near(const koila_cache *c, const lane *l, uint32_t bin, uint32_t b,
                                int side)
{
    const block *y = &c->blocks[b];
    uint32_t best = 0;
    for (uint32_t at = l->root[bin]; at;) {
        const block *x = &c->blocks[at];
        const bool found = side == RIGHT ? before(c, y, x, true) : before(c, x, y, true);
        if (found)
            best = at;
        at = x->link[found ? !side : side];
    }
    return best;
}

static inline uint32_t bin_end(const koila_cache *c, const lane *l, uint32_t bin, int side)
{
    uint32_t at = l->root[bin];
    koila_assert(at); /* the bitmaps say so */
    while (c->blocks[at].link[side])
        at = c->blocks[at].link[side];
    return at;
}

/* The first block of the bins after `bin`, the last one of those before it; 0: they are empty. */
static inline uint32_t after_bin(const koila_cache *c, const lane *l, uint32_t bin)
{
    uint32_t word = (bin + 1) >> 6;
    if (!l->binned || word >= N_BIN_WORDS)
        return 0;
    uint64_t bits = l->bits[word] & (~(uint64_t)0 << ((bin + 1) & 63));
    if (!bits) {
        uint64_t words = word + 1 < 64 ? l->words & (~(uint64_t)0 << (word + 1)) : 0;
        if (!words)
            return 0;
        word = (uint32_t)__builtin_ctzll(words);
        bits = l->bits[word];
    }
    return bin_end(c, l, word * 64 + (uint32_t)__builtin_ctzll(bits), LEFT);
}
static inline uint32_t before_bin(const koila_cache *c, const lane *l, uint32_t bin)
{
    if (!bin)
        return 0;
    uint32_t word = (bin - 1) >> 6;
    uint64_t bits = l->bits[word] & (~(uint64_t)0 >> (63 - ((bin - 1) & 63)));
    if (!bits) {
        uint64_t words = l->words & (((uint64_t)1 << word) - 1);
        if (!words)
            return 0;
        word = 63 - (uint32_t)__builtin_clzll(words);
        bits = l->bits[word];
    }
    return bin_end(c, l, word * 64 + 63 - (uint32_t)__builtin_clzll(bits), RIGHT);
}

/* ---- the free blocks of a lane, in order; 0: none */

static inline uint32_t lane_at_least(const koila_cache *c, const lane *l, uint64_t size)
{
    const uint32_t bin = bin_of(l, size);
    const uint32_t found = l->root[bin] ? bin_at_least(c, l, bin, size) : 0;
    return found ? found : after_bin(c, l, bin);
}
static inline uint32_t lane_next(const koila_cache *c, const lane *l, uint32_t b)
{
    const uint32_t bin = bin_of(l, c->blocks[b].size);
    const uint32_t found = bin_near(c, l, bin, b, RIGHT);
    return found ? found : after_bin(c, l, bin);
}
static inline uint32_t lane_last(const koila_cache *c, const lane *l)
{
    return before_bin(c, l, l->binned ? N_BINS : 1);
}
static inline uint32_t lane_prev(const koila_cache *c, const lane *l, uint32_t b)
{
    const uint32_t bin = bin_of(l, c->blocks[b].size);
    const uint32_t found = bin_near(c, l, bin, b, LEFT);
    return found ? found : before_bin(c, l, bin);
}

/* first unmapped at or above an address */
static inline uint32_t unmapped_at_least(const koila_cache *c, const lane *l, uint64_t addr)
{
    uint32_t best = 0;
    for (uint32_t at = l->unmapped; at;) {
        const block *x = &c->blocks[at];
        if (x->addr >= addr) {
            best = at;
            at = x->link[LEFT];
        } else
            at = x->link[RIGHT];
    }
    return best;
}

#endif
