/* capture.c — one dispatched operator becomes one node.
 *
 * torch calls koila._core.dispatch(func, types, args, kwargs) for every ATen operator that meets a
 * LazyTensor, below autograd, forward and backward alike. The arguments are walked once into tokens
 * (the call's *signature*, tensors replaced by their metas) and inputs (the tensors). The tokens
 * are looked up in a memo that knows the interned signature and what the results look like; then a
 * node of 12 bytes is appended and the results are wrapped. Only a call never seen before asks
 * Python, which asks FakeTensor what comes out: the plain meta kernels give wrong strides for some
 * operators.
 *
 * Everything the walk needs lies on the C stack, because a miss runs Python, and Python may come
 * back here.
 */
#include "capture/record.h"

/* ---- which tape a call belongs to */

static bool is_batch_leaf(const koila__handle *h)
{
    const koila__group *g = h->group;
    const koila_value_info v = koila_value_get(g->tape->graph, g->cur);
    return v.node == KOILA_NONE && v.leaf_kind == KOILA_LEAF_BATCH;
}

/* 0: record in w->tape, to which every lazy argument now belongs. 1: all are concrete and nobody
 * writes: run on the real tensors. -1: error. */
static int choose_tape(call_walk *w, const op_info *op)
{
    koila__tape *one = NULL;
    bool mixed = false;
    for (uint32_t i = 0; i < w->n_in; i++)
        if (w->in[i].h) {
            koila__tape *t = w->in[i].h->group->tape;
            if (!one)
                one = t;
            else if (t != one)
                mixed = true;
        }
    if (one && !mixed && !one->closed) {
        w->tape = one;
        return 0;
    }
    if (!one) {
        w->tape = koila__tape_current();
        return w->tape ? 0 : -1;
    }
    koila__tape *open = koila__open && !koila__open->closed ? koila__open : NULL;
    koila__tape *to = NULL;
    bool any_leaf = false, concrete = true;
    for (uint32_t i = 0; i < w->n_in; i++)
        if (w->in[i].h) {
            koila__handle *h = w->in[i].h;
            if (h->group->tape == open)
                to = open;
            if (is_batch_leaf(h))
                any_leaf = true;
            const koila_value v = koila__value_of(h);
            if (v == KOILA_NONE)
                return -1;
            if (!h->group->tape->values[v].real)
                concrete = false;
        }
    if (!to && any_leaf)
        to = koila__tape_current();
    else if (!to && concrete && !w->n_written)
        return 1;
    else if (!to && !mixed)
        to = one;
    else if (!to && !w->n_written)
        return 1;
    else if (!to)
        to = koila__tape_current();
    if (!to)
        return -1;
    Py_INCREF(to);
    for (uint32_t i = 0; i < w->n_in; i++) {
        if (!w->in[i].h)
            continue;
        if (koila__move_to(w->in[i].h, to) < 0) {
            Py_DECREF(to);
            return -1;
        }
        w->tok[w->in[i].token].u.id = w->in[i].h->meta;
    }
    w->tape = to;
    Py_DECREF(to); /* kept by the handles now in it, or by koila__open */
    return 0;
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

static int resolve_inputs(call_walk *w)
{
    for (uint32_t i = 0; i < w->n_in; i++) {
        call_input *in = &w->in[i];
        koila__handle *h = in->h;
        if (h) {
            in->value =
                h->gen == h->group->gen && h->value != KOILA_NONE ? h->value : koila__value_of(h);
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
    const int64_t offset = r->offset + (strided ? 0 : view_of->offset);
    koila__chain *c =
        koila__chain_new(strided ? NULL : view_of->chain, link, r->meta, offset, g->gen, v);
    if (!c)
        return NULL;
    c->refs++;
    PyObject *w = koila__wrapper_new(g, c, v, r->meta, offset);
    koila__chain_release(c);
    return w;
}

static PyObject *pack(uint8_t kind, PyObject **items, uint32_t n)
{ /* steals the items */
    if (kind == 0 && n == 1)
        return items[0];
    PyObject *r = kind == 2 ? PyList_New(n) : PyTuple_New(n);
    for (uint32_t i = 0; i < n; i++) {
        if (!r)
            Py_DECREF(items[i]);
        else if (kind == 2)
            PyList_SET_ITEM(r, i, items[i]);
        else
            PyTuple_SET_ITEM(r, i, items[i]);
    }
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
    return pack(n == 1 ? 0 : 1, items, n);
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
    if (!koila__grad_mode())
        return false;
    PyObject *r = PyObject_GetAttrString(tensor, "requires_grad");
    const bool yes = r == Py_True;
    Py_XDECREF(r);
    PyErr_Clear();
    return yes;
}

static PyObject *run_on_reals(const op_info *op, PyObject *args, PyObject *kwargs)
{
    return koila__ask("run_on_reals", op->func, args, kwargs);
}

static PyObject *record(const op_info *op, PyObject *args, PyObject *kwargs)
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
    const int where = choose_tape(&w, op);
    if (where < 0)
        goto done;
    if (where > 0) {
        r = run_on_reals(op, args, kwargs);
        goto done;
    }
    koila__tape *t = w.tape;
    Py_INCREF(t);
    if (resolve_inputs(&w) < 0) {
        if (w.instead)
            r = PyObject_CallFunctionObjArgs(w.instead, op->func, args, kwargs, NULL);
        goto leave;
    }
    koila__handle *first = w.n_in ? w.in[0].h : NULL;
    if (op->kind == STRIDED && first) { /* it reads the storage, that is the base */
        if (first->chain && grad_required(w.in[0].object)) {
            PyObject *f = koila__helper("check_strided");
            PyObject *ok = f ? PyObject_CallObject(f, args) : NULL;
            Py_XDECREF(f);
            if (!ok)
                goto leave;
            Py_DECREF(ok);
        }
        const koila_value base = first->group->cur;
        w.in[0].value = base;
        w.tok[w.in[0].token].u.id = first->group->meta;
    }
    for (uint32_t i = 0; w.n_written && i < w.n_in; i++) {
        if (!w.in[i].written)
            continue;
        for (uint32_t j = 0; j < i; j++)
            if (w.in[j].written && w.in[j].h->group == w.in[i].h->group) {
                koila__unsupported("%s writes two lazy tensors that share memory",
                                   koila_op_name(koila__table, op->id));
                goto leave;
            }
    }
    /* a conjugate's real numbers are no view of the base's: one of the two is negative */
    for (uint32_t i = 0; w.n_written && i < w.n_in; i++) {
        const koila__chain *c = w.in[i].written ? w.in[i].h->chain : NULL;
        for (; c; c = c->parent)
            if (strcmp(koila_op_name(koila__table, koila_sig_get(koila__table, c->link.sig)->op),
                       "aten::view_as_real") == 0 &&
                koila__chain_conjugated(c->parent)) {
                koila__unsupported(
                    "%s writes through .real, .imag or view_as_real of a lazy conjugate view. Copy "
                    "it first, with .clone(), or write into what it is the conjugate of",
                    koila_op_name(koila__table, op->id));
                goto leave;
            }
    }
    /* x.add_(a view of x), x.addmm_(x, x): eager refuses some of these */
    for (uint32_t i = 0; w.n_written && i < w.n_in; i++) {
        const koila__handle *a = w.in[i].h;
        for (uint32_t j = 0; w.in[i].written && j < w.n_in; j++) {
            const koila__handle *b = w.in[j].h;
            if (w.in[j].written || !b || b->group != a->group ||
                (op->elementwise && b->offset == a->offset && b->meta == a->meta))
                continue;
            PyObject *ok = koila__ask("check_overlap", op->func, args, kwargs);
            if (!ok)
                goto leave;
            Py_DECREF(ok);
            ok = koila__ask("check_shared", op->func, w.in[i].object, w.in[j].object);
            if (!ok)
                goto leave;
            Py_DECREF(ok);
        }
    }
    const bool grad = koila__grad_mode();
    uint32_t n_key;
    if (koila__memo_key(&w, op, grad, &n_key) < 0)
        goto leave;
    const uint64_t hash = koila__memo_hash(w.tok, n_key);
    memo_entry *e = koila__memo_find(w.tok, n_key, hash);
    if (!e && !(e = koila__memo_miss(&w, op, args, kwargs, grad, n_key, hash))) {
        if (w.instead)
            r = PyObject_CallFunctionObjArgs(w.instead, op->func, args, kwargs, NULL);
        goto leave;
    }
    if (e->no_node) {
        PyObject *items[64];
        const uint32_t n = e->n_results < 64 ? e->n_results : 64;
        for (uint32_t i = 0; i < n; i++)
            items[i] = Py_NewRef(e->results[i].constant);
        r = e->result_kind == 3 ? Py_NewRef(Py_None) : pack(e->result_kind, items, n);
        goto leave;
    }
    koila_value values[KOILA__N_INPUTS], *input_values = values, first_out;
    if (w.n_in > KOILA__N_INPUTS && !(input_values = PyMem_Malloc(w.n_in * sizeof *input_values))) {
        PyErr_NoMemory();
        goto leave;
    }
    for (uint32_t i = 0; i < w.n_in; i++)
        input_values[i] = w.in[i].written ? w.in[i].h->group->cur : w.in[i].value;
    const koila_status s = koila_graph_node(t->graph, e->sig, e->no_inputs ? NULL : input_values,
                                            koila__line_now(t), &first_out);
    if (input_values != values)
        PyMem_Free(input_values);
    if (s) {
        koila__raise(s);
        goto leave;
    }
    if (koila__tape_reserve(t) < 0)
        goto leave;

    /* results; making a wrapper can run Python (the collector), which can clear the memo: copy what
     * is needed */
    const uint32_t n = e->n_results;
    const uint8_t result_kind = e->result_kind;
    const koila_sig sig = e->sig;
    PyObject *fill = Py_XNewRef(e->fill);
    memo_result few[8], *results = n <= 8 ? few : PyMem_Malloc(n * sizeof *results);
    PyObject *some[8], **items = n <= 8 ? some : PyMem_Malloc(n * sizeof *items);
    bool ok = results && items;
    if (ok) {
        for (uint32_t j = 0; j < n; j++) {
            results[j] = e->results[j];
            Py_XINCREF(results[j].constant);
        }
        if (op->kind == STRIDED && first && check_strided(first->group, &results[0]) < 0)
            ok = false;
        for (uint32_t j = 0; j < n; j++)
            items[j] = NULL;
        for (uint32_t j = 0; j < n && ok; j++) {
            if (results[j].meta == KOILA_NONE)
                items[j] = Py_NewRef(results[j].constant);
            else
                items[j] = give(&results[j], t, first_out + j,
                                op->is_view || op->kind == STRIDED ? first : NULL,
                                op->kind == STRIDED, (koila_link){ sig, j });
            if (!items[j])
                ok = false;
        }
    } else {
        PyErr_NoMemory();
    }
    if (ok && w.n_written) {
        uint32_t k = 0;
        for (uint32_t i = 0; i < w.n_in; i++)
            if (w.in[i].written)
                koila__group_written(w.in[i].h->group, first_out + n + k++);
        r = give_written(op, args, kwargs, items, n);
    } else if (ok && result_kind == 3) {
        r = Py_NewRef(Py_None);
    } else if (ok) {
        r = pack(result_kind, items, n);
    } else if (items) {
        for (uint32_t j = 0; j < n; j++)
            Py_XDECREF(items[j]);
    }
    if (results)
        for (uint32_t j = 0; j < n; j++)
            Py_XDECREF(results[j].constant);
    if (results != few)
        PyMem_Free(results);
    if (items != some)
        PyMem_Free(items);
    /* a factory that must be filled: (func, args, kwargs) with the fresh tensor in front */
    if (fill && r) {
        PyObject *func, *rest, *kw;
        if (PyArg_ParseTuple(fill, "OO!O!", &func, &PyTuple_Type, &rest, &PyDict_Type, &kw)) {
            PyObject *self = PyTuple_Pack(1, r);
            PyObject *all = self ? PySequence_Concat(self, rest) : NULL;
            PyObject *done = NULL;
            if (all)
                done = koila__ask("redispatch", func, all, kw);
            if (!done)
                Py_CLEAR(r);
            Py_XDECREF(done);
            Py_XDECREF(all);
            Py_XDECREF(self);
        } else {
            Py_CLEAR(r);
        }
    }
    Py_XDECREF(fill);
leave:
    Py_DECREF(t);
done:
    koila__walk_deinit(&w);
    return r;
}

static PyObject *same(PyObject *args)
{
    PyObject *self = PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, 0) : NULL;
    if (!self || !koila__is_lazy(self))
        return Py_XNewRef(self);
    koila__handle *h = koila__handle_of(self);
    const koila_value v = koila__value_of(h);
    if (v == KOILA_NONE)
        return NULL;
    return koila__wrapper_new(h->group, h->chain, v, h->meta, h->offset);
}

/* index(self, indices, ...): is one of them a mask, or could the first be the row numbers of self?
 */
static bool index_is_special(PyObject *args)
{
    PyObject *list = PyTuple_GET_SIZE(args) > 1 ? PyTuple_GET_ITEM(args, 1) : NULL;
    PyObject *self = list ? PyTuple_GET_ITEM(args, 0) : NULL;
    if (!list || !(PyList_Check(list) || PyTuple_Check(list)))
        return false;
    const koila_meta_info *rows =
        koila__is_lazy(self) ? koila_meta_get(koila__table, koila__handle_of(self)->meta) : NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
        PyObject *o = PySequence_Fast_GET_ITEM(list, i);
        if (o == Py_None || !koila__is_tensor(o))
            continue;
        koila_meta m;
        if (koila__is_lazy(o))
            m = koila__handle_of(o)->meta;
        else if (koila__meta_of(o, &m) < 0) {
            PyErr_Clear();
            return false;
        }
        const koila_meta_info *index = koila_meta_get(koila__table, m);
        if (index->dtype == KOILA_DTYPE_BOOL || index->dtype == KOILA_DTYPE_U8)
            return true;
        if (i == 0 && rows && rows->n_dims && index->n_dims && index->device == 0 &&
            !koila__is_lazy(o) && index->n_elements == (uint64_t)rows->size[0])
            return true;
    }
    return false;
}

