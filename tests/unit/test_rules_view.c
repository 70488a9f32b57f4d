/* test_rules_view.c — claims about views: where the batch is after a reshape, and what a view may
 * not do to it. */
#include "graph_maker.h"

/* place one call on a batched leaf, give the placement of its first result */
static koila_placement placed_view(uint32_t dim, shape from, const char *op, shape to,
                                   const char *fmt, ...)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, dim, from);
    va_list ap;
    va_start(ap, fmt);
    CHECK_EQ(x, 0); /* what the format's first 't' is given */
    const koila_value y = call_v(&m, op, KOILA_OP_VIEW, 1, &to, NULL, scalar, fmt, ap);
    va_end(ap);
    place(&m, y);
    CHECK_EQ(m.status, KOILA_OK);
    const koila_placement p = m.status == KOILA_OK ? at(&m, y) : R_;
    maker_deinit(&m);
    return p;
}
#define IS(p, want) CHECK(koila__placement_equal((p), (want)))

TEST(view__merging_dims_before_the_batch_makes_outer)
{
    IS(placed_view(1, f32(3, 7, 5), "aten::view", f32(21, 5), "tl", 0, 2, 21, 5), S(0, 3, 1));
}
TEST(view__merging_dims_after_the_batch_makes_inner)
{
    IS(placed_view(0, f32(7, 3, 5), "aten::view", f32(21, 5), "tl", 0, 2, 21, 5), S(0, 1, 3));
}
TEST(view__merging_both_sides)
{
    IS(placed_view(1, f32(2, 7, 3), "aten::view", f32(42), "tl", 0, 1, 42), S(0, 2, 3));
}
TEST(view__a_split_batch_is_gathered)
{
    IS(placed_view(0, f32(6, 5), "aten::view", f32(2, 3, 5), "tl", 0, 3, 2, 3, 5), R_);
}
TEST(view__dims_of_size_one_come_and_go)
{
    IS(placed_view(0, f32(7, 1, 5), "aten::view", f32(1, 7, 5, 1), "tl", 0, 4, 1, 7, 5, 1),
       S(1, 1, 1));
}
TEST(view__an_empty_tensor_is_gathered)
{
    IS(placed_view(0, f32(7, 0), "aten::view", f32(0, 7), "tl", 0, 2, 0, 7), R_);
}
TEST(view__squeeze_keeps_a_batch_of_many)
{
    IS(placed_view(1, f32(1, 7, 1, 5), "aten::squeeze", f32(7, 5), "t", 0), S(0, 1, 1));
}
TEST(view__squeeze_of_a_batch_of_one_is_gathered)
{
    IS(placed_view(0, f32(1, 5), "aten::squeeze", f32(5), "t", 0), R_);
}
TEST(view__select_on_the_batch_is_gathered)
{
    IS(placed_view(0, f32(7, 5), "aten::select.int", f32(5), "tii", 0, 0, 2), R_);
}
TEST(view__select_beside_the_batch_moves_it)
{
    IS(placed_view(2, f32(3, 5, 7), "aten::select.int", f32(5, 7), "tii", 0, 0, 2), S(1, 1, 1));
}
TEST(view__slice_of_part_of_the_batch_is_gathered)
{
    IS(placed_view(0, f32(7, 5), "aten::slice.Tensor", f32(6, 5), "tiii", 0, 0, 1, 7), R_);
}
TEST(view__slice_of_the_whole_batch_is_an_alias)
{
    IS(placed_view(0, f32(7, 5), "aten::slice.Tensor", f32(7, 5), "tiii", 0, 0, 0, 99), S(0, 1, 1));
}
TEST(view__slice_with_a_step_over_the_batch_is_gathered)
{
    IS(placed_view(0, f32(7, 5), "aten::slice.Tensor", f32(4, 5), "tiiii", 0, 0, 0, 7, 2), R_);
}
TEST(view__permute_follows)
{
    IS(placed_view(1, f32(3, 7, 5), "aten::permute", f32(5, 3, 7), "tl", 0, 3, 2, 0, 1),
       S(2, 1, 1));
}
TEST(view__transpose_wraps_negative_dims)
{
    IS(placed_view(0, f32(7, 3, 5), "aten::transpose.int", f32(5, 3, 7), "tii", 0, 0, -1),
       S(2, 1, 1));
}
TEST(view__diagonal_through_the_batch_is_gathered)
{
    IS(placed_view(0, f32(7, 7), "aten::diagonal", f32(7), "t", 0), R_);
}
TEST(view__expand_keeps_it)
{
    IS(placed_view(0, f32(7, 1), "aten::expand", f32(3, 7, 4), "tl", 0, 3, 3, -1, 4), S(1, 1, 1));
}
TEST(view__a_batch_of_one_row_that_is_broadcast_is_gathered)
{
    IS(placed_view(0, f32(1, 5), "aten::expand", f32(4, 5), "tl", 0, 2, 4, 5), R_);
}

TEST(view__halves_of_a_concatenation_are_slices_again)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value y = batch(&m, 0, f32(7, 5));
    const koila_value z = call(&m, "aten::cat", f32(14, 5), "T", 2, x, y);
    const koila_value b = call(&m, "aten::slice.Tensor", f32(7, 5), "tiii", z, 0, 7, 14);
    const koila_value odd = call(&m, "aten::slice.Tensor", f32(6, 5), "tiii", z, 0, 3, 9);
    const koila_value r = call(&m, "aten::cat", f32(27, 5), "T", 3, z, b, odd);
    place(&m, r);
    CHECK_AT(&m, z, S(0, 2, 1));
    CHECK_AT(&m, b, S(0, 1, 1));
    CHECK_AT(&m, odd, R_);
    maker_deinit(&m);
}

TEST(view__a_concatenation_with_what_has_no_rows_is_cut_as_without)
{
    maker m;
    maker_init(&m, NULL);
    const koila_value x = batch(&m, 0, f32(7, 5));
    const koila_value none = real(&m, f32(0, 5));
    const koila_value z = call(&m, "aten::cat", f32(7, 5), "T", 3, none, x, none);
    place(&m, z);
    CHECK_AT(&m, z, S(0, 1, 1));
    CHECK_EQ(m.placed->need[0].kind, KOILA_R);
    CHECK_EQ(n_gathered(&m), 0);
    maker_deinit(&m);
}
