/* tuning.c — which of the slice sizes that fit is the fastest, learned from steps that run anyway.
 *
 * A plan of the fewest slices that fit is looked up for every step. A step that repeats runs so
 * N_CALM times, and then tries half the rows: a run to warm up, and pairs of runs, one with each
 * size. Of each pair the ratio of the two times counts, of all pairs the median; so a machine that
 * is busy for a while slows both. Half the rows are kept if they are clearly faster, and a half of
 * them is tried next, unless they were clearly slower. Around the best of these, 1½ and ¾ times as
 * many slices are tried last: a plan of the fewest slices has a power of two of them, and fewer
 * that are none may fit. Every so many steps all is tried again.
 *
 * What is learned belongs to a context (a thread, an asyncio task) and a plan: to the recorded
 * step, its targets, and the fewest slices. Nothing is tried
 *
 *   - of a step with modules that run as they are: a new size compiles a compiled one once more;
 *   - of a step of less than SHORTEST_S seconds: what a slice costs by itself decides there;
 *   - until N_CALM steps in a row ran under equal settings: who compares some sees the fewest.
 *
 * micro_batch("fastest") heeds none of these, and also tries to cut what fits whole. */
#include "base/idset.h"
#include "run/run.h"

#include <math.h>
#include <sys/resource.h>
#include <time.h>

enum {
    N_TUNED = 16,     /* steps remembered by a context */
    N_HALVES = 4,     /* the fewest slices, and 2, 4 and 8 times as many */
    N_SIZES = 6,      /* and two around the best of these */
    N_PAIRS = 5,      /* of runs, to compare two sizes; odd, for the median */
    N_WINS = 4,       /* of these pairs, that a faster size must win */
    N_EARLY = 2,      /* pairs that suffice where all are clearly lost */
    N_CALM = 8,       /* runs under one setting before any size is tried */
    LOOK_AGAIN = 512, /* runs after the first choice; the next time twice as many */
};
/* Of the time of the size that is the best so far. */
#define CLEAR_GAIN 0.97
#define CLEAR_LOSS 1.05
#define EARLY_LOSS 1.10
#define SHORTEST_S 0.005

typedef struct tuning {
    uint64_t key;      /* of the plan of fewest slices; 0: an empty slot */
    uint64_t used;     /* time on koila__tunings.clock; the oldest is replaced */
    uint64_t settings; /* of the last run */
    uint32_t n_calm;   /* runs in a row under them */
    bool is_fixed;     /* nothing is tried */
    double shortest;   /* seconds: the shortest run of the fewest slices */
    int64_t batch;
    int64_t rows[N_SIZES]; /* of a slice */
    uint32_t n_sizes, best;
    uint32_t tried;  /* against the best; 0: none now */
    bool is_warm;    /* it ran once */
    bool is_refined; /* what lies around the best is among them */
    uint32_t n_runs[2];
    double seconds[2][N_PAIRS];   /* of the best, of the tried */
    uint32_t until_look, to_wait; /* runs until all is tried again, and the next time */
} tuning;

struct koila__tunings {
    tuning at[N_TUNED];
    uint64_t clock;
};

static tuning *tuning_of(uint64_t key)
{
    const koila__context *here = koila__context_peek();
    struct koila__tunings *all = here ? here->tunings : NULL;
    for (uint32_t i = 0; all && i < N_TUNED; i++)
        if (all->at[i].key == key)
            return &all->at[i];
    return NULL;
}

/* Does the step call modules as they are? */
static bool has_modules(const koila_graph *part)
{
    for (koila_node n = 0; n < koila_graph_n_nodes(part); n++)
        if (koila__facts_of(koila_node_get(part, n).sig) & KOILA_FACT_OPAQUE_CALL)
            return true;
    return false;
}

/* Sizes from `rows` downwards; the first of them is to be tried. */
static void begin_trials(tuning *t, const koila_plan_info *fewest)
{
    int64_t n_slices = fewest->n_slices, rows = fewest->rows;
    t->n_sizes = 0;
    do {
        t->rows[t->n_sizes++] = rows;
        n_slices *= 2;
        rows = (fewest->batch + n_slices - 1) / n_slices;
    } while (t->n_sizes < N_HALVES && rows < t->rows[t->n_sizes - 1]);
    t->best = 0;
    t->tried = t->n_sizes > 1;
    t->is_warm = t->is_refined = false;
    t->n_runs[0] = t->n_runs[1] = 0;
    t->batch = fewest->batch;
}

