// The same memory, as seen by the CPU: tensors of the device as tensors of the CPU that own
// nothing, and results of the CPU as tensors of the device. Sparse tensors are seen part by part.
#include "numbers.hpp"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>

namespace fakecuda
{

using at::IValue;
using at::Tensor;

bool on_device(const Tensor &t)
{
    return t.defined() && t.is_cuda() && t.layout() == at::kStrided && !t.is_quantized() &&
           t.has_storage();
}

bool is_sparse(const Tensor &t)
{
    return t.defined() && (t.layout() == at::kSparse || at::sparse_csr::is_sparse_compressed(t));
}

static Tensor as_cpu(const Tensor &t)
{
    auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
    if (t._is_zerotensor()) // it has no memory
        return at::zeros(t.sizes(), options);
    Tensor out = t.numel() == 0 ? at::empty_strided(t.sizes(), t.strides(), options)
                                : at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
    if (t.is_conj())
        out._set_conj(true);
    if (t.is_neg())
        out._set_neg(true);
    return out;
}

// a sparse tensor with each of its parts as `part` gives it
template <typename F> static Tensor by_parts(const Tensor &t, c10::Device device, F part)
{
    auto options = t.options().device(device);
    if (t.layout() == at::kSparse)
        return at::_sparse_coo_tensor_unsafe(part(t._indices()), part(t._values()), t.sizes(),
                                             options, t.is_coalesced());
    auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(t);
    return at::_sparse_compressed_tensor_unsafe(part(compressed), part(plain), part(t.values()),
                                                t.sizes(), options.layout(t.layout()));
}

static Tensor seen(const Tensor &t, bool written)
{
    if (!t.defined())
        return t;
    if (is_sparse(t))
        return by_parts(t, at::kCPU, [&](const Tensor &p) { return seen(p, written); });
    Tensor c = on_device(t) ? as_cpu(t) : t;
    return written ? c.clone(at::MemoryFormat::Preserve) : c;
}

IValue seen(const IValue &v, bool written)
{
    if (v.isTensor())
        return seen(v.toTensor(), written);
    if (v.isTensorList()) {
        c10::List<Tensor> out;
        for (const Tensor &t : v.toTensorVector())
            out.push_back(seen(t, written));
        return out;
    }
    if (v.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> out;
        for (const std::optional<Tensor> &t : v.toOptionalTensorList())
            out.push_back(t && t->defined() ? std::optional<Tensor>(seen(*t, written))
                                            : std::nullopt);
        return out;
    }
    if (v.isDevice() && v.toDevice().is_cuda())
        return at::Device(at::kCPU);
    return v;
}

// a sparse tensor that is written gets new parts
static bool write_sparse(const Tensor &to, const Tensor &from)
{
    if (to.layout() != from.layout())
        return false;
    Tensor there = on_cuda(from, to.device());
    if (to.layout() == at::kSparse) {
        auto *impl = static_cast<at::SparseTensorImpl *>(to.unsafeGetTensorImpl());
        impl->raw_resize_(from.sparse_dim(), from.dense_dim(), from.sizes());
        impl->set_indices_and_values_unsafe(there._indices(), there._values());
        impl->set_coalesced(from.is_coalesced());
        return true;
    }
    auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(there);
    at::sparse_csr::get_sparse_csr_impl(to)->set_member_tensors(compressed, plain, there.values(),
                                                                from.sizes());
    return true;
}

// Elements of an expanded tensor share memory. Operators that may write one (fill_, zero_) leave
// the same number in all of them; copy_ refuses to.
bool write(const Tensor &to, const Tensor &from)
{
    Hidden hidden;
    if (!to.defined() || !from.defined())
        return true;
    if (is_sparse(to) || is_sparse(from))
        return write_sparse(to, from);
    if (to.sizes() != from.sizes())
        return false;
    Tensor t = on_device(to) ? as_cpu(to) : to, f = from;
    if (t.data_ptr() == f.data_ptr() || !t.numel())
        return true;
    for (int64_t d = 0; d < t.dim(); d++)
        if (t.stride(d) == 0 && t.size(d) > 1) {
            t = t.narrow(d, 0, 1);
            f = f.narrow(d, 0, 1);
        }
    t.copy_(f);
    return true;
}

Tensor on_cuda(const Tensor &like, c10::Device device)
{
    if (is_sparse(like))
        return by_parts(like, device, [&](const Tensor &p) { return on_cuda(p, device); });
    Tensor out = at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
    write(out, like);
    return out;
}

IValue on_cuda(const IValue &v, c10::Device device)
{
    if (v.isTensor())
        return v.toTensor().defined() ? IValue(on_cuda(v.toTensor(), device)) : v;
    if (v.isTensorList()) {
        c10::List<Tensor> out;
        for (const Tensor &t : v.toTensorVector())
            out.push_back(on_cuda(t, device));
        return out;
    }
    return v;
}

} // namespace fakecuda
