// rms_norm and add_rms_norm on the CPU. Compiled once for each instruction set; see dispatch.cpp for the choice.
//
//   forward:   h = round(x + residual);  rstd = 1 / sqrt(mean(h^2) + eps);  y = round(h * rstd * gain)
//   backward:  xhat = x * rstd;  wdy = dy * gain;  dx = rstd * (wdy - xhat * mean(wdy * xhat)) + dh
//              dw = sum over rows of dy * xhat
//
// A row is read twice and its second reading hits the cache (a float32 row of 4096 columns is 16 KiB), so memory is
// passed over once. The weight gradient is summed in the same pass, into one row of sums for each chunk of rows; the
// chunks are fixed by the shape, and their sums are added in order by weight_grad.
#include "kernels.h"
#include "rows.h"

namespace triptych::cpu::TRIPTYCH_ISA {
namespace {

TRIPTYCH_INLINE float reciprocal_root(float value) { return 1.0f / __builtin_sqrtf(value); }
TRIPTYCH_INLINE double reciprocal_root(double value) { return 1.0 / __builtin_sqrt(value); }

template <typename T, bool kResidual, bool kBeforeWeight>
void forward_rows(const ForwardArgs& args, int64_t row_begin, int64_t row_end) {
  using W = Wide<T>;
  const int64_t columns = args.columns;
  const W* gain = static_cast<const W*>(args.gain);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* y = static_cast<T*>(args.y) + row * columns;
    T* h = kResidual ? static_cast<T*>(args.h) + row * columns : nullptr;
    const T* residual = kResidual ? static_cast<const T*>(args.residual) + row * args.residual_stride : nullptr;
    const W squares = sum_row<W>(columns, [=](const Block<W>& sum, int64_t column, auto access)
                                              __attribute__((always_inline)) {
      Block<W> value = access.read(x + column);
      if constexpr (kResidual) {
        value = rounded_to<T>(value + access.read(residual + column));
        access.write(value, h + column);
      }
      return fused(value, value, sum);
    });
    const W count = static_cast<W>(columns > 0 ? columns : 1);
    const W rstd = reciprocal_root(squares / count + static_cast<W>(args.eps));
    static_cast<W*>(args.rstd)[row] = rstd;
    const Block<W> scale = splat(rstd);
    const T* normed = kResidual ? h : x;
    for_row<W>(columns, [=](int64_t column, auto access) __attribute__((always_inline)) {
      Block<W> xhat = access.read(normed + column) * scale;
      if constexpr (kBeforeWeight) xhat = rounded_to<T>(xhat);
      access.write(xhat * access.read(gain + column), y + column);
    });
  }
}

enum class WeightGrad { none, of_xhat, of_rounded_xhat };

template <typename T, bool kDx, WeightGrad kDw>
void backward_chunks(const BackwardArgs& args, int64_t chunk_begin, int64_t chunk_end) {
  using W = Wide<T>;
  const int64_t columns = args.columns;
  const W* gain = static_cast<const W*>(args.gain);
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    W* dw = nullptr;
    if constexpr (kDw != WeightGrad::none) {
      dw = static_cast<W*>(args.partials) + chunk * columns;
      __builtin_memset(dw, 0, columns * sizeof(W));
    }
    const int64_t row_begin = chunk * args.chunk_rows;
    const int64_t row_end = row_begin + args.chunk_rows < args.rows ? row_begin + args.chunk_rows : args.rows;
    for (int64_t row = row_begin; row < row_end; ++row) {
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
      const T* dy = static_cast<const T*>(args.dy) + row * args.dy_stride;
      const T* dh = args.dh ? static_cast<const T*>(args.dh) + row * args.dh_stride : nullptr;
      T* dx = kDx ? static_cast<T*>(args.dx) + row * columns : nullptr;
      const W rstd = static_cast<const W*>(args.rstd)[row];
      const Block<W> scale = splat(rstd);
      Block<W> minus_mean = splat<W>(0);
      if constexpr (kDx) {
        const W dot = sum_row<W>(columns, [=](const Block<W>& sum, int64_t column, auto access)
                                              __attribute__((always_inline)) {
          const Block<W> wdy = access.read(dy + column) * access.read(gain + column);
          return fused(wdy, access.read(x + column) * scale, sum);
        });
        minus_mean = splat(-dot / static_cast<W>(columns));
      }
      for_row<W>(columns, [=](int64_t column, auto access) __attribute__((always_inline)) {
        const Block<W> grad = access.read(dy + column);
        const Block<W> xhat = access.read(x + column) * scale;
        if constexpr (kDw == WeightGrad::of_xhat)
          access.write(fused(grad, xhat, access.read(dw + column)), dw + column);
        if constexpr (kDw == WeightGrad::of_rounded_xhat)
          access.write(fused(grad, rounded_to<T>(xhat), access.read(dw + column)), dw + column);
        if constexpr (kDx) {
          Block<W> out = scale * fused(xhat, minus_mean, grad * access.read(gain + column));
          if (dh) out = out + access.read(dh + column);
          access.write(out, dx + column);
        }
      });
    }
  }
}

