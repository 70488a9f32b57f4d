/* stacked.c — the gradient of x[:, t] for many t as one stack.
 *
 * A loop over time in Python (for t in range(T): h = f(x[:, t], h)) takes entries of x one by one.
 * Autograd makes of each gradient g_t a tensor of x's size that is zero but at t
 * (select_backward), and adds these up two by two. Run in that order, two of them are there at
 * once. Cut along the time they are not: the sums belong to a loop over slices, and the T tensors,
 * made of whole values, would all wait for it: T times x.
 *
 * Their sum is the stack of the g_t, zero where no entry was taken. What else is added is added to
 * that, and entries that are taken twice are added before. The same numbers are added, but for
 * zeros. */
#include "engine/stacked.h"

#include "engine/slice_call.h"
#include "graph/table.h"
#include "placement/rules.h"

#include <string.h>

/* What becomes of a node: it stays; stays, for the sum that takes it in does; is a term or sum
 * within a stack; or makes a stack. */
typedef enum part { STAYS, STAYS_TOO, WITHIN, STACK } part;

typedef struct stacker {
    const koila_graph *g;
    koila_table *t;
    koila__reteller r;
    uint8_t *part;    /* [nodes] a `part` */
    uint32_t *n_uses; /* [values] */
    VEC(koila_value) next, terms;
    koila_op op_stack, op_add, op_zeros;
} stacker;

enum { GRADIENT_DIM = 2, GRADIENT_INDEX = 3 }; /* of select_backward(g, sizes, dim, index) */

/* A plain sum of two tensors of the result's form, from its maker. */
static bool is_sum(const stacker *x, koila_value v)
{
    const koila_node n = x->g->values.at[v].node;
    if (n == KOILA_NONE)
        return false;
    const koila_sig_info *s = koila__node_sig(x->g, n);
    return koila__adds_two(x->t, s) && s->inputs[0] == s->outputs[0] &&
           s->inputs[1] == s->outputs[0];
}

/* The int argument `at` of the call, from the front of `size`; KOILA_NONE: it is no such. */
static uint32_t index_at(const koila_sig_info *s, uint32_t at, int64_t size)
{
    const int64_t i = koila__int_at(s, at, size);
    const int64_t from_front = i < 0 ? i + size : i;
    return from_front < 0 || from_front >= size ? KOILA_NONE : (uint32_t)from_front;
}

/* Is v the gradient of an entry alone, read once? *dim, *index: of which. */
static bool is_of_entry(const stacker *x, koila_value v, uint32_t *dim, uint32_t *index)
{
    const koila_node n = x->g->values.at[v].node;
    if (n == KOILA_NONE || x->n_uses[v] != 1)
        return false;
    const koila_sig_info *s = koila__node_sig(x->g, n);
    if (koila__rule_of(x->t, s->op) != koila__rule_select_backward || s->n_inputs != 1 ||
        s->n_outputs != 1 || s->n_writes)
        return false;
    const koila_meta_info *m = koila__meta(x->t, s->outputs[0]);
    *dim = index_at(s, GRADIENT_DIM, m->n_dims);
    *index = *dim == KOILA_NONE ? KOILA_NONE : index_at(s, GRADIENT_INDEX, m->size[*dim]);
    return *index != KOILA_NONE;
}

/* x->terms := what the sum v adds up, the last first. Sums that are read once, there, are part of
 * it. */
static koila_status find_terms(stacker *x, koila_value v)
{
    x->terms.n = x->next.n = 0;
    TRY_ALLOC(koila__vec_push(&x->r.mem, &x->next, v));
    while (x->next.n) {
        const koila_value sum = x->next.at[--x->next.n];
        const koila_value *in =
            &x->g->inputs.at[x->g->nodes.at[x->g->values.at[sum].node].first_input];
        for (uint32_t i = 0; i < 2; i++) {
            const bool is_part = is_sum(x, in[i]) && x->n_uses[in[i]] == 1;
            TRY_ALLOC(is_part ? koila__vec_push(&x->r.mem, &x->next, in[i])
                              : koila__vec_push(&x->r.mem, &x->terms, in[i]));
        }
    }
    return KOILA_OK;
}

/* How many terms are gradients of entries of one dimension, *dim: that of the first one. */
static uint32_t count_entries(const stacker *x, uint32_t *dim)
{
    uint32_t n = 0;
    *dim = KOILA_NONE;
    for (uint32_t i = 0; i < x->terms.n; i++) {
        uint32_t d, index;
        if (!is_of_entry(x, x->terms.at[i], &d, &index) || (*dim != KOILA_NONE && d != *dim))
            continue;
        *dim = d;
        n++;
    }
    return n;
}

