/* rules_index.c — reading and writing by index. The index rows follow the slice; the table must be
 * whole, and its gradient is a partial sum. */
#include "placement/rewrite.h"

/* embedding(table, index[...]): rows of the index are rows of the result */
bool koila__rule_embedding(koila__case *c)
{
    if (c->n_in != 2)
        return false;
    if (koila__any_p(c))
        return koila__linear_in_first(c);
    if (!koila__is_s(c->in[1]))
        return false;
    koila__need_r(c, 0);
    return koila__out_like(c, 1);
}

/* embedding_dense_backward(grad[..., E], index[...], n, padding_idx, scale_grad_by_freq) -> [n, E]
 */
bool koila__rule_embedding_backward(koila__case *c)
{
    bool by_freq;
    const uint32_t lead = koila__lead(c);
    if (c->n_in != 2 || !koila__arg_bool(c, 4, false, &by_freq) || by_freq)
        return false;
    if (koila__any_p(c))
        return koila__linear_in_first(c);
    if (lead == KOILA_NONE)
        return false;
    const koila_placement p = c->in[lead];
    if (p.dim >= c->in_meta[1]->n_dims || !koila__need(c, 0, p) || !koila__need(c, 1, p))
        return false;
    c->out[0] = koila__p(c, KOILA_SUM);
    return true;
}

/* ---- embedding_bag of an index [B, step]: bags of `step` entries each, in one list of entries.
 * The bags of a slice begin at 0, step, ...: their offsets are not those of the whole. So the calls
 * are rewritten as koila::embedding_bag (pseudo.def). Bags of differing lengths are gathered. */

/* The S of the bags, derived from an input with a row per bag or per entry. */
static bool bags_of(const koila__case *c, uint32_t of_bags, uint32_t of_entries, uint32_t weights,
                    int64_t step, koila_placement *p)
{
    if (of_bags != KOILA_NONE && koila__is_s(c->in[of_bags])) {
        *p = c->in[of_bags];
        return p->dim == 0;
    }
    const uint32_t i = koila__is_s(c->in[of_entries]) ? of_entries : weights;
    if (i == KOILA_NONE || !koila__is_s(c->in[i]) || c->in[i].dim != 0 || c->in[i].inner % step)
        return false;
    *p = c->in[i];
    p->inner /= step;
    return true;
}
static koila_placement entries(koila_placement bags, int64_t step)
{
    bags.inner *= step;
    return bags;
}

/* Is there one such bag for each row of `rows`, and is no input that is read a sum? `at`: position
 * of the entries; the offsets follow them. */
static bool even_bags(const koila__case *c, uint32_t at, uint32_t weights,
                      const koila_meta_info *rows, int64_t *step)
{
    const uint32_t index = koila__input_at(c, at);
    const uint32_t offsets = koila__input_at(c, at + 1);
    if (!c->may_emit || index == KOILA_NONE || offsets == KOILA_NONE ||
        !koila__is_steps(c, offsets, step) || koila__is_p(c->in[0]) || koila__is_p(c->in[index]))
        return false;
    if (weights != KOILA_NONE && koila__is_p(c->in[weights]))
        return false;
    const koila_meta_info *i = c->in_meta[index];
    const koila_meta_info *o = c->in_meta[offsets];
    return i->n_dims == 1 && i->dtype == o->dtype && i->size[0] == o->size[0] * *step && rows &&
           rows->n_dims && rows->size[0] == o->size[0];
}

/* _embedding_bag(weight, indices, offsets, by_freq, mode, sparse, per_sample_weights?,
 * include_last_offset, padding_idx) -> out, offset2bag, bag_size, max_indices */
