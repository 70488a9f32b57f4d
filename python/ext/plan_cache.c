/* plan_cache.c — which plan: the settings, the memory there is, what operators were seen to use inside, and plans kept by what was recorded.
 *
 * A plan is found again by the hash of the recorded part, the targets and the forced rows. It is made anew when what it counted with has changed (an operator
 * uses more inside than was known), when it no longer fits, or when there is so much more memory that fewer slices may do.
 */
#include "exec.h"

#include <math.h>

/* ---- settings and what was learned */

struct koila__run_settings koila__settings = { .budget = UINT64_MAX };

/* Bytes an operator uses inside, by signature: seen once whole and once on a slice. A slice's grows with its rows. */
typedef struct workspace {
    uint64_t whole_bytes, slice_bytes;
    int64_t whole_batch, slice_rows;
} workspace;
static struct {
    workspace *at;
    uint32_t n;
    uint64_t generation; /* changes when a plan made before would now be another one */
} learned;

static uint64_t workspace_of(void *user, koila_sig sig, int64_t rows, int64_t batch)
{
    (void)user;
    if (sig >= learned.n) return 0;
    const workspace *w = &learned.at[sig];
    if (!batch || rows == batch) return w->whole_batch >= 0 ? w->whole_bytes : 0;
    if (w->slice_rows > 0) return (uint64_t)((double)w->slice_bytes * (double)rows / (double)w->slice_rows);
    return w->whole_batch > 0 ? (uint64_t)((double)w->whole_bytes * (double)rows / (double)w->whole_batch) : 0;
}

void koila__learn(koila_sig sig, int64_t rows, int64_t batch, uint64_t bytes)
{
    if (sig >= learned.n) {
        const uint32_t n = koila_table_n_sigs(koila__table) + 64;
        workspace *grown = PyMem_RawRealloc(learned.at, n * sizeof *grown);
        if (!grown) return; /* a less exact prediction, nothing worse */
        memset(grown + learned.n, 0, (n - learned.n) * sizeof *grown);
        learned.at = grown;
        learned.n = n;
    }
    workspace *w = &learned.at[sig];
    uint64_t before;
    if (!batch || rows == batch) {
        before = w->whole_bytes;
        if (bytes > w->whole_bytes) w->whole_bytes = bytes;
        w->whole_batch = batch;
    } else {
        before = workspace_of(NULL, sig, rows, batch); /* what plans counted with until now */
        if (rows > w->slice_rows || (rows == w->slice_rows && bytes > w->slice_bytes)) {
            w->slice_bytes = bytes;
            w->slice_rows = rows;
        }
    }
    if (bytes > before + before / 50 + 4096 || bytes + bytes / 50 + 4096 < before) learned.generation++;
}

/* ---- the plan cache */

#define N_CACHED 32
static cached *cache[N_CACHED];
static uint64_t cache_clock;
struct koila__last_step koila__last;

void koila__cached_release(cached *c)
{
    if (!c || --c->refs) return;
    koila_plan_free(c->plan);
    koila_graph_free(c->part);
    PyMem_RawFree(c);
}

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 29);
}

/* ---- micro_batch("fastest"): of the sizes that fit, a few are timed in the first steps and the fastest is kept */

#define N_TUNED 16
#define N_SIZES 4   /* the automatic size, 1/2, 1/4 and 1/8 of it */
#define N_TIMINGS 2 /* of each; the smaller counts, so that the first step's start-up does not */
typedef struct tuning {
    uint64_t key, used;
    int64_t rows[N_SIZES];
    double seconds[N_SIZES];
    uint32_t n_sizes, n_runs;
} tuning;
static tuning tunings[N_TUNED];

static tuning *tuning_of(uint64_t key)
{
    for (uint32_t i = 0; i < N_TUNED; i++)
        if (tunings[i].n_sizes && tunings[i].key == key) return &tunings[i];
    return NULL;
}

/* Rows for the next run of step `key`; 0: not seen yet, take the automatic size. */
int64_t koila__tuned_rows(uint64_t key)
{
    tuning *t = tuning_of(key);
    if (!t) return 0;
    t->used = ++cache_clock;
    if (t->n_runs < N_TIMINGS * t->n_sizes) return t->rows[t->n_runs % t->n_sizes];
    uint32_t best = 0;
    for (uint32_t i = 1; i < t->n_sizes; i++)
        if (t->seconds[i] < t->seconds[best]) best = i;
    return t->rows[best];
}

