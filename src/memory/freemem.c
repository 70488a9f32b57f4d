/* freemem.c — see freemem.h.
 *
 * Where the control group is: /proc/self/cgroup says its path within a hierarchy ("0::/a/b" is
 * version 2, "4:memory:/a/b" is version 1), /proc/self/mountinfo says where that hierarchy is
 * mounted and which of its directories is the root of the mount (in a container the mount often
 * starts at the container's own group). We read the directory and every ancestor up to the mount
 * point, for each may limit. File cache that nobody has touched lately (inactive_file) is given
 * back before the group is out of memory, so it counts as free.
 *
 * All files are opened once and read with pread(): the kernel writes their text anew each time.
 */
#include "memory/freemem.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

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
/* longer than what is looked for in any of the files but mountinfo lies from their start */
#define TEXT_N 8192

static int open_at(const char *root, const char *path)
{
    char full[3 * PATH_N];
    if (snprintf(full, sizeof full, "%s%s", root, path) >= (int)sizeof full)
        return -1;
    return open(full, O_RDONLY | O_CLOEXEC);
}

static void shut(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* Reads a file from its start. An empty text if it is not there. */
static size_t text_of(int fd, char *text, size_t room)
{
    const ssize_t n = fd >= 0 ? pread(fd, text, room - 1, 0) : -1;
    text[n > 0 ? n : 0] = 0;
    return n > 0 ? (size_t)n : 0;
}

static uint64_t minus(uint64_t limit, uint64_t used) { return used < limit ? limit - used : 0; }
static uint64_t least_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The number after `key` at the start of a line ("VmData:\t 123 kB" -> 123 * unit); UINT64_MAX if
 * there is none. */
static uint64_t number_after(int fd, const char *key, uint64_t unit)
{
    char text[TEXT_N];
    const size_t n = strlen(key);
    text_of(fd, text, sizeof text);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, n) != 0)
            continue;
        char *end;
        const unsigned long long v = strtoull(line + n, &end, 10);
        if (end != line + n)
            return v > UINT64_MAX / unit ? UINT64_MAX : v * unit;
    }
    return UINT64_MAX;
}

/* ---- control groups */

static void open_group(koila__freemem_files *f, const char *dir, int version)
{
    if (f->n_groups == KOILA__FREEMEM_GROUPS)
        return;
    char path[2 * PATH_N + 64];
    koila__freemem_group *g = &f->groups[f->n_groups];
#define OPEN(file) (snprintf(path, sizeof path, "%s/%s", dir, file), open_at(f->root, path))
    g->version = version;
    g->limit = OPEN(version == 2 ? "memory.max" : "memory.limit_in_bytes");
    g->high = version == 2 ? OPEN("memory.high") : -1;
    g->usage = OPEN(version == 2 ? "memory.current" : "memory.usage_in_bytes");
    g->stat = OPEN("memory.stat");
#undef OPEN
    f->n_groups++;
}

static void close_groups(koila__freemem_files *f)
{
    while (f->n_groups) {
        koila__freemem_group *g = &f->groups[--f->n_groups];
        shut(&g->limit);
        shut(&g->high);
        shut(&g->usage);
        shut(&g->stat);
    }
}

/* Free bytes that one group allows; UINT64_MAX: no limit there. */
static uint64_t free_in_group(const koila__freemem_group *g)
{
    /* "max" is no number: no limit */
    uint64_t limit = number_after(g->limit, "", 1);
    if (g->high >= 0)
        limit = least_of(limit, number_after(g->high, "", 1));
    if (limit >= (uint64_t)1 << 60)
        return UINT64_MAX;
    uint64_t usage = number_after(g->usage, "", 1);
    if (usage == UINT64_MAX)
        return UINT64_MAX;
    const uint64_t cache =
        number_after(g->stat, g->version == 2 ? "inactive_file " : "total_inactive_file ", 1);
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
 * controller). `text`: /proc/self/cgroup. */
static bool group_path(const char *text, int version, char *out)
{
    char line[PATH_N];
    for (const char *at = text; *at;) {
        const size_t n = strcspn(at, "\n");
        snprintf(line, sizeof line, "%.*s", (int)least_of(n, PATH_N - 1), at);
        at += n + (at[n] == '\n');
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *controllers++ = 0;
        *path++ = 0;
        if (version == 2 ? strcmp(line, "0") == 0 && !*controllers
                         : has_word(controllers, "memory")) {
            snprintf(out, PATH_N, "%s", path);
            return true;
        }
    }
    return false;
}

