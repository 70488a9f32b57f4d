/* Any bytes as a graph's text: refused with a byte of the text, or a graph that holds its
 * invariants and whose text reads back to the same text. */
#include <stdlib.h>
#include <string.h>

#include "koila/koila.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

typedef struct text {
    char *at;
    size_t n, cap;
} text;
static int collect(void *user, const char *s, size_t n)
{
    text *t = user;
    if (t->n + n > t->cap) {
        t->cap = (t->n + n) * 2;
        t->at = realloc(t->at, t->cap);
        if (!t->at)
            abort();
    }
    memcpy(t->at + t->n, s, n);
    t->n += n;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    koila_table *t = NULL, *u = NULL;
    koila_graph *g = NULL, *h = NULL, *same = NULL;
    koila_error err = KOILA_ERROR_INIT;
    text a = { 0 }, b = { 0 };
    if (koila_table_new(NULL, &t) || koila_table_new(NULL, &u))
        abort();
    if (koila_graph_parse(t, (const char *)data, n, &g, &err)) {
        if (err.code != KOILA_BAD_INPUT || err.offset > n || !err.text[0] || g)
            abort();
    } else {
        if (!koila_graph_check(g, NULL))
            abort();
        if (koila_graph_print(g, collect, &a) || koila_graph_parse(u, a.at, a.n, &h, NULL) ||
            koila_graph_print(h, collect, &b))
            abort();
        if (a.n != b.n || memcmp(a.at, b.at, a.n) != 0)
            abort();
        if (koila_graph_n_values(g) != koila_graph_n_values(h) ||
            koila_graph_n_nodes(g) != koila_graph_n_nodes(h))
            abort();
        /* read again where its signatures are: the same graph */
        if (koila_graph_parse(u, a.at, a.n, &same, NULL) ||
            koila_graph_hash(same) != koila_graph_hash(h))
            abort();
        b.n = 0;
        if (koila_graph_dot(g, collect, &b))
            abort();
    }
    koila_graph_free(same);
    koila_graph_free(h);
    koila_graph_free(g);
    koila_table_free(u);
    koila_table_free(t);
    free(a.at);
    free(b.at);
    return 0;
}
