/* loops.c — the loops of a step: what is needed, in which loop it can run first, and which loop
 * makes each result.
 *
 * A result that no later loop needs goes to the loop where it adds the least work. So all gradients
 * and the loss of an ordinary step share the last loop, while a weight gradient in a net of
 * barriers (BatchNorm) is made in the loop that has its inputs. The same holds for a small sum that
 * is needed whole, among the loops before the one that waits for it: a second term of the loss is
 * not added up in a first loop that only the denominator of the cross-entropy needs. Calls outside
 * loops then run as late as their inputs.
 *
 * A sharded value that an earlier loop made whole is sliced from the whole one and never
 * recomputed. So the demand search stops there, as it does at kept pieces. */
#include "engine/schedule_state.h"

#include "engine/plan_costs.h"
#include "engine/addends.h"
#include "engine/share.h"
#include "graph/table.h"
#include "placement/rules.h"

#include <math.h>

/* Does input i of node n read the local value (made by another node of the same loop)? If not, it
 * reads the whole value or a slice of it. */
static bool find_local(const work_state *w, koila_node n, uint32_t i, koila_value v)
{
    const koila_node from = producer(w, v);
    if (from == KOILA_NONE || !w->p->node[n].in_loop || !w->p->node[from].in_loop ||
        w->p->node[from].axis != w->p->node[n].axis)
        return false;
    const koila_placement *need = &w->p->need[w->g->nodes.at[n].first_input + i];
    return need->kind == KOILA_R ? w->p->value[v].kind == KOILA_R
                                 : koila__placement_equal_at(need, &w->p->value[v]);
}

/* ---- what is needed, and at which level */

/* Do n's fresh results share their first input's storage? */
static bool aliases_input(const work_state *w, koila_node n, const koila_sig_info *s)
{
    if (!s->n_inputs)
        return false;
    for (const koila__fix *f = w->p->node[n].fix;
         f < w->p->node[n].fix + KOILA__MAX_FIXES && f->kind; f++)
        if (f->kind == KOILA__FIX_ALIAS)
            return true;
    return maybe_alias(w->g->table, s->op);
}

static uint16_t find_rare(const work_state *w, koila_node n, const koila_sig_info *s)
{
    const koila__op *op = &w->g->table->ops.at[s->op];
    uint32_t rare = w->p->node[n].sums ? SUMS : 0;
    if ((op->facts & KOILA_FACT_OPAQUE_CALL) && (op->flags & KOILA_OP_OPAQUE))
        rare |= IS_MODULE;
    if (op->facts & KOILA_FACT_OPAQUE_BACKWARD)
        rare |= IS_MODULE_BACKWARD;
    if (op->facts & KOILA_FACT_SPLITS_UNSAFELY)
        rare |= SPLITS_UNSAFELY;
    if (koila__adds_two(w->g->table, s) && !w->p->node[n].sums && !w->p->node[n].fix[0].kind &&
        !koila__dtype_is_complex(koila__meta(w->g->table, s->outputs[0])->dtype))
        rare |= ADDS; /* what is conjugated is a flag on the tensor */
    return (uint16_t)(s->n_writes ? rare | WRITES : rare);
}

static void find_needed(work_state *w, const koila_value *targets, uint32_t n_targets)
{
    for (uint32_t i = 0; i < n_targets; i++) {
        w->is_result[targets[i]] = true;
        if (producer(w, targets[i]) != KOILA_NONE)
            w->needed[producer(w, targets[i])] = true;
    }
    for (uint32_t n = w->n_nodes; n-- > 0;) { /* uses in recorded order: built back to front */
        const koila_sig_info *sig = sig_of(w, n);
        const koila_node_info *info = &w->g->nodes.at[n];
        w->span[n] = (span){ info->first_input, info->first_input + sig->n_inputs,
                             info->first_output, info->first_output + sig->n_outputs };
        for (uint32_t i = sig->n_inputs; i-- > 0;) {
            const koila_value v = w->g->inputs.at[info->first_input + i];
            use *u = &w->uses[info->first_input + i];
            *u = (use){ v, producer(w, v), n, KOILA_NONE,
                        .reads = !sig->n_writes || koila__reads(sig, i) };
            u->local = u->reads && find_local(w, n, i, v);
            u->is_whole = !u->local && w->p->need[info->first_input + i].kind == KOILA_R;
            if (!w->needed[n] || !u->reads)
                continue;
            if (u->from != KOILA_NONE)
                w->needed[u->from] = true;
            u->next = w->first_use[v];
            w->first_use[v] = info->first_input + i;
        }
        w->runs[n] = RUNS_NEVER;
        if (!w->needed[n])
            continue;
        w->n_needed++;
        w->runs[n] = w->p->node[n].in_loop ? RUNS_IN_LOOP : RUNS_ONCE;
        w->any_again |= w->p->node[n].is_again;
        w->any_foreign |= w->g->table->ops.at[sig->op].is_foreign;
        w->aliases[n] = aliases_input(w, n, sig);
        w->rare[n] = find_rare(w, n, sig);
        w->is_mere_view[n] = sig->n_inputs == 1 && !sig->n_writes &&
                             w->g->table->ops.at[sig->op].flags & KOILA_OP_VIEW;
        if (w->is_mere_view[n] && w->uses[info->first_input].from != KOILA_NONE)
            w->is_viewed[w->uses[info->first_input].from] = true;
    }
}

