/* test_rules.c — claims about the other families that the whole-program oracle could pass by luck:
 * what must *not* be said. */
#include "graph_maker.h"

TEST(rules__every_line_has_a_rule_and_is_there_once)
{
    const char *name, *family, *says, *other;
    koila_table *t;
    koila_op op;
    uint32_t n = 0;
    CHECK_EQ(koila_table_new(NULL, &t), KOILA_OK);
    for (; koila__op_line(n, &name, &family, &says); n++) {
        CHECK_EQ(koila_table_op(t, name, 0, &op), KOILA_OK);
        CHECK(koila__rule_of(t, op) != NULL);
        CHECK(strncmp(name, "aten::", 6) == 0 || strncmp(name, "koila::", 7) == 0);
        CHECK(*says);
        for (uint32_t k = 0; k < n; k++) {
            koila__op_line(k, &other, &family, &says);
            CHECK(strcmp(name, other) != 0);
        }
    }
    CHECK(n > 400);
    CHECK_EQ(koila_table_op(t, "aten::no_such_operator", 0, &op), KOILA_OK);
    CHECK(koila__rule_of(t, op) == NULL);
    CHECK_EQ(koila_op_facts(t, op), 0);
    koila_table_free(t);
}

static uint32_t facts_of(koila_table *t, const char *name, uint32_t flags)
{
    koila_op op;
    CHECK_EQ(koila_table_op(t, name, flags, &op), KOILA_OK);
    return koila_op_facts(t, op);
}

TEST(rules__facts_are_those_of_the_functional_twin)
{
    koila_table *t;
    CHECK_EQ(koila_table_new(NULL, &t), KOILA_OK);
    CHECK(facts_of(t, "aten::zero_", KOILA_OP_INPLACE) & KOILA_FACT_ZEROS);
    CHECK(facts_of(t, "aten::fill_.Scalar", KOILA_OP_INPLACE) & KOILA_FACT_FILLS);
    CHECK(facts_of(t, "aten::bernoulli_.float", KOILA_OP_INPLACE) & KOILA_FACT_DRAWS_MASK);
    CHECK(facts_of(t, "aten::to.dtype", 0) & KOILA_FACT_MAY_ALIAS);
    CHECK_EQ(koila_facts_dense(facts_of(t, "aten::addmm_", KOILA_OP_INPLACE)),
             KOILA_FACT_DENSE_CONTRACT_BIASED);
    CHECK_EQ(facts_of(t, "aten::exp_", 0), 0);
    CHECK_EQ(facts_of(t, "_", KOILA_OP_INPLACE), 0);
    CHECK_EQ(facts_of(t, "", KOILA_OP_INPLACE), 0);
    koila_table_free(t);
}

TEST(rules__a_partial_sum_met_by_a_row_becomes_whole)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value s = call(&m, "aten::sum", scalar, "t", x);
    const koila_value ops[] = { call(&m, "aten::mul.Tensor", f32(7, 5), "tt", x, s),
                                call(&m, "aten::add.Tensor", f32(7, 5), "tt", x, s),
                                call(&m, "aten::where.self", f32(7, 5), "ttt", x, s, x),
                                call(&m, "aten::maximum", f32(7, 5), "tt", x, s) };
    const koila_value all =
        call(&m, "aten::cat", f32(28, 5), "T", 4, ops[0], ops[1], ops[2], ops[3]);
    place(&m, all);
    for (size_t i = 0; i < 4; i++) {
        CHECK_AT(&m, ops[i], S(0, 1, 1));
        const koila_node n = koila_value_get(m.placed->graph, m.placed->lowered[ops[i]]).node;
        const koila_node_info info = koila_node_get(m.placed->graph, n);
        const koila_value *in = koila_node_inputs(m.placed->graph, n);
        for (uint32_t k = 0; k < 2; k++)
            if (m.placed->value[in[k]].kind == KOILA_P)
                CHECK_EQ(m.placed->need[info.first_input + k].kind, KOILA_R);
    }
    CHECK_EQ(n_gathered(&m), 0);
    maker_deinit(&m);
}

