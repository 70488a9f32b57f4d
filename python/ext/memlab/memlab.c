/* memlab.c — who tells the meter: the allocators' events, threads and forks; and
 * koila.memlab.measure().
 *
 *   CPU           cpu_bytes.c counts every block and calls us after each event.
 *   accelerators  their caching allocators call c10::reportMemoryUsageToProfiler(ptr, +-bytes,
 *                 allocated, reserved, device) for every block handed out or taken back, through
 *                 one slot of libc10_cuda.so (libc10_hip.so, libc10_xpu.so). We put ourselves there
 *                 and call the original afterwards. Nothing of the user's statistics is read or
 *                 reset. It runs under the allocator's lock, on any thread, without the GIL:
 *                 atomics only. What it does not tell (an emptied cache, blocks that wait for
 *                 another stream) is read from the statistics once a call, and at every line while
 *                 something waits. Other allocators (cudaMallocAsync, pluggable ones) never call
 *                 it; then the device is read through its statistics at the ends of lines
 *                 ("stats"), and what happened inside a line is not known.
 * Thread states and spans may still be looked at by an event in flight when they are given up, so
 * their memory is kept and used again.
 *
 * Measure is equivalent to:
 *     class Measure:
 *           # a context manager; device: 0 the CPU, 1 + i accelerator i start, end, peak, rise,
 *           alloc, freed, allocs, frees: int     # live inside the block, final after it
 */
#include "memlab/memlab.h"

#include <frameobject.h>
#include <pthread.h>
#include <stdlib.h>

#include "ground/got.h"
#include "memory/ptrtab.h"
#include "base/text.h"
#include "ground/cpu_bytes.h"

koila__meter koila__memlab_meter;
koila__lines koila__memlab_lines;
__thread koila__stack *koila__memlab_stack;
__thread struct koila__work koila__memlab_work;
static __thread koila__flow *my_flow; /* NULL: not yet, or there are too many */

#define METER (&koila__memlab_meter)

static bool listening, pretend; /* pretend: tests feed the CPU's events themselves */
static uint64_t generation_seen;

static koila__flow *take_flow(void);

/* An event of device 0 (the CPU) or 1 + i, told by its allocator. Then what is done for other lines
 * than the one that runs. */
KOILA__HOT static void tell(int device, const void *p, int64_t delta, uint64_t now,
                            uint64_t reserved)
{
    koila__stack *s = koila__memlab_stack;
    koila__meter_event(METER, my_flow ? my_flow : take_flow(), s ? &s->thread : NULL, device, delta,
                       now, reserved);
    if (koila__lines_enabled) {
        koila__nodes_credit(device, delta);
        const struct koila__work *work = &koila__memlab_work;
        if (work->key)
            koila__lines_credit_line(&koila__memlab_lines, work->key, work->line, device, delta,
                                     now);
        if (work->path.path && delta > 0)
            koila__lines_credit_path(&koila__memlab_lines, work->path, device, (uint64_t)delta);
    }
    if (atomic_load_explicit(&koila__timeline_device, memory_order_relaxed) == device)
        koila__timeline_event(device, p, delta);
}

/* ---- the CPU */

KOILA__HOT static void on_cpu_event(const void *p, int64_t delta, uint64_t now)
{
    tell(0, p, delta, now, UINT64_MAX);
}

static bool add_block(void *user, const void *p, uint64_t n, uint32_t tag)
{
    uint64_t *now = user;
    int large = n > KOILA__SMALL_BYTES;
    now[KOILA__Q_BYTES_ALL] += n;
    now[KOILA__Q_BYTES_SMALL + large] += n;
    now[KOILA__Q_N_ALL]++;
    now[KOILA__Q_N_SMALL + large]++;
    return true;
}

static void listen_to_cpu(void)
{
    if (koila__cpu_bytes_listen() != 0) {
        koila__cpu_bytes_del_event(on_cpu_event);
        return;
    }
    if (METER->device[0].bytes && generation_seen == koila__cpu_bytes_generation() &&
        koila__cpu_bytes_add_event(on_cpu_event) == 0)
        return;
    uint64_t now[KOILA__Q_COUNT] = { 0 };
    koila__cpu_bytes_each(add_block, now);
    now[KOILA__Q_RESERVED] = now[KOILA__Q_BYTES_ALL];
    METER->device[0].bytes = koila__cpu_bytes_current_slot();
    koila__meter_set(METER, 0, now);
    koila__cpu_bytes_add_event(on_cpu_event);
    generation_seen = koila__cpu_bytes_generation();
}

/* ---- accelerators */

#define REPORT_USAGE "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
static void (*real_report)(void *p, int64_t delta, size_t allocated, size_t reserved,
                           uint16_t device);
static koila__got_set report_slots;
static const char *accelerator; /* "cuda", "xpu": what torch calls the devices 1.. ; NULL: none */

static void hook_report(void *p, int64_t delta, size_t allocated, size_t reserved, uint16_t device)
{
    int type = device & 0xFF;
    int index = (int8_t)(device >> 8);                /* c10::Device: type, then index */
    bool ours = type == 1 || type == 6 || type == 12; /* CUDA, HIP, XPU */
    if (ours && delta && index >= 0 && index + 1 < METER->n_devices)
        tell(1 + index, p, delta, allocated, reserved);
    if (real_report)
        real_report(p, delta, allocated, reserved, device);
}

