/* recompute.h — a placed step in which some results of the forward pass are dropped after their
 * last use there, and computed once more before the backward pass needs them; or wait for it in
 * host memory. Internal to src/engine. */
#ifndef KOILA_SRC_RECOMPUTE_H
#define KOILA_SRC_RECOMPUTE_H

#include "engine/outline.h"

/* *out: the step of p, of which o is the outline, with calls that run again as `how` says, which
 * was chosen last of o. They are nodes of their own, placed as the first ones, directly before the
 * first node after `at` that needs them. again[targets]: the targets, as values of *out. NULL when
 * nothing can be dropped. On KOILA_OK *out is yours: koila__placed_free(). `p` has no pieces (Note
 * [Pieces] in place.h). Expected: NO_MEMORY. */
koila_status koila__recompute_new(const koila__outline *o, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets,
                                  koila__recompute how, const koila_allocator *mem,
                                  koila__placed **out, koila_value *again);

#endif
