/* past.c — the last runs of a context (a thread, an asyncio task), for last_plan() and plans().
 *
 *   koila__last_step_is(step)   after each run, and each plan of koila.plan()
 *   koila__past_step(i)         the last KOILA__MOST_PAST of them
 *   koila__past_last()          the newest that ran a backward
 *
 * A value that is read in the middle of a step and an evaluation do not hide the last backward,
 * unless settings (budget, slices, strict) were changed since it ran: then the last step is the
 * newest run of any kind. What koila.plan() planned counts only before all runs.
 *
 * A step that reads values is several runs. Its tape counts them, and its backward tells them all:
 * each recorded operator once, however many runs have run it.
 */
#include "run/run.h"

typedef struct past_step {
    koila__step step;  /* .c NULL: there is none */
    uint64_t settings; /* koila__settings_number() when it ran */
} past_step;

typedef struct koila__past {
    past_step steps[KOILA__MOST_PAST];
    uint32_t next;      /* the newest lies before it, in the round */
    past_step ran;      /* the newest that ran */
    past_step backward; /* the newest that ran a backward */
    uint64_t n;
} past;

static uint64_t n_steps; /* of the process */

/* ---- their store */

static past_step held(const past_step *s)
{
    s->step.c->refs++;
    Py_XINCREF(s->step.early);
    return *s;
}

/* May run Python, last. */
static void release(past_step s)
{
    koila__cached_release(s.step.c);
    Py_XDECREF(s.step.early);
}

static void past_free(past *p)
{
    for (uint32_t i = 0; i < KOILA__MOST_PAST; i++)
        release(p->steps[i]);
    release(p->ran);
    release(p->backward);
    PyMem_Free(p);
}

static past *past_now(void)
{
    const koila__context *c = koila__context_peek();
    return c ? c->past : NULL;
}

/* NULL without an exception: no memory. */
static past *past_make(void)
{
    koila__context *c = koila__context_now();
    if (c && !c->past) {
        c->past = PyMem_Calloc(1, sizeof *c->past);
        c->past_free = past_free;
    }
    PyErr_Clear();
    return c ? c->past : NULL;
}

/* i before the newest. */
static past_step *slot_of(past *p, uint32_t i)
{
    return &p->steps[(p->next + 2 * KOILA__MOST_PAST - 1 - i) % KOILA__MOST_PAST];
}

void koila__last_step_is(const koila__step *step)
{
    koila_assert(step->c);
    past_step mine = { *step, koila__settings_number() };
    past_step gone[3] = { { { 0 }, 0 } };
    past *p = past_make();
    mine.step.number = ++n_steps;
    if (!p) {
        release(mine);
        return;
    }
    if (mine.step.asked_by != KOILA__ASKED_BY_PLAN) {
        gone[0] = p->ran;
        p->ran = held(&mine);
    }
    if (mine.step.asked_by == KOILA__ASKED_BY_BACKWARD) {
        gone[1] = p->backward;
        p->backward = held(&mine);
    }
    gone[2] = p->steps[p->next];
    p->steps[p->next] = mine;
    p->next = (p->next + 1) % KOILA__MOST_PAST;
    p->n++;
    for (uint32_t i = 0; i < KOILA_COUNT(gone); i++)
        release(gone[i]);
}

/* ---- looking at them */

static const koila__step *step_or_null(const past_step *s) { return s->step.c ? &s->step : NULL; }

const koila__step *koila__past_step(uint32_t i)
{
    past *p = past_now();
    return p && i < KOILA__MOST_PAST ? step_or_null(slot_of(p, i)) : NULL;
}

const koila__step *koila__past_last(void)
{
    const past *p = past_now();
    if (!p || !p->ran.step.c)
        return koila__past_step(0);
    const bool counts = p->backward.step.c && p->backward.settings == p->ran.settings;
    return step_or_null(counts ? &p->backward : &p->ran);
}

uint64_t koila__n_told(void) { return n_steps; }

uint64_t koila__number_next(void) { return ++n_steps; }

const koila__step *koila__past_numbered(uint64_t number)
{
    const past *p = past_now();
    if (!p)
        return NULL;
    if (p->backward.step.c && p->backward.step.number == number)
        return &p->backward.step;
    for (uint32_t i = 0; i < KOILA__MOST_PAST; i++)
        if (p->steps[i].step.c && p->steps[i].step.number == number)
            return &p->steps[i].step;
    return p->ran.step.c && p->ran.step.number == number ? &p->ran.step : NULL;
}

const koila__step *koila__past_ran(void)
{
    const past *p = past_now();
    return p ? step_or_null(&p->ran) : NULL;
}

const koila__step *koila__past_backward(void)
{
    const past *p = past_now();
    return p ? step_or_null(&p->backward) : NULL;
}

uint64_t koila__n_past(void)
{
    const past *p = past_now();
    return p ? p->n : 0;
}

void koila__past_predicted(uint64_t number, cached *c)
{
    past_step *slot = (past_step *)koila__past_numbered(number);
    if (!slot)
        return;
    koila_assert(slot->step.asked_by == KOILA__ASKED_BY_PLAN);
    koila__cached_release(slot->step.c);
    slot->step.c = c;
    c->refs++;
}

/* ---- what the runs of one step have done */

/* Marks the part's nodes; *n_new: those that no run before has run. False: no memory. */
static bool mark_nodes(koila__tape *t, const koila__part *p, const cached *c, uint32_t *n_new)
{
    const uint32_t n_words = koila_graph_n_nodes(t->graph) / 64 + 1;
    if (n_words > t->reads.n_words) {
        const uint32_t n = n_words + n_words / 2;
        uint64_t *more = PyMem_Realloc(t->reads.nodes, n * sizeof *more);
        if (!more)
            return false;
        memset(more + t->reads.n_words, 0, (n - t->reads.n_words) * sizeof *more);
        t->reads.nodes = more;
        t->reads.n_words = n;
    }
    *n_new = 0;
    for (koila_node n = 0; n < koila_graph_n_nodes(c->part); n++) {
        uint64_t *word = &t->reads.nodes[p->node_from[n] / 64];
        const uint64_t bit = 1ull << p->node_from[n] % 64;
        *n_new += !(*word & bit);
        *word |= bit;
    }
    return true;
}

/* The plan does not tell the work of one recorded node. Where some of the part was run before, the
 * share of its work that is new is taken to be that of its nodes. */
void koila__count_read(koila__tape *t, const koila__part *p, const cached *c, uint64_t n_run)
{
    uint32_t n_new;
    const uint32_t n_nodes = koila_graph_n_nodes(c->part);
    if (!n_nodes || !mark_nodes(t, p, c, &n_new))
        return;
    t->reads.n_recorded += (double)c->info.n_recorded * n_new / n_nodes;
    t->reads.n_run += n_run;
    t->reads.work += c->info.work;
    t->reads.work_recorded += c->info.work_recorded * n_new / n_nodes;
}

void koila__count_backward(koila__tape *t, const koila__part *p, koila__step *step)
{
    if (!t->reads.n_run)
        return;
    koila__count_read(t, p, step->c, step->n_run);
    step->n_run = t->reads.n_run;
    step->n_recorded = (uint32_t)(t->reads.n_recorded + 0.5);
    step->work = t->reads.work;
    step->work_recorded = t->reads.work_recorded;
    PyMem_Free(t->reads.nodes);
    memset(&t->reads, 0, sizeof t->reads);
}
