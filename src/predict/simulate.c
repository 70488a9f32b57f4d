/* simulate.c — the instructions of a plan as requests to the simulated cache.
 *
 * A storage is made with a value and dies with the last value that shares it; a call's temporaries
 * live until it returns. Each of these is a koila_cache_malloc or a koila_cache_release, so
 * rounding, splitting and fragmentation are simulated, not estimated.
 */
#include "predict/simulation.h"

/* Pieces kept over all slices: 16 MiB of host memory for the table of them. */
enum { MAX_KEPT = 1 << 22 };

static void fail(koila__sim *s, koila_status status)
{
    if (!s->status)
        s->status = status;
}

/* ---- the cache */

static uint64_t allocated_bytes(const koila__sim *s)
{
    const koila_cache_stat *stat = koila__cache_stats_ref(s->c);
    return stat->of[KOILA_STAT_ALLOCATED_BYTES][KOILA_STAT_ALL].current;
}

uint64_t koila__sim_take(koila__sim *s, uint64_t bytes)
{
    uint64_t addr = 0;
    if (s->status || bytes == 0)
        return 0;
    const koila_status status =
        koila_cache_malloc(s->c, bytes, s->stream, KOILA_POOL_DEFAULT, &addr);
    if (status == KOILA_OOM && !s->may_do_without)
        s->oom = true;
    if (status && (status != KOILA_OOM || (s->ends_at_oom && !s->may_do_without)))
        fail(s, status);
    const uint64_t allocated = allocated_bytes(s);
    koila_assert(status || addr);
    if (allocated > s->peak_bytes) {
        s->peak_bytes = allocated;
        s->peak_node = s->at_node;
    }
    if (s->look_at_bytes && !s->looked && allocated >= s->look_at_bytes) {
        s->looked = true;
        s->look(s->look_user, s);
    }
    return addr;
}

void koila__sim_give(koila__sim *s, uint64_t addr)
{
    if (addr && koila_cache_release(s->c, addr) == KOILA_NO_MEMORY)
        s->status = KOILA_NO_MEMORY;
}

void koila__sim_take_state(koila__sim *s, uint64_t bytes)
{
    if (!koila__vec_push(&s->mem, &s->state, koila__sim_take(s, bytes)))
        s->status = KOILA_NO_MEMORY;
}

/* ---- storages */

koila__storage_id koila__storage_new(koila__sim *s, uint64_t bytes, koila_value v)
{
    koila__storage_id i = s->unused;
    if (i) {
        koila_assert(s->storages.at[i].refs == 0);
        s->unused = s->storages.at[i].next_unused;
    } else {
        const bool is_first = s->storages.n == 0;
        if (!koila__vec_reserve(&s->mem, &s->storages, 1 + is_first)) {
            s->status = KOILA_NO_MEMORY;
            return 0;
        }
        if (is_first)
            s->storages.at[s->storages.n++] = (koila__storage){ .addr = 0 };
        i = s->storages.n++;
    }
    s->storages.at[i] = (koila__storage){ .bytes = bytes, .refs = 1, .value = v };
    s->storages.at[i].addr = koila__sim_take(s, bytes);
    return i;
}

koila__storage_id koila__storage_hold(koila__sim *s, koila__storage_id i)
{
    koila_assert(i == 0 || s->storages.at[i].refs > 0);
    if (i)
        s->storages.at[i].refs++;
    return i;
}

void koila__storage_drop(koila__sim *s, koila__storage_id *slot)
{
    const koila__storage_id i = *slot;
    *slot = 0;
    if (!i)
        return;
    koila__storage *x = &s->storages.at[i];
    koila_assert(x->refs > 0);
    if (--x->refs)
        return;
    koila__sim_give(s, x->addr);
    x->next_unused = s->unused;
    s->unused = i;
}

/* ---- sizes */

const koila_meta_info *koila__sim_meta(const koila__sim *s, koila_value v)
{
    const koila_meta m = koila_value_get(s->g, v).meta;
    return m == KOILA_NONE ? NULL : koila_meta_get(s->t, m);
}

