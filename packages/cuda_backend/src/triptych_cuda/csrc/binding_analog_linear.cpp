// analog_linear of the CPU extension module, and the module's analog part as a whole: allocates, cuts the work into fixed
// pieces, spreads them over PyTorch's intra-op threads, and puts what the pieces give together in their order.
#include "binding_analog.h"
#include "cpu/analog_kernels.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <memory>
#include <vector>

namespace triptych {
namespace {

using at::Tensor;

// Tensors that a call's arguments point into.
struct Linear {
  cpu::LinearArgs call{};
  Rows x, weight, dy;
  Tensor bias, range, wmax, wmax_largest, clipped;

  Linear(const Tensor& data, const Tensor& matrix, const OptionalTensor& input_range, const LinearOptions& options)
      : x(rows_of(data)), weight(rows_of(matrix)) {
    call.dtype = dtype_of<cpu::Dtype>(data);
    call.rows = row_count(data);
    call.outputs = matrix.size(0);
    call.options = options;
    call.x = x.data;
    call.x_stride = x.stride;
    call.weight = weight.data;
    call.weight_stride = weight.stride;
    if (options.mode == RangeMode::none) return;
    // Only a converter asks for the maxima of the rows.
    const bool asked = options.inp_res > 0 || options.has_adc() || options.has_noise();
    if (options.mode == RangeMode::dynamic) {
      if (!asked) return;
      range = tile_abs_max(data, options.tiles);
      call.range_tile_stride = call.rows;
      call.range_row_stride = 1;
    } else {
      range = input_range->to(wide_type(data)).contiguous();
      call.range_tile_stride = 1;
    }
    call.range = range.const_data_ptr();
  }
};

// How an output is cut into areas: rows in units, columns in chunks.
struct Cut {
  Tiles rows;  // of units
  int64_t last_row;
  std::vector<std::pair<int64_t, int64_t>> columns;

