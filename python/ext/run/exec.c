/* exec.c — a plan walked on real tensors: stages, slices, instructions (koila/plan.h).
 *
 * Out of memory. A slice that runs out is dropped and its rows are done again in halves;
 * accumulators it had already added to are remembered and skipped, completed slices are never
 * redone, and pieces it fetched are given up only when a slice is complete. What cannot be done is
 * left to the caller (run.c), with the exception set and nothing outside changed. Where other ranks
 * run the same calls at the same time (ranks.c), no rank cuts a slice alone.
 *
 * Invariant: when a slice is complete, no local value is left (koila_plan_check says it of every
 * plan).
 */
#include "run/run.h"
#include "ground/random.h"
#include "ground/shield.h"

#include "memlab/credit.h"

/* ---- values: slices, accumulators, pieces */

typedef struct piece {
    int64_t begin, end;
    PyObject *tensor;
} piece;
typedef struct pieces {
    piece *at;
    uint32_t n, n_alloc;
} pieces;

#define KOILA_MAX_GENERATORS 17 /* the CPU and 16 GPUs */

typedef struct exec {
    koila__tape *tape;
    const cached *c;
    const koila_plan *plan;
    const koila_graph *g;
    const koila_table *table;
    const koila_node *node_from; /* nodes of c->part -> nodes of the tape */
    PyObject **whole, **local, **acc;
    pieces *kept;
    /* [instrs of the stage] accumulators the failing rows had already been added to */
    uint8_t *done;
    uint32_t n_values;
    int64_t begin, end, batch; /* of the running slice; whole stage: 0, 0, 0 */
    uint64_t n_run;
    uint32_t retries;
    bool measure;
    PyObject *ranks; /* that run the same sharded calls at the same time (borrowed), NULL: none */
    bool failure_announced;  /* a rank failed, and all of them know */
    bool failed_inside_call; /* this one failed where no other can be told */
    struct used {
        PyObject *generator, *state; /* a generator of the user's, and how it was */
    } used[KOILA_MAX_GENERATORS];
    uint32_t n_used;
    struct cursor {
        /* of the generator, before element `at` of the node's result (in the order of memory) is
         * drawn */
        PyObject *state;
        int64_t at;
    } *cursors; /* [nodes], NULL until the first rows are drawn */
} exec;

static PyObject *dims_tuple(const int64_t *size, uint32_t n)
{
    PyObject *t = PyTuple_New(n);
    for (uint32_t i = 0; t && i < n; i++) {
        PyObject *x = PyLong_FromLongLong(size[i]);
        if (!x) {
            Py_CLEAR(t);
            break;
        }
        PyTuple_SET_ITEM(t, i, x);
    }
    return t;
}

static PyObject *call_ints(PyObject *fn, PyObject *t, int64_t a, int64_t b, int64_t c)
{
    return PyObject_CallFunction(fn, "OLLL", t, (long long)a, (long long)b, (long long)c);
}

/* An uninitialised tensor of meta m, with dimension `dim` of extent `extent` when extent >= 0, laid
 * out densely in m's order of dimensions. */
static PyObject *empty_like_meta(const koila_meta_info *m, int32_t dim, int64_t extent)
{
    int64_t size[KOILA_MAX_DIMS], stride[KOILA_MAX_DIMS], step = 1;
    bool used[KOILA_MAX_DIMS] = { 0 };
    for (uint32_t d = 0; d < m->n_dims; d++)
        size[d] = (int32_t)d == dim && extent >= 0 ? extent : m->size[d];
    for (uint32_t k = 0; k < m->n_dims; k++) {
        int32_t next = -1;
        for (int32_t d = m->n_dims - 1; d >= 0; d--)
            if (!used[d] && (next < 0 || m->stride[d] < m->stride[next]))
                next = d;
        used[next] = true;
        stride[next] = step;
        if (size[next] > 1)
            step *= size[next];
    }
    PyObject *args = NULL;
    PyObject *kw = NULL;
    PyObject *out = NULL;
    PyObject *s = dims_tuple(size, m->n_dims);
    PyObject *t = dims_tuple(stride, m->n_dims);
    PyObject *dtype = koila__dtype_object(m->dtype);
    PyObject *device = koila__device_object(m->device);
    if (s && t && dtype && device && (args = PyTuple_Pack(2, s, t)) && (kw = PyDict_New()) &&
        PyDict_SetItemString(kw, "dtype", dtype) == 0 &&
        PyDict_SetItemString(kw, "device", device) == 0)
        out = PyObject_Call(koila__torch.empty_strided, args, kw);
    Py_XDECREF(s);
    Py_XDECREF(t);
    Py_XDECREF(args);
    Py_XDECREF(kw);
    return out;
}

/* The view of whole tensor t that rows [begin, end) own, as share says. New reference. */
static PyObject *rows_of(PyObject *t, koila_share s, int64_t batch, int64_t begin, int64_t end)
{
    if (s.outer == 1)
        return call_ints(koila__torch.narrow, t, s.dim, begin * s.inner, (end - begin) * s.inner);
    PyObject *sizes = Py_BuildValue("(LL)", (long long)s.outer, (long long)(batch * s.inner));
    PyObject *split =
        sizes ? PyObject_CallFunction(koila__torch.unflatten, "OiO", t, (int)s.dim, sizes) : NULL;
    PyObject *rows = split ? call_ints(koila__torch.narrow, split, s.dim + 1, begin * s.inner,
                                       (end - begin) * s.inner)
                           : NULL;
    Py_XDECREF(sizes);
    Py_XDECREF(split);
    return rows; /* [..., outer, rows * inner, ...] */
}

