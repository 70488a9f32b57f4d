/* replay_start.c — the state before the first entry of a trace. A snapshot holds the state at its
 * end.
 *
 * If every segment there ever was is made inside the trace, nothing was there before: start empty.
 * Otherwise the trace is undone backwards from the end: an alloc takes a live block away, a
 * completed free puts one back, waiting; and so on. The size of a block that died inside the window
 * is not recorded; Note [Size of a dead block].
 *
 * Another thread may have worked between torch's copies of the trace and of the segments. Then the
 * end state is newer than the trace and undoing contradicts itself. In that case it is undone once
 * more, and wherever the two disagree the trace is believed: what lies in its way goes, what it
 * needs is put there (`trace_only`).
 */
#include "allocator/replay.h"

#include "base/base.h"

#define MIB ((uint64_t)1 << 20)

/* Note [Size of a dead block]. A block that was live before the window and died in it has no
 * recorded size, only what was requested. In the small pool and in expandable memory splitting is
 * always exact: round(requested). Large pool: at max_split and above the whole segment; else with d
 * the smallest distance, over its life in the window, to the next live block or the segment's end:
 * a free large block is never 1 MiB or less, so d - r <= 1 MiB means the gap belongs to it.
 * Otherwise r, counted as assumed, until replay_learn.c finds out more. */

typedef struct undo {
    replay *r;
    omap blocks, segs;
    bool trace_only;
    uint64_t at; /* entry of the contradiction */
} undo;

static bool contradicts(undo *u, uint64_t i)
{
    u->at = i;
    return false;
}

static uint32_t seg_of(undo *u, uint64_t addr)
{
    uint32_t g = koila__omap_near(&u->segs, addr + 1, 0);
    return g && addr < u->segs.at[g].key + u->segs.at[g].size ? g : 0;
}

static bool seg_is_empty(undo *u, uint64_t addr, uint64_t size)
{
    uint32_t b = koila__omap_near(&u->blocks, addr + size, 0);
    return !b || u->blocks.at[b].key + (u->blocks.at[b].known ? u->blocks.at[b].size : 1) <= addr;
}

/* Blocks of the end state that lie in [addr, addr + size) came after the trace. */
static void clear_blocks(undo *u, uint64_t addr, uint64_t size)
{
    for (uint32_t b; (b = koila__omap_near(&u->blocks, addr + size, 0)) && u->blocks.at[b].known &&
                     u->blocks.at[b].key + u->blocks.at[b].size > addr;)
        koila__omap_drop(&u->blocks, u->blocks.at[b].key);
}

static bool undo_block(undo *u, uint64_t i, const snap_entry *x, koila_block_state state)
{
    const uint32_t g = seg_of(u, x->addr);
    if (u->trace_only) {
        uint64_t rounded;
        if (!g)
            return true; /* freed after the trace: its segment is not known yet */
        koila_cache_sizes(&u->r->conf, x->size, &rounded, NULL);
        clear_blocks(u, x->addr, rounded ? rounded : 1);
    }
    if (!g || koila__omap_find(&u->blocks, x->addr))
        return contradicts(u, i);
    uint32_t below = koila__omap_near(&u->blocks, x->addr, 0);
    uint32_t above = koila__omap_near(&u->blocks, x->addr, 1);
    const uint64_t end = u->segs.at[g].key + u->segs.at[g].size;
    uint64_t distance =
        (above && u->blocks.at[above].key < end ? u->blocks.at[above].key : end) - x->addr;
    if (below && x->addr - u->blocks.at[below].key < u->blocks.at[below].distance)
        u->blocks.at[below].distance = x->addr - u->blocks.at[below].key;
    if (below && u->blocks.at[below].known &&
        u->blocks.at[below].key + u->blocks.at[below].size > x->addr)
        return contradicts(u, i);
    uint32_t b = koila__omap_put(&u->blocks, x->addr);
    if (!b)
        return false;
    u->blocks.at[b].requested = x->size;
    u->blocks.at[b].distance = distance;
    u->blocks.at[b].stream = x->stream;
    u->blocks.at[b].state = (uint8_t)state;
    return true;
}

