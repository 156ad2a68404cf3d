// The border between PyTorch and the kernels: the entry points of a module, what a tensor must be, checked once, and
// how it becomes rows.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>

namespace triptych {

using OptionalTensor = std::optional<at::Tensor>;

// The tensor itself, or a copy where its memory does not hold its elements: with the negative bit the signs are turned,
// and a zero tensor (forward-mode autograd makes them) has no memory at all.
inline at::Tensor plain(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), tensor.options());
  return tensor.is_neg() ? tensor.resolve_neg() : tensor;
}

inline OptionalTensor plain(const OptionalTensor& tensor) { return tensor ? OptionalTensor(plain(*tensor)) : tensor; }

// The kernels' name for a dtype that `check_data` or `check_weight` accepts. Each part has an enumeration of its own.
template <class Dtype>
Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Dtype::float32;
    case at::kBFloat16: return Dtype::bfloat16;
    case at::kHalf: return Dtype::float16;
    default: return Dtype::float64;
  }
}

// The weight's fields of a kernel's arguments; without a weight they keep what they have.
template <class Arguments>
void set_weight(Arguments& args, const OptionalTensor& weight) {
  if (!weight) return;
  args.weight = weight->const_data_ptr();
  args.weight_stride = weight->stride(0);
  args.weight_dtype = dtype_of<decltype(args.weight_dtype)>(*weight);
}

// A tensor as a matrix of rows: element (r, c) is data[r * stride + c]. `owner` keeps the memory alive where the
// layout had to be copied; the stride always belongs to the memory that `data` points to.
struct Rows {
  at::Tensor owner;
  const void* data = nullptr;
  int64_t stride = 0;
};

// The one distance between consecutive rows when the leading dimensions are walked in order, or nullopt where there
// is none. Dimensions of size 1 never matter, whatever their stride.
inline std::optional<int64_t> row_stride(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int64_t last = tensor.dim() - 1;
  if (sizes[last] > 1 && strides[last] != 1) return std::nullopt;
  std::optional<int64_t> found;
  int64_t expected = 0;
  for (int64_t dim = last - 1; dim >= 0; --dim) {
    if (sizes[dim] == 1) continue;
    if (!found)
      found = strides[dim];
    else if (strides[dim] != expected)
      return std::nullopt;
    expected = strides[dim] * sizes[dim];
  }
  return found.value_or(sizes[last]);
}

// The tensor must be plain.
inline Rows rows_of(const at::Tensor& tensor) {
  Rows rows;
  const std::optional<int64_t> stride = row_stride(tensor);
  if (!stride) {
    rows.owner = tensor.contiguous();
    rows.data = rows.owner.const_data_ptr();
    rows.stride = rows.owner.size(-1);
    return rows;
  }
  rows.data = tensor.const_data_ptr();
  rows.stride = *stride;
  return rows;
}

inline int64_t row_count(const at::Tensor& x) {
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) rows *= x.size(dim);
  return rows;
}

inline at::ScalarType wide_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_data(const at::Tensor& x, c10::DeviceType device) {
  TORCH_CHECK_VALUE(x.layout() == at::kStrided && x.device().type() == device, "the data is on ", x.device(),
                    " with layout ", x.layout(), "; this module needs a strided tensor on ", device, ".");
  TORCH_CHECK_VALUE(x.dim() >= 1, "the data has no dimensions; its last dimension is the one that is normalised.");
  const auto type = x.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble,
                   "the data is ", type, "; float32, bfloat16, float16 and float64 are supported.");
}

inline void check_like(const char* name, const at::Tensor& tensor, const at::Tensor& x) {
  TORCH_CHECK_VALUE(tensor.sizes() == x.sizes() && tensor.scalar_type() == x.scalar_type() &&
                        tensor.device() == x.device() && tensor.layout() == at::kStrided,
                    name, " is ", tensor.scalar_type(), tensor.sizes(), " on ", tensor.device(),
                    "; it must match the data, which is ", x.scalar_type(), x.sizes(), " on ", x.device(), ".");
}

inline void check_weight(const OptionalTensor& weight, const at::Tensor& x) {
  if (!weight) return;
  TORCH_CHECK_VALUE(weight->dim() == 1 && weight->size(0) == x.size(-1) && weight->device() == x.device() &&
                        weight->layout() == at::kStrided,
                    "weight is ", weight->sizes(), " on ", weight->device(), "; it must be a plain tensor [", x.size(-1),
                    "] on ", x.device(), ".");
  const auto type = weight->scalar_type();
  const bool narrow = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  TORCH_CHECK_TYPE(x.scalar_type() == at::kDouble ? type == at::kDouble : narrow, "weight is ", type,
                   " and the data is ", x.scalar_type(),
                   "; float64 goes with float64 only, and the other types with float32, bfloat16 or float16.");
}

// rstd as the contract lays it out: one wide number a row. Copied where it arrives with other strides.
inline at::Tensor checked_rstd(const at::Tensor& rstd, const at::Tensor& x) {
  TORCH_CHECK_VALUE(rstd.sizes() == x.sizes().slice(0, x.dim() - 1) && rstd.scalar_type() == wide_type(x) &&
                        rstd.device() == x.device(),
                    "rstd is ", rstd.scalar_type(), rstd.sizes(), " on ", rstd.device(), "; it must be ", wide_type(x),
                    " with one number for each row of ", x.sizes(), " on ", x.device(), ".");
  return rstd.contiguous();
}

inline at::Tensor nothing_like(const at::Tensor& tensor) { return at::empty({0}, tensor.options()); }

// Defines the four phases in a module, over its own two:
//   forward(x, residual, weight, eps, offset, before_weight) -> (y, h, rstd), h undefined without a residual
//   backward(dy, dh, x, weight, rstd, offset, before_weight, need_dx, need_dw) -> (dx, dw)
// They run without the interpreter's lock, below autograd, and see plain tensors only.
template <auto forward, auto backward>
void define_phases(py::module_& module) {
  using at::Tensor;
  using Unlocked = py::call_guard<py::gil_scoped_release, at::AutoDispatchBelowADInplaceOrView>;
  module.def(
      "rms_norm_forward",
      [](const Tensor& x, const OptionalTensor& weight, double eps, double offset, bool before_weight) {
        auto [y, h, rstd] = forward(plain(x), std::nullopt, plain(weight), eps, offset, before_weight);
        return std::tuple(y, rstd);
      },
      Unlocked());
  module.def(
      "add_rms_norm_forward",
      [](const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps, double offset,
         bool before_weight) {
        return forward(plain(x), plain(residual), plain(weight), eps, offset, before_weight);
      },
      Unlocked());
  module.def(
      "rms_norm_backward",
      [](const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd, double offset,
         bool before_weight, bool need_dx, bool need_dw) {
        return backward(plain(dy), std::nullopt, plain(x), plain(weight), plain(rstd), offset, before_weight, need_dx,
                        need_dw);
      },
      Unlocked());
  module.def(
      "add_rms_norm_backward",
      [](const Tensor& dy, const OptionalTensor& dh, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd,
         double offset, bool before_weight, bool need_dx, bool need_dw) {
        return backward(plain(dy), plain(dh), plain(x), plain(weight), plain(rstd), offset, before_weight, need_dx,
                        need_dw);
      },
      Unlocked());
}

}  // namespace triptych
