// analog_weight: clip, discretise, add noise; and the gradient of the learned clip.
//
// Forward reads the weights from device memory once where every scale belongs to a row (a block a row finds the maxima
// and then reads the row again from its cache), and twice where one belongs to a tile.
#include "analog_row_max.cuh"
#include "analog_segments.cuh"
#include "philox.cuh"

namespace triptych {
namespace cuda {
namespace {

template <class Acc>
struct WeightArgs {
  WeightOptions options;
  ParameterView clip;
  const int64_t* seed;
  const void* weight;
  int64_t row_stride, channels;
  void* modified;
  Acc* wmax;
  const Acc* of_tile;  // [T], where a scale is a tile's
  Resolution<Acc> levels;
  Acc limit;    // Q
  Acc std_dev;
  bool packs_in, packs_out;
};

template <class Acc>
__device__ __forceinline__ Acc clip_bound(const ParameterView& clip, int64_t tile, int64_t channel) {
  const Acc value = read_parameter<Acc>(clip, tile, channel);
  return value < smallest_normal<Acc>() ? smallest_normal<Acc>() : value;
}

// What one (tile, channel) does to its weights.
template <class Acc>
struct Scale {
  Quantizer<Acc> quantizer;  // by the step, or by the clip where nothing is discretised
  Acc sigma;

