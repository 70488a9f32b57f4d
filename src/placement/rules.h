/* rules.h — the input and output of a placement rule, and the helpers that rules are written with.
 *
 * A rule looks at the placements of a call's inputs. They are all of one axis: inputs of another
 * axis were made R first. Otherwise a FREE input counts as R (koila__is_r). The rule answers true
 * after writing
 *   need[i]  what each input must be (preset: in[i], and R for FREE). R for an S or P input is a
 *            barrier. S is a free slice for an R or FREE input; for an input that is placed
 *            otherwise it is a barrier and then a slice. P is for a P input, or for a FREE one with
 *            zero[i]. A call that needs a P needs no S and gives only P, because a partial sum may
 *            not be combined with rows. Exceptions are operators that add rows into the P
 *            (index_add, scatter_add, index_put with accumulate): their rules set c->accumulates.
 *   out[j]   the placement of each result (preset: R). When a need or a result is not R the call
 *            runs in the loop: then *every* result that exists is S or P.
 *   fix[]    how the call's arguments follow the slice (koila__fix in place.h)
 * or false: gather.
 *
 * A rule's answer must be *algebraically exact* for all values of the arguments; the rule oracle
 * runs every call whole and sliced and compares. A rule must read the placement of every tensor
 * argument: an overlooked P input gives silently wrong results.
 *
 * A rule may rewrite instead: emit other calls with koila__emit_* (rewrite.h) and set
 * c->replaced[j] to the value that stands for result j; allowed only when c->may_emit. The emitted
 * calls are placed by their own rules.
 *
 * `want` is set when a FREE result is being resolved: a use needs result 0 (for writes: the written
 * view) as *want. A rule that can place it so without a sharded input (factories, expand,
 * pointwise) does; the others ignore it, and the walk tries placements of the FREE inputs.
 */
#ifndef KOILA_SRC_RULES_H
#define KOILA_SRC_RULES_H

#include "placement/place.h"

typedef struct koila__placer koila__placer; /* the walk's state, in placer.h */

typedef struct koila__case {
    koila__placer *placer;
    const koila_table *table;
    const koila_sig_info *sig;
    const char *user_rule; /* the text of the rule a user gave for the operator, or NULL */
    int64_t batch;         /* rows of the axis */
    uint16_t axis;
    uint32_t n_in, n_out;
    const koila_value *in_value;           /* values of the lowered graph, for rewrites */
    const koila_meta_info *const *in_meta; /* for a written slot: of the view the operator writes */
    const koila_placement *in;
    const bool *zero; /* [n_in] FREE and known to be all zeros */
    koila_placement *need;
    const koila_meta_info *const *out_meta; /* [n_out] NULL for a result that is None */
    koila_placement *out;
    koila__fix *fix;
    uint32_t n_fix;
    const koila_placement *want; /* see above; usually NULL */
    bool may_emit;
    /* the result is the P input plus the contribution of this slice's rows */
    bool accumulates;
    /* bit i: the call does not read input i for these arguments (a random state without dropout);
     * need[i] is its placement */
    uint32_t unread;
    /* preset KOILA_NONE; to rewrite, set it for all results that exist */
    koila_value *replaced;
    /* Note [Pieces] in place.h. may_own: results may be pieces. own: the piece that the call
     * belongs to, or R; joins, sums: as in koila__placed_node */
    bool may_own, joins, sums;
    koila_placement own;
} koila__case;

typedef bool (*koila__rule)(koila__case *c);
/** The rule of an operator, by ops.def: an array read. NULL: gather. */
koila__rule koila__rule_of(const koila_table *t, koila_op op);
/** The text of the rule a user gave for an operator (koila_table_rule), or NULL; and the rule that
 * reads it. */
const char *koila__user_rule_of(const koila_table *t, koila_op op);
bool koila__rule_user(koila__case *c);
/** The operators of ops.def that have a rule, in order; false past the end. `family` is the rule's
 * name without "koila__rule_". */
bool koila__op_line(uint32_t i, const char **name, const char **family, const char **says);

