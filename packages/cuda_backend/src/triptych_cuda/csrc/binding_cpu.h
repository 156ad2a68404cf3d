// What the sources of the CPU extension module share.
#pragma once

#include "border.h"
#include "cpu/kernels.h"

namespace triptych {

// The compilation of the kernels that calls take: the best that this processor runs, or the one that was selected.
const cpu::Kernels& kernels();

// How many items a thread should take at least, for at::parallel_for.
inline int64_t grain(int64_t work_per_item) {
  // Elements of work below which a thread is not worth waking.
  constexpr int64_t kGrain = 32768;
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work_per_item));
}

// An output for as much data as the inputs are.
at::Tensor empty_output(at::IntArrayRef sizes, const at::TensorOptions& options);

// Defines the phases of the analog ops; in binding_analog_linear.cpp.
void define_analog(py::module_& module);

}  // namespace triptych
