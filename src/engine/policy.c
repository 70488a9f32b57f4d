/* policy.c — what a keep policy keeps, what each loop runs then, and the work of that, without
 * instructions.
 *
 * A value that two loops need is kept from the first or recomputed in the second. A walk over the
 * loops in order decides which, by two numbers (koila__keep): results of expensive operators are
 * kept over a gap of at most `horizon` loops, or for good when they cross a checkpoint. horizon =
 * infinity keeps everything expensive; 0 recomputes everything (a contrastive loss then is
 * GradCache); horizon = spacing + 2 is the classic walk: forward keeps only the frontier and the
 * checkpoints, the first backward loop that enters a segment recomputes it from its checkpoint and
 * keeps it for the loops that follow (Chen et al. 2016, with sqrt(n) segments). */
#include "engine/schedule_state.h"

#include "engine/plan_costs.h"
#include "graph/table.h"

#include <math.h>

/* The first loop after j that needs v locally, or KOILA_NONE. */
static uint32_t next_use(const work_state *w, koila_value v, uint32_t j)
{
    return next_loop(w, w->use[v], j + 1);
}

/* Is v worth keeping after loop j? */
bool koila__keeps(const work_state *w, koila_value v, uint32_t j)
{
    if (w->use[v] == KOILA_NONE || !(w->keep.horizon | w->keep.spacing))
        return false;
    const uint32_t u = next_use(w, v, j);
    if (u == KOILA_NONE)
        return false;
    if (w->is_start[producer(w, v)])
        return true;
    if (w->keep.drops_forward && !w->p->node[producer(w, v)].is_backward)
        return false;
    if (u - j <= w->keep.horizon)
        return true;
    if (!w->keep.spacing)
        return false;
    /* does it cross a checkpoint on its way forward: the chain of short gaps that starts at its
     * home */
    uint32_t last = w->home[producer(w, v)];
    for (uint32_t next = next_use(w, v, last); next != KOILA_NONE && next - last <= w->keep.horizon;
         next = next_use(w, v, last))
        last = next;
    const uint32_t home = w->home[producer(w, v)];
    return last / w->keep.spacing > home / w->keep.spacing;
}

/* v stays kept after loop j, at least until its next use: the decision can only change there. */
void koila__keep_until_next(work_state *w, koila_value v, uint32_t j)
{
    const uint32_t u = next_use(w, v, j);
    koila_assert(u != KOILA_NONE && u > j);
    w->kept[v] = true;
    w->kept_next[v] = w->kept_first[u];
    w->kept_first[u] = v;
}

/* Finds the nodes that loop j runs: from its targets back to leaves, whole values and kept pieces.
 */
koila__demanded koila__find_demand(work_state *w, uint32_t j, double *work)
{
    koila__demanded found = { .lo = KOILA_NONE };
    const use *const uses = w->uses;
    const span *const spans = w->span;
    uint32_t *const in_loop = w->in_loop;
    uint32_t top = 0;
    double sum = *work;
#define ENTER(node_)                                                                               \
    do {                                                                                           \
        const koila_node q_ = (node_);                                                             \
        if (in_loop[q_] != j + 1) {                                                                \
            in_loop[q_] = j + 1;                                                                   \
            w->order_bits[q_ >> 6] |= (uint64_t)1 << (q_ & 63);                                    \
            koila_assert(top < w->n_nodes);                                                        \
            w->stack[top++] = q_;                                                                  \
        }                                                                                          \
    } while (0)
    for (koila_value v = w->target_first[j]; v != KOILA_NONE; v = w->target_next[v])
        ENTER(producer(w, v));
    while (top) {
        const koila_node n = w->stack[--top];
        const span at = spans[n];
        if (n < found.lo)
            found.lo = n;
        if (n > found.hi)
            found.hi = n;
        sum += work_of(w, n);
        found.n_instrs += 1 + (at.out_end - at.out == 1);
        for (const use *u = uses + at.in, *end = uses + at.in_end; u < end; u++)
            if (!u->local || sliced_in(w, u->value, j))
                w->read_until[u->value] = u->reads ? j + 1 : w->read_until[u->value];
            else if (in_loop[u->from] != j + 1 && !w->kept[u->value])
                ENTER(u->from);
    }
#undef ENTER
    *work = sum;
    return found;
}

