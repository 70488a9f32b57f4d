/* schedule.c — demands become loops.
 *
 * An edge that needs a whole value of something sharded or partial is a *barrier*. The level of a
 * node is the largest number of barriers on a path to it; the nodes of one level and axis can share
 * one loop over the slices. Loops are demand-driven: loop j makes its *targets* (results, and
 * values that a barrier needs), and runs the nodes that those need, in recorded order. A result
 * that no later loop needs goes to the loop where it adds the least work. So all gradients and the
 * loss of an ordinary step share the last loop, while a weight gradient in a net of barriers
 * (BatchNorm) is made in the loop that has its inputs.
 *
 * A value that two loops need is kept from the first or recomputed in the second. A walk over the
 * loops in order decides which, by two numbers (koila__keep): results of expensive operators are
 * kept over a gap of at most `horizon` loops, or for good when they cross a checkpoint. horizon =
 * infinity keeps everything expensive; 0 recomputes everything (a contrastive loss then is
 * GradCache); horizon = spacing + 2 is the classic walk: forward keeps only the frontier and the
 * checkpoints, the first backward loop that enters a segment recomputes it from its checkpoint and
 * keeps it for the loops that follow (Chen et al. 2016, with sqrt(n) segments).
 *
 * The order inside a loop is the recorded order, so at an in-place write the old version is dead
 * unless a later node really needs it. One exception: a view that is only a target (the `t` of a
 * weight gradient, recorded at the end of backward) runs right behind its producer.
 *
 * A sharded value that an earlier loop made whole is sliced from the whole one and never
 * recomputed. So the demand search stops there, as it does at kept pieces.
 *
 * Time: everything is a pass over nodes and uses, or over the loops that each node runs in (64 to a
 * cell), or over the instructions. A policy that recomputes so much that its instructions grow out
 * of proportion (KOILA_COST_MAX_INSTRS) is refused.
 *
 * Note [Steal]. A write happens in place when the base dies there, is the only value alive on its
 * storage (or on its part of it, when unsafe_split cut the storage and no uncut value is alive),
 * and the storage belongs to this scope: it is no piece, no leaf, no accumulator and no slice of a
 * whole value. Any other write goes to a copy, which is always right. A write that overwrites
 * without reading does not use its base: its result is new memory, and the base may have been freed
 * long before.
 *
 * Note [Shared terms]. A sum whose other term is absent (Note [Pieces] in place.h) is the same
 * tensor as its term. The bytes are planned as if it were a copy; but neither storage is written in
 * place any more, or handed to an accumulator.
 *
 * Equation: alive[r] == number of values here[v] with root[v] == r. koila_plan_check() replays the
 * instructions and checks that every local value is made before it is used and freed exactly once
 * per slice. */
#include "engine/schedule.h"

#include "engine/cost.h"
#include "engine/plan_costs.h"
#include "engine/share.h"
#include "graph/table.h"

#include <math.h>

typedef VEC(koila_instr) instr_vec;
typedef VEC(koila__event) event_vec;

typedef struct loop_info {
    uint32_t level;
    uint16_t axis;
} loop_info;

/* One use of a value: an entry of the flat inputs. Those of node n are span[n].in ..
 * span[n].in_end. */
typedef struct use {
    koila_value value;
    koila_node from, user; /* the producer, or KOILA_NONE; the node with this input */
    /* the next use of the value by a needed node that reads it, or KOILA_NONE */
    uint32_t next;
    bool reads, local; /* see koila__reads(); find_local(): only what is read */
    bool is_whole;     /* reads the whole value as it is: no slice is needed */
} use;

typedef struct span {
    uint32_t in, in_end, out, out_end; /* of a node: its uses, its results */
} span;

/* A set of loops: 64 to a cell, cells in order, empty ones left out; a set is its first cell or
 * KOILA_NONE. Most nodes run in one loop forward and one backward. */
typedef uint32_t loop_set;
typedef struct cell {
    uint64_t bits;
    uint32_t word, next;
} cell;

/* Who owns a storage; decides what happens when the last value on it is dead. */
typedef enum owner {
    /* not owned here: a leaf, a whole value that is viewed, a piece just kept */
    OWNER_NONE,
    OWNER_SCOPE, /* owned by this scope alone: may be written in place */
    OWNER_PIECE, /* a kept piece in its last use: released when the slice is complete */
    /* a copied slice of a whole value; a slice of all rows is no copy */
    OWNER_SLICE,
    OWNER_CUT,       /* a slice of several blocks: always a copy */
    OWNER_COLLECTED, /* whole, made slice by slice: dense */
} owner;

typedef struct sig_cost {
    koila__cost cost;
    double n_bytes; /* of the results */
    bool known, is_view;
} sig_cost;

typedef struct life {
    /* its storage, named by the value that allocated it, or see pass_on() */
    koila_value root;
    uint32_t alive;   /* as root: values alive on that storage */
    koila_value made; /* as root: the value that allocated it, by which events name it */
    /* the part of the storage it may touch: the root for all of it, else the unsafe_split result
     * from which it comes */
    koila_value region;
    /* as region: values alive there; sum over the regions of a root == alive of the root */
    uint32_t touching;
    uint8_t owned;  /* as root: owner */
    uint8_t shared; /* as root: Note [Shared terms] */
    uint8_t here;   /* alive in this scope */
} life;
typedef life *scope; /* [value] */

typedef struct slice_of {
    koila_node user;
    uint32_t input;
} slice_of;

struct koila__scheduler {
    const koila__placed *p;
    const koila_graph *g;
    koila_allocator mem;
    koila__arena tmp;
    koila__arena spare; /* memory of a recycled schedule, for the next one */
    koila__keep keep;
    uint32_t n_nodes, n_values;

    bool *needed;    /* [node] */
    uint32_t *level; /* [node] */
    uint32_t n_levels;
    uint32_t *natural;    /* [node] loop of its level and axis; KOILA_NONE outside loops */
    sig_cost *cost;       /* [signature]: calls repeat, so each is computed once */
    bool *is_expensive;   /* [node] its results are worth keeping */
    bool *is_start;       /* [node] calls that run again begin with its results */
    bool *is_keepable;    /* [value] */
    bool *is_result;      /* [value] final target */
    bool *is_barrier;     /* [value] some use needs it whole */
    uint32_t *made_whole; /* [value] loop that makes it whole, or KOILA_NONE */
    span *span;           /* [node] */
    use *uses;            /* [flat input] */
    uint32_t *first_use;  /* [value] chain of its uses */
    bool *is_viewed;      /* [node] a result is the only input of a view */
    bool *is_mere_view;   /* [node] such a view */
    bool *aliases;        /* [node] its fresh results share the storage of its first input */

    loop_info *loops;
    uint32_t n_loops;
    uint32_t *home;  /* [node] first loop that runs it, or KOILA_NONE */
    VEC(cell) cells; /* of all sets */
    loop_set *exec;  /* [node] loops that run it when exactly the expensive results are kept */
    loop_set *use;   /* [value] keepable only, else KOILA_NONE: loops that read it locally */
    bool no_memory;  /* a set could not grow */

    bool *kept; /* [value] its pieces, one per slice, are held now */
    /* [loop], [value]: kept pieces by the loop that uses them next */
    koila_value *kept_first, *kept_next;
    bool *given_up;    /* [value] its piece was fetched for the last time in the current loop */
    uint32_t *in_loop; /* [node] == loop + 1: runs in that loop */
    /* [node / 64] in_loop of the current loop as bits, for reading in order; zero between loops */
    uint64_t *order_bits;
    uint32_t *stack; /* DFS; then the order of the current loop */
    uint32_t *mark;  /* [node] epoch */
    uint32_t epoch;
    /* nodes outside loops by level: chains in recorded order */
    uint32_t *whole_of_level, *whole_next;
    uint32_t *target_first, *target_next; /* [loop], [value]: what each loop makes whole */
    uint32_t *ending_first, *ending_next; /* [stage], [value]: whole values by whole_last */

