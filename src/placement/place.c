/* place.c — which values are whole, which are sliced, which are partial sums: one walk over the
 * recorded graph.
 *
 * For each node the placements of its inputs are known. Its operator's rule (rules.h) says what
 * placement each input must have and what the results then have. Three attempts, from cheap to
 * always right:
 *   1. the rule as it is;
 *   2. with every P input made whole first (a P met by an S in one operator must become whole:
 *       its running value means nothing);
 *   3. *gather*: every input R, every result R, run once on whole values.
 * No rule means attempt 3. So a missing rule costs memory, never correctness.
 *
 * FREE. A factory has no data edge and is nobody's slice yet. It, and every node with a rule whose
 * inputs are only R and FREE, stays FREE until a use needs it as S (then resolve_s() makes its
 * producers so, back to the factories, by asking their rules) or as R (resolve_r()). A use decides
 * by position, through its own rule; that some size equals the batch decides nothing. A factory of
 * zeros may also become P: zeros are a partial sum of zeros, so scattering rows into zeros needs no
 * whole value. What nobody asked for is R in the end.
 *
 * Note [Writes to placed values]. An in-place call runs its functional twin's rule on the written
 * *view*: the base's placement is carried forward through the chain of view calls by their own
 * rules. When the twin's result is S and the base is R or FREE, the base placement is searched
 * among its dimensions: the one whose image under the chain is exactly that S. None: gather.
 *
 * Note [Rewrites]. A rule may emit calls instead of answering (rewrite.h): statistics of BatchNorm,
 * the denominator of nll_loss. Emitted calls are placed here like recorded ones, by their own
 * rules, so a rewrite is just a longer program for the same values. koila__place_whole() asks no
 * rule: one slice runs what was recorded.
 *
 * Note [After a gather]. The result of a gathered call is whole, and so is everything computed from
 * it alone. koila__place_cut() slices it again: where a dimension of it is the batch (the one an
 * input was sliced along, else one of that size) the calls that follow get an alias of it that is
 * sliced there, and those that need it whole get it as it was made. Slicing a whole value is exact
 * whatever its rows mean; only the choice of the dimension is a guess. It saves memory and costs
 * loops, so a plan tries both.
 *
 * The algebra follows GSPMD (Xu et al. 2021) and PyTorch DTensor, with time in the place of
 * devices.
 */
#include "placement/placer.h"
#include "graph/table.h"

#define MAX_DEPTH 256 /* of resolving: beyond it a FREE value becomes R, which is right too */

typedef struct attempt {
    koila__case c;
    koila__fix fix[KOILA__MAX_FIXES];
    koila__placed_link *link;
    bool loop;
} attempt;

static bool fail(koila__placer *p, koila_status s)
{
    if (p->status == KOILA_OK)
        p->status = s;
    return false;
}

static const koila__op_rule *op_rule(koila__placer *p, koila_op op)
{
    static const koila__op_rule none = { true, NULL, NULL };
    while (p->op.n <= op)
        if (!koila__vec_push(&p->mem, &p->op, ((koila__op_rule){ 0 }))) {
            fail(p, KOILA_NO_MEMORY);
            return &none;
        }
    koila__op_rule *r = &p->op.at[op];
    if (!r->known) {
        const char *user_rule = koila__user_rule_of(p->table, op);
        const koila__rule rule = user_rule ? koila__rule_user : koila__rule_of(p->table, op);
        *r = (koila__op_rule){ true, rule, user_rule };
    }
    return r;
}

static uint32_t facts_of(const koila__placer *p, const koila_sig_info *sig)
{
    return p->table->ops.at[sig->op].facts;
}

koila_placement koila__placer_placement(const koila__placer *p, koila_value v)
{
    return v == KOILA_NONE ? koila__r() : p->value.at[v];
}

/* ---- one case: inputs' placements in, an attempt out */

static bool case_init(koila__placer *p, attempt *a, const koila_sig_info *sig,
                      const koila_value *in, const koila_placement *placed, uint16_t axis)
{
    const uint32_t n_in = sig->n_inputs;
    const uint32_t n_out = sig->n_outputs;
    koila__case *c = &a->c;
    memset(a, 0, sizeof *a);
    /* three arrays in one, and three of pointers and numbers */
    koila_placement *cin = koila__arena_room(&p->scratch, ((size_t)2 * n_in + n_out) * sizeof *cin);
    const koila_meta_info **in_meta = koila__arena_room(
        &p->scratch, (n_in + n_out) * sizeof *in_meta + n_out * sizeof *c->replaced + n_in);
    if (!cin || !in_meta)
        return fail(p, KOILA_NO_MEMORY);
    const koila_meta_info **out_meta = in_meta + n_in;
    c->need = cin + n_in;
    c->out = c->need + n_in;
    c->replaced = (koila_value *)(out_meta + n_out);
    bool *zero = (bool *)(c->replaced + n_out);
    for (uint32_t i = 0; i < n_in; i++) {
        in_meta[i] = koila__meta(p->table, sig->inputs[i]);
        cin[i] = placed[i].kind == KOILA_R || placed[i].kind == KOILA_FREE || placed[i].axis == axis
                     ? placed[i]
                     : koila__r();
        zero[i] = cin[i].kind == KOILA_FREE && in && p->zero.at[in[i]];
        for (uint32_t k = 0; k < n_in && zero[i]; k++)
            zero[i] = k == i || in[k] != in[i];
        c->need[i] = koila__is_r(cin[i]) ? koila__r() : cin[i];
    }
    for (uint32_t j = 0; j < n_out; j++) {
        out_meta[j] = sig->outputs[j] == KOILA_NONE ? NULL : koila__meta(p->table, sig->outputs[j]);
        c->out[j] = koila__r();
        c->replaced[j] = KOILA_NONE;
    }
    c->placer = p;
    c->table = p->table;
    c->sig = sig;
    c->user_rule = op_rule(p, sig->op)->user_rule;
    c->batch = axis < p->from->axes.n ? p->from->axes.at[axis] : 0;
    c->axis = axis;
    c->n_in = n_in;
    c->n_out = n_out;
    c->in_value = in;
    c->in_meta = in_meta;
    c->in = cin;
    c->zero = zero;
    c->out_meta = out_meta;
    c->fix = a->fix;
    return p->status == KOILA_OK;
}

/* What a rule said must be sound in form: this is asserted in debug builds and refused (gather) in
 * others. */
