/* rules.h — what a placement rule sees and must say.
 *
 * A rule looks at the placements of a call's inputs (all of one axis: others were made R first; FREE inputs look like R with .kind KOILA_FREE)
 * and answers true after writing
 *   need[i]  what each input must be (preset: in[i], and R for FREE). R for an S or P input is a barrier; S for an R or FREE input is a free slice.
 *   out[j]   placement of each result (preset: R)
 *   fix[]    how the call's arguments follow the slice (koila__fix in place.h)
 * or false: gather. A rule may only say what is *algebraically exact*; the rule oracle runs every rule whole and sliced and compares.
 * A rule may rewrite instead: emit other calls with koila__emit_* and set c->replaced[j] to the value that stands for result j.
 */
#ifndef KOILA_SRC_RULES_H
#define KOILA_SRC_RULES_H

#include "place.h"

typedef struct koila__placer koila__placer; /* the walk's state, in place.c */

typedef struct koila__case {
    koila__placer *placer;
    const koila_table *table;
    const koila_sig_info *sig;
    const char *op;                        /* "aten::add.Tensor"; an in-place call is shown as its functional twin */
    int64_t batch;                         /* rows of the axis */
    uint16_t axis;
    uint32_t n_in, n_out;
    const koila_value *in_value;           /* values of the lowered graph, for rewrites */
    const koila_meta_info *const *in_meta; /* for a written slot: of the view the operator writes */
    const koila_placement *in;
    koila_placement *need;
    const koila_meta_info *const *out_meta;
    koila_placement *out;
    koila__fix *fix;
    uint32_t n_fix;
    koila_value *replaced;                 /* preset KOILA_NONE; set all results that exist to rewrite */
} koila__case;

typedef bool (*koila__rule)(koila__case *c);
/** The rule of an operator by its ATen name, or NULL (gather). From ops.def. */
koila__rule koila__rule_of(const char *op);

#endif
