/* measure.c — koila.memlab.measure(): a device's memory while a block of code runs.
 *
 * Measure is equivalent to:
 *     class Measure:                 # a context manager
 *         def __init__(self, device): ...     # 0: the CPU, 1 + i: accelerator i
 *         start, end, peak, rise, alloc, freed, allocs, frees: int
 *                                    # live inside the block, final after it
 *
 * An event in flight may still read a span when it ends. So spans are never freed, only reused.
 */
#include "memlab/memlab.h"

#include <stdlib.h>

#include "base/text.h"
#include "ground/cpu_bytes.h"

#define METER (&koila__memlab_meter)

static koila__span *spare_spans[KOILA__SPANS_MAX];
static int n_spare_spans;

typedef struct measure {
    PyObject_HEAD
    int device;
    koila__span *span;   /* NULL until entered */
    uint64_t generation; /* generation of the CPU's count at the beginning */
} measure;

static PyObject *measure_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int device;
    if (!PyArg_ParseTuple(args, "i:Measure", &device))
        return NULL;
    koila__memlab_listen();
    if (device < 0 || device >= METER->n_devices)
        return PyErr_Format(PyExc_ValueError, "measure: device %d: there are %d", device,
                            METER->n_devices);
    measure *m = (measure *)type->tp_alloc(type, 0);
    if (m)
        m->device = device;
    return (PyObject *)m;
}
static void measure_dealloc(measure *m)
{
    PyTypeObject *type = Py_TYPE(m);
    if (m->span) {
        koila__span_close(METER, m->span);
        koila_assert(!m->span->open);
        if (n_spare_spans < KOILA__SPANS_MAX)
            spare_spans[n_spare_spans++] = m->span;
    }
    type->tp_free(m);
    Py_DECREF(type);
}
static PyObject *measure_enter(measure *m, PyObject *none)
{
    if (!m->span)
        m->span = n_spare_spans ? spare_spans[--n_spare_spans] : calloc(1, sizeof *m->span);
    if (!m->span)
        return PyErr_NoMemory();
    if (m->span->open)
        return PyErr_Format(PyExc_RuntimeError,
                            "measure: this one is already open; nest another measure()");
    if (!koila__span_open(METER, m->span, m->device))
        return PyErr_Format(PyExc_RuntimeError, "measure: more than %d are open", KOILA__SPANS_MAX);
    m->generation = koila__cpu_bytes_generation();
    return Py_NewRef(m);
}
static PyObject *measure_exit(measure *m, PyObject *args)
{
    if (m->span)
        koila__span_close(METER, m->span);
    bool lost = m->device == 0 && koila__events_lost_cpu(m->generation);
    if (lost && PyErr_WarnEx(PyExc_UserWarning,
                             "koila.memlab.measure: another tool overwrote the CPU allocator hook "
                             "inside; the numbers are void",
                             1) < 0)
        return NULL;
    Py_RETURN_FALSE;
}

/* The growth between two readings, of small and large blocks together. */
static uint64_t inside(const uint64_t last[2], const uint64_t first[2])
{
    return last[0] + last[1] - first[0] - first[1];
}

enum { START, END, PEAK, RISE, ALLOC, FREED, ALLOCS, FREES };
static PyObject *measure_get(measure *m, void *what)
{
    koila__span *s = m->span;
    if (!s)
        return PyErr_Format(PyExc_AttributeError, "measure: nothing measured yet");
    uint64_t end = s->open ? koila__meter_now(METER, s->device, KOILA__Q_BYTES_ALL) : s->end_bytes;
    uint64_t peak = atomic_load(&s->peak);
    koila__sums last = s->end;
    if (s->open)
        koila__meter_sums(METER, s->device, &last);
    switch ((int)(intptr_t)what) {
    case START:
        return PyLong_FromUnsignedLongLong(s->start_bytes);
    case END:
        return PyLong_FromUnsignedLongLong(end);
    case PEAK:
        return PyLong_FromUnsignedLongLong(peak);
    case RISE:
        return PyLong_FromUnsignedLongLong(peak - s->start_bytes);
    case ALLOC:
        return PyLong_FromUnsignedLongLong(inside(last.alloc_bytes, s->start.alloc_bytes));
    case FREED:
        return PyLong_FromUnsignedLongLong(inside(last.freed_bytes, s->start.freed_bytes));
    case ALLOCS:
        return PyLong_FromUnsignedLongLong(inside(last.n_allocs, s->start.n_allocs));
    default:
        return PyLong_FromUnsignedLongLong(inside(last.n_frees, s->start.n_frees));
    }
}
static PyObject *measure_repr(measure *m)
{
    char rise[32], alloc[32], freed[32];
    if (!m->span)
        return PyUnicode_FromString("<koila.memlab.measure: not entered>");
    unsigned long long n[3];
    const int what[] = { RISE, ALLOC, FREED };
    for (int k = 0; k < 3; k++) {
        PyObject *value = measure_get(m, (void *)(intptr_t)what[k]);
        n[k] = value ? PyLong_AsUnsignedLongLong(value) : 0;
        Py_XDECREF(value);
        if (!value)
            return NULL;
    }
    return PyUnicode_FromFormat(
        "<koila.memlab.measure: rise %s, allocated %s, freed %s%s>",
        koila__size_text((double)n[0], rise), koila__size_text((double)n[1], alloc),
        koila__size_text((double)n[2], freed), m->span->open ? ", so far" : "");
}
static PyMethodDef measure_methods[] = {
    { "__enter__", (PyCFunction)measure_enter, METH_NOARGS, NULL },
    { "__exit__", (PyCFunction)measure_exit, METH_VARARGS, NULL },
    { NULL, NULL, 0, NULL },
};
static PyGetSetDef measure_getset[] = {
    { "start", (getter)measure_get, NULL, "Bytes at the beginning.", (void *)START },
    { "end", (getter)measure_get, NULL, "Bytes at the end, or now.", (void *)END },
    { "peak", (getter)measure_get, NULL, "Highest bytes inside.", (void *)PEAK },
    { "rise", (getter)measure_get, NULL, "peak - start: the additional memory needed.",
      (void *)RISE },
    { "alloc", (getter)measure_get, NULL, "Bytes handed out inside.", (void *)ALLOC },
    { "freed", (getter)measure_get, NULL, "Bytes taken back inside.", (void *)FREED },
    { "allocs", (getter)measure_get, NULL, "Blocks handed out inside.", (void *)ALLOCS },
    { "frees", (getter)measure_get, NULL, "Blocks taken back inside.", (void *)FREES },
    { NULL, NULL, NULL, NULL, NULL },
};
static PyType_Slot measure_slots[] = {
    { Py_tp_doc,
      "The exact effect of a block of code on a device's memory; see koila.memlab.measure." },
    { Py_tp_new, measure_new },
    { Py_tp_dealloc, measure_dealloc },
    { Py_tp_repr, measure_repr },
    { Py_tp_methods, measure_methods },
    { Py_tp_getset, measure_getset },
    { 0, NULL },
};
static PyType_Spec measure_spec = { "koila._core.Measure", sizeof(measure), 0, Py_TPFLAGS_DEFAULT,
                                    measure_slots };

int koila__measure_add_module(PyObject *m)
{
    PyObject *type = PyType_FromSpec(&measure_spec);
    if (!type || PyModule_AddObject(m, "Measure", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    return 0;
}