template <typename W, typename D>
void weight_grad_columns(const WeightGradArgs& args, int64_t column_begin, int64_t column_end) {
  const W* partials = static_cast<const W*>(args.partials);
  D* dw = static_cast<D*>(args.dw);
  constexpr int64_t lanes = Block<W>::kLanes;
  for (int64_t column = column_begin; column < column_end; column += lanes) {
    const int64_t count = column_end - column < lanes ? column_end - column : lanes;
    Block<W> sum = splat<W>(0);
    if (count == lanes) {
      for (int64_t chunk = 0; chunk < args.chunks; ++chunk) sum = sum + load(partials + chunk * args.columns + column);
      store(sum, dw + column);
    } else {
      for (int64_t chunk = 0; chunk < args.chunks; ++chunk)
        sum = sum + load_tail(partials + chunk * args.columns + column, count);
      store_tail(sum, dw + column, count);
    }
  }
}

template <typename W, typename D>
void gain_row(const GainArgs& args) {
  W* gain = static_cast<W*>(args.gain);
  const D* weight = static_cast<const D*>(args.weight);
  const W offset = static_cast<W>(args.offset);
  if (args.weight_stride == 1) {
    for_row<W>(args.columns, [=](int64_t column, auto access) __attribute__((always_inline)) {
      access.write(access.read(weight + column) + splat(offset), gain + column);
    });
    return;
  }
  for (int64_t column = 0; column < args.columns; ++column) {
    const Block<W> value = load_tail(weight + column * args.weight_stride, 1) + splat(offset);
    store_tail(value, gain + column, 1);
  }
}

// ---- from run-time types to templates

template <typename T>
void forward_of(const ForwardArgs& args, int64_t begin, int64_t end) {
  // Rounding before the weight means something only where rounding does.
  const bool before = sizeof(T) == 2 && args.rounding == Rounding::before_weight;
  if (args.residual)
    (before ? forward_rows<T, true, sizeof(T) == 2> : forward_rows<T, true, false>)(args, begin, end);
  else
    (before ? forward_rows<T, false, sizeof(T) == 2> : forward_rows<T, false, false>)(args, begin, end);
}

template <typename T, bool kDx>
void backward_into(const BackwardArgs& args, int64_t begin, int64_t end) {
  if (!args.partials)
    backward_chunks<T, kDx, WeightGrad::none>(args, begin, end);
  else if (sizeof(T) == 2 && args.rounding == Rounding::before_weight)
    backward_chunks<T, kDx, sizeof(T) == 2 ? WeightGrad::of_rounded_xhat : WeightGrad::of_xhat>(args, begin, end);
  else
    backward_chunks<T, kDx, WeightGrad::of_xhat>(args, begin, end);
}

template <typename T>
void backward_of(const BackwardArgs& args, int64_t begin, int64_t end) {
  (args.dx ? backward_into<T, true> : backward_into<T, false>)(args, begin, end);
}

void forward(const ForwardArgs& args, int64_t row_begin, int64_t row_end) {
  switch (args.dtype) {
    case Dtype::float32: return forward_of<float>(args, row_begin, row_end);
    case Dtype::bfloat16: return forward_of<BFloat16>(args, row_begin, row_end);
    case Dtype::float16: return forward_of<Float16>(args, row_begin, row_end);
    case Dtype::float64: return forward_of<double>(args, row_begin, row_end);
  }
}

void backward(const BackwardArgs& args, int64_t chunk_begin, int64_t chunk_end) {
  switch (args.dtype) {
    case Dtype::float32: return backward_of<float>(args, chunk_begin, chunk_end);
    case Dtype::bfloat16: return backward_of<BFloat16>(args, chunk_begin, chunk_end);
    case Dtype::float16: return backward_of<Float16>(args, chunk_begin, chunk_end);
    case Dtype::float64: return backward_of<double>(args, chunk_begin, chunk_end);
  }
}

void weight_grad(const WeightGradArgs& args, int64_t column_begin, int64_t column_end) {
  switch (args.weight_dtype) {
    case Dtype::float32: return weight_grad_columns<float, float>(args, column_begin, column_end);
    case Dtype::bfloat16: return weight_grad_columns<float, BFloat16>(args, column_begin, column_end);
    case Dtype::float16: return weight_grad_columns<float, Float16>(args, column_begin, column_end);
    case Dtype::float64: return weight_grad_columns<double, double>(args, column_begin, column_end);
  }
}

template <typename W>
void ones(const GainArgs& args) {
  for (int64_t column = 0; column < args.columns; ++column) static_cast<W*>(args.gain)[column] = 1;
}

void gain(const GainArgs& args) {
  if (!args.weight) return (args.dtype == Dtype::float64 ? ones<double> : ones<float>)(args);
  switch (args.weight_dtype) {
    case Dtype::float32: return gain_row<float, float>(args);
    case Dtype::bfloat16: return gain_row<float, BFloat16>(args);
    case Dtype::float16: return gain_row<float, Float16>(args);
    case Dtype::float64: return gain_row<double, double>(args);
  }
}

}  // namespace

extern const NormKernels norm_kernels;
const NormKernels norm_kernels{forward, backward, weight_grad, gain};

}  // namespace triptych::cpu::TRIPTYCH_ISA
