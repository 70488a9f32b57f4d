/* place.h — placements and the walk that gives one to every value. Internal to src/.
 *
 * The algebra, over one axis of `batch` rows run in slices:
 *   R                     the value is whole and the same in every slice
 *   S(dim, outer, inner)  size[dim] == outer * batch * inner; slice [s, e) owns, in each of the
 *                         `outer` blocks, elements s*inner .. e*inner
 *   P(combine)            each slice has a value of the full shape; the whole value is their
 *                         combination (sum, max, min, moments)
 *   FREE                  made by a factory, or by pointwise operators of such values, and not yet
 *                         needed: becomes the S of its first sharded use, or R if there is none
 * Each value belongs to at most one axis; a node that meets two axes keeps one and needs the values
 * of the other whole. Results that do not exist (meta KOILA_NONE) are R. Empty results of a call in
 * a loop (the statistics of BatchNorm in eval mode) are P.
 *
 * A use that needs R of an S or P value is a *barrier*; a use that needs S of an R value is a free
 * slice. An `overwrites` write has no data edge to its base: its need is then the one that costs
 * nothing (the base's own placement, or the result's when the base is R), and the executor may
 * allocate the result (meta of the base, size of the slice) without reading the base.
 *
 * Note [Opaque]. S(0, 0, 0), with outer == inner == 0: every slice has its own value, of any size,
 * and no whole value exists (the workspace of an RNN layer). A use must need it exactly as it is;
 * its operator is KOILA_OP_OPAQUE and runs again in each loop that needs it.
 *
 * Note [Random]. A KOILA_OP_RANDOM call in a loop draws the numbers of the whole batch and takes
 * its rows. The executor can do that if the numbers do not depend on a tensor: factories, in-place
 * fills that overwrite a whole base, and native_dropout, which is only ever recorded on an empty
 * tensor for its mask. Every other random call (bernoulli of probabilities, normal_ of a view) is
 * gathered.
 *
 * Note [Pieces]. P(piece) on rows a .. b is a value that was taken from those rows alone (x[3],
 * x[4:8], a result of unbind or split): it is whole, and exists only in the slice that has all of
 * these rows, its *owner*. A call whose inputs are such pieces or R runs once, in that slice, with
 * the arguments that were recorded: this is right for every operator, with or without a rule, also
 * for one that draws random numbers. The slices are cut where no piece is (koila__slice_end). Three
 * things lead back: pieces that follow the rows are joined by cat or stack to an S; the gradient of
 * taking rows (select_backward, slice_backward) is an S that is zero in all slices but the owner;
 * and sums of different pieces are P(sum). Zeros that no slice need compute are *absent*: a sum
 * passes its other term on, any other use gets zeros from the executor. A piece that is needed
 * whole, or by rows of another slice, is a barrier like any P. Which values are pieces is the
 * business of pieces.c.
 *
 * koila__place() walks the recorded graph once, in order, and writes a *lowered* graph beside it:
 * most nodes are copied; a rule may instead emit a few nodes without a hidden reduction (nll_loss
 * mean, BatchNorm in training mode), see Note [Rewrites] in place_call.c. An operator without a
 * rule, or whose rule returns false, is *gathered*: every input needed R, results R, run once. That
 * is always right.
 *
 * The folder is one room because the walk and the rules call each other: the walk asks a rule about
 * each call, and a rule that rewrites hands its calls back to the walk (placer.h).
 */
#ifndef KOILA_SRC_PLACE_H
#define KOILA_SRC_PLACE_H

#include "base/alloc.h"
#include "koila/graph.h"

typedef enum koila_placement_kind { KOILA_R, KOILA_S, KOILA_P, KOILA_FREE } koila_placement_kind;
typedef enum koila_combine {
    KOILA_SUM,
    KOILA_MAX,
    KOILA_MIN,
    /* size[0] == 3: count, mean, sum of squared deviations; combined pairwise (Chan, Golub, LeVeque
     * 1979) */
    KOILA_MOMENTS,
    /* the value of the slice with rows outer .. inner, absent in all others; Note [Pieces] */
    KOILA_PIECE,
} koila_combine;

typedef struct koila_placement {
    uint8_t kind, combine, dim;
    uint16_t axis;
    int64_t outer, inner;
} koila_placement;

/* How a recorded call is adapted to a slice of b of `batch` rows. At most KOILA__MAX_FIXES a node;
 * positions are of positional values. */
