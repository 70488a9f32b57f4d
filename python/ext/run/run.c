/* run.c — what capture asks for: values, now. request.c makes them; here is decided what comes with
 * them. */
#include "run/run.h"

/* A value that small is made in passing while somebody holds it: reading five logged losses is one
 * run and not five. */
enum { MAX_HELD = 256, SMALL_ELEMENTS = 1024 };

static bool is_small(const koila__tape *t, koila_value v)
{
    const koila_meta meta = koila_value_get(t->graph, v).meta;
    return koila_meta_get(koila__table, meta)->n_elements <= SMALL_ELEMENTS;
}

int koila__run(koila__tape *t, const koila_value *targets, uint32_t n_targets, bool commit_effects)
{
    if (koila__is_planning())
        return koila__run_planned(t, targets, n_targets);
    koila_value variables[MAX_HELD], held[MAX_HELD];
    uint32_t n_held = koila__tape_held(t, targets, n_targets, variables, MAX_HELD);
    uint32_t n_small = 0;
    if (n_held > MAX_HELD)
        n_held = MAX_HELD;
    for (uint32_t i = 0; i < n_held; i++)
        if (is_small(t, variables[i]))
            held[n_small++] = variables[i];
    /* effects whose values are made in passing may happen now, as they would have in eager */
    const koila__wanted w = { .wanted = targets,
                              .n_wanted = n_targets,
                              .held = held,
                              .n_held = n_small,
                              .effects =
                                  commit_effects || koila__effects_pass_by(t, targets, n_targets),
                              .asked_by =
                                  n_targets ? KOILA__ASKED_BY_READ : KOILA__ASKED_BY_LEAVING,
                              .variables = variables,
                              .n_variables = n_held };
    return koila__request(t, &w);
}

int koila__run_held(koila__tape *t, const koila_value *held, uint32_t n_held)
{
    const koila__wanted w = {
        .held = held, .n_held = n_held, .effects = true, .asked_by = KOILA__ASKED_BY_LEAVING
    };
    return koila__request(t, &w);
}
