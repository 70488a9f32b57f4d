/* call.c — one recorded call on real tensors, and the simple executor on top of it.
 *
 * A signature becomes a template once: the operator, its constants as Python objects, the keyword
 * names. A call then fills in the tensors. Calls go through OpOverload._op, torch's own door with
 * all argument types, custom operators and the true exception, at 1.2-2.2 µs.
 */
#include "ground/random.h"
#include "run/run.h"

typedef struct template {
    PyObject *op;        /* owned: OpOverload._op */
    PyObject *kw_names;  /* owned tuple, or NULL when there are none */
    PyObject **constant; /* [n_pos + n_kw] owned; NULL: it contains tensors */
    bool strided;        /* as_strided: addresses the storage */
    /* a view that needs its input's dimensions to lie as they were recorded */
    bool joins;
} template;

static template *templates; /* [n_templates] by signature */
static uint32_t n_templates;

static PyObject *constant_of(const koila_arg *t, const koila_arg **end)
{ /* new; a list of constants too */
    *end = t + 1;
    switch (t->kind) {
    case KOILA_ARG_ABSENT:
        Py_RETURN_NONE;
    case KOILA_ARG_INT:
        return PyLong_FromLongLong(t->u.i);
    case KOILA_ARG_FLOAT:
        return PyFloat_FromDouble(t->u.f);
    case KOILA_ARG_BOOL:
        return PyBool_FromLong((long)t->u.i);
    case KOILA_ARG_STR:
        return PyUnicode_FromString(koila_text(koila__table, t->u.id));
    case KOILA_ARG_DTYPE:
        return Py_NewRef(koila__dtype_object((koila_dtype)t->u.id));
    case KOILA_ARG_OPAQUE:
        return Py_XNewRef(koila__opaque_object(t->u.id));
    case KOILA_ARG_LIST: {
        PyObject *list = PyList_New(t->n);
        const koila_arg *at = t + 1;
        for (uint32_t i = 0; list && i < t->n; i++) {
            PyObject *o = constant_of(at, &at);
            if (!o)
                Py_CLEAR(list);
            else
                PyList_SET_ITEM(list, i, o);
        }
        *end = at;
        return list;
    }
    default:
        PyErr_SetString(PyExc_SystemError, "koila: no constant");
        return NULL;
    }
}

static bool has_tensor(const koila_arg *t)
{
    if (t->kind == KOILA_ARG_TENSOR)
        return true;
    for (uint32_t i = 0; t->kind == KOILA_ARG_LIST && i < t->n; i++)
        if (t[1 + i].kind == KOILA_ARG_TENSOR)
            return true;
    return false;
}

static template *template_of(koila_sig sig)
{
    if (sig < n_templates && templates[sig].op)
        return &templates[sig];
    if (sig >= n_templates) {
        const uint32_t n = (sig + 1) * 2 < 256 ? 256 : (sig + 1) * 2;
        template *p = PyMem_Realloc(templates, n * sizeof *p);
        if (!p) {
            PyErr_NoMemory();
            return NULL;
        }
        memset(p + n_templates, 0, (n - n_templates) * sizeof *p);
        templates = p;
        n_templates = n;
    }
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    const uint32_t n = s->n_pos + s->n_kw;
    template t = { 0 };
    PyObject *op = koila__op_object(s->op);
    if (!op)
        return NULL;
    t.constant = PyMem_Calloc(n + 1, sizeof *t.constant);
    if (!t.constant) {
        PyErr_NoMemory();
        return NULL;
    }
    for (uint32_t i = 0; i < n; i++) {
        const koila_arg *at = s->tokens + s->start[i];
        if (!has_tensor(at) && !(t.constant[i] = constant_of(at, &at)))
            goto fail;
    }
    if (s->n_kw) {
        t.kw_names = PyTuple_New(s->n_kw);
        if (!t.kw_names)
            goto fail;
        for (uint32_t i = 0; i < s->n_kw; i++) {
            PyObject *name = PyUnicode_InternFromString(koila_text(koila__table, s->kw_names[i]));
            if (!name)
                goto fail;
            PyTuple_SET_ITEM(t.kw_names, i, name);
        }
    }
    const uint32_t facts = koila_op_facts(koila__table, s->op);
    t.strided = facts & KOILA_FACT_STRIDED;
    t.joins = facts & KOILA_FACT_JOINS;
    t.op = PyObject_GetAttrString(op, "_op");
    if (!t.op)
        goto fail;
    templates[sig] = t;
    return &templates[sig];
fail:
    for (uint32_t i = 0; i < n; i++)
        Py_XDECREF(t.constant[i]);
    PyMem_Free(t.constant);
    Py_XDECREF(t.kw_names);
    return NULL;
}

