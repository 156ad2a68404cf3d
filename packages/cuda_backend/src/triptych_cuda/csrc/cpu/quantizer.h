// The uniform quantiser of the analog ops; see triptych.ops._quantizer. Included once per instruction set.
#pragma once

#include "lanes.h"

namespace triptych::cpu::TRIPTYCH_ISA {

// The number of steps between -bound and bound.
TRIPTYCH_INLINE double levels(double res) { return res > 1 ? res : 1 / res; }

// V is a number or a register.
template <typename W, typename V>
TRIPTYCH_INLINE V step_of(V bound, double res) {
  const W factor = static_cast<W>(res);
  return res > 1 ? (2 * bound) / factor : (2 * bound) * factor;
}

// The divisor that stands for a step: 0 / 0 must be 0.
template <typename W>
TRIPTYCH_INLINE W safe(W step) {
  return (step < 0 ? -step : step) >= kTiny<W> ? step : kTiny<W>;
}
template <typename W, typename R>
TRIPTYCH_INLINE R safe_register(R step) {
  return magnitude(step) >= kTiny<W> ? step : kTiny<W> - R{};
}

}  // namespace triptych::cpu::TRIPTYCH_ISA
