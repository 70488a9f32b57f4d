/* settings.h — what the user set for the process: koila.budget(), micro_batch(), strict(), and
 * whether koila.plan() records. Written by koila._core.configure() alone. */
#ifndef KOILA_EXT_SETTINGS_H
#define KOILA_EXT_SETTINGS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

extern struct koila__settings {
    int64_t rows; /* forced rows of a slice; 0: automatic */
    /* bytes that the device in use may hold in all; UINT64_MAX: what is free */
    uint64_t budget;
    /* the same of the CPU, where it is a limit for everybody: beyond it torch itself raises */
    uint64_t cpu_budget;
    bool has_budget;
    bool strict;  /* refuse plans that gather */
    bool fastest; /* time a few numbers of rows, keep the fastest */
    bool dry;     /* koila.plan(): plans are made, nothing runs */
} koila__settings;

bool koila__is_planning(void); /* does koila.plan() record now? */
int koila__settings_add_module(PyObject *m);

#endif
