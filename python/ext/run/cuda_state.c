/* cuda_state.c — plans on a GPU: simulates torch's caching allocator from its present state, and
 * keeps margins for plans that ran out nevertheless.
 *
 *   look      bytes handed out, reserved, free on the device, and a number for the allocator's
 *             state (koila._cuda.now). Asking the driver takes long, so a step that needs little
 *             asks only for what is handed out, if the driver was asked a moment ago
 *   live      the simulated cache, made again from the segments of torch.cuda.memory_snapshot()
 *             when that number has changed; it may grow into the free memory up to the budget
 *   plan      koila_plan_live on it; later: does an earlier plan still fit?
 *   ran out   the smallest margin that would have refused the plan is kept for its graph, and is
 *             doubled if it was not enough; it ends when a step of the graph has learned more of
 *             what its operators use inside, since plans count with that
 *   inside    what cuDNN and its like ask for inside an operator, which no formula tells
 *
 * If anything here goes wrong (another allocator, an unknown snapshot), the plan uses the sum of
 * live bytes, as on a CPU; nothing is raised.
 */
#include "base/idset.h"
#include "run/run.h"

#include "ground/clock.h"

#define MIB ((uint64_t)1 << 20)

static struct {
    uint64_t state; /* of the allocator at the last look; 0: none yet */
    koila_cache *live;
    koila_device *device;
    uint64_t stream;
    char cublas[64];          /* CUBLAS_WORKSPACE_CONFIG, "" if not set */
    char cublaslt[24];        /* CUBLASLT_WORKSPACE_SIZE, "" for the default */
    uint64_t ran_products[4]; /* a bit for each GPU: a step has run a product there */
} gpu;

enum { N_MARGINS = 64 };
static struct margin {
    uint64_t key, bytes, used;
} margins[N_MARGINS];
static uint64_t n_used;

static PyObject *ask_of(const char *module, const char *what, int index)
{
    PyObject *mine = PyImport_ImportModule(module);
    PyObject *r = mine ? PyObject_CallMethod(mine, what, "i", index) : NULL;
    Py_XDECREF(mine);
    return r;
}

PyObject *koila__gpu_ask(const char *what, int index) { return ask_of("koila._cuda", what, index); }

/* The index that koila._cuda.index_of has for this device. Also for the CPU: a step there has a GPU
 * in test_cuda_planning.py. */
static int index_of(uint16_t code)
{
    static PyObject *module; /* looked up once: each step asks */
    if (!module)
        module = PyImport_ImportModule("koila._cuda");
    PyObject *function = module ? koila__attribute(module, "index_of") : NULL;
    PyObject *number = function ? PyLong_FromLong(code) : NULL;
    PyObject *r = number ? PyObject_CallOneArg(function, number) : NULL;
    const long index = r ? PyLong_AsLong(r) : -1;
    Py_XDECREF(r);
    Py_XDECREF(number);
    Py_XDECREF(function);
    PyErr_Clear();
    return index >= 0 && index < 255 ? (int)index : -1;
}

int koila__gpu_of(const koila_graph *g)
{
    uint16_t code = 0;
    for (koila_value v = 0; v < koila_graph_n_values(g); v++) {
        const koila_value_info x = koila_value_get(g, v);
        const uint16_t d = x.meta == KOILA_NONE ? 0 : koila_meta_get(koila__table, x.meta)->device;
        if (x.node == KOILA_NONE && d > code && d >> 8 == 1)
            code = d;
    }
    return index_of(code);
}

/* What a device and its allocator were like when the driver was asked last. */
enum { N_LOOKS = 64, LOOK_LASTS = 100 /* milliseconds, as ANSWER_LASTS in limits.c */ };
static struct look {
    bool is_there;
    int64_t at;     /* milliseconds */
    uint64_t room;  /* bytes that torch may come to: reserved and free ones */
    uint64_t state; /* of the allocator, as a hash */
} looks[N_LOOKS];

static bool parse_count(PyObject *from, koila__gpu_count *out)
{
    unsigned long long now, peak, freed;
    if (!PyArg_ParseTuple(from, "KKK", &now, &peak, &freed))
        return false;
    *out = (koila__gpu_count){ now, peak, freed };
    return true;
}

