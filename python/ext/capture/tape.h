/* tape.h — the tape (one recorded step), which capture fills and run/ executes.
 *
 * One tape is open at a time in each context (a thread, an asyncio task): lazy() joins it, or opens
 * a new one.
 *
 *   graph            koila_graph: nodes in recorded order
 *   values[v].real   the concrete tensor of value v: always set for a leaf, for others once made
 *   effects          real tensors whose new contents are lazy (BatchNorm's running statistics);
 *                    the run that ends the step writes them once
 *
 * The tape keeps no wrapper alive: values[v].handle is borrowed, and is NULL once nobody can ask
 * for v any more.
 */
#ifndef KOILA_EXT_TAPE_H
#define KOILA_EXT_TAPE_H

#include "base/base.h"
#include "ground/context.h"
#include "ground/real.h"
#include "ground/settings.h"

#include <sys/types.h>

struct koila__handle; /* the Value object in LazyTensor's slot; handle.c */

typedef struct tape_value {
    PyObject *real;     /* owned torch.Tensor, or NULL: not concrete */
    uint32_t n_handles; /* that can still ask for this value */
    uint32_t version;   /* of a leaf: `_version` of `real` when it was recorded */
    uint32_t mark;      /* koila__tape_held(): compared with koila__tape.mark */
    uint32_t kept;      /* 1 + its place in koila__tape.kept; 0: it is not kept */
    koila_cut cut;      /* of a made value whose `real` a read left: how a run may slice it */
} tape_value;

/* See Note [Kept] in kept.c. */
typedef struct koila__kept {
    PyObject *tensor;    /* owned */
    const void *storage; /* of `tensor` */
    koila_value value;
    koila_cut cut;   /* how a run may slice it */
    bool only_whole; /* it depends on the batch, and no slice of it is one of a dimension */
} koila__kept;

typedef struct tape_effect {
    PyObject *real; /* owned: the user's tensor, which gets the contents of `value` */
    koila_value value;
    uint32_t version; /* `_version` of `real` when the effect was recorded */
} tape_effect;

/* See Note [Back doors] in watches.c. */
typedef struct tape_watch {
    koila_value value;
    PyObject *real;  /* borrowed: the tensor of `value` then; with another one the watch is over */
    PyObject *alias; /* owned tensor with a version counter of its own; NULL: the memory */
    uint64_t mark;   /* the counter, or the fingerprint of the memory */
} tape_watch;

/* A graph that outlives its tape. */
typedef struct koila__recording {
    koila_graph *graph; /* owned */
    uint32_t refs;
} koila__recording;

typedef struct koila__tape {
    PyObject_HEAD
    koila_graph *graph;
    koila__recording *recording; /* owned, of `graph`; NULL: nobody else keeps that */
    tape_value *values;          /* [koila_graph_n_values(graph)] */
    uint32_t n_values_alloc;
    tape_effect *effects;
    uint32_t n_effects, n_effects_alloc;
    uint32_t n_handles;      /* live handles of this tape */
    koila__context *context; /* owned: the one that it was made in, or that took it over */
    /* the thread that recorded in it last; while n_entered is not 0 no other may, see turn.c */
    unsigned long thread;
    uint32_t n_entered;
    bool left_meanwhile; /* its last handle died elsewhere meanwhile: koila__step_left() */
    /* A plain tensor with a graph behind it was made from its values: a backward may come back
     * through it. */
    bool has_exit;
    /* Its backward does what the tape does not show: a value of another step that autograd follows
     * was moved here, or what autograd saves went through functions of the user's. */
    bool odd_backward;
    /* The devices of its batches, and the process that made them lazy: see factories.c. */
    uint16_t devices[8];
    uint32_t n_devices;
    pid_t process;
    int64_t lengths[8]; /* of the long dimensions of its batches: see factories.c */
    uint32_t n_lengths;
    /* its step has run; the next lazy() opens a new tape, in which values of this one become
     * leaves */
    bool closed;
    bool planned; /* recorded by koila.plan(): it never runs */
    /* torch compiled some of the code that was recorded in it, which runs compiled elsewhere */
    bool compiles;
    /* the last run failed: the effects do not happen unless a later run succeeds */
    bool failed;
    /* the last run that somebody asked for failed, when so many nodes were there, plus one; 0: it
     * did not */
    uint32_t refused_at;
    /* an axis was opened, and its leaf comes next: needed although there is no handle yet */
    bool waiting;
    bool let_go;                   /* closed, and values that nobody can ask for are released */
    bool ran;                      /* something was made concrete since it was opened */
    struct koila__handle *handles; /* borrowed list of all live handles, linked by next_in_tape */
    /* open addressing, keyed by the real tensor's address: n_leaf_slots is 0 or a power of two */
    struct tape_leaf *leaves;
    uint32_t n_leaves, n_leaf_slots;
    tape_watch *watches;
    uint32_t n_watches, n_watches_alloc;
    struct tape_random *random; /* sorted by node, since nodes are recorded in order */
    uint32_t n_random, n_random_alloc;
    /* [n_axes] process-wide identity of each axis, so that a batch leaf can move to the next tape
     */
    uint64_t *axis_ids;
    uint32_t n_axis_ids;
    bool compacted; /* closed, and its concrete values have left it */
    bool is_island; /* made for one concrete value that outlives its step */
    bool resting;   /* in koila__resting_tapes */
    struct koila__tape *next_tape, *prev_tape; /* all live tapes */
    uint64_t uid;                              /* never reused in this process */
    uint32_t mark;                             /* larger than the marks of all values */
    /* what reads leave for the next run; tight: not all of it fits, see run/reads.c */
    struct {
        koila__kept *at; /* owned [n] */
        uint32_t n, n_alloc;
        uint32_t n_reads; /* so far */
        bool tight;
        uint64_t n_bytes; /* of all, views too */
    } kept;
    /* what its runs before the backward have done; run/past.c counts it */
    struct {
        uint64_t *nodes; /* owned [n_words]: a bit for each node that was run */
        uint32_t n_words;
        uint64_t n_run;                         /* operators, over all slices */
        double n_recorded, work, work_recorded; /* as koila_plan_info has them */
    } reads;
    /* owned list or NULL: gathers that happened while recording, as gathers_list() in plan_report.c
     * makes them */
    PyObject *early;
    PyObject *weakrefs;
} koila__tape;

