/* Any text as a step: what parses is predicted, twice the same, low <= expected <= high; the most
 * rows that fit are looked for without a fault. */
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
    if (koila_table_new(NULL, &t))
        return 0;
    if (!koila_graph_parse(t, (const char *)data, n, &g, &e) &&
        !koila_device_builtin("t4-16gb", NULL, &d, &e) && koila_graph_n_nodes(g) < 200) {
        koila_predict_opts o = { .struct_size = sizeof o, .optimizer = KOILA_OPTIMIZER_ADAM };
        if (!koila_predict(g, d, NULL, &o, &p, &e)) {
            if (koila_predict(g, d, NULL, &o, &q, &e) ||
                p.steady.reserved.high != q.steady.reserved.high)
                abort();
            const koila_range *r[] = { &p.first.allocated,  &p.first.reserved,  &p.first.device,
                                       &p.steady.allocated, &p.steady.reserved, &p.steady.device };
            for (size_t i = 0; i < 6; i++)
                if (r[i]->low > r[i]->expected || r[i]->expected > r[i]->high)
                    abort();
            o.rows = KOILA_ROWS_AUTO;
            /* where slices may help */
            o.memory_bytes = p.steady.device.high - (p.steady.device.high - 700000000) / 3;
            if (!koila_predict(g, d, NULL, &o, &q, &e) && q.fits && q.spare_bytes > q.memory_bytes)
                abort();
        }
    }
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
    return 0;
}
