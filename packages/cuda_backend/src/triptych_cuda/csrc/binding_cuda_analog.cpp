// The analog ops of the CUDA extension module: allocates, launches the kernels of cuda/, and has cuBLAS multiply.
#include "border_analog.h"
#include "cuda/analog_kernels.h"
#include "cuda_products.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

namespace triptych {
namespace {

using at::Tensor;

cudaStream_t stream_of(const Tensor& x) { return c10::cuda::getCurrentCUDAStream(x.device().index()).stream(); }

// What every phase enters before it allocates, copies or launches: the device (on a thread that has made no CUDA call
// this creates the context), and no autocast, which would turn the operands of a product into another dtype.
struct Entered {
  c10::cuda::CUDAGuard device;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::DispatchKey::AutocastCUDA};
  explicit Entered(const Tensor& x) : device(x.device()) {}
};

// Freed as soon as the kernels are queued: the caching allocator hands its memory on to the same stream only.
Tensor workspace_of(int64_t bytes, const Tensor& x) { return at::empty({bytes}, x.options().dtype(at::kByte)); }

// ---- views ---------------------------------------------------------------------------------------------------------

// The tensor as rows of its last dimension, [R, N] with stride 1 along N; a copy where its layout has no such rows.
Tensor matrix_of(const Tensor& tensor) {
  const int64_t rows = row_count(tensor), columns = tensor.size(-1);
  const std::optional<int64_t> stride = row_stride(tensor);
  if (!stride) return tensor.contiguous().view({rows, columns});
  return at::as_strided(tensor, {rows, columns}, {*stride, 1});
}

// The same for an operand of a product: cuBLAS takes the distance between rows as 32 bits, and kernels of it multiply
// that by a row's number.
Tensor operand_of(const Tensor& tensor) {
  Tensor matrix = matrix_of(tensor);
  const bool far = matrix.size(0) > 1 && matrix.stride(0) > INT32_MAX / matrix.size(0);
  return far ? matrix.contiguous() : matrix;
}

cuda::MatrixView view_of(const Tensor& matrix) { return {matrix.const_data_ptr(), matrix.stride(0)}; }

// A number for each tile [T], or for each tile and channel [T, C].
cuda::ParameterView by_tile(const OptionalTensor& tensor) {
  if (!tensor) return {};
  return {tensor->const_data_ptr(), dtype_of<cuda::DType>(*tensor), tensor->stride(0),
          tensor->dim() > 1 ? tensor->stride(1) : 0};
}

cuda::ParameterView by_channel(const OptionalTensor& tensor) {
  if (!tensor) return {};
  return {tensor->const_data_ptr(), dtype_of<cuda::DType>(*tensor), 0, tensor->stride(0)};
}

cuda::TileInput input_of(const Tensor& matrix, const Tiles& tiles) {
  return {view_of(matrix), matrix.size(0), tiles, dtype_of<cuda::DType>(matrix)};
}

const int64_t* seed_of(const OptionalTensor& seed) { return seed ? seed->const_data_ptr<int64_t>() : nullptr; }

// ---- calibration ---------------------------------------------------------------------------------------------------

Tensor tile_abs_max(const Tensor& x, const Tiles& tiles) {
  const Entered here(x);
  const Tensor matrix = matrix_of(x);
  Tensor abs_max = at::empty(sizes_by_tile(x, tiles.count), wide_options(x));
  C10_CUDA_CHECK(cuda::tile_abs_max(input_of(matrix, tiles), abs_max.data_ptr(), stream_of(x)));
  return abs_max;
}

Tensor tile_std(const Tensor& x, const Tiles& tiles) {
  const Entered here(x);
  const Tensor matrix = matrix_of(x);
  Tensor std = at::empty({tiles.count}, wide_options(x));
  const cuda::TileInput input = input_of(matrix, tiles);
  const Tensor workspace = workspace_of(cuda::tile_statistics_workspace_bytes(input), x);
  C10_CUDA_CHECK(cuda::tile_std(input, std.data_ptr(), workspace.data_ptr(), stream_of(x)));
  return std;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> input_range_update(const Tensor& x, const Tensor& input_range,
                                                              const Tensor& count, const OptionalTensor& x_min,
                                                              const OptionalTensor& x_max,
                                                              const UpdateOptions& options) {
  const Entered here(x);
  const int64_t tiles = options.tiles.count, stored = options.mode == Calibration::extremes ? tiles : 0;
  const Tensor matrix = matrix_of(x);
  Tensor range = at::empty({tiles}, input_range.options()), new_count = at::empty({tiles}, count.options());
  Tensor least = at::empty({stored}, wide_options(x)), largest = at::empty({stored}, wide_options(x));
  cuda::RangeUpdate call;
  call.input = input_of(matrix, options.tiles);
  call.options = options;
  call.range = by_tile(input_range);
  call.count = count.const_data_ptr<int64_t>();
  call.count_stride = count.stride(0);
  call.least = by_tile(x_min);
  call.largest = by_tile(x_max);
  call.new_range = range.data_ptr();
  call.new_count = new_count.data_ptr<int64_t>();
  call.new_least = least.data_ptr();
  call.new_largest = largest.data_ptr();
  const Tensor workspace = workspace_of(cuda::tile_statistics_workspace_bytes(call.input), x);
  call.workspace = workspace.data_ptr();
  C10_CUDA_CHECK(cuda::input_range_update(call, stream_of(x)));
  return {range, new_count, least, largest};
}

// ---- weights -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> weight_forward(const Tensor& weight, const OptionalTensor& clip, const OptionalTensor& seed,
                                          const WeightOptions& options) {
  const Entered here(weight);
  const Tensor matrix = matrix_of(weight);
  Tensor modified = at::empty(weight.sizes(), weight.options());
  Tensor wmax = at::empty({options.tiles.count, weight.size(0)}, wide_options(weight));
  cuda::WeightForward call;
  call.weight = view_of(matrix);
  call.channels = weight.size(0);
  call.options = options;
  call.dtype = dtype_of<cuda::DType>(weight);
  call.clip = by_tile(clip);
  call.seed = seed_of(seed);
  call.modified = modified.data_ptr();
  call.wmax = wmax.data_ptr();
  const Tensor workspace = workspace_of(cuda::weight_forward_workspace_bytes(call), weight);
  call.workspace = workspace.data_ptr();
  C10_CUDA_CHECK(cuda::weight_forward(call, stream_of(weight)));
  return {modified, wmax};
}

std::tuple<Tensor, Tensor> weight_backward(const Tensor& dmodified, const Tensor& weight, const OptionalTensor& clip,
                                           const WeightOptions& options, bool need_dweight, bool need_dclip) {
  const Entered here(weight);
  if (!clip) {
    return {need_dweight ? dmodified.clone(at::MemoryFormat::Contiguous) : nothing_like(weight), nothing_like(weight)};
  }
  const Tensor gradients = matrix_of(dmodified), weights = matrix_of(weight);
  Tensor dweight = need_dweight ? at::empty(weight.sizes(), weight.options()) : nothing_like(weight);
  Tensor dclip = need_dclip ? at::empty(clip->sizes(), clip->options()) : nothing_like(*clip);
  cuda::WeightBackward call;
  call.dmodified = view_of(gradients);
  call.weight = view_of(weights);
  call.channels = weight.size(0);
  call.options = options;
  call.dtype = dtype_of<cuda::DType>(weight);
  call.clip = by_tile(clip);
  call.dweight = need_dweight ? dweight.data_ptr() : nullptr;
  call.dclip = need_dclip ? dclip.data_ptr() : nullptr;
  C10_CUDA_CHECK(cuda::weight_backward(call, stream_of(weight)));
  return {dweight, dclip};
}

// ---- the linear layer ----------------------------------------------------------------------------------------------

// The largest integer up to which a dtype holds all of them.
double exact_integers(const Tensor& x) { return x.scalar_type() == at::kBFloat16 ? 256 : 2048; }

// What the product takes: the inputs as they are, or as they come out of the DAC.
struct Converted {
  Tensor inputs;   // [R, N] of x's dtype
  Tensor row_max;  // [T, R] wide; undefined outside the mode `dynamic`, and where nobody needs it
  bool levels = false;
};

Converted convert_inputs(const Tensor& x, const OptionalTensor& input_range, const LinearOptions& options,
                         bool wants_levels, bool wants_row_max) {
  Converted result;
  const bool dynamic = options.mode == RangeMode::dynamic, discrete = options.inp_res > 0;
  const bool converts = discrete || options.has_range();
  result.inputs = converts ? at::empty(x.sizes(), x.options()) : x;
  if (!converts && !(dynamic && wants_row_max)) return result;
  if (dynamic) result.row_max = at::empty({options.tiles.count, x.size(0)}, wide_options(x));
  // Within a bound of 2 / L of a step: rounding may go one level past L / 2.
  const double levels = options.inp_res > 1 ? options.inp_res : 1 / options.inp_res;
  result.levels = wants_levels && discrete && is_half(x) && levels / 2 + 1 <= exact_integers(x);
  cuda::InputPass call;
  call.input = input_of(x, options.tiles);
  call.options = options;
  call.range = by_tile(input_range);
  call.row_max = dynamic ? result.row_max.data_ptr() : nullptr;
  call.converted = converts ? result.inputs.data_ptr() : nullptr;
  call.levels = result.levels;
  C10_CUDA_CHECK(cuda::input_pass(call, stream_of(x)));
  return result;
}

// y = inputs W^T + bias without noise and ADC: tiles then make no difference.
void whole_product(const Tensor& inputs, const Tensor& weight, const OptionalTensor& bias, const Tensor& y) {
  const int64_t rows = inputs.size(0), channels = weight.size(0);
  const bool direct = rounds_once(inputs, rows * channels);
  Tensor out = y.view({rows, channels});
  if (!bias && direct) return multiply(inputs.unsqueeze(0), weight.t().unsqueeze(0), out.unsqueeze(0));
  if (direct && is_half(inputs) && bias->scalar_type() == inputs.scalar_type() && inputs.size(1) > 0 &&
      !widened_for_product(inputs)) {
    // The bias is added before the one rounding.
    at::addmm_out(out, *bias, inputs, weight.t());
    return;
  }
  const Tensor product = at::empty({1, rows, channels}, wide_options(inputs));
  multiply(inputs.unsqueeze(0), weight.t().unsqueeze(0), product);
  cuda::OutputPass call;
  call.products = product.const_data_ptr();
  call.tile_count = 1;
  call.rows = call.all_rows = rows;
  call.channels = channels;
  call.dtype = dtype_of<cuda::DType>(inputs);
  call.bias = by_channel(bias);
  call.y = y.data_ptr();
  C10_CUDA_CHECK(cuda::output_pass(call, stream_of(inputs)));
}

// Products of tiles on their way from cuBLAS to the ADC: what stays in the L2 of a large device.
constexpr int64_t kProductBytes = int64_t{32} << 20;
// Fewer rows than these leave the multiprocessors idle.
constexpr int64_t kProductRows = 256;

// How many rows and tiles are multiplied at a time.
struct Portion {
  int64_t rows, tiles;