/* In inference mode a view of a normal tensor is a normal tensor: its wrapper is made outside that
 * mode. */
static PyObject *record_view(const op_info *op, PyObject *args, PyObject *kwargs)
{
    PyObject *context = Py_None, *type, *value, *trace;
    if (koila__maybe_inference() && PyTuple_GET_SIZE(args)) {
        context = koila__ask("leave_inference", PyTuple_GET_ITEM(args, 0), NULL, NULL);
        if (!context)
            return NULL;
    } else {
        Py_INCREF(context);
    }
    PyObject *r = op->kind == SAME ? same(args) : record(op, args, kwargs);
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

static PyObject *dispatch_op(const op_info *op, PyObject *args, PyObject *kwargs)
{
    switch (op->kind) {
    case PLAIN:
    case WRITE:
    case FACTORY:
        return record(op, args, kwargs);
    case VIEW:
    case SAME:
        return record_view(op, args, kwargs);
    case STRIDED:
        if (PyTuple_GET_SIZE(args) < 4 || PyTuple_GET_ITEM(args, 3) == Py_None ||
            PyDict_GET_SIZE(kwargs))
            break;
        return record_view(op, args, kwargs);
    case INDEX:
        if (!index_is_special(args))
            return record(op, args, kwargs);
        break;
    default:
        break;
    }
    return PyObject_CallFunctionObjArgs(op->handler, op->func, args, kwargs, NULL);
}

PyObject *koila__dispatch(PyObject *module, PyObject *const *a, Py_ssize_t n)
{
    if (n < 3) {
        PyErr_SetString(PyExc_TypeError, "dispatch(func, types, args, kwargs)");
        return NULL;
    }
    PyObject *func = a[0];
    PyObject *types = a[1];
    PyObject *args = a[2];
    PyObject *kwargs = n > 3 ? a[3] : NULL;
    PyObject *r;
    PyObject *own = NULL;
    if (PyTuple_Check(types))
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); i++) {
            PyObject *type = PyTuple_GET_ITEM(types, i);
            if (type == (PyObject *)koila__lazy_class)
                continue;
            PyObject *ok = koila__ask("check_type", func, type, NULL);
            if (!ok)
                return NULL;
            Py_DECREF(ok);
        }
    if (!kwargs) {
        own = kwargs = PyDict_New();
        if (!own)
            return NULL;
    }
    op_info *op = koila__op_of(func);
    const int met = op && (koila__n_factories | koila__n_settled)
                        ? koila__factories_meet(op->written, op->written_kw, args, kwargs)
                        : 0;
    r = !op || met < 0 ? NULL
        : met          ? koila__ask("on_settled", func, args, kwargs)
                       : dispatch_op(op, args, kwargs);
    if (r && koila__n_factories)
        koila__factories_derive(args, kwargs, r);
    Py_XDECREF(own);
    return r;
}

PyObject *koila__record(PyObject *func, PyObject *args, PyObject *kwargs)
{
    op_info *op = koila__op_of(func);
    if (!op)
        return NULL;
    if (op->is_view || op->kind == SAME || op->kind == STRIDED)
        return record_view(op, args, kwargs);
    return record(op, args, kwargs);
}

/* record(func, args, kwargs): the default path, for Python's special cases */
PyObject *koila__py_record(PyObject *module, PyObject *const *a, Py_ssize_t n)
{
    if (n != 3 || !PyTuple_Check(a[1]) || !PyDict_Check(a[2])) {
        PyErr_SetString(PyExc_TypeError, "record(func, args, kwargs)");
        return NULL;
    }
    return koila__record(a[0], a[1], a[2]);
}
