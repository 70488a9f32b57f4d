/* tell.c — who is told of runs: the log (koila._log). koila.on_step() asks by itself, after each
 * backward, since its callbacks see gradients in place.
 *
 * The log is asked once a run until it has said of the run's plan all that it will: what it has
 * said is kept in the plan (cached.told), so a step that runs as it did before costs one look.
 *
 * Nor is it asked again about a plan of which its level keeps it from saying more, until a level
 * changes: logging empties each logger's table of levels then, and a mark that was left there is
 * gone. */
#include "run/run.h"

static PyObject *told;         /* of koila._log; NULL: nobody */
static PyObject *levels;       /* its logger's table of levels, a dict; NULL: not known */
static uint32_t n_changes = 1; /* of levels, as far as they were seen */

void koila__tell_to(PyObject *function, PyObject *table)
{
    Py_XSETREF(told, Py_XNewRef(function));
    Py_XSETREF(levels, table && PyDict_CheckExact(table) ? Py_NewRef(table) : NULL);
}

/* Brings n_changes up to date. False: nobody can tell. */
static bool see_changes(void)
{
    static PyObject *mark;
    if (!levels || (!mark && !(mark = PyUnicode_InternFromString("koila has asked"))))
        goto unknown;
    const int is_there = PyDict_Contains(levels, mark);
    if (is_there < 0 || (!is_there && PyDict_SetItem(levels, mark, Py_None) < 0))
        goto unknown;
    n_changes += !is_there;
    return true;
unknown:
    PyErr_Clear();
    return false;
}

/* What koila._log answers. */
enum { ALL = 3, ASK_AGAIN = 4 };

/* told(number, told, retries) -> what it has told of the plan now. */
static void ask(cached *c, const koila__step *step)
{
    PyObject *answer = PyObject_CallFunction(told, "KiI", (unsigned long long)step->number,
                                             (int)c->told, step->retries);
    const long bits = answer ? PyLong_AsLong(answer) : -1;
    if (bits >= 0)
        c->told = (uint8_t)(bits & ALL);
    else
        PyErr_WriteUnraisable(told);
    if (bits < 0 || bits & ASK_AGAIN)
        c->asked = 0;
    Py_XDECREF(answer);
}

void koila__tell(void)
{
    const koila__step *step = told ? koila__past_ran() : NULL;
    if (!step || (step->c->told == ALL && !step->retries))
        return;
    cached *c = step->c;
    const bool is_known = see_changes();
    if ((is_known && c->asked == n_changes && !step->retries) || koila__is_planning())
        return;
    c->asked = is_known ? n_changes : 0; /* before the log looks at its level */
    const koila__step now = *step;       /* the log may run a step of its own, and free this one */
    PyObject *function = Py_NewRef(told);
    c->refs++;
    ask(c, &now);
    koila__cached_release(c);
    Py_DECREF(function);
}
