/* outline_bound.c — what a choice of dropped storages needs at least.
 *
 * The bound is one walk over the nodes, in the order in which recompute.c writes them: each storage
 * counts from its maker to its last reader. It never exceeds the peak of the schedule:
 *   - of a step in one loop, or in none, all nodes run in that order. In several loops, only what
 *     the last one surely runs is counted: nodes behind all barriers. What such a node reads is
 *     there from its maker on, for that runs in the loop too, or its pieces were kept;
 *   - a result of a write counts from the node after it, for it may take over its base's storage;
 *     a sum the same where a term ends, for it may be written over that;
 *   - a view alone does not hold its storage: it may be made earlier than it was recorded;
 *   - sums and collected values, those of earlier loops too, count from the second slice on, and so
 *     do whole values that the backward pass reads there.
 *
 * All choices of a kind are told together by what is there in each of them: whatever is dropped,
 * for the floor; whatever is dropped beside makers that are spared (held_at_least()). */
#include "engine/outline_state.h"

#include "engine/live.h"
#include "engine/plan_costs.h"

/* ---- which nodes are counted */

/* The loop behind all barriers holds the nodes of the highest level. */
static koila_status find_sure(koila__outline *o)
{
    uint32_t *level = koila__arena_array(&o->arena, o->n_nodes + 1, sizeof *level);
    uint32_t top = 0;
    uint16_t axis = 0;
    TRY_ALLOC(level);
    for (koila_node n = 0; n < o->n_nodes; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t i = 0; i < s->n_inputs && o->is_needed[n]; i++) {
            const koila_node m = producer(o, input_of(o, n, i));
            if (m == KOILA_NONE || !koila__reads(s, i))
                continue;
            const uint32_t from =
                level[m] + (o->p->node[m].in_loop && !koila__outline_is_local(o, n, i));
            level[n] = from > level[n] ? from : level[n];
        }
        if (!o->is_needed[n] || !o->p->node[n].in_loop || level[n] < top)
            continue;
        if (level[n] > top || o->p->node[n].axis > axis)
            axis = o->p->node[n].axis;
        top = level[n];
    }
    o->last_axis = axis;
    for (koila_node n = 0; n < o->n_nodes; n++)
        o->is_sure[n] = o->is_needed[n] &&
                        (o->is_whole ||
                         (o->p->node[n].in_loop && level[n] == top && o->p->node[n].axis == axis));
    return KOILA_OK;
}

static koila_status find_workspace(koila__outline *o)
{
    if (!o->options.workspace)
        return KOILA_OK;
    o->workspace = koila__arena_array(&o->arena, o->n_nodes + 1, sizeof *o->workspace);
    TRY_ALLOC(o->workspace);
    for (koila_node n = 0; n < o->n_nodes; n++) {
        const uint16_t axis = o->p->node[n].axis;
        if (o->is_sure[n] && !koila__outline_is_view(o, n)) /* views may run earlier */
            o->workspace[n] = o->options.workspace(o->options.user, o->g->nodes.at[n].sig,
                                                   o->is_whole ? 0 : o->options.rows[axis],
                                                   o->is_whole ? 0 : o->g->axes.at[axis]);
    }
    return KOILA_OK;
}

koila_status koila__outline_find_counted(koila__outline *o)
{
    MAKE(is_sure, o->n_nodes + 1);
    MAKE(sum_bytes, o->n_nodes + 1);
    KOILA_TRY(find_sure(o));
    for (koila_node n = 0; n < o->n_nodes; n++)
        if (koila__adds_two(o->g->table, sig_of(o, n)))
            o->sum_bytes[n] = koila__outline_bytes(o, n, 0);
    return find_workspace(o);
}

/* ---- what is counted, whatever is dropped */

/* Has the loop that is counted another slice after its first? */
static bool has_second_slice(const koila__outline *o)
{
    return !o->is_whole && o->g->axes.n &&
           2 * o->options.rows[o->last_axis] <= o->g->axes.at[o->last_axis];
}

