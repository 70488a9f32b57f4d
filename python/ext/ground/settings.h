/* settings.h — the user's settings for the process: koila.budget(), micro_batch(), strict(), and
 * whether koila.plan() records. Only koila._core.configure() writes them. */
#ifndef KOILA_EXT_SETTINGS_H
#define KOILA_EXT_SETTINGS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

extern struct koila__settings {
    int64_t rows; /* forced rows of a slice; 0: automatic */
    /* limit on all bytes held on the device in use; UINT64_MAX: as much as is free */
    uint64_t budget;
    /* the same on the CPU, where it holds for every allocation: torch itself raises beyond it */
    uint64_t cpu_budget;
    bool has_budget;
    bool strict;  /* refuse plans that gather */
    bool fastest; /* time a few slice sizes and keep the fastest */
    bool dry;     /* koila.plan(): steps are planned, and nothing runs */
} koila__settings;

bool koila__is_planning(void); /* is koila.plan() recording? */
int koila__settings_add_module(PyObject *m);

#endif