typedef struct tape_leaf {
    PyObject *real; /* borrowed from values[].real or effects[].real; NULL: empty slot */
    koila_meta meta;
    /* the value that a read of `real` gives now: its leaf, or the value of its effect */
    koila_value value;
    uint32_t version;
} tape_leaf;

typedef struct tape_random {
    koila_node node;
    /* owned: torch's default generator of the device, which draws when the node runs */
    PyObject *generator;
    /* owned bytes: state of the generator just before eager would have drawn */
    PyObject *state;
    /* words of the generator per element, drawn in the order of memory; 0: not known, so only the
     * whole tensor can be drawn */
    uint32_t words;
} tape_random;

/* ---- operators.c, arguments.c, step.c (koila__tape_held), tape.c */
/* borrowed torch._ops.OpOverload; resolves "aten::sum.dim_IntList" by name too; NULL + error */
PyObject *koila__op_object(koila_op op);
PyObject *koila__opaque_object(uint32_t id); /* borrowed */
/* The lazy values of `t` that the user, and not only autograd's saved tensors, can still ask for.
 * Fills out[cap] and returns their number. A view also counts its shared base, unless the view
 * itself is `wanted` (a gradient). */
uint32_t koila__tape_held(koila__tape *t, const koila_value *wanted, uint32_t n_wanted,
                          koila_value *out, uint32_t cap);
/* A walk through the values of `t` marks them with t->mark or one of the next. No value has such a
 * mark after this: all have smaller ones. */
enum { KOILA__MARKS_OF_A_WALK = 3 };
void koila__tape_new_walk(koila__tape *t);
/* The record of random node `n`, its state borrowed; NULL without an error: not a random node. */
const tape_random *koila__tape_random(koila__tape *t, koila_node n);
/* All live tapes, linked by next_tape. Those that rest are islands as they were made, which have no
 * effects, and no leaf that is found by its tensor: one for each loss that a program keeps. No step
 * walks them. */
extern koila__tape *koila__tapes, *koila__resting_tapes;
void koila__tape_rests(koila__tape *t, bool rests);
/* New reference; NULL without an exception: no memory. */
koila__recording *koila__tape_recording(koila__tape *t);
void koila__recording_release(koila__recording *r);
bool koila__tape_reads(const koila__tape *t, const PyObject *real); /* is `real` a leaf of t? */
void koila__tape_drop_effects(koila__tape *t);                      /* forgets them all */
/* Forgets those which have happened: the tensors reals[i], held by the caller, with the contents of
 * values[i], in the order in which they were recorded. */
void koila__tape_drop_happened(koila__tape *t, PyObject *const *reals, const koila_value *values,
                               uint32_t n);
void koila__tape_give_up(koila__tape *t); /* the step failed: its effects do not happen */
void koila__tape_let_go(koila__tape *t);
/* A value of the tape with value_of[value] != 0, value < n, whose tensor was written where no
 * version counter of its own shows it; KOILA_NONE: there is none. */
koila_value koila__written_behind(koila__tape *t, const koila_value *value_of, uint32_t n);
/* Makes `real` (taken over from the caller) the tensor of value v. */
void koila__tape_set_real(koila__tape *t, koila_value v, PyObject *real);

/* ---- kept.c. Dropping may run Python, last. */
/* Borrowed until the next call of these; NULL: v is not kept. */
const koila__kept *koila__kept_of(const koila__tape *t, koila_value v);
/* Takes kept.tensor over; drops it where v is concrete or kept, or there is no memory for it. */
void koila__keep(koila__tape *t, koila__kept kept);
void koila__unkeep(koila__tape *t, koila_value v); /* v need not be kept */
void koila__unkeep_all(koila__tape *t);
/* Shall kept value v go? */
typedef bool koila__kept_test(const koila__tape *t, koila_value v, void *user);
uint32_t koila__unkeep_those(koila__tape *t, koila__kept_test *goes, void *user); /* how many */
void koila__unkeep_storage(koila__tape *t, const void *storage); /* all that have that memory */

#endif
