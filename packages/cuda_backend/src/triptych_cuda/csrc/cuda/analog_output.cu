// The outputs of analog_linear: noise, ADC, the sum over tiles, bias; backward the ADC's mask and the bias's gradient.
//
// A thread takes 8 outputs of a row: one byte of the ADC's record, two calls of Philox a tile.
#include "analog_device.cuh"
#include "dw_sum.h"
#include "philox.cuh"

namespace triptych {
namespace cuda {
namespace {

constexpr int kOutputs = 8;

template <class Acc>
struct OutputArgs {
  OutputPass call;
  Acc noise;  // out_noise / sqrt(T)
  Acc bound;  // out_bound
  Resolution<Acc> input, output;
  Acc limit;  // Q of the ADC
  bool packs_products = false, packs_wmax = false, packs_y = false;

  explicit OutputArgs(const OutputPass& pass)
      : call(pass),
        noise(static_cast<Acc>(pass.options.out_noise / std::sqrt(static_cast<double>(pass.options.tiles.count)))),
        bound(static_cast<Acc>(pass.options.out_bound)),
        input(pass.options.inp_res),
        output(pass.options.out_res),
        limit(static_cast<Acc>(levels_of(pass.options.out_res > 0 ? pass.options.out_res : 1) / 2)) {}
};

// The bound of a tile's inputs in a row.
template <class Acc>
__device__ __forceinline__ Acc input_bound(const OutputPass& call, int64_t tile, int64_t row) {
  if (call.options.mode == RangeMode::dynamic) {
    return static_cast<const Acc*>(call.row_max)[tile * call.all_rows + row];
  }
  return call.options.has_range() ? read_parameter<Acc>(call.range, tile) : Acc(0);
}

// The ADC of one output of one tile.
template <class Acc>
struct AdcBound {
  Acc bound;
  Quantizer<Acc> quantizer;

  __device__ __forceinline__ AdcBound(const OutputArgs<Acc>& args, Acc value)
      : bound(value), quantizer(args.call.options.out_res > 0 ? args.output.step(value) : value) {}

