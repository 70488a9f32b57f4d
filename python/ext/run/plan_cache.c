/* plan_cache.c — which plan: the settings, the memory there is, what operators were seen to use
 * inside, and plans kept by what was recorded.
 *
 * A plan is found again by the hash of the recorded part, the targets and the forced rows. It is
 * made anew when what it counted with has changed (an operator uses more inside than was known),
 * when it no longer fits, or when there is so much more memory that fewer slices may do. On a GPU
 * fitting is cuda_state.c's to say.
 */
#include "run/exec.h"

#include <math.h>

/* ---- what was learned */

/* Bytes an operator uses inside, by signature: what was seen at a few numbers of rows. It is a
 * fixed part (a weight in another layout) and a part that grows with the rows, so numbers in
 * between lie on a line. WHOLE: outside a loop, or all rows in one slice. */
enum { N_SEEN = 6 };
#define WHOLE INT64_MAX
typedef struct seen {
    int64_t rows;
    uint64_t bytes;
} seen;
typedef struct workspace {
    seen at[N_SEEN]; /* ascending rows */
    int64_t batch;   /* 0: not known */
    uint32_t n;
} workspace;
static struct {
    workspace *at;
    uint32_t n;
    uint64_t generation; /* changes when a plan made before would now be another one */
} learned;

static double rows_of(const workspace *w, uint32_t i)
{
    return w->at[i].rows == WHOLE ? (double)w->batch : (double)w->at[i].rows;
}

static uint64_t workspace_of(void *user, koila_sig sig, int64_t rows, int64_t batch)
{
    (void)user;
    const workspace *w = sig < learned.n ? &learned.at[sig] : NULL;
    if (!w || !w->n)
        return 0;
    if (!batch || rows == batch)
        rows = WHOLE;
    uint32_t above = 0;
    while (above < w->n && w->at[above].rows < rows)
        above++;
    if (above < w->n && w->at[above].rows == rows)
        return w->at[above].bytes;
    uint32_t n = w->n;
    if (!w->batch)
        n -= w->at[n - 1].rows == WHOLE; /* it lies nowhere on a line of rows */
    if (!n || (rows == WHOLE && !w->batch))
        return n ? w->at[n - 1].bytes : 0;
    const double x = rows == WHOLE ? (double)w->batch : (double)rows;
    if (n == 1)
        return (uint64_t)((double)w->at[0].bytes * x / rows_of(w, 0));
    /* the line through k and k + 1 */
    const uint32_t k = above == 0 ? 0 : above >= n ? n - 2 : above - 1;
    const double a = rows_of(w, k);
    const double b = rows_of(w, k + 1);
    const double y = (double)w->at[k].bytes +
                     ((double)w->at[k + 1].bytes - (double)w->at[k].bytes) * (x - a) / (b - a);
    const double least = above == 0   ? (double)w->at[0].bytes * x / a
                         : above >= n ? (double)w->at[n - 1].bytes
                                      : 0;
    return (uint64_t)(y > least ? y : least);
}

bool koila__learned(koila_sig sig, int64_t rows, int64_t batch)
{
    const workspace *w = sig < learned.n ? &learned.at[sig] : NULL;
    if (!batch || rows == batch)
        rows = WHOLE;
    for (uint32_t i = 0; w && i < w->n; i++)
        if (w->at[i].rows == rows)
            return true;
    return false;
}

void koila__learn(koila_sig sig, int64_t rows, int64_t batch, uint64_t bytes)
{
    if (sig >= learned.n) {
        const uint32_t n = koila_table_n_sigs(koila__table) + 64;
        workspace *grown = PyMem_RawRealloc(learned.at, n * sizeof *grown);
        if (!grown)
            return; /* a less exact prediction, nothing worse */
        memset(grown + learned.n, 0, (n - learned.n) * sizeof *grown);
        learned.at = grown;
        learned.n = n;
    }
    workspace *w = &learned.at[sig];
    /* what plans counted with until now */
    const uint64_t before = workspace_of(NULL, sig, rows, batch);
    if (batch)
        w->batch = batch;
    if (!batch || rows == batch)
        rows = WHOLE;
    uint32_t i = 0;
    while (i < w->n && w->at[i].rows < rows)
        i++;
    if (i < w->n && w->at[i].rows == rows) {
        if (bytes > w->at[i].bytes)
            w->at[i].bytes = bytes;
    } else {
        if (w->n == N_SEEN) { /* the smallest and the largest say most: one between them goes */
            const uint32_t gone = i > 1 && i < N_SEEN ? i - 1 : N_SEEN / 2;
            memmove(&w->at[gone], &w->at[gone + 1], (--w->n - gone) * sizeof *w->at);
            if (i > gone)
                i--;
        }
        memmove(&w->at[i + 1], &w->at[i], (w->n++ - i) * sizeof *w->at);
        w->at[i] = (seen){ rows, bytes };
    }
    bytes = w->at[i].bytes;
    if (bytes > before + before / 50 + 4096 || bytes + bytes / 50 + 4096 < before)
        learned.generation++;
}

