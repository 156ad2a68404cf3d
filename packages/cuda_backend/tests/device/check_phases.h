// The checks of check_kernels.cu: forward and backward of one case, far-apart rows, empty and refused calls.
#pragma once

#include "check_case.h"

namespace {

struct Weight {
  std::vector<double> gain;  // weight + offset, as the kernels see it
  Buffer buffer;
  explicit Weight(const Case& one)
      : buffer(((one.cols - 1) * one.weight_stride + 1) * size_of(one.weight_dtype),
               (one.shift + one.weight_shift) * size_of(one.weight_dtype)) {
    buffer.fill(kGuardByte);
    Values values(77);
    for (int64_t c = 0; c < one.cols; ++c) {
      const double value = rounded(one.weight_dtype, 0.75 + 0.5 * values.next());
      write_as(one.weight_dtype, buffer.host(), c * one.weight_stride, value);
      gain.push_back(one.has_weight ? value + one.offset : 1.0);
    }
    buffer.upload();
  }
};

// Runs `launch` under two fill patterns of its outputs; the bits must agree, guards and inputs must not change.
template <class Launch>
bool run_twice(const Case& one, Report* report, const char* phase, const std::vector<Buffer*>& inputs,
               const std::vector<Buffer*>& outputs, Launch launch) {
  std::vector<std::vector<unsigned char>> bits;
  bool good = true;
  for (const unsigned char pattern : {0xff, 0x3c}) {
    for (Buffer* output : outputs) {
      output->fill(pattern);
      output->upload();
    }
    const cudaError_t returned = launch();
    const cudaError_t last = cudaGetLastError();
    const cudaError_t done = cudaDeviceSynchronize();
    if (returned != cudaSuccess || last != cudaSuccess || done != cudaSuccess) {
      report->fail(one, std::string(phase) + ": " + cudaGetErrorString(returned) + ", " + cudaGetErrorString(last) +
                            ", " + cudaGetErrorString(done));
      if (done != cudaSuccess) std::exit(3);  // sticky: nothing after it means anything
      return false;
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i]->download()) {
        report->fail(one, std::string(phase) + ": wrote outside output " + std::to_string(i));
        good = false;
      }
      if (bits.size() <= i) {
        bits.push_back(outputs[i]->body());
      } else if (bits[i] != outputs[i]->body()) {
        report->fail(one, std::string(phase) + ": output " + std::to_string(i) +
                              " differs between two runs (unwritten elements, or a race)");
        good = false;
      }
    }
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i]->unchanged()) {
      report->fail(one, std::string(phase) + ": input " + std::to_string(i) + " or its guards changed");
      good = false;
    }
  }
  return good;
}

inline int64_t shift_bytes(const Case& one, DType dtype) { return one.shift * size_of(dtype); }

inline DType statistics_of(const Case& one) {
  return one.x_dtype == DType::float64 ? DType::float64 : DType::float32;
}

