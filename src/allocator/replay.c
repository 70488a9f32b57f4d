/* replay.c — is a recording what the rules of cache.c say? The recorded requests go in; addresses
 * and segments must come out.
 *
 * A cursor walks the trace. Each request is given to the cache, and every event the cache answers
 * with is compared with the entry under the cursor: kind, address, size, stream. The cache's driver
 * (cudaMalloc) is the recording too: a new segment succeeds iff the recording has one there, at the
 * recorded address. So a failed cudaMalloc and its retry need no guess: the cache finds nothing
 * under the cursor, gives memory back as the rules say, and each segment it frees must be the
 * recorded one.
 *
 * What a program did besides allocating is not in the file. If the plain explanation does not
 * reproduce the entries up to the next request byte for byte, the cache is rewound and these are
 * tried in order, and counted: empty_cache before it; a cap; expandable switched; both; MemPools
 * that die (counted as empty_cache); garbage collection. Nothing else may explain a difference. (A
 * cap looks like a failed cudaMalloc, but for throw_on_cudamalloc_oom: there the request fails at
 * once.)
 *
 * Private pools that are released together: torch walks a hash map, so there its order means
 * nothing. The recorded run of such releases is kept as a set, and each release the rules name must
 * be in it.
 *
 * The state before the first entry: replay_start.c, replay_learn.c. Other limits and settings:
 * replay_whatif.c.
 */
#include "allocator/replay.h"

#include "base/base.h"

#define SMALL_SEGMENT ((uint64_t)2 << 20)
#define MAX_DEVICE ((uint64_t)1 << 50)

static const koila_segment *end_segment(const replay *r, uint64_t addr)
{
    size_t lo = 0;
    size_t hi = r->n_segs;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (r->segs[mid].addr + r->segs[mid].size <= addr)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < r->n_segs && r->segs[lo].addr <= addr ? &r->segs[lo] : NULL;
}

koila_pool koila__replay_pool_at(const replay *r, uint64_t i)
{
    const snap_entry *x = entry(r, i);
    if (x->has_pool)
        return r->s->pools[x->pool];
    const koila_segment *g = end_segment(r, x->addr);
    koila_assert(!g || (g->addr <= x->addr && x->addr < g->addr + g->size));
    return g && r->made_at[g - r->segs] <= i ? g->pool : KOILA_POOL_DEFAULT;
}

static const char *const action_names[] = { "nothing",        "alloc",         "free_requested",
                                            "free_completed", "segment_alloc", "segment_free",
                                            "segment_map",    "segment_unmap", "oom",
                                            "snapshot" };

static void name_event(char *p, size_t n, int kind, uint64_t addr, uint64_t size)
{
    if (kind == KOILA_EVENT_OOM)
        snprintf(p, n, "oom %llu", (unsigned long long)size);
    else if (!kind)
        snprintf(p, n, "nothing");
    else
        snprintf(p, n, "%s 0x%llx %llu", action_names[kind], (unsigned long long)addr,
                 (unsigned long long)size);
}

/* ---- verdicts. Differences become "not checkable" where the recording itself leaves something
 * open. */

/* torch can be told to leave kinds of entries out (skip_actions). */
static bool is_kind_missing(const replay *r)
{
    const uint64_t *n = r->n_of;
    uint64_t n_pending = 0;
    if (!n[KOILA_EVENT_FREE_REQUESTED])
        return n[KOILA_EVENT_FREE_COMPLETED] > 0 && !r->trace_only;
    if (!n[KOILA_EVENT_ALLOC])
        return true;
    if (n[KOILA_EVENT_FREE_COMPLETED])
        return false;
    for (size_t i = 0; i < r->n_segs; i++)
        for (size_t k = 0; k < r->segs[i].n_blocks; k++)
            n_pending += r->segs[i].blocks[k].state == KOILA_BLOCK_PENDING;
    return n_pending < n[KOILA_EVENT_FREE_REQUESTED];
}

static bool has_private_pools(const replay *r)
{
    for (size_t i = 0; i < r->n_segs; i++)
        if (!is_default(r->segs[i].pool))
            return true;
    return false;
}

/* Memory is made although there is room: so a request of a memory pool would, and its pool may be
 * gone by the end. */
static bool passes_over_room(const replay *r, uint64_t at)
{
    if (at >= r->n || r->expected.kind != KOILA_EVENT_ALLOC)
        return false;
    const int kind = entry(r, at)->kind;
    return kind == KOILA_EVENT_SEGMENT_ALLOC || kind == KOILA_EVENT_SEGMENT_MAP;
}

/* Writes why a difference proves nothing here, and returns its length; 0: a difference proves that
 * the rules were not followed. */
static int write_open_question(const replay *r, uint64_t at, char *p, size_t room)
{
    const koila_replay_result *o = r->out;
    if (is_kind_missing(r))
        return snprintf(p, room, "entries are missing (skip_actions); ");
    if (r->trace_only)
        return snprintf(p, room,
                        "start state from the trace alone, which the end state contradicts; ");
    if (o->n_assumed)
        return snprintf(p, room, "start state assumed for %llu blocks; ",
                        (unsigned long long)o->n_assumed);
    if (r->conf.gc_threshold > 0.0 && r->n_start)
        return snprintf(p, room, "garbage collection with ages from before the recording; ");
    if (r->conf.release_lock)
        return snprintf(p, room, "release_lock_on_cudamalloc with several threads; ");
    if (o->reservations_inferred && r->n_start)
        return snprintf(p, room, "where a reservation begins and ends was inferred; ");
    if (r->tie_of_old)
        return snprintf(p, room,
                        "which of the segments from before the recording is older is not "
                        "recorded; ");
    if (!r->s->has_pool_ids && (has_private_pools(r) || passes_over_room(r, at)))
        return snprintf(p, room, "memory pools whose entries are not marked; ");
    return 0;
}

void koila__replay_stop(replay *r, koila_verdict verdict, uint64_t at, const char *fmt, ...)
{
    if (r->stopped)
        return;
    va_list ap;
    r->stopped = true;
    koila_replay_result *o = r->out;
    int n = 0;
    if (verdict == KOILA_DIFFERS)
        n = write_open_question(r, at, o->reason, sizeof o->reason);
    koila_assert(n >= 0 && (size_t)n < sizeof o->reason);
    if (n > 0)
        verdict = KOILA_NOT_CHECKABLE;
    va_start(ap, fmt);
    vsnprintf(o->reason + n, sizeof o->reason - (size_t)n, fmt, ap);
    va_end(ap);
    o->verdict = verdict;
    o->at_entry = at;
}