TEST(rules__what_is_not_linear_makes_a_partial_sum_whole)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value s = call(&m, "aten::sum.dim_IntList", f32(5), "tl", x, 1, 0);
    const koila_value e = call(&m, "aten::exp", f32(5), "t", s);
    const koila_value one = call(&m, "aten::add.Tensor", f32(5), "ti", s, 1);
    const koila_value n = call(&m, "aten::neg", f32(5), "t", s);
    const koila_value narrow =
        call(&m, "aten::_to_copy", SHAPE(KOILA_DTYPE_BF16, 5), "tky", s, "dtype", KOILA_DTYPE_BF16);
    const koila_value wide =
        call(&m, "aten::_to_copy", SHAPE(KOILA_DTYPE_F64, 5), "tky", s, "dtype", KOILA_DTYPE_F64);
    const koila_value all = call(&m, "aten::cat", f32(25), "T", 5, e, one, n, narrow, wide);
    place(&m, all);
    CHECK_AT(&m, s, P_);
    CHECK_AT(&m, e, R_);
    CHECK_AT(&m, one, R_);
    CHECK_AT(&m, n, P_);
    CHECK_AT(&m, narrow, R_);
    CHECK_AT(&m, wide, P_);
    maker_deinit(&m);
}

TEST(rules__a_mean_of_halves_is_scaled_and_a_sum_is_not)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 1, f16(3, 7));
    const koila_value a = call(&m, "aten::mean.dim", f16(3), "tl", x, 1, 1);
    const koila_value b = call(&m, "aten::mean.dim", f16(7), "tl", x, 1, 0);
    const koila_value s = call(&m, "aten::sum", f16(1), "t", x);
    const koila_value all = call(&m, "aten::cat", f16(11), "T", 3, a, b, s);
    place(&m, all);
    CHECK_AT(&m, a, P_);
    CHECK_AT(&m, b, S(0, 1, 1));
    CHECK_AT(&m, s, P_);
    CHECK_EQ(m.placed->node[0].fix[0].kind, KOILA__FIX_SCALE);
    CHECK_EQ(m.placed->node[1].fix[0].kind, KOILA__FIX_NONE);
    CHECK_EQ(m.placed->node[2].fix[0].kind, KOILA__FIX_NONE);
    maker_deinit(&m);
}

TEST(rules__a_mean_is_a_sum_that_is_divided_when_it_is_whole)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 1, f32(3, 7));
    const koila_value columns = call(&m, "aten::mean.dim", f32(3), "tl", x, 1, 1);
    const koila_value rows = call(&m, "aten::mean.dim", f32(7), "tl", x, 1, 0);
    const koila_value all = call(&m, "aten::mean", scalar, "t", x);
    const koila_value scaled = call(&m, "aten::mul.Tensor", scalar, "td", all, 0.5);
    const koila_value both = call(&m, "aten::cat", f32(11), "T", 3, columns, rows, scaled);
    place(&m, both);
    CHECK_AT(&m, columns, P_);
    CHECK_AT(&m, rows, S(0, 1, 1));
    CHECK_AT(&m, all, R_); /* one number: divided once */
    CHECK_AT(&m, scaled, R_);
    CHECK_EQ(n_nodes_named(&m, "aten::mean"), 0);
    CHECK_EQ(n_nodes_named(&m, "aten::mean.dim"), 1);
    CHECK_EQ(n_nodes_named(&m, "aten::sum.dim_IntList"), 2);
    maker_deinit(&m);
}

TEST(rules__rows_added_into_zeros_are_partial_and_into_a_larger_table_are_not)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value i = batch(&m, 0, i64(7));
    const koila_value v = batch(&m, 0, f32(7, 5));
    const koila_value table = real(&m, f32(8, 5));
    const koila_value zeros = call(&m, "aten::zeros", f32(4, 5), "l", 2, 4, 5);
    const koila_value a = call(&m, "aten::index_add", f32(4, 5), "titt", zeros, 0, i, v);
    const koila_value b = call(&m, "aten::index_add", f32(8, 5), "titt", table, 0, i, v);
    const koila_value all = call(&m, "aten::cat", f32(12, 5), "Ti", 2, a, b, 0);
    place(&m, all);
    CHECK_AT(&m, a, P_);
    CHECK_AT(&m, zeros, P_);
    CHECK_AT(&m, b, R_);
    CHECK_EQ(n_gathered(&m), 1);
    maker_deinit(&m);
}

