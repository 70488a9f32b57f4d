/* ranks.c — makes processes that share a sharded module call it equally often; otherwise they would
 * wait for each other for ever.
 *
 * Each call of such a module (koila.opaque() of an FSDP2 module) talks to the other ranks. The plan
 * decides how often it is called, and each rank makes its own plan, from its own memory and rows.
 * Also, one rank may fail where the others do not. So the ranks talk at three points
 * (koila._sharded.Ranks: one small all-reduce each):
 *
 *   exchange   before a plan with such calls runs, the ranks compare their lists of calls. If they
 *              differ, all plan again with the largest number of slices. All raise if the lists
 *              still differ, or if one rank cannot go on (no memory, a gather that strict()
 *              refuses, a stale value).
 *   meet       before each such call: has any rank failed? A rank that failed between two calls
 *              announces it at the next meeting, and all raise.
 *   meet       once more, after the last call of the plan.
 *
 * Invariant: a rank that has passed the exchange comes to every meeting until a failure is
 * announced. Inside such a call the budget is not enforced, since raising there would leave the
 * other ranks waiting: overuse is detected when the call returns (exec.c). A failure inside the
 * module on one rank only cannot be announced: that rank raises, and the others wait, as in plain
 * PyTorch, until its process ends or their group times out. */
#include "run/run.h"

/* koila._opaque.ranks_of; NULL: nothing is sharded in this process */
static PyObject *ranks_of;

void koila__ranks_ask(PyObject *ask) { Py_XSETREF(ranks_of, Py_NewRef(ask)); }

/* The key of node n's call if it is koila::opaque or koila::opaque_backward (then *backward), else
 * -1. */
static int64_t key_of(const koila_graph *g, koila_node n, bool *backward)
{
    const koila_sig_info *s = koila_sig_get(koila__table, koila_node_get(g, n).sig);
    const uint32_t facts = koila_op_facts(koila__table, s->op);
    if (!(facts & KOILA_FACT_OPAQUE_CALL) || !s->n_pos)
        return -1;
    *backward = facts & KOILA_FACT_OPAQUE_BACKWARD;
    const koila_arg *id = &s->tokens[s->start[s->n_pos - 1]];
    return id->kind == KOILA_ARG_INT ? id->u.i : -1;
}

/* Takes over `item`. */
static bool add(PyObject *list, PyObject *item)
{
    const bool ok = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return ok;
}

PyObject *koila__ranks_of(const koila_graph *part)
{
    bool backward, ok = true;
    if (!ranks_of)
        return Py_NewRef(Py_None);
    PyObject *keys = PyList_New(0);
    PyObject *ranks = NULL;
    for (koila_node n = 0; keys && ok && n < koila_graph_n_nodes(part); n++) {
        const int64_t key = key_of(part, n, &backward);
        if (key >= 0)
            ok = add(keys, PyLong_FromLongLong(key));
    }
    if (keys && ok)
        ranks = PyList_GET_SIZE(keys) ? PyObject_CallOneArg(ranks_of, keys) : Py_NewRef(Py_None);
    Py_XDECREF(keys);
    return ranks;
}

bool koila__ranks_share(PyObject *ranks, const koila_graph *g, koila_node n)
{
    bool backward;
    const int64_t key = ranks ? key_of(g, n, &backward) : -1;
    PyObject *shares = key >= 0 ? PyObject_CallMethod(ranks, "shares", "L", (long long)key) : NULL;
    const bool yes = shares == Py_True;
    Py_XDECREF(shares);
    return yes;
}

int koila__ranks_agree(PyObject *ranks, const cached *c, bool settled, uint32_t *n_slices)
{
    bool backward, ok = true;
    PyObject *calls = PyList_New(0);
    PyObject *answer = NULL;
    for (uint32_t k = 0; calls && ok && k < c->info.n_stages; k++) {
        const koila_stage *st = koila_plan_stage(c->plan, k);
        const unsigned n = st->is_loop ? koila_plan_slices(c->plan, st->axis) : 1;
        for (uint32_t i = 0; ok && i < st->n_instrs; i++) {
            const int64_t key = st->instrs[i].kind == KOILA_DO_RUN
                                    ? key_of(koila_plan_graph(c->plan), st->instrs[i].id, &backward)
                                    : -1;
            if (key >= 0)
                ok = add(calls, Py_BuildValue("ILi", n, (long long)key, (int)backward));
        }
    }
    if (calls && ok)
        answer = PyObject_CallMethod(ranks, "agree", "OIO", calls, c->info.n_slices,
                                     settled ? Py_True : Py_False);
    Py_XDECREF(calls);
    const long n = answer ? PyLong_AsLong(answer) : -1;
    Py_XDECREF(answer);
    if (n < 0)
        return -1;
    *n_slices = (uint32_t)n;
    return 0;
}

/* Tells the other ranks that this one failed. The exception stays set; an error of the call itself
 * (the others may be gone) is ignored. Returns the method's answer. */
static bool tell(PyObject *ranks, const char *method)
{
    PyObject *type, *value, *trace;
    const bool memory = koila__is_out_of_memory();
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallMethod(ranks, method, "O", memory ? Py_True : Py_False);
    const bool yes = done == Py_True;
    Py_XDECREF(done);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return yes;
}

void koila__ranks_withdraw(PyObject *ranks) { tell(ranks, "withdraw"); }

int koila__ranks_meet(PyObject *ranks)
{
    PyObject *done = PyObject_CallMethod(ranks, "meet", NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

bool koila__ranks_failed(PyObject *ranks) { return tell(ranks, "failed"); }
