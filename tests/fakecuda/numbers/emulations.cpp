// Operators that only CUDA has, in terms of those that every device has.
#include "numbers.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <unordered_map>

namespace fakecuda
{

using at::IValue;
using at::SymInt;
using at::Tensor;

static std::vector<IValue> taken(Stack &stack)
{
    std::vector<IValue> out;
    out.swap(stack);
    return out;
}

static Tensor optional(const IValue &v) { return v.isTensor() ? v.toTensor() : Tensor(); }
static std::optional<Tensor> maybe(const IValue &v)
{
    return v.isTensor() && v.toTensor().defined() ? std::optional<Tensor>(v.toTensor())
                                                  : std::nullopt;
}

/* Of whole numbers; torch's C ABI makes a list of symbolic ones that are all known. */
static std::vector<int64_t> ints(const IValue &v)
{
    std::vector<int64_t> out;
    for (const IValue &x : v.toListRef())
        out.push_back(x.toInt());
    return out;
}

static Tensor wide(const Tensor &t)
{
    return t.defined() && at::isFloatingType(t.scalar_type()) && t.element_size() < 4
               ? t.to(at::kFloat)
               : t;
}

static Tensor as(const Tensor &t, const Tensor &like)
{
    return t.defined() ? t.to(like.scalar_type()) : t;
}

static void histc(Stack &s, const Draw &)
{
    auto a = taken(s); // self, bins, min, max; a CPU counts no whole numbers
    Tensor x = a[0].toTensor();
    s.push_back(
        as(at::histc(x.to(at::kDouble), a[1].toInt(), a[2].toScalar(), a[3].toScalar()), x));
}

// ---- cuDNN

static void cudnn_convolution(Stack &s, const Draw &)
{
    auto a = taken(s); // self, weight, padding, stride, dilation, groups, ...
    Tensor x = a[0].toTensor(), w = a[1].toTensor();
    std::vector<int64_t> none(x.dim() - 2, 0);
    s.push_back(as(at::convolution(wide(x), wide(w), {}, ints(a[3]), ints(a[2]), ints(a[4]), false,
                                   none, a[5].toInt()),
                   x));
}

static void cudnn_convolution_transpose(Stack &s, const Draw &)
{
    auto a = taken(s); // self, weight, padding, output_padding, stride, dilation, groups, ...
    Tensor x = a[0].toTensor(), w = a[1].toTensor();
    s.push_back(as(at::convolution(wide(x), wide(w), {}, ints(a[4]), ints(a[2]), ints(a[5]), true,
                                   ints(a[3]), a[6].toInt()),
                   x));
}

static void cudnn_convolution_relu(Stack &s, const Draw &)
{
    auto a = taken(s); // self, weight, bias, stride, padding, dilation, groups
    Tensor x = a[0].toTensor();
    std::vector<int64_t> none(x.dim() - 2, 0);
    s.push_back(at::relu(at::convolution(x, a[1].toTensor(), maybe(a[2]), ints(a[3]), ints(a[4]),
                                         ints(a[5]), false, none, a[6].toInt())));
}

static void depthwise(Stack &s, const Draw &)
{
    auto a = taken(s); // self, weight, kernel_size, bias?, stride, padding, dilation
    Tensor x = a[0].toTensor();
    std::vector<int64_t> none(x.dim() - 2, 0);
    s.push_back(as(
        at::convolution(wide(x), wide(a[1].toTensor()),
                        maybe(a[3]) ? std::optional<Tensor>(wide(a[3].toTensor())) : std::nullopt,
                        ints(a[4]), ints(a[5]), ints(a[6]), false, none, x.size(1)),
        x));
}

static void convolution_backward(Stack &s, const Draw &)
{
    // grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
    // groups, output_mask
    auto a = taken(s);
    Tensor x = a[1].toTensor(), w = a[2].toTensor();
    at::OptionalIntArrayRef sizes;
    std::vector<int64_t> bias;
    if (!a[3].isNone()) {
        bias = ints(a[3]);
        sizes = bias;
    }
    auto m = a[10].toBoolList();
    auto r = at::convolution_backward(wide(a[0].toTensor()), wide(x), wide(w), sizes, ints(a[4]),
                                      ints(a[5]), ints(a[6]), a[7].toBool(), ints(a[8]),
                                      a[9].toInt(), { m[0], m[1], m[2] });
    s.push_back(as(std::get<0>(r), x));
    s.push_back(as(std::get<1>(r), w));
    s.push_back(as(std::get<2>(r), w));
}

static void cudnn_batch_norm(Stack &s, const Draw &)
{
    // input, weight, bias?, running_mean?, running_var?, training, factor, epsilon
    auto a = taken(s);
    auto r = at::native_batch_norm(a[0].toTensor(), maybe(a[1]), maybe(a[2]), maybe(a[3]),
                                   maybe(a[4]), a[5].toBool(), a[6].toDouble(), a[7].toDouble());
    s.push_back(std::get<0>(r));
    s.push_back(std::get<1>(r));
    s.push_back(std::get<2>(r));
    s.push_back(at::empty({ 0 }, at::kByte));
}

static void cudnn_batch_norm_backward(Stack &s, const Draw &)
{
    // input, grad_output, weight, running_mean?, running_var?, save_mean?, save_var?, epsilon,
    // reserve
    auto a = taken(s);
    auto r = at::native_batch_norm_backward(a[1].toTensor(), a[0].toTensor(), maybe(a[2]),
                                            maybe(a[3]), maybe(a[4]), maybe(a[5]), maybe(a[6]),
                                            true, a[7].toDouble(), { true, true, true });
    s.push_back(std::get<0>(r));
    s.push_back(std::get<1>(r));
    s.push_back(std::get<2>(r));
}

// ---- fused cells of recurrent layers

// workspace: the four gates after their non-linearities
static void lstm_cell(Stack &s, const Draw &)
{
    auto a = taken(s); // input_gates, hidden_gates, cx, input_bias?, hidden_bias?
    Tensor x = a[0].toTensor(), gates = wide(x) + wide(a[1].toTensor()), cx = wide(a[2].toTensor());
    if (maybe(a[3]))
        gates = gates + wide(a[3].toTensor()) + wide(a[4].toTensor());
    auto g = gates.chunk(4, 1);
    Tensor i = g[0].sigmoid(), f = g[1].sigmoid(), c = g[2].tanh(), o = g[3].sigmoid();
    Tensor cy = f * cx + i * c;
    s.push_back(as(o * cy.tanh(), x));
    s.push_back(as(cy, x));
    s.push_back(as(at::cat({ i, f, c, o }, 1), x));
}

static void lstm_cell_backward(Stack &s, const Draw &)
{
    auto a = taken(s); // grad_hy?, grad_cy?, cx, cy, workspace, has_bias
    if (!maybe(a[0]) && !maybe(a[1])) {
        for (int k = 0; k < 3; k++)
            s.push_back(Tensor());
        return;
    }
    Tensor like = a[2].toTensor(), cx = wide(like), cy = wide(a[3].toTensor());
    auto w = wide(a[4].toTensor()).chunk(4, 1);
    Tensor i = w[0], f = w[1], c = w[2], o = w[3], t = cy.tanh();
    Tensor gh = maybe(a[0]) ? wide(a[0].toTensor()) : at::zeros_like(cx),
           gc = maybe(a[1]) ? wide(a[1].toTensor()) : at::zeros_like(cx);
    gc = gc + gh * o * (1 - t * t);
    Tensor gates = at::cat(
        { gc * c * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - c * c), gh * t * o * (1 - o) },
        1);
    s.push_back(as(gates, like));
    s.push_back(as(gc * f, like));
    s.push_back(a[5].toBool() ? as(gates.sum(0), like) : Tensor());
}

