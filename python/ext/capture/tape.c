/* tape.c — one recorded step: the graph, the real tensors behind its leaves, and what must still
 * happen to tensors outside.
 *
 * Note [Leaves]. A real tensor met on the way is a leaf, found again by (object, `_version`): after
 * an in-place write it is a new leaf, and the old one is stale, which the executor finds by
 * comparing versions. A write that goes through us (lazy data into a real tensor, `t.data = ...`)
 * first gives the recorded leaf its own copy, so that earlier reads keep the old contents.
 *
 * Note [Effects]. BatchNorm's running statistics are outputs of the step that must land in real
 * buffers, exactly once. They are kept as (real, value); a later read of the buffer inside the tape
 * reads the value. The run that ends the step writes them. If nobody asks for anything any more,
 * the last dying handle settles them.
 */
#include "capture/capture.h"

#include <structmember.h>

static uint64_t next_axis_id = 1, next_uid;
koila__tape *koila__tapes, *koila__resting_tapes;
uint32_t koila__n_exits;
uint32_t koila__n_steps;
uint32_t koila__n_saved_hooks;

KOILA__HOT koila__tape *koila__tape_open(void)
{
    const koila__context *c = koila__context_peek();
    return c ? (koila__tape *)c->open : NULL;
}

void koila__tape_set_open(koila__context *c, koila__tape *t)
{
    koila_assert(!t || (!t->closed && t->context == c));
    koila__tape *old = (koila__tape *)c->open;
    c->open = Py_XNewRef((PyObject *)t);
    koila__n_steps += t != NULL;
    koila__switch_batch(old && old->n_devices ? -1 : 0);
    koila__switch_batch(t && t->n_devices ? 1 : 0);
    Py_XDECREF(old);
}

bool koila__tape_is_open(const koila__tape *t) { return t->context->open == (const PyObject *)t; }

void koila__tape_close(koila__tape *t)
{
    koila_assert(Py_REFCNT(t) > 1 || !koila__tape_is_open(t));
    t->closed = true;
    koila__unkeep_all(t);
    if (koila__tape_is_open(t))
        koila__tape_set_open(t->context, NULL);
}

void koila__tape_has_exit(koila__tape *t)
{
    koila__n_exits += !t->has_exit;
    t->has_exit = true;
}

static void link_tape(koila__tape *t)
{
    koila__tape **list = t->resting ? &koila__resting_tapes : &koila__tapes;
    if (!t->resting)
        koila__writers_begin();
    t->prev_tape = NULL;
    t->next_tape = *list;
    if (*list)
        (*list)->prev_tape = t;
    *list = t;
}

static void unlink_tape(koila__tape *t)
{
    koila__tape **list = t->resting ? &koila__resting_tapes : &koila__tapes;
    if (t->prev_tape)
        t->prev_tape->next_tape = t->next_tape;
    else
        *list = t->next_tape;
    if (t->next_tape)
        t->next_tape->prev_tape = t->prev_tape;
}

void koila__tape_rests(koila__tape *t, bool rests)
{
    if (t->resting == rests)
        return;
    koila_assert(!rests || (t->closed && t->compacted && !t->n_leaves && !t->n_effects));
    unlink_tape(t);
    t->resting = rests;
    link_tape(t);
}

koila__tape *koila__tape_new(koila__context *c)
{
    koila__tape *t = PyObject_New(koila__tape, &koila__tape_type);
    if (!t)
        return NULL;
    memset((char *)t + offsetof(koila__tape, graph), 0, sizeof *t - offsetof(koila__tape, graph));
    t->context = (koila__context *)Py_NewRef((PyObject *)c);
    t->thread = PyThread_get_thread_ident();
    t->uid = ++next_uid;
    t->planned = koila__is_planning();
    t->odd_backward = koila__n_saved_hooks > 0;
    link_tape(t);
    const koila_status s = koila_graph_new(koila__table, NULL, &t->graph);
    if (s) {
        Py_DECREF(t);
        koila__raise(s);
        return NULL;
    }
    return t;
}

