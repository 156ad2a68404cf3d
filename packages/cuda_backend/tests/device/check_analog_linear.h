// The checks of check_analog.cu for the kernels before and after the products of analog_linear.
#pragma once

#include "check_analog_case.h"

namespace {

// Input ranges, exact in every dtype.
struct Ranges : Matrix {
  Ranges(const Case& one, const Shape3& shape) : Matrix(one.weight_dtype, 1, shape.tiles, shape.shift, 0) {
    assign([](int64_t, int64_t t) { return 0.75 + 0.0625 * static_cast<double>(t % 7); });
  }
};

inline void check_input_pass(const Case& one, const Shape3& shape, RangeMode mode, double res, Report* report) {
  const DType type = one.x_dtype, wide = wide_of(type);
  const Tiles tiles{shape.cols, shape.tiles};
  Matrix x(type, shape.rows, shape.cols, shape.shift, shape.padding);
  x.randomise(41, 0.8);
  Ranges range(one, shape);
  const bool levels = res > 0 && is_half(type);
  Buffer converted(shape.rows * shape.cols * size_of(type), shape.shift * size_of(type));
  Buffer row_max(shape.tiles * shape.rows * size_of(wide), 0);
  cuda::InputPass call;
  call.input = {x.view(), shape.rows, tiles, type};
  call.options.tiles = tiles;
  call.options.mode = mode;
  call.options.inp_res = res;
  call.range = range.tile_parameter();
  call.row_max = row_max.device();
  call.converted = converted.device();
  call.levels = levels;
  std::vector<Buffer*> outputs = {&converted};
  if (mode == RangeMode::dynamic) outputs.push_back(&row_max);
  if (!run_twice(one, report, "input_pass", {&x.buffer, &range.buffer}, outputs,
                 [&] { return cuda::input_pass(call, nullptr); })) {
    return;
  }
  std::vector<double> slack(static_cast<size_t>(shape.rows * shape.cols));
  compare(
      one, report, "converted", type, converted.host(), shape.rows * shape.cols, 0.0,
      [&](int64_t i) {
        const int64_t r = i / shape.cols, j = i % shape.cols, t = tiles.of(j);
        double bound = range.at(0, t), value = x.at(r, j);
        if (mode == RangeMode::dynamic) {
          bound = 0;
          for (int64_t k = 0; k < tiles.size(t); ++k) bound = std::max(bound, std::fabs(x.at(r, tiles.start(t) + k)));
          if (read_as(wide, row_max.host(), t * shape.rows + r) != bound) report->fail(one, "row_max");
        } else {
          value = clamped(value, -bound, bound);
        }
        if (res <= 0) return value;
        const double step = step_of(bound, res);
        const Level level(value, step, 1e300, type);
        if (levels) {
          slack[static_cast<size_t>(i)] = level.loose ? 1 : 0;
          return level.k;
        }
        slack[static_cast<size_t>(i)] = (level.loose ? step : 0) + 8 * unit_of(type) * std::fabs(level.k * step);
        return level.k * step;
      },
      [&](int64_t i, double want) {
        const double off = slack[static_cast<size_t>(i)];
        return off + (levels || res <= 0 ? 0 : 1.01 * half_ulp(type, std::fabs(want) + off));
      });
}

struct OutputCase {
  const char* name;
  double out_noise, out_bound, out_res;
  bool noise_by_channel, bound_by_channel, levels, has_bias;
};

const OutputCase kOutputCases[] = {
    {"bias alone", 0, 0, 0, false, false, false, true},
    {"noise a tile", 0.04, 0, 0, false, false, false, false},
    {"noise a channel of levels", 0.04, 0, 0, true, false, true, true},
    {"ADC a tile", 0, 1.5, 254, false, false, false, true},
    {"ADC a channel, no quantiser", 0, 1.5, 0, false, true, false, true},
    {"noise, ADC a channel of levels", 0.04, 1.25, 1.0 / 30, true, true, true, true},
};

// What noise and ADC are given beside the products, and what they return.
struct OutputFixture {
  const Shape3& shape;
  const OutputCase& variant;
  RangeMode mode;
  DType type, wide;
  int64_t bytes;
  double inp_res = 30;
  int64_t seed_value = 987654321;
  Ranges range;
  Matrix bias, row_max, wmax, of_tile;
  Buffer seed, y, clipped;

