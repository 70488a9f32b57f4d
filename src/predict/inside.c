/* inside.c — what operators use inside on CUDA.
 *
 * A step recorded on a CPU shows the results of every operator, but not the memory that CUDA's
 * kernels take besides: workspaces, staged partial sums, sort buffers. cuda_ops.def gives each
 * operator a kind; here each kind has its bytes. Formulas marked [read] are those of PyTorch 2.13's
 * sources, in the file named; [estimated] numbers are guesses, and low and high enclose them.
 */
#include "predict/inside.h"

#include "base/base.h"
#include "placement/rules.h"

#include <stdlib.h>

#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)

/* Bytes of the types that kernels compute and count in, whatever the dtype of the operands. */
enum { FLOAT_BYTES = 4, INDEX_BYTES = 8 };

/* ---- kinds */

static const struct {
    const char *name;
    koila__inside_kind kind;
} cuda_ops[] = {
#define KOILA_CUDA(name, kind) { name, KOILA__INSIDE_##kind },
#include "predict/cuda_ops.def"
#undef KOILA_CUDA
};

enum { BASE_NAME = 80 };
/* "aten::add_.Tensor" -> "add". Other namespaces are kept: "mine::odd" -> "mine::odd". */
static void base_name(const char *full, char out[BASE_NAME])
{
    const char *p = !strncmp(full, "aten::", 6) ? full + 6 : full;
    size_t n = 0;
    while (p[n] && p[n] != '.' && n + 1 < BASE_NAME) {
        out[n] = p[n];
        n++;
    }
    if (n > 1 && out[n - 1] == '_')
        n--;
    out[n] = 0;
}

koila__inside_kind koila__inside_of(const koila_table *t, koila_op op)
{
    char name[BASE_NAME];
    if (koila_op_flags(t, op) & KOILA_OP_VIEW)
        return KOILA__INSIDE_VIEW;
    base_name(koila_op_name(t, op), name);
    for (size_t i = 0; i < KOILA_COUNT(cuda_ops); i++)
        if (!strcmp(cuda_ops[i].name, name))
            return cuda_ops[i].kind;
    return koila_op_facts(t, op) & KOILA_FACT_PSEUDO ? KOILA__INSIDE_REDUCE : KOILA__INSIDE_UNKNOWN;
}

/* ---- helpers of the formulas */

/* The slice's share of `n` of the whole batch, rounded up. */
static uint64_t scaled(const koila__cuda_call *k, uint64_t n)
{
    return (uint64_t)((double)n * k->part + 0.999);
}

static uint64_t ceil_div(uint64_t n, uint64_t by) { return (n + by - 1) / by; }
static uint64_t round_up(uint64_t n, uint64_t to) { return ceil_div(n, to) * to; }
static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t pick(koila__level level, uint64_t low, uint64_t expected, uint64_t high)
{
    if (level == KOILA__LOW)
        return low;
    return level == KOILA__HIGH ? high : expected;
}

static uint64_t field(const koila_device *d, koila_device_field f)
{
    return koila_device_get(d, f).value;
}

static uint64_t field_at(const koila_device *d, koila_device_field f, koila__level level)
{
    const koila_device_value v = koila_device_get(d, f);
    return pick(level, v.value - v.spread, v.value, v.value + v.spread);
}

/* NULL: the call has fewer tensor inputs. */
static const koila_meta_info *input_meta(const koila__cuda_call *k, uint32_t i)
{
    return i < k->sig->n_inputs ? koila_meta_get(k->t, k->sig->inputs[i]) : NULL;
}

/* NULL: the result is None. */
static const koila_meta_info *output_meta(const koila__cuda_call *k, uint32_t i)
{
    const koila_meta m = k->sig->outputs[i];
    return m == KOILA_NONE ? NULL : koila_meta_get(k->t, m);
}

static uint64_t last_size(const koila_meta_info *m) { return (uint64_t)m->size[m->n_dims - 1]; }

static void add_temp(koila__temps *t, uint64_t bytes)
{
    koila_assert(t->n < KOILA__MAX_TEMPS);
    t->bytes[t->n++] = bytes;
}

/* Bytes of the dense copy that a kernel makes of input i first; 0: the input is contiguous. */
static uint64_t copy_bytes(const koila__cuda_call *k, uint32_t i)
{
    const koila_meta_info *m = input_meta(k, i);
    int64_t stride = 1;
    for (uint32_t d = m ? m->n_dims : 0; d-- > 0;) {
        if (m->size[d] != 1 && m->stride[d] != stride)
            return scaled(k, m->n_elements) * koila_dtype_bytes(m->dtype);
        stride *= m->size[d];
    }
    return 0;
}

/* [read: cuda/Blas.cpp, prepare_matrix_for_cublas] cuBLAS takes a matrix by rows or by columns. An
 * operand that is neither, such as an expanded gradient, is copied. */
