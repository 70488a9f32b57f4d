/* predict.c — a recorded step on a GPU that is not here.
 *
 * The step was recorded on a CPU, below autograd, with true shapes. The planner turns it into
 * instructions (the whole batch is one slice); running those means: a storage is made with a value,
 * dies with its last alias, and operators use memory of their own that cuda_ops.def tells. Every
 * one of these becomes a malloc or a release of the simulated cache, so rounding, splitting and
 * fragmentation are not estimated but happen. What is not known exactly is run three times: low,
 * expected, high.
 *
 *   step   new batch in, the old one dropped; gradients of the last step dropped; the plan; loss
 *          and outputs rebound; the optimizer's own
 *   run    steps until two in a row leave the same reserved bytes and peaks (at most 16)
 *   fits   the high run again, under the limit: no request fails
 *
 * A storage is counted, not a tensor: views share it (refs).  live == sum of storages with refs >
 * 0.
 */
#include "base/alloc.h"
#include "allocator/cache.h"
#include "koila/plan.h"
#include "koila/predict.h"

#define MIB ((uint64_t)1 << 20)

enum { MAX_STEPS = 16, MAX_TEMPS = 8, MAX_KEPT = 1 << 22 };

/* ---- what operators use inside */

typedef enum inside_kind {
    INSIDE_VIEW,
    INSIDE_NOTHING,
    INSIDE_REDUCE,
    INSIDE_GEMM,
    INSIDE_CONV,
    INSIDE_LAYER_NORM,
    INSIDE_LAYER_NORM_GRAD,
    INSIDE_BATCH_NORM,
    INSIDE_SDPA,
    INSIDE_SDPA_GRAD,
    INSIDE_EMBEDDING_GRAD,
    INSIDE_SORT,
    INSIDE_RNN,
    INSIDE_RNN_GRAD,
    INSIDE_UNKNOWN
} inside_kind;

static const struct {
    const char *name;
    inside_kind kind;
} cuda_ops[] = {
#define KOILA_CUDA(name, kind) { name, INSIDE_##kind },
#include "predict/cuda_ops.def"
#undef KOILA_CUDA
};

/* "aten::add_.Tensor" -> "add"; other namespaces keep theirs. */
static void base_name(const char *full, char *out, size_t room)
{
    const char *p = !strncmp(full, "aten::", 6) ? full + 6 : full;
    size_t n = 0;
    while (p[n] && p[n] != '.' && n + 1 < room) {
        out[n] = p[n];
        n++;
    }
    if (n > 1 && out[n - 1] == '_')
        n--;
    out[n] = 0;
}

static inside_kind kind_of_op(const koila_table *t, koila_op op)
{
    char name[80];
    if (koila_op_flags(t, op) & KOILA_OP_VIEW)
        return INSIDE_VIEW;
    base_name(koila_op_name(t, op), name, sizeof name);
    for (size_t i = 0; i < KOILA_COUNT(cuda_ops); i++)
        if (!strcmp(cuda_ops[i].name, name))
            return cuda_ops[i].kind;
    if (!strcmp(koila_op_name(t, op), "koila::laid_out"))
        return INSIDE_NOTHING;
    if (!strncmp(koila_op_name(t, op), "koila::", 7))
        return INSIDE_REDUCE;
    return INSIDE_UNKNOWN;
}

/* ---- one run */

enum { LOW, EXPECTED, HIGH };

typedef struct storage {
    uint64_t addr, bytes;
    uint32_t refs, value, next_dead;
} storage;

typedef struct sim {
    const koila_plan *plan;
    const koila_graph *g;
    const koila_table *t;
    const koila_device *d;
    koila_predict_opts o;
    koila_cache *c;
    koila_allocator mem;
    int level;
    uint32_t n_values, n_targets;
    uint32_t *whole, *local;                /* storage of each value, 0 = none */
    uint8_t *is_target, *is_grad, *is_mask; /* is_mask: a dropout mask, Note [Masks] */
    /* an attention matrix that CUDA does not make, Note [Square matrices] */
    uint8_t *is_square;
    inside_kind *kinds; /* of each operator of the table */
    uint32_t n_ops;
    uint32_t *kept_row; /* value -> row + 1 of kept[] */
    uint32_t *kept, n_kept, kept_slices;
    uint32_t *drop, n_drop, drop_cap; /* kept pieces given up at the end of the slice */
    storage *st;
    uint32_t n_st, st_cap, dead_st;
    uint64_t *state, n_state, state_cap;          /* addresses of optimizer state */
    uint64_t *last_out, n_last_out, last_out_cap; /* loss and outputs of the step before */
    bool has_blas[2];
    uint64_t stream;
    bool oom, ends_at_oom;
    koila_status status;
    /* peak */
    uint64_t now, most;
    koila_node at_node, peak_node;
    bool want_peak;
    uint64_t stop_at; /* second run: look around when this is reached */
    koila_prediction *out;
    bool looked;
} sim;

static void fail_memory(sim *s) { s->status = KOILA_NO_MEMORY; }

static uint64_t level_of(const sim *s, koila_device_field f)
{
    const koila_device_value v = koila_device_get(s->d, f);
    return s->level == LOW ? v.value - v.spread : s->level == HIGH ? v.value + v.spread : v.value;
}

static void look_around(sim *s);

static uint64_t take(sim *s, uint64_t bytes)
{
    uint64_t addr = 0;
    if (s->status || bytes == 0)
        return 0;
    koila_status status = koila_cache_malloc(s->c, bytes, s->stream, KOILA_POOL_DEFAULT, &addr);
    if (status == KOILA_OOM)
        s->oom = true;
    if (status && (status != KOILA_OOM || s->ends_at_oom))
        s->status = status;
    const uint64_t allocated =
        koila__cache_stats_ref(s->c)->of[KOILA_STAT_ALLOCATED_BYTES][KOILA_STAT_ALL].current;
    if (allocated > s->most) {
        s->most = allocated;
        s->peak_node = s->at_node;
    }
    if (s->want_peak && !s->looked && allocated >= s->stop_at) {
        s->looked = true;
        look_around(s);
    }
    return addr;
}
static void give(sim *s, uint64_t addr)
{
    if (addr && koila_cache_release(s->c, addr) == KOILA_NO_MEMORY)
        fail_memory(s);
}

static uint32_t storage_new(sim *s, uint64_t bytes, koila_value v)
{
    uint32_t i = s->dead_st;
    if (i)
        s->dead_st = s->st[i].next_dead;
    else {
        if (s->n_st + 1 >= s->st_cap) {
            uint32_t cap = s->st_cap ? s->st_cap * 2 : 256;
            storage *st = koila__realloc(&s->mem, s->st, s->st_cap * sizeof *st, cap * sizeof *st);
            if (!st) {
                fail_memory(s);
                return 0;
            }
            s->st = st;
            s->st_cap = cap;
        }
        i = ++s->n_st;
    }
    s->st[i] = (storage){ .bytes = bytes, .refs = 1, .value = v };
    s->st[i].addr = take(s, bytes);
    return i;
}
static uint32_t hold(sim *s, uint32_t i)
{
    if (i)
        s->st[i].refs++;
    return i;
}
static void let_go(sim *s, uint32_t *slot)
{
    const uint32_t i = *slot;
    *slot = 0;
    if (!i || --s->st[i].refs)
        return;
    give(s, s->st[i].addr);
    s->st[i].next_dead = s->dead_st;
    s->dead_st = i;
}

static const koila_meta_info *meta_of(const sim *s, koila_value v)
{
    const koila_meta m = koila_value_get(s->g, v).meta;
    return m == KOILA_NONE ? NULL : koila_meta_get(s->t, m);
}
static uint64_t whole_bytes(const sim *s, koila_value v)
{
    const koila_meta_info *m = meta_of(s, v);
    return m ? m->n_storage_bytes : 0;
}
/* What a loop collects is put into memory without gaps, also where the value itself repeats some.
 */
static uint64_t dense_bytes(const sim *s, koila_value v)
{
    const koila_meta_info *m = meta_of(s, v);
    return m ? m->n_bytes : 0;
}
static uint32_t found(const sim *s, koila_value v)
{
    return s->local[v] ? s->local[v] : s->whole[v];
}

/* ---- the inside of one call. Sizes are those of the whole batch; `part` is the slice's share of
 * it. */

typedef struct call {
    const koila_sig_info *sig;
    double part;
} call;

static uint64_t scaled(const call *k, uint64_t n)
{
    return (uint64_t)((double)n * k->part + 0.999);
}
static const koila_meta_info *input_meta(const sim *s, const call *k, uint32_t i)
{
    return i < k->sig->n_inputs ? koila_meta_get(s->t, k->sig->inputs[i]) : NULL;
}

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
static uint64_t pick(const sim *s, uint64_t low, uint64_t expected, uint64_t high)
{
    return s->level == LOW ? low : s->level == HIGH ? high : expected;
}

/* From cuDNN 9.15.1 on torch tries cuDNN's attention first where it is fastest. */
static bool prefers_cudnn(const koila_device *d)
{
    const uint64_t capability = koila_device_get(d, KOILA_DEVICE_CAPABILITY).value;
    return (capability == 90 || capability == 100) &&
           koila_device_get(d, KOILA_DEVICE_CUDNN).value >= 91501;
}

