/* memo.c — remembers each call by its tokens: its interned signature and the metas of its results.
 * A new call asks Python (_shapes.shape), which asks FakeTensor, because the plain meta kernels
 * give wrong strides for some operators.
 *
 * Some operators (KOILA_FACT_ANY_NUMBERS) give the same metas whatever the values of their numbers
 * are. The first call of each kind is remembered a second time, with its numbers left out; a call
 * that differs from it in these values only is answered from there. So a number that changes in
 * each step costs a signature, and FakeTensor is not asked.
 */
#include "capture/record.h"

/* Kinds of the tokens that a key has beside the call's own; KOILA_ARG_* are smaller. */
enum {
    KEY_KEYWORD = 100, /* u.id: interned name */
    KEY_WRITTEN,       /* u.id: meta of the written base, n: number of links in its chain */
    KEY_LINK,          /* n: signature, u.id: output */
    /* n: number of positional arguments << 8 | koila__call_mode(), u.id: operator */
    KEY_CALL,
    /* the same of a call of which the values of numbers are left out: they are 0 */
    KEY_CALL_OF_ANY_NUMBERS,
};
/* The tag of a result in the answer of _shapes.shape: (tag, what). */
enum { TAG_NONE, TAG_TENSOR, TAG_CONSTANT };

/* At so many entries the memo is cleared: some programs make new constants all the time. */
#define MEMO_CAP 65536
#define MEMO_FIRST_SLOTS 1024
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
    koila_assert(n > 0 && key[n - 1].kind >= KEY_CALL);
    if (!n_memo_slots)
        return NULL;
    for (uint32_t i = (uint32_t)hash & (n_memo_slots - 1); memo[i];
         i = (i + 1) & (n_memo_slots - 1))
        if (memo[i]->hash == hash && memo[i]->n_key == n &&
            !memcmp(memo[i]->key, key, n * sizeof *key)) {
            memo[i]->used = koila__n_steps;
            return memo[i];
        }
    return NULL;
}

/* No entry is in use here: node.c copies what it needs before Python can run. */
void koila__memo_clear(void)
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

/* ---- forgetting */

/* Will e be asked for again? A number that changes in each step is met in one step only. */
static bool is_used(const memo_entry *e, uint32_t since)
{
    return e->used != e->made && (int32_t)(e->used - since) >= 0;
}

static void keep_key(koila_keeper *k, const koila_arg *t)
{
    if (t->kind == KOILA_ARG_TENSOR || t->kind == KEY_WRITTEN)
        koila_keep_meta(k, t->u.id);
    else if (t->kind == KOILA_ARG_STR || t->kind == KEY_KEYWORD)
        koila_keep_text(k, t->u.id);
    else if (t->kind == KOILA_ARG_OPAQUE)
        koila_keep_opaque(k, t->u.id);
    else if (t->kind == KEY_LINK)
        koila_keep_sig(k, t->n);
}

static bool is_key_known(const koila_arg *t)
{
    if (t->kind == KOILA_ARG_TENSOR || t->kind == KEY_WRITTEN)
        return koila_meta_get(koila__table, t->u.id) != NULL;
    if (t->kind == KOILA_ARG_STR || t->kind == KEY_KEYWORD)
        return koila_table_has_text(koila__table, t->u.id);
    if (t->kind == KOILA_ARG_OPAQUE)
        return koila_table_has_opaque(koila__table, t->u.id);
    return t->kind != KEY_LINK || koila_sig_get(koila__table, t->n);
}

void koila__memo_keep(koila_keeper *k, uint32_t since)
{
    for (uint32_t i = 0; i < n_memo_slots; i++) {
        const memo_entry *e = memo[i];
        if (!e || !is_used(e, since))
            continue;
        for (uint32_t j = 0; j < e->n_key; j++)
            keep_key(k, &e->key[j]);
        for (uint32_t j = 0; j < e->n_results; j++)
            koila_keep_meta(k, e->results[j].meta);
        if (!e->no_node)
            koila_keep_sig(k, e->sig);
    }
}

static bool is_known(const memo_entry *e)
{
    bool known = e->no_node || koila_sig_get(koila__table, e->sig);
    for (uint32_t j = 0; j < e->n_key && known; j++)
        known = is_key_known(&e->key[j]);
    for (uint32_t j = 0; j < e->n_results && known; j++)
        known =
            e->results[j].meta == KOILA_NONE || koila_meta_get(koila__table, e->results[j].meta);
    return known;
}

static void give_away(PyObject *gone, PyObject *o)
{
    if (o && PyList_Append(gone, o) < 0) {
        PyErr_Clear();
        Py_INCREF(o); /* no memory: it stays, for its end may run Python */
    }
}

