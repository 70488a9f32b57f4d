/* fit.c — which plan fits: the callback of koila_plan_new(), and the planner on a device that
 * is here.
 *
 * On a live device leaves and whatever else is alive are in the cache already. A plan is run in
 * that cache behind a mark, and the cache is rewound, so it is as before when a function returns.
 * The plan is judged by the high end: it fits when no request of it fails.
 */
#include "predict/simulation.h"

/* The smallest segment that torch's cache asks the driver for: finer margins make hardly a
 * difference.
 */
#define MARGIN_STEP ((uint64_t)2 << 20)

/* ---- the search */

bool koila__fit_accepts(void *user, const koila_plan *p)
{
    koila__fit_search *x = user;
    const koila_plan_info info = koila_plan_get(p);
    const bool is_one_row = info.rows <= 1;
    const uint32_t most = KOILA_MAX_SIMULATIONS - (is_one_row ? 0 : 1);
    bool yes = false;
    const uint32_t along = info.n_inner ? KOILA_NONE : info.dim + 1;
    const bool drops = info.n_again || info.n_offloaded;
    if (x->along != along || x->drops != drops) { /* another way: counted anew */
        x->along = along;
        x->drops = drops;
        x->n_simulations = 0;
        x->refused_slices = 0;
    }
    if (x->status || x->n_simulations >= most)
        return false;
    /* try another policy for the refused number of slices only if it needs clearly less */
    if (info.n_slices == x->refused_slices && !is_one_row &&
        info.peak_bytes > x->refused_bytes - x->refused_bytes / 8)
        return false;
    x->n_simulations++;
    koila_assert(x->n_simulations <= KOILA_MAX_SIMULATIONS);
    x->status = x->fits(x->user, p, &yes);
    if (x->status)
        return false;
    if (yes) {
        x->accepted = true;
        x->accepted_graph = koila_plan_graph(p);
        x->accepted_rows = info.rows;
    } else {
        x->refused_slices = info.n_slices;
        x->refused_bytes = info.peak_bytes;
    }
    return yes;
}

int64_t koila__rows_of_slices(const koila_graph *g, int64_t n)
{
    int64_t batch = 1;
    koila_assert(n > 0);
    for (uint32_t a = 0; a < koila_graph_n_axes(g); a++)
        if (koila_graph_axis_size(g, (uint16_t)a) > batch)
            batch = koila_graph_axis_size(g, (uint16_t)a);
    return (batch + n - 1) / n;
}

/* ---- a device that is here */

typedef struct live_device {
    const koila_device *d;
    koila_cache *cache; /* borrowed; unchanged when a function returns */
    koila_fit_opts o;
    koila_fit last;     /* of the last plan tried */
    koila_fit accepted; /* of the last plan that fits */
} live_device;

static koila_status worded(koila_status status, koila_error *e)
{
    if (status == KOILA_UNSUPPORTED)
        return koila__fail(e, status, 0, "the plan keeps too many pieces to be simulated");
    return status == KOILA_OK ? status : koila__fail(e, status, 0, "%s", koila_status_text(status));
}

/* Does the plan's sum of live bytes leave less than the margin? Cached bytes count as left, so the
 * margin must hold for the sum too. */
static bool exceeds_margin(const live_device *x, const koila_plan *p)
{
    const uint64_t left = koila__cache_left(x->cache);
    const uint64_t margin = x->o.margin_bytes;
    if (!margin || left == UINT64_MAX)
        return false;
    return left < margin || left - margin < koila_plan_get(p).peak_bytes;
}

