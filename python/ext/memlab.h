/* memlab.h — what the parts of koila.memlab in the extension share: one meter, one line table, and who listens to the allocators. */
#ifndef KOILA_EXT_MEMLAB_H
#define KOILA_EXT_MEMLAB_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "linetab.h"

extern koila__meter koila__memlab_meter;
extern koila__lines koila__memlab_lines;
/* This thread's stack of activations; NULL until it runs profiled code. */
extern __thread koila__stack *koila__memlab_stack;

/* Listen to every allocator there is, from now on. Idempotent; installs the CPU's truth and the hooks of loaded accelerator libraries.
 * pre: the GIL is held. */
void koila__memlab_listen(void);
/* Does device (0: the CPU) tell us of every event? */
bool koila__memlab_is_hooked(int device);
/* This thread's stack, made at the first call; NULL: no memory or too many threads. */
koila__stack *koila__memlab_my_stack(void);

/* Note which lines make autograd nodes, while somebody wants it; see nodes.c. pre: the GIL is held. */
void koila__nodes_listen(bool want);
/* An allocator event: if a node runs backward on this thread, its line is credited. Any thread, without the GIL. */
void koila__nodes_credit(int device, int64_t delta);

/* Captured work runs now on this thread, for line `line` of `file`; NULL: no more. Its memory is credited to that line, if it is profiled.
 * pre: the GIL is held. */
void koila__lines_work_for(const char *file, int line);
/* An allocator event during such work. */
void koila__lines_credit_work(int device, int64_t delta, uint64_t now);
/* Is any line profiler enabled? */
extern int koila__lines_enabled;

/* Add to koila._core: measuring, devices, back ends / line tables / tensors. */
int koila__memlab_add_module(PyObject *m);
int koila__lines_add_module(PyObject *m);
int koila__report_add_module(PyObject *m);

#endif
