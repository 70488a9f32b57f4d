/* place.c — which values are whole, which are sliced, which are partial sums: one walk over the
 * recorded graph.
 *
 * For each node the placements of its inputs are known, and its operator's rule tells those of its
 * results. place_call.c places one call, attempt.c asks its rule, free_values.c places what was
 * left open until a use needed it, and placed_check.c holds the result against the equations of
 * place.h.
 *
 * The algebra follows GSPMD (Xu et al. 2021) and PyTorch DTensor; here slices run one after another
 * on one device, where theirs run on several at once.
 */
#include "placement/walk.h"

static bool lower_leaf(koila__placer *p, koila_value v, koila_value *out)
{
    const koila_value_info info = p->from->values.at[v];
    const koila_status s = koila__graph_copy_leaf(p->to, p->from, v, out);
    if (s != KOILA_OK)
        return koila__placer_fail(p, s);
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
        return koila__placer_fail(p, KOILA_NO_MEMORY);
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
        return koila__placer_fail(p, KOILA_NO_MEMORY);
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
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    for (uint32_t i = 0; i < sig->n_inputs; i++) {
        in[i] = lowered[p->from->inputs.at[info.first_input + i]];
        if (in[i] == KOILA_NONE)
            return koila__placer_fail(p, KOILA_BAD_INPUT);
    }
    p->recorded = n;
    p->line = info.line;
    return koila__placer_sig(p, info.sig, in, KOILA_NONE, lowered + info.first_output);
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
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    reach(p, targets, n_targets, lowered);
    const koila_status s = koila__graph_copy_lines(p->to, g);
    if (s != KOILA_OK)
        return koila__placer_fail(p, s);
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
        if (!koila__place_free_node(p, n))
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
            return koila__placer_fail(p, s);
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
        return koila__placer_fail(p, KOILA_NO_MEMORY);
    for (koila_node n = 0; n < p->node.n; n++) {
        const koila__placed_node *node = &p->node.at[n];
        int64_t **cut = &r->cut[node->axis];
        if (!node->end)
            continue;
        if (!*cut)
            *cut =
                koila__arena_array(p->keep, (size_t)p->to->axes.at[node->axis] + 1, sizeof **cut);
        if (!*cut)
            return koila__placer_fail(p, KOILA_NO_MEMORY);
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
        koila__placer_fail(p, KOILA_NO_MEMORY);
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
        return koila__placer_fail(p, KOILA_NO_MEMORY);
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
        koila__placer_fail(p, s != KOILA_OK ? s : KOILA_NO_MEMORY);
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
