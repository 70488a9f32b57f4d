/* call.c — runs one recorded call on real tensors.
 *
 * Each signature becomes a template once: the operator, its constants as Python objects, and the
 * keyword names. A call then fills in the tensors. Calls go through torch's OpOverload._op, which
 * supports all argument types and custom operators, raises torch's own exceptions, and takes
 * 1.2-2.2 µs. Signatures that are called again go through torch's C ABI where they can (direct.c);
 * modules that run as they are (koila._opaque) are called without torch.
 */
#include "ground/random.h"
#include "run/run.h"

enum {
    FEW_ARGUMENTS = 24, /* arguments that need no allocation */
    FEW_INPUTS = 32,
    MAX_ARGUMENTS = 64, /* one bit of arguments.owned each */
    MOST_FAILED = 100,  /* direct calls of a signature: then it is no longer tried */
    MAX_RESULTS = 8,    /* results of a schema that writes (op_info.source) */
    LIST = 2,           /* koila_sig_info.result_kind */
    ENDS_IN_LIST = 4,   /* the same */
    SOURCE_FRESH = -1,  /* a result that is not a written argument (koila__op_sources) */
};

typedef struct template {
    PyObject *op;        /* owned: OpOverload._op */
    PyObject *kw_names;  /* owned tuple, or NULL when there are none */
    PyObject **constant; /* [n = n_pos + n_kw] owned; NULL: it contains tensors */
    uint32_t n;
    bool strided; /* as_strided: addresses the storage */
    /* a view that is only possible in the recorded memory order of its input */
    bool joins;
    bool was_called;
    bool is_refused;       /* calls do not go through `direct` */
    koila__direct *direct; /* owned; NULL: none yet, or calls cannot */
    uint32_t n_failed;     /* direct calls */
} template;

/* [n_templates] by signature, NULL: none yet. A template is made once and stays where it is: calls
 * use it while Python runs, which may make others. */
static template **templates;
static uint32_t n_templates;

