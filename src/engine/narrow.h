/* narrow.h — x[:, a:b] taken before the layers that are thrown away by it, not behind them.
 * Internal to src/engine. */
#ifndef KOILA_SRC_NARROW_H
#define KOILA_SRC_NARROW_H

#include "engine/axes.h"
#include "engine/retold.h"

/* Adds lengths of what is taken of a dimension of the axis' size, and of that again, to
 * axis->others, as far as there is room. */
void koila__narrow_lengths(const koila_graph *g, koila__axis *axis);
/* *out: the step of g in which rows of an axis are taken before what is computed of them: narrow.c.
 * `along`: g cut along its axes, whose rows are single entries; `axis`: one of them. *takes_rows:
 * of a value that is cut along it. The caller ends *out with koila__retold_deinit(), also where it
 * has no graph. Expected: NO_MEMORY. */
koila_status koila__narrow(const koila_graph *g, const koila__along *along, uint16_t axis,
                           const koila_value *targets, uint32_t n_targets,
                           const koila_allocator *mem, koila__retold *out, bool *takes_rows);

#endif
