/* share.h — a placement in the terms of koila/plan.h. Internal to src/. */
#ifndef KOILA_SRC_SHARE_H
#define KOILA_SRC_SHARE_H

#include "koila/plan.h"
#include "placement/place.h"

koila_share koila__share_of(koila_placement x);
/* Is v of p->graph accumulated in a wider dtype, in slices that are not all rows? */
bool koila__accumulates_wider(const koila__placed *p, koila_value v);

#endif