/* A constant as a new object; also a list of constants. */
static PyObject *constant_of(const koila_arg *t, const koila_arg **end)
{
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

static void template_deinit(template *t)
{
    for (uint32_t i = 0; i < t->n; i++)
        Py_XDECREF(t->constant[i]);
    PyMem_Free(t->constant);
    Py_XDECREF(t->kw_names);
    Py_XDECREF(t->op);
    koila__direct_free(t->direct);
}

/* Enters t, unless somebody did meanwhile. NULL: no memory. */
static template *remember(koila_sig sig, const template *t)
{
    if (sig >= n_templates) {
        const uint32_t n = (sig + 1) * 2 < 256 ? 256 : (sig + 1) * 2;
        template **p = PyMem_Realloc(templates, n * sizeof *p);
        if (!p) {
            PyErr_NoMemory();
            return NULL;
        }
        memset(p + n_templates, 0, (n - n_templates) * sizeof *p);
        templates = p;
        n_templates = n;
    }
    koila_assert(!templates[sig]);
    templates[sig] = PyMem_Malloc(sizeof *t);
    if (!templates[sig]) {
        PyErr_NoMemory();
        return NULL;
    }
    *templates[sig] = *t;
    return templates[sig];
}

static void give_away(PyObject *gone, PyObject *o)
{
    if (o && PyList_Append(gone, o) < 0)
        PyErr_Clear(); /* no memory: it stays, for its end may run Python */
    else
        Py_XDECREF(o);
}

void koila__templates_forget(PyObject *gone)
{
    for (koila_sig sig = 0; sig < n_templates; sig++) {
        template *t = templates[sig];
        if (!t || koila_sig_get(koila__table, sig))
            continue;
        for (uint32_t i = 0; i < t->n; i++)
            give_away(gone, t->constant[i]);
        give_away(gone, t->kw_names);
        give_away(gone, t->op);
        koila__direct_free(t->direct);
        PyMem_Free(t->constant);
        PyMem_Free(t);
        templates[sig] = NULL;
    }
}

static template *known_template(koila_sig sig) { return sig < n_templates ? templates[sig] : NULL; }

static template *template_of(koila_sig sig)
{
    template *known = known_template(sig);
    if (known)
        return known;
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    const uint32_t n = s->n_pos + s->n_kw;
    template t = { .n = n };
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
    /* torch would take lists of all parameters apart, and put them together again */
    t.op = PyObject_GetAttrString(op, facts & KOILA_FACT_OPAQUE_CALL ? "koila_kernel" : "_op");
    if (!t.op)
        goto fail;
    known = known_template(sig); /* made by another thread, or in a call inside */
    if (!known)
        known = remember(sig, &t);
    else
        template_deinit(&t);
    return known;
fail:
    template_deinit(&t);
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

/* For as_strided: `base`, or a slice of it, in its recorded strides. Itself if they agree, else a
 * copy; a new reference. (The strides of a slice agree too: a value sliced through as_strided has
 * its rows outermost in memory.) */
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

/* After a view of t has raised: t copied into its recorded memory order. A shape function, as of a
 * user's custom operator, may predict another order than the kernel produces. NULL with the
 * exception still set: t is in that order already, or the exception is of another kind. */
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
    else if (r || PyErr_Occurred()) {
        /* the copy, or the exception of making it */
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return r;
    }
    PyErr_Restore(type, value, trace);
    return NULL;
}

/* ---- the arguments of a call */

typedef struct arguments {
    PyObject *few[FEW_ARGUMENTS];
    PyObject **at; /* [n], borrowed where `owned` has no bit */
    uint32_t n;
    uint64_t owned;
} arguments;

/* Sets argument i to `o`, which it takes over. */
static void own(arguments *a, uint32_t i, PyObject *o)
{
    koila_assert(i < a->n && a->n <= MAX_ARGUMENTS);
    if (a->owned >> i & 1)
        Py_DECREF(a->at[i]);
    a->at[i] = o;
    a->owned |= (uint64_t)1 << i;
}

/* Builds a list that contains tensors, taking them from *inputs in order. Those that are NULL are
 * left out: pieces of other slices. */
static PyObject *list_with_tensors(const koila_arg *token, PyObject *const **inputs)
{
    PyObject *list = PyList_New(token->n);
    uint32_t n = 0;
    for (uint32_t k = 0; list && k < token->n; k++) {
        const koila_arg *x = token + 1 + k;
        PyObject *o;
        if (x->kind == KOILA_ARG_TENSOR) {
            o = Py_XNewRef(**inputs);
            ++*inputs;
            if (!o)
                continue;
        } else
            o = constant_of(x, &x);
        if (o)
            PyList_SET_ITEM(list, n++, o);
        else
            Py_CLEAR(list);
    }
    if (list && n < token->n && PyList_SetSlice(list, n, token->n, NULL) < 0)
        Py_CLEAR(list);
    return list;
}

static int fill_in(arguments *a, const template *t, const koila_sig_info *s,
                   PyObject *const *inputs, const koila__call_fix *fix)
{
    for (uint32_t i = 0; i < a->n; i++) {
        const koila_arg *token = s->tokens + s->start[i];
        a->at[i] = t->constant[i];
        if (token->kind == KOILA_ARG_TENSOR) {
            a->at[i] = *inputs;
            inputs++;
        } else if (a->at[i]) {
            if (fix && fix->device && Py_IS_TYPE(a->at[i], Py_TYPE(fix->device)))
                a->at[i] = fix->device;
        } else {
            PyObject *list = list_with_tensors(token, &inputs);
            if (!list)
                return -1;
            own(a, i, list);
        }
    }
    for (uint32_t k = 0; fix && k < fix->n_fix; k++) {
        PyObject *o = ints(&fix->fix[k]);
        if (!o)
            return -1;
        own(a, fix->fix[k].arg, o);
    }
    return 0;
}

static int arguments_init(arguments *a, const template *t, const koila_sig_info *s,
                          PyObject *const *inputs, const koila__call_fix *fix)
{
    a->n = s->n_pos + s->n_kw;
    a->owned = 0;
    a->at = a->n <= FEW_ARGUMENTS ? a->few : PyMem_Malloc(a->n * sizeof *a->at);
    if (!a->at || a->n > MAX_ARGUMENTS) {
        PyErr_NoMemory();
        return -1;
    }
    return fill_in(a, t, s, inputs, fix);
}

static void arguments_deinit(arguments *a)
{
    for (uint32_t i = 0; i < a->n && i < MAX_ARGUMENTS; i++)
        if (a->owned >> i & 1)
            Py_DECREF(a->at[i]);
    if (a->at != a->few)
        PyMem_Free(a->at);
}

/* ---- the call itself */

static _Thread_local bool need_no_functions;

bool koila__calls_need_no_functions(bool on)
{
    const bool before = need_no_functions;
    need_no_functions = on;
    return before;
}

static void skip_next_function(bool skips)
{
    const PyCFunction set = PyCFunction_GET_FUNCTION(koila__torch.skip_next);
    PyObject *done = set(PyCFunction_GET_SELF(koila__torch.skip_next), skips ? Py_True : Py_False);
    Py_XDECREF(done);
}

/* Torch looks for `__torch_function__` in each argument, which takes longer than all else, unless
 * it is told that there is none in the next call. */
static PyObject *call_operator(const template *t, PyObject *const *args, size_t n, PyObject *names)
{
    const bool skips = need_no_functions && koila__torch.skip_next && PyCFunction_CheckExact(t->op);
    if (skips)
        skip_next_function(true);
    PyObject *r = PyObject_Vectorcall(t->op, args, n, names);
    if (!r && skips) { /* torch may not have come to where it looks */
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        skip_next_function(false);
        PyErr_Restore(type, value, trace);
    }
    return r;
}

/* as_strided(self, size, stride, offset): a recorded offset counts from the first element of the
 * base. */
static PyObject *invoke_strided(const template *t, const koila_sig_info *s, PyObject *const *args)
{
    PyObject *self = as_recorded(args[0], s->inputs[0]);
    PyObject *offset = self ? PyObject_CallMethod(self, "storage_offset", NULL) : NULL;
    PyObject *r = NULL;
    if (offset && s->n_pos > 3 && PyLong_Check(args[3]))
        Py_SETREF(offset, PyNumber_Add(offset, args[3]));
    if (offset)
        r = PyObject_CallFunctionObjArgs(t->op, self, args[1], args[2], offset, NULL);
    Py_XDECREF(offset);
    Py_XDECREF(self);
    return r;
}

/* The call draws from `generator`. */
static PyObject *invoke_random(const template *t, const koila_sig_info *s, PyObject **args,
                               PyObject *generator)
{
    PyObject *all[MAX_ARGUMENTS + 1];
    const uint32_t n = s->n_pos + s->n_kw;
    PyObject *names = PyTuple_New(s->n_kw + 1);
    if (!names)
        return NULL;
    for (uint32_t i = 0; i < s->n_kw; i++)
        PyTuple_SET_ITEM(names, i, Py_NewRef(PyTuple_GET_ITEM(t->kw_names, i)));
    PyTuple_SET_ITEM(names, s->n_kw, PyUnicode_InternFromString("generator"));
    memcpy(all, args, n * sizeof *all);
    all[n] = generator;
    PyObject *r = PyTuple_GET_ITEM(names, s->n_kw) ? call_operator(t, all, s->n_pos, names) : NULL;
    Py_DECREF(names);
    return r;
}

static PyObject *invoke_plain(const template *t, const koila_sig_info *s, PyObject **args,
                              bool is_link)
{
    PyObject *r = call_operator(t, args, s->n_pos, t->kw_names);
    /* values never change, so a copy may replace a view; but a write through a link would get lost
     * in a copy */
    if (r || !t->joins || is_link)
        return r;
    PyObject *given = args[0];
    PyObject *copy = in_recorded_order(given, s->inputs[0]);
    if (!copy)
        return NULL;
    args[0] = copy;
    r = call_operator(t, args, s->n_pos, t->kw_names);
    args[0] = given;
    Py_DECREF(copy);
    return r;
}

/* Sets torch's settings back; an exception that is set stays. */
static void give_mode_back(uint8_t mode)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (koila__set_call_mode(mode) < 0)
        PyErr_WriteUnraisable(NULL);
    PyErr_Restore(type, value, trace);
}

