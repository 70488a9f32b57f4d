/* factory_switch.c — decides when koila's entries replace those of torch's functions.
 *
 * Of torch.zeros, ones, full, empty and arange: while a step with a batch is open in some context.
 * Whether a call belongs to that step is asked when it comes. The entries: factories.c.
 *
 * Of functions that write, more than a thousand: from the beginning of a step until they have been
 * called some thousand times while there was none. So they are not exchanged in each step, and a
 * program that koila leaves alone calls torch's. The entries: plain_functions.c.
 *
 * This file knows neither tapes nor handles; those who open or close a step tell it. */
#include "capture/capture.h"

#include "base/vec.h"

/* owned: torch.zeros, ...; NULL: not the kind of function that koila knows, left alone */
static PyCFunctionObject *function[KOILA__N_FACTORY_KINDS];
static vectorcallfunc ours[KOILA__N_FACTORY_KINDS];
static int n_batches; /* open tapes with a batch */

void koila__switch_batch(int n_more)
{
    const bool was_on = n_batches > 0;
    n_batches += n_more;
    koila_assert(n_batches >= 0);
    const bool on = n_batches > 0;
    for (int k = 0; k < KOILA__N_FACTORY_KINDS && on != was_on; k++)
        if (function[k])
            function[k]->vectorcall = on ? ours[k] : NULL;
}

void koila__switch_add(int kind, PyObject *f, vectorcallfunc replacement)
{
    koila_assert(!n_batches && !function[kind]);
    function[kind] = (PyCFunctionObject *)Py_NewRef(f);
    ours[kind] = replacement;
}

PyObject *koila__switch_function(int kind) { return (PyObject *)function[kind]; }

/* ---- functions that write */

enum { CALLS_WITHOUT_A_STEP = 4096 };

typedef struct writer {
    PyCFunctionObject *function; /* owned */
    vectorcallfunc ours, theirs;
} writer;

static VEC(writer) writers;
static bool writers_are_on;
static int n_idle; /* calls since the last step began */

void koila__writers_add(PyObject *f, vectorcallfunc replacement)
{
    PyCFunctionObject *c = (PyCFunctionObject *)f;
    if (!koila__vec_push(&koila__libc, &writers, ((writer){ c, replacement, c->vectorcall })))
        return;
    Py_INCREF(f);
    if (writers_are_on)
        c->vectorcall = replacement;
}

static void switch_writers(bool on)
{
    for (uint32_t i = 0; i < writers.n; i++)
        writers.at[i].function->vectorcall = on ? writers.at[i].ours : writers.at[i].theirs;
    writers_are_on = on;
}

void koila__writers_begin(void)
{
    n_idle = 0;
    if (!writers_are_on)
        switch_writers(true);
}

void koila__writers_idle(void)
{
    if (++n_idle > CALLS_WITHOUT_A_STEP && writers_are_on)
        switch_writers(false);
}
