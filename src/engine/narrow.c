/* narrow.c — x[:, a:b] taken before the layers that are thrown away by it, not behind them.
 *
 * The usual loss of a language model is that of logits[:, :-1]. Cut along the tokens, these are
 * tokens of another axis, one shorter, so the logits would have to be whole, and their gradient
 * too: the largest values of the step. But (h @ W)[:, :-1] is h[:, :-1] @ W, and h is small.
 *
 * So the step is written down anew, with the same results:
 *   forward   calls behind the product, and it, whose rows but a .. b are read by no one, run on
 *             those alone (`WINDOW`)
 *   backward  the gradient of x[:, a:b] is zero in all other rows, and so is what linear calls make
 *             of it: they run on rows a .. b (`ZERO`), and the zeros are put around what a product
 *             makes of them. A product that adds up rows reads no others.
 * Each such call is the one that the placement says for rows a .. b of the axis (slice_call.h): the
 * rows are independent of each other, and exact as those of any slice.
 *
 * The step that results is planned in place of the recorded one, where another axis than the rows
 * is cut. It has one more axis, of b - a entries. */
#include "engine/narrow.h"

#include "engine/slice_call.h"
#include "graph/table.h"
#include "placement/rules.h"

#include <string.h>

/* Which rows of a value there are. */
typedef enum form { WHOLE, WINDOW, ZERO } form;
/* What becomes of a node: it stays; is x[:, a:b], or the gradient of that; runs on the window. */
typedef enum role { STAYS, TAKES, GRADIENT, MEMBER } role;

typedef struct narrower {
    const koila_graph *g; /* along the axis */
    koila__placed *p;     /* of g */
    koila_table *t;
    koila__reteller r; /* r.value: all rows */
    koila_plan plan;   /* for the teller */
    koila__teller teller;
    int64_t length, begin, rows; /* of the axis; the window */
    uint16_t axis;
    bool has_product;            /* one is among the members */
    uint8_t *needed;             /* [nodes] the targets need it */
    koila_node *low;             /* [nodes] the node of p that is the recorded call; KOILA_NONE */
    uint8_t *role;               /* [nodes] a `role` */
    uint8_t *form;               /* [values] a `form` */
    uint8_t *is_past;            /* [values] a product lies between it and x[:, a:b] */
    uint32_t *n_uses, *n_window; /* [values] all, and those of the window alone */
    koila_op op_slice, op_clone, op_pad;
    koila_value *window;  /* [values] of r.to, or KOILA_NONE */
    koila_placement *cut; /* [values] how `window` is cut */
} narrower;

/* ---- x[:, a:b] and its gradient */

/* An int argument of a call, counted from the front of `size` and at most that; or `otherwise`. */
static int64_t bound_at(const koila_sig_info *s, uint32_t at, int64_t size, int64_t otherwise)
{
    const int64_t i = koila__int_at(s, at, otherwise);
    const int64_t from_front = i < 0 ? i + size : i;
    return from_front > size ? size : from_front;
}

/* Does the call take rows begin .. end of dimension *dim, of `size` entries? Its arguments from
 * `first` on: dim, start, end, step. */
static bool reads_window(const koila_sig_info *s, uint32_t first, const koila_meta_info *m,
                         int64_t length, uint32_t *dim, int64_t *begin, int64_t *end)
{
    const int64_t d = bound_at(s, first, m->n_dims, 0);
    if (s->n_inputs != 1 || s->n_outputs != 1 || s->n_writes || d < 0 || d >= m->n_dims ||
        m->size[d] != length || bound_at(s, first + 3, INT64_MAX, 1) != 1)
        return false;
    *dim = (uint32_t)d;
    *begin = bound_at(s, first + 1, length, 0);
    *end = bound_at(s, first + 2, length, length);
    return *begin >= 0 && *end - *begin > 1 && *end - *begin < length;
}

