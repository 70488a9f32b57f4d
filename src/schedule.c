/* schedule.c — demands become loops.
 *
 * An edge that needs a whole value of something sharded or partial is a *barrier*. The level of a node is the largest number of barriers on a path
 * to it; the nodes of one level and axis can share one loop over the slices. Loops are demand-driven: loop j makes its *targets* (values some
 * barrier needs, and results), and runs whatever slices those need, in recorded order. A result nobody waits for goes to the loop where
 * it adds the least work, so all gradients and the loss of an ordinary step share the last loop, while a weight gradient in a net of
 * barriers (BatchNorm) is made where its inputs pass by.
 *
 * A value that two loops need is recomputed in the second, or kept from the first. Keeping is decided walking the loops in order, with
 * two numbers (koila__keep): results of expensive operators are kept over a gap of at most `horizon` loops, or for good when they cross a
 * checkpoint. horizon = infinity keeps everything expensive; 0 recomputes everything (a contrastive loss then is GradCache); horizon =
 * spacing + 2 is the classic walk: forward keeps only the frontier and the checkpoints, the first backward loop that enters a segment
 * recomputes it from its checkpoint and keeps it for the loops that follow (Chen et al. 2016, with sqrt(n) segments).
 *
 * Order inside a loop is the recorded order, so an in-place write finds its old version dead unless somebody really needs it. One exception: a
 * view that is only a target (the `t` of a weight gradient, recorded at the end of backward) runs right behind its producer.
 *
 * Equation: alive[r] == number of values here[v] with root[v] == r. koila_plan_check() replays the instructions and checks that every local
 * value is made before it is used and freed exactly once per slice. */
#include "schedule.h"

#include "cost.h"
#include "table.h"

typedef VEC(koila_instr) instr_vec;
typedef VEC(koila__event) event_vec;

typedef struct loop_info {
    uint32_t level;
    uint16_t axis;
} loop_info;

typedef struct scope {
    koila_value *root; /* [value] storage it lives in, named by the value that made it */
    uint32_t *alive;   /* [value as root] values alive on that storage */
    uint8_t *owned;    /* [value as root] 1: made in this scope and nobody else's; 2: a kept piece in its last use; 0: lives elsewhere too */
    uint8_t *here;     /* [value] alive in this scope */
} scope;

typedef struct slice_of {
    koila_node user;
    uint32_t input;
} slice_of;

typedef struct work_state {
    const koila__placed *p;
    const koila_graph *g;
    koila_allocator mem;
    koila__arena tmp;
    koila__keep keep;
    uint32_t n_nodes, n_values;

    bool *needed;          /* [node] */
    uint32_t *level;       /* [node] */
    uint32_t *natural;     /* [node] loop of its level and axis; KOILA_NONE outside loops */
    koila__cost *cost;     /* [node] */
    bool *is_result;       /* [value] final target */
    bool *is_barrier;      /* [value] made whole for somebody */
    uint32_t *made_whole;  /* [value] loop that makes it whole, or KOILA_NONE */
    uint32_t *consumer_first, *consumer_next, *consumer_input; /* uses of a value: chains through flat inputs of needed nodes */
    uint32_t *consumer_node;

    loop_info *loops;
    uint32_t n_loops;
    uint32_t *home;        /* [node] first loop that runs it, or KOILA_NONE */
    uint64_t *exec;        /* [node * words] loops that run it when only expensive results are kept */
    uint32_t words;

    bool *kept;            /* [value] a piece of every slice is there now */
    bool *in_loop_set;     /* [node] runs in the current loop */
    uint32_t *stack;       /* DFS */
    uint32_t *mark;        /* [node] epoch */
    uint32_t epoch;

    /* emission */
    uint32_t *last_use;    /* [value] instruction number of its last use in the current stage's emission order */
    uint32_t *last_run;    /* [node] last loop that can possibly run it, or KOILA_NONE */
    scope whole, slice;    /* who is alive on which storage: whole values, values of the running slice */
    scope *s;              /* the one emission is in */
    slice_of *sliced;      /* [value] whose need the slice of a whole value was cut for; user KOILA_NONE: not a slice */
    uint32_t *whole_last;  /* [value] last stage that reads whole v */
    instr_vec instrs;
    event_vec events;
} work_state;

#define TRY_ALLOC(p) \
    do {             \
        if (!(p)) return KOILA_NO_MEMORY; \
    } while (0)