inline void check_forward(const Case& one, Report* report) {
  const DType type = one.x_dtype, stat = statistics_of(one);
  const int64_t rows = one.rows, cols = one.cols;
  Tensor x(one, type, rows, stride_of(one, one.x_stride_zero));
  Tensor residual(one, type, one.has_residual ? rows : 1, one.cols + 2 * one.padding);
  randomise(&x, rows, cols, 1, 1.0);
  randomise(&residual, one.has_residual ? rows : 1, cols, 2, 0.7);
  x.buffer.upload();
  residual.buffer.upload();
  Weight weight(one);
  Buffer y(rows * cols * size_of(type), shift_bytes(one, type));
  Buffer h(one.has_residual ? rows * cols * size_of(type) : 0, shift_bytes(one, type));
  Buffer rstd(rows * size_of(stat), shift_bytes(one, stat));

  RmsNormForward call;
  call.x = x.buffer.device();
  call.residual = one.has_residual ? residual.buffer.device() : nullptr;
  call.weight = one.has_weight ? weight.buffer.device() : nullptr;
  call.y = y.device();
  call.h = one.has_residual ? h.device() : nullptr;
  call.rstd = rstd.device();
  call.rows = rows;
  call.cols = cols;
  call.x_row_stride = x.stride;
  call.residual_row_stride = residual.stride;
  call.weight_stride = one.weight_stride;
  call.eps = one.eps;
  call.offset = one.offset;
  call.x_dtype = type;
  call.weight_dtype = one.weight_dtype;
  call.round_before_weight = one.round_before_weight;
  report->took("forward", rms_norm_forward_path(call));
  if (!run_twice(one, report, "forward", {&x.buffer, &residual.buffer, &weight.buffer}, {&y, &h, &rstd},
                 [&] { return rms_norm_forward(call, nullptr); })) {
    return;
  }

  std::vector<double> seen(static_cast<size_t>(rows * cols)), want_rstd(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0.0;
    for (int64_t c = 0; c < cols; ++c) {
      double value = x.at(r, c);
      if (one.has_residual) {
        const double sum = value + residual.at(r, c);
        value = rounded(type, type == DType::float64 ? sum : static_cast<double>(static_cast<float>(sum)));
      }
      seen[static_cast<size_t>(r * cols + c)] = value;
      squares += value * value;
    }
    want_rstd[static_cast<size_t>(r)] = 1.0 / std::sqrt(squares / static_cast<double>(cols) + one.eps);
  }
  const double error = float_error(one);
  if (one.has_residual) {
    compare(one, report, "h", type, h.host(), rows * cols, 1.0, [&](int64_t i) { return seen[static_cast<size_t>(i)]; },
            [](int64_t, double) { return 0.0; });
  }
  compare(one, report, "rstd", stat, rstd.host(), rows, 0.0,
          [&](int64_t i) { return want_rstd[static_cast<size_t>(i)]; },
          [&](int64_t, double want) { return error * std::fabs(want); });
  compare(
      one, report, "y", type, y.host(), rows * cols, is_half(type) ? 0.97 : 0.0,
      [&](int64_t i) {
        double xhat = seen[static_cast<size_t>(i)] * want_rstd[static_cast<size_t>(i / cols)];
        if (one.round_before_weight) xhat = rounded(type, xhat);
        return xhat * weight.gain[static_cast<size_t>(i % cols)];
      },
      [&](int64_t i, double want) {
        // With the inner rounding, a value next to a tie may take the other side: one more step of the dtype.
        const double step = one.round_before_weight
                                ? 2.0 * half_ulp(type, seen[static_cast<size_t>(i)] *
                                                           want_rstd[static_cast<size_t>(i / cols)]) *
                                      std::fabs(weight.gain[static_cast<size_t>(i % cols)])
                                : 0.0;
        // 1.01, here and below: what is rounded is the computed value, not the wanted one. They differ by `error`, far
        // less than 1 %, and so do their half steps.
        return 1.01 * half_ulp(type, want) + error * std::fabs(want) + step;
      });
}

