// Adds the rows of a backward workspace into dw: coalesced, in a fixed order, rounded once.
//
// A second kernel rather than atomics (their order, and so the last bits, would change from run to run) or a last
// block that adds everything (one SM reads its 1 to 8 MB from L2 in 10 us and more; all of them in under 3).
#include "dw_sum.h"
#include "launch.cuh"

namespace triptych {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 32;  // a block; 128 bytes of float32, one cache line

template <class W, class Acc>
struct SumArgs {
  const Acc* partial;
  W* dw;
  int64_t partials;
  int64_t cols;
};

// kWidth columns a thread at a time: 4 when N allows 16-byte loads, so that 32 rows are read side by side; else 1.
template <class W, class Acc, int kWidth>
__global__ void __launch_bounds__(kThreads) sum_partials_kernel(const SumArgs<W, Acc> args) {
  constexpr int kLanes = kColumns / kWidth;
  constexpr int kRows = kThreads / kLanes;
  __shared__ Acc parts[kRows][kColumns];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int row_lane = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane * kWidth;

  Acc sum[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] = Acc(0);
  if (column < args.cols) {  // N is a multiple of kWidth: a thread's columns are all inside or all outside
    const Acc* source = args.partial + column;
#pragma unroll 8
    for (int64_t row = row_lane; row < args.partials; row += kRows) {
      if constexpr (kWidth == 4) {
        const float4 four = *reinterpret_cast<const float4*>(source + row * args.cols);
        sum[0] += four.x;
        sum[1] += four.y;
        sum[2] += four.z;
        sum[3] += four.w;
      } else {
        sum[0] += source[row * args.cols];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) parts[row_lane][lane * kWidth + i] = sum[i];
  __syncthreads();
  const int64_t mine = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  if (threadIdx.x < kColumns && mine < args.cols) {
    Acc total = Acc(0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) total += parts[i][threadIdx.x];
    args.dw[mine] = narrow<W>(total);
  }
}

template <class W, class Acc>
cudaError_t sum_as(const void* partial, int64_t partials, int64_t cols, void* dw, cudaStream_t stream) {
  const SumArgs<W, Acc> args{static_cast<const Acc*>(partial), static_cast<W*>(dw), partials, cols};
  auto* kernel = sum_partials_kernel<W, Acc, 1>;
  if constexpr (std::is_same<Acc, float>::value) {
    if (cols % 4 == 0) kernel = sum_partials_kernel<W, Acc, 4>;
  }
  return launch(kernel, stream, divide_up(cols, kColumns), kThreads, 1, 0, args);
}

}  // namespace

cudaError_t sum_partials(const void* partial, int64_t partials, int64_t cols, void* dw, DType dtype,
                         cudaStream_t stream) {
  switch (dtype) {
    case DType::float32: return sum_as<float, float>(partial, partials, cols, dw, stream);
    case DType::float16: return sum_as<__half, float>(partial, partials, cols, dw, stream);
    case DType::bfloat16: return sum_as<__nv_bfloat16, float>(partial, partials, cols, dw, stream);
    case DType::float64: return sum_as<double, double>(partial, partials, cols, dw, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace cuda
}  // namespace triptych
