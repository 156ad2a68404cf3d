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
  int packs = 0;    // 16-byte packs a thread
  int threads = 0;  // a block
  int width = 1;    // warp: threads a row; cluster: blocks a row
};

// One row of a table. The first row that suits the call is taken.
struct PlanRow {
  int64_t max_packs;  // 16-byte packs in a row of the input
  Path path;
  int packs;
  int max_threads;
  bool clusters;   // needs thread-block clusters (9.0)
  bool unaligned;  // compiled for single-element accesses too
};

constexpr PlanRow kForwardPlans[] = {
    // One pack a lane; a row takes 1 to 32 lanes, so that a warp's 512 bytes a load are all useful at N = 8 too.
    {32, Path::warp, 1, 128, false, true},
    // Still no barrier: four packs a lane keep 64 bytes a thread in flight, and four warps share the weight in L1.
    {128, Path::warp, 4, 128, false, true},
    // 64 to 512 threads with the same 64 bytes each; two or more blocks an SM overlap loads with reductions.
    {2048, Path::block, 4, 512, false, true},
    // 32 KB a block: with a whole 64 KB row in one block, one or two blocks fill an SM and every barrier stalls it.
    {16384, Path::cluster, 4, 512, true, false},
    // Eight blocks is the largest portable cluster; past it threads hold twice as much.
    {32768, Path::cluster, 8, 512, true, false},
    // Devices without clusters: 64 KB of registers a block is half an SM's, two blocks still alternate.
    {4096, Path::block, 8, 512, false, false},
};

// float64 rows always take the looped kernels: a table with no row that fits.
constexpr PlanRow kFloat64Plans[] = {{0, Path::looped, 1, 0, false, true}};

// Backward threads hold the gain and the dw sums of their columns: 128 registers at four packs (64 of them are those
// two, for a 16-bit type), so 512 threads fill an SM and 512 / threads blocks share it. More packs would not fit;
// fewer would spend more of each row on addresses and reductions.
constexpr PlanRow kBackwardPlans[] = {
    {32, Path::warp, 1, 256, false, true},
    {128, Path::warp, 4, 256, false, true},
    {2048, Path::block, 4, 512, false, true},
    // Columns are split over the cluster's blocks, so that the dw sums of 4,096 packs and more stay in registers.
    {16384, Path::cluster, 4, 512, true, false},
};

// Blocks of the persistent backward grid that share an SM.
inline int backward_blocks_per_sm(const Plan& plan) {
  if (plan.packs == 1) return 4;  // 64 registers a thread, 256 threads
  return plan.threads > 512 ? 1 : 512 / plan.threads;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int power_of_two_up(int64_t n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

template <int kRows>
Plan choose_plan(const PlanRow (&table)[kRows], int64_t packs_in_row, bool vectors, const DeviceFacts& device) {
  for (const PlanRow& row : table) {
    if (packs_in_row > row.max_packs || (row.clusters && device.cc_major < 9) || !(vectors || row.unaligned)) continue;
    Plan plan;
    plan.path = row.path;
    plan.packs = row.packs;
    if (row.path == Path::warp) {
      plan.threads = row.max_threads;
      plan.width = power_of_two_up(divide_up(packs_in_row, row.packs));
    } else {
      if (row.path == Path::cluster) {
        plan.width = power_of_two_up(divide_up(packs_in_row, static_cast<int64_t>(row.packs) * row.max_threads));
      }
      const int64_t threads = divide_up(packs_in_row, static_cast<int64_t>(row.packs) * plan.width);
      plan.threads = static_cast<int>(divide_up(threads, 32) * 32);
    }
    return plan;
  }
  Plan plan;
  plan.path = Path::looped;
  plan.packs = 1;
  // A float64 or very long row; short rows get a small block so that more of them share an SM.
  plan.threads = packs_in_row >= 512 ? 512 : 128;
  return plan;
}

}  // namespace cuda
}  // namespace triptych
