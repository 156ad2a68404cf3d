// RMSNorm forward for float32 rows.
#include "forward_launch.cuh"

namespace triptych {
namespace cuda {

template cudaError_t forward_of<float>(const RmsNormForward&, cudaStream_t);
template Plan forward_plan_of<float>(const RmsNormForward&, const DeviceFacts&);

}  // namespace cuda
}  // namespace triptych