static const koila_sig_info *sig_of(const work_state *w, koila_node n) { return koila__node_sig(w->g, n); }
static bool exists(const work_state *w, koila_value v) { return w->g->values.at[v].meta != KOILA_NONE; }
static koila_node producer(const work_state *w, koila_value v) { return w->g->values.at[v].node; }
static bool made_in_loop(const work_state *w, koila_value v)
{
    const koila_node n = producer(w, v);
    return n != KOILA_NONE && w->p->node[n].in_loop;
}
static koila_placement need_of(const work_state *w, koila_node n, uint32_t i) { return w->p->need[w->g->nodes.at[n].first_input + i]; }
static koila_value input_of(const work_state *w, koila_node n, uint32_t i) { return w->g->inputs.at[w->g->nodes.at[n].first_input + i]; }

/* Does use i of node n read the local value (made by another node of the same loop)? Else it reads the whole one, or a slice of it. */
static bool uses_local(const work_state *w, koila_node n, uint32_t i)
{
    const koila_value v = input_of(w, n, i);
    if (!w->p->node[n].in_loop || !made_in_loop(w, v) || w->p->node[producer(w, v)].axis != w->p->node[n].axis) return false;
    const koila_placement need = need_of(w, n, i);
    return need.kind == KOILA_R ? w->p->value[v].kind == KOILA_R : koila__placement_equal(need, w->p->value[v]);
}

/* ---- what is needed, and at which level */

static koila_status find_needed(work_state *w, const koila_value *targets, uint32_t n_targets)
{
    for (uint32_t i = 0; i < n_targets; i++) {
        w->is_result[targets[i]] = true;
        if (producer(w, targets[i]) != KOILA_NONE) w->needed[producer(w, targets[i])] = true;
    }
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        if (!w->needed[n]) continue;
        const koila_sig_info *s = sig_of(w, n);
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const koila_node q = producer(w, input_of(w, n, i));
            if (q != KOILA_NONE) w->needed[q] = true;
        }
    }
    for (uint32_t n = w->n_nodes; n-- > 0;) { /* consumers in recorded order: built back to front */
        if (!w->needed[n]) continue;
        const koila_sig_info *s = sig_of(w, n);
        for (uint32_t i = s->n_inputs; i-- > 0;) {
            const uint32_t at = w->g->nodes.at[n].first_input + i;
            w->consumer_node[at] = n;
            w->consumer_input[at] = i;
            w->consumer_next[at] = w->consumer_first[w->g->inputs.at[at]];
            w->consumer_first[w->g->inputs.at[at]] = at;
        }
    }
    return KOILA_OK;
}

static koila_status find_levels(work_state *w)
{
    uint32_t top = 0;
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        if (!w->needed[n]) continue;
        const koila_sig_info *s = sig_of(w, n);
        uint32_t level = 0;
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const koila_value v = input_of(w, n, i);
            const koila_node q = producer(w, v);
            if (q == KOILA_NONE) continue;
            uint32_t l = w->level[q];
            if (w->p->node[q].in_loop && !uses_local(w, n, i)) {
                l += 1;
                w->is_barrier[v] = true;
            }
            if (l > level) level = l;
        }
        w->level[n] = level;
        if (w->p->node[n].in_loop && level > top) top = level;
    }
    const uint32_t n_axes = w->g->axes.n ? w->g->axes.n : 1;
    const uint64_t n_slots = ((uint64_t)top + 1) * n_axes;
    uint32_t *loop_of = koila__arena_array(&w->tmp, n_slots, sizeof *loop_of);
    TRY_ALLOC(loop_of);
    for (uint32_t n = 0; n < w->n_nodes; n++)
        if (w->needed[n] && w->p->node[n].in_loop) loop_of[w->level[n] * n_axes + w->p->node[n].axis] = 1;
    for (uint64_t i = 0; i < n_slots; i++) w->n_loops += loop_of[i];
    w->loops = koila__arena_array(&w->tmp, w->n_loops, sizeof *w->loops);
    TRY_ALLOC(w->loops);
    uint32_t next = 0;
    for (uint64_t i = 0; i < n_slots; i++) {
        if (!loop_of[i]) continue;
        w->loops[next] = (loop_info){ (uint32_t)(i / n_axes), (uint16_t)(i % n_axes) };
        loop_of[i] = next++;
    }
    for (uint32_t n = 0; n < w->n_nodes; n++)
        w->natural[n] = w->needed[n] && w->p->node[n].in_loop ? loop_of[w->level[n] * n_axes + w->p->node[n].axis] : KOILA_NONE;
    w->words = (w->n_loops + 63) / 64;
    if (!w->words) w->words = 1;
    return KOILA_OK;
}

/* ---- which loop makes what */

