/* tuning.c — micro_batch("fastest"): times a few of the slice sizes that fit in the first runs of a
 * step, and keeps the fastest. */
#include "run/run.h"

#include <math.h>

enum {
    N_TUNED = 16,  /* steps remembered */
    N_SIZES = 4,   /* the automatic size, 1/2, 1/4 and 1/8 of it */
    N_TIMINGS = 2, /* per size; the smaller counts, to exclude the start-up cost of the first run */
};
typedef struct tuning {
    uint64_t key;
    uint64_t used; /* time on `clock`; the oldest is replaced */
    int64_t rows[N_SIZES];
    double seconds[N_SIZES];
    uint32_t n_sizes; /* 0: an empty slot */
    uint32_t n_runs;
} tuning;
static tuning tunings[N_TUNED];
static uint64_t clock_of_uses;

static tuning *tuning_of(uint64_t key)
{
    for (uint32_t i = 0; i < N_TUNED; i++)
        if (tunings[i].n_sizes && tunings[i].key == key)
            return &tunings[i];
    return NULL;
}

int64_t koila__tuned_rows(uint64_t key)
{
    tuning *t = tuning_of(key);
    if (!t)
        return 0;
    t->used = ++clock_of_uses;
    if (t->n_runs < N_TIMINGS * t->n_sizes)
        return t->rows[t->n_runs % t->n_sizes];
    uint32_t best = 0;
    for (uint32_t i = 1; i < t->n_sizes; i++)
        if (t->seconds[i] < t->seconds[best])
            best = i;
    return t->rows[best];
}

/* Sizes to time, from the automatic one downwards. */
static tuning *new_tuning(uint64_t key, int64_t rows)
{
    tuning *t = &tunings[0];
    for (uint32_t i = 1; i < N_TUNED; i++)
        if (tunings[i].used < t->used)
            t = &tunings[i];
    *t = (tuning){ .key = key, .used = ++clock_of_uses };
    do {
        t->rows[t->n_sizes] = rows;
        t->seconds[t->n_sizes] = HUGE_VAL;
        t->n_sizes++;
        rows = (rows + 1) / 2;
    } while (t->n_sizes < N_SIZES && rows < t->rows[t->n_sizes - 1]);
    return t;
}

void koila__tuned_record(uint64_t key, int64_t rows, double seconds)
{
    tuning *t = tuning_of(key);
    if (!t) /* the first run, with the automatic size */
        t = new_tuning(key, rows);
    for (uint32_t i = 0; i < t->n_sizes; i++)
        if (t->rows[i] == rows && seconds < t->seconds[i])
            t->seconds[i] = seconds;
    t->n_runs++;
}
