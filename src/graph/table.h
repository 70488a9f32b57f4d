/* table.h — the insides of koila_table and koila_graph, for the core's own hot loops. The rest of
 * src/ may read them; only table.c and graph.c write. */
#ifndef KOILA_SRC_TABLE_H
#define KOILA_SRC_TABLE_H

#include "koila/graph.h"
#include "base/vec.h"

/* An open-addressing hash set of ids; the owner compares. Power-of-two slots, at most half full;
 * KOILA_NONE = empty. */
typedef struct koila__idset {
    uint32_t *slot;
    uint32_t n, n_slots;
} koila__idset;

typedef struct koila__op {
    const char *name;
    uint32_t flags;
} koila__op;

typedef struct koila__user_rule {
    uint32_t op, text; /* texts */
} koila__user_rule;

struct koila_table {
    koila_allocator mem;
    koila__arena arena;
    VEC(koila__op) ops;
    VEC(const char *) texts;
    VEC(const char *) opaques;
    VEC(const koila_meta_info *) metas;
    VEC(const koila_sig_info *) sigs;
    VEC(koila__user_rule) user_rules; /* rules_custom.c */
    koila__idset op_set, text_set, meta_set, sig_set;
};

typedef struct koila__line {
    uint32_t file; /* text */
    uint32_t number;
} koila__line;

struct koila_graph {
    koila_allocator mem;
    koila_table *table; /* borrowed */
    VEC(koila_node_info) nodes;
    VEC(koila_value) inputs;
    VEC(koila_value_info) values;
    /* by value id, KOILA_NONE when none; only as long as the last named leaf */
    VEC(uint32_t) leaf_names;
    VEC(int64_t) axes;
    VEC(koila__line) lines;
    koila__idset line_set;
    uint64_t axes_hash, hash; /* of the axes, and of the rest: an axis may be added at any time */
};

static inline const koila_meta_info *koila__meta(const koila_table *t, koila_meta m)
{
    return t->metas.at[m];
}
static inline const koila_sig_info *koila__sig(const koila_table *t, koila_sig s)
{
    return t->sigs.at[s];
}
static inline const koila_sig_info *koila__node_sig(const koila_graph *g, koila_node n)
{
    return g->table->sigs.at[g->nodes.at[n].sig];
}
static inline const koila_meta_info *koila__value_meta(const koila_graph *g, koila_value v)
{
    return g->table->metas.at[g->values.at[v].meta];
}

/* Room for so many more; false when the host is out of memory. */
bool koila__graph_reserve(koila_graph *g, uint32_t n_nodes, uint32_t n_inputs, uint32_t n_values);

static inline uint64_t koila__mix(uint64_t h, uint64_t x)
/* splitmix64's finaliser over a running sum: good enough for tables and plan keys, not against an
 * adversary */
{
    h += x * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    return h ^ (h >> 31);
}

/* Find the id for which same(owner, id, key); KOILA_NONE when absent. */
typedef bool (*koila__same_fn)(const void *owner, uint32_t id, const void *key);
uint32_t koila__idset_find(const koila__idset *s, uint64_t hash, koila__same_fn same,
                           const void *owner, const void *key);
typedef uint64_t (*koila__hash_fn)(const void *owner, uint32_t id);
/* Room for one more id, rehashing when needed. */
bool koila__idset_reserve(const koila_allocator *mem, koila__idset *s, koila__hash_fn hash_of,
                          const void *owner);
/* after reserve; cannot fail */
void koila__idset_insert(koila__idset *s, uint64_t hash, uint32_t id);

#endif
