/* random.c — moves the CPU generator forward without drawing.
 *
 * PyTorch's CPU generator is MT19937. Some operators take the same number of its 32-bit words for
 * every element, in the order of memory: uniform_, and dropout's bernoulli_ where it does not use
 * MKL. They can draw any rows of a tensor once the state has been moved past the rows before.
 * Whether an operator does this is tested on the installed build, never assumed: _words in
 * koila._random.
 *
 * A state is the bytes of torch.Generator.get_state(): seed u64, left i32, seeded i32, next u64,
 * state u64[624] (32 bits used), then the cache of normal_. `left` counts down to the next twist,
 * `next` is the word to read (at/core/MT19937RNGEngine.h; Matsumoto and Nishimura 1998).
 *
 * Note [Generators beside threads]. What is recorded needs the state before its draw, and moves the
 * generator behind it. No call of torch does both, so two are made, and from the one to the other
 * this thread keeps the interpreter lock: no other thread can begin a draw there. A draw that has
 * begun has let go of that lock, and may not have taken the generator's own yet. It is waited for:
 * a state counts when the next reading agrees. What cannot be had from outside of torch: a thread
 * that stops just there for longer than the readings take, and goes on between the last one and the
 * move, draws the same numbers.
 */
#include "ground/random.h"

#include <string.h>

enum { N = 624, M = 397, STATE_BYTES = 5056, AT_LEFT = 8, AT_NEXT = 16, AT_WORDS = 24 };

static uint32_t mixed(uint32_t a, uint32_t b, uint32_t far)
{
    const uint32_t y = (a & 0x80000000u) | (b & 0x7fffffffu);
    return far ^ (y >> 1) ^ ((0u - (b & 1u)) & 0x9908b0dfu);
}

static void twist(uint32_t w[N])
{
    for (int i = 0; i < N - M; i++)
        w[i] = mixed(w[i], w[i + 1], w[i + M]);
    for (int i = N - M; i < N - 1; i++)
        w[i] = mixed(w[i], w[i + 1], w[i + M - N]);
    w[N - 1] = mixed(w[N - 1], w[0], w[M - 1]);
}

static void mt19937_skip(uint8_t state[STATE_BYTES], uint64_t n)
{
    int32_t left;
    uint64_t next, wide[N];
    uint32_t w[N];
    if (!n)
        return;
    memcpy(&left, state + AT_LEFT, sizeof left);
    memcpy(&next, state + AT_NEXT, sizeof next);
    /* a draw first decrements `left`, and twists at 0 */
    if (n < (uint64_t)left) {
        left -= (int32_t)n;
        next += n;
    } else {
        n -= (uint64_t)left - 1;
        memcpy(wide, state + AT_WORDS, sizeof wide);
        for (int i = 0; i < N; i++)
            w[i] = (uint32_t)wide[i];
        for (;;) {
            twist(w);
            if (n <= N)
                break;
            n -= N;
        }
        for (int i = 0; i < N; i++)
            wide[i] = w[i];
        memcpy(state + AT_WORDS, wide, sizeof wide);
        left = N - (int32_t)n + 1;
        next = n;
    }
    memcpy(state + AT_LEFT, &left, sizeof left);
    memcpy(state + AT_NEXT, &next, sizeof next);
}

/* ---- states as bytes objects, so that a tape keeps none of torch's memory */

/* The memory of a contiguous uint8 CPU tensor. NULL with an exception. */
static uint8_t *memory_of(PyObject *state, Py_ssize_t *n)
{
    PyObject *size = PyObject_CallMethod(state, "numel", NULL);
    PyObject *at = size ? PyObject_CallMethod(state, "data_ptr", NULL) : NULL;
    uint8_t *p = at ? PyLong_AsVoidPtr(at) : NULL;
    *n = size ? PyLong_AsSsize_t(size) : -1;
    Py_XDECREF(size);
    Py_XDECREF(at);
    return p;
}

/* of the tensor that torch.Generator.get_state() returns */
static PyObject *state_bytes(PyObject *tensor)
{
    Py_ssize_t n;
    const uint8_t *p = memory_of(tensor, &n);
    return p ? PyBytes_FromStringAndSize((const char *)p, n) : NULL;
}

PyObject *koila__generator_get(PyObject *generator)
{
    PyObject *state = PyObject_CallMethod(generator, "get_state", NULL);
    PyObject *bytes = state ? state_bytes(state) : NULL;
    Py_XDECREF(state);
    return bytes;
}

static int wrong_size(void)
{
    PyErr_SetString(PyExc_RuntimeError, "koila: this is the state of another kind of generator");
    return -1;
}

int koila__generator_set(PyObject *generator, PyObject *bytes)
{
    Py_ssize_t n;
    PyObject *state = PyObject_CallMethod(generator, "get_state", NULL);
    PyObject *r = NULL;
    /* this tensor has the right size; its contents are replaced */
    uint8_t *p = state ? memory_of(state, &n) : NULL;
    if (p && n != PyBytes_GET_SIZE(bytes))
        wrong_size();
    else if (p) {
        memcpy(p, PyBytes_AS_STRING(bytes), (size_t)n);
        r = PyObject_CallMethod(generator, "set_state", "O", state);
    }
    Py_XDECREF(state);
    Py_XDECREF(r);
    return r ? 0 : -1;
}

int koila__generator_set_by(PyObject *generator, PyObject *state, PyObject *memory, PyObject *bytes)
{
    if (PyByteArray_GET_SIZE(memory) != PyBytes_GET_SIZE(bytes))
        return wrong_size();
    memcpy(PyByteArray_AS_STRING(memory), PyBytes_AS_STRING(bytes),
           (size_t)PyBytes_GET_SIZE(bytes));
    PyObject *r = PyObject_CallMethod(generator, "set_state", "O", state);
    Py_XDECREF(r);
    return r ? 0 : -1;
}

