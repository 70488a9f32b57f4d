/* operators.c — what is known of each operator. It is found by the address of the OpOverload;
 * Python describes it once (_capture.describe). */
#include "capture/record.h"

op_info *koila__op_slots[KOILA__OP_SLOTS];
static PyObject **op_objects; /* [n_op_objects] by koila_op: owned OpOverload or NULL */
static uint32_t n_op_objects;

static int remember_object(koila_op id, PyObject *func)
{
    if (id >= n_op_objects) {
        const uint32_t n = (id + 1) * 2;
        PyObject **p = PyMem_Realloc(op_objects, n * sizeof *p);
        if (!p) {
            PyErr_NoMemory();
            return -1;
        }
        memset(p + n_op_objects, 0, (n - n_op_objects) * sizeof *p);
        op_objects = p;
        n_op_objects = n;
    }
    if (!op_objects[id])
        op_objects[id] = Py_NewRef(func);
    return 0;
}

PyObject *koila__op_object(koila_op op)
{
    if (op < n_op_objects && op_objects[op])
        return op_objects[op];
    PyObject *name = PyUnicode_FromString(koila_op_name(koila__table, op));
    PyObject *func = name ? koila__ask("op_by_name", name, NULL, NULL) : NULL;
    Py_XDECREF(name);
    if (!func)
        return NULL;
    const int rc = remember_object(op, func);
    Py_DECREF(func);
    return rc < 0 ? NULL : op_objects[op];
}

op_info *koila__op_describe(PyObject *func)
{
    PyObject *d = koila__ask("describe", func, NULL, NULL);
    if (!d)
        return NULL;
    op_info *op = PyMem_Calloc(1, sizeof *op);
    const char *name;
    unsigned flags, kind, result_kind;
    unsigned long long written;
    PyObject *kw, *source, *handler, *rules;
    int overwrites, elementwise;
    if (!op) {
        PyErr_NoMemory();
        goto fail;
    }
    if (!PyArg_ParseTuple(d, "sIIKO!O!IppOO", &name, &flags, &kind, &written, &PyTuple_Type, &kw,
                          &PyTuple_Type, &source, &result_kind, &overwrites, &elementwise, &handler,
                          &rules))
        goto fail;
    const koila_status s = koila_table_op(koila__table, name, flags, &op->id);
    if (s) {
        koila__raise(s);
        goto fail;
    }
    if (remember_object(op->id, func) < 0)
        goto fail;
    op->kind = (uint8_t)kind;
    op->result_kind = (uint8_t)result_kind;
    op->is_view = (flags & KOILA_OP_VIEW) && kind != STRIDED;
    op->overwrites = (uint8_t)overwrites;
    op->elementwise = elementwise;
    op->written = written;
    op->n_results = (uint8_t)PyTuple_GET_SIZE(source);
    for (int i = 0; i < op->n_results && i < 8; i++)
        op->source[i] = (int8_t)PyLong_AsLong(PyTuple_GET_ITEM(source, i));
    op->written_kw = Py_NewRef(kw);
    op->handler = handler == Py_None ? NULL : Py_NewRef(handler);
    op->rules = Py_NewRef(rules);
    op->func = Py_NewRef(func);
    Py_DECREF(d);
    const uint32_t i = (uint32_t)((uintptr_t)func >> 4) & (KOILA__OP_SLOTS - 1);
    op->next = koila__op_slots[i];
    koila__op_slots[i] = op;
    return op;
fail:
    PyMem_Free(op);
    Py_DECREF(d);
    return NULL;
}

/* On each call torch asks a registry, in Python, for a function that replaces the dispatch of the
 * class for this operator. For LazyTensor the answer is looked up here, in the registry's own
 * dict. */
/* owned: torch._library.simple_registry.find_torch_dispatch_rule */
static PyObject *find_in_registry;

PyObject *koila__find_rule(PyObject *module, PyObject *const *a, Py_ssize_t n)
{
    if (n != 2 || !find_in_registry) {
        PyErr_SetString(PyExc_TypeError, "find_rule(operator, class)");
        return NULL;
    }
    op_info *op = a[1] == (PyObject *)koila__lazy_class ? koila__op_find(a[0]) : NULL;
    if (!op || !PyDict_Check(op->rules))
        return PyObject_Vectorcall(find_in_registry, a, 2, NULL);
    PyObject *rule = PyDict_GetItemWithError(op->rules, a[1]);
    if (!rule && PyErr_Occurred())
        return NULL;
    return Py_NewRef(rule ? rule : Py_None);
}

PyObject *koila__find_rules(PyObject *module, PyObject *f)
{
    Py_XSETREF(find_in_registry, Py_NewRef(f));
    Py_RETURN_NONE;
}

int koila__op_sources(koila_op id, const int8_t **source)
{
    PyObject *func = koila__op_object(id);
    const op_info *op = func ? koila__op_of(func) : NULL;
    if (!op)
        return -1;
    *source = op->source;
    return op->n_results;
}