TEST(rules__rows_added_into_a_smaller_table_are_added_up_without_it)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value i = batch(&m, 0, i64(7));
    const koila_value v = batch(&m, 0, f32(7, 5));
    const koila_value table = real(&m, f32(4, 5));
    const koila_value a = call(&m, "aten::index_add", f32(4, 5), "titt", table, 0, i, v);
    const koila_value b = call(&m, "aten::index_put", f32(4, 5), "tTtb", table, 1, i, v, 1);
    const koila_value all = call(&m, "aten::add.Tensor", f32(4, 5), "tt", a, b);
    place(&m, all);
    CHECK_AT(&m, all, R_);
    CHECK_EQ(n_nodes_named(&m, "aten::new_zeros"), 2);
    CHECK_EQ(n_gathered(&m), 0);
    maker_deinit(&m);
}

TEST(rules__own_row_by_index_stays_sliced_and_a_permutation_does_not)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value y = batch(&m, 0, i64(7));
    const koila_value rows = call(&m, "aten::arange", i64(7), "i", 7);
    const koila_value perm = real(&m, i64(7));
    const koila_value own = call(&m, "aten::index.Tensor", f32(7), "tT", x, 2, rows, y);
    const koila_value mixed = call(&m, "aten::index.Tensor", f32(7), "tT", x, 2, perm, y);
    const koila_value all = call(&m, "aten::add.Tensor", f32(7), "tt", own, mixed);
    place(&m, all);
    CHECK_AT(&m, own, S(0, 1, 1));
    CHECK_EQ(n_nodes_named(&m, "koila::index_rows"), 1);
    CHECK_EQ(n_nodes_named(&m, "aten::index.Tensor"), 1);
    CHECK_EQ(n_gathered(&m), 1); /* x, for the permutation */
    maker_deinit(&m);
}

TEST(rules__a_range_from_zero_follows_the_rows_and_no_other_does)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, i64(7));
    const koila_value own = call(&m, "aten::arange.start", i64(7), "ii", 0, 7);
    const koila_value late = call(&m, "aten::arange.start", i64(7), "ii", 1, 8);
    const koila_value a = call(&m, "aten::add.Tensor", i64(7), "tt", x, own);
    const koila_value b = call(&m, "aten::add.Tensor", i64(7), "tt", a, late);
    place(&m, b);
    CHECK_AT(&m, own, S(0, 1, 1));
    CHECK_AT(&m, late, R_);
    CHECK_AT(&m, b, S(0, 1, 1));
    CHECK_EQ(n_gathered(&m), 0);
    maker_deinit(&m);
}

TEST(rules__bags_of_one_length_are_sliced_and_others_gathered)
{
    /* 7 bags of 7: which of the two is the batch is known by position */
    for (int others = 0; others < 2; others++) {
        maker m;
        maker_init(&m, NULL);
        const shape bags[4] = { f32(7, 5), i64(49), i64(7), i64(7) };
        const koila_value ids =
            call(&m, "aten::view", i64(49), "tl", batch(&m, 0, i64(7, 7)), 1, -1);
        const koila_value table = real(&m, f32(11, 5));
        const koila_value begins =
            others ? real(&m, i64(7))
                   : call(&m, "aten::arange.start_step", i64(7), "iii", 0, 49, 7);
        const koila_value out = calls(&m, "aten::_embedding_bag", 4, bags, "tttbibnbi", table, ids,
                                      begins, 0, 1, 0, 0, -1);
        const koila_value grad =
            call(&m, "aten::_embedding_bag_backward", f32(11, 5), "ttttttibibni", out, ids, begins,
                 out + 1, out + 2, out + 3, 11, 0, 1, 0, -1);
        /* whoever reads the numbers of bags gets those of the whole */
        const koila_value whose = call(&m, "aten::add.Scalar", i64(49), "ti", out + 1, 1);
        const koila_value all = call(&m, "aten::cat", f32(104), "T", 2,
                                     call(&m, "aten::view", f32(55), "tl", grad, 1, 55), whose);
        place(&m, all);
        if (others) {
            CHECK_AT(&m, out, R_);
            CHECK_AT(&m, grad, R_);
            CHECK_EQ(n_gathered(&m), 2); /* forward and backward */
        } else {
            CHECK_AT(&m, out, S(0, 1, 1));
            CHECK_AT(&m, out + 1, R_);
            CHECK_AT(&m, out + 2, S(0, 1, 1));
            CHECK_AT(&m, grad, P_);
            CHECK_EQ(n_nodes_named(&m, "koila::embedding_bag"), 1);
            CHECK_EQ(n_nodes_named(&m, "koila::embedding_bag_backward"), 1);
        }
        maker_deinit(&m);
    }
}

