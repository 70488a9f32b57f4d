/* Control-group, rlimit and meminfo files written into a temporary directory: which limit binds,
 * and by how much. */
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory/freemem.h"

#include "harness.h"

static char root[64];

static void put(const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        mkdir(full, 0700);
        *p = '/';
    }
    FILE *f = fopen(full, "w");
    if (f) {
        fputs(text, f);
        fclose(f);
    }
}
static void fresh(void)
{
    strcpy(root, "/tmp/koila-freemem-XXXXXX");
    CHECK(mkdtemp(root) != NULL);
    put("/proc/meminfo", "MemTotal:       24684092 kB\nMemFree:  1 kB\nMemAvailable:   1000 kB\n");
    put("/proc/self/status", "Name:\tx\nVmSize:\t     500 kB\nVmData:\t     100 kB\n");
    put("/proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max data size             unlimited            unlimited            bytes     \n"
        "Max address space         unlimited            unlimited            bytes     \n");
}
static int rm(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    return remove(path);
}
static void done(void) { nftw(root, rm, 16, FTW_DEPTH | FTW_PHYS); }

TEST(freemem__without_limits_is_what_the_kernel_calls_available)
{
    koila__freemem f;
    fresh();
    koila__freemem_read(root, &f);
    CHECK_EQ(f.bound, KOILA__FREEMEM_AVAILABLE);
    CHECK_EQ(f.bytes[f.bound], 1000 * 1024);
    CHECK(f.bytes[KOILA__FREEMEM_CGROUP] == UINT64_MAX &&
          f.bytes[KOILA__FREEMEM_RLIMIT_AS] == UINT64_MAX);
    done();
}

TEST(freemem__cgroup_v2_takes_the_tightest_ancestor_and_counts_idle_cache_as_free)
{
    koila__freemem f;
    fresh();
    put("/proc/self/cgroup", "0::/slice/job\n");
    put("/proc/self/mountinfo", "30 1 0:2 / /proc rw - proc proc rw\n31 23 0:26 / /sys/fs/cgroup "
                                "rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
    put("/sys/fs/cgroup/slice/job/memory.max", "max\n");
    put("/sys/fs/cgroup/slice/job/memory.current", "70000\n");
    put("/sys/fs/cgroup/slice/memory.max", "100000\n");
    put("/sys/fs/cgroup/slice/memory.current", "90000\n");
    put("/sys/fs/cgroup/slice/memory.stat", "anon 5\nfile 7\ninactive_file 30000\n");
    koila__freemem_read(root, &f);
    CHECK_EQ(f.bound, KOILA__FREEMEM_CGROUP);
    CHECK_EQ(f.bytes[f.bound], 40000);
    put("/sys/fs/cgroup/slice/job/memory.max", "70001\n");
    koila__freemem_read(root, &f);
    CHECK_EQ(f.bytes[f.bound], 1);
    put("/sys/fs/cgroup/slice/job/memory.max", "100\n");
    koila__freemem_read(root, &f);
    CHECK_EQ(f.bytes[f.bound], 0);
    done();
}

TEST(freemem__cgroup_v1_in_a_container_whose_mount_starts_at_its_own_group)
{
    koila__freemem f;
    fresh();
    put("/proc/self/cgroup", "5:cpu:/docker/abc\n4:hugetlb,memory:/docker/abc\n0::/\n");
    put("/proc/self/mountinfo",
        "41 32 0:33 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
        "42 32 0:34 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "200000\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "150000\n");
    put("/sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 10000\n");
    koila__freemem_read(root, &f);
    CHECK_EQ(f.bound, KOILA__FREEMEM_CGROUP);
    CHECK_EQ(f.bytes[f.bound], 60000);
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    koila__freemem_read(root, &f);
    CHECK_EQ(f.bound, KOILA__FREEMEM_AVAILABLE);
    done();
}

TEST(freemem__rlimits_subtract_what_is_used)
{
    koila__freemem f;
    fresh();
    put("/proc/self/limits",
        "Max data size             300000               unlimited            bytes     \n"
        "Max address space         612000               unlimited            bytes     \n");
    koila__freemem_read(root, &f);
    CHECK_EQ(f.bytes[KOILA__FREEMEM_RLIMIT_DATA], 300000 - 100 * 1024);
    CHECK_EQ(f.bytes[KOILA__FREEMEM_RLIMIT_AS], 612000 - 500 * 1024);
    CHECK_EQ(f.bound, KOILA__FREEMEM_RLIMIT_AS);
    done();
}

TEST(freemem__garbage_and_missing_files_limit_nothing)
{
    koila__freemem f;
    koila__freemem_read("/nonexistent", &f);
    CHECK_EQ(f.bound, -1);
    fresh();
    put("/proc/self/cgroup", "nonsense\n::\n0::/x\n4:memory\n");
    put("/proc/self/mountinfo", "1 2 3\n - cgroup2\n31 23 0:26 / /m rw - cgroup2 c rw\n");
    put("/m/x/memory.max", "abc\n");
    put("/proc/meminfo", "MemAvailable:   kB\n");
    koila__freemem_read(root, &f);
    CHECK_EQ(f.bound, -1);
    done();
}

TEST(freemem__of_this_process_is_positive)
{
    koila__freemem f;
    koila__freemem_read("", &f);
    CHECK(f.bound >= 0 && f.bytes[f.bound] > 0);
}