/* Calls the operator on `inputs`, which hold the views to be written. A new reference to its
 * result. */
static PyObject *invoke(koila_sig sig, PyObject *const *inputs, const koila__call_fix *fix,
                        bool is_link)
{
    const template *t = template_of(sig);
    if (!t)
        return NULL;
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    const uint8_t mode = koila__call_mode();
    if (mode != s->grad_mode && koila__set_call_mode(s->grad_mode) < 0)
        return NULL;
    arguments a;
    PyObject *r = NULL;
    if (arguments_init(&a, t, s, inputs, fix) == 0) {
        if (fix && fix->generator)
            r = invoke_random(t, s, a.at, fix->generator);
        else
            r = t->strided ? invoke_strided(t, s, a.at) : invoke_plain(t, s, a.at, is_link);
    }
    arguments_deinit(&a);
    if (mode != s->grad_mode)
        give_mode_back(mode);
    return r;
}

/* Result j of r, as an operator of this result kind returned it. Borrowed; NULL: there is none. */
static PyObject *item(PyObject *r, uint8_t kind, uint32_t j)
{
    if (kind == 0)
        return j == 0 ? r : NULL;
    if (kind == ENDS_IN_LIST && PyTuple_Check(r) && PyTuple_GET_SIZE(r)) {
        const uint32_t first = (uint32_t)PyTuple_GET_SIZE(r) - 1; /* item of the list */
        if (j >= first)
            return item(PyTuple_GET_ITEM(r, first), LIST, j - first);
    }
    if (PyTuple_Check(r))
        return j < PyTuple_GET_SIZE(r) ? PyTuple_GET_ITEM(r, j) : NULL;
    if (PyList_Check(r))
        return j < PyList_GET_SIZE(r) ? PyList_GET_ITEM(r, j) : NULL;
    return NULL;
}

