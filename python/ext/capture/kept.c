/* kept.c — results of runs that a tape keeps for its next runs.
 *
 * Note [Kept]. What is computed for a value that is read in the middle of a step is needed again:
 * by the next read, and by the backward. A kept value is such a result. It is not concrete: the
 * program cannot get at it, so nobody writes it. A run takes it for a leaf instead of computing it
 * again; the part of the run holds it (run/part.c), so it may be dropped here at any time.
 * run/reads.c decides what is kept and until when. All of it ends with the step.
 *
 * No memory of a kept value is ever that of a tensor outside: neither of a leaf nor of a value that
 * was handed out, for writes there would change it. Kept values may share memory among themselves.
 */
#include "capture/capture.h"

static uint64_t bytes_of(const koila__tape *t, koila_value v)
{
    return koila_meta_get(koila__table, koila_value_get(t->graph, v).meta)->n_bytes;
}

const koila__kept *koila__kept_of(const koila__tape *t, koila_value v)
{
    const uint32_t at = t->values[v].kept;
    koila_assert(!at || (at <= t->kept.n && t->kept.at[at - 1].value == v));
    return at ? &t->kept.at[at - 1] : NULL;
}

void koila__keep(koila__tape *t, koila__kept kept)
{
    koila_assert(kept.tensor && kept.storage);
    bool has_room = t->kept.n < t->kept.n_alloc;
    if (!has_room) {
        const uint32_t n = t->kept.n_alloc ? 2 * t->kept.n_alloc : 32;
        koila__kept *more = PyMem_Realloc(t->kept.at, n * sizeof *more);
        has_room = more != NULL;
        if (more) {
            t->kept.at = more;
            t->kept.n_alloc = n;
        }
    }
    tape_value *value = &t->values[kept.value];
    if (t->closed || value->real || value->kept || !has_room) {
        Py_DECREF(kept.tensor);
        return;
    }
    t->kept.at[t->kept.n++] = kept;
    value->kept = t->kept.n;
    t->kept.n_bytes += bytes_of(t, kept.value);
}

/* A tensor that dies may run Python, so the list is whole before that. */
void koila__unkeep(koila__tape *t, koila_value v)
{
    const uint32_t at = t->values[v].kept;
    if (!at)
        return;
    PyObject *gone = t->kept.at[at - 1].tensor;
    const koila__kept last = t->kept.at[--t->kept.n];
    koila_assert(t->kept.n_bytes >= bytes_of(t, v));
    t->kept.n_bytes -= bytes_of(t, v);
    t->values[v].kept = 0;
    if (last.value != v) {
        t->kept.at[at - 1] = last;
        t->values[last.value].kept = at;
    }
    Py_DECREF(gone);
}

void koila__unkeep_all(koila__tape *t)
{
    while (t->kept.n)
        koila__unkeep(t, t->kept.at[t->kept.n - 1].value);
}

uint32_t koila__unkeep_those(koila__tape *t, koila__kept_test *goes, void *user)
{
    uint32_t n = 0;
    for (uint32_t i = t->kept.n; i-- > 0;) {
        if (i >= t->kept.n) { /* others went meanwhile */
            i = t->kept.n;
            continue;
        }
        const koila_value v = t->kept.at[i].value;
        if (!goes(t, v, user))
            continue;
        koila__unkeep(t, v);
        n++;
    }
    return n;
}

static bool has_storage(const koila__tape *t, koila_value v, void *storage)
{
    return koila__kept_of(t, v)->storage == storage;
}

void koila__unkeep_storage(koila__tape *t, const void *storage)
{
    koila__unkeep_those(t, has_storage, (void *)storage);
}
