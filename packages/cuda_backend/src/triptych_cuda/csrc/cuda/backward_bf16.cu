// RMSNorm backward for bfloat16 rows.
#include "backward_launch.cuh"

namespace triptych {
namespace cuda {

template cudaError_t backward_of<__nv_bfloat16>(const RmsNormBackward&, cudaStream_t);
template cudaError_t backward_plan_of<__nv_bfloat16>(const RmsNormBackward&, BackwardPlan*);

}  // namespace cuda
}  // namespace triptych