/* ---- calls that write */

typedef struct written {
    PyObject *few[FEW_INPUTS];
    /* [n_inputs] new references; a written input is the view to write */
    PyObject **in;
    PyObject *bases[KOILA__MAX_WRITES]; /* [n_bases] new references: the whole written tensors */
    uint32_t n_in, n_bases;
} written;

static void written_deinit(written *w)
{
    for (uint32_t i = 0; i < w->n_bases; i++)
        Py_DECREF(w->bases[i]);
    for (uint32_t i = 0; i < w->n_in; i++)
        Py_DECREF(w->in[i]);
    if (w->in != w->few)
        PyMem_Free(w->in);
}

static int written_init(written *w, const koila_sig_info *s, PyObject *const *inputs)
{
    koila_assert(s->n_writes <= KOILA__MAX_WRITES);
    w->n_in = w->n_bases = 0;
    w->in = s->n_inputs <= FEW_INPUTS ? w->few : PyMem_Malloc(s->n_inputs * sizeof *w->in);
    if (!w->in) {
        PyErr_NoMemory();
        return -1;
    }
    for (; w->n_in < s->n_inputs; w->n_in++)
        w->in[w->n_in] = Py_NewRef(inputs[w->n_in]);
    return 0;
}

/* Adds the base of one write. If its chain begins with as_strided, which may need a copy of the
 * base, that copy becomes the base, so that the write is not lost. */
static int add_base(written *w, const koila_write *write)
{
    PyObject **slot = &w->in[write->input];
    const koila_sig first = write->n_links ? write->links[0].sig : KOILA_NONE;
    const template *t = write->n_links ? template_of(first) : NULL;
    if (write->n_links && !t)
        return -1;
    PyObject *base = t && t->strided
                         ? as_recorded(*slot, koila_sig_get(koila__table, first)->inputs[0])
                         : Py_NewRef(*slot);
    if (!base)
        return -1;
    w->bases[w->n_bases] = base;
    w->n_bases++;
    Py_SETREF(*slot, Py_NewRef(base));
    return 0;
}

/* *slot := the view of it that one link makes. */
static int follow_link(PyObject **slot, koila_link link, const koila__call_fix *fix)
{
    const uint8_t kind = koila_sig_get(koila__table, link.sig)->result_kind;
    PyObject *all = invoke(link.sig, slot, fix, true);
    PyObject *view = all ? item(all, kind, link.output) : NULL;
    if (all && !view)
        PyErr_SetString(PyExc_SystemError, "koila: a view call did not return the recorded result");
    if (view)
        Py_SETREF(*slot, Py_NewRef(view));
    Py_XDECREF(all);
    return view ? 0 : -1;
}

