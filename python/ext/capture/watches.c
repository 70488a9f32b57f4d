/* watches.c — writes that no version counter of a recorded tensor shows.
 *
 * Note [Back doors]. A leaf that was written after it was recorded is found by its version counter
 * (Note [Leaves] in tape.c). Some aliases do not count there: `t.data` has a counter of its own,
 * and a numpy array, a DLPack capsule or a storage has none. They are handed out by Python
 * functions, which _doors.py wraps, so they are known; then the tape watches what it recorded:
 *
 *   an alias with a counter   its counter, of which the tape keeps the alias alive
 *   memory                    a fingerprint of the elements, taken now and again at the run
 *
 * Some kernels of torch write lists of tensors and count nothing (`_fused_adam_`; on a GPU
 * `_foreach_zero_`). The plain program relies on that, so its counters stay: what was recorded gets
 * an alias that has nothing to do with it, a witness, whose counter is moved.
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

int koila__alias_remember(const void *storage, PyObject *o, bool counts)
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

int koila__watch(koila__tape *t, koila_value v, PyObject *real, PyObject *by)
{
    tape_watch w = { .value = v, .real = real, .alias = by };
    if (by) {
        uint32_t version;
        koila__version_of(by, &version);
        w.mark = version;
    } else {
        const int known = koila__fingerprint(real, &w.mark);
        if (known <= 0 || t->values[v].real != real)
            return known < 0 ? -1 : 0;
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

/* Of memory whose fingerprint cannot be taken any more nobody knows: it counts as written. w: a
 * copy, for on a GPU Python runs, and other threads, which may add watches. */
static bool is_written(tape_watch w)
{
    if (w.alias) {
        uint32_t version;
        koila__version_of(w.alias, &version);
        return version != (uint32_t)w.mark;
    }
    PyObject *type, *value, *trace;
    uint64_t now;
    PyErr_Fetch(&type, &value, &trace);
    Py_INCREF(w.real);
    const int known = koila__fingerprint(w.real, &now);
    Py_DECREF(w.real);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return known < 0 || (known && now != w.mark);
}

bool koila__is_watched(const koila__tape *t, koila_value v, const PyObject *real)
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
    bool is_memory = !counted;
    for (uint32_t i = 0; counted && i < aliases.n && rc == 0; i++) {
        if (aliases.at[i].storage != storage || !storage)
            continue;
        PyObject *o = alive(&aliases.at[i]);
        if (o && aliases.at[i].counts)
            rc = koila__watch(t, v, real, o);
        is_memory |= o && !aliases.at[i].counts;
        Py_XDECREF(o);
    }
    return rc == 0 && is_memory && !koila__is_watched(t, v, real) ? koila__watch(t, v, real, NULL)
                                                                  : rc;
}

koila_value koila__written_behind(koila__tape *t, const koila_value *value_of, uint32_t n)
{
    for (uint32_t i = 0; i < t->n_watches; i++) {
        const tape_watch w = t->watches[i];
        if (w.value < n && value_of[w.value] && t->values[w.value].real == w.real && is_written(w))
            return w.value;
    }
    return KOILA_NONE;
}

bool koila__is_written_behind(koila__tape *t, koila_value v)
{
    for (uint32_t i = 0; i < t->n_watches; i++) {
        const tape_watch w = t->watches[i];
        if (w.value == v && t->values[v].real == w.real && is_written(w))
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
