/* plan_report.c — reports plans to people and to Python. Nothing here is on the hot path.
 *
 * To report one more fact, add an item in koila__step_dict() and its name in the class Plan of
 * python/koila/_plan.py. A fact of the run that no plan has is also a new field of koila__step.
 */
#include "run/run.h"

#define MIB 1048576.0
#define KIB 1024.0
enum { MOST_LARGEST = 32, MOST_CURVE_POINTS = 1024 };

/* ---- words */

PyObject *koila__shape_of(const koila_meta_info *m)
{
    PyObject *t = PyTuple_New(m->n_dims);
    for (uint32_t d = 0; t && d < m->n_dims; d++) {
        PyObject *x = PyLong_FromLongLong(m->size[d]);
        if (!x)
            Py_CLEAR(t);
        else
            PyTuple_SET_ITEM(t, d, x);
        if (!t)
            break;
    }
    return t;
}

/* Without printf, which is much code for what each step does once. */
void koila__line_text(const koila_graph *g, uint32_t line, char *out, size_t n)
{
    char number[16];
    size_t at = sizeof number;
    if (line == KOILA_NONE || !n)
        return;
    uint32_t rest = koila_graph_line_number(g, line);
    number[--at] = '\0';
    do
        number[--at] = (char)('0' + rest % 10);
    while (rest /= 10);
    number[--at] = ':';
    const char *file = koila_graph_line_file(g, line);
    const size_t n_file = strnlen(file, n - 1), n_rest = sizeof number - at;
    memcpy(out, file, n_file);
    out[n_file] = '\0';
    const size_t room = n - n_file;
    memcpy(out + n_file, number + at, n_rest < room ? n_rest : room);
    out[n - 1] = '\0';
}

/* "file.py:12" of a lowered node, "" when unknown. */
static PyObject *line_of(const koila_plan *plan, const koila_graph *part, koila_node lowered)
{
    if (lowered == KOILA_NONE)
        return PyUnicode_FromString("");
    const koila_node_info info = koila_node_get(part, koila_plan_recorded(plan, lowered));
    if (info.line == KOILA_NONE)
        return PyUnicode_FromString("");
    return PyUnicode_FromFormat("%s:%u", koila_graph_line_file(part, info.line),
                                koila_graph_line_number(part, info.line));
}

/* A predicted plan has a table of its own. */
static const koila_table *table_of(const koila_plan *plan)
{
    return koila_graph_table(koila_plan_graph(plan));
}

static const koila_meta_info *meta_of(const koila_plan *plan, koila_value v)
{
    return koila_meta_get(table_of(plan), koila_value_get(koila_plan_graph(plan), v).meta);
}

static const char *op_of_node(const koila_plan *plan, koila_node n)
{
    if (n == KOILA_NONE)
        return "input";
    const koila_sig sig = koila_node_get(koila_plan_graph(plan), n).sig;
    return koila_op_name(table_of(plan), koila_sig_get(table_of(plan), sig)->op);
}

static const char *readable(char *out, size_t n, uint64_t bytes)
{
    if ((double)bytes < MIB)
        snprintf(out, n, "%.1f KiB", (double)bytes / KIB);
    else
        snprintf(out, n, "%.1f MiB", (double)bytes / MIB);
    return out;
}

void koila__largest_text(const cached *c, uint32_t n, char *out, size_t room)
{
    koila_gather top[MOST_LARGEST];
    koila_assert(n <= MOST_LARGEST);
    const uint32_t n_top = koila_plan_largest(c->plan, top, n);
    const koila_graph *lowered = koila_plan_graph(c->plan);
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < n_top && used < room; i++) {
        const koila_node maker = koila_value_get(lowered, top[i].value).node;
        used += (size_t)snprintf(out + used, room - used, " %s %.1f MiB",
                                 op_of_node(c->plan, maker), (double)top[i].bytes / MIB);
    }
}

const char *koila__instead_of(const char *op)
{
    static const struct {
        const char *op, *instead;
    } known[] = {
        { "aten::_scaled_dot_product_cudnn_attention",
          "no offset was found at which cuDNN's dropout draws the numbers of a slice. Flash and "
          "memory-efficient attention are cut: torch.nn.attention.sdpa_kernel(["
          "SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])" },
        { "aten::_cudnn_rnn",
          "cuDNN does not tell which numbers its dropout between layers draws. PyTorch's own "
          "layers are cut: torch.backends.cudnn.flags(enabled=False) around the step" },
    };
    for (size_t i = 0; i < KOILA_COUNT(known); i++) {
        const size_t n = strlen(known[i].op);
        if (strncmp(known[i].op, op, n) == 0 && (!op[n] || strcmp(op + n, "_backward") == 0))
            return known[i].instead;
    }
    return "";
}

