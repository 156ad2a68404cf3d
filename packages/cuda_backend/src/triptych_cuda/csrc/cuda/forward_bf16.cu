// RMSNorm forward for bfloat16 rows.
#include "forward_launch.cuh"

namespace triptych {
namespace cuda {

template cudaError_t forward_of<__nv_bfloat16>(const RmsNormForward&, cudaStream_t);
template Plan forward_plan_of<__nv_bfloat16>(const RmsNormForward&, const DeviceFacts&);

}  // namespace cuda
}  // namespace triptych