/* ---- the plan cache */

#define N_CACHED 32
static cached *cache[N_CACHED];
static uint64_t cache_clock;
struct koila__last_step koila__last;

void koila__cached_release(cached *c)
{
    if (!c || --c->refs)
        return;
    koila_plan_free(c->plan);
    if (c->part_of)
        koila__cached_release(c->part_of);
    else
        koila_graph_free(c->part);
    PyMem_RawFree(c);
}

int koila__adopt_plan(koila_plan *plan)
{
    cached *c = PyMem_RawCalloc(1, sizeof *c);
    cached *old = koila__last.c;
    if (!c) {
        PyErr_NoMemory();
        return -1;
    }
    *c = (cached){ .refs = 1,
                   .part = old->part,
                   .part_of = old,
                   .plan = plan,
                   .info = koila_plan_get(plan),
                   .gpu = -1 };
    koila__last.c = c;
    return 0;
}

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 29);
}

/* ---- micro_batch("fastest"): of the sizes that fit, a few are timed in the first steps and the
 * fastest is kept */

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
        if (tunings[i].n_sizes && tunings[i].key == key)
            return &tunings[i];
    return NULL;
}

/* Rows for the next run of step `key`; 0: not seen yet, take the automatic size. */
int64_t koila__tuned_rows(uint64_t key)
{
    tuning *t = tuning_of(key);
    if (!t)
        return 0;
    t->used = ++cache_clock;
    if (t->n_runs < N_TIMINGS * t->n_sizes)
        return t->rows[t->n_runs % t->n_sizes];
    uint32_t best = 0;
    for (uint32_t i = 1; i < t->n_sizes; i++)
        if (t->seconds[i] < t->seconds[best])
            best = i;
    return t->rows[best];
}

void koila__tuned_record(uint64_t key, int64_t rows, double seconds)
{
    tuning *t = tuning_of(key);
    if (!t) { /* the automatic size: its first run */
        t = &tunings[0];
        for (uint32_t i = 1; i < N_TUNED; i++)
            if (tunings[i].used < t->used)
                t = &tunings[i];
        *t = (tuning){ .key = key, .used = ++cache_clock };
        for (int64_t r = rows; t->n_sizes < N_SIZES && (!t->n_sizes || r < t->rows[t->n_sizes - 1]);
             r = (r + 1) / 2) {
            t->rows[t->n_sizes] = r;
            t->seconds[t->n_sizes++] = HUGE_VAL;
        }
    }
    for (uint32_t i = 0; i < t->n_sizes; i++)
        if (t->rows[i] == rows && seconds < t->seconds[i])
            t->seconds[i] = seconds;
    t->n_runs++;
}

/* ---- memory there is */

koila__room koila__room_for(const koila_graph *part)
{
    koila__room room = { .bytes = UINT64_MAX, .limit = UINT64_MAX, .gpu = -1 };
    if (koila__settings.dry) {
        if (koila__settings.has_budget)
            room.bytes = room.limit = koila__settings.budget;
        return room;
    }
    const int gpu = koila__gpu_of(part);
    if (gpu >= 0 && koila__gpu_look(gpu, &room))
        return room;
    room.held = koila__cpu_bytes_current();
    if (koila__settings.cpu_budget != UINT64_MAX) {
        room.limit = koila__settings.cpu_budget;
        room.bytes = room.limit > room.held ? room.limit - room.held : 0;
        return room;
    }
    PyObject *mine = PyImport_ImportModule("koila._run");
    PyObject *n = mine ? PyObject_CallMethod(mine, "free_bytes", NULL) : NULL;
    if (n && n != Py_None) {
        const uint64_t bytes = PyLong_AsUnsignedLongLong(n);
        if (!PyErr_Occurred()) {
            room.bytes = bytes;
            room.limit = bytes + room.held;
        }
    }
    PyErr_Clear();
    Py_XDECREF(mine);
    Py_XDECREF(n);
    return room;
}

