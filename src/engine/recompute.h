/* recompute.h — a placed step in which some results of the forward pass are dropped after their
 * last use there, and computed once more before the backward pass needs them; or wait for it in
 * host memory. Internal to src/engine. */
#ifndef KOILA_SRC_RECOMPUTE_H
#define KOILA_SRC_RECOMPUTE_H

#include "placement/place.h"

/* Host memory for values of one device. */
typedef struct koila__host {
    uint64_t n_bytes; /* that may be taken of it */
    double price;     /* work (plan_costs.h) of a byte that is copied there or back; 0: none */
    uint16_t device;  /* whose values; as koila_meta_info.device */
} koila__host;

/* What is dropped. */
typedef struct koila__recompute {
    /* the forward pass ends with this node: where the step holds the most */
    koila_node at;
    /* The nodes up to `at` are cut into so many segments that hold equal bytes for the backward
     * pass. What crosses from one to another stays, and so does the last segment: it is needed at
     * once. 2 or more; 1 where only host memory is used. */
    uint32_t n_segments;
    bool keeps_expensive; /* results of expensive operators (cost.h) stay too */
    /* Of the bytes held for the backward pass, the first so many KOILA__OFFLOAD_PARTS may wait in
     * host memory: what stays, and what is cheaper to move than to compute again. 0: none may.
     * With n_segments == 1 nothing is computed again, but views of what was moved. */
    uint32_t n_offloaded;
    koila__host host; /* where they wait */
    /* each copy ends one copy later than its value is needed: copies run beside the kernels */
    bool ahead;
} koila__recompute;
enum { KOILA__OFFLOAD_PARTS = 16 };

/* *out: the step of p, with calls that run again. They are nodes of their own, placed as the first
 * ones, directly before the first node after `at` that needs them. again[targets]: the targets, as
 * values of *out. NULL when nothing can be dropped. On KOILA_OK *out is yours:
 * koila__placed_free(). `p` has no pieces (Note [Pieces] in place.h). Expected: NO_MEMORY. */
koila_status koila__recompute_new(const koila__placed *p, const koila_value *targets,
                                  uint32_t n_targets, koila__recompute how,
                                  const koila_allocator *mem, koila__placed **out,
                                  koila_value *again);

#endif
