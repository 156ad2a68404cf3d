// One case of check_kernels.cu: inputs, the float64 reference, the run under two fill patterns, the comparison.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels.h"

namespace {

using triptych::cuda::DType;
using triptych::cuda::Path;
using triptych::cuda::RmsNormBackward;
using triptych::cuda::RmsNormForward;

#define CHECKED(call)                                                                                  \
  do {                                                                                                 \
    const cudaError_t checked_status = (call);                                                         \
    if (checked_status != cudaSuccess) {                                                               \
      std::printf("FATAL %s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(checked_status)); \
      std::exit(3);                                                                                    \
    }                                                                                                  \
  } while (0)

// ---- dtypes on the host ------------------------------------------------------------------------------------------

inline int64_t size_of(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return "float32";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    default: return "float64";
  }
}

inline double read_as(DType dtype, const void* data, int64_t index) {
  if (dtype == DType::float64) return static_cast<const double*>(data)[index];
  if (dtype == DType::float32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  if (dtype == DType::float16) {
    __half_raw raw;
    raw.x = bits;
    return __half2float(__half(raw));
  }
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline void write_as(DType dtype, void* data, int64_t index, double value) {
  if (dtype == DType::float64) {
    static_cast<double*>(data)[index] = value;
  } else if (dtype == DType::float32) {
    static_cast<float*>(data)[index] = static_cast<float>(value);
  } else if (dtype == DType::float16) {
    const __half_raw raw = __float2half_rn(static_cast<float>(value));
    static_cast<uint16_t*>(data)[index] = raw.x;
  } else {
    const float narrow = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &narrow, 4);
    const uint32_t rounded = std::isnan(value) ? 0x7fffffffu : bits + 0x7fffu + ((bits >> 16) & 1u);
    static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(rounded >> 16);
  }
}

inline double rounded(DType dtype, double value) {
  uint64_t cell = 0;
  write_as(dtype, &cell, 0, value);
  return read_as(dtype, &cell, 0);
}

// Half the distance to the next value of the dtype, relative, and the same for its subnormal numbers, absolute.
inline double half_ulp(DType dtype, double value) {
  switch (dtype) {
    case DType::float64: return std::ldexp(std::fabs(value), -53);
    case DType::float32: return std::ldexp(std::fabs(value), -24) + 1e-45;
    case DType::float16: return std::ldexp(std::fabs(value), -11) + std::ldexp(1.0, -25);
    default: return std::ldexp(std::fabs(value), -8) + 1e-40;
  }
}

// ---- device buffers between guard zones ----------------------------------------------------------------------

constexpr int64_t kGuard = 1024;
constexpr unsigned char kGuardByte = 0xff;  // NaN in every dtype

class Buffer {
 public:
  // `shift` bytes off 16-byte alignment. `body` stands for the whole buffer on the host.
  Buffer(int64_t bytes, int64_t shift) : bytes_(bytes), shift_(shift) {
    CHECKED(cudaMalloc(&base_, static_cast<size_t>(total())));
    host_.assign(static_cast<size_t>(total()), kGuardByte);
  }
  ~Buffer() { cudaFree(base_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* device() const { return static_cast<char*>(base_) + kGuard + shift_; }
  void* host() { return host_.data() + kGuard + shift_; }
  void fill(unsigned char byte) { std::memset(host(), byte, static_cast<size_t>(bytes_)); }
  void upload() { CHECKED(cudaMemcpy(base_, host_.data(), static_cast<size_t>(total()), cudaMemcpyHostToDevice)); }

  // For inputs: nothing at all may have changed. For outputs: nothing outside the body; the body comes to the host.
  bool unchanged() {
    fetch();
    return fetched_ == host_;
  }
  bool download() {
    fetch();
    const size_t body = static_cast<size_t>(kGuard + shift_), end = body + static_cast<size_t>(bytes_);
    const bool clean = std::memcmp(fetched_.data(), host_.data(), body) == 0 &&
                       std::memcmp(fetched_.data() + end, host_.data() + end, fetched_.size() - end) == 0;
    host_ = fetched_;
    return clean;
  }
  std::vector<unsigned char> body() {
    const auto* start = static_cast<unsigned char*>(host());
    return std::vector<unsigned char>(start, start + bytes_);
  }

 private:
  int64_t total() const { return bytes_ + shift_ + 2 * kGuard; }
  void fetch() {
    fetched_.resize(host_.size());
    CHECKED(cudaMemcpy(fetched_.data(), base_, host_.size(), cudaMemcpyDeviceToHost));
  }
  int64_t bytes_, shift_;
  void* base_ = nullptr;
  std::vector<unsigned char> host_, fetched_;
};

// ---- the case ------------------------------------------------------------------------------------------------

struct Case {
  const char* name = "";
  DType x_dtype = DType::float32, weight_dtype = DType::float32;
  int64_t rows = 1, cols = 1;
  int64_t shift = 0;         // elements off alignment, every [R, N] tensor and the weight
  int64_t weight_shift = 0;  // the weight alone
  int64_t padding = 0;       // elements between the rows of inputs
  int64_t weight_stride = 1;
  bool x_stride_zero = false, dy_stride_zero = false;
  bool has_weight = true, has_residual = false, has_dh = false;
  bool need_dx = true, need_dw = true;
  bool round_before_weight = false;
  double eps = 1e-5, offset = 0.0;
};

struct Report {
  int cases = 0, failures = 0;
  std::map<std::string, int> paths;

  void fail(const Case& one, const std::string& what) {
    ++failures;
    const char* weight = one.has_weight ? name_of(one.weight_dtype) : "none";
    std::printf("FAIL [%lld, %lld] %s, weight %s, %s: %s\n", static_cast<long long>(one.rows),
                static_cast<long long>(one.cols), name_of(one.x_dtype), weight, one.name, what.c_str());
    std::fflush(stdout);
  }
  void took(const char* phase, Path path) {
    static const char* const kNames[] = {"none", "warp", "block", "cluster", "looped"};
    ++paths[std::string(phase) + " " + kNames[static_cast<int>(path)]];
  }
  void print(bool expect_all) {
    int major = 0, device = 0;
    CHECKED(cudaGetDevice(&device));
    CHECKED(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    for (const char* phase : {"forward", "backward"}) {
      for (const char* path : {"warp", "block", "cluster", "looped"}) {
        const std::string key = std::string(phase) + " " + path;
        std::printf("%s: %d calls\n", key.c_str(), paths[key]);
        const bool possible = major >= 9 || std::strcmp(path, "cluster") != 0;
        if (expect_all && possible && paths[key] == 0) {
          ++failures;
          std::printf("FAIL no case took the path '%s'\n", key.c_str());
        }
      }
    }
    std::printf("%s: %d cases, %d failures\n", failures == 0 ? "PASS" : "FAIL", cases, failures);
  }
};

// A fresh stream of values for every tensor of every case; the same ones on every run.
class Values {
 public:
  explicit Values(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  double next() {  // in [-1, 1)
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(static_cast<int64_t>(state_) >> 11) / 4503599627370496.0;
  }

 private:
  uint64_t state_;
};

inline int64_t stride_of(const Case& one, bool zero) { return zero ? 0 : one.cols + one.padding; }

struct Tensor {
  Buffer buffer;
  DType dtype;
  int64_t stride;
  Tensor(const Case& one, DType type, int64_t rows, int64_t row_stride)
      : buffer(((rows - 1) * row_stride + one.cols) * size_of(type), one.shift * size_of(type)), dtype(type),
        stride(row_stride) {
    buffer.fill(kGuardByte);
  }
  double at(int64_t row, int64_t col) { return read_as(dtype, buffer.host(), row * stride + col); }
  void set(int64_t row, int64_t col, double value) { write_as(dtype, buffer.host(), row * stride + col, value); }
};

// Rows differ in scale, so that a statistic of another row cannot pass.
inline void randomise(Tensor* tensor, int64_t rows, int64_t cols, uint64_t seed, double spread) {
  Values values(seed);
  for (int64_t r = 0; r < (tensor->stride == 0 ? 1 : rows); ++r) {
    const double scale = spread * std::exp2(static_cast<double>(r % 5) - 2.0);
    for (int64_t c = 0; c < cols; ++c) tensor->set(r, c, scale * (values.next() + values.next()));
  }
}

// Compares one output with its reference. `tolerance` gives the allowed absolute error at an element; `exact` of the
// elements must be the reference rounded once (the rest may fall on the other side of a tie).
template <class Reference, class Tolerance>
void compare(const Case& one, Report* report, const char* what, DType dtype, const void* data, int64_t count,
             double exact, Reference reference, Tolerance tolerance) {
  int64_t bad = 0, first = -1, inexact = 0;
  double got_first = 0.0, want_first = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double got = read_as(dtype, data, i), want = reference(i);
    if (got != rounded(dtype, want)) ++inexact;
    const bool good = std::fabs(got - want) <= tolerance(i, want);  // false for NaN
    if (!good && bad++ == 0) {
      first = i;
      got_first = got;
      want_first = want;
    }
  }
  char line[256];
  if (bad > 0) {
    std::snprintf(line, sizeof line, "%s: %lld of %lld wrong, first at %lld: %.9g, expected %.9g", what,
                  static_cast<long long>(bad), static_cast<long long>(count), static_cast<long long>(first), got_first,
                  want_first);
    report->fail(one, line);
  } else if (static_cast<double>(inexact) > (1.0 - exact) * static_cast<double>(count) + 3.0) {
    std::snprintf(line, sizeof line, "%s: %lld of %lld are not the reference rounded once", what,
                  static_cast<long long>(inexact), static_cast<long long>(count));
    report->fail(one, line);
  }
}

inline double float_error(const Case& one) {  // relative, of the float32 sums along a row
  const double unit = one.x_dtype == DType::float64 ? std::ldexp(1.0, -53) : std::ldexp(1.0, -24);
  return unit * (32.0 + static_cast<double>(one.cols) / 512.0);
}

inline bool is_half(DType dtype) { return size_of(dtype) == 2; }

}  // namespace
