/* rules_view.c — the same elements in another shape, or some of them. Views are linear, so every P
 * passes; S follows the dimension that holds the batch.
 *
 * view and reshape: in the row-major index the batch is one factor. `before` is the product of the
 * sizes in front of it and of its `outer`; `behind` is `inner` times the sizes after it. Both
 * survive any reshape. In the new shape the batch lies in the one dimension d where size[0..d)
 * divides `before` and size(d..n) divides `behind`. If the new shape splits the batch itself there
 * is no such d, and the value is gathered. */
#include "placement/rewrite.h"

/* The one input is P: so is every result. (Moments have their own dimension in front.) */
static bool passes_p(koila__case *c)
{
    const koila_placement p = c->in[0];
    return koila__is_p(p) && c->n_in == 1 && p.combine != KOILA_MOMENTS && koila__out_all(c, p);
}

static bool mul_to(int64_t *a, int64_t b) { return !__builtin_mul_overflow(*a, b, a); }

static bool reshaped(const koila__case *c, koila_placement p, const koila_meta_info *from,
                     const koila_meta_info *to, koila_placement *out)
{
    int64_t before = p.outer;
    int64_t behind = p.inner;
    int64_t pre = 1;
    int64_t post = 1;
    if (from->n_elements == 0)
        return false;
    for (uint32_t d = 0; d < p.dim; d++)
        if (!mul_to(&before, from->size[d]))
            return false;
    for (uint32_t d = p.dim + 1u; d < from->n_dims; d++)
        if (!mul_to(&behind, from->size[d]))
            return false;
    for (uint32_t d = 0; d < to->n_dims; d++)
        if (!mul_to(&post, to->size[d]))
            return false;
    for (uint32_t d = 0; d < to->n_dims; d++) {
        post /= to->size[d];
        if (before % pre == 0 && behind % post == 0 && before / pre >= 1 && behind / post >= 1) {
            const koila_placement q = koila__s(c, d, before / pre, behind / post);
            if (koila__fits(c, q, to)) {
                *out = q;
                return true;
            }
        }
        if (!mul_to(&pre, to->size[d]))
            return false;
    }
    return false;
}

bool koila__rule_view(koila__case *c)
{
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !reshaped(c, c->in[0], c->in_meta[0], c->out_meta[0], &c->out[0]))
        return false;
    const koila_arg *sizes = koila__arg(c, 1);
    return sizes && sizes->kind == KOILA_ARG_LIST && sizes->n == c->out_meta[0]->n_dims &&
           koila__fix_add(c, KOILA__FIX_SIZES, 1, 0);
}

/* _reshape_alias(x, sizes, strides): the strides belong to the whole, so it is rewritten as a view
 */
bool koila__rule_reshape_alias(koila__case *c)
{
    const koila_arg *sizes = koila__arg(c, 1);
    koila__call k;
    if (koila__any_p(c))
        return passes_p(c);
    if (!c->may_emit || c->n_in != 1 || !sizes || sizes->kind != KOILA_ARG_LIST)
        return false;
    koila__emit_begin(c, &k, "aten::view", KOILA_OP_VIEW);
    koila__emit_copy(&k, 0);
    koila__emit_copy(&k, 1);
    c->replaced[0] = koila__emit_end(&k, c->sig->outputs[0]);
    return c->replaced[0] != KOILA_NONE;
}

/* flatten(x, start, end) and unflatten arrive whole in inference mode; flatten names no sizes */
bool koila__rule_flatten(koila__case *c)
{
    if (koila__any_p(c))
        return passes_p(c);
    return c->n_in == 1 && koila__is_s(c->in[0]) &&
           reshaped(c, c->in[0], c->in_meta[0], c->out_meta[0], &c->out[0]);
}

bool koila__rule_expand(koila__case *c)
{
    if (koila__any_p(c))
        return passes_p(c);
    const koila_meta_info *in = c->in_meta[0];
    const koila_meta_info *out = c->out_meta[0];
    if (c->n_in != 1 || out->n_dims < in->n_dims)
        return false;
    const uint32_t missing = out->n_dims - in->n_dims;
    if (koila__is_s(c->in[0]))
        c->out[0] = koila__moved(c->in[0], c->in[0].dim + missing);
    else if (c->want && c->want->kind == KOILA_S) {
        c->out[0] = *c->want;
        if (!koila__fits(c, c->out[0], out))
            return false;
        koila__need_aligned(c, 0, c->out[0], out->n_dims);
    } else
        return false;
    return koila__fits(c, c->out[0], out) && koila__fix_add(c, KOILA__FIX_SIZES, 1, 0);
}

