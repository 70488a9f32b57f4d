/* rules_view.c — the same elements, seen otherwise. Views are linear, so every P passes; S follows
 * its factor.
 *
 * view and reshape: think of the row-major index. The batch factor has pre * outer elements-blocks
 * before it and inner * post after it, and these two numbers survive any reshape. In the new shape
 * the batch lies in the one dimension d where size[0..d) divides the first and size(d..n) divides
 * the second. If the batch itself is split by the new shape there is no such d, and the value is
 * gathered. */
#include "placement/rewrite.h"

static bool passes_p(koila__case *c) /* every input P alike (or zeros) */
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

/* _reshape_alias(x, sizes, strides): the strides are those of the whole, so it is rewritten as a
 * view */
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
        list[k] = k == a ? b : k == b ? a : k;
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
 * dims are named at run (KOILA__FIX_DIMS) */
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

/* Is v a whole number of rows of p (a boundary between blocks of `outer`)? */
static bool at_block(const koila__case *c, koila_placement p, int64_t v, int64_t *block)
{
    const int64_t n = c->batch * p.inner;
    if (n <= 0 || v % n)
        return false;
    *block = v / n;
    return true;
}

/* slice(x, dim, start, end, step). On the batch dimension: all of it, or whole blocks of `outer`
 * (the halves of cat([a, b])). */
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
    if (d != p.dim) {
        c->out[0] = p;
        return true;
    }
    const int64_t size = m->size[d];
    if (koila__is_absent(c, 2))
        start = 0;
    else if (!koila__arg_int(c, 2, 0, &start))
        return false;
    if (koila__is_absent(c, 3))
        end = size;
    else if (!koila__arg_int(c, 3, 0, &end))
        return false;
    if (!koila__arg_int(c, 4, 1, &step) || step != 1)
        return false;
    if (start < 0)
        start += size;
    if (end < 0)
        end += size;
    if (start < 0)
        start = 0;
    if (end > size)
        end = size;
    if (start == 0 && end == size) {
        c->out[0] = p;
        return koila__fix_add(c, KOILA__FIX_ALIAS, 0, 0);
    }
    if (!at_block(c, p, start, &first) || !at_block(c, p, end, &last) || first >= last)
        return false;
    c->out[0] = koila__s(c, d, last - first, p.inner);
    /* the arguments are a whole number of batches themselves, or beyond the end (then they stay
     * beyond it), or from the end */
    const koila_arg *a = koila__arg(c, 2);
    const koila_arg *b = koila__arg(c, 3);
    if (a && a->kind == KOILA_ARG_INT && !koila__fix_add(c, KOILA__FIX_ROWS, 2, 0))
        return false;
    if (b && b->kind == KOILA_ARG_INT && b->u.i < size && !koila__fix_add(c, KOILA__FIX_ROWS, 3, 0))
        return false;
    return true;
}

bool koila__rule_select(koila__case *c)
{
    uint32_t d;
    if (koila__any_p(c))
        return passes_p(c);
    if (c->n_in != 1 || !koila__is_s(c->in[0]) ||
        !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d) || d == c->in[0].dim)
        return false;
    c->out[0] = koila__moved(c->in[0], c->in[0].dim - (c->in[0].dim > d));
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
        return false;
    for (uint32_t j = 0; j < c->n_out; j++) {
        if (!c->out_meta[j] || !at_block(c, c->in[0], c->out_meta[j]->size[d], &block) || block < 1)
            return false;
        c->out[j] = koila__s(c, d, block, c->in[0].inner);
    }
    const koila_arg *a = koila__arg(c, 1);
    for (uint32_t k = a && a->kind == KOILA_ARG_LIST ? 1 : 0;
         a && k <= (a->kind == KOILA_ARG_LIST ? a->n : 0); k++)
        if (a[k].kind != KOILA_ARG_INT || a[k].u.i % c->batch)
            return false;
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
        !koila__arg_dim(c, 1, 0, c->in_meta[0]->n_dims, &d) || d == c->in[0].dim)
        return false;
    return koila__out_all(c, koila__moved(c->in[0], c->in[0].dim - (c->in[0].dim > d)));
}

/* cat(tensors, dim). Along the batch, equal rows of each: [a; b] is S(dim, outer_a + outer_b,
 * inner). Tensors of shape [0] are skipped, whatever the others' dimensions (an empty key-value
 * cache). */
bool koila__rule_cat(koila__case *c)
{
    uint32_t first, n, d;
    int64_t outer = 0;
    const uint32_t n_dims = c->out_meta[0]->n_dims;
    const uint32_t lead = koila__lead(c);
    if (!koila__arg_tensors(c, 0, &first, &n) || n == 0 || n != c->n_in ||
        !koila__arg_dim(c, 1, 0, n_dims, &d))
        return false;
    if (koila__any_p(c)) { /* linear */
        for (uint32_t i = 0; i < n; i++) {
            if (!koila__is_sum(c->in[i]) && !c->zero[i])
                return false;
            c->need[i] = koila__p(c, KOILA_SUM);
        }
        return koila__out_all(c, koila__p(c, KOILA_SUM));
    }
    if (lead == KOILA_NONE)
        return false;
    const koila_placement p = c->in[lead];
    for (uint32_t i = 0; i < n; i++) {
        const koila_meta_info *m = c->in_meta[i];
        int64_t blocks;
        if (m->n_dims == 1 && m->size[0] == 0 && n_dims != 1) {
            koila__need_r(c, i);
            continue;
        }
        if (m->n_dims != n_dims)
            return false;
        if (p.dim != d) {
            if (!koila__need(c, i, p))
                return false;
            continue;
        }
        /* a whole tensor counts too when it is so many rows (zeros of a slice's gradient) */
        if (!at_block(c, p, m->size[d], &blocks) ||
            !koila__need(c, i, koila__s(c, d, blocks, p.inner)))
            return false;
        if (koila__is_s(c->in[i]) && !koila__placement_equal(c->in[i], c->need[i]))
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
        return koila__is_sum(c->in[0]) && (c->out[0] = c->in[0], true);
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
    if (koila__any_p(c)) {
        for (uint32_t i = 0; i < n; i++) {
            if (!koila__is_sum(c->in[i]) && !c->zero[i])
                return false;
            c->need[i] = koila__p(c, KOILA_SUM);
        }
        return koila__out_all(c, koila__p(c, KOILA_SUM));
    }
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

/* views that only forget or reinterpret: detach, alias, real, imag, view_as_real (one dim more at
 * the end), view_as_complex (one less) */
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

/* x's other dimensions lie dense, without gaps, inside one entry of dimension d, which is the
 * outermost in memory: elements of an entry; 0: not so. */
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

/* as_strided(x, size, stride, offset): it addresses x's memory. A block of `inner` rows is `unit`
 * elements there, one after the other; when the result, too, has a block of rows each `unit`
 * elements and looks nowhere else from it, a slice of x is the memory of a slice of the result.
 * (Adaptive pooling of channels_last images ends in one.) */
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
        int64_t last = offset + (q.inner - 1) * out->stride[d];
        if (!koila__fits(c, q, out))
            continue;
        for (uint32_t i = 0; i < out->n_dims; i++)
            if (i != d)
                last += (out->size[i] - 1) * out->stride[i];
        if (last >= unit)
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
