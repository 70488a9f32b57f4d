/* credit.h — the memory laboratory's narrow face: whoever captures or runs work for a line of the
 * user's says so here, and the line profiler credits its memory to that line. Nothing else of
 * memlab is seen by capture/ and run/. */
#ifndef KOILA_EXT_CREDIT_H
#define KOILA_EXT_CREDIT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "memory/linetab.h"

/* The code that captured work on this thread was captured in, and its line; NULL: none runs. */
extern __thread struct koila__work {
    const void *key;
    int line;
    koila__origin_path path; /* of the autograd node that captured it; path 0: none did */
} koila__memlab_work __attribute__((visibility("hidden")));

/* Node `node` of tape `tape` is captured now on this thread: by which autograd node, if it is part
 * of a backward? And of that, the lines. The newest tape only: a backward runs what it has
 * captured. pre: the GIL is held. */
void koila__nodes_captured(uint64_t tape, uint32_t node);
koila__origin_path koila__nodes_path_of_captured(uint64_t tape, uint32_t node);

/* Captured work runs now on this thread, for line `line` of `file`; NULL: no more. Its memory is
 * credited to that line, if it is profiled. pre: the GIL is held. */
void koila__lines_work_for(const char *file, int line);
/* Is any line profiler enabled? */
extern int koila__lines_enabled;

#endif