typedef enum koila__fix_kind {
    KOILA__FIX_NONE,
    /* argument `arg` is a list of sizes of output `output`: the entry of its sliced dimension :=
     * outer * b * inner (an entry of -1 stays) */
    KOILA__FIX_SIZES,
    /* argument `arg` is a list of strides of output `output`: those of a dense tensor with the
     * slice's sizes, same dim order */
    KOILA__FIX_STRIDES,
    /* argument `arg` is an int: := outer * b * inner of output `output`, or of input `output` -
     * KOILA__FIX_OF_INPUT */
    KOILA__FIX_EXTENT,
    /* argument `arg` is an int, or a list of ints: each := value / batch * b (they are multiples of
     * batch; `output` is unused) */
    KOILA__FIX_ROWS,
    /* multiply output `output` by b / batch: the mean over a slice becomes its share of the mean
     * over the batch, and a factor 1/b becomes 1/batch */
    KOILA__FIX_SCALE,
    /* the call returns its first tensor input unchanged (a slice over the whole batch) */
    KOILA__FIX_ALIAS,
    /* a squeeze: call "aten::squeeze.dims" with those of the call's dims (all, when it names none)
     * of size 1 in the recorded input */
    KOILA__FIX_DIMS,
    /* argument `arg` is an index along the sliced dimension of output `output`, or of input
     * `output` - KOILA__FIX_OF_INPUT: counted from the slice's first row */
    KOILA__FIX_INDEX,
    /* the same for an end, the index after the last */
    KOILA__FIX_END,
    /* argument `arg` is an int: := the index of the slice's first row along the sliced dimension of
     * output `output`, or of input `output` - KOILA__FIX_OF_INPUT; outer == 1 */
    KOILA__FIX_FIRST,
    /* the same: := the index after the slice's last row */
    KOILA__FIX_AFTER,
} koila__fix_kind;
enum { KOILA__MAX_FIXES = 4, KOILA__FIX_OF_INPUT = 1000 };
typedef struct koila__fix {
    uint8_t kind, arg;
    uint16_t output;
} koila__fix;

/* Bytes of a partial sum that may become whole later than where it could first: a term of a loss,
 * counts by class. Larger ones are gradients and statistics, and when these become whole decides
 * what is held: made later, a ViT along its patches needed 1.07 to 1.13 times the least. */
enum { KOILA__LATE_BYTES = 4096 };

/* One link of a write's chain (koila_write.links), run on a slice. */
typedef struct koila__placed_link {
    koila__fix fix[KOILA__MAX_FIXES];
    koila_placement out; /* of the link's result */
} koila__placed_link;

typedef struct koila__placed_node {
    koila__fix fix[KOILA__MAX_FIXES]; /* up to the first KOILA__FIX_NONE */
    /* links of all writes of the node, one after another; NULL when there are none or not in a loop
     */
    const koila__placed_link *link;
    uint16_t axis;   /* of the loop it runs in, when sharded */
    uint8_t in_loop; /* runs once per slice; else once, on whole values */
    /* some input is S and is needed R: activations are collected (making a P input whole is no
     * gather) */
    uint8_t gathered;
    koila_node recorded; /* the recorded node it comes from */
    /* Note [Pieces]: runs only in the slice that has rows begin .. end; end == 0: in every slice */
    int64_t begin, end;
    /* joins pieces: takes those that its slice has */
    uint8_t joins;
    /* a sum of two terms: absent ones are left out */
    uint8_t sums;
    /* engine/recompute.c: it has run before, as another node; it is of the backward pass; it copies
     * a value to host memory or back, or waits for that */
    uint8_t is_again, is_backward, offloads;
} koila__placed_node;

/* Bytes of a value's storage: fixed + per_row * rows of the slice. */
typedef struct koila__size {
    uint64_t fixed, per_row;
} koila__size;

/* engine/addends.c: how a value gets into the accumulator of a loop's result. */
typedef enum koila__addend_kind {
    KOILA__ADDEND_NOT,
    KOILA__ADDEND,      /* is added as soon as its call has made it */
    KOILA__ADDEND_ONTO, /* its call can add it instead of making it */
    KOILA__ADDEND_TOLD, /* a view or a sum of such values, or the result itself: is not made */
    /* outside loops: its call can add it to the other term of the sum `to` */
    KOILA__ADDEND_SECOND,
} koila__addend_kind;
typedef struct koila__addend {
    uint8_t kind;       /* koila__addend_kind */
    koila_value to;     /* the result */
    uint32_t n_addends; /* of the result itself: calls that make them */
} koila__addend;

typedef struct koila__placed {
    koila_graph *graph;     /* the lowered graph; owned */
    koila_placement *value; /* [n_values of graph]; never FREE */
    /* [n_values of graph]: of the whole value when it is R or P, of a slice when it is S; 0 when it
     * does not exist */
    koila__size *size;
    /* [flat inputs of graph]: what each use needs; parallel to koila_node_inputs (need +
     * first_input) */
    koila_placement *need;
    koila__placed_node *node; /* [n_nodes of graph] */
    /* [n_values of the recorded graph] -> value of `graph`, or KOILA_NONE when not reached from the
     * targets */
    koila_value *lowered;
    /* [n_values of graph] the value may be absent in some slices: Note [Pieces]; NULL: none is */
    uint8_t *absent;
    /* [axes] NULL: slices may be cut anywhere; else [rows + 1]: the last row at or before each
     * where no piece is cut */
    int64_t **cut;
    /* [n_values of graph] of a step within a row (engine/both.c): a sum that is added to what
     * earlier rows left; NULL: none is */
    uint8_t *adds_on;
    koila__addend *addends; /* [n_values of graph] NULL: there are none */
    /* what is computed again and collected has loops of its own (engine/recompute.c) */
    bool again_apart;
    /* what is computed again runs in no earlier loop than the calls recorded before it */
    bool again_behind;
    bool unrolled; /* engine/unroll.c: writes join, or add up, what the slices have made */
    uint32_t n_recorded_values;
    /* allocated elements of `value`, `need`, `node` */
    size_t cap_values, cap_needs, cap_nodes;
    koila__arena arena; /* of the rest */
} koila__placed;