  OutputFixture(const Case& one, const Shape3& s, const OutputCase& v, RangeMode m)
      : shape(s), variant(v), mode(m), type(one.x_dtype), wide(wide_of(type)), bytes((s.channels + 7) / 8),
        range(one, s), bias(one.weight_dtype, 1, s.channels, s.shift, 0), row_max(wide, s.tiles, s.rows, 0, 0),
        wmax(wide, s.tiles, s.channels, s.shift, 0), of_tile(wide, 1, s.tiles, 0, 0), seed(8, 0),
        y(s.rows * s.channels * size_of(type), s.shift * size_of(type)), clipped(s.tiles * s.rows * bytes, 0) {
    bias.randomise(52, 0.5);
    Values values(53);
    row_max.assign([&](int64_t, int64_t) { return 0.9 + 0.2 * values.next(); });
    wmax.assign([&](int64_t, int64_t) { return 0.6 + 0.3 * values.next(); });
    of_tile.assign([&](int64_t, int64_t) { return 0.9; });
    std::memcpy(seed.host(), &seed_value, 8);
    seed.upload();
  }
  std::vector<Buffer*> outputs() {
    std::vector<Buffer*> all = {&y};
    if (variant.out_bound > 0) all.push_back(&clipped);
    return all;
  }
  cuda::OutputPass call() {
    cuda::OutputPass pass;
    pass.all_rows = shape.rows;
    pass.channels = shape.channels;
    pass.options.tiles = {shape.cols, shape.tiles};
    pass.options.mode = mode;
    pass.options.inp_res = inp_res;
    pass.options.out_noise = variant.out_noise;
    pass.options.out_noise_per_channel = variant.noise_by_channel;
    pass.options.out_bound = variant.out_bound;
    pass.options.out_res = variant.out_res;
    pass.options.out_bound_per_channel = variant.bound_by_channel;
    pass.dtype = type;
    pass.levels = variant.levels;
    pass.range = range.tile_parameter();
    pass.row_max = row_max.buffer.device();
    pass.wmax = wmax.buffer.device();
    pass.wmax_of_tile = of_tile.buffer.device();
    if (variant.has_bias) pass.bias = bias.channel_parameter();
    pass.seed = static_cast<const int64_t*>(seed.device());
    pass.y = y.device();
    pass.clipped = variant.out_bound > 0 ? static_cast<uint8_t*>(clipped.device()) : nullptr;
    return pass;
  }
  bool bit(int64_t t, int64_t r, int64_t c) {
    return (static_cast<unsigned char*>(clipped.host())[(t * shape.rows + r) * bytes + c / 8] >> (c % 8) & 1) != 0;
  }
};

// product(tile, row, channel, &error): the product of a tile, and how far the kernel's may lie from it.
template <class Product>
void compare_outputs(const Case& one, OutputFixture* of, Report* report, Product product) {
  const OutputCase& variant = of->variant;
  const int64_t rows = of->shape.rows, channels = of->shape.channels, tiles = of->shape.tiles, bytes = of->bytes;
  const DType type = of->type;
  const double unit = unit_of(type);
  std::vector<double> slack(static_cast<size_t>(rows * channels));
  int64_t wrong_bits = 0;
  compare(
      one, report, "y", type, of->y.host(), rows * channels, 0.0,
      [&](int64_t i) {
        const int64_t r = i / channels, c = i % channels;
        double sum = 0;
        double& error = slack[static_cast<size_t>(i)];
        for (int64_t t = 0; t < tiles; ++t) {
          const double bound_in = of->mode == RangeMode::dynamic ? of->row_max.at(t, r) : of->range.at(0, t);
          double off = 0;
          double value = product(t, r, c, &off);
          if (variant.levels) {
            const double step = step_of(bound_in, of->inp_res);
            value *= step;
            off = off * step + 4 * unit * std::fabs(value);
          }
          if (variant.out_noise > 0) {
            const double sigma = (variant.noise_by_channel ? of->wmax.at(t, c) : 0.9) * bound_in * variant.out_noise /
                                 std::sqrt(static_cast<double>(tiles));
            const Normal normal = normal_at(of->seed_value, static_cast<uint32_t>(1 + t), r, c, type);
            value += sigma * normal.value;
            off += sigma * (normal.error + 8 * unit * std::fabs(normal.value)) + unit * std::fabs(value);
          }
          if (variant.out_bound > 0) {
            const double bound = bound_in * variant.out_bound * (variant.bound_by_channel ? of->wmax.at(t, c) : 0.9);
            const double step = variant.out_res > 0 ? step_of(bound, variant.out_res) : bound;
            const double limit = variant.out_res > 0 ? levels_of(variant.out_res) / 2 : 1;
            const double q = value / step, near = off / step + 16 * unit * std::fabs(q) + 8 * unit;
            const auto outcome = [&](double quotient) {
              return variant.out_res > 0 ? std::nearbyint(quotient) : quotient;
            };
            const bool beyond = std::fabs(outcome(q)) > limit;
            const bool sure = (std::fabs(outcome(q - near)) > limit) == beyond &&
                              (std::fabs(outcome(q + near)) > limit) == beyond;
            if (sure && of->bit(t, r, c) != beyond) ++wrong_bits;
            value = clamped(outcome(q), -limit, limit) * step;
            const double jump = std::fabs(clamped(outcome(q + near), -limit, limit) -
                                          clamped(outcome(q - near), -limit, limit));
            off = jump * step + 8 * unit * std::fabs(value);
          }
          sum += value;
          error += off + unit * static_cast<double>(tiles) * std::fabs(value);
        }
        if (variant.has_bias) sum += of->bias.at(0, c);
        error += 4 * unit * std::fabs(sum) + unit;
        return sum;
      },
      [&](int64_t i, double want) {
        const double off = slack[static_cast<size_t>(i)];
        return off + 1.01 * half_ulp(type, std::fabs(want) + off);
      });
  if (wrong_bits > 0) report->fail(one, std::to_string(wrong_bits) + " wrong bits of the ADC");
  for (int64_t i = 0; variant.out_bound > 0 && i < tiles * rows && channels % 8 != 0; ++i) {
    const unsigned last = static_cast<unsigned char*>(of->clipped.host())[(i + 1) * bytes - 1];
    if (last >> (channels % 8) != 0) report->fail(one, "unused bits of the ADC's record are set");
  }
}

// The products arrive in portions of two tiles and of all rows but one, so that totals are carried over.
inline void check_output_pass(const Case& one, const Shape3& shape, const OutputCase& variant, RangeMode mode,
                              Report* report) {
  OutputFixture of(one, shape, variant, mode);
  const int64_t rows = shape.rows, channels = shape.channels, tiles = shape.tiles;
  Matrix products(of.wide, tiles * rows, channels, shape.shift, 0);
  products.randomise(51, variant.levels ? 16.0 : 1.0);
  Buffer largest(tiles * size_of(of.wide), 0);
  if (run_twice(one, report, "largest_of_rows", {&of.wmax.buffer}, {&largest}, [&] {
        return cuda::largest_of_rows(of.wmax.buffer.device(), tiles, channels, of.wide, largest.device(), nullptr);
      })) {
    compare(one, report, "largest", of.wide, largest.host(), tiles, 1.0,
            [&](int64_t t) {
              double most = 0;
              for (int64_t c = 0; c < channels; ++c) most = std::max(most, of.wmax.at(t, c));
              return most;
            },
            [](int64_t, double) { return 0.0; });
  }
  const int64_t row_bytes = channels * size_of(of.wide);
  Buffer total(rows * row_bytes, 0), part(2 * rows * row_bytes, 0);
  part.upload();
  total.upload();
  cuda::OutputPass call = of.call();
  call.products = part.device();
  call.total = total.device();
  const auto launch = [&] {
    for (int64_t row = 0; row < rows; row += std::max<int64_t>(rows - 1, 1)) {
      call.first_row = row;
      call.rows = std::min(std::max<int64_t>(rows - 1, 1), rows - row);
      for (int64_t tile = 0; tile < tiles; tile += 2) {
        call.first_tile = tile;
        call.tile_count = std::min<int64_t>(2, tiles - tile);
        for (int64_t k = 0; k < call.tile_count; ++k) {
          const char* from = static_cast<char*>(products.buffer.device()) + ((tile + k) * rows + row) * row_bytes;
          CHECKED(cudaMemcpy(static_cast<char*>(part.device()) + k * call.rows * row_bytes, from,
                             static_cast<size_t>(call.rows * row_bytes), cudaMemcpyDeviceToDevice));
        }
        const cudaError_t status = cuda::output_pass(call, nullptr);
        if (status != cudaSuccess) return status;
      }
    }
    return cudaSuccess;
  };
  if (!run_twice(one, report, "output_pass",
                 {&products.buffer, &of.wmax.buffer, &of.range.buffer, &of.bias.buffer, &of.row_max.buffer},
                 of.outputs(), launch)) {
    return;
  }
  compare_outputs(one, &of, report,
                  [&](int64_t t, int64_t r, int64_t c, double*) { return products.at(t * rows + r, c); });

  // Backward: the gradients behind those bits.
  if (variant.out_bound <= 0) return;
  const DType type = of.type;
  Matrix dy(type, rows, channels, shape.shift, shape.padding);
  dy.randomise(54, 1.0);
  of.clipped.upload();
  const int64_t count = std::min<int64_t>(tiles, 2), first = tiles - count;
  Buffer masked(count * rows * channels * size_of(type), shape.shift * size_of(type));
  cuda::MaskPass mask;
  mask.dy = dy.view();
  mask.rows = rows;
  mask.channels = channels;
  mask.first_tile = first;
  mask.tile_count = count;
  mask.dtype = type;
  mask.clipped = static_cast<const uint8_t*>(of.clipped.device());
  mask.masked = masked.device();
  if (!run_twice(one, report, "mask_pass", {&dy.buffer, &of.clipped}, {&masked},
                 [&] { return cuda::mask_pass(mask, nullptr); })) {
    return;
  }
  compare(one, report, "masked", type, masked.host(), count * rows * channels, 1.0,
          [&](int64_t i) {
            const int64_t t = first + i / (rows * channels), r = i / channels % rows, c = i % channels;
            return of.bit(t, r, c) ? 0.0 : dy.at(r, c);
          },
          [](int64_t, double) { return 0.0; });
}

inline void check_input_gradient(const Case& one, const Shape3& shape, RangeMode mode, bool wide_gradient,
                                 Report* report) {
  const DType type = one.x_dtype, gradient_type = wide_gradient ? wide_of(type) : type;
  const Tiles tiles{shape.cols, shape.tiles};
  Matrix x(type, shape.rows, shape.cols, shape.shift, shape.padding);
  Ranges range(one, shape);
  Values values(61);
  // Every ninth element lies at the bound itself, where the two masks differ.
  x.assign([&](int64_t r, int64_t c) {
    const double value = 0.8 * (values.next() + values.next()), bound = range.at(0, tiles.of(c));
    return (r + c) % 9 == 0 ? (value > 0 ? bound : -bound) : value;
  });
  Matrix g(gradient_type, shape.rows, shape.cols, shape.shift, 0);
  g.randomise(62, 1.0);
  Buffer dx(shape.rows * shape.cols * size_of(type), shape.shift * size_of(type));
  Buffer drange(shape.tiles * size_of(one.weight_dtype), 0);
  cuda::InputGradient call;
  call.input = {x.view(), shape.rows, tiles, type};
  call.options.tiles = tiles;
  call.options.mode = mode;
  call.options.decay = 0.01;
  call.options.input_min_percentage = 0.5;
  call.range = range.tile_parameter();
  call.gradient = g.buffer.device();
  call.gradient_is_wide = wide_gradient;
  call.dx = dx.device();
  call.drange = drange.device();
  Buffer workspace(cuda::input_gradient_workspace_bytes(call), 0);
  workspace.fill(0xff);
  workspace.upload();
  call.workspace = workspace.device();
  if (!run_twice(one, report, "input_gradient", {&x.buffer, &g.buffer, &range.buffer}, {&dx, &drange},
                 [&] { return cuda::input_gradient(call, nullptr); })) {
    return;
  }
  const double unit = unit_of(type);
  std::vector<double> sums(static_cast<size_t>(shape.tiles)), sizes(sums.size()), inside(sums.size());
  compare(
      one, report, "dx", type, dx.host(), shape.rows * shape.cols, 0.0,
      [&](int64_t i) {
        const int64_t r = i / shape.cols, c = i % shape.cols;
        const size_t t = static_cast<size_t>(tiles.of(c));
        const double bound = range.at(0, tiles.of(c)), value = x.at(r, c), gradient = g.at(r, c);
        const bool above = value >= bound, below = value <= -bound;
        double term = 0;
        if (mode == RangeMode::learned) {
          term = above ? std::min(gradient, 0.0) : below ? -std::max(gradient, 0.0) : 0;
        } else {
          term = value > bound ? gradient : value < -bound ? -gradient : 0;
        }
        sums[t] += term;
        sizes[t] += std::fabs(term);
        inside[t] += above || below ? 0 : 1;
        return (above || below) && std::fabs(value) != bound ? 0.0 : gradient;
      },
      [&](int64_t, double want) { return gradient_type == type ? 0.0 : 1.01 * half_ulp(type, want); });
  compare(
      one, report, "drange", one.weight_dtype, drange.host(), shape.tiles, 0.0,
      [&](int64_t t) {
        const double bound = range.at(0, t), numel = static_cast<double>(shape.rows * tiles.size(t));
        if (mode != RangeMode::learned) return sums[static_cast<size_t>(t)];
        return bound * sums[static_cast<size_t>(t)] + (inside[static_cast<size_t>(t)] > 0.5 * numel ? 0.01 * bound : 0);
      },
      [&](int64_t t, double want) {
        const double chain = 64 + static_cast<double>(shape.rows * shape.cols) / 1024;
        return unit * chain * (sizes[static_cast<size_t>(t)] + 1) + 1.01 * half_ulp(one.weight_dtype, want);
      });
}

inline void check_column_sum(const Case& one, const Shape3& shape, Report* report) {
  const DType type = one.x_dtype;
  Matrix values(type, shape.rows, shape.channels, shape.shift, shape.padding);
  values.randomise(71, 1.0);
  Buffer sums(shape.channels * size_of(one.weight_dtype), shape.shift * size_of(one.weight_dtype));
  cuda::ColumnSum call;
  call.values = values.view();
  call.rows = shape.rows;
  call.channels = shape.channels;
  call.dtype = type;
  call.sums_dtype = one.weight_dtype;
  call.sums = sums.device();
  Buffer workspace(cuda::column_sum_workspace_bytes(call), 0);
  workspace.fill(0xff);
  workspace.upload();
  call.workspace = workspace.device();
  if (!run_twice(one, report, "column_sum", {&values.buffer}, {&sums},
                 [&] { return cuda::column_sum(call, nullptr); })) {
    return;
  }
  std::vector<double> size(static_cast<size_t>(shape.channels));
  compare(
      one, report, "column sum", one.weight_dtype, sums.host(), shape.channels, 0.0,
      [&](int64_t c) {
        double sum = 0;
        for (int64_t r = 0; r < shape.rows; ++r) {
          sum += values.at(r, c);
          size[static_cast<size_t>(c)] += std::fabs(values.at(r, c));
        }
        return sum;
      },
      [&](int64_t c, double want) {
        const double chain = 32 + static_cast<double>(shape.rows) / (type == DType::float64 ? 1 : 16);
        return unit_of(type) * chain * size[static_cast<size_t>(c)] + 1.01 * half_ulp(one.weight_dtype, want);
      });
}

}  // namespace