static bool embedding_bag(koila__case *c, bool trains)
{
    int64_t step, mode, padding;
    bool last;
    koila_placement p;
    const uint32_t weights = koila__input_at(c, 6);
    if (!koila__arg_int(c, 4, 0, &mode) || !koila__arg_int(c, 8, -1, &padding))
        return false;
    if (!even_bags(c, 1, weights, c->out_meta[0], &step) || !koila__arg_bool(c, 7, false, &last) ||
        last || c->n_out != 4)
        return false;
    if (!koila__is_r(c->in[0]) || !bags_of(c, KOILA_NONE, 1, weights, step, &p))
        return false;
    koila_meta out[4];
    koila__call k;
    koila__emit_begin(c, &k, "koila::embedding_bag", 0);
    koila__emit_value(&k, c->in_value[0]);
    koila__emit_value(&k, c->in_value[1]);
    koila__emit_int(&k, step);
    koila__emit_int(&k, mode);
    koila__emit_optional(&k, weights);
    koila__emit_int(&k, padding);
    koila__emit_bool(&k, trains);
    for (uint32_t j = 0; j < 4; j++)
        out[j] = c->sig->outputs[j];
    if (!koila__emit_end_n(&k, 4, out, c->replaced))
        return false;
    if (!c->out_meta[1] || !c->out_meta[1]->n_elements)
        return true;
    /* offset2bag for any reader (no rule is one): whole, numbering all bags */
    koila__emit_begin(c, &k, "aten::repeat_interleave.self_int", 0);
    koila__emit_value(&k, c->in_value[2]);
    koila__emit_int(&k, step);
    const koila_value begins = koila__emit_end(&k, out[1]);
    koila__emit_begin(c, &k, "aten::floor_divide.Scalar", 0);
    koila__emit_value(&k, begins);
    koila__emit_int(&k, step);
    c->replaced[1] = koila__emit_end(&k, out[1]);
    return c->replaced[1] != KOILA_NONE;
}
bool koila__rule_embedding_bag(koila__case *c) { return embedding_bag(c, true); }
bool koila__rule_embedding_bag_forward(koila__case *c) { return embedding_bag(c, false); }

/* _embedding_bag_backward(grad, indices, offsets, offset2bag, bag_size, max_indices, n, by_freq,
 * mode, sparse, per_sample_weights?, padding_idx) -> [n, E]. offset2bag numbers the bags of the
 * whole: a slice makes its own. The rewritten call gets only the inputs that its mode reads, since
 * the others may be sums (when empty). */
bool koila__rule_embedding_bag_backward(koila__case *c)
{
    int64_t step, mode, padding;
    bool by_freq, sparse;
    koila_placement p;
    const uint32_t weights = koila__input_at(c, 10);
    if (!even_bags(c, 1, weights, c->in_meta[0], &step) ||
        !koila__arg_bool(c, 7, false, &by_freq) || by_freq ||
        !koila__arg_bool(c, 9, false, &sparse) || sparse)
        return false;
    if (!koila__arg_int(c, 8, 0, &mode) || !koila__arg_int(c, 11, -1, &padding) ||
        !bags_of(c, 0, 1, weights, step, &p))
        return false;
    koila__call k;
    koila__emit_begin(c, &k, "koila::embedding_bag_backward", 0);
    koila__emit_value(&k, c->in_value[0]);
    koila__emit_value(&k, c->in_value[1]);
    koila__emit_int(&k, step);
    for (uint32_t i = 4; i < 6; i++) {
        /* bag_size is read by mean and max, max_indices by max */
        const bool is_read = mode >= (int64_t)i - 3;
        koila__emit_optional(&k, is_read ? i : KOILA_NONE);
    }
    koila__emit_copy(&k, 6);
    koila__emit_int(&k, mode);
    koila__emit_optional(&k, weights);
    koila__emit_int(&k, padding);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}

/* _embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, offset2bag, mode,
 * padding_idx) -> [entries] */
bool koila__rule_embedding_bag_weights_backward(koila__case *c)
{
    int64_t step, padding;
    koila_placement p;
    if (!koila__arg_int(c, 6, -1, &padding) || !even_bags(c, 2, KOILA_NONE, c->in_meta[0], &step) ||
        !koila__is_r(c->in[1]) || !bags_of(c, 0, 2, KOILA_NONE, step, &p))
        return false;
    koila__call k;
    koila__emit_begin(c, &k, "koila::embedding_bag_weights_backward", 0);
    for (uint32_t i = 0; i < 3; i++)
        koila__emit_value(&k, c->in_value[i]);
    koila__emit_int(&k, step);
    koila__emit_copy(&k, 5);
    koila__emit_int(&k, padding);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}