static PyObject *ints(const koila__arg_fix *f)
{
    if (!f->is_list)
        return PyLong_FromLongLong(f->ints[0]);
    PyObject *list = PyList_New(f->n);
    for (uint32_t i = 0; list && i < f->n; i++) {
        PyObject *o = PyLong_FromLongLong(f->ints[i]);
        if (!o) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, o);
    }
    return list;
}

/* `base`, or a slice of it, with the strides it was recorded with, for as_strided: itself, unless
 * an element would lie elsewhere; then a copy. New reference. (A slice has them too: what is sliced
 * through as_strided has its rows outermost in memory.) */
static PyObject *as_recorded(PyObject *base, koila_meta recorded)
{
    koila_meta now;
    if (koila__meta_of(base, &now) < 0)
        return NULL;
    const koila_meta_info *a = koila_meta_get(koila__table, now);
    const koila_meta_info *b = koila_meta_get(koila__table, recorded);
    bool same = a->dtype == b->dtype && a->n_dims == b->n_dims;
    for (uint32_t d = 0; same && d < a->n_dims; d++)
        same = a->size[d] == 1 || a->stride[d] == b->stride[d];
    if (same)
        return Py_NewRef(base);
    PyObject *f = koila__helper("with_strides");
    PyObject *meta = f ? koila__meta_object(recorded) : NULL;
    PyObject *r = meta ? PyObject_CallFunctionObjArgs(f, base, meta, NULL) : NULL;
    Py_XDECREF(f);
    Py_XDECREF(meta);
    return r;
}

/* A view of t raised. A shape function may say another memory order than its kernel gives (so may a
 * user's, of a custom operator): t copied into the order it was recorded with; NULL, with the
 * exception still set, when it lies so already (or it is another exception). */
static PyObject *in_recorded_order(PyObject *t, koila_meta recorded)
{
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError) || koila__is_out_of_memory())
        return NULL;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *f = koila__helper("in_order");
    PyObject *meta = f ? koila__meta_object(recorded) : NULL;
    PyObject *r = meta ? PyObject_CallFunctionObjArgs(f, t, meta, NULL) : NULL;
    Py_XDECREF(f);
    Py_XDECREF(meta);
    if (r == t)
        Py_CLEAR(r);
    else if (r || PyErr_Occurred()) { /* the copy, or no memory for it */
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return r;
    }
    PyErr_Restore(type, value, trace);
    return NULL;
}

/* The call itself; `inputs` with the written views already in their slots. New reference to
 * whatever the operator returned. */
