/* axes.c — the other axes of a recorded step. */
#include "engine/axes.h"

#include "placement/rules.h"

enum { MOST_KINDS = 64 }; /* of axes that are counted */

typedef struct kinds {
    koila__axis at[MOST_KINDS];
    uint32_t n;
} kinds;

static bool is_batched(const koila_graph *g, koila_value v)
{
    const koila_value_info *info = &g->values.at[v];
    return info->node == KOILA_NONE && info->meta != KOILA_NONE &&
           info->leaf_kind == KOILA_LEAF_BATCH;
}

/* Is dimension d of leaf `v` its rows, and nothing else? With tokens in it, of one row, it is
 * tokens. */
static bool tells_rows(const koila_graph *g, koila_value v, uint32_t d)
{
    const koila_value_info *leaf = &g->values.at[v];
    const int64_t rows = g->axes.at[leaf->axis];
    return d == leaf->dim && (rows > 1 || koila__value_meta(g, v)->size[d] == rows);
}

/* The first dimension of leaf `v` of that size, its rows apart; KOILA_NONE: it has none. */
static uint32_t dim_of(const koila_graph *g, koila_value v, int64_t size)
{
    const koila_meta_info *m = koila__value_meta(g, v);
    for (uint32_t d = 0; d < m->n_dims; d++)
        if (!tells_rows(g, v, d) && m->size[d] == size)
            return d;
    return KOILA_NONE;
}

/* The axis of that size, counted from now on; NULL: there is no room for it. */
static koila__axis *kind_of(kinds *k, int64_t size, uint32_t dim)
{
    for (uint32_t i = 0; i < k->n; i++)
        if (k->at[i].size == size)
            return &k->at[i];
    if (k->n == MOST_KINDS)
        return NULL;
    k->at[k->n] = (koila__axis){ .size = size, .dim = dim };
    return &k->at[k->n++];
}

bool koila__axes_any(const koila_graph *g)
{
    for (koila_value v = 0; v < g->values.n; v++) {
        const koila_meta_info *m = is_batched(g, v) ? koila__value_meta(g, v) : NULL;
        for (uint32_t d = 0; m && d < m->n_dims; d++)
            if (m->size[d] > 1 && !tells_rows(g, v, d))
                return true;
    }
    return false;
}

static void count_leaves(const koila_graph *g, kinds *k)
{
    for (koila_value v = 0; v < g->values.n; v++) {
        const koila_meta_info *m = is_batched(g, v) ? koila__value_meta(g, v) : NULL;
        for (uint32_t d = 0; m && d < m->n_dims; d++)
            if (m->size[d] > 1 && dim_of(g, v, m->size[d]) == d) {
                koila__axis *kind = kind_of(k, m->size[d], d);
                if (kind)
                    kind->n_leaves++;
            }
    }
}

/* Counts what is computed from batched leaves, and returns its bytes; then other leaves. */
static double count_values(const koila_graph *g, const uint8_t *of_batch, kinds *k)
{
    double all = 0;
    for (koila_value v = 0; v < g->values.n; v++) {
        const koila_value_info *info = &g->values.at[v];
        if (info->node == KOILA_NONE || info->meta == KOILA_NONE || !of_batch[v])
            continue;
        const koila_meta_info *m = koila__value_meta(g, v);
        all += (double)m->n_bytes;
        for (uint32_t d = 0; d < m->n_dims; d++) {
            bool again = m->size[d] < 2;
            for (uint32_t before = 0; before < d; before++)
                again |= m->size[before] == m->size[d];
            koila__axis *kind = again ? NULL : kind_of(k, m->size[d], d);
            if (kind)
                kind->bytes += (double)m->n_bytes;
        }
    }
    for (koila_value v = 0; v < g->values.n; v++) {
        const koila_value_info *info = &g->values.at[v];
        if (info->node != KOILA_NONE || info->meta == KOILA_NONE || is_batched(g, v))
            continue;
        const koila_meta_info *m = koila__value_meta(g, v);
        const bool is_weight = koila__dtype_is_float(m->dtype) || koila__dtype_is_complex(m->dtype);
        for (uint32_t i = 0; i < k->n; i++)
            for (uint32_t d = 0; d < m->n_dims; d++) {
                k->at[i].n_real += m->size[d] == k->at[i].size;
                k->at[i].n_weights += is_weight && m->size[d] == k->at[i].size;
            }
    }
    return all;
}

static bool is_likelier(const koila__axis *a, const koila__axis *b)
{
    return a->n_leaves != b->n_leaves ? a->n_leaves > b->n_leaves : a->size > b->size;
}

