/* back_doors.c — writes that no version counter of a recorded tensor shows.
 *
 * Note [Back doors]. A leaf that was written after it was recorded is found by its version counter
 * (Note [Leaves] in tape.c). Some aliases do not count there: `t.data` has a counter of its own,
 * and a numpy array, a DLPack capsule or a storage has none. They are handed out by Python
 * functions, which _doors.py wraps, so they are known; then the tape watches what it recorded:
 *
 *   an alias with a counter   its counter, of which the tape keeps the alias alive
 *   memory                    a fingerprint of the elements, taken now and again at the run
 *
 * An alias may be handed out before its tensor is recorded, too. Those that live (weak references
 * in `aliases`) are looked up at each new leaf. Nothing is done for a tensor of which no alias was
 * handed out. docs/limits.md says what cannot be seen.
 */
#include "capture/capture.h"

#include "base/vec.h"

typedef struct alias {
    const void *storage; /* of the tensor that it is an alias of */
    PyObject *ref;       /* owned weak reference */
    bool counts;         /* a tensor with a version counter of its own */
} alias;

static VEC(alias) aliases;
static uint32_t n_pruned; /* aliases that lived when dead ones were dropped last */
uint32_t koila__n_aliases;

/* NULL: it is gone. A new reference. */
static PyObject *alive(const alias *a)
{
    PyObject *o = PyWeakref_GetObject(a->ref);
    return o && o != Py_None ? Py_NewRef(o) : NULL;
}

static void prune(void)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < aliases.n; i++) {
        PyObject *o = alive(&aliases.at[i]);
        if (o)
            aliases.at[n++] = aliases.at[i];
        else
            Py_DECREF(aliases.at[i].ref);
        Py_XDECREF(o);
    }
    aliases.n = n_pruned = koila__n_aliases = n;
}

static int remember(const void *storage, PyObject *o, bool counts)
{
    PyObject *ref = PyWeakref_NewRef(o, NULL);
    if (!ref)
        return -1;
    if (aliases.n >= 64 && aliases.n >= 2 * n_pruned)
        prune();
    if (!koila__vec_push(&koila__libc, &aliases, ((alias){ storage, ref, counts }))) {
        Py_DECREF(ref);
        PyErr_NoMemory();
        return -1;
    }
    koila__n_aliases = aliases.n;
    return 0;
}

/* ---- what a tape watches */

/* Adds a watch of value v, whose tensor is `real` now. by: an alias that counts its versions; NULL:
 * none, so the memory is looked at. */
static int watch(koila__tape *t, koila_value v, PyObject *real, PyObject *by)
{
    tape_watch w = { .value = v, .real = real, .alias = by };
    if (by) {
        uint32_t version;
        koila__version_of(by, &version);
        w.mark = version;
    } else if (!koila__fingerprint(real, &w.mark)) {
        return 0; /* on another device: no array sees it */
    }
    if (t->n_watches == t->n_watches_alloc) {
        const uint32_t n = t->n_watches_alloc ? t->n_watches_alloc * 2 : 16;
        tape_watch *p = PyMem_Realloc(t->watches, n * sizeof *p);
        if (!p) {
            PyErr_NoMemory();
            return -1;
        }
        t->watches = p;
        t->n_watches_alloc = n;
    }
    Py_XINCREF(by);
    t->watches[t->n_watches++] = w;
    return 0;
}

static bool is_written(const tape_watch *w)
{
    uint64_t now = w->mark;
    if (!w->alias)
        return koila__fingerprint(w->real, &now) && now != w->mark;
    uint32_t version;
    koila__version_of(w->alias, &version);
    return version != (uint32_t)w->mark;
}

/* Is there a watch of v that already tells, or the memory of v watched as a whole? */
static bool is_watched(const koila__tape *t, koila_value v, const PyObject *real)
{
    for (uint32_t i = 0; i < t->n_watches; i++)
        if (t->watches[i].value == v && t->watches[i].real == real && !t->watches[i].alias)
            return true;
    return false;
}

int koila__watch_leaf(koila__tape *t, koila_value v, PyObject *real, bool counted)
{
    const void *storage = koila__storage_of(real);
    int rc = 0;
    if (t->planned)
        return 0;
    if (!counted)
        return watch(t, v, real, NULL);
    for (uint32_t i = 0; i < aliases.n && rc == 0; i++) {
        if (aliases.at[i].storage != storage || !storage)
            continue;
        PyObject *o = alive(&aliases.at[i]);
        if (o && aliases.at[i].counts)
            rc = watch(t, v, real, o);
        else if (o && !is_watched(t, v, real))
            rc = watch(t, v, real, NULL);
        Py_XDECREF(o);
    }
    return rc;
}

