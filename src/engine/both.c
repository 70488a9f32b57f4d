/* both.c — rows and another axis at once: rows outside, the axis inside.
 *
 * A slice of one row is itself a step: the calls of the loop in their order, with their arguments
 * adapted to one row. Its leaves are what the loop slices, fetches and reads whole; its targets are
 * what the loop adds up, collects and keeps. So the step of a row is written down as a recorded
 * graph of its own (the inner step), and planned like any other: whole, along another axis, or with
 * results computed again. The loop then is: bring the leaves, run the inner step, collect.
 *
 * Why this is exact: the slice of a row is what the placement by rows says, whoever runs it, and
 * the inner plan makes the values of the graph that it is given. Neither knows of the other:
 * nothing is placed along two axes at once, barriers between rows stay between loops, and barriers
 * between tokens stay within a row. Each loop is taken by itself, so those that fit (a denominator
 * from the targets alone) stay as they are.
 *
 * Sums. The gradient of a row is itself added up along the other axis. It is added to what earlier
 * rows left (adds_on), so there are no two accumulators, unless the inner step reads the sum: then
 * it is a result like others, and added when the inner step ends.
 *
 * Random calls stay in the loop: they draw the row's numbers from the whole batch's, and the inner
 * step takes them as a leaf. What cannot be told as such a graph (pieces, modules that run as they
 * are, values without a whole form, indices counted from the row) is refused: the loop stays.
 *
 *   peak of such a slice == outer bytes (accumulators, kept pieces, copied leaves)
 *                           + the inner plan's peak, for the outer bytes that it was given */
#include "engine/both.h"

#include "engine/cost.h"
#include "engine/live.h"
#include "engine/slice_call.h"
#include "graph/table.h"

#include <stddef.h>
#include <stdlib.h>

typedef VEC(koila_instr) instr_vec;
typedef VEC(koila__event) event_vec;
typedef VEC(struct koila_inner_leaf) leaf_vec;
typedef VEC(struct koila_inner_result) result_vec;

/* A loop that becomes one over inner steps. */
typedef struct inner_step {
    uint32_t stage;
    koila_graph *graph; /* the recorded form */
    leaf_vec leaves;    /* `inner` is a value of `graph` */
    result_vec results; /* the same; `adds_on`: where that is possible */
    VEC(koila_value) targets;
    VEC(uint8_t) adds_on;    /* [targets] */
    VEC(koila_node) nodes;   /* [nodes of graph] */
    VEC(koila_value) random; /* results of the calls that stay in the loop */
    instr_vec before;        /* slices, fetches and random calls */
    double work;             /* of its calls, all rows */
    double row_work;         /* of those of `graph` */
    uint64_t outer_bytes;    /* that are held beside the inner step */
    koila_plan *plan;
} inner_step;

/* A call of a row. */
typedef struct told_call {
    koila_node n;
    const koila_meta *metas; /* of its inputs; NULL: none is told yet */
    koila__slice_call call;
} told_call;

typedef struct builder {
    koila_plan *p;
    const koila__placed *placed;
    const koila_graph *g; /* of placed */
    koila_table *t;
    koila_allocator mem;
    koila__arena tmp;
    VEC(inner_step) steps;
    /* of the step that is built: values of its graph, or KOILA_NONE */
    koila_value *local, *whole, *sliced; /* [values of g] */
    koila_placement *cut;                /* [values of g] how `sliced` was cut */
    koila__teller teller;                /* of one row, wherever it lies */
    told_call *told;                     /* [signatures of g] the last one */
    inner_step *s;
} builder;

#define PUSH(b, vec, x)                                                                            \
    do {                                                                                           \
        if (!koila__vec_push(&(b)->mem, (vec), (x)))                                               \
            return KOILA_NO_MEMORY;                                                                \
    } while (0)

#define COPY(arena, vec) koila__arena_copy((arena), (vec)->at, (vec)->n * sizeof *(vec)->at)

/* ---- the graph of a row */

static koila_status add_leaf(builder *b, koila_value v, koila_placement x, bool is_local,
                             bool is_read, koila_value *out)
{
    koila_meta meta;
    const bool is_batched = is_local && x.kind == KOILA_S;
    KOILA_TRY(koila__tell_meta(&b->teller, b->g->values.at[v].meta, x, &meta));
    KOILA_TRY(koila_graph_leaf(b->s->graph, meta, is_batched ? KOILA_LEAF_BATCH : KOILA_LEAF_REAL,
                               0, is_batched ? x.dim : 0, NULL, out));
    if (is_read)
        PUSH(b, &b->s->leaves, ((struct koila_inner_leaf){ v, *out, is_local }));
    return KOILA_OK;
}