/* Flash takes no mask; the math back end is left for what the fused kernels refuse. */
static uint32_t sdpa_back_end(const sim *s, const koila_meta_info *q, bool has_mask)
{
    if (s->o.sdpa)
        return s->o.sdpa;
    const uint64_t capability = koila_device_get(s->d, KOILA_DEVICE_CAPABILITY).value;
    const bool half = q->dtype == KOILA_DTYPE_F16 || q->dtype == KOILA_DTYPE_BF16;
    if (half && prefers_cudnn(s->d) && !s->o.cudnn_sdpa_last && q->n_dims == 4 &&
        q->size[3] <= 128 && q->size[3] % 8 == 0)
        return KOILA_SDPA_CUDNN;
    if (half && capability >= 80 && !has_mask && q->n_dims == 4 && q->size[3] <= 256)
        return KOILA_SDPA_FLASH;
    return q->dtype == KOILA_DTYPE_F64 ? KOILA_SDPA_MATH : KOILA_SDPA_EFFICIENT;
}

/* Flash's forward cuts the keys when there are too few blocks of 64 queries to fill the
 * multiprocessors: of the cuts that change the blocks a cut gets, the fewest that fill at least
 * 0.85 of what the best one does. Multiprocessors count twice, for a block takes half of one. */
static uint64_t flash_splits(uint64_t blocks, uint64_t sms, uint64_t key_blocks)
{
    const uint64_t room = 2 * sms;
    const uint64_t most = key_blocks < room ? key_blocks < 128 ? key_blocks : 128
                          : room < 128      ? room
                                            : 128;
    double filled[129], best = 0;
    if ((double)blocks >= 0.8 * (double)room)
        return 1;
    for (uint64_t n = 1; n <= most; n++) {
        const uint64_t waves = (blocks * n + room - 1) / room;
        const bool changes = n == 1 || (key_blocks + n - 1) / n != (key_blocks + n - 2) / (n - 1);
        filled[n] = changes ? (double)(blocks * n) / (double)room / (double)waves : 0;
        if (filled[n] > best)
            best = filled[n];
    }
    for (uint64_t n = 1; n <= most; n++)
        if (filled[n] > 0 && filled[n] >= 0.85 * best)
            return n;
    return 1;
}

static int attention(const sim *s, const call *k, bool backward, uint64_t *temp)
{
    const koila_meta_info *q = input_meta(s, k, backward ? 1 : 0);
    const koila_meta_info *key = input_meta(s, k, backward ? 2 : 1);
    if (!q || !key || q->n_dims != 4 || key->n_dims != 4)
        return 0;
    const uint64_t b = scaled(k, (uint64_t)q->size[0]);
    const uint64_t h = (uint64_t)q->size[1];
    const uint64_t sq = (uint64_t)q->size[2];
    const uint64_t d = (uint64_t)q->size[3];
    const uint64_t sk = (uint64_t)key->size[2];
    const uint64_t bytes = koila_dtype_bytes(q->dtype);
    const uint64_t block = round_up(sq, 128);
    const uint64_t wide = round_up(d, d > 128 ? 64 : 32);
    switch (sdpa_back_end(s, q, k->sig->n_inputs > (backward ? 6u : 3u))) {
    case KOILA_SDPA_MATH: /* scores and probabilities, whole */
        temp[0] = temp[1] = b * h * sq * sk * bytes;
        return 2;
    case KOILA_SDPA_FLASH: {
        /* heads are padded to a multiple of 8: copies of the operands */
        const uint64_t padded = d % 8 ? round_up(d, 8) * bytes : 0;
        int n = 2;
        if (!backward) {
            const uint64_t splits = flash_splits(
                b * h * ((sq + 63) / 64), koila_device_get(s->d, KOILA_DEVICE_SM_COUNT).value,
                (sk +
                 (d <= 64    ? 256
                  : d <= 128 ? 128
                             : 64) -
                 1) /
                    (d <= 64    ? 256
                     : d <= 128 ? 128
                                : 64));
            temp[0] = temp[1] = 8; /* seed and offset */
            if (splits > 1) {
                temp[n++] = splits * b * h * sq * 4;
                temp[n++] = splits * b * h * sq * wide * 4;
            }
        } else {
            temp[0] = b * h * block * 4;
            temp[1] = b * block * h * wide * 4;
            /* gradients of keys and values, a head for each query head */
            if ((uint64_t)key->size[1] != h)
                temp[n++] = 2 * b * sk * h * d * bytes;
        }
        if (padded)
            temp[n++] = b * h * (sq + 2 * sk) * padded;
        return n;
    }
    case KOILA_SDPA_EFFICIENT:
        if (!backward)
            return 0;
        temp[0] = b * h * sq * 4;
        temp[1] = pick(s, 0, 0, b * h * sq * d * 4);
        temp[2] = temp[1];
        return 3;
    default:
        temp[0] = b * h * sq * 4;
        temp[1] = pick(s, 0, 16 * MIB, 64 * MIB);
        return 2;
    }
}

/* One value for each step, row and hidden unit: steps * rows * hidden. */
static uint64_t rnn_bytes(const sim *s, const call *k)
{
    const koila_meta_info *x = input_meta(s, k, 0);
    const koila_meta_info *h = input_meta(s, k, 5);
    return x && h && x->n_dims == 3 && h->n_dims
               ? scaled(k, (uint64_t)(x->size[0] * x->size[1])) * (uint64_t)h->size[h->n_dims - 1] *
                     koila_dtype_bytes(x->dtype)
               : 0;
}

/* Bytes of temporaries that live from the results to the end of the call. */
static int temporaries(sim *s, const call *k, inside_kind kind, uint64_t out_bytes, uint64_t *temp)
{
    const koila_meta_info *a = input_meta(s, k, 0);
    const koila_meta_info *b = input_meta(s, k, 1);
    switch (kind) {
    case INSIDE_REDUCE:
        temp[0] = pick(s, 0, out_bytes ? 65536 : 0, MIB);
        return 1;
    case INSIDE_CONV:
        temp[0] = level_of(s, KOILA_DEVICE_CONV_BYTES);
        return 1;
    case INSIDE_BATCH_NORM:
        temp[0] = a ? pick(s, 0, 0, scaled(k, a->n_elements / 8)) : 0;
        return 1;
    case INSIDE_SDPA:
        return attention(s, k, false, temp);
    case INSIDE_SDPA_GRAD:
        return attention(s, k, true, temp);
    case INSIDE_LAYER_NORM_GRAD:
        if (a && a->n_dims) {
            const uint64_t n = (uint64_t)a->size[a->n_dims - 1];
            const uint64_t rows = n ? scaled(k, a->n_elements / n) : 0;
            const uint64_t sms = koila_device_get(s->d, KOILA_DEVICE_SM_COUNT).value;
            if (n && rows > 65536 && n / 32 < sms / 2) {
                uint64_t parts = (rows + 31) / 32;
                uint64_t most = 32768 / ((n + 31) / 32);
                if (most < parts)
                    parts = most;
                temp[0] = 2 * parts * n * 4;
                return 1;
            }
        }
        return 0;
    case INSIDE_EMBEDDING_GRAD:
        if (a && b) {
            const uint64_t n = scaled(k, b->n_elements);
            const uint64_t hidden = a->n_dims ? (uint64_t)a->size[a->n_dims - 1] : 1;
            if (n <= 3072)
                return 0;
            const koila_meta_info *out = koila_meta_get(s->t, k->sig->outputs[0]);
            const uint64_t rows = out->n_dims ? (uint64_t)out->size[0] : n;
            const uint64_t p = n / 10 + (n < rows ? n : rows);
            temp[0] = temp[1] = temp[2] = n * 8;
            temp[3] = pick(s, n * 8, n * 16, n * 24);
            temp[4] = p * hidden * 4;
            return 5;
        }
        return 0;
    case INSIDE_SORT:
        if (!a)
            return 0;
        temp[0] =
            scaled(k, a->n_elements) * (koila_dtype_bytes(a->dtype) + 8) * (uint64_t)(s->level + 1);
        return 1;
    case INSIDE_RNN:
    /* cuDNN's workspace: about the gates of all steps, in the high end twice */
    case INSIDE_RNN_GRAD:
        temp[0] = pick(s, 0, 1, 2) * 4 * rnn_bytes(s, k);
        return 1;
    case INSIDE_UNKNOWN:
        temp[0] = pick(s, 0, 0, out_bytes);
        return 1;
    default:
        return 0;
    }
}

/* A result whose size on CUDA is not the recorded one. */
static uint64_t result_bytes(const sim *s, const call *k, inside_kind kind, uint32_t output,
                             uint64_t bytes)
{
    const koila_meta_info *out = k->sig->outputs[output] == KOILA_NONE
                                     ? NULL
                                     : koila_meta_get(s->t, k->sig->outputs[output]);
    /* a CPU's workspace is another thing than cuDNN's reserve: the gates, cell states and their
     * tangents of all steps */
    if (kind == INSIDE_RNN && output == 3)
        return bytes ? pick(s, 5, 6, 8) * rnn_bytes(s, k) : 0;
    /* the efficient kernels pad queries to 32 in their logsumexp */
    if (kind == INSIDE_SDPA && output == 1 && out && k->sig->n_inputs > 1) {
        const koila_meta_info *q = input_meta(s, k, 0);
        if (q->n_dims == 4 && q->size[2] > 0 &&
            sdpa_back_end(s, q, k->sig->n_inputs > 3) == KOILA_SDPA_EFFICIENT)
            return bytes / (uint64_t)q->size[2] * round_up((uint64_t)q->size[2], 32);
    }
    if (kind == INSIDE_LAYER_NORM && output > 0 && out && koila_dtype_bytes(out->dtype) == 2)
        return bytes * 2;
    return bytes;
}