const koila_segment *koila__replay_start_segment(const replay *r, uint64_t addr)
{
    for (uint64_t i = 0; i < r->n_start; i++)
        if (r->start[i].addr <= addr && addr - r->start[i].addr < r->start[i].size)
            return &r->start[i];
    return NULL;
}

/* Is entry `i` what was expected, but in another segment from before the first entry? Ties go to
 * the oldest segment, and the order in which those were made is not recorded. */
static bool is_tie_of_old(const replay *r, uint64_t i)
{
    if (!(r->conf.rules & (KOILA_RULE_OLDEST_SEGMENT | KOILA_RULE_OLDEST_BLOCK)) || i >= r->n)
        return false;
    const snap_entry *x = entry(r, i);
    const koila_segment *recorded = koila__replay_start_segment(r, x->addr);
    const koila_segment *expected = koila__replay_start_segment(r, r->expected.addr);
    return x->kind == r->expected.kind && x->size == r->expected.size && recorded && expected &&
           recorded != expected;
}

static void stop_at_difference(replay *r, uint64_t i)
{
    if (r->stopped)
        return;
    if (koila__replay_learn(r, &r->expected, i)) {
        r->stopped = r->begins_anew = true;
        return;
    }
    r->tie_of_old = is_tie_of_old(r, i);
    char expected[80], recorded[80];
    name_event(expected, sizeof expected, r->expected.kind, r->expected.addr, r->expected.size);
    if (i < r->n)
        name_event(recorded, sizeof recorded, entry(r, i)->kind, entry(r, i)->addr,
                   entry(r, i)->size);
    else
        snprintf(recorded, sizeof recorded, "the end");
    koila__replay_stop(r, KOILA_DIFFERS, i, "at event %llu: expected %s, recorded %s",
                       (unsigned long long)i, expected, recorded);
}

/* An entry that no program can have caused. Where the trace tells everything the file is wrong;
 * elsewhere entries may be missing. */
static void stop_at_impossible(replay *r, uint64_t i, const char *does, const char *but)
{
    const bool missing = is_kind_missing(r);
    if (r->stopped)
        return;
    r->bad_input = r->whole && !missing;
    koila__replay_stop(r, KOILA_NOT_CHECKABLE, i, "%sentry %llu: %s 0x%llx, which %s",
                       missing ? "entries are missing (skip_actions); " : "", (unsigned long long)i,
                       does, (unsigned long long)entry(r, i)->addr, but);
}

/* ---- what the cache says, against what is under the cursor */

static bool is_release(int kind)
{
    return kind == KOILA_EVENT_SEGMENT_FREE || kind == KOILA_EVENT_SEGMENT_UNMAP;
}

static void forget_released(replay *r)
{
    koila__omap_clear(&r->released);
    r->released_end = 0;
}

static uint64_t now(const replay *r, int kind) { return r->stat->of[kind][KOILA_STAT_ALL].current; }

/* The cursor moves to `end`: what is handed out after each of these entries is what is now. */
static void pass(replay *r, uint64_t end)
{
    koila_assert(r->group <= r->at && r->at <= end && end <= r->n);
    if (!koila__grow(&r->mem, &r->after, &r->after_cap, end - r->group, sizeof *r->after)) {
        r->no_memory = true;
        return;
    }
    for (; r->at < end; r->at++) {
        r->after[r->at - r->group].allocated = now(r, KOILA_STAT_ALLOCATED_BYTES);
        r->after[r->at - r->group].active = now(r, KOILA_STAT_ACTIVE_BYTES);
    }
}

/* The run of recorded releases of private pools that starts under the cursor, up to the first
 * address that comes twice. */
static bool gather_released(replay *r)
{
    koila_assert(!r->released.root);
    uint64_t i = r->at;
    for (; i < r->n; i++) {
        const snap_entry *x = entry(r, i);
        if (!is_release(x->kind) || is_default(koila__replay_pool_at(r, i)) ||
            koila__omap_find(&r->released, x->addr))
            break;
        const uint32_t b = koila__omap_put(&r->released, x->addr);
        if (!b) {
            r->no_memory = true;
            return false;
        }
        r->released.at[b].size = i;
    }
    r->released_end = i;
    return true;
}

/* `e` releases memory of a private pool: is it in the recorded run of those, which starts under the
 * cursor? The cursor moves when all are named. */
static bool take_released(replay *r, const koila_event *e)
{
    if (!r->released_end && !gather_released(r))
        return false;
    koila_assert(r->released_end >= r->at);
    const uint32_t b = koila__omap_find(&r->released, e->addr);
    const snap_entry *x = b ? entry(r, r->released.at[b].size) : NULL;
    if (!x || x->kind != e->kind || x->size != e->size || x->stream != e->stream)
        return false;
    koila__omap_drop(&r->released, e->addr);
    if (!r->released.root) {
        pass(r, r->released_end);
        forget_released(r);
    }
    return true;
}

static void compare(void *user, const koila_event *e)
{
    replay *r = user;
    if (!r->watching || r->differs)
        return;
    if (is_release(e->kind) && !is_default(e->pool)) {
        if (take_released(r, e))
            return;
        r->differs = true;
        r->expected = *e;
        return;
    }
    const snap_entry *x = r->at < r->n && !r->released_end ? entry(r, r->at) : NULL;
    const bool same =
        x && x->kind == e->kind && x->size == e->size &&
        (e->kind == KOILA_EVENT_OOM || (x->addr == e->addr && x->stream == e->stream));
    if (same) {
        pass(r, r->at + 1);
    } else {
        r->differs = true;
        r->expected = *e;
    }
}