PyObject *koila__gather_text(const cached *c, koila_gather g, const char *op, const char *at)
{
    const koila_plan *plan = c->plan;
    const koila_meta_info *m = meta_of(plan, g.value);
    PyObject *shape = koila__shape_of(m);
    PyObject *line = op ? PyUnicode_FromString(at) : line_of(plan, c->part, g.node);
    PyObject *list = shape ? PySequence_List(shape) : NULL;
    PyObject *text = NULL;
    char whole[32], slice[32];
    readable(whole, sizeof whole, g.bytes);
    readable(slice, sizeof slice, koila_plan_value_bytes(plan, g.value, c->info.rows));
    const char *name = op ? op : op_of_node(plan, g.node);
    const char *instead = koila__instead_of(name);
    if (list && line)
        text = PyUnicode_FromFormat(
            "%s over the batch%s%U needs %s%S whole, %s; one slice is %s. strict() refuses that; "
            "without it the step runs and holds the whole tensor for a while%s%s",
            name, PyUnicode_GET_LENGTH(line) ? " at " : "", line, koila_dtype_text(m->dtype), list,
            whole, slice, *instead ? ". " : "", instead);
    Py_XDECREF(shape);
    Py_XDECREF(list);
    Py_XDECREF(line);
    return text;
}

/* ---- the dict that koila._plan reads */

/* Takes over `value`. */
static int set_item(PyObject *d, const char *key, PyObject *value)
{
    const int status = value ? PyDict_SetItemString(d, key, value) : -1;
    Py_XDECREF(value);
    return status;
}

/* First the gathers while the step was recorded, by operators whose result shape depends on data
 * (nonzero, unique); then those of the plan. */
static PyObject *gathers_list(PyObject *early, const koila_plan *plan, const koila_graph *part,
                              uint32_t n)
{
    PyObject *list = early ? PySequence_List(early) : PyList_New(0);
    for (uint32_t i = 0; list && i < n; i++) {
        const koila_gather g = koila_plan_gather(plan, i);
        const koila_meta_info *m = meta_of(plan, g.value);
        PyObject *t = Py_BuildValue("(ssNKN)", op_of_node(plan, g.node), koila_dtype_text(m->dtype),
                                    koila__shape_of(m), (unsigned long long)g.bytes,
                                    line_of(plan, part, g.node));
        if (!t || PyList_Append(list, t) < 0)
            Py_CLEAR(list);
        Py_XDECREF(t);
    }
    return list;
}

/* Dimension `dim` of a slice: of a share that has rows, size = outer * rows * inner. */
static int64_t slice_size(const koila_plan *plan, koila_share s)
{
    return s.outer * koila_plan_axis_rows(plan, s.axis) * s.inner;
}

/* What of value `v` is held where it takes `bytes`: its shape, and "slice"; or "whole"; or "some
 * slices", with the shape of one. */
static PyObject *held_of(const koila_plan *plan, koila_value v, uint64_t bytes, PyObject **shape)
{
    const koila_meta_info *m = meta_of(plan, v);
    const koila_share s = koila_plan_share(plan, v);
    koila_meta_info slice = *m;
    int64_t size[KOILA_MAX_DIMS];
    *shape = NULL;
    if (s.kind != KOILA_SHARE_SLICE || bytes >= m->n_bytes || m->n_dims > KOILA_MAX_DIMS) {
        *shape = koila__shape_of(m);
        return PyUnicode_FromString("whole");
    }
    memcpy(size, m->size, m->n_dims * sizeof *size);
    size[s.dim] = slice_size(plan, s) < size[s.dim] ? slice_size(plan, s) : size[s.dim];
    slice.size = size;
    *shape = koila__shape_of(&slice);
    const uint64_t one = koila_plan_value_bytes(plan, v, koila_plan_axis_rows(plan, s.axis));
    return PyUnicode_FromString(bytes > one ? "some slices" : "slice");
}

