/* schedule.h — from placements to stages: which loop makes what, what later loops keep or
 * recompute, in which order, and who dies when. Internal to src/. The schedule does not depend on
 * the number of rows in a slice: sizes are live.c's business. */
#ifndef KOILA_SRC_SCHEDULE_H
#define KOILA_SRC_SCHEDULE_H

#include "koila/plan.h"
#include "placement/place.h"

/* What a later loop may find kept. A value made by an expensive operator is kept from one loop to
 * the next that needs it when the gap is at most `horizon` loops, or when it crosses a checkpoint:
 * a boundary every `spacing` loops (0 = none). Everything else is recomputed. */
typedef struct koila__keep {
    uint32_t horizon, spacing;
    /* refuse more instructions than so many times the needed nodes; 0: KOILA_COST_MAX_INSTRS */
    uint32_t max_instrs;
    bool cheap;      /* results of cheap operators too: a hostile build, for tests */
    double max_work; /* refuse more work than this; 0: any */
} koila__keep;

/* Memory events, in order; live.c replays them with sizes. `value` names the storage: the value
 * that allocated it. */
typedef enum koila__event_kind {
    KOILA__LOCAL_ALLOC,
    KOILA__LOCAL_FREE,
    KOILA__LOCAL_FREE_IF_CUT, /* not in a slice of all rows: there it has become the whole value */
    KOILA__SLICE_ALLOC,       /* a slice that is copied, unless it is all rows */
    KOILA__SLICE_FREE,
    KOILA__CUT_ALLOC, /* a slice that is copied always */
    KOILA__CUT_FREE,
    KOILA__WHOLE_ALLOC, /* by an operator of a whole stage */
    KOILA__WHOLE_FREE,
    KOILA__COLLECTED_FREE, /* a whole value that a loop made */
    KOILA__KEPT,           /* a piece of its own name, */
    KOILA__KEPT_FROM,      /* which is this storage: always right behind KEPT */
    /* not in the first slice: there it has become the accumulator. From here on the first slice may
     * do otherwise than the others */
    KOILA__LOCAL_FREE_LATER,
    KOILA__ADD_OWNED, /* first slice: local storage becomes the accumulator */
    /* the same when a wider accumulator is needed: only in a slice of all rows */
    KOILA__ADD_OWNED_WIDE,
    KOILA__ADD_CLONE, /* first slice: an accumulator of its own is made */
    KOILA__PUT,       /* first slice: the whole buffer is made */
    /* the same, unless the slice is all rows: then local storage becomes it */
    KOILA__PUT_OWNED,
    /* a kept piece's last use is over: given up when the slice is complete, so that it can be run
     * again after an out of memory */
    KOILA__KEPT_FREE,
    /* node `value` runs now: outputs exist, inputs not yet freed; workspace counts */
    KOILA__RUN,
} koila__event_kind;

typedef struct koila__event {
    uint32_t kind : 5, value : 27; /* small: they are many, and walked often */
} koila__event;
#define KOILA__EVENT_VALUES ((uint32_t)1 << 27)

typedef struct koila__stage {
    koila_stage stage; /* as seen outside */
    koila__event *events;
    uint32_t n_events;
    bool any_wide; /* a sum of half precision is accumulated wider */
} koila__stage;

typedef struct koila__schedule {
    koila__arena arena;
    koila__stage *stages;
    uint32_t n_stages, n_loops, n_keeps; /* n_keeps: KEEP instructions */
    /* estimated time of everything that runs, all slices, in bytes moved (plan_costs.h) */
    double work;
    double work_recorded; /* of every needed node once */
    uint32_t n_needed;    /* needed nodes */
} koila__schedule;

/* What all policies of one graph share: levels, loops, homes, uses. Borrows `p`, which must outlive
 * it. */
typedef struct koila__scheduler koila__scheduler;
/* targets: values of p->graph. cheap: as koila__keep.cheap of every policy to come. On success *out
 * is yours: koila__scheduler_free(). Expected: NO_MEMORY; UNSUPPORTED when there are too many
 * barriers, or more values than an event can name. */
koila_status koila__scheduler_new(koila__scheduler **out, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets, bool cheap,
                                  const koila_allocator *mem, koila_error *err);
void koila__scheduler_free(koila__scheduler *w); /* NULL is fine; schedules made by it live on */
uint32_t koila__scheduler_n_loops(const koila__scheduler *w);
/* A lower bound of what the results hold at the end of any schedule, in bytes: a smaller budget is
 * never enough. The caller has checked that all bytes add up without overflow. */
uint64_t koila__scheduler_results_bytes(koila__scheduler *w);
/* The work of the policy's schedule, several times faster than making it. A little less than the
 * true work when an expensive result is part of another one's storage; above keep.max_work (0: no
 * limit) only some number above it. INFINITY when the schedule would surely run more than it may.
 */
double koila__schedule_work(koila__scheduler *w, koila__keep keep);
/* What the policy keeps whose work was asked for last. */
typedef struct koila__kept {
    bool any;
    /* nothing kept may share storage: then the work told is exactly that of the schedule */
    bool is_sure;
    /* kept, and in results, at once, at least, whatever the number of slices: no schedule of the
     * policy has a lower peak */
    uint64_t n_bytes;
} koila__kept;
koila__kept koila__scheduler_kept(const koila__scheduler *w);
/* On success *out is filled: koila__schedule_deinit(). Expected: NO_MEMORY; UNSUPPORTED when the
 * policy would run more than it may, or one operator needs a value cut in two ways. The scheduler
 * can be used again whatever came out. */
koila_status koila__schedule_make(koila__scheduler *w, koila__keep keep, koila__schedule *out,
                                  koila_error *err);
/* Like koila__schedule_deinit(), but the memory serves the next schedule that w makes. */
void koila__schedule_recycle(koila__scheduler *w, koila__schedule *s);
/* Both at once. */
koila_status koila__schedule_init(koila__schedule *out, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets, koila__keep keep,
                                  const koila_allocator *mem, koila_error *err);
void koila__schedule_deinit(koila__schedule *s);
/* A lower bound of what the recorded step needs when it runs whole, in bytes, without placing or
 * scheduling it: exact unless something is written in place. 0 when the sizes do not add up.
 * Expected: NO_MEMORY. */
koila_status koila__schedule_whole_bytes(const koila_graph *g, const koila_value *targets,
                                         uint32_t n_targets, const koila_allocator *mem,
                                         uint64_t *at_least);

#endif
