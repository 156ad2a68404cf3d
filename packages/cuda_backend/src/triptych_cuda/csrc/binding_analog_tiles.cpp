// tile_abs_max, tile_std, input_range_update and analog_weight of the CPU extension module: allocates, cuts the work into
// fixed pieces, spreads them over PyTorch's intra-op threads, and puts what the pieces give together in their order.
#include "binding_analog.h"
#include "cpu/analog_kernels.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

namespace triptych {

using at::Tensor;

// ---- tile_abs_max, tile_std, input_range_update

namespace {

cpu::TileArgs tile_args(const Tensor& x, const Rows& rows, Tiles tiles) {
  cpu::TileArgs args{};
  args.dtype = dtype_of<cpu::Dtype>(x);
  args.rows = row_count(x);
  args.tiles = tiles;
  args.x = rows.data;
  args.x_stride = rows.stride;
  if (args.rows > 0 && tiles.columns > 0) {
    args.chunk_rows = cpu::chunk_rows(args.rows, tiles.columns);
    args.chunks = (args.rows + args.chunk_rows - 1) / args.chunk_rows;
  }
  return args;
}

}  // namespace

Tensor tile_abs_max(const Tensor& x, Tiles tiles) {
  Tensor out = at::empty(sizes_by_tile(x, tiles.count), x.options().dtype(wide_type(x)));
  if (out.numel() == 0) return out;
  const Rows rows = rows_of(x);
  cpu::TileArgs args = tile_args(x, rows, tiles);
  args.out = out.data_ptr();
  const cpu::Kernels& run = kernels();
  at::parallel_for(0, args.rows, grain(tiles.columns),
                   [&](int64_t begin, int64_t end) { run.tile.abs_max(args, begin, end); });
  return out;
}

namespace {

// The unbiased standard deviation of each tile, before it is rounded to the wide type.
std::vector<double> deviations(const Tensor& x, Tiles tiles) {
  std::vector<double> found(tiles.count, std::numeric_limits<double>::quiet_NaN());
  const Rows rows = rows_of(x);
  cpu::TileArgs args = tile_args(x, rows, tiles);
  if (args.chunks == 0) return found;
  const cpu::Kernels& run = kernels();
  const int64_t work = grain(args.chunk_rows * tiles.columns);
  std::vector<double> sums(tiles.count * args.chunks), squares(2 * tiles.count * args.chunks), means(tiles.count);
  args.out = sums.data();
  at::parallel_for(0, args.chunks, work, [&](int64_t begin, int64_t end) { run.tile.sums(args, begin, end); });
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    double total = 0;
    for (int64_t chunk = 0; chunk < args.chunks; ++chunk) total += sums[tile * args.chunks + chunk];
    means[tile] = total / (static_cast<double>(args.rows) * static_cast<double>(tiles.size(tile)));
  }
  args.out = squares.data();
  at::parallel_for(0, args.chunks, work,
                   [&](int64_t begin, int64_t end) { run.tile.squares(args, means.data(), begin, end); });
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    double rest = 0, square = 0;
    for (int64_t chunk = 0; chunk < args.chunks; ++chunk) {
      rest += squares[2 * (tile * args.chunks + chunk)];
      square += squares[2 * (tile * args.chunks + chunk) + 1];
    }
    const double count = static_cast<double>(args.rows) * static_cast<double>(tiles.size(tile));
    if (count < 2) continue;
    // A sum of squares less a small correction of it; only rounding could make it negative.
    const double variance = (square - rest * rest / count) / (count - 1);
    found[tile] = std::sqrt(variance < 0 ? 0 : variance);
  }
  return found;
}

}  // namespace

Tensor tile_std(const Tensor& x, Tiles tiles) {
  const std::vector<double> found = deviations(x, tiles);
  Tensor out = at::empty({tiles.count}, x.options().dtype(wide_type(x)));
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    if (out.scalar_type() == at::kDouble)
      out.mutable_data_ptr<double>()[tile] = found[tile];
    else
      out.mutable_data_ptr<float>()[tile] = static_cast<float>(found[tile]);
  }
  return out;
}

namespace {

// A fresh, contiguous tensor with the same elements.
Tensor copied(const Tensor& tensor) { return tensor.clone(at::MemoryFormat::Contiguous); }

// The parameter [T] in the wide type; only what changes of it goes back, so that the rest keeps its bits.
template <class W>
void update_by_std(const Tensor& x, const Tensor& wide, W* range, int64_t* count, bool* changed,
                   const UpdateOptions& options) {
  const int64_t tiles = options.tiles.count;
  const W* before = wide.const_data_ptr<W>();
  bool calibrating = false;
  for (int64_t tile = 0; tile < tiles; ++tile) calibrating |= count[tile] < options.init_from_data;
  if (!calibrating) return;
  const std::vector<double> found = deviations(x, options.tiles);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    if (count[tile] >= options.init_from_data) continue;
    const W deviation = static_cast<W>(found[tile]);
    W value = before[tile];
    if (deviation > 0 && std::isfinite(deviation)) {  // one that overflowed counts no more than a NaN
      const W seen = static_cast<W>(count[tile]), more = static_cast<W>(count[tile] + 1);
      value = (value * seen + static_cast<W>(options.init_std_alpha) * deviation) / more;
      ++count[tile];
    }
    range[tile] = std::abs(value);
    changed[tile] = true;
  }
}