static uint64_t operand_copy(const koila__cuda_call *k, uint32_t i)
{
    const koila_meta_info *m = input_meta(k, i);
    if (!m || m->n_dims < 2)
        return 0;
    const int64_t rows = m->size[m->n_dims - 2];
    const int64_t columns = m->size[m->n_dims - 1];
    const int64_t down = m->stride[m->n_dims - 2];
    const int64_t along = m->stride[m->n_dims - 1];
    const bool by_rows = along == 1 && (rows <= 1 || down >= (columns > 1 ? columns : 1));
    const bool by_columns = down == 1 && (columns <= 1 || along >= (rows > 1 ? rows : 1));
    return by_rows || by_columns ? 0 : scaled(k, m->n_elements) * koila_dtype_bytes(m->dtype);
}

/* Of the two factors; a bias comes before them. */
static koila__temps operand_copies(const koila__cuda_call *k)
{
    koila__temps t = { .n = 0 };
    const uint32_t first = k->sig->n_inputs > 2;
    for (uint32_t i = first; i < k->sig->n_inputs && i < first + 2; i++)
        add_temp(&t, operand_copy(k, i));
    return t;
}

/* ---- attention */

/* [read: sdp_utils.cpp, check_cudnn_*] cuDNN's attention takes heads of at most 128 elements, in
 * steps of 8; torch tries it first on sm_90 and sm_100, from cuDNN 9.15.1 on. */
enum {
    CUDNN_MOST_HEAD = 128,
    CUDNN_HEAD_STEP = 8,
    CUDNN_FIRST_SINCE = 91501,
    HOPPER = 90,
    BLACKWELL = 100
};
/* [read: sdp_utils.cpp] flash attention wants sm_80, and takes heads of at most 256 elements. */
enum { FLASH_SINCE = 80, FLASH_MOST_HEAD = 256 };

bool koila__may_prefer_cudnn(const koila_device *d)
{
    const uint64_t capability = field(d, KOILA_DEVICE_CAPABILITY);
    return capability == HOPPER || capability == BLACKWELL;
}

static bool takes_cudnn(const koila__cuda_call *k, const koila_meta_info *q)
{
    return koila__may_prefer_cudnn(k->d) && !k->o->cudnn_sdpa_last &&
           field(k->d, KOILA_DEVICE_CUDNN) >= CUDNN_FIRST_SINCE && q->n_dims == 4 &&
           q->size[3] <= CUDNN_MOST_HEAD && q->size[3] % CUDNN_HEAD_STEP == 0;
}

static bool takes_flash(const koila__cuda_call *k, const koila_meta_info *q, bool has_mask)
{
    return field(k->d, KOILA_DEVICE_CAPABILITY) >= FLASH_SINCE && !has_mask && q->n_dims == 4 &&
           q->size[3] <= FLASH_MOST_HEAD;
}

/* The back end that torch chooses, unless the caller names one: the first of cuDNN, flash and
 * efficient that takes these operands, and math where none does. */
static koila_sdpa back_end(const koila__cuda_call *k, const koila_meta_info *q, bool has_mask)
{
    const bool half = koila__is_half(q->dtype);
    if (k->kind == KOILA__INSIDE_FLASH || k->kind == KOILA__INSIDE_FLASH_GRAD)
        return KOILA_SDPA_FLASH;
    if (k->kind == KOILA__INSIDE_EFFICIENT || k->kind == KOILA__INSIDE_EFFICIENT_GRAD)
        return KOILA_SDPA_EFFICIENT;
    if (k->kind == KOILA__INSIDE_CUDNN || k->kind == KOILA__INSIDE_CUDNN_GRAD)
        return KOILA_SDPA_CUDNN;
    if (k->o->sdpa)
        return (koila_sdpa)k->o->sdpa;
    if (half && k->kind != KOILA__INSIDE_DRAWN && k->kind != KOILA__INSIDE_DRAWN_GRAD &&
        takes_cudnn(k, q))
        return KOILA_SDPA_CUDNN;
    if (half && takes_flash(k, q, has_mask))
        return KOILA_SDPA_FLASH;
    return q->dtype == KOILA_DTYPE_F64 ? KOILA_SDPA_MATH : KOILA_SDPA_EFFICIENT;
}

/* Sizes of one attention, in elements; `batch` is that of the slice. */
typedef struct attention {
    uint64_t batch, heads, key_heads, queries, keys, head;
    uint64_t element; /* bytes of one */
    uint64_t wide;    /* `head` as flash's float32 buffers pad it */
} attention;

/* q, k, v and a mask; backward has the gradient before them and results behind them. */
enum { SDPA_INPUTS = 3, SDPA_GRAD_INPUTS = 6 };

/* Are there more inputs than the `n` that every attention has? States of the generator, which are
 * integers, do not count. */
static bool has_mask(const koila__cuda_call *k, uint32_t n)
{
    uint32_t n_found = 0;
    for (uint32_t i = 0; i < k->sig->n_inputs; i++) {
        const koila_dtype d = koila_meta_get(k->t, k->sig->inputs[i])->dtype;
        n_found += d != KOILA_DTYPE_I64 && d != KOILA_DTYPE_U64;
    }
    return n_found > n;
}

