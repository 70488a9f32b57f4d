/* settings.c — see settings.h.
 *
 *   configure(*, micro_batch, budget, cpu_budget, resident, strict, slices, dry, own_budget,
 *             own_micro_batch, axes, host_memory, step_aside, compile) ->
 *       the settings before, as a dict for configure(**dict); only the given settings change
 *   configure_process(*, budget, cpu_budget, resident, slices): where none is set here; only what
 *       is given changes
 *   configure_process_rows(micro_batch): where no micro_batch is entered
 *   configure_step_aside(bool): where no step_aside() is entered
 *
 * A context variable holds an object that never changes, so that a copied context keeps what was
 * set when it was copied.
 */
#include "ground/settings.h"
#include "base/base.h"
#include "ground/context.h"
#include "ground/cpu_bytes.h"
#include "ground/limits.h"

typedef struct settings_object {
    PyObject_HEAD
    koila__settings s;
} settings_object;

static PyTypeObject settings_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.Settings",
    .tp_basicsize = sizeof(settings_object),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
};

static PyObject *variable; /* contextvars.ContextVar */
static koila__settings process = { .budget = UINT64_MAX, .cpu_budget = UINT64_MAX };
static uint64_t n_process_settings; /* times that `process` was set */

/* Without the settings of the process. */
static koila__settings own(void)
{
    koila__settings s = { .budget = UINT64_MAX, .cpu_budget = UINT64_MAX };
    PyObject *o = koila__context_get(variable);
    if (o && Py_IS_TYPE(o, &settings_type))
        s = ((settings_object *)o)->s;
    Py_XDECREF(o);
    return s;
}

koila__settings koila__settings_now(void)
{
    koila__settings s = own();
    if (!s.own_rows && !s.dry && !s.rows && s.slices == KOILA__SLICES_AUTO)
        s.rows = process.rows;
    /* micro_batch(None) is automatic, whatever the process says, but KOILA_TUNE=0 holds */
    if (s.slices == KOILA__SLICES_AUTO && (!s.own_rows || process.slices == KOILA__SLICES_FEWEST))
        s.slices = process.slices;
    if (!s.own_budget && !s.dry) {
        s.has_budget = process.has_budget;
        s.budget = process.budget;
        s.cpu_budget = process.cpu_budget;
        s.resident = process.resident;
    }
    if (s.aside == KOILA__ASIDE_NOT_SAID)
        s.aside = process.aside;
    return s;
}

bool koila__settings_any(void)
{
    PyObject *o = koila__context_get(variable);
    Py_XDECREF(o);
    return o != NULL;
}

bool koila__is_planning(void) { return own().dry; }

uint64_t koila__settings_number(void)
{
    const koila__context *c = koila__context_peek();
    return n_process_settings + (c ? c->n_settings : 0);
}

KOILA__HOT uint64_t koila__settings_version(void)
{
    const koila__context *c = koila__context_peek();
    return n_process_settings + (c ? c->n_settings + c->n_dry : 0);
}

void koila__settings_enforce(void)
{
    if (koila__context_lent())
        return; /* this thread is not that context's */
    const koila__settings s = own();
    const bool holds = s.own_budget && !s.dry;
    koila__cpu_bytes_set_own_limit(holds, s.resident ? UINT64_MAX : s.cpu_budget);
    koila__resident_budget_here(holds && s.resident ? s.cpu_budget : UINT64_MAX,
                                koila__cpu_bytes_current());
}

static PyObject *number_or_none(bool is_number, uint64_t n)
{
    return is_number ? PyLong_FromUnsignedLongLong(n) : Py_NewRef(Py_None);
}

static const char *const axes_names[] = { "any", "batch", "other", "both" };
static const char *const slices_names[] = { "auto", "fewest", "fastest" };
static const char *const compile_names[] = { "off", "on", "auto" };

static PyObject *truth(bool on) { return Py_NewRef(on ? Py_True : Py_False); }

static PyObject *truth_or_none(int aside)
{
    return aside == KOILA__ASIDE_NOT_SAID ? Py_NewRef(Py_None) : truth(aside == KOILA__ASIDE_ON);
}