/* The placement of what node n makes of its input i, which it overwrites unread. */
static koila_placement placement_written(const builder *b, koila_node n, uint32_t i)
{
    const koila_sig_info *s = koila__node_sig(b->g, n);
    uint32_t w = 0;
    while (s->writes[w].input != i)
        w++;
    return b->placed->value[b->g->nodes.at[n].first_output + s->n_fresh + w];
}

/* The value of the inner graph that input i of node n is. */
static koila_status find_input(builder *b, koila_node n, uint32_t i, koila_value *out)
{
    const uint32_t at = b->g->nodes.at[n].first_input + i;
    const koila_value v = b->g->inputs.at[at];
    const koila_placement need = b->placed->need[at];
    if (!koila__reads(koila__node_sig(b->g, n), i)) /* only a place, as large as its contents */
        return add_leaf(b, v, placement_written(b, n, i), true, false, out);
    *out = need.kind == KOILA_R ? b->whole[v] : b->local[v];
    if (*out != KOILA_NONE)
        return KOILA_OK;
    if (need.kind != KOILA_R)
        return KOILA_UNSUPPORTED;
    KOILA_TRY(add_leaf(b, v, need, false, true, out));
    b->whole[v] = *out;
    return KOILA_OK;
}

static koila_status append(builder *b, koila_sig call, const koila_value *inputs, koila_node n,
                           koila_value *first)
{
    KOILA_TRY(koila_graph_node(b->s->graph, call, inputs, KOILA_NONE, first));
    PUSH(b, &b->s->nodes, n);
    b->s->row_work += koila__cost_of(b->t, koila__sig(b->t, call)).work;
    return KOILA_OK;
}

/* Is the call of node n the same as the one that was told, of the same signature? */
static bool is_told(const builder *b, const told_call *last, koila_node n, const koila_meta *metas)
{
    const koila__placed *p = b->placed;
    const koila_sig_info *s = koila__node_sig(b->g, n);
    const koila_node_info was = b->g->nodes.at[last->n], now = b->g->nodes.at[n];
    if (!last->metas || s->n_writes || p->node[last->n].axis != p->node[n].axis ||
        memcmp(p->node[last->n].fix, p->node[n].fix, sizeof p->node[n].fix) != 0)
        return false;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if (last->metas[i] != metas[i] || !koila__placement_equal_at(&p->need[was.first_input + i],
                                                                     &p->need[now.first_input + i]))
            return false;
    for (uint32_t o = 0; o < s->n_outputs; o++)
        if (!koila__placement_equal_at(&p->value[was.first_output + o],
                                       &p->value[now.first_output + o]))
            return false;
    return true;
}

/* The call of node n on one row. */
static koila_status append_call(builder *b, koila_node n, const koila_value *in,
                                const koila_meta *metas)
{
    const koila_value first_output = b->g->nodes.at[n].first_output;
    told_call *last = &b->told[b->g->nodes.at[n].sig];
    koila__slice_call call = last->call;
    koila_value first;
    if (!is_told(b, last, n, metas))
        KOILA_TRY(koila__tell_call(&b->teller, n, metas, &call));
    *last = (told_call){ n, metas, call };
    if (call.is_alias) {
        b->local[first_output] = in[0];
        return KOILA_OK;
    }
    KOILA_TRY(append(b, call.sig, in, n, &first));
    const koila_sig_info *s = koila__sig(b->t, call.sig);
    for (uint32_t o = 0; o < s->n_outputs; o++)
        b->local[first_output + o] = s->outputs[o] == KOILA_NONE ? KOILA_NONE : first + o;
    for (uint32_t i = 0; i < call.n_shares; i++) {
        koila_value *mean = &b->local[first_output + call.shares[i]];
        const koila_value in_mean = *mean;
        koila_sig share;
        KOILA_TRY(koila__tell_share(&b->teller, n, b->s->graph->values.at[*mean].meta, &share));
        KOILA_TRY(append(b, share, &in_mean, n, mean));
    }
    return KOILA_OK;
}

/* A random call stays in the loop; its results are leaves. It needs no input (Note [Random] in
 * place.h). */
static koila_status keep_random(builder *b, koila_instr in)
{
    const koila_sig_info *s = koila__node_sig(b->g, in.id);
    const koila_value first = b->g->nodes.at[in.id].first_output;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if (koila__reads(s, i))
            return KOILA_UNSUPPORTED;
    in.steal = 0;
    PUSH(b, &b->s->before, in);
    for (uint32_t o = 0; o < s->n_outputs; o++) {
        const koila_value v = first + o;
        if (s->outputs[o] == KOILA_NONE)
            continue;
        if (b->placed->value[v].kind != KOILA_S)
            return KOILA_UNSUPPORTED;
        KOILA_TRY(add_leaf(b, v, b->placed->value[v], true, true, &b->local[v]));
        PUSH(b, &b->s->random, v);
    }
    return KOILA_OK;
}