static void entry_give_away(PyObject *gone, memo_entry *e)
{
    for (uint32_t j = 0; j < e->n_results; j++)
        give_away(gone, e->results[j].constant);
    give_away(gone, e->fill);
    entry_free(e);
}

void koila__memo_forget(PyObject *gone, uint32_t since)
{
    memo_entry **old = memo;
    const uint32_t n = n_memo_slots;
    memo = PyMem_Calloc(n ? n : 1, sizeof *memo);
    n_memo = 0;
    n_memo_slots = memo ? n : 0; /* without memory all is forgotten */
    for (uint32_t i = 0; i < n; i++) {
        memo_entry *e = old[i];
        if (!e)
            continue;
        if (!memo || !is_known(e) || (e->no_node && !is_used(e, since))) {
            entry_give_away(gone, e);
            continue;
        }
        uint32_t j = (uint32_t)e->hash & (n - 1);
        while (memo[j])
            j = (j + 1) & (n - 1);
        memo[j] = e;
        n_memo++;
    }
    PyMem_Free(old);
}

static int memo_add(memo_entry *e)
{
    koila_assert(e->no_node || koila_sig_get(koila__table, e->sig)->n_fresh == e->n_results);
    if (n_memo >= MEMO_CAP)
        koila__memo_clear(); /* runs Python, which may add entries: read everything after it */
    if ((n_memo + 1) * 2 > n_memo_slots) {
        const uint32_t n = n_memo_slots ? n_memo_slots * 2 : MEMO_FIRST_SLOTS;
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
    koila_assert(n_memo * 2 <= n_memo_slots && (n_memo_slots & (n_memo_slots - 1)) == 0);
    return 0;
}

/* Appends the chain of a written argument, newest link first. */
static int push_written(call_walk *w, const koila__handle *h)
{
    koila_arg *t = koila__walk_push(w, KEY_WRITTEN);
    if (!t)
        return -1;
    t->u.id = h->group->meta;
    t->n = h->chain ? h->chain->n_links : 0;
    for (const koila__chain *c = h->chain; c; c = c->parent) {
        t = koila__walk_push(w, KEY_LINK);
        if (!t)
            return -1;
        t->n = c->link.sig;
        t->u.id = c->link.output;
    }
    return 0;
}

int koila__memo_key(call_walk *w, const op_info *op, uint8_t mode, uint32_t *n_key)
{
    const uint32_t n = w->n_tok;
    koila_arg *t;
    for (uint32_t k = 0; k < w->n_kw; k++) {
        t = koila__walk_push(w, KEY_KEYWORD);
        if (!t)
            return -1;
        t->u.id = w->kw[k];
    }
    for (uint32_t i = 0; w->n_written && i < w->n_in; i++)
        if (w->in[i].written && push_written(w, w->in[i].h) < 0)
            return -1;
    t = koila__walk_push(w, KEY_CALL);
    if (!t)
        return -1;
    t->n = w->n_pos << 8 | mode;
    t->u.id = op->id;
    *n_key = w->n_tok;
    w->n_tok = n;
    return 0;
}

/* ---- a new call */

/* The writes of a call: which input each writes, through which views. */
typedef struct written {
    koila_write writes[KOILA__MAX_WRITES];
    uint32_t n_writes;
    koila_link *links; /* owned, PyMem */
} written;

/* On failure there is nothing to free. */
static int collect_writes(const call_walk *w, bool overwrites, written *out)
{
    uint32_t n_links = 0;
    if (w->n_written > KOILA__MAX_WRITES) {
        koila__unsupported("an operator that writes more than %d tensors", KOILA__MAX_WRITES);
        return -1;
    }
    for (uint32_t i = 0; i < w->n_in; i++)
        if (w->in[i].written && w->in[i].h->chain)
            n_links += w->in[i].h->chain->n_links;
    out->links = PyMem_Malloc((n_links + 1) * sizeof *out->links);
    if (!out->links) {
        PyErr_NoMemory();
        return -1;
    }
    koila_link *at = out->links;
    out->n_writes = 0;
    for (uint32_t i = 0; i < w->n_in; i++) {
        if (!w->in[i].written)
            continue;
        const koila__chain *c = w->in[i].h->chain;
        const uint32_t n = c ? c->n_links : 0;
        for (uint32_t k = n; c; c = c->parent)
            at[--k] = c->link;
        out->writes[out->n_writes++] =
            (koila_write){ .input = i, .overwrites = overwrites && !n, .n_links = n, .links = at };
        at += n;
    }
    koila_assert(at == out->links + n_links && out->n_writes == w->n_written);
    return 0;
}

/* Gives each written input's token the meta of its base, which the node reads (Note [Writes] in
 * graph.h); with `base` false, its own meta again. */
static void show_bases(call_walk *w, bool base)
{
    for (uint32_t i = 0; w->n_written && i < w->n_in; i++) {
        const koila__handle *h = w->in[i].h;
        if (w->in[i].written)
            w->tok[w->in[i].token].u.id = base ? h->group->meta : h->meta;
    }
}

static int make_sig(call_walk *w, const op_info *op, uint8_t mode, const koila_meta *outputs,
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
                         .grad_mode = mode };
    written all = { .links = NULL };
    if (w->n_written) {
        if (collect_writes(w, op->overwrites, &all) < 0)
            return -1;
        d.writes = all.writes;
        d.n_writes = all.n_writes;
    }
    show_bases(w, true);
    const koila_status s = koila_table_sig(koila__table, &d, out);
    show_bases(w, false);
    PyMem_Free(all.links);
    if (s)
        koila__raise(s);
    return s ? -1 : 0;
}

