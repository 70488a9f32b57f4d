/* node.c — one call becomes one node.
 *
 * The arguments are walked once into tokens (the call's *signature*, tensors replaced by their
 * metas) and inputs (the tensors). The tokens are looked up in a memo that knows the interned
 * signature and what the results look like; then a node of 12 bytes is appended and the results
 * are wrapped. Only a call never seen before asks Python, see memo.c.
 *
 * Everything that a call needs lies on the C stack, because a miss runs Python, and Python may
 * come back here.
 */
#include "capture/record.h"

/* ---- which tape a call belongs to */

/* What to do with a call whose arguments were walked. */
typedef enum place { FAILED = -1, ON_TAPE, ON_REALS } place;

static bool is_batch_leaf(const koila__handle *h)
{
    const koila__group *g = h->group;
    const koila_value_info v = koila_value_get(g->tape->graph, g->cur);
    return v.node == KOILA_NONE && v.leaf_kind == KOILA_LEAF_BATCH;
}

/* The lazy arguments lie on several tapes (`mixed`), or all on `one`, which is closed. *to:
 * borrowed, the tape to record in, when the answer is ON_TAPE. */
static place choose_among(const call_walk *w, koila__tape *one, bool mixed, koila__tape **to)
{
    koila__tape *open = koila__tape_open();
    bool any_open = false, any_batch = false, concrete = true, baseless = false;
    for (uint32_t i = 0; i < w->n_in; i++) {
        koila__handle *h = w->in[i].h;
        if (!h)
            continue;
        any_open |= h->group->tape == open;
        baseless |= w->in[i].written && !h->group->tape->values[h->group->cur].real;
        any_batch |= is_batch_leaf(h);
        const koila_value v = koila__value_of(h);
        if (v == KOILA_NONE)
            return FAILED;
        concrete &= h->group->tape->values[v].real != NULL;
    }
    if (any_open)
        *to = open;
    else if (!any_batch && !w->n_written && (concrete || mixed))
        return ON_REALS;
    else if (!any_batch && !mixed && !(baseless && concrete))
        *to = one; /* not where the base of a written view has no value: the view leaves it */
    else
        *to = koila__tape_current();
    return *to ? ON_TAPE : FAILED;
}

/* All lazy arguments belong to tape `to` from now on, and w->tape is it. */
static int move_inputs(call_walk *w, koila__tape *to)
{
    int rc = 0;
    Py_INCREF(to);
    for (uint32_t i = 0; i < w->n_in && rc == 0; i++) {
        koila__handle *h = w->in[i].h;
        if (!h)
            continue;
        koila__tape *from = h->group->tape;
        Py_INCREF(from);
        rc = koila__tape_enter(from);
        if (rc == 0) {
            rc = koila__move_to(h, to);
            koila__tape_leave(from);
        }
        Py_DECREF(from);
        w->tok[w->in[i].token].u.id = h->meta;
    }
    w->tape = to;
    Py_DECREF(to); /* kept by the handles now in it, or by its context */
    return rc;
}

/* ON_TAPE: record in w->tape, to which every lazy argument now belongs. ON_REALS: all are concrete
 * and nobody writes. */
static place choose_tape(call_walk *w)
{
    koila__tape *one = NULL;
    bool mixed = false;
    for (uint32_t i = 0; i < w->n_in; i++) {
        koila__handle *h = w->in[i].h;
        if (!h)
            continue;
        if (!one)
            one = h->group->tape;
        mixed |= h->group->tape != one;
    }
    if (!one)
        one = koila__tape_current();
    if (!one)
        return FAILED;
    if (!mixed && !one->closed) {
        w->tape = one;
        return ON_TAPE;
    }
    koila__tape *to = NULL;
    const place where = choose_among(w, one, mixed, &to);
    return where == ON_TAPE && move_inputs(w, to) < 0 ? FAILED : where;
}

/* choose_tape(), and enters w->tape. Whoever had to wait for it chooses again: meanwhile a tensor
 * may have moved to another tape. */
