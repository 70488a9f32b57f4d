/* cpu_bytes.c — see cpu_bytes.h. The exact memory of PyTorch on the CPU.
 *
 * PyTorch does not count its CPU memory, but every CPU tensor that it allocates itself comes from
 * one function, c10::alloc_cpu.
 *   Plan A  alloc_cpu is the only caller of posix_memalign in libc10.so, and c10::free_cpu is
 *           free(): our two functions go into libc10's slots for these (got.h). The limit refuses a
 *           block by returning ENOMEM, and torch builds and throws its own exception, in which
 *           strerror_r's words, another slot of libc10, are ours. (Success with
 *           a NULL block would make a tensor at address 0; any other error changes torch's text.)
 *   Plan B  libc10 has its allocator linked in and does not import posix_memalign (aarch64 wheels):
 *           our functions go into the slots for c10::alloc_cpu and c10::free_cpu in every loaded
 *           object, and the limit throws through c10's exported ThrowEnforceNotMet. This file is
 *           compiled with -fexceptions: when the real alloc_cpu throws, a cleanup takes the
 *           reservation back.
 * Each plan is tested before it is used: a storage of 4099 bytes must show up in the table and
 * leave it again; otherwise the hooks are removed and the answer is "unsupported". Later
 * koila__cpu_bytes_ok() compares the slots, since other memory profilers write the same ones.
 *
 * free() in libc10 also frees other things than tensors, and blocks older than our hooks: a block
 * that is not in the table is passed on, uncounted. An entry leaves the table before the real free,
 * because afterwards another thread may be given the same address. Our free stays in place even
 * when the allocating side is removed; otherwise entries would go stale. The extension is linked
 * with -z nodelete for the same reason.
 *
 * The same in Python, if Python could see the calls:
 *     def alloc(n):
 *         if current + n > limit: raise
 *         p = real_alloc(n); sizes[p] = n; current += n; peak = max(peak, current)
 *     def free(p):
 *         current -= sizes.pop(p, 0); real_free(p)
 */
#include "ground/cpu_bytes.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "memory/account.h"
#include "memory/freemem.h"
#include "ground/got.h"
#include "memory/ledger.h"
#include "ground/limits.h"
#include "ground/refusal.h"

static koila__ledger ledger;

enum { N_LISTENERS = 4, PATH_BYTES = 4096 };
static _Atomic(koila__cpu_bytes_event) listeners[N_LISTENERS];
static _Atomic(uint32_t (*)(void)) tagger;

static koila__got_set slots;
static enum { NOT_YET, ON, OFF, CANNOT } state;
static char plan; /* 'A' or 'B' when ON or OFF */
static const char *why = "not installed";
static uint64_t generation;   /* number of times the counters were restarted */
static uint64_t n_loads_seen; /* plan B: koila__got_n_loads() when the slots were last written */
static bool kept;             /* a caller needs the count for good */

/* Owned: the context of contextvars in which this thread's own limit holds. Other asyncio tasks of
 * this thread have the process's. NULL: it holds in all. */
static _Thread_local PyObject *limited;
static _Thread_local uint64_t own_room; /* UINT64_MAX less this thread's own limit; 0: none */
static _Thread_local uint32_t n_lifts;  /* while it is not 0 nothing is refused to this thread */
/* An own limit that refuses nothing. UINT64_MAX: there is none, and the process's counts. */
static const uint64_t NO_LIMIT = UINT64_MAX - 1;

/* The limit for an event whose account says `own`. Needs no GIL: a thread reads its own state. */
KOILA__HOT static uint64_t limit_here(uint64_t own)
{
    if (n_lifts)
        return NO_LIMIT;
    if (own == UINT64_MAX || !limited)
        return own;
    const PyThreadState *thread = PyGILState_GetThisThreadState();
    return thread && thread->context != limited ? UINT64_MAX : own;
}

KOILA__HOT static void tell(const void *p, int64_t delta, uint64_t now)
{
    for (int i = 0; i < N_LISTENERS; i++) {
        koila__cpu_bytes_event fn = atomic_load_explicit(&listeners[i], memory_order_acquire);
        if (fn)
            fn(p, delta, now);
    }
}

