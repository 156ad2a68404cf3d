// RMSNorm backward for float64 rows.
#include "backward_launch.cuh"

namespace triptych {
namespace cuda {

template cudaError_t backward_of<double>(const RmsNormBackward&, cudaStream_t);
template cudaError_t backward_plan_of<double>(const RmsNormBackward&, BackwardPlan*);

}  // namespace cuda
}  // namespace triptych
