/* live.c — liveness is exact: the schedule says where every storage begins and ends, and a sharded
 * value of a slice of b rows has b/batch of its bytes. So the peak is found by replaying the
 * events.
 *
 * All slices except the first (which makes the accumulators) and a ragged last one do the same, and
 * each leaves the same number of bytes behind. So only the first, the second, the last full and the
 * ragged slice are walked, and the growth between them is multiplied. When only the peak is asked
 * for, the first two are walked in one pass. A simulation is O(events), whatever the number of
 * slices.
 *
 *   live == sum of bytes of storages made and not freed        (asserted: never below zero) */
#include "engine/live.h"

#include "engine/share.h"
#include "graph/table.h"

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
/* UINT64_MAX where that is beyond 64 bits. */
static uint64_t capped_sum(uint64_t a, uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }

static uint64_t accumulator_bytes(const koila__placed *p, koila_value v, bool cut)
{
    const koila_meta_info *m = koila__value_meta(p->graph, v);
    const koila_share share = koila__share_of(p->value[v]);
    return m->n_elements * koila_dtype_bytes(koila_accumulator_dtype(m->dtype, share, !cut));
}

typedef struct walk {
    const koila__placed *p;
    const koila__schedule *s;
    const koila__live_options *o;
    uint64_t live, peak, stage_peak, slice_peak;
    uint32_t peak_stage;
    koila_node peak_node, slice_node; /* what runs at the peak of all, of this slice */
    koila__live_curve_fn curve;
    void *curve_user;
    /* bytes of each storage now, and before the slice that is multiplied; only with o->top
     */
    uint64_t *held, *held_before;
    bool stopped, saw_top;
    int64_t begin, end; /* rows of the slice, in a loop with pieces; end == 0: not in one */
} walk;

/* Finds the largest storages now, in order; among equals the first. */
static void look_at_top(walk *w)
{
    koila__live_top *t = w->o->top;
    w->saw_top = true;
    for (uint32_t v = 0; v < w->p->graph->values.n && t->cap; v++) {
        if (!w->held[v] || (t->n == t->cap && w->held[v] <= t->bytes[t->n - 1]))
            continue;
        uint32_t k = t->n < t->cap ? t->n++ : t->n - 1;
        for (; k > 0 && t->bytes[k - 1] < w->held[v]; k--) {
            t->bytes[k] = t->bytes[k - 1];
            t->value[k] = t->value[k - 1];
        }
        t->bytes[k] = w->held[v];
        t->value[k] = v;
    }
}

/* Updates the peak at `now` bytes. Of equally high moments the first counts, with the operator
 * running then. */
static inline void see(walk *w, uint32_t stage, koila_node running, uint64_t now)
{
    if (now < w->slice_peak)
        return;
    if (now > w->slice_peak || w->slice_node == KOILA_NONE) {
        w->slice_peak = now;
        w->slice_node = running;
    }
    if (now < w->peak)
        return;
    if (now > w->peak || (running != KOILA_NONE && w->peak_node == KOILA_NONE)) {
        w->peak = now;
        w->peak_stage = stage;
        w->peak_node = running;
    }
    if (w->o->limit && now > w->o->limit)
        w->stopped = true;
    if (w->held && !w->saw_top && now >= w->o->top->at_bytes)
        look_at_top(w);
}

/* A dense copy of `rows` of `batch` rows. */
static uint64_t share_bytes(const koila_meta_info *m, int64_t rows, int64_t batch)
{
    return batch > 0 ? m->n_bytes / (uint64_t)batch * (uint64_t)rows : 0;
}

/* A sum is added in place; other combinations make a new accumulator while the old one lives. */
static uint64_t combine_bytes(const koila__placed *p, koila_value v)
{
    return p->value[v].combine == KOILA_SUM ? 0 : koila__value_meta(p->graph, v)->n_bytes;
}

/* What node n uses inside. A node of a piece runs as it was recorded. */
static uint64_t workspace_of(const walk *w, koila_node n, int64_t rows, int64_t batch)
{
    const bool is_whole = !batch || w->p->node[n].end;
    return w->o->workspace(w->o->user, w->p->graph->nodes.at[n].sig, is_whole ? 0 : rows,
                           is_whole ? 0 : batch);
}

