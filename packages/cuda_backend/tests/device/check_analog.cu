// Checks the analog CUDA kernels against a float64 oracle on the host. Needs a GPU and nothing else.
//
//   K=../../src/triptych_cuda/csrc/cuda
//   nvcc -std=c++17 -O3 --expt-relaxed-constexpr -lineinfo -arch=sm_90 -I$K check_analog.cu $K/*.cu -o check_analog
//   ./check_analog            every kernel, dtype, shape, alignment, then a summary
//   ./check_analog --quick    a part of them, small enough for compute-sanitizer
//
// How a fault shows: as in check_kernels.cu. Elements whose quotient lies within float32's error of a tie or of a limit
// may come out on either side.
#include "check_analog_linear.h"
#include "check_analog_tiles.h"
#include "check_analog_weight.h"

namespace {

const DType kDTypes[] = {DType::float32, DType::float16, DType::bfloat16, DType::float64};

// rows, columns, tiles, channels, elements off alignment, elements between rows
const Shape3 kShapes[] = {
    {1, 1, 1, 1, 0, 0},       {3, 7, 7, 5, 0, 0},         {2, 9, 2, 8, 1, 3},        {33, 257, 3, 31, 0, 0},
    {17, 256, 1, 64, 0, 0},   {40, 512, 4, 40, 0, 8},     {5, 1030, 4, 13, 1, 0},    {12, 96, 5, 100, 0, 64},
    {70, 264, 2, 264, 1, 1},  {3, 5000, 1, 3, 0, 0},      {2, 9000, 2, 9, 1, 0},     {300, 40, 3, 17, 0, 0},
    {9, 4200, 4200, 2, 0, 0}, {2, 20001, 1, 2, 0, 0},     {1500, 8, 1, 4, 0, 0},     {64, 1024, 3, 72, 0, 0},
};
constexpr int kQuickShapes = 10;

void check_shape(const Shape3& shape, DType type, DType parameter, Report* report) {
  Case one;
  one.x_dtype = type;
  one.weight_dtype = parameter;
  one.rows = shape.rows;
  one.cols = shape.cols;
  one.shift = shape.shift;
  one.padding = shape.padding;
  const auto labelled = [&](const std::string& name) {
    static std::string kept;
    kept = name + ", " + std::to_string(shape.tiles) + " tiles, " + std::to_string(shape.channels) + " channels";
    one.name = kept.c_str();
    ++report->cases;
    return one;
  };
  check_statistics(labelled("statistics"), shape, 0.0, 1.0, report);
  check_statistics(labelled("statistics beside an offset"), shape, is_half(type) ? 16.0 : 1000.0, 0.01, report);
  check_statistics(labelled("equal elements"), shape, 0.7, 0.0, report);
  for (const WeightCase& variant : kWeightCases) {
    check_weight_forward(labelled(std::string("weight, ") + variant.name), shape, variant, report);
  }
  check_weight_backward(labelled("clip gradient"), shape, false, report);
  check_weight_backward(labelled("clip gradient, 5 bits"), shape, true, report);
  for (const double res : {0.0, 254.0, 1.0 / 30}) {
    check_input_pass(labelled("learned input"), shape, RangeMode::learned, res, report);
    check_input_pass(labelled("dynamic input"), shape, RangeMode::dynamic, res, report);
  }
  if (shape.tiles <= 64) {
    for (const OutputCase& variant : kOutputCases) {
      check_output_pass(labelled(std::string("output, ") + variant.name), shape, variant, RangeMode::learned, report);
      check_output_pass(labelled(std::string("output, dynamic, ") + variant.name), shape, variant, RangeMode::dynamic,
                        report);
    }
  }
  for (const bool wide : {false, true}) {
    check_input_gradient(labelled("learned range gradient"), shape, RangeMode::learned, wide, report);
    check_input_gradient(labelled("fast range gradient"), shape, RangeMode::fast, wide, report);
  }
  check_column_sum(labelled("column sum"), shape, report);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (!mode.empty() && mode != "--quick") {
    std::fprintf(stderr, "usage: %s [--quick]\n", argv[0]);
    return 2;
  }
  Report report;
  check_philox(&report);
  int index = 0;
  for (const Shape3& shape : kShapes) {
    if (mode == "--quick" && index >= kQuickShapes) break;
    for (const DType type : kDTypes) {
      check_shape(shape, type, type, &report);
      if (is_half(type) && index % 2 == 0) check_shape(shape, type, DType::float32, &report);
    }
    ++index;
  }
  std::printf("%s: %d cases, %d failures\n", report.failures == 0 ? "PASS" : "FAIL", report.cases, report.failures);
  return report.failures == 0 ? 0 : 1;
}
