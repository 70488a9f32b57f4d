/* place_call.c — one call of the lowered graph: which of its inputs it is shown, on which axis it
 * is placed, and how.
 *
 * There are three attempts, from cheap to always right:
 *   1. the rule as it is;
 *   2. the rule with every P input made whole first (if an operator has a P and an S input, the P
 *   must become whole: its running value has no meaning);
 *   3. *gather*: every input R, every result R, run once on whole values.
 * An operator without a rule goes to attempt 3. So a missing rule costs memory, never correctness.
 *
 * Note [Rewrites]. A rule may emit calls instead of giving placements (rewrite.h): statistics of
 * BatchNorm, the denominator of nll_loss. Emitted calls are placed here like recorded ones, by
 * their own rules, so a rewrite is only a longer program for the same values. koila__place_whole()
 * asks no rule: one slice runs the recorded calls.
 *
 * Note [After a gather]. The result of a gathered call is whole, and so is everything computed from
 * it alone. koila__place_cut() slices it again: where a dimension of it is the batch (the one an
 * input was sliced along, else one of that size) later calls get an alias of it that is sliced
 * there, and calls that need it whole get the original. Slicing a whole value is always exact; only
 * the choice of the dimension is a guess. It saves memory and costs loops, so the planner tries
 * both.
 *
 * Note [Tables]. Along another axis than the rows (seeds), tokens meet tokens: a mask of padding
 * [B, 1, 1, T] is broadcast to [B, 1, T, T], whose rows are queries. Its columns are cut then, and
 * attention, which cuts queries, would need it whole. So where a result has the axis in a dimension
 * before that of the cut inputs, and they lack it, those small inputs are made whole. A result of
 * whole inputs that are all smaller by the length of the axis, or leaves, which are there in any
 * case (a mask that the rows share), is FREE: its use decides.
 *
 * Note [Late sums]. A sum of partial sums stays partial, so that one loop makes both terms. Where
 * barriers lie between the terms (the gradient of an embedding that is also the last layer: its
 * terms come from the first and the last loop of the backward), the later loop would have to run
 * all of the earlier one again for it. Then both terms become whole where they are made, and are
 * added once. The same goes for a small partial sum that is divided by a number which a later loop
 * makes whole, and for all that is computed from sums of one number: once is less than in every
 * slice, and is rounded as in eager. The number of barriers on the longest path to a value is its
 * level.
 *
 * Note [Answers]. A net's layers repeat each other, and so do the answers of rules. An answer is
 * given again to a call of the same signature whose inputs are placed alike, on the same axis:
 * nothing else goes into it. Left out are writes, partial sums (their levels decide), FREE inputs,
 * pieces, rewrites, and rules that ask which calls made their inputs.
 */
#include "placement/walk.h"

/* Can the placement of this call, whose inputs are all R or FREE, be decided later? */
static bool is_free(koila__placer *p, const koila_sig_info *sig, const koila_placement *placed)
{
    const koila__rule rule = koila__placer_rule(p, sig->op)->rule;
    if (!rule)
        return false;
    if (koila__placer_facts(p, sig) & KOILA_FACT_FACTORY)
        return sig->n_inputs == 0;
    if (koila__placer_facts(p, sig) &
        KOILA_FACT_BROADCASTS) { /* a factory: every copy is the same */
        const koila_meta_info *in = koila__meta(p->table, sig->inputs[0]);
        const koila_meta_info *out = koila__meta(p->table, sig->outputs[0]);
        if (out->n_elements > in->n_elements)
            return true;
    }
    if (koila__placer_facts(p, sig) & KOILA_FACT_SPREADS)
        return true;
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        if (placed[i].kind == KOILA_FREE)
            return true;
    return false;
}

static bool is_number_zero(const koila_sig_info *sig, uint32_t pos)
{
    if (pos >= sig->n_pos)
        return false;
    const koila_arg *a = &sig->tokens[sig->start[pos]];
    if (a->kind == KOILA_ARG_FLOAT)
        return a->u.f == 0;
    return (a->kind == KOILA_ARG_INT || a->kind == KOILA_ARG_BOOL) && a->u.i == 0;
}

