// What the analog ops are told, and where the tiles of a row lie: shared by the border and by all kernels, hence free
// of frameworks and of the standard library.
//
// The functions are inlined wherever they are called, so that no copy compiled for one processor can be taken by the
// linker for another; nvcc takes them for device code too (--expt-relaxed-constexpr).
#pragma once

#include <cstdint>

#define TRIPTYCH_SHARED __attribute__((always_inline)) constexpr

namespace triptych {

// `columns` split into `count` tiles of nearly equal size, the longer ones first.
struct Tiles {
  int64_t columns = 0;
  int64_t count = 1;

  TRIPTYCH_SHARED int64_t base() const { return columns / count; }
  TRIPTYCH_SHARED int64_t extra() const { return columns % count; }
  TRIPTYCH_SHARED int64_t start(int64_t tile) const { return tile * base() + (tile < extra() ? tile : extra()); }
  TRIPTYCH_SHARED int64_t size(int64_t tile) const { return base() + (tile < extra()); }
  TRIPTYCH_SHARED int64_t largest() const { return base() + (extra() > 0); }
  // The tile that holds a column, 0 <= column < columns.
  TRIPTYCH_SHARED int64_t of(int64_t column) const {
    const int64_t longer = extra() * (base() + 1);
    return column < longer ? column / (base() + 1) : extra() + (column - longer) / base();
  }
};

// What a quantisation or a noise of the weights is relative to.
enum class Per : int { none, tensor, channel };

// Where the bound of the inputs comes from: nowhere, a learned parameter, the same with plain clamping, or the data.
enum class RangeMode : int { none, learned, fast, dynamic };

// What calibration gathers.
enum class Calibration : int { std, extremes };

struct UpdateOptions {
  Tiles tiles;
  Calibration mode = Calibration::std;
  int64_t init_from_data = 0;
  double init_std_alpha = 0;
  double momentum = 0;  // -1: the true extremes
};

struct WeightOptions {
  Tiles tiles;
  Per quantization = Per::none;
  double res = 0;
  Per noise = Per::none;
  double std_dev = 0;
};

struct LinearOptions {
  Tiles tiles;
  RangeMode mode = RangeMode::none;
  double inp_res = 0;  // <= 0: no quantiser; so for out_res
  double out_noise = 0;
  bool out_noise_per_channel = false;
  double out_bound = 0;  // <= 0: no ADC
  double out_res = 0;
  bool out_bound_per_channel = false;
  double decay = 0;
  double input_min_percentage = 0;

  TRIPTYCH_SHARED bool has_range() const { return mode == RangeMode::learned || mode == RangeMode::fast; }
  TRIPTYCH_SHARED bool has_noise() const { return out_noise > 0; }
  TRIPTYCH_SHARED bool has_adc() const { return out_bound > 0; }
};

struct LinearNeeds {
  bool dx = false, dweight = false, dbias = false, drange = false;
};

}  // namespace triptych