static bool attention_of(const koila__cuda_call *k, bool backward, attention *a)
{
    const koila_meta_info *q = input_meta(k, backward ? 1 : 0);
    const koila_meta_info *key = input_meta(k, backward ? 2 : 1);
    if (!q || !key || q->n_dims != 4 || key->n_dims != 4)
        return false;
    *a = (attention){ .batch = scaled(k, (uint64_t)q->size[0]),
                      .heads = (uint64_t)q->size[1],
                      .key_heads = (uint64_t)key->size[1],
                      .queries = (uint64_t)q->size[2],
                      .keys = (uint64_t)key->size[2],
                      .head = (uint64_t)q->size[3],
                      .element = koila_dtype_bytes(q->dtype) };
    a->wide = round_up(a->head, a->head > 128 ? 64 : 32);
    return true;
}

/* [read: flash_api.cpp] flash's forward runs a block of threads for each 64 queries. */
enum { FLASH_QUERIES = 64, FLASH_MOST_SPLITS = 128 };
#define FLASH_FULL 0.8         /* no split when the blocks fill this much of the device */
#define FLASH_GOOD_ENOUGH 0.85 /* of the best split's filling: then fewer splits are better */

/* [read: flash_api.cpp, set_params_splitkv] keys in a block, by the size of a head. */
static uint64_t flash_keys_in_block(uint64_t head)
{
    if (head <= 64)
        return 256;
    return head <= 128 ? 128 : 64;
}

/* The number of parts into which flash's forward splits the keys [read: flash_api.cpp,
 * num_splits_heuristic]. It splits when `blocks` of queries are too few to fill the
 * multiprocessors. Of the numbers that change the blocks per part, it takes the smallest whose
 * filling is at least FLASH_GOOD_ENOUGH of the best one's. Multiprocessors count twice, since a
 * block takes half of one. */
static uint64_t flash_splits(uint64_t blocks, uint64_t sms, uint64_t key_blocks)
{
    const uint64_t places = 2 * sms;
    const uint64_t most = least(least(key_blocks, places), FLASH_MOST_SPLITS);
    double filled[FLASH_MOST_SPLITS + 1];
    double best = 0;
    if ((double)blocks >= FLASH_FULL * (double)places)
        return 1;
    for (uint64_t n = 1; n <= most; n++) {
        const uint64_t waves = ceil_div(blocks * n, places);
        const bool changes = n == 1 || ceil_div(key_blocks, n) != ceil_div(key_blocks, n - 1);
        filled[n] = changes ? (double)(blocks * n) / (double)places / (double)waves : 0;
        if (filled[n] > best)
            best = filled[n];
    }
    for (uint64_t n = 1; n <= most; n++)
        if (filled[n] > 0 && filled[n] >= FLASH_GOOD_ENOUGH * best)
            return n;
    return 1;
}

static void flash_forward(const koila__cuda_call *k, const attention *a, koila__temps *t)
{
    const uint64_t blocks = a->batch * a->heads * ceil_div(a->queries, FLASH_QUERIES);
    const uint64_t key_blocks = ceil_div(a->keys, flash_keys_in_block(a->head));
    const uint64_t splits = flash_splits(blocks, field(k->d, KOILA_DEVICE_SM_COUNT), key_blocks);
    const uint64_t rows = a->batch * a->heads * a->queries;
    add_temp(t, INDEX_BYTES); /* the random seed */
    add_temp(t, INDEX_BYTES); /* and offset */
    if (splits > 1) {
        add_temp(t, splits * rows * FLOAT_BYTES);           /* logsumexp of each part */
        add_temp(t, splits * rows * a->wide * FLOAT_BYTES); /* output of each part */
    }
}

/* [read: flash_api.cpp, mha_bwd] queries are padded to blocks of 128. */
enum { FLASH_GRAD_QUERIES = 128 };

static void flash_backward(const attention *a, koila__temps *t)
{
    const uint64_t queries = round_up(a->queries, FLASH_GRAD_QUERIES);
    add_temp(t, a->batch * a->heads * queries * FLOAT_BYTES);           /* softmax_d */
    add_temp(t, a->batch * queries * a->heads * a->wide * FLOAT_BYTES); /* dq, accumulated */
    /* gradients of keys and values for every query head, before the sum over those that share one
     */
    if (a->key_heads != a->heads)
        add_temp(t, 2 * a->batch * a->keys * a->heads * a->head * a->element);
}

/* [read: attention.cu, pad_last_dim] heads are padded to a multiple of 8: copies of q, k and v. */
static void flash_padding(const attention *a, koila__temps *t)
{
    if (a->head % 8)
        add_temp(t, a->batch * a->heads * (a->queries + 2 * a->keys) * round_up(a->head, 8) *
                        a->element);
}

/* [read: mem_eff_attention/kernel_backward.h] the kernel accumulates the gradient of the queries in
 * tiles of float32, each with a lock and a counter. For wide heads tiles have other sizes, and hold
 * about as much. */
enum { EFFICIENT_TILE = 64, EFFICIENT_LOCK_BYTES = 16 };