static PyObject *invoke(koila_sig sig, PyObject *const *inputs, const koila__call_fix *fix,
                        bool is_link)
{
    const template *t = template_of(sig);
    if (!t)
        return NULL;
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    const uint32_t n = s->n_pos + s->n_kw;
    const bool grad = koila__grad_mode();
    if (grad != s->grad_mode && koila__set_grad_mode(s->grad_mode) < 0)
        return NULL;
    PyObject *few[24];
    PyObject **args = n <= 24 ? few : PyMem_Malloc(n * sizeof *args);
    PyObject *r = NULL;
    uint64_t owned = 0;
    if (!args || n > 64) {
        PyErr_NoMemory();
        goto done;
    }
    uint32_t at_input = 0;
    for (uint32_t i = 0; i < n; i++) {
        const koila_arg *tok = s->tokens + s->start[i];
        args[i] = t->constant[i];
        if (tok->kind == KOILA_ARG_TENSOR) {
            args[i] = inputs[at_input++];
        } else if (!args[i]) {
            PyObject *list = PyList_New(tok->n);
            for (uint32_t k = 0; list && k < tok->n; k++) {
                const koila_arg *x = tok + 1 + k;
                PyObject *o = x->kind == KOILA_ARG_TENSOR ? Py_NewRef(inputs[at_input++])
                                                          : constant_of(x, &x);
                if (!o)
                    Py_CLEAR(list);
                else
                    PyList_SET_ITEM(list, k, o);
            }
            if (!list)
                goto done;
            args[i] = list;
            owned |= (uint64_t)1 << i;
        }
        for (uint32_t k = 0; fix && k < fix->n_fix; k++)
            if (fix->fix[k].arg == i) {
                PyObject *o = ints(&fix->fix[k]);
                if (!o)
                    goto done;
                if (owned >> i & 1)
                    Py_DECREF(args[i]);
                args[i] = o;
                owned |= (uint64_t)1 << i;
            }
    }
    if (t->strided) { /* recorded offsets count from the base's first element */
        PyObject *self = as_recorded(args[0], s->inputs[0]);
        if (!self)
            goto done;
        PyObject *zero = PyObject_CallMethod(self, "storage_offset", NULL);
        PyObject *sum = NULL;
        if (zero && s->n_pos > 3 && PyLong_Check(args[3]))
            sum = PyNumber_Add(zero, args[3]);
        else
            sum = Py_XNewRef(zero);
        Py_XDECREF(zero);
        if (sum)
            r = PyObject_CallFunctionObjArgs(t->op, self, args[1], args[2], sum, NULL);
        Py_XDECREF(sum);
        Py_DECREF(self);
        goto done;
    }
    r = PyObject_Vectorcall(t->op, args, s->n_pos, t->kw_names);
    /* values never change, so a copy is as good as a view; a link's copy would take the write with
     * it */
    if (!r && t->joins && !is_link) {
        PyObject *given = args[0];
        PyObject *copy = in_recorded_order(given, s->inputs[0]);
        if (copy) {
            args[0] = copy;
            r = PyObject_Vectorcall(t->op, args, s->n_pos, t->kw_names);
            args[0] = given;
            Py_DECREF(copy);
        }
    }
done:
    for (uint32_t i = 0; i < n && i < 64 && owned >> i; i++)
        if (owned >> i & 1)
            Py_DECREF(args[i]);
    if (grad != s->grad_mode)
        koila__set_grad_mode(grad);
    if (args != few)
        PyMem_Free(args);
    return r;
}

static PyObject *item(PyObject *r, uint8_t kind, uint32_t j)
{ /* borrowed */
    if (kind == 0)
        return j == 0 ? r : NULL;
    if (PyTuple_Check(r))
        return j < PyTuple_GET_SIZE(r) ? PyTuple_GET_ITEM(r, j) : NULL;
    if (PyList_Check(r))
        return j < PyList_GET_SIZE(r) ? PyList_GET_ITEM(r, j) : NULL;
    return NULL;
}

