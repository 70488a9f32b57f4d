/* context.h — what koila keeps for one line of work: the open step, the backward in progress, its
 * last runs. There is one for each contextvars.Context that used koila, so one for each thread and
 * each asyncio task. What a user sets is beside it, in settings.h. */
#ifndef KOILA_EXT_CONTEXT_H
#define KOILA_EXT_CONTEXT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

typedef struct koila__context {
    PyObject_HEAD
    PyObject *of;       /* owned: a weak reference to its contextvars.Context */
    PyObject *open;     /* owned: the tape that lazy() joins, or NULL; tape.c alone writes it */
    PyObject *backward; /* owned: the state of its backward, for koila._backward; None: none yet */
    bool explains;      /* explain() records a backward that nobody called */
    uint32_t n_holds;   /* torch.zeros and its like make plain tensors while it is not 0 */
    /* The operator that needs the values of the requested run, or NULL: see strict.c. */
    const char *gathers_for;
    /* the line that called a backward which records now; file: owned str, or NULL */
    PyObject *waiting_file;
    uint32_t waiting_line;
    uint64_t n_settings; /* times that its settings were set (settings.h) */
    uint64_t n_dry;      /* the same of those for a plan alone, which n_settings leaves out */
    /* owned: its last runs, of run/past.c, which also sets how they are freed; NULL: none yet */
    struct koila__past *past;
    void (*past_free)(struct koila__past *past);
    /* the same, of run/aside.c: the steps that torch may do alone */
    struct koila__aside *aside;
    void (*aside_free)(struct koila__aside *aside);
    struct koila__tunings *tunings; /* owned: of run/tuning.c; NULL: none yet */
} koila__context;

/* Borrowed: that of the running code. NULL without an exception: it never used koila. */
koila__context *koila__context_peek(void);
/* The same; made at the first call. NULL + error. */
koila__context *koila__context_now(void);

/* Until koila__context_give_back(before), this thread works for context `c`, perhaps another
 * thread's: a thread of torch's (autograd's devices, parallel_apply) has none itself. Returns what
 * to give back. The caller keeps `c` alive. */
koila__context *koila__context_lend(koila__context *c);
void koila__context_give_back(koila__context *before);
koila__context *koila__context_lent(void); /* borrowed, or NULL */

/* Context variables of the running code. NULL: not set, without an exception. New reference. */
PyObject *koila__context_get(PyObject *var);

int koila__context_add_module(PyObject *m);

#endif
