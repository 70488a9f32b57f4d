/* strict.c — what strict() refuses: to hold a sliced value whole.
 *
 * A plan gathers when an operator without a rule needs the whole batch at once, or when an operator
 * that runs on values, outside the recorded step (nonzero, unique), waits for one that is sliced.
 * Values that the program merely holds do not stop a step: they are left out until the rest passes.
 */
#include "run/run.h"

static int refuse(const cached *c, koila_gather g, const char *op, const char *line)
{
    return koila__raise_gather(koila__gather_text(c, g, op, line));
}

static bool is_larger_than_a_slice(const cached *c, koila_gather g)
{
    return g.bytes > koila_plan_value_bytes(c->plan, g.value, c->info.rows);
}

int koila__strict_check(koila__tape *t, const cached *c, uint32_t n)
{
    if (!koila__settings_now().strict || c->info.n_slices <= 1)
        return 0;
    for (uint32_t i = 0; i < c->info.n_gathers; i++) {
        const koila_gather g = koila_plan_gather(c->plan, i);
        if (is_larger_than_a_slice(c, g))
            return refuse(c, g, NULL, NULL);
    }
    const koila_graph *lowered = koila_plan_graph(c->plan);
    const koila__context *here = koila__context_peek();
    const char *op = here ? here->gathers_for : NULL;
    for (uint32_t i = 0; op && i < n; i++) {
        const koila_value v = koila_plan_target(c->plan, i);
        const koila_meta meta = koila_value_get(lowered, v).meta;
        const koila_gather g = { .value = v,
                                 .node = KOILA_NONE,
                                 .bytes = koila_meta_get(koila__table, meta)->n_bytes };
        if (koila_plan_share(c->plan, v).kind != KOILA_SHARE_SLICE || !is_larger_than_a_slice(c, g))
            continue;
        char line[300] = "";
        koila__line_text(t->graph, koila__line_now(t), line, sizeof line);
        return refuse(c, g, op, line);
    }
    return 0;
}

/* Would strict() refuse a plan for these targets? Where that cannot be known the answer is yes. */
static bool is_refused(koila__tape *t, const koila_value *targets, uint32_t n)
{
    koila__part part;
    koila_error err = KOILA_ERROR_INIT;
    koila_status status = KOILA_OK;
    cached *c = NULL;
    if (!n)
        return false;
    if (koila__part_make(t, targets, n, true, &part) == 0) {
        koila__room room;
        if (koila__room_for(part.graph, KOILA__NEEDS_MUCH, &room) == 0)
            c = koila__plan_for(koila__part_give(&part), part.targets, n, &room,
                                koila__cutting_now(&room), &err, &status);
        koila__part_free(&part);
    }
    const bool refused = !c || koila__strict_check(t, c, n) < 0;
    PyErr_Clear();
    koila__cached_release(c);
    return refused;
}

uint32_t koila__strict_pass(koila__tape *t, koila_value *targets, uint32_t n_must, uint32_t n)
{
    if (is_refused(t, targets, n_must))
        return n;
    for (uint32_t i = n_must; i < n; i++) {
        const koila_value v = targets[i];
        targets[i] = targets[n_must];
        targets[n_must] = v;
        n_must += !is_refused(t, targets, n_must + 1);
    }
    return n_must;
}
