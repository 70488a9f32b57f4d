/* outline.c — the outline of a placed step: the storages that its forward pass makes, the calls
 * that make them, and who reads each.
 *
 * Storages stay or go, not values: a view of what stays costs nothing. What becomes of each is
 * outline_choice.c's subject; what that needs at least, outline_bound.c's. */
#include "engine/outline_state.h"

#include "engine/addends.h"
#include "engine/cost.h"
#include "engine/live.h"

bool koila__outline_is_local(const koila__outline *o, koila_node n, uint32_t i)
{
    const uint32_t at = o->g->nodes.at[n].first_input + i;
    const koila_value v = o->g->inputs.at[at];
    const koila_node m = producer(o, v);
    if (m == KOILA_NONE)
        return false;
    const koila__placed_node *made = &o->p->node[m];
    const koila__placed_node *read = &o->p->node[n];
    return made->in_loop == read->in_loop && made->axis == read->axis &&
           koila__placement_equal_at(&o->p->need[at], &o->p->value[v]);
}

/* As its producer left it, or rows that a loop makes whole. Nothing crosses loops while it waits in
 * host memory. */
bool koila__outline_may_take(const koila__outline *o, koila_node n, uint32_t i)
{
    const koila_value v = input_of(o, n, i);
    const koila_node m = producer(o, v);
    return koila__outline_is_local(o, n, i) ||
           (!o->uses_host && m != KOILA_NONE && o->p->node[m].in_loop &&
            o->p->value[v].kind == KOILA_S);
}

/* ---- storages */

bool koila__outline_is_view(const koila__outline *o, koila_node n)
{
    const koila_sig_info *s = sig_of(o, n);
    return !s->n_writes && s->n_inputs &&
           ((o->g->table->ops.at[s->op].flags & KOILA_OP_VIEW) ||
            (o->g->table->ops.at[s->op].facts & KOILA_FACT_MAY_ALIAS));
}

static void find_roots(koila__outline *o)
{
    for (koila_value v = 0; v < o->g->values.n; v++)
        o->root[v] = v;
    for (koila_node n = 0; n < o->n_nodes; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t j = 0; koila__outline_is_view(o, n) && j < s->n_outputs; j++)
            o->root[output_of(o, n, j)] = o->root[input_of(o, n, 0)];
        for (uint32_t w = 0; w < s->n_writes; w++) {
            const koila_value base = input_of(o, n, s->writes[w].input);
            o->is_part[output_of(o, n, s->n_fresh + w)] = o->root[base] != base || o->is_part[base];
        }
    }
}

/* Is its result its input, in a slice of all rows? */
static bool is_alias(const koila__outline *o, koila_node n)
{
    const koila__fix *f = o->p->node[n].fix;
    for (; f < o->p->node[n].fix + KOILA__MAX_FIXES && f->kind; f++)
        if (f->kind == KOILA__FIX_ALIAS)
            return true;
    return false;
}

uint64_t koila__outline_bytes(const koila__outline *o, koila_node n, uint32_t j)
{
    const koila_sig_info *s = sig_of(o, n);
    const koila_value v = output_of(o, n, j);
    if (is_alias(o, n) || o->g->values.at[v].meta == KOILA_NONE)
        return 0;
    if (o->p->addends &&
        ((!o->is_whole && koila__is_addend(o->p, v)) || koila__is_second_addend(o->p, v)))
        return 0;
    if (o->is_part[v] || (j >= s->n_fresh && s->n_writes != 1))
        return 0;
    return o->is_whole ? koila__value_meta(o->g, v)->n_storage_bytes
                       : koila__live_bytes(o->p, v, o->options.rows[o->p->node[n].axis]);
}

/* ---- makers, and who reads what they make */

static void find_needed(koila__outline *o, const koila_value *targets, uint32_t n_targets)
{
    for (uint32_t i = 0; i < n_targets; i++)
        if (producer(o, targets[i]) != KOILA_NONE) {
            o->is_needed[producer(o, targets[i])] = true;
            o->is_target[producer(o, targets[i])] = RUNS_FIRST;
        }
    for (koila_node n = o->n_nodes; n-- > 0;) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t i = 0; i < s->n_inputs && o->is_needed[n]; i++) {
            const koila_node m = producer(o, input_of(o, n, i));
            if (m != KOILA_NONE && koila__reads(s, i))
                o->is_needed[m] = true;
        }
    }
}