static bool is_dense(const koila_meta_info *m) { return m->n_storage_bytes == m->n_bytes; }

/* local v := rows of whole v. A dense value stays dense, so that the views recorded on it can be
 * taken of the slice too. */
static PyObject *slice_value(exec *x, koila_value v, koila_share s)
{
    const koila_meta_info *m = koila_meta_get(x->table, koila_value_get(x->g, v).meta);
    PyObject *rows = rows_of(x->whole[v], s, x->batch, x->begin, x->end);
    if (!rows || (s.outer == 1 && x->begin == 0 && x->end == x->batch))
        return rows;
    bool outermost = s.outer == 1 && is_dense(m);
    for (uint32_t d = 0; d < m->n_dims && outermost; d++)
        if (d != s.dim && m->size[d] > 1 && m->stride[d] > m->stride[s.dim])
            outermost = false;
    if (outermost || (s.outer == 1 && !is_dense(m)))
        return rows;
    PyObject *flat = rows;
    if (s.outer > 1) {
        flat = PyObject_CallFunction(koila__torch.flatten, "Oii", rows, (int)s.dim, (int)s.dim + 1);
        Py_DECREF(rows);
        if (!flat || !is_dense(m))
            return flat;
    }
    PyObject *dense = empty_like_meta(m, s.dim, s.outer * s.inner * (x->end - x->begin));
    PyObject *done =
        dense ? PyObject_CallFunctionObjArgs(koila__torch.copy_, dense, flat, NULL) : NULL;
    Py_DECREF(flat);
    Py_XDECREF(done);
    if (!done)
        Py_CLEAR(dense);
    return dense;
}

static int put_value(exec *x, koila_value v, bool owned)
{
    const koila_share s = koila_plan_share(x->plan, v);
    const koila_meta_info *m = koila_meta_get(x->table, koila_value_get(x->g, v).meta);
    if (!x->acc[v]) {
        /* not owned: somebody may still write to it in place */
        if (owned && x->begin == 0 && x->end == x->batch) {
            Py_INCREF(x->local[v]);
            x->acc[v] = x->local[v];
            return 0;
        }
        koila_meta_info like = *m;
        int64_t contiguous[KOILA_MAX_DIMS];
        if (!is_dense(m)) {
            for (int64_t d = m->n_dims - 1, step = 1; d >= 0; d--) {
                contiguous[d] = step;
                step *= m->size[d] ? m->size[d] : 1;
            }
            like.stride = contiguous;
        }
        if (!(x->acc[v] = empty_like_meta(&like, -1, -1)))
            return -1;
    }
    PyObject *rows = rows_of(x->acc[v], s, x->batch, x->begin, x->end);
    PyObject *source = x->local[v];
    PyObject *split = NULL;
    PyObject *done = NULL;
    if (rows && s.outer > 1) {
        PyObject *sizes =
            Py_BuildValue("(LL)", (long long)s.outer, (long long)((x->end - x->begin) * s.inner));
        source = split = sizes ? PyObject_CallFunction(koila__torch.unflatten, "OiO", x->local[v],
                                                       (int)s.dim, sizes)
                               : NULL;
        Py_XDECREF(sizes);
    }
    if (rows && source)
        done = PyObject_CallFunctionObjArgs(koila__torch.copy_, rows, source, NULL);
    Py_XDECREF(rows);
    Py_XDECREF(split);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int add_value(exec *x, koila_value v, bool owned)
{
    const koila_share s = koila_plan_share(x->plan, v);
    const koila_meta_info *m = koila_meta_get(x->table, koila_value_get(x->g, v).meta);
    PyObject *mine = x->local[v];
    PyObject *sum = NULL;
    const bool half = m->dtype == KOILA_DTYPE_F16 || m->dtype == KOILA_DTYPE_BF16;
    if (!x->acc[v]) {
        if (half && s.kind == KOILA_SHARE_PARTIAL && s.partial == KOILA_PARTIAL_SUM &&
            !(x->begin == 0 && x->end == x->batch)) {
            PyObject *args = PyTuple_Pack(1, mine);
            PyObject *kw = PyDict_New();
            if (args && kw && PyDict_SetItemString(kw, "dtype", koila__torch.float32) == 0)
                sum = PyObject_Call(koila__torch.to_copy, args, kw);
            Py_XDECREF(args);
            Py_XDECREF(kw);
        } else if (owned) {
            Py_INCREF(mine);
            sum = mine;
        } else
            sum = PyObject_CallFunctionObjArgs(koila__torch.clone, mine, NULL);
        x->acc[v] = sum;
        return sum ? 0 : -1;
    }
    if (s.kind != KOILA_SHARE_PARTIAL)
        return 0; /* the same in every slice */
    switch ((koila_partial_kind)s.partial) {
    case KOILA_PARTIAL_SUM:
        sum = PyObject_CallFunctionObjArgs(koila__torch.add_, x->acc[v], mine, NULL);
        Py_XDECREF(sum);
        return sum ? 0 : -1;
    case KOILA_PARTIAL_MAX:
        sum = PyObject_CallFunctionObjArgs(koila__torch.maximum, x->acc[v], mine, NULL);
        break;
    case KOILA_PARTIAL_MIN:
        sum = PyObject_CallFunctionObjArgs(koila__torch.minimum, x->acc[v], mine, NULL);
        break;
    case KOILA_PARTIAL_MOMENTS: {
        PyObject *combine = koila__pseudo_object("koila::combine_moments");
        if (combine)
            sum = PyObject_CallFunctionObjArgs(combine, x->acc[v], mine, NULL);
        break;
    }
    }
    if (!sum)
        return -1;
    Py_SETREF(x->acc[v], sum);
    return 0;
}

static int keep_value(exec *x, koila_value v)
{
    pieces *p = &x->kept[v];
    if (p->n == p->n_alloc) {
        const uint32_t n = p->n_alloc ? p->n_alloc * 2 : 8;
        piece *grown = PyMem_RawRealloc(p->at, n * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return -1;
        }
        p->at = grown;
        p->n_alloc = n;
    }
    Py_INCREF(x->local[v]);
    p->at[p->n++] = (piece){ x->begin, x->end, x->local[v] };
    return 0;
}

/* local v := the kept rows [begin, end): one piece as it is, or cut and joined when an out of
 * memory changed the slices meanwhile. */
static PyObject *fetch_value(exec *x, koila_value v)
{
    const koila_share s = koila_plan_share(x->plan, v);
    pieces *p = &x->kept[v];
    for (uint32_t i = 0; i < p->n; i++)
        if (p->at[i].begin == x->begin && p->at[i].end == x->end) {
            Py_INCREF(p->at[i].tensor);
            return p->at[i].tensor;
        }
    PyObject *list = PyList_New(0);
    PyObject *joined = NULL;
    for (int64_t at = x->begin; list && at < x->end;) {
        const piece *found = NULL;
        for (uint32_t i = 0; i < p->n && !found; i++)
            if (p->at[i].begin <= at && at < p->at[i].end)
                found = &p->at[i];
        if (!found) {
            PyErr_Format(PyExc_SystemError, "koila: rows %lld of a kept value are missing",
                         (long long)at);
            Py_CLEAR(list);
            break;
        }
        const int64_t end = found->end < x->end ? found->end : x->end;
        PyObject *rows = rows_of(found->tensor, s, found->end - found->begin, at - found->begin,
                                 end - found->begin);
        if (!rows || PyList_Append(list, rows) < 0)
            Py_CLEAR(list);
        Py_XDECREF(rows);
        at = end;
    }
    if (list)
        joined = PyObject_CallFunction(koila__torch.cat, "Oi", list,
                                       (int)(s.outer > 1 ? s.dim + 1 : s.dim));
    Py_XDECREF(list);
    if (joined && s.outer > 1) {
        PyObject *flat =
            PyObject_CallFunction(koila__torch.flatten, "Oii", joined, (int)s.dim, (int)s.dim + 1);
        Py_SETREF(joined, flat);
    }
    return joined;
}

/* Pieces of v that lie in [begin, end) are given up. */
static void give_up(exec *x, koila_value v, int64_t begin, int64_t end)
{
    pieces *p = &x->kept[v];
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n; i++)
        if (p->at[i].begin >= begin && p->at[i].end <= end)
            Py_DECREF(p->at[i].tensor);
        else
            p->at[n++] = p->at[i];
    p->n = n;
}

