/* run.h — the executor's names for the rest of the extension (see run.c). */
#ifndef KOILA_EXT_RUN_H
#define KOILA_EXT_RUN_H

#include "tape.h"

bool koila__is_out_of_memory(void);                  /* the exception that is set; leaves it set */
PyObject *koila__pseudo_object(const char *name);    /* borrowed callable that implements "koila::name" */
/* A gather worded for people: "aten::sort over the batch needs f32[4096, 1000] whole, 15.6 MiB; one slice is 0.5 MiB. train.py:41". New reference. */
PyObject *koila__gather_text(const koila_plan *plan, const koila_graph *part, koila_gather g, int64_t rows);
int koila__run_module_add(PyObject *m);

#endif
