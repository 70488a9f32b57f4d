/* training.c — the memory of a training step that its recording does not show: leaves that exist
 * before it, results that outlive it, and everything between backward and the next forward.
 *
 *   step   the new batch is copied in, then the old one is dropped; gradients of the last step are
 *          dropped; the plan runs; loss and outputs are rebound; the optimizer steps
 *
 * A recorded graph ends with the gradients. Optimizer state and temporaries, clip_grad_norm_, the
 * buckets of DistributedDataParallel, GradScaler and autocast's parameters follow from
 * koila_predict_opts; the order and sizes of their requests are those of torch 2's sources.
 */
#include "predict/simulation.h"

#define MIB ((uint64_t)1 << 20)
enum { FLOAT_BYTES = 4, DOUBLE_BYTES = 8 };

typedef VEC(uint64_t) addresses;

static bool is_half_value(const koila__sim *s, koila_value v)
{
    const koila_meta_info *m = koila__sim_meta(s, v);
    return m && koila__is_half(m->dtype);
}

static bool is_batch_leaf(const koila__sim *s, koila_value v)
{
    const koila_value_info x = koila_value_get(s->g, v);
    return x.node == KOILA_NONE && x.leaf_kind == KOILA_LEAF_BATCH;
}

bool koila__is_real_leaf(const koila__sim *s, koila_value v)
{
    const koila_value_info x = koila_value_get(s->g, v);
    return x.node == KOILA_NONE && x.leaf_kind == KOILA_LEAF_REAL && x.meta != KOILA_NONE;
}

/* Takes `bytes` and remembers the address, for give_all() to release. */
static void take_into(koila__sim *s, addresses *list, uint64_t bytes)
{
    if (!koila__vec_push(&s->mem, list, koila__sim_take(s, bytes)))
        s->status = KOILA_NO_MEMORY;
}

/* The last one first. */
static void give_all(koila__sim *s, addresses *list)
{
    while (list->n)
        koila__sim_give(s, list->at[--list->n]);
    koila__vec_free(&s->mem, list);
}

/* ---- leaves */

/* The same dtype, and the same sizes in any order: a parameter and its transpose. */
static bool same_sizes(const koila_meta_info *a, const koila_meta_info *b)
{
    uint32_t taken = 0; /* bit k: size[k] of b is matched */
    if (a->dtype != b->dtype || a->n_dims != b->n_dims || a->n_elements != b->n_elements)
        return false;
    for (uint32_t i = 0; i < a->n_dims; i++) {
        uint32_t k = 0;
        while (k < b->n_dims && (taken >> k & 1 || b->size[k] != a->size[i]))
            k++;
        if (k == b->n_dims)
            return false;
        koila_assert(!(taken >> k & 1));
        taken |= 1u << k;
    }
    return true;
}

bool koila__is_transposed_leaf(const koila__sim *s, koila_value v)
{
    return koila__is_real_leaf(s, v) && !koila_meta_is_contiguous(koila__sim_meta(s, v));
}

/* May transposed leaf v be a view of leaf `twin`, which no other leaf is a view of? */
static bool is_twin(const koila__sim *s, koila_value twin, koila_value v)
{
    const koila__storage_id i = s->whole[twin];
    return i && s->storages.at[i].refs == 1 && koila__is_real_leaf(s, twin) &&
           koila_meta_is_contiguous(koila__sim_meta(s, twin)) &&
           same_sizes(koila__sim_meta(s, twin), koila__sim_meta(s, v));
}

/* Bytes of a leaf before the step. */
static uint64_t loaded_bytes(const koila__sim *s, koila_value v)
{
    return koila__is_cast(s, v) ? 0 : koila__whole_bytes(s, v);
}

/* The float32 parameter behind each half-precision cast of it. Plain PyTorch makes the cast in the
 * step: what was loaded for it ends here. */
static void load_parameters_of_casts(koila__sim *s)
{
    for (koila__storage_id i = 1; i < s->storages.n && !s->status; i++)
        if (s->storages.at[i].refs && is_half_value(s, s->storages.at[i].value))
            koila__sim_take_state(s, 2 * koila__whole_bytes(s, s->storages.at[i].value));
    for (koila_value v = 0; v < s->n_values && s->is_plain; v++)
        if (koila__is_cast(s, v) && s->whole[v])
            s->twin[v] = s->storages.at[s->whole[v]].value;
    for (koila_value v = 0; v < s->n_values && s->is_plain; v++)
        if (koila__is_cast(s, v))
            koila__storage_drop(s, &s->whole[v]);
}