int koila__tape_reserve(koila__tape *t)
{
    const uint32_t n = koila_graph_n_values(t->graph);
    if (n <= t->n_values_alloc)
        return 0;
    uint32_t want = n * 2;
    if (n < 8) /* an island */
        want = 8;
    else if (n < 64)
        want = 256;
    tape_value *v = PyMem_Realloc(t->values, want * sizeof *v);
    if (!v) {
        PyErr_NoMemory();
        return -1;
    }
    memset(v + t->n_values_alloc, 0, (want - t->n_values_alloc) * sizeof *v);
    t->values = v;
    t->n_values_alloc = want;
    return 0;
}

/* ---- leaves */

static inline uint32_t slot_of(const koila__tape *t, const PyObject *real)
{
    return (uint32_t)(((uintptr_t)real >> 4) * 0x9e3779b97f4a7c15u >> 32) & (t->n_leaf_slots - 1);
}

/* The slot of `real`, or the empty one where it belongs. NULL: there is no table yet. */
static tape_leaf *find_leaf(const koila__tape *t, const PyObject *real)
{
    if (!t->n_leaf_slots)
        return NULL;
    uint32_t i = slot_of(t, real);
    while (t->leaves[i].real && t->leaves[i].real != real)
        i = (i + 1) & (t->n_leaf_slots - 1);
    return &t->leaves[i];
}

static tape_leaf *add_leaf(koila__tape *t, PyObject *real)
{
    koila__tape_rests(t, false);
    if ((t->n_leaves + 1) * 2 > t->n_leaf_slots) {
        const uint32_t n = t->n_leaf_slots ? t->n_leaf_slots * 2 : 128;
        const uint32_t n_old = t->n_leaf_slots;
        tape_leaf *old = t->leaves;
        tape_leaf *fresh = PyMem_Calloc(n, sizeof *fresh);
        if (!fresh) {
            PyErr_NoMemory();
            return NULL;
        }
        t->leaves = fresh;
        t->n_leaf_slots = n;
        for (uint32_t i = 0; i < n_old; i++)
            if (old[i].real)
                *find_leaf(t, old[i].real) = old[i];
        PyMem_Free(old);
    }
    koila_assert((t->n_leaves + 1) * 2 <= t->n_leaf_slots);
    tape_leaf *leaf = find_leaf(t, real);
    if (!leaf->real)
        t->n_leaves++;
    leaf->real = real;
    return leaf;
}

koila_value koila__tape_leaf_new(koila__tape *t, PyObject *real, koila_meta meta,
                                 koila_leaf_kind kind, uint16_t axis, uint32_t dim)
{
    koila_value v;
    uint32_t version;
    koila__hold_ids(); /* a class of the user's may run Python when asked */
    const int known = koila__version_of(real, &version);
    koila__release_ids();
    if (known < 0)
        return KOILA_NONE;
    const koila_status s = koila_graph_leaf(t->graph, meta, kind, axis, dim, NULL, &v);
    if (s) {
        koila__raise(s);
        return KOILA_NONE;
    }
    if (koila__tape_reserve(t) < 0)
        return KOILA_NONE;
    koila_assert(!t->values[v].real && !t->values[v].n_handles);
    t->values[v].real = Py_NewRef(real);
    t->values[v].version = version;
    const bool on_cpu = koila_meta_get(koila__table, meta)->device == 0;
    const bool counted = version != KOILA__NO_VERSION && !(on_cpu && koila__is_borrowed(real));
    if ((koila__n_aliases || !counted) && koila__watch_leaf(t, v, real, counted) < 0)
        return KOILA_NONE;
    return v;
}

koila_value koila__tape_leaf_real(koila__tape *t, PyObject *real, koila_meta *meta)
{
    uint32_t version;
    if (koila__version_of(real, &version) < 0)
        return KOILA_NONE;
    tape_leaf *leaf = find_leaf(t, real);
    if (leaf && leaf->real && leaf->version == version) {
        const koila_value known = leaf->value; /* leaves may move while a fingerprint is taken */
        *meta = leaf->meta;
        if (!t->n_watches || !koila__is_written_behind(t, known))
            return known;
    }
    koila_meta m;
    if (koila__meta_of(real, &m) < 0)
        return KOILA_NONE;
    const koila_value v = koila__tape_leaf_new(t, real, m, KOILA_LEAF_REAL, 0, 0);
    if (v == KOILA_NONE)
        return KOILA_NONE;
    leaf = add_leaf(t, real);
    if (!leaf)
        return KOILA_NONE;
    leaf->meta = m;
    leaf->value = v;
    leaf->version = version;
    *meta = m;
    return v;
}