static place take_turn(call_walk *w)
{
    for (;;) {
        const place where = choose_tape(w);
        if (where != ON_TAPE)
            return where;
        koila__tape *t = w->tape;
        Py_INCREF(t);
        const bool waits = koila__tape_is_busy(t);
        const int status = koila__tape_enter(t);
        if (status == 0 && waits)
            koila__tape_leave(t);
        Py_DECREF(t); /* kept by its handles, or by its context */
        if (status < 0)
            return FAILED;
        if (!waits)
            return ON_TAPE;
    }
}

/* A tensor could not become a leaf, an exception says why. Is it sparse or nested? Then the
 * operator runs now, on real tensors: gathered. -1 either way. */
static int not_dense(call_walk *w, PyObject *real)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *dense = koila__ask("is_dense", real, NULL, NULL);
    if (dense == Py_False)
        w->instead = koila__helper("value_dependent");
    Py_XDECREF(dense);
    if (w->instead) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    } else {
        PyErr_Restore(type, value, trace);
    }
    return -1;
}

/* The value of h was made, and what the user got of it (`z.torch()`) was written since: z has these
 * contents from now on. What was recorded from the old ones is stale. */
static int follow_write(koila__handle *h, koila_value *v)
{
    koila__tape *t = h->group->tape;
    PyObject *real = t->values[*v].real;
    uint32_t now;
    if (h->chain || *v != h->group->cur || koila_value_get(t->graph, *v).node == KOILA_NONE ||
        koila__version_of(real, &now) < 0 ||
        (now == t->values[*v].version && !koila__is_written_behind(t, *v)))
        return 0;
    *v = koila__tape_leaf_new(t, real, h->meta, KOILA_LEAF_REAL, 0, 0);
    if (*v == KOILA_NONE)
        return -1;
    koila__group_written(h->group, *v);
    return koila__value_of(h) == KOILA_NONE ? -1 : 0;
}

static int resolve_inputs(call_walk *w)
{
    for (uint32_t i = 0; i < w->n_in; i++) {
        call_input *in = &w->in[i];
        koila__handle *h = in->h;
        if (h) {
            in->value =
                h->gen == h->group->gen && h->value != KOILA_NONE ? h->value : koila__value_of(h);
            if (in->value != KOILA_NONE && w->tape->values[in->value].real &&
                follow_write(h, &in->value) < 0)
                return -1;
        } else {
            koila_meta m;
            in->value = koila__tape_leaf_real(w->tape, in->object, &m);
            w->tok[in->token].u.id = m;
        }
        if (in->value == KOILA_NONE)
            return h ? -1 : not_dense(w, in->object);
    }
    return 0;
}

/* ---- recording */

static PyObject *give(const memo_result *r, koila__tape *t, koila_value v, koila__handle *view_of,
                      bool strided, koila_link link)
{
    if (!view_of) {
        koila__group *g = koila__group_new(t, v, r->meta);
        if (!g)
            return NULL;
        PyObject *w = koila__wrapper_new(g, NULL, v, r->meta, 0);
        if (!w)
            koila__group_free(g);
        return w;
    }
    koila__group *g = view_of->group;
    if (!g || g->tape != t)
        return koila__moved_meanwhile();
    const int64_t offset = r->offset + (strided ? 0 : view_of->offset);
    koila__chain *c =
        koila__chain_new(strided ? NULL : view_of->chain, link, r->meta, offset, g->gen, v);
    if (!c)
        return NULL;
    c->refs++;
    const bool is_data = view_of->is_data;
    PyObject *w = koila__wrapper_new(g, c, v, r->meta, offset);
    koila__chain_release(c);
    if (w)
        koila__handle_of(w)->is_data = is_data;
    return w;
}