/* Is node n x[:, a:b] of a value that is cut along the axis? */
static bool takes_window(const narrower *w, koila_node n, int64_t *begin, int64_t *end)
{
    const koila_sig_info *s = koila__node_sig(w->g, n);
    uint32_t dim;
    if (koila__rule_of(w->t, s->op) != koila__rule_slice || s->n_inputs != 1)
        return false;
    const koila_value x = w->g->inputs.at[w->g->nodes.at[n].first_input];
    const koila_value placed = w->p->lowered[x];
    if (placed == KOILA_NONE || w->g->values.at[x].node == KOILA_NONE)
        return false;
    const koila_placement at = w->p->value[placed];
    return reads_window(s, 1, koila__value_meta(w->g, x), w->length, &dim, begin, end) &&
           at.kind == KOILA_S && at.axis == w->axis && at.outer == 1 && at.inner == 1 &&
           at.dim == dim;
}

/* Is node n the gradient of that call? *at: how its result is cut. */
static bool is_gradient(const narrower *w, koila_node n, koila_placement *at)
{
    const koila_sig_info *s = koila__node_sig(w->g, n);
    uint32_t dim;
    int64_t begin, end;
    if (koila__rule_of(w->t, s->op) != koila__rule_slice_backward || s->n_outputs != 1 ||
        !reads_window(s, 2, koila__meta(w->t, s->outputs[0]), w->length, &dim, &begin, &end))
        return false;
    *at = (koila_placement){
        .kind = KOILA_S, .dim = (uint8_t)dim, .axis = w->axis, .outer = 1, .inner = 1
    };
    return begin == w->begin && end - begin == w->rows;
}

/* Finds the window: that of the largest value of which one is taken. */
static bool find_window(narrower *w)
{
    uint64_t most = 0;
    for (koila_node n = 0; n < w->g->nodes.n; n++) {
        int64_t begin, end;
        if (!w->needed[n] || !takes_window(w, n, &begin, &end))
            continue;
        const koila_value x = w->g->inputs.at[w->g->nodes.at[n].first_input];
        if (koila__value_meta(w->g, x)->n_bytes <= most)
            continue;
        most = koila__value_meta(w->g, x)->n_bytes;
        w->begin = begin;
        w->rows = end - begin;
    }
    return most > 0;
}

/* Finds x[:, a:b] of that window, and the gradients. */
static void find_taken(narrower *w)
{
    for (koila_node n = 0; n < w->g->nodes.n; n++) {
        const koila_value v = w->g->nodes.at[n].first_output;
        int64_t begin, end;
        if (!w->needed[n])
            continue;
        if (takes_window(w, n, &begin, &end) && begin == w->begin && end - begin == w->rows)
            w->role[n] = TAKES;
        else if (is_gradient(w, n, &w->cut[v]))
            w->role[n] = GRADIENT;
    }
}

/* ---- which calls run on the window */

static bool is_cut(const narrower *w, koila_placement x)
{
    return x.kind == KOILA_S && x.axis == w->axis;
}

static bool is_product(const narrower *w, const koila_sig_info *s)
{
    const uint32_t dense = koila_facts_dense(koila__facts_of_op(w->t, s->op));
    return dense == KOILA_FACT_DENSE_CONTRACT || dense == KOILA_FACT_DENSE_CONTRACT_BIASED;
}

/* The node of p that is node n as it was recorded, one call of one result in the loop; or
 * KOILA_NONE. */
static koila_node in_loop(const narrower *w, koila_node n)
{
    const koila_sig_info *s = koila__node_sig(w->g, n);
    const koila_node low = w->low[n];
    if (low == KOILA_NONE || s->n_outputs != 1 || koila__flags_of_op(w->t, s->op) & KOILA_OP_RANDOM)
        return KOILA_NONE;
    if (s->n_writes && (s->writes[0].n_links || s->writes[0].overwrites))
        return KOILA_NONE; /* of a part of it, or of what no one reads */
    const koila__placed_node *node = &w->p->node[low];
    const bool is_plain =
        node->in_loop && node->axis == w->axis && !node->gathered && !node->joins && !node->sums;
    return is_plain && koila__can_tell(&w->teller, low) ? low : KOILA_NONE;
}

