/* addends.c — the result of a loop that is a sum over slices (the gradient of a weight) has an
 * accumulator. What a slice adds to it need not be there as a whole beside it.
 *
 * A weight that is used twice has a gradient of two terms, which are recorded one long after the
 * other (a table of the vocabulary at both ends of a model): the first would wait in every slice
 * for the second. Both are added to the accumulator as they are made, for
 *
 *   sum over slices (a + b) == sum over slices a + sum over slices b.
 *
 * And a matrix product can add its result to a tensor while it makes it, and so can the backward of
 * an embedding, which adds a few rows to a large table. Then there is no term at all.
 *
 * An addend is the only result of a call, read once: by another sum of the same result, or by a
 * view that is. The sums and the views on that way are not run (KOILA__ADDEND_TOLD). Where the
 * terms are made in loops of their own, and added behind them, emit.c has the second loop add to
 * what the first one left: Note [Second terms] there. */
#include "engine/addends.h"

#include "base/vec.h"
#include "engine/share.h"
#include "graph/table.h"
#include "placement/rules.h"

enum { READ = 1, READ_TWICE = 2, READ_IN_SLICES = 4, IS_TARGET = 8 };

typedef struct found {
    koila_value value;
    koila__addend_kind kind;
} found;

typedef struct finder {
    koila__placed *p;
    const koila_graph *g;
    koila_allocator mem;
    uint8_t *seen;         /* [values] READ..., IS_TARGET */
    VEC(koila_value) next; /* on the way from one result: those not looked at */
    VEC(found) found;      /* of that result */
} finder;

static const koila_sig_info *maker_of(const finder *f, koila_value v)
{
    return koila__node_sig(f->g, f->g->values.at[v].node);
}

/* Is v a sum over the slices of the loop in which node n runs? What is conjugated is a flag on a
 * tensor: complex sums are left alone. */
static bool is_sum_in_loop_of(const finder *f, koila_value v, koila_node n)
{
    const koila_placement *x = &f->p->value[v];
    const koila_node m = f->g->values.at[v].node;
    return m != KOILA_NONE && f->g->values.at[v].meta != KOILA_NONE && x->kind == KOILA_P &&
           x->combine == KOILA_SUM && f->p->node[m].in_loop &&
           f->p->node[m].axis == f->p->node[n].axis &&
           !koila__dtype_is_complex(koila__value_meta(f->g, v)->dtype);
}

/* Is input i of node n read there alone, as its maker leaves it in the slice? */
static bool is_read_there_alone(const finder *f, koila_node n, uint32_t i)
{
    const koila_value v = f->g->inputs.at[f->g->nodes.at[n].first_input + i];
    return f->seen[v] == (READ | READ_IN_SLICES) && is_sum_in_loop_of(f, v, n);
}

/* Do both take the same memory, without gaps? */
static bool fills_the_same(const finder *f, koila_value a, koila_value b)
{
    const koila_meta_info *x = koila__value_meta(f->g, a), *y = koila__value_meta(f->g, b);
    return x->dtype == y->dtype && x->n_bytes == y->n_bytes && koila_meta_is_dense(x) &&
           koila_meta_is_dense(y);
}

/* False: the host is out of memory: nothing is found then. */
static bool note(finder *f, koila_value v, koila__addend_kind kind)
{
    return koila__vec_push(&f->mem, &f->found, ((found){ v, kind }));
}
static bool go_on(finder *f, koila_value v) { return koila__vec_push(&f->mem, &f->next, v); }

/* v is a view: of one addend. */
static bool follow_view(finder *f, koila_value v)
{
    const koila_node n = f->g->values.at[v].node;
    const koila_value base = f->g->inputs.at[f->g->nodes.at[n].first_input];
    if (maker_of(f, v)->n_inputs != 1 || maker_of(f, v)->n_outputs != 1 ||
        f->p->node[n].fix[0].kind || !is_read_there_alone(f, n, 0) || !fills_the_same(f, v, base))
        return false;
    return note(f, v, KOILA__ADDEND_TOLD) && go_on(f, base);
}