/* Finds the storages that the loop that is counted reads: the walk may count those of earlier
 * loops too. */
static koila_status find_walked(koila__outline *o)
{
    MAKE(is_walked, o->g->values.n + 1);
    for (koila_node n = 0; n < o->n_nodes && !o->is_whole; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t i = 0; i < s->n_inputs && o->is_sure[n]; i++)
            o->is_walked[o->root[input_of(o, n, i)]] = true;
    }
    return KOILA_OK;
}

/* Of n_bytes that are there, those that the walk does not count as storage `root`: a loop's own
 * results are there besides. */
static uint64_t beyond_walk(const koila__outline *o, koila_value root, uint64_t n_bytes)
{
    const koila_node n = producer(o, root);
    if (n == KOILA_NONE || o->is_sure[n] || !o->is_walked[root])
        return n_bytes;
    const uint64_t walked = koila__outline_bytes(o, n, root - output_of(o, n, 0));
    return n_bytes > walked ? n_bytes - walked : 0;
}

/* The results of the step, and those that the loop that is counted leaves. *seen[values]: all false
 * before; then those results. */
static void count_results(koila__outline *o, const koila_value *targets, uint32_t n_targets,
                          bool *seen)
{
    for (uint32_t i = 0; i < n_targets; i++) {
        const koila_value v = targets[i];
        const koila_value root = o->root[v];
        const koila_node n = producer(o, v);
        if (n == KOILA_NONE || o->g->values.at[v].meta == KOILA_NONE || seen[root])
            continue;
        seen[root] = true;
        o->results += koila__adds_on(o->p, v) ? 0 : koila__value_meta(o->g, v)->n_bytes;
        if (has_second_slice(o) && o->p->node[n].in_loop && !koila__adds_on(o->p, v))
            o->collected += beyond_walk(o, root, koila__value_meta(o->g, v)->n_bytes);
    }
}

/* Bytes of v, which the loop that is counted reads, but does not make. 0: not known. */
static uint64_t whole_bytes_of(const koila__outline *o, koila_value v)
{
    const koila_value root = o->root[v];
    const koila_node n = producer(o, v);
    if (n == KOILA_NONE || o->g->values.at[v].meta == KOILA_NONE)
        return 0;
    if (o->p->node[n].in_loop) /* collected */
        return koila__value_meta(o->g, v)->n_bytes;
    if (producer(o, root) == KOILA_NONE || o->p->node[producer(o, root)].in_loop ||
        o->is_part[root])
        return 0;
    return storage_bytes(o, root);
}

/* What the loop that is counted needs whole is there in all of its slices. Of the forward pass it
 * may be something else that needs it. *seen[values]: of hold_targets(). */
static void hold_whole(koila__outline *o, bool *seen)
{
    for (koila_node n = o->at + 1; n < o->n_nodes && has_second_slice(o); n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t i = 0; i < s->n_inputs && o->is_sure[n]; i++) {
            const koila_value v = input_of(o, n, i);
            if (!koila__reads(s, i) || seen[o->root[v]] || koila__outline_is_local(o, n, i))
                continue;
            seen[o->root[v]] = true;
            o->collected += beyond_walk(o, o->root[v], whole_bytes_of(o, v));
        }
    }
}

