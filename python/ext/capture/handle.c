/* handle.c — the Value in a LazyTensor's slot, and what it stands for.
 *
 *   class Value:                   # one per wrapper, owned by the wrapper's slot `_v`, dies with
 *                                  it group, chain               # which storage, and which view of
 *                                  it value                      # what it was at group.gen
 */
#include "capture/capture.h"
#include "capture/executor.h"

uint64_t koila__n_handles;
uint32_t koila__n_settled;

#define FREELIST 1024
static koila__handle *freelist[FREELIST];
static int n_free;

static void link_value(koila__handle *h, koila_value v)
{
    h->value = v;
    h->prev_of_value = NULL;
    h->next_of_value = NULL;
    if (v == KOILA_NONE)
        return;
    tape_value *tv = &h->group->tape->values[v];
    h->next_of_value = tv->handle;
    if (tv->handle)
        tv->handle->prev_of_value = h;
    tv->handle = h;
}

static void unlink_value(koila__handle *h)
{
    if (h->value == KOILA_NONE)
        return;
    if (h->prev_of_value)
        h->prev_of_value->next_of_value = h->next_of_value;
    else
        h->group->tape->values[h->value].handle = h->next_of_value;
    if (h->next_of_value)
        h->next_of_value->prev_of_value = h->prev_of_value;
    h->value = KOILA_NONE;
    h->next_of_value = h->prev_of_value = NULL;
}

void koila__handle_set_value(koila__handle *h, koila_value v)
{
    unlink_value(h);
    link_value(h, v);
}

static void attach(koila__handle *h, koila__group *g, koila__chain *c, koila_value v,
                   koila_meta meta, int64_t offset)
{
    g->refs++;
    if (c)
        c->refs++;
    h->group = g;
    h->chain = c;
    h->gen = g->gen;
    h->meta = meta;
    h->offset = offset;
    h->prev_in_group = NULL;
    h->next_in_group = g->handles;
    if (g->handles)
        g->handles->prev_in_group = h;
    g->handles = h;
    koila__tape *t = g->tape;
    h->prev_in_tape = NULL;
    h->next_in_tape = t->handles;
    if (t->handles)
        t->handles->prev_in_tape = h;
    t->handles = h;
    t->n_handles++;
    koila__n_handles++;
    link_value(h, v);
}

/* Leave group, tape and value. Returns the group to free, if it was the last. Runs no Python code.
 */
static koila__group *detach(koila__handle *h)
{
    koila__group *g = h->group;
    koila__tape *t = g->tape;
    unlink_value(h);
    if (h->prev_in_group)
        h->prev_in_group->next_in_group = h->next_in_group;
    else
        g->handles = h->next_in_group;
    if (h->next_in_group)
        h->next_in_group->prev_in_group = h->prev_in_group;
    if (h->prev_in_tape)
        h->prev_in_tape->next_in_tape = h->next_in_tape;
    else
        t->handles = h->next_in_tape;
    if (h->next_in_tape)
        h->next_in_tape->prev_in_tape = h->prev_in_tape;
    t->n_handles--;
    koila__n_handles--;
    koila__chain_release(h->chain);
    h->group = NULL;
    h->chain = NULL;
    return --g->refs == 0 ? g : NULL;
}