static PyObject *settings_dict(void)
{
    const koila__settings s = koila__settings_now();
    return Py_BuildValue(
        "{s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N}", "micro_batch",
        number_or_none(s.rows, (uint64_t)s.rows), "budget", number_or_none(s.has_budget, s.budget),
        "cpu_budget", number_or_none(s.cpu_budget != UINT64_MAX, s.cpu_budget), "resident",
        truth(s.resident), "strict", truth(s.strict), "slices",
        PyUnicode_FromString(slices_names[own().slices]), "dry", truth(s.dry), "own_budget",
        truth(s.own_budget), "own_micro_batch", truth(s.own_rows), "axes",
        PyUnicode_FromString(axes_names[s.axes]), "host_memory", truth(!s.no_host), "step_aside",
        truth_or_none(own().aside), "compile", PyUnicode_FromString(compile_names[s.compile]));
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

/* None: as the process says. */
static void set_aside(koila__settings *s, PyObject *o)
{
    if (o == Py_None)
        s->aside = KOILA__ASIDE_NOT_SAID;
    else if (o)
        s->aside = PyObject_IsTrue(o) == 1 ? KOILA__ASIDE_ON : KOILA__ASIDE_OFF;
}

/* Which of n names it is. `otherwise`: it was not given (NULL), or is none, with an exception. */
static int number_of(PyObject *name, const char *const *names, size_t n, int otherwise,
                     const char *expected)
{
    if (!name)
        return otherwise;
    for (size_t i = 0; i < n && PyUnicode_Check(name); i++)
        if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0)
            return (int)i;
    PyErr_SetString(PyExc_ValueError, expected);
    return otherwise;
}

static void set_axes(koila__settings *s, PyObject *axes)
{
    s->axes = number_of(axes, axes_names, KOILA_COUNT(axes_names), s->axes,
                        "axes must be \"any\", \"batch\", \"other\" or \"both\"");
}

static void set_slices(koila__settings *s, PyObject *slices)
{
    s->slices = number_of(slices, slices_names, KOILA_COUNT(slices_names), s->slices,
                          "slices must be \"auto\", \"fewest\" or \"fastest\"");
}

static void set_compile(koila__settings *s, PyObject *compile)
{
    s->compile = number_of(compile, compile_names, KOILA_COUNT(compile_names), s->compile,
                           "compile must be \"off\", \"on\" or \"auto\"");
}

static void set_budget(koila__settings *s, PyObject *budget, PyObject *cpu_budget,
                       PyObject *resident)
{
    s->resident = resident && PyObject_IsTrue(resident) == 1;
    s->has_budget = budget != Py_None;
    s->budget = bytes_of(budget, UINT64_MAX);
    s->cpu_budget = bytes_of(cpu_budget, s->budget);
}

static int store(koila__settings s)
{
    settings_object *o = PyObject_New(settings_object, &settings_type);
    if (!o)
        return -1;
    o->s = s;
    /* whoever has settings is no thread of torch's */
    koila__context *c = koila__context_now();
    const bool is_for_plan = s.dry || own().dry;
    PyObject *token = c ? PyContextVar_Set(variable, (PyObject *)o) : NULL;
    if (token)
        ++*(is_for_plan ? &c->n_dry : &c->n_settings);
    Py_DECREF(o);
    Py_XDECREF(token);
    return token ? 0 : -1;
}