/* koila::embedding_bag(weight, indices, step, mode, per_sample_weights?, padding_idx, trains) */
bool koila__rule_bags(koila__case *c)
{
    int64_t step;
    koila_placement p;
    const uint32_t weights = koila__input_at(c, 4);
    if (koila__any_p(c) || !koila__arg_int(c, 2, 0, &step) || step <= 0 ||
        !bags_of(c, KOILA_NONE, 1, weights, step, &p))
        return false;
    koila__need_r(c, 0);
    if (!koila__need(c, 1, entries(p, step)) ||
        (weights != KOILA_NONE && !koila__need(c, weights, entries(p, step))))
        return false;
    /* a result that the kernel leaves empty is empty in every slice: P, as a loop has no R */
    for (uint32_t j = 0; j < c->n_out; j++) {
        if (!c->out_meta[j])
            continue;
        if (!c->out_meta[j]->n_elements)
            c->out[j] = koila__p(c, KOILA_SUM);
        else
            c->out[j] = j == 1 ? entries(p, step) : p;
        if (koila__is_s(c->out[j]) && !koila__fits(c, c->out[j], c->out_meta[j]))
            return false;
    }
    return true;
}

/* koila::embedding_bag_backward(grad, indices, step, bag_size?, max_indices?, n, mode,
 * per_sample_weights?, padding_idx) */
bool koila__rule_bags_backward(koila__case *c)
{
    int64_t step;
    koila_placement p;
    const uint32_t size = koila__input_at(c, 3);
    const uint32_t most = koila__input_at(c, 4);
    const uint32_t weights = koila__input_at(c, 7);
    if (koila__any_p(c) || !koila__arg_int(c, 2, 0, &step) || step <= 0 ||
        !bags_of(c, 0, 1, weights, step, &p))
        return false;
    if (!koila__need(c, 0, p) || !koila__need(c, 1, entries(p, step)) ||
        (weights != KOILA_NONE && !koila__need(c, weights, entries(p, step))))
        return false;
    if ((size != KOILA_NONE && !koila__need(c, size, p)) ||
        (most != KOILA_NONE && !koila__need(c, most, p)))
        return false;
    c->out[0] = koila__p(c, KOILA_SUM);
    return true;
}

/* koila::embedding_bag_weights_backward(grad, weight, indices, step, mode, padding_idx) */
bool koila__rule_bags_weights_backward(koila__case *c)
{
    int64_t step;
    koila_placement p;
    if (koila__any_p(c) || !koila__arg_int(c, 3, 0, &step) || step <= 0 ||
        !bags_of(c, 0, 2, KOILA_NONE, step, &p))
        return false;
    koila__need_r(c, 1);
    if (!koila__need(c, 0, p) || !koila__need(c, 2, entries(p, step)))
        return false;
    c->out[0] = entries(p, step);
    return koila__fits(c, c->out[0], c->out_meta[0]);
}

/* take(x, index): the result has the index's shape; x whole */
bool koila__rule_take(koila__case *c)
{
    if (c->n_in != 2 || koila__any_p(c) || !koila__is_s(c->in[1]))
        return false;
    koila__need_r(c, 0);
    c->out[0] = c->in[1];
    return true;
}

/* ---- gather(x, dim, index), scatter(x, dim, index, src): index and x have the same number of
 * dims; along `dim` the table is looked into */

bool koila__rule_gather(koila__case *c)
{
    uint32_t d;
    const uint32_t lead = koila__lead(c);
    if (koila__any_p(c) || c->n_in != 2 || lead == KOILA_NONE ||
        !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d))
        return false;
    if (c->in_meta[0]->n_dims != c->in_meta[1]->n_dims)
        return false;
    const koila_placement p = koila__is_s(c->in[1]) ? c->in[1] : c->in[0];
    c->out[0] = p;
    if (p.dim != d) /* PyTorch allows different sizes here; such inputs do not fit */
        return koila__need(c, 0, p) && koila__need(c, 1, p);
    if (!koila__is_s(c->in[1]))
        return false;
    koila__need_r(c, 0); /* rows of the index look into the whole table */
    return true;
}

