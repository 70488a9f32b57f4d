/* modes.c — other people's modes (TorchDispatchMode, TorchFunctionMode) while a step is run.
 *
 * A mode that was active when an operator was recorded has seen it, and what it did with the result
 * was recorded too. In the run it would see the same operator again, once for each slice: results
 * that it changes would be changed twice, and floating point operations counted twice. A mode that
 * is active only at the run (around backward, or around a print) would see operators that in eager
 * have long been over. So modes are put aside while a step is run, and belong to the recording.
 */
#include "run/run.h"

static bool is_empty(PyObject *length)
{
    PyObject *n = PyObject_CallNoArgs(length);
    const bool empty = n && PyLong_Check(n) && PyLong_AsLong(n) == 0;
    Py_XDECREF(n);
    PyErr_Clear();
    return empty;
}

int koila__modes_aside(PyObject **aside)
{
    *aside = NULL;
    if (koila__torch_setup() < 0)
        return -1;
    if (is_empty(koila__torch.n_dispatch_modes) && is_empty(koila__torch.n_function_modes))
        return 0;
    *aside = PyObject_CallNoArgs(koila__torch.modes_aside);
    return *aside ? 0 : -1;
}

int koila__modes_back(PyObject *aside, int status)
{
    if (!aside)
        return status;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallMethod(aside, "back", NULL);
    Py_XDECREF(done);
    Py_DECREF(aside);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return done ? status : -1;
}
