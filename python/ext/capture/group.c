/* group.c — groups (one storage each), chains (views) and handles: their references and the lists
 * that they are in. */
#include "capture/capture.h"

uint64_t koila__n_handles;
uint32_t koila__n_factories;

/* ---- a handle's value, group and tape */

/* Nobody can ask for value v of t any more. Only a planned step is told so (for predictions); where
 * there is no memory for it, they are only less exact. */
static void tell_drop(koila__tape *t, koila_value v)
{
    if (t->planned && !t->closed && v < koila_graph_n_values(t->graph))
        (void)koila_graph_drop(t->graph, v);
}

static void link_value(koila__handle *h, koila_value v)
{
    koila__group *g = h->group;
    h->value = v;
    h->prev_with_value = NULL;
    h->next_with_value = NULL;
    if (v == KOILA_NONE)
        return;
    koila_assert(v < g->tape->n_values_alloc);
    g->tape->values[v].n_handles++;
    koila_assert(!g->with_value || !g->with_value->prev_with_value);
    h->next_with_value = g->with_value;
    if (g->with_value)
        g->with_value->prev_with_value = h;
    g->with_value = h;
}

static void unlink_value(koila__handle *h)
{
    if (h->value == KOILA_NONE)
        return;
    koila__group *g = h->group;
    koila_assert(h->prev_with_value || g->with_value == h);
    if (h->prev_with_value)
        h->prev_with_value->next_with_value = h->next_with_value;
    else
        g->with_value = h->next_with_value;
    if (h->next_with_value)
        h->next_with_value->prev_with_value = h->prev_with_value;
    tape_value *v = &g->tape->values[h->value];
    koila_assert(v->n_handles > 0);
    if (--v->n_handles == 0 && g->cur != h->value)
        tell_drop(g->tape, h->value);
    h->value = KOILA_NONE;
    h->next_with_value = h->prev_with_value = NULL;
}

void koila__handle_set_value(koila__handle *h, koila_value v)
{
    unlink_value(h);
    link_value(h, v);
}

