/* unroll_tell.c — the calls of a step in slices, each told as a call of its own.
 *
 * They are told in the recorded order, a loop's once for each slice. A value has a part in each
 * slice, a whole form, or both; each is told when the first call asks for it. Where a whole value
 * meets its slices, less is done than the placement says:
 *   x[:, t] of a value in parts          reads the part that has t
 *   a part of stack(list)                is the stack of its items
 * Gradients of x[:, t] are such stacks by now (stacked.c). */
#include "engine/unroll.h"

#include "engine/share.h"
#include "engine/slice_call.h"
#include "engine/unroll_inside.h"
#include "placement/rules.h"

/* The last call on a slice: slices of as many rows are told alike. */
typedef struct last_call {
    koila_node n;
    int64_t rows;
    koila__slice_call call;
    VEC(koila_meta) metas; /* of its inputs */
} last_call;

typedef struct unroller {
    koila__told_step *s;
    const koila__placed *p;
    const koila_graph *g; /* of p */
    koila_table *t;
    koila_allocator mem;
    koila__teller teller;
    koila_plan plan;   /* for the teller */
    koila_node now;    /* the node that is told */
    koila__item *part; /* [values of g * slices] or KOILA_NONE */
    /* [values of g] how `part` of a whole value was cut: all parts alike */
    koila_placement *cut;
    VEC(koila__item) scratch;
    last_call last;
    koila_op op_slice, op_clone;
} unroller;

/* The slice that has row r of that axis. */
static uint32_t slice_of(const unroller *u, uint16_t axis, int64_t r)
{
    uint32_t k = (uint32_t)(r * u->s->n_slices / u->g->axes.at[axis]);
    while (k + 1 < u->s->n_slices && koila__told_begin(u->s, axis, k + 1) <= r)
        k++;
    return k;
}

/* The teller tells of slice k of that axis from now on. */
static void go_to(unroller *u, uint16_t axis, uint32_t k)
{
    u->teller.begin = koila__told_begin(u->s, axis, k);
    u->teller.rows = koila__told_begin(u->s, axis, k + 1) - u->teller.begin;
}

static const koila_meta_info *meta_of(const unroller *u, koila__item x)
{
    return koila__meta(u->t, u->s->items.at[x].meta);
}

/* ---- telling */

static koila_status tell(unroller *u, koila__told what, const koila__item *in, uint32_t n_in,
                         const koila_meta *outputs, uint32_t n_out, koila__item *first)
{
    what.first_in = u->s->ins.n;
    what.n_in = n_in;
    what.first_out = u->s->items.n;
    what.n_out = n_out;
    what.is_first = what.kind == KOILA__TOLD_CALL && !what.is_single;
    for (uint32_t i = 0; i < n_in; i++) {
        const uint32_t by = u->s->items.at[in[i]].by;
        const koila__told *maker = by == KOILA_NONE ? NULL : &u->s->told.at[by];
        what.is_first &= !maker || maker->is_single || maker->kind != KOILA__TOLD_CALL;
        what.is_late |=
            what.is_single && maker && (maker->kind == KOILA__TOLD_SUM || maker->is_late);
        const koila__item_use use = { in[i], u->s->told.n };
        TRY_ALLOC(koila__vec_push(&u->mem, &u->s->ins, use));
    }
    for (uint32_t o = 0; o < n_out; o++) {
        const koila__item_info info = { outputs[o], u->s->told.n };
        TRY_ALLOC(koila__vec_push(&u->mem, &u->s->items, info));
    }
    TRY_ALLOC(koila__vec_push(&u->mem, &u->s->told, what));
    *first = what.first_out;
    return KOILA_OK;
}

/* A call of `sig` that stands for node n. */
static koila_status tell_sig(unroller *u, koila_sig sig, koila_node n, bool is_single,
                             const koila__item *in, koila__item *first)
{
    const koila_sig_info *s = koila__sig(u->t, sig);
    const koila__told call = { .kind = KOILA__TOLD_CALL,
                               .is_single = is_single,
                               .sig = sig,
                               .from = n == KOILA_NONE ? u->now : n }; /* a slice of a leaf */
    return tell(u, call, in, s->n_inputs, s->outputs, s->n_outputs, first);
}

