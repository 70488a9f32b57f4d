/* refusal.c — see refusal.h. */
#include "ground/refusal.h"

#include <stddef.h>
#include <stdio.h>

static _Thread_local enum { NONE, BUDGET, RESIDENT } kind;
static _Thread_local uint64_t held_bytes, limit_bytes;

void koila__refusal_of_budget(uint64_t held, uint64_t limit)
{
    kind = limit == UINT64_MAX ? NONE : BUDGET;
    held_bytes = held;
    limit_bytes = limit;
}

void koila__refusal_of_resident(void) { kind = RESIDENT; }

static double mib(uint64_t n) { return (double)n / (1 << 20); }

char *koila__refusal_told(void)
{
    static _Thread_local char text[320];
    switch (kind) {
    case NONE:
        return NULL;
    case BUDGET:
        snprintf(
            text, sizeof text,
            "Cannot allocate memory: koila refused it, for torch holds %.1f of the %.1f MiB of "
            "koila's budget. koila.budget(), koila.set_budget() or KOILA_BUDGET gives more; "
            "koila.lazy() cuts a step to fit",
            mib(held_bytes), mib(limit_bytes));
        break;
    case RESIDENT:
        snprintf(text, sizeof text,
                 "Cannot allocate memory: koila refused it, for the process would pass its limit "
                 "of resident memory, which is koila.budget(..., resident=True) or its control "
                 "group's. koila.lazy() cuts a step to fit");
        break;
    }
    kind = NONE;
    return text;
}
