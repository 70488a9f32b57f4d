/* schedule.h — from placements to stages: which loop makes each value, which values later loops
 * keep or recompute, the order, and the lifetimes. Internal to src/. The schedule does not depend
 * on the number of rows in a slice: sizes are live.c's business. */
#ifndef KOILA_SRC_SCHEDULE_H
#define KOILA_SRC_SCHEDULE_H

#include "koila/plan.h"
#include "placement/place.h"

/* Which values are kept for later loops. A value of an expensive operator is kept until the next
 * loop that needs it if the gap is at most `horizon` loops, or if it crosses a checkpoint: a
 * boundary every `spacing` loops (0 = none). Everything else is recomputed. */
typedef struct koila__keep {
    uint32_t horizon, spacing;
    /* refuse more than this many instructions per needed node; 0: KOILA_COST_MAX_INSTRS */
    uint32_t max_instrs;
    bool cheap; /* keep results of cheap operators too: only for tests */
    /* of the forward pass keep only what calls that run again begin with */
    bool drops_forward;
    double max_work; /* refuse more work than this; 0: any */
} koila__keep;

/* Memory events, in order; live.c replays them with sizes. `value` names the storage: the value
 * that allocated it. */
typedef enum koila__event_kind {
    KOILA__LOCAL_ALLOC,
    KOILA__LOCAL_MADE, /* the same, while the node of the RUN that follows runs: that counts it */
    KOILA__LOCAL_FREE,
    /* except in a slice of all rows, where it has become the whole value */
    KOILA__LOCAL_FREE_IF_CUT,
    KOILA__SLICE_ALLOC, /* a slice that is copied unless it is all rows */
    KOILA__SLICE_FREE,
    KOILA__CUT_ALLOC, /* a slice that is always copied */
    KOILA__CUT_FREE,
    KOILA__WHOLE_ALLOC, /* by an operator of a whole stage */
    KOILA__WHOLE_FREE,
    KOILA__COLLECTED_FREE, /* a whole value that a loop made */
    /* KOILA_INSTR_ONTO, beside an accumulator that is there: the addend, in a slice of all rows
     * that adds to nothing of earlier rows; named as its accumulator */
    KOILA__ADDEND_ALLOC,
    KOILA__ADDEND_FREE,
    KOILA__KEPT,      /* a kept piece, named as its value; */
    KOILA__KEPT_FROM, /* directly after KEPT: the storage that became the piece */
    /* except in the first slice, where it has become the accumulator. From this kind on, the first
     * slice may differ from the others */
    KOILA__LOCAL_FREE_LATER,
    KOILA__SUM_MADE,  /* first slice: the node of the RUN that follows makes the accumulator */
    KOILA__ADD_OWNED, /* first slice: local storage becomes the accumulator */
    /* the same for a wider accumulator: only in a slice of all rows */
    KOILA__ADD_OWNED_WIDE,
    KOILA__ADD_CLONE, /* first slice: an accumulator of its own is made */
    KOILA__PUT,       /* first slice: the whole buffer is made */
    /* the same, but in a slice of all rows the local storage becomes the buffer */
    KOILA__PUT_OWNED,
    /* the last use of a kept piece: it is released when the slice is complete, so that the slice
     * can be run again after an out of memory */
    KOILA__KEPT_FREE,
    /* node `value` runs now: outputs exist, inputs not yet freed; workspace counts */
    KOILA__RUN,
    KOILA__INNER, /* KOILA_DO_INNER: its peak counts; `value` is unused */
} koila__event_kind;

typedef struct koila__event {
    uint32_t kind : 5, value : 27; /* small: there are many, and they are walked often */
} koila__event;
#define KOILA__EVENT_VALUES ((uint32_t)1 << 27)

typedef struct koila__stage {
    koila_stage stage; /* as seen outside */
    koila__event *events;
    uint32_t n_events;
    bool any_wide;       /* a sum of half precision is accumulated wider */
    uint64_t inner_peak; /* of stage.inner */
} koila__stage;

typedef struct koila__schedule {
    koila__arena arena;
    koila__stage *stages;
    uint32_t n_stages, n_loops, n_keeps; /* n_keeps: KEEP instructions */
    /* estimated time of all slices, in bytes moved (plan_costs.h) */
    double work;
    double work_recorded; /* of every needed node once */
    uint32_t n_needed;    /* needed nodes */
} koila__schedule;

/* The state that all policies of one graph share: levels, loops, homes, uses. Borrows `p`, which
 * must outlive it. */
typedef struct koila__scheduler koila__scheduler;
/* targets: values of p->graph. cheap: koila__keep.cheap of every later policy. On success *out is
 * yours: koila__scheduler_free(). Expected: NO_MEMORY; UNSUPPORTED when there are too many
 * barriers, or more values than an event can name. */
koila_status koila__scheduler_new(koila__scheduler **out, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets, bool cheap,
                                  const koila_allocator *mem, koila_error *err);
void koila__scheduler_free(koila__scheduler *w); /* NULL is fine; schedules made by it live on */
uint32_t koila__scheduler_n_loops(const koila__scheduler *w);
/* A lower bound of the bytes that the results hold at the end of any schedule: a smaller budget is
 * never enough. The caller has checked that all bytes add up without overflow. */
uint64_t koila__scheduler_results_bytes(koila__scheduler *w);
/* The work of the policy's schedule, several times faster than making it. It is slightly too low
 * when an expensive result shares another one's storage. If it exceeds keep.max_work (0: no limit),
 * it is only some number above that; if the schedule surely exceeds its limit of instructions, it
 * is INFINITY.
 */
double koila__schedule_work(koila__scheduler *w, koila__keep keep);
/* The kept values of the policy last passed to koila__schedule_work(). */
typedef struct koila__kept {
    bool any;
    /* no kept value shares storage: koila__schedule_work() was then exact */
    bool is_sure;
    /* a hash of what is kept after which loop: policies of one hash that are sure are one policy */
    uint64_t choices;
    /* a lower bound, for any number of slices, of the bytes in kept values, results and whole
     * values at one moment: no schedule of the policy has a lower peak */
    uint64_t n_bytes;
    /* of these, what calls outside loops hold for each other, whatever is kept; 0: they do not run
     * at that moment */
    uint64_t of_calls;
} koila__kept;
koila__kept koila__scheduler_kept(const koila__scheduler *w);
/* On success *out is filled: koila__schedule_deinit(). Expected: NO_MEMORY; UNSUPPORTED when the
 * policy exceeds its limit of instructions or work, or when one operator needs a value cut in two
 * ways. The scheduler can be used again afterwards, also after a failure. */
koila_status koila__schedule_make(koila__scheduler *w, koila__keep keep, koila__schedule *out,
                                  koila_error *err);
/* Like koila__schedule_deinit(), but w reuses the memory for its next schedule. */
void koila__schedule_recycle(koila__scheduler *w, koila__schedule *s);
/* Makes a scheduler and one schedule. */
koila_status koila__schedule_init(koila__schedule *out, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets, koila__keep keep,
                                  const koila_allocator *mem, koila_error *err);
void koila__schedule_deinit(koila__schedule *s);
/* A lower bound of the bytes that the recorded step needs when it runs whole, found without placing
 * or scheduling it: exact unless there are in-place writes. 0 when the sum of sizes overflows.
 * Expected: NO_MEMORY. */
koila_status koila__schedule_whole_bytes(const koila_graph *g, const koila_value *targets,
                                         uint32_t n_targets, const koila_allocator *mem,
                                         uint64_t *at_least);

#endif