/* A call of `op` on one tensor and numbers that stands for node n; its result has meta `out`. */
static koila_status tell_op(unroller *u, koila_op op, koila_node n, koila__item in,
                            const koila_arg *args, uint32_t n_pos, uint32_t n_args, koila_meta out,
                            koila__item *result)
{
    koila_sig sig;
    KOILA_TRY(koila__tell_on(u->t, op, u->s->items.at[in].meta, args, n_pos, n_args, out, &sig));
    return tell_sig(u, sig, n, false, &in, result);
}

/* The meta of m without dimension d: what taking one element of it leaves. */
static koila_status meta_without(const unroller *u, const koila_meta_info *m, uint32_t d,
                                 koila_meta *out)
{
    int64_t size[KOILA_MAX_DIMS], stride[KOILA_MAX_DIMS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_dims; i++) {
        if (i == d)
            continue;
        size[n] = m->size[i];
        stride[n++] = m->stride[i];
    }
    return koila_table_meta(u->t, m->dtype, m->device, n, size, stride, out);
}

/* ---- whole values and their parts */

static koila_status whole_of(unroller *u, koila_value v, koila__item *out);
static koila_status part_of(unroller *u, koila_value v, koila_placement cut, uint32_t k,
                            koila__item *out);

static koila__item *part_at(unroller *u, koila_value v, uint32_t k)
{
    return &u->part[(size_t)v * u->s->n_slices + k];
}

/* Parts as inputs of a join or sum. */
static koila_status push_parts(unroller *u, koila_value v)
{
    u->scratch.n = 0;
    for (uint32_t k = 0; k < u->s->n_slices; k++) {
        const koila__item x = *part_at(u, v, k);
        if (x == KOILA_NONE)
            return KOILA_UNSUPPORTED;
        TRY_ALLOC(koila__vec_push(&u->mem, &u->scratch, x));
    }
    return KOILA_OK;
}

/* The whole form of v, from its parts. */
static koila_status whole_of(unroller *u, koila_value v, koila__item *out)
{
    const koila_placement x = u->p->value[v];
    koila_meta meta = u->g->values.at[v].meta;
    *out = u->s->whole[v];
    if (*out != KOILA_NONE)
        return KOILA_OK;
    const koila_dtype dtype = koila__meta(u->t, meta)->dtype;
    const bool is_half = dtype == KOILA_DTYPE_F16 || dtype == KOILA_DTYPE_BF16;
    const bool joins = x.kind == KOILA_S && x.outer == 1 && x.inner > 0;
    const bool adds = x.kind == KOILA_P && x.combine == KOILA_SUM && !is_half;
    if (!joins && !adds)
        return KOILA_UNSUPPORTED;
    KOILA_TRY(push_parts(u, v));
    for (uint32_t i = 0; i < u->scratch.n; i++)
        if (u->s->items.at[u->scratch.at[i]].by == KOILA_NONE)
            return KOILA_UNSUPPORTED;
    if (adds) /* parts of a sum are of one form */
        meta = u->s->items.at[u->scratch.at[0]].meta;
    KOILA_TRY(koila__dense_meta(u->t, meta, &meta));
    const koila__told what = { .kind = joins ? KOILA__TOLD_JOIN : KOILA__TOLD_SUM,
                               .from = u->g->values.at[v].node,
                               .stands_for = v };
    KOILA_TRY(tell(u, what, u->scratch.at, u->scratch.n, &meta, 1, out));
    u->s->whole[v] = *out;
    return KOILA_OK;
}

