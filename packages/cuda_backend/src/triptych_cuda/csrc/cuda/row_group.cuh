// The threads that share a row, and their sum: a (part of a) warp, a team (some of a block's warps), a block, or a
// thread-block cluster.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace triptych {
namespace cuda {

enum class Scope : int { warp, team, block, cluster };

constexpr int kMaxThreads = 512;      // a block, in every kernel that holds four packs a thread in registers
constexpr int kMaxClusterBlocks = 8;  // the size that every device of compute capability 9.0 can place
constexpr uint32_t kWholeWarp = 0xffffffffu;

// Floats of shared memory that one sum needs: a slot for each warp of the group.
template <Scope kScope>
constexpr int kSlots = kScope == Scope::cluster ? kMaxThreads / 32 * kMaxClusterBlocks : 32;

// Butterfly over `width` neighbouring lanes, a power of two: every lane ends with the same bits, because IEEE addition
// commutes and each step adds the same two values in both partners. The whole warp must call it.
template <class Acc>
__device__ __forceinline__ Acc sum_lanes(Acc value, int width) {
  for (int mask = width >> 1; mask > 0; mask >>= 1) value += __shfl_xor_sync(kWholeWarp, value, mask);
  return value;
}

template <class Acc>
__device__ __forceinline__ Acc sum_warp(Acc value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) value += __shfl_xor_sync(kWholeWarp, value, mask);
  return value;
}

// Adds the first `count` of at most kMost slots: every warp for itself, in the same order.
template <int kMost, class Acc>
__device__ __forceinline__ Acc sum_slots(const Acc* slots, int count) {
  Acc value = Acc(0);
#pragma unroll
  for (int start = 0; start < kMost; start += 32) {
    const int i = start + static_cast<int>(threadIdx.x & 31);
    if (i < count) value += slots[i];
  }
  return sum_warp(value);
}

// One barrier. A caller that sums again must alternate between two sets of slots: the barrier of sum i + 1 then
// separates the reads of sum i from the writes of sum i + 2.
template <class Acc>
__device__ __forceinline__ Acc sum_block(Acc value, Acc* slots) {
  value = sum_warp(value);
  if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = value;
  __syncthreads();
  return sum_slots<32>(slots, static_cast<int>(blockDim.x) >> 5);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes into the same variable of block `rank` of the cluster.
__device__ __forceinline__ void store_remote(float* local, int rank, float value) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}
#else  // Never launched below 9.0 (plan.h asks the device); these keep the template compiling there.
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void store_remote(float*, int, float) { __trap(); }
#endif

// Programmatic dependent launch: the next grid may be placed while this one ends, and waits there for all of it.
// Without the attribute at its launch (and below 9.0) both do nothing, and the grids run one after the other.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void let_next_grid_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_last_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
__device__ __forceinline__ void let_next_grid_start() {}
__device__ __forceinline__ void wait_for_last_grid() {}
#endif

template <Scope kScope>
struct RowGroup {
  int threads;  // that share a row
  int member;   // this thread among them
  int blocks;   // that share a row (1 but for clusters)
  int rank;     // this block among them
  int team;     // which of the block's teams (0 but for teams)

  // `width`: for a warp, threads a row (a power of two up to 32); for a team, threads a row (a multiple of 32 that
  // divides the block); for a cluster, blocks a row; else ignored.
  __device__ __forceinline__ explicit RowGroup(int width) : blocks(1), rank(0), team(0) {
    const int thread = static_cast<int>(threadIdx.x);
    const int block_threads = static_cast<int>(blockDim.x);
    if constexpr (kScope == Scope::warp) {
      threads = width;
      member = thread & (width - 1);
    } else if constexpr (kScope == Scope::team) {
      threads = width;
      team = thread / width;
      member = thread - team * width;
    } else if constexpr (kScope == Scope::block) {
      threads = block_threads;
      member = thread;
    } else {
      // Clusters are cut from a one-dimensional grid in order, so the rank needs no special register.
      blocks = width;
      rank = static_cast<int>(blockIdx.x) & (width - 1);
      threads = width * block_threads;
      member = rank * block_threads + thread;
    }
  }

  // log2 of `width`, which is a power of two: threads a row for a warp, blocks a row for a cluster, else 0.
  __device__ __forceinline__ int shift() const {
    if constexpr (kScope == Scope::warp) return 31 - __clz(threads);
    if constexpr (kScope == Scope::cluster) return 31 - __clz(blocks);
    return 0;
  }

  // A block may write into another's shared memory only once that block runs. Arriving at the start and waiting just
  // before the first sum hides the wait behind the loads.
  __device__ __forceinline__ void begin() const {
    if constexpr (kScope == Scope::cluster) cluster_arrive();
  }
  __device__ __forceinline__ void before_first_sum() const {
    if constexpr (kScope == Scope::cluster) cluster_wait();
  }

  // Every thread of the group gets the same bits. `slots` as for sum_block. A cluster's warps write their parts into
  // all its blocks and meet at one cluster barrier; what follows reads local memory only, so that a block may
  // leave the kernel after its last sum while others are still reading theirs.
  __device__ __forceinline__ float sum(float value, float* slots) const {
    if constexpr (kScope == Scope::warp) {
      return sum_lanes(value, threads);
    } else if constexpr (kScope == Scope::team) {
      // The teams meet at the block's barrier: they stay in step, which the memory likes (plan.h).
      value = sum_warp(value);
      if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = value;
      __syncthreads();
      return sum_slots<32>(slots + team * (threads >> 5), threads >> 5);
    } else if constexpr (kScope == Scope::block) {
      return sum_block(value, slots);
    } else {
      const int warps = static_cast<int>(blockDim.x) >> 5;
      const int lane = static_cast<int>(threadIdx.x) & 31;
      value = sum_warp(value);
      if (lane < blocks) store_remote(slots + rank * warps + (threadIdx.x >> 5), lane, value);
      __syncwarp();
      cluster_arrive();
      cluster_wait();
      return sum_slots<kSlots<kScope>>(slots, blocks * warps);
    }
  }
};

}  // namespace cuda
}  // namespace triptych