/* Of the bytes `made`, which node n makes as KOILA__LOCAL_MADE: those that are never there beside
 * what it is given. 0 of none: n may be anything then. */
static uint64_t spared_by(const walk *w, koila_node n, uint64_t made, int64_t rows, int64_t batch)
{
    if (!made || !w->o->workspace || !w->o->spared)
        return 0;
    const bool is_whole = !batch || w->p->node[n].end;
    const uint64_t bytes = w->o->spared(w->o->user, w->p->graph->nodes.at[n].sig,
                                        is_whole ? 0 : rows, is_whole ? 0 : batch);
    return bytes < made ? bytes : made;
}

/* Whole because it is one line for each kind of event, and is inlined into the walks.
 *
 * Returns the bytes that event e adds (modulo 2^64), in the first slice or in another one. *inside:
 * bytes held beyond that during the event. */
static inline __attribute__((always_inline)) uint64_t change(const walk *w, const koila__stage *st,
                                                             const koila__event *e, int64_t rows,
                                                             int64_t batch, bool first,
                                                             uint64_t *inside)
{
    const uint32_t v = e->value;
    const bool cut = rows != batch;
#define LOCAL koila__live_bytes(w->p, v, rows)
#define META koila__value_meta(w->p->graph, v)
    switch ((koila__event_kind)e->kind) {
    case KOILA__LOCAL_ALLOC:
    case KOILA__LOCAL_MADE:
        return LOCAL;
    case KOILA__LOCAL_FREE:
        return 0 - LOCAL;
    case KOILA__LOCAL_FREE_IF_CUT:
        return cut ? 0 - LOCAL : 0;
    case KOILA__LOCAL_FREE_LATER:
        return first ? 0 : 0 - LOCAL;
    case KOILA__SLICE_ALLOC:
        return cut ? share_bytes(META, rows, batch) : 0;
    case KOILA__SLICE_FREE:
        return cut ? 0 - share_bytes(META, rows, batch) : 0;
    case KOILA__CUT_ALLOC:
        return share_bytes(META, rows, batch);
    case KOILA__CUT_FREE:
        return 0 - share_bytes(META, rows, batch);
    case KOILA__WHOLE_ALLOC:
        return META->n_storage_bytes;
    case KOILA__WHOLE_FREE:
        return 0 - META->n_storage_bytes;
    case KOILA__COLLECTED_FREE:
        return 0 - META->n_bytes;
    case KOILA__ADDEND_ALLOC:
        return cut || koila__adds_on(w->p, v) ? 0 : META->n_bytes;
    case KOILA__ADDEND_FREE:
        return cut || koila__adds_on(w->p, v) ? 0 : 0 - META->n_bytes;
    case KOILA__SUM_MADE:
        return first && !koila__adds_on(w->p, v) ? META->n_bytes : 0;
    case KOILA__ADD_OWNED_WIDE:
        return first && cut ? accumulator_bytes(w->p, v, true) : 0;
    case KOILA__ADD_CLONE:
        if (first && !koila__adds_on(w->p, v))
            return accumulator_bytes(w->p, v, cut);
        *inside = combine_bytes(w->p, v);
        return 0;
    case KOILA__ADD_OWNED:
        if (!first)
            *inside = combine_bytes(w->p, v);
        return 0;
    case KOILA__PUT:
        return first ? META->n_bytes : 0;
    case KOILA__PUT_OWNED:
        return first && cut ? META->n_bytes : 0;
    case KOILA__RUN:
        if (w->o->workspace)
            *inside = workspace_of(w, v, rows, batch);
        return 0;
    case KOILA__INNER:
        *inside = st->inner_peak;
        return 0;
    case KOILA__KEPT:
    case KOILA__KEPT_FROM:
    case KOILA__KEPT_FREE:
        return 0;
    }
    return 0;
#undef META
}

