/* replay.c — is a recording what the rules of cache.c say? The recorded requests go in; addresses and segments must come out.
 *
 * A cursor walks the trace. Each request is given to the cache, and every event the cache answers with is compared with the entry under
 * the cursor: kind, address, size, stream. The cache's driver (cudaMalloc) is the recording too: a new segment succeeds iff the recording
 * has one there, at the recorded address. So a failed cudaMalloc and its retry need no guess: the cache finds nothing under the cursor,
 * gives memory back as the rules say, and each segment it frees must be the recorded one.
 *
 * What a program did besides allocating is not in the file. If the plain explanation does not reproduce the entries up to the next request
 * byte for byte, the cache is rewound and these are tried in order, and counted: empty_cache before it; expandable switched; both;
 * garbage collection. (A cap looks like a failed cudaMalloc.) Nothing else may explain a difference.
 *
 * Start. `segments` is the state at the end. If anything was live before the first entry, the trace is undone backwards from there. The
 * size of a block that died inside the window is not recorded; Note [Size of a dead block].
 */
#include "alloc.h"
#include "cache.h"
#include "snapshot.h"

#define MIB ((uint64_t)1 << 20)

/* ---- an ordered map from addresses to records: a treap, nodes by index, 0 = none */

typedef struct node {
    uint64_t key, size, requested, distance, stream;
    uint32_t link[2], pool;
    uint8_t state; /* koila_block_state of blocks */
    bool is_small, is_expandable, known; /* known: `size` is from the end state */
} node;
typedef struct omap {
    koila_allocator mem;
    node *at;
    uint32_t n, cap, root, dead;
    bool failed;
} omap;

static uint32_t omap_priority(uint32_t i) { return i * 2654435761u; }
static uint32_t omap_find(const omap *m, uint64_t key)
{
    uint32_t i = m->root;
    while (i && m->at[i].key != key) i = m->at[i].link[m->at[i].key < key];
    return i;
}
/* the nearest below (side 0) or above (side 1) a key, never the key itself */
static uint32_t omap_near(const omap *m, uint64_t key, int side)
{
    uint32_t best = 0;
    for (uint32_t i = m->root; i;) {
        bool ok = side ? m->at[i].key > key : m->at[i].key < key;
        if (ok) best = i;
        i = m->at[i].link[ok ? !side : side];
    }
    return best;
}
static uint32_t omap_put(omap *m, uint64_t key)
{
    uint32_t x = m->dead;
    if (x) m->dead = m->at[x].link[0];
    else {
        if (m->n + 2 > m->cap) {
            uint32_t cap = m->cap ? m->cap * 2 : 64;
            node *at = cap > 1u << 30 ? NULL : koila__realloc(&m->mem, m->at, m->cap * sizeof(node), cap * sizeof(node));
            if (!at) return m->failed = true, 0;
            m->at = at;
            m->cap = cap;
        }
        x = ++m->n;
    }
    m->at[x] = (node){ .key = key };
    uint32_t *link = &m->root;
    while (*link && omap_priority(*link) >= omap_priority(x)) link = &m->at[*link].link[m->at[*link].key < key];
    uint32_t rest = *link;
    *link = x;
    uint32_t *low = &m->at[x].link[0], *high = &m->at[x].link[1];
    while (rest) {
        if (m->at[rest].key < key) *low = rest, low = &m->at[rest].link[1], rest = *low;
        else *high = rest, high = &m->at[rest].link[0], rest = *high;
    }
    *low = *high = 0;
    return x;
}
static void omap_drop(omap *m, uint64_t key)
{
    uint32_t *link = &m->root;
    while (*link && m->at[*link].key != key) link = &m->at[*link].link[m->at[*link].key < key];
    uint32_t x = *link;
    if (!x) return;
    uint32_t l = m->at[x].link[0], r = m->at[x].link[1];
    while (l && r) {
        if (omap_priority(l) >= omap_priority(r)) *link = l, link = &m->at[l].link[1], l = *link;
        else *link = r, link = &m->at[r].link[0], r = *link;
    }
    *link = l ? l : r;
    m->at[x].link[0] = m->dead;
    m->dead = x;
}
static void omap_free(omap *m) { koila__release(&m->mem, m->at, m->cap * sizeof(node)); }

/* ---- the trace, and which pool an entry belongs to */

typedef struct pool_hold {
    koila_pool id;
    bool dropped;
} pool_hold;

typedef struct replay {
    const koila_snapshot *s;
    uint32_t device;
    uint64_t n; /* entries */
    const koila_segment *segs;
    size_t n_segs;
    uint64_t *made_at; /* per end segment: entry that made it, or 0 */
    koila_cache_config conf;
    koila_cache *c;
    const koila_cache_stat *stat;
    koila_allocator mem;
    /* the cursor */
    uint64_t at;
    bool watching, differs, driver_failed, wait_in_sync;
    koila_event expected;
    pool_hold *holds;
    uint32_t n_holds, holds_cap;
    /* result */
    koila_replay_result *out;
    bool stopped, no_memory;
    koila_moment_fn f;
    void *f_user;
    uint64_t until;
    koila_segment *start;
    koila_block *start_blocks;
    uint64_t n_start, start_cap, n_start_blocks;
} replay;

static const snap_entry *entry(const replay *r, uint64_t i) { return snap_entry_at(r->s, r->s->traces[r->device].first + i); }

static const koila_segment *end_segment(const replay *r, uint64_t addr)
{
    size_t lo = 0, hi = r->n_segs;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (r->segs[mid].addr + r->segs[mid].size <= addr) lo = mid + 1;
        else hi = mid;
    }
    return lo < r->n_segs && r->segs[lo].addr <= addr ? &r->segs[lo] : NULL;
}

static koila_pool pool_at(const replay *r, uint64_t i)
{
    const snap_entry *x = entry(r, i);
    if (x->has_pool) return r->s->pools[x->pool];
    const koila_segment *g = end_segment(r, x->addr);
    return g && r->made_at[g - r->segs] <= i ? g->pool : KOILA_POOL_DEFAULT;
}
static bool is_default(koila_pool p) { return !p.owner && !p.id; }

static bool is_segment_event(int kind) { return kind >= KOILA_EVENT_SEGMENT_ALLOC && kind <= KOILA_EVENT_SEGMENT_UNMAP; }

static const char *const action_names[] = { "nothing", "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom", "snapshot" };

static void name_event(char *p, size_t n, int kind, uint64_t addr, uint64_t size)
{
    if (kind == KOILA_EVENT_OOM) snprintf(p, n, "oom %llu", (unsigned long long)size);
    else if (!kind) snprintf(p, n, "nothing");
    else snprintf(p, n, "%s 0x%llx %llu", action_names[kind], (unsigned long long)addr, (unsigned long long)size);
}

