// A product of two matrices in areas: out[m, n] = sum over k of a(m, k) b(n, k), where reading an operand may change
// it (a quantiser, a mask). Included once per instruction set, like block.h.
//
// A stretch of the depth is read from both operands into buffers that fit the second-level cache, in the wide type, and
// multiplied by a kernel that keeps kRows x kPanel sums in registers. The sum over the depth is one chain of fused
// multiply-adds for each stretch, and one sum over the stretches: the order depends neither on how the output is cut
// into areas nor on the instruction set.
#pragma once

#include "lanes.h"
#include "rows.h"

namespace triptych::cpu::TRIPTYCH_ISA {

// Registers: 12 x 2 of 32 for AVX-512, 6 x 2 of 16 for AVX2, 2 x 4 of 16 for the baseline.
#if defined(__AVX512F__)
constexpr int kRows = 12, kPanelBlocks = 2;
#elif defined(__AVX2__)
constexpr int kRows = 6, kPanelBlocks = 1;
#else
constexpr int kRows = 2, kPanelBlocks = 1;
#endif
template <typename W> constexpr int64_t kPanel = kPanelBlocks * Block<W>::kLanes;

constexpr int64_t kDepth = 256;
// The distance between buffered rows of up to 256 numbers: no multiple of a cache's way, so that a column of them does
// not fall into a few of its sets. What is read beyond a row's end to fill a register stays in the buffer.
constexpr int64_t kPitch = 272;
constexpr int64_t kBuffered = 256;

template <typename W>
struct ProductScratch {
  alignas(64) W a[kBuffered * kPitch];  // rows of a, or of the depth
  alignas(64) W b[kBuffered * kDepth];  // panels [depth][kPanel]
  alignas(64) W turn[32 * kPitch];      // rows of b on their way into a panel
};

// How an operand lies in memory: rows of the depth's numbers for one m or n, or rows of all m or n for one of them.
enum class Order { depth_last, depth_first };

template <typename W, int kCount, Order kOrder>
TRIPTYCH_INLINE void multiply_panel(const W* a, const W* panel, int64_t depth, W* out, bool add) {
  Block<W> sum[kCount][kPanelBlocks];
  for (int i = 0; i < kCount; ++i)
    for (int j = 0; j < kPanelBlocks; ++j) sum[i][j] = splat<W>(0);
  for (int64_t k = 0; k < depth; ++k) {
    Block<W> b[kPanelBlocks];
    for (int j = 0; j < kPanelBlocks; ++j) b[j] = load(panel + k * kPanel<W> + j * Block<W>::kLanes);
    for (int i = 0; i < kCount; ++i) {
      const Block<W> factor = splat(kOrder == Order::depth_last ? a[i * kPitch + k] : a[k * kPitch + i]);
      for (int j = 0; j < kPanelBlocks; ++j) sum[i][j] = fused(factor, b[j], sum[i][j]);
    }
  }
  for (int i = 0; i < kCount; ++i) {
    for (int j = 0; j < kPanelBlocks; ++j) {
      W* to = out + i * kPitch + j * Block<W>::kLanes;
      store(add ? load(to) + sum[i][j] : sum[i][j], to);
    }
  }
}

// All of the output's columns for kCount rows.
template <typename W, int kCount, Order kOrder>
__attribute__((noinline)) void multiply_rows(const W* a, const W* panels, int64_t depth, int64_t columns, W* out,
                                             bool add) {
  for (int64_t j = 0; j < columns; j += kPanel<W>)
    multiply_panel<W, kCount, kOrder>(a, panels + j * kDepth, depth, out + j, add);
}

template <typename W, Order kOrder>
void multiply_stretch(const W* a, const W* panels, int64_t depth, int64_t rows, int64_t columns, W* out, bool add) {
  constexpr int64_t step = kOrder == Order::depth_last ? kPitch : 1;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    multiply_rows<W, kRows, kOrder>(a + i * step, panels, depth, columns, out + i * kPitch, add);
  if constexpr (kRows > 4)
    for (; i + 4 <= rows; i += 4)
      multiply_rows<W, 4, kOrder>(a + i * step, panels, depth, columns, out + i * kPitch, add);
  for (; i < rows; ++i) multiply_rows<W, 1, kOrder>(a + i * step, panels, depth, columns, out + i * kPitch, add);
}

// Rows of numbers turned into a panel.
template <typename W>
TRIPTYCH_INLINE void turn_panel(const W* rows, int64_t depth, W* panel) {
  using R = typename Block<W>::Register;
  constexpr int64_t lanes = kRegisterBytes / sizeof(W);
  for (int64_t k = 0; k < depth; k += lanes) {
    for (int64_t group = 0; group < kPanel<W>; group += lanes) {
      R square[lanes];
      for (int i = 0; i < lanes; ++i) __builtin_memcpy(&square[i], rows + (group + i) * kPitch + k, kRegisterBytes);
      transpose_from<W, 1>(square);
      for (int i = 0; i < lanes; ++i) __builtin_memcpy(panel + (k + i) * kPanel<W> + group, &square[i], kRegisterBytes);
    }
  }
}

// out[i * kPitch + j] for rows m0 + i < m1 and columns n0 + j < n1, padded to whole panels. read_a(row, begin, end, to)
// and read_b write a stretch of a row of the operand, of its depth or of its m or n as the order says.
template <typename W, typename ReadA, typename ReadB>
void multiply(Order a_order, const ReadA& read_a, Order b_order, const ReadB& read_b, int64_t m0, int64_t m1,
              int64_t n0, int64_t n1, int64_t depth_begin, int64_t depth_end, ProductScratch<W>& scratch, W* out) {
  const int64_t rows = m1 - m0, columns = n1 - n0;
  const int64_t padded = (columns + kPanel<W> - 1) / kPanel<W> * kPanel<W>;
  if (depth_begin == depth_end)
    for (int64_t i = 0; i < rows; ++i) __builtin_memset(out + i * kPitch, 0, padded * sizeof(W));
  for (int64_t k = depth_begin; k < depth_end; k += kDepth) {
    const int64_t depth = depth_end - k < kDepth ? depth_end - k : kDepth;
    if (a_order == Order::depth_first)
      for (int64_t d = 0; d < depth; ++d) read_a(k + d, m0, m1, scratch.a + d * kPitch);
    else
      for (int64_t i = 0; i < rows; ++i) read_a(m0 + i, k, k + depth, scratch.a + i * kPitch);
    if (b_order == Order::depth_first) {
      __builtin_memset(scratch.turn + columns, 0, (padded - columns) * sizeof(W));
      for (int64_t d = 0; d < depth; ++d) {
        read_b(k + d, n0, n1, scratch.turn);
        for (int64_t j = 0; j < padded; j += kPanel<W>)
          __builtin_memcpy(scratch.b + j * kDepth + d * kPanel<W>, scratch.turn + j, kPanel<W> * sizeof(W));
      }
    } else {
      for (int64_t j = 0; j < padded; j += kPanel<W>) {
        for (int64_t i = 0; i < kPanel<W>; ++i) {
          W* to = scratch.turn + i * kPitch;
          if (j + i < columns)
            read_b(n0 + j + i, k, k + depth, to);
          else
            __builtin_memset(to, 0, depth * sizeof(W));
        }
        turn_panel(scratch.turn, depth, scratch.b + j * kDepth);
      }
    }
    if (a_order == Order::depth_first)
      multiply_stretch<W, Order::depth_first>(scratch.a, scratch.b, depth, rows, columns, out, k > depth_begin);
    else
      multiply_stretch<W, Order::depth_last>(scratch.a, scratch.b, depth, rows, columns, out, k > depth_begin);
  }
}

template <typename W, typename ReadA, typename ReadB>
void multiply_last(const ReadA& read_a, const ReadB& read_b, int64_t m0, int64_t m1, int64_t n0, int64_t n1,
                   int64_t depth_begin, int64_t depth_end, ProductScratch<W>& scratch, W* out) {
  multiply<W>(Order::depth_last, read_a, Order::depth_last, read_b, m0, m1, n0, n1, depth_begin, depth_end, scratch,
              out);
}

// The same for a few rows, as dot products: turning b into panels would cost more than multiplying it. Each row of b is
// read from end to end (or in stretches of 16384), as memory likes it.
constexpr int64_t kFewRows = 4;

template <typename W, typename ReadA, typename ReadB>
void multiply_few(const ReadA& read_a, const ReadB& read_b, int64_t m0, int64_t m1, int64_t n0, int64_t n1,
                  int64_t depth_begin, int64_t depth_end, ProductScratch<W>& scratch, W* out) {
  constexpr int64_t most = kBuffered / kFewRows * kDepth;
  const int64_t rows = m1 - m0, columns = n1 - n0;
  for (int64_t i = 0; i < rows; ++i) __builtin_memset(out + i * kPitch, 0, columns * sizeof(W));
  for (int64_t begin = depth_begin; begin < depth_end; begin += most) {
    const int64_t end = depth_end - begin < most ? depth_end : begin + most;
    const auto stretch_end = [=](int64_t k) { return end - k < kDepth ? end : k + kDepth; };
    const auto buffered = [&](int64_t k, int64_t i) {
      return scratch.a + ((k - begin) / kDepth * kFewRows + i) * kPitch;
    };
    for (int64_t k = begin; k < end; k += kDepth)
      for (int64_t i = 0; i < rows; ++i) read_a(m0 + i, k, stretch_end(k), buffered(k, i));
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t k = begin; k < end; k += kDepth) {
        read_b(n0 + j, k, stretch_end(k), scratch.turn);
        const W* b = scratch.turn;
        for (int64_t i = 0; i < rows; ++i) {
          const W* a = buffered(k, i);
          out[i * kPitch + j] += sum_row<W>(
              stretch_end(k) - k, [=](const Block<W>& sum, int64_t column, auto access) __attribute__((always_inline)) {
                return fused(access.read(a + column), access.read(b + column), sum);
              });
        }
      }
    }
  }
}

}  // namespace triptych::cpu::TRIPTYCH_ISA
