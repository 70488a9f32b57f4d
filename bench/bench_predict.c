/* bench_predict.c STEP.kgraph — time of one prediction, and of one koila_fits (planning and one
 * simulated step). */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "koila/koila.h"

static double now(void)
{
    struct timespec t;
    /* of the processor: others may share the machine */
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv)
{
    static char text[64 << 20];
    FILE *f = argc > 1 ? fopen(argv[1], "rb") : NULL;
    size_t n = f ? fread(text, 1, sizeof text, f) : 0;
    koila_table *t = NULL;
    koila_graph *g = NULL;
    koila_device *d = NULL;
    koila_cache *c = NULL;
    koila_cache_config conf;
    koila_error e = KOILA_ERROR_INIT;
    koila_prediction p;
    koila_fit fit;
    if (koila_table_new(NULL, &t) || koila_graph_parse(t, text, n, &g, &e) ||
        koila_device_builtin("a100-40gb", NULL, &d, &e)) {
        printf("%s\n", e.text);
        return 1;
    }
    koila_cache_config_init(&conf, NULL);
    conf.total_bytes = (uint64_t)38 << 30;
    if (koila_cache_new(&conf, NULL, &c, &e))
        return 1;
    const int times = 20;
    double at = now();
    for (int i = 0; i < times; i++)
        if (koila_predict(g, d, NULL, NULL, &p, &e)) {
            printf("%s\n", e.text);
            return 1;
        }
    const double predict_ms = (now() - at) * 1e3 / times;
    at = now();
    for (int i = 0; i < times; i++)
        if (koila_fits(g, d, c, 0, &fit, &e)) {
            printf("%s\n", e.text);
            return 1;
        }
    const double fits_ms = (now() - at) * 1e3 / times;
    koila_value *targets = malloc(sizeof *targets);
    koila_plan_options o = { .struct_size = sizeof o, .budget_bytes = UINT64_MAX, .rows = p.batch };
    targets[0] = koila_graph_n_values(g) - 1;
    koila_plan *plan = NULL;
    at = now();
    for (int i = 0; i < times; i++) {
        if (koila_plan_new(g, targets, 1, &o, NULL, &plan, &e))
            break;
        koila_plan_free(plan);
    }
    printf("%u nodes: koila_predict %.2f ms (%u steps, 5 runs), koila_fits %.2f ms, of which "
           "planning about %.2f ms\n",
           koila_graph_n_nodes(g), predict_ms, p.n_steps, fits_ms, (now() - at) * 1e3 / times);
    free(targets);
    koila_cache_free(c);
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
    return 0;
}