/* Work of the nodes v needs that are not in `set` (a bit per node of loop j's demand); adds them to it when `add`. */
static double demand(work_state *w, koila_value v, uint64_t *set, bool add)
{
    double work = 0;
    uint32_t top = 0;
    w->epoch++;
#define VISIT(node_)                                                                       \
    do {                                                                                   \
        const koila_node q_ = (node_);                                                     \
        if (w->mark[q_] != w->epoch && !(set[q_ >> 6] >> (q_ & 63) & 1)) {                  \
            w->mark[q_] = w->epoch;                                                        \
            w->stack[top++] = q_;                                                          \
        }                                                                                  \
    } while (0)
    VISIT(producer(w, v));
    while (top) {
        const koila_node n = w->stack[--top];
        work += w->cost[n].work + 1; /* + 1: a view is not quite nothing */
        if (add) set[n >> 6] |= (uint64_t)1 << (n & 63);
        const koila_sig_info *s = sig_of(w, n);
        for (uint32_t i = 0; i < s->n_inputs; i++)
            if (uses_local(w, n, i)) VISIT(producer(w, input_of(w, n, i)));
    }
#undef VISIT
    return work;
}

static koila_status assign_targets(work_state *w)
{
    const uint32_t set_words = w->n_nodes / 64 + 1;
    uint64_t **set = koila__arena_array(&w->tmp, w->n_loops, sizeof *set);
    TRY_ALLOC(set);
    for (uint32_t j = 0; j < w->n_loops; j++) {
        set[j] = koila__arena_array(&w->tmp, set_words, sizeof **set);
        TRY_ALLOC(set[j]);
    }
    for (uint32_t v = 0; v < w->n_values; v++) {
        w->made_whole[v] = KOILA_NONE;
        if (!w->is_barrier[v]) continue;
        w->made_whole[v] = w->natural[producer(w, v)];
        demand(w, v, set[w->made_whole[v]], true);
    }
    for (uint32_t v = w->n_values; v-- > 0;) { /* late results first: they decide where earlier ones pass by */
        if (!w->is_result[v] || w->is_barrier[v] || !made_in_loop(w, v)) continue;
        const uint32_t first = w->natural[producer(w, v)], axis = w->p->node[producer(w, v)].axis;
        uint32_t best = first;
        double best_work = -1;
        for (uint32_t j = first; j < w->n_loops; j++) {
            if (w->loops[j].axis != axis || (j != first && j + 3 < w->n_loops)) continue; /* its own loop, and the last ones */
            const double work = demand(w, v, set[j], false);
            if (best_work < 0 || work < best_work) best = j, best_work = work;
        }
        w->made_whole[v] = best;
        demand(w, v, set[best], true);
    }
    for (uint32_t n = 0; n < w->n_nodes; n++) {
        w->home[n] = KOILA_NONE;
        for (uint32_t j = 0; j < w->n_loops && w->home[n] == KOILA_NONE; j++)
            if (set[j][n >> 6] >> (n & 63) & 1) w->home[n] = j;
    }
    return KOILA_OK;
}

/* exec[n]: the loops that run n when results of expensive nodes are always kept and everything else is run again where it is needed. */
static void find_exec(work_state *w)
{
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        if (!w->needed[n] || w->home[n] == KOILA_NONE) continue;
        uint64_t *e = w->exec + (size_t)n * w->words;
        e[w->home[n] >> 6] |= (uint64_t)1 << (w->home[n] & 63);
        if (w->cost[n].expensive) continue;
        const koila_sig_info *s = sig_of(w, n);
        for (uint32_t o = 0; o < s->n_outputs; o++)
            for (uint32_t at = w->consumer_first[w->g->nodes.at[n].first_output + o]; at != KOILA_NONE; at = w->consumer_next[at]) {
                const koila_node c = w->consumer_node[at];
                if (w->home[c] == KOILA_NONE || !uses_local(w, c, w->consumer_input[at])) continue;
                for (uint32_t k = 0; k < w->words; k++) e[k] |= w->exec[(size_t)c * w->words + k];
            }
    }
}

/* The first loop after j that needs v locally, or KOILA_NONE. */
static uint32_t next_use(const work_state *w, koila_value v, uint32_t j)
{
    uint32_t best = KOILA_NONE;
    for (uint32_t at = w->consumer_first[v]; at != KOILA_NONE; at = w->consumer_next[at]) {
        const koila_node c = w->consumer_node[at];
        if (w->home[c] == KOILA_NONE || !uses_local(w, c, w->consumer_input[at])) continue;
        const uint64_t *e = w->exec + (size_t)c * w->words;
        for (uint32_t u = j + 1; u < w->n_loops && u < best; u++)
            if (e[u >> 6] >> (u & 63) & 1) best = u;
    }
    return best;
}

static bool keepable(const work_state *w, koila_value v)
{
    const koila_node n = producer(w, v);
    if (n == KOILA_NONE || !exists(w, v) || !w->cost[n].expensive || w->p->value[v].kind != KOILA_S) return false;
    return !(koila_op_flags(w->g->table, sig_of(w, n)->op) & (KOILA_OP_OPAQUE | KOILA_OP_VIEW));
}