// workspace: reset, update and new gates, the old state, and the new gate's hidden part with its
// bias
static void gru_cell(Stack &s, const Draw &)
{
    auto a = taken(s); // input_gates, hidden_gates, hx, input_bias?, hidden_bias?
    Tensor like = a[0].toTensor(), x = wide(like), h = wide(a[1].toTensor()),
           hx = wide(a[2].toTensor());
    if (maybe(a[3])) {
        x = x + wide(a[3].toTensor());
        h = h + wide(a[4].toTensor());
    }
    auto xs = x.chunk(3, 1), hs = h.chunk(3, 1);
    Tensor r = (xs[0] + hs[0]).sigmoid(), z = (xs[1] + hs[1]).sigmoid(),
           n = (xs[2] + r * hs[2]).tanh();
    s.push_back(as(n + z * (hx - n), like));
    s.push_back(as(at::cat({ r, z, n, hx, hs[2] }, 1), like));
}

static void gru_cell_backward(Stack &s, const Draw &)
{
    auto a = taken(s); // grad_hy, workspace, has_bias
    Tensor like = a[0].toTensor(), g = wide(like);
    auto w = wide(a[1].toTensor()).chunk(5, 1);
    Tensor r = w[0], z = w[1], n = w[2], hx = w[3], hn = w[4];
    Tensor gz = g * (hx - n) * z * (1 - z), gn = g * (1 - z) * (1 - n * n),
           gr = gn * hn * r * (1 - r);
    Tensor gx = at::cat({ gr, gz, gn }, 1), gh = at::cat({ gr, gz, gn * r }, 1);
    s.push_back(as(gx, like));
    s.push_back(as(gh, like));
    s.push_back(as(g * z, like));
    s.push_back(a[2].toBool() ? as(gx.sum(0), like) : Tensor());
    s.push_back(a[2].toBool() ? as(gh.sum(0), like) : Tensor());
}