/* Calls that run again depend on little, so their level is early. They are wanted late: in the last
 * loop that is not later than what needs them. */
static void delay_again(work_state *w)
{
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        if (!w->needed[n] || !w->p->node[n].is_again)
            continue;
        uint32_t latest = w->n_levels - 1;
        for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++)
            for (const use *u = uses_of(w, v); u; u = next_use_of(w, u)) {
                const uint32_t until = w->level[u->user] - (w->p->node[n].in_loop && !u->local);
                if (until < latest)
                    latest = until;
            }
        if (latest > w->level[n])
            w->level[n] = latest;
    }
}

/* Makes room for a loop before each: calls that run again, and are needed whole, get it. */
static void spread_levels(work_state *w)
{
    for (uint32_t n = 0; n < w->n_nodes; n++)
        w->level[n] *= 2;
    w->n_levels = 2 * w->n_levels - 1;
}

/* Finds level[n], and the values that some use needs whole. */
static void find_levels(work_state *w)
{
    uint32_t reached = 0; /* by calls that do not run again */
    w->n_levels = 1;
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        if (!w->needed[n])
            continue;
        const bool waits = w->p->again_behind && w->p->node[n].is_again;
        uint32_t level = waits ? reached : 0;
        for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end;
             u++) {
            if (u->from == KOILA_NONE || !u->reads)
                continue;
            uint32_t l = w->level[u->from];
            if (w->runs[u->from] == RUNS_IN_LOOP && !u->local) {
                l += 1;
                w->is_barrier[u->value] = true;
            }
            if (l > level)
                level = l;
        }
        w->level[n] = level;
        if (!w->p->node[n].is_again && level > reached)
            reached = level;
        if (level + 1 > w->n_levels)
            w->n_levels = level + 1;
    }
    if (w->p->again_apart)
        spread_levels(w);
    if (w->any_again)
        delay_again(w);
}

/* May node n, outside loops, run later than where it could first? Not if it draws random numbers,
 * or does what nobody sees. */
static bool may_wait(const work_state *w, koila_node n)
{
    const koila__op *op = &w->g->table->ops.at[sig_of(w, n)->op];
    return !(w->rare[n] & (IS_MODULE | IS_MODULE_BACKWARD | SPLITS_UNSAFELY)) && !op->is_foreign &&
           !(op->flags & KOILA_OP_RANDOM) && !w->p->node[n].is_again && !w->p->node[n].offloads;
}

/* Finds the last level at which a call outside loops can run: before all that waits for it. */
static void find_latest(work_state *w)
{
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        w->latest[n] = w->level[n];
        if (w->runs[n] != RUNS_ONCE || !may_wait(w, n))
            continue;
        uint32_t latest = w->n_levels; /* a level more: behind the last loop */
        for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++)
            for (const use *u = uses_of(w, v); u; u = next_use_of(w, u))
                if (w->latest[u->user] < latest)
                    latest = w->latest[u->user];
        w->latest[n] = latest;
    }
}

/* The last level of which a loop can make v whole, which some use needs. */
static uint32_t last_level_of(const work_state *w, koila_value v)
{
    uint32_t latest = w->n_levels;
    for (const use *u = uses_of(w, v); u; u = next_use_of(w, u))
        if (!u->local && w->latest[u->user] < latest)
            latest = w->latest[u->user];
    return latest - 1;
}

/* May a later loop make v than the one that could first? It is a small sum. */
static bool can_be_late(const work_state *w, koila_value v)
{
    return w->p->value[v].kind == KOILA_P &&
           koila__value_meta(w->g, v)->n_bytes <= KOILA__LATE_BYTES &&
           last_level_of(w, v) > w->level[producer(w, v)];
}

/* Calls outside loops wait for the loops that make what they read. */
static void delay_calls(work_state *w)
{
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        if (w->runs[n] != RUNS_ONCE)
            continue;
        for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end;
             u++) {
            if (u->from == KOILA_NONE || !u->reads)
                continue;
            const bool in_loop = w->runs[u->from] == RUNS_IN_LOOP;
            const uint32_t from =
                in_loop ? w->loops[w->made_whole[u->value]].level + 1 : w->level[u->from];
            if (from > w->level[n])
                w->level[n] = from;
        }
        koila_assert(w->level[n] <= w->latest[n]);
        if (w->level[n] == w->n_levels)
            w->n_levels++;
    }
}

/* The loop that is of the level and axis of node n, which is of one. */
static uint32_t *natural(const work_state *w, koila_node n)
{
    return &w->loop_of[(uint64_t)w->level[n] * (w->g->axes.n ? w->g->axes.n : 1) +
                       w->p->node[n].axis];
}

/* Chains the nodes outside loops by level. */
static koila_status chain_calls(work_state *w)
{
    w->whole_of_level = koila__arena_room(&w->tmp, w->n_levels * sizeof *w->whole_of_level);
    TRY_ALLOC(w->whole_of_level);
    memset(w->whole_of_level, 0xff, w->n_levels * sizeof *w->whole_of_level);
    for (uint32_t n = w->n_nodes; n-- > 0;)
        if (w->runs[n] == RUNS_ONCE) {
            w->whole_next[n] = w->whole_of_level[w->level[n]];
            w->whole_of_level[w->level[n]] = n;
        }
    return KOILA_OK;
}

