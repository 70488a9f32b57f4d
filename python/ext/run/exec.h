/* exec.h — a run of a plan, shared by the files that walk it:
 *
 *   exec.c         stages, slices, instructions     exec_values.c  what slices read and give
 *   exec_node.c    one call                         exec_random.c  what random calls draw from
 *   body.c         slices as one compiled function
 */
#ifndef KOILA_EXT_EXEC_H
#define KOILA_EXT_EXEC_H

#include "run/run.h"

#include "base/vec.h"

typedef struct piece {
    int64_t begin, end;
    PyObject *tensor;
} piece;
typedef VEC(piece) pieces;

enum { MAX_GENERATORS = 17 }; /* the CPU and 16 GPUs */

/* A run of a plan, or of the step within a row of one. */
typedef struct exec {
    /* of a step within a row: the run of the rows, and the step; else NULL */
    const struct exec *outer;
    const koila_inner *inner;
    koila__tape *tape; /* NULL: a body is walked (body.c) */
    const cached *c;
    const koila_plan *plan;
    const koila_graph *g;
    const koila_table *table;
    const koila_node *node_from; /* nodes of c->part -> nodes of the tape */
    /* [values] owned, like the next three arrays: values outside of loops, or collected */
    PyObject **whole;
    PyObject **local; /* of the running slice */
    PyObject **acc;   /* being collected: sums, and results joined from slices */
    pieces *kept;     /* rows kept for a later loop */
    /* [instrs of the stage] set: these rows were added to that accumulator already */
    uint8_t *done;
    uint32_t n_values;
    int64_t begin, end, batch; /* rows of the running slice; 0, 0, 0 outside of loops */
    uint64_t n_run;
    uint32_t retries;
    koila__progress *progress; /* NULL: of a step within a row */
    bool measure;
    /* borrowed: the ranks that run the same sharded calls at the same time; NULL: none */
    PyObject *ranks;
    bool failure_announced;  /* a rank failed, and all ranks know */
    bool failed_inside_call; /* this rank failed where it cannot tell the others */
    bool uses_bodies;        /* compiled ones, where there are any (body.c) */
    bool has_body;           /* the running stage */
    bool failed_in_body;     /* what it added to sums is not known */
    uint64_t base_bytes;     /* held before the run; with uses_bodies */
    uint64_t compiled;       /* bit k: stage k used its body */
    struct used {
        PyObject *generator; /* of the user */
        /* of the CPU: the run draws from one of its own, so that what other threads draw from the
         * user's meanwhile is neither repeated nor lost; else NULL */
        PyObject *own;
        PyObject *own_state; /* with `own`: a tensor for its states, which lies in `memory` */
        PyObject *memory;    /* a bytearray */
        PyObject *state; /* of `generator` before the step, where the run draws from it; or NULL */
    } used[MAX_GENERATORS];
    uint32_t n_used;
    PyObject *draws_from;            /* borrowed: the `own` of the node that runs, or NULL */
    const struct used *used_by_node; /* what the node that runs draws from; NULL: nothing */
    struct cursor {
        /* state of the generator just before it draws element `at` (in the order of memory) of the
         * node's result */
        PyObject *state;
        int64_t at;
    } *cursors; /* [nodes], NULL until the first rows are drawn */
} exec;

static inline int64_t koila__exec_n_rows(const exec *x) { return x->end - x->begin; }
static inline bool koila__exec_is_whole(const exec *x)
{
    return x->begin == 0 && x->end == x->batch;
}

/* The recorded node that node n of the plan stands for. */
static inline koila_node koila__exec_recorded(const exec *x, koila_node n)
{
    const koila_node recorded = koila_plan_recorded(x->plan, n);
    if (!x->inner || recorded == KOILA_NONE)
        return recorded;
    return koila_plan_recorded(x->outer->plan, x->inner->nodes[recorded]);
}

/* ---- exec_values.c. The values are those of the running slice. */
const koila_meta_info *koila__exec_meta(const exec *x, koila_value v); /* of all rows */
/* The slice's rows of `whole`, a tensor of all rows that is placed as share `s`: a view where that
 * can be. */
PyObject *koila__exec_rows(const exec *x, PyObject *whole, koila_share s);
/* What becomes local v: the rows of whole v. A dense value stays dense, so that recorded views work
 * on the slice too. */
PyObject *koila__exec_slice(exec *x, koila_value v, koila_share s);
/* Is local v absent from this slice, as the plan foresees? */
bool koila__exec_is_absent(const exec *x, koila_value v);
/* Absent local v is zero: makes it. */
int koila__exec_make_absent(exec *x, koila_value v);
/* Puts the slice's rows of v into the whole result. Not owned: local v may still be written in
 * place. */
int koila__exec_put(exec *x, koila_value v, bool owned);
/* Adds the slice's share of v to the accumulator. */
int koila__exec_add(exec *x, koila_value v, bool owned);
/* Adds the result of `in`, which has run (KOILA_INSTR_ADDS), to its accumulator, or makes it that:
 * there is no local value then. */
int koila__exec_take_addend(exec *x, const koila_instr *in);
/* New: the memory of `t`, which is like whole value `from`, seen as `to`, which lies there too. */
PyObject *koila__exec_seen_as(const exec *x, PyObject *t, koila_value from, koila_value to);
/* Keeps the rows of v for a later loop. */
int koila__exec_keep(exec *x, koila_value v);
/* What becomes local v: the kept rows of the slice: one piece unchanged; or pieces cut and joined,
 * if the slices have changed after an out-of-memory. */
PyObject *koila__exec_fetch(exec *x, koila_value v);
/* Releases the pieces of v within [begin, end). */
void koila__exec_give_up(exec *x, koila_value v, int64_t begin, int64_t end);

/* ---- exec_random.c */
/* Before node n runs, if it draws: sets its generator to the state before the recorded draw: 0. Or
 * draws the rows of the slice right here: 1. -1 with an exception. */
int koila__exec_prepare_random(exec *x, koila_node n, bool in_loop);
/* Restores those of the user's generators that the run drew from. -1 with an exception if that
 * failed and none was set before. */
int koila__exec_give_generators_back(exec *x);
void koila__exec_free_random(exec *x);

/* ---- body.c. Runs the body of that stage on the running slice. */
bool koila__body_is_there(const exec *x, uint32_t stage);
int koila__body_run(exec *x, uint32_t stage);

/* ---- exec.c: memory of a run. Init fails with an exception; free is needed in any case. */
int koila__exec_init(exec *x);
void koila__exec_free(exec *x);

/* ---- exec_node.c */
/* Runs the node of `in` on the rows of the running slice, or (not in_loop) on whole values. */
int koila__exec_node(exec *x, const koila_instr *in, bool in_loop);
/* Runs the call of `in` (KOILA_INSTR_ONTO) such that it adds its result to the accumulator, or (not
 * in_loop) to the whole value. */
int koila__exec_add_onto(exec *x, const koila_instr *in, bool in_loop);

#endif
