/* alias.c — views and in-place writes on values that never change.
 *
 * Note [Groups]. A group is one storage. `cur` is the newest value of its base; every wrapper of
 * the group is a chain of view calls applied to the base. A write makes a new value of the whole
 * base and increments `gen`. A wrapper with an older `gen` has no value: it replays its chain on
 * `cur`, as new nodes, when it is next read, and until then no write looks at it again. Replays are
 * remembered in the links (memo at memo_gen), so siblings share them. Thus a wrapper never shows
 * contents older than the last write, and the executor sees pure values.
 *
 * A group belongs to one tape. When another tape needs it, its base becomes a leaf there: a batch
 * leaf stays one; anything else is made concrete first and becomes a whole leaf.
 */
#include "capture/capture.h"
#include "capture/executor.h"

const koila__executor_calls *koila__executor;

void koila__group_written(koila__group *g, koila_value v)
{
    koila_assert(v < koila_graph_n_values(g->tape->graph));
    g->cur = v;
    g->gen++;
    g->has_plain_views = false;
    for (koila__handle *h = g->with_value, *next; h; h = next) {
        next = h->next_with_value; /* the base's come to the front again */
        koila__handle_set_value(h, h->chain ? KOILA_NONE : v);
        if (!h->chain)
            h->gen = g->gen;
    }
}

/* One call of the chain, on the value of the link before it. Runs no Python code. */
static koila_value replay_link(koila__group *g, koila__chain *c, koila_value input, uint32_t line)
{
    koila_assert(!c->parent || c->n_links == c->parent->n_links + 1);
    koila__tape *t = g->tape;
    koila_value first;
    const koila_status s = koila_graph_node(t->graph, c->link.sig, &input, line, &first);
    if (s) {
        koila__raise(s);
        return KOILA_NONE;
    }
    if (koila__tape_reserve(t) < 0)
        return KOILA_NONE;
    c->memo = first + c->link.output;
    c->memo_gen = g->gen;
    return c->memo;
}

/* stale[c->n_links] is room for the links that are replayed. *again: finding the line ran Python,
 * which wrote the base. */
static koila_value replay_stale(koila__group *g, koila__chain *c, koila__chain **stale, bool *again)
{
    const uint32_t gen = g->gen;
    uint32_t n = 0;
    for (; c && c->memo_gen != gen; c = c->parent)
        stale[n++] = c;
    koila_value v = c ? c->memo : g->cur;
    *again = false;
    while (n && v != KOILA_NONE) {
        const uint32_t line = koila__line_now(g->tape);
        if (g->gen != gen) {
            *again = true;
            return KOILA_NONE;
        }
        v = replay_link(g, stale[--n], v, line);
    }
    return v;
}

static koila_value replay(koila__group *g, koila__chain *c)
{
    enum { FEW_LINKS = 32 };
    koila__chain *few[FEW_LINKS], **stale = few;
    const uint32_t most = c ? c->n_links : 0;
    if (most > FEW_LINKS) {
        stale = PyMem_Malloc(most * sizeof *stale);
        if (!stale) {
            PyErr_NoMemory();
            return KOILA_NONE;
        }
    }
    koila_value v;
    bool again;
    do
        v = replay_stale(g, c, stale, &again);
    while (again);
    if (stale != few)
        PyMem_Free(stale);
    return v;
}

koila_value koila__value_of(koila__handle *h)
{
    for (;;) {
        koila__group *g = h->group;
        koila__chain *c = h->chain;
        if (h->gen == g->gen && h->value != KOILA_NONE)
            return h->value;
        g->refs++; /* Python may run, and `h` move to another tape */
        if (c)
            c->refs++;
        koila__hold_ids();
        const koila_value v = replay(g, c);
        koila__release_ids();
        const bool is_here = h->group == g && h->chain == c;
        koila__chain_release(c);
        if (--g->refs == 0)
            koila__group_free(g);
        if (v == KOILA_NONE || !h->group)
            return KOILA_NONE;
        if (!is_here)
            continue;
        koila__handle_set_value(h, v);
        h->gen = g->gen;
        return v;
    }
}

/* ---- moving to another tape */

