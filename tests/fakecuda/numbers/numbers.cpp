// Every operator with a CUDA kernel is wrapped. The wrapper runs the operator on CPU tensors over
// the same memory (arguments that are written are copied first), then the real kernel of CUDA,
// whose host code allocates, advances generators and raises as on a device, and whose device code
// does nothing; then it writes the numbers into what the real one returned. What an operator's host
// code itself calls is not computed again, except what it reads back.
#include "numbers.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

extern "C" {
void fakecuda_answer(size_t n_bytes, uint64_t value);
int fakecuda_any_capture(void);
int fakecuda_captured(cudaStream_t stream);
int fakecuda_add_node(cudaStream_t stream, cudaError_t (*run)(void *, cudaStream_t), void *data,
                      void (*release)(void *));
void fakecuda_shadow(int by);
unsigned long fakecuda_reads_inside(void);
}

namespace fakecuda
{

using at::IValue;
using at::Tensor;

static std::atomic<bool> on{ true };
static std::atomic<int64_t> n_computed{ 0 }, n_untrue{ 0 }, n_asserted{ 0 };
static thread_local int depth = 0;

struct Inside {
    Inside()
    {
        depth++;
        fakecuda_shadow(1);
    }
    ~Inside()
    {
        depth--;
        fakecuda_shadow(-1);
    }
};

// While it lives, operators count as called at that depth.
struct At {
    int before = depth;
    explicit At(int at) { depth = at; }
    ~At() { depth = before; }
};

cudaStream_t captured_stream(c10::Device device)
{
    if (!fakecuda_any_capture())
        return nullptr;
    c10::impl::VirtualGuardImpl guard(at::kCUDA);
    auto *stream = static_cast<cudaStream_t>(guard.getStreamNativeHandle(guard.getStream(device)));
    return fakecuda_captured(stream) ? stream : nullptr;
}

at::Generator Draw::generator() const
{
    uint64_t z = static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ull +
                 static_cast<uint64_t>(offset) * 0xD1B54A32D192ED03ull + 1;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return at::make_generator<at::CPUGeneratorImpl>(z ^ (z >> 31));
}

// In a capture the generator says where seed and offset will lie when the graph runs, and how far
// the graph has come.
struct CapturedDraw {
    const int64_t *seed = nullptr, *offset = nullptr;
    int64_t further = 0;
    Draw now() const { return seed ? Draw{ *seed, *offset + further } : Draw{}; }
};

static CapturedDraw captured_draw(const at::Generator &g)
{
    auto *cuda = at::check_generator<at::CUDAGeneratorImpl>(g);
    at::PhiloxCudaState state = cuda->philox_cuda_state(0);
    TORCH_INTERNAL_ASSERT(state.captured_);
    return { state.seed_.ptr, state.offset_.ptr, static_cast<int64_t>(state.offset_intragraph_) };
}

static Draw draw_of(const at::Generator &g)
{
    Tensor state = g.get_state();
    int64_t p[2] = { 0, 0 }; // eight bytes each: the seed, the offset
    std::memcpy(p, state.data_ptr(), std::min<size_t>(sizeof p, state.nbytes()));
    return { p[0], p[1] };
}

// How many numbers an operator draws whose own host code is not run: one for each element of the
// matrix of cuDNN's attention with dropout.
static uint64_t drawn_beyond(const std::string &name, const Stack &a)
{
    if (name != "aten::_scaled_dot_product_cudnn_attention" || a[5].toDouble() == 0)
        return 0;
    const Tensor &q = a[0].toTensor(), &k = a[1].toTensor();
    return static_cast<uint64_t>(q.size(0) * q.size(1) * q.size(2) * k.size(2));
}

// as that host code moves it
static void move(const at::Generator &g, uint64_t numbers)
{
    auto *cuda = at::check_generator<at::CUDAGeneratorImpl>(g);
    std::lock_guard<std::mutex> lock(cuda->mutex_);
    cuda->philox_cuda_state(numbers);
}

c10::DispatchKeySet keys_above_kernels()
{
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
           c10::DispatchKeySet({ c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                 c10::DispatchKey::PythonDispatcher,
                                 c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                 c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                 c10::DispatchKey::Functionalize });
}

void count(bool untrue)
{
    n_computed++;
    n_untrue += untrue;
}

bool enabled() { return on; }

// ---- one operator

// floating-point numbers of fewer than 32 bits, and what is computed of them, for operators that
// the CPU has not for these
static bool narrow(const Tensor &t)
{
    return t.defined() && at::isFloatingType(t.scalar_type()) && t.element_size() < 4;
}

static Tensor widened(const Tensor &t) { return narrow(t) ? t.to(at::kFloat) : t; }

static IValue widened(const IValue &v)
{
    if (v.isTensor())
        return widened(v.toTensor());
    if (v.isTensorList()) {
        c10::List<Tensor> out;
        for (const Tensor &t : v.toTensorVector())
            out.push_back(widened(t));
        return out;
    }
    return v;
}

// what the stub libraries cannot be asked: the real one is not run, only its results are allocated
static const std::unordered_set<std::string> beyond = {
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::mode", // of many numbers: asserts that a kernel has found one
};

// their host code calls operators and reads the results back (is the input finite?): those are
// computed too
static const std::unordered_set<std::string> reads_back = {
    "aten::linalg_eig",           "aten::linalg_eig.out",
    "aten::linalg_eigvals",       "aten::linalg_eigvals.out",
    "aten::linalg_matrix_exp",    "aten::segment_reduce",
    "aten::normal.Tensor_Tensor", "aten::normal.Tensor_Tensor_out",
    "aten::normal.float_Tensor",  "aten::normal.float_Tensor_out",
};

// does the message say that one of the stub libraries has no such function?
static bool refused_by_a_stub(const std::string &message)
{
    for (const char *word :
         { "cusolver", "CUSOLVER", "CUSPARSE", "CUDNN_STATUS_NOT_SUPPORTED", "MAGMA" })
        if (message.find(word) != std::string::npos)
            return true;
    return false;
}

// a copy of a tensor to itself, which torch leaves alone before it looks at the memory
static bool copies_itself(const Stack &given)
{
    const Tensor &to = given[0].toTensor(), &from = given[1].toTensor();
    return to.defined() && from.defined() && to.has_storage() && from.has_storage() &&
           to.is_alias_of(from) && to.storage_offset() == from.storage_offset() &&
           to.sizes() == from.sizes() && to.strides() == from.strides() &&
           to.scalar_type() == from.scalar_type() && to.is_conj() == from.is_conj() &&
           to.is_neg() == from.is_neg();
}

class Wrapper final : public c10::OperatorKernel
{
  public:
    Wrapper(const c10::OperatorHandle &op, c10::SafeKernelFunction original)
        : original_(std::move(original))
    {
        const auto &schema = op.schema();
        name_ = schema.name();
        full_ = schema.overload_name().empty() ? name_ : name_ + "." + schema.overload_name();
        n_arguments_ = schema.arguments().size();
        for (size_t i = 0; i < n_arguments_; i++) {
            const auto &a = schema.arguments()[i];
            written_.push_back(a.alias_info() && a.alias_info()->isWrite());
            if (a.type()->str().find("Generator") != std::string::npos)
                generator_at_ = static_cast<int>(i);
        }
        for (const auto &r : schema.returns())
            returned_.push_back(r.alias_info() && r.alias_info()->isWrite());
        seeded_ = generator_at_ >= 0 || op.hasTag(at::Tag::nondeterministic_seeded);
        counted_ = op.hasTag(at::Tag::dynamic_output_shape);
        emulate_ = emulation(full_);
        has_cpu_ = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    }