/* v is a sum of two: of their addends. */
static bool follow_sum(finder *f, koila_value v)
{
    const koila_node n = f->g->values.at[v].node;
    const koila_sig_info *s = maker_of(f, v);
    const koila_value *in = &f->g->inputs.at[f->g->nodes.at[n].first_input];
    if (f->p->node[n].sums || f->p->node[n].fix[0].kind || in[0] == in[1])
        return false;
    for (uint32_t i = 0; i < 2; i++)
        if (s->inputs[i] != s->outputs[0] || !is_read_there_alone(f, n, i))
            return false;
    return note(f, v, KOILA__ADDEND_TOLD) && go_on(f, in[1]) && go_on(f, in[0]);
}

bool koila__adds_onto(const koila_table *t, const koila_sig_info *s)
{
    const koila__rule rule = koila__rule_of(t, s->op);
    const bool is_product = rule == koila__rule_mm || rule == koila__rule_bmm;
    if (s->n_inputs != 2 || s->n_outputs != 1 || s->n_writes)
        return false;
    for (uint32_t i = 0; i < 1u + is_product; i++)
        if (koila__meta(t, s->inputs[i])->dtype != koila__meta(t, s->outputs[0])->dtype)
            return false;
    return is_product || rule == koila__rule_embedding_backward;
}

/* v is a call's only result, on memory of its own. */
static bool is_addend(finder *f, koila_value v)
{
    const koila_node n = f->g->values.at[v].node;
    const koila_sig_info *s = maker_of(f, v);
    const koila__op *op = &f->g->table->ops.at[s->op];
    const uint32_t odd = KOILA_FACT_MAY_ALIAS | KOILA_FACT_OPAQUE_CALL |
                         KOILA_FACT_OPAQUE_BACKWARD | KOILA_FACT_OFFLOADS;
    if (s->n_outputs != 1 || s->n_writes || f->p->node[n].fix[0].kind || op->is_foreign ||
        op->flags & (KOILA_OP_VIEW | KOILA_OP_RANDOM | KOILA_OP_OPAQUE) || op->facts & odd ||
        !koila_meta_is_dense(koila__value_meta(f->g, v)))
        return false;
    /* nothing is added to a wider accumulator while it is computed */
    const bool is_onto = koila__adds_onto(f->g->table, s) && !koila__accumulates_wider(f->p, v);
    return note(f, v, is_onto ? KOILA__ADDEND_ONTO : KOILA__ADDEND);
}

/* Follows what v, which a loop makes whole, is made of. *n_addends: calls that make addends. False:
 * v is collected as any other value. */
static bool follow(finder *f, koila_value v, uint32_t *n_addends)
{
    f->found.n = f->next.n = 0;
    if (!go_on(f, v))
        return false;
    while (f->next.n) {
        const koila_value x = f->next.at[--f->next.n];
        const koila_sig_info *s = maker_of(f, x);
        const bool is_view = f->g->table->ops.at[s->op].flags & KOILA_OP_VIEW;
        const bool is_sum = koila__adds_two(f->g->table, s);
        bool is_followed;
        if (is_view)
            is_followed = follow_view(f, x);
        else
            is_followed = is_sum ? follow_sum(f, x) : is_addend(f, x);
        if (!is_followed)
            return false;
    }
    bool any_onto = false;
    *n_addends = 0;
    for (uint32_t i = 0; i < f->found.n; i++) {
        any_onto |= f->found.at[i].kind == KOILA__ADDEND_ONTO;
        *n_addends += f->found.at[i].kind != KOILA__ADDEND_TOLD;
    }
    return any_onto || *n_addends > 1;
}

/* Is the sum of two that node n makes one of v and another value, read only there? */
static bool may_add_to_other(const finder *f, koila_node n, koila_value v)
{
    const koila_sig_info *s = koila__node_sig(f->g, n);
    if (f->p->node[n].fix[0].kind)
        return false;
    const koila_value *in = &f->g->inputs.at[f->g->nodes.at[n].first_input];
    const koila_value other = in[in[0] == v];
    return in[0] != in[1] && s->inputs[0] == s->outputs[0] && s->inputs[1] == s->outputs[0] &&
           (f->seen[other] & ~READ_IN_SLICES) == READ && f->g->values.at[other].node != KOILA_NONE;
}