template <class W>
void update_by_extremes(const Tensor& x, W* range, int64_t* count, W* x_min, W* x_max, bool* changed,
                        const UpdateOptions& options) {
  const Tiles tiles = options.tiles;
  bool calibrating = false;
  for (int64_t tile = 0; tile < tiles.count; ++tile) calibrating |= count[tile] < options.init_from_data;
  const Rows rows = rows_of(x);
  cpu::TileArgs args = tile_args(x, rows, tiles);
  if (!calibrating || args.chunks == 0) return;
  std::vector<W> found(2 * tiles.count * args.chunks);
  args.out = found.data();
  const cpu::Kernels& run = kernels();
  at::parallel_for(0, args.chunks, grain(args.chunk_rows * tiles.columns),
                   [&](int64_t begin, int64_t end) { run.tile.extremes(args, begin, end); });
  const W momentum = static_cast<W>(options.momentum), rest = static_cast<W>(1 - options.momentum);
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    if (count[tile] >= options.init_from_data) continue;
    const W* of_tile = found.data() + 2 * tile * args.chunks;
    W low = of_tile[0], high = of_tile[1];
    bool finite = true;
    for (int64_t chunk = 0; chunk < args.chunks; ++chunk) {
      finite &= std::isfinite(of_tile[2 * chunk]);
      low = std::min(low, of_tile[2 * chunk]);
      high = std::max(high, of_tile[2 * chunk + 1]);
    }
    if (!finite) continue;
    if (count[tile] == 0) {
      x_min[tile] = low;
      x_max[tile] = high;
    } else if (options.momentum == -1) {
      // A NaN that was there stays.
      x_min[tile] = x_min[tile] > low ? low : x_min[tile];
      x_max[tile] = x_max[tile] < high ? high : x_max[tile];
    } else {
      x_min[tile] = x_min[tile] * momentum + low * rest;
      x_max[tile] = x_max[tile] * momentum + high * rest;
    }
    const W below = std::abs(x_min[tile]), above = std::abs(x_max[tile]);
    range[tile] = below > above || below != below ? below : above;
    changed[tile] = true;
    ++count[tile];
  }
}

// The largest finite number of a dtype.
double largest_number(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::max();
    case at::kHalf:
      return std::numeric_limits<c10::Half>::max();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::max();
    default:
      return std::numeric_limits<float>::max();
  }
}

