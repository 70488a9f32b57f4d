/* Interning: equal contents have one id, whatever is different has another, and nothing moves. */
#include "harness.h"
#include "graph/table.h"

static koila_table *fresh(void)
{
    koila_table *t = NULL;
    CHECK(koila_table_new(NULL, &t) == KOILA_OK);
    return t;
}

static koila_meta meta(koila_table *t, koila_dtype dtype, uint32_t n, const int64_t *size,
                       const int64_t *stride)
{
    koila_meta m = KOILA_NONE;
    CHECK(koila_table_meta(t, dtype, 0, n, size, stride, &m) == KOILA_OK);
    return m;
}
#define DIMS(...)                                                                                  \
    (uint32_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }

TEST(table__equal_contents_have_one_id)
{
    koila_table *t = fresh();
    koila_op a = 0, b = 0, c = 0;
    CHECK(koila_table_op(t, "aten::add.Tensor", KOILA_OP_VIEW, &a) == KOILA_OK &&
          koila_table_op(t, "aten::add.Tensor", 0, &b) == KOILA_OK);
    CHECK(koila_table_op(t, "aten::add", 0, &c) == KOILA_OK);
    CHECK(a == b && a != c);
    CHECK_EQ(koila_op_flags(t, a), KOILA_OP_VIEW); /* flags of the first call stay */
    CHECK_STR(koila_op_name(t, a), "aten::add.Tensor");
    uint32_t x = 0, y = 0;
    CHECK(koila_table_text(t, "mean", &x) == KOILA_OK &&
          koila_table_text(t, "mean", &y) == KOILA_OK && x == y);
    /* objects, not labels */
    CHECK(koila_table_opaque(t, "cpu", &x) == KOILA_OK &&
          koila_table_opaque(t, "cpu", &y) == KOILA_OK && x != y);
    const koila_meta m = meta(t, KOILA_DTYPE_F32, DIMS(3, 5), NULL);
    CHECK_EQ(m, meta(t, KOILA_DTYPE_F32, DIMS(3, 5), (int64_t[]){ 5, 1 }));
    CHECK(m != meta(t, KOILA_DTYPE_F32, DIMS(3, 5), (int64_t[]){ 1, 3 }) &&
          m != meta(t, KOILA_DTYPE_I32, DIMS(3, 5), NULL) &&
          m != meta(t, KOILA_DTYPE_F32, DIMS(5, 3), NULL));
    CHECK(m != meta(t, KOILA_DTYPE_F32, DIMS(15), NULL) &&
          meta(t, KOILA_DTYPE_F32, 0, NULL, NULL) != meta(t, KOILA_DTYPE_F32, DIMS(1), NULL));
    koila_table_free(t);
}

TEST(table__bytes_of_views_are_those_of_the_storage_they_reach)
{
    koila_table *t = fresh();
    const koila_meta_info *m =
        koila_meta_get(t, meta(t, KOILA_DTYPE_F64, DIMS(7, 3), (int64_t[]){ 1, 7 }));
    CHECK(m->n_elements == 21 && m->n_bytes == 168 && m->n_storage_bytes == 168);
    /* expanded */
    m = koila_meta_get(t, meta(t, KOILA_DTYPE_F32, DIMS(1000, 3), (int64_t[]){ 0, 1 }));
    CHECK(m->n_bytes == 12000 && m->n_storage_bytes == 12);
    m = koila_meta_get(t, meta(t, KOILA_DTYPE_BOOL, DIMS(4), (int64_t[]){ 10 })); /* with gaps */
    CHECK(m->n_bytes == 4 && m->n_storage_bytes == 31);
    m = koila_meta_get(t, meta(t, KOILA_DTYPE_F32, DIMS(4, 0, 5), NULL)); /* empty */
    CHECK(m->n_elements == 0 && m->n_bytes == 0 && m->n_storage_bytes == 0);
    m = koila_meta_get(t, meta(t, KOILA_DTYPE_C128, 0, NULL, NULL));
    CHECK(m->n_elements == 1 && m->n_bytes == 16 && m->n_storage_bytes == 16);
    koila_table_free(t);
}