    /* emission */
    /* [value] instruction number of its last use in the current stage's emission order */
    uint32_t *last_use;
    uint32_t *last_run; /* [node] last loop that can possibly run it, or KOILA_NONE */
    /* which values are alive on which storage: whole values; values of the running slice */
    scope whole, slice;
    scope s; /* the scope of the current emission */
    /* [value] the use for which a whole value was sliced; user KOILA_NONE: not a slice */
    slice_of *sliced;
    uint32_t *whole_until; /* [value] last stage that may read whole v, whatever is kept */
    uint32_t *whole_seen;  /* [value] last stage so far that reads it, in the current emission */
    uint32_t *whole_last;  /* [value] last stage that reads it, for the current emission */
    uint32_t stage;        /* that is emitted */
    instr_vec instrs;
    event_vec events;
    uint64_t n_emitted, max_emitted;
    uint32_t n_keeps;
    bool any_wide;         /* of the stage being emitted */
    koila__kept work_kept; /* koila__scheduler_kept() */
};

/* the name where it is written: while it is filled, and while a policy is scheduled */
typedef koila__scheduler work_state;

#define TRY_ALLOC(p)                                                                               \
    do {                                                                                           \
        if (!(p))                                                                                  \
            return KOILA_NO_MEMORY;                                                                \
    } while (0)

static const koila_sig_info *sig_of(const work_state *w, koila_node n)
{
    return koila__node_sig(w->g, n);
}
static double work_of(const work_state *w, koila_node n)
{
    return w->cost[w->g->nodes.at[n].sig].cost.work;
}
static bool exists(const work_state *w, koila_value v)
{
    return w->g->values.at[v].meta != KOILA_NONE;
}
static koila_node producer(const work_state *w, koila_value v) { return w->g->values.at[v].node; }
static bool made_in_loop(const work_state *w, koila_value v)
{
    const koila_node n = producer(w, v);
    return n != KOILA_NONE && w->p->node[n].in_loop;
}
static koila_placement need_of(const work_state *w, koila_node n, uint32_t i)
{
    return w->p->need[w->g->nodes.at[n].first_input + i];
}
static koila_value input_of(const work_state *w, koila_node n, uint32_t i)
{
    return w->uses[w->span[n].in + i].value;
}

/* May the operator's results be its input, or views of it? */
static bool maybe_alias(const koila_table *t, koila_op op)
{
    return (t->ops.at[op].flags & KOILA_OP_VIEW) || (t->ops.at[op].facts & KOILA_FACT_MAY_ALIAS);
}

/* Does input i of node n read the local value (made by another node of the same loop)? If not, it
 * reads the whole value or a slice of it. */
static bool find_local(const work_state *w, koila_node n, uint32_t i, koila_value v)
{
    if (!w->p->node[n].in_loop || !made_in_loop(w, v) ||
        w->p->node[producer(w, v)].axis != w->p->node[n].axis)
        return false;
    const koila_placement need = need_of(w, n, i);
    return need.kind == KOILA_R ? w->p->value[v].kind == KOILA_R
                                : koila__placement_equal(need, w->p->value[v]);
}

static const use *use_at(const work_state *w, uint32_t at)
{
    return at == KOILA_NONE ? NULL : &w->uses[at];
}
static const use *uses_of(const work_state *w, koila_value v) { return use_at(w, w->first_use[v]); }
static const use *next_use_of(const work_state *w, const use *u) { return use_at(w, u->next); }

/* Is sharded v whole before loop j? Then the loop slices it instead of recomputing it. */
static bool sliced_in(const work_state *w, koila_value v, uint32_t j)
{
    /* KOILA_NONE is greater than every loop */
    return w->made_whole[v] < j && w->p->value[v].kind == KOILA_S;
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
            u->is_whole = !u->local && need_of(w, n, i).kind == KOILA_R;
            if (!w->needed[n] || !u->reads)
                continue;
            if (u->from != KOILA_NONE)
                w->needed[u->from] = true;
            u->next = w->first_use[v];
            w->first_use[v] = info->first_input + i;
        }
        if (!w->needed[n])
            continue;
        w->aliases[n] = aliases_input(w, n, sig);
        w->is_mere_view[n] = sig->n_inputs == 1 && !sig->n_writes &&
                             koila_op_flags(w->g->table, sig->op) & KOILA_OP_VIEW;
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

/* Finds level[n], and the values that some use needs whole. */
static void find_levels(work_state *w)
{
    w->n_levels = 1;
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        if (!w->needed[n])
            continue;
        uint32_t level = 0;
        for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end;
             u++) {
            if (u->from == KOILA_NONE || !u->reads)
                continue;
            uint32_t l = w->level[u->from];
            if (w->p->node[u->from].in_loop && !u->local) {
                l += 1;
                w->is_barrier[u->value] = true;
            }
            if (l > level)
                level = l;
        }
        w->level[n] = level;
        if (level + 1 > w->n_levels)
            w->n_levels = level + 1;
    }
    delay_again(w);
}

/* The nodes outside loops, by level. */
static koila_status chain_whole_nodes(work_state *w)
{
    w->whole_of_level = koila__arena_array(&w->tmp, w->n_levels, sizeof *w->whole_of_level);
    TRY_ALLOC(w->whole_of_level);
    memset(w->whole_of_level, 0xff, w->n_levels * sizeof *w->whole_of_level);
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        if (!w->needed[n] || w->p->node[n].in_loop)
            continue;
        w->whole_next[n] = w->whole_of_level[w->level[n]];
        w->whole_of_level[w->level[n]] = n;
    }
    return KOILA_OK;
}

/* A loop for each level and axis that has a node, in the order of levels. */
static koila_status make_loops(work_state *w)
{
    const uint32_t n_axes = w->g->axes.n ? w->g->axes.n : 1;
    const uint64_t n_slots = (uint64_t)w->n_levels * n_axes;
    uint32_t *loop_of = koila__arena_array(&w->spare, n_slots, sizeof *loop_of);
    TRY_ALLOC(loop_of);
#define SLOT(n) ((uint64_t)w->level[n] * n_axes + w->p->node[n].axis)
    for (uint32_t n = 0; n < w->n_nodes; n++)
        if (w->needed[n] && w->p->node[n].in_loop)
            loop_of[SLOT(n)] = 1;
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
    for (uint32_t n = 0; n < w->n_nodes; n++)
        w->natural[n] = w->needed[n] && w->p->node[n].in_loop ? loop_of[SLOT(n)] : KOILA_NONE;
#undef SLOT
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

/* A node is expensive if it is a dense kernel, or if recomputing it from the last values worth
 * keeping takes many passes over memory. The second case spares every loop from running a long
 * chain of cheap operators across many barriers from its beginning. */
static koila_status find_costs(work_state *w)
{
    const koila_table *t = w->g->table;
    /* work from values worth keeping to this node, counted as a tree */
    double *chain = koila__arena_array(&w->spare, w->n_nodes, sizeof *chain);
    w->cost = koila__arena_array(&w->tmp, t->sigs.n, sizeof *w->cost);
    TRY_ALLOC(chain && w->cost);
    keep_for_again(w);
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        const koila_sig_info *s = sig_of(w, n);
        sig_cost *c = &w->cost[w->g->nodes.at[n].sig];
        if (!c->known) {
            *c = (sig_cost){ koila__cost_of(t, s), 0, true,
                             koila_op_flags(t, s->op) & KOILA_OP_VIEW };
            for (uint32_t o = 0; o < s->n_outputs; o++)
                if (s->outputs[o] != KOILA_NONE)
                    c->n_bytes += (double)koila__meta(t, s->outputs[o])->n_bytes;
        }
        chain[n] = c->cost.work;
        for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end;
             u++)
            if (u->local)
                chain[n] += chain[u->from];
        w->is_expensive[n] |=
            c->cost.expensive ||
            (!c->is_view && (chain[n] > KOILA_COST_CHAIN * c->n_bytes || w->keep.cheap));
        if (w->is_expensive[n])
            chain[n] = 0;
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
static void add_loop(work_state *w, loop_set *set, uint32_t j)
{
    uint32_t before = KOILA_NONE;
    add_bits(w, set, &before, j >> 6, (uint64_t)1 << (j & 63));
}

/* The first loop of the set from `first` on, or KOILA_NONE. */
static uint32_t next_loop(const work_state *w, loop_set set, uint32_t first)
{
    for (; set != KOILA_NONE; set = w->cells.at[set].next) {
        const cell *c = &w->cells.at[set];
        uint64_t bits = c->bits;
        if (c->word < first >> 6)
            continue;
        if (c->word == first >> 6)
            bits &= UINT64_MAX << (first & 63);
        if (bits)
            return c->word * 64 + (uint32_t)__builtin_ctzll(bits);
    }
    return KOILA_NONE;
}

static bool runs_in(const work_state *w, koila_node n, uint32_t j)
{
    for (uint32_t at = w->exec[n]; at != KOILA_NONE && w->cells.at[at].word <= j >> 6;
         at = w->cells.at[at].next)
        if (w->cells.at[at].word == j >> 6)
            return w->cells.at[at].bits >> (j & 63) & 1;
    return false;
}

/* Values that may be kept at all: sliced results of expensive operators. */
static void find_keepable(work_state *w)
{
    for (uint32_t v = 0; v < w->n_values; v++) {
        const koila_node n = producer(w, v);
        w->is_keepable[v] =
            n != KOILA_NONE && w->is_expensive[n] && exists(w, v) &&
            w->p->value[v].kind == KOILA_S &&
            !(koila_op_flags(w->g->table, sig_of(w, n)->op) & (KOILA_OP_OPAQUE | KOILA_OP_VIEW));
    }
}

/* home[n]: the first loop that runs n, whatever is kept. It makes one of n's results whole, or is
 * the home of a consumer. */
static void find_homes(work_state *w)
{
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        w->home[n] = KOILA_NONE;
        if (!w->needed[n] || !w->p->node[n].in_loop)
            continue;
        for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++) {
            if (w->made_whole[v] < w->home[n])
                w->home[n] = w->made_whole[v];
            for (const use *u = uses_of(w, v); u; u = next_use_of(w, u))
                if (u->local && w->home[u->user] < w->home[n])
                    w->home[n] = w->home[u->user];
        }
    }
}