/* Runs the plan of an open simulation in the live cache, behind a mark. */
static koila_status run_in_cache(live_device *x, koila__sim *s, koila_fit *f)
{
    const koila_cache_stat *stat = koila__cache_stats_ref(x->cache);
    const uint64_t retries = stat->num_alloc_retries;
    koila__cache_begin(x->cache, x->o.margin_bytes);
    s->c = x->cache;
    s->stream = x->o.stream;
    /* a plan runs in one thread, so its products share one workspace of cuBLAS */
    s->one_cublas = true;
    s->has_cublas[0] = s->has_cublas[1] = x->o.has_cublas_workspace;
    s->measured = x->o.measured;
    s->measured_user = x->o.user;
    s->ends_at_oom = true;
    /* the cache already holds the leaves: here they are storages without bytes */
    for (koila_value v = 0; v < s->n_values && !s->status; v++)
        if (koila_value_get(s->g, v).node == KOILA_NONE)
            s->whole[v] = koila__storage_new(s, 0, v);
    koila__sim_run_plan(s);
    f->fits = !s->oom;
    f->peak_allocated = stat->of[KOILA_STAT_ALLOCATED_BYTES][KOILA_STAT_ALL].peak;
    f->peak_reserved = stat->of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL].peak;
    f->n_retries = stat->num_alloc_retries - retries;
    return s->status == KOILA_OOM ? KOILA_OK : s->status;
}

/* x->last says whether p fits. Expected: NO_MEMORY, UNSUPPORTED. */
static koila_status try_plan(live_device *x, const koila_plan *p)
{
    koila__sim s;
    koila_fit f = { .struct_size = (uint32_t)sizeof f, .n_simulations = x->last.n_simulations + 1 };
    const koila_predict_opts o = { .struct_size = sizeof o,
                                   .sdpa = x->o.sdpa,
                                   .cublas_workspace = x->o.cublas_workspace,
                                   .cublaslt_workspace = x->o.cublaslt_workspace,
                                   .keeps_cublas = x->o.keeps_cublas };
    if (exceeds_margin(x, p)) {
        x->last = f;
        return KOILA_OK;
    }
    koila_status status = koila__sim_open_plan(&s, p, x->d, &o, KOILA__HIGH);
    const uint64_t mark = status ? 0 : koila_cache_mark(x->cache);
    if (!status && !mark)
        status = KOILA_NO_MEMORY;
    if (!status) {
        status = run_in_cache(x, &s, &f);
        x->last = f;
    }
    if (mark) {
        koila_cache_rewind(x->cache, mark);
        koila_cache_forget(x->cache, mark);
    }
    koila__sim_close(&s);
    return status;
}

/* koila__fit_search.fits of a live device. */
static koila_status fits_live(void *user, const koila_plan *p, bool *yes)
{
    live_device *x = user;
    KOILA_TRY(try_plan(x, p));
    *yes = x->last.fits;
    if (*yes)
        x->accepted = x->last;
    return KOILA_OK;
}

koila_status koila_fits_plan(const koila_plan *p, const koila_device *d, koila_cache *live,
                             const koila_fit_opts *o, koila_fit *out, koila_error *e)
{
    live_device x = { .d = d, .cache = live };
    if (o)
        x.o = *o;
    KOILA_TRY(worded(try_plan(&x, p), e));
    *out = x.last;
    return KOILA_OK;
}

koila_status koila_fits(const koila_graph *g, const koila_device *d, koila_cache *live,
                        uint64_t slice, koila_fit *out, koila_error *e)
{
    const koila_allocator mem = koila__allocator(NULL);
    koila__values targets;
    koila_plan *plan = NULL;
    if (slice > INT64_MAX)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "slice out of range");
    KOILA_TRY(worded(koila__find_targets(g, &mem, &targets), e));
    const koila_plan_options po = { .struct_size = sizeof po,
                                    .budget_bytes = UINT64_MAX,
                                    .rows = slice ? (int64_t)slice : koila__rows_of_slices(g, 1) };
    koila_status status = koila_plan_new(g, targets.at, targets.n, &po, NULL, &plan, e);
    if (!status)
        status = koila_fits_plan(plan, d, live, NULL, out, e);
    koila_plan_free(plan);
    koila__vec_free(&mem, &targets);
    return status;
}