template <class W>
std::tuple<Tensor, Tensor, Tensor, Tensor> range_update(const Tensor& x, const Tensor& input_range, const Tensor& count,
                                                        const OptionalTensor& x_min, const OptionalTensor& x_max,
                                                        const UpdateOptions& options) {
  const auto wide_options = x.options().dtype(wide_type(x));
  const int64_t tiles = options.tiles.count;
  Tensor range = copied(input_range), counts = copied(count);
  const Tensor before = input_range.to(wide_options).contiguous();
  Tensor after = copied(before);
  Tensor lows = x_min ? copied(*x_min) : at::empty({0}, wide_options);
  Tensor highs = x_max ? copied(*x_max) : at::empty({0}, wide_options);
  const std::unique_ptr<bool[]> changed(new bool[tiles]());
  int64_t* counted = counts.mutable_data_ptr<int64_t>();
  if (options.mode == Calibration::std)
    update_by_std<W>(x, before, after.mutable_data_ptr<W>(), counted, changed.get(), options);
  else
    update_by_extremes<W>(x, after.mutable_data_ptr<W>(), counted, lows.mutable_data_ptr<W>(),
                          highs.mutable_data_ptr<W>(), changed.get(), options);
  // A range that is set is never infinite: no later batch could undo that. NaN stays.
  const W largest = static_cast<W>(largest_number(range.scalar_type()));
  W* values = after.mutable_data_ptr<W>();
  for (int64_t tile = 0; tile < tiles; ++tile)
    if (changed[tile] && values[tile] > largest) values[tile] = largest;
  const Tensor rounded = after.to(range.scalar_type());
  const size_t size = range.element_size();
  for (int64_t tile = 0; tile < tiles; ++tile)
    if (changed[tile])
      std::memcpy(static_cast<char*>(range.mutable_data_ptr()) + tile * size,
                  static_cast<const char*>(rounded.const_data_ptr()) + tile * size, size);
  return {range, counts, lows, highs};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> input_range_update(const Tensor& x, const Tensor& input_range,
                                                              const Tensor& count, const OptionalTensor& x_min,
                                                              const OptionalTensor& x_max,
                                                              const UpdateOptions& options) {
  return (wide_type(x) == at::kDouble ? range_update<double> : range_update<float>)(x, input_range, count, x_min, x_max,
                                                                                    options);
}

// ---- analog_weight

namespace {

template <class W>
void largest_of_rows(const W* from, int64_t rows, int64_t columns, W* to) {
  for (int64_t row = 0; row < rows; ++row) {
    W most = 0;
    for (int64_t column = 0; column < columns; ++column) {
      const W value = from[row * columns + column];
      most = most > value || most != most ? most : value;
    }
    to[row] = most;
  }
}

}  // namespace

Tensor largest_of_rows(const Tensor& matrix) {
  Tensor out = at::empty({matrix.size(0)}, matrix.options());
  if (matrix.scalar_type() == at::kDouble)
    largest_of_rows(matrix.const_data_ptr<double>(), matrix.size(0), matrix.size(1), out.mutable_data_ptr<double>());
  else
    largest_of_rows(matrix.const_data_ptr<float>(), matrix.size(0), matrix.size(1), out.mutable_data_ptr<float>());
  return out;
}

namespace {

// max(clip, tiny) in the wide type; NaN stays.
Tensor positive_clip(const Tensor& clip, const Tensor& weight) {
  Tensor out = at::empty(clip.sizes(), weight.options().dtype(wide_type(weight)));
  out.copy_(clip);
  const auto raise = [](auto* values, int64_t count, auto least) {
    for (int64_t i = 0; i < count; ++i) values[i] = values[i] < least ? least : values[i];
  };
  if (out.scalar_type() == at::kDouble)
    raise(out.mutable_data_ptr<double>(), out.numel(), std::numeric_limits<double>::min());
  else
    raise(out.mutable_data_ptr<float>(), out.numel(), std::numeric_limits<float>::min());
  return out;
}

}  // namespace

uint64_t value_of(const OptionalTensor& seed) {
  return seed ? static_cast<uint64_t>(*seed->const_data_ptr<int64_t>()) : 0;
}

std::tuple<Tensor, Tensor> weight_forward(const Tensor& weight, const OptionalTensor& clip, const OptionalTensor& seed,
                                          const WeightOptions& options) {
  const Tensor wmax = clip ? positive_clip(*clip, weight) : tile_abs_max(weight, options.tiles);
  Tensor modified = empty_output(weight.sizes(), weight.options());
  if (modified.numel() == 0) return {modified, wmax};
  const Tensor largest = largest_of_rows(wmax);
  const Rows rows = rows_of(weight);
  cpu::WeightArgs args{};
  args.dtype = dtype_of<cpu::Dtype>(weight);
  args.rows = weight.size(0);
  args.options = options;
  args.weight = rows.data;
  args.weight_stride = rows.stride;
  args.has_clip = clip.has_value();
  args.wmax = wmax.const_data_ptr();
  args.largest = largest.const_data_ptr();
  args.seed = value_of(seed);
  args.modified = modified.data_ptr();
  const cpu::Kernels& run = kernels();
  at::parallel_for(0, args.rows, grain(weight.size(1)),
                   [&](int64_t begin, int64_t end) { run.weight.forward(args, begin, end); });
  return {modified, wmax};
}

std::tuple<Tensor, Tensor> weight_backward(const Tensor& dmodified, const Tensor& weight, const OptionalTensor& clip,
                                           const WeightOptions& options, bool need_dweight, bool need_dclip) {
  Tensor dclip = need_dclip ? at::empty(clip->sizes(), clip->options()) : nothing_like(clip ? *clip : weight);
  if (!clip) return {need_dweight ? copied(dmodified) : nothing_like(weight), dclip};
  Tensor dweight = need_dweight ? empty_output(weight.sizes(), weight.options()) : nothing_like(weight);
  if (weight.numel() == 0) return {dweight, dclip.zero_()};
  if (!need_dweight && !need_dclip) return {dweight, dclip};
  const Tensor wmax = positive_clip(*clip, weight);
  const Rows rows = rows_of(weight), grads = rows_of(dmodified);
  cpu::WeightArgs args{};
  args.dtype = dtype_of<cpu::Dtype>(weight);
  args.clip_dtype = dtype_of<cpu::Dtype>(*clip);
  args.rows = weight.size(0);
  args.options = options;
  args.weight = rows.data;
  args.weight_stride = rows.stride;
  args.has_clip = true;
  args.wmax = wmax.const_data_ptr();
  args.dmodified = grads.data;
  args.dmodified_stride = grads.stride;
  args.dweight = need_dweight ? dweight.data_ptr() : nullptr;
  args.dclip = need_dclip ? dclip.data_ptr() : nullptr;
  const cpu::Kernels& run = kernels();
  at::parallel_for(0, args.rows, grain(weight.size(1)),
                   [&](int64_t begin, int64_t end) { run.weight.backward(args, begin, end); });
  return {dweight, dclip};
}

}  // namespace triptych