/* ---- one node */

/* The generator will be moved: remember once how it was. */
static int borrow_generator(exec *x, PyObject *generator)
{
    for (uint32_t i = 0; i < x->n_used; i++)
        if (x->used[i].generator == generator)
            return 0;
    if (x->n_used == KOILA_MAX_GENERATORS) {
        PyErr_SetString(PyExc_RuntimeError,
                        "koila: random operators on more than 17 devices in one step");
        return -1;
    }
    PyObject *state = koila__generator_get(generator);
    if (!state)
        return -1;
    x->used[x->n_used++] = (struct used){ Py_NewRef(generator), state };
    return 0;
}

/* Rows of a random node whose draws follow memory: the generator is moved to where they are. 0
 * done, 1 not possible for this layout, -1 an exception. */
static int draw_rows(exec *x, koila_node n, const tape_random *random, const koila_sig_info *s,
                     koila_value v)
{
    const koila_share share = koila_plan_share(x->plan, v);
    const koila_meta_info *m = koila_meta_get(x->table, s->inputs[0]);
    const int64_t rows = x->end - x->begin;
    int64_t n_blocks = share.outer;
    int64_t unit = share.inner; /* the whole in memory: n_blocks times batch times unit elements */
    if (!is_dense(m))
        return 1;
    for (uint32_t d = 0; d < m->n_dims; d++) {
        if (d == share.dim || m->size[d] <= 1)
            continue;
        if (m->stride[d] > m->stride[share.dim])
            n_blocks *= m->size[d];
        else
            unit *= m->size[d];
    }
    if (!x->cursors &&
        !(x->cursors = PyMem_Calloc(koila_graph_n_nodes(x->g), sizeof *x->cursors))) {
        PyErr_NoMemory();
        return -1;
    }
    struct cursor *c = &x->cursors[n];
    PyObject *local = empty_like_meta(m, share.dim, share.outer * share.inner * rows);
    PyObject *flat = local ? PyObject_CallFunction(koila__torch.as_strided, "O(L)(i)", local,
                                                   (long long)(n_blocks * rows * unit), 1)
                           : NULL;
    int status = flat ? 0 : -1;
    for (int64_t b = 0; b < n_blocks && status == 0; b++) {
        const int64_t at = (b * x->batch + x->begin) * unit;
        if (!c->state || c->at > at) {
            Py_XSETREF(c->state, Py_NewRef(random->state));
            c->at = 0;
        }
        PyObject *part = call_ints(koila__torch.narrow, flat, 0, b * rows * unit, rows * unit);
        PyObject *out = NULL;
        PyObject *state =
            part ? koila__generator_skipped(c->state, (uint64_t)(at - c->at) * random->words)
                 : NULL;
        if (!state || koila__generator_set(random->generator, state) < 0 ||
            koila__call(koila_node_get(x->g, n).sig, &part, NULL, NULL, &out) < 0)
            status = -1;
        Py_XDECREF(part);
        Py_XDECREF(out);
        Py_XDECREF(state);
        Py_XSETREF(c->state, status == 0 ? koila__generator_get(random->generator) : NULL);
        c->at = at + rows * unit;
        if (!c->state)
            status = -1;
    }
    Py_XDECREF(flat);
    if (status == 0)
        x->local[v] = local;
    else
        Py_XDECREF(local);
    return status;
}