/* How many accelerators torch sees, without starting any. */
static int count_devices(PyObject *torch)
{
    int n = 0;
    for (int i = 0; n == 0 && i < 2; i++) {
        const char *name = i ? "xpu" : "cuda";
        PyObject *module = PyObject_GetAttrString(torch, name);
        PyObject *count = module ? PyObject_CallMethod(module, "device_count", NULL) : NULL;
        if (count)
            n = (int)PyLong_AsLong(count);
        if (n > 0)
            accelerator = name;
        Py_XDECREF(count);
        Py_XDECREF(module);
        PyErr_Clear();
    }
    return n < 0 ? 0 : n < KOILA__DEVICES_MAX - 1 ? n : KOILA__DEVICES_MAX - 1;
}

/* ---- what accelerators change without an event, and all that one without events does: read from
 * the allocator's own statistics */

enum {
    /* metrics; the others in the order of koila__stats */
    S_ALLOCATED_BYTES,
    S_ALLOCATION,
    S_ACTIVE_BYTES,
    S_ACTIVE,
    S_REQUESTED_BYTES,
    S_INACTIVE_SPLIT,
    S_INACTIVE_SPLIT_BYTES,
    S_SEGMENT,
    S_RESERVED_BYTES,
    S_ALL,
    S_LARGE_POOL,
    S_SMALL_POOL,
    S_CURRENT,
    S_ALLOCATED,
    S_FREED,
    N_KEYS /* pools, stats */
};
/* interned; torch._C._cuda_memoryStats. Kept for good. */
static PyObject *stat_keys[N_KEYS], *memory_stats;

static bool find_memory_stats(void)
{
    static const char *const names[N_KEYS] = { "allocated_bytes",
                                               "allocation",
                                               "active_bytes",
                                               "active",
                                               "requested_bytes",
                                               "inactive_split",
                                               "inactive_split_bytes",
                                               "segment",
                                               "reserved_bytes",
                                               "all",
                                               "large_pool",
                                               "small_pool",
                                               "current",
                                               "allocated",
                                               "freed" };
    for (int i = 0; i < N_KEYS; i++)
        if (!stat_keys[i] && !(stat_keys[i] = PyUnicode_InternFromString(names[i])))
            return false;
    PyObject *name = PyUnicode_FromString("torch");
    PyObject *torch = name ? PyImport_GetModule(name) : NULL;
    PyObject *c = torch ? PyObject_GetAttrString(torch, "_C") : NULL;
    char method[32];
    snprintf(method, sizeof method, "_%s_memoryStats", accelerator);
    memory_stats = c ? PyObject_GetAttrString(c, method) : NULL;
    Py_XDECREF(c);
    Py_XDECREF(torch);
    Py_XDECREF(name);
    return memory_stats != NULL;
}

/* {metric: {pool: {stat: int}}} of an accelerator; a new reference, or NULL without an exception.
 * torch's public wrapper flattens it first: 33 us. */
static PyObject *raw_stats(int device)
{
    if (!accelerator || !PyGILState_Check())
        return NULL;
    PyObject *error_type, *value, *where;
    PyErr_Fetch(&error_type, &value, &where);
    PyObject *index = memory_stats || find_memory_stats() ? PyLong_FromLong(device - 1) : NULL;
    PyObject *stats = index ? PyObject_CallOneArg(memory_stats, index) : NULL;
    Py_XDECREF(index);
    PyErr_Clear();
    PyErr_Restore(error_type, value, where);
    return stats;
}
/* 0: there is no such statistic. Keys of more parts (private pools of CUDA graphs) are never asked
 * for. */
static uint64_t stat_of(PyObject *stats, int metric, int pool, int stat)
{
    const int path[] = { metric, pool, stat };
    PyObject *at = stats; // borrowed
    for (int i = 0; i < 3 && at; i++)
        at = PyDict_Check(at) ? PyDict_GetItemWithError(at, stat_keys[path[i]]) : NULL;
    uint64_t v = at && PyLong_Check(at) ? PyLong_AsUnsignedLongLong(at) : 0;
    if (!PyErr_Occurred())
        return v;
    PyErr_Clear();
    return 0;
}

static const int pool_of[] = { S_ALL, S_SMALL_POOL, S_LARGE_POOL }; /* as in koila__q */

/* `stats` were just read, reserved was `reserved_before` before. */
static void note_silent(int device, PyObject *stats, uint64_t reserved_before)
{
    uint64_t waiting[KOILA__WAITS];
    for (int i = 0; i < KOILA__WAITS; i++) {
        bool bytes = i < KOILA__Q_N_ALL;
        uint64_t active =
            stat_of(stats, bytes ? S_ACTIVE_BYTES : S_ACTIVE, pool_of[i % 3], S_CURRENT);
        uint64_t held =
            stat_of(stats, bytes ? S_ALLOCATED_BYTES : S_ALLOCATION, pool_of[i % 3], S_CURRENT);
        waiting[i] = active > held ? active - held : 0;
    }
    koila__meter_set_silent(METER, device, reserved_before,
                            stat_of(stats, S_RESERVED_BYTES, S_ALL, S_CURRENT), waiting);
}

