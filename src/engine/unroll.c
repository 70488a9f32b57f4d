/* unroll.c — a step in slices without loops: the calls of each slice are calls of their own.
 *
 * In a loop over slices no slice knows of another: what they share are sums and whole values. A
 * loop over time that a program writes out (for t in range(T): h = f(x[:, t], h)) is no such loop:
 * the state goes from one slice to the next, forward in one order, backward in the other. So each
 * slice is told as calls (slice_call.h), and the state is a value like any other. What results is a
 * step as if it were recorded so: it is scheduled whole, and its results can be dropped and
 * computed again slice by slice (recompute.c).
 *
 * unroll_tell.c writes the calls down; here what the targets need of them is put into an order.
 * Parts are joined, and partial sums added up, by nodes that take them in whatever order they come,
 * so a backward pass may begin with the last slice. A call that is told once (a step of the loop
 * over time) is made in the recorded order, and what it needs right before it; whatever else can
 * run then runs at once, the newest first. So a slice goes through the layers as far as it can
 * before the next one begins. Any order is right: values never change, writes make new ones (Note
 * [Writes] in graph.h), and a random call draws from the state that was recorded for it.
 *
 * Exact: the same calls on the same numbers as in a loop over slices; only sums are added up in
 * another order. */
#include "engine/unroll.h"

#include "engine/unroll_inside.h"

/* How far a told call is. */
typedef struct progress {
    bool is_needed, is_made; /* made: its node is appended, or all of its parts are put in */
    uint32_t n_missing;      /* inputs that are not made */
    uint32_t next_in;        /* the first input that may be missing */
    koila_value sum;         /* of a join or sum: so far, of `to`; or KOILA_NONE */
} progress;

typedef struct orderer {
    const koila_graph *recorded;
    const koila_graph *g; /* of the placed step */
    koila_table *t;
    koila_allocator mem;
    koila__told_step s;
    progress *progress;         /* [told] */
    koila_value *value_of;      /* [items] of `to`, or KOILA_NONE */
    uint32_t *last_use;         /* [items] the last of `ins` that reads it, or KOILA_NONE */
    uint32_t *use_before;       /* [ins] the use of the same item before, or KOILA_NONE */
    VEC(uint32_t) stack, ready; /* of told */
    koila_op op_slice, op_clone, op_empty, op_copy, op_add;
    /* the result */
    koila_graph *to;
    VEC(koila_placement) value, need;
    VEC(koila__placed_node) node;
    koila__arena keep;
} orderer;

/* The told call that makes input `at` of `ins`, or KOILA_NONE. */
static uint32_t maker_of(const orderer *u, uint32_t at)
{
    return u->s.items.at[u->s.ins.at[at].item].by;
}

/* ---- nodes of the result */

/* Appends a node to the result. */
static koila_status append(orderer *u, koila_sig sig, koila_node from, const koila_value *in,
                           koila_value *first)
{
    const koila_sig_info *s = koila__sig(u->t, sig);
    const koila_placement whole = { .kind = KOILA_R };
    koila__placed_node node = { .recorded = u->s.p->node[from].recorded };
    KOILA_TRY(koila_graph_node(u->to, sig, in, u->g->nodes.at[from].line, first));
    TRY_ALLOC(koila__vec_push(&u->mem, &u->node, node) &&
              koila__vec_reserve(&u->mem, &u->value, s->n_outputs) &&
              koila__vec_reserve(&u->mem, &u->need, s->n_inputs));
    for (uint32_t o = 0; o < s->n_outputs; o++)
        u->value.at[u->value.n++] = whole;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        u->need.at[u->need.n++] = whole;
    return KOILA_OK;
}

/* Appends a call of `op` on in[2], which writes in[0]: all of it, or what `link` makes of it. */
static koila_status append_write(orderer *u, koila_op op, koila_node from, const koila_value *in,
                                 const koila_link *link, koila_value *out)
{
    const koila_write write = { .input = 0, .n_links = link != NULL, .links = link };
    koila_arg tokens[2];
    koila_sig sig;
    for (uint32_t i = 0; i < 2; i++)
        tokens[i] = (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = u->to->values.at[in[i]].meta };
    const koila_sig_info call = { .op = op,
                                  .n_pos = 2,
                                  .n_tokens = 2,
                                  .tokens = tokens,
                                  .result_kind = 3,
                                  .n_writes = 1,
                                  .writes = &write };
    KOILA_TRY(koila_table_sig(u->t, &call, &sig));
    return append(u, sig, from, in, out);
}

