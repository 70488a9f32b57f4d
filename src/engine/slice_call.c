/* slice_call.c — calls on some rows as calls of their own. What both.c tells of one row, and
 * unroll.c of each slice. */
#include "engine/slice_call.h"

#include "graph/table.h"

static bool has_no_whole(koila_placement x)
{
    return x.kind == KOILA_S && x.outer == 0 && x.inner == 0;
}

koila_status koila__tell_meta(const koila__teller *t, koila_meta meta, koila_placement x,
                              koila_meta *out)
{
    int64_t size[KOILA_MAX_DIMS], stride[KOILA_MAX_DIMS];
    *out = meta;
    if (meta == KOILA_NONE || x.kind != KOILA_S)
        return KOILA_OK;
    if (has_no_whole(x))
        return KOILA_UNSUPPORTED;
    const koila_meta_info m = *koila__meta(t->table, meta);
    const int64_t full = m.stride[x.dim] * m.size[x.dim];
    for (uint32_t d = 0; d < m.n_dims; d++)
        size[d] = d == x.dim ? koila__extent(x, t->rows) : m.size[d];
    if (koila_meta_is_dense(&m)) {
        koila_dense_strides(&m, size, stride);
    } else {
        for (uint32_t d = 0; d < m.n_dims; d++) {
            const bool is_beyond = d != x.dim && full > 0 && m.stride[d] >= full;
            stride[d] = is_beyond ? m.stride[d] / m.size[x.dim] * size[x.dim] : m.stride[d];
        }
    }
    return koila_table_meta(t->table, m.dtype, m.device, m.n_dims, size, stride, out);
}

bool koila__depends_on_place(const koila__fix *fix)
{
    for (uint32_t k = 0; k < KOILA__MAX_FIXES && fix[k].kind != KOILA__FIX_NONE; k++)
        if (fix[k].kind == KOILA__FIX_INDEX || fix[k].kind == KOILA__FIX_END ||
            fix[k].kind == KOILA__FIX_FIRST || fix[k].kind == KOILA__FIX_AFTER)
            return true;
    return false;
}

static bool is_refused(const koila__teller *t, const koila__fix *fix)
{
    return t->begin == KOILA__ANYWHERE && koila__depends_on_place(fix);
}

static uint32_t adapt(const koila__teller *t, koila_node n, int32_t link, koila_adapt *out)
{
    const int64_t begin = t->begin == KOILA__ANYWHERE ? 0 : t->begin;
    return koila_plan_adapt_at(t->plan, n, link, begin, t->rows, out);
}

/* Sets an argument of the call in t->tokens. */
static koila_status adapt_argument(koila__teller *t, const koila_sig_info *s, const koila_adapt *a)
{
    koila_arg *at = &t->tokens.at[s->start[a->arg]];
    if (a->kind == KOILA_ADAPT_INT) {
        *at = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = a->ints[0] };
        return KOILA_OK;
    }
    if (at->kind != KOILA_ARG_LIST || at->n != a->n || a->n > KOILA_MAX_DIMS)
        return KOILA_UNSUPPORTED;
    for (uint32_t i = 0; i < a->n; i++)
        at[1 + i] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = a->ints[i] };
    return KOILA_OK;
}

/* The call s with these metas of its inputs, and adapted arguments; t->tokens holds it. */
static koila_status adapt_tokens(koila__teller *t, const koila_sig_info *s,
                                 const koila_meta *inputs, const koila_adapt *adapts,
                                 uint32_t n_adapts)
{
    uint32_t n_inputs = 0;
    t->tokens.n = 0;
    for (uint32_t i = 0; i < s->n_tokens; i++) {
        koila_arg a = s->tokens[i];
        if (a.kind == KOILA_ARG_TENSOR)
            a.u.id = inputs[n_inputs++];
        if (!koila__vec_push(&t->mem, &t->tokens, a))
            return KOILA_NO_MEMORY;
    }
    for (uint32_t i = 0; i < n_adapts; i++)
        if (adapts[i].kind == KOILA_ADAPT_INTS || adapts[i].kind == KOILA_ADAPT_INT)
            KOILA_TRY(adapt_argument(t, s, &adapts[i]));
    return KOILA_OK;
}

