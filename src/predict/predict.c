/* predict.c — the memory that a recorded step will need on a GPU that need not be present.
 *
 * The step was recorded on a CPU, below autograd, with true shapes. The planner turns it into
 * instructions (the whole batch is one slice), and these are run on the simulated cache of the
 * device. Because some sizes are not known exactly, it runs three times: low, expected, high.
 *
 *   run    steps until two in a row leave the same reserved bytes and peaks, at most MAX_STEPS
 *   fits   all three runs again, under the limit: no request fails
 */
#include "predict/simulation.h"

/* Steps of one run: caches that are still growing after so many are reported as not settled. */
enum { MAX_STEPS = 16 };

/* Number of slices in which a step that never fits is shown: more would help little, and take long
 * to simulate. */
enum { MANY_SLICES = 64 };

/* The input of a prediction, with defaults filled in. */
typedef struct prediction_input {
    const koila_graph *g;  /* borrowed */
    const koila_device *d; /* borrowed */
    koila_cache_config conf;
    koila_predict_opts o;
    koila__values targets; /* of g; owned */
    uint64_t memory_bytes; /* the limit */
} prediction_input;

/* ---- one run */

/* Highest bytes of the first step, and of all later ones. */
enum { FIRST, STEADY, N_PHASES };

typedef struct peaks {
    uint64_t allocated, reserved;
    uint64_t device; /* reserved, as the driver rounds it; without the context */
} peaks;

typedef struct run_result {
    peaks of[N_PHASES];
    bool oom;     /* some request failed */
    bool settled; /* two steps in a row left the same state */
    uint32_t n_steps;
    uint64_t n_retries;
    uint64_t peak_bytes;  /* highest bytes allocated */
    koila_node peak_node; /* that ran then; KOILA_NONE: none */
} run_result;

/* How one run differs from the others. */
typedef struct run_options {
    koila__level level;
    uint64_t limit;         /* bytes of the device; 0: unlimited */
    uint64_t look_at_bytes; /* koila__sim.look_at_bytes */
    koila_prediction *out;  /* for list_largest(); may be NULL when nothing is looked at */
} run_options;

static uint64_t field(const prediction_input *x, koila_device_field f)
{
    return koila_device_get(x->d, f).value;
}

static peaks peaks_of(const koila__sim *s)
{
    const koila_cache_stat *stat = koila__cache_stats_ref(s->c);
    return (peaks){ .allocated = stat->of[KOILA_STAT_ALLOCATED_BYTES][KOILA_STAT_ALL].peak,
                    .reserved = stat->of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL].peak,
                    .device = stat->peak_device_bytes };
}

static uint64_t reserved_now(const koila__sim *s)
{
    const koila_cache_stat *stat = koila__cache_stats_ref(s->c);
    return stat->of[KOILA_STAT_RESERVED_BYTES][KOILA_STAT_ALL].current;
}

/* "file.py:12", or "" when no line is known. */
static void line_text(const koila_graph *g, koila_node n, char *out, size_t room)
{
    out[0] = 0;
    if (n == KOILA_NONE)
        return;
    const uint32_t line = koila_node_get(g, n).line;
    if (line != KOILA_NONE)
        snprintf(out, room, "%s:%u", koila_graph_line_file(g, line),
                 koila_graph_line_number(g, line));
}

/* "f32[64, 1024]"; cut where there is no room for another size. */
static void shape_text(const koila_meta_info *m, char *out, size_t room)
{
    enum { ONE_SIZE = 24 }; /* ", ", a 64-bit number, "]" */
    if (!m)
        return;
    size_t n = (size_t)snprintf(out, room, "%s[", koila_dtype_text(m->dtype));
    for (uint32_t i = 0; i < m->n_dims && n + ONE_SIZE < room; i++)
        n += (size_t)snprintf(out + n, room - n, "%s%lld", i ? ", " : "", (long long)m->size[i]);
    if (n + 1 < room)
        snprintf(out + n, room - n, "]");
}