int koila__call(koila_sig sig, PyObject *const *inputs, const koila__call_fix *fix,
                const koila__call_fix *link_fix, PyObject **outputs)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    PyObject *few[32], **in = NULL, *r = NULL, *bases[64];
    uint32_t at_link = 0, n_bases = 0;
    int rc = -1;
    if (!s->n_writes) {
        r = invoke(sig, inputs, fix, false);
    } else {
        in = s->n_inputs <= 32 ? few : PyMem_Malloc(s->n_inputs * sizeof *in);
        if (!in) {
            PyErr_NoMemory();
            return -1;
        }
        for (uint32_t i = 0; i < s->n_inputs; i++)
            in[i] = Py_NewRef(inputs[i]);
        bool ok = s->n_writes <= 64;
        for (uint32_t w = 0; w < s->n_writes && ok; w++) {
            const koila_write *write = &s->writes[w];
            const template *first = write->n_links ? template_of(write->links[0].sig) : NULL;
            /* a copy made on the way would take the write with it */
            const bool recorded = first && first->strided;
            bases[w] =
                recorded ? as_recorded(inputs[write->input],
                                       koila_sig_get(koila__table, write->links[0].sig)->inputs[0])
                         : Py_NewRef(inputs[write->input]);
            n_bases = w + 1;
            if (bases[w] && recorded)
                Py_SETREF(in[write->input], Py_NewRef(bases[w]));
            ok = bases[w] && (!write->n_links || first);
        }
        for (uint32_t w = 0; w < s->n_writes && ok; w++)
            for (uint32_t k = 0; k < s->writes[w].n_links && ok; k++, at_link++) {
                const koila_link link = s->writes[w].links[k];
                PyObject **slot = &in[s->writes[w].input];
                PyObject *all = invoke(link.sig, slot, link_fix ? &link_fix[at_link] : NULL, true);
                PyObject *view =
                    all ? item(all, koila_sig_get(koila__table, link.sig)->result_kind, link.output)
                        : NULL;
                if (all && !view)
                    PyErr_SetString(PyExc_SystemError, "koila: a view call lost a result");
                if (!view)
                    ok = false;
                else {
                    Py_INCREF(view);
                    Py_DECREF(*slot);
                    *slot = view;
                }
                Py_XDECREF(all);
            }
        if (ok)
            r = invoke(sig, in, fix, false);
    }
    if (!r)
        goto done;
    const int8_t *source = NULL;
    int n_results = 0;
    if (s->n_writes && s->n_fresh && (n_results = koila__op_sources(s->op, &source)) < 0)
        goto done;
    uint32_t j = 0;
    for (; j < s->n_fresh; j++) {
        PyObject *o = NULL;
        if (!s->n_writes) {
            o = item(r, s->result_kind, j);
        } else { /* the j-th result that is not a written argument */
            uint32_t seen = 0;
            for (int k = 0; k < n_results && k < 8; k++)
                if (source[k] == -1 && seen++ == j)
                    o = item(r, n_results > 1, (uint32_t)k);
        }
        if (s->outputs[j] != KOILA_NONE && (!o || !koila__is_tensor(o))) {
            PyErr_Format(PyExc_SystemError,
                         "koila: %s did not return what it did when it was recorded",
                         koila_op_name(koila__table, s->op));
            while (j)
                Py_CLEAR(outputs[--j]);
            goto done;
        }
        outputs[j] = s->outputs[j] == KOILA_NONE ? NULL : Py_NewRef(o);
    }
    for (uint32_t w = 0; w < s->n_writes; w++)
        outputs[j++] = Py_NewRef(bases[w]);
    rc = 0;
done:
    Py_XDECREF(r);
    for (uint32_t w = 0; w < n_bases; w++)
        Py_XDECREF(bases[w]);
    for (uint32_t i = 0; in && i < s->n_inputs; i++)
        Py_DECREF(in[i]);
    if (in && in != few)
        PyMem_Free(in);
    return rc;
}

/* ---- the simple executor */

static int stale(koila__tape *t, koila_value v)
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