inline void check_backward(const Case& one, Report* report) {
  const DType type = one.x_dtype, stat = statistics_of(one);
  const int64_t rows = one.rows, cols = one.cols;
  Tensor x(one, type, rows, stride_of(one, one.x_stride_zero));
  Tensor dy(one, type, rows, stride_of(one, one.dy_stride_zero));
  Tensor dh(one, type, one.has_dh ? rows : 1, one.cols + 2 * one.padding);
  randomise(&x, rows, cols, 3, 1.0);
  randomise(&dy, rows, cols, 4, 0.5);
  randomise(&dh, one.has_dh ? rows : 1, cols, 5, 0.5);
  Weight weight(one);
  Buffer rstd(rows * size_of(stat), shift_bytes(one, stat));
  std::vector<double> r_of(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0.0;
    for (int64_t c = 0; c < cols; ++c) squares += x.at(r, c) * x.at(r, c);
    r_of[static_cast<size_t>(r)] = rounded(stat, 1.0 / std::sqrt(squares / static_cast<double>(cols) + one.eps));
    write_as(stat, rstd.host(), r, r_of[static_cast<size_t>(r)]);
  }
  for (Buffer* input : {&x.buffer, &dy.buffer, &dh.buffer, &rstd}) input->upload();
  const bool wants_dw = one.need_dw && one.has_weight;
  Buffer dx(one.need_dx ? rows * cols * size_of(type) : 0, shift_bytes(one, type));
  Buffer dw(wants_dw ? cols * size_of(one.weight_dtype) : 0, shift_bytes(one, one.weight_dtype));

  RmsNormBackward call;
  call.dy = dy.buffer.device();
  call.dh = one.has_dh ? dh.buffer.device() : nullptr;
  call.x = x.buffer.device();
  call.weight = one.has_weight ? weight.buffer.device() : nullptr;
  call.rstd = rstd.device();
  call.dx = one.need_dx ? dx.device() : nullptr;
  call.dw = wants_dw ? dw.device() : nullptr;
  call.rows = rows;
  call.cols = cols;
  call.dy_row_stride = dy.stride;
  call.dh_row_stride = dh.stride;
  call.x_row_stride = x.stride;
  call.weight_stride = one.weight_stride;
  call.offset = one.offset;
  call.x_dtype = type;
  call.weight_dtype = one.weight_dtype;
  call.round_before_weight = one.round_before_weight;
  report->took("backward", rms_norm_backward_path(call));
  // Poisoned NaN, so that a workspace row that is read but was never written shows.
  Buffer workspace(rms_norm_backward_workspace_bytes(call), 0);
  workspace.fill(0xff);
  call.workspace = workspace.device();
  const bool ran = run_twice(one, report, "backward", {&x.buffer, &dy.buffer, &dh.buffer, &weight.buffer, &rstd},
                             {&dx, &dw}, [&] {
                               workspace.upload();
                               return rms_norm_backward(call, nullptr);
                             });
  if (!workspace.download()) report->fail(one, "backward: wrote outside the workspace");
  if (!ran) return;

  const double error = float_error(one);
  std::vector<double> want_dw(static_cast<size_t>(cols), 0.0), size_dw(static_cast<size_t>(cols), 0.0);
  std::vector<double> mean(static_cast<size_t>(rows)), size(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    const double rs = r_of[static_cast<size_t>(r)];
    double sum = 0.0, absolute = 0.0;
    for (int64_t c = 0; c < cols; ++c) {
      const double g = dy.at(r, c), xhat = x.at(r, c) * rs;
      const double term = g * weight.gain[static_cast<size_t>(c)] * xhat;
      sum += term;
      absolute += std::fabs(term);
      // The same float32 product the kernels round, so that both see the same side of every tie.
      const double product = one.round_before_weight && type != DType::float64
                                 ? rounded(type, static_cast<double>(static_cast<float>(x.at(r, c)) *
                                                                     static_cast<float>(rs)))
                                 : xhat;
      want_dw[static_cast<size_t>(c)] += g * product;
      size_dw[static_cast<size_t>(c)] += std::fabs(g * product);
    }
    mean[static_cast<size_t>(r)] = sum / static_cast<double>(cols);
    size[static_cast<size_t>(r)] = absolute / static_cast<double>(cols);
  }
  const auto parts = [&](int64_t i, double* value, double* magnitude) {
    const int64_t r = i / cols, c = i % cols;
    const double rs = r_of[static_cast<size_t>(r)], xhat = x.at(r, c) * rs;
    const double wdy = dy.at(r, c) * weight.gain[static_cast<size_t>(c)];
    const double extra = one.has_dh ? dh.at(r, c) : 0.0;
    *value = rs * (wdy - xhat * mean[static_cast<size_t>(r)]) + extra;
    *magnitude = rs * (std::fabs(wdy) + std::fabs(xhat) * size[static_cast<size_t>(r)]) + std::fabs(extra);
  };
  if (one.need_dx) {
    compare(
        one, report, "dx", type, dx.host(), rows * cols, 0.0,
        [&](int64_t i) {
          double value, magnitude;
          parts(i, &value, &magnitude);
          return value;
        },
        [&](int64_t i, double want) {
          double value, magnitude;
          parts(i, &value, &magnitude);
          return 1.01 * half_ulp(type, want) + error * magnitude;
        });
  }
  if (wants_dw) {
    // 6 sqrt(n) + 8 units of the sum of magnitudes: the bound of docs/numerics.md, for a sum of n = rows in any order.
    // The reference adds in float64 too, row after row, which float64 rows meet: n units more there.
    const double chain = 6.0 * std::sqrt(static_cast<double>(rows)) + 8.0;
    const double unit = type == DType::float64 ? std::ldexp(chain + static_cast<double>(rows), -53)
                                               : std::ldexp(chain, -24);
    compare(one, report, "dw", one.weight_dtype, dw.host(), cols, 0.0,
            [&](int64_t i) { return want_dw[static_cast<size_t>(i)]; },
            [&](int64_t i, double want) {
              return 1.01 * half_ulp(one.weight_dtype, want) + unit * size_dw[static_cast<size_t>(i)];
            });
  }
}

inline void check(const Case& one, Report* report) {
  ++report->cases;
  check_forward(one, report);
  check_backward(one, report);
}