static PyObject *largest_item(const koila_plan *plan, const koila_graph *part, koila_gather g)
{
    const koila_meta_info *m = meta_of(plan, g.value);
    PyObject *shape;
    PyObject *held = held_of(plan, g.value, g.bytes, &shape);
    return Py_BuildValue("(KsNsNNNK)", (unsigned long long)g.bytes, koila_dtype_text(m->dtype),
                         koila__shape_of(m), op_of_node(plan, g.node), line_of(plan, part, g.node),
                         held, shape, (unsigned long long)m->n_bytes);
}

static PyObject *largest_list(const koila_plan *plan, const koila_graph *part)
{
    koila_gather top[MOST_LARGEST];
    const uint32_t n = koila_plan_largest(plan, top, MOST_LARGEST);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < n; i++) {
        PyObject *t = largest_item(plan, part, top[i]);
        if (!t || PyList_Append(list, t) < 0)
            Py_CLEAR(list);
        Py_XDECREF(t);
    }
    return list;
}

static PyObject *curve_list(const koila_plan *plan, uint64_t base)
{
    koila_curve_point *points = PyMem_Malloc(MOST_CURVE_POINTS * sizeof *points);
    const uint32_t n = points ? koila_plan_curve(plan, points, MOST_CURVE_POINTS) : 0;
    PyObject *list = points ? PyList_New(0) : PyErr_NoMemory();
    for (uint32_t i = 0; list && i < n; i++) {
        PyObject *t = Py_BuildValue(
            "(NK)",
            PyUnicode_FromFormat("stage %u: %s", points[i].stage, op_of_node(plan, points[i].node)),
            (unsigned long long)(points[i].bytes + base));
        if (!t || PyList_Append(list, t) < 0)
            Py_CLEAR(list);
        Py_XDECREF(t);
    }
    PyMem_Free(points);
    return list;
}

/* The node because of which the loop ends: it makes a value of all rows that another loop needs.
 * Moments (batch norm's) count before others. KOILA_NONE: none does. */
static koila_node loop_ends_for(const koila_plan *plan, const koila_stage *st)
{
    koila_node first = KOILA_NONE;
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind != KOILA_DO_ADD && in->kind != KOILA_DO_PUT)
            continue;
        const koila_share s = koila_plan_share(plan, in->id);
        const koila_node maker = koila_value_get(koila_plan_graph(plan), in->id).node;
        if (s.kind == KOILA_SHARE_PARTIAL && s.partial == KOILA_PARTIAL_MOMENTS)
            return maker;
        first = first == KOILA_NONE ? maker : first;
    }
    return first;
}

/* The operator that the program called, for a lowered one. */
static const char *recorded_op(const koila_plan *plan, const koila_graph *part, koila_node lowered)
{
    const koila_node n = lowered == KOILA_NONE ? KOILA_NONE : koila_plan_recorded(plan, lowered);
    if (n == KOILA_NONE)
        return "";
    const koila_table *table = koila_graph_table(part);
    return koila_op_name(table, koila_sig_get(table, koila_node_get(part, n).sig)->op);
}

/* compiled: bit k: stage k ran so. */
static PyObject *loops_list(const koila_plan *plan, const koila_graph *part,
                            const koila_plan_info *info, uint64_t base, uint64_t compiled)
{
    PyObject *list = PyList_New(0);
    for (uint32_t k = 0; list && k < info->n_stages; k++) {
        const koila_stage *st = koila_plan_stage(plan, k);
        uint32_t n_nodes = 0, n_targets = 0;
        for (uint32_t i = 0; i < st->n_instrs; i++) {
            n_nodes += st->instrs[i].kind == KOILA_DO_RUN;
            if (st->instrs[i].kind == KOILA_DO_INNER)
                n_nodes += st->inner->n_nodes;
            n_targets += st->instrs[i].kind == KOILA_DO_ADD || st->instrs[i].kind == KOILA_DO_PUT;
        }
        if (!st->is_loop || !n_nodes)
            continue;
        const koila_node end = loop_ends_for(plan, st);
        PyObject *d = Py_BuildValue(
            "{s:i,s:I,s:I,s:I,s:K,s:s,s:N,s:O}", "axis", (int)st->axis, "n_slices",
            koila_plan_slices(plan, st->axis), "n_nodes", n_nodes, "n_targets", n_targets,
            "peak_bytes", (unsigned long long)(st->peak_bytes + base), "ends_for",
            recorded_op(plan, part, end), "ends_at", line_of(plan, part, end), "compiled",
            k < 64 && compiled >> k & 1 ? Py_True : Py_False);
        if (!d || PyList_Append(list, d) < 0)
            Py_CLEAR(list);
        Py_XDECREF(d);
    }
    return list;
}

