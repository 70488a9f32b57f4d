/* place.c — which values are whole, which are sliced, which are partial sums: one walk over the
 * recorded graph.
 *
 * For each node the placements of its inputs are known. Its operator's rule (rules.h) gives the
 * placement that each input must have, and those of the results. There are three attempts, from
 * cheap to always right:
 *   1. the rule as it is;
 *   2. the rule with every P input made whole first (if an operator has a P and an S input, the P
 *   must become whole: its running value has no meaning);
 *   3. *gather*: every input R, every result R, run once on whole values.
 * An operator without a rule goes to attempt 3. So a missing rule costs memory, never correctness.
 *
 * FREE. A factory has no data edge, so at first it is unknown whether its rows belong to a batch.
 * It stays FREE, like every node with a rule and only R and FREE inputs, until a use needs it as S
 * (then resolve_s() asks the rules of its producers, back to the factories) or as R (resolve_r()).
 * The use decides by position, through its own rule; an equal size alone decides nothing. A factory
 * of zeros may also become P: zeros are a partial sum of zeros, so scattering rows into zeros needs
 * no whole value. Values that stay undecided become R.
 *
 * Note [Writes to placed values]. An in-place call runs its functional twin's rule on the written
 * *view*: the base's placement is carried forward through the chain of view calls by their own
 * rules. When the twin's result is S and the base is R or FREE, each possible placement of the base
 * is carried forward, and the base gets the one that becomes exactly that S. If there is none, the
 * call is gathered.
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
 *
 * The algebra follows GSPMD (Xu et al. 2021) and PyTorch DTensor; here slices run one after another
 * on one device, where theirs run on several at once.
 */
#include "placement/placer.h"
#include "graph/table.h"

/* A rule's answer for one call, or a gather. */
typedef struct attempt {
    koila__case c;
    koila__fix fix[KOILA__MAX_FIXES];
    koila__placed_link *link;
    bool loop; /* the call runs in the loop: some need or result is not R */
} attempt;

/* Keeps the first failure; always false. */
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
    /* two blocks: three arrays of placements; four arrays of pointers, values and flags */
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
        const bool of_axis = koila__is_r(placed[i]) || placed[i].axis == axis;
        cin[i] = of_axis ? placed[i] : koila__r();
        zero[i] = cin[i].kind == KOILA_FREE && in && p->zero.at[in[i]];
        /* a value passed twice can be P for only one of the two inputs */
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
    c->may_own = p->may_own && in && !sig->n_writes;
    c->own = koila__r();
    return p->status == KOILA_OK;
}

/* Is the rule's need of input i allowed? */
static bool sound_need(const koila__case *c, uint32_t i)
{
    const koila_placement need = c->need[i];
    const koila_placement in = c->in[i];
    switch ((koila_placement_kind)need.kind) {
    case KOILA_R:
        return true;
    case KOILA_S:
        return need.axis == c->axis && koila__fits(c, need, c->in_meta[i]);
    case KOILA_P:
        return koila__placement_equal(need, in) || (c->zero[i] && need.combine == KOILA_SUM);
    default:
        return false;
    }
}

static bool is_unread(const koila__case *c, uint32_t i)
{
    return i < 32 && ((c->unread >> i) & 1) && koila__placement_equal(c->need[i], c->in[i]);
}

/* Is the rule's answer well-formed? If not, the call is gathered. Sets a->loop. */
static bool sound(attempt *a)
{
    const koila__case *c = &a->c;
    bool s_need = false;
    bool p_need = false;
    bool r_out = false;
    bool s_out = false;
    bool any_out = false;
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (c->need[i].kind != KOILA_FREE && is_unread(c, i))
            continue;
        if (!sound_need(c, i))
            return false;
        s_need |= c->need[i].kind == KOILA_S;
        p_need |= c->need[i].kind == KOILA_P;
    }
    for (uint32_t j = 0; j < c->n_out; j++) {
        const koila_placement out = c->out[j];
        if (!c->out_meta[j])
            continue;
        if (out.kind == KOILA_FREE)
            return false;
        if (out.kind == KOILA_S && (out.axis != c->axis || !koila__fits(c, out, c->out_meta[j])))
            return false;
        r_out |= out.kind == KOILA_R;
        s_out |= out.kind == KOILA_S;
        any_out |= out.kind != KOILA_R;
    }
    a->loop = s_need || p_need || any_out;
    const bool p_meets_rows = p_need && (s_out || (s_need && !c->accumulates));
    return !p_meets_rows && !(a->loop && r_out);
}

/* *out is the placement of the chain's last view when its base is placed `base`; a base that is R
 * or FREE stays so. Fills link[w->n_links] unless it is NULL. */
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

/* Outer counts tried for a dimension: 1 to MAX_OUTER, and the full size. */
enum { MAX_OUTER = 64 };

typedef bool (*try_fn)(void *user, koila_placement s);

static bool try_factors(koila_placement s, int64_t outer, int64_t inner, try_fn try, void *user)
{
    s.outer = outer;
    s.inner = inner;
    return try(user, s);
}

/* Calls try(S) for the placements a value of meta m can have over `batch` rows, the likeliest
 * first; stops at the first true. `like`: its factors are tried first in each dimension. */
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
            k % like.outer == 0 && k / like.outer == like.inner)
            if (try_factors(s, like.outer, like.inner, try, user))
                return true;
        for (int64_t outer = 1; outer <= k && outer <= MAX_OUTER; outer++)
            if (k % outer == 0 && try_factors(s, outer, k / outer, try, user))
                return true;
        if (k > MAX_OUTER && try_factors(s, k, 1, try, user))
            return true;
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

/* ---- writes: the functional twin's rule sees the written views; Note [Writes to placed values] */

/* The case's arrays, which rules may only read. */
static koila_placement *inputs_of(koila__case *c) { return (koila_placement *)c->in; }
static const koila_meta_info **in_metas_of(koila__case *c)
{
    return (const koila_meta_info **)c->in_meta;
}
static const koila_meta_info **out_metas_of(koila__case *c)
{
    return (const koila_meta_info **)c->out_meta;
}
static bool *zeros_of(koila__case *c) { return (bool *)c->zero; }

static const koila_meta_info *written_meta(const koila__placer *p, const koila_sig_info *sig,
                                           const koila_write *w)
{
    if (!w->n_links)
        return koila__meta(p->table, sig->inputs[w->input]);
    const koila_link last = w->links[w->n_links - 1];
    return koila__meta(p->table, koila__sig(p->table, last.sig)->outputs[last.output]);
}

