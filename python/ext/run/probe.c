/* probe.c — measures the workspace of convolutions, fused recurrent layers and attention before
 * their first step.
 *
 * On a CPU these operators copy their operands into other layouts, or unfold them. The copies are
 * often as large as the result; their size depends on shapes, threads and the processor. The
 * executor learns the bytes as operators run (koila__learn), but that is too late for the plan of
 * the first step. So each new call of this kind is run on a few rows of zeros: on two numbers of
 * rows, which give a line, and on the rows of a slice where the plan's slices are that small (one
 * row often takes another kernel). That is a small part of the step's work, once for each shape.
 *
 * One image has no fewer rows: a convolution of it is run on images with fewer lines, and thought
 * longer.
 *
 * Attention is run on one head of one sample. Where it is cut along its queries it makes parts of
 * its results inside, the more the later the queries: the last slice of the plan is run on zeros.
 * So is a slice between others of convolutions, and of koila's own calls, of a plan that cuts
 * another axis than the rows of the batch, and one of half as many rows: what a slice reads beyond
 * its rows does not shrink with them.
 *
 * A probe that fails (an unusual call) is ignored. One that is refused memory tells how much the
 * call uses at least. */
#include "run/run.h"

#include <math.h>

enum {
    MAX_INPUTS = 16,
    MAX_OUTPUTS = 8,
    /* output of mkldnn_rnn_layer that its backward takes as last input; only a forward can make
     * it */
    WORKSPACE = 3,
    RNN_INPUTS = 7,
    N_RNN_WEIGHTS = 4, /* inputs 1 to 4 */
    QUERIES = 2,       /* the dimension of an attention's operands that counts them */
};

/* A call that can be probed: aten::convolution*(input, ...), or aten::mkldnn_rnn_layer(x[T, N, C],
 * w1..w4, hx[N, H], cx[N, H], ...), or their backwards. */
typedef struct call {
    koila_sig sig;
    koila_sig maker; /* rnn backward: the forward call that makes its workspace; else KOILA_NONE */
    bool is_rnn;
} call;

static bool is_probed(const koila_graph *g, koila_node n, call *out)
{
    const koila_sig sig = koila_node_get(g, n).sig;
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    const uint32_t kind = koila_facts_dense(koila_op_facts(koila__table, s->op));
    const bool is_conv = kind == KOILA_FACT_DENSE_CONV || kind == KOILA_FACT_DENSE_CONV_BACKWARD;
    const bool is_rnn = kind == KOILA_FACT_DENSE_RNN || kind == KOILA_FACT_DENSE_RNN_BACKWARD;
    *out = (call){ sig, KOILA_NONE, is_rnn };
    if ((!is_rnn && !is_conv) || s->n_writes || s->n_inputs < 2 || s->n_inputs > MAX_INPUTS ||
        s->n_outputs > MAX_OUTPUTS)
        return false;
    if (kind != KOILA_FACT_DENSE_RNN_BACKWARD)
        return true;
    const koila_value_info workspace = koila_value_get(g, koila_node_inputs(g, n)[s->n_inputs - 1]);
    if (workspace.node == KOILA_NONE)
        return false;
    out->maker = koila_node_get(g, workspace.node).sig;
    return koila_sig_get(koila__table, out->maker)->n_outputs == WORKSPACE + 1 &&
           koila_sig_get(koila__table, out->maker)->n_inputs == RNN_INPUTS;
}

/* The batch dimension of input i; -1: the input is whole. */
static int batch_dim(const call *c, koila_sig sig, uint32_t i)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    const uint32_t kind = koila_facts_dense(koila_op_facts(koila__table, s->op));
    if (!c->is_rnn)
        return i < (kind == KOILA_FACT_DENSE_CONV_BACKWARD ? 2u : 1u) ? 0 : -1;
    if (i >= 1 && i <= N_RNN_WEIGHTS)
        return -1;
    return koila_meta_get(koila__table, s->inputs[i])->n_dims == 3 ? 1 : 0;
}