static int follow_chains(written *w, const koila_sig_info *s, const koila__call_fix *link_fix)
{
    uint32_t at = 0; /* index over all links of all writes */
    for (uint32_t i = 0; i < s->n_writes; i++)
        if (add_base(w, &s->writes[i]) < 0)
            return -1;
    for (uint32_t i = 0; i < s->n_writes; i++)
        for (uint32_t k = 0; k < s->writes[i].n_links; k++, at++)
            if (follow_link(&w->in[s->writes[i].input], s->writes[i].links[k],
                            link_fix ? &link_fix[at] : NULL) < 0)
                return -1;
    return 0;
}

/* Does the view hold every entry of its base, each at its place? -1: exception set. */
static int is_all_of(PyObject *view, PyObject *base)
{
    koila_meta of_view, of_base;
    koila__hold_ids(); /* asking for the second may run Python */
    int is_all = -1;
    if (koila__meta_of(view, &of_view) == 0 && koila__meta_of(base, &of_base) == 0)
        is_all = koila__lie_alike(of_view, of_base);
    koila__release_ids();
    return is_all;
}

/* Is a tensor its memory conjugated, or negated? -1: exception set. */
static int is_lazily_changed(PyObject *t)
{
    int changed = 0;
    const char *const flags[] = { "is_conj", "is_neg" };
    for (uint32_t i = 0; i < 2 && !changed; i++) {
        PyObject *o = PyObject_CallMethod(t, flags[i], NULL);
        changed = o ? PyObject_IsTrue(o) : -1;
        Py_XDECREF(o);
    }
    return changed;
}

/* x.view(...).add_(x) in place: where the view is all of x, it is the operand too. Torch allows
 * operands that are the written memory, and knows them by their strides; those of a dimension of
 * one entry mean nothing, and differ in a slice. */
static int unite_operands(written *w, const koila_sig_info *s)
{
    for (uint32_t i = 0; i < s->n_writes; i++) {
        const koila_write *write = &s->writes[i];
        PyObject *view = w->in[write->input];
        for (uint32_t j = 0; j < w->n_in && write->n_links; j++) {
            if (w->in[j] != w->bases[i] || j == write->input)
                continue;
            const int is_all = is_all_of(view, w->in[j]);
            const int is_changed = is_all > 0 ? is_lazily_changed(view) : 0;
            if (is_all < 0 || is_changed < 0)
                return -1;
            if (is_all && !is_changed)
                Py_SETREF(w->in[j], Py_NewRef(view));
        }
    }
    return 0;
}

/* ---- results */

/* The j-th result that is not a written argument; borrowed. */
static PyObject *fresh_result(const koila_sig_info *s, PyObject *r, uint32_t j)
{
    const int8_t *source = NULL;
    if (!s->n_writes)
        return item(r, s->result_kind, j);
    const int n_results = koila__op_sources(s->op, &source);
    for (int k = 0; k < n_results && k < MAX_RESULTS; k++) {
        if (source[k] != SOURCE_FRESH)
            continue;
        if (j == 0)
            return item(r, n_results > 1, (uint32_t)k);
        j--;
    }
    return NULL;
}

/* Does result j stand for nothing? Some kernels leave a result without elements out: a recurrent
 * layer's workspace, in evaluation. */
static bool is_left_out(const koila_sig_info *s, uint32_t j, const PyObject *o)
{
    const koila_meta meta = s->outputs[j];
    return meta == KOILA_NONE ||
           (o == Py_None && koila_meta_get(koila__table, meta)->n_elements == 0);
}

static void not_as_recorded(const koila_sig_info *s)
{
    PyErr_Format(PyExc_SystemError, "koila: %s did not return the kind of result that was recorded",
                 koila_op_name(koila__table, s->op));
}

/* outputs[n_fresh] := new references of r's results; NULL for one that stands for nothing. */
static int take_fresh(const koila_sig_info *s, PyObject *r, PyObject **outputs)
{
    for (uint32_t j = 0; j < s->n_fresh; j++) {
        PyObject *o = fresh_result(s, r, j);
        const bool is_none = is_left_out(s, j, o);
        const bool is_lost = !is_none && (!o || !koila__is_tensor(o));
        if (is_lost || PyErr_Occurred()) {
            if (!PyErr_Occurred())
                not_as_recorded(s);
            while (j--)
                Py_CLEAR(outputs[j]); /* evaluates its argument twice */
            return -1;
        }
        outputs[j] = is_none ? NULL : Py_NewRef(o);
    }
    return 0;
}

