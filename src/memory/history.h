/* history.h — every block handed out and taken back during a part of a program: memory over time,
 * and its owners at the peak.
 *
 * One event a change, in order; the blocks that were live at the beginning come first. Afterwards
 * each event knows its counterpart (the free of an allocation, the allocation of a free), so the
 * blocks live at event k are
 *   { allocations i <= k : other[i] > k }
 * The tag of an allocation says who asked (memlab: a source line); 0 is nobody known. Freed blocks
 * keep the tag of their allocation.
 */
#ifndef KOILA_SRC_HISTORY_H
#define KOILA_SRC_HISTORY_H

#include <stdatomic.h>

#include "base/text.h"

typedef struct koila__event {
    uint64_t ns;
    const void *p;
    int64_t n_bytes; /* > 0 handed out, < 0 taken back */
    uint32_t tag;
} koila__event;

typedef struct koila__history {
    koila_allocator mem;
    atomic_flag busy;
    koila__event *events;
    size_t n, capacity, limit; /* limit: events after the beginning */
    bool begun;
    size_t n_first; /* of these were live at the beginning */
    /* events not kept: beyond the limit, or no host memory; all later ones are lost too */
    uint64_t n_lost;
    /* set by koila__history_solve(): */
    size_t *other; /* SIZE_MAX: none */
    size_t n_other;
    /* event after which most bytes were live, the first such; SIZE_MAX: no event */
    size_t peak_at;
    uint64_t start, peak, end; /* bytes */
} koila__history;

void koila__history_init(koila__history *h, size_t limit, const koila_allocator *mem);
void koila__history_deinit(koila__history *h);
/* Any thread. Events keep the order of the calls; a time before the last one's is raised to it. */
void koila__history_add(koila__history *h, uint64_t ns, const void *p, int64_t n_bytes,
                        uint32_t tag);
/* All events so far are blocks of the beginning. */
void koila__history_begin(koila__history *h);
/* After the last event: finds the other event of each, and the peak. Frees of unknown blocks are
 * dropped. Expected: NO_MEMORY; nothing has changed then. */
koila_status koila__history_solve(koila__history *h);
/* Is allocation i live after event k? pre: solved */
static inline bool koila__history_is_live(const koila__history *h, size_t i, size_t k)
{
    return h->events[i].n_bytes > 0 && i <= k && h->other[i] > k;
}

/* The body of a page: the curve of memory over time, stacked by who asked, and the peak as a flame
 * graph by file and line. No script, nothing loaded; its size does not depend on the number of
 * events. The classes plot, y, x, curve, flames, box, l, wide are for a style sheet (koila._pages).
 * group_of[tag] < n_groups: tags that are shown as one; name(group) is "file:line" or "".
 * pre: solved. Expected: NO_MEMORY. */
koila_status koila__history_body(const koila__history *h, const uint32_t *group_of,
                                 uint32_t n_groups, const char *(*name)(void *user, uint32_t group),
                                 void *user, koila__text *out);

#endif