static bool lies_on(const koila_meta_info *m, const char *where)
{
    PyObject *device = koila__device_object(m->device);
    PyObject *type = device ? PyObject_GetAttrString(device, "type") : NULL;
    const bool does =
        type && PyUnicode_Check(type) && PyUnicode_CompareWithASCIIString(type, where) == 0;
    Py_XDECREF(type);
    PyErr_Clear();
    return does;
}

/* Does it lie in the memory that can be counted? */
static bool is_here(const koila_meta_info *m) { return lies_on(m, "cpu"); }

static bool all_lie_on(const call *c, const char *where)
{
    const koila_sig_info *s = koila_sig_get(koila__table, c->sig);
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_meta_info *m = koila_meta_get(koila__table, s->inputs[i]);
        if (!m->n_elements || !lies_on(m, where))
            return false;
    }
    return true;
}

static bool is_on_cpu(const call *c) { return all_lie_on(c, "cpu"); }

static bool can_probe(const call *c, int64_t batch)
{
    const koila_sig_info *s = koila_sig_get(koila__table, c->sig);
    const uint32_t n_inputs = s->n_inputs - (c->maker != KOILA_NONE);
    if (batch <= 1 || (c->is_rnn && koila_meta_get(koila__table, s->inputs[0])->n_dims != 3))
        return false;
    for (uint32_t i = 0; i < n_inputs; i++) {
        const koila_meta_info *m = koila_meta_get(koila__table, s->inputs[i]);
        const int b = batch_dim(c, c->sig, i);
        if (!is_here(m) || !m->n_elements || (int)m->n_dims <= b || !m->n_dims)
            return false;
        if (b >= 0 && m->size[b] % batch)
            return false;
        for (uint32_t d = 1; b == 0 && d < m->n_dims; d++)
            if (m->stride[d] > m->stride[0])
                return false; /* the rows are not outermost in memory */
    }
    return true;
}

/* Zeros like `meta`, of that size. New reference. */
static PyObject *zeros_of(koila_meta meta, const int64_t *sizes)
{
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    PyObject *size = PyTuple_New(m->n_dims);
    PyObject *stride = PyTuple_New(m->n_dims);
    PyObject *kw = PyDict_New();
    PyObject *args = NULL;
    PyObject *made = NULL;
    PyObject *r = NULL;
    if (!size || !stride || !kw)
        goto done;
    for (uint32_t d = 0; d < m->n_dims; d++) {
        int64_t apart = m->stride[d];
        for (uint32_t e = 0; e < m->n_dims; e++) /* so that a slice is as dense as the whole */
            if (m->stride[e] > 0 && m->stride[e] < m->stride[d] && sizes[e] != m->size[e])
                apart = apart / m->size[e] * sizes[e];
        PyTuple_SET_ITEM(size, d, PyLong_FromLongLong(sizes[d]));
        PyTuple_SET_ITEM(stride, d, PyLong_FromLongLong(apart));
    }
    if (PyErr_Occurred() || PyDict_SetItemString(kw, "dtype", koila__dtype_object(m->dtype)) < 0)
        goto done;
    args = PyTuple_Pack(2, size, stride);
    made = args ? PyObject_Call(koila__torch.empty_strided, args, kw) : NULL;
    r = made ? PyObject_CallMethod(made, "zero_", NULL) : NULL;
done:
    Py_XDECREF(size);
    Py_XDECREF(stride);
    Py_XDECREF(kw);
    Py_XDECREF(args);
    Py_XDECREF(made);
    return r;
}

/* The same; along dimension `dim` (if >= 0) they have `n` rows instead of `of`. */
static PyObject *zeros(koila_meta meta, int dim, int64_t n, int64_t of)
{
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    int64_t sizes[KOILA_MAX_DIMS];
    for (uint32_t d = 0; d < m->n_dims; d++)
        sizes[d] = (int)d == dim ? m->size[d] / of * n : m->size[d];
    return zeros_of(meta, sizes);
}