/* ---- verdicts. Differences become "not checkable" where the recording itself leaves something open. */

static void stop(replay *r, koila_verdict verdict, uint64_t at, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 4, 5)))
#endif
    ;
static void stop(replay *r, koila_verdict verdict, uint64_t at, const char *fmt, ...)
{
    if (r->stopped) return;
    va_list ap;
    r->stopped = true;
    koila_replay_result *o = r->out;
    char *p = o->reason;
    size_t room = sizeof o->reason;
    bool pools = false;
    for (size_t i = 0; i < r->n_segs; i++) pools |= !is_default(r->segs[i].pool);
    if (verdict == KOILA_DIFFERS) {
        int n = 0;
        if (o->n_assumed) n = snprintf(p, room, "start state assumed for %llu blocks; ", (unsigned long long)o->n_assumed);
        else if (r->conf.gc_threshold > 0.0 && r->n_start) n = snprintf(p, room, "garbage collection with ages from before the recording; ");
        else if (r->conf.release_lock) n = snprintf(p, room, "release_lock_on_cudamalloc with several threads; ");
        else if (o->reservations_inferred && r->n_start) n = snprintf(p, room, "where a reservation begins and ends was inferred; ");
        else if (pools && !r->s->has_pool_ids) n = snprintf(p, room, "memory pools whose entries are not marked; ");
        if (n > 0) verdict = KOILA_NOT_CHECKABLE, p += n, room -= (size_t)n;
    }
    va_start(ap, fmt);
    vsnprintf(p, room, fmt, ap);
    va_end(ap);
    o->verdict = verdict;
    o->at_entry = at;
}

static void stop_at_difference(replay *r, uint64_t i)
{
    char expected[80], recorded[80];
    name_event(expected, sizeof expected, r->expected.kind, r->expected.addr, r->expected.size);
    if (i < r->n) name_event(recorded, sizeof recorded, entry(r, i)->kind, entry(r, i)->addr, entry(r, i)->size);
    else snprintf(recorded, sizeof recorded, "the end");
    stop(r, KOILA_DIFFERS, i, "at event %llu: expected %s, recorded %s", (unsigned long long)i, expected, recorded);
}

/* ---- what the cache says, against what is under the cursor */

static void compare(void *user, const koila_event *e)
{
    replay *r = user;
    if (!r->watching || r->differs) return;
    const snap_entry *x = r->at < r->n ? entry(r, r->at) : NULL;
    const bool same = x && x->kind == e->kind && x->size == e->size && (e->kind == KOILA_EVENT_OOM || (x->addr == e->addr && x->stream == e->stream));
    if (same) {
        r->at++;
    } else {
        r->differs = true;
        r->expected = *e;
    }
}

static bool give(void *user, koila_event_kind kind, uint64_t size, uint64_t stream, uint64_t *addr)
{
    replay *r = user;
    const snap_entry *x = r->at < r->n ? entry(r, r->at) : NULL;
    if (r->differs) return false;
    if ((int)kind == KOILA__RESERVATION) {
        if (!x || x->kind != KOILA_EVENT_SEGMENT_MAP || x->stream != stream) return r->driver_failed = true, false;
        r->out->reservations_inferred = true;
        *addr = x->addr;
        return true;
    }
    if (x && x->kind == kind && x->size == size && x->stream == stream && (kind == KOILA_EVENT_SEGMENT_ALLOC || x->addr == *addr)) return *addr = x->addr, true;
    if (x && (x->kind == KOILA_EVENT_SEGMENT_ALLOC || x->kind == KOILA_EVENT_SEGMENT_MAP)) { /* one was made, but not this one */
        r->differs = true;
        r->expected = (koila_event){ kind, kind == KOILA_EVENT_SEGMENT_ALLOC ? 0 : *addr, size, stream, KOILA_POOL_DEFAULT };
    }
    r->driver_failed = true;
    return false;
}

/* Release-all waits for other streams: what completed there is recorded, in its order. */
static void before_sync(void *user)
{
    replay *r = user;
    if (r->differs) return;
    while (r->at < r->n && entry(r, r->at)->kind == KOILA_EVENT_FREE_COMPLETED) {
        if (koila_cache_complete(r->c, entry(r, r->at)->addr) != KOILA_OK || r->differs) return;
    }
}

static bool hold_pool(replay *r, koila_pool p)
{
    if (is_default(p)) return true;
    for (uint32_t i = 0; i < r->n_holds; i++)
        if (r->holds[i].id.owner == p.owner && r->holds[i].id.id == p.id) return true;
    if (r->n_holds == r->holds_cap) {
        uint32_t cap = r->holds_cap ? r->holds_cap * 2 : 8;
        pool_hold *h = koila__realloc(&r->mem, r->holds, r->holds_cap * sizeof *h, cap * sizeof *h);
        if (!h) return r->no_memory = true, false;
        r->holds = h;
        r->holds_cap = cap;
    }
    r->holds[r->n_holds++] = (pool_hold){ p, false };
    if (koila_cache_pool_hold(r->c, p, 0) != KOILA_OK) return r->no_memory = true, false;
    return true;
}

/* Pools whose segments the recording frees in [from, to) have lost their holders by then. */
static void drop_pools(replay *r, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to; i++) {
        const int kind = entry(r, i)->kind;
        if (kind != KOILA_EVENT_SEGMENT_FREE && kind != KOILA_EVENT_SEGMENT_UNMAP) continue;
        const koila_pool p = pool_at(r, i);
        if (!is_default(p)) koila_cache_pool_drop(r->c, p);
    }
}

/* ---- one request, several explanations */

enum { EMPTY_FIRST = 1, SWITCH = 2, COLLECT = 4 };

/* Do all entries from `from` up to and including `last` follow, if the request at `last` (none if last == r->n or not a request) is made
 * this way? Leaves the cache as it was if not. */
static bool follows(replay *r, uint64_t from, uint64_t last, bool request, unsigned how, size_t n_rounds)
{
    const uint64_t mark = koila_cache_mark(r->c);
    if (!mark) return r->no_memory = true, false;
    r->at = from;
    r->differs = r->driver_failed = false;
    drop_pools(r, from, last);
    if (how & SWITCH) r->conf.expandable = !r->conf.expandable, koila_cache_set_expandable(r->c, r->conf.expandable);
    if ((how & EMPTY_FIRST) && koila_cache_empty(r->c) != KOILA_OK) r->no_memory = true;
    if ((how & COLLECT) && !r->differs) koila__cache_collect(r->c, n_rounds);
    if (request && !r->differs) {
        const snap_entry *x = entry(r, last);
        uint64_t addr;
        if (koila_cache_malloc(r->c, x->size, x->stream, pool_at(r, last), &addr) == KOILA_NO_MEMORY) r->no_memory = true;
    }
    const bool ok = !r->differs && !r->no_memory && r->at == last + (request ? 1 : 0);
    if (!ok) {
        if (!r->differs && !r->no_memory) { /* the cache said less than the recording */
            r->differs = true;
            r->expected = (koila_event){ 0 };
        }
        koila_cache_rewind(r->c, mark);
        if (how & SWITCH) r->conf.expandable = !r->conf.expandable;
    }
    koila_cache_forget(r->c, mark);
    return ok;
}