/* Is v worth keeping after loop j? */
static bool keeps(const work_state *w, koila_value v, uint32_t j)
{
    if (!keepable(w, v)) return false;
    const uint32_t u = next_use(w, v, j);
    if (u == KOILA_NONE) return false;
    if (u - j <= w->keep.horizon) return true;
    if (!w->keep.spacing) return false;
    /* does it cross a checkpoint on its way forward: the chain of short gaps that starts at its home */
    uint32_t last = w->home[producer(w, v)];
    for (uint32_t next = next_use(w, v, last); next != KOILA_NONE && next - last <= w->keep.horizon; next = next_use(w, v, last)) last = next;
    const uint32_t home = w->home[producer(w, v)];
    return last / w->keep.spacing > home / w->keep.spacing;
}

/* ---- emission */

static bool emit(work_state *w, koila_instr i) { return koila__vec_push(&w->mem, &w->instrs, i); }
static bool event(work_state *w, koila__event_kind kind, uint32_t value)
{
    const koila__event e = { (uint8_t)kind, value };
    return koila__vec_push(&w->mem, &w->events, e);
}

/* Results of n that share their first input's storage. Beyond views: calls that may hand back (a view of) their input. */
static bool aliases_input(const work_state *w, koila_node n)
{
    static const char *const maybe[] = { "aten::_unsafe_view", "aten::_reshape_alias", "aten::reshape", "aten::contiguous", "aten::unsafe_split.Tensor",
                                         "aten::unsafe_split_with_sizes", "aten::unsafe_chunk", "aten::to.dtype", "aten::real" };
    const koila_sig_info *s = sig_of(w, n);
    if (!s->n_inputs) return false;
    if (koila_op_flags(w->g->table, s->op) & KOILA_OP_VIEW) return true;
    for (const koila__fix *f = w->p->node[n].fix; f < w->p->node[n].fix + KOILA__MAX_FIXES && f->kind; f++)
        if (f->kind == KOILA__FIX_ALIAS) return true;
    const char *name = koila_op_name(w->g->table, s->op);
    for (size_t i = 0; i < KOILA_COUNT(maybe); i++)
        if (strcmp(name, maybe[i]) == 0) return true;
    return false;
}

/* The value is gone; its storage too when it was the last one there. `quiet`: the storage lives on elsewhere (kept, accumulator). */
static bool release_value(work_state *w, koila_value v, koila__event_kind how)
{
    const koila_value r = w->s->root[v];
    w->s->here[v] = 0;
    if (--w->s->alive[r]) return true;
    return !w->s->owned[r] || event(w, how, r);
}

/* Emit node n of a loop (j) or of a whole stage (j == KOILA_NONE), then what its results owe: accumulators, pieces, frees. `number` is n's
 * place in the emission order, which last_use refers to. */
