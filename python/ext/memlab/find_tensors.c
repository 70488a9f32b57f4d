/* find_tensors.c — finds all tensor objects: those that the garbage collector lists and, after
 * gc.freeze(), those that can be reached from modules and frames. */
#include "memlab/tensors.h"

#include <frameobject.h>

#include "memlab/memlab.h"
#include "memlab/ptrmap.h"

typedef struct finding {
    PyObject *list;
    koila__ptrmap seen;
    bool failed; /* no memory */
} finding;
/* Adds a tensor to the list. 0: stop, no memory. */
static int add_tensor(finding *f, PyObject *o)
{
    bool added;
    if (!koila__facts_is_tensor(o))
        return 1;
    if (!koila__ptrmap_put(&f->seen, o, &added) || (added && PyList_Append(f->list, o) < 0))
        f->failed = true;
    return !f->failed;
}

#if PY_VERSION_HEX >= 0x030C0000
static int visit_heap(PyObject *o, void *f) { return add_tensor(f, o); }
static void add_known(finding *f, PyObject *gc) { PyUnstable_GC_VisitObjects(visit_heap, f); }
#else
static bool add_generation(finding *f, PyObject *gc, int generation)
{
    PyObject *function = PyObject_GetAttrString(gc, "get_objects");
    PyObject *args = PyTuple_New(0);
    PyObject *kwargs = Py_BuildValue("{si}", "generation", generation);
    PyObject *all = function && args && kwargs ? PyObject_Call(function, args, kwargs) : NULL;
    for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(all); i++)
        add_tensor(f, PyList_GET_ITEM(all, i));
    bool ok = all != NULL;
    Py_XDECREF(all);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    Py_XDECREF(function);
    return ok;
}

static void add_known(finding *f, PyObject *gc)
{
    for (int g = 2; g >= 0; g--) /* the oldest first */
        if (!add_generation(f, gc, g))
            PyErr_Clear();
}
#endif

/* ---- objects that gc.freeze() hid: all that modules and running frames reach */

/* With fewer frozen objects than torch's own modules have, gc.freeze() ran before torch was
 * imported, and no tensor is frozen. CPython 3.12.0 and .1 start with 375. */
enum { FROZEN_WITHOUT_TORCH = 20000 };
typedef struct reaching {
    koila__ptrmap seen;
    VEC(PyObject *) todo; /* owned references */
    bool failed;          /* no memory */
} reaching;
/* A visitproc. */
static int reach(PyObject *o, void *user)
{
    reaching *r = user;
    bool added;
    /* asyncio traverses its free list: taking and dropping a reference to an entry would free it
     * again */
    if (!o || Py_REFCNT(o) == 0 || !PyObject_IS_GC(o))
        return 0;
    if (!koila__vec_reserve(&koila__libc, &r->todo, 1) || !koila__ptrmap_put(&r->seen, o, &added)) {
        r->failed = true;
        return 1;
    }
    if (added)
        r->todo.at[r->todo.n++] = Py_NewRef(o);
    return 0;
}
/* The locals of a running frame, and older frames: its own traversal leaves them out. */
static void reach_from_frame(PyFrameObject *frame, reaching *r)
{
    PyFrameObject *back = PyFrame_GetBack(frame);
    PyObject *locals = PyObject_GetAttrString((PyObject *)frame, "f_locals");
    PyObject *values = locals ? PyMapping_Values(locals) : NULL; /* 3.13 and later: a proxy */
    if (back)
        reach((PyObject *)back, r);
    for (Py_ssize_t i = 0; values && i < PyList_GET_SIZE(values); i++)
        reach(PyList_GET_ITEM(values, i), r);
    Py_XDECREF(back);
    Py_XDECREF(values);
    Py_XDECREF(locals);
    PyErr_Clear();
}
static void add_reachable(finding *f)
{
    reaching r = { 0 };
    reach(PyImport_GetModuleDict(), &r);
    PyObject *frames = PySys_GetObject("_current_frames");
    PyObject *all = frames ? PyObject_CallNoArgs(frames) : NULL;
    if (all)
        reach(all, &r);
    while (r.todo.n && !r.failed) {
        PyObject *o = r.todo.at[--r.todo.n];
        add_tensor(f, o);
        if (PyFrame_Check(o))
            reach_from_frame((PyFrameObject *)o, &r);
        traverseproc traverse = Py_TYPE(o)->tp_traverse;
        if (traverse)
            traverse(o, reach, &r);
        Py_DECREF(o);
    }
    while (r.todo.n)
        Py_DECREF(r.todo.at[--r.todo.n]);
    koila__vec_free(&koila__libc, &r.todo);
    koila__ptrmap_free(&r.seen);
    Py_XDECREF(all);
    PyErr_Clear();
}

static bool much_is_frozen(PyObject *gc)
{
    PyObject *count = PyObject_CallMethod(gc, "get_freeze_count", NULL);
    Py_ssize_t n = count ? PyLong_AsSsize_t(count) : 0;
    Py_XDECREF(count);
    PyErr_Clear();
    return n > FROZEN_WITHOUT_TORCH;
}

PyObject *koila__find_tensors(void)
{
    koila_assert(koila__tensor_base);
    finding f = { .list = PyList_New(0) };
    PyObject *gc = f.list ? PyImport_ImportModule("gc") : NULL;
    if (gc) {
        add_known(&f, gc);
        if (much_is_frozen(gc))
            add_reachable(&f);
        Py_DECREF(gc);
    }
    koila__ptrmap_free(&f.seen);
    if (f.failed) {
        Py_CLEAR(f.list);
        if (!PyErr_Occurred())
            PyErr_NoMemory();
    }
    if (!gc)
        Py_CLEAR(f.list);
    return f.list;
}

/* ---- Python */

static PyObject *find_tensors(PyObject *self, PyObject *torch)
{
    return koila__facts_prepare(torch) < 0 ? NULL : koila__find_tensors();
}

static PyMethodDef methods[] = {
    { "find_tensors", find_tensors, METH_O,
      "find_tensors(torch) -> every tensor object, oldest first." },
    { NULL, NULL, 0, NULL },
};

int koila__find_tensors_add_module(PyObject *m) { return PyModule_AddFunctions(m, methods); }