/* A FREE call whose every result is all zeros. */
static bool is_zero(koila__placer *p, const koila_sig_info *sig, const koila_value *in)
{
    const uint32_t facts = koila__placer_facts(p, sig);
    const bool reads_nothing =
        sig->n_inputs == 0 || (sig->n_writes == 1 && sig->writes[0].overwrites);
    if (facts & KOILA_FACT_ZEROS)
        return reads_nothing || (facts & KOILA_FACT_SPREADS);
    if (facts & KOILA_FACT_FILLS)
        return reads_nothing && is_number_zero(sig, 1);
    const bool copies =
        (p->table->ops.at[sig->op].flags & KOILA_OP_VIEW) || (facts & KOILA_FACT_SAME_VALUES);
    return copies && sig->n_inputs == 1 && p->zero.at[in[0]];
}

/* The level of a call with these inputs and needs: Note [Late sums]. */
static uint32_t level_of(const koila__placer *p, const koila_value *in, const koila_placement *need,
                         uint32_t n)
{
    uint32_t level = 0;
    for (uint32_t i = 0; i < n; i++) {
        const bool is_barrier = koila__is_r(need[i]) && !koila__is_r(p->value.at[in[i]]);
        const uint32_t its = p->level.at[in[i]] + is_barrier;
        level = its > level ? its : level;
    }
    return level;
}

/* Is the call better made of whole values? It cuts nothing, and gives single numbers, or reads
 * partial sums that were there at an earlier level than its own: Note [Late sums]. */
static bool is_late_sum(const koila__placer *p, const koila__attempt *a, const koila_value *in)
{
    uint32_t lowest = UINT32_MAX;
    bool is_number = true; /* all that it reads of sums, and gives */
    bool is_small = true;
    bool any_barrier = false;
    for (uint32_t i = 0; i < a->c.n_in; i++) {
        if (a->c.need[i].kind == KOILA_S)
            return false;
        if (p->value.at[in[i]].kind != KOILA_P)
            continue;
        if (a->c.need[i].kind != KOILA_P) {
            any_barrier = true;
            continue;
        }
        is_number &= a->c.in_meta[i]->n_elements == 1;
        is_small &= a->c.in_meta[i]->n_bytes <= KOILA__LATE_BYTES;
        if (p->level.at[in[i]] < lowest)
            lowest = p->level.at[in[i]];
    }
    for (uint32_t j = 0; j < a->c.n_out; j++)
        is_number &= a->c.out_meta[j] && a->c.out_meta[j]->n_elements == 1;
    if (lowest == UINT32_MAX)
        return false;
    if (is_number)
        return true;
    return (is_small || !any_barrier) && lowest < level_of(p, in, a->c.need, a->c.n_in);
}

/* Places a node that was just appended as R, see append(). */
static bool settle_new(koila__placer *p, koila_node node, const koila__attempt *a,
                       bool is_free_call)
{
    if (a)
        return koila__place_node(p, node, a);
    if (is_free_call || p->whole)
        return true; /* whole: everything is R, as it is now */
    return koila__place_node_whole(p, node);
}

/* Appends the call to the lowered graph, placed by `a`; without `a` it is FREE if possible, else
 * whole. */
