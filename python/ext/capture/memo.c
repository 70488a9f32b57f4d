/* memo.c — a call seen before: its interned signature and what its results look like, found by its
 * tokens. A call never seen asks Python (_shapes.shape), which asks FakeTensor: the plain meta
 * kernels give wrong strides for some operators.
 */
#include "capture/record.h"

/* entries; then everything is forgotten: a program that makes new constants all the time */
#define MEMO_CAP 65536
static memo_entry **memo;
static uint32_t n_memo, n_memo_slots;

static void entry_free(memo_entry *e)
{
    for (uint32_t i = 0; i < e->n_results; i++)
        Py_XDECREF(e->results[i].constant);
    Py_XDECREF(e->fill);
    PyMem_Free(e->results);
    PyMem_Free(e);
}

uint64_t koila__memo_hash(const koila_arg *key, uint32_t n)
{
    uint64_t h = 0x9e3779b97f4a7c15u, w[2];
    for (uint32_t i = 0; i < n; i++) {
        memcpy(w, &key[i], sizeof w);
        h = (h ^ w[0]) * 0xff51afd7ed558ccdu;
        h = (h ^ (h >> 32) ^ w[1]) * 0xc4ceb9fe1a85ec53u;
    }
    return h ^ (h >> 29);
}

memo_entry *koila__memo_find(const koila_arg *key, uint32_t n, uint64_t hash)
{
    if (!n_memo_slots)
        return NULL;
    for (uint32_t i = (uint32_t)hash & (n_memo_slots - 1); memo[i];
         i = (i + 1) & (n_memo_slots - 1))
        if (memo[i]->hash == hash && memo[i]->n_key == n &&
            !memcmp(memo[i]->key, key, n * sizeof *key))
            return memo[i];
    return NULL;
}

void koila__memo_clear(void)
/* entries in use further up the stack are not: record() copies what it needs before Python can run
 */
{
    memo_entry **old = memo;
    const uint32_t n = n_memo_slots;
    memo = NULL;
    n_memo = n_memo_slots = 0;
    for (uint32_t i = 0; i < n; i++)
        if (old[i])
            entry_free(old[i]);
    PyMem_Free(old);
}

static int memo_add(memo_entry *e)
{
    if (n_memo >= MEMO_CAP)
        koila__memo_clear();
    if ((n_memo + 1) * 2 > n_memo_slots) {
        const uint32_t n = n_memo_slots ? n_memo_slots * 2 : 1024;
        memo_entry **fresh = PyMem_Calloc(n, sizeof *fresh);
        if (!fresh) {
            PyErr_NoMemory();
            return -1;
        }
        for (uint32_t i = 0; i < n_memo_slots; i++)
            if (memo[i]) {
                uint32_t j = (uint32_t)memo[i]->hash & (n - 1);
                while (fresh[j])
                    j = (j + 1) & (n - 1);
                fresh[j] = memo[i];
            }
        PyMem_Free(memo);
        memo = fresh;
        n_memo_slots = n;
    }
    uint32_t i = (uint32_t)e->hash & (n_memo_slots - 1);
    while (memo[i])
        i = (i + 1) & (n_memo_slots - 1);
    memo[i] = e;
    n_memo++;
    return 0;
}

int koila__memo_key(call_walk *w, const op_info *op, bool grad, uint32_t *n_key)
{
    const uint32_t n = w->n_tok;
    koila_arg *t;
    for (uint32_t k = 0; k < w->n_kw; k++) {
        if (!(t = koila__walk_push(w, 100)))
            return -1;
        t->u.id = w->kw[k];
    }
    if (w->n_written)
        for (uint32_t i = 0; i < w->n_in; i++) {
            if (!w->in[i].written)
                continue;
            const koila__handle *h = w->in[i].h;
            if (!(t = koila__walk_push(w, 101)))
                return -1;
            t->u.id = h->group->meta;
            t->n = h->chain ? h->chain->n_links : 0;
            for (const koila__chain *c = h->chain; c; c = c->parent) {
                if (!(t = koila__walk_push(w, 102)))
                    return -1;
                t->n = c->link.sig;
                t->u.id = c->link.output;
            }
        }
    if (!(t = koila__walk_push(w, (uint8_t)(103 + grad))))
        return -1;
    t->n = w->n_pos;
    t->u.id = op->id;
    *n_key = w->n_tok;
    w->n_tok = n;
    return 0;
}