static koila_status tell_run(builder *b, koila_instr run)
{
    const koila_node n = run.id;
    const koila_sig_info *s = koila__node_sig(b->g, n);
    if (!koila__can_tell(&b->teller, n))
        return KOILA_UNSUPPORTED;
    b->s->work += koila__cost_of(b->t, s).work;
    if (koila__flags_of_op(b->t, s->op) & KOILA_OP_RANDOM)
        return keep_random(b, run);
    koila_value *in = koila__arena_array(&b->tmp, s->n_inputs, sizeof *in);
    koila_meta *metas = koila__arena_array(&b->tmp, s->n_inputs, sizeof *metas);
    if (!in || !metas)
        return KOILA_NO_MEMORY;
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        KOILA_TRY(find_input(b, n, i, &in[i]));
        metas[i] = b->s->graph->values.at[in[i]].meta;
    }
    return append_call(b, n, in, metas);
}

/* A slice, or kept pieces: a leaf, made once before the inner step. */
static koila_status tell_slice(builder *b, koila_instr in, koila_placement cut)
{
    const koila_value v = in.id;
    if (b->sliced[v] != KOILA_NONE) {
        if (!koila__placement_equal(b->cut[v], cut))
            return KOILA_UNSUPPORTED;
        b->local[v] = b->sliced[v];
        return KOILA_OK;
    }
    PUSH(b, &b->s->before, in);
    KOILA_TRY(add_leaf(b, v, cut, true, true, &b->local[v]));
    b->sliced[v] = b->local[v];
    b->cut[v] = cut;
    return KOILA_OK;
}

/* Local v is collected or kept. */
static koila_status tell_result(builder *b, koila_instr in)
{
    const koila_placement x = b->placed->value[in.id];
    const bool is_sum = in.kind == KOILA_DO_ADD && x.kind == KOILA_P && x.combine == KOILA_SUM;
    const koila_value inner = b->local[in.id];
    if (inner == KOILA_NONE)
        return KOILA_UNSUPPORTED;
    for (uint32_t i = 0; i < b->s->results.n; i++) {
        if (b->s->results.at[i].inner == inner) { /* one tensor stands for two */
            b->s->results.at[i].adds_on = false;
            b->s->adds_on.at[i] = false;
        }
        if (b->s->results.at[i].outer == in.id)
            return KOILA_OK;
    }
    bool adds_on = is_sum;
    for (uint32_t i = 0; i < b->s->results.n; i++)
        adds_on &= b->s->results.at[i].inner != inner;
    PUSH(b, &b->s->results, ((struct koila_inner_result){ in.id, inner, adds_on }));
    PUSH(b, &b->s->targets, inner);
    PUSH(b, &b->s->adds_on, adds_on);
    return KOILA_OK;
}

static koila_status tell_instr(builder *b, koila_instr in)
{
    const koila_value v = in.id;
    switch ((koila_instr_kind)in.kind) {
    case KOILA_DO_RUN:
        return tell_run(b, in);
    case KOILA_DO_SLICE:
        return tell_slice(b, in, b->placed->need[b->g->nodes.at[in.user].first_input + in.steal]);
    case KOILA_DO_FETCH:
        return tell_slice(b, in, b->placed->value[v]);
    case KOILA_DO_ADD:
    case KOILA_DO_PUT:
    case KOILA_DO_KEEP:
        return tell_result(b, in);
    case KOILA_DO_FREE:
        b->local[v] = KOILA_NONE;
        return KOILA_OK;
    case KOILA_DO_INNER:
        break;
    }
    return KOILA_UNSUPPORTED;
}

/* The calls of stage k as a recorded graph of one row. */
static koila_status tell_stage(builder *b, uint32_t k)
{
    const koila_stage *st = &b->p->schedule.stages[k].stage;
    const size_t n_bytes = b->g->values.n * sizeof *b->local;
    uint16_t axis;
    PUSH(b, &b->steps, (inner_step){ .stage = k });
    b->s = &b->steps.at[b->steps.n - 1];
    memset(b->local, 0xff, n_bytes);
    memset(b->whole, 0xff, n_bytes);
    memset(b->sliced, 0xff, n_bytes);
    KOILA_TRY(koila_graph_new(b->t, &b->mem, &b->s->graph));
    KOILA_TRY(koila_graph_axis(b->s->graph, 1, &axis));
    koila_assert(axis == 0);
    for (uint32_t i = 0; i < st->n_instrs; i++)
        KOILA_TRY(tell_instr(b, st->instrs[i]));
    return b->s->results.n ? KOILA_OK : KOILA_UNSUPPORTED;
}