/* ---- instructions */

/* What a storage that the recording made counts on CUDA. */
static uint64_t cuda_bytes(const sim *s, koila_value v, uint64_t bytes)
{
    if (s->is_square[v] && s->level != HIGH && s->o.sdpa != KOILA_SDPA_MATH)
        return 0;
    return s->is_mask[v] ? bytes / koila_dtype_bytes(meta_of(s, v)->dtype) : bytes;
}

static void run_node(sim *s, koila_node n, uint16_t steal, bool in_loop, int64_t rows,
                     int64_t batch)
{
    const koila_node_info node = koila_node_get(s->g, n);
    const koila_sig_info *sig = koila_sig_get(s->t, node.sig);
    const koila_value *inputs = koila_node_inputs(s->g, n);
    const inside_kind kind = sig->op < s->n_ops ? s->kinds[sig->op] : kind_of_op(s->t, sig->op);
    uint32_t *const home = in_loop ? s->local : s->whole;
    call k = { sig, in_loop && batch > 0 ? (double)rows / (double)batch : 1.0 };
    uint64_t out_bytes = 0, temp[MAX_TEMPS] = { 0 }, addr[MAX_TEMPS] = { 0 };
    s->at_node = n;
    if (kind == INSIDE_GEMM && !s->has_blas[sig->grad_mode != 0]) {
        s->has_blas[sig->grad_mode != 0] = true;
        uint64_t bytes;
        if (!s->o.cublas_workspace || !koila_cublas_workspace(s->o.cublas_workspace, &bytes))
            bytes = level_of(s, KOILA_DEVICE_CUBLAS_BYTES);
        take(s, bytes); /* for ever */
    }
    for (uint32_t i = 0; i < sig->n_fresh && !s->status; i++) {
        const koila_value v = node.first_output + i;
        if (sig->outputs[i] == KOILA_NONE || home[v])
            continue;
        if (kind == INSIDE_VIEW && sig->n_inputs) {
            home[v] = hold(s, found(s, inputs[0]));
            continue;
        }
        uint64_t bytes = result_bytes(
            s, &k, kind, i, in_loop ? koila_plan_value_bytes(s->plan, v, rows) : whole_bytes(s, v));
        bytes = cuda_bytes(s, v, bytes);
        out_bytes += bytes;
        home[v] = storage_new(s, bytes, v);
    }
    for (uint32_t w = 0; w < sig->n_writes && !s->status; w++) {
        const koila_value base = inputs[sig->writes[w].input];
        const koila_value v = node.first_output + sig->n_fresh + w;
        if (home[v])
            continue;
        if (steal >> w & 1)
            home[v] = hold(s, found(s, base));
        else
            home[v] = storage_new(
                s,
                cuda_bytes(s, v,
                           in_loop ? koila_plan_value_bytes(s->plan, v, rows) : whole_bytes(s, v)),
                v);
    }
    const int n_temps = temporaries(s, &k, kind, out_bytes, temp);
    for (int i = 0; i < n_temps; i++)
        addr[i] = take(s, temp[i]);
    for (int i = n_temps; i-- > 0;)
        give(s, addr[i]);
}

static bool is_half(const koila_meta_info *m)
{
    return m && (m->dtype == KOILA_DTYPE_F16 || m->dtype == KOILA_DTYPE_BF16);
}

static void add_up(sim *s, const koila_instr *in, int64_t rows, int64_t batch)
{
    const koila_value v = in->id;
    const koila_meta_info *m = meta_of(s, v);
    /* a sum is added in place; other combinations make a new accumulator while the old one lives */
    if (s->whole[v]) {
        if (m && koila_plan_share(s->plan, v).partial != KOILA_PARTIAL_SUM)
            give(s, take(s, m->n_bytes));
        return;
    }
    /* accumulated in float32 */
    if (is_half(m) && rows != batch)
        s->whole[v] = storage_new(s, m->n_elements * 4, v);
    else if (in->flags & KOILA_INSTR_OWNED)
        s->whole[v] = hold(s, s->local[v]);
    else
        s->whole[v] = storage_new(s, m ? m->n_bytes : 0, v);
}

/* A slice is a view, but for one of several blocks, and one of a dimension that is not the
 * outermost in memory (unless it is all rows). */
static uint32_t slice_of(sim *s, const koila_instr *in, int64_t rows, int64_t batch)
{
    const koila_meta_info *m = meta_of(s, in->id);
    const koila_share cut = koila_plan_need(s->plan, in->user, in->steal);
    bool copied = cut.outer != 1;
    for (uint32_t d = 0; m && d < m->n_dims && rows != batch; d++)
        copied |= d != cut.dim && m->size[d] > 1 && m->stride[d] > m->stride[cut.dim];
    return copied && m && batch > 0
               ? storage_new(s, m->n_bytes / (uint64_t)batch * (uint64_t)rows, in->id)
               : hold(s, s->whole[in->id]);
}

static uint32_t *kept_at(sim *s, koila_value v, uint32_t slice)
{
    return s->kept_row[v] && slice < s->kept_slices
               ? &s->kept[(uint64_t)(s->kept_row[v] - 1) * s->kept_slices + slice]
               : NULL;
}

static void run_slice(sim *s, const koila_stage *st, uint32_t slice, int64_t rows, int64_t batch)
{
    s->n_drop = 0;
    for (uint32_t i = 0; i < st->n_instrs && !s->status; i++) {
        const koila_instr *in = &st->instrs[i];
        uint32_t *kept;
        switch ((koila_instr_kind)in->kind) {
        case KOILA_DO_RUN:
            run_node(s, in->id, in->steal, st->is_loop, rows, batch);
            break;
        case KOILA_DO_SLICE:
            if (!s->local[in->id])
                s->local[in->id] = slice_of(s, in, rows, batch);
            break;
        case KOILA_DO_ADD:
            add_up(s, in, rows, batch);
            break;
        case KOILA_DO_PUT:
            if (!s->whole[in->id])
                s->whole[in->id] = rows == batch && in->flags & KOILA_INSTR_OWNED
                                       ? hold(s, s->local[in->id])
                                       : storage_new(s, dense_bytes(s, in->id), in->id);
            break;
        case KOILA_DO_KEEP:
            if ((kept = kept_at(s, in->id, slice)) && !*kept)
                *kept = hold(s, s->local[in->id]);
            break;
        case KOILA_DO_FETCH:
            if (!(kept = kept_at(s, in->id, slice)))
                break;
            if (!s->local[in->id])
                s->local[in->id] = hold(s, *kept);
            if (in->flags & KOILA_INSTR_LAST && s->n_drop < s->drop_cap)
                s->drop[s->n_drop++] = in->id;
            break;
        case KOILA_DO_FREE:
            let_go(s, st->is_loop ? &s->local[in->id] : &s->whole[in->id]);
            break;
        }
    }
    for (uint32_t i = 0; i < s->n_drop; i++) {
        uint32_t *kept = kept_at(s, s->drop[i], slice);
        if (kept)
            let_go(s, kept);
    }
}

/* All slices of a loop. One that leaves blocks where the one before left them, and asked nothing of
 * the driver, is followed by others of its size that do the same: these are not run. */
static void run_loop(sim *s, const koila_stage *st, int64_t rows, int64_t batch)
{
    const uint32_t n = koila_plan_slices(s->plan, st->axis);
    const uint32_t n_full = rows > 0 ? (uint32_t)(batch / rows) : 0;
    const koila_cache_stat *stat = koila__cache_stats_ref(s->c);
    bool alike = n_full > 2;
    uint64_t layout = 0;
    for (uint32_t i = 0; i < st->n_instrs; i++)
        alike &= st->instrs[i].kind != KOILA_DO_KEEP && st->instrs[i].kind != KOILA_DO_FETCH;
    for (uint32_t i = 0; i < n && !s->status; i++) {
        const int64_t left = batch - (int64_t)i * rows;
        const uint64_t n_driver = stat->num_device_alloc + stat->num_device_free;
        run_slice(s, st, i, left < rows ? left : rows, batch);
        if (!alike || i + 1 >= n_full)
            continue;
        const uint64_t now = koila__cache_layout(s->c);
        if (now && now == layout && n_driver == stat->num_device_alloc + stat->num_device_free)
            i = n_full - 1;
        layout = now;
    }
}

static void run_plan(sim *s, uint32_t n_stages)
{
    for (uint32_t k = 0; k < n_stages && !s->status; k++) {
        const koila_stage *st = koila_plan_stage(s->plan, k);
        if (!st->is_loop) {
            run_slice(s, st, 0, 0, 0);
            continue;
        }
        const int64_t batch = koila_graph_axis_size(s->g, st->axis);
        const int64_t rows = koila_plan_axis_rows(s->plan, st->axis);
        run_loop(s, st, rows, batch);
        /* wide accumulators are cast back */
        for (uint32_t i = 0; i < st->n_instrs && rows != batch; i++) {
            const koila_instr *in = &st->instrs[i];
            if (in->kind != KOILA_DO_ADD || !is_half(meta_of(s, in->id)) || !s->whole[in->id])
                continue;
            uint32_t wide = s->whole[in->id];
            s->whole[in->id] = storage_new(s, dense_bytes(s, in->id), in->id);
            let_go(s, &wide);
        }
    }
}

