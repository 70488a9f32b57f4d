/* plan_check.c — the invariants of koila/plan.h: replays the instructions with flags instead of
 * tensors. */
#include "engine/plan_inside.h"

#include "graph/table.h"

/* WHOLE, LOCAL, KEPT: the value has such a tensor now. MADE: it is being collected, and is whole
 * when the loop ends. */
enum { WHOLE = 1, LOCAL = 2, KEPT = 4, MADE = 8 };

typedef struct checker {
    const koila_plan *p;
    const koila_graph *g;
    koila_error *err;
    uint8_t *flags;  /* [value] */
    uint32_t stage;  /* the one that is checked */
    bool is_loop;    /* it is */
    uint32_t n_live; /* values made and not freed in it */
    uint32_t n_kept; /* pieces */
    bool has_inner;  /* its inner step has run */
} checker;

#define HOLDS(c, e, ...)                                                                           \
    do {                                                                                           \
        if (!(e)) {                                                                                \
            koila__fail((c)->err, KOILA_BAD_INPUT, (c)->stage, __VA_ARGS__);                       \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

static bool check_run(checker *c, koila_node n)
{
    const koila_sig_info *s = koila__node_sig(c->g, n);
    const koila_node_info *node = &c->g->nodes.at[n];
    const char *name = koila_op_name(c->g->table, s->op);
    const uint8_t mine = c->is_loop ? LOCAL : WHOLE;
    for (uint32_t u = 0; u < s->n_inputs; u++) {
        const koila_value v = c->g->inputs.at[node->first_input + u];
        const bool whole = !c->is_loop || c->p->placed->need[node->first_input + u].kind == KOILA_R;
        const uint8_t any_of = whole ? WHOLE | LOCAL : LOCAL;
        HOLDS(c, !koila__reads(s, u) || c->flags[v] & any_of, "node %u (%s): input %u is not there",
              n, name, u);
    }
    for (uint32_t o = 0; o < s->n_outputs; o++) {
        if (s->outputs[o] == KOILA_NONE)
            continue;
        HOLDS(c, !(c->flags[node->first_output + o] & mine),
              "node %u (%s): result %u is there already", n, name, o);
        c->flags[node->first_output + o] |= mine;
        c->n_live++;
    }
    return true;
}

static bool check_free(checker *c, koila_value v)
{
    const uint8_t mine = c->is_loop ? LOCAL : WHOLE;
    HOLDS(c, c->flags[v] & mine && c->g->values.at[v].meta != KOILA_NONE,
          "value %u is freed but not there", v);
    HOLDS(c, c->is_loop || c->g->values.at[v].node != KOILA_NONE,
          "value %u is freed but does not belong to the plan", v);
    c->flags[v] &= (uint8_t)~mine;
    c->n_live--;
    return true;
}

/* The slice as a step of its own: it has its leaves, and leaves its results as local values. */
static bool check_inner(checker *c)
{
    const koila_inner *inner = c->p->schedule.stages[c->stage].stage.inner;
    HOLDS(c, inner && !c->has_inner, "no inner step, or a second one");
    c->has_inner = true;
    for (uint32_t i = 0; i < inner->n_leaves; i++)
        HOLDS(c, c->flags[inner->leaves[i].outer] & (inner->leaves[i].is_local ? LOCAL : WHOLE),
              "leaf %u of the inner step is not there", i);
    for (uint32_t i = 0; i < inner->n_results; i++) {
        const koila_value v = inner->results[i].outer;
        if (inner->results[i].adds_on)
            continue;
        HOLDS(c, !(c->flags[v] & LOCAL), "value %u is there before the inner step", v);
        c->flags[v] |= LOCAL;
        c->n_live++;
    }
    return true;
}

static bool check_instr(checker *c, koila_instr in)
{
    uint8_t *flags = &c->flags[in.id]; /* of the value, unless nodes run */
    switch ((koila_instr_kind)in.kind) {
    case KOILA_DO_RUN:
        return check_run(c, in.id);
    case KOILA_DO_SLICE:
        HOLDS(c, c->is_loop && *flags & WHOLE && !(*flags & LOCAL),
              "value %u is sliced before it is whole, or twice", in.id);
        *flags |= LOCAL;
        c->n_live++;
        return true;
    case KOILA_DO_FETCH:
        HOLDS(c, c->is_loop && *flags & KEPT && !(*flags & LOCAL),
              "value %u is fetched but not kept, or twice", in.id);
        *flags |= LOCAL;
        c->n_live++;
        return true;
    case KOILA_DO_KEEP:
        HOLDS(c, c->is_loop && *flags & LOCAL && !(*flags & KEPT),
              "value %u is kept before it is made, or twice", in.id);
        *flags |= KEPT;
        c->n_kept++;
        return true;
    case KOILA_DO_ADD:
    case KOILA_DO_PUT:
        if (in.flags & KOILA_INSTR_ADDED) {
            HOLDS(c, c->has_inner && !(*flags & (WHOLE | MADE)), "value %u is added twice", in.id);
            *flags |= MADE;
            return true;
        }
        HOLDS(c, c->is_loop && *flags & LOCAL && !(*flags & (WHOLE | MADE)),
              "value %u is collected before it is made, or twice", in.id);
        HOLDS(c, !(in.flags & KOILA_INSTR_SECOND) || c->flags[in.user] & WHOLE,
              "value %u is added to %u, which is not whole", in.id, in.user);
        *flags |= MADE;
        return true;
    case KOILA_DO_FREE:
        return check_free(c, in.id);
    case KOILA_DO_INNER:
        return check_inner(c);
    }
    return true;
}

/* The last slice is done: what was collected is whole, pieces fetched for the last time are gone.
 */
static bool check_end_of_loop(checker *c, const koila_stage *st)
{
    HOLDS(c, c->n_live == 0, "%u values outlive their slice", c->n_live);
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr in = st->instrs[i];
        uint8_t *flags = &c->flags[in.id];
        if (in.kind == KOILA_DO_ADD || in.kind == KOILA_DO_PUT)
            *flags = (uint8_t)((*flags & ~MADE) | WHOLE);
        if (in.kind != KOILA_DO_FETCH || !(in.flags & KOILA_INSTR_LAST))
            continue;
        HOLDS(c, *flags & KEPT, "value %u is given up twice", in.id);
        *flags &= (uint8_t)~KEPT;
        c->n_kept--;
    }
    return true;
}

static bool check_stages(checker *c)
{
    for (koila_value v = 0; v < c->g->values.n; v++)
        c->flags[v] = c->g->values.at[v].node == KOILA_NONE ? WHOLE : 0;
    for (c->stage = 0; c->stage < c->p->schedule.n_stages; c->stage++) {
        const koila_stage *st = &c->p->schedule.stages[c->stage].stage;
        c->is_loop = st->is_loop;
        c->n_live = 0;
        c->has_inner = false;
        for (uint32_t i = 0; i < st->n_instrs; i++)
            if (!check_instr(c, st->instrs[i]))
                return false;
        if (st->is_loop && !check_end_of_loop(c, st))
            return false;
    }
    c->stage = 0;
    HOLDS(c, c->n_kept == 0, "%u kept values are never given up", c->n_kept);
    for (uint32_t i = 0; i < c->p->n_targets; i++)
        HOLDS(c, c->flags[c->p->targets[i]] & WHOLE, "target %u (value %u) is not there at the end",
              i, c->p->targets[i]);
    return true;
}

bool koila_plan_check(const koila_plan *p, koila_error *err)
{
    const koila_graph *g = p->placed->graph;
    const size_t n_bytes = (size_t)g->values.n + 1;
    checker c = { .p = p, .g = g, .err = err };
    c.flags = koila__realloc(&p->mem, NULL, 0, n_bytes);
    if (!c.flags)
        return true; /* cannot tell */
    const bool ok = check_stages(&c);
    koila__release(&p->mem, c.flags, n_bytes);
    return ok;
}
