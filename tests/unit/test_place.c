/* test_place.c — claims about the walk: gather by default, FREE factories, writes, P made whole,
 * rewrites. Sizes are all different, but where a size that only looks like the batch is the point.
 */
#include "graph_maker.h"

TEST(place__an_operator_without_a_rule_is_gathered)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value y = call(&m, "aten::nobody_knows", f32(7, 5), "t", x);
    const koila_value z = call(&m, "aten::relu", f32(7, 5), "t", y);
    place(&m, z);
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, y, R_);
    CHECK_AT(&m, z, R_);
    CHECK_EQ(n_gathered(&m), 1);
    maker_deinit(&m);
}

TEST(place__what_was_gathered_can_be_sliced_again)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value y = call(&m, "aten::nobody_knows", f32(7, 5), "t", x);
    const koila_value z = call(&m, "aten::relu", f32(7, 5), "t", y);
    /* no row is where it was: the dimension of the batch's size */
    const koila_value turned = call(&m, "aten::nobody_knows_either", f32(3, 7), "t", z);
    const koila_value small = call(&m, "aten::nor_this", f32(3), "t", y);
    const koila_value both = call(&m, "aten::mul.Tensor", f32(3, 7), "tt", turned,
                                  call(&m, "aten::mean", f32(1), "t", small));
    place_cut(&m, both);
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, y, S(0, 1, 1));
    CHECK_AT(&m, z, S(0, 1, 1));
    CHECK_AT(&m, turned, S(1, 1, 1));
    CHECK_AT(&m, small, R_);
    CHECK_AT(&m, both, S(1, 1, 1));
    CHECK_EQ(n_gathered(&m), 2); /* x, z; y is there whole for who needs it so */
    maker_deinit(&m);
}

TEST(place__a_target_that_was_gathered_is_the_whole_value_as_made)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value y = call(&m, "aten::nobody_knows", f32(7, 5), "t", x);
    place_cut(&m, y);
    CHECK_AT(&m, y, R_);
    maker_deinit(&m);
}

TEST(place__linear_layer_and_its_weight_gradient)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value w = real(&m, f32(3, 5));
    const koila_value b = real(&m, f32(3));
    const koila_value wt = call(&m, "aten::t", f32(5, 3), "t", w);
    const koila_value y = call(&m, "aten::addmm", f32(7, 3), "ttt", b, x, wt);
    const koila_value yt = call(&m, "aten::t", f32(3, 7), "t", y);
    const koila_value gw = call(&m, "aten::mm", f32(3, 5), "tt", yt, x);
    const koila_value gwt = call(&m, "aten::t", f32(5, 3), "t", gw);
    const koila_value gb = call(&m, "aten::sum.dim_IntList", f32(1, 3), "tlb", y, 1, 0, 1);
    const koila_value both = call(&m, "aten::mul.Tensor", f32(5, 3), "tt", gwt, gb);
    place(&m, both);
    CHECK_AT(&m, y, S(0, 1, 1));
    CHECK_AT(&m, yt, S(1, 1, 1));
    CHECK_AT(&m, gw, P_);
    CHECK_AT(&m, gwt, P_);
    CHECK_AT(&m, gb, P_);
    CHECK_AT(&m, both, R_); /* a product of two partial sums is not linear: both become whole */
    CHECK_EQ(n_gathered(&m), 0);
    maker_deinit(&m);
}

TEST(place__a_size_that_equals_the_batch_means_nothing)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(4, 4));
    const koila_value w = real(&m, f32(4, 4));
    const koila_value b = real(&m, f32(4));
    const koila_value y = call(&m, "aten::mm", f32(4, 4), "tt", x, w);
    const koila_value z = call(&m, "aten::add.Tensor", f32(4, 4), "tt", y, b);
    const koila_value s = call(&m, "aten::sum.dim_IntList", f32(4), "tl", z, 1, 1);
    place(&m, s);
    const koila_node_info n = koila_node_get(m.placed->graph, 1);
    CHECK_AT(&m, y, S(0, 1, 1));
    CHECK_EQ(m.placed->need[n.first_input + 1].kind, KOILA_R); /* the bias lies along dimension 1 */
    CHECK_AT(&m, s, S(0, 1, 1));
    maker_deinit(&m);
}

