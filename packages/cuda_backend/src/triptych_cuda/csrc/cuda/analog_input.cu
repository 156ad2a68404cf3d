// The inputs of analog_linear: clamp and DAC, and backward the gradient through the clamp and that of its bound.
#include "analog_row_max.cuh"
#include "analog_statistics.cuh"

namespace triptych {
namespace cuda {
namespace {

template <class Acc>
struct InputArgs {
  const void* x;
  int64_t row_stride, rows;
  Tiles tiles;
  ParameterView range;  // null: no clamp
  Acc* row_max;         // [T, R]; null: ranges are parameters, or there are none
  Resolution<Acc> resolution;
  bool discrete, levels;
  void* converted;
  bool packs_in, packs_out;
};

// range_of(tile): the bound of this row, where there is one.
template <class T, class RangeOf>
__device__ __forceinline__ void convert_chunk(const InputArgs<WideOf<T>>& args, int64_t row, int64_t column,
                                              RangeOf range_of) {
  using Acc = WideOf<T>;
  const Tiles& tiles = args.tiles;
  Acc values[kChunk<T>];
  load_columns(static_cast<const T*>(args.x) + row * args.row_stride, column, tiles.columns, args.packs_in, values);
  TileCursor cursor(tiles, column);
  Acc range = range_of(cursor.tile);
  Quantizer<Acc> quantizer(args.resolution.step(range));
  const bool clamps = args.range.data != nullptr;
#pragma unroll
  for (int e = 0; e < kChunk<T>; ++e) {
    if (column + e < tiles.columns && cursor.enters(tiles, column + e)) {
      range = range_of(cursor.tile);
      quantizer = Quantizer<Acc>(args.resolution.step(range));
    }
    Acc value = values[e];
    if (clamps) value = clamp_to(value, -range, range);
    if (args.discrete) {
      value = round_even(quantizer.quotient(value));
      if (!args.levels) value *= quantizer.step;
    }
    values[e] = value;
  }
  store_columns(static_cast<T*>(args.converted) + row * tiles.columns, column, tiles.columns, args.packs_out, values);
}

// Element by element, where the ranges are known: parameters, or row_max.
template <class T>
__global__ void __launch_bounds__(kFlatThreads) input_flat_kernel(const InputArgs<WideOf<T>> args) {
  using Acc = WideOf<T>;
  const int64_t chunks = (args.tiles.columns + kChunk<T> - 1) / kChunk<T>;
  for (int64_t i = flat_start(); i < args.rows * chunks; i += flat_stride()) {
    int64_t row, chunk;
    split_index(i, chunks, &row, &chunk);
    convert_chunk<T>(args, row, chunk * kChunk<T>, [&](int64_t tile) {
      if (args.range.data != nullptr) return read_parameter<Acc>(args.range, tile);
      return args.row_max == nullptr ? Acc(0) : args.row_max[tile * args.rows + row];
    });
  }
}

// A block a row: its maxima, then its conversion, one read of device memory.
template <class T>
__global__ void __launch_bounds__(256) input_row_kernel(const InputArgs<WideOf<T>> args) {
  using Acc = WideOf<T>;
  extern __shared__ unsigned long long shared_maxima[];
  Bits<Acc>* maxima = reinterpret_cast<Bits<Acc>*>(shared_maxima);
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    find_row_maxima(static_cast<const T*>(args.x) + row * args.row_stride, args.tiles, args.packs_in, maxima);
    for (int64_t tile = threadIdx.x; tile < args.tiles.count; tile += blockDim.x) {
      args.row_max[tile * args.rows + row] = from_bits(maxima[tile]);
    }
    for (int64_t column = threadIdx.x * kChunk<T>; column < args.tiles.columns; column += blockDim.x * kChunk<T>) {
      convert_chunk<T>(args, row, column, [&](int64_t tile) { return from_bits(maxima[tile]); });
    }
    __syncthreads();  // before the next row's maxima
  }
}

template <class T>
cudaError_t input_pass_of(const InputPass& call, cudaStream_t stream) {
  using Acc = WideOf<T>;
  const TileInput& input = call.input;
  const LinearOptions& options = call.options;
  const bool dynamic = options.mode == RangeMode::dynamic;
  const int64_t chunks = input.rows * divide_up(input.tiles.columns, kChunk<T>);
  const InputArgs<Acc> args{input.x.data,
                            input.x.row_stride,
                            input.rows,
                            input.tiles,
                            dynamic || options.mode == RangeMode::none ? ParameterView{} : call.range,
                            dynamic ? static_cast<Acc*>(call.row_max) : nullptr,
                            Resolution<Acc>(options.inp_res),
                            options.inp_res > 0,
                            call.levels,
                            call.converted,
                            has_packs<T>(input.x.data, input.rows, input.x.row_stride),
                            has_packs<T>(call.converted, input.rows, input.tiles.columns)};
  if (dynamic) {
    if (call.converted != nullptr && input.tiles.count <= kMostSharedTiles) {
      return launch(input_row_kernel<T>, stream, row_blocks(input.rows), row_threads(input.tiles.columns, kChunk<T>), 1,
                    static_cast<int>(input.tiles.count * sizeof(Bits<Acc>)), args);
    }
    const cudaError_t status = tile_abs_max(input, call.row_max, stream);
    if (status != cudaSuccess || call.converted == nullptr) return status;
  }
  if (chunks == 0) return cudaSuccess;
  return launch(input_flat_kernel<T>, stream, flat_blocks(chunks), kFlatThreads, 1, 0, args);
}

// ---- backward ------------------------------------------------------------------------------------------------------

// What a block of elements adds to the gradient of its tile's bound.
template <class Acc>
struct RangeSum {
  Acc sum = 0;  // of gradients at or beyond the bound
  long long inside = 0;

