// The launch interface of the CUDA kernels: raw pointers, strides counted in elements, a stream, a cudaError_t.
//
// No framework header is needed to include this file or to build what implements it. Whoever calls has already
// checked shapes and devices; what is binding on the caller is stated field by field.
//
// Shapes: R rows, N columns. Every [R, N] input has stride 1 along N and its own row stride (0 is allowed, negative
// is not); every [R, N] output is contiguous. Base pointers need the alignment of their element only: where pointers
// and strides allow 16-byte accesses the kernels take them, elsewhere they take another instance of the same template.
// "float32" below reads "float64" for statistics and workspaces when x_dtype is float64.
//
// The functions launch on the device that is current in the calling thread, allocate nothing, never synchronise, and
// may be captured into a graph. They return the first error of their own calls (cudaSuccess otherwise);
// cudaErrorInvalidValue means that a rule stated here was broken and nothing was launched.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace triptych {
namespace cuda {

enum class DType : int32_t { float32 = 0, float16 = 1, bfloat16 = 2, float64 = 3 };

// The kernel family that a call runs on; for tests and for `explain`. plan.h says which sizes take which.
enum class Path : int32_t {
  none = 0,     // nothing to launch (an empty input)
  warp = 1,     // a warp, or a power-of-two part of one, holds a row
  block = 2,    // a thread block holds a row
  cluster = 3,  // a thread-block cluster holds a row (compute capability 9.0 and later)
  looped = 4,   // a block walks over a row and reads it again: any length, float64 included
};

// y = round(x * rstd * (weight + offset)),  rstd = 1 / sqrt(mean(x^2) + eps)
// with `residual`: h = round(x + residual) is written, and takes the place of x in the line above.
struct RmsNormForward {
  const void* x = nullptr;         // [R, N] of x_dtype
  const void* residual = nullptr;  // [R, N] of x_dtype; null: the plain norm
  const void* weight = nullptr;    // [N] of weight_dtype, any stride; null: no weight, offset is ignored
  void* y = nullptr;               // [R, N] of x_dtype, contiguous
  void* h = nullptr;               // [R, N] of x_dtype, contiguous; null exactly when residual is null
  void* rstd = nullptr;            // [R] float32, contiguous
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t x_row_stride = 0;
  int64_t residual_row_stride = 0;
  int64_t weight_stride = 1;
  double eps = 0.0;
  double offset = 0.0;
  DType x_dtype = DType::float32;
  DType weight_dtype = DType::float32;  // x_dtype, or float32 or either 16-bit type with a 16-bit x
  bool round_before_weight = false;     // y = round(round(x * rstd) * (weight + offset))
};

// wdy = dy * (weight + offset);  xhat = x * rstd
// dx = round(rstd * (wdy - xhat * mean(wdy * xhat)) + dh);  dw = round(sum over rows of dy * xhat)
// with round_before_weight, dw sums dy * round(xhat).
struct RmsNormBackward {
  const void* dy = nullptr;      // [R, N] of x_dtype
  const void* dh = nullptr;      // [R, N] of x_dtype; null counts as zero
  const void* x = nullptr;       // [R, N] of x_dtype: what the forward normalised (h in the add variant)
  const void* weight = nullptr;  // [N] of weight_dtype, any stride; null: no weight, offset is ignored, dw must be null
  const void* rstd = nullptr;    // [R] float32, contiguous, from the forward
  void* dx = nullptr;            // [R, N] of x_dtype, contiguous; null: not wanted
  void* dw = nullptr;            // [N] of weight_dtype, contiguous; null: not wanted
  void* workspace = nullptr;     // rms_norm_backward_workspace_bytes() bytes, 16-byte aligned; need not be cleared
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t dy_row_stride = 0;
  int64_t dh_row_stride = 0;
  int64_t x_row_stride = 0;
  int64_t weight_stride = 1;
  double offset = 0.0;
  DType x_dtype = DType::float32;
  DType weight_dtype = DType::float32;
  bool round_before_weight = false;
};

// Nothing is launched for N == 0 or R == 0.
cudaError_t rms_norm_forward(const RmsNormForward& call, cudaStream_t stream);

// Bytes that `workspace` must hold for this very call (fill in every other field first; the answer depends on the
// pointers' alignment and on the current device). 0 when dw is null. At most (blocks that fit on the device) * N
// float32: it does not grow with R beyond that.
int64_t rms_norm_backward_workspace_bytes(const RmsNormBackward& call);

// With R == 0, dw is filled with zeros (a memset on the stream). Bit-for-bit deterministic on one kind of device: no
// atomics, fixed orders of summation.
cudaError_t rms_norm_backward(const RmsNormBackward& call, cudaStream_t stream);

// Which family the call would run on, on the current device; launches nothing.
Path rms_norm_forward_path(const RmsNormForward& call);
Path rms_norm_backward_path(const RmsNormBackward& call);

}  // namespace cuda
}  // namespace triptych