static PyObject *bytes_or_none(bool is_known, uint64_t n)
{
    return is_known ? PyLong_FromUnsignedLongLong(n) : Py_NewRef(Py_None);
}

static PyObject *asked_by_text(const koila__step *step)
{
    static const char *const words[KOILA__N_ASKED_BY] = { "read", "backward", "leaving", "plan" };
    if (step->asked_by != KOILA__ASKED_BY_READ || !*step->asked_by_op)
        return PyUnicode_FromString(words[step->asked_by]);
    const bool is_item = strcmp(step->asked_by_op, "aten::_local_scalar_dense") == 0;
    return PyUnicode_FromString(is_item ? "item" : step->asked_by_op);
}

static double replay_ratio_of(const koila__step *step, const koila_plan_info *info)
{
    return step->work_recorded > 0 ? step->work / step->work_recorded : info->replay_ratio;
}

/* The axis that is cut in place of the rows, or within each: (dimension, size, of a slice, slices);
 * or None. */
static PyObject *axis_tuple(const koila_plan_info *info)
{
    if (info->n_inner && info->inner_dim != KOILA_NONE)
        return Py_BuildValue("(ILLI)", info->inner_dim, (long long)info->inner_size,
                             (long long)info->inner_rows, info->inner_slices);
    if (info->dim == KOILA_NONE)
        Py_RETURN_NONE;
    return Py_BuildValue("(ILLI)", info->dim, (long long)(info->batch * info->unit),
                         (long long)(info->rows * info->unit), info->n_slices);
}

/* All rows of the step. */
static int64_t batch_of(const koila_graph *part, const koila_plan_info *info)
{
    int64_t most = 1;
    if (info->dim == KOILA_NONE)
        return info->batch;
    for (uint32_t a = 0; a < koila_graph_n_axes(part); a++)
        if (koila_graph_axis_size(part, (uint16_t)a) > most)
            most = koila_graph_axis_size(part, (uint16_t)a);
    return most;
}

/* Is there a loop? Without one the step runs whole, whatever number of slices was requested. */
static bool has_loop(const koila_plan *plan, const koila_plan_info *info)
{
    for (uint32_t k = 0; k < info->n_stages; k++) {
        const koila_stage *st = koila_plan_stage(plan, k);
        for (uint32_t i = 0; st->is_loop && i < st->n_instrs; i++)
            if (st->instrs[i].kind == KOILA_DO_RUN ||
                (st->instrs[i].kind == KOILA_DO_INNER && st->inner->n_nodes))
                return true;
    }
    return false;
}

/* What the step would need with all rows at once, in recorded order; None: not known. */
static PyObject *plain_peak(const koila__step *step)
{
    cached *c = step->c;
    koila_plan *whole = NULL;
    koila_error err = KOILA_ERROR_INIT;
    const koila_plan_options o = { .struct_size = sizeof o,
                                   .budget_bytes = UINT64_MAX,
                                   .workspace = koila__workspace_of,
                                   .spared = koila__spared_of };
    if (!c->plain_peak_bytes && c->targets &&
        koila_plan_new(c->part, c->targets, c->n_targets, &o, NULL, &whole, &err) == KOILA_OK)
        c->plain_peak_bytes = koila_plan_get(whole).peak_bytes;
    koila_plan_free(whole);
    return bytes_or_none(c->plain_peak_bytes > 0, c->plain_peak_bytes + step->base_bytes);
}

