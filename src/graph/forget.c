/* forget.c — drops the entries of a table that nothing names any more.
 *
 * Every living graph is in the table's list, so what graphs name is found without their owners
 * (keep.c). Whoever holds ids elsewhere names them in `keep`.
 *
 * First everything is marked, and room for the free ids is made. From there on nothing can fail.
 */
#include "graph/keep.h"

/* For each id of a kind that lives and is not marked: runs `leave`, and the id is free. There is
 * room for that. */
#define SWEEP(t, kind, marked, leave)                                                              \
    for (uint32_t id = 0; id < (t)->kind.n; id++) {                                                \
        if (!(t)->kind.at[id] || koila__is_marked(&(marked), id))                                  \
            continue;                                                                              \
        leave;                                                                                     \
        (t)->kind.at[id] = NULL;                                                                   \
        (t)->free_##kind.at[(t)->free_##kind.n++] = id;                                            \
    }

/* An id leaves its set while its entry is whole. A text that leaves is hashed by its neighbours'
 * entries only. */
static void sweep(koila_table *t, const koila_keeper *k)
{
    SWEEP(t, sigs, k->sigs, {
        koila__idset_remove(&t->sig_set, id, koila__sig_hash_of, t);
        koila__table_free_sig(t, t->sigs.at[id]);
    });
    SWEEP(t, metas, k->metas, {
        koila__idset_remove(&t->meta_set, id, koila__meta_hash_of, t);
        koila__table_free_meta(t, t->metas.at[id]);
    });
    SWEEP(t, texts, k->texts, {
        koila__idset_remove(&t->text_set, id, koila__text_hash_of, t);
        koila__table_free_text(t, t->texts.at[id]);
    });
    SWEEP(t, opaques, k->opaques, koila__table_free_text(t, t->opaques.at[id]));
}

/* Room for all ids of a kind to be free. */
#define ROOM(t, kind)                                                                              \
    koila__vec_reserve(&(t)->mem, &(t)->free_##kind, (t)->kind.n - (t)->free_##kind.n)

static bool make_room(koila_table *t)
{
    return ROOM(t, texts) && ROOM(t, opaques) && ROOM(t, metas) && ROOM(t, sigs);
}

koila_status koila_table_forget(koila_table *t, void (*keep)(void *user, koila_keeper *k),
                                void *user)
{
    koila_keeper k;
    const bool has_room = koila__keeper_init(&k, t) && make_room(t);
    if (has_room) {
        for (const koila_graph *g = t->graphs; g; g = g->next)
            koila__keep_graph(&k, g);
        koila__keep_rules(&k);
        if (keep)
            keep(user, &k);
        sweep(t, &k);
    }
    koila__keeper_free(&k);
    return has_room ? KOILA_OK : KOILA_NO_MEMORY;
}

uint32_t koila_table_n_known(const koila_table *t)
{
    return t->texts.n - t->free_texts.n + t->opaques.n - t->free_opaques.n + t->metas.n -
           t->free_metas.n + t->sigs.n - t->free_sigs.n;
}
