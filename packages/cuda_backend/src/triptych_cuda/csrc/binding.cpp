// The CPU extension module: checks, allocates, spreads the kernels of cpu/ over PyTorch's intra-op threads.
#include "binding_cpu.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace triptych {

using at::Tensor;

static std::atomic<const cpu::Kernels*> chosen{nullptr};

const cpu::Kernels& kernels() {
  const cpu::Kernels* found = chosen.load(std::memory_order_relaxed);
  return found ? *found : *cpu::variants().list[0];
}

// The C allocator maps fresh pages for large blocks, and the faults on them cost more than the kernel itself (64 MiB:
// 20 ms of faults, 3 ms of copying). Where the system leaves huge pages to advice, asking for them turns 16384 faults
// into 32. It is only a hint; small blocks, which are reused, are left alone.
Tensor empty_output(at::IntArrayRef sizes, const at::TensorOptions& options) {
  Tensor out = at::empty(sizes, options);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr size_t kHugePage = size_t{2} << 20;
  constexpr size_t kWorthwhile = 4 * kHugePage;
  if (out.nbytes() >= kWorthwhile) {
    const auto begin = reinterpret_cast<uintptr_t>(out.data_ptr());
    const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
    const uintptr_t last = (begin + out.nbytes()) & ~(kHugePage - 1);
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return out;
}

namespace {

cpu::Rounding rounding_of(bool before_weight) {
  return before_weight ? cpu::Rounding::before_weight : cpu::Rounding::after_weight;
}

// weight + offset as one contiguous wide row. A float32 weight that is that already is used where it lies.
class Gain {
 public:
  Gain(const OptionalTensor& weight, double offset, const Tensor& x) {
    const int64_t columns = x.size(-1);
    if (weight && weight->scalar_type() == wide_type(x) && offset == 0 && (weight->stride(0) == 1 || columns <= 1)) {
      data_ = weight->const_data_ptr();
      return;
    }
    const size_t bytes = columns * c10::elementSize(wide_type(x));
    void* row = inline_;
    if (bytes > sizeof inline_) {
      heap_.reset(new char[bytes]);
      row = heap_.get();
    }
    cpu::GainArgs args{};
    args.dtype = dtype_of<cpu::Dtype>(x);
    args.columns = columns;
    set_weight(args, weight);
    args.offset = offset;
    args.gain = row;
    kernels().norm.gain(args);
    data_ = row;
  }
  Gain(const Gain&) = delete;
  const void* data() const { return data_; }

 private:
  alignas(64) char inline_[4096];
  std::unique_ptr<char[]> heap_;
  const void* data_;
};

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const OptionalTensor& residual,
                                           const OptionalTensor& weight, double eps, double offset,
                                           bool before_weight) {
  check_data(x, at::kCPU);
  check_weight(weight, x);
  if (residual) check_like("residual", *residual, x);
  Tensor y = empty_output(x.sizes(), x.options());
  Tensor h = residual ? empty_output(x.sizes(), x.options()) : Tensor();
  Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(wide_type(x)));
  const int64_t rows = row_count(x);
  if (rows == 0) return {y, h, rstd};

  const Rows x_rows = rows_of(x);
  const Rows residual_rows = residual ? rows_of(*residual) : Rows{};
  const Gain gain(weight, offset, x);
  cpu::ForwardArgs args{};
  args.dtype = dtype_of<cpu::Dtype>(x);
  args.rounding = rounding_of(before_weight);
  args.rows = rows;
  args.columns = x.size(-1);
  args.x = x_rows.data;
  args.x_stride = x_rows.stride;
  args.residual = residual_rows.data;
  args.residual_stride = residual_rows.stride;
  args.gain = gain.data();
  args.eps = eps;
  args.y = y.data_ptr();
  args.h = residual ? h.data_ptr() : nullptr;
  args.rstd = rstd.data_ptr();
  const cpu::Kernels& run = kernels();
  at::parallel_for(0, args.rows, grain(args.columns),
                   [&](int64_t begin, int64_t end) { run.norm.forward(args, begin, end); });
  return {y, h, rstd};
}

std::tuple<Tensor, Tensor> backward(const Tensor& dy, const OptionalTensor& dh, const Tensor& x,
                                    const OptionalTensor& weight, const Tensor& rstd, double offset, bool before_weight,
                                    bool need_dx, bool need_dw) {
  check_data(x, at::kCPU);
  check_weight(weight, x);
  check_like("dy", dy, x);
  if (dh) check_like("dh", *dh, x);
  const Tensor rstd_row = checked_rstd(rstd, x);
  need_dw = need_dw && weight.has_value();
  Tensor dx = need_dx ? empty_output(x.sizes(), x.options()) : nothing_like(x);
  Tensor dw = need_dw ? at::empty(weight->sizes(), weight->options()) : nothing_like(weight ? *weight : x);
  const int64_t rows = row_count(x), columns = x.size(-1);
  if (need_dw && rows == 0) dw.zero_();
  if (rows == 0 || columns == 0 || (!need_dx && !need_dw)) return {dx, dw};

  const Rows x_rows = rows_of(x), dy_rows = rows_of(dy), dh_rows = dh ? rows_of(*dh) : Rows{};
  const Gain gain(weight, offset, x);
  cpu::BackwardArgs args{};
  args.dtype = dtype_of<cpu::Dtype>(x);
  args.rounding = rounding_of(before_weight);
  args.rows = rows;
  args.columns = columns;
  args.dy = dy_rows.data;
  args.dy_stride = dy_rows.stride;
  args.dh = dh_rows.data;
  args.dh_stride = dh_rows.stride;
  args.x = x_rows.data;
  args.x_stride = x_rows.stride;
  args.gain = gain.data();
  args.rstd = rstd_row.const_data_ptr();
  args.dx = need_dx ? dx.data_ptr() : nullptr;
  args.chunk_rows = cpu::chunk_rows(args.rows, columns);
  const int64_t chunks = (args.rows + args.chunk_rows - 1) / args.chunk_rows;
  std::unique_ptr<char[]> partials;
  if (need_dw) partials.reset(new char[chunks * columns * c10::elementSize(wide_type(x))]);
  args.partials = partials.get();
  const cpu::Kernels& run = kernels();
  at::parallel_for(0, chunks, grain(args.chunk_rows * columns),
                   [&](int64_t begin, int64_t end) { run.norm.backward(args, begin, end); });
  if (need_dw) {
    cpu::WeightGradArgs sum{args.dtype, dtype_of<cpu::Dtype>(*weight), chunks, columns, partials.get(), dw.data_ptr()};
    at::parallel_for(0, columns, grain(chunks),
                     [&](int64_t begin, int64_t end) { run.norm.weight_grad(sum, begin, end); });
  }
  return {dx, dw};
}

std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  for (int i = 0; i < cpu::variants().count; ++i) names.emplace_back(cpu::variants().list[i]->name);
  return names;
}

void select_variant(const std::string& name) {
  for (int i = 0; i < cpu::variants().count; ++i)
    if (name == cpu::variants().list[i]->name) return chosen.store(cpu::variants().list[i]);
  TORCH_CHECK_VALUE(false, "this processor has no kernels named ", name, "; it has ", variant_names(), ".");
}

}  // namespace
}  // namespace triptych

PYBIND11_MODULE(_cpu, module) {
  using namespace triptych;
  define_phases<&forward, &backward>(module);
  define_analog(module);
  module.def("variants", &variant_names);
  module.def("variant", [] { return std::string(kernels().name); });
  module.def("select_variant", &select_variant);
}
