// Walking over the columns of one tile of one row, which may begin anywhere: single elements up to the first 16-byte
// boundary and after the last, packs between them.
#pragma once

#include "analog_device.cuh"

namespace triptych {
namespace cuda {

template <class T>
constexpr int kSegmentPack = std::is_same<T, double>::value ? 1 : 16 / static_cast<int>(sizeof(T));

// How `count` elements from an address are cut.
struct Cut {
  int64_t head, packs, tail;  // elements, packs, elements
};

template <class T>
__device__ __forceinline__ Cut cut_segment(const T* data, int64_t count) {
  constexpr int kWidth = kSegmentPack<T>;
  if constexpr (kWidth == 1) return {0, count, 0};
  const int64_t off = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T));
  const int64_t head = min((kWidth - off) % kWidth, count);
  const int64_t packs = (count - head) / kWidth;
  return {head, packs, count - head - packs * kWidth};
}

// take(value) for every element, spread over `threads` threads, at least 8 of them.
template <class T, class Take>
__device__ __forceinline__ void for_segment(const T* data, int64_t count, int member, int threads, Take take) {
  using Acc = WideOf<T>;
  constexpr int kWidth = kSegmentPack<T>;
  const Cut cut = cut_segment(data, count);
  if (member < cut.head) take(widen<Acc>(data[member]));
  const T* body = data + cut.head;
#pragma unroll 4
  for (int64_t i = member; i < cut.packs; i += threads) {
    if constexpr (kWidth == 1) {
      take(widen<Acc>(body[i]));
    } else {
      Acc values[kWidth];
      unpack<T>(load_pack(body + i * kWidth), values);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) take(values[e]);
    }
  }
  if (member < cut.tail) take(widen<Acc>(body[cut.packs * kWidth + member]));
}

// change(a, b) -> value for every pair, written to `out` where it is not null. Packs only where the three addresses
// lie alike between 16-byte boundaries.
template <class T, class Change>
__device__ __forceinline__ void for_pairs(const T* a, const T* b, T* out, int64_t count, int member, int threads,
                                          Change change) {
  using Acc = WideOf<T>;
  constexpr int kWidth = kSegmentPack<T>;
  const auto one = [&](int64_t i) {
    const Acc value = change(widen<Acc>(a[i]), widen<Acc>(b[i]));
    if (out != nullptr) out[i] = narrow<T>(value);
  };
  const uintptr_t place = reinterpret_cast<uintptr_t>(a);
  const bool alike = (place - reinterpret_cast<uintptr_t>(b)) % 16 == 0 &&
                     (out == nullptr || (place - reinterpret_cast<uintptr_t>(out)) % 16 == 0);
  if (kWidth == 1 || !alike) {
#pragma unroll 4
    for (int64_t i = member; i < count; i += threads) one(i);
    return;
  }
  if constexpr (kWidth > 1) {
    const Cut cut = cut_segment(a, count);
    if (member < cut.head) one(member);
#pragma unroll 2
    for (int64_t i = member; i < cut.packs; i += threads) {
      const int64_t at = cut.head + i * kWidth;
      Acc left[kWidth], right[kWidth], changed[kWidth];
      unpack<T>(load_pack(a + at), left);
      unpack<T>(load_pack(b + at), right);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) changed[e] = change(left[e], right[e]);
      if (out != nullptr) *reinterpret_cast<uint4*>(out + at) = pack<T>(changed);
    }
    if (member < cut.tail) one(count - cut.tail + member);
  }
}

// A warp takes a segment of up to kWarpSegment elements, a block of 8 warps a longer one.
constexpr int64_t kWarpSegment = 4096;
constexpr int kSegmentThreads = 256;

}  // namespace cuda
}  // namespace triptych
