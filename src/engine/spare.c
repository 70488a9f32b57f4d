/* spare.c — choices of what is dropped, one call after another.
 *
 * Segments are coarse: they drop more than a budget asks for, and miss single results that do.
 * A path begins where segments end (or where all is dropped, or nothing) and moves one call, or one
 * group of calls in a larger step, at a time: the one that saves the most work for the bytes that
 * it adds. Every choice on the way is a plan that may be taken, and none depends on the budget: so
 * a larger budget has all choices of a smaller one, and never more work. In large steps that takes
 * too long: there, choices fill the budget that is asked for.
 *
 * Bytes are those of the gauge, not the highest moment alone: of two results that are both held
 * there, or at two moments that are as high, dropping one changes nothing yet.
 *
 * A path that spares more and more needs no less than what is spared at first: if that is too much,
 * no choice on it is looked at (is_in_vain()).
 *
 * The best move is found lazily. What a move is worth changes little from one choice to the next,
 * so the best of what was last known is looked at anew, and taken if it is still the best. */
#include "engine/spare.h"

#include "engine/plan_costs.h"

#include <math.h>

/* Moves that are looked at anew before the best one of those is taken. */
enum { MOST_LOOKS = 4 };
/* Groups of KOILA__FILLS: fewer than this power of two. */
enum { FILLED_GROUPS = 32 };

/* What a move is worth. */
typedef struct worth {
    bool is_free; /* it costs nothing */
    double value; /* gain; gain by cost where it is not free */
} worth;

/* Makers that are spared, or dropped, together. */
typedef struct group {
    uint32_t first, n; /* of walk.makers */
    worth worth;       /* as far as known */
    uint32_t seen;     /* at this choice; KOILA_NONE: never */
    bool is_done;
    koila__choice then; /* what it led to when it was seen */
} group;

typedef struct walk {
    koila__outline *o;
    koila__direction direction;
    uint32_t *makers; /* [n_makers] that run again, those of the most work first */
    uint32_t n_makers;
    bool *is_spared; /* [makers of o] its own */
    group *groups;
    uint32_t n_groups;
    koila__path_limits limits;
    /* of choices that did not fit: what is spared is too much alone, which is told sooner; or once
     * it was not, and is not asked any more */
    enum { NOT_ASKED, IS_TOO_MUCH, ALONE_FITS } spared;
    koila__path *path;
} walk;

/* Does maker b come first? Work; of KOILA__FILLS, work by bytes. */
static bool comes_behind(const walk *w, uint32_t a, uint32_t b)
{
    const double work_a = koila__outline_maker_work(w->o, a);
    const double work_b = koila__outline_maker_work(w->o, b);
    if (w->direction != KOILA__FILLS)
        return work_a < work_b;
    return work_a * (double)koila__outline_maker_bytes(w->o, b) <
           work_b * (double)koila__outline_maker_bytes(w->o, a);
}

/* Sorts the makers, those of the most work first. A shell sort: there may be thousands. */
static void sort_makers(walk *w)
{
    for (uint32_t gap = w->n_makers / 2; gap; gap /= 2)
        for (uint32_t i = gap; i < w->n_makers; i++) {
            const uint32_t k = w->makers[i];
            uint32_t at = i;
            for (; at >= gap && comes_behind(w, w->makers[at - gap], k); at -= gap)
                w->makers[at] = w->makers[at - gap];
            w->makers[at] = k;
        }
}

static koila__choice look(walk *w)
{
    koila__outline_choose_makers(w->o);
    w->path->n_looks++;
    return (koila__choice){ koila__outline_gauge(w->o), koila__outline_work(w->o) };
}

static void move(walk *w, const group *g, bool back)
{
    for (uint32_t i = g->first; i < g->first + g->n; i++)
        w->is_spared[w->makers[i]] = back == w->path->drops;
}

static worth worth_of(koila__direction direction, koila__choice now, koila__choice then)
{
    const double bytes = then.gauge.strain - now.gauge.strain;
    const double work = now.work - then.work;
    const bool drops = direction == KOILA__DROPS;
    const double gain = drops ? -bytes : work;
    const double cost = drops ? -work : bytes;
    if (cost > 0)
        return (worth){ false, gain / cost };
    return (worth){ true, direction == KOILA__SPARES_HIGH ? -bytes : gain };
}

static bool is_better(worth a, worth b)
{
    return a.is_free != b.is_free ? a.is_free : a.value > b.value;
}

static group *best_known(walk *w)
{
    group *best = NULL;
    for (uint32_t i = 0; i < w->n_groups; i++) {
        group *g = &w->groups[i];
        if (!g->is_done && (!best || is_better(g->worth, best->worth)))
            best = g;
    }
    return best;
}

/* The best of those seen at this choice. */
static group *best_seen(walk *w)
{
    group *best = NULL;
    for (uint32_t i = 0; i < w->n_groups; i++) {
        group *g = &w->groups[i];
        if (!g->is_done && g->seen == w->path->n && (!best || is_better(g->worth, best->worth)))
            best = g;
    }
    return best;
}

static group *next_group(walk *w)
{
    const koila__choice now = w->path->at[w->path->n - 1];
    group *g = best_known(w);
    for (uint32_t n_looks = 0; g && g->seen != w->path->n; g = best_known(w)) {
        if (g->seen != KOILA_NONE && n_looks++ == MOST_LOOKS)
            return best_seen(w);
        move(w, g, false);
        g->then = look(w);
        move(w, g, true);
        g->worth = worth_of(w->direction, now, g->then);
        g->seen = w->path->n;
    }
    return g;
}