/* koila__sim.look: the largest storages alive, largest first, into a koila_prediction. */
static void list_largest(void *user, const koila__sim *s)
{
    koila_prediction *p = user;
    for (uint32_t i = 1; i < s->storages.n; i++) {
        const koila__storage *x = &s->storages.at[i];
        if (!x->refs || !x->bytes)
            continue;
        uint32_t at = p->n_largest;
        while (at > 0 && p->largest[at - 1].bytes < x->bytes)
            at--;
        if (at == KOILA_PREDICT_LARGEST)
            continue;
        if (p->n_largest < KOILA_PREDICT_LARGEST)
            p->n_largest++;
        koila_assert(at < p->n_largest);
        memmove(&p->largest[at + 1], &p->largest[at],
                (p->n_largest - at - 1) * sizeof p->largest[0]);
        const koila_node maker = koila_value_get(s->g, x->value).node;
        char *line = p->largest[at].line;
        p->largest[at].bytes = x->bytes;
        shape_text(koila__sim_meta(s, x->value), p->largest[at].what, sizeof p->largest[at].what);
        line_text(s->g, maker, line, sizeof p->largest[at].line);
        if (maker == KOILA_NONE)
            snprintf(line, sizeof p->largest[at].line, "%s", koila_graph_leaf_name(s->g, x->value));
    }
}

/* The cache of the device, with `limit` bytes of memory; 0: any. */
static koila_status open_cache(const prediction_input *x, uint64_t limit, koila_cache **out,
                               koila_error *e)
{
    koila_cache_config c = x->conf;
    const koila_device_value context = koila_device_get(x->d, KOILA_DEVICE_CONTEXT_BYTES);
    c.total_bytes = limit;
    c.outside_bytes = limit ? context.value + context.spread : 0;
    c.device_bytes = field(x, KOILA_DEVICE_TOTAL_BYTES);
    if (c.memory_fraction > 0.0)
        koila_cache_config_fraction(&c, c.memory_fraction, c.device_bytes,
                                    field(x, KOILA_DEVICE_INFO_TOTAL_BYTES));
    return koila_cache_new(&c, NULL, out, e);
}

/* Steps until the cache has settled. */
static koila_status run_steps(koila__sim *s, run_result *r)
{
    peaks before = { 0 };
    uint64_t reserved_before = 0;
    for (uint32_t step = 0; step < MAX_STEPS && !r->settled; step++) {
        const int phase = step ? STEADY : FIRST;
        koila__sim_step(s, step == 0);
        if (s->status)
            return s->status;
        const peaks now = peaks_of(s);
        const uint64_t reserved = reserved_now(s);
        r->settled = step > 1 && before.allocated == now.allocated &&
                     before.reserved == now.reserved && reserved_before == reserved;
        r->of[phase] = now;
        r->n_steps = step + 1;
        before = now;
        reserved_before = reserved;
    }
    return KOILA_OK;
}

static koila_status open_sim(const prediction_input *x, const koila_plan *plan, koila__level level,
                             koila__sim *s)
{
    if (plan)
        return koila__sim_open_plan(s, plan, x->d, &x->o, level);
    KOILA_TRY(koila__sim_open(s, x->g, x->d, &x->o, level));
    return koila__sim_open_plain(s);
}

/* Tells s the targets: of the plan, or of the recorded step. */
static void set_targets(const prediction_input *x, const koila_plan *plan, koila__sim *s)
{
    if (!plan) {
        koila__sim_set_targets(s, x->targets.at, x->targets.n);
        return;
    }
    for (uint32_t i = 0; i < x->targets.n; i++) {
        const koila_value v = koila_plan_target(plan, i);
        koila__sim_set_targets(s, &v, 1);
    }
}

/* Runs the plan, or plain PyTorch when it is NULL, as training steps. On success *r is filled; not
 * fitting is no failure. */
static koila_status run_level(const prediction_input *x, const koila_plan *plan,
                              const run_options *how, run_result *r, koila_error *e)
{
    koila__sim s;
    *r = (run_result){ .peak_node = KOILA_NONE };
    koila_status status = open_sim(x, plan, how->level, &s);
    s.look = list_largest;
    s.look_user = how->out;
    s.look_at_bytes = how->look_at_bytes;
    s.ends_at_oom = how->limit != 0; /* then only fitting matters */
    if (!status)
        status = open_cache(x, how->limit, &s.c, e);
    if (!status) {
        set_targets(x, plan, &s);
        koila__sim_load_leaves(&s);
        if (!plan)
            koila__sim_sort_ends(&s);
        status = s.status ? s.status : run_steps(&s, r);
    }
    if (status == KOILA_OOM)
        status = KOILA_OK;
    if (!status) {
        r->oom = s.oom;
        r->n_retries = koila__cache_stats_ref(s.c)->num_alloc_retries;
        r->peak_node = s.peak_node;
        r->peak_bytes = s.peak_bytes;
    }
    koila_cache_free(s.c);
    koila__sim_close(&s);
    if (status == KOILA_NO_MEMORY)
        koila__fail(e, status, 0, "the host is out of memory");
    if (status == KOILA_UNSUPPORTED && e && !e->text[0])
        koila__fail(e, status, 0, "the plan keeps too many pieces to be simulated");
    return status;
}