TEST(place__view_keeps_the_factor_through_merge_and_split)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 1, f32(3, 7, 5)); /* time first */
    const koila_value a = call(&m, "aten::view", f32(21, 5), "tl", x, 2, 21, 5);
    const koila_value b = call(&m, "aten::view", f32(3, 7, 5), "tl", a, 3, 3, 7, 5);
    const koila_value y = batch(&m, 0, f32(7, 3, 5));
    const koila_value c = call(&m, "aten::view", f32(21, 5), "tl", y, 2, 21, 5);
    const koila_value d = call(&m, "aten::view", f32(105), "tl", c, 1, 105);
    const koila_value lost = call(&m, "aten::view", f32(35, 3), "tl", x, 2, 35, 3);
    const koila_value all = call(&m, "aten::cat", f32(1), "T", 4, b, d, lost, a);
    place(&m, all);
    CHECK_AT(&m, a, S(0, 3, 1));
    CHECK_AT(&m, b, S(1, 1, 1));
    CHECK_AT(&m, c, S(0, 1, 3));
    CHECK_AT(&m, d, S(0, 1, 15));
    CHECK_AT(&m, lost, R_);
    maker_deinit(&m);
}

TEST(place__a_factory_follows_its_first_sharded_use)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 7));
    const koila_value z = call(&m, "aten::zeros", f32(7, 7), "l", 2, 7, 7);
    const koila_value t = call(&m, "aten::t", f32(7, 7), "t", z);
    const koila_value h = call(&m, "aten::exp", f32(7, 7), "t", t);
    const koila_value y = call(&m, "aten::add.Tensor", f32(7, 7), "tt", x, h);
    place(&m, y);
    CHECK_AT(&m, y, S(0, 1, 1));
    CHECK_AT(&m, h, S(0, 1, 1));
    CHECK_AT(&m, z, S(1, 1, 1)); /* transposed on the way */
    CHECK_EQ(m.placed->node[0].fix[0].kind, KOILA__FIX_SIZES);
    CHECK_EQ(n_gathered(&m), 0);
    maker_deinit(&m);
}

TEST(place__a_factory_is_found_above_a_chain_of_any_length)
{
    enum { LENGTH = 2000 };
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value z = call(&m, "aten::zeros", f32(7, 5), "l", 2, 7, 5);
    koila_value h = z;
    for (uint32_t i = 0; i < LENGTH; i++)
        h = call(&m, "aten::exp", f32(7, 5), "t", h);
    const koila_value y = call(&m, "aten::add.Tensor", f32(7, 5), "tt", x, h);
    place(&m, y);
    CHECK_AT(&m, y, S(0, 1, 1));
    CHECK_AT(&m, h, S(0, 1, 1));
    CHECK_AT(&m, z, S(0, 1, 1));
    CHECK_EQ(n_gathered(&m), 0);
    maker_deinit(&m);
}

TEST(place__a_factory_nobody_shards_is_whole)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value z = call(&m, "aten::full", f32(7, 2), "ld", 2, 7, 2, 1.5);
    const koila_value w = real(&m, f32(7, 2));
    const koila_value y = call(&m, "aten::mul.Tensor", f32(7, 2), "tt", z, w);
    const koila_value x = batch(&m, 0, f32(7, 2));
    const koila_value s = call(&m, "aten::sum", scalar, "t", y);
    const koila_value r = call(&m, "aten::mul.Tensor", f32(7, 2), "tt", x, s);
    place(&m, r);
    CHECK_AT(&m, z, R_);
    CHECK_AT(&m, s, R_);
    CHECK_AT(&m, r, S(0, 1, 1));
    maker_deinit(&m);
}

