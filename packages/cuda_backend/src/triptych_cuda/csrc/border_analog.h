// The border between PyTorch and the kernels of the analog ops: the seven entry points of a module, their checks, and
// their strings as enumerations. What a tensor must be otherwise is in border.h.
#pragma once

#include "analog.h"
#include "border.h"

#include <algorithm>
#include <string>

namespace triptych {

inline Per per_of(const char* name, const std::string& text) {
  if (text == "none") return Per::none;
  if (text == "per_tensor") return Per::tensor;
  if (text == "per_channel") return Per::channel;
  TORCH_CHECK_VALUE(false, name, " is \"", text, "\"; it must be none, per_tensor or per_channel.");
}

inline RangeMode range_mode_of(const std::string& text) {
  if (text == "none") return RangeMode::none;
  if (text == "learned") return RangeMode::learned;
  if (text == "fast") return RangeMode::fast;
  if (text == "dynamic") return RangeMode::dynamic;
  TORCH_CHECK_VALUE(false, "input_range_mode is \"", text, "\"; it must be none, learned, fast or dynamic.");
}

inline Calibration calibration_of(const std::string& text) {
  if (text == "std") return Calibration::std;
  if (text == "extremes") return Calibration::extremes;
  TORCH_CHECK_VALUE(false, "mode is \"", text, "\"; it must be std or extremes.");
}

inline Tiles tiles_of(const at::Tensor& x, int64_t tiles) {
  const int64_t columns = x.size(-1);
  TORCH_CHECK_VALUE(1 <= tiles && tiles <= std::max<int64_t>(columns, 1), "there are ", tiles, " tiles for ", columns,
                    " columns; from 1 to as many as there are columns are possible.");
  return Tiles{columns, tiles};
}

inline void check_shape(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes, const at::Tensor& x) {
  TORCH_CHECK_VALUE(tensor.sizes() == sizes && tensor.device() == x.device() && tensor.layout() == at::kStrided, name,
                    " is ", tensor.sizes(), " on ", tensor.device(), "; it must be a plain tensor ", sizes, " on ",
                    x.device(), ".");
}

inline void check_type(const char* name, const at::Tensor& tensor, at::ScalarType type) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == type, name, " is ", tensor.scalar_type(), "; it must be ", type, ".");
}

// A parameter beside the data: of the data's dtype, or of the wide one.
inline void check_parameter(const char* name, const OptionalTensor& tensor, at::IntArrayRef sizes,
                            const at::Tensor& x) {
  if (!tensor) return;
  check_shape(name, *tensor, sizes, x);
  const auto type = tensor->scalar_type();
  TORCH_CHECK_TYPE(type == x.scalar_type() || type == wide_type(x), name, " is ", type, " and the data is ",
                   x.scalar_type(), "; it must be that or ", wide_type(x), ".");
}

inline void check_wide(const char* name, const OptionalTensor& tensor, at::IntArrayRef sizes, const at::Tensor& x) {
  if (!tensor) return;
  check_shape(name, *tensor, sizes, x);
  check_type(name, *tensor, wide_type(x));
}

inline void check_seed(const OptionalTensor& seed, bool needed, const at::Tensor& x) {
  TORCH_CHECK_VALUE(seed || !needed, "there is noise and no seed.");
  if (!seed) return;
  check_shape("seed", *seed, {1}, x);
  check_type("seed", *seed, at::kLong);
}

inline void check_matrix(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.dim() == 2, name, " is ", tensor.sizes(), "; it must be a matrix [outputs, inputs].");
}

// [T, leading dimensions of x]: one number for each tile of each row.
inline at::DimVector sizes_by_tile(const at::Tensor& x, int64_t tiles) {
  at::DimVector sizes{tiles};
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) sizes.push_back(x.size(dim));
  return sizes;
}

// The shape of y = x W^T.
inline at::DimVector output_sizes(const at::Tensor& x, const at::Tensor& weight) {
  at::DimVector sizes(x.sizes());
  sizes.back() = weight.size(0);
  return sizes;
}