TEST(table__sizes_that_no_memory_holds_are_refused)
{
    koila_table *t = fresh();
    koila_meta m = 77;
    const int64_t big = INT64_MAX;
    const int64_t half = (int64_t)1 << 32;
    CHECK_EQ(koila_table_meta(t, KOILA_DTYPE_F32, 0, 1, &big, NULL, &m), KOILA_BAD_ARGUMENT);
    CHECK_EQ(koila_table_meta(t, KOILA_DTYPE_U8, 0, 2, (int64_t[]){ half, half }, NULL, &m),
             KOILA_BAD_ARGUMENT);
    CHECK_EQ(koila_table_meta(t, KOILA_DTYPE_U8, 0, 2, (int64_t[]){ 3, -1 }, NULL, &m),
             KOILA_BAD_ARGUMENT);
    /* reaches 2^64 */
    CHECK_EQ(
        koila_table_meta(t, KOILA_DTYPE_U8, 0, 1, (int64_t[]){ 3 }, (int64_t[]){ INT64_MAX }, &m),
        KOILA_BAD_ARGUMENT);
    CHECK_EQ(koila_table_meta(t, (koila_dtype)KOILA_N_DTYPES, 0, 0, NULL, NULL, &m),
             KOILA_BAD_ARGUMENT);
    int64_t ones[KOILA_MAX_DIMS + 1];
    for (int i = 0; i <= KOILA_MAX_DIMS; i++)
        ones[i] = 1;
    CHECK_EQ(koila_table_meta(t, KOILA_DTYPE_U8, 0, KOILA_MAX_DIMS + 1, ones, NULL, &m),
             KOILA_BAD_ARGUMENT);
    CHECK_EQ(m, 77); /* untouched on failure */
    CHECK_EQ(koila_table_meta(t, KOILA_DTYPE_U8, 0, KOILA_MAX_DIMS, ones, NULL, &m), KOILA_OK);
    koila_table_free(t);
}

/* A signature with everything; `change` alters one thing. */
static koila_status everything(koila_table *t, uint32_t change, koila_sig *out)
{
    koila_op op, view;
    uint32_t text, other, opaque;
    koila_meta m, n;
    KOILA_TRY(koila_table_op(t, change == 1 ? "aten::b" : "aten::a", 0, &op));
    KOILA_TRY(koila_table_op(t, "aten::v", KOILA_OP_VIEW, &view));
    KOILA_TRY(koila_table_text(t, "x", &text));
    KOILA_TRY(koila_table_text(t, "y", &other));
    if (koila_opaque_label(t, 0)[0])
        opaque = 0;
    else
        KOILA_TRY(koila_table_opaque(t, "o", &opaque));
    KOILA_TRY(koila_table_meta(t, KOILA_DTYPE_F32, 0, 1, (int64_t[]){ 3 }, NULL, &m));
    KOILA_TRY(koila_table_meta(t, KOILA_DTYPE_F32, 0, 1, (int64_t[]){ 4 }, NULL, &n));
    koila_arg token[] = {
        { .kind = KOILA_ARG_TENSOR, .u.id = change == 2 ? n : m },
        { .kind = KOILA_ARG_LIST, .n = 2 },
        { .kind = KOILA_ARG_INT, .u.i = change == 3 ? -1 : 1 },
        { .kind = KOILA_ARG_TENSOR, .u.id = m },
        { .kind = KOILA_ARG_FLOAT, .u.f = change == 4 ? -0.0 : 0.0 },
        { .kind = change == 5 ? KOILA_ARG_ABSENT : KOILA_ARG_STR,
          .u.id = change == 6 ? other : text },
        { .kind = KOILA_ARG_BOOL, .u.i = change == 7 },
        { .kind = KOILA_ARG_DTYPE, .u.id = change == 8 ? KOILA_DTYPE_F64 : KOILA_DTYPE_F32 },
        { .kind = KOILA_ARG_OPAQUE, .u.id = opaque },
    };
    koila_sig_info v = { .op = view,
                         .n_tokens = 1,
                         .n_pos = 1,
                         .tokens = token,
                         .n_fresh = 2,
                         .outputs = (koila_meta[]){ m, n } };
    koila_link link[] = { { 0, change == 9 } };
    KOILA_TRY(koila_table_sig(t, &v, &link[0].sig));
    koila_write write[] = { { .input = change == 10, .n_links = change != 11, .links = link },
                            { .input = 1, .overwrites = change != 12 } };
    koila_sig_info d = { .op = op,
                         .n_tokens = 9,
                         .n_pos = change == 13 ? 5 : 6,
                         .n_kw = change == 13 ? 2 : 1,
                         .tokens = token,
                         .kw_names = (uint32_t[]){ change == 14 ? other : text, text },
                         .n_fresh = change == 15 ? 1 : 2,
                         .outputs = (koila_meta[]){ m, change == 16 ? m : KOILA_NONE },
                         .result_kind = change == 17 ? 2 : 1,
                         .grad_mode = change == 18,
                         .n_writes = change == 19 ? 1 : 2,
                         .writes = write };
    return koila_table_sig(t, &d, out);
}