/* ---- placements */

static inline koila_placement koila__r(void) { return (koila_placement){ .kind = KOILA_R }; }
static inline koila_placement koila__s(const koila__case *c, uint32_t dim, int64_t outer,
                                       int64_t inner)
{
    return (koila_placement){
        .kind = KOILA_S, .dim = (uint8_t)dim, .axis = c->axis, .outer = outer, .inner = inner
    };
}
static inline koila_placement koila__p(const koila__case *c, koila_combine combine)
{
    return (koila_placement){ .kind = KOILA_P, .combine = (uint8_t)combine, .axis = c->axis };
}
/* the same S on another dimension */
static inline koila_placement koila__moved(koila_placement p, uint32_t dim)
{
    p.dim = (uint8_t)dim;
    return p;
}
static inline bool koila__is_r(koila_placement p)
{
    return p.kind == KOILA_R || p.kind == KOILA_FREE;
}
static inline bool koila__is_s(koila_placement p) { return p.kind == KOILA_S; }
static inline bool koila__is_p(koila_placement p) { return p.kind == KOILA_P; }
static inline bool koila__is_sum(koila_placement p)
{
    return p.kind == KOILA_P && p.combine == KOILA_SUM;
}

/* A result of which each slice has its own and no whole form exists: the workspace of a recurrent
 * layer. Note [Opaque] in place.h. */
static inline koila_placement koila__opaque(const koila__case *c) { return koila__s(c, 0, 0, 0); }
static inline bool koila__is_opaque(koila_placement p)
{
    return p.kind == KOILA_S && p.outer == 0 && p.inner == 0;
}

/* ---- inputs and results (rules.c) */

/** Some input is P. Most rules start with: if (koila__any_p(c)) return false; */
bool koila__any_p(const koila__case *c);
/** The S input with the most elements, or KOILA_NONE. */
uint32_t koila__lead(const koila__case *c);
/** The same among the first n inputs. */
uint32_t koila__lead_among(const koila__case *c, uint32_t n);
/** p is S, its dimension exists in m and has size outer * batch * inner; or p is opaque (outer ==
 * inner == 0), which
 *  fits every tensor with a dimension. */
bool koila__fits(const koila__case *c, koila_placement p, const koila_meta_info *m);
/** Input i must be exactly p (S): a barrier when it is placed otherwise; false when p does not fit
 * it. */
bool koila__need(koila__case *c, uint32_t i, koila_placement p);
/** Input i whole: a barrier when it is S or P. */
void koila__need_r(koila__case *c, uint32_t i);
/** Input i is broadcast to a tensor of n dims that is placed p (S): needs the aligned S where it
 * has that dimension at full size, else R.
 *  (An S input placed otherwise costs a barrier.) */
void koila__need_aligned(koila__case *c, uint32_t i, koila_placement p, uint32_t n_dims);
/** Every result that exists is p, except empty ones, which are P; false when p does not fit one. */
bool koila__out_all(koila__case *c, koila_placement p);
/** Result 0 is placed as input i; true. */
bool koila__out_like(koila__case *c, uint32_t i);
/** Result 0 is p (S); every other one that exists is a partial sum (gradients of what is whole). */
bool koila__out_rows_and_sums(koila__case *c, koila_placement p);
/** Some input is P: the call is linear in input 0 alone, so input 0 must be a sum and the others
 * whole; result 0 is then a sum. */
bool koila__linear_in_first(koila__case *c);
/** Some input is P: the call is linear in all of them together, so each must be a sum or zeros; the
 * results are then sums. */
bool koila__linear_in_all(koila__case *c);
/** The first n inputs are rows placed p, the others whole; false when p does not fit one. */
bool koila__need_rows(koila__case *c, uint32_t n, koila_placement p);

/** Input i holds the row numbers 0, 1, ..., n - 1 along its dimension *dim and is constant along
 * the others (an arange, seen through views and
 *  integer casts; origin.c looks up who made it). n is its size there. */