static uint64_t reserved_now(int device)
{
    return atomic_load_explicit(&METER->device[device].reserved, memory_order_relaxed);
}

static bool read_stats(int device, koila__stats *out)
{
    uint64_t reserved = reserved_now(device);
    PyObject *stats = raw_stats(device);
    if (!stats)
        return false;
    for (int i = 0; i < KOILA__STATS; i++) {
        int metric = S_REQUESTED_BYTES + i / 3;
        int pool = S_ALL + i % 3;
        out->current[i] = stat_of(stats, metric, pool, S_CURRENT);
        out->allocated[i] = stat_of(stats, metric, pool, S_ALLOCATED);
        out->freed[i] = stat_of(stats, metric, pool, S_FREED);
    }
    note_silent(device, stats, reserved);
    Py_DECREF(stats);
    return true;
}

/* Let the meter know. whole: also what a hook would have told. */
static void read_device(int device, bool whole)
{
    uint64_t now[KOILA__Q_ACTIVE], reserved = reserved_now(device);
    bool changed = false;
    PyObject *stats = raw_stats(device);
    if (!stats)
        return;
    note_silent(device, stats, reserved);
    for (int q = 0; whole && q < KOILA__Q_RESERVED; q++) {
        now[q] = stat_of(stats, q < KOILA__Q_N_ALL ? S_ALLOCATED_BYTES : S_ALLOCATION,
                         pool_of[q % 3], S_CURRENT);
        changed |= now[q] != koila__meter_now(METER, device, (koila__q)q);
    }
    now[KOILA__Q_RESERVED] = reserved_now(device);
    Py_DECREF(stats);
    if (changed)
        koila__meter_set(METER, device, now);
}

/* The cache is emptied by cudaFree, which tells us so: a line is then known to the byte. Where that
 * is not seen (segments that expand are unmapped), what is reserved is read once a call. */
static koila__got_set free_slots;
static int (*real_free)(void *p);
static _Atomic uint64_t n_released;
static uint64_t released_seen;

static int hook_free(void *p)
{
    int status = real_free(p);
    atomic_fetch_add_explicit(&n_released, 1, memory_order_relaxed);
    return status;
}

static void poll_devices(bool thorough)
{
    uint64_t released = atomic_load_explicit(&n_released, memory_order_relaxed);
    bool hooked = koila__memlab_is_hooked(1);
    thorough |= released != released_seen;
    released_seen = released;
    for (int d = 1; d < METER->n_devices; d++)
        /* without a cache there is nothing to lose */
        if (!hooked || koila__meter_waits(METER, d) || (thorough && reserved_now(d)))
            read_device(d, !hooked);
}

static const struct {
    const char *library, *device, *release;
} libraries[] = { { "libc10_cuda.so", "cuda", "cudaFree" },
                  { "libc10_hip.so", "cuda", "hipFree" },
                  { "libc10_xpu.so", "xpu", NULL } };

static void listen_to_accelerators(void)
{
    if (METER->n_devices == 1)
        return;
    char path[4096];
    if (!real_report && koila__got_path("libc10.so", path, sizeof path)) {
        void *slot = koila__got_symbol(path, REPORT_USAGE);
        memcpy(&real_report, &slot, sizeof slot);
    }
    if (!koila__got_holds(&report_slots, NULL)) {
        for (size_t i = 0; i < KOILA_COUNT(libraries); i++) {
            koila__got_patch(&report_slots, libraries[i].library, REPORT_USAGE,
                             (void *)hook_report);
            /* its own: several runtimes may be loaded */
            if (!libraries[i].release || !koila__got_path(libraries[i].library, path, sizeof path))
                continue;
            void *slot = koila__got_symbol(path, libraries[i].release);
            memcpy(&real_free, &slot, sizeof slot);
            if (real_free)
                koila__got_patch(&free_slots, libraries[i].library, libraries[i].release,
                                 (void *)hook_free);
        }
        for (int d = 1; d < METER->n_devices; d++)
            read_device(d, true);
    }
    koila__memlab_lines.read_stats = read_stats;
    koila__memlab_lines.poll = poll_devices;
}

