/* vec.h — the one place where arrays grow: by two, from 16 elements.
 *
 *   VEC(T) v = { 0 };           a typed array of less than 2^31 elements
 *   koila__vec_push(&mem, &v, x)     false when the host is out of memory; v is then as before
 *   n <= cap, and `at` holds cap elements, not initialised beyond n
 *
 * Elements move when an array grows: take pointers afterwards. At debug_level 3 the first capacity
 * is 1, so that every growth happens in tests. */
#ifndef KOILA_SRC_VEC_H
#define KOILA_SRC_VEC_H

#include "base/alloc.h"

#define VEC(T)                                                                                     \
    struct {                                                                                       \
        T *at;                                                                                     \
        uint32_t n, cap;                                                                           \
    }

/* For arrays of which the owner keeps pointer and capacity itself: `array` is the address of the
 * pointer to the elements, each of `size` bytes. On success *cap >= need. False when the host is
 * out of memory: nothing has changed. The owner gives the array back with
 * koila__release(mem, elements, *cap * size). */
bool koila__grow(const koila_allocator *mem, void *array, size_t *cap, size_t need, size_t size);

bool koila__vec_grow(const koila_allocator *mem, void *array, uint32_t *cap, uint64_t need,
                     size_t size);

/* Room for `more` elements beyond n. */
#define koila__vec_reserve(mem, v, more)                                                           \
    ((v)->cap - (v)->n >= (uint32_t)(more) ||                                                      \
     koila__vec_grow((mem), &(v)->at, &(v)->cap, (uint64_t)(v)->n + (uint32_t)(more),              \
                     sizeof *(v)->at))
#define koila__vec_push(mem, v, x)                                                                 \
    (koila__vec_reserve((mem), (v), 1) && ((v)->at[(v)->n++] = (x), true))
#define koila__vec_free(mem, v)                                                                    \
    (koila__release((mem), (v)->at, (size_t)(v)->cap * sizeof *(v)->at), (v)->at = NULL,           \
     (v)->n = (v)->cap = 0)

#endif
