/* run_module.c — the executor as functions of koila._core: settings, running, explaining, saving,
 * predicting. */
#include "capture/executor.h"
#include "run/run.h"

static PyObject *py_held_fits(PyObject *self, PyObject *call)
{
    (void)self;
    const char *text = PyUnicode_AsUTF8(call);
    if (!text || koila__held_fits(text) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_reads_fit(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    koila__reads_fit();
    Py_RETURN_NONE;
}

static PyObject *py_n_plans(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    return PyLong_FromUnsignedLongLong(koila__n_past());
}

/* `make` (koila__step_dict, koila__step_facts) of `told`, or None for NULL. It is held: while the
 * dict is made the collector may run, and with it a step that pushes it out of the past. */
static PyObject *made_of(const koila__step *told, PyObject *(*make)(const koila__step *))
{
    if (!told)
        return Py_NewRef(Py_None);
    koila__step step = *told;
    step.c->refs++;
    Py_XINCREF(step.early);
    PyObject *d = make(&step);
    koila__cached_release(step.c);
    Py_XDECREF(step.early);
    return d;
}

static PyObject *dict_of(const koila__step *told) { return made_of(told, koila__step_dict); }

/* The number of the newest run of a backward; 0: there is none. */
static PyObject *py_last_backward(PyObject *self, PyObject *ignored)
{
    const koila__step *step = koila__past_backward();
    (void)self;
    (void)ignored;
    return PyLong_FromUnsignedLongLong(step ? step->number : 0);
}

/* Run `number` as a dict, or None: it is not remembered. */
static PyObject *numbered(PyObject *number, PyObject *(*make)(const koila__step *))
{
    const unsigned long long n = PyLong_AsUnsignedLongLong(number);
    return PyErr_Occurred() ? NULL : made_of(koila__step_numbered(n), make);
}

static PyObject *py_plan_numbered(PyObject *self, PyObject *number)
{
    (void)self;
    return numbered(number, koila__step_dict);
}

static PyObject *py_step_facts(PyObject *self, PyObject *number)
{
    (void)self;
    return numbered(number, koila__step_facts);
}

/* None: nobody. */
static PyObject *function_or_null(PyObject *function)
{
    return function == Py_None ? NULL : function;
}

static PyObject *py_tell_to(PyObject *self, PyObject *args)
{
    PyObject *function, *levels = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "O|O:tell_to", &function, &levels))
        return NULL;
    koila__tell_to(function_or_null(function), levels);
    Py_RETURN_NONE;
}

static PyObject *py_progress_after(PyObject *self, PyObject *seconds)
{
    const double s = PyFloat_AsDouble(seconds);
    (void)self;
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(koila__progress_after(s));
}

static PyObject *py_progress_to(PyObject *self, PyObject *function)
{
    (void)self;
    koila__progress_to(function_or_null(function));
    Py_RETURN_NONE;
}

static PyObject *py_last_plan(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    return dict_of(koila__last_step());
}

/* plans(most): the dicts of at most so many last runs and plans, the newest last. */
static PyObject *py_plans(PyObject *self, PyObject *most)
{
    (void)self;
    uint64_t numbers[KOILA__MOST_PAST];
    uint32_t n = 0;
    const unsigned long wanted = PyLong_AsUnsignedLong(most);
    PyObject *list = PyErr_Occurred() ? NULL : PyList_New(0);
    for (const koila__step *step; n < wanted && (step = koila__past_step(n)); n++)
        numbers[n] = step->number;
    while (list && n-- > 0) {
        const koila__step *step = koila__past_numbered(numbers[n]);
        if (!step)
            continue;
        PyObject *d = dict_of(step);
        if (!d || PyList_Append(list, d) < 0)
            Py_CLEAR(list);
        Py_XDECREF(d);
    }
    return list;
}

