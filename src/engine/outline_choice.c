/* outline_choice.c — what becomes of each storage of the forward pass.
 *
 * What runs again is decided backwards from `at`. A dropped storage is wanted, so its maker runs
 * again, so what that reads is wanted too, or stays: leaves, what another segment made, and what
 * must not run twice (modules that run as they are, partial sums, numbers that are drawn for a
 * tensor of probabilities). Storages stay or go, not values: a view of what stays costs nothing.
 *
 * This is checkpointing by segments (Chen et al. 2016) of a recorded graph: operators, not modules,
 * and the segments end where the fewest bytes cross. */
#include "engine/outline_state.h"

#include "engine/cost.h"
#include "engine/plan_costs.h"

/* ---- segments */

/* Finds what is held: sums up to each node. crossing[n]: bytes made up to n that later nodes of the
 * forward pass read. */
static koila_status weigh(koila__outline *o)
{
    const koila_node end = o->at + 1;
    uint64_t now = 0;
    uint64_t *ending = koila__arena_array(&o->arena, end, sizeof *ending);
    TRY_ALLOC(ending);
    for (uint32_t k = 0; k < o->makers.n; k++) {
        const maker *m = &o->makers.at[k];
        for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++) {
            const koila_value v = o->stores.at[s].value;
            const uint64_t n_bytes = storage_bytes(o, v);
            o->held[m->node] += o->stores.at[s].is_held ? n_bytes : 0;
            if (o->last_use[v] > m->node) {
                o->crossing[m->node] += n_bytes;
                ending[o->last_use[v]] += n_bytes;
            }
        }
    }
    for (koila_node n = 0; n < end; n++) {
        now += o->crossing[n] - ending[n];
        o->crossing[n] = now;
        o->held[n] += n ? o->held[n - 1] : 0;
    }
    o->all_held = o->held[end - 1];
    for (koila_node n = 0; n < end && o->all_held; n++)
        o->share[n] = (double)o->held[n] / (double)o->all_held;
    return KOILA_OK;
}

/* What is held up to node k, of what segment `number` of so many holds, beyond those before it. */
static double share_of(const koila__outline *o, koila_node k, uint32_t n_segments, uint32_t number)
{
    return o->share[k] * (double)n_segments - number;
}

/* Ends each segment near its share of the held bytes, where the fewest bytes cross. */
static void find_segments(koila__outline *o, uint32_t n_segments)
{
    const koila_node end = o->at + 1;
    uint32_t number = 0;
    o->last_segment = KOILA_NONE;
    if (!n_segments) {
        memset(o->segment, 0, end * sizeof *o->segment);
        return;
    }
    for (koila_node n = 0; n < end && o->all_held; number++) {
        koila_node best = KOILA_NONE;
        koila_node k = n;
        while (k < end && share_of(o, k, n_segments, number) < 0.75) /* it never falls */
            k++;
        for (; k < end; k++) {
            if (best != KOILA_NONE && share_of(o, k, n_segments, number) > 1.25)
                break;
            if (best == KOILA_NONE || o->crossing[k] <= o->crossing[best])
                best = k;
        }
        if (best == KOILA_NONE || number + 1 >= n_segments)
            best = end - 1;
        for (; n <= best; n++)
            o->segment[n] = number;
    }
    o->last_segment = number ? number - 1 : 0;
}

static void cut(koila__outline *o, uint32_t n_segments)
{
    if (o->n_segments == n_segments)
        return;
    o->n_segments = n_segments;
    find_segments(o, n_segments);
    for (uint32_t i = 0; i < o->n_viewed; i++) { /* by another segment? */
        const store *x = &o->stores.at[o->viewed[i]];
        const bool stays = o->segment[x->last_view] != o->segment[x->made];
        o->ask0[o->viewed[i]] =
            (uint8_t)((x->first_back != KOILA_NONE ? WANTED : 0) | (stays ? STAYS : 0));
    }
}

