// Checks the CUDA kernels against a float64 reference on the host, and times them. Needs a GPU and nothing else.
//
//   K=../../src/triptych_cuda/csrc/cuda
//   nvcc -std=c++17 -O3 --expt-relaxed-constexpr -lineinfo -arch=sm_90 -I$K check_kernels.cu $K/*.cu -o check_kernels
//   ./check_kernels            every dtype, size, alignment, stride and variant, then a summary (under a minute)
//   ./check_kernels --quick    a part of them, small enough for compute-sanitizer
//   ./check_kernels --time     six shapes in bfloat16 against the device's own copy rate
//
// How a fault shows: outputs are filled with a pattern before each run, and each case runs under two patterns that
// must give the same bits (an element nobody wrote differs); every buffer lies between guard zones that must not
// change; guards and the gaps between padded rows of inputs are NaN, so that a read outside a row ends in the result.
#include "check_phases.h"
#include "check_time.h"

namespace {

using triptych::cuda::DType;

const int64_t kCols[] = {1,     2,     3,     7,     8,     31,    64,     100,    127,    128,    129,   255,
                         256,   257,   512,   768,   1000,  1023,  1024,   1025,   2048,   3000,   4096,  4104,
                         5000,  8192,  8200,  12345, 16384, 16392, 20000,  32768,  40000,  65536,  65544, 131072,
                         131080, 262144, 262147, 270336};
const int64_t kQuickCols[] = {1, 7, 64, 129, 1000, 1024, 1025, 4096, 5000, 16384, 32768, 65536};
const DType kDTypes[] = {DType::float32, DType::float16, DType::bfloat16, DType::float64};

DType other_half(DType dtype) { return dtype == DType::float16 ? DType::bfloat16 : DType::float16; }

// The variants that every (dtype, size) runs through: one property changes at a time, then several together.
std::vector<Case> variants(DType dtype, int64_t rows, int64_t cols) {
  Case base;
  base.x_dtype = dtype;
  base.weight_dtype = dtype;
  base.rows = rows;
  base.cols = cols;
  const bool half = dtype == DType::float16 || dtype == DType::bfloat16;
  std::vector<Case> all;
  const auto add = [&](const char* name, auto change) {
    Case one = base;
    one.name = name;
    change(one);
    all.push_back(one);
  };
  add("plain", [](Case&) {});
  add("plain rounded first", [](Case& c) { c.round_before_weight = true; c.offset = 1.0; });
  add("no weight", [](Case& c) { c.has_weight = false; });
  add("add", [](Case& c) { c.has_residual = c.has_dh = true; });
  add("add, no dh, float weight", [&](Case& c) {
    c.has_residual = true;
    if (dtype != DType::float64) c.weight_dtype = DType::float32;
  });
  add("unaligned", [](Case& c) { c.shift = 1; });
  add("unaligned add rounded first", [](Case& c) {
    c.shift = 1;
    c.has_residual = c.has_dh = c.round_before_weight = true;
  });
  add("padded rows", [](Case& c) { c.padding = 64; c.has_dh = true; });
  add("oddly padded rows", [](Case& c) { c.padding = 3; });
  add("stride 0 gradient", [](Case& c) { c.dy_stride_zero = true; });
  add("stride 0 everywhere", [](Case& c) {
    c.dy_stride_zero = c.x_stride_zero = c.has_residual = c.has_dh = true;
  });
  add("strided weight", [&](Case& c) {
    c.weight_stride = 3;
    c.offset = 0.5;
    if (half) c.weight_dtype = other_half(dtype);
  });
  add("strided unaligned weight", [](Case& c) { c.weight_stride = 2; c.shift = 1; });
  add("weight shifted alone", [](Case& c) { c.weight_shift = 1; c.round_before_weight = true; });
  add("dx alone", [](Case& c) { c.need_dw = false; c.has_dh = true; });
  add("dw alone", [](Case& c) { c.need_dx = false; });
  add("eps 0", [](Case& c) { c.eps = 0.0; });
  return all;
}

// Rows enough that every unit of the persistent backward grid meets its stages again.
struct Shape {
  int64_t rows, cols;
};
const Shape kManyRows[] = {{300001, 8},  {1500001, 1}, {70001, 60},  {20011, 1024}, {3301, 2048}, {2701, 4096},
                           {1301, 8192}, {667, 16384}, {331, 32768}, {170, 65536},  {9001, 999},  {2111, 4099}};

int run_checks(bool quick) {
  Report report;
  const int64_t budget = quick ? 20000 : 60000;
  const auto sizes = quick ? std::vector<int64_t>(std::begin(kQuickCols), std::end(kQuickCols))
                           : std::vector<int64_t>(std::begin(kCols), std::end(kCols));
  for (const DType dtype : kDTypes) {
    for (const int64_t cols : sizes) {
      const int64_t rows = std::min<int64_t>(std::max<int64_t>(budget / cols, 3), 600) + 1;
      int index = 0;
      for (const Case& one : variants(dtype, rows, cols)) {
        // Long rows cost the host most: a third of the variants each, another third at the next size.
        const bool taken = cols <= 20000 || (index + cols / 8) % 3 == 0;
        if (taken) check(one, &report);
        ++index;
      }
    }
  }
  if (!quick) {
    for (const Shape& shape : kManyRows) {
      for (const DType dtype : {DType::bfloat16, DType::float32}) {
        Case one;
        one.name = "many rows";
        one.x_dtype = one.weight_dtype = dtype;
        one.rows = shape.rows;
        one.cols = shape.cols;
        check(one, &report);
        one.name = "many rows, dh";
        one.has_dh = true;
        one.round_before_weight = true;
        if (dtype == DType::bfloat16) check(one, &report);
      }
    }
    check_far_rows(&report);
  }
  check_empty_and_refused(&report);
  report.print(!quick);
  return report.failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "--time") return run_timing();
  if (!mode.empty() && mode != "--quick") {
    std::fprintf(stderr, "usage: %s [--quick | --time]\n", argv[0]);
    return 2;
  }
  return run_checks(mode == "--quick");
}
