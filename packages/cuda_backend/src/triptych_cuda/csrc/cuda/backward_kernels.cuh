// RMSNorm backward on the device: dx and the partial sums of dw in one pass over dy and x (and dh).
//
// A persistent grid: each warp, team, block or cluster (a "unit") takes every n-th row, so that a thread sees the same
// columns in all its rows. It keeps their gain and their float32 dw sums in registers and writes the sums once, to one
// row of the workspace per block or cluster; dw_sum.cu adds those rows.
//
// While a row is reduced the next ones are on their way into shared memory (cp.async, 16 bytes a thread). Every thread
// copies exactly what it will read itself, so a row costs one barrier (the reduction's) or none (warps). Nothing of a
// row stays in registers between its two uses: it is read from shared memory again, which leaves them to the gain
// and the sums (64 of them at four packs of a 16-bit type; holding x and dy as well spilled at the cap of 128).
#pragma once

#include "row_group.cuh"
#include "weights.cuh"

namespace triptych {
namespace cuda {

template <class T, class Acc = float>
struct BackwardArgs {
  const T* dy;
  const T* dh;
  const T* x;
  const Acc* rstd;
  T* dx;
  Acc* partial;  // [units that write, N]; null: dw is not wanted
  int64_t rows;
  int64_t cols;
  int64_t dy_row_stride;
  int64_t dh_row_stride;
  int64_t x_row_stride;
  WeightView<Acc> weight;
  Acc inverse_cols;
  int width;  // RowGroup's
  bool round_before_weight;
};

// Rows in shared memory, the one in work included. On an H200 two stages ran 1 to 2 % slower than three, and six 3 %
// slower at 1,024 columns, where a block has 31 rows in all.
template <bool kDh>
constexpr int kStages = kDh ? 2 : 3;

// Do several rows share a block, so that their dw sums must be added up at the end?
constexpr bool shares_block(Scope scope) { return scope == Scope::warp || scope == Scope::team; }

// Bytes of dynamic shared memory; where rows share a block, it is used again to add up the dw sums.
template <class T, Scope kScope, int kPacks, bool kDh>
constexpr int streamed_shared(int threads) {
  const int stages = kStages<kDh> * (kDh ? 3 : 2) * kPacks * threads * 16;
  const int sums = shares_block(kScope) ? kPacks * kPackWidth<T> * (threads + 4) * 4 : 0;
  return stages > sums ? stages : sums;
}

// Adds the dw sums of a block's rows (teams, warps, groups inside a warp) and writes one workspace row.
template <class T, int kPacks, bool kVector>
__device__ __forceinline__ void write_block_sums(const float (&sums)[kPacks][kPackWidth<T>],
                                                 const Slice<T, kVector>& slice, float* shared, float* partial) {
  constexpr int kWidth = kPackWidth<T>;
  const int threads = static_cast<int>(blockDim.x);
  const int pitch = threads + 4;  // neighbouring e, read side by side below, then fall into other banks
  __syncthreads();                // the stages that `shared` overlays have been read by everyone
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) shared[(k * kWidth + e) * pitch + threadIdx.x] = sums[k][e];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < slice.cols; c += threads) {
    int index, member;  // the inverse of Slice::column
    if constexpr (kVector) {
      const int pack = c / kWidth;
      member = pack % slice.group;
      index = pack / slice.group * kWidth + c % kWidth;
    } else {
      member = c % slice.group;
      index = c / slice.group;
    }
    float sum = 0.0f;
    for (int thread = member; thread < threads; thread += slice.group) sum += shared[index * pitch + thread];
    partial[static_cast<int64_t>(blockIdx.x) * slice.cols + c] = sum;
  }
}

// Threads of the largest block: 64 registers a thread at one pack, 128 at four, fill an SM.
template <Scope kScope, int kPacks>
constexpr int kBackwardThreads = kScope == Scope::warp ? 256 : (kPacks == 1 ? 1024 : kMaxThreads);