/* ---- the plan to predict */

/* koila__fit_search.fits of a device that is not here: all levels must fit, for smaller requests
 * may leave larger holes. The high end first: it fails most often. */
static koila_status fits_from_start(void *user, const koila_plan *p, bool *yes)
{
    const prediction_input *x = user;
    *yes = true;
    for (int level = KOILA__HIGH; level >= KOILA__LOW && *yes; level--) {
        const run_options how = { .level = (koila__level)level, .limit = x->memory_bytes };
        run_result r;
        KOILA_TRY(run_level(x, p, &how, &r, NULL));
        *yes = !r.oom;
    }
    return KOILA_OK;
}

/* Sets *left to an upper bound of the bytes left for a step: the memory without context and leaves,
 * plus the bytes that the plan counts for dropout masks and square matrices beyond those on CUDA.
 */
static koila_status left_for_step(const prediction_input *x, uint64_t *left)
{
    koila__sim s;
    const uint64_t usable = x->memory_bytes - field(x, KOILA_DEVICE_CONTEXT_BYTES);
    uint64_t held = 0;
    uint64_t over = 0;
    const koila_status status = koila__sim_open(&s, x->g, x->d, &x->o, KOILA__HIGH);
    for (koila_value v = 0; v < s.n_values && !status; v++) {
        const uint64_t bytes = koila__whole_bytes(&s, v);
        if (koila_value_get(x->g, v).node != KOILA_NONE)
            over += bytes - koila__cuda_bytes(&s, v, bytes);
        else if (!koila__is_transposed_leaf(&s, v))
            held += bytes;
    }
    koila__sim_close(&s);
    *left = (usable > held ? usable - held : 1) + over;
    return status;
}

/* The plan with the most rows that fit; *plan stays NULL when none does. */
static koila_status plan_that_fits(prediction_input *x, koila_plan **plan, koila_error *e)
{
    koila__fit_search search = { .fits = fits_from_start, .user = x };
    koila_plan_options po = { .struct_size = sizeof po,
                              .axes = x->o.rows_only ? KOILA_AXES_ROWS : KOILA_AXES_ANY,
                              .recomputes = true,
                              .accepts = koila__fit_accepts,
                              .accepts_user = &search };
    koila_plan *found = NULL;
    koila_status status = left_for_step(x, &po.budget_bytes);
    if (status)
        return koila__fail(e, status, 0, "%s", koila_status_text(status));
    status = koila_plan_new(x->g, x->targets.at, x->targets.n, &po, NULL, &found, e);
    if (!status && !search.status && search.accepted) {
        *plan = found;
        return KOILA_OK;
    }
    if (!status)
        koila_plan_free(found);
    if (search.status)
        return koila__fail(e, search.status, 0, "%s", koila_status_text(search.status));
    if (status && status != KOILA_OOM)
        return status;
    if (e)
        *e = (koila_error){ .struct_size = e->struct_size };
    return KOILA_OK;
}

/* Forced rows, or the most rows that fit. *hopeless: none fit, and the plan only shows how much is
 * missing. */
static koila_status choose_plan(prediction_input *x, koila_plan **plan, bool *hopeless,
                                koila_error *e)
{
    const bool is_auto = x->o.rows == KOILA_ROWS_AUTO;
    *plan = NULL;
    if (is_auto)
        KOILA_TRY(plan_that_fits(x, plan, e));
    *hopeless = is_auto && !*plan;
    if (*plan)
        return KOILA_OK;
    koila_plan_options po = { .struct_size = sizeof po,
                              .budget_bytes = UINT64_MAX,
                              .rows = x->o.rows };
    if (is_auto)
        po.rows = koila__rows_of_slices(x->g, MANY_SLICES);
    else if (!x->o.rows)
        po.rows = koila__rows_of_slices(x->g, 1);
    return koila_plan_new(x->g, x->targets.at, x->targets.n, &po, NULL, plan, e);
}

/* ---- notes */

