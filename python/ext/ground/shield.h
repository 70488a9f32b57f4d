/* shield.h — sections that signals do not interrupt. See shield.c. */
#ifndef KOILA_EXT_SHIELD_H
#define KOILA_EXT_SHIELD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

/* Signals wait from here to the matching leave; calls nest. -1 with an exception if the handler of
 * an earlier signal raised; nothing is entered then. */
int koila__shield_enter(void);
/* Handlers of delayed signals run at Python's next check. Keeps a set exception. */
void koila__shield_leave(void);
/* Has koila__check_signals() raised on this thread? Who wants to know clears it first. */
extern _Thread_local bool koila__interrupted;
/* Like PyErr_CheckSignals(), for work inside a shield that may stop here. */
int koila__check_signals(void);
int koila__shield_init(PyObject *module);

#endif
