/* events.c — passes the allocators' events to the meter; handles threads and forks.
 *
 * cpu_bytes.c counts every block of the CPU and calls us after each event; accelerators.c does the
 * same for the other devices. An event goes to the meter, and then to at most two listeners. A
 * listener is one pointer, NULL while it is off. Events come on any thread, under an allocator's
 * lock, without the GIL: atomics only.
 *
 * An event in flight may still read a thread's state when the thread ends. So states are never
 * freed, only reused.
 */
#include "memlab/memlab.h"

#include <pthread.h>

#include "ground/cpu_bytes.h"

koila__meter koila__memlab_meter;
koila__lines koila__memlab_lines;
__thread koila__stack *koila__memlab_stack;
static __thread koila__flow *my_flow; /* NULL: none yet, or too many threads */
static _Atomic(koila__listener) listeners[KOILA__LISTENS_N];

#define METER (&koila__memlab_meter)

static koila__flow *take_flow(void);

KOILA__HOT static inline void tell_listener(koila__listens purpose, int device, const void *p,
                                            int64_t delta, uint64_t now)
{
    koila__listener fn = atomic_load_explicit(&listeners[purpose], memory_order_acquire);
    if (fn)
        fn(device, p, delta, now);
}

KOILA__HOT void koila__events_tell(int device, const void *p, int64_t delta, uint64_t now,
                                   uint64_t reserved)
{
    koila_assert(device >= 0 && device < METER->n_devices);
    koila__stack *s = koila__memlab_stack;
    koila__meter_event(METER, my_flow ? my_flow : take_flow(), s ? &s->thread : NULL, device, delta,
                       now, reserved);
    tell_listener(KOILA__LISTENS_CREDIT, device, p, delta, now);
    tell_listener(KOILA__LISTENS_TIMELINE, device, p, delta, now);
}

void koila__events_set_listener(koila__listens purpose, koila__listener fn)
{
    koila_assert(purpose >= 0 && purpose < KOILA__LISTENS_N);
    atomic_store_explicit(&listeners[purpose], fn, memory_order_release);
}

/* ---- the CPU */

static bool pretend;             /* tests feed the CPU's events themselves */
static uint64_t generation_seen; /* koila__cpu_bytes_generation() when the meter was last set */

KOILA__HOT static void on_cpu_event(const void *p, int64_t delta, uint64_t now)
{
    koila__events_tell(0, p, delta, now, UINT64_MAX);
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

void koila__events_listen_to_cpu(void)
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

bool koila__events_hear_cpu(void) { return pretend || koila__cpu_bytes_ok(); }
bool koila__events_lost_cpu(uint64_t generation)
{
    return !pretend && (!koila__cpu_bytes_ok() || koila__cpu_bytes_generation() != generation);
}

/* ---- threads and forks */

static pthread_key_t thread_ends;
static pthread_mutex_t spare_lock = PTHREAD_MUTEX_INITIALIZER;
static koila__stack *spare_stacks[KOILA__THREADS_MAX]; /* of ended threads */
static int n_spare_stacks;

/* Runs once per thread, inside an allocator. */
static __attribute__((noinline, cold)) koila__flow *take_flow(void)
{
    my_flow = koila__meter_take_flow(METER);
    /* end_thread() runs for threads whose value is not NULL; the value itself is not used */
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
    s->n = 0;
    s->n_lost = 0;
    pthread_mutex_lock(&spare_lock);
    koila_assert(n_spare_stacks >= 0 && n_spare_stacks <= KOILA__THREADS_MAX);
    if (n_spare_stacks < KOILA__THREADS_MAX)
        spare_stacks[n_spare_stacks++] = s;
    else
        koila__meter_del_thread(METER, &s->thread);
    pthread_mutex_unlock(&spare_lock);
}

koila__stack *koila__events_my_stack(void)
{
    if (koila__memlab_stack)
        return koila__memlab_stack;
    pthread_mutex_lock(&spare_lock);
    koila__stack *s = n_spare_stacks ? spare_stacks[--n_spare_stacks] : NULL;
    pthread_mutex_unlock(&spare_lock);
    koila_assert(!s || (s->n == 0 && s->thread.flow == NULL));
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
    koila__meter_fork_child(METER, my_flow, s ? &s->thread : NULL);
    for (size_t i = 0; s && i < s->n; i++) {
        memset(s->activations[i]->w.saved, 0, sizeof s->activations[i]->w.saved);
        memset(s->activations[i]->w.start_bytes, 0, sizeof s->activations[i]->w.start_bytes);
    }
}

/* ---- Python */

/* For tests: acts as an allocator. memlab_event(device, delta, thread=True). Device 0 needs no
 * torch then. */
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
    { "memlab_event", memlab_event, METH_VARARGS,
      "For tests: memlab_event(device, delta, own_thread=True)." },
    { NULL, NULL, 0, NULL },
};

int koila__events_add_module(PyObject *m)
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
    return PyModule_AddFunctions(m, methods);
}
