/* resident.c — see resident.h. */
#include "memory/resident.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

enum {
    LEAST_LEFT = 256 << 10,     /* bytes: not every small block is worth a look */
    NEAR_SHARE = 4,             /* less than one part in so many of the limit is free */
    TRIM_SHARE = 64,            /* freed bytes that are worth a malloc_trim(), of the limit */
    POOR_TRIM_SHARE = 8,        /* after one that gave back little */
    LARGEST_IN_HEAP = 32 << 20, /* bytes: DEFAULT_MMAP_THRESHOLD_MAX of glibc, with 8-byte words */
    OF_A_CHUNK = 64 << 10,      /* bytes: more than glibc adds to a block, of which it maps pages */
};

static _Thread_local bool refuses_here;

void koila__resident_init(koila__resident *r)
{
    *r = (koila__resident){ .limit = UINT64_MAX, .statm = -1 };
    pthread_mutex_init(&r->lock, NULL);
}

koila__resident_news koila__resident_news_of(koila__resident *r)
{
    pthread_mutex_lock(&r->lock);
    const koila__resident_news news = { .refused_at = r->refused_at,
                                        .n_looks = r->n_looks,
                                        .n_trims = r->n_trims,
                                        .n_refused = r->n_refused,
                                        .was_near = r->was_near };
    pthread_mutex_unlock(&r->lock);
    return news;
}

/* pre: the lock is held. */
static uint64_t resident_now(koila__resident *r, bool with_files)
{
    char text[128];
    if (r->pid != (int)getpid()) { /* a child has its own; the parent's number is not closed */
        r->pid = (int)getpid();
        r->statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    }
    const ssize_t n = r->statm >= 0 ? pread(r->statm, text, sizeof text - 1, 0) : -1;
    if (n <= 0)
        return 0;
    text[n] = 0;
    unsigned long long size, resident, files;
    if (sscanf(text, "%llu %llu %llu", &size, &resident, &files) != 3)
        return 0;
    return (uint64_t)(with_files || files > resident ? resident : resident - files) *
           (uint64_t)sysconf(_SC_PAGESIZE);
}

uint64_t koila__resident_now(koila__resident *r, bool with_files)
{
    pthread_mutex_lock(&r->lock);
    const uint64_t now = resident_now(r, with_files);
    pthread_mutex_unlock(&r->lock);
    return now;
}

void koila__resident_trim(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

void koila__resident_retain(void)
{
#ifdef __GLIBC__
    void *volatile block = malloc(LARGEST_IN_HEAP - OF_A_CHUNK); /* volatile: it is made */
    free(block);
#endif
}

void koila__resident_refuse_here(bool yes) { refuses_here = yes; }
bool koila__resident_refuses_here(void) { return refuses_here; }

void koila__resident_on(koila__resident *r, uint64_t limit, bool with_files, uint64_t base,
                        uint64_t handed_out)
{
    pthread_mutex_lock(&r->lock);
    const int64_t left = atomic_exchange_explicit(&r->left, 0, memory_order_relaxed);
    r->granted += (uint64_t)(r->given - left);
    r->given = 0; /* the next block looks */
    r->limit = limit;
    r->with_files = with_files;
    r->base = base;
    r->refused_at = r->beyond = 0;
    r->was_near = false;
    r->least_freed = limit / TRIM_SHARE;
    /* all that is beyond the base now may be retained */
    const uint64_t now = resident_now(r, with_files);
    const uint64_t retained = now > base + handed_out ? now - base - handed_out : 0;
    r->kept_at_trim = (int64_t)(r->granted - handed_out) - (int64_t)retained;
    atomic_fetch_add_explicit(&r->n_on, 1, memory_order_relaxed);
    pthread_mutex_unlock(&r->lock);
}

void koila__resident_off(koila__resident *r)
{
    if (atomic_load_explicit(&r->n_on, memory_order_relaxed)) /* a forked child starts from 0 */
        atomic_fetch_sub_explicit(&r->n_on, 1, memory_order_relaxed);
}

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Resident bytes once the block of n bytes, and all handed out before it, were touched. */
static uint64_t after_touching(const koila__resident *r, uint64_t now, uint64_t n,
                               uint64_t handed_out)
{
    return larger(now + n, r->base + handed_out);
}

/* Gives back what the C library retains, if enough was freed since the last time. */
static uint64_t trimmed(koila__resident *r, uint64_t now, uint64_t n, uint64_t handed_out)
{
    const int64_t kept = (int64_t)(r->granted - handed_out);
    const int64_t freed = kept - r->kept_at_trim;
    const uint64_t lacking = now + n > r->limit ? now + n - r->limit : 0;
    if (freed <= 0 || (uint64_t)freed < larger(lacking, r->least_freed))
        return now;
    koila__resident_trim();
    r->n_trims++;
    r->kept_at_trim = kept;
    const uint64_t after = resident_now(r, r->with_files);
    const bool is_poor = now < after + r->limit / TRIM_SHARE;
    r->least_freed = r->limit / (is_poor ? POOR_TRIM_SHARE : TRIM_SHARE);
    if (after + n > r->base + handed_out)
        r->beyond = larger(r->beyond, after + n - r->base - handed_out);
    return after;
}

bool koila__resident_look(koila__resident *r, uint64_t n, uint64_t handed_out)
{
    if (!refuses_here && !atomic_load_explicit(&r->for_all, memory_order_relaxed))
        return true;
    pthread_mutex_lock(&r->lock);
    const int64_t before = atomic_load_explicit(&r->left, memory_order_relaxed);
    r->granted += (uint64_t)(r->given - before);
    r->given = before; /* counted until here; set anew below */
    uint64_t now = resident_now(r, r->with_files);
    uint64_t most = after_touching(r, now, n, handed_out);
    if (now && most > r->limit && now + n > r->limit) {
        now = trimmed(r, now, n, handed_out);
        most = after_touching(r, now, n, handed_out);
    }
    const bool fits = !now || most <= r->limit;
    const uint64_t room = fits && now ? r->limit - most : 0;
    r->n_looks++;
    r->was_near = r->was_near || room < r->limit / NEAR_SHARE;
    if (!fits) {
        r->n_refused++;
        r->refused_at = larger(r->refused_at, handed_out - n);
        r->granted -= n; /* not handed out after all */
    }
    const int64_t given = !now ? INT64_MAX / 2 : (int64_t)larger(room / 2, LEAST_LEFT);
    atomic_fetch_add_explicit(&r->left, given - before, memory_order_relaxed);
    r->given = given;
    pthread_mutex_unlock(&r->lock);
    return fits;
}
