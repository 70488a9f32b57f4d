/* settings.c — see settings.h.
 *
 *   configure(*, micro_batch, budget, cpu_budget, strict, fastest, dry) -> the settings before, as
 *       a dict for configure(**dict); only the given settings change
 */
#include "ground/settings.h"
#include "ground/cpu_bytes.h"

struct koila__settings koila__settings = { .budget = UINT64_MAX, .cpu_budget = UINT64_MAX };

bool koila__is_planning(void) { return koila__settings.dry; }

static PyObject *number_or_none(bool is_number, uint64_t n)
{
    return is_number ? PyLong_FromUnsignedLongLong(n) : Py_NewRef(Py_None);
}

static PyObject *settings_dict(void)
{
    const struct koila__settings *s = &koila__settings;
    return Py_BuildValue("{s:N,s:N,s:N,s:O,s:O,s:O}", "micro_batch",
                         number_or_none(s->rows, (uint64_t)s->rows), "budget",
                         number_or_none(s->has_budget, s->budget), "cpu_budget",
                         number_or_none(s->cpu_budget != UINT64_MAX, s->cpu_budget), "strict",
                         s->strict ? Py_True : Py_False, "fastest", s->fastest ? Py_True : Py_False,
                         "dry", s->dry ? Py_True : Py_False);
}

/* Reads `o`, a number or None for no limit. NULL: not given, so `otherwise`. */
static uint64_t bytes_of(PyObject *o, uint64_t otherwise)
{
    if (!o)
        return otherwise;
    return o == Py_None ? UINT64_MAX : PyLong_AsUnsignedLongLong(o);
}

static void set_switch(bool *out, PyObject *o)
{
    if (o)
        *out = PyObject_IsTrue(o) == 1;
}

static PyObject *py_configure(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = {
        "micro_batch", "budget", "cpu_budget", "strict", "fastest", "dry", NULL
    };
    PyObject *rows = NULL, *budget = NULL, *cpu_budget = NULL;
    PyObject *strict = NULL, *fastest = NULL, *dry = NULL;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "|$OOOOOO:configure", names, &rows, &budget,
                                     &cpu_budget, &strict, &fastest, &dry))
        return NULL;
    int64_t new_rows = koila__settings.rows;
    if (rows)
        new_rows = rows == Py_None ? 0 : PyLong_AsLongLong(rows);
    const uint64_t new_budget = bytes_of(budget, UINT64_MAX);
    const uint64_t new_cpu_budget = bytes_of(cpu_budget, new_budget);
    if (!PyErr_Occurred() && new_rows < 0)
        PyErr_SetString(PyExc_ValueError, "micro_batch must be at least 1");
    PyObject *before = PyErr_Occurred() ? NULL : settings_dict();
    if (!before)
        return NULL;
    /* nothing fails from here on */
    koila__settings.rows = new_rows;
    set_switch(&koila__settings.dry, dry);
    set_switch(&koila__settings.strict, strict);
    set_switch(&koila__settings.fastest, fastest);
    if (budget) {
        koila__cpu_bytes_install();
        koila__settings.has_budget = budget != Py_None;
        koila__settings.budget = new_budget;
        koila__settings.cpu_budget = new_cpu_budget;
        if (!koila__settings.dry)
            koila__cpu_bytes_set_limit(new_cpu_budget);
    }
    return before;
}

static PyMethodDef methods[] = {
    { "configure", (PyCFunction)(void (*)(void))py_configure, METH_VARARGS | METH_KEYWORDS,
      "Change settings; returns the old ones as a dict." },
    { NULL, NULL, 0, NULL },
};

int koila__settings_add_module(PyObject *m) { return PyModule_AddFunctions(m, methods); }