/* Rows are added into input 0, zeros or a partial sum: the result is the sum of all. */
static bool sum_of_rows(koila__case *c)
{
    c->need[0] = koila__p(c, KOILA_SUM);
    c->out[0] = koila__p(c, KOILA_SUM);
    c->accumulates = true;
    return true;
}

/* Input 0 is whole. Rewritten: op(zeros, ...) + x, whose first term is a partial sum. Not where
 * the zeros would be more than the rows that are added. */
static bool add_to_whole(koila__case *c, const char *op)
{
    const koila_meta_info *x = c->in_meta[0];
    if (!c->may_emit || c->sig->n_writes || !koila__is_r(c->in[0]) ||
        x->dtype == KOILA_DTYPE_BOOL || x->n_bytes > c->in_meta[c->n_in - 1]->n_bytes)
        return false;
    const koila_meta out = c->sig->outputs[0];
    koila__call k;
    koila__emit_begin(c, &k, "aten::new_zeros", 0);
    koila__emit_value(&k, c->in_value[0]);
    koila__emit_ints(&k, x->size, x->n_dims);
    const koila_meta dense = koila__emit_meta(c, x, x->dtype, x->n_dims, x->size);
    const koila_value zeros = koila__emit_end(&k, dense);
    koila__emit_begin(c, &k, op, 0);
    koila__emit_value(&k, zeros);
    for (uint32_t pos = 1; pos < 4; pos++)
        koila__emit_copy(&k, pos);
    const koila_value sum = koila__emit_end(&k, dense);
    c->replaced[0] = koila__emit_binary(c, "aten::add.Tensor", sum, c->in_value[0], out);
    return c->replaced[0] != KOILA_NONE;
}

/* The rows of index (input i) and source (the last) are added by `op` into input 0: zeros, a
 * partial sum, or what is whole. */
static bool adds_rows(koila__case *c, const char *op, uint32_t index, koila_placement p_index,
                      koila_placement p_source)
{
    if (!koila__need(c, index, p_index) || !koila__need(c, c->n_in - 1, p_source))
        return false;
    if (!koila__is_sum(c->in[0]) && !c->zero[0])
        return add_to_whole(c, op);
    return sum_of_rows(c);
}

/* scatter_reduce(x, dim, index, src, reduce, include_self=True), of rows along dim: x is added to,
 * or each slice has the largest (smallest) of x and its own rows. */
static bool reduces_rows(koila__case *c, koila_placement p)
{
    int64_t with_self;
    const koila_arg *how = koila__arg(c, 4);
    const char *name = how && how->kind == KOILA_ARG_STR ? koila_text(c->table, how->u.id) : "";
    if (!koila__kw_int(c, "include_self", 1, &with_self) || !with_self)
        return false;
    if (!strcmp(name, "sum"))
        return adds_rows(c, "aten::scatter_add", 1, p, p);
    const bool is_max = !strcmp(name, "amax");
    if ((!is_max && strcmp(name, "amin")) || !koila__is_r(c->in[0]) ||
        c->in_meta[0]->dtype == KOILA_DTYPE_BOOL)
        return false;
    koila__need_r(c, 0);
    c->out[0] = koila__p(c, is_max ? KOILA_MAX : KOILA_MIN);
    return koila__need(c, 1, p) && koila__need(c, 2, p);
}

/* scatter.src, scatter.value, scatter_add, scatter_reduce.two (x, dim, index, src or value) */
typedef enum along_dim { ROWS_STAY, ROWS_ARE_ADDED, ROWS_ARE_REDUCED } along_dim;
static bool scatter(koila__case *c, along_dim how)
{
    uint32_t d;
    const uint32_t lead = koila__lead(c);
    if (c->n_in < 2 || c->n_in > 3 || !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d))
        return false;
    for (uint32_t i = 1; i < c->n_in; i++)
        if (c->in_meta[i]->n_dims != c->in_meta[0]->n_dims)
            return false;
    for (uint32_t i = 1; i < c->n_in; i++)
        if (koila__is_p(c->in[i]))
            return false;
    if (lead == KOILA_NONE)
        return false;
    const koila_placement p = c->in[lead];
    if (p.dim == d && how == ROWS_ARE_ADDED)
        return adds_rows(c, "aten::scatter_add", 1, p, p);
    if (p.dim == d)
        return how == ROWS_ARE_REDUCED && reduces_rows(c, p);
    if (koila__any_p(c))
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (!koila__need(c, i, p))
            return false;
    c->out[0] = p;
    return true;
}