/* The tape of the first lazy tensor in a list, and the values of all that are not concrete. */
static koila__tape *values_of_list(PyObject *list, koila_value **values, uint32_t *n)
{
    PyObject *fast = PySequence_Fast(list, "expected a list of lazy tensors");
    if (!fast)
        return NULL;
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    koila__tape *t = NULL;
    *n = 0;
    *values = PyMem_Malloc(((size_t)size + 1) * sizeof **values);
    for (Py_ssize_t i = 0; *values && i < size; i++) {
        PyObject *o = PySequence_Fast_GET_ITEM(fast, i);
        koila__handle *h = koila__is_lazy(o) ? koila__handle_of(o) : NULL;
        if (!h)
            continue;
        if (t && h->group->tape != t) {
            /* of another step: made on its own */
            if (!koila__concrete(h))
                goto fail;
            continue;
        }
        const koila_value v = koila__value_of(h);
        if (v == KOILA_NONE)
            goto fail;
        t = h->group->tape;
        if (!t->values[v].real)
            (*values)[(*n)++] = v;
    }
    Py_DECREF(fast);
    if (!t)
        PyErr_SetString(PyExc_ValueError, "no lazy tensor among the values");
    return t;
fail:
    Py_DECREF(fast);
    PyMem_Free(*values);
    *values = NULL;
    return NULL;
}

/* A backward makes values[n] concrete in one run, and what else the user holds. */
static int run_backward(koila__tape *t, const koila_value *values, uint32_t n, bool commit)
{
    enum { FEW_HELD = 64 };
    koila_value few[FEW_HELD], *held = few;
    uint32_t cap = FEW_HELD, n_held = koila__tape_held(t, values, n, held, cap);
    if (n_held > cap) {
        cap = n_held;
        held = PyMem_Malloc(cap * sizeof *held);
        if (!held) {
            PyErr_NoMemory();
            return -1;
        }
        n_held = koila__tape_held(t, values, n, held, cap);
    }
    const koila__wanted w = { .wanted = values,
                              .n_wanted = n,
                              .held = held,
                              .n_held = n_held < cap ? n_held : cap,
                              .effects = commit,
                              .later = true,
                              .asked_by = KOILA__ASKED_BY_BACKWARD };
    const int status = koila__request(t, &w);
    if (held != few)
        PyMem_Free(held);
    return status;
}

/* run_all(lazies, commit) -> their tape: a backward makes all of them concrete in one run, and what
 * else the user holds; commit: the effects follow with finish_step(). */
static PyObject *py_run_all(PyObject *self, PyObject *args)
{
    PyObject *list;
    int commit;
    koila_value *values = NULL;
    uint32_t n;
    (void)self;
    if (!PyArg_ParseTuple(args, "Op:run_all", &list, &commit))
        return NULL;
    koila__tape *t = values_of_list(list, &values, &n);
    if (!t)
        return NULL;
    Py_INCREF(t);
    const int status = run_backward(t, values, n, commit);
    PyMem_Free(values);
    if (status < 0)
        Py_CLEAR(t);
    return (PyObject *)t;
}

/* The plain tensors of gradients that were run, which the tape releases: nobody else can ask for
 * them. -1 + error */
static int take_known(const koila__known_gradients *g, PyObject *out)
{
    koila__tape *t = g->tape;
    for (uint32_t i = 0; i < g->n; i++) {
        PyObject *real = t->values[g->value[2 * i]].real;
        if (!real) {
            PyErr_SetString(PyExc_SystemError, "koila: a gradient was not made");
            return -1;
        }
        PyList_SET_ITEM(out, i, Py_NewRef(real));
    }
    for (uint32_t i = 0; i < 2 * g->n; i++)
        if (!t->values[g->value[i]].n_handles)
            Py_CLEAR(t->values[g->value[i]].real);
    return 0;
}

/* run_known(KnownGradients, commit) -> (their tape, [plain gradient, ...]): as run_all() and
 * take_all() of the lazy tensors that nobody has made for them. */
static PyObject *py_run_known(PyObject *self, PyObject *args)
{
    koila__known_gradients *g;
    int commit;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!p:run_known", &koila__known_gradients_type, &g, &commit))
        return NULL;
    koila_value *values = PyMem_Malloc((g->n + 1) * sizeof *values);
    PyObject *out = PyList_New(g->n);
    PyObject *r = values && out ? PyTuple_Pack(2, (PyObject *)g->tape, out) : NULL;
    if (!values)
        PyErr_NoMemory();
    for (uint32_t i = 0; i < g->n && r; i++)
        values[i] = g->value[2 * i];
    if (r && (run_backward(g->tape, values, g->n, commit) < 0 || take_known(g, out) < 0))
        Py_CLEAR(r);
    Py_XDECREF(out);
    PyMem_Free(values);
    return r;
}