/* cudaMallocAsync, pluggable allocators and one whose caching is off do not go through the hook. */
static bool uses_native_allocator(void)
{
    if (getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") || getenv("PYTORCH_NO_HIP_MEMORY_CACHING"))
        return false;
    PyObject *name = PyUnicode_FromString("torch");
    PyObject *torch = name ? PyImport_GetModule(name) : NULL;
    PyObject *module = torch ? PyObject_GetAttrString(torch, accelerator) : NULL;
    PyObject *memory = module ? PyObject_GetAttrString(module, "memory") : NULL;
    PyObject *backend = memory ? PyObject_CallMethod(memory, "get_allocator_backend", NULL) : NULL;
    bool native = !backend || !PyUnicode_Check(backend) ||
                  PyUnicode_CompareWithASCIIString(backend, "native") == 0;
    Py_XDECREF(backend);
    Py_XDECREF(memory);
    Py_XDECREF(module);
    Py_XDECREF(torch);
    Py_XDECREF(name);
    PyErr_Clear();
    return native;
}
static bool native_allocator = true;

bool koila__memlab_is_hooked(int device)
{
    if (device == 0)
        return pretend || koila__cpu_bytes_ok();
    return device < METER->n_devices && native_allocator && koila__got_holds(&report_slots, NULL);
}

void koila__memlab_listen(void)
{
    if (!listening) {
        PyObject *name = PyUnicode_FromString("torch");
        PyObject *torch = name ? PyImport_GetModule(name) : NULL;
        if (torch) {
            METER->n_devices = 1 + count_devices(torch);
            if (accelerator)
                native_allocator = uses_native_allocator();
            listening = true;
        }
        Py_XDECREF(torch);
        Py_XDECREF(name);
        PyErr_Clear();
    }
    listen_to_cpu();
    listen_to_accelerators();
}

/* ---- threads and forks */

static pthread_key_t thread_ends;
static pthread_mutex_t spare_lock = PTHREAD_MUTEX_INITIALIZER,
                       site_lock = PTHREAD_MUTEX_INITIALIZER;
static koila__stack *spare_stacks[KOILA__THREADS_MAX]; /* of threads that ended */
static int n_spare_stacks;

/* Once a thread, inside an allocator. */
static __attribute__((noinline, cold)) koila__flow *take_flow(void)
{
    my_flow = koila__meter_take_flow(METER);
    if (my_flow && pthread_setspecific(thread_ends, METER) != 0) {
        koila__flow_give_back(my_flow);
        my_flow = NULL;
    }
    return my_flow;
}

static void end_thread(void *unused)
{
    koila__stack *s = koila__memlab_stack;
    koila__memlab_stack = NULL;
    if (my_flow)
        koila__flow_give_back(my_flow);
    my_flow = NULL;
    if (!s)
        return;
    atomic_store(&s->thread.n_open, 0);
    s->thread.flow = NULL;
    s->n = s->n_lost = 0;
    pthread_mutex_lock(&spare_lock);
    if (n_spare_stacks < KOILA__THREADS_MAX)
        spare_stacks[n_spare_stacks++] = s;
    else
        koila__meter_del_thread(METER, &s->thread);
    pthread_mutex_unlock(&spare_lock);
}

koila__stack *koila__memlab_my_stack(void)
{
    if (koila__memlab_stack)
        return koila__memlab_stack;
    pthread_mutex_lock(&spare_lock);
    koila__stack *s = n_spare_stacks ? spare_stacks[--n_spare_stacks] : NULL;
    pthread_mutex_unlock(&spare_lock);
    if (!s)
        s = koila__stack_new(&koila__memlab_lines);
    if (s && pthread_setspecific(thread_ends, METER) == 0) {
        s->thread.flow = my_flow ? my_flow : take_flow();
        koila__memlab_stack = s;
    }
    return koila__memlab_stack;
}

static void after_fork_child(void)
{
    koila__stack *s = koila__memlab_stack;
    n_spare_stacks = 0;
    atomic_flag_clear(&koila__memlab_lines.credit_busy);
    pthread_mutex_init(&spare_lock, NULL);
    pthread_mutex_init(&site_lock, NULL);
    koila__meter_fork_child(METER, my_flow, s ? &s->thread : NULL);
    for (size_t i = 0; s && i < s->n; i++) {
        memset(s->activations[i]->w.saved, 0, sizeof s->activations[i]->w.saved);
        memset(s->activations[i]->w.start_bytes, 0, sizeof s->activations[i]->w.start_bytes);
    }
}

/* ---- Measure */

static koila__span *spare_spans[KOILA__SPANS_MAX];
static int n_spare_spans;

typedef struct measure {
    PyObject_HEAD
    int device;
    koila__span *span;   /* NULL until entered */
    uint64_t generation; /* of the CPU's count, at the beginning */
} measure;

static PyObject *measure_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int device;
    if (!PyArg_ParseTuple(args, "i:Measure", &device))
        return NULL;
    koila__memlab_listen();
    if (device < 0 || device >= METER->n_devices)
        return PyErr_Format(PyExc_ValueError, "measure: device %d: there are %d", device,
                            METER->n_devices);
    measure *m = (measure *)type->tp_alloc(type, 0);
    if (m)
        m->device = device;
    return (PyObject *)m;
}
static void measure_dealloc(measure *m)
{
    PyTypeObject *type = Py_TYPE(m);
    if (m->span) {
        koila__span_close(METER, m->span);
        if (n_spare_spans < KOILA__SPANS_MAX)
            spare_spans[n_spare_spans++] = m->span;
    }
    type->tp_free(m);
    Py_DECREF(type);
}
static PyObject *measure_enter(measure *m, PyObject *none)
{
    if (!m->span)
        m->span = n_spare_spans ? spare_spans[--n_spare_spans] : calloc(1, sizeof *m->span);
    if (!m->span)
        return PyErr_NoMemory();
    if (m->span->open)
        return PyErr_Format(PyExc_RuntimeError,
                            "measure: this one is already open; nest another measure()");
    if (!koila__span_open(METER, m->span, m->device))
        return PyErr_Format(PyExc_RuntimeError, "measure: more than %d are open", KOILA__SPANS_MAX);
    m->generation = koila__cpu_bytes_generation();
    return Py_NewRef(m);
}
static PyObject *measure_exit(measure *m, PyObject *args)
{
    if (m->span)
        koila__span_close(METER, m->span);
    bool lost = m->device == 0 && !pretend &&
                (!koila__cpu_bytes_ok() || koila__cpu_bytes_generation() != m->generation);
    if (lost && PyErr_WarnEx(PyExc_UserWarning,
                             "koila.memlab.measure: another tool overwrote the CPU allocator hook "
                             "inside; the numbers are void",
                             1) < 0)
        return NULL;
    Py_RETURN_FALSE;
}

