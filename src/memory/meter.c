/* meter.c — see meter.h. Written for the case that nothing is open (the hook then only keeps a
 * device's totals), then for one window on one thread; many threads and spans are a scan over slots
 * that are mostly empty. */
#include "memory/meter.h"

#define LOAD(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define STORE(x, v) atomic_store_explicit(&(x), (v), memory_order_relaxed)
#define ADD(x, v) atomic_fetch_add_explicit(&(x), (v), memory_order_relaxed)

KOILA__HOT static void raise_to(_Atomic uint64_t *slot, uint64_t v)
{
    uint64_t seen = LOAD(*slot);
    while (seen < v && !atomic_compare_exchange_weak_explicit(slot, &seen, v, memory_order_relaxed,
                                                              memory_order_relaxed))
        continue;
}

void koila__meter_init(koila__meter *m, int n_devices)
{
    memset(m, 0, sizeof *m);
    m->n_devices = n_devices;
    STORE(m->n_flows, 1);
}

KOILA__HOT static void add_sums(const koila__live_sums *from, koila__sums *to)
{
    for (int i = 0; i < 2; i++) {
        to->alloc_bytes[i] += LOAD(from->alloc_bytes[i]);
        to->freed_bytes[i] += LOAD(from->freed_bytes[i]);
        to->n_allocs[i] += LOAD(from->n_allocs[i]);
        to->n_frees[i] += LOAD(from->n_frees[i]);
    }
}
KOILA__HOT void koila__meter_sums(const koila__meter *m, int device, koila__sums *out)
{
    *out = (koila__sums){ 0 };
    for (int i = 0, n = atomic_load_explicit(&m->n_flows, memory_order_acquire); i < n; i++)
        if (i || LOAD(m->flows[0].taken))
            add_sums(&m->flows[i].device[device], out);
}
void koila__thread_sums(const koila__thread *t, int device, koila__sums *out)
{
    *out = (koila__sums){ 0 };
    add_sums(&t->device[device].given, out);
    if (t->flow)
        add_sums(&t->flow->device[device], out);
}

KOILA__HOT static void small_and_large_now(const koila__meter *m, int device,
                                           uint64_t now[KOILA__Q_COUNT])
{
    const koila__device *d = &m->device[device];
    koila__sums s;
    koila__meter_sums(m, device, &s);
    for (int i = 0; i < 2; i++) {
        now[KOILA__Q_BYTES_SMALL + i] =
            LOAD(d->base_bytes[i]) + s.alloc_bytes[i] - s.freed_bytes[i];
        now[KOILA__Q_N_SMALL + i] = LOAD(d->base_n[i]) + s.n_allocs[i] - s.n_frees[i];
    }
    now[KOILA__Q_N_ALL] = now[KOILA__Q_N_SMALL] + now[KOILA__Q_N_LARGE];
}
void koila__meter_all_now(const koila__meter *m, int device, uint64_t now[KOILA__Q_COUNT])
{
    const koila__device *d = &m->device[device];
    small_and_large_now(m, device, now);
    now[KOILA__Q_BYTES_ALL] = d->bytes ? LOAD(*d->bytes) : LOAD(d->bytes_all);
    now[KOILA__Q_RESERVED] = d->bytes ? now[KOILA__Q_BYTES_ALL] : LOAD(d->reserved);
    for (int q = KOILA__Q_ACTIVE; q < koila__n_q(device); q++)
        now[q] = now[q - KOILA__Q_ACTIVE] + LOAD(d->waiting[q - KOILA__Q_ACTIVE]);
}
uint64_t koila__meter_now(const koila__meter *m, int device, koila__q q)
{
    uint64_t now[KOILA__Q_COUNT];
    koila__meter_all_now(m, device, now);
    return now[q];
}