static void walk_all(walk *w)
{
    koila__path *p = w->path;
    p->at[p->n++] = look(w);
    for (group *g = next_group(w); g; g = next_group(w)) {
        g->is_done = true;
        move(w, g, false);
        for (uint32_t i = g->first; i < g->first + g->n; i++)
            p->turn[w->makers[i]] = p->n;
        p->at[p->n++] = g->then;
    }
}

/* May a choice of what is spared now fit? If that is too much alone, it is known where. */
static bool fits_now(walk *w)
{
    koila__outline_choose_makers(w->o);
    if (koila__outline_may_fit(w->o, w->limits.fills))
        return true;
    if (w->spared != ALONE_FITS)
        w->spared = koila__outline_may_spare(w->o, w->limits.fills) ? ALONE_FITS : IS_TOO_MUCH;
    return false;
}

/* May it fit with groups `from` .. `to` spared too? They stay so if it may. */
static bool spare_if_it_fits(walk *w, uint32_t from, uint32_t to)
{
    for (uint32_t i = from; i < to; i++)
        move(w, &w->groups[i], false);
    const bool fits =
        (w->spared != IS_TOO_MUCH || koila__outline_may_spare_there(w->o, w->limits.fills)) &&
        fits_now(w);
    w->path->n_looks++;
    for (uint32_t i = from; i < to && !fits; i++)
        move(w, &w->groups[i], true);
    return fits;
}

/* Is no choice of the path of use? All spare what the first one does, but those of KOILA__DROPS. */
static bool is_in_vain(const walk *w)
{
    const koila__path_limits *x = &w->limits;
    if (w->direction == KOILA__DROPS)
        return false;
    return (x->waiting < UINT64_MAX && koila__outline_waiting_at_least(w->o) > x->waiting) ||
           (x->bound < UINT64_MAX && !koila__outline_may_spare(w->o, x->bound));
}

/* Spares the first groups, as many as fit, then of the next ones those that do, fewer of them in a
 * large step, and none where not even the first one fits; the last choice is the path's only one.
 */
static void fill(walk *w)
{
    koila__path *p = w->path;
    const uint32_t n_more = 4 * KOILA_COST_MOVES / (koila__outline_n_makers(w->o) + 1);
    uint32_t fit = 0;
    for (uint32_t step = FILLED_GROUPS / 2; step; step /= 2)
        if (fit + step <= w->n_groups && spare_if_it_fits(w, fit, fit + step)) {
            fit += step;
            if (is_in_vain(w))
                return;
        }
    for (uint32_t i = fit + 1; fit && i < w->n_groups && i <= fit + n_more; i++)
        spare_if_it_fits(w, i, i + 1);
    for (uint32_t i = 0; i < w->n_makers; i++)
        if (!w->is_spared[w->makers[i]])
            p->turn[w->makers[i]] = KOILA_NONE;
    p->at[p->n++] = look(w);
}

static void make_groups(walk *w, uint32_t n_groups)
{
    const uint32_t size = (w->n_makers + n_groups - 1) / n_groups;
    for (uint32_t i = 0; i < w->n_makers; i += size) {
        const uint32_t left = w->n_makers - i;
        w->groups[w->n_groups++] = (group){ .first = i,
                                            .n = left < size ? left : size,
                                            .worth = { true, INFINITY },
                                            .seen = KOILA_NONE };
    }
}

static uint32_t most_groups(uint32_t n_makers)
{
    const uint32_t n = KOILA_COST_MOVES / (n_makers + 1);
    if (n < KOILA__PATH_GROUPS / 8)
        return KOILA__PATH_GROUPS / 8;
    return n < KOILA__PATH_GROUPS ? n : KOILA__PATH_GROUPS;
}

koila_status koila__path_make(koila__outline *o, koila__direction direction,
                              koila__path_limits limits, koila__arena *arena, koila__path *path)
{
    const uint32_t n = koila__outline_n_makers(o);
    const uint32_t n_groups = direction == KOILA__FILLS ? FILLED_GROUPS - 1 : most_groups(n);
    walk w = { .o = o,
               .direction = direction,
               .is_spared = koila__outline_spared(o),
               .limits = limits,
               .path = path };
    *path = (koila__path){ .drops = direction == KOILA__DROPS };
    path->turn = koila__arena_array(arena, n + 1, sizeof *path->turn);
    path->at = koila__arena_array(arena, n_groups + 1, sizeof *path->at);
    w.makers = koila__arena_array(arena, n + 1, sizeof *w.makers);
    w.groups = koila__arena_array(arena, n_groups, sizeof *w.groups);
    if (!path->turn || !path->at || !w.makers || !w.groups)
        return KOILA_NO_MEMORY;
    for (uint32_t k = 0; k < n; k++) {
        const bool is_again = koila__outline_is_again(o, k);
        w.is_spared[k] = path->drops || !is_again;
        path->turn[k] = path->drops ? KOILA_NONE : 0;
        if (is_again)
            w.makers[w.n_makers++] = k;
    }
    if (is_in_vain(&w))
        return KOILA_OK;
    sort_makers(&w);
    make_groups(&w, n_groups);
    if (direction == KOILA__FILLS)
        fill(&w);
    else
        walk_all(&w);
    return KOILA_OK;
}

bool koila__path_choose(koila__outline *o, const koila__path *path, uint32_t i)
{
    bool *is_spared = koila__outline_spared(o);
    for (uint32_t k = 0; k < koila__outline_n_makers(o); k++)
        is_spared[k] = (path->turn[k] <= i) != path->drops;
    return koila__outline_choose_makers(o);
}