static bool give(void *user, koila_event_kind kind, uint64_t size, uint64_t stream, uint64_t *addr)
{
    replay *r = user;
    const snap_entry *x = r->at < r->n ? entry(r, r->at) : NULL;
    if (r->differs)
        return false;
    if ((int)kind == KOILA__RESERVATION) {
        if (!x || x->kind != KOILA_EVENT_SEGMENT_MAP || x->stream != stream) {
            r->driver_failed = r->reservation_left = true;
            return false;
        }
        r->out->reservations_inferred = true;
        *addr = x->addr;
        return true;
    }
    if (x && x->kind == kind && x->size == size && x->stream == stream &&
        (kind == KOILA_EVENT_SEGMENT_ALLOC || x->addr == *addr)) {
        *addr = x->addr;
        return true;
    }
    /* one was made, but not this one */
    if (x && (x->kind == KOILA_EVENT_SEGMENT_ALLOC || x->kind == KOILA_EVENT_SEGMENT_MAP)) {
        r->differs = true;
        r->expected = (koila_event){ (uint32_t)sizeof r->expected,
                                     kind,
                                     kind == KOILA_EVENT_SEGMENT_ALLOC ? 0 : *addr,
                                     size,
                                     stream,
                                     KOILA_POOL_DEFAULT };
    }
    r->driver_failed = true;
    return false;
}

/* Notes that the host is out of memory: then nothing that follows tells anything. */
static bool was_done(replay *r, koila_status status)
{
    r->no_memory |= status == KOILA_NO_MEMORY;
    return status == KOILA_OK;
}

/* Frees a block as of `x`, which a stream still uses where it is not `at_once`. */
static bool was_freed(replay *r, const snap_entry *x, bool at_once)
{
    /* that the block is not allocated, its release tells */
    if (!at_once)
        was_done(r, koila_cache_record_stream(r->c, x->addr, ~x->stream));
    return !r->no_memory && was_done(r, koila_cache_release(r->c, x->addr));
}

/* Release-all waits for other streams: what completed there is recorded, in its order. */
static void before_sync(void *user)
{
    replay *r = user;
    if (r->differs)
        return;
    while (r->at < r->n && entry(r, r->at)->kind == KOILA_EVENT_FREE_COMPLETED) {
        if (!was_done(r, koila_cache_complete(r->c, entry(r, r->at)->addr)) || r->differs)
            return;
    }
}

static bool hold_pool(replay *r, koila_pool p)
{
    if (is_default(p))
        return true;
    for (uint32_t i = 0; i < r->holds.n; i++)
        if (r->holds.at[i].owner == p.owner && r->holds.at[i].id == p.id)
            return true;
    uint32_t flags = 0;
    for (uint32_t i = 0; i < r->s->n_pools && r->no_split; i++)
        if (r->s->pools[i].owner == p.owner && r->s->pools[i].id == p.id && r->no_split[i])
            flags = KOILA_POOL_NO_SPLIT;
    if (!koila__vec_push(&r->mem, &r->holds, p) ||
        koila_cache_pool_hold(r->c, p, flags) != KOILA_OK) {
        r->no_memory = true;
        return false;
    }
    return true;
}

/* Pools whose segments the recording frees in [from, to) have lost their holders by then. */
static void drop_pools(replay *r, uint64_t from, uint64_t to)
{
    koila_assert(from <= to && to <= r->n);
    for (uint64_t i = from; i < to; i++) {
        const int kind = entry(r, i)->kind;
        if (!is_release(kind))
            continue;
        const koila_pool p = koila__replay_pool_at(r, i);
        if (!is_default(p))
            koila_cache_pool_drop(r->c, p);
    }
}

/* ---- one request, several explanations */

enum { EMPTY_FIRST = 1, SWITCH = 2, COLLECT = 4, CAP = 8, POOLS_DIE = 16 };

/* MemPools die: those whose releases are recorded in [from, to), in that order. */
static void free_dead_pools(replay *r, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to && !r->differs; i++) {
        const koila_pool p = koila__replay_pool_at(r, i);
        if (is_release(entry(r, i)->kind) && !is_default(p) && i >= r->at)
            was_done(r, koila__cache_free_pool(r->c, p));
    }
}

/* Asks the cache for what entry `i` asks for. A request of a private pool is made while a graph is
 * captured or, by torch's books before 2.13 no different, while a MemPool is in use: nothing is
 * released for it then. */
static void ask(replay *r, uint64_t i)
{
    const snap_entry *x = entry(r, i);
    const koila_pool pool = koila__replay_pool_at(r, i);
    uint64_t addr;
    koila_cache_set_capturing(r->c, pool.owner != 0, !is_default(pool));
    was_done(r, koila_cache_malloc(r->c, x->size, x->stream, pool, &addr));
    koila_cache_set_capturing(r->c, 0, 0);
}

/* Do all entries from `from` up to and including `last` follow, if the request at `last` (none if
 * last == r->n or not a request) is made this way? Leaves the cache as it was if not. */
static bool follows(replay *r, uint64_t from, uint64_t last, bool request, unsigned how,
                    size_t n_rounds)
{
    const uint64_t mark = koila_cache_mark(r->c);
    koila_assert(from <= last);
    if (!mark) {
        r->no_memory = true;
        return false;
    }
    r->at = from;
    r->differs = r->driver_failed = false;
    forget_released(r);
    drop_pools(r, from, last);
    if (how & SWITCH) {
        r->conf.expandable = !r->conf.expandable;
        koila_cache_set_expandable(r->c, r->conf.expandable);
    }
    if (how & POOLS_DIE)
        free_dead_pools(r, from, last);
    if (how & EMPTY_FIRST)
        was_done(r, koila_cache_empty(r->c));
    if ((how & COLLECT) && !r->differs)
        was_done(r, koila__cache_collect(r->c, n_rounds));
    if (request && !r->differs) {
        const snap_entry *x = entry(r, last);
        uint64_t segment;
        if (how & CAP) { /* the highest under which it fails */
            koila_cache_sizes(&r->conf, x->size, NULL, &segment);
            koila_cache_set_limit(r->c, 0, 0,
                                  r->stat->of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL].current +
                                      segment - 1);
        }
        ask(r, last);
        if (how & CAP)
            koila_cache_set_limit(r->c, 0, 0, r->conf.cap_bytes);
    }
    const bool ok = !r->differs && !r->no_memory && r->at == last + (request ? 1 : 0);
    if (!ok) {
        if (!r->differs && !r->no_memory) { /* the cache said less than the recording */
            r->differs = true;
            r->expected = (koila_event){ 0 };
        }
        koila_cache_rewind(r->c, mark);
        if (how & SWITCH)
            r->conf.expandable = !r->conf.expandable;
    }
    koila_cache_forget(r->c, mark);
    return ok;
}