void koila__meter_set(koila__meter *m, int device, const uint64_t now[KOILA__Q_ACTIVE])
{
    koila__device *d = &m->device[device];
    uint64_t before[KOILA__Q_COUNT];
    small_and_large_now(m, device, before);
    STORE(d->bytes_all, now[KOILA__Q_BYTES_ALL]);
    STORE(d->reserved, now[KOILA__Q_RESERVED]);
    for (int i = 0; i < 2; i++) {
        ADD(d->base_bytes[i], now[KOILA__Q_BYTES_SMALL + i] - before[KOILA__Q_BYTES_SMALL + i]);
        ADD(d->base_n[i], now[KOILA__Q_N_SMALL + i] - before[KOILA__Q_N_SMALL + i]);
    }
    ADD(m->n_set, 1);
}
void koila__meter_set_silent(koila__meter *m, int device, uint64_t reserved_before,
                             uint64_t reserved, const uint64_t waiting[KOILA__WAITS])
{
    koila__device *d = &m->device[device];
    bool changed = reserved != reserved_before && atomic_compare_exchange_strong_explicit(
                                                      &d->reserved, &reserved_before, reserved,
                                                      memory_order_relaxed, memory_order_relaxed);
    for (int i = 0; i < KOILA__WAITS; i++)
        changed |= atomic_exchange_explicit(&d->waiting[i], waiting[i], memory_order_relaxed) !=
                   waiting[i];
    if (changed)
        ADD(m->n_set, 1);
}

static void count(koila__live_sums *s, int large, int64_t delta)
{
    if (delta > 0) {
        ADD(s->alloc_bytes[large], (uint64_t)delta);
        ADD(s->n_allocs[large], 1);
    } else {
        ADD(s->freed_bytes[large], (uint64_t)-delta);
        ADD(s->n_frees[large], 1);
    }
}
KOILA__HOT static void count_alone(koila__live_sums *s, int large, int64_t delta)
{
    _Atomic uint64_t *bytes = delta > 0 ? &s->alloc_bytes[large] : &s->freed_bytes[large];
    _Atomic uint64_t *n = delta > 0 ? &s->n_allocs[large] : &s->n_frees[large];
    STORE(*bytes, LOAD(*bytes) + (uint64_t)(delta > 0 ? delta : -delta));
    STORE(*n, LOAD(*n) + 1);
}

koila__flow *koila__meter_take_flow(koila__meter *m)
{
    for (int i = 1; i < KOILA__FLOWS_MAX; i++) {
        bool free = false;
        if (!atomic_compare_exchange_strong(&m->flows[i].taken, &free, true))
            continue;
        int used = LOAD(m->n_flows);
        while (used < i + 1 && !atomic_compare_exchange_weak(&m->n_flows, &used, i + 1))
            continue;
        return &m->flows[i];
    }
    return NULL;
}
/* what it has counted stays in the totals */
void koila__flow_give_back(koila__flow *f) { atomic_store(&f->taken, false); }

/* An event, as the functions below need it. */
typedef struct event {
    int device, large; /* large: 0 or 1, the pool */
    int64_t delta;     /* bytes */
    uint64_t now, reserved;
} event;

KOILA__HOT static void count_in_flow(koila__meter *m, koila__flow *mine, const event *e)
{
    if (mine) {
        count_alone(&mine->device[e->device], e->large, e->delta);
        return;
    }
    if (!LOAD(m->flows[0].taken))
        STORE(m->flows[0].taken, true);
    count(&m->flows[0].device[e->device], e->large, e->delta);
}

KOILA__HOT static void raise_window(koila__thread *t, const event *e,
                                    const uint64_t after[KOILA__Q_COUNT])
{
    _Atomic uint64_t *peak = t->device[e->device].peak;
    const int q_bytes = KOILA__Q_BYTES_SMALL + e->large;
    const int q_n = KOILA__Q_N_SMALL + e->large;
    raise_to(&peak[KOILA__Q_BYTES_ALL], e->now);
    raise_to(&peak[q_bytes], after[q_bytes]);
    raise_to(&peak[q_n], after[q_n]);
    raise_to(&peak[KOILA__Q_N_ALL], after[KOILA__Q_N_ALL]);
    raise_to(&peak[KOILA__Q_RESERVED], e->reserved);
}

KOILA__HOT static koila__thread *thread_at(koila__meter *m, int i)
{
    koila__thread *t = atomic_load_explicit(&m->threads[i], memory_order_acquire);
    return t && LOAD(t->n_open) ? t : NULL;
}

/* Windows are raised on all threads; the event counts for its own thread if that has a window open,
 * else for every thread that has one. */
