// The tables of one instruction set, gathered. Compiled once for each; see dispatch.cpp for the choice.
#include "kernels.h"

#define TRIPTYCH_STRING_OF(name) #name
#define TRIPTYCH_STRING(name) TRIPTYCH_STRING_OF(name)

namespace triptych::cpu::TRIPTYCH_ISA {

extern const NormKernels norm_kernels;
extern const TileKernels tile_kernels;
extern const WeightKernels weight_kernels;
extern const LinearKernels linear_kernels;

extern const Kernels kernels;
const Kernels kernels{TRIPTYCH_STRING(TRIPTYCH_ISA), norm_kernels, tile_kernels, weight_kernels, linear_kernels};

}  // namespace triptych::cpu::TRIPTYCH_ISA
