/* retold.h — a recorded step written down anew, with the same results. Internal to src/engine.
 *
 * Some calls are told otherwise where another axis than the rows is cut: narrow.c, stacked.c. What
 * results is a recorded step too, and is placed and scheduled like one. Nodes and values of it
 * stand for those of the recorded step, by which the rest of the planner and its callers know
 * them. */
#ifndef KOILA_SRC_RETOLD_H
#define KOILA_SRC_RETOLD_H

#include "base/vec.h"
#include "placement/place.h"

typedef struct koila__retold {
    koila_graph *graph; /* NULL: it stays as it was recorded */
    /* [values of the recorded step] of `graph`; KOILA_NONE: it has none, no target needs it */
    koila_value *value;
    uint32_t n_values;
    koila_node *node; /* [nodes of graph] the recorded one that it stands for */
    koila_value *targets;
    koila__arena keep;
} koila__retold;

void koila__retold_deinit(koila__retold *x);
/* *x becomes *next, which was made of x->graph, as one of the recorded step; *next has no graph
 * then. Expected: NO_MEMORY. */
koila_status koila__retold_again(koila__retold *x, uint32_t n_targets, koila__retold *next);
/* p, which is placed from x->graph, becomes one of the recorded step. Expected: NO_MEMORY. */
koila_status koila__retold_name(const koila__retold *x, koila__placed *p);

/* Writing one. */
typedef struct koila__reteller {
    const koila_graph *from;
    koila_table *table;
    koila_allocator mem;
    koila_graph *to;
    koila_node now;        /* of `from`: the one that is told */
    koila_value *value;    /* [values of from] of `to`, or KOILA_NONE: as in koila__retold */
    VEC(koila_node) nodes; /* as koila__retold.node */
    koila__arena tmp;
} koila__reteller;

/* `to` has the axes, lines and leaves of `from`, and no calls. The caller ends it with
 * koila__reteller_deinit(), also after a failure. Expected: NO_MEMORY. */
koila_status koila__reteller_init(koila__reteller *r, const koila_graph *from,
                                  const koila_allocator *mem);
void koila__reteller_deinit(koila__reteller *r);
/* Appends a call that stands for node `now`. Expected: NO_MEMORY. */
koila_status koila__retell(koila__reteller *r, koila_sig sig, const koila_value *in,
                           koila_value *first);
/* Appends a call of `op` on a tensor and n_args tokens, n_pos positional arguments, whose result
 * has meta `out`. Expected: NO_MEMORY. */
koila_status koila__retell_on(koila__reteller *r, koila_op op, koila_value in,
                              const koila_arg *args, uint32_t n_pos, uint32_t n_args,
                              koila_meta out, koila_value *result);
/* Appends the call of node `now` on these values, and sets r->value of its results. Expected:
 * UNSUPPORTED where it reads a layout that is another now; NO_MEMORY. */
koila_status koila__retell_as_it_is(koila__reteller *r, const koila_value *in);
/* *out: the step, whose targets are values of `to`. Expected: NO_MEMORY. */
koila_status koila__reteller_finish(koila__reteller *r, const koila_value *targets,
                                    uint32_t n_targets, koila__retold *out);

/* In a function that returns a koila_status. */
#define TRY_ALLOC(x)                                                                               \
    do {                                                                                           \
        if (!(x))                                                                                  \
            return KOILA_NO_MEMORY;                                                                \
    } while (0)

#endif
