// The checks of check_analog.cu for the kernels of the weights.
#pragma once

#include "check_analog_case.h"

namespace {

struct WeightCase {
  const char* name;
  bool clip;
  Per quantization;
  double res;
  Per noise;
  double std_dev;
};

const WeightCase kWeightCases[] = {
    {"nothing", false, Per::none, 0, Per::none, 0},
    {"8 bits a channel", false, Per::channel, 254, Per::none, 0},
    {"8 bits a tile, noise a channel", false, Per::tensor, 254, Per::channel, 0.03},
    {"a share a channel, noise a channel", false, Per::channel, 1.0 / 30, Per::channel, 0.1},
    {"noise a tile", false, Per::none, 0, Per::tensor, 0.05},
    {"clip", true, Per::none, 0, Per::none, 0},
    {"clip, noise a tile", true, Per::none, 0, Per::tensor, 0.1},
    {"clip, 5 bits, noise a channel", true, Per::channel, 30, Per::channel, 0.1},
};

inline void check_weight_forward(const Case& one, const Shape3& shape, const WeightCase& variant, Report* report) {
  const DType type = one.x_dtype, wide = wide_of(type);
  const int64_t channels = shape.channels, cols = shape.cols;
  const Tiles tiles{cols, shape.tiles};
  const double unit = unit_of(type);
  Matrix weight(type, channels, cols, shape.shift, shape.padding);
  weight.randomise(11, 1.0);
  Matrix clip(one.weight_dtype, shape.tiles, channels, shape.shift, 1);
  Values sizes(12);
  clip.assign([&](int64_t, int64_t) { return 0.6 + 0.5 * sizes.next(); });
  Buffer seed(8, 0);
  const int64_t seed_value = -1234567890123456789;
  std::memcpy(seed.host(), &seed_value, 8);
  seed.upload();
  Buffer modified(channels * cols * size_of(type), shape.shift * size_of(type));
  Buffer wmax(shape.tiles * channels * size_of(wide), shape.shift * size_of(wide));

  cuda::WeightForward call;
  call.weight = weight.view();
  call.channels = channels;
  call.options = {tiles, variant.quantization, variant.res, variant.noise, variant.std_dev};
  call.dtype = type;
  if (variant.clip) call.clip = clip.parameter();
  call.seed = static_cast<const int64_t*>(seed.device());
  call.modified = modified.device();
  call.wmax = wmax.device();
  Buffer workspace(cuda::weight_forward_workspace_bytes(call), 0);
  workspace.upload();
  call.workspace = workspace.device();
  if (!run_twice(one, report, "weight_forward", {&weight.buffer, &clip.buffer, &seed}, {&modified, &wmax},
                 [&] { return cuda::weight_forward(call, nullptr); })) {
    return;
  }
  std::vector<double> maxima(static_cast<size_t>(shape.tiles * channels)), of_tile(static_cast<size_t>(shape.tiles));
  for (int64_t t = 0; t < shape.tiles; ++t) {
    for (int64_t c = 0; c < channels; ++c) {
      double most = variant.clip ? clip.at(t, c) : 0;
      for (int64_t j = 0; j < tiles.size(t) && !variant.clip; ++j) {
        most = std::max(most, std::fabs(weight.at(c, tiles.start(t) + j)));
      }
      maxima[static_cast<size_t>(t * channels + c)] = most;
      of_tile[static_cast<size_t>(t)] = std::max(of_tile[static_cast<size_t>(t)], most);
    }
  }
  compare(one, report, "wmax", wide, wmax.host(), shape.tiles * channels, 1.0,
          [&](int64_t i) { return maxima[static_cast<size_t>(i)]; }, [](int64_t, double) { return 0.0; });
  std::vector<double> error(static_cast<size_t>(channels * cols));
  compare(
      one, report, "modified", type, modified.host(), channels * cols, 0.0,
      [&](int64_t i) {
        const int64_t c = i / cols, j = i % cols, t = tiles.of(j);
        const double of_channel = maxima[static_cast<size_t>(t * channels + c)];
        double& slack = error[static_cast<size_t>(i)];
        double value = weight.at(c, j);
        if (variant.quantization != Per::none) {
          const double levels = levels_of(variant.res);
          const double step =
              2 * (variant.quantization == Per::tensor ? of_tile[static_cast<size_t>(t)] : of_channel) / levels;
          const Level level(value, step, levels / 2, type);
          value = level.k * step;
          slack = (level.loose ? step : 0) + 8 * unit * std::fabs(value);
        } else if (variant.clip) {
          value = clamped(value / of_channel, -1, 1) * of_channel;
          slack = 8 * unit * std::fabs(value);
        }
        if (variant.noise != Per::none) {
          const double sigma =
              variant.std_dev * (variant.noise == Per::tensor ? of_tile[static_cast<size_t>(t)] : of_channel);
          const Normal normal = normal_at(seed_value, 0, c, j, type);
          value += sigma * normal.value;
          slack += sigma * (normal.error + 4 * unit * std::fabs(normal.value)) + 2 * unit * std::fabs(value);
        }
        return value;
      },
      [&](int64_t i, double want) {
        const double off = error[static_cast<size_t>(i)];
        return off + 1.01 * half_ulp(type, std::fabs(want) + off);
      });
}

inline void check_weight_backward(const Case& one, const Shape3& shape, bool discrete, Report* report) {
  const DType type = one.x_dtype;
  const int64_t channels = shape.channels, cols = shape.cols;
  const Tiles tiles{cols, shape.tiles};
  const double unit = unit_of(type), levels = discrete ? 30 : 2, limit = levels / 2;
  Matrix weight(type, channels, cols, shape.shift, shape.padding);
  Matrix g(type, channels, cols, shape.shift, 2 * shape.padding);
  weight.randomise(21, 1.0);
  g.randomise(22, 0.5);
  Matrix clip(one.weight_dtype, shape.tiles, channels, shape.shift, 1);
  Values sizes(23);
  clip.assign([&](int64_t, int64_t) { return 0.6 + 0.5 * sizes.next(); });
  Buffer dweight(channels * cols * size_of(type), shape.shift * size_of(type));
  Buffer dclip(shape.tiles * channels * size_of(one.weight_dtype), shape.shift * size_of(one.weight_dtype));
  cuda::WeightBackward call;
  call.dmodified = g.view();
  call.weight = weight.view();
  call.channels = channels;
  call.options = {tiles, discrete ? Per::channel : Per::none, discrete ? 30.0 : 0.0, Per::none, 0};
  call.dtype = type;
  call.clip = clip.parameter();
  call.dweight = dweight.device();
  call.dclip = dclip.device();
  if (!run_twice(one, report, "weight_backward", {&weight.buffer, &g.buffer, &clip.buffer}, {&dweight, &dclip},
                 [&] { return cuda::weight_backward(call, nullptr); })) {
    return;
  }
  std::vector<double> sums(static_cast<size_t>(shape.tiles * channels)), errors(sums.size());
  std::vector<double> want(static_cast<size_t>(channels * cols)), loose(want.size());
  for (int64_t i = 0; i < channels * cols; ++i) {
    const int64_t c = i / cols, j = i % cols, t = tiles.of(j);
    const double a = clip.at(t, c), gradient = g.at(c, j);
    const Level level(weight.at(c, j), discrete ? 2 * a / levels : a, 1e300, type);
    const bool inside = std::fabs(level.q) <= limit;
    const bool edge = std::fabs(std::fabs(level.q) - limit) <= 8 * unit * limit;
    const size_t at = static_cast<size_t>(t * channels + c), here = static_cast<size_t>(i);
    const double term = inside ? (discrete ? level.k - level.q : 0) : level.q > 0 ? limit : -limit;
    const double kappa =
        (discrete ? 2 * std::sqrt(limit) / levels : 1) / std::sqrt(static_cast<double>(channels * tiles.size(t)));
    want[here] = inside ? gradient : 0;
    loose[here] = edge ? std::fabs(gradient) : 0;
    sums[at] += kappa * gradient * term;
    errors[at] += kappa * std::fabs(gradient) *
                  ((edge ? limit + 1 : 0) + (level.loose && discrete ? 1 : 0) +
                   unit * (8 * std::fabs(level.q) + (64 + static_cast<double>(tiles.size(t)) / 32) * std::fabs(term)));
  }
  compare(one, report, "dweight", type, dweight.host(), channels * cols, 0.0,
          [&](int64_t i) { return want[static_cast<size_t>(i)]; },
          [&](int64_t i, double) { return loose[static_cast<size_t>(i)]; });
  compare(one, report, "dclip", one.weight_dtype, dclip.host(), shape.tiles * channels, 0.0,
          [&](int64_t i) { return sums[static_cast<size_t>(i)]; },
          [&](int64_t i, double value) {
            const double off = errors[static_cast<size_t>(i)] + 8 * unit * std::fabs(value);
            return off + 1.01 * half_ulp(one.weight_dtype, value);
          });
}

}  // namespace
