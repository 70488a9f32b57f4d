/* settings.h — what the user has set: koila.budget(), micro_batch(), strict(), step_aside(), and
 * whether koila.plan() records.
 *
 * They belong to the running thread or asyncio task, by the rules of contextvars: a new task starts
 * with those of the task that made it, a new thread with none, and nothing that is set in one is
 * seen in another. koila.set_budget(), KOILA_BUDGET, KOILA_MICRO_BATCH and KOILA_STEP_ASIDE are the
 * process's: they hold wherever no budget(), no micro_batch() and no step_aside() is entered. */
#ifndef KOILA_EXT_SETTINGS_H
#define KOILA_EXT_SETTINGS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

typedef struct koila__settings {
    int64_t rows; /* forced rows of a slice; 0: automatic */
    /* limit on all bytes held on the device in use; UINT64_MAX: as much as is free */
    uint64_t budget;
    /* the same on the CPU, where it holds for every allocation of this thread: torch itself raises
     * beyond it */
    uint64_t cpu_budget;
    bool has_budget;
    bool resident; /* cpu_budget limits the resident memory of the process, not torch's bytes */
    bool strict;   /* refuse plans that gather */
    /* which dimensions of the batch may be cut. For tests: OTHER, another one than the rows, and
     * BOTH, another one within each row; `rows` counts its entries */
    enum { KOILA__CUT_ANY, KOILA__CUT_BATCH, KOILA__CUT_OTHER, KOILA__CUT_BOTH } axes;
    bool no_host; /* values of a GPU may not wait in host memory */
    /* which of the sizes that fit, where no rows are forced (run/tuning.c). AUTO: as the process
     * says */
    enum { KOILA__SLICES_AUTO, KOILA__SLICES_FEWEST, KOILA__SLICES_FASTEST } slices;
    enum { KOILA__COMPILE_OFF, KOILA__COMPILE_ON, KOILA__COMPILE_AUTO } compile; /* loops */
    bool dry;        /* koila.plan(): steps are planned, and nothing runs */
    bool own_budget; /* a budget() is entered here, so the process's does not count */
    bool own_rows;   /* the same of micro_batch() */
    /* may torch do steps alone that need no koila? NOT_SAID: as the process says */
    enum { KOILA__ASIDE_NOT_SAID, KOILA__ASIDE_ON, KOILA__ASIDE_OFF } aside;
} koila__settings;

/* Those of the running code. */
koila__settings koila__settings_now(void);
/* Has the running code settings of its own, perhaps from the task that made it? */
bool koila__settings_any(void);
bool koila__is_planning(void); /* is koila.plan() recording? */
/* Changes whenever settings are set for the running code, except by koila.plan(). */
uint64_t koila__settings_number(void);
/* Changes whenever settings are set for the running code. Of one context: others count apart. */
uint64_t koila__settings_version(void);
/* The limit on the CPU's bytes is that of the running code's settings from now on, for what this
 * thread allocates in this context. */
void koila__settings_enforce(void);
int koila__settings_add_module(PyObject *m);

#endif