TEST(rules__an_opaque_workspace_stays_in_its_loop)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 1, f32(9, 7, 5));
    const koila_value w = real(&m, f32(24, 5));
    const koila_value u = real(&m, f32(24, 6));
    const koila_value b = real(&m, f32(24));
    const koila_value h = call(&m, "aten::zeros", f32(7, 6), "l", 2, 7, 6);
    const shape out[4] = { f32(9, 7, 6), f32(7, 6), f32(7, 6), f32(0) };
    const koila_value y = calls(&m, "aten::mkldnn_rnn_layer", 4, out, "tttttttbliiibbbb", x, w, u,
                                b, b, h, h, 0, 0, 2, 6, 1, 1, 0, 0, 1);
    const shape back[7] = { f32(9, 7, 5), f32(24, 5), f32(24, 6), f32(24),
                            f32(24),      f32(7, 6),  f32(7, 6) };
    const koila_value g =
        calls(&m, "aten::mkldnn_rnn_layer_backward", 7, back, "tttttttttttnnbiiibbblbt", x, w, u, b,
              b, h, h, y, y + 1, y + 2, y, 0, 2, 6, 1, 1, 1, 0, 0, 0, y + 3);
    const koila_value all = call(&m, "aten::cat", f32(1), "T", 2, g, g + 1);
    place(&m, all);
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, y, S(1, 1, 1));
    CHECK_AT(&m, h, S(0, 1, 1));
    CHECK(koila__is_opaque(at(&m, y + 3)));
    CHECK_AT(&m, g + 1, P_);
    CHECK_EQ(n_gathered(&m), 1); /* the cat at the end */
    maker_deinit(&m);
}

/* What koila::opaque_kept is told of its arguments. */
enum { EITHER, ROWS, WHOLE, EACH, N_KINDS };

/* A module of x[rows, 5] and of parameters w[4, 5], and back. *y: rows, and the graph. Returns the
 * gradients of x and of w; they are placed. */
static koila_value module_of(maker *m, koila_value x, int64_t rows, int kind, koila_value *y)
{
    const koila_value w = real(m, f32(4, 5));
    const shape out[2] = { f32(rows, 4), f32(rows, 100) };
    const shape back[2] = { f32(rows, 5), f32(4, 5) };
    *y = calls(m, "koila::opaque_kept", 2, out, "TTlili", 1, x, 1, w, 1, kind, 100, 0, 1);
    const koila_value g = calls(m, "koila::opaque_backward", 2, back, "TTTTlllli", 1, *y, 1, x, 1,
                                w, 1, *y + 1, 1, 0, 2, 0, 1, 1, kind, 0, 1);
    place(m, call(m, "aten::cat", f32(1), "T", 2, g, g + 1));
    CHECK_EQ(m->status, KOILA_OK);
    return g;
}