/* The results as the call returns them; steals the items. */
static PyObject *pack(uint8_t kind, PyObject **items, uint32_t n)
{
    if (kind == RESULT_ONE && n == 1)
        return items[0];
    if (kind == RESULT_NONE) {
        koila_assert(n == 0);
        Py_RETURN_NONE;
    }
    PyObject *r = kind == RESULT_LIST ? PyList_New(n) : PyTuple_New(n);
    for (uint32_t i = 0; i < n; i++) {
        if (!r)
            Py_DECREF(items[i]);
        else if (kind == RESULT_LIST)
            PyList_SET_ITEM(r, i, items[i]);
        else
            PyTuple_SET_ITEM(r, i, items[i]);
    }
    return r;
}

/* The same for a call of op. Its last result may be a list, whose items are the last ones. */
static PyObject *pack_of(const op_info *op, uint8_t kind, PyObject **items, uint32_t n)
{
    if (kind != RESULT_ENDS_IN_LIST)
        return pack(kind, items, n);
    const uint32_t first = op->n_results - 1u; /* item of the list */
    koila_assert(op->n_results > 0 && first <= n);
    PyObject *list = pack(RESULT_LIST, items + first, n - first);
    PyObject *r = list ? PyTuple_New((Py_ssize_t)first + 1) : NULL;
    for (uint32_t i = 0; i < first; i++) {
        if (r)
            PyTuple_SET_ITEM(r, i, items[i]);
        else
            Py_DECREF(items[i]);
    }
    if (r)
        PyTuple_SET_ITEM(r, first, list);
    else
        Py_XDECREF(list);
    return r;
}

/* The written arguments, as the schema's results name them. */
static PyObject *give_written(const op_info *op, PyObject *args, PyObject *kwargs, PyObject **fresh,
                              uint32_t n_fresh)
{
    PyObject *items[8];
    uint32_t n = 0, at = 0;
    for (int j = 0; j < op->n_results && j < 8; j++) {
        const int s = op->source[j];
        PyObject *o = NULL;
        if (s >= 0)
            o = Py_XNewRef(s < PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, s) : NULL);
        else if (s <= -2)
            o = Py_XNewRef(kwargs ? PyDict_GetItem(kwargs, PyTuple_GET_ITEM(op->written_kw, -2 - s))
                                  : NULL);
        else if (at < n_fresh)
            o = fresh[at++];
        items[n++] = o ? o : Py_NewRef(Py_None);
    }
    while (at < n_fresh)
        Py_DECREF(fresh[at++]);
    if (n == 0)
        Py_RETURN_NONE;
    return pack(n == 1 ? RESULT_ONE : RESULT_TUPLE, items, n);
}

static int check_strided(const koila__group *g, const memo_result *r)
{
    const koila_meta_info *base = koila_meta_get(koila__table, g->meta);
    const koila_meta_info *m = koila_meta_get(koila__table, r->meta);
    const uint64_t bytes = koila_dtype_bytes(base->dtype);
    if (r->offset < 0 || (m->n_storage_bytes && (uint64_t)r->offset * bytes + m->n_storage_bytes >
                                                    base->n_storage_bytes)) {
        koila__unsupported("as_strided: storage offset %lld and %llu bytes are out of bounds for "
                           "the lazy tensor's %llu bytes",
                           (long long)r->offset, (unsigned long long)m->n_storage_bytes,
                           (unsigned long long)base->n_storage_bytes);
        return -1;
    }
    return 0;
}

static bool grad_required(PyObject *tensor)
{
    return koila__grad_mode() && koila__requires_grad(tensor);
}

/* ---- what cannot be recorded */

/* as_strided reads the storage, that is the base. */
static int read_base(call_walk *w, PyObject *args)
{
    koila__handle *h = w->n_in ? w->in[0].h : NULL;
    if (!h)
        return 0;
    if (koila_meta_get(koila__table, h->meta)->dtype !=
        koila_meta_get(koila__table, h->group->meta)->dtype) {
        koila__unsupported(
            "as_strided of a lazy view with another dtype than its memory has (.real, "
            "view_as_real, view(dtype)) counts elements that are not there. Use "
            "slices, or a clone() of the view");
        return -1;
    }
    if (h->chain && grad_required(w->in[0].object)) {
        PyObject *f = koila__helper("check_strided");
        PyObject *ok = f ? PyObject_CallObject(f, args) : NULL;
        Py_XDECREF(f);
        if (!ok)
            return -1;
        Py_DECREF(ok);
    }
    w->in[0].value = h->group->cur;
    w->tok[w->in[0].token].u.id = h->group->meta;
    return 0;
}