/* A random node on a slice draws what eager draws for the whole batch, from the state recorded
 * before its draw, and takes its rows; or, where it can, only those. */
static int run_random_rows(exec *x, koila_node n, const tape_random *random,
                           const koila_sig_info *s, koila_value first)
{
    if (random->words) {
        const int drawn = draw_rows(x, n, random, s, first);
        if (drawn <= 0)
            return drawn;
    }
    if (koila__generator_set(random->generator, random->state) < 0)
        return -1;
    PyObject *base = NULL, *out[2] = { NULL };
    int status = -1;
    const bool writes = s->n_writes == 1 && s->n_fresh == 0 && s->writes[0].overwrites;
    const bool like = s->n_writes == 0 && s->n_inputs == 1; /* reads the shape only */
    if (s->n_inputs > 1 || s->n_outputs > 2 || (s->n_inputs == 1 && !writes && !like)) {
        PyErr_Format(PyExc_RuntimeError, "koila: %s cannot be drawn in slices",
                     koila_op_name(x->table, s->op));
        return -1;
    }
    if (s->n_inputs && !(base = empty_like_meta(koila_meta_get(x->table, s->inputs[0]), -1, -1)))
        return -1;
    if (koila__call(koila_node_get(x->g, n).sig, base ? &base : NULL, NULL, NULL, out) < 0)
        goto done;
    for (uint32_t i = 0; i < s->n_outputs; i++) {
        const koila_value v = first + i;
        const koila_share share = koila_plan_share(x->plan, v);
        PyObject *rows = rows_of(out[i], share, x->batch, x->begin, x->end);
        if (rows && share.outer > 1) { /* [..., outer, rows * inner, ...] */
            PyObject *flat = PyObject_CallFunction(koila__torch.flatten, "Oii", rows,
                                                   (int)share.dim, (int)share.dim + 1);
            Py_DECREF(rows);
            rows = flat;
        }
        if (rows)
            x->local[v] = PyObject_CallFunctionObjArgs(koila__torch.clone, rows, NULL);
        Py_XDECREF(rows);
        Py_CLEAR(out[i]);
        if (!x->local[v])
            goto done;
    }
    status = 0;
done:
    Py_XDECREF(base);
    Py_XDECREF(out[0]);
    Py_XDECREF(out[1]);
    return status;
}

#define MAX_INPUTS 512

static int adapt_call(const koila_plan *plan, koila_node n, int32_t link, int64_t rows,
                      koila_adapt *adapts, koila__arg_fix *fixes, koila__call_fix *out,
                      uint32_t *n_adapts)
{
    const uint32_t k = koila_plan_adapt(plan, n, link, rows, adapts);
    out->n_fix = 0;
    out->fix = fixes;
    for (uint32_t i = 0; i < k; i++)
        if (adapts[i].kind == KOILA_ADAPT_INTS || adapts[i].kind == KOILA_ADAPT_INT)
            fixes[out->n_fix++] =
                (koila__arg_fix){ adapts[i].arg, adapts[i].n, adapts[i].kind == KOILA_ADAPT_INTS,
                                  adapts[i].ints };
    *n_adapts = k;
    return 0;
}

/* Memory from now on is for the line this node was captured on: koila.memlab's line profiler shows
 * it there. */
static void work_for_line(const exec *x, koila_node n)
{
    const koila_graph *g = x->tape->graph;
    const koila_node recorded = koila_plan_recorded(x->plan, n);
    const uint32_t line =
        recorded == KOILA_NONE ? KOILA_NONE : koila_node_get(g, x->node_from[recorded]).line;
    koila__lines_work_for(line == KOILA_NONE ? NULL : koila_graph_line_file(g, line),
                          (int)koila_graph_line_number(g, line));
    if (recorded != KOILA_NONE)
        koila__memlab_work.path =
            koila__nodes_path_of_captured(x->tape->uid, x->node_from[recorded]);
}

/* The stride of a dimension of size 1 says nothing, but some of torch's kernels guess the memory
 * order from it: batch norm's backward on the CPU takes a gradient f64[1, 3, 6, 6]{3, 1, 18, 3} for
 * one of x's order, and is silently wrong. `view` invents such strides, in a slice of one row where
 * the program had many: there the rows are put outermost again. */
