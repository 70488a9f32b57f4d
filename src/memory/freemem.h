/* freemem.h — how much memory this process can still take before a limit stops it.
 *
 *   cgroup       least of (limit - usage) over this process's control group and its ancestors,
 *                version 1 or 2; a limit is memory.max or memory.high, from which the kernel slows
 *                the group down, or memory.limit_in_bytes
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

/* The files that say so, held open: reading them again costs a few microseconds. */
enum { KOILA__FREEMEM_GROUPS = 32 };
typedef struct koila__freemem_group {
    int limit, high, usage, stat; /* descriptors; -1: there is no such file */
    int version;
} koila__freemem_group;
typedef struct koila__freemem_files {
    char root[256];
    int pid; /* the process whose files they are; 0: none are open */
    int cgroup, meminfo, status;
    uint64_t device, inode; /* of `cgroup` */
    uint64_t group_hash;    /* of /proc/self/cgroup when `groups` were opened */
    uint32_t n_groups;
    koila__freemem_group groups[KOILA__FREEMEM_GROUPS];
} koila__freemem_files;

/* root: put in front of /proc and of the cgroup mount points: "" but in tests. With another root
 * the rlimits are read from root/proc/self/limits too, otherwise from the system. */
void koila__freemem_open(koila__freemem_files *f, const char *root);
/* Read now. Opens the files anew in a forked child, and where the process was moved to another
 * group. Not for two threads at a time. Never fails: what cannot be read limits nothing. */
void koila__freemem_look(koila__freemem_files *f, koila__freemem *out);
/* Bytes that the control groups alone leave; UINT64_MAX: no limit. */
uint64_t koila__freemem_in_groups(koila__freemem_files *f);
void koila__freemem_close(koila__freemem_files *f);

/* The three in one, for who asks once. */
void koila__freemem_read(const char *root, koila__freemem *out);
const char *koila__freemem_name(int i);

#endif
