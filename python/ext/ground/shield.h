/* shield.h — sections that signals do not cut. See shield.c. */
#ifndef KOILA_EXT_SHIELD_H
#define KOILA_EXT_SHIELD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

/* From here on signals wait, until as many leaves as enters. -1 with the exception of a handler
 * that was due before; nothing is entered then. */
int koila__shield_enter(void);
/* Handlers of what came run at Python's next look. Keeps a set exception. */
void koila__shield_leave(void);
/* The last exception of koila__check_signals: who wants to know clears it first. */
extern bool koila__interrupted;
/* As PyErr_CheckSignals, for work inside a shield that may stop here. */
int koila__check_signals(void);
int koila__shield_init(PyObject *module);

#endif