    void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack)
    {
        if (!on || (depth && !counted_) || !touches(*stack)) {
            original_.callBoxed(op, keys, stack);
            return;
        }
        Inside inside;
        Stack given(stack->end() - n_arguments_, stack->end());
        if (name_ == "aten::copy_" && copies_itself(given)) {
            original_.callBoxed(op, keys, stack);
            return;
        }
        if (cudaStream_t stream = captured_stream(device_of(given))) {
            record(op, keys, stack, given, stream);
            return;
        }
        n_computed++;
        const Stack &arguments = given;
        Draw draw = seeded_ ? draw_of(generator_of(arguments)) : Draw{};
        Stack mine;
        std::exception_ptr refused;
        try {
            mine = compute(op, arguments, draw);
        } catch (...) {
            refused = std::current_exception(); // perhaps the real one has better words for it
        }
        size_t below = stack->size() - n_arguments_;
        if (((counted_ && full_ != "aten::nonzero") || beyond.count(full_)) && !refused) {
            n_untrue++;
            if (uint64_t numbers = drawn_beyond(full_, arguments))
                move(generator_of(arguments), numbers);
            give(stack, below, on_cuda_all(computed_, device_of(arguments)));
            return;
        }
        if (full_ == "aten::nonzero" && !refused)
            fakecuda_answer(sizeof(int), static_cast<uint64_t>(computed_.at(0).toTensor().size(0)));
        Stack results;
        results.swap(computed_);
        std::exception_ptr not_here;
        unsigned long n_reads = fakecuda_reads_inside();
        try {
            At level(reads_back.count(full_) ? 0 : depth);
            original_.callBoxed(op, keys, stack);
        } catch (const std::exception &e) {
            std::string words = e.what();
            if (refused || !refused_by_a_stub(words))
                throw;
            not_here = std::current_exception();
        }
        fakecuda_answer(0, 0);
        if (fakecuda_reads_inside() != n_reads && !reads_back.count(full_))
            say("reads back what was not computed");
        if (refused) { // which a device finds out in its kernel, if at all
            n_asserted++;
            say("a kernel asserts");
            std::rethrow_exception(refused);
        }
        bool fits = !not_here;
        for (size_t i = 0; i < n_arguments_; i++)
            if (written_[i])
                fits = write_back(arguments[i], mine[i]) && fits;
        if (not_here) {
            n_untrue++;
            Stack out;
            for (size_t i = 0; i < returned_.size(); i++)
                out.push_back(returned_[i] ? returned_argument(op, arguments, i)
                                           : on_cuda(results[i], device_of(arguments)));
            give(stack, below, std::move(out));
            return;
        }
        for (size_t i = 0; i < returned_.size(); i++) {
            IValue &real = stack->at(below + i);
            if (returned_[i])
                continue;
            if (!fill(real, results[i])) {
                n_untrue++;
                if (left_out_here(real, results[i]))
                    continue;
                say("a result has another shape than on the CPU");
                real = on_cuda(results[i], device_of(arguments));
            }
        }
    }

