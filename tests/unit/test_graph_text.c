/* Text form: prints and reads back; hostile text is a status with an offset. */
#include "graph_maker.h"

#include <math.h>

#include "graph/graph_text.h"

typedef struct text {
    char *at;
    size_t n, cap;
    size_t stop_at; /* 0: never */
} text;
static int collect(void *user, const char *s, size_t n)
{
    text *t = user;
    if (t->stop_at && t->n + n >= t->stop_at)
        return 1;
    if (t->n + n + 1 > t->cap)
        t->at = realloc(t->at, t->cap = (t->n + n + 1) * 2);
    memcpy(t->at + t->n, s, n);
    t->n += n;
    t->at[t->n] = 0;
    return 0;
}
static text printed(const koila_graph *g)
{
    text t = { 0 };
    CHECK(koila_graph_print(g, collect, &t) == KOILA_OK);
    return t;
}

/* Parsed into its own table it is the same graph (`by_label`: opaques of one label are used in
 * order of id); into a fresh one, the same text. */
static void check_round_trip(const koila_graph *g, bool by_label)
{
    text a = printed(g);
    koila_graph *back = NULL;
    koila_error err = KOILA_ERROR_INIT;
    CHECK(koila_graph_parse(koila_graph_table(g), a.at, a.n, &back, &err) == KOILA_OK);
    if (!back) {
        printf("%s at %llu of\n%s\n", err.text, (unsigned long long)err.offset, a.at);
        free(a.at);
        return;
    }
    if (by_label)
        CHECK_EQ(koila_graph_hash(back), koila_graph_hash(g));
    CHECK_EQ(koila_graph_n_nodes(back), koila_graph_n_nodes(g));
    CHECK_EQ(koila_graph_n_values(back), koila_graph_n_values(g));
    CHECK(koila_graph_check(back, NULL));
    for (uint32_t n = 0; n < koila_graph_n_nodes(g) && n < koila_graph_n_nodes(back); n++) {
        const koila_node_info x = koila_node_get(g, n);
        const koila_node_info y = koila_node_get(back, n);
        if (by_label)
            CHECK_EQ(x.sig, y.sig);
        CHECK_EQ(x.line, y.line);
        CHECK_STR(koila_graph_line_file(back, y.line), koila_graph_line_file(g, x.line));
        CHECK_EQ(koila_graph_line_number(back, y.line), koila_graph_line_number(g, x.line));
    }
    for (uint32_t v = 0; v < koila_graph_n_values(g) && v < koila_graph_n_values(back); v++) {
        CHECK_EQ(koila_value_get(g, v).meta, koila_value_get(back, v).meta);
        CHECK_STR(koila_graph_leaf_name(back, v), koila_graph_leaf_name(g, v));
    }
    koila_graph_free(back);
    koila_table *fresh = NULL;
    CHECK(koila_table_new(NULL, &fresh) == KOILA_OK);
    CHECK(koila_graph_parse(fresh, a.at, a.n, &back, NULL) == KOILA_OK);
    text b = printed(back);
    CHECK_STR(b.at, a.at);
    koila_graph_free(back);
    koila_table_free(fresh);
    free(a.at);
    free(b.at);
}

