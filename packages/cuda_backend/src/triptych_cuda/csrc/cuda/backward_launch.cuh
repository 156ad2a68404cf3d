// Chooses and launches the backward kernels of one dtype. Each backward_<dtype>.cu instantiates it.
#pragma once

#include "backward_looped.cuh"
#include "dw_sum.h"
#include "launch.cuh"

namespace triptych {
namespace cuda {

struct BackwardPlan {
  Plan plan;
  bool packs = false;     // 16-byte accesses
  int64_t blocks = 0;     // of the main kernel
  int64_t partials = 0;   // workspace rows
};

template <class T>
cudaError_t backward_of(const RmsNormBackward& call, cudaStream_t stream);
template <class T>
cudaError_t backward_plan_of(const RmsNormBackward& call, BackwardPlan* out);

template <class T>
using BackwardKernel = void (*)(BackwardArgs<T>);

template <class T, bool kVector, bool kDh>
BackwardKernel<T> backward_kernel(const Plan& plan) {
  if (plan.path == Path::warp) return rms_norm_backward_streamed<T, Scope::warp, 1, kVector, kDh>;
  if constexpr (kVector) {
    if (plan.path == Path::cluster) return rms_norm_backward_streamed<T, Scope::cluster, 4, true, kDh>;
  }
  if (plan.packs == 4) return rms_norm_backward_streamed<T, Scope::block, 4, kVector, kDh>;
  return plan.threads == plan.width ? rms_norm_backward_streamed<T, Scope::block, 1, kVector, kDh>
                                    : rms_norm_backward_streamed<T, Scope::team, 1, kVector, kDh>;
}

template <class T>
BackwardKernel<T> backward_kernel(const Plan& plan, bool packs, bool dh) {
  if (packs) return dh ? backward_kernel<T, true, true>(plan) : backward_kernel<T, true, false>(plan);
  return dh ? backward_kernel<T, false, true>(plan) : backward_kernel<T, false, false>(plan);
}

template <class T, bool kDh>
int backward_shared(const Plan& plan) {
  if (plan.path == Path::warp) return streamed_shared<T, Scope::warp, 1, kDh>(plan.threads);
  return plan.packs == 1 ? streamed_shared<T, Scope::team, 1, kDh>(plan.threads)
                         : streamed_shared<T, Scope::block, 4, kDh>(plan.threads);
}

template <class T>
int backward_shared(const Plan& plan, bool dh) {
  return dh ? backward_shared<T, true>(plan) : backward_shared<T, false>(plan);
}

// allow_shared for the kernels of one dtype: 5 families, 2 alignments, with and without dh.
template <class T>
cudaError_t allow_shared(const DeviceFacts& device, const Plan& plan, bool packs, bool dh, BackwardKernel<T> kernel) {
  static std::atomic<uint64_t> asked[20] = {};
  const int family = plan.path == Path::warp      ? 0
                     : plan.path == Path::cluster ? 1
                     : plan.packs == 4            ? 2
                     : plan.threads == plan.width ? 3
                                                  : 4;
  return allow_shared(reinterpret_cast<const void*>(kernel), device,
                      &asked[family * 4 + (packs ? 2 : 0) + (dh ? 1 : 0)]);
}

// Clusters of `width` blocks of 256 or 512 threads that fit on the device at once (GPCs differ in their number of SMs,
// so this is not SMs / width); 0 when there are none. Asked once for each: the query costs far more than a launch.
template <class T>
int resident_clusters(const DeviceFacts& device, const Plan& plan) {
  static std::atomic<int> known[64][8] = {};  // the answer + 1
  Plan full = plan;
  full.threads = plan.threads <= 256 ? 256 : 512;
  const int index = (plan.width == 2 ? 0 : plan.width == 4 ? 1 : plan.width == 8 ? 2 : 3) * 2 + full.threads / 512;
  if (device.device < 64) {
    const int answer = known[device.device][index].load(std::memory_order_relaxed);
    if (answer != 0) return answer - 1;
  }
  const auto kernel = backward_kernel<T, true, true>(full);
  int clusters = 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.width));
  config.blockDim = dim3(static_cast<unsigned>(full.threads));
  config.dynamicSmemBytes = static_cast<size_t>(backward_shared<T>(full, true));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(plan.width);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (allow_shared<T>(device, full, true, true, kernel) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, reinterpret_cast<const void*>(kernel), &config) != cudaSuccess) {
    cudaGetLastError();  // the looped kernels take the call instead
    clusters = 0;
  }
  if (device.device < 64) known[device.device][index].store(clusters + 1, std::memory_order_relaxed);
  return clusters;
}

template <class T>
bool backward_takes_packs(const RmsNormBackward& call) {
  constexpr int kWidth = kPackWidth<T>;
  return call.cols % kWidth == 0 && takes_packs(call.x, call.rows, call.x_row_stride, kWidth) &&
         takes_packs(call.dy, call.rows, call.dy_row_stride, kWidth) &&
         takes_packs(call.dh, call.rows, call.dh_row_stride, kWidth) && aligned16(call.dx);
}

inline void plan_looped(const RmsNormBackward& call, const DeviceFacts& device, BackwardPlan* out) {
  out->plan = looped_plan(call.cols);
  out->blocks = call.rows < INT32_MAX ? call.rows : INT32_MAX;
  // Enough ranges of rows for eight blocks an SM, but no range shorter than the block's eight rows.
  const int64_t strips = divide_up(call.cols, kColumnsPerBlock);
  const int64_t ranges = divide_up(int64_t{8} * device.sms, strips);
  const int64_t most = divide_up(call.rows, 8);
  out->partials = ranges < most ? ranges : most;
}

