/* accumulate.h — gradients put into `.grad` without torch's engine. */
#ifndef KOILA_EXT_ACCUMULATE_H
#define KOILA_EXT_ACCUMULATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds learn_accumulation() and accumulate() to the module. */
int koila__accumulate_add(PyObject *m);

#endif
