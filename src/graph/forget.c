/* forget.c — drops the entries of a table that nothing names any more.
 *
 * Every living graph is in the table's list, so what graphs name is found without their owners:
 * signatures of nodes, metas of values, texts of names and lines. What a signature names is kept
 * with it: metas, texts, opaque arguments, and the view calls through which it writes. Whoever
 * holds ids elsewhere names them in `keep`.
 *
 * First everything is marked, and room for the free ids is made. From there on nothing can fail.
 */
#include "graph/table.h"

/* One bit for each id of a kind. */
typedef struct marks {
    uint64_t *words;
    uint32_t n_ids;
} marks;

struct koila_keeper {
    const koila_table *t;
    marks texts, opaques, metas, sigs;
};

static size_t marks_bytes(uint32_t n_ids) { return (n_ids / 64 + (size_t)1) * sizeof(uint64_t); }

static bool marks_new(const koila_table *t, uint32_t n_ids, marks *out)
{
    *out = (marks){ koila__realloc(&t->mem, NULL, 0, marks_bytes(n_ids)), n_ids };
    if (out->words)
        memset(out->words, 0, marks_bytes(n_ids));
    return out->words != NULL;
}

static void marks_free(const koila_table *t, marks *m)
{
    koila__release(&t->mem, m->words, m->words ? marks_bytes(m->n_ids) : 0);
}

static bool is_marked(const marks *m, uint32_t id) { return m->words[id / 64] >> id % 64 & 1; }

/* True: it was not marked before. */
static bool mark(marks *m, uint32_t id)
{
    if (id >= m->n_ids || is_marked(m, id))
        return false;
    m->words[id / 64] |= 1ull << id % 64;
    return true;
}

/* ---- what is kept */

void koila_keep_text(koila_keeper *k, uint32_t text) { mark(&k->texts, text); }
void koila_keep_opaque(koila_keeper *k, uint32_t opaque) { mark(&k->opaques, opaque); }
void koila_keep_meta(koila_keeper *k, koila_meta meta) { mark(&k->metas, meta); }

static void keep_token(koila_keeper *k, const koila_arg *a)
{
    if (a->kind == KOILA_ARG_TENSOR)
        koila_keep_meta(k, a->u.id);
    else if (a->kind == KOILA_ARG_STR)
        koila_keep_text(k, a->u.id);
    else if (a->kind == KOILA_ARG_OPAQUE)
        koila_keep_opaque(k, a->u.id);
}

void koila_keep_sig(koila_keeper *k, koila_sig sig)
{
    const koila_sig_info *s = koila_sig_get(k->t, sig);
    if (!s || !mark(&k->sigs, sig))
        return;
    for (uint32_t i = 0; i < s->n_tokens; i++)
        keep_token(k, &s->tokens[i]);
    for (uint32_t i = 0; i < s->n_kw; i++)
        koila_keep_text(k, s->kw_names[i]);
    for (uint32_t i = 0; i < s->n_outputs; i++)
        koila_keep_meta(k, s->outputs[i]);
    for (uint32_t w = 0; w < s->n_writes; w++) /* a link writes nothing: this nests once */
        for (uint32_t l = 0; l < s->writes[w].n_links; l++)
            koila_keep_sig(k, s->writes[w].links[l].sig);
}

static void keep_graph(koila_keeper *k, const koila_graph *g)
{
    for (uint32_t n = 0; n < g->nodes.n; n++)
        koila_keep_sig(k, g->nodes.at[n].sig);
    for (uint32_t v = 0; v < g->values.n; v++)
        koila_keep_meta(k, g->values.at[v].meta);
    for (uint32_t i = 0; i < g->leaf_names.n; i++)
        koila_keep_text(k, g->leaf_names.at[i]);
    for (uint32_t i = 0; i < g->lines.n; i++)
        koila_keep_text(k, g->lines.at[i].file);
}

static void keep_named(koila_keeper *k)
{
    for (const koila_graph *g = k->t->graphs; g; g = g->next)
        keep_graph(k, g);
    for (uint32_t i = 0; i < k->t->user_rules.n; i++) {
        koila_keep_text(k, k->t->user_rules.at[i].op);
        koila_keep_text(k, k->t->user_rules.at[i].text);
    }
}

/* ---- what is forgotten */

/* For each id of a kind that lives and is not marked: runs `leave`, and the id is free. There is
 * room for that. */
#define SWEEP(t, kind, marked, leave)                                                              \
    for (uint32_t id = 0; id < (t)->kind.n; id++) {                                                \
        if (!(t)->kind.at[id] || is_marked(&(marked), id))                                         \
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

static bool make_room(koila_table *t, koila_keeper *k)
{
    return marks_new(t, t->texts.n, &k->texts) && marks_new(t, t->opaques.n, &k->opaques) &&
           marks_new(t, t->metas.n, &k->metas) && marks_new(t, t->sigs.n, &k->sigs) &&
           ROOM(t, texts) && ROOM(t, opaques) && ROOM(t, metas) && ROOM(t, sigs);
}

koila_status koila_table_forget(koila_table *t, void (*keep)(void *user, koila_keeper *k),
                                void *user)
{
    koila_keeper k = { .t = t };
    const bool has_room = make_room(t, &k);
    if (has_room) {
        keep_named(&k);
        if (keep)
            keep(user, &k);
        sweep(t, &k);
    }
    marks_free(t, &k.texts);
    marks_free(t, &k.opaques);
    marks_free(t, &k.metas);
    marks_free(t, &k.sigs);
    return has_room ? KOILA_OK : KOILA_NO_MEMORY;
}

uint32_t koila_table_n_known(const koila_table *t)
{
    return t->texts.n - t->free_texts.n + t->opaques.n - t->free_opaques.n + t->metas.n -
           t->free_metas.n + t->sigs.n - t->free_sigs.n;
}