/* A loop for each level and axis that has a node in loops, in the order of levels. */
static koila_status make_loops(work_state *w)
{
    const uint32_t n_axes = w->g->axes.n ? w->g->axes.n : 1;
    const uint64_t n_slots = (uint64_t)w->n_levels * n_axes;
    uint32_t *loop_of = koila__arena_array(&w->spare, n_slots, sizeof *loop_of);
    TRY_ALLOC(loop_of);
    w->loop_of = loop_of;
    for (uint32_t n = w->n_nodes; n-- > 0;)
        if (w->runs[n] == RUNS_IN_LOOP)
            *natural(w, n) = 1;
    for (uint64_t i = 0; i < n_slots; i++)
        w->n_loops += loop_of[i];
    if (w->n_loops > KOILA_COST_MAX_LOOPS)
        return KOILA_UNSUPPORTED;
    w->loops = koila__arena_array(&w->tmp, w->n_loops, sizeof *w->loops);
    w->target_first = koila__arena_array(&w->tmp, w->n_loops, sizeof *w->target_first);
    w->kept_first = koila__arena_array(&w->tmp, w->n_loops, sizeof *w->kept_first);
    TRY_ALLOC(w->loops && w->target_first && w->kept_first);
    memset(w->target_first, 0xff, w->n_loops * sizeof *w->target_first);
    memset(w->kept_first, 0xff, w->n_loops * sizeof *w->kept_first);
    uint32_t next = 0;
    for (uint64_t i = 0; i < n_slots; i++) {
        if (!loop_of[i])
            continue;
        w->loops[next] = (loop_info){ (uint32_t)(i / n_axes), (uint16_t)(i % n_axes) };
        loop_of[i] = next++;
    }
    koila_assert(next == w->n_loops);
    return KOILA_OK;
}

/* What calls that run again begin with is worth keeping: the storages that their inputs from other
 * calls lie in. */
static void keep_for_again(work_state *w)
{
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        if (!w->needed[n] || !w->p->node[n].is_again)
            continue;
        for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end;
             u++) {
            koila_node from = u->local && !w->p->node[u->from].is_again ? u->from : KOILA_NONE;
            while (from != KOILA_NONE && w->aliases[from])
                from = w->uses[w->span[from].in].from;
            if (from != KOILA_NONE) {
                w->is_expensive[from] = true;
                w->is_start[from] = true;
            }
        }
    }
}

/* The cost of the calls of a signature. */
static const sig_cost *cost_of(work_state *w, koila_sig sig)
{
    const koila_table *t = w->g->table;
    const koila_sig_info *s = koila__sig(t, sig);
    sig_cost *c = &w->cost[sig];
    if (c->known)
        return c;
    const uint32_t flags = t->ops.at[s->op].flags;
    *c =
        (sig_cost){ koila__cost_of(t, s), 0, true, flags & KOILA_OP_VIEW, flags & KOILA_OP_OPAQUE };
    for (uint32_t o = 0; o < s->n_outputs; o++)
        if (s->outputs[o] != KOILA_NONE)
            c->n_bytes += (double)koila__meta(t, s->outputs[o])->n_bytes;
    return c;
}

/* Values that may be kept at all: sliced results of expensive operators. */
static void find_keepable(work_state *w, koila_node n)
{
    for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++)
        w->is_keepable[v] = exists(w, v) && w->p->value[v].kind == KOILA_S;
}

/* A node is expensive if it is a dense kernel, or if recomputing it from the last values worth
 * keeping takes many passes over memory. The second case spares every loop from running a long
 * chain of cheap operators across many barriers from its beginning. */
static koila_status find_costs(work_state *w)
{
    /* work from values worth keeping to this node, counted as a tree */
    double *chain = koila__arena_room(&w->spare, w->n_nodes * sizeof *chain);
    w->cost = koila__arena_array(&w->spare, w->g->table->sigs.n, sizeof *w->cost);
    TRY_ALLOC(chain && w->cost);
    if (w->any_again)
        keep_for_again(w);
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        const sig_cost *c = cost_of(w, w->g->nodes.at[n].sig);
        double sum = c->cost.work;
        w->work[n] = sum;
        w->is_expensive[n] |= c->cost.expensive;
        if (!w->is_expensive[n]) {
            for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end;
                 u < end; u++)
                if (u->local)
                    sum += chain[u->from];
            w->is_expensive[n] =
                !c->is_view && (sum > KOILA_COST_CHAIN * c->n_bytes || w->keep.cheap);
        }
        chain[n] = w->is_expensive[n] ? 0 : sum;
        if (w->is_expensive[n] && !c->is_view && !c->is_opaque)
            find_keepable(w, n);
    }
    return KOILA_OK;
}

/* ---- which loop makes what */

/* Adds `bits` of word `word` to *set. *before: a cell known to be in front of it, or KOILA_NONE; is
 * advanced. */
