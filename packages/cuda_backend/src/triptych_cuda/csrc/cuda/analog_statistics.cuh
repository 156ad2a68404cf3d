// Statistics over all elements of a tile, in two stages: one partial result a block, then one block a tile merges them.
// Both stages walk and merge in a fixed order.
#pragma once

#include "analog_device.cuh"

namespace triptych {
namespace cuda {

constexpr int kStatisticsThreads = 256;
constexpr int kStatisticsWarps = kStatisticsThreads / 32;

// A unit is what one warp reads at a time: 16 bytes a lane, of one row of one tile.
template <class T>
constexpr int kUnit = 32 * (16 / static_cast<int>(sizeof(T)));

template <class T>
__host__ __device__ inline int64_t units_of_row(int64_t tile_columns) {
  return (tile_columns + kUnit<T> - 1) / kUnit<T>;
}

// Blocks a tile: as many as have something to do, and about as many altogether as a large device holds.
template <class T>
int64_t blocks_of_tile(const TileInput& input) {
  const int64_t units = input.rows * units_of_row<T>(input.tiles.largest());
  const int64_t most = std::max<int64_t>(1, 1024 / input.tiles.count);
  return std::min(std::max<int64_t>(1, divide_up(units, kStatisticsWarps)), most);
}

// Merges over the block in a fixed order; thread 0 has the result. Statistics know `merge` and `from_lane`.
template <class Statistics>
__device__ __forceinline__ void merge_block(Statistics* mine) {
  __shared__ Statistics slots[kStatisticsWarps];
#pragma unroll
  for (int delta = 16; delta > 0; delta >>= 1) mine->merge(mine->from_lane(delta));
  if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = *mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kStatisticsWarps; ++warp) mine->merge(slots[warp]);
  }
}

// Of `blocks` partial results of a tile.
template <class Statistics>
__device__ __forceinline__ Statistics merge_partials(const Statistics* partials, int64_t blocks) {
  Statistics all;
  for (int64_t i = threadIdx.x; i < blocks; i += kStatisticsThreads) all.merge(partials[i]);
  merge_block(&all);
  return all;
}

// The lanes' part of every unit of a block: take(values, how many, row, first column, distance of the values).
template <class T, class Take>
__device__ __forceinline__ void for_units(const TileInput& input, int64_t tile, int64_t block, int64_t blocks,
                                          Take take) {
  const int64_t start = input.tiles.start(tile), columns = input.tiles.size(tile);
  const int64_t in_row = units_of_row<T>(columns), units = input.rows * in_row;
  for (int64_t unit = block * kStatisticsWarps + (threadIdx.x >> 5); unit < units; unit += blocks * kStatisticsWarps) {
    int64_t row, part;
    split_index(unit, in_row, &row, &part);
    const int64_t first = part * kUnit<T>;
    take(row, start + first, min(static_cast<int64_t>(kUnit<T>), columns - first));
  }
}

}  // namespace cuda
}  // namespace triptych
