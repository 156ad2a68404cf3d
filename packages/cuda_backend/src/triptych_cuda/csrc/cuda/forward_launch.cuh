// Chooses and launches the forward kernel of one dtype. Each forward_<dtype>.cu instantiates it, so that the
// compilations run side by side.
#pragma once

#include "forward_kernels.cuh"
#include "launch.cuh"

namespace triptych {
namespace cuda {

template <class T>
cudaError_t forward_of(const RmsNormForward& call, cudaStream_t stream);
template <class T>
Plan forward_plan_of(const RmsNormForward& call, const DeviceFacts& device);

template <class T>
bool forward_takes_packs(const RmsNormForward& call) {
  constexpr int kWidth = kPackWidth<T>;
  return call.cols % kWidth == 0 && takes_packs(call.x, call.rows, call.x_row_stride, kWidth) &&
         takes_packs(call.residual, call.rows, call.residual_row_stride, kWidth) && aligned16(call.y) &&
         aligned16(call.h);
}

template <class T>
Plan forward_plan_of(const RmsNormForward& call, const DeviceFacts& device) {
  const int64_t packs = divide_up(call.cols, kPackWidth<T>);
  if constexpr (std::is_same<T, double>::value) {
    return looped_plan(packs);
  } else {
    const bool vectors = forward_takes_packs<T>(call);
    return call.residual != nullptr ? choose_plan(kForwardAddPlans, packs, vectors, device)
                                    : choose_plan(kForwardPlans, packs, vectors, device);
  }
}

template <class T>
using ForwardKernel = void (*)(ForwardArgs<T>);

template <class T, bool kVector, bool kPackedWeight, bool kResidual>
ForwardKernel<T> forward_kernel(const Plan& plan) {
  if (plan.path == Path::warp) {
    return plan.packs == 1 ? rms_norm_forward_held<T, Scope::warp, 1, kVector, kPackedWeight, kResidual>
                           : rms_norm_forward_held<T, Scope::warp, 4, kVector, kPackedWeight, kResidual>;
  }
  if constexpr (kVector) {
    if (plan.path == Path::cluster) {
      return plan.packs == 4 ? rms_norm_forward_held<T, Scope::cluster, 4, true, kPackedWeight, kResidual>
                             : rms_norm_forward_held<T, Scope::cluster, 8, true, kPackedWeight, kResidual>;
    }
    if (plan.packs == 8) return rms_norm_forward_held<T, Scope::block, 8, true, kPackedWeight, kResidual>;
  }
  return rms_norm_forward_held<T, Scope::block, 4, kVector, kPackedWeight, kResidual>;
}

template <class T, bool kPackedWeight>
ForwardKernel<T> forward_staged_kernel(const Plan& plan) {
  return plan.path == Path::cluster ? rms_norm_forward_staged<T, Scope::cluster, 8, kPackedWeight>
                                    : rms_norm_forward_staged<T, Scope::block, 4, kPackedWeight>;
}

template <class T, class Acc>
ForwardArgs<T, Acc> forward_args(const RmsNormForward& call, const Plan& plan) {
  ForwardArgs<T, Acc> args;
  args.x = static_cast<const T*>(call.x);
  args.residual = static_cast<const T*>(call.residual);
  args.y = static_cast<T*>(call.y);
  args.h = static_cast<T*>(call.h);
  args.rstd = static_cast<Acc*>(call.rstd);
  args.rows = call.rows;
  args.cols = call.cols;
  args.x_row_stride = call.x_row_stride;
  args.residual_row_stride = call.residual_row_stride;
  args.weight = view_weight<T, Acc>(call.weight, call.weight_stride, call.offset, call.weight_dtype);
  args.eps = static_cast<Acc>(call.eps);
  args.inverse_cols = static_cast<Acc>(1.0 / static_cast<double>(call.cols));
  args.width = plan.width;
  args.round_before_weight = call.round_before_weight;
  return args;
}

template <class T, class Acc, int kWidth>
cudaError_t launch_forward_looped(const RmsNormForward& call, const Plan& plan, cudaStream_t stream) {
  const auto args = forward_args<T, Acc>(call, plan);
  const int64_t blocks = call.rows < INT32_MAX ? call.rows : INT32_MAX;
  auto* kernel = call.residual != nullptr ? rms_norm_forward_looped<T, Acc, kWidth, true>
                                          : rms_norm_forward_looped<T, Acc, kWidth, false>;
  return launch(kernel, stream, blocks, plan.threads, 1, 0, args);
}

template <class T>
cudaError_t launch_forward_staged(const RmsNormForward& call, const Plan& plan, const DeviceFacts& device,
                                  cudaStream_t stream) {
  static std::atomic<uint64_t> asked[4] = {};
  const auto args = forward_args<T, float>(call, plan);
  const bool packed = args.weight.access == WeightAccess::same_packs;
  const bool cluster = plan.path == Path::cluster;
  const auto kernel = packed ? forward_staged_kernel<T, true>(plan) : forward_staged_kernel<T, false>(plan);
  const cudaError_t status =
      allow_shared(reinterpret_cast<const void*>(kernel), device, &asked[(packed ? 1 : 0) + (cluster ? 2 : 0)]);
  if (status != cudaSuccess) return status;
  return launch(kernel, stream, call.rows * plan.width, plan.threads, plan.width, plan.packs * plan.threads * 16, args);
}

template <class T, bool kResidual>
cudaError_t launch_forward_held(const RmsNormForward& call, const Plan& plan, bool packs, cudaStream_t stream) {
  const auto args = forward_args<T, float>(call, plan);
  ForwardKernel<T> kernel;
  if (!packs) {
    kernel = forward_kernel<T, false, false, kResidual>(plan);
  } else if (!kResidual && args.weight.access == WeightAccess::same_packs) {
    kernel = forward_kernel<T, true, !kResidual, kResidual>(plan);
  } else {
    kernel = forward_kernel<T, true, false, kResidual>(plan);
  }
  if (plan.path == Path::warp) {
    return launch(kernel, stream, divide_up(call.rows, plan.threads / plan.width), plan.threads, 1, 0, args);
  }
  return launch(kernel, stream, call.rows * plan.width, plan.threads, plan.width, 0, args);
}

template <class T>
cudaError_t forward_of(const RmsNormForward& call, cudaStream_t stream) {
  DeviceFacts device;
  const cudaError_t status = current_device_facts(&device);
  if (status != cudaSuccess) return status;
  const Plan plan = forward_plan_of<T>(call, device);
  if constexpr (std::is_same<T, double>::value) {
    return launch_forward_looped<double, double, 1>(call, plan, stream);
  } else {
    const bool packs = forward_takes_packs<T>(call);
    if (plan.path == Path::looped) {
      return packs ? launch_forward_looped<T, float, kPackWidth<T>>(call, plan, stream)
                   : launch_forward_looped<T, float, 1>(call, plan, stream);
    }
    if (plan.staged) return launch_forward_staged<T>(call, plan, device, stream);
    return call.residual != nullptr ? launch_forward_held<T, true>(call, plan, packs, stream)
                                    : launch_forward_held<T, false>(call, plan, packs, stream);
  }
}

}  // namespace cuda
}  // namespace triptych
