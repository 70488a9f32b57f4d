// Numbers for the fake device: what an operator of CUDA would have computed, computed on the CPU
// over the same memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <cuda_runtime_api.h>

#include <string>

namespace fakecuda
{

using torch::jit::Stack;

// ---- host_memory.cpp

// While it lives, what the CPU allocates on this thread is not seen as memory of the program.
struct Hidden {
    Hidden();
    ~Hidden();
    Hidden(const Hidden &) = delete;
    Hidden &operator=(const Hidden &) = delete;
};
void hide_host_memory(); // once, before the first Hidden

// ---- views.cpp: the same memory, as seen by the CPU

bool on_device(const at::Tensor &t); // a strided tensor of the device
bool is_sparse(const at::Tensor &t); // COO or compressed, wherever it is

// `v` as the CPU sees it; what is written is copied
at::IValue seen(const at::IValue &v, bool written);

// the numbers of `from` into `to`; false: another shape. A sparse `to` gets new parts.
bool write(const at::Tensor &to, const at::Tensor &from);

// tensors of the device with the shapes, strides and numbers of those given
at::Tensor on_cuda(const at::Tensor &like, c10::Device device);
at::IValue on_cuda(const at::IValue &v, c10::Device device);

// ---- numbers.cpp

// Keys between a call and its kernel, which a computation on the CPU leaves out.
c10::DispatchKeySet keys_above_kernels();
void count(bool untrue); // one more operator computed
bool enabled();
cudaStream_t captured_stream(c10::Device device); // the current stream, if it is captured
bool is_view(const c10::FunctionSchema &schema);

// ---- sparse.cpp: wraps the operators of sparse tensors
void wrap_sparse();

// ---- emulations.cpp

// Where random numbers come from: the state of the CUDA generator before the operator ran.
struct Draw {
    int64_t seed = 0, offset = 0;
    at::Generator generator() const;
};

// An operator that has no kernel for the CPU: takes its arguments (on the CPU) off the stack, puts
// its results there. nullptr: none known.
using Emulation = void (*)(Stack &stack, const Draw &draw);
Emulation emulation(const std::string &name);

} // namespace fakecuda