  Portion(int64_t all_rows, int64_t all_tiles, int64_t row_bytes) {
    rows = std::min(all_rows, kProductRows);
    tiles = std::clamp<int64_t>(kProductBytes / (rows * row_bytes), 1, all_tiles);
    if (tiles == all_tiles) rows = std::min(all_rows, std::max(rows, kProductBytes / (all_tiles * row_bytes)));
  }
};

// With noise and ADC: cuBLAS makes the products of each tile, a pass over them the rest, a portion at a time.
void tiled_product(const Converted& from, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& input_range, const Tensor& wmax, const OptionalTensor& seed,
                   const LinearOptions& options, const Tensor& y, const Tensor& clipped) {
  const Tensor& inputs = from.inputs;
  const Tiles& tiles = options.tiles;
  const int64_t rows = inputs.size(0), channels = weight.size(0);
  const auto wide = wide_options(inputs);
  const bool noise_by_tile = options.has_noise() && !options.out_noise_per_channel;
  const bool adc_by_tile = options.has_adc() && !options.out_bound_per_channel;
  const Tensor maxima = wmax.contiguous();
  Tensor of_tile;
  if (noise_by_tile || adc_by_tile) {
    of_tile = at::empty({tiles.count}, wide);
    C10_CUDA_CHECK(cuda::largest_of_rows(maxima.const_data_ptr(), tiles.count, channels,
                                         dtype_of<cuda::DType>(maxima), of_tile.data_ptr(), stream_of(inputs)));
  }
  cuda::OutputPass call;
  call.all_rows = rows;
  call.channels = channels;
  call.options = options;
  call.dtype = dtype_of<cuda::DType>(inputs);
  call.levels = from.levels;
  call.range = by_tile(input_range);
  call.row_max = from.row_max.defined() ? from.row_max.const_data_ptr() : nullptr;
  call.wmax = maxima.const_data_ptr();
  call.wmax_of_tile = of_tile.defined() ? of_tile.const_data_ptr() : nullptr;
  call.bias = by_channel(bias);
  call.seed = seed_of(seed);
  call.y = y.data_ptr();
  call.clipped = options.has_adc() ? clipped.data_ptr<uint8_t>() : nullptr;
  const Portion portion(rows, tiles.count, channels * static_cast<int64_t>(maxima.element_size()));
  const Tensor buffer = at::empty({portion.tiles * portion.rows * channels}, wide);
  const Tensor total = portion.tiles < tiles.count ? at::empty({portion.rows, channels}, wide) : Tensor();
  call.products = buffer.const_data_ptr();
  call.total = total.defined() ? total.data_ptr() : nullptr;
  for (int64_t row = 0; row < rows; row += portion.rows) {
    call.first_row = row;
    call.rows = std::min(portion.rows, rows - row);
    const Tensor part = inputs.narrow(0, row, call.rows);
    for (int64_t tile = 0; tile < tiles.count; tile += portion.tiles) {
      call.first_tile = tile;
      call.tile_count = std::min(portion.tiles, tiles.count - tile);
      const Tensor products =
          buffer.narrow(0, 0, call.tile_count * call.rows * channels).view({call.tile_count, call.rows, channels});
      for_runs(tiles, tile, call.tile_count, [&](const TileRun& run) {
        multiply(run.of(part), run.of(weight).transpose(1, 2), products.narrow(0, run.first - tile, run.count));
      });
      C10_CUDA_CHECK(cuda::output_pass(call, stream_of(inputs)));
    }
  }
}

std::tuple<Tensor, Tensor> linear_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                          const OptionalTensor& input_range, const OptionalTensor& wmax,
                                          const OptionalTensor& seed, const LinearOptions& options) {
  const Entered here(x);
  Tensor y = at::empty(output_sizes(x, weight), x.options());
  Tensor clipped = at::empty(clipped_sizes(x, weight, options), x.options().dtype(at::kByte));
  if (y.numel() == 0) return {y, clipped};
  const bool by_tiles = options.has_noise() || options.has_adc();
  const Converted from = convert_inputs(operand_of(x), input_range, options, by_tiles, by_tiles);
  const Tensor weights = operand_of(weight);
  if (by_tiles) {
    tiled_product(from, weights, bias, input_range, *wmax, seed, options, y, clipped);
  } else {
    whole_product(from.inputs, weights, bias, y);
  }
  return {y, clipped};
}