static koila_status emit_node(work_state *w, koila_node n, uint32_t number, uint32_t j)
{
    const koila_sig_info *s = sig_of(w, n);
    const koila_value first = w->g->nodes.at[n].first_output;
    const bool in_loop = j != KOILA_NONE, alias = aliases_input(w, n);
    koila_instr run = { .kind = KOILA_DO_RUN, .id = n };
    for (uint32_t i = 0; in_loop && i < s->n_inputs; i++) { /* slices of whole values, pieces kept by earlier loops */
        const koila_value v = input_of(w, n, i);
        if (need_of(w, n, i).kind == KOILA_R && !uses_local(w, n, i)) continue;
        if (w->s->here[v]) {
            const slice_of cut = w->sliced[v];
            if (cut.user == KOILA_NONE || koila__placement_equal(need_of(w, cut.user, cut.input), need_of(w, n, i))) continue;
            TRY_ALLOC(emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v })); /* cut along another dimension: cut again */
            TRY_ALLOC(release_value(w, v, KOILA__LOCAL_FREE));
        }
        const bool fetch = w->kept[v];
        if (!fetch && uses_local(w, n, i) && w->made_whole[v] == KOILA_NONE) return KOILA_BAD_ARGUMENT; /* not made: a broken invariant */
        w->s->here[v] = 1;
        w->s->root[v] = v;
        w->s->alive[v] = 1;
        w->s->owned[v] = 0;
        const uint8_t last = fetch && !keeps(w, v, j) ? KOILA_INSTR_LAST : 0;
        w->sliced[v] = (slice_of){ fetch ? KOILA_NONE : n, i };
        TRY_ALLOC(emit(w, (koila_instr){ .kind = (uint8_t)(fetch ? KOILA_DO_FETCH : KOILA_DO_SLICE), .flags = last, .steal = (uint16_t)i, .id = v, .user = n }));
        if (last) w->s->owned[v] = 2; /* freed like an own storage, but as a kept piece; may be written in place */
    }
    for (uint32_t k = 0; k < s->n_writes; k++) { /* in place when the base dies here and nobody else lives on its storage */
        const koila_value b = input_of(w, n, s->writes[k].input);
        if (!w->s->here[b] || w->last_use[b] != number || w->s->owned[w->s->root[b]] != 1) continue;
        uint32_t dying = 0;
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const koila_value v = input_of(w, n, i);
            bool again = false;
            for (uint32_t h = 0; h < i; h++) again |= input_of(w, n, h) == v;
            if (!again && w->s->here[v] && w->s->root[v] == w->s->root[b] && w->last_use[v] == number) dying++;
        }
        if (dying == w->s->alive[w->s->root[b]]) run.steal |= (uint16_t)(1u << k);
    }
    for (uint32_t o = 0; o < s->n_outputs; o++) {
        const koila_value v = first + o;
        if (!exists(w, v)) continue;
        w->s->here[v] = 1;
        w->sliced[v].user = KOILA_NONE;
        if (o >= s->n_fresh && run.steal >> (o - s->n_fresh) & 1)
            w->s->root[v] = w->s->root[input_of(w, n, s->writes[o - s->n_fresh].input)];
        else if (o < s->n_fresh && alias && w->s->here[input_of(w, n, 0)])
            w->s->root[v] = w->s->root[input_of(w, n, 0)];
        else {
            w->s->root[v] = v;
            w->s->alive[v] = 0;
            w->s->owned[v] = !(o < s->n_fresh && alias); /* a view of a leaf or of a whole value owns nothing */
            if (w->s->owned[v]) TRY_ALLOC(event(w, in_loop ? KOILA__LOCAL_ALLOC : KOILA__WHOLE_ALLOC, v));
        }
        w->s->alive[w->s->root[v]]++;
    }
    TRY_ALLOC(event(w, KOILA__RUN, n));
    TRY_ALLOC(emit(w, run));

    const koila__event_kind free_event = in_loop ? KOILA__LOCAL_FREE : KOILA__WHOLE_FREE;
    for (uint32_t i = 0; i < s->n_inputs; i++) { /* inputs that end here */
        const koila_value v = input_of(w, n, i);
        if (!w->s->here[v] || w->last_use[v] != number || (!in_loop && w->is_result[v])) continue;
        if (!in_loop && (producer(w, v) == KOILA_NONE || w->whole_last[v] != KOILA_NONE)) continue;
        TRY_ALLOC(emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v }));
        TRY_ALLOC(release_value(w, v, w->s->owned[w->s->root[v]] == 2 ? KOILA__KEPT_FREE : free_event));
    }
    for (uint32_t o = 0; in_loop && o < s->n_outputs; o++) {
        const koila_value v = first + o;
        if (!exists(w, v)) continue;
        koila__event_kind how = KOILA__LOCAL_FREE;
        const koila_value r = w->s->root[v];
        if (w->made_whole[v] == j) {
            if (w->p->value[v].kind == KOILA_S) {
                TRY_ALLOC(emit(w, (koila_instr){ .kind = KOILA_DO_PUT, .id = v }));
                TRY_ALLOC(event(w, KOILA__PUT_ALLOC, v));
            } else {
                const bool own = w->last_use[v] == number && w->s->owned[r] == 1 && w->s->alive[r] == 1 && w->p->value[v].kind == KOILA_P &&
                                 koila__value_meta(w->g, v)->n_bytes == koila__value_meta(w->g, r)->n_bytes;
                TRY_ALLOC(emit(w, (koila_instr){ .kind = KOILA_DO_ADD, .flags = own ? KOILA_INSTR_OWNED : 0, .id = v }));
                TRY_ALLOC(event(w, own ? KOILA__ADD_OWNED : KOILA__ADD_CLONE, v));
                if (own) how = KOILA__LOCAL_FREE_LATER;
            }
            w->whole.here[v] = 1;
            w->whole.root[v] = v;
            w->whole.alive[v] = 1;
            w->whole.owned[v] = 1;
        }
        if (keeps(w, v, j) && !w->kept[v]) {
            TRY_ALLOC(emit(w, (koila_instr){ .kind = KOILA_DO_KEEP, .id = v }));
            w->kept[v] = true;
            w->s->owned[r] = 0; /* the piece owns the storage now: not freed with the slice, not written in place */
        }
        if (w->last_use[v] == number) {
            TRY_ALLOC(emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v }));
            TRY_ALLOC(release_value(w, v, how));
        }
    }
    return KOILA_OK;
}