TEST(rules__the_graph_of_a_module_stays_in_its_loop)
{
    maker m;
    koila_value y;
    for (int kind = EITHER; kind < N_KINDS; kind++) {
        maker_init(&m, NULL);
        const koila_value g = module_of(&m, batch(&m, 0, f32(7, 5)), 7, kind, &y);
        CHECK_EQ(n_gathered(&m), kind == WHOLE ? 2 : 1); /* the module, the cat at the end */
        CHECK_AT(&m, g + 1, kind == WHOLE ? R_ : P_);
        if (kind != WHOLE) {
            CHECK_AT(&m, y, S(0, 1, 1));
            CHECK(koila__is_opaque(at(&m, y + 1)));
            CHECK_AT(&m, g, S(0, 1, 1));
        }
        maker_deinit(&m);
    }
}

/* Of x[3, 7, 5], 3 samples of 7 tokens, as rows of tokens. */
TEST(rules__tokens_of_several_samples_are_rows_of_a_module_that_says_so)
{
    maker m;
    koila_value y;
    for (int kind = EITHER; kind < N_KINDS; kind++) {
        maker_init(&m, NULL);
        const koila_value x =
            call(&m, "aten::view", f32(21, 5), "tl", batch(&m, 1, f32(3, 7, 5)), 2, 21, 5);
        const koila_value g = module_of(&m, x, 21, kind, &y);
        CHECK_AT(&m, x, S(0, 3, 1));
        CHECK_AT(&m, y, kind == EACH ? S(0, 3, 1) : R_);
        CHECK_AT(&m, g, kind == EACH ? S(0, 3, 1) : R_);
        CHECK_AT(&m, g + 1, kind == EACH ? P_ : R_);
        maker_deinit(&m);
    }
}

/* koila::packed_rnn of x[9, 7, 5], 7 rows of up to 9 steps, and back. *y: results of the forward.
 * Returns those of the backward. */
static koila_value packed_rnn(maker *m, koila_value x, koila_value *y)
{
    const koila_value places = real(m, i64(7, 2));
    const koila_value w = real(m, f32(24, 5));
    const koila_value u = real(m, f32(24, 6));
    const shape out[4] = { f32(9, 7, 6), f32(1, 7, 6), f32(1, 7, 6), f32(700) };
    const shape back[5] = { f32(9, 7, 5), f32(1, 7, 6), f32(1, 7, 6), f32(24, 5), f32(24, 6) };
    *y = calls(m, "koila::packed_rnn", 4, out, "ttnnTibbiib", x, places, 2, w, u, 0, 0, 0, 1, 9, 1);
    return calls(m, "koila::packed_rnn_backward", 5, back, "tnnttnnTttibbibb", *y, x, places, 2, w,
                 u, *y + 3, *y, 0, 0, 0, 1, 1, 1);
}

TEST(rules__a_packed_layer_is_cut_by_rows)
{
    maker m;
    koila_value y;
    maker_init(&m, NULL);
    koila_value g = packed_rnn(&m, batch(&m, 1, f32(9, 7, 5)), &y);
    place(&m, call(&m, "aten::cat", f32(1), "T", 2, g, g + 3));
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, y, S(1, 1, 1));
    CHECK(koila__is_opaque(at(&m, y + 3)));
    CHECK_AT(&m, g, S(1, 1, 1));
    CHECK_AT(&m, g + 1, S(1, 1, 1));
    CHECK_AT(&m, g + 3, P_);
    CHECK_EQ(n_gathered(&m), 1); /* the cat at the end */
    maker_deinit(&m);

    /* a batch in the dimension of the features or of the steps is none of rows */
    for (uint32_t dim = 0; dim < 3; dim += 2) {
        maker_init(&m, NULL);
        g = packed_rnn(&m, batch(&m, dim, f32(9, 7, 5)), &y);
        place(&m, g);
        CHECK_EQ(m.status, KOILA_OK);
        CHECK_AT(&m, y, R_);
        CHECK_AT(&m, g, R_);
        maker_deinit(&m);
    }
}

/* koila::ctc_loss of scores [9, 7, 5], 7 rows of 9 steps, and back. Targets [7, 4], or [20], one
 * row after another, which begin at `begins`. *y: results of the forward. Returns those of the
 * backward. */