uint64_t koila__whole_bytes(const koila__sim *s, koila_value v)
{
    const koila_meta_info *m = koila__sim_meta(s, v);
    return m ? m->n_storage_bytes : 0;
}

uint64_t koila__cuda_bytes(const koila__sim *s, koila_value v, uint64_t bytes)
{
    if (s->is_square[v] && s->level != KOILA__HIGH && s->o.sdpa != KOILA_SDPA_MATH)
        return 0;
    return s->is_mask[v] ? bytes / koila_dtype_bytes(koila__sim_meta(s, v)->dtype) : bytes;
}

/* Bytes of a loop's collected value: dense, even if the recorded one has gaps or repeats elements.
 */
static uint64_t dense_bytes(const koila__sim *s, koila_value v)
{
    const koila_meta_info *m = koila__sim_meta(s, v);
    return m ? m->n_bytes : 0;
}

/* Bytes of a result of the current slice or whole stage. */
static uint64_t made_bytes(const koila__sim *s, koila_value v)
{
    return s->in_loop ? koila_plan_value_bytes(s->plan, v, s->rows) : koila__whole_bytes(s, v);
}

/* The slice is the whole batch. */
static bool is_all_rows(const koila__sim *s) { return s->rows == s->batch; }

/* ---- one operator */

static koila__storage_id *homes(koila__sim *s) { return s->in_loop ? s->local : s->whole; }

static koila__storage_id storage_of(const koila__sim *s, koila_value v)
{
    return s->local[v] ? s->local[v] : s->whole[v];
}

static bool gives_back_cublas(const koila__sim *s)
{
    return koila__cache_torch_version(s->c) >= KOILA_PRODUCTS_GIVE_BACK && !s->o.keeps_cublas;
}

/* Else cuBLAS takes its workspace with the first product of each thread and never releases it.
 * Backward has a thread of its own, which records without grad mode; unless one thread runs all. */
static void first_product(koila__sim *s, bool grad_mode)
{
    if (s->has_cublas[grad_mode])
        return;
    s->has_cublas[grad_mode] = true;
    if (s->one_cublas)
        s->has_cublas[!grad_mode] = true;
    koila__sim_take(s, koila__cublas_bytes(s->d, &s->o, s->level));
}

/* Requests of these sizes, released together. */
static void use(koila__sim *s, const uint64_t *bytes, uint32_t n)
{
    uint64_t addr[KOILA__MAX_TEMPS];
    for (uint32_t i = 0; i < n; i++)
        addr[i] = koila__sim_take(s, bytes[i]);
    for (uint32_t i = n; i-- > 0;)
        koila__sim_give(s, addr[i]);
}

/* In plain PyTorch: is the sum that node n makes written over its first term? */
static bool adds_up(const koila__sim *s, koila_node n)
{
    const koila__storage_id first =
        s->adds_up[n] ? storage_of(s, koila_node_inputs(s->g, n)[0]) : 0;
    return first && s->storages.at[first].refs == 1;
}

/* Fresh results; returns the bytes requested. [read: Conv_v8.cpp, try_plans] Where a convolution's
 * workspace does not fit, torch takes an engine with a smaller one; what was measured is of the
 * engine that was taken. A sum that is written over a term (`steal`) requests
 * none. is_measured: what the call uses inside, which is requested after them then. */
static uint64_t make_fresh(koila__sim *s, koila_node n, const koila__cuda_call *k, uint16_t steal,
                           bool is_measured)
{
    koila_assert(k->part > 0);
    const koila_value first = koila_node_get(s->g, n).first_output;
    const koila_value *inputs = koila_node_inputs(s->g, n);
    koila__storage_id *const home = homes(s);
    uint64_t out_bytes = 0;
    for (uint32_t i = 0; i < k->sig->n_fresh && !s->status; i++) {
        const koila_value v = first + i;
        if (k->sig->outputs[i] == KOILA_NONE || home[v])
            continue;
        if (k->kind == KOILA__INSIDE_VIEW && k->sig->n_inputs) {
            home[v] = koila__storage_hold(s, storage_of(s, inputs[0]));
            continue;
        }
        const uint32_t term = s->is_plain ? 0 : koila_term_written_over(steal);
        if (s->is_plain ? adds_up(s, n) : steal && !k->sig->n_writes) {
            home[v] = koila__storage_hold(s, storage_of(s, inputs[term]));
            continue;
        }
        const uint64_t recorded = koila__result_bytes(k, i, made_bytes(s, v));
        const uint64_t bytes = koila__cuda_bytes(s, v, recorded);
        out_bytes += bytes;
        home[v] = koila__storage_new(s, bytes, v);
        const uint64_t between = is_measured ? 0 : koila__between_results(k, i);
        s->may_do_without = between;
        use(s, &between, 1);
        s->may_do_without = false;
    }
    return out_bytes;
}

