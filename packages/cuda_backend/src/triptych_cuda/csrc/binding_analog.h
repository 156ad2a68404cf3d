// What binding_analog_linear.cpp takes from binding_analog_tiles.cpp: the ops over tiles and weights as the module
// defines them, and two steps of theirs that the linear layer takes too.
#pragma once

#include "binding_cpu.h"
#include "border_analog.h"

namespace triptych {

// Phases, for tensors that define_analog_phases has checked.
at::Tensor tile_abs_max(const at::Tensor& x, Tiles tiles);
at::Tensor tile_std(const at::Tensor& x, Tiles tiles);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> input_range_update(
    const at::Tensor& x, const at::Tensor& input_range, const at::Tensor& count, const OptionalTensor& x_min,
    const OptionalTensor& x_max, const UpdateOptions& options);
std::tuple<at::Tensor, at::Tensor> weight_forward(const at::Tensor& weight, const OptionalTensor& clip,
                                                  const OptionalTensor& seed, const WeightOptions& options);
std::tuple<at::Tensor, at::Tensor> weight_backward(const at::Tensor& dmodified, const at::Tensor& weight,
                                                   const OptionalTensor& clip, const WeightOptions& options,
                                                   bool need_dweight, bool need_dclip);

// The largest number of each row of a contiguous wide matrix of numbers >= 0; NaN if there is one, 0 of nothing.
at::Tensor largest_of_rows(const at::Tensor& matrix);

// The number that a seed holds; 0 of none.
uint64_t value_of(const OptionalTensor& seed);

}  // namespace triptych