/* Written input i and those before it must not share memory. */
static int check_written_twice(const call_walk *w, const op_info *op, uint32_t i)
{
    for (uint32_t j = 0; j < i; j++)
        if (w->in[j].written && w->in[j].h->group == w->in[i].h->group) {
            koila__unsupported("%s writes two lazy tensors that share memory",
                               koila_op_name(koila__table, op->id));
            return -1;
        }
    return 0;
}

/* The real numbers of a conjugate are no view of its base's: one of the two parts is negated. */
static int check_written_conjugate(const op_info *op, const koila__chain *c)
{
    for (; c; c = c->parent)
        if ((koila__facts_of(c->link.sig) & KOILA_FACT_AS_REAL) &&
            koila__chain_conjugated(c->parent)) {
            koila__unsupported(
                "%s writes through .real, .imag or view_as_real of a lazy conjugate view. Copy "
                "it first, with .clone(), or write into what it is the conjugate of",
                koila_op_name(koila__table, op->id));
            return -1;
        }
    return 0;
}

/* x.add_(x): an element may be read when it was written as another one. */
static int check_apart_from_itself(const op_info *op, const koila__handle *h, PyObject *x)
{
    if (koila_meta_is_dense(koila_meta_get(koila__table, h->meta)))
        return 0;
    PyObject *ok = koila__ask("check_apart_from_itself", op->func, x, NULL);
    Py_XDECREF(ok);
    return ok ? 0 : -1;
}

/* x.add_(a view of x), x.addmm_(x, x): eager refuses some of these. */
static int check_written_overlap(const call_walk *w, const op_info *op, uint32_t i, PyObject *args,
                                 PyObject *kwargs)
{
    const koila__handle *a = w->in[i].h;
    for (uint32_t j = 0; j < w->n_in; j++) {
        const koila__handle *b = w->in[j].h;
        if (w->in[j].written || !b || b->group != a->group)
            continue;
        if (op->elementwise && b->offset == a->offset && b->meta == a->meta) {
            if (check_apart_from_itself(op, a, w->in[i].object) < 0)
                return -1;
            continue;
        }
        PyObject *ok = koila__ask("check_overlap", op->func, args, kwargs);
        if (!ok)
            return -1;
        Py_DECREF(ok);
        ok = koila__ask("check_shared", op->func, w->in[i].object, w->in[j].object);
        if (!ok)
            return -1;
        Py_DECREF(ok);
    }
    return 0;
}

static int check_writes(const call_walk *w, const op_info *op, PyObject *args, PyObject *kwargs)
{
    for (uint32_t i = 0; i < w->n_in; i++)
        if (w->in[i].written && check_written_twice(w, op, i) < 0)
            return -1;
    for (uint32_t i = 0; i < w->n_in; i++)
        if (w->in[i].written && check_written_conjugate(op, w->in[i].h->chain) < 0)
            return -1;
    for (uint32_t i = 0; i < w->n_in; i++)
        if (w->in[i].written && check_written_overlap(w, op, i, args, kwargs) < 0)
            return -1;
    return 0;
}

/* A view of a tensor whose step has run is plain, and would not see the write. */
static int check_plain_views(const koila__handle *h, PyObject *func)
{
    const koila__group *g = h->group;
    if (!g || !g->has_plain_views)
        return 0;
    PyObject *real = g->tape->values[g->cur].real;
    if (!real && h->value != KOILA_NONE)
        real = g->tape->values[h->value].real;
    if (!real)
        return 0;
    Py_INCREF(real);
    PyObject *ok = koila__ask("check_plain_views", func, real, NULL);
    Py_DECREF(real);
    Py_XDECREF(ok);
    return ok ? 0 : -1;
}