KOILA__HOT static void tell_windows(koila__meter *m, const koila__flow *mine, koila__thread *self,
                                    const event *e)
{
    const int n_threads = atomic_load_explicit(&m->n_threads, memory_order_acquire);
    const bool own = self && LOAD(self->n_open) > 0;
    int n_given = 0;
    bool known = false;
    uint64_t after[KOILA__Q_COUNT];
    for (int i = 0; i < n_threads; i++) {
        koila__thread *t = thread_at(m, i);
        if (!t)
            continue;
        if (e->delta > 0) {
            if (!known)
                small_and_large_now(m, e->device, after);
            known = true;
            raise_window(t, e, after);
        }
        if (own && t != self)
            continue;
        if (!own || !mine || t->flow != mine)
            count(&t->device[e->device].given, e->large, e->delta);
        n_given++;
    }
    for (int i = 0; n_given > 1 && i < n_threads; i++) {
        koila__thread *t = thread_at(m, i);
        if (t)
            ADD(t->n_shared, 1);
    }
}

KOILA__HOT static void raise_spans(koila__meter *m, const event *e)
{
    const int n_spans = atomic_load_explicit(&m->n_spans, memory_order_acquire);
    for (int i = 0; i < n_spans; i++) {
        koila__span *s = atomic_load_explicit(&m->spans[i], memory_order_acquire);
        if (s && s->device == e->device)
            raise_to(&s->peak, e->now);
    }
}

KOILA__HOT void koila__meter_event(koila__meter *m, koila__flow *mine, koila__thread *self,
                                   int device, int64_t delta, uint64_t now, uint64_t reserved)
{
    koila_assert(device >= 0 && device < m->n_devices && delta);
    koila__device *d = &m->device[device];
    const uint64_t size = (uint64_t)(delta < 0 ? -delta : delta);
    const event e = { device, size > KOILA__SMALL_BYTES, delta, now,
                      reserved == UINT64_MAX ? now : reserved };
    if (!d->bytes) {
        STORE(d->bytes_all, e.now);
        STORE(d->reserved, e.reserved);
    }
    count_in_flow(m, mine, &e);
    tell_windows(m, mine, self, &e);
    if (delta > 0)
        raise_spans(m, &e);
    if (mine)
        atomic_store_explicit(&mine->n_events, LOAD(mine->n_events) + 1, memory_order_release);
    else
        atomic_fetch_add_explicit(&m->flows[0].n_events, 1, memory_order_release);
}

/* Find a free slot of `n_max`, or take the one after the last ever used. */
#define TAKE_SLOT(array, n_used, n_max, what)                                                      \
    for (int i = 0; i < (n_max); i++) {                                                            \
        __typeof__(what) none = NULL;                                                              \
        if (!atomic_compare_exchange_strong(&(array)[i], &none, (what)))                           \
            continue;                                                                              \
        int used = LOAD(n_used);                                                                   \
        while (used < i + 1 && !atomic_compare_exchange_weak(&(n_used), &used, i + 1))             \
            continue;                                                                              \
        return true;                                                                               \
    }                                                                                              \
    return false

bool koila__meter_add_thread(koila__meter *m, koila__thread *t)
{
    TAKE_SLOT(m->threads, m->n_threads, KOILA__THREADS_MAX, t);
}
void koila__meter_del_thread(koila__meter *m, koila__thread *t)
{
    for (int i = 0; i < LOAD(m->n_threads); i++)
        if (LOAD(m->threads[i]) == t)
            STORE(m->threads[i], NULL);
}