static void explain(replay *r, uint64_t from, uint64_t last, bool request)
{
    static const unsigned ways[] = { 0, EMPTY_FIRST, SWITCH, SWITCH | EMPTY_FIRST };
    koila_replay_result *o = r->out;
    koila_event first = { 0 };
    uint64_t first_at = from;
    for (size_t k = request ? 0 : 1; k < KOILA_COUNT(ways); k++) {
        if (!request && !(ways[k] & EMPTY_FIRST)) continue;
        if (follows(r, from, last, request, ways[k], 0)) {
            const bool oom = request && entry(r, last)->kind == KOILA_EVENT_OOM;
            if (ways[k] & SWITCH) o->n_expandable_switched++;
            if (ways[k] & EMPTY_FIRST) o->n_empty++;
            else if (r->driver_failed && oom) o->n_retries++;
            else if (r->driver_failed) o->n_retry_or_empty++;
            return;
        }
        if (r->no_memory) return;
        if (k == 0 || (!request && k == 1)) first = r->expected, first_at = r->at;
    }
    for (size_t rounds = 1; request && r->conf.gc_threshold > 0.0 && rounds <= 64; rounds++) {
        if (follows(r, from, last, request, COLLECT, rounds)) {
            o->n_collected++;
            return;
        }
        if (r->no_memory) return;
    }
    r->expected = first;
    stop_at_difference(r, first_at);
}

static void tell_moment(replay *r, uint64_t i)
{
    const koila_counter *reserved = &r->stat->of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL], *allocated = &r->stat->of[KOILA_STAT_ALLOCATED_BYTES][KOILA_STAT_ALL];
    koila_replay_result *o = r->out;
    if (reserved->current > o->peak_reserved) o->peak_reserved = reserved->current, o->peak_entry = i;
    if (allocated->current > o->peak_allocated) o->peak_allocated = allocated->current, o->peak_allocated_entry = i;
    const uint64_t active = r->stat->of[KOILA_STAT_ACTIVE_BYTES][KOILA_STAT_ALL].current;
    if (active > o->peak_active) o->peak_active = active;
    if (r->f) {
        const snap_entry *x = entry(r, i);
        koila_moment m = { i, x->time_us, allocated->current, active, reserved->current, (koila_event_kind)x->kind, x->addr, x->size, x->stack };
        r->f(r->f_user, &m);
    }
}

static void count_request(replay *r, uint64_t i)
{
    const bool oom = entry(r, i)->kind == KOILA_EVENT_OOM;
    r->out->n_addresses += !oom;
    r->out->n_ooms += oom;
    if (oom && r->out->first_oom_entry == UINT64_MAX) r->out->first_oom_entry = i;
}

/* A free or a completion, taken as it is. */
static bool free_entry(replay *r, uint64_t i)
{
    const snap_entry *x = entry(r, i);
    if (x->kind == KOILA_EVENT_FREE_REQUESTED) {
        const snap_entry *next = i + 1 < r->n ? entry(r, i + 1) : NULL;
        const bool at_once = next && next->kind == KOILA_EVENT_FREE_COMPLETED && next->addr == x->addr;
        if (!at_once) koila_cache_record_stream(r->c, x->addr, ~x->stream);
        koila_status status = koila_cache_release(r->c, x->addr);
        if (status == KOILA_NO_MEMORY) r->no_memory = true;
        else if (status) stop(r, KOILA_NOT_CHECKABLE, i, "entry %llu: frees 0x%llx, which is not allocated", (unsigned long long)i, (unsigned long long)x->addr);
    } else if (koila_cache_complete(r->c, x->addr) != KOILA_OK) {
        stop(r, KOILA_NOT_CHECKABLE, i, "entry %llu: completes 0x%llx, which was not freed", (unsigned long long)i, (unsigned long long)x->addr);
    }
    if (r->differs && !r->stopped) stop_at_difference(r, r->at);
    return !r->stopped && !r->no_memory;
}

/* Entries [i, last) are completions, perhaps after the free of the first of them; a request at `end` follows. Some of them may have come
 * before the request's search, the rest inside its retry: find a split that gives the recording. */
static bool settle(replay *r, uint64_t i, uint64_t last, uint64_t end)
{
    koila_replay_result *o = r->out;
    const bool with_free = entry(r, i)->kind == KOILA_EVENT_FREE_REQUESTED;
    const uint64_t first = i + with_free, n = last - first;
    const uint64_t mark = koila_cache_mark(r->c);
    if (!mark) return r->no_memory = true, false;
    for (uint64_t k = 0; k <= n && k <= 64; k++) {
        const uint64_t before = k == 0 ? n : k == 1 ? 0 : n - k + 1; /* all, none, then fewer and fewer */
        uint64_t addr;
        bool ok = true;
        r->at = i;
        r->differs = r->driver_failed = false;
        if (with_free) {
            koila_cache_record_stream(r->c, entry(r, i)->addr, ~entry(r, i)->stream);
            ok = koila_cache_release(r->c, entry(r, i)->addr) == KOILA_OK;
        }
        for (uint64_t j = first; ok && j < first + before; j++) ok = koila_cache_complete(r->c, entry(r, j)->addr) == KOILA_OK;
        if (ok && !r->differs) {
            drop_pools(r, last, end);
            if (koila_cache_malloc(r->c, entry(r, end)->size, entry(r, end)->stream, pool_at(r, end), &addr) == KOILA_NO_MEMORY) r->no_memory = true;
        }
        if (ok && !r->differs && !r->no_memory && r->at == end + 1) {
            const bool oom = entry(r, end)->kind == KOILA_EVENT_OOM;
            for (uint64_t j = last; j < end; j++) o->n_segment_events += is_segment_event(entry(r, j)->kind);
            count_request(r, end);
            if (r->driver_failed && oom) o->n_retries++;
            else if (r->driver_failed) o->n_retry_or_empty++;
            koila_cache_forget(r->c, mark);
            return true;
        }
        koila_cache_rewind(r->c, mark);
        if (r->no_memory) break;
    }
    koila_cache_forget(r->c, mark);
    return false;
}

