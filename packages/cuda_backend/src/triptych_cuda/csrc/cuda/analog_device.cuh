// What the analog kernels share: wide arithmetic, quantisers, parameters, chunks of columns and the tiles they lie in.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "analog_kernels.h"
#include "launch.cuh"
#include "packs.cuh"
#include "row_group.cuh"

namespace triptych {
namespace cuda {

template <class T>
using WideOf = typename std::conditional<std::is_same<T, double>::value, double, float>::type;

// ---- one number ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float round_even(float value) { return rintf(value); }
__device__ __forceinline__ double round_even(double value) { return rint(value); }
__device__ __forceinline__ float magnitude(float value) { return fabsf(value); }
__device__ __forceinline__ double magnitude(double value) { return fabs(value); }
__device__ __forceinline__ bool is_nan(float value) { return value != value; }
__device__ __forceinline__ bool is_nan(double value) { return value != value; }

template <class Acc>
__device__ __forceinline__ constexpr Acc smallest_normal() {
  return std::is_same<Acc, double>::value ? Acc(DBL_MIN) : Acc(FLT_MIN);
}

template <class Acc>
__device__ __forceinline__ Acc not_a_number() {
  if constexpr (std::is_same<Acc, double>::value) return __longlong_as_double(0x7ff8000000000000ll);
  return __int_as_float(0x7fc00000);
}

// As torch.clamp: NaN if any of the three is, and the upper bound where the bounds cross.
template <class Acc>
__device__ __forceinline__ Acc clamp_to(Acc value, Acc low, Acc high) {
  value = value < low ? low : value;
  value = value > high ? high : value;
  return is_nan(high) ? high : value;
}

// The bits of |value|: as unsigned integers they compare as the values do, with NaN above infinity, so that a maximum
// of them passes NaN on and has no order.
__device__ __forceinline__ uint32_t abs_bits(float value) { return __float_as_uint(value) & 0x7fffffffu; }
__device__ __forceinline__ unsigned long long abs_bits(double value) {
  return static_cast<unsigned long long>(__double_as_longlong(value)) & 0x7fffffffffffffffull;
}
__device__ __forceinline__ float from_bits(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ double from_bits(unsigned long long bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}
template <class Acc>
using Bits = typename std::conditional<std::is_same<Acc, double>::value, unsigned long long, uint32_t>::type;

__device__ __forceinline__ uint32_t max_warp(uint32_t bits) { return __reduce_max_sync(kWholeWarp, bits); }
__device__ __forceinline__ unsigned long long max_warp(unsigned long long bits) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) bits = max(bits, __shfl_xor_sync(kWholeWarp, bits, mask));
  return bits;
}

// ---- quantisers ----------------------------------------------------------------------------------------------------

// A resolution on its way to a step: 2 bound / res, or 2 bound res where res is a share (1 at most).
template <class Acc>
struct Resolution {
  Acc res = 0;
  bool share = false;

  explicit Resolution(double value) : res(static_cast<Acc>(value)), share(!(value > 1)) {}
  __device__ __forceinline__ Acc step(Acc bound) const { return share ? 2 * bound * res : 2 * bound / res; }
};

// Divides by the step, or by the smallest normal number where the step is nearer to zero: 0 / 0 is 0 here. Always a
// true division: a product with 1 / step falls to the other side of exact ties.
template <class Acc>
struct Quantizer {
  Acc step, divisor;