// The shape of the ADC's record: one bit an output, each row padded to whole bytes; [0] without an ADC.
inline at::DimVector clipped_sizes(const at::Tensor& x, const at::Tensor& weight, const LinearOptions& options) {
  if (!options.has_adc()) return {0};
  return {options.tiles.count, row_count(x), (weight.size(0) + 7) / 8};
}

inline void check_weight_op(const at::Tensor& weight, const OptionalTensor& clip, const WeightOptions& options,
                            c10::DeviceType device) {
  check_data(weight, device);
  check_matrix("weight", weight);
  check_parameter("clip", clip, {options.tiles.count, weight.size(0)}, weight);
  TORCH_CHECK_VALUE(!(clip && options.quantization == Per::tensor),
                    "a learned clip goes with quantization none or per_channel.");
}

inline void check_linear_op(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& input_range, const LinearOptions& options, c10::DeviceType device) {
  check_data(x, device);
  check_matrix("weight", weight);
  check_shape("weight", weight, {weight.size(0), x.size(-1)}, x);
  check_type("weight", weight, x.scalar_type());
  check_parameter("bias", bias, {weight.size(0)}, x);
  check_parameter("input_range", input_range, {options.tiles.count}, x);
  TORCH_CHECK_VALUE(input_range.has_value() == options.has_range(),
                    "input_range goes with the modes learned and fast, and with no other.");
  TORCH_CHECK_VALUE(options.mode != RangeMode::none ||
                        !(options.inp_res > 0 || options.has_adc() || options.has_noise()),
                    "converters and output noise are relative to the input range, and input_range_mode is none.");
}

// Defines the seven phases in a module, over functions of its own that get plain, checked tensors:
//   Tensor tile_abs_max(x, Tiles), Tensor tile_std(x, Tiles)
//   tuple<Tensor x 4> input_range_update(x, input_range, count, x_min?, x_max?, UpdateOptions)
//   tuple<Tensor x 2> weight_forward(weight, clip?, seed?, WeightOptions)
//   tuple<Tensor x 2> weight_backward(dmodified, weight, clip?, WeightOptions, need_dweight, need_dclip)
//   tuple<Tensor x 2> linear_forward(x, weight, bias?, input_range?, wmax?, seed?, LinearOptions)
//   tuple<Tensor x 4> linear_backward(dy, x, weight, bias?, input_range?, clipped, LinearOptions, LinearNeeds)
// need_dclip, needs.dbias and needs.drange are true only where there is such a tensor to have a gradient. Every phase
// runs without the interpreter's lock and below autograd.
template <c10::DeviceType device, auto tile_abs_max, auto tile_std, auto input_range_update, auto weight_forward,
          auto weight_backward, auto linear_forward, auto linear_backward>