/* ---- the stage around it */

static bool is_result(const inner_step *s, koila_value v, bool adds_on)
{
    for (uint32_t i = 0; i < s->results.n; i++)
        if (s->results.at[i].outer == v)
            return s->results.at[i].adds_on == adds_on;
    return false;
}

static koila_status write_instrs(builder *b, const inner_step *s, const koila_stage *was,
                                 instr_vec *out)
{
    for (uint32_t i = 0; i < s->before.n; i++)
        PUSH(b, out, s->before.at[i]);
    PUSH(b, out, ((koila_instr){ .kind = KOILA_DO_INNER }));
    for (uint32_t i = 0; i < was->n_instrs; i++) {
        koila_instr in = was->instrs[i];
        if (in.kind != KOILA_DO_ADD && in.kind != KOILA_DO_PUT && in.kind != KOILA_DO_KEEP)
            continue;
        in.flags &= KOILA_INSTR_SECOND;
        in.flags |= is_result(s, in.id, true) ? KOILA_INSTR_ADDED : 0;
        PUSH(b, out, in);
    }
    for (uint32_t i = 0; i < s->results.n; i++)
        if (!s->results.at[i].adds_on)
            PUSH(b, out, ((koila_instr){ .kind = KOILA_DO_FREE, .id = s->results.at[i].outer }));
    for (uint32_t i = 0; i < s->before.n; i++)
        if (s->before.at[i].kind != KOILA_DO_RUN)
            PUSH(b, out, ((koila_instr){ .kind = KOILA_DO_FREE, .id = s->before.at[i].id }));
    for (uint32_t i = 0; i < s->random.n; i++)
        PUSH(b, out, ((koila_instr){ .kind = KOILA_DO_FREE, .id = s->random.at[i] }));
    return KOILA_OK;
}

static koila_status event(builder *b, event_vec *out, koila__event_kind kind, koila_value v)
{
    PUSH(b, out, ((koila__event){ .kind = kind, .value = v }));
    return KOILA_OK;
}

/* The events of `was` of that kind, each value once. */
static koila_status copy_events(builder *b, const koila__stage *was, koila__event_kind kind,
                                koila__event_kind as, event_vec *out)
{
    const uint32_t first = out->n;
    for (uint32_t i = 0; i < was->n_events; i++) {
        bool is_there = was->events[i].kind != kind;
        for (uint32_t k = first; k < out->n && !is_there; k++)
            is_there = out->at[k].value == was->events[i].value;
        if (!is_there)
            KOILA_TRY(event(b, out, as, was->events[i].value));
    }
    return KOILA_OK;
}

/* Does the loop add v to a whole value? KOILA_NONE: any value? */
static bool is_second_term(const koila_stage *st, koila_value v)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind == KOILA_DO_ADD && in->flags & KOILA_INSTR_SECOND &&
            (v == KOILA_NONE || in->id == v))
            return true;
    }
    return false;
}

/* The results of the inner step are there, for the instructions of write_instrs(). */
static koila_status write_result_events(builder *b, const inner_step *s, const instr_vec *instrs,
                                        event_vec *out)
{
    for (uint32_t i = 0; i < s->results.n; i++)
        if (!s->results.at[i].adds_on)
            KOILA_TRY(event(b, out, KOILA__LOCAL_ALLOC, s->results.at[i].outer));
    for (uint32_t i = 0; i < s->results.n; i++) {
        const koila_value v = s->results.at[i].outer;
        bool is_kept = false;
        if (s->results.at[i].adds_on)
            continue;
        for (uint32_t k = 0; k < instrs->n; k++) {
            const koila_instr in = instrs->at[k];
            const bool is_value = in.kind != KOILA_DO_RUN && in.id == v;
            is_kept |= is_value && in.kind == KOILA_DO_KEEP;
            if (is_value && in.kind == KOILA_DO_ADD && !(in.flags & KOILA_INSTR_SECOND))
                KOILA_TRY(event(b, out, KOILA__ADD_CLONE, v));
            if (is_value && in.kind == KOILA_DO_PUT)
                KOILA_TRY(event(b, out, KOILA__PUT, v));
        }
        if (!is_kept)
            KOILA_TRY(event(b, out, KOILA__LOCAL_FREE, v));
    }
    return KOILA_OK;
}

