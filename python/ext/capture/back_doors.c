/* back_doors.c — aliases of plain tensors that count no versions are handed out, and the tapes are
 * told, see Note [Back doors] in watches.c. */
#include "capture/capture.h"

/* `o`, an alias of the storage, is handed out now: t watches every tensor there that it recorded or
 * computed. */
static int watch_storage(koila__tape *t, const void *storage, PyObject *o, bool counts)
{
    const uint32_t n = koila_graph_n_values(t->graph);
    for (koila_value v = 0; v < n && v < t->n_values_alloc; v++) {
        PyObject *real = t->values[v].real;
        if (!real || koila__storage_of(real) != storage || koila__is_watched(t, v, real))
            continue;
        if (koila__watch(t, v, real, counts ? o : NULL) < 0)
            return -1;
    }
    return 0;
}

static int watch_storage_in(koila__tape *first, const void *storage, PyObject *o, bool counts)
{
    int rc = 0;
    Py_XINCREF(first);
    for (koila__tape *t = first; t;) { /* of memory on a GPU Python takes the fingerprint */
        if (rc == 0 && !t->let_go && !t->planned)
            rc = watch_storage(t, storage, o, counts);
        koila__tape *next = t->next_tape;
        Py_XINCREF(next);
        Py_DECREF(t);
        t = next;
    }
    return rc;
}

/* Tells of an alias `o` of plain tensor `from`. lasting: it shows in a weak reference how long it
 * lives. */
static int handed_out(PyObject *from, PyObject *o, bool counts, bool lasting)
{
    const void *storage = koila__storage_of(from);
    if (!storage || (lasting && koila__alias_remember(storage, o, counts) < 0))
        return storage ? -1 : 0;
    return watch_storage_in(koila__tapes, storage, o, counts) < 0 ||
                   watch_storage_in(koila__resting_tapes, storage, o, counts) < 0
               ? -1
               : 0;
}

static int by_address(const void *a, const void *b)
{
    const uintptr_t x = (uintptr_t)*(const void *const *)a;
    const uintptr_t y = (uintptr_t)*(const void *const *)b;
    return (x > y) - (x < y);
}

/* One pass over the tape. A value that has such a watch gets no second one. */
static int watch_storages(koila__tape *t, const void *const *storages, size_t n_storages,
                          PyObject *witness)
{
    uint32_t n = koila_graph_n_values(t->graph);
    n = n < t->n_values_alloc ? n : t->n_values_alloc;
    bool *watched = PyMem_Calloc(n ? n : 1, sizeof *watched);
    if (!watched) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint32_t i = 0; i < t->n_watches; i++) {
        const tape_watch *w = &t->watches[i];
        if (w->alias == witness && w->value < n && t->values[w->value].real == w->real)
            watched[w->value] = true;
    }
    int rc = 0;
    for (koila_value v = 0; v < n && rc == 0; v++) {
        PyObject *real = t->values[v].real;
        const void *storage = real && !watched[v] ? koila__storage_of(real) : NULL;
        if (storage && bsearch(&storage, storages, n_storages, sizeof *storages, by_address))
            rc = koila__watch(t, v, real, witness);
    }
    PyMem_Free(watched);
    return rc;
}

/* written(tensors, witness): these plain tensors were written, and their versions do not say so.
 * What was recorded from them is stale as soon as the version of `witness` moves. */
PyObject *koila__py_written(PyObject *module, PyObject *args)
{
    PyObject *tensors, *witness;
    if (!PyArg_ParseTuple(args, "O!O:written", &PyList_Type, &tensors, &witness))
        return NULL;
    if (!koila__tapes && !koila__resting_tapes)
        Py_RETURN_NONE;
    const void **storages = PyMem_Calloc((size_t)PyList_GET_SIZE(tensors) + 1, sizeof *storages);
    if (!storages)
        return PyErr_NoMemory();
    size_t n = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *o = PyList_GET_ITEM(tensors, i);
        if (koila__is_tensor(o) && !koila__is_lazy(o) && koila__storage_of(o))
            storages[n++] = koila__storage_of(o);
    }
    qsort(storages, n, sizeof *storages, by_address);
    int rc = 0;
    for (koila__tape *t = koila__tapes; t && rc == 0; t = t->next_tape)
        if (!t->let_go && !t->planned)
            rc = watch_storages(t, storages, n, witness);
    for (koila__tape *t = koila__resting_tapes; t && rc == 0; t = t->next_tape)
        if (!t->let_go && !t->planned)
            rc = watch_storages(t, storages, n, witness);
    PyMem_Free(storages);
    if (rc < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* data_of(tensor): torch's own `tensor.data`, remembered */
PyObject *koila__py_data_of(PyObject *module, PyObject *tensor)
{
    PyObject *data = koila__data_of(tensor);
    if (data && koila__is_lazy(data))
        koila__handle_of(data)->is_data = true;
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
