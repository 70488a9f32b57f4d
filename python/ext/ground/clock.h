/* clock.h — the time since some past moment, which no setting of the system's clock moves. */
#ifndef KOILA_EXT_CLOCK_H
#define KOILA_EXT_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline double koila__seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int64_t koila__milliseconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

#endif
