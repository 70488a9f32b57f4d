/* Prediction: the sums by hand where they can be done by hand, and what must hold of any step. */
#include "allocator/cache.h"
#include "harness.h"
#include "koila/koila.h"
#include "random_graph.h"

#include "predict/simulation.h"

#define MIB ((uint64_t)1 << 20)

static koila_graph *parse(koila_table **table, const char *text)
{
    koila_graph *g = NULL;
    koila_error e = KOILA_ERROR_INIT;
    CHECK_EQ(koila_table_new(NULL, table), KOILA_OK);
    if (koila_graph_parse(*table, text, strlen(text), &g, &e))
        printf("  %s (byte %llu)\n", e.text, (unsigned long long)e.offset);
    CHECK(g);
    return g;
}

static koila_device *gpu(const char *name)
{
    koila_device *d = NULL;
    CHECK_EQ(koila_device_builtin(name, NULL, &d, NULL), KOILA_OK);
    return d;
}

/* The allocator of that version, until the next call. */
static const koila_cache_config *torch(const char *version)
{
    static koila_cache_config conf;
    CHECK_EQ(koila_cache_config_init(&conf, version), KOILA_OK);
    return &conf;
}

/* one product and a pointwise result: 8192 x 1024 by 1024 x 2048 */
static const char product[] =
    "koila graph 1\naxis 8192\n%0 = batch axis 0 dim 0 f32[8192, 1024] \"x\"\n%1 = real f32[1024, "
    "2048] \"w\"\n"
    "%2 = aten::mm(%0, %1) -> f32[8192, 2048] grad\n%3 = aten::relu(%2) -> f32[8192, 2048] grad\n";