/* finish_step(tape, done): after run_all(..., commit). done: its results were handed over, so the
 * effects happen and the tape closes. Otherwise the effects do not happen. */
static PyObject *py_finish_step(PyObject *self, PyObject *args)
{
    koila__tape *t;
    int done;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!p:finish_step", &koila__tape_type, &t, &done))
        return NULL;
    t->failed = !done;
    t->refused_at = done ? 0 : koila_graph_n_nodes(t->graph) + 1;
    if (koila__is_planning())
        done = 0;
    if (done) {
        if (koila__commit_effects(t) < 0)
            return NULL;
        Py_INCREF(t);
        koila__tape_close(t);
        koila__tape_let_go(t);
        Py_DECREF(t);
    }
    Py_RETURN_NONE;
}

/* take_all(lazies) -> list of plain tensors; empties `lazies`. The tape then releases each concrete
 * value that nobody else can ask for, so that the caller may be the only owner of its storage
 * (AccumulateGrad takes a gradient without a copy only then). This is decided after the wrappers
 * are gone, because the wrapper of a view keeps that of its base alive. */
typedef struct taken {
    koila__tape *tape;   /* owned */
    koila__group *group; /* counted; NULL: not lazy */
    koila_value value;
} taken;

static int plain_values_of(PyObject *lazies, PyObject *out)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(out); i++) {
        PyObject *o = PyList_GET_ITEM(lazies, i);
        koila__handle *h = koila__is_lazy(o) ? koila__handle_of(o) : NULL;
        PyObject *real = h ? koila__concrete(h) : o;
        if (!real)
            return -1;
        PyList_SET_ITEM(out, i, Py_NewRef(real));
    }
    return 0;
}

static void hold_groups(PyObject *lazies, taken *all, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *o = PyList_GET_ITEM(lazies, i);
        koila__handle *h = koila__is_lazy(o) ? koila__handle_of(o) : NULL;
        if (!h || h->value == KOILA_NONE)
            continue;
        all[i] = (taken){ h->group->tape, h->group, h->value };
        Py_INCREF(h->group->tape);
        h->group->refs++;
    }
}

/* Releases from the tape what only this call can still ask for. */
static void let_go(const taken *all, Py_ssize_t i, Py_ssize_t n)
{
    koila__tape *t = all[i].tape;
    koila__group *g = all[i].group;
    uint32_t ours = 0;
    for (Py_ssize_t j = i; j < n; j++)
        ours += all[j].group == g;
    koila_assert(g->refs >= ours);
    if (g->refs == ours) {
        const koila_value shown[] = { all[i].value, g->cur };
        for (size_t k = 0; k < 2; k++)
            if (koila_value_get(t->graph, shown[k]).node != KOILA_NONE)
                Py_CLEAR(t->values[shown[k]].real);
    }
    g->refs--;
    if (!g->refs)
        koila__group_free(g);
    Py_DECREF(t);
}

static PyObject *py_take_all(PyObject *self, PyObject *lazies)
{
    (void)self;
    if (!PyList_CheckExact(lazies)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of lazy tensors");
        return NULL;
    }
    const Py_ssize_t n = PyList_GET_SIZE(lazies);
    PyObject *out = PyList_New(n);
    taken *all = PyMem_Calloc((size_t)n + 1, sizeof *all);
    if (out && !all)
        PyErr_NoMemory();
    if (!out || !all || plain_values_of(lazies, out) < 0) {
        PyMem_Free(all);
        Py_XDECREF(out);
        return NULL;
    }
    hold_groups(lazies, all, n);
    if (PyList_SetSlice(lazies, 0, n, NULL) < 0)
        PyErr_Clear();
    for (Py_ssize_t i = 0; i < n; i++)
        if (all[i].group)
            let_go(all, i, n);
    PyMem_Free(all);
    return out;
}