/* The entries from the cursor up to the next request, and that request. */
static void advance(replay *r)
{
    const uint64_t i = r->at;
    const snap_entry *x = entry(r, i);
    koila_replay_result *o = r->out;
    uint64_t last = i;
    r->watching = true;
    r->differs = false;
    switch (x->kind) {
    case KOILA_EVENT_FREE_REQUESTED:
    case KOILA_EVENT_FREE_COMPLETED:
        /* Waiting blocks complete before a request, or inside its retry. Then a segment event or an oom follows the last of them; with
         * expandable memory perhaps neither, for what completed may now be room enough. */
        last = i + (x->kind == KOILA_EVENT_FREE_REQUESTED && i + 1 < r->n && entry(r, i + 1)->kind == KOILA_EVENT_FREE_COMPLETED && entry(r, i + 1)->addr == x->addr);
        while (last < r->n && entry(r, last)->kind == KOILA_EVENT_FREE_COMPLETED) last++;
        if (last > i && last < r->n && (is_segment_event(entry(r, last)->kind) || entry(r, last)->kind == KOILA_EVENT_OOM ||
                                         (r->conf.expandable && entry(r, last)->kind == KOILA_EVENT_ALLOC))) {
            uint64_t end = last;
            while (end < r->n && (is_segment_event(entry(r, end)->kind) || entry(r, end)->kind == KOILA_EVENT_FREE_COMPLETED)) end++;
            const bool may = end < r->n && (entry(r, end)->kind == KOILA_EVENT_ALLOC || entry(r, end)->kind == KOILA_EVENT_OOM) && entry(r, end)->size;
            if (may && hold_pool(r, pool_at(r, end)) && settle(r, i, last, end)) return;
            if (r->no_memory) return;
        }
        r->at = i;
        r->differs = false;
        free_entry(r, i);
        return;
    case KOILA_EVENT_SNAPSHOT:
        r->at++;
        if (x->size && x->size != r->stat->of[KOILA_STAT_ACTIVE_BYTES][KOILA_STAT_ALL].current)
            stop(r, KOILA_DIFFERS, i, "at event %llu: %llu bytes active, the recording says %llu", (unsigned long long)i,
                 (unsigned long long)r->stat->of[KOILA_STAT_ACTIVE_BYTES][KOILA_STAT_ALL].current, (unsigned long long)x->size);
        return;
    case 0: r->at++; return; /* user_defined */
    default: break;
    }
    while (last < r->n && (is_segment_event(entry(r, last)->kind) || (last > i && entry(r, last)->kind == KOILA_EVENT_FREE_COMPLETED))) last++;
    const bool request = last < r->n && (entry(r, last)->kind == KOILA_EVENT_ALLOC || entry(r, last)->kind == KOILA_EVENT_OOM);
    if (request && !hold_pool(r, pool_at(r, last))) return;
    if (request && entry(r, last)->size == 0) {
        stop(r, KOILA_NOT_CHECKABLE, last, "entry %llu: a request of 0 bytes", (unsigned long long)last);
        return;
    }
    if (request && last == i && x->kind == KOILA_EVENT_ALLOC) {
        koila_status status = koila__cache_malloc_at(r->c, x->size, x->stream, pool_at(r, i), x->addr);
        if (status == KOILA_NO_MEMORY) r->no_memory = true;
        if (status == KOILA_OK) {
            if (r->differs) stop_at_difference(r, i);
            o->n_addresses++;
            return;
        }
    }
    for (uint64_t k = i; k < last; k++) o->n_segment_events += is_segment_event(entry(r, k)->kind);
    if (request) count_request(r, last);
    explain(r, i, last, request);
}

/* ---- the start: undo the trace from the end state */

/* Note [Size of a dead block]
 * A block that was live before the window and died in it has no recorded size, only what was requested. In the small pool and in
 * expandable memory splitting is always exact: round(requested). Large pool: at max_split and above the whole segment; else with d the
 * smallest distance, over its life in the window, to the next live block or the segment's end: a free large block is never 1 MiB or
 * less, so d - r <= 1 MiB means the gap belongs to it. Otherwise r, counted as assumed. */

typedef struct undo {
    replay *r;
    omap blocks, segs;
    bool contradiction;
    uint64_t at;
} undo;

static bool contradicts(undo *u, uint64_t i)
{
    u->contradiction = true;
    u->at = i;
    return false;
}

static uint32_t seg_of(undo *u, uint64_t addr)
{
    uint32_t g = omap_near(&u->segs, addr + 1, 0);
    return g && addr < u->segs.at[g].key + u->segs.at[g].size ? g : 0;
}

static bool seg_is_empty(undo *u, uint64_t addr, uint64_t size)
{
    uint32_t b = omap_near(&u->blocks, addr + size, 0);
    return !b || u->blocks.at[b].key + (u->blocks.at[b].known ? u->blocks.at[b].size : 1) <= addr;
}

static bool undo_block(undo *u, uint64_t i, const snap_entry *x)
{
    const uint32_t g = seg_of(u, x->addr);
    if (!g || omap_find(&u->blocks, x->addr)) return contradicts(u, i);
    uint32_t below = omap_near(&u->blocks, x->addr, 0), above = omap_near(&u->blocks, x->addr, 1);
    const uint64_t end = u->segs.at[g].key + u->segs.at[g].size;
    uint64_t distance = (above && u->blocks.at[above].key < end ? u->blocks.at[above].key : end) - x->addr;
    if (below && x->addr - u->blocks.at[below].key < u->blocks.at[below].distance) u->blocks.at[below].distance = x->addr - u->blocks.at[below].key;
    if (below && u->blocks.at[below].known && u->blocks.at[below].key + u->blocks.at[below].size > x->addr) return contradicts(u, i);
    uint32_t b = omap_put(&u->blocks, x->addr);
    if (!b) return false;
    u->blocks.at[b].requested = x->size;
    u->blocks.at[b].distance = distance;
    u->blocks.at[b].stream = x->stream;
    u->blocks.at[b].state = KOILA_BLOCK_PENDING;
    return true;
}

