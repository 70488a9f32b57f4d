/* keep.c — marks what is named in a table (see keep.h). A graph names signatures of nodes, metas of
 * values, texts of names and lines. What a signature names is kept with it: metas, texts, opaque
 * arguments, and the view calls through which it writes. */
#include "graph/keep.h"

static size_t marks_bytes(uint32_t n_ids) { return (n_ids / 64 + (size_t)1) * sizeof(uint64_t); }

static bool marks_new(const koila_table *t, uint32_t n_ids, koila__marks *out)
{
    *out = (koila__marks){ koila__realloc(&t->mem, NULL, 0, marks_bytes(n_ids)), n_ids };
    if (out->words)
        memset(out->words, 0, marks_bytes(n_ids));
    return out->words != NULL;
}

static void marks_free(const koila_table *t, koila__marks *m)
{
    koila__release(&t->mem, m->words, m->words ? marks_bytes(m->n_ids) : 0);
}

/* True: it was not marked before. */
static bool mark(koila__marks *m, uint32_t id)
{
    if (id >= m->n_ids || koila__is_marked(m, id))
        return false;
    m->words[id / 64] |= 1ull << id % 64;
    return true;
}

bool koila__keeper_init(koila_keeper *k, const koila_table *t)
{
    *k = (koila_keeper){ .t = t };
    return marks_new(t, t->texts.n, &k->texts) && marks_new(t, t->opaques.n, &k->opaques) &&
           marks_new(t, t->metas.n, &k->metas) && marks_new(t, t->sigs.n, &k->sigs);
}

void koila__keeper_free(koila_keeper *k)
{
    marks_free(k->t, &k->texts);
    marks_free(k->t, &k->opaques);
    marks_free(k->t, &k->metas);
    marks_free(k->t, &k->sigs);
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

void koila__keep_graph(koila_keeper *k, const koila_graph *g)
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

void koila__keep_rules(koila_keeper *k)
{
    for (uint32_t i = 0; i < k->t->user_rules.n; i++) {
        koila_keep_text(k, k->t->user_rules.at[i].op);
        koila_keep_text(k, k->t->user_rules.at[i].text);
    }
}