static void add_bits(work_state *w, loop_set *set, uint32_t *before, uint32_t word, uint64_t bits)
{
    uint32_t next = *before == KOILA_NONE ? *set : w->cells.at[*before].next;
    while (next != KOILA_NONE && w->cells.at[next].word < word) {
        *before = next;
        next = w->cells.at[next].next;
    }
    if (next != KOILA_NONE && w->cells.at[next].word == word) {
        w->cells.at[next].bits |= bits;
        return;
    }
    const uint32_t fresh = w->cells.n;
    if (!koila__vec_push(&w->mem, &w->cells, ((cell){ bits, word, next }))) {
        w->no_memory = true;
        return;
    }
    if (*before == KOILA_NONE)
        *set = fresh;
    else
        w->cells.at[*before].next = fresh;
}
static inline void add_loop(work_state *w, loop_set *set, uint32_t j)
{
    uint32_t before = KOILA_NONE;
    if (*set != KOILA_NONE && w->cells.at[*set].word == j >> 6) { /* most sets have one cell */
        w->cells.at[*set].bits |= (uint64_t)1 << (j & 63);
        return;
    }
    add_bits(w, set, &before, j >> 6, (uint64_t)1 << (j & 63));
}

static bool runs_in(const work_state *w, koila_node n, uint32_t j)
{
    for (uint32_t at = w->exec[n]; at != KOILA_NONE && w->cells.at[at].word <= j >> 6;
         at = w->cells.at[at].next)
        if (w->cells.at[at].word == j >> 6)
            return w->cells.at[at].bits >> (j & 63) & 1;
    return false;
}

/* home[n]: the first loop that runs n, whatever is kept. It makes one of n's results whole, or is
 * the home of a consumer. */
static void find_homes(work_state *w)
{
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        uint32_t home = KOILA_NONE;
        for (koila_value v = w->span[n].out; w->runs[n] == RUNS_IN_LOOP && v < w->span[n].out_end;
             v++) {
            if (w->made_whole[v] < home)
                home = w->made_whole[v];
            for (const use *u = uses_of(w, v); u; u = next_use_of(w, u))
                if (u->local && w->home[u->user] < home)
                    home = w->home[u->user];
        }
        w->home[n] = home;
    }
}

/* The work that making v adds to loop j, if everything worth keeping is kept from the loops before.
 * With `add` the loop then runs it. Where it exceeds `limit`: a part of it that does. */
static double demand(work_state *w, koila_value v, uint32_t j, bool add, double limit)
{
    double work = 0;
    uint32_t top = 0;
    w->epoch++;
#define VISIT(node_)                                                                               \
    do {                                                                                           \
        const koila_node q_ = (node_);                                                             \
        if (w->mark[q_] != w->epoch && !runs_in(w, q_, j)) {                                       \
            w->mark[q_] = w->epoch;                                                                \
            w->stack[top++] = q_;                                                                  \
        }                                                                                          \
    } while (0)
    VISIT(producer(w, v));
    while (top) {
        const koila_node n = w->stack[--top];
        work += work_of(w, n) + 1; /* + 1: a view costs a little too */
        if (!add && work > limit)
            return work;
        if (add) {
            add_loop(w, &w->exec[n], j);
            if (j < w->home[n])
                w->home[n] = j;
        }
        for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end;
             u++) {
            if (!u->local || sliced_in(w, u->value, j))
                continue;
            if (w->home[u->from] < j && w->is_keepable[u->value])
                continue;
            VISIT(u->from);
        }
    }
#undef VISIT
    return work;
}

/* The first loop from `first` on, of n's axis, that runs n; KOILA_NONE when there is none. */
static uint32_t first_with(const work_state *w, koila_node n, uint32_t first)
{
    uint32_t j = next_loop(w, w->exec[n], first);
    while (j != KOILA_NONE && w->loops[j].axis != w->p->node[n].axis)
        j = next_loop(w, w->exec[n], j + 1);
    return j;
}

/* The loop, before loop `end`, for v, which none of these waits for: the first that runs its
 * producer anyway; else, among its own loop, the first that runs all its inputs, and the last
 * loops, the one where v adds the least work. The choices are evaluated under a limit that grows to
 * twice the least that was found to exceed it, so an evaluation costs about as much as the work it
 * finds; that work is then scheduled, so the total is linear. */
static uint32_t best_loop(work_state *w, koila_value v, uint32_t end)
{
    const koila_node n = producer(w, v);
    const uint32_t first = *natural(w, n);
    const uint32_t there = first_with(w, n, first);
    if (there < end)
        return there;
    uint32_t choice[5], n_choices = 0, inputs = first;
    for (uint32_t j = end; j-- > first && n_choices < 3 && end - j <= 3;)
        if (j != first && w->loops[j].axis == w->p->node[n].axis)
            choice[n_choices++] = j;
    for (const use *u = w->uses + w->span[n].in, *last = w->uses + w->span[n].in_end;
         u < last && inputs != KOILA_NONE; u++)
        if (u->local)
            inputs = first_with(w, u->from, inputs);
    if (inputs < end && inputs != first)
        choice[n_choices++] = inputs;
    choice[n_choices++] = first;
    uint32_t best = first;
    double least = INFINITY;
    for (double limit = 2 * (work_of(w, n) + 1); n_choices > 1; limit = 2 * least) {
        least = INFINITY;
        for (uint32_t k = n_choices; k-- > 0;) { /* among equals the earliest loop */
            const double work = demand(w, v, choice[k], false, least < limit ? least : limit);
            if (work < least) {
                best = choice[k];
                least = work;
            }
        }
        if (least <= limit)
            break;
    }
    return best;
}

