/* spare.h — choices of what is dropped, one call after another: from those of an outline to one in
 * which all stays, or back. Internal to src/engine. */
#ifndef KOILA_SRC_SPARE_H
#define KOILA_SRC_SPARE_H

#include "engine/outline.h"

/* A path goes through choices. Each differs from the one before it in one group of makers. */
typedef enum koila__direction {
    KOILA__SPARES_DEAR, /* what runs again stays: of what costs no bytes, the most work first */
    KOILA__SPARES_HIGH, /* the same, but what leaves the fewest bytes first */
    KOILA__DROPS,       /* all stays at first, then more and more is dropped */
    KOILA__FILLS,       /* what fits stays, the most work first: one choice, for a budget */
} koila__direction;

/* One choice of a path. */
typedef struct koila__choice {
    koila__gauge gauge;
    double work;
} koila__choice;

typedef struct koila__path {
    uint32_t *turn; /* [makers] the first choice in which it is spared, or dropped */
    koila__choice *at;
    uint32_t n;
    uint32_t n_looks; /* choices that were looked at */
    bool drops;
} koila__path;

/* Groups of makers move, at most so many: fewer of a large step. */
enum { KOILA__PATH_GROUPS = 64 };
/* What a path is made for. Choices above `bound` or `waiting` are of no use: a path that surely has
 * no other ones has none. UINT64_MAX: all are. */
typedef struct koila__path_limits {
    uint64_t fills;   /* bytes, of KOILA__FILLS */
    uint64_t bound;   /* as koila__outline_bound() */
    uint64_t waiting; /* as koila__outline_waiting() */
} koila__path_limits;
/* From what was chosen last for `o` in the direction. *path lies in the arena. Expected: NO_MEMORY.
 */
koila_status koila__path_make(koila__outline *o, koila__direction direction,
                              koila__path_limits limits, koila__arena *arena, koila__path *path);
/* Chooses the path's choice i for `o`. False: nothing is dropped. */
bool koila__path_choose(koila__outline *o, const koila__path *path, uint32_t i);

#endif
