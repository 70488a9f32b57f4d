// Numbers for the fake device: what an operator of CUDA would have computed, computed on the CPU
// over the same memory.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <string>

namespace fakecuda
{

using torch::jit::Stack;

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