/* Chains what each loop makes whole. */
static void chain_targets(work_state *w)
{
    for (uint32_t v = w->n_values; v-- > 0;) {
        if (w->made_whole[v] == KOILA_NONE)
            continue;
        w->target_next[v] = w->target_first[w->made_whole[v]];
        w->target_first[w->made_whole[v]] = v;
    }
}

/* The first loop of a later level than that, or n_loops. */
static uint32_t loop_after(const work_state *w, uint32_t level)
{
    uint32_t j = w->n_loops;
    while (j > 0 && w->loops[j - 1].level > level)
        j--;
    return j;
}

static void assign_targets(work_state *w)
{
    memset(w->made_whole, 0xff, w->n_values * sizeof *w->made_whole);
    for (uint32_t v = 0; v < w->n_values; v++)
        if (w->is_barrier[v] && !can_be_late(w, v))
            w->made_whole[v] = *natural(w, producer(w, v));
    find_homes(w);
    for (uint32_t v = 0; v < w->n_values; v++)
        if (w->made_whole[v] != KOILA_NONE)
            demand(w, v, w->made_whole[v], true, 0);
    /* late results first: they decide which loops run the earlier ones */
    for (uint32_t v = w->n_values; v-- > 0;) {
        if (!(w->is_result[v] || w->is_barrier[v]) || w->made_whole[v] != KOILA_NONE ||
            !made_in_loop(w, v))
            continue;
        const uint32_t end = w->is_barrier[v] ? loop_after(w, last_level_of(w, v)) : w->n_loops;
        const uint32_t j = best_loop(w, v, end);
        demand(w, v, j, true, 0);
        w->made_whole[v] = j;
    }
    chain_targets(w);
    find_homes(w);
    delay_calls(w);
}

/* Adds the loops in which consumers read v locally, if consumers run in their exec loops. */
static void add_uses(work_state *w, koila_value v, loop_set *out)
{
    /* after that it is sliced */
    const uint32_t end = w->p->value[v].kind == KOILA_S && w->made_whole[v] != KOILA_NONE
                             ? w->made_whole[v] + 1
                             : w->n_loops;
    for (const use *u = uses_of(w, v); u; u = next_use_of(w, u)) {
        if (w->home[u->user] == KOILA_NONE || !u->local)
            continue;
        uint32_t before = KOILA_NONE;
        for (uint32_t at = w->exec[u->user]; at != KOILA_NONE && w->cells.at[at].word * 64 < end;
             at = w->cells.at[at].next) {
            const cell c = w->cells.at[at];
            const uint64_t bits = end - c.word * 64 >= 64
                                      ? c.bits
                                      : c.bits & (((uint64_t)1 << (end - c.word * 64)) - 1);
            if (bits && *out != KOILA_NONE && w->cells.at[*out].word == c.word)
                w->cells.at[*out].bits |= bits;
            else if (bits)
                add_bits(w, out, &before, c.word, bits);
        }
    }
}

/* exec[n]: the loops that run n when results of expensive nodes are always kept and all others are
 * recomputed where needed. */
static koila_status find_exec(work_state *w)
{
    memset(w->exec, 0xff, (size_t)w->n_nodes * sizeof *w->exec);
    w->cells.n = 0;
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        if (!w->needed[n] || w->home[n] == KOILA_NONE)
            continue;
        add_loop(w, &w->exec[n], w->home[n]);
        for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++) {
            if (!exists(w, v))
                continue;
            if (w->made_whole[v] != KOILA_NONE)
                add_loop(w, &w->exec[n], w->made_whole[v]);
            add_uses(w, v, w->is_keepable[v] ? &w->use[v] : &w->exec[n]);
        }
    }
    return w->no_memory ? KOILA_NO_MEMORY : KOILA_OK;
}

static bool has_local_use(const work_state *w, koila_value v)
{
    for (const use *u = uses_of(w, v); u; u = next_use_of(w, u))
        if (u->local)
            return true;
    return false;
}

/* All that is needed in a loop, where there is one: it makes its results and what is needed whole,
 * and whatever these need. */
static koila_status assign_one_loop(work_state *w)
{
    const loop_set only = w->cells.n;
    memset(w->made_whole, 0xff, w->n_values * sizeof *w->made_whole);
    if (!koila__vec_push(&w->mem, &w->cells, ((cell){ 1, 0, KOILA_NONE })))
        return KOILA_NO_MEMORY;
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        w->home[n] = w->runs[n] == RUNS_IN_LOOP ? 0 : KOILA_NONE;
        for (koila_value v = w->span[n].out; w->home[n] == 0 && v < w->span[n].out_end; v++) {
            if (w->is_barrier[v] || w->is_result[v])
                w->made_whole[v] = 0;
            if (w->is_keepable[v] && has_local_use(w, v))
                w->use[v] = only;
        }
    }
    chain_targets(w);
    return KOILA_OK;
}

