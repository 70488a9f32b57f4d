/* table.h — the insides of koila_table and koila_graph, for the core's own hot loops. The rest of
 * src/ may read them; only table.c and graph.c write. */
#ifndef KOILA_SRC_TABLE_H
#define KOILA_SRC_TABLE_H

#include "koila/graph.h"
#include "base/idset.h"
#include "base/vec.h"

typedef struct koila__op {
    const char *name;
    /* the functional twin's name of an in-place operator, else the operator's own */
    const char *twin;
    uint32_t flags;
    uint32_t facts;
    uint32_t line; /* of ops.def, or KOILA_NONE */
    /* it may keep a tensor that it is given or makes, which nobody is told of: an operator of a
     * program's, or a module that runs as it is, whose backward reads what it kept */
    bool is_foreign;
} koila__op;

typedef struct koila__user_rule {
    uint32_t op, text; /* texts */
} koila__user_rule;

struct koila_table {
    koila_allocator mem;
    koila__arena arena; /* of the operators; every other entry is one block of its own */
    VEC(koila__op) ops;
    /* by id; NULL: forgotten, and its id is free */
    VEC(char *) texts;
    VEC(char *) opaques;
    VEC(koila_meta_info *) metas;
    VEC(koila_sig_info *) sigs;
    VEC(uint32_t) free_texts, free_opaques, free_metas, free_sigs; /* ids to give again */
    VEC(koila__user_rule) user_rules;                              /* rules_custom.c */
    koila_graph *graphs; /* all living graphs of this table, linked by `next` */
    koila__idset op_set, text_set, meta_set, sig_set;
    koila__idset op_lines; /* the lines of ops.def, by name */
};

typedef struct koila__line {
    uint32_t file; /* text */
    uint32_t number;
} koila__line;

struct koila_graph {
    koila_allocator mem;
    koila_table *table;              /* borrowed */
    struct koila_graph *next, *prev; /* of table->graphs */
    VEC(koila_node_info) nodes;
    VEC(koila_value) inputs;
    VEC(koila_value_info) values;
    /* by value id, KOILA_NONE when none; only as long as the last named leaf */
    VEC(uint32_t) leaf_names;
    VEC(int64_t) axes;
    VEC(koila_drop) drops;    /* n_nodes never falls */
    VEC(koila_stored) stored; /* by value id; only as long as the last that was told */
    VEC(koila__line) lines;
    koila__idset line_set;
    uint64_t axes_hash, hash; /* of the axes, and of the rest: an axis may be added at any time */
};

static inline const koila_meta_info *koila__meta(const koila_table *t, koila_meta m)
{
    koila_assert(m < t->metas.n && t->metas.at[m]);
    return t->metas.at[m];
}
static inline const koila_sig_info *koila__sig(const koila_table *t, koila_sig s)
{
    koila_assert(s < t->sigs.n && t->sigs.at[s]);
    return t->sigs.at[s];
}
static inline const koila_sig_info *koila__node_sig(const koila_graph *g, koila_node n)
{
    return koila__sig(g->table, g->nodes.at[n].sig);
}
static inline const koila_meta_info *koila__value_meta(const koila_graph *g, koila_value v)
{
    return koila__meta(g->table, g->values.at[v].meta);
}
/* Of an operator of the table. */
static inline uint32_t koila__flags_of_op(const koila_table *t, koila_op op)
{
    koila_assert(op < t->ops.n);
    return t->ops.at[op].flags;
}
static inline uint32_t koila__facts_of_op(const koila_table *t, koila_op op)
{
    koila_assert(op < t->ops.n);
    return t->ops.at[op].facts;
}
/* x + y of two tensors. */
static inline bool koila__adds_two(const koila_table *t, const koila_sig_info *s)
{
    return (koila__facts_of_op(t, s->op) & KOILA_FACT_ADDS) && s->n_inputs == 2 &&
           s->n_outputs == 1 && !s->n_writes && !s->n_kw && s->n_pos == 2;
}
/* Does a call read its input i? The base of an overwriting write is only a place: nobody makes it
 * for that, and nobody waits for it. */
static inline bool koila__reads(const koila_sig_info *s, uint32_t i)
{
    bool is_base = false;
    for (uint32_t k = 0; k < s->n_writes; k++) {
        if (s->writes[k].input != i)
            continue;
        if (!s->writes[k].overwrites)
            return true;
        is_base = true;
    }
    return !is_base;
}

/* Makes room for so many more; false when the host is out of memory. */
bool koila__graph_reserve(koila_graph *g, uint32_t n_nodes, uint32_t n_inputs, uint32_t n_values);

/* Into a graph of the same table: leaf v, with its name; and the source lines, under the same
 * numbers, where there are none yet. Expected: NO_MEMORY; BAD_ARGUMENT when an axis is missing. */
koila_status koila__graph_copy_leaf(koila_graph *to, const koila_graph *from, koila_value v,
                                    koila_value *out);
koila_status koila__graph_copy_lines(koila_graph *to, const koila_graph *from);

static inline uint64_t koila__hash_text(const char *s)
{
    uint64_t h = 1469598103934665603u; /* FNV-1a 64 */
    for (; *s; s++)
        h = (h ^ (unsigned char)*s) * 1099511628211u;
    return koila__mix(h, 0);
}

/* ---- table.c, for forget.c and copy.c: the hash of what an id stands for; an entry's block is
 * given back; a copy of an entry of any table, for `t` (NULL: no memory) */

uint64_t koila__text_hash_of(const void *table, uint32_t id);
uint64_t koila__meta_hash_of(const void *table, uint32_t id);
uint64_t koila__sig_hash_of(const void *table, uint32_t id);
void koila__table_free_text(const koila_table *t, char *text);
void koila__table_free_meta(const koila_table *t, koila_meta_info *m);
void koila__table_free_sig(const koila_table *t, koila_sig_info *s);
char *koila__table_copy_text(const koila_table *t, const char *text);
koila_meta_info *koila__table_copy_meta(const koila_table *t, const koila_meta_info *m);
koila_sig_info *koila__table_copy_sig(const koila_table *t, const koila_sig_info *s);

/* ---- ops.c: the lines of ops.def */

/* Fills op_lines; false: no memory. */
bool koila__op_lines_init(koila_table *t);
/* Fills in the twin, the facts and the line of an operator with a name and flags; false: no memory.
 */
bool koila__op_fill_in(koila_table *t, koila__op *op);

#endif