enum { START, END, PEAK, RISE, ALLOC, FREED, ALLOCS, FREES };
static PyObject *measure_get(measure *m, void *what)
{
    koila__span *s = m->span;
    if (!s)
        return PyErr_Format(PyExc_AttributeError, "measure: nothing measured yet");
    uint64_t end = s->open ? koila__meter_now(METER, s->device, KOILA__Q_BYTES_ALL) : s->end_bytes;
    uint64_t peak = atomic_load(&s->peak);
    koila__sums last = s->end;
    koila__sums *first = &s->start;
    if (s->open)
        koila__meter_sums(METER, s->device, &last);
#define IN(field) (last.field[0] + last.field[1] - first->field[0] - first->field[1])
    switch ((int)(intptr_t)what) {
    case START:
        return PyLong_FromUnsignedLongLong(s->start_bytes);
    case END:
        return PyLong_FromUnsignedLongLong(end);
    case PEAK:
        return PyLong_FromUnsignedLongLong(peak);
    case RISE:
        return PyLong_FromUnsignedLongLong(peak - s->start_bytes);
    case ALLOC:
        return PyLong_FromUnsignedLongLong(IN(alloc_bytes));
    case FREED:
        return PyLong_FromUnsignedLongLong(IN(freed_bytes));
    case ALLOCS:
        return PyLong_FromUnsignedLongLong(IN(n_allocs));
    default:
        return PyLong_FromUnsignedLongLong(IN(n_frees));
    }
#undef IN
}
static PyMethodDef measure_methods[] = {
    { "__enter__", (PyCFunction)measure_enter, METH_NOARGS, NULL },
    { "__exit__", (PyCFunction)measure_exit, METH_VARARGS, NULL },
    { NULL, NULL, 0, NULL },
};
static PyGetSetDef measure_getset[] = {
    { "start", (getter)measure_get, NULL, "Bytes at the beginning.", (void *)START },
    { "end", (getter)measure_get, NULL, "Bytes at the end, or now.", (void *)END },
    { "peak", (getter)measure_get, NULL, "Highest bytes inside.", (void *)PEAK },
    { "rise", (getter)measure_get, NULL, "peak - start: the room that was needed.", (void *)RISE },
    { "alloc", (getter)measure_get, NULL, "Bytes handed out inside.", (void *)ALLOC },
    { "freed", (getter)measure_get, NULL, "Bytes taken back inside.", (void *)FREED },
    { "allocs", (getter)measure_get, NULL, "Blocks handed out inside.", (void *)ALLOCS },
    { "frees", (getter)measure_get, NULL, "Blocks taken back inside.", (void *)FREES },
    { NULL, NULL, NULL, NULL, NULL },
};
static PyType_Slot measure_slots[] = {
    { Py_tp_doc,
      "What a block of code did to a device's memory, exactly; see koila.memlab.measure." },
    { Py_tp_new, measure_new },
    { Py_tp_dealloc, measure_dealloc },
    { Py_tp_methods, measure_methods },
    { Py_tp_getset, measure_getset },
    { 0, NULL },
};
static PyType_Spec measure_spec = { "koila._core.Measure", sizeof(measure), 0, Py_TPFLAGS_DEFAULT,
                                    measure_slots };

/* ---- where allocations were asked for: koila.memlab.start(trace=True)
 *
 * The asking thread usually holds no GIL (torch gives it up around every operator), so no Python
 * object may be touched but to read: this thread's own frames, which nobody else changes while it
 * is here, their code and the characters of its file name. A site is (file, line), copied, and the
 * address of the module whose method runs if a timeline wants it; its number is the block's tag.
 * Frames of torch and of ourselves are stepped over: the line is the user's. */

static koila__site *sites; /* [1 .. n_sites]; 0: unknown */
static uint32_t *site_slots, n_sites, n_site_slots;
static PyObject *module_class; /* torch.nn.Module while modules are noted */

/* torch keeps it alive */
void koila__memlab_note_modules(PyObject *class) { module_class = class; }
uint32_t koila__memlab_n_sites(void) { return n_sites; }
koila__site koila__memlab_site(uint32_t tag)
{
    pthread_mutex_lock(&site_lock);
    koila__site s = tag && tag <= n_sites ? sites[tag] : (koila__site){ 0 };
    pthread_mutex_unlock(&site_lock);
    return s;
}

#if PY_VERSION_HEX >= 0x030F0000 ||                                                                \
    (PY_VERSION_HEX >= 0x030E0000 &&                                                               \
     defined Py_GIL_DISABLED) /* 3.14t runs copies of the bytecode, one a thread */