static bool append(sim *s, uint64_t **list, uint64_t *n, uint64_t *cap, uint64_t x)
{
    if (*n == *cap) {
        uint64_t more = *cap ? *cap * 2 : 64;
        uint64_t *p = koila__realloc(&s->mem, *list, (size_t)*cap * 8, (size_t)more * 8);
        if (!p) {
            fail_memory(s);
            return false;
        }
        *list = p;
        *cap = more;
    }
    (*list)[(*n)++] = x;
    return true;
}

/* Bytes of gradient v as the optimizer finds it. */
static uint64_t grad_bytes(const sim *s, koila_value v)
{
    return whole_bytes(s, v) * (s->o.autocast && is_half(meta_of(s, v)) ? 2 : 1);
}

/* Under autocast a gradient leaves the step in the dtype of the parameter. */
static void widen_gradients(sim *s)
{
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!s->is_grad[v] || !s->whole[v] || !is_half(meta_of(s, v)))
            continue;
        const uint32_t wide = storage_new(s, grad_bytes(s, v), v);
        let_go(s, &s->whole[v]);
        s->whole[v] = wide;
    }
}

/* clip_grad_norm_: a norm a tensor, and one number for each 65,536 elements of the largest, for
 * every tensor. */
static void clip_gradients(sim *s)
{
    uint64_t *temps = NULL, n = 0, cap = 0, n_grads = 0, most_chunks = 0;
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!s->is_grad[v])
            continue;
        const uint64_t chunks = (meta_of(s, v)->n_elements + 65535) / 65536;
        n_grads++;
        if (chunks > most_chunks)
            most_chunks = chunks;
        append(s, &temps, &n, &cap, take(s, 4));
    }
    /* partial norms, all norms, theirs, the factor, the factor held below 1 */
    const uint64_t sizes[] = { n_grads * most_chunks * 4, n_grads * 4, 4, 4, 4 };
    for (size_t i = 0; i < KOILA_COUNT(sizes) && n_grads; i++)
        append(s, &temps, &n, &cap, take(s, sizes[i]));
    while (n)
        give(s, temps[--n]);
    koila__release(&s->mem, temps, (size_t)cap * 8);
}

/* DistributedDataParallel's flat copies of all gradients, last parameters first: a bucket is closed
 * when it holds 1 MiB, every later one at 25 MiB. They live as long as the model. */
static void make_buckets(sim *s)
{
    uint64_t bytes = 0, full = MIB;
    for (koila_value v = s->n_values; v-- > 0 && !s->status;) {
        if (s->is_grad[v])
            bytes += grad_bytes(s, v);
        if (bytes < full && (v || !bytes))
            continue;
        append(s, &s->state, &s->n_state, &s->state_cap, take(s, bytes));
        bytes = 0;
        full = 25 * MIB;
    }
}

/* State is made by the first step; foreach holds one temporary for each parameter at once, the loop
 * one at a time, fused none. */
static void optimizer_step(sim *s, bool first)
{
    static const int n_states[] = { 0, 0, 1, 2, 2 };
    const uint32_t kind = s->o.optimizer;
    /* scale and growth tracker stay; its inverse (in double, twice, and in float) and what was
     * found live while gradients are scaled back in place */
    if (s->o.grad_scaler) {
        for (int i = 0; i < 2 && first; i++)
            append(s, &s->state, &s->n_state, &s->state_cap, take(s, 4));
        const uint64_t a = take(s, 4);
        const uint64_t b = take(s, 8);
        const uint64_t c = take(s, 8);
        const uint64_t d = take(s, 4);
        give(s, b);
        give(s, c);
        give(s, d);
        give(s, a);
    }
    if (s->o.clip_grad_norm)
        clip_gradients(s);
    if (kind == KOILA_OPTIMIZER_NONE || kind > KOILA_OPTIMIZER_ADAMW)
        return;
    const bool adam = kind >= KOILA_OPTIMIZER_ADAM;
    uint64_t *temps = NULL, n = 0, cap = 0, largest = 0;
    s->at_node = KOILA_NONE;
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!s->is_grad[v])
            continue;
        const uint64_t bytes = grad_bytes(s, v);
        if (bytes > largest)
            largest = bytes;
        for (int k = 0; first && k < n_states[kind] + (adam && s->o.amsgrad); k++)
            append(s, &s->state, &s->n_state, &s->state_cap, take(s, bytes));
        /* the step counter */
        if (first && adam && s->o.way == KOILA_WAY_FUSED)
            append(s, &s->state, &s->n_state, &s->state_cap, take(s, 4));
    }
    /* decayed gradients, gone before Adam's roots */
    for (int pass = 0; pass < 2 && !s->status; pass++) {
        const bool has = pass ? adam : s->o.weight_decay && kind != KOILA_OPTIMIZER_ADAMW;
        if (!has || s->o.way == KOILA_WAY_FUSED)
            continue;
        if (s->o.way == KOILA_WAY_LOOP) {
            uint64_t a = take(s, largest);
            uint64_t b = take(s, largest);
            give(s, b);
            give(s, a);
            continue;
        }
        for (koila_value v = 0; v < s->n_values && !s->status; v++)
            if (s->is_grad[v])
                append(s, &temps, &n, &cap, take(s, grad_bytes(s, v)));
        while (n)
            give(s, temps[--n]);
    }
    koila__release(&s->mem, temps, (size_t)cap * 8);
}

/* One training step. */
static void run_step(sim *s, uint32_t n_stages, bool first)
{
    s->at_node = KOILA_NONE;
    /* the next batch is copied in while the last is still bound */
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        const koila_value_info x = koila_value_get(s->g, v);
        if (x.node != KOILA_NONE || x.leaf_kind != KOILA_LEAF_BATCH)
            continue;
        uint32_t fresh = storage_new(s, whole_bytes(s, v), v);
        let_go(s, &s->whole[v]);
        s->whole[v] = fresh;
    }
    /* zero_grad; loss and outputs stay until they are bound anew */
    for (koila_value v = 0; v < s->n_values && !s->status; v++)
        if (s->is_target[v] && s->whole[v]) {
            if (!s->is_grad[v])
                append(s, &s->last_out, &s->n_last_out, &s->last_out_cap, hold(s, s->whole[v]));
            let_go(s, &s->whole[v]);
        }
    run_plan(s, n_stages);
    if (s->o.autocast)
        widen_gradients(s);
    for (koila_value v = 0; v < s->n_values && !s->status; v++)
        if (s->whole[v] && !s->is_target[v] && koila_value_get(s->g, v).node != KOILA_NONE)
            let_go(s, &s->whole[v]);
    while (s->n_last_out) {
        uint32_t i = (uint32_t)s->last_out[--s->n_last_out];
        let_go(s, &i);
    }
    optimizer_step(s, first);
}

/* ---- setting up */

static void *zeroed(sim *s, uint64_t n, size_t size)
{
    void *p = n < SIZE_MAX / 16 / size
                  ? koila__realloc(&s->mem, NULL, 0, (size_t)(n ? n : 1) * size)
                  : NULL;
    if (!p) {
        fail_memory(s);
        return NULL;
    }
    return memset(p, 0, (size_t)(n ? n : 1) * size);
}

static bool is_real_leaf(const sim *s, koila_value v)
{
    const koila_value_info x = koila_value_get(s->g, v);
    return x.node == KOILA_NONE && x.leaf_kind == KOILA_LEAF_REAL && x.meta != KOILA_NONE;
}
static bool is_contiguous(const koila_meta_info *m)
{
    int64_t want = 1;
    for (uint32_t i = m->n_dims; i-- > 0; want *= m->size[i])
        if (m->size[i] != 1 && m->stride[i] != want)
            return false;
    return true;
}
/* The same sizes, in any order: a parameter and its transpose. */
static bool same_sizes(const koila_meta_info *a, const koila_meta_info *b)
{
    uint32_t taken = 0;
    if (a->dtype != b->dtype || a->n_dims != b->n_dims || a->n_elements != b->n_elements)
        return false;
    for (uint32_t i = 0; i < a->n_dims; i++) {
        uint32_t k = 0;
        while (k < b->n_dims && (taken >> k & 1 || b->size[k] != a->size[i]))
            k++;
        if (k == b->n_dims)
            return false;
        taken |= 1u << k;
    }
    return true;
}

/* Note [Masks] Dropout on a CPU is empty_strided, bernoulli_, div_, mul: the mask has the input's
 * dtype. On CUDA it is native_dropout: one byte an element, and no other temporary. So the storage
 * that bernoulli_ fills counts one byte an element. */
static void find_masks(sim *s)
{
    for (koila_node i = 0; i < koila_graph_n_nodes(s->g); i++) {
        const koila_node_info node = koila_node_get(s->g, i);
        const koila_sig_info *sig = koila_sig_get(s->t, node.sig);
        char name[80];
        for (uint32_t w = 0; w < sig->n_writes; w++) {
            const koila_value v = koila_node_inputs(s->g, i)[sig->writes[w].input];
            const koila_node maker = koila_value_get(s->g, v).node;
            base_name(koila_op_name(s->t, sig->op), name, sizeof name);
            if (!strcmp(name, "bernoulli") && maker != KOILA_NONE && meta_of(s, v)) {
                base_name(
                    koila_op_name(s->t, koila_sig_get(s->t, koila_node_get(s->g, maker).sig)->op),
                    name, sizeof name);
                s->is_mask[v] = !strncmp(name, "empty", 5) || !strncmp(name, "new_empty", 9);
            }
            /* also if the write has to copy it */
            s->is_mask[node.first_output + sig->n_fresh + w] = s->is_mask[v];
        }
    }
}