static int one_row_outermost(const koila_table *table, const koila_sig_info *s, PyObject **view)
{
    const uint32_t is_view = KOILA_FACT_RESHAPES | KOILA_FACT_JOINS;
    if ((koila_op_facts(table, s->op) & is_view) != is_view)
        return 0;
    const koila_meta_info *recorded = koila_meta_get(table, s->outputs[0]), *now;
    koila_meta meta;
    if (koila__meta_of(*view, &meta) < 0)
        return -1;
    now = koila_meta_get(table, meta);
    int64_t stride[KOILA_MAX_DIMS], end = 1;
    bool moved = false;
    for (uint32_t d = 0; d < now->n_dims; d++)
        if (now->size[d] > 1 && now->size[d] * now->stride[d] > end)
            end = now->size[d] * now->stride[d];
    for (uint32_t d = 0; d < now->n_dims; d++) {
        const bool row = now->size[d] == 1 && recorded->size[d] > 1 && now->stride[d] < end;
        stride[d] = row ? end : now->stride[d];
        moved |= row;
    }
    if (!moved)
        return 0;
    PyObject *size = dims_tuple(now->size, now->n_dims);
    PyObject *strides = dims_tuple(stride, now->n_dims);
    PyObject *r = size && strides ? PyObject_CallFunctionObjArgs(koila__torch.as_strided, *view,
                                                                 size, strides, NULL)
                                  : NULL;
    Py_XDECREF(size);
    Py_XDECREF(strides);
    if (!r)
        return -1;
    Py_SETREF(*view, r);
    return 0;
}

static int run_node(exec *x, const koila_instr *in, bool in_loop)
{
    const koila_node n = in->id;
    const koila_node_info info = koila_node_get(x->g, n);
    const koila_sig_info *s = koila_sig_get(x->table, info.sig);
    const koila_value *values = koila_node_inputs(x->g, n);
    PyObject **store = in_loop ? x->local : x->whole;
    PyObject *few[16], **inputs = few, *outputs_few[8], **outputs = outputs_few, *made[16];
    uint32_t n_made = 0;
    int status = -1;
    koila_adapt adapts[KOILA_MAX_ADAPTS], link_adapts[KOILA_MAX_ADAPTS * 8];
    koila__arg_fix fixes[KOILA_MAX_ADAPTS], link_fixes[KOILA_MAX_ADAPTS * 8];
    koila__call_fix fix = { 0 }, link_fix[8] = { { 0 } };
    uint32_t n_adapts = 0, n_links = 0;
    const bool random = koila_op_flags(x->table, s->op) & KOILA_OP_RANDOM;
    x->n_run++;
    if (random) {
        const tape_random *drawn =
            koila__tape_random(x->tape, x->node_from[koila_plan_recorded(x->plan, n)]);
        if (drawn) {
            if (borrow_generator(x, drawn->generator) < 0)
                return -1;
            const koila_share share = koila_plan_share(x->plan, info.first_output);
            if (in_loop && share.kind == KOILA_SHARE_SLICE &&
                !(x->begin == 0 && x->end == x->batch))
                return run_random_rows(x, n, drawn, s, info.first_output);
            if (koila__generator_set(drawn->generator, drawn->state) < 0)
                return -1;
        }
    }
    if (s->n_inputs > 16 && !(inputs = PyMem_Malloc(s->n_inputs * sizeof *inputs))) {
        PyErr_NoMemory();
        return -1;
    }
    if (s->n_outputs > 8 && !(outputs = PyMem_Malloc(s->n_outputs * sizeof *outputs))) {
        PyErr_NoMemory();
        goto done;
    }
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value v = values[i];
        const bool whole = !in_loop || koila_plan_need(x->plan, n, i).kind == KOILA_SHARE_WHOLE;
        inputs[i] = whole ? (x->whole[v] ? x->whole[v] : x->local[v]) : x->local[v];
    }
    /* the tensor that is written: the old version itself when it is dead, else a copy */
    for (uint32_t w = 0; w < s->n_writes; w++) {
        const uint32_t at = s->writes[w].input;
        PyObject *base;
        if (in->steal >> w & 1)
            continue;
        if (s->writes[w].overwrites) {
            const koila_share out = koila_plan_share(x->plan, info.first_output + s->n_fresh + w);
            const bool cut = in_loop && out.kind == KOILA_SHARE_SLICE;
            base = empty_like_meta(koila_meta_get(x->table, s->inputs[at]), cut ? out.dim : -1,
                                   cut ? out.outer * out.inner * (x->end - x->begin) : -1);
        } else if (inputs[at])
            base = PyObject_CallFunctionObjArgs(koila__torch.clone, inputs[at], NULL);
        else {
            PyErr_Format(PyExc_SystemError, "koila: input %u of %s is missing", at,
                         koila_op_name(x->table, s->op));
            base = NULL;
        }
        if (!base)
            goto done;
        inputs[at] = made[n_made++] = base;
    }
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if (!inputs[i]) {
            PyErr_Format(PyExc_SystemError, "koila: input %u of %s is missing", i,
                         koila_op_name(x->table, s->op));
            goto done;
        }
    if (in_loop) {
        const int64_t rows = x->end - x->begin;
        for (uint32_t w = 0; w < s->n_writes; w++)
            for (uint32_t l = 0; l < s->writes[w].n_links && n_links < 8; l++, n_links++) {
                uint32_t ignored;
                adapt_call(x->plan, n, (int32_t)n_links, rows,
                           link_adapts + KOILA_MAX_ADAPTS * n_links,
                           link_fixes + KOILA_MAX_ADAPTS * n_links, &link_fix[n_links], &ignored);
            }
        adapt_call(x->plan, n, -1, rows, adapts, fixes, &fix, &n_adapts);
    }
    for (uint32_t i = 0; i < n_adapts; i++) { /* calls that become other calls */
        if (adapts[i].kind == KOILA_ADAPT_ALIAS) {
            Py_INCREF(inputs[0]);
            outputs[0] = inputs[0];
            goto made_outputs;
        }
        if (adapts[i].kind == KOILA_ADAPT_SQUEEZE) {
            PyObject *dims = dims_tuple(adapts[i].ints, adapts[i].n);
            outputs[0] = dims ? PyObject_CallFunctionObjArgs(koila__torch.squeeze_dims, inputs[0],
                                                             dims, NULL)
                              : NULL;
            Py_XDECREF(dims);
            if (!outputs[0])
                goto done;
            goto made_outputs;
        }
    }
    /* a conjugate view is a flag on the tensor, which this operator refuses */
    if (koila_op_facts(x->table, s->op) & KOILA_FACT_AS_REAL) {
        PyObject *resolved = PyObject_CallMethod(inputs[0], "resolve_conj", NULL);
        if (!resolved)
            goto done;
        inputs[0] = made[n_made++] = resolved;
    }
    if (koila__lines_enabled)
        work_for_line(x, n);
    if (koila__call(info.sig, inputs, fix.n_fix ? &fix : NULL, n_links ? link_fix : NULL, outputs) <
        0)
        goto done;
    if (in_loop && x->end - x->begin == 1 && x->batch > 1 &&
        one_row_outermost(x->table, s, outputs) < 0) {
        Py_DECREF(outputs[0]);
        goto done;
    }
