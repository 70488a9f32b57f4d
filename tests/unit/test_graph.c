/* The recorded graph: what it refuses, what its hash says, and the part that makes given values. */
#include "interpreter.h"
#include "random_graph.h"

TEST(graph__refuses_what_does_not_fit_together)
{
    random_graph r;
    CHECK(rg_init(&r, NULL, 5, NULL, 0, 12) == KOILA_OK);
    koila_graph *g = r.g;
    koila_value v = 77;
    uint16_t axis = 7;
    const uint64_t hash = koila_graph_hash(g);
    const uint32_t n = koila_graph_n_nodes(g);
    const uint32_t n_values = koila_graph_n_values(g);
    CHECK_EQ(koila_graph_node(g, koila_table_n_sigs(r.t), &v, KOILA_NONE, &v), KOILA_BAD_ARGUMENT);
    const koila_node_info last = koila_node_get(g, n - 1);
    const koila_value later[4] = { n_values, n_values, n_values, n_values };
    /* values of the future */
    CHECK_EQ(koila_graph_node(g, last.sig, later, KOILA_NONE, &v), KOILA_BAD_ARGUMENT);
    for (koila_value x = 0; x < n_values; x++) { /* another meta */
        if (koila_value_get(g, x).meta == koila_sig_get(r.t, last.sig)->inputs[0])
            continue;
        const koila_value wrong[4] = { x, x, x, x };
        CHECK_EQ(koila_graph_node(g, last.sig, wrong, KOILA_NONE, &v), KOILA_BAD_ARGUMENT);
    }
    CHECK_EQ(koila_graph_axis(g, -1, &axis), KOILA_BAD_ARGUMENT);
    CHECK_EQ(koila_graph_leaf(g, 9999, KOILA_LEAF_REAL, 0, 0, NULL, &v), KOILA_BAD_ARGUMENT);
    CHECK_EQ(koila_graph_leaf(g, koila_value_get(g, 0).meta, KOILA_LEAF_BATCH, 9, 0, NULL, &v),
             KOILA_BAD_ARGUMENT);
    CHECK_EQ(koila_graph_leaf(g, koila_value_get(g, 0).meta, KOILA_LEAF_BATCH, 0, 2, NULL, &v),
             KOILA_BAD_ARGUMENT);
    CHECK(v == 77 && axis == 7 && koila_graph_hash(g) == hash &&
          koila_graph_n_values(g) == n_values && koila_graph_n_nodes(g) == n);
    CHECK(koila_graph_check(g, NULL));
    rg_deinit(&r);
}

TEST(graph__dense_strides_keep_the_order_of_the_dimensions)
{
    const int64_t size[] = { 2, 3, 1, 5 };
    const int64_t gaps[] = { 2, 40, 7, 400 }; /* the first dimension is innermost */
    int64_t stride[4];
    koila_meta_info like = { .n_dims = 4, .size = size, .stride = gaps };
    koila_dense_strides(&like, size, stride);
    CHECK(stride[0] == 1 && stride[2] == 2 && stride[1] == 2 && stride[3] == 6);
    like.stride = NULL;
    koila_dense_strides(&like, size, stride);
    CHECK(stride[3] == 1 && stride[2] == 5 && stride[1] == 5 && stride[0] == 15);
    const int64_t equal[] = { 0, 0, 0, 0 };
    like.stride = equal;
    koila_dense_strides(&like, size, stride);
    CHECK(stride[3] == 1 && stride[0] == 15);
}

TEST(graph__dense_is_each_element_of_the_storage_once)
{
    const int64_t size[] = { 2, 3, 1, 5 };
    const int64_t turned[] = { 1, 10, 77, 2 }; /* the stride of one element is never taken */
    koila_meta_info m = { .n_dims = 4, .size = size, .stride = turned };
    m.n_bytes = m.n_storage_bytes = 120;
    CHECK(koila_meta_is_dense(&m));
    m.n_storage_bytes = 124;
    CHECK(!koila_meta_is_dense(&m));
    const int64_t square[] = { 2, 2 };
    const int64_t expanded[] = { 3,
                                 0 }; /* four elements in room for four: two places, twice each */
    m = (koila_meta_info){ .n_dims = 2, .size = square, .stride = expanded };
    m.n_bytes = m.n_storage_bytes = 16;
    CHECK(!koila_meta_is_dense(&m));
}