template <class T>
cudaError_t backward_plan_of(const RmsNormBackward& call, BackwardPlan* out) {
  DeviceFacts device;
  const cudaError_t status = current_device_facts(&device);
  if (status != cudaSuccess) return status;
  *out = BackwardPlan();
  if constexpr (std::is_same<T, double>::value) {
    plan_looped(call, device, out);
  } else {
    out->packs = backward_takes_packs<T>(call);
    out->plan = choose_plan(kBackwardPlans, divide_up(call.cols, kPackWidth<T>), out->packs, device);
    int64_t units = 0;  // that fit on the device
    int64_t rows_a_unit = 1;
    if (out->plan.path == Path::cluster) {
      units = resident_clusters<T>(device, out->plan);
    } else if (out->plan.path != Path::looped &&
               backward_shared<T>(out->plan, call.dh != nullptr) + kStaticShared <= device.max_shared) {
      units = static_cast<int64_t>(device.sms) * backward_blocks_per_sm(out->plan);
      if (out->plan.path == Path::warp || out->plan.packs == 1) rows_a_unit = out->plan.threads / out->plan.width;
    }
    if (units == 0) {
      plan_looped(call, device, out);
      return cudaSuccess;
    }
    const int64_t wanted = divide_up(call.rows, rows_a_unit);
    out->partials = units < wanted ? units : wanted;
    out->blocks = out->plan.path == Path::cluster ? out->partials * out->plan.width : out->partials;
  }
  return cudaSuccess;
}

template <class T, class Acc>
BackwardArgs<T, Acc> backward_args(const RmsNormBackward& call, const Plan& plan) {
  BackwardArgs<T, Acc> args;
  args.dy = static_cast<const T*>(call.dy);
  args.dh = static_cast<const T*>(call.dh);
  args.x = static_cast<const T*>(call.x);
  args.rstd = static_cast<const Acc*>(call.rstd);
  args.dx = static_cast<T*>(call.dx);
  args.partial = call.dw == nullptr ? nullptr : static_cast<Acc*>(call.workspace);
  args.rows = call.rows;
  args.cols = call.cols;
  args.dy_row_stride = call.dy_row_stride;
  args.dh_row_stride = call.dh_row_stride;
  args.x_row_stride = call.x_row_stride;
  args.weight = view_weight<T, Acc>(call.weight, call.weight_stride, call.offset, call.weight_dtype);
  args.inverse_cols = static_cast<Acc>(1.0 / static_cast<double>(call.cols));
  args.width = plan.width;
  args.round_before_weight = call.round_before_weight;
  return args;
}

template <class T, class Acc, int kWidth>
cudaError_t launch_backward_looped(const RmsNormBackward& call, const BackwardPlan& chosen, cudaStream_t stream) {
  const auto args = backward_args<T, Acc>(call, chosen.plan);
  if (call.dx != nullptr) {
    const cudaError_t status =
        launch(rms_norm_backward_rows<T, Acc, kWidth>, stream, chosen.blocks, chosen.plan.threads, 1, 0, args);
    if (status != cudaSuccess) return status;
  }
  if (call.dw == nullptr) return cudaSuccess;
  const int64_t blocks = divide_up(call.cols, kColumnsPerBlock) * chosen.partials;
  return launch(rms_norm_backward_columns<T, Acc>, stream, blocks, kColumnThreads, 1, 0, args,
                divide_up(call.rows, chosen.partials));
}

template <class T>
cudaError_t launch_backward_streamed(const RmsNormBackward& call, const BackwardPlan& chosen, cudaStream_t stream) {
  DeviceFacts device;
  cudaError_t status = current_device_facts(&device);
  if (status != cudaSuccess) return status;
  const bool dh = call.dh != nullptr;
  const auto kernel = backward_kernel<T>(chosen.plan, chosen.packs, dh);
  status = allow_shared<T>(device, chosen.plan, chosen.packs, dh, kernel);
  if (status != cudaSuccess) return status;
  const int cluster = chosen.plan.path == Path::cluster ? chosen.plan.width : 1;
  return launch(kernel, stream, chosen.blocks, chosen.plan.threads, cluster, backward_shared<T>(chosen.plan, dh),
                backward_args<T, float>(call, chosen.plan));
}

template <class T>
cudaError_t backward_of(const RmsNormBackward& call, cudaStream_t stream) {
  BackwardPlan chosen;
  cudaError_t status = backward_plan_of<T>(call, &chosen);
  if (status != cudaSuccess) return status;
  if constexpr (std::is_same<T, double>::value) {
    status = launch_backward_looped<double, double, 1>(call, chosen, stream);
  } else if (chosen.plan.path != Path::looped) {
    status = launch_backward_streamed<T>(call, chosen, stream);
  } else if (chosen.packs) {
    status = launch_backward_looped<T, float, kPackWidth<T>>(call, chosen, stream);
  } else {
    status = launch_backward_looped<T, float, 1>(call, chosen, stream);
  }
  if (status != cudaSuccess || call.dw == nullptr) return status;
  return sum_partials(call.workspace, chosen.partials, call.cols, call.dw, call.weight_dtype, stream);
}

}  // namespace cuda
}  // namespace triptych