static koila_value ctc_loss(maker *m, koila_value scores, bool one_after_another, koila_value *y)
{
    const koila_value targets = real(m, one_after_another ? i64(20) : i64(7, 4));
    const koila_value inputs = real(m, i64(7)), lengths = real(m, i64(7)), begins = real(m, i64(7));
    const shape out[2] = { f32(7), f32(7, 9, 9) };
    const shape back[1] = { f32(9, 7, 5) };
    if (one_after_another) {
        *y = calls(m, "koila::ctc_loss", 2, out, "tttttiib", scores, targets, inputs, lengths,
                   begins, 4, 0, 1);
        return calls(m, "koila::ctc_loss_backward", 1, back, "ttttttttib", *y, scores, targets,
                     inputs, lengths, begins, *y, *y + 1, 0, 1);
    }
    *y = calls(m, "koila::ctc_loss", 2, out, "ttttniib", scores, targets, inputs, lengths, 4, 0, 1);
    return calls(m, "koila::ctc_loss_backward", 1, back, "tttttnttib", *y, scores, targets, inputs,
                 lengths, *y, *y + 1, 0, 1);
}

TEST(rules__ctc_is_cut_by_rows)
{
    maker m;
    koila_value y;
    for (int one_after_another = 0; one_after_another < 2; one_after_another++) {
        maker_init(&m, NULL);
        koila_value g = ctc_loss(&m, batch(&m, 1, f32(9, 7, 5)), one_after_another, &y);
        place(&m, g);
        CHECK_EQ(m.status, KOILA_OK);
        CHECK_AT(&m, y, S(0, 1, 1));
        CHECK(koila__is_opaque(at(&m, y + 1)));
        CHECK_AT(&m, g, S(1, 1, 1));
        CHECK_EQ(n_gathered(&m), 0);
        maker_deinit(&m);

        /* a batch in the dimension of the steps or of the classes is none of rows */
        for (uint32_t dim = 0; dim < 3; dim += 2) {
            maker_init(&m, NULL);
            g = ctc_loss(&m, batch(&m, dim, f32(9, 7, 5)), one_after_another, &y);
            place(&m, g);
            CHECK_EQ(m.status, KOILA_OK);
            CHECK_AT(&m, y, R_);
            CHECK_AT(&m, g, R_);
            maker_deinit(&m);
        }
    }
}

TEST(rules__rows_of_a_whole_packed_tensor_go_where_they_are_needed)
{
    maker m;
    for (int is_used = 0; is_used < 2; is_used++) {
        maker_init(&m, NULL);
        const koila_value data = real(&m, f32(40, 5));
        const koila_value places = real(&m, i64(7, 2));
        const koila_value offsets = real(&m, i64(7));
        const koila_value x = batch(&m, 1, f32(7, 7, 5)); /* as many steps as rows */
        const koila_value y =
            call(&m, "koila::unpack_rows", f32(7, 7, 5), "ttt", data, places, offsets);
        const koila_value both = call(&m, "aten::mul.Tensor", f32(7, 7, 5), "tt", x, y);
        place(&m, is_used ? both : y);
        CHECK_EQ(m.status, KOILA_OK);
        CHECK_AT(&m, y, is_used ? S(1, 1, 1) : R_);
        CHECK_EQ(n_gathered(&m), 0);
        maker_deinit(&m);
    }
}

TEST(rules__transposed_rows_are_gathered_once_and_sliced_again)
{ /* a + a.t(): the second use needs the other dimension, so a is made whole by a node of its own */
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 7));
    const koila_value t = call(&m, "aten::t", f32(7, 7), "t", x);
    const koila_value y = call(&m, "aten::add.Tensor", f32(7, 7), "tt", x, t);
    place(&m, y);
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, y, S(0, 1, 1));
    CHECK_EQ(n_nodes_named(&m, "aten::alias"), 1);
    CHECK_EQ(n_gathered(&m), 1);
    maker_deinit(&m);
}

/* ---- attention kernels of CUDA */

#define N_ATTENTION 3

