/* drops.h — ways to run the step with results dropped and computed again. Internal to src/engine.
 */
#ifndef KOILA_SRC_DROPS_H
#define KOILA_SRC_DROPS_H

#include "engine/ways.h"

/* Finds the recorded node at which the step as it was recorded holds the most; KOILA_NONE: nothing
 * runs. */
koila_status koila__drop_turn(koila__planning *q, koila_node *turn);
/* `way`, along another axis, needs too much, or much time. With results dropped it becomes the one
 * of the least time that fits, else that of the least peak; turn: koila__drop_turn(). */
koila_status koila__drop_along(koila__planning *q, koila_node turn, koila__way *way);
/* The step whole, with results dropped: *best becomes that way where it is better. */
koila_status koila__drop_whole(koila__planning *q, koila__way *best);
/* The same in the most slices of rows, of few loops. */
koila_status koila__drop_in_slices(const koila__planning *q, koila__way *best);
/* The same in the slices of rows that the plan is, if it needs more loops: each computes again what
 * it needs, or keeps it for those after it. */
koila_status koila__drop_in_loops(koila__planning *q, koila__way *best);
/* The same of the step placed along another axis, whose slices are calls of their own. *bound: the
 * least that a choice of what is dropped is bound to need; 0: not known. */
koila_status koila__drop_unrolled(const koila__planning *q, const koila__placed *along,
                                  const koila_value *targets, uint32_t n_slices, koila__way *best,
                                  uint64_t *bound);

#endif
