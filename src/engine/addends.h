/* addends.h — which partial sums are added to the accumulator of a result as they are made.
 * Internal to src/engine. */
#ifndef KOILA_SRC_ADDENDS_H
#define KOILA_SRC_ADDENDS_H

#include "placement/place.h"

/* Fills p->addends. targets[n_targets]: values of p->graph. Expected: NO_MEMORY. */
koila_status koila__addends_find(koila__placed *p, const koila_value *targets, uint32_t n_targets,
                                 const koila_allocator *mem);

/* Can the call add its only result to a tensor while it computes? */
bool koila__adds_onto(const koila_table *t, const koila_sig_info *s);
/* Is the value made as an addend, or from addends, in a loop that adds up its result at once? */
static inline bool koila__is_addend(const koila__placed *p, koila_value v)
{
    return p->addends && p->addends[v].kind && p->addends[v].kind != KOILA__ADDEND_SECOND;
}
/* Is it a second term outside loops that need not be made? */
static inline bool koila__is_second_addend(const koila__placed *p, koila_value v)
{
    return p->addends && p->addends[v].kind == KOILA__ADDEND_SECOND;
}

#endif
