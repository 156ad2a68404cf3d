// What every launch shares: alignment, the weight's view, and the launch itself.
#pragma once

#include <atomic>

#include "plan.h"
#include "row_group.cuh"
#include "weights.cuh"

namespace triptych {
namespace cuda {

inline bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// May a [rows, cols] tensor of `width` elements a pack be read or written 16 bytes at a time? (null: not there)
inline bool takes_packs(const void* pointer, int64_t rows, int64_t row_stride, int width) {
  return pointer == nullptr || (aligned16(pointer) && (rows == 1 || row_stride % width == 0));
}

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> { static constexpr DType value = DType::float32; };
template <>
struct DTypeOf<double> { static constexpr DType value = DType::float64; };
template <>
struct DTypeOf<__half> { static constexpr DType value = DType::float16; };
template <>
struct DTypeOf<__nv_bfloat16> { static constexpr DType value = DType::bfloat16; };

template <class T, class Acc>
WeightView<Acc> view_weight(const void* weight, int64_t stride, double offset, DType dtype) {
  WeightView<Acc> view{weight, stride, static_cast<Acc>(offset), dtype, WeightAccess::one_by_one};
  if (weight == nullptr) {
    view.access = WeightAccess::none;
  } else if (stride == 1 && aligned16(weight)) {
    if (dtype == DTypeOf<T>::value) {
      view.access = WeightAccess::same_packs;
    } else if (dtype == DType::float32) {
      view.access = WeightAccess::float_packs;
    }
  }
  return view;
}

// Static shared memory of a kernel, at most: it counts against the limit of the dynamic kind.
constexpr int kStaticShared = 2 * kSlots<Scope::cluster> * static_cast<int>(sizeof(float));

// More than 48 KB of dynamic shared memory must be asked for, once per kernel and device, and so must the split of L1
// that lets all of an SM's blocks be there together: with less, a part of a persistent grid would wait for the rest to
// end. `asked`: one of the kernel's own, a bit a device.
inline cudaError_t allow_shared(const void* kernel, const DeviceFacts& device, std::atomic<uint64_t>* asked) {
  const uint64_t bit = device.device < 64 ? uint64_t{1} << device.device : 0;
  if ((asked->load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            device.max_shared - kStaticShared);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (status == cudaSuccess) asked->fetch_or(bit, std::memory_order_relaxed);
  return status;
}

// `cluster`: blocks of a cluster, 1 for none.
template <class... Parameters, class... Args>
cudaError_t launch(void (*kernel)(Parameters...), cudaStream_t stream, int64_t blocks, int threads, int cluster,
                   int shared, const Args&... args) {
  if (blocks < 1 || blocks > INT32_MAX) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace cuda
}  // namespace triptych