static bool sound(attempt *a)
{
    const koila__case *c = &a->c;
    bool s_need = false, p_need = false, r_out = false, s_out = false, any_out = false;
    for (uint32_t i = 0; i < c->n_in; i++) {
        const koila_placement n = c->need[i];
        const koila_placement in = c->in[i];
        if (n.kind == KOILA_FREE)
            return false;
        if (i < 32 && ((c->unread >> i) & 1) && koila__placement_equal(n, in))
            continue;
        if (n.kind == KOILA_S && (n.axis != c->axis || !koila__fits(c, n, c->in_meta[i])))
            return false;
        if (n.kind == KOILA_P && !koila__placement_equal(n, in) &&
            !(c->zero[i] && n.combine == KOILA_SUM))
            return false;
        s_need |= n.kind == KOILA_S;
        p_need |= n.kind == KOILA_P;
    }
    for (uint32_t j = 0; j < c->n_out; j++) {
        if (!c->out_meta[j])
            continue;
        if (c->out[j].kind == KOILA_FREE)
            return false;
        if (c->out[j].kind == KOILA_S &&
            (c->out[j].axis != c->axis || !koila__fits(c, c->out[j], c->out_meta[j])))
            return false;
        r_out |= c->out[j].kind == KOILA_R;
        s_out |= c->out[j].kind == KOILA_S;
        any_out |= c->out[j].kind != KOILA_R;
    }
    a->loop = s_need || p_need || any_out;
    return !(p_need && (s_out || (s_need && !c->accumulates))) && !(a->loop && r_out);
}

/* The placement of a chain's last view when its base is `base`; link may be NULL. A base that is R
 * or FREE stays so. */
static bool forward(koila__placer *p, const koila_write *w, koila_placement base, uint16_t axis,
                    koila__placed_link *link, koila_placement *out)
{
    for (uint32_t l = 0; l < w->n_links; l++) {
        const koila_sig_info *sig = koila__sig(p->table, w->links[l].sig);
        if (koila__is_r(base))
            continue;
        attempt a;
        if (!case_init(p, &a, sig, NULL, &base, axis))
            return false;
        const koila__rule rule = op_rule(p, sig->op)->rule;
        if (!rule || !rule(&a.c) || !sound(&a) || !koila__placement_equal(a.c.need[0], base))
            return false;
        base = a.c.out[w->links[l].output];
        if (link) {
            memcpy(link[l].fix, a.fix, sizeof a.fix);
            link[l].out = base;
        }
        if (koila__is_r(base))
            return false;
    }
    *out = base;
    return true;
}

/* Calls try(S) for the placements a value of meta m can have over `batch` rows, the likeliest
 * first; stops at the first true. */
typedef bool (*try_fn)(void *user, koila_placement s);
static bool each_placement(const koila_meta_info *m, int64_t batch, uint16_t axis,
                           koila_placement like, try_fn try, void *user)
{
    if (batch <= 0)
        return false;
    koila_placement s = { .kind = KOILA_S, .axis = axis };
    for (uint32_t d = 0; d < m->n_dims; d++) {
        if (m->size[d] == 0 || m->size[d] % batch)
            continue;
        const int64_t k = m->size[d] / batch;
        s.dim = (uint8_t)d;
        if (like.kind == KOILA_S && like.outer > 0 && like.inner > 0 && like.outer <= k &&
            k % like.outer == 0 && k / like.outer == like.inner) {
            s.outer = like.outer;
            s.inner = like.inner;
            if (try(user, s))
                return true;
        }
        /* far-fetched factorings are gathered */
        for (int64_t outer = 1; outer <= k; outer = outer < 64  ? outer + 1
                                                    : outer < k ? k
                                                                : k + 1) {
            if (k % outer)
                continue;
            s.outer = outer;
            s.inner = k / outer;
            if (try(user, s))
                return true;
        }
    }
    return false;
}

typedef struct base_search {
    koila__placer *p;
    const koila_write *w;
    uint16_t axis;
    koila_placement view, base;
} base_search;
static bool base_maps_to_view(void *user, koila_placement s)
{
    base_search *b = user;
    koila_placement image;
    if (!forward(b->p, b->w, s, b->axis, NULL, &image) || !koila__placement_equal(image, b->view))
        return false;
    b->base = s;
    return true;
}

/* The functional twin's rule, between the written views and their bases: Note [Writes to placed
 * values]. */
static bool attempt_writes(koila__placer *p, attempt *a, koila__rule rule)
{
    koila__case *c = &a->c;
    const koila_sig_info *sig = c->sig;
    koila_placement *in = (koila_placement *)c->in;
    koila_placement *base = koila__arena_array(&p->scratch, sig->n_writes, sizeof *base);
    const koila_meta_info **in_meta = (const koila_meta_info **)c->in_meta;
    const koila_meta_info **out_meta = (const koila_meta_info **)c->out_meta;
    const koila_placement *want = c->want;
    koila_placement want_view;
    uint32_t n_links = 0;
    if (!base)
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t w = 0; w < sig->n_writes; w++) {
        const koila_write *wr = &sig->writes[w];
        for (uint32_t v = 0; v < w; v++)
            if (sig->writes[v].input == wr->input)
                return false;
        base[w] = in[wr->input];
        if (wr->overwrites) { /* the old contents are not read: any placement will do */
            in[wr->input].kind = KOILA_FREE;
            ((bool *)c->zero)[wr->input] = false;
            c->need[wr->input] = koila__r();
        } else if (!forward(p, wr, base[w], c->axis, NULL, &in[wr->input]))
            return false;
        else if (!koila__is_r(in[wr->input]))
            c->need[wr->input] = in[wr->input];
        if (wr->n_links) {
            const koila_link last = wr->links[wr->n_links - 1];
            in_meta[wr->input] =
                koila__meta(p->table, koila__sig(p->table, last.sig)->outputs[last.output]);
        }
        out_meta[sig->n_fresh + w] = in_meta[wr->input];
        n_links += wr->n_links;
    }
    if (want && sig->n_fresh == 0) {
        if (!forward(p, &sig->writes[0], *want, c->axis, NULL, &want_view))
            return false;
        c->want = &want_view;
    } else {
        c->want = NULL;
        /* a number written over rows: the rows stay where they were */
        for (uint32_t w = 0; w < sig->n_writes; w++)
            if (sig->writes[w].overwrites && koila__is_s(base[w]) && !koila__is_opaque(base[w])) {
                want_view = base[w];
                c->want = &want_view;
            }
    }
    if (!rule(c) || !sound(a))
        return false;
    for (uint32_t w = 0; w < sig->n_writes; w++) {
        const koila_write *wr = &sig->writes[w];
        const koila_placement q = c->out[sig->n_fresh + w];
        const koila_placement need = c->need[wr->input];
        const koila_placement b = base[w];
        koila_placement *base_need = &c->need[wr->input];
        koila_placement *base_out = &c->out[sig->n_fresh + w];
        in[wr->input] = b;
        if (wr->overwrites) {
            *base_need = !koila__is_r(b) ? b : q.kind == KOILA_S ? q : koila__r();
            *base_out = q;
        } else if (!a->loop)
            *base_need = *base_out = koila__r();
        else if (!koila__placement_equal(need, q))
            return false;
        else if (!koila__is_r(b))
            *base_need = *base_out = b; /* sound(): need is the view's placement */
        else if (q.kind == KOILA_P)
            *base_need = *base_out = q; /* zeros, P through any view */
        else {
            base_search s = { p, wr, c->axis, q, q };
            const koila_meta_info *m = koila__meta(p->table, sig->inputs[wr->input]);
            if (!each_placement(m, c->batch, c->axis,
                                want && w == 0 && sig->n_fresh == 0 ? *want : q, base_maps_to_view,
                                &s))
                return false;
            *base_need = *base_out = s.base;
        }
    }
    for (uint32_t w = 0; w < sig->n_writes; w++) { /* from here on the case shows the bases */
        in_meta[sig->writes[w].input] = koila__meta(p->table, sig->inputs[sig->writes[w].input]);
        out_meta[sig->n_fresh + w] = in_meta[sig->writes[w].input];
        ((bool *)c->zero)[sig->writes[w].input] =
            koila__is_r(base[w]) && c->in_value && p->zero.at[c->in_value[sig->writes[w].input]];
    }
    if (!a->loop || !n_links)
        return true;
    a->link = koila__arena_array(p->keep, n_links, sizeof *a->link);
    if (!a->link)
        return fail(p, KOILA_NO_MEMORY);
    koila__placed_link *link = a->link;
    for (uint32_t w = 0; w < sig->n_writes; w++) {
        koila_placement image;
        if (!forward(p, &sig->writes[w], c->out[sig->n_fresh + w], c->axis, link, &image))
            return false;
        link += sig->writes[w].n_links;
    }
    return true;
}

