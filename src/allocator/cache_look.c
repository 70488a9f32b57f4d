/* cache_look.c — nothing here moves a block: statistics by name, all blocks in order, fingerprints,
 * and every invariant checked. */
#include "allocator/cache_lanes.h"

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
    static const char *const pools[] = { "all", "small_pool", "large_pool" }, *const fields[] = {
        "current", "peak", "allocated", "freed"
    };
    static const char *const single[] = { "num_alloc_retries",  "num_ooms",
                                          "num_oom_rejections", "num_device_alloc",
                                          "num_device_free",    "num_sync_all_streams" };
    const size_t n_of = KOILA_N_STATS * KOILA_N_STAT_POOLS * 4;
    const koila_counter *k;
    if (i < n_of) {
        k = &s->of[i / 12][i / 4 % 3];
        snprintf(name, 64, "%s.%s.%s", kinds[i / 12], pools[i / 4 % 3], fields[i % 4]);
    } else if (i < n_of + 8) {
        k = i < n_of + 4 ? &s->oversize_allocations : &s->oversize_segments;
        snprintf(name, 64, "oversize_%s.%s", i < n_of + 4 ? "allocations" : "segments",
                 fields[i % 4]);
    } else if (i < n_of + 8 + KOILA_COUNT(single)) {
        const uint64_t values[] = { s->num_alloc_retries,  s->num_ooms,
                                    s->num_oom_rejections, s->num_device_alloc,
                                    s->num_device_free,    s->num_sync_all_streams };
        snprintf(name, 64, "%s", single[i - n_of - 8]);
        *value = values[i - n_of - 8];
        return true;
    } else {
        return false;
    }
    const uint64_t values[] = { k->current, k->peak, k->allocated, k->freed };
    *value = values[i % KOILA_COUNT(fields)];
    return true;
}