/* Counts what the backward pass makes: the same, whatever is dropped. is_result[values as root]. */
static koila_status count_backward(koila__outline *o, const bool *is_result)
{
    koila_node *last = koila__arena_array(&o->arena, o->g->values.n + 1, sizeof *last);
    TRY_ALLOC(last);
    for (koila_node n = o->at + 1; n < o->n_nodes; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t i = 0; i < s->n_inputs && o->is_sure[n] && !koila__outline_is_view(o, n); i++)
            if (koila__reads(s, i))
                last[o->root[input_of(o, n, i)]] = n;
    }
    for (koila_node n = o->at + 1; n < o->n_nodes; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t j = 0; j < s->n_outputs; j++) {
            const koila_value v = output_of(o, n, j);
            const koila_node begin = n + (j >= s->n_fresh);
            const bool to_end = o->is_whole && is_result[v];
            const uint64_t n_bytes = koila__outline_bytes(o, n, j);
            if (o->root[v] != v || !n_bytes || (!last[v] && !to_end && !o->is_sure[n]))
                continue;
            if (last[v] < begin && begin > n)
                continue;
            o->moments0[begin].rise += n_bytes;
            if (!to_end)
                o->moments0[last[v] > n ? last[v] : n].fall += n_bytes;
        }
    }
    return KOILA_OK;
}

/* Finds the storages of the forward pass that are some bytes. */
static void find_counted_stores(koila__outline *o)
{
    for (uint32_t k = 0; k < o->makers.n; k++) {
        const maker *m = &o->makers.at[k];
        for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++) {
            const store *x = &o->stores.at[s];
            o->maker_of[s] = k;
            if (!x->n_bytes)
                continue;
            const bool is_back = x->last_back != KOILA_NONE && x->last_back >= x->first_back;
            o->counted[o->n_counted++] = (counted){ .n_bytes = x->n_bytes,
                                                    .store = s,
                                                    .maker = k,
                                                    .own_end = x->is_sure ? key_of(x->made) : 0,
                                                    .begin = x->made + x->is_write,
                                                    .first_back = x->first_back,
                                                    .end_back = is_back ? x->last_back + 1 : 0,
                                                    .to_end = o->is_whole && x->is_result };
        }
    }
}

/* What is held at least, whatever is chosen among what is not spared; if that exceeds the limit,
 * some number above that, and *where: the node where it does. stays[makers]: they are spared; NULL:
 * none is. A storage of the forward pass is there from the first node of the backward pass that
 * reads it to the last one that surely does: it stayed, was made again for the first one, or came
 * back for it. Where its maker is spared it stays, so it is there since it was made. */
static uint64_t held_at_least(koila__outline *o, const bool *stays, uint64_t limit,
                              koila_node *where)
{
    memcpy(o->moments, o->moments0, ((size_t)o->n_nodes + 1) * sizeof *o->moments);
    for (const counted *x = o->counted; x < o->counted + o->n_counted; x++) {
        if (!x->end_back)
            continue;
        o->moments[stays && stays[x->maker] ? x->begin : x->first_back].rise += x->n_bytes;
        o->moments[x->end_back - 1].fall += x->n_bytes;
    }
    uint64_t now = o->collected, peak = now;
    for (koila_node n = 0; n < o->n_nodes && peak <= limit; n++) {
        const uint64_t inside = o->workspace && n > o->at ? o->workspace[n] : 0;
        now += o->moments[n].rise;
        if (now + inside > peak + o->sum_bytes[n]) /* a term of that size may end */
            peak = now + inside - o->sum_bytes[n];
        now -= o->moments[n].fall & BYTES_OF_FALL;
        *where = n;
    }
    return peak;
}

koila_status koila__outline_count_fixed(koila__outline *o, const koila_value *targets,
                                        uint32_t n_targets)
{
    const uint32_t N = o->n_nodes + 1;
    const uint32_t S = o->stores.n + 1;
    const uint32_t M = o->makers.n + 1;
    bool *is_result = koila__arena_array(&o->arena, o->g->values.n + 1, sizeof *is_result);
    TRY_ALLOC(is_result);
    MAKE(moments0, N);
    MAKE_ROOM(moments, N);
    MAKE_ROOM(maker_of, S);
    MAKE_ROOM(counted, S);
    MAKE_ROOM(head, N);
    MAKE_ROOM(end, S);
    MAKE_ROOM(end0, S);
    MAKE_ROOM(rise_again, M);
    MAKE_ROOM(fall_again, M);
    MAKE_ROOM(next, M);
    for (uint32_t s = 0; s < o->stores.n; s++) {
        const koila_node last = o->stores.at[s].last_back;
        o->end0[s] = last == KOILA_NONE ? 0 : key_of(last);
    }
    for (koila_node n = 0; n < o->n_nodes && o->workspace; n++)
        o->moments0[n].fall |= o->workspace[n] ? USES_INSIDE : 0;
    find_counted_stores(o);
    KOILA_TRY(find_walked(o));
    count_results(o, targets, n_targets, is_result);
    KOILA_TRY(count_backward(o, is_result));
    hold_whole(o, is_result);
    koila_node where;
    o->floor = held_at_least(o, NULL, UINT64_MAX, &where);
    return KOILA_OK;
}