static koila_status write_events(builder *b, const inner_step *s, const koila__stage *was,
                                 const instr_vec *instrs, event_vec *out)
{
    const bool any_second = is_second_term(&was->stage, KOILA_NONE);
    KOILA_TRY(copy_events(b, was, KOILA__SLICE_ALLOC, KOILA__SLICE_ALLOC, out));
    KOILA_TRY(copy_events(b, was, KOILA__CUT_ALLOC, KOILA__CUT_ALLOC, out));
    for (uint32_t i = 0; i < s->random.n; i++)
        KOILA_TRY(event(b, out, KOILA__LOCAL_ALLOC, s->random.at[i]));
    for (uint32_t i = 0; i < s->results.n; i++)
        if (s->results.at[i].adds_on &&
            !(any_second && is_second_term(&was->stage, s->results.at[i].outer)))
            KOILA_TRY(event(b, out, KOILA__ADD_CLONE, s->results.at[i].outer));
    KOILA_TRY(event(b, out, KOILA__INNER, 0));
    KOILA_TRY(write_result_events(b, s, instrs, out));
    KOILA_TRY(copy_events(b, was, KOILA__SLICE_ALLOC, KOILA__SLICE_FREE, out));
    KOILA_TRY(copy_events(b, was, KOILA__CUT_ALLOC, KOILA__CUT_FREE, out));
    for (uint32_t i = 0; i < s->random.n; i++)
        KOILA_TRY(event(b, out, KOILA__LOCAL_FREE, s->random.at[i]));
    return copy_events(b, was, KOILA__KEPT_FREE, KOILA__KEPT_FREE, out);
}

/* Writes instructions and events of a step's stage; they lie in the plan's arena. */
static koila_status write_stage(builder *b, const inner_step *s, koila__stage *out)
{
    const koila__stage *was = &b->p->schedule.stages[s->stage];
    instr_vec instrs = { 0 };
    event_vec events = { 0 };
    koila_status status = write_instrs(b, s, &was->stage, &instrs);
    if (status == KOILA_OK)
        status = write_events(b, s, was, &instrs, &events);
    if (status == KOILA_OK) {
        *out = *was;
        out->stage.instrs = COPY(&b->p->arena, &instrs);
        out->stage.n_instrs = instrs.n;
        out->events = COPY(&b->p->arena, &events);
        out->n_events = events.n;
        if (!out->stage.instrs || !out->events)
            status = KOILA_NO_MEMORY;
    }
    koila__vec_free(&b->mem, &instrs);
    koila__vec_free(&b->mem, &events);
    return status;
}

/* ---- bytes */

/* [stages] the most bytes that are held beside a step; of one walk. */
static bool note_bytes(void *user, uint32_t stage, koila_node node, uint64_t bytes)
{
    uint64_t *most = user;
    if (node == KOILA_NONE && bytes > most[stage])
        most[stage] = bytes;
    return true;
}

/* s->outer_bytes of each step: as if inner steps held nothing. */
static koila_status weigh(builder *b, koila__stage *stages, const koila_plan_options *o)
{
    koila__schedule around = b->p->schedule;
    const koila__live_options live = {
        .rows = b->p->rows, .workspace = o->workspace, .spared = o->spared, .user = o->user
    };
    uint64_t *most = koila__arena_array(&b->tmp, around.n_stages, sizeof *most);
    if (!most)
        return KOILA_NO_MEMORY;
    around.stages = stages;
    koila__live_simulate(b->placed, &around, &live, NULL, note_bytes, most);
    for (uint32_t i = 0; i < b->steps.n; i++)
        b->steps.at[i].outer_bytes = most[b->steps.at[i].stage];
    return KOILA_OK;
}

/* ---- what the calls of a row use inside */

/* A call of the row, and the recorded call of which it is one row of `batch`. */
typedef struct twin {
    koila_sig inner, outer;
} twin;

typedef struct twins {
    const koila_plan_options *o; /* of the step of all rows */
    twin *at;                    /* [n] ascending `inner` */
    uint32_t n;
    int64_t batch;
} twins;

static int compare_twins(const void *x, const void *y)
{
    const twin *a = x, *b = y;
    return (a->inner > b->inner) - (a->inner < b->inner);
}

static koila_status find_twins(builder *b, const inner_step *s, const koila_plan_options *o,
                               twins *out)
{
    const koila_graph *row = s->graph;
    const uint16_t axis = b->p->schedule.stages[s->stage].stage.axis;
    *out = (twins){ .o = o, .batch = b->g->axes.at[axis] };
    out->at = koila__arena_array(&b->tmp, row->nodes.n + 1, sizeof *out->at);
    if (!out->at)
        return KOILA_NO_MEMORY;
    koila_assert(s->nodes.n == row->nodes.n);
    for (koila_node n = 0; n < row->nodes.n; n++) {
        const twin t = { row->nodes.at[n].sig, b->g->nodes.at[s->nodes.at[n]].sig };
        if (koila__sig(b->t, t.inner)->op == koila__sig(b->t, t.outer)->op)
            out->at[out->n++] = t;
    }
    qsort(out->at, out->n, sizeof *out->at, compare_twins);
    return KOILA_OK;
}

