/* Any bytes: a snapshot or a message; what opens replays, and its whole is inside the memory
 * promised. */
#include <stdlib.h>

#include "koila/koila.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void *counting(void *user, void *p, size_t old_n, size_t n)
{
    uint64_t *live = user;
    if (n == 0) {
        if (p)
            *live -= old_n;
        free(p);
        return NULL;
    }
    void *q = realloc(p, n);
    if (q)
        *live += n - (p ? old_n : 0);
    return q;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    uint64_t live = 0;
    koila_limits lim = { .struct_size = sizeof lim, .mem = { counting, &live } };
    koila_source src = { .struct_size = sizeof src, .data = data, .n_bytes = n };
    koila_error e = KOILA_ERROR_INIT;
    koila_snapshot *s = NULL;
    koila_status status = koila_snapshot_open(&src, &lim, &s, &e);
    if (status) {
        if (s || live || !e.text[0] || e.offset > n)
            abort();
        return 0;
    }
    if (live > 32 * (uint64_t)n + (64u << 20))
        abort();
    koila_snapshot_info info;
    koila_snapshot_get_info(s, &info);
    for (uint32_t d = 0; d < info.n_devices && d < 4; d++) {
        koila_replay_result r;
        koila_whatif_result w;
        koila_cache_config c;
        bool exact;
        (void)koila_replay(s, d, NULL, &r, &e);
        (void)koila_timeline(s, d, NULL, NULL, NULL, UINT64_MAX, NULL, NULL, &exact, &e);
        if (!koila_snapshot_config(s, d, NULL, &c, &e)) {
            c.total_bytes = (uint64_t)1 << 30;
            (void)koila_whatif(s, d, &c, &w, &e);
        }
    }
    koila_snapshot_free(s);
    if (live)
        abort();
    return 0;
}
