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

template <class W, class Acc>
struct SumArgs {
  const Acc* partial;
  W* dw;
  int64_t partials;
  int64_t cols;
};

// kWidth columns a thread at a time: 4 when N allows 16-byte loads, else 1.
template <class W, class Acc, int kColumns, int kWidth>
__global__ void __launch_bounds__(kThreads) sum_partials_kernel(const SumArgs<W, Acc> args) {
  constexpr int kLanes = kColumns / kWidth;
  constexpr int kRows = kThreads / kLanes;  // read side by side
  __shared__ Acc parts[kRows][kColumns];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int row_lane = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns;
  const int64_t column = first + lane * kWidth;

  wait_for_last_grid();
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
  // kTeam threads of one warp add up a column's parts.
  constexpr int kTeam = kThreads / kColumns;
  static_assert(kTeam <= 32, "a team lies in one warp");
  const int mine = static_cast<int>(threadIdx.x) / kTeam;
  Acc total = Acc(0);
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x) % kTeam; i < kRows; i += kTeam) total += parts[i][mine];
  total = sum_lanes(total, kTeam);
  if (threadIdx.x % kTeam == 0 && first + mine < args.cols) args.dw[first + mine] = narrow<W>(total);
}

// Lets the grid be placed while the one before it ends: 1 to 2 us of a launch that takes about 5.
template <class Kernel, class Args>
cudaError_t launch_early(Kernel* kernel, cudaStream_t stream, int64_t blocks, const Args& args) {
  DeviceFacts device;
  const cudaError_t status = current_device_facts(&device);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = device.cc_major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

// 32 columns a block are one cache line of float32. Few columns come with many partial rows: then 8 (a sector), so that
// the blocks cover the device.
template <class W, class Acc, int kColumns>
cudaError_t sum_columns(const SumArgs<W, Acc>& args, cudaStream_t stream) {
  auto* kernel = sum_partials_kernel<W, Acc, kColumns, 1>;
  if constexpr (std::is_same<Acc, float>::value) {
    if (args.cols % 4 == 0) kernel = sum_partials_kernel<W, Acc, kColumns, 4>;
  }
  return launch_early(kernel, stream, divide_up(args.cols, kColumns), args);
}

template <class W, class Acc>
cudaError_t sum_as(const void* partial, int64_t partials, int64_t cols, void* dw, cudaStream_t stream) {
  const SumArgs<W, Acc> args{static_cast<const Acc*>(partial), static_cast<W*>(dw), partials, cols};
  return cols <= 2048 ? sum_columns<W, Acc, 8>(args, stream) : sum_columns<W, Acc, 32>(args, stream);
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