TEST(table__a_signature_is_all_of_its_parts)
{
    koila_table *t = fresh();
    koila_sig ids[20];
    for (uint32_t change = 0; change < 20; change++) {
        CHECK(everything(t, change, &ids[change]) == KOILA_OK);
        for (uint32_t k = 0; k < change; k++)
            CHECK(ids[k] != ids[change]);
    }
    for (uint32_t change = 0; change < 20; change++) {
        koila_sig again = KOILA_NONE;
        CHECK(everything(t, change, &again) == KOILA_OK && again == ids[change]);
    }
    const koila_sig_info *s = koila_sig_get(t, ids[0]);
    CHECK(s->n_inputs == 2 && s->n_outputs == 4 && s->outputs[2] == s->inputs[0] &&
          s->outputs[3] == s->inputs[1] && s->outputs[1] == KOILA_NONE);
    CHECK(s->start[0] == 0 && s->start[1] == 1 && s->start[2] == 4 && s->start[6] == 8);
    koila_table_free(t);
}

TEST(table__calls_that_contradict_themselves_are_refused)
{
    koila_table *t = fresh();
    koila_op op;
    koila_sig sig = 5, view;
    CHECK(koila_table_op(t, "aten::x", 0, &op) == KOILA_OK);
    const koila_meta m = meta(t, KOILA_DTYPE_F32, DIMS(3), NULL);
    koila_arg tensor = { .kind = KOILA_ARG_TENSOR, .u.id = m };
    koila_sig_info good = {
        .op = op, .n_tokens = 1, .n_pos = 1, .tokens = &tensor, .n_fresh = 1, .outputs = &m
    };
    CHECK(koila_table_sig(t, &good, &view) == KOILA_OK);
#define REFUSED(...)                                                                               \
    do {                                                                                           \
        koila_sig_info d = good;                                                                   \
        __VA_ARGS__;                                                                               \
        CHECK_EQ(koila_table_sig(t, &d, &sig), KOILA_BAD_ARGUMENT);                                \
    } while (0)
    REFUSED(d.op = 9);
    REFUSED(d.n_pos = 2);
    REFUSED(d.n_pos = 0);
    REFUSED(d.n_kw = UINT32_MAX, d.n_pos = 2); /* wraps to one value */
    REFUSED(d.outputs = (koila_meta[]){ m + 1 });
    REFUSED(d.result_kind = 5);
    const koila_arg bad[] = { { .kind = KOILA_ARG_TENSOR, .u.id = m + 1 },
                              { .kind = KOILA_ARG_STR, .u.id = 99 },
                              { .kind = KOILA_ARG_DTYPE, .u.id = KOILA_N_DTYPES },
                              { .kind = KOILA_ARG_OPAQUE, .u.id = 0 },
                              { .kind = KOILA_ARG_LIST, .n = 1 },
                              { .kind = KOILA_ARG_LIST, .n = UINT32_MAX },
                              { .kind = KOILA_ARG_BOOL, .u.i = 2 },
                              { .kind = 99 } };
    for (size_t i = 0; i < KOILA_COUNT(bad); i++)
        REFUSED(d.tokens = &bad[i]);
    const koila_arg nested[] = { { .kind = KOILA_ARG_LIST, .n = 1 },
                                 { .kind = KOILA_ARG_LIST, .n = 0 } };
    REFUSED(d.tokens = nested, d.n_tokens = 2);
    REFUSED(d.kw_names = (uint32_t[]){ 99 }, d.n_pos = 0, d.n_kw = 1);
    const koila_link links[] = { { view, 0 }, { view, 1 }, { 99, 0 } };
    const koila_write writes[] = { { .input = 1 },
                                   { .overwrites = 1, .n_links = 1, .links = links },
                                   { .n_links = 1, .links = links + 1 },
                                   { .n_links = 1, .links = links + 2 } };
    for (size_t i = 0; i < KOILA_COUNT(writes); i++)
        REFUSED(d.n_writes = 1, d.writes = &writes[i]);
    const koila_write plain = { .input = 0 };
    koila_sig_info writing = good;
    writing.n_writes = 1;
    writing.writes = &plain;
    koila_sig w;
    CHECK(koila_table_sig(t, &writing, &w) == KOILA_OK);
    const koila_link of_write = { w, 0 };
    const koila_write nested_write = { .n_links = 1, .links = &of_write };
    REFUSED(d.n_writes = 1, d.writes = &nested_write); /* a chain is of plain views */
    CHECK_EQ(sig, 5);
    koila_table_free(t);
}

