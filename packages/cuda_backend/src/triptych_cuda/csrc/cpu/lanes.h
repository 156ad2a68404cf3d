// More of what a block can do: comparisons as choices, rounding, clamping, and exchanges between lanes. Included once
// per instruction set, like block.h.
//
// NaN: `larger` returns NaN if either argument is one; `clamped` if the value is one or if a bound that decides is one.
#pragma once

#include "block.h"

#include <cfloat>

// Calls function<T>(...) with the C++ type of a Dtype.
#define TRIPTYCH_BY_DTYPE(dtype, function, ...)               \
  switch (dtype) {                                            \
    case Dtype::float32: return function<float>(__VA_ARGS__); \
    case Dtype::bfloat16: return function<BFloat16>(__VA_ARGS__); \
    case Dtype::float16: return function<Float16>(__VA_ARGS__); \
    case Dtype::float64: return function<double>(__VA_ARGS__); \
  }

namespace triptych::cpu::TRIPTYCH_ISA {

typedef uint64_t LongRegister __attribute__((vector_size(kRegisterBytes)));

template <typename W> struct BitsOf { using type = WordRegister; };
template <> struct BitsOf<double> { using type = LongRegister; };
template <typename W> using Bits = typename BitsOf<W>::type;

template <typename W> constexpr W kTiny = FLT_MIN;
template <> constexpr double kTiny<double> = DBL_MIN;

TRIPTYCH_INLINE FloatRegister magnitude(FloatRegister v) {
  return reinterpret_cast<FloatRegister>(reinterpret_cast<WordRegister>(v) & 0x7fffffffu);
}
TRIPTYCH_INLINE DoubleRegister magnitude(DoubleRegister v) {
  return reinterpret_cast<DoubleRegister>(reinterpret_cast<LongRegister>(v) & 0x7fffffffffffffffull);
}

// To the nearest integer, ties to even. Without an instruction for it: a number below 2^23 (2^52) loses its fraction
// when that is added, and the larger ones have none.
TRIPTYCH_INLINE FloatRegister rounded(FloatRegister v) {
#if defined(__AVX512F__)
  return reinterpret_cast<FloatRegister>(_mm512_roundscale_ps(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  return reinterpret_cast<FloatRegister>(
      _mm256_round_ps(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const FloatRegister size = magnitude(v);
  const WordRegister whole = reinterpret_cast<WordRegister>((size + 8388608.0f) - 8388608.0f) |
                             (reinterpret_cast<WordRegister>(v) & 0x80000000u);
  return size < 8388608.0f ? reinterpret_cast<FloatRegister>(whole) : v;
#endif
}
TRIPTYCH_INLINE DoubleRegister rounded(DoubleRegister v) {
#if defined(__AVX512F__)
  return reinterpret_cast<DoubleRegister>(
      _mm512_roundscale_pd(reinterpret_cast<__m512d>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  return reinterpret_cast<DoubleRegister>(
      _mm256_round_pd(reinterpret_cast<__m256d>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const DoubleRegister size = magnitude(v);
  const LongRegister whole = reinterpret_cast<LongRegister>((size + 4503599627370496.0) - 4503599627370496.0) |
                             (reinterpret_cast<LongRegister>(v) & 0x8000000000000000ull);
  return size < 4503599627370496.0 ? reinterpret_cast<DoubleRegister>(whole) : v;
#endif
}

TRIPTYCH_INLINE FloatRegister root(FloatRegister v) {
#if defined(__AVX512F__)
  return reinterpret_cast<FloatRegister>(_mm512_maskz_sqrt_ps(0xffff, reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<FloatRegister>(_mm256_sqrt_ps(reinterpret_cast<__m256>(v)));
#elif defined(__SSE2__)
  return reinterpret_cast<FloatRegister>(_mm_sqrt_ps(reinterpret_cast<__m128>(v)));
#else
  for (unsigned i = 0; i < kRegisterBytes / sizeof(float); ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

#define TRIPTYCH_CHOICES(R)                                                            \
  TRIPTYCH_INLINE R larger(R a, R b) { return ((a > b) | (a != a)) ? a : b; }          \
  /* min(max(v, low), high); high where low > high. */                                 \
  TRIPTYCH_INLINE R clamped(R v, R low, R high) {                                      \
    const R raised = ((v >= low) | (v != v)) ? v : low;                                \
    return ((raised <= high) | (raised != raised)) ? raised : high;                    \
  }
TRIPTYCH_CHOICES(FloatRegister)
TRIPTYCH_CHOICES(DoubleRegister)
#undef TRIPTYCH_CHOICES

#define TRIPTYCH_LIFT(function)                                                                          \
  template <typename W, typename... Rest>                                                                \
  TRIPTYCH_INLINE Block<W> function(const Block<W>& first, const Rest&... rest) {                        \
    Block<W> out;                                                                                        \
    for (int i = 0; i < kRegisters; ++i) out.part[i] = function(first.part[i], rest.part[i]...);         \
    return out;                                                                                          \
  }
TRIPTYCH_LIFT(magnitude)
TRIPTYCH_LIFT(rounded)
TRIPTYCH_LIFT(larger)
TRIPTYCH_LIFT(clamped)
#undef TRIPTYCH_LIFT

// step(registers...) for each register of the blocks: for what needs comparisons, which registers have and blocks lack.
template <typename W, typename Step, typename... Rest>
TRIPTYCH_INLINE Block<W> each(Step step, const Block<W>& first, const Rest&... rest) {
  Block<W> out;
  for (int i = 0; i < kRegisters; ++i) out.part[i] = step(first.part[i], rest.part[i]...);
  return out;
}

// The largest lane; NaN if there is one.
template <typename W>
TRIPTYCH_INLINE W largest_lane(const Block<W>& block) {
  W lane[Block<W>::kLanes];
  __builtin_memcpy(lane, &block, kBlockBytes);
  W most = lane[0];
  for (int i = 1; i < Block<W>::kLanes; ++i) most = most > lane[i] || most != most ? most : lane[i];
  return most;
}

// One bit for each lane whose sign is set, the first lane lowest.
TRIPTYCH_INLINE uint32_t sign_bits(FloatRegister v) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(v));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(v)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(v)));
#else
  const WordRegister word = reinterpret_cast<WordRegister>(v);
  uint32_t bits = 0;
  for (unsigned i = 0; i < kRegisterBytes / sizeof(float); ++i) bits |= word[i] >> 31 << i;
  return bits;
#endif
}
TRIPTYCH_INLINE uint32_t sign_bits(DoubleRegister v) {
#if defined(__AVX512F__)
  return _mm512_movepi64_mask(reinterpret_cast<__m512i>(v));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_pd(reinterpret_cast<__m256d>(v)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_pd(reinterpret_cast<__m128d>(v)));
#else
  const LongRegister word = reinterpret_cast<LongRegister>(v);
  uint32_t bits = 0;
  for (unsigned i = 0; i < kRegisterBytes / sizeof(double); ++i) bits |= static_cast<uint32_t>(word[i] >> 63) << i;
  return bits;
#endif
}

template <typename W>
TRIPTYCH_INLINE uint32_t sign_bits(const Block<W>& block) {
  uint32_t bits = 0;
  for (int i = 0; i < kRegisters; ++i) bits |= sign_bits(block.part[i]) << (i * (kRegisterBytes / sizeof(W)));
  return bits;
}

// ---- exchanges between the lanes of registers

template <typename W> struct IndexOf { using type = MaskRegister; };
typedef int64_t LongMaskRegister __attribute__((vector_size(kRegisterBytes)));
template <> struct IndexOf<double> { using type = LongMaskRegister; };

template <int... kIndices> struct Indices {};
template <int kCount, int... kIndices> struct Counted : Counted<kCount - 1, kCount - 1, kIndices...> {};
template <int... kIndices> struct Counted<0, kIndices...> { using type = Indices<kIndices...>; };

// Lane i of the result is lane kIndices[i] of a and b laid end to end.
template <typename W, int... kIndices, typename R>
TRIPTYCH_INLINE R shuffled(R a, R b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kIndices...);
#else
  return __builtin_shuffle(a, b, typename IndexOf<W>::type{kIndices...});
#endif
}

// One step of a transposition: of a pair of rows `step` apart, the blocks of `step` lanes off the diagonal change
// places.
template <typename W, int kStep, int... kLane, typename R>
TRIPTYCH_INLINE void exchange(R& a, R& b, Indices<kLane...>) {
  constexpr int lanes = sizeof...(kLane);
  const R first = shuffled<W, ((kLane & kStep) ? lanes + kLane - kStep : kLane)...>(a, b);
  b = shuffled<W, ((kLane & kStep) ? lanes + kLane : kLane + kStep)...>(a, b);
  a = first;
}

template <typename W, int kStep, typename R>
TRIPTYCH_INLINE void transpose_from(R* rows) {
  constexpr int lanes = kRegisterBytes / sizeof(W);
  if constexpr (kStep < lanes) {
    for (int i = 0; i < lanes; ++i)
      if (!(i & kStep)) exchange<W, kStep>(rows[i], rows[i + kStep], typename Counted<lanes>::type{});
    transpose_from<W, 2 * kStep>(rows);
  }
}

// a[0], b[0], a[1], b[1], ... in two registers.
template <typename W, int... kLane, typename R>
TRIPTYCH_INLINE void interleave(R a, R b, R& low, R& high, Indices<kLane...>) {
  constexpr int lanes = sizeof...(kLane);
  low = shuffled<W, ((kLane & 1) ? lanes + kLane / 2 : kLane / 2)...>(a, b);
  high = shuffled<W, (lanes / 2 + ((kLane & 1) ? lanes + kLane / 2 : kLane / 2))...>(a, b);
}

}  // namespace triptych::cpu::TRIPTYCH_ISA
