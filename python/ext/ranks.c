/* ranks.c — processes that share a sharded module must call it equally often, or they wait for each other for ever.
 *
 * Each call of such a module (koila.opaque() of an FSDP2 module) talks to the other ranks. How often it is called follows from the plan, and each rank makes its own: of
 * its own memory, of its own rows. So before a plan with such calls runs, the ranks compare what they are about to call (koila._sharded.agree: one small
 * all-reduce). Where they differ, all plan again with the most slices that any wants; where they still differ, all raise. */
#include "exec.h"

static PyObject *agree_with; /* koila._sharded.agree, or NULL: nothing is sharded in this process */

void koila__ranks_ask(PyObject *agree) { Py_XSETREF(agree_with, Py_NewRef(agree)); }

/* The call's key when node n is one of koila::opaque or koila::opaque_backward, else -1; *backward: which. */
static int64_t key_of(const koila_graph *g, koila_node n, bool *backward)
{
    const koila_sig_info *s = koila_sig_get(koila__table, koila_node_get(g, n).sig);
    const char *op = koila_op_name(koila__table, s->op);
    if (strncmp(op, "koila::opaque", 13) || !s->n_pos) return -1;
    *backward = op[13] == '_';
    const koila_arg *id = &s->tokens[s->start[s->n_pos - 1]];
    return id->kind == KOILA_ARG_INT ? id->u.i : -1;
}

static bool add(PyObject *list, PyObject *item) /* takes item */
{
    const bool ok = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return ok;
}

PyObject *koila__ranks_keys(const koila_graph *part)
{
    bool backward, ok = true;
    PyObject *keys = PyList_New(0);
    for (koila_node n = 0; keys && agree_with && ok && n < koila_graph_n_nodes(part); n++) {
        const int64_t key = key_of(part, n, &backward);
        if (key >= 0) ok = add(keys, PyLong_FromLongLong(key));
    }
    if (!ok) Py_CLEAR(keys);
    return keys;
}

int koila__ranks_agree(PyObject *keys, const cached *c, bool settled, uint32_t *n_slices)
{
    *n_slices = 0;
    if (!PyList_GET_SIZE(keys)) return 0;
    bool backward, ok = true;
    PyObject *calls = PyList_New(0), *answer = NULL;
    for (uint32_t k = 0; calls && c && ok && k < c->info.n_stages; k++) {
        const koila_stage *st = koila_plan_stage(c->plan, k);
        const unsigned n = st->is_loop ? koila_plan_slices(c->plan, st->axis) : 1;
        for (uint32_t i = 0; ok && i < st->n_instrs; i++) {
            const int64_t key = st->instrs[i].kind == KOILA_DO_RUN ? key_of(koila_plan_graph(c->plan), st->instrs[i].id, &backward) : -1;
            if (key >= 0) ok = add(calls, Py_BuildValue("ILi", n, (long long)key, (int)backward));
        }
    }
    if (calls && ok) answer = PyObject_CallFunction(agree_with, "OOIO", keys, calls, c ? c->info.n_slices : 0, settled ? Py_True : Py_False);
    Py_XDECREF(calls);
    if (!answer) return -1;
    const long n = answer == Py_None ? -1 : PyLong_AsLong(answer);
    Py_DECREF(answer);
    if (PyErr_Occurred()) return -1;
    if (n > 0) *n_slices = (uint32_t)n;
    return n >= 0; /* None: nothing of it is sharded */
}
