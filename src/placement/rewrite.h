/* rewrite.h — how a rule writes a call out as other calls: a call is built token by token, and
 * koila__emit_end places it by its own rule at once.
 *
 *     koila__call k;
 *     koila__emit_begin(c, &k, "aten::div.Tensor", 0);
 *     koila__emit_value(&k, sum);
 *     koila__emit_value(&k, weight);
 *     koila_value mean = koila__emit_end(&k, c->sig->outputs[0]);
 *
 * A failure (no memory, a value that is KOILA_NONE) is remembered in the call and gives KOILA_NONE;
 * the next call that gets KOILA_NONE as a value fails too, so a rule checks only its last result.
 * Calls with several results: koila__emit_end_n.
 */
#ifndef KOILA_SRC_REWRITE_H
#define KOILA_SRC_REWRITE_H

#include "placement/rules.h"

#define KOILA__CALL_TOKENS 48
#define KOILA__CALL_VALUES 16

typedef struct koila__call {
    koila__case *c;
    bool bad;
    koila_op op;
    koila_arg token[KOILA__CALL_TOKENS];
    koila_value value[KOILA__CALL_VALUES];
    uint32_t kw_name[8];
    uint32_t n_tokens, n_values, n_pos, n_kw;
    uint32_t list; /* token of the open list, or KOILA_NONE */
    uint32_t axis; /* on which it is placed; KOILA_NONE: that of its inputs */
} koila__call;

/* op: a name that stays where it is while the step is placed: a literal, or of the table. */
void koila__emit_begin(koila__case *c, koila__call *k, const char *op, uint32_t op_flags);
void koila__emit_value(koila__call *k, koila_value v);
void koila__emit_values(koila__call *k, const koila_value *at, uint32_t n); /* a list of tensors */
void koila__emit_none(koila__call *k);
/* input `input` of the recorded call; None when it is KOILA_NONE */
void koila__emit_optional(koila__call *k, uint32_t input);
void koila__emit_int(koila__call *k, int64_t i);
void koila__emit_float(koila__call *k, double f);
void koila__emit_bool(koila__call *k, bool b);
void koila__emit_ints(koila__call *k, const int64_t *at, uint32_t n);
void koila__emit_bools(koila__call *k, const bool *at, uint32_t n);
void koila__emit_dtype(koila__call *k, koila_dtype d);
/* the recorded call's positional value, tensors included (as lowered values) */
void koila__emit_copy(koila__call *k, uint32_t pos);
/* the next value is this keyword; positional values are over */
void koila__emit_kw(koila__call *k, const char *name);
/** *out: how neighbours along dimension `dim` of a tensor of meta m are cut: in rows of the call's
 * axis, else of another axis of the step, which calls that make them are told: koila__emit_along().
 * False: the length is a multiple of no axis' rows. */
bool koila__emit_cut(const koila__case *c, const koila_meta_info *m, uint32_t dim,
                     koila_placement *out);
/* The call makes values that are cut so, from inputs of any axis, or whole ones. */
void koila__emit_along(koila__call *k, koila_placement made);
koila_value koila__emit_end(koila__call *k, koila_meta out);
bool koila__emit_end_n(koila__call *k, uint32_t n_out, const koila_meta *out, koila_value *results);

/** Metas. `like` gives the device; strides are contiguous. KOILA_NONE on failure (which emit_end
 * forwards). */
koila_meta koila__emit_meta(koila__case *c, const koila_meta_info *like, koila_dtype dtype,
                            uint32_t n_dims, const int64_t *size);
/* the same sizes and strides */
koila_meta koila__emit_meta_like(koila__case *c, const koila_meta_info *like, koila_dtype dtype);
const koila_meta_info *koila__emit_meta_of(const koila__case *c, koila_value v);
koila_meta koila__emit_meta_id(const koila__case *c, koila_value v);
/** A whole form of v, for calls that must not be sliced with it: an alias made outside loops, or v
 * itself when it is whole already. */
koila_value koila__emit_whole(koila__case *c, koila_value v);
/** Places v as `want` (S) if it is still FREE and can be S; called before a sum over it needs it
 * whole.
 */
koila_value koila__emit_sliced(koila__case *c, koila_value v, koila_placement want);
/** The placement an emitted (or input) value has now. */
koila_placement koila__emit_placement(const koila__case *c, koila_value v);

/* Calls that many rewrites need. `out` is the result's meta. */
koila_value koila__emit_unary(koila__case *c, const char *op, koila_value a, koila_meta out);
koila_value koila__emit_binary(koila__case *c, const char *op, koila_value a, koila_value b,
                               koila_meta out);
koila_value koila__emit_scalar(koila__case *c, const char *op, koila_value a, double b,
                               koila_meta out);
koila_value koila__emit_expand(koila__case *c, koila_value a, uint32_t n_dims, const int64_t *size);
koila_value koila__emit_view(koila__case *c, koila_value a, uint32_t n_dims, const int64_t *size);
/* a itself when its dtype is d already */
koila_value koila__emit_cast(koila__case *c, koila_value a, koila_dtype d);
/* to out's dtype; result meta is `out` */
koila_value koila__emit_cast_as(koila__case *c, koila_value a, koila_meta out);

#endif
