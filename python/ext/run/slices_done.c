/* slices_done.c — the slices of a long run, told to koila._progress while it runs: for the first
 * time after two seconds, then ten times a second at most. Between slices only the clock is looked
 * at, and that only where somebody wants to know. */
#include "run/run.h"
#include "ground/clock.h"

static const double NEXT_SECONDS = 0.1;
static double first_seconds = 2;
static PyObject *show; /* of koila._progress; NULL: nobody */

void koila__progress_to(PyObject *function) { Py_XSETREF(show, Py_XNewRef(function)); }

double koila__progress_after(double seconds)
{
    const double before = first_seconds;
    first_seconds = seconds;
    return before;
}

/* Slices of all loops. */
static uint64_t n_slices_of(const koila_plan *plan)
{
    uint64_t n = 0;
    const uint32_t n_stages = koila_plan_get(plan).n_stages;
    for (uint32_t k = 0; k < n_stages; k++) {
        const koila_stage *st = koila_plan_stage(plan, k);
        n += st->is_loop && st->n_instrs ? koila_plan_slices(plan, st->axis) : 0;
    }
    return n;
}

koila__progress koila__progress_begin(const koila_plan *plan)
{
    if (!show)
        return (koila__progress){ 0 };
    return (koila__progress){ .is_shown = true,
                              .n_all = n_slices_of(plan),
                              .next = koila__seconds_now() + first_seconds };
}

/* show(done, all, is_over) -> does it show that? The exception of the run, if any, is kept. */
static void tell(koila__progress *p, bool is_over)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *function = Py_NewRef(show);
    PyObject *answer =
        PyObject_CallFunction(function, "KKO", (unsigned long long)p->n_done,
                              (unsigned long long)p->n_all, is_over ? Py_True : Py_False);
    if (!answer)
        PyErr_WriteUnraisable(function);
    p->is_shown = answer == Py_True;
    p->was_shown |= p->is_shown;
    Py_XDECREF(answer);
    Py_DECREF(function);
    PyErr_Restore(type, value, trace);
}

void koila__progress_slice(koila__progress *p)
{
    p->n_done++;
    if (!p->is_shown || !show)
        return;
    const double now = koila__seconds_now();
    if (now < p->next)
        return;
    p->next = now + NEXT_SECONDS;
    tell(p, false);
}

void koila__progress_end(koila__progress *p)
{
    if (p->was_shown && show)
        tell(p, true);
}