static bool append(koila__placer *p, koila_sig id, const koila_sig_info *sig, const koila_value *in,
                   const koila__attempt *a, bool is_free_call, koila_value *results)
{
    koila_value first;
    const bool zero = is_free_call && is_zero(p, sig, in);
    const koila_status s = koila_graph_node(p->to, id, in, p->line, &first);
    if (s != KOILA_OK)
        return koila__placer_fail(p, s);
    const koila_node node = koila_graph_n_nodes(p->to) - 1;
    koila_assert(p->node.n == node);
    koila_assert(p->value.n == first && p->zero.n == first && p->whole_of.n == first);
    if (!koila__vec_reserve(&p->mem, &p->value, sig->n_outputs) ||
        !koila__vec_reserve(&p->mem, &p->zero, sig->n_outputs) ||
        !koila__vec_reserve(&p->mem, &p->absent, sig->n_outputs) ||
        !koila__vec_reserve(&p->mem, &p->whole_of, sig->n_outputs) ||
        !koila__vec_reserve(&p->mem, &p->level, sig->n_outputs) ||
        !koila__vec_reserve(&p->mem, &p->need, sig->n_inputs) ||
        !koila__vec_reserve(&p->mem, &p->node, 1))
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    p->node.at[p->node.n++] = (koila__placed_node){ .recorded = p->recorded };
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        const bool exists = sig->outputs[j] != KOILA_NONE;
        p->value.at[p->value.n++] =
            is_free_call && exists ? (koila_placement){ .kind = KOILA_FREE } : koila__r();
        p->zero.at[p->zero.n++] = zero;
        p->absent.at[p->absent.n++] = false;
        p->whole_of.at[p->whole_of.n++] = KOILA_NONE;
        p->level.at[p->level.n++] = 0;
        results[j] = first + j;
    }
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        p->need.at[p->need.n++] = koila__r();
    if (!settle_new(p, node, a, is_free_call))
        return false;
    if (p->whole) /* no barriers */
        return true;
    const uint32_t level = level_of(p, in, &p->need.at[p->need.n - sig->n_inputs], sig->n_inputs);
    for (uint32_t j = 0; j < sig->n_outputs; j++)
        p->level.at[first + j] = level;
    return true;
}

/* Makes an alias of v that needs v placed `at` and is itself placed `at`. */
static bool alias(koila__placer *p, koila_value v, koila_placement at, uint16_t axis,
                  koila_value *out)
{
    const koila_meta meta = p->to->values.at[v].meta;
    const koila_arg token = { .kind = KOILA_ARG_TENSOR, .u.id = meta };
    koila_sig_info desc = {
        .n_tokens = 1, .n_pos = 1, .tokens = &token, .n_fresh = 1, .outputs = &meta
    };
    koila_sig id;
    koila__attempt a;
    koila_status s = koila_table_op(p->table, "aten::alias", KOILA_OP_VIEW, &desc.op);
    if (s == KOILA_OK)
        s = koila_table_sig(p->table, &desc, &id);
    if (s != KOILA_OK)
        return koila__placer_fail(p, s);
    const koila_sig_info *sig = koila__sig(p->table, id);
    if (!koila__case_init(p, &a, sig, &v, &p->value.at[v], axis))
        return false;
    a.c.need[0] = a.c.out[0] = at;
    a.loop = !koila__is_r(at);
    return append(p, id, sig, &v, &a, false, out);
}

bool koila__placer_whole(koila__placer *p, koila_value v, koila_value *out)
{
    if (p->whole_of.at[v] == KOILA_NONE) {
        koila_value whole;
        if (!alias(p, v, koila__r(), p->value.at[v].axis, &whole))
            return false;
        p->whole_of.at[v] = whole;
    }
    *out = p->whole_of.at[v];
    return true;
}

bool koila__placer_cut(const koila__placer *p, const koila_meta_info *m, uint32_t dim,
                       uint16_t axis, koila_placement *out)
{
    const uint32_t n_axes = p->seeds ? koila_graph_n_axes(p->from) : 0;
    for (uint32_t i = 0; i <= n_axes && dim < m->n_dims; i++) {
        const uint16_t a = (uint16_t)(i == 0 ? axis : i - 1);
        const int64_t rows = koila_graph_axis_size(p->from, a);
        if (rows <= 0 || m->size[dim] <= 0 || m->size[dim] % rows)
            continue;
        *out = (koila_placement){ .kind = KOILA_S,
                                  .dim = (uint8_t)dim,
                                  .axis = a,
                                  .outer = 1,
                                  .inner = m->size[dim] / rows };
        return true;
    }
    return false;
}