/* A request whose driver call failed: the retry that followed it, or an empty_cache before it. */
static void count_retry(replay *r, bool oom)
{
    if (r->driver_failed && oom)
        r->out->n_retries++;
    else if (r->driver_failed)
        r->out->n_retry_or_empty++;
}

static void count_way(replay *r, unsigned how, bool oom)
{
    koila_replay_result *o = r->out;
    if (how & SWITCH)
        o->n_expandable_switched++;
    if (how & (EMPTY_FIRST | POOLS_DIE))
        o->n_empty++;
    else if (how & CAP)
        o->n_cap_set++;
    else
        count_retry(r, oom);
}

/* Can the entries be explained this way at all? Without a request only empty_cache releases. */
static bool may_explain(const replay *r, unsigned how, bool request, bool oom)
{
    const bool rejects = r->conf.oom_reject && (r->conf.rules & KOILA_RULE_OOM_REJECT);
    if ((how & POOLS_DIE) && r->holds.n == 0)
        return false;
    if (!request)
        return how & (EMPTY_FIRST | POOLS_DIE);
    return !(how & CAP) || (oom && rejects);
}

/* Pages are mapped elsewhere than expected: are they in a reservation that an earlier request left
 * behind? Then the cache has it now. */
static bool finds_left_reservation(replay *r, uint64_t last, const koila_event *expected,
                                   uint64_t at)
{
    const snap_entry *x = at < r->n ? entry(r, at) : NULL;
    const snap_entry *request = entry(r, last);
    if (!r->reservation_left || !x || x->kind != KOILA_EVENT_SEGMENT_MAP ||
        expected->kind != KOILA_EVENT_SEGMENT_MAP || x->addr == expected->addr)
        return false;
    const koila_status status = koila__cache_add_reservation(
        r->c, request->size, request->stream, koila__replay_pool_at(r, last), x->addr);
    r->no_memory |= status == KOILA_NO_MEMORY;
    r->out->reservations_inferred |= status == KOILA_OK;
    return status == KOILA_OK;
}

enum { MAX_COLLECTIONS = 64 };

/* What the ways of explaining expected, each at the entry where it failed. */
typedef struct expectations {
    koila_event plainest, release; /* release: the first where a segment was to go */
    uint64_t plainest_at, release_at;
    bool any;
} expectations;

static void note_expected(const replay *r, expectations *x)
{
    if (!x->any) {
        x->plainest = r->expected;
        x->plainest_at = r->at;
    }
    if (!x->release.kind && r->expected.kind == KOILA_EVENT_SEGMENT_FREE) {
        x->release = r->expected;
        x->release_at = r->at;
    }
    x->any = true;
}

/* False: nothing follows, or no memory. */
static bool try_ways(replay *r, uint64_t from, uint64_t last, bool request, expectations *x)
{
    static const unsigned ways[] = {
        0, EMPTY_FIRST, CAP, SWITCH, SWITCH | EMPTY_FIRST, POOLS_DIE, POOLS_DIE | EMPTY_FIRST
    };
    const bool oom = request && entry(r, last)->kind == KOILA_EVENT_OOM;
    for (size_t k = 0; k < KOILA_COUNT(ways) && !r->no_memory; k++) {
        if (!may_explain(r, ways[k], request, oom))
            continue;
        if (follows(r, from, last, request, ways[k], 0)) {
            count_way(r, ways[k], oom);
            return true;
        }
        note_expected(r, x);
    }
    const size_t n_rounds = request && r->conf.gc_threshold > 0.0 ? MAX_COLLECTIONS : 0;
    for (size_t rounds = 1; rounds <= n_rounds && !r->no_memory; rounds++) {
        if (follows(r, from, last, request, COLLECT, rounds)) {
            r->out->n_collected++;
            return true;
        }
    }
    return false;
}

static void explain(replay *r, uint64_t from, uint64_t last, bool request)
{
    expectations x = { .plainest_at = from };
    if (try_ways(r, from, last, request, &x) || r->no_memory)
        return;
    if (request && entry(r, last)->kind == KOILA_EVENT_ALLOC &&
        koila__cache_is_out(r->c, entry(r, last)->addr)) {
        stop_at_impossible(r, last, "allocates", "is allocated already");
        return;
    }
    if (request && finds_left_reservation(r, last, &x.plainest, x.plainest_at)) {
        explain(r, from, last, request);
        return;
    }
    if (x.release.kind && koila__replay_learn(r, &x.release, x.release_at)) {
        r->stopped = r->begins_anew = true;
        return;
    }
    r->expected = x.plainest;
    stop_at_difference(r, x.plainest_at);
}

static void tell(replay *r, uint64_t i, uint64_t allocated, uint64_t active, uint64_t reserved)
{
    koila_replay_result *o = r->out;
    if (reserved > o->peak_reserved) {
        o->peak_reserved = reserved;
        o->peak_entry = i;
        o->peak_added_up = r->stopped;
    }
    if (allocated > o->peak_allocated) {
        o->peak_allocated = allocated;
        o->peak_allocated_entry = i;
    }
    if (active > o->peak_active)
        o->peak_active = active;
    if (r->f) {
        const snap_entry *x = entry(r, i);
        koila_moment m = {
            (uint32_t)sizeof m,        i,       x->time_us, allocated, active, reserved,
            (koila_event_kind)x->kind, x->addr, x->size,    x->stack
        };
        r->f(r->f_user, &m);
    }
}

static uint64_t reserved_after(const snap_entry *x, uint64_t reserved)
{
    switch (x->kind) {
    case KOILA_EVENT_SEGMENT_ALLOC:
    case KOILA_EVENT_SEGMENT_MAP:
        return reserved + x->size;
    case KOILA_EVENT_SEGMENT_FREE:
    case KOILA_EVENT_SEGMENT_UNMAP:
        return reserved > x->size ? reserved - x->size : 0;
    default:
        return reserved;
    }
}

/* What the cursor has passed, entry by entry: all answer one request, and the peak is at one of
 * them. */
static void tell_group(replay *r, uint64_t reserved)
{
    koila_assert(r->group < r->at && r->at <= r->n); /* a request is never answered by nothing */
    const uint64_t last = r->at - 1;
    for (uint64_t i = r->group; i < last; i++) {
        const snap_entry *x = entry(r, i);
        reserved = reserved_after(x, reserved);
        tell(r, i, r->after[i - r->group].allocated, r->after[i - r->group].active, reserved);
    }
    tell(r, last, now(r, KOILA_STAT_ALLOCATED_BYTES), now(r, KOILA_STAT_ACTIVE_BYTES),
         now(r, KOILA_STAT_RESERVED_BYTES));
}