/* Replaces the base of write w in the case by the written view. False: it cannot be placed. */
static bool show_view(koila__placer *p, koila__case *c, uint32_t w)
{
    const koila_write *wr = &c->sig->writes[w];
    koila_placement *in = &inputs_of(c)[wr->input];
    for (uint32_t v = 0; v < w; v++)
        if (c->sig->writes[v].input == wr->input)
            return false;
    if (wr->overwrites) { /* the old contents are not read: any placement will do */
        in->kind = KOILA_FREE;
        zeros_of(c)[wr->input] = false;
        c->need[wr->input] = koila__r();
    } else {
        if (!forward(p, wr, *in, c->axis, NULL, in))
            return false;
        if (!koila__is_r(*in))
            c->need[wr->input] = *in;
    }
    in_metas_of(c)[wr->input] = written_meta(p, c->sig, wr);
    out_metas_of(c)[c->sig->n_fresh + w] = c->in_meta[wr->input];
    return true;
}

/* Puts the base back into the case. */
static void show_base(koila__placer *p, koila__case *c, uint32_t w, koila_placement base)
{
    const uint32_t i = c->sig->writes[w].input;
    inputs_of(c)[i] = base;
    in_metas_of(c)[i] = koila__meta(p->table, c->sig->inputs[i]);
    out_metas_of(c)[c->sig->n_fresh + w] = c->in_meta[i];
    zeros_of(c)[i] = koila__is_r(base) && c->in_value && p->zero.at[c->in_value[i]];
}

/* Sets *view to the wanted placement of the written view; false: impossible. On entry c->want is of
 * the base. */
static bool want_of_view(koila__placer *p, koila__case *c, const koila_placement *base,
                         koila_placement *view)
{
    const koila_sig_info *sig = c->sig;
    const koila_placement *want = c->want;
    c->want = NULL;
    if (want && sig->n_fresh == 0) {
        c->want = view;
        return forward(p, &sig->writes[0], *want, c->axis, NULL, view);
    }
    /* a number written over rows: their placement stays */
    for (uint32_t w = 0; w < sig->n_writes; w++)
        if (sig->writes[w].overwrites && koila__is_s(base[w]) && !koila__is_opaque(base[w])) {
            *view = base[w];
            c->want = view;
        }
    return true;
}

/* Converts need and result of the view of write w to those of its base, which is placed `base`.
 * `want`: the wanted placement of the base, or NULL. */
static bool base_of_view(koila__placer *p, attempt *a, uint32_t w, koila_placement base,
                         const koila_placement *want)
{
    koila__case *c = &a->c;
    const koila_write *wr = &c->sig->writes[w];
    koila_placement *need = &c->need[wr->input];
    koila_placement *out = &c->out[c->sig->n_fresh + w];
    const koila_placement view = *out;
    if (wr->overwrites) { /* the result is placed by the rule; the base costs nothing */
        if (!koila__is_r(base))
            *need = base;
        else
            *need = view.kind == KOILA_S ? view : koila__r();
        return true;
    }
    if (a->loop && !koila__placement_equal(*need, view))
        return false;
    if (!a->loop) {
        *need = koila__r();
    } else if (!koila__is_r(base)) {
        *need = base; /* sound(): the view is needed as it is placed */
    } else if (view.kind == KOILA_P) {
        *need = view; /* zeros: P through any view */
    } else {
        const koila_meta_info *m = koila__meta(p->table, c->sig->inputs[wr->input]);
        const bool is_wanted = want && w == 0 && c->sig->n_fresh == 0;
        base_search s = { p, wr, c->axis, view, view };
        if (!each_placement(m, c->batch, c->axis, is_wanted ? *want : view, base_maps_to_view, &s))
            return false;
        *need = s.base;
    }
    *out = *need;
    return true;
}

/* Writes the chains of all writes, adapted to a slice, to a->link. */
static bool place_links(koila__placer *p, attempt *a)
{
    const koila_sig_info *sig = a->c.sig;
    uint32_t n_links = 0;
    for (uint32_t w = 0; w < sig->n_writes; w++)
        n_links += sig->writes[w].n_links;
    if (!a->loop || !n_links)
        return true;
    a->link = koila__arena_array(p->keep, n_links, sizeof *a->link);
    if (!a->link)
        return fail(p, KOILA_NO_MEMORY);
    koila__placed_link *link = a->link;
    for (uint32_t w = 0; w < sig->n_writes; w++) {
        koila_placement image;
        if (!forward(p, &sig->writes[w], a->c.out[sig->n_fresh + w], a->c.axis, link, &image))
            return false;
        link += sig->writes[w].n_links;
    }
    return true;
}

/* On return the case shows the bases again. */
static bool attempt_writes(koila__placer *p, attempt *a, koila__rule rule)
{
    koila__case *c = &a->c;
    const koila_sig_info *sig = c->sig;
    const koila_placement *want = c->want;
    koila_placement want_view;
    koila_placement *base = koila__arena_array(&p->scratch, sig->n_writes, sizeof *base);
    if (!base)
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t w = 0; w < sig->n_writes; w++) {
        base[w] = c->in[sig->writes[w].input];
        if (!show_view(p, c, w))
            return false;
    }
    if (!want_of_view(p, c, base, &want_view) || !rule(c) || !sound(a))
        return false;
    for (uint32_t w = 0; w < sig->n_writes; w++)
        if (!base_of_view(p, a, w, base[w], want))
            return false;
    for (uint32_t w = 0; w < sig->n_writes; w++)
        show_base(p, c, w, base[w]);
    return place_links(p, a);
}

/* Does every sliced need agree with the input's placement? (A barrier cannot be put in front of an
 * existing node.) */
static bool slices_as_placed(const attempt *a)
{
    for (uint32_t i = 0; i < a->c.n_in; i++)
        if (a->c.need[i].kind == KOILA_S && !koila__is_r(a->c.in[i]) &&
            !koila__placement_equal_at(&a->c.need[i], &a->c.in[i]))
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

static bool is_rewritten(const attempt *a)
{
    for (uint32_t j = 0; j < a->c.n_out; j++)
        if (a->c.replaced[j] != KOILA_NONE)
            return true;
    return false;
}

/* Is input i an empty partial sum: a buffer that this device does not use? It is the same in every
 * slice, so the rule sees it whole, and the call does not end the loop that made it. */
static bool is_empty_p(const koila__case *c, const koila_placement *placed, uint32_t i)
{
    return i < 32 && koila__is_sum(placed[i]) && placed[i].axis == c->axis &&
           c->in_meta[i]->n_elements == 0;
}

static void show_empties_whole(koila__case *c, const koila_placement *placed)
{
    for (uint32_t i = 0; i < c->n_in; i++)
        if (is_empty_p(c, placed, i)) {
            inputs_of(c)[i] = koila__r();
            c->need[i] = koila__r();
        }
}

/* The empties as they are placed, or whole. */
static void need_empties(koila__case *c, const koila_placement *placed, bool as_placed)
{
    for (uint32_t i = 0; i < c->n_in; i++)
        if (is_empty_p(c, placed, i)) {
            inputs_of(c)[i] = placed[i];
            c->need[i] = as_placed ? placed[i] : koila__r();
            if (as_placed)
                c->unread |= 1u << i;
            else
                c->unread &= ~(1u << i);
        }
}

/* Attempt 1 of the head: case_init and the operator's rule. False: gather, or p->status is set. */
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
        /* Note [Rewrites] of a write: if the base itself is read and written, its next value is the
         * result of the rewritten twin */
        if (p->status != KOILA_OK || !may_emit || sig->n_outputs != 1 || w->n_links || w->input ||
            w->overwrites || !case_init(p, a, sig, in, placed, axis))
            return false;
        a->c.want = want;
        a->c.may_emit = true;
        return rule(&a->c) && p->status == KOILA_OK && a->c.replaced[0] != KOILA_NONE;
    }
    a->c.may_emit = may_emit;
    show_empties_whole(&a->c, placed);
    if (!rule(&a->c) || p->status != KOILA_OK)
        return false;
    if (is_rewritten(a)) /* its calls have been checked */
        return true;
    need_empties(&a->c, placed, true);
    /* An unsound answer breaks no invariant: a graph read from text may hold calls with
     * contradictory shapes. */
    if (!sound(a))
        return false;
    if (!a->loop)
        need_empties(&a->c, placed, false);
    return true;
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

