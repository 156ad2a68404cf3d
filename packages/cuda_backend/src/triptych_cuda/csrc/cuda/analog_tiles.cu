// tile_abs_max, tile_std and input_range_update: what calibration and dynamic ranges ask of the data.
#include "analog_segments.cuh"
#include "analog_statistics.cuh"

#include <cfloat>

namespace triptych {
namespace cuda {
namespace {

// ---- tile_abs_max --------------------------------------------------------------------------------------------------

// kThreads share a segment: a warp, or the whole block.
template <class T, int kThreads>
__global__ void __launch_bounds__(kSegmentThreads)
    abs_max_kernel(const TileInput input, WideOf<T>* abs_max) {
  using Acc = WideOf<T>;
  __shared__ Bits<Acc> slots[kSegmentThreads / 32];
  constexpr int kSegments = kSegmentThreads / kThreads;
  const int member = static_cast<int>(threadIdx.x) % kThreads;
  const int64_t segments = input.tiles.count * input.rows;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSegments + threadIdx.x / kThreads; i < segments;
       i += static_cast<int64_t>(gridDim.x) * kSegments) {
    int64_t tile, row;
    split_index(i, input.rows, &tile, &row);
    const T* data = static_cast<const T*>(input.x.data) + row * input.x.row_stride + input.tiles.start(tile);
    Bits<Acc> most = 0;
    for_segment(data, input.tiles.size(tile), member, kThreads, [&](Acc value) { most = max(most, abs_bits(value)); });
    most = max_warp(most);
    if constexpr (kThreads > 32) {
      if ((member & 31) == 0) slots[member >> 5] = most;
      __syncthreads();
      most = slots[member & (kThreads / 32 - 1)];
      most = max_warp(most);
      __syncthreads();
    }
    if (member == 0) abs_max[i] = from_bits(most);
  }
}

// ---- moments -------------------------------------------------------------------------------------------------------

// Number, mean and sum of squared distances from the mean; merged as Chan, Golub and LeVeque do. Equal elements keep
// m2 at exactly 0: every mean is then the element itself.
template <class Acc>
struct Moments {
  Acc number = 0, mean = 0, m2 = 0;

  __device__ __forceinline__ void merge(const Moments& other) {
    if (other.number == 0) return;
    if (number == 0) {
      *this = other;
      return;
    }
    const Acc all = number + other.number, delta = other.mean - mean, part = other.number / all;
    mean += delta * part;
    m2 += other.m2 + delta * delta * (number * part);
    number = all;
  }
  __device__ __forceinline__ Moments from_lane(int delta) const {
    Moments other;
    other.number = __shfl_down_sync(kWholeWarp, number, delta);
    other.mean = __shfl_down_sync(kWholeWarp, mean, delta);
    other.m2 = __shfl_down_sync(kWholeWarp, m2, delta);
    return other;
  }
  // Two passes over values in registers, as distances from the first.
  template <int kWidth>
  __device__ __forceinline__ void take(const Acc (&values)[kWidth], int count) {
    if (count == 0) return;
    Moments part;
    Acc sum = 0;
#pragma unroll
    for (int e = 1; e < kWidth; ++e) sum += e < count ? values[e] - values[0] : Acc(0);
    const Acc mean_distance = sum / static_cast<Acc>(count);
    part.number = static_cast<Acc>(count);
    part.mean = values[0] + mean_distance;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const Acc off = e < count ? values[e] - values[0] - mean_distance : Acc(0);
      part.m2 += off * off;
    }
    merge(part);
  }
  __device__ __forceinline__ Acc std() const {
    return number < 2 ? not_a_number<Acc>() : static_cast<Acc>(sqrt(m2 / (number - 1)));
  }
};

template <class Acc>
struct Extremes {
  Acc least = Acc(INFINITY), largest = Acc(-INFINITY);
  bool finite = true;

  __device__ __forceinline__ void merge(const Extremes& other) {
    least = other.least < least ? other.least : least;
    largest = other.largest > largest ? other.largest : largest;
    finite = finite && other.finite;
  }
  __device__ __forceinline__ Extremes from_lane(int delta) const {
    Extremes other;
    other.least = __shfl_down_sync(kWholeWarp, least, delta);
    other.largest = __shfl_down_sync(kWholeWarp, largest, delta);
    other.finite = __shfl_down_sync(kWholeWarp, static_cast<int>(finite), delta) != 0;
    return other;
  }
  template <int kWidth>
  __device__ __forceinline__ void take(const Acc (&values)[kWidth], int count) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if (e >= count) continue;
      least = values[e] < least ? values[e] : least;
      largest = values[e] > largest ? values[e] : largest;
      finite = finite && abs_bits(values[e]) < abs_bits(Acc(INFINITY));
    }
  }
};

template <class Acc>
struct CalibrationArgs {
  UpdateOptions options;
  ParameterView range, least, largest;
  const int64_t* count;  // null: tile_std, every tile is read
  int64_t count_stride;
  void* new_range;
  int64_t* new_count;
  Acc* new_least;
  Acc* new_largest;
  Acc* std;