/* Does v, a sum that no other one takes in, become a stack? Where most entries have a gradient. */
static koila_status look_at(stacker *x, koila_value v, bool *any)
{
    uint32_t dim, index, d;
    KOILA_TRY(find_terms(x, v));
    const uint32_t n = count_entries(x, &dim);
    if (n < 2 || 2 * (int64_t)n < koila__value_meta(x->g, v)->size[dim])
        return KOILA_OK;
    *any = true;
    x->part[x->g->values.at[v].node] = STACK;
    for (uint32_t i = 0; i < x->terms.n; i++)
        if (is_of_entry(x, x->terms.at[i], &d, &index) && d == dim)
            x->part[x->g->values.at[x->terms.at[i]].node] = WITHIN;
    return KOILA_OK;
}

/* What becomes of the sums that v takes in. */
static void mark_within(stacker *x, koila_value v, part becomes)
{
    const koila_value *in = &x->g->inputs.at[x->g->nodes.at[x->g->values.at[v].node].first_input];
    for (uint32_t i = 0; i < 2; i++)
        if (is_sum(x, in[i]) && x->n_uses[in[i]] == 1)
            x->part[x->g->values.at[in[i]].node] = (uint8_t)becomes;
}

static koila_status find_stacks(stacker *x, bool *any)
{
    *any = false;
    for (koila_node n = x->g->nodes.n; n-- > 0;) {
        const koila_value v = x->g->nodes.at[n].first_output;
        if (!koila__node_sig(x->g, n)->n_outputs || !is_sum(x, v))
            continue;
        if (x->part[n] == STAYS) /* no other sum takes it in */
            KOILA_TRY(look_at(x, v, any));
        mark_within(x, v, x->part[n] >= WITHIN ? WITHIN : STAYS_TOO);
    }
    return KOILA_OK;
}

/* ---- the step anew */

static koila_status append_sum(stacker *x, koila_value a, koila_value b, koila_value *out)
{
    const koila_value in[] = { a, b };
    const koila_meta meta = x->r.to->values.at[a].meta;
    const koila_arg other = { .kind = KOILA_ARG_TENSOR, .u.id = x->r.to->values.at[b].meta };
    koila_sig sig;
    KOILA_TRY(koila__tell_on(x->t, x->op_add, meta, &other, 1, 1, meta, &sig));
    return koila__retell(&x->r, sig, in, out);
}

/* A stack of entries[n] along `dim`, of the dense meta. */
static koila_status append_stack(stacker *x, const koila_value *entries, uint32_t n, uint32_t dim,
                                 koila_meta meta, koila_value *out)
{
    koila_arg *tokens = koila__arena_array(&x->r.tmp, (size_t)n + 2, sizeof *tokens);
    koila_sig sig;
    TRY_ALLOC(tokens);
    tokens[0] = (koila_arg){ .kind = KOILA_ARG_LIST, .n = n };
    for (uint32_t i = 0; i < n; i++)
        tokens[1 + i] =
            (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = x->r.to->values.at[entries[i]].meta };
    tokens[1 + n] = koila__int_arg(dim);
    const koila_sig_info call = { .op = x->op_stack,
                                  .n_pos = 2,
                                  .n_tokens = n + 2,
                                  .tokens = tokens,
                                  .n_fresh = 1,
                                  .outputs = &meta };
    KOILA_TRY(koila_table_sig(x->t, &call, &sig));
    return koila__retell(&x->r, sig, entries, out);
}

/* entries[size of dim] := what the gradients among the terms have there, KOILA_NONE for nothing. */
static koila_status find_entries(stacker *x, uint32_t dim, koila_value *entries)
{
    for (uint32_t i = x->terms.n; i-- > 0;) {
        uint32_t d, index;
        if (!is_of_entry(x, x->terms.at[i], &d, &index) || d != dim)
            continue;
        const koila_node n = x->g->values.at[x->terms.at[i]].node;
        const koila_value g = x->r.value[x->g->inputs.at[x->g->nodes.at[n].first_input]];
        if (entries[index] == KOILA_NONE)
            entries[index] = g;
        else
            KOILA_TRY(append_sum(x, entries[index], g, &entries[index]));
    }
    return KOILA_OK;
}

/* Zeros of one entry's form for those that have no gradient. */
static koila_status fill_in(stacker *x, koila_value *entries, uint32_t n)
{
    koila_value like = KOILA_NONE, zeros = KOILA_NONE;
    for (uint32_t i = 0; i < n && like == KOILA_NONE; i++)
        like = entries[i];
    for (uint32_t i = 0; i < n; i++) {
        koila_meta meta;
        if (entries[i] != KOILA_NONE)
            continue;
        if (zeros == KOILA_NONE) {
            KOILA_TRY(koila__dense_meta(x->t, x->r.to->values.at[like].meta, &meta));
            KOILA_TRY(koila__retell_on(&x->r, x->op_zeros, like, NULL, 0, 0, meta, &zeros));
        }
        entries[i] = zeros;
    }
    return KOILA_OK;
}

