/* axes.h — the other axes of a recorded step: dimensions of the batch that can be cut in place of
 * its rows. Internal to src/engine.
 *
 * Which dimension of a leaf is called the batch is no part of the recorded calls: placing the same
 * calls with leaves that are sharded otherwise is as exact. So another axis is the recorded graph
 * under other leaves, and the ids of values and nodes stay.
 *
 * An axis is a size: each batched leaf has it in its first dimension of that size, its rows apart.
 * Where layers make that dimension shorter (a convolution with a stride, a pool), several entries
 * are one row of the axis, so that the shorter dimensions are cut in the same rows: an image of 32
 * that a U-Net halves twice has 8 rows of 4, then of 2, then of 1.
 * Lengths that are no multiples of these rows (33 lines that a pool makes 16) are further axes of
 * the step, each in rows of its own: a layer that reads its whole input makes rows of any axis.
 * Two sequences (source and target of a translation) are two axes of one step: each leaf is cut
 * along its own, and attention from one to the other along its queries.
 * Of two dimensions of one size (a square image) the second is never cut: it would be the same
 * once more. An axis that no leaf has begins within the step: the patches of an image, the tokens
 * but the last or with a first one. There whole values of that size are sliced, which is always
 * exact.
 */
#ifndef KOILA_SRC_AXES_H
#define KOILA_SRC_AXES_H

#include "graph/table.h"

enum {
    KOILA__MOST_AXES = 3,    /* that are tried; each costs a placing */
    KOILA__MOST_WAYS = 4,    /* and two of them together */
    KOILA__SHORT_AXIS = 8,   /* times longer, the longest one makes an axis too short to be tried */
    KOILA__FEWEST_ROWS = 4,  /* of an axis whose rows are several entries */
    KOILA__MOST_LENGTHS = 8, /* that are no multiples of the rows */
};

/* One other axis: `size` entries along dimension `dim` of the first value that has it, in `rows`
 * rows of the same number of entries. */
typedef struct koila__axis {
    int64_t size, rows;
    uint32_t dim;
    uint32_t n_leaves;  /* batched ones that have it */
    uint32_t n_real;    /* other leaves that do */
    uint32_t n_weights; /* those of them that are no whole numbers and no masks */
    double bytes;       /* of values within the step that do */
    /* rows of the further axes of the step */
    int64_t others[KOILA__MOST_LENGTHS];
    uint32_t n_others;
    /* others[0], where it is the axis of leaves that lack the first; else 0 */
    int64_t with;
} koila__axis;

/* A step under another axis. */
typedef struct koila__along {
    koila_graph graph; /* borrows all but values and axes */
    uint32_t n_values, n_nodes;
    uint8_t *of_batch; /* [values] depends on batched leaves */
    uint8_t *seeds;    /* [nodes] the same of their results */
} koila__along;

/* Writes those that the batched leaves of `g` have, the likeliest to help first: what most leaves
 * share, then the longest. Then one that no leaf has but most bytes of the step do; the last are
 * two that different leaves have. *n: how many. Expected: NO_MEMORY. */
koila_status koila__axes_find(const koila_graph *g, const koila_allocator *mem,
                              koila__axis out[KOILA__MOST_WAYS], uint32_t *n);
/* Has some batched leaf another dimension? */
bool koila__axes_any(const koila_graph *g);

/* `g` cut along the axis: a leaf that lacks it is whole. Expected: NO_MEMORY. The caller ends it
 * with koila__along_deinit(). */
koila_status koila__along_init(const koila_graph *g, const koila__axis *axis,
                               const koila_allocator *mem, koila__along *out);
void koila__along_deinit(koila__along *a, const koila_allocator *mem);

#endif