// ---- RMS norm, whose backward the CPU takes apart

static void rms_norm_backward(Stack &s, const Draw &)
{
    auto a = taken(s); // grad, input, normalized_shape, rstd, weight?, output_mask
    Tensor like = a[1].toTensor(), x = wide(like), rstd = wide(a[3].toTensor());
    Tensor weight = optional(a[4]), g = wide(a[0].toTensor()), normal = x * rstd;
    auto mask = a[5].toBoolList();
    std::vector<int64_t> inner, outer;
    int64_t first = x.dim() - static_cast<int64_t>(a[2].toDimVector().size());
    for (int64_t d = 0; d < x.dim(); d++)
        (d < first ? outer : inner).push_back(d);
    Tensor gn = weight.defined() ? g * wide(weight) : g;
    Tensor gx = (gn - normal * (gn * normal).mean(inner, true)) * rstd;
    s.push_back(mask[0] ? as(gx, like) : Tensor());
    Tensor gw = g * normal;
    if (mask[1] && weight.defined())
        s.push_back(as(outer.empty() ? gw : gw.sum(outer), weight));
    else
        s.push_back(Tensor());
}

// ---- attention

struct Attention {
    Tensor q, k, v, scores, sums; // sums: the logsumexp of the scores of each query
    double scale, keep;
    Tensor mask; // elements that dropout keeps; undefined: all

    Tensor dropped(const Tensor &p) const { return mask.defined() ? p * mask / keep : p; }
    Tensor out() const { return at::matmul(dropped(at::softmax(scores, -1)), v); }
};

// What tells the numbers of a head of a row of the batch from those of the one before: the offset,
// which moves by a number for each element of the head's matrix, by a block of four numbers for
// four elements, or by the lanes of a warp; or something else, and no offset leads there.
enum class Heads { by_elements, by_blocks, by_lanes, by_threads };

static Draw draw_of_head(const Draw &draw, int64_t head, int64_t elements, Heads heads)
{
    switch (heads) {
    case Heads::by_elements:
        return { draw.seed, draw.offset + head * elements };
    case Heads::by_blocks:
        return { draw.seed, draw.offset + head * elements / 4 };
    case Heads::by_lanes:
        return { draw.seed, draw.offset + head * 32 };
    case Heads::by_threads:
        break;
    }
    return { draw.seed + (head << 32), draw.offset };
}

// cuDNN does not say. Its frontend has the mask as one tensor of random numbers, [B, H, L, S], so a
// number for each of its elements is taken to be the default; a device may do otherwise, and
// FAKECUDA_CUDNN_DROPOUT plays that.
static Heads cudnn_heads()
{
    const char *said = std::getenv("FAKECUDA_CUDNN_DROPOUT");
    const std::string word = said ? said : "elements";
    TORCH_CHECK(word == "elements" || word == "blocks" || word == "threads",
                "FAKECUDA_CUDNN_DROPOUT: expected elements, blocks or threads, got ", word);
    if (word == "blocks")
        return Heads::by_blocks;
    return word == "threads" ? Heads::by_threads : Heads::by_elements;
}

// Which elements of [B, H, L, S] are kept.
static Tensor kept_by(const Draw &draw, at::IntArrayRef sizes, double keep, Heads heads)
{
    Tensor mask = at::empty(sizes, at::kBool);
    for (int64_t row = 0; row < sizes[0]; row++)
        for (int64_t head = 0; head < sizes[1]; head++) {
            Draw own = draw_of_head(draw, row * sizes[1] + head, sizes[2] * sizes[3], heads);
            mask[row][head] =
                at::rand({ sizes[2], sizes[3] }, own.generator(), at::kFloat).lt(keep);
        }
    return mask;
}

static Attention attend(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &bias,
                        double dropout, bool causal, const std::optional<double> &scale,
                        const Draw &draw, Heads heads = Heads::by_elements)
{
    Attention t;
    t.q = wide(q);
    t.k = wide(k);
    t.v = wide(v);
    t.scale = scale ? *scale : 1 / std::sqrt(static_cast<double>(q.size(-1)));
    if (k.size(1) != q.size(1)) {
        t.k = t.k.repeat_interleave(q.size(1) / k.size(1), 1);
        t.v = t.v.repeat_interleave(q.size(1) / v.size(1), 1);
    }
    Tensor s = at::matmul(t.q, t.k.transpose(-2, -1)) * t.scale;
    if (bias.defined())
        s = s + wide(bias);
    if (causal)
        s = s.masked_fill(at::ones({ q.size(-2), k.size(-2) }, at::kBool).tril().logical_not(),
                          -INFINITY);
    t.scores = s;
    t.sums = s.logsumexp(-1);
    t.keep = 1 - dropout;
    if (dropout > 0)
        t.mask = kept_by(draw, s.sizes(), t.keep, heads);
    return t;
}