/* koila_plan_options.workspace of a row: what is known of the call itself, else what is known of
 * one row of the recorded call. */
static uint64_t workspace_of_row(void *user, koila_sig sig, int64_t rows, int64_t batch)
{
    const twins *t = user;
    const twin key = { .inner = sig };
    const uint64_t known = t->o->workspace(t->o->user, sig, rows, batch);
    const twin *found =
        known || batch ? NULL : bsearch(&key, t->at, t->n, sizeof key, compare_twins);
    return found ? t->o->workspace(t->o->user, found->outer, 1, t->batch) : known;
}

/* ---- the inner plans */

static koila_status plan_step(builder *b, inner_step *s, const koila_plan_options *o,
                              koila__effort *effort, const koila__rival *rival, koila__least *least)
{
    const bool is_forced = o->axes == KOILA_AXES_BOTH;
    koila__least found = { .peak_bytes = UINT64_MAX };
    koila_plan_options inner = *o;
    twins known;
    if (o->workspace) {
        KOILA_TRY(find_twins(b, s, o, &known));
        inner.workspace = workspace_of_row;
        inner.spared = NULL;
        inner.user = &known;
    }
    inner.accepts = NULL;
    inner.axes = is_forced ? KOILA_AXES_OTHER : KOILA_AXES_ANY;
    inner.recomputes = o->recomputes && !is_forced;
    inner.host_price = 0; /* a row's values wait on the device */
    if (o->budget_bytes != UINT64_MAX)
        inner.budget_bytes =
            s->outer_bytes < o->budget_bytes ? o->budget_bytes - s->outer_bytes : 0;
    const koila_status status =
        koila__plan_row(s->graph, s->targets.at, s->targets.n, s->adds_on.at, &inner, &b->mem,
                        effort, rival, &s->plan, &found, NULL);
    if (status == KOILA_OOM && found.peak_bytes != UINT64_MAX) {
        found.peak_bytes += s->outer_bytes;
        if (found.peak_bytes < least->peak_bytes || least->peak_bytes == UINT64_MAX)
            *least = found;
    }
    return status;
}

/* Some of them: a loop without another axis stays as it is where all others are cut in any case. */
static koila_status plan_steps(builder *b, const koila_plan_options *o, koila__effort *effort,
                               const koila__rival *rival, koila__least *least)
{
    bool any = false;
    for (uint32_t i = 0; i < b->steps.n; i++) {
        const koila_status status = plan_step(b, &b->steps.at[i], o, effort, rival, least);
        if (status != KOILA_OK && (status != KOILA_UNSUPPORTED || o->axes != KOILA_AXES_BOTH))
            return status;
        any |= status == KOILA_OK;
    }
    return any ? KOILA_OK : KOILA_UNSUPPORTED;
}

/* Which sums the inner plan adds up in the loop's accumulators. */
static void find_adds_on(inner_step *s)
{
    for (uint32_t i = 0; i < s->results.n; i++)
        s->results.at[i].adds_on = koila_plan_adds_on(s->plan, koila_plan_target(s->plan, i));
}

/* The step's part of the plan's public face, in the plan's arena. */
static koila_status describe(builder *b, const inner_step *s, const koila_inner **out)
{
    koila__arena *a = &b->p->arena;
    koila_inner *inner = koila__arena_alloc(a, sizeof *inner);
    struct koila_inner_leaf *leaves = COPY(a, &s->leaves);
    struct koila_inner_result *results = COPY(a, &s->results);
    koila_node *nodes = COPY(a, &s->nodes);
    if (!inner || !leaves || !results || !nodes)
        return KOILA_NO_MEMORY;
    *inner = (koila_inner){ .plan = s->plan,
                            .leaves = leaves,
                            .results = results,
                            .n_results = s->results.n,
                            .nodes = nodes,
                            .n_nodes = s->nodes.n };
    for (uint32_t i = 0; i < s->leaves.n; i++) {
        leaves[inner->n_leaves] = s->leaves.at[i];
        leaves[inner->n_leaves].inner = koila_plan_leaf(s->plan, s->leaves.at[i].inner);
        inner->n_leaves += leaves[inner->n_leaves].inner != KOILA_NONE;
    }
    for (uint32_t i = 0; i < s->results.n; i++)
        results[i].inner = koila_plan_target(s->plan, i);
    *out = inner;
    return KOILA_OK;
}

/* ---- all of it */