static koila_placement need_of(const narrower *w, koila_node low, uint32_t i)
{
    return w->p->need[w->p->graph->nodes.at[low].first_input + i];
}

static koila_placement result_of(const narrower *w, koila_node low)
{
    return w->p->value[w->p->graph->nodes.at[low].first_output];
}

static bool is_zero_in(const narrower *w, koila_node n, uint32_t i)
{
    return w->form[w->g->inputs.at[w->g->nodes.at[n].first_input + i]] == ZERO;
}

/* Are the results of node n zero in rows where its input i is? */
static bool is_linear_in(const narrower *w, koila_node n, uint32_t i)
{
    const koila_sig_info *s = koila__node_sig(w->g, n);
    static const koila__rule first[] = {
        koila__rule_linear,
        koila__rule_same,
        koila__rule_cast,
        koila__rule_div,
        koila__rule_sum,
        koila__rule_softmax_backward,
        koila__rule_log_softmax_backward,
    };
    const koila__rule rule = koila__rule_of(w->t, s->op);
    if (koila__facts_of_op(w->t, s->op) & KOILA_FACT_RESHAPES || rule == koila__rule_transpose ||
        rule == koila__rule_permute || rule == koila__rule_alias)
        return true;
    if (koila_facts_dense(koila__facts_of_op(w->t, s->op)) == KOILA_FACT_DENSE_CONTRACT)
        return s->n_inputs == 2; /* a bias is not zero */
    if (rule == koila__rule_additive)
        return s->n_inputs == 2 && is_zero_in(w, n, 1 - i);
    if (rule == koila__rule_mul)
        return true;
    for (size_t k = 0; k < KOILA_COUNT(first); k++)
        if (rule == first[k])
            return i == 0;
    return false;
}

/* Is what node n makes of values that are zero outside the window zero there too, or a sum over
 * rows? */
static bool keeps_zero(const narrower *w, koila_node n)
{
    const koila_sig_info *s = koila__node_sig(w->g, n);
    const koila_node low = in_loop(w, n);
    if (low == KOILA_NONE)
        return false;
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value v = w->g->inputs.at[w->g->nodes.at[n].first_input + i];
        const koila_placement need = need_of(w, low, i);
        if (w->form[v] != ZERO && (need.kind == KOILA_R || is_cut(w, need)))
            continue;
        /* small enough for zeros to be put around it */
        const bool is_end = w->is_past[v] && need.outer == 1;
        if (!is_cut(w, need) || !is_linear_in(w, n, i) || is_end)
            return false;
    }
    const koila_placement out = result_of(w, low);
    return is_cut(w, out) || (out.kind == KOILA_P && out.combine == KOILA_SUM);
}

/* What is zero outside the window, from the gradients of x[:, a:b] on. */
static void find_zero(narrower *w)
{
    for (koila_node n = 0; n < w->g->nodes.n; n++) {
        const koila_sig_info *s = koila__node_sig(w->g, n);
        const koila_node_info *info = &w->g->nodes.at[n];
        bool any = false;
        bool is_past = is_product(w, s);
        if (w->role[n] == GRADIENT)
            w->form[info->first_output] = ZERO;
        if (!w->needed[n] || w->role[n] != STAYS)
            continue;
        for (uint32_t i = 0; i < s->n_inputs; i++) {
            const koila_value v = w->g->inputs.at[info->first_input + i];
            any |= w->form[v] == ZERO;
            is_past |= w->form[v] == ZERO && w->is_past[v];
        }
        if (!any || !keeps_zero(w, n))
            continue;
        w->role[n] = MEMBER;
        w->has_product |= is_product(w, s);
        if (!is_cut(w, result_of(w, w->low[n])))
            continue;
        w->form[info->first_output] = ZERO;
        w->cut[info->first_output] = result_of(w, w->low[n]);
        w->is_past[info->first_output] = is_past;
    }
}