static int move_group(koila__group *g, koila__tape *to, PyObject *real, koila_meta meta,
                      koila_leaf_kind kind, uint16_t axis, uint32_t dim)
{
    Py_INCREF(real);
    g->refs++; /* its class may run Python, and the last handle may leave */
    const koila_value v = koila__tape_leaf_new(to, real, meta, kind, axis, dim);
    Py_DECREF(real);
    if (--g->refs == 0) {
        koila__group_free(g);
        return 0;
    }
    if (v == KOILA_NONE)
        return -1;
    koila__group *fresh = koila__group_new(to, v, meta);
    if (!fresh)
        return -1;
    if (g->factory)
        koila__group_is_factory(fresh, g->no_lazy_data);
    fresh->begins_within = g->begins_within;
    fresh->given_at = g->given_at;
    fresh->has_plain_views = g->has_plain_views;
    fresh->gen = g->gen + 1; /* invalidates the memos of all links */
    g->refs++;
    /* from the lists of the old tape to those of the new one */
    while (g->handles) {
        koila__handle *h = g->handles;
        koila__handle_move(h, fresh, h->chain, h->chain ? KOILA_NONE : v, h->meta, h->offset);
    }
    for (koila__handle *h = fresh->handles; h; h = h->next_in_group)
        h->gen = h->chain ? fresh->gen - 1 : fresh->gen;
    g->refs--;
    koila_assert(g->refs == 0);
    koila__group_free(g);
    return 0;
}

static int move_if_concrete(koila__handle *h, koila__tape *to)
{
    koila__group *g = h->group;
    koila__tape *from = g->tape;
    if (from->has_exit)
        koila__tape_has_exit(to);
    PyObject *real = from->values[g->cur].real;
    const koila_value_info info = koila_value_get(from->graph, g->cur);
    if (real && info.node == KOILA_NONE && info.leaf_kind == KOILA_LEAF_BATCH) {
        uint16_t axis;
        if (koila__tape_axis(to, from->axis_ids[info.axis],
                             koila_graph_axis_size(from->graph, info.axis), &axis) < 0)
            return -1;
        return move_group(g, to, real, info.meta, KOILA_LEAF_BATCH, axis, info.dim) < 0 ? -1 : 1;
    }
    if (real)
        return move_group(g, to, real, g->meta, KOILA_LEAF_REAL, 0, 0) < 0 ? -1 : 1;
    if (!h->chain || h->next_in_group || h->prev_in_group || h->gen != g->gen ||
        h->value == KOILA_NONE || !(real = from->values[h->value].real))
        return 0;
    /* the only wrapper left is a view: nobody can see more than its own contents */
    Py_INCREF(real);
    const koila_value v = koila__tape_leaf_new(to, real, h->meta, KOILA_LEAF_REAL, 0, 0);
    koila__group *fresh = v == KOILA_NONE ? NULL : koila__group_new(to, v, h->meta);
    Py_DECREF(real);
    if (!fresh)
        return -1;
    if (g->factory)
        koila__group_is_factory(fresh, g->no_lazy_data);
    koila__handle_move(h, fresh, NULL, v, h->meta, h->offset);
    return 1;
}

/* Moves the group if no run is needed for it: 1 moved, 0 not concrete, -1 error. */
static int move_concrete(koila__handle *h, koila__tape *to)
{
    koila__hold_ids();
    const int rc = move_if_concrete(h, to);
    koila__release_ids();
    return rc;
}

int koila__move_to(koila__handle *h, koila__tape *to)
{
    koila__tape *from = h->group->tape;
    if (from == to)
        return 0;
    to->odd_backward |= h->wrapper && koila__requires_grad(h->wrapper);
    int rc = move_concrete(h, to);
    if (rc)
        return rc < 0 ? -1 : 0;
    const bool alone = h->chain && !h->next_in_group && !h->prev_in_group;
    const koila_value want = alone ? koila__value_of(h) : h->group->cur;
    if (want == KOILA_NONE)
        return -1;
    Py_INCREF(from);
    rc = from->values[want].real ? 0 : koila__executor->run(from, &want, 1, false);
    from->ran = true;
    Py_DECREF(from);
    if (rc < 0)
        return -1;
    if (h->group->tape == to)
        return 0; /* the run has moved it already */
    rc = move_concrete(h, to);
    if (rc == 0)
        PyErr_SetString(PyExc_SystemError, "koila: a value was run and has no tensor");
    return rc > 0 ? 0 : -1;
}

static koila__handle *next_movable(koila__tape *t)
{
    for (koila__handle *h = t->handles; h; h = h->next_in_tape) {
        const koila__group *g = h->group;
        if (t->values[g->cur].real &&
            !(t->is_island && koila_value_get(t->graph, g->cur).node == KOILA_NONE))
            return h;
        if (h->chain && !h->next_in_group && !h->prev_in_group && h->gen == g->gen &&
            h->value != KOILA_NONE && t->values[h->value].real)
            return h;
    }
    return NULL;
}

int koila__compact(koila__tape *t)
{
    /* the loop ends: each round moves a whole group out of t */
    for (koila__handle *h; (h = next_movable(t));) {
        koila__tape *island = koila__tape_new(t->context);
        if (!island)
            return -1;
        island->closed = island->is_island = island->compacted = true;
        const int rc = move_concrete(h, island);
        if (rc > 0)
            koila__tape_rests(island, true);
        Py_DECREF(island); /* the handles keep it */
        if (rc <= 0)
            return rc;
    }
    return 0;
}
