/* plan_cache.c — finds a plan made before, or makes a new one and keeps it.
 *
 * The key of a plan is the hash of the recorded part, the targets, the forced rows and the axes
 * that may be cut. A plan is made again when its assumptions have changed (an operator has a larger
 * workspace than was known), when it no longer fits, or when there is so much more memory that
 * fewer slices may fit. On a GPU cuda_state.c decides whether it fits. In place of a plan of the
 * fewest slices one of more is given where that is tried or faster (tuning.c).
 */
#include "base/idset.h"
#include "run/run.h"

enum {
    N_CACHED = 32,
    MOST_PLANNED_AGAIN = 8, /* times that probes may cause a plan to be made again */
};
static cached *cache[N_CACHED]; /* counted */
static uint64_t clock_of_uses;

void koila__cached_release(cached *c)
{
    if (!c)
        return;
    koila_assert(c->refs > 0);
    if (--c->refs)
        return;
    koila__bodies_free(c->bodies, c->info.n_stages);
    koila_plan_free(c->plan);
    PyMem_RawFree(c->targets);
    if (c->is_predicted)
        koila_graph_copy_free(c->part);
    else
        koila_graph_free(c->part);
    PyMem_RawFree(c);
}

cached *koila__cached_predicted(koila_graph *part, koila_plan *plan)
{
    cached *c = PyMem_RawCalloc(1, sizeof *c);
    if (!c) {
        PyErr_NoMemory();
        return NULL;
    }
    *c = (cached){ .refs = 1,
                   .part = part,
                   .is_predicted = true,
                   .plan = plan,
                   .info = koila_plan_get(plan),
                   .gpu = -1 };
    return c;
}

/* ---- finding a plan */

static uint64_t key_of(const koila_graph *part, const koila_value *targets, uint32_t n_targets,
                       koila__cutting how)
{
    uint64_t key = koila__mix(koila_graph_hash(part), (uint64_t)how.rows);
    key = koila__mix(key, how.axes | (uint32_t)how.recomputes << 8 | (uint32_t)how.offloads << 9 |
                              (uint32_t)how.must_fit << 10);
    for (uint32_t i = 0; i < n_targets; i++)
        key = koila__mix(key, targets[i]);
    return key;
}

/* Is c still the plan that would be made now? Decided without asking the GPU's allocator. */
static bool still_holds(const cached *c, uint64_t key, const koila__room *room, int64_t rows)
{
    if (c->key != key || c->generation != koila__learned_generation() || c->gpu != room->gpu ||
        c->info.peak_bytes > room->bytes)
        return false;
    const bool is_as_forced = rows > 0 && c->info.rows >= rows;
    if (is_as_forced || (c->info.n_slices == 1 && !c->info.n_again && !c->info.n_offloaded))
        return true;
    /* with a third more memory, or another user's budget, fewer slices may fit, or all results */
    const bool is_similar = room->bytes / 4 <= c->budget / 3 || room->bytes == c->budget;
    return is_similar && (room->gpu >= 0 || c->user_budget == koila__settings_now().cpu_budget);
}

/* On a GPU: should c be kept in the allocator's present state? In another state fewer slices may
 * fit in as many bytes, which only a new plan can show. Planning takes longer than checking that c
 * still fits, so it is done only at the 1st, 2nd, 4th, ... change of state. */
static bool holds_in_state(cached *c, const koila__room *room, int64_t rows, uint32_t n_states)
{
    if (room->gpu < 0)
        return true;
    const bool is_power_of_two = !(n_states & (n_states - 1));
    const bool try_anew =
        n_states != c->n_states && c->info.n_slices > 1 && rows <= 0 && is_power_of_two;
    return !try_anew && koila__gpu_still_fits(room, c);
}

/* A cached plan that still holds, a new reference; NULL: none. *n_states: cached.n_states for a new
 * plan. */
static cached *find(uint64_t key, const koila__room *room, int64_t rows, uint32_t *n_states)
{
    for (uint32_t i = 0; i < N_CACHED; i++) {
        cached *c = cache[i];
        if (!c || !still_holds(c, key, room, rows))
            continue;
        *n_states = c->n_states + (c->state != room->state);
        c->refs++; /* a look at the GPU's allocator runs Python, which may put another plan here */
        const bool holds = holds_in_state(c, room, rows, *n_states);
        if (holds) {
            c->n_states = *n_states;
            return c;
        }
        if (cache[i] == c) {
            cache[i] = NULL;
            koila__cached_release(c);
        }
        koila__cached_release(c);
    }
    return NULL;
}

/* The last empty slot, so that find() meets newer plans first; else the slot of the least recently
 * used plan. */
static cached **slot_for_new(void)
{
    cached **oldest = &cache[N_CACHED - 1];
    for (uint32_t i = N_CACHED; i-- > 0;) {
        if (!cache[i])
            return &cache[i];
        if (cache[i]->used < (*oldest)->used)
            oldest = &cache[i];
    }
    return oldest;
}

/* ---- making a plan */

/* Forced rows where only the user's budget limits: halved until they fit, as a run on the CPU is
 * cut again when torch refuses what lies beyond the budget. */