/* The sum v as a stack, and what else is added to it. */
static koila_status write_stack(stacker *x, koila_value v)
{
    const koila_meta_info *m = koila__value_meta(x->g, v);
    uint32_t dim, d, index;
    koila_meta meta;
    KOILA_TRY(find_terms(x, v));
    count_entries(x, &dim);
    const uint32_t n = (uint32_t)m->size[dim];
    koila_value *entries = koila__arena_array(&x->r.tmp, n, sizeof *entries);
    TRY_ALLOC(entries);
    memset(entries, 0xff, n * sizeof *entries);
    KOILA_TRY(find_entries(x, dim, entries));
    KOILA_TRY(fill_in(x, entries, n));
    KOILA_TRY(koila_table_meta(x->t, m->dtype, m->device, m->n_dims, m->size, NULL, &meta));
    KOILA_TRY(append_stack(x, entries, n, dim, meta, &x->r.value[v]));
    for (uint32_t i = x->terms.n; i-- > 0;)
        if (!is_of_entry(x, x->terms.at[i], &d, &index) || d != dim)
            KOILA_TRY(append_sum(x, x->r.value[v], x->r.value[x->terms.at[i]], &x->r.value[v]));
    return KOILA_OK;
}

static koila_status write_node(stacker *x, koila_node n)
{
    const koila_node_info *info = &x->g->nodes.at[n];
    const uint32_t n_inputs = koila__node_sig(x->g, n)->n_inputs;
    koila_value *in = koila__arena_array(&x->r.tmp, n_inputs, sizeof *in);
    x->r.now = n;
    TRY_ALLOC(in);
    if (x->part[n] == WITHIN)
        return KOILA_OK;
    if (x->part[n] == STACK)
        return write_stack(x, info->first_output);
    for (uint32_t i = 0; i < n_inputs; i++)
        in[i] = x->r.value[x->g->inputs.at[info->first_input + i]];
    return koila__retell_as_it_is(&x->r, in);
}

static koila_status write_step(stacker *x, const koila_value *targets, uint32_t n_targets,
                               koila__retold *out)
{
    koila_value *again = koila__arena_array(&x->r.tmp, n_targets, sizeof *again);
    TRY_ALLOC(again);
    for (koila_node n = 0; n < x->g->nodes.n; n++) {
        const koila__mark before = koila__arena_mark(&x->r.tmp);
        KOILA_TRY(write_node(x, n));
        koila__arena_rewind(&x->r.tmp, before);
    }
    for (uint32_t i = 0; i < n_targets; i++)
        again[i] = x->r.value[targets[i]];
    return koila__reteller_finish(&x->r, again, n_targets, out);
}

/* ---- the whole */

static koila_status stack(stacker *x, const koila_value *targets, uint32_t n_targets,
                          koila__retold *out)
{
    const koila__op_named of[] = { { &x->op_stack, "aten::stack", 0 },
                                   { &x->op_add, "aten::add.Tensor", 0 },
                                   { &x->op_zeros, "aten::zeros_like", 0 } };
    bool any;
    KOILA_TRY(koila__find_ops(x->t, of, KOILA_COUNT(of)));
    x->part = koila__arena_array(&x->r.tmp, x->g->nodes.n, 1);
    x->n_uses = koila__arena_array(&x->r.tmp, x->g->values.n, sizeof *x->n_uses);
    TRY_ALLOC(x->part && x->n_uses);
    for (uint32_t i = 0; i < x->g->inputs.n; i++)
        x->n_uses[x->g->inputs.at[i]]++;
    for (uint32_t i = 0; i < n_targets; i++)
        x->n_uses[targets[i]]++;
    KOILA_TRY(find_stacks(x, &any));
    return any ? write_step(x, targets, n_targets, out) : KOILA_OK;
}

/* Are there two gradients of single entries? */
static bool any_entries(const koila_graph *g)
{
    uint32_t n_found = 0;
    for (koila_node n = 0; n < g->nodes.n && n_found < 2; n++)
        n_found +=
            koila__rule_of(g->table, koila__node_sig(g, n)->op) == koila__rule_select_backward;
    return n_found > 1;
}

koila_status koila__stack_entries(const koila_graph *g, const koila_value *targets,
                                  uint32_t n_targets, const koila_allocator *mem,
                                  koila__retold *out)
{
    stacker x = { .g = g, .t = g->table };
    *out = (koila__retold){ .graph = NULL };
    if (!any_entries(g))
        return KOILA_OK;
    koila_status status = koila__reteller_init(&x.r, g, mem);
    if (status == KOILA_OK)
        status = stack(&x, targets, n_targets, out);
    koila__vec_free(&x.r.mem, &x.next);
    koila__vec_free(&x.r.mem, &x.terms);
    koila__reteller_deinit(&x.r);
    return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
}
