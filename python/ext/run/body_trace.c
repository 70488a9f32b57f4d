/* body_trace.c — how the body of a loop (body.c) becomes a function.
 *
 * koila._compile walks the instructions of the plan once on tensors without memory (body_walk), in
 * a thread of its own, gives what it saw to Inductor, and answers with what comes back (body_is).
 *
 * A loop has no body where a slice is not like the other ones (pieces, calls that depend on where
 * the slice begins, one slice), or where it does what a graph of operators cannot tell: modules
 * that run as they are, ranks, rows that are steps of their own.
 *
 * Random numbers are koila's own in a body too: each call that draws is an operator of the graph,
 * koila::drawn, which Inductor calls as it is, and which draws what the walk would (body.c). Its
 * place in the graph is free, for what it draws depends on no other call: on the state that was
 * recorded for it, and on the rows of the slice.
 */
#include "run/body.h"

#include "capture/record.h"
#include "ground/helpers.h"
#include "ground/real.h"

enum {
    /* runs of one plan before its loops are compiled: with "on", the first run may have taught what
     * the next plan needs; with "auto", the step has repeated */
    RUNS_BEFORE_ON = 2,
    RUNS_BEFORE_AUTO = 4,
};

/* ---- which loops have a body */

static bool is_adapted_alike(const koila_plan *p, koila_node n, int32_t link, int64_t rows)
{
    koila_adapt a[KOILA_MAX_ADAPTS], b[KOILA_MAX_ADAPTS];
    const uint32_t n_a = koila_plan_adapt_at(p, n, link, 0, rows, a);
    if (n_a != koila_plan_adapt_at(p, n, link, rows, rows, b))
        return false;
    for (uint32_t i = 0; i < n_a; i++)
        if (a[i].kind != b[i].kind || a[i].arg != b[i].arg || a[i].n != b[i].n ||
            (a[i].kind == KOILA_ADAPT_INT && a[i].ints[0] != b[i].ints[0]) ||
            memcmp(a[i].ints, b[i].ints, a[i].n * sizeof *a[i].ints) != 0)
            return false;
    return true;
}

static const koila_sig_info *sig_of(const koila_plan *p, koila_node n)
{
    return koila_sig_get(koila__table, koila_node_get(koila_plan_graph(p), n).sig);
}

/* Does the call draw random numbers? */
static bool is_random(const koila_plan *p, koila_node n)
{
    return koila_op_flags(koila__table, sig_of(p, n)->op) & KOILA_OP_RANDOM;
}

/* Can random call n be koila::drawn? It reads no tensor then (Note [Random] in place.h). */
static bool may_be_drawn(const koila_plan *p, koila_node n)
{
    const koila_value v = koila_node_get(koila_plan_graph(p), n).first_output;
    return sig_of(p, n)->n_outputs == 1 && koila_plan_share(p, v).kind == KOILA_SHARE_SLICE;
}

/* Is the call one that a body may have, and the same in each full slice? */
static bool may_compile(const koila_plan *p, koila_node n, int64_t rows)
{
    const koila_sig_info *s = sig_of(p, n);
    if (koila_op_flags(koila__table, s->op) & KOILA_OP_OPAQUE ||
        koila_op_facts(koila__table, s->op) & (KOILA_FACT_OPAQUE_CALL | KOILA_FACT_OFFLOADS))
        return false;
    if (is_random(p, n))
        return may_be_drawn(p, n);
    int32_t n_links = 0;
    for (uint32_t w = 0; w < s->n_writes; w++)
        n_links += (int32_t)s->writes[w].n_links;
    for (int32_t link = -1; link < n_links; link++)
        if (!is_adapted_alike(p, n, link, rows))
            return false;
    return true;
}

static int64_t rows_of(const koila_plan *p, const koila_stage *st)
{
    return koila_plan_axis_rows(p, st->axis);
}

static bool may_have_body(const koila_plan *p, const koila_stage *st)
{
    if (!st->is_loop || st->inner || koila_plan_has_pieces(p, st->axis) ||
        koila_graph_axis_size(koila_plan_graph(p), st->axis) < 2 * rows_of(p, st))
        return false;
    bool runs = false;
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        if (st->instrs[i].kind != KOILA_DO_RUN)
            continue;
        if (!may_compile(p, st->instrs[i].id, rows_of(p, st)))
            return false;
        runs = true;
    }
    return runs;
}