bool koila__rule_scatter(koila__case *c) { return scatter(c, ROWS_STAY); }
bool koila__rule_scatter_add(koila__case *c) { return scatter(c, ROWS_ARE_ADDED); }
bool koila__rule_scatter_reduce(koila__case *c) { return scatter(c, ROWS_ARE_REDUCED); }

/* index_select(x, dim, index[n]) */
bool koila__rule_index_select(koila__case *c)
{
    uint32_t d;
    if (c->n_in != 2 || !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d))
        return false;
    if (koila__any_p(c))
        return koila__linear_in_first(c);
    if (koila__is_s(c->in[0]) && c->in[0].dim != d) {
        koila__need_r(c, 1);
        c->out[0] = c->in[0];
        return true;
    }
    if (!koila__is_s(c->in[1]) || c->in_meta[1]->n_dims != 1)
        return false;
    koila__need_r(c, 0);
    c->out[0] = koila__moved(c->in[1], d);
    return true;
}

/* Are index or source sliced along `dim` of index_add or index_copy? *p: the placement of source.
 */
static bool sliced_along(const koila__case *c, uint32_t dim, koila_placement *p)
{
    if (koila__is_s(c->in[2]) && c->in[2].dim == dim) {
        *p = c->in[2];
        return true;
    }
    *p = koila__moved(c->in[1], dim);
    return koila__is_s(c->in[1]) && koila__is_r(c->in[2]);
}

/* index_add along the batch: its rows p are added. */
static bool index_adds(koila__case *c, koila_placement p)
{
    double alpha;
    const bool is_plain = koila__kw_number(c, "alpha", 1, &alpha) && alpha == 1;
    return !koila__is_s(c->in[0]) && c->in_meta[1]->n_dims == 1 &&
           (koila__is_sum(c->in[0]) || c->zero[0] || is_plain) &&
           adds_rows(c, "aten::index_add", 1, koila__moved(p, 0), p);
}

/* index_add(x, dim, index[n], source), index_copy likewise. Along the batch rows can only be added.
 */
static bool index_add_or_copy(koila__case *c, bool adds)
{
    uint32_t d;
    koila_placement p;
    if (c->n_in != 3 || koila__input_at(c, 2) != 1 ||
        !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d))
        return false;
    if (koila__is_p(c->in[1]) || koila__is_p(c->in[2]) ||
        c->in_meta[2]->n_dims != c->in_meta[0]->n_dims)
        return false;
    if (sliced_along(c, d, &p))
        return adds && index_adds(c, p);
    if (koila__any_p(c))
        return false;
    p = koila__is_s(c->in[0]) ? c->in[0] : c->in[2];
    if (!koila__is_s(p) || p.dim == d || !koila__need(c, 0, p) || !koila__need(c, 2, p))
        return false;
    koila__need_r(c, 1);
    c->out[0] = p;
    return true;
}

bool koila__rule_index_add(koila__case *c) { return index_add_or_copy(c, true); }
bool koila__rule_index_copy(koila__case *c) { return index_add_or_copy(c, false); }

/* index_fill(x, dim, index, value) */
bool koila__rule_index_fill(koila__case *c)
{
    uint32_t d;
    if (koila__any_p(c) || c->n_in < 2 || !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d) ||
        !koila__is_s(c->in[0]) || c->in[0].dim == d)
        return false;
    for (uint32_t i = 1; i < c->n_in; i++)
        koila__need_r(c, i);
    c->out[0] = c->in[0];
    return true;
}

