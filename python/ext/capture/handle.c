/* handle.c — the Value in a LazyTensor's slot: it is made with its wrapper and dies with it.
 *
 *   class Value:       # one for each wrapper, owned by the wrapper's slot `_v`
 *       group, chain   # which storage, and which view of it
 *       value          # the value of that view when group.gen was `gen`
 */
#include "capture/capture.h"

uint32_t koila__n_settled;

#define FREELIST 1024
static koila__handle *freelist[FREELIST];
static int n_free;

static void leave(koila__handle *h)
{
    koila__tape *t = h->group->tape;
    Py_INCREF(t);
    koila__group *last = koila__handle_detach(h);
    if (last)
        koila__group_free(last);
    koila__step_left(t);
    Py_DECREF(t);
}

static void handle_dealloc(koila__handle *h)
{
    if (h->group) {
        leave(h);
    } else {
        koila_assert(koila__n_settled > 0);
        koila__n_settled--;
        Py_CLEAR(h->wrapper);
    }
    if (n_free < FREELIST)
        freelist[n_free++] = h;
    else
        PyObject_Free(h);
}

void koila__handle_make_plain(koila__handle *h, PyObject *plain)
{
    if (h->group) {
        leave(h);
        koila__n_settled++;
        h->wrapper = NULL;
    }
    Py_XSETREF(h->wrapper, Py_NewRef(plain));
}

PyTypeObject koila__handle_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.Value",
    .tp_basicsize = sizeof(koila__handle),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)handle_dealloc,
    .tp_doc = "What a LazyTensor stands for: a value of a tape.",
};

bool koila__begins_within(PyObject *o)
{
    return koila__is_lazy(o) && koila__handle_of(o)->group->begins_within;
}

PyObject *koila__moved_meanwhile(void)
{
    return koila__unsupported(
        "a tensor went on to another step while a view of it was made: Python "
        "code ran inside (a finaliser, a callback of the garbage collector) "
        "and used it");
}

PyObject *koila__wrapper_new(koila__group *g, koila__chain *c, koila_value v, koila_meta meta,
                             int64_t offset)
{
    /* A new object: the collector may run Python, which may write the group, or move it on. */
    const bool is_new = !g->refs;
    const uint32_t gen = g->gen;
    g->refs++;
    PyObject *w = koila__wrapper_alone(meta, offset);
    if (--g->refs == 0 && !is_new) {
        koila__group_free(g);
        if (w)
            koila__moved_meanwhile();
        Py_CLEAR(w);
    }
    if (!w)
        return NULL;
    koila__handle *h = n_free ? freelist[--n_free] : PyObject_Malloc(sizeof *h);
    if (!h) {
        Py_DECREF(w);
        return PyErr_NoMemory();
    }
    if (g->gen != gen)
        v = c ? KOILA_NONE : g->cur;
    koila_assert(v == KOILA_NONE || v < koila_graph_n_values(g->tape->graph));
    PyObject_Init((PyObject *)h, &koila__handle_type);
    h->wrapper = w;
    h->is_unheld = false;
    h->is_inference = koila__maybe_inference();
    h->is_data = false;
    koila__handle_attach(h, g, c, v, meta, offset);
    *(koila__handle **)((char *)w + koila__slot) = h;
    return w;
}