made_outputs:
    for (uint32_t i = 0; i < n_adapts; i++)
        if (adapts[i].kind == KOILA_ADAPT_SCALE && outputs[adapts[i].output] &&
            x->end - x->begin != x->batch) {
            PyObject *scaled =
                PyObject_CallFunction(koila__torch.mul_, "Od", outputs[adapts[i].output],
                                      (double)(x->end - x->begin) / (double)x->batch);
            Py_XDECREF(scaled);
            if (!scaled) {
                for (uint32_t o = 0; o < s->n_outputs; o++)
                    Py_XDECREF(outputs[o]);
                goto done;
            }
        }
    for (uint32_t o = 0; o < s->n_outputs; o++) {
        if (s->outputs[o] == KOILA_NONE)
            Py_XDECREF(outputs[o]);
        else
            store[info.first_output + o] = outputs[o];
    }
    status = 0;
done:
    while (n_made)
        Py_DECREF(made[--n_made]);
    if (inputs != few)
        PyMem_Free(inputs);
    if (outputs != outputs_few)
        PyMem_Free(outputs);
    return status;
}

/* ---- one slice, one stage */

/* An operator of node n raised: what is set learns which, of which line, and on which rows. (In
 * front of Python 3.11 exceptions take no notes.) */
static void add_note(const exec *x, koila_node n, bool in_loop)
{
    PyObject *type, *value, *trace, *text, *done = NULL;
    /* tried again, or worded elsewhere */
    if (koila__is_out_of_memory() || !PyErr_ExceptionMatches(PyExc_Exception))
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    const uint32_t line = koila_node_get(x->c->part, koila_plan_recorded(x->plan, n)).line;
    const char *file = line == KOILA_NONE ? NULL : koila_graph_line_file(x->c->part, line);
    char rows[96] = "";
    if (in_loop)
        snprintf(rows, sizeof rows, ", on rows %lld to %lld of %lld", (long long)x->begin,
                 (long long)x->end - 1, (long long)x->batch);
    text =
        file
            ? PyUnicode_FromFormat(
                  "koila: raised by %s of %s:%u%s",
                  koila_op_name(x->table, koila_sig_get(x->table, koila_node_get(x->g, n).sig)->op),
                  file, koila_graph_line_number(x->c->part, line), rows)
            : NULL;
    if (text && value && PyObject_HasAttrString(value, "add_note"))
        done = PyObject_CallMethod(value, "add_note", "O", text);
    Py_XDECREF(done);
    Py_XDECREF(text);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* A call that the other ranks make now too. They are met first; inside it a budget is no limit, for
 * a rank that raised there would leave the others waiting. */
static int run_shared(exec *x, const koila_instr *in, bool in_loop)
{
    const uint64_t limit = koila__cpu_bytes_get_limit();
    if (koila__ranks_meet(x->ranks) < 0) {
        x->failure_announced = true;
        return -1;
    }
    koila__cpu_bytes_set_limit(UINT64_MAX);
    const int status = run_node(x, in, in_loop);
    koila__cpu_bytes_set_limit(limit);
    x->failed_inside_call = status < 0;
    return status;
}

static int run_instrs(exec *x, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        const koila_value v = in->id;
        int status = 0;
        switch ((koila_instr_kind)in->kind) {
        case KOILA_DO_RUN: {
            const uint64_t before = x->measure ? koila__cpu_bytes_current() : 0;
            const uint64_t old = x->measure ? koila__cpu_bytes_swap_peak(before) : 0;
            const bool shared = koila__ranks_share(x->ranks, x->g, in->id);
            status = shared ? run_shared(x, in, st->is_loop) : run_node(x, in, st->is_loop);
            if (status < 0)
                add_note(x, in->id, st->is_loop);
            if (x->measure) {
                const uint64_t peak = koila__cpu_bytes_peak();
                const uint64_t now = koila__cpu_bytes_current();
                const koila_sig sig = koila_node_get(x->g, in->id).sig;
                /* planned as no memory at all: what it took was a copy */
                const bool is_view =
                    koila_op_flags(x->table, koila_sig_get(x->table, sig)->op) & KOILA_OP_VIEW;
                if (status == 0)
                    koila__learn(sig, x->end - x->begin, x->batch,
                                 peak - (is_view && before < now ? before : now));
                if (old > peak)
                    koila__cpu_bytes_swap_peak(old);
                const uint64_t limit = koila__cpu_bytes_get_limit();
                if (shared && status == 0 && peak > limit) {
                    PyErr_Format(koila__torch.oom_type,
                                 "a sharded module used %llu bytes more than the budget inside",
                                 (unsigned long long)(peak - limit));
                    status = -1;
                }
            }
            if (status == 0)
                status = koila__check_signals();
            break;
        }
        case KOILA_DO_SLICE:
            status =
                (x->local[v] = slice_value(x, v, koila_plan_need(x->plan, in->user, in->steal)))
                    ? 0
                    : -1;
            break;
        case KOILA_DO_FETCH:
            status = (x->local[v] = fetch_value(x, v)) ? 0 : -1;
            break;
        case KOILA_DO_KEEP:
            status = keep_value(x, v);
            break;
        case KOILA_DO_PUT:
            status = put_value(x, v, in->flags & KOILA_INSTR_OWNED);
            break;
        case KOILA_DO_ADD:
            if (x->done[i])
                break;
            status = add_value(x, v, in->flags & KOILA_INSTR_OWNED);
            if (status == 0)
                x->done[i] = 1;
            break;
        case KOILA_DO_FREE:
            if (st->is_loop)
                Py_CLEAR(x->local[v]);
            else
                Py_CLEAR(x->whole[v]);
            break;
        }
        if (status < 0)
            return -1;
    }
    return 0;
}

