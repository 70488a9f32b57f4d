/* run.c — the executor: makes recorded values concrete by walking a plan, slice by slice, and
 * changes nothing outside until all is done.
 *
 *   koila__run(tape, targets):
 *         # roughly this Python part = extract(tape.graph, targets, known)    # values made
 *         concrete before are leaves check the versions of its leaves              #
 *         StaleValueError plan = plan_cache.get(part) or make_plan(part, free memory) for stage in
 *         plan.stages: for begin, end in slices(stage.axis):     # or once, for a whole stage for
 *         instr in stage.instrs: ...        # see koila/plan.h tape.values[target].real =
 *         whole[target]      # last: nothing before this line can be seen
 *
 * When one row is too much for a slice (exec.c halves them), or a whole stage runs out, the plan is
 * made again with half the rows; where ranks of a sharded module run it together, by all of them.
 * What cannot be done raises koila.OutOfMemory, with nothing changed.
 */
#include "run/exec.h"
#include "ground/shield.h"

#include <time.h>

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- the run */

void koila__request_free(request *r)
{
    koila_graph_free(r->part);
    PyMem_Free(r->value_of);
    PyMem_Free(r->node_from);
    PyMem_Free(r->targets);
    PyMem_Free(r->known);
    *r = (request){ 0 };
}

int koila__request_make(koila__tape *t, const koila_value *targets, uint32_t n, request *r)
{
    const uint32_t n_values = koila_graph_n_values(t->graph);
    const uint32_t n_nodes = koila_graph_n_nodes(t->graph);
    *r = (request){ 0 };
    r->value_of = PyMem_Malloc((n_values + 1) * sizeof *r->value_of);
    r->node_from = PyMem_Malloc((n_nodes + 1) * sizeof *r->node_from);
    r->targets = PyMem_Malloc((n + 1) * sizeof *r->targets);
    r->known = PyMem_Calloc(n_values + 1, 1);
    koila_status status = KOILA_NO_MEMORY;
    if (r->value_of && r->node_from && r->targets && r->known) {
        for (uint32_t v = 0; v < n_values; v++)
            r->known[v] = t->values[v].real != NULL;
        status = koila_graph_extract(t->graph, targets, n, r->known, NULL, &r->part, r->value_of,
                                     r->node_from);
    }
    if (status != KOILA_OK) {
        koila__request_free(r);
        koila__raise(status);
        return -1;
    }
    for (uint32_t i = 0; i < n; i++)
        r->targets[i] = r->value_of[targets[i]];
    return 0;
}

/* Leaves that changed since they were recorded make every value that needs them stale. */
static int check_versions(koila__tape *t, const request *r)
{
    const uint32_t n_values = koila_graph_n_values(t->graph);
    for (uint32_t v = 0; v < n_values; v++) {
        if (r->value_of[v] == KOILA_NONE || !t->values[v].real ||
            koila_value_get(t->graph, v).node != KOILA_NONE)
            continue;
        uint32_t now;
        if (koila__version_of(t->values[v].real, &now) < 0)
            return -1;
        if (now == t->values[v].version)
            continue;
        const koila_meta_info *m = koila_meta_get(koila__table, koila_value_get(t->graph, v).meta);
        char shape[400] = "", where[400] = "";
        for (uint32_t d = 0, at = 0; d < m->n_dims && at < sizeof shape; d++)
            at += (uint32_t)snprintf(shape + at, sizeof shape - at, "%s%lld", d ? ", " : "",
                                     (long long)m->size[d]);
        /* the first line that read it */
        for (koila_node n = 0; !where[0] && n < koila_graph_n_nodes(t->graph); n++) {
            const koila_node_info info = koila_node_get(t->graph, n);
            for (uint32_t i = 0;
                 info.line != KOILA_NONE && i < koila_sig_get(koila__table, info.sig)->n_inputs;
                 i++)
                if (koila_node_inputs(t->graph, n)[i] == v)
                    snprintf(where, sizeof where, ", read at %s:%u",
                             koila_graph_line_file(t->graph, info.line),
                             koila_graph_line_number(t->graph, info.line));
        }
        koila__raise_stale(
            "what is asked for was recorded from a tensor %s[%s]%s, which has been written since "
            "(version %u, recorded at %u): a parameter after optimizer.step(), or a "
            "buffer. Call backward(), or ask for the value (print it, .item(), .torch()), before "
            "the write; or hold the value in a variable while backward() runs: what you "
            "hold is saved as it passes by",
            koila_dtype_text(m->dtype), shape, where, now, t->values[v].version);
        return -1;
    }
    return 0;
}