/* Results of writes: in the base's storage if bit w of `steal` is set, else in a copy. */
static void make_written(koila__sim *s, koila_node n, const koila_sig_info *sig, uint16_t steal)
{
    const koila_value first = koila_node_get(s->g, n).first_output + sig->n_fresh;
    const koila_value *inputs = koila_node_inputs(s->g, n);
    koila__storage_id *const home = homes(s);
    for (uint32_t w = 0; w < sig->n_writes && !s->status; w++) {
        const koila_value v = first + w;
        if (home[v])
            continue;
        if (s->is_plain || (w < 16 && steal >> w & 1))
            home[v] = koila__storage_hold(s, storage_of(s, inputs[sig->writes[w].input]));
        else
            home[v] = koila__storage_new(s, koila__cuda_bytes(s, v, made_bytes(s, v)), v);
    }
}

/* Was it measured what a call uses inside? Then that is *out. */
static bool measured_temporaries(const koila__sim *s, koila_sig sig, koila__temps *out)
{
    const bool is_slice = s->in_loop && s->batch > 0;
    *out = (koila__temps){ .n = 1 };
    return s->measured && s->measured(s->measured_user, sig, is_slice ? s->rows : 0,
                                      is_slice ? s->batch : 0, &out->bytes[0]);
}

void koila__sim_run_node(koila__sim *s, koila_node n, uint16_t steal)
{
    const koila_sig id = koila_node_get(s->g, n).sig;
    const koila_sig_info *sig = koila_sig_get(s->t, id);
    const bool is_known = sig->op < s->n_ops;
    const bool is_slice = s->in_loop && s->batch > 0;
    const koila__cuda_call k = { .t = s->t,
                                 .d = s->d,
                                 .o = &s->o,
                                 .sig = sig,
                                 .kind =
                                     is_known ? s->kinds[sig->op] : koila__inside_of(s->t, sig->op),
                                 .level = s->level,
                                 .part = is_slice ? (double)s->rows / (double)s->batch : 1.0,
                                 .is_plain = s->is_plain };
    s->at_node = n;
    const bool is_product = k.kind == KOILA__INSIDE_GEMM;
    if (is_product && !gives_back_cublas(s))
        first_product(s, sig->grad_mode & 1);
    koila__temps temps;
    const bool is_measured = measured_temporaries(s, id, &temps);
    const uint64_t out_bytes = make_fresh(s, n, &k, steal, is_measured);
    make_written(s, n, sig, steal);
    if (!is_measured)
        temps = koila__temporaries(&k, out_bytes);
    if (!is_measured && is_product && gives_back_cublas(s))
        temps.bytes[temps.n++] =
            koila_product_workspace(s->t, id, koila__cublas_bytes(s->d, &s->o, s->level),
                                    koila_cublaslt_workspace(s->o.cublaslt_workspace));
    const uint64_t kept = is_measured && s->is_plain ? koila__kept_losses(&k) : 0;
    /* it was measured as koila runs it, which copies the number out of them */
    temps.bytes[0] -= kept < temps.bytes[0] ? kept : temps.bytes[0];
    s->may_do_without = k.kind == KOILA__INSIDE_CONV && !is_measured;
    use(s, temps.bytes, temps.n_early);
    use(s, temps.bytes + temps.n_early, temps.n - temps.n_early);
    s->may_do_without = false;
}