/* q, k, v [7, 2, 5, 8] through kernel `which` of CUDA and back. *grad: the gradient of q. */
static koila_value attention_of_cuda(maker *m, int which, double dropout, koila_value *grad)
{
    const shape full = f32(7, 2, 5, 8);
    const shape none = NO_RESULT;
    const shape seed = i64(1);
    const koila_value x = batch(m, 0, full);
    koila_value y;
    if (which == 0) {
        const shape out[4] = { full, f32(7, 2, 32), seed, seed };
        y = calls(m, "aten::_scaled_dot_product_efficient_attention", 4, out, "tttnbdb", x, x, x, 1,
                  dropout, 0);
        const shape back[4] = { full, full, full, none };
        *grad =
            calls(m, "aten::_scaled_dot_product_efficient_attention_backward", 4, back,
                  "ttttnttttdlb", x, x, x, x, y, y + 1, y + 2, y + 3, dropout, 4, 1, 1, 1, 0, 0);
        return y;
    }
    const shape out[9] = { full, f32(7, 2, 5), none, none, none, none, seed, seed, f32(0) };
    const shape back[3] = { full, full, full };
    if (which == 1) {
        y = calls(m, "aten::_scaled_dot_product_flash_attention", 9, out, "tttdbb", x, x, x,
                  dropout, 0, 0);
        *grad = calls(m, "aten::_scaled_dot_product_flash_attention_backward", 3, back,
                      "ttttttnniidbtt", x, x, x, x, y, y + 1, 5, 5, dropout, 0, y + 6, y + 7);
        return y;
    }
    y = calls(m, "aten::_scaled_dot_product_cudnn_attention", 9, out, "tttnbdbb", x, x, x, 1,
              dropout, 0, 0);
    *grad = calls(m, "aten::_scaled_dot_product_cudnn_attention_backward", 3, back,
                  "ttttttttnnniidb", x, x, x, x, y, y + 1, y + 6, y + 7, 5, 5, dropout, 0);
    return y;
}

TEST(rules__attention_of_cuda_is_cut_without_dropout_and_whole_with_it)
{
    for (int which = 0; which < N_ATTENTION; which++)
        for (int dropout = 0; dropout < 2; dropout++) {
            maker m;
            maker_init(&m, NULL);
            koila_value grad;
            const koila_value y = attention_of_cuda(&m, which, dropout * 0.5, &grad);
            const koila_value both = call(&m, "aten::add.Tensor", f32(7, 2, 5, 8), "tt", y, grad);
            place(&m, both);
            CHECK_AT(&m, y, dropout ? R_ : S(0, 1, 1));
            CHECK_AT(&m, grad, dropout ? R_ : S(0, 1, 1));
            CHECK_EQ(n_gathered(&m) > 0, dropout);
            maker_deinit(&m);
        }
}

/* koila::dropout_attention of q, k, v [7, 2, 5, 8] and of the numbers of 7 rows, and back. */
TEST(rules__attention_with_dropout_is_cut_by_rows_that_know_where_their_numbers_begin)
{
    const shape full = f32(7, 2, 5, 8);
    const shape sums = f32(7, 2, 32);
    const shape out[2] = { full, sums };
    const shape back[3] = { full, full, full };
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, full);
    const koila_value draws = real(&m, i64(7, 2));
    const koila_value y =
        calls(&m, "koila::dropout_attention", 2, out, "tttntbdbni", x, x, x, draws, 1, 0.5, 0, 0);
    const koila_value grad = calls(&m, "koila::dropout_attention_backward", 3, back, "ttttntttdbni",
                                   x, x, x, x, y, y + 1, draws, 0.5, 0, 0);
    place(&m, call(&m, "aten::add.Tensor", full, "tt", y, grad));
    CHECK_AT(&m, y, S(0, 1, 1));
    CHECK_AT(&m, y + 1, S(0, 1, 1));
    CHECK_AT(&m, grad + 2, S(0, 1, 1));
    CHECK_EQ(n_gathered(&m), 0);
    maker_deinit(&m);

    /* heads alone cannot be cut: a slice reads only where its first row begins */
    maker_init(&m, NULL);
    const koila_value by_heads = batch(&m, 1, f32(2, 7, 5, 8));
    const koila_value two = real(&m, i64(2, 2));
    const shape turned[2] = { f32(2, 7, 5, 8), f32(2, 7, 32) };
    const koila_value z = calls(&m, "koila::dropout_attention", 2, turned, "tttntbdbni", by_heads,
                                by_heads, by_heads, two, 1, 0.5, 0, 0);
    place(&m, z);
    CHECK_AT(&m, z, R_);
    CHECK_EQ(n_gathered(&m), 1);
    maker_deinit(&m);
}