/* The work that making v adds to loop j, if everything worth keeping is kept from the loops before.
 * With `add` the loop then runs it. Negative when it exceeds `limit`. */
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
            return -1;
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

/* The loop for result v, which no loop waits for: the first that runs its producer anyway; else,
 * among its own loop, the first that runs all its inputs, and the last loops, the one where v adds
 * the least work. The choices are evaluated under a limit that doubles, so an evaluation costs
 * about as much as the work it finds; that work is then scheduled, so the total is linear. */
static uint32_t best_loop(work_state *w, koila_value v)
{
    const koila_node n = producer(w, v);
    const uint32_t first = w->natural[n];
    const uint32_t there = first_with(w, n, first);
    if (there != KOILA_NONE)
        return there;
    uint32_t choice[5], n_choices = 0, inputs = first;
    for (uint32_t j = w->n_loops; j-- > first && n_choices < 3 && w->n_loops - j <= 3;)
        if (j != first && w->loops[j].axis == w->p->node[n].axis)
            choice[n_choices++] = j;
    for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end;
         u < end && inputs != KOILA_NONE; u++)
        if (u->local)
            inputs = first_with(w, u->from, inputs);
    if (inputs != KOILA_NONE && inputs != first)
        choice[n_choices++] = inputs;
    choice[n_choices++] = first;
    for (double limit = 2 * (work_of(w, n) + 1); n_choices > 1; limit *= 2) {
        uint32_t best = KOILA_NONE;
        double best_work = 0;
        for (uint32_t k = n_choices; k-- > 0;) { /* among equals the earliest loop */
            const double work = demand(w, v, choice[k], false, limit);
            if (work >= 0 && (best == KOILA_NONE || work < best_work)) {
                best = choice[k];
                best_work = work;
            }
        }
        if (best != KOILA_NONE)
            return best;
    }
    return first;
}

