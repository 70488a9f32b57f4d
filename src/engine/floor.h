/* floor.h — bytes that no plan of a family goes below, found without making one. Internal to
 * src/engine. */
#ifndef KOILA_SRC_FLOOR_H
#define KOILA_SRC_FLOOR_H

#include "engine/plan_inside.h"

/* The step whole, in the recorded order, whatever is dropped and computed again: *n_bytes. The
 * caller has checked that all bytes add up without overflow. Expected: NO_MEMORY. */
koila_status koila__floor_whole(const koila_graph *g, const koila_value *targets,
                                uint32_t n_targets, const koila_allocator *mem, uint64_t *n_bytes);
/* `p`, in slices of one row of several, however each row is cut: *n_bytes; 0: not known, as with
 * more than one loop. Expected: NO_MEMORY. */
koila_status koila__floor_both(const koila_plan *p, uint64_t *n_bytes);

#endif