/* Does this call of one input keep whole numbers, and their row-major order? */
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

/* Which dimension of v holds the numbers of the range(n) from which it was made? Nothing is
 * reshaped after a broadcast, since the sizes no longer allow it. So it is the dimension, counted
 * from the right, that holds them just before the broadcasts, where exactly one dimension is not 1.
 */
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
    c->placer->looked_up = true;
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

static bool has_taking(const koila__placer *p, const koila_meta_info *m, uint32_t d)
{
    for (uint32_t i = 0; i < p->n_takings; i++) {
        const koila__taking *t = &p->taking[i];
        if (t->dim == d && t->n_dims == m->n_dims &&
            !memcmp(t->size, m->size, m->n_dims * sizeof *t->size))
            return true;
    }
    return false;
}

bool koila__was_taken(const koila__case *c, const koila_meta_info *m, uint32_t d)
{
    return c->placer->n_takings == KOILA__TAKINGS || has_taking(c->placer, m, d);
}

void koila__take_note(const koila__case *c, const koila_meta_info *m, uint32_t d)
{
    koila__placer *p = c->placer;
    if (koila__was_taken(c, m, d))
        return;
    koila__taking *t = &p->taking[p->n_takings++];
    t->n_dims = m->n_dims;
    t->dim = d;
    memcpy(t->size, m->size, m->n_dims * sizeof *t->size);
}

bool koila__is_steps(const koila__case *c, uint32_t i, int64_t *step)
{
    const koila__placer *p = c->placer;
    c->placer->looked_up = true;
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
    node->begin = node->end = 0;
    node->joins = node->sums = false;
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        p->value.at[n.first_output + j] = koila__r();
        p->absent.at[n.first_output + j] = false;
    }
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_value x = p->to->inputs.at[n.first_input + i];
        p->need.at[n.first_input + i] = koila__r();
        node->gathered |= koila__is_of_rows(p->value.at[x]);
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

static bool begin_to_settle(koila__placer *p, koila_node id, const attempt *a);

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

/* Does the call stack, or join, its inputs, so that those that are placed alike and of one form
 * differ by their place in the result alone? */
static bool treats_alike(koila__placer *p, const koila_sig_info *sig)
{
    const koila__rule rule = op_rule(p, sig->op)->rule;
    return rule == koila__rule_stack || rule == koila__rule_cat;
}

/* Was an input before i tried that gives what input i would give? */
static bool was_one_like_it(koila__placer *p, const koila_sig_info *sig,
                            const koila_placement *placed, uint32_t i)
{
    return i > 0 && placed[i - 1].kind == KOILA_FREE && sig->inputs[i - 1] == sig->inputs[i] &&
           treats_alike(p, sig);
}

/* Does some placement of input t->i give the wanted result? */
static bool some_input_gives_want(input_search *t)
{
    return each_placement(koila__meta(t->p->table, t->sig->inputs[t->i]),
                          koila_graph_axis_size(t->p->from, t->axis), t->axis, t->want,
                          input_gives_want, t);
}

/* Begins to settle FREE v as `want`; false leaves it FREE. */
static bool resolve_s(koila__placer *p, koila_value v, koila_placement want)
{
    const koila_node id = p->to->values.at[v].node;
    const koila_node_info n = p->to->nodes.at[id];
    const koila_sig_info *sig = koila__sig(p->table, n.sig);
    const uint32_t output = v - n.first_output;
    const koila__mark before = koila__arena_mark(&p->scratch);
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
        if (was_one_like_it(p, sig, placed, i))
            koila_check(!some_input_gives_want(&t));
        else
            found = some_input_gives_want(&t);
    }
    found = found && p->status == KOILA_OK && begin_to_settle(p, id, &a);
    koila__arena_rewind(&p->scratch, before);
    return found;
}

/* Zeros are a partial sum of zeros: the whole FREE tree above v becomes P, and each slice makes its
 * own zeros. */
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
            ok = link != NULL;
            if (!ok)
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

/* Places FREE value x as a use needs it, or begins to; if it cannot be S it becomes R, and is
 * sliced. */
static bool resolve(koila__placer *p, koila_value x, koila_placement need)
{
    if (need.kind == KOILA_P)
        return resolve_p(p, x, need);
    if (need.kind == KOILA_S && resolve_s(p, x, need))
        return true;
    return p->status == KOILA_OK && resolve_r(p, x);
}

/* What Note [Pieces] says of a node. */
static void settle_pieces(koila__placer *p, koila_node id, const koila__case *c)
{
    const koila_node_info n = p->to->nodes.at[id];
    koila__placed_node *node = &p->node.at[id];
    const bool is_owned = koila__is_piece(c->own);
    bool is_absent = c->sums;
    node->begin = is_owned ? c->own.outer : 0;
    node->end = is_owned ? c->own.inner : 0;
    node->joins = c->joins;
    node->sums = c->sums;
    for (uint32_t i = 0; i < c->n_in && is_absent; i++)
        is_absent = p->absent.at[p->to->inputs.at[n.first_input + i]];
    for (uint32_t j = 0; j < c->n_out; j++)
        p->absent.at[n.first_output + j] = c->out_meta[j] && (is_owned || is_absent);
    p->any_piece |= is_owned;
}