/* Makes the call. *inside: bytes used beyond its outputs. False: it failed, or they are not known;
 * if memory was refused, *inside are those that it held and asked for, outputs among them, else 0.
 */
static bool measure(koila_sig sig, PyObject *const *inputs, const koila__call_fix *fix,
                    PyObject **outputs, uint64_t *inside)
{
    koila__use use;
    int64_t peak = 0, now = 0;
    *inside = 0;
    if (!koila__work_begin())
        return false;
    const bool collects = PyGC_Disable(); /* what is freed meanwhile would look like bytes inside */
    koila__use_begin(&use);
    bool ok = koila__call(sig, inputs, fix, NULL, outputs) == 0;
    const bool is_known = koila__use_end(&use, &peak, &now);
    if (collects)
        PyGC_Enable();
    if (is_known && (ok || koila__is_out_of_memory()))
        *inside = (uint64_t)(ok ? peak - now : peak);
    koila__work_end();
    return ok && is_known;
}

/* The outputs of a call on `rows` of `batch` rows. */
static uint64_t output_bytes(koila_sig sig, int64_t rows, int64_t batch)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    uint64_t sum = 0;
    for (uint32_t o = 0; o < s->n_outputs; o++) {
        if (s->outputs[o] == KOILA_NONE)
            continue;
        const koila_meta_info *m = koila_meta_get(koila__table, s->outputs[o]);
        const bool is_cut = m->n_dims && m->size[0] == batch;
        sum += is_cut ? m->n_bytes / (uint64_t)batch * (uint64_t)rows : m->n_bytes;
    }
    return sum;
}

/* Makes one call of `sig` (c's own, or its maker) on `rows` of `batch` rows. outputs[MAX_OUTPUTS]
 * are new references or NULL. *inside: bytes used beyond them. False: it failed, or what it used is
 * not known. */
static bool try_once(const call *c, koila_sig sig, int64_t rows, int64_t batch, PyObject *workspace,
                     PyObject **outputs, uint64_t *inside)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    PyObject *inputs[MAX_INPUTS] = { 0 };
    bool ok = true;
    *inside = 0;
    for (uint32_t i = 0; i < s->n_inputs && ok; i++) {
        if (workspace && i + 1 == s->n_inputs)
            inputs[i] = Py_NewRef(workspace);
        else
            inputs[i] = zeros(s->inputs[i], batch_dim(c, sig, i), rows, batch);
        ok = inputs[i] != NULL;
    }
    ok = ok && measure(sig, inputs, NULL, outputs, inside);
    PyErr_Clear();
    for (uint32_t i = 0; i < MAX_INPUTS; i++)
        Py_XDECREF(inputs[i]);
    return ok;
}

static void probe(const call *c, int64_t rows, int64_t batch)
{
    PyObject *forward[MAX_OUTPUTS] = { 0 }, *outputs[MAX_OUTPUTS] = { 0 };
    uint64_t inside;
    if (koila__learned(c->sig, rows, batch))
        return;
    if (c->maker != KOILA_NONE &&
        (!try_once(c, c->maker, rows, batch, NULL, forward, &inside) || !forward[WORKSPACE]))
        goto done;
    if (try_once(c, c->sig, rows, batch, forward[WORKSPACE], outputs, &inside))
        koila__learn(c->sig, rows, batch, inside, KOILA__MEASURED_APART);
    else if (inside > output_bytes(c->sig, rows, batch)) /* it was refused so many: no less */
        koila__learn(c->sig, rows, batch, inside - output_bytes(c->sig, rows, batch),
                     KOILA__MEASURED_HERE);
done:
    for (uint32_t i = 0; i < MAX_OUTPUTS; i++) {
        Py_XDECREF(forward[i]);
        Py_XDECREF(outputs[i]);
    }
}

/* The fewest typical rows: kernels take another path when there is less than a row per thread. */
static int64_t few_rows(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *n = torch ? PyObject_CallMethod(torch, "get_num_threads", NULL) : NULL;
    const int64_t threads = n ? PyLong_AsLongLong(n) : 1;
    Py_XDECREF(torch);
    Py_XDECREF(n);
    PyErr_Clear();
    return threads > 2 ? threads : 2;
}