static bool add_segment(undo *u, uint64_t i, const snap_entry *x, koila_pool p, bool expandable)
{
    uint64_t addr = x->addr, size = x->size;
    const uint64_t large = u->r->conf.large_segment_bytes;
    bool is_small = expandable ? size % large != 0 : size == 2 * MIB;
    uint32_t below = omap_near(&u->segs, addr + 1, 0), above = omap_near(&u->segs, addr, 1), pool = 0;
    if ((below && u->segs.at[below].key + u->segs.at[below].size > addr) || (above && addr + size > u->segs.at[above].key)) return contradicts(u, i);
    for (uint32_t k = 0; k < u->r->s->n_pools; k++)
        if (u->r->s->pools[k].owner == p.owner && u->r->s->pools[k].id == p.id) pool = k;
    if (expandable) { /* whole again with what it was cut from */
        if (above && u->segs.at[above].is_expandable && u->segs.at[above].key == addr + size && u->segs.at[above].stream == x->stream) {
            size += u->segs.at[above].size;
            is_small = u->segs.at[above].is_small;
            pool = u->segs.at[above].pool;
            omap_drop(&u->segs, addr + x->size);
        }
        if (below && u->segs.at[below].is_expandable && u->segs.at[below].key + u->segs.at[below].size == addr && u->segs.at[below].stream == x->stream) {
            u->segs.at[below].size += size;
            return true;
        }
    }
    uint32_t g = omap_put(&u->segs, addr);
    if (!g) return false;
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
    if (!g || !seg_is_empty(u, x->addr, x->size)) return contradicts(u, i);
    node old = u->segs.at[g];
    if (!expandable) {
        if (old.key != x->addr || old.size != x->size) return contradicts(u, i);
        omap_drop(&u->segs, x->addr);
        return true;
    }
    const uint64_t end = old.key + old.size;
    if (x->addr + x->size > end) return contradicts(u, i);
    if (old.key < x->addr) u->segs.at[g].size = x->addr - old.key;
    else omap_drop(&u->segs, x->addr);
    if (x->addr + x->size < end) {
        uint32_t rest = omap_put(&u->segs, x->addr + x->size);
        if (!rest) return false;
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
        b = omap_find(&u->blocks, x->addr);
        if (!b || u->blocks.at[b].state != KOILA_BLOCK_USED) return contradicts(u, i);
        omap_drop(&u->blocks, x->addr);
        return true;
    case KOILA_EVENT_FREE_COMPLETED: return undo_block(u, i, x);
    case KOILA_EVENT_FREE_REQUESTED:
        b = omap_find(&u->blocks, x->addr);
        if (!b || u->blocks.at[b].state != KOILA_BLOCK_PENDING) return contradicts(u, i);
        u->blocks.at[b].state = KOILA_BLOCK_USED;
        return true;
    case KOILA_EVENT_SEGMENT_ALLOC: return cut_segment(u, i, x, false);
    case KOILA_EVENT_SEGMENT_MAP: return cut_segment(u, i, x, true);
    case KOILA_EVENT_SEGMENT_FREE: return add_segment(u, i, x, pool_at(u->r, i), false);
    case KOILA_EVENT_SEGMENT_UNMAP: return add_segment(u, i, x, pool_at(u->r, i), true);
    default: return true;
    }
}