/* ---- the other instructions */

/* Bytes of the accumulator of ADD: float32 for a sum of half precision in a loop that is really
 * cut. */
static uint64_t accumulator_bytes(const koila__sim *s, koila_value v, bool all_rows)
{
    const koila_meta_info *m = koila__sim_meta(s, v);
    if (!m)
        return 0;
    const koila_share share = koila_plan_share(s->plan, v);
    return m->n_elements * koila_dtype_bytes(koila_accumulator_dtype(m->dtype, share, all_rows));
}

/* ADD: whole v := combine(whole v, local v). */
static void add_up(koila__sim *s, const koila_instr *in)
{
    const koila_value v = in->id;
    const uint64_t bytes = accumulator_bytes(s, v, is_all_rows(s));
    const bool is_wide = bytes != dense_bytes(s, v);
    /* a sum is added in place; other combinations make a new accumulator while the old one lives */
    if (s->whole[v]) {
        if (koila_plan_share(s->plan, v).partial != KOILA_PARTIAL_SUM)
            koila__sim_give(s, koila__sim_take(s, bytes));
        return;
    }
    if (in->flags & KOILA_INSTR_OWNED && !is_wide)
        s->whole[v] = koila__storage_hold(s, s->local[v]);
    else
        s->whole[v] = koila__storage_new(s, bytes, v);
}

/* SLICE: local v := this slice's rows of whole v; a view of it, or a dense copy. */
static koila__storage_id slice_of(koila__sim *s, const koila_instr *in)
{
    const koila_meta_info *m = koila__sim_meta(s, in->id);
    const koila_share cut = koila_plan_need(s->plan, in->user, in->steal);
    const bool is_copy = m && koila_slice_form(m, cut, is_all_rows(s)) == KOILA_SLICE_COPY;
    if (!is_copy || s->batch <= 0)
        return koila__storage_hold(s, s->whole[in->id]);
    return koila__storage_new(s, m->n_bytes / (uint64_t)s->batch * (uint64_t)s->rows, in->id);
}

/* PUT: rows of whole v := local v. */
static void put(koila__sim *s, const koila_instr *in)
{
    const koila_value v = in->id;
    if (s->whole[v])
        return;
    if (is_all_rows(s) && in->flags & KOILA_INSTR_OWNED)
        s->whole[v] = koila__storage_hold(s, s->local[v]);
    else
        s->whole[v] = koila__storage_new(s, dense_bytes(s, v), v);
}

/* The piece of v that slice `slice` keeps; NULL: none does. */
static koila__storage_id *kept_at(koila__sim *s, koila_value v, uint32_t slice)
{
    if (!s->kept_row[v] || slice >= s->kept_slices)
        return NULL;
    koila_assert(s->kept_row[v] <= s->n_kept);
    return &s->kept[(uint64_t)(s->kept_row[v] - 1) * s->kept_slices + slice];
}

static void keep(koila__sim *s, koila_value v, uint32_t slice)
{
    koila__storage_id *kept = kept_at(s, v, slice);
    if (kept && !*kept)
        *kept = koila__storage_hold(s, s->local[v]);
}

static void fetch(koila__sim *s, const koila_instr *in, uint32_t slice)
{
    const koila__storage_id *kept = kept_at(s, in->id, slice);
    if (!kept)
        return;
    if (!s->local[in->id])
        s->local[in->id] = koila__storage_hold(s, *kept);
    if (in->flags & KOILA_INSTR_LAST && s->n_drop < s->drop_cap)
        s->drop[s->n_drop++] = in->id;
}

/* The step of a row holds its peak as one block; then its results are there. */
static void run_inner(koila__sim *s, const koila_inner *inner)
{
    koila__storage_id all = koila__storage_new(s, koila_plan_get(inner->plan).peak_bytes, 0);
    koila__storage_drop(s, &all);
    for (uint32_t i = 0; i < inner->n_results && !s->status; i++) {
        const koila_value v = inner->results[i].outer;
        if (!inner->results[i].adds_on)
            s->local[v] = koila__storage_new(s, koila_plan_value_bytes(s->plan, v, s->rows), v);
    }
}

