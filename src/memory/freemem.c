/* freemem.c — see freemem.h.
 *
 * Where the control group is: /proc/self/cgroup says its path within a hierarchy ("0::/a/b" is
 * version 2, "4:memory:/a/b" is version 1), /proc/self/mountinfo says where that hierarchy is
 * mounted and which of its directories is the root of the mount (in a container the mount often
 * starts at the container's own group). We read the directory and every ancestor up to the mount
 * point, for each may limit. File cache that nobody has touched lately (inactive_file) is given
 * back before the group is out of memory, so it counts as free.
 */
#include "memory/freemem.h"

#include <stdlib.h>
#include <sys/resource.h>

const char *koila__freemem_name(int i)
{
    static const char *const names[] = {
#define KOILA__FREEMEM_TEXT(id, name) name,
        KOILA__FREEMEM_MAP(KOILA__FREEMEM_TEXT)
#undef KOILA__FREEMEM_TEXT
    };
    return i >= 0 && i < KOILA__FREEMEM_N ? names[i] : "?";
}

#define PATH_N 4096

static FILE *open_at(const char *root, const char *path)
{
    char full[3 * PATH_N];
    if (snprintf(full, sizeof full, "%s%s", root, path) >= (int)sizeof full)
        return NULL;
    return fopen(full, "re");
}

static uint64_t minus(uint64_t limit, uint64_t used) { return used < limit ? limit - used : 0; }

/* The number after `key` at the start of a line ("VmData:\t 123 kB" -> 123 * unit); UINT64_MAX if
 * there is none. */
static uint64_t number_after(const char *root, const char *path, const char *key, uint64_t unit)
{
    FILE *f = open_at(root, path);
    uint64_t value = UINT64_MAX;
    char line[512];
    while (f && value == UINT64_MAX && fgets(line, sizeof line, f)) {
        size_t n = strlen(key);
        char *end;
        if (strncmp(line, key, n) != 0)
            continue;
        unsigned long long v = strtoull(line + n, &end, 10);
        if (end != line + n)
            value = v > UINT64_MAX / unit ? UINT64_MAX : v * unit;
    }
    if (f)
        fclose(f);
    return value;
}

/* free bytes that one directory of a hierarchy allows; UINT64_MAX: no limit there */
static uint64_t free_in_group(const char *root, const char *dir, int version)
{
    char path[2 * PATH_N + 64];
#define READ(file)                                                                                 \
    (snprintf(path, sizeof path, "%s/%s", dir, file), number_after(root, path, "", 1))
    /* "max" is no number: no limit */
    uint64_t limit = READ(version == 2 ? "memory.max" : "memory.limit_in_bytes");
    uint64_t usage = READ(version == 2 ? "memory.current" : "memory.usage_in_bytes");
#undef READ
    if (limit >= (uint64_t)1 << 60 || usage == UINT64_MAX)
        return UINT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    uint64_t cache =
        number_after(root, path, version == 2 ? "inactive_file " : "total_inactive_file ", 1);
    if (cache != UINT64_MAX)
        usage = minus(usage, cache);
    return minus(limit, usage);
}

static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);
    for (const char *p = list; (p = strstr(p, word)); p += n)
        if ((p == list || p[-1] == ',') && (p[n] == ',' || p[n] == 0))
            return true;
    return false;
}

/* Path of this process's group in the hierarchy of `version` (1: the one with the memory
 * controller). */
static bool group_path(const char *root, int version, char *out)
{
    FILE *f = open_at(root, "/proc/self/cgroup");
    char line[PATH_N];
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *controllers++ = 0;
        *path++ = 0;
        found = version == 2 ? strcmp(line, "0") == 0 && !*controllers
                             : has_word(controllers, "memory");
        if (found)
            snprintf(out, PATH_N, "%s", path);
    }
    if (f)
        fclose(f);
    return found;
}

/* mountinfo: "36 35 98:0 /root /mount/point options... - type source super,options" */
static bool group_mount(const char *root, int version, char *mount_root, char *mount_point)
{
    FILE *f = open_at(root, "/proc/self/mountinfo");
    char line[2 * PATH_N], type[64], super[PATH_N];
    bool found = false;
    while (f && !found && fgets(line, sizeof line, f)) {
        char *dash = strstr(line, " - ");
        if (!dash || sscanf(line, "%*s %*s %*s %4095s %4095s", mount_root, mount_point) != 2)
            continue;
        if (sscanf(dash + 3, "%63s %*s %4095s", type, super) != 2)
            continue;
        found = version == 2 ? strcmp(type, "cgroup2") == 0
                             : strcmp(type, "cgroup") == 0 && has_word(super, "memory");
    }
    if (f)
        fclose(f);
    return found;
}

static uint64_t free_in_cgroups(const char *root, int version)
{
    char path[PATH_N], mount_root[PATH_N], mount_point[PATH_N], dir[2 * PATH_N];
    if (!group_path(root, version, path) || !group_mount(root, version, mount_root, mount_point))
        return UINT64_MAX;
    const char *below = path;
    size_t n = strlen(mount_root);
    if (n > 1 && strncmp(path, mount_root, n) == 0 && (path[n] == '/' || path[n] == 0))
        below = path + n;
    snprintf(dir, sizeof dir, "%s%s", mount_point, strcmp(below, "/") == 0 ? "" : below);
    uint64_t least = UINT64_MAX;
    for (size_t n_mount = strlen(mount_point); strlen(dir) >= n_mount;) {
        uint64_t here = free_in_group(root, dir, version);
        if (here < least)
            least = here;
        char *slash = strrchr(dir, '/');
        if (!slash)
            break;
        *slash = 0;
    }
    return least;
}

static uint64_t rlimit_of(const char *root, int which, const char *key)
{
    struct rlimit r;
    /* "unlimited" is no number */
    if (*root)
        return number_after(root, "/proc/self/limits", key, 1);
    if (getrlimit((__rlimit_resource_t)which, &r) != 0 || r.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    return r.rlim_cur;
}

static uint64_t under_rlimit(const char *root, int which, const char *key, const char *used_key)
{
    uint64_t limit = rlimit_of(root, which, key);
    uint64_t used = number_after(root, "/proc/self/status", used_key, 1024);
    return limit == UINT64_MAX || used == UINT64_MAX ? UINT64_MAX : minus(limit, used);
}

void koila__freemem_read(const char *root, koila__freemem *out)
{
    uint64_t v1 = free_in_cgroups(root, 1);
    uint64_t v2 = free_in_cgroups(root, 2);
    out->bytes[KOILA__FREEMEM_CGROUP] = v1 < v2 ? v1 : v2;
    out->bytes[KOILA__FREEMEM_RLIMIT_DATA] =
        under_rlimit(root, RLIMIT_DATA, "Max data size", "VmData:");
    out->bytes[KOILA__FREEMEM_RLIMIT_AS] =
        under_rlimit(root, RLIMIT_AS, "Max address space", "VmSize:");
    out->bytes[KOILA__FREEMEM_AVAILABLE] =
        number_after(root, "/proc/meminfo", "MemAvailable:", 1024);
    out->bound = -1;
    for (int i = 0; i < KOILA__FREEMEM_N; i++)
        if (out->bytes[i] != UINT64_MAX &&
            (out->bound < 0 || out->bytes[i] < out->bytes[out->bound]))
            out->bound = i;
}