/* What the readings of a generator's state hold until its move is done: torch lets go of the
 * interpreter lock to free a tensor, and a collection of garbage runs Python. */
typedef struct readings {
    PyObject *states; /* list of tensors */
    PyObject *before; /* the state that the last two agree on */
    PyObject *after;  /* n_words further */
    PyObject *last;   /* tensor, borrowed from states */
    uint8_t *memory;  /* of last */
    int collects;     /* was the collector on, and is off? */
} readings;

static int read_once(readings *r, PyObject *generator, Py_ssize_t *n)
{
    r->last = PyObject_CallMethod(generator, "get_state", NULL);
    if (!r->last)
        return -1;
    const int status = PyList_Append(r->states, r->last);
    Py_DECREF(r->last);
    r->memory = status == 0 ? memory_of(r->last, n) : NULL;
    return r->memory ? 0 : -1;
}

/* Reads until two readings in a row agree. -1 with an exception. */
static int readings_init(readings *r, PyObject *generator, uint64_t n_words)
{
    Py_ssize_t n = 0;
    *r = (readings){ .collects = PyGC_Disable(), .states = PyList_New(0) };
    if (!r->states)
        return -1;
    for (;;) {
        if (read_once(r, generator, &n) < 0)
            return -1;
        if (r->before && n == PyBytes_GET_SIZE(r->before) &&
            memcmp(r->memory, PyBytes_AS_STRING(r->before), (size_t)n) == 0)
            return 0;
        Py_XSETREF(r->before, PyBytes_FromStringAndSize((const char *)r->memory, n));
        Py_XSETREF(r->after, r->before ? koila__generator_skipped(r->before, n_words) : NULL);
        if (!r->after)
            return -1;
    }
}

static void collect_again(readings *r)
{
    if (r->collects)
        PyGC_Enable();
    r->collects = 0;
}

/* The state before, if `is_done`, as a new reference. */
static PyObject *readings_deinit(readings *r, bool is_done)
{
    PyObject *before = is_done ? Py_NewRef(r->before) : NULL;
    collect_again(r);
    Py_XDECREF(r->before);
    Py_XDECREF(r->after);
    Py_XDECREF(r->states);
    return before;
}

PyObject *koila__generator_take(PyObject *generator, uint64_t n_words)
{
    readings r;
    PyObject *done = NULL;
    if (readings_init(&r, generator, n_words) == 0) {
        memcpy(r.memory, PyBytes_AS_STRING(r.after), (size_t)PyBytes_GET_SIZE(r.after));
        done = PyObject_CallMethod(generator, "set_state", "O", r.last);
    }
    Py_XDECREF(done);
    return readings_deinit(&r, done);
}

PyObject *koila__generator_draw(PyObject *generator, PyObject *op, PyObject *args, PyObject *kwargs)
{
    readings r;
    PyObject *drawn = NULL;
    if (readings_init(&r, generator, 0) == 0) {
        collect_again(&r); /* others run during the draw, and may look at the collector */
        drawn = PyObject_Call(op, args, kwargs);
    }
    PyObject *before = readings_deinit(&r, drawn);
    Py_XDECREF(drawn);
    return before;
}

bool koila__is_cpu_state(PyObject *bytes) { return PyBytes_GET_SIZE(bytes) == STATE_BYTES; }

PyObject *koila__generator_skipped(PyObject *bytes, uint64_t n_words)
{
    if (!n_words)
        return Py_NewRef(bytes);
    if (PyBytes_GET_SIZE(bytes) != STATE_BYTES) {
        wrong_size();
        return NULL;
    }
    PyObject *out = PyBytes_FromStringAndSize(PyBytes_AS_STRING(bytes), STATE_BYTES);
    if (out)
        mt19937_skip((uint8_t *)PyBytes_AS_STRING(out), n_words);
    return out;
}

static PyObject *py_skip(PyObject *self, PyObject *args)
{
    PyObject *state;
    unsigned long long words;
    Py_ssize_t n;
    (void)self;
    if (!PyArg_ParseTuple(args, "OK:generator_skip", &state, &words))
        return NULL;
    uint8_t *p = memory_of(state, &n);
    if (!p)
        return NULL;
    if (n != STATE_BYTES)
        return PyErr_Format(PyExc_ValueError,
                            "koila: expected the %d bytes of a CPU generator's state, got %zd",
                            STATE_BYTES, n);
    mt19937_skip(p, words);
    Py_RETURN_NONE;
}

static PyObject *py_take(PyObject *self, PyObject *args)
{
    PyObject *generator;
    unsigned long long words;
    (void)self;
    if (!PyArg_ParseTuple(args, "OK:generator_take", &generator, &words))
        return NULL;
    return koila__generator_take(generator, words);
}

static PyObject *py_draw(PyObject *self, PyObject *args)
{
    PyObject *generator, *op, *rest, *kwargs;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO!O!:generator_draw", &generator, &op, &PyTuple_Type, &rest,
                          &PyDict_Type, &kwargs))
        return NULL;
    return koila__generator_draw(generator, op, rest, kwargs);
}

static PyMethodDef methods[] = {
    { "generator_take", py_take, METH_VARARGS,
      "generator_take(generator, n): move the generator n 32-bit words forward; its state before" },
    { "generator_draw", py_draw, METH_VARARGS,
      "generator_draw(generator, op, args, kwargs): call op, which draws from the generator; the "
      "state before" },
    { "generator_skip", py_skip, METH_VARARGS,
      "generator_skip(state, n): move the state, a uint8 tensor, n 32-bit words forward" },
    { 0 },
};

int koila__random_add_module(PyObject *m) { return PyModule_AddFunctions(m, methods); }
