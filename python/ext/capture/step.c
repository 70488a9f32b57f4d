/* step.c — the state machine of a step: a tape that is opened, filled, run and let go of.
 *
 *                          lazy(), an operator: koila__tape_current()
 *                 (none) ---------------------------------------------> OPEN
 *                    ^                                                   | |
 *                    |   the last handle dies, and nothing must happen   | |
 *                    |   outside: koila__step_left()                     | |
 *                    +---------------------------------------------------+ |
 *                    |                                                     |
 *                    |   backward has run; Tape.close(); another lazy(),   |
 *                    |   when no backward can come: koila__tape_for_lazy() |
 *                    |                                                     v
 *                    +-------------------------------------------------- CLOSED
 *                        the last handle dies, or its value is concrete    |  ^
 *                        and has moved to a tape of its own (compacted)    +--+
 *                                                       all values concrete: leaves let go
 *
 *   OPEN     its context's open tape: lazy() joins it, operators are recorded in it. One at a time
 *            in each context (context.h).
 *   CLOSED   its step has run. What is recorded later on its tensors goes on in it, until they
 *            meet the open tape and move there. Never opened again.
 *   (none)   the context has none. A tape that left OPEN without closing has no handles, or another
 *            thread goes on with it.
 *
 * Beside the state: `waiting` (an axis was opened, its leaf is still to come), `planned` (recorded
 * by koila.plan(): nothing of it happens), `failed` (the last run failed: no effects), `refused_at`
 * (it failed, and nothing was recorded since: the step is over), `ran` (something was made
 * concrete), `let_go` and `compacted` (CLOSED only).
 */
#include "capture/capture.h"
#include "capture/executor.h"

/* ---- what the user can still ask for */

/* Torch counts all C++ owners of a tensor as one Python reference. Learnt at import
 * (_torch.second_owner_adds_reference), for it changed between versions; where it does not hold
 * nobody can tell, and everything counts as held. */
bool koila__owners_show;

/* Torch keeps a tensor's Python object alive while C++ owns the tensor. In the versions where it
 * does so with one plain reference, a wrapper that has exactly that one reference is kept by C++
 * alone: saved by autograd, and no variable of the user reaches it. */
static bool user_holds(PyObject *wrapper, PyObject *use_count)
{
    if (!koila__owners_show)
        return true;
    if (Py_REFCNT(wrapper) > 2) /* one of them is that of `handles` */
        return true;
    PyObject *n = PyObject_CallOneArg(use_count, wrapper);
    const long uses = n ? PyLong_AsLong(n) : 1;
    Py_XDECREF(n);
    PyErr_Clear();
    return uses < 2;
}

/* The handles of a tape, held while they are walked and Python may run: hooks, the collector and
 * other threads make and drop wrappers meanwhile. */
typedef struct handles {
    koila__handle **at; /* [n] owned, as are their wrappers */
    PyObject **wrappers;
    uint32_t n;
} handles;

static void handles_release(handles *all)
{
    for (uint32_t i = 0; i < all->n; i++) {
        Py_DECREF(all->at[i]);
        Py_DECREF(all->wrappers[i]);
    }
    PyMem_Free(all->at);
    PyMem_Free(all->wrappers);
}

/* Those whose wrappers live. -1 with an exception, and nothing to release. */
static int handles_of(const koila__tape *t, handles *all)
{
    *all = (handles){ .at = PyMem_Malloc((t->n_handles + 1) * sizeof *all->at),
                      .wrappers = PyMem_Malloc((t->n_handles + 1) * sizeof *all->wrappers) };
    if (!all->at || !all->wrappers) {
        handles_release(all);
        PyErr_NoMemory();
        return -1;
    }
    for (koila__handle *h = t->handles; h; h = h->next_in_tape) {
        /* a weak reference's callback sees wrappers that are dead already */
        if (!h->wrapper || !Py_REFCNT(h->wrapper))
            continue;
        koila_assert(all->n < t->n_handles);
        all->at[all->n] = (koila__handle *)Py_NewRef((PyObject *)h);
        all->wrappers[all->n] = Py_NewRef(h->wrapper);
        all->n++;
    }
    return 0;
}

