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
    for (koila_value v = 0; v < koila_graph_n_values(t->graph); v++) {
        if (t->values[v].real != real || koila_value_get(t->graph, v).node != KOILA_NONE)
            continue;
        PyObject *old = PyObject_CallFunctionObjArgs(koila__torch.clone, real, NULL);
        if (!old)
            return -1;
        koila__tape_set_real(t, v, old);
    }
    return 0;
}

/* Every tape that reads what t's effects write keeps the contents it recorded. */
static int keep_old_contents(const koila__tape *t)
{
    for (koila__tape *reader = koila__tapes; reader; reader = reader->next_tape)
        for (uint32_t i = 0; i < t->n_effects; i++) {
            PyObject *real = t->effects[i].real;
            if (!koila__tape_reads(reader, real))
                continue;
            int status = copy_leaves_of(reader, real);
            /* a few bytes, and what the run held is free by now: once more */
            if (status < 0 && koila__is_out_of_memory()) {
                PyErr_Clear();
                status = copy_leaves_of(reader, real);
            }
            if (status < 0)
                return -1;
        }
    return 0;
}

/* A copy between equal dtypes into memory that is there. It is written as BatchNorm's kernel
 * writes: the version that autograd saved stays. */
static int overwrite(PyObject *real, PyObject *contents)
{
    PyObject *data = PyObject_GetAttrString(real, "data");
    PyObject *done =
        data ? PyObject_CallFunctionObjArgs(koila__torch.copy_, data, contents, NULL) : NULL;
    Py_XDECREF(data);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int commit(koila__tape *t)
{
    if (keep_old_contents(t) < 0)
        return -1;
    for (uint32_t i = 0; i < t->n_effects; i++) {
        const tape_effect *e = &t->effects[i];
        PyObject *contents = t->values[e->value].real;
        if (contents && e->real && overwrite(e->real, contents) < 0)
            return -1;
    }
    koila__tape_drop_effects(t);
    return 0;
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
    if (!t->n_effects || koila__part_make(t, targets, n, &part) < 0) {
        PyErr_Clear();
        return false;
    }
    bool all = true;
    for (uint32_t i = 0; i < t->n_effects && all; i++)
        all = part.value_of[t->effects[i].value] != KOILA_NONE;
    koila__part_free(&part);
    return all;
}
