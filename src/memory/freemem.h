/* freemem.h — how much memory this process can still take before a limit stops it.
 *
 *   cgroup       least of (limit - usage) over this process's control group and its ancestors,
 *                version 1 or 2
 *   rlimit_data  RLIMIT_DATA - VmData        rlimit_as  RLIMIT_AS - VmSize
 *   available    MemAvailable: what the kernel can give without swapping
 */
#ifndef KOILA_SRC_FREEMEM_H
#define KOILA_SRC_FREEMEM_H

#include "base/base.h"

/* clang-format off: one entry a line */
#define KOILA__FREEMEM_MAP(X)                                                                      \
    X(CGROUP, "cgroup")                                                                            \
    X(RLIMIT_DATA, "rlimit_data")                                                                  \
    X(RLIMIT_AS, "rlimit_as")                                                                      \
    X(AVAILABLE, "available")
/* clang-format on */
enum {
#define KOILA__FREEMEM_ENUM(id, name) KOILA__FREEMEM_##id,
    KOILA__FREEMEM_MAP(KOILA__FREEMEM_ENUM)
#undef KOILA__FREEMEM_ENUM
        KOILA__FREEMEM_N
};

typedef struct koila__freemem {
    uint64_t bytes[KOILA__FREEMEM_N]; /* UINT64_MAX: no such limit, or not readable */
    int bound;                        /* index of the smallest; -1 if there is none */
} koila__freemem;

/* Read now. `root` is put in front of /proc and of the cgroup mount points: "" but in tests. With
 * another root the rlimits are read from root/proc/self/limits too, otherwise from the system.
 * Never fails: what cannot be read limits nothing. */
void koila__freemem_read(const char *root, koila__freemem *out);
const char *koila__freemem_name(int i);

#endif
