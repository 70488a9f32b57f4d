/* bench_cache.c — events per second of the cache on training-shaped streams, in memory, a few
 * thousand live blocks.
 *
 *   step     forward keeps activations and drops temporaries, backward frees in reverse, optimizer
 *            state stays: exact same sizes each step
 *   random   the long sequence of docs/allocator.md's vectors, without limits
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "koila/koila.h"

static double now(void)
{
    struct timespec t;
    /* of the processor: others may share the machine */
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t splitmix(uint64_t *s)
{
    uint64_t z = *s += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static uint64_t events(const koila_cache *c)
{
    koila_cache_stat s = { 0 };
    koila_cache_stats(c, &s);
    return s.n_events;
}

enum { N_LAYERS = 400, PER_LAYER = 6 };

static void step(koila_cache *c, const uint64_t *size)
{
    static uint64_t kept[N_LAYERS][PER_LAYER];
    uint64_t temp[2], grad = 0, next;
    for (int i = 0; i < N_LAYERS; i++) {
        koila_cache_malloc(c, size[i], 0, KOILA_POOL_DEFAULT, &temp[0]);
        for (int k = 0; k < PER_LAYER; k++)
            koila_cache_malloc(c, size[i * PER_LAYER + k], 0, KOILA_POOL_DEFAULT, &kept[i][k]);
        koila_cache_malloc(c, 4 * size[i], 0, KOILA_POOL_DEFAULT, &temp[1]);
        koila_cache_release(c, temp[0]);
        koila_cache_release(c, temp[1]);
    }
    for (int i = N_LAYERS; i-- > 0;) {
        koila_cache_malloc(c, size[i], 0, KOILA_POOL_DEFAULT, &next);
        for (int k = 0; k < PER_LAYER; k++) {
            koila_cache_malloc(c, size[i * PER_LAYER + k], 0, KOILA_POOL_DEFAULT, &temp[0]);
            koila_cache_release(c, kept[i][k]);
            koila_cache_release(c, temp[0]);
        }
        koila_cache_release(c, grad);
        grad = next;
    }
    koila_cache_release(c, grad);
}

int main(void)
{
    koila_cache_config conf;
    koila_cache *c;
    static uint64_t size[N_LAYERS * PER_LAYER], live[1 << 16];
    uint64_t seed = 1, n_live = 0;
    for (int i = 0; i < N_LAYERS * PER_LAYER; i++) {
        uint64_t u = splitmix(&seed);
        uint64_t x = splitmix(&seed);
        size[i] = u % 10 < 3   ? 4 + x % 4096
                  : u % 10 < 6 ? 4096 + x % 1000000
                               : 1000000 + x % 30000000;
    }
    koila_cache_config_init(&conf, NULL);

    koila_cache_new(&conf, NULL, &c, NULL);
    /* parameters */
    for (int i = 0; i < 2000; i++)
        koila_cache_malloc(c, size[i], 0, KOILA_POOL_DEFAULT, &live[0]);
    for (int i = 0; i < 3; i++)
        step(c, size);
    double t = now();
    uint64_t n = events(c);
    int steps = 0;
    for (; now() - t < 2.0; steps++)
        step(c, size);
    double seconds = now() - t;
    printf("step     %6.1f M events/s   (%d steps of %llu events)\n",
           (double)(events(c) - n) / seconds / 1e6, steps,
           (unsigned long long)((events(c) - n) / (uint64_t)steps));

    t = now();
    uint64_t n0 = events(c);
    for (steps = 0; now() - t < 1.0; steps++) {
        uint64_t mark = koila_cache_mark(c);
        step(c, size);
        koila_cache_rewind(c, mark);
        koila_cache_forget(c, mark);
    }
    seconds = now() - t;
    printf("what-if  %6.3f ms per step with mark and rewind\n", seconds * 1e3 / steps);
    if (events(c) != n0)
        return 1;
    koila_cache_free(c);

    koila_cache_new(&conf, NULL, &c, NULL);
    t = now();
    for (int i = 0; i < 3000000; i++) {
        uint64_t u = splitmix(&seed), addr;
        if (u % 100 < (n_live < 4000 ? 60 : 45) || !n_live) {
            uint64_t w = splitmix(&seed);
            uint64_t x = splitmix(&seed);
            uint64_t k = w % 10;
            uint64_t bytes = k < 3   ? 1 + x % 4096
                             : k < 5 ? 1 + x % 2097152
                             : k < 8 ? 1048576 + x % 11534336
                                     : 10485760 + x % 83886080;
            if (!koila_cache_malloc(c, bytes, (w >> 32) % 4 == 3 ? 7 : 0, KOILA_POOL_DEFAULT,
                                    &addr))
                live[n_live++] = addr;
        } else {
            size_t at = (size_t)(splitmix(&seed) % n_live);
            addr = live[at];
            live[at] = live[--n_live];
            koila_cache_release(c, addr);
        }
    }
    seconds = now() - t;
    printf("random   %6.1f M events/s   (%llu live at the end)\n",
           (double)events(c) / seconds / 1e6, (unsigned long long)n_live);
    koila_cache_free(c);
    return 0;
}