static void note(koila_prediction *p, const char *fmt, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
static void note(koila_prediction *p, const char *fmt, ...)
{
    if (p->n_notes == KOILA_PREDICT_NOTES)
        return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(p->notes[p->n_notes], sizeof p->notes[0], fmt, ap);
    va_end(ap);
    p->n_notes++;
}

/* seen[]: which kinds of operators the step has. */
static void note_device(koila_prediction *p, const prediction_input *x, const bool *seen)
{
    for (int i = 0; i < KOILA_N_DEVICE_FIELDS; i++) {
        const koila_device_field f = (koila_device_field)i;
        const koila_device_value v = koila_device_get(x->d, f);
        const bool matters = f != KOILA_DEVICE_CONV_BYTES || seen[KOILA__INSIDE_CONV];
        if (!strcmp(v.how, "estimated") && matters && f != KOILA_DEVICE_CUDNN)
            note(p, "%s is estimated: %llu +- %llu", koila_device_field_key(f),
                 (unsigned long long)v.value, (unsigned long long)v.spread);
    }
    note(p, "the allocator's rules of torch %u.%u are %s", x->conf.torch_version / 100,
         x->conf.torch_version % 100, koila_cache_verified_words(x->conf.verified));
}

static void note_operators(koila_prediction *p, const prediction_input *x, const bool *seen)
{
    const bool has_attention = seen[KOILA__INSIDE_SDPA] || seen[KOILA__INSIDE_SDPA_GRAD] ||
                               seen[KOILA__INSIDE_FLASH] || seen[KOILA__INSIDE_EFFICIENT] ||
                               seen[KOILA__INSIDE_CUDNN] || seen[KOILA__INSIDE_DRAWN];
    const bool knows_cudnn = field(x, KOILA_DEVICE_CUDNN) != 0;
    note(p, "recorded on a CPU: results are taken to have the same shapes and dtypes on CUDA");
    if (has_attention && x->o.sdpa)
        note(p, "attention's back end is as given");
    else if (has_attention)
        note(p, "attention's back end is chosen by dtype, head size and capability; "
                "--sdpa overrides");
    if (koila__has_safe_softmax(x->g))
        note(p, "attention with dropout: fused kernels make no square matrices; the high end "
                "keeps them, for the kernel is not known");
    if (seen[KOILA__INSIDE_CONV])
        note(p, "convolutions are taken to copy their operands for tensor cores (as on an H200), "
                "else to use the profile's convolution workspace");
    if (seen[KOILA__INSIDE_GEMM] &&
        (x->conf.torch_version < KOILA_PRODUCTS_GIVE_BACK || x->o.keeps_cublas))
        note(p, "cuBLAS keeps one workspace for forward and one for backward");
    else if (seen[KOILA__INSIDE_GEMM])
        note(p, "each product takes cuBLAS's workspace and gives it back");
    if (seen[KOILA__INSIDE_RNN])
        note(p,
             "a recurrent layer is taken to run in cuDNN; its reserve and workspace are estimated");
    if (seen[KOILA__INSIDE_SDPA] && !x->o.sdpa && koila__may_prefer_cudnn(x->d) && !knows_cudnn)
        note(p, "the profile names no cuDNN; with 9.15.1 or newer this device tries cuDNN's "
                "attention first: see --sdpa cudnn");
}

static void note_options(koila_prediction *p, const koila_predict_opts *o)
{
    uint64_t bytes = 0;
    if (o->cublas_workspace && koila_cublas_workspace(o->cublas_workspace, &bytes))
        note(p, "cuBLAS's workspace is %llu bytes, by CUBLAS_WORKSPACE_CONFIG",
             (unsigned long long)bytes);
    else if (o->cublas_workspace)
        note(p, "CUBLAS_WORKSPACE_CONFIG=%.40s says no ':KiB:count', so torch takes its default",
             o->cublas_workspace);
    if (o->autocast)
        note(p, "half-precision leaves are autocast's casts of float32 parameters: both are "
                "counted; gradients leave the step in float32");
    if (o->ddp)
        note(p, "DistributedDataParallel's buckets are counted, as large as all gradients; with "
                "gradient_as_bucket_view there would be none");
    if (o->optimizer == KOILA_OPTIMIZER_NONE)
        note(p, "no optimizer: its state and temporaries are not counted");
    note(p, "values nobody uses are the step's results; those of a parameter's shape are its "
            "gradient, dropped by zero_grad before the next step");
    note(p, "DataLoader copies, NCCL and other processes are not counted");
}

static void write_notes(koila_prediction *p, const prediction_input *x)
{
    const koila_table *t = koila_graph_table(x->g);
    bool seen[KOILA__N_INSIDE_KINDS] = { false };
    for (koila_node i = 0; i < koila_graph_n_nodes(x->g); i++)
        seen[koila__inside_of(t, koila_sig_get(t, koila_node_get(x->g, i).sig)->op)] = true;
    note_device(p, x, seen);
    note_operators(p, x, seen);
    note_options(p, &x->o);
}

/* Operators without a row in cuda_ops.def, in the order in which they are met. */
static void list_unknown(koila_prediction *p, const koila_graph *g)
{
    const koila_table *t = koila_graph_table(g);
    for (koila_node i = 0; i < koila_graph_n_nodes(g); i++) {
        const koila_op op = koila_sig_get(t, koila_node_get(g, i).sig)->op;
        const char *name = koila_op_name(t, op);
        uint32_t k = 0;
        if (koila__inside_of(t, op) != KOILA__INSIDE_UNKNOWN)
            continue;
        while (k < p->n_not_modelled && strcmp(p->not_modelled[k].op, name))
            k++;
        if (k == KOILA_PREDICT_NOT_MODELLED)
            continue;
        if (k == p->n_not_modelled) {
            snprintf(p->not_modelled[k].op, sizeof p->not_modelled[k].op, "%s", name);
            p->n_not_modelled++;
        }
        p->not_modelled[k].n_calls++;
    }
}

/* ---- the prediction */

/* Adds one run to the range *to. Larger requests do not always reserve more, so low and high are
 * the least and the most of the three runs. */
static void include(koila_range *to, koila__level level, uint64_t bytes)
{
    const bool is_first = level == KOILA__LOW;
    if (is_first || bytes < to->low)
        to->low = bytes;
    if (is_first || bytes > to->high)
        to->high = bytes;
    if (level == KOILA__EXPECTED)
        to->expected = bytes;
    koila_assert(to->low <= bytes && bytes <= to->high);
}

/* Adds the memory outside the cache; its range does not depend on the level of the run. */
static void add_context(koila_range *device, koila_device_value context)
{
    device->low += context.value - context.spread;
    device->expected += context.value;
    device->high += context.value + context.spread;
    koila_assert(device->low <= device->expected && device->expected <= device->high);
}

/* The ranges of first and steady step from three unlimited runs of the plan, or of plain PyTorch
 * when it is NULL; of[] has the results. */
static koila_status run_unlimited(const prediction_input *x, const koila_plan *plan,
                                  koila_peaks *const to[N_PHASES], run_result of[KOILA__N_LEVELS],
                                  koila_error *e)
{
    const koila_device_value context = koila_device_get(x->d, KOILA_DEVICE_CONTEXT_BYTES);
    for (int i = KOILA__LOW; i < KOILA__N_LEVELS; i++) {
        const koila__level level = (koila__level)i;
        const run_options how = { .level = level };
        KOILA_TRY(run_level(x, plan, &how, &of[level], e));
        for (int k = 0; k < N_PHASES; k++) {
            include(&to[k]->allocated, level, of[level].of[k].allocated);
            include(&to[k]->reserved, level, of[level].of[k].reserved);
            include(&to[k]->device, level, of[level].of[k].device);
        }
    }
    for (int k = 0; k < N_PHASES; k++)
        add_context(&to[k]->device, context);
    return KOILA_OK;
}

/* Runs under the limit, the high end first, until one does not fit. Retries are the high end's, or
 * those of the run that did not fit. */
static koila_status run_limited(const prediction_input *x, const koila_plan *plan,
                                koila_prediction *p, koila_error *e)
{
    p->fits = true;
    for (int level = KOILA__HIGH; level >= KOILA__LOW && p->fits; level--) {
        const run_options how = { .level = (koila__level)level, .limit = x->memory_bytes };
        run_result r;
        KOILA_TRY(run_level(x, plan, &how, &r, e));
        if (level == KOILA__HIGH || r.oom)
            p->n_retries = r.n_retries;
        p->fits = !r.oom;
    }
    return KOILA_OK;
}

/* Reports the operator at the peak of the expected run, and its source line. */
static void tell_peak(koila_prediction *p, const koila_graph *lowered, koila_node n)
{
    const koila_table *t = koila_graph_table(lowered);
    if (n == KOILA_NONE)
        return;
    const koila_op op = koila_sig_get(t, koila_node_get(lowered, n).sig)->op;
    snprintf(p->peak_op, sizeof p->peak_op, "%s", koila_op_name(t, op));
    line_text(lowered, n, p->peak_line, sizeof p->peak_line);
}

/* Predicts one plan; on success p is complete except for the notes. */
static koila_status predict_one(const prediction_input *x, const koila_plan *plan,
                                koila_prediction *p, koila_error *e)
{
    run_result of[KOILA__N_LEVELS];
    koila_peaks *const planned[] = { [FIRST] = &p->first, [STEADY] = &p->steady };
    koila_peaks *const plain[] = { [FIRST] = &p->plain_first, [STEADY] = &p->plain_steady };
    KOILA_TRY(run_unlimited(x, NULL, plain, of, e));
    KOILA_TRY(run_unlimited(x, plan, planned, of, e));
    KOILA_TRY(run_limited(x, plan, p, e));
    const run_result *expected = &of[KOILA__EXPECTED];
    if (expected->peak_bytes) {
        const run_options look = { .level = KOILA__EXPECTED,
                                   .look_at_bytes = expected->peak_bytes,
                                   .out = p };
        run_result same;
        KOILA_TRY(run_level(x, plan, &look, &same, e));
    }
    const koila_plan_info info = koila_plan_get(plan);
    const uint64_t first = p->first.device.high;
    const uint64_t steady = p->steady.device.high;
    const uint64_t device = first > steady ? first : steady;
    p->spare_bytes = p->fits && p->memory_bytes > device ? p->memory_bytes - device : 0;
    p->settled = of[KOILA__LOW].settled && expected->settled && of[KOILA__HIGH].settled;
    p->n_steps = expected->n_steps;
    p->batch = info.batch * info.unit;
    p->rows = info.rows * info.unit;
    p->n_slices = info.n_slices;
    p->dim = info.dim;
    tell_peak(p, koila_plan_graph(plan), expected->peak_node);
    return KOILA_OK;
}

/* Checks what the caller gave, and fills in defaults. On success x->targets is to be freed. */
static koila_status read_input(prediction_input *x, const koila_graph *g, const koila_device *d,
                               const koila_cache_config *c, const koila_predict_opts *o,
                               const koila_allocator *mem, koila_error *e)
{
    const koila_device_value total = koila_device_get(d, KOILA_DEVICE_TOTAL_BYTES);
    *x = (prediction_input){ .g = g, .d = d };
    if (o)
        x->o = *o;
    if (c)
        x->conf = *c;
    else
        koila_cache_config_init(&x->conf, NULL);
    x->memory_bytes = x->o.memory_bytes ? x->o.memory_bytes : total.value - total.spread;
    if (x->o.rows < KOILA_ROWS_AUTO)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "rows of a slice cannot be negative");
    const uint64_t context = field(x, KOILA_DEVICE_CONTEXT_BYTES);
    if (x->memory_bytes <= context)
        return koila__fail_short(
            e, context - x->memory_bytes,
            "does not fit: a CUDA context alone needs %llu bytes, %llu are given, %llu bytes short",
            (unsigned long long)context, (unsigned long long)x->memory_bytes,
            (unsigned long long)(context - x->memory_bytes));
    if (!koila_graph_n_nodes(g))
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "the step has no operators");
    const koila_status status = koila__find_targets(g, mem, &x->targets);
    return status ? koila__fail(e, status, 0, "the host is out of memory") : KOILA_OK;
}

