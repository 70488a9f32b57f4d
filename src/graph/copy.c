/* copy.c — a graph over a table of its own, which another thread may read and fill while the
 * graph's table goes on growing here. It has what the graph names, under the same ids, so that
 * nodes and signatures are copied as they are; the ids between are free there, as if their entries
 * had been forgotten. */
#include "graph/keep.h"

/* ---- the table */

#define ROOM(to, from, kind)                                                                       \
    (koila__vec_reserve(&(to)->mem, &(to)->kind, (from)->kind.n) &&                                \
     koila__vec_reserve(&(to)->mem, &(to)->free_##kind, (from)->kind.n))

/* From here on only the entries themselves need memory. */
static bool make_room(koila_table *to, const koila_table *from)
{
    return ROOM(to, from, texts) && ROOM(to, from, opaques) && ROOM(to, from, metas) &&
           ROOM(to, from, sigs) &&
           koila__vec_reserve(&to->mem, &to->user_rules, from->user_rules.n) &&
           koila__idset_init(&to->mem, &to->text_set, from->text_set.n) &&
           koila__idset_init(&to->mem, &to->meta_set, from->meta_set.n) &&
           koila__idset_init(&to->mem, &to->sig_set, from->sig_set.n);
}

static bool copy_ops(koila_table *to, const koila_table *from)
{
    for (uint32_t i = 0; i < from->ops.n; i++) {
        koila_op op;
        if (koila_table_op(to, from->ops.at[i].name, from->ops.at[i].flags, &op) != KOILA_OK)
            return false;
        koila_assert(op == i);
    }
    return true;
}

/* For each id of a kind, in order: its entry is copied and `enter` runs, or it is free. `ok` turns
 * false where there is no memory. */
#define COPY(to, from, kind, marked, copy_of, enter)                                               \
    for (uint32_t id = 0; ok && id < (from)->kind.n; id++) {                                       \
        (to)->kind.at[(to)->kind.n++] = NULL;                                                      \
        if (!koila__is_marked(&(marked), id)) {                                                    \
            (to)->free_##kind.at[(to)->free_##kind.n++] = id;                                      \
            continue;                                                                              \
        }                                                                                          \
        (to)->kind.at[id] = copy_of((to), (from)->kind.at[id]);                                    \
        ok = (to)->kind.at[id] != NULL;                                                            \
        if (ok)                                                                                    \
            enter;                                                                                 \
    }

/* False: no memory. */
static bool copy_table(koila_table *to, const koila_table *from, const koila_keeper *k)
{
    bool ok = make_room(to, from) && copy_ops(to, from);
    COPY(to, from, texts, k->texts, koila__table_copy_text,
         koila__idset_insert(&to->text_set, koila__text_hash_of(to, id), id));
    COPY(to, from, opaques, k->opaques, koila__table_copy_text, (void)0);
    COPY(to, from, metas, k->metas, koila__table_copy_meta,
         koila__idset_insert(&to->meta_set, koila__meta_hash_of(to, id), id));
    COPY(to, from, sigs, k->sigs, koila__table_copy_sig,
         koila__idset_insert(&to->sig_set, koila__sig_hash_of(to, id), id));
    for (uint32_t i = 0; ok && i < from->user_rules.n; i++)
        to->user_rules.at[to->user_rules.n++] = from->user_rules.at[i];
    return ok;
}

/* A table with what `g` names. */
static koila_status table_of(const koila_graph *g, const koila_allocator *mem, koila_table **out)
{
    koila_keeper k;
    koila_status status = koila_table_new(mem, out);
    if (status != KOILA_OK)
        return status;
    status = KOILA_NO_MEMORY;
    if (koila__keeper_init(&k, g->table)) {
        koila__keep_graph(&k, g);
        koila__keep_rules(&k);
        if (copy_table(*out, g->table, &k))
            status = KOILA_OK;
    }
    koila__keeper_free(&k);
    if (status != KOILA_OK)
        koila_table_free(*out);
    return status;
}

/* ---- the graph */

#define COPY_ARRAY(to, from, array)                                                                \
    do {                                                                                           \
        if (!koila__vec_reserve(&(to)->mem, &(to)->array, (from)->array.n))                        \
            return KOILA_NO_MEMORY;                                                                \
        if ((from)->array.n)                                                                       \
            memcpy((to)->array.at, (from)->array.at, (from)->array.n * sizeof *(to)->array.at);    \
        (to)->array.n = (from)->array.n;                                                           \
    } while (0)

static koila_status copy_arrays(koila_graph *to, const koila_graph *from)
{
    COPY_ARRAY(to, from, nodes);
    COPY_ARRAY(to, from, inputs);
    COPY_ARRAY(to, from, values);
    COPY_ARRAY(to, from, leaf_names);
    COPY_ARRAY(to, from, axes);
    COPY_ARRAY(to, from, drops);
    COPY_ARRAY(to, from, stored);
    to->axes_hash = from->axes_hash;
    to->hash = from->hash;
    for (uint32_t i = 0; i < from->lines.n; i++) {
        uint32_t line;
        KOILA_TRY(
            koila_graph_line(to, koila_graph_line_file(from, i), from->lines.at[i].number, &line));
        koila_assert(line == i);
    }
    return KOILA_OK;
}

koila_status koila_graph_copy(const koila_graph *g, const koila_allocator *mem, koila_graph **out)
{
    koila_table *t;
    koila_graph *copy = NULL;
    KOILA_TRY(table_of(g, mem, &t));
    koila_status status = koila_graph_new(t, mem, &copy);
    if (status == KOILA_OK)
        status = copy_arrays(copy, g);
    if (status != KOILA_OK) {
        koila_graph_free(copy);
        koila_table_free(t);
        return status;
    }
    koila_assert(koila_graph_check(copy, NULL));
    *out = copy;
    return KOILA_OK;
}

void koila_graph_copy_free(koila_graph *copy)
{
    koila_table *t = copy ? copy->table : NULL;
    koila_graph_free(copy);
    koila_table_free(t);
}