/* Rows k of whole v, dense where the whole value is. */
static koila_status slice_whole(unroller *u, koila_value v, koila_placement cut, uint32_t k,
                                koila__item *out)
{
    const koila_node n = u->g->values.at[v].node;
    koila__item whole;
    koila_meta meta;
    KOILA_TRY(whole_of(u, v, &whole));
    go_to(u, cut.axis, k);
    const koila_meta_info *m = meta_of(u, whole);
    const int64_t begin = u->teller.begin * cut.inner;
    const int64_t end = begin + u->teller.rows * cut.inner;
    const koila_arg args[] = { koila__int_arg(cut.dim), koila__int_arg(begin), koila__int_arg(end),
                               koila__int_arg(1) };
    int64_t size[KOILA_MAX_DIMS];
    for (uint32_t d = 0; d < m->n_dims; d++)
        size[d] = d == cut.dim ? end - begin : m->size[d];
    KOILA_TRY(koila_table_meta(u->t, m->dtype, m->device, m->n_dims, size, m->stride, &meta));
    KOILA_TRY(tell_op(u, u->op_slice, n, whole, args, 4, 4, meta, out));
    m = meta_of(u, whole);
    if (koila_slice_form(m, koila__share_of(cut), false) == KOILA_SLICE_VIEW ||
        !koila_meta_is_dense(m))
        return KOILA_OK;
    KOILA_TRY(koila__tell_meta(&u->teller, u->s->items.at[whole].meta, cut, &meta));
    return tell_op(u, u->op_clone, n, *out, NULL, 0, 0, meta, out);
}

/* A dimension of n_dims, or an index into `size`: counted from the front. */
static int64_t index_at(const koila_sig_info *s, uint32_t at, int64_t size)
{
    const int64_t i = koila__int_at(s, at, 0);
    return i < 0 ? i + size : i;
}

/* Rows k of stack(list, dim) are a stack of some items. */
static koila_status part_of_stack(unroller *u, koila_value v, koila_placement cut, uint32_t k,
                                  koila__item *out)
{
    const koila_node n = u->g->values.at[v].node;
    const koila_sig_info *s = koila__node_sig(u->g, n);
    const int64_t begin = koila__told_begin(u->s, cut.axis, k) * cut.inner;
    const int64_t end = koila__told_begin(u->s, cut.axis, k + 1) * cut.inner;
    const uint32_t n_items = (uint32_t)(end - begin);
    koila_arg *tokens = koila__arena_array(&u->s->tmp, s->n_tokens, sizeof *tokens);
    koila__item *in = koila__arena_array(&u->s->tmp, n_items, sizeof *in);
    koila_meta meta;
    koila_sig sig;
    TRY_ALLOC(tokens && in);
    tokens[0] = (koila_arg){ .kind = KOILA_ARG_LIST, .n = n_items };
    for (uint32_t i = 0; i < n_items; i++) {
        KOILA_TRY(whole_of(u, u->g->inputs.at[u->g->nodes.at[n].first_input + (uint32_t)begin + i],
                           &in[i]));
        tokens[1 + i] = (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = u->s->items.at[in[i]].meta };
    }
    s = koila__node_sig(u->g, n);
    const uint32_t n_rest = s->n_tokens - 1 - s->n_inputs;
    for (uint32_t i = 0; i < n_rest; i++)
        tokens[1 + n_items + i] = s->tokens[1 + s->n_inputs + i];
    go_to(u, cut.axis, k);
    KOILA_TRY(koila__tell_meta(&u->teller, s->outputs[0], cut, &meta));
    koila_sig_info call = *s;
    call.tokens = tokens;
    call.n_tokens = 1 + n_items + n_rest;
    call.outputs = &meta;
    KOILA_TRY(koila_table_sig(u->t, &call, &sig));
    KOILA_TRY(tell_sig(u, sig, n, false, in, out));
    u->s->told.at[u->s->items.at[*out].by].is_first = false;
    return KOILA_OK;
}