static koila_status finish_stage(work_state *w, koila__schedule *out, bool is_loop, uint16_t axis)
{
    koila__stage *stage = &out->stages[out->n_stages];
    koila_instr *instrs = koila__arena_array(&out->arena, w->instrs.n, sizeof *instrs);
    stage->events = koila__arena_array(&out->arena, w->events.n, sizeof *stage->events);
    if (!instrs || !stage->events) return KOILA_NO_MEMORY;
    if (w->instrs.n) memcpy(instrs, w->instrs.at, w->instrs.n * sizeof *instrs);
    if (w->events.n) memcpy(stage->events, w->events.at, w->events.n * sizeof *stage->events);
    stage->n_events = w->events.n;
    stage->stage = (koila_stage){ .is_loop = is_loop, .axis = axis, .n_instrs = w->instrs.n, .instrs = instrs };
    w->instrs.n = w->events.n = 0;
    out->n_stages++;
    return KOILA_OK;
}

/* A node that only views one value of the same loop and whose results are nothing but targets of it: may run right behind its producer. */
static bool hoistable(const work_state *w, koila_node n, uint32_t j)
{
    const koila_sig_info *s = sig_of(w, n);
    if (s->n_inputs != 1 || s->n_writes || !(koila_op_flags(w->g->table, s->op) & KOILA_OP_VIEW)) return false;
    for (uint32_t o = 0; o < s->n_outputs; o++) {
        const koila_value v = w->g->nodes.at[n].first_output + o;
        if (w->made_whole[v] != j) return false;
        for (uint32_t at = w->consumer_first[v]; at != KOILA_NONE; at = w->consumer_next[at])
            if (w->in_loop_set[w->consumer_node[at]] && uses_local(w, w->consumer_node[at], w->consumer_input[at])) return false;
    }
    return true;
}

static koila_status emit_loop(work_state *w, koila__schedule *out, uint32_t j)
{
    /* demand: from this loop's targets back to leaves, whole values and kept pieces */
    w->s = &w->slice;
    uint32_t top = 0, lo = w->n_nodes, hi = 0;
    memset(w->in_loop_set, 0, w->n_nodes);
#define ENTER(node_)                                    \
    do {                                                \
        const koila_node q_ = (node_);                  \
        if (!w->in_loop_set[q_]) {                      \
            w->in_loop_set[q_] = true;                  \
            w->stack[top++] = q_;                       \
        }                                               \
    } while (0)
    for (uint32_t v = 0; v < w->n_values; v++)
        if (w->made_whole[v] == j) ENTER(producer(w, v));
    while (top) {
        const koila_node n = w->stack[--top];
        if (n < lo) lo = n;
        if (n > hi) hi = n;
        out->work += w->cost[n].work;
        const koila_sig_info *s = sig_of(w, n);
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const koila_value v = input_of(w, n, i);
            if (!uses_local(w, n, i) || w->kept[v]) continue;
            if (w->p->value[v].kind == KOILA_S && w->made_whole[v] != KOILA_NONE && w->made_whole[v] < j) continue; /* sliced from the whole one */
            ENTER(producer(w, v));
        }
    }
#undef ENTER
    if (lo > hi) return finish_stage(w, out, true, w->loops[j].axis);

    /* order: recorded, with hoisted views right behind their producers; then last uses in that order */
    uint32_t n_order = 0;
    koila_node *order = w->stack; /* [n_nodes + 1]: the DFS is over */
    for (uint32_t n = lo; n <= hi; n++) {
        if (!w->in_loop_set[n]) continue;
        if (hoistable(w, n, j) && producer(w, input_of(w, n, 0)) != KOILA_NONE && w->in_loop_set[producer(w, input_of(w, n, 0))] && uses_local(w, n, 0))
            continue; /* comes behind its producer */
        order[n_order++] = n;
        for (uint32_t done = n_order - 1; done < n_order; done++) {
            const koila_sig_info *s = sig_of(w, order[done]);
            for (uint32_t o = 0; o < s->n_outputs; o++)
                for (uint32_t at = w->consumer_first[w->g->nodes.at[order[done]].first_output + o]; at != KOILA_NONE; at = w->consumer_next[at]) {
                    const koila_node c = w->consumer_node[at];
                    if (w->in_loop_set[c] && hoistable(w, c, j) && uses_local(w, c, 0)) order[n_order++] = c;
                }
        }
    }
    for (uint32_t k = 0; k < n_order; k++) {
        const koila_sig_info *s = sig_of(w, order[k]);
        for (uint32_t i = 0; i < s->n_inputs; i++) w->last_use[input_of(w, order[k], i)] = k;
        for (uint32_t o = 0; o < s->n_outputs; o++) w->last_use[w->g->nodes.at[order[k]].first_output + o] = k;
    }
    for (uint32_t k = 0; k < n_order; k++) KOILA_TRY(emit_node(w, order[k], k, j));
    for (uint32_t v = 0; v < w->n_values; v++) /* pieces whose last loop this was */
        if (w->kept[v] && !keeps(w, v, j)) w->kept[v] = false;
    return finish_stage(w, out, true, w->loops[j].axis);
}