/* Is a value of meta m as long in the dimension in which `like` is cut as one of the axes? */
static bool narrowed_cut(const koila__placer *p, const koila_meta_info *m, koila_placement like,
                         koila_placement *out)
{
    if (like.outer != 1 || like.inner != 1 || like.dim >= m->n_dims)
        return false;
    for (uint16_t a = 0; a < koila_graph_n_axes(p->from); a++) {
        if (m->size[like.dim] != koila_graph_axis_size(p->from, a))
            continue;
        *out = like;
        out->axis = a;
        return true;
    }
    return false;
}

/* Is a whole value of meta m cut as an input of meta `of` is, which is cut like that? Along the
 * same dimension of the same extent; of an axis that is not the batch's of any extent, if it has
 * all rows. */
static bool cut_like(const koila__placer *p, const koila_meta_info *m, const koila_meta_info *of,
                     koila_placement like, uint16_t axis, koila_placement *out)
{
    const int64_t batch = koila_graph_axis_size(p->from, axis);
    *out = like;
    if (like.kind != KOILA_S)
        return false;
    if (like.axis == axis && like.inner > 0 && like.dim < m->n_dims &&
        m->size[like.dim] == koila__extent(like, batch))
        return true;
    if (p->narrowed && narrowed_cut(p, m, like, out))
        return true;
    return p->seeds && like.outer == 1 && like.dim > 1 && m->n_dims == of->n_dims &&
           koila__placer_cut(p, m, like.dim, axis, out);
}

/* The cut of a whole value of meta m: that of the first input that is cut alike, else along the
 * first dimension of the batch's size; R when there is none. */
static koila_placement cut_of(const koila__placer *p, const koila_sig_info *sig,
                              const koila_meta_info *m, const koila_placement *placed,
                              uint16_t axis)
{
    koila_placement at;
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        if (cut_like(p, m, koila__meta(p->table, sig->inputs[i]), placed[i], axis, &at))
            return at;
    for (uint32_t i = 0; i <= (p->two ? koila_graph_n_axes(p->from) : 0); i++) {
        const uint16_t a = (uint16_t)(i == 0 ? axis : i - 1);
        const int64_t unit = p->unit ? p->unit[a] : 1;
        for (uint32_t d = 0; d < m->n_dims; d++)
            if (m->size[d] == koila_graph_axis_size(p->from, a) * unit)
                return (koila_placement){
                    .kind = KOILA_S, .dim = (uint8_t)d, .axis = a, .outer = 1, .inner = unit
                };
    }
    return koila__r();
}

/* Note [After a gather]: replaces results[] by sliced aliases where possible. */
static bool cut(koila__placer *p, const koila_sig_info *sig, const koila_placement *placed,
                uint16_t axis, koila_value *results)
{
    if (koila__flags_of_op(p->table, sig->op) & KOILA_OP_OPAQUE)
        return true;
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        koila_value rows;
        if (sig->outputs[j] == KOILA_NONE)
            continue;
        const koila_meta_info *m = koila__meta(p->table, sig->outputs[j]);
        const koila_placement at = cut_of(p, sig, m, placed, axis);
        if (koila__is_r(at))
            continue;
        if (!alias(p, results[j], at, at.axis, &rows))
            return false;
        p->whole_of.at[rows] = results[j];
        results[j] = rows;
    }
    return true;
}

/* The axis of a call's inputs, KOILA_NONE when all are R or FREE. Where two axes meet, the one
 * with more rows is kept; of source and target that of the first input, for
 * queries come before keys. */
static uint32_t axis_of(const koila__placer *p, const koila_placement *placed, uint32_t n)
{
    uint32_t axis = KOILA_NONE;
    for (uint32_t i = 0; i < n; i++) {
        if (koila__is_r(placed[i]))
            continue;
        const uint16_t x = placed[i].axis;
        if (axis == KOILA_NONE || (!p->two && koila_graph_axis_size(p->from, x) >
                                                  koila_graph_axis_size(p->from, (uint16_t)axis)))
            axis = x;
    }
    return axis;
}

/* ---- Note [Answers] */

struct koila__answer {
    koila_sig sig;
    koila__attempt a;
};

