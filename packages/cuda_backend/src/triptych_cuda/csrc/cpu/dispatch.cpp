// Which compilations of the kernels this processor can run. Asked of the processor at run time, so that one binary
// built anywhere is fast here and safe there.
#include "kernels.h"

namespace triptych::cpu {

namespace baseline { extern const Kernels kernels; }
#ifdef TRIPTYCH_X86
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#endif

namespace {

Variants detect() {
  Variants found{};
#ifdef TRIPTYCH_X86
  // F16C has no test of its own: it is older than AVX2 and every processor with AVX2 and FMA has it.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) found.list[found.count++] = &avx512::kernels;
  if (has_avx2) found.list[found.count++] = &avx2::kernels;
#endif
  found.list[found.count++] = &baseline::kernels;
  return found;
}

}  // namespace

const Variants& variants() {
  static const Variants found = detect();
  return found;
}

}  // namespace triptych::cpu