/* No input is needed sliced otherwise than it is placed (a node that exists cannot get a barrier in
 * front of it). */
static bool slices_as_placed(const attempt *a)
{
    for (uint32_t i = 0; i < a->c.n_in; i++)
        if (a->c.need[i].kind == KOILA_S && !koila__is_r(a->c.in[i]) &&
            !koila__placement_equal(a->c.need[i], a->c.in[i]))
            return false;
    return true;
}

/* Note [Random] in place.h */
static bool drawn_in_rows(const koila__placer *p, const koila_sig_info *sig)
{
    if (!(p->table->ops.at[sig->op].flags & KOILA_OP_RANDOM))
        return true;
    if (sig->n_inputs == 0)
        return sig->n_outputs == 1;
    return sig->n_inputs == 1 && sig->n_writes == 1 && sig->n_fresh == 0 &&
           sig->writes[0].overwrites;
}

static bool attempt_rule(koila__placer *p, attempt *a, const koila_sig_info *sig,
                         const koila_value *in, const koila_placement *placed, uint16_t axis,
                         const koila_placement *want, bool may_emit)
{
    if (!case_init(p, a, sig, in, placed, axis))
        return false;
    const koila__rule rule = op_rule(p, sig->op)->rule;
    if (!rule)
        return false;
    a->c.want = want;
    if (!drawn_in_rows(p, sig))
        return false;
    if (sig->n_writes) {
        const koila_write *w = &sig->writes[0];
        if (attempt_writes(p, a, rule))
            return true;
        /* Note [Rewrites] of a write: where the base itself is written, and read, what its twin is
         * rewritten to is the base's next value */
        if (p->status != KOILA_OK || !may_emit || sig->n_outputs != 1 || w->n_links || w->input ||
            w->overwrites || !case_init(p, a, sig, in, placed, axis))
            return false;
        a->c.want = want;
        a->c.may_emit = true;
        return rule(&a->c) && p->status == KOILA_OK && a->c.replaced[0] != KOILA_NONE;
    }
    a->c.may_emit = may_emit;
    if (!rule(&a->c) || p->status != KOILA_OK)
        return false;
    for (uint32_t j = 0; j < a->c.n_out; j++)
        /* rewritten: the emitted calls were checked themselves */
        if (a->c.replaced[j] != KOILA_NONE)
            return true;
    /* no assert: text may hold calls whose shapes contradict themselves, and no rule answers for
     * those */
    return sound(a);
}

/* ---- where a value comes from */

static bool is_int(const koila_sig_info *sig, uint32_t pos, int64_t value)
{
    return pos < sig->n_pos && sig->tokens[sig->start[pos]].kind == KOILA_ARG_INT &&
           sig->tokens[sig->start[pos]].u.i == value;
}

/* An arange of whole numbers from 0 in steps of 1: *n of them. */
static bool is_range(const koila__placer *p, const koila_sig_info *sig, int64_t *n)
{
    const uint32_t facts = facts_of(p, sig);
    const bool has_start = facts & KOILA_FACT_ARANGE_START;
    if (sig->n_outputs != 1)
        return false;
    const koila_meta_info *m = koila__meta(p->table, sig->outputs[0]);
    if (has_start && !is_int(sig, 0, 0))
        return false;
    if ((facts & KOILA_FACT_ARANGE_STEP) && sig->n_pos >= 3 && !is_int(sig, 2, 1))
        return false;
    *n = m->n_dims == 1 ? m->size[0] : 0;
    return m->n_dims == 1 && is_int(sig, has_start ? 1 : 0, *n) && !koila__dtype_is_float(m->dtype);
}

/* Does this call of one input keep whole numbers as they are, and in their row-major order? */
static bool keeps_numbers(const koila__placer *p, const koila_sig_info *sig)
{
    const uint32_t facts = facts_of(p, sig);
    if (sig->n_inputs != 1 || sig->n_outputs != 1 || sig->n_writes)
        return false;
    const koila_meta_info *m = koila__meta(p->table, sig->outputs[0]);
    const koila_meta_info *from = koila__meta(p->table, sig->inputs[0]);
    if (koila__dtype_is_float(m->dtype) || koila_dtype_bytes(m->dtype) < 4)
        return false;
    if (facts & KOILA_FACT_ADDS)
        return is_int(sig, 1, 0);
    if (!(facts & KOILA_FACT_RESHAPES))
        return facts & (KOILA_FACT_BROADCASTS | KOILA_FACT_SAME_VALUES);
    for (uint32_t d = 0; d < m->n_dims; d++) /* only dims of size 1 come and go */
        if (m->size[d] != 1 && (uint64_t)m->size[d] != from->n_elements)
            return false;
    return from->n_elements == m->n_elements;
}

enum { MAX_STEPS_UP = 16 }; /* from a value to the arange it comes from */

static const koila_sig_info *maker(const koila__placer *p, koila_value v)
{
    const koila_node node = p->to->values.at[v].node;
    return node == KOILA_NONE ? NULL : koila__sig(p->table, p->to->nodes.at[node].sig);
}

static koila_value first_input(const koila__placer *p, koila_value v)
{
    return koila_node_inputs(p->to, p->to->values.at[v].node)[0];
}

