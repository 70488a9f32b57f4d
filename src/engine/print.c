/* print.c — a plan as a table of stages and instructions, and plans and graphs as drawings for
 * Graphviz. It reads the plan through koila/plan.h only, so it shows exactly what an executor gets.
 *
 *   5 slices of 7 rows (batch 32), 2 loops, every operator 1.00 times, peak 12.3 MiB at
 *       aten::mm (train.py:12)
 *   stage 0: loop over axis 0, 5 slices of 7 rows, the last of 4, peak 12.3 MiB
 *     slice  %0  S0
 *     run    %3 S0 = aten::mm(%0, %2)                            f32[32, 16]   train.py:12
 *     add    %9 P  its storage becomes the whole one
 *     free   %0 %3
 */
#include "graph/graph_text.h"

#include "koila/plan.h"

static void out_bytes(koila__out *o, uint64_t n)
{
    if (n >= (uint64_t)1 << 30)
        koila__out_fmt(o, "%.2f GiB", (double)n / (double)(1 << 30));
    else if (n >= 1 << 20)
        koila__out_fmt(o, "%.1f MiB", (double)n / (1 << 20));
    else if (n >= 1 << 10)
        koila__out_fmt(o, "%.1f KiB", (double)n / (1 << 10));
    else
        koila__out_fmt(o, "%llu B", (unsigned long long)n);
}

/* S0, S1(outer 4, inner 2), P, P(max); nothing for whole. */
static void out_share(koila__out *o, koila_share s)
{
    static const char *const partial[] = { " P", " P(max)", " P(min)", " P(moments)" };
    if (s.kind == KOILA_SHARE_PARTIAL && s.partial == KOILA_PARTIAL_PIECE) {
        koila__out_fmt(o, " rows %lld..%lld", (long long)s.outer, (long long)s.inner - 1);
        return;
    }
    if (s.kind == KOILA_SHARE_SLICE) {
        koila__out_fmt(o, " S%u", s.dim);
        if (s.outer != 1 || s.inner != 1)
            koila__out_fmt(o, "(outer %lld, inner %lld)", (long long)s.outer, (long long)s.inner);
    } else if (s.kind == KOILA_SHARE_PARTIAL)
        koila__out_str(o, partial[s.partial & 3]);
}

static void out_line(koila__out *o, const koila_graph *g, koila_node n)
{
    const uint32_t line = g->nodes.at[n].line;
    if (line == KOILA_NONE || line >= g->lines.n)
        return;
    koila__out_str(o, koila_graph_line_file(g, line));
    koila__out_fmt(o, ":%u", koila_graph_line_number(g, line));
}

/* name(%1, 2, dim=[3]) */
static void out_call_short(koila__out *o, const koila_graph *g, koila_node n)
{
    const koila_sig_info *s = koila__node_sig(g, n);
    koila__out_str(o, koila_op_name(g->table, s->op));
    koila__out_str(o, "(");
    koila__out_arguments(o, g->table, s, koila_node_inputs(g, n), NULL);
    koila__out_str(o, ")");
}

static void out_run(koila__out *o, const koila_plan *p, const koila_instr *in)
{
    const koila_graph *g = koila_plan_graph(p);
    const koila_sig_info *s = koila__node_sig(g, in->id);
    for (uint32_t i = 0; i < s->n_outputs; i++) {
        if (s->outputs[i] == KOILA_NONE)
            continue;
        koila__out_fmt(o, "%%%u", g->nodes.at[in->id].first_output + i);
        out_share(o, koila_plan_share(p, g->nodes.at[in->id].first_output + i));
        koila__out_str(o, " ");
    }
    koila__out_str(o, "= ");
    out_call_short(o, g, in->id);
    for (uint32_t i = 0; i < s->n_outputs; i++) {
        if (s->outputs[i] == KOILA_NONE)
            continue;
        koila__out_str(o, "  ");
        koila__out_meta(o, koila__meta(g->table, s->outputs[i]));
    }
    if (in->flags & KOILA_INSTR_ADDS)
        koila__out_fmt(o, "  added to %%%u at once", in->user);
    if (in->steal)
        koila__out_str(o, "  in place");
    else if (s->n_writes)
        koila__out_str(o, "  in a copy");
    if (g->nodes.at[in->id].line != KOILA_NONE) {
        koila__out_str(o, "  ");
        out_line(o, g, in->id);
    }
}