/* The segment of the map that begins below or at `addr`, and the next one; NULL: none. */
static node *seg_below(undo *u, uint64_t addr)
{
    const uint32_t g = koila__omap_near(&u->segs, addr + 1, 0);
    koila_assert(!g || u->segs.at[g].key <= addr);
    return g ? &u->segs.at[g] : NULL;
}
static node *seg_above(undo *u, uint64_t addr)
{
    const uint32_t g = koila__omap_near(&u->segs, addr, 1);
    koila_assert(!g || u->segs.at[g].key > addr);
    return g ? &u->segs.at[g] : NULL;
}
static uint64_t end_of(const node *x) { return x->key + x->size; }

static void drop_segment(undo *u, const node *g)
{
    const uint64_t addr = g->key;
    clear_blocks(u, addr, g->size);
    koila__omap_drop(&u->segs, addr);
}

/* Where the end state is not believed, segments that lie here were made after the trace. */
static void drop_later_segments(undo *u, uint64_t addr, uint64_t end)
{
    for (const node *above = seg_above(u, addr); above && end > above->key && !above->is_expandable;
         above = seg_above(u, addr))
        drop_segment(u, above);
    const node *below = seg_below(u, addr);
    if (below && end_of(below) > addr && !below->is_expandable)
        drop_segment(u, below);
}

static uint32_t pool_number(const undo *u, koila_pool p)
{
    const koila_snapshot *s = u->r->s;
    for (uint32_t k = s->n_pools; k-- > 0;)
        if (s->pools[k].owner == p.owner && s->pools[k].id == p.id)
            return k;
    return 0;
}

static bool add_segment(undo *u, uint64_t i, const snap_entry *x, koila_pool p, bool expandable)
{
    const uint64_t addr = x->addr;
    uint64_t size = x->size;
    const uint64_t large = u->r->conf.large_segment_bytes;
    bool is_small = expandable ? size % large != 0 : size == 2 * MIB;
    uint32_t pool = pool_number(u, p);
    if (u->trace_only)
        drop_later_segments(u, addr, addr + size);
    node *below = seg_below(u, addr);
    const node *above = seg_above(u, addr);
    /* none has no bytes or ends past the last address: it could lie twice at one place */
    if (!size || addr + size < addr || koila__omap_find(&u->segs, addr) ||
        (below && end_of(below) > addr) || (above && addr + size > above->key))
        return contradicts(u, i);
    if (expandable) { /* whole again with what it was cut from */
        if (above && above->is_expandable && above->key == addr + size &&
            above->stream == x->stream) {
            size += above->size;
            is_small = above->is_small;
            pool = above->pool;
            koila__omap_drop(&u->segs, addr + x->size);
        }
        if (below && below->is_expandable && end_of(below) == addr && below->stream == x->stream) {
            below->size += size;
            return true;
        }
    }
    const uint32_t g = koila__omap_put(&u->segs, addr);
    if (!g)
        return false;
    u->segs.at[g].size = size;
    u->segs.at[g].stream = x->stream;
    u->segs.at[g].pool = pool;
    u->segs.at[g].is_small = is_small;
    u->segs.at[g].is_expandable = expandable;
    return true;
}

