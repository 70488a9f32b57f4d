/* cache_undo.c — what if: remember a state, go on, come back. cache_state.h tells how a rewind
 * costs only what changed since. */
#include "allocator/cache_lanes.h"

uint64_t koila_cache_mark(koila_cache *c)
{
    if (!koila__cache_grow(c, &c->marks, &c->marks_cap, c->n_marks + 1, sizeof(mark)))
        return 0;
    c->n_marks++;
    if (!koila__cache_reserve(c)) {
        c->n_marks--;
        return 0;
    }
    c->marks[c->n_marks - 1] = (mark){ c->next_mark, c->log_n, c->s };
    c->epoch++;
    return c->next_mark++;
}

static uint32_t mark_find(const koila_cache *c, uint64_t id)
{
    for (uint32_t i = c->n_marks; i > 0; i--)
        if (c->marks[i - 1].id == id)
            return i;
    return 0;
}

koila_status koila_cache_rewind(koila_cache *c, uint64_t id)
{
    uint32_t m = mark_find(c, id);
    if (!m)
        return KOILA_BAD_ARGUMENT;
    const mark *to = &c->marks[m - 1];
    koila_assert(m <= c->n_marks && to->log_at <= c->log_n);
    while (c->log_n > to->log_at) {
        const uint64_t head = c->log[--c->log_n];
        const uint64_t index = head & (((uint64_t)1 << 56) - 1);
        uint64_t addr;
        uint32_t root;
        saved_pool sp;
        pool *p;
#define POP(p, type) (c->log_n -= WORDS(type), (void)memcpy((p), c->log + c->log_n, sizeof(type)))
        switch (head >> 56) {
        case LOG_BLOCK:
            POP(&c->blocks[index], block);
            break;
        case LOG_SEG:
            POP(&c->segs[index], segment);
            break;
        case LOG_USE:
            POP(&c->uses[index], use);
            break;
        case LOG_HASHED:
            POP(&addr, uint64_t);
            hash_drop_raw(c, addr);
            break;
        case LOG_UNHASHED:
            POP(&addr, uint64_t);
            hash_put_raw(c, addr, (uint32_t)index);
            break;
        case LOG_ROOT:
            POP(&root, uint32_t);
            set_root_raw(c->lanes[index >> 12], index & 4095, root);
            break;
        default:
            POP(&sp, saved_pool);
            p = &c->pools[index];
            p->n_holders = sp.n_holders;
            p->flags = sp.flags;
            p->n_segments = sp.n_segments;
            memcpy(p->n_searches, sp.n_searches, sizeof sp.n_searches);
        }
#undef POP
    }
    koila_assert(c->log_n == to->log_at);
    c->s = to->s;
    c->n_marks = m;
    /* tags of this epoch were restored to older ones, or belong to slots that do not exist any more
     */
    c->epoch++;
    koila_check(koila__cache_check(c));
    return KOILA_OK;
}

koila_status koila_cache_forget(koila_cache *c, uint64_t id)
{
    uint32_t m = mark_find(c, id);
    if (!m)
        return KOILA_BAD_ARGUMENT;
    c->n_marks = m - 1;
    if (!c->n_marks)
        c->log_n = 0;
    return KOILA_OK;
}
