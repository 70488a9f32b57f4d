/* ways.h — the state of planning a step, and a way to run it. Internal to src/engine. */
#ifndef KOILA_SRC_WAYS_H
#define KOILA_SRC_WAYS_H

#include "engine/effort.h"
#include "engine/plan_inside.h"

typedef struct koila__tried koila__tried;
typedef struct koila__retold koila__retold;

/* A way to run the step in slices. */
typedef struct koila__way {
    koila__placed *placed;
    koila__schedule schedule;
    koila_value *targets;
    int64_t *rows; /* [axes] */
    uint64_t peak;
    bool accepted;
    uint64_t bound; /* no policy that was tried needs less; 0: not known */
    /* it does not fit and is not scheduled: `peak` is its bound, which is that of `keep` */
    bool is_bound;
    uint64_t of_calls; /* koila__kept.of_calls of that */
    koila__keep keep;
    uint64_t results; /* of the step: so many bytes at least; 0: not known */
} koila__way;

/* The state that the parts of koila_plan_new() share. */
typedef struct koila__planning {
    const koila_graph *graph;
    const koila_value *targets;
    uint32_t n_targets;
    const koila_plan_options *options;
    const koila_allocator *mem;
    koila_error *err;
    koila_plan *plan;
    koila__effort *effort; /* shared with the planning of a row, and along other axes */
    int64_t largest_axis;
    double rows_time;            /* koila__way_time() of the rows, as they were planned first */
    bool is_empty;               /* an axis has no rows: nothing to slice */
    bool whole_fits;             /* one slice fits by its sum of live bytes */
    bool accepted;               /* the caller takes the plan */
    uint32_t dim;                /* as koila_plan_info.dim */
    int64_t unit;                /* as koila_plan_info.unit */
    const uint8_t *seeds;        /* of another axis: koila__along.seeds */
    bool is_narrowed;            /* ... further axes are rows that are taken of its first */
    const koila__retold *retold; /* graph and targets are its; NULL: they are as recorded */
    const uint8_t *adds_on;      /* [targets] koila__plan_row(); NULL: none is */
    koila__least other, both;
    koila__tried *tried; /* [n_tried] other axes, in plan.c */
    uint32_t n_tried;
    koila__tried *taken;       /* the one that the plan is, if it is one */
    bool by_rows, is_plain;    /* the plan is of koila__place(); and it keeps all */
    koila__way sliced;         /* plan.c: rows with results dropped; not the plan's */
    const koila__rival *rival; /* koila__plan_row(); NULL: there is none */
    bool is_both_tried;
    bool is_rival;        /* plan.c: results are dropped before a row is cut along other axes */
    bool row_is_too_much; /* along no axis a row fits, with results dropped: nor do more of them */
    bool is_sliced, is_whole_dropped; /* made: of the most slices; of the step whole */
    bool is_written_dropped;          /* made: both, with what is written in place dropped too */
    uint64_t whole_dropped; /* that is bound to need so much, as far as was tried; 0: not known */
    koila__way whole; /* koila__way_whole(); the plan's until another one is adopted, or its own */
    bool repeats_writes; /* koila__outline_options.repeats_writes */
    bool is_bare;        /* the plan is not described yet */
    bool is_lazy;        /* what cannot fit is not scheduled: koila__way.is_bound */
} koila__planning;

typedef koila_status (*koila__place_fn)(const koila_graph *, const koila_value *, uint32_t,
                                        const koila_allocator *, koila__placed **, koila_error *);

/* Room for the targets and rows of *w, in the plan's arena. Expected: NO_MEMORY. */
koila_status koila__way_room(const koila__planning *q, koila__way *w);
/* Places with `how`, or along the other axis that is planned; targets[n_targets]: of *out, which is
 * yours: koila__placed_free(). */
koila_status koila__way_place(const koila__planning *q, koila__place_fn how, koila_value *targets,
                              koila__placed **out);
/* Schedules w->placed, keeping all. */
koila_status koila__way_keep_all(const koila__planning *q, koila__way *w);
/* The step as it was recorded, in one slice, made once: *out is q's. Expected: as
 * koila__schedule_init(). */
koila_status koila__way_whole(koila__planning *q, const koila__way **out);
/* The node that runs at the peak of w in w->rows, or KOILA_NONE. */
koila_node koila__way_peak_node(const koila__planning *q, const koila__way *w);
/* The plan so far, seen as a way: it borrows everything. */
koila__way koila__way_so_far(const koila__planning *q);
void koila__way_swap(koila__way *a, koila__way *b);
void koila__way_free(koila__way *w); /* nothing if it is not placed */
/* Is it within the budget, and taken by the caller? */
bool koila__way_fits(const koila__planning *q, const koila__way *w);
/* Is it not compared with more: for planning has taken long, and it fits, at no more work than the
 * forward pass again, and in no more time than rows one by one and that? */
bool koila__is_enough(const koila__planning *q, const koila__way *w);
/* The estimated time of a way, in bytes moved: its work, and its calls, of which thin slices have
 * many. */
double koila__way_time(const koila__way *w);
/* The same of each recorded call once, on all rows. */
double koila__recorded_time(const koila__schedule *s);
/* Is way b better than a, of which either may not fit? By time if both do, else by the peak. */
bool koila__way_is_better(const koila__planning *q, const koila__way *b, const koila__way *a);

/* Does the caller take a plan that fits by its sum? */
bool koila__is_accepted(const koila__planning *q, koila__placed *placed,
                        const koila__schedule *schedule, koila_value *targets, int64_t *rows,
                        uint64_t peak_bytes);
/* Are forced rows the only limit? Then the plan minimises memory; with a budget it minimises work.
 */
bool koila__is_frugal(const koila_plan_options *o);
/* Rows of a slice of every axis when the main one is cut into n. */
void koila__rows_for(const koila_graph *g, int64_t n_slices, int64_t *rows);
/* Rows of a slice of every axis as the options force them. */
void koila__rows_as_forced(const koila_graph *g, const koila_plan_options *o, int64_t *rows);
/* The axis with the most loop nodes; 0 when nothing is in a loop. */
uint16_t koila__main_axis(const koila__placed *p);
/* The axis whose rows the plan tells: along another axis than the batch's the first, of which the
 * others are lengths that layers make of it. */
uint16_t koila__told_axis(const koila__planning *q, const koila__placed *p);
/* Sets the facts of a plan that need no simulation; p->rows is set. */
void koila__plan_set_info(koila_plan *p, const koila__planning *q);

#endif
