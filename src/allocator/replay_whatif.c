/* replay_whatif.c — the requests of a recording on a device with other limits or settings. Only
 * requests count: addresses are the cache's own. */
#include "allocator/replay.h"

#include "base/base.h"

koila_status koila_whatif(const koila_snapshot *s, uint32_t device, const koila_cache_config *c,
                          koila_whatif_result *out, koila_error *e)
{
    replay r;
    koila_replay_result unused;
    koila_whatif_result w = { .struct_size = (uint32_t)sizeof w,
                              .first_oom_entry = UINT64_MAX,
                              .fits = true };
    omap where = { .mem = s->mem };
    koila_cache *sim = NULL;
    koila_status status = koila__replay_setup(&r, s, device, c, &unused, e);
    if (!status)
        status = koila__replay_begin(&r, e);
    if (!status)
        status = koila_cache_new(c, &r.mem, &sim, e);
    /* blocks live at the start, in address order, into fresh segments */
    for (uint64_t g = 0; !status && g < r.n_start; g++) {
        for (size_t i = 0; i < r.start[g].n_blocks && !status; i++) {
            const koila_block *b = &r.start[g].blocks[i];
            uint64_t addr;
            if (b->state == KOILA_BLOCK_FREE)
                continue;
            w.approximate_start = true;
            status = koila_cache_malloc(sim, b->requested ? b->requested : b->size,
                                        r.start[g].stream, r.start[g].pool, &addr);
            if (status == KOILA_OOM) {
                w.fits = false;
                if (!w.n_ooms++) {
                    w.first_oom_entry = 0;
                    w.first_oom_bytes = b->size;
                }
                status = KOILA_OK;
                continue;
            }
            uint32_t n = status ? 0 : koila__omap_put(&where, b->addr);
            if (n)
                where.at[n].size = addr;
        }
    }
    for (uint64_t i = 0; !status && !where.failed && i < r.n; i++) {
        const snap_entry *x = entry(&r, i);
        uint32_t n = x->kind == KOILA_EVENT_OOM ? 0 : koila__omap_find(&where, x->addr);
        uint64_t addr;
        switch (x->kind) {
        case KOILA_EVENT_ALLOC:
        case KOILA_EVENT_OOM:
            if (n)
                koila__omap_drop(&where, x->addr);
            status = koila_cache_malloc(sim, x->size, x->stream,
                                        x->kind == KOILA_EVENT_OOM ? KOILA_POOL_DEFAULT
                                                                   : koila__replay_pool_at(&r, i),
                                        &addr);
            if (status == KOILA_OOM) {
                w.fits = false;
                if (!w.n_ooms++) {
                    w.first_oom_entry = i;
                    w.first_oom_bytes = x->size;
                }
                status = KOILA_OK;
            } else if (!status && x->kind == KOILA_EVENT_ALLOC &&
                       (n = koila__omap_put(&where, x->addr))) {
                where.at[n].size = addr;
            } else if (!status && x->kind == KOILA_EVENT_OOM) {
                /* it failed then; what the program would have done with it is not recorded */
                status = koila_cache_release(sim, addr);
            }
            break;
        case KOILA_EVENT_FREE_REQUESTED: {
            const snap_entry *next = i + 1 < r.n ? entry(&r, i + 1) : NULL;
            if (!n)
                break;
            if (!(next && next->kind == KOILA_EVENT_FREE_COMPLETED && next->addr == x->addr))
                koila_cache_record_stream(sim, where.at[n].size, ~x->stream);
            status = koila_cache_release(sim, where.at[n].size);
            if (status == KOILA_BAD_ARGUMENT)
                status = KOILA_OK;
            break;
        }
        case KOILA_EVENT_FREE_COMPLETED:
            if (n) {
                koila_cache_complete(sim, where.at[n].size); /* or a retry has done so already */
                koila__omap_drop(&where, x->addr);
            }
            break;
        default:
            break;
        }
    }
    if (where.failed)
        status = KOILA_NO_MEMORY;
    if (status == KOILA_NO_MEMORY)
        koila__fail(e, status, 0, "the host is out of memory");
    if (!status) {
        koila_cache_stats(sim, &w.stat);
        const uint64_t used = c->outside_bytes + w.stat.peak_device_bytes;
        w.spare_bytes = c->total_bytes > used ? c->total_bytes - used : 0;
        *out = w;
    }
    koila_cache_free(sim);
    koila__omap_free(&where);
    koila__replay_teardown(&r);
    return status;
}
