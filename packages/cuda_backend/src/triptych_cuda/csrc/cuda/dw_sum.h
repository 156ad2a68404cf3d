// Adds the rows of a backward workspace into dw.
#pragma once

#include "kernels.h"

namespace triptych {
namespace cuda {

// partial: [partials, cols] float32 (float64 when dtype is float64), 16-byte aligned; dw: [cols] of dtype.
cudaError_t sum_partials(const void* partial, int64_t partials, int64_t cols, void* dw, DType dtype,
                         cudaStream_t stream);

}  // namespace cuda
}  // namespace triptych