/* After eager's own refusals, which come with the shapes. */
static int check_written_groups(const call_walk *w, const op_info *op)
{
    for (uint32_t i = 0; i < w->n_in && w->n_written; i++)
        if (w->in[i].written && (koila__group_check_write(w->in[i].h->group, op->func) < 0 ||
                                 check_plain_views(w->in[i].h, op->func) < 0))
            return -1;
    return 0;
}

/* ---- recording */

/* What the memo says of a call, copied: whatever runs Python (the user's line, a new wrapper) may
 * clear the memo. */
enum { FEW_RESULTS = 8, MOST_TRIES = 100 };
typedef struct outcome {
    koila_sig sig;
    uint32_t n;
    uint8_t result_kind;
    bool no_inputs;
    PyObject *fill;       /* owned, or NULL */
    memo_result *results; /* [n], constants owned */
    PyObject **items;     /* [n] owned: the results themselves; NULL until made */
    memo_result few_results[FEW_RESULTS];
    PyObject *few_items[FEW_RESULTS];
} outcome;

/* On failure there is nothing to free. */
static int outcome_copy(outcome *c, const memo_entry *e)
{
    const uint32_t n = e->n_results;
    const bool few = n <= FEW_RESULTS;
    c->results = few ? c->few_results : PyMem_Malloc(n * sizeof *c->results);
    c->items = few ? c->few_items : PyMem_Malloc(n * sizeof *c->items);
    if (!c->results || !c->items) {
        PyMem_Free(c->results);
        PyMem_Free(c->items);
        PyErr_NoMemory();
        return -1;
    }
    c->sig = e->sig;
    c->n = n;
    c->result_kind = e->result_kind;
    c->no_inputs = e->no_inputs;
    c->fill = Py_XNewRef(e->fill);
    for (uint32_t j = 0; j < n; j++) {
        c->results[j] = e->results[j];
        Py_XINCREF(c->results[j].constant);
        c->items[j] = NULL;
    }
    return 0;
}

/* The items are not touched: they were given away, or freed. */
static void outcome_free(outcome *c)
{
    for (uint32_t j = 0; j < c->n; j++)
        Py_XDECREF(c->results[j].constant);
    if (c->results != c->few_results)
        PyMem_Free(c->results);
    if (c->items != c->few_items)
        PyMem_Free(c->items);
    Py_XDECREF(c->fill);
}

/* The entry of this call: remembered, or made. NULL with an exception, or with w->instead. */
static memo_entry *find_entry(call_walk *w, const op_info *op, PyObject *args, PyObject *kwargs)
{
    const uint8_t mode = koila__call_mode();
    uint32_t n_key;
    if (koila__memo_key(w, op, mode, &n_key) < 0)
        return NULL;
    const uint64_t hash = koila__memo_hash(w->tok, n_key);
    memo_entry *e = koila__memo_find(w->tok, n_key, hash);
    return e ? e : koila__memo_miss(w, op, args, kwargs, mode, n_key, hash);
}