#define CAN_TRACE 0
uint32_t koila__memlab_who_asks(void) { return 0; }
#else
#define CAN_TRACE 1
typedef struct any_frame any_frame;
/* Each is the first fields of struct _PyInterpreterFrame, whose layout is fixed for the life of a
 * minor version. */
#if PY_VERSION_HEX >= 0x030E0000
struct any_frame {
    uintptr_t f_executable;
    any_frame *previous;
    uintptr_t f_funcobj;
    PyObject *f_globals, *f_builtins, *f_locals;
    PyFrameObject *frame_obj;
    const char *instr;
    void *stack_top;
    char flags[8];
    uintptr_t fast[1];
};
/* The object of a reference whose two low bits say how it is counted; NULL: none, or a number
 * without an object. */
static PyObject *object_of(uintptr_t reference)
{
    return (reference & 3) == 3 ? NULL : (PyObject *)(reference & ~(uintptr_t)3);
}
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->current_frame; }
static PyObject *frame_first_local(any_frame *f) { return object_of(f->fast[0]); }
static PyCodeObject *frame_code(any_frame *f)
{
    PyObject *code = object_of(f->f_executable);
    return code && PyCode_Check(code) ? (PyCodeObject *)code : NULL;
}
#elif PY_VERSION_HEX >= 0x030D0000
struct any_frame {
    PyObject *f_executable;
    any_frame *previous;
    PyObject *f_funcobj, *f_globals, *f_builtins, *f_locals;
    PyFrameObject *frame_obj;
    const char *instr;
    int stacktop;
    char flags[4];
    PyObject *fast[1];
};
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->current_frame; }
static PyCodeObject *frame_code(any_frame *f)
{
    return f->f_executable && PyCode_Check(f->f_executable) ? (PyCodeObject *)f->f_executable
                                                            : NULL;
}
#elif PY_VERSION_HEX >= 0x030C0000
struct any_frame {
    PyCodeObject *f_code;
    any_frame *previous;
    PyObject *f_funcobj, *f_globals, *f_builtins, *f_locals;
    PyFrameObject *frame_obj;
    const char *instr;
    int stacktop;
    char flags[4];
    PyObject *fast[1];
};
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->cframe->current_frame; }
static PyCodeObject *frame_code(any_frame *f) { return f->f_code; }
#elif PY_VERSION_HEX >= 0x030B0000
struct any_frame {
    PyFunctionObject *f_func;
    PyObject *f_globals, *f_builtins, *f_locals;
    PyCodeObject *f_code;
    PyFrameObject *frame_obj;
    any_frame *previous;
    const char *instr;
    int stacktop;
    char flags[4];
    PyObject *fast[1];
};
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->cframe->current_frame; }
static PyCodeObject *frame_code(any_frame *f) { return f->f_code; }
#endif
#if PY_VERSION_HEX >= 0x030B0000
#if PY_VERSION_HEX < 0x030E0000
static PyObject *frame_first_local(any_frame *f) { return f->fast[0]; }
#endif
static any_frame *frame_below(any_frame *f) { return f->previous; }
static int frame_line(any_frame *f)
{
    PyCodeObject *code = frame_code(f);
    return PyCode_Addr2Line(code, (int)(f->instr - (const char *)code->co_code_adaptive));
}
#else
struct any_frame {
    PyFrameObject f;
};
static any_frame *first_frame(PyThreadState *ts) { return (any_frame *)ts->frame; }
static PyCodeObject *frame_code(any_frame *f) { return f->f.f_code; }
static PyObject *frame_first_local(any_frame *f) { return f->f.f_localsplus[0]; }
static any_frame *frame_below(any_frame *f) { return (any_frame *)f->f.f_back; }
static int frame_line(any_frame *f) { return PyCode_Addr2Line(f->f.f_code, f->f.f_lasti * 2); }
#endif

static const char *file_of(PyCodeObject *code)
{
    PyObject *name = code ? code->co_filename : NULL;
    return name && PyUnicode_IS_COMPACT_ASCII(name) ? (const char *)PyUnicode_1BYTE_DATA(name)
                                                    : NULL;
}
static bool is_inside(const char *file)
{
    return strstr(file, "/torch/") || strstr(file, "/koila/") || file[0] == '<';
}

static bool widen_sites(void)
{
    uint32_t wider = n_site_slots ? n_site_slots * 2 : 1024;
    uint32_t *slots = calloc(wider, sizeof *slots);
    koila__site *more = realloc(sites, (wider / 2 + 1) * sizeof *more);
    if (more)
        sites = more;
    if (!slots || !more) {
        free(slots);
        return false;
    }
    for (uint32_t i = 1; i <= n_sites; i++) {
        uint32_t k = (uint32_t)sites[i].hash & (wider - 1);
        while (slots[k])
            k = (k + 1) & (wider - 1);
        slots[k] = i;
    }
    free(site_slots);
    site_slots = slots;
    n_site_slots = wider;
    return true;
}