/* cut_of(lazy) -> (kind, dim, made, here): how slices of the batch cut this value. "slice": along
 * `dim`; "whole": it depends on the batch and is one value for all slices (a sum, a gathered
 * value); "plain": it does not depend on the batch, or is concrete and its step is over; "": not
 * known. `made`: the line that made it, "" for an argument of lazy(); `here`: the user's line
 * now. */
static PyObject *py_cut_of(PyObject *self, PyObject *lazy)
{
    (void)self;
    if (!koila__is_lazy(lazy) || !koila__handle_of(lazy)) {
        PyErr_SetString(PyExc_TypeError, "cut_of() takes a lazy tensor");
        return NULL;
    }
    koila__handle *h = koila__handle_of(lazy);
    const koila_value v = koila__value_of(h);
    if (v == KOILA_NONE)
        return NULL;
    koila__tape *t = h->group->tape;
    const koila_value_info info = koila_value_get(t->graph, v);
    char made[300] = "", here[300] = "";
    koila__line_text(t->graph, koila__line_now(t), here, sizeof here);
    if (info.node == KOILA_NONE)
        return Py_BuildValue("sIss", info.leaf_kind == KOILA_LEAF_BATCH ? "slice" : "plain",
                             (unsigned)info.dim, made, here);
    koila__line_text(t->graph, koila_node_get(t->graph, info.node).line, made, sizeof made);
    if (t->values[v].real && t->closed)
        return Py_BuildValue("sIss", "plain", 0u, made, here);

    koila_graph *part = NULL; /* as recorded: values that are concrete by now are recomputed */
    const uint32_t n_values = koila_graph_n_values(t->graph);
    koila_value *value_of = PyMem_Calloc(n_values + 1, sizeof *value_of);
    koila_value *leaf_from = PyMem_Malloc((n_values + 1) * sizeof *leaf_from);
    koila_node *node_from = PyMem_Malloc((koila_graph_n_nodes(t->graph) + 1) * sizeof *node_from);
    koila_plan *plan = NULL;
    const koila_plan_options o = { .struct_size = sizeof o, .budget_bytes = UINT64_MAX, .rows = 1 };
    koila_error err = KOILA_ERROR_INIT;
    const char *kind = "";
    unsigned dim = 0;
    if (value_of && leaf_from && node_from &&
        koila_graph_extract(t->graph, &v, 1, NULL, NULL, NULL, &part, value_of, leaf_from,
                            node_from) == KOILA_OK) {
        const koila_value target = value_of[v] - 1;
        bool batched = false, many = false;
        for (koila_value i = 0; i < koila_graph_n_values(part); i++) {
            const koila_value_info leaf = koila_value_get(part, i);
            if (leaf.node != KOILA_NONE || leaf.leaf_kind != KOILA_LEAF_BATCH)
                continue;
            batched = true;
            many |= koila_graph_axis_size(part, leaf.axis) > 1;
        }
        if (!batched)
            kind = "plain";
        else if (many && koila_plan_new(part, &target, 1, &o, NULL, &plan, &err) == KOILA_OK) {
            const koila_share share = koila_plan_share(plan, koila_plan_target(plan, 0));
            kind = share.kind == KOILA_SHARE_SLICE ? "slice" : "whole";
            dim = share.dim;
        }
    }
    koila_plan_free(plan);
    koila_graph_free(part);
    PyMem_Free(value_of);
    PyMem_Free(leaf_from);
    PyMem_Free(node_from);
    return Py_BuildValue("sIss", kind, dim, made, here);
}

/* `op` is about to read the values of `lazy`. If that is sliced, this enters the gather into the
 * plan of its step and returns 1; else 0, or -1 with an exception. */