/* An empty tensor of that meta, for the first part. */
static koila_status append_empty(orderer *u, koila_node from, koila_value part, koila_meta meta,
                                 koila_value *out)
{
    koila_arg tokens[2 * KOILA_MAX_DIMS + 3];
    koila_sig sig;
    tokens[0] = (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = u->to->values.at[part].meta };
    const uint32_t n = 1 + koila__form_args(koila__meta(u->t, meta), tokens + 1);
    const koila_sig_info call = { .op = u->op_empty,
                                  .n_pos = 3,
                                  .n_tokens = n,
                                  .tokens = tokens,
                                  .n_fresh = 1,
                                  .outputs = &meta };
    KOILA_TRY(koila_table_sig(u->t, &call, &sig));
    return append(u, sig, from, &part, out);
}

/* A copy of its own, dense. */
static koila_status append_clone(orderer *u, koila_node from, koila_value part, koila_value *out)
{
    koila_meta meta = u->to->values.at[part].meta;
    const koila_meta_info *m = koila__meta(u->t, meta);
    const koila_arg tokens[] = { { .kind = KOILA_ARG_TENSOR, .u.id = meta } };
    koila_sig sig;
    KOILA_TRY(koila_table_meta(u->t, m->dtype, m->device, m->n_dims, m->size, NULL, &meta));
    const koila_sig_info call = { .op = u->op_clone,
                                  .n_pos = 1,
                                  .n_tokens = 1,
                                  .tokens = tokens,
                                  .n_fresh = 1,
                                  .outputs = &meta };
    KOILA_TRY(koila_table_sig(u->t, &call, &sig));
    return append(u, sig, from, &part, out);
}

/* The view of a whole value of that meta on entries begin .. end of dimension d. */
static koila_status link_to(orderer *u, koila_meta whole, uint32_t d, int64_t begin, int64_t end,
                            koila_link *out)
{
    const koila_meta_info *m = koila__meta(u->t, whole);
    const koila_arg tokens[] = { { .kind = KOILA_ARG_TENSOR, .u.id = whole },
                                 koila__int_arg(d),
                                 koila__int_arg(begin),
                                 koila__int_arg(end),
                                 koila__int_arg(1) };
    int64_t size[KOILA_MAX_DIMS];
    koila_meta meta;
    for (uint32_t i = 0; i < m->n_dims; i++)
        size[i] = i == d ? end - begin : m->size[i];
    KOILA_TRY(koila_table_meta(u->t, m->dtype, m->device, m->n_dims, size, m->stride, &meta));
    const koila_sig_info call = { .op = u->op_slice,
                                  .n_pos = 5,
                                  .n_tokens = 5,
                                  .tokens = tokens,
                                  .n_fresh = 1,
                                  .outputs = &meta };
    *out = (koila_link){ 0 };
    return koila_table_sig(u->t, &call, &out->sig);
}

/* ---- the order */

static void find_needed(orderer *u, const koila__item *targets, uint32_t n_targets)
{
    for (uint32_t i = 0; i < n_targets; i++)
        if (u->s.items.at[targets[i]].by != KOILA_NONE)
            u->progress[u->s.items.at[targets[i]].by].is_needed = true;
    for (uint32_t c = u->s.told.n; c-- > 0;) {
        const koila__told *what = &u->s.told.at[c];
        for (uint32_t i = 0; u->progress[c].is_needed && i < what->n_in; i++)
            if (maker_of(u, what->first_in + i) != KOILA_NONE)
                u->progress[maker_of(u, what->first_in + i)].is_needed = true;
    }
}

static void find_uses(orderer *u)
{
    for (uint32_t i = 0; i < u->s.ins.n; i++) {
        const koila__item_use use = u->s.ins.at[i];
        if (!u->progress[use.by].is_needed)
            continue;
        u->use_before[i] = u->last_use[use.item];
        u->last_use[use.item] = i;
        u->progress[use.by].n_missing += maker_of(u, i) != KOILA_NONE;
    }
}