/* Link `link` of node n's writes, from a value of meta *meta, which becomes its result's. */
static koila_status adapt_link(koila__teller *t, koila_node n, uint32_t link,
                               const koila_link *from, koila_meta *meta, koila_link *out)
{
    const koila__placed_link *placed = &t->plan->placed->node[n].link[link];
    const koila_sig_info s = *koila__sig(t->table, from->sig);
    koila_adapt adapts[KOILA_MAX_ADAPTS];
    koila_meta result;
    if (is_refused(t, placed->fix) || s.n_outputs != 1 || s.n_inputs != 1)
        return KOILA_UNSUPPORTED;
    const uint32_t n_adapts = adapt(t, n, (int32_t)link, adapts);
    for (uint32_t i = 0; i < n_adapts; i++)
        if (adapts[i].kind != KOILA_ADAPT_INTS && adapts[i].kind != KOILA_ADAPT_INT)
            return KOILA_UNSUPPORTED;
    KOILA_TRY(koila__tell_meta(t, s.outputs[0], placed->out, &result));
    KOILA_TRY(adapt_tokens(t, &s, meta, adapts, n_adapts));
    koila_sig_info call = s;
    call.tokens = t->tokens.at;
    call.outputs = &result;
    *out = (koila_link){ .output = from->output };
    *meta = result;
    return koila_table_sig(t->table, &call, &out->sig);
}

/* The writes of node n, adapted; in the arena. */
static koila_status adapt_writes(koila__teller *t, koila_node n, const koila_meta *inputs,
                                 const koila_write **out)
{
    const koila_graph *g = t->plan->placed->graph;
    const koila_sig_info *s = koila__node_sig(g, n);
    koila_write *writes = koila__arena_array(t->tmp, s->n_writes, sizeof *writes);
    uint32_t link = 0;
    *out = writes;
    if (!writes)
        return KOILA_NO_MEMORY;
    for (uint32_t w = 0; w < s->n_writes; w++) {
        const koila_write from = koila__node_sig(g, n)->writes[w];
        koila_link *links = koila__arena_array(t->tmp, from.n_links, sizeof *links);
        koila_meta meta = inputs[from.input];
        if (!links)
            return KOILA_NO_MEMORY;
        if (from.n_links && !t->plan->placed->node[n].link)
            return KOILA_UNSUPPORTED;
        for (uint32_t l = 0; l < from.n_links; l++)
            KOILA_TRY(adapt_link(t, n, link++, &from.links[l], &meta, &links[l]));
        writes[w] = from;
        writes[w].links = links;
    }
    return KOILA_OK;
}

/* A squeeze names the dimensions that had size 1 before the batch was cut. */
static koila_status tell_squeeze(koila__teller *t, const koila_sig_info *s, const koila_adapt *a,
                                 koila_meta in, koila_meta out, koila_sig *sig)
{
    koila_sig_info call = { .n_pos = 2,
                            .n_tokens = 2 + a->n,
                            .n_fresh = 1,
                            .outputs = &out,
                            .result_kind = s->result_kind,
                            .grad_mode = s->grad_mode };
    if (s->n_writes || s->n_inputs != 1)
        return KOILA_UNSUPPORTED;
    KOILA_TRY(koila_table_op(t->table, "aten::squeeze.dims", KOILA_OP_VIEW, &call.op));
    t->tokens.n = 0;
    if (!koila__vec_reserve(&t->mem, &t->tokens, 2 + a->n))
        return KOILA_NO_MEMORY;
    t->tokens.at[t->tokens.n++] = (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = in };
    t->tokens.at[t->tokens.n++] = (koila_arg){ .kind = KOILA_ARG_LIST, .n = a->n };
    for (uint32_t i = 0; i < a->n; i++)
        t->tokens.at[t->tokens.n++] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = a->ints[i] };
    call.tokens = t->tokens.at;
    return koila_table_sig(t->table, &call, sig);
}

koila_status koila__tell_share(const koila__teller *t, koila_node n, koila_meta meta,
                               koila_sig *out)
{
    const koila_graph *g = t->plan->placed->graph;
    const int64_t batch = g->axes.at[t->plan->placed->node[n].axis];
    const koila_arg tokens[] = { { .kind = KOILA_ARG_TENSOR, .u.id = meta },
                                 { .kind = KOILA_ARG_FLOAT,
                                   .u.f = (double)t->rows / (double)batch } };
    koila_sig_info call = { .n_pos = 2,
                            .n_tokens = 2,
                            .tokens = tokens,
                            .n_fresh = 1,
                            .outputs = &meta,
                            .grad_mode = koila__node_sig(g, n)->grad_mode };
    KOILA_TRY(koila_table_op(t->table, "aten::mul.Tensor", 0, &call.op));
    return koila_table_sig(t->table, &call, out);
}

bool koila__can_tell(const koila__teller *t, koila_node n)
{
    const koila__placed *p = t->plan->placed;
    const koila_sig_info *s = koila__node_sig(p->graph, n);
    const uint32_t of_module = KOILA_FACT_OPAQUE_CALL | KOILA_FACT_OPAQUE_BACKWARD;
    return !(koila__flags_of_op(t->table, s->op) & KOILA_OP_OPAQUE) &&
           !(koila__facts_of_op(t->table, s->op) & of_module) && !p->node[n].end &&
           !is_refused(t, p->node[n].fix);
}

