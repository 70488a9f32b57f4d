/* base.h — what every file of the core may use: the assert tiers, checked size arithmetic,
 * KOILA_TRY.
 *
 * debug_level (meson option): 0 nothing; 1 arguments of public functions; 2 cheap internal
 * invariants; 3 whole-structure _check(). A broken invariant is an assert, bad input is a status,
 * never one for the other.
 */
#ifndef KOILA_SRC_BASE_H
#define KOILA_SRC_BASE_H

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "koila/base.h"

#ifndef KOILA_DEBUG_LEVEL
#define KOILA_DEBUG_LEVEL 0
#endif

void koila__assert_failed(const char *expr, const char *file, int line);
#define KOILA__ASSERT(e) ((e) ? (void)0 : koila__assert_failed(#e, __FILE__, __LINE__))
#if KOILA_DEBUG_LEVEL >= 1
#define koila_assert_arg(e) KOILA__ASSERT(e)
#else
#define koila_assert_arg(e) ((void)sizeof(e))
#endif
#if KOILA_DEBUG_LEVEL >= 2
#define koila_assert(e) KOILA__ASSERT(e)
#else
#define koila_assert(e) ((void)sizeof(e))
#endif
#if KOILA_DEBUG_LEVEL >= 3
#define koila_check(call) KOILA__ASSERT(call)
#else
#define koila_check(call) ((void)sizeof(call))
#endif

/* For functions on the path of every allocation: the compiler puts them side by side, so that they
 * take few lines of the instruction cache beside a program that fills it. */
#if defined(__GNUC__)
#define KOILA__HOT __attribute__((hot))
#else
#define KOILA__HOT
#endif

#define KOILA_TRY(expr)                                                                            \
    do {                                                                                           \
        koila_status try_status_ = (expr);                                                         \
        if (try_status_ != KOILA_OK)                                                               \
            return try_status_;                                                                    \
    } while (0)

/* Fill `err` (if not NULL) and return `code`. The text is printf-like and cut to the buffer;
 * missing_bytes becomes 0. */
koila_status koila__fail(koila_error *err, koila_status code, uint64_t offset, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 4, 5)))
#endif
    ;

/* In a check that returns bool: e holds, or *err tells what is the matter. */
#define KOILA__HOLDS(err, e, ...)                                                                  \
    do {                                                                                           \
        if (!(e)) {                                                                                \
            koila__fail(err, KOILA_BAD_INPUT, 0, __VA_ARGS__);                                     \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

/* The same for KOILA_OOM; the text ends in, or holds, "<missing_bytes> bytes short". */
koila_status koila__fail_short(koila_error *err, uint64_t missing_bytes, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

/* "2,097,152": digits in groups of three. */
enum { KOILA_GROUPED = 32 };
const char *koila__grouped(uint64_t n, char buffer[KOILA_GROUPED]);

/* false on overflow, and *out is then untouched */
static inline bool koila__mul(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool koila__add(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

#define KOILA_COUNT(a) (sizeof(a) / sizeof((a)[0]))

#endif
