/* concrete.c — lazy values become tensors, because somebody asks for them. */
#include "capture/capture.h"
#include "capture/executor.h"

/* What depends on no data and has no rows (a table of positions) is no part of the step that runs:
 * it is computed at once, as without koila, and settles if it needs no gradient. 1: it was; 0: it
 * is another value; -1 + error. */
static int make_known(koila__handle *h)
{
    koila__tape *t = h->group ? h->group->tape : NULL;
    if (!t || !koila__is_known(h->group))
        return 0;
    const int settled = koila__requires_grad(h->wrapper) ? 0 : koila__settle(h->wrapper);
    if (settled)
        return settled;
    const koila_value v = koila__value_of(h);
    if (v == KOILA_NONE)
        return -1;
    return t->values[v].real || koila__executor->run_whole(t, &v, 1) == 0 ? 1 : -1;
}

int koila__concrete_many(koila__handle *const *h, uint32_t n)
{
    koila_value fixed[64], *want = n <= 64 ? fixed : PyMem_Malloc(n * sizeof *want);
    if (!want) {
        PyErr_NoMemory();
        return -1;
    }
    int rc = 0;
    bool *done = PyMem_Calloc(n ? n : 1, sizeof *done);
    if (!done) {
        rc = -1;
        PyErr_NoMemory();
    }
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        const int known = make_known(h[i]);
        rc = known < 0 ? -1 : 0;
        done[i] = known;
    }
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        if (done[i] || !h[i]->group) /* one that settled meanwhile is plain */
            continue;
        /* one run for each tape */
        koila__tape *t = (koila__tape *)Py_NewRef((PyObject *)h[i]->group->tape);
        uint32_t m = 0;
        for (uint32_t j = i; j < n; j++) {
            if (!h[j]->group || h[j]->group->tape != t)
                continue;
            done[j] = true;
            const koila_value v = koila__value_of(h[j]);
            if (v == KOILA_NONE) {
                rc = -1;
                break;
            }
            if (!t->values[v].real)
                want[m++] = v;
        }
        if (rc == 0 && m) {
            rc = koila__executor->run(t, want, m, false);
            t->ran = true;
            /* compact a closed tape again: a running total must not keep all past losses alive */
            t->compacted = false;
            koila__tape_rests(t, false);
        }
        Py_DECREF(t);
    }
    PyMem_Free(done);
    if (want != fixed)
        PyMem_Free(want);
    return rc;
}

PyObject *koila__values_on(koila__handle *h, PyObject *device)
{
    if (!h->group || !koila__is_planning())
        return Py_XNewRef(koila__concrete(h));
    const koila_value v = koila__value_of(h);
    return v == KOILA_NONE ? NULL
                           : koila__executor->run_elsewhere(h->group->tape, v,
                                                            koila__is_known(h->group), device);
}

PyObject *koila__concrete(koila__handle *h)
{
    if (koila__concrete_many(&h, 1) < 0)
        return NULL;
    if (!h->group)
        return h->wrapper; /* it settled meanwhile */
    const koila_value v = koila__value_of(h);
    if (v == KOILA_NONE)
        return NULL;
    PyObject *r = h->group->tape->values[v].real;
    if (!r)
        PyErr_SetString(PyExc_SystemError, "koila: a value was run and has no tensor");
    return r;
}
