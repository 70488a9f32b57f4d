/* accelerators.c — finds the devices and follows the allocators of accelerators. Each accelerator
 * has one or more lines in the table `libraries`; the rest of memlab knows devices by number.
 *
 * Caching allocators call c10::reportMemoryUsageToProfiler(ptr, +-bytes, allocated, reserved,
 * device) for every block handed out or taken back, through one slot of libc10_cuda.so
 * (libc10_hip.so, libc10_xpu.so). Our function goes into that slot and calls the original
 * afterwards. The user's statistics are neither read nor reset by it. It runs under the allocator's
 * lock, on any thread, without the GIL: atomics only.
 *
 * Some changes cause no event: an emptied cache, blocks that wait for another stream. They are read
 * from the allocator's statistics once per call, and at every line while a block waits. Other
 * allocators (cudaMallocAsync, pluggable ones) have no events; their statistics are read at the
 * ends of lines ("stats"), and changes inside a line are not known.
 */
#include "memlab/memlab.h"

#include <stdlib.h>

#include "ground/cpu_bytes.h"
#include "ground/got.h"

#define METER (&koila__memlab_meter)

enum { PATH_BYTES = 4096 };

/* The libraries that hold a caching allocator. */
static const struct library {
    const char *file;     /* its file name begins with this */
    const char *device;   /* torch's name of its devices */
    int type;             /* c10::DeviceType of its events */
    const char *release;  /* the runtime's function that frees a cached segment; NULL: not hooked */
    const char *no_cache; /* environment variable that turns caching off; NULL: none */
} libraries[] = {
    { "libc10_cuda.so", "cuda", 1, "cudaFree", "PYTORCH_NO_CUDA_MEMORY_CACHING" },
    { "libc10_hip.so", "cuda", 6, "hipFree", "PYTORCH_NO_HIP_MEMORY_CACHING" },
    { "libc10_xpu.so", "xpu", 12, NULL, NULL },
};

/* Torch's name of the devices from 1 on; NULL: there are none. */
static const char *accelerator;
static bool native_allocator = true;
static bool counted; /* the devices were counted, which needs torch */

/* Torch if it is already imported: a new reference, or NULL without an exception. */
static PyObject *imported_torch(void)
{
    PyObject *name = PyUnicode_FromString("torch");
    PyObject *torch = name ? PyImport_GetModule(name) : NULL;
    Py_XDECREF(name);
    PyErr_Clear();
    return torch;
}

/* ---- events */

#define REPORT_USAGE "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
typedef void (*report_fn)(void *p, int64_t delta, size_t allocated, size_t reserved,
                          uint16_t device);
static report_fn real_report;
static koila__got_set report_slots;

/* c10::Device: the type in the low byte, then the index. */
static bool is_accelerator(uint16_t device)
{
    int type = device & 0xFF;
    for (size_t i = 0; i < KOILA_COUNT(libraries); i++)
        if (libraries[i].type == type)
            return true;
    return false;
}

KOILA__HOT static void hook_report(void *p, int64_t delta, size_t allocated, size_t reserved,
                                   uint16_t device)
{
    int index = (int8_t)(device >> 8);
    if (is_accelerator(device) && delta && index >= 0 && index + 1 < METER->n_devices)
        koila__events_tell(1 + index, p, delta, allocated, reserved);
    if (real_report)
        real_report(p, delta, allocated, reserved, device);
}

/* The number of devices of this name that torch sees. Initialises none of them. */
static int devices_of(PyObject *torch, const char *name)
{
    PyObject *module = PyObject_GetAttrString(torch, name);
    PyObject *count = module ? PyObject_CallMethod(module, "device_count", NULL) : NULL;
    int n = count ? (int)PyLong_AsLong(count) : 0;
    Py_XDECREF(count);
    Py_XDECREF(module);
    PyErr_Clear();
    return n;
}

/* The number of accelerators that torch sees, of the first kind that it has. Sets their name. */
static int count_devices(PyObject *torch)
{
    int n = 0;
    for (size_t i = 0; n <= 0 && i < KOILA_COUNT(libraries); i++) {
        if (i && strcmp(libraries[i].device, libraries[i - 1].device) == 0)
            continue; /* same device name as the line above */
        n = devices_of(torch, libraries[i].device);
        if (n > 0)
            accelerator = libraries[i].device;
    }
    if (n < 0)
        return 0;
    return n < KOILA__DEVICES_MAX - 1 ? n : KOILA__DEVICES_MAX - 1;
}

/* ---- the allocator's own statistics: changes without an event, and accelerators without events */