  __device__ __forceinline__ explicit Quantizer(Acc value)
      : step(value), divisor(magnitude(value) >= smallest_normal<Acc>() ? value : smallest_normal<Acc>()) {}
  __device__ __forceinline__ Acc quotient(Acc value) const { return value / divisor; }
};

inline double levels_of(double res) { return res > 1 ? res : 1 / res; }

// ---- parameters ----------------------------------------------------------------------------------------------------

template <class Acc>
__device__ __forceinline__ Acc read_number(const void* data, DType dtype, int64_t index) {
  if constexpr (std::is_same<Acc, double>::value) {
    return __ldg(static_cast<const double*>(data) + index);
  } else {
    if (dtype == DType::float32) return __ldg(static_cast<const float*>(data) + index);
    if (dtype == DType::bfloat16) return widen<float>(static_cast<const __nv_bfloat16*>(data)[index]);
    return widen<float>(static_cast<const __half*>(data)[index]);
  }
}

template <class Acc>
__device__ __forceinline__ void write_number(void* data, DType dtype, int64_t index, Acc value) {
  if constexpr (std::is_same<Acc, double>::value) {
    static_cast<double*>(data)[index] = value;
  } else if (dtype == DType::float32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == DType::bfloat16) {
    static_cast<__nv_bfloat16*>(data)[index] = narrow<__nv_bfloat16>(value);
  } else {
    static_cast<__half*>(data)[index] = narrow<__half>(value);
  }
}

template <class Acc>
__device__ __forceinline__ Acc read_parameter(const ParameterView& view, int64_t tile, int64_t channel = 0) {
  return read_number<Acc>(view.data, view.dtype, tile * view.tile_stride + channel * view.channel_stride);
}

// ---- chunks of columns ---------------------------------------------------------------------------------------------

// Columns a thread takes at a time: 16 bytes of them, and whole calls of Philox.
template <class T>
constexpr int kChunk = sizeof(T) == 2 ? 8 : 4;

// `packs`: every whole chunk of every row lies on 16 bytes. Columns outside the row are read as 0.
template <class T>
__device__ __forceinline__ void load_columns(const T* row, int64_t column, int64_t columns, bool packs,
                                             WideOf<T> (&out)[kChunk<T>]) {
  if constexpr (!std::is_same<T, double>::value) {
    if (packs && column + kChunk<T> <= columns) {
      unpack<T>(load_pack(row + column), out);
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < kChunk<T>; ++e) {
    out[e] = column + e < columns ? widen<WideOf<T>>(row[column + e]) : WideOf<T>(0);
  }
}

template <class T>
__device__ __forceinline__ void store_columns(T* row, int64_t column, int64_t columns, bool packs,
                                              const WideOf<T> (&in)[kChunk<T>]) {
  if constexpr (!std::is_same<T, double>::value) {
    if (packs && column + kChunk<T> <= columns) {
      *reinterpret_cast<uint4*>(row + column) = pack<T>(in);
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < kChunk<T>; ++e) {
    if (column + e < columns) row[column + e] = narrow<T>(in[e]);
  }
}

template <class T>
bool has_packs(const void* data, int64_t rows, int64_t row_stride) {
  return takes_packs(data, rows, row_stride, 16 / static_cast<int>(sizeof(T)));
}

// i = outer * inner_count + inner. Divisions of 64 bits cost several times those of 32.
__device__ __forceinline__ void split_index(int64_t i, int64_t inner_count, int64_t* outer, int64_t* inner) {
  if (((i | inner_count) >> 31) == 0) {
    const uint32_t quotient = static_cast<uint32_t>(i) / static_cast<uint32_t>(inner_count);
    *outer = quotient;
    *inner = static_cast<uint32_t>(i) - quotient * static_cast<uint32_t>(inner_count);
  } else {
    *outer = i / inner_count;
    *inner = i - *outer * inner_count;
  }
}

// The tile of a column, and the column where it ends.
struct TileCursor {
  int64_t tile, end;

  __device__ __forceinline__ TileCursor(const Tiles& tiles, int64_t column) : tile(0), end(tiles.columns) {
    if (tiles.count == 1) return;
    const int64_t base = tiles.base(), extra = tiles.extra(), longer = extra * (base + 1);
    int64_t rest;
    if (column < longer) {
      split_index(column, base + 1, &tile, &rest);
    } else {
      split_index(column - longer, base, &tile, &rest);
      tile += extra;
    }
    end = tiles.start(tile) + tiles.size(tile);
  }
  // True where `column`, one after the last one asked for, begins another tile.
  __device__ __forceinline__ bool enters(const Tiles& tiles, int64_t column) {
    if (column != end) return false;
    ++tile;
    end += tiles.size(tile);
    return true;
  }
};

// ---- launches ------------------------------------------------------------------------------------------------------

constexpr int kFlatThreads = 256;

// Blocks for `items` of one thread each; kernels walk on where there are more. 16 blocks for each SM of a large device.
inline int64_t flat_blocks(int64_t items) {
  return std::min<int64_t>(divide_up(items, kFlatThreads), 2048);
}

__device__ __forceinline__ int64_t flat_start() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t flat_stride() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

template <class T>
struct Type {
  using type = T;
};

// Calls `run` with the C++ type of a dtype.
template <class Run>
cudaError_t by_dtype(DType dtype, Run run) {
  switch (dtype) {
    case DType::float32: return run(Type<float>());
    case DType::float16: return run(Type<__half>());
    case DType::bfloat16: return run(Type<__nv_bfloat16>());
    case DType::float64: return run(Type<double>());
  }
  return cudaErrorInvalidValue;
}

inline int64_t wide_bytes(DType dtype) { return dtype == DType::float64 ? 8 : 4; }

}  // namespace cuda
}  // namespace triptych
