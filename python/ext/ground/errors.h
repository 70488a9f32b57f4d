/* errors.h — what an out-of-memory looks like, and how koila's own errors are raised.
 *
 * To make koila try again with smaller slices when one more library runs out of memory, add that
 * library's text to the table at the head of errors.c. Nothing else knows such texts.
 */
#ifndef KOILA_EXT_ERRORS_H
#define KOILA_EXT_ERRORS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "koila/koila.h"

/* ---- the exception that is set; it stays set */
bool koila__is_out_of_memory(void);
bool koila__is_stale(void); /* a koila.StaleValueError */

/* ---- raising; each returns NULL or -1, so that the caller can return it */
/* A status of the core that is not about a step's memory. */
PyObject *koila__raise(koila_status s);
PyObject *koila__unsupported(const char *format, ...); /* UnsupportedError */
int koila__raise_stale(const char *format, ...);       /* StaleValueError */
int koila__raise_gather(PyObject *text);               /* GatherError; takes `text`, NULL passes */
/* OutOfMemory, short of missing_bytes (0: unknown). The exception that is set becomes its cause. */
int koila__raise_out_of_memory(const char *text, uint64_t missing_bytes);
/* A planner's failure: OutOfMemory with `err`'s text and advice, or what `status` says. `call`
 * names what the user called. */
int koila__raise_no_fit(koila_status status, const koila_error *err, const char *call);

#endif