static koila_status make_builder(builder *b)
{
    const uint32_t n = b->g->values.n + 1;
    b->local = koila__arena_array(&b->tmp, n, sizeof *b->local);
    b->whole = koila__arena_array(&b->tmp, n, sizeof *b->whole);
    b->sliced = koila__arena_array(&b->tmp, n, sizeof *b->sliced);
    b->cut = koila__arena_array(&b->tmp, n, sizeof *b->cut);
    b->told = koila__arena_array(&b->tmp, b->t->sigs.n, sizeof *b->told);
    return b->local && b->whole && b->sliced && b->cut && b->told ? KOILA_OK : KOILA_NO_MEMORY;
}

/* Tells the loops that become steps: those above the budget, or all that can. */
static koila_status tell_stages(builder *b, const koila_plan_options *o)
{
    const bool is_forced = o->axes == KOILA_AXES_BOTH;
    const koila__schedule *schedule = &b->p->schedule;
    const koila__live_options live = {
        .rows = b->p->rows, .workspace = o->workspace, .spared = o->spared, .user = o->user
    };
    uint64_t *peaks = koila__arena_array(&b->tmp, schedule->n_stages, sizeof *peaks);
    if (!peaks)
        return KOILA_NO_MEMORY;
    koila__live_simulate(b->placed, schedule, &live, peaks, NULL, NULL);
    for (uint32_t k = 0; k < schedule->n_stages; k++) {
        const koila_stage *st = &schedule->stages[k].stage;
        if (!st->n_instrs || (!is_forced && peaks[k] <= o->budget_bytes))
            continue;
        if (!st->is_loop) {
            if (is_forced)
                continue;
            return KOILA_UNSUPPORTED; /* a whole stage does not fit either */
        }
        const koila_status status = tell_stage(b, k);
        if (status != KOILA_UNSUPPORTED || !is_forced)
            KOILA_TRY(status);
        else
            koila_graph_free(b->steps.at[--b->steps.n].graph);
    }
    return b->steps.n ? KOILA_OK : KOILA_UNSUPPORTED;
}

static void step_free(builder *b, inner_step *s)
{
    koila_graph_free(s->graph);
    koila__vec_free(&b->mem, &s->leaves);
    koila__vec_free(&b->mem, &s->results);
    koila__vec_free(&b->mem, &s->targets);
    koila__vec_free(&b->mem, &s->adds_on);
    koila__vec_free(&b->mem, &s->nodes);
    koila__vec_free(&b->mem, &s->random);
    koila__vec_free(&b->mem, &s->before);
    koila_plan_free(s->plan);
}

/* The work of the step's plan by that of the calls that the loop has. Without loops over time
 * (unroll.c) the plan has fewer bytes to move than was recorded, and tells its work by its own. */
static double work_of_row(const inner_step *s, const koila_plan_info *inner)
{
    const bool is_less = inner->work_recorded > 0 && inner->work_recorded < s->row_work;
    return is_less ? inner->replay_ratio * s->row_work : inner->work;
}

/* The facts of the inner plans, and the work with them: a loop's calls ran in all rows, so do the
 * inner step's. */
static void tell_info(builder *b)
{
    koila_plan_info *info = &b->p->info;
    uint64_t most = 0;
    for (uint32_t i = 0; i < b->steps.n; i++) {
        const inner_step *s = &b->steps.at[i];
        if (!s->plan)
            continue;
        const koila_plan_info inner = koila_plan_get(s->plan);
        b->p->schedule.work += work_of_row(s, &inner) * (double)info->batch - s->work;
        info->n_again += inner.n_again;
        info->n_inner++;
        if (info->n_inner > 1 && inner.peak_bytes <= most)
            continue;
        most = inner.peak_bytes;
        info->inner_dim = inner.dim;
        info->inner_size = inner.batch * inner.unit;
        info->inner_rows = inner.rows * inner.unit;
        info->inner_slices = inner.n_slices;
    }
    info->work = b->p->schedule.work;
    if (info->work_recorded > 0)
        info->replay_ratio = info->work / info->work_recorded;
}

/* The stages with the steps planned; on KOILA_OK the plan owns the inner plans. */
static koila_status cut(builder *b, const koila_plan_options *o, koila__effort *effort,
                        const koila__rival *rival, koila__least *least)
{
    koila__schedule *schedule = &b->p->schedule;
    KOILA_TRY(make_builder(b));
    KOILA_TRY(tell_stages(b, o));
    koila__stage *stages =
        koila__arena_copy(&b->p->arena, schedule->stages, schedule->n_stages * sizeof *stages);
    if (!stages)
        return KOILA_NO_MEMORY;
    for (uint32_t i = 0; i < b->steps.n; i++)
        KOILA_TRY(write_stage(b, &b->steps.at[i], &stages[b->steps.at[i].stage]));
    KOILA_TRY(weigh(b, stages, o));
    KOILA_TRY(plan_steps(b, o, effort, rival, least));
    for (uint32_t i = 0; i < b->steps.n; i++) {
        inner_step *s = &b->steps.at[i];
        if (!s->plan) {
            stages[s->stage] = schedule->stages[s->stage];
            continue;
        }
        find_adds_on(s);
        KOILA_TRY(write_stage(b, s, &stages[s->stage]));
        KOILA_TRY(describe(b, s, &stages[s->stage].stage.inner));
        stages[s->stage].inner_peak = koila_plan_get(s->plan).peak_bytes;
    }
    tell_info(b);
    schedule->stages = stages;
    for (uint32_t i = 0; i < b->steps.n; i++)
        b->steps.at[i].plan = NULL; /* the plan's now */
    return KOILA_OK;
}

