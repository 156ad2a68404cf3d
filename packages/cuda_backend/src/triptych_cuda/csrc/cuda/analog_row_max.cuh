// The largest magnitude of every tile of a row, found by one block and kept in its shared memory: the kernels that then
// scale the row read it again from L1 or L2, and device memory gives it once.
#pragma once

#include "analog_device.cuh"

namespace triptych {
namespace cuda {

// Tiles whose maxima fit into the shared memory that every kernel may have, as bits of 8 bytes.
constexpr int64_t kMostSharedTiles = 4096;

inline int row_threads(int64_t columns, int chunk) {
  const int64_t threads = divide_up(divide_up(columns, 2 * chunk), 32) * 32;
  return static_cast<int>(std::min<int64_t>(std::max<int64_t>(threads, 32), 256));
}

// A kernel whose rows are blocks: the grid walks on where there are more rows than blocks can be.
inline int64_t row_blocks(int64_t rows) { return std::min<int64_t>(rows, int64_t{1} << 30); }

// Ends with a barrier: maxima[tile] are then complete.
template <class T>
__device__ __forceinline__ void find_row_maxima(const T* row, const Tiles& tiles, bool packs,
                                                Bits<WideOf<T>>* maxima) {
  using Acc = WideOf<T>;
  for (int64_t tile = threadIdx.x; tile < tiles.count; tile += blockDim.x) maxima[tile] = 0;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x & 31);
  Bits<Acc> whole = 0;  // of all columns, where there is one tile
  // The warps walk together, so that all lanes take part in every exchange.
  for (int64_t first = (threadIdx.x - lane) * kChunk<T>; first < tiles.columns; first += blockDim.x * kChunk<T>) {
    const int64_t column = first + lane * kChunk<T>;
    Acc values[kChunk<T>];
    load_columns(row, column, tiles.columns, packs, values);
    Bits<Acc> most = 0;
    if (tiles.count == 1) {
#pragma unroll
      for (int e = 0; e < kChunk<T>; ++e) most = max(most, abs_bits(values[e]));
      whole = max(whole, most);
      continue;
    }
    // Elements outside the row are zeros and may count for any tile.
    TileCursor cursor(tiles, min(column, tiles.columns - 1));
    const int64_t mine = cursor.tile;
    const bool within = column + kChunk<T> <= cursor.end || column >= tiles.columns;
#pragma unroll
    for (int e = 0; e < kChunk<T>; ++e) {
      if (!within && column + e < tiles.columns && cursor.enters(tiles, column + e)) {
        atomicMax(maxima + cursor.tile - 1, most);
        most = 0;
      }
      most = max(most, abs_bits(values[e]));
    }
    const int64_t shared_tile = __shfl_sync(kWholeWarp, mine, 0);
    if (__all_sync(kWholeWarp, within && mine == shared_tile)) {
      most = max_warp(most);
      if (lane == 0) atomicMax(maxima + mine, most);
    } else {
      atomicMax(maxima + cursor.tile, most);
    }
  }
  if (tiles.count == 1) {
    whole = max_warp(whole);
    if (lane == 0) atomicMax(maxima, whole);
  }
  __syncthreads();
}

}  // namespace cuda
}  // namespace triptych