/* A step that is only planned: what it reads (parameters, buffers, the batch) will be held beside
 * it, whatever is held by now. 0, or -1 with an exception. */
static int make_room_for_leaves(koila__tape *t, const request *r, koila__room *room)
{
    PyObject *leaves = PyList_New(0);
    PyObject *mine = PyImport_ImportModule("koila._run");
    PyObject *n = NULL;
    for (uint32_t v = 0; leaves && mine && v < koila_graph_n_values(t->graph); v++) {
        const koila_value_info info = koila_value_get(t->graph, v);
        if (r->value_of[v] == KOILA_NONE || !t->values[v].real || info.node != KOILA_NONE)
            continue;
        PyObject *pair = PyTuple_Pack(2, t->values[v].real,
                                      info.leaf_kind == KOILA_LEAF_BATCH ? Py_True : Py_False);
        if (!pair || PyList_Append(leaves, pair) < 0)
            Py_CLEAR(leaves);
        Py_XDECREF(pair);
    }
    if (leaves && mine)
        n = PyObject_CallMethod(mine, "held_bytes", "O", leaves);
    if (n)
        room->held = PyLong_AsUnsignedLongLong(n);
    Py_XDECREF(leaves);
    Py_XDECREF(mine);
    Py_XDECREF(n);
    if (PyErr_Occurred())
        return -1;
    if (room->limit != UINT64_MAX)
        room->bytes = room->limit > room->held ? room->limit - room->held : 0;
    return 0;
}

/* Under a budget that is less than what torch holds already nothing can be allocated at all: 0, or
 * -1 with OutOfMemory. */
int koila__held_fits(const char *call)
{
    const uint64_t held = koila__cpu_bytes_current();
    const uint64_t budget = koila__settings.cpu_budget;
    if (budget == UINT64_MAX || koila__settings.dry || koila__cpu_bytes_get_limit() != budget ||
        held <= budget)
        return 0;
    char text[400];
    const double mib = 1048576.0;
    snprintf(text, sizeof text,
             "%s: torch holds %.1f MiB already, and the budget is %.1f MiB: %llu bytes too much "
             "before anything is computed. A budget counts all that torch holds, "
             "model, data and optimizer too. Try: a larger budget, a fraction (of what is free "
             "beside it), or dropping what is not needed first",
             call, (double)held / mib, (double)budget / mib, (unsigned long long)(held - budget));
    return koila__raise_out_of_memory(text, held - budget);
}

static int refuse_gather(const cached *c, koila_gather g, const char *op, const char *line)
{
    return koila__raise_gather(koila__gather_text(c->plan, c->part, g, c->info.rows, op, line));
}

/* What plan c gathers, and those of its n targets that an operator waits for, which runs on values
 * as soon as they are there. */
static int check_strict(koila__tape *t, const cached *c, uint32_t n)
{
    if (!koila__settings.strict || c->info.n_slices <= 1)
        return 0;
    for (uint32_t i = 0; i < c->info.n_gathers; i++) {
        const koila_gather g = koila_plan_gather(c->plan, i);
        if (g.bytes > koila_plan_value_bytes(c->plan, g.value, c->info.rows))
            return refuse_gather(c, g, NULL, NULL);
    }
    for (uint32_t i = 0; koila__gathers_for && i < n; i++) {
        const koila_value v = koila_plan_target(c->plan, i);
        const koila_gather g = { .value = v,
                                 .node = KOILA_NONE,
                                 .bytes = koila_meta_get(
                                              koila__table,
                                              koila_value_get(koila_plan_graph(c->plan), v).meta)
                                              ->n_bytes };
        if (koila_plan_share(c->plan, v).kind != KOILA_SHARE_SLICE ||
            g.bytes <= koila_plan_value_bytes(c->plan, v, c->info.rows))
            continue;
        char line[300] = "";
        koila__line_text(t->graph, koila__line_now(t), line, sizeof line);
        return refuse_gather(c, g, koila__gathers_for, line);
    }
    return 0;
}