// ---- the linear layer, backward ------------------------------------------------------------------------------------

// Gradients behind the ADC, one copy of dy a tile.
constexpr int64_t kMaskedBytes = int64_t{256} << 20;

// dx = g W and dweight = g^T x_q, tile by tile where an ADC has clipped. An undefined result is not wanted.
void gradient_products(const Tensor& dy, const Tensor& weight, const Tensor& inputs, const Tensor& clipped,
                       const LinearOptions& options, const Tensor& dx, const Tensor& dweight) {
  const auto both = [&](const Tensor& g, const TileRun& run) {  // g: [run.count, R, C]
    if (dx.defined()) multiply(g, run.of(weight), run.of(dx));
    if (dweight.defined()) multiply(g.transpose(1, 2), run.of(inputs), run.of(dweight));
  };
  const Tiles& tiles = options.tiles;
  if (!options.has_adc() || dy.numel() == 0) return both(dy.unsqueeze(0), TileRun{0, 1, 0, tiles.columns});
  const int64_t rows = dy.size(0), channels = dy.size(1);
  const Tensor bits = clipped.contiguous();
  const int64_t bytes = rows * channels * static_cast<int64_t>(dy.element_size());
  const int64_t at_once = std::clamp<int64_t>(kMaskedBytes / bytes, 1, tiles.count);
  const Tensor masked = at::empty({at_once, rows, channels}, dy.options());
  cuda::MaskPass call;
  call.dy = view_of(dy);
  call.rows = rows;
  call.channels = channels;
  call.dtype = dtype_of<cuda::DType>(dy);
  call.clipped = bits.const_data_ptr<uint8_t>();
  call.masked = masked.data_ptr();
  for (int64_t tile = 0; tile < tiles.count; tile += at_once) {
    call.first_tile = tile;
    call.tile_count = std::min(at_once, tiles.count - tile);
    C10_CUDA_CHECK(cuda::mask_pass(call, stream_of(dy)));
    for_runs(tiles, tile, call.tile_count,
             [&](const TileRun& run) { both(masked.narrow(0, run.first - tile, run.count), run); });
  }
}