/* Adds the size of so many slices, if it is not there. */
static void add_size(tuning *t, int64_t n_slices)
{
    const int64_t rows = (t->batch + n_slices - 1) / n_slices;
    for (uint32_t i = 0; i < t->n_sizes; i++)
        if (t->rows[i] == rows)
            return;
    koila_assert(t->n_sizes < N_SIZES);
    t->rows[t->n_sizes++] = rows;
}

/* NULL: no memory, without an exception. */
static tuning *new_tuning(uint64_t key, const koila_graph *part, const koila_plan_info *fewest)
{
    koila__context *here = koila__context_now();
    if (here && !here->tunings)
        here->tunings = PyMem_Calloc(1, sizeof *here->tunings);
    PyErr_Clear();
    if (!here || !here->tunings)
        return NULL;
    tuning *t = &here->tunings->at[0];
    for (uint32_t i = 1; i < N_TUNED; i++)
        if (here->tunings->at[i].used < t->used)
            t = &here->tunings->at[i];
    *t = (tuning){
        .key = key, .is_fixed = has_modules(part), .shortest = HUGE_VAL, .to_wait = LOOK_AGAIN
    };
    begin_trials(t, fewest);
    return t;
}

/* ---- a run's turn */

static uint64_t hash_of(const koila__settings *s)
{
    const uint64_t flags = (uint64_t)s->slices | (uint64_t)s->axes << 2 | (uint64_t)s->strict << 4 |
                           (uint64_t)s->resident << 5 | (uint64_t)s->has_budget << 6 |
                           (uint64_t)s->compile << 7;
    return koila__mix(koila__mix(s->budget, s->cpu_budget), flags);
}

/* 0: the best, 1: the tried. One after the other, and the next pair the other way round. */
static uint32_t side_now(const tuning *t)
{
    return t->is_warm ? (t->n_runs[0] + t->n_runs[1] + 1) / 2 % 2 : 1;
}

static bool may_try(const tuning *t, bool at_once)
{
    return at_once || (!t->is_fixed && t->shortest >= SHORTEST_S);
}

koila__turn koila__turn_of(uint64_t key, const koila_graph *part, const koila_plan_info *fewest)
{
    const koila__settings set = koila__settings_now();
    const uint64_t settings = hash_of(&set);
    const bool at_once = set.slices == KOILA__SLICES_FASTEST;
    koila__turn turn = { .key = koila__mix(key, fewest->n_slices) | 1,
                         .n_fewest = fewest->n_slices };
    tuning *t = tuning_of(turn.key);
    if (!t)
        t = new_tuning(turn.key, part, fewest);
    if (!t)
        return (koila__turn){ 0 };
    t->used = ++koila__context_peek()->tunings->clock;
    if (t->settings != settings) {
        t->settings = settings;
        t->n_calm = 0;
        t->n_runs[0] = t->n_runs[1] = 0;
    }
    if (t->n_calm < (at_once ? 1 : N_CALM) || !may_try(t, at_once))
        return turn;
    if (!t->tried && !t->until_look)
        begin_trials(t, fewest);
    turn.size = t->tried && side_now(t) ? t->tried : t->best;
    turn.rows = turn.size ? t->rows[turn.size] : 0;
    turn.is_timed = t->tried;
    return turn;
}

/* Nothing is tried for a while. */
static void settle(tuning *t)
{
    t->tried = 0;
    t->until_look = t->to_wait;
    if (t->to_wait < UINT32_MAX / 2)
        t->to_wait *= 2;
}

/* The sizes around the best, or the next of them; after these it settles. */
static void refine(tuning *t)
{
    if (!t->is_refined) {
        const int64_t n_slices = (t->batch + t->rows[t->best] - 1) / t->rows[t->best];
        t->is_refined = true;
        t->tried = t->n_sizes - 1;
        add_size(t, n_slices + n_slices / 2);
        add_size(t, n_slices - n_slices / 4);
    }
    if (t->tried + 1 < t->n_sizes)
        t->tried++;
    else
        settle(t);
}

