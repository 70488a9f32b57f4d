/* unroll.h — the slices of an axis as calls of their own, one after another. Internal to
 * src/engine. */
#ifndef KOILA_SRC_UNROLL_H
#define KOILA_SRC_UNROLL_H

#include "placement/place.h"

/* *out: the step of p, in n_slices slices of each axis of its graph, whose calls are nodes of
 * their own: everything is whole and in no loop. `recorded`: the step under the axes that *out
 * has. again[targets]: the targets `targets` of p, as values of *out. The caller owns *out:
 * koila__placed_free().
 * Expected: UNSUPPORTED for what cannot be told so; NO_MEMORY. */
koila_status koila__unroll_new(const koila_graph *recorded, const koila__placed *p,
                               const koila_value *targets, uint32_t n_targets, uint32_t n_slices,
                               const koila_allocator *mem, koila__placed **out, koila_value *again);

/* Does p, placed along an axis, take single entries along it, several, as a loop over time does? */
bool koila__unroll_helps(const koila__placed *p);

#endif