/* RUN with KOILA_INSTR_ADDS: the result becomes the accumulator, or is added to it: as it is made,
 * or when it is there. */
static void run_addend(koila__sim *s, const koila_instr *in)
{
    const koila_value v = koila_node_get(s->g, in->id).first_output;
    const koila_value sum = in->user;
    const bool is_wide = accumulator_bytes(s, sum, is_all_rows(s)) != dense_bytes(s, sum);
    if (in->flags & KOILA_INSTR_ONTO && s->whole[sum] && !is_all_rows(s))
        s->local[v] = koila__storage_hold(s, s->whole[sum]);
    koila__sim_run_node(s, in->id, in->steal);
    if (!s->whole[sum] && is_wide)
        s->whole[sum] = koila__storage_new(s, accumulator_bytes(s, sum, is_all_rows(s)), sum);
    else if (!s->whole[sum])
        s->whole[sum] = koila__storage_hold(s, s->local[v]);
    koila__storage_drop(s, &s->local[v]);
}

/* The same outside loops. */
static void run_second_term(koila__sim *s, const koila_instr *in)
{
    const koila_value v = koila_node_get(s->g, in->id).first_output;
    s->whole[v] = koila__storage_hold(s, s->whole[in->user]);
    koila__sim_run_node(s, in->id, in->steal);
}

static void run_instr(koila__sim *s, const koila_instr *in, uint32_t slice)
{
    if (in->flags & KOILA_INSTR_TOLD) {
        if (in->kind == KOILA_DO_RUN && !s->in_loop)
            s->whole[koila_node_get(s->g, in->id).first_output] =
                koila__storage_hold(s, s->whole[in->user]);
        return;
    }
    switch ((koila_instr_kind)in->kind) {
    case KOILA_DO_RUN:
        if (in->flags & KOILA_INSTR_ADDS && !s->in_loop)
            run_second_term(s, in);
        else if (in->flags & KOILA_INSTR_ADDS)
            run_addend(s, in);
        else
            koila__sim_run_node(s, in->id, in->steal);
        return;
    case KOILA_DO_SLICE:
        if (!s->local[in->id])
            s->local[in->id] = slice_of(s, in);
        return;
    case KOILA_DO_ADD:
        add_up(s, in);
        return;
    case KOILA_DO_PUT:
        put(s, in);
        return;
    case KOILA_DO_KEEP:
        keep(s, in->id, slice);
        return;
    case KOILA_DO_FETCH:
        fetch(s, in, slice);
        return;
    case KOILA_DO_FREE:
        koila__storage_drop(s, &homes(s)[in->id]);
        return;
    case KOILA_DO_INNER:
        run_inner(s, s->inner);
        return;
    }
}

/* ---- stages */

/* Does the running slice, from row `begin`, have what the instruction is about? Pieces of other
 * slices are absent. Other values that may be absent are counted: a little too much. */
static bool is_here(const koila__sim *s, const koila_instr *in, int64_t begin)
{
    if (in->kind == KOILA_DO_RUN)
        return !s->in_loop || koila_plan_runs_in(s->plan, in->id, begin, begin + s->rows);
    return in->kind == KOILA_DO_FREE || !s->in_loop || s->local[in->id] ||
           !koila_plan_may_be_absent(s->plan, in->id);
}

/* Slice number `slice` of a loop, of `rows` rows from row `begin`; or a whole stage: all 0. */
static void run_slice(koila__sim *s, const koila_stage *st, uint32_t slice, int64_t begin,
                      int64_t rows, int64_t batch)
{
    koila_assert(begin + rows <= batch);
    s->in_loop = st->is_loop;
    s->rows = rows;
    s->batch = batch;
    s->n_drop = 0;
    s->inner = st->inner;
    for (uint32_t i = 0; i < st->n_instrs && !s->status; i++)
        if (is_here(s, &st->instrs[i], begin))
            run_instr(s, &st->instrs[i], slice);
    for (uint32_t i = 0; i < s->n_drop; i++) {
        koila__storage_id *kept = kept_at(s, s->drop[i], slice);
        if (kept)
            koila__storage_drop(s, kept);
    }
    koila_check(koila__sim_check(s));
}