static void assign_targets(work_state *w)
{
    for (uint32_t v = 0; v < w->n_values; v++)
        w->made_whole[v] = w->is_barrier[v] ? w->natural[producer(w, v)] : KOILA_NONE;
    find_homes(w);
    for (uint32_t v = 0; v < w->n_values; v++)
        if (w->is_barrier[v])
            demand(w, v, w->made_whole[v], true, 0);
    /* late results first: they decide which loops run the earlier ones */
    for (uint32_t v = w->n_values; v-- > 0;) {
        if (!w->is_result[v] || w->is_barrier[v] || !made_in_loop(w, v))
            continue;
        const uint32_t j = best_loop(w, v);
        demand(w, v, j, true, 0);
        w->made_whole[v] = j;
    }
    for (uint32_t v = w->n_values; v-- > 0;) {
        if (w->made_whole[v] == KOILA_NONE)
            continue;
        w->target_next[v] = w->target_first[w->made_whole[v]];
        w->target_first[w->made_whole[v]] = v;
    }
    find_homes(w);
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
            if (bits)
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

/* The first loop after j that needs v locally, or KOILA_NONE. */
static uint32_t next_use(const work_state *w, koila_value v, uint32_t j)
{
    return next_loop(w, w->use[v], j + 1);
}

/* Is v worth keeping after loop j? */
static bool keeps(const work_state *w, koila_value v, uint32_t j)
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

/* ---- emission */

/* Reserves room, so that the next emissions cannot fail. */
static bool room(work_state *w, uint32_t n_instrs, uint32_t n_events)
{
    return koila__vec_reserve(&w->mem, &w->instrs, n_instrs) &&
           koila__vec_reserve(&w->mem, &w->events, n_events);
}
static void emit(work_state *w, koila_instr i)
{
    koila_assert(w->instrs.n < w->instrs.cap);
    w->instrs.at[w->instrs.n++] = i;
}
static void event(work_state *w, koila__event_kind kind, uint32_t value)
{
    koila_assert(w->events.n < w->events.cap);
    w->events.at[w->events.n++] = (koila__event){ kind, value };
}

static void begin_value(scope s, koila_value v, owner o)
{
    koila_assert(!s[v].here && !s[v].alive);
    s[v].here = 1;
    s[v].root = v;
    s[v].alive = 1;
    s[v].made = v;
    s[v].owned = (uint8_t)o;
    s[v].shared = false;
    s[v].region = v;
    s[v].touching = 1;
}

/* v lives on the storage of `on`: on the same part of it, or (disjoint) on a part that no other
 * result of the same call touches. */
static void join_value(scope s, koila_value v, koila_value on, bool disjoint)
{
    koila_assert(!s[v].here && s[on].here);
    koila_assert(s[s[on].root].alive > 0);
    s[v].here = 1;
    s[v].root = s[on].root;
    s[s[v].root].alive++;
    s[v].region = disjoint ? v : s[on].region;
    if (disjoint)
        s[v].touching = 0;
    s[s[v].region].touching++;
}

/* Ends the value, and its storage if this was the last value on it. `own`: the event that ends a
 * storage owned by the scope. */
static void release_value(work_state *w, koila_value v, koila__event_kind own)
{
    const koila_value r = w->s[v].root;
    const koila_value made = w->s[r].made;
    koila_assert(w->s[v].here && w->s[r].alive > 0);
    koila_assert(w->s[w->s[v].region].touching > 0);
    w->s[v].here = 0;
    w->s[w->s[v].region].touching--;
    if (--w->s[r].alive)
        return;
    switch ((owner)w->s[r].owned) {
    case OWNER_NONE:
        return;
    case OWNER_SCOPE:
        event(w, own, made);
        return;
    case OWNER_PIECE:
        event(w, KOILA__KEPT_FREE, made);
        return;
    case OWNER_SLICE:
        event(w, KOILA__SLICE_FREE, made);
        return;
    case OWNER_CUT:
        event(w, KOILA__CUT_FREE, made);
        return;
    case OWNER_COLLECTED:
        event(w, KOILA__COLLECTED_FREE, made);
        return;
    }
}

/* v, a slice cut for node `user`, was freed and is cut again. Views of the first slice may still
 * live: its storage passes to one of them, so that v can name the next. They are all made between
 * the two cuts. */
static void pass_on(work_state *w, koila_value v, koila_node user)
{
    const life first = w->s[v];
    koila_value heir = KOILA_NONE;
    uint32_t n_left = first.alive;
    koila_assert(!first.here);
    w->s[v].alive = 0;
    /* a slice is never written in place: its parts need not be told apart any more */
    for (koila_value x = w->span[user].out; n_left; x++) {
        koila_assert(x < w->n_values);
        life *const l = &w->s[x];
        if (!l->here || l->root != v)
            continue;
        if (heir == KOILA_NONE) {
            koila_assert(!l->alive);
            heir = x;
        }
        l->root = heir;
        l->region = heir;
        n_left--;
    }
    if (heir == KOILA_NONE)
        return;
    w->s[heir].alive = first.alive;
    w->s[heir].touching = first.alive;
    w->s[heir].made = first.made;
    w->s[heir].owned = first.owned;
}

/* The owner of the storage of a slice of whole v. */
static owner slice_owner(const work_state *w, koila_value v, koila_placement placement)
{
    const koila_meta_info *m = koila__value_meta(w->g, v);
    const koila_share cut = koila__share_of(placement);
    if (koila_slice_form(m, cut, true) == KOILA_SLICE_COPY)
        return OWNER_CUT;
    return koila_slice_form(m, cut, false) == KOILA_SLICE_COPY ? OWNER_SLICE : OWNER_NONE;
}

/* Makes input i of node n of loop j, which is missing: a slice of a whole value, or a piece of an
 * earlier loop. */
static koila_status emit_input(work_state *w, koila_node n, uint32_t i, uint32_t j)
{
    const use *const u = &w->uses[w->span[n].in + i];
    const koila_value v = u->value;
    const bool local = u->local;
    const koila_placement need = need_of(w, n, i);
    if (w->s[v].here) {
        const slice_of cut = w->sliced[v];
        if (cut.user == KOILA_NONE ? local
                                   : koila__placement_equal(need_of(w, cut.user, cut.input), need))
            return KOILA_OK;
        /* one node needs two cuts of one value: there is room for one only */
        if (cut.user == n || cut.user == KOILA_NONE)
            return KOILA_UNSUPPORTED;
        /* cut along another dimension: cut again */
        emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
        release_value(w, v, KOILA__LOCAL_FREE);
        pass_on(w, v, cut.user);
    }
    const bool fetch = local && w->kept[v];
    koila_assert(fetch || need.kind == KOILA_S);
    /* was not made: a broken invariant */
    if (!fetch && local && !sliced_in(w, v, j))
        return KOILA_BAD_ARGUMENT;
    koila_instr in = { .kind = KOILA_DO_SLICE, .steal = (uint16_t)i, .id = v, .user = n };
    w->sliced[v] = (slice_of){ fetch ? KOILA_NONE : n, i };
    if (fetch) {
        in.kind = KOILA_DO_FETCH;
        in.flags = keeps(w, v, j) ? 0 : KOILA_INSTR_LAST;
        w->given_up[v] = in.flags;
        begin_value(w->s, v, in.flags ? OWNER_PIECE : OWNER_NONE);
    } else {
        const owner o = slice_owner(w, v, need);
        if (u->from != KOILA_NONE)
            w->whole_seen[v] = w->stage;
        begin_value(w->s, v, o);
        if (o == OWNER_SLICE)
            event(w, KOILA__SLICE_ALLOC, v);
        if (o == OWNER_CUT)
            event(w, KOILA__CUT_ALLOC, v);
    }
    emit(w, in);
    return KOILA_OK;
}

enum { MAX_STEALS = 16 }; /* bits of koila_instr.steal */
/* May write k of node n happen in place? See Note [Steal]. */
static bool steals(const work_state *w, koila_node n, uint32_t number, uint32_t k)
{
    const koila_sig_info *s = sig_of(w, n);
    const koila_value b = input_of(w, n, s->writes[k].input);
    const koila_value result = w->g->nodes.at[n].first_output + s->n_fresh + k;
    if (!koila__placement_equal(w->p->value[result], w->p->value[b]))
        return false;
    if (k >= MAX_STEALS || s->writes[k].overwrites || !w->s[b].here || w->last_use[b] != number ||
        w->sliced[b].user != KOILA_NONE)
        return false;
    const koila_value r = w->s[b].root;
    const koila_value part = w->s[b].region;
    if (w->s[r].shared)
        return false;
    if ((w->s[r].owned != OWNER_SCOPE && w->s[r].owned != OWNER_COLLECTED) ||
        w->s[part].touching != 1)
        return false;
    if (part == r ? w->s[r].alive != 1 : w->s[r].touching != 0)
        return false;
    for (uint32_t h = 0; h < k; h++)
        if (input_of(w, n, s->writes[h].input) == b)
            return false;
    return true;
}

/* v stays kept after loop j, at least until its next use: the decision can only change there. */
static void keep_until_next(work_state *w, koila_value v, uint32_t j)
{
    const uint32_t u = next_use(w, v, j);
    koila_assert(u != KOILA_NONE && u > j);
    w->kept[v] = true;
    w->kept_next[v] = w->kept_first[u];
    w->kept_first[u] = v;
}

/* Does nothing but v, whose last use is `number`, use its dense storage, so that it may be handed
 * on? */
static bool owns_storage(const work_state *w, koila_value v, uint32_t number)
{
    const life *root = &w->s[w->s[v].root];
    const koila_meta_info *m = koila__value_meta(w->g, v);
    const koila_meta_info *storage = koila__value_meta(w->g, root->made);
    return w->last_use[v] == number && root->owned == OWNER_SCOPE && root->alive == 1 &&
           !root->shared && m->n_bytes == storage->n_bytes && koila_meta_is_dense(m) &&
           koila_meta_is_dense(storage);
}

/* Collects a local result: into the whole value, and as a piece for later loops. `number` as in
 * emit_node. Returns the event that ends its storage. */
static koila__event_kind emit_collect(work_state *w, koila_value v, uint32_t number, uint32_t j)
{
    koila__event_kind how = KOILA__LOCAL_FREE;
    const koila_value r = w->s[v].root;
    koila_assert(w->s[v].here && w->s == w->slice);
    const koila_meta_info *m = koila__value_meta(w->g, v);
    const koila_value made = w->s[r].made;
    const koila_meta_info *storage = koila__value_meta(w->g, made);
    /* what is added to earlier rows' sum must not become the accumulator */
    const bool own = owns_storage(w, v, number) && !koila__adds_on(w->p, v);
    if (w->made_whole[v] == j) {
        const koila_placement x = w->p->value[v];
        const bool wide = koila_accumulator_dtype(m->dtype, koila__share_of(x), false) != m->dtype;
        if (x.kind == KOILA_S) {
            emit(w, (koila_instr){
                        .kind = KOILA_DO_PUT, .flags = own ? KOILA_INSTR_OWNED : 0, .id = v });
            event(w, own ? KOILA__PUT_OWNED : KOILA__PUT, v);
            if (own)
                how = KOILA__LOCAL_FREE_IF_CUT;
        } else {
            emit(w, (koila_instr){
                        .kind = KOILA_DO_ADD, .flags = own ? KOILA_INSTR_OWNED : 0, .id = v });
            koila__event_kind add = KOILA__ADD_CLONE;
            if (own) {
                add = wide ? KOILA__ADD_OWNED_WIDE : KOILA__ADD_OWNED;
                how = wide ? KOILA__LOCAL_FREE_IF_CUT : KOILA__LOCAL_FREE_LATER;
            }
            event(w, add, v);
            w->any_wide |= wide;
        }
        begin_value(w->whole, v, OWNER_COLLECTED);
    }
    if (!w->kept[v] && m->n_bytes == storage->n_bytes && keeps(w, v, j)) {
        emit(w, (koila_instr){ .kind = KOILA_DO_KEEP, .id = v });
        if (v != made) {
            event(w, KOILA__KEPT, v);
            event(w, KOILA__KEPT_FROM, made);
        }
        keep_until_next(w, v, j);
        w->n_keeps++;
        /* the piece owns the storage now: not freed with the slice, not written in place */
        w->s[r].owned = OWNER_NONE;
    }
    return how;
}

/* A node that is emitted: in loop j, or in a whole stage (KOILA_NONE). `number` is its place in the
 * emission order, which last_use refers to. */
typedef struct emission {
    koila_node n;
    uint32_t number;
    uint32_t j;
    const koila_sig_info *s;
    uint16_t steal;               /* bits: see koila_instr */
    koila__event_kind free_event; /* ends a storage of this scope */
} emission;

/* Makes the missing inputs that a node of a loop reads. */
static koila_status emit_inputs(work_state *w, const emission *x)
{
    const use *const in = w->uses + w->span[x->n].in;
    const use *const end = w->uses + w->span[x->n].in_end;
    for (const use *u = in; u < end; u++) {
        if (u->reads && u->is_whole && u->from != KOILA_NONE)
            w->whole_seen[u->value] = w->stage;
        if (!u->reads || u->is_whole)
            continue;
        const bool there =
            u->local && w->s[u->value].here && w->sliced[u->value].user == KOILA_NONE;
        if (!there) /* usually it is there */
            KOILA_TRY(emit_input(w, x->n, (uint32_t)(u - in), x->j));
    }
    return KOILA_OK;
}

/* Begins the results: on storage of their own, or on that of an input. */
static void begin_results(work_state *w, const emission *x)
{
    const koila_sig_info *s = x->s;
    const bool alias = w->aliases[x->n];
    for (uint32_t o = 0; o < s->n_outputs; o++) {
        const koila_value v = w->span[x->n].out + o;
        if (s->outputs[o] == KOILA_NONE)
            continue;
        const bool is_fresh = o < s->n_fresh;
        const uint32_t write = o - s->n_fresh;
        const bool stolen = !is_fresh && write < MAX_STEALS && x->steal >> write & 1;
        const bool of_input = is_fresh && alias;
        w->sliced[v].user = KOILA_NONE;
        if (stolen || (of_input && w->s[input_of(w, x->n, 0)].here)) {
            join_value(w->s, v, input_of(w, x->n, stolen ? s->writes[write].input : 0),
                       !stolen && (w->g->table->ops.at[s->op].facts & KOILA_FACT_SPLITS_UNSAFELY));
            continue;
        }
        /* a view of a leaf or of a whole value owns nothing */
        begin_value(w->s, v, of_input ? OWNER_NONE : OWNER_SCOPE);
        w->s[v].shared = w->p->node[x->n].sums;
        if (!of_input)
            event(w, x->j != KOILA_NONE ? KOILA__LOCAL_ALLOC : KOILA__WHOLE_ALLOC, v);
    }
}

/* Note [Shared terms] */
static void share_terms(work_state *w, const emission *x)
{
    const use *const end = w->uses + w->span[x->n].in_end;
    for (const use *u = w->uses + w->span[x->n].in; u < end; u++)
        if (w->s[u->value].here)
            w->s[w->s[u->value].root].shared = true;
}

/* Frees the inputs whose last use this was. */
static void end_inputs(work_state *w, const emission *x)
{
    const use *const end = w->uses + w->span[x->n].in_end;
    for (const use *u = w->uses + w->span[x->n].in; u < end; u++) {
        const koila_value v = u->value;
        /* last_use is set only for inputs that are read */
        if (w->last_use[v] != x->number || !u->reads || !w->s[v].here)
            continue;
        emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
        release_value(w, v, x->free_event);
    }
}

/* Collects the results into accumulators and pieces; those that nobody reads are freed. */
static void end_results(work_state *w, const emission *x)
{
    for (koila_value v = w->span[x->n].out; v < w->span[x->n].out_end; v++) {
        koila__event_kind how = x->free_event;
        if (!exists(w, v))
            continue;
        /* most are not collected */
        if (x->j != KOILA_NONE && (w->made_whole[v] == x->j || w->use[v] != KOILA_NONE))
            how = emit_collect(w, v, x->number, x->j);
        if (w->last_use[v] != x->number)
            continue;
        emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
        release_value(w, v, how);
    }
}

static koila_status emit_node(work_state *w, koila_node n, uint32_t number, uint32_t j)
{
    const bool in_loop = j != KOILA_NONE;
    emission x = { .n = n, .number = number, .j = j, .s = sig_of(w, n) };
    const uint32_t n_in = x.s->n_inputs;
    const uint32_t n_out = x.s->n_outputs;
    x.free_event = in_loop ? KOILA__LOCAL_FREE : KOILA__WHOLE_FREE;
    koila_assert(w->needed[n] && w->p->node[n].in_loop == in_loop);
    if (w->n_emitted + w->instrs.n > w->max_emitted)
        return KOILA_UNSUPPORTED;
    /* per input: cut anew, fetched, freed; per result: collected, kept, freed */
    TRY_ALLOC(room(w, 3 * n_in + 3 * n_out + 1, 3 * n_in + 5 * n_out + 1));
    if (in_loop)
        KOILA_TRY(emit_inputs(w, &x));
    if (w->p->node[n].sums)
        share_terms(w, &x);
    for (uint32_t k = 0; k < x.s->n_writes; k++)
        if (steals(w, n, number, k))
            x.steal |= (uint16_t)(1u << k);
    begin_results(w, &x);
    event(w, KOILA__RUN, n);
    emit(w, (koila_instr){ .kind = KOILA_DO_RUN, .id = n, .steal = x.steal });
    end_inputs(w, &x);
    end_results(w, &x);
    return KOILA_OK;
}

static koila_status finish_stage(work_state *w, koila__schedule *out, bool is_loop, uint16_t axis)
{
    koila__stage *stage = &out->stages[out->n_stages];
    koila_assert(out->n_stages < w->n_levels + w->n_loops);
    koila_instr *instrs =
        koila__arena_copy(&out->arena, w->instrs.at, w->instrs.n * sizeof *instrs);
    stage->events =
        koila__arena_copy(&out->arena, w->events.at, w->events.n * sizeof *stage->events);
    if (!instrs || !stage->events)
        return KOILA_NO_MEMORY;
    w->n_emitted += w->instrs.n;
    stage->n_events = w->events.n;
    stage->any_wide = w->any_wide;
    w->any_wide = false;
    stage->stage = (koila_stage){
        .is_loop = is_loop, .axis = axis, .n_instrs = w->instrs.n, .instrs = instrs
    };
    w->instrs.n = w->events.n = 0;
    out->n_stages++;
    return KOILA_OK;
}

/* A node that only views one value of the same loop and whose results are nothing but targets of
 * it: it may run directly after its producer. */
static bool hoistable(const work_state *w, koila_node n, uint32_t j)
{
    if (!w->is_mere_view[n])
        return false;
    for (koila_value v = w->span[n].out; v < w->span[n].out_end; v++) {
        if (w->made_whole[v] != j)
            return false;
        for (const use *u = uses_of(w, v); u; u = next_use_of(w, u))
            if (u->local && w->in_loop[u->user] == j + 1)
                return false;
    }
    return true;
}

/* Finds the nodes that loop j runs: from its targets back to leaves, whole values and kept pieces.
 * *lo and *hi are the first and last. */
static void find_demand(work_state *w, uint32_t j, uint32_t *lo, uint32_t *hi, double *work)
{
    uint32_t top = 0;
    *lo = KOILA_NONE;
    *hi = 0;
#define ENTER(node_)                                                                               \
    do {                                                                                           \
        const koila_node q_ = (node_);                                                             \
        if (w->in_loop[q_] != j + 1) {                                                             \
            w->in_loop[q_] = j + 1;                                                                \
            w->order_bits[q_ >> 6] |= (uint64_t)1 << (q_ & 63);                                    \
            koila_assert(top < w->n_nodes);                                                        \
            w->stack[top++] = q_;                                                                  \
        }                                                                                          \
    } while (0)
    for (koila_value v = w->target_first[j]; v != KOILA_NONE; v = w->target_next[v])
        ENTER(producer(w, v));
    while (top) {
        const koila_node n = w->stack[--top];
        if (n < *lo)
            *lo = n;
        if (n > *hi)
            *hi = n;
        *work += work_of(w, n);
        for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end;
             u++)
            if (u->local && w->in_loop[u->from] != j + 1 && !w->kept[u->value] &&
                !sliced_in(w, u->value, j))
                ENTER(u->from);
    }
#undef ENTER
}

