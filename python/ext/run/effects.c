/* effects.c — what a step leaves behind in plain tensors: BatchNorm's running statistics.
 *
 * An effect is a tensor outside, and the value whose contents become its own. Effects happen at the
 * very end of a step, all of them or none: whoever still reads the old contents gets a copy first,
 * which may fail, and then come copies into memory that is there, which do not.
 */
#include "run/run.h"

/* What t recorded reads the contents that `real` has now: its leaves get a copy of their own before
 * `real` is written. */
static int copy_leaves_of(koila__tape *t, PyObject *real)
{
    const uint32_t n = koila_graph_n_values(t->graph);
    for (koila_value v = 0; v < n; v++) {
        if (t->values[v].real != real || koila_value_get(t->graph, v).node != KOILA_NONE)
            continue;
        PyObject *old = PyObject_CallFunctionObjArgs(koila__torch.clone, real, NULL);
        if (!old)
            return -1;
        koila__tape_set_real(t, v, old);
    }
    return 0;
}

/* Effects that happen now. While they do, torch runs: other threads, and hooks of this one, may
 * record more of them, open tapes and let them go. So all is held that is walked. */
typedef struct happening {
    PyObject **reals;    /* [n] owned: the tensors that are written */
    PyObject **contents; /* [n] owned */
    koila_value *values; /* [n] whose contents those are */
    uint32_t n;
} happening;

static void happening_free(happening *h)
{
    for (uint32_t i = 0; i < h->n; i++) {
        Py_DECREF(h->reals[i]);
        Py_DECREF(h->contents[i]);
    }
    PyMem_Free(h->reals);
    PyMem_Free(h->contents);
    PyMem_Free(h->values);
}

/* The effects of `t` whose values are concrete. */
static int collect(const koila__tape *t, happening *h)
{
    *h = (happening){ .reals = PyMem_Malloc((t->n_effects + 1) * sizeof *h->reals),
                      .contents = PyMem_Malloc((t->n_effects + 1) * sizeof *h->contents),
                      .values = PyMem_Malloc((t->n_effects + 1) * sizeof *h->values) };
    if (!h->reals || !h->contents || !h->values) {
        happening_free(h);
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < t->n_effects; i++) {
        const tape_effect *e = &t->effects[i];
        PyObject *contents = t->values[e->value].real;
        if (!contents || !e->real)
            continue;
        h->reals[h->n] = Py_NewRef(e->real);
        h->contents[h->n] = Py_NewRef(contents);
        h->values[h->n] = e->value;
        h->n++;
    }
    return 0;
}

/* A tape that reads what is about to be written keeps the contents it recorded. */
static int keep_contents_in(koila__tape *reader, const happening *h)
{
    for (uint32_t i = 0; i < h->n; i++) {
        if (!koila__tape_reads(reader, h->reals[i]))
            continue;
        int status = copy_leaves_of(reader, h->reals[i]);
        /* a few bytes, and what the run held is free by now: once more */
        if (status < 0 && koila__is_out_of_memory()) {
            PyErr_Clear();
            status = copy_leaves_of(reader, h->reals[i]);
        }
        if (status < 0)
            return -1;
    }
    return 0;
}

static int keep_old_contents(const happening *h)
{
    uint32_t n = 0, i = 0;
    for (const koila__tape *t = koila__tapes; t; t = t->next_tape)
        n++;
    koila__tape **all = PyMem_Malloc((n + 1) * sizeof *all);
    if (!all) {
        PyErr_NoMemory();
        return -1;
    }
    for (koila__tape *t = koila__tapes; t; t = t->next_tape)
        all[i++] = (koila__tape *)Py_NewRef((PyObject *)t);
    int status = 0;
    for (i = 0; i < n && status == 0; i++)
        status = keep_contents_in(all[i], h);
    for (i = 0; i < n; i++)
        Py_DECREF(all[i]);
    PyMem_Free(all);
    return status;
}

/* A copy between equal dtypes into memory that is there. It is written as BatchNorm's kernel
 * writes: the version that autograd saved stays. */
static int overwrite(PyObject *real, PyObject *contents)
{
    PyObject *data = koila__data_of(real);
    PyObject *done =
        data ? PyObject_CallFunctionObjArgs(koila__torch.copy_, data, contents, NULL) : NULL;
    Py_XDECREF(data);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* What is read of the buffers is theirs again, see _statistics.py. */
static int let_readers_pass(koila__tape *t)
{
    PyObject *done = koila__ask("unguard", (PyObject *)t, NULL, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int commit(koila__tape *t)
{
    happening h;
    if (collect(t, &h) < 0)
        return -1;
    int status = keep_old_contents(&h);
    for (uint32_t i = 0; i < h.n && status == 0; i++)
        status = overwrite(h.reals[i], h.contents[i]);
    if (status == 0)
        koila__tape_drop_happened(t, h.reals, h.values, h.n);
    happening_free(&h);
    return status < 0 || t->n_effects ? status : let_readers_pass(t);
}

int koila__commit_effects(koila__tape *t)
{
    PyObject *modes;
    if (!t->n_effects)
        return 0;
    if (koila__modes_aside(&modes) < 0)
        return -1;
    return koila__modes_back(modes, commit(t));
}

bool koila__effects_pass_by(koila__tape *t, const koila_value *targets, uint32_t n)
{
    koila__part part;
    if (!t->n_effects || koila__part_make(t, targets, n, false, &part) < 0) {
        PyErr_Clear();
        return false;
    }
    bool all = true;
    for (uint32_t i = 0; i < t->n_effects && all; i++)
        all = koila__part_value(&part, t->effects[i].value) != KOILA_NONE;
    koila__part_free(&part);
    return all;
}