/* Asks the allocator, and the driver. false: that cannot be read, with an exception. */
static bool look_anew(int index, koila__gpu_count *count, struct look *out)
{
    PyObject *r = koila__gpu_ask("now", index);
    PyObject *of_all = NULL, *numbers = NULL;
    unsigned long long reserved = 0, free = 0;
    bool ok = r &&
              PyArg_ParseTuple(r, "O!KKO!", &PyTuple_Type, &of_all, &reserved, &free, &PyTuple_Type,
                               &numbers) &&
              parse_count(of_all, count);
    *out =
        (struct look){ .is_there = true, .at = koila__milliseconds_now(), .room = reserved + free };
    for (Py_ssize_t i = 0; ok && i < PyTuple_GET_SIZE(numbers); i++) {
        out->state =
            koila__mix(out->state, PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(numbers, i)));
        ok = !PyErr_Occurred();
    }
    Py_XDECREF(r);
    return ok;
}

/* The last look, if it was a moment ago; the count is that of now. */
static bool look_again(int index, koila__gpu_count *count, struct look *out)
{
    if (index >= N_LOOKS || !looks[index].is_there ||
        koila__milliseconds_now() - looks[index].at > LOOK_LASTS)
        return false;
    *out = looks[index];
    PyObject *r = koila__gpu_ask("held", index);
    const bool ok = r && parse_count(r, count);
    Py_XDECREF(r);
    return ok;
}

static void forget_looks(void) { memset(looks, 0, sizeof looks); }

int koila__gpu_look(int index, bool anew, koila__room *room)
{
    struct look seen;
    koila__gpu_count count;
    const bool is_recalled = !anew && look_again(index, &count, &seen);
    const bool ok = is_recalled || (!PyErr_Occurred() && look_anew(index, &count, &seen));
    if (koila__is_unsupported())
        return -1;
    PyErr_Clear();
    if (!ok)
        return 0;
    if (index < N_LOOKS)
        looks[index] = seen;
    room->gpu = index;
    room->is_recalled = is_recalled;
    room->count = count;
    room->held = count.now;
    room->limit = seen.room;
    const koila__settings set = koila__settings_now();
    room->is_budget = set.has_budget && set.budget < room->limit;
    if (room->is_budget)
        room->limit = set.budget;
    room->bytes = room->limit > room->held ? room->limit - room->held : 0;
    room->state = koila__mix(seen.state, room->limit) | 1;
    return 1;
}

/* ---- the snapshot's segments */

static bool number_at(PyObject *d, const char *key, uint64_t otherwise, uint64_t *out)
{
    PyObject *x = PyDict_GetItemString(d, key); /* borrowed */
    *out = otherwise;
    if (!x || x == Py_None)
        return true;
    *out = PyLong_AsUnsignedLongLongMask(x); /* addresses and streams are bit patterns */
    return !PyErr_Occurred();
}
static bool text_at(PyObject *d, const char *key, const char **out)
{
    PyObject *x = PyDict_GetItemString(d, key);
    *out = x ? PyUnicode_AsUTF8(x) : NULL;
    return *out != NULL;
}

static bool read_block(PyObject *d, uint64_t at, koila_block *out)
{
    const char *state;
    if (!PyDict_Check(d) || !number_at(d, "address", at, &out->addr) ||
        !number_at(d, "size", 0, &out->size) ||
        !number_at(d, "requested_size", 0, &out->requested) || !text_at(d, "state", &state))
        return false;
    if (strcmp(state, "inactive") == 0)
        out->state = KOILA_BLOCK_FREE;
    else if (strcmp(state, "active_allocated") == 0)
        out->state = KOILA_BLOCK_USED;
    else if (strncmp(state, "active_", 7) == 0)
        out->state = KOILA_BLOCK_PENDING;
    else
        return false;
    if (out->state == KOILA_BLOCK_FREE)
        out->requested = 0;
    return true;
}