/* Rows k of v, which the placed step makes whole, cut so. */
static koila_status cut_whole(unroller *u, koila_value v, koila_placement cut, uint32_t k,
                              koila__item *out)
{
    const koila_node n = u->g->values.at[v].node;
    const koila_sig_info *s = n == KOILA_NONE ? NULL : koila__node_sig(u->g, n);
    if (s && !s->n_writes && !u->p->node[n].in_loop) {
        const koila__rule rule = koila__rule_of(u->t, s->op);
        const uint32_t n_dims = koila__value_meta(u->g, v)->n_dims;
        const bool stacks = rule == koila__rule_stack;
        if (stacks && s->tokens[0].kind == KOILA_ARG_LIST && index_at(s, 1, n_dims) == cut.dim)
            return part_of_stack(u, v, cut, k, out);
        const koila_value from = s->n_inputs ? u->g->inputs.at[u->g->nodes.at[n].first_input] : v;
        if (rule == koila__rule_alias && koila__placement_equal(u->p->value[from], cut))
            return part_of(u, from, cut, k, out);
    }
    return slice_whole(u, v, cut, k, out);
}

/* Rows k of v as a use needs them. */
static koila_status part_of(unroller *u, koila_value v, koila_placement cut, uint32_t k,
                            koila__item *out)
{
    koila__item *at = part_at(u, v, k);
    *out = *at;
    if (koila__placement_equal(u->p->value[v], cut) &&
        (*at != KOILA_NONE || u->g->values.at[v].node != KOILA_NONE))
        return *at == KOILA_NONE ? KOILA_UNSUPPORTED : KOILA_OK;
    if (cut.kind != KOILA_S || cut.outer != 1 || cut.inner <= 0)
        return KOILA_UNSUPPORTED;
    if (*at != KOILA_NONE && koila__placement_equal(u->cut[v], cut))
        return KOILA_OK;
    KOILA_TRY(cut_whole(u, v, cut, k, out));
    if (u->cut[v].kind == KOILA_R || koila__placement_equal(u->cut[v], cut)) {
        u->cut[v] = cut;
        *at = *out;
    }
    return KOILA_OK;
}

/* ---- calls */

/* The signature on these inputs. */
static koila_status with_metas(unroller *u, koila_sig id, const koila__item *in, koila_sig *out)
{
    const uint32_t n_inputs = koila__sig(u->t, id)->n_inputs;
    koila_meta *metas = koila__arena_room(&u->s->tmp, n_inputs * sizeof *metas);
    TRY_ALLOC(metas);
    for (uint32_t i = 0; i < n_inputs; i++)
        metas[i] = u->s->items.at[in[i]].meta;
    return koila__tell_metas(u->t, id, metas, &u->s->tmp, out);
}

/* The call of node n on inputs of these metas, on the teller's slice. */
static koila_status call_on_slice(unroller *u, koila_node n, const koila_meta *metas,
                                  koila__slice_call *call)
{
    const koila_sig_info *s = koila__node_sig(u->g, n);
    const size_t n_bytes = s->n_inputs * sizeof *metas;
    last_call *last = &u->last;
    if (last->n == n && last->rows == u->teller.rows &&
        (!n_bytes || memcmp(last->metas.at, metas, n_bytes) == 0)) {
        *call = last->call;
        return KOILA_OK;
    }
    KOILA_TRY(koila__tell_call(&u->teller, n, metas, call));
    last->n = KOILA_NONE;
    if (s->n_writes || koila__depends_on_place(u->p->node[n].fix))
        return KOILA_OK;
    last->metas.n = 0;
    TRY_ALLOC(koila__vec_reserve(&u->mem, &last->metas, s->n_inputs));
    if (n_bytes)
        memcpy(last->metas.at, metas, n_bytes);
    last->metas.n = s->n_inputs;
    last->n = n;
    last->rows = u->teller.rows;
    last->call = *call;
    return KOILA_OK;
}