/* Is v memory that nothing was written to? */
static bool has_no_contents(const koila__outline *o, koila_value v)
{
    const koila_node n = producer(o, o->root[v]);
    return n != KOILA_NONE && o->g->table->ops.at[sig_of(o, n)->op].facts & KOILA_FACT_EMPTY;
}

/* Can a slice draw its own numbers alone? A CPU draws masks of dropout in the order of memory; of
 * what else is drawn each slice draws the numbers of all rows. */
static bool draws_in_slices(const koila__outline *o, koila_node n)
{
    const bool is_gpu = koila__value_meta(o->g, output_of(o, n, 0))->device >> 8 == 1;
    return !is_gpu && o->g->table->ops.at[sig_of(o, n)->op].facts & KOILA_FACT_DRAWS_MASK;
}

/* Does the call draw the same numbers again, if it is random, for no more than what it takes once?
 * It draws from the state that was recorded before it; but where the numbers depend on a tensor
 * (Note [Random] in place.h), its last bits may be others. */
static bool draws_alike(const koila__outline *o, koila_node n)
{
    const koila_sig_info *s = sig_of(o, n);
    if (!(o->g->table->ops.at[s->op].flags & KOILA_OP_RANDOM))
        return true;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if (koila__reads(s, i) && !has_no_contents(o, input_of(o, n, i)))
            return false;
    return o->is_whole || draws_in_slices(o, n);
}

/* Was v drawn, and then written to? The mask of a dropout is, which is scaled in place. */
static bool was_drawn(const koila__outline *o, koila_value v)
{
    for (koila_node n = producer(o, v); n != KOILA_NONE && sig_of(o, n)->n_writes;) {
        if (o->g->table->ops.at[sig_of(o, n)->op].flags & KOILA_OP_RANDOM)
            return true;
        n = producer(o, input_of(o, n, sig_of(o, n)->writes[0].input));
    }
    return false;
}

/* May the call, if it writes, make once more a new value of one that the step has made (Note
 * [Writes] in graph.h)? What it is made of may be there still: a write goes to a copy then. What
 * all slices have made is not joined, or added up, again. */
static bool writes_anew(const koila__outline *o, koila_node n)
{
    const koila_sig_info *s = sig_of(o, n);
    if (!s->n_writes)
        return true;
    if (s->n_writes > 1 || s->n_fresh || o->p->unrolled)
        return false;
    const koila_value base = input_of(o, n, s->writes[0].input);
    return producer(o, base) != KOILA_NONE &&
           (o->options.repeats_writes || was_drawn(o, output_of(o, n, 0)));
}

/* May the node run a second time, as far as its operator goes? */
static bool may_repeat(const koila__outline *o, koila_node n)
{
    const koila_sig_info *s = sig_of(o, n);
    if (o->g->table->ops.at[s->op].flags & KOILA_OP_OPAQUE || !writes_anew(o, n) ||
        !draws_alike(o, n))
        return false;
    for (uint32_t j = 0; j < s->n_outputs; j++)
        if (o->p->value[output_of(o, n, j)].kind == KOILA_P)
            return false;
    return true;
}

static koila_status add_makers(koila__outline *o)
{
    for (koila_node n = 0; n <= o->at; n++) {
        const koila_sig_info *s = sig_of(o, n);
        maker m = { .node = n,
                    .first_store = o->stores.n,
                    .first_edge = o->edges.n,
                    .sure = o->is_sure[n] ? n : KOILA_NONE };
        for (uint32_t j = 0; j < s->n_outputs; j++) {
            const koila_value v = output_of(o, n, j);
            if (o->root[v] != v)
                continue;
            const store x = { .value = v,
                              .made = n,
                              .n_bytes = koila__outline_bytes(o, n, j),

                              .last_back = KOILA_NONE,
                              .first_back = KOILA_NONE,
                              .is_write = j >= s->n_fresh,
                              .is_sure = o->is_sure[n] };
            if (!koila__vec_push(&o->mem, &o->stores, x))
                return KOILA_NO_MEMORY;
            o->store_of[v] = o->stores.n;
            m.n_stores++;
            m.n_bytes += x.n_bytes;
        }
        if (!m.n_stores)
            continue;
        m.may_repeat = may_repeat(o, n);
        if (!koila__vec_push(&o->mem, &o->makers, m))
            return KOILA_NO_MEMORY;
    }
    return KOILA_OK;
}

