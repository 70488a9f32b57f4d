/* helpers.c — see helpers.h. */
#include "ground/helpers.h"

PyObject *koila__helpers;

enum { N_NAMES = 128 };
static struct {
    const char *text;
    PyObject *name; /* owned */
} names[N_NAMES];

PyObject *koila__name(const char *name)
{
    const size_t slot = ((uintptr_t)name >> 2) % N_NAMES;
    if (names[slot].text == name && PyUnicode_CompareWithASCIIString(names[slot].name, name) == 0)
        return names[slot].name;
    PyObject *made = PyUnicode_InternFromString(name);
    if (!made)
        return NULL;
    names[slot].text = name;
    Py_XSETREF(names[slot].name, made);
    return made;
}

PyObject *koila__attribute(PyObject *o, const char *name)
{
    PyObject *interned = Py_XNewRef(koila__name(name));
    PyObject *r = interned ? PyObject_GetAttr(o, interned) : NULL;
    Py_XDECREF(interned);
    return r;
}

PyObject *koila__helper(const char *name)
{
    if (!koila__helpers) {
        koila__helpers = PyImport_ImportModule("koila._capture");
        if (!koila__helpers)
            return NULL;
    }
    return koila__attribute(koila__helpers, name);
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
