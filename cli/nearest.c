/* nearest.c — "did you mean": the command or the option that a misspelt one was meant to be. */
#include "cmd.h"

enum { LONGEST = 31 };

static size_t least_of(size_t a, size_t b) { return a < b ? a : b; }

/* Letters to change, insert, leave out or swap with their neighbour until `a` is `b` (Damerau and
 * Levenshtein, each place edited once). Both at most LONGEST. */
static size_t distance(const char *a, size_t n_a, const char *b, size_t n_b)
{
    size_t d[LONGEST + 1][LONGEST + 1];
    for (size_t i = 0; i <= n_a; i++)
        for (size_t j = 0; j <= n_b; j++) {
            if (!i || !j) {
                d[i][j] = i + j;
                continue;
            }
            d[i][j] = least_of(d[i - 1][j], d[i][j - 1]) + 1;
            d[i][j] = least_of(d[i][j], d[i - 1][j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                d[i][j] = least_of(d[i][j], d[i - 2][j - 2] + 1);
        }
    return d[n_a][n_b];
}

/* The nearest name so far. Nothing is near that differs in half of its letters. */
typedef struct near {
    const char *asked, *name;
    size_t n_asked, n_name, least;
} near;

static near near_to(const char *asked)
{
    const size_t n = strlen(asked);
    return (near){ .asked = asked, .n_asked = n, .least = (n + 1) / 2 };
}

static void consider(near *best, const char *name, size_t n)
{
    if (best->n_asked > LONGEST || n > LONGEST)
        return;
    const size_t d = distance(best->asked, best->n_asked, name, n);
    if (d < best->least) {
        best->least = d;
        best->name = name;
        best->n_name = n;
    }
}

int no_command(const char *verb)
{
    char todo[80] = "Try koila --help.";
    near best = near_to(verb);
    for (const command *c = commands; c->verb; c++)
        consider(&best, c->verb, strlen(c->verb));
    if (best.name)
        snprintf(todo, sizeof todo, "Did you mean %s? Try koila --help.", best.name);
    return complain(NULL, todo, "no command '%s'", verb);
}

int no_option(const char *verb, const char *name)
{
    near best = near_to(name + strspn(name, "-"));
    const char *help = command_details(verb);
    for (const char *at = help; (at = strstr(at, "--")) != NULL;) {
        at += 2;
        const size_t n = strspn(at, "abcdefghijklmnopqrstuvwxyz-");
        consider(&best, at, n);
        at += n;
    }
    if (best.name)
        return usage_of(verb, "no option %s. Did you mean --%.*s?", name, (int)best.n_name,
                        best.name);
    return usage_of(verb, "no option %s", name);
}