static bool is_still_in(const koila__handle *h, const koila__tape *t)
{
    return h->group && h->group->tape == t;
}

/* Marks of values while koila__tape_held() looks: t->mark plus one of these. Smaller: not met. */
enum { WANTED, HELD, WANTED_AND_HELD };
_Static_assert((int)WANTED_AND_HELD < (int)KOILA__MARKS_OF_A_WALK, "these are the marks of a walk");

/* Values that are already concrete or in `out` are left out; *n may become larger than cap. */
static void add_held(koila__tape *t, koila_value v, koila_value *out, uint32_t cap, uint32_t *n)
{
    uint32_t *mark = &t->values[v].mark;
    if (t->values[v].real || *mark >= t->mark + HELD)
        return;
    *mark = t->mark + (*mark == t->mark + WANTED ? WANTED_AND_HELD : HELD);
    if (*n < cap)
        out[*n] = v;
    ++*n;
}

static bool is_wanted(const koila__tape *t, koila_value v)
{
    const uint32_t mark = t->values[v].mark;
    return mark == t->mark + WANTED || mark == t->mark + WANTED_AND_HELD;
}

static void mark_wanted(koila__tape *t, const koila_value *wanted, uint32_t n_wanted)
{
    koila__tape_new_walk(t);
    for (uint32_t i = 0; i < n_wanted; i++)
        t->values[wanted[i]].mark = t->mark + WANTED;
}

/* A view that can be used in a later step takes its whole storage along, unless it is the only one
 * who sees it. So do the views of a base that is a view of itself now (`t_`). */
static bool needs_base(const koila__handle *h)
{
    if (!h->chain || (!h->next_in_group && !h->prev_in_group))
        return false;
    const koila__group *g = h->group;
    if (!g->n_bases)
        return true;
    PyObject *grad = h->wrapper ? koila__attribute(h->wrapper, "requires_grad") : NULL;
    const bool constant = grad == Py_False;
    Py_XDECREF(grad);
    PyErr_Clear();
    return constant && h->group == g;
}

/* The values of those handles, and the shared bases of views: pairs in found[2 * all->n], the base
 * KOILA_NONE where it is not needed. Returns the number of pairs. Runs Python code. */
static uint32_t find_held(const koila__tape *t, const handles *all, koila_value *found)
{
    PyObject *use_count = koila__helper("use_count");
    uint32_t n = 0;
    for (uint32_t k = 0; k < all->n; k++) {
        koila__handle *h = all->at[k];
        if (h->is_unheld || (use_count && !user_holds(all->wrappers[k], use_count)) ||
            !is_still_in(h, t))
            continue;
        const koila_value v = koila__value_of(h); /* may record the replay of its chain */
        if (v == KOILA_NONE) {
            PyErr_Clear(); /* asked for later, it will say so itself */
            continue;
        }
        if (!is_still_in(h, t))
            continue;
        found[2 * n] = v;
        found[2 * n + 1] = needs_base(h) ? h->group->cur : KOILA_NONE;
        n++;
    }
    PyErr_Clear();
    Py_XDECREF(use_count);
    return n;
}

uint32_t koila__tape_held(koila__tape *t, const koila_value *wanted, uint32_t n_wanted,
                          koila_value *out, uint32_t cap)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    uint32_t n = 0;
    handles all;
    if (handles_of(t, &all) < 0)
        all = (handles){ 0 }; /* then nothing more is made in passing */
    koila_value *found = PyMem_Malloc((2 * all.n + 1) * sizeof *found);
    const uint32_t n_found = found ? find_held(t, &all, found) : 0;
    /* from here on no Python runs, so the marks are those of this walk */
    mark_wanted(t, wanted, n_wanted);
    for (uint32_t k = 0; k < n_found; k++) {
        const koila_value v = found[2 * k], base = found[2 * k + 1];
        add_held(t, v, out, cap, &n);
        if (base != KOILA_NONE && !is_wanted(t, v))
            add_held(t, base, out, cap, &n);
    }
    PyMem_Free(found);
    PyErr_Clear();
    handles_release(&all);
    PyErr_Restore(type, value, trace);
    return n;
}