static bool read_segment(PyObject *d, koila_segment *out, koila_block *blocks, Py_ssize_t room)
{
    const char *type;
    PyObject *list = PyDict_Check(d) ? PyDict_GetItemString(d, "blocks") : NULL;
    PyObject *pool = list ? PyDict_GetItemString(d, "segment_pool_id") : NULL;
    PyObject *grows = list ? PyDict_GetItemString(d, "is_expandable") : NULL;
    if (!list || !PyList_Check(list) || PyList_GET_SIZE(list) > room ||
        !number_at(d, "address", 0, &out->addr) || !number_at(d, "total_size", 0, &out->size) ||
        !number_at(d, "stream", 0, &out->stream) || !text_at(d, "segment_type", &type))
        return false;
    out->is_small = strcmp(type, "small") == 0;
    out->is_expandable = grows && PyObject_IsTrue(grows) == 1;
    if (pool && PyTuple_Check(pool) && PyTuple_GET_SIZE(pool) == 2) {
        out->pool.owner = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(pool, 0));
        out->pool.id = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(pool, 1));
    }
    out->struct_size = sizeof *out;
    out->block_size = sizeof *blocks;
    out->blocks = blocks;
    out->n_blocks = (size_t)PyList_GET_SIZE(list);
    uint64_t at = out->addr;
    for (size_t i = 0; i < out->n_blocks; i++) {
        blocks[i] = (koila_block){ 0 };
        if (!read_block(PyList_GET_ITEM(list, (Py_ssize_t)i), at, &blocks[i]))
            return false;
        at = blocks[i].addr + blocks[i].size;
    }
    return !PyErr_Occurred();
}

/* The simulated cache of a list of segments; NULL if a segment is not as expected. */
static koila_cache *cache_of(PyObject *list, koila_cache_config *conf)
{
    const Py_ssize_t n = list && PyList_Check(list) ? PyList_GET_SIZE(list) : -1;
    Py_ssize_t n_blocks = 0, used = 0;
    koila_cache *live = NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *d = PyList_GET_ITEM(list, i);
        PyObject *blocks = PyDict_Check(d) ? PyDict_GetItemString(d, "blocks") : NULL;
        if (!blocks || !PyList_Check(blocks))
            return NULL;
        n_blocks += PyList_GET_SIZE(blocks);
    }
    if (n < 0)
        return NULL;
    koila_segment *s = PyMem_Calloc((size_t)n + 1, sizeof *s);
    koila_block *b = PyMem_Calloc((size_t)n_blocks + 1, sizeof *b);
    bool ok = s && b;
    for (Py_ssize_t i = 0; i < n && ok; i++) {
        ok = read_segment(PyList_GET_ITEM(list, i), &s[i], b + used, n_blocks - used);
        used += ok ? (Py_ssize_t)s[i].n_blocks : 0;
        conf->expandable |= s[i].is_expandable;
    }
    if (ok && koila_cache_from_segments(conf, NULL, s, (size_t)n, &live, NULL) != KOILA_OK)
        live = NULL;
    PyMem_Free(s);
    PyMem_Free(b);
    return live;
}

static void forget_live(void)
{
    koila_cache_free(gpu.live);
    koila_device_free(gpu.device);
    gpu.live = NULL;
    gpu.device = NULL;
    gpu.state = 0;
}

/* Brings the live cache to the allocator's state in `room`. False: there is none. */
static bool bring_live(const koila__room *room)
{
    if (gpu.state == room->state)
        return gpu.live != NULL;
    forget_live();
    PyObject *with = koila__gpu_ask("settings", room->gpu);
    PyObject *list = with ? koila__gpu_ask("segments", room->gpu) : NULL;
    const char *profile, *version, *text, *cublas, *cublaslt;
    double fraction;
    unsigned long long total, stream;
    koila_cache_config conf;
    if (list &&
        PyArg_ParseTuple(with, "sssdKKss", &profile, &version, &text, &fraction, &total, &stream,
                         &cublas, &cublaslt) &&
        koila_cache_config_init(&conf, version) == KOILA_OK &&
        koila_cache_config_parse(&conf, text, 0, NULL) == KOILA_OK &&
        koila_device_open(profile, strlen(profile), NULL, &gpu.device, NULL) == KOILA_OK) {
        conf.total_bytes = room->limit;
        conf.device_bytes = total;
        if (fraction > 0 && fraction < 1)
            koila_cache_config_fraction(&conf, fraction, total, total);
        gpu.live = cache_of(list, &conf);
        gpu.stream = stream;
        snprintf(gpu.cublas, sizeof gpu.cublas, "%s", cublas);
        snprintf(gpu.cublaslt, sizeof gpu.cublaslt, "%s", cublaslt);
    }
    PyErr_Clear();
    Py_XDECREF(with);
    Py_XDECREF(list);
    gpu.state = room->is_recalled ? 0 : room->state; /* the segments are those of now */
    return gpu.live != NULL;
}

