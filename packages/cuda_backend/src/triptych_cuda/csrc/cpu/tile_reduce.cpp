// What is asked of the elements of each tile: the largest magnitudes, sums, sums of squares, extremes. Compiled once
// for each instruction set; see dispatch.cpp for the choice.
//
// Standard deviations take two passes: the mean first, then the squares of the distances to it and, for what the mean
// lost in rounding, their sum (Chan, Golub and LeVeque, 1983). Both are of x less the tile's first element, so that
// equal elements give exactly 0 and a large common offset costs no digits. Lanes sum at most kRun columns in the wide
// type and go on in float64.
#include "analog_kernels.h"
#include "lanes.h"
#include "rows.h"

namespace triptych::cpu::TRIPTYCH_ISA {
namespace {

constexpr int64_t kRun = 1024;

template <typename T>
TRIPTYCH_INLINE const T* row_of(const TileArgs& args, int64_t row) {
  return static_cast<const T*>(args.x) + row * args.x_stride;
}

// step(first element, count) for each row of a chunk, in a tile.
template <typename T, typename Step>
TRIPTYCH_INLINE void for_chunk(const TileArgs& args, int64_t tile, int64_t chunk, Step step) {
  const int64_t begin = chunk * args.chunk_rows;
  const int64_t end = begin + args.chunk_rows < args.rows ? begin + args.chunk_rows : args.rows;
  for (int64_t row = begin; row < end; ++row)
    step(row_of<T>(args, row) + args.tiles.start(tile), args.tiles.size(tile));
}

// Where lanes beyond the end of a row must not count: they are read as zeros.
TRIPTYCH_INLINE int64_t lanes_read(int64_t, int64_t, Whole) { return -1; }
TRIPTYCH_INLINE int64_t lanes_read(int64_t count, int64_t column, Tail) { return count - column; }

template <typename W>
TRIPTYCH_INLINE Block<W> first_lanes(const Block<W>& block, int64_t count, W otherwise) {
  if (count < 0) return block;
  W lane[Block<W>::kLanes];
  __builtin_memcpy(lane, &block, kBlockBytes);
  for (int64_t i = count; i < Block<W>::kLanes; ++i) lane[i] = otherwise;
  Block<W> out;
  __builtin_memcpy(&out, lane, kBlockBytes);
  return out;
}

template <typename T>
void abs_max_rows(const TileArgs& args, int64_t row_begin, int64_t row_end) {
  using W = Wide<T>;
  W* out = static_cast<W*>(args.out);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = row_of<T>(args, row);
    for (int64_t tile = 0; tile < args.tiles.count; ++tile) {
      const T* from = x + args.tiles.start(tile);
      Block<W> most = splat<W>(0);
      for_row<W>(args.tiles.size(tile), [&](int64_t column, auto access) __attribute__((always_inline)) {
        most = larger(most, magnitude(access.read(from + column)));
      });
      out[tile * args.rows + row] = largest_lane(most);
    }
  }
}

template <typename T>
void sums_of(const TileArgs& args, int64_t chunk_begin, int64_t chunk_end) {
  using W = Wide<T>;
  for (int64_t tile = 0; tile < args.tiles.count; ++tile) {
    const Block<W> shift = load_tail(row_of<T>(args, 0) + args.tiles.start(tile), 1);
    const Block<W> first = splat(shift.part[0][0]);
    for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
      double total = 0;
      for_chunk<T>(args, tile, chunk, [&](const T* from, int64_t count) {
        for (int64_t begin = 0; begin < count; begin += kRun) {
          const int64_t run = count - begin < kRun ? count - begin : kRun;
          total += sum_row<W>(run, [=](const Block<W>& sum, int64_t column, auto access)
                                       __attribute__((always_inline)) {
            return sum + first_lanes(access.read(from + begin + column) - first, lanes_read(run, column, access), W(0));
          });
        }
      });
      static_cast<double*>(args.out)[tile * args.chunks + chunk] = total;
    }
  }
}

template <typename T>
void squares_of(const TileArgs& args, const double* means, int64_t chunk_begin, int64_t chunk_end) {
  using W = Wide<T>;
  for (int64_t tile = 0; tile < args.tiles.count; ++tile) {
    const Block<W> shift = load_tail(row_of<T>(args, 0) + args.tiles.start(tile), 1);
    const Block<W> first = splat(shift.part[0][0]), mean = splat(static_cast<W>(means[tile]));
    for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
      double rest = 0, squares = 0;
      for_chunk<T>(args, tile, chunk, [&](const T* from, int64_t count) {
        for (int64_t begin = 0; begin < count; begin += kRun) {
          const int64_t run = count - begin < kRun ? count - begin : kRun;
          Block<W> distances = splat<W>(0);
          squares += sum_row<W>(run, [&](const Block<W>& sum, int64_t column, auto access)
                                         __attribute__((always_inline)) {
            const Block<W> d = first_lanes((access.read(from + begin + column) - first) - mean,
                                           lanes_read(run, column, access), W(0));
            distances = distances + d;
            return fused(d, d, sum);
          });
          rest += sum_lanes(distances);
        }
      });
      double* out = static_cast<double*>(args.out) + 2 * (tile * args.chunks + chunk);
      out[0] = rest;
      out[1] = squares;
    }
  }
}

template <typename T>
void extremes_of(const TileArgs& args, int64_t chunk_begin, int64_t chunk_end) {
  using W = Wide<T>;
  constexpr W infinity = static_cast<W>(__builtin_inf());
  for (int64_t tile = 0; tile < args.tiles.count; ++tile) {
    for (int64_t chunk = chunk_begin; chunk < chunk_end; ++chunk) {
      // The smallest is the largest of the negatives: `larger` keeps NaN.
      Block<W> high = splat(-infinity), low = splat(-infinity);
      for_chunk<T>(args, tile, chunk, [&](const T* from, int64_t count) {
        for_row<W>(count, [&](int64_t column, auto access) __attribute__((always_inline)) {
          const Block<W> v = access.read(from + column);
          const int64_t lanes = lanes_read(count, column, access);
          high = larger(high, first_lanes(v, lanes, -infinity));
          low = larger(low, first_lanes(splat<W>(0) - v, lanes, -infinity));
        });
      });
      const W smallest = -largest_lane(low), largest = largest_lane(high);
      const bool finite = largest < infinity && smallest > -infinity;
      W* out = static_cast<W*>(args.out) + 2 * (tile * args.chunks + chunk);
      out[0] = finite ? smallest : static_cast<W>(__builtin_nan(""));
      out[1] = finite ? largest : static_cast<W>(__builtin_nan(""));
    }
  }
}

void abs_max(const TileArgs& args, int64_t begin, int64_t end) {
  TRIPTYCH_BY_DTYPE(args.dtype, abs_max_rows, args, begin, end);
}

void sums(const TileArgs& args, int64_t begin, int64_t end) {
  TRIPTYCH_BY_DTYPE(args.dtype, sums_of, args, begin, end);
}

void squares(const TileArgs& args, const double* means, int64_t begin, int64_t end) {
  TRIPTYCH_BY_DTYPE(args.dtype, squares_of, args, means, begin, end);
}

void extremes(const TileArgs& args, int64_t begin, int64_t end) {
  TRIPTYCH_BY_DTYPE(args.dtype, extremes_of, args, begin, end);
}

}  // namespace

extern const TileKernels tile_kernels;
const TileKernels tile_kernels{abs_max, sums, squares, extremes};

}  // namespace triptych::cpu::TRIPTYCH_ISA
