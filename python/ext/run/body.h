/* body.h — a loop's body, as the two files that know it see it: body.c runs it, body_trace.c has
 * it made. What others see is in run.h and exec.h. */
#ifndef KOILA_EXT_BODY_H
#define KOILA_EXT_BODY_H

#include "run/exec.h"

typedef struct koila__body {
    PyObject *function;  /* owned; NULL: none yet, or none any more */
    koila_value *wholes; /* owned [n_wholes] */
    uint32_t n_wholes;
    /* of its stage, beyond what was held before the step; 0: never measured. On a GPU see below */
    uint64_t peak_bytes;
    double walked, ran; /* the shortest full slice in seconds, without and with it; 0: none */
    uint32_t n_ran;     /* full slices since they were compared last */
    uint32_t n_lost;    /* comparisons */
    bool rests;         /* the next run is walked, to compare with it */
    PyObject *clock;    /* owned: the koila._cuda.Clock of a run that was not read yet; or NULL */
    uint32_t n_clocked; /* full slices of that run */
    bool is_clocked_compiled;
    bool has_won; /* on a GPU it is not compared again: that takes events */
} koila__body;

struct koila__bodies {
    uint32_t n_runs;    /* of the plan, in slices */
    uint32_t n_awaited; /* asked for, and not answered yet */
    bool is_asked;
    uint64_t ran_out_at; /* the most bytes of room in which a body ran out of memory; 0: none did */
    uint64_t gpu_peak_bytes; /* of the last whole run with bodies that was measured on a GPU, beyond
                                what was held before the step; 0: none was */
    koila__body at[];        /* [stages] */
};

/* Is it an ADD to a sum that the body itself adds to? */
bool koila__body_is_sum(const koila_plan *p, const koila_instr *in);
/* The memory of such a sum. New, not filled; NULL with an exception. */
PyObject *koila__body_new_sum(const exec *x, koila_value v);
/* Appends `o`, which may be NULL with an exception, and takes it. */
int koila__body_append(PyObject *list, PyObject *o);
/* The next of a list of inputs or results, new; NULL: there is none, with an exception. */
PyObject *koila__body_next(PyObject *list, Py_ssize_t *at);
/* What random call n draws for the slice whose body this thread runs: new; NULL with an exception.
 * As in the walk, from the state that was recorded for the call. */
PyObject *koila__body_draw(koila_node n);
/* KOILA__COMPILE_...; OFF too where the last bits of a sum must not depend on the clock: on when a
 * function is there, and whether it is faster. */
int koila__body_mode(const cached *c);
/* After a run: bodies that are slower than their loops are dropped. */
void koila__bodies_judge(cached *c);

#endif