/* Why n bytes were refused to the work of `a` is kept (refusal.h). */
static void keep_refusal(uint64_t n, uint64_t limit, koila__account *a)
{
    const uint64_t most =
        limit != UINT64_MAX ? limit : atomic_load_explicit(&ledger.limit, memory_order_relaxed);
    const uint64_t held = koila__cpu_bytes_current();
    const bool is_over = n > most || held > most - n; /* or a test asked for the refusal */
    koila__refusal_of_budget(held, is_over ? most : UINT64_MAX);
    koila__account_refused(a, n);
}

/* Counts n bytes that are about to be asked for, by the work of `a`: within the limits on torch's
 * bytes, of which `limit` is this thread's, and within that on resident memory. False: why is kept.
 */
KOILA__HOT static bool reserve(uint64_t n, uint64_t limit, uint64_t *now, koila__account *a)
{
    if (!koila__ledger_reserve_within(&ledger, n, limit, now)) {
        keep_refusal(n, limit, a);
        return false;
    }
    if (koila__resident_grants(n, *now))
        return true;
    koila__ledger_cancel(&ledger, n);
    koila__refusal_of_resident();
    koila__account_refused(a, n);
    return false;
}

/* Enters a granted block into the table, and into the account `a`. False: no memory for the
 * entry. */
KOILA__HOT static bool remember(void *p, uint64_t n, uint64_t now, koila__account *a)
{
    koila_assert(p);
    uint32_t (*ask)(void) = atomic_load_explicit(&tagger, memory_order_acquire);
    if (!koila__ledger_commit(&ledger, p, n, ask ? ask() : 0, now))
        return false;
    koila__account_add(a, (int64_t)n);
    tell(p, (int64_t)n, now);
    return true;
}
KOILA__HOT static void forget(void *p)
{
    uint64_t n, now, limit;
    if (!koila__ledger_release(&ledger, p, &n, &now))
        return;
    koila__account_add(koila__account_now(&limit), -(int64_t)n);
    tell(p, -(int64_t)n, now);
}

/* ---- plan A */

KOILA__HOT static int hook_posix_memalign(void **out, size_t alignment, size_t n)
{
    uint64_t now, limit;
    koila__account *account = koila__account_now(&limit);
    if (!reserve(n, limit_here(limit), &now, account))
        return ENOMEM;
    void *p = NULL;
    int r = posix_memalign(&p, alignment, n);
    if (r != 0) {
        koila__ledger_cancel(&ledger, n);
        return r;
    }
    if (!remember(p, n, now, account)) {
        free(p);
        return ENOMEM;
    }
    *out = p;
    return 0;
}

KOILA__HOT static void hook_free(void *p)
{
    if (p)
        forget(p);
    free(p);
}

/* Torch asks this for the text of the error that posix_memalign has just returned. */
static char *hook_strerror_r(int error, char *text, size_t n)
{
    char *told = error == ENOMEM ? koila__refusal_told() : NULL;
    return told ? told : strerror_r(error, text, n); /* GNU's, which returns the text */
}

/* ---- plan B */

static void *(*real_alloc_cpu)(size_t n);
static void (*real_free_cpu)(void *p);
static void (*throw_enforce)(const char *file, int line, const char *condition, const char *text,
                             const void *caller);

static void refuse(uint64_t n)
{
    char text[480];
    const char *told = koila__refusal_told();
    snprintf(text, sizeof text,
             "DefaultCPUAllocator: can't allocate memory: you tried to allocate %llu bytes. Error "
             "code 12 (%s)",
             (unsigned long long)n, told ? told : "Cannot allocate memory");
    throw_enforce("alloc_cpu.cpp", 0, "budget", text, NULL);
}

typedef struct reservation {
    uint64_t n;
    bool pending;
} reservation;
static void take_back(reservation *r)
{
    if (r->pending)
        koila__ledger_cancel(&ledger, r->n);
}

