/* keep.h — which entries of a table are named: by graphs, by the user's rules, by whoever holds
 * ids. forget.c drops the rest, copy.c leaves it behind. */
#ifndef KOILA_SRC_KEEP_H
#define KOILA_SRC_KEEP_H

#include "graph/table.h"

/* One bit for each id of a kind. */
typedef struct koila__marks {
    uint64_t *words;
    uint32_t n_ids;
} koila__marks;

struct koila_keeper {
    const koila_table *t; /* borrowed */
    koila__marks texts, opaques, metas, sigs;
};

static inline bool koila__is_marked(const koila__marks *m, uint32_t id)
{
    return m->words[id / 64] >> id % 64 & 1;
}

/* Nothing is kept yet. False: no memory; it is to be freed all the same. */
bool koila__keeper_init(koila_keeper *k, const koila_table *t);
void koila__keeper_free(koila_keeper *k);
/* All that the graph names. */
void koila__keep_graph(koila_keeper *k, const koila_graph *g);
/* The texts of koila_table_rule(). */
void koila__keep_rules(koila_keeper *k);

#endif
