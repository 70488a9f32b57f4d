/* pieces.c — calls on rows that were taken out of the batch. Note [Pieces] in place.h.
 *
 * A call on pieces belongs to the rows of all of them, its hull. No slice may cut a hull, so a hull
 * of rows that were not together before is refused where it grows large: a chain of calls over all
 * samples would end in one hull of the whole batch. A refused call gets its pieces whole.
 *
 * Where a piece leads back to rows, the equality of sizes is no proof, and need be none: the
 * gradient of taking element i is right as an S along any dimension, if element i lies in the slice
 * that has the piece. So is a join, if the elements of each piece lie in the slice that has it. But
 * what is right may be of no use: the gradient of x[1, 3:6] with 3 positions to a row would be rows
 * of its positions, which x has not. It stays a piece, for rows were taken from no such tensor. */
#include "placement/rules.h"
#include "graph/table.h"

/* rows of pieces taken apart may grow together to so many times the smallest of them */
enum { MAX_GROWTH = 4 };

typedef struct hull {
    int64_t begin, end, smallest; /* rows */
    uint32_t n;                   /* pieces */
    bool is_one;                  /* one of the pieces has all rows */
} hull;

static hull hull_of(const koila__case *c)
{
    hull h = { .begin = INT64_MAX, .smallest = INT64_MAX };
    for (uint32_t i = 0; i < c->n_in; i++) {
        const koila_placement p = c->in[i];
        if (!koila__is_piece(p))
            continue;
        h.n++;
        h.begin = p.outer < h.begin ? p.outer : h.begin;
        h.end = p.inner > h.end ? p.inner : h.end;
        h.smallest = p.inner - p.outer < h.smallest ? p.inner - p.outer : h.smallest;
    }
    for (uint32_t i = 0; i < c->n_in; i++)
        h.is_one |=
            koila__is_piece(c->in[i]) && c->in[i].outer == h.begin && c->in[i].inner == h.end;
    return h;
}

static koila_placement piece(const koila__case *c, int64_t begin, int64_t end)
{
    koila_placement p = koila__p(c, KOILA_PIECE);
    p.outer = begin;
    p.inner = end;
    return p;
}

/* The call runs in the slice that has rows begin .. end; its results are placed `out`. */
static bool own(koila__case *c, int64_t begin, int64_t end, koila_placement out)
{
    c->own = piece(c, begin, end);
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j])
            c->out[j] = out;
    return true;
}

bool koila__may_take(const koila__case *c, int64_t n_elements)
{
    const koila_placement p = c->in[0];
    return c->may_own && koila__is_s(p) && p.inner > 0 && n_elements > 0 &&
           (n_elements - 1) / p.inner + 1 <= c->batch / 2;
}

bool koila__take_rows(koila__case *c, int64_t first, int64_t last)
{
    const koila_placement p = c->in[0];
    const int64_t block = c->batch * p.inner;
    if (!koila__may_take(c, last - first) || first / block != (last - 1) / block)
        return false;
    const int64_t begin = first % block / p.inner;
    const int64_t end = (last - 1) % block / p.inner + 1;
    if (end - begin > c->batch / 2)
        return false;
    koila__take_note(c, c->in_meta[0], p.dim);
    return own(c, begin, end, piece(c, begin, end));
}

/* Do elements first .. last of a dimension of `size` elements lie in rows begin .. end, if the
 * dimension is the batch times an inner factor? */
static bool lie_in(const koila__case *c, int64_t size, int64_t first, int64_t last, int64_t begin,
                   int64_t end)
{
    if (size <= 0 || size % c->batch)
        return false;
    const int64_t inner = size / c->batch;
    return begin * inner <= first && first < last && last <= end * inner;
}

/* cat, stack: the pieces follow the rows. */
static bool joins(koila__case *c)
{
    const koila__rule rule = koila__rule_of(c->table, c->sig->op);
    const bool stacks = rule == koila__rule_stack;
    uint32_t first, n, d;
    int64_t at = 0;
    if ((!stacks && rule != koila__rule_cat) || c->sig->n_writes || c->n_out != 1)
        return false;
    const koila_meta_info *out = c->out_meta[0];
    if (!out || !koila__arg_tensors(c, 0, &first, &n) || n != c->n_in ||
        !koila__arg_dim(c, 1, 0, out->n_dims, &d))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        const koila_placement p = c->in[i];
        if (!koila__is_piece(p) || (!stacks && c->in_meta[i]->n_dims != out->n_dims))
            return false;
        const int64_t length = stacks ? 1 : c->in_meta[i]->size[d];
        if (!lie_in(c, out->size[d], at, at + length, p.outer, p.inner))
            return false;
        at += length;
    }
    if (at != out->size[d])
        return false;
    c->joins = true;
    c->out[0] = koila__s(c, d, 1, at / c->batch);
    return true;
}