/* permute, transpose, t: dimension list[k] of the input is dimension k of the result */
static bool permuted(koila__case *c, const uint32_t *list, uint32_t n)
{
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) || n != c->in_meta[0]->n_dims)
        return false;
    for (uint32_t k = 0; k < n; k++)
        if (list[k] == c->in[0].dim) {
            c->out[0] = koila__moved(c->in[0], k);
            return true;
        }
    return false;
}

bool koila__rule_permute(koila__case *c)
{
    uint32_t set, list[KOILA_MAX_DIMS], n;
    return koila__arg_dims(c, 1, c->in_meta[0]->n_dims, &set, list, &n) && permuted(c, list, n);
}

bool koila__rule_transpose(koila__case *c)
{
    const uint32_t n = c->in_meta[0]->n_dims;
    uint32_t list[KOILA_MAX_DIMS];
    uint32_t a = 0;
    uint32_t b = n > 1;
    /* t() names none */
    if (c->sig->n_pos > 1 && (!koila__arg_dim(c, 1, 0, n, &a) || !koila__arg_dim(c, 2, 0, n, &b)))
        return false;
    for (uint32_t k = 0; k < n; k++)
        list[k] = k;
    if (n) {
        list[a] = b;
        list[b] = a;
    }
    return permuted(c, list, n);
}

bool koila__rule_unsqueeze(koila__case *c)
{
    uint32_t d;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims + 1u, &d))
        return false;
    c->out[0] = koila__moved(c->in[0], c->in[0].dim + (c->in[0].dim >= d));
    return true;
}

/* squeeze, squeeze.dim, squeeze.dims: a slice may have one row where the whole has many, so the
 * dims are named when the call runs (KOILA__FIX_DIMS) */
bool koila__rule_squeeze(koila__case *c)
{
    uint32_t set, n, gone = 0;
    if (koila__any_p(c))
        return passes_p(c);
    const koila_meta_info *m = c->in_meta[0];
    if (c->n_in != 1 || !koila__is_s(c->in[0]) || !koila__arg_dims(c, 1, m->n_dims, &set, NULL, &n))
        return false;
    if (c->sig->n_pos == 1)
        set = ~0u;
    /* a batch of one row loses its dimension */
    if (m->size[c->in[0].dim] == 1 && ((set >> c->in[0].dim) & 1))
        return false;
    for (uint32_t d = 0; d < c->in[0].dim; d++)
        gone += m->size[d] == 1 && ((set >> d) & 1);
    c->out[0] = koila__moved(c->in[0], c->in[0].dim - gone);
    return koila__fix_add(c, KOILA__FIX_DIMS, 1, 0);
}

/* Is v a boundary between the blocks of p? */
static bool at_block(const koila__case *c, koila_placement p, int64_t v, int64_t *block)
{
    const int64_t n = c->batch * p.inner;
    if (n <= 0 || v % n)
        return false;
    *block = v / n;
    return true;
}

/* slice's start or end, as an index of a dimension of that size: negative ones count from its end,
 * and those beyond it stop there. */
static bool slice_bound(const koila__case *c, uint32_t pos, int64_t size, int64_t otherwise,
                        int64_t *out)
{
    *out = otherwise;
    if (!koila__is_absent(c, pos) && !koila__arg_int(c, pos, otherwise, out))
        return false;
    if (*out < 0)
        *out += size;
    if (*out < 0)
        *out = 0;
    if (*out > size)
        *out = size;
    return true;
}

/* Adapts the bound at `pos` to the slice. A bound beyond the end stays; any other, also one that
 * counts from the end, is a whole number of batches and is scaled. */
static bool fix_bound(koila__case *c, uint32_t pos, int64_t size)
{
    const koila_arg *a = koila__arg(c, pos);
    if (!a || a->kind != KOILA_ARG_INT || a->u.i >= size)
        return true;
    return koila__fix_add(c, KOILA__FIX_ROWS, pos, 0);
}

/* Elements start .. end along the batch, which stay in their slice. */
static bool taken(koila__case *c, int64_t start, int64_t end, int64_t size)
{
    const koila_arg *from = koila__arg(c, 2);
    const koila_arg *to = koila__arg(c, 3);
    if (start >= end || !koila__take_rows(c, start, end))
        return false;
    if (from && from->kind == KOILA_ARG_INT &&
        !koila__fix_add(c, KOILA__FIX_INDEX, 2, KOILA__FIX_OF_INPUT))
        return false;
    if (!to || to->kind != KOILA_ARG_INT || to->u.i >= size)
        return true; /* to the end, also of the slice */
    return koila__fix_add(c, KOILA__FIX_END, 3, KOILA__FIX_OF_INPUT);
}