/* The first part of a sum: what the others are added to. */
static koila_status begin_sum(orderer *u, uint32_t c, koila_value part)
{
    u->progress[c].sum = part;
    if (koila_meta_is_dense(koila__value_meta(u->to, part)))
        return KOILA_OK;
    return append_clone(u, u->s.told.at[c].from, part, &u->progress[c].sum);
}

/* Input `at` of a join or sum has been made: it is put in. */
static koila_status put_in(orderer *u, uint32_t c, uint32_t at)
{
    const koila__told what = u->s.told.at[c];
    koila_value *sum = &u->progress[c].sum;
    const koila_value part = u->value_of[u->s.ins.at[at].item];
    const koila_meta meta = u->s.items.at[what.first_out].meta;
    koila_link link;
    if (what.kind == KOILA__TOLD_SUM && *sum == KOILA_NONE)
        return begin_sum(u, c, part);
    if (*sum == KOILA_NONE)
        KOILA_TRY(append_empty(u, what.from, part, meta, sum));
    const koila_value in[] = { *sum, part };
    if (what.kind == KOILA__TOLD_SUM)
        return append_write(u, u->op_add, what.from, in, NULL, sum);
    const koila_placement cut = u->s.p->value[what.stands_for];
    const uint32_t k = at - what.first_in;
    KOILA_TRY(link_to(u, meta, cut.dim, koila__told_begin(&u->s, cut.axis, k) * cut.inner,
                      koila__told_begin(&u->s, cut.axis, k + 1) * cut.inner, &link));
    return append_write(u, u->op_copy, what.from, in, &link, sum);
}

/* c is made: what it was the last missing input of is ready. */
static koila_status tell_users(orderer *u, uint32_t c)
{
    const koila__told what = u->s.told.at[c];
    u->progress[c].is_made = true;
    for (uint32_t o = 0; o < what.n_out; o++)
        for (uint32_t i = u->last_use[what.first_out + o]; i != KOILA_NONE; i = u->use_before[i]) {
            const uint32_t by = u->s.ins.at[i].by;
            if (u->s.told.at[by].kind != KOILA__TOLD_CALL)
                KOILA_TRY(put_in(u, by, i));
            if (--u->progress[by].n_missing == 0 && !u->s.told.at[by].is_first)
                TRY_ALLOC(koila__vec_push(&u->mem, &u->ready, by));
        }
    return KOILA_OK;
}

static koila_status make(orderer *u, uint32_t c)
{
    const koila__told what = u->s.told.at[c];
    const koila__mark before = koila__arena_mark(&u->s.tmp);
    koila_value first = u->progress[c].sum;
    if (what.kind == KOILA__TOLD_CALL) {
        koila_value *in = koila__arena_room(&u->s.tmp, what.n_in * sizeof *in);
        TRY_ALLOC(in);
        for (uint32_t i = 0; i < what.n_in; i++)
            in[i] = u->value_of[u->s.ins.at[what.first_in + i].item];
        KOILA_TRY(append(u, what.sig, what.from, in, &first));
    }
    for (uint32_t o = 0; o < what.n_out; o++)
        u->value_of[what.first_out + o] = first + o;
    koila__arena_rewind(&u->s.tmp, before);
    return tell_users(u, c);
}

/* Makes c, and then whatever can be made without anything else. */
static koila_status make_with_users(orderer *u, uint32_t c)
{
    KOILA_TRY(make(u, c));
    while (u->ready.n) {
        const uint32_t next = u->ready.at[--u->ready.n];
        if (!u->progress[next].is_made)
            KOILA_TRY(make(u, next));
    }
    return KOILA_OK;
}

/* What makes the first missing input of c, or KOILA_NONE. */
static uint32_t missing_of(orderer *u, uint32_t c)
{
    const koila__told *what = &u->s.told.at[c];
    progress *x = &u->progress[c];
    for (; !x->is_made && x->next_in < what->n_in; x->next_in++) {
        const uint32_t by = maker_of(u, what->first_in + x->next_in);
        if (by != KOILA_NONE && !u->progress[by].is_made)
            return by;
    }
    return KOILA_NONE;
}