/* Writes the recorded order into w->stack, with hoisted views directly after their producers. */
static uint32_t find_order(work_state *w, uint32_t j, uint32_t lo, uint32_t hi)
{
    uint32_t n_order = 0;
    koila_node *order = w->stack;
    for (uint32_t k = lo >> 6; k <= hi >> 6; k++) {
        for (uint64_t bits = w->order_bits[k]; bits; bits &= bits - 1) {
            const koila_node n = k * 64 + (uint32_t)__builtin_ctzll(bits);
            /* comes after its producer */
            if (w->is_mere_view[n] && hoistable(w, n, j) && w->uses[w->span[n].in].local &&
                w->in_loop[w->uses[w->span[n].in].from] == j + 1)
                continue;
            order[n_order++] = n;
            for (uint32_t done = n_order - 1; done < n_order; done++) {
                if (!w->is_viewed[order[done]])
                    continue;
                for (koila_value v = w->span[order[done]].out; v < w->span[order[done]].out_end;
                     v++)
                    for (const use *u = uses_of(w, v); u; u = next_use_of(w, u))
                        if (w->in_loop[u->user] == j + 1 && hoistable(w, u->user, j) &&
                            w->uses[w->span[u->user].in].local)
                            order[n_order++] = u->user;
            }
        }
        w->order_bits[k] = 0;
    }
    koila_assert(n_order <= w->n_nodes);
    return n_order;
}