/* ---- what runs again, and what waits in host memory */

static bool can_run_again(const koila__outline *o, uint32_t k, const koila__recompute *how)
{
    const maker *m = &o->makers.at[k];
    return m->may_repeat && !o->is_spared[k] && o->segment[m->node] != o->last_segment &&
           !(how->keeps_expensive && m->is_expensive);
}

/* Host memory that torch takes for a copy: its pinned blocks are powers of two. */
static uint64_t host_bytes(uint64_t n_bytes)
{
    uint64_t n = 1;
    while (n < n_bytes && n <= UINT64_MAX / 2)
        n *= 2;
    return n;
}

/* A storage that the forward pass makes and never writes again, all in one form. */
static bool could_wait(const koila__outline *o, const store *x, const koila__host *host)
{
    const koila_placement p = o->p->value[x->value];
    if (!x->is_held || x->is_fixed || o->g->values.at[x->value].meta == KOILA_NONE)
        return false;
    const koila_meta_info *m = koila__value_meta(o->g, x->value);
    return m->device == host->device && koila_meta_is_dense(m) &&
           m->n_bytes > o->all_held / KOILA_COST_FEWEST_OFFLOADED &&
           (p.kind == KOILA_R || (p.kind == KOILA_S && p.outer > 0));
}

/* Finds what may wait: the first made come first, for they wait longest. It does where moving it is
 * less work than making it again, and then a view by another segment does not hold it. */
static void find_waiting(koila__outline *o, const koila__recompute *how)
{
    const double share = (double)how->n_offloaded / KOILA__OFFLOAD_PARTS;
    const double most = share * (double)o->all_held;
    uint64_t in_host = 0;
    for (uint32_t k = 0; k < o->makers.n && how->n_offloaded; k++) {
        const maker *m = &o->makers.at[k];
        if ((double)o->held[m->node] > most)
            return;
        for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++) {
            const store *x = &o->stores.at[s];
            const double once =
                koila__offload_work((double)storage_bytes(o, x->value), how->host.price);
            if (!could_wait(o, x, &how->host) || (can_run_again(o, k, how) && 2 * once >= m->work))
                continue;
            const uint64_t n_bytes = host_bytes(storage_bytes(o, x->value));
            if (n_bytes > how->host.n_bytes - in_host)
                return;
            in_host += n_bytes;
            o->may_wait[s] = !x->is_written;
            o->ask[s] &= x->is_written ? WANTED | STAYS : WANTED;
        }
    }
}

/* ---- the choice */

/* Bytes of storage s where it waits for its last reader. Between loops it waits in all rows, unless
 * a loop makes it again: not where a call that runs again begins with it. */
static uint64_t waiting_bytes(const koila__outline *o, uint32_t s, bool is_start)
{
    const koila_value v = o->stores.at[s].value;
    const koila_placement p = o->p->value[v];
    if (o->g->values.at[v].meta == KOILA_NONE)
        return 0;
    const uint64_t n_bytes = koila__value_meta(o->g, v)->n_bytes;
    if (p.kind != KOILA_S)
        return n_bytes;
    if (o->options.n_loops > KOILA__FEW_LOOPS)
        return is_start || o->makers.at[o->maker_of[s]].is_expensive ? n_bytes : 0;
    return n_bytes / (uint64_t)o->g->axes.at[p.axis] * (uint64_t)o->options.rows[p.axis];
}

/* Inline, as all that a choice does to each maker: paths look at hundreds of choices.
 *
 * Maker k runs again, for node `need`: what it reads is wanted, or stays. */
