// The CUDA extension module: checks, allocates, and launches the kernels of cuda/ on the tensor's device and stream.
#include "border.h"
#include "cuda/kernels.h"

#include <ATen/ops/full.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>
#include <string>

namespace triptych {
namespace {

using at::Tensor;

cudaStream_t stream_of(const Tensor& x) { return c10::cuda::getCurrentCUDAStream(x.device().index()).stream(); }

// The arguments of a launch, and the copies that some of them point into. A copy may be freed as soon as the kernel
// is queued: the caching allocator hands its memory on to the same stream only.
struct Forward {
  Rows x, residual;
  cuda::RmsNormForward call;

  Forward(const Tensor& data, const OptionalTensor& other, const OptionalTensor& weight, double eps, double offset,
          bool before_weight)
      : x(rows_of(data)) {
    if (other) {
      residual = rows_of(*other);
      call.residual = residual.data;
      call.residual_row_stride = residual.stride;
    }
    call.x = x.data;
    call.x_row_stride = x.stride;
    set_weight(call, weight);
    call.rows = row_count(data);
    call.cols = data.size(-1);
    call.eps = eps;
    call.offset = offset;
    call.x_dtype = dtype_of<cuda::DType>(data);
    call.round_before_weight = before_weight;
  }
};

struct Backward {
  Rows dy, dh, x;
  Tensor rstd;
  cuda::RmsNormBackward call;

  Backward(const Tensor& grad, const OptionalTensor& grad_h, const Tensor& data, const OptionalTensor& weight,
           const Tensor& statistics, double offset, bool before_weight)
      : dy(rows_of(grad)), x(rows_of(data)), rstd(statistics) {
    call.dy = dy.data;
    call.dy_row_stride = dy.stride;
    if (grad_h) {
      dh = rows_of(*grad_h);
      call.dh = dh.data;
      call.dh_row_stride = dh.stride;
    }
    call.x = x.data;
    call.x_row_stride = x.stride;
    set_weight(call, weight);
    call.rstd = rstd.const_data_ptr();
    call.rows = row_count(data);
    call.cols = data.size(-1);
    call.offset = offset;
    call.x_dtype = dtype_of<cuda::DType>(data);
    call.round_before_weight = before_weight;
  }
};

// Both take the guard before they allocate or copy: on a thread that has made no CUDA call it creates the context.

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& x, const OptionalTensor& residual,
                                           const OptionalTensor& weight, double eps, double offset,
                                           bool before_weight) {
  check_data(x, at::kCUDA);
  check_weight(weight, x);
  if (residual) check_like("residual", *residual, x);
  const c10::cuda::CUDAGuard here(x.device());
  Tensor y = at::empty(x.sizes(), x.options());
  Tensor h = residual ? at::empty(x.sizes(), x.options()) : Tensor();
  const auto statistics = x.options().dtype(wide_type(x));
  const auto leading = x.sizes().slice(0, x.dim() - 1);
  // Rows of no columns have a mean square of 0, and no kernel runs for them.
  if (x.size(-1) == 0) return {y, h, at::full(leading, 1.0 / std::sqrt(eps), statistics)};
  Tensor rstd = at::empty(leading, statistics);
  if (row_count(x) == 0) return {y, h, rstd};
  Forward launch(x, residual, weight, eps, offset, before_weight);
  launch.call.y = y.data_ptr();
  launch.call.h = residual ? h.data_ptr() : nullptr;
  launch.call.rstd = rstd.data_ptr();
  C10_CUDA_CHECK(cuda::rms_norm_forward(launch.call, stream_of(x)));
  return {y, h, rstd};
}

std::tuple<Tensor, Tensor> backward(const Tensor& dy, const OptionalTensor& dh, const Tensor& x,
                                    const OptionalTensor& weight, const Tensor& rstd, double offset, bool before_weight,
                                    bool need_dx, bool need_dw) {
  check_data(x, at::kCUDA);
  check_weight(weight, x);
  check_like("dy", dy, x);
  if (dh) check_like("dh", *dh, x);
  const c10::cuda::CUDAGuard here(x.device());
  const Tensor statistics = checked_rstd(rstd, x);
  need_dw = need_dw && weight.has_value();
  Tensor dx = need_dx ? at::empty(x.sizes(), x.options()) : nothing_like(x);
  Tensor dw = need_dw ? at::empty(weight->sizes(), weight->options()) : nothing_like(weight ? *weight : x);
  const bool empty = row_count(x) == 0;
  if (need_dw && empty) dw.zero_();
  if (empty || x.size(-1) == 0 || (!need_dx && !need_dw)) return {dx, dw};
  Backward launch(dy, dh, x, weight, statistics, offset, before_weight);
  launch.call.dx = need_dx ? dx.data_ptr() : nullptr;
  launch.call.dw = need_dw ? dw.data_ptr() : nullptr;
  Tensor workspace;
  if (need_dw) {
    const int64_t bytes = cuda::rms_norm_backward_workspace_bytes(launch.call);
    workspace = at::empty({bytes}, x.options().dtype(at::kByte));
    launch.call.workspace = workspace.data_ptr();
  }
  C10_CUDA_CHECK(cuda::rms_norm_backward(launch.call, stream_of(x)));
  return {dx, dw};
}

std::string path_name(cuda::Path path) {
  switch (path) {
    case cuda::Path::warp: return "warp";
    case cuda::Path::block: return "block";
    case cuda::Path::cluster: return "cluster";
    case cuda::Path::looped: return "looped";
    default: return "none";
  }
}

// The kernel family a call would run on. Outputs are fresh and so are aligned; any aligned address stands for them.
alignas(256) char aligned_output[256];

std::string forward_path(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                         bool before_weight) {
  check_data(x, at::kCUDA);
  const c10::cuda::CUDAGuard here(x.device());
  Forward launch(x, residual, weight, 0.0, 0.0, before_weight);
  launch.call.y = launch.call.rstd = aligned_output;
  launch.call.h = residual ? aligned_output : nullptr;
  return path_name(cuda::rms_norm_forward_path(launch.call));
}

std::string backward_path(const Tensor& dy, const OptionalTensor& dh, const Tensor& x, const OptionalTensor& weight,
                          const Tensor& rstd, bool before_weight, bool need_dx, bool need_dw) {
  check_data(x, at::kCUDA);
  const c10::cuda::CUDAGuard here(x.device());
  Backward launch(dy, dh, x, weight, checked_rstd(rstd, x), 0.0, before_weight);
  launch.call.dx = need_dx ? aligned_output : nullptr;
  launch.call.dw = need_dw && weight ? aligned_output : nullptr;
  launch.call.workspace = aligned_output;
  return path_name(cuda::rms_norm_backward_path(launch.call));
}

}  // namespace

void define_analog(py::module_& module);  // binding_cuda_analog.cpp

}  // namespace triptych

PYBIND11_MODULE(_cuda, module) {
  using namespace triptych;
  using Unlocked = py::call_guard<py::gil_scoped_release, at::AutoDispatchBelowADInplaceOrView>;
  define_phases<&forward, &backward>(module);
  define_analog(module);
  module.def("forward_path", &forward_path, Unlocked());
  module.def("backward_path", &backward_path, Unlocked());
}
