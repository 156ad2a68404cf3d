// RMSNorm backward for float16 rows.
#include "backward_launch.cuh"

namespace triptych {
namespace cuda {

template cudaError_t backward_of<__half>(const RmsNormBackward&, cudaStream_t);
template cudaError_t backward_plan_of<__half>(const RmsNormBackward&, BackwardPlan*);

}  // namespace cuda
}  // namespace triptych