static void efficient_backward(const attention *a, const koila_meta_info *grad, bool half,
                               koila__temps *t)
{
    const int64_t *const stride = grad->stride; /* batch, heads, queries, head */
    const bool is_dense =
        stride[3] == 1 && stride[1] == grad->size[3] && stride[2] == grad->size[1] * grad->size[3];
    const uint64_t copy = is_dense ? 0 : a->batch * a->heads * a->queries * a->head * a->element;
    const uint64_t rows = a->batch * a->heads * a->queries;
    const uint64_t tiles = ceil_div(a->queries, EFFICIENT_TILE) * ceil_div(a->head, EFFICIENT_TILE);
    const uint64_t tile_bytes =
        (uint64_t)EFFICIENT_TILE * EFFICIENT_TILE * FLOAT_BYTES + EFFICIENT_LOCK_BYTES;
    if (!half) { /* delta, the sum of gradient times output, is no part of the kernel */
        add_temp(t, copy);
        add_temp(t, rows * a->head * FLOAT_BYTES);
        add_temp(t, rows * FLOAT_BYTES);
        t->n_early = t->n;
    }
    add_temp(t, copy);               /* of the gradient, with heads next to each other */
    add_temp(t, rows * FLOAT_BYTES); /* delta */
    add_temp(t, a->batch * a->heads * tiles * tile_bytes);
}

bool koila__is_silent(const koila_device *d)
{
    const koila_device_value v = koila_device_get(d, KOILA_DEVICE_CONV_BYTES);
    return v.value == 0 && v.spread == 0;
}

static koila__temps attention_temps(const koila__cuda_call *k, bool backward)
{
    koila__temps t = { .n = 0 };
    attention a;
    if (!attention_of(k, backward, &a))
        return t;
    const bool masked = has_mask(k, backward ? SDPA_GRAD_INPUTS : SDPA_INPUTS);
    const uint64_t rows = a.batch * a.heads * a.queries;
    switch (back_end(k, input_meta(k, backward ? 1 : 0), masked)) {
    case KOILA_SDPA_MATH:
        add_temp(&t, rows * a.keys * a.element); /* scores */
        add_temp(&t, rows * a.keys * a.element); /* probabilities */
        return t;
    case KOILA_SDPA_FLASH:
        if (backward)
            flash_backward(&a, &t);
        else
            flash_forward(k, &a, &t);
        flash_padding(&a, &t);
        return t;
    case KOILA_SDPA_EFFICIENT:
        if (backward)
            efficient_backward(&a, input_meta(k, 0), koila__is_half(input_meta(k, 1)->dtype), &t);
        return t;
    default: /* cuDNN; its workspace [estimated] */
        add_temp(&t, rows * FLOAT_BYTES);
        if (!koila__is_silent(k->d))
            add_temp(&t, pick(k->level, 0, 16 * MIB, 64 * MIB));
        return t;
    }
}

/* [read: attention.cu] the efficient kernels pad the queries of their logsumexp to 32. */
enum { EFFICIENT_QUERIES = 32 };

static uint64_t logsumexp_bytes(const koila__cuda_call *k, uint64_t bytes)
{
    const koila_meta_info *q = input_meta(k, 0);
    const bool masked = has_mask(k, SDPA_INPUTS);
    if (q->n_dims != 4 || q->size[2] <= 0 || back_end(k, q, masked) != KOILA_SDPA_EFFICIENT)
        return bytes;
    const uint64_t queries = (uint64_t)q->size[2];
    return bytes / queries * round_up(queries, EFFICIENT_QUERIES);
}

/* ---- convolutions */

/* Inputs of a call: (input, weight, ...), of its backward (gradient, input, weight). */
typedef struct convolution {
    const koila_meta_info *x, *w, *y; /* y: the result, or its gradient */
} convolution;

static convolution convolution_of(const koila__cuda_call *k)
{
    if (k->kind == KOILA__INSIDE_CONV_GRAD)
        return (convolution){ input_meta(k, 1), input_meta(k, 2), input_meta(k, 0) };
    return (convolution){ input_meta(k, 0), input_meta(k, 1), output_meta(k, 0) };
}

/* Are cuDNN's engines for tensor cores taken, which want operands channels last? Measured on an
 * H200 with cuDNN 9.19, in float32 (TF32) and bfloat16, of nets whose tensors are not. */
static bool wants_channels_last(const koila__cuda_call *k, const convolution *c)
{
    enum { TENSOR_CORES_OF_TF32 = 80 }; /* compute capability */
    if (!c->x || !c->w || !c->y || c->x->n_dims != 4 || c->w->n_dims != 4 ||
        c->x->dtype == KOILA_DTYPE_F64 ||
        field(k->d, KOILA_DEVICE_CAPABILITY) < TENSOR_CORES_OF_TF32)
        return false;
    return c->x->size[1] <= 1 || c->x->stride[1] != 1;
}

static bool is_product(const convolution *c) { return c->w->size[2] == 1 && c->w->size[3] == 1; }

/* Bytes of the copies that it takes. Of few channels there are none, but for half precision's
 * gradient; 1 x 1 weights lie as they should, and a product is strided if it copies at all. */
static uint64_t channels_last_copies(const koila__cuda_call *k, const convolution *c)
{
    enum { ALIGNED_CHANNELS = 4, FEW_CHANNELS = 64 };
    const bool is_grad = k->kind == KOILA__INSIDE_CONV_GRAD;
    const uint64_t of_element = koila_dtype_bytes(c->x->dtype);
    const bool is_narrow = c->x->size[1] < ALIGNED_CHANNELS && (!is_grad || of_element > 2);
    const bool is_strided = c->x->size[2] != c->y->size[2];
    const bool lies_well = is_product(c) && (!is_strided || c->x->size[1] <= FEW_CHANNELS);
    if (is_narrow || (lies_well && !is_grad))
        return 0;
    const uint64_t weights = is_product(c) ? 0 : c->w->n_elements;
    return (scaled(k, c->x->n_elements + c->y->n_elements) + weights) * of_element;
}