koila_status koila_predict(const koila_graph *g, const koila_device *d, const koila_cache_config *c,
                           const koila_predict_opts *o, koila_prediction *out, koila_error *e)
{
    return koila_predict_plan(g, d, c, o, out, NULL, e);
}

koila_status koila_predict_plan(const koila_graph *g, const koila_device *d,
                                const koila_cache_config *c, const koila_predict_opts *o,
                                koila_prediction *out, koila_plan **plan_out, koila_error *e)
{
    const koila_allocator mem = koila__allocator(NULL);
    prediction_input x;
    koila_prediction p = { .struct_size = (uint32_t)sizeof p };
    koila_plan *plan = NULL;
    bool hopeless = false;
    KOILA_TRY(read_input(&x, g, d, c, o, &mem, e));
    p.memory_bytes = x.memory_bytes;
    koila_status status = choose_plan(&x, &plan, &hopeless, e);
    if (!status)
        status = predict_one(&x, plan, &p, e);
    if (!status) {
        list_unknown(&p, g);
        if (hopeless && !p.fits)
            note(&p, "no number of slices fits, down to one row each; shown in %u", p.n_slices);
        write_notes(&p, &x);
        *out = p;
        if (plan_out) {
            *plan_out = plan;
            plan = NULL;
        }
    }
    koila_plan_free(plan);
    koila__vec_free(&mem, &x.targets);
    return status;
}