static inline void want_inputs(koila__outline *o, uint32_t k, koila_node need)
{
    const maker *m = &o->makers.at[k];
    const edge *const end = o->edges.at + m->first_edge + m->n_edges;
    const uint32_t segment = o->segment[m->node];
    o->needs[k] = need;
    for (const edge *x = o->edges.at + m->first_edge; x < end; x++) {
        o->is_late[x->store] = o->is_start[x->store] = true;
        if (!x->takes || !(o->segment[x->made] == segment || o->may_wait[x->store])) {
            o->ask[x->store] |= STAYS;
            continue;
        }
        o->ask[x->store] |= WANTED;
        if (need < o->need[x->store])
            o->need[x->store] = need;
    }
}

/* Do results of maker k wait in host memory? Then they do. */
static bool let_wait(koila__outline *o, uint32_t k, const koila__recompute *how)
{
    const maker *m = &o->makers.at[k];
    bool any = false;
    for (uint32_t s = m->first_store; s < m->first_store + m->n_stores; s++) {
        if (o->ask[s] != WANTED || !o->may_wait[s])
            continue;
        any = true;
        o->fate[s] = KOILA__WAITS;
        o->is_read[s] = true;
        o->chosen_work += 2 * koila__offload_work((double)storage_bytes(o, o->stores.at[s].value),
                                                  how->host.price);
    }
    o->any |= any;
    return any;
}

/* Decides about maker k, of which something is wanted. */
static inline void decide(koila__outline *o, uint32_t k, const koila__recompute *how)
{
    const maker *m = &o->makers.at[k];
    koila_node need = KOILA_NONE;
    if ((how->n_offloaded && let_wait(o, k, how)) || !can_run_again(o, k, how))
        return;
    for (uint32_t s = m->first_store, end = s + m->n_stores; s < end; s++) {
        if (o->ask[s] != WANTED)
            continue;
        o->fate[s] = KOILA__AGAIN;
        o->is_read[s] = false;
        need = o->need[s] < need ? o->need[s] : need;
    }
    o->any = true;
    o->is_again[k] = true;
    o->again[o->n_again++] = k;
    o->chosen_work += m->work;
    want_inputs(o, k, need);
}

/* What runs again reads what stays. A call whose results only later calls of the forward pass would
 * need, and these run again, does not run there. */
static void find_first(koila__outline *o)
{
    bool *const is_read = o->is_read;
    koila_node *const last = o->last;
    memset(last, 0xff, o->stores.n * sizeof *last); /* KOILA_NONE */
    for (uint32_t k = o->makers.n; k-- > 0;) {
        const maker *m = &o->makers.at[k];
        const edge *const end = o->edges.at + m->first_edge + m->n_edges;
        uint32_t s = m->first_store;
        const uint32_t last_store = s + m->n_stores - 1; /* most make one */
        while (s < last_store && !is_read[s])
            s++;
        const bool is_first = is_read[s];
        o->is_first[k] = is_first;
        if (!is_first) {
            o->chosen_work -= m->needed_work;
            for (const edge *x = o->edges.at + m->first_edge; x < end && o->is_again[k]; x++)
                is_read[x->store] |= o->fate[x->store] == KOILA__STAYS;
            continue;
        }
        for (const edge *x = o->edges.at + m->first_edge; x < end; x++) {
            is_read[x->store] = true;
            if (last[x->store] == KOILA_NONE)
                last[x->store] = m->sure;
        }
    }
}

/* Decides about the maker of store s, where that is wanted. Returns the first of its stores. */
static inline uint32_t decide_of(koila__outline *o, uint32_t s, const koila__recompute *how)
{
    if (o->ask[s] != WANTED)
        return s;
    decide(o, o->maker_of[s], how);
    return o->makers.at[o->maker_of[s]].first_store;
}

static inline void decide_all(koila__outline *o, const koila__recompute *how)
{
    for (uint32_t s = o->stores.n; s-- > 0;)
        s = decide_of(o, s, how);
}

