/* helpers.h — functions of koila._capture by name: Python handles the rare cases. And attributes by
 * name. */
#ifndef KOILA_EXT_HELPERS_H
#define KOILA_EXT_HELPERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "koila/koila.h"

/* the module koila._capture */
extern PyObject *koila__helpers;
PyObject *koila__helper(const char *name); /* new reference */
/* The interned string, borrowed, made once: Python remembers where a class has an attribute only
 * for interned names. NULL + error. */
PyObject *koila__name(const char *name);
PyObject *koila__attribute(PyObject *o, const char *name); /* new; NULL + error */
/* Calls koila._capture.name(a, b, c) with the arguments before the first NULL. */
PyObject *koila__ask(const char *name, PyObject *a, PyObject *b, PyObject *c);

#endif
