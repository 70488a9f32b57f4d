/* nodes.c — finds the source line that made an autograd node, which gets the node's memory while
 * backward runs.
 *
 * Autograd numbers its nodes, per thread, in the order in which they are made, through one
 * function, at::sequence_number::get_and_increment(). As cpu_bytes.c does for memory, we put our
 * function into its slots in libtorch_cpu.so and libtorch_python.so, and note which lines of
 * profiled code are open when a number is assigned (linetab.h). During backward,
 * torch::autograd::get_current_node() is the node that runs.
 *
 * A node holds its number and the number of the thread that made it. Their offsets are found by
 * experiment on nodes for which both are known, from Python's _sequence_nr() and from
 * RecordFunction::currentThreadId(). If anything is not as expected, no node is noted, and the
 * column `backward` is blank.
 *
 * get_current_node() returns an owning pointer by value, and we must release our share. Either the
 * node counts its owners itself, in the low half of its second word (c10::intrusive_ptr; its third
 * word is then the number), or the pointer is a std::shared_ptr, whose second word points to a
 * block that counts them in the 32 bits after its vtable. The engine owns the node while it runs,
 * so ours is never the last share. The result is declared with three words, so that it is returned
 * through a hidden pointer, like that of a non-trivial C++ class.
 */
#include "memlab/memlab.h"

#include "base/vec.h"
#include "ground/got.h"

#define GET_AND_INCREMENT "_ZN2at15sequence_number17get_and_incrementEv"
#define GET_CURRENT_NODE "_ZN5torch8autograd16get_current_nodeEv"
#define CURRENT_THREAD_ID "_ZN2at14RecordFunction15currentThreadIdEv"

typedef struct owned_node {
    uint64_t *node;
    struct {
        void *vtable;
        _Atomic int32_t n_owners;
    } *owners; /* count of a shared_ptr */
    void *never_written;
} owned_node;

static uint64_t (*next_number)(void);
static uint64_t (*thread_id)(void);
static owned_node (*current_node)(void);
static koila__got_set slots;
static enum { NOT_YET, READY, CANNOT } state;
static int at_number, at_thread; /* indices of words in a node; 0: unknown */
/* at_number of a node that counts its owners itself, or is in a shared_ptr */
enum { INTRUSIVE = 2, SHARED = 3 };
enum { NODE_WORDS = 12 }; /* a node has more words in every version since 2.0 */
static _Atomic bool on;
static __thread uint64_t my_id;

KOILA__HOT static uint64_t hook_next_number(void)
{
    uint64_t number = next_number();
    koila__stack *s = koila__memlab_stack;
    if (s && (s->n || s->n_origins) && on) {
        if (!my_id)
            my_id = thread_id();
        koila_assert(state == READY);
        koila__lines_made(&koila__memlab_lines, s, my_id, number);
    }
    return number;
}

/* The node that runs backward on this thread. False: none, or nodes are not noted. */
KOILA__HOT static bool running_node(uint64_t *number, uint64_t *thread)
{
    if (!on || !atomic_load_explicit(&koila__memlab_lines.n_made, memory_order_relaxed))
        return false;
    owned_node now = current_node();
    if (!now.node)
        return false;
    koila_assert(at_number >= INTRUSIVE && at_thread > 0);
    *number = now.node[at_number];
    *thread = now.node[at_thread];
    if (at_number == INTRUSIVE)
        __atomic_fetch_sub(&now.node[1], 1, __ATOMIC_ACQ_REL);
    else
        atomic_fetch_sub_explicit(&now.owners->n_owners, 1, memory_order_acq_rel);
    return *number != UINT64_MAX; /* AccumulateGrad of a leaf has no number: no line made it */
}
KOILA__HOT void koila__nodes_credit(int device, int64_t delta)
{
    uint64_t number, thread;
    if (delta > 0 && running_node(&number, &thread))
        koila__lines_credit_node(&koila__memlab_lines, thread, number, device, (uint64_t)delta);
}

/* The nodes of one tape that a lazy backward captured, in order. */
typedef struct captured_node {
    uint32_t node;
    koila__origin_path path;
} captured_node;
static VEC(captured_node) captured;
static uint64_t captured_tape;

