/* linetab.c — see linetab.h. */
#include "memory/linetab.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

/* ---- time: the processor's counter where it runs at one speed (8 ns a reading), else the system's
 * clock (25 ns) */

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#if defined(__x86_64__)
static bool has_steady_counter(void)
{
    static int known; /* 0 not asked, 1 yes, 2 no; racing threads find the same */
    if (!known) {
        unsigned a, b, c, d;
        known = __get_cpuid(0x80000007, &a, &b, &c, &d) && (d & 1u << 8) ? 1 : 2;
    }
    return known == 1;
}
uint64_t koila__ticks(void) { return has_steady_counter() ? __rdtsc() : clock_ns(); }
#elif defined(__aarch64__)
uint64_t koila__ticks(void)
{
    uint64_t v;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(v));
    return v;
}
#else
uint64_t koila__ticks(void) { return clock_ns(); }
#endif

double koila__ticks_to_ns(koila__lines *l, uint64_t ticks)
{
    uint64_t n_ns = clock_ns() - l->ns0;
    uint64_t n_ticks = koila__ticks() - l->tick0;
    if (n_ns > 1000000 || l->ticks_per_ns == 0)
        l->ticks_per_ns = n_ns ? (double)n_ticks / (double)n_ns : 1;
    return (double)ticks / l->ticks_per_ns;
}

/* about 1 ms: one reading costs 0.7 us, and 3 to 4 in the middle of a program that fills the caches
 */
#define RSS_EVERY_TICKS 2400000
static uint64_t rss_now(koila__lines *l, uint64_t ticks)
{
    if (ticks - l->rss_ticks < RSS_EVERY_TICKS)
        return l->rss_bytes;
    char text[96];
    if (l->rss_fd == -1) {
        int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
        l->rss_fd = fd < 0 ? -2 : fd;
    }
    ssize_t n = l->rss_fd >= 0 ? pread(l->rss_fd, text, sizeof text - 1, 0) : 0;
    text[n > 0 ? n : 0] = 0;
    /* the second number: resident pages; by hand, for sscanf takes longer than the system */
    const char *at = strchr(text, ' ');
    uint64_t n_pages = 0;
    for (at = at ? at + 1 : ""; *at >= '0' && *at <= '9'; at++)
        n_pages = n_pages * 10 + (uint64_t)(*at - '0');
    if (n_pages)
        l->rss_bytes = n_pages * l->page_bytes;
    l->rss_ticks = ticks;
    return l->rss_bytes;
}

/* ---- codes */

void koila__lines_init(koila__lines *l, koila__meter *m, const koila_allocator *mem)
{
    *l = (koila__lines){ .mem = koila__allocator(mem),
                         .meter = m,
                         .rss_fd = -1,
                         .page_bytes = (uint64_t)sysconf(_SC_PAGESIZE),
                         .tick0 = koila__ticks(),
                         .ns0 = clock_ns() };
}

static void insert(koila__lines *l, koila__code *c)
{
    koila_assert(l->n_codes * 4 <= l->n_slots);
    size_t i = koila__code_home(l, c->key);
    while (l->slots[i])
        i = (i + 1) & (l->n_slots - 1);
    l->slots[i] = c;
}

/* ---- the lock of the credits: held for a few dozen instructions, also inside an allocator */

static void lock_credits(koila__lines *l)
{
    while (atomic_flag_test_and_set_explicit(&l->credit_busy, memory_order_acquire))
        continue;
}
static void unlock_credits(koila__lines *l)
{
    atomic_flag_clear_explicit(&l->credit_busy, memory_order_release);
}

static koila_status rehash(koila__lines *l, size_t n_slots)
{
    koila__code **slots = koila__realloc(&l->mem, NULL, 0, n_slots * sizeof *slots);
    if (!slots)
        return KOILA_NO_MEMORY;
    memset(slots, 0, n_slots * sizeof *slots);
    lock_credits(l);
    koila__release(&l->mem, l->slots, l->n_slots * sizeof *l->slots);
    l->slots = slots;
    l->n_slots = n_slots;
    for (koila__code *c = l->codes; c; c = c->next)
        insert(l, c);
    unlock_credits(l);
    return KOILA_OK;
}

static void free_code(koila__lines *l, koila__code *c)
{
    koila__release(&l->mem, c->n_open, (size_t)c->n_rows * sizeof *c->n_open);
    koila__release(&l->mem, c, sizeof *c);
}