static koila_status plan_within_budget(const koila_graph *part, const koila_value *targets,
                                       uint32_t n_targets, const koila__room *room,
                                       koila_plan_options *o, koila_plan **out, koila_fit *fit,
                                       koila_error *err)
{
    for (;;) {
        const koila_status status =
            koila__gpu_plan(room, part, targets, n_targets, o, out, fit, err);
        const bool is_too_large =
            status == KOILA_OOM || (status == KOILA_OK && fit->struct_size && !fit->fits);
        if (!is_too_large || o->rows == 1)
            return status;
        koila_plan_free(*out);
        *out = NULL;
        *fit = (koila_fit){ 0 };
        o->rows -= o->rows / 2;
    }
}

static koila_status make_plan(const koila_graph *part, const koila_value *targets,
                              uint32_t n_targets, const koila__room *room, koila__cutting how,
                              koila_plan **out, koila_fit *fit, koila_error *err)
{
    const int64_t rows = how.rows;
    const bool is_forced = rows > 0 && !how.must_fit;
    koila_plan_options o = {
        .struct_size = sizeof o,
        .axes = how.axes,
        .recomputes = how.recomputes,
        .finds_least = how.finds_least,
        .budget_bytes = is_forced && !koila__settings_now().has_budget ? UINT64_MAX : room->bytes,
        .rows = rows,
        .workspace = room->gpu < 0 ? koila__workspace_of : koila__gpu_workspace_of,
        .spared = koila__spared_of
    };
    if (how.offloads) {
        o.host_price = koila__host_price(room->gpu);
        o.host_bytes = koila__host_room();
        o.host_device = (uint16_t)(0x100 | room->gpu);
    }
    if (is_forced && room->is_budget)
        return plan_within_budget(part, targets, n_targets, room, &o, out, fit, err);
    const koila_status status = koila__gpu_plan(room, part, targets, n_targets, &o, out, fit, err);
    if (status != KOILA_OOM || !is_forced)
        return status;
    o.budget_bytes = UINT64_MAX; /* forced rows are tried anyway, with the plan of least memory */
    return koila_plan_new(part, targets, n_targets, &o, NULL, out, err);
}

/* The rows that are forced, if any. */
static int64_t rows_of(koila__cutting how)
{
    if (how.axes == KOILA_AXES_OTHER)
        return 0;
    return how.axes == KOILA_AXES_BOTH ? 1 : how.rows;
}

/* Nothing fits, and `err` tells the least that would: probes the calls of that plan, of which a
 * step within the budget has none. */
static void probe_least(const koila_graph *part, const koila_value *targets, uint32_t n_targets,
                        const koila__room *room, koila__cutting how, const koila_error *err)
{
    koila_error ignored = KOILA_ERROR_INIT;
    koila__room larger = *room;
    koila_plan *plan = NULL;
    koila_fit fit = { 0 };
    larger.bytes += err->missing_bytes;
    how.finds_least = false;
    if (make_plan(part, targets, n_targets, &larger, how, &plan, &fit, &ignored) == KOILA_OK)
        koila__probe_plan(plan);
    koila_plan_free(plan);
}

/* Probes new calls before planning, and again at the planned rows. Their workspaces may change the
 * plan. */
static koila_status plan_and_probe(const koila_graph *part, const koila_value *targets,
                                   uint32_t n_targets, const koila__room *room, koila__cutting how,
                                   koila_plan **out, koila_fit *fit, koila_error *err)
{
    *out = NULL;
    if (room->gpu < 0)
        koila__probe_graph(part, rows_of(how));
    for (int again = 0;; again++) {
        const uint64_t counted_with = koila__learned_generation();
        const koila_status status = make_plan(part, targets, n_targets, room, how, out, fit, err);
        const bool is_told = status == KOILA_OOM && how.finds_least;
        if ((status != KOILA_OK && !is_told) || again == MOST_PLANNED_AGAIN || room->gpu >= 0)
            return status;
        if (is_told)
            probe_least(part, targets, n_targets, room, how, err);
        else
            koila__probe_plan(*out);
        if (koila__learned_generation() == counted_with)
            return status;
        koila_plan_free(*out);
        *out = NULL;
    }
}

/* As the settings of the running code say. */
koila__cutting koila__cutting_now(const koila__room *room)
{
    static const uint32_t axes[] = { [KOILA__CUT_ANY] = KOILA_AXES_ANY,
                                     [KOILA__CUT_BATCH] = KOILA_AXES_ROWS,
                                     [KOILA__CUT_OTHER] = KOILA_AXES_OTHER,
                                     [KOILA__CUT_BOTH] = KOILA_AXES_BOTH };
    const koila__settings set = koila__settings_now();
    return (koila__cutting){ .rows = set.rows,
                             .axes = axes[set.axes],
                             .recomputes = !set.rows,
                             .offloads = !set.rows && koila__host_price(room->gpu) > 0 };
}