/* Node n, a member, reads the window of what it needs in rows. */
static void read_window(narrower *w, koila_node n, bool is_past)
{
    const koila_node_info *info = &w->g->nodes.at[n];
    const uint32_t n_inputs = koila__node_sig(w->g, n)->n_inputs;
    for (uint32_t i = 0; i < n_inputs; i++) {
        const koila_value v = w->g->inputs.at[info->first_input + i];
        if (w->form[v] == ZERO || !is_cut(w, need_of(w, w->low[n], i)))
            continue;
        w->n_window[v]++;
        w->is_past[v] |= is_past;
    }
}

/* Is node n, all of whose uses read the window, made on that alone? */
static bool keeps_window(const narrower *w, koila_node n)
{
    const koila_sig_info *s = koila__node_sig(w->g, n);
    const koila_value v = w->g->nodes.at[n].first_output;
    const koila_node low = in_loop(w, n);
    if (low == KOILA_NONE || !w->n_window[v] || w->n_window[v] != w->n_uses[v])
        return false;
    const koila_placement out = result_of(w, low);
    if (!is_cut(w, out) || (w->is_past[v] && out.outer == 1))
        return false;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if (need_of(w, low, i).kind != KOILA_R && !is_cut(w, need_of(w, low, i)))
            return false;
    return true;
}

/* What no one reads outside the window, from its readers back to the product. */
static void find_windows(narrower *w)
{
    for (koila_node n = w->g->nodes.n; n-- > 0;) {
        const koila_node_info *info = &w->g->nodes.at[n];
        const bool multiplies = is_product(w, koila__node_sig(w->g, n));
        if (!w->needed[n])
            continue;
        if (w->role[n] == TAKES) {
            w->n_window[w->g->inputs.at[info->first_input]]++;
        } else if (w->role[n] == MEMBER) {
            read_window(w, n, multiplies);
        } else if (w->role[n] == STAYS && keeps_window(w, n)) {
            w->role[n] = MEMBER;
            w->form[info->first_output] = WINDOW;
            w->has_product |= multiplies;
            read_window(w, n, multiplies || w->is_past[info->first_output]);
        }
    }
}

/* ---- the step anew */

/* A tensor of that meta that is `in` in entries begin .. begin + n of dimension d, else zero. */
static koila_status append_pad(narrower *w, koila_value in, koila_meta meta, uint32_t d,
                               int64_t begin, int64_t n, koila_value *out)
{
    const koila_meta_info *m = koila__meta(w->t, meta);
    koila_arg args[KOILA_MAX_DIMS + 5];
    uint32_t n_args = 0;
    args[n_args++] = (koila_arg){ .kind = KOILA_ARG_LIST, .n = m->n_dims };
    for (uint32_t i = 0; i < m->n_dims; i++)
        args[n_args++] = koila__int_arg(m->size[i]);
    args[n_args++] = koila__int_arg(d);
    args[n_args++] = koila__int_arg(begin);
    args[n_args++] = koila__int_arg(begin + n);
    args[n_args++] = koila__int_arg(1);
    KOILA_TRY(koila_table_meta(w->t, m->dtype, m->device, m->n_dims, m->size, NULL, &meta));
    return koila__retell_on(&w->r, w->op_pad, in, args, 5, n_args, meta, out);
}

/* Puts zeros around the window of v. */
static koila_status pad(narrower *w, koila_value v, koila_value *out)
{
    const koila_placement at = w->cut[v];
    if (at.outer != 1)
        return KOILA_UNSUPPORTED;
    return append_pad(w, w->window[v], w->g->values.at[v].meta, at.dim, w->begin * at.inner,
                      w->rows * at.inner, out);
}

/* All rows of v. */
static koila_status whole_of(narrower *w, koila_value v, koila_value *out)
{
    if (w->r.value[v] == KOILA_NONE && w->form[v] != ZERO)
        return KOILA_UNSUPPORTED;
    if (w->r.value[v] == KOILA_NONE)
        KOILA_TRY(pad(w, v, &w->r.value[v]));
    *out = w->r.value[v];
    return KOILA_OK;
}