/* Finds which loop makes what, and the loops in which values that may be kept are used. */
static koila_status assign_loops(work_state *w)
{
    if (w->n_loops <= 1)
        return assign_one_loop(w);
    TRY_ALLOC(w->exec = koila__arena_room(&w->spare, ((size_t)w->n_nodes + 1) * sizeof *w->exec));
    memset(w->exec, 0xff, (size_t)w->n_nodes * sizeof *w->exec);
    find_latest(w);
    assign_targets(w);
    return find_exec(w);
}

/* Finds the nodes of which a result may be kept for a later loop. */
static void find_keepers(work_state *w)
{
    for (uint32_t n = 0; n < w->n_nodes; n++)
        for (koila_value v = w->span[n].out; w->is_expensive[n] && v < w->span[n].out_end; v++)
            if (w->use[v] != KOILA_NONE)
                w->keeps_bits[n >> 6] |= (uint64_t)1 << (n & 63);
}

/* ---- whole values */

/* The last loop that can run needed node n, whatever is kept: it may be recomputed up to the last
 * loop that (transitively) needs it. KOILA_NONE: no loop runs it. */
static uint32_t find_last_run(const work_state *w, koila_node n)
{
    uint32_t last = w->home[n];
    if (last == KOILA_NONE)
        return KOILA_NONE;
    for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++) {
        if (w->made_whole[v] != KOILA_NONE && w->made_whole[v] > last)
            last = w->made_whole[v];
        for (const use *u = uses_of(w, v); u; u = next_use_of(w, u)) {
            uint32_t l = w->last_run[u->user];
            if (l == KOILA_NONE || !u->local)
                continue;
            if (sliced_in(w, v, l)) /* from there on it is sliced */
                l = w->made_whole[v];
            if (l > last)
                last = l;
        }
    }
    koila_assert(last < w->n_loops);
    return last;
}

/* Node n of `stage` may read whole values: updates until. */
static void see_readers(const work_state *w, koila_node n, uint32_t stage, uint32_t *until)
{
    for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end; u++) {
        const koila_value v = u->value;
        if (u->from == KOILA_NONE || !u->reads || (u->local && !sliced_in(w, v, w->last_run[n])))
            continue;
        if (until[v] == KOILA_NONE || until[v] < stage)
            until[v] = stage;
    }
}

/* The last stage that can read whole v. Stages are numbered as they will be emitted: the whole
 * stage of a level, then its loops. */
koila_status koila__find_whole_until(work_state *w)
{
    uint32_t *whole_stage = koila__arena_array(&w->tmp, w->n_levels, sizeof *whole_stage);
    uint32_t *loop_stage = koila__arena_array(&w->tmp, w->n_loops, sizeof *loop_stage);
    const uint32_t n_stages = w->n_levels + w->n_loops;
    w->ending_first = koila__arena_array(&w->tmp, n_stages, sizeof *w->ending_first);
    uint32_t *last_run = koila__arena_room(&w->tmp, ((size_t)w->n_nodes + 1) * sizeof *last_run);
    TRY_ALLOC(whole_stage && loop_stage && w->ending_first && last_run);
    w->loop_stage = loop_stage;
    w->last_run = last_run;
    for (uint32_t level = 0, j = 0, stage = 0; level < w->n_levels; level++) {
        whole_stage[level] = stage++;
        for (; j < w->n_loops && w->loops[j].level == level; j++)
            loop_stage[j] = stage++;
    }
    memset(w->whole_until, 0xff, w->n_values * sizeof *w->whole_until);
    memset(w->call_until, 0xff, w->n_values * sizeof *w->call_until);
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        w->last_run[n] = KOILA_NONE;
        if (w->runs[n] == RUNS_NEVER)
            continue;
        if (w->runs[n] == RUNS_ONCE) {
            see_readers(w, n, whole_stage[w->level[n]], w->call_until);
            continue;
        }
        w->last_run[n] = w->n_loops > 1 ? find_last_run(w, n) : w->home[n];
        if (w->last_run[n] != KOILA_NONE)
            see_readers(w, n, loop_stage[w->last_run[n]], w->whole_until);
    }
    for (uint32_t v = 0; v < w->n_values; v++) /* NONE + 1 == 0 */
        if (w->call_until[v] + 1 > w->whole_until[v] + 1)
            w->whole_until[v] = w->call_until[v];
    return KOILA_OK;
}

koila_value koila__other_term(const work_state *w, koila_value v)
{
    const koila_placement *x = &w->p->value[v];
    const use *u = uses_of(w, v);
    if (!u || !(w->rare[u->user] & ADDS) || w->runs[u->user] != RUNS_ONCE)
        return KOILA_NONE;
    const koila_meta_info *m = koila__value_meta(w->g, v);
    const bool is_sum = made_in_loop(w, v) && x->kind == KOILA_P && x->combine == KOILA_SUM &&
                        !koila__accumulates_wider(w->p, v);
    const bool is_call = koila__is_second_addend(w->p, v) && (w->any_again || w->n_loops);
    if (w->any_foreign || next_use_of(w, u) || w->is_result[v] || w->use[v] != KOILA_NONE ||
        (is_sum ? u->local : !is_call))
        return KOILA_NONE;
    const koila_sig_info *s = sig_of(w, u->user);
    const koila_value first = input_of(w, u->user, 0), second = input_of(w, u->user, 1);
    const bool are_alike = s->inputs[0] == s->outputs[0] && s->inputs[1] == s->outputs[0];
    if (first == second || !are_alike || !koila_meta_is_dense(m))
        return KOILA_NONE;
    return v == first ? second : first;
}

