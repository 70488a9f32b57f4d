/* account.c — see account.h.
 *
 * Each account has one writer, its own thread, except while it is the only one that works: then
 * helpers write too. So all are atomic, and relaxed: a helper's events come between the start and
 * the end of the kernel it helps, which orders them for whoever waits for the kernel. */
#include "memory/account.h"

#include <pthread.h>

#include "base/base.h"

#define LOAD(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define STORE(x, v) atomic_store_explicit(&(x), (v), memory_order_relaxed)

static koila__account accounts[KOILA__ACCOUNTS_MAX];
static bool (*_Atomic other)(void);
/* of those that work: how many, and which one if it is the only one */
static pthread_mutex_t works = PTHREAD_MUTEX_INITIALIZER;
static koila__account *working[KOILA__ACCOUNTS_MAX + 1];
static _Atomic uint32_t n_working;
static _Atomic(koila__account *) only;
static _Atomic uint64_t n_unclear; /* events of helpers while several worked */

static _Thread_local struct mine {
    koila__account *account; /* NULL: none yet */
    uint64_t room;           /* UINT64_MAX less its limit, so that zero is no limit */
} mine;
static pthread_key_t at_exit;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool has_key;

static void give_back(void *account)
{
    koila__account *a = account;
    mine = (struct mine){ 0 };
    atomic_store_explicit(&a->is_used, false, memory_order_release);
}

static void make_key(void) { has_key = pthread_key_create(&at_exit, give_back) == 0; }

void koila__accounts_init(bool (*is_other)(void))
{
    pthread_once(&once, make_key);
    atomic_store(&other, is_other);
}

/* The calling thread's account; NULL: there is none left. */
static koila__account *own(void)
{
    if (mine.account || !has_key)
        return mine.account;
    for (uint32_t i = 0; i < KOILA__ACCOUNTS_MAX; i++) {
        koila__account *a = &accounts[i];
        bool is_used = false;
        if (!atomic_compare_exchange_strong_explicit(&a->is_used, &is_used, true,
                                                     memory_order_acquire, memory_order_relaxed))
            continue;
        if (pthread_setspecific(at_exit, a) != 0) {
            atomic_store(&a->is_used, false);
            return NULL;
        }
        STORE(a->now, 0);
        STORE(a->peak, 0);
        STORE(a->limit, UINT64_MAX - mine.room);
        a->depth = 0;
        return mine.account = a;
    }
    return NULL;
}

/* ---- events */

KOILA__HOT koila__account *koila__account_now(uint64_t *limit)
{
    *limit = UINT64_MAX - mine.room;
    if (mine.account)
        return mine.account;
    if (!LOAD(n_working))
        return NULL;
    bool (*is_other)(void) = atomic_load_explicit(&other, memory_order_relaxed);
    if (is_other && is_other())
        return NULL;
    koila__account *a = atomic_load_explicit(&only, memory_order_acquire);
    if (a)
        *limit = LOAD(a->limit);
    else
        atomic_fetch_add_explicit(&n_unclear, 1, memory_order_relaxed);
    return a;
}

static inline void raise_peak(koila__account *a, int64_t now)
{
    int64_t seen = LOAD(a->peak);
    while (seen < now && !atomic_compare_exchange_weak_explicit(
                             &a->peak, &seen, now, memory_order_relaxed, memory_order_relaxed))
        continue;
}

KOILA__HOT void koila__account_add(koila__account *a, int64_t bytes)
{
    if (!a)
        return;
    raise_peak(a, atomic_fetch_add_explicit(&a->now, bytes, memory_order_relaxed) + bytes);
}

void koila__account_refused(koila__account *a, uint64_t bytes)
{
    if (a)
        raise_peak(a, LOAD(a->now) + (int64_t)bytes);
}

/* ---- work */

void koila__account_set_limit(uint64_t bytes)
{
    mine.room = UINT64_MAX - bytes;
    if (mine.account)
        STORE(mine.account->limit, bytes);
}

uint64_t koila__account_get_limit(void) { return UINT64_MAX - mine.room; }

/* pre: `works` is held. */
static void count_working(uint32_t n)
{
    atomic_store_explicit(&only, n == 1 ? working[0] : NULL, memory_order_release);
    STORE(n_working, n);
}

bool koila__work_begin(void)
{
    koila__account *a = own();
    if (!a)
        return false;
    if (a->depth++)
        return true;
    pthread_mutex_lock(&works);
    const uint32_t n = LOAD(n_working);
    koila_assert(n < KOILA__ACCOUNTS_MAX); /* an account works once */
    if (n < KOILA__ACCOUNTS_MAX) {
        working[n] = a;
        count_working(n + 1);
    }
    pthread_mutex_unlock(&works);
    return true;
}

void koila__work_end(void)
{
    koila__account *a = mine.account;
    koila_assert(a && a->depth > 0);
    if (!a || --a->depth)
        return;
    pthread_mutex_lock(&works);
    const uint32_t n = LOAD(n_working);
    uint32_t i = 0;
    while (i < n && working[i] != a)
        i++;
    if (i < n) { /* not in a child of a fork, which forgot */
        working[i] = working[n - 1];
        count_working(n - 1);
    }
    pthread_mutex_unlock(&works);
}

void koila__accounts_fork_child(void)
{
    pthread_mutex_init(&works, NULL); /* another thread may have held it */
    for (uint32_t i = 0; i < KOILA__ACCOUNTS_MAX; i++)
        if (&accounts[i] != mine.account)
            STORE(accounts[i].is_used, false);
    if (mine.account && mine.account->depth)
        working[0] = mine.account;
    count_working(mine.account && mine.account->depth ? 1 : 0);
    koila__account_set_limit(UINT64_MAX);
}

/* ---- what one operator uses */

void koila__use_begin(koila__use *use)
{
    koila__account *a = mine.account;
    *use = (koila__use){ .account = a && a->depth ? a : NULL };
    if (!use->account)
        return;
    use->before = LOAD(a->now);
    use->peak_before = LOAD(a->peak);
    use->n_unclear = LOAD(n_unclear);
    STORE(a->peak, use->before);
}

bool koila__use_end(const koila__use *use, int64_t *peak, int64_t *now)
{
    koila__account *a = use->account;
    if (!a)
        return false;
    koila_assert(a == mine.account);
    *now = LOAD(a->now) - use->before;
    *peak = LOAD(a->peak) - use->before;
    koila_assert(*peak >= 0 && *peak >= *now);
    if (LOAD(a->peak) < use->peak_before)
        STORE(a->peak, use->peak_before);
    return LOAD(n_unclear) == use->n_unclear;
}
