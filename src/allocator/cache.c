/* cache.c — PyTorch's CUDA caching allocator as a pure function of its requests, rule for rule
 * (docs/allocator.md lists the rules).
 *
 *   cache_state.h    blocks, segments, lanes, pools; the invariants; how they are written
 *   cache_lanes.h    the ordered sets that best fit searches
 *   cache.c          what is asked of an allocator: malloc, release, streams, pools, empty_cache,
 *                    limits
 *   cache_undo.c     what-if: mark, rewind, forget
 *   cache_load.c     a cache in a given state
 *   cache_look.c     statistics, walking, checking
 *   cache_config.c   settings, and what differs between torch versions
 */
#include "allocator/cache_lanes.h"

#include "base/vec.h"

/* ---- host memory: everything is reserved before a call changes anything */

bool koila__cache_grow(koila_cache *c, void *array, uint32_t *cap, uint32_t want, size_t size)
{
    return want <= *cap || koila__vec_grow(&c->mem, array, cap, want, size);
}

static bool grow_hash(koila_cache *c)
{
    uint32_t bits = c->hash_bits ? c->hash_bits + 1 : 6;
    uint32_t mask = ((uint32_t)1 << bits) - 1;
    if (bits > 31)
        return false;
    slot *fresh = koila__realloc(&c->mem, NULL, 0, sizeof(slot) << bits);
    if (!fresh)
        return false;
    memset(fresh, 0, sizeof(slot) << bits);
    slot *old = c->hash;
    uint32_t n_old = old ? (uint32_t)1 << c->hash_bits : 0;
    c->hash = fresh;
    c->hash_bits = bits;
    for (uint32_t i = 0; i < n_old; i++) {
        if (!old[i].block)
            continue;
        uint32_t h = hash_home(c, old[i].addr);
        while (fresh[h].block)
            h = (h + 1) & mask;
        fresh[h] = old[i];
    }
    koila__release(&c->mem, old, n_old * sizeof(slot));
    return true;
}

/* Room for one call: at worst it unmaps every free expandable block (two new blocks each), and with
 * a mark touches everything. */
bool koila__cache_reserve(koila_cache *c)
{
    uint64_t blocks =
        (uint64_t)c->s.n_slots_used + 8 + (c->s.n_reservations ? 2 * (uint64_t)c->s.n_blocks : 0);
    if (blocks > c->blocks_cap &&
        (blocks > UINT32_MAX / 8 ||
         !koila__cache_grow(c, &c->blocks, &c->blocks_cap, (uint32_t)blocks, sizeof(block))))
        return false;
    if (c->s.n_segs + 2 > c->segs_cap &&
        !koila__cache_grow(c, &c->segs, &c->segs_cap, c->s.n_segs + 2, sizeof(segment)))
        return false;
    if (c->s.n_uses + 2 > c->uses_cap &&
        !koila__cache_grow(c, &c->uses, &c->uses_cap, c->s.n_uses + 2, sizeof(use)))
        return false;
    if (((uint64_t)c->s.n_out + 2) * 2 > (c->hash ? (uint64_t)1 << c->hash_bits : 0) &&
        !grow_hash(c))
        return false;
    if (c->n_marks) {
        /* per block at worst three times: itself, six roots, two segments, two hash changes, uses
         */
        uint64_t want =
            c->log_n + ((uint64_t)c->s.n_blocks * 3 + 64) *
                           (WORDS(block) + 1 + 6 * 2 + 2 * (WORDS(segment) + 1) + 8 + 8);
        if (want > c->log_cap &&
            !koila__grow(&c->mem, &c->log, &c->log_cap, 2 * want, sizeof *c->log))
            return false;
    }
    return true;
}

/* ---- pools and lanes. They are made when first named and stay: an empty one means nothing. */

static pool *pool_find(const koila_cache *c, koila_pool id)
{
    for (uint32_t i = 0; i < c->n_pools; i++)
        if (c->pools[i].id.owner == id.owner && c->pools[i].id.id == id.id)
            return &c->pools[i];
    return NULL;
}

pool *koila__cache_pool(koila_cache *c, koila_pool id)
{
    pool *p = pool_find(c, id);
    if (p || !koila__cache_grow(c, &c->pools, &c->pools_cap, c->n_pools + 1, sizeof(pool)))
        return p;
    p = &c->pools[c->n_pools++];
    memset(p, 0, sizeof *p);
    p->id = id;
    return p;
}