static bool can_measure(void)
{
    return !koila__is_planning() && koila__torch.ready && koila__cpu_bytes_ok();
}

/* ---- one image: fewer lines of it */

/* The lines are along this dimension. */
enum { LINES = 2, FEW_LINES = 4 };
/* Two lines take the same if they differ by less than that part of one. */
enum { NEARLY = 64 };

/* PyTorch takes another kernel for float32 images of one sample whose first four sizes multiply to
 * no more (use_mkldnn in its Convolution.cpp): probes stay on the side of the whole image. */
enum { SMALL_IMAGE = 20480 };

/* A convolution along its lines. The small side has one line for each window: the result, or the
 * input of one that is transposed. */
typedef struct lines {
    bool is_backward, transposed;
    int64_t small;                  /* of the recorded call */
    int64_t stride, first, of_line; /* the large side of n lines has first + (n - 1) * stride */
} lines;

static int64_t large_of(const lines *x, int64_t n) { return x->first + (n - 1) * x->stride; }

static bool int_at(const koila_sig_info *s, uint32_t pos, bool in_list, int64_t *out)
{
    if (pos >= s->n_pos)
        return false;
    const koila_arg *a = &s->tokens[s->start[pos]];
    if (in_list && (a->kind != KOILA_ARG_LIST || a->n == 0))
        return false;
    a += in_list;
    *out = a->u.i;
    return a->kind == KOILA_ARG_INT || a->kind == KOILA_ARG_BOOL;
}

/* convolution(x, weight, bias?, stride, padding, dilation, transposed, output_padding, groups), or
 * its backward(grad, x, weight, bias_sizes?, the same) */
static bool read_lines(const koila_sig_info *s, lines *x)
{
    const uint32_t kind = koila_facts_dense(koila_op_facts(koila__table, s->op));
    int64_t padding, dilation, transposed, more;
    x->is_backward = kind == KOILA_FACT_DENSE_CONV_BACKWARD;
    const uint32_t pos = x->is_backward ? 4 : 3;
    if (s->n_inputs < (x->is_backward ? 3u : 2u) || !int_at(s, pos, true, &x->stride) ||
        !int_at(s, pos + 1, true, &padding) || !int_at(s, pos + 2, true, &dilation) ||
        !int_at(s, pos + 3, false, &transposed) || !int_at(s, pos + 4, true, &more))
        return false;
    const koila_meta_info *in = koila_meta_get(koila__table, s->inputs[x->is_backward]);
    const koila_meta_info *weight = koila_meta_get(koila__table, s->inputs[1 + x->is_backward]);
    if (in->n_dims <= LINES || weight->n_dims != in->n_dims || in->size[0] != 1)
        return false;
    x->transposed = transposed != 0;
    x->first = (weight->size[LINES] - 1) * dilation + 1 - 2 * padding + more;
    x->of_line = in->size[0] * in->size[1] * (in->n_dims > 3 ? in->size[3] : 1);
    x->small = in->size[LINES];
    if (!x->transposed)
        x->small = (in->size[LINES] - x->first) / x->stride + 1;
    return x->stride > 0 && x->small > 0 && x->of_line > 0;
}

/* *inside: what the call uses on an image of which the small side has n lines. */
static bool try_lines(koila_sig sig, const lines *x, int64_t n, uint64_t *inside)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    PyObject *inputs[MAX_INPUTS] = { 0 }, *outputs[MAX_OUTPUTS] = { 0 };
    bool ok = large_of(x, n) > 0;
    for (uint32_t i = 0; i < s->n_inputs && ok; i++) {
        const koila_meta_info *m = koila_meta_get(koila__table, s->inputs[i]);
        const bool is_image = i <= (uint32_t)x->is_backward;
        const bool is_result = x->is_backward && i == 0;
        const int64_t rows = is_result != x->transposed ? n : large_of(x, n);
        inputs[i] = is_image ? zeros(s->inputs[i], LINES, rows, m->size[LINES])
                             : zeros(s->inputs[i], -1, 0, 0);
        ok = inputs[i] != NULL;
    }
    ok = ok && measure(sig, inputs, NULL, outputs, inside);
    PyErr_Clear();
    for (uint32_t i = 0; i < MAX_INPUTS; i++)
        Py_XDECREF(inputs[i]);
    for (uint32_t i = 0; i < MAX_OUTPUTS; i++)
        Py_XDECREF(outputs[i]);
    return ok;
}

