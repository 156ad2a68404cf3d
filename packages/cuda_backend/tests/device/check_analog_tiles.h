// The checks of check_analog.cu for the statistics of tiles and the updates of input ranges.
#pragma once

#include "check_analog_case.h"

namespace {

struct Statistics {
  double std, least, largest;
};

inline Statistics statistics_of(Matrix& x, const Tiles& tiles, int64_t tile) {
  const int64_t start = tiles.start(tile), size = tiles.size(tile);
  const double n = static_cast<double>(x.rows * size);
  const double first = x.rows * size > 0 ? x.at(0, start) : 0;  // distances from it are 0 where all elements are equal
  long double sum = 0, squares = 0;
  Statistics result{0, INFINITY, -INFINITY};
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t j = 0; j < size; ++j) {
      const double value = x.at(r, start + j);
      sum += static_cast<long double>(value) - first;
      result.least = std::min(result.least, value);
      result.largest = std::max(result.largest, value);
    }
  }
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t j = 0; j < size; ++j) {
      const long double off = static_cast<long double>(x.at(r, start + j)) - first - sum / n;
      squares += off * off;
    }
  }
  result.std = n < 2 ? NAN : std::sqrt(static_cast<double>(squares) / (n - 1));
  return result;
}

// `offset` is added to all elements: with a large one the digits of the deviations are few, and must be kept.
inline void check_statistics(const Case& one, const Shape3& shape, double offset, double scale, Report* report) {
  const DType type = one.x_dtype, wide = wide_of(type);
  const Tiles tiles{shape.cols, shape.tiles};
  Matrix x(type, shape.rows, shape.cols, shape.shift, shape.padding);
  Values values(31);
  x.assign([&](int64_t, int64_t) { return offset + scale * (values.next() + values.next()); });
  const TileInput input{x.view(), shape.rows, tiles, type};
  Buffer abs_max(shape.tiles * shape.rows * size_of(wide), shape.shift * size_of(wide));
  if (run_twice(one, report, "tile_abs_max", {&x.buffer}, {&abs_max},
                [&] { return cuda::tile_abs_max(input, abs_max.device(), nullptr); })) {
    compare(one, report, "abs_max", wide, abs_max.host(), shape.tiles * shape.rows, 1.0,
            [&](int64_t i) {
              const int64_t t = i / shape.rows;
              double most = 0;
              for (int64_t j = 0; j < tiles.size(t); ++j) {
                most = std::max(most, std::fabs(x.at(i % shape.rows, tiles.start(t) + j)));
              }
              return most;
            },
            [](int64_t, double) { return 0.0; });
  }
  std::vector<Statistics> want;
  for (int64_t t = 0; t < shape.tiles; ++t) want.push_back(statistics_of(x, tiles, t));
  const auto of = [&](int64_t t) -> const Statistics& { return want[static_cast<size_t>(t)]; };
  const auto wrong_nan = [&](const char* what, const Buffer*, double got, double expected) {
    if (std::isnan(got) != std::isnan(expected)) report->fail(one, std::string(what) + ": NaN in one of the two");
  };
  Buffer workspace(cuda::tile_statistics_workspace_bytes(input), 0);
  workspace.fill(0xff);
  workspace.upload();
  const double tolerance = 64 * unit_of(type);
  Buffer std(shape.tiles * size_of(wide), shape.shift * size_of(wide));
  if (run_twice(one, report, "tile_std", {&x.buffer}, {&std},
                [&] { return cuda::tile_std(input, std.device(), workspace.device(), nullptr); })) {
    for (int64_t t = 0; t < shape.tiles; ++t) {
      const double got = read_as(wide, std.host(), t);
      wrong_nan("std", &std, got, of(t).std);
      if (scale == 0 && got == got && got != 0) report->fail(one, "std of equal elements is not 0");
      if (!std::isnan(of(t).std) && !(std::fabs(got - of(t).std) <= tolerance * of(t).std)) {
        report->fail(one, "std: " + std::to_string(got) + ", expected " + std::to_string(of(t).std));
      }
    }
  }

  // Counts 0, 1, 2 calibrate; 3 is done.
  Matrix range(one.weight_dtype, 1, shape.tiles, shape.shift, 0);
  range.assign([](int64_t, int64_t t) { return 0.5 + static_cast<double>(t); });
  Matrix least(wide, 1, shape.tiles, 0, 0), largest(wide, 1, shape.tiles, 0, 0);
  least.assign([](int64_t, int64_t) { return -0.25; });
  largest.assign([](int64_t, int64_t) { return 0.25; });
  Buffer count(shape.tiles * 8, 0);
  for (int64_t t = 0; t < shape.tiles; ++t) {
    const int64_t value = (t + 1) % 4;
    std::memcpy(static_cast<char*>(count.host()) + 8 * t, &value, 8);
  }
  count.upload();
  Buffer new_range(shape.tiles * size_of(one.weight_dtype), 0), new_count(shape.tiles * 8, 0);
  Buffer new_least(shape.tiles * size_of(wide), 0), new_largest(shape.tiles * size_of(wide), 0);
  for (const double momentum : {2.0, -1.0, 0.9}) {  // 2: the mode std
    const bool extremes = momentum <= 1;
    cuda::RangeUpdate call;
    call.input = input;
    call.options = {tiles, extremes ? Calibration::extremes : Calibration::std, 3, 2.5, momentum};
    call.range = range.tile_parameter();
    call.count = static_cast<const int64_t*>(count.device());
    call.count_stride = 1;
    call.least = least.tile_parameter();
    call.largest = largest.tile_parameter();
    call.new_range = new_range.device();
    call.new_count = static_cast<int64_t*>(new_count.device());
    call.new_least = new_least.device();
    call.new_largest = new_largest.device();
    call.workspace = workspace.device();
    std::vector<Buffer*> outputs = {&new_range, &new_count};
    if (extremes) outputs.insert(outputs.end(), {&new_least, &new_largest});
    if (!run_twice(one, report, "input_range_update",
                   {&x.buffer, &range.buffer, &count, &least.buffer, &largest.buffer}, outputs,
                   [&] { return cuda::input_range_update(call, nullptr); })) {
      continue;
    }
    for (int64_t t = 0; t < shape.tiles; ++t) {
      const int64_t k = (t + 1) % 4;
      double expected = range.at(0, t), low = -0.25, high = 0.25;
      int64_t expected_count = k;
      const bool takes = k < 3 && (extremes ? shape.rows > 0 : of(t).std > 0);
      if (takes) {
        ++expected_count;
        const double n = static_cast<double>(k);
        if (!extremes) {
          expected = (expected * n + 2.5 * of(t).std) / (n + 1);
        } else {
          low = k == 0           ? of(t).least
                : momentum == -1 ? std::min(low, of(t).least)
                                 : low * 0.9 + of(t).least * (1 - 0.9);
          high = k == 0           ? of(t).largest
                 : momentum == -1 ? std::max(high, of(t).largest)
                                  : high * 0.9 + of(t).largest * (1 - 0.9);
          expected = std::max(std::fabs(low), std::fabs(high));
        }
      }
      int64_t got_count;
      std::memcpy(&got_count, static_cast<char*>(new_count.host()) + 8 * t, 8);
      const auto near = [&](const char* what, double got, double value, DType dtype) {
        const double off = tolerance * std::max(std::fabs(value), 0.25) + 1.01 * half_ulp(dtype, value);
        if (std::fabs(got - value) <= off) return;
        report->fail(one, std::string(what) + " of tile " + std::to_string(t) + ": " + std::to_string(got) +
                              ", expected " + std::to_string(value));
      };
      if (got_count != expected_count) report->fail(one, "count of tile " + std::to_string(t));
      near("range", read_as(one.weight_dtype, new_range.host(), t), expected, one.weight_dtype);
      if (extremes) {
        near("x_min", read_as(wide, new_least.host(), t), low, wide);
        near("x_max", read_as(wide, new_largest.host(), t), high, wide);
      }
    }
  }
}

}  // namespace