/* ---- calls through torch's C ABI */

static bool may_be_direct = true;
static uint64_t n_direct;

uint64_t koila__direct_allow(bool may)
{
    may_be_direct = may;
    return n_direct;
}

/* Pieces of other slices are left out of a list (list_with_tensors()). */
static bool are_all_there(const koila_sig_info *s, PyObject *const *inputs)
{
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if (!inputs[i])
            return false;
    return true;
}

/* How they go there is looked for when a signature is called for the second time. */
static bool is_direct(template *t, const koila_sig_info *s)
{
    if (t->direct || t->is_refused)
        return !t->is_refused;
    if (!t->was_called) {
        t->was_called = true;
        return false;
    }
    koila__direct *d = t->strided ? NULL : koila__direct_new(s, t->constant); /* runs Python */
    if (t->direct)
        koila__direct_free(d); /* made meanwhile */
    else
        t->direct = d;
    t->is_refused |= !t->direct;
    return !t->is_refused;
}

/* A refused allocation that a test has planted fails the call, and so the one that is to tell how.
 */
static void plant_again(int64_t planted)
{
    if (planted && !koila__cpu_bytes_fails_in())
        koila__cpu_bytes_fail_nth(1);
}

/* What is left out is NULL, and all else a tensor. -1 with an exception: else nothing is left. */
static int check_outputs(const koila_sig_info *s, PyObject **outputs)
{
    bool all = true;
    for (uint32_t j = 0; j < s->n_outputs; j++) {
        if (is_left_out(s, j, outputs[j]))
            Py_CLEAR(outputs[j]);
        else
            all &= koila__is_tensor(outputs[j]);
    }
    for (uint32_t j = 0; j < s->n_outputs && !all; j++)
        Py_CLEAR(outputs[j]);
    if (!all)
        not_as_recorded(s);
    return all ? 0 : -1;
}

/* 1: done; 0: the call does not go there, or failed there; -1 with an exception. */
static int call_directly(koila_sig sig, const koila_sig_info *s, PyObject *const *inputs,
                         const koila__call_fix *fix, PyObject **outputs)
{
    const bool is_changed = fix && (fix->n_fix || fix->generator || fix->device);
    if (!may_be_direct || is_changed || !are_all_there(s, inputs))
        return 0;
    template *t = template_of(sig);
    if (!t)
        return -1;
    if (!is_direct(t, s))
        return 0;
    const uint8_t mode = koila__call_mode();
    if (mode != s->grad_mode && koila__set_call_mode(s->grad_mode) < 0)
        return -1;
    const int64_t planted = koila__cpu_bytes_fails_in();
    int done = koila__direct_call(t->direct, inputs, outputs);
    if (mode != s->grad_mode)
        give_mode_back(mode);
    n_direct += done > 0;
    if (done > 0)
        return check_outputs(s, outputs) < 0 ? -1 : 1;
    if (done == 0)
        plant_again(planted);
    t->is_refused |= done == 0 && ++t->n_failed == MOST_FAILED;
    return done;
}

int koila__call(koila_sig sig, PyObject *const *inputs, const koila__call_fix *fix,
                const koila__call_fix *link_fix, PyObject **outputs)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    if (!s->n_writes) {
        const int done = call_directly(sig, s, inputs, fix, outputs);
        if (done)
            return done < 0 ? -1 : 0;
        PyObject *r = invoke(sig, inputs, fix, false);
        const int status = r ? take_fresh(s, r, outputs) : -1;
        Py_XDECREF(r);
        return status;
    }
    written w;
    PyObject *r = NULL;
    if (written_init(&w, s, inputs) == 0 && follow_chains(&w, s, link_fix) == 0 &&
        unite_operands(&w, s) == 0)
        r = invoke(sig, w.in, fix, false);
    const int status = r ? take_fresh(s, r, outputs) : -1;
    for (uint32_t i = 0; i < s->n_writes && status == 0; i++)
        outputs[s->n_fresh + i] = Py_NewRef(w.bases[i]);
    Py_XDECREF(r);
    written_deinit(&w);
    return status;
}