/* Learns the workspace of the whole call from shorter images, each of twice the lines, until a line
 * takes as much as in those before: of a copy of the input and one of the weight, which are not
 * there at once, the larger counts. The call itself will say more exactly. */
static void probe_lines(koila_sig sig, const lines *x)
{
    const int64_t large = x->transposed ? x->small : large_of(x, x->small);
    const bool is_small = large * x->of_line <= SMALL_IMAGE;
    const int64_t few = is_small ? 1 : SMALL_IMAGE / x->of_line / x->stride + 1;
    int64_t n = few < FEW_LINES ? FEW_LINES : few;
    uint64_t now;
    double a_line = -1; /* not known */
    bool is_line = false;
    n = 2 * n < x->small ? n : x->small;
    if (!try_lines(sig, x, n, &now))
        return;
    while (n < x->small && !is_line) {
        const int64_t more = 2 * n < x->small ? 2 * n : x->small;
        const uint64_t before = now;
        const double was = a_line;
        if (!try_lines(sig, x, more, &now))
            return;
        a_line = now > before ? (double)(now - before) / (double)(more - n) : 0;
        is_line = was >= 0 && fabs(a_line - was) * NEARLY <= was;
        n = more;
    }
    if (n < x->small)
        now += (uint64_t)(a_line * (double)(x->small - n));
    koila__learn(sig, 1, 1, now, KOILA__MEASURED_BOUND);
}

/* ---- attention to all queries */

/* Inputs of so many dimensions count samples and heads in the first two; those of fewer do not: a
 * mask [queries, keys]. */
enum { FEWEST_DIMS_WITH_HEADS = 3, N_HEAD_DIMS = 2 };

static bool is_attention(koila_sig sig)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    const uint32_t kind = koila_facts_dense(koila_op_facts(koila__table, s->op));
    return (kind == KOILA_FACT_DENSE_ATTENTION || kind == KOILA_FACT_DENSE_ATTENTION_BACKWARD) &&
           !s->n_writes && s->n_inputs && s->n_inputs <= MAX_INPUTS && s->n_outputs <= MAX_OUTPUTS;
}

/* Zeros like `meta`, of one head of one sample. New reference. */
static PyObject *zeros_of_head(koila_meta meta)
{
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    int64_t sizes[KOILA_MAX_DIMS];
    for (uint32_t d = 0; d < m->n_dims; d++)
        sizes[d] = m->n_dims >= FEWEST_DIMS_WITH_HEADS && d < N_HEAD_DIMS ? 1 : m->size[d];
    return zeros_of(meta, sizes);
}

/* Learns the workspace of attention, of all rows and of one (batch > 1), from one head: on a CPU
 * its buffers are each thread's, not each head's. The call itself will say more exactly. */
static void probe_head(koila_sig sig, int64_t batch)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    PyObject *inputs[MAX_INPUTS] = { 0 }, *outputs[MAX_OUTPUTS] = { 0 };
    uint64_t inside;
    bool ok = true;
    for (uint32_t i = 0; i < s->n_inputs && ok; i++) {
        inputs[i] = zeros_of_head(s->inputs[i]);
        ok = inputs[i] != NULL;
    }
    if (ok && measure(sig, inputs, NULL, outputs, &inside)) {
        koila__learn(sig, batch, batch, inside, KOILA__MEASURED_BOUND);
        if (batch > 1)
            koila__learn(sig, 1, batch, inside, KOILA__MEASURED_BOUND);
    }
    PyErr_Clear();
    for (uint32_t i = 0; i < MAX_INPUTS; i++)
        Py_XDECREF(inputs[i]);
    for (uint32_t i = 0; i < MAX_OUTPUTS; i++)
        Py_XDECREF(outputs[i]);
}

