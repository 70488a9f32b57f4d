/* linetab.h — the line profiler without Python: codes, activations, windows, rows.
 *
 *   code        a function's body, named by an address; rows 0 .. n_rows-1 are its source lines.
 *               Known once, however many profilers want it.
 *   func        what one profiler has recorded about one code: a row per line, of O(lines) memory
 *               whatever the number of events
 *   activation  one call, or one run of a generator between resume and suspend. Each thread has a
 *               stack of them.
 *   window      from one line event of an activation to the next event of the same activation; see
 *               meter.h. Everything it calls is inside.
 *
 * One line event closes the top activation's window and opens the next. If no allocator event
 * happened anywhere since it was opened, then
 *   peak == current == start   and all sums are 0
 * and a row that has already recorded this very state (row.seen_events) has nothing to learn but
 * its hits and its time: that is the fast path, a dozen nanoseconds, the same for 5 lines and for
 * 5000.
 *
 * Some work is done for a line while another line runs. Then it is credited:
 *   backward    autograd numbers its nodes. origins[] says which lines a number was given out
 *               under: intervals of numbers, each with a path, the rows that were open, innermost
 *               first. What is allocated while a node runs backward goes to every row of its path.
 *   lazy        a captured operator knows its line; what is allocated and freed while it runs goes
 *               to that row, unless the row is open anyway and has it in its window.
 * Credits are given on any thread, inside the allocator: under one spin lock, which whoever removes
 * a code or reads credits takes too.
 *
 * Recursion: an inner window's events are inside the outer one's too. Maxima do not mind; sums and
 * time are added only by the outermost open window of a row on its thread, so that an event counts
 * once in a row.
 */
#ifndef KOILA_SRC_LINETAB_H
#define KOILA_SRC_LINETAB_H

#include "base/idset.h"
#include "base/vec.h"
#include "memory/meter.h"

/* What a row of `allocated`/`freed` statistics is about: bytes and counts, of all, small and large
 * blocks. */
#define KOILA__FLOWS 6

/* Statistics that only the device's allocator knows, read from it at the end of a window:
 * requested_bytes, inactive_split, inactive_split_bytes, segment and reserved_bytes x all,
 * large_pool, small_pool x current, allocated, freed. */
#define KOILA__STATS_METRICS 5
#define KOILA__STATS (KOILA__STATS_METRICS * 3)
typedef struct koila__stats {
    uint64_t current[KOILA__STATS], allocated[KOILA__STATS], freed[KOILA__STATS];
} koila__stats;

typedef struct koila__rec {                                 /* one row on one device */
    uint64_t peak[KOILA__Q_COUNT], current[KOILA__Q_COUNT]; /* maximum over hits */
    uint64_t allocated[KOILA__FLOWS], freed[KOILA__FLOWS];  /* maximum over hits */
    /* maximum over hits of peak - start, bytes */
    uint64_t rise;
    uint64_t sum_alloc, sum_freed; /* bytes, over all hits */
    /* bytes at end - at start, over all hits */
    int64_t sum_delta;
    /* NULL: never read. stats_peak uses `current` only */
    koila__stats *stats_max, *stats_peak;
} koila__rec;

typedef struct koila__credit {   /* one row on one device: done for it while other lines ran */
    uint64_t peak, alloc, freed; /* bytes; peak: the device's, highest */
    uint64_t backward;           /* bytes allocated by autograd nodes made here */
} koila__credit;

typedef struct koila__row {
    uint64_t n_hits, n_ticks, rss_bytes;
    /* koila__meter_events() when the maxima were last brought up to date; valid if `recorded` */
    uint64_t seen_events;
    uint32_t n_stats_reads;
    int seen_target;
    bool recorded, shared; /* shared: events of worker threads may have been given to others too */
    koila__rec *rec;       /* one per device, then the target's; NULL until recorded */
    /* one per device (KOILA__DEVICES_MAX); NULL: none. Guarded by the lines' credit lock. */
    koila__credit *credit;
} koila__row;

