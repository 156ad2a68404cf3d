// RMSNorm backward for float32 rows.
#include "backward_launch.cuh"

namespace triptych {
namespace cuda {

template cudaError_t backward_of<float>(const RmsNormBackward&, cudaStream_t);
template cudaError_t backward_plan_of<float>(const RmsNormBackward&, BackwardPlan*);

}  // namespace cuda
}  // namespace triptych
