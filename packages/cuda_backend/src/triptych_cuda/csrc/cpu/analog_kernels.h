// The CPU kernels of the analog ops: raw pointers, strides in elements, no framework.
//
// Legend: as in kernels.h; T tiles, whose place in a row is given by Tiles. Nothing here allocates: what a function
// needs beside its outputs the caller passes as `scratch`. Results do not depend on how ranges are cut, save along the
// units that are named here.
#pragma once

#include "../analog.h"
#include "kernels.h"

namespace triptych::cpu {

struct TileArgs {
  Dtype dtype;
  int64_t rows;
  Tiles tiles;
  const void* x;
  int64_t x_stride;
  int64_t chunk_rows;  // for what is summed over rows: chunk c covers rows [c * chunk_rows, (c + 1) * chunk_rows)
  int64_t chunks;
  void* out;
};

struct TileKernels {
  // wide out[T, rows]: the largest magnitude of each tile of each row.
  void (*abs_max)(const TileArgs&, int64_t row_begin, int64_t row_end);
  // double out[T, chunks]: the sums of x - shift over each chunk, where shift is the tile's first element.
  void (*sums)(const TileArgs&, int64_t chunk_begin, int64_t chunk_end);
  // double out[T, chunks, 2]: the sums of d = x - shift - mean and of d^2 over each chunk; double means[T].
  void (*squares)(const TileArgs&, const double* means, int64_t chunk_begin, int64_t chunk_end);
  // wide out[T, chunks, 2]: the smallest and the largest element of each chunk; NaN where one is not finite.
  void (*extremes)(const TileArgs&, int64_t chunk_begin, int64_t chunk_end);
};

struct WeightArgs {
  Dtype dtype;
  Dtype clip_dtype;  // of dclip
  int64_t rows;      // output channels
  WeightOptions options;
  const void* weight;
  int64_t weight_stride;
  bool has_clip;
  const void* wmax;     // wide[T, rows]: the largest magnitudes, or the learned clips
  const void* largest;  // wide[T]: the largest of those
  uint64_t seed;
  void* modified;  // [rows, columns], contiguous
  const void* dmodified;
  int64_t dmodified_stride;
  void* dweight;  // [rows, columns], contiguous; nullptr: not wanted
  void* dclip;    // [T, rows]; nullptr: not wanted
};

struct WeightKernels {
  void (*forward)(const WeightArgs&, int64_t row_begin, int64_t row_end);
  void (*backward)(const WeightArgs&, int64_t row_begin, int64_t row_end);  // only with a clip
  // For tests. The four words of one counter, and the numbers of columns [begin, end) of a row.
  void (*philox)(uint64_t seed, uint32_t stream, uint64_t row, uint32_t group, uint32_t* words);
  void (*normal)(Dtype wide, uint64_t seed, uint32_t stream, int64_t row, int64_t begin, int64_t end, void* out);
};

struct LinearArgs {
  Dtype dtype;
  int64_t rows;
  int64_t outputs;  // C; the inputs are options.tiles.columns
  LinearOptions options;
  const void* x;
  int64_t x_stride;
  const void* weight;
  int64_t weight_stride;
  const void* bias;   // wide[outputs]; nullptr: none
  const void* range;  // wide: the bound of tile s and row r is range[s * range_tile_stride + r * range_row_stride]
  int64_t range_tile_stride, range_row_stride;
  const void* wmax;         // wide[T, outputs]
  const void* wmax_largest;  // wide[T]
  uint64_t seed;
  void* y;           // [rows, outputs], contiguous
  uint8_t* clipped;  // [T, rows, (outputs + 7) / 8]; read by backward
  const void* dy;
  int64_t dy_stride;
  void* dx;           // [rows, columns], contiguous; nullptr: not wanted
  void* dweight;      // [outputs, columns], contiguous
  double* dranges;    // [row units, chunks]: the sum that the range's gradient is made of; nullptr: not wanted
  int64_t* insides;   // the same for the number of elements strictly inside the range
  void* dbias_sums;   // wide[row chunks, outputs]
  int64_t dbias_rows;  // rows in a chunk
};

// A part of a matrix.
struct Area { int64_t row_begin, row_end, column_begin, column_end; };

// Where areas may begin: rows at multiples of kRowUnit, columns of y and rows of dweight at multiples of 8 (both units
// are), where the bytes of the ADC's record do. An area is at most kMostRows x kMostColumns.
constexpr int64_t kRowUnit = 48;
constexpr int64_t kColumnUnit = 32;
constexpr int64_t kMostRows = 5 * kRowUnit;
constexpr int64_t kMostColumns = 256;

// Each function computes one area: of rows x outputs, of rows x inputs, of outputs x inputs. Where there is an ADC, and
// for dx where there is a range, the area lies within the columns of one tile. A chunk of dx's columns is the same for
// all rows, however those are cut; sums over rows are kept for each unit of rows.
struct LinearKernels {
  int64_t (*scratch_bytes)(Dtype);
  void (*forward)(const LinearArgs&, Area, void* scratch);
  void (*input_grad)(const LinearArgs&, Area, int64_t chunk, int64_t chunks, void* scratch);
  void (*weight_grad)(const LinearArgs&, Area, void* scratch);
  // dbias_sums of chunks of rows.
  void (*bias_sums)(const LinearArgs&, int64_t chunk_begin, int64_t chunk_end);
};

}  // namespace triptych::cpu