/* The same, up to where more than so many bytes wait. False: they do. */
static bool decide_within(koila__outline *o, const koila__recompute *how, uint64_t most_waiting)
{
    uint64_t waiting = 0;
    for (uint32_t s = o->stores.n; s-- > 0;) {
        const uint32_t next = decide_of(o, s, how);
        if (o->fate[s] == KOILA__STAYS && o->is_late[s])
            waiting += waiting_bytes(o, s, o->is_start[s]);
        if (waiting > most_waiting)
            return false;
        s = next;
    }
    return true;
}

/* As `how` says, but for what is spared. False: nothing is dropped, or more than so many bytes
 * wait. */
static bool choose(koila__outline *o, const koila__recompute *how, uint64_t most_waiting)
{
    const uint32_t S = o->stores.n;
    cut(o, how->n_segments);
    memset(o->fate, KOILA__STAYS, S * sizeof *o->fate);
    memcpy(o->is_late, o->is_late0, S * sizeof *o->is_late);
    memset(o->is_start, 0, S * sizeof *o->is_start);
    koila_assert(o->uses_host || !how->n_offloaded);
    if (o->uses_host)
        memset(o->may_wait, 0, S * sizeof *o->may_wait);
    memset(o->is_again, 0, o->makers.n * sizeof *o->is_again);
    memcpy(o->ask, o->ask0, S * sizeof *o->ask);
    memcpy(o->need, o->need0, S * sizeof *o->need);
    memcpy(o->is_read, o->is_read0, S * sizeof *o->is_read);
    find_waiting(o, how);
    o->chosen_work = o->work;
    o->any = false;
    o->n_again = 0;
    if (most_waiting == UINT64_MAX)
        decide_all(o, how);
    else if (!decide_within(o, how, most_waiting))
        return false;
    find_first(o);
    return o->any;
}

bool koila__outline_choose_within(koila__outline *o, const koila__recompute *how,
                                  uint64_t most_waiting)
{
    memset(o->is_spared, 0, o->makers.n * sizeof *o->is_spared);
    return choose(o, how, most_waiting);
}

bool koila__outline_choose(koila__outline *o, const koila__recompute *how)
{
    return koila__outline_choose_within(o, how, UINT64_MAX);
}

bool koila__outline_choose_makers(koila__outline *o)
{
    return choose(o, &(koila__recompute){ .at = o->at }, UINT64_MAX);
}

bool *koila__outline_spared(koila__outline *o) { return o->is_spared; }

bool koila__outline_is_again(const koila__outline *o, uint32_t k) { return o->is_again[k]; }

uint64_t koila__outline_waiting(const koila__outline *o)
{
    uint64_t sum = 0;
    for (uint32_t s = 0; s < o->stores.n; s++)
        if (o->fate[s] == KOILA__STAYS && o->is_late[s])
            sum += waiting_bytes(o, s, o->is_start[s]);
    return sum;
}

/* Storage s is spared, and waits for maker k wherever that runs again. If k does not, a result of
 * it that the backward pass reads stays, and waits instead. Each is taken for one storage only. */
static uint64_t waiting_in_any_case(koila__outline *o, uint32_t s, uint32_t k)
{
    const maker *m = &o->makers.at[k];
    uint64_t most = 0;
    uint32_t best = KOILA_NONE;
    for (uint32_t y = m->first_store; y < m->first_store + m->n_stores; y++) {
        const uint64_t n_bytes = o->is_late0[y] ? waiting_bytes(o, y, false) : 0;
        if (o->is_taken[y] || n_bytes <= most)
            continue;
        most = n_bytes;
        best = y;
    }
    if (best == KOILA_NONE)
        return 0;
    o->is_taken[best] = o->is_taken[s] = true;
    const uint64_t own = waiting_bytes(o, s, true);
    return own < most ? own : most;
}

/* What a spared maker makes stays. It waits where the backward pass reads it, or a call that runs
 * again. */