/* The whole values that the loop's calls read: those that no call of the loop makes. */
static int find_wholes(const koila_plan *p, const koila_stage *st, koila__body *b)
{
    const koila_graph *g = koila_plan_graph(p);
    const uint32_t n_values = koila_graph_n_values(g);
    bool *met = PyMem_Calloc(n_values + 1, sizeof *met);
    PyMem_RawFree(b->wholes);
    b->wholes = PyMem_RawMalloc((n_values + 1) * sizeof *b->wholes);
    if (!met || !b->wholes) {
        PyMem_Free(met);
        PyErr_NoMemory();
        return -1;
    }
    b->n_wholes = 0;
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        if (st->instrs[i].kind != KOILA_DO_RUN)
            continue;
        const koila_node n = st->instrs[i].id;
        const koila_sig_info *s = sig_of(p, n);
        const koila_value out = koila_node_get(g, n).first_output;
        for (uint32_t k = 0; k < s->n_inputs && !is_random(p, n); k++) {
            const koila_value v = koila_node_inputs(g, n)[k];
            if (met[v] || koila_plan_need(p, n, k).kind != KOILA_SHARE_WHOLE)
                continue;
            met[v] = true;
            b->wholes[b->n_wholes++] = v;
        }
        for (uint32_t k = 0; k < s->n_outputs; k++)
            met[out + k] = true;
    }
    PyMem_Free(met);
    return 0;
}

/* ---- a body is walked */

/* What koila._compile has of a loop. */
typedef struct asked {
    cached *c;
    uint32_t stage;
    bool is_answered;
} asked;

static const char asked_name[] = "koila body";

/* function: NULL: there is none. Only the first answer counts. */
static void answer(asked *a, PyObject *function)
{
    if (a->is_answered)
        return;
    a->is_answered = true;
    a->c->bodies->n_awaited--;
    Py_XSETREF(a->c->bodies->at[a->stage].function, Py_XNewRef(function));
}

static void asked_free(PyObject *capsule)
{
    asked *a = PyCapsule_GetPointer(capsule, asked_name);
    answer(a, NULL); /* a fork has left it behind */
    koila__cached_release(a->c);
    PyMem_RawFree(a);
}

static PyObject *asked_new(cached *c, uint32_t stage)
{
    asked *a = PyMem_RawMalloc(sizeof *a);
    PyObject *capsule = NULL;
    if (!a) {
        PyErr_NoMemory();
        return NULL;
    }
    *a = (asked){ .c = c, .stage = stage };
    capsule = PyCapsule_New(a, asked_name, asked_free);
    if (capsule) {
        c->refs++;
        c->bodies->n_awaited++;
    } else
        PyMem_RawFree(a);
    return capsule;
}

/* A run of the first full slice of a loop, by itself. */
static int walk_init(exec *x, const asked *a)
{
    const koila_stage *st = koila_plan_stage(a->c->plan, a->stage);
    *x = (exec){ .c = a->c,
                 .plan = a->c->plan,
                 .g = koila_plan_graph(a->c->plan),
                 .table = koila__table,
                 .end = rows_of(a->c->plan, st),
                 .batch = koila_graph_axis_size(koila_plan_graph(a->c->plan), st->axis) };
    return koila__exec_init(x);
}

/* A tensor like whole value v, as it was recorded. */
static PyObject *like_recorded(const exec *x, koila_value v)
{
    PyObject *f = koila__helper("empty_like_meta");
    PyObject *meta = f ? koila__meta_object(koila_value_get(x->g, v).meta) : NULL;
    PyObject *t = meta ? PyObject_CallOneArg(f, meta) : NULL;
    Py_XDECREF(f);
    Py_XDECREF(meta);
    return t;
}

/* A tensor like the rows of v that a slice fetches or draws. */
static PyObject *like_rows(const exec *x, koila_value v)
{
    const koila_share s = koila_plan_share(x->plan, v);
    return koila__torch_empty(koila__exec_meta(x, v), (int32_t)s.dim,
                              s.outer * s.inner * koila__exec_n_rows(x));
}

static PyObject *like_slice(exec *x, const koila_instr *in)
{
    PyObject *whole = like_recorded(x, in->id), *slice = NULL;
    if (whole) {
        Py_XSETREF(x->whole[in->id], whole);
        slice = koila__exec_slice(x, in->id, koila_plan_need(x->plan, in->user, in->steal));
    }
    return slice;
}