/* May a second value reach node n as its input i, through all the views between? */
static bool takes(const koila__outline *o, koila_node n, uint32_t i)
{
    koila_value v = input_of(o, n, i);
    if (!koila__outline_may_take(o, n, i))
        return false;
    for (; o->root[v] != v; v = input_of(o, producer(o, v), 0))
        if (!may_repeat(o, producer(o, v)) || !koila__outline_may_take(o, producer(o, v), 0))
            return false;
    return true;
}

/* Node n, up to `at`, reads storages; m: it makes some, or NULL. */
static koila_status read_forward(koila__outline *o, koila_node n, maker *m)
{
    const koila_sig_info *s = sig_of(o, n);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value root = o->root[input_of(o, n, i)];
        const uint32_t at = o->store_of[root];
        o->last_use[root] = n;
        if (!at)
            continue;
        if (m && koila__reads(s, i) &&
            !koila__vec_push(&o->mem, &o->edges,
                             ((edge){ at - 1, o->stores.at[at - 1].made, takes(o, n, i) })))
            return KOILA_NO_MEMORY;
    }
    if (m)
        m->n_edges = o->edges.n - m->first_edge;
    return KOILA_OK;
}

/* Node n, after `at`, reads storages of the forward pass. */
static void read_backward(koila__outline *o, koila_node n)
{
    const koila_sig_info *s = sig_of(o, n);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value v = input_of(o, n, i);
        const uint32_t at = o->store_of[o->root[v]];
        store *x = at ? &o->stores.at[at - 1] : NULL;
        if (!x || (s->n_writes && !koila__reads(s, i)))
            continue;
        if (o->is_sure[n] && !koila__outline_is_view(o, n))
            x->last_back = n;
        if (producer(o, v) > o->at) /* a view that the backward pass made */
            continue;
        if (x->first_back == KOILA_NONE)
            x->first_back = n;
        if (o->root[v] != v && producer(o, v) > x->last_view)
            x->last_view = producer(o, v);
        x->is_held |= koila__outline_may_take(o, n, i);
        x->is_fixed |= !takes(o, n, i);
    }
}

static void find_readers_behind(koila__outline *o)
{
    for (koila_node n = o->at + 1; n < o->n_nodes; n++)
        if (o->is_needed[n])
            read_backward(o, n);
}

static koila_status find_readers_up_to(koila__outline *o)
{
    uint32_t next = 0;
    for (koila_node n = 0; n <= o->at; n++) {
        maker *m = next < o->makers.n && o->makers.at[next].node == n ? &o->makers.at[next] : NULL;
        next += m != NULL;
        if (m)
            m->first_edge = o->edges.n;
        KOILA_TRY(read_forward(o, n, m));
    }
    return KOILA_OK;
}

static void find_written(koila__outline *o)
{
    for (koila_node n = 0; n <= o->at; n++) {
        const koila_sig_info *s = sig_of(o, n);
        for (uint32_t w = 0; w < s->n_writes; w++) {
            const uint32_t at = o->store_of[o->root[input_of(o, n, s->writes[w].input)]];
            if (at)
                o->stores.at[at - 1].is_written = true;
        }
    }
}

/* Results stay. */
static void hold_targets(koila__outline *o, const koila_value *targets, uint32_t n_targets)
{
    for (uint32_t i = 0; i < n_targets; i++) {
        const uint32_t at = o->store_of[o->root[targets[i]]];
        if (!at)
            continue;
        o->stores.at[at - 1].is_fixed = true;
        o->stores.at[at - 1].is_result = true;
    }
}

static koila_status find_costs(koila__outline *o)
{
    const koila_table *t = o->g->table;
    koila__cost *cost = o->cost = koila__arena_array(&o->arena, t->sigs.n, sizeof *cost);
    bool *known = koila__arena_array(&o->arena, t->sigs.n, sizeof *known);
    uint32_t next = 0;
    double work = 0;
    TRY_ALLOC(cost && known);
    for (koila_node n = 0; n < o->n_nodes; n++) {
        const koila_sig sig = o->g->nodes.at[n].sig;
        if (!known[sig])
            cost[sig] = koila__cost_of(t, sig_of(o, n));
        known[sig] = true;
        work += o->is_needed[n] ? cost[sig].work : 0;
        if (next >= o->makers.n || o->makers.at[next].node != n)
            continue;
        o->makers.at[next].work = cost[sig].work;
        o->makers.at[next].needed_work = o->is_needed[n] ? cost[sig].work : 0;
        o->makers.at[next++].is_expensive = cost[sig].expensive;
    }
    o->work = work;
    return KOILA_OK;
}

