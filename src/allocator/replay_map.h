/* replay_map.h — an ordered map from addresses to records: a treap, nodes by index, 0 = none. */
#ifndef KOILA_SRC_REPLAY_MAP_H
#define KOILA_SRC_REPLAY_MAP_H

#include "base/alloc.h"
#include "koila/cache.h"

typedef struct node {
    uint64_t key, size, requested, distance, stream;
    uint32_t link[2], pool;
    uint8_t state;                       /* koila_block_state of blocks */
    bool is_small, is_expandable, known; /* known: `size` is from the end state */
} node;
typedef struct omap {
    koila_allocator mem;
    node *at;
    uint32_t n, cap, root, dead;
    bool failed;
} omap;

uint32_t koila__omap_find(const omap *m, uint64_t key);
/* The nearest below (side 0) or above (side 1) a key, never the key itself. */
uint32_t koila__omap_near(const omap *m, uint64_t key, int side);
/* A new record, which must not be there yet; only its key is set. 0: no memory, and m->failed.
 * Moves the others: take pointers afterwards. */
uint32_t koila__omap_put(omap *m, uint64_t key);
void koila__omap_drop(omap *m, uint64_t key);
void koila__omap_clear(omap *m);
void koila__omap_free(omap *m);

#endif