static bool cut_segment(undo *u, uint64_t i, const snap_entry *x, bool expandable)
{
    const uint32_t g = seg_of(u, x->addr);
    if (!g && u->trace_only)
        return true; /* it went after the trace */
    if (u->trace_only)
        clear_blocks(u, x->addr, x->size);
    if (!g || !seg_is_empty(u, x->addr, x->size))
        return contradicts(u, i);
    node old = u->segs.at[g];
    if (!expandable) {
        if (old.key != x->addr || old.size != x->size)
            return contradicts(u, i);
        koila__omap_drop(&u->segs, x->addr);
        return true;
    }
    const uint64_t end = old.key + old.size;
    if (x->addr + x->size > end)
        return contradicts(u, i);
    if (old.key < x->addr)
        u->segs.at[g].size = x->addr - old.key;
    else
        koila__omap_drop(&u->segs, x->addr);
    if (x->addr + x->size < end) {
        uint32_t rest = koila__omap_put(&u->segs, x->addr + x->size);
        if (!rest)
            return false;
        uint32_t keep[2] = { u->segs.at[rest].link[0], u->segs.at[rest].link[1] };
        u->segs.at[rest] = old;
        u->segs.at[rest].key = x->addr + x->size;
        u->segs.at[rest].size = end - x->addr - x->size;
        memcpy(u->segs.at[rest].link, keep, sizeof keep);
    }
    return true;
}

static bool undo_entry(undo *u, uint64_t i)
{
    const snap_entry *x = entry(u->r, i);
    uint32_t b;
    switch (x->kind) {
    case KOILA_EVENT_ALLOC:
        b = koila__omap_find(&u->blocks, x->addr);
        if ((!b || u->blocks.at[b].state != KOILA_BLOCK_USED) && !u->trace_only)
            return contradicts(u, i);
        if (b)
            koila__omap_drop(&u->blocks, x->addr);
        if (u->trace_only)
            clear_blocks(u, x->addr, x->size);
        return true;
    case KOILA_EVENT_FREE_COMPLETED:
        return undo_block(u, i, x, KOILA_BLOCK_PENDING);
    case KOILA_EVENT_FREE_REQUESTED:
        b = koila__omap_find(&u->blocks, x->addr);
        if (b && u->blocks.at[b].state == KOILA_BLOCK_PENDING) {
            u->blocks.at[b].state = KOILA_BLOCK_USED;
            return true;
        }
        /* or it was completed after the trace */
        return u->trace_only ? undo_block(u, i, x, KOILA_BLOCK_USED) : contradicts(u, i);
    case KOILA_EVENT_SEGMENT_ALLOC:
        return cut_segment(u, i, x, false);
    case KOILA_EVENT_SEGMENT_MAP:
        return cut_segment(u, i, x, true);
    case KOILA_EVENT_SEGMENT_FREE:
        return add_segment(u, i, x, koila__replay_pool_at(u->r, i), false);
    case KOILA_EVENT_SEGMENT_UNMAP:
        return add_segment(u, i, x, koila__replay_pool_at(u->r, i), true);
    default:
        return true;
    }
}

static bool load_end(undo *u)
{
    const replay *r = u->r;
    for (size_t k = 0; k < r->n_segs; k++) {
        const koila_segment *g = &r->segs[k];
        snap_entry x = { .addr = g->addr, .size = g->size, .stream = g->stream };
        if (!add_segment(u, r->n, &x, g->pool, g->is_expandable))
            return false;
        uint32_t n = seg_of(u, g->addr);
        u->segs.at[n].is_small = g->is_small;
        for (size_t i = 0; i < g->n_blocks; i++) {
            if (g->blocks[i].state == KOILA_BLOCK_FREE)
                continue;
            if (koila__omap_find(&u->blocks, g->blocks[i].addr))
                return contradicts(u, r->n);
            uint32_t b = koila__omap_put(&u->blocks, g->blocks[i].addr);
            if (!b)
                return false;
            node *x2 = &u->blocks.at[b];
            x2->size = g->blocks[i].size;
            x2->requested = g->blocks[i].requested;
            x2->stream = g->stream;
            x2->state = (uint8_t)g->blocks[i].state;
            x2->known = true;
        }
    }
    return true;
}

/* Note [Size of a dead block]; `end`: of its segment. */
static uint64_t dead_size(replay *r, const node *b, const node *g)
{
    uint64_t rounded;
    koila_cache_sizes(&r->conf, b->requested, &rounded, NULL);
    if (g->is_small || g->is_expandable)
        return rounded;
    if (rounded >= r->conf.max_split_bytes)
        return g->key + g->size - b->key;
    if (b->distance >= rounded && b->distance - rounded <= MIB)
        return b->distance;
    r->out->n_assumed++;
    const assumed_block x = { b->key, rounded };
    if (!koila__vec_push(&r->mem, &r->assumed, x))
        r->no_memory = true;
    return koila__learned_size(r->learned, b->key, rounded);
}

