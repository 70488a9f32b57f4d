/* axes.c — the other axes of a recorded step. */
#include "engine/axes.h"

enum { MOST_KINDS = 16 }; /* of axes that are counted */

/* Dimension of leaf `v` that is the nth of `size`, its rows apart; KOILA_NONE: it has none. */
static uint32_t dim_of(const koila_graph *g, koila_value v, int64_t size, uint32_t nth)
{
    const koila_meta_info *m = koila__value_meta(g, v);
    for (uint32_t d = 0; d < m->n_dims; d++)
        if (d != g->values.at[v].dim && m->size[d] == size && nth-- == 0)
            return d;
    return KOILA_NONE;
}

static bool is_batched(const koila_graph *g, koila_value v)
{
    const koila_value_info *info = &g->values.at[v];
    return info->node == KOILA_NONE && info->meta != KOILA_NONE &&
           info->leaf_kind == KOILA_LEAF_BATCH;
}

static bool is_likelier(const koila__axis *a, const koila__axis *b)
{
    return a->n_leaves != b->n_leaves ? a->n_leaves > b->n_leaves : a->size > b->size;
}

/* Counts one more leaf whose dimension `dim` is the nth of `size`. */
static void count(koila__axis *kinds, uint32_t *n, int64_t size, uint32_t nth, uint32_t dim)
{
    for (uint32_t i = 0; i < *n; i++)
        if (kinds[i].size == size && kinds[i].nth == nth) {
            kinds[i].n_leaves++;
            return;
        }
    if (*n < MOST_KINDS)
        kinds[(*n)++] = (koila__axis){ .size = size, .dim = dim, .nth = nth, .n_leaves = 1 };
}

static void count_leaf(const koila_graph *g, koila_value v, koila__axis *kinds, uint32_t *n)
{
    const koila_meta_info *m = koila__value_meta(g, v);
    const uint32_t rows = g->values.at[v].dim;
    for (uint32_t d = 0; d < m->n_dims; d++) {
        uint32_t nth = 0;
        if (d == rows || m->size[d] < 2)
            continue;
        for (uint32_t before = 0; before < d; before++)
            nth += before != rows && m->size[before] == m->size[d];
        count(kinds, n, m->size[d], nth, d);
    }
}

uint32_t koila__axes_find(const koila_graph *g, koila__axis out[KOILA__MOST_AXES])
{
    koila__axis kinds[MOST_KINDS];
    uint32_t n = 0;
    for (koila_value v = 0; v < g->values.n; v++)
        if (is_batched(g, v))
            count_leaf(g, v, kinds, &n);
    for (uint32_t i = 1; i < n; i++) {
        const koila__axis mine = kinds[i];
        uint32_t k = i;
        for (; k > 0 && is_likelier(&mine, &kinds[k - 1]); k--)
            kinds[k] = kinds[k - 1];
        kinds[k] = mine;
    }
    if (n > KOILA__MOST_AXES)
        n = KOILA__MOST_AXES;
    memcpy(out, kinds, n * sizeof *out);
    return n;
}

koila_status koila__axes_view(const koila_graph *g, const koila__axis *axis,
                              const koila_allocator *mem, koila_graph *out)
{
    koila_graph view = *g;
    memset(&view.values, 0, sizeof view.values);
    memset(&view.axes, 0, sizeof view.axes);
    if (!koila__vec_reserve(mem, &view.values, g->values.n) ||
        !koila__vec_push(mem, &view.axes, axis->size)) {
        koila__axes_end(&view, mem);
        return KOILA_NO_MEMORY;
    }
    memcpy(view.values.at, g->values.at, g->values.n * sizeof *g->values.at);
    view.values.n = g->values.n;
    for (koila_value v = 0; v < g->values.n; v++) {
        koila_value_info *leaf = &view.values.at[v];
        if (!is_batched(g, v))
            continue;
        const uint32_t dim = dim_of(g, v, axis->size, axis->nth);
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
