// The CPU kernels' interface: raw pointers, strides in elements, no framework.
//
// Legend: a matrix is `rows` x `columns`; its last dimension is contiguous, `*_stride` is the distance between rows
// (0 for an expanded tensor). Statistics, products and sums are float32, or float64 for float64 data; "wide" below
// means that type. Nothing here allocates, and nothing depends on the number of threads.
#pragma once

#include <cstdint>

namespace triptych::cpu {

enum class Dtype : int { float32, bfloat16, float16, float64 };

// Where y is rounded to the data's type: once, after the product with the gain; or also before it.
enum class Rounding : int { after_weight, before_weight };

struct ForwardArgs {
  Dtype dtype;
  Rounding rounding;
  int64_t rows, columns;
  const void* x;
  int64_t x_stride;
  const void* residual;  // nullptr: plain rms_norm, and h is not written
  int64_t residual_stride;
  const void* gain;  // wide[columns]: weight + offset
  double eps;
  void* y;     // [rows, columns], contiguous
  void* h;     // [rows, columns], contiguous: round(x + residual)
  void* rstd;  // wide[rows]
};

struct BackwardArgs {
  Dtype dtype;
  Rounding rounding;
  int64_t rows, columns;
  const void* dy;
  int64_t dy_stride;
  const void* dh;  // nullptr: zero
  int64_t dh_stride;
  const void* x;  // what was normalised: x of rms_norm, h of add_rms_norm
  int64_t x_stride;
  const void* gain;
  const void* rstd;
  void* dx;           // [rows, columns], contiguous; nullptr: not wanted
  void* partials;     // wide[chunks, columns], one sum over rows for each chunk; nullptr: no dw wanted
  int64_t chunk_rows;  // chunk c covers rows [c * chunk_rows, (c + 1) * chunk_rows)
};

struct WeightGradArgs {
  Dtype dtype;         // of the data; decides what "wide" is
  Dtype weight_dtype;  // of dw
  int64_t chunks, columns;
  const void* partials;
  void* dw;
};

struct GainArgs {
  Dtype dtype;
  Dtype weight_dtype;
  int64_t columns;
  const void* weight;  // nullptr: the gain is 1
  int64_t weight_stride;
  double offset;
  void* gain;
};

// How many rows one chunk of the weight gradient covers: a function of the shape alone, so that the sum is the same
// bits on any number of threads. At most 128 chunks, so that the workspace does not grow with rows; at least 4 rows
// and 16 Ki elements each, so that writing and reading the partial costs little beside the rows.
inline int64_t chunk_rows(int64_t rows, int64_t columns) {
  const int64_t most_chunks = (rows + 127) / 128;
  const int64_t least_work = (16384 + columns - 1) / columns;
  const int64_t least = least_work > 4 ? least_work : 4;
  return most_chunks > least ? most_chunks : least;
}

// Every function of a table handles a half-open range, so that the caller may spread ranges over threads: rows, chunks
// of rows, columns.
struct NormKernels {
  void (*forward)(const ForwardArgs&, int64_t row_begin, int64_t row_end);
  void (*backward)(const BackwardArgs&, int64_t chunk_begin, int64_t chunk_end);
  void (*weight_grad)(const WeightGradArgs&, int64_t column_begin, int64_t column_end);
  void (*gain)(const GainArgs&);
};

struct TileKernels;
struct WeightKernels;
struct LinearKernels;

// One instruction set's compilation of the kernels. The tables of the analog ops are in analog_kernels.h.
struct Kernels {
  const char* name;
  const NormKernels& norm;
  const TileKernels& tile;
  const WeightKernels& weight;
  const LinearKernels& linear;
};

// The compilations that this processor can run, best first; the last one is "baseline" everywhere.
struct Variants {
  const Kernels* list[3];
  int count;
};
const Variants& variants();

}  // namespace triptych::cpu
