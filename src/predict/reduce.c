/* reduce.c — what a reduction uses inside on CUDA. All is [read] in PyTorch 2.13: the order of
 * dimensions in TensorIterator.cpp, the launch in cuda/Reduce.cuh (setReduceConfig), the copy in
 * another dtype in the header of ReduceOps.
 *
 * Blocks that share an output put their partial results into global memory: one for each thread
 * unless a block's threads reduce along x, and a counter for each block of outputs.
 */
#include "base/base.h"
#include "predict/inside.h"

enum { FLOAT_BYTES = 4, COUNTER_BYTES = 4 };
enum { MAX_THREADS = 512, WARP = 32, VECTOR = 4, VECTOR_FROM = 128 };
enum { FEWEST_VALUES = 16, MOST_VALUES = 256 }; /* that one thread adds up */

/* Dimensions as the kernel sees them: the fastest first, neighbours joined where they can be.
 * Strides are in elements; that of a reduced dimension of the output is 0. */
typedef struct dims {
    uint32_t n;
    int64_t size[KOILA_MAX_DIMS], in[KOILA_MAX_DIMS], out[KOILA_MAX_DIMS];
} dims;

static int64_t at_least_1(int64_t n) { return n < 1 ? 1 : n; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t div_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

static int64_t last_power_of_2(int64_t n)
{
    int64_t p = 1;
    while (p <= n / 2)
        p *= 2;
    return p;
}

/* ---- dimensions */

/* > 0: dimension b must come before a; < 0: a before b; 0: either. */
static int compare(const dims *d, uint32_t a, uint32_t b)
{
    if ((d->out[a] == 0) != (d->out[b] == 0))
        return d->out[b] == 0 ? 1 : -1;
    const int64_t *const of[] = { d->out, d->in };
    for (int i = 0; i < 2; i++) {
        const int64_t x = of[i][a];
        const int64_t y = of[i][b];
        if (x == 0 || y == 0)
            continue;
        if (x != y)
            return x < y ? -1 : 1;
        if (d->size[a] > d->size[b])
            return 1;
    }
    return 0;
}

static void swap(int64_t *list, uint32_t a, uint32_t b)
{
    const int64_t x = list[a];
    list[a] = list[b];
    list[b] = x;
}

static void sort_dims(dims *d)
{
    for (uint32_t i = 1; i < d->n; i++) {
        uint32_t at = i;
        for (uint32_t k = i; k-- > 0;) {
            const int order = compare(d, k, at);
            if (order < 0)
                break;
            if (order == 0)
                continue;
            swap(d->size, k, at);
            swap(d->in, k, at);
            swap(d->out, k, at);
            at = k;
        }
    }
}

static void join_dims(dims *d)
{
    uint32_t last = 0;
    for (uint32_t i = 1; i < d->n; i++) {
        const bool joins =
            d->size[last] == 1 || d->size[i] == 1 ||
            (d->size[last] * d->in[last] == d->in[i] && d->size[last] * d->out[last] == d->out[i]);
        if (!joins)
            last++;
        else if (d->size[last] != 1) {
            d->size[last] *= d->size[i];
            continue;
        }
        const int64_t size = joins ? d->size[last] * d->size[i] : d->size[i];
        d->size[last] = size;
        d->in[last] = d->in[i];
        d->out[last] = d->out[i];
    }
    if (d->n)
        d->n = last + 1;
}

/* The dimensions of input x reduced over `set`, with `size` rows in its first dimension. */
static dims dims_of(const koila_meta_info *x, uint32_t set, int64_t rows)
{
    dims d = { .n = x->n_dims };
    int64_t stride = 1;
    for (uint32_t i = 0; i < x->n_dims; i++) {
        const uint32_t from = x->n_dims - 1 - i;
        d.size[i] = from == 0 ? rows : x->size[from];
        d.in[i] = x->stride[from];
        if (set >> from & 1)
            continue;
        d.out[i] = stride;
        stride *= d.size[i];
    }
    sort_dims(&d);
    join_dims(&d);
    return d;
}

static int64_t extent(const dims *d, const int64_t *stride, int64_t bytes)
{
    int64_t n = 1;
    for (uint32_t i = 0; i < d->n; i++)
        n += (d->size[i] - 1) * stride[i] * bytes;
    return n;
}

/* Offsets of more than 31 bits: the largest dimension is halved until there are none. True if it
 * was. */
static bool halve_to_fit(dims *d, int64_t in_bytes, int64_t out_bytes)
{
    bool halved = false;
    while (extent(d, d->in, in_bytes) > INT32_MAX || extent(d, d->out, out_bytes) > INT32_MAX) {
        uint32_t widest = 0;
        int64_t width = -1;
        for (uint32_t i = d->n; i-- > 0;) {
            const int64_t step = most(d->in[i] * in_bytes, d->out[i] * out_bytes);
            if ((d->size[i] - 1) * step > width) {
                width = (d->size[i] - 1) * step;
                widest = i;
            }
        }
        d->size[widest] -= d->size[widest] / 2;
        halved = true;
    }
    return halved;
}

/* ---- the launch */

/* Outputs that a thread loads at once. */
static int64_t output_vector(const dims *d, uint32_t n_reduced)
{
    int64_t n = VECTOR;
    for (uint32_t i = 0; i < d->n; i++)
        while ((i == n_reduced ? d->size[i] : d->in[i]) % n != 0)
            n /= 2;
    return n;
}

typedef struct block {
    int64_t width, height;
} block;

static block block_of(int64_t x, int64_t y, int64_t vector)
{
    const int64_t threads = MAX_THREADS / vector;
    const int64_t x2 = x < threads ? last_power_of_2(at_least_1(x)) : threads;
    const int64_t y2 = y < threads ? last_power_of_2(at_least_1(y)) : threads;
    block b = { .width = least(x2, WARP) };
    b.height = least(y2, threads / b.width);
    b.width = least(x2, threads / b.height);
    return b;
}

/* Adds the partial results and the counters, if blocks share an output. Whole because it is
 * setReduceConfig, step by step in its order. */
static void add_staging(const dims *d, int64_t bytes, int64_t threads_per_sm, int64_t sms,
                        koila__temps *t)
{
    uint32_t n_reduced = 0;
    int64_t outputs = 1;
    int64_t inputs = 1; /* of one output */
    for (uint32_t i = 0; i < d->n; i++) {
        const bool is_reduced = d->out[i] == 0 && d->size[i] > 1;
        n_reduced += is_reduced;
        *(d->out[i] == 0 ? &inputs : &outputs) *= d->size[i];
    }
    const bool along_fastest = n_reduced == d->n || d->in[0] < d->in[n_reduced];
    int64_t x = along_fastest ? inputs : outputs;
    const int64_t y = along_fastest ? outputs : inputs;
    const bool is_dense = d->n == 0 || d->in[along_fastest ? 0 : n_reduced] == 1;
    int64_t vector = 1;
    if (is_dense && along_fastest && x >= VECTOR_FROM && n_reduced == 1)
        x /= VECTOR;
    else if (is_dense && !along_fastest) {
        vector = output_vector(d, n_reduced);
        x /= vector;
    }
    const block b = block_of(x, y, vector);
    int64_t step_in = along_fastest ? b.width : 1;
    int64_t step_out = along_fastest ? 1 : b.width;
    const bool splits_warps =
        div_up(inputs, step_in) >= least(b.height * FEWEST_VALUES, MOST_VALUES);
    *(splits_warps ? &step_in : &step_out) *= b.height;
    const int64_t target = sms * (threads_per_sm / (b.width * b.height));
    const int64_t grid = div_up(outputs / vector, step_out);
    const int64_t values = div_up(inputs, step_in);
    if (!splits_warps || values < MOST_VALUES || grid > target)
        return;
    const int64_t few = least(div_up(target, grid), div_up(values, FEWEST_VALUES));
    const int64_t sharing = most(few, div_up(values, MOST_VALUES));
    if (sharing <= 1)
        return;
    const int64_t of_threads = along_fastest ? 1 : b.width * vector;
    t->bytes[t->n++] = (uint64_t)(bytes * outputs * sharing * of_threads);
    t->bytes[t->n++] = (uint64_t)(COUNTER_BYTES * grid);
}

/* ---- the call */

/* Bit d: dimension d is reduced. All of them when the call names none. */
static uint32_t reduced_set(const koila_sig_info *sig, uint32_t pos, uint32_t n_dims)
{
    const uint32_t all = (uint32_t)(((uint64_t)1 << n_dims) - 1);
    const koila_arg *a = pos < sig->n_pos ? &sig->tokens[sig->start[pos]] : NULL;
    uint32_t set = 0;
    if (!a || (a->kind != KOILA_ARG_LIST && a->kind != KOILA_ARG_INT))
        return all;
    const uint32_t n = a->kind == KOILA_ARG_LIST ? a->n : 1;
    for (uint32_t i = 0; i < n; i++) {
        const koila_arg *e = a->kind == KOILA_ARG_LIST ? a + 1 + i : a;
        const int64_t d = e->u.i < 0 ? e->u.i + n_dims : e->u.i;
        if (e->kind == KOILA_ARG_INT && d >= 0 && d < n_dims)
            set |= 1u << d;
    }
    return set ? set : all;
}

static int64_t threads_per_sm(uint64_t capability)
{
    switch (capability) {
    case 75:
        return 1024;
    case 86:
    case 87:
    case 89:
    case 110:
    case 120:
    case 121:
        return 1536;
    default:
        return 2048;
    }
}

static int64_t computed_bytes(koila_dtype dtype)
{
    return koila__is_half(dtype) ? FLOAT_BYTES : (int64_t)koila_dtype_bytes(dtype);
}

koila__temps koila__reduction(const koila__cuda_call *k, uint32_t pos_dims)
{
    koila__temps t = { .n = 0 };
    if (!k->sig->n_inputs || !k->sig->n_outputs || k->sig->outputs[0] == KOILA_NONE)
        return t;
    const koila_meta_info *x = koila_meta_get(k->t, k->sig->inputs[0]);
    const koila_meta_info *out = koila_meta_get(k->t, k->sig->outputs[0]);
    if (!x->n_elements)
        return t;
    const int64_t rows =
        x->n_dims ? at_least_1((int64_t)((double)x->size[0] * k->part + 0.999)) : 1;
    dims d = dims_of(x, reduced_set(k->sig, pos_dims, x->n_dims), rows);
    koila_dtype dtype = x->dtype;
    if (x->dtype != out->dtype && !(koila__is_half(x->dtype) && out->dtype == KOILA_DTYPE_F32)) {
        dtype = out->dtype; /* a copy in the dtype of the result */
        const uint64_t n = (uint64_t)((double)x->n_elements * k->part + 0.999);
        t.bytes[t.n++] = n * koila_dtype_bytes(dtype);
    }
    const bool is_narrow = koila__is_half(out->dtype);
    if (halve_to_fit(&d, (int64_t)koila_dtype_bytes(dtype),
                     (int64_t)koila_dtype_bytes(out->dtype)) &&
        is_narrow) /* the halves are added up in float32 */
        t.bytes[t.n++] = out->n_elements * FLOAT_BYTES;
    const uint64_t capability = koila_device_get(k->d, KOILA_DEVICE_CAPABILITY).value;
    const int64_t sms = (int64_t)koila_device_get(k->d, KOILA_DEVICE_SM_COUNT).value;
    add_staging(&d, computed_bytes(dtype), threads_per_sm(capability), sms, &t);
    koila_assert(t.n <= KOILA__MAX_TEMPS);
    return t;
}
