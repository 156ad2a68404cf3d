// The timing mode of check_kernels.cu: each phase in bytes moved a second, as a fraction of the device's own copy.
#pragma once

#include <initializer_list>

#include "check_case.h"

namespace {

// Inputs rotate among enough sets that no launch finds its own in L2.
constexpr int64_t kRotatedBytes = int64_t{1} << 30;

class Stopwatch {
 public:
  Stopwatch() {
    CHECKED(cudaEventCreate(&start_));
    CHECKED(cudaEventCreate(&stop_));
  }
  ~Stopwatch() {
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
  }
  // Microseconds of one launch: the median of batches, each long enough to hide the events and the host.
  template <class Launch>
  double median(Launch launch) {
    constexpr int kBatches = 15, kBatch = 12;
    std::vector<double> times;
    for (int i = 0; i < kBatch; ++i) launch(i);
    for (int batch = 0; batch < kBatches; ++batch) {
      CHECKED(cudaEventRecord(start_));
      for (int i = 0; i < kBatch; ++i) launch(i);
      CHECKED(cudaEventRecord(stop_));
      CHECKED(cudaEventSynchronize(stop_));
      float milliseconds = 0.0f;
      CHECKED(cudaEventElapsedTime(&milliseconds, start_, stop_));
      times.push_back(1000.0 * milliseconds / kBatch);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  cudaEvent_t start_, stop_;
};

inline char* allocate_random(int64_t bytes, const std::vector<uint16_t>& noise) {
  char* data = nullptr;
  CHECKED(cudaMalloc(reinterpret_cast<void**>(&data), static_cast<size_t>(bytes)));
  const int64_t step = static_cast<int64_t>(noise.size()) * 2;
  for (int64_t at = 0; at < bytes; at += step) {
    CHECKED(cudaMemcpy(data + at, noise.data(), static_cast<size_t>(std::min(step, bytes - at)), cudaMemcpyDefault));
  }
  return data;
}

inline int run_timing() {
  std::vector<uint16_t> noise(1 << 22);
  Values values(5);
  for (int64_t i = 0; i < static_cast<int64_t>(noise.size()); ++i) {
    write_as(DType::bfloat16, noise.data(), i, values.next());
  }

  Stopwatch watch;
  // Six regions of 1 GiB and a little: x, dy (residual), dh, then what is written: y or dx, h, and the copy's target.
  const int64_t region = kRotatedBytes;
  char* regions[6];
  for (char*& one : regions) one = allocate_random(region, noise);
  char* weight = allocate_random(65536 * 2, noise);
  char* dw = allocate_random(65536 * 2, noise);
  char* rstd = nullptr;
  CHECKED(cudaMalloc(reinterpret_cast<void**>(&rstd), 32768 * 4));
  char* workspace = nullptr;
  int64_t workspace_bytes = 0;

  const double copy_us = watch.median([&](int) {
    CHECKED(cudaMemcpyAsync(regions[5], regions[0], static_cast<size_t>(region), cudaMemcpyDeviceToDevice));
  });
  const double roof = 2.0 * static_cast<double>(region) / copy_us * 1e-3;  // GB/s
  std::printf("copy of 1 GiB: %.1f us, %.0f GB/s read and written = 1.000\n", copy_us, roof);
  std::printf("%-15s %21s %21s %8s %21s %21s\n", "bfloat16", "forward us / ratio", "backward us / ratio", "step",
              "add forward", "add backward (dh)");

  const int64_t shapes[][2] = {{32768, 1024},  {32768, 4096}, {16384, 8192},
                               {8192, 16384}, {4096, 32768}, {4096, 65536}};
  for (const auto& shape : shapes) {
    const int64_t rows = shape[0], cols = shape[1], bytes = rows * cols * 2, sets = region / bytes;
    const auto part = [&](int which, int turn) { return regions[which] + turn % sets * bytes; };

    RmsNormForward forward;
    forward.weight = weight;
    forward.rstd = rstd;
    forward.rows = rows;
    forward.cols = forward.x_row_stride = forward.residual_row_stride = cols;
    forward.eps = 1e-5;
    forward.x_dtype = forward.weight_dtype = DType::bfloat16;
    RmsNormBackward backward;
    backward.weight = weight;
    backward.rstd = rstd;
    backward.dw = dw;
    backward.rows = rows;
    backward.cols = backward.x_row_stride = backward.dy_row_stride = backward.dh_row_stride = cols;
    backward.x_dtype = backward.weight_dtype = DType::bfloat16;

    const auto run_forward = [&](int turn, bool add) {
      forward.x = part(0, turn);
      forward.residual = add ? part(1, turn) : nullptr;
      forward.y = part(3, turn);
      forward.h = add ? part(4, turn) : nullptr;
      CHECKED(rms_norm_forward(forward, nullptr));
    };
    const auto run_backward = [&](int turn, bool add) {
      backward.x = part(0, turn);
      backward.dy = part(1, turn);
      backward.dh = add ? part(2, turn) : nullptr;
      backward.dx = part(3, turn);
      const int64_t needed = rms_norm_backward_workspace_bytes(backward);
      if (needed > workspace_bytes) {
        CHECKED(cudaFree(workspace));
        CHECKED(cudaMalloc(reinterpret_cast<void**>(&workspace), static_cast<size_t>(needed)));
        workspace_bytes = needed;
      }
      backward.workspace = workspace;
      CHECKED(rms_norm_backward(backward, nullptr));
    };
    const auto ratio = [&](double tensors, double us) {
      return tensors * static_cast<double>(bytes) / us * 1e-3 / roof;
    };
    const double f = watch.median([&](int turn) { run_forward(turn, false); });
    const double b = watch.median([&](int turn) { run_backward(turn, false); });
    const double add_f = watch.median([&](int turn) { run_forward(turn, true); });
    const double add_b = watch.median([&](int turn) { run_backward(turn, true); });
    std::printf("%6lld x %-6lld %12.1f  %7.3f %12.1f  %7.3f %8.3f %12.1f  %7.3f %12.1f  %7.3f\n",
                static_cast<long long>(rows), static_cast<long long>(cols), f, ratio(2, f), b, ratio(3, b),
                ratio(5, f + b), add_f, ratio(4, add_f), add_b, ratio(4, add_b));
  }
  CHECKED(cudaDeviceSynchronize());
  for (char* one : regions) cudaFree(one);
  for (char* one : {weight, dw, rstd, workspace}) cudaFree(one);
  return 0;
}

}  // namespace
