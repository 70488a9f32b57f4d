/* replay_map.c — a treap whose priorities are a hash of the node's index: its shape does not depend
 * on history. */
#include "allocator/replay_map.h"

#include "base/vec.h"

static uint32_t omap_priority(uint32_t i) { return i * 2654435761u; }
uint32_t koila__omap_find(const omap *m, uint64_t key)
{
    uint32_t i = m->root;
    while (i && m->at[i].key != key)
        i = m->at[i].link[m->at[i].key < key];
    return i;
}
uint32_t koila__omap_near(const omap *m, uint64_t key, int side)
{
    uint32_t best = 0;
    for (uint32_t i = m->root; i;) {
        bool ok = side ? m->at[i].key > key : m->at[i].key < key;
        if (ok)
            best = i;
        i = m->at[i].link[ok ? !side : side];
    }
    return best;
}
uint32_t koila__omap_put(omap *m, uint64_t key)
{
    koila_assert(!koila__omap_find(m, key));
    uint32_t x = m->dead;
    if (x)
        m->dead = m->at[x].link[0];
    else {
        if (m->n + 2 > m->cap &&
            !koila__vec_grow(&m->mem, &m->at, &m->cap, (uint64_t)m->n + 2, sizeof(node))) {
            m->failed = true;
            return 0;
        }
        x = ++m->n;
    }
    m->at[x] = (node){ .key = key };
    uint32_t *link = &m->root;
    while (*link && omap_priority(*link) >= omap_priority(x))
        link = &m->at[*link].link[m->at[*link].key < key];
    uint32_t rest = *link;
    *link = x;
    uint32_t *low = &m->at[x].link[0];
    uint32_t *high = &m->at[x].link[1];
    while (rest) {
        if (m->at[rest].key < key) {
            *low = rest;
            low = &m->at[rest].link[1];
            rest = *low;
        } else {
            *high = rest;
            high = &m->at[rest].link[0];
            rest = *high;
        }
    }
    *low = *high = 0;
    return x;
}
void koila__omap_drop(omap *m, uint64_t key)
{
    uint32_t *link = &m->root;
    while (*link && m->at[*link].key != key)
        link = &m->at[*link].link[m->at[*link].key < key];
    uint32_t x = *link;
    if (!x)
        return;
    uint32_t l = m->at[x].link[0];
    uint32_t r = m->at[x].link[1];
    while (l && r) {
        if (omap_priority(l) >= omap_priority(r)) {
            *link = l;
            link = &m->at[l].link[1];
            l = *link;
        } else {
            *link = r;
            link = &m->at[r].link[0];
            r = *link;
        }
    }
    *link = l ? l : r;
    koila_assert(x <= m->n && m->n < m->cap);
    m->at[x].link[0] = m->dead;
    m->dead = x;
}
void koila__omap_clear(omap *m) { m->n = m->root = m->dead = 0; }
void koila__omap_free(omap *m) { koila__release(&m->mem, m->at, m->cap * sizeof(node)); }