/* The caller's budget, but at most the bytes left in the cache: a plan above that cannot fit. Rows
 * forced without a budget are planned whatever they need. */
static uint64_t live_budget(const live_device *x, const koila_plan_options *po)
{
    const uint64_t left = koila__cache_left(x->cache);
    const uint64_t margin = x->o.margin_bytes;
    if (left == UINT64_MAX || (po->rows > 0 && po->budget_bytes == UINT64_MAX))
        return po->budget_bytes;
    const uint64_t usable = left > margin ? left - margin : 0;
    return usable < po->budget_bytes ? usable : po->budget_bytes;
}

/* The fit of the plan found by a search. Tries the plan again if the search did not, or if another
 * plan was accepted last. */
static koila_status fit_of(live_device *x, const koila__fit_search *search, const koila_plan *plan,
                           koila_fit *fit)
{
    if (search->status)
        return search->status;
    if (!search->n_simulations)
        KOILA_TRY(try_plan(x, plan)); /* forced rows: only to report what to expect */
    const bool is_accepted = search->accepted_graph == koila_plan_graph(plan) &&
                             search->accepted_rows == koila_plan_get(plan).rows;
    if (search->accepted && !is_accepted) {
        KOILA_TRY(try_plan(x, plan));
        x->accepted = x->last;
    }
    *fit = search->accepted ? x->accepted : x->last;
    fit->n_simulations = search->n_simulations ? search->n_simulations : 1;
    return KOILA_OK;
}

koila_status koila_plan_live(const koila_graph *g, const koila_value *targets, uint32_t n_targets,
                             const koila_plan_options *po, const koila_device *d, koila_cache *live,
                             const koila_fit_opts *o, const koila_allocator *mem, koila_plan **out,
                             koila_fit *fit, koila_error *e)
{
    live_device x = { .d = d, .cache = live, .last = { .struct_size = sizeof x.last } };
    koila__fit_search search = { .fits = fits_live, .user = &x };
    koila_plan_options options = *po;
    koila_plan *plan = NULL;
    if (o)
        x.o = *o;
    options.budget_bytes = live_budget(&x, po);
    options.accepts = koila__fit_accepts;
    options.accepts_user = &search;
    KOILA_TRY(koila_plan_new(g, targets, n_targets, &options, mem, &plan, e));
    const koila_status status = fit_of(&x, &search, plan, fit);
    if (status) {
        koila_plan_free(plan);
        return worded(status, e);
    }
    *out = plan;
    return KOILA_OK;
}

koila_status koila_fit_margin(const koila_plan *p, const koila_device *d, koila_cache *live,
                              const koila_fit_opts *o, uint64_t *margin_bytes, koila_error *e)
{
    live_device x = { .d = d, .cache = live };
    if (o)
        x.o = *o;
    uint64_t low = x.o.margin_bytes;
    uint64_t high = low;
    uint64_t step = MARGIN_STEP;
    const uint64_t left = koila__cache_left(live);
    KOILA_TRY(worded(try_plan(&x, p), e));
    if (!x.last.fits || left == UINT64_MAX) {
        *margin_bytes = low;
        return KOILA_OK;
    }
    do { /* the plan fits with margin `low`; with `high` it does not, once the loop ends */
        high = low + step;
        step *= 2;
        x.o.margin_bytes = high;
        KOILA_TRY(worded(try_plan(&x, p), e));
        if (x.last.fits)
            low = high;
    } while (x.last.fits && high < left);
    while (high - low > MARGIN_STEP) {
        koila_assert(low < high);
        x.o.margin_bytes = low + (high - low) / 2;
        KOILA_TRY(worded(try_plan(&x, p), e));
        if (x.last.fits)
            low = x.o.margin_bytes;
        else
            high = x.o.margin_bytes;
    }
    *margin_bytes = high;
    return KOILA_OK;
}