/* Makes c, and before it what it needs. */
static koila_status demand(orderer *u, uint32_t c)
{
    u->stack.n = 0;
    TRY_ALLOC(koila__vec_push(&u->mem, &u->stack, c));
    while (u->stack.n) {
        const uint32_t top = u->stack.at[u->stack.n - 1];
        const uint32_t missing = missing_of(u, top);
        if (missing != KOILA_NONE) {
            TRY_ALLOC(koila__vec_push(&u->mem, &u->stack, missing));
            continue;
        }
        u->stack.n--;
        if (!u->progress[top].is_made)
            KOILA_TRY(make_with_users(u, top));
    }
    return KOILA_OK;
}

/* First what is told once and waits for no sum over all slices; then what does; then the rest. */
static koila_status put_in_order(orderer *u, const koila__item *targets, uint32_t n_targets)
{
    find_needed(u, targets, n_targets);
    find_uses(u);
    for (uint32_t pass = 0; pass < 3; pass++)
        for (uint32_t c = 0; c < u->s.told.n; c++) {
            const koila__told what = u->s.told.at[c];
            const bool is_asked = pass == 2 || (what.is_single && (pass == 1 || !what.is_late));
            if (u->progress[c].is_needed && !u->progress[c].is_made && is_asked)
                KOILA_TRY(demand(u, c));
        }
    return KOILA_OK;
}

/* ---- the result */

/* Axes, lines and leaves of the result are those of the recorded step. */
static koila_status start(orderer *u)
{
    const koila_graph *r = u->recorded;
    const koila_placement whole = { .kind = KOILA_R };
    /* a call each, and one for each part of a join or sum */
    const uint32_t n_nodes = u->s.told.n + u->s.told.n / 4;
    const uint32_t n_values = u->s.items.n + u->s.items.n / 4;
    const uint32_t n_inputs = u->s.ins.n + u->s.ins.n / 4;
    KOILA_TRY(koila_graph_new(u->t, &u->mem, &u->to));
    TRY_ALLOC(koila__graph_reserve(u->to, n_nodes, n_inputs, n_values) &&
              koila__vec_reserve(&u->mem, &u->node, n_nodes) &&
              koila__vec_reserve(&u->mem, &u->value, n_values) &&
              koila__vec_reserve(&u->mem, &u->need, n_inputs));
    for (uint32_t a = 0; a < r->axes.n; a++) {
        uint16_t axis;
        KOILA_TRY(koila_graph_axis(u->to, r->axes.at[a], &axis));
    }
    KOILA_TRY(koila__graph_copy_lines(u->to, u->g));
    for (koila_value v = 0; v < r->values.n; v++) {
        const koila_value_info info = r->values.at[v];
        const koila_value placed = u->s.p->lowered[v];
        if (info.node != KOILA_NONE || placed == KOILA_NONE)
            continue;
        KOILA_TRY(koila__graph_copy_leaf(u->to, r, v, &u->value_of[u->s.whole[placed]]));
        TRY_ALLOC(koila__vec_push(&u->mem, &u->value, whole));
    }
    return KOILA_OK;
}

static koila_status hand_over(orderer *u, koila__placed **out)
{
    const uint32_t n_lowered = u->s.p->n_recorded_values;
    koila__placed *r = koila__arena_alloc(&u->keep, sizeof *r);
    koila__size *size = koila__arena_array(&u->keep, u->value.n, sizeof *size);
    koila_value *lowered = koila__arena_array(&u->keep, n_lowered, sizeof *lowered);
    TRY_ALLOC(r && size && lowered);
    for (koila_value v = 0; v < u->to->values.n; v++)
        if (u->to->values.at[v].meta != KOILA_NONE)
            size[v].fixed = koila__value_meta(u->to, v)->n_storage_bytes;
    for (uint32_t v = 0; v < n_lowered; v++) {
        const koila_value placed = u->s.p->lowered[v];
        const koila__item x = placed == KOILA_NONE ? KOILA_NONE : u->s.whole[placed];
        lowered[v] = x == KOILA_NONE ? KOILA_NONE : u->value_of[x];
    }
    *r = (koila__placed){ .graph = u->to,
                          .value = u->value.at,
                          .size = size,
                          .need = u->need.at,
                          .node = u->node.at,
                          .lowered = lowered,
                          .unrolled = true,
                          .n_recorded_values = n_lowered,
                          .cap_values = u->value.cap,
                          .cap_needs = u->need.cap,
                          .cap_nodes = u->node.cap,
                          .arena = u->keep };
    *out = r;
    return KOILA_OK;
}

