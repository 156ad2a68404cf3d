// The gain g = weight + offset, from a weight of any dtype and stride, or none.
#pragma once

#include "kernels.h"
#include "packs.cuh"

namespace triptych {
namespace cuda {

// How the weight may be read; decided once on the host, uniform over a launch.
enum class WeightAccess : int32_t {
  none,           // no weight: the gain is 1
  same_packs,     // the row's dtype, contiguous, 16-byte aligned
  float_packs,    // float32, contiguous, 16-byte aligned
  one_by_one,     // anything else
};

template <class Acc>
struct WeightView {
  const void* data;
  int64_t stride;
  Acc offset;
  DType dtype;
  WeightAccess access;
};

template <class W, class Acc>
__device__ __forceinline__ Acc weight_at(const WeightView<Acc>& view, int64_t column) {
  return widen<Acc>(static_cast<const W*>(view.data)[column * view.stride]);
}

// The gain of kWidth contiguous columns. Weights are read by every row: plain cached loads (L1, then L2).
template <class T, class Acc, int kWidth>
__device__ __forceinline__ void load_gain(const WeightView<Acc>& view, int64_t column, Acc (&gain)[kWidth]) {
  const Acc offset = view.offset;
  if (view.access == WeightAccess::none) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) gain[e] = Acc(1);
    return;
  }
  if constexpr (kWidth > 1) {
    if (view.access == WeightAccess::same_packs) {
      unpack<T>(__ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(view.data) + column)), gain);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) gain[e] += offset;
      return;
    }
    if (view.access == WeightAccess::float_packs) {
      const float4* packs = reinterpret_cast<const float4*>(static_cast<const float*>(view.data) + column);
#pragma unroll
      for (int i = 0; i < kWidth / 4; ++i) {
        const float4 four = __ldg(packs + i);
        gain[4 * i] = four.x + offset;
        gain[4 * i + 1] = four.y + offset;
        gain[4 * i + 2] = four.z + offset;
        gain[4 * i + 3] = four.w + offset;
      }
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    Acc weight;
    if constexpr (std::is_same<Acc, double>::value) {
      weight = weight_at<double>(view, column + e);
    } else if (view.dtype == DType::float16) {
      weight = weight_at<__half>(view, column + e);
    } else if (view.dtype == DType::bfloat16) {
      weight = weight_at<__nv_bfloat16>(view, column + e);
    } else {
      weight = weight_at<float>(view, column + e);
    }
    gain[e] = weight + offset;
  }
}

// The gain of one pack of a slice; 0 outside the row.
template <class T, bool kVector>
__device__ __forceinline__ void load_gain(const WeightView<float>& view, const Slice<T, kVector>& slice, int k,
                                          float (&gain)[kPackWidth<T>]) {
  constexpr int kWidth = kPackWidth<T>;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) gain[e] = 0.0f;
  if constexpr (kVector) {
    if (slice.owns(k)) load_gain<T, float, kWidth>(view, slice.column(k, 0), gain);
  } else {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const int c = slice.column(k, e);
      if (c < slice.cols) {
        float one[1];
        load_gain<T, float, 1>(view, c, one);
        gain[e] = one[0];
      }
    }
  }
}

}  // namespace cuda
}  // namespace triptych