koila_status koila_cache_walk(const koila_cache *c, koila_block_fn f, void *user)
{
    uint32_t n = 0;
    if (c->s.n_segs <= 1)
        return KOILA_OK;
    uint32_t *order = koila__realloc(&c->mem, NULL, 0, c->s.n_segs * sizeof *order);
    if (!order)
        return KOILA_NO_MEMORY;
    for (uint32_t i = 1; i < c->s.n_segs; i++)
        if (c->segs[i].first)
            order[n++] = i;
    koila_assert(n < c->s.n_segs);
    /* heap sort: no recursion, no worst case */
    for (uint32_t end = n, start = n / 2; end > 1;) {
        if (start)
            start--;
        else {
            end--;
            uint32_t t = order[0];
            order[0] = order[end];
            order[end] = t;
        }
        for (uint32_t at = start, child; (child = 2 * at + 1) < end; at = child) {
            if (child + 1 < end && c->segs[order[child]].addr < c->segs[order[child + 1]].addr)
                child++;
            if (c->segs[order[at]].addr >= c->segs[order[child]].addr)
                break;
            uint32_t t = order[at];
            order[at] = order[child];
            order[child] = t;
        }
    }
    bool on = true;
    for (uint32_t i = 0; i < n && on; i++) {
        const segment *g = &c->segs[order[i]];
        const lane *l = c->lanes[g->lane];
        for (uint32_t b = g->first; b && on; b = c->blocks[b].next) {
            const block *x = &c->blocks[b];
            koila_block out = { x->addr,
                                x->size,
                                x->requested,
                                (koila_block_state)x->state,
                                i,
                                l->stream,
                                c->pools[l->pool >> 1].id,
                                l->pool & 1,
                                g->expandable };
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
    const uint64_t v[] = { b->addr,       b->size,    b->requested, b->state,        b->stream,
                           b->pool.owner, b->pool.id, b->is_small,  b->is_expandable };
    for (size_t i = 0; i < KOILA_COUNT(v); i++)
        x->h = mix(x->h, v[i]);
    return true;
}

uint64_t koila__cache_layout(const koila_cache *c)
{
    hashing x = { 1469598103934665603u };
    /* garbage collection goes by the ages of free blocks, ties by how old a block or its segment
     * is; blocks are renumbered whenever they are split */
    if (c->conf.gc_threshold > 0.0 || c->conf.rules & KOILA_RULE_OLDEST_BLOCK ||
        koila_cache_walk(c, mix_block, &x) != KOILA_OK)
        return 0;
    for (uint32_t i = 1; i < c->s.n_segs; i++)
        if (c->segs[i].first)
            x.h += mix(c->segs[i].number, c->segs[i].addr);
    return x.h | 1;
}

uint32_t koila__cache_torch_version(const koila_cache *c) { return c->conf.torch_version; }

uint64_t koila__cache_left(const koila_cache *c)
{
    const uint64_t held = c->s.stat.of[KOILA_STAT_ALLOCATED_BYTES][KOILA_STAT_ALL].current;
    koila_assert(held <= reserved(c));
    const uint64_t device = c->s.total > c->s.outside ? c->s.total - c->s.outside : 0;
    const uint64_t cap = c->s.expandable ? 0 : c->s.cap; /* which whole pages may pass */
    if (!c->s.total && !cap)
        return UINT64_MAX;
    uint64_t most = cap;
    if (c->s.total && (!cap || device < cap))
        most = device;
    if (most < reserved(c)) /* a limit forbids new segments: those that are there stay */
        most = reserved(c);
    return most > held ? most - held : 0;
}

void koila__cache_begin(koila_cache *c, uint64_t margin)
{
    koila_cache_stat *s = &c->s.stat;
    for (int k = 0; k < KOILA_N_STATS; k++)
        for (int p = 0; p < KOILA_N_STAT_POOLS; p++)
            s->of[k][p].peak = s->of[k][p].current;
    s->peak_device_bytes = s->device_bytes;
    if (c->s.total)
        c->s.total = c->s.total > margin + 1 ? c->s.total - margin : 1;
}

uint64_t koila__cache_fingerprint(const koila_cache *c)
{
    hashing x = { 1469598103934665603u };
    if (koila_cache_walk(c, mix_block, &x) != KOILA_OK)
        return 0;
    char name[64];
    uint64_t value;
    for (size_t i = 0; koila_cache_stat_at(&c->s.stat, i, name, &value); i++)
        x.h = mix(x.h, value);
    for (uint32_t b = c->s.pending_first; b; b = c->blocks[b].link[1])
        x.h = mix(x.h, c->blocks[b].addr);
    for (uint32_t i = 1; i < c->s.n_slots_used; i++) {
        const block *b = &c->blocks[i];
        if (b->state == KOILA_BLOCK_USED || b->state == KOILA_BLOCK_PENDING) {
            x.h += mix(b->addr, hash_find(c, b->addr) == i);
            for (uint32_t u = b->uses; u; u = c->uses[u].next)
                x.h += mix(c->uses[u].stream, b->addr);
        } else if (b->state == KOILA_BLOCK_FREE) {
            const lane *l = c->lanes[b->lane];
            x.h += mix(c->pools[l->pool >> 1].n_searches[l->pool & 1] - b->born, b->addr);
        }
    }
    koila_assert(c->s.n_slots_used <= c->blocks_cap && c->s.n_blocks < c->s.n_slots_used);
    const uint64_t v[] = { c->s.next_addr,
                           c->s.total,
                           c->s.outside,
                           c->s.cap,
                           c->s.n_out,
                           c->s.stat.device_bytes,
                           c->s.stat.peak_device_bytes,
                           c->s.expandable };
    for (size_t i = 0; i < KOILA_COUNT(v); i++)
        x.h = mix(x.h, v[i]);
    return x.h;
}

/* ---- every invariant, recomputed from the blocks */

#define HOLDS(e)                                                                                   \
    do {                                                                                           \
        if (!(e))                                                                                  \
            return false;                                                                          \
    } while (0)

/* What the statistics must say. Plain segments are those that are not expandable. */
typedef struct tally {
    uint64_t bytes[KOILA_BLOCK_UNMAPPED + 1], count[KOILA_BLOCK_UNMAPPED + 1]; /* by state */
    uint64_t n_split, split_bytes;                                             /* free, not alone */
    uint64_t n_plain, plain_bytes, plain_device_bytes, mapped_bytes;
    uint64_t n_out, requested;
} tally;

static bool check_block(const koila_cache *c, const segment *g, uint32_t b, tally *t)
{
    const block *x = &c->blocks[b];
    HOLDS(x->lane == g->lane && x->state <= KOILA_BLOCK_UNMAPPED);
    const bool room = x->state == KOILA_BLOCK_FREE || x->state == KOILA_BLOCK_UNMAPPED;
    HOLDS(!x->prev || !room || c->blocks[x->prev].state != x->state); /* else they were merged */
    HOLDS(x->state != KOILA_BLOCK_UNMAPPED || g->expandable);
    if (room)
        HOLDS(!x->uses && !x->requested);
    else
        HOLDS(hash_find(c, x->addr) == b);
    t->n_out += !room;
    t->requested += x->requested;
    t->bytes[x->state] += x->size;
    t->count[x->state]++;
    if (x->state == KOILA_BLOCK_FREE && !g->expandable && !is_alone(c, b)) {
        t->n_split++;
        t->split_bytes += x->size;
    }
    if (g->expandable && x->state != KOILA_BLOCK_UNMAPPED)
        t->mapped_bytes += x->size;
    return true;
}

/* Blocks tile their segment. */
static bool check_segments(const koila_cache *c, tally *t)
{
    for (uint32_t s = 1; s < c->s.n_segs; s++) {
        const segment *g = &c->segs[s];
        if (!g->first)
            continue;
        uint64_t at = g->addr;
        uint32_t prev = 0;
        for (uint32_t b = g->first; b; b = c->blocks[b].next) {
            const block *x = &c->blocks[b];
            HOLDS(x->addr == at && x->size > 0 && x->prev == prev && x->seg == s);
            HOLDS(check_block(c, g, b, t));
            at += x->size;
            prev = b;
        }
        HOLDS(at == g->addr + g->size);
        if (g->expandable)
            continue;
        t->n_plain++;
        t->plain_bytes += g->size;
        t->plain_device_bytes += granules(g->size);
    }
    return true;
}

static bool check_statistics(const koila_cache *c, const tally *t)
{
    const koila_cache_stat *s = &c->s.stat;
    for (int k = 0; k < KOILA_N_STATS; k++) {
        const koila_counter *all = &s->of[k][KOILA_STAT_ALL];
        const koila_counter *small = &s->of[k][KOILA_STAT_SMALL];
        const koila_counter *large = &s->of[k][KOILA_STAT_LARGE];
        HOLDS(all->current == small->current + large->current);
        HOLDS(all->allocated == small->allocated + large->allocated);
        HOLDS(all->current == all->allocated - all->freed && all->current <= all->peak);
    }
    const uint64_t *bytes = t->bytes;
    const uint64_t *count = t->count;
#define NOW(kind) s->of[KOILA_STAT_##kind][KOILA_STAT_ALL].current
    HOLDS(NOW(RESERVED_BYTES) == t->plain_bytes + t->mapped_bytes && NOW(SEGMENT) == t->n_plain);
    HOLDS(NOW(ALLOCATED_BYTES) == bytes[KOILA_BLOCK_USED]);
    HOLDS(NOW(ALLOCATION) == count[KOILA_BLOCK_USED]);
    HOLDS(NOW(ACTIVE_BYTES) == bytes[KOILA_BLOCK_USED] + bytes[KOILA_BLOCK_PENDING]);
    HOLDS(NOW(ACTIVE) == count[KOILA_BLOCK_USED] + count[KOILA_BLOCK_PENDING]);
    HOLDS(NOW(REQUESTED_BYTES) == t->requested);
    HOLDS(NOW(ALLOCATED_BYTES) <= NOW(ACTIVE_BYTES) && NOW(ACTIVE_BYTES) <= NOW(RESERVED_BYTES));
    HOLDS(NOW(INACTIVE_SPLIT) == t->n_split && NOW(INACTIVE_SPLIT_BYTES) == t->split_bytes);
#undef NOW
    HOLDS(s->device_bytes >= t->plain_device_bytes && t->n_out == c->s.n_out);
    return true;
}

/* Lanes hold every free and every unmapped block, in order; the queue holds every pending one. */
static bool check_lanes(const koila_cache *c, const tally *t)
{
    uint64_t n_free = 0, n_unmapped = 0, n_pending = 0;
    for (uint32_t i = 0; i < c->n_lanes; i++) {
        const lane *l = c->lanes[i];
        for (uint32_t b = lane_at_least(c, l, 0), next; b; b = next) {
            HOLDS(c->blocks[b].state == KOILA_BLOCK_FREE && c->blocks[b].lane == i);
            next = lane_next(c, l, b);
            HOLDS(!next || before(c, &c->blocks[b], &c->blocks[next], true));
            HOLDS(++n_free <= t->count[KOILA_BLOCK_FREE]);
        }
        for (uint32_t b = unmapped_at_least(c, l, 0); b;
             b = unmapped_at_least(c, l, c->blocks[b].addr + 1)) {
            HOLDS(c->blocks[b].state == KOILA_BLOCK_UNMAPPED && c->blocks[b].lane == i);
            HOLDS(++n_unmapped <= t->count[KOILA_BLOCK_UNMAPPED]);
        }
    }
    for (uint32_t b = c->s.pending_first; b; b = c->blocks[b].link[1]) {
        HOLDS(c->blocks[b].state == KOILA_BLOCK_PENDING);
        HOLDS(++n_pending <= t->count[KOILA_BLOCK_PENDING]);
    }
    HOLDS(n_free == t->count[KOILA_BLOCK_FREE]);
    HOLDS(n_unmapped == t->count[KOILA_BLOCK_UNMAPPED]);
    HOLDS(n_pending == t->count[KOILA_BLOCK_PENDING]);
    return true;
}
#undef HOLDS

bool koila__cache_check(const koila_cache *c)
{
    tally t = { 0 };
    return check_segments(c, &t) && check_statistics(c, &t) && check_lanes(c, &t);
}

void koila__cache_break(koila_cache *c)
{
    for (uint32_t i = 1; i < c->s.n_slots_used; i++) {
        if (c->blocks[i].state > KOILA_BLOCK_UNMAPPED)
            continue;
        c->blocks[i].size -= UNIT;
        return;
    }
}