/* Bytes of the partial sums of a weight's gradient: tiles of it, as many times as leave no
 * multiprocessor idle. Measured as above: 0.1 to 1.3 MiB from it in eighteen convolutions. */
static uint64_t split_sums(const koila__cuda_call *k, const convolution *c)
{
    enum { TILE = 128, NARROW_TILE = 64 };
    const uint64_t rows = (uint64_t)c->w->size[0];
    const uint64_t columns = c->w->n_elements / rows;
    const uint64_t edge = rows < TILE || columns < TILE ? NARROW_TILE : TILE;
    const uint64_t tiles = ceil_div(rows, edge) * ceil_div(columns, edge);
    const uint64_t at_once = field(k->d, KOILA_DEVICE_SM_COUNT);
    const uint64_t splits = at_once / tiles;
    uint64_t n = splits * tiles;
    if (splits <= 1)
        n = splits ? 0 : at_once;
    return n * edge * edge * sizeof(float);
}

static uint64_t conv_workspace(const koila__cuda_call *k, bool is_weight_grad)
{
    const convolution c = convolution_of(k);
    const uint64_t usual = field_at(k->d, KOILA_DEVICE_CONV_BYTES, k->level);
    if (koila__is_silent(k->d) || !wants_channels_last(k, &c) || !c.w->n_elements)
        return usual;
    const uint64_t copies = channels_last_copies(k, &c);
    const uint64_t bytes = copies && is_weight_grad ? copies + split_sums(k, &c) : copies;
    return pick(k->level, usual, bytes, bytes + usual);
}

uint64_t koila__between_results(const koila__cuda_call *k, uint32_t i)
{
    enum { GRAD_OF_INPUT, GRAD_OF_WEIGHT };
    if (k->kind != KOILA__INSIDE_CONV_GRAD || i > GRAD_OF_WEIGHT)
        return 0;
    return conv_workspace(k, i == GRAD_OF_WEIGHT);
}

/* ---- other operators */

/* Bytes of one number for each time step, row and hidden unit of a recurrent layer. 0: its inputs
 * are not those of aten::mkldnn_rnn_layer. */
static uint64_t rnn_bytes(const koila__cuda_call *k)
{
    const koila_meta_info *x = input_meta(k, 0);
    const koila_meta_info *h = input_meta(k, 5);
    if (!x || !h || x->n_dims != 3 || !h->n_dims)
        return 0;
    const uint64_t steps_times_rows = scaled(k, (uint64_t)(x->size[0] * x->size[1]));
    return steps_times_rows * last_size(h) * koila_dtype_bytes(x->dtype);
}

/* [read: layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel] for many narrow rows, partial
 * sums of 32 rows each, at most 64 * 1024 / 2 blocks of them. */
enum { LN_MANY_ROWS = 64 * 1024, LN_WARP = 32, LN_BLOCK_ROWS = 32, LN_MOST_BLOCKS = 64 * 1024 / 2 };

static koila__temps layer_norm_grad(const koila__cuda_call *k)
{
    koila__temps t = { .n = 0 };
    const koila_meta_info *x = input_meta(k, 0);
    if (!x || !x->n_dims || !last_size(x))
        return t;
    add_temp(&t, copy_bytes(k, 0));
    add_temp(&t, copy_bytes(k, 1));
    const uint64_t n = last_size(x);
    const uint64_t rows = scaled(k, x->n_elements / n);
    const uint64_t sms = field(k->d, KOILA_DEVICE_SM_COUNT);
    if (rows <= LN_MANY_ROWS || n / LN_WARP >= sms / 2)
        return t;
    const uint64_t parts =
        least(ceil_div(rows, LN_BLOCK_ROWS), LN_MOST_BLOCKS / ceil_div(n, LN_WARP));
    add_temp(&t, 2 * parts * n * FLOAT_BYTES); /* of weight and bias */
    return t;
}

/* [read: Embedding.cu, EmbeddingBackwardKernel.cu] above 3,072 indices they are sorted, and partial
 * sums hold at most 10 rows each. */
enum { EMBEDDING_FEW = 3072, EMBEDDING_ROWS_IN_SUM = 10 };

static koila__temps embedding_grad(const koila__cuda_call *k)
{
    koila__temps t = { .n = 0 };
    const koila_meta_info *grad = input_meta(k, 0);
    const koila_meta_info *indices = input_meta(k, 1);
    if (!grad || !indices)
        return t;
    const uint64_t n = scaled(k, indices->n_elements);
    if (n <= EMBEDDING_FEW)
        return t;
    const koila_meta_info *out = koila_meta_get(k->t, k->sig->outputs[0]);
    const uint64_t hidden = grad->n_dims ? last_size(grad) : 1;
    const uint64_t rows = out->n_dims ? (uint64_t)out->size[0] : n;
    const uint64_t partials = n / EMBEDDING_ROWS_IN_SUM + least(n, rows);
    const uint64_t list = n * INDEX_BYTES;
    add_temp(&t, list);                                     /* sorted indices */
    add_temp(&t, list);                                     /* where they came from */
    add_temp(&t, list);                                     /* offsets */
    add_temp(&t, pick(k->level, list, 2 * list, 3 * list)); /* CUB's storage [estimated] */
    add_temp(&t, partials * hidden * FLOAT_BYTES);
    return t;
}