bool koila__is_row_numbers(const koila__case *c, uint32_t i, uint32_t *dim);
/** Input i holds 0, step, 2 * step, ... and was made by such an arange; step > 0. */
bool koila__is_steps(const koila__case *c, uint32_t i, int64_t *step);

/* ---- pieces (pieces.c) */

/** The call takes elements first .. last of S input 0, along its sliced dimension: all results are
 * pieces. False: not in one block, more than half of the batch, or pieces are not wanted. */
bool koila__take_rows(koila__case *c, int64_t first, int64_t last);
/** Have rows been taken out of a tensor of m's sizes, along dimension d? True when that is not
 * known. */
bool koila__was_taken(const koila__case *c, const koila_meta_info *m, uint32_t d);
/** Says that they have been. */
void koila__take_note(const koila__case *c, const koila_meta_info *m, uint32_t d);
/** May the results of the call be pieces of at most `n_elements` elements of S input 0? */
bool koila__may_take(const koila__case *c, int64_t n_elements);
/** Places a call that has pieces among its inputs; false: they must be made whole. */
bool koila__rule_pieces(koila__case *c);
/** Is the call a sum of two terms that are written as they are, also in place? */
bool koila__is_plain_sum(const koila__case *c);

/* ---- arguments (rules.c). Positions count positional values; defaults may have been left out. */

/* first token, or NULL when left out */
const koila_arg *koila__arg(const koila__case *c, uint32_t pos);
const koila_arg *koila__kw(const koila__case *c, const char *name);
/* index among the inputs of a tensor argument, or KOILA_NONE */
uint32_t koila__input_at(const koila__case *c, uint32_t pos);
bool koila__is_absent(const koila__case *c, uint32_t pos); /* left out or None */
bool koila__arg_int(const koila__case *c, uint32_t pos, int64_t otherwise, int64_t *out);
bool koila__arg_bool(const koila__case *c, uint32_t pos, bool otherwise, bool *out);
bool koila__arg_number(const koila__case *c, uint32_t pos, double otherwise, double *out);
/** A dimension, negative ones wrapped; false when out of range. */
bool koila__arg_dim(const koila__case *c, uint32_t pos, int64_t otherwise, uint32_t n_dims,
                    uint32_t *out);
/** A list of dimensions (or one int) as a bit set, and in order in list[KOILA_MAX_DIMS] when not
 * NULL. Left out or None: *n = 0, true. */
bool koila__arg_dims(const koila__case *c, uint32_t pos, uint32_t n_dims, uint32_t *set,
                     uint32_t *list, uint32_t *n);
/** A fix; false when there are too many. */
bool koila__fix_add(koila__case *c, koila__fix_kind kind, uint32_t arg, uint32_t output);
/** The tensors of a list argument: first input index and count. false when it is no list of
 * tensors. */
bool koila__arg_tensors(const koila__case *c, uint32_t pos, uint32_t *first, uint32_t *n);

/** A keyword, or `otherwise` when it was left out; false when it is something else. None is left
 * out. */
bool koila__kw_int(const koila__case *c, const char *name, int64_t otherwise, int64_t *out);
bool koila__kw_number(const koila__case *c, const char *name, double otherwise, double *out);

bool koila__dtype_is_float(koila_dtype d);
/** The dtype of sums over the batch: float32 for half precision, else the type itself. */
koila_dtype koila__accumulate_type(koila_dtype d);
/** The dtype of koila::moments: float32 for half precision, float64 for float32 (as PyTorch's own
 * CPU statistics), else the type itself. */
koila_dtype koila__moments_type(koila_dtype d);
bool koila__dtype_is_complex(koila_dtype d);

/* ---- the families: every rule named in ops.def */

/* generated by the compiler from the table; a family used by several lines is declared as often,
 * which C allows */
#define KOILA_OP(name, rule, says, facts) bool koila__rule_##rule(koila__case *c);
#define KOILA_GATHERED(name, facts)
#include "graph/ops.def"
#undef KOILA_OP
#undef KOILA_GATHERED

#endif
