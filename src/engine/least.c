/* least.c — the smallest budget in which a step that does not fit would fit.
 *
 * A search within a budget stops where nothing can fit any more, so it makes few of the plans that
 * fit a little more. Whoever is told what is missing wants to know the least. So plans are made for
 * budgets between the one that does not do and one that does, halved until these are next to each
 * other, or planning has taken long. A smaller budget never fits where a larger one does not, but
 * for the rules of thumb that end a search early: what is told is a budget in which a plan was
 * made. */
#include "engine/least.h"

#include "graph/table.h"

enum {
    CLOSE = 64, /* budgets are next to each other when they differ by this part */
    MOST_PLANS = 12,
    MOST_NODES = 200000, /* of all those plans, about two seconds; above, fewer are made */
};

/* Does a plan fit in that budget? If not, *needs: the least of what was made for it. */
static koila_status fits_in(const koila__planning *q, uint64_t budget, uint64_t *needs)
{
    koila_plan_options o = *q->options;
    koila_plan *plan = NULL;
    koila__least least = { .peak_bytes = UINT64_MAX };
    o.budget_bytes = budget;
    o.finds_least = false;
    o.accepts = NULL; /* the sum of live bytes decides, as in what is told otherwise */
    const koila_status status = koila__plan_row(q->graph, q->targets, q->n_targets, q->adds_on, &o,
                                                q->mem, NULL, NULL, &plan, &least, NULL);
    koila_plan_free(plan);
    *needs = least.peak_bytes;
    return status;
}

koila_status koila__least_budget(const koila__planning *q, uint64_t *n_bytes)
{
    uint64_t low = q->options->budget_bytes, high = *n_bytes;
    bool is_known = false; /* a plan was made for `high` */
    const uint32_t fewer = MOST_NODES / (q->graph->nodes.n + 1);
    const uint32_t most = fewer < MOST_PLANS ? fewer : MOST_PLANS;
    koila_assert(high > low);
    for (uint32_t i = 0; i < most && (!is_known || high - low > high / CLOSE); i++) {
        const uint64_t budget = is_known ? low + (high - low) / 2 : high;
        uint64_t needs;
        const koila_status status = fits_in(q, budget, &needs);
        if (status == KOILA_NO_MEMORY)
            return status;
        if (status == KOILA_OK) {
            high = budget;
            is_known = true;
            continue;
        }
        low = budget;
        if (!is_known)
            high = needs > budget && needs != UINT64_MAX ? needs : budget + budget / CLOSE + 1;
    }
    *n_bytes = high;
    return KOILA_OK;
}
