// RMSNorm forward for float64 rows.
#include "forward_launch.cuh"

namespace triptych {
namespace cuda {

template cudaError_t forward_of<double>(const RmsNormForward&, cudaStream_t);
template Plan forward_plan_of<double>(const RmsNormForward&, const DeviceFacts&);

}  // namespace cuda
}  // namespace triptych
