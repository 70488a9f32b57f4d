// The memory in which the CPU computes numbers is the device's in truth: no device would take it
// from the host. It comes from an allocator of its own, so that whoever counts torch's CPU memory
// (torch's profiler, koila's hooks in libc10) does not see it.
#include "numbers.hpp"

#include <c10/core/CPUAllocator.h>

#include <cstdlib>

namespace fakecuda
{

static thread_local int hidden = 0;

Hidden::Hidden() { hidden++; }
Hidden::~Hidden() { hidden--; }

namespace
{

constexpr size_t alignment = 64; // c10::gAlignment

struct HostMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t n) override
    {
        if (!hidden)
            return c10::GetDefaultCPUAllocator()->allocate(n);
        void *p = nullptr;
        if (n && posix_memalign(&p, alignment, n))
            throw std::bad_alloc();
        return { p, p, &std::free, c10::Device(c10::kCPU) };
    }

    // the default allocator's: both free what malloc gave
    c10::DeleterFnPtr raw_deleter() const override
    {
        return c10::GetDefaultCPUAllocator()->raw_deleter();
    }

    void copy_data(void *to, const void *from, size_t n) const override
    {
        default_copy_data(to, from, n);
    }
};

} // namespace

void hide_host_memory()
{
    static HostMemory allocator;
    c10::SetCPUAllocator(&allocator, 1); // above the default one
}

} // namespace fakecuda