/* A leaf whose storage was told: one for all leaves in it. */
static void load_stored(koila__sim *s, koila_value v)
{
    const koila_stored x = koila_graph_stored_get(s->g, v);
    koila_value first = 0;
    while (first < v &&
           (!s->whole[first] || koila_graph_stored_get(s->g, first).storage != x.storage))
        first++;
    if (first < v)
        s->whole[v] = koila__storage_hold(s, s->whole[first]);
    else
        s->whole[v] = koila__storage_new(s, koila__is_cast(s, v) ? 0 : x.bytes, v);
}

/* A leaf that is not contiguous shares the storage of a contiguous one of the same sizes, one for
 * one: a weight often occurs twice, as itself and transposed. */
static void load_transposed(koila__sim *s, koila_value v)
{
    koila_value twin = 0;
    while (twin < s->n_values && !is_twin(s, twin, v))
        twin++;
    if (twin < s->n_values)
        s->whole[v] = koila__storage_hold(s, s->whole[twin]);
    else
        s->whole[v] = koila__storage_new(s, loaded_bytes(s, v), v);
}

/* Parameters, masks, tables. */
void koila__sim_load_leaves(koila__sim *s)
{
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!koila__is_real_leaf(s, v))
            continue;
        if (koila_graph_stored_get(s->g, v).storage != KOILA_NONE)
            load_stored(s, v);
        else if (koila_meta_is_contiguous(koila__sim_meta(s, v)))
            s->whole[v] = koila__storage_new(s, loaded_bytes(s, v), v);
    }
    for (koila_value v = 0; v < s->n_values && !s->status; v++)
        if (koila__is_real_leaf(s, v) && !s->whole[v])
            load_transposed(s, v);
    if (s->o.autocast)
        load_parameters_of_casts(s);
}

/* ---- targets and gradients */

koila_status koila__find_targets(const koila_graph *g, const koila_allocator *mem,
                                 koila__values *out)
{
    const uint32_t n_values = koila_graph_n_values(g);
    const uint32_t n_nodes = koila_graph_n_nodes(g);
    const koila_table *t = koila_graph_table(g);
    uint8_t *used = koila__realloc(mem, NULL, 0, (size_t)n_values + 1);
    *out = (koila__values){ .n = 0 };
    if (!used || !koila__vec_reserve(mem, out, n_values + 1)) {
        koila__release(mem, used, (size_t)n_values + 1);
        return KOILA_NO_MEMORY;
    }
    memset(used, 0, n_values);
    for (koila_node i = 0; i < n_nodes; i++) {
        const koila_sig_info *sig = koila_sig_get(t, koila_node_get(g, i).sig);
        for (uint32_t k = 0; k < sig->n_inputs; k++)
            used[koila_node_inputs(g, i)[k]] = 1;
    }
    for (koila_node i = 0; i < n_nodes; i++) {
        const koila_node_info node = koila_node_get(g, i);
        const koila_sig_info *sig = koila_sig_get(t, node.sig);
        for (uint32_t k = 0; k < sig->n_outputs; k++) {
            const koila_value v = node.first_output + k;
            /* the second of two fresh results is mostly a by-product: a count, indices, a mask */
            const bool is_main = k == 0 || k >= sig->n_fresh || sig->n_outputs > 2;
            if (!used[v] && koila_value_get(g, v).meta != KOILA_NONE && is_main)
                out->at[out->n++] = v;
        }
    }
    koila_assert(out->n <= n_values);
    koila__release(mem, used, (size_t)n_values + 1);
    return KOILA_OK;
}

/* A target with the sizes of a parameter is assumed to be its gradient. Under autocast a leaf may
 * be the cast of a float32 parameter, whose gradient is float32. */
static bool looks_like_gradient(const koila__sim *s, koila_value v)
{
    const koila_meta_info *m = koila__sim_meta(s, v);
    if (!m || !m->n_dims)
        return false;
    for (koila_value leaf = 0; leaf < s->n_values; leaf++) {
        if (!koila__is_real_leaf(s, leaf))
            continue;
        koila_meta_info like = *koila__sim_meta(s, leaf);
        if (s->o.autocast && koila__is_half(like.dtype) && m->dtype == KOILA_DTYPE_F32)
            like.dtype = KOILA_DTYPE_F32;
        if (same_sizes(&like, m))
            return true;
    }
    return false;
}

void koila__sim_set_targets(koila__sim *s, const koila_value *targets, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const koila_value v = targets[i];
        if (v >= s->n_values)
            continue;
        s->is_target[v] = 1;
        s->is_grad[v] = looks_like_gradient(s, v);
    }
}