/* The likeliest of those that leaves have, which is counted no more; NULL: none is left. */
static koila__axis *take_likeliest(kinds *k, int64_t longest)
{
    koila__axis *best = NULL;
    for (uint32_t i = 0; i < k->n; i++)
        if (k->at[i].n_leaves && k->at[i].size > longest / KOILA__SHORT_AXIS &&
            (!best || is_likelier(&k->at[i], best)))
            best = &k->at[i];
    return best;
}

static int64_t longest_of(const kinds *k)
{
    int64_t longest = 0;
    for (uint32_t i = 0; i < k->n; i++)
        if (k->at[i].n_leaves && k->at[i].size > longest)
            longest = k->at[i].size;
    return longest;
}

static bool is_near_leaf(const kinds *k, int64_t size)
{
    for (uint32_t i = 0; i < k->n; i++)
        if (k->at[i].n_leaves && koila_is_near_length(size, k->at[i].size))
            return true;
    return false;
}

/* At most one other leaf has it (a table of positions), and any number of indices of what was taken
 * by a mask. */
static bool is_no_width(const kinds *k, const koila__axis *a)
{
    return a->n_real <= 1 || (a->n_weights <= 1 && !is_near_leaf(k, a->size));
}

/* That of most bytes, more than half of `all`, which no batched leaf has, and not the width of a
 * layer: is_no_width(). Or, of more leaves (tables of tokens by tokens), only one that
 * is_near_leaf(). NULL: there is none. */
static const koila__axis *within_step(const koila_graph *g, const kinds *k, double all,
                                      bool of_tables)
{
    const koila__axis *best = NULL;
    for (uint32_t i = 0; i < k->n; i++) {
        const koila__axis *a = &k->at[i];
        bool is_rows = false;
        for (uint32_t x = 0; x < g->axes.n; x++)
            is_rows |= a->size == g->axes.at[x];
        const bool is_kind =
            of_tables ? a->n_real > 1 && is_near_leaf(k, a->size) : is_no_width(k, a);
        if (!a->n_leaves && !is_rows && is_kind && a->bytes > all / 2 &&
            (!best || a->bytes > best->bytes))
            best = a;
    }
    return best;
}

/* of_batch[values], all 0 before: does the value depend on a batched leaf? */
static void find_of_batch(const koila_graph *g, uint8_t *of_batch, uint8_t *seeds)
{
    for (koila_value v = 0; v < g->values.n; v++)
        of_batch[v] = is_batched(g, v);
    for (koila_node n = 0; n < g->nodes.n; n++) {
        const koila_sig_info *s = koila__node_sig(g, n);
        const koila_node_info *info = &g->nodes.at[n];
        for (uint32_t i = 0; i < s->n_inputs; i++)
            seeds[n] |= of_batch[g->inputs.at[info->first_input + i]];
        for (uint32_t o = 0; o < s->n_outputs; o++)
            of_batch[info->first_output + o] = seeds[n];
    }
}

/* ---- rows of several entries */

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The first spatial dimension: the batch and channels come before. */
enum { FIRST_SPATIAL = 2 };

/* The dimension of value `v` that was dimension `dim`, of `size` entries, of a value of n_dims; 0:
 * it may be another one. */
static uint32_t turned_into(const koila_graph *g, koila_value v, uint32_t n_dims, uint32_t dim,
                            int64_t size)
{
    const koila_value_info *info = &g->values.at[v];
    if (info->meta == KOILA_NONE)
        return 0;
    const koila_meta_info *m = koila__value_meta(g, v);
    if (m->n_dims != n_dims || m->size[dim] < 1)
        return 0;
    return m->size[dim] % size == 0 || size % m->size[dim] == 0 ? dim : 0;
}

/* Is value `v` a factor beside an image of n_dims that is cut along `dim`: plain, or the same all
 * along it? */
static bool is_factor(const koila_graph *g, koila_value v, uint32_t n_dims, uint32_t dim)
{
    const koila_value_info *info = &g->values.at[v];
    if (info->meta == KOILA_NONE || (info->node == KOILA_NONE && !is_batched(g, v)))
        return true;
    const koila_meta_info *m = koila__value_meta(g, v);
    return m->n_dims + dim < n_dims ||
           (m->n_dims <= n_dims && m->size[m->n_dims + dim - n_dims] == 1);
}

/* The first input of a call that is an image, see find_images(), with factors at most before it;
 * KOILA_NONE: there is none. */