/* Nodes that run once, of one level; and the end of whole values whose last reader was a loop before. */
static koila_status emit_whole(work_state *w, koila__schedule *out, uint32_t level)
{
    w->s = &w->whole;
    for (uint32_t v = 0; v < w->n_values; v++) {
        if (w->whole_last[v] == KOILA_NONE || w->whole_last[v] >= out->n_stages || w->is_result[v]) continue;
        w->whole_last[v] = KOILA_NONE;
        if (producer(w, v) == KOILA_NONE) continue;
        TRY_ALLOC(emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v }));
        TRY_ALLOC(release_value(w, v, KOILA__WHOLE_FREE));
    }
    for (uint32_t n = 0, k = 0; n < w->n_nodes; n++) {
        if (!w->needed[n] || w->p->node[n].in_loop || w->level[n] != level) continue;
        const koila_sig_info *s = sig_of(w, n);
        out->work += w->cost[n].work;
        for (uint32_t i = 0; i < s->n_inputs; i++) w->last_use[input_of(w, n, i)] = k;
        for (uint32_t o = 0; o < s->n_outputs; o++) w->last_use[w->g->nodes.at[n].first_output + o] = k;
        k++;
    }
    for (uint32_t n = 0, k = 0; n < w->n_nodes; n++) {
        if (!w->needed[n] || w->p->node[n].in_loop || w->level[n] != level) continue;
        const koila_sig_info *s = sig_of(w, n);
        /* a value that a later stage reads does not end here, whatever the order within this stage says */
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const koila_value v = input_of(w, n, i);
            if (w->is_result[v] || w->whole_last[v] != KOILA_NONE) w->last_use[v] = KOILA_NONE;
        }
        for (uint32_t o = 0; o < s->n_outputs; o++) {
            const koila_value v = w->g->nodes.at[n].first_output + o;
            if (w->is_result[v] || w->whole_last[v] != KOILA_NONE) w->last_use[v] = KOILA_NONE;
        }
        KOILA_TRY(emit_node(w, n, k, KOILA_NONE));
        for (uint32_t o = 0; o < s->n_outputs; o++) {
            const koila_value v = w->g->nodes.at[n].first_output + o;
            if (!exists(w, v) || w->last_use[v] != k) continue;
            TRY_ALLOC(emit(w, (koila_instr){ .kind = KOILA_DO_FREE, .id = v }));
            TRY_ALLOC(release_value(w, v, KOILA__WHOLE_FREE));
        }
        k++;
    }
    return finish_stage(w, out, false, 0);
}

/* The last stage that can read whole v. Stages are numbered as they will be emitted: the whole stage of a level, then its loops. A loop node may
 * be run again up to the last loop that (transitively) needs it, whatever is kept. */
static koila_status find_whole_last(work_state *w, uint32_t n_levels)
{
    uint32_t *whole_stage = koila__arena_array(&w->tmp, n_levels, sizeof *whole_stage);
    uint32_t *loop_stage = koila__arena_array(&w->tmp, w->n_loops, sizeof *loop_stage);
    if (!whole_stage || !loop_stage) return KOILA_NO_MEMORY;
    for (uint32_t level = 0, j = 0, stage = 0; level < n_levels; level++) {
        whole_stage[level] = stage++;
        for (; j < w->n_loops && w->loops[j].level == level; j++) loop_stage[j] = stage++;
    }
    for (uint32_t v = 0; v < w->n_values; v++) w->whole_last[v] = KOILA_NONE;
    for (uint32_t n = w->n_nodes; n-- > 0;) {
        w->last_run[n] = KOILA_NONE;
        if (!w->needed[n]) continue;
        uint32_t stage;
        if (w->p->node[n].in_loop) {
            if (w->home[n] == KOILA_NONE) continue;
            uint32_t last = w->home[n];
            for (uint32_t o = 0; o < sig_of(w, n)->n_outputs; o++) {
                const koila_value v = w->g->nodes.at[n].first_output + o;
                if (w->made_whole[v] != KOILA_NONE && w->made_whole[v] > last) last = w->made_whole[v];
                for (uint32_t at = w->consumer_first[v]; at != KOILA_NONE; at = w->consumer_next[at]) {
                    const uint32_t l = w->last_run[w->consumer_node[at]];
                    if (uses_local(w, w->consumer_node[at], w->consumer_input[at]) && l != KOILA_NONE && l > last) last = l;
                }
            }
            w->last_run[n] = last;
            stage = loop_stage[last];
        } else
            stage = whole_stage[w->level[n]];
        for (uint32_t i = 0; i < sig_of(w, n)->n_inputs; i++) {
            const koila_value v = input_of(w, n, i);
            const koila_node q = producer(w, v);
            if (q == KOILA_NONE || (uses_local(w, n, i) && w->made_whole[v] == KOILA_NONE)) continue;
            if (!w->p->node[n].in_loop && !w->p->node[q].in_loop && w->level[q] == w->level[n]) continue; /* order within the stage decides */
            if (w->whole_last[v] == KOILA_NONE || w->whole_last[v] < stage) w->whole_last[v] = stage;
        }
    }
    return KOILA_OK;
}