static void out_facts(koila__out *o, const koila_plan *p)
{
    const koila_plan_info i = koila_plan_get(p);
    const koila_graph *g = koila_plan_graph(p);
    koila__out_fmt(
        o, "%u slice%s of %lld rows (batch %lld), %u loop%s, work %.2f times the recorded, peak ",
        i.n_slices, i.n_slices == 1 ? "" : "s", (long long)i.rows, (long long)i.batch, i.n_loops,
        i.n_loops == 1 ? "" : "s", i.replay_ratio);
    out_bytes(o, i.peak_bytes);
    if (i.budget_bytes != UINT64_MAX) {
        koila__out_str(o, " of ");
        out_bytes(o, i.budget_bytes);
    }
    if (i.peak_node != KOILA_NONE) {
        koila__out_str(o, " at ");
        koila__out_str(o, koila_op_name(g->table, koila__node_sig(g, i.peak_node)->op));
        if (g->nodes.at[i.peak_node].line != KOILA_NONE) {
            koila__out_str(o, " (");
            out_line(o, g, i.peak_node);
            koila__out_str(o, ")");
        }
    }
    koila__out_str(o, "\n");
    for (uint32_t k = 0; k < i.n_gathers; k++) {
        const koila_gather gather = koila_plan_gather(p, k);
        koila__out_fmt(o, "gather %%%u, ", gather.value);
        out_bytes(o, gather.bytes);
        koila__out_str(o, ", for ");
        koila__out_str(o, koila_op_name(g->table, koila__node_sig(g, gather.node)->op));
        koila__out_str(o, " ");
        out_line(o, g, gather.node);
        koila__out_str(o, "\n");
    }
}

static void out_stage_head(koila__out *o, const koila_plan *p, uint32_t k)
{
    const koila_stage *st = koila_plan_stage(p, k);
    koila__out_fmt(o, "stage %u: ", k);
    if (st->is_loop) {
        const int64_t batch = koila_graph_axis_size(koila_plan_graph(p), st->axis);
        const int64_t rows = koila_plan_axis_rows(p, st->axis);
        const uint32_t n = koila_plan_slices(p, st->axis);
        koila__out_fmt(o, "loop over axis %u, %u slice%s of %lld rows", st->axis, n,
                       n == 1 ? "" : "s", (long long)rows);
        if (rows > 0 && batch % rows && !koila_plan_has_pieces(p, st->axis))
            koila__out_fmt(o, ", the last of %lld", (long long)(batch % rows));
    } else
        koila__out_str(o, "whole, once");
    koila__out_str(o, ", peak ");
    out_bytes(o, st->peak_bytes);
}

/* How the step of one row is cut; its own instructions are left out. */
static void out_inner(koila__out *o, const koila_inner *inner)
{
    const koila_plan_info info = koila_plan_get(inner->plan);
    koila__out_fmt(o, "\n  inner  %u nodes", inner->n_nodes);
    if (info.dim != KOILA_NONE)
        koila__out_fmt(o, ", %u slices of %lld of %lld along dim %u", info.n_slices,
                       (long long)(info.rows * info.unit), (long long)(info.batch * info.unit),
                       info.dim);
    koila__out_str(o, ", peak ");
    out_bytes(o, info.peak_bytes);
}