/* v was made from range(n) by calls that keep numbers. Which of its dimensions carries them? After
 * a broadcast nothing is reshaped (its sizes no longer allow it), so it is the one that carries
 * them just below the broadcasts, where exactly one dimension is not 1; counted from the right. */
static bool carrying_dim(const koila__placer *p, koila_value v, int64_t n, uint32_t *from_right)
{
    const uint32_t through = KOILA_FACT_BROADCASTS | KOILA_FACT_SAME_VALUES;
    for (uint32_t step = 0; step < MAX_STEPS_UP; step++) {
        const koila_sig_info *sig = maker(p, v);
        const koila_meta_info *m = koila__meta(p->table, sig->outputs[0]);
        if (m->n_elements == (uint64_t)n) {
            for (uint32_t d = m->n_dims; d-- > 0;)
                if (m->size[d] == n) {
                    *from_right = m->n_dims - 1 - d;
                    return true;
                }
            return false;
        }
        if (!(facts_of(p, sig) & through))
            return false;
        v = first_input(p, v);
    }
    return false;
}

bool koila__is_row_numbers(const koila__case *c, uint32_t i, uint32_t *dim)
{
    const koila__placer *p = c->placer;
    if (!c->in_value)
        return false;
    koila_value v = c->in_value[i];
    const koila_meta_info *m = koila__meta(p->table, p->to->values.at[v].meta);
    const koila_sig_info *sig = maker(p, v);
    uint32_t from_right;
    int64_t n;
    for (uint32_t step = 1; sig && !(facts_of(p, sig) & KOILA_FACT_ARANGE); step++) {
        if (step == MAX_STEPS_UP || !keeps_numbers(p, sig))
            return false;
        v = first_input(p, v);
        sig = maker(p, v);
    }
    if (!sig || !is_range(p, sig, &n) || n < 2)
        return false;
    if (!carrying_dim(p, c->in_value[i], n, &from_right) || from_right >= m->n_dims)
        return false;
    *dim = m->n_dims - 1u - from_right;
    return m->size[*dim] == n;
}

bool koila__is_steps(const koila__case *c, uint32_t i, int64_t *step)
{
    const koila__placer *p = c->placer;
    const koila_sig_info *sig = c->in_value ? maker(p, c->in_value[i]) : NULL;
    const koila_meta_info *m = c->in_meta[i];
    if (!sig || !(facts_of(p, sig) & KOILA_FACT_ARANGE_STEP) || m->n_dims != 1 ||
        koila__dtype_is_float(m->dtype) || !is_int(sig, 0, 0))
        return false;
    if (sig->n_pos < 3 || sig->tokens[sig->start[2]].kind != KOILA_ARG_INT)
        return false;
    *step = sig->tokens[sig->start[2]].u.i;
    return *step > 0 && *step <= INT64_MAX / (m->size[0] + 1) && is_int(sig, 1, m->size[0] * *step);
}

/* ---- FREE values */

/* The node runs once, on whole values: needs and results R. Its FREE inputs go on the stack. */
typedef VEC(koila_value) value_stack;
static bool set_whole(koila__placer *p, koila_node id, value_stack *stack)
{
    const koila_node_info n = p->to->nodes.at[id];
    const koila_sig_info *sig = koila__sig(p->table, n.sig);
    koila__placed_node *node = &p->node.at[id];
    memset(node->fix, 0, sizeof node->fix);
    node->link = NULL;
    node->axis = 0;
    node->in_loop = node->gathered = false;
    for (uint32_t j = 0; j < sig->n_outputs; j++)
        p->value.at[n.first_output + j] = koila__r();
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_value x = p->to->inputs.at[n.first_input + i];
        p->need.at[n.first_input + i] = koila__r();
        node->gathered |= koila__is_s(p->value.at[x]);
        if (p->value.at[x].kind == KOILA_FREE && !koila__vec_push(&p->mem, stack, x))
            return fail(p, KOILA_NO_MEMORY);
    }
    return true;
}

static bool drain_r(koila__placer *p, value_stack *stack)
{
    bool ok = p->status == KOILA_OK;
    while (ok && stack->n) {
        const koila_value x = stack->at[--stack->n];
        if (p->value.at[x].kind == KOILA_FREE)
            ok = set_whole(p, p->to->values.at[x].node, stack);
    }
    koila__vec_free(&p->mem, stack);
    return ok;
}

static bool resolve_r(koila__placer *p, koila_value v)
{
    value_stack stack = { 0 };
    if (!koila__vec_push(&p->mem, &stack, v))
        return fail(p, KOILA_NO_MEMORY);
    return drain_r(p, &stack);
}

static bool settle(koila__placer *p, koila_node id, const attempt *a);

typedef struct input_search {
    koila__placer *p;
    const koila_sig_info *sig;
    const koila_value *in;
    koila_placement *placed, want;
    uint32_t i, output;
    uint16_t axis;
    attempt *a;
} input_search;
static bool input_gives_want(void *user, koila_placement s)
{
    input_search *t = user;
    const koila_placement was = t->placed[t->i];
    t->placed[t->i] = s;
    const bool ok = attempt_rule(t->p, t->a, t->sig, t->in, t->placed, t->axis, NULL, false) &&
                    t->a->loop && slices_as_placed(t->a) &&
                    koila__placement_equal(t->a->c.out[t->output], t->want);
    t->placed[t->i] = was;
    return ok;
}

/* Make FREE v placed `want`; false leaves it FREE. */
static bool resolve_s(koila__placer *p, koila_value v, koila_placement want)
{
    const koila_node id = p->to->values.at[v].node;
    const koila_node_info n = p->to->nodes.at[id];
    const koila_sig_info *sig = koila__sig(p->table, n.sig);
    const uint32_t output = v - n.first_output;
    if (p->depth >= MAX_DEPTH)
        return false;
    koila_placement *placed = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *placed);
    koila_value *in = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *in);
    if (!placed || !in)
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        in[i] = p->to->inputs.at[n.first_input + i];
        placed[i] = p->value.at[in[i]];
    }
    attempt a;
    bool found = output == 0 && attempt_rule(p, &a, sig, in, placed, want.axis, &want, false) &&
                 a.loop && slices_as_placed(&a) && koila__placement_equal(a.c.out[0], want);
    for (uint32_t i = 0; i < sig->n_inputs && !found && p->status == KOILA_OK; i++) {
        if (placed[i].kind != KOILA_FREE)
            continue;
        input_search t = { p, sig, in, placed, want, i, output, want.axis, &a };
        found = each_placement(koila__meta(p->table, sig->inputs[i]),
                               koila_graph_axis_size(p->from, want.axis), want.axis, want,
                               input_gives_want, &t);
    }
    if (!found || p->status != KOILA_OK)
        return false;
    p->depth++;
    found = settle(p, id, &a);
    p->depth--;
    return found;
}

