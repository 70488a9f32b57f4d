/* credit.h — the only part of memlab that capture/ and run/ see. Here they announce that they
 * capture or run work for a line of the user, and the line profiler credits its memory to that
 * line. */
#ifndef KOILA_EXT_CREDIT_H
#define KOILA_EXT_CREDIT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* Node `node` of tape `tape` is captured now on this thread. If that happens in a backward, notes
 * the lines of the autograd node that captures it. Kept for the newest tape only, because a
 * backward runs what it has captured. pre: the GIL is held. */
void koila__nodes_captured(uint64_t tape, uint32_t node);

/* From now on work captured on line `line` of `file` runs on this thread, and its memory is
 * credited to that line if it is profiled. NULL: that work has ended. pre: the GIL is held. */
void koila__lines_work_for(const char *file, int line);
/* That work is node `node` of tape `tape`: where an autograd node captured it, its memory is also
 * credited to the lines of that. Until the next koila__lines_work_for(). pre: the GIL is held. */
void koila__lines_work_of(uint64_t tape, uint32_t node);
/* Is any line profiler enabled? */
extern int koila__lines_enabled;

#endif