// Where a product goes on its way to `result`: into it, or into a wide matrix that is rounded once afterwards.
Tensor product_for(const Tensor& result, const Tensor& operand, int64_t rows, int64_t columns) {
  return rounds_once(operand, rows * columns) ? result.view({rows, columns})
                                              : at::empty({rows, columns}, wide_options(operand));
}

Tensor bias_gradient(const Tensor& dy, const Tensor& bias) {
  Tensor dbias = at::empty(bias.sizes(), bias.options());
  cuda::ColumnSum call;
  call.values = view_of(dy);
  call.rows = dy.size(0);
  call.channels = dy.size(1);
  call.dtype = dtype_of<cuda::DType>(dy);
  call.sums_dtype = dtype_of<cuda::DType>(bias);
  call.sums = dbias.data_ptr();
  const Tensor workspace = workspace_of(cuda::column_sum_workspace_bytes(call), dy);
  call.workspace = workspace.data_ptr();
  C10_CUDA_CHECK(cuda::column_sum(call, stream_of(dy)));
  return dbias;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                           const OptionalTensor& bias,
                                                           const OptionalTensor& input_range, const Tensor& clipped,
                                                           const LinearOptions& options, const LinearNeeds& needs) {
  const Entered here(x);
  const Tensor gradients = operand_of(dy), inputs = operand_of(x), weights = operand_of(weight);
  const int64_t rows = inputs.size(0), columns = inputs.size(1);
  Tensor dx = needs.dx ? at::empty(x.sizes(), x.options()) : nothing_like(x);
  Tensor dweight = needs.dweight ? at::empty(weight.sizes(), weight.options()) : nothing_like(weight);
  Tensor dbias = needs.dbias ? bias_gradient(gradients, *bias) : nothing_like(bias ? *bias : x);
  Tensor drange = needs.drange ? at::empty(input_range->sizes(), input_range->options())
                               : nothing_like(input_range ? *input_range : x);
  if (rows == 0) {
    if (needs.dweight) dweight.zero_();
    if (needs.drange) drange.zero_();
    return {dx, dweight, dbias, drange};
  }
  // With respect to the clamped inputs; becomes dx in place where it has its dtype.
  Tensor clamped, wide_dweight, converted;
  if (needs.dx) clamped = product_for(dx, gradients, rows, columns);
  if (!needs.dx && needs.drange) clamped = at::empty({rows, columns}, wide_options(x));
  if (needs.dweight) {
    wide_dweight = product_for(dweight, gradients, weight.size(0), columns);
    converted = convert_inputs(inputs, input_range, options, false, false).inputs;
  }
  if (clamped.defined() || wide_dweight.defined()) {
    gradient_products(gradients, weights, converted, clipped, options, clamped, wide_dweight);
  }
  if (needs.dweight && wide_dweight.scalar_type() != dweight.scalar_type()) dweight.copy_(wide_dweight);
  if (options.has_range() && clamped.defined()) {
    cuda::InputGradient call;
    call.input = input_of(inputs, options.tiles);
    call.options = options;
    call.range = by_tile(input_range);
    call.gradient = clamped.const_data_ptr();
    call.gradient_is_wide = clamped.scalar_type() == wide_type(x);
    call.dx = needs.dx ? dx.data_ptr() : nullptr;
    call.drange = needs.drange ? drange.data_ptr() : nullptr;
    const Tensor workspace = workspace_of(cuda::input_gradient_workspace_bytes(call), x);
    call.workspace = workspace.data_ptr();
    C10_CUDA_CHECK(cuda::input_gradient(call, stream_of(x)));
  } else if (needs.dx && clamped.scalar_type() != dx.scalar_type()) {
    dx.view({rows, columns}).copy_(clamped);  // x may have any number of leading dimensions
  }
  return {dx, dweight, dbias, drange};
}

}  // namespace

void define_analog(py::module_& module) {
  define_analog_phases<at::kCUDA, &tile_abs_max, &tile_std, &input_range_update, &weight_forward, &weight_backward,
                       &linear_forward, &linear_backward>(module);
}

}  // namespace triptych