static void *hook_alloc_cpu(size_t n)
{
    uint64_t now, limit;
    if (n == 0 || n > KOILA__PTRTAB_MAX_BYTES)
        return real_alloc_cpu(n);
    koila__account *account = koila__account_now(&limit);
    if (!reserve(n, limit_here(limit), &now, account))
        refuse(n);
    __attribute__((cleanup(take_back))) reservation r = { n, true };
    void *p = real_alloc_cpu(n);
    if (!p)
        return NULL;
    koila_assert(r.pending && r.n == n);
    r.pending = false;
    if (!remember(p, n, now, account)) {
        real_free_cpu(p);
        refuse(n);
    }
    return p;
}

static void hook_free_cpu(void *p)
{
    if (p)
        forget(p);
    real_free_cpu(p);
}

/* ---- installation */

#define ALLOC_CPU "_ZN3c109alloc_cpuEm"
#define FREE_CPU "_ZN3c108free_cpuEPv"
#define THROW_ENFORCE "_ZN3c1018ThrowEnforceNotMetEPKciS1_S1_PKv"

static bool patch_alloc_side(void)
{
    if (plan == 'A') /* a libc10 without strerror_r says less, and is as exact */
        return koila__got_patch(&slots, "libc10.so", "strerror_r", (void *)hook_strerror_r) >= 0 &&
               koila__got_patch(&slots, "libc10.so", "posix_memalign",
                                (void *)hook_posix_memalign) > 0;
    n_loads_seen = koila__got_n_loads();
    return koila__got_patch(&slots, NULL, ALLOC_CPU, (void *)hook_alloc_cpu) > 0;
}
static bool patch_free_side(void)
{
    if (plan == 'A')
        return koila__got_patch(&slots, "libc10.so", "free", (void *)hook_free) > 0;
    return koila__got_patch(&slots, NULL, FREE_CPU, (void *)hook_free_cpu) > 0;
}
static void unpatch_alloc_side(void)
{
    koila__got_restore(&slots, plan == 'A' ? (void *)hook_posix_memalign : (void *)hook_alloc_cpu);
    koila__got_restore(&slots, (void *)hook_strerror_r);
}

/* Makes a storage and drops it. Was it counted with its size, and no longer after that? */
static bool self_test(PyObject *torch)
{
    const uint64_t n_probe = 4099; /* an unusual size */
    bool seen = false, gone = false;
    uint64_t n = 0;
    PyObject *storage =
        PyObject_CallMethod(torch, "UntypedStorage", "K", (unsigned long long)n_probe);
    PyObject *address = storage ? PyObject_CallMethod(storage, "data_ptr", NULL) : NULL;
    const void *p = address ? PyLong_AsVoidPtr(address) : NULL;
    if (p)
        seen = koila__cpu_bytes_find(p, &n, NULL) && n == n_probe;
    Py_XDECREF(storage);
    if (p)
        gone = !koila__cpu_bytes_find(p, &n, NULL);
    Py_XDECREF(address);
    PyErr_Clear();
    return seen && gone;
}

/* Finds libc10's functions. NULL, or the reason why that is impossible. */
static const char *find_functions(char which)
{
    char path[PATH_BYTES];
    if (!koila__got_path("libc10.so", path, sizeof path))
        return "unsupported: no libc10.so is loaded (torch linked statically?)";
    real_alloc_cpu = (void *(*)(size_t))koila__got_symbol(path, ALLOC_CPU);
    real_free_cpu = (void (*)(void *))koila__got_symbol(path, FREE_CPU);
    throw_enforce = (void (*)(const char *, int, const char *, const char *,
                              const void *))koila__got_symbol(path, THROW_ENFORCE);
    if (!real_alloc_cpu || !real_free_cpu)
        return "unsupported: libc10.so does not export alloc_cpu and free_cpu";
    if (which == 'B' && !throw_enforce)
        return "unsupported: libc10.so does not export ThrowEnforceNotMet";
    return NULL;
}

