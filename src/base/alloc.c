/* alloc.c — the default allocator and the arena (see alloc.h). Chunks double from 4 KiB to 1 MiB; a
 * large request gets its own. */
#include "base/alloc.h"

#include <stdlib.h>

static void *libc_realloc(void *user, void *p, size_t old_n, size_t n)
{
    (void)user;
    (void)old_n;
    if (n == 0) {
        free(p);
        return NULL;
    }
    return realloc(p, n);
}

const koila_allocator koila__libc = { libc_realloc, NULL };

koila_allocator koila__allocator(const koila_allocator *mem)
{
    return mem && mem->fn ? *mem : koila__libc;
}

#define CHUNK_FIRST ((size_t)4096)
#define CHUNK_MAX ((size_t)1 << 20)

void koila__arena_init(koila__arena *a, const koila_allocator *mem)
{
    a->mem = koila__allocator(mem);
    a->last = a->free = NULL;
}

void *koila__arena_more(koila__arena *a, size_t n)
{
    koila__chunk *c = a->last;
    if (n > SIZE_MAX / 2)
        return NULL;
    n = (n + 15) & ~(size_t)15;
    size_t grown = c ? c->n_bytes * 2 : CHUNK_FIRST;
    if (grown > CHUNK_MAX)
        grown = CHUNK_MAX;
    if (grown < n)
        grown = n;
    koila__chunk *fresh = a->free;
    if (fresh && fresh->n_bytes >= n)
        a->free = fresh->older;
    else {
        fresh = koila__realloc(&a->mem, NULL, 0, KOILA__CHUNK_HEADER + grown);
        if (!fresh)
            return NULL;
        fresh->n_bytes = grown;
    }
    fresh->n_used = n;
    fresh->older = c;
    a->last = fresh;
    return (char *)fresh + KOILA__CHUNK_HEADER;
}

void *koila__arena_alloc(koila__arena *a, size_t n)
{
    void *p = koila__arena_room(a, n);
    return p ? memset(p, 0, n) : NULL;
}

void *koila__arena_copy(koila__arena *a, const void *from, size_t n)
{
    void *p = koila__arena_room(a, n);
    return p && n ? memcpy(p, from, n) : p;
}

void *koila__arena_array(koila__arena *a, size_t count, size_t size)
{
    uint64_t n;
    if (!koila__mul(count, size, &n) || n > SIZE_MAX / 2)
        return NULL;
    return koila__arena_alloc(a, (size_t)n);
}

char *koila__arena_str(koila__arena *a, const char *s, size_t n)
{
    char *p = koila__arena_room(a, n + 1);
    if (!p)
        return NULL;
    if (n)
        memcpy(p, s, n);
    p[n] = '\0';
    return p;
}

void koila__arena_rewind_far(koila__arena *a, koila__mark m)
{
    while (a->last != m.chunk && a->last->older) {
        koila__chunk *older = a->last->older;
        a->last->older = a->free;
        a->free = a->last;
        a->last = older;
    }
    if (a->last)
        a->last->n_used = m.n_used;
}

void koila__arena_empty(koila__arena *a)
{
    /* newest last: the smallest is taken first */
    for (koila__chunk *c = a->last, *older; c; c = older) {
        older = c->older;
        c->older = a->free;
        a->free = c;
    }
    a->last = NULL;
}

void koila__arena_pass_on(koila__arena *from, koila__arena *to)
{
    koila_assert(!to->free);
    to->free = from->free;
    from->free = NULL;
}

void koila__arena_deinit(koila__arena *a)
{
    koila__arena_empty(a);
    for (koila__chunk *c = a->free, *next; c; c = next) {
        next = c->older;
        koila__release(&a->mem, c, KOILA__CHUNK_HEADER + c->n_bytes);
    }
    a->free = NULL;
}
