// RMSNorm backward for what the streamed kernel does not hold: any row length, any alignment, float64.
//
// Two kernels that share nothing, so that the workspace stays independent of the number of rows:
//   rms_norm_backward_rows     dx: a block walks over a row twice
//   rms_norm_backward_columns  partial dw: a block walks down 32 columns of a range of rows
// Each of x and dy is read three times instead of once; the second walk over a row mostly finds it in L2.
#pragma once

#include "backward_kernels.cuh"

namespace triptych {
namespace cuda {

template <class T, class Acc, int kWidth>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_backward_rows(const BackwardArgs<T, Acc> args) {
  __shared__ Acc slots[2][32];
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kWidth;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kWidth;
  int parity = 0;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, parity ^= 1) {
    const T* x = args.x + row * args.x_row_stride;
    const T* dy = args.dy + row * args.dy_row_stride;
    const T* dh = args.dh == nullptr ? nullptr : args.dh + row * args.dh_row_stride;
    T* dx = args.dx + row * args.cols;
    Acc dot = Acc(0);
#pragma unroll 2
    for (int64_t c = first; c < args.cols; c += step) {
      Acc xs[kWidth], dys[kWidth], gain[kWidth];
      load_chunk<T, Acc, kWidth>(x + c, xs);
      load_chunk<T, Acc, kWidth>(dy + c, dys);
      load_gain<T, Acc, kWidth>(args.weight, c, gain);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) dot += dys[e] * gain[e] * xs[e];
    }
    const Acc rstd = args.rstd[row];
    const Acc scale = rstd * (rstd * sum_block(dot, slots[parity]) * args.inverse_cols);
#pragma unroll 2
    for (int64_t c = first; c < args.cols; c += step) {
      Acc xs[kWidth], dys[kWidth], gain[kWidth];
      load_chunk<T, Acc, kWidth>(x + c, xs);
      load_chunk<T, Acc, kWidth>(dy + c, dys);
      load_gain<T, Acc, kWidth>(args.weight, c, gain);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) dys[e] = rstd * (dys[e] * gain[e] - xs[e] * scale);
      if (dh != nullptr) {
        Acc dhs[kWidth];
        load_chunk<T, Acc, kWidth>(dh + c, dhs);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) dys[e] += dhs[e];
      }
      store_chunk<T, Acc, kWidth>(dx + c, dys);
    }
  }
}

constexpr int kColumnThreads = 256;  // 32 columns by 8 rows
constexpr int kColumnsPerBlock = 32;

// Block b takes columns 32 * (b % strips) and on of row range b / strips; range r writes row r of the workspace.
template <class T, class Acc>
__global__ void __launch_bounds__(kColumnThreads)
    rms_norm_backward_columns(const BackwardArgs<T, Acc> args, int64_t rows_per_range) {
  constexpr int kLanes = kColumnThreads / kColumnsPerBlock;
  __shared__ Acc parts[kLanes][kColumnsPerBlock];
  const int64_t strips = (args.cols + kColumnsPerBlock - 1) / kColumnsPerBlock;
  const int64_t range = blockIdx.x / strips;
  const int lane = static_cast<int>(threadIdx.x) % kColumnsPerBlock;
  const int row_lane = static_cast<int>(threadIdx.x) / kColumnsPerBlock;
  const int64_t column = (blockIdx.x - range * strips) * kColumnsPerBlock + lane;
  int64_t end = (range + 1) * rows_per_range;
  if (end > args.rows) end = args.rows;

  Acc sum = Acc(0);
  if (column < args.cols) {
#pragma unroll 4
    for (int64_t row = range * rows_per_range + row_lane; row < end; row += kLanes) {
      const Acc dy = widen<Acc>(args.dy[row * args.dy_row_stride + column]);
      Acc xhat = widen<Acc>(args.x[row * args.x_row_stride + column]) * args.rstd[row];
      if (args.round_before_weight) xhat = widen<Acc>(narrow<T>(xhat));
      sum += dy * xhat;
    }
  }
  parts[row_lane][lane] = sum;
  __syncthreads();
  if (row_lane == 0 && column < args.cols) {
#pragma unroll
    for (int i = 1; i < kLanes; ++i) sum += parts[i][lane];
    args.partial[range * args.cols + column] = sum;
  }
}

}  // namespace cuda
}  // namespace triptych