/** Places what `targets` (values of the recorded graph) need. When two axes meet in a node, the one
 * with more rows is kept. On success the caller owns *out: koila__placed_free(). Expected:
 * NO_MEMORY; BAD_ARGUMENT for a target that is no value; UNSUPPORTED when an opaque value would
 * have to be made whole. */
koila_status koila__place(const koila_graph *recorded, const koila_value *targets,
                          uint32_t n_targets, const koila_allocator *mem, koila__placed **out,
                          koila_error *err);
/** The same, but results of gathered calls are sliced again: Note [After a gather] in
 * place_call.c. */
koila_status koila__place_cut(const koila_graph *recorded, const koila_value *targets,
                              uint32_t n_targets, const koila_allocator *mem, koila__placed **out,
                              koila_error *err);
/** The same, of a graph with one axis; whole results of the calls that seeds[nodes of recorded]
 * marks are sliced too, along their first dimension of the axis' size. `narrowed`: rows of it are
 * those of a second axis (engine/narrow.h), and each is sliced along its own. */
koila_status koila__place_along(const koila_graph *recorded, const uint8_t *seeds, bool narrowed,
                                const koila_value *targets, uint32_t n_targets,
                                const koila_allocator *mem, koila__placed **out, koila_error *err);
/** The same, but rows that are taken out of the batch stay in their slice: Note [Pieces]. */
koila_status koila__place_pieces(const koila_graph *recorded, const koila_value *targets,
                                 uint32_t n_targets, const koila_allocator *mem,
                                 koila__placed **out, koila_error *err);
/** Does a gathered call of `p` take rows out of the batch, so that pieces would help? */
bool koila__takes_rows(const koila__placed *p);
/** Places the same graph with everything R and every node outside loops: the plan of one slice
 * (bit-equal to eager). */
koila_status koila__place_whole(const koila_graph *recorded, const koila_value *targets,
                                uint32_t n_targets, const koila_allocator *mem, koila__placed **out,
                                koila_error *err);
void koila__placed_free(koila__placed *p);
/** Every equation of this header; false (and err) when one does not hold. */
bool koila__placed_check(const koila__placed *p, koila_error *err);

/** Extent of dimension `p.dim` for a slice of b rows. */
static inline int64_t koila__extent(koila_placement p, int64_t b) { return p.outer * b * p.inner; }
/** Equal as far as the kind's fields go. Where they lie: a copy is read before it is written. */
static inline bool koila__placement_equal_at(const koila_placement *a, const koila_placement *b)
{
    if (a->kind != b->kind)
        return false;
    if (a->kind == KOILA_S)
        return a->axis == b->axis && a->dim == b->dim && a->outer == b->outer &&
               a->inner == b->inner;
    if (a->kind == KOILA_P)
        return a->axis == b->axis && a->combine == b->combine &&
               (a->combine != KOILA_PIECE || (a->outer == b->outer && a->inner == b->inner));
    return true;
}
static inline bool koila__placement_equal(koila_placement a, koila_placement b)
{
    return koila__placement_equal_at(&a, &b);
}
static inline bool koila__is_piece(koila_placement p)
{
    return p.kind == KOILA_P && p.combine == KOILA_PIECE;
}
/** Is the value added to a sum that was there before the step? */
static inline bool koila__adds_on(const koila__placed *p, koila_value v)
{
    return p->adds_on && p->adds_on[v];
}
/** Made of rows of the batch: to need it whole is a gather. */
static inline bool koila__is_of_rows(koila_placement p)
{
    return p.kind == KOILA_S || koila__is_piece(p);
}

/** The end of the slice that begins at row `begin` and wants `rows` rows: fewer at the end of the
 * batch or where a piece would be cut; more where a piece itself is larger. `begin` is 0 or such an
 * end. */
static inline int64_t koila__slice_end(const koila__placed *p, uint16_t axis, int64_t begin,
                                       int64_t rows)
{
    const int64_t batch = koila_graph_axis_size(p->graph, axis);
    int64_t end = rows < batch - begin ? begin + rows : batch;
    const int64_t *cut = p->cut ? p->cut[axis] : NULL;
    if (!cut)
        return end;
    if (cut[end] > begin)
        return cut[end];
    while (cut[end] != end)
        end++;
    return end;
}
/** Does the node run in the slice of these rows? */
static inline bool koila__runs_in(const koila__placed_node *n, int64_t begin, int64_t end)
{
    return n->end == 0 || (begin <= n->begin && n->end <= end);
}
/** Does the slice of these rows have the value, as far as its placement says? */
static inline bool koila__is_in(koila_placement p, int64_t begin, int64_t end)
{
    return !koila__is_piece(p) || (begin <= p.outer && p.inner <= end);
}
#endif