koila_status koila__tell_call(koila__teller *t, koila_node n, const koila_meta *inputs,
                              koila__slice_call *out)
{
    const koila__placed *p = t->plan->placed;
    const koila_value first_output = p->graph->nodes.at[n].first_output;
    koila_adapt adapts[KOILA_MAX_ADAPTS];
    koila_sig_info call = *koila__node_sig(p->graph, n);
    *out = (koila__slice_call){ .sig = KOILA_NONE };
    if (!koila__can_tell(t, n))
        return KOILA_UNSUPPORTED;
    const uint32_t n_adapts = adapt(t, n, -1, adapts);
    koila_meta *outputs = koila__arena_array(t->tmp, call.n_outputs, sizeof *outputs);
    if (!outputs)
        return KOILA_NO_MEMORY;
    for (uint32_t o = 0; o < call.n_outputs; o++)
        KOILA_TRY(koila__tell_meta(t, call.outputs[o], p->value[first_output + o], &outputs[o]));
    for (uint32_t i = 0; i < n_adapts; i++) {
        if (adapts[i].kind == KOILA_ADAPT_ALIAS) {
            out->is_alias = true;
            return KOILA_OK;
        }
        if (adapts[i].kind == KOILA_ADAPT_SQUEEZE)
            return tell_squeeze(t, &call, &adapts[i], inputs[0], outputs[0], &out->sig);
        if (adapts[i].kind == KOILA_ADAPT_SCALE)
            out->shares[out->n_shares++] = adapts[i].output;
    }
    if (call.n_writes)
        KOILA_TRY(adapt_writes(t, n, inputs, &call.writes));
    KOILA_TRY(adapt_tokens(t, &call, inputs, adapts, n_adapts));
    call.tokens = t->tokens.at;
    call.outputs = outputs;
    return koila_table_sig(t->table, &call, &out->sig);
}

koila_status koila__dense_meta(koila_table *t, koila_meta meta, koila_meta *out)
{
    const koila_meta_info *m = koila__meta(t, meta);
    *out = meta;
    if (koila_meta_is_dense(m))
        return KOILA_OK;
    return koila_table_meta(t, m->dtype, m->device, m->n_dims, m->size, NULL, out);
}

koila_status koila__tell_on(koila_table *t, koila_op op, koila_meta in, const koila_arg *args,
                            uint32_t n_pos, uint32_t n_args, koila_meta out, koila_sig *sig)
{
    koila_arg tokens[2 * KOILA_MAX_DIMS + 6];
    koila_assert(n_args + 1 <= KOILA_COUNT(tokens));
    tokens[0] = (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = in };
    for (uint32_t i = 0; i < n_args; i++)
        tokens[1 + i] = args[i];
    const koila_sig_info call = { .op = op,
                                  .n_pos = n_pos + 1,
                                  .n_tokens = n_args + 1,
                                  .tokens = tokens,
                                  .n_fresh = 1,
                                  .outputs = &out };
    return koila_table_sig(t, &call, sig);
}

/* May input i have another layout than was recorded? as_strided() reads it, and so do the views
 * through which a call writes. */
static bool may_differ(const koila_table *t, const koila_sig_info *s, uint32_t i)
{
    bool is_read = koila__facts_of_op(t, s->op) & KOILA_FACT_STRIDED;
    for (uint32_t w = 0; w < s->n_writes; w++)
        is_read |= s->writes[w].input == i;
    return !is_read;
}

koila_status koila__tell_metas(koila_table *t, koila_sig id, const koila_meta *metas,
                               koila__arena *tmp, koila_sig *out)
{
    const koila_sig_info *s = koila__sig(t, id);
    bool is_same = true;
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        if (s->inputs[i] == metas[i])
            continue;
        if (!may_differ(t, s, i))
            return KOILA_UNSUPPORTED;
        is_same = false;
    }
    *out = id;
    if (is_same)
        return KOILA_OK;
    koila_arg *tokens = koila__arena_copy(tmp, s->tokens, s->n_tokens * sizeof *tokens);
    koila_sig_info call = *s;
    if (!tokens)
        return KOILA_NO_MEMORY;
    for (uint32_t i = 0, n = 0; i < s->n_tokens; i++)
        if (tokens[i].kind == KOILA_ARG_TENSOR)
            tokens[i].u.id = metas[n++];
    call.tokens = tokens;
    return koila_table_sig(t, &call, out);
}