/* Bytes of gradient v as the optimizer finds it: under autocast in float32. */
static uint64_t grad_bytes(const koila__sim *s, koila_value v)
{
    const bool is_widened = s->o.autocast && is_half_value(s, v);
    return koila__whole_bytes(s, v) * (is_widened ? 2 : 1);
}

/* Under autocast a gradient leaves the step in the dtype of the parameter. */
static void widen_gradients(koila__sim *s)
{
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!s->is_grad[v] || !s->whole[v] || !is_half_value(s, v))
            continue;
        const koila__storage_id wide = koila__storage_new(s, grad_bytes(s, v), v);
        koila__storage_drop(s, &s->whole[v]);
        s->whole[v] = wide;
    }
}

/* ---- between backward and the next forward */

/* torch's foreach kernels work on chunks of 65,536 elements [ForeachFunctors.cuh, kChunkSize]. */
enum { FOREACH_CHUNK = 65536 };

/* clip_grad_norm_: one norm a gradient; then one number for each chunk of the largest gradient, for
 * every gradient. */
static void clip_gradients(koila__sim *s)
{
    addresses temps = { .n = 0 };
    uint64_t n_grads = 0;
    uint64_t most_chunks = 0;
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!s->is_grad[v])
            continue;
        const uint64_t n = koila__sim_meta(s, v)->n_elements;
        const uint64_t chunks = (n + FOREACH_CHUNK - 1) / FOREACH_CHUNK;
        n_grads++;
        if (chunks > most_chunks)
            most_chunks = chunks;
        take_into(s, &temps, FLOAT_BYTES);
    }
    /* partial norms; all norms; the norm of these; the factor; the factor clamped to 1 */
    const uint64_t sizes[] = { n_grads * most_chunks * FLOAT_BYTES, n_grads * FLOAT_BYTES,
                               FLOAT_BYTES, FLOAT_BYTES, FLOAT_BYTES };
    for (size_t i = 0; i < KOILA_COUNT(sizes) && n_grads; i++)
        take_into(s, &temps, sizes[i]);
    give_all(s, &temps);
}

/* DistributedDataParallel's flat copies of all gradients, those of the last parameters first
 * [torch/nn/parallel/distributed.py: bucket_cap_mb is 25, the first bucket's 1]. A bucket is closed
 * when it holds so much. They live as long as the model. */
static void make_buckets(koila__sim *s)
{
    const uint64_t first_full = MIB;
    const uint64_t later_full = 25 * MIB;
    uint64_t full = first_full;
    uint64_t bytes = 0;
    for (koila_value v = s->n_values; v-- > 0 && !s->status;) {
        if (s->is_grad[v])
            bytes += grad_bytes(s, v);
        const bool is_last = v == 0 && bytes > 0;
        if (bytes < full && !is_last)
            continue;
        koila__sim_take_state(s, bytes);
        bytes = 0;
        full = later_full;
    }
}

/* GradScaler: scale and growth tracker stay; the inverse of the scale (twice in double, once in
 * float) and the flag that something was infinite live while gradients are scaled back in place. */
static void unscale_gradients(koila__sim *s, bool first)
{
    if (first) {
        koila__sim_take_state(s, FLOAT_BYTES);
        koila__sim_take_state(s, FLOAT_BYTES);
    }
    const uint64_t flag = koila__sim_take(s, FLOAT_BYTES);
    const uint64_t scale = koila__sim_take(s, DOUBLE_BYTES);
    const uint64_t inverse = koila__sim_take(s, DOUBLE_BYTES);
    const uint64_t inverse_float = koila__sim_take(s, FLOAT_BYTES);
    koila__sim_give(s, scale);
    koila__sim_give(s, inverse);
    koila__sim_give(s, inverse_float);
    koila__sim_give(s, flag);
}

/* Buffers of a gradient's size that the optimizer keeps for each parameter, by koila_optimizer. */
static const uint32_t n_states[] = { [KOILA_OPTIMIZER_NONE] = 0,
                                     [KOILA_OPTIMIZER_SGD] = 0,
                                     [KOILA_OPTIMIZER_MOMENTUM] = 1,
                                     [KOILA_OPTIMIZER_ADAM] = 2,
                                     [KOILA_OPTIMIZER_ADAMW] = 2 };

static bool is_adam(const koila__sim *s) { return s->o.optimizer >= KOILA_OPTIMIZER_ADAM; }

