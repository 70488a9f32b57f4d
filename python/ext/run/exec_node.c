/* exec_node.c — one call of a plan, on the rows of the running slice or on whole values: its
 * inputs, what it writes, its arguments as they are on these rows, its results. */
#include "run/exec.h"

#include "memlab/credit.h"

/* From now on koila.memlab's line profiler credits memory to the line on which node n was
 * captured. */
static void work_for_line(const exec *x, koila_node n)
{
    const koila_graph *g = x->tape->graph;
    const koila_node recorded = koila__exec_recorded(x, n);
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
    PyObject *size = koila__ints_object(now->size, now->n_dims);
    PyObject *strides = koila__ints_object(stride, now->n_dims);
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

enum {
    FEW_INPUTS = 16, /* inputs that need no allocation */
    FEW_OUTPUTS = 8,
};

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
    uint16_t steal; /* as koila_instr */
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
        const bool is_zero =
            !is_whole && !skips && koila__exec_is_absent(x, v) && is_read(call->s, i);
        if (is_zero && koila__exec_make_absent(x, v) < 0)
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
    const bool none[2] = { koila__exec_is_absent(x, terms[0]), koila__exec_is_absent(x, terms[1]) };
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
        return koila__torch_empty(m, -1, -1);
    return koila__torch_empty(m, out.dim, out.outer * out.inner * koila__exec_n_rows(x));
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
    a->n = koila_plan_adapt_at(x->plan, n, link, x->begin, koila__exec_n_rows(x), a->adapts);
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
            PyObject *dims = koila__ints_object(a->ints, a->n);
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
    const bool is_one_row = call->in_loop && koila__exec_n_rows(x) == 1 && x->batch > 1;
    return is_one_row ? call->s->outputs[0] : KOILA_NONE;
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

/* A few of torch's losses write the losses of all elements into their result, and then make it
 * one number in that memory (mse_loss, smooth_l1_loss, soft_margin_loss, binary_cross_entropy):
 * while the number lives, nothing of it is free. A copy of the number takes its place. */
static PyObject *without_terms(PyObject *result, const koila_meta_info *m)
{
    if (koila__storage_bytes(result) <= m->n_storage_bytes)
        return Py_NewRef(result);
    return PyObject_CallFunctionObjArgs(koila__torch.clone, result, NULL);
}

/* Torch's shape functions and its kernels may disagree about the order of a result's dimensions in
 * memory, and the calls that follow were recorded for what the shape function says: some kernels
 * are given contiguous tensors and do not look again. A copy in that order takes its place. */
static PyObject *as_recorded(PyObject *result, const koila_meta_info *m)
{
    koila_meta now;
    if (koila__lies_as(result, m))
        return Py_NewRef(result);
    if (koila__meta_of(result, &now) < 0)
        return NULL;
    koila_meta_info like = *koila_meta_get(koila__table, now);
    int64_t stride[KOILA_MAX_DIMS];
    koila_dense_strides(m, like.size, stride);
    like.stride = stride;
    PyObject *copy = koila__torch_empty(&like, -1, -1);
    PyObject *done =
        copy ? PyObject_CallFunctionObjArgs(koila__torch.copy_, copy, result, NULL) : NULL;
    Py_XDECREF(copy);
    return done;
}

/* New results are made what was recorded. */
static int settle_results(const node_call *call)
{
    const koila_sig_info *s = call->s;
    if (koila_op_flags(koila__table, s->op) & KOILA_OP_VIEW)
        return 0;
    for (uint32_t o = 0; o < s->n_fresh; o++) {
        PyObject *result = call->outputs[o];
        if (s->outputs[o] == KOILA_NONE || !result || !koila__is_tensor(result))
            continue;
        const koila_meta_info *m = koila_meta_get(koila__table, s->outputs[o]);
        PyObject *settled = m->n_dims ? as_recorded(result, m) : without_terms(result, m);
        if (!settled)
            return -1;
        Py_SETREF(call->outputs[o], settled);
    }
    return 0;
}

/* Writes a sum over the term that the plan says. Torch makes another tensor for who has a term
 * besides. 1: done; 0: not; -1 + error */
static int write_over_term(const node_call *call)
{
    if (!call->steal || call->s->n_writes)
        return 0;
    const uint32_t i = koila_term_written_over(call->steal);
    PyObject *term = call->inputs[i];
    if (Py_REFCNT(term) != 1)
        return 0;
    call->outputs[0] =
        PyObject_CallFunctionObjArgs(koila__torch.add_on, term, call->inputs[!i], NULL);
    return call->outputs[0] ? 1 : -1;
}

static int make_outputs(exec *x, node_call *call)
{
    PyObject *instead = instead_of_call(call);
    if (instead) {
        koila_assert(call->s->n_outputs == 1);
        call->outputs[0] = instead;
        return 0;
    }
    if (PyErr_Occurred())
        return -1;
    if (koila__lines_enabled && x->tape)
        work_for_line(x, call->n);
    const int added = write_over_term(call);
    if (added)
        return added < 0 ? -1 : 0;
    call->own_fix.generator = x->draws_from;
    if (koila__call(call->info.sig, call->inputs, &call->own_fix, call->link_fix, call->outputs) <
        0)
        return -1;
    const koila_meta whole = meta_of_all_rows(x, call);
    int status = settle_results(call);
    if (status == 0 && whole != KOILA_NONE)
        status = one_row_outermost(x->table, call->s, whole, call->outputs);
    if (status < 0)
        hand_over(x, call, false);
    return status;
}

/* Weights a mean over the batch by the share of rows in the slice. */
static int scale_outputs(const exec *x, node_call *call)
{
    const double share = (double)koila__exec_n_rows(x) / (double)x->batch;
    for (uint32_t i = 0; i < call->own.n && !koila__exec_is_whole(x); i++) {
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

/* A call on whole values that writes and draws nothing: no slice, no row and no copy concerns it.
 * false: it is another, or an input is missing. */
static bool is_simple(const exec *x, const koila_instr *in, const koila_sig_info *s,
                      PyObject **inputs)
{
    if (in->steal || s->n_writes || x->inner || s->n_inputs > FEW_INPUTS ||
        s->n_outputs > FEW_OUTPUTS || koila_op_flags(x->table, s->op) & KOILA_OP_RANDOM ||
        koila_op_facts(x->table, s->op) & (KOILA_FACT_AS_REAL | KOILA_FACT_OFFLOADS))
        return false;
    const koila_value *values = koila_node_inputs(x->g, in->id);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        inputs[i] = x->whole[values[i]] ? x->whole[values[i]] : x->local[values[i]];
        if (!inputs[i])
            return false;
    }
    return true;
}

/* Runs such a call. */
static int run_simple(exec *x, node_call *call)
{
    if (koila__lines_enabled && x->tape)
        work_for_line(x, call->n);
    x->n_run++;
    x->draws_from = NULL;
    x->used_by_node = NULL;
    if (koila__call(call->info.sig, call->inputs, NULL, NULL, call->outputs) < 0)
        return -1;
    const int status = settle_results(call);
    hand_over(x, call, status == 0);
    return status;
}

/* Runs any call. */
static int run_any(exec *x, node_call *call)
{
    const bool in_loop = call->in_loop;
    call->n_made = 0;
    call->own.n = 0;
    call->own_fix = (koila__call_fix){ 0 };
    call->links = NULL;
    call->link_fix = NULL;
    if (in_loop && koila_plan_absence(x->plan, call->n) == KOILA_ABSENT_SUM && sum_of_one(x, call))
        return 0;
    x->n_run += !(koila_op_facts(x->table, call->s->op) & KOILA_FACT_OFFLOADS);
    const int drawn = koila__exec_prepare_random(x, call->n, in_loop);
    if (drawn)
        return drawn < 0 ? -1 : 0;
    int status = call_init(call);
    if (status == 0)
        status = find_inputs(x, call);
    if (status == 0)
        status = prepare_writes(x, call);
    if (status == 0 && in_loop)
        status = adapt_to_slice(x, call);
    if (status == 0)
        status = make_outputs(x, call);
    if (status == 0) {
        if (in_loop)
            status = scale_outputs(x, call);
        hand_over(x, call, status == 0);
    }
    call_deinit(call);
    return status;
}

/* A product, or rows of a table's gradient, added to `sum`. New: the same tensor. */
static PyObject *added_onto(const exec *x, const node_call *call, PyObject *sum)
{
    enum { PADDING_INDEX = 3 }; /* position, of embedding_dense_backward(grad, indices, ...) */
    PyObject *const values[] = { sum, call->inputs[0], call->inputs[1] };
    const uint32_t facts = koila_op_facts(x->table, call->s->op);
    const uint32_t n_dims = koila_meta_get(x->table, call->s->outputs[0])->n_dims;
    if (koila_facts_dense(facts) == KOILA_FACT_DENSE_CONTRACT)
        return koila__write_unseen(n_dims == 2 ? koila__torch.addmm_ : koila__torch.baddbmm_,
                                   values, 3);
    return PyObject_CallFunction(koila__torch.add_rows, "OOOL", sum, call->inputs[0],
                                 call->inputs[1],
                                 (long long)call->s->tokens[call->s->start[PADDING_INDEX]].u.i);
}

static node_call call_of(const exec *x, const koila_instr *in, bool in_loop)
{
    node_call call;
    call.n = in->id;
    call.in_loop = in_loop;
    call.steal = in->steal;
    call.info = koila_node_get(x->g, in->id);
    call.s = koila_sig_get(x->table, call.info.sig);
    return call;
}

int koila__exec_add_onto(exec *x, const koila_instr *in, bool in_loop)
{
    node_call call = call_of(x, in, in_loop);
    PyObject *to = in_loop ? x->acc[in->user] : x->whole[in->user];
    call.inputs = call.few_inputs;
    koila_assert(call.s->n_inputs == 2 && call.s->n_outputs == 1 && !call.s->n_writes);
    x->n_run++;
    if (find_inputs(x, &call) < 0)
        return -1;
    for (uint32_t i = 0; i < call.s->n_inputs; i++)
        if (!call.inputs[i])
            return missing_input(x, &call, i);
    if (koila__lines_enabled && x->tape)
        work_for_line(x, call.n);
    PyObject *sum = koila__exec_seen_as(x, to, in->user, call.info.first_output);
    PyObject *done = sum ? added_onto(x, &call, sum) : NULL;
    Py_XDECREF(sum);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int koila__exec_node(exec *x, const koila_instr *in, bool in_loop)
{
    node_call call = call_of(x, in, in_loop);
    call.inputs = call.few_inputs;
    call.outputs = call.few_outputs;
    return !in_loop && is_simple(x, in, call.s, call.inputs) ? run_simple(x, &call)
                                                             : run_any(x, &call);
}