TEST(graph__contiguous_is_one_element_after_the_other)
{
    const int64_t size[] = { 2, 3, 1, 5 };
    const int64_t dense[] = { 15, 5, 77, 1 }; /* the stride of one element is never taken */
    const int64_t turned[] = { 5, 10, 5, 1 };
    koila_meta_info m = { .n_dims = 4, .size = size, .stride = dense };
    CHECK(koila_meta_is_contiguous(&m));
    m.stride = turned;
    CHECK(!koila_meta_is_contiguous(&m));
    m.n_dims = 0;
    CHECK(koila_meta_is_contiguous(&m));
}

/* Records the same twice with something different: 0 nothing, 1 a name, 2 a line, 3 the axis, 4 the
 * other input, 5 a leaf's kind, 6 order of values. */
static koila_graph *recorded(koila_table *t, int what)
{
    koila_graph *g = NULL;
    koila_meta m = 0;
    koila_value a = 0, b = 0, first;
    koila_op op = 0;
    koila_sig sig;
    uint16_t axis;
    uint32_t line;
    CHECK(koila_graph_new(t, NULL, &g) == KOILA_OK &&
          koila_table_meta(t, KOILA_DTYPE_F32, 0, 2, (int64_t[]){ 4, 4 }, NULL, &m) == KOILA_OK);
    CHECK(koila_graph_axis(g, 4, &axis) == KOILA_OK);
    if (what == 3)
        CHECK(koila_graph_axis(g, 5, &axis) == KOILA_OK);
    CHECK(koila_graph_leaf(g, m, KOILA_LEAF_BATCH, 0, what == 6, what == 1 ? "name" : NULL, &a) ==
          KOILA_OK);
    CHECK(koila_graph_leaf(g, m, what == 5 ? KOILA_LEAF_BATCH : KOILA_LEAF_REAL, 0, 0, NULL, &b) ==
          KOILA_OK);
    CHECK(koila_graph_line(g, "x.py", what == 2 ? 2 : 1, &line) == KOILA_OK &&
          koila_table_op(t, "aten::mm", 0, &op) == KOILA_OK);
    const koila_arg tok[] = { { .kind = KOILA_ARG_TENSOR, .u.id = m },
                              { .kind = KOILA_ARG_TENSOR, .u.id = m } };
    CHECK(koila_table_sig(
              t,
              &(koila_sig_info){
                  .op = op, .n_tokens = 2, .n_pos = 2, .tokens = tok, .n_fresh = 1, .outputs = &m },
              &sig) == KOILA_OK);
    CHECK(koila_graph_node(g, sig, (koila_value[]){ a, what == 4 ? a : b }, line, &first) ==
          KOILA_OK);
    return g;
}

static uint64_t hash_of(koila_table *t, int what)
{
    koila_graph *g = recorded(t, what);
    const uint64_t hash = koila_graph_hash(g);
    koila_graph_free(g);
    return hash;
}

TEST(graph__the_hash_is_of_what_decides_a_plan)
{
    koila_table *t = NULL;
    CHECK(koila_table_new(NULL, &t) == KOILA_OK);
    const uint64_t plain = hash_of(t, 0);
    /* not of names and lines */
    CHECK(plain == hash_of(t, 0) && plain == hash_of(t, 1) && plain == hash_of(t, 2));
    for (int what = 3; what <= 6; what++)
        CHECK(plain != hash_of(t, what));
    koila_table_free(t);
}

TEST(graph__two_begin_alike_where_nothing_differs_that_decides_a_plan)
{
    koila_table *t = NULL;
    CHECK(koila_table_new(NULL, &t) == KOILA_OK);
    koila_graph *plain = recorded(t, 0);
    for (int what = 0; what <= 6; what++) {
        koila_graph *g = recorded(t, what);
        CHECK(koila_graph_begin_alike(plain, g, 1, 3) == (what <= 2));
        /* a shorter beginning has less that differs: without the node, and without the leaves */
        CHECK(koila_graph_begin_alike(plain, g, 0, 2) == (what <= 2 || what == 4));
        CHECK(koila_graph_begin_alike(plain, g, 0, 0) == (what != 3));
        /* and nothing has more than it has */
        CHECK(!koila_graph_begin_alike(plain, g, 2, 3) && !koila_graph_begin_alike(plain, g, 1, 4));
        koila_graph_free(g);
    }
    koila_graph_free(plain);
    koila_table_free(t);
}