/* The window of v, cut so; dense. */
static koila_status window_of(narrower *w, koila_value v, koila_placement at, koila_value *out)
{
    koila_value whole;
    koila_meta meta;
    *out = w->window[v];
    if (*out != KOILA_NONE)
        return w->form[v] != WHOLE || koila__placement_equal(w->cut[v], at) ? KOILA_OK
                                                                            : KOILA_UNSUPPORTED;
    if (at.outer != 1)
        return KOILA_UNSUPPORTED;
    KOILA_TRY(whole_of(w, v, &whole));
    const koila_meta_info *m = koila__value_meta(w->r.to, whole);
    const koila_arg args[] = { koila__int_arg(at.dim), koila__int_arg(w->begin * at.inner),
                               koila__int_arg((w->begin + w->rows) * at.inner), koila__int_arg(1) };
    int64_t size[KOILA_MAX_DIMS];
    memcpy(size, m->size, m->n_dims * sizeof *size);
    size[at.dim] = w->rows * at.inner;
    KOILA_TRY(koila_table_meta(w->t, m->dtype, m->device, m->n_dims, size, m->stride, &meta));
    KOILA_TRY(koila__retell_on(&w->r, w->op_slice, whole, args, 4, 4, meta, out));
    if (!koila_meta_is_dense(koila__meta(w->t, meta))) {
        KOILA_TRY(koila__dense_meta(w->t, meta, &meta));
        KOILA_TRY(koila__retell_on(&w->r, w->op_clone, *out, NULL, 0, 0, meta, out));
    }
    w->window[v] = *out;
    w->cut[v] = at;
    return KOILA_OK;
}

/* in[] and metas[] of node n. */
static koila_status find_inputs(narrower *w, koila_node n, koila_value *in, koila_meta *metas)
{
    const koila_node_info *info = &w->g->nodes.at[n];
    const uint32_t n_inputs = koila__node_sig(w->g, n)->n_inputs;
    for (uint32_t i = 0; i < n_inputs; i++) {
        const koila_value v = w->g->inputs.at[info->first_input + i];
        const bool is_narrow = w->role[n] == MEMBER && is_cut(w, need_of(w, w->low[n], i));
        if (is_narrow)
            KOILA_TRY(window_of(w, v, need_of(w, w->low[n], i), &in[i]));
        else
            KOILA_TRY(whole_of(w, v, &in[i]));
        metas[i] = w->r.to->values.at[in[i]].meta;
    }
    return KOILA_OK;
}

/* Node n, the gradient of x[:, a:b]: its window is what it is given, laid out as it makes it. */
static koila_status write_gradient(narrower *w, koila_node n)
{
    const koila_node_info *info = &w->g->nodes.at[n];
    const koila_value v = info->first_output;
    koila_value in;
    koila_meta meta;
    KOILA_TRY(whole_of(w, w->g->inputs.at[info->first_input], &in));
    KOILA_TRY(koila__tell_meta(&w->teller, w->g->values.at[v].meta, w->cut[v], &meta));
    w->window[v] = in;
    if (w->r.to->values.at[in].meta == meta)
        return KOILA_OK;
    return append_pad(w, in, meta, w->cut[v].dim, 0, w->rows, &w->window[v]);
}

/* Node n, which runs on the window. */
static koila_status write_member(narrower *w, koila_node n, const koila_value *in,
                                 const koila_meta *metas)
{
    const koila_value v = w->g->nodes.at[n].first_output;
    koila__slice_call call;
    koila_value first;
    KOILA_TRY(koila__tell_call(&w->teller, w->low[n], metas, &call));
    if (call.n_shares)
        return KOILA_UNSUPPORTED;
    if (call.is_alias)
        first = in[0];
    else
        KOILA_TRY(koila__retell(&w->r, call.sig, in, &first));
    *(w->form[v] == WHOLE ? &w->r.value[v] : &w->window[v]) = first;
    return KOILA_OK;
}

