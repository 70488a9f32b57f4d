/* errors.h — recognises an out-of-memory and raises koila's own errors.
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
bool koila__is_stale(void);       /* is it a koila.StaleValueError? */
bool koila__is_unsupported(void); /* is it a koila.UnsupportedError? */

int koila__errors_add_module(PyObject *m); /* adds is_out_of_memory(error) */

/* ---- raising; each returns NULL or -1, so that the caller can return it */
/* Raises a status of the core, other than one about a step's memory. */
PyObject *koila__raise(koila_status s);
PyObject *koila__unsupported(const char *format, ...); /* UnsupportedError */
int koila__raise_stale(const char *format, ...);       /* StaleValueError */
int koila__raise_gather(PyObject *text);               /* GatherError; takes `text`, NULL passes */
/* Raises OutOfMemory, missing_bytes short (0: unknown), caused by the exception that is set. */
int koila__raise_out_of_memory(const char *text, uint64_t missing_bytes);
/* Raises a planner's failure: OutOfMemory with the text of `err` and advice, or the error of
 * `status`. `call` names the function that the user called. */
int koila__raise_no_fit(koila_status status, const koila_error *err, const char *call);

#endif