/* Slices that neither keep nor fetch pieces may have equal effects on the cache. */
static bool may_repeat(const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++)
        if (st->instrs[i].kind == KOILA_DO_KEEP || st->instrs[i].kind == KOILA_DO_FETCH)
            return false;
    return true;
}

/* All slices of a loop. If a slice leaves the blocks as the one before did, and needed no driver
 * call, all later slices of its size do the same, and are not run. */
static void run_loop(koila__sim *s, const koila_stage *st, int64_t rows, int64_t batch)
{
    const uint32_t n_full = rows > 0 ? (uint32_t)(batch / rows) : 0;
    const koila_cache_stat *stat = koila__cache_stats_ref(s->c);
    const bool repeats = n_full > 2 && may_repeat(st) && !koila_plan_has_pieces(s->plan, st->axis);
    uint64_t layout = 0;
    uint32_t i = 0;
    for (int64_t at = 0, end; at < batch && rows > 0 && !s->status; at = end, i++) {
        const uint64_t n_driver = stat->num_device_alloc + stat->num_device_free;
        end = koila_plan_slice_end(s->plan, st->axis, at, rows);
        run_slice(s, st, i, at, end - at, batch);
        if (!repeats || i + 1 >= n_full)
            continue;
        const uint64_t now = koila__cache_layout(s->c);
        if (now && now == layout && n_driver == stat->num_device_alloc + stat->num_device_free) {
            i = n_full - 1;
            end = (int64_t)n_full * rows;
        }
        layout = now;
    }
}

/* Accumulators that are wider than their value are cast back when the loop ends, one after another.
 */
static void cast_back(koila__sim *s, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_value v = st->instrs[i].id;
        if (st->instrs[i].kind != KOILA_DO_ADD || !s->whole[v] ||
            accumulator_bytes(s, v, false) == dense_bytes(s, v))
            continue;
        koila__storage_id wide = s->whole[v];
        s->whole[v] = koila__storage_new(s, dense_bytes(s, v), v);
        koila__storage_drop(s, &wide);
    }
}

/* Sums that are added to whole values begin as these. */
static void begin_second_terms(koila__sim *s, const koila_stage *st)
{
    for (uint32_t i = 0; i < st->n_instrs; i++) {
        const koila_instr *in = &st->instrs[i];
        if (in->kind == KOILA_DO_ADD && in->flags & KOILA_INSTR_SECOND)
            s->whole[in->id] = koila__storage_hold(s, s->whole[in->user]);
    }
}

void koila__sim_run_plan(koila__sim *s)
{
    for (uint32_t k = 0; k < s->n_stages && !s->status; k++) {
        const koila_stage *st = koila_plan_stage(s->plan, k);
        if (!st->is_loop) {
            run_slice(s, st, 0, 0, 0, 0);
            continue;
        }
        const int64_t batch = koila_graph_axis_size(s->g, st->axis);
        const int64_t rows = koila_plan_axis_rows(s->plan, st->axis);
        begin_second_terms(s, st);
        run_loop(s, st, rows, batch);
        if (rows != batch)
            cast_back(s, st);
    }
}

/* ---- opening and closing */

static koila_node first_of_backward(const koila_graph *g)
{
    const koila_table *t = koila_graph_table(g);
    koila_node n = 0;
    while (n < koila_graph_n_nodes(g) && koila_sig_get(t, koila_node_get(g, n).sig)->grad_mode & 1)
        n++;
    return n;
}

