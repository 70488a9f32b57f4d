/* exec_random.c — random calls of a run: each draws from the state of its generator that was
 * recorded before it, in a slice only that slice's numbers. */
#include "run/exec.h"

#include "ground/random.h"

/* u->own := a generator like the user's, with a tensor for its states. */
static int make_own(struct used *u)
{
    PyObject *all = PyObject_CallOneArg(koila__torch.own_generator, u->generator);
    const int status =
        all && PyArg_ParseTuple(all, "OOO!", &u->own, &u->own_state, &PyByteArray_Type, &u->memory)
            ? 0
            : -1;
    if (status == 0) {
        Py_INCREF(u->own);
        Py_INCREF(u->own_state);
        Py_INCREF(u->memory);
    }
    Py_XDECREF(all);
    return status;
}

/* What a run draws from in place of `generator`: found, or added. may_give: the operator has an
 * argument `generator`. NULL with an exception. */
static const struct used *use_generator(exec *x, PyObject *generator, bool may_give)
{
    for (uint32_t i = 0; i < x->n_used; i++)
        if (x->used[i].generator == generator && (may_give || x->used[i].state))
            return &x->used[i];
    if (x->n_used == MAX_GENERATORS) {
        PyErr_Format(PyExc_RuntimeError,
                     "koila: random operators on more than %d devices in one step", MAX_GENERATORS);
        return NULL;
    }
    PyObject *state = koila__generator_get(generator);
    if (!state)
        return NULL;
    struct used *u = &x->used[x->n_used];
    *u = (struct used){ .generator = generator };
    if (may_give && koila__is_cpu_state(state)) {
        Py_DECREF(state);
        if (make_own(u) < 0)
            return NULL;
    } else {
        u->state = state;
    }
    Py_INCREF(generator);
    x->n_used++;
    return u;
}

/* The generator that the running node draws from gets a state. */
static int set_state(const exec *x, const tape_random *random, PyObject *state)
{
    const struct used *u = x->used_by_node;
    return u->own ? koila__generator_set_by(u->own, u->own_state, u->memory, state)
                  : koila__generator_set(random->generator, state);
}

/* So many words are skipped sooner than the state behind them is read. */
enum { FEW_WORDS = 1024 };

/* Draws elements at ... at + n_elements of a random node's result into `part`. */
static int draw_block(exec *x, koila_node n, const tape_random *random, PyObject *part, int64_t at,
                      int64_t n_elements)
{
    struct cursor *c = &x->cursors[n];
    const koila__call_fix fix = { .generator = x->draws_from };
    if (!c->state || c->at > at) {
        Py_XSETREF(c->state, Py_NewRef(random->state));
        c->at = 0;
    }
    PyObject *out = NULL;
    PyObject *state = koila__generator_skipped(c->state, (uint64_t)(at - c->at) * random->words);
    int status = state && set_state(x, random, state) == 0 ? 0 : -1;
    if (status == 0)
        status = koila__call(koila_node_get(x->g, n).sig, &part, &fix, NULL, &out);
    Py_XDECREF(out);
    if (status < 0) {
        Py_XDECREF(state);
        Py_CLEAR(c->state);
        return -1;
    }
    if (n_elements <= FEW_WORDS / random->words) {
        c->at = at;
    } else {
        c->at = at + n_elements;
        Py_SETREF(state, koila__generator_get(random->generator));
    }
    Py_XSETREF(c->state, state);
    return state ? 0 : -1;
}

/* Draws only the slice's rows of a random node that draws in the order of memory: moves the
 * generator to each block of rows. 0: done; 1: not possible for this layout; -1 with an
 * exception. */
static int draw_rows(exec *x, koila_node n, const tape_random *random, const koila_sig_info *s,
                     koila_value v)
{
    const koila_share share = koila_plan_share(x->plan, v);
    const koila_meta_info *m = koila_meta_get(x->table, s->inputs[0]);
    const int64_t rows = koila__exec_n_rows(x);
    int64_t n_blocks = share.outer;
    int64_t unit = share.inner; /* memory order of the whole: n_blocks * batch * unit elements */
    if (!koila_meta_is_dense(m))
        return 1;
    for (uint32_t d = 0; d < m->n_dims; d++) {
        if (d == share.dim || m->size[d] <= 1)
            continue;
        if (m->stride[d] > m->stride[share.dim])
            n_blocks *= m->size[d];
        else
            unit *= m->size[d];
    }
    if (!x->cursors &&
        !(x->cursors = PyMem_Calloc(koila_graph_n_nodes(x->g), sizeof *x->cursors))) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *local = koila__torch_empty(m, share.dim, share.outer * share.inner * rows);
    PyObject *flat = local ? PyObject_CallFunction(koila__torch.as_strided, "O(L)(i)", local,
                                                   (long long)(n_blocks * rows * unit), 1)
                           : NULL;
    int status = flat ? 0 : -1;
    for (int64_t b = 0; b < n_blocks && status == 0; b++) {
        PyObject *part = koila__torch_narrow(flat, 0, b * rows * unit, rows * unit);
        status = part
                     ? draw_block(x, n, random, part, (b * x->batch + x->begin) * unit, rows * unit)
                     : -1;
        Py_XDECREF(part);
    }
    Py_XDECREF(flat);
    if (status == 0)
        x->local[v] = local;
    else
        Py_XDECREF(local);
    return status;
}