static int note_gather(PyObject *lazy, koila__handle *h, const char *op)
{
    const char *kind, *made, *here;
    unsigned dim;
    koila__tape *t = h->group->tape;
    const koila_value v = koila__value_of(h);
    if (v == KOILA_NONE)
        return -1;
    const koila_meta_info *m = koila_meta_get(koila__table, koila_value_get(t->graph, v).meta);
    if (m->n_elements <= 1)
        return 0; /* every program calls item() on a loss */
    PyObject *cut = py_cut_of(NULL, lazy);
    PyObject *entry = NULL;
    int status = cut && PyArg_ParseTuple(cut, "sIss", &kind, &dim, &made, &here) ? 0 : -1;
    if (status == 0 && !strcmp(kind, "slice")) {
        entry = Py_BuildValue("(ssNKs)", op, koila_dtype_text(m->dtype), koila__shape_of(m),
                              (unsigned long long)m->n_bytes, here);
        if (!t->early)
            t->early = PyList_New(0);
        status = entry && t->early && PyList_Append(t->early, entry) == 0 ? 1 : -1;
    }
    Py_XDECREF(entry);
    Py_XDECREF(cut);
    return status;
}

/* gather([lazy, ...], operator): an operator needs these values while its step is recorded, so they
 * become concrete in one run. Sliced ones are gathered: the step's plan reports that, and strict()
 * refuses to run. */
static PyObject *py_gather(PyObject *self, PyObject *args)
{
    PyObject *list;
    const char *op;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!s:gather", &PyList_Type, &list, &op))
        return NULL;
    koila__context *c = koila__context_now();
    if (!c)
        return NULL;
    const char *before = c->gathers_for;
    const Py_ssize_t n = PyList_GET_SIZE(list);
    koila__handle **h = PyMem_Calloc((size_t)n + 1, sizeof *h);
    bool *noted = PyMem_Calloc((size_t)n + 1, sizeof *noted);
    int status = h && noted ? 0 : -1;
    if (status < 0)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n && status >= 0; i++) {
        PyObject *lazy = PyList_GET_ITEM(list, i);
        if (!koila__is_lazy(lazy) || !(h[i] = koila__handle_of(lazy))) {
            PyErr_SetString(PyExc_TypeError, "gather() takes lazy tensors");
            status = -1;
        } else if ((status = note_gather(lazy, h[i], op)) > 0)
            noted[i] = true;
    }
    if (status >= 0) {
        c->gathers_for = op;
        status = koila__concrete_many(h, (uint32_t)n);
        c->gathers_for = before;
    }
    if (status < 0 && noted) {
        /* it does not run: take the entries back */
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        for (Py_ssize_t i = n; i-- > 0;) {
            PyObject *early = noted[i] ? h[i]->group->tape->early : NULL;
            const Py_ssize_t end = early ? PyList_GET_SIZE(early) : 0;
            if (end && PyList_SetSlice(early, end - 1, end, NULL) < 0)
                PyErr_Clear();
        }
        PyErr_Restore(type, value, trace);
    }
    PyMem_Free(h);
    PyMem_Free(noted);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

/* swap_open(tape | None) -> the tape that lazy() joined until now, or None. koila.plan() uses it to
 * record next to an open step and not into it. */
static PyObject *py_swap_open(PyObject *self, PyObject *tape)
{
    (void)self;
    if (tape != Py_None && !Py_IS_TYPE(tape, &koila__tape_type)) {
        PyErr_SetString(PyExc_TypeError, "swap_open() takes a tape or None");
        return NULL;
    }
    koila__context *c = koila__context_now();
    koila__tape *now = tape == Py_None ? NULL : (koila__tape *)tape;
    if (!c)
        return NULL;
    PyObject *before = Py_NewRef(c->open ? c->open : Py_None);
    koila__tape_set_open(c, now && !now->closed && now->context == c ? now : NULL);
    return before;
}

static PyObject *py_explain(PyObject *self, PyObject *list)
{
    koila_value *values = NULL;
    uint32_t n;
    (void)self;
    if (koila__torch_setup() < 0)
        return NULL;
    koila__tape *t = values_of_list(list, &values, &n);
    koila__part part = { 0 };
    koila__room room;
    PyObject *d = NULL;
    if (t && koila__part_make(t, values, n, true, &part) == 0 &&
        koila__room_for(part.graph, KOILA__NEEDS_MUCH, &room) == 0) {
        koila_error err = KOILA_ERROR_INIT;
        koila_status status = KOILA_OK;
        const koila__step step = {
            .c = koila__plan_for(koila__part_give(&part), part.targets, n, &room,
                                 koila__cutting_now(&room), &err, &status),
            .early = t->early,
            .base_bytes = room.gpu >= 0 ? room.held : koila__cpu_bytes_current(),
            .budget_bytes = room.limit,
        };
        if (step.c)
            d = koila__step_dict(&step);
        else
            koila__raise_no_fit(status, &err, "explain");
        koila__cached_release(step.c);
    }
    koila__part_free(&part);
    PyMem_Free(values);
    return d;
}