/* The same in every field that says something. */
static bool is_same_placement(const koila_placement *a, const koila_placement *b)
{
    return a->kind == b->kind &&
           (a->kind == KOILA_R ||
            (a->combine == b->combine && a->dim == b->dim && a->axis == b->axis &&
             a->outer == b->outer && a->inner == b->inner));
}

/* Has the call been answered? Then *a is its answer. */
static bool is_answered(const koila__placer *p, koila__attempt *a, koila_sig id,
                        const koila_value *in, const koila_placement *placed, uint16_t axis)
{
    const koila__answer *x = p->answers[id % KOILA__ANSWERS];
    if (!x || x->sig != id || x->a.c.axis != axis)
        return false;
    for (uint32_t i = 0; i < x->a.c.n_in; i++)
        if (!is_same_placement(&x->a.c.in[i], &placed[i]))
            return false;
    *a = x->a;
    a->c.in_value = in;
    a->c.fix = a->fix;
    return true;
}

/* Keeps the answer with its arrays, for inputs that are placed so. */
static bool keep_answer(koila__placer *p, const koila__attempt *a, koila_sig id,
                        const koila_placement *placed)
{
    koila__arena *room = &p->answers_room;
    koila__answer *x = koila__arena_room(room, sizeof *x);
    const koila__case *from = &a->c;
    if (!x)
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    *x = (koila__answer){ id, *a };
    koila__case *c = &x->a.c;
    c->in = koila__arena_copy(room, placed, from->n_in * sizeof *placed);
    c->need = koila__arena_copy(room, from->need, from->n_in * sizeof *from->need);
    c->out = koila__arena_copy(room, from->out, from->n_out * sizeof *from->out);
    c->in_meta = koila__arena_copy(room, from->in_meta, from->n_in * sizeof *from->in_meta);
    c->out_meta = koila__arena_copy(room, from->out_meta, from->n_out * sizeof *from->out_meta);
    c->replaced = koila__arena_copy(room, from->replaced, from->n_out * sizeof *from->replaced);
    c->zero = koila__arena_copy(room, from->zero, from->n_in);
    if (!c->in || !c->need || !c->out || !c->in_meta || !c->out_meta || !c->replaced || !c->zero)
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    p->answers[id % KOILA__ANSWERS] = x;
    return true;
}

/* May a later call be answered like this one? */
static bool may_answer(const koila__placer *p, const koila_sig_info *sig,
                       const koila_placement *placed)
{
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        if (placed[i].kind == KOILA_P || placed[i].kind == KOILA_FREE)
            return false;
    return !sig->n_writes && !p->pieces;
}

/* koila__attempt_rule(), where the rule has not answered the same call before. */
static bool attempt_answer(koila__placer *p, koila__attempt *a, koila_sig id, const koila_value *in,
                           const koila_placement *placed, uint16_t axis)
{
    const koila_sig_info *sig = koila__sig(p->table, id);
    const bool may = may_answer(p, sig, placed);
    const uint32_t n_before = p->to->nodes.n;
    if (may && is_answered(p, a, id, in, placed, axis))
        return true;
    p->looked_up = false;
    if (!koila__attempt_rule(p, a, sig, in, placed, axis, NULL, true))
        return false;
    if (!may || p->looked_up || koila__is_rewritten(a) || p->to->nodes.n != n_before)
        return true;
    return keep_answer(p, a, id, placed);
}

/* Attempts 1 and 2 of the head. */
static bool attempt_sliced(koila__placer *p, koila__attempt *a, koila_sig id, const koila_value *in,
                           const koila_placement *placed, uint16_t axis)
{
    const koila_sig_info *sig = koila__sig(p->table, id);
    bool any_p = false;
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        any_p |= koila__is_p(placed[i]);
    if (attempt_answer(p, a, id, in, placed, axis) &&
        (koila__is_rewritten(a) || !any_p || !is_late_sum(p, a, in)))
        return true;
    if (p->status != KOILA_OK || !any_p)
        return false;
    koila_placement *whole = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *whole);
    if (!whole)
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        whole[i] = koila__is_p(placed[i]) ? koila__r() : placed[i];
    return koila__attempt_rule(p, a, sig, in, whole, axis, NULL, true) && p->status == KOILA_OK;
}

