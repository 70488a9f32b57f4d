/* helpers.c — see helpers.h. */
#include "ground/helpers.h"

PyObject *koila__helpers;

PyObject *koila__raise(koila_status s)
{
    if (s == KOILA_NO_MEMORY)
        return PyErr_NoMemory();
    PyErr_Format(s == KOILA_BAD_ARGUMENT ? PyExc_SystemError : PyExc_RuntimeError, "koila: %s",
                 koila_status_text(s));
    return NULL;
}

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

PyObject *koila__unsupported(const char *format, ...)
{
    PyObject *e = koila__helper("UnsupportedError");
    if (!e)
        return NULL;
    va_list args;
    va_start(args, format);
    PyErr_FormatV(e, format, args);
    va_end(args);
    Py_DECREF(e);
    return NULL;
}