/* A graph with one of everything. False when memory ran out. */
static bool make_everything(maker *m, koila_table *shared)
{
    if (shared) {
        m->table = shared;
        m->status = koila_graph_new(shared, NULL, &m->graph);
    }
#define DO(e)                                                                                      \
    if (m->status == KOILA_OK)                                                                     \
    m->status = (e)
    koila_meta strided = 0, cuda = 0, other = 0, empty = 0, row = 0;
    koila_value x = 0, w = 0, c = 0, first = 0;
    uint32_t line = 0, line2 = 0, opaque = 0, opaque2 = 0, str = 0, kw = 0, kw2 = 0;
    uint16_t ax = 0;
    koila_op op = 0, op2 = 0;
    koila_sig sig = 0, view = 0, view2 = 0;
    DO(koila_graph_axis(m->graph, 7, &ax));
    DO(koila_graph_line(m->graph, "a dir/\"train\".py", 12, &line));
    DO(koila_graph_line(m->graph, "b\x01\n.py", UINT32_MAX, &line2));
    DO(koila_table_meta(m->table, KOILA_DTYPE_F32, 0, 2, (int64_t[]){ 7, 5 }, (int64_t[]){ 1, 7 },
                        &strided));
    DO(koila_table_meta(m->table, KOILA_DTYPE_BF16, 0x103, 3, (int64_t[]){ 2, 1, 5 }, NULL, &cuda));
    DO(koila_table_meta(m->table, KOILA_DTYPE_F8E4, 0xff07, 0, NULL, NULL, &other));
    DO(koila_table_meta(m->table, KOILA_DTYPE_BOOL, 0, 2, (int64_t[]){ 0, 3 }, (int64_t[]){ 9, -2 },
                        &empty));
    DO(koila_table_meta(m->table, KOILA_DTYPE_F32, 0, 1, (int64_t[]){ 5 }, (int64_t[]){ 7 }, &row));
    DO(koila_graph_leaf(m->graph, strided, KOILA_LEAF_BATCH, 0, 0, "input \xc3\xa9 0", &x));
    DO(koila_graph_leaf(m->graph, cuda, KOILA_LEAF_REAL, 0, 0, NULL, &w));
    DO(koila_graph_leaf(m->graph, other, KOILA_LEAF_REAL, 0, 0, "batch", &c));
    DO(koila_table_opaque(m->table, "torch.channels_last", &opaque));
    /* another object that looks the same */
    DO(koila_table_opaque(m->table, "torch.channels_last", &opaque2));
    DO(koila_table_text(m->table, "mean\\", &str));
    DO(koila_table_text(m->table, "keep dim", &kw));
    DO(koila_table_text(m->table, "None", &kw2));
    DO(koila_table_op(m->table, "odd name()::x", 1u << 20 | KOILA_OP_RANDOM, &op));
    const double floats[] = { 0.1,
                              -0.0,
                              1.0,
                              1e-5,
                              1e300,
                              5e-324,
                              0.088388347648318447,
                              1.0 / 3,
                              -2.5e-17,
                              INFINITY,
                              -INFINITY,
                              NAN,
                              4503599627370497.5,
                              123456789012345680.0,
                              1e22,
                              1e23 };
    koila_arg tok[64] = { 0 };
    uint32_t n = 0;
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_ABSENT };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_LIST, .n = 0 };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_LIST, .n = 3 };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = strided };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_ABSENT };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = cuda };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = INT64_MIN };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_INT, .u.i = INT64_MAX };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_BOOL, .u.i = 1 };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_BOOL, .u.i = 0 };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_STR, .u.id = str };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_DTYPE, .u.id = KOILA_DTYPE_F8E5 };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_OPAQUE, .u.id = opaque };
    for (size_t i = 0; i < KOILA_COUNT(floats); i++)
        tok[n++] = (koila_arg){ .kind = KOILA_ARG_FLOAT, .u.f = floats[i] };
    const uint64_t odd_nan = 0xfff8000000000123u;
    tok[n].kind = KOILA_ARG_FLOAT;
    memcpy(&tok[n++].u.f, &odd_nan, sizeof odd_nan);
    /* the same value twice, and by name */
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = strided };
    tok[n++] = (koila_arg){ .kind = KOILA_ARG_OPAQUE, .u.id = opaque2 };
    const koila_meta outs[] = { other, KOILA_NONE, empty };
    koila_sig_info d = { .op = op,
                         .n_tokens = n,
                         .n_pos = n - 2 - 3,
                         .n_kw = 2,
                         .tokens = tok,
                         .kw_names = (uint32_t[]){ kw, kw2 },
                         .n_fresh = 3,
                         .outputs = outs,
                         .result_kind = 2,
                         .grad_mode = 3 };
    DO(koila_table_sig(m->table, &d, &sig));
    DO(koila_graph_node(m->graph, sig, (koila_value[]){ x, w, x }, line2, &first));
    /* a write through two views, and one that overwrites; an odd number of results */
    DO(koila_table_op(m->table, "aten::t", KOILA_OP_VIEW, &op2));
    koila_arg link_tok[] = { { .kind = KOILA_ARG_TENSOR, .u.id = strided },
                             { .kind = KOILA_ARG_OPAQUE, .u.id = opaque } };
    koila_sig_info link = { .op = op2,
                            .n_tokens = 2,
                            .n_pos = 2,
                            .tokens = link_tok,
                            .n_fresh = 2,
                            .outputs = (koila_meta[]){ KOILA_NONE, row },
                            .result_kind = 1 };
    DO(koila_table_sig(m->table, &link, &view));
    koila_sig_info link2 = { .op = op2,
                             .n_tokens = 1,
                             .n_pos = 1,
                             .tokens = &(koila_arg){ .kind = KOILA_ARG_TENSOR, .u.id = row },
                             .n_fresh = 1,
                             .outputs = &row,
                             .grad_mode = 1 };
    DO(koila_table_sig(m->table, &link2, &view2));
    const koila_write writes[] = {
        { .input = 0, .n_links = 2, .links = (koila_link[]){ { view, 1 }, { view2, 0 } } },
        { .input = 1, .overwrites = 1 }
    };
    koila_sig_info wd = { .op = op,
                          .n_tokens = 2,
                          .n_pos = 2,
                          .tokens = (koila_arg[]){ { .kind = KOILA_ARG_TENSOR, .u.id = strided },
                                                   { .kind = KOILA_ARG_TENSOR, .u.id = cuda } },
                          .n_fresh = 0,
                          .result_kind = 3,
                          .n_writes = 2,
                          .writes = writes };
    DO(koila_table_sig(m->table, &wd, &sig));
    DO(koila_graph_node(m->graph, sig, (koila_value[]){ x, w }, line, &first));
    DO(koila_graph_node(m->graph, sig, (koila_value[]){ x, w }, KOILA_NONE, &first));
    koila_sig_info nothing = { .op = op2, .result_kind = 0 };
    DO(koila_table_sig(m->table, &nothing, &sig));
    DO(koila_graph_node(m->graph, sig, NULL, KOILA_NONE, &first));
    koila_sig_info ends_in_list = {
        .op = op2, .n_fresh = 2, .outputs = (koila_meta[]){ strided, KOILA_NONE }, .result_kind = 4
    };
    DO(koila_table_sig(m->table, &ends_in_list, &sig));
    DO(koila_graph_node(m->graph, sig, NULL, KOILA_NONE, &first));
    DO(koila_graph_leaf(m->graph, other, KOILA_LEAF_REAL, 0, 0, "late", &c));
    DO(koila_graph_axis(m->graph, 0, &ax)); /* an axis added last still gives the same hash */
