// Walking a row in blocks. Included once per instruction set, like block.h.
#pragma once

#include "block.h"

namespace triptych::cpu::TRIPTYCH_ISA {

// Calls step(column, tag) for each whole block of a row, then step for the rest of it; Whole and Tail carry the
// difference into the loads and stores.
struct Whole {
  template <typename T> TRIPTYCH_MEMBER Block<Wide<T>> read(const T* from) const { return load(from); }
  template <typename T> TRIPTYCH_MEMBER void write(const Block<Wide<T>>& v, T* to) const { store(v, to); }
};
struct Tail {
  int64_t count;
  template <typename T> TRIPTYCH_MEMBER Block<Wide<T>> read(const T* from) const { return load_tail(from, count); }
  template <typename T> TRIPTYCH_MEMBER void write(const Block<Wide<T>>& v, T* to) const { store_tail(v, to, count); }
};

// The sum of term(column, access) over a row. Two accumulators hide the latency of the fused multiply-add.
template <typename W, typename Term>
TRIPTYCH_INLINE W sum_row(int64_t columns, Term term) {
  constexpr int64_t lanes = Block<W>::kLanes;
  Block<W> even = splat<W>(0), odd = splat<W>(0);
  int64_t column = 0;
  for (; column + 2 * lanes <= columns; column += 2 * lanes) {
    even = term(even, column, Whole{});
    odd = term(odd, column + lanes, Whole{});
  }
  if (column + lanes <= columns) {
    even = term(even, column, Whole{});
    column += lanes;
  }
  if (column < columns) odd = term(odd, column, Tail{columns - column});
  return sum_lanes(even + odd);
}

template <typename W, typename Step>
TRIPTYCH_INLINE void for_row(int64_t columns, Step step) {
  constexpr int64_t lanes = Block<W>::kLanes;
  int64_t column = 0;
  for (; column + lanes <= columns; column += lanes) step(column, Whole{});
  if (column < columns) step(column, Tail{columns - column});
}

}  // namespace triptych::cpu::TRIPTYCH_ISA
