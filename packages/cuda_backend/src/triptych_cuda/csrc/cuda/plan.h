// Launch parameters as data: which kernel family, how many packs a thread, how many threads and blocks a row.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace triptych {
namespace cuda {

// What the launches need to know of a device; asked once per device and kept (an attribute query costs more than a
// launch may).
struct DeviceFacts {
  int device = -1;
  int sms = 0;
  int cc_major = 0;
  int max_shared = 0;  // bytes of dynamic shared memory a block may opt in to
};
cudaError_t current_device_facts(DeviceFacts* facts);

struct Plan {
  Path path = Path::none;
  int packs = 0;        // 16-byte packs a thread; backward: a block with one is cut into teams
  int threads = 0;      // a block
  int width = 1;        // warp, team: threads a row; cluster: blocks a row
  bool staged = false;  // forward: the row waits in shared memory instead of in registers
};

// One row of a table. The first row that suits the call is taken.
struct PlanRow {
  int64_t max_packs;  // 16-byte packs in a row of the input
  Path path;
  int packs;
  int max_threads;
  bool clusters;   // needs thread-block clusters (9.0)
  bool unaligned;  // compiled for single-element accesses too
  bool staged = false;
};

// Figures: bfloat16 on an H200, fractions of its copy rate; docs/kernel-notes.md has the measurements.
constexpr PlanRow kForwardPlans[] = {
    // One pack a lane; a row takes 1 to 32 lanes, so that a warp's 512 bytes a load are all useful at N = 8 too.
    {32, Path::warp, 1, 128, false, true},
    // Still no barrier, and 64 bytes a thread in flight. Small blocks: .885 against .875 with 128 threads.
    {128, Path::warp, 4, 64, false, true},
    // 64 to 512 threads with the same 64 bytes each; two or more blocks an SM overlap loads with reductions.
    {2048, Path::block, 4, 512, false, true},
    // Registers would hold one such row an SM, and every barrier would stall it (.93); shared memory holds two of them
    // (.95). A cluster of two blocks with the row in registers: .86.
    {4096, Path::block, 4, 1024, false, false, true},
    // 64 KB a block, three blocks an SM, and as few as possible that wait for each other (.92; in registers .79).
    {32768, Path::cluster, 8, 512, true, false, true},
};

// With a residual, two tensors would have to wait in shared memory: the rows that are staged above take a cluster.
constexpr PlanRow kForwardAddPlans[] = {
    {32, Path::warp, 1, 128, false, true},
    {128, Path::warp, 4, 64, false, true},
    {2048, Path::block, 4, 512, false, true},
    // 32 KB a block: with a whole row in one block, one block fills an SM and every barrier stalls it.
    {16384, Path::cluster, 4, 512, true, false},
    // Eight blocks is the largest portable cluster; past it threads hold twice as much.
    {32768, Path::cluster, 8, 512, true, false},
    // Devices without clusters: 64 KB of registers a block is half an SM's, two blocks still alternate.
    {4096, Path::block, 8, 512, false, false},
};

// Backward threads hold the gain and the dw sums of their columns: 64 registers at one pack, 128 at four.
//
// What counts most is how many rows are in work at once: over the device they should span about 2 MB of each tensor
// (132 SMs * 8,192 columns of bfloat16). With twice that the kernel drops from .98 to .90 whatever the stages, packs
// and threads, presumably because the reads of one tensor then meet in the same memory banks.
constexpr PlanRow kBackwardPlans[] = {
    {32, Path::warp, 1, 256, false, true},
    // One pack a thread; 1,024 threads an SM are those 8,192 columns. Short rows do best as a block each (.87; as teams
    // .84, because a thousand threads then wait at every barrier).
    {128, Path::block, 1, 128, false, true},
    // Teams of threads that share a row, as many as 1,024 threads make, keep an SM's rows in step (.98). Blocks of one
    // row each drift apart: .91 to .98 by turns.
    {1024, Path::block, 1, 1024, false, true},
    // Two blocks of 256 threads an SM: while one waits for its cluster the other works (.95 against .91 at 65,536
    // columns with one block of 512).
    {8192, Path::cluster, 4, 256, true, false},
    {16384, Path::cluster, 4, 512, true, false},
    // Unaligned rows, and devices without clusters.
    {2048, Path::block, 4, 512, false, true},
};

// Blocks of the persistent backward grid that share an SM.
inline int backward_blocks_per_sm(const Plan& plan) {
  if (plan.path == Path::warp) return 4;
  const int threads = plan.packs == 1 ? 1024 : 512;
  return plan.threads > threads ? 1 : threads / plan.threads;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int power_of_two_up(int64_t n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Every row that no table has. Short rows (of float64) get a small block so that more of them share an SM.
inline Plan looped_plan(int64_t packs_in_row) {
  Plan plan;
  plan.path = Path::looped;
  plan.packs = 1;
  plan.threads = packs_in_row >= 512 ? 512 : 128;
  return plan;
}

template <int kRows>
Plan choose_plan(const PlanRow (&table)[kRows], int64_t packs_in_row, bool vectors, const DeviceFacts& device) {
  for (const PlanRow& row : table) {
    if (packs_in_row > row.max_packs || (row.clusters && device.cc_major < 9) || !(vectors || row.unaligned)) continue;
    Plan plan;
    plan.path = row.path;
    plan.packs = row.packs;
    plan.staged = row.staged;
    if (row.path == Path::warp) {
      plan.threads = row.max_threads;
      plan.width = power_of_two_up(divide_up(packs_in_row, row.packs));
    } else if (row.path == Path::block && row.packs == 1) {
      plan.width = static_cast<int>(divide_up(packs_in_row, 32) * 32);
      plan.threads = row.max_threads / plan.width * plan.width;
    } else {
      if (row.path == Path::cluster) {
        plan.width = power_of_two_up(divide_up(packs_in_row, static_cast<int64_t>(row.packs) * row.max_threads));
      }
      const int64_t threads = divide_up(packs_in_row, static_cast<int64_t>(row.packs) * plan.width);
      plan.threads = static_cast<int>(divide_up(threads, 32) * 32);
    }
    return plan;
  }
  return looped_plan(packs_in_row);
}

}  // namespace cuda
}  // namespace triptych