/* Runs a random node on a slice, from the generator state recorded before its draw. It draws only
 * the slice's rows where possible; else the whole batch, as eager does, of which it keeps the
 * rows. */
static int run_random_rows(exec *x, koila_node n, const tape_random *random,
                           const koila_sig_info *s, koila_value first)
{
    if (random->words) {
        const int drawn = draw_rows(x, n, random, s, first);
        if (drawn <= 0)
            return drawn;
    }
    if (set_state(x, random, random->state) < 0)
        return -1;
    PyObject *base = NULL, *out[2] = { NULL };
    int status = -1;
    const bool writes = s->n_writes == 1 && s->n_fresh == 0 && s->writes[0].overwrites;
    const bool like = s->n_writes == 0 && s->n_inputs == 1; /* reads only the shape */
    if (s->n_inputs > 1 || s->n_outputs > 2 || (s->n_inputs == 1 && !writes && !like)) {
        PyErr_Format(PyExc_RuntimeError, "koila: %s cannot be drawn in slices",
                     koila_op_name(x->table, s->op));
        return -1;
    }
    if (s->n_inputs && !(base = koila__torch_empty(koila_meta_get(x->table, s->inputs[0]), -1, -1)))
        return -1;
    const koila__call_fix fix = { .generator = x->draws_from };
    if (koila__call(koila_node_get(x->g, n).sig, base ? &base : NULL, &fix, NULL, out) < 0)
        goto done;
    for (uint32_t i = 0; i < s->n_outputs; i++) {
        const koila_value v = first + i;
        const koila_share share = koila_plan_share(x->plan, v);
        PyObject *rows = koila__exec_rows(x, out[i], share);
        if (rows)
            x->local[v] = PyObject_CallFunctionObjArgs(koila__torch.clone, rows, NULL);
        Py_XDECREF(rows);
        Py_CLEAR(out[i]);
        if (!x->local[v])
            goto done;
    }
    status = 0;
done:
    Py_XDECREF(base);
    Py_XDECREF(out[0]);
    Py_XDECREF(out[1]);
    return status;
}

int koila__exec_prepare_random(exec *x, koila_node n, bool in_loop)
{
    const koila_node_info info = koila_node_get(x->g, n);
    const koila_sig_info *s = koila_sig_get(x->table, info.sig);
    x->draws_from = NULL;
    x->used_by_node = NULL;
    if (!(koila_op_flags(x->table, s->op) & KOILA_OP_RANDOM))
        return 0;
    const tape_random *found =
        koila__tape_random(x->tape, x->node_from[koila__exec_recorded(x, n)]);
    if (!found)
        return 0;
    const bool is_cut = in_loop && !koila__exec_is_whole(x) &&
                        koila_plan_share(x->plan, info.first_output).kind == KOILA_SHARE_SLICE;
    tape_random random = *found; /* the tape's list moves when more is recorded */
    Py_INCREF(random.generator);
    Py_INCREF(random.state);
    /* in-place draws take a generator; native_dropout, which makes its results, does not */
    const struct used *u = use_generator(x, random.generator, s->n_writes > 0);
    Py_DECREF(random.generator); /* kept by x->used */
    int status = -1;
    if (u) {
        x->used_by_node = u;
        x->draws_from = u->own;
        if (u->own)
            random.generator = u->own;
        status = is_cut ? run_random_rows(x, n, &random, s, info.first_output)
                        : set_state(x, &random, random.state);
    }
    Py_DECREF(random.state);
    return status == 0 && is_cut ? 1 : status;
}

int koila__exec_give_generators_back(exec *x)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    int status = 0;
    for (uint32_t i = 0; i < x->n_used; i++)
        if (x->used[i].state && koila__generator_set(x->used[i].generator, x->used[i].state) < 0)
            status = -1;
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return status;
}

void koila__exec_free_random(exec *x)
{
    for (uint32_t n = 0; x->cursors && n < koila_graph_n_nodes(x->g); n++)
        Py_XDECREF(x->cursors[n].state);
    PyMem_Free(x->cursors);
    for (uint32_t i = 0; i < x->n_used; i++) {
        Py_DECREF(x->used[i].generator);
        Py_XDECREF(x->used[i].own);
        Py_XDECREF(x->used[i].own_state);
        Py_XDECREF(x->used[i].memory);
        Py_XDECREF(x->used[i].state);
    }
}