/* The storage in which v, of needed node n, is there whole, or NULL. loop_of[level]: the first loop
 * that is not of an earlier level. */
static whole_value *find_whole(work_state *w, koila_value v, koila_node n, const uint32_t *loop_of)
{
    const bool in_loop = w->runs[n] == RUNS_IN_LOOP;
    whole_value x = { .begin = in_loop ? w->made_whole[v] : loop_of[w->level[n]],
                      .last_call = KOILA_NONE };
    if (!in_loop && w->aliases[n] && !sig_of(w, n)->n_writes)
        w->whole_of[v] = w->whole_of[input_of(w, n, 0)];
    else if (!in_loop && !sig_of(w, n)->n_writes && koila__other_term(w, v) == KOILA_NONE)
        x.n_bytes = koila__value_meta(w->g, v)->n_storage_bytes;
    else if (in_loop && x.begin != KOILA_NONE && !w->is_result[v] && w->use[v] == KOILA_NONE &&
             koila__other_term(w, v) == KOILA_NONE)
        x.n_bytes = koila__value_meta(w->g, v)->n_bytes;
    if (x.n_bytes) { /* else a result of a loop, or perhaps the storage of another value */
        w->wholes[w->n_wholes++] = x;
        w->whole_of[v] = w->n_wholes;
    }
    return w->whole_of[v] ? &w->wholes[w->whole_of[v] - 1] : NULL;
}

/* A needed node reads a value in storage x whole, or in a loop. */
static void see_reader(const work_state *w, whole_value *x, koila_node user,
                       const uint32_t *loop_of)
{
    if (w->runs[user] != RUNS_ONCE) {
        x->is_read_in_loop = true;
        return;
    }
    const koila_node last = x->last_call;
    if (last == KOILA_NONE || w->level[user] > w->level[last] ||
        (w->level[user] == w->level[last] && user > last))
        x->last_call = user;
    if (loop_of[w->level[user]] > x->end)
        x->end = loop_of[w->level[user]];
}

/* The storage that result v of node n, outside loops, is alone in, or NULL. */
static whole_value *own_whole(const work_state *w, koila_value v, koila_node n)
{
    const bool is_own = !w->aliases[n] && !sig_of(w, n)->n_writes && w->whole_of[v];
    return is_own ? &w->wholes[w->whole_of[v] - 1] : NULL;
}

/* Node n, which runs before loop j, outside loops, ends: so do storages that nothing reads any
 * more. Returns their bytes. */
static uint64_t end_wholes(work_state *w, koila_node n, uint32_t j)
{
    uint64_t sum = 0;
    for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++) {
        const whole_value *x = own_whole(w, v, n);
        if (x && x->last_call == KOILA_NONE && !x->is_read_in_loop && !x->is_result)
            sum += x->n_bytes;
    }
    for (uint32_t at = w->span[n].in; at < w->span[n].in_end; at++) {
        const uint32_t of = w->whole_of[w->uses[at].value];
        whole_value *x = of ? &w->wholes[of - 1] : NULL;
        if (!x || x->last_call != n || x->is_result || (x->begin == j && x->is_read_in_loop))
            continue;
        x->last_call = KOILA_NONE; /* counted */
        sum += x->n_bytes;
    }
    return sum;
}

/* Finds call_peak. A call that may make its results in the memory of what it is given has them
 * when it ends. */
static void find_call_peaks(work_state *w, const uint32_t *loop_of)
{
    uint64_t now = 0;
    for (uint32_t i = 0; i < w->n_wholes; i++)
        if (w->wholes[i].begin < w->wholes[i].end)
            w->ending[w->wholes[i].end] += w->wholes[i].n_bytes;
    for (uint32_t level = 0; level < w->n_levels; level++) {
        const uint32_t j = loop_of[level];
        if (!level || j != loop_of[level - 1])
            now = w->ending[j];
        for (koila_node n = w->whole_of_level[level]; n != KOILA_NONE; n = w->whole_next[n]) {
            const bool frees = w->rare[n] & (IS_MODULE_BACKWARD | ADDS | WRITES);
            uint64_t made = 0;
            for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++)
                made += own_whole(w, v, n) ? own_whole(w, v, n)->n_bytes : 0;
            if (now + (frees ? 0 : made) > w->call_peak[j])
                w->call_peak[j] = now + (frees ? 0 : made);
            now += made;
            now -= end_wholes(w, n, j);
        }
    }
}