/* Tries one plan. NULL, or why it is impossible; then only an installed free stays changed. */
static const char *try_plan(char which, PyObject *torch)
{
    const char *missing = find_functions(which);
    plan = which;
    if (missing)
        return missing;
    /* lazy binding happens at the first call: now, so that it does not overwrite our pointers
     * later */
    real_free_cpu(real_alloc_cpu(64));
    if (which == 'A' &&
        koila__got_patch(&slots, "libc10.so", "posix_memalign", (void *)hook_posix_memalign) <= 0)
        return "unsupported: libc10.so does not call posix_memalign";
    if (!patch_free_side() || !patch_alloc_side()) {
        unpatch_alloc_side();
        return "unsupported: a slot could not be written";
    }
    if (!self_test(torch)) {
        unpatch_alloc_side();
        return "unsupported: torch's CPU storages do not come from c10::alloc_cpu";
    }
    return NULL;
}

/* Torch if it is completely imported: a new reference, or NULL without an exception. */
static PyObject *imported_torch(void)
{
    PyObject *name = PyUnicode_FromString("torch");
    PyObject *torch = name ? PyImport_GetModule(name) : NULL;
    Py_XDECREF(name);
    if (torch && !PyObject_HasAttrString(torch, "UntypedStorage"))
        Py_CLEAR(torch);
    PyErr_Clear();
    return torch;
}

static int install_first(char wanted, PyObject *torch)
{
    why = try_plan(wanted == 'B' ? 'B' : 'A', torch);
    if (why && !wanted)
        why = try_plan('B', torch);
    state = why ? CANNOT : ON;
    return why ? -1 : 0;
}

/* Checks the slots: another tool may have written them, and newly loaded objects have new ones. */
static int install_again(void)
{
    koila_assert(state == ON && (plan == 'A' || plan == 'B'));
    if (koila__got_holds(&slots, NULL)) {
        bool has_new = plan == 'B' && koila__got_n_loads() != n_loads_seen;
        return !has_new || (patch_alloc_side() && patch_free_side()) ? 0 : -1;
    }
    generation++;
    bool patched = patch_free_side() && patch_alloc_side();
    koila__ledger_clear(&ledger);
    return patched ? 0 : -1;
}

/* wanted: 'A' or 'B' allows only that plan, if none was tried before; 0: either. */
static int install(char wanted)
{
    PyObject *torch = imported_torch();
    if (!torch) {
        if (state == NOT_YET)
            why = "unsupported: torch is not imported";
        return -1;
    }
    int r = -1;
    switch (state) {
    case NOT_YET:
        r = install_first(wanted, torch);
        break;
    case OFF:
        if (patch_alloc_side()) {
            state = ON;
            r = 0;
        }
        break;
    case ON:
        r = install_again();
        break;
    case CANNOT:
        break;
    }
    Py_DECREF(torch);
    return r;
}
int koila__cpu_bytes_install(void)
{
    kept = true;
    return install(0);
}
int koila__cpu_bytes_listen(void) { return install(0); }
bool koila__cpu_bytes_is_kept(void) { return kept; }

void koila__cpu_bytes_uninstall(void)
{
    if (state != ON)
        return;
    unpatch_alloc_side();
    state = OFF;
}

bool koila__cpu_bytes_ok(void) { return state == ON && koila__got_holds(&slots, NULL); }
uint64_t koila__cpu_bytes_generation(void) { return generation; }
const char *koila__cpu_bytes_plan(void)
{
    switch (state) {
    case ON:
        return plan == 'A' ? "A" : "B";
    case OFF:
        return "unsupported: stopped";
    default:
        return why;
    }
}

/* ---- counters */

KOILA__HOT uint64_t koila__cpu_bytes_current(void)
{
    return atomic_load_explicit(&ledger.current, memory_order_relaxed);
}
const _Atomic uint64_t *koila__cpu_bytes_current_slot(void) { return &ledger.current; }
uint64_t koila__cpu_bytes_peak(void)
{
    return atomic_load_explicit(&ledger.peak, memory_order_relaxed);
}
void koila__cpu_bytes_reset_peak(void)
{
    atomic_store_explicit(&ledger.peak, koila__cpu_bytes_current(), memory_order_relaxed);
}
KOILA__HOT int koila__cpu_bytes_open(void) { return koila__ledger_open(&ledger); }
KOILA__HOT uint64_t koila__cpu_bytes_close(int window)
{
    return koila__ledger_close(&ledger, window);
}
void koila__cpu_bytes_set_limit(uint64_t bytes)
{
    atomic_store_explicit(&ledger.limit, bytes, memory_order_relaxed);
}
uint64_t koila__cpu_bytes_get_limit(void)
{
    const uint64_t own = limit_here(koila__account_get_limit());
    return own != UINT64_MAX ? own : atomic_load_explicit(&ledger.limit, memory_order_relaxed);
}
/* Threads that work for this one (gloo's, OpenMP's) find its limit in its account. */
static void tell_account(void)
{
    koila__account_set_limit(n_lifts ? NO_LIMIT : UINT64_MAX - own_room);
}