/* slice(x, dim, start, end, step). On the batch dimension: all of it, whole blocks of `outer`
 * (the halves of cat([a, b])), or rows of one slice. */
bool koila__rule_slice(koila__case *c)
{
    uint32_t d;
    int64_t start, end, step, first, last;
    if (koila__any_p(c))
        return passes_p(c);
    const koila_meta_info *m = c->in_meta[0];
    const koila_placement p = c->in[0];
    if (c->n_in != 1 || !koila__is_s(p) || !koila__arg_dim(c, 1, 0, m->n_dims, &d))
        return false;
    if (d != p.dim)
        return koila__out_like(c, 0);
    const int64_t size = m->size[d];
    if (!slice_bound(c, 2, size, 0, &start) || !slice_bound(c, 3, size, size, &end) ||
        !koila__arg_int(c, 4, 1, &step) || step != 1)
        return false;
    if (start == 0 && end == size)
        return koila__out_like(c, 0) && koila__fix_add(c, KOILA__FIX_ALIAS, 0, 0);
    if (!at_block(c, p, start, &first) || !at_block(c, p, end, &last) || first >= last)
        return taken(c, start, end, size);
    c->out[0] = koila__s(c, d, last - first, p.inner);
    return fix_bound(c, 2, size) && fix_bound(c, 3, size);
}

bool koila__rule_select(koila__case *c)
{
    uint32_t d;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d))
        return false;
    if (d == c->in[0].dim) {
        int64_t i;
        if (!koila__arg_int(c, 2, 0, &i))
            return false;
        if (i < 0)
            i += c->in_meta[0]->size[d];
        return koila__take_rows(c, i, i + 1) &&
               koila__fix_add(c, KOILA__FIX_INDEX, 2, KOILA__FIX_OF_INPUT);
    }
    c->out[0] = koila__moved(c->in[0], c->in[0].dim - (c->in[0].dim > d));
    return true;
}

/* Writes the call out as one select or slice for each result: rows of one slice each. */
static bool taken_apart(koila__case *c, uint32_t d, bool selects)
{
    int64_t at = 0;
    if (!c->may_emit)
        return false;
    for (uint32_t j = 0; j < c->n_out; j++)
        if (!c->out_meta[j] || !koila__may_take(c, selects ? 1 : c->out_meta[j]->size[d]))
            return false;
    for (uint32_t j = 0; j < c->n_out; j++) {
        const int64_t end = at + (selects ? 1 : c->out_meta[j]->size[d]);
        koila__call k;
        koila__emit_begin(c, &k, selects ? "aten::select.int" : "aten::slice.Tensor",
                          KOILA_OP_VIEW);
        koila__emit_copy(&k, 0);
        koila__emit_int(&k, d);
        koila__emit_int(&k, at);
        if (!selects)
            koila__emit_int(&k, end);
        c->replaced[j] = koila__emit_end(&k, c->sig->outputs[j]);
        if (c->replaced[j] == KOILA_NONE)
            return false;
        at = end;
    }
    return true;
}

/* split.Tensor(x, size, dim), split_with_sizes(x, sizes, dim), chunk: along the batch only at
 * blocks of `outer` */
static bool split(koila__case *c, bool sizes_are_rows)
{
    uint32_t d;
    int64_t block;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 2, 0, c->in_meta[0]->n_dims, &d))
        return false;
    if (d != c->in[0].dim)
        return koila__out_all(c, c->in[0]);
    if (!sizes_are_rows)
        return taken_apart(c, d, false);
    for (uint32_t j = 0; j < c->n_out; j++) {
        if (!c->out_meta[j] || !at_block(c, c->in[0], c->out_meta[j]->size[d], &block) || block < 1)
            return taken_apart(c, d, false);
        c->out[j] = koila__s(c, d, block, c->in[0].inner);
    }
    const koila_arg *a = koila__arg(c, 1); /* one size, or a list */
    const bool is_list = a && a->kind == KOILA_ARG_LIST;
    const uint32_t n = is_list ? a->n : 1;
    for (uint32_t k = 0; a && k < n; k++) {
        const koila_arg *size = is_list ? a + 1 + k : a;
        if (size->kind != KOILA_ARG_INT || size->u.i % c->batch)
            return false;
    }
    return a && koila__fix_add(c, KOILA__FIX_ROWS, 1, 0);
}
bool koila__rule_split(koila__case *c) { return split(c, true); }
bool koila__rule_chunk(koila__case *c) { return split(c, false); }

