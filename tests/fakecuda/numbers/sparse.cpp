// Operators of sparse tensors: computed by the CPU's own kernels over the same memory, and their
// results allocated on the device. CUDA's kernels are not asked: they read counts back that no
// kernel has written. Those that only say or arrange what a tensor holds stay CUDA's.
#include "numbers.hpp"

#include <torch/library.h>

#include <unordered_set>

namespace fakecuda
{

using at::IValue;
using at::Tensor;

static bool untouched(const std::string &name)
{
    // in here: wrap_sparse() may run before what is outside of functions is made
    static const std::unordered_set<std::string> names = {
        "aten::_coalesced_",
        "aten::_dimI",
        "aten::_dimV",
        "aten::_nnz",
        "aten::_sparse_compressed_tensor_with_dims",
        "aten::_sparse_coo_tensor_with_dims",
        "aten::_sparse_coo_tensor_with_dims_and_tensors",
        "aten::_to_sparse",
        "aten::_to_sparse_bsc",
        "aten::_to_sparse_bsr",
        "aten::_to_sparse_csc",
        "aten::_to_sparse_csr",
        "aten::clone",
        "aten::copy_",
        "aten::copy_sparse_to_sparse_",
        "aten::dense_dim",
        "aten::empty",
        "aten::empty_like",
        "aten::is_coalesced",
        "aten::resize_",
        "aten::resize_as_sparse_",
        "aten::sparse_dim",
        "aten::sparse_resize_",
        "aten::sparse_resize_and_clear_",
    };
    return names.count(name) > 0;
}

class SparseWrapper final : public c10::OperatorKernel
{
  public:
    SparseWrapper(const c10::OperatorHandle &op, c10::SafeKernelFunction original)
        : original_(std::move(original))
    {
        const auto &schema = op.schema();
        for (const auto &a : schema.arguments())
            written_.push_back(a.alias_info() && a.alias_info()->isWrite());
        for (const auto &r : schema.returns())
            returned_.push_back(r.alias_info() && r.alias_info()->isWrite());
    }

    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack)
    {
        std::optional<c10::Device> device = device_of(*stack);
        if (!enabled() || !device) {
            original_.callBoxed(op, keys, stack);
            return;
        }
        if (cudaStream_t stream = captured_stream(*device)) { // it would read a count back
            cudaError_t e = cudaStreamSynchronize(stream);
            TORCH_CHECK(e == cudaSuccess, "CUDA error: ", cudaGetErrorString(e));
        }
        size_t n = written_.size();
        Stack arguments(stack->end() - n, stack->end()), mine;
        for (size_t i = 0; i < n; i++)
            mine.push_back(seen(arguments[i], written_[i]));
        Stack work = mine;
        {
            Hidden hidden;
            c10::impl::ExcludeDispatchKeyGuard guard(keys_above_kernels());
            op.callBoxed(&work);
        }
        count(true);
        stack->resize(stack->size() - n);
        for (size_t i = 0; i < n; i++)
            if (written_[i])
                write_argument(arguments[i].toTensor(), mine[i].toTensor());
        size_t k = 0;
        for (size_t i = 0; i < returned_.size(); i++)
            stack->push_back(returned_[i] ? next_written(arguments, k) : on_cuda(work[i], *device));
    }

  private:
    std::optional<c10::Device> device_of(const Stack &stack) const
    {
        for (size_t i = stack.size() - written_.size(); i < stack.size(); i++)
            if (stack[i].isTensor() && stack[i].toTensor().defined() &&
                stack[i].toTensor().is_cuda())
                return stack[i].toTensor().device();
        return std::nullopt;
    }

    static void write_argument(const Tensor &to, const Tensor &from)
    {
        if (on_device(to) && to.sizes() != from.sizes())
            to.resize_(from.sizes());
        TORCH_CHECK(write(to, from), "fakecuda: a sparse operator's result has another layout");
    }

    IValue next_written(const Stack &arguments, size_t &k) const
    {
        while (!written_[k])
            k++;
        return arguments[k++];
    }

    c10::SafeKernelFunction original_;
    std::vector<bool> written_, returned_;
};

static void wrap_key(c10::DispatchKey key)
{
    auto *library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    auto &dispatcher = c10::Dispatcher::singleton();
    for (const auto &name : dispatcher.getRegistrationsForDispatchKey(key)) {
        if (name.name.rfind("aten::", 0) != 0 || untouched(name.name))
            continue;
        auto op = dispatcher.findSchema(name);
        if (!op || is_view(op->schema()))
            continue;
        auto original = op->getComputedKernelForDispatchKey(key);
        std::string full =
            name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
        library->impl(full.c_str() + 6,
                      torch::CppFunction::makeFromBoxedFunctor(
                          std::make_unique<SparseWrapper>(*op, std::move(original))));
    }
}

void wrap_sparse()
{
    wrap_key(c10::DispatchKey::SparseCUDA);
    wrap_key(c10::DispatchKey::SparseCsrCUDA);
}

} // namespace fakecuda
