// Products by cuBLAS, through PyTorch: of whole matrices and of tiles, in full precision whatever its settings say.
#pragma once

#include "analog.h"
#include "border.h"

#include <ATen/Context.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace triptych {

inline bool is_half(const at::Tensor& x) { return x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16; }

inline at::TensorOptions wide_options(const at::Tensor& x) { return x.options().dtype(wide_type(x)); }

// cuBLAS may split a long sum over blocks and, as PyTorch sets it up by default, add their parts in 16 bits. It does so
// where the result has too few elements to fill a device (128 x 128 a block); such results are made in float32.
constexpr int64_t kFillsDevice = int64_t{1} << 21;

inline bool rounds_once(const at::Tensor& operand, int64_t elements) {
  return !is_half(operand) || elements >= kFillsDevice;
}

// PyTorch's settings that would give up digits of a product and that no guard of a call can turn off: it is then made
// in the next wider type. By default there are none.
inline std::optional<at::ScalarType> widened_for_product(const at::Tensor& operand) {
  auto& settings = at::globalContext();
  if (operand.scalar_type() == at::kHalf && settings.allowFP16AccumulationCuBLAS()) return at::kFloat;
  if (operand.scalar_type() == at::kFloat && settings.blasPreferredBackend() == at::BlasBackend::Cublaslt &&
      settings.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32) {
    return at::kDouble;
  }
  return std::nullopt;
}

// out[i] = a[i] b[i] for [g, m, k] and [g, k, n]; out of the operands' dtype or wide, any strides. Sums are wide.
inline void multiply(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  if (out.numel() == 0) return;
  if (a.size(2) == 0) {
    out.zero_();
    return;
  }
  if (const auto wider = widened_for_product(a)) {
    const at::Tensor wide_a = a.to(*wider), wide_b = b.to(*wider);
    out.copy_(at::bmm(wide_a, wide_b));
    return;
  }
  const at::NoTF32Guard full_float32;
  const bool widens = out.scalar_type() != a.scalar_type();
  if (a.size(0) == 1) {
    at::Tensor only = out.select(0, 0);
    if (widens) {
      at::mm_out(only, a.select(0, 0), b.select(0, 0), at::kFloat);
    } else {
      at::mm_out(only, a.select(0, 0), b.select(0, 0));
    }
    return;
  }
  at::Tensor all = out;
  if (widens) {
    at::bmm_out(all, a, b, at::kFloat);
  } else {
    at::bmm_out(all, a, b);
  }
}

// Tiles of one size that lie side by side.
struct TileRun {
  int64_t first = 0, count = 0, start = 0, size = 0;

  // Their columns of a matrix [rows, N]: [count, rows, size].
  at::Tensor of(const at::Tensor& matrix) const {
    return at::as_strided(matrix, {count, matrix.size(0), size}, {size, matrix.stride(0), 1},
                          matrix.storage_offset() + start);
  }
};

// Calls `run` for the tiles from `first`, `count` of them: once, or twice where the longer ones end among them.
template <class Run>
void for_runs(const Tiles& tiles, int64_t first, int64_t count, Run run) {
  while (count > 0) {
    const int64_t longer = tiles.extra() - first;
    const int64_t alike = longer > 0 ? std::min(count, longer) : count;
    run(TileRun{first, alike, tiles.start(first), tiles.size(first)});
    first += alike;
    count -= alike;
  }
}

}  // namespace triptych