static koila_status write_node(narrower *w, koila_node n)
{
    const koila_node_info *info = &w->g->nodes.at[n];
    const koila_sig_info *s = koila__node_sig(w->g, n);
    koila_value *in = koila__arena_array(&w->r.tmp, s->n_inputs, sizeof *in);
    koila_meta *metas = koila__arena_array(&w->r.tmp, s->n_inputs, sizeof *metas);
    TRY_ALLOC(in && metas);
    w->r.now = n;
    if (w->role[n] == GRADIENT)
        return write_gradient(w, n);
    if (w->role[n] == TAKES && w->window[w->g->inputs.at[info->first_input]] != KOILA_NONE) {
        w->r.value[info->first_output] = w->window[w->g->inputs.at[info->first_input]];
        return KOILA_OK;
    }
    KOILA_TRY(find_inputs(w, n, in, metas));
    if (w->role[n] == MEMBER)
        return write_member(w, n, in, metas);
    return koila__retell_as_it_is(&w->r, in);
}

static koila_status write_step(narrower *w, const koila_value *targets, uint32_t n_targets,
                               koila__retold *out)
{
    koila_value *again = koila__arena_array(&w->r.tmp, n_targets, sizeof *again);
    TRY_ALLOC(again);
    for (koila_node n = 0; n < w->g->nodes.n; n++) {
        const koila__mark before = koila__arena_mark(&w->r.tmp);
        if (w->needed[n])
            KOILA_TRY(write_node(w, n));
        koila__arena_rewind(&w->r.tmp, before);
    }
    for (uint32_t i = 0; i < n_targets; i++)
        KOILA_TRY(whole_of(w, targets[i], &again[i]));
    return koila__reteller_finish(&w->r, again, n_targets, out);
}

/* ---- the whole */

static koila_status make_room(narrower *w)
{
    const size_t n_nodes = w->g->nodes.n;
    const size_t n_values = w->g->values.n;
    const koila__op_named of[] = { { &w->op_slice, "aten::slice.Tensor", KOILA_OP_VIEW },
                                   { &w->op_clone, "aten::clone", 0 },
                                   { &w->op_pad, "aten::slice_backward", 0 } };
    KOILA_TRY(koila__find_ops(w->t, of, KOILA_COUNT(of)));
    w->needed = koila__arena_array(&w->r.tmp, n_nodes, 1);
    w->role = koila__arena_array(&w->r.tmp, n_nodes, 1);
    w->low = koila__arena_array(&w->r.tmp, n_nodes, sizeof *w->low);
    w->form = koila__arena_array(&w->r.tmp, n_values, 1);
    w->is_past = koila__arena_array(&w->r.tmp, n_values, 1);
    w->n_uses = koila__arena_array(&w->r.tmp, n_values, sizeof *w->n_uses);
    w->n_window = koila__arena_array(&w->r.tmp, n_values, sizeof *w->n_window);
    w->window = koila__arena_array(&w->r.tmp, n_values, sizeof *w->window);
    w->cut = koila__arena_array(&w->r.tmp, n_values, sizeof *w->cut);
    TRY_ALLOC(w->needed && w->role && w->low && w->form && w->is_past && w->n_uses && w->n_window &&
              w->window && w->cut);
    memset(w->low, 0xff, n_nodes * sizeof *w->low);
    memset(w->window, 0xff, n_values * sizeof *w->window);
    return KOILA_OK;
}

static void find_uses(narrower *w, const koila_value *targets, uint32_t n_targets)
{
    for (koila_node low = 0; low < w->p->graph->nodes.n; low++) {
        const koila_node n = w->p->node[low].recorded;
        w->needed[n] = true;
        if (w->low[n] == KOILA_NONE && w->p->graph->nodes.at[low].sig == w->g->nodes.at[n].sig)
            w->low[n] = low;
    }
    for (koila_node n = 0; n < w->g->nodes.n; n++)
        for (uint32_t i = 0; w->needed[n] && i < koila__node_sig(w->g, n)->n_inputs; i++)
            w->n_uses[w->g->inputs.at[w->g->nodes.at[n].first_input + i]]++;
    for (uint32_t i = 0; i < n_targets; i++)
        w->n_uses[targets[i]]++;
}