  private:
    // Has the GPU's kernel a result of which the CPU's makes an empty one (statistics that batch
    // norm in evaluation does not use)? Nobody can say what is in it.
    static bool left_out_here(const IValue &real, const IValue &result)
    {
        if (!real.isTensor() || !result.isTensor() || !real.toTensor().defined() ||
            !result.toTensor().defined() || result.toTensor().numel() ||
            !at::isFloatingType(real.toTensor().scalar_type()))
            return false;
        seen(real, false).toTensor().fill_(std::nan(""));
        return true;
    }

    void say(const char *words) const
    {
        if (std::getenv("FAKECUDA_WORDS"))
            fprintf(stderr, "fakecuda: %s: %s\n", full_.c_str(), words);
    }

    // ---- in a capture: nothing is computed; a node of the graph computes it over the same memory

    struct Recorded {
        Wrapper *wrapper;
        c10::OperatorHandle op;
        Stack arguments, results; // as the CPU sees them; they own nothing of the device
        CapturedDraw draw;
    };

    void record(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack,
                const Stack &arguments, cudaStream_t stream)
    {
        size_t below = stack->size() - n_arguments_;
        CapturedDraw draw = seeded_ ? captured_draw(generator_of(arguments)) : CapturedDraw{};
        Stack asked = *stack;
        bool alone = beyond.count(full_);
        try {
            if (!alone)
                original_.callBoxed(op, keys, stack);
        } catch (const std::exception &e) {
            if (!refused_by_a_stub(e.what()))
                throw;
            *stack = asked;
            alone = true;
        }
        if (alone) { // what it returns has the shapes of what it would compute now
            n_untrue++;
            if (uint64_t numbers = drawn_beyond(full_, arguments))
                move(generator_of(arguments), numbers);
            Stack mine = compute(op, arguments, draw.now());
            Stack results, out;
            results.swap(computed_);
            for (size_t i = 0; i < returned_.size(); i++)
                out.push_back(returned_[i] ? returned_argument(op, arguments, i)
                                           : on_cuda(results[i], device_of(arguments)));
            give(stack, below, std::move(out));
        }
        auto kept = std::make_unique<Recorded>(Recorded{ this, op, {}, {}, draw });
        for (size_t i = 0; i < n_arguments_; i++)
            kept->arguments.push_back(as_recorded(arguments[i]));
        for (size_t i = 0; i < returned_.size(); i++)
            kept->results.push_back(returned_[i] ? IValue() : seen(stack->at(below + i), false));
        fakecuda_add_node(stream, replay, kept.release(), forget);
    }