/* The replay stopped: the rest by adding up what the trace says. */
static void add_up(replay *r)
{
    uint64_t allocated = now(r, KOILA_STAT_ALLOCATED_BYTES);
    uint64_t active = now(r, KOILA_STAT_ACTIVE_BYTES);
    uint64_t reserved = now(r, KOILA_STAT_RESERVED_BYTES);
    /* no start state: what was reserved at the end, less what came in the window */
    if (!r->at && r->n_segs) {
        reserved = 0;
        for (size_t i = 0; i < r->n_segs; i++)
            reserved += r->segs[i].size;
        for (uint64_t i = 0; i < r->n; i++) {
            const snap_entry *x = entry(r, i);
            if (x->kind == KOILA_EVENT_SEGMENT_ALLOC || x->kind == KOILA_EVENT_SEGMENT_MAP)
                reserved = reserved > x->size ? reserved - x->size : 0;
            if (is_release(x->kind))
                reserved += x->size;
        }
    }
    for (uint64_t i = r->at; i < r->n && i <= r->until; i++) {
        const snap_entry *x = entry(r, i);
        uint64_t size = x->size;
        if (x->kind <= KOILA_EVENT_FREE_COMPLETED)
            koila_cache_sizes(&r->conf, x->size, &size, NULL);
        switch (x->kind) {
        case KOILA_EVENT_ALLOC:
            allocated += size;
            active += size;
            break;
        case KOILA_EVENT_FREE_REQUESTED:
            allocated = allocated > size ? allocated - size : 0;
            break;
        case KOILA_EVENT_FREE_COMPLETED:
            active = active > size ? active - size : 0;
            break;
        default:
            reserved = reserved_after(x, reserved);
            break;
        }
        tell(r, i, allocated, active, reserved);
    }
}

static void count_request(replay *r, uint64_t i)
{
    const bool oom = entry(r, i)->kind == KOILA_EVENT_OOM;
    r->out->n_addresses += !oom;
    r->out->n_ooms += oom;
    if (oom && r->out->first_oom_entry == UINT64_MAX)
        r->out->first_oom_entry = i;
}

/* A free or a completion, taken as it is. */
static bool free_entry(replay *r, uint64_t i)
{
    const snap_entry *x = entry(r, i);
    if (x->kind == KOILA_EVENT_FREE_REQUESTED) {
        const snap_entry *next = i + 1 < r->n ? entry(r, i + 1) : NULL;
        const bool at_once =
            next && next->kind == KOILA_EVENT_FREE_COMPLETED && next->addr == x->addr;
        if (!was_freed(r, x, at_once) && !r->no_memory)
            stop_at_impossible(r, i, "frees", "is not allocated");
    } else if (!was_done(r, koila_cache_complete(r->c, x->addr)) && !r->no_memory) {
        stop_at_impossible(r, i, "completes the free of", "was not freed");
    }
    if (r->differs && !r->stopped)
        stop_at_difference(r, r->at);
    return !r->stopped && !r->no_memory;
}

/* Entries [i, last) are completions, perhaps after the free of the first of them (`with_free`); the
 * request at `end` follows. Some of them may have come before the request's search, the rest inside
 * its retry. */
typedef struct completions {
    uint64_t i, first, last, end; /* first: the first completion, i or i + 1 */
    bool with_free;
} completions;

/* Does the recording follow if the first `n_before` of them come before the request? The cache must
 * be rewound if not. */
static bool follows_split(replay *r, const completions *x, uint64_t n_before)
{
    r->at = x->i;
    r->differs = r->driver_failed = false;
    forget_released(r);
    if (x->with_free && !was_freed(r, entry(r, x->i), false))
        return false;
    for (uint64_t j = x->first; j < x->first + n_before; j++)
        if (!was_done(r, koila_cache_complete(r->c, entry(r, j)->addr)))
            return false;
    if (r->differs)
        return false;
    drop_pools(r, x->last, x->end);
    ask(r, x->end);
    return !r->differs && !r->no_memory && r->at == x->end + 1;
}

enum { MAX_SPLITS = 64 };

/* Find a split that gives the recording: all before, none, then fewer and fewer. */
static bool split_completions(replay *r, const completions *x)
{
    const uint64_t n = x->last - x->first;
    const uint64_t mark = koila_cache_mark(r->c);
    koila_assert(x->i <= x->first && x->first <= x->last && x->last <= x->end && x->end < r->n);
    if (!mark) {
        r->no_memory = true;
        return false;
    }
    bool found = false;
    for (uint64_t k = 0; k <= n && k <= MAX_SPLITS && !found && !r->no_memory; k++) {
        uint64_t n_before = n;
        if (k)
            n_before = k == 1 ? 0 : n - k + 1;
        found = follows_split(r, x, n_before);
        if (!found)
            koila_cache_rewind(r->c, mark);
    }
    koila_cache_forget(r->c, mark);
    if (!found)
        return false;
    for (uint64_t j = x->last; j < x->end; j++)
        r->out->n_segment_events += is_segment_event(entry(r, j)->kind);
    count_request(r, x->end);
    count_retry(r, entry(r, x->end)->kind == KOILA_EVENT_OOM);
    return true;
}

static bool is_request(int kind) { return kind == KOILA_EVENT_ALLOC || kind == KOILA_EVENT_OOM; }

/* Waiting blocks complete before a request, or inside its retry. Then a segment event or an oom
 * follows the last of them; with expandable memory perhaps neither, for what completed may now be
 * room enough. Fills `x` and says whether it may be so here. */