/* The call of node n, which is in a loop, on slice k. */
static koila_status tell_slice(unroller *u, koila_node n, uint32_t k, const koila__item *in)
{
    const koila_value first_output = u->g->nodes.at[n].first_output;
    koila_meta *metas =
        koila__arena_room(&u->s->tmp, koila__node_sig(u->g, n)->n_inputs * sizeof *metas);
    koila__slice_call call;
    koila__item first;
    TRY_ALLOC(metas);
    for (uint32_t i = 0; i < koila__node_sig(u->g, n)->n_inputs; i++)
        metas[i] = u->s->items.at[in[i]].meta;
    go_to(u, u->p->node[n].axis, k);
    KOILA_TRY(call_on_slice(u, n, metas, &call));
    if (call.is_alias) {
        *part_at(u, first_output, k) = in[0];
        return KOILA_OK;
    }
    KOILA_TRY(tell_sig(u, call.sig, n, false, in, &first));
    for (uint32_t o = 0; o < koila__sig(u->t, call.sig)->n_outputs; o++)
        *part_at(u, first_output + o, k) = first + o;
    for (uint32_t i = 0; i < call.n_shares; i++) {
        koila__item *mean = part_at(u, first_output + call.shares[i], k);
        const koila__item whole_mean = *mean;
        koila_sig share;
        KOILA_TRY(koila__tell_share(&u->teller, n, u->s->items.at[whole_mean].meta, &share));
        KOILA_TRY(tell_sig(u, share, n, false, &whole_mean, mean));
    }
    return KOILA_OK;
}

/* Node n, which is in a loop, in slice k. `in`: room for its inputs; is_alias: the call is its
 * input as it is placed. */
static koila_status run_slice(unroller *u, koila_node n, uint32_t k, koila__item *in, bool is_alias)
{
    const koila_node_info info = u->g->nodes.at[n];
    const uint32_t n_inputs = koila__node_sig(u->g, n)->n_inputs;
    for (uint32_t i = 0; i < n_inputs; i++) {
        const koila_value v = u->g->inputs.at[info.first_input + i];
        const koila_placement need = u->p->need[info.first_input + i];
        if (need.kind == KOILA_R)
            KOILA_TRY(whole_of(u, v, &in[i]));
        else
            KOILA_TRY(part_of(u, v, need, k, &in[i]));
    }
    if (is_alias) {
        *part_at(u, info.first_output, k) = in[0];
        return KOILA_OK;
    }
    return tell_slice(u, n, k, in);
}

/* Node n, which is in a loop, in each slice. */
static koila_status run_slices(unroller *u, koila_node n)
{
    const koila_node_info info = u->g->nodes.at[n];
    const koila_sig_info *s = koila__node_sig(u->g, n);
    const bool is_alias =
        koila__rule_of(u->t, s->op) == koila__rule_alias &&
        koila__placement_equal(u->p->need[info.first_input], u->p->value[info.first_output]);
    koila__item *in = koila__arena_room(&u->s->tmp, s->n_inputs * sizeof *in);
    TRY_ALLOC(in);
    for (uint32_t k = 0; k < u->s->n_slices; k++) {
        const koila__mark before = koila__arena_mark(&u->s->tmp);
        KOILA_TRY(run_slice(u, n, k, in, is_alias));
        koila__arena_rewind(&u->s->tmp, before);
    }
    return KOILA_OK;
}