// As the kernels do, from the logsumexp and the result that they are given: those may be of more
// keys than k has. sums[B, H, L] may be padded.
static std::array<Tensor, 4> attend_backward(const Attention &t, const Tensor &grad,
                                             const Tensor &k, const Tensor &v, const Tensor &out,
                                             const Tensor &sums)
{
    Tensor g = wide(grad);
    Tensor p = at::exp(t.scores - wide(sums).narrow(2, 0, t.q.size(2)).unsqueeze(-1));
    Tensor gv = at::matmul(t.dropped(p).transpose(-2, -1), g),
           gp = t.dropped(at::matmul(g, t.v.transpose(-2, -1)));
    Tensor gs = p * (gp - (g * wide(out)).sum(-1, true));
    Tensor gq = at::matmul(gs, t.k) * t.scale, gk = at::matmul(gs.transpose(-2, -1), t.q) * t.scale;
    auto fold = [](const Tensor &x, const Tensor &like) {
        if (x.size(1) == like.size(1))
            return x;
        return x
            .reshape({ x.size(0), like.size(1), x.size(1) / like.size(1), x.size(2), x.size(3) })
            .sum(2);
    };
    return { gq, fold(gk, k), fold(gv, v), gs };
}

static std::optional<double> scale_of(const IValue &v)
{
    return v.isNone() ? std::nullopt : std::optional<double>(v.toDouble());
}

static Tensor number(int64_t n) { return at::scalar_tensor(n, at::kLong); }

static void efficient(Stack &s, const Draw &draw)
{
    // query, key, value, attn_bias?, compute_log_sumexp, dropout_p, is_causal, scale?
    auto a = taken(s);
    Tensor q = a[0].toTensor();
    Attention t = attend(q, a[1].toTensor(), a[2].toTensor(), optional(a[3]), a[5].toDouble(),
                         a[6].toBool(), scale_of(a[7]), draw);
    s.push_back(as(t.out(), q));
    int64_t rows = a[4].toBool() ? (q.size(2) + 31) / 32 * 32 : 0;
    Tensor lse = at::full({ q.size(0), q.size(1), rows }, INFINITY, at::kFloat);
    if (rows)
        lse.narrow(2, 0, q.size(2)).copy_(t.sums);
    s.push_back(lse);
    s.push_back(number(draw.seed));
    s.push_back(number(draw.offset));
}

static void efficient_backward(Stack &s, const Draw &)
{
    // grad, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
    // grad_input_mask, is_causal, scale?
    auto a = taken(s);
    Tensor grad = a[0].toTensor(), bias = optional(a[4]);
    auto wanted = a[10].toBoolList();
    if (!grad.defined()) {
        for (int i = 0; i < 4; i++)
            s.push_back(Tensor());
        return;
    }
    Draw draw{ a[9].toDouble() > 0 ? a[7].toTensor().item<int64_t>() : 0,
               a[9].toDouble() > 0 ? a[8].toTensor().item<int64_t>() : 0 };
    Tensor q = a[1].toTensor(), k = a[2].toTensor(), v = a[3].toTensor();
    Attention t = attend(q, k, v, bias, a[9].toDouble(), a[11].toBool(), scale_of(a[12]), draw);
    auto g = attend_backward(t, grad, k, v, a[5].toTensor(), a[6].toTensor());
    for (int i = 0; i < 3; i++)
        s.push_back(as(g[i], q));
    s.push_back(wanted[3] && bias.defined() ? as(g[3].sum_to_size(bias.sizes()), bias) : Tensor());
}

static void flash(Stack &s, const Draw &draw)
{
    auto a = taken(s); // query, key, value, dropout_p, is_causal, return_debug_mask, scale?
    Tensor q = a[0].toTensor(), k = a[1].toTensor();
    Attention t = attend(q, k, a[2].toTensor(), Tensor(), a[3].toDouble(), a[4].toBool(),
                         scale_of(a[6]), draw, Heads::by_lanes);
    s.push_back(as(t.out(), q));
    s.push_back(t.sums);
    s.push_back(Tensor());
    s.push_back(Tensor());
    s.push_back(q.size(2));
    s.push_back(k.size(2));
    s.push_back(at::stack({ number(draw.seed), number(draw.offset) }));
    s.push_back(Tensor());
    s.push_back(Tensor());
}

