/* schedule.h — from placements to stages: which loop makes what, what later loops keep or recompute, in which order, and who dies when.
 * Internal to src/. The schedule does not depend on the number of rows in a slice: sizes are live.c's business. */
#ifndef KOILA_SRC_SCHEDULE_H
#define KOILA_SRC_SCHEDULE_H

#include "koila/plan.h"
#include "place.h"

/* What a later loop may find kept. A value made by an expensive operator is kept from one loop to the next that needs it when the gap is at most
 * `horizon` loops, or when it crosses a checkpoint: a boundary every `spacing` loops (0 = none). Everything else is recomputed. */
typedef struct koila__keep {
    uint32_t horizon, spacing;
} koila__keep;

/* Memory events, in order; live.c replays them with sizes. `value` names the storage: the value that allocated it. */
typedef enum koila__event_kind {
    KOILA__LOCAL_ALLOC,
    KOILA__LOCAL_FREE,
    KOILA__LOCAL_FREE_LATER, /* not in the first slice: there it has become the accumulator */
    KOILA__WHOLE_ALLOC,      /* by an operator of a whole stage */
    KOILA__WHOLE_FREE,
    KOILA__ADD_OWNED,        /* first slice: local storage becomes the whole one */
    KOILA__ADD_CLONE,        /* first slice: a whole storage of its own is made */
    KOILA__PUT_ALLOC,        /* first slice: the whole buffer is made */
    KOILA__KEPT_FREE,        /* a kept piece's last use is over */
    KOILA__RUN,              /* node `value` runs now: outputs exist, inputs not yet freed; workspace counts */
} koila__event_kind;

typedef struct koila__event {
    uint8_t kind;
    uint32_t value;
} koila__event;

typedef struct koila__stage {
    koila_stage stage; /* as seen outside */
    koila__event *events;
    uint32_t n_events;
} koila__stage;

typedef struct koila__schedule {
    koila__arena arena;
    koila__stage *stages;
    uint32_t n_stages, n_loops;
    double work;          /* estimated time of everything that runs, all slices, in bytes moved (plan_costs.h) */
    double work_recorded; /* of every needed node once */
    uint32_t n_needed;    /* needed nodes */
} koila__schedule;

/* targets: values of p->graph. On success *out is filled; koila__schedule_deinit() frees it. Expected: NO_MEMORY. */
koila_status koila__schedule_init(koila__schedule *out, const koila__placed *p, const koila_value *targets, uint32_t n_targets, koila__keep keep,
                                  const koila_allocator *mem, koila_error *err);
void koila__schedule_deinit(koila__schedule *s);

#endif
