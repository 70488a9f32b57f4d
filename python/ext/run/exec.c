/* exec.c — executes a plan on real tensors: stages, slices, instructions (koila/plan.h).
 *
 * Out of memory. A slice that runs out is dropped, and its rows are run again in halves.
 * Accumulators that it had already added to are remembered and skipped. Complete slices are never
 * run again, and the pieces that a slice fetched are released only when it is complete. Any other
 * failure is left to the caller (request.c), with the exception set and nothing outside changed.
 * A slice whose rows lie in one piece is not halved.
 * Where other ranks run the same calls at the same time (ranks.c), no rank halves a slice alone.
 *
 * Invariant: when a slice is complete, no local value is left (koila_plan_check checks this of
 * every plan).
 */
#include "run/run.h"
#include "ground/random.h"
#include "ground/shield.h"

#include "base/vec.h"
#include "memlab/credit.h"

/* ---- values: slices, accumulators, pieces */

typedef struct piece {
    int64_t begin, end;
    PyObject *tensor;
} piece;
typedef VEC(piece) pieces;

enum {
    MAX_GENERATORS = 17, /* the CPU and 16 GPUs */
    FEW_INPUTS = 16,     /* inputs that need no allocation */
    FEW_OUTPUTS = 8,
};

typedef struct exec {
    /* of a step within a row: the run of the rows, and the step; else NULL */
    const struct exec *outer;
    const koila_inner *inner;
    koila__tape *tape;
    const cached *c;
    const koila_plan *plan;
    const koila_graph *g;
    const koila_table *table;
    const koila_node *node_from; /* nodes of c->part -> nodes of the tape */
    /* [values] owned, like the next three arrays: values outside of loops, or collected */
    PyObject **whole;
    PyObject **local; /* of the running slice */
    PyObject **acc;   /* being collected: sums, and results joined from slices */
    pieces *kept;     /* rows kept for a later loop */
    /* [instrs of the stage] set: these rows were added to that accumulator already */
    uint8_t *done;
    uint32_t n_values;
    int64_t begin, end, batch; /* rows of the running slice; 0, 0, 0 outside of loops */
    uint64_t n_run;
    uint32_t retries;
    bool measure;
    /* borrowed: the ranks that run the same sharded calls at the same time; NULL: none */
    PyObject *ranks;
    bool failure_announced;  /* a rank failed, and all ranks know */
    bool failed_inside_call; /* this rank failed where it cannot tell the others */
    struct used {
        PyObject *generator; /* of the user */
        /* of the CPU: the run draws from one of its own, so that what other threads draw from the
         * user's meanwhile is neither repeated nor lost; else NULL */
        PyObject *own;
        PyObject *own_state; /* with `own`: a tensor for its states, which lies in `memory` */
        PyObject *memory;    /* a bytearray */
        PyObject *state; /* of `generator` before the step, where the run draws from it; or NULL */
    } used[MAX_GENERATORS];
    uint32_t n_used;
    PyObject *draws_from;            /* borrowed: the `own` of the node that runs, or NULL */
    const struct used *used_by_node; /* what the node that runs draws from; NULL: nothing */
    struct cursor {
        /* state of the generator just before it draws element `at` (in the order of memory) of the
         * node's result */
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

static int64_t n_rows(const exec *x) { return x->end - x->begin; }
static bool is_all_rows(const exec *x) { return x->begin == 0 && x->end == x->batch; }

static const koila_meta_info *meta_of(const exec *x, koila_value v)
{
    return koila_meta_get(x->table, koila_value_get(x->g, v).meta);
}

/* An uninitialised tensor of meta m. If extent >= 0, dimension `dim` has that size. It is dense, in
 * m's order of dimensions (contiguous if m->stride is NULL). */
static PyObject *empty_like_meta(const koila_meta_info *m, int32_t dim, int64_t extent)
{
    int64_t size[KOILA_MAX_DIMS], stride[KOILA_MAX_DIMS];
    for (uint32_t d = 0; d < m->n_dims; d++)
        size[d] = (int32_t)d == dim && extent >= 0 ? extent : m->size[d];
    koila_dense_strides(m, size, stride);
    PyObject *dtype = koila__dtype_object(m->dtype);
    PyObject *device = dtype ? koila__device_object(m->device) : NULL;
    PyObject *s = device ? dims_tuple(size, m->n_dims) : NULL;
    PyObject *t = s ? dims_tuple(stride, m->n_dims) : NULL;
    PyObject *args = t ? PyTuple_Pack(2, s, t) : NULL;
    PyObject *kw = args ? Py_BuildValue("{s:O,s:O}", "dtype", dtype, "device", device) : NULL;
    PyObject *out = kw ? PyObject_Call(koila__torch.empty_strided, args, kw) : NULL;
    Py_XDECREF(s);
    Py_XDECREF(t);
    Py_XDECREF(args);
    Py_XDECREF(kw);
    return out;
}

/* t in another dtype. */
static PyObject *cast_to(PyObject *t, koila_dtype dtype)
{
    PyObject *args = PyTuple_Pack(1, t);
    PyObject *kw = args ? Py_BuildValue("{s:O}", "dtype", koila__dtype_object(dtype)) : NULL;
    PyObject *out = kw ? PyObject_Call(koila__torch.to_copy, args, kw) : NULL;
    Py_XDECREF(args);
    Py_XDECREF(kw);
    return out;
}

/* A view of t, which has `rows` rows, with dimension s.dim split in two: [..., outer, rows * inner,
 * ...] */
static PyObject *unflattened(PyObject *t, koila_share s, int64_t rows)
{
    PyObject *sizes = Py_BuildValue("(LL)", (long long)s.outer, (long long)(rows * s.inner));
    PyObject *split =
        sizes ? PyObject_CallFunction(koila__torch.unflatten, "OiO", t, (int)s.dim, sizes) : NULL;
    Py_XDECREF(sizes);
    return split;
}

/* Undoes unflattened(). Takes over `rows`, which may be NULL. */
static PyObject *flattened(PyObject *rows, koila_share s)
{
    if (!rows || s.outer == 1)
        return rows;
    PyObject *flat =
        PyObject_CallFunction(koila__torch.flatten, "Oii", rows, (int)s.dim, (int)s.dim + 1);
    Py_DECREF(rows);
    return flat;
}

/* A view of t, which has `batch` rows, on rows [begin, end) as share `s` places them; unflattened
 * where s.outer is not 1. */
static PyObject *rows_of(PyObject *t, koila_share s, int64_t batch, int64_t begin, int64_t end)
{
    koila_assert(0 <= begin && begin < end && end <= batch);
    const int64_t first = begin * s.inner;
    const int64_t n = (end - begin) * s.inner;
    if (s.outer == 1)
        return call_ints(koila__torch.narrow, t, s.dim, first, n);
    PyObject *split = unflattened(t, s, batch);
    PyObject *rows = split ? call_ints(koila__torch.narrow, split, s.dim + 1, first, n) : NULL;
    Py_XDECREF(split);
    return rows;
}

/* local v := rows of whole v. A dense value stays dense, so that recorded views work on the slice
 * too. */
static PyObject *slice_value(exec *x, koila_value v, koila_share s)
{
    koila_assert(x->whole[v] && !x->local[v]);
    const koila_meta_info *m = meta_of(x, v);
    const bool is_view = koila_slice_form(m, s, is_all_rows(x)) == KOILA_SLICE_VIEW;
    PyObject *rows = flattened(rows_of(x->whole[v], s, x->batch, x->begin, x->end), s);
    if (!rows || is_view || !koila_meta_is_dense(m))
        return rows;
    PyObject *dense = empty_like_meta(m, s.dim, s.outer * s.inner * n_rows(x));
    PyObject *done =
        dense ? PyObject_CallFunctionObjArgs(koila__torch.copy_, dense, rows, NULL) : NULL;
    Py_DECREF(rows);
    Py_XDECREF(done);
    if (!done)
        Py_CLEAR(dense);
    return dense;
}

/* An uninitialised tensor for all rows of v: in v's order of dimensions if it is dense, else
 * contiguous. */
static PyObject *empty_whole(const exec *x, koila_value v)
{
    koila_meta_info like = *meta_of(x, v);
    if (!koila_meta_is_dense(&like))
        like.stride = NULL;
    return empty_like_meta(&like, -1, -1);
}

/* Is local v absent from this slice, as the plan foresees? */
static bool is_absent(const exec *x, koila_value v)
{
    return !x->local[v] && koila_plan_may_be_absent(x->plan, v);
}

/* Absent local v is zero: makes it. */
static int make_absent(exec *x, koila_value v)
{
    const koila_share s = koila_plan_share(x->plan, v);
    const bool is_rows = s.kind == KOILA_SHARE_SLICE;
    PyObject *zeros = empty_like_meta(meta_of(x, v), is_rows ? (int32_t)s.dim : -1,
                                      is_rows ? s.outer * s.inner * n_rows(x) : -1);
    PyObject *done = zeros ? PyObject_CallFunctionObjArgs(koila__torch.zero_, zeros, NULL) : NULL;
    if (done)
        x->local[v] = Py_NewRef(zeros);
    Py_XDECREF(zeros);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Puts the slice's rows of v into the whole result. Not owned: local v may still be written in
 * place. */
static int put_value(exec *x, koila_value v, bool owned)
{
    if (is_absent(x, v) && make_absent(x, v) < 0)
        return -1;
    koila_assert(x->local[v]);
    const koila_share s = koila_plan_share(x->plan, v);
    if (!x->acc[v] && owned && is_all_rows(x)) {
        x->acc[v] = Py_NewRef(x->local[v]);
        return 0;
    }
    if (!x->acc[v])
        x->acc[v] = empty_whole(x, v);
    if (!x->acc[v])
        return -1;
    PyObject *rows = rows_of(x->acc[v], s, x->batch, x->begin, x->end);
    PyObject *source =
        s.outer > 1 ? unflattened(x->local[v], s, n_rows(x)) : Py_NewRef(x->local[v]);
    PyObject *done = NULL;
    if (rows && source)
        done = PyObject_CallFunctionObjArgs(koila__torch.copy_, rows, source, NULL);
    Py_XDECREF(rows);
    Py_XDECREF(source);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The addend of the first slice, in the dtype in which the sum is accumulated. */
static PyObject *first_addend(const exec *x, koila_value v, koila_share s, bool owned)
{
    const koila_dtype dtype = meta_of(x, v)->dtype;
    const koila_dtype wide = koila_accumulator_dtype(dtype, s, is_all_rows(x) && !x->inner);
    if (wide != dtype)
        return cast_to(x->local[v], wide);
    return owned ? Py_NewRef(x->local[v])
                 : PyObject_CallFunctionObjArgs(koila__torch.clone, x->local[v], NULL);
}

/* The operator that combines two partial results; borrowed. */
static PyObject *combination_of(koila_partial_kind kind)
{
    switch (kind) {
    case KOILA_PARTIAL_SUM:
        return koila__torch.add_;
    case KOILA_PARTIAL_MAX:
        return koila__torch.maximum;
    case KOILA_PARTIAL_MIN:
        return koila__torch.minimum;
    case KOILA_PARTIAL_MOMENTS:
        return koila__pseudo_object("koila::combine_moments");
    case KOILA_PARTIAL_PIECE:
        break; /* one slice alone has it */
    }
    koila_assert(!"a kind of partial result");
    return NULL;
}

/* Adds the slice's share of v to the accumulator. */
static int add_value(exec *x, koila_value v, bool owned)
{
    if (is_absent(x, v))
        return 0;
    koila_assert(x->local[v]);
    const koila_share s = koila_plan_share(x->plan, v);
    if (!x->acc[v]) {
        x->acc[v] = first_addend(x, v, s, owned);
        return x->acc[v] ? 0 : -1;
    }
    if (s.kind != KOILA_SHARE_PARTIAL)
        return 0; /* v is the same in every slice */
    PyObject *combine = combination_of((koila_partial_kind)s.partial);
    PyObject *sum =
        combine ? PyObject_CallFunctionObjArgs(combine, x->acc[v], x->local[v], NULL) : NULL;
    if (!sum)
        return -1;
    if (s.partial == KOILA_PARTIAL_SUM)
        Py_DECREF(sum); /* in place */
    else
        Py_SETREF(x->acc[v], sum);
    return 0;
}

static int keep_value(exec *x, koila_value v)
{
    if (is_absent(x, v) && make_absent(x, v) < 0)
        return -1;
    koila_assert(x->local[v]);
    const piece kept = { x->begin, x->end, x->local[v] };
    if (!koila__vec_push(&koila__libc, &x->kept[v], kept)) {
        PyErr_NoMemory();
        return -1;
    }
    Py_INCREF(kept.tensor);
    return 0;
}

/* local v := the kept rows of the slice: one piece unchanged; or pieces cut and joined, if the
 * slices have changed after an out-of-memory. */
static PyObject *fetch_value(exec *x, koila_value v)
{
    const koila_share s = koila_plan_share(x->plan, v);
    pieces *p = &x->kept[v];
    koila_assert(!x->local[v]);
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
    return flattened(joined, s);
}

/* Releases the pieces of v within [begin, end). */
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

/* u->own := a generator like the user's, with a tensor for its states. */
static int make_own(struct used *u)
{
    PyObject *all = PyObject_CallOneArg(koila__torch.own_generator, u->generator);
    const int status =
        all && PyArg_ParseTuple(all, "OOO!", &u->own, &u->own_state, &PyByteArray_Type, &u->memory)
            ? 0
            : -1;
    if (status == 0) {
        Py_INCREF(u->own);
        Py_INCREF(u->own_state);
        Py_INCREF(u->memory);
    }
    Py_XDECREF(all);
    return status;
}

/* What a run draws from in place of `generator`: found, or added. may_give: the operator has an
 * argument `generator`. NULL with an exception. */
static const struct used *use_generator(exec *x, PyObject *generator, bool may_give)
{
    for (uint32_t i = 0; i < x->n_used; i++)
        if (x->used[i].generator == generator && (may_give || x->used[i].state))
            return &x->used[i];
    if (x->n_used == MAX_GENERATORS) {
        PyErr_Format(PyExc_RuntimeError,
                     "koila: random operators on more than %d devices in one step", MAX_GENERATORS);
        return NULL;
    }
    PyObject *state = koila__generator_get(generator);
    if (!state)
        return NULL;
    struct used *u = &x->used[x->n_used];
    *u = (struct used){ .generator = generator };
    if (may_give && koila__is_cpu_state(state)) {
        Py_DECREF(state);
        if (make_own(u) < 0)
            return NULL;
    } else {
        u->state = state;
    }
    Py_INCREF(generator);
    x->n_used++;
    return u;
}

/* The generator that the running node draws from gets a state. */
static int set_state(const exec *x, const tape_random *random, PyObject *state)
{
    const struct used *u = x->used_by_node;
    return u->own ? koila__generator_set_by(u->own, u->own_state, u->memory, state)
                  : koila__generator_set(random->generator, state);
}

/* So many words are skipped sooner than the state behind them is read. */
enum { FEW_WORDS = 1024 };

/* Draws elements at ... at + n_elements of a random node's result into `part`. */
static int draw_block(exec *x, koila_node n, const tape_random *random, PyObject *part, int64_t at,
                      int64_t n_elements)
{
    struct cursor *c = &x->cursors[n];
    const koila__call_fix fix = { .generator = x->draws_from };
    if (!c->state || c->at > at) {
        Py_XSETREF(c->state, Py_NewRef(random->state));
        c->at = 0;
    }
    PyObject *out = NULL;
    PyObject *state = koila__generator_skipped(c->state, (uint64_t)(at - c->at) * random->words);
    int status = state && set_state(x, random, state) == 0 ? 0 : -1;
    if (status == 0)
        status = koila__call(koila_node_get(x->g, n).sig, &part, &fix, NULL, &out);
    Py_XDECREF(out);
    if (status < 0) {
        Py_XDECREF(state);
        Py_CLEAR(c->state);
        return -1;
    }
    if (n_elements <= FEW_WORDS / random->words) {
        c->at = at;
    } else {
        c->at = at + n_elements;
        Py_SETREF(state, koila__generator_get(random->generator));
    }
    Py_XSETREF(c->state, state);
    return state ? 0 : -1;
}

/* Draws only the slice's rows of a random node that draws in the order of memory: moves the
 * generator to each block of rows. 0: done; 1: not possible for this layout; -1 with an
 * exception. */
static int draw_rows(exec *x, koila_node n, const tape_random *random, const koila_sig_info *s,
                     koila_value v)
{
    const koila_share share = koila_plan_share(x->plan, v);
    const koila_meta_info *m = koila_meta_get(x->table, s->inputs[0]);
    const int64_t rows = n_rows(x);
    int64_t n_blocks = share.outer;
    int64_t unit = share.inner; /* memory order of the whole: n_blocks * batch * unit elements */
    if (!koila_meta_is_dense(m))
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
    PyObject *local = empty_like_meta(m, share.dim, share.outer * share.inner * rows);
    PyObject *flat = local ? PyObject_CallFunction(koila__torch.as_strided, "O(L)(i)", local,
                                                   (long long)(n_blocks * rows * unit), 1)
                           : NULL;
    int status = flat ? 0 : -1;
    for (int64_t b = 0; b < n_blocks && status == 0; b++) {
        PyObject *part = call_ints(koila__torch.narrow, flat, 0, b * rows * unit, rows * unit);
        status = part
                     ? draw_block(x, n, random, part, (b * x->batch + x->begin) * unit, rows * unit)
                     : -1;
        Py_XDECREF(part);
    }
    Py_XDECREF(flat);
    if (status == 0)
        x->local[v] = local;
    else
        Py_XDECREF(local);
    return status;
}

/* Runs a random node on a slice, from the generator state recorded before its draw. It draws only
 * the slice's rows where possible; else the whole batch, as eager does, of which it keeps the
 * rows. */
static int run_random_rows(exec *x, koila_node n, const tape_random *random,
                           const koila_sig_info *s, koila_value first)
{
    if (random->words) {
        const int drawn = draw_rows(x, n, random, s, first);
        if (drawn <= 0)
            return drawn;
    }
    if (set_state(x, random, random->state) < 0)
        return -1;
    PyObject *base = NULL, *out[2] = { NULL };
    int status = -1;
    const bool writes = s->n_writes == 1 && s->n_fresh == 0 && s->writes[0].overwrites;
    const bool like = s->n_writes == 0 && s->n_inputs == 1; /* reads only the shape */
    if (s->n_inputs > 1 || s->n_outputs > 2 || (s->n_inputs == 1 && !writes && !like)) {
        PyErr_Format(PyExc_RuntimeError, "koila: %s cannot be drawn in slices",
                     koila_op_name(x->table, s->op));
        return -1;
    }
    if (s->n_inputs && !(base = empty_like_meta(koila_meta_get(x->table, s->inputs[0]), -1, -1)))
        return -1;
    const koila__call_fix fix = { .generator = x->draws_from };
    if (koila__call(koila_node_get(x->g, n).sig, base ? &base : NULL, &fix, NULL, out) < 0)
        goto done;
    for (uint32_t i = 0; i < s->n_outputs; i++) {
        const koila_value v = first + i;
        const koila_share share = koila_plan_share(x->plan, v);
        PyObject *rows = flattened(rows_of(out[i], share, x->batch, x->begin, x->end), share);
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

/* The recorded node that node n of the plan stands for. */
static koila_node recorded_of(const exec *x, koila_node n)
{
    const koila_node recorded = koila_plan_recorded(x->plan, n);
    if (!x->inner || recorded == KOILA_NONE)
        return recorded;
    return koila_plan_recorded(x->outer->plan, x->inner->nodes[recorded]);
}

/* From now on koila.memlab's line profiler credits memory to the line on which node n was
 * captured. */
static void work_for_line(const exec *x, koila_node n)
{
    const koila_graph *g = x->tape->graph;
    const koila_node recorded = recorded_of(x, n);
    const uint32_t line =
        recorded == KOILA_NONE ? KOILA_NONE : koila_node_get(g, x->node_from[recorded]).line;
    koila__lines_work_for(line == KOILA_NONE ? NULL : koila_graph_line_file(g, line),
                          (int)koila_graph_line_number(g, line));
    if (recorded != KOILA_NONE)
        koila__lines_work_of(x->tape->uid, x->node_from[recorded]);
}

/* The stride of a dimension of size 1 has no meaning, but some torch kernels infer the memory order
 * from it: batch norm's backward on the CPU mistakes a gradient f64[1, 3, 6, 6]{3, 1, 18, 3} for
 * one in x's order, and is silently wrong. `view` makes such strides in a slice of one row. This
 * restores the row dimension as the outermost. */
static int one_row_outermost(const koila_table *table, const koila_sig_info *s, koila_meta whole,
                             PyObject **view)
{
    const uint32_t is_view = KOILA_FACT_RESHAPES | KOILA_FACT_JOINS;
    if ((koila_op_facts(table, s->op) & is_view) != is_view)
        return 0;
    const koila_meta_info *recorded = koila_meta_get(table, whole), *now;
    koila_meta meta;
    if (koila__meta_of(*view, &meta) < 0)
        return -1;
    now = koila_meta_get(table, meta);
    if (now->n_dims != recorded->n_dims)
        return 0;
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
    koila__hold_ids();
    PyObject *size = dims_tuple(now->size, now->n_dims);
    PyObject *strides = dims_tuple(stride, now->n_dims);
    koila__release_ids();
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

/* How the arguments of one call follow the slice. */
typedef struct adapted {
    koila_adapt adapts[KOILA_MAX_ADAPTS];
    koila__arg_fix fixes[KOILA_MAX_ADAPTS];
    uint32_t n;
} adapted;

/* One call of a node, on the running slice or on whole values. */
typedef struct node_call {
    koila_node n;
    bool in_loop;
    uint16_t steal; /* bit w: the tensor of write w is dead afterwards, so it is written in place */
    koila_node_info info;
    const koila_sig_info *s;
    PyObject *few_inputs[FEW_INPUTS], *few_outputs[FEW_OUTPUTS];
    PyObject **inputs;                     /* [n_inputs] borrowed */
    PyObject **outputs;                    /* [n_outputs] new references */
    PyObject *made[KOILA__MAX_WRITES + 1]; /* owned: inputs made for this call */
    uint32_t n_made;
    adapted own;
    koila__call_fix own_fix;
    adapted *links;            /* [links of all writes' chains]; NULL: not in a loop */
    koila__call_fix *link_fix; /* the same for the fix of each link */
} node_call;

static int call_init(node_call *call)
{
    const koila_sig_info *s = call->s;
    call->inputs = call->few_inputs;
    call->outputs = call->few_outputs;
    if (s->n_inputs > FEW_INPUTS)
        call->inputs = PyMem_Malloc(s->n_inputs * sizeof *call->inputs);
    if (s->n_outputs > FEW_OUTPUTS)
        call->outputs = PyMem_Malloc(s->n_outputs * sizeof *call->outputs);
    if (call->inputs && call->outputs)
        return 0;
    PyErr_NoMemory();
    return -1;
}

static void call_deinit(node_call *call)
{
    for (uint32_t i = 0; i < call->n_made; i++)
        Py_DECREF(call->made[i]);
    if (call->inputs != call->few_inputs)
        PyMem_Free(call->inputs);
    if (call->outputs != call->few_outputs)
        PyMem_Free(call->outputs);
    PyMem_Free(call->links);
    PyMem_Free(call->link_fix);
}

/* Sets input `at` to `tensor` (taken over), which was made for this call. */
static void use_made(node_call *call, uint32_t at, PyObject *tensor)
{
    koila_assert(call->n_made <= KOILA__MAX_WRITES);
    call->made[call->n_made] = tensor;
    call->n_made++;
    call->inputs[at] = tensor;
}

/* Does the call read input i? A write that overwrites all of its base does not. */
static bool is_read(const koila_sig_info *s, uint32_t i)
{
    for (uint32_t w = 0; w < s->n_writes; w++)
        if (s->writes[w].input == i && s->writes[w].overwrites)
            return false;
    return true;
}

static int find_inputs(exec *x, node_call *call)
{
    const koila_value *values = koila_node_inputs(x->g, call->n);
    const bool skips = koila_plan_absence(x->plan, call->n) == KOILA_ABSENT_SKIP;
    for (uint32_t i = 0; i < call->s->n_inputs; i++) {
        const koila_value v = values[i];
        const bool is_whole =
            !call->in_loop || koila_plan_need(x->plan, call->n, i).kind == KOILA_SHARE_WHOLE;
        const bool is_zero = !is_whole && !skips && is_absent(x, v) && is_read(call->s, i);
        if (is_zero && make_absent(x, v) < 0)
            return -1;
        call->inputs[i] = is_whole && x->whole[v] ? x->whole[v] : x->local[v];
    }
    return 0;
}

/* A sum of two terms of which one is absent is the other one; of which both are, is absent too. 1:
 * done; 0: there are both, or they differ in form. */
static int sum_of_one(exec *x, const node_call *call)
{
    const koila_value *terms = koila_node_inputs(x->g, call->n);
    const koila_value sum = call->info.first_output;
    const bool none[2] = { is_absent(x, terms[0]), is_absent(x, terms[1]) };
    koila_assert(call->s->n_inputs == 2 && call->s->n_outputs == 1);
    if (!none[0] && !none[1])
        return 0;
    if (none[0] && none[1] && koila_plan_may_be_absent(x->plan, sum))
        return 1;
    const uint32_t i = none[0];
    if (none[i] || call->s->inputs[i] != call->s->outputs[0])
        return 0;
    x->local[sum] = Py_XNewRef(x->local[terms[i]]);
    return x->local[sum] != NULL;
}

/* A tensor for write w to write: uninitialised if the write overwrites all of it, else a copy. */
static PyObject *written_tensor(const exec *x, const node_call *call, uint32_t w)
{
    const koila_sig_info *s = call->s;
    const uint32_t at = s->writes[w].input;
    if (!s->writes[w].overwrites)
        return PyObject_CallFunctionObjArgs(koila__torch.clone, call->inputs[at], NULL);
    const koila_value v = call->info.first_output + s->n_fresh + w;
    const koila_share out = koila_plan_share(x->plan, v);
    const koila_meta_info *m = koila_meta_get(x->table, s->inputs[at]);
    if (!call->in_loop || out.kind != KOILA_SHARE_SLICE)
        return empty_like_meta(m, -1, -1);
    return empty_like_meta(m, out.dim, out.outer * out.inner * n_rows(x));
}

static int missing_input(const exec *x, const node_call *call, uint32_t i)
{
    PyErr_Format(PyExc_SystemError, "koila: input %u of %s is missing", i,
                 koila_op_name(x->table, call->s->op));
    return -1;
}

/* Values never change: a write goes into the old version if that is dead afterwards, else into a
 * tensor made for this call. */
static int prepare_writes(const exec *x, node_call *call)
{
    const koila_sig_info *s = call->s;
    koila_assert(s->n_writes <= KOILA__MAX_WRITES);
    for (uint32_t w = 0; w < s->n_writes; w++) {
        const uint32_t at = s->writes[w].input;
        if (w < 16 && call->steal >> w & 1)
            continue;
        if (!call->inputs[at] && !s->writes[w].overwrites)
            return missing_input(x, call, at);
        PyObject *tensor = written_tensor(x, call, w);
        if (!tensor)
            return -1;
        use_made(call, at, tensor);
    }
    const bool skips = koila_plan_absence(x->plan, call->n) == KOILA_ABSENT_SKIP;
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if (!call->inputs[i] && !skips)
            return missing_input(x, call, i);
    /* view_as_real refuses a conjugate view, which is a flag on the tensor */
    if (koila_op_facts(x->table, s->op) & KOILA_FACT_AS_REAL) {
        PyObject *resolved = PyObject_CallMethod(call->inputs[0], "resolve_conj", NULL);
        if (!resolved)
            return -1;
        use_made(call, 0, resolved);
    }
    return 0;
}

/* Adapts the call itself (link -1), or one link of its writes' chains, to the running slice. */
static koila__call_fix adapt_call(const exec *x, koila_node n, int32_t link, adapted *a)
{
    koila__call_fix fix = { .fix = a->fixes };
    a->n = koila_plan_adapt_at(x->plan, n, link, x->begin, n_rows(x), a->adapts);
    koila_assert(a->n <= KOILA_MAX_ADAPTS);
    for (uint32_t i = 0; i < a->n; i++) {
        const koila_adapt *from = &a->adapts[i];
        if (from->kind != KOILA_ADAPT_INTS && from->kind != KOILA_ADAPT_INT)
            continue;
        a->fixes[fix.n_fix] = (koila__arg_fix){ .arg = from->arg,
                                                .n = from->n,
                                                .is_list = from->kind == KOILA_ADAPT_INTS,
                                                .ints = from->ints };
        fix.n_fix++;
    }
    return fix;
}

static int adapt_to_slice(const exec *x, node_call *call)
{
    const koila_sig_info *s = call->s;
    uint32_t n_links = 0;
    for (uint32_t w = 0; w < s->n_writes; w++)
        n_links += s->writes[w].n_links;
    if (n_links) {
        call->links = PyMem_Malloc(n_links * sizeof *call->links);
        call->link_fix = PyMem_Malloc(n_links * sizeof *call->link_fix);
        if (!call->links || !call->link_fix) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (uint32_t l = 0; l < n_links; l++)
        call->link_fix[l] = adapt_call(x, call->n, (int32_t)l, &call->links[l]);
    call->own_fix = adapt_call(x, call->n, -1, &call->own);
    return 0;
}

/* Runs the replacement of a call that differs in a slice. Its only result; NULL with an exception;
 * or NULL without one: the call has no replacement. */
static PyObject *instead_of_call(const node_call *call)
{
    for (uint32_t i = 0; i < call->own.n; i++) {
        const koila_adapt *a = &call->own.adapts[i];
        if (a->kind == KOILA_ADAPT_ALIAS)
            return Py_NewRef(call->inputs[0]);
        if (a->kind == KOILA_ADAPT_SQUEEZE) {
            PyObject *dims = dims_tuple(a->ints, a->n);
            PyObject *out = dims ? PyObject_CallFunctionObjArgs(koila__torch.squeeze_dims,
                                                                call->inputs[0], dims, NULL)
                                 : NULL;
            Py_XDECREF(dims);
            return out;
        }
    }
    return NULL;
}

/* What the first result is in all rows, where the call runs on one; else KOILA_NONE. */
static koila_meta meta_of_all_rows(const exec *x, const node_call *call)
{
    const koila_node recorded = x->inner ? koila_plan_recorded(x->plan, call->n) : KOILA_NONE;
    if (!call->s->n_outputs)
        return KOILA_NONE;
    if (recorded != KOILA_NONE) {
        const koila_node_info info = koila_node_get(x->outer->g, x->inner->nodes[recorded]);
        const koila_sig_info *s = koila_sig_get(x->table, info.sig);
        return s->n_outputs ? s->outputs[0] : KOILA_NONE;
    }
    const bool is_one_row = call->in_loop && n_rows(x) == 1 && x->batch > 1;
    return is_one_row ? call->s->outputs[0] : KOILA_NONE;
}

static int make_outputs(const exec *x, node_call *call)
{
    PyObject *instead = instead_of_call(call);
    if (instead) {
        koila_assert(call->s->n_outputs == 1);
        call->outputs[0] = instead;
        return 0;
    }
    if (PyErr_Occurred())
        return -1;
    if (koila__lines_enabled)
        work_for_line(x, call->n);
    call->own_fix.generator = x->draws_from;
    if (koila__call(call->info.sig, call->inputs, &call->own_fix, call->link_fix, call->outputs) <
        0)
        return -1;
    const koila_meta whole = meta_of_all_rows(x, call);
    if (whole != KOILA_NONE && one_row_outermost(x->table, call->s, whole, call->outputs) < 0) {
        Py_DECREF(call->outputs[0]);
        return -1;
    }
    return 0;
}

/* Weights a mean over the batch by the share of rows in the slice. */
static int scale_outputs(const exec *x, node_call *call)
{
    const double share = (double)n_rows(x) / (double)x->batch;
    for (uint32_t i = 0; i < call->own.n && !is_all_rows(x); i++) {
        const koila_adapt *a = &call->own.adapts[i];
        PyObject *out = a->kind == KOILA_ADAPT_SCALE ? call->outputs[a->output] : NULL;
        if (!out)
            continue;
        PyObject *scaled = PyObject_CallFunction(koila__torch.mul_, "Od", out, share);
        Py_XDECREF(scaled);
        if (!scaled)
            return -1;
    }
    return 0;
}

/* Makes its outputs values; or releases them if the call failed. */
static void hand_over(exec *x, const node_call *call, bool is_done)
{
    PyObject **store = call->in_loop ? x->local : x->whole;
    for (uint32_t o = 0; o < call->s->n_outputs; o++) {
        if (is_done && call->s->outputs[o] != KOILA_NONE)
            store[call->info.first_output + o] = call->outputs[o];
        else
            Py_XDECREF(call->outputs[o]);
    }
}

/* Sets the generator that a random node draws from to its state before the recorded draw: 0. Or
 * draws the rows of the slice right here: 1. -1 with an exception. */
static int prepare_recorded(exec *x, const node_call *call, const tape_random *random)
{
    const koila_value first = call->info.first_output;
    const bool is_cut = call->in_loop && !is_all_rows(x) &&
                        koila_plan_share(x->plan, first).kind == KOILA_SHARE_SLICE;
    if (is_cut)
        return run_random_rows(x, call->n, random, call->s, first) < 0 ? -1 : 1;
    return set_state(x, random, random->state);
}

static int prepare_random(exec *x, const node_call *call)
{
    x->draws_from = NULL;
    x->used_by_node = NULL;
    if (!(koila_op_flags(x->table, call->s->op) & KOILA_OP_RANDOM))
        return 0;
    const tape_random *found = koila__tape_random(x->tape, x->node_from[recorded_of(x, call->n)]);
    if (!found)
        return 0;
    tape_random random = *found; /* the tape's list moves when more is recorded */
    Py_INCREF(random.generator);
    Py_INCREF(random.state);
    /* in-place draws take a generator; native_dropout, which makes its results, does not */
    const struct used *u = use_generator(x, random.generator, call->s->n_writes > 0);
    Py_DECREF(random.generator); /* kept by x->used */
    int status = -1;
    if (u) {
        x->used_by_node = u;
        x->draws_from = u->own;
        if (u->own)
            random.generator = u->own;
        status = prepare_recorded(x, call, &random);
    }
    Py_DECREF(random.state);
    return status;
}

static int run_node(exec *x, const koila_instr *in, bool in_loop)
{
    node_call call;
    memset(&call, 0, offsetof(node_call, own));
    call.own.n = 0;
    call.own_fix = (koila__call_fix){ 0 };
    call.links = NULL;
    call.link_fix = NULL;
    call.n = in->id;
    call.in_loop = in_loop;
    call.steal = in->steal;
    call.info = koila_node_get(x->g, in->id);
    call.s = koila_sig_get(x->table, call.info.sig);
    if (in_loop && koila_plan_absence(x->plan, call.n) == KOILA_ABSENT_SUM && sum_of_one(x, &call))
        return 0;
    x->n_run += !(koila_op_facts(x->table, call.s->op) & KOILA_FACT_OFFLOADS);
    const int drawn = prepare_random(x, &call);
    if (drawn)
        return drawn < 0 ? -1 : 0;
    int status = call_init(&call);
    if (status == 0)
        status = find_inputs(x, &call);
    if (status == 0)
        status = prepare_writes(x, &call);
    if (status == 0 && in_loop)
        status = adapt_to_slice(x, &call);
    if (status == 0)
        status = make_outputs(x, &call);
    if (status == 0) {
        if (in_loop)
            status = scale_outputs(x, &call);
        hand_over(x, &call, status == 0);
    }
    call_deinit(&call);
    return status;
}

/* ---- one slice, one stage */

/* Node n raised: adds a note with its operator, line and rows to the exception. (Before Python 3.11
 * exceptions have no notes.) */
static void add_note(const exec *x, koila_node n, bool in_loop)
{
    PyObject *type, *value, *trace, *text, *done = NULL;
    /* will be retried, or gets its text elsewhere */
    if (koila__is_out_of_memory() || !PyErr_ExceptionMatches(PyExc_Exception))
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    const uint32_t line = koila_node_get(x->c->part, recorded_of(x, n)).line;
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

/* Runs a call that all ranks make now, after meeting them. Inside it the budget is not enforced: a
 * rank that raised there would leave the others waiting. */
static int run_shared(exec *x, const koila_instr *in, bool in_loop)
{
    if (koila__ranks_meet(x->ranks) < 0) {
        x->failure_announced = true;
        return -1;
    }
    const bool refuses = koila__resident_refuses_here();
    koila__cpu_bytes_lift_limit(true);
    koila__resident_refuse_here(false);
    const int status = run_node(x, in, in_loop);
    koila__resident_refuse_here(refuses);
    koila__cpu_bytes_lift_limit(false);
    x->failed_inside_call = status < 0;
    return status;
}

/* Runs a node and measures its workspace: what this thread and its helpers allocated for it. A
 * shared call that used more than the budget fails here: inside it the budget is not enforced, so
 * overuse is detected when the call returns. */
static int run_measured(exec *x, const koila_instr *in, bool in_loop, bool is_shared)
{
    koila__use use;
    int64_t peak, now;
    const uint64_t limit = is_shared ? koila__cpu_bytes_get_limit() : UINT64_MAX;
    const int window = is_shared ? koila__cpu_bytes_open() : -1;
    koila__use_begin(&use);
    const int status = is_shared ? run_shared(x, in, in_loop) : run_node(x, in, in_loop);
    const bool is_known = koila__use_end(&use, &peak, &now);
    const uint64_t held = koila__cpu_bytes_close(window);
    const koila_sig sig = koila_node_get(x->g, in->id).sig;
    /* a view is planned with no memory at all, so bytes that it took were a copy */
    const bool is_view = koila_op_flags(x->table, koila_sig_get(x->table, sig)->op) & KOILA_OP_VIEW;
    const bool once = koila_plan_runs_once(x->plan, in->id);
    if (status == 0 && is_known)
        koila__learn(sig, once ? 0 : n_rows(x), once ? 0 : x->batch,
                     (uint64_t)(peak - (is_view && now > 0 ? 0 : now)), KOILA__MEASURED_HERE);
    if (status == 0 && is_shared && held > limit) {
        PyErr_Format(koila__torch.oom_type,
                     "a sharded module used %llu bytes more than the budget allows",
                     (unsigned long long)(held - limit));
        return -1;
    }
    return status;
}

/* What a call on a GPU is to the executor; asked once a call. */
typedef enum gpu_call {
    GPU_PLAIN, /* or not on a GPU */
    GPU_PRODUCT,
    GPU_BY_LIBRARY, /* a library of the GPU's vendor chooses what it uses inside */
} gpu_call;

static gpu_call call_on_gpu(const exec *x, const koila_instr *in)
{
    if (x->c->gpu < 0)
        return GPU_PLAIN;
    const koila_op op = koila_sig_get(x->table, koila_node_get(x->g, in->id).sig)->op;
    switch (koila_facts_dense(koila_op_facts(x->table, op))) {
    case KOILA_FACT_DENSE_CONTRACT:
    case KOILA_FACT_DENSE_CONTRACT_BIASED:
        return GPU_PRODUCT;
    case KOILA_FACT_DENSE_CONV:
    case KOILA_FACT_DENSE_CONV_BACKWARD:
    case KOILA_FACT_DENSE_ATTENTION:
    case KOILA_FACT_DENSE_ATTENTION_BACKWARD:
        return GPU_BY_LIBRARY;
    default: /* opaque: cuDNN's recurrent layers */
        return koila_op_flags(x->table, op) & KOILA_OP_OPAQUE ? GPU_BY_LIBRARY : GPU_PLAIN;
    }
}

/* Is it unknown what the call uses inside? It is measured until two runs agree, for each number of
 * rows, since asking takes time. */
static bool is_news(const exec *x, const koila_instr *in)
{
    const bool once = koila_plan_runs_once(x->plan, in->id);
    return !koila__learned_surely(koila_node_get(x->g, in->id).sig, once ? 0 : n_rows(x),
                                  once ? 0 : x->batch);
}

/* run_measured() of a GPU. */
static int run_measured_on_gpu(exec *x, const koila_instr *in, bool in_loop)
{
    koila__gpu_count before, after;
    koila__measured how;
    const bool is_read = koila__gpu_bytes(x->c->gpu, &before);
    const int status = run_node(x, in, in_loop);
    const bool once = koila_plan_runs_once(x->plan, in->id);
    if (status < 0 || !is_read || !koila__gpu_bytes(x->c->gpu, &after))
        return status;
    const uint64_t bytes = koila__gpu_inside(&before, &after, &how);
    koila__learn(koila_node_get(x->g, in->id).sig, once ? 0 : n_rows(x), once ? 0 : x->batch, bytes,
                 how);
    return 0;
}

static int run_one(exec *x, const koila_instr *in, bool in_loop)
{
    int status;
    const bool is_shared = koila__ranks_share(x->ranks, x->g, in->id);
    const gpu_call call = call_on_gpu(x, in);
    if (x->measure)
        status = run_measured(x, in, in_loop, is_shared);
    else if (call == GPU_BY_LIBRARY && !is_shared && is_news(x, in))
        status = run_measured_on_gpu(x, in, in_loop);
    else
        status = is_shared ? run_shared(x, in, in_loop) : run_node(x, in, in_loop);
    if (status < 0) {
        add_note(x, in->id, in_loop);
        return -1;
    }
    if (call == GPU_PRODUCT)
        koila__gpu_ran_product(x->c->gpu);
    return koila__check_signals();
}

static int run_inner(exec *x, const koila_inner *inner);

static int run_instr(exec *x, const koila_stage *st, uint32_t i)
{
    const koila_instr *in = &st->instrs[i];
    const koila_value v = in->id;
    const bool is_owned = in->flags & KOILA_INSTR_OWNED;
    switch ((koila_instr_kind)in->kind) {
    case KOILA_DO_RUN:
        if (st->is_loop && !koila_plan_runs_in(x->plan, in->id, x->begin, x->end))
            return 0;
        return run_one(x, in, st->is_loop);
    case KOILA_DO_SLICE:
        x->local[v] = slice_value(x, v, koila_plan_need(x->plan, in->user, in->steal));
        return x->local[v] ? 0 : -1;
    case KOILA_DO_FETCH:
        x->local[v] = fetch_value(x, v);
        return x->local[v] ? 0 : -1;
    case KOILA_DO_KEEP:
        return keep_value(x, v);
    case KOILA_DO_PUT:
        return put_value(x, v, is_owned);
    case KOILA_DO_INNER:
        return run_inner(x, st->inner);
    case KOILA_DO_ADD:
        if (x->done[i] || in->flags & KOILA_INSTR_ADDED)
            return 0;
        if (add_value(x, v, is_owned) < 0)
            return -1;
        x->done[i] = 1;
        return 0;
    case KOILA_DO_FREE:
        if (st->is_loop)
            Py_CLEAR(x->local[v]);
        else
            Py_CLEAR(x->whole[v]);
        return 0;
    }
    koila_assert(!"a kind of instruction");
    return 0;
}

static int run_instrs(exec *x, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++)
        if (run_instr(x, st, i) < 0)
            return -1;
    return 0;
}

static bool has_no_local(const exec *x)
{
    for (uint32_t v = 0; v < x->n_values; v++)
        if (x->local[v])
            return false;
    return true;
}

static void clear_local(exec *x)
{
    for (uint32_t v = 0; v < x->n_values; v++)
        Py_CLEAR(x->local[v]);
}

static int run_rows(exec *x, const koila_stage *st, int64_t begin, int64_t end, int64_t rows,
                    const uint8_t *already);

/* After a complete slice: releases the pieces that it fetched for the last time. */
static void end_slice(exec *x, const koila_stage *st)
{
    koila_assert(has_no_local(x));
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind == KOILA_DO_FETCH && in->flags & KOILA_INSTR_LAST)
            give_up(x, in->id, x->begin, x->end);
    }
}

/* The slice failed, with the exception set. If it ran out of memory, its rows run again in halves,
 * without adding again to accumulators that it had added to. */
static int run_in_halves(exec *x, const koila_stage *st)
{
    const int64_t begin = x->begin;
    const int64_t end = x->end;
    const int64_t half = (end - begin + 1) / 2;
    const bool may_halve = koila__is_out_of_memory() && !x->ranks &&
                           koila_plan_slice_end(x->plan, st->axis, begin, half) < end;
    if (may_halve)
        PyErr_Clear();
    clear_local(x);
    if (!may_halve)
        return -1;
    for (uint32_t i = 0; i < st->n_instrs; i++)
        if (st->instrs[i].kind == KOILA_DO_KEEP)
            give_up(x, st->instrs[i].id, begin, end);
    x->retries++;
    uint8_t *added = PyMem_Malloc(st->n_instrs);
    if (!added) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(added, x->done, st->n_instrs);
    const int status = run_rows(x, st, begin, end, half, added);
    PyMem_Free(added);
    return status;
}

/* Runs rows [begin, end) of a loop in slices of at most `rows`. already[instrs], or NULL:
 * accumulators that these rows were added to before. */
static int run_rows(exec *x, const koila_stage *st, int64_t begin, int64_t end, int64_t rows,
                    const uint8_t *already)
{
    koila_assert(rows > 0 && st->n_instrs > 0);
    x->batch = koila_graph_axis_size(x->g, st->axis);
    for (int64_t at = begin, next; at < end; at = next) {
        next = koila_plan_slice_end(x->plan, st->axis, at, rows);
        next = next < end ? next : end;
        x->begin = at;
        x->end = next;
        if (already)
            memcpy(x->done, already, st->n_instrs);
        else
            memset(x->done, 0, st->n_instrs);
        if (run_instrs(x, st) == 0)
            end_slice(x, st);
        else if (run_in_halves(x, st) < 0)
            return -1;
        else if (next - at == rows) /* the next slices are as large: not once more in vain */
            rows = (rows + 1) / 2;
    }
    return 0;
}

/* Makes the collected results whole values; sums that were accumulated in a wider dtype are cast
 * back. */
static int end_loop(exec *x, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_value v = st->instrs[i].id;
        const bool is_sum = st->instrs[i].kind == KOILA_DO_ADD;
        if ((!is_sum && st->instrs[i].kind != KOILA_DO_PUT) || !x->acc[v])
            continue;
        if (koila_plan_adds_on(x->plan, v)) /* the rows' */
            continue;
        const koila_dtype dtype = meta_of(x, v)->dtype;
        PyObject *is = is_sum ? PyObject_GetAttrString(x->acc[v], "dtype") : NULL;
        if (is && is != koila__dtype_object(dtype)) {
            PyObject *cast = cast_to(x->acc[v], dtype);
            if (cast)
                Py_SETREF(x->acc[v], cast);
        }
        Py_XDECREF(is);
        if (PyErr_Occurred())
            return -1;
        Py_XSETREF(x->whole[v], x->acc[v]);
        x->acc[v] = NULL;
    }
    return 0;
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
    koila_assert(!x->done && has_no_local(x));
    x->done = PyMem_Malloc(st->n_instrs);
    if (!x->done) {
        PyErr_NoMemory();
        return -1;
    }
    const int status = run_rows(x, st, 0, koila_graph_axis_size(x->g, st->axis),
                                koila_plan_axis_rows(x->plan, st->axis), NULL);
    PyMem_Free(x->done);
    x->done = NULL;
    return status < 0 ? -1 : end_loop(x, st);
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
            koila__vec_free(&koila__libc, &x->kept[v]);
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
        Py_XDECREF(x->used[i].own);
        Py_XDECREF(x->used[i].own_state);
        Py_XDECREF(x->used[i].memory);
        Py_XDECREF(x->used[i].state);
    }
}

/* Restores those of the user's generators that the run drew from. -1 with an exception if that
 * failed and none was set before. */
static int give_generators_back(exec *x)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    int status = 0;
    for (uint32_t i = 0; i < x->n_used; i++)
        if (x->used[i].state && koila__generator_set(x->used[i].generator, x->used[i].state) < 0)
            status = -1;
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return status;
}

static int exec_init(exec *x)
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
    return 0;
}

static void set_leaf(exec *x, koila_value leaf, PyObject *tensor)
{
    if (leaf != KOILA_NONE && koila_value_get(x->g, leaf).node == KOILA_NONE)
        Py_XSETREF(x->whole[leaf], Py_XNewRef(tensor));
}

static int run_all_stages(exec *x)
{
    const uint32_t n_stages = koila_plan_get(x->plan).n_stages;
    int status = 0;
    for (uint32_t k = 0; k < n_stages && status == 0; k++)
        status = run_stage(x, k);
    return status;
}

/* Sums that the step of a row adds to: they are its accumulators while it runs. */
static void lend_sums(exec *x, exec *inner, bool there)
{
    const koila_inner *step = inner->inner;
    for (uint32_t i = 0; i < step->n_results; i++) {
        const koila_value to = step->results[i].inner;
        const koila_value from = step->results[i].outer;
        if (!step->results[i].adds_on)
            continue;
        koila_assert(there ? !inner->acc[to] : !x->acc[from]);
        if (there) {
            inner->acc[to] = x->acc[from];
            x->acc[from] = NULL;
        } else {
            x->acc[from] = inner->acc[to];
            inner->acc[to] = NULL;
        }
    }
}

/* The calls of a row as a step of their own. Where it fails, the sums of the rows are worthless,
 * and so is the run. */
static int run_inner(exec *x, const koila_inner *step)
{
    exec y = { .outer = x,
               .inner = step,
               .tape = x->tape,
               .c = x->c,
               .plan = step->plan,
               .g = koila_plan_graph(step->plan),
               .table = x->table,
               .node_from = x->node_from,
               .measure = x->measure };
    koila_assert(!x->ranks && !x->outer && n_rows(x) == 1);
    int status = exec_init(&y);
    for (uint32_t i = 0; i < step->n_leaves && status == 0; i++)
        set_leaf(&y, step->leaves[i].inner,
                 (step->leaves[i].is_local ? x->local : x->whole)[step->leaves[i].outer]);
    if (status == 0) {
        lend_sums(x, &y, true);
        status = run_all_stages(&y);
        lend_sums(x, &y, false);
    }
    for (uint32_t i = 0; i < step->n_results && status == 0; i++) {
        const koila_value v = step->results[i].outer;
        if (step->results[i].adds_on)
            continue;
        x->local[v] = Py_XNewRef(y.whole[step->results[i].inner]);
        if (!x->local[v]) {
            PyErr_SetString(PyExc_SystemError, "koila: a result of a row was not made");
            status = -1;
        }
    }
    x->n_run += y.n_run;
    x->retries += y.retries;
    exec_free(&y);
    return status;
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
    status = status == 0 ? run_all_stages(x) : -1;
    if (status == 0)
        status = take_results(x, n, results);
    if (koila__lines_enabled)
        koila__lines_work_for(NULL, 0);
    if (give_generators_back(x) < 0)
        status = -1;
    Py_XDECREF(guard);
    return status;
}

/* Tells all ranks the result. A failure is announced unless it happened inside a call that they
 * share. Returns the common status. */
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
    const bool works = koila__work_begin();
    koila__learned_run();
    int status = exec_init(&x);
    for (uint32_t i = 0; i < p->n_leaves && status == 0; i++)
        set_leaf(&x, koila_plan_leaf(c->plan, i), koila__part_leaf(t, p, i));
    if (status == 0)
        status = run_stages(&x, n, results);
    if (works)
        koila__work_end();
    exec_free(&x);
    *report = (koila__exec_report){ .n_run = x.n_run, .retries = x.retries };
    status = tell_ranks(&x, status, &report->announced);
    for (uint32_t i = 0; i < n && status < 0; i++)
        Py_CLEAR(results[i]);
    return status;
}