static bool is_too_much(const work_state *w, double work)
{
    return w->keep.max_work > 0 && work > w->keep.max_work;
}

/* Keeps the pieces that loop j used for the next loop that needs them, or releases them. */
static koila_status end_pieces(work_state *w, uint32_t j)
{
    koila_value next;
    for (koila_value v = w->kept_first[j]; v != KOILA_NONE; v = next) {
        next = w->kept_next[v];
        koila_assert(w->kept[v]);
        w->kept[v] = false;
        if (!w->given_up[v] && keeps(w, v, j)) {
            keep_until_next(w, v, j);
            continue;
        }
        if (!w->given_up[v]) { /* not fetched: its producer ran again for another result */
            begin_value(w->s, v, OWNER_PIECE);
            TRY_ALLOC(room(w, 2, 1));
            emit(w, (koila_instr){ .kind = KOILA_DO_FETCH, .flags = KOILA_INSTR_LAST, .id = v });
            emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
            release_value(w, v, KOILA__LOCAL_FREE);
        }
        w->given_up[v] = false;
    }
    return KOILA_OK;
}

/* Are all values of the running slice dead? */
static bool none_is_here(const work_state *w)
{
    for (koila_value v = 0; v < w->n_values; v++)
        if (w->slice[v].here || w->slice[v].alive)
            return false;
    return true;
}

static koila_status emit_loop(work_state *w, koila__schedule *out, uint32_t j)
{
    uint32_t lo, hi;
    w->s = w->slice;
    w->stage = out->n_stages;
    find_demand(w, j, &lo, &hi, &out->work);
    if (is_too_much(w, out->work))
        return KOILA_UNSUPPORTED;
    const uint32_t n_order = lo <= hi ? find_order(w, j, lo, hi) : 0;
    const koila_node *const order = w->stack;
    uint32_t *const last_use = w->last_use;
    for (uint32_t k = 0; k < n_order; k++) {
        const span at = w->span[order[k]];
        for (const use *u = w->uses + at.in, *end = w->uses + at.in_end; u < end; u++)
            if (u->reads)
                last_use[u->value] = k;
        for (koila_value v = at.out; v < at.out_end; v++)
            last_use[v] = k;
    }
    for (uint32_t k = 0; k < n_order; k++)
        KOILA_TRY(emit_node(w, order[k], k, j));
    KOILA_TRY(end_pieces(w, j));
    koila_check(none_is_here(w));
    return finish_stage(w, out, true, w->loops[j].axis);
}

/* Emits the nodes of one level that run once; before them, ends the whole values whose last reader
 * was an earlier loop. */
static koila_status emit_whole(work_state *w, koila__schedule *out, uint32_t level,
                               uint32_t *next_ending)
{
    const uint32_t stage = out->n_stages;
    w->s = w->whole;
    for (; *next_ending < stage; ++*next_ending)
        for (koila_value v = w->ending_first[*next_ending]; v != KOILA_NONE;
             v = w->ending_next[v]) {
            if (!w->whole[v].here)
                continue; /* it ended in a whole stage */
            TRY_ALLOC(room(w, 1, 1));
            emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v });
            release_value(w, v, KOILA__WHOLE_FREE);
        }
    uint32_t k = 0;
    for (koila_node n = w->whole_of_level[level]; n != KOILA_NONE; n = w->whole_next[n], k++) {
        out->work += work_of(w, n);
        /* a result, or a value that a later stage reads, does not end here, whatever its last use
         * in this stage */
#define LAST_USE(v_)                                                                               \
    do {                                                                                           \
        const koila_value v = (v_);                                                                \
        w->last_use[v] =                                                                           \
            w->is_result[v] || (w->whole_last[v] != KOILA_NONE && w->whole_last[v] > stage)        \
                ? KOILA_NONE                                                                       \
                : k;                                                                               \
    } while (0)
        for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end;
             u++) {
            if (!u->reads)
                continue;
            LAST_USE(u->value);
            if (u->from != KOILA_NONE)
                w->whole_seen[u->value] = stage;
        }
        for (koila_value x = w->span[n].out; x < w->span[n].out_end; x++)
            LAST_USE(x);
#undef LAST_USE
    }
    k = 0;
    for (koila_node n = w->whole_of_level[level]; n != KOILA_NONE; n = w->whole_next[n], k++)
        KOILA_TRY(emit_node(w, n, k, KOILA_NONE));
    return finish_stage(w, out, false, 0);
}

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

/* Node n of `stage` may read whole values: updates whole_until. */
static void see_readers(work_state *w, koila_node n, uint32_t stage)
{
    for (const use *u = w->uses + w->span[n].in, *end = w->uses + w->span[n].in_end; u < end; u++) {
        const koila_value v = u->value;
        if (u->from == KOILA_NONE || !u->reads || (u->local && !sliced_in(w, v, w->last_run[n])))
            continue;
        if (w->whole_until[v] == KOILA_NONE || w->whole_until[v] < stage)
            w->whole_until[v] = stage;
    }
}

/* The last stage that can read whole v. Stages are numbered as they will be emitted: the whole
 * stage of a level, then its loops. */
