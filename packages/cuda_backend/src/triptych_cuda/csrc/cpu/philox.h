// Normally distributed numbers that depend on their place alone: Philox 4x32-10 (Salmon et al., 2011) and Box-Muller.
// The definition is in triptych.noise. Included once per instruction set, like block.h.
//
// A counter gives the numbers of four neighbouring columns. One step makes a register of counters.
#pragma once

#include "lanes.h"

namespace triptych::cpu::TRIPTYCH_ISA {

struct NoiseKey {
  uint64_t seed;
  uint32_t stream;
};

constexpr int kWords = kRegisterBytes / 4;
// Columns in one step, and what a buffer for `count` columns must hold: a row may begin and end within a step.
constexpr int kNoiseStep = 4 * kWords;
constexpr int64_t noise_buffer(int64_t count) { return count + 2 * 64; }

// Both halves of the 64-bit products.
TRIPTYCH_INLINE void multiply(WordRegister a, uint32_t by, WordRegister& high, WordRegister& low) {
#if defined(__SSE2__)
  const LongRegister pairs = reinterpret_cast<LongRegister>(a);
#if defined(__AVX512F__)
  const __m512i factor = _mm512_set1_epi64(by);
  // With a mask of all lanes, since g++ 12 warns of the undefined register in the plain form.
  const LongRegister even =
      reinterpret_cast<LongRegister>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(pairs), factor));
  const LongRegister odd =
      reinterpret_cast<LongRegister>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(pairs >> 32), factor));
#elif defined(__AVX2__)
  const __m256i factor = _mm256_set1_epi64x(by);
  const LongRegister even = reinterpret_cast<LongRegister>(_mm256_mul_epu32(reinterpret_cast<__m256i>(pairs), factor));
  const LongRegister odd =
      reinterpret_cast<LongRegister>(_mm256_mul_epu32(reinterpret_cast<__m256i>(pairs >> 32), factor));
#else
  const __m128i factor = _mm_set1_epi64x(by);
  const LongRegister even = reinterpret_cast<LongRegister>(_mm_mul_epu32(reinterpret_cast<__m128i>(pairs), factor));
  const LongRegister odd =
      reinterpret_cast<LongRegister>(_mm_mul_epu32(reinterpret_cast<__m128i>(pairs >> 32), factor));
#endif
  constexpr uint64_t lower = 0xffffffffull;
  low = reinterpret_cast<WordRegister>((even & lower) | (odd << 32));
  high = reinterpret_cast<WordRegister>((even >> 32) | (odd & ~lower));
#else
  for (int i = 0; i < kWords; ++i) {
    const uint64_t product = static_cast<uint64_t>(a[i]) * by;
    high[i] = static_cast<uint32_t>(product >> 32);
    low[i] = static_cast<uint32_t>(product);
  }
#endif
}

struct Words4 { WordRegister word[4]; };

// The four words of the counters (group + lane, row, row >> 32, stream).
TRIPTYCH_INLINE Words4 philox(NoiseKey key, uint64_t row, uint32_t group) {
  WordRegister lane;
  for (int i = 0; i < kWords; ++i) lane[i] = i;
  WordRegister c0 = lane + group;
  WordRegister c1 = words(static_cast<uint32_t>(row));
  WordRegister c2 = words(static_cast<uint32_t>(row >> 32));
  WordRegister c3 = words(key.stream);
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    WordRegister high0, low0, high2, low2;
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high2, low2);
    c0 = high2 ^ c1 ^ k0;
    c1 = low2;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

TRIPTYCH_INLINE FloatRegister constant(float value) { return value - FloatRegister{}; }

// -ln(n / 2^24) for n from 1 to 2^24 held exactly; below 1 ulp from the true value (test_cpu_analog.py measures the
// radius made from it for every n). n = 2^e m with m in [sqrt(1/2), sqrt(2)), f = m - 1 is exact, and
// ln(1 + f) = f - f^2/2 + f^3 P(f) with the minimax polynomial of Cephes' logf. Near n = 2^24, where the logarithm
// vanishes, e is 24 and nothing cancels. (`e` below is 24 less that exponent.)
TRIPTYCH_INLINE FloatRegister minus_log(FloatRegister n) {
  const WordRegister bits = reinterpret_cast<WordRegister>(n);
  const WordRegister above = bits - 0x3f3504f3u;  // sqrt(1/2), so that the exponent's field changes there
  const MaskRegister exponent = reinterpret_cast<MaskRegister>(above) >> 23;
  const FloatRegister m = reinterpret_cast<FloatRegister>((above & 0x007fffffu) + 0x3f3504f3u);
  const FloatRegister e = __builtin_convertvector(24 - exponent, FloatRegister);
  const FloatRegister f = m - 1.0f;
  FloatRegister p = constant(7.0376836292e-2f);
  p = fused(p, f, constant(-1.1514610310e-1f));
  p = fused(p, f, constant(1.1676998740e-1f));
  p = fused(p, f, constant(-1.2420140846e-1f));
  p = fused(p, f, constant(1.4249322787e-1f));
  p = fused(p, f, constant(-1.6668057665e-1f));
  p = fused(p, f, constant(2.0000714765e-1f));
  p = fused(p, f, constant(-2.4999993993e-1f));
  p = fused(p, f, constant(3.3333331174e-1f));
  const FloatRegister square = f * f;
  FloatRegister small = f * (square * p);
  small = fused(e, constant(2.12194440e-4f), small);  // ln 2 = 0.693359375 - 2.1219444e-4
  small = fused(square, constant(-0.5f), small);
  return fused(e, constant(0.693359375f), -(f + small));
}

