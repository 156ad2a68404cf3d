// analog_linear on the CPU: its three products, with what happens to inputs, outputs and gradients on the way in and
// out of each area. Compiled once for each instruction set; the mathematics is in triptych.ops.analog_linear.
#include "analog_kernels.h"
#include "philox.h"
#include "product.h"
#include "quantizer.h"
#include "rows.h"

namespace triptych::cpu::TRIPTYCH_ISA {
namespace {

template <typename W>
struct Scratch {
  ProductScratch<W> product;
  alignas(64) W tile[kMostRows * kPitch];   // the product of one tile
  alignas(64) W total[kMostRows * kPitch];  // the sum of the tiles behind their ADCs
  alignas(64) W noise[noise_buffer(kMostColumns)];
};

template <typename T>
TRIPTYCH_INLINE const T* row_of(const void* data, int64_t stride, int64_t row) {
  return static_cast<const T*>(data) + row * stride;
}

template <typename W>
TRIPTYCH_INLINE W range_of(const LinearArgs& args, int64_t tile, int64_t row) {
  return static_cast<const W*>(args.range)[tile * args.range_tile_stride + row * args.range_row_stride];
}

// ---- reading operands

template <typename T>
TRIPTYCH_INLINE void read_plain(const T* from, int64_t count, Wide<T>* to) {
  for_row<Wide<T>>(count, [=](int64_t column, auto access) __attribute__((always_inline)) {
    access.write(access.read(from + column), to + column);
  });
}

// Inputs as they leave the DAC, columns [begin, end).
template <typename T>
void read_inputs(const LinearArgs& args, int64_t row, int64_t begin, int64_t end, Wide<T>* to) {
  using W = Wide<T>;
  const LinearOptions& options = args.options;
  const T* x = row_of<T>(args.x, args.x_stride, row);
  const bool quantized = args.range && options.inp_res > 0;
  if (!options.has_range() && !quantized) return read_plain(x + begin, end - begin, to);
  for (int64_t tile = options.tiles.of(begin); begin < end; ++tile) {
    const int64_t tile_end = options.tiles.start(tile) + options.tiles.size(tile);
    const int64_t count = (tile_end < end ? tile_end : end) - begin;
    const W bound = range_of<W>(args, tile, row);
    const W size = quantized ? step_of<W>(bound, options.inp_res) : W(1);
    const Block<W> high = splat(bound), low = splat(-bound), step = splat(size), divisor = splat(safe(size));
    const T* from = x + begin;
    if (!options.has_range())
      for_row<W>(count, [=](int64_t column, auto access) __attribute__((always_inline)) {
        access.write(rounded(access.read(from + column) / divisor) * step, to + column);
      });
    else if (!quantized)
      for_row<W>(count, [=](int64_t column, auto access) __attribute__((always_inline)) {
        access.write(clamped(access.read(from + column), low, high), to + column);
      });
    else
      for_row<W>(count, [=](int64_t column, auto access) __attribute__((always_inline)) {
        access.write(rounded(clamped(access.read(from + column), low, high) / divisor) * step, to + column);
      });
    begin += count;
    to += count;
  }
}

TRIPTYCH_INLINE uint8_t* clipped_row(const LinearArgs& args, int64_t tile, int64_t row) {
  return args.clipped + (tile * args.rows + row) * ((args.outputs + 7) / 8);
}

// The gradients of a tile's outputs, columns [begin, end); begin is a multiple of 8. Few are clipped.
template <typename T>
void read_grads(const LinearArgs& args, int64_t tile, int64_t row, int64_t begin, int64_t end, Wide<T>* to) {
  read_plain(row_of<T>(args.dy, args.dy_stride, row) + begin, end - begin, to);
  if (!args.options.has_adc()) return;
  const uint8_t* bits = clipped_row(args, tile, row) + begin / 8;
  for (int64_t column = 0; column < end - begin; column += 8)
    for (unsigned left = bits[column / 8]; left != 0; left &= left - 1) {
      const int64_t which = column + __builtin_ctz(left);
      if (which < end - begin) to[which] = 0;
    }
}

// ---- forward

TRIPTYCH_INLINE void store_bits(uint32_t bits, uint8_t* to, Whole, int lanes) {
  for (int i = 0; i < lanes / 8; ++i) to[i] = static_cast<uint8_t>(bits >> (8 * i));
}
TRIPTYCH_INLINE void store_bits(uint32_t bits, uint8_t* to, Tail tail, int) {
  bits &= (1u << tail.count) - 1;
  for (int i = 0; i < (tail.count + 7) / 8; ++i) to[i] = static_cast<uint8_t>(bits >> (8 * i));
}

// One tile's output noise and ADC, on a row of its product; adds the result to `total`.
template <typename W>
void read_out(const LinearArgs& args, int64_t tile, int64_t row, int64_t begin, int64_t end, const W* product,
              W* noise_space, W* total, bool first) {
  using R = typename Block<W>::Register;
  const LinearOptions& options = args.options;
  const W range = range_of<W>(args, tile, row);
  const W* wmax = static_cast<const W*>(args.wmax) + tile * args.outputs + begin;
  const Block<W> largest = splat(static_cast<const W*>(args.wmax_largest)[tile]);
  const W* noise = nullptr;
  if (options.has_noise())
    noise = noise_row(NoiseKey{args.seed, static_cast<uint32_t>(1 + tile)}, row, begin, end, noise_space);
  const double share = options.out_noise / __builtin_sqrt(static_cast<double>(options.tiles.count));
  const Block<W> deviation = splat(range * static_cast<W>(share));
  const Block<W> reach = splat(range * static_cast<W>(options.out_bound));
  const bool quantized = options.out_res > 0;
  const Block<W> limit = splat(quantized ? static_cast<W>(levels(options.out_res) / 2) : W(0));
  uint8_t* clipped = options.has_adc() ? clipped_row(args, tile, row) + begin / 8 : nullptr;
  for_row<W>(end - begin, [=](int64_t column, auto access) __attribute__((always_inline)) {
    Block<W> y = access.read(product + column);
    if (noise) {
      const Block<W> m = options.out_noise_per_channel ? access.read(wmax + column) : largest;
      y = y + deviation * m * access.read(noise + column);
    }
    if (clipped) {
      const Block<W> bound = reach * (options.out_bound_per_channel ? access.read(wmax + column) : largest);
      Block<W> level = y, edge = bound;
      if (quantized) {
        const Block<W> step = each([=](R b) { return step_of<W>(b, options.out_res); }, bound);
        level = rounded(y / each([](R s) { return safe_register<W>(s); }, step));
        edge = limit;
        y = clamped(level, splat<W>(0) - limit, limit) * step;
      } else {
        y = clamped(y, splat<W>(0) - bound, bound);
      }
      const Block<W> beyond = each([](R l, R e) { return magnitude(l) > e ? R{} - 1 : R{}; }, level, edge);
      store_bits(sign_bits(beyond), clipped + column / 8, access, Block<W>::kLanes);
    }
    access.write(first ? y : access.read(total + column) + y, total + column);
  });
}

template <typename T>
void forward_area(const LinearArgs& args, Area area, void* memory) {
  using W = Wide<T>;
  Scratch<W>& scratch = *static_cast<Scratch<W>*>(memory);
  const LinearOptions& options = args.options;
  const bool by_tile = args.range && (options.has_adc() || options.has_noise());
  const Tiles parts{options.tiles.columns, by_tile ? options.tiles.count : 1};
  const auto read_a = [&](int64_t row, int64_t begin, int64_t end, W* to) { read_inputs<T>(args, row, begin, end, to); };
  const auto read_b = [&](int64_t row, int64_t begin, int64_t end, W* to) {
    read_plain(row_of<T>(args.weight, args.weight_stride, row) + begin, end - begin, to);
  };
  for (int64_t part = 0; part < parts.count; ++part) {
    // The choice follows from the whole number of rows, since an area's depends on the number of threads.
    (args.rows <= kFewRows ? multiply_few<W, decltype(read_a), decltype(read_b)>
                           : multiply_last<W, decltype(read_a), decltype(read_b)>)(
        read_a, read_b, area.row_begin, area.row_end, area.column_begin, area.column_end, parts.start(part),
        parts.start(part) + parts.size(part), scratch.product, scratch.tile);
    if (!by_tile) break;
    for (int64_t row = area.row_begin; row < area.row_end; ++row) {
      const int64_t place = (row - area.row_begin) * kPitch;
      read_out<W>(args, part, row, area.column_begin, area.column_end, scratch.tile + place, scratch.noise,
                  scratch.total + place, part == 0);
    }
  }
  const W* total = by_tile ? scratch.total : scratch.tile;
  const W* bias = args.bias ? static_cast<const W*>(args.bias) + area.column_begin : nullptr;
  for (int64_t row = area.row_begin; row < area.row_end; ++row) {
    const W* from = total + (row - area.row_begin) * kPitch;
    T* y = static_cast<T*>(args.y) + row * args.outputs + area.column_begin;
    for_row<W>(area.column_end - area.column_begin, [=](int64_t column, auto access) __attribute__((always_inline)) {
      const Block<W> value = access.read(from + column);
      access.write(bias ? value + access.read(bias + column) : value, y + column);
    });
  }
}

// ---- the gradient of the inputs and of their range

// What one row adds to the range's gradient: numbers whose sum is wanted, and how many inputs lie inside.
template <typename T, bool kFast>
TRIPTYCH_INLINE double range_sum(const T* x, const Wide<T>* grad, int64_t count, Wide<T> range, int64_t& inside) {
  using W = Wide<T>;
  using R = typename Block<W>::Register;
  const Block<W> bound = splat(range);
  Block<W> outside = splat<W>(0);
  const W sum = sum_row<W>(count, [&](const Block<W>& sum, int64_t column, auto access) __attribute__((always_inline)) {
    const Block<W> value = access.read(x + column), g = access.read(grad + column);
    // Lanes beyond the row's end hold zeros, with a gradient of 0; where 0 is outside they are counted, see below.
    if constexpr (kFast) {
      return sum + each([](R v, R g, R b) { return (v > b ? g : R{}) - (v < -b ? g : R{}); }, value, g, bound);
    } else {
      outside = outside + each([](R v, R b) { return ((v >= b) | (v <= -b)) ? R{} + 1 : R{}; }, value, bound);
      return sum + each(
                       [](R v, R g, R b) {
                         const R down = g >= 0 ? R{} : g, up = g <= 0 ? R{} : g;
                         return (v >= b ? down : R{}) - (v <= -b ? up : R{});
                       },
                       value, g, bound);
    }
  });
  if constexpr (!kFast) {
    constexpr int64_t lanes = Block<W>::kLanes;
    const int64_t padding = 0 >= range || 0 <= -range ? (lanes - count % lanes) % lanes : 0;
    inside += count - (static_cast<int64_t>(sum_lanes(outside)) - padding);
  }
  return static_cast<double>(sum);
}

template <typename T>
void input_grad_area(const LinearArgs& args, Area area, int64_t chunk, int64_t chunks, void* memory) {
  using W = Wide<T>;
  using R = typename Block<W>::Register;
  Scratch<W>& scratch = *static_cast<Scratch<W>*>(memory);
  const LinearOptions& options = args.options;
  const int64_t tile = options.tiles.of(area.column_begin);
  const int64_t count = area.column_end - area.column_begin;
  const auto read_a = [&](int64_t row, int64_t begin, int64_t end, W* to) {
    read_grads<T>(args, tile, row, begin, end, to);
  };
  const auto read_b = [&](int64_t row, int64_t begin, int64_t end, W* to) {
    read_plain(row_of<T>(args.weight, args.weight_stride, row) + begin, end - begin, to);
  };
  multiply<W>(Order::depth_last, read_a, Order::depth_first, read_b, area.row_begin, area.row_end, area.column_begin,
              area.column_end, 0, args.outputs, scratch.product, scratch.tile);
  double sum = 0;
  int64_t inside = 0;
  for (int64_t row = area.row_begin; row < area.row_end; ++row) {
    const W* grad = scratch.tile + (row - area.row_begin) * kPitch;
    const T* x = row_of<T>(args.x, args.x_stride, row) + area.column_begin;
    const W range = options.has_range() ? range_of<W>(args, tile, row) : W(0);
    if (args.dx) {
      T* dx = static_cast<T*>(args.dx) + row * options.tiles.columns + area.column_begin;
      if (options.has_range()) {
        const Block<W> bound = splat(range);
        for_row<W>(count, [=](int64_t column, auto access) __attribute__((always_inline)) {
          const Block<W> out = each(
              [](R v, R g, R b) { return (((v >= b) | (v <= -b)) & (magnitude(v) != b)) ? R{} : g; },
              access.read(x + column), access.read(grad + column), bound);
          access.write(out, dx + column);
        });
      } else {
        for_row<W>(count, [=](int64_t column, auto access) __attribute__((always_inline)) {
          access.write(access.read(grad + column), dx + column);
        });
      }
    }
    if (args.dranges) {
      sum += options.mode == RangeMode::fast ? range_sum<T, true>(x, grad, count, range, inside)
                                             : range_sum<T, false>(x, grad, count, range, inside);
      if ((row + 1) % kRowUnit == 0 || row + 1 == area.row_end) {
        args.dranges[row / kRowUnit * chunks + chunk] = sum;
        args.insides[row / kRowUnit * chunks + chunk] = inside;
        sum = 0;
        inside = 0;
      }
    }
  }
}

// ---- the gradients of weight and bias

template <typename T>
void weight_grad_area(const LinearArgs& args, Area area, void* memory) {
  using W = Wide<T>;
  Scratch<W>& scratch = *static_cast<Scratch<W>*>(memory);
  const int64_t tile = args.options.tiles.of(area.column_begin);
  const auto read_a = [&](int64_t row, int64_t begin, int64_t end, W* to) {
    read_grads<T>(args, tile, row, begin, end, to);
  };
  const auto read_b = [&](int64_t row, int64_t begin, int64_t end, W* to) { read_inputs<T>(args, row, begin, end, to); };
  multiply<W>(Order::depth_first, read_a, Order::depth_first, read_b, area.row_begin, area.row_end, area.column_begin,
              area.column_end, 0, args.rows, scratch.product, scratch.tile);
  for (int64_t row = area.row_begin; row < area.row_end; ++row) {
    const W* from = scratch.tile + (row - area.row_begin) * kPitch;
    T* to = static_cast<T*>(args.dweight) + row * args.options.tiles.columns + area.column_begin;
    for_row<W>(area.column_end - area.column_begin, [=](int64_t column, auto access) __attribute__((always_inline)) {
      access.write(access.read(from + column), to + column);
    });
  }
}

// The sums over chunks of rows. Runs of rows are summed by themselves first, since one long chain of additions would
// round equal gradients, such as those of a mean, the same way every time.
template <typename T>
void bias_sums_of(const LinearArgs& args, int64_t chunk_begin, int64_t chunk_end) {
  using W = Wide<T>;
  constexpr int64_t run = 64;
  for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
    W* sums = static_cast<W*>(args.dbias_sums) + chunk * args.outputs;
    __builtin_memset(sums, 0, args.outputs * sizeof(W));
    const int64_t chunk_first = chunk * args.dbias_rows;
    const int64_t chunk_last = chunk_first + args.dbias_rows < args.rows ? chunk_first + args.dbias_rows : args.rows;
    for (int64_t first = chunk_first; first < chunk_last; first += run) {
      const int64_t last = first + run < chunk_last ? first + run : chunk_last;
      const T* dy = row_of<T>(args.dy, args.dy_stride, first);
      for_row<W>(args.outputs, [=](int64_t column, auto access) __attribute__((always_inline)) {
        Block<W> sum = access.read(dy + column);
        for (int64_t row = 1; row < last - first; ++row) sum = sum + access.read(dy + row * args.dy_stride + column);
        access.write(access.read(sums + column) + sum, sums + column);
      });
    }
  }
}

int64_t scratch_bytes(Dtype dtype) { return dtype == Dtype::float64 ? sizeof(Scratch<double>) : sizeof(Scratch<float>); }

void forward(const LinearArgs& args, Area area, void* scratch) {
  TRIPTYCH_BY_DTYPE(args.dtype, forward_area, args, area, scratch);
}

void input_grad(const LinearArgs& args, Area area, int64_t chunk, int64_t chunks, void* scratch) {
  TRIPTYCH_BY_DTYPE(args.dtype, input_grad_area, args, area, chunk, chunks, scratch);
}

void weight_grad(const LinearArgs& args, Area area, void* scratch) {
  TRIPTYCH_BY_DTYPE(args.dtype, weight_grad_area, args, area, scratch);
}

void bias_sums(const LinearArgs& args, int64_t begin, int64_t end) {
  TRIPTYCH_BY_DTYPE(args.dtype, bias_sums_of, args, begin, end);
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels{scratch_bytes, forward, input_grad, weight_grad, bias_sums};

}  // namespace triptych::cpu::TRIPTYCH_ISA
