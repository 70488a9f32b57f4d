/* replay.h — one replay under way: what replay.c (the walk), replay_start.c (the state before the
 * first entry), replay_learn.c (what is learned of that state) and replay_whatif.c share. */
#ifndef KOILA_SRC_REPLAY_H
#define KOILA_SRC_REPLAY_H

#include "base/vec.h"
#include "allocator/cache.h"
#include "allocator/replay_map.h"
#include "allocator/snapshot.h"

enum { N_EVENT_KINDS = KOILA_EVENT_SNAPSHOT + 1 };

/* A block of before the first entry, and a size that it has at least. */
typedef struct start_size {
    uint64_t addr, size;
} start_size;
/* Two segments of before the first entry, by their addresses. */
typedef struct segment_order {
    uint64_t older, newer;
} segment_order;
/* What earlier replays have found out about the state before the first entry. */
typedef struct learned {
    koila_allocator mem;
    VEC(start_size) sizes;
    VEC(segment_order) orders;
    uint64_t n_again; /* entries that were replayed more than once */
} learned;
typedef struct assumed_block {
    uint64_t addr, least; /* least: the rounded request */
} assumed_block;

typedef struct replay {
    const koila_snapshot *s;
    uint32_t device;
    uint64_t n;                   /* entries */
    uint64_t n_of[N_EVENT_KINDS]; /* entries of each kind */
    const koila_segment *segs;
    size_t n_segs;
    uint64_t *made_at; /* per end segment: entry that made it, or 0 */
    koila_cache_config conf;
    koila_cache *c;
    const koila_cache_stat *stat;
    koila_allocator mem;
    /* the cursor */
    uint64_t at;
    bool watching, differs, driver_failed;
    koila_event expected;
    uint64_t group; /* the cursor before the request under way: several entries may be its answer */
    /* bytes after each of those entries; reserved bytes follow from the entries themselves */
    struct {
        uint64_t allocated, active;
    } *after;
    size_t after_cap;
    /* recorded releases of private pools that the rules have yet to name, by address */
    omap released;
    uint64_t released_end; /* the entry after the last of them */
    VEC(koila_pool) holds; /* private pools seen so far */
    uint8_t *no_split;     /* per pool of the snapshot: is it one that never splits? */
    /* result */
    koila_replay_result *out;
    bool stopped, no_memory;
    learned *learned; /* borrowed; NULL: nothing, and nothing is to be learned */
    VEC(assumed_block) assumed;
    /* a request found no room in its reservations, and no pages were mapped: an empty one was left,
     * at an address that is not recorded */
    bool reservation_left;
    bool begins_anew; /* stopped, because something was learned */
    bool tie_of_old;  /* the difference is which of two older segments is the oldest */
    bool bad_input;   /* stopped at an impossible request; out->reason describes it */
    bool whole;       /* every block begins inside the trace */
    /* the end state contradicts the trace: the start comes from the trace, the end is not checked
     */
    bool trace_only;
    koila_moment_fn f;
    void *f_user;
    uint64_t until;
    koila_segment *start;
    koila_block *start_blocks;
    uint64_t n_start, start_cap, n_start_blocks;
} replay;

static inline const snap_entry *entry(const replay *r, uint64_t i)
{
    return snap_entry_at(r->s, r->s->traces[r->device].first + i);
}
static inline bool is_default(koila_pool p) { return !p.owner && !p.id; }
static inline bool is_segment_event(int kind)
{
    return kind >= KOILA_EVENT_SEGMENT_ALLOC && kind <= KOILA_EVENT_SEGMENT_UNMAP;
}

/* The pool of an entry: as recorded, else that of the end segment it lies in, if that was there by
 * then. */
koila_pool koila__replay_pool_at(const replay *r, uint64_t i);

/* The first call decides the verdict; the text becomes out->reason. A difference counts as "not
 * checkable" if the recording leaves something open. */
void koila__replay_stop(replay *r, koila_verdict verdict, uint64_t at, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 4, 5)))
#endif
    ;

/* Everything up to r->c being in the state before the first entry. `out` receives what is found on
 * the way; teardown() in any case. */
koila_status koila__replay_setup(replay *r, const koila_snapshot *s, uint32_t device,
                                 const koila_cache_config *c, koila_replay_result *out,
                                 koila_error *e);
koila_status koila__replay_begin(replay *r, koila_error *e);
void koila__replay_teardown(replay *r);

/* The segment of before the first entry that holds an address; NULL: none. */
const koila_segment *koila__replay_start_segment(const replay *r, uint64_t addr);

/* replay_learn.c. One more fact about the state before the first entry, from an event that was
 * expected and entry `i`, which is not that; false: none follows. */
bool koila__replay_learn(replay *r, const koila_event *expected, uint64_t i);
/* Tells r->c the ages of the segments of before the first entry. Expected: KOILA_NO_MEMORY. */
koila_status koila__replay_set_ages(replay *r);
/* The size of a block of before the first entry, as far as it was learned. */
uint64_t koila__learned_size(const learned *l, uint64_t addr, uint64_t least);
void koila__learned_free(learned *l);

/* replay_start.c. Makes r->c, and r->start (which replay owns) if anything was there before the
 * first entry. */
koila_status koila__replay_start(replay *r, koila_error *e);

#endif