TEST(place__a_write_into_a_view_of_a_factory_shards_the_base)
{ /* T5: shifted = new_zeros(B, T); shifted[:, 1:] = labels[:, :-1] */
    maker m;
    maker_init(&m, NULL);
    const koila_value labels = batch(&m, 0, f32(7, 5));
    const koila_value base = call(&m, "aten::zeros", f32(7, 5), "l", 2, 7, 5);
    const koila_value most = call(&m, "aten::slice.Tensor", f32(7, 4), "tiii", labels, 1, 0, -1);
    chain(&m, "aten::slice.Tensor", f32(7, 5), f32(7, 4), "tiii", 1, 1, 2147483647);
    const koila_value shifted = call(&m, "aten::copy_", NO_RESULT, "tt", base, most);
    place(&m, shifted);
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, base, S(0, 1, 1));
    CHECK_AT(&m, shifted, S(0, 1, 1));
    CHECK_EQ(n_gathered(&m), 0);
    maker_deinit(&m);
}

TEST(place__a_write_at_one_row_of_the_batch_gathers_the_base)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value w = real(&m, f32(5));
    chain(&m, "aten::select.int", f32(7, 5), f32(5), "tii", 0, 2);
    const koila_value y = call(&m, "aten::copy_", NO_RESULT, "tt", x, w);
    place(&m, y);
    CHECK_AT(&m, y, R_);
    CHECK_EQ(n_gathered(&m), 1);
    maker_deinit(&m);
}

TEST(place__in_place_relu_is_relu_on_the_slice)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value y = call(&m, "aten::exp", f32(7, 5), "t", x);
    const koila_value z = call(&m, "aten::relu_", NO_RESULT, "t", y);
    place(&m, z);
    CHECK_AT(&m, z, S(0, 1, 1));
    maker_deinit(&m);
}

TEST(place__a_running_total_of_partial_sums_stays_partial)
{ /* total = zeros(5); total += sums: the zeros are a partial sum of zeros */
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value loss = call(&m, "aten::sum.dim_IntList", f32(5), "tl", x, 1, 0);
    const koila_value total = call(&m, "aten::zeros", f32(5), "l", 1, 5);
    const koila_value t = call(&m, "aten::add_.Tensor", NO_RESULT, "tt", total, loss);
    place(&m, t);
    CHECK_AT(&m, total, P_);
    CHECK_AT(&m, t, P_);
    maker_deinit(&m);
}

TEST(place__nll_loss_mean_divides_by_a_weight_that_needs_targets_only)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value t = batch(&m, 0, i64(7));
    const shape outs[2] = { scalar, scalar };
    const koila_value lp = call(&m, "aten::_log_softmax", f32(7, 5), "tib", x, 1, 0);
    const koila_value loss = calls(&m, "aten::nll_loss_forward", 2, outs, "ttnii", lp, t, 1, -100);
    const koila_value g = call(&m, "aten::full", scalar, "ld", 0, 1.0);
    const koila_value gx =
        call(&m, "aten::nll_loss_backward", f32(7, 5), "tttniit", g, lp, t, 1, -100, loss + 1);
    const koila_value two = call(&m, "aten::mul.Tensor", f32(7, 5), "tt", gx, loss);
    place(&m, two);
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, loss, R_); /* divided once */
    CHECK_AT(&m, loss + 1, P_);
    CHECK_AT(&m, gx, S(0, 1, 1));
    CHECK_EQ(n_gathered(&m), 0);
    CHECK_EQ(n_nodes_named(&m, "aten::ne.Scalar"), 1);
    maker_deinit(&m);
}