koila_value koila__written_behind(koila__tape *t, const koila_value *value_of)
{
    for (uint32_t i = 0; i < t->n_watches; i++) {
        const tape_watch *w = &t->watches[i];
        if (value_of[w->value] != KOILA_NONE && t->values[w->value].real == w->real &&
            is_written(w))
            return w->value;
    }
    return KOILA_NONE;
}

bool koila__is_written_behind(koila__tape *t, koila_value v)
{
    for (uint32_t i = 0; i < t->n_watches; i++) {
        const tape_watch *w = &t->watches[i];
        if (w->value == v && t->values[v].real == w->real && is_written(w))
            return true;
    }
    return false;
}

void koila__watches_follow(koila__tape *t, koila_value v, PyObject *real)
{
    PyObject *old = t->values[v].real;
    if (!koila__storage_of(old) || koila__storage_of(old) != koila__storage_of(real))
        return;
    for (uint32_t i = 0; i < t->n_watches; i++)
        if (t->watches[i].value == v && t->watches[i].real == old)
            t->watches[i].real = real;
}

void koila__watches_free(koila__tape *t)
{
    tape_watch *w = t->watches;
    const uint32_t n = t->n_watches;
    t->watches = NULL;
    t->n_watches = t->n_watches_alloc = 0;
    for (uint32_t i = 0; i < n; i++)
        Py_XDECREF(w[i].alias);
    PyMem_Free(w);
}

/* ---- handing out */

/* `o`, an alias of the storage, is handed out now: t watches every tensor there that it recorded or
 * computed. */
static int watch_storage(koila__tape *t, const void *storage, PyObject *o, bool counts)
{
    const uint32_t n = koila_graph_n_values(t->graph);
    for (koila_value v = 0; v < n && v < t->n_values_alloc; v++) {
        PyObject *real = t->values[v].real;
        if (!real || koila__storage_of(real) != storage || is_watched(t, v, real))
            continue;
        if (watch(t, v, real, counts ? o : NULL) < 0)
            return -1;
    }
    return 0;
}

/* Tells of an alias `o` of plain tensor `from`. lasting: it shows in a weak reference how long it
 * lives. */
static int handed_out(PyObject *from, PyObject *o, bool counts, bool lasting)
{
    const void *storage = koila__storage_of(from);
    if (!storage || (lasting && remember(storage, o, counts) < 0))
        return storage ? -1 : 0;
    for (koila__tape *t = koila__tapes; t; t = t->next_tape)
        if (!t->let_go && !t->planned && watch_storage(t, storage, o, counts) < 0)
            return -1;
    return 0;
}

/* data_of(tensor): torch's own `tensor.data`, remembered */
PyObject *koila__py_data_of(PyObject *module, PyObject *tensor)
{
    PyObject *data = koila__data_of(tensor);
    if (!data || koila__is_lazy(data) || !koila__is_tensor(data))
        return data;
    if (handed_out(tensor, data, true, true) < 0)
        Py_CLEAR(data);
    return data;
}

/* handed_out(tensor, memory, lasting): `memory` is an alias of tensor without a version counter */
PyObject *koila__py_handed_out(PyObject *module, PyObject *args)
{
    PyObject *tensor, *memory;
    int lasting;
    if (!PyArg_ParseTuple(args, "OOp:handed_out", &tensor, &memory, &lasting))
        return NULL;
    if (koila__is_tensor(tensor) && !koila__is_lazy(tensor) &&
        handed_out(tensor, memory, false, lasting) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* watch(lazy leaf): its memory is somebody else's (numpy's), who may write it */
PyObject *koila__py_watch(PyObject *module, PyObject *lazy)
{
    koila__handle *h = koila__is_lazy(lazy) ? koila__handle_of(lazy) : NULL;
    PyObject *real = h && h->value != KOILA_NONE ? h->group->tape->values[h->value].real : NULL;
    if (real && koila__watch_leaf(h->group->tape, h->value, real, false) < 0)
        return NULL;
    Py_RETURN_NONE;
}