/* A buffer that this device leaves empty is no reason to make anything whole. */
TEST(rules__an_empty_buffer_does_not_end_the_loop)
{
    for (int on_cuda = 0; on_cuda < 2; on_cuda++) {
        maker m;
        maker_init(&m, NULL);
        const koila_value x = batch(&m, 0, f32(7, 5));
        const shape out[2] = { f32(7, 5), on_cuda ? f32(0) : f32(7, 5) };
        const koila_value y = calls(&m, "aten::log_sigmoid_forward", 2, out, "t", x);
        const koila_value g = call(&m, "aten::log_sigmoid_backward", f32(7, 5), "ttt", x, x, y + 1);
        const koila_value both = call(&m, "aten::add.Tensor", f32(7, 5), "tt", y, g);
        place(&m, both);
        CHECK_AT(&m, y, S(0, 1, 1));
        CHECK_AT(&m, g, S(0, 1, 1));
        const koila_node n = koila_value_get(m.placed->graph, m.placed->lowered[g]).node;
        const koila_node_info info = koila_node_get(m.placed->graph, n);
        CHECK(m.placed->need[info.first_input + 2].kind != KOILA_R);
        CHECK_EQ(n_gathered(&m), 0);
        maker_deinit(&m);
    }
}

/* cuDNN's layers: an LSTM with one layer, x [4, 7, 3], weights [20, 3] and [20, 5]. *grad: that of
 * x; 1, 2: of the states; 3, 4: of the weights. */
static koila_value cudnn_lstm(maker *m, double dropout, koila_value *grad)
{
    const shape state = f32(1, 7, 5);
    const shape seen[5] = { f32(4, 7, 5), state, state, SHAPE(KOILA_DTYPE_U8, 1920), f32(160) };
    const shape back[5] = { f32(4, 7, 3), state, state, f32(20, 3), f32(20, 5) };
    const koila_value x = batch(m, 1, f32(4, 7, 3));
    const koila_value h = call(m, "aten::zeros", state, "l", 3, 1, 7, 5);
    const koila_value w = real(m, f32(20, 3));
    const koila_value u = real(m, f32(20, 5));
    const koila_value all = real(m, f32(160));
    const koila_value y = calls(m, "aten::_cudnn_rnn", 5, seen, "tTitttiiiibdbbln", x, 2, w, u, 2,
                                all, h, h, 2, 5, 0, 1, 0, dropout, 1, 0, 0);
    *grad = calls(m, "aten::_cudnn_rnn_backward", 5, back, "tTittttttniiiibdbblntl", x, 2, w, u, 2,
                  all, h, h, y, y, h, 2, 5, 0, 1, 0, dropout, 1, 0, 0, y + 3, 4, 1, 1, 1, 1);
    return y;
}

TEST(rules__layers_of_cudnn_are_cut_without_dropout_and_whole_with_it)
{
    for (int dropout = 0; dropout < 2; dropout++) {
        maker m;
        maker_init(&m, NULL);
        koila_value grad;
        const koila_value y = cudnn_lstm(&m, dropout * 0.5, &grad);
        const koila_value all = call(&m, "aten::cat", f32(1), "T", 4, y, grad, grad + 1, grad + 4);
        place(&m, all);
        CHECK_AT(&m, y, dropout ? R_ : S(1, 1, 1));
        CHECK_AT(&m, grad, dropout ? R_ : S(1, 1, 1));
        CHECK_AT(&m, grad + 1, dropout ? R_ : S(1, 1, 1));
        CHECK_AT(&m, grad + 4, dropout ? R_ : P_);
        maker_deinit(&m);
    }
}
