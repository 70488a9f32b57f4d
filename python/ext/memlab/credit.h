/* credit.h — the only part of memlab that capture/ and run/ see. Here they announce that they
 * capture or run work for a line of the user, and the line profiler credits its memory to that
 * line. */
#ifndef KOILA_EXT_CREDIT_H
#define KOILA_EXT_CREDIT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "memory/linetab.h"

/* The code and the line that captured the work which runs now on this thread; NULL: none runs. */
extern __thread struct koila__work {
    const void *key;
    int line;
    koila__origin_path path; /* of the autograd node that captured it; path 0: none */
} koila__memlab_work __attribute__((visibility("hidden")));

/* Node `node` of tape `tape` is captured now on this thread. If that happens in a backward, notes
 * the lines of the autograd node that captures it. Kept for the newest tape only, because a
 * backward runs what it has captured. pre: the GIL is held. */
void koila__nodes_captured(uint64_t tape, uint32_t node);
koila__origin_path koila__nodes_path_of_captured(uint64_t tape, uint32_t node);

/* From now on work captured on line `line` of `file` runs on this thread, and its memory is
 * credited to that line if it is profiled. NULL: that work has ended. pre: the GIL is held. */
void koila__lines_work_for(const char *file, int line);
/* Is any line profiler enabled? */
extern int koila__lines_enabled;

#endif
