// The entry points of kernels.h: rules checked, dtype dispatched, device facts kept.
#include <atomic>
#include <mutex>

#include "backward_launch.cuh"
#include "forward_launch.cuh"

namespace triptych {
namespace cuda {

// Compiled in forward_<dtype>.cu and backward_<dtype>.cu.
#define TRIPTYCH_COMPILED_ELSEWHERE(T)                                          \
  extern template cudaError_t forward_of<T>(const RmsNormForward&, cudaStream_t); \
  extern template Plan forward_plan_of<T>(const RmsNormForward&, const DeviceFacts&); \
  extern template cudaError_t backward_of<T>(const RmsNormBackward&, cudaStream_t); \
  extern template cudaError_t backward_plan_of<T>(const RmsNormBackward&, BackwardPlan*);
TRIPTYCH_COMPILED_ELSEWHERE(float)
TRIPTYCH_COMPILED_ELSEWHERE(double)
TRIPTYCH_COMPILED_ELSEWHERE(__half)
TRIPTYCH_COMPILED_ELSEWHERE(__nv_bfloat16)
#undef TRIPTYCH_COMPILED_ELSEWHERE

cudaError_t current_device_facts(DeviceFacts* facts) {
  constexpr int kDevices = 64;
  static DeviceFacts known[kDevices];
  static std::atomic<bool> ready[kDevices] = {};
  static std::mutex mutex;

  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device < kDevices && ready[device].load(std::memory_order_acquire)) {
    *facts = known[device];
    return cudaSuccess;
  }
  DeviceFacts asked;
  asked.device = device;
  status = cudaDeviceGetAttribute(&asked.sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&asked.cc_major, cudaDevAttrComputeCapabilityMajor, device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&asked.max_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return status;
  if (device < kDevices) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!ready[device].load(std::memory_order_relaxed)) {
      known[device] = asked;
      ready[device].store(true, std::memory_order_release);
    }
  }
  *facts = asked;
  return cudaSuccess;
}

namespace {

int64_t bytes_of(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

bool known_dtype(DType dtype) { return dtype >= DType::float32 && dtype <= DType::float64; }

bool weight_fits(const void* weight, int64_t stride, DType weight_dtype, DType x_dtype) {
  if (!known_dtype(x_dtype) || !known_dtype(weight_dtype)) return false;
  if (weight == nullptr) return true;
  if (stride < 0) return false;
  if (x_dtype == DType::float64 || weight_dtype == DType::float64) return x_dtype == weight_dtype;
  return weight_dtype == DType::float32 || x_dtype != DType::float32;
}

bool empty(int64_t rows, int64_t cols) { return rows == 0 || cols == 0; }

bool follows_the_rules(const RmsNormForward& call) {
  if (call.rows < 0 || call.cols < 0) return false;
  if (!weight_fits(call.weight, call.weight_stride, call.weight_dtype, call.x_dtype)) return false;
  if (empty(call.rows, call.cols)) return true;
  return call.x != nullptr && call.y != nullptr && call.rstd != nullptr &&
         (call.residual == nullptr) == (call.h == nullptr) && call.x_row_stride >= 0 && call.residual_row_stride >= 0;
}

bool follows_the_rules(const RmsNormBackward& call) {
  if (call.rows < 0 || call.cols < 0) return false;
  if (!weight_fits(call.weight, call.weight_stride, call.weight_dtype, call.x_dtype)) return false;
  if (empty(call.rows, call.cols)) return true;
  return call.dy != nullptr && call.x != nullptr && call.rstd != nullptr &&
         (call.dw == nullptr || call.weight != nullptr) && call.dy_row_stride >= 0 && call.dh_row_stride >= 0 &&
         call.x_row_stride >= 0;
}

cudaError_t backward_plan(const RmsNormBackward& call, BackwardPlan* plan) {
  switch (call.x_dtype) {
    case DType::float32: return backward_plan_of<float>(call, plan);
    case DType::float16: return backward_plan_of<__half>(call, plan);
    case DType::bfloat16: return backward_plan_of<__nv_bfloat16>(call, plan);
    case DType::float64: return backward_plan_of<double>(call, plan);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t rms_norm_forward(const RmsNormForward& call, cudaStream_t stream) {
  if (!follows_the_rules(call)) return cudaErrorInvalidValue;
  if (empty(call.rows, call.cols)) return cudaSuccess;
  switch (call.x_dtype) {
    case DType::float32: return forward_of<float>(call, stream);
    case DType::float16: return forward_of<__half>(call, stream);
    case DType::bfloat16: return forward_of<__nv_bfloat16>(call, stream);
    case DType::float64: return forward_of<double>(call, stream);
  }
  return cudaErrorInvalidValue;
}

int64_t rms_norm_backward_workspace_bytes(const RmsNormBackward& call) {
  if (!follows_the_rules(call) || empty(call.rows, call.cols) || call.dw == nullptr) return 0;
  BackwardPlan plan;
  if (backward_plan(call, &plan) != cudaSuccess) return 0;  // rms_norm_backward will return the error
  return plan.partials * call.cols * (call.x_dtype == DType::float64 ? 8 : 4);
}

cudaError_t rms_norm_backward(const RmsNormBackward& call, cudaStream_t stream) {
  if (!follows_the_rules(call)) return cudaErrorInvalidValue;
  if (call.cols == 0 || (call.dx == nullptr && call.dw == nullptr)) return cudaSuccess;
  if (call.rows == 0) {
    if (call.dw == nullptr) return cudaSuccess;
    return cudaMemsetAsync(call.dw, 0, static_cast<size_t>(call.cols * bytes_of(call.weight_dtype)), stream);
  }
  if (call.dw != nullptr && (call.workspace == nullptr || !aligned16(call.workspace))) {
    // No workspace may be the consequence of an error that rms_norm_backward_workspace_bytes could not report.
    BackwardPlan plan;
    const cudaError_t status = backward_plan(call, &plan);
    return status == cudaSuccess ? cudaErrorInvalidValue : status;
  }
  switch (call.x_dtype) {
    case DType::float32: return backward_of<float>(call, stream);
    case DType::float16: return backward_of<__half>(call, stream);
    case DType::bfloat16: return backward_of<__nv_bfloat16>(call, stream);
    case DType::float64: return backward_of<double>(call, stream);
  }
  return cudaErrorInvalidValue;
}

Path rms_norm_forward_path(const RmsNormForward& call) {
  DeviceFacts device;
  if (!follows_the_rules(call) || empty(call.rows, call.cols) || current_device_facts(&device) != cudaSuccess) {
    return Path::none;
  }
  switch (call.x_dtype) {
    case DType::float32: return forward_plan_of<float>(call, device).path;
    case DType::float16: return forward_plan_of<__half>(call, device).path;
    case DType::bfloat16: return forward_plan_of<__nv_bfloat16>(call, device).path;
    case DType::float64: return forward_plan_of<double>(call, device).path;
  }
  return Path::none;
}

Path rms_norm_backward_path(const RmsNormBackward& call) {
  BackwardPlan plan;
  if (!follows_the_rules(call) || empty(call.rows, call.cols) || backward_plan(call, &plan) != cudaSuccess) {
    return Path::none;
  }
  return plan.plan.path;
}

}  // namespace cuda
}  // namespace triptych