/* From now on v holds `changed` more bytes (modulo 2^64). */
static inline void put(walk *w, koila_value v, uint64_t changed)
{
    koila_assert(changed <= INT64_MAX || 0 - changed <= w->live);
    w->live += changed;
    if (w->held)
        w->held[v] += changed > INT64_MAX && 0 - changed > w->held[v] ? 0 - w->held[v] : changed;
}

/* Does the next event's value take over the storage of e's value? */
static bool takes_over(const koila__event *e, bool first, bool cut)
{
    return e->kind == KOILA__KEPT || (first && e->kind == KOILA__ADD_OWNED) ||
           (first && !cut && (e->kind == KOILA__ADD_OWNED_WIDE || e->kind == KOILA__PUT_OWNED));
}

/* Is event e about a piece that another slice has? */
static inline bool is_elsewhere(const walk *w, const koila__event *e)
{
    if (e->kind == KOILA__RUN)
        return !koila__runs_in(&w->p->node[e->value], w->begin, w->end);
    return !koila__is_in(w->p->value[e->value], w->begin, w->end);
}

/* Does event e begin what slices leave behind? A piece's only slice is its first. */
static inline bool is_first(const walk *w, const koila__event *e, bool first)
{
    return first || (w->end && e->kind != KOILA__RUN && koila__is_piece(w->p->value[e->value]));
}

/* Tells the curve that an operator, or a row's step, runs at so many bytes. */
static inline void tell(walk *w, uint32_t stage, const koila__event *e, uint64_t bytes)
{
    const koila_node running = e->kind == KOILA__RUN ? e->value : KOILA_NONE;
    if (e->kind != KOILA__RUN && e->kind != KOILA__INNER)
        return;
    if (w->curve && !w->curve(w->curve_user, stage, running, bytes))
        w->curve = NULL;
}

static void walk_slice(walk *w, uint32_t stage, int64_t rows, int64_t batch, bool first)
{
    const koila__stage *st = &w->s->stages[stage];
    const koila__event *const end = st->events + st->n_events;
    bool any_given_up = false;
    uint64_t made = 0; /* bytes of KOILA__LOCAL_MADE by the node that runs next */
    w->slice_peak = w->live;
    w->slice_node = KOILA_NONE;
    for (const koila__event *e = st->events; e < end && !w->stopped; e++) {
        const uint32_t v = e->value;
        const bool runs = e->kind == KOILA__RUN;
        uint64_t inside = 0;
        if (w->end && is_elsewhere(w, e))
            continue;
        const uint64_t changed = change(w, st, e, rows, batch, is_first(w, e, first), &inside);
        if (!runs)
            put(w, v, changed);
        any_given_up |= e->kind == KOILA__KEPT_FREE;
        if (w->held && takes_over(e, is_first(w, e, first), rows != batch)) {
            const koila_value from = e[1].value;
            const uint64_t bytes = koila__live_bytes(w->p, from, rows);
            koila_assert(e + 1 < end);
            w->held[from] -= bytes < w->held[from] ? bytes : w->held[from];
            w->held[v] += bytes;
        }
        if (e->kind == KOILA__LOCAL_MADE)
            made += changed;
        if (changed > INT64_MAX || e->kind == KOILA__LOCAL_MADE)
            continue;
        const uint64_t spared = runs ? spared_by(w, v, made, rows, batch) : 0;
        const uint64_t now = capped_sum(w->live - spared, inside);
        made = 0;
        see(w, stage, runs ? v : KOILA_NONE, now);
        tell(w, stage, e, now);
    }
    for (const koila__event *e = st->events; e < end && any_given_up && !w->stopped; e++)
        if (e->kind == KOILA__KEPT_FREE)
            put(w, e->value, 0 - koila__live_bytes(w->p, e->value, rows));
    if (w->slice_peak > w->stage_peak)
        w->stage_peak = w->slice_peak;
}

/* Walks n slices for the peak alone, by which plans are compared. The first of them is the loop's
 * first slice (`first`), or all are alike. One pass over the events tells what a first slice does
 * and what each of the others does, both as if they began here. Differences of bytes are modulo
 * 2^64: they may be negative. */