PyObject *koila__step_facts(const koila__step *step)
{
    const koila_plan *plan = step->c->plan;
    const koila_graph *part = step->c->part;
    const koila_plan_info info = koila_plan_get(plan);
    const uint64_t base = step->base_bytes; /* added to every byte count */
    PyObject *d = PyDict_New();
    if (!d)
        return NULL;
    const bool is_cut = info.dim == KOILA_NONE && has_loop(plan, &info);
    const int64_t batch = batch_of(part, &info);
    const int64_t rows = is_cut ? info.rows : batch;
    int bad = set_item(d, "batch", PyLong_FromLongLong(batch));
    bad |= set_item(d, "axis", axis_tuple(&info));
    bad |= set_item(d, "micro_batch", PyLong_FromLongLong(rows));
    bad |= set_item(d, "n_micro_batches", PyLong_FromUnsignedLong(is_cut ? info.n_slices : 1));
    const uint32_t n_fewest = step->n_fewest ? step->n_fewest : info.n_slices;
    const uint64_t predicted =
        step->predicted_peak_bytes ? step->predicted_peak_bytes : info.peak_bytes;
    bad |= set_item(d, "n_fewest", PyLong_FromUnsignedLong(is_cut ? n_fewest : 1));
    bad |= set_item(d, "predicted_peak_bytes", bytes_or_none(true, predicted + base));
    bad |= set_item(d, "predicted_uncompiled", PyBool_FromLong(step->predicted_uncompiled));
    bad |= set_item(d, "measured_peak_bytes",
                    bytes_or_none(step->measured, step->measured_peak_bytes));
    bad |= set_item(d, "budget_bytes",
                    bytes_or_none(step->budget_bytes != UINT64_MAX, step->budget_bytes));
    bad |= set_item(d, "gathers", gathers_list(step->early, plan, part, info.n_gathers));
    bad |= set_item(d, "retries", PyLong_FromUnsignedLong(step->retries));
    const bool has_run = step->asked_by != KOILA__ASKED_BY_PLAN && step->n_run > 0;
    bad |= set_item(d, "seconds", has_run ? PyFloat_FromDouble(step->seconds) : Py_NewRef(Py_None));
    bad |= set_item(d, "n_reads", PyLong_FromUnsignedLong(step->n_reads));
    const uint32_t n_recorded = step->n_recorded ? step->n_recorded : info.n_recorded;
    bad |= set_item(d, "number", PyLong_FromUnsignedLongLong(step->number));
    bad |= set_item(d, "asked_by", asked_by_text(step));
    bad |= set_item(d, "asked_at", PyUnicode_DecodeFSDefault(step->asked_at));
    bad |= set_item(d, "n_recorded", PyLong_FromUnsignedLong(n_recorded));
    bad |= set_item(d, "n_run", PyLong_FromUnsignedLongLong(step->n_run));
    bad |= set_item(d, "replay_ratio", PyFloat_FromDouble(replay_ratio_of(step, &info)));
    bad |= set_item(d, "n_aside", PyLong_FromUnsignedLongLong(step->n_aside));
    bad |= set_item(d, "time_ratio", PyFloat_FromDouble(info.time_ratio));
    bad |= set_item(d, "n_recomputed", PyLong_FromUnsignedLong(info.n_again));
    bad |= set_item(d, "n_offloaded", PyLong_FromUnsignedLong(info.n_offloaded));
    bad |= set_item(d, "offloaded_bytes", PyLong_FromUnsignedLongLong(info.offloaded_bytes));
    bad |= set_item(d, "base_bytes", bytes_or_none(true, base));
    bad |= set_item(d, "fit", koila__fit_dict(step->c));
    if (bad)
        Py_CLEAR(d);
    return d;
}

PyObject *koila__step_dict(const koila__step *step)
{
    const koila_plan *plan = step->c->plan;
    const koila_graph *part = step->c->part;
    const koila_plan_info info = koila_plan_get(plan);
    PyObject *d = koila__step_facts(step);
    if (!d)
        return NULL;
    int bad = set_item(d, "loops", loops_list(plan, part, &info, step->base_bytes, step->compiled));
    bad |= set_item(d, "largest", largest_list(plan, part));
    bad |= set_item(d, "curve", curve_list(plan, step->base_bytes));
    bad |= set_item(d, "plain_peak_bytes", plain_peak(step));
    if (bad)
        Py_CLEAR(d);
    return d;
}

/* ---- files */

static int write_file(void *user, const char *text, size_t n)
{
    return fwrite(text, 1, n, user) != n;
}

int koila__save_graph(const koila_graph *g, const char *path)
{
    FILE *f = fopen(path, "wb");
    if (!f) {
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
        return -1;
    }
    const koila_status status = koila_graph_print(g, write_file, f);
    if (fclose(f) != 0 || status != KOILA_OK) {
        PyErr_Format(PyExc_OSError, "%s: not written: %s", path, koila_status_text(status));
        return -1;
    }
    return 0;
}