/* said: (func, args, kwargs, meta, fill), a call with the same result that reads no tensor. */
static int learn_factory(memo_entry *e, PyObject *said, uint8_t mode)
{
    PyObject *func, *args, *kwargs, *meta, *fill;
    if (!PyArg_ParseTuple(said, "OO!O!O!O", &func, &PyTuple_Type, &args, &PyDict_Type, &kwargs,
                          &PyTuple_Type, &meta, &fill))
        return -1;
    const op_info *op = koila__op_of(func);
    if (!op)
        return -1;
    call_walk *w = PyMem_Malloc(sizeof *w); /* too large for the stack, which holds one already */
    e->results = PyMem_Calloc(1, sizeof *e->results);
    if (!w || !e->results) {
        PyMem_Free(w);
        PyErr_NoMemory();
        return -1;
    }
    e->n_results = 1;
    e->no_inputs = true;
    e->fill = fill == Py_None ? NULL : Py_NewRef(fill);
    koila__walk_init(w);
    int rc = koila__walk_call(w, op, args, kwargs);
    if (rc == 0)
        rc = koila__meta_from(meta, &e->results[0].meta, NULL);
    if (rc == 0)
        rc = make_sig(w, op, mode, &e->results[0].meta, 1, RESULT_ONE, &e->sig);
    koila__walk_deinit(w);
    PyMem_Free(w);
    return rc;
}

/* item: (tag, what) of result r. */
static int learn_result(memo_result *r, PyObject *item)
{
    int tag;
    PyObject *what;
    r->meta = KOILA_NONE;
    if (!PyArg_ParseTuple(item, "iO", &tag, &what))
        return -1;
    if (tag == TAG_TENSOR)
        return koila__meta_from(what, &r->meta, &r->offset);
    r->constant = Py_NewRef(what);
    return 0;
}

/* said: (result kind, [(tag, what), ...]) of the fresh results. */
static int learn_results(memo_entry *e, call_walk *w, const op_info *op, PyObject *said,
                         uint8_t mode)
{
    PyObject *list;
    int result_kind;
    if (!PyArg_ParseTuple(said, "iO!", &result_kind, &PyList_Type, &list))
        return -1;
    const uint32_t n = (uint32_t)PyList_GET_SIZE(list);
    koila_meta *metas = PyMem_Malloc((n + 1) * sizeof *metas);
    e->results = PyMem_Calloc(n + 1, sizeof *e->results);
    if (!e->results || !metas) {
        PyMem_Free(metas);
        PyErr_NoMemory();
        return -1;
    }
    e->result_kind = (uint8_t)result_kind;
    e->n_results = n;
    e->no_node = !w->n_written;
    int rc = 0;
    for (uint32_t j = 0; j < n && rc == 0; j++) {
        rc = learn_result(&e->results[j], PyList_GET_ITEM(list, j));
        metas[j] = e->results[j].meta;
        e->no_node &= metas[j] == KOILA_NONE;
    }
    if (rc == 0 && !e->no_node)
        rc = make_sig(w, op, mode, metas, n, e->result_kind, &e->sig);
    PyMem_Free(metas);
    return rc;
}