TEST(graph__takes_the_lines_of_an_equal_one_and_gives_its_own)
{
    koila_table *t = NULL;
    CHECK(koila_table_new(NULL, &t) == KOILA_OK);
    koila_graph *first = recorded(t, 0), *second = recorded(t, 2);
    koila_graph_take_lines(first, second);
    CHECK_EQ(koila_graph_line_number(first, koila_node_get(first, 0).line), 2);
    CHECK_EQ(koila_graph_line_number(second, koila_node_get(second, 0).line), 1);
    CHECK(koila_graph_check(first, NULL) && koila_graph_check(second, NULL));
    uint32_t line; /* lines are interned as before */
    CHECK(koila_graph_line(first, "x.py", 2, &line) == KOILA_OK);
    CHECK_EQ(line, koila_node_get(first, 0).line);
    koila_graph_free(second);
    CHECK_EQ(koila_graph_line_number(first, koila_node_get(first, 0).line), 2);
    koila_graph_free(first);
    koila_table_free(t);
}

TEST(graph__check_sees_planted_faults)
{
    random_graph r;
    CHECK(rg_init(&r, NULL, 8, NULL, 0, 12) == KOILA_OK && koila_graph_check(r.g, NULL));
    koila_graph *g = r.g;
    koila_error err = KOILA_ERROR_INIT;
#define FAULT(place, value)                                                                        \
    do {                                                                                           \
        const __typeof__(place) was = place;                                                       \
        place = (__typeof__(place))(value);                                                        \
        CHECK(!koila_graph_check(g, &err));                                                        \
        CHECK(err.text[0]);                                                                        \
        place = was;                                                                               \
        CHECK(koila_graph_check(g, NULL));                                                         \
    } while (0)
    FAULT(g->inputs.at[0], g->nodes.at[0].first_output);
    FAULT(g->inputs.at[0], UINT32_MAX);
    FAULT(g->nodes.at[1].first_input, g->nodes.at[1].first_input + 1);
    FAULT(g->nodes.at[2].sig, 9999);
    FAULT(g->nodes.at[2].first_output, 0);
    FAULT(g->values.at[g->nodes.at[1].first_output].node, 0);
    FAULT(g->values.at[g->nodes.at[1].first_output].node, 9999);
    FAULT(g->values.at[0].axis, 9);
    FAULT(g->values.at[0].dim, 1);
    FAULT(g->axes.at[0], g->axes.at[0] + 1);
    rg_deinit(&r);
}

static bool is_in_array(void *known, koila_value v, koila_cut *cut)
{
    return ((const uint8_t *)known)[v];
}

TEST(graph__an_extracted_part_computes_the_same)
{
    for (uint64_t seed = 1; seed <= 400; seed++) {
        random_graph r;
        if (rg_init(&r, NULL, seed, NULL, 0, 30) != KOILA_OK)
            abort();
        const uint32_t V = r.g->values.n;
        heap h = { 0 };
        tensor **truth = calloc(V + 1, sizeof *truth);
        uint8_t *known = calloc(V + 1, 1);
        koila_value *value_of = calloc(V + 1, sizeof *value_of);
        koila_value *leaf_from = malloc((V + 1) * sizeof *leaf_from);
        koila_node *node_from = malloc((r.g->nodes.n + 1) * sizeof *node_from);
        CHECK(run_recorded(&h, r.g, truth));
        for (uint32_t v = 0; v < V; v++)
            known[v] = seed % 3 == 0 && rg_pick(&r, 5) == 0;
        koila_graph *part = NULL;
        CHECK(koila_graph_extract(r.g, r.targets, r.n_targets, is_in_array, known, NULL, &part,
                                  value_of, leaf_from, node_from) == KOILA_OK);
        CHECK(koila_graph_check(part, NULL) && part->nodes.n <= r.g->nodes.n);
        tensor **mine = calloc(part->values.n + 1, sizeof *mine);
        for (uint32_t v = 0; v < V; v++) { /* what was a leaf, or known, is given */
            if (!value_of[v] || part->values.at[value_of[v] - 1].node != KOILA_NONE)
                continue;
            CHECK(known[v] || r.g->values.at[v].node == KOILA_NONE);
            CHECK_EQ(leaf_from[value_of[v] - 1], v);
            mine[value_of[v] - 1] = view_of(truth[v]);
        }
        for (uint32_t n = 0; n < part->nodes.n; n++) {
            CHECK_EQ(part->nodes.at[n].sig, r.g->nodes.at[node_from[n]].sig);
            CHECK(n == 0 || node_from[n] > node_from[n - 1]);
        }
        CHECK(run_recorded(&h, part, mine));
        for (uint32_t i = 0; i < r.n_targets; i++)
            CHECK(same_elements(mine[value_of[r.targets[i]] - 1], truth[r.targets[i]]));
        for (uint32_t v = 0; v < part->values.n; v++)
            drop(&mine[v]);
        for (uint32_t v = 0; v < V; v++)
            drop(&truth[v]);
        CHECK_EQ(h.n_stores, 0);
        koila_graph_free(part);
        free(mine);
        free(truth);
        free(known);
        free(value_of);
        free(leaf_from);
        free(node_from);
        rg_deinit(&r);
    }
}