/* Would strict() refuse a plan for these targets? Where that cannot be known the answer is yes. */
static bool is_refused(koila__tape *t, const koila_value *targets, uint32_t n)
{
    request r;
    koila_error err = KOILA_ERROR_INIT;
    koila_status status = KOILA_OK;
    if (!n)
        return false;
    cached *c = NULL;
    if (koila__request_make(t, targets, n, &r) == 0) {
        const koila__room room = koila__room_for(r.part);
        koila_graph *part = r.part;
        r.part = NULL;
        c = koila__plan_for(part, r.targets, n, &room, koila__settings.rows, &err, &status);
        koila__request_free(&r);
    }
    const bool refused = !c || check_strict(t, c, n) < 0;
    PyErr_Clear();
    koila__cached_release(c);
    return refused;
}

/* Of targets [n_must, n), which are merely held, those come first that strict() lets pass together
 * with all before them. The end of these; or n, when the others are not what it refuses. */
static uint32_t let_pass(koila__tape *t, koila_value *targets, uint32_t n_must, uint32_t n)
{
    if (is_refused(t, targets, n_must))
        return n;
    for (uint32_t i = n_must; i < n; i++) {
        const koila_value v = targets[i];
        targets[i] = targets[n_must];
        targets[n_must] = v;
        n_must += !is_refused(t, targets, n_must + 1);
    }
    return n_must;
}

/* Do all effects of the tape (BatchNorm's new statistics) pass by when targets are made? Then they
 * may happen now, as they would have in eager. */
static bool effects_pass_by(koila__tape *t, const koila_value *targets, uint32_t n)
{
    request r;
    if (!t->n_effects || koila__request_make(t, targets, n, &r) < 0) {
        PyErr_Clear();
        return false;
    }
    bool all = true;
    for (uint32_t i = 0; i < t->n_effects; i++)
        all &= r.value_of[t->effects[i].value] != KOILA_NONE;
    koila__request_free(&r);
    return all;
}

/* What was recorded reads the contents that `real` has now: its leaves get a copy of their own
 * before it is written. */
static int copy_leaves_of(koila__tape *t, PyObject *real)
{
    for (uint32_t v = 0; v < koila_graph_n_values(t->graph); v++) {
        if (t->values[v].real != real || koila_value_get(t->graph, v).node != KOILA_NONE)
            continue;
        PyObject *old = PyObject_CallFunctionObjArgs(koila__torch.clone, real, NULL);
        if (!old)
            return -1;
        koila__tape_set_real(t, v, old);
    }
    return 0;
}

int koila__run(koila__tape *t, const koila_value *targets, uint32_t n_targets, bool commit_effects)
{
    if (koila__settings.dry) {
        koila__unsupported(
            "koila.plan(): the step reads a value (print, .item(), if, a mask) before "
            "backward; nothing is computed while planning. Plan the part up to there");
        return -1;
    }
    /* what else the user still holds and is small is made too, so that reading five logged losses
     * is one run and not five */
    koila_value held[256];
    uint32_t n_held = koila__tape_held(t, targets, n_targets, held, 256);
    uint32_t n_small = 0;
    if (n_held > 256)
        n_held = 256;
    for (uint32_t i = 0; i < n_held; i++) {
        const koila_meta_info *m =
            koila_meta_get(koila__table, koila_value_get(t->graph, held[i]).meta);
        if (m->n_elements <= 1024)
            held[n_small++] = held[i];
    }
    return koila__run_request(t, targets, n_targets, held, n_small,
                              commit_effects || effects_pass_by(t, targets, n_targets), false);
}

