/* walk.h — the parts of the placement walk, as they see each other: place.c walks, place_call.c
 * places a call, attempt.c asks its rule, free_values.c places what was left open. Functions that
 * can fail return false, with p->status set where memory or the graph was the matter.
 */
#ifndef KOILA_SRC_WALK_H
#define KOILA_SRC_WALK_H

#include "placement/placer.h"
#include "graph/table.h"

/* A rule's answer for one call, or a gather. Its arrays lie in p->scratch. */
typedef struct koila__attempt {
    koila__case c;
    koila__fix fix[KOILA__MAX_FIXES];
    koila__placed_link *link; /* in p->keep */
    bool loop;                /* the call runs in the loop: some need or result is not R */
} koila__attempt;

/* Keeps the first failure; always false. */
static inline bool koila__placer_fail(koila__placer *p, koila_status s)
{
    if (p->status == KOILA_OK)
        p->status = s;
    return false;
}
static inline uint32_t koila__placer_facts(const koila__placer *p, const koila_sig_info *sig)
{
    return p->table->ops.at[sig->op].facts;
}

/* ---- attempt.c */

/* The operator's rule, looked up once; never NULL. */
const koila__op_rule *koila__placer_find_rule(koila__placer *p, koila_op op);
static inline const koila__op_rule *koila__placer_rule(koila__placer *p, koila_op op)
{
    const bool is_known = op < p->op.n && p->op.at[op].known;
    return is_known ? &p->op.at[op] : koila__placer_find_rule(p, op);
}
/* *a: the call with inputs placed `placed`, nothing asked yet: every need as placed, results R. */
bool koila__case_init(koila__placer *p, koila__attempt *a, const koila_sig_info *sig,
                      const koila_value *in, const koila_placement *placed, uint16_t axis);
/* koila__case_init() and the operator's rule. `want`: the placement wanted of the first result, or
 * NULL. False: gather, or p->status is set. */
bool koila__attempt_rule(koila__placer *p, koila__attempt *a, const koila_sig_info *sig,
                         const koila_value *in, const koila_placement *placed, uint16_t axis,
                         const koila_placement *want, bool may_emit);
/* Does every sliced need agree with the input's placement? (A barrier cannot be put in front of an
 * existing node.) */
bool koila__slices_as_placed(const koila__attempt *a);
/* Has the rule emitted calls in place of this one? */
bool koila__is_rewritten(const koila__attempt *a);
/* Calls try(S) for the placements a value of meta m can have over `batch` rows, the likeliest
 * first; stops at the first true. `like`: its factors are tried first in each dimension. */
typedef bool (*koila__try)(void *user, koila_placement s);
bool koila__each_placement(const koila_meta_info *m, int64_t batch, uint16_t axis,
                           koila_placement like, koila__try try, void *user);

/* ---- free_values.c */

/* Places the node by the attempt, and its FREE inputs as it needs them. */
bool koila__place_node(koila__placer *p, koila_node id, const koila__attempt *a);
/* The node runs once, on whole values, and so do the FREE nodes above it. */
bool koila__place_node_whole(koila__placer *p, koila_node id);
/* Settles a node that is still FREE: S if an input has become S meanwhile, else R. */
bool koila__place_free_node(koila__placer *p, koila_node id);

/* ---- place_call.c */

/* koila__placer_call() of a call that is interned. */
bool koila__placer_sig(koila__placer *p, koila_sig id, const koila_value *in, uint32_t axis,
                       koila_value *results);

#endif
