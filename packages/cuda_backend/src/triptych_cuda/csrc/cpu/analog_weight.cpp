// analog_weight on the CPU: weights as a crossbar holds them. Compiled once for each instruction set.
//
//   W' = round(clamp(W / step, -Q, Q)) * step, or clamp(W / a, -1, 1) * a, or W;  then + std_dev * m * noise
//
// A row is handled tile by tile, its noise in stretches that a buffer on the stack holds.
#include "analog_kernels.h"
#include "philox.h"
#include "quantizer.h"
#include "rows.h"

namespace triptych::cpu::TRIPTYCH_ISA {
namespace {

constexpr int64_t kStretch = 512;

template <typename T>
void forward_rows(const WeightArgs& args, int64_t row_begin, int64_t row_end) {
  using W = Wide<T>;
  const WeightOptions& options = args.options;
  const Tiles tiles = options.tiles;
  const bool quantized = options.quantization != Per::none;
  const W bound = quantized ? static_cast<W>(levels(options.res) / 2) : 1;
  const NoiseKey key{args.seed, 0};
  const bool noisy = options.noise != Per::none && options.std_dev != 0;
  alignas(64) W buffer[noise_buffer(kStretch)];
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* weight = static_cast<const T*>(args.weight) + row * args.weight_stride;
    T* modified = static_cast<T*>(args.modified) + row * tiles.columns;
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const W of_row = static_cast<const W*>(args.wmax)[tile * args.rows + row];
      const W of_tile = static_cast<const W*>(args.largest)[tile];
      const bool whole = options.quantization == Per::tensor && !args.has_clip;
      const W step = quantized ? (2 * (whole ? of_tile : of_row)) / static_cast<W>(levels(options.res)) : of_row;
      const Block<W> divisor = splat(safe(step)), factor = splat(step);
      const Block<W> high = splat(bound), low = splat(-bound);
      const Block<W> deviation =
          splat(static_cast<W>(options.std_dev) * (options.noise == Per::tensor ? of_tile : of_row));
      const int64_t tile_end = tiles.start(tile) + tiles.size(tile);
      for (int64_t begin = tiles.start(tile); begin < tile_end; begin += kStretch) {
        const int64_t count = tile_end - begin < kStretch ? tile_end - begin : kStretch;
        const W* noise = noisy ? noise_row(key, row, begin, begin + count, buffer) : nullptr;
        const auto finish = [=](Block<W> value, int64_t column, auto access) __attribute__((always_inline)) {
          if (noise) value = value + deviation * access.read(noise + column);
          access.write(value, modified + begin + column);
        };
        if (quantized) {
          for_row<W>(count, [=](int64_t column, auto access) __attribute__((always_inline)) {
            const Block<W> q = access.read(weight + begin + column) / divisor;
            finish(rounded(clamped(q, low, high)) * factor, column, access);
          });
        } else if (args.has_clip) {
          for_row<W>(count, [=](int64_t column, auto access) __attribute__((always_inline)) {
            const Block<W> q = access.read(weight + begin + column) / divisor;
            finish(clamped(q, low, high) * factor, column, access);
          });
        } else {
          for_row<W>(count, [=](int64_t column, auto access) __attribute__((always_inline)) {
            finish(access.read(weight + begin + column), column, access);
          });
        }
      }
    }
  }
}

TRIPTYCH_INLINE void store_number(double value, void* to, int64_t index, Dtype dtype) {
  const Block<float> narrow = splat(static_cast<float>(value));
  switch (dtype) {
    case Dtype::float32: static_cast<float*>(to)[index] = static_cast<float>(value); break;
    case Dtype::bfloat16: store_tail(narrow, static_cast<BFloat16*>(to) + index, 1); break;
    case Dtype::float16: store_tail(narrow, static_cast<Float16*>(to) + index, 1); break;
    case Dtype::float64: static_cast<double*>(to)[index] = value; break;
  }
}