// Rows 2^31 + 8 elements apart: a 32-bit product of row and stride lands elsewhere. 9 GB, skipped where they are not.
inline void check_far_rows(Report* report) {
  const int64_t rows = 3, cols = 1024, stride = (int64_t{1} << 31) + 8;
  Case one;
  one.name = "rows 2^31 elements apart";
  one.x_dtype = one.weight_dtype = DType::bfloat16;
  one.rows = rows;
  one.cols = cols;
  void* far = nullptr;
  if (cudaMalloc(&far, static_cast<size_t>(((rows - 1) * stride + cols) * 2)) != cudaSuccess) {
    cudaGetLastError();
    std::printf("skipped: %s (no memory)\n", one.name);
    return;
  }
  ++report->cases;
  // The same rows near and far: both calls must give the same bits.
  Tensor near(one, DType::bfloat16, rows, cols);
  randomise(&near, rows, cols, 9, 1.0);
  near.buffer.upload();
  for (int64_t r = 0; r < rows; ++r) {
    const char* source = static_cast<char*>(near.buffer.device()) + r * cols * 2;
    CHECKED(cudaMemcpy(static_cast<char*>(far) + r * stride * 2, source, static_cast<size_t>(cols * 2),
                       cudaMemcpyDeviceToDevice));
  }
  Buffer y(rows * cols * 2, 0), rstd(rows * 4, 0), dx(rows * cols * 2, 0);
  std::vector<unsigned char> bits[2];
  for (const int is_far : {0, 1}) {
    for (Buffer* output : {&y, &rstd, &dx}) {
      output->fill(0xff);
      output->upload();
    }
    RmsNormForward forward;
    forward.x = is_far ? far : near.buffer.device();
    forward.y = y.device();
    forward.rstd = rstd.device();
    forward.rows = rows;
    forward.cols = cols;
    forward.x_row_stride = is_far ? stride : cols;
    forward.x_dtype = forward.weight_dtype = DType::bfloat16;
    CHECKED(rms_norm_forward(forward, nullptr));
    RmsNormBackward backward;
    backward.dy = backward.dh = backward.x = forward.x;
    backward.rstd = rstd.device();
    backward.dx = dx.device();
    backward.rows = rows;
    backward.cols = cols;
    backward.dy_row_stride = backward.dh_row_stride = backward.x_row_stride = forward.x_row_stride;
    backward.x_dtype = backward.weight_dtype = DType::bfloat16;
    CHECKED(rms_norm_backward(backward, nullptr));
    CHECKED(cudaDeviceSynchronize());
    for (Buffer* output : {&y, &dx}) {
      output->download();
      const auto body = output->body();
      bits[is_far].insert(bits[is_far].end(), body.begin(), body.end());
    }
  }
  if (bits[0] != bits[1]) report->fail(one, "differs from the same rows side by side");
  cudaFree(far);
}

inline void check_empty_and_refused(Report* report) {
  Case one;
  one.name = "empty and refused";
  one.cols = 96;
  one.rows = 0;
  ++report->cases;
  Buffer dw(96 * 4, 0), other(96 * 4, 0);
  dw.fill(0xff);
  dw.upload();
  other.upload();
  RmsNormBackward backward;
  backward.cols = 96;
  backward.weight = other.device();
  backward.dw = dw.device();
  if (rms_norm_backward_workspace_bytes(backward) != 0) report->fail(one, "a workspace for no rows");
  if (rms_norm_backward(backward, nullptr) != cudaSuccess) report->fail(one, "backward of no rows");
  CHECKED(cudaDeviceSynchronize());
  const bool clean = dw.download();
  const auto zeros = dw.body();
  if (!clean || std::any_of(zeros.begin(), zeros.end(), [](unsigned char b) { return b != 0; })) {
    report->fail(one, "dw of no rows is not zero");
  }
  RmsNormForward forward;
  forward.cols = 96;
  if (rms_norm_forward(forward, nullptr) != cudaSuccess) report->fail(one, "forward of no rows");
  forward.rows = 4;
  forward.cols = 0;
  if (rms_norm_forward(forward, nullptr) != cudaSuccess) report->fail(one, "forward of no columns");

  const auto refused = [&](const char* what, cudaError_t status) {
    if (status != cudaErrorInvalidValue) report->fail(one, std::string("not refused: ") + what);
  };
  forward.cols = 96;
  refused("null x", rms_norm_forward(forward, nullptr));
  forward.x = forward.y = forward.rstd = other.device();
  forward.residual = other.device();
  refused("residual without h", rms_norm_forward(forward, nullptr));
  forward.residual = nullptr;
  forward.x_row_stride = -1;
  refused("negative stride", rms_norm_forward(forward, nullptr));
  forward.x_row_stride = 96;
  forward.weight = other.device();
  forward.weight_dtype = DType::float16;
  refused("float16 weight with float32 rows", rms_norm_forward(forward, nullptr));
  backward.rows = 4;
  backward.dy = backward.x = backward.rstd = other.device();
  refused("dw without workspace", rms_norm_backward(backward, nullptr));
  backward.weight = nullptr;
  refused("dw without weight", rms_norm_backward(backward, nullptr));
  if (cudaGetLastError() != cudaSuccess) report->fail(one, "a refusal left an error behind");
}

}  // namespace