template <class T, Scope kScope, int kPacks, bool kVector, bool kDh>
__global__ void __launch_bounds__(kBackwardThreads<kScope, kPacks>, kScope == Scope::warp ? 4 : 1)
    rms_norm_backward_streamed(const BackwardArgs<T> args) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr int kTensors = kDh ? 3 : 2;
  extern __shared__ uint4 staged[];
  __shared__ float slots[2][kSlots<kScope>];

  const RowGroup<kScope> group(args.width);
  group.begin();
  const Slice<T, kVector> slice{group.threads, group.member, static_cast<int>(args.cols)};

  // Row `base + lane_row` is this thread's; `base` is uniform over whatever must meet at a shuffle or barrier.
  int64_t first, step;
  int lane_row = 0;
  if constexpr (kScope == Scope::warp) {
    const int per_warp = 32 >> group.shift();
    first = (static_cast<int64_t>(blockIdx.x) * (blockDim.x >> 5) + (threadIdx.x >> 5)) * per_warp;
    step = static_cast<int64_t>(gridDim.x) * (blockDim.x >> 5) * per_warp;
    lane_row = static_cast<int>(threadIdx.x & 31) >> group.shift();
  } else if constexpr (kScope == Scope::team) {
    const int teams = static_cast<int>(blockDim.x) / group.threads;
    first = static_cast<int64_t>(blockIdx.x) * teams;
    step = static_cast<int64_t>(gridDim.x) * teams;
    lane_row = group.team;
  } else {
    first = blockIdx.x >> group.shift();
    step = gridDim.x >> group.shift();
  }

  const auto slot = [&](int stage, int tensor, int k) -> uint4* {
    return staged + ((stage * kTensors + tensor) * kPacks + k) * static_cast<int>(blockDim.x) + threadIdx.x;
  };
  // Starts the copies of a row into a stage. Single elements cannot be copied asynchronously (4 bytes at least):
  // they go through registers, one row at a time.
  const auto fetch = [&](int64_t base, int stage, int tensor, const T* data, int64_t row_stride) {
    const int64_t row = base + lane_row;
    const bool exists = row < args.rows;
    const T* source = data + (exists ? row * row_stride : 0);
    const Slice<T, kVector> owned{slice.group, slice.member, exists ? slice.cols : 0};
    if constexpr (kVector) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) copy_async(slot(stage, tensor, k), owned.at(source, k), owned.owns(k));
    } else {
#pragma unroll 1
      for (int k = 0; k < kPacks; ++k) *slot(stage, tensor, k) = owned.load(source, k);
    }
  };
  const auto fetch_rows = [&](int64_t base, int stage) {
    if (base < args.rows) {
      fetch(base, stage, 0, args.x, args.x_row_stride);
      fetch(base, stage, 1, args.dy, args.dy_row_stride);
      if constexpr (kDh) fetch(base, stage, 2, args.dh, args.dh_row_stride);
    }
    commit_copies();  // also when nothing was copied: the wait below counts groups
  };
  const auto rstd_of = [&](int64_t base) {
    const int64_t row = base + lane_row;
    return row < args.rows ? __ldg(args.rstd + row) : 0.0f;
  };

#pragma unroll
  for (int stage = 0; stage < kStages<kDh>; ++stage) fetch_rows(first + stage * step, stage);
  float next_rstd = rstd_of(first);

  float gain[kPacks][kWidth];
  float sums[kPacks][kWidth];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    load_gain<T, kVector>(args.weight, slice, k, gain[k]);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sums[k][e] = 0.0f;
  }
  group.before_first_sum();

  int stage = 0, parity = 0;
  for (int64_t base = first; base < args.rows; base += step, parity ^= 1) {
    wait_copies<kStages<kDh> - 1>();
    const float rstd = next_rstd;
    next_rstd = rstd_of(base + step);

    // dot = sum of dy * g * x, which is mean(wdy * xhat) * N / rstd.
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float xs[kWidth], dys[kWidth];
      unpack<T>(*slot(stage, 0, k), xs);
      unpack<T>(*slot(stage, 1, k), dys);
#pragma unroll
      for (int e = 0; e < kWidth; e += 2) {
        const float a = dys[e] * xs[e], b = dys[e + 1] * xs[e + 1];
        even = fmaf(a, gain[k][e], even);
        odd = fmaf(b, gain[k][e + 1], odd);
        if (!args.round_before_weight) {
          sums[k][e] = fmaf(a, rstd, sums[k][e]);
          sums[k][e + 1] = fmaf(b, rstd, sums[k][e + 1]);
        }
      }
      if (args.round_before_weight) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) xs[e] *= rstd;
        round_to<T>(xs);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sums[k][e] = fmaf(dys[e], xs[e], sums[k][e]);
      }
    }
    const float dot = group.sum(even + odd, slots[parity]);
    if (args.dx != nullptr) {
      // dx = rstd * (wdy - x * scale); scale = rstd * mean(wdy * xhat), so that no power of rstd can overflow.
      const float scale = rstd * (rstd * dot * args.inverse_cols);
      const int64_t row = base + lane_row;
      const Slice<T, kVector> owned{slice.group, slice.member, row < args.rows ? slice.cols : 0};
      T* dx = args.dx + row * args.cols;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        float xs[kWidth], dys[kWidth];
        unpack<T>(*slot(stage, 0, k), xs);
        unpack<T>(*slot(stage, 1, k), dys);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) dys[e] = rstd * fmaf(-xs[e], scale, dys[e] * gain[k][e]);
        if constexpr (kDh) {
          float dhs[kWidth];
          unpack<T>(*slot(stage, 2, k), dhs);
#pragma unroll
          for (int e = 0; e < kWidth; ++e) dys[e] += dhs[e];
        }
        owned.store(dx, k, pack<T>(dys));
      }
    }
    // Only here, where this thread has read its slots for the last time, may it fill them again.
    fetch_rows(base + kStages<kDh> * step, stage);
    stage = stage + 1 == kStages<kDh> ? 0 : stage + 1;
  }

  wait_copies<0>();
  if (args.partial == nullptr) return;
  let_next_grid_start();
  if constexpr (shares_block(kScope)) {
    write_block_sums<T, kPacks, kVector>(sums, slice, reinterpret_cast<float*>(staged), args.partial);
  } else {
    float* partial = args.partial + static_cast<int64_t>(blockIdx.x >> group.shift()) * args.cols;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (kVector) {
        if (slice.owns(k)) {
#pragma unroll
          for (int i = 0; i < kWidth; i += 4) {
            *reinterpret_cast<float4*>(partial + slice.column(k, i)) =
                make_float4(sums[k][i], sums[k][i + 1], sums[k][i + 2], sums[k][i + 3]);
          }
        }
      } else {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const int c = slice.column(k, e);
          if (c < slice.cols) partial[c] = sums[k][e];
        }
      }
    }
  }
}

}  // namespace cuda
}  // namespace triptych