void define_analog_phases(py::module_& module) {
  using at::Tensor;
  using std::string;
  using Unlocked = py::call_guard<py::gil_scoped_release, at::AutoDispatchBelowADInplaceOrView>;
  module.def(
      "tile_abs_max_forward",
      [](const Tensor& x, int64_t tiles) {
        check_data(x, device);
        return std::tuple<Tensor>(tile_abs_max(plain(x), tiles_of(x, tiles)));
      },
      Unlocked());
  module.def(
      "tile_std_forward",
      [](const Tensor& x, int64_t tiles) {
        check_data(x, device);
        return std::tuple<Tensor>(tile_std(plain(x), tiles_of(x, tiles)));
      },
      Unlocked());
  module.def(
      "input_range_update_forward",
      [](const Tensor& x, const Tensor& input_range, const Tensor& count, const OptionalTensor& x_min,
         const OptionalTensor& x_max, int64_t tiles, const string& mode, int64_t init_from_data, double init_std_alpha,
         double momentum) {
        check_data(x, device);
        const UpdateOptions options{tiles_of(x, tiles), calibration_of(mode), init_from_data, init_std_alpha, momentum};
        check_parameter("input_range", input_range, {tiles}, x);
        check_shape("count", count, {tiles}, x);
        check_type("count", count, at::kLong);
        check_wide("x_min", x_min, {tiles}, x);
        check_wide("x_max", x_max, {tiles}, x);
        const bool extremes = options.mode == Calibration::extremes;
        TORCH_CHECK_VALUE(x_min.has_value() == extremes && x_max.has_value() == extremes,
                          "x_min and x_max go with the mode extremes, and with no other.");
        return input_range_update(plain(x), plain(input_range), plain(count), plain(x_min), plain(x_max), options);
      },
      Unlocked());
  module.def(
      "analog_weight_forward",
      [](const Tensor& weight, const OptionalTensor& clip, const OptionalTensor& seed, int64_t tiles,
         const string& quantization, double res, const string& noise, double std_dev) {
        check_data(weight, device);
        const WeightOptions options{tiles_of(weight, tiles), per_of("quantization", quantization), res,
                                    per_of("noise", noise), std_dev};
        check_weight_op(weight, clip, options, device);
        check_seed(seed, options.noise != Per::none, weight);
        return weight_forward(plain(weight), plain(clip), plain(seed), options);
      },
      Unlocked());
  module.def(
      "analog_weight_backward",
      [](const Tensor& dmodified, const Tensor& weight, const OptionalTensor& clip, int64_t tiles,
         const string& quantization, double res, const string& noise, double std_dev, bool need_dweight,
         bool need_dclip) {
        check_data(weight, device);
        const WeightOptions options{tiles_of(weight, tiles), per_of("quantization", quantization), res,
                                    per_of("noise", noise), std_dev};
        check_weight_op(weight, clip, options, device);
        check_like("dmodified", dmodified, weight);
        return weight_backward(plain(dmodified), plain(weight), plain(clip), options, need_dweight,
                               need_dclip && clip.has_value());
      },
      Unlocked());
  module.def(
      "analog_linear_forward",
      [](const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& input_range,
         const OptionalTensor& wmax, const OptionalTensor& seed, int64_t tiles, const string& input_range_mode,
         double inp_res, double out_noise, bool out_noise_per_channel, double out_bound, double out_res,
         bool out_bound_per_channel, double decay, double input_min_percentage) {
        check_data(x, device);
        const LinearOptions options{tiles_of(x, tiles), range_mode_of(input_range_mode), inp_res, out_noise,
                                    out_noise_per_channel, out_bound, out_res, out_bound_per_channel, decay,
                                    input_min_percentage};
        check_linear_op(x, weight, bias, input_range, options, device);
        check_wide("wmax", wmax, {tiles, weight.size(0)}, x);
        TORCH_CHECK_VALUE(wmax || !(options.has_noise() || options.has_adc()),
                          "output noise and an ADC are relative to the largest weights, and there is no wmax.");
        check_seed(seed, options.has_noise(), x);
        return linear_forward(plain(x), plain(weight), plain(bias), plain(input_range), plain(wmax), plain(seed),
                              options);
      },
      Unlocked());
  module.def(
      "analog_linear_backward",
      [](const Tensor& dy, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
         const OptionalTensor& input_range, const Tensor& clipped, int64_t tiles, const string& input_range_mode,
         double inp_res, double out_noise, bool out_noise_per_channel, double out_bound, double out_res,
         bool out_bound_per_channel, double decay, double input_min_percentage, bool need_dx, bool need_dweight,
         bool need_dbias, bool need_drange) {
        check_data(x, device);
        const LinearOptions options{tiles_of(x, tiles), range_mode_of(input_range_mode), inp_res, out_noise,
                                    out_noise_per_channel, out_bound, out_res, out_bound_per_channel, decay,
                                    input_min_percentage};
        check_linear_op(x, weight, bias, input_range, options, device);
        check_shape("dy", dy, output_sizes(x, weight), x);
        check_type("dy", dy, x.scalar_type());
        check_shape("clipped", clipped, clipped_sizes(x, weight, options), x);
        check_type("clipped", clipped, at::kByte);
        const LinearNeeds needs{need_dx, need_dweight, need_dbias && bias.has_value(),
                                need_drange && input_range.has_value()};
        return linear_backward(plain(dy), plain(x), plain(weight), plain(bias), plain(input_range), plain(clipped),
                               options, needs);
      },
      Unlocked());
}

}  // namespace triptych