static koila_value image_into(const koila_graph *g, koila_node n, const uint8_t *dim)
{
    const koila_sig_info *s = koila__node_sig(g, n);
    const koila_value *in = &g->inputs.at[g->nodes.at[n].first_input];
    uint32_t i = 0;
    while (i < s->n_inputs && !dim[in[i]])
        i++;
    for (uint32_t before = 0; before < i && i < s->n_inputs; before++)
        if (!is_factor(g, in[before], koila__value_meta(g, in[i])->n_dims, dim[in[i]]))
            return KOILA_NONE;
    return i < s->n_inputs ? in[i] : KOILA_NONE;
}

/* dim[values]: the dimension of that size of an image, of leaves; else 0. */
static void find_images(const koila_graph *g, int64_t size, uint8_t *dim)
{
    for (koila_value v = 0; v < g->values.n; v++) {
        const uint32_t d = is_batched(g, v) ? dim_of(g, v, size) : KOILA_NONE;
        dim[v] = d != KOILA_NONE && d >= FIRST_SPATIAL ? (uint8_t)d : 0;
    }
}

/* Follows the axis' dimension through layers that keep it or make it some times shorter or longer,
 * and finds rows that all of these lengths have in common, as long as there are enough.
 * dim[values]: that dimension, or 0. */
static int64_t common_rows(const koila_graph *g, int64_t size, uint8_t *dim)
{
    int64_t rows = size;
    find_images(g, size, dim);
    for (koila_node n = 0; n < g->nodes.n; n++) {
        const koila_sig_info *s = koila__node_sig(g, n);
        const koila_node_info *info = &g->nodes.at[n];
        const koila_value from = image_into(g, n, dim);
        if (from == KOILA_NONE)
            continue;
        const koila_meta_info *m = koila__value_meta(g, from);
        for (uint32_t o = 0; o < s->n_outputs; o++) {
            const koila_value v = info->first_output + o;
            dim[v] = (uint8_t)turned_into(g, v, m->n_dims, dim[from], m->size[dim[from]]);
            if (!dim[v])
                continue;
            const int64_t common = common_divisor(rows, koila__value_meta(g, v)->size[dim[v]]);
            rows = common < KOILA__FEWEST_ROWS ? rows : common;
        }
    }
    return rows;
}

static void add_length(koila__axis *axis, int64_t length)
{
    bool is_known = length < KOILA__FEWEST_ROWS || length % axis->rows == 0;
    for (uint32_t i = 0; i < axis->n_others && !is_known; i++) {
        is_known = length % axis->others[i] == 0 || axis->others[i] % length == 0;
        if (is_known && length < axis->others[i])
            axis->others[i] = length;
    }
    if (!is_known && axis->n_others < KOILA__MOST_LENGTHS)
        axis->others[axis->n_others++] = length;
}

/* Follows the axis' dimension through layers that make it any other length, and finds axis->others.
 * dim as above. */
static void find_other_lengths(const koila_graph *g, koila__axis *axis, uint8_t *dim)
{
    find_images(g, axis->size, dim);
    for (koila_node n = 0; n < g->nodes.n; n++) {
        const koila_sig_info *s = koila__node_sig(g, n);
        const koila_node_info *info = &g->nodes.at[n];
        const koila_value from = image_into(g, n, dim);
        if (from == KOILA_NONE)
            continue;
        const uint32_t d = dim[from];
        const koila_meta_info *m = koila__value_meta(g, from);
        for (uint32_t o = 0; o < s->n_outputs; o++) {
            const koila_value v = info->first_output + o;
            const koila_meta_info *made =
                g->values.at[v].meta == KOILA_NONE ? NULL : koila__value_meta(g, v);
            /* only the first result of a layer is an image of another length */
            const bool is_image =
                made && made->n_dims == m->n_dims && (!o || made->size[d] == m->size[d]);
            dim[v] = is_image ? (uint8_t)d : 0;
            if (is_image)
                add_length(axis, made->size[d]);
        }
    }
}

static koila_status find_rows(const koila_graph *g, const koila_allocator *mem, koila__axis *axes,
                              uint32_t n)
{
    uint8_t *dim = koila__realloc(mem, NULL, 0, (size_t)g->values.n + 1);
    if (!dim)
        return KOILA_NO_MEMORY;
    for (uint32_t i = 0; i < n; i++) {
        axes[i].rows = common_rows(g, axes[i].size, dim);
        find_other_lengths(g, &axes[i], dim);
    }
    koila__release(mem, dim, (size_t)g->values.n + 1);
    return KOILA_OK;
}

static bool alloc_flags(const koila_graph *g, const koila_allocator *mem, koila__along *a)
{
    a->n_values = g->values.n;
    a->n_nodes = g->nodes.n;
    a->of_batch = koila__realloc(mem, NULL, 0, (size_t)g->values.n + 1);
    a->seeds = koila__realloc(mem, NULL, 0, (size_t)g->nodes.n + 1);
    if (!a->of_batch || !a->seeds)
        return false;
    memset(a->of_batch, 0, (size_t)g->values.n + 1);
    memset(a->seeds, 0, (size_t)g->nodes.n + 1);
    find_of_batch(g, a->of_batch, a->seeds);
    return true;
}