#undef DO
    return m->status == KOILA_OK;
}

TEST(text__one_of_everything_reads_back_equal)
{
    maker m;
    maker_init(&m, NULL);
    CHECK(make_everything(&m, NULL));
    check_round_trip(m.graph, true);
    maker_deinit(&m);
}

TEST(text__of_a_copy_is_the_same)
{
    maker m;
    maker_init(&m, NULL);
    CHECK(make_everything(&m, NULL));
    koila_graph *copy = NULL;
    CHECK_EQ(koila_graph_copy(m.graph, NULL, &copy), KOILA_OK);
    text t = printed(m.graph);
    maker_deinit(&m);
    text of_copy = printed(copy);
    CHECK_STR(of_copy.at, t.at);
    free(t.at);
    free(of_copy.at);
    koila_graph_copy_free(copy);
}

TEST(text__the_empty_graph_reads_back)
{
    maker m;
    maker_init(&m, NULL);
    check_round_trip(m.graph, true);
    text t = printed(m.graph);
    CHECK_STR(t.at, "koila graph 2\nend 0 0\n");
    free(t.at);
    maker_deinit(&m);
}

TEST(text__is_what_the_head_of_the_file_shows)
{
    static const char shown[] =
        "koila graph 2\n"
        "axis 32\n"
        "op aten::t view\n"
        "opaque #0 \"torch.channels_last\"\n"
        "line @0 \"train.py\" 12\n"
        "%0 = batch axis 0 dim 0 f32[32, 8] \"input 0\"\n"
        "%1 = real f32[16, 8] \"layer.weight\"\n"
        "%2 = aten::t(%1) -> f32[8, 16]{1, 8} grad @0\n"
        "%3 = aten::mm(%0, %2) -> f32[32, 16] grad @0\n"
        "%4 %5 = aten::max.dim(%3, 1, keepdim=false) -> (f32[32], i64[32]) @0\n"
        "%6 = aten::add_.Tensor(%3, 1.5) -> {} writes 0 via aten::select.int(f32[32, 16], 0, 3) -> "
        "f32[16] :0\n"
        "%7 = aten::clone(%6, memory_format=#0) -> f32[32, 16] on cuda:0\n"
        "end 8 5\n";
    koila_table *t = NULL;
    koila_graph *g = NULL;
    koila_error err = KOILA_ERROR_INIT;
    CHECK(koila_table_new(NULL, &t) == KOILA_OK);
    CHECK(koila_graph_parse(t, shown, sizeof shown - 1, &g, &err) == KOILA_OK);
    CHECK_STR(err.text, "");
    text a = printed(g);
    CHECK_STR(a.at, shown);
    CHECK_EQ(koila_op_flags(t, 0), KOILA_OP_VIEW);
    CHECK_EQ(koila_value_get(g, 0).leaf_kind, KOILA_LEAF_BATCH);
    CHECK_STR(koila_graph_leaf_name(g, 1), "layer.weight");
    free(a.at);
    koila_graph_free(g);
    koila_table_free(t);
}

