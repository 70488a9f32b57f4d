/* recompute.h — a placed step in which some results of the forward pass are dropped after their
 * last use there, and computed once more before the backward pass needs them. Internal to
 * src/engine. */
#ifndef KOILA_SRC_RECOMPUTE_H
#define KOILA_SRC_RECOMPUTE_H

#include "placement/place.h"

/* What is dropped. */
typedef struct koila__recompute {
    /* the forward pass ends with this node: where the step holds the most */
    koila_node at;
    /* The nodes up to `at` are cut into so many segments that hold equal bytes for the backward
     * pass. What crosses from one to another stays, and so does the last segment: it is needed at
     * once. 2 or more. */
    uint32_t n_segments;
    bool keeps_expensive; /* results of expensive operators (cost.h) stay too */
} koila__recompute;

/* *out: the step of p, with calls that run again. They are nodes of their own, placed as the first
 * ones, directly before the first node after `at` that needs them. again[targets]: the targets, as
 * values of *out. NULL when nothing can be dropped. On KOILA_OK *out is yours:
 * koila__placed_free(). `p` has no pieces (Note [Pieces] in place.h). Expected: NO_MEMORY. */
koila_status koila__recompute_new(const koila__placed *p, const koila_value *targets,
                                  uint32_t n_targets, koila__recompute how,
                                  const koila_allocator *mem, koila__placed **out,
                                  koila_value *again);

#endif