static bool has_length(const koila__axis *axis, int64_t length)
{
    bool has = axis->rows == length;
    for (uint32_t i = 0; i < axis->n_others; i++)
        has |= axis->others[i] == length;
    return has;
}

/* Does node n take rows of a dimension of `length` of a computed value? *n_rows: how many. */
static bool may_take(const koila_graph *g, koila_node n, int64_t length, int64_t *n_rows)
{
    const koila_sig_info *s = koila__node_sig(g, n);
    uint32_t dim;
    int64_t begin, end;
    if (koila__rule_of(g->table, s->op) != koila__rule_slice || s->n_inputs != 1)
        return false;
    const koila_value x = g->inputs.at[g->nodes.at[n].first_input];
    const bool takes = g->values.at[x].node != KOILA_NONE &&
                       reads_window(s, 1, koila__value_meta(g, x), length, &dim, &begin, &end);
    *n_rows = takes ? end - begin : 0;
    return takes;
}

static bool may_narrow(const koila_graph *g, int64_t length)
{
    int64_t n_rows;
    for (koila_node n = 0; n < g->nodes.n; n++)
        if (may_take(g, n, length, &n_rows))
            return true;
    return false;
}

void koila__narrow_lengths(const koila_graph *g, koila__axis *axis)
{
    for (koila_node n = 0; n < g->nodes.n; n++)
        for (uint32_t i = 0; i <= axis->n_others && axis->n_others < KOILA__MOST_LENGTHS; i++) {
            int64_t n_rows;
            if (may_take(g, n, i ? axis->others[i - 1] : axis->rows, &n_rows) &&
                n_rows > axis->rows / KOILA__SHORT_AXIS && !has_length(axis, n_rows))
                axis->others[axis->n_others++] = n_rows;
        }
}

static koila_status narrow(narrower *w, const koila_value *targets, uint32_t n_targets,
                           koila__retold *out, bool *takes_rows)
{
    KOILA_TRY(make_room(w));
    find_uses(w, targets, n_targets);
    if (!find_window(w))
        return KOILA_UNSUPPORTED;
    *takes_rows = true;
    w->teller.begin = w->begin;
    w->teller.rows = w->rows;
    find_taken(w);
    find_zero(w);
    find_windows(w);
    return w->has_product ? write_step(w, targets, n_targets, out) : KOILA_UNSUPPORTED;
}

koila_status koila__narrow(const koila_graph *g, const koila__along *along, uint16_t axis,
                           const koila_value *targets, uint32_t n_targets,
                           const koila_allocator *mem, koila__retold *out, bool *takes_rows)
{
    narrower w = {
        .g = &along->graph, .t = g->table, .length = along->graph.axes.at[axis], .axis = axis
    };
    *out = (koila__retold){ .graph = NULL };
    *takes_rows = false;
    if (!may_narrow(g, w.length))
        return KOILA_OK;
    koila_status status = koila__place_along(w.g, along->seeds, along->graph.axes.n > 1, targets,
                                             n_targets, mem, &w.p, NULL);
    if (status != KOILA_OK)
        return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
    w.plan.placed = w.p;
    status = koila__reteller_init(&w.r, g, mem);
    w.teller = (koila__teller){ .plan = &w.plan, .table = w.t, .mem = w.r.mem, .tmp = &w.r.tmp };
    if (status == KOILA_OK)
        status = narrow(&w, targets, n_targets, out, takes_rows);
    koila__vec_free(&w.r.mem, &w.teller.tokens);
    koila__reteller_deinit(&w.r);
    koila__placed_free(w.p);
    return status == KOILA_UNSUPPORTED ? KOILA_OK : status;
}