static koila_status make_room(orderer *u)
{
    const koila__told_step *s = &u->s;
    const koila__op_named of[] = { { &u->op_slice, "aten::slice.Tensor", KOILA_OP_VIEW },
                                   { &u->op_clone, "aten::clone", 0 },
                                   { &u->op_empty, "aten::new_empty_strided", 0 },
                                   { &u->op_copy, "aten::copy_", KOILA_OP_INPLACE },
                                   { &u->op_add, "aten::add_.Tensor", KOILA_OP_INPLACE } };
    KOILA_TRY(koila__find_ops(u->t, of, KOILA_COUNT(of)));
    u->progress = koila__arena_array(&u->s.tmp, s->told.n, sizeof *u->progress);
    u->value_of = koila__arena_array(&u->s.tmp, s->items.n, sizeof *u->value_of);
    u->last_use = koila__arena_array(&u->s.tmp, s->items.n, sizeof *u->last_use);
    u->use_before = koila__arena_array(&u->s.tmp, s->ins.n, sizeof *u->use_before);
    TRY_ALLOC(u->progress && u->value_of && u->last_use && u->use_before);
    for (uint32_t c = 0; c < s->told.n; c++)
        u->progress[c].sum = KOILA_NONE;
    memset(u->value_of, 0xff, s->items.n * sizeof *u->value_of);
    memset(u->last_use, 0xff, s->items.n * sizeof *u->last_use);
    memset(u->use_before, 0xff, s->ins.n * sizeof *u->use_before);
    return KOILA_OK;
}

static koila_status unroll(orderer *u, const koila_value *targets, uint32_t n_targets,
                           koila__placed **out, koila_value *again)
{
    koila__item *wanted = koila__arena_array(&u->s.tmp, n_targets, sizeof *wanted);
    TRY_ALLOC(wanted);
    KOILA_TRY(koila__tell_step(&u->s, targets, n_targets, wanted));
    KOILA_TRY(make_room(u));
    KOILA_TRY(start(u));
    KOILA_TRY(put_in_order(u, wanted, n_targets));
    for (uint32_t i = 0; i < n_targets; i++)
        again[i] = u->value_of[wanted[i]];
    return hand_over(u, out);
}

koila_status koila__unroll_new(const koila_graph *recorded, const koila__placed *p,
                               const koila_value *targets, uint32_t n_targets, uint32_t n_slices,
                               const koila_allocator *mem, koila__placed **out, koila_value *again)
{
    const koila_allocator a = koila__allocator(mem);
    koila_table *t = p->graph->table;
    orderer u = { .recorded = recorded, .g = p->graph, .t = t, .mem = a };
    u.s = (koila__told_step){ .p = p, .table = t, .mem = a, .n_slices = n_slices };
    koila_assert(n_slices >= 1);
    for (uint32_t i = 0; i < p->graph->axes.n; i++)
        koila_assert(n_slices <= p->graph->axes.at[i]);
    koila_assert(!p->cut && !p->absent);
    *out = NULL;
    koila__arena_init(&u.s.tmp, &a);
    koila__arena_init(&u.keep, &a);
    const koila_status status = unroll(&u, targets, n_targets, out, again);
    koila__vec_free(&a, &u.s.told);
    koila__vec_free(&a, &u.s.items);
    koila__vec_free(&a, &u.s.ins);
    koila__vec_free(&a, &u.stack);
    koila__vec_free(&a, &u.ready);
    koila__arena_deinit(&u.s.tmp);
    if (!*out) {
        koila_graph_free(u.to);
        koila__vec_free(&a, &u.value);
        koila__vec_free(&a, &u.need);
        koila__vec_free(&a, &u.node);
        koila__arena_deinit(&u.keep);
    }
    koila_check(!*out || koila__placed_check(*out, NULL));
    return status;
}