TEST(graph__a_part_does_not_know_what_was_recorded_around_it)
{
    random_graph r;
    CHECK(rg_init(&r, NULL, 11, NULL, 0, 20) == KOILA_OK);
    const size_t room = (r.g->values.n + 200) * sizeof(koila_value);
    koila_value *value_of = malloc(room), *leaf_from = malloc(room);
    koila_node *node_from = malloc((r.g->nodes.n + 200) * sizeof *node_from);
    koila_graph *a = NULL, *b = NULL;
    memset(value_of, 0, room);
    CHECK(koila_graph_extract(r.g, r.targets, r.n_targets, NULL, NULL, NULL, &a, value_of,
                              leaf_from, node_from) == KOILA_OK);
    for (int i = 0; i < 40; i++)
        rg_step(&r);
    memset(value_of, 0, room);
    CHECK(koila_graph_extract(r.g, r.targets, r.n_targets, NULL, NULL, NULL, &b, value_of,
                              leaf_from, node_from) == KOILA_OK);
    CHECK(koila_graph_hash(a) == koila_graph_hash(b) && a->values.n == b->values.n);
    koila_graph *c = NULL;
    const koila_value none = r.g->values.n;
    CHECK_EQ(
        koila_graph_extract(r.g, &none, 1, NULL, NULL, NULL, &c, value_of, leaf_from, node_from),
        KOILA_BAD_ARGUMENT);
    koila_graph_free(a);
    koila_graph_free(b);
    free(value_of);
    free(leaf_from);
    free(node_from);
    rg_deinit(&r);
}

TEST(graph__a_part_has_the_drops_of_its_own_values)
{
    random_graph r;
    CHECK(rg_init(&r, NULL, 12, NULL, 0, 20) == KOILA_OK);
    koila_value *value_of = calloc(r.g->values.n + 1, sizeof *value_of);
    koila_value *leaf_from = malloc((r.g->values.n + 1) * sizeof *leaf_from);
    koila_node *node_from = malloc((r.g->nodes.n + 1) * sizeof *node_from);
    for (koila_value v = 0; v < r.g->values.n; v++)
        CHECK_EQ(koila_graph_drop(r.g, v), KOILA_OK);
    koila_graph *part = NULL;
    CHECK_EQ(koila_graph_extract(r.g, r.targets, 1, NULL, NULL, NULL, &part, value_of, leaf_from,
                                 node_from),
             KOILA_OK);
    uint32_t n = 0;
    for (koila_value v = 0; v < r.g->values.n; v++) {
        if (!value_of[v])
            continue;
        const koila_drop drop = koila_graph_drop_get(part, n++);
        CHECK_EQ(drop.value, value_of[v] - 1);
        CHECK_EQ(drop.n_nodes, part->nodes.n); /* after all of r.g, therefore of the part */
    }
    CHECK_EQ(koila_graph_n_drops(part), n);
    koila_graph_free(part);
    free(value_of);
    free(leaf_from);
    free(node_from);
    rg_deinit(&r);
}

TEST(graph__the_nth_allocation_may_fail)
{
    failing_allocator fail = { 0 };
    const koila_allocator mem = { failing_realloc, &fail };
    uint64_t at = 1;
    for (;; at++) {
        fail = (failing_allocator){ .at = at };
        random_graph r;
        koila_graph *part = NULL;
        koila_value value_of[RG_MAX_VALUES] = { 0 }, leaf_from[RG_MAX_VALUES];
        koila_node node_from[RG_MAX_VALUES];
        uint32_t line;
        koila_status status = rg_init(&r, &mem, 3, NULL, 0, 20);
        if (status == KOILA_OK)
            status = koila_graph_line(r.g, "a.py", 3, &line);
        if (status == KOILA_OK)
            status = koila_graph_extract(r.g, r.targets, r.n_targets, NULL, NULL, &mem, &part,
                                         value_of, leaf_from, node_from);
        CHECK(status == (fail.n_calls < at ? KOILA_OK : KOILA_NO_MEMORY));
        if (r.g)
            CHECK(koila_graph_check(r.g, NULL));
        koila_graph_free(part);
        rg_deinit(&r);
        CHECK_EQ(fail.n_live_bytes, 0);
        if (fail.n_calls < at)
            break;
    }
    CHECK(at > 20);
}