/* mountinfo: "36 35 98:0 /root /mount/point options... - type source super,options" */
static bool group_mount(const char *root, int version, char *mount_root, char *mount_point)
{
    const int fd = open_at(root, "/proc/self/mountinfo");
    FILE *f = fd >= 0 ? fdopen(fd, "r") : NULL;
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

/* The group of the hierarchy of `version` and its ancestors, up to the mount point. */
static void open_hierarchy(koila__freemem_files *f, const char *text, int version)
{
    char path[PATH_N], mount_root[PATH_N], mount_point[PATH_N], dir[2 * PATH_N];
    if (!group_path(text, version, path) || !group_mount(f->root, version, mount_root, mount_point))
        return;
    const char *below = path;
    size_t n = strlen(mount_root);
    if (n > 1 && strncmp(path, mount_root, n) == 0 && (path[n] == '/' || path[n] == 0))
        below = path + n;
    snprintf(dir, sizeof dir, "%s%s", mount_point, strcmp(below, "/") == 0 ? "" : below);
    for (size_t n_mount = strlen(mount_point); strlen(dir) >= n_mount;) {
        open_group(f, dir, version);
        char *slash = strrchr(dir, '/');
        if (!slash)
            break;
        *slash = 0;
    }
}

static uint64_t hash_of(const char *text)
{
    uint64_t h = 14695981039346656037u; /* FNV-1a */
    for (; *text; text++)
        h = (h ^ (unsigned char)*text) * 1099511628211u;
    return h;
}

static void find_groups(koila__freemem_files *f, const char *text)
{
    close_groups(f);
    f->group_hash = hash_of(text);
    open_hierarchy(f, text, 1);
    open_hierarchy(f, text, 2);
}

/* ---- rlimits */

static uint64_t rlimit_of(const char *root, int which, const char *key)
{
    struct rlimit r;
    if (*root) {
        int fd = open_at(root, "/proc/self/limits");
        const uint64_t n = number_after(fd, key, 1); /* "unlimited" is no number */
        shut(&fd);
        return n;
    }
    if (getrlimit((__rlimit_resource_t)which, &r) != 0 || r.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    return r.rlim_cur;
}

static uint64_t under_rlimit(const koila__freemem_files *f, int which, const char *key,
                             const char *used_key)
{
    const uint64_t limit = rlimit_of(f->root, which, key);
    if (limit == UINT64_MAX)
        return UINT64_MAX;
    const uint64_t used = number_after(f->status, used_key, 1024);
    return used == UINT64_MAX ? UINT64_MAX : minus(limit, used);
}

/* ---- all of them */

void koila__freemem_open(koila__freemem_files *f, const char *root)
{
    *f = (koila__freemem_files){ .pid = (int)getpid() };
    if (snprintf(f->root, sizeof f->root, "%s", root) >= (int)sizeof f->root)
        strcpy(f->root, "/nonexistent");
    f->cgroup = open_at(f->root, "/proc/self/cgroup");
    f->meminfo = open_at(f->root, "/proc/meminfo");
    f->status = open_at(f->root, "/proc/self/status");
    struct stat is;
    if (f->cgroup >= 0 && fstat(f->cgroup, &is) == 0) {
        f->device = is.st_dev;
        f->inode = is.st_ino;
    }
    char text[TEXT_N];
    text_of(f->cgroup, text, sizeof text);
    find_groups(f, text);
}

void koila__freemem_close(koila__freemem_files *f)
{
    if (!f->pid)
        return;
    close_groups(f);
    shut(&f->cgroup);
    shut(&f->meminfo);
    shut(&f->status);
    f->pid = 0;
}

/* The files under /proc/self are those of the process that opened them. A program that closes all
 * descriptors (a daemon does) has closed ours: then the numbers may be anybody's and are let go. */
static void open_again_if_lost(koila__freemem_files *f)
{
    struct stat is;
    const bool ours = f->cgroup < 0 || (fstat(f->cgroup, &is) == 0 && is.st_dev == f->device &&
                                        is.st_ino == f->inode);
    if (ours && f->pid == (int)getpid())
        return;
    char root[sizeof f->root];
    memcpy(root, f->root, sizeof root);
    if (ours)
        koila__freemem_close(f);
    koila__freemem_open(f, root);
}

uint64_t koila__freemem_in_groups(koila__freemem_files *f)
{
    char text[TEXT_N];
    open_again_if_lost(f);
    text_of(f->cgroup, text, sizeof text);
    if (hash_of(text) != f->group_hash)
        find_groups(f, text);
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < f->n_groups; i++)
        least = least_of(least, free_in_group(&f->groups[i]));
    return least;
}

void koila__freemem_look(koila__freemem_files *f, koila__freemem *out)
{
    out->bytes[KOILA__FREEMEM_CGROUP] = koila__freemem_in_groups(f);
    out->bytes[KOILA__FREEMEM_RLIMIT_DATA] =
        under_rlimit(f, RLIMIT_DATA, "Max data size", "VmData:");
    out->bytes[KOILA__FREEMEM_RLIMIT_AS] =
        under_rlimit(f, RLIMIT_AS, "Max address space", "VmSize:");
    out->bytes[KOILA__FREEMEM_AVAILABLE] = number_after(f->meminfo, "MemAvailable:", 1024);
    out->bound = -1;
    for (int i = 0; i < KOILA__FREEMEM_N; i++)
        if (out->bytes[i] != UINT64_MAX &&
            (out->bound < 0 || out->bytes[i] < out->bytes[out->bound]))
            out->bound = i;
}

void koila__freemem_read(const char *root, koila__freemem *out)
{
    koila__freemem_files f;
    koila__freemem_open(&f, root);
    koila__freemem_look(&f, out);
    koila__freemem_close(&f);
}