    // a number that lies on the host was given to the kernel when it was recorded; what copy_ reads
    // is read when the graph runs
    IValue as_recorded(const IValue &v) const
    {
        bool number = v.isTensor() && v.toTensor().defined() && v.toTensor().is_cpu() &&
                      v.toTensor().dim() == 0 && name_ != "aten::copy_";
        return number ? IValue(v.toTensor().detach().clone()) : seen(v, false);
    }

    static cudaError_t replay(void *data, cudaStream_t)
    {
        const Recorded &r = *static_cast<Recorded *>(data);
        if (!on)
            return cudaSuccess;
        Inside inside;
        n_computed++;
        try {
            Stack mine = r.wrapper->compute(r.op, r.arguments, r.draw.now());
            Stack results;
            results.swap(computed_);
            bool fits = true;
            for (size_t i = 0; i < mine.size(); i++)
                if (r.wrapper->written_[i])
                    fits = write_back(r.arguments[i], mine[i]) && fits;
            for (size_t i = 0; i < r.results.size(); i++) {
                IValue to = r.results[i];
                if (!r.wrapper->returned_[i])
                    fits = fill(to, results[i]) && fits;
            }
            n_untrue += !fits;
        } catch (const std::exception &e) { // on a device, a kernel's assertion
            fprintf(stderr, "fakecuda: %s in a graph: %s\n", r.wrapper->full_.c_str(), e.what());
            return cudaErrorAssert;
        }
        return cudaSuccess;
    }

    static void forget(void *data) { delete static_cast<Recorded *>(data); }

    // ----

    bool touches(const Stack &stack) const
    {
        for (size_t i = 0; i < n_arguments_; i++) {
            const IValue &v = stack[stack.size() - n_arguments_ + i];
            if (v.isTensor() && on_device(v.toTensor()))
                return true;
            if (v.isTensorList() && v.toTensorVector().size() && on_device(v.toTensorVector()[0]))
                return true;
        }
        return false;
    }

    static c10::Device device_of(const Stack &arguments)
    {
        for (const IValue &v : arguments) {
            if (v.isTensor() && on_device(v.toTensor()))
                return v.toTensor().device();
            if (v.isTensorList())
                for (const Tensor &t : v.toTensorVector())
                    if (on_device(t))
                        return t.device();
        }
        TORCH_INTERNAL_ASSERT(false); // touches() has seen one
    }

    at::Generator generator_of(const Stack &arguments) const
    {
        Hidden hidden;
        if (generator_at_ >= 0 && arguments[generator_at_].isGenerator())
            return arguments[generator_at_].toGenerator();
        return at::globalContext().defaultGenerator(device_of(arguments));
    }

    // leaves the results in computed_, returns the arguments as they are afterwards
    Stack compute(const c10::OperatorHandle &op, const Stack &arguments, const Draw &draw)
    {
        Hidden hidden;
        c10::impl::ExcludeDispatchKeyGuard guard(keys_above_kernels());
        Stack mine;
        for (size_t i = 0; i < n_arguments_; i++)
            mine.push_back(static_cast<int>(i) == generator_at_ ? IValue(draw.generator())
                                                                : seen(arguments[i], written_[i]));
        Stack work = mine;
        if (emulate_) {
            emulate_(work, draw);
        } else if (seeded_ && generator_at_ < 0) {
            run_seeded(op, work, draw);
        } else {
            try {
                op.callBoxed(&work);
            } catch (const std::exception &) {
                work.clear();
                bool any = false;
                for (const IValue &v : mine)
                    any |= (v.isTensor() && narrow(v.toTensor())) ||
                           (v.isTensorList() && v.toTensorVector().size() &&
                            narrow(v.toTensorVector()[0]));
                if (!any)
                    throw;
                for (IValue &v : mine)
                    v = widened(v);
                work = mine;
                op.callBoxed(&work);
            }
        }
        computed_.swap(work);
        return mine;
    }

    // an operator that draws without saying from which generator draws from the CPU's default one,
    // which is lent to it
    static void run_seeded(const c10::OperatorHandle &op, Stack &work, const Draw &draw)
    {
        static std::mutex one_at_a_time;
        std::lock_guard<std::mutex> hold(one_at_a_time);
        at::Generator g = at::globalContext().defaultGenerator(at::kCPU);
        Tensor before = g.get_state().clone();
        g.set_state(draw.generator().get_state());
        try {
            op.callBoxed(&work);
        } catch (...) {
            g.set_state(before);
            throw;
        }
        g.set_state(before);
    }

