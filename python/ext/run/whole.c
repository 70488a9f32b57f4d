/* whole.c — the simple executor, the reference in tests: every node once, whole, in recorded order,
 * each value freed at its last use and each result compared with its record. */
#include "run/run.h"
#include "ground/random.h"

typedef struct whole_run {
    koila__tape *t;
    const koila_graph *g;
    uint32_t n_nodes, n_values;
    uint32_t *uses;   /* [n_values] readers to come; being a target counts as one more */
    PyObject **env;   /* [n_values] owned: made by this run */
    bool *needed;     /* [n_nodes] */
    PyObject *device; /* borrowed: on which all runs; NULL: on those that are recorded */
    /* while a step is planned, which computes nothing: tensors with values, and of these only whole
     * numbers and truth values where data decide; RUNS: no plan reads */
    enum { RUNS, READS_ANY, READS_WHOLE_NUMBERS } may_read;
    /* owned: of the call that runs */
    PyObject **in, **held, **out;
} whole_run;

static int check_version(koila__tape *t, koila_value v)
{
    uint32_t version;
    if (koila__version_of(t->values[v].real, &version) < 0)
        return -1;
    if (version == t->values[v].version)
        return 0;
    PyObject *f = koila__helper("raise_stale");
    PyObject *meta = f ? koila__meta_object(koila_value_get(t->graph, v).meta) : NULL;
    PyObject *r = NULL;
    if (meta)
        r = PyObject_CallFunction(f, "OOII", t->values[v].real, meta, t->values[v].version,
                                  version);
    Py_XDECREF(r);
    Py_XDECREF(meta);
    Py_XDECREF(f);
    return -1;
}

static int raise_read(const char *why)
{
    koila__unsupported("koila.plan(): the step reads a value (print, .item(), if, a mask) that "
                       "depends on %s, or plan the part up to there",
                       why);
    return -1;
}

/* May a plan be read that depends on the tensor v? */
static int check_read(const whole_run *w, koila_value v)
{
    koila_meta m;
    if (koila__meta_of(w->t->values[v].real, &m) < 0)
        return -1;
    const koila_meta_info *info = koila_meta_get(koila__table, m);
    if (koila__is_meta_device(info->device))
        return raise_read("a tensor on the meta device, which has no values. Make it on the CPU "
                          "(a batch is moved in the step: x.to(\"meta\"))");
    if (w->may_read != READS_ANY && !koila__dtype_is_whole(info->dtype))
        return raise_read("floating-point numbers. While planning nothing is computed from these. "
                          "Leave that out of the step");
    return 0;
}

/* Must v be made? It has readers, and is not concrete. */
static bool is_wanted(const whole_run *w, koila_value v)
{
    return w->uses[v] && !w->t->values[v].real;
}

static PyObject **tensors(uint32_t n) { return PyMem_Calloc((size_t)n + 1, sizeof(PyObject *)); }

/* Room for the tensors of any call. */
static int make_room(whole_run *w)
{
    uint32_t n_in = 0, n_out = 0;
    for (koila_node n = 0; n < w->n_nodes; n++) {
        const koila_sig_info *s = koila_sig_get(koila__table, koila_node_get(w->g, n).sig);
        if (w->needed[n]) {
            n_in = s->n_inputs > n_in ? s->n_inputs : n_in;
            n_out = s->n_outputs > n_out ? s->n_outputs : n_out;
        }
    }
    w->in = tensors(n_in);
    w->held = tensors(n_in);
    w->out = tensors(n_out);
    if (w->in && w->held && w->out)
        return 0;
    PyErr_NoMemory();
    return -1;
}

