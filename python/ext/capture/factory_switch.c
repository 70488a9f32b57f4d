/* factory_switch.c — decides when koila's entries replace torch.zeros, ones, full and empty: while
 * a step with a batch is open and the executor does not run. This file knows neither tapes nor
 * handles; those who open or close a step tell it. The entries themselves: factories.c. */
#include "capture/capture.h"

/* owned: torch.zeros, ...; NULL: not the kind of function that koila knows, left alone */
static PyCFunctionObject *function[KOILA__N_FACTORY_KINDS];
static vectorcallfunc ours[KOILA__N_FACTORY_KINDS];
static uint64_t open_tape, batch_tape; /* uid; 0: none */
static int n_holds;
static bool is_on;

static void look(void)
{
    const bool on = open_tape && open_tape == batch_tape && !n_holds;
    if (on == is_on)
        return;
    is_on = on;
    for (int k = 0; k < KOILA__N_FACTORY_KINDS; k++)
        if (function[k])
            function[k]->vectorcall = on ? ours[k] : NULL;
}

bool koila__switch_is_on(void)
{
    koila_assert(is_on == (open_tape && open_tape == batch_tape && !n_holds));
    return is_on;
}

void koila__switch_open(uint64_t tape)
{
    open_tape = tape;
    look();
}

void koila__switch_batch(uint64_t tape)
{
    batch_tape = tape;
    look();
}

void koila__switch_hold(bool more)
{
    koila_assert(more || n_holds > 0);
    n_holds += more ? 1 : -1;
    look();
}

void koila__switch_add(int kind, PyObject *f, vectorcallfunc replacement)
{
    koila_assert(!is_on && !function[kind]);
    function[kind] = (PyCFunctionObject *)Py_NewRef(f);
    ours[kind] = replacement;
}

PyObject *koila__switch_function(int kind) { return (PyObject *)function[kind]; }