/* A plan that is known, or that was made as the last thing that was tried. *n_states: as find(). */
static cached *find_known(uint64_t key, const koila_graph *part, const koila_value *targets,
                          uint32_t n_targets, const koila__room *room, koila__cutting how,
                          uint32_t *n_states)
{
    *n_states = 0;
    cached *c = find(key, room, how.must_fit ? 0 : how.rows, n_states);
    if (c || !how.or_known_last)
        return c;
    const koila__cutting last = { .axes = how.last_axes,
                                  .recomputes = true,
                                  .offloads = koila__may_offload(room->gpu) };
    return find(key_of(part, targets, n_targets, last), room, 0, n_states);
}

/* A plan that goes into the cache; `part` is taken over. A new reference; NULL with *status and err
 * filled, and `part` not taken over. */
static cached *new_plan(uint64_t key, koila_graph *part, const koila_value *targets,
                        uint32_t n_targets, const koila__room *room, koila__cutting how,
                        uint32_t n_states, koila_error *err, koila_status *status)
{
    koila_plan *plan = NULL;
    koila_fit fit = { 0 };
    *status = plan_and_probe(part, targets, n_targets, room, how, &plan, &fit, err);
    cached *c = *status == KOILA_OK ? PyMem_RawCalloc(1, sizeof *c) : NULL;
    koila_value *kept = c ? PyMem_RawMalloc((n_targets + 1) * sizeof *kept) : NULL;
    if (!kept) {
        PyMem_RawFree(c);
        if (*status == KOILA_OK)
            *status = KOILA_NO_MEMORY;
        koila_plan_free(plan);
        return NULL;
    }
    memcpy(kept, targets, n_targets * sizeof *kept);
    *c = (cached){ .refs = 2, /* one for the cache, one for the caller */
                   .key = key,
                   .generation = koila__learned_generation(),
                   .used = ++clock_of_uses,
                   .budget = room->bytes,
                   .part = part,
                   .plan = plan,
                   .info = koila_plan_get(plan),
                   .user_budget = koila__settings_now().cpu_budget,
                   .gpu = room->gpu,
                   .state = room->state,
                   .n_states = n_states,
                   .fit = fit,
                   .below_peak = UINT64_MAX,
                   .targets = kept,
                   .n_targets = n_targets };
    cached **slot = slot_for_new();
    koila__cached_release(*slot);
    *slot = c;
    return c;
}

/* Does the plan cut rows, and nothing else? Or nothing at all, which micro_batch("fastest") tries
 * to cut too. */
static bool is_tunable(const koila_plan_info *info)
{
    const bool cuts_rows =
        info->dim == KOILA_NONE && !info->n_inner && !info->n_again && !info->n_offloaded;
    return cuts_rows &&
           (info->n_slices > 1 || koila__settings_now().slices == KOILA__SLICES_FASTEST);
}

/* In place of plan c of the fewest slices (taken over): the plan of the size whose turn it is.
 * *part: NULL afterwards if it was taken over. */
static cached *tuned_plan(cached *c, koila_graph **part, const koila_value *targets,
                          uint32_t n_targets, const koila__room *room, koila__turn *turn)
{
    koila_error ignored = KOILA_ERROR_INIT;
    koila_status status;
    uint32_t n_states = 0;
    if (!is_tunable(&c->info))
        return c;
    *turn = koila__turn_of(c->key, *part, &c->info);
    if (!turn->size)
        return c;
    const koila__cutting how = { .rows = turn->rows, .axes = KOILA_AXES_ROWS, .must_fit = true };
    const uint64_t key = key_of(*part, targets, n_targets, how);
    cached *other = find(key, room, 0, &n_states);
    if (!other) {
        other = new_plan(key, *part, targets, n_targets, room, how, n_states, &ignored, &status);
        if (other)
            *part = NULL;
    }
    if (!other) {
        koila__turn_refuse(turn);
        *turn = (koila__turn){ .key = turn->key };
        return c;
    }
    koila__cached_release(c);
    return other;
}

cached *koila__plan_for(koila_graph *part, const koila_value *targets, uint32_t n_targets,
                        const koila__room *room, koila__cutting how, koila_error *err,
                        koila_status *status)
{
    const uint64_t key = key_of(part, targets, n_targets, how);
    uint32_t n_states;
    cached *c = find_known(key, part, targets, n_targets, room, how, &n_states);
    if (!c) {
        c = new_plan(key, part, targets, n_targets, room, how, n_states, err, status);
        if (!c)
            koila_graph_free(part);
        return c;
    }
    koila_assert(c->refs > 0);
    c->used = ++clock_of_uses;
    if (how.turn)
        c = tuned_plan(c, &part, targets, n_targets, room, how.turn);
    c->used = ++clock_of_uses;
    if (part && koila_graph_n_drops(part)) /* equal steps may hold their values for other times */
        koila_graph_take_lives(c->part, part);
    if (part && koila_graph_table(c->part) == koila_graph_table(part))
        koila_graph_take_lines(c->part, part); /* they may come from elsewhere in the program */
    koila_graph_free(part);
    return c;
}

void koila__plan_cache_clear(void)
{
    for (uint32_t i = 0; i < N_CACHED; i++) {
        koila__cached_release(cache[i]);
        cache[i] = NULL;
    }
    koila__needs_forget();
    koila__gpu_forget();
    koila__unlearn();
}
