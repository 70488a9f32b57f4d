/* plan_inside.h — the insides of koila_plan. plan.c chooses it, plan_facts.c describes it,
 * plan_adapt.c adapts calls to its slices, plan_check.c checks it. Internal to src/engine. */
#ifndef KOILA_SRC_PLAN_INSIDE_H
#define KOILA_SRC_PLAN_INSIDE_H

#include "koila/plan.h"

#include "engine/effort.h"
#include "engine/schedule.h"

struct koila_plan {
    koila_allocator mem;
    koila__placed *placed;
    koila__schedule schedule;
    koila_plan_info info;
    koila_value *targets;
    uint32_t n_targets;
    int64_t *rows; /* [axes] */
    koila_gather *gathers;
    koila_gather *largest;
    uint32_t n_largest;
    koila_curve_point *curve;
    uint32_t n_curve, n_curve_max;
    koila__arena arena;
};

/* The peak in slices of rows[axes]. If it exceeds `limit` (0: none), the result is only some number
 * above `limit`. */
uint64_t koila__plan_peak(const koila__placed *p, const koila__schedule *s,
                          const koila_plan_options *o, const int64_t *rows, uint64_t limit);
/* Fills the facts for users: peaks and the largest values; if the plan fits, also gathers and the
 * curve. known: its peak; 0: not known. Expected: NO_MEMORY. */
koila_status koila__plan_describe(koila_plan *p, const koila_plan_options *o, uint64_t known);
/* The least that cutting another axis needs. */
typedef struct koila__least {
    uint64_t peak_bytes; /* UINT64_MAX: none was tried */
    /* within a row: what one row needs at least, or with what was tried, without what is held
     * beside it */
    uint64_t of_row;
    bool is_bound; /* none needs less, and none was made: another way needs no more */
    uint32_t dim;
    int64_t rows, size; /* entries of a slice, and of all */
} koila__least;
/* The least that a plan above its budget, or one of those that were made beside it, needs. */
uint64_t koila__plan_least(const koila_plan *p, const koila__least *other,
                           const koila__least *both);
/* Writes the OOM message of a plan above its budget. both: the least that both need together.
 * least: what any way needs. */
koila_status koila__plan_no_fit(const koila_plan *p, const koila_graph *recorded,
                                const koila__least *other, const koila__least *both, uint64_t least,
                                koila_error *err);
/* What takes little time beside cutting a row along other axes: *fits: it does, so the row is not
 * cut. of_row: koila__planning.whole_dropped of that. */
typedef struct koila__rival {
    koila_status (*try)(void *user, uint64_t of_row, bool *fits);
    void *user;
} koila__rival;
/* koila_plan_new() of a step within a row: adds_on[n_targets], or NULL: sums that are added to what
 * earlier rows left, where that is possible. *least, or NULL: the least that was found where
 * nothing fits. effort: what planning has taken, NULL: nothing so far. rival: is tried before other
 * axes, NULL: there is none. */
koila_status koila__plan_row(const koila_graph *graph, const koila_value *targets,
                             uint32_t n_targets, const uint8_t *adds_on,
                             const koila_plan_options *options, const koila_allocator *mem,
                             koila__effort *effort, const koila__rival *rival, koila_plan **out,
                             koila__least *least, koila_error *err);

#endif