static void settle(koila__tape *t)
/* nobody can ask for anything any more, but BatchNorm's statistics must still happen: see Note
 * [Effects] in tape.c */
{
    if (t->n_handles || !t->n_effects)
        return;
    /* a step that failed, or was only planned, changes nothing outside */
    if (t->failed || t->planned) {
        Py_INCREF(t);
        koila__tape_give_up(t);
        Py_DECREF(t);
        return;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_INCREF(t);
    if (koila__tape_drop_overwritten(t) < 0 ||
        (t->n_effects && koila__executor->run(t, NULL, 0, true) < 0)) {
        PyObject *error, *said, *where;
        PyErr_Fetch(&error, &said, &where);
        PyObject *stale = koila__helper("StaleValueError");
        if (stale && error && PyErr_GivenExceptionMatches(error, stale)) {
            Py_CLEAR(error);
            Py_CLEAR(said);
            Py_CLEAR(where);
            if (PyErr_WarnFormat(
                    PyExc_RuntimeWarning, 1,
                    "koila: a training-mode forward pass was left without backward, and what it "
                    "was computed from has been written since: its running statistics (%u) "
                    "stay as they were",
                    t->n_effects) == 0)
                koila__tape_give_up(t);
        }
        Py_XDECREF(stale);
        if (error)
            PyErr_Restore(error, said, where);
        if (PyErr_Occurred())
            PyErr_WriteUnraisable((PyObject *)t);
    }
    Py_DECREF(t);
    PyErr_Restore(type, value, trace);
}

static void leave(koila__handle *h)
{
    koila__tape *t = h->group->tape;
    Py_INCREF(t);
    koila__group *last = detach(h);
    if (last)
        koila__group_free(last);
    if (t->n_effects)
        settle(t);
    if (t->closed && t->n_handles < 16)
        koila__tape_let_go(t);
    /* nothing of it can be asked for: the next lazy() opens a new one */
    if (!t->n_handles && !t->n_effects && !t->waiting && koila__open == t) {
        koila__open = NULL;
        Py_DECREF(t);
        koila__factories_watch();
    }
    Py_DECREF(t);
}

static void handle_dealloc(koila__handle *h)
{
    if (h->group) {
        leave(h);
    } else {
        koila__n_settled--;
        Py_CLEAR(h->wrapper);
    }
    if (n_free < FREELIST)
        freelist[n_free++] = h;
    else
        PyObject_Free(h);
}

void koila__handle_settle(koila__handle *h, PyObject *plain)
{
    if (h->group) {
        leave(h);
        koila__n_settled++;
        h->wrapper = NULL;
    }
    Py_XSETREF(h->wrapper, Py_NewRef(plain));
}

void koila__handle_move(koila__handle *h, koila__group *g, koila__chain *c, koila_value v,
                        koila_meta meta, int64_t offset)
{
    if (c)
        c->refs++; /* both may be what we leave */
    g->refs++;
    koila__group *last = detach(h);
    g->refs--;
    attach(h, g, c, v, meta, offset);
    if (c)
        c->refs--;
    if (last)
        koila__group_free(last);
}

PyTypeObject koila__handle_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "koila._core.Value",
    .tp_basicsize = sizeof(koila__handle),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)handle_dealloc,
    .tp_doc = "What a LazyTensor stands for: a value of a tape.",
};

PyObject *koila__wrapper_new(koila__group *g, koila__chain *c, koila_value v, koila_meta meta,
                             int64_t offset)
{
    PyObject *w = koila__wrapper_alone(meta, offset);
    if (!w)
        return NULL;
    koila__handle *h = n_free ? freelist[--n_free] : PyObject_Malloc(sizeof *h);
    if (!h) {
        Py_DECREF(w);
        return PyErr_NoMemory();
    }
    PyObject_Init((PyObject *)h, &koila__handle_type);
    h->wrapper = w;
    attach(h, g, c, v, meta, offset);
    *(koila__handle **)((char *)w + koila__slot) = h;
    return w;
}

/* ---- groups and chains */

koila__group *koila__group_new(koila__tape *t, koila_value base, koila_meta meta)
{
    koila__group *g = PyObject_Malloc(sizeof *g);
    if (!g) {
        PyErr_NoMemory();
        return NULL;
    }
    Py_INCREF(t);
    *g = (koila__group){ .tape = t, .cur = base, .meta = meta, .gen = 1 };
    return g;
}

void koila__group_free(koila__group *g)
{
    koila__tape *t = g->tape;
    koila__n_factories -= g->factory;
    PyObject_Free(g);
    Py_DECREF(t);
}

koila__chain *koila__chain_new(koila__chain *parent, koila_link link, koila_meta meta,
                               int64_t offset, uint32_t gen, koila_value v)
{
    koila__chain *c = PyObject_Malloc(sizeof *c);
    if (!c) {
        PyErr_NoMemory();
        return NULL;
    }
    if (parent)
        parent->refs++;
    *c = (koila__chain){ .n_links = parent ? parent->n_links + 1 : 1,
                         .parent = parent,
                         .link = link,
                         .meta = meta,
                         .offset = offset,
                         .memo_gen = gen,
                         .memo = v };
    return c;
}

bool koila__chain_conjugated(const koila__chain *c)
{
    bool odd = false;
    for (; c; c = c->parent) {
        const uint32_t facts = koila__facts_of(c->link.sig);
        if (facts & (KOILA_FACT_AS_COMPLEX | KOILA_FACT_AS_REAL))
            break;
        odd ^= (facts & KOILA_FACT_CONJUGATES) != 0;
    }
    return odd;
}

void koila__chain_release(koila__chain *c)
{
    while (c && --c->refs == 0) {
        koila__chain *parent = c->parent;
        PyObject_Free(c);
        c = parent;
    }
}