/* ---- of a choice */

/* Does maker k run again in the loop that is counted? What runs whole does so before that. */
static bool is_counted(const koila__outline *o, uint32_t k)
{
    return o->is_one && o->makers.at[k].sure != KOILA_NONE;
}

/* What maker k, which runs again, reads ends not before that. */
static void hold_inputs(koila__outline *o, uint32_t k)
{
    const maker *m = &o->makers.at[k];
    const uint64_t key = (uint64_t)o->needs[k] << 32 | k;
    for (uint32_t e = m->first_edge; e < m->first_edge + m->n_edges; e++)
        if (o->end[o->edges.at[e].store] < key)
            o->end[o->edges.at[e].store] = key;
}

static void end_at(koila__outline *o, uint64_t key, uint64_t n_bytes)
{
    if ((uint32_t)key == UINT32_MAX)
        o->moments[key >> 32].fall += n_bytes;
    else
        o->fall_again[(uint32_t)key] += n_bytes;
}

/* Counts a storage as it was made first. */
static void count_first(koila__outline *o, const counted *x)
{
    const koila_node last = o->last[x->store];
    const uint64_t end_back = o->end[x->store];
    uint64_t end = o->is_first[x->maker] ? x->own_end : 0;
    if (last != KOILA_NONE)
        end = key_of(last);
    if (o->fate[x->store] == KOILA__STAYS && end_back > end)
        end = end_back;
    if (end < key_of(x->begin) && !x->to_end)
        return;
    o->moments[x->begin].rise += x->n_bytes;
    if (!x->to_end)
        end_at(o, end, x->n_bytes);
}

/* Counts a storage as it is made again, or comes back from host memory. */
static void count_second(koila__outline *o, const counted *x)
{
    const uint32_t s = x->store, k = x->maker;
    if (o->fate[s] == KOILA__WAITS) {
        if (o->end[s] < key_of(o->need[s]))
            return;
        o->moments[o->need[s]].rise += x->n_bytes;
        end_at(o, o->end[s], x->n_bytes);
        return;
    }
    if (!o->is_again[k] || (!is_counted(o, k) && !o->end[s]))
        return;
    const uint64_t own = (uint64_t)o->needs[k] << 32 | k;
    o->rise_again[k] += x->n_bytes;
    end_at(o, o->fate[s] == KOILA__AGAIN && o->end[s] > own ? o->end[s] : own, x->n_bytes);
}

static void count_all(koila__outline *o)
{
    memcpy(o->moments, o->moments0, ((size_t)o->n_nodes + 1) * sizeof *o->moments);
    memcpy(o->end, o->end0, o->stores.n * sizeof *o->end);
    for (uint32_t i = 0; i < o->n_again; i++) {
        const uint32_t k = o->again[i];
        moment *before = &o->moments[o->needs[k]];
        o->rise_again[k] = o->fall_again[k] = 0;
        o->next[k] = before->fall & RUNS_BEFORE ? o->head[o->needs[k]] : 0;
        o->head[o->needs[k]] = k + 1;
        before->fall |= RUNS_BEFORE;
        if (is_counted(o, k))
            hold_inputs(o, k);
    }
    for (const counted *x = o->counted; x < o->counted + o->n_counted; x++) {
        count_first(o, x);
        if (o->is_again[x->maker] || o->fate[x->store] == KOILA__WAITS)
            count_second(o, x);
    }
}