/* Note [Square matrices] On a CPU attention with dropout runs as bmm, _safe_softmax, dropout, bmm,
 * with scores and probabilities in memory. CUDA's fused kernels take dropout and never make them.
 * So what _safe_softmax reads and writes, and what is joined to it by pointwise operators and views
 * alone (at both ends stands a bmm), counts nothing; but the high end keeps it, for which kernel
 * runs is not known. */
static bool passes_on(const sim *s, koila_op op)
{
    static const char *const names[] = { "mul",
                                         "div",
                                         "add",
                                         "sub",
                                         "neg",
                                         "masked_fill",
                                         "where",
                                         "_safe_softmax",
                                         "_softmax_backward_data",
                                         "bernoulli",
                                         "empty_strided",
                                         "empty_like",
                                         "native_dropout",
                                         "native_dropout_backward",
                                         "clone",
                                         "_to_copy" };
    char name[80];
    if (s->kinds[op] == INSIDE_VIEW)
        return true;
    base_name(koila_op_name(s->t, op), name, sizeof name);
    for (size_t i = 0; i < KOILA_COUNT(names); i++)
        if (!strcmp(names[i], name))
            return true;
    return false;
}

static void find_squares(sim *s)
{
    const uint32_t n_nodes = koila_graph_n_nodes(s->g);
    bool any = false;
    for (koila_node i = 0; i < n_nodes; i++) {
        const koila_node_info node = koila_node_get(s->g, i);
        if (strncmp(koila_op_name(s->t, koila_sig_get(s->t, node.sig)->op), "aten::_safe_softmax",
                    19))
            continue;
        s->is_square[node.first_output] = 1;
        any = true;
    }
    /* forwards and backwards in turn, until nothing is new */
    for (int pass = 0; any && pass < 32; pass++) {
        any = false;
        for (uint32_t k = 0; k < n_nodes; k++) {
            const koila_node i = pass & 1 ? n_nodes - 1 - k : k;
            const koila_node_info node = koila_node_get(s->g, i);
            const koila_sig_info *sig = koila_sig_get(s->t, node.sig);
            const koila_value *inputs = koila_node_inputs(s->g, i);
            const koila_meta_info *square = NULL;
            if (!passes_on(s, sig->op))
                continue;
            for (uint32_t a = 0; a < sig->n_inputs && !square; a++)
                if (s->is_square[inputs[a]])
                    square = meta_of(s, inputs[a]);
            for (uint32_t a = 0; a < sig->n_outputs && !square; a++)
                if (s->is_square[node.first_output + a])
                    square = meta_of(s, node.first_output + a);
            for (uint32_t a = 0; square && a < sig->n_inputs + sig->n_outputs; a++) {
                const koila_value v =
                    a < sig->n_inputs ? inputs[a] : node.first_output + a - sig->n_inputs;
                const koila_meta_info *m = meta_of(s, v);
                if (s->is_square[v] || !m || m->n_elements != square->n_elements ||
                    koila_value_get(s->g, v).node == KOILA_NONE)
                    continue;
                s->is_square[v] = 1;
                any = true;
            }
        }
    }
}

/* What is known of the values of a graph, whatever the plan. */
static koila_status sim_open(sim *s, const koila_graph *g, const koila_device *d,
                             const koila_predict_opts *o, int level)
{
    *s = (sim){ .g = g,
                .d = d,
                .level = level,
                .mem = koila__allocator(NULL),
                .peak_node = KOILA_NONE,
                .at_node = KOILA_NONE };
    if (o)
        s->o = *o;
    s->t = koila_graph_table(s->g);
    s->n_values = koila_graph_n_values(s->g);
    s->n_ops = koila_table_n_ops(s->t);
    s->whole = zeroed(s, s->n_values, sizeof(uint32_t));
    s->local = zeroed(s, s->n_values, sizeof(uint32_t));
    s->is_target = zeroed(s, s->n_values, 1);
    s->is_grad = zeroed(s, s->n_values, 1);
    s->is_mask = zeroed(s, s->n_values, 1);
    s->is_square = zeroed(s, s->n_values, 1);
    s->kept_row = zeroed(s, s->n_values, sizeof(uint32_t));
    s->kinds = zeroed(s, s->n_ops, sizeof(inside_kind));
    if (s->status)
        return s->status;
    for (uint32_t i = 0; i < s->n_ops; i++)
        s->kinds[i] = kind_of_op(s->t, i);
    find_masks(s);
    find_squares(s);
    return s->status;
}

static koila_status sim_init(sim *s, const koila_plan *plan, uint32_t n_targets,
                             const koila_device *d, const koila_predict_opts *o, int level)
{
    KOILA_TRY(sim_open(s, koila_plan_graph(plan), d, o, level));
    s->plan = plan;
    for (uint32_t i = 0; i < n_targets; i++) {
        const koila_value v = koila_plan_target(plan, i);
        if (v >= s->n_values)
            continue;
        s->is_target[v] = 1;
        const koila_meta_info *m = meta_of(s, v);
        for (koila_value leaf = 0; m && m->n_dims && leaf < s->n_values && !s->is_grad[v]; leaf++) {
            if (is_real_leaf(s, leaf))
                s->is_grad[v] = same_sizes(meta_of(s, leaf), m);
        }
    }
    const koila_plan_info info = koila_plan_get(plan);
    uint32_t n_fetches = 0;
    for (uint32_t k = 0; k < info.n_stages; k++) {
        const koila_stage *st = koila_plan_stage(plan, k);
        if (st->is_loop && koila_plan_slices(plan, st->axis) > s->kept_slices)
            s->kept_slices = koila_plan_slices(plan, st->axis);
        for (uint32_t i = 0; i < st->n_instrs; i++) {
            if (st->instrs[i].kind == KOILA_DO_KEEP && !s->kept_row[st->instrs[i].id])
                s->kept_row[st->instrs[i].id] = ++s->n_kept;
            n_fetches += st->instrs[i].kind == KOILA_DO_FETCH;
        }
    }
    if ((uint64_t)s->n_kept * s->kept_slices > MAX_KEPT)
        return s->status = KOILA_UNSUPPORTED;
    s->kept = zeroed(s, (uint64_t)s->n_kept * s->kept_slices, sizeof(uint32_t));
    s->drop = zeroed(s, n_fetches, sizeof(uint32_t));
    s->drop_cap = n_fetches;
    return s->status;
}

static void sim_deinit(sim *s, bool own_cache)
{
    const uint64_t n = s->n_values ? s->n_values : 1;
    const uint64_t kept = (uint64_t)s->n_kept * s->kept_slices;
    koila__release(&s->mem, s->whole, n * sizeof(uint32_t));
    koila__release(&s->mem, s->local, n * sizeof(uint32_t));
    koila__release(&s->mem, s->is_target, n);
    koila__release(&s->mem, s->is_grad, n);
    koila__release(&s->mem, s->is_mask, n);
    koila__release(&s->mem, s->is_square, n);
    koila__release(&s->mem, s->kept_row, n * sizeof(uint32_t));
    koila__release(&s->mem, s->kinds, (s->n_ops ? s->n_ops : 1) * sizeof(inside_kind));
    koila__release(&s->mem, s->kept, (kept ? kept : 1) * sizeof(uint32_t));
    koila__release(&s->mem, s->drop, (s->drop_cap ? s->drop_cap : 1) * sizeof(uint32_t));
    koila__release(&s->mem, s->st, s->st_cap * sizeof(storage));
    koila__release(&s->mem, s->state, (size_t)s->state_cap * 8);
    koila__release(&s->mem, s->last_out, (size_t)s->last_out_cap * 8);
    if (own_cache)
        koila_cache_free(s->c);
}

/* Parameters, masks, tables: there before the first step. A weight is often met twice, as itself
 * and transposed: a leaf that is not contiguous shares the storage of a contiguous one of the same
 * sizes, one for one. */
static void load_leaves(sim *s)
{
    for (koila_value v = 0; v < s->n_values && !s->status; v++)
        if (is_real_leaf(s, v) && is_contiguous(meta_of(s, v)))
            s->whole[v] = storage_new(s, whole_bytes(s, v), v);
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!is_real_leaf(s, v) || s->whole[v])
            continue;
        koila_value twin = 0;
        while (twin < s->n_values &&
               !(s->whole[twin] && s->st[s->whole[twin]].refs == 1 && is_real_leaf(s, twin) &&
                 is_contiguous(meta_of(s, twin)) && same_sizes(meta_of(s, twin), meta_of(s, v))))
            twin++;
        s->whole[v] =
            twin < s->n_values ? hold(s, s->whole[twin]) : storage_new(s, whole_bytes(s, v), v);
    }
    /* the float32 parameter behind a cast */
    for (uint32_t i = 1; i <= s->n_st && s->o.autocast && !s->status; i++)
        if (is_half(meta_of(s, s->st[i].value)))
            append(s, &s->state, &s->n_state, &s->state_cap, take(s, 2 * s->st[i].bytes));
}

