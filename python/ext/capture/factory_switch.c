/* factory_switch.c — decides when koila's entries replace torch.zeros, ones, full, empty and
 * arange: while a step with a batch is open in some context. Whether a call belongs to that step is
 * asked when it comes. This file knows neither tapes nor handles; those who open or close a step
 * tell it. The entries themselves: factories.c. */
#include "capture/capture.h"

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