static int add_inputs(exec *x, const koila_stage *st, const koila__body *b, PyObject *list)
{
    for (uint32_t i = 0; i < b->n_wholes; i++)
        if (koila__body_append(list, like_recorded(x, b->wholes[i])) < 0)
            return -1;
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind == KOILA_DO_SLICE && koila__body_append(list, like_slice(x, in)) < 0)
            return -1;
        if (in->kind == KOILA_DO_FETCH && koila__body_append(list, like_rows(x, in->id)) < 0)
            return -1;
    }
    for (uint32_t i = 0; i < st->n_instrs; i++)
        if (koila__body_is_sum(x->plan, &st->instrs[i]) &&
            koila__body_append(list, koila__body_new_sum(x, st->instrs[i].id)) < 0)
            return -1;
    return 0;
}

static PyObject *py_body_inputs(PyObject *self, PyObject *capsule)
{
    (void)self;
    const asked *a = PyCapsule_GetPointer(capsule, asked_name);
    PyObject *list = a ? PyList_New(0) : NULL;
    PyObject *guard = list ? PyObject_CallNoArgs(koila__torch.guards) : NULL;
    exec x = { 0 };
    if (!guard || walk_init(&x, a) < 0 ||
        add_inputs(&x, koila_plan_stage(a->c->plan, a->stage), &a->c->bodies->at[a->stage], list) <
            0)
        Py_CLEAR(list);
    if (guard)
        koila__exec_free(&x);
    Py_XDECREF(guard);
    return list;
}

/* Result v as it is now: it may be written later. */
static PyObject *as_now(const exec *x, const koila_instr *in)
{
    PyObject *t = x->local[in->id];
    if (!t) {
        PyErr_SetString(PyExc_SystemError, "koila: a result of a body was not made");
        return NULL;
    }
    return PyObject_CallFunctionObjArgs(koila__torch.clone, t, NULL);
}

/* A random call becomes an operator that will draw. */
static int walk_random(exec *x, koila_node n)
{
    const koila_value v = koila_node_get(x->g, n).first_output;
    PyObject *like = like_rows(x, v);
    PyObject *module = like ? PyImport_ImportModule("koila._compile") : NULL;
    if (module)
        x->local[v] = PyObject_CallMethod(module, "drawn_like", "IO", (unsigned)n, like);
    Py_XDECREF(module);
    Py_XDECREF(like);
    return x->local[v] ? 0 : -1;
}

/* A sum is a tensor of its own: the compiler sees what may be written over. */
static int walk_call(exec *x, koila_instr in)
{
    if (!koila_sig_get(x->table, koila_node_get(x->g, in.id).sig)->n_writes)
        in.steal = 0;
    return koila__exec_node(x, &in, true);
}

static int walk_instr(exec *x, const koila_instr *in, PyObject *inputs, Py_ssize_t *at,
                      Py_ssize_t *sum, PyObject *results)
{
    PyObject *done;
    switch ((koila_instr_kind)in->kind) {
    case KOILA_DO_RUN:
        return is_random(x->plan, in->id) ? walk_random(x, in->id) : walk_call(x, *in);
    case KOILA_DO_SLICE:
    case KOILA_DO_FETCH:
        Py_XSETREF(x->local[in->id], koila__body_next(inputs, at));
        return x->local[in->id] ? 0 : -1;
    case KOILA_DO_ADD:
        if (koila__body_is_sum(x->plan, in)) {
            done = PyObject_CallFunctionObjArgs(koila__torch.add_, PyList_GET_ITEM(inputs, *sum),
                                                x->local[in->id], NULL);
            ++*sum;
            Py_XDECREF(done);
            return done ? 0 : -1;
        }
        return koila__body_append(results, as_now(x, in));
    case KOILA_DO_KEEP:
    case KOILA_DO_PUT:
        return koila__body_append(results, as_now(x, in));
    case KOILA_DO_FREE:
        Py_CLEAR(x->local[in->id]);
        return 0;
    case KOILA_DO_INNER:
        break;
    }
    PyErr_SetString(PyExc_SystemError, "koila: this loop has no body");
    return -1;
}

static int walk(exec *x, const asked *a, PyObject *inputs, PyObject *results)
{
    const koila_stage *st = koila_plan_stage(a->c->plan, a->stage);
    const koila__body *b = &a->c->bodies->at[a->stage];
    Py_ssize_t at = 0, n_sums = 0;
    for (uint32_t i = 0; i < st->n_instrs; i++)
        n_sums += koila__body_is_sum(x->plan, &st->instrs[i]);
    Py_ssize_t sum = PyList_GET_SIZE(inputs) - n_sums;
    for (uint32_t i = 0; i < b->n_wholes; i++)
        if (!(x->whole[b->wholes[i]] = koila__body_next(inputs, &at)))
            return -1;
    for (uint32_t i = 0; i < st->n_instrs; i++)
        if (walk_instr(x, &st->instrs[i], inputs, &at, &sum, results) < 0)
            return -1;
    return 0;
}

