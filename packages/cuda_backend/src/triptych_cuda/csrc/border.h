// The border between PyTorch and the kernels: what a tensor must be, checked once, and how it becomes rows.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <optional>

namespace triptych {

using OptionalTensor = std::optional<at::Tensor>;

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

inline Rows rows_of(const at::Tensor& tensor) {
  Rows rows;
  std::optional<int64_t> stride;
  if (!tensor.is_neg()) stride = row_stride(tensor);
  if (!stride) {
    rows.owner = tensor.resolve_neg().contiguous();
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
                        weight->layout() == at::kStrided && !weight->is_neg(),
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

}  // namespace triptych