TEST(text__every_prefix_and_every_changed_byte_is_an_answer_not_a_crash)
{
    maker m;
    maker_init(&m, NULL);
    CHECK(make_everything(&m, NULL));
    text t = printed(m.graph);
    for (size_t n = 0; n <= t.n; n++) {
        char *exact = malloc(n ? n : 1); /* so that the sanitizer sees a read behind the end */
        if (n)
            memcpy(exact, t.at, n);
        koila_table *fresh = NULL;
        koila_graph *g = NULL;
        koila_error err = KOILA_ERROR_INIT;
        CHECK(koila_table_new(NULL, &fresh) == KOILA_OK);
        const koila_status status = koila_graph_parse(fresh, exact, n, &g, &err);
        /* all of it, with or without the last newline, or an error: never a shorter graph */
        CHECK(n + 1 >= t.n ? status == KOILA_OK
                           : status == KOILA_BAD_INPUT && err.offset <= n && err.text[0] && !g);
        if (n < t.n && n && t.at[n - 1] == '\n')
            CHECK(strstr(err.text, "ends early") != NULL);
        if (g)
            CHECK(koila_graph_check(g, NULL));
        koila_graph_free(g);
        koila_table_free(fresh);
        free(exact);
    }
    static const char other[] = "\n\0%[{x0-\"9=";
    for (size_t i = 0; i < t.n; i++)
        for (size_t k = 0; k < sizeof other - 1; k++) {
            const char was = t.at[i];
            t.at[i] = other[k];
            koila_table *fresh = NULL;
            koila_graph *g = NULL;
            CHECK(koila_table_new(NULL, &fresh) == KOILA_OK);
            const koila_status status = koila_graph_parse(fresh, t.at, t.n, &g, NULL);
            CHECK(status == KOILA_OK || status == KOILA_BAD_INPUT);
            if (g)
                check_round_trip(g, false); /* a changed #0 may use the second of a label only */
            koila_graph_free(g);
            koila_table_free(fresh);
            t.at[i] = was;
        }
    free(t.at);
    maker_deinit(&m);
}

