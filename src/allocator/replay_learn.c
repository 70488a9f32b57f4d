/* replay_learn.c — what a window leaves open about the state before it, learned from what follows.
 *
 * Two things about that state are in no file: which of two segments is the older one (from torch
 * 2.13 on, ties among free blocks go by age), and how long a block was that died in the window
 * (Note [Size of a dead block]). The first replay assumes the order of addresses and the least
 * size. Where it expects a free block to be taken or given back, and the recording has another, one
 * of two facts follows:
 *
 *   - the recording takes, or gives back, a block of the same size: its segment is the older one;
 *   - the block lies behind one whose size was assumed: that one is longer, so that what is left
 *     is too little for the request.
 *
 * With that fact the replay begins anew. A size only grows and an order is never taken back, so
 * this ends: in a replay that goes through, or in a difference from which nothing follows.
 */
#include "allocator/replay.h"

#include "base/base.h"

#define MIB ((uint64_t)1 << 20)
#define UNIT ((uint64_t)512)

/* of entries, over all replays */
enum { MAX_AGAIN = 50 * 1000 * 1000 };

void koila__learned_free(learned *l)
{
    koila__vec_free(&l->mem, &l->sizes);
    koila__vec_free(&l->mem, &l->orders);
}

uint64_t koila__learned_size(const learned *l, uint64_t addr, uint64_t least)
{
    uint64_t size = least;
    for (uint32_t i = 0; l && i < l->sizes.n; i++)
        if (l->sizes.at[i].addr == addr && l->sizes.at[i].size > size)
            size = l->sizes.at[i].size;
    return size;
}

static size_t place_of(const uint64_t *list, size_t n, uint64_t addr)
{
    size_t i = 0;
    while (i < n && list[i] != addr)
        i++;
    koila_assert(i < n);
    return i;
}

/* Puts list[from] before list[to], which comes earlier. */
static void move_before(uint64_t *list, size_t from, size_t to)
{
    const uint64_t x = list[from];
    koila_assert(to < from);
    memmove(list + to + 1, list + to, (from - to) * sizeof *list);
    list[to] = x;
}

/* Orders the addresses of segments as learned. Contradictions end too: after as many passes as
 * there are facts. */
static void put_in_order(const learned *l, uint64_t *list, size_t n)
{
    bool moved = true;
    for (uint32_t pass = 0; moved && pass <= l->orders.n; pass++) {
        moved = false;
        for (uint32_t i = 0; i < l->orders.n; i++) {
            const size_t older = place_of(list, n, l->orders.at[i].older);
            const size_t newer = place_of(list, n, l->orders.at[i].newer);
            if (older < newer)
                continue;
            move_before(list, older, newer);
            moved = true;
        }
    }
}

koila_status koila__replay_set_ages(replay *r)
{
    const size_t n = r->n_start;
    if (!r->learned || !r->learned->orders.n)
        return KOILA_OK;
    uint64_t *list = koila__realloc(&r->mem, NULL, 0, n * sizeof *list);
    if (!list)
        return KOILA_NO_MEMORY;
    for (size_t i = 0; i < n; i++)
        list[i] = r->start[i].addr;
    put_in_order(r->learned, list, n);
    koila__cache_set_ages(r->c, list, n);
    koila__release(&r->mem, list, n * sizeof *list);
    return KOILA_OK;
}

/* ---- from a difference to a fact */

/* The free blocks that begin where the replay and where the recording want one, and what lies
 * before the first. */
typedef struct place {
    uint64_t expected, recorded;           /* addresses */
    uint64_t expected_size, recorded_size; /* 0: no free block begins there */
    koila_block last, before;
} place;

static bool look(void *user, const koila_block *b)
{
    place *p = user;
    if (b->state == KOILA_BLOCK_FREE && b->addr == p->expected) {
        p->expected_size = b->size;
        p->before = p->last;
    }
    if (b->state == KOILA_BLOCK_FREE && b->addr == p->recorded)
        p->recorded_size = b->size;
    p->last = *b;
    return true;
}

static bool learn_order(replay *r, const place *p)
{
    const koila_segment *older = koila__replay_start_segment(r, p->recorded);
    const koila_segment *newer = koila__replay_start_segment(r, p->expected);
    learned *l = r->learned;
    if (!(r->conf.rules & KOILA_RULE_OLDEST_SEGMENT) || !older || !newer || older == newer ||
        p->expected_size != p->recorded_size)
        return false;
    for (uint32_t i = 0; i < l->orders.n; i++)
        if (l->orders.at[i].older == older->addr && l->orders.at[i].newer == newer->addr)
            return false; /* known, and no help */
    const segment_order fact = { older->addr, newer->addr };
    if (!koila__vec_push(&l->mem, &l->orders, fact))
        r->no_memory = true;
    return !r->no_memory;
}

static bool learn_size(replay *r, const place *p, uint64_t request)
{
    uint64_t rounded;
    const koila_block *b = &p->before;
    koila_cache_sizes(&r->conf, request, &rounded, NULL);
    if (!p->expected_size || b->addr + b->size != p->expected || b->state == KOILA_BLOCK_FREE ||
        rounded > p->expected_size)
        return false;
    for (uint32_t i = 0; i < r->assumed.n; i++) {
        if (r->assumed.at[i].addr != b->addr)
            continue;
        const uint64_t size = b->size + p->expected_size - (rounded - UNIT);
        koila_assert(size > b->size);
        /* a rest of 1 MiB or less belongs to the block, and one of more is split off */
        if (rounded - UNIT <= MIB || size - r->assumed.at[i].least > MIB)
            return false;
        const start_size fact = { b->addr, size };
        if (!koila__vec_push(&r->learned->mem, &r->learned->sizes, fact))
            r->no_memory = true;
        return !r->no_memory;
    }
    return false;
}

bool koila__replay_learn(replay *r, const koila_event *expected, uint64_t i)
{
    if (!r->learned || !r->n_start || r->no_memory || i >= r->n ||
        r->learned->n_again + i > MAX_AGAIN)
        return false;
    const snap_entry *x = entry(r, i);
    const bool by_age = x->kind == expected->kind && x->size == expected->size;
    place p = { .expected = expected->addr, .recorded = by_age ? x->addr : 0 };
    if (expected->kind != KOILA_EVENT_ALLOC && !(by_age && x->kind == KOILA_EVENT_SEGMENT_FREE))
        return false;
    if (koila_cache_walk(r->c, look, &p) != KOILA_OK) {
        r->no_memory = true;
        return false;
    }
    r->learned->n_again += i;
    if (!p.expected_size)
        return false;
    return learn_order(r, &p) ||
           (expected->kind == KOILA_EVENT_ALLOC && learn_size(r, &p, expected->size));
}