// The gradients under a learned clip. The derivative of a clipped value with respect to its clip is +-bound outside, and
// inside what rounding moved the value by (nothing without quantisation).
template <typename T>
void backward_rows(const WeightArgs& args, int64_t row_begin, int64_t row_end) {
  using W = Wide<T>;
  using R = typename Block<W>::Register;
  const WeightOptions& options = args.options;
  const Tiles tiles = options.tiles;
  const bool quantized = options.quantization != Per::none;
  const double count = quantized ? levels(options.res) : 0;
  const W bound = quantized ? static_cast<W>(count / 2) : 1;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* weight = static_cast<const T*>(args.weight) + row * args.weight_stride;
    const T* grad = static_cast<const T*>(args.dmodified) + row * args.dmodified_stride;
    T* dweight = args.dweight ? static_cast<T*>(args.dweight) + row * tiles.columns : nullptr;
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const int64_t start = tiles.start(tile), size = tiles.size(tile);
      const W clip = static_cast<const W*>(args.wmax)[tile * args.rows + row];
      const Block<W> divisor = splat(safe(quantized ? (2 * clip) / static_cast<W>(count) : clip));
      const Block<W> limit = splat(bound), zero = splat<W>(0);
      const W sum = sum_row<W>(size, [=](const Block<W>& sum, int64_t column, auto access)
                                         __attribute__((always_inline)) {
        const Block<W> g = access.read(grad + start + column);
        const Block<W> q = access.read(weight + start + column) / divisor;
        if (dweight) {
          access.write(each([](R grad, R q, R limit, R zero) { return magnitude(q) > limit ? zero : grad; }, g, q,
                            limit, zero),
                       dweight + start + column);
        }
        const Block<W> moved = quantized ? rounded(q) - q : zero;
        const Block<W> slope = each(
            [](R q, R limit, R moved, R zero) {
              return magnitude(q) > limit ? (q > 0 ? limit : -limit) : (q == q ? moved : zero);
            },
            q, limit, moved, zero);
        return fused(g, slope, sum);
      });
      if (args.dclip) {
        const double elements = static_cast<double>(args.rows) * static_cast<double>(size);
        const double scale =
            quantized ? 2 * __builtin_sqrt(count / 2 / elements) / count : 1 / __builtin_sqrt(elements);
        // An empty tile has no gradient and no scale.
        const W product = size > 0 ? static_cast<W>(scale) * sum : W(0);
        store_number(product, args.dclip, tile * args.rows + row, args.clip_dtype);
      }
    }
  }
}

void forward(const WeightArgs& args, int64_t begin, int64_t end) {
  TRIPTYCH_BY_DTYPE(args.dtype, forward_rows, args, begin, end);
}

void backward(const WeightArgs& args, int64_t begin, int64_t end) {
  TRIPTYCH_BY_DTYPE(args.dtype, backward_rows, args, begin, end);
}

void philox_words(uint64_t seed, uint32_t stream, uint64_t row, uint32_t group, uint32_t* out) {
  const Words4 random = philox(NoiseKey{seed, stream}, row, group);
  for (int i = 0; i < 4; ++i) out[i] = random.word[i][0];
}

template <typename W>
void normal_numbers(NoiseKey key, int64_t row, int64_t begin, int64_t end, W* out) {
  alignas(64) W buffer[noise_buffer(kStretch)];
  for (int64_t column = begin; column < end; column += kStretch) {
    const int64_t count = end - column < kStretch ? end - column : kStretch;
    const W* noise = noise_row(key, row, column, column + count, buffer);
    for (int64_t i = 0; i < count; ++i) out[column - begin + i] = noise[i];
  }
}

void normal(Dtype wide, uint64_t seed, uint32_t stream, int64_t row, int64_t begin, int64_t end, void* out) {
  if (wide == Dtype::float64)
    normal_numbers(NoiseKey{seed, stream}, row, begin, end, static_cast<double*>(out));
  else
    normal_numbers(NoiseKey{seed, stream}, row, begin, end, static_cast<float*>(out));
}

}  // namespace

extern const WeightKernels weight_kernels;
const WeightKernels weight_kernels{forward, backward, philox_words, normal};

}  // namespace triptych::cpu::TRIPTYCH_ISA