TEST(text__hostile_text_is_refused_at_its_byte)
{
    static const struct {
        const char *text, *at; /* where it is refused: from there on */
    } cases[] = {
        { "koila graph 3\n", "koila graph 3" },
        { "koila graph 2\n", "" },
        { "koila graph 2\naxis 3\n%0 = real f32[]\nend 1 1\n", "\n" },
        { "koila graph 2\n%0 = real f32[]\nend 0 0\n", "\n" },
        { "koila graph 2\nend 0 0\naxis 3\n", "axis 3" },
        { "koila graph 2\nend 0 0\nend 0 0\n", "end 0 0\n" },
        { "koila graph 1\nend 0 0\n", "end" },
        { "koila graph 1 \naxis -1\n", "\n" },
        { "koila graph 1\n%1 = real f32[]\n", " = real" },
        { "koila graph 1\n%0 = real f32[9223372036854775808]\n", "8]" },
        { "koila graph 1\n%0 = real f64[4611686018427387904, 4611686018427387904]\n", "\n" },
        { "koila graph 1\n%0 = real f32[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]\n", "1]" },
        { "koila graph 1\n%0 = real f32[2, 2]{1}\n", "\n" },
        { "koila graph 1\n%0 = batch axis 0 dim 0 f32[2]\n", "\n" },
        { "koila graph 1\naxis 3\n%0 = batch axis 0 dim 0 f32[2]\n", "\n" },
        { "koila graph 1\n%0 = aten::neg(%0) -> f32[]\n", ") ->" },
        { "koila graph 1\n%0 %1 = aten::x() -> f32[]\n", "\n" },
        { "koila graph 1\n= aten::x() -> f32[]\n", "\n" },
        { "koila graph 1\n%0 = aten::x(a=1, 2) -> f32[]\n", "2) ->" },
        { "koila graph 1\n%0 = aten::x([[1]]) -> f32[]\n", "[1]" },
        { "koila graph 1\n%0 = aten::x(#0) -> f32[]\n", ") ->" },
        { "koila graph 1\n%0 = aten::x(0.12345678901234567890) -> f32[]\n", "0.123" },
        { "koila graph 1\n%0 = aten::x(\"\\x00\") -> f32[]\n", "\") ->" },
        { "koila graph 1\n%0 = aten::x(\"\\q\") -> f32[]\n", "q\") ->" },
        { "koila graph 1\n%0 = aten::x_() -> {} writes 0\n", "\n" },
        { "koila graph 1\n%0 = real f32[2]\n%1 = aten::x_(%0) -> {} writes 0 via aten::t(f32[3]) "
          "-> f32[3] :1\n",
          "\n" },
        { "koila graph 1\nline @0 \"a\" 1\nline @1 \"a\" 1\n", "\n" },
        { "koila graph 1\nopaque #1 \"a\"\n", " \"a\"" },
        { "koila graph 1\n%0 = aten::t() -> f32[]\nop aten::t view\n", "\n" },
        { "koila graph 1\nnonsense\n", "nonsense" },
    };
    for (size_t i = 0; i < KOILA_COUNT(cases); i++) {
        koila_table *t = NULL;
        koila_graph *g = NULL;
        koila_error err = KOILA_ERROR_INIT;
        CHECK(koila_table_new(NULL, &t) == KOILA_OK);
        CHECK_EQ(koila_graph_parse(t, cases[i].text, strlen(cases[i].text), &g, &err),
                 KOILA_BAD_INPUT);
        CHECK(err.offset <= strlen(cases[i].text) &&
              strncmp(cases[i].text + err.offset, cases[i].at, strlen(cases[i].at)) == 0);
        if (test_failures_in_case) {
            printf("%s%s at %llu\n", cases[i].text, err.text, (unsigned long long)err.offset);
            test_failures_in_case = 1;
        }
        koila_graph_free(g);
        koila_table_free(t);
    }
}

TEST(text__flags_of_the_table_are_not_changed_by_text)
{
    static const char a[] = "koila graph 1\nop aten::t view\n= aten::t() -> {}\n";
    static const char b[] = "koila graph 1\n= aten::t() -> {}\n";
    koila_table *t = NULL;
    koila_graph *g = NULL;
    CHECK(koila_table_new(NULL, &t) == KOILA_OK);
    CHECK_EQ(koila_graph_parse(t, a, sizeof a - 1, &g, NULL), KOILA_OK);
    koila_graph_free(g);
    /* else it would print as another text */
    CHECK_EQ(koila_graph_parse(t, b, sizeof b - 1, &g, NULL), KOILA_BAD_INPUT);
    koila_table_free(t);
}

