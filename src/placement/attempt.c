/* attempt.c — a rule asked about one call: the placements of its inputs in, an attempt out.
 *
 * An operator's rule (rules.h) gives the placement that each input must have, and those of the
 * results. Its answer is checked here; one that is not sound is none, and the call is gathered.
 *
 * Note [Writes to placed values]. An in-place call runs its functional twin's rule on the written
 * *view*: the base's placement is carried forward through the chain of view calls by their own
 * rules. When the twin's result is S and the base is R or FREE, each possible placement of the base
 * is carried forward, and the base gets the one that becomes exactly that S. If there is none, the
 * call is gathered.
 */
#include "placement/walk.h"

const koila__op_rule *koila__placer_find_rule(koila__placer *p, koila_op op)
{
    static const koila__op_rule none = { true, NULL, NULL };
    while (p->op.n <= op)
        if (!koila__vec_push(&p->mem, &p->op, ((koila__op_rule){ 0 }))) {
            koila__placer_fail(p, KOILA_NO_MEMORY);
            return &none;
        }
    const char *user_rule = koila__user_rule_of(p->table, op);
    const koila__rule rule = user_rule ? koila__rule_user : koila__rule_of(p->table, op);
    p->op.at[op] = (koila__op_rule){ true, rule, user_rule };
    return &p->op.at[op];
}

koila_placement koila__placer_placement(const koila__placer *p, koila_value v)
{
    return v == KOILA_NONE ? koila__r() : p->value.at[v];
}

/* ---- one case: inputs' placements in, an attempt out */

bool koila__case_init(koila__placer *p, koila__attempt *a, const koila_sig_info *sig,
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
        return koila__placer_fail(p, KOILA_NO_MEMORY);
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
    c->user_rule = koila__placer_rule(p, sig->op)->user_rule;
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
static bool sound(koila__attempt *a)
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
        koila__attempt a;
        if (!koila__case_init(p, &a, sig, NULL, &base, axis))
            return false;
        const koila__rule rule = koila__placer_rule(p, sig->op)->rule;
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

static bool try_factors(koila_placement s, int64_t outer, int64_t inner, koila__try try, void *user)
{
    s.outer = outer;
    s.inner = inner;
    return try(user, s);
}

bool koila__each_placement(const koila_meta_info *m, int64_t batch, uint16_t axis,
                           koila_placement like, koila__try try, void *user)
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
static bool base_of_view(koila__placer *p, koila__attempt *a, uint32_t w, koila_placement base,
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
        if (!koila__each_placement(m, c->batch, c->axis, is_wanted ? *want : view,
                                   base_maps_to_view, &s))
            return false;
        *need = s.base;
    }
    *out = *need;
    return true;
}

/* Writes the chains of all writes, adapted to a slice, to a->link. */
static bool place_links(koila__placer *p, koila__attempt *a)
{
    const koila_sig_info *sig = a->c.sig;
    uint32_t n_links = 0;
    for (uint32_t w = 0; w < sig->n_writes; w++)
        n_links += sig->writes[w].n_links;
    if (!a->loop || !n_links)
        return true;
    a->link = koila__arena_array(p->keep, n_links, sizeof *a->link);
    if (!a->link)
        return koila__placer_fail(p, KOILA_NO_MEMORY);
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
static bool attempt_writes(koila__placer *p, koila__attempt *a, koila__rule rule)
{
    koila__case *c = &a->c;
    const koila_sig_info *sig = c->sig;
    const koila_placement *want = c->want;
    koila_placement want_view;
    koila_placement *base = koila__arena_array(&p->scratch, sig->n_writes, sizeof *base);
    if (!base)
        return koila__placer_fail(p, KOILA_NO_MEMORY);
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

bool koila__slices_as_placed(const koila__attempt *a)
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

bool koila__is_rewritten(const koila__attempt *a)
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

bool koila__attempt_rule(koila__placer *p, koila__attempt *a, const koila_sig_info *sig,
                         const koila_value *in, const koila_placement *placed, uint16_t axis,
                         const koila_placement *want, bool may_emit)
{
    if (!koila__case_init(p, a, sig, in, placed, axis))
        return false;
    const koila__rule rule = koila__placer_rule(p, sig->op)->rule;
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
            w->overwrites || !koila__case_init(p, a, sig, in, placed, axis))
            return false;
        a->c.want = want;
        a->c.may_emit = true;
        return rule(&a->c) && p->status == KOILA_OK && a->c.replaced[0] != KOILA_NONE;
    }
    a->c.may_emit = may_emit;
    show_empties_whole(&a->c, placed);
    if (!rule(&a->c) || p->status != KOILA_OK)
        return false;
    if (koila__is_rewritten(a)) /* its calls have been checked */
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