/* ---- x[i, :, j, ...]: the index tensors are broadcast to one shape I. The result has I in the
 * place of the indexed dims when they are neighbours, else in front. Dims without an index tensor
 * ("holes": None, or beyond the list) stay as they are in x. */
typedef struct indexing {
    /* tensors in the list; dims of x the first and last stand at */
    uint32_t n, first, last;
    uint32_t input[KOILA_MAX_DIMS]; /* by dim of x: its index tensor's input, or KOILA_NONE */
    /* dims of I; where they start in the result; dims of the result */
    uint32_t n_index, place, n_result;
    bool neighbours;
} indexing;

static bool read_indexing(const koila__case *c, indexing *x)
{
    const koila_arg *list = koila__arg(c, 1);
    const uint32_t n_dims = c->in_meta[0]->n_dims;
    memset(x, 0, sizeof *x);
    if (!list || list->kind != KOILA_ARG_LIST || list->n > n_dims || n_dims > KOILA_MAX_DIMS)
        return false;
    uint32_t input = 1;
    for (uint32_t d = 0; d < n_dims; d++) {
        x->input[d] = KOILA_NONE;
        if (d >= list->n || list[1 + d].kind != KOILA_ARG_TENSOR)
            continue;
        const koila_dtype t = c->in_meta[input]->dtype;
        /* a mask: the result's size is data */
        if (t != KOILA_DTYPE_I64 && t != KOILA_DTYPE_I32)
            return false;
        if (!x->n)
            x->first = d;
        x->last = d;
        x->n++;
        if (c->in_meta[input]->n_dims > x->n_index)
            x->n_index = c->in_meta[input]->n_dims;
        x->input[d] = input++;
    }
    if (!x->n)
        return false;
    x->neighbours = x->last - x->first + 1 == x->n;
    x->place = x->neighbours ? x->first : 0;
    x->n_result = n_dims - x->n + x->n_index;
    return true;
}

/* where the unindexed dim d of x is in the result */
static uint32_t hole_in_result(const indexing *x, uint32_t d)
{
    uint32_t before = 0;
    for (uint32_t k = 0; k < d; k++)
        before += x->input[k] == KOILA_NONE;
    return x->neighbours && d < x->first ? before : before + x->n_index;
}

/* The S of I that a sharded index tensor requires; the others follow by broadcasting. */
static bool index_rows_of(koila__case *c, const indexing *x, koila_placement *p)
{
    uint32_t lead = KOILA_NONE;
    for (uint32_t i = 1; i <= x->n; i++)
        if (koila__is_s(c->in[i]) &&
            (lead == KOILA_NONE || c->in_meta[i]->n_elements > c->in_meta[lead]->n_elements))
            lead = i;
    if (lead == KOILA_NONE)
        return false;
    *p = koila__moved(c->in[lead], c->in[lead].dim + x->n_index - c->in_meta[lead]->n_dims);
    /* a batch of one row that is broadcast to more has no rows to follow */
    for (uint32_t i = 1; i <= x->n; i++) {
        const koila_meta_info *m = c->in_meta[i];
        const uint32_t missing = x->n_index - m->n_dims;
        if (p->dim >= missing && m->size[p->dim - missing] != 1 &&
            m->size[p->dim - missing] != p->outer * c->batch * p->inner)
            return false;
    }
    return true;
}

/* x[rows, i, j, ...] with rows = 0 .. B-1: each sample indexes its own row. Rewritten so that the
 * row numbers are the slice's own. */
static bool rows_of_self(koila__case *c, const indexing *x, uint32_t *dim)
{
    if (!c->may_emit || !koila__is_s(c->in[0]) || c->in[0].dim != 0 || x->input[0] == KOILA_NONE ||
        !x->neighbours || x->n < 2)
        return false;
    if (!koila__is_row_numbers(c, 1, dim) || c->in_meta[1]->size[*dim] != c->in_meta[0]->size[0])
        return false;
    *dim += x->n_index - c->in_meta[1]->n_dims;
    return true;
}

/* The same for whole or FREE x, when the values are sharded along the rows (the gradient of x[rows,
 * i]: values added into zeros). */
