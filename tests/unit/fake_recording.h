/* fake_recording.h — for tests: runs a random program on a cache and writes what torch would have
 * recorded, as JSON or as a pickle (in torch's own style: everything under one MARK, keys from the
 * memo). */
#ifndef KOILA_TEST_FAKE_RECORDING_H
#define KOILA_TEST_FAKE_RECORDING_H

#include "allocator/cache.h"
#include "harness.h"

typedef struct bytes {
    uint8_t *p;
    size_t n, cap;
} bytes;
static void add(bytes *b, const void *p, size_t n)
{
    if (b->n + n > b->cap) {
        b->cap = 2 * (b->n + n) + 1024;
        b->p = realloc(b->p, b->cap);
    }
    memcpy(b->p + b->n, p, n);
    b->n += n;
}
__attribute__((format(printf, 2, 3))) static void addf(bytes *b, const char *fmt, ...)
{
    char s[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(s, sizeof s, fmt, ap);
    va_end(ap);
    add(b, s, (size_t)n);
}

static const char *const fake_actions[] = { "",
                                            "alloc",
                                            "free_requested",
                                            "free_completed",
                                            "segment_alloc",
                                            "segment_free",
                                            "segment_map",
                                            "segment_unmap",
                                            "oom",
                                            "snapshot" };

typedef struct recording {
    koila_event e[200000];
    size_t n;
    koila_block blocks[20000];
    size_t n_blocks;
    const char *conf; /* PYTORCH_CUDA_ALLOC_CONF */
    bool no_pool_ids;
    /* not NULL: after[i] is what its statistics say when event i is told */
    const koila_cache *watched;
    struct {
        uint64_t allocated, active, reserved;
    } after[2000];
} recording;

static void record_event(void *user, const koila_event *e)
{
    recording *r = user;
    if (r->watched && r->n < KOILA_COUNT(r->after)) {
        koila_cache_stat s = { 0 };
        koila_cache_stats(r->watched, &s);
        r->after[r->n].allocated = s.of[KOILA_STAT_ALLOCATED_BYTES][0].current;
        r->after[r->n].active = s.of[KOILA_STAT_ACTIVE_BYTES][0].current;
        r->after[r->n].reserved = s.of[KOILA_STAT_RESERVED_BYTES][0].current;
    }
    if (r->n < KOILA_COUNT(r->e))
        r->e[r->n++] = *e;
}
static bool record_block(void *user, const koila_block *b)
{
    recording *r = user;
    if (b->state != KOILA_BLOCK_UNMAPPED && r->n_blocks < KOILA_COUNT(r->blocks))
        r->blocks[r->n_blocks++] = *b;
    return true;
}
static void record_end(recording *r, const koila_cache *c)
{
    r->n_blocks = 0;
    CHECK_EQ(koila_cache_walk(c, record_block, r), KOILA_OK);
}

/* ---- a writer of values, JSON or pickle */

typedef struct writer {
    bytes b;
    bool pickle, first;
    int n_keys;
    char keys[64][32];
} writer;

static void w_str(writer *w, const char *s)
{
    if (!w->pickle) {
        addf(&w->b, "\"%s\"", s);
        return;
    }
    for (int i = 0; i < w->n_keys; i++)
        if (!strcmp(w->keys[i], s)) {
            uint8_t get[2] = { 'h', (uint8_t)i };
            add(&w->b, get, 2);
            return;
        }
    uint32_t n = (uint32_t)strlen(s);
    add(&w->b, "X", 1);
    add(&w->b, &n, 4);
    add(&w->b, s, n);
    if (w->n_keys < 64 && n < 32) {
        uint8_t put[2] = { 'q', (uint8_t)w->n_keys };
        add(&w->b, put, 2);
        strcpy(w->keys[w->n_keys++], s);
    }
}
static void w_int(writer *w, uint64_t v)
{
    if (!w->pickle)
        addf(&w->b, "%llu", (unsigned long long)v);
    else if (v < 256)
        add(&w->b, (uint8_t[]){ 'K', (uint8_t)v }, 2);
    else if (v < 1u << 31) {
        add(&w->b, "J", 1);
        add(&w->b, &v, 4);
    } else {
        add(&w->b, (uint8_t[]){ 0x8a, 9 }, 2);
        add(&w->b, &v, 8);
        add(&w->b, "", 1);
    }
}
static void w_open(writer *w, bool dict)
{
    add(&w->b, w->pickle ? (dict ? "}(" : "](") : dict ? "{" : "[", w->pickle ? 2 : 1);
    w->first = true;
}
static void w_close(writer *w, bool dict)
{
    add(&w->b, w->pickle ? (dict ? "u" : "e") : dict ? "}" : "]", 1);
    w->first = false;
}
static void w_item(writer *w)
{
    if (!w->pickle && !w->first)
        add(&w->b, ",", 1);
    w->first = false;
}
static void w_key(writer *w, const char *key)
{
    w_item(w);
    w_str(w, key);
    if (!w->pickle)
        add(&w->b, ":", 1);
}
static void w_pool(writer *w, koila_pool p)
{
    if (!w->pickle)
        addf(&w->b, "[%llu,%llu]", (unsigned long long)p.owner, (unsigned long long)p.id);
    else {
        w_int(w, p.owner);
        w_int(w, p.id);
        add(&w->b, "\x86", 1);
    }
}
static void w_frames(writer *w, int which)
{
    w_key(w, "frames");
    w_open(w, false);
    for (int i = 0; i < 2; i++) {
        w_item(w);
        w_open(w, true);
        w_key(w, "name");
        w_str(w, i ? "step" : "forward");
        w_key(w, "filename");
        w_str(w, "train.py");
        w_key(w, "line");
        w_int(w, (uint64_t)(10 + which % 7 + i));
        w_close(w, true);
    }
    w_close(w, false);
}

/* Entries from `from` on. The caller frees out.p. */
static bytes write_recording(const recording *r, size_t from, bool pickle)
{
    writer w = { .pickle = pickle };
    if (pickle)
        add(&w.b, "\x80\x02", 2);
    w_open(&w, true);
    w_key(&w, "segments");
    w_open(&w, false);
    for (size_t i = 0; i < r->n_blocks;) {
        const koila_block *b = &r->blocks[i];
        size_t end = i;
        uint64_t size = 0, allocated = 0, active = 0;
        for (; end < r->n_blocks && r->blocks[end].segment == b->segment &&
               r->blocks[end].addr == b->addr + size;
             end++) {
            size += r->blocks[end].size;
            allocated += r->blocks[end].state == KOILA_BLOCK_USED ? r->blocks[end].size : 0;
            active += r->blocks[end].state != KOILA_BLOCK_FREE ? r->blocks[end].size : 0;
        }
        w_item(&w);
        w_open(&w, true);
        w_key(&w, "device");
        w_int(&w, 0);
        w_key(&w, "address");
        w_int(&w, b->addr);
        w_key(&w, "total_size");
        w_int(&w, size);
        w_key(&w, "allocated_size");
        w_int(&w, allocated);
        w_key(&w, "active_size");
        w_int(&w, active);
        w_key(&w, "stream");
        w_int(&w, b->stream);
        w_key(&w, "segment_type");
        w_str(&w, b->is_small ? "small" : "large");
        w_key(&w, "segment_pool_id");
        w_pool(&w, b->pool);
        w_key(&w, "is_expandable");
        if (pickle)
            add(&w.b, b->is_expandable ? "\x88" : "\x89", 1);
        else
            addf(&w.b, b->is_expandable ? "true" : "false");
        w_key(&w, "blocks");
        w_open(&w, false);
        for (; i < end; i++) {
            w_item(&w);
            w_open(&w, true);
            w_key(&w, "address");
            w_int(&w, r->blocks[i].addr);
            w_key(&w, "size");
            w_int(&w, r->blocks[i].size);
            w_key(&w, "requested_size");
            w_int(&w, r->blocks[i].requested);
            w_key(&w, "state");
            w_str(&w, r->blocks[i].state == KOILA_BLOCK_FREE   ? "inactive"
                      : r->blocks[i].state == KOILA_BLOCK_USED ? "active_allocated"
                                                               : "active_pending_free");
            w_frames(&w, (int)i);
            w_close(&w, true);
        }
        w_close(&w, false);
        w_close(&w, true);
    }
    w_close(&w, false);
    w_key(&w, "device_traces");
    w_open(&w, false);
    w_item(&w);
    w_open(&w, false);
    for (size_t i = from; i < r->n; i++) {
        const koila_event *e = &r->e[i];
        w_item(&w);
        w_open(&w, true);
        w_key(&w, "action");
        w_str(&w, fake_actions[e->kind]);
        w_key(&w, e->kind == KOILA_EVENT_OOM ? "device_free" : "addr");
        w_int(&w, e->addr);
        w_key(&w, "size");
        w_int(&w, e->size);
        w_key(&w, "stream");
        w_int(&w, e->stream);
        w_key(&w, "time_us");
        w_int(&w, 1000000 + i);
        if (!r->no_pool_ids) {
            w_key(&w, "pool_id");
            w_pool(&w, e->pool);
        }
        w_frames(&w, (int)i);
        w_close(&w, true);
    }
    w_close(&w, false);
    w_close(&w, false);
    w_key(&w, "allocator_settings");
    w_open(&w, true);
    w_key(&w, "PYTORCH_CUDA_ALLOC_CONF");
    w_str(&w, r->conf ? r->conf : "");
    w_key(&w, "expandable_segments");
    w_int(&w, r->conf && strstr(r->conf, "expandable_segments:True") != NULL);
    w_key(&w, "roundup_power2_divisions");
    w_open(&w, true);
    w_key(&w, "1");
    w_int(&w, r->conf && strstr(r->conf, "divisions:4") ? 4 : 0);
    w_key(&w, "2");
    w_int(&w, r->conf && strstr(r->conf, "divisions:4") ? 4 : 0);
    for (int i = 4; i <= 32768; i *= 2) {
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        w_key(&w, key);
        w_int(&w, r->conf && strstr(r->conf, "divisions:4") ? 4 : 0);
    }
    w_close(&w, true);
    w_close(&w, true);
    w_close(&w, true);
    if (pickle)
        add(&w.b, ".", 1);
    return w.b;
}

static uint64_t fake_random(uint64_t *s)
{
    uint64_t z = *s += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* A program on `c`, recorded. */
static void fake_program(recording *r, koila_cache *c, uint64_t seed, int n_ops,
                         unsigned percent_streams)
{
    static uint64_t live[20000];
    size_t n_live = 0;
    koila_cache_observe(c, record_event, r);
    for (int i = 0; i < n_ops; i++) {
        uint64_t u = fake_random(&seed);
        uint64_t x = fake_random(&seed);
        uint64_t addr;
        if (u % 100 < 54 || !n_live) {
            uint64_t k = x % 10;
            uint64_t n = k < 4   ? 1 + (x >> 8) % 4096
                         : k < 6 ? 1 + (x >> 8) % 2097152
                         : k < 9 ? 1048576 + (x >> 8) % 11534336
                                 : 10485760 + (x >> 8) % 60000000;
            if (!koila_cache_malloc(c, n, u >> 40 & 7 ? 0 : 7, KOILA_POOL_DEFAULT, &addr))
                live[n_live++] = addr;
        } else if (u % 100 < 96) {
            size_t at = (size_t)(x % n_live);
            addr = live[at];
            live[at] = live[--n_live];
            if ((u >> 32) % 100 < percent_streams)
                koila_cache_record_stream(c, addr, 9);
            koila_cache_release(c, addr);
        } else if (u % 100 < 98) {
            koila_cache_sync(c);
        } else if (u % 100 < 99) {
            koila_cache_empty(c);
        } else {
            koila_cache_stat s = { 0 };
            koila_cache_stats(c, &s);
            koila_event e = { sizeof e, KOILA_EVENT_SNAPSHOT,
                              0,        s.of[KOILA_STAT_ACTIVE_BYTES][0].current,
                              0,        { 0, 0 } };
            record_event(r, &e);
        }
    }
    koila_cache_observe(c, NULL, NULL);
    record_end(r, c);
}

#endif