  // Whether the output is clipped; `value` becomes what the ADC reads.
  __device__ __forceinline__ bool convert(const OutputArgs<Acc>& args, Acc* value) const {
    bool beyond;
    if (args.call.options.out_res > 0) {
      // On whole levels: the bound itself is then never exceeded by a rounding, and a step of 0 gives 0.
      const Acc k = round_even(quantizer.quotient(*value));
      beyond = magnitude(k) > args.limit;
      *value = clamp_to(k, -args.limit, args.limit) * quantizer.step;
    } else {
      beyond = magnitude(*value) > bound;
      *value = clamp_to(*value, -bound, bound);
    }
    return beyond;
  }
};

// Eight wide numbers of a row of `columns`, 0 outside it.
template <class Acc>
__device__ __forceinline__ void load_wide(const Acc* row, int64_t column, int64_t columns, bool packs,
                                          Acc (&out)[kOutputs]) {
  if constexpr (std::is_same<Acc, float>::value) {
    if (packs && column + kOutputs <= columns) {
#pragma unroll
      for (int i = 0; i < kOutputs; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + column + i);
        out[i] = four.x;
        out[i + 1] = four.y;
        out[i + 2] = four.z;
        out[i + 3] = four.w;
      }
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < kOutputs; ++e) out[e] = column + e < columns ? row[column + e] : Acc(0);
}

template <class T>
__device__ __forceinline__ void store_outputs(T* row, int64_t column, int64_t columns, bool packs,
                                              const WideOf<T> (&in)[kOutputs]) {
  if constexpr (!std::is_same<T, double>::value) {
    constexpr int kWidth = kPackWidth<T>;
    if (packs && column + kOutputs <= columns) {
#pragma unroll
      for (int i = 0; i < kOutputs; i += kWidth) {
        float part[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e) part[e] = in[i + e];
        *reinterpret_cast<uint4*>(row + column + i) = pack<T>(part);
      }
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < kOutputs; ++e) {
    if (column + e < columns) row[column + e] = narrow<T>(in[e]);
  }
}

// Noise and ADC of one tile; returns the bits of the outputs that the ADC clipped.
template <class Acc>
__device__ __forceinline__ uint32_t convert_outputs(const OutputArgs<Acc>& args, int64_t seed, int64_t tile,
                                                    int64_t row, int64_t column, Acc (&values)[kOutputs]) {
  const OutputPass& call = args.call;
  const LinearOptions& options = call.options;
  const Acc range = input_bound<Acc>(call, tile, row);
  if (call.levels) {
    const Acc step = args.input.step(range);
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) values[e] *= step;
  }
  Acc of_channel[kOutputs];
  const bool by_channel = (options.has_noise() && options.out_noise_per_channel) ||
                          (options.has_adc() && options.out_bound_per_channel);
  if (by_channel) {
    load_wide(static_cast<const Acc*>(call.wmax) + tile * call.channels, column, call.channels, args.packs_wmax,
              of_channel);
  }
  const Acc of_tile = call.wmax_of_tile == nullptr ? Acc(0) : static_cast<const Acc*>(call.wmax_of_tile)[tile];
  if (options.has_noise()) {
    Acc normals[kOutputs];
    load_normals(seed, static_cast<uint32_t>(1 + tile), row, column, normals);
    const Acc scale = args.noise * range;
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) {
      values[e] += (options.out_noise_per_channel ? of_channel[e] : of_tile) * scale * normals[e];
    }
  }
  uint32_t bits = 0;
  if (options.has_adc()) {
    const Acc scale = range * args.bound;
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) {
      const AdcBound<Acc> bound(args, scale * (options.out_bound_per_channel ? of_channel[e] : of_tile));
      bits |= static_cast<uint32_t>(bound.convert(args, &values[e])) << e;
    }
  }
  return bits;
}

template <class T>
__global__ void __launch_bounds__(kFlatThreads) output_kernel(const OutputArgs<WideOf<T>> args) {
  using Acc = WideOf<T>;
  const OutputPass& call = args.call;
  const int64_t columns = call.channels, groups = (columns + kOutputs - 1) / kOutputs;
  const int64_t seed = call.options.has_noise() ? *call.seed : 0;
  const bool last = call.first_tile + call.tile_count == call.options.tiles.count;
  for (int64_t i = flat_start(); i < call.rows * groups; i += flat_stride()) {
    int64_t local_row, group;
    split_index(i, groups, &local_row, &group);
    const int64_t row = call.first_row + local_row, column = group * kOutputs;
    Acc* total = static_cast<Acc*>(call.total) + local_row * columns;
    Acc sums[kOutputs];
    if (call.first_tile > 0) {
      load_wide(total, column, columns, args.packs_products, sums);
    } else {
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) sums[e] = 0;
    }
    for (int64_t k = 0; k < call.tile_count; ++k) {
      const int64_t tile = call.first_tile + k;
      Acc values[kOutputs];
      load_wide(static_cast<const Acc*>(call.products) + (k * call.rows + local_row) * columns, column, columns,
                args.packs_products, values);
      const uint32_t bits = convert_outputs(args, seed, tile, row, column, values);
      if (call.clipped != nullptr) {
        // Outputs past the last channel are 0 and may still have noise: their bits are not kept.
        const int64_t valid = columns - column;
        const uint32_t mask = valid >= kOutputs ? 0xffu : (1u << valid) - 1;
        call.clipped[(tile * call.all_rows + row) * groups + group] = static_cast<uint8_t>(bits & mask);
      }
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) sums[e] += values[e];
    }
    if (!last) {
      // The same thread reads it again: plain stores and loads, in the order of the stream.
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) {
        if (column + e < columns) total[column + e] = sums[e];
      }
      continue;
    }
    if (call.bias.data != nullptr) {
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) {
        if (column + e < columns) sums[e] += read_parameter<Acc>(call.bias, 0, column + e);
      }
    }
    store_outputs(static_cast<T*>(call.y) + row * columns, column, columns, args.packs_y, sums);
  }
}

template <class T>
cudaError_t output_pass_of(const OutputPass& call, cudaStream_t stream) {
  using Acc = WideOf<T>;
  OutputArgs<Acc> args(call);
  const auto wide_packs = [&](const void* data) { return has_packs<float>(data, 2, call.channels); };
  args.packs_products = wide_packs(call.products) && wide_packs(call.total);
  args.packs_wmax = wide_packs(call.wmax);
  args.packs_y = has_packs<T>(call.y, call.all_rows, call.channels);
  const int64_t items = call.rows * divide_up(call.channels, kOutputs);
  return launch(output_kernel<T>, stream, flat_blocks(items), kFlatThreads, 1, 0, args);
}

// ---- backward ------------------------------------------------------------------------------------------------------

template <class T>
__global__ void __launch_bounds__(kFlatThreads)
    mask_kernel(const MaskPass call, const bool packs_in, const bool packs_out) {
  using Acc = WideOf<T>;
  const int64_t columns = call.channels, groups = (columns + kOutputs - 1) / kOutputs;
  for (int64_t i = flat_start(); i < call.rows * groups; i += flat_stride()) {
    int64_t row, group;
    split_index(i, groups, &row, &group);
    const int64_t column = group * kOutputs;
    const T* dy = static_cast<const T*>(call.dy.data) + row * call.dy.row_stride;
    Acc values[kOutputs];
    if constexpr (kChunk<T> == kOutputs) {
      load_columns(dy, column, columns, packs_in, values);
    } else {
      load_wide(reinterpret_cast<const Acc*>(dy), column, columns, packs_in, values);  // T is Acc
    }
    for (int64_t k = 0; k < call.tile_count; ++k) {
      const uint32_t bits = call.clipped[((call.first_tile + k) * call.rows + row) * groups + group];
      Acc kept[kOutputs];
#pragma unroll
      for (int e = 0; e < kOutputs; ++e) kept[e] = (bits >> e & 1) != 0 ? Acc(0) : values[e];
      store_outputs(static_cast<T*>(call.masked) + (k * call.rows + row) * columns, column, columns, packs_out, kept);
    }
  }
}