static bool load_end(undo *u)
{
    const replay *r = u->r;
    for (size_t k = 0; k < r->n_segs; k++) {
        const koila_segment *g = &r->segs[k];
        snap_entry x = { .addr = g->addr, .size = g->size, .stream = g->stream };
        if (!add_segment(u, r->n, &x, g->pool, g->is_expandable)) return false;
        uint32_t n = seg_of(u, g->addr);
        u->segs.at[n].is_small = g->is_small;
        for (size_t i = 0; i < g->n_blocks; i++) {
            if (g->blocks[i].state == KOILA_BLOCK_FREE) continue;
            uint32_t b = omap_put(&u->blocks, g->blocks[i].addr);
            if (!b) return false;
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
    if (g->is_small || g->is_expandable) return rounded;
    if (rounded >= r->conf.max_split_bytes) return g->key + g->size - b->key;
    if (b->distance >= rounded && b->distance - rounded <= MIB) return b->distance;
    r->out->n_assumed++;
    return rounded;
}

static koila_status lay_out(undo *u)
{
    replay *r = u->r;
    const uint64_t max_blocks = 2 * (uint64_t)u->blocks.n + 2 * (uint64_t)u->segs.n + 2;
    r->start = koila__realloc(&r->mem, NULL, 0, (u->segs.n + 1) * sizeof *r->start);
    r->start_cap = u->segs.n + 1;
    r->start_blocks = koila__realloc(&r->mem, NULL, 0, max_blocks * sizeof *r->start_blocks);
    r->n_start_blocks = max_blocks;
    if (!r->start || !r->start_blocks) return KOILA_NO_MEMORY;
    uint64_t n_segs = 0, n = 0;
    for (uint32_t g = omap_near(&u->segs, 0, 1); g; g = omap_near(&u->segs, u->segs.at[g].key, 1)) {
        const node *s = &u->segs.at[g];
        koila_segment *out = &r->start[n_segs++];
        const uint64_t end = s->key + s->size;
        uint64_t at = s->key;
        *out = (koila_segment){ s->key, s->size, s->stream, r->s->pools[s->pool], s->is_small, s->is_expandable, r->start_blocks + n, 0 };
        for (uint32_t b = omap_near(&u->blocks, s->key - 1, 1); b && u->blocks.at[b].key < end; b = omap_near(&u->blocks, u->blocks.at[b].key, 1)) {
            const node *x = &u->blocks.at[b];
            uint64_t size = x->known ? x->size : dead_size(r, x, s);
            if (x->key < at || size == 0 || size > end - x->key) return KOILA_BAD_INPUT;
            if (x->key > at) r->start_blocks[n++] = (koila_block){ .addr = at, .size = x->key - at, .state = KOILA_BLOCK_FREE }, out->n_blocks++;
            r->start_blocks[n++] = (koila_block){ .addr = x->key, .size = size, .requested = x->requested, .state = (koila_block_state)x->state };
            out->n_blocks++;
            r->out->n_start_blocks++;
            at = x->key + size;
        }
        if (at < end) r->start_blocks[n++] = (koila_block){ .addr = at, .size = end - at, .state = KOILA_BLOCK_FREE }, out->n_blocks++;
        r->out->reservations_inferred |= s->is_expandable;
    }
    r->n_start = n_segs;
    return koila_cache_from_segments(&r->conf, &r->mem, r->start, n_segs, &r->c, NULL);
}

/* r->c in the state before the first entry. */
static koila_status make_start(replay *r, koila_error *e)
{
    undo u = { .r = r, .blocks = { .mem = r->mem }, .segs = { .mem = r->mem } };
    bool ok = load_end(&u);
    for (uint64_t i = r->n; ok && i > 0; i--) ok = undo_entry(&u, i - 1);
    koila_status status = KOILA_OK;
    if (u.blocks.failed || u.segs.failed) status = KOILA_NO_MEMORY;
    else if (!ok) {
        stop(r, KOILA_NOT_CHECKABLE, u.at, "the end state contradicts the trace at entry %llu (entries missing, or another thread was recording)", (unsigned long long)u.at);
        r->out->end_checked = false;
    } else {
        status = lay_out(&u);
        if (status == KOILA_BAD_INPUT || status == KOILA_BAD_ARGUMENT) {
            stop(r, KOILA_NOT_CHECKABLE, 0, "the state before the first entry cannot be told from the trace");
            status = KOILA_OK;
        }
    }
    omap_free(&u.blocks);
    omap_free(&u.segs);
    if (status == KOILA_NO_MEMORY) return koila__fail(e, status, 0, "the host is out of memory");
    if (!status && !r->c) status = koila_cache_new(&r->conf, &r->mem, &r->c, e);
    return status;
}

/* ---- the end */

typedef struct end_check {
    replay *r;
    size_t seg, block;
    bool bad;
    uint64_t n;
} end_check;

static bool check_end_block(void *user, const koila_block *b)
{
    end_check *c = user;
    const replay *r = c->r;
    if (b->state == KOILA_BLOCK_UNMAPPED) return true;
    while (c->seg < r->n_segs && c->block == r->segs[c->seg].n_blocks) c->seg++, c->block = 0;
    if (c->seg == r->n_segs) return c->bad = true, false;
    const koila_block *want = &r->segs[c->seg].blocks[c->block++];
    c->n++;
    c->bad = want->addr != b->addr || want->size != b->size || want->state != b->state || (want->requested && want->requested != b->requested) || want->stream != b->stream;
    return !c->bad;
}

static void check_end(replay *r)
{
    end_check c = { .r = r };
    if (koila_cache_walk(r->c, check_end_block, &c) != KOILA_OK) {
        r->no_memory = true;
        return;
    }
    while (c.seg < r->n_segs && c.block == r->segs[c.seg].n_blocks) c.seg++, c.block = 0;
    r->out->n_end_blocks = c.n;
    r->out->end_checked = true;
    if (c.bad || c.seg < r->n_segs) {
        uint64_t addr = c.bad && c.block ? r->segs[c.seg].blocks[c.block - 1].addr : c.seg < r->n_segs ? r->segs[c.seg].addr : 0;
        stop(r, KOILA_DIFFERS, r->n, "at the end: the block at 0x%llx is not as recorded", (unsigned long long)addr);
    }
}

/* ---- the run */

/* A set of addresses: open addressing, deletion by moving back. */
typedef struct addr_set {
    koila_allocator mem;
    uint64_t *at;
    uint64_t n, cap;
    bool failed;
} addr_set;
static uint64_t addr_home(const addr_set *t, uint64_t addr) { return (addr >> 9) * 0x9E3779B97F4A7C15u >> 16 & (t->cap - 1); }
static bool set_has(const addr_set *t, uint64_t addr)
{
    if (!t->cap) return false;
    for (uint64_t h = addr_home(t, addr); t->at[h]; h = (h + 1) & (t->cap - 1))
        if (t->at[h] == addr) return true;
    return false;
}
static void set_put(addr_set *t, uint64_t addr)
{
    if (!addr || set_has(t, addr)) return;
    if ((t->n + 1) * 2 > t->cap) {
        const uint64_t cap = t->cap ? t->cap * 2 : 1024;
        uint64_t *at = koila__realloc(&t->mem, NULL, 0, (size_t)cap * 8), *old = t->at;
        if (!at) {
            t->failed = true;
            return;
        }
        memset(at, 0, (size_t)cap * 8);
        const uint64_t old_cap = t->cap;
        t->at = at;
        t->cap = cap;
        for (uint64_t i = 0; i < old_cap; i++) {
            if (!old[i]) continue;
            uint64_t h = addr_home(t, old[i]);
            while (at[h]) h = (h + 1) & (cap - 1);
            at[h] = old[i];
        }
        koila__release(&t->mem, old, (size_t)old_cap * 8);
    }
    uint64_t h = addr_home(t, addr);
    while (t->at[h]) h = (h + 1) & (t->cap - 1);
    t->at[h] = addr;
    t->n++;
}
static bool set_drop(addr_set *t, uint64_t addr)
{
    if (!set_has(t, addr)) return false;
    const uint64_t mask = t->cap - 1;
    uint64_t hole = addr_home(t, addr);
    while (t->at[hole] != addr) hole = (hole + 1) & mask;
    for (uint64_t h = (hole + 1) & mask; t->at[h]; h = (h + 1) & mask)
        if (((h - addr_home(t, t->at[h])) & mask) >= ((h - hole) & mask)) t->at[hole] = t->at[h], hole = h;
    t->at[hole] = 0;
    t->n--;
    return true;
}

/* Is every freed block and every segment of the end made in the window? */
static bool begins_inside(const replay *r, koila_error *e, bool *inside)
{
    addr_set live = { .mem = r->mem }, segs = { .mem = r->mem };
    *inside = true;
    for (uint64_t i = 0; i < r->n && *inside && !live.failed && !segs.failed; i++) {
        const snap_entry *x = entry(r, i);
        switch (x->kind) {
        case KOILA_EVENT_ALLOC: set_put(&live, x->addr); break;
        case KOILA_EVENT_FREE_REQUESTED: *inside = set_has(&live, x->addr); break;
        case KOILA_EVENT_FREE_COMPLETED: *inside = set_drop(&live, x->addr); break;
        case KOILA_EVENT_SEGMENT_ALLOC: case KOILA_EVENT_SEGMENT_MAP: set_put(&segs, x->addr); break;
        case KOILA_EVENT_SEGMENT_FREE: *inside = set_drop(&segs, x->addr); break;
        default: break;
        }
    }
    for (size_t i = 0; i < r->n_segs && *inside; i++) *inside = set_has(&segs, r->segs[i].addr);
    const bool failed = live.failed || segs.failed;
    koila__release(&r->mem, live.at, (size_t)live.cap * 8);
    koila__release(&r->mem, segs.at, (size_t)segs.cap * 8);
    if (failed) koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    return !failed;
}

static koila_status setup(replay *r, const koila_snapshot *s, uint32_t device, const koila_cache_config *c, koila_replay_result *out, koila_error *e)
{
    if (device >= s->n_devices) return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "no device %u: the snapshot has %u", device, s->n_devices);
    memset(r, 0, sizeof *r);
    memset(out, 0, sizeof *out);
    out->struct_size = (uint32_t)sizeof *out;
    out->first_oom_entry = UINT64_MAX;
    r->s = s;
    r->device = device;
    r->out = out;
    r->mem = s->mem;
    r->until = UINT64_MAX;
    r->n = koila_snapshot_n_entries(s, device);
    r->segs = koila_snapshot_segments(s, device, &r->n_segs);
    if (c) r->conf = *c;
    else KOILA_TRY(koila_snapshot_config(s, device, NULL, &r->conf, e));
    r->conf.total_bytes = r->conf.outside_bytes = 0; /* the recording decides what failed */
    r->conf.cap_bytes = r->conf.gc_threshold > 0.0 ? (uint64_t)1 << 62 : 0; /* ages count, but when to collect the recording decides too */
    out->torch_version = r->conf.torch_version;
    out->verified = r->conf.verified;
    out->n_entries = r->n;
    if (r->n_segs && !(r->made_at = koila__realloc(&r->mem, NULL, 0, r->n_segs * sizeof(uint64_t)))) return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    if (r->made_at) memset(r->made_at, 0, r->n_segs * sizeof(uint64_t));
    for (uint64_t i = 0; i < r->n; i++) {
        const snap_entry *x = entry(r, i);
        if (x->kind != KOILA_EVENT_SEGMENT_ALLOC) continue;
        const koila_segment *g = end_segment(r, x->addr);
        if (g && g->addr == x->addr) r->made_at[g - r->segs] = i;
    }
    return KOILA_OK;
}

static void teardown(replay *r)
{
    koila_cache_free(r->c);
    koila__release(&r->mem, r->made_at, r->n_segs * sizeof(uint64_t));
    koila__release(&r->mem, r->holds, r->holds_cap * sizeof *r->holds);
    koila__release(&r->mem, r->start, r->start_cap * sizeof *r->start);
    koila__release(&r->mem, r->start_blocks, r->n_start_blocks * sizeof *r->start_blocks);
}

static koila_status begin(replay *r, koila_error *e)
{
    bool inside;
    if (!begins_inside(r, e, &inside)) return KOILA_NO_MEMORY;
    if (inside) KOILA_TRY(koila_cache_new(&r->conf, &r->mem, &r->c, e));
    else KOILA_TRY(make_start(r, e));
    for (uint64_t i = 0; i < r->n_start; i++)
        if (!hold_pool(r, r->start[i].pool)) return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    r->stat = koila__cache_stats_ref(r->c);
    r->out->peak_reserved = r->stat->of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL].current;
    r->out->peak_allocated = r->stat->of[KOILA_STAT_ALLOCATED_BYTES][KOILA_STAT_ALL].current;
    r->out->peak_active = r->stat->of[KOILA_STAT_ACTIVE_BYTES][KOILA_STAT_ALL].current;
    return KOILA_OK;
}