void koila__window_restart(koila__meter *m, koila__thread *t)
{
    for (int d = 0; d < m->n_devices; d++) {
        uint64_t now[KOILA__Q_COUNT];
        koila__meter_all_now(m, d, now);
        for (int q = 0; q < koila__n_q(d); q++)
            STORE(t->device[d].peak[q], now[q]);
        for (int i = 0; d && i < KOILA__WAITS; i++)
            t->device[d].waited[i] = now[KOILA__Q_ACTIVE + i] - now[i];
    }
}
static void max_to(uint64_t *slot, uint64_t v)
{
    if (*slot < v)
        *slot = v;
}
static void min_to(uint64_t *slot, uint64_t v)
{
    if (*slot > v)
        *slot = v;
}
void koila__window_next(koila__meter *m, koila__thread *t, uint64_t (*saved)[KOILA__SAVED],
                        uint64_t (*now)[KOILA__Q_COUNT], uint64_t (*peak)[KOILA__Q_COUNT])
{
    for (int d = 0; d < m->n_devices; d++) {
        koila__thread_device *live = &t->device[d];
        koila__meter_all_now(m, d, now[d]);
        for (int q = 0; q < koila__n_q(d); q++) {
            peak[d][q] = atomic_exchange_explicit(&live->peak[q], now[d][q], memory_order_relaxed);
            max_to(&peak[d][q], now[d][q]);
        }
        for (int i = 0; d && i < KOILA__WAITS; i++) {
            uint64_t waits = now[d][KOILA__Q_ACTIVE + i] - now[d][i];
            min_to(&live->waited[i], waits);
            max_to(&peak[d][KOILA__Q_ACTIVE + i], peak[d][i] + live->waited[i]);
            min_to(&saved[d][KOILA__Q_COUNT + i], waits);
            live->waited[i] = waits;
        }
        for (int q = 0; q < koila__n_q(d); q++)
            max_to(&saved[d][q], peak[d][q]);
    }
}
void koila__window_open(koila__meter *m, koila__thread *t, uint64_t (*saved)[KOILA__SAVED])
{
    for (int d = 0; d < m->n_devices; d++) {
        for (int q = 0; q < koila__n_q(d); q++)
            saved[d][q] = LOAD(t->device[d].peak[q]);
        for (int i = 0; d && i < KOILA__WAITS; i++)
            saved[d][KOILA__Q_COUNT + i] = t->device[d].waited[i];
    }
    koila__window_restart(m, t);
    ADD(t->n_open, 1);
}
void koila__window_close(koila__meter *m, koila__thread *t, uint64_t (*saved)[KOILA__SAVED])
{
    koila_assert(LOAD(t->n_open) > 0);
    for (int d = 0; d < m->n_devices; d++) {
        for (int q = 0; q < koila__n_q(d); q++)
            raise_to(&t->device[d].peak[q], saved[d][q]);
        for (int i = 0; d && i < KOILA__WAITS; i++)
            min_to(&t->device[d].waited[i], saved[d][KOILA__Q_COUNT + i]);
    }
    ADD(t->n_open, (uint32_t)-1);
}

static bool add_span(koila__meter *m, koila__span *s)
{
    TAKE_SLOT(m->spans, m->n_spans, KOILA__SPANS_MAX, s);
}
bool koila__span_open(koila__meter *m, koila__span *s, int device)
{
    s->device = device;
    s->start_bytes = s->end_bytes = koila__meter_now(m, device, KOILA__Q_BYTES_ALL);
    STORE(s->peak, s->start_bytes);
    koila__meter_sums(m, device, &s->start);
    s->end = s->start;
    s->open = add_span(m, s);
    return s->open;
}
void koila__span_close(koila__meter *m, koila__span *s)
{
    if (!s->open)
        return;
    s->open = false;
    for (int i = 0; i < LOAD(m->n_spans); i++)
        if (LOAD(m->spans[i]) == s)
            STORE(m->spans[i], NULL);
    s->end_bytes = koila__meter_now(m, s->device, KOILA__Q_BYTES_ALL);
    koila__meter_sums(m, s->device, &s->end);
}

void koila__meter_fork_child(koila__meter *m, const koila__flow *mine, koila__thread *self)
{
    for (int i = 1; i < LOAD(m->n_flows); i++)
        if (&m->flows[i] != mine)
            STORE(m->flows[i].taken, false);
    for (int i = 0; i < LOAD(m->n_threads); i++)
        if (LOAD(m->threads[i]) != self)
            STORE(m->threads[i], NULL);
    for (int d = 0; d < m->n_devices; d++) {
        koila__meter_set(m, d, (const uint64_t[KOILA__Q_ACTIVE]){ 0 });
        koila__meter_set_silent(m, d, 0, 0, (const uint64_t[KOILA__WAITS]){ 0 });
    }
    for (int i = 0; i < LOAD(m->n_spans); i++)
        STORE(m->spans[i], NULL);
    if (self)
        koila__window_restart(m, self);
}