bool koila__rule_unbind(koila__case *c)
{
    uint32_t d;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d))
        return false;
    if (d == c->in[0].dim)
        return taken_apart(c, d, true);
    return koila__out_all(c, koila__moved(c->in[0], c->in[0].dim - (c->in[0].dim > d)));
}

/* Does cat take nothing of it? A tensor of shape [0] is skipped, whatever the others'
 * dimensions (an empty key-value cache). */
static bool is_skipped(const koila_meta_info *m, uint32_t n_dims)
{
    return m->n_dims == 1 && m->size[0] == 0 && n_dims != 1;
}

/* Input i of a cat along the batch has *blocks blocks of p's rows. A whole tensor of whole blocks
 * counts too (zeros of a slice's gradient). */
static bool cat_blocks(koila__case *c, uint32_t i, koila_placement p, int64_t *blocks)
{
    if (!at_block(c, p, c->in_meta[i]->size[p.dim], blocks) ||
        !koila__need(c, i, koila__s(c, p.dim, *blocks, p.inner)))
        return false;
    return !koila__is_s(c->in[i]) || koila__placement_equal(c->in[i], c->need[i]);
}

/* cat(tensors, dim). Along the batch, equal rows of each: [a; b] is S(dim, outer_a + outer_b,
 * inner). What has no rows is whole. */
bool koila__rule_cat(koila__case *c)
{
    uint32_t first, n, d;
    int64_t outer = 0;
    const uint32_t n_dims = c->out_meta[0]->n_dims;
    const uint32_t lead = koila__lead(c);
    if (!koila__arg_tensors(c, 0, &first, &n) || n == 0 || n != c->n_in ||
        !koila__arg_dim(c, 1, 0, n_dims, &d))
        return false;
    if (koila__any_p(c))
        return koila__linear_in_all(c);
    if (lead == KOILA_NONE)
        return false;
    const koila_placement p = c->in[lead];
    for (uint32_t i = 0; i < n; i++) {
        int64_t blocks = 0;
        if (is_skipped(c->in_meta[i], n_dims)) {
            koila__need_r(c, i);
            continue;
        }
        if (c->in_meta[i]->n_dims != n_dims)
            return false;
        if (p.dim == d && !c->in_meta[i]->size[d]) {
            koila__need_r(c, i);
            continue;
        }
        if (p.dim != d ? !koila__need(c, i, p) : !cat_blocks(c, i, p, &blocks))
            return false;
        outer += blocks;
    }
    c->out[0] = p.dim == d ? koila__s(c, d, outer, p.inner) : p;
    return koila__fits(c, c->out[0], c->out_meta[0]);
}

/* repeat(x, repeats): tiles whole copies; new leading dims first */
bool koila__rule_repeat(koila__case *c)
{
    const koila_arg *r = koila__arg(c, 1);
    const koila_meta_info *m = c->in_meta[0];
    const koila_meta_info *out = c->out_meta[0];
    if (!r || r->kind != KOILA_ARG_LIST || c->n_in != 1 || r->n != out->n_dims || r->n < m->n_dims)
        return false;
    if (koila__any_p(c))
        return koila__linear_in_first(c);
    if (!koila__is_s(c->in[0]))
        return false;
    const uint32_t d = c->in[0].dim + r->n - m->n_dims;
    if (r[1 + d].kind != KOILA_ARG_INT || r[1 + d].u.i < 1)
        return false;
    c->out[0] = koila__s(c, d, c->in[0].outer * r[1 + d].u.i, c->in[0].inner);
    return koila__fits(c, c->out[0], out);
}

bool koila__rule_stack(koila__case *c)
{
    uint32_t first, n, d;
    const uint32_t lead = koila__lead(c);
    if (!koila__arg_tensors(c, 0, &first, &n) || n == 0 || n != c->n_in ||
        !koila__arg_dim(c, 1, 0, c->out_meta[0]->n_dims, &d))
        return false;
    if (koila__any_p(c))
        return koila__linear_in_all(c);
    if (lead == KOILA_NONE)
        return false;
    for (uint32_t i = 0; i < n; i++)
        if (!koila__need(c, i, c->in[lead]))
            return false;
    c->out[0] = koila__moved(c->in[lead], c->in[lead].dim + (c->in[lead].dim >= d));
    return true;
}

