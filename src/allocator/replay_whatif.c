/* replay_whatif.c — the requests of a recording on a device with other limits or settings. Only
 * requests count: addresses are the cache's own. */
#include "allocator/replay.h"

#include "base/base.h"

typedef struct whatif {
    replay r; /* for the state before the first entry */
    koila_cache *sim;
    omap where; /* recorded address -> address in `sim` (size) of the blocks that live there */
    koila_whatif_result w;
} whatif;

#define NOWHERE UINT64_MAX

/* One request of the recording, from entry `i`. Out of memory is counted; *addr is then NOWHERE. */
static koila_status ask(whatif *x, uint64_t i, uint64_t bytes, uint64_t stream, koila_pool pool,
                        uint64_t recorded_bytes, uint64_t *addr)
{
    const koila_status status = koila_cache_malloc(x->sim, bytes, stream, pool, addr);
    if (status != KOILA_OOM)
        return status;
    *addr = NOWHERE;
    x->w.fits = false;
    if (!x->w.n_ooms++) {
        x->w.first_oom_entry = i;
        x->w.first_oom_bytes = recorded_bytes;
    }
    return KOILA_OK;
}

/* Expected: KOILA_NO_MEMORY. */
static koila_status remember(whatif *x, uint64_t recorded, uint64_t addr)
{
    koila_assert(addr != NOWHERE);
    const uint32_t n = koila__omap_put(&x->where, recorded);
    if (!n)
        return KOILA_NO_MEMORY;
    x->where.at[n].size = addr;
    return KOILA_OK;
}

/* Blocks live at the start, in address order, into fresh segments. */
static koila_status ask_for_start(whatif *x)
{
    for (uint64_t g = 0; g < x->r.n_start; g++) {
        const koila_segment *from = &x->r.start[g];
        for (size_t i = 0; i < from->n_blocks; i++) {
            const koila_block *b = &from->blocks[i];
            uint64_t addr;
            if (b->state == KOILA_BLOCK_FREE)
                continue;
            x->w.approximate_start = true;
            KOILA_TRY(ask(x, 0, b->requested ? b->requested : b->size, from->stream, from->pool,
                          b->size, &addr));
            if (addr != NOWHERE)
                KOILA_TRY(remember(x, b->addr, addr));
        }
    }
    return KOILA_OK;
}

static koila_status ask_for_entry(whatif *x, uint64_t i)
{
    const snap_entry *y = entry(&x->r, i);
    const bool oom = y->kind == KOILA_EVENT_OOM;
    uint64_t addr;
    if (!oom)
        koila__omap_drop(&x->where, y->addr);
    KOILA_TRY(ask(x, i, y->size, y->stream,
                  oom ? KOILA_POOL_DEFAULT : koila__replay_pool_at(&x->r, i), y->size, &addr));
    if (addr == NOWHERE)
        return KOILA_OK;
    /* it failed then: what the program would have done with the block is not recorded */
    return oom ? koila_cache_release(x->sim, addr) : remember(x, y->addr, addr);
}

static koila_status free_at_entry(whatif *x, uint64_t i)
{
    const snap_entry *y = entry(&x->r, i);
    const snap_entry *next = i + 1 < x->r.n ? entry(&x->r, i + 1) : NULL;
    const uint32_t n = koila__omap_find(&x->where, y->addr);
    if (!n)
        return KOILA_OK;
    koila_status status = KOILA_OK;
    if (!next || next->kind != KOILA_EVENT_FREE_COMPLETED || next->addr != y->addr)
        status = koila_cache_record_stream(x->sim, x->where.at[n].size, ~y->stream);
    if (status != KOILA_NO_MEMORY)
        status = koila_cache_release(x->sim, x->where.at[n].size);
    return status == KOILA_BAD_ARGUMENT ? KOILA_OK : status;
}

static void complete_at_entry(whatif *x, uint64_t i)
{
    const snap_entry *y = entry(&x->r, i);
    const uint32_t n = koila__omap_find(&x->where, y->addr);
    if (!n)
        return;
    koila_cache_complete(x->sim, x->where.at[n].size); /* or a retry has done so already */
    koila__omap_drop(&x->where, y->addr);
}

static koila_status run_all(whatif *x, const koila_cache_config *c, koila_error *e)
{
    KOILA_TRY(koila__replay_begin(&x->r, e));
    KOILA_TRY(koila_cache_new(c, &x->r.mem, &x->sim, e));
    KOILA_TRY(ask_for_start(x));
    for (uint64_t i = 0; i < x->r.n; i++) {
        switch (entry(&x->r, i)->kind) {
        case KOILA_EVENT_ALLOC:
        case KOILA_EVENT_OOM:
            KOILA_TRY(ask_for_entry(x, i));
            break;
        case KOILA_EVENT_FREE_REQUESTED:
            KOILA_TRY(free_at_entry(x, i));
            break;
        case KOILA_EVENT_FREE_COMPLETED:
            complete_at_entry(x, i);
            break;
        default:
            break;
        }
    }
    return KOILA_OK;
}

koila_status koila_whatif(const koila_snapshot *s, uint32_t device, const koila_cache_config *c,
                          koila_whatif_result *out, koila_error *e)
{
    koila_replay_result unused;
    whatif x = {
        .where = { .mem = s->mem },
        .w = { .struct_size = (uint32_t)sizeof x.w, .first_oom_entry = UINT64_MAX, .fits = true }
    };
    koila_status status = koila__replay_setup(&x.r, s, device, c, &unused, e);
    if (!status)
        status = run_all(&x, c, e);
    if (status == KOILA_NO_MEMORY)
        koila__fail(e, status, 0, "the host is out of memory");
    if (!status) {
        koila_cache_stats(x.sim, &x.w.stat);
        const uint64_t used = c->outside_bytes + x.w.stat.peak_device_bytes;
        x.w.spare_bytes = c->total_bytes > used ? c->total_bytes - used : 0;
        *out = x.w;
    }
    koila_cache_free(x.sim);
    koila__omap_free(&x.where);
    koila__replay_teardown(&x.r);
    return status;
}
