/* slice_call.h — a call on some rows, written down as a call of its own: its arguments and sizes
 * are those of the rows. Internal to src/engine. */
#ifndef KOILA_SRC_SLICE_CALL_H
#define KOILA_SRC_SLICE_CALL_H

#include "base/vec.h"
#include "engine/plan_inside.h"

/* Tells calls of a placed step on rows begin .. begin + rows. */
typedef struct koila__teller {
    const koila_plan *plan; /* only its placed step is read */
    koila_table *table;
    koila_allocator mem;
    koila__arena *tmp;
    int64_t begin; /* KOILA__ANYWHERE: calls that depend on it are refused */
    int64_t rows;
    VEC(koila_arg) tokens; /* freed by the owner */
} koila__teller;
enum { KOILA__ANYWHERE = -1 };

typedef struct koila__slice_call {
    koila_sig sig;
    bool is_alias; /* there is no call: the result is the first input */
    /* results that become their share of a mean over the batch: koila__tell_share() */
    uint32_t n_shares, shares[KOILA_MAX_ADAPTS];
} koila__slice_call;

/* The meta of the rows of a value placed x. Strides beyond the cut dimension shrink with it.
 * Expected: UNSUPPORTED for a value without a whole form; NO_MEMORY. */
koila_status koila__tell_meta(const koila__teller *t, koila_meta meta, koila_placement x,
                              koila_meta *out);
/* Do the arguments that fix[KOILA__MAX_FIXES] adapts depend on where the rows lie, not on how many
 * they are alone? */
bool koila__depends_on_place(const koila__fix *fix);
/* Can the call of node n, which is in a loop, be told so? Not where results have no whole form, nor
 * modules that run as they are. */
bool koila__can_tell(const koila__teller *t, koila_node n);
/* The call of node n on inputs of these metas. Expected: UNSUPPORTED, NO_MEMORY. */
koila_status koila__tell_call(koila__teller *t, koila_node n, const koila_meta *inputs,
                              koila__slice_call *out);
/* The product that makes a mean over the rows, of that meta, its share of node n's mean over the
 * batch. Expected: NO_MEMORY. */
koila_status koila__tell_share(const koila__teller *t, koila_node n, koila_meta meta,
                               koila_sig *out);

/* ---- calls that are written down anew */

/* m's form, dense: that of a tensor which is made to hold such values. Expected: NO_MEMORY. */
koila_status koila__dense_meta(koila_table *t, koila_meta meta, koila_meta *out);
/* A call of `op` on a tensor of meta `in` and n_args tokens, n_pos positional
 * arguments in all of them; its result has meta `out`. Expected: NO_MEMORY. */
koila_status koila__tell_on(koila_table *t, koila_op op, koila_meta in, const koila_arg *args,
                            uint32_t n_pos, uint32_t n_args, koila_meta out, koila_sig *sig);
/* The call `id` on inputs of other metas. Expected: UNSUPPORTED where it reads their layout;
 * NO_MEMORY. */
koila_status koila__tell_metas(koila_table *t, koila_sig id, const koila_meta *metas,
                               koila__arena *tmp, koila_sig *out);

typedef struct koila__op_named {
    koila_op *op;
    const char *name;
    uint32_t flags;
} koila__op_named;
static inline koila_status koila__find_ops(koila_table *t, const koila__op_named *of, size_t n)
{
    for (size_t i = 0; i < n; i++)
        KOILA_TRY(koila_table_op(t, of[i].name, of[i].flags, of[i].op));
    return KOILA_OK;
}

/* An int argument of a call, or `otherwise`. */
static inline int64_t koila__int_at(const koila_sig_info *s, uint32_t at, int64_t otherwise)
{
    return at < s->n_pos && s->tokens[s->start[at]].kind == KOILA_ARG_INT
               ? s->tokens[s->start[at]].u.i
               : otherwise;
}

static inline koila_arg koila__int_arg(int64_t i)
{
    return (koila_arg){ .kind = KOILA_ARG_INT, .u.i = i };
}

#endif