int koila__run_whole(koila__tape *t, const koila_value *targets, uint32_t n_targets)
{
    const koila_graph *g = t->graph;
    const uint32_t n_nodes = koila_graph_n_nodes(g);
    const uint32_t n_values = koila_graph_n_values(g);
    /* readers to come; targets count as one more */
    uint32_t *uses = PyMem_Calloc(n_values + 1, sizeof *uses);
    PyObject **env = PyMem_Calloc(n_values + 1, sizeof *env);
    bool *needed = PyMem_Calloc(n_nodes + 1, sizeof *needed);
    PyObject *guards = NULL, *in[256], *out[256];
    int rc = -1;
    Py_INCREF(t);
    if (!uses || !env || !needed) {
        PyErr_NoMemory();
        goto done;
    }
    for (uint32_t i = 0; i < n_targets; i++)
        uses[targets[i]]++;
    for (uint32_t n = n_nodes; n--;) {
        const koila_node_info node = koila_node_get(g, n);
        const koila_sig_info *s = koila_sig_get(koila__table, node.sig);
        for (uint32_t j = 0; j < s->n_outputs; j++)
            if (uses[node.first_output + j] && !t->values[node.first_output + j].real)
                needed[n] = true;
        if (!needed[n])
            continue;
        if (s->n_inputs > 256 || s->n_outputs > 256) {
            PyErr_SetString(PyExc_RuntimeError, "koila: an operator with more than 256 tensors");
            goto done;
        }
        const koila_value *inputs = koila_node_inputs(g, n);
        for (uint32_t i = 0; i < s->n_inputs; i++)
            uses[inputs[i]]++;
    }
    for (uint32_t v = 0; v < n_values; v++)
        if (uses[v] && t->values[v].real && stale(t, v) < 0)
            goto done;
    guards = koila__ask("enter_modes", NULL, NULL, NULL);
    if (!guards)
        goto done;
    for (uint32_t n = 0; n < n_nodes; n++) {
        if (!needed[n])
            continue;
        const koila_node_info node = koila_node_get(g, n);
        const koila_sig_info *s = koila_sig_get(koila__table, node.sig);
        const koila_value *inputs = koila_node_inputs(g, n);
        PyObject *owned[64], *old_state = NULL;
        uint32_t n_owned = 0;
        bool ok = s->n_writes <= 64;
        for (uint32_t i = 0; i < s->n_inputs; i++)
            in[i] = t->values[inputs[i]].real ? t->values[inputs[i]].real : env[inputs[i]];
        /* a value never changes: write into a copy */
        for (uint32_t w = 0; w < s->n_writes && ok; w++) {
            const uint32_t i = s->writes[w].input;
            PyObject *copy =
                koila__ask(s->writes[w].overwrites ? "empty_like_exactly" : "clone_exactly", in[i],
                           NULL, NULL);
            if (!copy)
                ok = false;
            else
                in[i] = owned[n_owned++] = copy;
        }
        const tape_random *random = koila__tape_random(t, n);
        if (ok && random &&
            (!(old_state = koila__generator_get(random->generator)) ||
             koila__generator_set(random->generator, random->state) < 0))
            ok = false;
        if (ok && koila__call(node.sig, in, NULL, NULL, out) < 0)
            ok = false;
        if (old_state) {
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            if (koila__generator_set(random->generator, old_state) < 0 && type)
                PyErr_Clear();
            if (type)
                PyErr_Restore(type, value, trace);
            else if (PyErr_Occurred())
                ok = false;
            Py_DECREF(old_state);
        }
        for (uint32_t i = 0; i < n_owned; i++)
            Py_DECREF(owned[i]);
        if (!ok)
            goto done;
        for (uint32_t j = 0; j < s->n_outputs; j++) {
            koila_meta m;
            if (out[j] && !(koila_op_flags(koila__table, s->op) & KOILA_OP_OPAQUE) &&
                (koila__meta_of(out[j], &m) < 0 || m != s->outputs[j])) {
                PyObject *is = koila__meta_object(m);
                PyObject *was = koila__meta_object(s->outputs[j]);
                PyErr_Format(PyExc_AssertionError, "node %u %s, result %u: recorded as %R, is %R",
                             n, koila_op_name(koila__table, s->op), j, was, is);
                Py_XDECREF(is);
                Py_XDECREF(was);
                for (; j < s->n_outputs; j++)
                    Py_XDECREF(out[j]);
                goto done;
            }
            if (!out[j])
                continue;
            if (uses[node.first_output + j] && !t->values[node.first_output + j].real)
                env[node.first_output + j] = out[j];
            else
                Py_DECREF(out[j]);
        }
        for (uint32_t i = 0; i < s->n_inputs; i++)
            if (--uses[inputs[i]] == 0)
                Py_CLEAR(env[inputs[i]]);
    }
    Py_CLEAR(guards);
    rc = 0;
    /* all computed: now change the world */
    for (uint32_t i = 0; i < n_targets; i++)
        if (env[targets[i]]) {
            koila__tape_set_real(t, targets[i], env[targets[i]]);
            env[targets[i]] = NULL;
        }
done:
    Py_CLEAR(guards);
    for (uint32_t v = 0; env && v < n_values; v++)
        Py_XDECREF(env[v]);
    PyMem_Free(uses);
    PyMem_Free(env);
    PyMem_Free(needed);
    Py_DECREF(t);
    return rc;
}