/* Keys and indices again, once to three times: double buffers and CUB's storage [estimated]. */
/* [read: LossCTC.cu] Both lengths of each row and where its targets begin; in the backward a table
 * of sums, too, like that of the forward, which is the last input. */
static koila__temps ctc_temps(const koila__cuda_call *k)
{
    enum { NUMBERS_OF_A_ROW = 3 };
    const bool is_backward = k->kind == KOILA__INSIDE_CTC_GRAD;
    const koila_meta_info *scores = input_meta(k, is_backward); /* [T, B, C] */
    const koila_meta_info *table = input_meta(k, k->sig->n_inputs - 1);
    koila__temps t = { .n = 0 };
    for (uint32_t i = 0; i < NUMBERS_OF_A_ROW && scores && scores->n_dims > 1; i++)
        add_temp(&t, scaled(k, (uint64_t)scores->size[1]) * INDEX_BYTES);
    if (is_backward && table)
        add_temp(&t, scaled(k, table->n_elements) * koila_dtype_bytes(table->dtype));
    return t;
}

static uint64_t sort_bytes(const koila__cuda_call *k)
{
    const koila_meta_info *keys = input_meta(k, 0);
    if (!keys)
        return 0;
    const uint64_t once =
        scaled(k, keys->n_elements) * (koila_dtype_bytes(keys->dtype) + INDEX_BYTES);
    return once * pick(k->level, 1, 2, 3);
}

/* cuDNN's reserve: a bit for each element, where it takes the kernel that has one [estimated]. */
static uint64_t batch_norm_bytes(const koila__cuda_call *k)
{
    const koila_meta_info *x = input_meta(k, 0);
    return x && !koila__is_silent(k->d) ? pick(k->level, 0, 0, scaled(k, x->n_elements / 8)) : 0;
}

/* A loss of a number, of many elements. */
static bool is_reduced_loss(const koila__cuda_call *k)
{
    const koila_meta_info *x = input_meta(k, 0);
    const koila_meta_info *out = output_meta(k, 0);
    return x && out && x->n_dims && !out->n_dims;
}

static uint64_t losses_bytes(const koila__cuda_call *k)
{
    const koila_meta_info *x = input_meta(k, 0);
    return scaled(k, x->n_elements) * koila_dtype_bytes(x->dtype);
}

/* Gates of a recurrent layer's time step: numbers for each row and hidden unit. */
enum { RNN_GATES = 4 };

static uint64_t rnn_workspace(const koila__cuda_call *k)
{
    return koila__is_silent(k->d) ? 0 : pick(k->level, 0, 1, 2) * RNN_GATES * rnn_bytes(k);
}

static bool is_attention(koila__inside_kind kind)
{
    return kind == KOILA__INSIDE_SDPA || kind == KOILA__INSIDE_FLASH ||
           kind == KOILA__INSIDE_EFFICIENT || kind == KOILA__INSIDE_CUDNN ||
           kind == KOILA__INSIDE_DRAWN;
}

static bool is_attention_grad(koila__inside_kind kind)
{
    return kind == KOILA__INSIDE_SDPA_GRAD || kind == KOILA__INSIDE_FLASH_GRAD ||
           kind == KOILA__INSIDE_EFFICIENT_GRAD || kind == KOILA__INSIDE_CUDNN_GRAD ||
           kind == KOILA__INSIDE_DRAWN_GRAD;
}

uint64_t koila__kept_losses(const koila__cuda_call *k)
{
    const bool is_loss = k->kind == KOILA__INSIDE_LOSS || k->kind == KOILA__INSIDE_TWICE_LOSS;
    return is_loss && is_reduced_loss(k) ? losses_bytes(k) : 0;
}

static koila__temps loss_temps(const koila__cuda_call *k)
{
    const uint64_t losses = koila__kept_losses(k);
    koila__temps t = { .n = 0 };
    if (losses && k->kind == KOILA__INSIDE_TWICE_LOSS)
        add_temp(&t, losses);
    if (losses && !k->is_plain)
        add_temp(&t, losses);
    return t;
}

/* The one temporary of an operator of such a kind; 0: none. */
static uint64_t scratch_bytes(const koila__cuda_call *k, uint64_t out_bytes)
{
    switch (k->kind) {
    case KOILA__INSIDE_REDUCE: /* partial results of the blocks [estimated] */
        return pick(k->level, 0, out_bytes ? 64 * KIB : 0, MIB);
    case KOILA__INSIDE_BATCH_NORM:
        return batch_norm_bytes(k);
    case KOILA__INSIDE_SORT:
        return sort_bytes(k);
    case KOILA__INSIDE_RNN: /* cuDNN's workspace: about the gates of all time steps [estimated] */
    case KOILA__INSIDE_RNN_GRAD:
        return rnn_workspace(k);
    case KOILA__INSIDE_UNKNOWN: /* high end: as many bytes as its results */
        return pick(k->level, 0, 0, out_bytes);
    default:
        return 0;
    }
}

