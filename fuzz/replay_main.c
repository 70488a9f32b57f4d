/* replay_main.c — runs a fuzz target over files and folders of files, with any compiler; and with
 * --mutate N each file N times with random bytes changed. The long tier uses libFuzzer instead
 * (-Dfuzz=true, clang). */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static unsigned long n_runs, n_mutations;
static uint64_t seed = 1;

static uint64_t next(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static void run_bytes(const uint8_t *p, size_t n)
{
    uint8_t *exact = malloc(n ? n : 1); /* of just this size, so that a byte too far is seen */
    if (!exact)
        abort();
    memcpy(exact, p, n);
    LLVMFuzzerTestOneInput(exact, n);
    free(exact);
    n_runs++;
}

static int run_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        return 1;
    }
    uint8_t *p = malloc(1 << 20);
    uint8_t *q = malloc(1 << 20);
    if (!p || !q)
        abort();
    size_t n = fread(p, 1, 1 << 20, f);
    fclose(f);
    run_bytes(p, n);
    for (unsigned long i = 0; i < n_mutations && n; i++) {
        size_t m = n;
        memcpy(q, p, n);
        for (uint64_t k = next() % 6 + 1; k; k--) {
            size_t at = (size_t)(next() % m);
            size_t to = (size_t)(next() % m);
            size_t len = (size_t)(next() % 16);
            switch (next() % 5) {
            case 0:
                q[at] ^= (uint8_t)(1u << (next() & 7));
                break;
            case 1:
                q[at] = (uint8_t)next();
                break;
            case 2:
                m = at + 1;
                break;
            case 3:
                if (at + len <= m && to + len <= m)
                    memmove(q + to, q + at, len);
                break;
            default:
                q[at] = "\xff\x00\x80(.}]eua0-"[next() % 12];
                break;
            }
        }
        run_bytes(q, m);
    }
    free(p);
    free(q);
    return 0;
}

int main(int argc, char **argv)
{
    int failed = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--mutate") && i + 1 < argc) {
            n_mutations = strtoul(argv[++i], NULL, 10);
            continue;
        }
        DIR *d = opendir(argv[i]);
        if (!d) {
            failed += run_file(argv[i]);
            continue;
        }
        char path[4096];
        for (struct dirent *e; (e = readdir(d));) {
            if (e->d_name[0] == '.')
                continue;
            snprintf(path, sizeof path, "%s/%s", argv[i], e->d_name);
            failed += run_file(path);
        }
        closedir(d);
    }
    printf("%lu inputs, %d passed, %d failed\n", n_runs, !failed, failed);
    return failed != 0;
}