static koila_status lay_out(undo *u)
{
    replay *r = u->r;
    const uint64_t max_blocks = 2 * (uint64_t)u->blocks.n + 2 * (uint64_t)u->segs.n + 2;
    r->start = koila__realloc(&r->mem, NULL, 0, (u->segs.n + 1) * sizeof *r->start);
    r->start_cap = u->segs.n + 1;
    r->start_blocks = koila__realloc(&r->mem, NULL, 0, max_blocks * sizeof *r->start_blocks);
    r->n_start_blocks = max_blocks;
    if (!r->start || !r->start_blocks)
        return KOILA_NO_MEMORY;
    uint64_t n_segs = 0, n = 0;
    for (uint32_t g = koila__omap_near(&u->segs, 0, 1); g;
         g = koila__omap_near(&u->segs, u->segs.at[g].key, 1)) {
        const node *s = &u->segs.at[g];
        koila_segment *out = &r->start[n_segs++];
        const uint64_t end = s->key + s->size;
        uint64_t at = s->key;
        *out = (koila_segment){ KOILA_SEGMENT_SIZES,
                                s->key,
                                s->size,
                                s->stream,
                                r->s->pools[s->pool],
                                s->is_small,
                                s->is_expandable,
                                r->start_blocks + n,
                                0 };
        for (uint32_t b = koila__omap_near(&u->blocks, s->key - 1, 1);
             b && u->blocks.at[b].key < end;
             b = koila__omap_near(&u->blocks, u->blocks.at[b].key, 1)) {
            const node *x = &u->blocks.at[b];
            uint64_t size = x->known ? x->size : dead_size(r, x, s);
            if (x->key < at || size == 0 || size > end - x->key)
                return KOILA_BAD_INPUT;
            if (x->key > at) {
                r->start_blocks[n++] =
                    (koila_block){ .addr = at, .size = x->key - at, .state = KOILA_BLOCK_FREE };
                out->n_blocks++;
            }
            r->start_blocks[n++] = (koila_block){ .addr = x->key,
                                                  .size = size,
                                                  .requested = x->requested,
                                                  .state = (koila_block_state)x->state };
            out->n_blocks++;
            r->out->n_start_blocks++;
            at = x->key + size;
        }
        if (at < end) {
            r->start_blocks[n++] =
                (koila_block){ .addr = at, .size = end - at, .state = KOILA_BLOCK_FREE };
            out->n_blocks++;
        }
        r->out->reservations_inferred |= s->is_expandable;
    }
    r->n_start = r->out->n_start_segments = n_segs;
    if (r->no_memory)
        return KOILA_NO_MEMORY;
    KOILA_TRY(koila_cache_from_segments(&r->conf, &r->mem, r->start, n_segs, &r->c, NULL));
    return koila__replay_set_ages(r);
}

/* All of it backwards. KOILA_BAD_INPUT: u->at contradicts what came later, or the blocks do not
 * fit. */
static koila_status undo_all(replay *r, bool trace_only, uint64_t *at)
{
    undo u = {
        .r = r, .blocks = { .mem = r->mem }, .segs = { .mem = r->mem }, .trace_only = trace_only
    };
    bool ok = load_end(&u);
    for (uint64_t i = r->n; ok && i > 0; i--)
        ok = undo_entry(&u, i - 1);
    koila_status status = KOILA_BAD_INPUT;
    if (u.blocks.failed || u.segs.failed)
        status = KOILA_NO_MEMORY;
    else if (ok)
        status = lay_out(&u);
    *at = ok ? UINT64_MAX : u.at;
    koila__omap_free(&u.blocks);
    koila__omap_free(&u.segs);
    return status;
}