/* Values nobody uses are what the step was run for: gradients, loss, outputs. */
static koila_status find_targets(const koila_graph *g, const koila_allocator *mem,
                                 koila_value **out, uint32_t *n, uint32_t *cap)
{
    const uint32_t n_values = koila_graph_n_values(g);
    const uint32_t n_nodes = koila_graph_n_nodes(g);
    const koila_table *t = koila_graph_table(g);
    *cap = n_values ? n_values : 1;
    koila_value *list = koila__realloc(mem, NULL, 0, *cap * sizeof *list);
    uint8_t *used = koila__realloc(mem, NULL, 0, *cap);
    if (!list || !used) {
        koila__release(mem, list, *cap * sizeof *list);
        koila__release(mem, used, *cap);
        return KOILA_NO_MEMORY;
    }
    memset(used, 0, *cap);
    *n = 0;
    for (koila_node i = 0; i < n_nodes; i++) {
        const koila_sig_info *sig = koila_sig_get(t, koila_node_get(g, i).sig);
        for (uint32_t k = 0; k < sig->n_inputs; k++)
            used[koila_node_inputs(g, i)[k]] = 1;
    }
    for (koila_node i = 0; i < n_nodes; i++) {
        const koila_node_info node = koila_node_get(g, i);
        const koila_sig_info *sig = koila_sig_get(t, node.sig);
        for (uint32_t k = 0; k < sig->n_outputs; k++)
            if (!used[node.first_output + k] &&
                koila_value_get(g, node.first_output + k).meta != KOILA_NONE &&
                (k == 0 || k >= sig->n_fresh || sig->n_outputs > 2))
                list[(*n)++] = node.first_output + k;
    }
    koila__release(mem, used, *cap);
    *out = list;
    return KOILA_OK;
}

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

static void shape_text(const sim *s, koila_value v, char *out, size_t room)
{
    const koila_meta_info *m = meta_of(s, v);
    size_t n = m ? (size_t)snprintf(out, room, "%s[", koila_dtype_text(m->dtype)) : 0;
    for (uint32_t i = 0; m && i < m->n_dims && n + 24 < room; i++)
        n += (size_t)snprintf(out + n, room - n, "%s%lld", i ? ", " : "", (long long)m->size[i]);
    if (m && n + 1 < room)
        snprintf(out + n, room - n, "]");
}

static void look_around(sim *s)
{
    koila_prediction *p = s->out;
    for (uint32_t i = 1; i <= s->n_st; i++) {
        const storage *x = &s->st[i];
        if (!x->refs || !x->bytes)
            continue;
        uint32_t at = p->n_largest;
        while (at > 0 && p->largest[at - 1].bytes < x->bytes)
            at--;
        if (at == KOILA_PREDICT_LARGEST)
            continue;
        if (p->n_largest < KOILA_PREDICT_LARGEST)
            p->n_largest++;
        memmove(&p->largest[at + 1], &p->largest[at],
                (p->n_largest - at - 1) * sizeof p->largest[0]);
        p->largest[at].bytes = x->bytes;
        shape_text(s, x->value, p->largest[at].what, sizeof p->largest[at].what);
        const koila_value_info v = koila_value_get(s->g, x->value);
        line_text(s->g, v.node, p->largest[at].line, sizeof p->largest[at].line);
        if (v.node == KOILA_NONE)
            snprintf(p->largest[at].line, sizeof p->largest[at].line, "%s",
                     koila_graph_leaf_name(s->g, x->value));
    }
}

/* ---- the prediction */

typedef struct run_result {
    koila_peaks first, steady; /* one of the three numbers each */
    uint64_t allocated[2], reserved[2], device[2];
    bool oom, settled;
    uint32_t n_steps;
    uint64_t retries;
    koila_node peak_node;
    uint64_t most;
} run_result;

static void peaks_now(const sim *s, uint64_t *allocated, uint64_t *reserved, uint64_t *device)
{
    const koila_cache_stat *x = koila__cache_stats_ref(s->c);
    *allocated = x->of[KOILA_STAT_ALLOCATED_BYTES][0].peak;
    *reserved = x->of[KOILA_STAT_RESERVED_BYTES][0].peak;
    *device = x->peak_device_bytes; /* the context comes on top */
}

/* What a prediction is of. */
typedef struct subject {
    const koila_graph *g;
    const koila_device *d;
    koila_cache_config conf;
    koila_predict_opts o;
    uint32_t n_targets;
    uint64_t memory_bytes;
} subject;

/* All steps at one level. `limit` 0: unlimited. With `stop_at`, looks around when allocated reaches
 * it. */
static koila_status run_level(const subject *x, const koila_plan *plan, int level, uint64_t limit,
                              uint64_t stop_at, koila_prediction *out, run_result *r,
                              koila_error *e)
{
    sim s;
    const uint32_t n_stages = koila_plan_get(plan).n_stages;
    koila_status status = sim_init(&s, plan, x->n_targets, x->d, &x->o, level);
    koila_cache_config c = x->conf;
    memset(r, 0, sizeof *r);
    c.total_bytes = limit;
    const koila_device_value context = koila_device_get(x->d, KOILA_DEVICE_CONTEXT_BYTES);
    c.outside_bytes = limit ? context.value + context.spread : 0;
    c.device_bytes = koila_device_get(x->d, KOILA_DEVICE_TOTAL_BYTES).value;
    if (c.memory_fraction > 0.0)
        koila_cache_config_fraction(&c, c.memory_fraction, c.device_bytes,
                                    koila_device_get(x->d, KOILA_DEVICE_INFO_TOTAL_BYTES).value);
    s.out = out;
    s.want_peak = stop_at != 0;
    s.stop_at = stop_at;
    s.ends_at_oom = limit != 0; /* then only whether it fits is asked for */
    if (!status)
        status = koila_cache_new(&c, NULL, &s.c, e);
    if (!status)
        load_leaves(&s);
    if (!status && x->o.ddp)
        make_buckets(&s);
    if (!status)
        status = s.status;
    uint64_t before[3] = { 0 };
    for (uint32_t step = 0; !status && step < MAX_STEPS && !r->settled; step++) {
        run_step(&s, n_stages, step == 0);
        status = s.status;
        if (status)
            break;
        peaks_now(&s, &r->allocated[step != 0], &r->reserved[step != 0], &r->device[step != 0]);
        const uint64_t reserved =
            koila__cache_stats_ref(s.c)->of[KOILA_STAT_RESERVED_BYTES][0].current;
        const uint64_t a = r->allocated[step != 0];
        const uint64_t b = r->reserved[step != 0];
        r->settled = step > 1 && before[0] == a && before[1] == b && before[2] == reserved;
        before[0] = a;
        before[1] = b;
        before[2] = reserved;
        r->n_steps = step + 1;
    }
    if (status == KOILA_OOM)
        status = KOILA_OK;
    if (!status) {
        r->oom = s.oom;
        r->retries = koila__cache_stats_ref(s.c)->num_alloc_retries;
        r->peak_node = s.peak_node;
        r->most = s.most;
    }
    sim_deinit(&s, true);
    if (status == KOILA_NO_MEMORY)
        koila__fail(e, status, 0, "the host is out of memory");
    if (status == KOILA_UNSUPPORTED && e && !e->text[0])
        koila__fail(e, status, 0, "the plan keeps too many pieces to be simulated");
    return status;
}

/* ---- which plans fit: koila_plan_options.accepts */

typedef struct judge {
    koila_status (*fits)(void *user, const koila_plan *p, bool *yes);
    void *user;
    koila_status status;
    uint32_t n_simulations;
    uint32_t refused_slices; /* the last refusal */
    uint64_t refused_bytes;
    bool accepted;
    const koila_graph *of; /* of the last that was */
    int64_t rows;
} judge;

/* The last simulation is left for one row a slice. Another policy for the number of slices just
 * refused is not tried unless it needs clearly less by its sum. */
static bool accepts(void *user, const koila_plan *p)
{
    judge *j = user;
    const koila_plan_info info = koila_plan_get(p);
    bool yes = false;
    if (j->status || j->n_simulations + (info.rows > 1) >= KOILA_MAX_SIMULATIONS)
        return false;
    if (info.n_slices == j->refused_slices && info.rows > 1 &&
        info.peak_bytes > j->refused_bytes - j->refused_bytes / 8)
        return false;
    j->n_simulations++;
    j->status = j->fits(j->user, p, &yes);
    if (j->status)
        return false;
    if (!yes) {
        j->refused_slices = info.n_slices;
        j->refused_bytes = info.peak_bytes;
    }
    if (yes) {
        j->accepted = true;
        j->of = koila_plan_graph(p);
        j->rows = info.rows;
    }
    return yes;
}

static koila_status fits_from_start(void *user, const koila_plan *p, bool *yes)
{
    const subject *x = user;
    run_result r = { 0 };
    koila_status status = KOILA_OK;
    *yes = true;
    /* smaller requests may leave larger holes */
    for (int level = HIGH; level >= LOW && *yes && !status; level--) {
        status = run_level(x, p, level, x->memory_bytes, 0, NULL, &r, NULL);
        *yes = !status && !r.oom;
    }
    return status;
}

/* At least what is left for a step: the memory without context and leaves, and what the plan counts
 * for dropout masks beyond their bytes on CUDA. */
static uint64_t left_for_step(const subject *x, koila_status *status)
{
    sim s;
    uint64_t left = x->memory_bytes - koila_device_get(x->d, KOILA_DEVICE_CONTEXT_BYTES).value;
    uint64_t held = 0;
    uint64_t over = 0;
    *status = sim_open(&s, x->g, x->d, &x->o, HIGH);
    for (koila_value v = 0; v < s.n_values && !*status; v++) {
        const uint64_t bytes = whole_bytes(&s, v);
        if (koila_value_get(x->g, v).node != KOILA_NONE)
            over += bytes - cuda_bytes(&s, v, bytes);
        else if (!is_real_leaf(&s, v) || is_contiguous(meta_of(&s, v)))
            held += bytes;
    }
    sim_deinit(&s, false);
    return (left > held ? left - held : 1) + over;
}

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