koila_status koila__both_cut(koila_plan *p, const koila_plan_options *o, koila__effort *effort,
                             const koila__rival *rival, koila__least *least)
{
    builder b = { .p = p,
                  .placed = p->placed,
                  .g = p->placed->graph,
                  .t = p->placed->graph->table,
                  .mem = p->mem };
    if (p->placed->cut || p->placed->absent)
        return KOILA_UNSUPPORTED;
    koila__arena_init(&b.tmp, &b.mem);
    b.teller = (koila__teller){
        .plan = p, .table = b.t, .mem = b.mem, .tmp = &b.tmp, .begin = KOILA__ANYWHERE, .rows = 1
    };
    const koila_status status = cut(&b, o, effort, rival, least);
    for (uint32_t i = 0; i < b.steps.n; i++)
        step_free(&b, &b.steps.at[i]);
    koila__vec_free(&b.mem, &b.steps);
    koila__vec_free(&b.mem, &b.teller.tokens);
    koila__arena_deinit(&b.tmp);
    return status;
}

void koila__both_free(koila__schedule *s)
{
    for (uint32_t k = 0; k < s->n_stages; k++)
        if (s->stages[k].stage.inner)
            koila_plan_free((koila_plan *)s->stages[k].stage.inner->plan);
}

koila_status koila__both_mark(koila__placed *placed, const uint8_t *marked,
                              const koila_value *targets, uint32_t n_targets)
{
    enum { ONCE = 1, TWICE = 2 };
    const koila_graph *g = placed->graph;
    uint8_t *adds_on = koila__arena_array(&placed->arena, g->values.n, 1);
    if (!adds_on)
        return KOILA_NO_MEMORY;
    for (uint32_t i = 0; i < n_targets; i++)
        adds_on[targets[i]] = adds_on[targets[i]] ? TWICE : ONCE;
    for (uint32_t i = 0; i < n_targets; i++) {
        const koila_placement x = placed->value[targets[i]];
        if (!marked[i] || adds_on[targets[i]] == TWICE || x.kind != KOILA_P ||
            x.combine != KOILA_SUM)
            adds_on[targets[i]] = 0;
    }
    for (uint32_t at = 0; at < g->inputs.n; at++) /* read otherwise than a slice leaves it? */
        if (!koila__placement_equal(placed->need[at], placed->value[g->inputs.at[at]]))
            adds_on[g->inputs.at[at]] = 0;
    placed->adds_on = adds_on;
    return KOILA_OK;
}

/* A gather of an inner plan, told of the node that it stands for. */
static koila_gather told(const koila_plan *p, const koila_inner *inner, koila_gather g)
{
    const koila_graph *ours = p->placed->graph;
    const koila_graph *theirs = inner->plan->placed->graph;
    const koila_node n = inner->nodes[koila_plan_recorded(inner->plan, g.node)];
    const koila_sig_info *s = koila__node_sig(ours, n);
    koila_gather out = { n, ours->nodes.at[n].first_output, g.bytes };
    if (s->n_inputs)
        out.value = ours->inputs.at[ours->nodes.at[n].first_input];
    for (uint32_t i = 0; i < koila__node_sig(theirs, g.node)->n_inputs && i < s->n_inputs; i++)
        if (theirs->inputs.at[theirs->nodes.at[g.node].first_input + i] == g.value)
            out.value = ours->inputs.at[ours->nodes.at[n].first_input + i];
    return out;
}

uint32_t koila__both_gathers(const koila_plan *p, koila_gather *out, uint32_t cap)
{
    uint32_t n = 0;
    for (uint32_t k = 0; k < p->schedule.n_stages; k++) {
        const koila_inner *inner = p->schedule.stages[k].stage.inner;
        for (uint32_t i = 0; inner && i < inner->plan->info.n_gathers; i++, n++)
            if (n < cap)
                out[n] = told(p, inner, inner->plan->gathers[i]);
    }
    return n;
}