void koila__tuned_record(uint64_t key, int64_t rows, double seconds)
{
    tuning *t = tuning_of(key);
    if (!t) { /* the automatic size: its first run */
        t = &tunings[0];
        for (uint32_t i = 1; i < N_TUNED; i++)
            if (tunings[i].used < t->used) t = &tunings[i];
        *t = (tuning){ .key = key, .used = ++cache_clock };
        for (int64_t r = rows; t->n_sizes < N_SIZES && (!t->n_sizes || r < t->rows[t->n_sizes - 1]); r = (r + 1) / 2) {
            t->rows[t->n_sizes] = r;
            t->seconds[t->n_sizes++] = HUGE_VAL;
        }
    }
    for (uint32_t i = 0; i < t->n_sizes; i++)
        if (t->rows[i] == rows && seconds < t->seconds[i]) t->seconds[i] = seconds;
    t->n_runs++;
}

/* ---- memory there is */

/* Bytes the step may use beyond what is live now; *limit gets the total the device may hold (for reports), UINT64_MAX when there is none. */
uint64_t koila__free_bytes(uint64_t *limit)
{
    const uint64_t now = koila__settings.dry ? 0 : koila__truth_current();
    *limit = UINT64_MAX;
    if (koila__settings.dry && !koila__settings.has_budget) return UINT64_MAX;
    if (koila__settings.has_budget) {
        *limit = koila__settings.budget;
        return koila__settings.budget > now ? koila__settings.budget - now : 0;
    }
    PyObject *mine = PyImport_ImportModule("koila._run"), *n = mine ? PyObject_CallMethod(mine, "free_bytes", NULL) : NULL;
    uint64_t bytes = UINT64_MAX;
    if (n && n != Py_None) {
        bytes = PyLong_AsUnsignedLongLong(n);
        if (PyErr_Occurred()) bytes = UINT64_MAX;
        else *limit = bytes + now;
    }
    PyErr_Clear();
    Py_XDECREF(mine);
    Py_XDECREF(n);
    return bytes;
}

/* ---- planning through the cache */

cached *koila__plan_for(koila_graph *part, const koila_value *targets, uint32_t n_targets, uint64_t budget, int64_t rows, koila_error *err, koila_status *status)
{ /* takes `part` */
    uint64_t key = mix(koila_graph_hash(part), (uint64_t)rows);
    for (uint32_t i = 0; i < n_targets; i++) key = mix(key, targets[i]);
    cached **oldest = &cache[0];
    for (uint32_t i = 0; i < N_CACHED; i++) {
        cached *c = cache[i];
        if (c && c->key == key && c->generation == learned.generation && c->info.peak_bytes <= budget &&
            (rows > 0 || c->info.n_slices == 1 || budget / 4 <= c->budget / 3 || budget == c->budget)) {
            c->used = ++cache_clock;
            c->refs++;
            koila_graph_free(part);
            return c;
        }
        if (!c || (*oldest && c->used < (*oldest)->used)) oldest = &cache[i];
    }
    const koila_plan_options o = { .struct_size = sizeof o, .budget_bytes = rows > 0 && !koila__settings.has_budget ? UINT64_MAX : budget, .rows = rows, .workspace = workspace_of };
    koila_plan *plan = NULL;
    *status = koila_plan_new(part, targets, n_targets, &o, NULL, &plan, err);
    if (*status == KOILA_OOM && rows > 0) { /* forced rows: tried all the same, with the least memory */
        koila_plan_options frugal = o;
        frugal.budget_bytes = UINT64_MAX;
        *status = koila_plan_new(part, targets, n_targets, &frugal, NULL, &plan, err);
    }
    cached *c = *status == KOILA_OK ? PyMem_RawCalloc(1, sizeof *c) : NULL;
    if (!c) {
        koila_plan_free(plan);
        koila_graph_free(part);
        if (*status == KOILA_OK) *status = KOILA_NO_MEMORY;
        return NULL;
    }
    *c = (cached){ .refs = 2, .key = key, .generation = learned.generation, .used = ++cache_clock, .budget = budget, .part = part, .plan = plan, .info = koila_plan_get(plan) };
    koila__cached_release(*oldest);
    *oldest = c;
    return c;
}

void koila__plan_cache_clear(void)
{
    for (uint32_t i = 0; i < N_CACHED; i++) {
        koila__cached_release(cache[i]);
        cache[i] = NULL;
    }
    if (learned.n) memset(learned.at, 0, learned.n * sizeof *learned.at);
    learned.generation++;
}
