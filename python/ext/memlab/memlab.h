/* memlab.h — shared by the files of koila.memlab in the extension. There is one section per file,
 * and a file uses only the sections above its own. capture and run see only credit.h. */
#ifndef KOILA_EXT_MEMLAB_H
#define KOILA_EXT_MEMLAB_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "memlab/credit.h"
#include "memory/linetab.h"

/* ---- events.c: the state that every allocator event changes, and who listens */

extern koila__meter koila__memlab_meter;
extern koila__lines koila__memlab_lines;
/* This thread's stack of activations; NULL until it runs profiled code. Hidden visibility makes
 * access fast. */
extern __thread koila__stack *koila__memlab_stack __attribute__((visibility("hidden")));
/* This thread's stack, made at the first call; NULL: no memory or too many threads. */
koila__stack *koila__events_my_stack(void);

/* An allocator of device 0 (the CPU) or 1 + i handed out (delta > 0) or took back the block at p.
 * now, reserved: the device's bytes after it; reserved is UINT64_MAX where nothing is reserved
 * beyond the blocks. Any thread, inside the allocator, without the GIL. */
void koila__events_tell(int device, const void *p, int64_t delta, uint64_t now, uint64_t reserved);
/* Called after the meter for every event, under the same conditions. There is one function per
 * purpose, which must tolerate a call after it was removed, since an event may be in flight. */
typedef void (*koila__listener)(int device, const void *p, int64_t delta, uint64_t now);
typedef enum koila__listens {
    KOILA__LISTENS_CREDIT,   /* credit.c, while a line profiler is enabled */
    KOILA__LISTENS_TIMELINE, /* timeline.c, while one records */
    KOILA__LISTENS_N
} koila__listens;
void koila__events_set_listener(koila__listens purpose, koila__listener fn); /* NULL: none */

/* Listens to the CPU's allocator from now on. Idempotent. pre: the GIL is held. */
void koila__events_listen_to_cpu(void);
/* Is every event of the CPU seen? */
bool koila__events_hear_cpu(void);
/* Have events of the CPU been missed since `generation`, which was
 * koila__cpu_bytes_generation() then? */
bool koila__events_lost_cpu(uint64_t generation);
int koila__events_add_module(PyObject *m);

/* ---- accelerators.c: the devices, and the allocators of those that are not the CPU */

/* Listens to the CPU's allocator and those of loaded accelerator libraries from now on. Idempotent.
 * pre: the GIL is held. */
void koila__memlab_listen(void);
/* Is every event of this device (0: the CPU) seen? */
bool koila__memlab_is_hooked(int device);
int koila__accelerators_add_module(PyObject *m);

/* ---- sites.c: the line that allocates memory */

typedef struct koila__site {
    char *file; /* NULL: unknown; never freed */
    int line;
    /* address of the innermost torch.nn.Module whose method ran; NULL: none, or not noted */
    const void *module;
    uint32_t caller; /* tag of the user's line that called this one; 0: none, or not noted */
    uint64_t hash;
} koila__site;
/* The tag of the site that allocates on this thread now; 0: no Python code. Needs no GIL. */
uint32_t koila__sites_who_asks(void);
koila__site koila__sites_get(uint32_t tag);
uint32_t koila__sites_n(void); /* tags are 0 .. n */
/* Also notes modules, the instances of this class; NULL: stops that. pre: the GIL is held. */
void koila__sites_note_modules(PyObject *class);
int koila__sites_add_module(PyObject *m);

/* ---- measure.c */

int koila__measure_add_module(PyObject *m);

/* ---- nodes.c: the lines that make autograd nodes (and koila__nodes_captured() of credit.h) */

/* Starts or stops noting them. pre: the GIL is held. */
void koila__nodes_listen(bool want);
/* An allocator event: if a node runs backward on this thread, its line is credited. Any thread,
 * without the GIL. */
void koila__nodes_credit(int device, int64_t delta);
/* The lines of the autograd node that captured node `node` of tape `tape`; path 0: none did. pre:
 * the GIL is held. */
koila__origin_path koila__nodes_path_of_captured(uint64_t tape, uint32_t node);

/* ---- credit.c: memory for a line while another one runs (see credit.h) */

/* A line table was enabled or disabled. pre: the GIL is held. */
void koila__credit_enable(bool on);

/* ---- monitor.c: which line runs, from CPython's events */

/* Starts or stops watching the lines of a code object. -1: a Python error is set. */
int koila__monitor_code(PyObject *code, bool on);
/* on: one more code object is watched. off: no line profiler is enabled any more. -1: a Python
 * error is set. */
int koila__monitor_any(bool on);
/* "monitoring", "frame evaluation" or "tracer". Static storage. */
const char *koila__monitor_way(void);

/* ---- line_table.c: the line profiler for Python */

int koila__line_table_add_module(PyObject *m);

/* ---- timeline.c: every event of a device between two moments */

int koila__timeline_add_module(PyObject *m);

/* ---- find_tensors.c, tensor_facts.c, report.c share tensors.h */

int koila__find_tensors_add_module(PyObject *m);
int koila__report_add_module(PyObject *m);

#endif