static PyObject *py_configure(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = {
        "micro_batch", "budget", "cpu_budget",  "resident",        "strict",     "slices",  "dry",
        "own_budget",  "axes",   "host_memory", "own_micro_batch", "step_aside", "compile", NULL
    };
    PyObject *rows = NULL, *budget = NULL, *cpu_budget = NULL, *resident = NULL;
    PyObject *strict = NULL, *slices = NULL, *dry = NULL, *own_budget = NULL, *axes = NULL;
    PyObject *host = NULL, *own_rows = NULL, *aside = NULL, *compile = NULL;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "|$OOOOOOOOOOOOO:configure", names, &rows, &budget,
                                     &cpu_budget, &resident, &strict, &slices, &dry, &own_budget,
                                     &axes, &host, &own_rows, &aside, &compile))
        return NULL;
    koila__settings s = own();
    if (rows)
        s.rows = rows == Py_None ? 0 : PyLong_AsLongLong(rows);
    if (budget) {
        s.own_budget = true;
        set_budget(&s, budget, cpu_budget, resident);
    }
    set_axes(&s, axes);
    set_slices(&s, slices);
    set_compile(&s, compile);
    if (host)
        s.no_host = PyObject_IsTrue(host) != 1;
    if (!PyErr_Occurred() && s.rows < 0)
        PyErr_SetString(PyExc_ValueError, "micro_batch must be at least 1");
    PyObject *before = PyErr_Occurred() ? NULL : settings_dict();
    if (!before)
        return NULL;
    if (!kw || !PyDict_GET_SIZE(kw))
        return before;
    set_switch(&s.dry, dry);
    set_switch(&s.strict, strict);
    set_switch(&s.own_budget, own_budget);
    set_switch(&s.own_rows, own_rows);
    set_aside(&s, aside);
    if (budget)
        koila__cpu_bytes_install();
    if (store(s) < 0)
        Py_CLEAR(before);
    else
        koila__settings_enforce();
    return before;
}

static PyObject *py_configure_process(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = { "budget", "cpu_budget", "resident", "slices", NULL };
    PyObject *budget = NULL, *cpu_budget = NULL, *resident = NULL, *slices = NULL;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "|$OOOO:configure_process", names, &budget,
                                     &cpu_budget, &resident, &slices))
        return NULL;
    koila__settings s = process;
    if (budget)
        set_budget(&s, budget, cpu_budget, resident);
    set_slices(&s, slices);
    if (PyErr_Occurred())
        return NULL;
    process = s;
    n_process_settings++;
    koila__cpu_bytes_install();
    koila__cpu_bytes_set_limit(s.resident ? UINT64_MAX : s.cpu_budget);
    koila__resident_budget(s.resident ? s.cpu_budget : UINT64_MAX, koila__cpu_bytes_current());
    Py_RETURN_NONE;
}

static PyObject *py_configure_process_rows(PyObject *self, PyObject *micro_batch)
{
    const Py_ssize_t rows = PyLong_AsSsize_t(micro_batch);
    (void)self;
    if (rows < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "configure_process_rows: rows must be 0 or more");
        return NULL;
    }
    process.rows = rows;
    n_process_settings++;
    Py_RETURN_NONE;
}

static PyObject *py_configure_step_aside(PyObject *self, PyObject *on)
{
    (void)self;
    set_aside(&process, on);
    n_process_settings++;
    Py_RETURN_NONE;
}

static PyObject *py_is_planning(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    return PyBool_FromLong(koila__is_planning());
}

static PyMethodDef methods[] = {
    { "is_planning", py_is_planning, METH_NOARGS, "Is koila.plan() recording here?" },
    { "configure", (PyCFunction)(void (*)(void))py_configure, METH_VARARGS | METH_KEYWORDS,
      "Change settings of this thread or task; returns the old ones as a dict." },
    { "configure_process", (PyCFunction)(void (*)(void))py_configure_process,
      METH_VARARGS | METH_KEYWORDS, "The budget and the slices wherever none are set." },
    { "configure_process_rows", py_configure_process_rows, METH_O,
      "configure_process_rows(micro_batch): where no micro_batch() is entered. 0: as few slices as "
      "fit" },
    { "configure_step_aside", py_configure_step_aside, METH_O,
      "configure_step_aside(bool): may torch do steps alone, wherever no step_aside() is "
      "entered?" },
    { NULL, NULL, 0, NULL },
};

int koila__settings_add_module(PyObject *m)
{
    if (!variable && !(variable = PyContextVar_New("koila settings", NULL)))
        return -1;
    if (PyType_Ready(&settings_type) < 0)
        return -1;
    return PyModule_AddFunctions(m, methods);
}
