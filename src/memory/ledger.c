/* ledger.c — see ledger.h. All counters are relaxed atomics: each is exact by itself, and a reader
 * that wants several of them together (a report) reads while nobody allocates, or accepts that they
 * are a few events apart. */
#include "memory/ledger.h"

#define LOAD(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define STORE(x, v) atomic_store_explicit(&(x), (v), memory_order_relaxed)
#define ADD(x, v) atomic_fetch_add_explicit(&(x), (v), memory_order_relaxed)
#define SUB(x, v) atomic_fetch_sub_explicit(&(x), (v), memory_order_relaxed)

static void zero(koila__ledger *l)
{
    STORE(l->current, 0);
    STORE(l->peak, 0);
    STORE(l->limit, UINT64_MAX);
    STORE(l->n_refused, 0);
    STORE(l->fail_in, 0);
    STORE(l->n_unknown, 0);
    STORE(l->n_replaced, 0);
}

void koila__ledger_init(koila__ledger *l, const koila_allocator *mem)
{
    zero(l);
    STORE(l->windows, 0);
    STORE(l->windows_taken, 0);
    koila__ptrtab_init(&l->blocks, mem);
}
void koila__ledger_deinit(koila__ledger *l) { koila__ptrtab_deinit(&l->blocks); }
void koila__ledger_clear(koila__ledger *l)
{
    koila__ptrtab_clear(&l->blocks);
    zero(l);
}
void koila__ledger_fork_child(koila__ledger *l)
{
    koila__ptrtab_fork_child(&l->blocks);
    zero(l);
}

KOILA__HOT static bool is_to_fail(koila__ledger *l)
{
    uint64_t left = LOAD(l->fail_in);
    while (left && !atomic_compare_exchange_weak_explicit(
                       &l->fail_in, &left, left - 1, memory_order_relaxed, memory_order_relaxed))
        continue;
    return left == 1;
}

bool koila__ledger_reserve(koila__ledger *l, uint64_t n, uint64_t *now)
{
    return koila__ledger_reserve_within(l, n, UINT64_MAX, now);
}

KOILA__HOT bool koila__ledger_reserve_within(koila__ledger *l, uint64_t n, uint64_t limit,
                                             uint64_t *now)
{
    if (is_to_fail(l))
        goto refuse;
    if (limit == UINT64_MAX)
        limit = LOAD(l->limit);
    if (limit == UINT64_MAX) {
        *now = ADD(l->current, n) + n;
        return true;
    }
    uint64_t seen = LOAD(l->current);
    do
        if (n > limit || seen > limit - n)
            goto refuse;
    while (!atomic_compare_exchange_weak_explicit(&l->current, &seen, seen + n,
                                                  memory_order_relaxed, memory_order_relaxed));
    *now = seen + n;
    return true;
refuse:
    ADD(l->n_refused, 1);
    return false;
}

void koila__ledger_cancel(koila__ledger *l, uint64_t n)
{
    koila_assert(LOAD(l->current) >= n); /* its reservation is in it */
    SUB(l->current, n);
    ADD(l->n_refused, 1);
}

KOILA__HOT bool koila__ledger_commit(koila__ledger *l, const void *p, uint64_t n, uint32_t tag,
                                     uint64_t now)
{
    uint64_t replaced;
    if (!koila__ptrtab_put(&l->blocks, p, n, tag, &replaced)) {
        koila__ledger_cancel(l, n);
        return false;
    }
    if (replaced != UINT64_MAX) {
        SUB(l->current, replaced);
        ADD(l->n_replaced, 1);
        now -= replaced;
    }
    koila__raise(&l->peak, now);
    for (uint32_t open = LOAD(l->windows); open; open &= open - 1)
        koila__raise(&l->window_peaks[__builtin_ctz(open)], now);
    return true;
}

KOILA__HOT int koila__ledger_open(koila__ledger *l)
{
    uint32_t taken = LOAD(l->windows_taken);
    uint32_t bit;
    do {
        if (taken == UINT32_MAX)
            return -1;
        bit = ~taken & (taken + 1);
    } while (!atomic_compare_exchange_weak_explicit(&l->windows_taken, &taken, taken | bit,
                                                    memory_order_acquire, memory_order_relaxed));
    const int window = __builtin_ctz(bit);
    STORE(l->window_peaks[window], LOAD(l->current));
    atomic_fetch_or_explicit(&l->windows, bit, memory_order_relaxed);
    koila__raise(&l->window_peaks[window], LOAD(l->current));
    return window;
}

KOILA__HOT uint64_t koila__ledger_close(koila__ledger *l, int window)
{
    if (window < 0)
        return LOAD(l->current);
    const uint32_t bit = (uint32_t)1 << window;
    atomic_fetch_and_explicit(&l->windows, ~bit, memory_order_relaxed);
    const uint64_t peak = LOAD(l->window_peaks[window]);
    atomic_fetch_and_explicit(&l->windows_taken, ~bit, memory_order_release);
    return peak;
}

KOILA__HOT bool koila__ledger_release(koila__ledger *l, const void *p, uint64_t *n, uint64_t *now)
{
    if (!koila__ptrtab_del(&l->blocks, p, n, NULL)) {
        ADD(l->n_unknown, 1);
        return false;
    }
    koila_assert(LOAD(l->current) >= *n);
    *now = SUB(l->current, *n) - *n;
    return true;
}

void koila__ledger_fail_nth(koila__ledger *l, int64_t n)
{
    STORE(l->fail_in, n > 0 ? (uint64_t)n : 0);
}
