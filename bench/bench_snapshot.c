/* bench_snapshot.c — how fast a recording is read and replayed, and with how much memory. The
 * recording is made here, in torch's style: one MARK for the trace, keys and frames from the memo;
 * 50 bytes an entry without stacks, 110 with 12 frames.
 *   bench_snapshot [millions of entries] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "koila/koila.h"

static double now(void)
{
    struct timespec t;
    /* of the processor: others may share the machine */
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct out {
    uint8_t *p;
    size_t n, cap;
} out;
static void add(out *o, const void *p, size_t n)
{
    if (o->n + n > o->cap) {
        o->cap = 2 * (o->n + n) + 4096;
        o->p = realloc(o->p, o->cap);
        if (!o->p)
            exit(1);
    }
    memcpy(o->p + o->n, p, n);
    o->n += n;
}
static void byte(out *o, int c) { add(o, &(uint8_t){ (uint8_t)c }, 1); }
static unsigned n_memo;
static void str(out *o, const char *s)
{
    uint32_t n = (uint32_t)strlen(s);
    byte(o, 'X');
    add(o, &n, 4);
    add(o, s, n);
    byte(o, 'q');
    byte(o, (int)n_memo++);
}
static void get(out *o, unsigned i)
{
    byte(o, 'h');
    byte(o, (int)i);
}
static void num(out *o, uint64_t v)
{
    if (v < 256) {
        byte(o, 'K');
        byte(o, (int)v);
    } else if (v < 1u << 31) {
        byte(o, 'J');
        add(o, &v, 4);
    } else {
        byte(o, 0x8a);
        byte(o, 8);
        add(o, &v, 8);
    }
}

enum {
    ACTION,
    ADDR,
    SIZE,
    STREAM,
    FRAMES,
    ALLOC,
    FREE_REQUESTED,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    N_WORDS
};

typedef struct writing {
    out o;
    unsigned frames;
    uint64_t n;
} writing;

static void put_entry(void *user, const koila_event *e)
{
    writing *w = user;
    out *o = &w->o;
    static const int word[] = { 0,           ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC,
                                SEGMENT_FREE };
    byte(o, '}');
    byte(o, '(');
    get(o, ACTION);
    get(o, (unsigned)word[e->kind]);
    get(o, ADDR);
    num(o, e->addr);
    get(o, SIZE);
    num(o, e->size);
    get(o, STREAM);
    num(o, e->stream);
    get(o, FRAMES);
    byte(o, ']');
    byte(o, '(');
    for (unsigned i = 0; i < w->frames; i++) { /* five bytes each, as torch's long memo gets */
        uint32_t slot = N_WORDS + 3 + (uint32_t)((w->n + i * 7) % 40);
        byte(o, 'j');
        add(o, &slot, 4);
    }
    byte(o, 'e');
    byte(o, 'u');
    w->n++;
}

static void bench(uint64_t n_entries, unsigned frames)
{
    writing w = { .frames = frames };
    out *o = &w.o;
    static const char *const words[] = { "action",         "addr",           "size",
                                         "stream",         "frames",         "alloc",
                                         "free_requested", "free_completed", "segment_alloc",
                                         "segment_free" };
    n_memo = 0;
    add(o, "\x80\x02}(", 4);
    /* a list under a key nobody knows fills the memo */
    byte(o, 'X');
    add(o, &(uint32_t){ 4 }, 4);
    add(o, "memo", 4);
    add(o, "](", 2);
    for (int i = 0; i < N_WORDS; i++)
        str(o, words[i]);
    str(o, "name");
    str(o, "filename");
    str(o, "line");
    for (unsigned i = 0; i < 40; i++) {
        char name[32], file[64];
        snprintf(name, sizeof name, "forward_%u", i);
        snprintf(file, sizeof file, "/home/user/project/model/layer_%u.py", i);
        uint32_t a = (uint32_t)strlen(name);
        uint32_t b = (uint32_t)strlen(file);
        add(o, "}", 1);
        byte(o, 'q');
        byte(o, (int)n_memo++);
        byte(o, '(');
        get(o, N_WORDS);
        byte(o, 'X');
        add(o, &a, 4);
        add(o, name, a);
        get(o, N_WORDS + 1);
        byte(o, 'X');
        add(o, &b, 4);
        add(o, file, b);
        get(o, N_WORDS + 2);
        num(o, 10 + i);
        byte(o, 'u');
    }
    add(o, "e", 1);
    byte(o, 'X');
    add(o, &(uint32_t){ 8 }, 4);
    add(o, "segments", 8);
    add(o, "]", 1);
    byte(o, 'X');
    add(o, &(uint32_t){ 13 }, 4);
    add(o, "device_traces", 13);
    add(o, "](](", 4);

    koila_cache_config conf;
    koila_cache *c;
    static uint64_t live[4000];
    size_t n_live = 0;
    uint64_t seed = 1;
    koila_cache_config_init(&conf, "2.10");
    koila_cache_new(&conf, NULL, &c, NULL);
    koila_cache_observe(c, put_entry, &w);
    while (w.n < n_entries) { /* steps of a few thousand blocks, freed newest first */
        for (int i = 0; i < 4000; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            uint64_t x = seed >> 33;
            uint64_t bytes = x % 10 < 4   ? 4 + x % 4096
                             : x % 10 < 7 ? 4096 + x % 1000000
                                          : 1000000 + x % 20000000;
            if (!koila_cache_malloc(c, bytes, 0, KOILA_POOL_DEFAULT, &live[n_live]))
                n_live++;
            if (i % 4 == 3)
                koila_cache_release(c, live[--n_live]);
        }
        while (n_live)
            koila_cache_release(c, live[--n_live]);
    }
    koila_cache_empty(c);
    koila_cache_observe(c, NULL, NULL);
    koila_cache_free(c);
    add(o, "eeu.", 4);

    koila_source src = { .struct_size = sizeof src, .data = o->p, .n_bytes = o->n };
    koila_snapshot *s = NULL;
    koila_error e = KOILA_ERROR_INIT;
    double t = now();
    if (koila_snapshot_open(&src, NULL, &s, &e)) {
        printf("%s\n", e.text);
        exit(1);
    }
    double read_s = now() - t;
    koila_replay_result r;
    t = now();
    if (koila_replay(s, 0, &conf, &r, &e))
        exit(1);
    double replay_s = now() - t;
    printf("%2u frames: %llu entries of %.0f B: read %.0f MB/s, %.1f M entries/s, %.2f s; replay "
           "%.1f M entries/s (verdict %d%s%s)\n",
           frames, (unsigned long long)w.n, (double)o->n / (double)w.n, (double)o->n / read_s / 1e6,
           (double)w.n / read_s / 1e6, read_s, (double)w.n / replay_s / 1e6, r.verdict,
           r.reason[0] ? ": " : "", r.reason);
    koila_snapshot_free(s);
    free(o->p);
}

int main(int argc, char **argv)
{
    uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) * 1000000 : 1000000;
    bench(n, 0);
    bench(n, 12);
    bench(n, 30);
    FILE *f = fopen("/proc/self/status", "r");
    char line[256];
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "VmHWM", 5))
            fputs(line, stdout);
    if (f)
        fclose(f);
    return 0;
}