/* What a profiler wants; may change at any time. */
typedef struct koila__wish {
    bool enabled;
    /* the device whose numbers a row shows */
    int target;
    /* read statistics: never, 1000 times a line, always */
    enum { KOILA__STATS_HOOK, KOILA__STATS_AUTO, KOILA__STATS_FULL } stats_mode;
} koila__wish;

typedef struct koila__code koila__code;
typedef struct koila__func koila__func;
struct koila__func {
    koila__code *code;
    koila__func *next;       /* the same code for another profiler */
    const koila__wish *wish; /* borrowed: the profiler outlives its funcs */
    koila__row *rows;
};

struct koila__code {
    const void *key;
    int first_line, n_rows;
    uint32_t n_activations; /* on any stack */
    uint32_t *n_open;       /* per row: open windows, on all threads */
    koila__func *funcs;
    koila__code *next; /* all codes */
};

typedef struct koila__activation {
    koila__code *code;
    struct koila__activation *outer_same; /* the next activation below with the same code */
    int row;                              /* of the open window; -1: none */
    uint64_t serial;                      /* of the call: unique on its stack */
    uint64_t opened_ticks, opened_events, opened_shared;
    struct {
        uint64_t saved[KOILA__DEVICES_MAX][KOILA__SAVED];
        uint64_t start_bytes[KOILA__DEVICES_MAX];
        koila__sums start[KOILA__DEVICES_MAX];
        /* per device at the window's start and end, when somebody wants them; NULL until then */
        koila__stats *stats, *end_stats;
        bool has_stats; /* `stats` were read */
    } w;
} koila__activation;

/* Nodes numbered from `first` on, up to the next origin's, were made under this path; 0: in no
 * profiled code. */
typedef struct koila__origin {
    uint64_t first;
    uint32_t path;
} koila__origin;
#define KOILA__ORIGINS_MAX 32768 /* beyond, the older half is forgotten: 512 KiB a thread at most */
#define KOILA__PATHS_MAX 65536
typedef struct koila__path { /* a row, and the path of the call it is in */
    koila__code *code;       /* NULL: given up since */
    int row;
    uint32_t outer; /* 0: none */
} koila__path;

/* a path that may be kept: it means nothing once all codes were given up */
typedef struct koila__origin_path {
    uint32_t path, begun;
} koila__origin_path;

typedef struct koila__stack {
    koila__thread thread; /* first: what the meter sees */
    koila__activation **activations;
    size_t n, capacity, n_made; /* activations[n .. n_made-1] are kept for reuse */
    size_t n_lost;              /* entered but not recorded: no host memory */
    uint64_t n_entered;
    uint64_t thread_number; /* as autograd counts threads; 0: made no node yet */
    koila__origin *origins; /* guarded by the credit lock */
    size_t n_origins, origins_capacity;
    uint64_t origin_serial; /* of the last origin: the top activation and its row then */
    int origin_row;
} koila__stack;

typedef struct koila__last_credit {
    uint64_t n_made, thread, number; /* valid while n_made is what it was */
    uint32_t path;
} koila__last_credit;

typedef struct koila__lines {
    koila_allocator mem;
    koila__meter *meter;
    /* Hash table, open addressing, of load <= 1/4. It is no koila__idset: it is asked at every
     * Python call, and a miss must be one look. */
    koila__code **slots;
    size_t n_slots, n_codes;
    koila__code *codes;
    bool sees_nodes; /* somebody calls koila__lines_made() */
    atomic_flag credit_busy;
    /* Path number p is element p - 1. Both are guarded by the credit lock. */
    VEC(koila__path) paths;
    koila__idset path_set;
    uint32_t n_begun; /* how often the paths were begun anew */
    /* nodes with an origin, ever: 0 means that nobody need ask which node runs */
    _Atomic uint64_t n_made;
    koila__last_credit last; /* the node that was credited last; guarded by the credit lock */
    uint64_t rss_bytes, rss_ticks, page_bytes;
    int rss_fd; /* /proc/self/statm, -1 not open yet, -2 cannot */
    double ticks_per_ns;
    uint64_t tick0, ns0;
    /* read device's statistics now; NULL or false: not available. May call Python: the structure is
     * consistent around the call. */
    bool (*read_stats)(int device, koila__stats *out);
    /* let the meter know what devices do without telling, before each boundary; NULL: there are
     * none. thorough: whatever may have changed, once an activation; read_stats does so too */
    void (*poll)(bool thorough);
} koila__lines;