static bool may_be_in_retry(const replay *r, uint64_t i, completions *x)
{
    x->i = i;
    x->with_free = entry(r, i)->kind == KOILA_EVENT_FREE_REQUESTED;
    x->first = x->last = i + x->with_free;
    if (x->with_free && (x->first == r->n || entry(r, x->first)->addr != entry(r, i)->addr))
        return false;
    while (x->last < r->n && entry(r, x->last)->kind == KOILA_EVENT_FREE_COMPLETED)
        x->last++;
    if (x->last == x->first || x->last == r->n)
        return false;
    const int after = entry(r, x->last)->kind;
    if (!is_segment_event(after) && after != KOILA_EVENT_OOM &&
        !(r->conf.expandable && after == KOILA_EVENT_ALLOC))
        return false;
    x->end = x->last;
    while (x->end < r->n && (is_segment_event(entry(r, x->end)->kind) ||
                             entry(r, x->end)->kind == KOILA_EVENT_FREE_COMPLETED))
        x->end++;
    return x->end < r->n && is_request(entry(r, x->end)->kind) && entry(r, x->end)->size;
}

static void advance_frees(replay *r, uint64_t i)
{
    completions x;
    if (may_be_in_retry(r, i, &x) && hold_pool(r, koila__replay_pool_at(r, x.end)) &&
        split_completions(r, &x))
        return;
    if (r->no_memory)
        return;
    r->at = i;
    r->differs = false;
    free_entry(r, i);
}

static void check_snapshot_entry(replay *r, uint64_t i)
{
    const uint64_t active = now(r, KOILA_STAT_ACTIVE_BYTES);
    const uint64_t recorded = entry(r, i)->size;
    r->at++;
    if (recorded && recorded != active)
        koila__replay_stop(
            r, KOILA_DIFFERS, i, "at event %llu: %llu bytes active, the recording says %llu",
            (unsigned long long)i, (unsigned long long)active, (unsigned long long)recorded);
}

/* A request that the cache answers at the recorded address without asking the driver: the usual
 * case. false: not so, and nothing has changed. */
static bool answer_from_cache(replay *r, uint64_t i)
{
    const snap_entry *x = entry(r, i);
    const koila_status status =
        koila__cache_malloc_at(r->c, x->size, x->stream, koila__replay_pool_at(r, i), x->addr);
    if (status == KOILA_NO_MEMORY)
        r->no_memory = true;
    if (status != KOILA_OK)
        return false;
    if (r->differs)
        stop_at_difference(r, i);
    r->out->n_addresses++;
    return true;
}

static void advance_request(replay *r, uint64_t i)
{
    uint64_t last = i;
    while (last < r->n && (is_segment_event(entry(r, last)->kind) ||
                           (last > i && entry(r, last)->kind == KOILA_EVENT_FREE_COMPLETED)))
        last++;
    const bool request = last < r->n && is_request(entry(r, last)->kind);
    if (request && !hold_pool(r, koila__replay_pool_at(r, last)))
        return;
    if (request && entry(r, last)->size == 0) {
        koila__replay_stop(r, KOILA_NOT_CHECKABLE, last, "entry %llu: a request of 0 bytes",
                           (unsigned long long)last);
        return;
    }
    if (request && last == i && entry(r, i)->kind == KOILA_EVENT_ALLOC && answer_from_cache(r, i))
        return;
    for (uint64_t k = i; k < last; k++)
        r->out->n_segment_events += is_segment_event(entry(r, k)->kind);
    if (request)
        count_request(r, last);
    explain(r, i, last, request);
}

/* The entries from the cursor up to the next request, and that request. */
static void advance(replay *r)
{
    const uint64_t i = r->at;
    koila_assert(i < r->n && !r->stopped);
    r->watching = true;
    r->differs = false;
    forget_released(r);
    switch (entry(r, i)->kind) {
    case KOILA_EVENT_FREE_REQUESTED:
    case KOILA_EVENT_FREE_COMPLETED:
        advance_frees(r, i);
        return;
    case KOILA_EVENT_SNAPSHOT:
        check_snapshot_entry(r, i);
        return;
    case 0: /* user_defined */
        r->at++;
        return;
    default:
        advance_request(r, i);
    }
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
    if (b->state == KOILA_BLOCK_UNMAPPED)
        return true;
    while (c->seg < r->n_segs && c->block == r->segs[c->seg].n_blocks) {
        c->seg++;
        c->block = 0;
    }
    if (c->seg == r->n_segs) {
        c->bad = true;
        return false;
    }
    const koila_block *want = &r->segs[c->seg].blocks[c->block++];
    c->n++;
    c->bad = want->addr != b->addr || want->size != b->size || want->state != b->state ||
             (want->requested && want->requested != b->requested) || want->stream != b->stream;
    return !c->bad;
}

static void check_end(replay *r)
{
    end_check c = { .r = r };
    if (koila_cache_walk(r->c, check_end_block, &c) != KOILA_OK) {
        r->no_memory = true;
        return;
    }
    while (c.seg < r->n_segs && c.block == r->segs[c.seg].n_blocks) {
        c.seg++;
        c.block = 0;
    }
    r->out->n_end_blocks = c.n;
    r->out->end_checked = true;
    if (c.bad || c.seg < r->n_segs) {
        uint64_t addr = 0;
        if (c.bad && c.block)
            addr = r->segs[c.seg].blocks[c.block - 1].addr;
        else if (c.seg < r->n_segs)
            addr = r->segs[c.seg].addr;
        koila__replay_stop(r, KOILA_DIFFERS, r->n,
                           "at the end: the block at 0x%llx is not as recorded",
                           (unsigned long long)addr);
    }
}

/* ---- the run */

koila_status koila__replay_setup(replay *r, const koila_snapshot *s, uint32_t device,
                                 const koila_cache_config *c, koila_replay_result *out,
                                 koila_error *e)
{
    memset(r, 0, sizeof *r);
    if (device >= s->n_devices)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "no device %u: the snapshot has %u", device,
                           s->n_devices);
    memset(out, 0, sizeof *out);
    out->struct_size = (uint32_t)sizeof *out;
    out->first_oom_entry = UINT64_MAX;
    r->s = s;
    r->device = device;
    r->out = out;
    r->mem = r->released.mem = s->mem;
    r->until = UINT64_MAX;
    r->n = koila_snapshot_n_entries(s, device);
    r->segs = koila_snapshot_segments(s, device, &r->n_segs);
    if (c)
        r->conf = *c;
    else
        KOILA_TRY(koila_snapshot_config(s, device, NULL, &r->conf, e));
    r->conf.total_bytes = r->conf.outside_bytes = 0; /* the recording decides what failed */
    /* ages count, but when to collect the recording decides too */
    r->conf.cap_bytes = r->conf.gc_threshold > 0.0 ? (uint64_t)1 << 62 : 0;
    out->torch_version = r->conf.torch_version;
    out->verified = r->conf.verified;
    out->n_entries = r->n;
    if (r->n_segs) {
        r->made_at = koila__realloc(&r->mem, NULL, 0, r->n_segs * sizeof(uint64_t));
        if (!r->made_at)
            return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
        memset(r->made_at, 0, r->n_segs * sizeof(uint64_t));
    }
    uint64_t reserved = 0, most = 0;
    for (uint64_t i = 0; i < r->n; i++) {
        const snap_entry *x = entry(r, i);
        r->n_of[x->kind]++;
        reserved = reserved_after(x, reserved);
        most = reserved > most ? reserved : most;
        if (x->kind != KOILA_EVENT_SEGMENT_ALLOC)
            continue;
        const koila_segment *g = end_segment(r, x->addr);
        if (g && g->addr == x->addr)
            r->made_at[g - r->segs] = i;
    }
    /* the device is not recorded; reservations are at least as long as what was mapped */
    if (!r->conf.device_bytes && most > ASSUMED_DEVICE)
        r->conf.device_bytes = most < MAX_DEVICE ? most : MAX_DEVICE;
    return KOILA_OK;
}