/* ---- moment by moment */

/* The 16th power of what is held, of the most: of two moments, one with 5 % more bytes counts as
 * two of the other. */
static double strain_of(double share)
{
    share *= share;
    share *= share;
    share *= share;
    return share * share;
}

/* What is held, moment by moment. */
typedef struct moments {
    uint64_t now, peak, limit;
    double scale, strain; /* scale: 0: no strain is asked for */
    koila_node end;       /* behind the last node that was looked at */
} moments;

/* So much is held, with what the node uses inside. */
static void see(moments *m, uint64_t held)
{
    if (held > m->peak)
        m->peak = held;
    if (m->scale > 0)
        m->strain += strain_of((double)(int64_t)held * m->scale);
}

/* What is held while node n runs, or its storages are only there. */
static uint64_t held_at(const koila__outline *o, koila_node n, uint64_t now, uint64_t rise,
                        uint64_t fall)
{
    const uint64_t over = o->sum_bytes[n];
    return rise >= over && fall >= over ? now - over : now; /* a term of that size ends */
}

/* What runs again before node n. */
static void see_again(const koila__outline *o, koila_node n, moments *m)
{
    for (uint32_t k = o->head[n]; k; k = o->next[k - 1]) {
        const koila_node made = o->makers.at[k - 1].node;
        const uint64_t rise = o->rise_again[k - 1], fall = o->fall_again[k - 1];
        const uint64_t inside = o->workspace ? o->workspace[made] : 0;
        if (sig_of(o, made)->n_writes) { /* where its base was, which may end there */
            see(m, m->now + inside);
            m->now += rise - fall;
            see(m, m->now);
            continue;
        }
        m->now += rise;
        see(m, held_at(o, made, m->now, rise, fall) + inside);
        m->now -= fall;
    }
}

/* Does node n run where it was recorded? *k: a maker that comes no later; is advanced. */
static bool runs_there(const koila__outline *o, koila_node n, uint32_t *k)
{
    while (*k < o->makers.n && o->makers.at[*k].node < n)
        ++*k;
    if (*k < o->makers.n && o->makers.at[*k].node == n)
        return o->is_first[*k];
    return n > o->at;
}

/* Walks over all moments, up to the first that holds more than the limit. Where nothing begins or
 * ends, no more is held than before, unless the node uses memory inside. */
static moments walk(koila__outline *o, moments m)
{
    const moment *const at = o->moments;
    uint32_t next = 0;
    double between = -1; /* the strain of what is held behind a node; below 0: not known */
    count_all(o);
    m.now = m.peak = o->collected;
    koila_node n = 0;
    for (; n < o->n_nodes && m.peak <= m.limit; n++) {
        const uint64_t rise = at[n].rise, fall = at[n].fall & BYTES_OF_FALL;
        if (!(rise | at[n].fall)) {
            if (m.scale > 0 && between < 0)
                between = strain_of((double)(int64_t)m.now * m.scale);
            m.strain += m.scale > 0 ? between : 0;
            continue;
        }
        if (at[n].fall & RUNS_BEFORE)
            see_again(o, n, &m);
        m.now += rise;
        const bool uses = at[n].fall & USES_INSIDE && runs_there(o, n, &next);
        see(&m, held_at(o, n, m.now, rise, fall) + (uses ? o->workspace[n] : 0));
        koila_assert(m.now >= fall);
        m.now -= fall;
        between = -1;
    }
    m.end = n;
    return m;
}

uint64_t koila__outline_bound(koila__outline *o)
{
    return walk(o, (moments){ .limit = UINT64_MAX }).peak;
}

uint64_t koila__outline_floor(const koila__outline *o) { return o->floor; }

