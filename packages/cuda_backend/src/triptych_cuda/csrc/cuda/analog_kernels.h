// The launch interface of the analog kernels: raw pointers, strides counted in elements, a stream, a cudaError_t.
//
// Shapes: T tiles over N columns (../analog.h), R rows, C output channels. "wide" is float32, and float64 where `dtype`
// is float64. A matrix view has stride 1 along its columns and its own row stride, 0 or more; every output is
// contiguous. Base pointers need the alignment of their element only: 16-byte accesses are taken where they are
// possible. Workspaces are 16-byte aligned and need not be cleared.
//
// The functions launch on the device that is current in the calling thread, allocate nothing, never synchronise, and
// may be captured into a graph. They launch nothing where an output has no elements, write every element of every
// output otherwise, and give the same bits on every run: sums have a fixed order, maxima have none. They return the
// first error of their own calls (cudaSuccess otherwise).
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "../analog.h"
#include "kernels.h"

namespace triptych {
namespace cuda {

struct MatrixView {
  const void* data = nullptr;
  int64_t row_stride = 0;
};

// One number a tile, or one a tile and channel: of the data's dtype, or wide. Any strides. null: there is none.
struct ParameterView {
  const void* data = nullptr;
  DType dtype = DType::float32;
  int64_t tile_stride = 0;
  int64_t channel_stride = 0;
};

// ---- tiles of the data ---------------------------------------------------------------------------------------------

struct TileInput {
  MatrixView x;  // [R, N]
  int64_t rows = 0;
  Tiles tiles;
  DType dtype = DType::float32;
};

// abs_max: [T, R] wide.
cudaError_t tile_abs_max(const TileInput& input, void* abs_max, cudaStream_t stream);

// Bytes of workspace of tile_std and of input_range_update.
int64_t tile_statistics_workspace_bytes(const TileInput& input);

// std: [T] wide.
cudaError_t tile_std(const TileInput& input, void* std, void* workspace, cudaStream_t stream);

// The data of a tile is read only while its count is below options.init_from_data, which is seen on the device.
struct RangeUpdate {
  TileInput input;
  UpdateOptions options;
  ParameterView range;           // [T]
  const int64_t* count = nullptr;
  int64_t count_stride = 0;
  ParameterView least, largest;  // [T] wide; the mode `extremes` alone
  void* new_range = nullptr;     // [T] of range's dtype
  int64_t* new_count = nullptr;
  void* new_least = nullptr;     // [T] wide; the mode `extremes` alone
  void* new_largest = nullptr;
  void* workspace = nullptr;
};
cudaError_t input_range_update(const RangeUpdate& call, cudaStream_t stream);

// ---- weights -------------------------------------------------------------------------------------------------------

struct WeightForward {
  MatrixView weight;  // [C, N]
  int64_t channels = 0;
  WeightOptions options;
  DType dtype = DType::float32;
  ParameterView clip;             // [T, C], or none
  const int64_t* seed = nullptr;  // [1]; read only with noise
  void* modified = nullptr;       // [C, N] of dtype
  void* wmax = nullptr;           // [T, C] wide
  void* workspace = nullptr;      // weight_forward_workspace_bytes()
};
int64_t weight_forward_workspace_bytes(const WeightForward& call);
cudaError_t weight_forward(const WeightForward& call, cudaStream_t stream);

// With a clip; without one the gradient of the weight is dmodified itself.
struct WeightBackward {
  MatrixView dmodified, weight;  // [C, N]
  int64_t channels = 0;
  WeightOptions options;
  DType dtype = DType::float32;
  ParameterView clip;        // [T, C]
  void* dweight = nullptr;   // [C, N] of dtype; null: not wanted
  void* dclip = nullptr;     // [T, C] of clip's dtype; null: not wanted
};
cudaError_t weight_backward(const WeightBackward& call, cudaStream_t stream);

// ---- the linear layer, before its product --------------------------------------------------------------------------

// What comes out of the DAC. `levels`: the integers x / step of the input quantiser instead of their product with the
// step; exact in dtype while they have no more than its digits.
struct InputPass {
  TileInput input;
  LinearOptions options;
  ParameterView range;      // [T]; the modes learned and fast
  void* row_max = nullptr;  // [T, R] wide, written; the mode `dynamic` alone
  void* converted = nullptr;  // [R, N] of dtype; null in the mode `dynamic`: row_max alone is wanted
  bool levels = false;
};
cudaError_t input_pass(const InputPass& call, cudaStream_t stream);

// largest: [T] wide, the largest of each row of values [T, C] wide; NaN where one is.
cudaError_t largest_of_rows(const void* values, int64_t tiles, int64_t channels, DType dtype, void* largest,
                            cudaStream_t stream);

// ---- the linear layer, after its product ---------------------------------------------------------------------------

// Noise, ADC, sum over tiles, bias, one rounding. `products` are those of `tile_count` tiles from `first_tile` for
// `rows` rows from `first_row`. A total that is not complete is kept in `total`: read unless first_tile is 0, written
// unless the last tile is among those given.
struct OutputPass {
  const void* products = nullptr;  // [tile_count, rows, C] wide, contiguous
  void* total = nullptr;           // [rows, C] wide, contiguous; null where all tiles are given
  int64_t first_tile = 0, tile_count = 0;
  int64_t first_row = 0, rows = 0, all_rows = 0, channels = 0;
  LinearOptions options;  // tiles.count is T
  DType dtype = DType::float32;
  bool levels = false;             // the products are of the input quantiser's integers
  ParameterView range;             // [T]; the modes learned and fast
  const void* row_max = nullptr;   // [T, all_rows] wide; the mode `dynamic`
  const void* wmax = nullptr;      // [T, C] wide, contiguous; where noise or ADC are a channel
  const void* wmax_of_tile = nullptr;  // [T] wide; where noise or ADC are a tile
  ParameterView bias;              // [C], channel_stride alone counts; or none
  const int64_t* seed = nullptr;   // [1]; read only with noise
  void* y = nullptr;               // [all_rows, C] of dtype
  uint8_t* clipped = nullptr;      // [T, all_rows, (C + 7) / 8]; with an ADC
};
cudaError_t output_pass(const OutputPass& call, cudaStream_t stream);

// ---- the linear layer, backward ------------------------------------------------------------------------------------

// masked: [tile_count, R, C] of dtype: dy, with 0 where `clipped` has the bit of that tile.
struct MaskPass {
  MatrixView dy;  // [R, C]
  int64_t rows = 0, channels = 0, first_tile = 0, tile_count = 0;
  DType dtype = DType::float32;
  const uint8_t* clipped = nullptr;  // [T, R, (C + 7) / 8], contiguous
  void* masked = nullptr;
};
cudaError_t mask_pass(const MaskPass& call, cudaStream_t stream);

// The gradient through the clamp of the inputs, and that of its bound. The modes learned and fast alone.
struct InputGradient {
  TileInput input;
  LinearOptions options;
  ParameterView range;              // [T]
  const void* gradient = nullptr;   // [R, N], contiguous: with respect to the clamped x
  bool gradient_is_wide = false;    // wide, or else of dtype
  void* dx = nullptr;               // [R, N] of dtype; may be `gradient` where that is of dtype; null: not wanted
  void* drange = nullptr;           // [T] of range's dtype; null: not wanted
  void* workspace = nullptr;        // input_gradient_workspace_bytes()
};
int64_t input_gradient_workspace_bytes(const InputGradient& call);
cudaError_t input_gradient(const InputGradient& call, cudaStream_t stream);

// sums: [C] of sums_dtype: the sum over the rows of values [R, C] of dtype.
struct ColumnSum {
  MatrixView values;
  int64_t rows = 0, channels = 0;
  DType dtype = DType::float32, sums_dtype = DType::float32;
  void* sums = nullptr;
  void* workspace = nullptr;  // column_sum_workspace_bytes()
};
int64_t column_sum_workspace_bytes(const ColumnSum& call);
cudaError_t column_sum(const ColumnSum& call, cudaStream_t stream);

}  // namespace cuda
}  // namespace triptych