/* The size of the batch axis that the call's rows come from, or 0. */
static int64_t batch_of(const koila_graph *g, const call *c)
{
    const koila_meta_info *m =
        koila_meta_get(koila__table, koila_sig_get(koila__table, c->sig)->inputs[0]);
    const uint32_t d = (uint32_t)batch_dim(c, c->sig, 0);
    int64_t best = 0;
    for (uint32_t a = 0; a < koila_graph_n_axes(g); a++) {
        const int64_t n = koila_graph_axis_size(g, (uint16_t)a);
        if (n > best && m->n_dims > d && m->size[d] % n == 0)
            best = n;
    }
    return best;
}

/* Is nothing known of what the attention that node n calls uses inside? */
static bool waits_for_head(const koila_graph *g, koila_node n, call *out)
{
    uint64_t ignored;
    *out = (call){ koila_node_get(g, n).sig, KOILA_NONE, false };
    return is_attention(out->sig) && !koila__workspace_known(NULL, out->sig, 0, 0, &ignored) &&
           is_on_cpu(out);
}

/* Of a recorded step; or of a plan's graph, the calls outside of its loops. */
static void probe_heads(const koila_graph *g, const koila_plan *plan)
{
    PyObject *guard = NULL;
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        call c;
        if ((plan && koila_plan_in_loop(plan, n)) || !waits_for_head(g, n, &c))
            continue;
        if (!guard && !(guard = PyObject_CallNoArgs(koila__torch.guards)))
            break;
        probe_head(c.sig, plan ? 0 : batch_of(g, &c));
    }
    PyErr_Clear();
    Py_XDECREF(guard);
}

static int64_t largest_axis(const koila_graph *g)
{
    int64_t most = 0;
    for (uint32_t a = 0; a < koila_graph_n_axes(g); a++) {
        const int64_t n = koila_graph_axis_size(g, (uint16_t)a);
        most = n > most ? n : most;
    }
    return most;
}

/* Some calls need no probe: their shapes tell what they use. */
static void learn_from_shapes(const koila_graph *g)
{
    const int64_t batch = largest_axis(g);
    uint64_t ignored;
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        const call c = { koila_node_get(g, n).sig, KOILA_NONE, false };
        const uint64_t bytes = koila_cpu_inside_bytes(koila__table, c.sig);
        if (!bytes || koila__workspace_known(NULL, c.sig, 0, 0, &ignored))
            continue;
        if (is_on_cpu(&c) || all_lie_on(&c, "meta")) /* planned ahead */
            koila__learn(c.sig, batch, batch, bytes, KOILA__MEASURED_APART);
    }
}

void koila__probe_graph(const koila_graph *g, int64_t rows)
{
    PyObject *guard = NULL;
    int64_t few = 0;
    learn_from_shapes(g);
    if (!can_measure())
        return;
    probe_heads(g, NULL);
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        call c;
        if (!is_probed(g, n, &c))
            continue;
        const int64_t batch = batch_of(g, &c);
        const int64_t most = rows > 0 && rows < batch ? rows : batch;
        lines one_image;
        if (!c.is_rnn && batch <= 1 && !koila__learned(c.sig, 1, 1) && is_on_cpu(&c) &&
            read_lines(koila_sig_get(koila__table, c.sig), &one_image)) {
            if (!guard && !(guard = PyObject_CallNoArgs(koila__torch.guards)))
                break;
            probe_lines(c.sig, &one_image);
        }
        if (!can_probe(&c, batch))
            continue;
        if (!few)
            few = few_rows();
        const int64_t high = 2 * few < most ? 2 * few : most;
        const int64_t low = high / 2;
        if (koila__learned(c.sig, high, batch) || (low && koila__learned(c.sig, low, batch)))
            continue;
        if (!guard && !(guard = PyObject_CallNoArgs(koila__torch.guards)))
            break;
        if (low)
            probe(&c, low, batch);
        probe(&c, high, batch);
    }
    PyErr_Clear();
    Py_XDECREF(guard);
}

