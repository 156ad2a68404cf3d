// What the checks of check_analog.cu share: a matrix between guard zones, and the arithmetic of the analog ops in
// float64 with the distance that float32 arithmetic may lie from it.
#pragma once

#include <cfloat>

#include "analog_kernels.h"
#include "check_phases.h"
#include "philox.cuh"

namespace {

using namespace triptych;  // NOLINT: Tiles, Per, RangeMode
using cuda::MatrixView;
using cuda::ParameterView;
using cuda::TileInput;

// One shape and layout; every kernel runs on it.
struct Shape3 {
  int64_t rows, cols, tiles, channels;
  int64_t shift, padding;  // elements off alignment, and between the rows of inputs
};

inline DType wide_of(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }
inline double unit_of(DType dtype) { return std::ldexp(1.0, dtype == DType::float64 ? -53 : -24); }
inline double tiny_of(DType dtype) { return dtype == DType::float64 ? DBL_MIN : FLT_MIN; }

// [rows, cols] with gaps between rows; gaps and guards are NaN.
struct Matrix {
  DType dtype;
  int64_t rows, cols, stride;
  Buffer buffer;

  Matrix(DType type, int64_t r, int64_t c, int64_t shift, int64_t padding)
      : dtype(type), rows(r), cols(c), stride(c + padding),
        buffer((r > 0 ? (r - 1) * (c + padding) + c : 0) * size_of(type), shift * size_of(type)) {
    buffer.fill(kGuardByte);
  }
  double at(int64_t r, int64_t c) { return read_as(dtype, buffer.host(), r * stride + c); }
  void set(int64_t r, int64_t c, double value) { write_as(dtype, buffer.host(), r * stride + c, value); }
  template <class Value>
  void assign(Value value) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) set(r, c, value(r, c));
    }
    buffer.upload();
  }
  void randomise(uint64_t seed, double scale) {
    Values values(seed);
    assign([&](int64_t, int64_t) { return scale * (values.next() + values.next()); });
  }
  MatrixView view() const { return {buffer.device(), stride}; }
  ParameterView parameter() const { return {buffer.device(), dtype, stride, 1}; }       // [T, C]
  ParameterView tile_parameter() const { return {buffer.device(), dtype, 1, 0}; }       // [1, T]
  ParameterView channel_parameter() const { return {buffer.device(), dtype, 0, 1}; }    // [1, C]
};

inline double step_of(double bound, double res) { return res > 1 ? 2 * bound / res : 2 * bound * res; }
inline double levels_of(double res) { return res > 1 ? res : 1 / res; }
inline double clamped(double value, double low, double high) {
  value = value < low ? low : value;
  return value > high ? high : value;
}

// A quotient and its nearest integer within a limit; `loose` where float32 may find another, `at_limit` where it may
// find |quotient| on the other side of the limit.
struct Level {
  double q, k;
  bool loose, at_limit;

  Level(double value, double step, double limit, DType dtype) {
    const double tiny = tiny_of(dtype), error = 8 * unit_of(dtype);
    q = value / (std::fabs(step) >= tiny ? step : tiny);
    k = std::nearbyint(clamped(q, -limit, limit));
    const double low = std::nearbyint(clamped(q * (1 - error), -limit, limit));
    loose = low != std::nearbyint(clamped(q * (1 + error), -limit, limit));
    at_limit = std::fabs(std::fabs(q) - limit) <= error * limit;
  }
};

struct Normal {
  double value, error;
};

inline Normal normal_at(int64_t seed, uint32_t stream, int64_t row, int64_t column, DType dtype) {
  const auto key = static_cast<uint64_t>(seed);
  const uint4 words = cuda::philox(
      make_uint4(static_cast<uint32_t>(column >> 2), static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32),
                 stream),
      make_uint2(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)));
  const bool second = (column & 2) != 0;
  const double u = ((second ? words.z : words.x) >> 8) + 1.0, v = (second ? words.w : words.y) >> 8;
  const double radius = std::sqrt(-2 * std::log(std::ldexp(u, -24)));
  const double angle = 2 * 3.14159265358979323846 * std::ldexp(v, -24);
  return {radius * ((column & 1) != 0 ? std::sin(angle) : std::cos(angle)), radius * 21 * unit_of(dtype)};
}

inline void check_philox(Report* report) {
  struct Known {
    uint4 counter;
    uint2 key;
    uint4 words;
  };
  const Known known[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}},
      {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}},
      {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u},
       {0xa4093822u, 0x299f31d0u},
       {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}},
  };
  for (const Known& one : known) {
    const uint4 words = cuda::philox(one.counter, one.key);
    ++report->cases;
    if (words.x != one.words.x || words.y != one.words.y || words.z != one.words.z || words.w != one.words.w) {
      Case labelled;
      report->fail(labelled, "philox does not give its known answers");
    }
  }
}

}  // namespace