koila_status koila__sim_open(koila__sim *s, const koila_graph *g, const koila_device *d,
                             const koila_predict_opts *o, koila__level level)
{
    *s = (koila__sim){ .g = g,
                       .t = koila_graph_table(g),
                       .d = d,
                       .level = level,
                       .n_values = koila_graph_n_values(g),
                       .n_ops = koila_table_n_ops(koila_graph_table(g)),
                       .middle = first_of_backward(g),
                       .mem = koila__allocator(NULL),
                       .peak_node = KOILA_NONE,
                       .at_node = KOILA_NONE };
    koila__arena *const a = &s->arena;
    koila__arena_init(a, NULL);
    if (o)
        s->o = *o;
    s->whole = koila__arena_array(a, s->n_values, sizeof *s->whole);
    s->local = koila__arena_array(a, s->n_values, sizeof *s->local);
    s->is_target = koila__arena_array(a, s->n_values, 1);
    s->is_grad = koila__arena_array(a, s->n_values, 1);
    s->is_mask = koila__arena_array(a, s->n_values, 1);
    s->is_square = koila__arena_array(a, s->n_values, 1);
    s->kept_row = koila__arena_array(a, s->n_values, sizeof *s->kept_row);
    s->kinds = koila__arena_array(a, s->n_ops, sizeof *s->kinds);
    if (!s->whole || !s->local || !s->is_target || !s->is_grad || !s->is_mask || !s->is_square ||
        !s->kept_row || !s->kinds)
        return s->status = KOILA_NO_MEMORY;
    for (uint32_t i = 0; i < s->n_ops; i++)
        s->kinds[i] = koila__inside_of(s->t, i);
    koila__find_masks(g, s->is_mask);
    koila__find_squares(g, s->kinds, s->is_square);
    return KOILA_OK;
}

/* Rows of `kept` for the values that the plan keeps, and room for the slices of every loop. */
static koila_status make_kept(koila__sim *s)
{
    for (uint32_t k = 0; k < s->n_stages; k++) {
        const koila_stage *st = koila_plan_stage(s->plan, k);
        const uint32_t n = st->is_loop ? koila_plan_slices(s->plan, st->axis) : 0;
        if (n > s->kept_slices)
            s->kept_slices = n;
        for (uint32_t i = 0; i < st->n_instrs; i++) {
            const koila_instr *in = &st->instrs[i];
            if (in->kind == KOILA_DO_KEEP && !s->kept_row[in->id])
                s->kept_row[in->id] = ++s->n_kept;
            s->drop_cap += in->kind == KOILA_DO_FETCH;
        }
    }
    const uint64_t n_pieces = (uint64_t)s->n_kept * s->kept_slices;
    if (n_pieces > MAX_KEPT)
        return KOILA_UNSUPPORTED;
    s->kept = koila__arena_array(&s->arena, n_pieces, sizeof *s->kept);
    s->drop = koila__arena_array(&s->arena, s->drop_cap, sizeof *s->drop);
    return s->kept && s->drop ? KOILA_OK : KOILA_NO_MEMORY;
}

koila_status koila__sim_open_plan(koila__sim *s, const koila_plan *plan, const koila_device *d,
                                  const koila_predict_opts *o, koila__level level)
{
    KOILA_TRY(koila__sim_open(s, koila_plan_graph(plan), d, o, level));
    s->plan = plan;
    s->n_stages = koila_plan_get(plan).n_stages;
    s->status = make_kept(s);
    return s->status;
}

static uint64_t n_slots_used(const koila__storage_id *slot, uint64_t n)
{
    uint64_t n_used = 0;
    for (uint64_t i = 0; i < n; i++)
        n_used += slot[i] != 0;
    return n_used;
}

bool koila__sim_check(const koila__sim *s)
{
    uint64_t n_refs = 0;
    if (s->status)
        return true;
    for (uint32_t i = 1; i < s->storages.n; i++)
        n_refs += s->storages.at[i].refs;
    const uint64_t n_local = n_slots_used(s->local, s->n_values);
    const uint64_t n_slots = n_slots_used(s->whole, s->n_values) + n_local +
                             n_slots_used(s->kept, (uint64_t)s->n_kept * s->kept_slices) +
                             n_slots_used(s->last_out.at, s->last_out.n);
    return n_local == 0 && n_refs == n_slots;
}

void koila__sim_close(koila__sim *s)
{
    koila__vec_free(&s->mem, &s->storages);
    koila__vec_free(&s->mem, &s->state);
    koila__vec_free(&s->mem, &s->last_out);
    koila__arena_deinit(&s->arena);
}