void koila__cpu_bytes_set_own_limit(bool on, uint64_t bytes)
{
    PyObject *before = limited;
    PyObject *context = PyThreadState_Get()->context;
    if (!on && before != context)
        return; /* another task's, which goes on */
    limited = on ? Py_XNewRef(context) : NULL;
    if (bytes > NO_LIMIT)
        bytes = NO_LIMIT;
    own_room = on ? UINT64_MAX - bytes : 0;
    tell_account();
    Py_XDECREF(before);
}

void koila__cpu_bytes_lift_limit(bool more)
{
    koila_assert(more || n_lifts > 0);
    n_lifts += more ? 1 : -1;
    tell_account();
}
void koila__cpu_bytes_fail_nth(int64_t n) { koila__ledger_fail_nth(&ledger, n); }
int64_t koila__cpu_bytes_fails_in(void)
{
    return (int64_t)atomic_load_explicit(&ledger.fail_in, memory_order_relaxed);
}
int64_t koila__cpu_bytes_n_allocs(void) { return (int64_t)koila__ledger_granted(&ledger); }
KOILA__HOT uint64_t koila__cpu_bytes_n_refused(void)
{
    return atomic_load_explicit(&ledger.n_refused, memory_order_relaxed);
}
int64_t koila__cpu_bytes_n_frees(void) { return (int64_t)koila__ledger_released(&ledger); }

bool koila__cpu_bytes_find(const void *p, uint64_t *n_bytes, uint32_t *tag)
{
    return koila__ptrtab_get(&ledger.blocks, p, n_bytes, tag);
}

typedef struct each_request {
    bool (*fn)(void *user, const void *p, uint64_t n_bytes, uint32_t tag);
    void *user;
} each_request;
static bool each_entry(void *user, const koila__ptrtab_entry *e)
{
    each_request *r = user;
    return r->fn(r->user, (const void *)e->p, e->n_bytes, (uint32_t)e->tag);
}
void koila__cpu_bytes_each(bool (*fn)(void *user, const void *p, uint64_t n_bytes, uint32_t tag),
                           void *user)
{
    each_request r = { fn, user };
    koila__ptrtab_each(&ledger.blocks, each_entry, &r);
}

int koila__cpu_bytes_add_event(koila__cpu_bytes_event fn)
{
    for (int i = 0; i < N_LISTENERS; i++)
        if (atomic_load(&listeners[i]) == fn)
            return 0;
    for (int i = 0; i < N_LISTENERS; i++) {
        koila__cpu_bytes_event none = NULL;
        if (atomic_compare_exchange_strong(&listeners[i], &none, fn))
            return 0;
    }
    return -1;
}
void koila__cpu_bytes_del_event(koila__cpu_bytes_event fn)
{
    for (int i = 0; i < N_LISTENERS; i++) {
        koila__cpu_bytes_event old = fn;
        atomic_compare_exchange_strong(&listeners[i], &old, NULL);
    }
}
void koila__cpu_bytes_set_tagger(uint32_t (*fn)(void))
{
    atomic_store_explicit(&tagger, fn, memory_order_release);
}
uint32_t (*koila__cpu_bytes_get_tagger(void))(void)
{
    return atomic_load_explicit(&tagger, memory_order_acquire);
}

/* ---- fork: the child starts its own count, without a limit; inherited blocks are not counted */

static void before_fork(void) { koila__ptrtab_fork_prepare(&ledger.blocks); }
static void after_fork_parent(void) { koila__ptrtab_fork_parent(&ledger.blocks); }
static void after_fork_child(void)
{
    koila__ledger_fork_child(&ledger);
    koila__accounts_fork_child();
    limited = NULL; /* its reference stays */
    own_room = 0;
    n_lifts = 0;
}