/* The effects whose values are concrete happen: all of them, or none and -1 with an exception. */
int koila__commit_effects(koila__tape *t)
{
    const uint32_t n_effects = t->n_effects;
    int status = 0;
    for (koila__tape *reader = koila__tapes; reader && n_effects; reader = reader->next_tape)
        for (uint32_t i = 0; i < n_effects && status == 0; i++) {
            if (!koila__tape_reads(reader, t->effects[i].real))
                continue;
            status = copy_leaves_of(reader, t->effects[i].real);
            /* a few bytes: what the run held is free by now */
            if (status < 0 && koila__is_out_of_memory()) {
                PyErr_Clear();
                status = copy_leaves_of(reader, t->effects[i].real);
            }
        }
    /* copies of equal dtype into memory that is there: nothing here can fail halfway */
    for (uint32_t i = 0; i < n_effects && status == 0; i++) {
        tape_effect *e = &t->effects[i];
        PyObject *new_contents = t->values[e->value].real;
        if (!new_contents || !e->real)
            continue;
        /* as BatchNorm's kernel writes: the version that autograd saved stays */
        PyObject *at = PyObject_GetAttrString(e->real, "data");
        PyObject *ok =
            at ? PyObject_CallFunctionObjArgs(koila__torch.copy_, at, new_contents, NULL) : NULL;
        Py_XDECREF(at);
        Py_XDECREF(ok);
        if (!ok)
            status = -1;
    }
    if (n_effects && status == 0)
        koila__tape_drop_effects(t);
    return status;
}

