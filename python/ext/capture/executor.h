/* executor.h — what capture asks of the executor. run/ lies above capture and fills this table in
 * when the module starts (run_module.c); until then it is NULL, and nothing lazy can exist. */
#ifndef KOILA_EXT_EXECUTOR_H
#define KOILA_EXT_EXECUTOR_H

#include "capture/tape.h"

typedef struct koila__executor_calls {
    /* Make targets concrete (values[].real set), sliced as the settings say. 0, or -1 with an
     * exception and nothing changed. `commit_effects`: also run and commit the tape's effects. */
    int (*run)(koila__tape *t, const koila_value *targets, uint32_t n_targets, bool commit_effects);
    /* Commit the effects, and of `held` make what fits and is not stale. 0, or -1. */
    int (*run_held)(koila__tape *t, const koila_value *held, uint32_t n_held);
    /* By the simple executor, the reference in tests: everything whole, in recorded order, each
     * value freed at its last use, each result compared with its record. Effects stay recorded. */
    int (*run_whole)(koila__tape *t, const koila_value *targets, uint32_t n_targets);
    /* The tensor that v would be if all calls that make it ran on `device`: a new reference; v is
     * on a device without values, and nothing on the tape changes. NULL with an exception:
     * UnsupportedError where it depends on tensors there, on random numbers, or, unless it is known
     * (koila__is_known), on floating-point numbers. */
    PyObject *(*run_elsewhere)(koila__tape *t, koila_value v, bool is_known, PyObject *device);
    /* Make one call that reads no tensor: *out is a new reference. Below autograd; the caller
     * holds the mode guards. 0, or -1 with torch's own exception. */
    int (*call)(koila_sig sig, PyObject **out);
    /* Drops what is kept of signatures that the table has forgotten. Objects go to the list `gone`;
     * runs no Python. */
    void (*forget)(PyObject *gone);
} koila__executor_calls;

extern const koila__executor_calls *koila__executor;

#endif
