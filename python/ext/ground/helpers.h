/* helpers.h — functions of koila._capture by name: Python handles the rare cases. */
#ifndef KOILA_EXT_HELPERS_H
#define KOILA_EXT_HELPERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "koila/koila.h"

/* the module koila._capture */
extern PyObject *koila__helpers;
PyObject *koila__helper(const char *name); /* new reference */
/* Calls koila._capture.name(a, b, c) with the arguments before the first NULL. */
PyObject *koila__ask(const char *name, PyObject *a, PyObject *b, PyObject *c);

#endif
