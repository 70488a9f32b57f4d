/* meter.h — the memory of every device during a stretch of work, from allocator events alone.
 *
 * An event is (device, thread, +-bytes). From events we keep, per device, quantities as they are
 * now (koila__q), and:
 *   window    a stretch on one thread. Windows of a thread nest; only the innermost one's peaks are
 *             live, in the thread's `peak` slots. Opening a nested window saves the parent's peaks
 *             and starts from now; closing raises the saved ones: O(1), no stack walk. peak(outer)
 *             == max(saved peaks before, peaks of everything nested, peaks after)
 *   flow      what one thread handed out and took back, written by that thread alone: no locked
 *             instruction, and no line of memory that another core wants. A device's totals are the
 *             sum over all flows; a few threads, so a few additions.
 *   sums      what was handed out and taken back in a thread's windows. An event counts for its own
 *             thread if that thread has a window open, else (autograd's workers) for every thread
 *             that has one; if there are several, they are marked as shared.
 *   span      a stretch for all threads (koila.memlab.measure): its own peak slot, and differences
 *             of the device's totals.
 * Events come on any thread, inside the allocator, so they only touch atomics here: no lock, no
 * memory, no call. What an accelerator's allocator changes without an event, somebody reads from
 * its statistics at boundaries of windows and tells us:
 *   reserved    falls when the cache is emptied
 *   waiting     blocks taken back that another stream still uses: active == allocated + waiting. In
 *               a window of which only both ends are known, peak(active) = max(active at the ends,
 *               peak(allocated) + the smaller waiting of the ends), which is exact while what waits
 *               stays the same, and never too much unless more came and went between.
 */
#ifndef KOILA_SRC_METER_H
#define KOILA_SRC_METER_H

#include <stdatomic.h>

#include "base/base.h"

#define KOILA__DEVICES_MAX 17 /* 0: the CPU, 1 + i: accelerator i */
#define KOILA__THREADS_MAX 256
#define KOILA__SPANS_MAX 256
#define KOILA__FLOWS_MAX 128
/* blocks up to this belong to the small pool, as in PyTorch's CUDA allocator */
#define KOILA__SMALL_BYTES ((uint64_t)1 << 20)

/* The quantities that have a peak. BYTES_* == sum of live blocks, N_* == how many; ALL == SMALL +
 * LARGE; RESERVED >= BYTES_ALL. ACTIVE + i == quantity i and what waits; the CPU, where nothing
 * waits, has none. */
typedef enum koila__q {
    KOILA__Q_BYTES_ALL,
    KOILA__Q_BYTES_SMALL,
    KOILA__Q_BYTES_LARGE,
    KOILA__Q_N_ALL,
    KOILA__Q_N_SMALL,
    KOILA__Q_N_LARGE,
    KOILA__Q_RESERVED,
    KOILA__Q_ACTIVE,
    KOILA__Q_COUNT = KOILA__Q_ACTIVE + KOILA__Q_RESERVED
} koila__q;
#define KOILA__WAITS KOILA__Q_RESERVED /* as many quantities as there are before it */
/* what an enclosing window leaves aside: its peaks and its least waiting */
#define KOILA__SAVED (KOILA__Q_COUNT + KOILA__WAITS)
static inline int koila__n_q(int device) { return device ? KOILA__Q_COUNT : KOILA__Q_ACTIVE; }

/* Events summed up since the beginning; [0] small, [1] large blocks. A window's sums are the
 * difference of two of these. */
typedef struct koila__sums {
    uint64_t alloc_bytes[2], freed_bytes[2], n_allocs[2], n_frees[2];
} koila__sums;
typedef struct koila__live_sums {
    _Atomic uint64_t alloc_bytes[2], freed_bytes[2], n_allocs[2], n_frees[2];
} koila__live_sums;

/* flows[0] is everybody's who has no flow of its own, and is written with locked instructions;
 * `taken` once it was. */
typedef struct koila__flow {
    _Alignas(64) _Atomic bool taken;
    _Atomic uint64_t n_events;
    koila__live_sums device[KOILA__DEVICES_MAX];
} koila__flow;

typedef struct koila__thread_device {
    _Atomic uint64_t peak[KOILA__Q_COUNT]; /* of the innermost open window */
    /* the least that waited at its boundaries so far; its own */
    uint64_t waited[KOILA__WAITS];
    koila__live_sums given; /* what counts for this thread and is not in its flow */
} koila__thread_device;

typedef struct koila__thread {
    /* open windows; 0: events of this thread belong to those that have one */
    _Atomic uint32_t n_open;
    _Atomic uint64_t n_shared; /* events of other threads that more than one thread was given */
    void *owner;               /* the line table's stack for this thread */
    /* the thread's own, the same as long as a window is open; NULL: it has none */
    const koila__flow *flow;
    koila__thread_device device[KOILA__DEVICES_MAX];
} koila__thread;