koila_status koila_plan_print(const koila_plan *p, koila_write_fn write, void *user)
{
    koila__out o;
    koila__out_init(&o, write, user);
    out_facts(&o, p);
    for (uint32_t k = 0; k < koila_plan_get(p).n_stages; k++) {
        const koila_stage *st = koila_plan_stage(p, k);
        if (!st->n_instrs)
            continue;
        out_stage_head(&o, p, k);
        bool freeing = false;
        for (uint32_t i = 0; i < st->n_instrs; i++) {
            const koila_instr *in = &st->instrs[i];
            if (in->flags & KOILA_INSTR_TOLD)
                continue;
            if (in->kind == KOILA_DO_FREE) {
                koila__out_fmt(&o, freeing ? " %%%u" : "\n  free   %%%u", in->id);
                freeing = true;
                continue;
            }
            freeing = false;
            switch ((koila_instr_kind)in->kind) {
            case KOILA_DO_RUN:
                koila__out_str(&o, "\n  run    ");
                out_run(&o, p, in);
                break;
            case KOILA_DO_SLICE:
                koila__out_fmt(&o, "\n  slice  %%%u", in->id);
                out_share(&o, koila_plan_need(p, in->user, in->steal));
                break;
            case KOILA_DO_ADD:
                koila__out_fmt(&o, "\n  add    %%%u", in->id);
                out_share(&o, koila_plan_share(p, in->id));
                if (in->flags & KOILA_INSTR_OWNED)
                    koila__out_str(&o, ", the first becomes the whole");
                break;
            case KOILA_DO_PUT:
                koila__out_fmt(&o, "\n  put    %%%u", in->id);
                out_share(&o, koila_plan_share(p, in->id));
                break;
            case KOILA_DO_KEEP:
                koila__out_fmt(&o, "\n  keep   %%%u", in->id);
                break;
            case KOILA_DO_FETCH:
                koila__out_fmt(&o,
                               in->flags & KOILA_INSTR_LAST ? "\n  fetch  %%%u, for the last time"
                                                            : "\n  fetch  %%%u",
                               in->id);
                break;
            case KOILA_DO_INNER:
                out_inner(&o, st->inner);
                break;
            case KOILA_DO_FREE:
                break;
            }
        }
        koila__out_str(&o, "\n");
    }
    return koila__out_finish(&o);
}

/* ---- Graphviz */

/* Text inside a quoted label. */
static void out_label(koila__out *o, const char *s)
{
    for (; *s; s++) {
        if (*s == '"' || *s == '\\')
            koila__out_str(o, "\\");
        if ((unsigned char)*s >= 0x20)
            koila__out_bytes(o, s, 1);
    }
}

static void dot_leaf(koila__out *o, const koila_graph *g, koila_value v)
{
    const koila_value_info *info = &g->values.at[v];
    koila__out_fmt(o, "  v%u [shape=%s, label=\"", v,
                   info->leaf_kind == KOILA_LEAF_BATCH ? "house" : "ellipse");
    out_label(o, koila_graph_leaf_name(g, v));
    koila__out_fmt(o, " %%%u\\n", v);
    koila__out_meta(o, koila__value_meta(g, v));
    koila__out_str(o, "\"];\n");
}

static void dot_node(koila__out *o, const koila_graph *g, koila_node n)
{
    out_label(o, koila_op_name(g->table, koila__node_sig(g, n)->op));
    if (g->nodes.at[n].line != KOILA_NONE && g->nodes.at[n].line < g->lines.n) {
        koila__out_str(o, "\\n");
        out_label(o, koila_graph_line_file(g, g->nodes.at[n].line));
        koila__out_fmt(o, ":%u", koila_graph_line_number(g, g->nodes.at[n].line));
    }
    koila__out_str(o, "\"];\n");
}

koila_status koila_graph_dot(const koila_graph *g, koila_write_fn write, void *user)
{
    koila__out o;
    koila__out_init(&o, write, user);
    koila__out_str(&o, "digraph koila {\n  node [shape=box];\n");
    for (uint32_t v = 0; v < g->values.n; v++)
        if (g->values.at[v].node == KOILA_NONE)
            dot_leaf(&o, g, v);
    for (uint32_t n = 0; n < g->nodes.n; n++) {
        koila__out_fmt(&o, "  n%u [label=\"", n);
        dot_node(&o, g, n);
        for (uint32_t i = 0; i < koila__node_sig(g, n)->n_inputs; i++) {
            const koila_value v = g->inputs.at[g->nodes.at[n].first_input + i];
            if (g->values.at[v].node == KOILA_NONE)
                koila__out_fmt(&o, "  v%u -> n%u;\n", v, n);
            else {
                koila__out_fmt(&o, "  n%u -> n%u [label=\"%%%u ", g->values.at[v].node, n, v);
                koila__out_meta(&o, koila__value_meta(g, v));
                koila__out_str(&o, "\"];\n");
            }
        }
    }
    koila__out_str(&o, "}\n");
    return koila__out_finish(&o);
}

/* The drawing so far, as stage + 1: which ran a node last, which made a value whole, which keeps
 * it.
 */