/* `made` is a set of stretches of memory that do not overlap, by address. These two return false
 * where the trace lacks entries; when the host is out of memory made->failed is set. */
static void put_stretch(omap *made, uint64_t addr, uint64_t size)
{
    uint32_t b = koila__omap_find(made, addr);
    if (!b)
        b = koila__omap_put(made, addr);
    if (b)
        made->at[b].size = size;
}
static bool add_stretch(omap *made, uint64_t addr, uint64_t size)
{
    const uint32_t b = koila__omap_near(made, addr + 1, 0);
    if (addr + size < addr)
        return false; /* past the last address */
    if (b && end_of(&made->at[b]) > addr)
        return false; /* made twice */
    if (b && end_of(&made->at[b]) == addr)
        made->at[b].size += size;
    else
        put_stretch(made, addr, size);
    return true;
}
static bool cut_stretch(omap *made, uint64_t addr, uint64_t size)
{
    const uint32_t b = koila__omap_near(made, addr + 1, 0);
    const uint64_t end = addr + size;
    if (!b || end_of(&made->at[b]) < end)
        return false; /* freed, and not made */
    const uint64_t from = made->at[b].key;
    const uint64_t to = end_of(&made->at[b]);
    if (from < addr)
        made->at[b].size = addr - from;
    else
        koila__omap_drop(made, from);
    if (end < to)
        put_stretch(made, end, to - end);
    return true;
}

/* Does every byte of a segment lie in the set? Maps above one another touch without being one. */
static bool covers(const omap *made, const koila_segment *g)
{
    for (uint64_t at = g->addr; at < g->addr + g->size;) {
        const uint32_t b = koila__omap_near(made, at + 1, 0);
        if (!b || end_of(&made->at[b]) <= at)
            return false;
        koila_assert(made->at[b].key <= at);
        at = end_of(&made->at[b]);
    }
    return true;
}

/* Is every segment, of the end or freed on the way, made inside the trace? Then nothing was there
 * before it. */
static bool is_whole(const replay *r, bool *no_memory)
{
    omap made = { .mem = r->mem };
    bool whole = true;
    for (uint64_t i = 0; i < r->n && whole && !made.failed; i++) {
        const snap_entry *x = entry(r, i);
        if (!is_segment_event(x->kind))
            continue;
        if (x->kind == KOILA_EVENT_SEGMENT_ALLOC || x->kind == KOILA_EVENT_SEGMENT_MAP)
            whole = add_stretch(&made, x->addr, x->size);
        else
            whole = cut_stretch(&made, x->addr, x->size);
    }
    for (size_t i = 0; i < r->n_segs && whole && !made.failed; i++)
        whole = covers(&made, &r->segs[i]);
    *no_memory = made.failed;
    koila__omap_free(&made);
    return whole;
}

koila_status koila__replay_start(replay *r, koila_error *e)
{
    uint64_t at, unused;
    bool no_memory = false;
    r->whole = r->n && is_whole(r, &no_memory);
    koila_status status = KOILA_OK;
    if (no_memory)
        status = KOILA_NO_MEMORY;
    else if (!r->whole)
        status = undo_all(r, false, &at);
    if (status == KOILA_BAD_INPUT && at != UINT64_MAX) {
        r->trace_only = true;
        snprintf(r->out->reason, sizeof r->out->reason,
                 "end state not checked: it contradicts the trace at entry %llu (entries missing, "
                 "or another thread was at work)",
                 (unsigned long long)at);
        status = undo_all(r, true, &unused);
    }
    if (status == KOILA_BAD_INPUT || status == KOILA_BAD_ARGUMENT) {
        koila__replay_stop(r, KOILA_NOT_CHECKABLE, 0,
                           "the state before the first entry cannot be told from the trace");
        status = KOILA_OK;
    }
    if (status == KOILA_NO_MEMORY)
        return koila__fail(e, status, 0, "the host is out of memory");
    if (!status && !r->c)
        status = koila_cache_new(&r->conf, &r->mem, &r->c, e);
    return status;
}
