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

#endif