static void clear_local(exec *x)
{
    for (uint32_t v = 0; v < x->n_values; v++)
        Py_CLEAR(x->local[v]);
}

/* Rows [begin, end) of a loop, in slices of at most `rows`. */
static int run_rows(exec *x, const koila_stage *st, int64_t begin, int64_t end, int64_t rows,
                    const uint8_t *already)
{
    uint8_t *mine = already ? PyMem_Malloc(st->n_instrs ? st->n_instrs : 1) : NULL;
    if (already && !mine) {
        PyErr_NoMemory();
        return -1;
    }
    if (mine)
        memcpy(mine, already, st->n_instrs);
    int status = 0;
    for (int64_t at = begin; at < end && status == 0; at += rows) {
        x->begin = at;
        x->end = at + rows < end ? at + rows : end;
        x->batch = koila_graph_axis_size(x->g, st->axis);
        if (mine)
            memcpy(x->done, mine, st->n_instrs);
        else
            memset(x->done, 0, st->n_instrs);
        status = run_instrs(x, st);
        const int64_t b = at;
        const int64_t e = x->end;
        if (status == 0) {
            for (uint32_t i = 0; i < st->n_instrs; i++)
                if (st->instrs[i].kind == KOILA_DO_FETCH && st->instrs[i].flags & KOILA_INSTR_LAST)
                    give_up(x, st->instrs[i].id, b, e);
            continue;
        }
        if (!koila__is_out_of_memory()) {
            clear_local(x);
            break;
        }
        if (e - b > 1 && !x->ranks) {
            PyErr_Clear();
            clear_local(x);
            for (uint32_t i = 0; i < st->n_instrs; i++)
                if (st->instrs[i].kind == KOILA_DO_KEEP)
                    give_up(x, st->instrs[i].id, b, e);
            x->retries++;
            uint8_t *added = PyMem_Malloc(st->n_instrs ? st->n_instrs : 1);
            if (!added) {
                PyErr_NoMemory();
                status = -1;
                break;
            }
            memcpy(added, x->done, st->n_instrs);
            status = run_rows(x, st, b, e, (e - b + 1) / 2, added);
            PyMem_Free(added);
        } else
            clear_local(x);
    }
    PyMem_Free(mine);
    return status;
}

static int run_stage(exec *x, uint32_t k)
{
    const koila_stage *st = koila_plan_stage(x->plan, k);
    if (!st->is_loop) {
        x->begin = x->end = x->batch = 0;
        return run_instrs(x, st);
    }
    if (!st->n_instrs)
        return 0;
    if (!(x->done = PyMem_Malloc(st->n_instrs))) {
        PyErr_NoMemory();
        return -1;
    }
    int status = run_rows(x, st, 0, koila_graph_axis_size(x->g, st->axis),
                          koila_plan_axis_rows(x->plan, st->axis), NULL);
    PyMem_Free(x->done);
    x->done = NULL;
    /* what was collected is whole now; wide accumulators are cast back */
    for (uint32_t i = 0; i < st->n_instrs && status == 0; i++) {
        const koila_value v = st->instrs[i].id;
        if ((st->instrs[i].kind != KOILA_DO_ADD && st->instrs[i].kind != KOILA_DO_PUT) ||
            !x->acc[v])
            continue;
        const koila_meta_info *m = koila_meta_get(x->table, koila_value_get(x->g, v).meta);
        PyObject *is =
            st->instrs[i].kind == KOILA_DO_ADD ? PyObject_GetAttrString(x->acc[v], "dtype") : NULL;
        if (is && is != koila__dtype_object(m->dtype)) {
            PyObject *args = PyTuple_Pack(1, x->acc[v]);
            PyObject *kw = PyDict_New();
            PyObject *cast = NULL;
            if (args && kw && PyDict_SetItemString(kw, "dtype", koila__dtype_object(m->dtype)) == 0)
                cast = PyObject_Call(koila__torch.to_copy, args, kw);
            Py_XDECREF(args);
            Py_XDECREF(kw);
            if (cast)
                Py_SETREF(x->acc[v], cast);
            else
                status = -1;
        }
        Py_XDECREF(is);
        PyErr_Occurred() ? (void)(status = -1) : (void)0;
        Py_XSETREF(x->whole[v], x->acc[v]);
        x->acc[v] = NULL;
    }
    return status;
}