/* Gradients of select, slice, diagonal, unfold: linear; the list of sizes follows the slice.
 * select_backward(grad, sizes, dim, index), slice_backward(grad, sizes, dim, start, end, step) */
bool koila__rule_select_backward(koila__case *c)
{
    uint32_t d;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 2, 0, c->out_meta[0]->n_dims, &d))
        return false;
    c->out[0] = koila__moved(c->in[0], c->in[0].dim + (c->in[0].dim >= d));
    return koila__fix_add(c, KOILA__FIX_SIZES, 1, 0);
}

bool koila__rule_slice_backward(koila__case *c)
{
    uint32_t d;
    int64_t start, end, step;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 2, 0, c->out_meta[0]->n_dims, &d))
        return false;
    const koila_placement p = c->in[0];
    if (d != p.dim) {
        c->out[0] = p;
        return koila__fix_add(c, KOILA__FIX_SIZES, 1, 0);
    }
    /* on the batch dimension: whole blocks, as in slice */
    const int64_t size = c->out_meta[0]->size[d];
    int64_t first, last, blocks;
    if (!koila__arg_int(c, 3, 0, &start) || !koila__arg_int(c, 4, size, &end) ||
        !koila__arg_int(c, 5, 1, &step) || step != 1)
        return false;
    const bool is_beyond = end >= size;
    if (is_beyond)
        end = size;
    if (start < 0 || end < 0 || !at_block(c, p, start, &first) || !at_block(c, p, end, &last) ||
        !at_block(c, p, size, &blocks) || first >= last)
        return false;
    c->out[0] = koila__s(c, d, blocks, p.inner);
    return koila__fix_add(c, KOILA__FIX_SIZES, 1, 0) && koila__fix_add(c, KOILA__FIX_ROWS, 3, 0) &&
           (is_beyond || koila__fix_add(c, KOILA__FIX_ROWS, 4, 0));
}

/* diagonal(x, offset, dim1, dim2): the two dims leave, the diagonal comes last */
bool koila__rule_diagonal(koila__case *c)
{
    uint32_t a, b;
    const uint32_t n = c->in_meta[0]->n_dims;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) || !koila__arg_dim(c, 2, 0, n, &a) ||
        !koila__arg_dim(c, 3, 1, n, &b))
        return false;
    const uint32_t d = c->in[0].dim;
    if (d == a || d == b)
        return false;
    c->out[0] = koila__moved(c->in[0], d - (d > a) - (d > b));
    return true;
}

/* unfold(x, dim, size, step): a window dimension is added at the end */
bool koila__rule_unfold(koila__case *c)
{
    uint32_t d;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d) || d == c->in[0].dim)
        return false;
    c->out[0] = c->in[0];
    return true;
}

/* views that keep or reinterpret all elements: detach, alias, real, imag, view_as_real (one dim
 * more at the end), view_as_complex (one less) */
bool koila__rule_alias(koila__case *c)
{
    if (koila__any_p(c))
        return passes_p(c);
    return c->n_in == 1 && koila__is_s(c->in[0]) && koila__out_all(c, c->in[0]);
}

/* diag_embed(x, offset, dim1, dim2): the last dimension becomes a matrix at dim1, dim2 (the last
 * two) */
bool koila__rule_diag_embed(koila__case *c)
{
    uint32_t a, b;
    const uint32_t n = c->out_meta[0]->n_dims;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) || !koila__arg_dim(c, 2, -2, n, &a) ||
        !koila__arg_dim(c, 3, -1, n, &b))
        return false;
    if (a < n - 2u || b < n - 2u || c->in[0].dim + 2u >= n)
        return false;
    c->out[0] = c->in[0];
    return true;
}

/* diagonal_backward(grad, sizes, offset, dim1, dim2) */
bool koila__rule_diagonal_backward(koila__case *c)
{
    uint32_t a, b;
    const uint32_t n = c->out_meta[0]->n_dims;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) || !koila__arg_dim(c, 3, 0, n, &a) ||
        !koila__arg_dim(c, 4, 1, n, &b) || a == b)
        return false;
    const uint32_t low = a < b ? a : b;
    const uint32_t high = a < b ? b : a;
    uint32_t d = c->in[0].dim;
    if (d + 1u == c->in_meta[0]->n_dims)
        return false; /* the diagonal itself */
    d += d >= low;
    d += d >= high;
    c->out[0] = koila__moved(c->in[0], d);
    return koila__fix_add(c, KOILA__FIX_SIZES, 1, 0);
}