TEST(table__nothing_moves_and_nothing_is_lost_among_many)
{
    koila_table *t = fresh();
    enum { N = 20000 };
    const koila_meta_info *first = koila_meta_get(t, meta(t, KOILA_DTYPE_U8, DIMS(0, 1), NULL));
    for (int64_t i = 1; i < N; i++)
        CHECK_EQ(meta(t, KOILA_DTYPE_U8, DIMS(i, i % 7), NULL), (koila_meta)i);
    for (int64_t i = 1; i < N; i++)
        CHECK_EQ(meta(t, KOILA_DTYPE_U8, DIMS(i, i % 7), NULL), (koila_meta)i);
    CHECK(first == koila_meta_get(t, 0) && first->size[0] == 0 && first->size[1] == 1);
    CHECK(koila_meta_get(t, N) == NULL && koila_sig_get(t, 0) == NULL);
    CHECK_STR(koila_op_name(t, 3), "");
    CHECK_STR(koila_text(t, 3), "");
    koila_table_free(t);
}

TEST(table__the_nth_allocation_may_fail)
{
    failing_allocator fail = { 0 };
    const koila_allocator mem = { failing_realloc, &fail };
    uint64_t at = 1;
    for (;; at++) {
        fail = (failing_allocator){ .at = at };
        koila_table *t = NULL;
        koila_sig sig = KOILA_NONE, again = KOILA_NONE;
        koila_status status = koila_table_new(&mem, &t);
        for (uint32_t change = 0; change < 20 && status == KOILA_OK; change++)
            status = everything(t, change, &sig);
        CHECK(status == (fail.n_calls < at ? KOILA_OK : KOILA_NO_MEMORY));
        const bool done = fail.n_calls < at;
        fail.at = 0;
        /* a failure leaves it usable */
        if (t)
            CHECK(everything(t, 0, &sig) == KOILA_OK && everything(t, 0, &again) == KOILA_OK &&
                  sig == again);
        koila_table_free(t);
        CHECK_EQ(fail.n_live_bytes, 0);
        if (done)
            break;
    }
    CHECK(at > 10);
}

/* ---- forgetting */

static koila_sig call_of(koila_table *t, koila_meta m, double number)
{
    koila_op op = 0;
    koila_sig sig = KOILA_NONE;
    CHECK(koila_table_op(t, "aten::mul.Tensor", 0, &op) == KOILA_OK);
    const koila_arg tokens[] = { { .kind = KOILA_ARG_TENSOR, .u.id = m },
                                 { .kind = KOILA_ARG_FLOAT, .u.f = number } };
    const koila_sig_info d = {
        .op = op, .n_tokens = 2, .n_pos = 2, .tokens = tokens, .n_fresh = 1, .outputs = &m
    };
    CHECK(koila_table_sig(t, &d, &sig) == KOILA_OK);
    return sig;
}