/* Attempt 3: everything R. */
static bool attempt_gather(koila__placer *p, koila__attempt *a, const koila_sig_info *sig,
                           const koila_value *in, const koila_placement *placed, uint16_t axis)
{
    if (!koila__case_init(p, a, sig, in, placed, axis))
        return false;
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        a->c.need[i] = koila__r();
    for (uint32_t j = 0; j < sig->n_outputs; j++)
        a->c.out[j] = koila__r();
    return true;
}

/* Finds the input values of the call. A value that is sliced otherwise than needed is replaced by
 * its whole form; a cut value that is needed whole, by the value from which it was cut. */
static bool take_inputs(koila__placer *p, const koila__attempt *a, const koila_value *in,
                        koila_value *from)
{
    for (uint32_t i = 0; i < a->c.n_in; i++) {
        const koila_placement *need = &a->c.need[i];
        const koila_placement *is = &p->value.at[in[i]];
        from[i] = in[i];
        if (need->kind == KOILA_S && !koila__is_r(*is) && !koila__placement_equal_at(need, is) &&
            !koila__placer_whole(p, in[i], &from[i]))
            return false;
        if (need->kind == KOILA_R && p->whole_of.at[in[i]] != KOILA_NONE)
            from[i] = p->whole_of.at[in[i]];
    }
    return true;
}

/* Note [Pieces]: a call that has pieces among its inputs. */
static bool attempt_pieces(koila__placer *p, koila__attempt *a, const koila_sig_info *sig,
                           const koila_value *in, const koila_placement *placed, uint16_t axis)
{
    if (!koila__case_init(p, a, sig, in, placed, axis) || !koila__rule_pieces(&a->c))
        return false;
    a->loop = true;
    return true;
}

static bool any_piece(const koila_placement *placed, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (koila__is_piece(placed[i]))
            return true;
    return false;
}

/* Pieces become whole before the call. */
static void show_pieces_whole(koila_placement *placed, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (koila__is_piece(placed[i]))
            placed[i] = koila__r();
}

/* Is the call a sum with a term that may be absent? */
static bool leaves_out_absent(const koila__placer *p, const koila__attempt *a,
                              const koila_value *in)
{
    bool any = false;
    for (uint32_t i = 0; i < a->c.n_in; i++) {
        any |= p->absent.at[in[i]];
        if (a->c.need[i].kind == KOILA_R)
            return false;
    }
    return any && !koila__is_rewritten(a) && koila__is_plain_sum(&a->c);
}

/* Places a call whose inputs are of this axis, none of them a piece. */
static bool place_on_axis(koila__placer *p, koila_sig id, const koila_value *in,
                          const koila_placement *placed, uint16_t axis, koila_value *results)
{
    const koila_sig_info *sig = koila__sig(p->table, id);
    koila_value *from = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *from);
    koila__attempt a;
    if (!from)
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    p->may_own = p->pieces;
    const bool is_sliced = attempt_sliced(p, &a, id, in, placed, axis);
    p->may_own = false;
    if (p->status != KOILA_OK)
        return false;
    if (is_sliced && p->any_piece)
        a.c.sums |= leaves_out_absent(p, &a, in);
    if (is_sliced && koila__is_rewritten(&a)) {
        memcpy(results, a.c.replaced, a.c.n_out * sizeof *results);
        return true;
    }
    if (!is_sliced && !attempt_gather(p, &a, sig, in, placed, axis))
        return false;
    return take_inputs(p, &a, in, from) && append(p, id, sig, from, &a, false, results) &&
           (is_sliced || !p->cut || cut(p, sig, placed, axis, results));
}

/* Does the call compute each element of its result from the elements in the same place, with
 * broadcasting? */