static void *zeroed(koila__lines *l, size_t n)
{
    void *p = koila__realloc(&l->mem, NULL, 0, n);
    return p ? memset(p, 0, n) : NULL;
}

koila_status koila__func_new(koila__lines *l, const void *key, int first_line, int n_rows,
                             const koila__wish *wish, koila__func **out)
{
    koila__code *c = koila__lines_find(l, key);
    koila__code *made = NULL;
    koila__func *f = NULL;
    if (n_rows < 1)
        n_rows = 1;
    if (!c) {
        if ((l->n_codes + 1) * 4 > l->n_slots)
            KOILA_TRY(rehash(l, l->n_slots ? l->n_slots * 2 : 16));
        made = c = zeroed(l, sizeof *c);
        if (!c)
            return KOILA_NO_MEMORY;
        c->key = key;
        c->first_line = first_line;
        c->n_rows = n_rows;
        c->n_open = zeroed(l, (size_t)n_rows * sizeof *c->n_open);
        if (!c->n_open)
            goto fail;
    }
    f = zeroed(l, sizeof *f);
    if (!f)
        goto fail;
    f->rows = zeroed(l, (size_t)c->n_rows * sizeof *f->rows);
    if (!f->rows)
        goto fail;
    f->code = c;
    f->wish = wish;
    lock_credits(l);
    if (made) {
        c->next = l->codes;
        l->codes = c;
        l->n_codes++;
        insert(l, c);
    }
    f->next = c->funcs;
    c->funcs = f;
    unlock_credits(l);
    *out = f;
    return KOILA_OK;
fail:
    koila__release(&l->mem, f, sizeof *f);
    if (made) {
        koila__release(&l->mem, made->n_open, (size_t)made->n_rows * sizeof *made->n_open);
        koila__release(&l->mem, made, sizeof *made);
    }
    return KOILA_NO_MEMORY;
}

static int n_recs(const koila__lines *l)
{
    return l->meter->n_devices == 1 ? 1 : l->meter->n_devices + 1;
}
const koila__rec *koila__row_rec(const koila__lines *l, const koila__row *row, int device)
{
    if (!row->rec)
        return NULL;
    return &row->rec[device < 0 ? n_recs(l) - 1 : device];
}

static void free_rows(koila__lines *l, koila__func *f)
{
    for (int i = 0; i < f->code->n_rows; i++) {
        koila__row *row = &f->rows[i];
        for (int d = 0; row->rec && d < n_recs(l); d++) {
            koila__release(&l->mem, row->rec[d].stats_max, sizeof(koila__stats));
            koila__release(&l->mem, row->rec[d].stats_peak, sizeof(koila__stats));
        }
        koila__release(&l->mem, row->rec, (size_t)n_recs(l) * sizeof *row->rec);
        koila__release(&l->mem, row->credit, KOILA__DEVICES_MAX * sizeof *row->credit);
    }
    koila__release(&l->mem, f->rows, (size_t)f->code->n_rows * sizeof *f->rows);
}

/* NULL for NULL, and when the host is out of memory: then the copy lacks what only the allocator
 * knows. */
static koila__stats *copy_stats(koila__lines *l, const koila__stats *from)
{
    koila__stats *to = from ? zeroed(l, sizeof *to) : NULL;
    if (to)
        *to = *from;
    return to;
}

koila_status koila__func_copy(koila__lines *l, const koila__func *f, const koila__wish *wish,
                              koila__func **out)
{
    koila__func *copy;
    KOILA_TRY(koila__func_new(l, f->code->key, f->code->first_line, f->code->n_rows, wish, &copy));
    for (int i = 0; i < f->code->n_rows; i++) {
        const koila__row *from = &f->rows[i];
        copy->rows[i] = *from;
        copy->rows[i].rec = NULL;
        lock_credits(l);
        koila__credit *credit = copy->rows[i].credit =
            from->credit ? zeroed(l, KOILA__DEVICES_MAX * sizeof *credit) : NULL;
        if (credit)
            memcpy(credit, from->credit, KOILA__DEVICES_MAX * sizeof *credit);
        bool lost = from->credit && !credit;
        unlock_credits(l);
        if (lost) {
            koila__func_free(l, copy);
            return KOILA_NO_MEMORY;
        }
        if (!from->rec)
            continue;
        koila__rec *rec = copy->rows[i].rec = zeroed(l, (size_t)n_recs(l) * sizeof *rec);
        for (int d = 0; rec && d < n_recs(l); d++) {
            rec[d] = from->rec[d];
            rec[d].stats_max = copy_stats(l, from->rec[d].stats_max);
            rec[d].stats_peak = copy_stats(l, from->rec[d].stats_peak);
        }
        if (!rec) {
            koila__func_free(l, copy);
            return KOILA_NO_MEMORY;
        }
    }
    *out = copy;
    return KOILA_OK;
}

