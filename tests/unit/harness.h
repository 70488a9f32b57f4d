/* harness.h — the unit tests' harness. A test is a claim:
 * TEST(place__matmul_on_the_contracted_axis_is_partial) { ... CHECK(x); } CHECK is alive in every
 * build. The runner ends in "N passed, N failed". The program takes an optional substring of the
 * names to run. */
#ifndef KOILA_TEST_HARNESS_H
#define KOILA_TEST_HARNESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct test_case {
    const char *name;
    void (*fn)(void);
    struct test_case *next;
} test_case;
static test_case *test_list;
static int test_failures_in_case;

#define TEST(name)                                                                                 \
    static void name(void);                                                                        \
    static test_case name##_case = { #name, name, NULL };                                          \
    __attribute__((constructor)) static void name##_register(void)                                 \
    {                                                                                              \
        name##_case.next = test_list;                                                              \
        test_list = &name##_case;                                                                  \
    }                                                                                              \
    static void name(void)

#define CHECK(e)                                                                                   \
    do {                                                                                           \
        if (!(e)) {                                                                                \
            test_failures_in_case++;                                                               \
            printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #e);                               \
        }                                                                                          \
    } while (0)
#define CHECK_EQ(a, b)                                                                             \
    do {                                                                                           \
        long long check_a_ = (long long)(a), check_b_ = (long long)(b);                            \
        if (check_a_ != check_b_) {                                                                \
            test_failures_in_case++;                                                               \
            printf("%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #a, check_a_, #b,        \
                   check_b_);                                                                      \
        }                                                                                          \
    } while (0)
#define CHECK_STR(a, b)                                                                            \
    do {                                                                                           \
        const char *check_a_ = (a), *check_b_ = (b);                                               \
        if (strcmp(check_a_, check_b_) != 0) {                                                     \
            test_failures_in_case++;                                                               \
            printf("%s:%d: %s is\n  \"%s\", expected\n  \"%s\"\n", __FILE__, __LINE__, #a,         \
                   check_a_, check_b_);                                                            \
        }                                                                                          \
    } while (0)

int main(int argc, char **argv)
{
    int passed = 0, failed = 0;
    for (test_case *t = test_list; t; t = t->next) {
        if (argc > 1 && !strstr(t->name, argv[1]))
            continue;
        test_failures_in_case = 0;
        t->fn();
        if (test_failures_in_case)
            printf("FAILED %s\n", t->name);
        test_failures_in_case ? failed++ : passed++;
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

/* A host allocator whose Nth call fails: for (fail.at = 1; ; fail.at++) { ... if (fail.n_calls <
 * fail.at) break; } Counts live bytes. */
typedef struct failing_allocator {
    uint64_t at, n_calls; /* at == 0: never fails */
    int64_t n_live_bytes;
} failing_allocator;
__attribute__((unused)) static void *failing_realloc(void *user, void *p, size_t old_n, size_t n)
{
    failing_allocator *f = user;
    if (n == 0) {
        if (p)
            f->n_live_bytes -= (int64_t)old_n;
        free(p);
        return NULL;
    }
    if (++f->n_calls == f->at)
        return NULL;
    void *q = realloc(p, n);
    if (q)
        f->n_live_bytes += (int64_t)n - (p ? (int64_t)old_n : 0);
    return q;
}

#endif