/* ---- margins */

static struct margin *margin_of(uint64_t key, bool make)
{
    struct margin *oldest = &margins[0];
    for (uint32_t i = 0; i < N_MARGINS; i++) {
        if (margins[i].bytes && margins[i].key == key) {
            margins[i].used = ++n_used;
            return &margins[i];
        }
        if (margins[i].used < oldest->used)
            oldest = &margins[i];
    }
    if (make)
        *oldest = (struct margin){ .key = key, .used = ++n_used };
    return make ? oldest : NULL;
}

static uint64_t *bit_of(int index, uint64_t *bit)
{
    koila_assert(index >= 0 && index < 256);
    *bit = (uint64_t)1 << (index % 64);
    return &gpu.ran_products[index / 64];
}

/* Does cuBLAS keep its workspace from the first product on? See koila__gpu_ran_product(). */
static bool keeps_cublas(void)
{
    static int keeps = -1; /* not known yet */
    long major = 0, minor = 0;
    if (keeps >= 0)
        return keeps;
    if (!PyArg_ParseTuple(koila__torch.version, "ll", &major, &minor))
        PyErr_Clear();
    const char *cache = getenv("TORCH_CUBLAS_WORKSPACE_CACHE");
    keeps = 100 * major + minor < KOILA_PRODUCTS_GIVE_BACK || (cache && strcmp(cache, "1") == 0);
    return keeps;
}

uint64_t koila__gpu_workspace_of(void *ignored, koila_sig sig, int64_t rows, int64_t batch)
{
    const uint64_t learned = koila__workspace_of(ignored, sig, rows, batch);
    uint64_t cublas = 0;
    if (keeps_cublas() || !koila_cublas_workspace(gpu.cublas, &cublas))
        return learned;
    return learned + koila_product_workspace(koila__table, sig, cublas,
                                             koila_cublaslt_workspace(gpu.cublaslt));
}

void koila__gpu_ran_product(int index)
{
    uint64_t bit;
    if (keeps_cublas())
        *bit_of(index, &bit) |= bit;
}

static bool has_run_product(int index)
{
    uint64_t bit;
    return *bit_of(index, &bit) & bit;
}

static koila_fit_opts options_for(int index, uint64_t key)
{
    const struct margin *m = margin_of(key, false);
    return (koila_fit_opts){ .struct_size = sizeof(koila_fit_opts),
                             .stream = gpu.stream,
                             .cublas_workspace = gpu.cublas[0] ? gpu.cublas : NULL,
                             .cublaslt_workspace = gpu.cublaslt,
                             .keeps_cublas = keeps_cublas(),
                             .margin_bytes = m ? m->bytes : 0,
                             .has_cublas_workspace = has_run_product(index),
                             .measured = koila__workspace_known };
}

koila_status koila__gpu_plan(const koila__room *room, const koila_graph *part,
                             const koila_value *targets, uint32_t n_targets,
                             const koila_plan_options *o, koila_plan **out, koila_fit *fit,
                             koila_error *err)
{
    if (room->gpu < 0 || !bring_live(room))
        return koila_plan_new(part, targets, n_targets, o, NULL, out, err);
    const koila_fit_opts with = options_for(room->gpu, koila_graph_hash(part));
    koila_status status = koila_plan_live(part, targets, n_targets, o, gpu.device, gpu.live, &with,
                                          NULL, out, fit, err);
    if (status == KOILA_OK && !fit->struct_size)
        fit->struct_size = sizeof *fit;
    if (status != KOILA_OOM || o->rows > 0)
        return status;
    /* a step that only its margin forbids is tried all the same, planned by the sum of live
     * bytes */
    koila_error ignored = KOILA_ERROR_INIT;
    return with.margin_bytes ? koila_plan_new(part, targets, n_targets, o, NULL, out, &ignored)
                             : status;
}