static void flash_backward(Stack &s, const Draw &)
{
    // grad, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    // is_causal, philox_seed, philox_offset, scale?
    auto a = taken(s);
    Tensor q = a[1].toTensor(), k = a[2].toTensor(), v = a[3].toTensor();
    Draw draw;
    if (a[10].toDouble() > 0) {
        Tensor state = a[12].toTensor().view(at::kLong);
        draw = { state[0].item<int64_t>(), state[1].item<int64_t>() };
    }
    Attention t = attend(q, k, v, Tensor(), a[10].toDouble(), a[11].toBool(), scale_of(a[14]), draw,
                         Heads::by_lanes);
    auto g = attend_backward(t, a[0].toTensor(), k, v, a[4].toTensor(), a[5].toTensor());
    for (int i = 0; i < 3; i++)
        s.push_back(as(g[i], q));
}

// as the host code of cuDNN's attention lays its result out: in the query's order of dimensions
static Tensor laid_out_as(const Tensor &t, const Tensor &query)
{
    if (t.sizes() == query.sizes())
        return at::empty_like(query).copy_(t);
    std::vector<int64_t> order(t.dim()), strides(t.dim());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return query.stride(a) > query.stride(b); });
    int64_t stride = 1;
    for (auto d = order.rbegin(); d != order.rend(); ++d) {
        strides[*d] = stride;
        stride *= t.size(*d);
    }
    return at::empty_strided(t.sizes(), strides, t.options()).copy_(t);
}

static void cudnn_attention(Stack &s, const Draw &draw)
{
    // query, key, value, attn_bias?, compute_log_sumexp, dropout_p, is_causal, return_debug_mask,
    // scale?
    auto a = taken(s);
    Tensor q = a[0].toTensor(), k = a[1].toTensor();
    Attention t = attend(q, k, a[2].toTensor(), optional(a[3]), a[5].toDouble(), a[6].toBool(),
                         scale_of(a[8]), draw, cudnn_heads());
    s.push_back(laid_out_as(as(t.out(), q), q));
    s.push_back(a[4].toBool() ? t.sums.unsqueeze(-1) : Tensor());
    s.push_back(Tensor());
    s.push_back(Tensor());
    s.push_back(q.size(2));
    s.push_back(k.size(2));
    s.push_back(number(draw.seed));
    s.push_back(number(draw.offset));
    s.push_back(Tensor());
}

static void cudnn_attention_backward(Stack &s, const Draw &)
{
    // grad, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
    // cum_seq_k, max_q, max_k, dropout_p, is_causal, scale?
    auto a = taken(s);
    Tensor q = a[1].toTensor(), k = a[2].toTensor(), v = a[3].toTensor();
    bool drops = a[13].toDouble() > 0;
    Draw draw{ drops ? a[6].toTensor().item<int64_t>() : 0,
               drops ? a[7].toTensor().item<int64_t>() : 0 };
    Attention t = attend(q, k, v, optional(a[8]), a[13].toDouble(), a[14].toBool(), scale_of(a[15]),
                         draw, cudnn_heads());
    auto g =
        attend_backward(t, a[0].toTensor(), k, v, a[4].toTensor(), a[5].toTensor().squeeze(-1));
    for (int i = 0; i < 3; i++)
        s.push_back(at::empty_like(a[i + 1].toTensor()).copy_(g[i]));
}

// ---- recurrent layers of cuDNN: the CPU's own, and their gradients by running them again

static std::vector<Tensor> pair(const std::tuple<Tensor, Tensor> &r)
{
    return { std::get<0>(r), std::get<1>(r) };
}

static std::vector<Tensor> recur(int64_t mode, const Tensor &x, const Tensor &hx, const Tensor &cx,
                                 const std::vector<Tensor> &w, int64_t per_layer, int64_t layers,
                                 double dropout, bool train, bool bidirectional, bool batch_first,
                                 const std::vector<int64_t> &batch_sizes)
{
    bool biases = per_layer >= 4;
    if (!batch_sizes.empty()) {
        Tensor sizes = at::tensor(batch_sizes, at::kLong);
        if (mode == 2) {
            auto r = at::lstm(x, sizes, std::vector<Tensor>{ hx, cx }, w, biases, layers, dropout,
                              train, bidirectional);
            return { std::get<0>(r), std::get<1>(r), std::get<2>(r) };
        }
        if (mode == 3)
            return pair(at::gru(x, sizes, hx, w, biases, layers, dropout, train, bidirectional));
        if (mode == 1)
            return pair(
                at::rnn_tanh(x, sizes, hx, w, biases, layers, dropout, train, bidirectional));
        return pair(at::rnn_relu(x, sizes, hx, w, biases, layers, dropout, train, bidirectional));
    }
    if (mode == 2) {
        auto r = at::lstm(x, std::vector<Tensor>{ hx, cx }, w, biases, layers, dropout, train,
                          bidirectional, batch_first);
        return { std::get<0>(r), std::get<1>(r), std::get<2>(r) };
    }
    if (mode == 3)
        return pair(at::gru(x, hx, w, biases, layers, dropout, train, bidirectional, batch_first));
    if (mode == 1)
        return pair(
            at::rnn_tanh(x, hx, w, biases, layers, dropout, train, bidirectional, batch_first));
    return pair(at::rnn_relu(x, hx, w, biases, layers, dropout, train, bidirectional, batch_first));
}