static void write_notes(koila_prediction *p, const koila_graph *g, const koila_device *d,
                        const koila_cache_config *c, const koila_predict_opts *o)
{
    const koila_table *t = koila_graph_table(g);
    bool seen[INSIDE_UNKNOWN + 1] = { false };
    for (koila_node i = 0; i < koila_graph_n_nodes(g); i++)
        seen[kind_of_op(t, koila_sig_get(t, koila_node_get(g, i).sig)->op)] = true;
    for (int f = 0; f < KOILA_N_DEVICE_FIELDS; f++) {
        const koila_device_value v = koila_device_get(d, (koila_device_field)f);
        if (!strcmp(v.how, "estimated") && (f != KOILA_DEVICE_CONV_BYTES || seen[INSIDE_CONV]) &&
            f != KOILA_DEVICE_CUDNN)
            note(p, "%s is estimated: %llu +- %llu", koila_device_field_key((koila_device_field)f),
                 (unsigned long long)v.value, (unsigned long long)v.spread);
    }
    if (strcmp(c->verified, "recording"))
        note(p, "the allocator's rules of torch %u.%u are %s, not yet proved on a recording",
             c->torch_version / 100, c->torch_version % 100, c->verified);
    note(p, "recorded on a CPU: results are taken to have the same shapes and dtypes on CUDA");
    if (seen[INSIDE_SDPA] || seen[INSIDE_SDPA_GRAD])
        note(p, o->sdpa ? "attention's back end is as given"
                        : "attention's back end is chosen by dtype, head size and capability; "
                          "--sdpa overrides");
    for (koila_node i = 0; i < koila_graph_n_nodes(g); i++)
        if (!strncmp(koila_op_name(t, koila_sig_get(t, koila_node_get(g, i).sig)->op),
                     "aten::_safe_softmax", 19)) {
            note(p, "attention with dropout: fused kernels make no square matrices; the high end "
                    "keeps them, for the kernel is not known");
            break;
        }
    if (seen[INSIDE_CONV])
        note(p, "every convolution is taken to use the profile's convolution workspace");
    if (seen[INSIDE_GEMM])
        note(p, "cuBLAS keeps one workspace for forward and one for backward");
    if (seen[INSIDE_RNN])
        note(p,
             "a recurrent layer is taken to run in cuDNN; its reserve and workspace are estimated");
    const uint64_t capability = koila_device_get(d, KOILA_DEVICE_CAPABILITY).value;
    if (seen[INSIDE_SDPA] && !o->sdpa && (capability == 90 || capability == 100) &&
        !koila_device_get(d, KOILA_DEVICE_CUDNN).value)
        note(p, "the profile names no cuDNN; with 9.15.1 or newer this device tries cuDNN's "
                "attention first: see --sdpa cudnn");
    if (o->cublas_workspace) {
        uint64_t bytes = 0;
        if (koila_cublas_workspace(o->cublas_workspace, &bytes))
            note(p, "cuBLAS's workspace is %llu bytes, by CUBLAS_WORKSPACE_CONFIG",
                 (unsigned long long)bytes);
        else
            note(p,
                 "CUBLAS_WORKSPACE_CONFIG=%.40s says no ':KiB:count', so torch takes its default",
                 o->cublas_workspace);
    }
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

/* Operators without a row, those first that are met first. */
static void list_unknown(koila_prediction *p, const koila_graph *g)
{
    const koila_table *t = koila_graph_table(g);
    for (koila_node i = 0; i < koila_graph_n_nodes(g); i++) {
        const koila_op op = koila_sig_get(t, koila_node_get(g, i).sig)->op;
        uint32_t k = 0;
        if (kind_of_op(t, op) != INSIDE_UNKNOWN)
            continue;
        while (k < p->n_not_modelled && strcmp(p->not_modelled[k].op, koila_op_name(t, op)))
            k++;
        if (k == KOILA_PREDICT_NOT_MODELLED)
            continue;
        if (k == p->n_not_modelled)
            snprintf(p->not_modelled[p->n_not_modelled++].op, sizeof p->not_modelled[0].op, "%s",
                     koila_op_name(t, op));
        p->not_modelled[k].n_calls++;
    }
}

/* Rows that leave at most `n` slices of the largest axis. */
static int64_t rows_of(const koila_graph *g, int64_t n)
{
    int64_t batch = 1;
    for (uint32_t a = 0; a < koila_graph_n_axes(g); a++)
        if (koila_graph_axis_size(g, (uint16_t)a) > batch)
            batch = koila_graph_axis_size(g, (uint16_t)a);
    return (batch + n - 1) / n;
}

/* a step that does not fit is shown in so many: more of them help little and take long to simulate
 */
enum { MANY_SLICES = 64 };

/* The plan to predict: forced rows, or what fits. */
static koila_status choose_plan(const subject *x, const koila_value *targets, koila_plan **plan,
                                bool *hopeless, koila_error *e)
{
    judge j = { .fits = fits_from_start, .user = (void *)x };
    koila_plan_options po = { .struct_size = sizeof po,
                              .budget_bytes = UINT64_MAX,
                              .rows = x->o.rows ? x->o.rows : rows_of(x->g, 1) };
    koila_status status;
    *hopeless = false;
    if (x->o.rows == KOILA_ROWS_AUTO) {
        po.rows = 0;
        po.accepts = accepts;
        po.accepts_user = &j;
        po.budget_bytes = left_for_step(x, &status);
        if (status)
            return koila__fail(e, status, 0, "%s", koila_status_text(status));
        status = koila_plan_new(x->g, targets, x->n_targets, &po, NULL, plan, e);
        if (!status && !j.status && j.accepted)
            return KOILA_OK;
        if (!status)
            koila_plan_free(*plan);
        *plan = NULL;
        if (j.status)
            return koila__fail(e, j.status, 0, "%s", koila_status_text(j.status));
        if (status && status != KOILA_OOM)
            return status;
        if (e)
            *e = (koila_error){ .struct_size = e->struct_size };
        po = (koila_plan_options){ .struct_size = sizeof po,
                                   .budget_bytes = UINT64_MAX,
                                   .rows = rows_of(x->g, MANY_SLICES) };
        *hopeless = true;
    }
    return koila_plan_new(x->g, targets, x->n_targets, &po, NULL, plan, e);
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
    subject x = { .g = g, .d = d };
    const koila_allocator mem = koila__allocator(NULL);
    const koila_device_value total = koila_device_get(d, KOILA_DEVICE_TOTAL_BYTES);
    koila_value *targets = NULL;
    uint32_t cap = 0;
    koila_plan *plan = NULL;
    bool hopeless = false;
    run_result r[3], limited, peak;
    koila_prediction p = { .struct_size = (uint32_t)sizeof p };
    if (o)
        x.o = *o;
    if (c)
        x.conf = *c;
    else
        koila_cache_config_init(&x.conf, NULL);
    if (x.o.rows < KOILA_ROWS_AUTO)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "rows of a slice cannot be negative");
    p.memory_bytes = x.memory_bytes =
        x.o.memory_bytes ? x.o.memory_bytes : total.value - total.spread;
    const uint64_t alone = koila_device_get(d, KOILA_DEVICE_CONTEXT_BYTES).value;
    if (p.memory_bytes <= alone)
        return koila__fail(
            e, KOILA_OOM, 0,
            "does not fit: a CUDA context alone needs %llu bytes, %llu are given, %llu bytes short",
            (unsigned long long)alone, (unsigned long long)p.memory_bytes,
            (unsigned long long)(alone - p.memory_bytes));
    if (!koila_graph_n_nodes(g))
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "the step has no operators");
    koila_status status = find_targets(g, &mem, &targets, &x.n_targets, &cap);
    if (status)
        return koila__fail(e, status, 0, "the host is out of memory");
    status = choose_plan(&x, targets, &plan, &hopeless, e);
    for (int level = LOW; level <= HIGH && !status; level++) {
        status = run_level(&x, plan, level, 0, 0, &p, &r[level], e);
        if (status)
            break;
        koila_peaks *at[2] = { &p.first, &p.steady };
        for (int k = 0; k < 2; k++) {
            const uint64_t v[3] = { r[level].allocated[k], r[level].reserved[k],
                                    r[level].device[k] };
            koila_range *to[3] = { &at[k]->allocated, &at[k]->reserved, &at[k]->device };
            /* more asked for is not always more reserved: low and high are the least and the most
             * of the three */
            for (int i = 0; i < 3; i++) {
                if (level == LOW || v[i] < to[i]->low)
                    to[i]->low = v[i];
                if (level == LOW || v[i] > to[i]->high)
                    to[i]->high = v[i];
                if (level == EXPECTED)
                    to[i]->expected = v[i];
            }
        }
    }
    /* what is outside is not larger because less is asked for inside */
    for (int k = 0; k < 2 && !status; k++) {
        koila_range *device = k ? &p.steady.device : &p.first.device;
        const koila_device_value context = koila_device_get(d, KOILA_DEVICE_CONTEXT_BYTES);
        device->low += context.value - context.spread;
        device->expected += context.value;
        device->high += context.value + context.spread;
    }
    if (!status)
        status = run_level(&x, plan, HIGH, p.memory_bytes, 0, NULL, &limited, e);
    for (int level = EXPECTED; level >= LOW && !status && !limited.oom; level--) {
        run_result other;
        status = run_level(&x, plan, level, p.memory_bytes, 0, NULL, &other, e);
        if (other.oom)
            limited = other;
    }
    if (!status && r[EXPECTED].most)
        status = run_level(&x, plan, EXPECTED, 0, r[EXPECTED].most, &p, &peak, e);
    if (!status) {
        const koila_plan_info info = koila_plan_get(plan);
        const uint64_t device =
            p.first.device.high > p.steady.device.high ? p.first.device.high : p.steady.device.high;
        p.fits = !limited.oom;
        p.n_retries = limited.retries;
        p.spare_bytes = p.fits && p.memory_bytes > device ? p.memory_bytes - device : 0;
        p.settled = r[LOW].settled && r[EXPECTED].settled && r[HIGH].settled;
        p.n_steps = r[EXPECTED].n_steps;
        p.batch = info.batch;
        p.rows = info.rows;
        p.n_slices = info.n_slices;
        if (r[EXPECTED].peak_node != KOILA_NONE) {
            const koila_graph *lowered = koila_plan_graph(plan);
            snprintf(p.peak_op, sizeof p.peak_op, "%s",
                     koila_op_name(koila_graph_table(lowered),
                                   koila_sig_get(koila_graph_table(lowered),
                                                 koila_node_get(lowered, r[EXPECTED].peak_node).sig)
                                       ->op));
            line_text(lowered, r[EXPECTED].peak_node, p.peak_line, sizeof p.peak_line);
        }
        list_unknown(&p, g);
        if (hopeless && !p.fits)
            note(&p, "no number of slices fits, down to one row each; shown in %u", p.n_slices);
        write_notes(&p, g, d, &x.conf, &x.o);
        *out = p;
        if (plan_out) {
            *plan_out = plan;
            plan = NULL;
        }
    }
    koila_plan_free(plan);
    koila__release(&mem, targets, cap * sizeof *targets);
    return status;
}