  __device__ __forceinline__ bool done(int64_t tile) const {
    return count != nullptr && count[tile * count_stride] >= options.init_from_data;
  }
};

// Stage 1. The values are taken relative to the tile's first element: with a large common offset the means then keep
// their digits. That element belongs to the data, so that its distance from the others is within what their spread
// allows.
template <class T, class Statistics>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(const TileInput input, const CalibrationArgs<WideOf<T>> args, int64_t blocks,
                      Statistics* partials) {
  using Acc = WideOf<T>;
  constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  constexpr bool kMoments = std::is_same<Statistics, Moments<Acc>>::value;
  const int64_t tile = blockIdx.x / blocks, block = blockIdx.x - tile * blocks;
  if (args.done(tile)) return;
  const T* x = static_cast<const T*>(input.x.data);
  const int lane = static_cast<int>(threadIdx.x & 31);
  Acc shift = 0;
  if (kMoments && input.rows > 0 && input.tiles.size(tile) > 0) shift = widen<Acc>(x[input.tiles.start(tile)]);
  Statistics mine;
  for_units<T>(input, tile, block, blocks, [&](int64_t row, int64_t column, int64_t columns) {
    const T* data = x + row * input.x.row_stride + column;
    Acc values[kWidth];
    int count = 0;
    bool packed = false;
    if constexpr (!std::is_same<T, double>::value) {
      packed = columns == kUnit<T> && reinterpret_cast<uintptr_t>(data) % 16 == 0;
      if (packed) {
        unpack<T>(load_pack(data + lane * kWidth), values);
        count = kWidth;
      }
    }
    if (!packed) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int64_t c = lane + 32 * e;
        values[e] = c < columns ? widen<Acc>(data[c]) : Acc(0);
        count += c < columns;
      }
    }
    if constexpr (kMoments) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) values[e] -= shift;
    }
    mine.take(values, count);
  });
  merge_block(&mine);
  if (threadIdx.x == 0) partials[blockIdx.x] = mine;
}

// Stage 2 of tile_std.
template <class Acc>
__global__ void __launch_bounds__(kStatisticsThreads)
    std_kernel(const Moments<Acc>* partials, int64_t blocks, Acc* std) {
  const Moments<Acc> all = merge_partials(partials + blockIdx.x * blocks, blocks);
  if (threadIdx.x == 0) std[blockIdx.x] = all.std();
}

// A range to be stored, 0 or greater: never infinite. NaN stays.
template <class Acc>
__device__ __forceinline__ Acc in_range(Acc range, DType dtype) {
  Acc largest;
  if constexpr (std::is_same<Acc, double>::value) {
    largest = DBL_MAX;
  } else {
    largest = dtype == DType::float32 ? FLT_MAX : dtype == DType::bfloat16 ? 0x1.fep127f : 65504.0f;
  }
  return range > largest ? largest : range;
}

// Stage 2 of input_range_update, mode std.
template <class Acc>
__global__ void __launch_bounds__(kStatisticsThreads)
    update_std_kernel(const Moments<Acc>* partials, int64_t blocks, const CalibrationArgs<Acc> args) {
  const int64_t tile = blockIdx.x;
  const bool done = args.done(tile);
  Moments<Acc> all;
  if (!done) all = merge_partials(partials + tile * blocks, blocks);
  if (threadIdx.x != 0) return;
  int64_t count = args.count[tile * args.count_stride];
  Acc range = read_parameter<Acc>(args.range, tile);
  if (!done) {
    const Acc std = all.std();
    if (std > 0 && std < Acc(INFINITY)) {  // one that overflowed counts no more than a NaN
      const Acc k = static_cast<Acc>(count);
      range = (range * k + static_cast<Acc>(args.options.init_std_alpha) * std) / (k + 1);
      ++count;
    }
    range = in_range(magnitude(range), args.range.dtype);
  }
  write_number(args.new_range, args.range.dtype, tile, range);
  args.new_count[tile] = count;
}

// Stage 2 of input_range_update, mode extremes.
template <class Acc>
__global__ void __launch_bounds__(kStatisticsThreads)
    update_extremes_kernel(const Extremes<Acc>* partials, int64_t blocks, const CalibrationArgs<Acc> args) {
  const int64_t tile = blockIdx.x;
  const bool done = args.done(tile);
  Extremes<Acc> all;
  if (!done) all = merge_partials(partials + tile * blocks, blocks);
  if (threadIdx.x != 0) return;
  int64_t count = args.count[tile * args.count_stride];
  Acc range = read_parameter<Acc>(args.range, tile);
  Acc least = read_parameter<Acc>(args.least, tile), largest = read_parameter<Acc>(args.largest, tile);
  if (!done && all.finite && all.least <= all.largest) {  // no element: infinity > -infinity
    const Acc keep = static_cast<Acc>(args.options.momentum), take = static_cast<Acc>(1 - args.options.momentum);
    if (count == 0) {
      least = all.least;
      largest = all.largest;
    } else if (args.options.momentum == -1) {
      // A stored NaN stays, as everywhere.
      least = all.least < least ? all.least : least;
      largest = all.largest > largest ? all.largest : largest;
    } else {
      least = least * keep + all.least * take;
      largest = largest * keep + all.largest * take;
    }
    ++count;
    const Acc low = magnitude(least), high = magnitude(largest);
    range = in_range(low > high || is_nan(low) ? low : high, args.range.dtype);
  }
  write_number(args.new_range, args.range.dtype, tile, range);
  args.new_count[tile] = count;
  args.new_least[tile] = least;
  args.new_largest[tile] = largest;
}

