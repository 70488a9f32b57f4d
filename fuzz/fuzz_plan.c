/* A random step (or, when the bytes are one, a graph's text) planned for budgets and rows: the same
 * plan twice, every invariant, within the budget. */
#include <stdlib.h>
#include <string.h>

#include "../tests/unit/random_graph.h"
#include "../tests/unit/same_plan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static int ignore(void *user, const char *s, size_t n)
{
    (void)s;
    *(size_t *)user += n;
    return 0;
}

/* The peak of the plan, UINT64_MAX when there is none. */
static uint64_t try_one(const koila_graph *g, const koila_value *targets, uint32_t n_targets,
                        koila_plan_options o)
{
    koila_plan *a = NULL, *b = NULL;
    koila_error err = KOILA_ERROR_INIT;
    uint64_t peak = UINT64_MAX;
    const koila_status status = koila_plan_new(g, targets, n_targets, &o, NULL, &a, &err);
    if (koila_plan_new(g, targets, n_targets, &o, NULL, &b, NULL) != status)
        abort();
    if (status == KOILA_OK) {
        size_t shown = 0;
        koila_adapt adapts[KOILA_MAX_ADAPTS];
        if (!same_plan(a, b) || !koila_plan_check(a, NULL))
            abort();
        peak = koila_plan_get(a).peak_bytes;
        if (peak > o.budget_bytes)
            abort();
        if (koila_plan_print(a, ignore, &shown) || koila_plan_dot(a, ignore, &shown))
            abort();
        for (uint32_t m = 0; m < koila_graph_n_nodes(koila_plan_graph(a)); m++)
            if (koila_plan_in_loop(a, m) &&
                koila_plan_adapt(a, m, -1, 1, adapts) > KOILA_MAX_ADAPTS)
                abort();
    } else if (!err.text[0] || (status != KOILA_OOM && status != KOILA_UNSUPPORTED))
        abort();
    koila_plan_free(a);
    koila_plan_free(b);
    return peak;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    random_graph r = { 0 };
    if (n >= 5 && memcmp(data, "koila", 5) == 0) {
        if (koila_table_new(NULL, &r.t))
            abort();
        if (koila_graph_parse(r.t, (const char *)data, n, &r.g, NULL))
            r.g = NULL;
        for (uint32_t v = r.g && koila_graph_n_nodes(r.g) < 500 ? koila_graph_n_values(r.g) : 0;
             v-- > 0 && r.n_targets < 4;)
            if (koila_value_get(r.g, v).meta != KOILA_NONE)
                r.targets[r.n_targets++] = v;
    } else if (rg_init(&r, NULL, 1, data, n, 40) != KOILA_OK)
        abort();
    if (r.n_targets) {
        koila_plan_options o = { .struct_size = sizeof o, .budget_bytes = UINT64_MAX };
        const uint64_t whole = try_one(r.g, r.targets, r.n_targets, o);
        o.rows = 1;
        try_one(r.g, r.targets, r.n_targets, o);
        o.keep = KOILA_KEEP_NONE;
        o.rows = 3;
        try_one(r.g, r.targets, r.n_targets, o);
        o.rows = 0;
        o.budget_bytes = whole / 2;
        o.keep = KOILA_KEEP_AUTO;
        if (whole != UINT64_MAX)
            try_one(r.g, r.targets, r.n_targets, o);
    }
    rg_deinit(&r);
    return 0;
}