/* ---- a device that is here */

typedef struct seat {
    const koila_device *d;
    koila_cache *live;
    koila_fit_opts o;
    koila_fit fit, taken; /* the last run; the last that fits */
} seat;

static koila_status run_live(seat *x, const koila_plan *p)
{
    sim s;
    koila_fit f = { .struct_size = (uint32_t)sizeof f, .n_simulations = x->fit.n_simulations + 1 };
    const koila_predict_opts o = { .struct_size = sizeof o,
                                   .sdpa = x->o.sdpa,
                                   .cublas_workspace = x->o.cublas_workspace };
    const uint64_t left = koila__cache_left(x->live);
    const uint64_t sum = koila_plan_get(p).peak_bytes;
    /* a margin holds for the sum as well: what is cached counts too */
    if (x->o.margin_bytes && left != UINT64_MAX &&
        (left < x->o.margin_bytes || left - x->o.margin_bytes < sum)) {
        x->fit = f;
        return KOILA_OK;
    }
    koila_status status = sim_init(&s, p, 0, x->d, &o, HIGH);
    const uint64_t mark = status ? 0 : koila_cache_mark(x->live);
    if (!status && !mark)
        status = KOILA_NO_MEMORY;
    if (!status) {
        const koila_cache_stat *stat = koila__cache_stats_ref(x->live);
        const uint64_t retries = stat->num_alloc_retries;
        koila__cache_begin(x->live, x->o.margin_bytes);
        s.c = x->live;
        s.stream = x->o.stream;
        s.ends_at_oom = true;
        /* what is live is in the cache already: leaves are storages without bytes here */
        for (koila_value v = 0; v < s.n_values && !s.status; v++)
            if (koila_value_get(s.g, v).node == KOILA_NONE)
                s.whole[v] = storage_new(&s, 0, v);
        run_plan(&s, koila_plan_get(p).n_stages);
        status = s.status == KOILA_OOM ? KOILA_OK : s.status;
        f.fits = !s.oom;
        f.peak_allocated = stat->of[KOILA_STAT_ALLOCATED_BYTES][0].peak;
        f.peak_reserved = stat->of[KOILA_STAT_RESERVED_BYTES][0].peak;
        f.n_retries = stat->num_alloc_retries - retries;
        x->fit = f;
    }
    if (mark) {
        koila_cache_rewind(x->live, mark);
        koila_cache_forget(x->live, mark);
    }
    sim_deinit(&s, false);
    return status;
}

static koila_status fits_live(void *user, const koila_plan *p, bool *yes)
{
    seat *x = user;
    KOILA_TRY(run_live(x, p));
    *yes = x->fit.fits;
    if (*yes)
        x->taken = x->fit;
    return KOILA_OK;
}

static koila_status worded(koila_status status, koila_error *e)
{
    if (status == KOILA_UNSUPPORTED)
        return koila__fail(e, status, 0, "the plan keeps too many pieces to be simulated");
    return status == KOILA_OK ? status : koila__fail(e, status, 0, "%s", koila_status_text(status));
}

koila_status koila_fits_plan(const koila_plan *p, const koila_device *d, koila_cache *live,
                             const koila_fit_opts *o, koila_fit *out, koila_error *e)
{
    seat x = { .d = d, .live = live };
    if (o)
        x.o = *o;
    KOILA_TRY(worded(run_live(&x, p), e));
    *out = x.fit;
    return KOILA_OK;
}

koila_status koila_fits(const koila_graph *g, const koila_device *d, koila_cache *live,
                        uint64_t slice, koila_fit *out, koila_error *e)
{
    const koila_allocator mem = koila__allocator(NULL);
    koila_value *targets = NULL;
    uint32_t n_targets = 0, cap = 0;
    koila_plan *plan = NULL;
    if (slice > INT64_MAX)
        return koila__fail(e, KOILA_BAD_ARGUMENT, 0, "slice out of range");
    koila_status status = find_targets(g, &mem, &targets, &n_targets, &cap);
    if (status)
        return worded(status, e);
    const koila_plan_options po = { .struct_size = sizeof po,
                                    .budget_bytes = UINT64_MAX,
                                    .rows = slice ? (int64_t)slice : rows_of(g, 1) };
    status = koila_plan_new(g, targets, n_targets, &po, NULL, &plan, e);
    if (!status)
        status = koila_fits_plan(plan, d, live, NULL, out, e);
    koila_plan_free(plan);
    koila__release(&mem, targets, cap * sizeof *targets);
    return status;
}

koila_status koila_plan_live(const koila_graph *g, const koila_value *targets, uint32_t n_targets,
                             const koila_plan_options *po, const koila_device *d, koila_cache *live,
                             const koila_fit_opts *o, const koila_allocator *mem, koila_plan **out,
                             koila_fit *fit, koila_error *e)
{
    seat x = { .d = d, .live = live, .fit = { .struct_size = sizeof x.fit } };
    judge j = { .fits = fits_live, .user = &x };
    koila_plan_options options = *po;
    koila_plan *plan = NULL;
    if (o)
        x.o = *o;
    const uint64_t left = koila__cache_left(live);
    if (left != UINT64_MAX) {
        const uint64_t sum = left > x.o.margin_bytes ? left - x.o.margin_bytes : 0;
        if (sum < options.budget_bytes && !(po->rows > 0 && po->budget_bytes == UINT64_MAX))
            options.budget_bytes = sum;
    }
    options.accepts = accepts;
    options.accepts_user = &j;
    KOILA_TRY(koila_plan_new(g, targets, n_targets, &options, mem, &plan, e));
    koila_status status = j.status;
    /* forced rows: what is to be expected */
    if (!status && !j.n_simulations)
        status = run_live(&x, plan);
    if (status) {
        koila_plan_free(plan);
        return worded(status, e);
    }
    /* a later one was taken too, and lost */
    if (j.accepted && (j.of != koila_plan_graph(plan) || j.rows != koila_plan_get(plan).rows)) {
        status = run_live(&x, plan);
        x.taken = x.fit;
    }
    if (status) {
        koila_plan_free(plan);
        return worded(status, e);
    }
    *fit = j.accepted ? x.taken : x.fit;
    fit->n_simulations = j.n_simulations ? j.n_simulations : 1;
    *out = plan;
    return KOILA_OK;
}

koila_status koila_fit_margin(const koila_plan *p, const koila_device *d, koila_cache *live,
                              const koila_fit_opts *o, uint64_t *margin_bytes, koila_error *e)
{
    seat x = { .d = d, .live = live };
    if (o)
        x.o = *o;
    uint64_t low = x.o.margin_bytes;
    uint64_t step = 2 * MIB;
    uint64_t high = low;
    const uint64_t left = koila__cache_left(live);
    KOILA_TRY(worded(run_live(&x, p), e));
    if (!x.fit.fits || left == UINT64_MAX) {
        *margin_bytes = low;
        return KOILA_OK;
    }
    do { /* low fits; high does not */
        high = low + step;
        step *= 2;
        x.o.margin_bytes = high;
        KOILA_TRY(worded(run_live(&x, p), e));
        if (x.fit.fits)
            low = high;
    } while (x.fit.fits && high < left);
    while (high - low > 2 * MIB) {
        x.o.margin_bytes = low + (high - low) / 2;
        KOILA_TRY(worded(run_live(&x, p), e));
        if (x.fit.fits)
            low = x.o.margin_bytes;
        else
            high = x.o.margin_bytes;
    }
    *margin_bytes = high;
    return KOILA_OK;
}
