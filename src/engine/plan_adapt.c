/* plan_adapt.c — a recorded call adapted to a slice of `rows` rows from row `begin`: its arguments
 * that hold sizes, strides or extents of the whole batch, or indices into it. The placement rules
 * have listed these arguments as fixes (koila__fix). */
#include "engine/plan_inside.h"

#include "graph/table.h"

/* The subject of a fix: a call, and one of its sliced values. */
typedef struct subject {
    const koila_sig_info *call;
    const koila_meta_info *meta; /* recorded; NULL: the value is None */
    koila_placement placement;
} subject;

/* SIZES: a list of the sizes of the value. */
static void adapt_sizes(const subject *x, int64_t rows, koila_adapt *a)
{
    const koila_arg *list = &x->call->tokens[x->call->start[a->arg]];
    const koila_placement cut = x->placement;
    a->kind = KOILA_ADAPT_INTS;
    a->n = list->n;
    for (uint32_t i = 0; i < list->n && i < KOILA_MAX_DIMS; i++)
        a->ints[i] = list[1 + i].u.i;
    if (cut.kind == KOILA_S && cut.dim < list->n && a->ints[cut.dim] != -1)
        a->ints[cut.dim] = koila__extent(cut, rows);
}

/* STRIDES: a list of the strides of the value, dense. */
static void adapt_strides(const subject *x, int64_t rows, koila_adapt *a)
{
    int64_t size[KOILA_MAX_DIMS];
    for (uint32_t d = 0; d < x->meta->n_dims; d++)
        size[d] = x->meta->size[d];
    if (x->placement.kind == KOILA_S)
        size[x->placement.dim] = koila__extent(x->placement, rows);
    a->kind = KOILA_ADAPT_INTS;
    a->n = x->meta->n_dims;
    koila_dense_strides(x->meta, size, a->ints);
}

/* ROWS: an int, or a list of them, that are multiples of the batch. */
static void adapt_rows(const subject *x, int64_t rows, int64_t batch, koila_adapt *a)
{
    const koila_arg *first = &x->call->tokens[x->call->start[a->arg]];
    const bool is_list = first->kind == KOILA_ARG_LIST;
    a->kind = is_list ? KOILA_ADAPT_INTS : KOILA_ADAPT_INT;
    a->n = is_list ? first->n : 1;
    for (uint32_t i = 0; i < a->n && i < KOILA_MAX_DIMS; i++)
        a->ints[i] = batch ? first[is_list + i].u.i / batch * rows : 0;
}

/* INDEX, END: counted from the first row of the slice, in the block in which the element lies. */
static void adapt_index(const subject *x, bool is_end, int64_t begin, int64_t rows, int64_t batch,
                        koila_adapt *a)
{
    const koila_placement cut = x->placement;
    const int64_t size = x->meta->size[cut.dim];
    const int64_t block = batch * cut.inner;
    int64_t at = x->call->tokens[x->call->start[a->arg]].u.i;
    if (at < 0)
        at += size;
    at -= is_end;
    a->kind = KOILA_ADAPT_INT;
    a->n = 1;
    if (block > 0)
        a->ints[0] = at / block * rows * cut.inner + at % block - begin * cut.inner + is_end;
}

/* FIRST, AFTER: the index of a row along the sliced dimension. */
static void adapt_first(const subject *x, int64_t row, koila_adapt *a)
{
    a->kind = KOILA_ADAPT_INT;
    a->n = 1;
    a->ints[0] = row * x->placement.inner;
}

/* DIMS: of the dims that a squeeze names (all, when it names none), those of recorded size 1.
 */
static void adapt_dims(const koila_table *t, const subject *x, koila_adapt *a)
{
    const koila_sig_info *s = x->call;
    const koila_meta_info *in = koila__meta(t, s->inputs[0]);
    const koila_arg *named = s->n_pos > 1 ? &s->tokens[s->start[1]] : NULL;
    const bool is_list = named && named->kind == KOILA_ARG_LIST;
    uint32_t n_named = 1;
    if (!named)
        n_named = in->n_dims;
    else if (is_list)
        n_named = named->n;
    a->kind = KOILA_ADAPT_SQUEEZE;
    for (uint32_t i = 0; i < n_named; i++) {
        int64_t d = named ? named[is_list + i].u.i : i;
        if (d < 0)
            d += in->n_dims;
        if (d >= 0 && d < in->n_dims && in->size[d] == 1 && a->n < KOILA_MAX_DIMS)
            a->ints[a->n++] = d;
    }
}