TEST(predict__a_product_is_what_one_counts_by_hand)
{
    koila_table *t;
    koila_graph *g = parse(&t, product);
    koila_device *d = gpu("a100-40gb");
    koila_prediction p;
    koila_error e = KOILA_ERROR_INIT;
    CHECK_EQ(koila_predict(g, d, torch("2.13"), NULL, &p, &e), KOILA_OK);
    /* x 32, w 8, mm 64, relu 64 MiB, cuBLAS 8,519,680 B */
    CHECK_EQ(p.first.allocated.expected, (32 + 8 + 64 + 64) * MIB + 8519680);
    CHECK_EQ(p.first.allocated.low, p.first.allocated.high);
    /* later: the last step's result is bound until the new one is made, the next batch is copied in
     * first */
    CHECK_EQ(p.steady.allocated.expected, (32 + 8 + 64 + 64 + 64) * MIB + 8519680);
    CHECK(p.settled && p.fits);
    CHECK_EQ(p.first.device.expected - koila_device_get(d, KOILA_DEVICE_CONTEXT_BYTES).value,
             p.first.reserved.expected);
    CHECK_STR(p.peak_op, "aten::relu");
    CHECK(p.n_largest >= 4 && p.largest[0].bytes == 64 * MIB);
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(predict__slices_need_less_and_never_change_the_result)
{
    koila_table *t;
    koila_graph *g = parse(&t, product);
    koila_device *d = gpu("a100-40gb");
    koila_prediction whole, sliced, again;
    koila_predict_opts o = { .struct_size = sizeof o, .rows = 1024 };
    CHECK_EQ(koila_predict(g, d, torch("2.13"), NULL, &whole, NULL), KOILA_OK);
    CHECK_EQ(koila_predict(g, d, torch("2.13"), &o, &sliced, NULL), KOILA_OK);
    CHECK_EQ(sliced.n_slices, 8);
    CHECK(sliced.first.allocated.expected < whole.first.allocated.expected);
    memset(&again, 0, sizeof again);
    CHECK_EQ(koila_predict(g, d, torch("2.13"), &o, &again, NULL), KOILA_OK);
    CHECK_EQ(again.steady.reserved.high, sliced.steady.reserved.high);
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(predict__low_expected_high_are_in_order_and_unknown_operators_are_named)
{
    static const char text[] =
        "koila graph 1\naxis 512\n%0 = batch axis 0 dim 0 f32[512, 4096]\n%1 = mine::odd(%0) -> "
        "f32[512, 4096] @0\n%2 %3 = aten::sort(%1) -> (f32[512, 4096], i64[512, 4096])\n";
    static const char with_line[] =
        "koila graph 1\naxis 512\nline @0 \"a.py\" 3\n%0 = batch axis 0 dim 0 f32[512, 4096]\n%1 = "
        "mine::odd(%0) -> f32[512, 4096] @0\n"
        "%2 %3 = aten::sort(%1) -> (f32[512, 4096], i64[512, 4096])\n";
    (void)text;
    koila_table *t;
    koila_graph *g = parse(&t, with_line);
    koila_device *d = gpu("L4-24GB");
    koila_prediction p;
    CHECK_EQ(koila_predict(g, d, torch("2.13"), NULL, &p, NULL), KOILA_OK);
    CHECK(p.steady.allocated.low < p.steady.allocated.expected &&
          p.steady.allocated.expected < p.steady.allocated.high);
    CHECK(p.steady.device.low < p.steady.device.expected &&
          p.steady.device.expected < p.steady.device.high);
    CHECK_EQ(p.n_not_modelled, 1);
    CHECK_STR(p.not_modelled[0].op, "mine::odd");
    CHECK(p.n_notes > 3);
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(predict__what_does_not_fit_is_said)
{
    koila_table *t;
    koila_graph *g = parse(&t, product);
    koila_device *d = gpu("a100-40gb");
    koila_prediction p;
    koila_predict_opts o = { .struct_size = sizeof o, .memory_bytes = 700 * MIB };
    koila_error e = KOILA_ERROR_INIT;
    CHECK_EQ(koila_predict(g, d, torch("2.13"), &o, &p, &e), KOILA_OK);
    CHECK(!p.fits); /* 240 MiB and a context of up to 570 */
    o.memory_bytes = 900 * MIB;
    CHECK_EQ(koila_predict(g, d, torch("2.13"), &o, &p, &e), KOILA_OK);
    CHECK(p.fits && p.spare_bytes < 200 * MIB);
    o.memory_bytes = 100 * MIB;
    CHECK_EQ(koila_predict(g, d, torch("2.13"), &o, &p, &e), KOILA_OOM);
    CHECK(strstr(e.text, "a CUDA context alone needs") && strstr(e.text, "104857600 are given"));
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(predict__an_optimizer_adds_its_state)
{
    static const char text[] =
        "koila graph 1\naxis 64\n%0 = batch axis 0 dim 0 f32[64, 1024]\n%1 = real f32[1024, "
        "1024]\n%2 = aten::mm(%0, %1) -> f32[64, 1024] grad\n"
        "%3 = aten::t(%0) -> f32[1024, 64]{1, 1024}\n%4 = aten::mm(%3, %2) -> f32[1024, 1024]\n";
    koila_table *t;
    koila_graph *g;
    char patched[1024];
    snprintf(patched, sizeof patched, "%s", text);
    g = parse(&t, patched);
    koila_device *d = gpu("a100-40gb");
    static const uint64_t states[] = { 0, 0, 1, 2, 2 };
    koila_prediction p, none;
    koila_predict_opts o = { .struct_size = sizeof o };
    CHECK_EQ(koila_predict(g, d, torch("2.13"), &o, &none, NULL), KOILA_OK);
    for (uint32_t k = 0; k <= KOILA_OPTIMIZER_ADAMW; k++) {
        o.optimizer = k;
        o.way = KOILA_WAY_FOREACH;
        CHECK_EQ(koila_predict(g, d, torch("2.13"), &o, &p, NULL), KOILA_OK);
        CHECK(p.steady.allocated.expected >= none.steady.allocated.expected + states[k] * 4 * MIB);
        CHECK(p.steady.allocated.expected <=
              none.steady.allocated.expected + (states[k] + 1) * 4 * MIB);
    }
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
}

/* The first step's allocated bytes of a graph, as `o` says, on an A100: 108 multiprocessors. */
static koila_prediction on_gpu(const char *name, const char *text, koila_predict_opts o)
{
    koila_table *t;
    koila_graph *g = parse(&t, text);
    koila_device *d = gpu(name);
    koila_prediction p = { 0 };
    koila_error e = KOILA_ERROR_INIT;
    o.struct_size = sizeof o;
    CHECK_EQ(koila_predict(g, d, torch("2.13"), &o, &p, &e), KOILA_OK);
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
    return p;
}
static koila_prediction of_text(const char *text, koila_predict_opts o)
{
    return on_gpu("a100-40gb", text, o);
}
static koila_prediction on_h100(const char *text)
{
    return on_gpu("h100-80gb", text, (koila_predict_opts){ .rows = 0 });
}
#define OPTS(...)                                                                                  \
    (koila_predict_opts) { __VA_ARGS__ }

TEST(predict__clipping_buckets_and_casts_are_what_one_counts)
{
    /* blocks of 512: x, w, h, g while the step runs; x, w, g, one norm and five numbers while
     * gradients are clipped */
    static const char tiny[] =
        "koila graph 1\naxis 64\nop aten::t view\n%0 = batch axis 0 dim 0 f32[64, 1]\n%1 = real "
        "f32[1, 1]\n%2 = aten::mm(%0, %1) -> f32[64, 1] grad\n"
        "%3 = aten::t(%0) -> f32[1, 64]{1, 1}\n%4 = aten::mm(%3, %2) -> f32[1, 1]\n";
    CHECK_EQ(of_text(tiny, OPTS(.clip_grad_norm = true)).first.allocated.expected -
                 of_text(tiny, OPTS(.rows = 0)).first.allocated.expected,
             5 * 512);
    /* a weight of 4 MiB in float32, of 2 MiB in bfloat16 */
    static const char full[] =
        "koila graph 1\naxis 64\nop aten::t view\n%0 = batch axis 0 dim 0 f32[64, 1024]\n%1 = real "
        "f32[1024, 1024]\n%2 = aten::mm(%0, %1) -> f32[64, 1024] grad\n"
        "%3 = aten::t(%0) -> f32[1024, 64]{1, 1024}\n%4 = aten::mm(%3, %2) -> f32[1024, 1024]\n";
    static const char half[] =
        "koila graph 1\naxis 64\nop aten::t view\n%0 = batch axis 0 dim 0 bf16[64, 1024]\n%1 = "
        "real bf16[1024, 1024]\n%2 = aten::mm(%0, %1) -> bf16[64, 1024] grad\n"
        "%3 = aten::t(%0) -> bf16[1024, 64]{1, 1024}\n%4 = aten::mm(%3, %2) -> bf16[1024, 1024]\n";
    CHECK_EQ(of_text(full, OPTS(.ddp = true)).first.allocated.expected -
                 of_text(full, OPTS(.ddp = false)).first.allocated.expected,
             4 * MIB);
    CHECK_EQ(of_text(half, OPTS(.ddp = true)).first.allocated.expected -
                 of_text(half, OPTS(.ddp = false)).first.allocated.expected,
             2 * MIB);
    /* a parameter of 4 MiB behind the cast, and a gradient of 4 MiB beside the one of 2; the
     * product of 128 KiB is gone by then, its input of 128 KiB is not */
    CHECK_EQ(of_text(half, OPTS(.autocast = true)).first.allocated.expected -
                 of_text(half, OPTS(.autocast = false)).first.allocated.expected,
             8 * MIB - 128 * 1024);
    CHECK_EQ(of_text(full, OPTS(.autocast = true)).first.allocated.expected,
             of_text(full, OPTS(.autocast = false)).first.allocated.expected);
    /* two states of 4 MiB, and one square root of 4 MiB above parameter and gradients as autocast
     * leaves them: 4 + 2 + 4 */
    const koila_prediction adam =
        of_text(half, OPTS(.autocast = true, .optimizer = KOILA_OPTIMIZER_ADAM));
    CHECK_EQ(adam.first.allocated.expected,
             8519680 * 2 + 128 * 1024 + (4 + 2 + 4 + 2 * 4 + 4) * MIB);
}

TEST(predict__only_a_sum_of_half_precision_is_accumulated_wider)
{
    /* x of 64 MiB in four slices, a result of 2 MiB */
    static const char sum[] = "koila graph 1\naxis 32\n%0 = batch axis 0 dim 0 bf16[32, 1048576]\n"
                              "%1 = aten::sum.dim_IntList(%0, [0], true) -> bf16[1, 1048576]\n";
    static const char max[] = "koila graph 1\naxis 32\n%0 = batch axis 0 dim 0 bf16[32, 1048576]\n"
                              "%1 = aten::amax(%0, [0], true) -> bf16[1, 1048576]\n";
    /* the slice's sum of 2 beside the float32 accumulator of 4, which is added to in place */
    CHECK_EQ(of_text(sum, OPTS(.rows = 8)).first.allocated.low, (64 + 2 + 4) * MIB);
    /* the slice's maximum, the accumulator and the new accumulator, all in bfloat16 */
    CHECK_EQ(of_text(max, OPTS(.rows = 8)).first.allocated.low, (64 + 2 + 2 + 2) * MIB);
    /* one slice: its result is the accumulator */
    CHECK_EQ(of_text(sum, OPTS(.rows = 32)).first.allocated.low, (64 + 2) * MIB);
    CHECK_EQ(of_text(max, OPTS(.rows = 32)).first.allocated.low, (64 + 2) * MIB);
}

TEST(predict__a_slice_of_a_value_with_gaps_is_a_view)
{
    /* 32 MiB of rows that do not lie together: copied, beside the sum and its accumulator */
    static const char dense[] = "koila graph 1\naxis 8192\n%0 = batch axis 0 dim 1 "
                                "f32[64, 8192, 128]\n%1 = aten::sum(%0) -> f32[]\n";
    /* and 2,048 + 512 bytes of partial results and their counters */
    const uint64_t partial = 2048 + 512;
    CHECK_EQ(of_text(dense, OPTS(.rows = 1024)).first.allocated.low,
             (256 + 32) * MIB + 2 * 512 + partial);
    /* the same of every second block of a tensor: 127 blocks of 4 MiB from the first to the last */
    static const char gaps[] = "koila graph 1\naxis 8192\n%0 = batch axis 0 dim 1 f32[64, 8192, "
                               "128]{2097152, 128, 1}\n%1 = aten::sum(%0) -> f32[]\n";
    CHECK_EQ(of_text(gaps, OPTS(.rows = 1024)).first.allocated.low,
             127 * 4 * MIB + 2 * 512 + partial);
}

/* Bytes as the simulated device of tests/fakecuda tells them, an H100. */
TEST(predict__partial_results_of_a_reduction_are_those_of_its_launch)
{
    /* of 2048 columns: 64 blocks share an output, of 128 threads that hold 4 of them */
    static const char columns[] =
        "koila graph 1\naxis 4096\n%0 = batch axis 0 dim 0 f32[4096, 2048]"
        "\n%1 = aten::sum.dim_IntList(%0, [0], true) -> f32[1, 2048]\n";
    CHECK_EQ(on_h100(columns).plain_first.allocated.expected, (32 + 64) * MIB + 8192 + 512);
    /* half precision is added up in float32 */
    static const char half[] = "koila graph 1\naxis 4096\n%0 = batch axis 0 dim 0 bf16[4096, 512]\n"
                               "%1 = aten::sum.dim_IntList(%0, [0], true) -> bf16[1, 512]\n";
    CHECK_EQ(on_h100(half).plain_first.allocated.expected, (4 + 16) * MIB + 1024 + 512);
    /* of everything */
    static const char all[] = "koila graph 1\naxis 16\n%0 = batch axis 0 dim 0 f32[16, 1024, 256]\n"
                              "%1 = aten::mean(%0) -> f32[]\n";
    CHECK_EQ(on_h100(all).plain_first.allocated.expected, 16 * MIB + 512 + 2048 + 512);
    /* of rows: no block shares an output */
    static const char rows[] = "koila graph 1\naxis 4096\n%0 = batch axis 0 dim 0 f32[4096, 2048]\n"
                               "%1 = aten::sum.dim_IntList(%0, [1]) -> f32[4096]\n";
    CHECK_EQ(on_h100(rows).plain_first.allocated.expected, 32 * MIB + 4096 * 4);
}

TEST(predict__the_losses_of_all_elements_stay_behind_a_loss)
{
    static const char mse[] = "koila graph 1\naxis 1024\n%0 = batch axis 0 dim 0 f32[1024, 1024]\n"
                              "%1 = batch axis 0 dim 0 f32[1024, 1024]\n"
                              "%2 = aten::mse_loss(%0, %1) -> f32[]\n%3 = aten::exp(%0) -> "
                              "f32[1024, 1024]\n%4 = aten::exp(%3) -> f32[1024, 1024]\n";
    /* at the end: two batches, the loss and two results */
    CHECK_EQ(on_h100(mse).plain_first.allocated.expected, 5 * 4 * MIB);
    /* koila copies the number: two batches and two results, or twice the losses */
    CHECK_EQ(on_h100(mse).first.allocated.expected, 4 * 4 * MIB + 512);
}

TEST(predict__plain_pytorch_frees_what_is_dropped_and_keeps_what_is_held)
{
    static const char chain[] =
        "koila graph 1\naxis 1024\n%0 = batch axis 0 dim 0 f32[1024, 1024]\n"
        "%1 = aten::exp(%0) -> f32[1024, 1024]\n%2 = aten::exp(%1) -> f32[1024, 1024]\n"
        "%3 = aten::exp(%2) -> f32[1024, 1024]\n%4 = aten::exp(%3) -> f32[1024, 1024]\n";
    koila_table *t;
    koila_graph *g = parse(&t, chain);
    koila_device *d = gpu("h100-80gb");
    koila_prediction p;
    /* nothing is known: until the last use */
    CHECK_EQ(koila_predict(g, d, torch("2.13"), NULL, &p, NULL), KOILA_OK);
    CHECK_EQ(p.plain_first.allocated.expected, 3 * 4 * MIB);
    /* held to the end: the plan does not care */
    CHECK_EQ(koila_graph_drop(g, 1), KOILA_OK);
    CHECK_EQ(koila_graph_drop(g, 99), KOILA_BAD_ARGUMENT);
    CHECK_EQ(koila_predict(g, d, torch("2.13"), NULL, &p, NULL), KOILA_OK);
    CHECK_EQ(p.plain_first.allocated.expected, 4 * 4 * MIB);
    CHECK_EQ(p.first.allocated.expected, 3 * 4 * MIB);
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(predict__leaves_of_one_storage_count_once)
{
    static const char two[] = "koila graph 1\naxis 8\n%0 = batch axis 0 dim 0 f32[8, 256]\n"
                              "%1 = real f32[256, 1024]\n%2 = real f32[256, 1024]\n"
                              "%3 = aten::mm(%0, %1) -> f32[8, 1024] grad\n"
                              "%4 = aten::mm(%0, %2) -> f32[8, 1024] grad\n";
    koila_table *t;
    koila_graph *g = parse(&t, two);
    koila_device *d = gpu("h100-80gb");
    koila_prediction apart;
    koila_prediction together;
    CHECK_EQ(koila_predict(g, d, torch("2.13"), NULL, &apart, NULL), KOILA_OK);
    CHECK_EQ(koila_graph_stored(g, 1, 7, MIB), KOILA_OK);
    CHECK_EQ(koila_graph_stored(g, 2, 7, MIB), KOILA_OK);
    CHECK_EQ(koila_graph_stored(g, 3, 7, MIB), KOILA_BAD_ARGUMENT); /* no leaf */
    CHECK_EQ(koila_predict(g, d, torch("2.13"), NULL, &together, NULL), KOILA_OK);
    CHECK_EQ(apart.plain_first.allocated.expected - together.plain_first.allocated.expected, MIB);
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
}

/* One call of attention: heads of q [b, 8, sq, d], of k and v [b, 8, 2048, d]; bytes beyond q, k, v
 * and the results. */
static uint64_t attention_inside(const char *dtype, int64_t b, int64_t sq, int64_t d, uint32_t sdpa,
                                 const char *mask, uint64_t lse_bytes)
{
    char text[1024];
    const uint64_t bytes = strcmp(dtype, "f32") ? 2 : 4;
    const uint64_t q = (uint64_t)(b * 8 * sq * d) * bytes;
    const uint64_t k = (uint64_t)(b * 8 * 2048 * d) * bytes;
    int n = snprintf(text, sizeof text,
                     "koila graph 1\n%%0 = real %s[%lld, 8, %lld, %lld]\n%%1 = real %s[%lld, 8, "
                     "2048, %lld]\n%%2 = real %s[%lld, 8, 2048, %lld]\n",
                     dtype, (long long)b, (long long)sq, (long long)d, dtype, (long long)b,
                     (long long)d, dtype, (long long)b, (long long)d);
    const int first = *mask ? 4 : 3;
    if (*mask)
        n += snprintf(text + n, sizeof text - (size_t)n, "%%3 = real %s\n", mask);
    snprintf(text + n, sizeof text - (size_t)n,
             "%%%d %%%d = aten::_scaled_dot_product_flash_attention_for_cpu(%%0, %%1, %%2%s) -> "
             "(%s[%lld, 8, %lld, %lld], f32[%lld, 8, %lld])\n",
             first, first + 1, *mask ? ", attn_mask=%3" : "", dtype, (long long)b, (long long)sq,
             (long long)d, (long long)b, (long long)sq);
    const uint64_t mask_bytes = *mask ? 2048 * (uint64_t)sq : 0; /* booleans */
    return of_text(text, OPTS(.sdpa = sdpa)).first.allocated.expected - 2 * q - 2 * k - lse_bytes -
           mask_bytes;
}

TEST(predict__attention_s_own_memory_depends_on_what_fills_the_device)
{
    /* 8 heads and one block of 64 queries are 8 blocks for 216 places: the 8 blocks of 256 keys are
     * cut 8 times; seed and offset are 512 each */
    CHECK_EQ(attention_inside("bf16", 1, 64, 64, KOILA_SDPA_AUTO, "", 2048),
             1024 + 8 * 8 * 64 * 4 + 8 * 8 * 64 * 64 * 4);
    /* 32 samples are 256 blocks, more than 0.8 of 216: no cut, so less than for one */
    CHECK_EQ(attention_inside("bf16", 32, 64, 64, KOILA_SDPA_AUTO, "", 32 * 2048), 1024);
    /* heads of 60 are padded to 64: three copies of the operands besides */
    CHECK_EQ(attention_inside("bf16", 32, 64, 60, KOILA_SDPA_AUTO, "", 32 * 2048),
             1024 + 32 * 8 * (64 + 2 * 2048) * 64 * 2);
    /* flash takes no mask and no float32: the efficient kernels pad the logsumexp of 20 queries to
     * 32, and have nothing else */
    CHECK_EQ(attention_inside("f32", 8, 20, 64, KOILA_SDPA_AUTO, "", 8 * 8 * 32 * 4), 0);
    CHECK_EQ(attention_inside("bf16", 8, 32, 64, KOILA_SDPA_AUTO, "bool[32, 2048]", 8 * 8 * 32 * 4),
             0);
    /* scores and probabilities */
    CHECK_EQ(attention_inside("bf16", 4, 64, 64, KOILA_SDPA_MATH, "", 4 * 2048),
             2 * 4 * 8 * 64 * 2048 * 2);
}

/* ---- what a CPU records and CUDA does otherwise, row by row */

TEST(on_cuda__no_operator_has_two_rows)
{
    static const char *const names[] = {
#define KOILA_CUDA(name, kind) name,
#include "predict/cuda_ops.def"
#undef KOILA_CUDA
    };
    for (size_t i = 0; i < KOILA_COUNT(names); i++)
        for (size_t k = 0; k < i; k++)
            CHECK(strcmp(names[i], names[k]) != 0);
}

TEST(on_cuda__a_dropout_mask_is_a_byte_an_element)
{
    static const char text[] =
        "koila graph 1\naxis 1024\nop aten::bernoulli_.float inplace random\nop aten::div_.Scalar "
        "inplace\n%0 = batch axis 0 dim 0 f32[1024, 1024]\n"
        "%1 = aten::relu(%0) -> f32[1024, 1024] grad\n%2 = aten::empty_like(%1) -> f32[1024, "
        "1024]\n%3 = aten::bernoulli_.float(%2, 0.9) -> {} writes 0\n"
        "%4 = aten::div_.Scalar(%3, 0.9) -> {} writes 0\n%5 = aten::mul.Tensor(%1, %4) -> "
        "f32[1024, 1024] grad\n";
    const koila_prediction p = of_text(text, OPTS(.rows = 0));
    /* x, relu, mask, result: no second temporary */
    CHECK_EQ(p.first.allocated.expected, (4 + 4 + 1 + 4) * MIB);
    CHECK_EQ(p.first.allocated.high, p.first.allocated.expected);
}

TEST(on_cuda__attention_with_dropout_is_not_quadratic_but_for_the_high_end)
{
    static const char text[] =
        "koila graph 1\nop aten::bernoulli_.float inplace random\nop aten::div_.Scalar inplace\n%0 "
        "= real f32[4, 1024, 64]\n%1 = real f32[4, 64, 1024]\n%2 = real f32[4, 1024, 64]\n"
        "%3 = aten::bmm(%0, %1) -> f32[4, 1024, 1024] grad\n%4 = aten::_safe_softmax(%3, -1) -> "
        "f32[4, 1024, 1024] grad\n%5 = aten::empty_like(%4) -> f32[4, 1024, 1024]\n"
        "%6 = aten::bernoulli_.float(%5, 0.9) -> {} writes 0\n%7 = aten::div_.Scalar(%6, 0.9) -> "
        "{} writes 0\n%8 = aten::mul.Tensor(%4, %7) -> f32[4, 1024, 1024] grad\n"
        "%9 = aten::bmm(%8, %2) -> f32[4, 1024, 64] grad\n";
    const koila_prediction p = of_text(text, OPTS(.rows = 0));
    const koila_prediction math = of_text(text, OPTS(.sdpa = KOILA_SDPA_MATH));
    CHECK_EQ(p.first.allocated.low, 4 * MIB + 8519680); /* q, k, v and the result */
    CHECK_EQ(p.first.allocated.expected, 4 * MIB + 8519680);
    CHECK(p.first.allocated.high >= 3 * MIB + 8519680 + 32 * MIB);
    CHECK_EQ(math.first.allocated.expected, p.first.allocated.high);
}

TEST(on_cuda__statistics_of_layer_norm_are_float32_and_of_group_norm_are_not)
{
    static const char layer[] =
        "koila graph 1\n%0 = real bf16[4096, 512]\n%1 %2 %3 = aten::native_layer_norm(%0, [512], "
        "None, None, 1e-05) -> (bf16[4096, 512], bf16[4096, 1], bf16[4096, 1]) grad\n";
    static const char group[] =
        "koila graph 1\n%0 = real bf16[4096, 512]\n%1 %2 %3 = aten::native_group_norm(%0, None, "
        "None, 4096, 512, 1, 1, 1e-05) -> (bf16[4096, 512], bf16[4096, 1], bf16[4096, 1]) grad\n";
    CHECK_EQ(of_text(layer, OPTS(.rows = 0)).first.allocated.expected, 8 * MIB + 2 * 4096 * 4);
    CHECK_EQ(of_text(group, OPTS(.rows = 0)).first.allocated.low, 8 * MIB + 2 * 4096 * 2);
}

TEST(on_cuda__batch_norm_may_keep_a_reserve_of_a_bit_an_element)
{
    static const char text[] = "koila graph 1\n%0 = real f32[64, 64, 16, 16]\n%1 %2 %3 = "
                               "aten::native_batch_norm(%0, None, None, None, None, true, 0.1, "
                               "1e-05) -> (f32[64, 64, 16, 16], f32[64], f32[64]) grad\n";
    const koila_prediction p = of_text(text, OPTS(.rows = 0));
    CHECK_EQ(p.first.allocated.expected, 8 * MIB + 2 * 512);
    CHECK_EQ(p.first.allocated.high, 8 * MIB + 2 * 512 + MIB / 8);
}

TEST(on_cuda__backward_of_attention_and_embedding_use_what_their_kernels_take)
{
    /* B 2, H 8, Sq 100 -> 128, D 40 -> 64 */
    static const char flash[] =
        "koila graph 1\n%0 = real bf16[2, 8, 100, 40]\n%1 = real bf16[2, 8, 100, 40]\n%2 = real "
        "bf16[2, 8, 100, 40]\n%3 = real bf16[2, 8, 100, 40]\n%4 = real bf16[2, 8, 100, 40]\n%5 = "
        "real f32[2, 8, 100]\n"
        "%6 %7 %8 = aten::_scaled_dot_product_flash_attention_for_cpu_backward(%0, %1, %2, %3, %4, "
        "%5, 0.0, false) -> (bf16[2, 8, 100, 40], bf16[2, 8, 100, 40], bf16[2, 8, 100, 40])\n";
    const uint64_t one = (2 * 8 * 100 * 40 * 2 + 511) / 512 * 512;
    const uint64_t lse = (2 * 8 * 100 * 4 + 511) / 512 * 512;
    CHECK_EQ(of_text(flash, OPTS(.sdpa = KOILA_SDPA_FLASH)).first.allocated.expected,
             8 * one + lse + 2 * 8 * 128 * 4 + 2 * 128 * 8 * 64 * 4);
    char text[600];
    uint64_t got[2];
    for (int k = 0; k < 2; k++) { /* 3,072 indices take the kernel without, 3,073 the one with */
        snprintf(text, sizeof text,
                 "koila graph 1\n%%0 = real f32[%d, 256]\n%%1 = real i64[%d]\n%%2 = "
                 "aten::embedding_dense_backward(%%0, %%1, 1000, -1, false) -> f32[1000, 256]\n",
                 3072 + k, 3072 + k);
        got[k] = of_text(text, OPTS(.rows = 0)).first.allocated.expected;
    }
    CHECK_EQ(got[0], 3 * MIB + 24 * 1024 + 2000 * 512);
    const uint64_t n = 3073;
    const uint64_t sorted = (n * 8 + 511) / 512 * 512;
    const uint64_t p = n / 10 + 1000;
    CHECK_EQ(got[1], 3 * MIB + 1024 + sorted + 2000 * 512 + 3 * sorted +
                         (n * 16 + 511) / 512 * 512 + p * 256 * 4);
}

TEST(on_cuda__a_convolution_copies_its_operands_channels_last)
{
#define NOTHING UINT64_MAX
    static const char text[] = "koila graph 1\naxis 32\n%%0 = batch axis 0 dim 0 %s[32, 256, 14, "
                               "14]%s\n%%1 = real %s[512, 256, %d, %d]\n"
                               "%%2 = aten::convolution(%%0, %%1) -> %s[32, 512, 14, 14]\n";
    static const struct {
        const char *device, *dtype, *strides;
        int window;
        uint64_t bytes, inside; /* of an element; beside x, w and the result, 0: the profile's */
    } rows[] = {                /* measured on an H200: 22.88, 11.44 and 0 MiB */
                 { "h100-80gb", "f32", "", 3, 4, (1605632 + 3211264 + 1179648) * 4 },
                 { "h100-80gb", "bf16", "", 3, 2, (1605632 + 3211264 + 1179648) * 2 },
                 { "h100-80gb", "f32", "{50176, 1, 3584, 256}", 3, 4, 0 },
                 { "h100-80gb", "f32", "", 1, 4, NOTHING },
                 { "h100-80gb", "f64", "", 3, 8, 0 },
                 { "v100-16gb", "f32", "", 3, 4, 0 }
    };
    for (size_t i = 0; i < KOILA_COUNT(rows); i++) {
        char step[512];
        koila_table *t;
        const int n = rows[i].window;
        snprintf(step, sizeof step, text, rows[i].dtype, rows[i].strides, rows[i].dtype, n, n,
                 rows[i].dtype);
        koila_graph *g = parse(&t, step);
        koila_device *d = gpu(rows[i].device);
        koila_prediction p;
        CHECK_EQ(koila_predict(g, d, torch("2.13"), NULL, &p, NULL), KOILA_OK);
        const uint64_t held = (1605632 + 3211264 + 131072 * (uint64_t)(n * n)) * rows[i].bytes;
        const uint64_t usual = koila_device_get(d, KOILA_DEVICE_CONV_BYTES).value;
        const uint64_t inside = rows[i].inside == NOTHING ? 0 : rows[i].inside;
        const uint64_t most = held + (rows[i].inside ? inside : usual);
        CHECK(p.first.allocated.expected >= most); /* a rest of less than 1 MiB is not split off */
        CHECK(p.first.allocated.expected < most + MIB);
        koila_device_free(d);
        koila_graph_free(g);
        koila_table_free(t);
    }
}

/* The gradients of convolutions that were measured on an H200, of 128 images in float32: the copies
 * are given back before the weight's gradient is made, whose partial sums come on top of them. */
TEST(on_cuda__a_convolution_s_gradients_copy_one_after_the_other)
{
    static const char text[] =
        "koila graph 1\naxis 128\n%%0 = batch axis 0 dim 0 f32[128, %d, %d, %d]\n"
        "%%1 = real f32[%d, %d, 3, 3]\n%%2 = batch axis 0 dim 0 f32[128, %d, %d, %d]\n"
        "%%3 %%4 %%5 = aten::convolution_backward(%%0, %%2, %%1, None, [1, 1], [1, 1], [1, 1], "
        "false, [0, 0], 1, [true, true, false]) -> (f32[128, %d, %d, %d], f32[%d, %d, 3, 3], "
        "None)\n";
    static const struct {
        int channels, edge;
        double sums; /* MiB */
    } rows[] = { { 64, 64, 1.97 }, { 128, 32, 7.88 }, { 256, 16, 6.75 }, { 512, 8, 8.25 } };
    for (size_t i = 0; i < KOILA_COUNT(rows); i++) {
        char step[768];
        koila_table *t;
        const int c = rows[i].channels, e = rows[i].edge;
        snprintf(step, sizeof step, text, c, e, e, c, c, c, e, e, c, e, e, c, c);
        koila_graph *g = parse(&t, step);
        koila_device *d = gpu("h100-80gb");
        koila_prediction p;
        CHECK_EQ(koila_predict(g, d, torch("2.13"), NULL, &p, NULL), KOILA_OK);
        const double image = 128.0 * c * e * e * 4 / MIB, weight = 9.0 * c * c * 4 / MIB;
        /* two images and a weight are given, an image and a weight are made */
        const double most = 3 * image + 2 * weight + 2 * image + weight + rows[i].sums;
        const double told = (double)p.first.allocated.expected / MIB;
        CHECK(told > most - 0.1 && told < most + 1.1);
        koila_device_free(d);
        koila_graph_free(g);
        koila_table_free(t);
    }
}

TEST(on_cuda__an_optimizer_s_temporaries_depend_on_its_way)
{
    /* two parameters of 4 and 2 MiB, no activations worth speaking of */
    static const char text[] =
        "koila graph 1\naxis 64\nop aten::t view\n%0 = batch axis 0 dim 0 f32[64, 1024]\n%1 = real "
        "f32[1024, 1024]\n%2 = real f32[1024, 512]\n%3 = aten::mm(%0, %1) -> f32[64, 1024] grad\n"
        "%4 = aten::mm(%0, %2) -> f32[64, 512] grad\n%5 = aten::t(%0) -> f32[1024, 64]{1, "
        "1024}\n%6 = aten::mm(%5, %3) -> f32[1024, 1024]\n%7 = aten::mm(%5, %4) -> f32[1024, "
        "512]\n";
    /* cuBLAS, x, parameters and gradients */
    const uint64_t base = 2 * 8519680 + 64 * 1024 * 4 + 2 * 6 * MIB;
    static const struct {
        uint32_t kind, way;
        bool decay, amsgrad;
        uint64_t more; /* above base, in the steady step */
    } rows[] = { { KOILA_OPTIMIZER_SGD, KOILA_WAY_FOREACH, false, false, 0 },
                 { KOILA_OPTIMIZER_SGD, KOILA_WAY_FOREACH, true, false, 6 * MIB },
                 { KOILA_OPTIMIZER_MOMENTUM, KOILA_WAY_FOREACH, true, false, 12 * MIB },
                 { KOILA_OPTIMIZER_ADAM, KOILA_WAY_FOREACH, false, false, 18 * MIB },
                 /* decayed gradients are gone before the roots */
                 { KOILA_OPTIMIZER_ADAM, KOILA_WAY_FOREACH, true, false, 18 * MIB },
                 { KOILA_OPTIMIZER_ADAM, KOILA_WAY_FOREACH, false, true, 24 * MIB },
                 { KOILA_OPTIMIZER_ADAMW, KOILA_WAY_FOREACH, true, false, 18 * MIB },
                 /* the peak is in the backward, beside a product */
                 { KOILA_OPTIMIZER_ADAMW, KOILA_WAY_FUSED, true, false,
                   12 * MIB + 2 * 512 + MIB / 4 },
                 { KOILA_OPTIMIZER_ADAMW, KOILA_WAY_LOOP, true, false, 20 * MIB } };
    for (size_t i = 0; i < KOILA_COUNT(rows); i++) {
        const koila_prediction p =
            of_text(text, OPTS(.optimizer = rows[i].kind, .way = rows[i].way,
                               .weight_decay = rows[i].decay, .amsgrad = rows[i].amsgrad));
        if (rows[i].more)
            CHECK_EQ(p.steady.allocated.expected, base + rows[i].more);
        else
            CHECK(p.steady.allocated.expected <= base + MIB);
    }
}

/* Of the first step. */
static uint64_t peak_of(const char *text, const char *version, koila_predict_opts o)
{
    koila_table *t;
    koila_graph *g = parse(&t, text);
    koila_device *d = gpu("a100-40gb");
    koila_prediction p = { 0 };
    o.struct_size = sizeof o;
    CHECK_EQ(koila_predict(g, d, torch(version), &o, &p, NULL), KOILA_OK);
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
    return p.first.allocated.expected;
}
/* With so much for each workspace of cuBLAS. */
static uint64_t peak_with(const char *text, const char *version, const char *cublas)
{
    return peak_of(text, version, (koila_predict_opts){ .cublas_workspace = cublas });
}

TEST(on_cuda__from_torch_2_15_on_a_product_gives_its_workspace_back)
{
    static const char *none = ":0:0", *large = ":65536:1"; /* 64 MiB */
    /* the peak is behind the product: what is still there of its workspace adds to it */
    static const char late[] =
        "koila graph 1\naxis 8192\n%0 = batch axis 0 dim 0 f32[8192, 1024]\n"
        "%1 = real f32[1024, 1024]\n%2 = aten::mm(%0, %1) -> f32[8192, 1024] grad\n"
        "%3 = aten::relu(%2) -> f32[8192, 1024] grad\n"
        "%4 = aten::sin(%3) -> f32[8192, 1024] grad\n%5 = aten::mul(%4, %3) -> f32[8192, 1024]\n";
    CHECK_EQ(peak_with(late, "2.14", large) - peak_with(late, "2.14", none), 64 * MIB);
    CHECK_EQ(peak_with(late, "2.15", large), peak_with(late, "2.15", none));
    CHECK_EQ(peak_with(product, "2.14", none), peak_with(product, "2.15", none));
    /* a sum with a vector is cuBLASLt's, with 1 MiB */
    static const char linear[] =
        "koila graph 1\naxis 64\n%0 = batch axis 0 dim 0 f32[64, 64]\n%1 = real f32[64, 64]\n"
        "%2 = real f32[64]\n%3 = aten::addmm(%2, %0, %1) -> f32[64, 64] grad\n";
    static const char square[] =
        "koila graph 1\naxis 64\n%0 = batch axis 0 dim 0 f32[64, 64]\n%1 = real f32[64, 64]\n"
        "%2 = aten::mm(%0, %1) -> f32[64, 64] grad\n";
    CHECK_EQ(peak_with(linear, "2.15", large), peak_with(linear, "2.15", none));
    CHECK_EQ(peak_with(linear, "2.15", none) - peak_with(linear, "2.14", none), MIB);
    CHECK_EQ(peak_with(square, "2.15", large) - peak_with(square, "2.15", none), 64 * MIB);
}

TEST(on_cuda__cublaslt_adds_vectors_to_products_of_some_columns_and_terms)
{
    static const struct {
        const char *dtype, *bias, *keywords;
        int terms, columns;
        bool is_lt;
    } rows[] = {
        { "f32", "[64]", "", 64, 64, true },      { "bf16", "[64]", "", 64, 64, true },
        { "f64", "[2]", "", 2, 2, true },         { "f32", "[1]", "", 64, 1, false },
        { "f32", "[64]", "", 1, 64, false },      { "f32", "[1]", "", 64, 64, false },
        { "f32", "[64, 64]", "", 64, 64, false }, { "f32", "[64]", ", beta=0.5", 64, 64, false },
        { "c64", "[64]", "", 64, 64, false },     { "f32", "[64]{2}", "", 64, 64, false }
    };
    for (size_t i = 0; i < KOILA_COUNT(rows); i++) {
        char text[400];
        const char *of = rows[i].dtype;
        snprintf(text, sizeof text,
                 "koila graph 1\naxis 64\n%%0 = batch axis 0 dim 0 %s[64, %d]\n"
                 "%%1 = real %s[%d, %d]\n%%2 = real %s%s\n"
                 "%%3 = aten::addmm(%%2, %%0, %%1%s) -> %s[64, %d] grad\n",
                 of, rows[i].terms, of, rows[i].terms, rows[i].columns, of, rows[i].bias,
                 rows[i].keywords, of, rows[i].columns);
        const uint64_t more = peak_with(text, "2.15", ":65536:1") - peak_with(text, "2.15", ":0:0");
        if (rows[i].is_lt)
            CHECK_EQ(more, 0);
        else
            CHECK_EQ(more, 64 * MIB);
    }
}

TEST(on_cuda__cublas_settings_of_torch_2_15_count)
{
    static const char both[] =
        "koila graph 1\naxis 64\n%0 = batch axis 0 dim 0 f32[64, 64]\n%1 = real f32[64, 64]\n"
        "%2 = real f32[64]\n%3 = aten::addmm(%2, %0, %1) -> f32[64, 64] grad\n";
    const uint64_t plain = peak_with(both, "2.15", ":16:8");
    static const struct {
        const char *size;
        uint64_t bytes;
    } rows[] = { { NULL, MIB }, { "", MIB },         { "x", MIB },        { "-1", MIB },
                 { "0", 0 },    { "2048", 2 * MIB }, { "2048x", 2 * MIB } };
    for (size_t i = 0; i < KOILA_COUNT(rows); i++) {
        const koila_predict_opts o = { .cublas_workspace = ":16:8",
                                       .cublaslt_workspace = rows[i].size };
        CHECK_EQ(koila_cublaslt_workspace(rows[i].size), rows[i].bytes);
        CHECK_EQ(peak_of(both, "2.15", o) + MIB, plain + rows[i].bytes);
    }
    const koila_predict_opts kept = { .cublas_workspace = ":4096:8", .keeps_cublas = true };
    CHECK_EQ(peak_of(both, "2.15", kept), peak_with(both, "2.14", ":4096:8"));
    CHECK_EQ(peak_of(both, "2.14", kept), peak_with(both, "2.14", ":4096:8"));
}

TEST(on_cuda__a_scaler_and_cublas_settings_count)
{
    static const char tiny[] =
        "koila graph 1\naxis 64\nop aten::t view\n%0 = batch axis 0 dim 0 f32[64, 1]\n%1 = real "
        "f32[1, 1]\n%2 = aten::mm(%0, %1) -> f32[64, 1] grad\n"
        "%3 = aten::t(%0) -> f32[1, 64]{1, 1}\n%4 = aten::mm(%3, %2) -> f32[1, 1]\n";
    const uint64_t plain = of_text(tiny, OPTS(.rows = 0)).steady.allocated.expected;
    const uint64_t scaled = of_text(tiny, OPTS(.grad_scaler = true)).steady.allocated.expected;
    CHECK(scaled >= plain + 2 * 512 && scaled <= plain + 6 * 512);
    static const struct {
        const char *config;
        uint64_t bytes;
        bool ok;
    } rows[] = { { ":4096:2:16:8", 8519680, true },
                 { ":4096:8", 32 * MIB, true },
                 { ":16:8", 131072, true },
                 { ":0:0", 0, true },
                 { "x:4096:8y", 32 * MIB, true },
                 { ":4096:8:", 32 * MIB, true },
                 { "::16:8", 131072, true },
                 { "", 0, false },
                 { "4096:8", 0, false },
                 { ":4096", 0, false },
                 { ":4096:-1", 0, false },
                 { ":a:b", 0, false },
                 { ":99999999999999999999:1", 9999999ull * 1024, true } };
    for (size_t i = 0; i < KOILA_COUNT(rows); i++) {
        uint64_t n = 0;
        CHECK_EQ(koila_cublas_workspace(rows[i].config, &n), rows[i].ok);
        CHECK_EQ(n, rows[i].bytes);
        if (i < 4)
            CHECK_EQ(
                of_text(tiny, OPTS(.cublas_workspace = rows[i].config)).steady.allocated.expected +
                    2 * 8519680,
                plain + 2 * n);
    }
}

TEST(on_cuda__cudnn_s_attention_comes_first_where_it_is_new_and_the_device_is)
{
    static const struct {
        int capability, cudnn;
        const char *dtype;
        bool last, is_cudnn;
    } rows[] = { { 90, 91501, "bf16", false, true },   { 100, 92000, "f16", false, true },
                 { 90, 91500, "bf16", false, false },  { 80, 91501, "bf16", false, false },
                 { 120, 91501, "bf16", false, false }, { 90, 91501, "f32", false, false },
                 { 90, 91501, "bf16", true, false } };
    for (size_t i = 0; i < KOILA_COUNT(rows); i++) {
        char text[600], profile[600];
        const int bytes = strcmp(rows[i].dtype, "f32") ? 2 : 4;
        koila_table *t;
        koila_device *d = NULL;
        koila_prediction p = { 0 };
        koila_predict_opts o = { .struct_size = sizeof o, .cudnn_sdpa_last = rows[i].last };
        const char *x = rows[i].dtype;
        snprintf(text, sizeof text,
                 "koila graph 1\n%%0 = real %s[32, 8, 64, 64]\n%%1 = real %s[32, 8, 64, 64]\n%%2 = "
                 "real %s[32, 8, 64, 64]\n"
                 "%%3 %%4 = aten::_scaled_dot_product_flash_attention_for_cpu(%%0, %%1, %%2) -> "
                 "(%s[32, 8, 64, 64], f32[32, 8, 64])\n",
                 x, x, x, x);
        snprintf(profile, sizeof profile,
                 "{\"koila_device\": 1, \"fields\": {\"sm_count\": {\"value\": 132, \"how\": "
                 "\"vendor\"}, \"compute_capability\": {\"value\": %d, \"how\": \"vendor\"}, "
                 "\"total_bytes\": {\"value\": 80000000000, \"how\": \"vendor\"}, "
                 "\"context_bytes\": {\"value\": 1, \"how\": \"vendor\"}, \"cudnn_version\": "
                 "{\"value\": %d, \"how\": \"measured\"}}}",
                 rows[i].capability, rows[i].cudnn);
        koila_graph *g = parse(&t, text);
        CHECK_EQ(koila_device_open(profile, strlen(profile), NULL, &d, NULL), KOILA_OK);
        CHECK_EQ(koila_predict(g, d, torch("2.13"), &o, &p, NULL), KOILA_OK);
        const uint64_t inside =
            p.first.allocated.expected - 4 * (uint64_t)(32 * 8 * 64 * 64 * bytes) - 32 * 8 * 64 * 4;
        CHECK_EQ(inside >= 16 * MIB, rows[i].is_cudnn); /* its workspace */
        koila_device_free(d);
        koila_graph_free(g);
        koila_table_free(t);
    }
}

TEST(predict__a_recurrent_layer_is_modelled_and_its_cpu_workspace_is_not_cuda_s)
{
    static const char text[] =
        "koila graph 1\nop aten::mkldnn_rnn_layer opaque\n%0 = real f32[100, 64, 32]\n%1 = real "
        "f32[512, 32]\n%2 = real f32[512, 128]\n%3 = real f32[512]\n%4 = real f32[512]\n"
        "%5 = real f32[64, 128]\n%6 = real f32[64, 128]\n%7 %8 %9 %10 = aten::mkldnn_rnn_layer(%0, "
        "%1, %2, %3, %4, %5, %6, false, [], 2, 128, 1, true, false, true, true)"
        " -> (f32[100, 64, 128], f32[64, 128], f32[64, 128], u8[99999744]) grad\n";
    const koila_prediction p = of_text(text, OPTS(.rows = 0));
    CHECK_EQ(p.n_not_modelled, 0);
    const uint64_t unit = 100 * 64 * 128 * 4;
    CHECK(p.first.allocated.low < p.first.allocated.expected &&
          p.first.allocated.high - p.first.allocated.low > 3 * unit);
    CHECK(p.first.allocated.expected > 7 * unit && p.first.allocated.high < 99999744);
}

TEST(fits__leaves_the_live_cache_as_it_was)
{
    koila_table *t;
    koila_graph *g = parse(&t, product);
    koila_device *d = gpu("a100-40gb");
    koila_cache_config conf;
    koila_cache *c = NULL;
    uint64_t a, b;
    koila_fit f = { 0 }, same = { 0 };
    koila_cache_config_init(&conf, NULL);
    conf.total_bytes = 400 * MIB;
    CHECK_EQ(koila_cache_new(&conf, NULL, &c, NULL), KOILA_OK);
    koila_cache_malloc(c, 60 * MIB, 0, KOILA_POOL_DEFAULT, &a);
    koila_cache_malloc(c, 100 * MIB, 0, KOILA_POOL_DEFAULT, &b);
    koila_cache_release(c, a);
    const uint64_t before = koila__cache_fingerprint(c);
    CHECK_EQ(koila_fits(g, d, c, 0, &f, NULL), KOILA_OK);
    CHECK(koila__cache_fingerprint(c) == before);
    CHECK(f.fits);
    CHECK_EQ(koila_fits(g, d, c, 0, &same, NULL), KOILA_OK);
    CHECK_EQ(f.peak_reserved, same.peak_reserved);
    koila_cache_set_limit(c, 200 * MIB, 0, 0);
    CHECK_EQ(koila_fits(g, d, c, 0, &f, NULL), KOILA_OK);
    CHECK(!f.fits);
    CHECK(koila__cache_check(c));
    koila_cache_free(c);
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
}

/* ---- the planner on a live cache */

/* A loss of a product: 64 MiB twice at the whole batch of 8192 rows, nothing large left over. */
static const char loss[] = "koila graph 1\naxis 8192\n%0 = batch axis 0 dim 0 f32[8192, 1024] "
                           "\"x\"\n%1 = real f32[1024, 2048] \"w\"\n"
                           "%2 = aten::mm(%0, %1) -> f32[8192, 2048] grad\n%3 = aten::relu(%2) -> "
                           "f32[8192, 2048] grad\n%4 = aten::sum(%3) -> f32[]\n";

static koila_cache *cache_of(uint64_t total, const koila_segment *s, size_t n)
{
    koila_cache_config conf;
    koila_cache *c = NULL;
    koila_cache_config_init(&conf, "2.13");
    conf.total_bytes = total;
    CHECK_EQ(koila_cache_from_segments(&conf, NULL, s, n, &c, NULL), KOILA_OK);
    return c;
}

/* The plan of `g`'s last value on `live`, with options `o`; its rows. */
static int64_t rows_with(const koila_graph *g, koila_cache *live, koila_fit_opts o, koila_fit *f)
{
    koila_device *d = gpu("a100-40gb");
    const koila_value target = koila_graph_n_values(g) - 1;
    const koila_plan_options po = { .struct_size = sizeof po, .budget_bytes = UINT64_MAX };
    koila_plan *p = NULL;
    koila_error e = KOILA_ERROR_INIT;
    const uint64_t before = koila__cache_fingerprint(live);
    CHECK_EQ(koila_plan_live(g, &target, 1, &po, d, live, &o, NULL, &p, f, &e), KOILA_OK);
    CHECK(koila__cache_fingerprint(live) == before);
    CHECK(f->n_simulations >= 1 && f->n_simulations <= KOILA_MAX_SIMULATIONS);
    const int64_t rows = p ? koila_plan_get(p).rows : 0;
    koila_plan_free(p);
    koila_device_free(d);
    return rows;
}

/* The same. `margin` bytes are not counted with. */
static int64_t rows_on(const koila_graph *g, koila_cache *live, uint64_t margin, koila_fit *f)
{
    const koila_fit_opts o = { .struct_size = sizeof o, .margin_bytes = margin };
    return rows_with(g, live, o, f);
}

/* 20 segments of 20 MiB, each with 2 MiB handed out in the middle: 360 MiB are free, and no 9 MiB
 * of them in one piece. */
static koila_cache *fragmented(uint64_t total)
{
    enum { N = 20 };
    koila_segment s[N];
    koila_block b[N][3];
    for (int i = 0; i < N; i++) {
        const uint64_t at = (uint64_t)(i + 1) << 30;
        b[i][0] = (koila_block){ .addr = at, .size = 9 * MIB, .state = KOILA_BLOCK_FREE };
        b[i][1] = (koila_block){ .addr = at + 9 * MIB, .size = 2 * MIB, .state = KOILA_BLOCK_USED };
        b[i][2] =
            (koila_block){ .addr = at + 11 * MIB, .size = 9 * MIB, .state = KOILA_BLOCK_FREE };
        s[i] = (koila_segment){ KOILA_SEGMENT_SIZES, .addr = at, .size = 20 * MIB, .blocks = b[i],
                                .n_blocks = 3 };
    }
    return cache_of(total, s, N);
}

/* koila_fit_opts.measured: 16 KiB a row inside every call. */
static bool sixteen_kib_a_row(void *user, koila_sig sig, int64_t rows, int64_t batch,
                              uint64_t *bytes)
{
    (void)user;
    (void)sig;
    *bytes = (uint64_t)(batch ? rows : 8192) * (16 << 10);
    return true;
}

TEST(live_plan__what_was_measured_inside_a_call_counts)
{
    koila_table *t;
    koila_graph *g = parse(&t, loss);
    koila_fit f = { 0 };
    const uint64_t left = 140 * MIB; /* the results alone need 128 */
    koila_cache *c = cache_of(left, NULL, 0);
    const koila_fit_opts nothing = { .struct_size = sizeof nothing, .has_cublas_workspace = true };
    koila_fit_opts measured = nothing;
    measured.measured = sixteen_kib_a_row;
    CHECK_EQ(rows_with(g, c, nothing, &f), 8192);
    /* a row is 16 KiB of results and 16 KiB inside */
    const int64_t rows = rows_with(g, c, measured, &f);
    CHECK(f.fits && rows > 2048 && rows * (32 << 10) <= (int64_t)left);
    koila_cache_free(c);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(live_plan__cublas_takes_its_workspace_once_or_has_it)
{
    koila_table *t;
    koila_graph *g = parse(&t, loss);
    koila_fit f = { 0 }, with = { 0 };
    koila_cache *c = cache_of(400 * MIB, NULL, 0);
    koila_fit_opts o = { .struct_size = sizeof o };
    rows_with(g, c, o, &with);
    o.has_cublas_workspace = true;
    rows_with(g, c, o, &f);
    CHECK(with.peak_allocated > f.peak_allocated);
    CHECK_EQ(f.peak_allocated >> 20, 128);
    koila_cache_free(c);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(live_plan__bytes_in_pieces_are_not_bytes_and_whole_ones_are)
{
    koila_table *t;
    koila_graph *g = parse(&t, loss);
    koila_fit f = { 0 };
    /* the sum of live bytes is 128 of the 360 MiB that are free: it would take all rows at once */
    koila_cache *c = fragmented(420 * MIB);
    const int64_t rows = rows_on(g, c, 0, &f);
    CHECK(f.fits && rows > 0 && rows * 2048 * 4 <= (int64_t)(9 * MIB) &&
          rows * 2048 * 4 >= (int64_t)(8 * MIB));
    koila_cache_free(c);
    /* as much again in one piece: now the whole batch fits */
    c = fragmented((400 + 20 + 140) * MIB);
    CHECK_EQ(rows_on(g, c, 0, &f), 8192);
    CHECK(f.fits && f.n_simulations == 1);
    koila_cache_free(c);
    /* the same 40 MiB handed out, in two segments that nothing else pins */
    koila_block b[2][1];
    koila_segment s[2];
    for (int i = 0; i < 2; i++) {
        b[i][0] = (koila_block){ .addr = (uint64_t)(i + 1) << 30,
                                 .size = 20 * MIB,
                                 .state = KOILA_BLOCK_USED };
        s[i] = (koila_segment){ KOILA_SEGMENT_SIZES, .addr = b[i][0].addr, .size = 20 * MIB,
                                .blocks = b[i], .n_blocks = 1 };
    }
    c = cache_of(400 * MIB, s, 2);
    CHECK_EQ(rows_on(g, c, 0, &f), 8192);
    koila_cache_free(c);
    /* cached segments on another stream pin nothing: they are released by the retry */
    for (int i = 0; i < 2; i++) {
        b[i][0] = (koila_block){ .addr = (uint64_t)(i + 1) << 30,
                                 .size = 150 * MIB,
                                 .state = KOILA_BLOCK_FREE };
        s[i] = (koila_segment){ KOILA_SEGMENT_SIZES, .addr = b[i][0].addr, .size = 150 * MIB,
                                .stream = 7,         .blocks = b[i],       .n_blocks = 1 };
    }
    c = cache_of(400 * MIB, s, 2);
    CHECK_EQ(rows_on(g, c, 0, &f), 8192);
    CHECK(f.fits && f.n_retries > 0);
    koila_cache_free(c);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(live_plan__when_nothing_fits_it_is_said)
{
    koila_table *t;
    koila_graph *g = parse(&t, loss);
    koila_fit f = { 0 };
    koila_block b = { .addr = (uint64_t)1 << 30, .size = 90 * MIB, .state = KOILA_BLOCK_FREE };
    /* of a MemPool: no use to us */
    koila_segment s = { KOILA_SEGMENT_SIZES, .addr = b.addr, .size = b.size,
                        .blocks = &b,        .n_blocks = 1,  .pool = { 1, 0 } };
    koila_cache *c = cache_of(90 * MIB, &s, 1);
    koila_cache_pool_hold(c, (koila_pool){ 1, 0 }, 0);
    CHECK_EQ(rows_on(g, c, 0, &f), 1);
    CHECK(!f.fits);
    koila_cache_free(c);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(live_plan__a_measured_margin_is_the_least_that_would_have_refused)
{
    koila_table *t;
    koila_graph *g = parse(&t, loss);
    koila_device *d = gpu("a100-40gb");
    const koila_value target = koila_graph_n_values(g) - 1;
    koila_fit f = { 0 };
    /* from the driver; and all of it cached already, where only the sum can refuse */
    for (int cached = 0; cached < 2; cached++) {
        koila_block b[2] = {
            { .addr = (uint64_t)1 << 30, .size = 400 * MIB, .state = KOILA_BLOCK_FREE },
            { .addr = (uint64_t)1 << 31, .size = 2 * MIB, .state = KOILA_BLOCK_FREE }
        };
        koila_segment s[2] = { { KOILA_SEGMENT_SIZES, .addr = b[0].addr, .size = b[0].size,
                                 .blocks = &b[0], .n_blocks = 1 },
                               { KOILA_SEGMENT_SIZES, .addr = b[1].addr, .size = b[1].size,
                                 .is_small = true, .blocks = &b[1], .n_blocks = 1 } };
        koila_cache *c = cache_of(cached ? 402 * MIB : 420 * MIB, s, cached ? 2 : 0);
        const koila_plan_options po = { .struct_size = sizeof po, .budget_bytes = UINT64_MAX };
        koila_plan *p = NULL;
        uint64_t margin = 0;
        CHECK_EQ(koila_plan_live(g, &target, 1, &po, d, c, NULL, NULL, &p, &f, NULL), KOILA_OK);
        CHECK_EQ(koila_plan_get(p).rows, 8192);
        CHECK_EQ(koila_fit_margin(p, d, c, NULL, &margin, NULL), KOILA_OK);
        CHECK(margin > 100 * MIB && margin < 300 * MIB);
        CHECK(rows_on(g, c, margin, &f) < 8192);
        CHECK(f.fits);
        CHECK_EQ(rows_on(g, c, margin - 2 * MIB, &f), 8192);
        koila_plan_free(p);
        koila_cache_free(c);
    }
    koila_device_free(d);
    koila_graph_free(g);
    koila_table_free(t);
}

/* A random step of large values, and a random state of a device on which it just about fits. */
static bool make_case(random_graph *r, uint64_t seed, koila_cache **live)
{
    rg_begin(r, NULL, seed);
    const int64_t rows = 8 + rg_pick(r, 57);
    const int64_t wide = 20000 + 1000 * (int64_t)rg_pick(r, 200);
    const int64_t extent[] = { rows, 2, wide, rows, 1, wide / 4 };
    memcpy(r->extent, extent, sizeof extent);
    rg_axis(r, rows);
    const koila_dtype dtype = rg_pick(r, 4) ? KOILA_DTYPE_F32 : KOILA_DTYPE_BF16;
    for (int i = 0; i < 3; i++)
        rg_leaf(r, KOILA_LEAF_BATCH, 0, i == 2, dtype, 2,
                i == 2 ? (int64_t[]){ wide, rows } : (int64_t[]){ rows, i ? wide / 4 : wide });
    for (int i = 0; i < 80 && koila_graph_n_nodes(r->g) < 25; i++)
        rg_step(r);
    if (r->status || r->n_values < 6)
        return false;
    for (int i = 0; i < 3; i++)
        r->targets[r->n_targets++] = r->values[r->n_values - 1 - rg_pick(r, r->n_values / 2)];
    koila_cache_config conf;
    koila_cache_config_init(&conf, NULL);
    conf.expandable = rg_pick(r, 5) == 0;
    conf.device_bytes = (uint64_t)1 << 50; /* room in the address space for any reservation */
    if (koila_cache_new(&conf, NULL, live, NULL))
        return false;
    uint64_t addr[60], n_out = 0;
    for (int i = 0; i < 120; i++) {
        if (n_out < 60 && rg_pick(r, 3)) {
            if (!koila_cache_malloc(
                    *live, rg_pick(r, 2) ? rg_pick(r, 24) * MIB + 1000 : 1 + rg_pick(r, 1 << 20),
                    rg_pick(r, 8) == 0, KOILA_POOL_DEFAULT, &addr[n_out]))
                n_out++;
        } else if (n_out) {
            const uint32_t at = rg_pick(r, (uint32_t)n_out);
            koila_cache_release(*live, addr[at]);
            addr[at] = addr[--n_out];
        }
    }
    return true;
}

TEST(live_plan__the_choice_is_that_of_trying_every_number_of_slices)
{
    koila_device *d = gpu("a100-40gb");
    uint32_t n_cases = 0, n_cut = 0, n_islands = 0, n_missed = 0, n_sum_wrong = 0;
    for (uint64_t seed = 1; seed <= 1200; seed++) {
        random_graph r;
        koila_cache *live = NULL;
        if (!make_case(&r, seed, &live)) {
            koila_cache_free(live);
            rg_deinit(&r);
            continue;
        }
        const int64_t batch = r.extent[0];
        koila_plan_options po = { .struct_size = sizeof po, .budget_bytes = UINT64_MAX };
        koila_plan *p = NULL;
        koila_fit f = { 0 };
        CHECK_EQ(koila_plan_new(r.g, r.targets, r.n_targets, &po, NULL, &p, NULL), KOILA_OK);
        const uint64_t need = koila_plan_get(p).peak_bytes;
        const uint64_t reserved =
            koila__cache_stats_ref(live)->of[KOILA_STAT_RESERVED_BYTES][0].current;
        CHECK_EQ(koila_fits_plan(p, d, live, NULL, &f, NULL), KOILA_OK); /* no limit yet */
        const uint64_t held =
            koila__cache_stats_ref(live)->of[KOILA_STAT_ALLOCATED_BYTES][0].current;
        CHECK(f.fits && f.peak_allocated - held >= need);
        koila_plan_free(p);
        koila_cache_set_limit(live, reserved + (need / 100 * (20 + rg_pick(&r, 100))), 0, 0);
        const uint64_t before = koila__cache_fingerprint(live);
        int64_t brute = 0, sum = 0, last = 0;
        bool seen_no = false;                /* after a yes: not monotone */
        po.budget_bytes = (uint64_t)1 << 60; /* with a budget forced rows are judged too */
        for (int64_t n = 1; n <= batch; n++) {
            po.rows = (batch + n - 1) / n;
            if (po.rows == last)
                continue;
            last = po.rows;
            f.fits = false;
            const koila_status status = koila_plan_live(r.g, r.targets, r.n_targets, &po, d, live,
                                                        NULL, NULL, &p, &f, NULL);
            CHECK(status == KOILA_OK || status == KOILA_OOM);
            if (status == KOILA_OK) {
                CHECK(koila_plan_get(p).rows == po.rows || koila_plan_get(p).n_slices == 1);
                /* so what does not fit by its sum does not fit */
                CHECK(!f.fits || f.peak_allocated - held >= koila_plan_get(p).peak_bytes);
                koila_plan_free(p);
            }
            if (status == KOILA_OK && !sum)
                sum = n;
            if (status == KOILA_OK && f.fits && !brute)
                brute = n;
            if (brute && !(status == KOILA_OK && f.fits))
                seen_no = true;
        }
        po.rows = 0;
        f = (koila_fit){ 0 };
        p = NULL;
        const koila_status status =
            koila_plan_live(r.g, r.targets, r.n_targets, &po, d, live, NULL, NULL, &p, &f, NULL);
        CHECK(koila__cache_fingerprint(live) == before);
        CHECK_EQ(status, sum ? KOILA_OK : KOILA_OOM);
        if (!status) {
            const koila_plan_info info = koila_plan_get(p);
            CHECK(f.n_simulations <= KOILA_MAX_SIMULATIONS);
            CHECK_EQ(f.fits, brute != 0 && f.fits); /* a yes is one */
            if (f.fits) {
                koila_fit again = { 0 };
                CHECK_EQ(koila_fits_plan(p, d, live, NULL, &again, NULL), KOILA_OK);
                CHECK(again.fits && again.peak_reserved == f.peak_reserved);
            }
            const int64_t rows = brute ? (batch + brute - 1) / brute : 1;
            /* then all numbers that bisection skipped are decided */
            if (f.fits && !seen_no && f.n_simulations < KOILA_MAX_SIMULATIONS - 1)
                CHECK_EQ(info.rows, rows);
            CHECK(!f.fits || info.rows <= rows);
            n_cases++;
            n_cut += f.fits && info.n_slices > 1;
            n_islands += seen_no;
            n_missed += brute && info.rows != rows;
            n_sum_wrong += sum != brute;
            koila_plan_free(p);
        }
        koila_cache_free(live);
        rg_deinit(&r);
    }
    printf("  %u cases, %u cut; in %u the sum of bytes would have been wrong; in %u fitting is not "
           "monotone, in %u the choice has more slices than brute force's\n",
           n_cases, n_cut, n_sum_wrong, n_islands, n_missed);
    CHECK(n_cases > 300 && n_cut > 50 && n_sum_wrong > 20 && n_islands > 20 &&
          n_missed < n_cases / 50);
    koila_device_free(d);
}

static const char profile[] =
    "{\"koila_device\": 1, \"name\": \"mine\", \"driver\": \"580\", \"fields\": {\"sm_count\": "
    "{\"value\": 10, \"how\": \"vendor\"}, "
    "\"compute_capability\": {\"value\": 86, \"how\": \"vendor\"}, \"total_bytes\": {\"value\": "
    "8000000000, \"how\": \"measured\", \"spread\": 0, \"date\": \"2026-01-01\"}, "
    "\"context_bytes\": {\"value\": 300000000, \"how\": \"measured\", \"spread\": 1000}}}";

TEST(device__a_profile_is_read_and_nonsense_refused)
{
    koila_device *d = NULL;
    koila_error e = KOILA_ERROR_INIT;
    CHECK_EQ(koila_device_open(profile, strlen(profile), NULL, &d, &e), KOILA_OK);
    if (!d) {
        printf("  %s\n", e.text);
        return;
    }
    CHECK_STR(koila_device_name(d), "mine");
    CHECK_EQ(koila_device_get(d, KOILA_DEVICE_TOTAL_BYTES).value, 8000000000);
    CHECK_STR(koila_device_get(d, KOILA_DEVICE_CONTEXT_BYTES).how, "measured");
    CHECK_EQ(koila_device_get(d, KOILA_DEVICE_CUBLAS_BYTES).value, 8519680);
    koila_device_free(d);
    static const char *const broken[] = {
        "",
        "{",
        "{}",
        "[]",
        "{\"koila_device\": 2}",
        "{\"koila_device\": 1, \"fields\": {}}",
        "{\"koila_device\": 1, \"fields\": {\"odd\": {\"value\": 1}}}",
        "{\"koila_device\": 1, \"fields\": {\"sm_count\": {\"value\": 1.5, \"how\": \"vendor\"}}}",
        "{\"koila_device\": 1, \"fields\": {\"sm_count\": {\"value\": 1, \"how\": \"guess\"}}}"
    };
    for (size_t i = 0; i < KOILA_COUNT(broken); i++) {
        d = NULL;
        CHECK_EQ(koila_device_open(broken[i], strlen(broken[i]), NULL, &d, &e), KOILA_BAD_INPUT);
        CHECK(!d && e.text[0]);
    }
    for (size_t n = 0; n < strlen(profile); n++) { /* every prefix, in a buffer of just that size */
        char *copy = malloc(n ? n : 1);
        memcpy(copy, profile, n);
        d = NULL;
        CHECK_EQ(koila_device_open(copy, n, NULL, &d, &e), KOILA_BAD_INPUT);
        free(copy);
    }
    char changed[sizeof profile];
    for (size_t i = 0; i < strlen(profile); i++)
        for (int bit = 0; bit < 8; bit++) {
            memcpy(changed, profile, sizeof profile);
            changed[i] = (char)(changed[i] ^ 1 << bit);
            d = NULL;
            koila_status s = koila_device_open(changed, strlen(profile), NULL, &d, &e);
            CHECK(s == KOILA_OK || s == KOILA_BAD_INPUT);
            koila_device_free(d);
        }
}

TEST(device__an_unknown_name_gets_the_nearest)
{
    koila_device *d = NULL;
    koila_error e = KOILA_ERROR_INIT;
    CHECK_EQ(koila_device_builtin("h100", NULL, &d, &e), KOILA_BAD_ARGUMENT);
    CHECK(strstr(e.text, "h100-80gb") != NULL);
    CHECK_EQ(koila_device_builtin("H100-80GB", NULL, &d, NULL), KOILA_OK);
    CHECK_EQ(koila_device_get(d, KOILA_DEVICE_CUBLAS_BYTES).value, 33554432);
    koila_device_free(d);
}

TEST(predict__ranges_are_in_order_though_asking_for_more_may_reserve_less)
{ /* convolutions whose workspace of 0 .. 64 .. 128 MiB falls into other holes */
    char text[4000];
    int n =
        snprintf(text, sizeof text,
                 "koila graph 1\n%%0 = real f32[32, 64, 64, 64]\n%%1 = real f32[64, 64, 3, 3]\n");
    for (int i = 2; i < 9; i++)
        n += snprintf(text + n, sizeof text - (size_t)n,
                      "%%%d = aten::convolution(%%%d, %%1, None, [1, 1], [1, 1], [1, 1], false, "
                      "[0, 0], 1) -> f32[32, 64, 64, 64] grad\n",
                      i, i == 2 ? 0 : i - 1);
    const koila_prediction p = of_text(text, OPTS(.rows = 0));
    const koila_range *r[] = { &p.first.allocated,  &p.first.reserved,  &p.first.device,
                               &p.steady.allocated, &p.steady.reserved, &p.steady.device };
    for (size_t i = 0; i < KOILA_COUNT(r); i++)
        CHECK(r[i]->low <= r[i]->expected && r[i]->expected <= r[i]->high);
    CHECK(p.first.device.high >= p.first.reserved.high + 500 * MIB); /* with the widest context */
}

/* koila__fit_search.fits */
static koila_status fits_recomputed(void *user, const koila_plan *p, bool *yes)
{
    const uint32_t *least = user;
    *yes = koila_plan_get(p).n_again >= *least;
    return KOILA_OK;
}

/* Nine numbers of slices are refused first, as many as are tried at most. */
TEST(predict__what_is_computed_again_is_tried_where_all_slices_were_refused)
{
    static const char text[] =
        "koila graph 1\naxis 512\n%0 = batch axis 0 dim 0 f32[512, 256]\n"
        "%1 = real f32[256, 256]\n"
        "%2 = aten::mm(%0, %1) -> f32[512, 256] grad\n%3 = aten::gelu(%2) -> f32[512, 256] grad\n"
        "%4 = aten::mm(%3, %1) -> f32[512, 256] grad\n%5 = aten::gelu(%4) -> f32[512, 256] grad\n"
        "%6 = aten::mm(%5, %1) -> f32[512, 256] grad\n"
        "%7 = aten::sigmoid(%6) -> f32[512, 256] grad\n"
        "%8 = aten::mul.Tensor(%7, %6) -> f32[512, 256] grad\n"
        "%9 = aten::mul.Tensor(%8, %5) -> f32[512, 256] grad\n"
        "%10 = aten::mul.Tensor(%9, %4) -> f32[512, 256] grad\n"
        "%11 = aten::mul.Tensor(%10, %3) -> f32[512, 256] grad\n"
        "%12 = aten::mul.Tensor(%11, %2) -> f32[512, 256] grad\n"
        "%13 = aten::sum.dim_IntList(%12, [0], true) -> f32[1, 256] grad\n";
    koila_table *t;
    koila_graph *g = parse(&t, text);
    const koila_value target = koila_graph_n_values(g) - 1;
    for (uint32_t least = 0; least < 2; least++) {
        koila__fit_search search = { .fits = fits_recomputed, .user = &least };
        koila_plan_options o = { .struct_size = sizeof o,
                                 .budget_bytes = 8 * MIB,
                                 .recomputes = true,
                                 .axes = KOILA_AXES_ROWS,
                                 .accepts = koila__fit_accepts,
                                 .accepts_user = &search };
        koila_plan *p = NULL;
        CHECK_EQ(koila_plan_new(g, &target, 1, &o, NULL, &p, NULL), KOILA_OK);
        CHECK(search.accepted && p && (koila_plan_get(p).n_again > 0) == least);
        koila_plan_free(p);
    }
    koila_graph_free(g);
    koila_table_free(t);
}
