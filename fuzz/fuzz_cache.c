/* Bytes as a program: settings, segments to start from, then calls. Invariants hold after each; a
 * rewind brings back what was. */
#include <stdlib.h>

#include "allocator/cache.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

typedef struct bytes {
    const uint8_t *p;
    size_t n;
} bytes;
static uint64_t take(bytes *b, unsigned n)
{
    uint64_t v = 0;
    for (unsigned i = 0; i < n; i++) {
        v = v << 8 | (b->n ? *b->p : 0);
        if (b->n) {
            b->p++;
            b->n--;
        }
    }
    return v;
}

/* Whole because each byte is one call, and the calls share the state of the model. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    bytes b = { data, n < 4096 ? n : 4096 };
    koila_cache_config c;
    static const char *const versions[] = { "2.4", "2.6", "2.8", "2.9", "2.10", "2.13" };
    koila_cache_config_init(&c, versions[take(&b, 1) % 6]);
    uint64_t flags = take(&b, 1);
    if (flags & 1)
        c.expandable = 1;
    if (flags & 2)
        c.max_split_bytes = (20 + take(&b, 1)) << 20;
    if (flags & 4)
        c.total_bytes = take(&b, 2) << 20;
    if (flags & 8)
        c.cap_bytes = take(&b, 2) << 20;
    if (flags & 16)
        c.gc_threshold = 0.5;
    if (flags & 32)
        c.completion = KOILA_COMPLETE_BEST;
    if (flags & 64)
        for (int i = 0; i < 16; i++)
            c.divisions[i] = 1u << (take(&b, 1) % 6);
    koila_cache *cache = NULL;
    koila_segment segs[4];
    koila_block blocks[4][6];
    size_t n_segs = flags & 128 ? take(&b, 1) % 5 : 0;
    for (size_t i = 0; i < n_segs; i++) {
        segs[i] = (koila_segment){ KOILA_SEGMENT_SIZES,
                                   take(&b, 3) << 12,
                                   0,
                                   take(&b, 1) & 1,
                                   { 0, take(&b, 1) & 1 },
                                   take(&b, 1) & 1,
                                   take(&b, 1) & 1,
                                   blocks[i],
                                   take(&b, 1) % 7 };
        for (size_t k = 0; k < segs[i].n_blocks; k++) {
            blocks[i][k] = (koila_block){ .addr = segs[i].addr + segs[i].size,
                                          .size = take(&b, 2) << 9,
                                          .state = (koila_block_state)(take(&b, 1) % 5) };
            segs[i].size += blocks[i][k].size;
        }
        if (take(&b, 1) > 250)
            segs[i].size = take(&b, 8);
    }
    if (koila_cache_from_segments(&c, NULL, segs, n_segs, &cache, NULL))
        return 0;
    uint64_t live[64] = { 0 }, mark = 0, print = 0;
    for (size_t i = 0; i < 64 && i < n_segs; i++)
        live[i] = n_segs && segs[i].n_blocks ? blocks[i][0].addr : 0;
    while (b.n) {
        uint64_t op = take(&b, 1);
        uint64_t at = take(&b, 1) % 64;
        uint64_t addr = 0;
        switch (op % 10) {
        case 0:
        case 1:
        case 2:
            if (!koila_cache_malloc(cache, take(&b, 2) << (op >> 4), op >> 7,
                                    (koila_pool){ 0, op >> 6 & 1 }, &addr))
                live[at] = addr;
            break;
        case 3:
        case 4:
            (void)koila_cache_release(cache, live[at]);
            break;
        case 5:
            (void)koila_cache_record_stream(cache, live[at], take(&b, 1));
            break;
        case 6:
            koila_cache_sync(cache);
            break;
        case 7:
            (void)koila_cache_empty(cache);
            break;
        case 8:
            if (!mark) {
                mark = koila_cache_mark(cache);
                print = koila__cache_fingerprint(cache);
            } else {
                if (koila_cache_rewind(cache, mark) || koila__cache_fingerprint(cache) != print)
                    abort();
                koila_cache_forget(cache, mark);
                mark = 0;
            }
            break;
        default:
            if (op & 64)
                koila_cache_set_expandable(cache, op >> 7);
            else if (op & 32)
                (void)koila_cache_complete(cache, live[at]);
            else
                koila_cache_set_capturing(cache, op >> 7, op >> 7);
        }
        if (!koila__cache_check(cache))
            abort();
    }
    koila_cache_free(cache);
    return 0;
}