  __device__ __forceinline__ Scale(const WeightArgs<Acc>& args, Acc of_channel, Acc of_tile)
      : quantizer(args.options.quantization == Per::none ? of_channel
                                                         : args.levels.step(args.options.quantization == Per::tensor
                                                                                ? of_tile
                                                                                : of_channel)),
        sigma(args.std_dev * (args.options.noise == Per::tensor ? of_tile : of_channel)) {}
};

// of_channel(tile): the scale m_c.
template <class T, class OfChannel>
__device__ __forceinline__ void modify_chunk(const WeightArgs<WideOf<T>>& args, int64_t seed, int64_t channel,
                                             int64_t column, OfChannel of_channel) {
  using Acc = WideOf<T>;
  const WeightOptions& options = args.options;
  const Tiles& tiles = options.tiles;
  const T* row = static_cast<const T*>(args.weight) + channel * args.row_stride;
  Acc values[kChunk<T>], normals[kChunk<T>];
  load_columns(row, column, tiles.columns, args.packs_in, values);
  const bool noisy = options.noise != Per::none;
  if (noisy) load_normals(seed, 0, channel, column, normals);
  const bool discrete = options.quantization != Per::none;
  if (noisy || discrete || args.clip.data != nullptr) {
    const auto scale_of = [&](int64_t tile) {
      return Scale<Acc>(args, of_channel(tile), args.of_tile == nullptr ? Acc(0) : args.of_tile[tile]);
    };
    TileCursor cursor(tiles, column);
    Scale<Acc> scale = scale_of(cursor.tile);
#pragma unroll
    for (int e = 0; e < kChunk<T>; ++e) {
      if (column + e < tiles.columns && cursor.enters(tiles, column + e)) scale = scale_of(cursor.tile);
      Acc value = values[e];
      if (discrete) {
        const Acc q = scale.quantizer.quotient(value);
        value = round_even(clamp_to(q, -args.limit, args.limit)) * scale.quantizer.step;
      } else if (args.clip.data != nullptr) {
        value = clamp_to(value / scale.quantizer.step, Acc(-1), Acc(1)) * scale.quantizer.step;
      }
      if (noisy) value += scale.sigma * normals[e];
      values[e] = value;
    }
  }
  T* out = static_cast<T*>(args.modified) + channel * tiles.columns;
  store_columns(out, column, tiles.columns, args.packs_out, values);
}

// A block a row.
template <class T>
__global__ void __launch_bounds__(256) weight_row_kernel(const WeightArgs<WideOf<T>> args) {
  using Acc = WideOf<T>;
  extern __shared__ unsigned long long shared_maxima[];
  Bits<Acc>* maxima = reinterpret_cast<Bits<Acc>*>(shared_maxima);
  const Tiles& tiles = args.options.tiles;
  const int64_t seed = args.options.noise == Per::none ? 0 : *args.seed;
  for (int64_t channel = blockIdx.x; channel < args.channels; channel += gridDim.x) {
    if (args.clip.data != nullptr) {
      for (int64_t tile = threadIdx.x; tile < tiles.count; tile += blockDim.x) {
        maxima[tile] = abs_bits(clip_bound<Acc>(args.clip, tile, channel));
      }
      __syncthreads();
    } else {
      const T* row = static_cast<const T*>(args.weight) + channel * args.row_stride;
      find_row_maxima(row, tiles, args.packs_in, maxima);
    }
    for (int64_t tile = threadIdx.x; tile < tiles.count; tile += blockDim.x) {
      args.wmax[tile * args.channels + channel] = from_bits(maxima[tile]);
    }
    for (int64_t column = threadIdx.x * kChunk<T>; column < tiles.columns; column += blockDim.x * kChunk<T>) {
      modify_chunk<T>(args, seed, channel, column, [&](int64_t tile) { return from_bits(maxima[tile]); });
    }
    __syncthreads();  // before the next row's maxima
  }
}

// Element by element, where all maxima are known.
template <class T>
__global__ void __launch_bounds__(kFlatThreads) weight_flat_kernel(const WeightArgs<WideOf<T>> args) {
  const int64_t columns = args.options.tiles.columns;
  const int64_t chunks = (columns + kChunk<T> - 1) / kChunk<T>;
  const int64_t seed = args.options.noise == Per::none ? 0 : *args.seed;
  for (int64_t i = flat_start(); i < args.channels * chunks; i += flat_stride()) {
    int64_t channel, chunk;
    split_index(i, chunks, &channel, &chunk);
    modify_chunk<T>(args, seed, channel, chunk * kChunk<T>,
                    [&](int64_t tile) { return args.wmax[tile * args.channels + channel]; });
  }
}

template <class Acc>
__global__ void __launch_bounds__(kFlatThreads) clip_bounds_kernel(const WeightArgs<Acc> args) {
  const int64_t tiles = args.options.tiles.count;
  for (int64_t i = flat_start(); i < tiles * args.channels; i += flat_stride()) {
    int64_t tile, channel;
    split_index(i, args.channels, &tile, &channel);
    args.wmax[i] = clip_bound<Acc>(args.clip, tile, channel);
  }
}

// The largest of a row of numbers, NaN if one is.
template <class Acc>
__device__ __forceinline__ Acc larger(Acc a, Acc b) {
  return b > a || is_nan(b) ? b : a;  // once NaN, a stays
}

template <class Acc>
__global__ void __launch_bounds__(1024) largest_kernel(const Acc* values, int64_t channels, Acc* largest) {
  __shared__ Acc slots[32];
  const Acc* row = values + blockIdx.x * channels;
  Acc most = Acc(-INFINITY);
  for (int64_t i = threadIdx.x; i < channels; i += blockDim.x) most = larger(most, row[i]);
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) most = larger(most, __shfl_xor_sync(kWholeWarp, most, mask));
  if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = most;
  __syncthreads();
  if (threadIdx.x < 32) {
    most = slots[threadIdx.x];
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) most = larger(most, __shfl_xor_sync(kWholeWarp, most, mask));
    if (threadIdx.x == 0) largest[blockIdx.x] = most;
  }
}

bool needs_tile_scale(const WeightOptions& options) {
  return options.quantization == Per::tensor || options.noise == Per::tensor;
}

template <class T>
cudaError_t forward_of(const WeightForward& call, cudaStream_t stream) {
  using Acc = WideOf<T>;
  const Tiles& tiles = call.options.tiles;
  const double levels = call.options.quantization == Per::none ? 1 : levels_of(call.options.res);
  WeightArgs<Acc> args{call.options,
                       call.clip,
                       call.seed,
                       call.weight.data,
                       call.weight.row_stride,
                       call.channels,
                       call.modified,
                       static_cast<Acc*>(call.wmax),
                       nullptr,
                       Resolution<Acc>(levels),
                       static_cast<Acc>(levels / 2),
                       static_cast<Acc>(call.options.std_dev),
                       has_packs<T>(call.weight.data, call.channels, call.weight.row_stride),
                       has_packs<T>(call.modified, call.channels, tiles.columns)};
  const bool by_tile = needs_tile_scale(call.options);
  if (!by_tile && tiles.count <= kMostSharedTiles) {
    return launch(weight_row_kernel<T>, stream, row_blocks(call.channels), row_threads(tiles.columns, kChunk<T>), 1,
                  static_cast<int>(tiles.count * sizeof(Bits<Acc>)), args);
  }
  cudaError_t status;
  if (call.clip.data != nullptr) {
    const int64_t blocks = flat_blocks(tiles.count * call.channels);
    status = launch(clip_bounds_kernel<Acc>, stream, blocks, kFlatThreads, 1, 0, args);
  } else {
    status = tile_abs_max({call.weight, call.channels, tiles, call.dtype}, call.wmax, stream);
  }
  if (status != cudaSuccess) return status;
  if (by_tile) {
    status = largest_of_rows(call.wmax, tiles.count, call.channels, call.dtype, call.workspace, stream);
    if (status != cudaSuccess) return status;
    args.of_tile = static_cast<const Acc*>(call.workspace);
  }
  const int64_t chunks = call.channels * divide_up(tiles.columns, kChunk<T>);
  if (chunks == 0) return cudaSuccess;
  return launch(weight_flat_kernel<T>, stream, flat_blocks(chunks), kFlatThreads, 1, 0, args);
}

// ---- backward ------------------------------------------------------------------------------------------------------

template <class T>
struct GradientArgs {
  const T* dmodified;
  const T* weight;
  int64_t dmodified_stride, weight_stride, channels;
  Tiles tiles;
  ParameterView clip;
  Resolution<WideOf<T>> levels;
  WideOf<T> limit;  // Q, or 1 where nothing is discretised
  WideOf<T> kappa_numerator;  // kappa without its 1 / sqrt(C size)
  bool discrete;
  T* dweight;
  void* dclip;
};

// kThreads share a (tile, channel): a warp, or the whole block.
template <class T, int kThreads>
__global__ void __launch_bounds__(kSegmentThreads) clip_gradient_kernel(const GradientArgs<T> args) {
  using Acc = WideOf<T>;
  __shared__ Acc slots[kSegmentThreads / 32];
  constexpr int kSegments = kSegmentThreads / kThreads;
  const int member = static_cast<int>(threadIdx.x) % kThreads;
  const int64_t segments = args.tiles.count * args.channels;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSegments + threadIdx.x / kThreads; i < segments;
       i += static_cast<int64_t>(gridDim.x) * kSegments) {
    int64_t tile, channel;
    split_index(i, args.channels, &tile, &channel);
    const int64_t start = args.tiles.start(tile), size = args.tiles.size(tile);
    const Acc bound = clip_bound<Acc>(args.clip, tile, channel);
    const Quantizer<Acc> quantizer(args.discrete ? args.levels.step(bound) : bound);
    const Acc limit = args.limit;
    Acc sum = 0;
    T* out = args.dweight == nullptr ? nullptr : args.dweight + channel * args.tiles.columns + start;
    for_pairs(args.dmodified + channel * args.dmodified_stride + start,
              args.weight + channel * args.weight_stride + start, out, size, member, kThreads, [&](Acc g, Acc w) {
                const Acc q = quantizer.quotient(w);
                const Acc inside = args.discrete ? round_even(q) - q : Acc(0);
                // NaN is neither above nor below nor within, and goes on into both results.
                const bool within = magnitude(q) <= limit;
                sum += g * (q > limit ? limit : q < -limit ? -limit : within ? inside : q);
                return within ? g : is_nan(q) ? q : Acc(0);
              });
    sum = sum_warp(sum);
    if constexpr (kThreads > 32) {
      if ((member & 31) == 0) slots[member >> 5] = sum;
      __syncthreads();
      sum = sum_slots<32>(slots, kThreads / 32);
      __syncthreads();
    }
    if (member == 0 && args.dclip != nullptr) {
      const Acc numel = static_cast<Acc>(args.channels) * static_cast<Acc>(size);
      // A tile of no columns has no gradient, and sum / 0 is none.
      const Acc kappa = size == 0 ? Acc(0) : args.kappa_numerator / sqrt(numel);
      write_number(args.dclip, args.clip.dtype, i, sum * kappa);
    }
  }
}