static int append_node(const call_walk *w, const outcome *c, uint32_t line, koila_value *first_out)
{
    koila_value few[KOILA__N_INPUTS], *inputs = few;
    koila__tape *t = w->tape;
    if (w->n_in > KOILA__N_INPUTS) {
        inputs = PyMem_Malloc(w->n_in * sizeof *inputs);
        if (!inputs) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (uint32_t i = 0; i < w->n_in; i++)
        inputs[i] = w->in[i].written ? w->in[i].h->group->cur : w->in[i].value;
    const koila_status s =
        koila_graph_node(t->graph, c->sig, c->no_inputs ? NULL : inputs, line, first_out);
    if (inputs != few)
        PyMem_Free(inputs);
    if (s) {
        koila__raise(s);
        return -1;
    }
    return koila__tape_reserve(t);
}

static int make_items(const call_walk *w, const op_info *op, outcome *c, koila_value first_out)
{
    koila__handle *first = w->n_in ? w->in[0].h : NULL;
    const bool strided = op->kind == STRIDED;
    if (strided && first && check_strided(first->group, &c->results[0]) < 0)
        return -1;
    for (uint32_t j = 0; j < c->n; j++) {
        const memo_result *m = &c->results[j];
        if (m->meta == KOILA_NONE)
            c->items[j] = Py_NewRef(m->constant);
        else
            c->items[j] = give(m, w->tape, first_out + j, op->is_view || strided ? first : NULL,
                               strided, (koila_link){ c->sig, j });
        if (c->items[j])
            continue;
        while (j--)
            Py_CLEAR(c->items[j]);
        return -1;
    }
    return 0;
}

/* `made` must be filled, by (func, args after it, kwargs). Steals `made` and gives it back. */
static PyObject *fill_factory(PyObject *made, PyObject *fill)
{
    PyObject *func, *rest, *kw, *done = NULL;
    if (PyArg_ParseTuple(fill, "OO!O!", &func, &PyTuple_Type, &rest, &PyDict_Type, &kw)) {
        PyObject *self = PyTuple_Pack(1, made);
        PyObject *all = self ? PySequence_Concat(self, rest) : NULL;
        if (all)
            done = koila__ask("redispatch", func, all, kw);
        Py_XDECREF(all);
        Py_XDECREF(self);
    }
    if (!done)
        Py_CLEAR(made);
    Py_XDECREF(done);
    return made;
}

/* The written groups have new values, and the call gives what its schema says. Takes the items. */
static PyObject *finish_call(const call_walk *w, const op_info *op, outcome *c,
                             koila_value first_out, PyObject *args, PyObject *kwargs)
{
    if (w->n_written) {
        koila_value written = first_out + c->n;
        for (uint32_t i = 0; i < w->n_in; i++)
            if (w->in[i].written) {
                w->tape->odd_backward |= w->in[i].h->is_data;
                koila__group_written(w->in[i].h->group, written++);
            }
        return give_written(op, args, kwargs, c->items, c->n);
    }
    PyObject *r = pack_of(op, c->result_kind, c->items, c->n);
    return c->fill && r ? fill_factory(r, c->fill) : r;
}

/* A call whose results all are constants: no node. */
static PyObject *give_constants(const op_info *op, const memo_entry *e)
{
    PyObject *items[64];
    const uint32_t n = e->n_results < 64 ? e->n_results : 64;
    for (uint32_t i = 0; i < n; i++)
        items[i] = Py_NewRef(e->results[i].constant);
    return pack_of(op, e->result_kind, items, n);
}

static PyObject *record_on_tape(call_walk *w, const op_info *op, PyObject *args, PyObject *kwargs)
{
    memo_entry *e = NULL;
    if (resolve_inputs(w) == 0 && (op->kind != STRIDED || read_base(w, args) == 0) &&
        (!w->n_written || check_writes(w, op, args, kwargs) == 0))
        e = find_entry(w, op, args, kwargs);
    if (!e && w->again)
        return NULL;
    if (!e && w->instead)
        return PyObject_CallFunctionObjArgs(w->instead, op->func, args, kwargs, NULL);
    if (!e)
        return NULL;
    if (e->no_node)
        return give_constants(op, e);
    outcome c;
    koila_value first_out;
    PyObject *r = NULL;
    if (outcome_copy(&c, e) < 0)
        return NULL;
    const uint32_t line = koila__line_now(w->tape);
    const bool may_write = check_written_groups(w, op) == 0;
    w->again = may_write && !koila__walk_holds(w);
    if (may_write && !w->again && append_node(w, &c, line, &first_out) == 0 &&
        make_items(w, op, &c, first_out) == 0)
        r = finish_call(w, op, &c, first_out, args, kwargs);
    outcome_free(&c);
    return r;
}

/* *again: nothing was recorded, for the inputs changed meanwhile, and no exception is set. */
static PyObject *record_once(const op_info *op, PyObject *args, PyObject *kwargs, bool *again)
{
    call_walk w;
    PyObject *r = NULL;
    koila__walk_init(&w);
    if (koila__walk_call(&w, op, args, kwargs) < 0)
        goto done;
    if (w.n_written_real) {
        r = koila__ask("write_real", op->func, args, kwargs);
        goto done;
    }
    const place where = take_turn(&w);
    if (where == ON_REALS) {
        for (uint32_t i = 0; i < w.n_in && (op->is_view || op->kind == STRIDED); i++)
            if (w.in[i].h && w.in[i].h->group)
                w.in[i].h->group->has_plain_views = true;
        r = koila__ask("run_on_reals", op->func, args, kwargs);
    } else if (where == ON_TAPE) {
        koila__tape *t = w.tape;
        Py_INCREF(t);
        r = record_on_tape(&w, op, args, kwargs);
        koila__tape_leave(t);
        if (t->left_meanwhile)
            koila__step_left(t);
        Py_DECREF(t);
    }
done:
    *again = w.again;
    koila__walk_deinit(&w);
    return r;
}

PyObject *koila__record_call(const op_info *op, PyObject *args, PyObject *kwargs)
{
    for (int k = 0; k < MOST_TRIES; k++) {
        bool again;
        koila__hold_ids();
        PyObject *r = record_once(op, args, kwargs, &again);
        koila__release_ids();
        if (!again)
            return r;
    }
    koila__unsupported(
        "%s: whenever it is recorded, Python code runs inside (a finaliser, a callback "
        "of the garbage collector) and writes its arguments",
        koila_op_name(koila__table, op->id));
    return NULL;
}

/* ---- views */

static PyObject *same(PyObject *args)
{
    PyObject *self = PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, 0) : NULL;
    if (!self || !koila__is_lazy(self))
        return Py_XNewRef(self);
    koila__handle *h = koila__handle_of(self);
    const koila_value v = koila__value_of(h);
    if (v == KOILA_NONE)
        return NULL;
    koila__hold_ids();
    const bool is_data = h->is_data;
    PyObject *r = koila__wrapper_new(h->group, h->chain, v, h->meta, h->offset);
    koila__release_ids();
    if (r)
        koila__handle_of(r)->is_data = is_data;
    return r;
}