static bool is_elementwise(koila__placer *p, const koila_sig_info *sig)
{
    const koila__rule rule = koila__placer_rule(p, sig->op)->rule;
    return sig->n_outputs == 1 && sig->outputs[0] != KOILA_NONE && !sig->n_writes &&
           (rule == koila__rule_pointwise || rule == koila__rule_masked_fill ||
            rule == koila__rule_expand || rule == koila__rule_where ||
            rule == koila__rule_additive || rule == koila__rule_mul);
}

/* Is the S input of meta m broadcast along dimension d of a result of n_dims, before its cut? */
static bool is_spread(const koila_meta_info *m, koila_placement is, uint32_t n_dims, uint32_t d)
{
    const uint32_t missing = n_dims - m->n_dims;
    return is.outer == 1 && is.inner == 1 && d < is.dim + missing &&
           (d < missing || m->size[d - missing] == 1);
}

/* The axes of tokens: of source and target both, else the first. */
static uint32_t n_of_tokens(const koila__placer *p)
{
    return p->two ? koila_graph_n_axes(p->from) : 1;
}

/* The first dimension of a value of meta m that has the size of an axis of tokens; n_dims: none. */
static uint32_t first_of_tokens(const koila__placer *p, const koila_meta_info *m)
{
    for (uint32_t d = 0; d < m->n_dims; d++)
        for (uint32_t a = 0; a < n_of_tokens(p); a++)
            if (m->size[d] == koila_graph_axis_size(p->from, (uint16_t)a))
                return d;
    return m->n_dims;
}

/* Note [Tables]: makes inputs whole in in[] and placed[]. */
static bool make_tables(koila__placer *p, const koila_sig_info *sig, koila_value *in,
                        koila_placement *placed)
{
    const koila_meta_info *out =
        is_elementwise(p, sig) ? koila__meta(p->table, sig->outputs[0]) : NULL;
    const uint32_t first = out ? first_of_tokens(p, out) : 0;
    if (!out || first == out->n_dims)
        return true;
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_meta_info *m = koila__meta(p->table, sig->inputs[i]);
        if (placed[i].kind != KOILA_S || !is_spread(m, placed[i], out->n_dims, first))
            continue;
        if (!koila__placer_whole(p, in[i], &in[i]))
            return false;
        placed[i] = koila__r();
    }
    return true;
}

/* Note [Tables]: is the result of whole inputs one? */
static bool is_table(koila__placer *p, const koila_sig_info *sig, const koila_value *in)
{
    if (!p->seeds || !sig->n_inputs || !is_elementwise(p, sig))
        return false;
    uint64_t size = UINT64_MAX; /* of the shortest */
    for (uint32_t a = 0; a < n_of_tokens(p); a++) {
        const uint64_t rows = (uint64_t)koila_graph_axis_size(p->from, (uint16_t)a);
        size = rows < size ? rows : size;
    }
    const koila_meta_info *out = koila__meta(p->table, sig->outputs[0]);
    const bool has_tokens = first_of_tokens(p, out) < out->n_dims;
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const bool stays = has_tokens && p->to->values.at[in[i]].node == KOILA_NONE;
        if (!stays && koila__meta(p->table, sig->inputs[i])->n_elements > out->n_elements / size)
            return false;
    }
    return true;
}

/* Are whole entries stacked along an axis of tokens? Such a stack is as large as what they are
 * entries of: it is sliced for all its uses. */
static bool stacks_tokens(koila__placer *p, const koila_sig_info *sig)
{
    if (!p->seeds || koila__placer_rule(p, sig->op)->rule != koila__rule_stack)
        return false;
    const koila_meta_info *out = koila__meta(p->table, sig->outputs[0]);
    return first_of_tokens(p, out) < out->n_dims;
}

/* Does the call give its input in another shape, or less of it? */
static bool passes_on(const koila__placer *p, const koila_sig_info *sig)
{
    return sig->n_inputs == 1 && sig->n_outputs == 1 && sig->outputs[0] != KOILA_NONE &&
           (koila__placer_facts(p, sig) & KOILA_FACT_RESHAPES ||
            koila__meta(p->table, sig->outputs[0])->n_elements <
                koila__meta(p->table, sig->inputs[0])->n_elements);
}