TEST(place__nll_loss_over_sliced_classes_is_a_partial_sum)
/* logits.t() of a contrastive loss; the batch is 7, and so is the number of classes of neither
 * other call */
{
    maker m;
    maker_init(&m, NULL);
    const koila_value a = batch(&m, 0, f32(7, 5));
    const koila_value b = real(&m, f32(3, 5));
    const koila_value bt = call(&m, "aten::t", f32(5, 3), "t", b);
    const koila_value logits = call(&m, "aten::mm", f32(7, 3), "tt", a, bt);
    const koila_value x = call(&m, "aten::t", f32(3, 7), "t", logits);
    const koila_value t = real(&m, i64(3));
    const shape outs[2] = { scalar, scalar };
    const koila_value lp = call(&m, "aten::_log_softmax", f32(3, 7), "tib", x, 1, 0);
    const koila_value loss = calls(&m, "aten::nll_loss_forward", 2, outs, "ttnii", lp, t, 1, -100);
    const koila_value g = call(&m, "aten::full", scalar, "ld", 0, 1.0);
    const koila_value gx =
        call(&m, "aten::nll_loss_backward", f32(3, 7), "tttniit", g, lp, t, 1, -100, loss + 1);
    const koila_value gl =
        call(&m, "aten::_log_softmax_backward_data", f32(3, 7), "ttii", gx, lp, 1, 6);
    const koila_value two = call(&m, "aten::mul.Tensor", f32(3, 7), "tt", gl, loss);
    place(&m, two);
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, x, S(1, 1, 1));
    CHECK_AT(&m, loss, R_);
    CHECK_AT(&m, gx, S(1, 1, 1));
    CHECK_AT(&m, gl, S(1, 1, 1));
    CHECK_EQ(n_gathered(&m), 0);
    CHECK(n_nodes_named(&m, "aten::nll_loss_forward") == 0 &&
          n_nodes_named(&m, "aten::nll_loss_backward") == 0);
    maker_deinit(&m);
}

TEST(place__nll_loss_over_sliced_classes_needs_the_targets_of_the_batch_whole)
{ /* as many classes as rows: both look like the batch, only the targets are gathered */
    maker m;
    maker_init(&m, NULL);
    const koila_value a = batch(&m, 0, f32(7, 7));
    const koila_value x = call(&m, "aten::t", f32(7, 7), "t", a);
    const koila_value t = batch(&m, 0, i64(7));
    const shape outs[2] = { scalar, scalar };
    const koila_value loss = calls(&m, "aten::nll_loss_forward", 2, outs, "ttnii", x, t, 2, -100);
    place(&m, loss);
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, x, S(1, 1, 1));
    CHECK_AT(&m, loss, P_);
    CHECK_EQ(n_gathered(&m), 1);
    maker_deinit(&m);
}

TEST(place__a_product_of_two_sliced_factors_gathers_one)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value a = batch(&m, 0, f32(7, 5));
    const koila_value b = batch(&m, 0, f32(7, 3));
    const koila_value w = real(&m, f32(3, 5));
    const koila_value c = call(&m, "aten::mm", f32(7, 5), "tt", b, w);
    const koila_value ct = call(&m, "aten::t", f32(5, 7), "t", c);
    const koila_value s = call(&m, "aten::mm", f32(7, 7), "tt", a, ct);
    const koila_value st = call(&m, "aten::t", f32(7, 7), "t", s);
    const koila_value ga = call(&m, "aten::mm", f32(7, 5), "tt", s, c);
    const koila_value gc = call(&m, "aten::mm", f32(7, 5), "tt", st, a);
    const koila_value both = call(&m, "aten::mul.Tensor", f32(7, 5), "tt", ga, gc);
    place(&m, both);
    CHECK_AT(&m, s, S(0, 1, 1));
    CHECK_AT(&m, ga, S(0, 1, 1));
    CHECK_AT(&m, gc, P_); /* of the side that was gathered: a partial sum */
    CHECK_EQ(m.placed->need[koila_node_get(m.placed->graph, 2).first_input].kind, KOILA_S);
    CHECK_EQ(m.placed->need[koila_node_get(m.placed->graph, 2).first_input + 1].kind, KOILA_R);
    CHECK_EQ(n_gathered(&m), 2); /* c and c.t() */
    maker_deinit(&m);
}