static void walk_bytes(walk *w, uint32_t stage, int64_t rows, int64_t batch, bool first, uint64_t n)
{
    const koila__stage *st = &w->s->stages[stage];
    const uint64_t limit = w->o->limit ? w->o->limit : UINT64_MAX;
    const uint64_t from = w->live;
    uint64_t live = from, top = from;        /* of a first slice */
    uint64_t later = from, later_top = from; /* of another one */
    uint64_t given_up = 0, made = 0;
    for (const koila__event *e = st->events, *const end = e + st->n_events; e < end; e++) {
        const uint32_t v = e->value;
        uint64_t inside = 0;
        uint64_t changed;
        if (e->kind < KOILA__LOCAL_FREE_LATER) { /* the same in all slices */
            if (e->kind == KOILA__LOCAL_ALLOC)
                changed = LOCAL;
            else if (e->kind == KOILA__LOCAL_FREE)
                changed = 0 - LOCAL;
            else
                changed = change(w, st, e, rows, batch, false, &inside);
            live += changed;
            later += changed;
            if (e->kind == KOILA__LOCAL_MADE && w->o->workspace) {
                made += changed;
                continue;
            }
            top = larger(live, top);
            later_top = larger(later, later_top);
            continue;
        }
        if (e->kind == KOILA__RUN && !w->o->workspace)
            continue;
        if (e->kind == KOILA__KEPT_FREE)
            given_up += LOCAL;
        changed = change(w, st, e, rows, batch, false, &inside);
        const uint64_t spared = spared_by(w, v, made, rows, batch);
        made = 0;
        later += changed;
        later_top = larger(capped_sum(later - spared, inside), later_top);
        if (e->kind != KOILA__RUN) {
            inside = 0;
            changed = change(w, st, e, rows, batch, true, &inside);
        }
        live += changed;
        top = larger(capped_sum(live - spared, inside), top);
        if (first && top > limit)
            break;
    }
    if (first) {
        see(w, stage, KOILA_NONE, top);
        w->live = live - given_up;
    }
    if (n <= first || w->stopped)
        return;
    const uint64_t growth = later - given_up - from;
    const uint64_t n_later = n - first;
    /* at the start of the highest of them */
    const uint64_t begin = w->live - from + (growth <= INT64_MAX ? growth * (n_later - 1) : 0);
    see(w, stage, KOILA_NONE,
        begin <= INT64_MAX ? capped_sum(later_top, begin) : later_top + begin);
    w->live += growth * n_later;
}
#undef LOCAL

/* Remembers the bytes of the storages of a stage, before the slice that is multiplied. */
static void mark_held(walk *w, uint32_t stage)
{
    const koila__stage *st = &w->s->stages[stage];
    for (uint32_t e = 0; w->held && e < st->n_events; e++)
        if (st->events[e].kind != KOILA__RUN)
            w->held_before[st->events[e].value] = w->held[st->events[e].value];
}

/* n more slices repeat the one that began with `before` bytes. */
static void multiply_slice(walk *w, uint32_t stage, uint64_t before, uint64_t n)
{
    const koila__stage *st = &w->s->stages[stage];
    const uint64_t growth = w->live - before; /* modulo 2^64: may be negative */
    w->live += growth * n;
    for (uint32_t e = 0; w->held && e < st->n_events; e++) {
        const koila_value v = st->events[e].value;
        if (st->events[e].kind == KOILA__RUN)
            continue;
        w->held[v] += (w->held[v] - w->held_before[v]) * n;
        w->held_before[v] = w->held[v]; /* once */
    }
}

/* Wide accumulators are cast back, one after another. */
static void cast_back(walk *w, uint32_t stage, bool cut)
{
    const koila_stage *st = &w->s->stages[stage].stage;
    for (uint32_t i = 0; i < st->n_instrs && !w->stopped; i++) {
        const koila_value v = st->instrs[i].id;
        if (st->instrs[i].kind != KOILA_DO_ADD || koila__adds_on(w->p, v))
            continue;
        const uint64_t wide = accumulator_bytes(w->p, v, cut);
        const uint64_t narrow = accumulator_bytes(w->p, v, false);
        if (wide == narrow)
            continue;
        put(w, v, narrow);
        see(w, stage, KOILA_NONE, w->live);
        w->stage_peak = larger(w->live, w->stage_peak);
        if (!w->stopped)
            put(w, v, 0 - wide);
    }
}