static uint32_t lane_slot(const koila_cache *c, const pool *p, bool small, uint64_t stream)
{
    uint32_t lo = 0;
    uint32_t hi = p->n_lanes[small];
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (c->lanes[p->lanes[small][mid]]->stream < stream)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static uint32_t lane_find(const koila_cache *c, const pool *p, bool small, uint64_t stream)
{
    uint32_t at = lane_slot(c, p, small, stream);
    return at < p->n_lanes[small] && c->lanes[p->lanes[small][at]]->stream == stream
               ? p->lanes[small][at]
               : NO_LANE;
}

static size_t lane_bytes(bool binned)
{
    return sizeof(lane) + (binned ? N_BINS : 1) * sizeof(uint32_t);
}

uint32_t koila__cache_lane(koila_cache *c, pool *p, bool small, uint64_t stream)
{
    uint32_t at = lane_slot(c, p, small, stream);
    uint32_t *list = p->lanes[small];
    uint32_t n = p->n_lanes[small];
    if (at < n && c->lanes[list[at]]->stream == stream)
        return list[at];
    if (!koila__cache_grow(c, &p->lanes[small], &p->lanes_cap[small], n + 1, sizeof(uint32_t)))
        return NO_LANE;
    if (!koila__cache_grow(c, &c->lanes, &c->lanes_cap, c->n_lanes + 1, sizeof(lane *)))
        return NO_LANE;
    bool binned = c->n_lanes < MAX_BINNED_LANES;
    lane *l = koila__realloc(&c->mem, NULL, 0, lane_bytes(binned));
    if (!l)
        return NO_LANE;
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

/* ---- blocks and segments */

uint32_t koila__cache_block_new(koila_cache *c, uint32_t seg, uint32_t lane_i, uint64_t addr,
                                uint64_t size)
{
    uint32_t b = c->s.dead_block;
    if (b)
        c->s.dead_block = c->blocks[b].link[0];
    else { /* the first call of this slot; koila__cache_reserve() made room */
        b = c->s.n_slots_used++;
        koila_assert(b < c->blocks_cap);
        c->blocks[b].tag = c->epoch; /* nothing to save: before, this slot did not exist */
    }
    block *x = wr(c, b);
    koila_assert(b && size);
    uint32_t tag = x->tag;
    if ((c->conf.rules & KOILA_RULE_OLDEST_BLOCK) && c->s.n_made < LAST_NUMBER)
        c->s.n_made++;
    *x = (block){ .addr = addr,
                  .size = size,
                  .seg = seg,
                  .lane = lane_i,
                  .tag = tag,
                  .state = DEAD,
                  .number = c->conf.rules & KOILA_RULE_OLDEST_BLOCK ? (uint32_t)c->s.n_made : 0 };
    c->s.n_blocks++;
    return b;
}

static void block_drop(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    koila_assert(b && x->state != DEAD && c->s.n_blocks > 0);
    x->state = DEAD;
    x->link[0] = c->s.dead_block;
    c->s.dead_block = b;
    c->s.n_blocks--;
}

uint32_t koila__cache_seg_new(koila_cache *c, uint32_t lane_i, uint64_t addr, uint64_t size,
                              bool expandable)
{
    uint32_t s = c->s.dead_seg;
    if (s)
        c->s.dead_seg = c->segs[s].next_dead;
    else
        s = c->s.n_segs++;
    koila_assert(s && s < c->segs_cap && lane_i < c->n_lanes);
    const bool by_age = c->conf.rules & KOILA_RULE_OLDEST_SEGMENT;
    *wr_seg(c, s) = (segment){ .addr = addr,
                               .size = size,
                               .number = by_age ? ++c->s.n_made : 0,
                               .lane = lane_i,
                               .expandable = expandable };
    c->s.n_reservations += expandable;
    uint32_t b = koila__cache_block_new(c, s, lane_i, addr, size);
    wr_seg(c, s)->first = b;
    wr_pool(c, c->lanes[lane_i]->pool >> 1)->n_segments++;
    return s;
}

static void seg_drop(koila_cache *c, uint32_t s)
{
    segment *g = wr_seg(c, s);
    koila_assert(g->first && c->pools[c->lanes[g->lane]->pool >> 1].n_segments > 0);
    c->s.n_reservations -= g->expandable;
    wr_pool(c, c->lanes[g->lane]->pool >> 1)->n_segments--;
    g->first = 0;
    g->next_dead = c->s.dead_seg;
    c->s.dead_seg = s;
}

/* The driver: memory for a segment or for pages of one. */
static bool driver_gives(koila_cache *c, koila_event_kind kind, uint64_t size, uint64_t stream,
                         uint64_t *addr)
{
    if (c->driver.give)
        return c->driver.give(c->driver.user, kind, size, stream, addr);
    uint64_t limit = c->s.total ? c->s.total : SPACE_MAX;
    return c->s.outside <= limit && c->s.stat.device_bytes <= limit - c->s.outside &&
           granules(size) <= limit - c->s.outside - c->s.stat.device_bytes;
}

/* Absorb a neighbour that touches `dst` and has its state. Returns the bytes gained. */
uint64_t koila__cache_try_merge(koila_cache *c, uint32_t dst, uint32_t src, koila_block_state kind)
{
    if (!src || c->blocks[src].state != (uint32_t)kind)
        return 0;
    const uint64_t won = c->blocks[src].size;
    if (kind == KOILA_BLOCK_FREE)
        free_erase(c, src);
    else
        tree_erase(c, src, UNMAPPED_BIN);
    block *d = wr(c, dst);
    const block *s = &c->blocks[src];
    if (d->prev == src) {
        d->addr = s->addr;
        d->prev = s->prev;
        if (d->prev)
            wr(c, d->prev)->next = dst;
        else
            wr_seg(c, d->seg)->first = dst;
    } else {
        d->next = s->next;
        if (d->next)
            wr(c, d->next)->prev = dst;
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
    c->s.stat.num_device_free++;
    stat_down(c, KOILA_STAT_SEGMENT, small, 1);
    stat_down(c, KOILA_STAT_RESERVED_BYTES, small, x->size);
    if (x->size >= c->conf.max_split_bytes)
        down(&c->s.stat.oversize_segments, 1);
    c->s.stat.device_bytes -= granules(x->size);
    tell(c, KOILA_EVENT_SEGMENT_FREE, x->addr, x->size, x->lane);
    free_erase(c, b);
    seg_drop(c, x->seg);
    block_drop(c, b);
}

/* ---- expandable segments */

/* Map the first pages of an unmapped block, enough for `size`, and merge. Returns the free block
 * that then holds them (in its lane), 0 if there is no memory. */
static uint32_t map_pages(koila_cache *c, uint32_t b, uint64_t size)
{
    const bool small = is_small(c, b);
    const uint64_t page = page_of(c, small);
    const uint64_t whole = (size + page - 1) / page * page;
    /* less only if a given state has ranges that are no whole pages */
    const uint64_t bytes = whole < c->blocks[b].size ? whole : c->blocks[b].size;
    const uint32_t lane_i = c->blocks[b].lane;
    uint64_t addr = c->blocks[b].addr;
    koila_assert(c->blocks[b].state == KOILA_BLOCK_UNMAPPED && bytes > 0);
    if (!driver_gives(c, KOILA_EVENT_SEGMENT_MAP, bytes, c->lanes[lane_i]->stream, &addr))
        return 0;
    tree_erase(c, b, UNMAPPED_BIN);
    block *x = wr(c, b);
    x->state = DEAD;
    if (bytes < x->size) {
        uint32_t rest = koila__cache_block_new(c, x->seg, lane_i, x->addr + bytes, x->size - bytes);
        splice(c, rest, b, x->next);
        wr(c, rest)->state = KOILA_BLOCK_UNMAPPED;
        tree_insert(c, rest, UNMAPPED_BIN);
        wr(c, b)->size = bytes;
    }
    koila__cache_try_merge(c, b, c->blocks[b].prev, KOILA_BLOCK_FREE);
    koila__cache_try_merge(c, b, c->blocks[b].next, KOILA_BLOCK_FREE);
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
    const uint64_t page = page_of(c, small);
    const uint64_t base = c->segs[x->seg].addr;
    const uint64_t from = base + (x->addr - base + page - 1) / page * page;
    const uint64_t to = base + (x->addr + x->size - base) / page * page;
    const uint32_t seg = x->seg;
    const uint32_t lane_i = x->lane;
    koila_assert(x->state == KOILA_BLOCK_FREE && in_expandable(c, b));
    if (from >= to)
        return;
    free_erase(c, b);
    x->state = DEAD;
    if (from > x->addr) {
        uint32_t low = koila__cache_block_new(c, seg, lane_i, x->addr, from - x->addr);
        splice(c, low, c->blocks[b].prev, b);
        free_insert(c, low);
    }
    if (to < x->addr + x->size) {
        uint32_t high = koila__cache_block_new(c, seg, lane_i, to, x->addr + x->size - to);
        splice(c, high, b, c->blocks[b].next);
        free_insert(c, high);
    }
    x = wr(c, b);
    x->addr = from;
    x->size = to - from;
    koila__cache_try_merge(c, b, x->prev, KOILA_BLOCK_UNMAPPED);
    koila__cache_try_merge(c, b, c->blocks[b].next, KOILA_BLOCK_UNMAPPED);
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
    return b &&
           (c->blocks[b].state == KOILA_BLOCK_FREE || c->blocks[b].state == KOILA_BLOCK_UNMAPPED);
}

/* The first block of the lane, by address, from which free and unmapped blocks of `size` bytes
 * touch; 0: none. */
static uint32_t expandable_room(const koila_cache *c, const lane *l, uint64_t size)
{
    for (uint32_t u = unmapped_at_least(c, l, 0); u;
         u = unmapped_at_least(c, l, c->blocks[u].addr + 1)) {
        const uint32_t first = is_room(c, c->blocks[u].prev) ? c->blocks[u].prev : u;
        uint64_t room = 0;
        for (uint32_t b = first; room < size && is_room(c, b); b = c->blocks[b].next)
            room += c->blocks[b].size;
        if (room >= size)
            return first;
    }
    return 0;
}

/* One unmapped block, a reservation of its own. */
static uint32_t reservation_new(koila_cache *c, uint32_t lane_i, uint64_t addr)
{
    const uint64_t space = reservation_size(c, c->lanes[lane_i]->pool & 1);
    const uint32_t s = koila__cache_seg_new(c, lane_i, addr, space, true);
    const uint32_t b = c->segs[s].first;
    wr(c, b)->state = KOILA_BLOCK_UNMAPPED;
    tree_insert(c, b, UNMAPPED_BIN);
    return b;
}

/* A new reservation. 0: no address space, not as the driver says, or too short for `size`. It stays
 * then as well, as it does where its pages cannot be mapped: torch maps whatever it has, which no
 * device can hold, for it is longer than the device. */
static uint32_t reserve_space(koila_cache *c, uint32_t lane_i, uint64_t size)
{
    const lane *l = c->lanes[lane_i];
    if (device_size(c) > SPACE_MAX / 4)
        return 0;
    const uint64_t space = reservation_size(c, l->pool & 1);
    uint64_t addr = c->s.next_addr;
    if (addr > SPACE_MAX - granules(space))
        return 0;
    if (!c->driver.give)
        c->s.next_addr += granules(space);
    else if (!c->driver.give(c->driver.user, (koila_event_kind)KOILA__RESERVATION, space, l->stream,
                             &addr))
        return 0;
    const uint32_t b = reservation_new(c, lane_i, addr);
    return size > space ? 0 : b;
}

static uint64_t min_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Grow expandable memory until `size` bytes lie free in one block, and take that block out of its
 * lane. */
static uint32_t expand(koila_cache *c, uint32_t lane_i, uint64_t size)
{
    uint32_t at = expandable_room(c, c->lanes[lane_i], size);
    if (!at)
        at = reserve_space(c, lane_i, size);
    if (!at)
        return 0;
    if (c->blocks[at].state == KOILA_BLOCK_UNMAPPED) {
        at = map_pages(c, at, min_of(c->blocks[at].size, size));
        if (!at)
            return 0;
    }
    while (c->blocks[at].size < size) {
        const uint32_t next = c->blocks[at].next;
        koila_assert(is_room(c, next));
        at = map_pages(c, next, min_of(c->blocks[next].size, size - c->blocks[at].size));
        if (!at)
            return 0;
    }
    koila_assert(c->blocks[at].state == KOILA_BLOCK_FREE);
    free_erase(c, at);
    return at;
}

/* ---- giving back */

static void complete(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    const bool small = is_small(c, b);
    const bool expandable = in_expandable(c, b);
    const uint64_t addr = x->addr;
    const uint64_t size = x->size;
    const uint64_t requested = x->requested;
    const uint32_t lane_i = x->lane;
    koila_assert(x->state == DEAD && !x->uses); /* neither handed out nor pending any more */
    hash_drop(c, addr, b);
    x->requested = 0;
    int64_t n = 0, bytes = 0;
    for (int side = 0; side < 2; side++) {
        uint64_t won = koila__cache_try_merge(c, b, side ? c->blocks[b].next : c->blocks[b].prev,
                                              KOILA_BLOCK_FREE);
        if (won) {
            n--;
            bytes -= (int64_t)won;
        }
    }
    free_insert(c, b);
    if (!is_alone(c, b)) {
        n++;
        bytes += (int64_t)c->blocks[b].size;
    }
    if (!expandable) {
        stat_move(c, KOILA_STAT_INACTIVE_SPLIT, small, n);
        stat_move(c, KOILA_STAT_INACTIVE_SPLIT_BYTES, small, bytes);
    }
    stat_down(c, KOILA_STAT_ACTIVE, small, 1);
    stat_down(c, KOILA_STAT_ACTIVE_BYTES, small, size);
    stat_down(c, KOILA_STAT_REQUESTED_BYTES, small, requested);
    tell(c, KOILA_EVENT_FREE_COMPLETED, addr, requested, lane_i);
}

void koila__cache_queue_put(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    koila_assert(x->state != KOILA_BLOCK_PENDING && x->state != KOILA_BLOCK_FREE);
    x->state = KOILA_BLOCK_PENDING;
    x->link[0] = c->s.pending_last;
    x->link[1] = 0;
    if (c->s.pending_last)
        wr(c, c->s.pending_last)->link[1] = b;
    else
        c->s.pending_first = b;
    c->s.pending_last = b;
}

static void queue_take(koila_cache *c, uint32_t b)
{
    block *x = wr(c, b);
    koila_assert(x->state == KOILA_BLOCK_PENDING);
    uint32_t older = x->link[0];
    uint32_t newer = x->link[1];
    if (older)
        wr(c, older)->link[1] = newer;
    else
        c->s.pending_first = newer;
    if (newer)
        wr(c, newer)->link[0] = older;
    else
        c->s.pending_last = older;
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

/* Every free block of a pool that the driver can take back, in the order of the lanes.
 * Expandable ones after the others. */
static void release_pool(koila_cache *c, const pool *p, bool small)
{
    for (uint32_t i = 0; i < p->n_lanes[small]; i++) {
        const lane *l = c->lanes[p->lanes[small][i]];
        for (uint32_t b = lane_at_least(c, l, 0), next; b; b = next) {
            next = lane_next(c, l, b);
            if (!in_expandable(c, b) && is_alone(c, b))
                release_block(c, b);
        }
    }
    if (!c->s.n_reservations)
        return;
    uint32_t first = 0, last = 0;
    for (uint32_t i = 0; i < p->n_lanes[small]; i++) {
        const lane *l = c->lanes[p->lanes[small][i]];
        for (uint32_t b = lane_at_least(c, l, 0); b; b = lane_next(c, l, b)) {
            if (!in_expandable(c, b))
                continue;
            if (last)
                wr(c, last)->requested = b;
            else
                first = b;
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

static void complete_pending_of(koila_cache *c, const pool *p)
{
    for (uint32_t b = c->s.pending_first, next; b; b = next) {
        next = c->blocks[b].link[1];
        if (pool_of(c, b) != p)
            continue;
        queue_take(c, b);
        complete(c, b);
    }
}

/* A pool without holders, alone. */
static void release_dead_pool(koila_cache *c, const pool *p)
{
    koila_assert(p != &c->pools[0] && !p->n_holders);
    if (c->driver.before_sync)
        c->driver.before_sync(c->driver.user);
    c->s.stat.num_sync_all_streams++;
    complete_pending_of(c, p);
    release_pool(c, p, true);
    release_pool(c, p, false);
}

koila_status koila__cache_free_pool(koila_cache *c, koila_pool id)
{
    const pool *p = pool_find(c, id);
    if (!p || !p->n_segments || p->n_holders)
        return KOILA_OK;
    if (!koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    release_dead_pool(c, pool_find(c, id));
    return KOILA_OK;
}

static void release_all(koila_cache *c)
{
    if (c->driver.before_sync)
        c->driver.before_sync(c->driver.user);
    c->s.stat.num_sync_all_streams++;
    complete_pending(c);
    release_pool(c, &c->pools[0], false);
    release_pool(c, &c->pools[0], true);
    for (uint32_t i = 1; i < c->n_pools; i++) {
        if (c->pools[i].n_holders || !c->pools[i].n_segments)
            continue;
        release_pool(c, &c->pools[i], true);
        release_pool(c, &c->pools[i], false);
    }
}

/* Only with max_split_size: release just enough oversize blocks of the stream. True if a new
 * segment may fit now. */
static bool release_available(koila_cache *c, uint32_t lane_i, uint64_t r)
{
    const lane *l = c->lanes[lane_i];
    const uint64_t max_split = c->conf.max_split_bytes;
    const uint64_t k = r > max_split ? r : max_split;
    if (max_split == KOILA_NO_LIMIT)
        return false;
    for (uint32_t b = lane_at_least(c, l, k); b; b = lane_next(c, l, b)) {
        if (in_expandable(c, b) || !is_alone(c, b))
            continue;
        release_block(c, b);
        return true;
    }
    uint64_t total = 0;
    for (uint32_t b = lane_last(c, l), next; b && total < k && c->blocks[b].size >= max_split;
         b = next) {
        next = lane_prev(c, l, b);
        if (in_expandable(c, b) || !is_alone(c, b))
            continue;
        total += c->blocks[b].size;
        release_block(c, b);
    }
    return total >= k;
}

/* Release the older half of the unsplit large blocks, and again, until `target` bytes are back. */
static void collect(koila_cache *c, uint64_t target, size_t n_rounds)
{
    const pool *p = &c->pools[0];
    const uint32_t now = p->n_searches[0];
    uint64_t age = 0, n = 0, won = 0;
    for (uint32_t i = 0; i < p->n_lanes[0]; i++) {
        const lane *l = c->lanes[p->lanes[0][i]];
        for (uint32_t b = lane_at_least(c, l, 0); b; b = lane_next(c, l, b))
            if (is_alone(c, b) && !in_expandable(c, b)) {
                age += (uint32_t)(now - c->blocks[b].born);
                n++;
            }
    }
    for (bool any = true; won < target && any && n && n_rounds; n_rounds--) {
        const double mean = (double)age / (double)n;
        any = false;
        for (uint32_t i = 0; i < p->n_lanes[0]; i++) {
            const lane *l = c->lanes[p->lanes[0][i]];
            for (uint32_t b = lane_at_least(c, l, 0), next; b; b = next) {
                next = lane_next(c, l, b);
                const uint32_t its_age = now - c->blocks[b].born;
                if (!is_alone(c, b) || in_expandable(c, b) || (double)its_age < mean)
                    continue;
                any = true;
                won += c->blocks[b].size;
                age -= its_age;
                n--;
                release_block(c, b);
            }
        }
    }
}

static void collect_if_needed(koila_cache *c)
{
    const uint64_t limit = (uint64_t)(c->conf.gc_threshold * (double)c->s.cap);
    if (reserved(c) > limit)
        collect(c, reserved(c) - limit, SIZE_MAX);
}

koila_status koila__cache_collect(koila_cache *c, size_t n_rounds)
{
    if (!koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    collect(c, KOILA_NO_LIMIT, n_rounds);
    return KOILA_OK;
}

/* ---- malloc */

static bool is_power_of_two(uint64_t n) { return !(n & (n - 1)); }

static inline uint64_t round_size(const koila_cache_config *conf, uint64_t n)
{
    if (n < UNIT)
        return UNIT;
    uint32_t log = 63 - (uint32_t)__builtin_clzll(n);
    uint32_t entry = 0; /* of sixteen: up to 1 MiB, to 2 MiB, ..., from 32 GiB on */
    if (log > 20)
        entry = log >= 35 ? 15 : log - 20;
    const uint64_t d = conf->divisions[entry];
    if (d > 1 && n > UNIT * d) {
        if (is_power_of_two(n))
            return n;
        const uint64_t step = ((uint64_t)1 << log) / d;
        return (n + step - 1) & ~(step - 1);
    }
    return (n + UNIT - 1) & ~(UNIT - 1);
}

static inline uint64_t segment_size(const koila_cache_config *conf, uint64_t r)
{
    if (r <= SMALL_MAX)
        return SMALL_SEGMENT;
    return r < LARGE_EXACT ? conf->large_segment_bytes : granules(r);
}

void koila_cache_sizes(const koila_cache_config *c, uint64_t n, uint64_t *rounded,
                       uint64_t *new_segment)
{
    uint64_t r = n && n < REQUEST_MAX ? round_size(c, n) : 0;
    if (rounded)
        *rounded = r;
    if (new_segment)
        *new_segment = r ? segment_size(c, r) : 0;
}

typedef struct request {
    uint64_t bytes, r, segment;
    uint32_t lane;
    bool small, expandable;
} request;

static inline bool collects(const koila_cache *c) { return c->s.cap && c->conf.gc_threshold > 0.0; }

/* Finds the free block that torch would take, without removing it; 0 = miss. */
static inline uint32_t search(const koila_cache *c, uint32_t lane_i, const request *q)
{
    const lane *l = c->lanes[lane_i];
    const uint64_t r = q->r;
    const uint64_t max_split = c->conf.max_split_bytes;
    uint32_t b = lane_at_least(c, l, r);
    if (!b)
        return 0;
    if (c->s.n_reservations && in_expandable(c, b)) {
        if (c->s.expandable) {
            /* a block counts at the size it can grow to */
            uint64_t grown = 0;
            for (uint32_t at = b, prev = 0; at; prev = at, at = lane_next(c, l, at)) {
                const block *x = &c->blocks[at];
                uint64_t size =
                    x->size + (x->next && c->blocks[x->next].state == KOILA_BLOCK_UNMAPPED
                                   ? c->blocks[x->next].size
                                   : 0);
                if (prev && size >= grown)
                    break;
                b = at;
                grown = size;
                if (!in_expandable(c, at))
                    break;
            }
        } else {
            do
                b = lane_next(c, l, b);
            while (b && in_expandable(c, b));
            if (!b)
                return 0;
        }
    }
    const uint64_t size = c->blocks[b].size;
    if (r < max_split && size >= max_split)
        return 0;
    if (r >= max_split && size >= r + c->conf.max_non_split_rounding_bytes)
        return 0;
    return b;
}

/* Hand out a block that is in no lane. */
static inline uint64_t hand_out(koila_cache *c, uint32_t b, const request *q)
{
    block *x = wr(c, b);
    const bool small = is_small(c, b);
    const bool was_split = !is_alone(c, b);
    const bool expandable = in_expandable(c, b);
    koila_assert(x->size >= q->r && q->r % UNIT == 0 && q->r >= q->bytes);
    const uint64_t rest = x->size - q->r;
    const uint32_t lane_i = x->lane;
    bool split = q->r < c->conf.max_split_bytes && rest > MIB;
    if (small || q->expandable)
        split = rest >= UNIT;
    if (pool_of(c, b)->flags & KOILA_POOL_NO_SPLIT)
        split = false;
    if (split) {
        uint32_t high = koila__cache_block_new(c, x->seg, lane_i, x->addr + q->r, rest);
        splice(c, high, b, c->blocks[b].next);
        x = wr(c, b);
        x->size = q->r;
        const uint32_t number = x->number; /* what is handed out is the new block */
        x->number = c->blocks[high].number;
        wr(c, high)->number = number;
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
    stat_up(c, KOILA_STAT_ALLOCATION, small, 1);
    stat_up(c, KOILA_STAT_ALLOCATED_BYTES, small, x->size);
    stat_up(c, KOILA_STAT_ACTIVE, small, 1);
    stat_up(c, KOILA_STAT_ACTIVE_BYTES, small, x->size);
    stat_up(c, KOILA_STAT_REQUESTED_BYTES, small, q->bytes);
    if (x->size >= c->conf.max_split_bytes)
        up(&c->s.stat.oversize_allocations, 1);
    tell(c, KOILA_EVENT_ALLOC, x->addr, q->bytes, lane_i);
    return x->addr;
}

static bool over_cap(const koila_cache *c, uint64_t n)
{
    return c->s.cap && (reserved(c) > c->s.cap || n > c->s.cap - reserved(c));
}

/* Step 6: a new segment, or more pages. The block is in no lane; 0 = failed. */
static uint32_t new_segment(koila_cache *c, const request *q)
{
    if (over_cap(c, q->segment))
        return 0;
    if (q->expandable)
        return expand(c, q->lane, q->r);
    const lane *l = c->lanes[q->lane];
    uint64_t addr = c->s.next_addr;
    if (!c->driver.give && addr > SPACE_MAX - granules(q->segment))
        return 0;
    if (!driver_gives(c, KOILA_EVENT_SEGMENT_ALLOC, q->segment, l->stream, &addr))
        return 0;
    if (!c->driver.give)
        c->s.next_addr += granules(q->segment);
    uint32_t s = koila__cache_seg_new(c, q->lane, addr, q->segment, false);
    stat_up(c, KOILA_STAT_SEGMENT, q->small, 1);
    stat_up(c, KOILA_STAT_RESERVED_BYTES, q->small, q->segment);
    if (q->segment >= c->conf.max_split_bytes)
        up(&c->s.stat.oversize_segments, 1);
    c->s.stat.num_device_alloc++;
    device_up(c, granules(q->segment));
    tell(c, KOILA_EVENT_SEGMENT_ALLOC, addr, q->segment, q->lane);
    return c->segs[s].first;
}

static uint32_t search_oom_pools(koila_cache *c, const request *q)
{
    const lane *own = c->lanes[q->lane];
    if (own->pool >> 1)
        return 0; /* default pool only */
    for (uint32_t i = 1; i < c->n_pools; i++) {
        if (!(c->pools[i].flags & KOILA_POOL_USE_ON_OOM))
            continue;
        uint32_t lane_i = lane_find(c, &c->pools[i], q->small, own->stream);
        uint32_t b = lane_i == NO_LANE ? 0 : search(c, lane_i, q);
        if (b) {
            free_erase(c, b);
            return b;
        }
    }
    return 0;
}

/* Steps 5 to 10, when no free block fits. */
static uint32_t make_room(koila_cache *c, const request *q)
{
    const uint32_t rules = c->conf.rules;
    if (collects(c))
        collect_if_needed(c);
    uint32_t b = new_segment(c, q);
    if (b)
        return b;
    if ((rules & KOILA_RULE_OOM_REJECT) && c->conf.oom_reject && over_cap(c, q->segment)) {
        c->s.stat.num_oom_rejections++;
        return 0;
    }
    if (rules & KOILA_RULE_OOM_POOLS_FIRST)
        b = search_oom_pools(c, q);
    if (!b && release_available(c, q->lane, q->r))
        b = new_segment(c, q);
    if (b)
        return b;
    const bool held_back =
        c->s.n_captures || (c->s.n_routings && !(rules & KOILA_RULE_ROUTING_KEEPS_RETRY));
    if (!held_back) {
        release_all(c);
        if (rules & KOILA_RULE_SEARCH_AFTER_RELEASE)
            b = search(c, q->lane, q);
        if (b) {
            free_erase(c, b);
            return b;
        }
        c->s.stat.num_alloc_retries++;
        b = new_segment(c, q);
        if (b)
            return b;
    }
    if (rules & KOILA_RULE_OOM_POOLS_LAST)
        b = search_oom_pools(c, q);
    return b;
}

static koila_status prepare(koila_cache *c, uint64_t bytes, uint64_t stream, koila_pool id,
                            request *q)
{
    if (!koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    pool *p = id.owner || id.id ? koila__cache_pool(c, id) : &c->pools[0];
    if (!p)
        return KOILA_NO_MEMORY;
    q->bytes = bytes;
    q->r = round_size(&c->conf, bytes);
    q->small = q->r <= SMALL_MAX;
    q->segment = segment_size(&c->conf, q->r);
    koila_assert(q->segment >= q->r);
    q->expandable = c->s.expandable && !(p->flags & KOILA_POOL_USER_ALLOCATOR);
    const uint32_t *list = p->lanes[q->small];
    q->lane = p->n_lanes[q->small] && c->lanes[list[0]]->stream == stream
                  ? list[0]
                  : koila__cache_lane(c, p, q->small, stream);
    return q->lane == NO_LANE ? KOILA_NO_MEMORY : KOILA_OK;
}

koila_status koila__cache_add_reservation(koila_cache *c, uint64_t bytes, uint64_t stream,
                                          koila_pool id, uint64_t addr)
{
    request q;
    KOILA_TRY(prepare(c, bytes, stream, id, &q));
    const uint64_t space = reservation_size(c, q.small);
    if (device_size(c) > SPACE_MAX / 4 || !q.expandable || addr > SPACE_MAX - granules(space))
        return KOILA_BAD_ARGUMENT;
    for (uint32_t s = 1; s < c->s.n_segs; s++)
        if (c->segs[s].first && c->segs[s].addr < addr + space &&
            addr < c->segs[s].addr + c->segs[s].size)
            return KOILA_BAD_ARGUMENT;
    reservation_new(c, q.lane, addr);
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

static inline void count_search(koila_cache *c, const request *q)
{
    if (collects(c))
        wr_pool(c, c->lanes[q->lane]->pool >> 1)->n_searches[q->small]++;
}

koila_status koila_cache_malloc(koila_cache *c, uint64_t bytes, uint64_t stream, koila_pool id,
                                uint64_t *addr)
{
    koila_check(koila__cache_check(c));
    if (bytes == 0) {
        *addr = 0;
        return KOILA_OK;
    }
    if (bytes >= REQUEST_MAX)
        return KOILA_OOM;
    request q;
    KOILA_TRY(prepare(c, bytes, stream, id, &q));
    if (c->conf.completion == KOILA_COMPLETE_BEST && !c->s.n_captures && !c->s.n_routings)
        complete_pending(c);
    count_search(c, &q);
    uint32_t b = search(c, q.lane, &q);
    if (b)
        free_erase(c, b);
    else
        b = make_room(c, &q);
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

koila_status koila__cache_malloc_at(koila_cache *c, uint64_t bytes, uint64_t stream, koila_pool id,
                                    uint64_t expected)
{
    request q;
    if (bytes == 0 || bytes >= REQUEST_MAX)
        return KOILA_BAD_ARGUMENT;
    KOILA_TRY(prepare(c, bytes, stream, id, &q));
    uint32_t b = search(c, q.lane, &q);
    if (!b || c->blocks[b].addr != expected)
        return KOILA_BAD_ARGUMENT;
    count_search(c, &q);
    free_erase(c, b);
    hand_out(c, b, &q);
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

/* ---- the other calls */

koila_status koila_cache_release(koila_cache *c, uint64_t addr)
{
    if (!addr)
        return KOILA_OK;
    uint32_t b = hash_find(c, addr);
    if (!b || c->blocks[b].state != KOILA_BLOCK_USED)
        return KOILA_BAD_ARGUMENT;
    if (c->n_marks && !koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    block *x = wr(c, b);
    const bool small = is_small(c, b);
    x->state = DEAD;
    stat_down(c, KOILA_STAT_ALLOCATION, small, 1);
    stat_down(c, KOILA_STAT_ALLOCATED_BYTES, small, x->size);
    tell(c, KOILA_EVENT_FREE_REQUESTED, x->addr, x->requested, x->lane);
    if (x->size >= c->conf.max_split_bytes)
        down(&c->s.stat.oversize_allocations, 1);
    if (x->uses)
        koila__cache_queue_put(c, b);
    else
        complete(c, b);
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

koila_status koila_cache_record_stream(koila_cache *c, uint64_t addr, uint64_t stream)
{
    uint32_t b = hash_find(c, addr);
    if (!b || c->blocks[b].state != KOILA_BLOCK_USED)
        return KOILA_BAD_ARGUMENT;
    if (c->lanes[c->blocks[b].lane]->stream == stream)
        return KOILA_OK;
    for (uint32_t u = c->blocks[b].uses; u; u = c->uses[u].next)
        if (c->uses[u].stream == stream)
            return KOILA_OK;
    if (!koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    uint32_t u = c->s.dead_use;
    if (u)
        c->s.dead_use = c->uses[u].next;
    else
        u = c->s.n_uses++;
    koila_assert(u && u < c->uses_cap);
    *wr_use(c, u) = (use){ stream, c->blocks[b].uses };
    wr(c, b)->uses = u;
    return KOILA_OK;
}

koila_status koila_cache_complete(koila_cache *c, uint64_t addr)
{
    uint32_t b = hash_find(c, addr);
    if (!b || c->blocks[b].state != KOILA_BLOCK_PENDING)
        return KOILA_BAD_ARGUMENT;
    if (c->n_marks && !koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    queue_take(c, b);
    complete(c, b);
    return KOILA_OK;
}

koila_status koila_cache_sync(koila_cache *c)
{
    if (c->n_marks && !koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    complete_pending(c);
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

koila_status koila_cache_empty(koila_cache *c)
{
    if (!koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
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
void koila__cache_set_driver(koila_cache *c, const koila__cache_driver *driver)
{
    c->driver = driver ? *driver : (koila__cache_driver){ 0 };
}
void koila__cache_set_settings(koila_cache *c, const koila_cache_config *conf)
{
    c->conf = *conf;
    c->s.expandable = conf->expandable;
}

koila_status koila_cache_pool_hold(koila_cache *c, koila_pool id, uint32_t flags)
{
    if (!id.owner && !id.id)
        return KOILA_BAD_ARGUMENT;
    if (!koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    pool *p = koila__cache_pool(c, id);
    if (!p)
        return KOILA_NO_MEMORY;
    p = wr_pool(c, (uint32_t)(p - c->pools));
    if (!(c->conf.rules & KOILA_RULE_NO_SPLIT_POOLS))
        flags &= ~(uint32_t)KOILA_POOL_NO_SPLIT;
    if (!(c->conf.rules & KOILA_RULE_POOL_DEATH_FREES))
        flags &= ~(uint32_t)KOILA_POOL_FREED_AT_DEATH;
    p->flags |= flags;
    p->n_holders++;
    return KOILA_OK;
}

koila_status koila_cache_pool_drop(koila_cache *c, koila_pool id)
{
    pool *p = id.owner || id.id ? pool_find(c, id) : NULL;
    if (!p || !p->n_holders)
        return KOILA_BAD_ARGUMENT;
    if (!koila__cache_reserve(c))
        return KOILA_NO_MEMORY;
    wr_pool(c, (uint32_t)(p - c->pools))->n_holders--;
    if (!p->n_holders && (p->flags & KOILA_POOL_FREED_AT_DEATH) && p->n_segments)
        release_dead_pool(c, p);
    koila_check(koila__cache_check(c));
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

/* ---- birth and death */

static koila_status check_config(const koila_cache_config *c, koila_error *e)
{
    if (c->struct_size != sizeof *c)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0,
                           "koila_cache_config.struct_size: call koila_cache_config_init first");
    if (c->large_segment_bytes <= 10 * MIB || c->large_segment_bytes > (uint64_t)1 << 50 ||
        c->large_segment_bytes % UNIT)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "large_segment_bytes out of range");
    if (c->max_split_bytes < c->large_segment_bytes)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "max_split_bytes below large_segment_bytes");
    if (c->first_address >= SPACE_MAX / 2 || c->total_bytes > SPACE_MAX ||
        c->device_bytes > SPACE_MAX / 4)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "a size of 2^60 or more");
    if (!(c->gc_threshold >= 0.0 && c->gc_threshold < 1.0))
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "gc_threshold outside [0, 1)");
    for (int i = 0; i < 16; i++)
        if (!is_power_of_two(c->divisions[i]) || c->divisions[i] > 1u << 30)
            return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "divisions[%d] is no power of two", i);
    if (c->expandable && !(c->rules & KOILA_RULE_SKIP_EXPANDABLE) &&
        (c->max_split_bytes != KOILA_NO_LIMIT || c->gc_threshold > 0.0))
        return koila__fail(
            e, KOILA_UNSUPPORTED, 0,
            "torch %u.%u can crash with expandable_segments and %s together (fixed in 2.9)",
            c->torch_version / 100, c->torch_version % 100,
            c->gc_threshold > 0.0 ? "garbage_collection_threshold" : "max_split_size_mb");
    return KOILA_OK;
}

koila_status koila_cache_new(const koila_cache_config *conf, const koila_allocator *mem,
                             koila_cache **out, koila_error *e)
{
    KOILA_TRY(check_config(conf, e));
    koila_allocator m = koila__allocator(mem);
    koila_cache *c = koila__realloc(&m, NULL, 0, sizeof *c);
    if (!c)
        return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    memset(c, 0, sizeof *c);
    c->mem = m;
    c->conf = *conf;
    c->s = (scalars){ .total = conf->total_bytes,
                      .outside = conf->outside_bytes,
                      .cap = conf->cap_bytes,
                      .next_addr = conf->first_address,
                      .n_slots_used = 1,
                      .n_segs = 1,
                      .n_uses = 1,
                      .expandable = conf->expandable };
    c->s.stat.struct_size = (uint32_t)sizeof c->s.stat;
    c->epoch = 1;
    c->next_mark = 1;
    if (!koila__cache_pool(c, KOILA_POOL_DEFAULT) || !koila__cache_reserve(c)) {
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
    if (!c)
        return;
    koila_allocator m = c->mem;
    for (uint32_t i = 0; i < c->n_lanes; i++)
        koila__release(&m, c->lanes[i], lane_bytes(c->lanes[i]->binned));
    for (uint32_t i = 0; i < c->n_pools; i++)
        for (int small = 0; small < 2; small++)
            koila__release(&m, c->pools[i].lanes[small],
                           c->pools[i].lanes_cap[small] * sizeof(uint32_t));
    koila__release(&m, c->lanes, c->lanes_cap * sizeof(lane *));
    koila__release(&m, c->pools, c->pools_cap * sizeof(pool));
    koila__release(&m, c->blocks, c->blocks_cap * sizeof(block));
    koila__release(&m, c->segs, c->segs_cap * sizeof(segment));
    koila__release(&m, c->uses, c->uses_cap * sizeof(use));
    koila__release(&m, c->hash, c->hash ? sizeof(slot) << c->hash_bits : 0);
    koila__release(&m, c->log, c->log_cap * sizeof *c->log);
    koila__release(&m, c->marks, c->marks_cap * sizeof(mark));
    koila__release(&m, c, sizeof *c);
}