/* What is known of one private pool while its entries are read. */
typedef struct pool_seen {
    uint64_t stream, size;
    bool fresh;  /* a segment of `size` was made for `stream`, and none was released since */
    bool inside; /* something was allocated behind the start of a segment */
    bool proven; /* a second one was made where the first had room for any two requests */
} pool_seen;

/* One entry of a private pool; `made` are the segments that are there. */
static void see_pool_entry(const replay *r, const snap_entry *x, pool_seen *p, omap *made)
{
    const bool shares = x->size == SMALL_SEGMENT || x->size == r->conf.large_segment_bytes;
    const bool known = koila__omap_find(made, x->addr);
    switch (x->kind) {
    case KOILA_EVENT_SEGMENT_ALLOC:
        if (!known)
            koila__omap_put(made, x->addr);
        p->proven |= shares && p->fresh && p->size == x->size && p->stream == x->stream;
        if (shares) {
            p->fresh = true;
            p->size = x->size;
            p->stream = x->stream;
        }
        break;
    case KOILA_EVENT_SEGMENT_FREE:
        koila__omap_drop(made, x->addr);
        p->fresh = false;
        break;
    case KOILA_EVENT_ALLOC:
        p->inside |= !known;
        break;
    default:
        break;
    }
}

/* MemPool(no_split=True) is not recorded. Two requests of a size class always share a segment that
 * is not made to measure; a pool where they never do, and where every block begins its segment,
 * does not split. Expected: KOILA_NO_MEMORY. */
static koila_status find_no_split_pools(replay *r)
{
    const uint32_t n = r->s->n_pools;
    if (!(r->conf.rules & KOILA_RULE_NO_SPLIT_POOLS) || !r->s->has_pool_ids)
        return KOILA_OK;
    omap made = { .mem = r->mem };
    pool_seen *seen = koila__realloc(&r->mem, NULL, 0, n * sizeof *seen);
    r->no_split = koila__realloc(&r->mem, NULL, 0, n);
    if (seen && r->no_split) {
        memset(seen, 0, n * sizeof *seen);
        for (uint64_t i = 0; i < r->n; i++) {
            const snap_entry *x = entry(r, i);
            koila_assert(x->pool < n);
            if (x->has_pool && !is_default(r->s->pools[x->pool]))
                see_pool_entry(r, x, &seen[x->pool], &made);
        }
        for (uint32_t i = 0; i < n; i++)
            r->no_split[i] = seen[i].proven && !seen[i].inside;
    }
    const bool ok = seen && r->no_split && !made.failed;
    koila__release(&r->mem, seen, n * sizeof *seen);
    koila__omap_free(&made);
    return ok ? KOILA_OK : KOILA_NO_MEMORY;
}

void koila__replay_teardown(replay *r)
{
    if (r->no_split)
        koila__release(&r->mem, r->no_split, r->s->n_pools);
    koila_cache_free(r->c);
    koila__omap_free(&r->released);
    koila__release(&r->mem, r->after, r->after_cap * sizeof *r->after);
    koila__release(&r->mem, r->made_at, r->n_segs * sizeof(uint64_t));
    koila__vec_free(&r->mem, &r->holds);
    koila__vec_free(&r->mem, &r->assumed);
    koila__release(&r->mem, r->start, r->start_cap * sizeof *r->start);
    koila__release(&r->mem, r->start_blocks, r->n_start_blocks * sizeof *r->start_blocks);
}

koila_status koila__replay_begin(replay *r, koila_error *e)
{
    KOILA_TRY(koila__replay_start(r, e));
    if (find_no_split_pools(r))
        return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    for (uint64_t i = 0; i < r->n_start; i++)
        if (!hold_pool(r, r->start[i].pool))
            return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
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
        r->group = r->at;
        if (r->group > r->until)
            break;
        const uint64_t reserved = now(r, KOILA_STAT_RESERVED_BYTES);
        advance(r);
        if (!r->stopped && !r->no_memory)
            tell_group(r, reserved);
    }
    koila_cache_observe(r->c, NULL, NULL);
    koila__cache_set_driver(r->c, NULL);
    if (r->no_memory)
        return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
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
    if (l->seg_live)
        l->out->lost_pinned += l->seg_free;
    else
        l->out->lost_whole += l->seg_free;
    l->seg_live = l->seg_free = 0;
}
static bool lose_block(void *user, const koila_block *b)
{
    losing *l = user;
    uint64_t rounded;
    if (l->any && b->segment != l->seg)
        lose_segment(l);
    l->any = true;
    l->seg = b->segment;
    switch (b->state) {
    case KOILA_BLOCK_FREE:
        l->seg_free += b->size;
        break;
    case KOILA_BLOCK_PENDING:
        l->out->waiting += b->size;
        l->seg_live += b->size;
        break;
    case KOILA_BLOCK_USED:
        koila_cache_sizes(l->conf, b->requested, &rounded, NULL);
        if (!b->requested || rounded > b->size)
            rounded = b->size;
        l->out->at_peak_requested += b->requested ? b->requested : b->size;
        l->out->lost_rounding += rounded - (b->requested ? b->requested : b->size);
        l->out->lost_unsplit += b->size - rounded;
        l->seg_live += b->size;
        break;
    default:
        break;
    }
    return true;
}