koila_value koila__tape_leaf_known(const koila__tape *t, PyObject *real)
{
    uint32_t version;
    const tape_leaf *leaf = find_leaf(t, real);
    if (!leaf || !leaf->real)
        return KOILA_NONE;
    if (koila__version_of(real, &version) < 0) {
        PyErr_Clear();
        return KOILA_NONE;
    }
    return leaf->version == version ? leaf->value : KOILA_NONE;
}

int koila__tape_axis(koila__tape *t, uint64_t id, int64_t size, uint16_t *out)
{
    if (!id)
        id = next_axis_id++;
    for (uint32_t i = 0; i < t->n_axis_ids; i++)
        if (t->axis_ids[i] == id && koila_graph_axis_size(t->graph, (uint16_t)i) == size) {
            *out = (uint16_t)i;
            return 0;
        }
    uint64_t *ids = PyMem_Realloc(t->axis_ids, (t->n_axis_ids + 1) * sizeof *ids);
    if (!ids) {
        PyErr_NoMemory();
        return -1;
    }
    t->axis_ids = ids;
    const koila_status s = koila_graph_axis(t->graph, size, out);
    if (s) {
        koila__raise(s);
        return -1;
    }
    t->axis_ids[t->n_axis_ids++] = id;
    return 0;
}

bool koila__tape_reads(const koila__tape *t, const PyObject *real)
{
    tape_leaf *leaf = find_leaf(t, real);
    return leaf && leaf->real;
}

/* With a batch of one there is nothing to cut, and every tensor has a dimension of one. */
bool koila__tape_has_batch(const koila__tape *t, const int64_t *size, uint32_t n_dims)
{
    for (uint16_t a = 0; a < koila_graph_n_axes(t->graph); a++)
        for (uint32_t d = 0; d < n_dims; d++)
            if (size[d] > 1 && size[d] == koila_graph_axis_size(t->graph, a))
                return true;
    return false;
}

bool koila__tape_has_length(const koila__tape *t, const int64_t *size, uint32_t n_dims)
{
    for (uint32_t i = 0; i < t->n_lengths; i++)
        for (uint32_t d = 0; d < n_dims; d++) {
            const bool is_length = koila_is_near_length(size[d], t->lengths[i]);
            if (is_length && !koila__tape_has_batch(t, &size[d], 1))
                return true;
        }
    return false;
}

/* ---- what must still happen outside */

/* The tensor has new contents and a new version, or the old ones: a later read is a new leaf. */
static void forget_leaf(koila__tape *t, const PyObject *real)
{
    tape_leaf *leaf = find_leaf(t, real);
    if (leaf && leaf->real)
        leaf->version = UINT32_MAX;
}

void koila__tape_drop_effects(koila__tape *t)
{
    const uint32_t n = t->n_effects;
    tape_effect *gone = t->effects;
    for (uint32_t i = 0; i < n; i++)
        forget_leaf(t, gone[i].real);
    /* a tensor that dies may run Python, which may record the next effect */
    t->effects = NULL;
    t->n_effects = t->n_effects_alloc = 0;
    for (uint32_t i = 0; i < n; i++)
        Py_DECREF(gone[i].real);
    PyMem_Free(gone);
}

void koila__tape_drop_happened(koila__tape *t, PyObject *const *reals, const koila_value *values,
                               uint32_t n)
{
    uint32_t n_left = 0, k = 0;
    for (uint32_t i = 0; i < t->n_effects; i++) {
        const tape_effect e = t->effects[i];
        if (k < n && reals[k] == e.real && values[k] == e.value) {
            k++;
            forget_leaf(t, e.real);
            Py_DECREF(e.real); /* the caller holds it too: nothing dies */
        } else
            t->effects[n_left++] = e;
    }
    t->n_effects = n_left;
}

/* The step of `t` failed: what it would have done outside does not happen, and what torch's own
 * modules counted for it (batches) is taken back. */