/* The subject of a fix of node n. */
static subject subject_of(const koila_plan *p, koila_node n, uint32_t which, bool of_input)
{
    const koila_graph *g = p->placed->graph;
    subject x = { .call = koila__node_sig(g, n) };
    koila_meta meta = KOILA_NONE;
    if (of_input) {
        meta = x.call->inputs[which];
        x.placement = p->placed->need[g->nodes.at[n].first_input + which];
    } else {
        meta = x.call->outputs[which];
        x.placement = p->placed->value[g->nodes.at[n].first_output + which];
    }
    if (meta != KOILA_NONE)
        x.meta = koila__meta(g->table, meta);
    return x;
}

/* The call of link number `link` of all links of node n's writes. */
static const koila_sig_info *link_call(const koila_graph *g, koila_node n, uint32_t link)
{
    const koila_sig_info *s = koila__node_sig(g, n);
    for (uint32_t w = 0; w < s->n_writes; w++) {
        if (link < s->writes[w].n_links)
            return koila__sig(g->table, s->writes[w].links[link].sig);
        link -= s->writes[w].n_links;
    }
    koila_assert(!"there is no such link");
    return s;
}

/* The subject of a fix of a link: the link's result. */
static subject subject_of_link(const koila_plan *p, koila_node n, uint32_t link, uint32_t which)
{
    const koila_graph *g = p->placed->graph;
    subject x = { .call = link_call(g, n, link), .placement = p->placed->node[n].link[link].out };
    x.meta = koila__meta(g->table, x.call->outputs[which < x.call->n_outputs ? which : 0]);
    return x;
}

uint32_t koila_plan_adapt(const koila_plan *p, koila_node n, int32_t link, int64_t rows,
                          koila_adapt *out)
{
    return koila_plan_adapt_at(p, n, link, 0, rows, out);
}

uint32_t koila_plan_adapt_at(const koila_plan *p, koila_node n, int32_t link, int64_t begin,
                             int64_t rows, koila_adapt *out)
{
    const koila_graph *g = p->placed->graph;
    const koila__placed_node *node = &p->placed->node[n];
    if (link >= 0 && !node->link)
        return 0;
    const koila__fix *fix = link < 0 ? node->fix : node->link[link].fix;
    uint32_t n_out = 0;
    for (uint32_t k = 0; k < KOILA__MAX_FIXES && fix[k].kind != KOILA__FIX_NONE; k++) {
        koila_adapt *a = &out[n_out++];
        *a = (koila_adapt){ .arg = fix[k].arg, .output = fix[k].output };
        const bool of_input = fix[k].output >= KOILA__FIX_OF_INPUT;
        const uint32_t which = fix[k].output - (of_input ? (uint32_t)KOILA__FIX_OF_INPUT : 0u);
        const subject x = link < 0 ? subject_of(p, n, which, of_input)
                                   : subject_of_link(p, n, (uint32_t)link, which);
        switch ((koila__fix_kind)fix[k].kind) {
        case KOILA__FIX_SIZES:
            adapt_sizes(&x, rows, a);
            break;
        case KOILA__FIX_STRIDES:
            adapt_strides(&x, rows, a);
            break;
        case KOILA__FIX_EXTENT:
            a->kind = KOILA_ADAPT_INT;
            a->n = 1;
            a->ints[0] = koila__extent(x.placement, rows);
            break;
        case KOILA__FIX_ROWS:
            adapt_rows(&x, rows, g->axes.at[node->axis], a);
            break;
        case KOILA__FIX_SCALE:
            a->kind = KOILA_ADAPT_SCALE;
            break;
        case KOILA__FIX_ALIAS:
            a->kind = KOILA_ADAPT_ALIAS;
            break;
        case KOILA__FIX_DIMS:
            adapt_dims(g->table, &x, a);
            break;
        case KOILA__FIX_INDEX:
        case KOILA__FIX_END:
            adapt_index(&x, fix[k].kind == KOILA__FIX_END, begin, rows, g->axes.at[node->axis], a);
            break;
        case KOILA__FIX_FIRST:
            adapt_first(&x, begin, a);
            break;
        case KOILA__FIX_AFTER:
            adapt_first(&x, begin + rows, a);
            break;
        case KOILA__FIX_NONE:
            break;
        }
    }
    koila_assert(n_out <= KOILA_MAX_ADAPTS);
    return n_out;
}
