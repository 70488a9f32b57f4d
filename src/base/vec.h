/* vec.h — a typed growable array: VEC(T) v = { 0 }; koila__vec_push(&mem, &v, x) is false when the
 * host is out of memory.
 *   n <= cap, and `at` holds cap elements. First capacity is 1 at debug_level 3, so that every
 *       growth happens in tests. */
#ifndef KOILA_SRC_VEC_H
#define KOILA_SRC_VEC_H

#include "base/alloc.h"

#define VEC(T)                                                                                     \
    struct {                                                                                       \
        T *at;                                                                                     \
        uint32_t n, cap;                                                                           \
    }

bool koila__vec_grow(const koila_allocator *mem, void **at, uint32_t *cap, uint32_t need,
                     size_t size);

#define koila__vec_reserve(mem, v, more)                                                           \
    ((v)->cap - (v)->n >= (uint32_t)(more) ||                                                      \
     koila__vec_grow((mem), (void **)&(v)->at, &(v)->cap, (v)->n + (uint32_t)(more),               \
                     sizeof *(v)->at))
#define koila__vec_push(mem, v, x)                                                                 \
    (koila__vec_reserve((mem), (v), 1) && ((v)->at[(v)->n++] = (x), true))
#define koila__vec_free(mem, v)                                                                    \
    (koila__release((mem), (v)->at, (size_t)(v)->cap * sizeof *(v)->at), (v)->at = NULL,           \
     (v)->n = (v)->cap = 0)

#endif
