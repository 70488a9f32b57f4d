/* run.c — the executor: makes recorded values concrete by walking a plan, slice by slice, and changes nothing outside until all is done.
 *
 *   koila__run(tape, targets):                        # roughly this Python
 *       part = extract(tape.graph, targets, known)    # values made concrete before are leaves
 *       check the versions of its leaves              # StaleValueError
 *       plan = plan_cache.get(part) or make_plan(part, free memory)
 *       for stage in plan.stages:
 *           for begin, end in slices(stage.axis):     # or once, for a whole stage
 *               for instr in stage.instrs: ...        # see koila/plan.h
 *       tape.values[target].real = whole[target]      # last: nothing before this line can be seen
 *
 * Out of memory. A slice that runs out is dropped and its rows are done again in halves; accumulators it had already added to are remembered
 * and skipped, completed slices are never redone, and pieces it fetched are given up only when a slice is complete. When one row is too much, or a
 * whole stage runs out, the plan is made again with half the rows. What cannot be done raises koila.OutOfMemory, with nothing changed.
 *
 * Equation, asserted after each slice in debug builds: values made == values freed (no local value outlives its slice).
 */
#include "run.h"

#include <math.h>
#include <time.h>

#include "capture.h"
#include "truth.h"

/* ---- what we call */

static struct {
    PyObject *narrow, *copy_, *add_, *clone, *empty_strided, *maximum, *minimum, *unflatten, *flatten, *cat, *to_copy, *mul_, *squeeze_dims; /* aten overloads' _op */
    PyObject *float32;
    PyObject *errors;       /* module koila._errors */
    PyObject *oom_type;     /* torch.OutOfMemoryError */
    PyObject *stale_type;   /* koila.StaleValueError: looked up before, for no attribute may be read while an exception is set */
    PyObject *generator;    /* torch.default_generator */
    PyObject *guards;       /* koila._run.guards: returns an object that holds the mode guards while it lives */
    PyObject *pseudo;       /* dict of koila._run.PSEUDO */
    bool ready;
} call;

static PyObject *op_of(PyObject *aten, const char *packet, const char *overload)
{
    PyObject *p = PyObject_GetAttrString(aten, packet), *o = p ? PyObject_GetAttrString(p, overload) : NULL;
    PyObject *fn = o ? PyObject_GetAttrString(o, "_op") : NULL;
    Py_XDECREF(p);
    Py_XDECREF(o);
    return fn;
}

static int run_init(void)
{
    if (call.ready) return 0;
    koila__truth_install(); /* without it: no measured peak, no learned workspaces, no limit; everything else works */
    PyObject *torch = PyImport_ImportModule("torch"), *ops = torch ? PyObject_GetAttrString(torch, "ops") : NULL;
    PyObject *aten = ops ? PyObject_GetAttrString(ops, "aten") : NULL, *mine = PyImport_ImportModule("koila._run");
    int status = -1;
    if (!aten || !mine) goto done;
    const struct {
        PyObject **slot;
        const char *packet, *overload;
    } needed[] = {
        { &call.narrow, "narrow", "default" },       { &call.copy_, "copy_", "default" },
        { &call.add_, "add_", "Tensor" },            { &call.clone, "clone", "default" },
        { &call.empty_strided, "empty_strided", "default" },
        { &call.maximum, "maximum", "default" },     { &call.minimum, "minimum", "default" },
        { &call.unflatten, "unflatten", "int" },     { &call.flatten, "flatten", "using_ints" },
        { &call.cat, "cat", "default" },             { &call.to_copy, "_to_copy", "default" },
        { &call.mul_, "mul_", "Scalar" },            { &call.squeeze_dims, "squeeze", "dims" },
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!*needed[i].slot && !(*needed[i].slot = op_of(aten, needed[i].packet, needed[i].overload))) goto done;
    if (!(call.float32 = PyObject_GetAttrString(torch, "float32"))) goto done;
    if (!(call.errors = PyImport_ImportModule("koila._errors"))) goto done;
    if (!(call.oom_type = PyObject_GetAttrString(torch, "OutOfMemoryError"))) goto done;
    if (!(call.stale_type = PyObject_GetAttrString(call.errors, "StaleValueError"))) goto done;
    if (!(call.generator = PyObject_GetAttrString(torch, "default_generator"))) goto done;
    if (!(call.guards = PyObject_GetAttrString(mine, "guards"))) goto done;
    if (!(call.pseudo = PyObject_GetAttrString(mine, "PSEUDO"))) goto done;
    call.ready = true;
    status = 0;
done:
    Py_XDECREF(torch);
    Py_XDECREF(ops);
    Py_XDECREF(aten);
    Py_XDECREF(mine);
    return status;
}

PyObject *koila__pseudo_object(const char *name)
{
    if (run_init() < 0) return NULL;
    PyObject *o = PyDict_GetItemString(call.pseudo, name);
    if (!o) PyErr_Format(PyExc_RuntimeError, "koila: no implementation of %s", name);
    return o;
}

/* ---- settings and what was learned */

static struct {
    int64_t rows;            /* forced rows a slice; 0 = automatic */
    uint64_t budget;         /* bytes the device may hold in all; UINT64_MAX = what is free */
    bool has_budget, strict, fastest;
    bool dry;                /* koila.plan(): plans are made, nothing runs */
} settings = { .budget = UINT64_MAX };

/* Bytes an operator uses inside, by signature: seen once whole and once on a slice. A slice's grows with its rows. */
typedef struct workspace {
    uint64_t whole_bytes, slice_bytes;
    int64_t whole_batch, slice_rows;
} workspace;
static struct {
    workspace *at;
    uint32_t n;
    uint64_t generation; /* changes when a plan made before would now be another one */
} learned;

static uint64_t workspace_of(void *user, koila_sig sig, int64_t rows, int64_t batch)
{
    (void)user;
    if (sig >= learned.n) return 0;
    const workspace *w = &learned.at[sig];
    if (!batch || rows == batch) return w->whole_batch >= 0 ? w->whole_bytes : 0;
    if (w->slice_rows > 0) return (uint64_t)((double)w->slice_bytes * (double)rows / (double)w->slice_rows);
    return w->whole_batch > 0 ? (uint64_t)((double)w->whole_bytes * (double)rows / (double)w->whole_batch) : 0;
}

static void learn(koila_sig sig, int64_t rows, int64_t batch, uint64_t bytes)
{
    if (sig >= learned.n) {
        const uint32_t n = koila_table_n_sigs(koila__table) + 64;
        workspace *grown = PyMem_RawRealloc(learned.at, n * sizeof *grown);
        if (!grown) return; /* a less exact prediction, nothing worse */
        memset(grown + learned.n, 0, (n - learned.n) * sizeof *grown);
        learned.at = grown;
        learned.n = n;
    }
    workspace *w = &learned.at[sig];
    uint64_t before;
    if (!batch || rows == batch) {
        before = w->whole_bytes;
        if (bytes > w->whole_bytes) w->whole_bytes = bytes;
        w->whole_batch = batch;
    } else {
        before = workspace_of(NULL, sig, rows, batch); /* what plans counted with until now */
        if (rows > w->slice_rows || (rows == w->slice_rows && bytes > w->slice_bytes)) {
            w->slice_bytes = bytes;
            w->slice_rows = rows;
        }
    }
    if (bytes > before + before / 50 + 4096 || bytes + bytes / 50 + 4096 < before) learned.generation++;
}

/* ---- the plan cache */

typedef struct cached {
    uint32_t refs;
    uint64_t key, generation, used, budget;
    koila_graph *part;
    koila_plan *plan;
    koila_plan_info info;
} cached;
#define N_CACHED 32
static cached *cache[N_CACHED];
static uint64_t cache_clock;
static struct {
    cached *c;
    uint64_t base_bytes, measured_peak_bytes, n_run, budget_bytes, n_made;
    uint32_t retries;
    bool measured;
} last;

static void cached_release(cached *c)
{
    if (!c || --c->refs) return;
    koila_plan_free(c->plan);
    koila_graph_free(c->part);
    PyMem_RawFree(c);
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 29);
}

