/* cpu_bytes.h — the exact number of bytes in use from PyTorch's CPU allocator, and a limit on it.
 *
 * There is one count: the executor measures and limits with it, and memlab listens to its events.
 * How it works: cpu_bytes.c. "Current" counts blocks handed out since the installation; older
 * blocks are unknown, and freeing them changes nothing. Every function may be called on any thread,
 * with or without the GIL, except koila__cpu_bytes_install(), koila__cpu_bytes_listen(),
 * koila__cpu_bytes_uninstall() and koila__cpu_bytes_add_module().
 */
#ifndef KOILA_EXT_CPU_BYTES_H
#define KOILA_EXT_CPU_BYTES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Counts every block from now on. 0: done. -1 without a Python error: impossible here,
 * koila__cpu_bytes_plan() says why. Idempotent and cheap once installed. If another tool has
 * overwritten our slots, the counters restart from zero and koila__cpu_bytes_generation() increases
 * by one. pre: the GIL is held. */
int koila__cpu_bytes_install(void);
/* The same for a listener that may stop again: koila__cpu_bytes_is_kept() stays false until
 * koila__cpu_bytes_install() is called. */
int koila__cpu_bytes_listen(void);
bool koila__cpu_bytes_is_kept(void);
/* Stops counting new blocks; known blocks are still subtracted when they are freed. pre: the GIL is
 * held. */
void koila__cpu_bytes_uninstall(void);
/* Installed, and the slots still ours (a few loads). */
bool koila__cpu_bytes_ok(void);
/* "A", "B", or "unsupported: why". Static storage. */
const char *koila__cpu_bytes_plan(void);
/* Number of times the counters restarted from zero. */
uint64_t koila__cpu_bytes_generation(void);

uint64_t koila__cpu_bytes_current(void);
/* The address of that number, valid as long as the process lives. */
const _Atomic uint64_t *koila__cpu_bytes_current_slot(void);
uint64_t koila__cpu_bytes_peak(void);
void koila__cpu_bytes_reset_peak(void); /* peak = current */
/* The peak of a stretch, whatever thread allocates: koila__cpu_bytes_close() of what
 * koila__cpu_bytes_open() gives. Any number at once; beyond 32 the answer is current(). What one
 * operator uses: src/memory/account.h. */
int koila__cpu_bytes_open(void);
uint64_t koila__cpu_bytes_close(int window);

/* Bytes that koila__cpu_bytes_current() may not exceed, for all threads that have no limit of their
 * own; UINT64_MAX: no limit. Beyond it torch raises its own "can't allocate memory". */
void koila__cpu_bytes_set_limit(uint64_t bytes);
/* The limit on what the calling thread allocates. */
uint64_t koila__cpu_bytes_get_limit(void);
/* On: `bytes` is the limit for what this thread, or the threads that help it, allocates in its
 * present context of contextvars, in place of the process's. Off: no longer. pre: the GIL is
 * held. */
void koila__cpu_bytes_set_own_limit(bool on, uint64_t bytes);
/* true: until the matching call with false nothing that this thread allocates is refused. */
void koila__cpu_bytes_lift_limit(bool more);
/* For tests: refuse the nth allocation from now, 1 being the next; 0: none. */
void koila__cpu_bytes_fail_nth(int64_t n);
/* What koila__cpu_bytes_fail_nth() has still to come to; 0: no refusal is planted. */
int64_t koila__cpu_bytes_fails_in(void);
int64_t koila__cpu_bytes_n_allocs(void);   /* allocations granted */
int64_t koila__cpu_bytes_n_frees(void);    /* of blocks that were counted */
uint64_t koila__cpu_bytes_n_refused(void); /* allocations that were not granted */

/* Bytes and tag (NULL: not wanted) of the block at p; false if it is not a counted block. */
bool koila__cpu_bytes_find(const void *p, uint64_t *n_bytes, uint32_t *tag);
/* Call fn for every live block; fn must not allocate from torch. Stops when fn returns false. */
void koila__cpu_bytes_each(bool (*fn)(void *user, const void *p, uint64_t n_bytes, uint32_t tag),
                           void *user);

/* fn runs on the allocating or freeing thread, maybe without the GIL, inside the allocator: plain C
 * only. It runs after the count has changed: `now` is current() including this event. At most 4
 * listeners; -1 when there is no room. Adding one twice has no effect. */
typedef void (*koila__cpu_bytes_event)(const void *p, int64_t delta_bytes, uint64_t now);
int koila__cpu_bytes_add_event(koila__cpu_bytes_event fn);
void koila__cpu_bytes_del_event(koila__cpu_bytes_event fn);
/* fn returns the tag of the code that allocates a block: 20 bits, 0: unknown. NULL: all tags are 0.
 * Same conditions as for an event. */
void koila__cpu_bytes_set_tagger(uint32_t (*fn)(void));
uint32_t (*koila__cpu_bytes_get_tagger(void))(void);

int koila__cpu_bytes_add_module(PyObject *m);

#endif
