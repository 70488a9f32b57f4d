/* bounds.c — what is remembered of calls stays bounded.
 *
 * Each new shape, number or text makes new entries in the table, in the memo, and in what is kept
 * for each signature (templates, workspaces) and meta (wrappers' arguments). A program that anneals
 * a number, or whose batches are of ever-new sizes, would fill them without end. So at the start of
 * a step, when more than koila__forget_after entries have come, those that nobody uses are dropped.
 * Used is what a living graph or lazy tensor names (open steps, values that are kept, cached
 * plans), and each call that two steps have made, one of them since the last time: a model whose
 * batches alternate between many sizes keeps them all, up to the memo's own limit.
 *
 * Note [Ids]. Ids of the table are given again, so nobody may keep one that is not named somewhere:
 *
 *   graphs           are all in the table's own list: steps, parts, plans, wherever they are kept
 *   handles, leaves  of all tapes are named here
 *   the memo         names what it keeps, and drops the rest
 *   by id            templates, workspaces and wrappers' arguments are dropped with their id
 *   a C stack        an operator that is recorded has ids which nothing else names, and Python may
 *                    run meanwhile: in a shape function, the collector, another thread. Such code
 *                    stands between koila__hold_ids() and koila__release_ids(), which count. While
 *                    the count is not 0, in whatever thread, nothing is forgotten; the next step
 *                    tries again. A run of a plan has ids of graphs only, and is not counted: no
 *                    thread keeps the others from forgetting for longer than an operator.
 *   a hash of ids    (plans, tuned rows) is compared only beside a graph that lives, or decides
 *                    nothing but speed
 *
 * From the first mark to the last entry no Python runs: objects are collected in a list, and die
 * with it.
 */
#include "capture/executor.h"
#include "capture/record.h"

uint32_t koila__forget_after = 16384;
uint32_t koila__n_forgotten;

static void keep_handle(koila_keeper *k, const koila__handle *h)
{
    koila_keep_meta(k, h->meta);
    koila_keep_meta(k, h->group->meta);
    const uint32_t now = koila__n_forgotten + 1;
    for (koila__chain *c = h->chain; c && c->kept != now; c = c->parent) {
        c->kept = now; /* views share the beginnings of their chains */
        koila_keep_meta(k, c->meta);
        koila_keep_sig(k, c->link.sig);
    }
}

static void keep_tapes(koila_keeper *k, const koila__tape *t)
{
    for (; t; t = t->next_tape) {
        for (const koila__handle *h = t->handles; h; h = h->next_in_tape)
            keep_handle(k, h);
        for (uint32_t i = 0; i < t->n_leaf_slots; i++)
            if (t->leaves[i].real)
                koila_keep_meta(k, t->leaves[i].meta);
    }
}

static void keep(void *since, koila_keeper *k)
{
    keep_tapes(k, koila__tapes);
    keep_tapes(k, koila__resting_tapes);
    koila__memo_keep(k, *(const uint32_t *)since);
}

void koila__forget_when_due(void)
{
    static uint32_t n_used; /* entries that were left when it forgot last */
    static uint32_t since;  /* and the step of that */
    if (!koila__table || koila__n_ids_held ||
        koila_table_n_known(koila__table) < n_used + koila__forget_after)
        return;
    PyObject *gone = PyList_New(0); /* before: the collector may run Python */
    if (!gone || koila__n_ids_held || koila_table_forget(koila__table, keep, &since) != KOILA_OK) {
        PyErr_Clear(); /* the next step tries again */
        Py_XDECREF(gone);
        return;
    }
    koila__memo_forget(gone, since);
    koila__opaques_forget(gone);
    koila__wraps_forget(gone);
    koila__executor->forget(gone);
    since = koila__n_steps;
    koila__n_forgotten++;
    n_used = koila_table_n_known(koila__table);
    Py_DECREF(gone);
    koila__opaques_drop();
}