/* A thread that runs Python works for itself. Its state is found in its own storage: no lock. */
static bool runs_python(void) { return PyGILState_GetThisThreadState() != NULL; }

/* ---- Python */

PyDoc_STRVAR(cpu_bytes_install_doc,
             "cpu_bytes_install(plan=None) -> str\n\n"
             "Count PyTorch's CPU memory from now on. Returns 'A' or 'B' (see "
             "cpu_bytes.c) or 'unsupported: why'.\n"
             "plan='A' or 'B' allows only that one; it has an effect at the first call only.");
static PyObject *cpu_bytes_install(PyObject *self, PyObject *args)
{
    const char *wanted = NULL;
    if (!PyArg_ParseTuple(args, "|z:cpu_bytes_install", &wanted))
        return NULL;
    if (wanted)
        install(wanted[0]);
    else
        koila__cpu_bytes_listen();
    return PyUnicode_FromString(koila__cpu_bytes_plan());
}
static PyObject *cpu_bytes_uninstall(PyObject *self, PyObject *none)
{
    koila__cpu_bytes_uninstall();
    Py_RETURN_NONE;
}
static PyObject *cpu_bytes_ok(PyObject *self, PyObject *none)
{
    return PyBool_FromLong(koila__cpu_bytes_ok());
}
static PyObject *cpu_bytes_current(PyObject *self, PyObject *none)
{
    return PyLong_FromUnsignedLongLong(koila__cpu_bytes_current());
}
static PyObject *cpu_bytes_peak(PyObject *self, PyObject *none)
{
    return PyLong_FromUnsignedLongLong(koila__cpu_bytes_peak());
}
static PyObject *cpu_bytes_reset_peak(PyObject *self, PyObject *none)
{
    koila__cpu_bytes_reset_peak();
    Py_RETURN_NONE;
}
/* Reads a limit, or None for none. False: an exception is set. */
static bool read_limit(PyObject *bytes, uint64_t *limit)
{
    *limit = bytes == Py_None ? UINT64_MAX : PyLong_AsUnsignedLongLong(bytes);
    return !PyErr_Occurred();
}
static PyObject *limit_or_none(uint64_t limit)
{
    return limit == UINT64_MAX ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(limit);
}
static PyObject *cpu_bytes_set_limit(PyObject *self, PyObject *bytes)
{
    uint64_t limit;
    if (!read_limit(bytes, &limit))
        return NULL;
    koila__cpu_bytes_set_limit(limit);
    Py_RETURN_NONE;
}
static PyObject *cpu_bytes_lift_limit(PyObject *self, PyObject *on)
{
    const int more = PyObject_IsTrue(on);
    if (more < 0)
        return NULL;
    koila__cpu_bytes_lift_limit(more);
    Py_RETURN_NONE;
}
static PyObject *cpu_bytes_get_limit(PyObject *self, PyObject *none)
{
    const uint64_t limit = koila__cpu_bytes_get_limit();
    return limit_or_none(limit < NO_LIMIT ? limit : UINT64_MAX);
}
static PyObject *cpu_bytes_fail_nth(PyObject *self, PyObject *arg)
{
    long long n = PyLong_AsLongLong(arg);
    if (n == -1 && PyErr_Occurred())
        return NULL;
    koila__cpu_bytes_fail_nth(n);
    Py_RETURN_NONE;
}
static PyObject *cpu_bytes_n_allocs(PyObject *self, PyObject *none)
{
    return PyLong_FromLongLong(koila__cpu_bytes_n_allocs());
}
static PyObject *cpu_bytes_n_frees(PyObject *self, PyObject *none)
{
    return PyLong_FromLongLong(koila__cpu_bytes_n_frees());
}
static PyObject *cpu_bytes_generation(PyObject *self, PyObject *none)
{
    return PyLong_FromUnsignedLongLong(generation);
}