void koila__handle_attach(koila__handle *h, koila__group *g, koila__chain *c, koila_value v,
                          koila_meta meta, int64_t offset)
{
    koila_assert(c || v != KOILA_NONE);
    g->refs++;
    if (c)
        c->refs++;
    h->group = g;
    h->chain = c;
    h->gen = g->gen;
    h->meta = meta;
    h->offset = offset;
    koila_assert(!g->handles || (g->handles->group == g && !g->handles->prev_in_group));
    g->n_bases += !c;
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

static void leave_group(koila__handle *h)
{
    koila_assert(h->prev_in_group || h->group->handles == h);
    if (h->prev_in_group)
        h->prev_in_group->next_in_group = h->next_in_group;
    else
        h->group->handles = h->next_in_group;
    if (h->next_in_group)
        h->next_in_group->prev_in_group = h->prev_in_group;
}

void koila__handle_stand_beside(koila__handle *h, koila__handle *other)
{
    koila_assert(h->group == other->group && h != other);
    leave_group(h);
    h->prev_in_group = other;
    h->next_in_group = other->next_in_group;
    if (other->next_in_group)
        other->next_in_group->prev_in_group = h;
    other->next_in_group = h;
}

/* Takes the handle off its group, tape and value. Returns the group to free, if this was its last
 * handle. Runs no Python code. */
koila__group *koila__handle_detach(koila__handle *h)
{
    koila__group *g = h->group;
    koila__tape *t = g->tape;
    koila_assert(g->refs > 0 && t->n_handles > 0 && koila__n_handles >= t->n_handles);
    unlink_value(h);
    leave_group(h);
    g->n_bases -= !h->chain;
    if (h->prev_in_tape)
        h->prev_in_tape->next_in_tape = h->next_in_tape;
    else
        t->handles = h->next_in_tape;
    if (h->next_in_tape)
        h->next_in_tape->prev_in_tape = h->prev_in_tape;
    t->n_handles--;
    koila__n_handles--;
    koila_assert((t->n_handles == 0) == (t->handles == NULL));
    koila__chain_release(h->chain);
    h->group = NULL;
    h->chain = NULL;
    return --g->refs == 0 ? g : NULL;
}

void koila__handle_move(koila__handle *h, koila__group *g, koila__chain *c, koila_value v,
                        koila_meta meta, int64_t offset)
{
    if (c)
        c->refs++; /* the references keep c and g, which may be those that h leaves now */
    g->refs++;
    koila__group *last = koila__handle_detach(h);
    g->refs--;
    koila__handle_attach(h, g, c, v, meta, offset);
    if (c)
        c->refs--;
    if (last)
        koila__group_free(last);
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
    koila_assert(!g->handles && koila__n_factories >= g->factory);
    koila__n_factories -= g->factory;
    tell_drop(t, g->cur);
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

static PyObject *layout(const koila_meta_info *m, int64_t offset)
{
    PyObject *size = koila__ints_object(m->size, m->n_dims);
    PyObject *stride = koila__ints_object(m->stride, m->n_dims);
    return Py_BuildValue("(LNN)", (long long)offset, size, stride);
}

/* Do elements of a tensor that lazy() was given lie on each other? -1 + error if they do. */
static int check_elements_apart(const koila_meta_info *m, PyObject *func)
{
    PyObject *of_m = layout(m, 0);
    PyObject *ok = of_m ? koila__ask("check_elements_apart", func, of_m, NULL) : NULL;
    Py_XDECREF(of_m);
    Py_XDECREF(ok);
    return ok ? 0 : -1;
}

/* Do the tensors that lazy() was given as a and b lie on each other? Bytes between the first and
 * the last element of each are compared here, elements in Python. -1 + error if they do. */
static int check_apart(const koila__group *a, const koila__group *b, PyObject *func)
{
    const koila_meta_info *x = koila_meta_get(koila__table, a->meta);
    const koila_meta_info *y = koila_meta_get(koila__table, b->meta);
    if (x->device != y->device || a->given_at + x->n_storage_bytes <= b->given_at ||
        b->given_at + y->n_storage_bytes <= a->given_at)
        return 0;
    const int64_t bytes = (int64_t)(b->given_at - a->given_at);
    const int64_t element = (int64_t)koila_dtype_bytes(x->dtype);
    const bool alike = koila_dtype_bytes(y->dtype) == (uint64_t)element && bytes % element == 0;
    PyObject *of_a = layout(x, 0);
    PyObject *of_b = !alike ? Py_NewRef(Py_None) : layout(y, bytes / element);
    PyObject *ok = of_a && of_b ? koila__ask("check_apart", func, of_a, of_b) : NULL;
    Py_XDECREF(of_a);
    Py_XDECREF(of_b);
    Py_XDECREF(ok);
    return ok ? 0 : -1;
}

int koila__group_check_write(const koila__group *g, PyObject *func)
{
    const koila_meta_info *m = koila_meta_get(koila__table, g->meta);
    if (!g->given_at)
        return 0;
    if (!koila_meta_is_dense(m) && check_elements_apart(m, func) < 0)
        return -1;
    const koila__tape *t = g->tape;
    int rc = 0;
    for (koila__handle *next, *h = t->handles; h && rc == 0; h = next) {
        Py_INCREF(h); /* Python may run, and others may leave the list, or h itself */
        rc = h->group == g || !h->group->given_at ? 0 : check_apart(g, h->group, func);
        next = h->group ? h->next_in_tape : t->handles;
        Py_DECREF(h);
    }
    return rc;
}

void koila__group_is_factory(koila__group *g, bool no_lazy_data)
{
    koila__n_factories += !g->factory;
    g->factory = true;
    g->no_lazy_data = no_lazy_data;
}

int koila__group_wrappers(const koila__group *g, PyObject *list)
{
    /* a weak reference's callback sees wrappers that are dead already */
    for (const koila__handle *h = g->handles; h; h = h->next_in_group)
        if (h->wrapper && Py_REFCNT(h->wrapper) > 0 && PyList_Append(list, h->wrapper) < 0)
            return -1;
    return 0;
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
    koila_assert(!c || c->refs > 0);
    while (c && --c->refs == 0) {
        koila__chain *parent = c->parent;
        PyObject_Free(c);
        c = parent;
    }
}