void koila__placer_slice(koila__placer *p, koila_value v, koila_placement want)
{
    if (p->value.at[v].kind == KOILA_FREE)
        resolve_s(p, v, want);
}

/* Zeros are a partial sum of zeros: the whole FREE tree above v becomes P, each slice makes its
 * own. */
static bool resolve_p(koila__placer *p, koila_value v, koila_placement want)
{
    VEC(koila_value) stack = { 0 };
    bool ok = koila__vec_push(&p->mem, &stack, v);
    while (ok && stack.n) {
        const koila_value x = stack.at[--stack.n];
        if (p->value.at[x].kind != KOILA_FREE)
            continue;
        const koila_node id = p->to->values.at[x].node;
        const koila_node_info n = p->to->nodes.at[id];
        const koila_sig_info *sig = koila__sig(p->table, n.sig);
        for (uint32_t j = 0; j < sig->n_outputs; j++)
            p->value.at[n.first_output + j] = want;
        p->node.at[id].axis = want.axis;
        p->node.at[id].in_loop = true;
        uint32_t n_links = 0;
        for (uint32_t w = 0; w < sig->n_writes; w++)
            n_links += sig->writes[w].n_links;
        if (n_links) {
            koila__placed_link *link = koila__arena_array(p->keep, n_links, sizeof *link);
            if (!(ok = link != NULL))
                break;
            for (uint32_t l = 0; l < n_links; l++)
                link[l].out = want;
            p->node.at[id].link = link;
        }
        for (uint32_t i = 0; i < sig->n_inputs && ok; i++) {
            const koila_value y = p->to->inputs.at[n.first_input + i];
            if (p->value.at[y].kind != KOILA_FREE) {
                p->need.at[n.first_input + i] = koila__r();
                continue;
            }
            p->need.at[n.first_input + i] = want;
            ok = koila__vec_push(&p->mem, &stack, y);
        }
    }
    koila__vec_free(&p->mem, &stack);
    return ok || fail(p, KOILA_NO_MEMORY);
}

/* The node becomes what the attempt says, and its FREE inputs what is needed of them: a FREE input
 * that cannot be S becomes R, and is sliced. Two inputs with a common FREE ancestor may ask
 * different things of it; the first asked wins, and the node is gathered if that does not suit. */
static bool settle(koila__placer *p, koila_node id, const attempt *a)
{
    const koila_node_info n = p->to->nodes.at[id];
    const koila__case *c = &a->c;
    bool suits = true, gathered = false;
    for (uint32_t j = 0; j < c->n_out; j++)
        p->value.at[n.first_output + j] = c->out_meta[j] ? c->out[j] : koila__r();
    for (uint32_t i = 0; i < c->n_in; i++) {
        const koila_value x = p->to->inputs.at[n.first_input + i];
        const koila_placement need = p->need.at[n.first_input + i] = c->need[i];
        if (p->value.at[x].kind == KOILA_FREE) {
            const bool ok = need.kind == KOILA_P   ? resolve_p(p, x, need)
                            : need.kind == KOILA_S ? resolve_s(p, x, need) ||
                                                         (p->status == KOILA_OK && resolve_r(p, x))
                                                   : resolve_r(p, x);
            if (!ok)
                return false;
        }
    }
    for (uint32_t i = 0; i < c->n_in; i++) { /* when all are decided */
        const koila_placement is = p->value.at[p->to->inputs.at[n.first_input + i]];
        const koila_placement need = c->need[i];
        suits &= need.kind == KOILA_R || koila__placement_equal(is, need) ||
                 (need.kind == KOILA_S && is.kind == KOILA_R);
        gathered |= need.kind == KOILA_R && is.kind == KOILA_S;
        if (koila__is_opaque(is) && !koila__placement_equal(is, need))
            return fail(p, KOILA_UNSUPPORTED);
    }
    if (!suits) {
        value_stack stack = { 0 };
        return set_whole(p, id, &stack) && drain_r(p, &stack);
    }
    koila__placed_node *node = &p->node.at[id];
    memcpy(node->fix, a->fix, sizeof node->fix);
    node->link = a->link;
    node->axis = a->loop ? c->axis : 0;
    node->in_loop = a->loop;
    node->gathered = gathered;
    return true;
}

/* Has this call with only R and FREE inputs something to decide later? */
static bool is_free(koila__placer *p, const koila_sig_info *sig, const koila_placement *placed)
{
    const koila__rule rule = op_rule(p, sig->op)->rule;
    if (!rule)
        return false;
    if (facts_of(p, sig) & KOILA_FACT_FACTORY)
        return sig->n_inputs == 0;
    if (facts_of(p, sig) & KOILA_FACT_BROADCASTS) { /* a factory of copies */
        const koila_meta_info *in = koila__meta(p->table, sig->inputs[0]);
        const koila_meta_info *out = koila__meta(p->table, sig->outputs[0]);
        if (out->n_elements > in->n_elements)
            return true;
    }
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
    const uint32_t facts = facts_of(p, sig);
    const bool reads_nothing =
        sig->n_inputs == 0 || (sig->n_writes == 1 && sig->writes[0].overwrites);
    if (facts & KOILA_FACT_ZEROS)
        return reads_nothing;
    if (facts & KOILA_FACT_FILLS)
        return reads_nothing && is_number_zero(sig, 1);
    const bool copies =
        (p->table->ops.at[sig->op].flags & KOILA_OP_VIEW) || (facts & KOILA_FACT_SAME_VALUES);
    return copies && sig->n_inputs == 1 && p->zero.at[in[0]];
}

/* ---- one call */

static bool append(koila__placer *p, koila_sig id, const koila_sig_info *sig, const koila_value *in,
                   const attempt *a, bool is_free_call, koila_value *results)
{
    koila_value first;
    const bool zero = is_free_call && is_zero(p, sig, in);
    const koila_status s = koila_graph_node(p->to, id, in, p->line, &first);
    if (s != KOILA_OK)
        return fail(p, s);
    const koila_node node = koila_graph_n_nodes(p->to) - 1;
    if (!koila__vec_reserve(&p->mem, &p->value, sig->n_outputs) ||
        !koila__vec_reserve(&p->mem, &p->zero, sig->n_outputs) ||
        !koila__vec_reserve(&p->mem, &p->whole_of, sig->n_outputs) ||
        !koila__vec_reserve(&p->mem, &p->need, sig->n_inputs) ||
        !koila__vec_reserve(&p->mem, &p->node, 1))
        return fail(p, KOILA_NO_MEMORY);
    p->node.at[p->node.n++] = (koila__placed_node){ .recorded = p->recorded };
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        const bool exists = sig->outputs[j] != KOILA_NONE;
        p->value.at[p->value.n++] =
            is_free_call && exists ? (koila_placement){ .kind = KOILA_FREE } : koila__r();
        p->zero.at[p->zero.n++] = zero;
        p->whole_of.at[p->whole_of.n++] = KOILA_NONE;
        results[j] = first + j;
    }
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        p->need.at[p->need.n++] = koila__r();
    if (a)
        return settle(p, node, a);
    if (is_free_call || p->whole)
        return true; /* whole: everything is R, as it is now */
    value_stack stack = { 0 };
    return set_whole(p, node, &stack) && drain_r(p, &stack);
}