/* The small and large quantities are not kept but follow: now == base + handed out - taken back
 * (modulo 2^64). */
typedef struct koila__device {
    _Atomic uint64_t bytes_all, reserved;
    const _Atomic uint64_t *bytes; /* where BYTES_ALL and RESERVED really stand, if not above */
    _Atomic uint64_t base_bytes[2], base_n[2];
    _Atomic uint64_t waiting[KOILA__WAITS]; /* as last read */
} koila__device;

typedef struct koila__span {
    int device;
    _Atomic uint64_t peak;
    uint64_t start_bytes, end_bytes;
    koila__sums start, end;
    bool open;
} koila__span;

typedef struct koila__meter { /* what every event reads stands together */
    int n_devices;
    _Atomic int n_threads, n_spans, n_flows; /* slots ever used */
    _Atomic uint64_t n_set;                  /* koila__meter_set() */
    _Atomic(koila__thread *) threads[KOILA__THREADS_MAX];
    koila__device device[KOILA__DEVICES_MAX];
    _Atomic(koila__span *) spans[KOILA__SPANS_MAX];
    koila__flow flows[KOILA__FLOWS_MAX];
} koila__meter;

void koila__meter_init(koila__meter *m, int n_devices);

/* A flow for this thread, to be given back when the thread ends; NULL: there are too many, use
 * NULL. */
koila__flow *koila__meter_take_flow(koila__meter *m);
void koila__flow_give_back(koila__flow *f);

/* One block handed out (delta > 0) or taken back (delta < 0). `mine`, `self`: this thread's flow
 * and state, or NULL. now: the device's bytes after it. reserved: the device's reserved bytes after
 * it; UINT64_MAX: the device reserves nothing beyond its blocks. */
void koila__meter_event(koila__meter *m, koila__flow *mine, koila__thread *self, int device,
                        int64_t delta, uint64_t now, uint64_t reserved);
/* How many events there were: unchanged means that nothing happened anywhere. */
static inline uint64_t koila__meter_events(const koila__meter *m)
{
    uint64_t n = atomic_load_explicit(&m->n_set, memory_order_acquire);
    for (int i = 0; i < atomic_load_explicit(&m->n_flows, memory_order_acquire); i++)
        n += atomic_load_explicit(&m->flows[i].n_events, memory_order_acquire);
    return n;
}
/* Set a device's quantities as they are now, but for the active: what was there before we listened.
 */
void koila__meter_set(koila__meter *m, int device, const uint64_t now[KOILA__Q_ACTIVE]);
/* Set what changes without events, as just read. reserved_before: koila__meter_now() before
 * reading; an event since then knows better. */
void koila__meter_set_silent(koila__meter *m, int device, uint64_t reserved_before,
                             uint64_t reserved, const uint64_t waiting[KOILA__WAITS]);
static inline bool koila__meter_waits(const koila__meter *m, int device)
{
    return atomic_load_explicit(&m->device[device].waiting[KOILA__Q_BYTES_ALL],
                                memory_order_relaxed) != 0;
}
uint64_t koila__meter_now(const koila__meter *m, int device, koila__q q);
void koila__meter_all_now(const koila__meter *m, int device, uint64_t now[KOILA__Q_COUNT]);
/* All that was handed out and taken back on a device / in a thread's windows. */
void koila__meter_sums(const koila__meter *m, int device, koila__sums *out);
void koila__thread_sums(const koila__thread *t, int device, koila__sums *out);

/* Put a thread's state where events find it; false when there are too many threads. `t` stays at
 * its address until removed. */
bool koila__meter_add_thread(koila__meter *m, koila__thread *t);
void koila__meter_del_thread(koila__meter *m, koila__thread *t);

/* Open a window on t: the parent's peaks go to `saved`, the live ones start from now. */
void koila__window_open(koila__meter *m, koila__thread *t, uint64_t (*saved)[KOILA__SAVED]);
/* Start the innermost window anew, at a boundary between two lines of one activation. */
void koila__window_restart(koila__meter *m, koila__thread *t);
/* The same, and say what the window that ends has seen: now and peak, per device. `saved`: of the
 * enclosing window, which has seen it too. */
void koila__window_next(koila__meter *m, koila__thread *t, uint64_t (*saved)[KOILA__SAVED],
                        uint64_t (*now)[KOILA__Q_COUNT], uint64_t (*peak)[KOILA__Q_COUNT]);
/* Close it: the parent's window is live again and has seen all that this one saw. */
void koila__window_close(koila__meter *m, koila__thread *t, uint64_t (*saved)[KOILA__SAVED]);

/* false: too many spans are open. `s` stays at its address while open. */
bool koila__span_open(koila__meter *m, koila__span *s, int device);
void koila__span_close(koila__meter *m, koila__span *s);

/* In the child of a fork: other threads are gone, devices start from zero. */
void koila__meter_fork_child(koila__meter *m, const koila__flow *mine, koila__thread *self);

#endif