bool koila__gpu_still_fits(const koila__room *room, cached *c)
{
    if (room->gpu < 0 || c->state == room->state || !c->fit.struct_size)
        return true;
    if (!bring_live(room))
        return true;
    const koila_fit_opts with = options_for(room->gpu, koila_graph_hash(c->part));
    koila_fit fit;
    if (koila_fits_plan(c->plan, gpu.device, gpu.live, &with, &fit, NULL) != KOILA_OK)
        return true;
    if (!fit.fits && c->fit.fits)
        return false;
    c->fit = fit;
    c->state = room->state;
    return true;
}

void koila__gpu_ran_out(cached *c)
{
    koila__room room = { .gpu = c->gpu };
    uint64_t bytes = 0;
    forget_looks();
    if (c->gpu < 0 || !c->fit.fits)
        return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const uint64_t key = koila_graph_hash(c->part);
    if (koila__gpu_look(c->gpu, true, &room) > 0 && bring_live(&room)) {
        const koila_fit_opts with = options_for(c->gpu, key);
        if (koila_fit_margin(c->plan, gpu.device, gpu.live, &with, &bytes, NULL) == KOILA_OK) {
            struct margin *m = margin_of(key, true);
            /* doubled at least, because every out-of-memory costs the user time */
            m->bytes = bytes > 2 * m->bytes ? bytes : 2 * m->bytes;
            if (!m->bytes)
                m->bytes = 2 * MIB;
        }
    }
    PyErr_Clear();
    c->state = 0; /* to be checked again, with the margin */
    PyErr_Restore(type, value, trace);
}

void koila__gpu_has_learned(const cached *c)
{
    struct margin *m = c->gpu < 0 ? NULL : margin_of(koila_graph_hash(c->part), false);
    if (m)
        m->bytes = 0;
}

/* ---- what operators use inside */

bool koila__gpu_bytes(int index, koila__gpu_count *out)
{
    PyObject *r = koila__gpu_ask("allocated", index);
    *out = (koila__gpu_count){ 0 };
    const bool ok = r && parse_count(r, out);
    Py_XDECREF(r);
    PyErr_Clear();
    return ok;
}

uint64_t koila__gpu_inside(const koila__gpu_count *before, const koila__gpu_count *after,
                           koila__measured *how)
{
    const uint64_t at_peak = after->peak > after->now ? after->peak - after->now : 0;
    const uint64_t freed = after->freed - before->freed;
    const bool is_exact = after->peak > before->peak;
    *how = is_exact || !freed ? KOILA__MEASURED_HERE : KOILA__MEASURED_BOUND;
    return is_exact || at_peak < freed ? at_peak : freed;
}

/* ---- host memory */

bool koila__may_offload(int index)
{
    const koila__settings set = koila__settings_now();
    if (index < 0 || set.no_host || set.dry)
        return false;
    PyObject *r = ask_of("koila._host_memory", "is_refused", index);
    const bool may = r == Py_False;
    Py_XDECREF(r);
    PyErr_Clear();
    return may;
}

double koila__host_price(int index)
{
    PyObject *r = koila__may_offload(index) ? ask_of("koila._host_memory", "price", index) : NULL;
    const double price = r ? PyFloat_AsDouble(r) : 0;
    Py_XDECREF(r);
    PyErr_Clear();
    return price > 0 ? price : 0;
}

PyObject *koila__fit_dict(const cached *c)
{
    if (!c->fit.struct_size)
        Py_RETURN_NONE;
    const struct margin *m = margin_of(koila_graph_hash(c->part), false);
    return Py_BuildValue("{s:O,s:K,s:K,s:K,s:I,s:K}", "fits", c->fit.fits ? Py_True : Py_False,
                         "peak_allocated", (unsigned long long)c->fit.peak_allocated,
                         "peak_reserved", (unsigned long long)c->fit.peak_reserved, "n_retries",
                         (unsigned long long)c->fit.n_retries, "n_simulations",
                         (unsigned)c->fit.n_simulations, "margin_bytes",
                         (unsigned long long)(m ? m->bytes : 0));
}

void koila__gpu_forget(void)
{
    forget_live();
    forget_looks();
    memset(margins, 0, sizeof margins);
    memset(gpu.ran_products, 0, sizeof gpu.ran_products);
}
