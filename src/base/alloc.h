/* alloc.h — host memory through the caller's koila_allocator; and an arena for what dies together.
 *
 * Nobody else in src/ calls malloc. An arena hands out zeroed, 16-byte aligned memory and frees it
 * all at once:
 *   sum of chunk.n_used <= sum of chunk.n_bytes
 */
#ifndef KOILA_SRC_ALLOC_H
#define KOILA_SRC_ALLOC_H

#include "base/base.h"

/* The C library's. */
extern const koila_allocator koila__libc;
/* The caller's allocator, or the C library's when `mem` is NULL or empty. */
koila_allocator koila__allocator(const koila_allocator *mem);

static inline void *koila__realloc(const koila_allocator *mem, void *p, size_t old_n, size_t n)
{
    return mem->fn(mem->user, p, old_n, n);
}
static inline void koila__release(const koila_allocator *mem, void *p, size_t n)
{
    if (p)
        mem->fn(mem->user, p, n, 0);
}

typedef struct koila__chunk {
    struct koila__chunk *older;
    size_t n_bytes, n_used; /* both without this header */
} koila__chunk;
#define KOILA__CHUNK_HEADER ((sizeof(koila__chunk) + 15) & ~(size_t)15)
typedef struct koila__arena {
    koila_allocator mem;
    koila__chunk *last; /* newest chunk, linked to older ones */
    koila__chunk *free; /* empty ones: koila__arena_empty() */
} koila__arena;

void koila__arena_init(koila__arena *a, const koila_allocator *mem);
/* Zeroed bytes that live until koila__arena_deinit; NULL when the host is out of memory. n == 0
 * gives a unique pointer too. */
void *koila__arena_alloc(koila__arena *a, size_t n);
/* Like koila__arena_alloc(count * size), NULL also on overflow. */
void *koila__arena_array(koila__arena *a, size_t count, size_t size);
/* Like koila__arena_alloc, not zeroed: for large arrays of which little may be used. */
void *koila__arena_more(koila__arena *a, size_t n); /* in a chunk that has so much */
static inline void *koila__arena_room(koila__arena *a, size_t n)
{
    koila__chunk *c = a->last;
    const size_t rounded = (n + 15) & ~(size_t)15; /* 0 of the last few numbers */
    if (!c || rounded < n || c->n_bytes - c->n_used < rounded)
        return koila__arena_more(a, n);
    c->n_used += rounded;
    return (char *)c + KOILA__CHUNK_HEADER + c->n_used - rounded;
}
/* A copy of n bytes. */
void *koila__arena_copy(koila__arena *a, const void *from, size_t n);
/* A NUL-terminated copy of n bytes. */
char *koila__arena_str(koila__arena *a, const char *s, size_t n);
/* Gives back all that was handed out since the mark. Marks nest. The oldest chunk stays. */
typedef struct koila__mark {
    koila__chunk *chunk;
    size_t n_used;
} koila__mark;
static inline koila__mark koila__arena_mark(const koila__arena *a)
{
    return (koila__mark){ a->last, a->last ? a->last->n_used : 0 };
}
void koila__arena_rewind_far(koila__arena *a, koila__mark m); /* over chunks */
static inline void koila__arena_rewind(koila__arena *a, koila__mark m)
{
    if (a->last && a->last == m.chunk)
        a->last->n_used = m.n_used;
    else
        koila__arena_rewind_far(a, m);
}
/* Gives everything back at once and keeps the chunks, so that the next user finds memory that is
 * paged in already. */
void koila__arena_empty(koila__arena *a);
/* Moves the unused chunks of `from` to `to`, which must have none. */
void koila__arena_pass_on(koila__arena *from, koila__arena *to);
void koila__arena_deinit(koila__arena *a);

#endif