/* Has a batched leaf a dimension of that size, and none of size `not`? */
static bool has_alone(const koila_graph *g, int64_t size, int64_t not)
{
    for (koila_value v = 0; v < g->values.n; v++)
        if (is_batched(g, v) && dim_of(g, v, size) != KOILA_NONE && dim_of(g, v, not) == KOILA_NONE)
            return true;
    return false;
}

/* Two axes of different leaves, whose rows are single entries, together. */
static bool join(const koila_graph *g, const koila__axis *a, const koila__axis *b, koila__axis *out)
{
    if (a->n_others || b->n_others || a->rows != a->size || b->rows != b->size ||
        !has_alone(g, a->size, b->size) || !has_alone(g, b->size, a->size))
        return false;
    *out = *a;
    out->others[out->n_others++] = b->size;
    out->with = b->size;
    return true;
}

koila_status koila__axes_find(const koila_graph *g, const koila_allocator *mem,
                              koila__axis out[KOILA__MOST_WAYS], uint32_t *n)
{
    koila__along flags = { .graph = *g };
    kinds k = { .n = 0 };
    const koila__axis *last[2] = { NULL, NULL };
    *n = 0;
    memset(&flags.graph.values, 0, sizeof flags.graph.values);
    memset(&flags.graph.axes, 0, sizeof flags.graph.axes);
    const bool ok = alloc_flags(g, mem, &flags);
    if (ok) {
        count_leaves(g, &k);
        const double all = count_values(g, flags.of_batch, &k);
        last[0] = within_step(g, &k, all, true);
        last[1] = within_step(g, &k, all, false);
    }
    const int64_t longest = longest_of(&k);
    const uint32_t most = KOILA__MOST_AXES - (last[0] || last[1]);
    koila__axis *a = take_likeliest(&k, longest);
    for (; a && *n < most; a = take_likeliest(&k, longest)) {
        out[(*n)++] = *a;
        a->n_leaves = 0;
    }
    for (int i = 0; i < 2; i++)
        if (last[i] && *n < KOILA__MOST_AXES)
            out[(*n)++] = *last[i];
    koila__along_deinit(&flags, mem);
    if (!ok)
        return KOILA_NO_MEMORY;
    KOILA_TRY(find_rows(g, mem, out, *n));
    *n += *n > 1 && join(g, &out[0], &out[1], &out[*n]);
    return KOILA_OK;
}

koila_status koila__along_init(const koila_graph *g, const koila__axis *axis,
                               const koila_allocator *mem, koila__along *out)
{
    koila__along a = { .graph = *g };
    memset(&a.graph.values, 0, sizeof a.graph.values);
    memset(&a.graph.axes, 0, sizeof a.graph.axes);
    if (!koila__vec_reserve(mem, &a.graph.values, g->values.n) ||
        !koila__vec_reserve(mem, &a.graph.axes, 1 + axis->n_others) || !alloc_flags(g, mem, &a)) {
        koila__along_deinit(&a, mem);
        return KOILA_NO_MEMORY;
    }
    a.graph.axes.at[a.graph.axes.n++] = axis->rows;
    for (uint32_t i = 0; i < axis->n_others; i++)
        a.graph.axes.at[a.graph.axes.n++] = axis->others[i];
    memcpy(a.graph.values.at, g->values.at, g->values.n * sizeof *g->values.at);
    a.graph.values.n = g->values.n;
    for (koila_value v = 0; v < g->values.n; v++) {
        koila_value_info *leaf = &a.graph.values.at[v];
        if (!is_batched(g, v))
            continue;
        uint32_t dim = dim_of(g, v, axis->size);
        leaf->axis = dim == KOILA_NONE && axis->with;
        if (leaf->axis)
            dim = dim_of(g, v, axis->with);
        leaf->leaf_kind = dim == KOILA_NONE ? KOILA_LEAF_REAL : KOILA_LEAF_BATCH;
        leaf->dim = dim == KOILA_NONE ? 0 : (uint8_t)dim;
    }
    *out = a;
    return KOILA_OK;
}

void koila__along_deinit(koila__along *a, const koila_allocator *mem)
{
    koila__release(mem, a->of_batch, (size_t)a->n_values + 1);
    koila__release(mem, a->seeds, (size_t)a->n_nodes + 1);
    koila__vec_free(mem, &a->graph.values);
    koila__vec_free(mem, &a->graph.axes);
}