    static bool write_back(const IValue &real, const IValue &mine)
    {
        if (real.isTensor())
            return write(real.toTensor(), mine.toTensor());
        bool fits = true;
        if (real.isTensorList())
            for (size_t i = 0; i < real.toTensorVector().size(); i++)
                fits = write(real.toTensorVector()[i], mine.toTensorVector()[i]) && fits;
        return fits;
    }

    static bool fill(IValue &real, const IValue &result)
    {
        if (result.isTensor())
            return real.isTensor() && write(real.toTensor(), result.toTensor());
        if (result.isTensorList()) {
            auto a = real.toTensorVector(), b = result.toTensorVector();
            if (a.size() != b.size())
                return false;
            for (size_t i = 0; i < a.size(); i++)
                if (!write(a[i], b[i]))
                    return false;
            return true;
        }
        if (!result.isNone())
            real = result;
        return true;
    }

    static Stack on_cuda_all(const Stack &results, c10::Device device)
    {
        Stack out;
        for (const IValue &v : results)
            out.push_back(on_cuda(v, device));
        return out;
    }

    IValue returned_argument(const c10::OperatorHandle &op, const Stack &arguments, size_t i) const
    {
        size_t k = 0;
        for (size_t a = 0; a < n_arguments_; a++)
            if (written_[a] && k++ == i)
                return arguments[a];
        TORCH_CHECK(false, "fakecuda: ", full_, " returns an argument that it does not write");
    }

    static void give(Stack *stack, size_t below, Stack results)
    {
        stack->resize(below);
        for (IValue &v : results)
            stack->push_back(std::move(v));
    }

    c10::SafeKernelFunction original_;
    std::string name_, full_;
    size_t n_arguments_ = 0;
    std::vector<bool> written_, returned_;
    int generator_at_ = -1;
    bool seeded_ = false, counted_ = false, has_cpu_ = false;
    Emulation emulate_ = nullptr;
    static thread_local Stack computed_;
};
thread_local Stack Wrapper::computed_;

// ---- which operators

// these give out memory or say where it is; they compute nothing, or what they copy is copied truly
// by the runtime
static const std::unordered_set<std::string> untouched = {
    "aten::empty",
    "aten::empty_strided",
    "aten::resize_",
    "aten::resize_as_",
    "aten::_resize_output_",
    "aten::set_",
    "aten::as_strided",
    "aten::record_stream",
    "aten::is_set_to",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::_local_scalar_dense",
    "aten::_efficientzerotensor",
    "aten::_embedding_bag_backward", // made of operators, as on a device
    "aten::_has_compatible_shallow_copy_type",
    "aten::_cudnn_init_dropout_state",
    "aten::_nested_view_from_buffer",
    "aten::_to_sparse",
    "aten::_to_sparse_csr",
    "aten::_to_sparse_csc",
    "aten::_to_sparse_bsr",
    "aten::_to_sparse_bsc",
    "aten::lift",
    "aten::_assert_async",
    "aten::_cudnn_rnn_flatten_weight",
    "aten::_use_cudnn_ctc_loss",
    "aten::_use_miopen_ctc_loss",
    "aten::_use_cudnn_rnn_flatten_weight",
};

bool is_view(const c10::FunctionSchema &schema)
{
    for (const auto &r : schema.returns())
        if (r.alias_info() && !r.alias_info()->isWrite())
            return true;
    return false;
}

struct Quiet : c10::WarningHandler { // that kernels are overridden is what is wanted
    void process(const c10::Warning &) override {}
};

static void wrap_all()
{
    static Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    static auto *library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                              __FILE__, __LINE__);
    auto &dispatcher = c10::Dispatcher::singleton();
    auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
    names.push_back({ "aten::copy_", "" });
    for (const auto &name : names) {
        if (name.name.rfind("aten::", 0) != 0 || untouched.count(name.name))
            continue;
        auto op = dispatcher.findSchema(name);
        if (!op || is_view(op->schema()))
            continue;
        auto original = op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA);
        std::string full =
            name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
        library->impl(full.c_str() + 6, torch::CppFunction::makeFromBoxedFunctor(
                                            std::make_unique<Wrapper>(*op, std::move(original))));
    }
}

static const struct Once {
    Once()
    {
        hide_host_memory();
        wrap_all();
        wrap_sparse();
    }
} wrapped;

} // namespace fakecuda

extern "C" {
void fakecuda_numbers(int enabled) { fakecuda::on = enabled != 0; }
long long fakecuda_computed(void) { return fakecuda::n_computed; }
long long fakecuda_untrue(void) { return fakecuda::n_untrue; }
long long fakecuda_asserted(void) { return fakecuda::n_asserted; }
}
