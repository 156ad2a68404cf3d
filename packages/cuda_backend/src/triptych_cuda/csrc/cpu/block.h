// A block of 64 bytes of float32 or float64 lanes, and how the four data types are loaded into and stored from it.
//
// The lane count is the same for every instruction set (one 512-bit register, two of 256 or four of 128), so sums
// are taken in the same order everywhere: AVX2 and AVX-512 give the same bits, and the baseline differs only by the
// lack of fused multiply-add. Included once per instruction set, with TRIPTYCH_ISA naming it. Everything is in that
// namespace and nothing comes from the standard library: an inline function shared between translation units
// compiled for different processors may be merged by the linker into the copy that the processor cannot run.
#pragma once

#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#ifndef TRIPTYCH_ISA
#error "compile with -DTRIPTYCH_ISA=<name of the instruction set>"
#endif

#define TRIPTYCH_INLINE static inline __attribute__((always_inline))
#define TRIPTYCH_MEMBER inline __attribute__((always_inline))

namespace triptych::cpu::TRIPTYCH_ISA {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr int kBlockBytes = 64;
constexpr int kRegisters = kBlockBytes / kRegisterBytes;

typedef float FloatRegister __attribute__((vector_size(kRegisterBytes)));
typedef double DoubleRegister __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t WordRegister __attribute__((vector_size(kRegisterBytes)));
typedef int32_t MaskRegister __attribute__((vector_size(kRegisterBytes)));
typedef uint16_t HalfRegister __attribute__((vector_size(kRegisterBytes / 2)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

template <typename T> struct WideOf { using type = float; };
template <> struct WideOf<double> { using type = double; };
template <typename T> using Wide = typename WideOf<T>::type;

template <typename W> struct RegisterOf { using type = FloatRegister; };
template <> struct RegisterOf<double> { using type = DoubleRegister; };

template <typename W>
struct Block {
  using Register = typename RegisterOf<W>::type;
  static constexpr int kLanes = kBlockBytes / sizeof(W);
  Register part[kRegisters];
};

#define TRIPTYCH_BLOCK_OPERATOR(op)                                               \
  template <typename W>                                                           \
  TRIPTYCH_INLINE Block<W> operator op(const Block<W>& a, const Block<W>& b) {    \
    Block<W> out;                                                                 \
    for (int i = 0; i < kRegisters; ++i) out.part[i] = a.part[i] op b.part[i];    \
    return out;                                                                   \
  }
TRIPTYCH_BLOCK_OPERATOR(+)
TRIPTYCH_BLOCK_OPERATOR(-)
TRIPTYCH_BLOCK_OPERATOR(*)
TRIPTYCH_BLOCK_OPERATOR(/)
#undef TRIPTYCH_BLOCK_OPERATOR

// a * b + c for one register, with one rounding where the instruction set has it. Written out, with the compiler's own
// contraction switched off, because compilers choose differently which of two products to fuse.
TRIPTYCH_INLINE FloatRegister fused(FloatRegister a, FloatRegister b, FloatRegister c) {
#if defined(__AVX512F__)
  return reinterpret_cast<FloatRegister>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__)
  return reinterpret_cast<FloatRegister>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

TRIPTYCH_INLINE DoubleRegister fused(DoubleRegister a, DoubleRegister b, DoubleRegister c) {
#if defined(__AVX512F__)
  return reinterpret_cast<DoubleRegister>(
      _mm512_fmadd_pd(reinterpret_cast<__m512d>(a), reinterpret_cast<__m512d>(b), reinterpret_cast<__m512d>(c)));
#elif defined(__AVX2__)
  return reinterpret_cast<DoubleRegister>(
      _mm256_fmadd_pd(reinterpret_cast<__m256d>(a), reinterpret_cast<__m256d>(b), reinterpret_cast<__m256d>(c)));
#else
  return a * b + c;
#endif
}

template <typename W>
TRIPTYCH_INLINE Block<W> fused(const Block<W>& a, const Block<W>& b, const Block<W>& c) {
  Block<W> out;
  for (int i = 0; i < kRegisters; ++i) out.part[i] = fused(a.part[i], b.part[i], c.part[i]);
  return out;
}

template <typename W>
TRIPTYCH_INLINE Block<W> splat(W value) {
  Block<W> out;
  for (int i = 0; i < kRegisters; ++i) out.part[i] = value - typename Block<W>::Register{};
  return out;
}

// The sum over the lanes, pairwise, in an order that no instruction set changes.
template <typename W>
TRIPTYCH_INLINE W sum_lanes(const Block<W>& block) {
  W lane[Block<W>::kLanes];
  __builtin_memcpy(lane, &block, kBlockBytes);
  for (int width = Block<W>::kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

// ---- one register of 16-bit numbers to float32 and back; rounding is to nearest, ties to even; NaN stays NaN

TRIPTYCH_INLINE WordRegister choose(MaskRegister mask, WordRegister yes, WordRegister no) {
  return (reinterpret_cast<WordRegister>(mask) & yes) | (~reinterpret_cast<WordRegister>(mask) & no);
}

TRIPTYCH_INLINE WordRegister words(uint32_t value) { return value - WordRegister{}; }

// 16-bit lanes to 32 and back. Compilers take three instructions for what these processors do in one.
TRIPTYCH_INLINE WordRegister load_words(const void* from) {
  HalfRegister half;
  __builtin_memcpy(&half, from, sizeof half);
#if defined(__AVX512F__)
  return reinterpret_cast<WordRegister>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(half)));
#elif defined(__AVX2__)
  return reinterpret_cast<WordRegister>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(half)));
#else
  return __builtin_convertvector(half, WordRegister);
#endif
}

TRIPTYCH_INLINE void store_words(WordRegister word, void* to) {
#if defined(__AVX512F__)
  const HalfRegister half = reinterpret_cast<HalfRegister>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(word)));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_packus_epi32(reinterpret_cast<__m256i>(word), reinterpret_cast<__m256i>(word));
  const HalfRegister half =
      reinterpret_cast<HalfRegister>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