/* Is the storage there while node n runs, as far as that is known before all is counted? */
static bool is_there(const koila__outline *o, const counted *x, koila_node n)
{
    const uint8_t fate = o->fate[x->store];
    const koila_node last = o->last[x->store];
    if (fate == KOILA__AGAIN && n > o->at)
        return o->needs[x->maker] <= n && o->end0[x->store] >= key_of(n);
    if (x->begin > n)
        return false;
    if (last != KOILA_NONE && last >= n)
        return true;
    return fate == KOILA__STAYS &&
           (o->end0[x->store] >= key_of(n) || (n <= o->at && o->is_whole && o->is_start[x->store]));
}

/* Node n is where too much is held. */
static void note_too_much(koila__outline *o, koila_node n)
{
    if (o->too_much == n)
        return;
    o->too_much = n;
    o->held_there = o->collected + o->moments0[n].rise;
    for (koila_node k = o->at; k < n; k++)
        o->held_there += o->moments0[k].rise - (o->moments0[k].fall & BYTES_OF_FALL);
}

/* Is more than n_bytes held where it was too much? That is found sooner than all moments. */
static bool is_too_much_there(const koila__outline *o, uint64_t n_bytes)
{
    const koila_node n = o->too_much;
    uint64_t held = o->held_there;
    if (n == KOILA_NONE)
        return false;
    for (const counted *x = o->counted; x < o->counted + o->n_counted; x++)
        held += is_there(o, x, n) ? x->n_bytes : 0;
    held -= held < o->sum_bytes[n] ? held : o->sum_bytes[n]; /* a term of that size may end */
    return held > n_bytes;
}

/* Is the storage there while node n runs, whatever is chosen among what is not spared? As in
 * held_at_least(). */
static bool is_there_at_least(const koila__outline *o, const counted *x, koila_node n)
{
    return n < x->end_back && n >= (o->is_spared[x->maker] ? x->begin : x->first_back);
}

bool koila__outline_may_spare_there(const koila__outline *o, uint64_t n_bytes)
{
    const koila_node n = o->too_much;
    uint64_t held = o->held_there;
    koila_assert(!o->uses_host); /* what is spared may wait there */
    if (n == KOILA_NONE)
        return true;
    for (const counted *x = o->counted; x < o->counted + o->n_counted; x++)
        held += is_there_at_least(o, x, n) ? x->n_bytes : 0;
    held -= held < o->sum_bytes[n] ? held : o->sum_bytes[n]; /* a term of that size may end */
    return held <= n_bytes;
}

bool koila__outline_may_spare(koila__outline *o, uint64_t n_bytes)
{
    koila_node where = KOILA_NONE;
    koila_assert(!o->uses_host);
    if (held_at_least(o, o->is_spared, n_bytes, &where) <= n_bytes)
        return true;
    if (where != KOILA_NONE)
        note_too_much(o, where);
    return false;
}

uint64_t koila__outline_bound_up_to(koila__outline *o, uint64_t limit)
{
    const bool is_known = is_too_much_there(o, limit);
    koila_assert(!is_known || koila__outline_bound(o) > limit);
    if (is_known)
        return limit + 1;
    const moments m = walk(o, (moments){ .limit = limit });
    if (m.peak > limit)
        note_too_much(o, m.end - 1);
    return m.peak;
}

bool koila__outline_may_fit(koila__outline *o, uint64_t n_bytes)
{
    return koila__outline_bound_up_to(o, n_bytes) <= n_bytes;
}

bool koila__outline_is_hopeless(const koila__outline *o, uint64_t bound, uint64_t budget)
{
    if (bound <= budget)
        return false;
    return budget <= o->results || (bound - o->results) / KOILA_COST_HOPELESS > budget - o->results;
}

koila__gauge koila__outline_gauge(koila__outline *o)
{
    const double scale = o->most ? 1 / (double)o->most : 0;
    const moments m = walk(o, (moments){ .limit = UINT64_MAX, .scale = scale });
    return (koila__gauge){ m.peak, m.strain };
}