/* The addend that v becomes; NULL: the host is out of memory. */
static koila__addend *addend_at(finder *f, koila_value v)
{
    koila__placed *p = f->p;
    if (!p->addends)
        p->addends = koila__arena_array(&p->arena, (size_t)f->g->values.n + 1, sizeof *p->addends);
    return p->addends ? &p->addends[v] : NULL;
}

/* Finds second terms of sums outside loops. */
static koila_status find_second(finder *f)
{
    for (koila_node n = 0; n < f->g->nodes.n; n++) {
        if (f->p->node[n].in_loop || !koila__adds_two(f->g->table, koila__node_sig(f->g, n)))
            continue;
        for (uint32_t i = 0; i < 2; i++) {
            const koila_value v = f->g->inputs.at[f->g->nodes.at[n].first_input + i];
            const koila_node m = f->g->values.at[v].node;
            if (f->seen[v] != READ || m == KOILA_NONE || f->p->node[m].in_loop ||
                f->p->node[m].fix[0].kind ||
                !koila__adds_onto(f->g->table, koila__node_sig(f->g, m)) ||
                !may_add_to_other(f, n, v) ||
                koila__dtype_is_complex(koila__value_meta(f->g, v)->dtype))
                continue;
            koila__addend *a = addend_at(f, v);
            if (!a)
                return KOILA_NO_MEMORY;
            *a = (koila__addend){ .kind = KOILA__ADDEND_SECOND,
                                  .to = f->g->nodes.at[n].first_output };
        }
    }
    return KOILA_OK;
}

/* Finds the addends of what loops make whole. */
static koila_status find_in_loops(finder *f)
{
    for (koila_value v = 0; v < f->g->values.n; v++) {
        const koila_node n = f->g->values.at[v].node;
        const bool is_made_whole =
            f->seen[v] & (READ | IS_TARGET) && !(f->seen[v] & READ_IN_SLICES);
        uint32_t n_addends;
        if (f->p->value[v].kind != KOILA_P || !is_made_whole || n == KOILA_NONE ||
            !is_sum_in_loop_of(f, v, n) || !follow(f, v, &n_addends))
            continue;
        for (uint32_t k = 0; k < f->found.n; k++) {
            koila__addend *a = addend_at(f, f->found.at[k].value);
            if (!a)
                return KOILA_NO_MEMORY;
            *a = (koila__addend){ .kind = (uint8_t)f->found.at[k].kind, .to = v };
        }
        f->p->addends[v].n_addends = n_addends;
    }
    return KOILA_OK;
}

koila_status koila__addends_find(koila__placed *p, const koila_value *targets, uint32_t n_targets,
                                 const koila_allocator *mem)
{
    const koila_graph *g = p->graph;
    if (p->cut || p->absent) /* Note [Pieces] in place.h: an addend may be absent */
        return KOILA_OK;
    finder f = { .p = p, .g = g, .mem = koila__allocator(mem) };
    const size_t n_bytes = (size_t)g->values.n + 1;
    f.seen = koila__realloc(&f.mem, NULL, 0, n_bytes);
    if (!f.seen)
        return KOILA_NO_MEMORY;
    memset(f.seen, 0, n_bytes);
    for (uint32_t at = 0; at < g->inputs.n; at++) {
        uint8_t *seen = &f.seen[g->inputs.at[at]];
        *seen |= *seen & READ ? READ_TWICE : READ;
        *seen |= p->need[at].kind == KOILA_P ? READ_IN_SLICES : 0;
    }
    for (uint32_t i = 0; i < n_targets; i++)
        f.seen[targets[i]] |= IS_TARGET;
    koila_status status = find_in_loops(&f);
    if (status == KOILA_OK)
        status = find_second(&f);
    koila__release(&f.mem, f.seen, n_bytes);
    koila__vec_free(&f.mem, &f.next);
    koila__vec_free(&f.mem, &f.found);
    return status;
}