enum {
    /* metrics; from S_REQUESTED_BYTES to S_RESERVED_BYTES in the order of koila__stats */
    S_ALLOCATED_BYTES,
    S_ALLOCATION,
    S_ACTIVE_BYTES,
    S_ACTIVE,
    S_REQUESTED_BYTES,
    S_INACTIVE_SPLIT,
    S_INACTIVE_SPLIT_BYTES,
    S_SEGMENT,
    S_RESERVED_BYTES,
    /* pools */
    S_ALL,
    S_LARGE_POOL,
    S_SMALL_POOL,
    /* statistics */
    S_CURRENT,
    S_ALLOCATED,
    S_FREED,
    N_KEYS,
    N_POOLS = S_CURRENT - S_ALL
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
    for (int i = 0; i < N_KEYS; i++) {
        if (!stat_keys[i])
            stat_keys[i] = PyUnicode_InternFromString(names[i]);
        if (!stat_keys[i])
            return false;
    }
    char method[32];
    snprintf(method, sizeof method, "_%s_memoryStats", accelerator);
    PyObject *torch = imported_torch();
    PyObject *c = torch ? PyObject_GetAttrString(torch, "_C") : NULL;
    memory_stats = c ? PyObject_GetAttrString(c, method) : NULL;
    Py_XDECREF(c);
    Py_XDECREF(torch);
    return memory_stats != NULL;
}

/* Statistics are read while a function is left, perhaps by an exception: it is kept meanwhile. */
typedef struct error {
    PyObject *type, *value, *where;
} error;

/* {metric: {pool: {stat: int}}} of an accelerator; a new reference, given back with drop_stats().
 * NULL, and nothing is kept: there are none. Not through torch's public wrapper, which flattens it
 * and takes 33 us. */
static PyObject *raw_stats(int device, error *kept)
{
    if (!accelerator || !PyGILState_Check())
        return NULL;
    PyErr_Fetch(&kept->type, &kept->value, &kept->where);
    bool found = memory_stats || find_memory_stats();
    PyObject *index = found ? PyLong_FromLong(device - 1) : NULL;
    PyObject *stats = index ? PyObject_CallOneArg(memory_stats, index) : NULL;
    Py_XDECREF(index);
    if (!stats)
        PyErr_Restore(kept->type, kept->value, kept->where);
    return stats;
}
static void drop_stats(PyObject *stats, const error *kept)
{
    Py_DECREF(stats);
    PyErr_Restore(kept->type, kept->value, kept->where);
}

/* One statistic; 0: there is none. Keys with more parts (private pools of CUDA graphs) are not
 * read. */
static uint64_t stat_of(PyObject *stats, int metric, int pool, int stat)
{
    const int path[] = { metric, pool, stat };
    PyObject *at = stats; // borrowed
    for (size_t i = 0; i < KOILA_COUNT(path) && at; i++)
        at = PyDict_Check(at) ? PyDict_GetItemWithError(at, stat_keys[path[i]]) : NULL;
    uint64_t v = at && PyLong_Check(at) ? PyLong_AsUnsignedLongLong(at) : 0;
    if (!PyErr_Occurred())
        return v;
    PyErr_Clear();
    return 0;
}

/* The current value of metric `bytes` or `count` for quantity q, in the pool that q implies. */
static uint64_t quantity_of(PyObject *stats, int q, int bytes, int count)
{
    static const int pool_of[] = { S_ALL, S_SMALL_POOL, S_LARGE_POOL }; /* as in koila__q */
    return stat_of(stats, q < KOILA__Q_N_ALL ? bytes : count, pool_of[q % N_POOLS], S_CURRENT);
}

/* Tells the meter the changes without events. `stats` were read just now; reserved bytes were
 * `reserved_before`. */
static void note_silent(int device, PyObject *stats, uint64_t reserved_before)
{
    uint64_t waiting[KOILA__WAITS];
    for (int i = 0; i < KOILA__WAITS; i++) {
        uint64_t active = quantity_of(stats, i, S_ACTIVE_BYTES, S_ACTIVE);
        uint64_t held = quantity_of(stats, i, S_ALLOCATED_BYTES, S_ALLOCATION);
        waiting[i] = active > held ? active - held : 0;
    }
    koila__meter_set_silent(METER, device, reserved_before,
                            stat_of(stats, S_RESERVED_BYTES, S_ALL, S_CURRENT), waiting);
}

static uint64_t reserved_now(int device)
{
    koila_assert(device >= 0 && device < METER->n_devices);
    return atomic_load_explicit(&METER->device[device].reserved, memory_order_relaxed);
}

static bool read_stats(int device, koila__stats *out)
{
    uint64_t reserved = reserved_now(device);
    error kept;
    PyObject *stats = raw_stats(device, &kept);
    if (!stats)
        return false;
    for (int i = 0; i < KOILA__STATS; i++) {
        int metric = S_REQUESTED_BYTES + i / N_POOLS;
        int pool = S_ALL + i % N_POOLS;
        out->current[i] = stat_of(stats, metric, pool, S_CURRENT);
        out->allocated[i] = stat_of(stats, metric, pool, S_ALLOCATED);
        out->freed[i] = stat_of(stats, metric, pool, S_FREED);
    }
    note_silent(device, stats, reserved);
    drop_stats(stats, &kept);
    return true;
}

/* Tells the meter the changes in the statistics. whole: also those that a hook would have
 * reported. */
