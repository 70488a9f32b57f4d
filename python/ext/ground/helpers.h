/* helpers.h — Python is asked, and told of errors: functions of koila._capture by name, for all
 * that is rare. */
#ifndef KOILA_EXT_HELPERS_H
#define KOILA_EXT_HELPERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "koila/koila.h"

PyObject *koila__raise(koila_status s); /* NULL */
/* the module koila._capture, for what is rare */
extern PyObject *koila__helpers;
PyObject *koila__helper(const char *name); /* new reference */
/* koila._capture.name(a, b, c), up to the first NULL */
PyObject *koila__ask(const char *name, PyObject *a, PyObject *b, PyObject *c);
PyObject *koila__unsupported(const char *format, ...); /* NULL, with UnsupportedError */

#endif
