/* plan_report.c — reports plans to people and to Python. Nothing here is on the hot path.
 *
 *   koila__last_step_is(step)     after each step; last_plan() is then koila__step_dict() of it
 *
 * To report one more fact, add an item in koila__step_dict() and its name in the class Plan of
 * python/koila/_plan.py. A fact of the run that no plan has is also a new field of koila__step.
 */
#include "run/run.h"

#define MIB 1048576.0
#define KIB 1024.0
enum { MOST_LARGEST = 32, MOST_CURVE_POINTS = 1024 };

/* ---- the last step */

static koila__step last;
static uint64_t n_last_steps;

/* While koila.plan() records, the last step is the last one that this thread planned, for other
 * threads' steps end meanwhile. Kept until the thread's next step. */
static _Thread_local koila__step planned;
static _Thread_local uint64_t n_planned;

const koila__step *koila__last_step(void)
{
    const koila__step *step = koila__is_planning() ? &planned : &last;
    return step->c ? step : NULL;
}

uint64_t koila__n_last_steps(void) { return koila__is_planning() ? n_planned : n_last_steps; }

static void replace(koila__step *old, const koila__step *step)
{
    const koila__step before = *old;
    *old = *step;
    koila__cached_release(before.c);
    Py_XDECREF(before.early);
}

void koila__last_step_is(const koila__step *step)
{
    koila__step own = { 0 };
    koila_assert(step->c);
    if (koila__is_planning()) {
        own = *step;
        own.c->refs++;
        Py_XINCREF(own.early);
        n_planned++;
    }
    replace(&planned, &own);
    n_last_steps++;
    replace(&last, step);
}

int koila__last_step_adopt(koila_plan *plan)
{
    koila__step *step = koila__is_planning() ? &planned : &last;
    koila_assert(step->c);
    cached *c = koila__cached_variant(step->c, plan);
    if (!c)
        return -1;
    if (step == &planned) { /* last_plan() tells it too */
        koila__step told = planned;
        c->refs++;
        told.c = c;
        Py_XINCREF(told.early);
        replace(&last, &told);
    }
    koila__cached_release(step->c);
    step->c = c;
    return 0;
}

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

void koila__line_text(const koila_graph *g, uint32_t line, char *out, size_t n)
{
    if (line != KOILA_NONE)
        snprintf(out, n, "%s:%u", koila_graph_line_file(g, line), koila_graph_line_number(g, line));
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
          "cuDNN does not tell which numbers its dropout draws. Flash and memory-efficient "
          "attention are cut: torch.nn.attention.sdpa_kernel([SDPBackend.FLASH_ATTENTION, "
          "SDPBackend.EFFICIENT_ATTENTION])" },
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
    const koila_meta_info *m =
        koila_meta_get(koila__table, koila_value_get(koila_plan_graph(plan), g.value).meta);
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
    koila_gather top[MOST_LARGEST];
    const uint32_t n = koila_plan_largest(plan, top, MOST_LARGEST);
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

static PyObject *bytes_or_none(bool is_known, uint64_t n)
{
    return is_known ? PyLong_FromUnsignedLongLong(n) : Py_NewRef(Py_None);
}

PyObject *koila__step_dict(const koila__step *step)
{
    const koila_plan *plan = step->c->plan;
    const koila_graph *part = step->c->part;
    const koila_plan_info info = koila_plan_get(plan);
    const uint64_t base = step->base_bytes; /* added to every byte count */
    PyObject *d = PyDict_New();
    PyObject *loops = loops_list(plan, &info, base);
    if (!d || !loops) {
        Py_XDECREF(d);
        Py_XDECREF(loops);
        return NULL;
    }
    /* without a loop the step runs whole, whatever number of slices was requested */
    const bool is_cut = PyList_GET_SIZE(loops) > 0;
    const int64_t rows = is_cut ? info.rows : info.batch;
    int bad = set_item(d, "batch", PyLong_FromLongLong(info.batch));
    bad |= set_item(d, "micro_batch", PyLong_FromLongLong(rows));
    bad |= set_item(d, "n_micro_batches", PyLong_FromUnsignedLong(is_cut ? info.n_slices : 1));
    bad |= set_item(d, "predicted_peak_bytes", bytes_or_none(true, info.peak_bytes + base));
    bad |= set_item(d, "measured_peak_bytes",
                    bytes_or_none(step->measured, step->measured_peak_bytes));
    bad |= set_item(d, "budget_bytes",
                    bytes_or_none(step->budget_bytes != UINT64_MAX, step->budget_bytes));
    bad |= set_item(d, "loops", loops);
    bad |= set_item(d, "gathers", gathers_list(step->early, plan, part, info.n_gathers));
    bad |= set_item(d, "retries", PyLong_FromUnsignedLong(step->retries));
    bad |= set_item(d, "largest", largest_list(plan, part));
    bad |= set_item(d, "curve", curve_list(plan, base));
    bad |= set_item(d, "n_recorded", PyLong_FromUnsignedLong(info.n_recorded));
    bad |= set_item(d, "n_run", PyLong_FromUnsignedLongLong(step->n_run));
    bad |= set_item(d, "replay_ratio", PyFloat_FromDouble(info.replay_ratio));
    bad |= set_item(d, "base_bytes", bytes_or_none(true, base));
    bad |= set_item(d, "fit", koila__fit_dict(step->c));
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