// Stage 1 of the column sum: a block adds kSumColumns columns of its share of the rows, kSumLanes rows side by side.
template <class T>
constexpr int kSumColumns = 32 * kChunk<T>;
constexpr int kSumLanes = kFlatThreads / 32;

template <class T>
int64_t sum_partial_rows(const ColumnSum& call) {
  const int64_t wide = divide_up(call.channels, kSumColumns<T>);
  return std::max<int64_t>(1, std::min(divide_up(call.rows, 2 * kSumLanes), divide_up(1024, wide)));
}

template <class T>
__global__ void __launch_bounds__(kFlatThreads)
    column_sum_kernel(const ColumnSum call, const bool packs, int64_t shares, WideOf<T>* partials) {
  using Acc = WideOf<T>;
  __shared__ Acc parts[kSumLanes][kSumColumns<T>];
  const int64_t columns = call.channels;
  const int64_t share = blockIdx.x % shares, first = blockIdx.x / shares * kSumColumns<T>;
  const int lane = static_cast<int>(threadIdx.x & 31), row_lane = static_cast<int>(threadIdx.x >> 5);
  const int64_t column = first + lane * kChunk<T>;
  Acc sums[kChunk<T>];
#pragma unroll
  for (int e = 0; e < kChunk<T>; ++e) sums[e] = 0;
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = share * kSumLanes + row_lane; row < call.rows; row += shares * kSumLanes) {
      Acc values[kChunk<T>];
      load_columns(static_cast<const T*>(call.values.data) + row * call.values.row_stride, column, columns, packs,
                   values);
#pragma unroll
      for (int e = 0; e < kChunk<T>; ++e) sums[e] += values[e];
    }
  }
#pragma unroll
  for (int e = 0; e < kChunk<T>; ++e) parts[row_lane][lane * kChunk<T> + e] = sums[e];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < kSumColumns<T> && first + c < columns; c += kFlatThreads) {
    Acc sum = 0;
#pragma unroll
    for (int i = 0; i < kSumLanes; ++i) sum += parts[i][c];
    partials[share * columns + first + c] = sum;
  }
}

}  // namespace

cudaError_t output_pass(const OutputPass& call, cudaStream_t stream) {
  if (call.rows == 0 || call.channels == 0) return cudaSuccess;
  return by_dtype(call.dtype, [&](auto type) { return output_pass_of<typename decltype(type)::type>(call, stream); });
}

cudaError_t mask_pass(const MaskPass& call, cudaStream_t stream) {
  if (call.rows == 0 || call.channels == 0 || call.tile_count == 0) return cudaSuccess;
  return by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t items = call.rows * divide_up(call.channels, kOutputs);
    return launch(mask_kernel<T>, stream, flat_blocks(items), kFlatThreads, 1, 0, call,
                  has_packs<T>(call.dy.data, call.rows, call.dy.row_stride),
                  has_packs<T>(call.masked, call.tile_count * call.rows, call.channels));
  });
}

int64_t column_sum_workspace_bytes(const ColumnSum& call) {
  if (call.channels == 0) return 0;
  int64_t rows = 0;
  by_dtype(call.dtype, [&](auto type) {
    rows = sum_partial_rows<typename decltype(type)::type>(call);
    return cudaSuccess;
  });
  return rows * call.channels * wide_bytes(call.dtype);
}

cudaError_t column_sum(const ColumnSum& call, cudaStream_t stream) {
  if (call.channels == 0) return cudaSuccess;
  return by_dtype(call.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Acc = WideOf<T>;
    const int64_t shares = sum_partial_rows<T>(call);
    const int64_t blocks = shares * divide_up(call.channels, kSumColumns<T>);
    const cudaError_t status =
        launch(column_sum_kernel<T>, stream, blocks, kFlatThreads, 1, 0, call,
               has_packs<T>(call.values.data, call.rows, call.values.row_stride), shares,
               static_cast<Acc*>(call.workspace));
    if (status != cudaSuccess) return status;
    return sum_partials(call.workspace, shares, call.channels, call.sums, call.sums_dtype, stream);
  });
}

}  // namespace cuda
}  // namespace triptych