#else
  const HalfRegister half = __builtin_convertvector(word, HalfRegister);
#endif
  __builtin_memcpy(to, &half, sizeof half);
}

TRIPTYCH_INLINE FloatRegister widen(const BFloat16* from) {
  return reinterpret_cast<FloatRegister>(load_words(from) << 16);
}

TRIPTYCH_INLINE void narrow(FloatRegister value, BFloat16* to) {
  const WordRegister bits = reinterpret_cast<WordRegister>(value);
  const WordRegister upper = bits >> 16;
  const WordRegister rounded = (bits + 0x7fffu + (upper & 1u)) >> 16;
  store_words(choose(reinterpret_cast<MaskRegister>(value != value), upper | 0x40u, rounded), to);
}

#if defined(__AVX512F__)

TRIPTYCH_INLINE FloatRegister widen(const Float16* from) {
  return reinterpret_cast<FloatRegister>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

TRIPTYCH_INLINE void narrow(FloatRegister value, Float16* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(reinterpret_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__F16C__)

TRIPTYCH_INLINE FloatRegister widen(const Float16* from) {
  return reinterpret_cast<FloatRegister>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

TRIPTYCH_INLINE void narrow(FloatRegister value, Float16* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
}

#else

// Exponent and fraction move up by 13 bits and the exponent is re-biased from 15 to 127. Subnormals get an implicit
// one they do not have, which a float subtraction takes away again, normalising in the same step.
TRIPTYCH_INLINE FloatRegister widen(const Float16* from) {
  const WordRegister word = load_words(from);
  const WordRegister magnitude = word & 0x7fffu;
  const WordRegister shifted = magnitude << 13;
  const WordRegister normal = shifted + (112u << 23);
  const WordRegister special = shifted + (224u << 23);
  const WordRegister subnormal = reinterpret_cast<WordRegister>(
      reinterpret_cast<FloatRegister>(shifted + (113u << 23)) - reinterpret_cast<FloatRegister>(words(113u << 23)));
  const WordRegister finite = choose(reinterpret_cast<MaskRegister>(magnitude < 0x0400u), subnormal, normal);
  const WordRegister value = choose(reinterpret_cast<MaskRegister>(magnitude >= 0x7c00u), special, finite);
  return reinterpret_cast<FloatRegister>(value | ((word & 0x8000u) << 16));
}

// The way back. Results below 2^-14 are rounded by adding 0.5, whose last place is float16's smallest subnormal;
// from 65520 on the nearest float16 is infinity.
TRIPTYCH_INLINE void narrow(FloatRegister value, Float16* to) {
  const WordRegister bits = reinterpret_cast<WordRegister>(value);
  const WordRegister magnitude = bits & 0x7fffffffu;
  const WordRegister normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const WordRegister subnormal =
      reinterpret_cast<WordRegister>(reinterpret_cast<FloatRegister>(magnitude) +
                                     reinterpret_cast<FloatRegister>(words(126u << 23))) - (126u << 23);
  WordRegister half = choose(reinterpret_cast<MaskRegister>(magnitude < (113u << 23)), subnormal, normal);
  half = choose(reinterpret_cast<MaskRegister>(magnitude >= 0x477ff000u), words(0x7c00u), half);
  half = choose(reinterpret_cast<MaskRegister>(magnitude > 0x7f800000u), words(0x7e00u), half);
  store_words(half | ((bits >> 16) & 0x8000u), to);
}

#endif

// ---- blocks: whole, and the last `count` < kLanes elements of a row, of which nothing beyond is touched

template <typename T>
TRIPTYCH_INLINE Block<Wide<T>> load(const T* from) {
  Block<Wide<T>> out;
  constexpr int lanes = kRegisterBytes / sizeof(Wide<T>);
  for (int i = 0; i < kRegisters; ++i) {
    if constexpr (sizeof(T) == 2)
      out.part[i] = widen(from + i * lanes);
    else
      __builtin_memcpy(&out.part[i], from + i * lanes, kRegisterBytes);
  }
  return out;
}

template <typename T>
TRIPTYCH_INLINE void store(const Block<Wide<T>>& value, T* to) {
  constexpr int lanes = kRegisterBytes / sizeof(Wide<T>);
  for (int i = 0; i < kRegisters; ++i) {
    if constexpr (sizeof(T) == 2)
      narrow(value.part[i], to + i * lanes);
    else
      __builtin_memcpy(to + i * lanes, &value.part[i], kRegisterBytes);
  }
}

template <typename T>
TRIPTYCH_INLINE Block<Wide<T>> load_tail(const T* from, int64_t count) {
  T padded[Block<Wide<T>>::kLanes] = {};
  __builtin_memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <typename T>
TRIPTYCH_INLINE void store_tail(const Block<Wide<T>>& value, T* to, int64_t count) {
  T padded[Block<Wide<T>>::kLanes];
  store(value, padded);
  __builtin_memcpy(to, padded, count * sizeof(T));
}

// The block as it reads back after a store to T.
template <typename T>
TRIPTYCH_INLINE Block<Wide<T>> rounded_to(const Block<Wide<T>>& value) {
  if constexpr (sizeof(T) != 2) {
    return value;
  } else {
    T memory[Block<Wide<T>>::kLanes];
    store(value, memory);
    return load(memory);
  }
}

}  // namespace triptych::cpu::TRIPTYCH_ISA