TEST(text__a_writer_that_stops_is_an_answer)
{
    maker m;
    maker_init(&m, NULL);
    CHECK(make_everything(&m, NULL));
    text t = { .stop_at = 1 };
    CHECK_EQ(koila_graph_print(m.graph, collect, &t), KOILA_BAD_ARGUMENT);
    free(t.at);
    maker_deinit(&m);
}

TEST(text__every_double_reads_back_to_its_bits)
{
    uint64_t state = 1;
    koila_table *t = NULL;
    CHECK(koila_table_new(NULL, &t) == KOILA_OK);
    for (int i = 0; i < 20000; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        uint64_t bits = state ^ state >> 29, back;
        double x;
        memcpy(&x, &bits, sizeof x);
        if (i % 4 == 1)
            x = (double)(int64_t)(bits >> 40) / 1000; /* what people write */
        if (i % 4 == 2)
            x = 1 / (double)(1 + (bits >> 52));
        memcpy(&bits, &x, sizeof x);
        text out = { 0 };
        koila__out o;
        koila__out_init(&o, collect, &out);
        koila__out_str(&o, "koila graph 1\n= f(");
        koila__out_float(&o, x);
        koila__out_str(&o, ") -> {}");
        CHECK(koila__out_finish(&o) == KOILA_OK);
        koila_graph *g = NULL;
        CHECK_EQ(koila_graph_parse(t, out.at, out.n, &g, NULL), KOILA_OK);
        if (g) {
            const koila_arg *a = koila_sig_get(t, koila_node_get(g, 0).sig)->tokens;
            memcpy(&back, &a->u.f, sizeof back);
            CHECK(a->kind == KOILA_ARG_FLOAT && back == bits);
            if (back != bits)
                printf("%a as %s\n", x, out.at);
        }
        koila_graph_free(g);
        free(out.at);
    }
    koila_table_free(t);
}

TEST(text__the_nth_allocation_may_fail)
{
    maker m;
    maker_init(&m, NULL);
    CHECK(make_everything(&m, NULL));
    text t = printed(m.graph);
    failing_allocator fail = { 0 };
    const koila_allocator mem = { failing_realloc, &fail };
    uint64_t at = 1;
    for (;; at++) {
        fail = (failing_allocator){ .at = at };
        koila_table *table = NULL;
        koila_graph *g = NULL;
        koila_status status = koila_table_new(&mem, &table);
        if (status == KOILA_OK)
            status = koila_graph_parse(table, t.at, t.n, &g, NULL);
        if (status == KOILA_OK) {
            text again = { 0 };
            status = koila_graph_print(g, collect, &again);
            if (status == KOILA_OK)
                CHECK_STR(again.at, t.at);
            free(again.at);
        }
        CHECK(status == (fail.n_calls < at ? KOILA_OK : KOILA_NO_MEMORY));
        koila_graph_free(g);
        koila_table_free(table);
        CHECK_EQ(fail.n_live_bytes, 0);
        if (fail.n_calls < at || at > 10000)
            break;
    }
    CHECK(at > 30);
    free(t.at);
    maker_deinit(&m);
}

TEST(text__time_is_linear_in_the_text)
{ /* many labels, all the same: the chain by label is walked once, not once a line */
    text t = { 0 };
    collect(&t, "koila graph 2\n", 14);
    enum { N = 50000 };
    char line[64];
    for (int i = 0; i < N; i++)
        collect(&t, line, (size_t)snprintf(line, sizeof line, "opaque #%d \"x\"\n", i));
    for (int i = 0; i < N; i++)
        collect(&t, line, (size_t)snprintf(line, sizeof line, "= f(#%d) -> {}\n", i));
    collect(&t, line, (size_t)snprintf(line, sizeof line, "end 0 %d\n", N));
    koila_table *table = NULL;
    CHECK(koila_table_new(NULL, &table) == KOILA_OK);
    for (int pass = 0; pass < 2; pass++) {
        koila_graph *g = NULL;
        CHECK_EQ(koila_graph_parse(table, t.at, t.n, &g, NULL), KOILA_OK);
        text again = printed(g);
        CHECK(again.n == t.n && memcmp(again.at, t.at, t.n) == 0);
        free(again.at);
        koila_graph_free(g);
    }
    free(t.at);
    koila_table_free(table);
}
