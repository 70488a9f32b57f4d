/* helpers.h — functions of koila._capture by name: what is rare is asked of Python. */
#ifndef KOILA_EXT_HELPERS_H
#define KOILA_EXT_HELPERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "koila/koila.h"

/* the module koila._capture, for what is rare */
extern PyObject *koila__helpers;
PyObject *koila__helper(const char *name); /* new reference */
/* koila._capture.name(a, b, c), up to the first NULL */
PyObject *koila__ask(const char *name, PyObject *a, PyObject *b, PyObject *c);

#endif
