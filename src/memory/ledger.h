/* ledger.h — the bytes that an allocator has handed out and not got back, exactly, and a limit on
 * them.
 *
 *   current == sum of bytes in `blocks` + reservations in flight        at any moment
 *   current <= limit
 *         if it held when the limit was set
 *   peak    == highest `current` after a block was handed out since the last reset; a window has
 *         one of its own, so that several threads can measure at once
 * A block passes through two calls: koila__ledger_reserve() before the real allocator is asked
 * (this is where the limit refuses), and koila__ledger_commit() or koila__ledger_cancel() after it
 * answered. Reserving first is what makes the limit exact under threads.
 */
#ifndef KOILA_SRC_LEDGER_H
#define KOILA_SRC_LEDGER_H

#include "memory/ptrtab.h"

#define KOILA__LEDGER_WINDOWS 32

typedef struct koila__ledger {
    _Alignas(64) _Atomic uint64_t current, peak, limit; /* bytes; limit UINT64_MAX: none */
    /* stretches whose own peak is kept, on any thread: bit i says that window i is taken, and that
     * it is open */
    _Atomic uint32_t windows_taken, windows;
    _Atomic uint64_t window_peaks[KOILA__LEDGER_WINDOWS];
    /* refuse the allocation that brings this from 1 to 0; 0: none */
    _Atomic uint64_t fail_in;
    _Atomic uint64_t n_refused; /* allocations not granted */
    /* frees of unknown blocks: older than the ledger, or not tensors */
    _Atomic uint64_t n_unknown;
    /* commits of an address still in the table: a free was missed */
    _Atomic uint64_t n_replaced;
    koila__ptrtab blocks;
} koila__ledger;

void koila__ledger_init(koila__ledger *l, const koila_allocator *mem);
void koila__ledger_deinit(koila__ledger *l);

/* false: refuse, the limit or fail_nth says so. true: n bytes are counted, *now is `current` with
 * them. */
bool koila__ledger_reserve(koila__ledger *l, uint64_t n, uint64_t *now);
/* The same where the caller has a limit of its own, in place of l's; UINT64_MAX: it has none. */
bool koila__ledger_reserve_within(koila__ledger *l, uint64_t n, uint64_t limit, uint64_t *now);
/* The block is at p. false: no host memory to remember it, the reservation is undone and the caller
 * must give the block back. */
bool koila__ledger_commit(koila__ledger *l, const void *p, uint64_t n, uint32_t tag, uint64_t now);
void koila__ledger_cancel(koila__ledger *l, uint64_t n);
/* p is about to be freed: call before the real free, for afterwards another thread may get the same
 * address. true: it was ours, *n bytes are off the count, *now is `current` without them. */
bool koila__ledger_release(koila__ledger *l, const void *p, uint64_t *n, uint64_t *now);

/* Refuse the nth allocation from now (1 = the next); n <= 0: none. */
void koila__ledger_fail_nth(koila__ledger *l, int64_t n);
/* Opens a window: koila__ledger_close() of its number gives the highest `current` since then. -1:
 * none is free; closing that gives `current`. */
int koila__ledger_open(koila__ledger *l);
uint64_t koila__ledger_close(koila__ledger *l, int window);
/* Forget blocks, counters and limit. */
void koila__ledger_clear(koila__ledger *l);
/* In the child of a fork (all shards held by koila__ptrtab_fork_prepare): it counts for itself,
 * from zero. */
void koila__ledger_fork_child(koila__ledger *l);

/* How many blocks were granted, and how many of them were given back. */
static inline uint64_t koila__ledger_granted(koila__ledger *l)
{
    return koila__ptrtab_n_put(&l->blocks);
}
static inline uint64_t koila__ledger_released(koila__ledger *l)
{
    return koila__ptrtab_n_gone(&l->blocks);
}

/* Raise *slot to at least v. */
static inline void koila__raise(_Atomic uint64_t *slot, uint64_t v)
{
    uint64_t seen = atomic_load_explicit(slot, memory_order_relaxed);
    while (seen < v && !atomic_compare_exchange_weak_explicit(slot, &seen, v, memory_order_relaxed,
                                                              memory_order_relaxed))
        continue;
}

#endif
