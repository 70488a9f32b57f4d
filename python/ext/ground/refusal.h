/* refusal.h — why koila refused memory on the CPU, in words for torch's own error.
 *
 * torch ends its error with what strerror_r says of ENOMEM. Whoever meets it in the middle of a
 * program that says nothing of koila at that line must read there whose limit it was. The state is
 * the running thread's. */
#ifndef KOILA_EXT_REFUSAL_H
#define KOILA_EXT_REFUSAL_H

#include <stdint.h>

/* This thread is refused memory: torch holds `held` bytes and may hold `limit`. UINT64_MAX: there
 * is no such limit, and nothing will be told. */
void koila__refusal_of_budget(uint64_t held, uint64_t limit);
/* The same by the guard of the process's resident memory. */
void koila__refusal_of_resident(void);
/* The text for the refusal that was not told yet, or NULL. Valid until this thread's next. */
char *koila__refusal_told(void);

#endif