// sin and cos of 2 pi v for v = k / 2^24 in [0, 1): the nearest quarter is taken off exactly, and the rest lies within
// pi/4, where Cephes' polynomials are good to an ulp.
TRIPTYCH_INLINE void sin_cos(FloatRegister v, FloatRegister& sine, FloatRegister& cosine) {
  const FloatRegister quarter = rounded(v * 4.0f);
  const FloatRegister angle = (v - quarter * 0.25f) * 6.283185307f;
  const FloatRegister square = angle * angle;
  FloatRegister s = constant(-1.9515295891e-4f);
  s = fused(s, square, constant(8.3321608736e-3f));
  s = fused(s, square, constant(-1.6666654611e-1f));
  s = fused(s * square, angle, angle);
  FloatRegister c = constant(2.443315711809948e-5f);
  c = fused(c, square, constant(-1.388731625493765e-3f));
  c = fused(c, square, constant(4.166664568298827e-2f));
  c = fused(c * square, square, fused(square, constant(-0.5f), constant(1.0f)));
  const MaskRegister turn = __builtin_convertvector(quarter, MaskRegister);
  const MaskRegister odd = (turn & 1) != 0;
  const WordRegister sine_sign = reinterpret_cast<WordRegister>(turn & 2) << 30;
  const WordRegister cosine_sign = reinterpret_cast<WordRegister>((turn + 1) & 2) << 30;
  sine = reinterpret_cast<FloatRegister>(reinterpret_cast<WordRegister>(odd ? c : s) ^ sine_sign);
  cosine = reinterpret_cast<FloatRegister>(reinterpret_cast<WordRegister>(odd ? s : c) ^ cosine_sign);
}

TRIPTYCH_INLINE void box_muller(WordRegister a, WordRegister b, FloatRegister& even, FloatRegister& odd) {
  const MaskRegister n = reinterpret_cast<MaskRegister>((a >> 8) + 1u);
  const FloatRegister v =
      __builtin_convertvector(reinterpret_cast<MaskRegister>(b >> 8), FloatRegister) * 5.9604644775390625e-8f;
  const FloatRegister radius = root(2.0f * minus_log(__builtin_convertvector(n, FloatRegister)));
  FloatRegister sine, cosine;
  sin_cos(v, sine, cosine);
  even = radius * cosine;
  odd = radius * sine;
}

// The numbers of `kNoiseStep` columns from `column` on, a multiple of four.
TRIPTYCH_INLINE void noise_step(NoiseKey key, uint64_t row, int64_t column, float* out) {
  const Words4 random = philox(key, row, static_cast<uint32_t>(column >> 2));
  FloatRegister number[4];
  box_muller(random.word[0], random.word[1], number[0], number[1]);
  box_muller(random.word[2], random.word[3], number[2], number[3]);
  const typename Counted<kWords>::type lanes{};
  FloatRegister even[2], odd[2], done[4];
  interleave<float>(number[0], number[2], even[0], even[1], lanes);
  interleave<float>(number[1], number[3], odd[0], odd[1], lanes);
  interleave<float>(even[0], odd[0], done[0], done[1], lanes);
  interleave<float>(even[1], odd[1], done[2], done[3], lanes);
  __builtin_memcpy(out, done, sizeof done);
}

// In float64 the C library's functions do: this path is for checking, not for speed.
TRIPTYCH_INLINE void noise_step(NoiseKey key, uint64_t row, int64_t column, double* out) {
  const Words4 random = philox(key, row, static_cast<uint32_t>(column >> 2));
  for (int lane = 0; lane < kWords; ++lane) {
    for (int pair = 0; pair < 2; ++pair) {
      const double u = ((random.word[2 * pair][lane] >> 8) + 1) * 0x1p-24;
      const double v = (random.word[2 * pair + 1][lane] >> 8) * 0x1p-24;
      const double radius = __builtin_sqrt(-2.0 * __builtin_log(u));
      const double angle = 6.283185307179586 * v;
      out[4 * lane + 2 * pair] = radius * __builtin_cos(angle);
      out[4 * lane + 2 * pair + 1] = radius * __builtin_sin(angle);
    }
  }
}

// The numbers of columns [begin, end) of a row. Returns where that of `begin` lies in the buffer, which holds
// noise_buffer(end - begin) numbers.
template <typename W>
TRIPTYCH_INLINE const W* noise_row(NoiseKey key, int64_t row, int64_t begin, int64_t end, W* buffer) {
  const int64_t first = begin & ~int64_t{3};
  for (int64_t column = first; column < end; column += kNoiseStep)
    noise_step(key, static_cast<uint64_t>(row), column, buffer + (column - first));
  return buffer + (begin - first);
}

}  // namespace triptych::cpu::TRIPTYCH_ISA