template <class T>
cudaError_t backward_of(const WeightBackward& call, cudaStream_t stream) {
  using Acc = WideOf<T>;
  const Tiles& tiles = call.options.tiles;
  const bool discrete = call.options.quantization != Per::none;
  const double levels = discrete ? levels_of(call.options.res) : 2;
  // The whole factor is 1 / sqrt(C size), and 2 sqrt(Q / (C size)) / L with quantisation.
  const double numerator = discrete ? 2 * std::sqrt(levels / 2) / levels : 1;
  const GradientArgs<T> args{static_cast<const T*>(call.dmodified.data),
                             static_cast<const T*>(call.weight.data),
                             call.dmodified.row_stride,
                             call.weight.row_stride,
                             call.channels,
                             tiles,
                             call.clip,
                             Resolution<Acc>(levels),
                             static_cast<Acc>(levels / 2),
                             static_cast<Acc>(numerator),
                             discrete,
                             static_cast<T*>(call.dweight),
                             call.dclip};
  const int64_t segments = tiles.count * call.channels;
  constexpr int64_t kMostBlocks = int64_t{1} << 30;
  if (tiles.largest() <= kWarpSegment) {
    const int64_t blocks = std::min(divide_up(segments, kSegmentThreads / 32), kMostBlocks);
    return launch(clip_gradient_kernel<T, 32>, stream, blocks, kSegmentThreads, 1, 0, args);
  }
  return launch(clip_gradient_kernel<T, kSegmentThreads>, stream, std::min(segments, kMostBlocks), kSegmentThreads, 1,
                0, args);
}

}  // namespace