static koila_status run(replay *r, koila_error *e)
{
    koila__cache_driver driver = { r, give, before_sync };
    koila__cache_set_driver(r->c, &driver);
    koila_cache_observe(r->c, compare, r);
    while (r->at < r->n && !r->stopped && !r->no_memory) {
        const uint64_t before = r->at;
        if (before > r->until) break;
        advance(r);
        if (!r->stopped && !r->no_memory)
            for (uint64_t i = before; i < r->at; i++) tell_moment(r, i);
    }
    koila_cache_observe(r->c, NULL, NULL);
    koila__cache_set_driver(r->c, NULL);
    if (r->no_memory) return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    return KOILA_OK;
}

typedef struct losing {
    const koila_cache_config *conf;
    koila_replay_result *out;
    uint64_t seg_live, seg_free;
    uint32_t seg;
    bool any;
} losing;

static void lose_segment(losing *l)
{
    if (l->seg_live) l->out->lost_pinned += l->seg_free;
    else l->out->lost_whole += l->seg_free;
    l->seg_live = l->seg_free = 0;
}
static bool lose_block(void *user, const koila_block *b)
{
    losing *l = user;
    uint64_t rounded;
    if (l->any && b->segment != l->seg) lose_segment(l);
    l->any = true;
    l->seg = b->segment;
    switch (b->state) {
    case KOILA_BLOCK_FREE: l->seg_free += b->size; break;
    case KOILA_BLOCK_PENDING:
        l->out->waiting += b->size;
        l->seg_live += b->size;
        break;
    case KOILA_BLOCK_USED:
        koila_cache_sizes(l->conf, b->requested, &rounded, NULL);
        if (!b->requested || rounded > b->size) rounded = b->size;
        l->out->at_peak_requested += b->requested ? b->requested : b->size;
        l->out->lost_rounding += rounded - (b->requested ? b->requested : b->size);
        l->out->lost_unsplit += b->size - rounded;
        l->seg_live += b->size;
        break;
    default: break;
    }
    return true;
}

koila_status koila_replay(const koila_snapshot *s, uint32_t device, const koila_cache_config *c, koila_replay_result *out, koila_error *e)
{
    replay r;
    koila_replay_result scratch;
    koila_status status = setup(&r, s, device, c, &scratch, e);
    if (!status && r.n == 0) {
        scratch.verdict = KOILA_STATE_ONLY;
        snprintf(scratch.reason, sizeof scratch.reason, "no trace: state only; call torch.cuda.memory._record_memory_history() before training");
        status = make_start(&r, e);
        if (!status) r.stat = koila__cache_stats_ref(r.c);
    } else if (!status) {
        status = begin(&r, e);
        if (!status && !r.stopped) status = run(&r, e);
        if (!status && !r.stopped) check_end(&r);
        if (!status && r.no_memory) status = koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
        if (!status && !r.stopped) {
            const uint64_t n = scratch.n_retries + scratch.n_retry_or_empty + scratch.n_empty + scratch.n_expandable_switched + scratch.n_collected;
            scratch.verdict = n ? KOILA_EXACT_WITH_DECISIONS : KOILA_EXACT;
        }
    }
    if (!status) {
        losing l = { .conf = &r.conf, .out = &scratch };
        scratch.stat.struct_size = 0;
        koila_cache_stats(r.c, &scratch.stat);
        if (scratch.verdict == KOILA_STATE_ONLY) {
            scratch.peak_reserved = r.stat->of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL].current;
            scratch.peak_allocated = r.stat->of[KOILA_STAT_ALLOCATED_BYTES][KOILA_STAT_ALL].current;
            scratch.peak_active = r.stat->of[KOILA_STAT_ACTIVE_BYTES][KOILA_STAT_ALL].current;
            if (koila_cache_walk(r.c, lose_block, &l) != KOILA_OK) status = KOILA_NO_MEMORY;
            lose_segment(&l);
        } else if (scratch.peak_reserved) { /* once more, up to the peak, to look around there */
            replay again;
            koila_replay_result ignored;
            status = setup(&again, s, device, c, &ignored, e);
            again.until = scratch.peak_entry;
            if (!status) status = begin(&again, e);
            if (!status && !again.stopped) status = run(&again, e);
            if (!status && koila_cache_walk(again.c, lose_block, &l) != KOILA_OK) status = koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
            lose_segment(&l);
            teardown(&again);
        }
    }
    teardown(&r);
    if (!status) *out = scratch;
    return status;
}