PyDoc_STRVAR(free_memory_doc, "free_memory(root='') -> dict\n\n"
                              "How many bytes this process can still take: the smallest of cgroup, "
                              "rlimits and MemAvailable, each None if\n"
                              "there is no such limit. Keys: free, bound (the name of the "
                              "smallest), cgroup, rlimit_data, rlimit_as,\n"
                              "available. root: where proc and sys are looked for, for tests.");
/* None for UINT64_MAX. */
static PyObject *bytes_or_none(uint64_t n)
{
    return n == UINT64_MAX ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(n);
}
/* Takes the reference to v. */
static bool put(PyObject *dict, const char *key, PyObject *v)
{
    bool ok = v && PyDict_SetItemString(dict, key, v) == 0;
    Py_XDECREF(v);
    return ok;
}
static PyObject *free_memory(PyObject *self, PyObject *args)
{
    const char *root = "";
    if (!PyArg_ParseTuple(args, "|s:free_memory", &root))
        return NULL;
    koila__freemem f;
    koila__freemem_read(root, &f);
    PyObject *d = PyDict_New();
    bool ok = d != NULL;
    for (int i = 0; ok && i < KOILA__FREEMEM_N; i++)
        ok = put(d, koila__freemem_name(i), bytes_or_none(f.bytes[i]));
    const bool bound = f.bound >= 0;
    ok = ok && put(d, "free", bytes_or_none(bound ? f.bytes[f.bound] : UINT64_MAX));
    ok = ok && put(d, "bound",
                   bound ? PyUnicode_FromString(koila__freemem_name(f.bound)) : Py_NewRef(Py_None));
    if (!ok)
        Py_CLEAR(d);
    return d;
}

static PyMethodDef methods[] = {
    { "cpu_bytes_install", cpu_bytes_install, METH_VARARGS, cpu_bytes_install_doc },
    { "cpu_bytes_uninstall", cpu_bytes_uninstall, METH_NOARGS,
      "Stop counting new blocks; known blocks are still subtracted when freed." },
    { "cpu_bytes_ok", cpu_bytes_ok, METH_NOARGS,
      "Is the count installed, and still in all its slots?" },
    { "cpu_bytes_current", cpu_bytes_current, METH_NOARGS,
      "Bytes allocated since the installation and not yet freed." },
    { "cpu_bytes_peak", cpu_bytes_peak, METH_NOARGS,
      "Highest cpu_bytes_current() since the last reset." },
    { "cpu_bytes_reset_peak", cpu_bytes_reset_peak, METH_NOARGS,
      "Set the peak to the current bytes." },
    { "cpu_bytes_set_limit", cpu_bytes_set_limit, METH_O,
      "Refuse allocations of any thread that would bring cpu_bytes_current() above this; None: no "
      "limit." },
    { "cpu_bytes_lift_limit", cpu_bytes_lift_limit, METH_O,
      "cpu_bytes_lift_limit(on): while on, nothing that this thread allocates is refused" },
    { "cpu_bytes_get_limit", cpu_bytes_get_limit, METH_NOARGS,
      "The limit in bytes on what this thread allocates, or None." },
    { "cpu_bytes_fail_nth", cpu_bytes_fail_nth, METH_O,
      "Refuse the nth allocation from now, for tests; 0: none." },
    { "cpu_bytes_n_allocs", cpu_bytes_n_allocs, METH_NOARGS,
      "Allocations granted since the installation." },
    { "cpu_bytes_n_frees", cpu_bytes_n_frees, METH_NOARGS,
      "Counted blocks freed since the installation." },
    { "cpu_bytes_generation", cpu_bytes_generation, METH_NOARGS,
      "Number of times other tools overwrote the hooks and the count restarted." },
    { "free_memory", free_memory, METH_VARARGS, free_memory_doc },
    { NULL, NULL, 0, NULL },
};

int koila__cpu_bytes_add_module(PyObject *m)
{
    static bool ready;
    if (!ready) {
        koila__ledger_init(&ledger, NULL);
        koila__accounts_init(runs_python);
        if (pthread_atfork(before_fork, after_fork_parent, after_fork_child) != 0) {
            PyErr_NoMemory();
            return -1;
        }
        ready = true;
    }
    return PyModule_AddFunctions(m, methods);
}