TEST(forget__what_a_graph_names_stays_and_other_ids_are_given_again)
{
    koila_table *t = fresh();
    koila_graph *g = NULL;
    koila_value x = 0, y = 0;
    uint32_t line = 0;
    CHECK(koila_graph_new(t, NULL, &g) == KOILA_OK);
    const koila_meta m = meta(t, KOILA_DTYPE_F32, DIMS(3, 5), NULL);
    const koila_sig kept = call_of(t, m, 0.5);
    CHECK(koila_graph_leaf(g, m, KOILA_LEAF_REAL, 0, 0, "weight", &x) == KOILA_OK);
    CHECK(koila_graph_line(g, "file.py", 7, &line) == KOILA_OK);
    CHECK(koila_graph_node(g, kept, &x, line, &y) == KOILA_OK);
    const koila_sig_info *info = koila_sig_get(t, kept);
    uint32_t most = 0;
    for (int round = 0; round < 100; round++) {
        for (int i = 1; i <= 50; i++) {
            uint32_t text = 0;
            const int64_t size = round * 50 + i;
            const koila_sig s = call_of(t, meta(t, KOILA_DTYPE_F64, 1, &size, NULL), (double)size);
            CHECK(s != kept && koila_sig_get(t, s)->tokens[1].u.f == (double)size);
            CHECK(koila_table_opaque(t, "generator", &text) == KOILA_OK);
            CHECK_STR(koila_opaque_label(t, text), "generator");
        }
        most = koila_table_n_sigs(t) > most ? koila_table_n_sigs(t) : most;
        CHECK(koila_table_forget(t, NULL, NULL) == KOILA_OK);
        CHECK_EQ(koila_table_n_known(t), 4); /* a signature, a meta, "weight", "file.py" */
    }
    CHECK_EQ(most, 51);
    CHECK(koila_sig_get(t, kept) == info && info->tokens[1].u.f == 0.5);
    CHECK_EQ(call_of(t, meta(t, KOILA_DTYPE_F32, DIMS(3, 5), NULL), 0.5), kept);
    CHECK_STR(koila_graph_line_file(g, line), "file.py");
    CHECK_STR(koila_graph_leaf_name(g, x), "weight");
    CHECK(koila_graph_check(g, NULL));
    koila_graph_free(g);
    CHECK(koila_table_forget(t, NULL, NULL) == KOILA_OK);
    CHECK_EQ(koila_table_n_known(t), 0);
    CHECK(!koila_sig_get(t, kept) && !koila_meta_get(t, m) && !koila_table_has_text(t, 0));
    koila_table_free(t);
}

static void keep_one(void *sig, koila_keeper *k) { koila_keep_sig(k, *(koila_sig *)sig); }

TEST(forget__a_signature_keeps_all_that_it_names)
{
    koila_table *t = fresh();
    koila_sig kept = 0, other = 0, again = 0;
    CHECK(everything(t, 0, &kept) == KOILA_OK && everything(t, 4, &other) == KOILA_OK);
    const koila_sig_info *s = koila_sig_get(t, kept);
    const koila_sig link = s->writes[0].links[0].sig;
    const uint32_t n = koila_table_n_known(t);
    CHECK(koila_table_forget(t, keep_one, &kept) == KOILA_OK);
    CHECK(!koila_sig_get(t, other) && koila_sig_get(t, kept) == s && koila_sig_get(t, link));
    /* the other one, and the text "y" */
    CHECK_EQ(koila_table_n_known(t), n - 2);
    CHECK(everything(t, 0, &again) == KOILA_OK && again == kept);
    CHECK(everything(t, 4, &again) == KOILA_OK && again == other); /* the id that was free */
    koila_table_free(t);
}

TEST(forget__without_memory_nothing_is_forgotten)
{
    uint64_t n_refused = 0;
    for (koila_status status = KOILA_NO_MEMORY; status != KOILA_OK; n_refused++) {
        failing_allocator f = { 0 };
        const koila_allocator mem = { failing_realloc, &f };
        koila_table *t = NULL;
        koila_sig sig = 0;
        CHECK(koila_table_new(&mem, &t) == KOILA_OK && everything(t, 0, &sig) == KOILA_OK);
        const uint32_t n = koila_table_n_known(t);
        f.at = f.n_calls + n_refused + 1;
        status = koila_table_forget(t, NULL, NULL);
        CHECK_EQ(koila_table_n_known(t), status == KOILA_OK ? 0 : n);
        CHECK(status == KOILA_OK || koila_sig_get(t, sig));
        koila_table_free(t);
        CHECK_EQ(f.n_live_bytes, 0);
    }
    CHECK(n_refused > 4);
}