/* A loop with pieces: every slice has its own, so every slice is walked. */
static void walk_pieces(walk *w, uint32_t stage)
{
    const uint16_t axis = w->s->stages[stage].stage.axis;
    const int64_t batch = w->p->graph->axes.at[axis];
    for (int64_t at = 0; at < batch && !w->stopped; at = w->end) {
        w->begin = at;
        w->end = koila__slice_end(w->p, axis, at, w->o->rows[axis]);
        walk_slice(w, stage, w->end - at, batch, at == 0);
    }
    w->end = 0;
}

static void walk_loop(walk *w, uint32_t stage)
{
    const koila_stage *st = &w->s->stages[stage].stage;
    const int64_t batch = w->p->graph->axes.at[st->axis];
    const int64_t rows = w->o->rows[st->axis];
    const int64_t n_full = rows > 0 ? batch / rows : 0;
    const int64_t ragged = rows > 0 ? batch % rows : 0;
    if (w->p->cut && w->p->cut[st->axis] && rows > 0) {
        walk_pieces(w, stage);
    } else if (w->o->bytes_only) {
        if (n_full)
            walk_bytes(w, stage, rows, batch, true, (uint64_t)n_full);
        if (ragged && !w->stopped)
            walk_bytes(w, stage, ragged, batch, n_full == 0, 1);
    } else {
        for (int64_t i = 0; i < n_full && !w->stopped; i++) {
            const uint64_t before = w->live;
            if (i == 1)
                mark_held(w, stage);
            walk_slice(w, stage, rows, batch, i == 0);
            if (i == 1 && n_full > 3 && !w->stopped) { /* the slices between repeat this one */
                const int64_t n_skipped = n_full - 3;
                multiply_slice(w, stage, before, (uint64_t)n_skipped);
                i += n_skipped;
            }
        }
        if (ragged && !w->stopped)
            walk_slice(w, stage, ragged, batch, n_full == 0);
    }
    if (w->s->stages[stage].any_wide)
        cast_back(w, stage, rows != batch);
}

static void walk_all(walk *w, uint64_t *stage_peaks)
{
    w->peak_node = KOILA_NONE;
    for (uint32_t k = 0; k < w->s->n_stages && !w->stopped; k++) {
        w->stage_peak = w->live;
        if (w->s->stages[k].stage.is_loop)
            walk_loop(w, k);
        else if (w->o->bytes_only)
            walk_bytes(w, k, 0, 0, true, 1);
        else
            walk_slice(w, k, 0, 0, true);
        koila_assert(w->stopped || w->o->bytes_only || w->stage_peak >= w->live);
        koila_assert(w->o->bytes_only || w->peak >= w->stage_peak);
        if (stage_peaks)
            stage_peaks[k] = w->stage_peak;
    }
}

koila__live koila__live_simulate(const koila__placed *p, const koila__schedule *s,
                                 const koila__live_options *o, uint64_t *stage_peaks,
                                 koila__live_curve_fn curve, void *curve_user)
{
    walk w = { .p = p, .s = s, .o = o, .curve = curve, .curve_user = curve_user };
    const koila_allocator mem = koila__allocator(o->top ? o->top->mem : NULL);
    const size_t n_bytes = 2 * ((size_t)p->graph->values.n + 1) * sizeof *w.held;
    koila_assert(!o->top || !o->bytes_only);
    koila_assert(!stage_peaks || !o->bytes_only);
    if (o->top) {
        o->top->n = 0;
        w.held = koila__realloc(&mem, NULL, 0, n_bytes);
        if (w.held)
            w.held_before = (uint64_t *)memset(w.held, 0, n_bytes) + p->graph->values.n + 1;
    }
    walk_all(&w, stage_peaks);
    koila__release(&mem, w.held, n_bytes);
    return (koila__live){ w.peak, w.peak_stage, w.peak_node };
}