/* What is needed, from the targets backwards. */
static int find_needed(whole_run *w, const koila_value *targets, uint32_t n_targets)
{
    for (uint32_t i = 0; i < n_targets; i++)
        w->uses[targets[i]]++;
    for (koila_node n = w->n_nodes; n-- > 0;) {
        const koila_node_info node = koila_node_get(w->g, n);
        const koila_sig_info *s = koila_sig_get(koila__table, node.sig);
        for (uint32_t j = 0; j < s->n_outputs; j++)
            w->needed[n] |= is_wanted(w, node.first_output + j);
        if (!w->needed[n])
            continue;
        if (w->may_read && koila_op_flags(koila__table, s->op) & KOILA_OP_RANDOM)
            return raise_read("random numbers. While planning none are drawn. Leave that out of "
                              "the step");
        for (uint32_t i = 0; i < s->n_inputs; i++)
            w->uses[koila_node_inputs(w->g, n)[i]]++;
    }
    for (koila_value v = 0; v < w->n_values; v++) {
        if (!w->uses[v] || !w->t->values[v].real)
            continue;
        if (check_version(w->t, v) < 0 || (w->may_read && check_read(w, v) < 0))
            return -1;
    }
    return make_room(w);
}

/* A random node draws from the state that was recorded; the user's is put back. */
static int call_with_state(const whole_run *w, koila_node n, koila_sig sig)
{
    const tape_random *random = koila__tape_random(w->t, n);
    PyObject *const *in = w->in;
    PyObject **out = w->out;
    if (!random)
        return koila__call(sig, in, &(koila__call_fix){ .device = w->device }, NULL, out);
    PyObject *state = koila__generator_get(random->generator);
    int status = -1;
    if (state && koila__generator_set(random->generator, random->state) == 0)
        status = koila__call(sig, in, NULL, NULL, out);
    if (state) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        const bool is_back = koila__generator_set(random->generator, state) == 0;
        if (type) {
            PyErr_Clear();
            PyErr_Restore(type, value, trace);
        } else if (!is_back)
            status = -1;
    }
    Py_XDECREF(state);
    return status;
}

/* The call of node n; a value never changes, so it writes into copies. */
static int call_node(whole_run *w, koila_node n, const koila_sig_info *s)
{
    const koila_value *inputs = koila_node_inputs(w->g, n);
    PyObject **in = w->in, **held = w->held, *copies[KOILA__MAX_WRITES];
    uint32_t n_copies = 0;
    koila_assert(s->n_writes <= KOILA__MAX_WRITES);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        PyObject *real = w->t->values[inputs[i]].real;
        in[i] = real ? real : w->env[inputs[i]];
        koila_assert(in[i]);
        held[i] = Py_NewRef(in[i]);
    }
    int status = 0;
    while (n_copies < s->n_writes && status == 0) {
        const koila_write *write = &s->writes[n_copies];
        const char *how = write->overwrites ? "empty_like_exactly" : "clone_exactly";
        PyObject *copy = koila__ask(how, in[write->input], NULL, NULL);
        if (copy) {
            in[write->input] = copies[n_copies] = copy;
            n_copies++;
        } else
            status = -1;
    }
    if (status == 0)
        status = call_with_state(w, n, koila_node_get(w->g, n).sig);
    for (uint32_t i = 0; i < n_copies; i++)
        Py_DECREF(copies[i]);
    for (uint32_t i = 0; i < s->n_inputs; i++)
        Py_DECREF(held[i]);
    return status;
}

/* Is each result what was recorded? An opaque operator's are whatever they are. */
static int check_results(koila_node n, const koila_sig_info *s, PyObject *const *out)
{
    if (koila_op_flags(koila__table, s->op) & KOILA_OP_OPAQUE)
        return 0;
    for (uint32_t j = 0; j < s->n_outputs; j++) {
        koila_meta m;
        if (!out[j])
            continue;
        if (koila__meta_of(out[j], &m) < 0)
            return -1;
        if (koila__lie_alike(m, s->outputs[j]))
            continue;
        PyObject *is = koila__meta_object(m);
        PyObject *was = koila__meta_object(s->outputs[j]);
        if (is && was)
            PyErr_Format(PyExc_AssertionError, "node %u %s, result %u: recorded as %R, is %R", n,
                         koila_op_name(koila__table, s->op), j, was, is);
        Py_XDECREF(is);
        Py_XDECREF(was);
        return -1;
    }
    return 0;
}

