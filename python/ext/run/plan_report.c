/* plan_report.c — what people and Python see of plans and settings. Included by run.c's neighbours
 * through run.h; everything here is off the hot path.
 *
 *   configure(*, micro_batch, budget, strict, fastest) -> the settings before
 *         (only what is given changes)
 *   last_plan() -> dict | None          explain(lazies) -> dict          save_graph(lazies | None,
 *                                       path)
 */
#include "run/exec.h"

static int set_item(PyObject *d, const char *key, PyObject *value) /* takes value */
{
    const int status = value ? PyDict_SetItemString(d, key, value) : -1;
    Py_XDECREF(value);
    return status;
}

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

static const char *op_of_node(const koila_plan *plan, koila_node n)
{
    const koila_graph *g = koila_plan_graph(plan);
    return n == KOILA_NONE
               ? "input"
               : koila_op_name(koila__table,
                               koila_sig_get(koila__table, koila_node_get(g, n).sig)->op);
}

static const char *readable(char *out, size_t n, uint64_t bytes)
{
    if (bytes < 1u << 20)
        snprintf(out, n, "%.1f KiB", (double)bytes / 1024.0);
    else
        snprintf(out, n, "%.1f MiB", (double)bytes / 1048576.0);
    return out;
}

PyObject *koila__gather_text(const koila_plan *plan, const koila_graph *part, koila_gather g,
                             int64_t rows, const char *op, const char *at)
{
    const koila_meta_info *m =
        koila_meta_get(koila__table, koila_value_get(koila_plan_graph(plan), g.value).meta);
    PyObject *shape = koila__shape_of(m);
    PyObject *line = op ? PyUnicode_FromString(at) : line_of(plan, part, g.node);
    PyObject *list = shape ? PySequence_List(shape) : NULL;
    PyObject *text = NULL;
    char whole[32], slice[32];
    if (list && line)
        text = PyUnicode_FromFormat(
            "%s over the batch%s%U needs %s%S whole, %s; one slice is %s. strict() refuses that; "
            "without it the step runs, and holds the whole for a while",
            op ? op : op_of_node(plan, g.node), PyUnicode_GET_LENGTH(line) ? " at " : "", line,
            koila_dtype_text(m->dtype), list, readable(whole, sizeof whole, g.bytes),
            readable(slice, sizeof slice, koila_plan_value_bytes(plan, g.value, rows)));
    Py_XDECREF(shape);
    Py_XDECREF(list);
    Py_XDECREF(line);
    return text;
}

/* What operators whose result cannot be described before they run (nonzero, unique) gathered while
 * the step was recorded, then what the plan gathers. */
static PyObject *gathers_list(PyObject *early, const koila_plan *plan, const koila_graph *part,
                              uint32_t n)
{
    PyObject *list = early ? PySequence_List(early) : PyList_New(0);
    for (uint32_t i = 0; list && i < n; i++) {
        const koila_gather g = koila_plan_gather(plan, i);
        const koila_meta_info *m =
            koila_meta_get(koila__table, koila_value_get(koila_plan_graph(plan), g.value).meta);
        PyObject *t = Py_BuildValue("(ssNKN)", op_of_node(plan, g.node), koila_dtype_text(m->dtype),
                                    koila__shape_of(m), (unsigned long long)g.bytes,
                                    line_of(plan, part, g.node));
        if (!t || PyList_Append(list, t) < 0)
            Py_CLEAR(list);
        Py_XDECREF(t);
    }
    return list;
}

static PyObject *largest_list(const koila_plan *plan, const koila_graph *part)
{
    koila_gather top[32];
    const uint32_t n = koila_plan_largest(plan, top, 32);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < n; i++) {
        const koila_meta_info *m = koila_meta_get(
            koila__table, koila_value_get(koila_plan_graph(plan), top[i].value).meta);
        PyObject *t = Py_BuildValue(
            "(KsNsN)", (unsigned long long)top[i].bytes, koila_dtype_text(m->dtype),
            koila__shape_of(m), op_of_node(plan, top[i].node), line_of(plan, part, top[i].node));
        if (!t || PyList_Append(list, t) < 0)
            Py_CLEAR(list);
        Py_XDECREF(t);
    }
    return list;
}