static PyObject *py_save_graph(PyObject *self, PyObject *args)
{
    PyObject *list;
    const char *path;
    (void)self;
    if (!PyArg_ParseTuple(args, "Os:save_graph", &list, &path))
        return NULL;
    int status = -1;
    if (PyLong_Check(list)) {
        const koila__step *step = koila__step_numbered(PyLong_AsUnsignedLongLong(list));
        if (!step)
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
        status = koila__save_graph(step->c->part, path);
    } else {
        koila_value *values = NULL;
        uint32_t n;
        koila__part part = { 0 };
        koila__tape *t = values_of_list(list, &values, &n);
        if (t && koila__part_make(t, values, n, false, &part) == 0)
            status = koila__save_graph(part.graph, path);
        koila__part_free(&part);
        PyMem_Free(values);
    }
    return status < 0 ? NULL : Py_NewRef(Py_True);
}

static PyObject *py_is_recording(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    return PyBool_FromLong(koila__n_handles != 0);
}

/* The prediction of a planned step, and the step's dict with the plan that was predicted. */
static PyObject *predicted(const koila__step *planned, const char *device, uint64_t memory,
                           int64_t rows, const koila__training *with)
{
    koila__step step = *planned;
    cached *of = step.c, *c = NULL;
    PyObject *found = NULL, *raw = NULL;
    of->refs++; /* the collector may run, and with it another step */
    Py_XINCREF(step.early);
    PyObject *d = koila__predict_graph(of->part, device, memory, rows, with, &c);
    if (d) {
        koila__past_predicted(step.number, c);
        step.c = c;
        raw = koila__step_dict(&step);
    }
    if (raw)
        found = PyTuple_Pack(2, d, raw);
    Py_XDECREF(raw);
    Py_XDECREF(d);
    koila__cached_release(c);
    koila__cached_release(of);
    Py_XDECREF(step.early);
    return found;
}

/* predict(number, device, *, ...): predicts planned step `number` on a device profile (a name, or
 * JSON text). The keywords are the fields of koila_predict_opts in words. rows None: the most that
 * fit. */
static PyObject *py_predict(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = { "number",
                             "device",
                             "memory",
                             "rows",
                             "optimizer",
                             "way",
                             "sdpa",
                             "weight_decay",
                             "amsgrad",
                             "clip_grad_norm",
                             "ddp",
                             "autocast",
                             "grad_scaler",
                             "cublas_workspace",
                             "cublaslt_workspace",
                             "keeps_cublas",
                             "cudnn_sdpa_last",
                             "conf",
                             "strict_conf",
                             "torch_version",
                             NULL };
    const char *device;
    PyObject *rows_or_none = Py_None;
    unsigned long long number, memory = 0;
    koila__training with = { .optimizer = "none", .way = "foreach", .sdpa = "auto" };
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(
            args, kw, "Ks|$KOsssppppppzzppzpz:predict", names, &number, &device, &memory,
            &rows_or_none, &with.optimizer, &with.way, &with.sdpa, &with.weight_decay,
            &with.amsgrad, &with.clip_grad_norm, &with.ddp, &with.autocast, &with.grad_scaler,
            &with.cublas_workspace, &with.cublaslt_workspace, &with.keeps_cublas,
            &with.cudnn_sdpa_last, &with.conf, &with.strict_conf, &with.torch_version))
        return NULL;
    const int64_t rows =
        rows_or_none == Py_None ? KOILA_ROWS_AUTO : PyLong_AsLongLong(rows_or_none);
    if (PyErr_Occurred())
        return NULL;
    const koila__step *planned = koila__past_numbered(number);
    if (planned && planned->asked_by == KOILA__ASKED_BY_PLAN)
        return predicted(planned, device, memory, rows, &with);
    PyErr_SetString(PyExc_ValueError, "no step was planned");
    return NULL;
}