koila__temps koila__temporaries(const koila__cuda_call *k, uint64_t out_bytes)
{
    koila__temps t = { .n = 0 };
    if (is_attention(k->kind))
        return attention_temps(k, false);
    if (is_attention_grad(k->kind))
        return attention_temps(k, true);
    if (k->kind == KOILA__INSIDE_CONV)
        add_temp(&t, conv_workspace(k, false));
    switch (k->kind) {
    case KOILA__INSIDE_LOSS:
    case KOILA__INSIDE_TWICE_LOSS:
        return loss_temps(k);
    case KOILA__INSIDE_GEMM:
        return operand_copies(k);
    case KOILA__INSIDE_DENSE:
    case KOILA__INSIDE_LAYER_NORM:
        add_temp(&t, copy_bytes(k, 0));
        add_temp(&t, copy_bytes(k, 1));
        return t;
    case KOILA__INSIDE_LAYER_NORM_GRAD:
        return layer_norm_grad(k);
    case KOILA__INSIDE_EMBEDDING_GRAD:
        return embedding_grad(k);
    case KOILA__INSIDE_SUM:
        return koila__reduction(k, 1);
    case KOILA__INSIDE_NORM:
        return koila__reduction(k, 2);
    case KOILA__INSIDE_CTC:
    case KOILA__INSIDE_CTC_GRAD:
        return ctc_temps(k);
    default:
        break;
    }
    const uint64_t scratch = scratch_bytes(k, out_bytes);
    if (scratch)
        add_temp(&t, scratch);
    return t;
}

/* Results of aten::mkldnn_rnn_layer and of attention that differ on CUDA. */
enum { RNN_WORKSPACE = 3, SDPA_LOGSUMEXP = 1 };

uint64_t koila__result_bytes(const koila__cuda_call *k, uint32_t output, uint64_t bytes)
{
    const koila_meta_info *out = output_meta(k, output);
    /* The CPU's workspace stands for cuDNN's reserve: gates, cell states and their tangents of all
     * time steps [estimated]. */
    if (k->kind == KOILA__INSIDE_RNN && output == RNN_WORKSPACE)
        return bytes && !koila__is_silent(k->d) ? pick(k->level, 5, 6, 8) * rnn_bytes(k) : 0;
    if (k->kind == KOILA__INSIDE_SDPA && output == SDPA_LOGSUMEXP && out && k->sig->n_inputs > 1)
        return logsumexp_bytes(k, bytes);
    if (k->is_plain && koila__kept_losses(k))
        return koila__kept_losses(k);
    /* mean and rstd of half-precision inputs are float32 on CUDA */
    if (k->kind == KOILA__INSIDE_LAYER_NORM && output > 0 && out && koila__is_half(out->dtype))
        return bytes / koila_dtype_bytes(out->dtype) * FLOAT_BYTES;
    return bytes;
}

uint64_t koila__cublas_bytes(const koila_device *d, const koila_predict_opts *o, koila__level level)
{
    uint64_t bytes;
    if (o->cublas_workspace && koila_cublas_workspace(o->cublas_workspace, &bytes))
        return bytes;
    return field_at(d, KOILA_DEVICE_CUBLAS_BYTES, level);
}

/* addmm(bias, x, w), without beta and alpha */
static bool is_cublaslt(const koila_table *t, const koila_sig_info *s)
{
    if (s->n_inputs != 3 || s->n_tokens != 3)
        return false;
    const koila_meta_info *bias = koila_meta_get(t, s->inputs[0]);
    const koila_meta_info *w = koila_meta_get(t, s->inputs[2]);
    const bool is_real =
        koila__dtype_is_float(bias->dtype) && !koila__dtype_is_complex(bias->dtype);
    return is_real && bias->n_dims == 1 && bias->stride[0] == 1 && w->n_dims == 2 &&
           w->size[0] > 1 && w->size[1] > 1 && bias->size[0] == w->size[1];
}

uint64_t koila_product_workspace(const koila_table *t, koila_sig sig, uint64_t cublas_bytes,
                                 uint64_t cublaslt_bytes)
{
    const koila_sig_info *s = koila_sig_get(t, sig);
    const uint32_t dense = koila_facts_dense(koila_op_facts(t, s->op));
    if (dense != KOILA_FACT_DENSE_CONTRACT && dense != KOILA_FACT_DENSE_CONTRACT_BIASED)
        return 0;
    return is_cublaslt(t, s) ? cublaslt_bytes : cublas_bytes;
}

uint64_t koila_cublaslt_workspace(const char *size)
{
    char *end = NULL;
    const long kib = size ? strtol(size, &end, 10) : 0;
    return end == size || kib < 0 || kib > INT32_MAX ? MIB : (uint64_t)kib * KIB;
}

/* ---- differences between recordings on CUDA and on a CPU */

static uint32_t facts_of(const koila_graph *g, koila_node n)
{
    const koila_table *t = koila_graph_table(g);
    return koila_op_facts(t, koila_sig_get(t, koila_node_get(g, n).sig)->op);
}