static void make_optimizer_state(koila__sim *s)
{
    koila_assert(s->o.optimizer < KOILA_COUNT(n_states));
    const uint32_t n = n_states[s->o.optimizer] + (is_adam(s) && s->o.amsgrad);
    const bool counts_on_device = is_adam(s) && s->o.way == KOILA_WAY_FUSED;
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!s->is_grad[v])
            continue;
        for (uint32_t k = 0; k < n; k++)
            koila__sim_take_state(s, grad_bytes(s, v));
        if (counts_on_device)
            koila__sim_take_state(s, FLOAT_BYTES); /* the step counter */
    }
}

/* One pass of the optimizer that needs something of a gradient's size: foreach holds one for each
 * parameter at once, the loop two of one parameter at a time, fused none. */
static void optimizer_temporaries(koila__sim *s, uint64_t largest)
{
    addresses temps = { .n = 0 };
    if (s->o.way == KOILA_WAY_FUSED)
        return;
    if (s->o.way == KOILA_WAY_LOOP) {
        take_into(s, &temps, largest);
        take_into(s, &temps, largest);
    } else {
        for (koila_value v = 0; v < s->n_values && !s->status; v++)
            if (s->is_grad[v])
                take_into(s, &temps, grad_bytes(s, v));
    }
    give_all(s, &temps);
}

static uint64_t largest_gradient(const koila__sim *s)
{
    uint64_t largest = 0;
    for (koila_value v = 0; v < s->n_values; v++)
        if (s->is_grad[v] && grad_bytes(s, v) > largest)
            largest = grad_bytes(s, v);
    return largest;
}

static void optimizer_step(koila__sim *s, bool first)
{
    const uint32_t kind = s->o.optimizer;
    if (s->o.grad_scaler)
        unscale_gradients(s, first);
    if (s->o.clip_grad_norm)
        clip_gradients(s);
    if (kind == KOILA_OPTIMIZER_NONE || kind > KOILA_OPTIMIZER_ADAMW)
        return;
    s->at_node = KOILA_NONE;
    if (first)
        make_optimizer_state(s);
    const uint64_t largest = largest_gradient(s);
    /* gradients with the weight decay added; they are gone before Adam's square roots. AdamW decays
     * the parameters in place */
    if (s->o.weight_decay && kind != KOILA_OPTIMIZER_ADAMW)
        optimizer_temporaries(s, largest);
    if (is_adam(s))
        optimizer_temporaries(s, largest);
}

/* ---- one step */

/* The next batch is copied in while the last one is still bound. */
static void bind_batch(koila__sim *s)
{
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!is_batch_leaf(s, v))
            continue;
        const koila__storage_id fresh = koila__storage_new(s, koila__whole_bytes(s, v), v);
        koila__storage_drop(s, &s->whole[v]);
        s->whole[v] = fresh;
    }
}

/* zero_grad() drops gradients; loss and outputs stay until the program has bound them anew:
 * koila__sim_drop_last_outputs(). */
static void forget_last_step(koila__sim *s)
{
    for (koila_value v = 0; v < s->n_values && !s->status; v++) {
        if (!s->is_target[v] || !s->whole[v])
            continue;
        if (!s->is_grad[v]) {
            const koila__storage_id held = koila__storage_hold(s, s->whole[v]);
            if (!koila__vec_push(&s->mem, &s->last_out, held))
                s->status = KOILA_NO_MEMORY;
        }
        koila__storage_drop(s, &s->whole[v]);
    }
}

void koila__sim_drop_last_outputs(koila__sim *s)
{
    while (s->last_out.n)
        koila__storage_drop(s, &s->last_out.at[--s->last_out.n]);
}

/* Ends every value that is no result, and what is left of the step before. */
static void end_step(koila__sim *s)
{
    koila__sim_drop_last_outputs(s);
    for (koila_value v = 0; v < s->n_values && !s->status; v++)
        if (s->whole[v] && !s->is_target[v] && koila_value_get(s->g, v).node != KOILA_NONE)
            koila__storage_drop(s, &s->whole[v]);
    koila_check(koila__sim_check(s));
}

void koila__sim_step(koila__sim *s, bool first)
{
    if (first && s->o.ddp)
        make_buckets(s);
    s->at_node = KOILA_NONE;
    bind_batch(s);
    forget_last_step(s);
    if (s->is_plain) {
        koila__sim_run_plain(s);
    } else {
        if (s->middle < koila_graph_n_nodes(s->g))
            koila__sim_drop_last_outputs(s); /* all was bound anew when the backward asks for it */
        koila__sim_run_plan(s);
    }
    if (s->o.autocast)
        widen_gradients(s);
    end_step(s);
    optimizer_step(s, first);
}
