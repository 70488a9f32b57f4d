/* stacked.h — the gradient of x[:, t] for many t as one stack. Internal to src/engine. */
#ifndef KOILA_SRC_STACKED_H
#define KOILA_SRC_STACKED_H

#include "engine/retold.h"

/* *out: the step of g in which sums of the gradients of single entries are stacks: see stacked.c.
 * The caller ends it with koila__retold_deinit(), also where there are none. Expected: NO_MEMORY.
 */
koila_status koila__stack_entries(const koila_graph *g, const koila_value *targets,
                                  uint32_t n_targets, const koila_allocator *mem,
                                  koila__retold *out);

#endif