/* Finds the storages that hold whole values between loops. */
static koila_status find_wholes(work_state *w)
{
    uint32_t *loop_of = koila__arena_array(&w->spare, w->n_levels, sizeof *loop_of);
    w->wholes = koila__arena_room(&w->tmp, (w->n_values + 1) * sizeof *w->wholes);
    w->held_change = koila__arena_array(&w->tmp, w->n_loops + 1, sizeof *w->held_change);
    w->call_peak = koila__arena_array(&w->tmp, w->n_loops + 1, sizeof *w->call_peak);
    w->ending = koila__arena_array(&w->tmp, w->n_loops + 1, sizeof *w->ending);
    TRY_ALLOC(loop_of && w->wholes && w->held_change && w->call_peak && w->ending);
    if (w->n_loops < 2) /* nothing is held between loops */
        return KOILA_OK;
    for (uint32_t level = 0, j = 0; level < w->n_levels; level++) {
        for (; j < w->n_loops && w->loops[j].level < level;)
            j++;
        loop_of[level] = j;
    }
    for (koila_value v = 0; v < w->n_values; v++) {
        const koila_node n = producer(w, v);
        if (n == KOILA_NONE || w->runs[n] == RUNS_NEVER || !exists(w, v))
            continue;
        whole_value *x = find_whole(w, v, n, loop_of);
        for (const use *u = uses_of(w, v); x && u; u = next_use_of(w, u))
            see_reader(w, x, u->user, loop_of);
        if (x && w->is_result[v]) {
            x->end = w->n_loops;
            x->is_result = true;
        }
    }
    find_call_peaks(w, loop_of);
    return KOILA_OK;
}

/* ---- all of it */

/* Makes the arrays of fixed size. They are zeroed, except chains, which are empty, and arrays that
 * koila__forget_demand() and forget_emission() set before their first use. */
static koila_status make_arrays(work_state *w)
{
    const uint32_t N = w->n_nodes + 1;
    const uint32_t V = w->n_values + 1;
    const uint32_t I = w->g->inputs.n + 1;
#define MAKE_IN(arena, field, n)                                                                   \
    TRY_ALLOC(w->field = koila__arena_array(&w->arena, (n), sizeof *w->field))
#define MAKE(field, n) MAKE_IN(tmp, field, n)
#define MAKE_UNSET(field, n)                                                                       \
    TRY_ALLOC(w->field = koila__arena_room(&w->tmp, (size_t)(n) * sizeof *w->field))
#define MAKE_FOR_PREPARE(field, n) MAKE_IN(spare, field, n) /* until koila__loops_find() ends */
    MAKE(needed, N);
    MAKE_UNSET(runs, N);
    MAKE_UNSET(rare, N);
    MAKE_UNSET(work, N);
    MAKE(level, N);
    MAKE_FOR_PREPARE(latest, N);
    MAKE(is_expensive, N);
    MAKE(is_start, N);
    MAKE_FOR_PREPARE(is_keepable, V);
    MAKE(is_result, V);
    MAKE_FOR_PREPARE(is_barrier, V);
    MAKE_UNSET(made_whole, V);
    MAKE_UNSET(span, N);
    MAKE_UNSET(uses, I);
    MAKE_UNSET(first_use, V);
    MAKE(is_viewed, N);
    MAKE(is_mere_view, N);
    MAKE(aliases, N);
    MAKE_UNSET(home, N);
    MAKE_UNSET(use, V);
    MAKE_UNSET(kept, V);
    MAKE_UNSET(kept_next, V);
    MAKE_UNSET(given_up, V);
    MAKE_UNSET(in_loop, N);
    MAKE_UNSET(order_bits, N / 64 + 1);
    MAKE(keeps_bits, N / 64 + 1);
    MAKE_UNSET(stack, N);
    MAKE(mark, N);
    MAKE_UNSET(whole_next, N);
    MAKE_UNSET(target_next, V);
    MAKE_UNSET(ending_next, V);
    MAKE_UNSET(last_use, V);
    MAKE_UNSET(sliced, V);
    MAKE_UNSET(whole_until, V);
    MAKE_UNSET(call_until, V);
    MAKE_UNSET(whole_seen, V);
    MAKE_UNSET(whole_last, V);
    MAKE_UNSET(whole, V);
    MAKE_UNSET(slice, V);
    MAKE(whole_of, V);
    MAKE_UNSET(read_until, V);
    MAKE_UNSET(first_term, V);
    if (w->p->addends) {
        MAKE_UNSET(n_addends, V);
        MAKE_UNSET(n_addends_left, V);
    }
    memset(w->first_use, 0xff, V * sizeof *w->first_use);
    memset(w->use, 0xff, V * sizeof *w->use);
    return KOILA_OK;
}

koila_status koila__loops_find(work_state *w, const koila_value *targets, uint32_t n_targets)
{
    if (w->n_values >= KOILA__EVENT_VALUES || w->n_nodes >= KOILA__EVENT_VALUES)
        return KOILA_UNSUPPORTED;
    KOILA_TRY(make_arrays(w));
    find_needed(w, targets, n_targets);
    KOILA_TRY(find_costs(w));
    find_levels(w);
    KOILA_TRY(make_loops(w));
    KOILA_TRY(assign_loops(w));
    find_keepers(w);
    KOILA_TRY(chain_calls(w));
    KOILA_TRY(find_wholes(w));
    /* scratch memory of the preparation: the first schedule reuses it */
    koila__arena_empty(&w->spare);
    w->latest = w->loop_of = w->exec = NULL;
    w->cost = NULL;
    w->is_barrier = w->is_keepable = NULL;
    return KOILA_OK;
}
