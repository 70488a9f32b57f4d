/* probe.c — what a convolution uses inside, known before its first step.
 *
 * On a CPU a convolution copies its operands into the layouts that its kernel likes, or unfolds them: often as many bytes again as its result, by rules that
 * differ with shapes, threads and the processor. The executor learns it as operators run (koila__learn), but the first step's plan would be blind. So each
 * convolution that was never seen is called on a few rows of zeros: on two numbers of rows, which give a line, and where the plan's slices are no larger
 * than those, on the slice itself (one row often takes another kernel). That is a small part of the step's work, once for each shape.
 *
 * A probe that fails (no memory, an odd call) teaches nothing, and the step goes on as it would without it. */
#include "exec.h"

static bool is_convolution(koila_sig sig)
{
    return !strncmp(koila_op_name(koila__table, koila_sig_get(koila__table, sig)->op), "aten::convolution", 17) && koila_sig_get(koila__table, sig)->n_writes == 0;
}

/* The input whose first dimension is the batch: convolution(input, ...), convolution_backward(grad_output, input, ...). */
static uint32_t n_batched(koila_sig sig) { return strstr(koila_op_name(koila__table, koila_sig_get(koila__table, sig)->op), "backward") ? 2 : 1; }

static bool can_probe(koila_sig sig, int64_t batch)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    if (batch <= 1 || s->n_inputs > 8 || s->n_inputs < 2) return false;
    for (uint32_t i = 0; i < s->n_inputs; i++) {
        const koila_meta_info *m = koila_meta_get(koila__table, s->inputs[i]);
        PyObject *device = koila__device_object(m->device), *type = device ? PyObject_GetAttrString(device, "type") : NULL;
        const bool here = type && PyUnicode_Check(type) && PyUnicode_CompareWithASCIIString(type, "cpu") == 0;
        Py_XDECREF(type);
        PyErr_Clear();
        if (!here || !m->n_elements || !m->n_dims) return false;
        if (i < n_batched(sig) && m->size[0] % batch) return false;
        for (uint32_t d = 1; i < n_batched(sig) && d < m->n_dims; d++)
            if (m->stride[d] > m->stride[0]) return false; /* rows do not lie together */
    }
    return true;
}

/* Zeros of `meta`, of `n` instead of `of` rows when of > 0. New reference. */
static PyObject *zeros(koila_meta meta, int64_t n, int64_t of)
{
    const koila_meta_info *m = koila_meta_get(koila__table, meta);
    PyObject *size = PyTuple_New(m->n_dims), *stride = PyTuple_New(m->n_dims), *kw = PyDict_New(), *args = NULL, *made = NULL, *r = NULL;
    if (!size || !stride || !kw) goto done;
    for (uint32_t d = 0; d < m->n_dims; d++) {
        PyTuple_SET_ITEM(size, d, PyLong_FromLongLong(d == 0 && of > 0 ? m->size[0] / of * n : m->size[d]));
        PyTuple_SET_ITEM(stride, d, PyLong_FromLongLong(m->stride[d]));
    }
    if (PyErr_Occurred() || PyDict_SetItemString(kw, "dtype", koila__dtype_object(m->dtype)) < 0) goto done;
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

/* One call on `rows` of `batch` rows. */
static void probe(koila_sig sig, int64_t rows, int64_t batch)
{
    const koila_sig_info *s = koila_sig_get(koila__table, sig);
    PyObject *inputs[8] = { 0 }, *outputs[8] = { 0 };
    if (s->n_outputs > 8 || koila__learned(sig, rows, batch)) return;
    bool ok = true;
    for (uint32_t i = 0; i < s->n_inputs && ok; i++) ok = (inputs[i] = zeros(s->inputs[i], rows, i < n_batched(sig) ? batch : 0)) != NULL;
    if (ok) {
        const uint64_t old = koila__truth_swap_peak(koila__truth_current());
        ok = koila__call(sig, inputs, NULL, NULL, outputs) == 0;
        const uint64_t peak = koila__truth_peak(), now = koila__truth_current();
        if (ok) koila__learn(sig, rows, batch, peak - now);
        if (old > peak) koila__truth_swap_peak(old);
    }
    PyErr_Clear();
    for (uint32_t i = 0; i < 8; i++) {
        Py_XDECREF(inputs[i]);
        Py_XDECREF(outputs[i]);
    }
}

/* The fewest rows that are ordinary: kernels take another way when threads get no row each. */
static int64_t few_rows(void)
{
    PyObject *torch = PyImport_ImportModule("torch"), *n = torch ? PyObject_CallMethod(torch, "get_num_threads", NULL) : NULL;
    const int64_t threads = n ? PyLong_AsLongLong(n) : 1;
    Py_XDECREF(torch);
    Py_XDECREF(n);
    PyErr_Clear();
    return threads > 2 ? threads : 2;
}

static bool can_measure(void) { return !koila__settings.dry && koila__torch.ready && koila__truth_ok(); }

/* The axis that a convolution's rows come from: its size, or 0. */
static int64_t batch_of(const koila_graph *g, koila_sig sig)
{
    const koila_meta_info *m = koila_meta_get(koila__table, koila_sig_get(koila__table, sig)->inputs[0]);
    int64_t best = 0;
    for (uint32_t a = 0; a < koila_graph_n_axes(g); a++) {
        const int64_t n = koila_graph_axis_size(g, (uint16_t)a);
        if (n > best && m->n_dims && m->size[0] % n == 0) best = n;
    }
    return best;
}

void koila__probe_graph(const koila_graph *g, int64_t rows)
{
    PyObject *guard = NULL;
    int64_t few = 0;
    if (!can_measure()) return;
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        const koila_sig sig = koila_node_get(g, n).sig;
        if (!is_convolution(sig) || koila_sig_get(koila__table, sig)->n_inputs < 2) continue;
        const int64_t batch = batch_of(g, sig), most = rows > 0 && rows < batch ? rows : batch;
        if (!can_probe(sig, batch)) continue;
        if (!few) few = few_rows();
        const int64_t high = 2 * few < most ? 2 * few : most, low = high / 2;
        if (koila__learned(sig, high, batch) || (low && koila__learned(sig, low, batch))) continue;
        if (!guard && !(guard = PyObject_CallNoArgs(koila__torch.guards))) break;
        if (low) probe(sig, low, batch);
        probe(sig, high, batch);
    }
    PyErr_Clear();
    Py_XDECREF(guard);
}

void koila__probe_plan(const koila_plan *plan)
{
    const koila_graph *g = koila_plan_graph(plan);
    PyObject *guard = NULL;
    int64_t few = 0;
    if (!can_measure()) return;
    for (koila_node n = 0; n < koila_graph_n_nodes(g); n++) {
        const koila_sig sig = koila_node_get(g, n).sig;
        if (!is_convolution(sig) || !koila_plan_in_loop(plan, n)) continue;
        const koila_share cut = koila_plan_need(plan, n, 0);
        if (cut.kind != KOILA_SHARE_SLICE || cut.dim != 0) continue;
        const int64_t batch = koila_graph_axis_size(g, cut.axis), rows = koila_plan_axis_rows(plan, cut.axis);
        if (!few) few = few_rows();
        if (rows > 2 * few || koila__learned(sig, rows, batch) || !can_probe(sig, batch)) continue;
        if (!guard && !(guard = PyObject_CallNoArgs(koila__torch.guards))) break;
        probe(sig, rows, batch);
    }
    PyErr_Clear();
    Py_XDECREF(guard);
}