void koila__tape_give_up(koila__tape *t)
{
    /* for a planned step koila.plan() takes the counts back */
    if (t->n_effects && !t->planned) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyObject *uncount = koila__helper("uncount");
        PyObject *done = uncount ? PyObject_CallOneArg(uncount, (PyObject *)t) : NULL;
        if (!done)
            PyErr_WriteUnraisable((PyObject *)t);
        Py_XDECREF(done);
        Py_XDECREF(uncount);
        PyErr_Restore(type, value, trace);
    }
    koila__tape_drop_effects(t);
}

/* Statistics of a step that nobody finished, whose tensors were written since (load_state_dict):
 * what was written comes after them, and stays. */
int koila__tape_drop_overwritten(koila__tape *t)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->n_effects; i++) {
        const tape_effect e = t->effects[i];
        uint32_t now;
        Py_INCREF(e.real); /* a class of the user's may run Python when asked */
        const int known = koila__version_of(e.real, &now);
        Py_DECREF(e.real);
        if (known < 0)
            return -1;
        if (now == e.version) {
            t->effects[i] = t->effects[n];
            t->effects[n++] = e;
        }
    }
    const uint32_t n_dropped = t->n_effects - n;
    if (!n_dropped)
        return 0;
    PyObject **gone = PyMem_Malloc(n_dropped * sizeof *gone);
    if (!gone) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < n_dropped; i++)
        gone[i] = t->effects[n + i].real;
    t->n_effects = n; /* first: a tensor that dies may run Python, which may record effects */
    for (uint32_t i = 0; i < n_dropped; i++)
        Py_DECREF(gone[i]);
    PyMem_Free(gone);
    return PyErr_WarnFormat(PyExc_RuntimeWarning, 1,
                            "koila: a training-mode forward pass was left without backward, and %u "
                            "of its running statistics have been written since "
                            "(load_state_dict, reset_running_stats): they stay as written",
                            n_dropped);
}

int koila__tape_effect(koila__tape *t, PyObject *real, koila_value v)
{
    uint32_t version;
    koila_meta meta;
    if (koila__version_of(real, &version) < 0 || koila__meta_of(real, &meta) < 0)
        return -1;
    uint32_t i = 0;
    while (i < t->n_effects && t->effects[i].real != real)
        i++;
    if (i == t->n_effects) {
        if (t->n_effects == t->n_effects_alloc) {
            const uint32_t n = t->n_effects_alloc ? t->n_effects_alloc * 2 : 16;
            tape_effect *e = PyMem_Realloc(t->effects, n * sizeof *e);
            if (!e) {
                PyErr_NoMemory();
                return -1;
            }
            t->effects = e;
            t->n_effects_alloc = n;
        }
        t->effects[t->n_effects++].real = Py_NewRef(real);
    }
    t->effects[i].value = v;
    t->effects[i].version = version;
    tape_leaf *leaf = add_leaf(t, real);
    if (!leaf)
        return -1;
    leaf->meta = meta;
    leaf->value = v;
    leaf->version = version;
    return 0;
}

int koila__tape_add_random(koila__tape *t, koila_node n, PyObject *generator, PyObject *state,
                           uint32_t words)
{
    if (t->n_random == t->n_random_alloc) {
        const uint32_t m = t->n_random_alloc ? t->n_random_alloc * 2 : 16;
        tape_random *r = PyMem_Realloc(t->random, m * sizeof *r);
        if (!r) {
            PyErr_NoMemory();
            return -1;
        }
        t->random = r;
        t->n_random_alloc = m;
    }
    koila_assert(!t->n_random || t->random[t->n_random - 1].node <= n);
    t->random[t->n_random++] = (tape_random){ n, Py_NewRef(generator), Py_NewRef(state), words };
    return 0;
}

const tape_random *koila__tape_random(koila__tape *t, koila_node n)
{
    uint32_t lo = 0;
    uint32_t hi = t->n_random;
    while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (t->random[mid].node < n)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < t->n_random && t->random[lo].node == n ? &t->random[lo] : NULL;
}

void koila__tape_set_real(koila__tape *t, koila_value v, PyObject *real)
{
    koila_assert(v < koila_graph_n_values(t->graph));
    PyObject *old = t->values[v].real;
    uint32_t version = 0;
    if (real)
        koila__version_of(real, &version);
    if (real && old) { /* other memory for the same contents: unless they are gone already */
        uint32_t now;
        koila__version_of(old, &now);
        if (now != t->values[v].version || koila__is_written_behind(t, v))
            version = UINT32_MAX;
        koila__watches_follow(t, v, real);
    }
    t->values[v].real = real;
    t->values[v].version = version;
    koila__unkeep(t, v);
    Py_XDECREF(old);
}

