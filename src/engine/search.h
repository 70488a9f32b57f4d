/* search.h — the fewest slices of a placed step, and the keep policy for them. Internal to
 * src/engine. */
#ifndef KOILA_SRC_SEARCH_H
#define KOILA_SRC_SEARCH_H

#include "engine/ways.h"

/* Places with `how`, then finds the fewest slices that fit, and the policy with the least work for
 * them; where nothing fits, those of the smallest peak. On KOILA_OK *out is yours:
 * koila__way_free(). Expected: NO_MEMORY; UNSUPPORTED: no policy can be scheduled. */
koila_status koila__search(koila__planning *q, koila__place_fn how, koila__way *out);
/* The same for w->placed, which stays the caller's, under keeps[n], least work first; n == 0: the
 * usual ones. w has room (koila__way_room()); on KOILA_OK w->schedule is yours. */
koila_status koila__search_placed(koila__planning *q, const koila__keep *keeps, uint32_t n,
                                  koila__way *w);

#endif