static PyObject *curve_list(const koila_plan *plan, uint64_t base)
{
    enum { N = 1024 };
    koila_curve_point *points = PyMem_Malloc(N * sizeof *points);
    const uint32_t n = points ? koila_plan_curve(plan, points, N) : 0;
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

static PyObject *loops_list(const koila_plan *plan, const koila_plan_info *info, uint64_t base)
{
    PyObject *list = PyList_New(0);
    for (uint32_t k = 0; list && k < info->n_stages; k++) {
        const koila_stage *st = koila_plan_stage(plan, k);
        uint32_t n_nodes = 0, n_targets = 0;
        for (uint32_t i = 0; i < st->n_instrs; i++) {
            n_nodes += st->instrs[i].kind == KOILA_DO_RUN;
            n_targets += st->instrs[i].kind == KOILA_DO_ADD || st->instrs[i].kind == KOILA_DO_PUT;
        }
        if (!st->is_loop || !n_nodes)
            continue;
        PyObject *d =
            Py_BuildValue("{s:i,s:I,s:I,s:I,s:K}", "axis", (int)st->axis, "n_slices",
                          koila_plan_slices(plan, st->axis), "n_nodes", n_nodes, "n_targets",
                          n_targets, "peak_bytes", (unsigned long long)(st->peak_bytes + base));
        if (!d || PyList_Append(list, d) < 0)
            Py_CLEAR(list);
        Py_XDECREF(d);
    }
    return list;
}

PyObject *koila__plan_dict(const cached *c, PyObject *early, uint64_t base,
                           const uint64_t *measured, uint64_t limit, uint32_t retries,
                           uint64_t n_run)
{
    const koila_plan *plan = c->plan;
    const koila_graph *part = c->part;
    const koila_plan_info info = koila_plan_get(plan);
    PyObject *d = PyDict_New();
    PyObject *loops = loops_list(plan, &info, base);
    if (!d || !loops) {
        Py_XDECREF(d);
        Py_XDECREF(loops);
        return NULL;
    }
    /* else nothing in it could be, or was left to be: it runs whole, however many slices were asked
     * for */
    const bool cut = PyList_GET_SIZE(loops) > 0;
    int bad =
        set_item(d, "batch", PyLong_FromLongLong(info.batch)) |
        set_item(d, "micro_batch", PyLong_FromLongLong(cut ? info.rows : info.batch)) |
        set_item(d, "n_micro_batches", PyLong_FromUnsignedLong(cut ? info.n_slices : 1)) |
        set_item(d, "predicted_peak_bytes", PyLong_FromUnsignedLongLong(info.peak_bytes + base)) |
        set_item(d, "measured_peak_bytes",
                 measured ? PyLong_FromUnsignedLongLong(*measured) : Py_NewRef(Py_None)) |
        set_item(d, "budget_bytes",
                 limit == UINT64_MAX ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(limit)) |
        set_item(d, "loops", loops) |
        set_item(d, "gathers", gathers_list(early, plan, part, info.n_gathers)) |
        set_item(d, "retries", PyLong_FromUnsignedLong(retries)) |
        set_item(d, "largest", largest_list(plan, part)) |
        set_item(d, "curve", curve_list(plan, base)) |
        set_item(d, "n_recorded", PyLong_FromUnsignedLong(info.n_recorded)) |
        set_item(d, "n_run", PyLong_FromUnsignedLongLong(n_run)) |
        set_item(d, "replay_ratio", PyFloat_FromDouble(info.replay_ratio)) |
        set_item(d, "base_bytes", PyLong_FromUnsignedLongLong(base)) |
        set_item(d, "fit", koila__fit_dict(c));
    if (bad)
        Py_CLEAR(d);
    return d;
}

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