/* ---- the whole plan */

static void exec_free(exec *x)
{
    for (uint32_t v = 0; v < x->n_values; v++) {
        if (x->whole)
            Py_XDECREF(x->whole[v]);
        if (x->local)
            Py_XDECREF(x->local[v]);
        if (x->acc)
            Py_XDECREF(x->acc[v]);
        if (x->kept) {
            for (uint32_t i = 0; i < x->kept[v].n; i++)
                Py_DECREF(x->kept[v].at[i].tensor);
            PyMem_RawFree(x->kept[v].at);
        }
    }
    PyMem_Free(x->whole);
    PyMem_Free(x->local);
    PyMem_Free(x->acc);
    PyMem_Free(x->kept);
    for (uint32_t n = 0; x->cursors && n < koila_graph_n_nodes(x->g); n++)
        Py_XDECREF(x->cursors[n].state);
    PyMem_Free(x->cursors);
    for (uint32_t i = 0; i < x->n_used; i++) {
        Py_DECREF(x->used[i].generator);
        Py_DECREF(x->used[i].state);
    }
}

/* The user's generators are as they were, whatever happened. -1 with an exception if that failed and
 * none was set. */
static int give_generators_back(exec *x)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    int status = 0;
    for (uint32_t i = 0; i < x->n_used; i++)
        if (koila__generator_set(x->used[i].generator, x->used[i].state) < 0)
            status = -1;
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return status;
}

static int exec_init(exec *x, const koila__part *p)
{
    x->n_values = koila_graph_n_values(x->g);
    x->whole = PyMem_Calloc(x->n_values + 1, sizeof *x->whole);
    x->local = PyMem_Calloc(x->n_values + 1, sizeof *x->local);
    x->acc = PyMem_Calloc(x->n_values + 1, sizeof *x->acc);
    x->kept = PyMem_Calloc(x->n_values + 1, sizeof *x->kept);
    if (!x->whole || !x->local || !x->acc || !x->kept) {
        PyErr_NoMemory();
        return -1;
    }
    const tape_value *values = x->tape->values;
    for (koila_value v = 0; v < koila_graph_n_values(x->tape->graph); v++) {
        if (p->value_of[v] == KOILA_NONE || !values[v].real)
            continue;
        const koila_value leaf = koila_plan_leaf(x->plan, p->value_of[v]);
        if (leaf != KOILA_NONE && koila_value_get(x->g, leaf).node == KOILA_NONE)
            Py_XSETREF(x->whole[leaf], Py_NewRef(values[v].real));
    }
    return 0;
}

static int take_results(const exec *x, uint32_t n, PyObject **results)
{
    for (uint32_t i = 0; i < n; i++) {
        results[i] = Py_XNewRef(x->whole[koila_plan_target(x->plan, i)]);
        if (!results[i]) {
            PyErr_SetString(PyExc_SystemError, "koila: a target was not made");
            return -1;
        }
    }
    return 0;
}

static int run_stages(exec *x, uint32_t n, PyObject **results)
{
    PyObject *guard = PyObject_CallNoArgs(koila__torch.guards);
    int status = guard ? 0 : -1;
    for (uint32_t k = 0; k < x->c->info.n_stages && status == 0; k++)
        status = run_stage(x, k);
    if (status == 0)
        status = take_results(x, n, results);
    if (koila__lines_enabled)
        koila__lines_work_for(NULL, 0);
    if (give_generators_back(x) < 0)
        status = -1;
    Py_XDECREF(guard);
    return status;
}

/* All ranks learn how it went: a failure is announced, unless it happened inside a call that they
 * share. The status on all ranks. */
static int tell_ranks(exec *x, int status, koila__announced *announced)
{
    if (!x->ranks)
        return status;
    if (status == 0) {
        status = koila__ranks_meet(x->ranks);
        x->failure_announced = status < 0;
    } else if (!x->failure_announced && !x->failed_inside_call && koila__ranks_failed(x->ranks))
        *announced = KOILA__ANNOUNCED_BY_US;
    if (x->failure_announced)
        *announced = KOILA__ANNOUNCED_BY_ANOTHER;
    return status;
}

int koila__exec_plan(koila__tape *t, const koila__part *p, const cached *c, PyObject *ranks,
                     uint32_t n, PyObject **results, koila__exec_report *report)
{
    exec x = { .tape = t,
               .c = c,
               .plan = c->plan,
               .g = koila_plan_graph(c->plan),
               .table = koila__table,
               .node_from = p->node_from,
               .measure = koila__cpu_bytes_ok() && c->gpu < 0,
               .ranks = ranks };
    int status = exec_init(&x, p);
    if (status == 0)
        status = run_stages(&x, n, results);
    exec_free(&x);
    *report = (koila__exec_report){ .n_run = x.n_run, .retries = x.retries };
    status = tell_ranks(&x, status, &report->announced);
    for (uint32_t i = 0; i < n && status < 0; i++)
        Py_CLEAR(results[i]);
    return status;
}