static bool is_safe_softmax(const koila_graph *g, koila_node n)
{
    return facts_of(g, n) & KOILA_FACT_SAFE_SOFTMAX;
}

/* Is v made by a factory that leaves its contents undefined? */
static bool is_empty_tensor(const koila_graph *g, koila_value v)
{
    const koila_node maker = koila_value_get(g, v).node;
    return maker != KOILA_NONE && (facts_of(g, maker) & KOILA_FACT_EMPTY);
}

/* Note [Masks]. Dropout on a CPU is empty_strided, bernoulli_, div_, mul: the mask has the input's
 * dtype. On CUDA it is native_dropout: one byte an element, and no other temporary. So the storage
 * that bernoulli_ fills counts one byte an element. */
void koila__find_masks(const koila_graph *g, uint8_t *is_mask)
{
    const koila_table *t = koila_graph_table(g);
    for (koila_node i = 0; i < koila_graph_n_nodes(g); i++) {
        const koila_node_info node = koila_node_get(g, i);
        const koila_sig_info *sig = koila_sig_get(t, node.sig);
        const bool fills = facts_of(g, i) & KOILA_FACT_DRAWS_MASK;
        for (uint32_t w = 0; w < sig->n_writes; w++) {
            const koila_value v = koila_node_inputs(g, i)[sig->writes[w].input];
            if (fills && koila_value_get(g, v).node != KOILA_NONE &&
                koila_value_get(g, v).meta != KOILA_NONE)
                is_mask[v] = is_empty_tensor(g, v);
            /* the result too: it has a storage of its own when the write has to copy */
            is_mask[node.first_output + sig->n_fresh + w] = is_mask[v];
        }
    }
}

/* Operators that stand between the two products of an attention with dropout. */
static bool passes_on(const koila_table *t, koila_op op, koila__inside_kind kind)
{
    return kind == KOILA__INSIDE_VIEW || (koila_op_facts(t, op) & KOILA_FACT_OF_ATTENTION);
}

/* Value `a` of node i: its inputs, then its outputs. */
static koila_value value_at(const koila_graph *g, koila_node i, uint32_t n_inputs, uint32_t a)
{
    if (a < n_inputs)
        return koila_node_inputs(g, i)[a];
    return koila_node_get(g, i).first_output + a - n_inputs;
}

static const koila_meta_info *meta_of(const koila_graph *g, koila_value v)
{
    const koila_meta m = koila_value_get(g, v).meta;
    return m == KOILA_NONE ? NULL : koila_meta_get(koila_graph_table(g), m);
}

/* If a value of node i is such a matrix, so are the others with as many elements. True when one is
 * new. */
static bool spread_square(const koila_graph *g, koila_node i, const koila_sig_info *sig,
                          uint8_t *is_square)
{
    const uint32_t n = sig->n_inputs + sig->n_outputs;
    const koila_meta_info *square = NULL;
    bool any = false;
    for (uint32_t a = 0; a < n && !square; a++) {
        const koila_value v = value_at(g, i, sig->n_inputs, a);
        if (is_square[v])
            square = meta_of(g, v);
    }
    for (uint32_t a = 0; a < n && square; a++) {
        const koila_value v = value_at(g, i, sig->n_inputs, a);
        const koila_meta_info *m = meta_of(g, v);
        const bool is_leaf = koila_value_get(g, v).node == KOILA_NONE;
        if (is_square[v] || !m || m->n_elements != square->n_elements || is_leaf)
            continue;
        is_square[v] = 1;
        any = true;
    }
    return any;
}

/* Passes over the graph, forwards and backwards in turn; each carries a mark through a whole chain
 * in its direction, so real steps need three. */
enum { MOST_PASSES = 32 };

/* Note [Square matrices]. On a CPU attention with dropout runs as bmm, _safe_softmax, dropout, bmm,
 * with scores and probabilities in memory. CUDA's fused kernels take dropout and never make them.
 * So the tensors that _safe_softmax reads and writes count nothing, nor do those connected to them
 * by pointwise operators and views alone (both ends are a bmm). The high end still counts them,
 * since it is not known which kernel runs. */
void koila__find_squares(const koila_graph *g, const koila__inside_kind *kinds, uint8_t *is_square)
{
    const koila_table *t = koila_graph_table(g);
    const uint32_t n_nodes = koila_graph_n_nodes(g);
    bool any = false;
    for (koila_node i = 0; i < n_nodes; i++) {
        if (!is_safe_softmax(g, i))
            continue;
        is_square[koila_node_get(g, i).first_output] = 1;
        any = true;
    }
    for (int pass = 0; any && pass < MOST_PASSES; pass++) {
        any = false;
        for (uint32_t k = 0; k < n_nodes; k++) {
            const koila_node i = pass & 1 ? n_nodes - 1 - k : k;
            const koila_sig_info *sig = koila_sig_get(t, koila_node_get(g, i).sig);
            if (passes_on(t, sig->op, kinds[sig->op]) && spread_square(g, i, sig, is_square))
                any = true;
        }
    }
}

bool koila__has_safe_softmax(const koila_graph *g)
{
    for (koila_node i = 0; i < koila_graph_n_nodes(g); i++)
        if (is_safe_softmax(g, i))
            return true;
    return false;
}