static koila_status find_whole_until(work_state *w)
{
    uint32_t *whole_stage = koila__arena_array(&w->spare, w->n_levels, sizeof *whole_stage);
    uint32_t *loop_stage = koila__arena_array(&w->spare, w->n_loops, sizeof *loop_stage);
    const uint32_t n_stages = w->n_levels + w->n_loops;
    w->ending_first = koila__arena_array(&w->tmp, n_stages, sizeof *w->ending_first);
    TRY_ALLOC(whole_stage && loop_stage && w->ending_first);
    for (uint32_t level = 0, j = 0, stage = 0; level < w->n_levels; level++) {
        whole_stage[level] = stage++;
        for (; j < w->n_loops && w->loops[j].level == level; j++)
            loop_stage[j] = stage++;
    }
    for (uint32_t v = 0; v < w->n_values; v++)
        w->whole_until[v] = KOILA_NONE;
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        w->last_run[n] = KOILA_NONE;
        if (!w->needed[n])
            continue;
        if (!w->p->node[n].in_loop) {
            see_readers(w, n, whole_stage[w->level[n]]);
            continue;
        }
        w->last_run[n] = find_last_run(w, n);
        if (w->last_run[n] != KOILA_NONE)
            see_readers(w, n, loop_stage[w->last_run[n]]);
    }
    return KOILA_OK;
}

/* The next emission ends whole values after these stages. */
static void set_whole_last(work_state *w, const uint32_t *last)
{
    memcpy(w->whole_last, last, w->n_values * sizeof *last);
    memset(w->ending_first, 0xff, (w->n_levels + w->n_loops) * sizeof *w->ending_first);
    for (uint32_t v = w->n_values; v-- > 0;) {
        if (w->whole_last[v] == KOILA_NONE || w->is_result[v])
            continue;
        w->ending_next[v] = w->ending_first[w->whole_last[v]];
        w->ending_first[w->whole_last[v]] = v;
    }
}

/* Did the emission read some whole value for the last time before the stage that could? */
static bool ends_earlier(const work_state *w)
{
    for (uint32_t v = 0; v < w->n_values; v++)
        if (w->whole_seen[v] != w->whole_last[v] && !w->is_result[v])
            return true;
    return false;
}

static uint64_t max_emitted(const work_state *w)
{
    uint32_t n_needed = 0;
    for (uint32_t n = 0; n < w->n_nodes; n++)
        n_needed += w->needed[n];
    return (uint64_t)(w->keep.max_instrs ? w->keep.max_instrs : KOILA_COST_MAX_INSTRS) * n_needed +
           4096;
}

static koila_status make_stages(work_state *w, koila__schedule *s)
{
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        if (!w->needed[n])
            continue;
        if (w->p->node[n].is_again || w->p->node[n].offloads)
            continue;
        s->n_needed++;
        s->work_recorded += work_of(w, n);
    }
    w->max_emitted = max_emitted(w);
    s->stages = koila__arena_array(&s->arena, (size_t)w->n_levels + w->n_loops, sizeof *s->stages);
    TRY_ALLOC(s->stages);
    s->n_loops = w->n_loops;
    for (uint32_t level = 0, j = 0, next_ending = 0; level < w->n_levels; level++) {
        KOILA_TRY(emit_whole(w, s, level, &next_ending));
        for (; j < w->n_loops && w->loops[j].level == level; j++)
            KOILA_TRY(emit_loop(w, s, j));
    }
    s->n_keeps = w->n_keeps;
    /* the last stages may be whole ones */
    return is_too_much(w, s->work) ? KOILA_UNSUPPORTED : KOILA_OK;
}

/* Makes the arrays of fixed size. They are zeroed, except chains, which are empty, and arrays that
 * forget_demand() and forget_emission() set before their first use. */
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
#define MAKE_FOR_PREPARE(field, n) MAKE_IN(spare, field, n) /* until prepare() is done */
    MAKE(needed, N);
    MAKE_FOR_PREPARE(level, N);
    MAKE_FOR_PREPARE(natural, N);
    MAKE(is_expensive, N);
    MAKE(is_start, N);
    MAKE_FOR_PREPARE(is_keepable, V);
    MAKE(is_result, V);
    MAKE_FOR_PREPARE(is_barrier, V);
    MAKE(made_whole, V);
    MAKE(span, N);
    MAKE(uses, I);
    MAKE_UNSET(first_use, V);
    MAKE(is_viewed, N);
    MAKE(is_mere_view, N);
    MAKE(aliases, N);
    MAKE(home, N);
    MAKE_FOR_PREPARE(exec, N);
    MAKE_UNSET(use, V);
    MAKE_UNSET(kept, V);
    MAKE(kept_next, V);
    MAKE_UNSET(given_up, V);
    MAKE_UNSET(in_loop, N);
    MAKE_UNSET(order_bits, N / 64 + 1);
    MAKE(stack, N);
    MAKE(mark, N);
    MAKE(whole_next, N);
    MAKE(target_next, V);
    MAKE(ending_next, V);
    MAKE_UNSET(last_use, V);
    MAKE_FOR_PREPARE(last_run, N);
    MAKE_UNSET(sliced, V);
    MAKE(whole_until, V);
    MAKE_UNSET(whole_seen, V);
    MAKE_UNSET(whole_last, V);
    MAKE_UNSET(whole, V);
    MAKE_UNSET(slice, V);
    memset(w->first_use, 0xff, V * sizeof *w->first_use);
    memset(w->exec, 0xff, N * sizeof *w->exec);
    memset(w->use, 0xff, V * sizeof *w->use);
    return KOILA_OK;
}

/* These two reset the state of an earlier policy: forget_demand() its kept values and loops,
 * forget_emission() its instructions. */
static void forget_demand(work_state *w)
{
    const uint32_t N = w->n_nodes + 1;
    const uint32_t V = w->n_values + 1;
    memset(w->kept, 0, V * sizeof *w->kept);
    memset(w->in_loop, 0, N * sizeof *w->in_loop);
    memset(w->order_bits, 0, (N / 64 + 1) * sizeof *w->order_bits);
    memset(w->kept_first, 0xff, w->n_loops * sizeof *w->kept_first);
}
static void forget_emission(work_state *w)
{
    const uint32_t V = w->n_values + 1;
    memset(w->given_up, 0, V * sizeof *w->given_up);
    memset(w->last_use, 0, V * sizeof *w->last_use);
    memset(w->whole, 0, V * sizeof *w->whole);
    memset(w->slice, 0, V * sizeof *w->slice);
    memset(w->sliced, 0xff, V * sizeof *w->sliced);
    memset(w->whole_seen, 0xff, V * sizeof *w->whole_seen);
    w->instrs.n = w->events.n = w->n_keeps = 0;
    w->n_emitted = 0;
    w->any_wide = false;
}

static koila_status prepare(work_state *w, const koila_value *targets, uint32_t n_targets)
{
    if (w->n_values >= KOILA__EVENT_VALUES || w->n_nodes >= KOILA__EVENT_VALUES)
        return KOILA_UNSUPPORTED;
    KOILA_TRY(make_arrays(w));
    find_needed(w, targets, n_targets);
    KOILA_TRY(find_costs(w));
    find_keepable(w);
    find_levels(w);
    KOILA_TRY(chain_whole_nodes(w));
    KOILA_TRY(make_loops(w));
    assign_targets(w);
    KOILA_TRY(find_exec(w));
    KOILA_TRY(find_whole_until(w));
    /* scratch memory of the preparation: the first schedule reuses it */
    koila__arena_empty(&w->spare);
    w->level = w->natural = w->exec = w->last_run = NULL;
    w->is_barrier = w->is_keepable = NULL;
    return KOILA_OK;
}

static koila_status failed(koila_status status, koila_error *err)
{
    return koila__fail(err, status, 0, "schedule: %s",
                       status == KOILA_UNSUPPORTED ? "too many barriers in a row"
                                                   : koila_status_text(status));
}

koila_status koila__scheduler_new(koila__scheduler **out, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets, bool cheap,
                                  const koila_allocator *mem, koila_error *err)
{
    const koila_allocator a = koila__allocator(mem);
    koila__scheduler *w = koila__realloc(&a, NULL, 0, sizeof *w);
    if (!w)
        return failed(KOILA_NO_MEMORY, err);
    *w = (koila__scheduler){ .p = p,
                             .g = p->graph,
                             .keep = { .cheap = cheap },
                             .mem = a,
                             .n_nodes = p->graph->nodes.n,
                             .n_values = p->graph->values.n };
    koila__arena_init(&w->tmp, mem);
    koila__arena_init(&w->spare, mem);
    const koila_status status = prepare(w, targets, n_targets);
    if (status != KOILA_OK) {
        koila__scheduler_free(w);
        return failed(status, err);
    }
    *out = w;
    return KOILA_OK;
}