static void forget_code(koila__lines *l, koila__code *c)
{
    koila_assert(!c->funcs && !c->n_activations && l->n_codes > 0);
    lock_credits(l);
    l->last = (koila__last_credit){ 0 };
    for (uint32_t i = 0; i < l->paths.n; i++)
        if (l->paths.at[i].code == c)
            l->paths.at[i].code = NULL;
    for (koila__code **at = &l->codes; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    l->n_codes--;
    if (l->n_slots)
        memset(l->slots, 0, l->n_slots * sizeof *l->slots);
    for (koila__code *k = l->codes; k; k = k->next)
        insert(l, k);
    if (l->n_codes == 0) { /* no path means anything any more: begin anew */
        l->paths.n = 0;
        l->n_begun++;
        koila__idset_clear(&l->path_set);
        for (int i = 0; i < atomic_load_explicit(&l->meter->n_threads, memory_order_acquire); i++) {
            koila__thread *t = atomic_load_explicit(&l->meter->threads[i], memory_order_acquire);
            if (t && t->owner)
                ((koila__stack *)t->owner)->n_origins = 0;
        }
    }
    unlock_credits(l);
    free_code(l, c);
}

bool koila__func_free(koila__lines *l, koila__func *f)
{
    koila__code *c = f->code;
    lock_credits(l);
    for (koila__func **at = &c->funcs; *at; at = &(*at)->next)
        if (*at == f) {
            *at = f->next;
            break;
        }
    unlock_credits(l);
    free_rows(l, f);
    koila__release(&l->mem, f, sizeof *f);
    if (c->funcs || c->n_activations)
        return false;
    forget_code(l, c);
    return true;
}

const void *koila__lines_reap(koila__lines *l)
{
    for (koila__code *c = l->codes; c; c = c->next)
        if (!c->funcs && !c->n_activations) {
            const void *key = c->key;
            forget_code(l, c);
            return key;
        }
    return NULL;
}

bool koila__code_wanted(const koila__code *c)
{
    for (koila__func *f = c->funcs; f; f = f->next)
        if (f->wish->enabled)
            return true;
    return false;
}

void koila__lines_deinit(koila__lines *l)
{
    while (l->codes) {
        koila__code *c = l->codes;
        c->n_activations = 0;
        while (c->funcs && !koila__func_free(l, c->funcs))
            continue;
        if (l->codes == c)
            forget_code(l, c);
    }
    koila__release(&l->mem, l->slots, l->n_slots * sizeof *l->slots);
    koila__vec_free(&l->mem, &l->paths);
    koila__idset_free(&l->mem, &l->path_set);
    if (l->rss_fd >= 0)
        close(l->rss_fd);
    l->slots = NULL;
    l->n_slots = 0;
    l->rss_fd = -1;
}

/* ---- stacks */

koila__stack *koila__stack_new(koila__lines *l)
{
    koila__stack *s = zeroed(l, sizeof *s);
    if (s && !koila__meter_add_thread(l->meter, &s->thread)) {
        koila__release(&l->mem, s, sizeof *s);
        return NULL;
    }
    if (s)
        s->thread.owner = s;
    return s;
}

void koila__stack_clear(koila__lines *l, koila__stack *s)
{
    while (s->n || s->n_lost)
        koila__lines_leave(l, s);
}

static koila__activation *push(koila__lines *l, koila__stack *s)
{
    if (s->n == s->n_made) {
        if (!koila__grow(&l->mem, &s->activations, &s->capacity, s->n + 1, sizeof *s->activations))
            return NULL;
        koila__activation *a = zeroed(l, sizeof *a);
        if (!a)
            return NULL;
        s->activations[s->n_made++] = a;
    }
    koila_assert(s->n < s->n_made && s->n_made <= s->capacity);
    return s->activations[s->n++];
}

/* ---- windows */

static void max_to(uint64_t *slot, uint64_t v)
{
    if (*slot < v)
        *slot = v;
}

/* Does an activation below `a` with the same code have its window open on this row? Then that one
 * does the adding. */
static bool is_outermost(const koila__activation *a)
{
    if (a->code->n_open[a->row] == 1)
        return true;
    for (const koila__activation *b = a->outer_same; b; b = b->outer_same)
        if (b->row == a->row)
            return false;
    return true;
}

/* Does a profiler want this row's statistics read from the allocators? */
static bool wants_stats(const koila__code *c, int row)
{
    for (const koila__func *f = row < 0 ? NULL : c->funcs; f; f = f->next) {
        if (!f->wish->enabled || f->wish->stats_mode == KOILA__STATS_HOOK)
            continue;
        if (f->wish->stats_mode == KOILA__STATS_FULL || f->rows[row].n_stats_reads < 1000)
            return true;
    }
    return false;
}

/* Read them for the moment between two windows: row_before ends, row_after begins. false: nobody
 * wants them, or there are none. */
static bool read_end_stats(koila__lines *l, koila__activation *a, int row_before, int row_after)
{
    if (!l->read_stats || l->meter->n_devices == 1 ||
        !(wants_stats(a->code, row_before) || wants_stats(a->code, row_after)))
        return false;
    if (!a->w.stats)
        a->w.stats = zeroed(l, KOILA__DEVICES_MAX * sizeof *a->w.stats);
    if (!a->w.end_stats)
        a->w.end_stats = zeroed(l, KOILA__DEVICES_MAX * sizeof *a->w.end_stats);
    if (!a->w.stats || !a->w.end_stats)
        return false;
    bool any = false;
    for (int d = 1; d < l->meter->n_devices; d++) {
        if (l->read_stats(d, &a->w.end_stats[d]))
            any = true;
        else
            memset(&a->w.end_stats[d], 0, sizeof a->w.end_stats[d]);
    }
    return any;
}

static void record_stats(koila__lines *l, koila__func *f, koila__row *row, int device,
                         const koila__activation *a, koila__rec *rec)
{
    if (f->wish->stats_mode == KOILA__STATS_HOOK ||
        (f->wish->stats_mode == KOILA__STATS_AUTO && row->n_stats_reads > 1000))
        return;
    if (!rec->stats_max)
        rec->stats_max = zeroed(l, sizeof(koila__stats));
    if (!rec->stats_peak)
        rec->stats_peak = zeroed(l, sizeof(koila__stats));
    if (!rec->stats_max || !rec->stats_peak)
        return;
    const koila__stats *end = &a->w.end_stats[device];
    const koila__stats *start = a->w.has_stats ? &a->w.stats[device] : end;
    for (int i = 0; i < KOILA__STATS; i++) {
        max_to(&rec->stats_max->current[i], end->current[i]);
        max_to(&rec->stats_peak->current[i],
               end->current[i] > start->current[i] ? end->current[i] : start->current[i]);
        max_to(&rec->stats_max->allocated[i], end->allocated[i] - start->allocated[i]);
        max_to(&rec->stats_max->freed[i], end->freed[i] - start->freed[i]);
    }
}

/* One moment, the end of a window and the start of the next: what an event in between would change
 * is read once, so that it is in one of the two and never in none. Not taken when nothing happened
 * since the window was opened. */
typedef struct moment {
    uint64_t n_shared;
    bool has_stats; /* the activation's end_stats belong to this moment */
    uint64_t now[KOILA__DEVICES_MAX][KOILA__Q_COUNT], peak[KOILA__DEVICES_MAX][KOILA__Q_COUNT];
    koila__sums sums[KOILA__DEVICES_MAX];
} moment;

/* `saved`: the peaks of the enclosing window, which has seen what this one saw. */
static void take_moment(koila__lines *l, koila__stack *s, uint64_t (*saved)[KOILA__SAVED],
                        moment *m)
{
    m->has_stats = false;
    m->n_shared = atomic_load_explicit(&s->thread.n_shared, memory_order_relaxed);
    for (int d = 0; d < l->meter->n_devices; d++)
        koila__thread_sums(&s->thread, d, &m->sums[d]);
    koila__window_next(l->meter, &s->thread, saved, m->now, m->peak);
}

/* Bring one device's record up to date with the window that ends now; m is NULL when it was quiet.
 */
static void record(koila__lines *l, koila__activation *a, koila__func *f, koila__row *row,
                   int device, const moment *m, bool adds, koila__rec *rec)
{
    if (!m) {
        uint64_t now[KOILA__Q_COUNT];
        koila__meter_all_now(l->meter, device, now);
        for (int q = 0; q < koila__n_q(device); q++) {
            max_to(&rec->current[q], now[q]);
            max_to(&rec->peak[q], now[q]);
        }
        return;
    }
    for (int q = 0; q < koila__n_q(device); q++) {
        max_to(&rec->current[q], m->now[device][q]);
        max_to(&rec->peak[q], m->peak[device][q]);
    }
    uint64_t start = a->w.start_bytes[device];
    uint64_t peak = m->peak[device][KOILA__Q_BYTES_ALL];
    if (peak > start)
        max_to(&rec->rise, peak - start);
    const koila__sums *end = &m->sums[device];
    const koila__sums *begin = &a->w.start[device];
    uint64_t in[KOILA__FLOWS], out[KOILA__FLOWS];
    for (int i = 0; i < 2; i++) {
        in[1 + i] = end->alloc_bytes[i] - begin->alloc_bytes[i];
        in[4 + i] = end->n_allocs[i] - begin->n_allocs[i];
        out[1 + i] = end->freed_bytes[i] - begin->freed_bytes[i];
        out[4 + i] = end->n_frees[i] - begin->n_frees[i];
    }
    in[0] = in[1] + in[2];
    in[3] = in[4] + in[5];
    out[0] = out[1] + out[2];
    out[3] = out[4] + out[5];
    for (int i = 0; i < KOILA__FLOWS; i++) {
        max_to(&rec->allocated[i], in[i]);
        max_to(&rec->freed[i], out[i]);
    }
    if (adds) {
        rec->sum_alloc += in[0];
        rec->sum_freed += out[0];
        rec->sum_delta += (int64_t)(m->now[device][KOILA__Q_BYTES_ALL] - start);
    }
    if (device && m->has_stats)
        record_stats(l, f, row, device, a, rec);
}

static void end_window(koila__lines *l, koila__activation *a, uint64_t ticks, uint64_t n_events,
                       const moment *m)
{
    koila__code *c = a->code;
    bool adds = is_outermost(a);
    uint64_t rss = rss_now(l, ticks);
    for (koila__func *f = c->funcs; f; f = f->next) {
        if (!f->wish->enabled)
            continue;
        koila__row *row = &f->rows[a->row];
        if (adds)
            row->n_ticks += ticks - a->opened_ticks;
        if (row->rss_bytes < rss)
            row->rss_bytes = rss;
        if (!m && row->recorded && row->seen_events == n_events &&
            row->seen_target == f->wish->target)
            continue;
        if (!row->rec)
            row->rec = zeroed(l, (size_t)n_recs(l) * sizeof *row->rec);
        if (!row->rec)
            continue;
        row->recorded = true;
        row->shared |= m && m->n_shared != a->opened_shared;
        row->seen_events = n_events;
        row->seen_target = f->wish->target;
        row->n_stats_reads += m && m->has_stats;
        int n_devices = l->meter->n_devices;
        for (int d = 0; d < n_devices; d++)
            record(l, a, f, row, d, m, adds, &row->rec[d]);
        if (n_devices > 1)
            record(l, a, f, row, f->wish->target, m, adds, &row->rec[n_devices]);
    }
    koila_assert(c->n_open[a->row] > 0);
    c->n_open[a->row]--;
    a->row = -1;
}

/* Note what is true at the start of a window; m NULL: the same as at the start of the one before.
 */
static void begin_window(koila__lines *l, koila__activation *a, int row, uint64_t ticks,
                         uint64_t n_events, const moment *m)
{
    for (int d = 0; m && d < l->meter->n_devices; d++) {
        a->w.start_bytes[d] = m->now[d][KOILA__Q_BYTES_ALL];
        a->w.start[d] = m->sums[d];
        if (m->has_stats)
            a->w.stats[d] = a->w.end_stats[d];
    }
    if (m) {
        a->w.has_stats = m->has_stats;
        a->opened_shared = m->n_shared;
        a->opened_events = n_events;
    }
    koila_assert(a->row < 0 && row >= 0 && row < a->code->n_rows);
    a->opened_ticks = ticks;
    a->row = row;
    a->code->n_open[row]++;
}

static int row_of(const koila__code *c, int line)
{
    int row = line - c->first_line;
    return row >= 0 && row < c->n_rows ? row : -1;
}

static void count_hit(koila__code *c, int row)
{
    for (koila__func *f = c->funcs; f; f = f->next)
        if (f->wish->enabled)
            f->rows[row].n_hits++;
}

void koila__lines_enter(koila__lines *l, koila__stack *s, koila__code *c, int line, bool is_call)
{
    int row = is_call ? 0 : row_of(c, line);
    if (l->poll)
        l->poll(!wants_stats(c, row));
    koila__activation *a = s->n_lost ? NULL : push(l, s);
    if (!a) {
        s->n_lost++;
        return;
    }
    a->code = c;
    a->row = -1;
    a->serial = ++s->n_entered;
    a->outer_same = NULL;
    if (c->n_activations++)
        for (size_t i = s->n - 1; i-- > 0 && !a->outer_same;)
            if (s->activations[i]->code == c)
                a->outer_same = s->activations[i];
    uint64_t n_events = koila__meter_events(l->meter);
    koila__window_open(l->meter, &s->thread, a->w.saved);
    if (row < 0)
        return;
    if (is_call)
        count_hit(c, 0);
    bool has_stats = read_end_stats(l, a, -1, row);
    moment m;
    take_moment(l, s, a->w.saved, &m);
    m.has_stats = has_stats;
    begin_window(l, a, row, koila__ticks(), n_events, &m);
}

/* Is there nothing to record of the open window but that it passed? Statistics that are read at
 * every end are something. */
static bool is_quiet(const koila__lines *l, const koila__activation *a, uint64_t n_events)
{
    if (a->row < 0 || n_events != a->opened_events)
        return false;
    for (const koila__func *f = l->read_stats ? a->code->funcs : NULL; f; f = f->next)
        if (f->wish->enabled && f->wish->stats_mode == KOILA__STATS_FULL)
            return false;
    return true;
}

/* The usual case by itself: one profiler, nothing happened since the window was opened, and the row
 * that ends has seen this state. */
static bool pass_quietly(const koila__lines *l, koila__activation *a, int row, uint64_t ticks,
                         uint64_t n_events)
{
    koila__code *c = a->code;
    koila__func *f = c->funcs;
    if (!f || f->next || !f->wish->enabled || ticks - l->rss_ticks >= RSS_EVERY_TICKS)
        return false;
    koila__row *ends = &f->rows[a->row];
    if (!ends->recorded || ends->seen_events != n_events || ends->seen_target != f->wish->target)
        return false;
    if (is_outermost(a))
        ends->n_ticks += ticks - a->opened_ticks;
    max_to(&ends->rss_bytes, l->rss_bytes);
    if (row)
        f->rows[row].n_hits++;
    koila_assert(c->n_open[a->row] > 0);
    c->n_open[a->row]--;
    c->n_open[row]++;
    a->row = row;
    a->opened_ticks = ticks;
    return true;
}

void koila__lines_line(koila__lines *l, koila__stack *s, koila__code *c, int line)
{
    if (s->n_lost)
        return; /* of an activation there was no memory for */
    /* a run that began unseen: an exception thrown into a generator, or profiling switched on in
     * between */
    if (koila__stack_top(s) != c) {
        koila__lines_enter(l, s, c, line, false);
        int at = row_of(c, line);
        if (at > 0)
            count_hit(c, at);
        return;
    }
    if (l->poll)
        l->poll(false);
    koila__activation *a = s->activations[s->n - 1];
    uint64_t ticks = koila__ticks();
    uint64_t n_events = koila__meter_events(l->meter);
    int row = row_of(c, line);
    bool quiet = is_quiet(l, a, n_events);
    if (quiet && row >= 0 && pass_quietly(l, a, row, ticks, n_events))
        return;
    moment m;
    bool has_stats = !quiet && read_end_stats(l, a, a->row, row);
    if (!quiet)
        take_moment(l, s, a->w.saved, &m);
    m.has_stats = has_stats;
    if (a->row >= 0)
        end_window(l, a, ticks, n_events, quiet ? NULL : &m);
    if (row < 0)
        return;
    if (row)
        count_hit(c, row);
    begin_window(l, a, row, ticks, n_events, quiet ? NULL : &m);
}

void koila__lines_leave(koila__lines *l, koila__stack *s)
{
    if (s->n_lost) {
        s->n_lost--;
        return;
    }
    if (!s->n)
        return;
    if (l->poll)
        l->poll(false);
    koila__activation *a = s->activations[s->n - 1];
    if (a->row >= 0) {
        uint64_t n_events = koila__meter_events(l->meter);
        moment m;
        bool quiet = is_quiet(l, a, n_events);
        bool has_stats = !quiet && read_end_stats(l, a, a->row, -1);
        if (!quiet)
            take_moment(l, s, a->w.saved, &m);
        m.has_stats = has_stats;
        end_window(l, a, koila__ticks(), n_events, quiet ? NULL : &m);
    }
    koila_assert(a->row < 0 && a->code->n_activations > 0);
    koila__window_close(l->meter, &s->thread, a->w.saved);
    s->n--;
    a->code->n_activations--;
}

/* ---- credits */

static uint64_t path_hash(const koila__path *p)
{
    return koila__mix((uintptr_t)p->code, (uint64_t)p->outer << 32 | (uint32_t)p->row);
}
static uint64_t path_hash_of(const void *lines, uint32_t id)
{
    return path_hash(&((const koila__lines *)lines)->paths.at[id]);
}
static bool path_same(const void *lines, uint32_t id, const void *key)
{
    const koila__path *a = &((const koila__lines *)lines)->paths.at[id];
    const koila__path *b = key;
    return a->code == b->code && a->row == b->row && a->outer == b->outer;
}
static const koila__path *path_at(const koila__lines *l, uint32_t path)
{
    koila_assert(path >= 1 && path <= l->paths.n);
    return &l->paths.at[path - 1];
}
/* 0: no memory, or too many. pre: locked */
static uint32_t path_of(koila__lines *l, koila__code *c, int row, uint32_t outer)
{
    const koila__path p = { c, row, outer };
    const uint64_t hash = path_hash(&p);
    uint32_t id = koila__idset_find(&l->path_set, hash, path_same, l, &p);
    if (id == KOILA__NO_ID) {
        if (l->paths.n == KOILA__PATHS_MAX ||
            !koila__idset_reserve(&l->mem, &l->path_set, path_hash_of, l) ||
            !koila__vec_push(&l->mem, &l->paths, p))
            return 0;
        id = l->paths.n - 1;
        koila__idset_insert(&l->path_set, hash, id);
    }
    return id + 1;
}
/* The rows that are open on a stack now. pre: locked */
static uint32_t path_now(koila__lines *l, const koila__stack *s)
{
    uint32_t path = 0;
    for (size_t i = 0; i < s->n; i++)
        if (s->activations[i]->row >= 0)
            path = path_of(l, s->activations[i]->code, s->activations[i]->row, path);
    return path;
}

KOILA__HOT void koila__lines_made(koila__lines *l, koila__stack *s, uint64_t thread,
                                  uint64_t number)
{
    const koila__activation *top = s->n ? s->activations[s->n - 1] : NULL;
    uint64_t serial = top ? top->serial : 0;
    int row = top ? top->row : -1;
    /* as the node before it */
    if (s->n_origins ? serial == s->origin_serial && row == s->origin_row : !top)
        return;
    lock_credits(l);
    if (s->thread_number != thread) { /* a thread's stack, given on to another */
        s->thread_number = thread;
        s->n_origins = 0;
    }
    bool room =
        s->n_origins < KOILA__ORIGINS_MAX && koila__grow(&l->mem, &s->origins, &s->origins_capacity,
                                                         s->n_origins + 1, sizeof *s->origins);
    if (!room && s->n_origins) {
        size_t half = s->n_origins / 2;
        memmove(s->origins, s->origins + s->n_origins - half, half * sizeof *s->origins);
        s->n_origins = half;
        room = true;
    }
    if (room) {
        koila_assert(s->n_origins < s->origins_capacity);
        s->origins[s->n_origins++] = (koila__origin){ number, path_now(l, s) };
        s->origin_serial = serial;
        s->origin_row = row;
    }
    unlock_credits(l);
    atomic_fetch_add_explicit(&l->n_made, 1, memory_order_relaxed);
}

static uint32_t path_of_node(const koila__stack *s, uint64_t number)
{
    size_t lo = 0;
    size_t hi = s->n_origins; /* the last origin with first <= number */
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (s->origins[mid].first <= number)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo ? s->origins[lo - 1].path : 0;
}

/* The credit of one row for one profiler, made when there is none; NULL: no memory. pre: locked */
static koila__credit *credit_of(koila__lines *l, koila__func *f, int row, int device)
{
    koila__row *r = &f->rows[row];
    if (!r->credit)
        r->credit = zeroed(l, KOILA__DEVICES_MAX * sizeof *r->credit);
    return r->credit ? &r->credit[device] : NULL;
}

/* pre: locked */
KOILA__HOT static uint32_t path_of_any_node(koila__lines *l, uint64_t thread, uint64_t number)
{
    uint64_t n_made = atomic_load_explicit(&l->n_made, memory_order_relaxed);
    /* a node asks several times */
    if (l->last.n_made == n_made && l->last.thread == thread && l->last.number == number)
        return l->last.path;
    uint32_t path = 0;
    for (int i = 0; i < atomic_load_explicit(&l->meter->n_threads, memory_order_acquire) && !path;
         i++) {
        koila__thread *t = atomic_load_explicit(&l->meter->threads[i], memory_order_acquire);
        const koila__stack *s = t ? t->owner : NULL;
        if (s && s->thread_number == thread)
            path = path_of_node(s, number);
    }
    l->last = (koila__last_credit){ n_made, thread, number, path };
    return path;
}
KOILA__HOT static void credit_path(koila__lines *l, uint32_t path, int device, uint64_t n_bytes)
{
    for (uint32_t p = path; p; p = path_at(l, p)->outer) {
        const koila__path *at = path_at(l, p);
        bool again = !at->code; /* a recursion's row: once */
        for (uint32_t q = path; q != p && !again; q = path_at(l, q)->outer)
            again = path_at(l, q)->code == at->code && path_at(l, q)->row == at->row;
        for (koila__func *f = again ? NULL : at->code->funcs; f; f = f->next) {
            koila__credit *credit = f->wish->enabled ? credit_of(l, f, at->row, device) : NULL;
            if (credit)
                credit->backward += n_bytes;
        }
    }
}

KOILA__HOT void koila__lines_credit_node(koila__lines *l, uint64_t thread, uint64_t number,
                                         int device, uint64_t n_bytes)
{
    lock_credits(l);
    credit_path(l, path_of_any_node(l, thread, number), device, n_bytes);
    unlock_credits(l);
}
koila__origin_path koila__lines_path_of(koila__lines *l, uint64_t thread, uint64_t number)
{
    lock_credits(l);
    koila__origin_path p = { path_of_any_node(l, thread, number), l->n_begun };
    unlock_credits(l);
    return p;
}
void koila__lines_credit_path(koila__lines *l, koila__origin_path path, int device,
                              uint64_t n_bytes)
{
    lock_credits(l);
    if (path.begun == l->n_begun)
        credit_path(l, path.path, device, n_bytes);
    unlock_credits(l);
}

void koila__lines_credit_line(koila__lines *l, const void *key, int line, int device, int64_t delta,
                              uint64_t now)
{
    lock_credits(l);
    koila__code *c = koila__lines_find(l, key);
    int row = c ? row_of(c, line) : -1;
    bool inside = row >= 0 && c->n_open[row];
    for (koila__func *f = row < 0 ? NULL : c->funcs; f; f = f->next) {
        koila__credit *credit = f->wish->enabled ? credit_of(l, f, row, device) : NULL;
        if (!credit)
            continue;
        max_to(&credit->peak, now);
        if (!inside)
            *(delta > 0 ? &credit->alloc : &credit->freed) +=
                (uint64_t)(delta > 0 ? delta : -delta);
    }
    unlock_credits(l);
}

koila__credit koila__row_credit(koila__lines *l, const koila__row *row, int device)
{
    koila__credit credit = { 0 };
    lock_credits(l);
    if (row->credit)
        credit = row->credit[device < 0 ? row->seen_target : device];
    unlock_credits(l);
    return credit;
}

bool koila__stack_check(const koila__lines *l, const koila__stack *s)
{
    if (atomic_load(&s->thread.n_open) != s->n)
        return false;
    for (size_t i = 0; i < s->n; i++) {
        const koila__activation *a = s->activations[i];
        if (a->row >= a->code->n_rows || (a->row >= 0 && a->code->n_open[a->row] == 0))
            return false;
        if (koila__lines_find(l, a->code->key) != a->code)
            return false;
    }
    return true;
}