/* Partial sums that have the axis, gradients of keys and values, become whole before a call that
 * computes with them, and are sliced: else each slice would compute with all of it. Those of two
 * dimensions are gradients of weights. */
static bool cut_sums(koila__placer *p, const koila_sig_info *sig, koila_value *in,
                     koila_placement *placed)
{
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_meta_info *m = koila__meta(p->table, sig->inputs[i]);
        koila_value whole;
        if (!koila__is_sum(placed[i]) || m->n_dims < 3 || passes_on(p, sig))
            continue;
        const koila_placement at = cut_of(p, sig, m, placed, 0);
        if (koila__is_r(at))
            continue;
        if (!koila__placer_whole(p, in[i], &whole) || !alias(p, whole, at, at.axis, &in[i]))
            return false;
        p->whole_of.at[in[i]] = whole;
        placed[i] = at;
    }
    return true;
}

static bool place_in(koila__placer *p, koila_sig id, const koila_value *inputs,
                     koila_value *results)
{
    const koila_sig_info *sig = koila__sig(p->table, id);
    koila_placement *placed = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *placed);
    koila_value *in = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *in);
    koila__attempt a;
    if (!placed || !in)
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        in[i] = inputs[i];
        placed[i] = p->value.at[in[i]];
    }
    if (p->seeds && !(make_tables(p, sig, in, placed) && cut_sums(p, sig, in, placed)))
        return false;
    uint32_t axis = axis_of(p, placed, sig->n_inputs);
    if (axis == KOILA_NONE) {
        const bool stays_free =
            !stacks_tokens(p, sig) && (is_table(p, sig, in) || is_free(p, sig, placed));
        const bool is_seed = p->seeds && p->seeds[p->recorded] && !stays_free;
        return append(p, id, sig, in, NULL, stays_free, results) &&
               (!is_seed || cut(p, sig, placed, 0, results));
    }
    if (any_piece(placed, sig->n_inputs)) {
        if (attempt_pieces(p, &a, sig, in, placed, (uint16_t)axis))
            return append(p, id, sig, in, &a, false, results);
        show_pieces_whole(placed, sig->n_inputs);
        axis = axis_of(p, placed, sig->n_inputs);
        if (axis == KOILA_NONE)
            return p->status == KOILA_OK && append(p, id, sig, in, NULL, false, results);
    }
    return place_on_axis(p, id, in, placed, (uint16_t)axis, results);
}

/* Places the call on that axis; inputs of others are shown to its rule as whole. */
static bool place_along(koila__placer *p, koila_sig id, const koila_value *in, uint16_t axis,
                        koila_value *results)
{
    const koila_sig_info *sig = koila__sig(p->table, id);
    koila_placement *placed = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *placed);
    if (!placed)
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        placed[i] = p->value.at[in[i]];
    return place_on_axis(p, id, in, placed, axis, results);
}

/* axis: KOILA_NONE: that of its inputs. */
bool koila__placer_sig(koila__placer *p, koila_sig id, const koila_value *in, uint32_t axis,
                       koila_value *results)
{
    if (p->whole)
        return append(p, id, koila__sig(p->table, id), in, NULL, false, results);
    const koila__mark before = koila__arena_mark(&p->scratch);
    const bool ok = axis == KOILA_NONE ? place_in(p, id, in, results)
                                       : place_along(p, id, in, (uint16_t)axis, results);
    koila__arena_rewind(&p->scratch, before);
    return ok;
}

bool koila__placer_call(koila__placer *p, const koila_sig_info *desc, const koila_value *in,
                        uint32_t axis, koila_value *results)
{
    koila_sig id;
    if (p->status != KOILA_OK)
        return false;
    const koila_status s = koila_table_sig(p->table, desc, &id);
    return s == KOILA_OK ? koila__placer_sig(p, id, in, axis, results) : koila__placer_fail(p, s);
}
