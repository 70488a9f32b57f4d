/* resident.h — keeps the resident memory of a process below a limit while an allocator hands out
 * blocks.
 *
 * Where a container or a scheduler limits memory, nobody raises: the process is killed when its
 * resident memory passes the limit. That memory is
 *     resident = handed out          the allocator's blocks, once they were touched
 *              + base                the program itself: Python, libraries and their buffers
 *              + retained            pages of freed blocks that the C library keeps for later
 * The last can be as much as the blocks, and malloc_trim() gives it back. So before a block is
 * handed out that could bring the process beyond the limit, the system is asked; if there is too
 * little room the C library gives back what it retains, and if that is not enough the block is
 * refused, which torch raises as out of memory.
 *
 * The system is not asked for each block but when so many bytes were handed out since that the
 * limit could be near: half the room that was left, `left` below.
 *
 * One thread at a time asks. All others may allocate meanwhile.
 */
#ifndef KOILA_SRC_RESIDENT_H
#define KOILA_SRC_RESIDENT_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"

typedef struct koila__resident {
    /* bytes that may be handed out before the next look; read and written by all threads */
    _Alignas(64) _Atomic int64_t left;
    _Atomic uint32_t n_on; /* those who want the limit kept; 0: nothing is done */
    /* refuse on every thread; else on those in koila__resident_refuse_here() */
    _Atomic bool for_all;
    pthread_mutex_t lock; /* of all below */
    uint64_t limit;       /* on resident(); UINT64_MAX: none */
    bool with_files;      /* mapped files count as resident: they do not in a control group */
    uint64_t base;        /* resident - handed out, without what is retained; 0: not known yet */
    int64_t given;        /* what `left` was set to */
    uint64_t granted;     /* bytes handed out in all, since somebody wants the limit kept */
    int64_t kept_at_trim; /* granted - handed out after the last malloc_trim() */
    uint64_t least_freed; /* bytes to be freed before the next malloc_trim() */
    uint64_t refused_at;  /* most handed out at a refusal in this step; 0: none */
    uint64_t beyond;      /* most that a trimmed process held beyond base + handed out */
    bool was_near;        /* a look found less than a quarter of the limit free, or trimmed */
    uint64_t n_looks, n_trims, n_refused;
    int statm, pid; /* its descriptor and whose it is; pid 0: not open */
} koila__resident;

/* What a guard has seen, at one moment. */
typedef struct koila__resident_news {
    uint64_t refused_at, n_looks, n_trims, n_refused;
    bool was_near;
} koila__resident_news;

void koila__resident_init(koila__resident *r);
koila__resident_news koila__resident_news_of(koila__resident *r);
/* Resident bytes of this process now; 0: not known. */
uint64_t koila__resident_now(koila__resident *r, bool with_files);
/* What the C library retains goes back to the system. Takes milliseconds for each 100 MB. */
void koila__resident_trim(void);
/* From now on the C library retains up to 64 MiB at the end of its heap, and blocks of up to 32 MiB
 * lie there. Each step asks for the blocks of the one before, and what went back to the system in
 * between comes again page by page. glibc does so by itself once a program has freed one block of
 * 32 MiB (M_MMAP_THRESHOLD in mallopt(3)), and that is how it is asked: of the block no page is
 * touched. Where the user has set a threshold, that counts. */
void koila__resident_retain(void);

/* `limit` on resident bytes is kept from now on, until as many calls of koila__resident_off(). */
void koila__resident_on(koila__resident *r, uint64_t limit, bool with_files, uint64_t base,
                        uint64_t handed_out);
void koila__resident_off(koila__resident *r);
/* Blocks of this thread may be refused from now on; false: no longer. */
void koila__resident_refuse_here(bool yes);
bool koila__resident_refuses_here(void);

/* The slow half of koila__resident_allows(). */
bool koila__resident_look(koila__resident *r, uint64_t n, uint64_t handed_out);

/* May a block of n bytes be handed out? `handed_out`: all bytes, these included. */
static inline bool koila__resident_allows(koila__resident *r, uint64_t n, uint64_t handed_out)
{
    if (!atomic_load_explicit(&r->n_on, memory_order_relaxed))
        return true;
    const int64_t left =
        atomic_fetch_sub_explicit(&r->left, (int64_t)n, memory_order_relaxed) - (int64_t)n;
    return left >= 0 || koila__resident_look(r, n, handed_out);
}

#endif
