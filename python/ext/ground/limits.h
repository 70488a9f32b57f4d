/* limits.h — the resident memory of this process: where its limits are, what it holds beside
 * torch's bytes, and the guard that keeps it below a limit (memory/resident.h), which looks at each
 * block that cpu_bytes.c hands out.
 *
 * All but koila__resident_grants() need the GIL.
 */
#ifndef KOILA_EXT_LIMITS_H
#define KOILA_EXT_LIMITS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "memory/resident.h"

extern koila__resident koila__guard;

/* May torch have a block of n bytes? `handed_out`: all its bytes, these included. */
static inline bool koila__resident_grants(uint64_t n, uint64_t handed_out)
{
    return koila__resident_allows(&koila__guard, n, handed_out);
}

/* What limits the resident memory of this process. In bytes. */
typedef struct koila__resident_room {
    uint64_t limit; /* on resident memory, a margin left out; UINT64_MAX: none is known */
    uint64_t base;  /* what the process holds beside torch's bytes */
    uint64_t extra; /* what it may come to hold beside them, as far as seen in steps before */
    uint64_t
        mapped; /* bytes that the rlimits leave, which count what is mapped; UINT64_MAX: none */
    bool with_files; /* mapped files count */
} koila__resident_room;
/* held: torch's bytes. budget: a limit that the user set on resident memory; UINT64_MAX: none.
 * all: ask for the machine's free memory and the rlimits too, not only for the limits of control
 * groups. */
koila__resident_room koila__resident_room_for(uint64_t held, uint64_t budget, bool all);
/* The same as it was when the system was asked last, if that is a tenth of a second ago at most.
 * For who needs a small part of it. False: it must be asked. */
bool koila__resident_room_lately(uint64_t held, uint64_t budget, bool all,
                                 koila__resident_room *out);
/* The number of the system's last answer, and: milliseconds since it was given; INT64_MAX: it does
 * not count any more, or there is another. */
uint64_t koila__resident_answer(void);
int64_t koila__resident_answer_age(uint64_t number);

/* `base` was taken without giving back what the C library retains, and may be too high. Does so,
 * and is then exact. False: it was exact already. */
bool koila__resident_settle(uint64_t held);

/* A step is about to run in this room, while torch holds so many bytes. Where the room is ample the
 * C library retains more of what is freed from the first such step on, see
 * koila__resident_retain(). */
void koila__resident_prepare(const koila__resident_room *room, uint64_t held);
/* A step runs in this room, on this thread: blocks that do not fit are refused. Returns what
 * koila__resident_end() wants: does it run inside another such step? */
bool koila__resident_begin(const koila__resident_room *room, uint64_t held);
/* The step ended. planned: the most that it was to hold of torch's bytes. Learns from it. */
void koila__resident_end(bool inside, uint64_t held, uint64_t planned);
/* A step that needed little went well, without the two. */
void koila__resident_went_well(void);
/* Keep `limit` on resident bytes for whatever torch does, from now on; UINT64_MAX: no longer. */
void koila__resident_budget(uint64_t limit, uint64_t held);
/* The same for what this thread allocates. Cheap if nothing changes. */
void koila__resident_budget_here(uint64_t limit, uint64_t held);

int koila__resident_add_module(PyObject *m);

#endif