/* x[:, t] of a value in parts reads the part that has t. */
static koila_status take(unroller *u, koila_node n, koila_value v, bool unbinds)
{
    enum { DIM = 1, INDEX };
    const koila_placement cut = u->p->value[v];
    const koila_value first = u->g->nodes.at[n].first_output;
    const koila_sig_info s = *koila__node_sig(u->g, n);
    const int64_t at = index_at(&s, INDEX, koila__value_meta(u->g, v)->size[cut.dim]);
    koila_arg *tokens = koila__arena_copy(&u->s->tmp, s.tokens, s.n_tokens * sizeof *tokens);
    koila_meta *metas = koila__arena_array(&u->s->tmp, s.n_outputs, sizeof *metas);
    TRY_ALLOC(tokens && metas);
    for (uint32_t k = 0; k < u->s->n_slices; k++) {
        koila_sig_info call = s;
        koila_sig sig;
        koila__item in, out;
        if (!unbinds && slice_of(u, cut.axis, at / cut.inner) != k)
            continue;
        KOILA_TRY(part_of(u, v, cut, k, &in));
        const int64_t begin = koila__told_begin(u->s, cut.axis, k) * cut.inner;
        call.n_fresh =
            unbinds ? (uint32_t)(koila__told_begin(u->s, cut.axis, k + 1) * cut.inner - begin) : 1;
        call.tokens = tokens;
        call.outputs = metas;
        tokens[0].u.id = u->s->items.at[in].meta;
        if (!unbinds)
            tokens[s.start[INDEX]] = koila__int_arg(at - begin);
        for (uint32_t o = 0; o < call.n_fresh; o++)
            KOILA_TRY(meta_without(u, meta_of(u, in), cut.dim, &metas[o]));
        KOILA_TRY(koila_table_sig(u->t, &call, &sig));
        KOILA_TRY(tell_sig(u, sig, n, false, &in, &out));
        for (uint32_t o = 0; o < call.n_fresh; o++)
            u->s->whole[first + (unbinds ? (uint32_t)begin : 0) + o] = out + o;
    }
    return KOILA_OK;
}

/* Does node n take elements along the cut dimension of its input, which it needs whole? */
static bool takes(const koila__placed *p, koila_node n, bool *unbinds)
{
    const koila_table *t = p->graph->table;
    const koila_sig_info *s = koila__node_sig(p->graph, n);
    const koila__rule rule = koila__rule_of(t, s->op);
    if (p->node[n].in_loop || (rule != koila__rule_select && rule != koila__rule_unbind) ||
        s->n_inputs != 1 || s->n_writes)
        return false;
    const koila_placement x = p->value[p->graph->inputs.at[p->graph->nodes.at[n].first_input]];
    *unbinds = rule == koila__rule_unbind;
    return x.kind == KOILA_S && x.outer == 1 && x.inner > 0 &&
           index_at(s, 1, koila__meta(t, s->inputs[0])->n_dims) == x.dim;
}

bool koila__unroll_helps(const koila__placed *p)
{
    uint32_t n_taken = 0;
    for (koila_node n = 0; n < p->graph->nodes.n && n_taken < 2; n++) {
        bool unbinds;
        if (takes(p, n, &unbinds))
            n_taken += unbinds ? 2 : 1;
    }
    return n_taken > 1;
}

/* Node n, which is in no loop. */
static koila_status run_whole(unroller *u, koila_node n)
{
    const koila_node_info info = u->g->nodes.at[n];
    const uint32_t n_inputs = koila__node_sig(u->g, n)->n_inputs;
    koila__item *in = koila__arena_room(&u->s->tmp, n_inputs * sizeof *in);
    bool unbinds;
    koila_sig sig;
    koila__item first;
    TRY_ALLOC(in);
    if (takes(u->p, n, &unbinds))
        return take(u, n, u->g->inputs.at[info.first_input], unbinds);
    for (uint32_t i = 0; i < n_inputs; i++)
        KOILA_TRY(whole_of(u, u->g->inputs.at[info.first_input + i], &in[i]));
    KOILA_TRY(with_metas(u, info.sig, in, &sig));
    KOILA_TRY(tell_sig(u, sig, n, true, in, &first));
    for (uint32_t o = 0; o < koila__sig(u->t, sig)->n_outputs; o++)
        u->s->whole[info.first_output + o] = first + o;
    return KOILA_OK;
}

/* Does the call, or a view through which it writes, read its input's layout? */
static bool reads_layout(const unroller *u, const koila_sig_info *s)
{
    bool reads = koila__facts_of_op(u->t, s->op) & KOILA_FACT_STRIDED;
    for (uint32_t w = 0; w < s->n_writes; w++)
        for (uint32_t l = 0; l < s->writes[w].n_links; l++)
            reads |= koila__facts_of_op(u->t, koila__sig(u->t, s->writes[w].links[l].sig)->op) &
                     KOILA_FACT_STRIDED;
    return reads;
}