static uint32_t intern_site(const char *file, int line, const void *module)
{
    uint64_t h = 1469598103934665603u ^ (uint64_t)line ^ (uint64_t)(uintptr_t)module << 8;
    for (const char *s = file; *s; s++)
        h = (h ^ (unsigned char)*s) * 1099511628211u;
    h ^= h >> 32;
    uint32_t found = 0;
    pthread_mutex_lock(&site_lock);
    if ((n_sites + 1) * 2 <= n_site_slots || widen_sites()) {
        uint32_t k = (uint32_t)h & (n_site_slots - 1);
        for (; site_slots[k] && !found; k = (k + 1) & (n_site_slots - 1)) {
            const koila__site *s = &sites[site_slots[k]];
            if (s->hash == h && s->line == line && s->module == module &&
                strcmp(s->file, file) == 0)
                found = site_slots[k];
        }
        char *copy = found || n_sites >= KOILA__PTRTAB_MAX_TAG ? NULL : strdup(file);
        if (copy) {
            sites[++n_sites] = (koila__site){ copy, line, module, h };
            site_slots[k] = found = n_sites;
        }
    }
    pthread_mutex_unlock(&site_lock);
    return found;
}

/* The module whose method this frame runs, or NULL. */
static const void *module_of(any_frame *f)
{
    PyCodeObject *code = frame_code(f);
    PyObject *self = code && code->co_argcount > 0 ? frame_first_local(f) : NULL;
    if (self && PyCell_Check(self))
        self = PyCell_GET(self);
    PyObject *mro =
        self && Py_TYPE(self)->tp_flags & Py_TPFLAGS_HEAPTYPE ? Py_TYPE(self)->tp_mro : NULL;
    for (Py_ssize_t i = 0; mro && i < PyTuple_GET_SIZE(mro); i++)
        if (PyTuple_GET_ITEM(mro, i) == module_class)
            return self;
    return NULL;
}

uint32_t koila__memlab_who_asks(void)
{
    PyThreadState *ts = PyGILState_GetThisThreadState();
    any_frame *user = NULL;
    any_frame *f = ts ? first_frame(ts) : NULL;
    const void *module = NULL;
    for (int depth = 0; f && !user && depth < 1000; f = frame_below(f), depth++) {
        const char *file = file_of(frame_code(f));
        if (module_class && !module)
            module = module_of(f);
        if (file && !is_inside(file))
            user = f;
    }
    return user ? intern_site(file_of(frame_code(user)), frame_line(user), module) : 0;
}
#endif

/* ---- Python */

