/* account.h — what the work of one thread has allocated, beside all others, and a limit for it.
 *
 * A ledger counts a process. Here the same events are counted once more for the thread that works:
 *
 *   account   of one thread: bytes handed out to its work less bytes that its work gave back, and
 *             the peak of that. It may fall below zero, when a thread frees what another made.
 *   work      a stretch in which a thread runs a plan. Threads that help it (OpenMP's, a kernel's
 *             own pool) have no account: what they allocate is the work's, if one thread works.
 *             If several do, nobody can tell whose it is, and it counts for none: a measurement in
 *             which that happened says so.
 *   others    threads that work for themselves (in Python: every thread that runs Python), as the
 *             function given to koila__accounts_init() tells. What they allocate is nobody's.
 *   use       what one operator takes beyond what was there before it.
 *
 * Events come on any thread, inside the allocator: they touch atomics only. An account is never
 * freed; a thread that ends gives it back for the next one.
 */
#ifndef KOILA_SRC_ACCOUNT_H
#define KOILA_SRC_ACCOUNT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define KOILA__ACCOUNTS_MAX 256

typedef struct koila__account {
    _Alignas(64) _Atomic int64_t now, peak; /* bytes */
    _Atomic uint64_t limit;                 /* of koila__account_set_limit() */
    _Atomic bool is_used;
    uint32_t depth; /* works that are open, one inside another; its thread's own */
} koila__account;

/* is_other: does the calling thread, which has no account, work for itself? Called inside the
 * allocator while somebody works. NULL: no thread does. */
void koila__accounts_init(bool (*is_other)(void));
/* In the child of a fork, where one thread is left. */
void koila__accounts_fork_child(void);

/* ---- the allocator's events */

/* The account of what the calling thread allocates or frees, and the limit on all bytes that holds
 * for it (UINT64_MAX: none). NULL: nobody's. */
koila__account *koila__account_now(uint64_t *limit);
void koila__account_add(koila__account *a, int64_t bytes); /* a NULL: nothing; bytes may be < 0 */
/* So many were asked for and refused: they count in the peak alone. a NULL: nothing. */
void koila__account_refused(koila__account *a, uint64_t bytes);

/* ---- the calling thread's work */

/* All bytes of the process above which the calling thread, and those that help it, are refused, in
 * place of the ledger's limit; UINT64_MAX: it has none of its own. */
void koila__account_set_limit(uint64_t bytes);
uint64_t koila__account_get_limit(void);
/* From now on this thread works; each begin has its end. False: there are no accounts left, and
 * nothing can be measured (do not end it). */
bool koila__work_begin(void);
void koila__work_end(void);

typedef struct koila__use {
    koila__account *account; /* NULL: not measured */
    int64_t before, peak_before;
    uint64_t n_unclear;
} koila__use;
/* Uses nest. pre: this thread works, or nothing is measured. */
void koila__use_begin(koila__use *use);
/* *peak, *now: bytes beyond those at the beginning, at most and now (now may be negative). False:
 * not measured, or somebody else's bytes may be missing or among them. */
bool koila__use_end(const koila__use *use, int64_t *peak, int64_t *now);

#endif
