/* unroll_inside.h — a step that is told: which calls there are, on what, in no order yet.
 * unroll_tell.c writes it, unroll.c puts it into an order. Internal to src/engine. */
#ifndef KOILA_SRC_UNROLL_INSIDE_H
#define KOILA_SRC_UNROLL_INSIDE_H

#include "base/vec.h"
#include "engine/slice_call.h"
#include "graph/table.h"
#include "placement/place.h"

/* A value of the told step. */
typedef uint32_t koila__item;

typedef enum koila__told_kind {
    KOILA__TOLD_CALL,
    KOILA__TOLD_JOIN, /* the whole form of a value from its parts */
    KOILA__TOLD_SUM,  /* the same of partial sums */
} koila__told_kind;

typedef struct koila__told {
    uint8_t kind;
    bool is_single;          /* told once, not for each slice */
    bool is_first;           /* of a slice: it reads only what is told once */
    bool is_late;            /* told once, from a sum over all slices */
    koila_sig sig;           /* of a call */
    koila_node from;         /* of the placed step */
    koila_value stands_for;  /* of a join or sum: of the placed step */
    uint32_t first_in, n_in; /* of `ins` */
    koila__item first_out;
    uint32_t n_out;
} koila__told;

typedef struct koila__item_info {
    koila_meta meta;
    uint32_t by; /* of `told`; KOILA_NONE: a leaf */
} koila__item_info;

typedef struct koila__item_use {
    koila__item item;
    uint32_t by; /* of `told` */
} koila__item_use;

typedef struct koila__told_step {
    const koila__placed *p;
    koila_table *table;
    koila_allocator mem;
    uint32_t n_slices; /* of each axis */
    koila__arena tmp;
    koila__item *whole; /* [values of p] or KOILA_NONE */
    VEC(koila__told) told;
    VEC(koila__item_info) items;
    VEC(koila__item_use) ins;
} koila__told_step;

/* Tells all calls of s->p; wanted[n_targets]: its targets. The owner frees told, items, ins and
 * tmp. Expected: UNSUPPORTED, NO_MEMORY. */
koila_status koila__tell_step(koila__told_step *s, const koila_value *targets, uint32_t n_targets,
                              koila__item *wanted);

/* The first row of slice k of that axis; of k == n_slices: the end. */
static inline int64_t koila__told_begin(const koila__told_step *s, uint16_t axis, uint32_t k)
{
    return (int64_t)k * s->p->graph->axes.at[axis] / s->n_slices;
}

/* args[2 * KOILA_MAX_DIMS + 2] := sizes and strides as two lists; returns how many tokens they are.
 */
static inline uint32_t koila__form_args(const koila_meta_info *m, koila_arg *args)
{
    uint32_t n = 0;
    args[n++] = (koila_arg){ .kind = KOILA_ARG_LIST, .n = m->n_dims };
    for (uint32_t d = 0; d < m->n_dims; d++)
        args[n++] = koila__int_arg(m->size[d]);
    args[n++] = (koila_arg){ .kind = KOILA_ARG_LIST, .n = m->n_dims };
    for (uint32_t d = 0; d < m->n_dims; d++)
        args[n++] = koila__int_arg(m->stride[d]);
    return n;
}

#define TRY_ALLOC(p)                                                                               \
    do {                                                                                           \
        if (!(p))                                                                                  \
            return KOILA_NO_MEMORY;                                                                \
    } while (0)

#endif
