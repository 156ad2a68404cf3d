// RMSNorm forward for float16 rows.
#include "forward_launch.cuh"

namespace triptych {
namespace cuda {

template cudaError_t forward_of<__half>(const RmsNormForward&, cudaStream_t);
template Plan forward_plan_of<__half>(const RmsNormForward&, const DeviceFacts&);

}  // namespace cuda
}  // namespace triptych
