/* accumulate.h — gradients put into `.grad` without torch's engine. */
#ifndef KOILA_EXT_ACCUMULATE_H
#define KOILA_EXT_ACCUMULATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* May hooks be called with the gradient of this leaf, or after it was accumulated? */
bool koila__leaf_has_hooks(PyObject *leaf);

/* Adds learn_accumulation() and accumulate() to the module. */
int koila__accumulate_add(PyObject *m);

#endif
