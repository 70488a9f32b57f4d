/* Any sequence of blocks as a timeline: what is live, and when most was, against adding up by hand;
 * and its page, with any names. */
#include <stdlib.h>
#include <string.h>

#include "memory/history.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define MUST(x)                                                                                    \
    do                                                                                             \
        if (!(x))                                                                                  \
            abort();                                                                               \
    while (0)

/* Addresses in a row would never meet in a multiplicative hash table. These do: eight each in one
 * slot, up to 4096 slots. */
enum { N_BLOCKS = 32 };
static void *address(size_t k) { return (void *)(uintptr_t)((k / 4 + 1) << 36 | (k % 4 + 1) * 64); }
static size_t block_at(const void *p)
{
    return ((uintptr_t)p >> 36) * 4 - 4 + ((uintptr_t)p & 0xffff) / 64 - 1;
}

static const char *name(void *user, uint32_t group) { return ((char (*)[24])user)[group]; }

/* Whole because the model is a running sum beside the events that it checks. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    enum { N_NAMES = 4 };
    if (n < 2)
        return 0;
    char names[N_NAMES][24] = { "" };
    size_t at = 2;
    for (int i = 0; i < N_NAMES; i++)
        for (size_t k = 0; k < sizeof names[i] - 1 && at < n; k++)
            if (!(names[i][k] = (char)data[at++]))
                break;
    koila__history h;
    koila__history_init(&h, data[0] & 64 ? 20 : 100000, NULL);
    size_t n_first = data[1] % 16, n_added = 0;
    uint64_t ns = 1000;
    for (; at + 4 <= n; at += 4) {
        const uint8_t *b = data + at;
        if (n_added++ == n_first)
            koila__history_begin(&h);
        bool frees = n_added > n_first && b[0] & 1;
        int64_t bytes = (int64_t)(b[1] + 1) << (b[0] >> 1) % 20;
        ns += b[2] & 8 ? (uint64_t)b[2] << b[2] % 16 : -(uint64_t)(b[2] % 8);
        koila__history_add(&h, ns, address(b[3] % N_BLOCKS), frees ? -bytes : bytes,
                           b[2] % N_NAMES);
    }
    if (n_added <= n_first)
        koila__history_begin(&h);
    MUST(koila__history_solve(&h) == KOILA_OK);
    /* by address; a block handed out again had a free that was missed */
    uint64_t held = 0, start = 0, peak = 0, live[N_BLOCKS] = { 0 };
    for (size_t i = 0; i < h.n; i++) {
        const koila__event *e = &h.events[i];
        if (i == h.n_first)
            start = held;
        size_t k = block_at(e->p);
        size_t o = h.other[i];
        MUST(e->n_bytes > 0 || live[k]);
        held -= live[k];
        live[k] = e->n_bytes > 0 ? (uint64_t)e->n_bytes : 0;
        held += live[k];
        MUST(!i || e->ns >= e[-1].ns);
        MUST(o == SIZE_MAX || (o < h.n && h.events[o].p == e->p &&
                               (e->n_bytes > 0 ? o > i : o < i && h.other[o] == i)));
        if (i >= h.n_first && held > peak)
            peak = held;
    }
    if (h.n_first >= h.n)
        start = held;
    MUST(h.end == held && h.start == start && h.peak == (peak > start ? peak : start));
    uint64_t at_peak = 0;
    for (size_t i = 0; h.peak_at != SIZE_MAX && i < h.n; i++)
        if (koila__history_is_live(&h, i, h.peak_at))
            at_peak += (uint64_t)h.events[i].n_bytes;
    MUST(h.peak_at == SIZE_MAX ? !h.peak : at_peak == h.peak);
    uint32_t groups[N_NAMES] = { 0, 1, 2, 3 };
    koila__text out;
    koila__text_init(&out, NULL);
    MUST(koila__history_body(&h, groups, N_NAMES, name, names, &out) == KOILA_OK);
    int open = 0;
    for (const char *s = out.s; *s; s++) {
        MUST(*s != '<' || !open);
        if (*s == '<' || *s == '>')
            open = *s == '<';
    }
    koila__text_deinit(&out);
    koila__history_deinit(&h);
    return 0;
}