  __device__ __forceinline__ void merge(const RangeSum& other) {
    sum += other.sum;
    inside += other.inside;
  }
  __device__ __forceinline__ RangeSum from_lane(int delta) const {
    RangeSum other;
    other.sum = __shfl_down_sync(kWholeWarp, sum, delta);
    other.inside = __shfl_down_sync(kWholeWarp, inside, delta);
    return other;
  }
};

template <class T, class G>
struct GradientArgs {
  TileInput input;
  ParameterView range;
  bool learned;  // or fast
  const G* gradient;
  T* dx;                       // null: not wanted
  RangeSum<WideOf<T>>* partials;  // null: not wanted
};

template <class Acc>
struct ClampGradient {
  Acc range;
  bool learned;

  // Adds to the sum and returns the gradient of x.
  __device__ __forceinline__ Acc operator()(Acc x, Acc g, RangeSum<Acc>* sum) const {
    const bool above = x >= range, below = x <= -range;
    if (learned) {
      // min(g, 0) and max(g, 0), with NaN kept.
      if (above) sum->sum += g > 0 ? Acc(0) : g;
      if (below) sum->sum -= g < 0 ? Acc(0) : g;
    } else {
      if (x > range) sum->sum += g;
      if (x < -range) sum->sum -= g;
    }
    sum->inside += !(above || below);
    return (above || below) && magnitude(x) != range ? Acc(0) : g;
  }
};

// Stage 1: dx, and one partial sum a block.
template <class T, class G>
__global__ void __launch_bounds__(kStatisticsThreads)
    input_gradient_kernel(const GradientArgs<T, G> args, int64_t blocks) {
  using Acc = WideOf<T>;
  constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  const int64_t tile = blockIdx.x / blocks, block = blockIdx.x - tile * blocks;
  const TileInput& input = args.input;
  const int64_t columns_in_row = input.tiles.columns;
  const int lane = static_cast<int>(threadIdx.x & 31);
  const ClampGradient<Acc> gradient_of{read_parameter<Acc>(args.range, tile), args.learned};
  RangeSum<Acc> mine;
  for_units<T>(input, tile, block, blocks, [&](int64_t row, int64_t column, int64_t columns) {
    const T* x = static_cast<const T*>(input.x.data) + row * input.x.row_stride + column;
    const G* g = args.gradient + row * columns_in_row + column;
    T* dx = args.dx == nullptr ? nullptr : args.dx + row * columns_in_row + column;
    if constexpr (!std::is_same<T, double>::value) {
      // dx and the gradient are contiguous: on 16 bytes together, or not.
      if (columns == kUnit<T> && reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(g) % 16 == 0 &&
          reinterpret_cast<uintptr_t>(dx) % 16 == 0) {
        Acc values[kWidth], gradients[kWidth];
        unpack<T>(load_pack(x + lane * kWidth), values);
        // Plain loads: dx may be written where the gradient was.
        if constexpr (std::is_same<T, G>::value) {
          unpack<T>(*reinterpret_cast<const uint4*>(g + lane * kWidth), gradients);
        } else {
#pragma unroll
          for (int i = 0; i < kWidth; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(g + lane * kWidth + i);
            gradients[i] = four.x;
            gradients[i + 1] = four.y;
            gradients[i + 2] = four.z;
            gradients[i + 3] = four.w;
          }
        }
#pragma unroll
        for (int e = 0; e < kWidth; ++e) gradients[e] = gradient_of(values[e], gradients[e], &mine);
        if (dx != nullptr) *reinterpret_cast<uint4*>(dx + lane * kWidth) = pack<T>(gradients);
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const int64_t c = lane + 32 * e;
      if (c >= columns) continue;
      const Acc gradient = gradient_of(widen<Acc>(x[c]), widen<Acc>(g[c]), &mine);
      if (dx != nullptr) dx[c] = narrow<T>(gradient);
    }
  });
  if (args.partials == nullptr) return;
  merge_block(&mine);
  if (threadIdx.x == 0) args.partials[blockIdx.x] = mine;
}

// Stage 2: the gradient of each tile's bound.
template <class Acc>
__global__ void __launch_bounds__(kStatisticsThreads)
    range_gradient_kernel(const RangeSum<Acc>* partials, int64_t blocks, const LinearOptions options, int64_t rows,
                          const ParameterView range, void* drange) {
  const int64_t tile = blockIdx.x;
  const RangeSum<Acc> all = merge_partials(partials + tile * blocks, blocks);
  if (threadIdx.x != 0) return;
  Acc result = all.sum;
  if (options.mode == RangeMode::learned) {
    const Acc bound = read_parameter<Acc>(range, tile);
    const double numel = static_cast<double>(rows) * static_cast<double>(options.tiles.size(tile));
    const bool decays = options.decay > 0 && numel > 0 &&
                        static_cast<double>(all.inside) > options.input_min_percentage * numel;
    result = bound * result + (decays ? static_cast<Acc>(options.decay) * bound : Acc(0));
  }
  write_number(drange, range.dtype, tile, result);
}

template <class T, class G>
cudaError_t input_gradient_of(const InputGradient& call, cudaStream_t stream) {
  using Acc = WideOf<T>;
  const int64_t tiles = call.input.tiles.count, blocks = blocks_of_tile<T>(call.input);
  auto* partials = call.drange == nullptr ? nullptr : static_cast<RangeSum<Acc>*>(call.workspace);
  const GradientArgs<T, G> args{call.input,
                                call.range,
                                call.options.mode == RangeMode::learned,
                                static_cast<const G*>(call.gradient),
                                static_cast<T*>(call.dx),
                                partials};
  const cudaError_t status =
      launch(input_gradient_kernel<T, G>, stream, tiles * blocks, kStatisticsThreads, 1, 0, args, blocks);
  if (status != cudaSuccess || call.drange == nullptr) return status;
  return launch(range_gradient_kernel<Acc>, stream, tiles, kStatisticsThreads, 1, 0,
                static_cast<const RangeSum<Acc>*>(partials), blocks, call.options, call.input.rows, call.range,
                call.drange);
}

}  // namespace

cudaError_t input_pass(const InputPass& call, cudaStream_t stream) {
  if (call.input.rows == 0) return cudaSuccess;
  return by_dtype(call.input.dtype, [&](auto type) {
    return input_pass_of<typename decltype(type)::type>(call, stream);
  });
}

int64_t input_gradient_workspace_bytes(const InputGradient& call) {
  if (call.drange == nullptr) return 0;
  int64_t bytes = 0;
  by_dtype(call.input.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    bytes = call.input.tiles.count * blocks_of_tile<T>(call.input) * static_cast<int64_t>(sizeof(RangeSum<WideOf<T>>));
    return cudaSuccess;
  });
  return bytes;
}

cudaError_t input_gradient(const InputGradient& call, cudaStream_t stream) {
  if (call.dx == nullptr && call.drange == nullptr) return cudaSuccess;
  return by_dtype(call.input.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (call.gradient_is_wide) return input_gradient_of<T, WideOf<T>>(call, stream);
    return input_gradient_of<T, T>(call, stream);
  });
}

}  // namespace cuda
}  // namespace triptych
