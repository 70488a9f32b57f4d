/* Any text as a step: what parses is predicted, twice the same, low <= expected <= high. */
#include <stdlib.h>
#include <string.h>

#include "koila/koila.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    koila_table *t = NULL;
    koila_graph *g = NULL;
    koila_device *d = NULL;
    koila_error e = KOILA_ERROR_INIT;
    koila_prediction p, q;
    if (koila_table_new(NULL, &t)) return 0;
    if (!koila_graph_parse(t, (const char *)data, n, &g, &e) && !koila_device_builtin("t4-16gb", NULL, &d, &e) && koila_graph_n_nodes(g) < 200) {
        koila_predict_opts o = { .struct_size = sizeof o, .optimizer = KOILA_OPTIMIZER_ADAM };
        if (!koila_predict(g, d, NULL, &o, &p, &e)) {
            if (koila_predict(g, d, NULL, &o, &q, &e) || p.steady.reserved.high != q.steady.reserved.high) abort();
            if (p.first.allocated.low > p.first.allocated.expected || p.first.allocated.expected > p.first.allocated.high) abort();
        }
    }
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
    return 0;
}
