/* cache_load.c — a cache in a given state: the segments and blocks of a snapshot, or of the live
 * allocator. */
#include "allocator/cache_lanes.h"

static koila_status bad_segment(koila_error *e, size_t i, const koila_segment *s, const char *what)
{
    return koila__fail(e, KOILA_BAD_INPUT, i, "segment 0x%llx: %s", (unsigned long long)s->addr,
                       what);
}

/* Arrays are the caller's, whose structs may be longer than ours. */
static const koila_segment *segment_at(const koila_segment *s, size_t i)
{
    return (const koila_segment *)((const char *)s + i * s->struct_size);
}
static const koila_block *block_at(const koila_segment *s, size_t i)
{
    return (const koila_block *)((const char *)s->blocks + i * s->block_size);
}

static koila_status check_segment(const koila_segment *s, size_t i, koila_error *e)
{
    if (s->size == 0 || s->size >= REQUEST_MAX || s->addr == 0 || s->addr >= SPACE_MAX ||
        s->addr + s->size > SPACE_MAX)
        return bad_segment(e, i, s, "address or size out of range");
    char sum[KOILA_GROUPED], size[KOILA_GROUPED];
    uint64_t at = s->addr;
    for (size_t k = 0; k < s->n_blocks; k++) {
        const koila_block *b = block_at(s, k);
        if (b->size == 0 || b->addr != at || b->size > s->size - (at - s->addr) ||
            b->requested >= REQUEST_MAX)
            return bad_segment(e, i, s, "blocks do not tile it");
        if (b->state > KOILA_BLOCK_PENDING)
            return bad_segment(e, i, s, "a block's state is not known");
        at += b->size;
    }
    if (at - s->addr != s->size)
        return koila__fail(e, KOILA_BAD_INPUT, i, "segment 0x%llx: blocks sum to %s, segment is %s",
                           (unsigned long long)s->addr, koila__grouped(at - s->addr, sum),
                           koila__grouped(s->size, size));
    return KOILA_OK;
}

/* Cut `size` bytes at the end of the segment's last block off into a block of their own; the first
 * call takes the whole. */