void koila__lines_init(koila__lines *l, koila__meter *m, const koila_allocator *mem);
void koila__lines_deinit(koila__lines *l);

/* The code at `key`, or NULL. Here, for it is asked at every Python call. */
static inline size_t koila__code_home(const koila__lines *l, const void *key)
{
    return (((uintptr_t)key >> 4) * 0x9E3779B97F4A7C15u >> 20) & (l->n_slots - 1);
}
static inline koila__code *koila__lines_find(const koila__lines *l, const void *key)
{
    if (!l->n_codes)
        return NULL;
    for (size_t i = koila__code_home(l, key);; i = (i + 1) & (l->n_slots - 1))
        if (!l->slots[i] || l->slots[i]->key == key)
            return l->slots[i];
}
/* Let a profiler record `key`. Expected: NO_MEMORY, and nothing changed. `*out` is borrowed until
 * koila__func_free(). */
koila_status koila__func_new(koila__lines *l, const void *key, int first_line, int n_rows,
                             const koila__wish *wish, koila__func **out);
/* A func that stays as `f` is now, for `wish`, which should be disabled. Expected: NO_MEMORY. */
koila_status koila__func_copy(koila__lines *l, const koila__func *f, const koila__wish *wish,
                              koila__func **out);
/* Forget it. true: nobody else wants the code and it is on no stack, so `key` may be given up;
 * otherwise koila__lines_reap() will say. */
bool koila__func_free(koila__lines *l, koila__func *f);
/* Give up one code that nobody wants and that is on no stack any more: its key, or NULL when there
 * is none. */
const void *koila__lines_reap(koila__lines *l);
/* Does an enabled profiler want this code? */
bool koila__code_wanted(const koila__code *c);

/* The events. `line` is the source line; lines outside the code's rows open no window. */
void koila__lines_enter(koila__lines *l, koila__stack *s, koila__code *c, int line, bool is_call);
void koila__lines_line(koila__lines *l, koila__stack *s, koila__code *c, int line);
void koila__lines_leave(koila__lines *l, koila__stack *s);
static inline koila__code *koila__stack_top(const koila__stack *s)
{
    return s->n && !s->n_lost ? s->activations[s->n - 1]->code : NULL;
}

/* An autograd node with this number was made now, on the thread of `s`, which autograd calls
 * `thread`. Without the GIL. */
void koila__lines_made(koila__lines *l, koila__stack *s, uint64_t thread, uint64_t number);
/* `n_bytes` were allocated on `device` while node `number` of `thread` ran backward. Any thread,
 * inside the allocator. */
void koila__lines_credit_node(koila__lines *l, uint64_t thread, uint64_t number, int device,
                              uint64_t n_bytes);
/* The same in two steps, for what such a node captures and is run later: the lines that made the
 * node, and the credit. */
koila__origin_path koila__lines_path_of(koila__lines *l, uint64_t thread, uint64_t number);
void koila__lines_credit_path(koila__lines *l, koila__origin_path path, int device,
                              uint64_t n_bytes);
/* An allocator event, `now` bytes after it, while work captured on this line of the code at `key`
 * ran. Any thread, inside the allocator. */
void koila__lines_credit_line(koila__lines *l, const void *key, int line, int device, int64_t delta,
                              uint64_t now);
/* What was credited to a row, on `device` (< 0: the row's target). */
koila__credit koila__row_credit(koila__lines *l, const koila__row *row, int device);

koila__stack *koila__stack_new(koila__lines *l); /* NULL: no host memory, or too many threads */
/* leave everything; the memory is kept, for events may still look at it */
void koila__stack_clear(koila__lines *l, koila__stack *s);

/* device < 0: the target's */
const koila__rec *koila__row_rec(const koila__lines *l, const koila__row *row, int device);
uint64_t koila__ticks(void);
double koila__ticks_to_ns(koila__lines *l, uint64_t ticks);
bool koila__stack_check(const koila__lines *l, const koila__stack *s);

#endif