/* An alias of v that needs v placed `at` and is placed so. */
static bool alias(koila__placer *p, koila_value v, koila_placement at, uint16_t axis,
                  koila_value *out)
{
    const koila_meta meta = p->to->values.at[v].meta;
    const koila_arg token = { .kind = KOILA_ARG_TENSOR, .u.id = meta };
    koila_sig_info desc = {
        .n_tokens = 1, .n_pos = 1, .tokens = &token, .n_fresh = 1, .outputs = &meta
    };
    koila_sig id;
    attempt a;
    koila_status s = koila_table_op(p->table, "aten::alias", KOILA_OP_VIEW, &desc.op);
    if (s == KOILA_OK)
        s = koila_table_sig(p->table, &desc, &id);
    if (s != KOILA_OK)
        return fail(p, s);
    const koila_sig_info *sig = koila__sig(p->table, id);
    if (!case_init(p, &a, sig, &v, &p->value.at[v], axis))
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

/* Note [After a gather] */
static bool cut(koila__placer *p, const koila_sig_info *sig, const koila_placement *placed,
                uint16_t axis, koila_value *results)
{
    const int64_t batch = koila_graph_axis_size(p->from, axis);
    if (koila_op_flags(p->table, sig->op) & KOILA_OP_OPAQUE)
        return true;
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        if (sig->outputs[j] == KOILA_NONE)
            continue;
        const koila_meta_info *m = koila_meta_get(p->table, sig->outputs[j]);
        koila_placement at = koila__r();
        for (uint32_t i = 0; i < sig->n_inputs && koila__is_r(at); i++) {
            const koila_placement like = placed[i];
            if (like.kind == KOILA_S && like.axis == axis && like.inner > 0 &&
                like.dim < m->n_dims && m->size[like.dim] == koila__extent(like, batch))
                at = like;
        }
        for (uint32_t d = 0; d < m->n_dims && koila__is_r(at); d++)
            if (m->size[d] == batch)
                at = (koila_placement){
                    .kind = KOILA_S, .dim = (uint8_t)d, .axis = axis, .outer = 1, .inner = 1
                };
        koila_value rows;
        if (koila__is_r(at))
            continue;
        if (!alias(p, results[j], at, axis, &rows))
            return false;
        p->whole_of.at[rows] = results[j];
        results[j] = rows;
    }
    return true;
}

static bool place_in(koila__placer *p, koila_sig id, const koila_value *in, koila_value *results)
{
    const koila_sig_info *sig = koila__sig(p->table, id);
    koila_placement *placed = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *placed);
    if (!placed)
        return fail(p, KOILA_NO_MEMORY);
    uint32_t axis = KOILA_NONE;
    bool any_p = false;
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        placed[i] = p->value.at[in[i]];
        if (koila__is_r(placed[i]))
            continue;
        any_p |= koila__is_p(placed[i]);
        const uint32_t x = placed[i].axis;
        if (axis == KOILA_NONE || x == p->main_axis ||
            (axis != p->main_axis && koila_graph_axis_size(p->from, (uint16_t)x) >
                                         koila_graph_axis_size(p->from, (uint16_t)axis)))
            axis = x;
    }
    if (axis == KOILA_NONE)
        return append(p, id, sig, in, NULL, is_free(p, sig, placed), results);

    attempt a;
    bool ok = attempt_rule(p, &a, sig, in, placed, (uint16_t)axis, NULL, true);
    if (!ok && p->status == KOILA_OK && any_p) {
        koila_placement *whole = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *whole);
        if (!whole)
            return fail(p, KOILA_NO_MEMORY);
        for (uint32_t i = 0; i < sig->n_inputs; i++)
            whole[i] = koila__is_p(placed[i]) ? koila__r() : placed[i];
        ok = attempt_rule(p, &a, sig, in, whole, (uint16_t)axis, NULL, true);
    }
    if (p->status != KOILA_OK)
        return false;
    if (ok)
        for (uint32_t j = 0; j < a.c.n_out; j++)
            if (a.c.replaced[j] != KOILA_NONE) {
                for (uint32_t k = 0; k < a.c.n_out; k++)
                    results[k] = a.c.replaced[k];
                return true;
            }
    if (!ok) {
        if (!case_init(p, &a, sig, in, placed, (uint16_t)axis))
            return false;
        for (uint32_t i = 0; i < sig->n_inputs; i++)
            a.c.need[i] = koila__r();
        for (uint32_t j = 0; j < sig->n_outputs; j++)
            a.c.out[j] = koila__r();
    }
    koila_value *from = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *from);
    if (!from)
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        from[i] = in[i];
        const koila_placement need = a.c.need[i];
        const koila_placement is = p->value.at[in[i]];
        if (need.kind == KOILA_S && !koila__is_r(is) && !koila__placement_equal(need, is) &&
            !koila__placer_whole(p, in[i], &from[i]))
            return false;
        if (need.kind == KOILA_R && p->whole_of.at[in[i]] != KOILA_NONE)
            from[i] = p->whole_of.at[in[i]];
    }
    return append(p, id, sig, from, &a, false, results) &&
           (ok || !p->cut || cut(p, sig, placed, (uint16_t)axis, results));
}

static bool place_sig(koila__placer *p, koila_sig id, const koila_value *in, koila_value *results)
{
    if (p->whole)
        return append(p, id, koila__sig(p->table, id), in, NULL, false, results);
    const koila__mark before = koila__arena_mark(&p->scratch);
    const bool ok = place_in(p, id, in, results);
    koila__arena_rewind(&p->scratch, before);
    return ok;
}

bool koila__placer_call(koila__placer *p, const koila_sig_info *desc, const koila_value *in,
                        koila_value *results)
{
    koila_sig id;
    if (p->status != KOILA_OK)
        return false;
    const koila_status s = koila_table_sig(p->table, desc, &id);
    return s == KOILA_OK ? place_sig(p, id, in, results) : fail(p, s);
}

/* ---- the walk */

