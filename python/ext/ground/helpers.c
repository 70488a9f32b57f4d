/* helpers.c — see helpers.h. */
#include "ground/helpers.h"

PyObject *koila__helpers;

PyObject *koila__helper(const char *name)
{
    if (!koila__helpers) {
        koila__helpers = PyImport_ImportModule("koila._capture");
        if (!koila__helpers)
            return NULL;
    }
    return PyObject_GetAttrString(koila__helpers, name);
}

PyObject *koila__ask(const char *name, PyObject *a, PyObject *b, PyObject *c)
{
    PyObject *f = koila__helper(name);
    if (!f)
        return NULL;
    PyObject *r = PyObject_CallFunctionObjArgs(f, a, b, c, NULL);
    Py_DECREF(f);
    return r;
}