void koila__tape_new_walk(koila__tape *t)
{
    if (t->mark > UINT32_MAX - 2 * KOILA__MARKS_OF_A_WALK) { /* once in a billion walks */
        for (uint32_t v = 0; v < t->n_values_alloc; v++)
            t->values[v].mark = 0;
        t->mark = 0;
    }
    t->mark += KOILA__MARKS_OF_A_WALK;
}

/* The step of `t` has run. When every lazy tensor that is left is concrete, nobody can ask for
 * anything else: let go of the batch, of gradients that were taken, and of what they were made
 * from. Bases of views stay: a write of a view is one of its base. Called when the step ends and
 * again while handles die, until it succeeds. */
void koila__tape_let_go(koila__tape *t)
{
    if (!t->closed || t->let_go || t->n_effects)
        return;
    for (const koila__handle *h = t->handles; h; h = h->next_in_tape)
        if (h->value == KOILA_NONE || h->gen != h->group->gen || !t->values[h->value].real)
            return;
    koila_assert(!koila__tape_is_open(t));
    t->let_go = true;
    koila__watches_free(t);
    /* leaves that are freed are found no more: another tensor may come to lie where one lay */
    for (uint32_t i = 0; i < t->n_leaf_slots; i++)
        t->leaves[i] = (tape_leaf){ 0 };
    t->n_leaves = 0;
    koila__tape_new_walk(t);
    const uint32_t base = t->mark;
    for (const koila__handle *h = t->handles; h; h = h->next_in_tape)
        t->values[h->group->cur].mark = base;
    const uint32_t n = koila_graph_n_values(t->graph);
    for (uint32_t v = 0; v < n && v < t->n_values_alloc; v++)
        if (!t->values[v].n_handles && t->values[v].mark < base)
            Py_CLEAR(t->values[v].real);
}

/* ---- the type: what Python sees of it is in capture_module.c */

koila__recording *koila__tape_recording(koila__tape *t)
{
    if (!t->recording) {
        t->recording = PyMem_Malloc(sizeof *t->recording);
        if (!t->recording)
            return NULL;
        *t->recording = (koila__recording){ .graph = t->graph, .refs = 1 };
    }
    t->recording->refs++;
    return t->recording;
}

void koila__recording_release(koila__recording *r)
{
    if (--r->refs)
        return;
    koila_graph_free(r->graph);
    PyMem_Free(r);
}

static void tape_dealloc(koila__tape *t)
{
    koila_assert(!koila__tape_is_open(t) && !t->handles && !t->n_handles && !t->n_entered);
    unlink_tape(t);
    if (t->weakrefs)
        PyObject_ClearWeakRefs((PyObject *)t);
    const uint32_t n = t->graph ? koila_graph_n_values(t->graph) : 0;
    for (uint32_t v = 0; v < n && v < t->n_values_alloc; v++)
        Py_XDECREF(t->values[v].real);
    for (uint32_t i = 0; i < t->n_effects; i++)
        Py_XDECREF(t->effects[i].real);
    for (uint32_t i = 0; i < t->n_random; i++) {
        Py_DECREF(t->random[i].generator);
        Py_DECREF(t->random[i].state);
    }
    koila__n_exits -= t->has_exit;
    koila__watches_free(t);
    Py_XDECREF(t->early);
    PyMem_Free(t->reads.nodes);
    koila__unkeep_all(t);
    PyMem_Free(t->kept.at);
    Py_DECREF(t->context);
    PyMem_Free(t->values);
    PyMem_Free(t->effects);
    PyMem_Free(t->random);
    PyMem_Free(t->leaves);
    PyMem_Free(t->axis_ids);
    if (t->recording)
        koila__recording_release(t->recording);
    else
        koila_graph_free(t->graph);
    PyObject_Free(t);
}

PyTypeObject koila__tape_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.Tape",
    .tp_basicsize = sizeof(koila__tape),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)tape_dealloc,
    .tp_weaklistoffset = offsetof(koila__tape, weakrefs),
    .tp_doc = "One recorded step.",
};