cudaError_t largest_of_rows(const void* values, int64_t tiles, int64_t channels, DType dtype, void* largest,
                            cudaStream_t stream) {
  if (tiles == 0) return cudaSuccess;
  if (dtype == DType::float64) {
    return launch(largest_kernel<double>, stream, tiles, 1024, 1, 0, static_cast<const double*>(values), channels,
                  static_cast<double*>(largest));
  }
  return launch(largest_kernel<float>, stream, tiles, 1024, 1, 0, static_cast<const float*>(values), channels,
                static_cast<float*>(largest));
}

int64_t weight_forward_workspace_bytes(const WeightForward& call) {
  return needs_tile_scale(call.options) ? call.options.tiles.count * wide_bytes(call.dtype) : 0;
}

cudaError_t weight_forward(const WeightForward& call, cudaStream_t stream) {
  if (call.channels == 0) return cudaSuccess;
  return by_dtype(call.dtype, [&](auto type) { return forward_of<typename decltype(type)::type>(call, stream); });
}

cudaError_t weight_backward(const WeightBackward& call, cudaStream_t stream) {
  if (call.channels == 0 || (call.dweight == nullptr && call.dclip == nullptr)) return cudaSuccess;
  return by_dtype(call.dtype, [&](auto type) { return backward_of<typename decltype(type)::type>(call, stream); });
}

}  // namespace cuda
}  // namespace triptych