void koila__forget_demand(work_state *w)
{
    const uint32_t N = w->n_nodes + 1;
    const uint32_t V = w->n_values + 1;
    memset(w->kept, 0, V * sizeof *w->kept);
    memset(w->in_loop, 0, N * sizeof *w->in_loop);
    memset(w->order_bits, 0, (N / 64 + 1) * sizeof *w->order_bits);
    memset(w->kept_first, 0xff, w->n_loops * sizeof *w->kept_first);
    memset(w->read_until, 0, V * sizeof *w->read_until);
}

uint64_t koila__max_emitted(const work_state *w)
{
    const uint64_t most = w->keep.max_instrs ? w->keep.max_instrs : KOILA_COST_MAX_INSTRS;
    return most * w->n_needed + 4096;
}

/* ---- work and bytes without instructions */

/* Each result is followed through aliases back to the node that made its storage. Of the values on
 * the way one stays: whole, or collected. Each such node counts once. */
uint64_t koila__scheduler_results_bytes(koila__scheduler *w)
{
    uint64_t sum = 0;
    w->epoch++;
    for (koila_value v = 0; v < w->n_values; v++) {
        if (!w->is_result[v] || !exists(w, v) || koila__adds_on(w->p, v))
            continue;
        koila_value x = v;
        koila_node n = producer(w, x);
        uint64_t least = koila__value_meta(w->g, v)->n_bytes;
        for (; n != KOILA_NONE && !sig_of(w, n)->n_writes && w->aliases[n]; n = producer(w, x)) {
            x = input_of(w, n, 0);
            if (koila__value_meta(w->g, x)->n_bytes < least)
                least = koila__value_meta(w->g, x)->n_bytes;
        }
        /* a leaf, or perhaps written in place */
        if (n == KOILA_NONE || sig_of(w, n)->n_writes || w->mark[n] == w->epoch)
            continue;
        w->mark[n] = w->epoch;
        if (koila__value_meta(w->g, x)->n_storage_bytes < least)
            least = koila__value_meta(w->g, x)->n_storage_bytes;
        sum += least;
    }
    return sum;
}

koila__kept koila__scheduler_kept(const koila__scheduler *w) { return w->work_kept; }

/* Bytes of kept v in all slices; 0 when it may share its storage. */
static uint64_t kept_bytes(const koila__scheduler *w, koila_value v)
{
    const koila_node n = producer(w, v);
    return w->aliases[n] || sig_of(w, n)->n_writes ? 0 : koila__value_meta(w->g, v)->n_bytes;
}

/* So much is held at some moment of the policy, of it so much by calls outside loops alone. */
static void note_held(koila__scheduler *w, uint64_t n_bytes, uint64_t of_calls)
{
    if (n_bytes <= w->work_kept.n_bytes)
        return;
    w->work_kept.n_bytes = n_bytes;
    w->work_kept.of_calls = of_calls;
}

/* The calls before loop j run; `now` is what the loop before it leaves. */
static void note_calls(koila__scheduler *w, uint32_t j, uint64_t now)
{
    note_held(w, now - w->ending[j] + w->call_peak[j], w->call_peak[j]);
}

/* v is kept after loop j. */
static void note_kept(koila__scheduler *w, koila_value v, uint32_t j)
{
    const uint64_t mixed = (w->work_kept.choices ^ ((uint64_t)v << 32 | j)) * 0x9e3779b97f4a7c15u;
    w->work_kept.choices = mixed ^ mixed >> 29;
}

/* Like emit_loop(), but emits nothing. *n_emitted: a lower bound of instructions: each run, and the
 * end of each result. *n_held: bytes of pieces and results. */