static PyObject *py_body_walk(PyObject *self, PyObject *args)
{
    PyObject *capsule, *inputs;
    exec x = { 0 };
    (void)self;
    if (!PyArg_ParseTuple(args, "OO!:body_walk", &capsule, &PyList_Type, &inputs))
        return NULL;
    const asked *a = PyCapsule_GetPointer(capsule, asked_name);
    PyObject *results = a ? PyList_New(0) : NULL;
    PyObject *guard = results ? PyObject_CallNoArgs(koila__torch.guards) : NULL;
    if (!guard || walk_init(&x, a) < 0 || walk(&x, a, inputs, results) < 0)
        Py_CLEAR(results);
    if (guard)
        koila__exec_free(&x);
    Py_XDECREF(guard);
    return results;
}

static PyObject *py_body_is(PyObject *self, PyObject *args)
{
    PyObject *capsule, *function;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO:body_is", &capsule, &function))
        return NULL;
    asked *a = PyCapsule_GetPointer(capsule, asked_name);
    if (!a)
        return NULL;
    answer(a, function == Py_None ? NULL : function);
    Py_RETURN_NONE;
}

static PyObject *py_body_draw(PyObject *self, PyObject *node)
{
    (void)self;
    const unsigned long n = PyLong_AsUnsignedLong(node);
    return PyErr_Occurred() ? NULL : koila__body_draw((koila_node)n);
}

/* ---- when it is asked for */

/* New: a list of what koila._compile needs of the loops that may be compiled. */
static PyObject *all_asked(cached *c)
{
    PyObject *list = PyList_New(0);
    for (uint32_t k = 0; list && k < c->info.n_stages; k++) {
        const koila_stage *st = koila_plan_stage(c->plan, k);
        if (!may_have_body(c->plan, st))
            continue;
        const bool is_found = find_wholes(c->plan, st, &c->bodies->at[k]) == 0;
        if (koila__body_append(list, is_found ? asked_new(c, k) : NULL) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* 1: they will be compiled; 0: something else is just now; -1 with an exception. */
static int ask_for(cached *c)
{
    PyObject *list = all_asked(c);
    PyObject *module = list ? PyImport_ImportModule("koila._compile") : NULL;
    PyObject *begun = module ? PyObject_CallMethod(module, "ask", "O", list) : NULL;
    const int status = begun ? begun == Py_True : -1;
    Py_XDECREF(begun);
    Py_XDECREF(module);
    Py_XDECREF(list);
    return status;
}

bool koila__bodies_ran(cached *c, bool is_sharded)
{
    const int mode = koila__body_mode(c);
    if (mode == KOILA__COMPILE_OFF || is_sharded || c->info.n_slices < 2)
        return true;
    if (!c->bodies)
        c->bodies = PyMem_RawCalloc(1, sizeof *c->bodies + c->info.n_stages * sizeof(koila__body));
    if (!c->bodies)
        return true;
    koila__bodies_judge(c);
    if (c->bodies->is_asked)
        return !c->bodies->n_awaited;
    c->bodies->n_runs++;
    if (c->bodies->n_runs < (mode == KOILA__COMPILE_ON ? RUNS_BEFORE_ON : RUNS_BEFORE_AUTO))
        return false;
    const int begun = ask_for(c);
    if (begun < 0)
        PyErr_WriteUnraisable(NULL);
    c->bodies->is_asked = begun != 0;
    return false;
}

static PyMethodDef methods[] = {
    { "body_inputs", py_body_inputs, METH_O, "body_inputs(body): tensors like its inputs." },
    { "body_walk", py_body_walk, METH_VARARGS,
      "body_walk(body, inputs): what one slice does; its results." },
    { "body_is", py_body_is, METH_VARARGS,
      "body_is(body, function): full slices call function(inputs) from now on. None: there is "
      "none." },
    { "body_draw", py_body_draw, METH_O,
      "body_draw(node): what that call of the plan draws for the slice whose body this thread "
      "runs." },
    { NULL, NULL, 0, NULL },
};

int koila__body_module_add(PyObject *m) { return PyModule_AddFunctions(m, methods); }