static bool is_inference(PyObject *args)
{
    PyObject *self = PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, 0) : NULL;
    return self && koila__is_lazy(self) && koila__handle_of(self)->is_inference;
}

/* In inference mode a view of a normal tensor is a normal tensor: its wrapper is made outside that
 * mode. Outside it a view of an inference tensor is one: its wrapper is made inside. The mode is
 * left here, not in Python, where Ctrl-C could come between leaving it and
 * knowing that. */
PyObject *koila__record_view(const op_info *op, PyObject *args, PyObject *kwargs)
{
    PyObject *context = Py_None, *type, *value, *trace;
    const bool inside = koila__maybe_inference();
    if (PyTuple_GET_SIZE(args) && (inside || op->kind != SAME) && inside != is_inference(args)) {
        context = koila__ask("inference_as", PyTuple_GET_ITEM(args, 0), NULL, NULL);
        PyObject *entered = NULL;
        if (context && context != Py_None)
            entered = PyObject_CallMethod(context, "__enter__", NULL);
        if (!context || (context != Py_None && !entered)) {
            Py_XDECREF(context);
            return NULL;
        }
        Py_XDECREF(entered);
    } else {
        Py_INCREF(context);
    }
    PyObject *r = op->kind == SAME ? same(args) : koila__record_call(op, args, kwargs);
    if (context != Py_None) {
        PyErr_Fetch(&type, &value, &trace);
        PyObject *ok = PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None);
        if (!ok)
            PyErr_Clear();
        Py_XDECREF(ok);
        PyErr_Restore(type, value, trace);
    }
    Py_DECREF(context);
    return r;
}

PyObject *koila__record(PyObject *func, PyObject *args, PyObject *kwargs)
{
    op_info *op = koila__op_of(func);
    if (!op)
        return NULL;
    if (op->is_view || op->kind == SAME || op->kind == STRIDED)
        return koila__record_view(op, args, kwargs);
    return koila__record_call(op, args, kwargs);
}