static bool own_rows(koila__case *c, const indexing *x, uint32_t values, uint32_t *dim)
{
    if (!c->may_emit || x->input[0] == KOILA_NONE || !x->neighbours || x->n < 2 ||
        !koila__is_s(c->in[values]))
        return false;
    if (!koila__is_row_numbers(c, 1, dim) || c->in_meta[1]->size[*dim] != c->in_meta[0]->size[0])
        return false;
    *dim += x->n_index - c->in_meta[1]->n_dims;
    return c->in[values].dim + x->n_result - c->in_meta[values]->n_dims == *dim &&
           koila__fits(c, koila__moved(c->in[values], 0), c->in_meta[0]);
}

static void emit_rows(koila__case *c, koila__call *k, const indexing *x, uint32_t dim,
                      const char *op)
{
    koila__emit_begin(c, k, op, 0);
    koila__emit_value(k, c->in_value[0]);
    koila__emit_int(k, dim);
    koila__emit_int(k, x->n_index);
    koila__emit_values(k, c->in_value + 2, x->n - 1);
}

/* index.Tensor(x, indices) */
bool koila__rule_index(koila__case *c)
{
    indexing x;
    uint32_t dim;
    koila_placement p;
    if (!read_indexing(c, &x) || x.n + 1 != c->n_in)
        return false;
    if (koila__any_p(c))
        return koila__linear_in_first(c);
    if (koila__is_s(c->in[0]) && x.input[c->in[0].dim] == KOILA_NONE) {
        for (uint32_t i = 1; i < c->n_in; i++)
            koila__need_r(c, i);
        c->out[0] = koila__moved(c->in[0], hole_in_result(&x, c->in[0].dim));
        return true;
    }
    if (rows_of_self(c, &x, &dim)) {
        koila__call k;
        emit_rows(c, &k, &x, dim, "koila::index_rows");
        c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
        return c->replaced[0] != KOILA_NONE;
    }
    if (!index_rows_of(c, &x, &p))
        return false;
    koila__need_r(c, 0);
    for (uint32_t i = 1; i < c->n_in; i++)
        koila__need_aligned(c, i, p, x.n_index);
    c->out[0] = koila__moved(p, p.dim + x.place);
    return true;
}

/* index_put(x, indices, values, accumulate): values, the last input, are broadcast to x[indices] */

/* The dimension of the result in which the values are sliced. */
static uint32_t values_dim(const koila__case *c, const indexing *x)
{
    const uint32_t values = c->n_in - 1;
    return c->in[values].dim + x->n_result - c->in_meta[values]->n_dims;
}

/* The unindexed dimension of x that is the batch, and its placement; KOILA_NONE: the batch is an
 * indexed dimension. */
static uint32_t sliced_hole(const koila__case *c, const indexing *x, koila_placement *p)
{
    const koila_placement values = c->in[c->n_in - 1];
    if (koila__is_s(c->in[0])) {
        *p = c->in[0];
        return x->input[p->dim] == KOILA_NONE ? p->dim : KOILA_NONE;
    }
    if (!koila__is_r(c->in[0]) || !koila__is_s(values))
        return KOILA_NONE;
    for (uint32_t d = c->in_meta[0]->n_dims; d-- > 0;)
        if (x->input[d] == KOILA_NONE && hole_in_result(x, d) == values_dim(c, x)) {
            *p = koila__moved(values, d);
            return d;
        }
    return KOILA_NONE;
}

static bool put_in_hole(koila__case *c, const indexing *x, uint32_t hole, koila_placement p)
{
    if (!koila__need(c, 0, p))
        return false;
    for (uint32_t i = 1; i <= x->n; i++)
        koila__need_r(c, i);
    koila__need_aligned(c, c->n_in - 1, koila__moved(p, hole_in_result(x, hole)), x->n_result);
    c->out[0] = p;
    return true;
}