static int make_sig(call_walk *w, const op_info *op, bool grad, const koila_meta *outputs,
                    uint32_t n_out, uint8_t result_kind, koila_sig *out)
{
    koila_sig_info d = { .op = op->id,
                         .n_tokens = w->n_tok,
                         .n_pos = w->n_pos,
                         .n_kw = w->n_kw,
                         .tokens = w->tok,
                         .kw_names = w->kw,
                         .n_fresh = n_out,
                         .outputs = outputs,
                         .result_kind = result_kind,
                         .grad_mode = grad };
    koila_write writes[64];
    koila_link *links = NULL;
    uint32_t n_links = 0, n_writes = 0, *restore = NULL;
    int rc = -1;
    if (w->n_written) {
        if (w->n_written > 64) {
            koila__unsupported("an operator that writes more than 64 tensors");
            return -1;
        }
        for (uint32_t i = 0; i < w->n_in; i++)
            if (w->in[i].written && w->in[i].h->chain)
                n_links += w->in[i].h->chain->n_links;
        links = PyMem_Malloc((n_links + 1) * sizeof *links);
        restore = PyMem_Malloc(w->n_in * sizeof *restore);
        if (!links || !restore) {
            PyErr_NoMemory();
            goto done;
        }
        n_links = 0;
        for (uint32_t i = 0; i < w->n_in; i++) {
            restore[i] = w->tok[w->in[i].token].u.id;
            if (!w->in[i].written)
                continue;
            koila__handle *h = w->in[i].h;
            const uint32_t n = h->chain ? h->chain->n_links : 0;
            uint32_t k = n;
            for (const koila__chain *c = h->chain; c; c = c->parent)
                links[n_links + --k] = c->link;
            writes[n_writes++] = (koila_write){ .input = i,
                                                .overwrites = op->overwrites && !n,
                                                .n_links = n,
                                                .links = links + n_links };
            n_links += n;
            /* the node reads the base, see Note [Writes] in graph.h */
            w->tok[w->in[i].token].u.id = h->group->meta;
        }
        d.writes = writes;
        d.n_writes = n_writes;
    }
    const koila_status s = koila_table_sig(koila__table, &d, out);
    if (s)
        koila__raise(s);
    else
        rc = 0;
    if (w->n_written)
        for (uint32_t i = 0; i < w->n_in; i++)
            w->tok[w->in[i].token].u.id = restore[i];
done:
    PyMem_Free(links);
    PyMem_Free(restore);
    return rc;
}

memo_entry *koila__memo_miss(call_walk *w, const op_info *op, PyObject *args, PyObject *kwargs,
                             bool grad, uint32_t n_key, uint64_t hash)
{
    memo_entry *e = PyMem_Calloc(1, sizeof *e + n_key * sizeof(koila_arg));
    koila_meta *metas = NULL;
    PyObject *shape = NULL;
    call_walk *factory = NULL;
    if (!e) {
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(e->key, w->tok, n_key * sizeof *e->key);
    e->hash = hash;
    e->n_key = n_key;
    if (op->kind == FACTORY) { /* (func, args, kwargs, meta, fill) */
        PyObject *func, *a, *k, *meta, *fill;
        shape = koila__ask("factory", op->func, args, kwargs);
        if (!shape || !PyArg_ParseTuple(shape, "OO!O!O!O", &func, &PyTuple_Type, &a, &PyDict_Type,
                                        &k, &PyTuple_Type, &meta, &fill))
            goto fail;
        const op_info *base = koila__op_of(func);
        factory = PyMem_Malloc(sizeof *factory);
        e->results = PyMem_Calloc(1, sizeof *e->results);
        if (!base || !factory || !e->results) {
            if (base)
                PyErr_NoMemory();
            goto fail;
        }
        e->n_results = 1;
        koila__walk_init(factory);
        if (koila__walk_call(factory, base, a, k) < 0 ||
            koila__meta_from(meta, &e->results[0].meta, NULL) < 0)
            goto fail;
        if (make_sig(factory, base, grad, &e->results[0].meta, 1, 0, &e->sig) < 0)
            goto fail;
        e->no_inputs = true;
        e->fill = fill == Py_None ? NULL : Py_NewRef(fill);
    } else { /* (result kind, [(0, None) | (1, meta) | (2, constant), ...]) of the fresh results */
        PyObject *list;
        int result_kind;
        shape = koila__ask("shape", op->func, args, kwargs);
        if (!shape)
            goto fail;
        /* the results depend on data: (callable) says what to do instead; see record() */
        if (!PyTuple_Check(shape)) {
            w->instead = shape;
            shape = NULL;
            goto fail;
        }
        if (!PyArg_ParseTuple(shape, "iO!", &result_kind, &PyList_Type, &list))
            goto fail;
        e->result_kind = (uint8_t)result_kind;
        e->n_results = (uint32_t)PyList_GET_SIZE(list);
        e->results = PyMem_Calloc(e->n_results + 1, sizeof *e->results);
        metas = PyMem_Malloc((e->n_results + 1) * sizeof *metas);
        if (!e->results || !metas) {
            PyErr_NoMemory();
            goto fail;
        }
        e->no_node = !w->n_written;
        for (uint32_t j = 0; j < e->n_results; j++) {
            int tag;
            PyObject *what;
            if (!PyArg_ParseTuple(PyList_GET_ITEM(list, j), "iO", &tag, &what))
                goto fail;
            metas[j] = e->results[j].meta = KOILA_NONE;
            if (tag == 1) {
                if (koila__meta_from(what, &e->results[j].meta, &e->results[j].offset) < 0)
                    goto fail;
                metas[j] = e->results[j].meta;
                e->no_node = false;
            } else {
                e->results[j].constant = Py_NewRef(what);
            }
        }
        if (!e->no_node && make_sig(w, op, grad, metas, e->n_results, e->result_kind, &e->sig) < 0)
            goto fail;
    }
    if (memo_add(e) < 0)
        goto fail;
    Py_DECREF(shape);
    PyMem_Free(metas);
    if (factory)
        koila__walk_deinit(factory);
    PyMem_Free(factory);
    return e;
fail:
    Py_XDECREF(shape);
    PyMem_Free(metas);
    if (factory)
        koila__walk_deinit(factory);
    PyMem_Free(factory);
    entry_free(e);
    return NULL;
}

uint32_t koila__memo_n(void) { return n_memo; }