void koila__scheduler_free(koila__scheduler *w)
{
    if (!w)
        return;
    const koila_allocator mem = w->mem;
    koila__vec_free(&w->mem, &w->instrs);
    koila__vec_free(&w->mem, &w->events);
    koila__vec_free(&w->mem, &w->cells);
    koila__arena_deinit(&w->tmp);
    koila__arena_deinit(&w->spare);
    koila__release(&mem, w, sizeof *w);
}

uint32_t koila__scheduler_n_loops(const koila__scheduler *w) { return w->n_loops; }

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

/* Like emit_loop(), but emits nothing. *n_emitted: a lower bound of instructions: each run, and the
 * end of each result. *n_held: bytes of pieces and results. */
static void work_of_loop(koila__scheduler *w, uint32_t j, double *work, uint64_t *n_emitted,
                         uint64_t *n_held)
{
    uint32_t lo, hi;
    find_demand(w, j, &lo, &hi, work);
    for (uint32_t k = lo >> 6; lo <= hi && k <= hi >> 6; k++) {
        for (uint64_t bits = w->order_bits[k]; bits; bits &= bits - 1) {
            const koila_node n = k * 64 + (uint32_t)__builtin_ctzll(bits);
            *n_emitted += 1 + (w->span[n].out_end - w->span[n].out == 1);
            for (koila_value v = w->span[n].out; w->is_expensive[n] && v < w->span[n].out_end;
                 v++) {
                if (w->kept[v] || !keeps(w, v, j))
                    continue;
                keep_until_next(w, v, j);
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
        if (keeps(w, v, j))
            keep_until_next(w, v, j);
        else {
            koila_assert(*n_held >= kept_bytes(w, v));
            *n_held -= kept_bytes(w, v);
        }
    }
    for (koila_value v = w->target_first[j]; v != KOILA_NONE; v = w->target_next[v])
        /* a piece's storage may become the whole value */
        if (w->is_result[v] && w->use[v] == KOILA_NONE && !koila__adds_on(w->p, v))
            *n_held += koila__value_meta(w->g, v)->n_bytes;
    if (*n_held > w->work_kept.n_bytes)
        w->work_kept.n_bytes = *n_held;
}

double koila__schedule_work(koila__scheduler *w, koila__keep keep)
{
    double work = 0;
    uint64_t n_emitted = 0, n_held = 0;
    w->keep = keep;
    w->work_kept = (koila__kept){ .is_sure = true };
    forget_demand(w);
    const uint64_t most = max_emitted(w);
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
    return work;
}

/* Into the memory of a recycled schedule. */
static koila_status emit_all(work_state *w, koila__schedule *s)
{
    *s = (koila__schedule){ .arena = w->spare };
    koila__arena_init(&w->spare, &w->mem);
    forget_demand(w);
    forget_emission(w);
    return make_stages(w, s);
}

/* What is kept decides which loops read a whole value, and the emission decides what is kept. So
 * the first emission ends whole values where any policy could; where that was too late, a second
 * one ends them after their last reader. Nothing else depends on it. */
koila_status koila__schedule_make(koila__scheduler *w, koila__keep keep, koila__schedule *out,
                                  koila_error *err)
{
    koila__schedule s;
    koila_assert(keep.cheap == w->keep.cheap);
    w->keep = keep;
    set_whole_last(w, w->whole_until);
    koila_status status = emit_all(w, &s);
    if (status == KOILA_OK && w->n_loops > 1 && ends_earlier(w)) {
        koila__schedule_recycle(w, &s);
        set_whole_last(w, w->whole_seen);
        status = emit_all(w, &s);
        koila_assert(status != KOILA_OK || !ends_earlier(w));
    }
    if (status != KOILA_OK) {
        koila__schedule_recycle(w, &s);
        return failed(status, err);
    }
    koila__arena_pass_on(&s.arena, &w->spare);
    *out = s;
    return KOILA_OK;
}

koila_status koila__schedule_init(koila__schedule *out, const koila__placed *p,
                                  const koila_value *targets, uint32_t n_targets, koila__keep keep,
                                  const koila_allocator *mem, koila_error *err)
{
    koila__scheduler *w = NULL;
    KOILA_TRY(koila__scheduler_new(&w, p, targets, n_targets, keep.cheap, mem, err));
    const koila_status status = koila__schedule_make(w, keep, out, err);
    koila__scheduler_free(w);
    return status;
}

/* State of koila__schedule_whole_bytes(). */
typedef struct whole_step {
    const koila_graph *g;
    /* [value] the node after the last one that uses its storage; KOILA_NONE: lives to the end; 0:
     * not needed */
    koila_node *end;
    /* [node] bytes that begin there minus bytes that end there, modulo 2^64 */
    uint64_t *rise;
    uint64_t sum; /* of all bytes */
    bool adds_up;
} whole_step;

/* Counts the results of node n, and how long its inputs are needed. Results of writes are left out:
 * they may be in place or copies. */
static void count_node(whole_step *x, koila_node n)
{
    const koila_graph *g = x->g;
    const koila_sig_info *s = koila__node_sig(g, n);
    const koila_node_info *info = &g->nodes.at[n];
    const bool alias = maybe_alias(g->table, s->op);
    koila_node last = 0;
    for (koila_value v = info->first_output; v < info->first_output + s->n_outputs; v++)
        last = x->end[v] > last ? x->end[v] : last;
    if (!last)
        return; /* nobody needs it */
    for (uint32_t o = 0; o < s->n_fresh && !alias; o++) {
        const koila_node end = x->end[info->first_output + o];
        if (s->outputs[o] == KOILA_NONE)
            continue;
        const uint64_t n_bytes = koila__meta(g->table, s->outputs[o])->n_storage_bytes;
        x->adds_up &= koila__add(x->sum, n_bytes, &x->sum);
        x->rise[n] += n_bytes;
        if (end != KOILA_NONE)
            x->rise[end ? end : n + 1] -= n_bytes;
    }
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value v = g->inputs.at[info->first_input + i];
        const koila_node until = alias && i == 0 && !s->n_writes ? last : n + 1;
        if (x->end[v] < until && koila__reads(s, i))
            x->end[v] = until;
    }
}

koila_status koila__schedule_whole_bytes(const koila_graph *g, const koila_value *targets,
                                         uint32_t n_targets, const koila_allocator *mem,
                                         uint64_t *at_least)
{
    koila__arena tmp;
    koila__arena_init(&tmp, mem);
    whole_step x = { .g = g,
                     .end = koila__arena_array(&tmp, g->values.n, sizeof *x.end),
                     .rise = koila__arena_array(&tmp, (size_t)g->nodes.n + 1, sizeof *x.rise),
                     .adds_up = true };
    uint64_t live = 0;
    *at_least = 0;
    if (!x.end || !x.rise) {
        koila__arena_deinit(&tmp);
        return KOILA_NO_MEMORY;
    }
    for (uint32_t i = 0; i < n_targets; i++)
        x.end[targets[i]] = KOILA_NONE;
    for (koila_node n = g->nodes.n; n-- > 0;)
        count_node(&x, n);
    for (koila_node n = 0; n < g->nodes.n && x.adds_up; n++) {
        live += x.rise[n];
        koila_assert(live <= x.sum);
        if (live > *at_least)
            *at_least = live;
    }
    koila__arena_deinit(&tmp);
    return KOILA_OK;
}

void koila__schedule_recycle(koila__scheduler *w, koila__schedule *s)
{
    koila__arena_deinit(&w->spare);
    w->spare = s->arena;
    koila__arena_empty(&w->spare);
    *s = (koila__schedule){ 0 };
}

void koila__schedule_deinit(koila__schedule *s) { koila__arena_deinit(&s->arena); }
