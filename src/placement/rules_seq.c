/* rules_seq.c — recurrent layers: the rows of the batch are independent. */
#include "placement/rules.h"

/* mkldnn_rnn_layer(x[T, N, C], w0, w1, w2, w3, hx[N, H], cx[N, H], ...) -> out[T, N, H], hy[N, H],
 * cy[N, H], workspace. Time is always dimension 0 here, whatever batch_first says: the caller has
 * transposed. `batch_sizes` (packed sequences) must be empty. */
static bool is_empty_list(const koila__case *c, uint32_t pos)
{
    const koila_arg *a = koila__arg(c, pos);
    return a && a->kind == KOILA_ARG_LIST && a->n == 0;
}

bool koila__rule_rnn_layer(koila__case *c)
{
    if (koila__any_p(c) || c->n_in != 7 || c->n_out != 4 || !is_empty_list(c, 8) ||
        c->in_meta[0]->n_dims != 3)
        return false;
    koila_placement p;
    if (koila__is_s(c->in[0]))
        p = c->in[0];
    else if (koila__is_s(c->in[5]))
        p = koila__moved(c->in[5], 1);
    else if (koila__is_s(c->in[6]))
        p = koila__moved(c->in[6], 1);
    else
        return false;
    const koila_placement h = koila__moved(p, 0);
    if (p.dim != 1 || !koila__need(c, 0, p) || !koila__need(c, 5, h) || !koila__need(c, 6, h))
        return false;
    for (uint32_t i = 1; i < 5; i++)
        koila__need_r(c, i);
    c->out[0] = p;
    c->out[1] = h;
    c->out[2] = h;
    if (c->out_meta[3])
        c->out[3] = c->out_meta[3]->n_dims ? koila__opaque(c) : koila__r();
    return true;
}

/* ..._backward(x, w1..w4, hx, cx, out, hy, cy, grad_out?, grad_hy?, grad_cy?, ..., batch_sizes at
 * 20, batch_first, workspace) -> gx, gw1..gw4, ghx, gcx */
bool koila__rule_rnn_layer_backward(koila__case *c)
{
    if (koila__any_p(c) || c->n_in < 11 || c->n_out != 7 || !is_empty_list(c, 20) ||
        c->in_meta[0]->n_dims != 3)
        return false;
    const uint32_t work = koila__input_at(c, 22);
    if (work == KOILA_NONE || !koila__is_opaque(c->in[work]) || !koila__is_s(c->in[0]) ||
        c->in[0].dim != 1)
        return false;
    const koila_placement p = c->in[0];
    const koila_placement h = koila__moved(p, 0);
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (i == work)
            continue;
        if (i >= 1 && i <= 4)
            koila__need_r(c, i);
        else if (!koila__need(c, i, c->in_meta[i]->n_dims == 3 ? p : h))
            return false;
    }
    for (uint32_t j = 0; j < 7; j++)
        if (c->out_meta[j])
            c->out[j] = j < 5 ? koila__p(c, KOILA_SUM) : h;
    c->out[0] = p;
    return true;
}

/* cuDNN's layers: x [T, N, C], or [N, T, C] with batch_first; hx and cx [layers, N, H]. Sequences
 * are not packed, and nothing is dropped between the layers. */
typedef struct cudnn_layers {
    koila_placement x, h;
} cudnn_layers;

/* pos_first is batch_first's; dropout, train, bidirectional and batch_sizes follow. */
static bool cudnn_layers_of(const koila__case *c, uint32_t pos_first, cudnn_layers *l)
{
    bool is_batch_first, train;
    double dropout;
    if (koila__any_p(c) || !koila__arg_bool(c, pos_first, false, &is_batch_first) ||
        !koila__arg_number(c, pos_first + 1, 0, &dropout) ||
        !koila__arg_bool(c, pos_first + 2, false, &train) || (train && dropout != 0) ||
        !is_empty_list(c, pos_first + 4) || c->in_meta[0]->n_dims != 3)
        return false;
    const uint32_t dim = is_batch_first ? 0 : 1;
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (!koila__is_s(c->in[i]) || koila__is_opaque(c->in[i]))
            continue;
        l->x = koila__moved(c->in[i], dim);
        l->h = koila__moved(c->in[i], 1);
        return koila__fits(c, l->x, c->in_meta[0]);
    }
    return false;
}