/* ---- all of it */

static koila_status make_arrays(koila__outline *o)
{
    const uint32_t V = o->g->values.n + 1;
    MAKE(root, V);
    MAKE(is_part, V);
    MAKE(store_of, V);
    MAKE(is_needed, o->n_nodes + 1);
    MAKE(is_target, o->n_nodes + 1);
    return KOILA_OK;
}

static koila_status fill(koila__outline *o, const koila_value *targets, uint32_t n_targets)
{
    KOILA_TRY(make_arrays(o));
    find_roots(o);
    find_needed(o, targets, n_targets);
    KOILA_TRY(koila__outline_find_counted(o));
    KOILA_TRY(add_makers(o));
    find_readers_behind(o);
    hold_targets(o, targets, n_targets);
    return koila__outline_count_fixed(o, targets, n_targets);
}

koila_status koila__outline_begin(koila__outline *o)
{
    MAKE(last_use, o->g->values.n + 1);
    KOILA_TRY(find_readers_up_to(o));
    find_written(o);
    KOILA_TRY(find_costs(o));
    return koila__outline_begin_choice(o);
}

void koila__outline_measure(koila__outline *o)
{
    memset(o->is_spared, true, o->makers.n * sizeof *o->is_spared);
    koila__outline_choose_makers(o);
    o->most = koila__outline_bound(o);
}

koila_status koila__outline_new(koila__outline **out, const koila__placed *p,
                                const koila_value *targets, uint32_t n_targets, koila_node at,
                                const koila__outline_options *options, const koila_allocator *mem)
{
    const koila_allocator a = koila__allocator(mem);
    koila__outline *o = koila__realloc(&a, NULL, 0, sizeof *o);
    if (!o)
        return KOILA_NO_MEMORY;
    koila_assert(at < p->graph->nodes.n && !p->cut && !p->absent);
    *o = (koila__outline){ .p = p,
                           .g = p->graph,
                           .options = *options,
                           .mem = a,
                           .at = at,
                           .n_nodes = p->graph->nodes.n,
                           .last_segment = KOILA_NONE,
                           .too_much = KOILA_NONE,
                           .uses_host = options->uses_host,
                           .is_whole = options->n_loops == 0,
                           .is_one = options->n_loops <= 1 };
    koila__arena_init(&o->arena, &a);
    const koila_status status = fill(o, targets, n_targets);
    if (status != KOILA_OK) {
        koila__outline_free(o);
        return status;
    }
    *out = o;
    return KOILA_OK;
}

void koila__outline_free(koila__outline *o)
{
    if (!o)
        return;
    const koila_allocator mem = o->mem;
    koila__vec_free(&mem, &o->stores);
    koila__vec_free(&mem, &o->makers);
    koila__vec_free(&mem, &o->edges);
    koila__arena_deinit(&o->arena);
    koila__release(&mem, o, sizeof *o);
}

/* ---- the getters */

uint32_t koila__outline_n_makers(const koila__outline *o) { return o->makers.n; }

double koila__outline_maker_work(const koila__outline *o, uint32_t k)
{
    return o->makers.at[k].work;
}

uint64_t koila__outline_maker_bytes(const koila__outline *o, uint32_t k)
{
    return o->makers.at[k].n_bytes;
}

double koila__outline_recorded(const koila__outline *o, uint32_t *n_needed)
{
    *n_needed = 0;
    for (koila_node n = 0; n < o->n_nodes; n++)
        *n_needed += o->is_needed[n];
    return o->work;
}

koila_value koila__outline_root(const koila__outline *o, koila_value v) { return o->root[v]; }

koila__fate koila__outline_fate(const koila__outline *o, koila_value root)
{
    const uint32_t at = o->store_of[root];
    return at ? (koila__fate)o->fate[at - 1] : KOILA__STAYS;
}

koila_node koila__outline_last(const koila__outline *o, koila_value root)
{
    return o->last_use[root];
}

bool koila__outline_is_needed(const koila__outline *o, koila_node n) { return o->is_needed[n]; }