TEST(place__training_batch_norm_has_one_barrier_of_statistics)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 3, 4, 5));
    const koila_value w = real(&m, f32(3));
    const koila_value b = real(&m, f32(3));
    const koila_value rm = real(&m, f32(3));
    const koila_value rv = real(&m, f32(3));
    const shape outs[5] = { f32(7, 3, 4, 5), f32(3), f32(3), f32(3), f32(3) };
    const koila_value y = calls(&m, "aten::_native_batch_norm_legit_functional", 5, outs,
                                "tttttbdd", x, w, b, rm, rv, 1, 0.1, 1e-5);
    const shape back[3] = { f32(7, 3, 4, 5), f32(3), f32(3) };
    const koila_value g = calls(&m, "aten::native_batch_norm_backward", 3, back, "tttttttbdl", y, x,
                                w, rm, rv, y + 1, y + 2, 1, 1e-5, 3, 1, 1, 1);
    const koila_value all = call(&m, "aten::cat", f32(1), "T", 4, g, g + 1, g + 2, y + 3);
    place(&m, all);
    CHECK_EQ(m.status, KOILA_OK);
    CHECK_AT(&m, y, S(0, 1, 1));
    CHECK_AT(&m, y + 1, R_);
    CHECK_AT(&m, y + 4, R_);
    CHECK_AT(&m, g, S(0, 1, 1));
    CHECK_AT(&m, g + 1, P_);
    CHECK_EQ(n_nodes_named(&m, "koila::moments"), 1);
    maker_deinit(&m);
}

/* CUDA's kernel reads the saved statistics in every mode, and wants a weight to make gw like. */
/* Inputs of the call that gives the sums of batch norm's backward, on a device. */
static uint32_t n_inputs_of_batch_norm_sums(uint16_t device, bool has_weight)
{
    maker m;
    maker_init(&m, NULL);
    m.device = device;
    const koila_value x = batch(&m, 0, f32(7, 3, 4, 5));
    const koila_value stat = real(&m, f32(3));
    const shape back[3] = { f32(7, 3, 4, 5), f32(3), f32(3) };
    const koila_value g = has_weight
                              ? calls(&m, "aten::native_batch_norm_backward", 3, back, "tttnnttbdl",
                                      x, x, stat, stat, stat, 1, 1e-5, 3, 1, 1, 1)
                              : calls(&m, "aten::native_batch_norm_backward", 3, back, "ttnnnttbdl",
                                      x, x, stat, stat, 1, 1e-5, 3, 1, 1, 1);
    const koila_value all = call(&m, "aten::cat", f32(1), "T", 3, g, g + 1, g + 2);
    uint32_t n_inputs = 0;
    place(&m, all);
    CHECK_AT(&m, g, S(0, 1, 1));
    CHECK_AT(&m, g + 1, P_);
    for (uint32_t n = 0; n < koila_graph_n_nodes(m.placed->graph); n++) {
        const koila_node_info node = koila_node_get(m.placed->graph, n);
        const koila_sig_info *sig = koila_sig_get(m.table, node.sig);
        if (strcmp(koila_op_name(m.table, sig->op), "aten::native_batch_norm_backward") == 0)
            n_inputs += sig->n_inputs;
    }
    maker_deinit(&m);
    return n_inputs;
}

TEST(place__the_sums_of_batch_norm_are_given_all_that_cuda_asks_for)
{
    const uint16_t cuda = 0x100;
    /* gradient, x, weight, running and saved statistics; the CPU needs no saved ones */
    CHECK_EQ(n_inputs_of_batch_norm_sums(cuda, true), 7);
    CHECK_EQ(n_inputs_of_batch_norm_sums(cuda, false), 7);
    CHECK_EQ(n_inputs_of_batch_norm_sums(0, true), 5);
    CHECK_EQ(n_inputs_of_batch_norm_sums(0, false), 4);
}