void koila__turn_refuse(const koila__turn *turn)
{
    tuning *t = turn->size ? tuning_of(turn->key) : NULL;
    if (!t)
        return;
    t->n_runs[0] = t->n_runs[1] = 0;
    t->is_warm = false;
    if (t->is_refined && turn->size == t->tried) {
        refine(t);
        return;
    }
    if (turn->size <= t->best)
        t->best = 0;
    settle(t);
}

/* ---- the times */

/* The tried size against the best, from the pairs so far. */
typedef struct verdict {
    double ratio; /* of the seconds; the median */
    uint32_t n, n_wins, n_lost;
} verdict;

static verdict judge(const tuning *t)
{
    verdict v = { .n = t->n_runs[1] };
    double ratios[N_PAIRS];
    koila_assert(v.n && v.n <= N_PAIRS && t->n_runs[0] == v.n);
    for (uint32_t i = 0; i < v.n; i++) {
        const double ratio = t->seconds[1][i] / t->seconds[0][i];
        uint32_t k = i;
        for (; k > 0 && ratios[k - 1] > ratio; k--)
            ratios[k] = ratios[k - 1];
        ratios[k] = ratio;
        v.n_wins += ratio < 1;
        v.n_lost += ratio >= EARLY_LOSS;
    }
    v.ratio = ratios[v.n / 2];
    return v;
}

/* After a pair of runs. */
static void decide(tuning *t)
{
    const verdict v = judge(t);
    const bool is_lost = v.n >= N_EARLY && v.n_lost == v.n;
    if (v.n < N_PAIRS && !is_lost)
        return;
    if (v.ratio <= CLEAR_GAIN && v.n_wins >= N_WINS)
        t->best = t->tried;
    t->n_runs[0] = t->n_runs[1] = 0;
    t->is_warm = false;
    if (t->is_refined || is_lost || v.ratio >= CLEAR_LOSS || t->tried + 1 == t->n_sizes)
        refine(t);
    else
        t->tried++;
}

void koila__turn_took(const koila__turn *turn, double seconds)
{
    tuning *t = tuning_of(turn->key);
    if (!t)
        return;
    t->n_calm += t->n_calm < N_CALM;
    if (!turn->size && seconds < t->shortest)
        t->shortest = seconds;
    t->until_look -= t->until_look > 0 && !t->tried;
    const uint32_t side = turn->size && turn->size == t->tried;
    if (!turn->is_timed || !t->tried || side != side_now(t))
        return;
    if (!t->is_warm) {
        t->is_warm = true;
        return;
    }
    t->seconds[side][t->n_runs[side]++] = seconds;
    if (t->n_runs[0] == t->n_runs[1])
        decide(t);
}

/* ---- the clock */

static double seconds_of(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static long n_waits_now(void)
{
    struct rusage r;
    return getrusage(RUSAGE_THREAD, &r) == 0 ? r.ru_nvcsw : 0;
}

static PyObject *planted; /* owned; NULL: the system's clocks tell the time */

void koila__stopwatch_plant(PyObject *seconds) { Py_XSETREF(planted, Py_XNewRef(seconds)); }

static koila__stopwatch planted_now(void)
{
    PyObject *told = PyObject_CallNoArgs(planted);
    const double seconds = told ? PyFloat_AsDouble(told) : 0;
    Py_XDECREF(told);
    PyErr_Clear();
    return (koila__stopwatch){ .seconds = seconds, .busy = seconds };
}

koila__stopwatch koila__stopwatch_now(void)
{
    if (planted)
        return planted_now();
    return (koila__stopwatch){ .seconds = seconds_of(CLOCK_MONOTONIC),
                               .busy = seconds_of(CLOCK_THREAD_CPUTIME_ID),
                               .n_waits = n_waits_now() };
}

double koila__stopwatch_since(const koila__stopwatch *start)
{
    const koila__stopwatch now = koila__stopwatch_now();
    return now.n_waits == start->n_waits ? now.busy - start->busy : now.seconds - start->seconds;
}