/* Input at `pos` of the call, when there is one, must be p. */
static bool need_at(koila__case *c, uint32_t pos, koila_placement p)
{
    const uint32_t i = koila__input_at(c, pos);
    return i == KOILA_NONE ? koila__is_absent(c, pos) : koila__need(c, i, p);
}

/* _cudnn_rnn(x, weights, stride0, weight_buf?, hx, cx?, mode, hidden, proj, layers, batch_first,
 * dropout, train, bidirectional, batch_sizes, dropout_state?) -> out, hy, cy, reserve, weight_buf.
 * The last is the argument of that name, which capture reads in its place. */
bool koila__rule_cudnn_rnn(koila__case *c)
{
    cudnn_layers l;
    if (c->n_out != 5 || !c->out_meta[3] || !cudnn_layers_of(c, 10, &l))
        return false;
    if (koila__input_at(c, 3) == KOILA_NONE || koila__input_at(c, 4) == KOILA_NONE)
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        koila__need_r(c, i);
    if (!need_at(c, 0, l.x) || !need_at(c, 4, l.h) || !need_at(c, 5, l.h))
        return false;
    c->out[0] = l.x;
    c->out[1] = l.h;
    c->out[2] = koila__is_absent(c, 5) ? koila__p(c, KOILA_SUM) : l.h;
    c->out[3] = koila__opaque(c);
    c->out[4] = koila__p(c, KOILA_SUM);
    return true;
}

/* _cudnn_rnn_backward(x, weights, stride0, weight_buf, hx, cx?, out, grad_out?, grad_hy?, grad_cy?,
 * mode, hidden, proj, layers, batch_first, dropout, train, bidirectional, batch_sizes,
 * dropout_state?, reserve, mask) -> gx, ghx, gcx, [gw...] */
bool koila__rule_cudnn_rnn_backward(koila__case *c)
{
    cudnn_layers l;
    const uint32_t work = koila__input_at(c, 20);
    if (c->n_out < 3 || work == KOILA_NONE || !koila__is_opaque(c->in[work]) ||
        !cudnn_layers_of(c, 14, &l))
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (i != work)
            koila__need_r(c, i);
    if (!need_at(c, 0, l.x) || !need_at(c, 6, l.x) || !need_at(c, 7, l.x) || !need_at(c, 4, l.h) ||
        !need_at(c, 5, l.h) || !need_at(c, 8, l.h) || !need_at(c, 9, l.h))
        return false;
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j])
            c->out[j] = j < 3 ? l.h : koila__p(c, KOILA_SUM);
    c->out[0] = l.x;
    return true;
}

/* ---- packed sequences: koila::packed_rnn and its like, see python/koila/_recurrent.py. x and all
 * that is padded is [T, B, ...]; `places` [B, 2] holds the length of each row and its rank. Rows
 * are independent, and those of a slice are a packed batch again. */

/* The rows of a padded tensor, from the first of n inputs that is cut along them. */
static bool padded_rows(const koila__case *c, uint32_t n, koila_placement *rows)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t dim = c->in_meta[i]->n_dims == 2 ? 0 : 1;
        if (koila__is_s(c->in[i]) && !koila__is_opaque(c->in[i]) && c->in[i].dim == dim) {
            *rows = koila__moved(c->in[i], 1);
            return true;
        }
    }
    return false;
}

/* packed_rnn(x, places, hx?, cx?, weights, ...) -> out, h, c, workspace */
bool koila__rule_packed_rnn(koila__case *c)
{
    koila_placement rows;
    if (c->n_out != 4 || c->n_in < 2 || !padded_rows(c, c->n_in, &rows))
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        koila__need_r(c, i);
    if (!need_at(c, 0, rows) || !need_at(c, 1, koila__moved(rows, 0)) || !need_at(c, 2, rows) ||
        !need_at(c, 3, rows))
        return false;
    for (uint32_t j = 0; j < 3; j++)
        c->out[j] = c->out_meta[j]->n_elements ? rows : koila__p(c, KOILA_SUM);
    c->out[3] = koila__opaque(c);
    return true;
}