TEST(place__a_softmax_along_the_batch_lies_as_it_was_recorded)
{
    for (int is_transposed = 0; is_transposed < 2; is_transposed++) {
        maker m;
        maker_init(&m, NULL);
        const int64_t size[2] = { 5, 7 }, stride[2] = { 1, 5 };
        koila_meta like;
        koila_value x = 0;
        axis(&m, 7);
        CHECK_EQ(koila_table_meta(m.table, KOILA_DTYPE_F32, 0, 2, size,
                                  is_transposed ? stride : NULL, &like),
                 KOILA_OK);
        CHECK_EQ(koila_graph_leaf(m.graph, like, KOILA_LEAF_BATCH, 0, 1, NULL, &x), KOILA_OK);
        const koila_value y = call(&m, "aten::_softmax", f32(5, 7), "tib", x, 1, 0);
        const koila_value flat = call(&m, "aten::view", f32(35), "tl", y, 1, 35);
        place(&m, flat);
        CHECK_AT(&m, flat, S(0, 5, 1));
        CHECK_EQ(n_nodes_named(&m, "koila::laid_out"), is_transposed);
        maker_deinit(&m);
    }
}

TEST(place__two_axes_in_one_call_keep_the_longer)
{
    maker m;
    maker_init(&m, NULL);
    const uint16_t a = axis(&m, 7);
    const uint16_t b = axis(&m, 11);
    const koila_value x = leaf(&m, KOILA_LEAF_BATCH, a, 0, f32(7, 5));
    const koila_value y = leaf(&m, KOILA_LEAF_BATCH, b, 1, f32(5, 11));
    const koila_value z = call(&m, "aten::mm", f32(7, 11), "tt", x, y);
    place(&m, z);
    const koila_placement p = at(&m, z);
    CHECK(p.kind == KOILA_S && p.axis == b && p.dim == 1);
    maker_deinit(&m);
}

TEST(place__whole_is_the_recorded_graph)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value t = batch(&m, 0, i64(7));
    const shape outs[2] = { scalar, scalar };
    const koila_value loss = calls(&m, "aten::nll_loss_forward", 2, outs, "ttnii", x, t, 1, -100);
    CHECK_EQ(koila__place_whole(m.graph, &loss, 1, NULL, &m.placed, NULL), KOILA_OK);
    CHECK_EQ(koila_graph_n_nodes(m.placed->graph), 1);
    CHECK_AT(&m, loss, R_);
    CHECK_AT(&m, x, R_);
    CHECK(koila__placed_check(m.placed, NULL));
    maker_deinit(&m);
}

TEST(place__every_failed_allocation_is_a_status_and_leaks_nothing)
{
    uint64_t at_call = 0;
    for (uint64_t n = 1; n < 4000; n++) {
        failing_allocator f = { .at = n };
        const koila_allocator mem = { failing_realloc, &f };
        maker m;
        maker_init(&m, &mem);
        if (m.status == KOILA_OK) {
            const koila_value x = batch(&m, 0, f32(7, 3, 4, 5));
            const koila_value w = real(&m, f32(3));
            const koila_value rm = real(&m, f32(3));
            const shape outs[5] = { f32(7, 3, 4, 5), f32(3), f32(3), f32(3), f32(3) };
            const koila_value y = calls(&m, "aten::_native_batch_norm_legit_functional", 5, outs,
                                        "tttttbdd", x, w, w, rm, rm, 1, 0.1, 1e-5);
            const koila_value z = call(&m, "aten::zeros", f32(7, 3, 4, 5), "l", 4, 7, 3, 4, 5);
            const koila_value s = call(&m, "aten::add.Tensor", f32(7, 3, 4, 5), "tt", y, z);
            if (m.status == KOILA_OK)
                place(&m, s);
        }
        CHECK(m.status == KOILA_OK || m.status == KOILA_NO_MEMORY);
        maker_deinit(&m);
        CHECK_EQ(f.n_live_bytes, 0);
        at_call = n;
        if (f.n_calls < n)
            break;
    }
    CHECK(at_call > 20);
}