/* A call of which one slice is run. */
typedef struct part {
    koila_node n;
    uint16_t axis;
    bool is_last; /* the last slice uses the most; else one between others */
} part;

/* Is node n attention to some of the queries? */
static bool is_cut_attention(const koila_plan *plan, koila_node n, uint32_t kind)
{
    const koila_share cut = koila_plan_need(plan, n, 0);
    return (kind == KOILA_FACT_DENSE_ATTENTION || kind == KOILA_FACT_DENSE_ATTENTION_BACKWARD) &&
           cut.kind == KOILA_SHARE_SLICE && cut.dim == QUERIES;
}

/* Is node n cut otherwise than by images, so that what was learned of rows does not hold, and has
 * it a kernel that copies its operands? The plan cuts another axis, or images are groups of one.
 */
static bool is_of_other_axis(const koila_plan *plan, koila_node n, uint32_t facts)
{
    const uint32_t kind = koila_facts_dense(facts);
    const bool is_conv = kind == KOILA_FACT_DENSE_CONV || kind == KOILA_FACT_DENSE_CONV_BACKWARD;
    const koila_share cut = koila_plan_need(plan, n, 0);
    if (koila_plan_get(plan).dim == KOILA_NONE)
        return is_conv && cut.kind == KOILA_SHARE_SLICE && cut.dim != 0;
    return is_conv || ((facts & KOILA_FACT_PSEUDO) && !(facts & KOILA_FACT_OPAQUE_CALL));
}

static bool is_part(const koila_plan *plan, koila_node n, part *out)
{
    const koila_sig_info *s =
        koila_sig_get(koila__table, koila_node_get(koila_plan_graph(plan), n).sig);
    const uint32_t facts = koila_op_facts(koila__table, s->op);
    if (!koila_plan_in_loop(plan, n) || koila_plan_runs_once(plan, n) || s->n_writes ||
        !s->n_inputs || s->n_inputs > MAX_INPUTS || s->n_outputs > MAX_OUTPUTS)
        return false;
    const bool is_attention = is_cut_attention(plan, n, koila_facts_dense(facts));
    *out = (part){ n, 0, is_attention };
    for (uint32_t o = 0; o < s->n_outputs; o++) {
        const koila_value v = koila_node_get(koila_plan_graph(plan), n).first_output + o;
        if (s->outputs[o] != KOILA_NONE && koila_plan_share(plan, v).kind != KOILA_SHARE_WHOLE)
            out->axis = koila_plan_share(plan, v).axis;
    }
    return is_attention || is_of_other_axis(plan, n, facts);
}

/* The numbers of a call of node n in a slice. False: it differs by more than numbers. */
static bool numbers_of(const koila_plan *plan, koila_node n, int64_t begin, int64_t rows,
                       koila_adapt *adapts, koila__arg_fix *fixes, koila__call_fix *out)
{
    const uint32_t n_adapts = koila_plan_adapt_at(plan, n, -1, begin, rows, adapts);
    *out = (koila__call_fix){ .fix = fixes, .n_fix = n_adapts };
    for (uint32_t i = 0; i < n_adapts; i++) {
        const koila_adapt *a = &adapts[i];
        if (a->kind != KOILA_ADAPT_INT && a->kind != KOILA_ADAPT_INTS)
            return false;
        fixes[i] = (koila__arg_fix){
            .arg = a->arg, .n = a->n, .is_list = a->kind == KOILA_ADAPT_INTS, .ints = a->ints
        };
    }
    return true;
}