/* Elements of one entry of dimension d, if d is outermost in memory and each entry is dense; else
 * 0. */
static int64_t dense_entry(const koila_meta_info *x, uint32_t d)
{
    int64_t n = 1;
    for (uint32_t left = 0, i; left < x->n_dims; left++) {
        for (i = 0; i < x->n_dims && (i == d || x->size[i] == 1 || x->stride[i] != n); i++) {
        }
        if (i == x->n_dims)
            break;
        if (!mul_to(&n, x->size[i]))
            return 0;
    }
    uint64_t all = (uint64_t)n * (uint64_t)x->size[d];
    return all == x->n_elements && x->stride[d] == n ? n : 0;
}

/* Does a slice's memory, `unit` elements for each row of the batch, hold a slice of the result,
 * whose rows are `inner` entries along dimension d? The result begins at `offset`. */
static bool stays_in_unit(const koila_meta_info *out, uint32_t d, int64_t inner, int64_t offset,
                          int64_t unit)
{
    int64_t last = offset + (inner - 1) * out->stride[d];
    for (uint32_t i = 0; i < out->n_dims; i++)
        if (i != d)
            last += (out->size[i] - 1) * out->stride[i];
    return last < unit;
}

/* as_strided(x, size, stride, offset) addresses x's memory. There each block of `inner` rows takes
 * `unit` elements, one block after the other. If the result has such blocks too, each within its
 * own `unit` elements, the memory of a slice of x holds a slice of the result. (Adaptive pooling of
 * channels_last images ends in an as_strided.) */
bool koila__rule_as_strided(koila__case *c)
{
    const koila_arg *sizes = koila__arg(c, 1);
    int64_t offset, unit;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) || !koila__arg_int(c, 3, 0, &offset) || offset < 0)
        return false;
    const koila_placement p = c->in[0];
    const koila_meta_info *in = c->in_meta[0];
    const koila_meta_info *out = c->out_meta[0];
    if (!sizes || sizes->kind != KOILA_ARG_LIST || sizes->n != out->n_dims || p.outer < 1 ||
        !in->n_elements || !out->n_elements)
        return false;
    unit = dense_entry(in, p.dim);
    if (!unit || !mul_to(&unit, p.inner))
        return false;
    for (uint32_t d = 0; d < out->n_dims; d++) {
        if (out->stride[d] < 1 || unit % out->stride[d])
            continue;
        const koila_placement q = koila__s(c, d, p.outer, unit / out->stride[d]);
        if (!koila__fits(c, q, out) || !stays_in_unit(out, d, q.inner, offset, unit))
            continue;
        c->out[0] = q;
        return koila__fix_add(c, KOILA__FIX_SIZES, 1, 0);
    }
    return false;
}

/* unfold_backward(grad, sizes, dim, size, step): the window is the last dimension of grad */
bool koila__rule_unfold_backward(koila__case *c)
{
    uint32_t d;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 2, 0, c->out_meta[0]->n_dims, &d))
        return false;
    if (d == c->in[0].dim || c->in[0].dim + 1u == c->in_meta[0]->n_dims)
        return false;
    c->out[0] = c->in[0];
    return koila__fix_add(c, KOILA__FIX_SIZES, 1, 0);
}

/* slice_scatter(x, src, dim, ...), select_scatter(x, src, dim, index): the batch is another
 * dimension */
static bool scattered(koila__case *c, bool is_select)
{
    uint32_t d;
    if (koila__any_p(c) || c->n_in != 2 || !koila__arg_dim(c, 2, 0, c->in_meta[0]->n_dims, &d))
        return false;
    koila_placement p;
    if (koila__is_s(c->in[0]))
        p = c->in[0];
    else if (koila__is_s(c->in[1]))
        p = koila__moved(c->in[1], c->in[1].dim + (is_select && c->in[1].dim >= d));
    else
        return false;
    if (p.dim == d || !koila__need(c, 0, p) ||
        !koila__need(c, 1, koila__moved(p, p.dim - (is_select && p.dim > d))))
        return false;
    c->out[0] = p;
    return true;
}
bool koila__rule_slice_scatter(koila__case *c) { return scattered(c, false); }
bool koila__rule_select_scatter(koila__case *c) { return scattered(c, true); }
