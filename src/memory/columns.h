/* columns.h — the columns of a line table: their names, what they read from a row, and how they are
 * written.
 *
 * A column is one of the words (hits, time, rise, delta, alloc, freed, rss, backward) or
 * metric.pool.stat, as the CUDA allocator's statistics are called. Where the numbers come from:
 *   allocated_bytes, allocation   = the device's bytes, its number of blocks; from events, any pool
 *   active_bytes, active          = the same and what waits for another stream (peak, current)
 *   reserved_bytes.all            = from events (peak, current)
 *   requested_bytes, inactive_split(_bytes), segment, other reserved_bytes = read from the
 *       allocator, where there is one that keeps them
 * On the CPU there is no cache: requested = reserved = active, segment = allocation, inactive = 0.
 */
#ifndef KOILA_SRC_COLUMNS_H
#define KOILA_SRC_COLUMNS_H

#include "memory/linetab.h"
#include "base/text.h"

/* clang-format off: one entry a line */
#define KOILA__WORD_MAP(X)                                                                         \
    X(HITS, "hits")                                                                                \
    X(TIME, "time")                                                                                \
    X(RISE, "rise")                                                                                \
    X(DELTA, "delta")                                                                              \
    X(ALLOC, "alloc")                                                                              \
    X(FREED, "freed")                                                                              \
    X(RSS, "rss")                                                                                  \
    X(BACKWARD, "backward")
/* clang-format on */
/* clang-format off: one entry a line */
#define KOILA__METRIC_MAP(X)                                                                       \
    X(ACTIVE, "active")                                                                            \
    X(ACTIVE_BYTES, "active_bytes")                                                                \
    X(ALLOCATION, "allocation")                                                                    \
    X(ALLOCATED_BYTES, "allocated_bytes")                                                          \
    X(REQUESTED_BYTES, "requested_bytes")                                                          \
    X(RESERVED_BYTES, "reserved_bytes")                                                            \
    X(INACTIVE_SPLIT, "inactive_split")                                                            \
    X(INACTIVE_SPLIT_BYTES, "inactive_split_bytes")                                                \
    X(SEGMENT, "segment")
/* clang-format on */
#define KOILA__POOL_MAP(X) X(ALL, "all") X(LARGE, "large_pool") X(SMALL, "small_pool")
/* clang-format off: one entry a line */
#define KOILA__STAT_MAP(X)                                                                         \
    X(CURRENT, "current")                                                                          \
    X(PEAK, "peak")                                                                                \
    X(ALLOCATED, "allocated")                                                                      \
    X(FREED, "freed")
/* clang-format on */

enum koila__word {
#define X(id, name) KOILA__WORD_##id,
    KOILA__WORD_MAP(X) KOILA__WORD_METRIC /* not a word: metric.pool.stat */
#undef X
};
enum koila__metric {
#define X(id, name) KOILA__METRIC_##id,
    KOILA__METRIC_MAP(X) KOILA__METRIC_N
#undef X
};
enum koila__pool {
#define X(id, name) KOILA__POOL_##id,
    KOILA__POOL_MAP(X) KOILA__POOL_N
#undef X
};
enum koila__stat {
#define X(id, name) KOILA__STAT_##id,
    KOILA__STAT_MAP(X) KOILA__STAT_N
#undef X
};
typedef struct koila__column {
    enum koila__word word;
    enum koila__metric metric;
    enum koila__pool pool;
    enum koila__stat stat;
} koila__column;

/* Expected: BAD_INPUT, with a text that lists what exists. */
koila_status koila__column_parse(const char *name, koila__column *out, koila_error *err);
/* Its three header cells; words stand in the first. Static storage. */
const char *koila__column_head(const koila__column *c, int i);
/* "active_bytes.all.peak", into a buffer of 64 bytes. */
const char *koila__column_name(const koila__column *c, char *buffer);
/* Must this column be read from the allocator of an accelerator? */
bool koila__column_needs_stats(const koila__column *c);

/* The number in a row, for device `device` (< 0: the target). false: the row has none (no hit, or
 * never read). */
bool koila__column_value(koila__lines *l, const koila__column *c, const koila__row *row, int device,
                         double *out);
/* As the table shows it: sizes, whole numbers, times. 32 bytes of buffer. */
const char *koila__column_text(const koila__column *c, double value, char *buffer);

#endif