/* ---- micro_batch("fastest"): of the sizes that fit, a few are timed in the first steps and the fastest is kept */

#define N_TUNED 16
#define N_SIZES 4   /* the automatic size, 1/2, 1/4 and 1/8 of it */
#define N_TIMINGS 2 /* of each; the smaller counts, so that the first step's start-up does not */
typedef struct tuning {
    uint64_t key, used;
    int64_t rows[N_SIZES];
    double seconds[N_SIZES];
    uint32_t n_sizes, n_runs;
} tuning;
static tuning tunings[N_TUNED];

static tuning *tuning_of(uint64_t key)
{
    for (uint32_t i = 0; i < N_TUNED; i++)
        if (tunings[i].n_sizes && tunings[i].key == key) return &tunings[i];
    return NULL;
}

/* Rows for the next run of step `key`; 0: not seen yet, take the automatic size. */
static int64_t tuned_rows(uint64_t key)
{
    tuning *t = tuning_of(key);
    if (!t) return 0;
    t->used = ++cache_clock;
    if (t->n_runs < N_TIMINGS * t->n_sizes) return t->rows[t->n_runs % t->n_sizes];
    uint32_t best = 0;
    for (uint32_t i = 1; i < t->n_sizes; i++)
        if (t->seconds[i] < t->seconds[best]) best = i;
    return t->rows[best];
}

static void tuned_record(uint64_t key, int64_t rows, double seconds)
{
    tuning *t = tuning_of(key);
    if (!t) { /* the automatic size: its first run */
        t = &tunings[0];
        for (uint32_t i = 1; i < N_TUNED; i++)
            if (tunings[i].used < t->used) t = &tunings[i];
        *t = (tuning){ .key = key, .used = ++cache_clock };
        for (int64_t r = rows; t->n_sizes < N_SIZES && (!t->n_sizes || r < t->rows[t->n_sizes - 1]); r = (r + 1) / 2) {
            t->rows[t->n_sizes] = r;
            t->seconds[t->n_sizes++] = HUGE_VAL;
        }
    }
    for (uint32_t i = 0; i < t->n_sizes; i++)
        if (t->rows[i] == rows && seconds < t->seconds[i]) t->seconds[i] = seconds;
    t->n_runs++;
}

/* ---- errors */

static PyObject *error_class(const char *name) { return PyObject_GetAttrString(call.errors, name); } /* pre: no exception is set */

/* Is the current exception an out of memory? By type first, then by the texts torch and its libraries use. Leaves it set. */
bool koila__is_out_of_memory(void)
{
    if (!PyErr_Occurred()) return false;
    if (PyErr_ExceptionMatches(PyExc_MemoryError) || (call.oom_type && PyErr_ExceptionMatches(call.oom_type))) return true;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return false;
    static const char *const texts[] = { "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_SUPPORTED", "can't allocate memory", "not enough memory",
                                         "std::bad_alloc", "could not create a primitive", "could not create a memory" };
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *s = text ? PyUnicode_AsUTF8(text) : NULL;
    bool found = false;
    for (size_t i = 0; s && i < sizeof texts / sizeof *texts; i++) found |= strstr(s, texts[i]) != NULL;
    Py_XDECREF(text);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return found;
}