bool koila__is_plain_sum(const koila__case *c)
{
    double alpha;
    const bool is_written = c->sig->n_writes == 1 && c->sig->n_fresh == 0;
    return koila__rule_of(c->table, c->sig->op) == koila__rule_additive &&
           (koila__facts_of_op(c->table, c->sig->op) & KOILA_FACT_ADDS) && c->n_in == 2 &&
           c->n_out == 1 && koila__kw_number(c, "alpha", 1, &alpha) && alpha == 1 &&
           (!c->sig->n_writes ||
            (is_written && !c->sig->writes[0].n_links && !c->sig->writes[0].overwrites));
}

/* Different pieces, or a piece and a sum of others, add up. Differences of numbers too, with zeros
 * for what is absent. */
static bool adds_up(koila__case *c, const hull *h)
{
    const bool is_plain = koila__is_plain_sum(c);
    const bool is_number = koila__rule_of(c->table, c->sig->op) == koila__rule_additive &&
                           c->n_in == 2 && c->n_out == 1 && !c->sig->n_writes &&
                           c->out_meta[0]->n_elements == 1;
    if ((!is_plain && !is_number) || (h->n == 2 && h->is_one))
        return false;
    for (uint32_t i = 0; i < 2; i++)
        if (!koila__is_piece(c->in[i]) && !koila__is_sum(c->in[i]))
            return false;
    c->sums = is_plain;
    return koila__out_all(c, koila__p(c, KOILA_SUM));
}

/* Numbers of pieces that do not follow the rows (the loss of each chunk): a sum of what each slice
 * has, with zeros for the others. */
static bool joins_numbers(koila__case *c)
{
    const koila__rule rule = koila__rule_of(c->table, c->sig->op);
    if ((rule != koila__rule_stack && rule != koila__rule_cat) || c->sig->n_writes)
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (!koila__is_piece(c->in[i]) || c->in_meta[i]->n_elements != 1)
            return false;
    return koila__out_all(c, koila__p(c, KOILA_SUM));
}

/* Which elements of dimension d, of `size` elements, select_backward or slice_backward fills. */
static bool filled(const koila__case *c, bool selects, int64_t size, int64_t *first, int64_t *last)
{
    int64_t step = 1;
    if (!koila__arg_int(c, 3, 0, first))
        return false;
    *first += *first < 0 ? size : 0;
    *last = *first + 1;
    if (selects)
        return true;
    if (!koila__arg_int(c, 4, size, last) || !koila__arg_int(c, 5, 1, &step))
        return false;
    *last += *last < 0 ? size : 0;
    *last = *last < size ? *last : size;
    return step == 1;
}

/* select_backward(grad, sizes, dim, index), slice_backward(grad, sizes, dim, start, end, step):
 * rows of zeros, but those of the piece. */
static bool puts_rows(koila__case *c, const hull *h)
{
    const koila__rule rule = koila__rule_of(c->table, c->sig->op);
    const bool selects = rule == koila__rule_select_backward;
    uint32_t d;
    int64_t first, last;
    if ((!selects && rule != koila__rule_slice_backward) || c->sig->n_writes || c->n_in != 1 ||
        c->n_out != 1 || !c->out_meta[0] || !koila__arg_dim(c, 2, 0, c->out_meta[0]->n_dims, &d))
        return false;
    const int64_t size = c->out_meta[0]->size[d];
    if (!filled(c, selects, size, &first, &last) ||
        !lie_in(c, size, first, last, h->begin, h->end) || !koila__was_taken(c, c->out_meta[0], d))
        return false;
    own(c, h->begin, h->end, koila__s(c, d, 1, size / c->batch));
    /* an end beyond the last element is beyond that of the slice too */
    const koila_arg *end = selects ? NULL : koila__arg(c, 4);
    const bool is_beyond = !end || end->kind != KOILA_ARG_INT || end->u.i >= size;
    return koila__fix_add(c, KOILA__FIX_SIZES, 1, 0) && koila__fix_add(c, KOILA__FIX_INDEX, 3, 0) &&
           (is_beyond || koila__fix_add(c, KOILA__FIX_END, 4, 0));
}

/* Are all other inputs that the call reads whole? */
static bool others_are_whole(const koila__case *c)
{
    for (uint32_t i = 0; i < c->n_in; i++)
        if (!koila__is_piece(c->in[i]) && !koila__is_r(c->in[i]))
            return false;
    return true;
}

/* Does the call write through a view of what is no piece? Then all slices would have the rest. */
static bool writes_elsewhere(const koila__case *c)
{
    for (uint32_t w = 0; w < c->sig->n_writes; w++)
        if (c->sig->writes[w].n_links && !koila__is_piece(c->in[c->sig->writes[w].input]))
            return true;
    return false;
}

bool koila__rule_pieces(koila__case *c)
{
    const hull h = hull_of(c);
    if (!h.n || c->batch < 2)
        return false;
    if (joins(c) || adds_up(c, &h))
        return true;
    if (!others_are_whole(c) || writes_elsewhere(c))
        return false;
    if (!h.is_one && (h.end - h.begin > MAX_GROWTH * h.smallest || h.end - h.begin > c->batch / 2))
        return joins_numbers(c);
    return puts_rows(c, &h) || own(c, h.begin, h.end, piece(c, h.begin, h.end));
}