static PyObject *py_device_names(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    return koila__device_names();
}

static PyObject *py_instead_of(PyObject *self, PyObject *op)
{
    const char *name = PyUnicode_AsUTF8(op);
    (void)self;
    return name ? PyUnicode_FromString(koila__instead_of(name)) : NULL;
}

static PyObject *py_device_field(PyObject *self, PyObject *args)
{
    const char *device, *key;
    (void)self;
    return PyArg_ParseTuple(args, "ss:device_field", &device, &key)
               ? koila__device_field(device, key)
               : NULL;
}

static PyObject *py_register_rule(PyObject *self, PyObject *args)
{
    const char *op, *rule;
    koila_error err = KOILA_ERROR_INIT;
    (void)self;
    if (!PyArg_ParseTuple(args, "ss:register_rule", &op, &rule))
        return NULL;
    const koila_status status = koila_table_rule(koila__table, op, rule, &err);
    if (status == KOILA_BAD_INPUT) {
        PyErr_SetString(PyExc_ValueError, err.text);
        return NULL;
    }
    if (status != KOILA_OK)
        return koila__raise(status);
    koila__plan_cache_clear(); /* the cached plans were made without this rule */
    koila__aside_forget();
    Py_RETURN_NONE;
}

static PyObject *py_ranks_ask(PyObject *self, PyObject *ranks_of)
{
    (void)self;
    koila__ranks_ask(ranks_of);
    Py_RETURN_NONE;
}

static PyObject *py_ranks_of(PyObject *self, PyObject *lazies)
{
    koila_value *values = NULL;
    uint32_t n;
    koila__part part = { 0 };
    PyObject *ranks = NULL;
    (void)self;
    koila__tape *t = values_of_list(lazies, &values, &n);
    if (t && koila__part_make(t, values, n, false, &part) == 0)
        ranks = koila__ranks_of(part.graph);
    koila__part_free(&part);
    PyMem_Free(values);
    return ranks;
}

/* For tests: forgets plans and learned workspaces. */
static PyObject *py_forget(PyObject *self, PyObject *ignored)
{
    (void)self;
    (void)ignored;
    koila__plan_cache_clear();
    koila__aside_forget();
    Py_RETURN_NONE;
}

static PyObject *py_plant_clock(PyObject *self, PyObject *seconds)
{
    (void)self;
    koila__stopwatch_plant(seconds == Py_None ? NULL : seconds);
    Py_RETURN_NONE;
}

static PyObject *py_direct_calls(PyObject *module, PyObject *on)
{
    const int yes = PyObject_IsTrue(on);
    return yes < 0 ? NULL : PyLong_FromUnsignedLongLong(koila__direct_allow(yes));
}

