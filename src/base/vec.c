/* vec.c — see vec.h. */
#include "base/vec.h"

#define FIRST_CAPACITY (KOILA_DEBUG_LEVEL >= 3 ? 1 : 16)

bool koila__grow(const koila_allocator *mem, void *array, size_t *cap, size_t need, size_t size)
{
    if (need <= *cap)
        return true;
    size_t grown = *cap ? *cap * 2 : FIRST_CAPACITY;
    if (grown < need)
        grown = need;
    if (grown > SIZE_MAX / size)
        return false;
    void *at;
    memcpy(&at, array, sizeof at);
    at = koila__realloc(mem, at, *cap * size, grown * size);
    if (!at)
        return false;
    memcpy(array, &at, sizeof at);
    *cap = grown;
    return true;
}

bool koila__vec_grow(const koila_allocator *mem, void *array, uint32_t *cap, uint64_t need,
                     size_t size)
{
    size_t grown = *cap;
    if (need > UINT32_MAX / 2 || !koila__grow(mem, array, &grown, (size_t)need, size))
        return false;
    *cap = (uint32_t)grown;
    return true;
}
