/* tell.c — who is told of runs: the log (koila._log). koila.on_step() asks by itself, after each
 * backward, since its callbacks see gradients in place.
 *
 * The log is asked once a run until it has said of the run's plan all that it will: what it has
 * said is kept in the plan (cached.told), so a step that runs as it did before costs one look. */
#include "run/run.h"

static PyObject *told; /* of koila._log; NULL: nobody */

void koila__tell_to(PyObject *function) { Py_XSETREF(told, Py_XNewRef(function)); }

/* told(number, told, retries) -> what it has told of the plan now. */
static void ask(cached *c, const koila__step *step)
{
    PyObject *answer = PyObject_CallFunction(told, "KiI", (unsigned long long)step->number,
                                             (int)c->told, step->retries);
    const long bits = answer ? PyLong_AsLong(answer) : -1;
    if (bits >= 0)
        c->told = (uint8_t)bits;
    else
        PyErr_WriteUnraisable(told);
    Py_XDECREF(answer);
}

void koila__tell(void)
{
    enum { ALL = 3 };
    const koila__step *step = told ? koila__past_ran() : NULL;
    if (!step || (step->c->told == ALL && !step->retries) || koila__is_planning())
        return;
    cached *c = step->c;
    const koila__step now = *step; /* the log may run a step of its own, and free this one */
    PyObject *function = Py_NewRef(told);
    c->refs++;
    ask(c, &now);
    koila__cached_release(c);
    Py_DECREF(function);
}