uint64_t koila__outline_waiting_at_least(koila__outline *o)
{
    uint64_t sum = 0;
    for (uint32_t s = 0; s < o->stores.n; s++) {
        o->is_taken[s] = o->is_late0[s] && o->is_spared[o->maker_of[s]];
        sum += o->is_taken[s] ? waiting_bytes(o, s, false) : 0;
    }
    for (uint32_t i = 0; i < o->n_again; i++) {
        const maker *m = &o->makers.at[o->again[i]];
        for (uint32_t e = m->first_edge; e < m->first_edge + m->n_edges; e++) {
            const uint32_t s = o->edges.at[e].store;
            if (o->is_spared[o->maker_of[s]] && !o->is_taken[s])
                sum += waiting_in_any_case(o, s, o->again[i]);
        }
    }
    return sum;
}

uint64_t koila__outline_results(const koila__outline *o) { return o->results; }

double koila__outline_work(const koila__outline *o) { return o->chosen_work; }

/* Node n, which runs again or after `at`, reads second results where there are any. */
static void need_inputs_again(koila__outline *o, koila_node n)
{
    const koila_sig_info *s = sig_of(o, n);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value v = input_of(o, n, i);
        const koila_node m = producer(o, v);
        if (m == KOILA_NONE || m > o->at || !koila__reads(s, i))
            continue;
        const bool is_second =
            koila__outline_fate(o, o->root[v]) != KOILA__STAYS && koila__outline_may_take(o, n, i);
        o->runs[m] |= is_second ? RUNS_AGAIN : RUNS_FIRST;
    }
}

double koila__outline_work_of_all(koila__outline *o)
{
    double work = 0;
    koila_assert(!o->uses_host);
    memcpy(o->runs, o->is_target, o->n_nodes * sizeof *o->runs);
    for (koila_node n = o->n_nodes; n-- > 0;) {
        const double once = o->cost[o->g->nodes.at[n].sig].work;
        if (n > o->at ? o->is_needed[n] : o->runs[n] & RUNS_AGAIN) {
            work += once;
            need_inputs_again(o, n);
        }
        if (n > o->at || !(o->runs[n] & RUNS_FIRST))
            continue;
        const koila_sig_info *s = sig_of(o, n);
        work += once;
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const koila_node m = producer(o, input_of(o, n, i));
            if (m != KOILA_NONE && koila__reads(s, i))
                o->runs[m] |= RUNS_FIRST;
        }
    }
    return work;
}

/* ---- how it begins */

koila_status koila__outline_begin_choice(koila__outline *o)
{
    const uint32_t N = o->n_nodes + 1;
    const uint32_t S = o->stores.n + 1;
    const uint32_t M = o->makers.n + 1;
    MAKE(held, N);
    MAKE(crossing, N);
    MAKE_ROOM(share, N);
    MAKE(segment, N);
    MAKE_ROOM(viewed, S);
    MAKE(fate, S);
    MAKE(ask, S);
    MAKE(may_wait, S);
    MAKE(need, S);
    MAKE(is_read, S);
    MAKE(is_late, S);
    MAKE(is_start, S);
    MAKE_ROOM(is_taken, S);
    MAKE(last, S);
    MAKE(ask0, S);
    MAKE(is_late0, S);
    MAKE(is_read0, S);
    MAKE(need0, S);
    MAKE(needs, M);
    MAKE(is_again, M);
    MAKE(again, M);
    MAKE(is_spared, M);
    MAKE(is_first, M);
    MAKE(runs, N);
    for (uint32_t s = 0; s < o->stores.n; s++) {
        const store *x = &o->stores.at[s];
        o->is_late0[s] = x->first_back != KOILA_NONE;
        o->ask0[s] = (uint8_t)((o->is_late0[s] ? WANTED : 0) | (x->is_fixed ? STAYS : 0));
        if (x->last_view && !x->is_fixed)
            o->viewed[o->n_viewed++] = s;
        o->need0[s] = x->first_back;
        o->is_read0[s] = x->is_result || x->first_back != KOILA_NONE;
    }
    o->n_segments = KOILA_NONE; /* not cut yet */
    return weigh(o);
}