static int run_node(whole_run *w, koila_node n)
{
    const koila_node_info node = koila_node_get(w->g, n);
    const koila_sig_info *s = koila_sig_get(koila__table, node.sig);
    const koila_value *inputs = koila_node_inputs(w->g, n);
    PyObject **out = w->out;
    if (call_node(w, n, s) < 0)
        return -1;
    const int status = w->device ? 0 : check_results(n, s, out);
    for (uint32_t j = 0; j < s->n_outputs; j++) {
        const koila_value v = node.first_output + j;
        if (status == 0 && out[j] && is_wanted(w, v))
            w->env[v] = out[j];
        else
            Py_XDECREF(out[j]);
    }
    for (uint32_t i = 0; i < s->n_inputs && status == 0; i++) {
        w->uses[inputs[i]]--;
        if (!w->uses[inputs[i]])
            Py_CLEAR(w->env[inputs[i]]);
    }
    return status;
}

static int run_nodes(whole_run *w)
{
    PyObject *guards = koila__ask("enter_modes", NULL, NULL, NULL);
    int status = guards ? 0 : -1;
    for (koila_node n = 0; n < w->n_nodes && status == 0; n++)
        if (w->needed[n])
            status = run_node(w, n);
    Py_XDECREF(guards);
    return status;
}

/* Makes the targets: they are in w->env. *w has a tape. Whatever it returns, end it with
 * whole_deinit(). */
static int whole_make(whole_run *w, const koila_value *targets, uint32_t n_targets)
{
    Py_INCREF(w->t);
    w->g = w->t->graph;
    w->n_nodes = koila_graph_n_nodes(w->g);
    w->n_values = koila_graph_n_values(w->g);
    w->uses = PyMem_Calloc(w->n_values + 1, sizeof *w->uses);
    w->env = tensors(w->n_values);
    w->needed = PyMem_Calloc(w->n_nodes + 1, sizeof *w->needed);
    if (!w->uses || !w->env || !w->needed) {
        PyErr_NoMemory();
        return -1;
    }
    return find_needed(w, targets, n_targets) < 0 ? -1 : run_nodes(w);
}

static void whole_deinit(whole_run *w)
{
    for (koila_value v = 0; w->env && v < w->n_values; v++)
        Py_XDECREF(w->env[v]);
    PyMem_Free(w->uses);
    PyMem_Free(w->env);
    PyMem_Free(w->needed);
    PyMem_Free(w->in);
    PyMem_Free(w->held);
    PyMem_Free(w->out);
    Py_DECREF(w->t);
}

/* Makes the targets, which have tensors from then on. */
static int run_for_good(whole_run *w, const koila_value *targets, uint32_t n_targets)
{
    const int status = whole_make(w, targets, n_targets);
    /* all is computed: the values can be seen from here on */
    for (uint32_t i = 0; i < n_targets && status == 0; i++) {
        PyObject *real = w->env[targets[i]];
        w->env[targets[i]] = NULL;
        if (real)
            koila__tape_set_real(w->t, targets[i], real);
    }
    whole_deinit(w);
    return status;
}

int koila__run_whole(koila__tape *t, const koila_value *targets, uint32_t n_targets)
{
    return run_for_good(&(whole_run){ .t = t }, targets, n_targets);
}

int koila__run_planned(koila__tape *t, const koila_value *targets, uint32_t n_targets)
{
    return run_for_good(&(whole_run){ .t = t, .may_read = READS_WHOLE_NUMBERS }, targets,
                        n_targets);
}

PyObject *koila__run_elsewhere(koila__tape *t, koila_value v, bool is_known, PyObject *device)
{
    whole_run w = { .t = t,
                    .device = device,
                    .may_read = is_known ? READS_ANY : READS_WHOLE_NUMBERS };
    PyObject *r = NULL;
    if (whole_make(&w, &v, 1) == 0)
        r = Py_XNewRef(w.env[v] ? w.env[v] : t->values[v].real);
    whole_deinit(&w);
    return r;
}