/* Runs `rows` rows of the call. False: it failed. */
static bool probe_rows(const koila_plan *plan, part p, int64_t rows, int64_t batch)
{
    const koila_sig sig = koila_node_get(koila_plan_graph(plan), p.n).sig;
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    const int64_t begin = p.is_last || 2 * rows >= batch ? batch - rows : rows;
    PyObject *inputs[MAX_INPUTS] = { 0 }, *outputs[MAX_OUTPUTS] = { 0 };
    koila_adapt adapts[KOILA_MAX_ADAPTS];
    koila__arg_fix fixes[KOILA_MAX_ADAPTS];
    koila__call_fix fix;
    const uint64_t results = koila__slice_result_bytes(plan, p.n, rows);
    uint64_t inside = 0;
    bool ok = numbers_of(plan, p.n, begin, rows, adapts, fixes, &fix);
    for (uint32_t i = 0; i < s->n_inputs && ok; i++) {
        const koila_share need = koila_plan_need(plan, p.n, i);
        const bool is_cut = need.kind == KOILA_SHARE_SLICE;
        inputs[i] = zeros(s->inputs[i], is_cut ? need.dim : -1, rows, batch);
        ok = inputs[i] && need.kind != KOILA_SHARE_PARTIAL;
    }
    ok = ok && measure(sig, inputs, &fix, outputs, &inside);
    if (ok)
        koila__learn(sig, rows, batch, inside, KOILA__MEASURED_APART);
    else if (inside > results) /* it was refused so many: no less */
        koila__learn(sig, rows, batch, inside - results, KOILA__MEASURED_HERE);
    for (uint32_t i = 0; i < MAX_INPUTS; i++)
        Py_XDECREF(inputs[i]);
    for (uint32_t i = 0; i < MAX_OUTPUTS; i++)
        Py_XDECREF(outputs[i]);
    PyErr_Clear();
    return ok;
}

static void probe_parts(const koila_plan *plan)
{
    const koila_graph *g = koila_plan_graph(plan);
    PyObject *guard = NULL;
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        part p;
        if (!is_part(plan, n, &p))
            continue;
        const int64_t batch = koila_graph_axis_size(g, p.axis);
        int64_t rows = koila_plan_axis_rows(plan, p.axis);
        if (koila__learned(koila_node_get(g, n).sig, rows, batch))
            continue;
        if (!guard && !(guard = PyObject_CallNoArgs(koila__torch.guards)))
            break;
        /* there may be no room for so many before anything is known */
        while (!probe_rows(plan, p, rows, batch) && rows > 1)
            rows /= 2;
        if (!p.is_last && rows > 1 && !koila__learned(koila_node_get(g, n).sig, rows / 2, batch))
            probe_rows(plan, p, rows / 2, batch);
    }
    PyErr_Clear();
    Py_XDECREF(guard);
}

void koila__probe_plan(const koila_plan *plan)
{
    const koila_graph *g = koila_plan_graph(plan);
    PyObject *guard = NULL;
    int64_t few = 0;
    learn_from_shapes(g);
    if (!can_measure())
        return;
    probe_heads(g, plan);
    probe_parts(plan);
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        call c;
        if (!is_probed(g, n, &c) || !koila_plan_in_loop(plan, n))
            continue;
        const koila_share cut = koila_plan_need(plan, n, 0);
        if (cut.kind != KOILA_SHARE_SLICE || cut.dim != batch_dim(&c, c.sig, 0))
            continue;
        const int64_t batch = koila_graph_axis_size(g, cut.axis);
        const int64_t rows = koila_plan_axis_rows(plan, cut.axis);
        if (!few)
            few = few_rows();
        if (rows > 2 * few || koila__learned(c.sig, rows, batch) || !can_probe(&c, batch))
            continue;
        if (!guard && !(guard = PyObject_CallNoArgs(koila__torch.guards)))
            break;
        probe(&c, rows, batch);
    }
    PyErr_Clear();
    Py_XDECREF(guard);
    for (uint32_t k = 0; k < koila_plan_get(plan).n_stages; k++)
        if (koila_plan_stage(plan, k)->inner)
            koila__probe_plan(koila_plan_stage(plan, k)->inner->plan);
}