/* Modules run as they are, in the recorded order. In a loop, draws are of rows, and parts need not
 * have the layout that was recorded. */
static bool is_refused(const unroller *u, koila_node n)
{
    const koila_sig_info *s = koila__node_sig(u->g, n);
    const uint32_t of_module = KOILA_FACT_OPAQUE_CALL | KOILA_FACT_OPAQUE_BACKWARD;
    return koila__facts_of_op(u->t, s->op) & of_module ||
           (u->p->node[n].in_loop &&
            (koila__flags_of_op(u->t, s->op) & KOILA_OP_RANDOM || reads_layout(u, s)));
}

static koila_status tell_all(unroller *u)
{
    for (koila_value v = 0; v < u->g->values.n; v++) {
        const koila_value_info info = u->g->values.at[v];
        const koila__item_info leaf = { info.meta, KOILA_NONE };
        if (info.node != KOILA_NONE)
            continue;
        u->s->whole[v] = u->s->items.n;
        TRY_ALLOC(koila__vec_push(&u->mem, &u->s->items, leaf));
    }
    for (koila_node n = 0; n < u->g->nodes.n; n++) {
        const koila__mark before = koila__arena_mark(&u->s->tmp);
        u->now = n;
        if (is_refused(u, n))
            return KOILA_UNSUPPORTED;
        KOILA_TRY(u->p->node[n].in_loop ? run_slices(u, n) : run_whole(u, n));
        koila__arena_rewind(&u->s->tmp, before);
    }
    return KOILA_OK;
}

static koila_status make_room(unroller *u)
{
    const size_t n_values = (size_t)u->g->values.n + 1;
    const size_t n_parts = n_values * u->s->n_slices;
    const koila__op_named of[] = { { &u->op_slice, "aten::slice.Tensor", KOILA_OP_VIEW },
                                   { &u->op_clone, "aten::clone", 0 } };
    KOILA_TRY(koila__find_ops(u->t, of, KOILA_COUNT(of)));
    u->s->whole = koila__arena_room(&u->s->tmp, n_values * sizeof *u->s->whole);
    u->part = koila__arena_room(&u->s->tmp, n_parts * sizeof *u->part);
    u->cut = koila__arena_array(&u->s->tmp, n_values, sizeof *u->cut);
    TRY_ALLOC(u->s->whole && u->part && u->cut);
    TRY_ALLOC(koila__vec_reserve(&u->mem, &u->s->told, u->g->nodes.n) &&
              koila__vec_reserve(&u->mem, &u->s->items, u->g->values.n) &&
              koila__vec_reserve(&u->mem, &u->s->ins, u->g->inputs.n));
    memset(u->s->whole, 0xff, n_values * sizeof *u->s->whole);
    memset(u->part, 0xff, n_parts * sizeof *u->part);
    return KOILA_OK;
}

koila_status koila__tell_step(koila__told_step *s, const koila_value *targets, uint32_t n_targets,
                              koila__item *wanted)
{
    unroller u = { .s = s,
                   .p = s->p,
                   .g = s->p->graph,
                   .t = s->table,
                   .mem = s->mem,
                   .last = { .n = KOILA_NONE },
                   .plan = { .placed = (koila__placed *)s->p } };
    u.teller = (koila__teller){ .plan = &u.plan, .table = u.t, .mem = u.mem, .tmp = &s->tmp };
    koila_status status = make_room(&u);
    if (status == KOILA_OK)
        status = tell_all(&u);
    for (uint32_t i = 0; i < n_targets && status == KOILA_OK; i++)
        status = whole_of(&u, targets[i], &wanted[i]);
    koila__vec_free(&u.mem, &u.teller.tokens);
    koila__vec_free(&u.mem, &u.scratch);
    koila__vec_free(&u.mem, &u.last.metas);
    return status;
}