typedef struct drawn {
    uint32_t *ran;          /* [node] */
    uint32_t *whole, *kept; /* [value] */
} drawn;

/* The box of stage k with the operators it runs; dashed: an earlier stage ran it too. */
static void dot_stage(koila__out *o, const koila_plan *p, uint32_t k, drawn *d)
{
    const koila_stage *st = koila_plan_stage(p, k);
    koila__out_fmt(o, "  subgraph cluster_%u {\n    label=\"", k);
    out_stage_head(o, p, k);
    koila__out_str(o, "\";\n");
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const uint32_t n = st->instrs[i].id;
        if (st->instrs[i].kind != KOILA_DO_RUN)
            continue;
        koila__out_fmt(o, "    s%un%u [%slabel=\"", k, n, d->ran[n] ? "style=dashed, " : "");
        dot_node(o, koila_plan_graph(p), n);
        d->ran[n] = k + 1;
    }
    koila__out_str(o, "  }\n");
}

/* An edge to node n from the place where stage k finds value v. */
static void dot_edge(koila__out *o, const koila_graph *g, const drawn *d, uint32_t k, koila_node n,
                     koila_value v)
{
    const koila_node q = g->values.at[v].node;
    if (q == KOILA_NONE)
        koila__out_fmt(o, "  v%u -> s%un%u;\n", v, k, n);
    else if (d->ran[q] == k + 1)
        koila__out_fmt(o, "  s%un%u -> s%un%u [label=\"%%%u\"];\n", k, q, k, n, v);
    else if (d->kept[v])
        koila__out_fmt(o, "  s%un%u -> s%un%u [color=blue, label=\"%%%u kept\"];\n", d->kept[v] - 1,
                       q, k, n, v);
    else if (d->whole[v])
        koila__out_fmt(o, "  s%un%u -> s%un%u [color=red, label=\"%%%u\"];\n", d->whole[v] - 1, q,
                       k, n, v);
    else if (d->ran[q])
        koila__out_fmt(o, "  s%un%u -> s%un%u [label=\"%%%u\"];\n", d->ran[q] - 1, q, k, n, v);
}

static void dot_edges(koila__out *o, const koila_plan *p, uint32_t k, drawn *d)
{
    const koila_graph *g = koila_plan_graph(p);
    const koila_stage *st = koila_plan_stage(p, k);
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind == KOILA_DO_ADD || in->kind == KOILA_DO_PUT)
            d->whole[in->id] = k + 1;
        if (in->kind == KOILA_DO_KEEP)
            d->kept[in->id] = k + 1;
        if (in->kind != KOILA_DO_RUN)
            continue;
        for (uint32_t u = 0; u < koila__node_sig(g, in->id)->n_inputs; u++)
            dot_edge(o, g, d, k, in->id, g->inputs.at[g->nodes.at[in->id].first_input + u]);
    }
}

koila_status koila_plan_dot(const koila_plan *p, koila_write_fn write, void *user)
{
    const koila_graph *g = koila_plan_graph(p);
    koila__arena tmp;
    koila__arena_init(&tmp, &g->mem);
    drawn d = { .ran = koila__arena_array(&tmp, g->nodes.n, sizeof *d.ran),
                .whole = koila__arena_array(&tmp, g->values.n, sizeof *d.whole),
                .kept = koila__arena_array(&tmp, g->values.n, sizeof *d.kept) };
    if (!d.ran || !d.whole || !d.kept) {
        koila__arena_deinit(&tmp);
        return KOILA_NO_MEMORY;
    }
    koila__out o;
    koila__out_init(&o, write, user);
    koila__out_str(&o, "digraph koila {\n  compound=true;\n  node [shape=box];\n");
    for (koila_value v = 0; v < g->values.n; v++)
        if (g->values.at[v].node == KOILA_NONE)
            dot_leaf(&o, g, v);
    for (uint32_t k = 0; k < koila_plan_get(p).n_stages; k++) {
        if (!koila_plan_stage(p, k)->n_instrs)
            continue;
        dot_stage(&o, p, k, &d);
        dot_edges(&o, p, k, &d);
    }
    koila__out_str(&o, "}\n");
    koila__arena_deinit(&tmp);
    return koila__out_finish(&o);
}