static void work_of_loop(koila__scheduler *w, uint32_t j, double *work, uint64_t *n_emitted,
                         uint64_t *n_held)
{
    const uint64_t held_before = *n_held;
    const koila__demanded found = koila__find_demand(w, j, work);
    *n_emitted += found.n_instrs;
    for (uint32_t k = found.lo >> 6; found.lo <= found.hi && k <= found.hi >> 6; k++) {
        for (uint64_t bits = w->order_bits[k] & w->keeps_bits[k]; bits; bits &= bits - 1) {
            const koila_node n = k * 64 + (uint32_t)__builtin_ctzll(bits);
            for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++) {
                if (w->kept[v] || !koila__keeps(w, v, j))
                    continue;
                koila__keep_until_next(w, v, j);
                note_kept(w, v, j);
                w->work_kept.any = true;
                w->work_kept.is_sure &= kept_bytes(w, v) > 0;
                *n_held += kept_bytes(w, v);
            }
        }
        w->order_bits[k] = 0;
    }
    for (koila_value v = w->kept_first[j], next; v != KOILA_NONE; v = next) {
        next = w->kept_next[v];
        w->kept[v] = false;
        if (koila__keeps(w, v, j)) {
            koila__keep_until_next(w, v, j);
            note_kept(w, v, j);
        } else {
            koila_assert(*n_held >= kept_bytes(w, v));
            *n_held -= kept_bytes(w, v);
        }
    }
    for (koila_value v = w->target_first[j]; v != KOILA_NONE; v = w->target_next[v])
        /* a piece's storage may become the whole value */
        if (w->is_result[v] && w->use[v] == KOILA_NONE && !koila__adds_on(w->p, v))
            *n_held += koila__value_meta(w->g, v)->n_bytes;
    note_held(w, *n_held, 0);
    w->held_change[j] += *n_held - held_before;
}

/* What a policy holds at the end of a loop is a piece, a result or a whole value; those that a loop
 * reads are there until then. Calls between two loops find all that, but what the loop before was
 * the last to read. */
static void count_whole(koila__scheduler *w)
{
    uint64_t now = 0;
    uint64_t *const change = w->held_change; /* modulo 2^64 */
    memset(w->ending, 0, (w->n_loops + 1) * sizeof *w->ending);
    for (uint32_t i = 0; i < w->n_wholes; i++)
        w->wholes[i].until = w->wholes[i].end;
    for (koila_value v = 0; v < w->n_values; v++) {
        whole_value *x = w->whole_of[v] ? &w->wholes[w->whole_of[v] - 1] : NULL;
        if (x && w->read_until[v] > x->until)
            x->until = w->read_until[v];
    }
    for (uint32_t i = 0; i < w->n_wholes; i++) {
        const whole_value *x = &w->wholes[i];
        if (x->begin >= x->until)
            continue;
        change[x->begin] += x->n_bytes;
        change[x->until] -= x->n_bytes;
        w->ending[x->until] += x->n_bytes;
        if (x->begin < x->end && x->end < x->until) /* call_peak counts it */
            w->ending[x->end] += x->n_bytes;
    }
    for (uint32_t j = 0; j < w->n_loops; j++) {
        note_calls(w, j, now);
        now += change[j];
        note_held(w, now, 0);
    }
    note_calls(w, w->n_loops, now);
}

/* The work of the policy, with w->read_until; where that is known to be too much, only a part. */
static double work_of_policy(koila__scheduler *w, bool *is_all)
{
    double work = 0;
    uint64_t n_emitted = 0, n_held = 0;
    *is_all = false;
    w->work_kept = (koila__kept){ .is_sure = true };
    koila__forget_demand(w);
    memset(w->held_change, 0, (w->n_loops + 1) * sizeof *w->held_change);
    const uint64_t most = koila__max_emitted(w);
    /* in the order of make_stages(): sums of doubles depend on the order */
    for (uint32_t level = 0, j = 0; level < w->n_levels; level++) {
        for (koila_node n = w->whole_of_level[level]; n != KOILA_NONE; n = w->whole_next[n])
            work += work_of(w, n);
        for (; j < w->n_loops && w->loops[j].level == level; j++) {
            work_of_loop(w, j, &work, &n_emitted, &n_held);
            if (is_too_much(w, work))
                return work;
            if (n_emitted > most)
                return INFINITY;
        }
    }
    count_whole(w);
    *is_all = true;
    return work;
}

double koila__schedule_work(koila__scheduler *w, koila__keep keep)
{
    uint32_t *const usual = w->read_until;
    uint32_t *own = NULL; /* for the schedule of the policy, which asks for it */
    bool is_all;
    w->keep = keep;
    if (w->n_loops > 1 && w->n_reads < MOST_READS)
        own = koila__arena_room(&w->tmp, ((size_t)w->n_values + 1) * sizeof *own);
    w->read_until = own ? own : usual;
    const double work = work_of_policy(w, &is_all);
    w->read_until = usual;
    if (own && is_all)
        w->reads[w->n_reads++] = (whole_reads){ keep, own };
    return work;
}
