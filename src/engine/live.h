/* live.h — how many bytes a schedule holds, for a given number of rows in a slice. Internal to
 * src/. */
#ifndef KOILA_SRC_LIVE_H
#define KOILA_SRC_LIVE_H

#include "engine/schedule.h"

/* The largest storages at the moment when a walk first reaches `at_bytes`. */
typedef struct koila__live_top {
    uint64_t at_bytes;          /* in: pass the peak for the values alive at the peak */
    const koila_allocator *mem; /* in: for memory needed during the walk */
    /* in: room; out: how many, at most cap; 0 also when the host is out of memory */
    uint32_t cap, n;
    koila_value *value; /* [cap] the storages, largest first */
    uint64_t *bytes;    /* [cap] */
} koila__live_top;

typedef struct koila__live_options {
    const int64_t *rows; /* [axes] rows of a slice, 1 .. axis size */
    /* as koila_plan_options */
    uint64_t (*workspace)(void *user, koila_sig sig, int64_t rows, int64_t batch);
    uint64_t (*spared)(void *user, koila_sig sig, int64_t rows, int64_t batch);
    void *user;
    bool bytes_only;      /* only peak_bytes of the result is wanted, and no curve: faster */
    koila__live_top *top; /* filled too; NULL: not wanted. Not with bytes_only */
    /* the walk may end as soon as it exceeds this; peak_bytes is then some number above it. 0: no
     * limit */
    uint64_t limit;
} koila__live_options;

typedef struct koila__live {
    uint64_t peak_bytes;
    uint32_t peak_stage;
    koila_node peak_node; /* KOILA_NONE: nothing runs */
} koila__live;

typedef bool (*koila__live_curve_fn)(void *user, uint32_t stage, koila_node node, uint64_t bytes);

/* At most so many slices of a loop are walked; the others repeat one of them. */
enum { KOILA__LIVE_MAX_WALKED = 4 };
/* Replay the schedule's memory events: exact sum of live storages plus each running operator's
 * workspace. stage_peaks[n_stages] may be NULL; `curve` (may be NULL) sees every operator of the
 * slices that are really walked. Cannot fail. */
koila__live koila__live_simulate(const koila__placed *p, const koila__schedule *s,
                                 const koila__live_options *o, uint64_t *stage_peaks,
                                 koila__live_curve_fn curve, void *curve_user);
/* Bytes of value v: of one slice of `rows` rows when sharded, else whole. */
static inline uint64_t koila__live_bytes(const koila__placed *p, koila_value v, int64_t rows)
{
    return p->size[v].fixed + p->size[v].per_row * (uint64_t)rows;
}
/* The number of slices of an axis, if they shall have `rows` rows; *largest: rows of the largest
 * (NULL: not wanted). */
static inline uint32_t koila__count_slices(const koila__placed *p, uint16_t axis, int64_t rows,
                                           int64_t *largest)
{
    const int64_t batch = koila_graph_axis_size(p->graph, axis);
    uint32_t n = 0;
    int64_t most = rows;
    if (!p->cut || !p->cut[axis] || rows <= 0) {
        n = rows > 0 ? (uint32_t)((batch + rows - 1) / rows) : 1;
    } else {
        most = 0;
        for (int64_t at = 0, end; at < batch; at = end, n++) {
            end = koila__slice_end(p, axis, at, rows);
            most = end - at > most ? end - at : most;
        }
    }
    if (largest)
        *largest = most;
    return n;
}
static inline uint32_t koila__n_slices(int64_t batch, int64_t rows)
{
    return rows > 0 ? (uint32_t)((batch + rows - 1) / rows) : 1;
}

#endif