static bool lower_leaf(koila__placer *p, koila_value v, koila_value *out)
{
    const koila_value_info info = p->from->values.at[v];
    const char *name = koila_graph_leaf_name(p->from, v);
    const koila_status s = koila_graph_leaf(p->to, info.meta, info.leaf_kind, info.axis, info.dim,
                                            name && *name ? name : NULL, out);
    if (s != KOILA_OK)
        return fail(p, s);
    koila_placement at = koila__r();
    if (info.leaf_kind == KOILA_LEAF_BATCH && !p->whole)
        at = (koila_placement){
            .kind = KOILA_S, .dim = info.dim, .axis = info.axis, .outer = 1, .inner = 1
        };
    if (!koila__vec_push(&p->mem, &p->value, at) || !koila__vec_push(&p->mem, &p->zero, 0) ||
        !koila__vec_push(&p->mem, &p->whole_of, KOILA_NONE))
        return fail(p, KOILA_NO_MEMORY);
    return true;
}

/* Which values do the targets need? lowered[]: 0, else KOILA_NONE. */
static void reach(const koila__placer *p, const koila_value *targets, uint32_t n_targets,
                  koila_value *lowered)
{
    for (uint32_t v = 0; v < p->from->values.n; v++)
        lowered[v] = KOILA_NONE;
    for (uint32_t t = 0; t < n_targets; t++)
        lowered[targets[t]] = 0;
    for (uint32_t n = p->from->nodes.n; n-- > 0;) {
        const koila_node_info info = p->from->nodes.at[n];
        const koila_sig_info *sig = koila__sig(p->table, info.sig);
        bool any = false;
        for (uint32_t j = 0; j < sig->n_outputs; j++)
            any |= lowered[info.first_output + j] == 0;
        for (uint32_t i = 0; any && i < sig->n_inputs; i++)
            lowered[p->from->inputs.at[info.first_input + i]] = 0;
    }
}

/* What nobody asked for, in recorded order: S when an input has become so meanwhile, else R. */
static bool settle_free(koila__placer *p, koila_node id)
{
    const koila_node_info n = p->to->nodes.at[id];
    const koila_sig_info *sig = koila__sig(p->table, n.sig);
    uint32_t axis = KOILA_NONE;
    bool is_undecided = false;
    for (uint32_t j = 0; j < sig->n_outputs; j++)
        is_undecided |= p->value.at[n.first_output + j].kind == KOILA_FREE;
    if (!is_undecided)
        return true;
    koila_placement *placed = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *placed);
    koila_value *in = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *in);
    if (!placed || !in)
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        in[i] = p->to->inputs.at[n.first_input + i];
        placed[i] = p->value.at[in[i]];
        if (!koila__is_r(placed[i]))
            axis = placed[i].axis;
    }
    attempt a;
    if (axis != KOILA_NONE && attempt_rule(p, &a, sig, in, placed, (uint16_t)axis, NULL, false) &&
        slices_as_placed(&a))
        return settle(p, id, &a);
    value_stack stack = { 0 };
    return p->status == KOILA_OK && set_whole(p, id, &stack) && drain_r(p, &stack);
}

static bool walk(koila__placer *p, const koila_value *targets, uint32_t n_targets,
                 koila_value *lowered)
{
    const koila_graph *g = p->from; /* about as much as was recorded */
    if (!koila__vec_reserve(&p->mem, &p->value, g->values.n) ||
        !koila__vec_reserve(&p->mem, &p->need, g->inputs.n) ||
        !koila__vec_reserve(&p->mem, &p->node, g->nodes.n) ||
        !koila__graph_reserve(p->to, g->nodes.n, g->inputs.n, g->values.n))
        return fail(p, KOILA_NO_MEMORY);
    reach(p, targets, n_targets, lowered);
    for (uint32_t l = 0; l < p->from->lines.n; l++) { /* the same lines, under the same numbers */
        uint32_t id;
        const koila_status s = koila_graph_line(p->to, koila_graph_line_file(p->from, l),
                                                koila_graph_line_number(p->from, l), &id);
        if (s != KOILA_OK)
            return fail(p, s);
        koila_assert(id == l);
    }
    for (uint32_t v = 0; v < p->from->values.n; v++)
        if (lowered[v] == 0 && p->from->values.at[v].node == KOILA_NONE &&
            !lower_leaf(p, v, &lowered[v]))
            return false;
    for (uint32_t n = 0; n < p->from->nodes.n; n++) {
        const koila_node_info info = p->from->nodes.at[n];
        const koila_sig_info *sig = koila__sig(p->table, info.sig);
        const koila__mark before = koila__arena_mark(&p->scratch);
        bool any = false;
        for (uint32_t j = 0; j < sig->n_outputs; j++)
            any |= lowered[info.first_output + j] == 0;
        if (!any)
            continue;
        koila_value *in = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *in);
        if (!in)
            return fail(p, KOILA_NO_MEMORY);
        for (uint32_t i = 0; i < sig->n_inputs; i++)
            if ((in[i] = lowered[p->from->inputs.at[info.first_input + i]]) == KOILA_NONE)
                return fail(p, KOILA_BAD_INPUT);
        p->recorded = n;
        p->line = info.line;
        if (!place_sig(p, info.sig, in, lowered + info.first_output))
            return false;
        koila__arena_rewind(&p->scratch, before);
    }
    for (uint32_t n = 0; n < p->to->nodes.n && !p->whole; n++)
        if (!settle_free(p, n))
            return false;
    for (uint32_t t = 0; t < n_targets && p->cut; t++) /* as it was made: targets are whole */
        if (lowered[targets[t]] != KOILA_NONE && p->whole_of.at[lowered[targets[t]]] != KOILA_NONE)
            lowered[targets[t]] = p->whole_of.at[lowered[targets[t]]];
    return true;
}

static void find_sizes(const koila_graph *g, const koila_placement *value, koila__size *size)
{
    for (uint32_t v = 0; v < g->values.n; v++) {
        if (g->values.at[v].meta == KOILA_NONE)
            continue;
        const koila_meta_info *m = koila__value_meta(g, v);
        const int64_t batch = value[v].kind == KOILA_S ? g->axes.at[value[v].axis] : 0;
        if (value[v].kind != KOILA_S)
            size[v].fixed = m->n_storage_bytes;
        else if (batch > 0)
            size[v].per_row = m->n_bytes / (uint64_t)batch;
    }
}