/* Rows are added into zeros, or into a partial sum. */
static bool add_rows(koila__case *c, const indexing *x)
{
    const uint32_t values = c->n_in - 1;
    koila_placement p;
    bool any_rows = false;
    if (!index_rows_of(c, x, &p)) {
        if (!koila__is_s(c->in[values]))
            return false;
        const uint32_t d = values_dim(c, x);
        if (d < x->place || d >= x->place + x->n_index)
            return false;
        p = koila__moved(c->in[values], d - x->place);
    }
    /* values that are broadcast along the rows are added once for every row: each slice adds them
     * for its own rows */
    for (uint32_t i = 1; i <= x->n; i++) {
        koila__need_aligned(c, i, p, x->n_index);
        any_rows |= c->need[i].kind == KOILA_S;
    }
    if (!any_rows)
        return false;
    koila__need_aligned(c, values, koila__moved(p, p.dim + x->place), x->n_result);
    return sum_of_rows(c);
}

static bool put_own_rows(koila__case *c, const indexing *x, uint32_t dim, bool accumulate)
{
    koila__call k;
    emit_rows(c, &k, x, dim, "koila::index_put_rows");
    koila__emit_value(&k, c->in_value[c->n_in - 1]);
    koila__emit_bool(&k, accumulate);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}

bool koila__rule_index_put(koila__case *c)
{
    indexing x;
    uint32_t dim;
    bool accumulate;
    koila_placement p;
    if (!read_indexing(c, &x) || x.n + 2 != c->n_in || !koila__arg_bool(c, 3, false, &accumulate))
        return false;
    const uint32_t values = c->n_in - 1;
    if (c->in_meta[values]->n_dims > x.n_result)
        return false;
    for (uint32_t i = 1; i < c->n_in; i++)
        if (koila__is_p(c->in[i]))
            return false;
    const uint32_t hole = sliced_hole(c, &x, &p);
    if (hole != KOILA_NONE)
        return put_in_hole(c, &x, hole, p);
    if (koila__is_r(c->in[0]) && own_rows(c, &x, values, &dim))
        return put_own_rows(c, &x, dim, accumulate);
    if (koila__is_r(c->in[0]) || koila__is_sum(c->in[0])) {
        const bool is_sum = koila__is_sum(c->in[0]) || c->zero[0];
        return accumulate && add_rows(c, &x) && (is_sum || add_to_whole(c, "aten::index_put"));
    }
    return !koila__any_p(c) && rows_of_self(c, &x, &dim) && put_own_rows(c, &x, dim, accumulate);
}

/* koila::index_rows(x, dim, n_dims, indices) and koila::index_put_rows(x, dim, n_dims, indices,
 * values, accumulate): see pseudo.def */
static bool self_rows(koila__case *c, uint32_t n_after)
{
    int64_t dim, n_dims;
    uint32_t first, n;
    if (koila__any_p(c) || !koila__arg_int(c, 1, 0, &dim) || !koila__arg_int(c, 2, 0, &n_dims) ||
        !koila__arg_tensors(c, 3, &first, &n))
        return false;
    koila_placement p; /* of x, on dimension 0 */
    const uint32_t values = 1 + n;
    if (koila__is_s(c->in[0]))
        p = c->in[0];
    else if (n_after && koila__is_s(c->in[values])) {
        const uint32_t n_result = (uint32_t)n_dims + c->in_meta[0]->n_dims - 1u - n;
        if (c->in[values].dim + n_result - c->in_meta[values]->n_dims != (uint32_t)dim)
            return false;
        p = koila__moved(c->in[values], 0);
    } else
        return false;
    if (p.dim != 0 || !koila__need(c, 0, p))
        return false;
    for (uint32_t i = 1; i <= n; i++)
        koila__need_aligned(c, i, koila__moved(p, (uint32_t)dim), (uint32_t)n_dims);
    if (n_after)
        koila__need_aligned(c, values, koila__moved(p, (uint32_t)dim),
                            (uint32_t)n_dims + c->in_meta[0]->n_dims - 1u - n);
    c->out[0] = n_after ? p : koila__moved(p, (uint32_t)dim);
    return true;
}
bool koila__rule_index_rows(koila__case *c) { return self_rows(c, 0); }
bool koila__rule_index_put_rows(koila__case *c) { return self_rows(c, 1); }