static PyObject *memlab_listen(PyObject *self, PyObject *none)
{
    koila__memlab_listen();
    Py_RETURN_NONE;
}
static PyObject *memlab_trace(PyObject *self, PyObject *on)
{
    int want = PyObject_IsTrue(on);
    if (want < 0)
        return NULL;
#if CAN_TRACE
    koila__cpu_bytes_set_tagger(want ? koila__memlab_who_asks : NULL);
    return PyBool_FromLong(want);
#else
    Py_RETURN_FALSE;
#endif
}
static PyObject *memlab_tracing(PyObject *self, PyObject *none)
{
    return PyBool_FromLong(koila__cpu_bytes_get_tagger() != NULL);
}
/* (file, line) that asked for the block at an address, or None */
static PyObject *memlab_site(PyObject *self, PyObject *address)
{
    uint64_t n;
    uint32_t tag = 0;
    const void *p = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred())
        return NULL;
    if (!koila__cpu_bytes_find(p, &n, &tag) || !tag)
        Py_RETURN_NONE;
    koila__site s = koila__memlab_site(tag);
    return Py_BuildValue("(si)", s.file, s.line);
}
/* Live CPU blocks: [(address, bytes, (file, line) or None)] */
typedef struct block_list {
    struct {
        uintptr_t p;
        uint64_t n;
        uint32_t tag;
    } *at;
    size_t n, capacity;
} block_list;
static bool add_to_list(void *user, const void *p, uint64_t n, uint32_t tag)
{
    block_list *l = user;
    if (l->n == l->capacity) {
        size_t wider = l->capacity ? l->capacity * 2 : 1024;
        void *at = realloc(l->at, wider * sizeof *l->at);
        if (!at)
            return false;
        l->at = at;
        l->capacity = wider;
    }
    l->at[l->n].p = (uintptr_t)p;
    l->at[l->n].n = n;
    l->at[l->n++].tag = tag;
    return true;
}
static PyObject *memlab_blocks(PyObject *self, PyObject *none)
{
    block_list l = { NULL, 0, 0 };
    koila__cpu_bytes_each(add_to_list, &l);
    PyObject *out = PyList_New((Py_ssize_t)l.n);
    for (size_t i = 0; out && i < l.n; i++) {
        PyObject *where = Py_NewRef(Py_None);
        if (l.at[i].tag) {
            koila__site s = koila__memlab_site(l.at[i].tag);
            Py_SETREF(where, Py_BuildValue("(si)", s.file, s.line));
        }
        PyObject *row = where ? Py_BuildValue("(KKN)", (unsigned long long)l.at[i].p,
                                              (unsigned long long)l.at[i].n, where)
                              : NULL;
        if (!row)
            Py_CLEAR(out);
        else
            PyList_SET_ITEM(out, (Py_ssize_t)i, row);
    }
    free(l.at);
    return out;
}
static PyObject *memlab_now(PyObject *self, PyObject *arg)
{
    long device = PyLong_AsLong(arg);
    if (device == -1 && PyErr_Occurred())
        return NULL;
    if (device < 0 || device >= METER->n_devices)
        return PyErr_Format(PyExc_ValueError, "device %ld: there are %d", device, METER->n_devices);
    if (device)
        read_device((int)device, !koila__memlab_is_hooked((int)device));
    return Py_BuildValue(
        "(KK)", (unsigned long long)koila__meter_now(METER, (int)device, KOILA__Q_BYTES_ALL),
        (unsigned long long)koila__meter_now(METER, (int)device, KOILA__Q_RESERVED));
}
static PyObject *memlab_devices(PyObject *self, PyObject *none)
{
    return Py_BuildValue("(zi)", accelerator, METER->n_devices - 1);
}
static PyObject *memlab_hooked(PyObject *self, PyObject *arg)
{
    long device = PyLong_AsLong(arg);
    if (device == -1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(koila__memlab_is_hooked((int)device));
}
static PyObject *size_text(PyObject *self, PyObject *size)
{
    char buffer[32];
    if (size == Py_None)
        return PyUnicode_FromString("");
    double v = PyFloat_CheckExact(size) || PyLong_CheckExact(size) ? PyFloat_AsDouble(size) : -1;
    /* numpy's and the like are numbers; a symbolic size is shown as it is */
    if (v == -1 && !PyFloat_CheckExact(size) && !PyLong_CheckExact(size)) {
        PyObject *real = PyNumber_Check(size) && !PyObject_HasAttrString(size, "node")
                             ? PyNumber_Float(size)
                             : NULL;
        PyErr_Clear();
        if (!real)
            return PyObject_Str(size);
        v = PyFloat_AsDouble(real);
        Py_DECREF(real);
    }
    if (v == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return PyObject_Str(size);
    }
    return PyUnicode_FromString(koila__size_text(v, buffer));
}
static PyObject *memlab_stop(PyObject *self, PyObject *none)
{
    koila__cpu_bytes_set_tagger(NULL);
    if (!koila__cpu_bytes_is_kept())
        koila__cpu_bytes_uninstall(); /* the executor measures with it too */
    koila__got_restore(&report_slots, (void *)hook_report);
    koila__got_restore(&free_slots, (void *)hook_free);
    Py_RETURN_NONE;
}
/* For tests: pretend to be an allocator. memlab_event(device, delta, thread=True); device 0 then
 * needs no torch. */
static PyObject *memlab_event(PyObject *self, PyObject *args)
{
    int device, own = 1;
    long long delta;
    if (!PyArg_ParseTuple(args, "iL|p:memlab_event", &device, &delta, &own))
        return NULL;
    if (device < 0 || device >= METER->n_devices)
        return PyErr_Format(PyExc_ValueError, "no device %d", device);
    if (device == 0 && METER->device[0].bytes)
        return PyErr_Format(PyExc_RuntimeError, "the CPU has real events");
    if (device == 0)
        pretend = true;
    uint64_t now = koila__meter_now(METER, device, KOILA__Q_BYTES_ALL) + (uint64_t)delta;
    koila__meter_event(METER, NULL,
                       own && koila__memlab_stack ? &koila__memlab_stack->thread : NULL, device,
                       delta, now, UINT64_MAX);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    { "memlab_listen", memlab_listen, METH_NOARGS, "Put the allocator hooks in." },
    { "memlab_stop", memlab_stop, METH_NOARGS, "Take the allocating side of the hooks off." },
    { "memlab_trace", memlab_trace, METH_O,
      "Keep file and line of every CPU allocation from now on; whether that is possible." },
    { "memlab_tracing", memlab_tracing, METH_NOARGS, "Are lines of allocations kept now?" },
    { "memlab_site", memlab_site, METH_O,
      "(file, line) that asked for the CPU block at an address, or None." },
    { "memlab_blocks", memlab_blocks, METH_NOARGS,
      "Live CPU blocks: [(address, bytes, (file, line) or None)]." },
    { "memlab_now", memlab_now, METH_O,
      "(allocated, reserved) bytes of a device: 0 the CPU, 1 + i accelerator i." },
    { "memlab_devices", memlab_devices, METH_NOARGS,
      "(name of the accelerator or None, how many)." },
    { "memlab_hooked", memlab_hooked, METH_O, "Does this device tell us of every event?" },
    { "size_text", size_text, METH_O, "'39.45K': a memory size as people read it." },
    { "memlab_event", memlab_event, METH_VARARGS,
      "For tests: memlab_event(device, delta, own_thread=True)." },
    { NULL, NULL, 0, NULL },
};

int koila__memlab_add_module(PyObject *m)
{
    static bool ready;
    if (!ready) {
        koila__meter_init(METER, 1);
        koila__lines_init(&koila__memlab_lines, METER, NULL);
        if (pthread_key_create(&thread_ends, end_thread) != 0 ||
            pthread_atfork(NULL, NULL, after_fork_child) != 0) {
            PyErr_NoMemory();
            return -1;
        }
        ready = true;
    }
    PyObject *type = PyType_FromSpec(&measure_spec);
    if (!type || PyModule_AddObject(m, "Measure", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    return PyModule_AddFunctions(m, methods);
}