static koila_status out_of_memory(koila_error *e)
{
    return koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
}

/* No trace: only the state at the end. */
static koila_status replay_state_only(replay *r, koila_error *e)
{
    koila_replay_result *o = r->out;
    o->verdict = KOILA_STATE_ONLY;
    snprintf(o->reason, sizeof o->reason,
             "no trace: state only; call torch.cuda.memory._record_memory_history() before "
             "training%s",
             r->n_segs ? ""
                       : " (and no segments: nothing was allocated here, or past torch's cache, as "
                         "PYTORCH_NO_CUDA_MEMORY_CACHING makes it)");
    KOILA_TRY(koila__replay_start(r, e));
    r->stat = koila__cache_stats_ref(r->c);
    o->peak_reserved = now(r, KOILA_STAT_RESERVED_BYTES);
    o->peak_allocated = now(r, KOILA_STAT_ALLOCATED_BYTES);
    o->peak_active = now(r, KOILA_STAT_ACTIVE_BYTES);
    return KOILA_OK;
}

static koila_status replay_trace(replay *r, koila_error *e)
{
    koila_replay_result *o = r->out;
    KOILA_TRY(koila__replay_begin(r, e));
    if (!r->stopped)
        KOILA_TRY(run(r, e));
    if (r->begins_anew)
        return KOILA_OK;
    if (!r->stopped && !r->trace_only)
        check_end(r);
    if (r->stopped && r->c)
        add_up(r);
    if (r->bad_input)
        return koila__fail(e, KOILA_BAD_INPUT, 0, "%s", o->reason);
    if (r->no_memory)
        return out_of_memory(e);
    if (r->stopped)
        return KOILA_OK;
    const uint64_t n_decisions = o->n_retries + o->n_retry_or_empty + o->n_empty + o->n_cap_set +
                                 o->n_expandable_switched + o->n_collected + o->n_start_learned;
    o->verdict = n_decisions ? KOILA_EXACT_WITH_DECISIONS : KOILA_EXACT;
    return KOILA_OK;
}

/* Where the bytes between requested and reserved went, in the state of `c`. */
static koila_status find_losses(const replay *r, const koila_cache *c, koila_replay_result *out,
                                koila_error *e)
{
    losing l = { .conf = &r->conf, .out = out };
    if (koila_cache_walk(c, lose_block, &l) != KOILA_OK)
        return out_of_memory(e);
    lose_segment(&l);
    return KOILA_OK;
}

/* Replays until nothing more is learned of the state before the first entry. `r` is the last of
 * these replays, to be torn down by the caller. */
static koila_status replay_and_learn(replay *r, const koila_snapshot *s, uint32_t device,
                                     const koila_cache_config *c, learned *l,
                                     koila_replay_result *out, koila_error *e)
{
    for (;;) {
        KOILA_TRY(koila__replay_setup(r, s, device, c, out, e));
        r->learned = l;
        out->n_start_learned = l->sizes.n + l->orders.n;
        KOILA_TRY(r->n ? replay_trace(r, e) : replay_state_only(r, e));
        if (!r->begins_anew)
            return KOILA_OK;
        koila__replay_teardown(r);
    }
}

/* Replays again up to the peak, so that the state there can be read. */
static koila_status find_losses_at_peak(const replay *r, const koila_cache_config *c,
                                        koila_error *e)
{
    replay again;
    koila_replay_result ignored;
    koila_status status = koila__replay_setup(&again, r->s, r->device, c, &ignored, e);
    again.learned = r->learned;
    again.until = r->out->peak_entry;
    if (!status)
        status = koila__replay_begin(&again, e);
    if (!status && !again.stopped)
        status = run(&again, e);
    if (!status)
        status = find_losses(r, again.c, r->out, e);
    koila__replay_teardown(&again);
    return status;
}

koila_status koila_replay(const koila_snapshot *s, uint32_t device, const koila_cache_config *c,
                          koila_replay_result *out, koila_error *e)
{
    replay r;
    koila_replay_result result;
    learned l = { .mem = s->mem };
    koila_status status = replay_and_learn(&r, s, device, c, &l, &result, e);
    if (!status) {
        result.stat.struct_size = 0;
        koila_cache_stats(r.c, &result.stat);
        if (result.verdict == KOILA_STATE_ONLY)
            status = find_losses(&r, r.c, &result, e);
        else if (result.peak_reserved && !result.peak_added_up)
            status = find_losses_at_peak(&r, c, e);
    }
    koila__replay_teardown(&r);
    koila__learned_free(&l);
    if (!status)
        *out = result;
    return status;
}

/* A replay at its first entry, with all that can be learned of the state there. */
static koila_status begin_learned(replay *r, const koila_snapshot *s, uint32_t device,
                                  const koila_cache_config *c, learned *l, koila_replay_result *out,
                                  koila_error *e)
{
    KOILA_TRY(koila__replay_setup(r, s, device, c, out, e));
    KOILA_TRY(koila__replay_begin(r, e));
    if (!r->n_start)
        return KOILA_OK;
    koila__replay_teardown(r);
    KOILA_TRY(replay_and_learn(r, s, device, c, l, out, e));
    koila__replay_teardown(r);
    KOILA_TRY(koila__replay_setup(r, s, device, c, out, e));
    r->learned = l;
    return koila__replay_begin(r, e);
}

koila_status koila_timeline(const koila_snapshot *s, uint32_t device, const koila_cache_config *c,
                            koila_moment_fn f, void *f_user, uint64_t until, koila_block_fn blocks,
                            void *blocks_user, bool *exact, koila_error *e)
{
    replay r;
    koila_replay_result out;
    learned l = { .mem = s->mem };
    koila_status status = begin_learned(&r, s, device, c, &l, &out, e);
    r.f = f;
    r.f_user = f_user;
    r.until = until;
    if (!status && !r.stopped)
        status = run(&r, e);
    if (!status) {
        *exact = !r.stopped;
        if (r.stopped)
            add_up(&r);
        if (blocks && !r.stopped && koila_cache_walk(r.c, blocks, blocks_user) != KOILA_OK)
            status = koila__fail(e, KOILA_NO_MEMORY, 0, "the host is out of memory");
    }
    koila__replay_teardown(&r);
    koila__learned_free(&l);
    return status;
}