static PyMethodDef methods[] = {
    { "held_fits", py_held_fits, METH_O,
      "held_fits(call): OutOfMemory when torch holds more than the budget already." },
    { "reads_fit", py_reads_fit, METH_NOARGS,
      "What is kept for reads gives way to a lowered budget." },
    { "n_plans", py_n_plans, METH_NOARGS, "Number of runs and plans of this context so far." },
    { "last_plan", py_last_plan, METH_NOARGS, "Facts of the last step as a dict, or None." },
    { "plans", py_plans, METH_O,
      "plans(most): facts of at most so many last runs and plans as dicts, the newest last." },
    { "last_backward", py_last_backward, METH_NOARGS,
      "last_backward() -> the number of the newest run of a backward, 0 before the first." },
    { "plan_numbered", py_plan_numbered, METH_O,
      "plan_numbered(number): facts of that run as a dict, or None: it is not one of the last." },
    { "step_facts", py_step_facts, METH_O,
      "step_facts(number): as plan_numbered(), without what takes long to make." },
    { "tell_to", py_tell_to, METH_VARARGS,
      "tell_to(function | None[, its logger's table of levels]): it is called as function(number, "
      "told, retries) for each run "
      "whose plan it has not told in full, and returns what it has told." },
    { "progress_to", py_progress_to, METH_O,
      "progress_to(function | None): it is called as function(done, all, is_over) in a long run, "
      "with slices, and returns whether it shows them." },
    { "progress_after", py_progress_after, METH_O,
      "progress_after(seconds) -> seconds: for tests, after how long a run is a long one." },
    { "run_all", py_run_all, METH_VARARGS,
      "run_all(lazies, commit): make them concrete in one run." },
    { "run_known", py_run_known, METH_VARARGS,
      "run_known(what backward_at_once() gave, commit) -> (tape, [plain gradient, ...]): computes "
      "them in one run." },
    { "finish_step", py_finish_step, METH_VARARGS,
      "finish_step(tape, done): commit or drop the effects after run_all(..., True)." },
    { "take_all", py_take_all, METH_O,
      "take_all(list of lazies) -> their plain tensors, released by the tape; empties the list." },
    { "swap_open", py_swap_open, METH_O,
      "swap_open(tape | None) -> the tape that was open before." },
    { "cut_of", py_cut_of, METH_O,
      "cut_of(lazy) -> (kind, dim, made, here): along which dimension is it sliced?" },
    { "gather", py_gather, METH_VARARGS,
      "gather([lazy, ...], operator): make the values concrete that the operator needs, in one "
      "run. The plan reports sliced ones as gathers; strict() refuses them." },
    { "instead_of", py_instead_of, METH_O,
      "instead_of(operator): what a program can do so that it is cut, '' if nothing is known." },
    { "explain", py_explain, METH_O,
      "explain(lazies): the plan for them as a dict; runs nothing." },
    { "save_graph", py_save_graph, METH_VARARGS,
      "save_graph(lazies or a plan's number, path): the recorded graph as text. False: the plan is "
      "none of the last ones, and its graph is gone." },
    { "is_recording", py_is_recording, METH_NOARGS, "Is any lazy tensor alive?" },
    { "predict", (PyCFunction)(void (*)(void))py_predict, METH_VARARGS | METH_KEYWORDS,
      "Predict the step planned last on a device, given by name or as JSON text; a dict. The "
      "keywords are those of koila.plan()." },
    { "device_field", py_device_field, METH_VARARGS,
      "device_field(device, key): a number of a profile, given by name or as JSON text." },
    { "device_names", py_device_names, METH_NOARGS, "Names of the built-in device profiles." },
    { "register_rule", py_register_rule, METH_VARARGS,
      "register_rule(operator, rule): see koila.register_rule." },
    { "ranks_of", py_ranks_of, METH_O,
      "ranks_of(lazies) -> koila._sharded.Ranks or None: the ranks that share their sharded "
      "calls." },
    { "ranks_ask", py_ranks_ask, METH_O,
      "ranks_ask(ranks_of): set the function that tells which ranks share a step's opaque "
      "calls." },
    { "direct_calls", py_direct_calls, METH_O,
      "direct_calls(bool) -> number of recorded calls that have gone through torch's C ABI so far. "
      "For tests: may they from now on?" },
    { "forget", py_forget, METH_NOARGS, "Drop cached plans and learned workspaces." },
    { "plant_clock", py_plant_clock, METH_O,
      "plant_clock(function | None): it tells the seconds by which sizes of slices are compared." },
    { NULL, NULL, 0, NULL },
};

static int call_without_inputs(koila_sig sig, PyObject **out)
{
    return koila__call(sig, NULL, NULL, NULL, out);
}

static void forget_signatures(PyObject *gone)
{
    koila__templates_forget(gone);
    koila__workspaces_forget();
}

int koila__run_module_add(PyObject *m)
{
    static const koila__executor_calls executor = {
        .run = koila__run,
        .run_held = koila__run_held,
        .run_whole = koila__run_whole,
        .run_elsewhere = koila__run_elsewhere,
        .call = call_without_inputs,
        .forget = forget_signatures,
    };
    koila__executor = &executor;
    if (PyModule_AddFunctions(m, methods) < 0 || koila__body_module_add(m) < 0)
        return -1;
    return koila__as_it_is_add(m);
}