// dropout between the layers draws from the CPU's default generator: the one time, and the same
// again for the gradient
struct Lent {
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    explicit Lent(const Draw &draw) : before(generator.get_state().clone())
    {
        generator.set_state(draw.generator().get_state());
    }
    ~Lent() { generator.set_state(before); }
    Tensor before;
};

// the state of dropout, or the reserve of a forward, which begins with it (dnn.c)
static Draw draw_in(const Tensor &state)
{
    int64_t words[2] = { 0, 0 };
    if (state.defined() && state.nbytes() >= sizeof words)
        std::memcpy(words, state.contiguous().data_ptr(), sizeof words);
    return { words[0], words[1] };
}

// Has a backward written into the reserve (dnn.c)? Small ones do not tell.
static bool is_used(const Tensor &reserve)
{
    int64_t words[3] = { 0, 0, 0 };
    if (reserve.nbytes() >= sizeof words)
        std::memcpy(words, reserve.data_ptr(), sizeof words);
    return words[2] == 0x75736564;
}

// The weights in the shapes of torch.nn: those that autocast has laid out in one piece of memory
// are columns. Of each layer: two matrices, two biases or none, a projection or none.
static std::vector<Tensor> shaped(const std::vector<Tensor> &weights, int64_t mode, int64_t hidden,
                                  int64_t projected, int64_t per_layer)
{
    const int64_t gates[] = { 1, 1, 4, 3 };
    const int64_t rows = hidden * gates[mode];
    std::vector<Tensor> out;
    for (size_t i = 0; i < weights.size(); i++) {
        const int64_t k = static_cast<int64_t>(i) % per_layer;
        if (k < 2)
            out.push_back(weights[i].reshape({ rows, -1 }));
        else if (projected != 0 && k == per_layer - 1)
            out.push_back(weights[i].reshape({ projected, -1 }));
        else
            out.push_back(weights[i].reshape({ rows }));
    }
    return out;
}

static void cudnn_rnn(Stack &s, const Draw &)
{
    // input, weight[], stride0, weight_buf?, hx, cx?, mode, hidden, proj, layers, batch_first,
    // dropout, train, bidirectional, batch_sizes, dropout_state?
    auto a = taken(s);
    Lent lent(draw_in(optional(a[15])));
    auto r =
        recur(a[6].toInt(), a[0].toTensor(), a[4].toTensor(), optional(a[5]),
              shaped(a[1].toTensorVector(), a[6].toInt(), a[7].toInt(), a[8].toInt(), a[2].toInt()),
              a[2].toInt(), a[9].toInt(), a[11].toDouble(), a[12].toBool(), a[13].toBool(),
              a[10].toBool(), ints(a[14]));
    s.push_back(r[0].contiguous());
    s.push_back(r[1].contiguous());
    s.push_back(r.size() > 2 ? r[2].contiguous() : at::empty({ 0 }, r[0].options()));
    s.push_back(Tensor()); // the reserve is CUDA's own
    s.push_back(optional(a[3]).defined() ? optional(a[3]) : at::empty({ 0 }, r[0].options()));
}