static koila_status place(const koila_graph *recorded, const koila_value *targets,
                          uint32_t n_targets, bool whole, bool cut, const koila_allocator *mem,
                          koila__placed **out, koila_error *err)
{
    for (uint32_t t = 0; t < n_targets; t++)
        if (targets[t] >= koila_graph_n_values(recorded))
            return koila__fail(err, KOILA_BAD_ARGUMENT, t, "target %u is no value of the graph", t);
    const koila_allocator a = koila__allocator(mem);
    koila__arena keep;
    koila__arena_init(&keep, &a);
    koila__placer p = { .from = recorded,
                        .table = koila_graph_table(recorded),
                        .mem = a,
                        .keep = &keep,
                        .main_axis = KOILA_NONE,
                        .line = KOILA_NONE,
                        .whole = whole,
                        .cut = cut };
    koila__arena_init(&p.scratch, &a);
    koila__placed *r = NULL;
    p.status = koila_graph_new(p.table, &a, &p.to);
    koila_value *lowered =
        koila__arena_array(&keep, koila_graph_n_values(recorded), sizeof *lowered);
    if (!lowered)
        fail(&p, KOILA_NO_MEMORY);
    uint16_t axis;
    for (uint32_t x = 0; x < koila_graph_n_axes(recorded) && p.status == KOILA_OK; x++)
        p.status = koila_graph_axis(p.to, koila_graph_axis_size(recorded, (uint16_t)x), &axis);
    if (p.status == KOILA_OK && walk(&p, targets, n_targets, lowered)) {
        r = koila__arena_alloc(&keep, sizeof *r);
        koila__size *size = koila__arena_array(&keep, p.value.n, sizeof *size);
        if (!r || !size) {
            r = NULL;
            fail(&p, KOILA_NO_MEMORY);
        } else {
            find_sizes(p.to, p.value.at, size);
            *r = (koila__placed){ p.to,    p.value.at,  size,       p.need.at,  p.node.at,
                                  lowered, p.value.cap, p.need.cap, p.node.cap, keep };
            p.value.at = NULL;
            p.need.at = NULL;
            p.node.at = NULL; /* r's from now on */
        }
    }
    if (!r) {
        koila__vec_free(&a, &p.value);
        koila__vec_free(&a, &p.need);
        koila__vec_free(&a, &p.node);
    }
    koila__vec_free(&a, &p.zero);
    koila__vec_free(&a, &p.whole_of);
    koila__vec_free(&a, &p.op);
    koila__arena_deinit(&p.scratch);
    if (!r) {
        koila_graph_free(p.to);
        koila__arena_deinit(&keep);
        koila_assert(p.status != KOILA_OK);
        return koila__fail(err, p.status, 0, "placing node %u: %s", p.recorded,
                           koila_status_text(p.status));
    }
    koila_check(koila__placed_check(r, NULL));
    *out = r;
    return KOILA_OK;
}

koila_status koila__place(const koila_graph *recorded, const koila_value *targets,
                          uint32_t n_targets, const koila_allocator *mem, koila__placed **out,
                          koila_error *err)
{
    return place(recorded, targets, n_targets, false, false, mem, out, err);
}

koila_status koila__place_cut(const koila_graph *recorded, const koila_value *targets,
                              uint32_t n_targets, const koila_allocator *mem, koila__placed **out,
                              koila_error *err)
{
    return place(recorded, targets, n_targets, false, true, mem, out, err);
}

koila_status koila__place_whole(const koila_graph *recorded, const koila_value *targets,
                                uint32_t n_targets, const koila_allocator *mem, koila__placed **out,
                                koila_error *err)
{
    return place(recorded, targets, n_targets, true, false, mem, out, err);
}

void koila__placed_free(koila__placed *p)
{
    if (!p)
        return;
    koila__arena keep = p->arena; /* p itself lies in it */
    koila_graph_free(p->graph);
    koila__release(&keep.mem, p->value, p->cap_values * sizeof *p->value);
    koila__release(&keep.mem, p->need, p->cap_needs * sizeof *p->need);
    koila__release(&keep.mem, p->node, p->cap_nodes * sizeof *p->node);
    koila__arena_deinit(&keep);
}

/* ---- the equations of place.h */

bool koila__placed_check(const koila__placed *p, koila_error *err)
{
#define HOLDS(e, ...)                                                                              \
    do {                                                                                           \
        if (!(e))                                                                                  \
            return koila__fail(err, KOILA_BAD_INPUT, 0, __VA_ARGS__), false;                       \
    } while (0)
    const koila_graph *g = p->graph;
    const koila_table *t = koila_graph_table(g);
    if (!koila_graph_check(g, err))
        return false;
    for (uint32_t v = 0; v < koila_graph_n_values(g); v++) {
        const koila_placement q = p->value[v];
        const koila_value_info info = koila_value_get(g, v);
        HOLDS(q.kind != KOILA_FREE, "value %u: nobody decided", v);
        if (q.kind == KOILA_R)
            continue;
        HOLDS(info.meta != KOILA_NONE, "value %u: a result that does not exist is placed", v);
        HOLDS(q.axis < koila_graph_n_axes(g), "value %u: no axis %u", v, q.axis);
        if (q.kind == KOILA_P || koila__is_opaque(q))
            continue;
        const koila_meta_info *m = koila_meta_get(t, info.meta);
        HOLDS(q.dim < m->n_dims &&
                  m->size[q.dim] == koila__extent(q, koila_graph_axis_size(g, q.axis)),
              "value %u: size[%u] is not outer * batch * inner", v, q.dim);
    }
    for (uint32_t n = 0; n < koila_graph_n_nodes(g); n++) {
        const koila_node_info info = koila_node_get(g, n);
        const koila_sig_info *sig = koila_sig_get(t, info.sig);
        const koila_value *in = koila_node_inputs(g, n);
        bool loop = false, whole_result = false, gathered = false;
        for (uint32_t i = 0; i < sig->n_inputs; i++) {
            const koila_placement need = p->need[info.first_input + i];
            const koila_placement is = p->value[in[i]];
            const koila_meta_info *m = koila_meta_get(t, sig->inputs[i]);
            loop |= need.kind != KOILA_R;
            gathered |= need.kind == KOILA_R && is.kind == KOILA_S;
            if (need.kind == KOILA_R)
                continue;
            HOLDS(need.axis == p->node[n].axis, "node %u: input %u is of another axis", n, i);
            HOLDS(koila__placement_equal(need, is) || (need.kind == KOILA_S && is.kind == KOILA_R),
                  "node %u: input %u cannot become what is needed", n, i);
            if (need.kind == KOILA_S && !koila__is_opaque(need))
                HOLDS(need.dim < m->n_dims &&
                          m->size[need.dim] ==
                              koila__extent(need, koila_graph_axis_size(g, need.axis)),
                      "node %u: input %u: no such slice", n, i);
        }
        for (uint32_t j = 0; j < sig->n_outputs; j++) {
            if (sig->outputs[j] == KOILA_NONE)
                continue;
            const koila_placement is = p->value[info.first_output + j];
            loop |= is.kind != KOILA_R;
            whole_result |= is.kind == KOILA_R;
            HOLDS(is.kind == KOILA_R || is.axis == p->node[n].axis,
                  "node %u: result %u is of another axis", n, j);
        }
        HOLDS(loop == (p->node[n].in_loop != 0), "node %u: in_loop", n);
        HOLDS(!(loop && whole_result), "node %u: a whole result made in a loop", n);
        HOLDS(gathered == (p->node[n].gathered != 0), "node %u: gathered", n);
    }
    return true;
#undef HOLDS
}
