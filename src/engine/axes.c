/* axes.c — the other axes of a recorded step. */
#include "engine/axes.h"

enum { MOST_KINDS = 16 }; /* of axes that are counted */

static bool is_batched(const koila_graph *g, koila_value v)
{
    const koila_value_info *info = &g->values.at[v];
    return info->node == KOILA_NONE && info->meta != KOILA_NONE &&
           info->leaf_kind == KOILA_LEAF_BATCH;
}

/* The first dimension of leaf `v` of that size, its rows apart; KOILA_NONE: it has none. */
static uint32_t dim_of(const koila_graph *g, koila_value v, int64_t size)
{
    const koila_meta_info *m = koila__value_meta(g, v);
    for (uint32_t d = 0; d < m->n_dims; d++)
        if (d != g->values.at[v].dim && m->size[d] == size)
            return d;
    return KOILA_NONE;
}

static bool is_likelier(const koila__axis *a, const koila__axis *b)
{
    return a->n_leaves != b->n_leaves ? a->n_leaves > b->n_leaves : a->size > b->size;
}

/* One more leaf has an axis. */
static void count(koila__axis *kinds, uint32_t *n, int64_t size, uint32_t dim)
{
    uint32_t i = 0;
    while (i < *n && kinds[i].size != size)
        i++;
    if (i == MOST_KINDS)
        return;
    if (i == *n)
        kinds[(*n)++] = (koila__axis){ .size = size, .dim = dim };
    kinds[i].n_leaves++;
}

uint32_t koila__axes_find(const koila_graph *g, koila__axis out[KOILA__MOST_AXES])
{
    koila__axis kinds[MOST_KINDS];
    uint32_t n = 0;
    uint32_t n_out = 0;
    int64_t longest = 0;
    for (koila_value v = 0; v < g->values.n; v++) {
        const koila_meta_info *m = is_batched(g, v) ? koila__value_meta(g, v) : NULL;
        for (uint32_t d = 0; m && d < m->n_dims; d++)
            if (m->size[d] > 1 && dim_of(g, v, m->size[d]) == d)
                count(kinds, &n, m->size[d], d);
    }
    for (uint32_t i = 0; i < n; i++)
        longest = kinds[i].size > longest ? kinds[i].size : longest;
    while (n_out < KOILA__MOST_AXES) { /* the likeliest of what is left */
        koila__axis *best = NULL;
        for (uint32_t i = 0; i < n; i++)
            if (kinds[i].n_leaves && kinds[i].size > longest / KOILA__SHORT_AXIS &&
                (!best || is_likelier(&kinds[i], best)))
                best = &kinds[i];
        if (!best)
            break;
        out[n_out++] = *best;
        best->n_leaves = 0;
    }
    return n_out;
}

koila_status koila__axes_view(const koila_graph *g, int64_t size, const koila_allocator *mem,
                              koila_graph *out)
{
    koila_graph view = *g;
    memset(&view.values, 0, sizeof view.values);
    memset(&view.axes, 0, sizeof view.axes);
    if (!koila__vec_reserve(mem, &view.values, g->values.n) ||
        !koila__vec_push(mem, &view.axes, size)) {
        koila__axes_end(&view, mem);
        return KOILA_NO_MEMORY;
    }
    memcpy(view.values.at, g->values.at, g->values.n * sizeof *g->values.at);
    view.values.n = g->values.n;
    for (koila_value v = 0; v < g->values.n; v++) {
        koila_value_info *leaf = &view.values.at[v];
        if (!is_batched(g, v))
            continue;
        const uint32_t dim = dim_of(g, v, size);
        leaf->leaf_kind = dim == KOILA_NONE ? KOILA_LEAF_REAL : KOILA_LEAF_BATCH;
        leaf->dim = dim == KOILA_NONE ? 0 : (uint8_t)dim;
        leaf->axis = 0;
    }
    *out = view;
    return KOILA_OK;
}

void koila__axes_end(koila_graph *view, const koila_allocator *mem)
{
    koila__vec_free(mem, &view->values);
    koila__vec_free(mem, &view->axes);
}