/* Places node id by the attempt, on the stack of those whose FREE inputs are to be placed. */
static bool begin_to_settle(koila__placer *p, koila_node id, const attempt *a)
{
    const koila_node_info n = p->to->nodes.at[id];
    const koila__case *c = &a->c;
    koila__placed_node *node = &p->node.at[id];
    for (uint32_t j = 0; j < c->n_out; j++)
        p->value.at[n.first_output + j] = c->out_meta[j] ? c->out[j] : koila__r();
    for (uint32_t i = 0; i < c->n_in; i++)
        p->need.at[n.first_input + i] = c->need[i];
    settle_pieces(p, id, c);
    memcpy(node->fix, a->fix, sizeof node->fix);
    node->link = a->link;
    node->axis = a->loop ? c->axis : 0;
    node->in_loop = a->loop;
    return koila__vec_push(&p->mem, &p->settling, ((koila__settling){ id, 0 })) ||
           fail(p, KOILA_NO_MEMORY);
}

static bool any_free_input(const koila__placer *p, koila_node id)
{
    const koila_node_info n = p->to->nodes.at[id];
    for (uint32_t i = 0; i < koila__sig(p->table, n.sig)->n_inputs; i++)
        if (p->value.at[p->to->inputs.at[n.first_input + i]].kind == KOILA_FREE)
            return true;
    return false;
}

/* All inputs of node id are placed. Two with a common FREE ancestor may need different placements
 * of it: the first wins, and the node is gathered if the second cannot use that. */
static bool end_to_settle(koila__placer *p, koila_node id)
{
    const koila_node_info n = p->to->nodes.at[id];
    const uint32_t n_inputs = koila__sig(p->table, n.sig)->n_inputs;
    bool suits = true;
    bool gathered = false;
    for (uint32_t i = 0; i < n_inputs; i++) {
        const koila_placement *is = &p->value.at[p->to->inputs.at[n.first_input + i]];
        const koila_placement *need = &p->need.at[n.first_input + i];
        koila_assert(is->kind != KOILA_FREE);
        suits &= need->kind == KOILA_R || koila__placement_equal_at(is, need) ||
                 (need->kind == KOILA_S && is->kind == KOILA_R);
        gathered |= need->kind == KOILA_R && koila__is_of_rows(*is);
        if (koila__is_opaque(*is) && !koila__placement_equal_at(is, need))
            return fail(p, KOILA_UNSUPPORTED);
    }
    p->node.at[id].gathered = gathered;
    if (suits)
        return true;
    value_stack stack = { 0 };
    return set_whole(p, id, &stack) && drain_r(p, &stack);
}

/* Places the nodes of the stack above `bottom`, each after its inputs. */
static bool settle_above(koila__placer *p, size_t bottom)
{
    while (p->settling.n > bottom) {
        koila__settling *top = &p->settling.at[p->settling.n - 1];
        const koila_node_info n = p->to->nodes.at[top->node];
        if (top->next == koila__sig(p->table, n.sig)->n_inputs) {
            p->settling.n--;
            if (!end_to_settle(p, top->node))
                return false;
            continue;
        }
        const uint32_t i = n.first_input + top->next++;
        const koila_value x = p->to->inputs.at[i];
        if (p->value.at[x].kind == KOILA_FREE && !resolve(p, x, p->need.at[i]))
            return false;
    }
    return true;
}

/* Places the node by the attempt, and its FREE inputs as it needs them. */
static bool settle(koila__placer *p, koila_node id, const attempt *a)
{
    const size_t bottom = p->settling.n;
    if (!begin_to_settle(p, id, a))
        return false;
    if (any_free_input(p, id))
        return settle_above(p, bottom);
    p->settling.n = (uint32_t)bottom;
    return end_to_settle(p, id);
}

void koila__placer_slice(koila__placer *p, koila_value v, koila_placement want)
{
    const size_t bottom = p->settling.n;
    if (p->value.at[v].kind == KOILA_FREE && resolve_s(p, v, want))
        settle_above(p, bottom);
}

