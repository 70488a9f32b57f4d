/* memlab.h — what the parts of koila.memlab in the extension share: one meter, one line table, and
 * who listens to the allocators. */
#ifndef KOILA_EXT_MEMLAB_H
#define KOILA_EXT_MEMLAB_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "memlab/credit.h"

extern koila__meter koila__memlab_meter;
extern koila__lines koila__memlab_lines;
/* This thread's stack of activations; NULL until it runs profiled code. */
/* hidden: found without a search */
extern __thread koila__stack *koila__memlab_stack __attribute__((visibility("hidden")));
/* Listen to every allocator there is, from now on. Idempotent; installs the CPU's truth and the
 * hooks of loaded accelerator libraries. pre: the GIL is held. */
void koila__memlab_listen(void);
/* Does device (0: the CPU) tell us of every event? */
bool koila__memlab_is_hooked(int device);
/* This thread's stack, made at the first call; NULL: no memory or too many threads. */
koila__stack *koila__memlab_my_stack(void);

/* Note which lines make autograd nodes, while somebody wants it; see nodes.c. pre: the GIL is held.
 */
void koila__nodes_listen(bool want);
/* An allocator event: if a node runs backward on this thread, its line is credited. Any thread,
 * without the GIL. */
void koila__nodes_credit(int device, int64_t delta);

/* Who asks for memory on this thread now: the tag of a site, 0 when nobody of Python's does. Needs
 * no GIL. */
uint32_t koila__memlab_who_asks(void);
typedef struct koila__site {
    char *file; /* NULL: unknown; kept for ever */
    int line;
    /* the innermost torch.nn.Module whose method was running, an address only; NULL: none, or
     * nobody wanted to know */
    const void *module;
    uint64_t hash;
} koila__site;
koila__site koila__memlab_site(uint32_t tag);
uint32_t koila__memlab_n_sites(void); /* tags are 0 .. n */
/* Note modules too, instances of this class; NULL: no more. pre: the GIL is held. */
void koila__memlab_note_modules(PyObject *class);
/* An allocator event for the timeline that is recorded, if one is. */
void koila__timeline_event(int device, const void *p, int64_t delta);
extern _Atomic int koila__timeline_device; /* whose events it wants; -1: none is recorded */

/* Add to koila._core: measuring, devices, back ends / line tables / tensors. */
int koila__memlab_add_module(PyObject *m);
int koila__lines_add_module(PyObject *m);
int koila__report_add_module(PyObject *m);
int koila__timeline_add_module(PyObject *m);

#endif