static void cudnn_rnn_backward(Stack &s, const Draw &)
{
    // input, weight[], stride0, weight_buf, hx, cx?, output, grad_output?, grad_hy?, grad_cy?,
    // mode, hidden, proj, layers, batch_first, dropout, train, bidirectional, batch_sizes,
    // dropout_state?, reserve, mask
    auto a = taken(s);
    auto local = c10::impl::tls_local_dispatch_key_set();
    c10::impl::ForceDispatchKeyGuard graph(
        local.included_, local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    at::AutoGradMode enabled(true);
    auto leaf = [](const Tensor &t) {
        return t.defined() ? t.detach().clone().requires_grad_() : t;
    };
    Tensor x = leaf(a[0].toTensor()), hx = leaf(a[4].toTensor()), cx = leaf(optional(a[5]));
    std::vector<Tensor> w, leaves{ x, hx }, outs, grads;
    for (const Tensor &t : a[1].toTensorVector())
        w.push_back(leaf(t));
    if (cx.defined())
        leaves.push_back(cx);
    leaves.insert(leaves.end(), w.begin(), w.end());
    Lent lent(draw_in(a[20].toTensor()));
    auto whole = shaped(w, a[10].toInt(), a[11].toInt(), a[12].toInt(), a[2].toInt());
    auto r = recur(a[10].toInt(), x, hx, cx, whole, a[2].toInt(), a[13].toInt(), a[15].toDouble(),
                   a[16].toBool(), a[17].toBool(), a[14].toBool(), ints(a[18]));
    for (size_t i = 0; i < r.size(); i++)
        if (optional(a[7 + i]).defined()) {
            outs.push_back(r[i]);
            grads.push_back(optional(a[7 + i]));
        }
    auto g = torch::autograd::grad(outs, leaves, grads, std::nullopt, false, true);
    for (size_t i = 0; i < g.size(); i++)
        if (!g[i].defined())
            g[i] = at::zeros_like(leaves[i].detach());
    if (is_used(a[20].toTensor()))
        for (Tensor &t : g)
            t = at::full_like(t, NAN);
    size_t next = cx.defined() ? 3 : 2;
    s.push_back(g[0]);
    s.push_back(g[1]);
    s.push_back(cx.defined() ? g[2] : Tensor());
    s.push_back(c10::List<Tensor>(std::vector<Tensor>(g.begin() + next, g.end())));
}

// ---- embedding_bag: the CPU's sums, and beside them what CUDA's kernel writes: the bag of each
// entry, the entries of each bag that are not padding (with include_last_offset one number more,
// which nobody writes), and the row of each maximum (-1 in an empty bag; with a sum or mean none)

static void embedding_bag(Stack &s, const Draw &)
{
    // weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights?,
    // include_last_offset, padding_idx
    auto a = taken(s);
    Tensor w = a[0].toTensor(), indices = a[1].toTensor(), offsets = a[2].toTensor();
    int64_t mode = a[4].toInt(), padding = a[8].toInt();
    auto r = at::_embedding_bag(wide(w), indices, offsets, a[3].toBool(), mode, a[5].toBool(),
                                maybe(a[6]) ? std::optional<Tensor>(wide(a[6].toTensor()))
                                            : std::nullopt,
                                a[7].toBool(), padding);
    Tensor out = std::get<0>(r), starts = offsets.narrow(0, 0, out.size(0)).contiguous();
    Tensor at_entry = at::arange(indices.numel(), starts.options());
    Tensor bag = at::searchsorted(starts, at_entry, false, true) - 1;
    Tensor counted = indices.ne(padding).to(at::kLong);
    Tensor sizes = at::zeros({ offsets.size(0) }, at::kLong).index_add(0, bag, counted);
    s.push_back(as(out, w));
    s.push_back(bag.to(indices.scalar_type()));
    s.push_back(sizes.to(indices.scalar_type()));
    s.push_back(mode == 2 ? std::get<3>(r).masked_fill(
                                sizes.narrow(0, 0, out.size(0)).eq(0).unsqueeze(1), -1)
                          : at::empty({ 0 }, indices.options()));
}

static void embedding_bag_dense_backward(Stack &s, const Draw &)
{
    // grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode,
    // per_sample_weights?, padding_idx
    auto a = taken(s);
    Tensor g = a[0].toTensor();
    // with include_last_offset there is one more; for a sum, which does not read them, maybe none
    Tensor sizes = a[3].toTensor();
    if (sizes.size(0) > g.size(0))
        sizes = sizes.narrow(0, 0, g.size(0));
    s.push_back(as(at::_embedding_bag_dense_backward(
                       wide(g), a[1].toTensor(), a[2].toTensor(), sizes, a[4].toTensor(),
                       a[5].toInt(), a[6].toBool(), a[7].toInt(),
                       maybe(a[8]) ? std::optional<Tensor>(wide(a[8].toTensor())) : std::nullopt,
                       a[9].toInt()),
                   g));
}

// ---- dropout

// How many elements CUDA's kernel takes at a time (get_vector_size of Dropout.cu; 16: the most).
static int64_t elements_at_a_time(const Tensor &x)
{
    const auto address = reinterpret_cast<uintptr_t>(x.data_ptr());
    int64_t n = x.is_non_overlapping_and_dense() ? 16 : 1;
    while (n > 1 && (address % (n * x.element_size()) || x.numel() % n))
        n /= 2;
    return n;
}

// Which numbers an element gets depends on that, and so does their order: that of memory where
// several are taken, else of the indices.
static Tensor drawn_for(const Tensor &x, const Draw &draw)
{
    const int64_t n = elements_at_a_time(x);
    Draw of_this_way = draw;
    of_this_way.seed += n;
    auto options = at::TensorOptions().dtype(at::kFloat);
    Tensor out = at::empty_like(x, options);
    Tensor drawn = at::rand({ x.numel() }, of_this_way.generator(), options);
    if (n > 1)
        out.as_strided({ x.numel() }, { 1 }).copy_(drawn);
    else
        out.copy_(drawn.view(x.sizes()));
    return out;
}

static void native_dropout(Stack &s, const Draw &draw)
{
    auto a = taken(s); // input, p, train?
    Tensor x = a[0].toTensor();
    double p = a[1].toDouble();
    if (!a[2].isNone() && !a[2].toBool()) {
        s.push_back(x.clone());
        s.push_back(at::ones_like(x, at::kBool));
        return;
    }
    Tensor mask = drawn_for(x, draw).lt(1 - p);
    s.push_back(as(wide(x) * mask * (p < 1 ? 1 / (1 - p) : 0.0), x));
    s.push_back(mask);
}

// the CPU keeps a buffer for the gradient, CUDA an empty one
static void log_sigmoid(Stack &s, const Draw &)
{
    auto a = taken(s); // self
    Tensor x = a[0].toTensor();
    s.push_back(as(at::log_sigmoid(wide(x)), x));
    s.push_back(at::empty({ 0 }, x.options()));
}

static void log_sigmoid_backward(Stack &s, const Draw &)
{
    auto a = taken(s); // grad_output, self, buffer
    Tensor x = a[1].toTensor();
    s.push_back(as(wide(a[0].toTensor()) * at::sigmoid(-wide(x)), x));
}

static void masked_scale(Stack &s, const Draw &)
{
    auto a = taken(s); // self, mask, scale
    s.push_back(a[0].toTensor() * a[1].toTensor() * a[2].toDouble());
}

static void softmax_like(Stack &s, bool logarithm)
{
    auto a = taken(s); // self, dim, half_to_float
    Tensor x = a[0].toTensor(), y = wide(x);
    y = logarithm ? at::log_softmax(y, a[1].toInt()) : at::softmax(y, a[1].toInt());
    s.push_back(a[2].toBool() ? y : as(y, x));
}

static void softmax(Stack &s, const Draw &) { softmax_like(s, false); }
static void log_softmax(Stack &s, const Draw &) { softmax_like(s, true); }

static void softmax_backward_like(Stack &s, bool logarithm)
{
    auto a = taken(s); // grad_output, output, dim, input_dtype
    Tensor g = wide(a[0].toTensor()), y = wide(a[1].toTensor());
    Tensor r = logarithm ? at::_log_softmax_backward_data(g, y, a[2].toInt(), g.scalar_type())
                         : at::_softmax_backward_data(g, y, a[2].toInt(), g.scalar_type());
    s.push_back(r.to(a[3].toScalarType()));
}

static void softmax_backward(Stack &s, const Draw &) { softmax_backward_like(s, false); }
static void log_softmax_backward(Stack &s, const Draw &) { softmax_backward_like(s, true); }

Emulation emulation(const std::string &name)
{
    static const std::unordered_map<std::string, Emulation> all = {
        { "aten::cudnn_convolution", cudnn_convolution },
        { "aten::cudnn_convolution_transpose", cudnn_convolution_transpose },
        { "aten::cudnn_convolution_relu", cudnn_convolution_relu },
        { "aten::_conv_depthwise2d", depthwise },
        { "aten::conv_depthwise3d", depthwise },
        { "aten::convolution_backward", convolution_backward },
        { "aten::cudnn_batch_norm", cudnn_batch_norm },
        { "aten::cudnn_batch_norm_backward", cudnn_batch_norm_backward },
        { "aten::_thnn_fused_lstm_cell", lstm_cell },
        { "aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward },
        { "aten::_thnn_fused_gru_cell", gru_cell },
        { "aten::_thnn_fused_gru_cell_backward", gru_cell_backward },
        { "aten::_fused_rms_norm_backward", rms_norm_backward },
        { "aten::_scaled_dot_product_efficient_attention", efficient },
        { "aten::_scaled_dot_product_efficient_attention_backward", efficient_backward },
        { "aten::_scaled_dot_product_flash_attention", flash },
        { "aten::_scaled_dot_product_flash_attention_backward", flash_backward },
        { "aten::_scaled_dot_product_cudnn_attention", cudnn_attention },
        { "aten::_scaled_dot_product_cudnn_attention_backward", cudnn_attention_backward },
        { "aten::_cudnn_rnn", cudnn_rnn },
        { "aten::_cudnn_rnn_backward", cudnn_rnn_backward },
        { "aten::_embedding_bag", embedding_bag },
        { "aten::_embedding_bag_forward_only", embedding_bag },
        { "aten::_embedding_bag_dense_backward", embedding_bag_dense_backward },
        { "aten::native_dropout", native_dropout },
        { "aten::histc", histc },
        { "aten::log_sigmoid_forward", log_sigmoid },
        { "aten::log_sigmoid_backward", log_sigmoid_backward },
        { "aten::_masked_scale", masked_scale },
        { "aten::_softmax", softmax },
        { "aten::_log_softmax", log_softmax },
        { "aten::_softmax_backward_data", softmax_backward },
        { "aten::_log_softmax_backward_data", log_softmax_backward },
    };
    auto found = all.find(name);
    return found == all.end() ? nullptr : found->second;
}

} // namespace fakecuda