/* An entry with a key and nothing learned. */
static memo_entry *entry_new(const koila_arg *key, uint32_t n_key, uint64_t hash)
{
    memo_entry *e = PyMem_Calloc(1, sizeof *e + n_key * sizeof *key);
    if (!e) {
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(e->key, key, n_key * sizeof *key);
    e->hash = hash;
    e->n_key = n_key;
    e->made = e->used = koila__n_steps;
    return e;
}

static bool is_float(koila_meta meta)
{
    const koila_dtype d = koila_meta_get(koila__table, meta)->dtype;
    return d == KOILA_DTYPE_F32 || d == KOILA_DTYPE_BF16 || d == KOILA_DTYPE_F16 ||
           d == KOILA_DTYPE_F64;
}

/* Leaves the values of numbers out of a key; their types stay. In lists they are sizes and
 * dimensions, which stay too. False: there are none, or other tensors than of floating-point
 * numbers, where a value may be an error (whole numbers to a negative power). */
static bool leave_out_numbers(koila_arg *key, uint32_t n)
{
    bool any = false;
    for (uint32_t i = 0; i < n; i++) {
        if (key[i].kind == KOILA_ARG_TENSOR && !is_float(key[i].u.id))
            return false;
        if (key[i].kind == KOILA_ARG_LIST) {
            i += key[i].n;
        } else if (key[i].kind == KOILA_ARG_INT || key[i].kind == KOILA_ARG_FLOAT) {
            any = true;
            key[i].u.i = 0;
        }
    }
    key[n - 1].kind = KEY_CALL_OF_ANY_NUMBERS;
    return any;
}

/* *out: an entry for all calls that differ from e's in the values of numbers, with nothing learned;
 * NULL: results may depend on them, or there are none. */
static int entry_of_any_numbers(const memo_entry *e, const op_info *op, memo_entry **out)
{
    *out = NULL;
    if (!(koila_op_facts(koila__table, op->id) & KOILA_FACT_ANY_NUMBERS))
        return 0;
    memo_entry *any = entry_new(e->key, e->n_key, 0);
    if (!any)
        return -1;
    if (!leave_out_numbers(any->key, any->n_key)) {
        entry_free(any);
        return 0;
    }
    any->hash = koila__memo_hash(any->key, any->n_key);
    *out = any;
    return 0;
}

/* What is known of `like` is known of e, but for its signature. */
static int learn_alike(memo_entry *e, const memo_entry *like)
{
    const uint32_t n = like->n_results;
    koila_assert(!like->fill && !like->no_inputs && !like->no_node);
    e->results = PyMem_Calloc(n + 1, sizeof *e->results);
    if (!e->results) {
        PyErr_NoMemory();
        return -1;
    }
    e->n_results = n;
    e->result_kind = like->result_kind;
    for (uint32_t j = 0; j < n; j++) {
        e->results[j] = like->results[j];
        Py_XINCREF(e->results[j].constant);
    }
    return 0;
}

/* Learns e from `like`, which differs in the values of numbers. Runs no Python. */
static int learn_from_sibling(memo_entry *e, const memo_entry *like, call_walk *w,
                              const op_info *op, uint8_t mode)
{
    koila_meta *metas = PyMem_Malloc((like->n_results + 1) * sizeof *metas);
    if (!metas) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t j = 0; j < like->n_results; j++)
        metas[j] = like->results[j].meta;
    int rc = learn_alike(e, like);
    if (rc == 0)
        rc = make_sig(w, op, mode, metas, e->n_results, e->result_kind, &e->sig);
    PyMem_Free(metas);
    return rc;
}

/* Asks Python. -1 with an error; or without one, when the inputs have changed (w->again) or
 * something else is called (w->instead). */
static int learn_from_python(memo_entry *e, call_walk *w, const op_info *op, PyObject *args,
                             PyObject *kwargs, uint8_t mode)
{
    const bool factory = op->kind == FACTORY;
    PyObject *said = koila__ask(factory ? "factory" : "shape", op->func, args, kwargs);
    int rc = -1;
    w->again = said && PyTuple_Check(said) && !koila__walk_holds(w);
    if (w->again) {
        /* what was said is of inputs that have changed since */
    } else if (said && factory) {
        rc = learn_factory(e, said, mode);
    } else if (said && PyTuple_Check(said)) {
        rc = learn_results(e, w, op, said, mode);
    } else if (said) {
        /* the results depend on data: a callable replaces the recording */
        w->instead = said;
        said = NULL;
    }
    Py_XDECREF(said); /* Python may run here: before the entry can be cleared away */
    return rc;
}

memo_entry *koila__memo_miss(call_walk *w, const op_info *op, PyObject *args, PyObject *kwargs,
                             uint8_t mode, uint32_t n_key, uint64_t hash)
{
    memo_entry *e = entry_new(w->tok, n_key, hash), *any = NULL;
    int rc = e ? entry_of_any_numbers(e, op, &any) : -1;
    const memo_entry *like = any ? koila__memo_find(any->key, n_key, any->hash) : NULL;
    if (rc == 0)
        rc = like ? learn_from_sibling(e, like, w, op, mode)
                  : learn_from_python(e, w, op, args, kwargs, mode);
    if (rc == 0 && any && !like && !e->no_node) {
        any->sig = e->sig;
        rc = learn_alike(any, e);
        if (rc == 0)
            rc = memo_add(any);
        if (rc == 0)
            any = NULL;
    }
    if (any)
        entry_free(any);
    if (rc == 0)
        rc = memo_add(e); /* last: room for the other is made by clearing the memo */
    if (rc == 0)
        return e;
    if (e)
        entry_free(e);
    return NULL;
}

uint32_t koila__memo_n(void) { return n_memo; }