/* ---- planning through the cache */

static koila_status make_plan(const koila_graph *part, const koila_value *targets,
                              uint32_t n_targets, const koila__room *room, int64_t rows,
                              koila_plan **out, koila_fit *fit, koila_error *err)
{
    koila_plan_options o = { .struct_size = sizeof o,
                             .budget_bytes =
                                 rows > 0 && !koila__settings.has_budget ? UINT64_MAX : room->bytes,
                             .rows = rows,
                             .workspace = workspace_of };
    const koila_status status = koila__gpu_plan(room, part, targets, n_targets, &o, out, fit, err);
    if (status != KOILA_OOM || rows <= 0)
        return status;
    o.budget_bytes = UINT64_MAX; /* forced rows: tried all the same, with the least memory */
    return koila_plan_new(part, targets, n_targets, &o, NULL, out, err);
}

cached *koila__plan_for(koila_graph *part, const koila_value *targets, uint32_t n_targets,
                        const koila__room *room, int64_t rows, koila_error *err,
                        koila_status *status)
{ /* takes `part` */
    const uint64_t budget = room->bytes;
    uint64_t key = mix(koila_graph_hash(part), (uint64_t)rows);
    for (uint32_t i = 0; i < n_targets; i++)
        key = mix(key, targets[i]);
    cached **oldest = &cache[0];
    uint32_t n_states = 0;
    for (uint32_t i = 0; i < N_CACHED; i++) {
        cached *c = cache[i];
        if (c && c->key == key && c->generation == learned.generation && c->gpu == room->gpu &&
            c->info.peak_bytes <= budget &&
            (rows > 0 || c->info.n_slices == 1 ||
             ((budget / 4 <= c->budget / 3 || budget == c->budget) &&
              (room->gpu >= 0 || c->asked == koila__settings.cpu_budget)))) {
            n_states = c->n_states + (c->state != room->state);
            /* fewer slices may do in another state, with as many bytes: asked at the 1st, 2nd, 4th,
             * ... change, for planning takes longer than to ask whether it still fits */
            const bool anew = n_states != c->n_states && c->info.n_slices > 1 && rows <= 0 &&
                              !(n_states & (n_states - 1));
            if (room->gpu >= 0 && (anew || !koila__gpu_still_fits(room, c))) {
                koila__cached_release(c);
                cache[i] = NULL;
                oldest = &cache[i];
                continue;
            }
            c->n_states = n_states;
            c->used = ++cache_clock;
            c->refs++;
            koila_graph_free(part);
            return c;
        }
        if (!c || (*oldest && c->used < (*oldest)->used))
            oldest = &cache[i];
    }
    koila_plan *plan = NULL;
    koila_fit fit = { 0 };
    if (room->gpu < 0)
        koila__probe_graph(part, rows);
    for (int tries = 0;; tries++) {
        const uint64_t counted_with = learned.generation;
        *status = make_plan(part, targets, n_targets, room, rows, &plan, &fit, err);
        if (*status != KOILA_OK || tries == 2 || room->gpu >= 0)
            break;
        koila__probe_plan(plan);
        if (learned.generation == counted_with)
            break;
        koila_plan_free(plan);
        plan = NULL;
    }
    cached *c = *status == KOILA_OK ? PyMem_RawCalloc(1, sizeof *c) : NULL;
    if (!c) {
        koila_plan_free(plan);
        koila_graph_free(part);
        if (*status == KOILA_OK)
            *status = KOILA_NO_MEMORY;
        return NULL;
    }
    *c = (cached){ .refs = 2,
                   .key = key,
                   .generation = learned.generation,
                   .used = ++cache_clock,
                   .budget = budget,
                   .part = part,
                   .plan = plan,
                   .info = koila_plan_get(plan),
                   .asked = koila__settings.cpu_budget,
                   .gpu = room->gpu,
                   .state = room->state,
                   .n_states = n_states,
                   .fit = fit };
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
    koila__gpu_forget();
    if (learned.n)
        memset(learned.at, 0, learned.n * sizeof *learned.at);
    learned.generation++;
}