static int run_request(koila__tape *t, const koila_value *wanted, uint32_t n_wanted,
                       const koila_value *held, uint32_t n_held, bool commit_effects, bool later)
{
    if (koila__torch_setup() < 0)
        return -1;
    const uint32_t n_effects = commit_effects ? t->n_effects : 0;
    koila_value *targets =
        PyMem_Malloc(((size_t)n_wanted + n_held + n_effects + 1) * sizeof *targets);
    PyObject **results = NULL;
    uint32_t n = 0, n_must, retries = 0;
    uint64_t n_run = 0;
    uint64_t base = koila__cpu_bytes_current();
    uint64_t peak_before = 0;
    int status = -1;
    int64_t rows = koila__settings.rows;
    /* awaited: other ranks wait for this one in the exchange (ranks.c) */
    bool measured = false, agreed = false, awaited = false;
    PyObject *ranks = NULL; /* None: nothing is sharded */
    request r = { 0 };
    if (!targets) {
        PyErr_NoMemory();
        return -1;
    }
#define WANT(v_)                                                                                   \
    do {                                                                                           \
        const koila_value want_ = (v_);                                                            \
        bool there_ = t->values[want_].real != NULL;                                               \
        for (uint32_t k_ = 0; k_ < n && !there_; k_++)                                             \
            there_ = targets[k_] == want_;                                                         \
        if (!there_)                                                                               \
            targets[n++] = want_;                                                                  \
    } while (0)
    for (uint32_t i = 0; i < n_wanted; i++)
        WANT(wanted[i]);
    for (uint32_t i = 0; i < n_effects; i++)
        WANT(t->effects[i].value);
    n_must = n;
    for (uint32_t i = 0; i < n_held; i++)
        WANT(held[i]);
#undef WANT
    t->ran = true;
    if (n == 0) {
        status = 0;
        goto commit;
    }
    for (;;) {
        koila_error err = KOILA_ERROR_INIT;
        koila_status plan_status = KOILA_OK;
        koila__request_free(&r);
        if (koila__request_make(t, targets, n, &r) < 0)
            goto done;
        if (!ranks) {
            if (!(ranks = koila__ranks_of(r.part)))
                goto done;
            awaited = ranks != Py_None && !koila__settings.dry;
        }
        if (check_versions(t, &r) < 0) {
            /* something merely held is stale: do without */
            if (koila__is_stale() && n > n_must) {
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
        koila__room room = koila__room_for(r.part);
        if (koila__settings.dry && make_room_for_leaves(t, &r, &room) < 0)
            goto done;
        koila_graph *part = r.part;
        r.part = NULL;
        const bool tune = koila__settings.fastest && !koila__settings.rows && !retries && !agreed;
        const uint64_t tune_key = koila_graph_hash(part);
        if (tune)
            rows = koila__tuned_rows(tune_key);
        cached *c = koila__plan_for(part, r.targets, n, &room, rows, &err, &plan_status);
        if (!c) {
            /* give up the largest of what is merely held */
            if (plan_status == KOILA_OOM && n > n_must) {
                uint32_t largest = n_must;
                for (uint32_t i = n_must; i < n; i++)
                    if (koila_meta_get(koila__table, koila_value_get(t->graph, targets[i]).meta)
                            ->n_bytes >
                        koila_meta_get(koila__table,
                                       koila_value_get(t->graph, targets[largest]).meta)
                            ->n_bytes)
                        largest = i;
                targets[largest] = targets[--n];
                continue;
            }
            if (plan_status != KOILA_OOM || room.gpu >= 0 || koila__held_fits("one step") == 0)
                koila__raise_no_fit(plan_status, &err, "one step");
            goto done;
        }
        if (check_strict(t, c, n_must) < 0) {
            koila__cached_release(c);
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            const uint32_t n_pass = n_wanted ? n : let_pass(t, targets, n_must, n);
            /* nobody asks for what cannot be made, lazy() would only have made it in passing: who
             * asks is told */
            if (n_pass < n) {
                Py_XDECREF(type);
                Py_XDECREF(value);
                Py_XDECREF(trace);
                n = n_pass;
                if (n)
                    continue;
                status = 0;
                goto commit;
            }
            PyErr_Restore(type, value, trace);
            goto done;
        }
        if (koila__settings.dry) {
            koila__cached_release(koila__last.c);
            koila__last.c = c;
            koila__last.n_made++;
            Py_XSETREF(koila__last.early, t->early ? PyList_AsTuple(t->early) : NULL);
            if (PyErr_Occurred())
                PyErr_Clear();
            koila__last.base_bytes = room.held;
            koila__last.measured = false;
            koila__last.retries = 0;
            koila__last.n_run = 0;
            koila__last.budget_bytes = room.limit;
            status = 0;
            koila__request_free(&r);
            Py_XDECREF(ranks);
            PyMem_Free(targets);
            PyMem_Free(results);
            return 0;
        }
        PyMem_Free(results);
        results = PyMem_Calloc(n + 1, sizeof *results);
        if (!results) {
            koila__cached_release(c);
            PyErr_NoMemory();
            goto done;
        }
        if (awaited) {
            uint32_t n_slices;
            const int64_t batch = c->info.batch;
            awaited = false; /* where the exchange fails, it fails on all */
            const int agrees =
                koila__ranks_agree(ranks, c, agreed || koila__settings.rows, &n_slices);
            if (agrees < 0 || n_slices)
                koila__cached_release(c);
            if (agrees < 0)
                goto done;
            if (n_slices) {
                rows = (batch + n_slices - 1) / n_slices;
                agreed = awaited = true;
                continue;
            }
        }
        koila__told told;
        base = koila__cpu_bytes_current();
        peak_before = koila__cpu_bytes_swap_peak(base);
        measured = koila__cpu_bytes_ok() && room.gpu < 0;
        const double started = seconds_now();
        koila__interrupted = false;
        const uint32_t retries_before = retries;
        status = koila__exec_plan(t, &r, c, ranks == Py_None ? NULL : ranks, n, results, &retries,
                                  &n_run, &told);
        if (retries > retries_before || (status < 0 && koila__is_out_of_memory()))
            koila__gpu_ran_out(c);
        if (tune && status == 0)
            koila__tuned_record(tune_key, c->info.rows, seconds_now() - started);
        const uint64_t peak = koila__cpu_bytes_peak();
        if (peak_before > peak)
            koila__cpu_bytes_swap_peak(peak_before);
        /* twice the slices, on every rank; one that cannot withdraws from the exchange */
        if (status < 0 && koila__is_out_of_memory() && told && retries < 64)
            agreed = awaited = true;
        if (status < 0 && koila__is_out_of_memory() && (ranks == Py_None || awaited) &&
            c->info.rows > 1 && c->info.batch > 1 && retries < 64) {
            PyErr_Clear(); /* the plan was too optimistic: half the rows */
            rows = awaited ? (c->info.batch + 2 * c->info.n_slices - 1) / (2 * c->info.n_slices)
                           : (c->info.rows + 1) / 2;
            retries++;
            koila__cached_release(c);
            continue;
        }
        if (status < 0 && n > n_must && ranks == Py_None && !koila__interrupted &&
            !koila__is_out_of_memory() && PyErr_ExceptionMatches(PyExc_Exception)) {
            /* perhaps something merely held cannot be computed: that is not this step's error */
            PyErr_Clear();
            n = n_must;
            koila__cached_release(c);
            continue;
        }
        if (status < 0 && koila__is_out_of_memory() && told != KOILA__TOLD_BY_ANOTHER &&
            (room.gpu >= 0 || koila__held_fits("one step") == 0)) {
            char text[500];
            koila_gather top[3];
            const uint32_t n_top = koila_plan_largest(c->plan, top, 3);
            int used = snprintf(
                text, sizeof text,
                "out of memory with slices of %lld row(s); largest:", (long long)c->info.rows);
            for (uint32_t i = 0; i < n_top && used > 0 && (size_t)used < sizeof text; i++) {
                const koila_node q = koila_value_get(koila_plan_graph(c->plan), top[i].value).node;
                used += snprintf(
                    text + used, sizeof text - (size_t)used, " %s %.1f MiB",
                    q == KOILA_NONE
                        ? "input"
                        : koila_op_name(
                              koila__table,
                              koila_sig_get(koila__table,
                                            koila_node_get(koila_plan_graph(c->plan), q).sig)
                                  ->op),
                    (double)top[i].bytes / 1048576.0);
            }
            if (ranks != Py_None && !awaited && used > 0 && (size_t)used < sizeof text)
                snprintf(text + used, sizeof text - (size_t)used,
                         ". It ran out inside a sharded module, where the other ranks wait: give "
                         "all ranks a smaller koila.micro_batch(n)");
            koila__raise_out_of_memory(text, 0);
        }
        if (status == 0) {
            koila__cached_release(koila__last.c);
            koila__last.c = c;
            koila__last.n_made++;
            Py_XSETREF(koila__last.early, t->early ? PyList_AsTuple(t->early) : NULL);
            if (PyErr_Occurred())
                PyErr_Clear();
            koila__last.base_bytes = room.gpu < 0 ? base : room.held;
            koila__last.measured = measured && koila__cpu_bytes_ok();
            koila__last.measured_peak_bytes = peak;
            koila__last.retries = retries;
            koila__last.n_run = n_run;
            koila__last.budget_bytes = room.limit;
        } else
            koila__cached_release(c);
        break;
    }
    if (status < 0)
        goto done;
    /* takes the references */
    for (uint32_t i = 0; i < n; i++)
        koila__tape_set_real(t, targets[i], results[i]);
commit:
    if (commit_effects && !later)
        status = koila__commit_effects(t);
done:
    if (commit_effects && (status < 0 || !later))
        t->failed = status < 0;
    if (awaited)
        koila__ranks_withdraw(ranks);
    koila__request_free(&r);
    Py_XDECREF(ranks);
    PyMem_Free(targets);
    PyMem_Free(results);
    return status;
}

/* Signals stop it between operators, where nothing has changed yet; or they wait until it is done.
 */
int koila__run_request(koila__tape *t, const koila_value *wanted, uint32_t n_wanted,
                       const koila_value *held, uint32_t n_held, bool commit_effects, bool later)
{
    if (koila__shield_enter() < 0)
        return -1;
    koila__factories_held++; /* operators written in Python make plain tensors */
    koila__factories_watch();
    const int status = run_request(t, wanted, n_wanted, held, n_held, commit_effects, later);
    koila__factories_held--;
    koila__factories_watch();
    koila__shield_leave();
    return status;
}

int koila__run_held(koila__tape *t, const koila_value *held, uint32_t n_held)
{
    return koila__run_request(t, NULL, 0, held, n_held, true, false);
}