static void read_device(int device, bool whole)
{
    uint64_t now[KOILA__Q_ACTIVE], reserved = reserved_now(device);
    bool changed = false;
    error kept;
    PyObject *stats = raw_stats(device, &kept);
    if (!stats)
        return;
    note_silent(device, stats, reserved);
    for (int q = 0; whole && q < KOILA__Q_RESERVED; q++) {
        now[q] = quantity_of(stats, q, S_ALLOCATED_BYTES, S_ALLOCATION);
        changed |= now[q] != koila__meter_now(METER, device, (koila__q)q);
    }
    now[KOILA__Q_RESERVED] = reserved_now(device);
    drop_stats(stats, &kept);
    if (changed)
        koila__meter_set(METER, device, now);
}

/* cudaFree empties the cache. It is hooked too, so the line that does it is exact. Expandable
 * segments are unmapped instead, unseen; then the reserved bytes are read once per call. */
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
        /* without reserved bytes there is no cache to empty */
        if (!hooked || koila__meter_waits(METER, d) || (thorough && reserved_now(d)))
            read_device(d, !hooked);
}

/* ---- listening */

static void hook_release(const struct library *l)
{
    char path[PATH_BYTES];
    if (!l->release || !koila__got_path(l->file, path, sizeof path))
        return;
    /* found through this library, since several runtimes may be loaded */
    void *symbol = koila__got_symbol(path, l->release);
    memcpy(&real_free, &symbol, sizeof symbol);
    if (real_free)
        koila__got_patch(&free_slots, l->file, l->release, (void *)hook_free);
}

static void listen_to_accelerators(void)
{
    if (METER->n_devices == 1)
        return;
    char path[PATH_BYTES];
    if (!real_report && koila__got_path("libc10.so", path, sizeof path)) {
        void *symbol = koila__got_symbol(path, REPORT_USAGE);
        memcpy(&real_report, &symbol, sizeof symbol);
    }
    if (!koila__got_holds(&report_slots, NULL)) {
        for (size_t i = 0; i < KOILA_COUNT(libraries); i++) {
            koila__got_patch(&report_slots, libraries[i].file, REPORT_USAGE, (void *)hook_report);
            hook_release(&libraries[i]);
        }
        for (int d = 1; d < METER->n_devices; d++)
            read_device(d, true);
    }
    koila__memlab_lines.read_stats = read_stats;
    koila__memlab_lines.poll = poll_devices;
}

/* The hook does not see cudaMallocAsync, pluggable allocators, or an allocator with caching off. */
static bool uses_native_allocator(PyObject *torch)
{
    for (size_t i = 0; i < KOILA_COUNT(libraries); i++)
        if (libraries[i].no_cache && getenv(libraries[i].no_cache))
            return false;
    PyObject *module = PyObject_GetAttrString(torch, accelerator);
    PyObject *memory = module ? PyObject_GetAttrString(module, "memory") : NULL;
    PyObject *backend = memory ? PyObject_CallMethod(memory, "get_allocator_backend", NULL) : NULL;
    bool native = !backend || !PyUnicode_Check(backend) ||
                  PyUnicode_CompareWithASCIIString(backend, "native") == 0;
    Py_XDECREF(backend);
    Py_XDECREF(memory);
    Py_XDECREF(module);
    PyErr_Clear();
    return native;
}

bool koila__memlab_is_hooked(int device)
{
    if (device == 0)
        return koila__events_hear_cpu();
    return device < METER->n_devices && native_allocator && koila__got_holds(&report_slots, NULL);
}

void koila__memlab_listen(void)
{
    PyObject *torch = counted ? NULL : imported_torch();
    if (torch) {
        METER->n_devices = 1 + count_devices(torch);
        if (accelerator)
            native_allocator = uses_native_allocator(torch);
        counted = true;
        Py_DECREF(torch);
    }
    koila__events_listen_to_cpu();
    listen_to_accelerators();
}

/* ---- Python */

static PyObject *memlab_listen(PyObject *self, PyObject *none)
{
    koila__memlab_listen();
    Py_RETURN_NONE;
}
static PyObject *memlab_stop(PyObject *self, PyObject *none)
{
    koila__cpu_bytes_set_tagger(NULL);
    if (!koila__cpu_bytes_is_kept()) /* the executor measures with it too */
        koila__cpu_bytes_uninstall();
    koila__got_restore(&report_slots, (void *)hook_report);
    koila__got_restore(&free_slots, (void *)hook_free);
    Py_RETURN_NONE;
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

static PyMethodDef methods[] = {
    { "memlab_listen", memlab_listen, METH_NOARGS, "Install the allocator hooks." },
    { "memlab_stop", memlab_stop, METH_NOARGS, "Remove the hooks that see new blocks." },
    { "memlab_now", memlab_now, METH_O,
      "(allocated, reserved) bytes of a device: 0 the CPU, 1 + i accelerator i." },
    { "memlab_devices", memlab_devices, METH_NOARGS,
      "(name of the accelerator or None, number of them)." },
    { "memlab_hooked", memlab_hooked, METH_O, "Does koila see every event of this device?" },
    { NULL, NULL, 0, NULL },
};

int koila__accelerators_add_module(PyObject *m) { return PyModule_AddFunctions(m, methods); }