koila_status koila_timeline(const koila_snapshot *s, uint32_t device, const koila_cache_config *c, koila_moment_fn f, void *f_user, uint64_t until, koila_block_fn blocks,
                            void *blocks_user, bool *exact, koila_error *e)
{
    replay r;
    koila_replay_result out;
    koila_status status = setup(&r, s, device, c, &out, e);
    uint64_t allocated = 0, active = 0, reserved = 0;
    r.f = f;
    r.f_user = f_user;
    r.until = until;
    if (!status) status = begin(&r, e);
    if (!status && !r.stopped) status = run(&r, e);
    if (!status) {
        allocated = r.stat->of[KOILA_STAT_ALLOCATED_BYTES][KOILA_STAT_ALL].current;
        active = r.stat->of[KOILA_STAT_ACTIVE_BYTES][KOILA_STAT_ALL].current;
        reserved = r.stat->of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL].current;
        *exact = !r.stopped;
        if (r.stopped && !r.at && r.n_segs) { /* no start state: what was reserved at the end, less what came in the window */
            reserved = 0;
            for (size_t i = 0; i < r.n_segs; i++) reserved += r.segs[i].size;
            for (uint64_t i = 0; i < r.n; i++) {
                const snap_entry *x = entry(&r, i);
                if (x->kind == KOILA_EVENT_SEGMENT_ALLOC || x->kind == KOILA_EVENT_SEGMENT_MAP) reserved = reserved > x->size ? reserved - x->size : 0;
                if (x->kind == KOILA_EVENT_SEGMENT_FREE || x->kind == KOILA_EVENT_SEGMENT_UNMAP) reserved += x->size;
            }
        }
        for (uint64_t i = r.at; r.stopped && i < r.n && i <= until; i++) { /* the rest by adding up */
            const snap_entry *x = entry(&r, i);
            uint64_t size = x->size;
            if (x->kind <= KOILA_EVENT_FREE_COMPLETED) koila_cache_sizes(&r.conf, x->size, &size, NULL);
            switch (x->kind) {
            case KOILA_EVENT_ALLOC: allocated += size, active += size; break;
            case KOILA_EVENT_FREE_REQUESTED: allocated = allocated > size ? allocated - size : 0; break;
            case KOILA_EVENT_FREE_COMPLETED: active = active > size ? active - size : 0; break;
            case KOILA_EVENT_SEGMENT_ALLOC: case KOILA_EVENT_SEGMENT_MAP: reserved += size; break;
            case KOILA_EVENT_SEGMENT_FREE: case KOILA_EVENT_SEGMENT_UNMAP: reserved = reserved > size ? reserved - size : 0; break;
            default: break;
            }
            koila_moment m = { i, x->time_us, allocated, active, reserved, (koila_event_kind)x->kind, x->addr, x->size, x->stack };
            if (f) f(f_user, &m);
        }
        if (blocks && !r.stopped && koila_cache_walk(r.c, blocks, blocks_user) != KOILA_OK) status = koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    }
    teardown(&r);
    return status;
}

/* ---- what if */

koila_status koila_whatif(const koila_snapshot *s, uint32_t device, const koila_cache_config *c, koila_whatif_result *out, koila_error *e)
{
    replay r;
    koila_replay_result unused;
    koila_whatif_result w = { .struct_size = (uint32_t)sizeof w, .first_oom_entry = UINT64_MAX, .fits = true };
    omap where = { .mem = s->mem };
    koila_cache *sim = NULL;
    koila_status status = setup(&r, s, device, c, &unused, e);
    if (!status) status = begin(&r, e);
    if (!status) status = koila_cache_new(c, &r.mem, &sim, e);
    /* blocks live at the start, in address order, into fresh segments */
    for (uint64_t g = 0; !status && g < r.n_start; g++) {
        for (size_t i = 0; i < r.start[g].n_blocks && !status; i++) {
            const koila_block *b = &r.start[g].blocks[i];
            uint64_t addr;
            if (b->state == KOILA_BLOCK_FREE) continue;
            w.approximate_start = true;
            status = koila_cache_malloc(sim, b->requested ? b->requested : b->size, r.start[g].stream, r.start[g].pool, &addr);
            if (status == KOILA_OOM) {
                w.fits = false;
                if (!w.n_ooms++) w.first_oom_entry = 0, w.first_oom_bytes = b->size;
                status = KOILA_OK;
                continue;
            }
            uint32_t n = status ? 0 : omap_put(&where, b->addr);
            if (n) where.at[n].size = addr;
        }
    }
    for (uint64_t i = 0; !status && !where.failed && i < r.n; i++) {
        const snap_entry *x = entry(&r, i);
        uint32_t n = x->kind == KOILA_EVENT_OOM ? 0 : omap_find(&where, x->addr);
        uint64_t addr;
        switch (x->kind) {
        case KOILA_EVENT_ALLOC: case KOILA_EVENT_OOM:
            if (n) omap_drop(&where, x->addr);
            status = koila_cache_malloc(sim, x->size, x->stream, x->kind == KOILA_EVENT_OOM ? KOILA_POOL_DEFAULT : pool_at(&r, i), &addr);
            if (status == KOILA_OOM) {
                w.fits = false;
                if (!w.n_ooms++) w.first_oom_entry = i, w.first_oom_bytes = x->size;
                status = KOILA_OK;
            } else if (!status && x->kind == KOILA_EVENT_ALLOC && (n = omap_put(&where, x->addr))) {
                where.at[n].size = addr;
            } else if (!status && x->kind == KOILA_EVENT_OOM) {
                status = koila_cache_release(sim, addr); /* it failed then; what the program would have done with it is not recorded */
            }
            break;
        case KOILA_EVENT_FREE_REQUESTED: {
            const snap_entry *next = i + 1 < r.n ? entry(&r, i + 1) : NULL;
            if (!n) break;
            if (!(next && next->kind == KOILA_EVENT_FREE_COMPLETED && next->addr == x->addr)) koila_cache_record_stream(sim, where.at[n].size, ~x->stream);
            status = koila_cache_release(sim, where.at[n].size);
            if (status == KOILA_BAD_ARGUMENT) status = KOILA_OK;
            break;
        }
        case KOILA_EVENT_FREE_COMPLETED:
            if (n) {
                koila_cache_complete(sim, where.at[n].size); /* or a retry has done so already */
                omap_drop(&where, x->addr);
            }
            break;
        default: break;
        }
    }
    if (where.failed) status = KOILA_NO_MEMORY;
    if (status == KOILA_NO_MEMORY) koila__fail(e, status, 0, "the host is out of memory");
    if (!status) {
        koila_cache_stats(sim, &w.stat);
        const uint64_t used = c->outside_bytes + w.stat.peak_device_bytes;
        w.spare_bytes = c->total_bytes > used ? c->total_bytes - used : 0;
        *out = w;
    }
    koila_cache_free(sim);
    omap_free(&where);
    teardown(&r);
    return status;
}