  int64_t count() const { return rows.count * static_cast<int64_t>(columns.size()); }
  int64_t chunk(int64_t area) const { return area % static_cast<int64_t>(columns.size()); }
  cpu::Area area(int64_t index) const {
    const auto [column_begin, column_end] = columns[chunk(index)];
    const int64_t row = index / static_cast<int64_t>(columns.size());
    const int64_t begin = rows.start(row) * cpu::kRowUnit, end = begin + rows.size(row) * cpu::kRowUnit;
    return {begin, std::min(end, last_row), column_begin, column_end};
  }
};

int64_t pieces(int64_t size, int64_t most) { return (size + most - 1) / most; }

// Cuts rows so that every thread gets an area, if they can be cut so far; at most `most` units in one.
Tiles cut_rows(int64_t rows, int64_t chunks) {
  const int64_t units = pieces(rows, cpu::kRowUnit);
  const int64_t least = pieces(units, cpu::kMostRows / cpu::kRowUnit);
  const int64_t wanted = pieces(2 * at::get_num_threads(), std::max<int64_t>(chunks, 1));
  return {units, std::max<int64_t>(1, std::min(units, std::max(least, wanted)))};
}

// Columns begin..end in chunks of whole units. The cut may depend on the number of threads: no sum crosses it.
void cut_columns(int64_t begin, int64_t end, int64_t rows, std::vector<std::pair<int64_t, int64_t>>& chunks) {
  const int64_t units = pieces(end - begin, cpu::kColumnUnit);
  const int64_t least = pieces(units, cpu::kMostColumns / cpu::kColumnUnit);
  const int64_t wanted = pieces(2 * at::get_num_threads(), std::max<int64_t>(1, pieces(rows, cpu::kRowUnit)));
  const Tiles parts{units, std::max<int64_t>(1, std::min(units, std::max(least, wanted)))};
  for (int64_t part = 0; part < parts.count; ++part) {
    const int64_t from = begin + parts.start(part) * cpu::kColumnUnit;
    chunks.emplace_back(from, std::min(from + parts.size(part) * cpu::kColumnUnit, end));
  }
}

Cut cut(int64_t rows, int64_t columns) {
  Cut made;
  cut_columns(0, columns, rows, made.columns);
  made.rows = cut_rows(rows, made.columns.size());
  made.last_row = rows;
  return made;
}

Cut cut_tiles(int64_t rows, Tiles tiles) {
  Cut made;
  for (int64_t tile = 0; tile < tiles.count; ++tile)
    cut_columns(tiles.start(tile), tiles.start(tile) + tiles.size(tile), rows, made.columns);
  made.rows = cut_rows(rows, made.columns.size());
  made.last_row = rows;
  return made;
}

// Here a chunk's sums count, so that the cut follows from the tiles alone.
Cut cut_tiles_evenly(int64_t rows, Tiles tiles) {
  Cut made;
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    const Tiles parts{tiles.size(tile), pieces(tiles.size(tile), cpu::kMostColumns)};
    for (int64_t part = 0; part < parts.count; ++part) {
      const int64_t begin = tiles.start(tile) + parts.start(part);
      made.columns.emplace_back(begin, begin + parts.size(part));
    }
  }
  made.rows = cut_rows(rows, made.columns.size());
  made.last_row = rows;
  return made;
}

// Runs step(area number, scratch) for every area; each thread has one scratch. `depth` is the length of the sums.
template <class Step>
void for_areas(const Cut& cut, int64_t depth, int64_t scratch_bytes, const Step& step) {
  if (cut.count() == 0) return;
  // 32 multiply-adds are as much work as one element elsewhere.
  const cpu::Area first = cut.area(0);
  const int64_t work = (first.row_end - first.row_begin) * (first.column_end - first.column_begin) * (depth / 32 + 1);
  at::parallel_for(0, cut.count(), grain(work), [&](int64_t begin, int64_t end) {
    constexpr size_t line = 64;
    const std::unique_ptr<char[]> memory(new char[scratch_bytes + line]);
    const auto address = reinterpret_cast<uintptr_t>(memory.get());
    void* scratch = reinterpret_cast<void*>((address + line - 1) / line * line);
    for (int64_t index = begin; index < end; ++index) step(index, scratch);
  });
}

std::tuple<Tensor, Tensor> linear_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                          const OptionalTensor& input_range, const OptionalTensor& wmax,
                                          const OptionalTensor& seed, const LinearOptions& options) {
  Tensor y = empty_output(output_sizes(x, weight), x.options());
  Tensor clipped = at::empty(clipped_sizes(x, weight, options), x.options().dtype(at::kByte));
  if (y.numel() == 0) return {y, clipped};
  Linear launch(x, weight, input_range, options);
  cpu::LinearArgs& args = launch.call;
  if (bias) {
    launch.bias = bias->to(wide_type(x)).contiguous();
    args.bias = launch.bias.const_data_ptr();
  }
  if (wmax && (options.has_adc() || options.has_noise())) {
    launch.wmax = wmax->contiguous();
    launch.wmax_largest = largest_of_rows(launch.wmax);
    args.wmax = launch.wmax.const_data_ptr();
    args.wmax_largest = launch.wmax_largest.const_data_ptr();
  }
  args.seed = value_of(seed);
  args.y = y.data_ptr();
  args.clipped = clipped.mutable_data_ptr<uint8_t>();
  const cpu::Kernels& run = kernels();
  const Cut areas = cut(args.rows, args.outputs);
  for_areas(areas, options.tiles.columns, run.linear.scratch_bytes(args.dtype),
            [&](int64_t index, void* scratch) { run.linear.forward(args, areas.area(index), scratch); });
  return {y, clipped};
}

// The gradient of each tile's range from the sums of its chunks, in their order.
Tensor range_gradient(const Tensor& input_range, const Linear& launch, const Cut& areas,
                      const std::vector<double>& sums, const std::vector<int64_t>& insides) {
  const LinearOptions& options = launch.call.options;
  const Tiles tiles = options.tiles;
  std::vector<double> total(tiles.count);
  std::vector<int64_t> inside(tiles.count);
  const int64_t chunks = areas.columns.size();
  for (size_t place = 0; place < sums.size(); ++place) {
    const int64_t tile = tiles.of(areas.columns[place % chunks].first);
    total[tile] += sums[place];
    inside[tile] += insides[place];
  }
  const Tensor range = launch.range.to(at::kDouble);
  Tensor out = at::empty({tiles.count}, range.options());
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    double gradient = total[tile];
    if (options.mode == RangeMode::learned) {
      const double elements = static_cast<double>(launch.call.rows) * static_cast<double>(tiles.size(tile));
      if (options.decay > 0 && elements > 0 &&
          static_cast<double>(inside[tile]) > options.input_min_percentage * elements)
        gradient += options.decay;
      gradient *= range.const_data_ptr<double>()[tile];
    }
    out.mutable_data_ptr<double>()[tile] = gradient;
  }
  return out.to(input_range.scalar_type());
}

