/* free_values.c — nodes whose placement was left open, and what decides it.
 *
 * FREE. A factory has no data edge, so at first it is unknown whether its rows belong to a batch.
 * It stays FREE, like every node with a rule and only R and FREE inputs, until a use needs it as S
 * (then resolve_s() asks the rules of its producers, back to the factories) or as R (resolve_r()).
 * The use decides by position, through its own rule; an equal size alone decides nothing. A factory
 * of zeros may also become P: zeros are a partial sum of zeros, so scattering rows into zeros needs
 * no whole value. Values that stay undecided become R.
 */
#include "placement/walk.h"

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
            return koila__placer_fail(p, KOILA_NO_MEMORY);
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

bool koila__place_node_whole(koila__placer *p, koila_node id)
{
    value_stack stack = { 0 };
    set_whole(p, id, &stack); /* a failure is in p->status */
    return drain_r(p, &stack);
}

static bool resolve_r(koila__placer *p, koila_value v)
{
    value_stack stack = { 0 };
    if (!koila__vec_push(&p->mem, &stack, v))
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    return drain_r(p, &stack);
}

static bool begin_to_settle(koila__placer *p, koila_node id, const koila__attempt *a);

typedef struct input_search {
    koila__placer *p;
    const koila_sig_info *sig;
    const koila_value *in;
    koila_placement *placed, want;
    uint32_t i, output;
    uint16_t axis;
    koila__attempt *a;
} input_search;
static bool input_gives_want(void *user, koila_placement s)
{
    input_search *t = user;
    const koila_placement was = t->placed[t->i];
    t->placed[t->i] = s;
    const bool ok =
        koila__attempt_rule(t->p, t->a, t->sig, t->in, t->placed, t->axis, NULL, false) &&
        t->a->loop && koila__slices_as_placed(t->a) &&
        koila__placement_equal(t->a->c.out[t->output], t->want);
    t->placed[t->i] = was;
    return ok;
}

/* Does the call stack, or join, its inputs, so that those that are placed alike and of one form
 * differ by their place in the result alone? */
static bool treats_alike(koila__placer *p, const koila_sig_info *sig)
{
    const koila__rule rule = koila__placer_rule(p, sig->op)->rule;
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
    return koila__each_placement(koila__meta(t->p->table, t->sig->inputs[t->i]),
                                 koila_graph_axis_size(t->p->from, t->axis), t->axis, t->want,
                                 input_gives_want, t);
}

/* The n_inputs inputs of node n, and how they are placed now, in p->scratch. */
static bool copy_inputs(koila__placer *p, koila_node_info n, uint32_t n_inputs, koila_value **in,
                        koila_placement **placed)
{
    *placed = koila__arena_room(&p->scratch, n_inputs * sizeof **placed);
    *in = koila__arena_room(&p->scratch, n_inputs * sizeof **in);
    if (!*placed || !*in)
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < n_inputs; i++) {
        (*in)[i] = p->to->inputs.at[n.first_input + i];
        (*placed)[i] = p->value.at[(*in)[i]];
    }
    return true;
}

/* Begins to settle FREE v as `want`; false leaves it FREE. */
static bool resolve_s(koila__placer *p, koila_value v, koila_placement want)
{
    const koila_node id = p->to->values.at[v].node;
    const koila_node_info n = p->to->nodes.at[id];
    const koila_sig_info *sig = koila__sig(p->table, n.sig);
    const uint32_t output = v - n.first_output;
    const koila__mark before = koila__arena_mark(&p->scratch);
    koila_placement *placed;
    koila_value *in;
    if (!copy_inputs(p, n, sig->n_inputs, &in, &placed))
        return false;
    koila__attempt a;
    bool found = output == 0 &&
                 koila__attempt_rule(p, &a, sig, in, placed, want.axis, &want, false) && a.loop &&
                 koila__slices_as_placed(&a) && koila__placement_equal(a.c.out[0], want);
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
    return ok || koila__placer_fail(p, KOILA_NO_MEMORY);
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
static bool begin_to_settle(koila__placer *p, koila_node id, const koila__attempt *a)
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
           koila__placer_fail(p, KOILA_NO_MEMORY);
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
            return koila__placer_fail(p, KOILA_UNSUPPORTED);
    }
    p->node.at[id].gathered = gathered;
    if (suits)
        return true;
    return koila__place_node_whole(p, id);
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

bool koila__place_node(koila__placer *p, koila_node id, const koila__attempt *a)
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

bool koila__place_free_node(koila__placer *p, koila_node id)
{
    const koila_node_info n = p->to->nodes.at[id];
    const koila_sig_info *sig = koila__sig(p->table, n.sig);
    uint32_t axis = KOILA_NONE;
    bool is_undecided = false;
    for (uint32_t j = 0; j < sig->n_outputs; j++)
        is_undecided |= p->value.at[n.first_output + j].kind == KOILA_FREE;
    if (!is_undecided)
        return true;
    koila_placement *placed;
    koila_value *in;
    if (!copy_inputs(p, n, sig->n_inputs, &in, &placed))
        return false;
    for (uint32_t i = 0; i < sig->n_inputs; i++)
        if (!koila__is_r(placed[i]))
            axis = placed[i].axis;
    koila__attempt a;
    if (axis != KOILA_NONE &&
        koila__attempt_rule(p, &a, sig, in, placed, (uint16_t)axis, NULL, false) &&
        koila__slices_as_placed(&a))
        return koila__place_node(p, id, &a);
    return p->status == KOILA_OK && koila__place_node_whole(p, id);
}