/* ---- opening */

/* Concrete values leave a closed tape, so that the tape and its record can be freed: losses kept in
 * a list must not keep their batches. */
static int compact_closed(void)
{
    for (koila__tape *t = koila__tapes; t;) {
        if (!t->closed || t->compacted || koila__tape_is_busy(t)) {
            t = t->next_tape;
            continue;
        }
        t->compacted = true;
        Py_INCREF(t);
        const int rc = koila__compact(t);
        koila__tape *next = t->next_tape;
        Py_DECREF(t);
        if (rc < 0)
            return -1;
        /* others may have died with it: from the start; compacted ones are passed over */
        t = next ? koila__tapes : NULL;
    }
    return 0;
}

koila__tape *koila__tape_current(void)
{
    koila__context *c = koila__context_now();
    if (!c)
        return NULL;
    if (c->open)
        return (koila__tape *)c->open;
    koila__tape *t = koila__tape_new(c);
    if (!t)
        return NULL;
    koila__tape_set_open(c, t);
    Py_DECREF(t);
    return compact_closed() < 0 ? NULL : koila__tape_open();
}

/* in one tape without a backward: an evaluation loop that forgot no_grad() must not be recorded to
 * its end */
#define MAX_LAZY_CALLS 16

/* May a backward come that needs what is recorded here? */
static bool backward_may_come(koila__tape *t)
{
    bool waits = false;
    handles all;
    if (handles_of(t, &all) < 0) {
        PyErr_Clear();
        return true;
    }
    for (uint32_t k = 0; k < all.n && !waits; k++) {
        PyObject *r = koila__attribute(all.wrappers[k], "requires_grad");
        waits = r == Py_True;
        Py_XDECREF(r);
        if (!r)
            PyErr_Clear();
    }
    handles_release(&all);
    return waits;
}

/* The run of an abandoned step failed, an exception is set. Where a leaf was written since, its
 * statistics stay as they were, with a warning; all else is reported as unraisable. */
static void report_abandoned(koila__tape *t)
{
    if (koila__is_stale()) {
        PyErr_Clear();
        if (PyErr_WarnFormat(
                PyExc_RuntimeWarning, 1,
                "koila: a training-mode forward pass was left without backward, and what it "
                "was computed from has been written since: its running statistics (%u) "
                "stay as they were",
                t->n_effects) == 0)
            koila__tape_give_up(t);
    }
    if (PyErr_Occurred())
        PyErr_WriteUnraisable((PyObject *)t);
}

/* No backward can come: what the user still holds of tape `t` is made now, in one run. */
static int run_what_is_held(koila__tape *t)
{
    const uint32_t n = koila__tape_held(t, NULL, 0, NULL, 0);
    koila_value *v = PyMem_Malloc((n + 1) * sizeof *v);
    if (!v) {
        PyErr_NoMemory();
        return -1;
    }
    const uint32_t m = koila__tape_held(t, NULL, 0, v, n);
    const uint32_t n_held = m < n ? m : n;
    int rc = koila__tape_drop_overwritten(t);
    if (rc == 0 && (n_held || t->n_effects))
        rc = koila__executor->run_held(t, v, n_held);
    PyMem_Free(v);
    return rc;
}

/* Is the step of `t` over, although its tensors live (a traceback, sys.last_value or a logger holds
 * them)? It is when its last run failed and the program recorded nothing since. */
bool koila__step_is_over(const koila__tape *t)
{
    return t->refused_at == koila_graph_n_nodes(t->graph) + 1;
}

/* The values of `t` that are held are made where they can be, and it is closed, also if that fails:
 * what is left of an old step must not stop each new one. Of a step that is over nothing is made
 * where a backward could have come: it would run what was just refused once more. */