void koila__nodes_captured(uint64_t tape, uint32_t node)
{
    uint64_t number, thread;
    if (!running_node(&number, &thread))
        return;
    if (tape != captured_tape || (captured.n && captured.at[captured.n - 1].node >= node))
        captured.n = 0;
    captured_tape = tape;
    if (!koila__vec_reserve(&koila__libc, &captured, 1))
        return; /* no line is credited with its memory */
    captured.at[captured.n++] =
        (captured_node){ node, koila__lines_path_of(&koila__memlab_lines, thread, number) };
}
koila__origin_path koila__nodes_path_of_captured(uint64_t tape, uint32_t node)
{
    uint32_t lo = 0;
    uint32_t hi = tape == captured_tape ? captured.n : 0;
    const uint32_t n = hi;
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (captured.at[mid].node < node)
            lo = mid + 1;
        else
            hi = mid;
    }
    bool found = lo < n && captured.at[lo].node == node;
    return found ? captured.at[lo].path : (koila__origin_path){ 0 };
}

/* Bit masks of the words in a Python wrapper's node that hold `number`, and this thread's
 * number. */
static void look_into(PyObject *wrapper, uint64_t number, uint64_t *numbers, uint64_t *threads)
{
    const uint64_t *words = *(const uint64_t **)(wrapper + 1); /* the wrapper's shared_ptr */
    const uint64_t thread = thread_id();
    for (int w = INTRUSIVE; words && w < NODE_WORDS; w++) {
        *numbers |= (uint64_t)(words[w] == number) << w;
        *threads |= (uint64_t)(words[w] == thread) << w;
    }
}

/* Makes a node of x and looks into it; `before` is the number of the last one. */
static bool try_node(PyObject *x, uint64_t *before, uint64_t *numbers, uint64_t *threads)
{
    PyObject *y = PyObject_CallMethod(x, "mul", "i", 2);
    PyObject *node = y ? PyObject_GetAttrString(y, "grad_fn") : NULL;
    PyObject *number = node ? PyObject_CallMethod(node, "_sequence_nr", NULL) : NULL;
    uint64_t expected = number ? PyLong_AsUnsignedLongLong(number) : 0;
    bool ok = number && !PyErr_Occurred() && expected != *before;
    if (ok)
        look_into(node, expected, numbers, threads);
    *before = expected;
    Py_XDECREF(number);
    Py_XDECREF(node);
    Py_XDECREF(y);
    return ok;
}

/* Makes three nodes to find the words that hold their numbers, and this thread's. */
static bool find_offsets(PyObject *torch)
{
    uint64_t always_number = ~0ull, always_thread = ~0ull, before = ~0ull;
    PyObject *x = PyObject_CallMethod(torch, "zeros", "i", 1);
    PyObject *r = x ? PyObject_CallMethod(x, "requires_grad_", NULL) : NULL;
    bool ok = r != NULL;
    for (int i = 0; ok && i < 3; i++) {
        uint64_t numbers = 0, threads = 0;
        ok = try_node(x, &before, &numbers, &threads);
        always_number &= numbers;
        always_thread &= threads;
    }
    Py_XDECREF(r);
    Py_XDECREF(x);
    PyErr_Clear();
    if (!ok || !always_number)
        return false;
    at_number = __builtin_ctzll(always_number);
    always_thread &= ~(1ull << at_number);
    /* the last match: an earlier word may hold the same small number */
    at_thread = always_thread ? 63 - __builtin_clzll(always_thread) : 0;
    return at_thread && (at_number == INTRUSIVE || at_number == SHARED);
}

static bool install(PyObject *torch)
{
    char path[4096];
    if (!koila__got_path("libtorch_cpu.so", path, sizeof path))
        return false;
    void *made = koila__got_symbol(path, GET_AND_INCREMENT);
    void *running = koila__got_symbol(path, GET_CURRENT_NODE);
    void *id = koila__got_symbol(path, CURRENT_THREAD_ID);
    if (!made || !running || !id)
        return false;
    memcpy(&next_number, &made, sizeof made);
    memcpy(&current_node, &running, sizeof running);
    memcpy(&thread_id, &id, sizeof id);
    return find_offsets(torch) && !current_node().node;
}

void koila__nodes_listen(bool want)
{
    if (state == NOT_YET && want) {
        PyObject *name = PyUnicode_FromString("torch");
        PyObject *torch = name ? PyImport_GetModule(name) : NULL;
        if (torch)
            state = install(torch) ? READY : CANNOT;
        Py_XDECREF(torch);
        Py_XDECREF(name);
        PyErr_Clear();
    }
    if (state != READY || on == want)
        return;
    if (want) {
        int a = koila__got_patch(&slots, "libtorch_cpu.so", GET_AND_INCREMENT,
                                 (void *)hook_next_number);
        int b = koila__got_patch(&slots, "libtorch_python.so", GET_AND_INCREMENT,
                                 (void *)hook_next_number);
        on = a > 0 && b >= 0;
        koila__memlab_lines.sees_nodes = on;
    }
    if (!want || !on) {
        on = false;
        koila__got_restore(&slots, (void *)hook_next_number);
    }
}
