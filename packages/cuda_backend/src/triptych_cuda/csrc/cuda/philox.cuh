// The noise of the analog ops: Philox 4x32-10 over the place of an element, then Box and Muller. triptych.noise is the
// specification; the integers here are its integers, the normals differ from it by the rounding of log, sqrt, cos, sin.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>

namespace triptych {
namespace cuda {

// Four random words of a counter (x, y, z, w) and a key.
__host__ __device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    if (round > 0) {
      key.x += 0x9E3779B9u;
      key.y += 0xBB67AE85u;
    }
    const uint64_t p0 = uint64_t{0xD2511F53u} * counter.x;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter.z;
    counter = make_uint4(static_cast<uint32_t>(p1 >> 32) ^ counter.y ^ key.x, static_cast<uint32_t>(p1),
                         static_cast<uint32_t>(p0 >> 32) ^ counter.w ^ key.y, static_cast<uint32_t>(p0));
  }
  return counter;
}

// Two normals from two words: even column, odd column. The functions are the accurate ones (1 ulp, 2 for double); 2v is
// exact, so that cospi and sinpi see the very angle of the specification.
template <class Acc>
__device__ __forceinline__ void box_muller(uint32_t ra, uint32_t rb, Acc* even, Acc* odd) {
  constexpr Acc kScale = Acc(1) / Acc(1 << 24);
  const Acc u = static_cast<Acc>((ra >> 8) + 1) * kScale;
  const Acc twice_v = static_cast<Acc>(rb >> 8) * (2 * kScale);
  Acc sine, cosine, radius;
  if constexpr (std::is_same<Acc, double>::value) {
    radius = sqrt(-2 * log(u));
    sincospi(twice_v, &sine, &cosine);
  } else {
    radius = sqrtf(-2 * logf(u));
    sincospif(twice_v, &sine, &cosine);
  }
  *even = radius * cosine;
  *odd = radius * sine;
}

// The normals of columns 4 * group to 4 * group + 3 of a row: one call of Philox, all of its words.
template <class Acc>
__device__ __forceinline__ void four_normals(int64_t seed, uint32_t stream, int64_t row, int64_t group,
                                             Acc (&out)[4]) {
  const uint64_t key = static_cast<uint64_t>(seed);
  const uint4 words = philox(make_uint4(static_cast<uint32_t>(group), static_cast<uint32_t>(row),
                                        static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32), stream),
                             make_uint2(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)));
  box_muller(words.x, words.y, &out[0], &out[1]);
  box_muller(words.z, words.w, &out[2], &out[3]);
}

// Those of kWidth columns, a multiple of 4, from a column that is a multiple of 4.
template <class Acc, int kWidth>
__device__ __forceinline__ void load_normals(int64_t seed, uint32_t stream, int64_t row, int64_t column,
                                             Acc (&out)[kWidth]) {
  static_assert(kWidth % 4 == 0, "whole calls of Philox");
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) {
    Acc four[4];
    four_normals(seed, stream, row, column / 4 + i, four);
#pragma unroll
    for (int e = 0; e < 4; ++e) out[4 * i + e] = four[e];
  }
}

}  // namespace cuda
}  // namespace triptych