/* Can the placement of this call, whose inputs are all R or FREE, be decided later? */
static bool is_free(koila__placer *p, const koila_sig_info *sig, const koila_placement *placed)
{
    const koila__rule rule = op_rule(p, sig->op)->rule;
    if (!rule)
        return false;
    if (facts_of(p, sig) & KOILA_FACT_FACTORY)
        return sig->n_inputs == 0;
    if (facts_of(p, sig) & KOILA_FACT_BROADCASTS) { /* a factory: every copy is the same */
        const koila_meta_info *in = koila__meta(p->table, sig->inputs[0]);
        const koila_meta_info *out = koila__meta(p->table, sig->outputs[0]);
        if (out->n_elements > in->n_elements)
            return true;
    }
    if (facts_of(p, sig) & KOILA_FACT_SPREADS)
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
    const uint32_t facts = facts_of(p, sig);
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

/* ---- one call */

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
static bool is_late_sum(const koila__placer *p, const attempt *a, const koila_value *in)
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
static bool settle_new(koila__placer *p, koila_node node, const attempt *a, bool is_free_call)
{
    if (a)
        return settle(p, node, a);
    if (is_free_call || p->whole)
        return true; /* whole: everything is R, as it is now */
    value_stack stack = { 0 };
    return set_whole(p, node, &stack) && drain_r(p, &stack);
}

/* Appends the call to the lowered graph, placed by `a`; without `a` it is FREE if possible, else
 * whole. */
static bool append(koila__placer *p, koila_sig id, const koila_sig_info *sig, const koila_value *in,
                   const attempt *a, bool is_free_call, koila_value *results)
{
    koila_value first;
    const bool zero = is_free_call && is_zero(p, sig, in);
    const koila_status s = koila_graph_node(p->to, id, in, p->line, &first);
    if (s != KOILA_OK)
        return fail(p, s);
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
        return fail(p, KOILA_NO_MEMORY);
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
    attempt a;
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
static bool is_answered(const koila__placer *p, attempt *a, koila_sig id, const koila_value *in,
                        const koila_placement *placed, uint16_t axis)
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
static bool keep_answer(koila__placer *p, const attempt *a, koila_sig id,
                        const koila_placement *placed)
{
    koila__arena *room = &p->answers_room;
    koila__answer *x = koila__arena_room(room, sizeof *x);
    const koila__case *from = &a->c;
    if (!x)
        return fail(p, KOILA_NO_MEMORY);
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
        return fail(p, KOILA_NO_MEMORY);
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

/* attempt_rule(), where the rule has not answered the same call before. */
static bool attempt_answer(koila__placer *p, attempt *a, koila_sig id, const koila_value *in,
                           const koila_placement *placed, uint16_t axis)
{
    const koila_sig_info *sig = koila__sig(p->table, id);
    const bool may = may_answer(p, sig, placed);
    const uint32_t n_before = p->to->nodes.n;
    if (may && is_answered(p, a, id, in, placed, axis))
        return true;
    p->looked_up = false;
    if (!attempt_rule(p, a, sig, in, placed, axis, NULL, true))
        return false;
    if (!may || p->looked_up || is_rewritten(a) || p->to->nodes.n != n_before)
        return true;
    return keep_answer(p, a, id, placed);
}

/* Attempts 1 and 2 of the head. */
static bool attempt_sliced(koila__placer *p, attempt *a, koila_sig id, const koila_value *in,
                           const koila_placement *placed, uint16_t axis)
{
    const koila_sig_info *sig = koila__sig(p->table, id);
    bool any_p = false;
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        any_p |= koila__is_p(placed[i]);
    if (attempt_answer(p, a, id, in, placed, axis) &&
        (is_rewritten(a) || !any_p || !is_late_sum(p, a, in)))
        return true;
    if (p->status != KOILA_OK || !any_p)
        return false;
    koila_placement *whole = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *whole);
    if (!whole)
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        whole[i] = koila__is_p(placed[i]) ? koila__r() : placed[i];
    return attempt_rule(p, a, sig, in, whole, axis, NULL, true) && p->status == KOILA_OK;
}

/* Attempt 3: everything R. */
static bool attempt_gather(koila__placer *p, attempt *a, const koila_sig_info *sig,
                           const koila_value *in, const koila_placement *placed, uint16_t axis)
{
    if (!case_init(p, a, sig, in, placed, axis))
        return false;
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        a->c.need[i] = koila__r();
    for (uint32_t j = 0; j < sig->n_outputs; j++)
        a->c.out[j] = koila__r();
    return true;
}

/* Finds the input values of the call. A value that is sliced otherwise than needed is replaced by
 * its whole form; a cut value that is needed whole, by the value from which it was cut. */
static bool take_inputs(koila__placer *p, const attempt *a, const koila_value *in,
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
static bool attempt_pieces(koila__placer *p, attempt *a, const koila_sig_info *sig,
                           const koila_value *in, const koila_placement *placed, uint16_t axis)
{
    if (!case_init(p, a, sig, in, placed, axis) || !koila__rule_pieces(&a->c))
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
static bool leaves_out_absent(const koila__placer *p, const attempt *a, const koila_value *in)
{
    bool any = false;
    for (uint32_t i = 0; i < a->c.n_in; i++) {
        any |= p->absent.at[in[i]];
        if (a->c.need[i].kind == KOILA_R)
            return false;
    }
    return any && !is_rewritten(a) && koila__is_plain_sum(&a->c);
}

/* Places a call whose inputs are of this axis, none of them a piece. */
static bool place_on_axis(koila__placer *p, koila_sig id, const koila_value *in,
                          const koila_placement *placed, uint16_t axis, koila_value *results)
{
    const koila_sig_info *sig = koila__sig(p->table, id);
    koila_value *from = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *from);
    attempt a;
    if (!from)
        return fail(p, KOILA_NO_MEMORY);
    p->may_own = p->pieces;
    const bool is_sliced = attempt_sliced(p, &a, id, in, placed, axis);
    p->may_own = false;
    if (p->status != KOILA_OK)
        return false;
    if (is_sliced && p->any_piece)
        a.c.sums |= leaves_out_absent(p, &a, in);
    if (is_sliced && is_rewritten(&a)) {
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
    const koila__rule rule = op_rule(p, sig->op)->rule;
    return sig->n_outputs == 1 && sig->outputs[0] != KOILA_NONE && !sig->n_writes &&
           (rule == koila__rule_pointwise || rule == koila__rule_expand ||
            rule == koila__rule_where || rule == koila__rule_additive || rule == koila__rule_mul);
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
    if (!p->seeds || op_rule(p, sig->op)->rule != koila__rule_stack)
        return false;
    const koila_meta_info *out = koila__meta(p->table, sig->outputs[0]);
    return first_of_tokens(p, out) < out->n_dims;
}

/* Does the call give its input in another shape, or less of it? */
static bool passes_on(const koila__placer *p, const koila_sig_info *sig)
{
    return sig->n_inputs == 1 && sig->n_outputs == 1 && sig->outputs[0] != KOILA_NONE &&
           (facts_of(p, sig) & KOILA_FACT_RESHAPES ||
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
    attempt a;
    if (!placed || !in)
        return fail(p, KOILA_NO_MEMORY);
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
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        placed[i] = p->value.at[in[i]];
    return place_on_axis(p, id, in, placed, axis, results);
}

/* axis: KOILA_NONE: that of its inputs. */
static bool place_sig(koila__placer *p, koila_sig id, const koila_value *in, uint32_t axis,
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
    return s == KOILA_OK ? place_sig(p, id, in, axis, results) : fail(p, s);
}

/* ---- the walk */

static bool lower_leaf(koila__placer *p, koila_value v, koila_value *out)
{
    const koila_value_info info = p->from->values.at[v];
    const koila_status s = koila__graph_copy_leaf(p->to, p->from, v, out);
    if (s != KOILA_OK)
        return fail(p, s);
    koila_placement at = koila__r();
    if (info.leaf_kind == KOILA_LEAF_BATCH && !p->whole) {
        const int64_t rows = p->from->axes.at[info.axis];
        const int64_t size = koila__meta(p->table, info.meta)->size[info.dim];
        at = (koila_placement){ .kind = KOILA_S,
                                .dim = info.dim,
                                .axis = info.axis,
                                .outer = 1,
                                .inner = rows > 0 ? size / rows : 1 };
    }
    if (!koila__vec_push(&p->mem, &p->value, at) || !koila__vec_push(&p->mem, &p->zero, 0) ||
        !koila__vec_push(&p->mem, &p->absent, 0) ||
        !koila__vec_push(&p->mem, &p->whole_of, KOILA_NONE) ||
        !koila__vec_push(&p->mem, &p->level, 0))
        return fail(p, KOILA_NO_MEMORY);
    return true;
}

/* lowered[v] becomes 0 where the targets need v, else KOILA_NONE. */
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

/* Settles a node that is still FREE: S if an input has become S meanwhile, else R. */
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

/* Whose pieces use a value: nobody's yet, one piece's, or also something else. */
typedef struct users {
    enum { NOBODY, ONE_PIECE, OTHERS } who;
    koila_placement piece;
} users;

static void add_user(users *u, const koila__placed_node *node)
{
    const koila_placement piece = { .kind = KOILA_P,
                                    .combine = KOILA_PIECE,
                                    .axis = node->axis,
                                    .outer = node->begin,
                                    .inner = node->end };
    if (!node->end || (u->who == ONE_PIECE && !koila__placement_equal(u->piece, piece)))
        u->who = OTHERS;
    else if (u->who == NOBODY)
        *u = (users){ ONE_PIECE, piece };
}

/* Does node n run once, on whole values that no loop makes, for one piece alone? */
static bool may_sink(const koila__placer *p, koila_node n, const users *of, koila_placement *piece)
{
    const koila_node_info info = p->to->nodes.at[n];
    const koila_sig_info *sig = koila__sig(p->table, info.sig);
    bool any = false;
    if (p->node.at[n].in_loop || (p->table->ops.at[sig->op].flags & KOILA_OP_OPAQUE))
        return false;
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_placement is = p->value.at[p->to->inputs.at[info.first_input + i]];
        if (is.kind != KOILA_R)
            return false;
    }
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        const users *u = &of[info.first_output + j];
        if (sig->outputs[j] == KOILA_NONE || u->who == NOBODY)
            continue;
        if (u->who == OTHERS || (any && !koila__placement_equal(u->piece, *piece)))
            return false;
        *piece = u->piece;
        any = true;
    }
    return any;
}

/* Whole values that one piece alone uses (its mask of dropout, its share of a mean's gradient) are
 * made where the piece is: all of them at once would be as large as the batch. */
static bool sink(koila__placer *p, const koila_value *targets, uint32_t n_targets,
                 const koila_value *lowered)
{
    users *of = koila__arena_array(&p->scratch, p->to->values.n, sizeof *of);
    if (!of)
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t t = 0; t < n_targets; t++)
        if (lowered[targets[t]] != KOILA_NONE)
            of[lowered[targets[t]]].who = OTHERS;
    for (koila_node n = p->to->nodes.n; n-- > 0;) {
        const koila_node_info info = p->to->nodes.at[n];
        const koila_sig_info *sig = koila__sig(p->table, info.sig);
        koila__placed_node *node = &p->node.at[n];
        koila_placement piece;
        if (may_sink(p, n, of, &piece)) {
            node->axis = piece.axis;
            node->in_loop = true;
            node->begin = piece.outer;
            node->end = piece.inner;
            for (uint32_t j = 0; j < sig->n_outputs; j++)
                if (sig->outputs[j] != KOILA_NONE) {
                    p->value.at[info.first_output + j] = piece;
                    p->absent.at[info.first_output + j] = true;
                }
        }
        for (uint32_t i = 0; i < sig->n_inputs; i++)
            add_user(&of[p->to->inputs.at[info.first_input + i]], node);
    }
    for (koila_node n = 0; n < p->to->nodes.n; n++) { /* their users need them where they are */
        const koila_node_info info = p->to->nodes.at[n];
        const uint32_t n_inputs = koila__sig(p->table, info.sig)->n_inputs;
        for (uint32_t i = 0; i < n_inputs && p->node.at[n].end; i++) {
            const koila_value v = p->to->inputs.at[info.first_input + i];
            if (of[v].who == ONE_PIECE && koila__placement_equal(p->value.at[v], of[v].piece))
                p->need.at[info.first_input + i] = of[v].piece;
        }
    }
    return true;
}

/* Lowers recorded node n if the targets need one of its results. */
static bool lower_node(koila__placer *p, koila_node n, koila_value *lowered)
{
    const koila_node_info info = p->from->nodes.at[n];
    const koila_sig_info *sig = koila__sig(p->table, info.sig);
    bool is_needed = false;
    for (uint32_t j = 0; j < sig->n_outputs; j++)
        is_needed |= lowered[info.first_output + j] == 0;
    if (!is_needed)
        return true;
    koila_value *in = koila__arena_room(&p->scratch, sig->n_inputs * sizeof *in);
    if (!in)
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        in[i] = lowered[p->from->inputs.at[info.first_input + i]];
        if (in[i] == KOILA_NONE)
            return fail(p, KOILA_BAD_INPUT);
    }
    p->recorded = n;
    p->line = info.line;
    return place_sig(p, info.sig, in, KOILA_NONE, lowered + info.first_output);
}

/* Targets are whole: those that were cut again are the originals. */
static void take_originals(const koila__placer *p, const koila_value *targets, uint32_t n_targets,
                           koila_value *lowered)
{
    for (uint32_t t = 0; t < n_targets; t++) {
        koila_value *v = &lowered[targets[t]];
        if (*v != KOILA_NONE && p->whole_of.at[*v] != KOILA_NONE)
            *v = p->whole_of.at[*v];
    }
}

/* The lowered graph is about as large as the recorded one; where values are cut again, larger. */
static bool reserve(koila__placer *p)
{
    const uint32_t share = p->cut ? 4 : 16;
    const uint32_t n_values = p->from->values.n + p->from->values.n / share;
    const uint32_t n_inputs = p->from->inputs.n + p->from->inputs.n / share;
    const uint32_t n_nodes = p->from->nodes.n + p->from->nodes.n / share;
    return koila__vec_reserve(&p->mem, &p->value, n_values) &&
           koila__vec_reserve(&p->mem, &p->zero, n_values) &&
           koila__vec_reserve(&p->mem, &p->absent, n_values) &&
           koila__vec_reserve(&p->mem, &p->whole_of, n_values) &&
           koila__vec_reserve(&p->mem, &p->level, n_values) &&
           koila__vec_reserve(&p->mem, &p->need, n_inputs) &&
           koila__vec_reserve(&p->mem, &p->node, n_nodes) &&
           koila__graph_reserve(p->to, n_nodes, n_inputs, n_values);
}

static bool walk(koila__placer *p, const koila_value *targets, uint32_t n_targets,
                 koila_value *lowered)
{
    const koila_graph *g = p->from;
    if (!reserve(p))
        return fail(p, KOILA_NO_MEMORY);
    reach(p, targets, n_targets, lowered);
    const koila_status s = koila__graph_copy_lines(p->to, g);
    if (s != KOILA_OK)
        return fail(p, s);
    for (uint32_t v = 0; v < g->values.n; v++)
        if (lowered[v] == 0 && g->values.at[v].node == KOILA_NONE && !lower_leaf(p, v, &lowered[v]))
            return false;
    for (uint32_t n = 0; n < g->nodes.n; n++) {
        const koila__mark before = koila__arena_mark(&p->scratch);
        if (!lower_node(p, n, lowered))
            return false;
        koila__arena_rewind(&p->scratch, before);
    }
    for (uint32_t n = 0; n < p->to->nodes.n && !p->whole; n++)
        if (!settle_free(p, n))
            return false;
    if (p->any_piece && !sink(p, targets, n_targets, lowered))
        return false;
    if (p->cut)
        take_originals(p, targets, n_targets, lowered);
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

/* Copies the axes of the recorded graph under the same numbers. */
static bool lower_axes(koila__placer *p)
{
    for (uint32_t x = 0; x < koila_graph_n_axes(p->from); x++) {
        uint16_t axis;
        const koila_status s =
            koila_graph_axis(p->to, koila_graph_axis_size(p->from, (uint16_t)x), &axis);
        if (s != KOILA_OK)
            return fail(p, s);
        koila_assert(axis == x);
    }
    return true;
}

/* Where slices may end: cut[c] is the last place at or before c that lies within no piece. */
static bool find_cuts(koila__placer *p, koila__placed *r)
{
    r->absent = koila__arena_copy(p->keep, p->absent.at, p->absent.n);
    r->cut = koila__arena_array(p->keep, p->to->axes.n, sizeof *r->cut);
    if (!r->absent || !r->cut)
        return fail(p, KOILA_NO_MEMORY);
    for (koila_node n = 0; n < p->node.n; n++) {
        const koila__placed_node *node = &p->node.at[n];
        int64_t **cut = &r->cut[node->axis];
        if (!node->end)
            continue;
        if (!*cut)
            *cut =
                koila__arena_array(p->keep, (size_t)p->to->axes.at[node->axis] + 1, sizeof **cut);
        if (!*cut)
            return fail(p, KOILA_NO_MEMORY);
        koila_assert(node->begin >= 0 && node->end <= p->to->axes.at[node->axis]);
        (*cut)[node->begin + 1]++; /* how many more pieces lie around here than before */
        (*cut)[node->end]--;
    }
    for (uint32_t a = 0; a < p->to->axes.n; a++) {
        int64_t n_open = 0;
        int64_t last = 0;
        for (int64_t c = 0; r->cut[a] && c <= p->to->axes.at[a]; c++) {
            n_open += r->cut[a][c];
            last = n_open ? last : c;
            r->cut[a][c] = last;
        }
    }
    return true;
}

/* The result owns the lowered graph, its arrays and the arena from now on. NULL: no memory. */
static koila__placed *hand_over(koila__placer *p, koila_value *lowered)
{
    koila__placed *r = koila__arena_alloc(p->keep, sizeof *r);
    koila__size *size = koila__arena_array(p->keep, p->value.n, sizeof *size);
    if (!r || !size) {
        fail(p, KOILA_NO_MEMORY);
        return NULL;
    }
    find_sizes(p->to, p->value.at, size);
    *r = (koila__placed){ .graph = p->to,
                          .value = p->value.at,
                          .size = size,
                          .need = p->need.at,
                          .node = p->node.at,
                          .lowered = lowered,
                          .n_recorded_values = koila_graph_n_values(p->from),
                          .cap_values = p->value.cap,
                          .cap_needs = p->need.cap,
                          .cap_nodes = p->node.cap,
                          .arena = *p->keep };
    if (p->any_piece && !find_cuts(p, r))
        return NULL;
    r->arena = *p->keep; /* it has grown */
    return r;
}

/* Finds the entries of a leaf's dimension in a row of each axis that is not the batch's. */
static bool find_units(koila__placer *p)
{
    p->unit = koila__arena_array(&p->scratch, (size_t)p->from->axes.n + 1, sizeof *p->unit);
    if (!p->unit)
        return fail(p, KOILA_NO_MEMORY);
    for (uint32_t a = 0; a < p->from->axes.n; a++)
        p->unit[a] = 1;
    for (koila_value v = p->from->values.n; v-- > 0;) { /* the first leaf tells it */
        const koila_value_info *leaf = &p->from->values.at[v];
        if (leaf->node != KOILA_NONE || leaf->leaf_kind != KOILA_LEAF_BATCH)
            continue;
        const int64_t rows = p->from->axes.at[leaf->axis];
        if (rows > 0)
            p->unit[leaf->axis] = koila__meta(p->table, leaf->meta)->size[leaf->dim] / rows;
    }
    return true;
}

static koila__placed *place_all(koila__placer *p, const koila_value *targets, uint32_t n_targets)
{
    koila_value *lowered =
        koila__arena_array(p->keep, koila_graph_n_values(p->from), sizeof *lowered);
    const koila_status s = koila_graph_new(p->table, &p->mem, &p->to);
    if (s != KOILA_OK || !lowered) {
        fail(p, s != KOILA_OK ? s : KOILA_NO_MEMORY);
        return NULL;
    }
    if (!lower_axes(p) || (p->seeds && !find_units(p)) || !walk(p, targets, n_targets, lowered))
        return NULL;
    return hand_over(p, lowered);
}

/* Are leaves cut along different axes? */
static bool cuts_two(const koila_graph *g)
{
    for (koila_value v = 0; v < g->values.n; v++) {
        const koila_value_info *leaf = &g->values.at[v];
        if (leaf->node == KOILA_NONE && leaf->leaf_kind == KOILA_LEAF_BATCH && leaf->axis != 0)
            return true;
    }
    return false;
}

typedef enum placing { PLACE, PLACE_CUT, PLACE_NARROWED, PLACE_PIECES, PLACE_WHOLE } placing;

static koila_status place(const koila_graph *recorded, const koila_value *targets,
                          uint32_t n_targets, placing how, const uint8_t *seeds,
                          const koila_allocator *mem, koila__placed **out, koila_error *err)
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
                        .line = KOILA_NONE,
                        .whole = how == PLACE_WHOLE,
                        .cut = how == PLACE_CUT || how == PLACE_NARROWED,
                        .seeds = seeds,
                        .two = seeds && (how == PLACE_NARROWED || cuts_two(recorded)),
                        .narrowed = how == PLACE_NARROWED,
                        .pieces = how == PLACE_PIECES };
    koila__arena_init(&p.scratch, &a);
    koila__arena_init(&p.answers_room, &a);
    koila__placed *r = place_all(&p, targets, n_targets);
    koila__vec_free(&a, &p.zero);
    koila__vec_free(&a, &p.absent);
    koila__vec_free(&a, &p.whole_of);
    koila__vec_free(&a, &p.level);
    koila__vec_free(&a, &p.op);
    koila__vec_free(&a, &p.settling);
    koila__arena_deinit(&p.scratch);
    koila__arena_deinit(&p.answers_room);
    if (!r) {
        koila__vec_free(&a, &p.value);
        koila__vec_free(&a, &p.need);
        koila__vec_free(&a, &p.node);
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
    return place(recorded, targets, n_targets, PLACE, NULL, mem, out, err);
}

koila_status koila__place_cut(const koila_graph *recorded, const koila_value *targets,
                              uint32_t n_targets, const koila_allocator *mem, koila__placed **out,
                              koila_error *err)
{
    return place(recorded, targets, n_targets, PLACE_CUT, NULL, mem, out, err);
}

koila_status koila__place_along(const koila_graph *recorded, const uint8_t *seeds, bool narrowed,
                                const koila_value *targets, uint32_t n_targets,
                                const koila_allocator *mem, koila__placed **out, koila_error *err)
{
    const placing how = narrowed ? PLACE_NARROWED : PLACE_CUT;
    return place(recorded, targets, n_targets, how, seeds, mem, out, err);
}

koila_status koila__place_pieces(const koila_graph *recorded, const koila_value *targets,
                                 uint32_t n_targets, const koila_allocator *mem,
                                 koila__placed **out, koila_error *err)
{
    return place(recorded, targets, n_targets, PLACE_PIECES, NULL, mem, out, err);
}

bool koila__takes_rows(const koila__placed *p)
{
    const koila_table *t = koila_graph_table(p->graph);
    const uint32_t of_module = KOILA_FACT_OPAQUE_CALL | KOILA_FACT_OPAQUE_BACKWARD;
    bool any = false;
    for (koila_node n = 0; n < koila_graph_n_nodes(p->graph); n++) {
        const koila_op op = koila__node_sig(p->graph, n)->op;
        const koila__rule rule = koila__rule_of(t, op);
        if (koila__facts_of_op(t, op) & of_module)
            return false; /* ranks that share it must run as many slices, of any rows */
        any |= p->node[n].gathered && (rule == koila__rule_select || rule == koila__rule_slice ||
                                       rule == koila__rule_unbind || rule == koila__rule_split ||
                                       rule == koila__rule_chunk);
    }
    return any;
}

koila_status koila__place_whole(const koila_graph *recorded, const koila_value *targets,
                                uint32_t n_targets, const koila_allocator *mem, koila__placed **out,
                                koila_error *err)
{
    return place(recorded, targets, n_targets, PLACE_WHOLE, NULL, mem, out, err);
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

#define HOLDS(e, ...)                                                                              \
    do {                                                                                           \
        if (!(e)) {                                                                                \
            koila__fail(err, KOILA_BAD_INPUT, 0, __VA_ARGS__);                                     \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

static bool is_slice_of(const koila_graph *g, koila_placement p, const koila_meta_info *m)
{
    return p.dim < m->n_dims &&
           m->size[p.dim] == koila__extent(p, koila_graph_axis_size(g, p.axis));
}

static bool check_value(const koila__placed *p, koila_value v, koila_error *err)
{
    const koila_graph *g = p->graph;
    const koila_placement q = p->value[v];
    const koila_value_info info = koila_value_get(g, v);
    HOLDS(q.kind != KOILA_FREE, "value %u: still FREE", v);
    if (q.kind == KOILA_R)
        return true;
    HOLDS(info.meta != KOILA_NONE, "value %u: a result that does not exist is placed", v);
    HOLDS(q.axis < koila_graph_n_axes(g), "value %u: no axis %u", v, q.axis);
    if (q.kind == KOILA_P || koila__is_opaque(q))
        return true;
    HOLDS(is_slice_of(g, q, koila_meta_get(koila_graph_table(g), info.meta)),
          "value %u: size[%u] is not outer * batch * inner", v, q.dim);
    return true;
}

static bool check_need(const koila__placed *p, koila_node n, uint32_t i, koila_error *err)
{
    const koila_graph *g = p->graph;
    const koila_table *t = koila_graph_table(g);
    const koila_node_info info = koila_node_get(g, n);
    const koila_placement need = p->need[info.first_input + i];
    const koila_placement is = p->value[koila_node_inputs(g, n)[i]];
    if (need.kind == KOILA_R)
        return true;
    HOLDS(need.axis == p->node[n].axis, "node %u: input %u is of another axis", n, i);
    HOLDS(koila__placement_equal(need, is) || (need.kind == KOILA_S && is.kind == KOILA_R),
          "node %u: input %u cannot become what is needed", n, i);
    if (need.kind == KOILA_S && !koila__is_opaque(need))
        HOLDS(is_slice_of(g, need, koila_meta_get(t, koila_sig_get(t, info.sig)->inputs[i])),
              "node %u: input %u: no such slice", n, i);
    return true;
}

/* Note [Pieces]: what a node needs is in its slice, and what it leaves there is known to be absent
 * elsewhere. */
static bool check_pieces(const koila__placed *p, koila_node n, koila_error *err)
{
    const koila_node_info info = koila_node_get(p->graph, n);
    const koila_sig_info *sig = koila_sig_get(koila_graph_table(p->graph), info.sig);
    const koila__placed_node *node = &p->node[n];
    const bool sees_all = node->joins || node->sums;
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_placement need = p->need[info.first_input + i];
        if (!koila__is_piece(need) || sees_all)
            continue;
        HOLDS(node->end == 0 ? p->absent[koila_node_inputs(p->graph, n)[i]]
                             : node->begin <= need.outer && need.inner <= node->end,
              "node %u: input %u is a piece of another slice", n, i);
    }
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        const koila_value v = info.first_output + j;
        if (sig->outputs[j] == KOILA_NONE)
            continue;
        HOLDS(!node->end || (node->in_loop && p->absent[v]), "node %u: result %u is absent", n, j);
        HOLDS(!koila__is_piece(p->value[v]) ||
                  (p->value[v].outer == node->begin && p->value[v].inner == node->end),
              "node %u: result %u is a piece of another slice", n, j);
    }
    return true;
}

static bool check_node(const koila__placed *p, koila_node n, koila_error *err)
{
    const koila_node_info info = koila_node_get(p->graph, n);
    const koila_sig_info *sig = koila_sig_get(koila_graph_table(p->graph), info.sig);
    const koila_value *in = koila_node_inputs(p->graph, n);
    bool loop = false;
    bool whole_result = false;
    bool gathered = false;
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        const koila_placement need = p->need[info.first_input + i];
        loop |= need.kind != KOILA_R;
        gathered |= need.kind == KOILA_R && koila__is_of_rows(p->value[in[i]]);
        if (!check_need(p, n, i, err))
            return false;
    }
    for (uint32_t j = 0; j < sig->n_outputs; j++) {
        const koila_placement is = p->value[info.first_output + j];
        if (sig->outputs[j] == KOILA_NONE)
            continue;
        loop |= is.kind != KOILA_R;
        whole_result |= is.kind == KOILA_R;
        HOLDS(is.kind == KOILA_R || is.axis == p->node[n].axis,
              "node %u: result %u is of another axis", n, j);
    }
    HOLDS(loop == (p->node[n].in_loop != 0), "node %u: in_loop", n);
    HOLDS(!(loop && whole_result), "node %u: a whole result made in a loop", n);
    HOLDS(gathered == (p->node[n].gathered != 0), "node %u: gathered", n);
    return check_pieces(p, n, err);
}

#undef HOLDS

bool koila__placed_check(const koila__placed *p, koila_error *err)
{
    if (!koila_graph_check(p->graph, err))
        return false;
    for (uint32_t v = 0; v < koila_graph_n_values(p->graph); v++)
        if (!check_value(p, v, err))
            return false;
    for (uint32_t n = 0; n < koila_graph_n_nodes(p->graph); n++)
        if (!check_node(p, n, err))
            return false;
    return true;
}
