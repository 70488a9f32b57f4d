/* axes.h — the other axes of a recorded step: dimensions of the batch that can be cut in place of
 * its rows. Internal to src/engine.
 *
 * Which dimension of a leaf is called the batch is no part of the recorded calls: placing the same
 * calls with leaves that are sharded otherwise is as exact. So another axis is the recorded graph
 * under other leaves, and the ids of values and nodes stay.
 *
 * An axis is a size: each batched leaf has it in its first dimension of that size, its rows apart.
 * Of two dimensions of one size (a square image) the second is never cut: it would be the same
 * once more. */
#ifndef KOILA_SRC_AXES_H
#define KOILA_SRC_AXES_H

#include "graph/table.h"

enum {
    KOILA__MOST_AXES = 3,  /* that are tried; each costs a placing */
    KOILA__SHORT_AXIS = 8, /* times longer, the longest one makes an axis too short to be tried */
};

/* One other axis: `size` entries along dimension `dim` of the first leaf that has it. */
typedef struct koila__axis {
    int64_t size;
    uint32_t dim;
    uint32_t n_leaves; /* that have it */
} koila__axis;

/* Writes those that the batched leaves of `g` have, the likeliest to help first: what most leaves
 * share, then the longest. Returns how many. */
uint32_t koila__axes_find(const koila_graph *g, koila__axis out[KOILA__MOST_AXES]);

/* `g` cut along the axis of this size: a leaf that lacks it is whole. Borrows all of `g` but its
 * values and axes. Expected: NO_MEMORY. The caller ends it with koila__axes_end(). */
koila_status koila__axes_view(const koila_graph *g, int64_t size, const koila_allocator *mem,
                              koila_graph *out);
void koila__axes_end(koila_graph *view, const koila_allocator *mem);

#endif