Tensor bias_gradient(const Tensor& bias, Linear& launch, const Tensor& x) {
  cpu::LinearArgs& args = launch.call;
  Tensor out = at::empty(bias.sizes(), bias.options());
  if (args.rows == 0 || args.outputs == 0) return out.zero_();
  args.dbias_rows = cpu::chunk_rows(args.rows, args.outputs);
  const int64_t chunks = pieces(args.rows, args.dbias_rows);
  const std::unique_ptr<char[]> sums(new char[chunks * args.outputs * c10::elementSize(wide_type(x))]);
  args.dbias_sums = sums.get();
  const cpu::Kernels& run = kernels();
  at::parallel_for(0, chunks, grain(args.dbias_rows * args.outputs),
                   [&](int64_t begin, int64_t end) { run.linear.bias_sums(args, begin, end); });
  const cpu::WeightGradArgs sum{args.dtype,   dtype_of<cpu::Dtype>(bias), chunks, args.outputs,
                                sums.get(), out.data_ptr()};
  at::parallel_for(0, args.outputs, grain(chunks),
                   [&](int64_t begin, int64_t end) { run.norm.weight_grad(sum, begin, end); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                           const OptionalTensor& bias,
                                                           const OptionalTensor& input_range, const Tensor& clipped,
                                                           const LinearOptions& options, const LinearNeeds& needs) {
  Tensor dx = needs.dx ? empty_output(x.sizes(), x.options()) : nothing_like(x);
  Tensor dweight = needs.dweight ? empty_output(weight.sizes(), weight.options()) : nothing_like(weight);
  Tensor dbias = nothing_like(bias ? *bias : x), drange = nothing_like(input_range ? *input_range : x);
  Linear launch(x, weight, input_range, options);
  cpu::LinearArgs& args = launch.call;
  launch.dy = rows_of(dy);
  args.dy = launch.dy.data;
  args.dy_stride = launch.dy.stride;
  launch.clipped = clipped.contiguous();
  args.clipped = const_cast<uint8_t*>(launch.clipped.const_data_ptr<uint8_t>());  // only read here
  const cpu::Kernels& run = kernels();
  const int64_t scratch_bytes = run.linear.scratch_bytes(args.dtype);
  const Tiles whole{options.tiles.columns, 1};
  if (needs.dx || needs.drange) {
    args.dx = needs.dx ? dx.data_ptr() : nullptr;
    Cut areas;
    if (args.rows > 0 && options.tiles.columns > 0)
      areas = cut_tiles_evenly(args.rows, options.has_adc() || options.has_range() ? options.tiles : whole);
    const int64_t chunks = areas.columns.size();
    std::vector<double> sums(needs.drange ? pieces(args.rows, cpu::kRowUnit) * chunks : 0);
    std::vector<int64_t> insides(sums.size());
    args.dranges = needs.drange ? sums.data() : nullptr;
    args.insides = insides.data();
    for_areas(areas, args.outputs, scratch_bytes, [&](int64_t index, void* scratch) {
      run.linear.input_grad(args, areas.area(index), areas.chunk(index), chunks, scratch);
    });
    if (needs.drange) drange = range_gradient(*input_range, launch, areas, sums, insides);
  }
  if (needs.dweight && dweight.numel() > 0) {
    args.dweight = dweight.data_ptr();
    const Cut areas = cut_tiles(args.outputs, options.has_adc() ? options.tiles : whole);
    for_areas(areas, args.rows, scratch_bytes,
              [&](int64_t index, void* scratch) { run.linear.weight_grad(args, areas.area(index), scratch); });
  }
  if (needs.dbias) dbias = bias_gradient(*bias, launch, x);
  return {dx, dweight, dbias, drange};
}

// ---- for tests

std::vector<uint32_t> philox_words(uint64_t seed, uint32_t stream, uint64_t row, uint32_t group) {
  std::vector<uint32_t> words(4);
  kernels().weight.philox(seed, stream, row, group, words.data());
  return words;
}

void normal_numbers(const Tensor& out, uint64_t seed, uint32_t stream, int64_t row, int64_t begin) {
  const auto wide = out.scalar_type() == at::kDouble ? cpu::Dtype::float64 : cpu::Dtype::float32;
  kernels().weight.normal(wide, seed, stream, row, begin, begin + out.numel(), out.data_ptr());
}

}  // namespace

void define_analog(py::module_& module) {
  define_analog_phases<c10::DeviceType::CPU, &tile_abs_max, &tile_std, &input_range_update, &weight_forward,
                       &weight_backward, &linear_forward, &linear_backward>(module);
  module.def("philox", &philox_words);
  module.def("normal_", &normal_numbers);
}

}  // namespace triptych