static koila_status load_block(koila_cache *c, uint32_t *last, uint64_t size, uint64_t requested,
                               uint32_t state)
{
    if (!koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    uint32_t b = *last; /* holds all that is left */
    koila_assert(b && c->blocks[b].size >= size);
    const uint64_t rest = c->blocks[b].size - size;
    uint32_t seg = c->blocks[b].seg;
    uint32_t lane_i = c->blocks[b].lane;
    uint32_t next = 0;
    if (rest) {
        next = koila__cache_block_new(c, seg, lane_i, c->blocks[b].addr + size, rest);
        splice(c, next, b, 0);
        c->blocks[b].size = size;
    }
    *last = next;
    const bool small = is_small(c, b);
    c->blocks[b].requested = requested;
    if (state == KOILA_BLOCK_FREE || state == KOILA_BLOCK_UNMAPPED) {
        c->blocks[b].requested = 0;
        koila__cache_try_merge(c, b, c->blocks[b].prev, (koila_block_state)state);
        c->blocks[b].state = state;
        if (state == KOILA_BLOCK_FREE)
            free_insert(c, b);
        else
            tree_insert(c, b, UNMAPPED_BIN);
        return KOILA_OK;
    }
    c->blocks[b].state = KOILA_BLOCK_USED;
    hash_put(c, c->blocks[b].addr, b);
    if (state == KOILA_BLOCK_USED) {
        stat_up(c, KOILA_STAT_ALLOCATION, small, 1);
        stat_up(c, KOILA_STAT_ALLOCATED_BYTES, small, size);
        if (size >= c->conf.max_split_bytes)
            up(&c->s.stat.oversize_allocations, 1);
    } else {
        koila__cache_queue_put(c, b);
    }
    stat_up(c, KOILA_STAT_ACTIVE, small, 1);
    stat_up(c, KOILA_STAT_ACTIVE_BYTES, small, size);
    stat_up(c, KOILA_STAT_REQUESTED_BYTES, small, requested);
    return KOILA_OK;
}

static koila_status load_blocks(koila_cache *c, uint32_t *last, const koila_segment *s)
{
    for (size_t k = 0; k < s->n_blocks; k++) {
        const koila_block *b = block_at(s, k);
        KOILA_TRY(load_block(c, last, b->size, b->requested, b->state));
    }
    return KOILA_OK;
}

static bool same_lane(const koila_segment *a, const koila_segment *b)
{
    return a->is_expandable && b->is_expandable && a->is_small == b->is_small &&
           a->stream == b->stream && a->pool.owner == b->pool.owner && a->pool.id == b->pool.id;
}

/* The reservation that begins with list[0]: its bytes, and in *used how many of the list lie in it.
 */
static uint64_t find_reservation(const koila_cache *c, const koila_segment **list, size_t n,
                                 size_t *used)
{
    const koila_segment *s = list[0];
    const uint64_t page = page_of(c, s->is_small);
    uint64_t space = reservation_size(c, s->is_small);
    while (*used < n && same_lane(s, list[*used]) &&
           list[*used]->addr - s->addr + list[*used]->size <= space &&
           (list[*used]->addr - s->addr) % page == 0)
        ++*used;
    const uint64_t used_bytes = list[*used - 1]->addr + list[*used - 1]->size - s->addr;
    if (*used < n && space > list[*used]->addr - s->addr)
        space = (list[*used]->addr - s->addr) / page * page;
    if (s->addr + space > SPACE_MAX)
        space = SPACE_MAX - s->addr;
    return space < used_bytes ? used_bytes : space;
}

static void count_plain_segment(koila_cache *c, uint32_t seg, const koila_segment *s)
{
    stat_up(c, KOILA_STAT_SEGMENT, s->is_small, 1);
    if (s->size >= c->conf.max_split_bytes)
        up(&c->s.stat.oversize_segments, 1);
    for (uint32_t b = c->segs[seg].first; b; b = c->blocks[b].next) {
        if (c->blocks[b].state != KOILA_BLOCK_FREE || is_alone(c, b))
            continue;
        stat_up(c, KOILA_STAT_INACTIVE_SPLIT, s->is_small, 1);
        stat_up(c, KOILA_STAT_INACTIVE_SPLIT_BYTES, s->is_small, c->blocks[b].size);
    }
}

/* Loads list[0], and for expandable memory what follows in the same reservation; *used is how many.
 * `list` ascends by address. */
static koila_status load_segment(koila_cache *c, const koila_segment **list, size_t n, size_t *used)
{
    const koila_segment *s = list[0];
    if (!koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    pool *p = koila__cache_pool(c, s->pool);
    uint32_t lane_i = p ? koila__cache_lane(c, p, s->is_small, s->stream) : NO_LANE;
    if (lane_i == NO_LANE)
        return KOILA_NO_MEMORY;
    uint64_t size = s->size;
    *used = 1;
    if (s->is_expandable)
        size = find_reservation(c, list, n, used);
    uint32_t seg = koila__cache_seg_new(c, lane_i, s->addr, size, s->is_expandable);
    uint32_t last = c->segs[seg].first;
    uint64_t at = s->addr;
    for (size_t i = 0; i < *used; i++) {
        koila_assert(list[i]->addr >= at);
        if (list[i]->addr > at)
            KOILA_TRY(load_block(c, &last, list[i]->addr - at, 0, KOILA_BLOCK_UNMAPPED));
        KOILA_TRY(load_blocks(c, &last, list[i]));
        at = list[i]->addr + list[i]->size;
        stat_up(c, KOILA_STAT_RESERVED_BYTES, s->is_small, list[i]->size);
        device_up(c, granules(list[i]->size));
    }
    if (last)
        KOILA_TRY(load_block(c, &last, c->blocks[last].size, 0, KOILA_BLOCK_UNMAPPED));
    koila_assert(!last);
    if (!s->is_expandable)
        count_plain_segment(c, seg, s);
    return KOILA_OK;
}

/* By address. Recordings come sorted or nearly so, hence a shell sort; merge sort needs a copy. */
static void sort_by_address(const koila_segment **list, size_t n)
{
    for (size_t gap = n / 2; gap; gap /= 2)
        for (size_t i = gap; i < n; i++) {
            const koila_segment *x = list[i];
            size_t k = i;
            for (; k >= gap && list[k - gap]->addr > x->addr; k -= gap)
                list[k] = list[k - gap];
            list[k] = x;
        }
}

/* New segments will lie above all that are loaded. */
static void move_next_addr(koila_cache *c, const koila_segment *highest)
{
    uint64_t end = granules(highest->addr + highest->size);
    for (uint32_t g = 1; g < c->s.n_segs; g++)
        if (c->segs[g].addr + c->segs[g].size > end)
            end = granules(c->segs[g].addr + c->segs[g].size);
    if (end > c->s.next_addr)
        c->s.next_addr = end;
}

/* `list` has room for n pointers, for the segments in order. */
static koila_status load_all(koila_cache *c, const koila_segment **list, const koila_segment *s,
                             size_t n, koila_error *e)
{
    for (size_t i = 0; i < n; i++)
        list[i] = segment_at(s, i);
    sort_by_address(list, n);
    for (size_t i = 1; i < n; i++)
        if (list[i - 1]->addr + list[i - 1]->size > list[i]->addr)
            return koila__fail(e, KOILA_BAD_INPUT,
                               (uint64_t)((const char *)list[i] - (const char *)s) / s->struct_size,
                               "segment 0x%llx: overlaps segment 0x%llx",
                               (unsigned long long)list[i]->addr,
                               (unsigned long long)list[i - 1]->addr);
    for (size_t i = 0, used; i < n; i += used)
        KOILA_TRY(load_segment(c, list + i, n - i, &used));
    move_next_addr(c, list[n - 1]);
    return KOILA_OK;
}

/* The segment that holds an address: they were made in the order of addresses. */
static uint32_t segment_of(const koila_cache *c, uint64_t addr)
{
    uint32_t lo = 1;
    uint32_t hi = c->s.n_segs;
    while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (c->segs[mid].addr + c->segs[mid].size <= addr)
            lo = mid + 1;
        else
            hi = mid;
    }
    koila_assert(lo < c->s.n_segs && c->segs[lo].addr <= addr);
    return lo;
}

void koila__cache_set_ages(koila_cache *c, const uint64_t *list, size_t n)
{
    uint64_t number = 0;
    koila_assert(!c->n_marks && !c->s.dead_seg);
    if (!(c->conf.rules & KOILA_RULE_OLDEST_SEGMENT))
        return;
    for (uint32_t s = 1; s < c->s.n_segs; s++)
        for (uint32_t b = c->segs[s].first; b; b = c->blocks[b].next)
            if (c->blocks[b].state == KOILA_BLOCK_FREE)
                free_erase(c, b);
    for (uint32_t s = 1; s < c->s.n_segs; s++)
        c->segs[s].number = 0;
    for (size_t i = 0; i < n; i++) {
        segment *g = &c->segs[segment_of(c, list[i])];
        if (!g->number)
            g->number = ++number;
    }
    for (uint32_t s = 1; s < c->s.n_segs; s++)
        for (uint32_t b = c->segs[s].first; b; b = c->blocks[b].next)
            if (c->blocks[b].state == KOILA_BLOCK_FREE)
                free_insert(c, b);
    koila_assert(number <= c->s.n_made);
    koila_check(koila__cache_check(c));
}

koila_status koila_cache_from_segments(const koila_cache_config *conf, const koila_allocator *mem,
                                       const koila_segment *s, size_t n, koila_cache **out,
                                       koila_error *e)
{
    for (size_t i = 0; i < n; i++) {
        const koila_segment *x = segment_at(s, i);
        if (x->struct_size < sizeof *x || x->struct_size != s->struct_size ||
            x->block_size < sizeof *x->blocks)
            return koila__fail(e, KOILA_BAD_ARGUMENT, i,
                               "koila_segment: struct_size or block_size is not set");
        KOILA_TRY(check_segment(x, i, e));
    }
    if (n > SIZE_MAX / sizeof(koila_segment *))
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "too many segments");
    koila_cache *c;
    KOILA_TRY(koila_cache_new(conf, mem, &c, e));
    koila_status status = KOILA_OK;
    if (n) {
        const koila_segment **list = koila__realloc(&c->mem, NULL, 0, n * sizeof *list);
        status = list ? load_all(c, list, s, n, e) : KOILA_NO_MEMORY;
        koila__release(&c->mem, list, n * sizeof *list);
    }
    if (status) {
        if (status == KOILA_NO_MEMORY)
            koila__fail(e, status, 0, "the host is out of memory");
        koila_cache_free(c);
        return status;
    }
    koila_check(koila__cache_check(c));
    *out = c;
    return KOILA_OK;
}
