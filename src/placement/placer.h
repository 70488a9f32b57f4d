/* placer.h — the state of one placement walk. Only its parts (walk.h) and rewrite.c (rewrites) see
 * it. */
#ifndef KOILA_SRC_PLACER_H
#define KOILA_SRC_PLACER_H

#include "placement/rules.h"
#include "base/vec.h"

typedef struct koila__op_rule { /* by operator id: found once */
    bool known;
    koila__rule rule;
    const char *user_rule; /* the text that koila__rule_user reads, or NULL */
} koila__op_rule;

typedef struct koila__settling {
    koila_node node;
    uint32_t next; /* of its inputs */
} koila__settling;

/* What the rules said of calls, by signature: calls repeat, layer after layer. Note [Answers] in
 * place_call.c. */
typedef struct koila__answer koila__answer;
enum { KOILA__ANSWERS = 512 };

/* An operator that rewrites have named. */
typedef struct koila__named {
    const char *name; /* as it was given: not compared as text */
    koila_op op;
} koila__named;
enum { KOILA__NAMES = 64 };

/* Rows were taken out of a tensor of these sizes, along dimension `dim`. */
typedef struct koila__taking {
    uint32_t n_dims, dim;
    int64_t size[KOILA_MAX_DIMS];
} koila__taking;
enum { KOILA__TAKINGS = 16 };

struct koila__placer {
    const koila_graph *from;
    koila_graph *to; /* the lowered graph, growing */
    koila_table *table;
    koila_allocator mem;
    koila__arena *keep; /* of the result */
    koila__arena scratch;
    koila__arena answers_room;
    koila__answer *answers[KOILA__ANSWERS]; /* by the last bits of the signature */
    bool looked_up;                         /* a rule has asked which calls made its inputs */
    VEC(koila_placement) value;             /* [values of to] */
    VEC(uint8_t) zero;                      /* [values of to] FREE and all zeros */
    VEC(uint8_t) absent; /* [values of to] may be absent in some slices: Note [Pieces] */
    /* [values of to] the whole form of this S or P value: made for uses that slice it otherwise, or
     * the value from which it was cut; KOILA_NONE: neither exists */
    VEC(koila_value) whole_of;
    VEC(uint32_t) level; /* [values of to] barriers on the longest path to it: Note [Late sums] */
    VEC(koila_placement) need;        /* [flat inputs of to] */
    VEC(koila__placed_node) node;     /* [nodes of to] */
    VEC(koila__op_rule) op;           /* [operators of table], grown on demand */
    koila__named named[KOILA__NAMES]; /* by the address of the name */
    uint32_t line;                    /* of the recorded node being placed, as an id of `to` */
    koila_node recorded;
    VEC(koila__settling) settling; /* nodes whose FREE inputs are being placed */
    bool whole;                    /* koila__place_whole */
    bool cut;                      /* koila__place_cut */
    bool pieces;                   /* koila__place_pieces */
    /* [nodes of from] cut the whole results of this call too; NULL: of none */
    const uint8_t *seeds;
    int64_t *unit;  /* [axes of from] entries of a leaf's dimension in a row: engine/axes.h */
    bool two;       /* ... and leaves are cut along different axes, or it is narrowed */
    bool narrowed;  /* ... and the second axis is a part of the first */
    bool may_own;   /* the call that is placed may give pieces */
    bool any_piece; /* some node has */
    koila__taking taking[KOILA__TAKINGS];
    uint32_t n_takings;  /* KOILA__TAKINGS: there may have been others */
    koila_status status; /* the first failure; the walk stops */
};

/** Intern the call, place it on `axis` (KOILA_NONE: that of its inputs), append it;
 * results[desc->n_fresh + n_writes]. false on failure, with p->status set. */
bool koila__placer_call(koila__placer *p, const koila_sig_info *desc, const koila_value *in,
                        uint32_t axis, koila_value *results);
/** *out: neighbours along dimension `dim` of a value of meta m, in rows of that axis; where another
 * axis than the batch's is cut, else in rows of one of the step's. False: its length is a multiple
 * of none. */
bool koila__placer_cut(const koila__placer *p, const koila_meta_info *m, uint32_t dim,
                       uint16_t axis, koila_placement *out);
/** *out: a whole alias of S or P value v, made outside loops, that can be sliced along another
 * dimension. False as above. */
bool koila__placer_whole(koila__placer *p, koila_value v, koila_value *out);
/** Places a FREE v as `want` if possible; a v that is already placed is unchanged. */
void koila__placer_slice(koila__placer *p, koila_value v, koila_placement want);
koila_placement koila__placer_placement(const koila__placer *p, koila_value v);

#endif