template <class T, class Statistics>
cudaError_t gather(const TileInput& input, const CalibrationArgs<WideOf<T>>& args, void* workspace,
                   cudaStream_t stream) {
  const int64_t blocks = blocks_of_tile<T>(input);
  return launch(statistics_kernel<T, Statistics>, stream, input.tiles.count * blocks, kStatisticsThreads, 1, 0, input,
                args, blocks, static_cast<Statistics*>(workspace));
}

template <class T>
cudaError_t abs_max_of(const TileInput& input, void* out, cudaStream_t stream) {
  using Acc = WideOf<T>;
  const int64_t segments = input.tiles.count * input.rows;
  constexpr int64_t kMostBlocks = int64_t{1} << 30;
  if (input.tiles.largest() <= kWarpSegment) {
    const int64_t blocks = std::min(divide_up(segments, kSegmentThreads / 32), kMostBlocks);
    return launch(abs_max_kernel<T, 32>, stream, blocks, kSegmentThreads, 1, 0, input, static_cast<Acc*>(out));
  }
  return launch(abs_max_kernel<T, kSegmentThreads>, stream, std::min(segments, kMostBlocks), kSegmentThreads, 1, 0,
                input, static_cast<Acc*>(out));
}

}  // namespace

cudaError_t tile_abs_max(const TileInput& input, void* abs_max, cudaStream_t stream) {
  if (input.rows == 0) return cudaSuccess;
  return by_dtype(input.dtype, [&](auto type) {
    return abs_max_of<typename decltype(type)::type>(input, abs_max, stream);
  });
}

int64_t tile_statistics_workspace_bytes(const TileInput& input) {
  int64_t blocks = 0;
  by_dtype(input.dtype, [&](auto type) {
    blocks = blocks_of_tile<typename decltype(type)::type>(input);
    return cudaSuccess;
  });
  static_assert(sizeof(Extremes<float>) <= sizeof(Moments<float>), "one size for both");
  static_assert(sizeof(Extremes<double>) <= sizeof(Moments<double>), "one size for both");
  return input.tiles.count * blocks * 3 * wide_bytes(input.dtype);
}

cudaError_t tile_std(const TileInput& input, void* std, void* workspace, cudaStream_t stream) {
  return by_dtype(input.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Acc = WideOf<T>;
    const cudaError_t status = gather<T, Moments<Acc>>(input, CalibrationArgs<Acc>{}, workspace, stream);
    if (status != cudaSuccess) return status;
    return launch(std_kernel<Acc>, stream, input.tiles.count, kStatisticsThreads, 1, 0,
                  static_cast<const Moments<Acc>*>(workspace), blocks_of_tile<T>(input), static_cast<Acc*>(std));
  });
}

cudaError_t input_range_update(const RangeUpdate& call, cudaStream_t stream) {
  return by_dtype(call.input.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Acc = WideOf<T>;
    const CalibrationArgs<Acc> args{call.options,
                                    call.range,
                                    call.least,
                                    call.largest,
                                    call.count,
                                    call.count_stride,
                                    call.new_range,
                                    call.new_count,
                                    static_cast<Acc*>(call.new_least),
                                    static_cast<Acc*>(call.new_largest),
                                    nullptr};
    const int64_t tiles = call.input.tiles.count, blocks = blocks_of_tile<T>(call.input);
    if (call.options.mode == Calibration::std) {
      const cudaError_t status = gather<T, Moments<Acc>>(call.input, args, call.workspace, stream);
      if (status != cudaSuccess) return status;
      return launch(update_std_kernel<Acc>, stream, tiles, kStatisticsThreads, 1, 0,
                    static_cast<const Moments<Acc>*>(call.workspace), blocks, args);
    }
    const cudaError_t status = gather<T, Extremes<Acc>>(call.input, args, call.workspace, stream);
    if (status != cudaSuccess) return status;
    return launch(update_extremes_kernel<Acc>, stream, tiles, kStatisticsThreads, 1, 0,
                  static_cast<const Extremes<Acc>*>(call.workspace), blocks, args);
  });
}

}  // namespace cuda
}  // namespace triptych
