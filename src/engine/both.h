/* both.h — rows and another axis cut together: a loop whose rows are steps of their own. Internal
 * to src/engine. */
#ifndef KOILA_SRC_BOTH_H
#define KOILA_SRC_BOTH_H

#include "engine/effort.h"
#include "engine/plan_inside.h"

/* Loops of `p`, in slices of one row, become loops over inner steps: those that exceed the budget
 * of `o`, or all of them (axes == KOILA_AXES_BOTH; o->rows counts the entries of a slice of a row).
 * *least: the least that was found where a row fits in no way; effort: what planning has taken. The
 * plan is not described again.
 * Expected: OOM, UNSUPPORTED (p is unchanged, err is not set), NO_MEMORY. */
koila_status koila__both_cut(koila_plan *p, const koila_plan_options *o, koila__effort *effort,
                             const koila__rival *rival, koila__least *least);
/* Frees the inner plans of a schedule. */
void koila__both_free(koila__schedule *s);
/* The gathers of the inner plans, told of the nodes and values of `p`: at most `cap`, NULL: none is
 * written; returns how many there are. */
uint32_t koila__both_gathers(const koila_plan *p, koila_gather *out, uint32_t cap);
/* placed->adds_on: those of the targets that are marked and are sums which nothing within the step
 * needs as they are. Expected: NO_MEMORY. */
koila_status koila__both_mark(koila__placed *placed, const uint8_t *marked,
                              const koila_value *targets, uint32_t n_targets);

#endif