/* Raise koila.OutOfMemory(text), chained to the exception that is set, if any. */
static void raise_out_of_memory(const char *text, int64_t missing)
{
    PyObject *type, *value, *trace, *cls, *e;
    PyErr_Fetch(&type, &value, &trace);
    if (type) PyErr_NormalizeException(&type, &value, &trace);
    cls = error_class("OutOfMemory");
    e = cls ? PyObject_CallFunction(cls, "s", text) : NULL;
    if (e) {
        PyObject *n = PyLong_FromLongLong(missing);
        if (n) PyObject_SetAttrString(e, "missing_bytes", n);
        Py_XDECREF(n);
        if (value) {
            Py_INCREF(value);
            PyException_SetCause(e, value);
        }
        PyErr_SetObject(cls, e);
    }
    Py_XDECREF(e);
    Py_XDECREF(cls);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* ---- one run */

typedef struct piece {
    int64_t begin, end;
    PyObject *tensor;
} piece;
typedef struct pieces {
    piece *at;
    uint32_t n, n_alloc;
} pieces;

typedef struct exec {
    koila__tape *tape;
    const cached *c;
    const koila_plan *plan;
    const koila_graph *g;
    const koila_table *table;
    const koila_node *node_from; /* nodes of c->part -> nodes of the tape */
    PyObject **whole, **local, **acc;
    pieces *kept;
    uint8_t *done;        /* [instrs of the stage] accumulators the failing rows had already been added to */
    uint32_t n_values;
    int64_t begin, end, batch; /* of the running slice; whole stage: 0, 0, 0 */
    uint64_t n_run;
    uint32_t retries;
    bool measure;
    PyObject *user_state;  /* the user's generator as it was; NULL until the first random operator */
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

/* An uninitialised tensor of meta m, with dimension `dim` of extent `extent` when extent >= 0, laid out densely in m's order of dimensions. */
static PyObject *empty_like_meta(const koila_meta_info *m, int32_t dim, int64_t extent)
{
    int64_t size[KOILA_MAX_DIMS], stride[KOILA_MAX_DIMS], step = 1;
    bool used[KOILA_MAX_DIMS] = { 0 };
    for (uint32_t d = 0; d < m->n_dims; d++) size[d] = (int32_t)d == dim && extent >= 0 ? extent : m->size[d];
    for (uint32_t k = 0; k < m->n_dims; k++) {
        int32_t next = -1;
        for (int32_t d = m->n_dims - 1; d >= 0; d--)
            if (!used[d] && (next < 0 || m->stride[d] < m->stride[next])) next = d;
        used[next] = true;
        stride[next] = step;
        if (size[next] > 1) step *= size[next];
    }
    PyObject *args = NULL, *kw = NULL, *out = NULL, *s = dims_tuple(size, m->n_dims), *t = dims_tuple(stride, m->n_dims);
    PyObject *dtype = koila__dtype_object(m->dtype), *device = koila__device_object(m->device);
    if (s && t && dtype && device && (args = PyTuple_Pack(2, s, t)) && (kw = PyDict_New()) && PyDict_SetItemString(kw, "dtype", dtype) == 0 &&
        PyDict_SetItemString(kw, "device", device) == 0)
        out = PyObject_Call(call.empty_strided, args, kw);
    Py_XDECREF(s);
    Py_XDECREF(t);
    Py_XDECREF(args);
    Py_XDECREF(kw);
    return out;
}

/* The view of whole tensor t that rows [begin, end) own, as share says. New reference. */
static PyObject *rows_of(PyObject *t, koila_share s, int64_t batch, int64_t begin, int64_t end)
{
    if (s.outer == 1) return call_ints(call.narrow, t, s.dim, begin * s.inner, (end - begin) * s.inner);
    PyObject *sizes = Py_BuildValue("(LL)", (long long)s.outer, (long long)(batch * s.inner));
    PyObject *split = sizes ? PyObject_CallFunction(call.unflatten, "OiO", t, (int)s.dim, sizes) : NULL;
    PyObject *rows = split ? call_ints(call.narrow, split, s.dim + 1, begin * s.inner, (end - begin) * s.inner) : NULL;
    Py_XDECREF(sizes);
    Py_XDECREF(split);
    return rows; /* [..., outer, rows * inner, ...] */
}

static bool is_dense(const koila_meta_info *m) { return m->n_storage_bytes == m->n_bytes; }

/* local v := rows of whole v. A dense value stays dense, so that the views recorded on it can be taken of the slice too. */
static PyObject *slice_value(exec *x, koila_value v, koila_share s)
{
    const koila_meta_info *m = koila_meta_get(x->table, koila_value_get(x->g, v).meta);
    PyObject *rows = rows_of(x->whole[v], s, x->batch, x->begin, x->end);
    if (!rows || (s.outer == 1 && x->begin == 0 && x->end == x->batch)) return rows;
    bool outermost = s.outer == 1 && is_dense(m);
    for (uint32_t d = 0; d < m->n_dims && outermost; d++)
        if (d != s.dim && m->size[d] > 1 && m->stride[d] > m->stride[s.dim]) outermost = false;
    if (outermost || (s.outer == 1 && !is_dense(m))) return rows;
    PyObject *flat = rows;
    if (s.outer > 1) {
        flat = PyObject_CallFunction(call.flatten, "Oii", rows, (int)s.dim, (int)s.dim + 1);
        Py_DECREF(rows);
        if (!flat || !is_dense(m)) return flat;
    }
    PyObject *dense = empty_like_meta(m, s.dim, s.outer * s.inner * (x->end - x->begin));
    PyObject *done = dense ? PyObject_CallFunctionObjArgs(call.copy_, dense, flat, NULL) : NULL;
    Py_DECREF(flat);
    Py_XDECREF(done);
    if (!done) Py_CLEAR(dense);
    return dense;
}

static int put_value(exec *x, koila_value v, bool owned)
{
    const koila_share s = koila_plan_share(x->plan, v);
    const koila_meta_info *m = koila_meta_get(x->table, koila_value_get(x->g, v).meta);
    if (!x->acc[v]) {
        if (owned && x->begin == 0 && x->end == x->batch) { /* not owned: somebody may still write to it in place */
            Py_INCREF(x->local[v]);
            x->acc[v] = x->local[v];
            return 0;
        }
        koila_meta_info like = *m;
        int64_t contiguous[KOILA_MAX_DIMS];
        if (!is_dense(m)) {
            for (int64_t d = m->n_dims - 1, step = 1; d >= 0; d--) contiguous[d] = step, step *= m->size[d] ? m->size[d] : 1;
            like.stride = contiguous;
        }
        if (!(x->acc[v] = empty_like_meta(&like, -1, -1))) return -1;
    }
    PyObject *rows = rows_of(x->acc[v], s, x->batch, x->begin, x->end), *source = x->local[v], *split = NULL, *done = NULL;
    if (rows && s.outer > 1) {
        PyObject *sizes = Py_BuildValue("(LL)", (long long)s.outer, (long long)((x->end - x->begin) * s.inner));
        source = split = sizes ? PyObject_CallFunction(call.unflatten, "OiO", x->local[v], (int)s.dim, sizes) : NULL;
        Py_XDECREF(sizes);
    }
    if (rows && source) done = PyObject_CallFunctionObjArgs(call.copy_, rows, source, NULL);
    Py_XDECREF(rows);
    Py_XDECREF(split);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int add_value(exec *x, koila_value v, bool owned)
{
    const koila_share s = koila_plan_share(x->plan, v);
    const koila_meta_info *m = koila_meta_get(x->table, koila_value_get(x->g, v).meta);
    PyObject *mine = x->local[v], *sum = NULL;
    const bool half = m->dtype == KOILA_DTYPE_F16 || m->dtype == KOILA_DTYPE_BF16;
    if (!x->acc[v]) {
        if (half && s.kind == KOILA_SHARE_PARTIAL && s.partial == KOILA_PARTIAL_SUM && !(x->begin == 0 && x->end == x->batch)) {
            PyObject *args = PyTuple_Pack(1, mine), *kw = PyDict_New();
            if (args && kw && PyDict_SetItemString(kw, "dtype", call.float32) == 0) sum = PyObject_Call(call.to_copy, args, kw);
            Py_XDECREF(args);
            Py_XDECREF(kw);
        } else if (owned) {
            Py_INCREF(mine);
            sum = mine;
        } else
            sum = PyObject_CallFunctionObjArgs(call.clone, mine, NULL);
        x->acc[v] = sum;
        return sum ? 0 : -1;
    }
    if (s.kind != KOILA_SHARE_PARTIAL) return 0; /* the same in every slice */
    switch ((koila_partial_kind)s.partial) {
    case KOILA_PARTIAL_SUM:
        sum = PyObject_CallFunctionObjArgs(call.add_, x->acc[v], mine, NULL);
        Py_XDECREF(sum);
        return sum ? 0 : -1;
    case KOILA_PARTIAL_MAX: sum = PyObject_CallFunctionObjArgs(call.maximum, x->acc[v], mine, NULL); break;
    case KOILA_PARTIAL_MIN: sum = PyObject_CallFunctionObjArgs(call.minimum, x->acc[v], mine, NULL); break;
    case KOILA_PARTIAL_MOMENTS: {
        PyObject *combine = koila__pseudo_object("koila::combine_moments");
        if (combine) sum = PyObject_CallFunctionObjArgs(combine, x->acc[v], mine, NULL);
        break;
    }
    }
    if (!sum) return -1;
    Py_SETREF(x->acc[v], sum);
    return 0;
}

static int keep_value(exec *x, koila_value v)
{
    pieces *p = &x->kept[v];
    if (p->n == p->n_alloc) {
        const uint32_t n = p->n_alloc ? p->n_alloc * 2 : 8;
        piece *grown = PyMem_RawRealloc(p->at, n * sizeof *grown);
        if (!grown) return PyErr_NoMemory(), -1;
        p->at = grown;
        p->n_alloc = n;
    }
    Py_INCREF(x->local[v]);
    p->at[p->n++] = (piece){ x->begin, x->end, x->local[v] };
    return 0;
}

/* local v := the kept rows [begin, end): one piece as it is, or cut and joined when an out of memory changed the slices meanwhile. */
static PyObject *fetch_value(exec *x, koila_value v)
{
    const koila_share s = koila_plan_share(x->plan, v);
    pieces *p = &x->kept[v];
    for (uint32_t i = 0; i < p->n; i++)
        if (p->at[i].begin == x->begin && p->at[i].end == x->end) {
            Py_INCREF(p->at[i].tensor);
            return p->at[i].tensor;
        }
    PyObject *list = PyList_New(0), *joined = NULL;
    for (int64_t at = x->begin; list && at < x->end;) {
        const piece *found = NULL;
        for (uint32_t i = 0; i < p->n && !found; i++)
            if (p->at[i].begin <= at && at < p->at[i].end) found = &p->at[i];
        if (!found) {
            PyErr_Format(PyExc_SystemError, "koila: rows %lld of a kept value are missing", (long long)at);
            Py_CLEAR(list);
            break;
        }
        const int64_t end = found->end < x->end ? found->end : x->end;
        PyObject *rows = rows_of(found->tensor, s, found->end - found->begin, at - found->begin, end - found->begin);
        if (!rows || PyList_Append(list, rows) < 0) Py_CLEAR(list);
        Py_XDECREF(rows);
        at = end;
    }
    if (list) joined = PyObject_CallFunction(call.cat, "Oi", list, (int)(s.outer > 1 ? s.dim + 1 : s.dim));
    Py_XDECREF(list);
    if (joined && s.outer > 1) {
        PyObject *flat = PyObject_CallFunction(call.flatten, "Oii", joined, (int)s.dim, (int)s.dim + 1);
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

static int set_generator(PyObject *state)
{
    PyObject *r = PyObject_CallMethod(call.generator, "set_state", "O", state);
    Py_XDECREF(r);
    return r ? 0 : -1;
}

/* A random node on a slice draws what eager draws for the whole batch, from the state recorded before its draw, and takes its rows. */
static int run_random_rows(exec *x, koila_node n, const koila_sig_info *s, koila_value first)
{
    PyObject *base = NULL, *out = NULL, *full = NULL, *rows = NULL;
    koila_value v = first;
    int status = -1;
    if (s->n_writes == 1 && s->n_fresh == 0 && s->n_inputs == 1 && s->writes[0].overwrites) {
        base = empty_like_meta(koila_meta_get(x->table, s->inputs[0]), -1, -1);
        if (!base || koila__call(koila_node_get(x->g, n).sig, &base, NULL, NULL, &out) < 0) goto done;
        full = out;
    } else if (s->n_inputs == 0 && s->n_outputs == 1) {
        if (koila__call(koila_node_get(x->g, n).sig, NULL, NULL, NULL, &out) < 0) goto done;
        full = out;
    } else {
        PyErr_Format(PyExc_RuntimeError, "koila: %s cannot be drawn in slices", koila_op_name(x->table, s->op));
        goto done;
    }
    const koila_share share = koila_plan_share(x->plan, v);
    rows = rows_of(full, share, x->batch, x->begin, x->end);
    if (rows && share.outer > 1) { /* [..., outer, rows * inner, ...] */
        PyObject *flat = PyObject_CallFunction(call.flatten, "Oii", rows, (int)share.dim, (int)share.dim + 1);
        Py_DECREF(rows);
        rows = flat;
    }
    if (rows) x->local[v] = PyObject_CallFunctionObjArgs(call.clone, rows, NULL);
    status = x->local[v] ? 0 : -1;
done:
    Py_XDECREF(base);
    Py_XDECREF(out);
    Py_XDECREF(rows);
    return status;
}

#define MAX_INPUTS 512

static int adapt_call(const koila_plan *plan, koila_node n, int32_t link, int64_t rows, koila_adapt *adapts, koila__arg_fix *fixes, koila__call_fix *out,
                      uint32_t *n_adapts)
{
    const uint32_t k = koila_plan_adapt(plan, n, link, rows, adapts);
    out->n_fix = 0;
    out->fix = fixes;
    for (uint32_t i = 0; i < k; i++)
        if (adapts[i].kind == KOILA_ADAPT_INTS || adapts[i].kind == KOILA_ADAPT_INT)
            fixes[out->n_fix++] = (koila__arg_fix){ adapts[i].arg, adapts[i].n, adapts[i].kind == KOILA_ADAPT_INTS, adapts[i].ints };
    *n_adapts = k;
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
        PyObject *state = koila__tape_random_state(x->tape, x->node_from[koila_plan_recorded(x->plan, n)]);
        if (state) {
            if (!x->user_state && !(x->user_state = PyObject_CallMethod(call.generator, "get_state", NULL))) return -1;
            if (set_generator(state) < 0) return -1;
            const koila_share share = koila_plan_share(x->plan, info.first_output);
            if (in_loop && share.kind == KOILA_SHARE_SLICE && !(x->begin == 0 && x->end == x->batch)) return run_random_rows(x, n, s, info.first_output);
        }
    }
    if (s->n_inputs > 16 && !(inputs = PyMem_Malloc(s->n_inputs * sizeof *inputs))) return PyErr_NoMemory(), -1;
    if (s->n_outputs > 8 && !(outputs = PyMem_Malloc(s->n_outputs * sizeof *outputs))) {
        PyErr_NoMemory();
        goto done;
    }
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_value v = values[i];
        const bool whole = !in_loop || koila_plan_need(x->plan, n, i).kind == KOILA_SHARE_WHOLE;
        inputs[i] = whole ? (x->whole[v] ? x->whole[v] : x->local[v]) : x->local[v];
    }
    for (uint32_t w = 0; w < s->n_writes; w++) { /* the tensor that is written: the old version itself when it is dead, else a copy */
        const uint32_t at = s->writes[w].input;
        PyObject *base;
        if (in->steal >> w & 1) continue;
        if (s->writes[w].overwrites) {
            const koila_share out = koila_plan_share(x->plan, info.first_output + s->n_fresh + w);
            const bool cut = in_loop && out.kind == KOILA_SHARE_SLICE;
            base = empty_like_meta(koila_meta_get(x->table, s->inputs[at]), cut ? out.dim : -1, cut ? out.outer * out.inner * (x->end - x->begin) : -1);
        } else if (inputs[at])
            base = PyObject_CallFunctionObjArgs(call.clone, inputs[at], NULL);
        else {
            PyErr_Format(PyExc_SystemError, "koila: input %u of %s is missing", at, koila_op_name(x->table, s->op));
            base = NULL;
        }
        if (!base) goto done;
        inputs[at] = made[n_made++] = base;
    }
    for (uint32_t i = 0; i < s->n_inputs; i++)
        if (!inputs[i]) {
            PyErr_Format(PyExc_SystemError, "koila: input %u of %s is missing", i, koila_op_name(x->table, s->op));
            goto done;
        }
    if (in_loop) {
        const int64_t rows = x->end - x->begin;
        for (uint32_t w = 0; w < s->n_writes; w++)
            for (uint32_t l = 0; l < s->writes[w].n_links && n_links < 8; l++, n_links++) {
                uint32_t ignored;
                adapt_call(x->plan, n, (int32_t)n_links, rows, link_adapts + KOILA_MAX_ADAPTS * n_links, link_fixes + KOILA_MAX_ADAPTS * n_links, &link_fix[n_links], &ignored);
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
            outputs[0] = dims ? PyObject_CallFunctionObjArgs(call.squeeze_dims, inputs[0], dims, NULL) : NULL;
            Py_XDECREF(dims);
            if (!outputs[0]) goto done;
            goto made_outputs;
        }
    }
    if (koila__call(info.sig, inputs, fix.n_fix ? &fix : NULL, n_links ? link_fix : NULL, outputs) < 0) goto done;
made_outputs:
    for (uint32_t i = 0; i < n_adapts; i++)
        if (adapts[i].kind == KOILA_ADAPT_SCALE && outputs[adapts[i].output] && x->end - x->begin != x->batch) {
            PyObject *scaled = PyObject_CallFunction(call.mul_, "Od", outputs[adapts[i].output], (double)(x->end - x->begin) / (double)x->batch);
            Py_XDECREF(scaled);
            if (!scaled) {
                for (uint32_t o = 0; o < s->n_outputs; o++) Py_XDECREF(outputs[o]);
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
    while (n_made) Py_DECREF(made[--n_made]);
    if (inputs != few) PyMem_Free(inputs);
    if (outputs != outputs_few) PyMem_Free(outputs);
    return status;
}

/* ---- one slice, one stage */

static int run_instrs(exec *x, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        const koila_value v = in->id;
        int status = 0;
        switch ((koila_instr_kind)in->kind) {
        case KOILA_DO_RUN: {
            const uint64_t old = x->measure ? koila__truth_swap_peak(koila__truth_current()) : 0;
            status = run_node(x, in, st->is_loop);
            if (x->measure) {
                const uint64_t peak = koila__truth_peak(), now = koila__truth_current();
                if (status == 0) learn(koila_node_get(x->g, in->id).sig, x->end - x->begin, x->batch, peak - now);
                if (old > peak) koila__truth_swap_peak(old);
            }
            if (status == 0 && (x->n_run & 1023) == 0 && PyErr_CheckSignals() < 0) status = -1;
            break;
        }
        case KOILA_DO_SLICE: status = (x->local[v] = slice_value(x, v, koila_plan_need(x->plan, in->user, in->steal))) ? 0 : -1; break;
        case KOILA_DO_FETCH: status = (x->local[v] = fetch_value(x, v)) ? 0 : -1; break;
        case KOILA_DO_KEEP: status = keep_value(x, v); break;
        case KOILA_DO_PUT: status = put_value(x, v, in->flags & KOILA_INSTR_OWNED); break;
        case KOILA_DO_ADD:
            if (x->done[i]) break;
            status = add_value(x, v, in->flags & KOILA_INSTR_OWNED);
            if (status == 0) x->done[i] = 1;
            break;
        case KOILA_DO_FREE:
            if (st->is_loop)
                Py_CLEAR(x->local[v]);
            else
                Py_CLEAR(x->whole[v]);
            break;
        }
        if (status < 0) return -1;
    }
    return 0;
}

static void clear_local(exec *x)
{
    for (uint32_t v = 0; v < x->n_values; v++) Py_CLEAR(x->local[v]);
}

/* Rows [begin, end) of a loop, in slices of at most `rows`. */
static int run_rows(exec *x, const koila_stage *st, int64_t begin, int64_t end, int64_t rows, const uint8_t *already)
{
    uint8_t *mine = already ? PyMem_Malloc(st->n_instrs ? st->n_instrs : 1) : NULL;
    if (already && !mine) return PyErr_NoMemory(), -1;
    if (mine) memcpy(mine, already, st->n_instrs);
    int status = 0;
    for (int64_t at = begin; at < end && status == 0; at += rows) {
        x->begin = at;
        x->end = at + rows < end ? at + rows : end;
        x->batch = koila_graph_axis_size(x->g, st->axis);
        if (mine)
            memcpy(x->done, mine, st->n_instrs);
        else
            memset(x->done, 0, st->n_instrs);
        if (PyErr_CheckSignals() < 0) {
            status = -1;
            break;
        }
        status = run_instrs(x, st);
        const int64_t b = at, e = x->end;
        if (status == 0) {
            for (uint32_t i = 0; i < st->n_instrs; i++)
                if (st->instrs[i].kind == KOILA_DO_FETCH && st->instrs[i].flags & KOILA_INSTR_LAST) give_up(x, st->instrs[i].id, b, e);
            continue;
        }
        if (!koila__is_out_of_memory()) {
            clear_local(x);
            break;
        }
        if (e - b > 1) {
            PyErr_Clear();
            clear_local(x);
            for (uint32_t i = 0; i < st->n_instrs; i++)
                if (st->instrs[i].kind == KOILA_DO_KEEP) give_up(x, st->instrs[i].id, b, e);
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
    if (!st->n_instrs) return 0;
    if (!(x->done = PyMem_Malloc(st->n_instrs))) return PyErr_NoMemory(), -1;
    int status = run_rows(x, st, 0, koila_graph_axis_size(x->g, st->axis), koila_plan_axis_rows(x->plan, st->axis), NULL);
    PyMem_Free(x->done);
    x->done = NULL;
    for (uint32_t i = 0; i < st->n_instrs && status == 0; i++) { /* what was collected is whole now; wide accumulators are cast back */
        const koila_value v = st->instrs[i].id;
        if ((st->instrs[i].kind != KOILA_DO_ADD && st->instrs[i].kind != KOILA_DO_PUT) || !x->acc[v]) continue;
        const koila_meta_info *m = koila_meta_get(x->table, koila_value_get(x->g, v).meta);
        PyObject *is = st->instrs[i].kind == KOILA_DO_ADD ? PyObject_GetAttrString(x->acc[v], "dtype") : NULL;
        if (is && is != koila__dtype_object(m->dtype)) {
            PyObject *args = PyTuple_Pack(1, x->acc[v]), *kw = PyDict_New(), *cast = NULL;
            if (args && kw && PyDict_SetItemString(kw, "dtype", koila__dtype_object(m->dtype)) == 0) cast = PyObject_Call(call.to_copy, args, kw);
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

/* ---- memory there is */

/* Bytes the step may use beyond what is live now; *limit gets the total the device may hold (for reports), UINT64_MAX when there is none. */
static uint64_t free_bytes(uint64_t *limit)
{
    const uint64_t now = settings.dry ? 0 : koila__truth_current();
    *limit = UINT64_MAX;
    if (settings.dry && !settings.has_budget) return UINT64_MAX;
    if (settings.has_budget) {
        *limit = settings.budget;
        return settings.budget > now ? settings.budget - now : 0;
    }
    PyObject *mine = PyImport_ImportModule("koila._run"), *n = mine ? PyObject_CallMethod(mine, "free_bytes", NULL) : NULL;
    uint64_t bytes = UINT64_MAX;
    if (n && n != Py_None) {
        bytes = PyLong_AsUnsignedLongLong(n);
        if (PyErr_Occurred()) bytes = UINT64_MAX;
        else *limit = bytes + now;
    }
    PyErr_Clear();
    Py_XDECREF(mine);
    Py_XDECREF(n);
    return bytes;
}

/* ---- planning through the cache */

static cached *plan_for(koila_graph *part, const koila_value *targets, uint32_t n_targets, uint64_t budget, int64_t rows, koila_error *err, koila_status *status)
{ /* takes `part` */
    uint64_t key = mix(koila_graph_hash(part), (uint64_t)rows);
    for (uint32_t i = 0; i < n_targets; i++) key = mix(key, targets[i]);
    cached **oldest = &cache[0];
    for (uint32_t i = 0; i < N_CACHED; i++) {
        cached *c = cache[i];
        if (c && c->key == key && c->generation == learned.generation && c->info.peak_bytes <= budget &&
            (rows > 0 || c->info.n_slices == 1 || budget / 4 <= c->budget / 3 || budget == c->budget)) {
            c->used = ++cache_clock;
            c->refs++;
            koila_graph_free(part);
            return c;
        }
        if (!c || (*oldest && c->used < (*oldest)->used)) oldest = &cache[i];
    }
    const koila_plan_options o = { .struct_size = sizeof o, .budget_bytes = rows > 0 && !settings.has_budget ? UINT64_MAX : budget, .rows = rows, .workspace = workspace_of };
    koila_plan *plan = NULL;
    *status = koila_plan_new(part, targets, n_targets, &o, NULL, &plan, err);
    if (*status == KOILA_OOM && rows > 0) { /* forced rows: tried all the same, with the least memory */
        koila_plan_options frugal = o;
        frugal.budget_bytes = UINT64_MAX;
        *status = koila_plan_new(part, targets, n_targets, &frugal, NULL, &plan, err);
    }
    cached *c = *status == KOILA_OK ? PyMem_RawCalloc(1, sizeof *c) : NULL;
    if (!c) {
        koila_plan_free(plan);
        koila_graph_free(part);
        if (*status == KOILA_OK) *status = KOILA_NO_MEMORY;
        return NULL;
    }
    *c = (cached){ .refs = 2, .key = key, .generation = learned.generation, .used = ++cache_clock, .budget = budget, .part = part, .plan = plan, .info = koila_plan_get(plan) };
    cached_release(*oldest);
    *oldest = c;
    return c;
}

/* ---- the run */

/* The part of the tape that makes the targets, and the way back. All arrays are PyMem. */
typedef struct request {
    koila_graph *part;
    koila_value *value_of;  /* [tape values] */
    koila_node *node_from;
    koila_value *targets;   /* of part */
    uint8_t *known;
} request;

static void request_free(request *r)
{
    koila_graph_free(r->part);
    PyMem_Free(r->value_of);
    PyMem_Free(r->node_from);
    PyMem_Free(r->targets);
    PyMem_Free(r->known);
    *r = (request){ 0 };
}

static int request_make(koila__tape *t, const koila_value *targets, uint32_t n, request *r)
{
    const uint32_t n_values = koila_graph_n_values(t->graph), n_nodes = koila_graph_n_nodes(t->graph);
    *r = (request){ 0 };
    r->value_of = PyMem_Malloc((n_values + 1) * sizeof *r->value_of);
    r->node_from = PyMem_Malloc((n_nodes + 1) * sizeof *r->node_from);
    r->targets = PyMem_Malloc((n + 1) * sizeof *r->targets);
    r->known = PyMem_Calloc(n_values + 1, 1);
    koila_status status = KOILA_NO_MEMORY;
    if (r->value_of && r->node_from && r->targets && r->known) {
        for (uint32_t v = 0; v < n_values; v++) r->known[v] = t->values[v].real != NULL;
        status = koila_graph_extract(t->graph, targets, n, r->known, NULL, &r->part, r->value_of, r->node_from);
    }
    if (status != KOILA_OK) {
        request_free(r);
        koila__raise(status);
        return -1;
    }
    for (uint32_t i = 0; i < n; i++) r->targets[i] = r->value_of[targets[i]];
    return 0;
}

/* Leaves that changed since they were recorded make every value that needs them stale. */
static int check_versions(koila__tape *t, const request *r)
{
    const uint32_t n_values = koila_graph_n_values(t->graph);
    for (uint32_t v = 0; v < n_values; v++) {
        if (r->value_of[v] == KOILA_NONE || !t->values[v].real || koila_value_get(t->graph, v).node != KOILA_NONE) continue;
        uint32_t now;
        if (koila__version_of(t->values[v].real, &now) < 0) return -1;
        if (now == t->values[v].version) continue;
        PyObject *shape = PyObject_GetAttrString(t->values[v].real, "shape");
        if (shape)
            PyErr_Format(call.stale_type,
                         "a value recorded before was asked for, but it needs a tensor of shape %R that has been written since (version %u, recorded at %u): a parameter "
                         "after optimizer.step(), or a buffer. Ask for it before that (print it, .item(), .torch()), or keep a reference to it until the step runs: "
                         "values you hold are saved as they pass by",
                         shape, now, t->values[v].version);
        Py_XDECREF(shape);
        return -1;
    }
    return 0;
}

static void exec_free(exec *x)
{
    for (uint32_t v = 0; v < x->n_values; v++) {
        if (x->whole) Py_XDECREF(x->whole[v]);
        if (x->local) Py_XDECREF(x->local[v]);
        if (x->acc) Py_XDECREF(x->acc[v]);
        if (x->kept) {
            for (uint32_t i = 0; i < x->kept[v].n; i++) Py_DECREF(x->kept[v].at[i].tensor);
            PyMem_RawFree(x->kept[v].at);
        }
    }
    PyMem_Free(x->whole);
    PyMem_Free(x->local);
    PyMem_Free(x->acc);
    PyMem_Free(x->kept);
    Py_CLEAR(x->user_state);
}

/* Run plan c for request r; results[n] are new references. */
static int run_plan(koila__tape *t, const request *r, const cached *c, uint32_t n, PyObject **results, uint32_t *retries, uint64_t *n_run)
{
    exec x = { .tape = t, .c = c, .plan = c->plan, .g = koila_plan_graph(c->plan), .table = koila__table, .node_from = r->node_from };
    int status = -1;
    x.n_values = koila_graph_n_values(x.g);
    x.measure = koila__truth_ok();
    x.whole = PyMem_Calloc(x.n_values + 1, sizeof *x.whole);
    x.local = PyMem_Calloc(x.n_values + 1, sizeof *x.local);
    x.acc = PyMem_Calloc(x.n_values + 1, sizeof *x.acc);
    x.kept = PyMem_Calloc(x.n_values + 1, sizeof *x.kept);
    PyObject *guard = NULL;
    if (!x.whole || !x.local || !x.acc || !x.kept) {
        PyErr_NoMemory();
        goto done;
    }
    for (uint32_t v = 0; v < koila_graph_n_values(t->graph); v++) {
        if (r->value_of[v] == KOILA_NONE || !t->values[v].real) continue;
        const koila_value leaf = koila_plan_leaf(c->plan, r->value_of[v]);
        if (leaf == KOILA_NONE || koila_value_get(x.g, leaf).node != KOILA_NONE) continue;
        Py_INCREF(t->values[v].real);
        Py_XSETREF(x.whole[leaf], t->values[v].real);
    }
    if (!(guard = PyObject_CallNoArgs(call.guards))) goto done;
    status = 0;
    for (uint32_t k = 0; k < c->info.n_stages && status == 0; k++) status = run_stage(&x, k);
    for (uint32_t i = 0; i < n && status == 0; i++) {
        results[i] = x.whole[koila_plan_target(c->plan, i)];
        if (!results[i]) {
            PyErr_SetString(PyExc_SystemError, "koila: a target was not made");
            status = -1;
            while (i) Py_CLEAR(results[--i]);
            break;
        }
        Py_INCREF(results[i]);
    }
done:
    *retries += x.retries;
    *n_run += x.n_run;
    if (x.user_state) { /* the user's generator is as it was, whatever happened */
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (set_generator(x.user_state) < 0 && type) PyErr_Clear();
        if (type) PyErr_Restore(type, value, trace);
        else if (PyErr_Occurred()) status = -1;
    }
    exec_free(&x);
    Py_XDECREF(guard);
    return status;
}

static int raise_no_fit(koila_status status, const koila_error *err, const char *what)
{
    if (status == KOILA_OOM) {
        const char *p = strstr(err->text, ", ");
        unsigned long long missing = 0;
        const char *shorter = strstr(err->text, " bytes short");
        if (p && shorter) {
            const char *q = shorter;
            while (q > err->text && q[-1] >= '0' && q[-1] <= '9') q--;
            missing = strtoull(q, NULL, 10);
        }
        char text[400];
        snprintf(text, sizeof text, "%s: %s. Try: a larger budget, a smaller model or sequence, or torch.utils.checkpoint around its blocks", what, err->text);
        raise_out_of_memory(text, (int64_t)missing);
    } else if (status != KOILA_OK) {
        if (err->text[0] && status != KOILA_NO_MEMORY)
            PyErr_Format(PyExc_RuntimeError, "koila: %s", err->text);
        else
            koila__raise(status);
    }
    return -1;
}

static int check_strict(const cached *c)
{
    if (!settings.strict || c->info.n_slices <= 1) return 0;
    for (uint32_t i = 0; i < c->info.n_gathers; i++) {
        const koila_gather g = koila_plan_gather(c->plan, i);
        if (g.bytes <= koila_plan_value_bytes(c->plan, g.value, c->info.rows)) continue;
        PyObject *cls = error_class("GatherError"), *text = koila__gather_text(c->plan, c->part, g, c->info.rows);
        if (cls && text) PyErr_SetObject(cls, text);
        Py_XDECREF(cls);
        Py_XDECREF(text);
        return -1;
    }
    return 0;
}

int koila__run_request(koila__tape *t, const koila_value *wanted, uint32_t n_wanted, const koila_value *held, uint32_t n_held, bool commit_effects);

int koila__run(koila__tape *t, const koila_value *targets, uint32_t n_targets, bool commit_effects)
{
    if (settings.dry && run_init() == 0) {
        PyObject *cls = error_class("UnsupportedError");
        if (cls) PyErr_SetString(cls, "koila.plan(): the step reads a value (print, .item(), if, a mask) before backward; nothing is computed while planning. Plan the part up to there");
        Py_XDECREF(cls);
        return -1;
    }
    /* what else the user still holds and is small is made too, so that reading five logged losses is one run and not five */
    koila_value held[256];
    uint32_t n_held = koila__tape_held(t, held, 256), n_small = 0;
    if (n_held > 256) n_held = 256;
    for (uint32_t i = 0; i < n_held; i++) {
        const koila_meta_info *m = koila_meta_get(koila__table, koila_value_get(t->graph, held[i]).meta);
        if (m->n_elements <= 1024) held[n_small++] = held[i];
    }
    return koila__run_request(t, targets, n_targets, held, n_small, commit_effects);
}

/* `wanted` must be made; `held` are made too as long as they fit (largest given up first) and are never a reason to fail. */
int koila__run_request(koila__tape *t, const koila_value *wanted, uint32_t n_wanted, const koila_value *held, uint32_t n_held, bool commit_effects)
{
    if (run_init() < 0) return -1;
    const uint32_t n_effects = commit_effects ? t->n_effects : 0;
    koila_value *targets = PyMem_Malloc(((size_t)n_wanted + n_held + n_effects + 1) * sizeof *targets);
    PyObject **results = NULL;
    uint32_t n = 0, n_must, retries = 0;
    uint64_t n_run = 0, limit, base = koila__truth_current(), peak_before = 0;
    int status = -1;
    int64_t rows = settings.rows;
    bool measured = false;
    request r = { 0 };
    if (!targets) return PyErr_NoMemory(), -1;
#define WANT(v_)                                                   \
    do {                                                           \
        const koila_value want_ = (v_);                            \
        bool there_ = t->values[want_].real != NULL;               \
        for (uint32_t k_ = 0; k_ < n && !there_; k_++) there_ = targets[k_] == want_; \
        if (!there_) targets[n++] = want_;                         \
    } while (0)
    for (uint32_t i = 0; i < n_wanted; i++) WANT(wanted[i]);
    for (uint32_t i = 0; i < n_effects; i++) WANT(t->effects[i].value);
    n_must = n;
    for (uint32_t i = 0; i < n_held; i++) WANT(held[i]);
#undef WANT
    t->ran = true;
    if (n == 0) {
        status = 0;
        goto commit;
    }
    for (;;) {
        koila_error err = KOILA_ERROR_INIT;
        koila_status plan_status = KOILA_OK;
        request_free(&r);
        if (request_make(t, targets, n, &r) < 0) goto done;
        if (check_versions(t, &r) < 0) {
            if (PyErr_ExceptionMatches(call.stale_type) && n > n_must) { /* something merely held is stale: do without */
                PyErr_Clear();
                n = n_must;
                if (!n) {
                    status = 0;
                    goto commit;
                }
                continue;
            }
            goto done;
        }
        const uint64_t budget = free_bytes(&limit);
        koila_graph *part = r.part;
        r.part = NULL;
        const bool tune = settings.fastest && !settings.rows && !retries;
        const uint64_t tune_key = koila_graph_hash(part);
        if (tune) rows = tuned_rows(tune_key);
        cached *c = plan_for(part, r.targets, n, budget, rows, &err, &plan_status);
        if (!c) {
            if (plan_status == KOILA_OOM && n > n_must) { /* give up the largest of what is merely held */
                uint32_t largest = n_must;
                for (uint32_t i = n_must; i < n; i++)
                    if (koila_meta_get(koila__table, koila_value_get(t->graph, targets[i]).meta)->n_bytes >
                        koila_meta_get(koila__table, koila_value_get(t->graph, targets[largest]).meta)->n_bytes)
                        largest = i;
                targets[largest] = targets[--n];
                continue;
            }
            raise_no_fit(plan_status, &err, "one step");
            goto done;
        }
        if (check_strict(c) < 0) {
            cached_release(c);
            goto done;
        }
        if (settings.dry) {
            cached_release(last.c);
            last.c = c;
            last.n_made++;
            last.base_bytes = 0;
            last.measured = false;
            last.retries = 0;
            last.n_run = 0;
            last.budget_bytes = limit;
            status = 0;
            request_free(&r);
            PyMem_Free(targets);
            PyMem_Free(results);
            return 0;
        }
        PyMem_Free(results);
        results = PyMem_Calloc(n + 1, sizeof *results);
        if (!results) {
            cached_release(c);
            PyErr_NoMemory();
            goto done;
        }
        base = koila__truth_current();
        peak_before = koila__truth_swap_peak(base);
        measured = koila__truth_ok();
        const double started = seconds_now();
        status = run_plan(t, &r, c, n, results, &retries, &n_run);
        if (tune && status == 0) tuned_record(tune_key, c->info.rows, seconds_now() - started);
        const uint64_t peak = koila__truth_peak();
        if (peak_before > peak) koila__truth_swap_peak(peak_before);
        if (status < 0 && koila__is_out_of_memory() && c->info.rows > 1 && c->info.batch > 1 && retries < 64) {
            PyErr_Clear(); /* the plan was too optimistic: half the rows */
            rows = (c->info.rows + 1) / 2;
            retries++;
            cached_release(c);
            continue;
        }
        if (status < 0 && n > n_must && !koila__is_out_of_memory() && PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear(); /* perhaps something merely held cannot be computed: that is not this step's error */
            n = n_must;
            cached_release(c);
            continue;
        }
        if (status < 0 && koila__is_out_of_memory()) {
            char text[300];
            koila_gather top[3];
            const uint32_t n_top = koila_plan_largest(c->plan, top, 3);
            int used = snprintf(text, sizeof text, "out of memory with slices of %lld row(s); largest:", (long long)c->info.rows);
            for (uint32_t i = 0; i < n_top && used > 0 && (size_t)used < sizeof text; i++) {
                const koila_node q = koila_value_get(koila_plan_graph(c->plan), top[i].value).node;
                used += snprintf(text + used, sizeof text - (size_t)used, " %s %.1f MiB", q == KOILA_NONE ? "input" : koila_op_name(koila__table, koila_sig_get(koila__table, koila_node_get(koila_plan_graph(c->plan), q).sig)->op), (double)top[i].bytes / 1048576.0);
            }
            raise_out_of_memory(text, 0);
        }
        if (status == 0) {
            cached_release(last.c);
            last.c = c;
            last.n_made++;
            last.base_bytes = base;
            last.measured = measured && koila__truth_ok();
            last.measured_peak_bytes = peak;
            last.retries = retries;
            last.n_run = n_run;
            last.budget_bytes = limit;
        } else
            cached_release(c);
        break;
    }
    if (status < 0) goto done;
    for (uint32_t i = 0; i < n; i++) koila__tape_set_real(t, targets[i], results[i]); /* takes the references */
commit:
    for (uint32_t i = 0; i < n_effects && status == 0; i++) { /* copies of equal dtype into memory that is there: nothing here can fail halfway */
        tape_effect *e = &t->effects[i];
        PyObject *new_contents = t->values[e->value].real;
        if (!new_contents || !e->real) continue;
        PyObject *ok = PyObject_CallFunctionObjArgs(call.copy_, e->real, new_contents, NULL);
        Py_XDECREF(ok);
        if (!ok) status = -1;
    }
    if (n_effects && status == 0) koila__tape_drop_effects(t);
done:
    request_free(&r);
    PyMem_Free(targets);
    PyMem_Free(results);
    return status;
}

/* ---- the module's functions */

static PyObject *py_configure(PyObject *self, PyObject *args, PyObject *kw)
{
    static char *names[] = { "micro_batch", "budget", "strict", "fastest", "dry", NULL };
    static PyObject unset;
    PyObject *rows = &unset, *budget = &unset, *strict = &unset, *fastest = &unset, *dry = &unset;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "|$OOOOO:configure", names, &rows, &budget, &strict, &fastest, &dry)) return NULL;
    PyObject *before = Py_BuildValue("{s:N,s:N,s:O,s:O,s:O}", "micro_batch", settings.rows ? PyLong_FromLongLong(settings.rows) : Py_NewRef(Py_None), "budget",
                                     settings.has_budget ? PyLong_FromUnsignedLongLong(settings.budget) : Py_NewRef(Py_None), "strict", settings.strict ? Py_True : Py_False,
                                     "fastest", settings.fastest ? Py_True : Py_False, "dry", settings.dry ? Py_True : Py_False);
    if (!before) return NULL;
    const int64_t new_rows = rows == &unset ? settings.rows : rows == Py_None ? 0 : PyLong_AsLongLong(rows);
    const uint64_t new_budget = budget == &unset || budget == Py_None ? UINT64_MAX : PyLong_AsUnsignedLongLong(budget);
    if (PyErr_Occurred() || new_rows < 0) {
        Py_DECREF(before);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "micro_batch must be at least 1");
        return NULL;
    }
    settings.rows = new_rows;
    if (dry != &unset) settings.dry = PyObject_IsTrue(dry) == 1;
    if (budget != &unset) {
        koila__truth_install();
        settings.has_budget = budget != Py_None;
        settings.budget = settings.has_budget ? new_budget : UINT64_MAX;
        if (!settings.dry) koila__truth_set_limit(settings.budget); /* the budget is a limit for everybody: beyond it torch itself raises */
    }
    if (strict != &unset) settings.strict = PyObject_IsTrue(strict) == 1;
    if (fastest != &unset) settings.fastest = PyObject_IsTrue(fastest) == 1;
    return before;
}

static PyObject *py_n_plans(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return PyLong_FromUnsignedLongLong(last.n_made);
}

static PyObject *py_last_plan(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    if (!last.c) Py_RETURN_NONE;
    return koila__plan_dict(last.c->plan, last.c->part, last.base_bytes, last.measured ? &last.measured_peak_bytes : NULL, last.budget_bytes, last.retries, last.n_run);
}

/* Handles of a list of lazy tensors: their tape (of the first) and values, concrete ones left out. */
static koila__tape *values_of_list(PyObject *list, koila_value **values, uint32_t *n)
{
    PyObject *fast = PySequence_Fast(list, "expected a list of lazy tensors");
    if (!fast) return NULL;
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    koila__tape *t = NULL;
    *n = 0;
    *values = PyMem_Malloc(((size_t)size + 1) * sizeof **values);
    for (Py_ssize_t i = 0; *values && i < size; i++) {
        PyObject *o = PySequence_Fast_GET_ITEM(fast, i);
        koila__handle *h = koila__is_lazy(o) ? koila__handle_of(o) : NULL;
        if (!h) continue;
        if (t && h->group->tape != t) { /* of another step: on its own */
            if (!koila__concrete(h)) goto fail;
            continue;
        }
        const koila_value v = koila__value_of(h);
        if (v == KOILA_NONE) goto fail;
        t = h->group->tape;
        if (!t->values[v].real) (*values)[(*n)++] = v;
    }
    Py_DECREF(fast);
    if (!t) PyErr_SetString(PyExc_ValueError, "no lazy tensor among the values");
    return t;
fail:
    Py_DECREF(fast);
    PyMem_Free(*values);
    *values = NULL;
    return NULL;
}

/* run_all(lazies, commit) -> None: all of them concrete in one run, with what the user holds; commit also writes effects and closes the tape. */
static PyObject *py_run_all(PyObject *self, PyObject *args)
{
    PyObject *list;
    int commit;
    koila_value *values = NULL, *held = NULL;
    uint32_t n, n_held;
    (void)self;
    if (!PyArg_ParseTuple(args, "Op:run_all", &list, &commit)) return NULL;
    if (run_init() < 0) return NULL;
    koila__tape *t = values_of_list(list, &values, &n);
    if (!t) {
        PyMem_Free(values);
        return NULL;
    }
    Py_INCREF(t);
    n_held = koila__tape_held(t, NULL, 0);
    held = PyMem_Malloc(((size_t)n_held + 1) * sizeof *held);
    int status = held ? 0 : (PyErr_NoMemory(), -1);
    if (held) {
        const uint32_t there = koila__tape_held(t, held, n_held);
        status = koila__run_request(t, values, n, held, there < n_held ? there : n_held, commit);
    }
    if (status == 0 && commit) {
        t->closed = true;
        if (koila__open == t) {
            koila__open = NULL;
            Py_DECREF(t);
        }
        koila__tape_let_go(t);
    }
    PyMem_Free(values);
    PyMem_Free(held);
    Py_DECREF(t);
    if (status < 0) return NULL;
    Py_RETURN_NONE;
}

/* take_all(lazies) -> list of plain tensors: each concrete value, which the tape then lets go when nobody else can ask for it, so that whoever gets
 * it may own its storage alone (AccumulateGrad takes a gradient without a copy only then). */
static PyObject *py_take_all(PyObject *self, PyObject *list)
{
    PyObject *fast = PySequence_Fast(list, "expected a list of lazy tensors");
    (void)self;
    if (!fast) return NULL;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    PyObject *out = PyList_New(n);
    for (Py_ssize_t i = 0; out && i < n; i++) {
        PyObject *o = PySequence_Fast_GET_ITEM(fast, i), *real = koila__is_lazy(o) ? koila__concrete(koila__handle_of(o)) : o;
        if (!real) Py_CLEAR(out);
        else PyList_SET_ITEM(out, i, Py_NewRef(real));
    }
    for (Py_ssize_t i = 0; out && i < n; i++) {
        PyObject *o = PySequence_Fast_GET_ITEM(fast, i);
        koila__handle *h = koila__is_lazy(o) ? koila__handle_of(o) : NULL;
        if (!h || h->value == KOILA_NONE || h->next_of_value || h->prev_of_value) continue;
        koila__tape *t = h->group->tape;
        if (!t->closed && (h->chain || h->group->refs > 1)) continue;
        if (koila_value_get(t->graph, h->value).node != KOILA_NONE) Py_CLEAR(t->values[h->value].real);
    }
    Py_DECREF(fast);
    return out;
}

static PyObject *py_explain(PyObject *self, PyObject *list)
{
    koila_value *values = NULL;
    uint32_t n;
    (void)self;
    if (run_init() < 0) return NULL;
    koila__tape *t = values_of_list(list, &values, &n);
    request r = { 0 };
    PyObject *d = NULL;
    if (!t || request_make(t, values, n, &r) < 0) goto done;
    koila_error err = KOILA_ERROR_INIT;
    koila_status status = KOILA_OK;
    uint64_t limit;
    const uint64_t budget = free_bytes(&limit);
    koila_graph *part = r.part;
    r.part = NULL;
    cached *c = plan_for(part, r.targets, n, budget, settings.rows, &err, &status);
    if (!c) {
        raise_no_fit(status, &err, "explain");
        goto done;
    }
    d = koila__plan_dict(c->plan, c->part, koila__truth_current(), NULL, limit, 0, 0);
    cached_release(c);
done:
    request_free(&r);
    PyMem_Free(values);
    return d;
}

static PyObject *py_save_graph(PyObject *self, PyObject *args)
{
    PyObject *list;
    const char *path;
    (void)self;
    if (!PyArg_ParseTuple(args, "Os:save_graph", &list, &path)) return NULL;
    if (list == Py_None) {
        if (!last.c) return PyErr_SetString(PyExc_ValueError, "no step has run yet"), NULL;
        if (koila__save_graph(last.c->part, path) < 0) return NULL;
        Py_RETURN_NONE;
    }
    koila_value *values = NULL;
    uint32_t n;
    koila__tape *t = values_of_list(list, &values, &n);
    request r = { 0 };
    int status = t ? request_make(t, values, n, &r) : -1;
    if (status == 0) status = koila__save_graph(r.part, path);
    request_free(&r);
    PyMem_Free(values);
    if (status < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_is_recording(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return PyBool_FromLong(koila__n_handles != 0);
}

/* predict(device, memory, rows, optimizer, way): the last planned step on a device profile (a name, or JSON text). */
static PyObject *py_predict(PyObject *self, PyObject *args)
{
    const char *device, *optimizer, *way;
    unsigned long long memory;
    long long rows;
    (void)self;
    if (!PyArg_ParseTuple(args, "sKLss:predict", &device, &memory, &rows, &optimizer, &way)) return NULL;
    if (!last.c) return PyErr_SetString(PyExc_ValueError, "no step was planned"), NULL;
    return koila__predict_graph(last.c->part, device, memory, rows, optimizer, way);
}

static PyObject *py_device_names(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    return koila__device_names();
}

static PyObject *py_register_rule(PyObject *self, PyObject *args)
{
    const char *op, *rule;
    koila_error err = KOILA_ERROR_INIT;
    (void)self;
    if (!PyArg_ParseTuple(args, "ss:register_rule", &op, &rule)) return NULL;
    const koila_status status = koila_table_rule(koila__table, op, rule, &err);
    if (status == KOILA_BAD_INPUT) return PyErr_SetString(PyExc_ValueError, err.text), NULL;
    if (status != KOILA_OK) return koila__raise(status);
    Py_RETURN_NONE;
}

/* Forget plans and what was learned: for tests. */
static PyObject *py_forget(PyObject *self, PyObject *ignored)
{
    (void)self, (void)ignored;
    for (uint32_t i = 0; i < N_CACHED; i++) {
        cached_release(cache[i]);
        cache[i] = NULL;
    }
    if (learned.n) memset(learned.at, 0, learned.n * sizeof *learned.at);
    learned.generation++;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "configure", (PyCFunction)(void (*)(void))py_configure, METH_VARARGS | METH_KEYWORDS, "Change settings; returns those before as a dict." },
    { "n_plans", py_n_plans, METH_NOARGS, "How often last_plan() has changed." },
    { "last_plan", py_last_plan, METH_NOARGS, "Facts of the last run as a dict, or None." },
    { "run_all", py_run_all, METH_VARARGS, "run_all(lazies, commit): make them concrete in one run." },
    { "take_all", py_take_all, METH_O, "take_all(lazies) -> their plain tensors, no longer held by the tape." },
    { "explain", py_explain, METH_O, "explain(lazies): the plan that would make them, as a dict; runs nothing." },
    { "save_graph", py_save_graph, METH_VARARGS, "save_graph(lazies or None, path): the recorded graph as text." },
    { "is_recording", py_is_recording, METH_NOARGS, "Is any lazy tensor alive?" },
    { "predict", py_predict, METH_VARARGS, "predict(device, memory, rows, optimizer, way) -> dict" },
    { "device_names", py_device_names, METH_NOARGS, "Names of the built-in device profiles." },
    { "register_rule", py_register_rule, METH_VARARGS, "register_rule(operator, rule): what koila.register_rule says." },
    { "forget", py_forget, METH_NOARGS, "Drop cached plans and learned workspaces." },
    { NULL, NULL, 0, NULL },
};

int koila__run_module_add(PyObject *m) { return PyModule_AddFunctions(m, methods); }