static int end_step(koila__tape *t)
{
    const bool over = koila__step_is_over(t);
    const bool makes_held = t->n_handles && !t->planned && !koila__is_planning();
    int rc = 0;
    if (over)
        koila__tape_give_up(t);
    if (makes_held && !(over && backward_may_come(t)))
        rc = run_what_is_held(t);
    if (rc < 0 && koila__is_stale()) {
        report_abandoned(t);
        rc = 0;
    }
    /* who asks for such a value again is told again */
    if (rc < 0 && over && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        rc = 0;
    }
    if (rc < 0)
        koila__tape_give_up(t);
    koila__tape_close(t);
    return rc;
}

/* Several lazy() calls join one step. */
koila__tape *koila__tape_for_lazy(void)
{
    koila__tape *t = koila__tape_open();
    if (!t)
        return koila__tape_current();
    if (t->thread != PyThread_get_thread_ident()) {
        /* another thread records in it what this one made lazy (a loader's): its own step */
        koila__tape_set_open(t->context, NULL);
        return koila__tape_current();
    }
    const bool idle = koila_graph_n_nodes(t->graph) == 0 && !t->ran;
    if (t->n_handles && t->planned == koila__is_planning() && !koila__step_is_over(t) &&
        (idle || (backward_may_come(t) && t->n_axis_ids < MAX_LAZY_CALLS)))
        return t;
    Py_INCREF(t);
    const int rc = end_step(t);
    Py_DECREF(t);
    return rc < 0 ? NULL : koila__tape_current();
}

KOILA__HOT int koila__step_make_way(void)
{
    koila__tape *t = koila__tape_open();
    if (!t)
        return 1;
    if (t->thread != PyThread_get_thread_ident() || t->planned || t->waiting ||
        koila__step_is_over(t))
        return 0;
    if (t->n_handles && backward_may_come(t))
        return 0;
    Py_INCREF(t);
    const int rc = end_step(t);
    Py_DECREF(t);
    return rc < 0 ? -1 : koila__tape_open() == NULL;
}

/* ---- ending */

/* koila__tape_let_go() walks all handles, at each death: only when few are left */
#define MAX_HANDLES_LOOKED_AT 16

/* Nobody can ask for anything any more, but BatchNorm's statistics must still happen: see Note
 * [Effects] in tape.c. */
static void finish_abandoned(koila__tape *t)
{
    /* a step that failed, or was only planned, changes nothing outside */
    if (t->failed || t->planned) {
        koila__tape_give_up(t);
        return;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (koila__tape_drop_overwritten(t) < 0 ||
        (t->n_effects && koila__executor->run(t, NULL, 0, true) < 0))
        report_abandoned(t);
    PyErr_Restore(type, value, trace);
}

void koila__step_left(koila__tape *t)
{
    koila_assert(!t->closed || !koila__tape_is_open(t));
    t->left_meanwhile = koila__tape_is_busy(t);
    if (t->left_meanwhile)
        return; /* another thread is in it, and looks when it leaves */
    if (t->n_effects && !t->n_handles)
        finish_abandoned(t);
    if (t->closed && t->n_handles < MAX_HANDLES_LOOKED_AT)
        koila__tape_let_go(t);
    if (!t->n_handles && !t->n_effects && !t->waiting && koila__tape_is_open(t))
        koila__tape_set_open(t->context, NULL);
}

static void let_fork_pass(koila__tape *first)
{
    koila__tape *t = (koila__tape *)Py_XNewRef((PyObject *)first);
    while (t) {
        if (koila__tape_is_busy(t))
            t->n_entered = 0;        /* that thread is the parent's */
        koila__tape_drop_effects(t); /* what torch's modules counted stays, in shared memory too */
        koila__tape_close(t);
        koila__tape *next = (koila__tape *)Py_XNewRef((PyObject *)t->next_tape);
        Py_DECREF(t);
        t = next;
    }
}

void koila__steps_forked(void)
{
    let_fork_pass(koila__tapes);
    let_fork_pass(koila__resting_tapes);
}