koila_status koila__schedule_init(koila__schedule *out, const koila__placed *p, const koila_value *targets, uint32_t n_targets, koila__keep keep,
                                  const koila_allocator *mem, koila_error *err)
{
    work_state w = { .p = p, .g = p->graph, .keep = keep, .mem = koila__allocator(mem) };
    koila__schedule s = { 0 };
    koila_status status = KOILA_NO_MEMORY;
    koila__arena_init(&w.tmp, mem);
    koila__arena_init(&s.arena, mem);
    w.n_nodes = w.g->nodes.n;
    w.n_values = w.g->values.n;
    const uint32_t N = w.n_nodes + 1, V = w.n_values + 1, I = w.g->inputs.n + 1;
#define MAKE(field, n)                                            \
    do {                                                          \
        w.field = koila__arena_array(&w.tmp, (n), sizeof *w.field); \
        if (!w.field) goto done;                                  \
    } while (0)
    MAKE(needed, N);
    MAKE(level, N);
    MAKE(natural, N);
    MAKE(cost, N);
    MAKE(is_result, V);
    MAKE(is_barrier, V);
    MAKE(made_whole, V);
    MAKE(consumer_first, V);
    MAKE(consumer_next, I);
    MAKE(consumer_input, I);
    MAKE(consumer_node, I);
    MAKE(home, N);
    MAKE(kept, V);
    MAKE(in_loop_set, N);
    MAKE(stack, N);
    MAKE(mark, N);
    MAKE(last_use, V);
    MAKE(last_run, N);
    MAKE(sliced, V);
    scope *const scopes[] = { &w.whole, &w.slice };
    for (size_t i = 0; i < 2; i++) {
        scopes[i]->root = koila__arena_array(&w.tmp, V, sizeof *scopes[i]->root);
        scopes[i]->alive = koila__arena_array(&w.tmp, V, sizeof *scopes[i]->alive);
        scopes[i]->owned = koila__arena_array(&w.tmp, V, 1);
        scopes[i]->here = koila__arena_array(&w.tmp, V, 1);
        if (!scopes[i]->root || !scopes[i]->alive || !scopes[i]->owned || !scopes[i]->here) goto done;
    }
    MAKE(whole_last, V);
    memset(w.consumer_first, 0xff, V * sizeof *w.consumer_first);
    for (uint32_t n = 0; n < w.n_nodes; n++) w.cost[n] = koila__cost_of(w.g->table, koila__node_sig(w.g, n));
    if ((status = find_needed(&w, targets, n_targets)) != KOILA_OK || (status = find_levels(&w)) != KOILA_OK) goto done;
    status = KOILA_NO_MEMORY;
    MAKE(exec, (size_t)N * w.words);
    if ((status = assign_targets(&w)) != KOILA_OK) goto done;
    find_exec(&w);
    uint32_t n_levels = 1;
    for (uint32_t n = 0; n < w.n_nodes; n++) {
        if (!w.needed[n]) continue;
        s.n_needed++;
        s.work_recorded += w.cost[n].work;
        if (w.level[n] + 1 > n_levels) n_levels = w.level[n] + 1;
    }
    if ((status = find_whole_last(&w, n_levels)) != KOILA_OK) goto done;
    status = KOILA_NO_MEMORY;
    s.stages = koila__arena_array(&s.arena, (size_t)n_levels + w.n_loops + 1, sizeof *s.stages);
    if (!s.stages) goto done;
    s.n_loops = w.n_loops;
    for (uint32_t level = 0, j = 0; level < n_levels; level++) {
        if ((status = emit_whole(&w, &s, level)) != KOILA_OK) goto done;
        for (; j < w.n_loops && w.loops[j].level == level; j++)
            if ((status = emit_loop(&w, &s, j)) != KOILA_OK) goto done;
    }
    status = KOILA_OK;
done:
#undef MAKE
    koila__vec_free(&w.mem, &w.instrs);
    koila__vec_free(&w.mem, &w.events);
    koila__arena_deinit(&w.tmp);
    if (status != KOILA_OK) {
        koila__arena_deinit(&s.arena);
        return koila__fail(err, status, 0, "schedule: %s", koila_status_text(status));
    }
    *out = s;
    return KOILA_OK;
}

void koila__schedule_deinit(koila__schedule *s) { koila__arena_deinit(&s->arena); }