/* packed_rnn_backward(g_out?, g_h?, g_c?, x, places, hx?, cx?, weights, workspace, out?, ...) ->
 * gx, ghx, gcx, [gw...] */
bool koila__rule_packed_rnn_backward(koila__case *c)
{
    const uint32_t work = koila__input_at(c, 8);
    koila_placement rows;
    if (c->n_out < 3 || work == KOILA_NONE || !koila__is_opaque(c->in[work]) ||
        !padded_rows(c, c->n_in, &rows))
        return false;
    for (uint32_t i = 0; i < c->n_in; i++)
        if (i != work)
            koila__need_r(c, i);
    if (!need_at(c, 4, koila__moved(rows, 0)))
        return false;
    static const uint32_t padded[] = { 0, 1, 2, 3, 5, 6, 9 };
    for (uint32_t k = 0; k < sizeof padded / sizeof padded[0]; k++)
        if (!need_at(c, padded[k], rows))
            return false;
    for (uint32_t j = 0; j < c->n_out; j++)
        c->out[j] = j < 3 && c->out_meta[j]->n_elements ? rows : koila__p(c, KOILA_SUM);
    return true;
}

/* unpack_rows(data, places, offsets) -> padded. From whole data each slice takes its rows. */
bool koila__rule_unpack_rows(koila__case *c)
{
    koila_placement rows;
    if (c->n_in != 3 || c->n_out != 1)
        return false;
    if (koila__is_s(c->in[1]) && c->in[1].dim == 0)
        rows = koila__moved(c->in[1], 1);
    else if (c->want && koila__is_s(*c->want) && c->want->dim == 1)
        rows = *c->want;
    else
        return false;
    koila__need_r(c, 0);
    koila__need_r(c, 2);
    if (!koila__need(c, 1, koila__moved(rows, 0)) || !koila__fits(c, rows, c->out_meta[0]))
        return false;
    c->out[0] = rows;
    return true;
}

/* Cells of one step, as a GPU runs them: the first n_rows inputs have a row per sample, the others
 * (biases) are whole. Of the results, the first n_rows_out have rows; the others, gradients of
 * biases, are sums over the rows. */
static bool fused_cell(koila__case *c, uint32_t n_rows, uint32_t n_rows_out)
{
    const uint32_t lead = koila__lead_among(c, n_rows);
    if (koila__any_p(c) || c->n_in < n_rows || lead == KOILA_NONE || c->in[lead].dim != 0)
        return false;
    const koila_placement rows = c->in[lead];
    for (uint32_t i = 0; i < c->n_in; i++) {
        if (i >= n_rows)
            koila__need_r(c, i);
        else if (!koila__need(c, i, rows))
            return false;
    }
    for (uint32_t j = 0; j < c->n_out; j++)
        if (c->out_meta[j])
            c->out[j] = j < n_rows_out ? rows : koila__p(c, KOILA_SUM);
    return true;
}

/* _thnn_fused_lstm_cell(input_gates, hidden_gates, cx, biases?) -> hy, cy, workspace */
bool koila__rule_lstm_cell(koila__case *c)
{
    return c->n_out == 3 && koila__input_at(c, 2) == 2 && fused_cell(c, 3, 3);
}

/* _thnn_fused_lstm_cell_backward_impl(grad_hy?, grad_cy?, cx, cy, workspace, has_bias) -> ggates,
 * gcx, gbias */
bool koila__rule_lstm_cell_backward(koila__case *c)
{
    return c->n_out == 3 && fused_cell(c, c->n_in, 2);
}

/* _thnn_fused_gru_cell(input_gates, hidden_gates, hx, biases?) -> hy, workspace */
bool koila__rule_gru_cell(koila__case *c)
{
    return c->n_out == 2 && koila__input_at(c, 2) == 2 && fused_cell(c, 3, 2);
}

/* _thnn_fused_gru_cell_backward(grad_hy, workspace, has_bias) -> ginput_gates, ghidden_gates, ghx,
 * ginput_bias, ghidden_bias */
bool koila__rule_gru_cell_backward(koila__case *c)
{
    return c->n_out == 5 && fused_cell(c, c->n_in, 3);
}
