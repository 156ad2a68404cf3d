// RMSNorm forward on the device, with and without the residual addition.
//
//   rms_norm_forward_held    a warp, block or cluster holds a whole row in registers: one read, one write
//   rms_norm_forward_staged  a block or cluster holds it in shared memory: where registers would hold one row an SM
//   rms_norm_forward_looped  a block walks over a row twice: any length, and float64
//
// Not persistent: a held row needs 16 (kPacks = 4) registers a thread, so 1,000 to 2,000 threads share an SM and while
// some rows are being reduced others are loading, which is the overlap that prefetching would buy.
#pragma once

#include "row_group.cuh"
#include "weights.cuh"

namespace triptych {
namespace cuda {

template <class T, class Acc = float>
struct ForwardArgs {
  const T* x;
  const T* residual;
  T* y;
  T* h;
  Acc* rstd;
  int64_t rows;
  int64_t cols;
  int64_t x_row_stride;
  int64_t residual_row_stride;
  WeightView<Acc> weight;
  Acc eps;
  Acc inverse_cols;
  int width;  // RowGroup's
  bool round_before_weight;
};

// Blocks an SM that the register allocation must leave room for. 64 registers a thread at four packs (72 in the warp
// kernels): 1,024 threads with 64 bytes each in flight are more than twice what the memory's latency asks for
// (2.2 TB/s of reads * 0.8 us / 132 SMs = 13 KB an SM); a cap of 40 or 48 spills.
template <Scope kScope, int kPacks, bool kVector>
constexpr int kForwardBlocks = !kVector || kPacks > 4 ? 1 : (kScope == Scope::warp ? 3 : 2);

// kPackedWeight: the weight is WeightAccess::same_packs; its loads then go out together with the row's, ahead of the
// reduction (16 more registers at kPacks = 4, which the add variant does not have). Otherwise the gain is read after
// it, from L1 or L2.
template <class T, Scope kScope, int kPacks, bool kVector, bool kPackedWeight, bool kResidual>
__global__ void __launch_bounds__(kScope == Scope::warp ? 256 : kMaxThreads, kForwardBlocks<kScope, kPacks, kVector>)
    rms_norm_forward_held(const ForwardArgs<T> args) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float slots[kSlots<kScope>];

  const RowGroup<kScope> group(args.width);
  group.begin();
  int64_t row;
  if constexpr (kScope == Scope::warp) {
    row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> group.shift();
  } else {
    row = blockIdx.x >> group.shift();
  }
  const bool exists = kScope != Scope::warp || row < args.rows;
  const Slice<T, kVector> slice{group.threads, group.member, exists ? static_cast<int>(args.cols) : 0};

  uint4 held[kPacks];
  const T* x = args.x + row * args.x_row_stride;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) held[k] = slice.load(x, k);

  uint4 weight[kPackedWeight ? kPacks : 1];
  if constexpr (kPackedWeight) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      weight[k] = make_uint4(0, 0, 0, 0);
      if (slice.owns(k)) {
        weight[k] = __ldg(static_cast<const uint4*>(slice.at(static_cast<const T*>(args.weight.data), k)));
      }
    }
  }

  if constexpr (kResidual) {
    uint4 other[kPacks];
    const T* residual = args.residual + row * args.residual_row_stride;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) other[k] = slice.load(residual, k);
    T* h = args.h + row * args.cols;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float a[kWidth], b[kWidth];
      unpack<T>(held[k], a);
      unpack<T>(other[k], b);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) a[e] += b[e];
      held[k] = pack<T>(a);  // the norm sees the rounded h
      slice.store(h, k, held[k]);
    }
  }

  float even = 0.0f, odd = 0.0f;  // two chains: a single one would wait 4 cycles an element
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float v[kWidth];
    unpack<T>(held[k], v);
#pragma unroll
    for (int e = 0; e < kWidth; e += 2) {
      even = fmaf(v[e], v[e], even);
      odd = fmaf(v[e + 1], v[e + 1], odd);
    }
  }
  group.before_first_sum();
  const float rstd = rsqrtf(group.sum(even + odd, slots) * args.inverse_cols + args.eps);
  if (exists && group.member == 0) args.rstd[row] = rstd;

  T* y = args.y + row * args.cols;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float v[kWidth], gain[kWidth];
    unpack<T>(held[k], v);
    if constexpr (kPackedWeight) {
      unpack<T>(weight[k], gain);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) gain[e] += args.weight.offset;
    } else {
      load_gain<T, kVector>(args.weight, slice, k, gain);
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) v[e] *= rstd;
    if (args.round_before_weight) round_to<T>(v);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) v[e] *= gain[e];
    slice.store(y, k, pack<T>(v));
  }
}

// A thread waits for its own copies only, and nothing of the row stays in registers: 32 of them let two blocks of 1,024
// threads, or three of 512 with eight packs, share an SM, with 128 to 192 KB in flight. kPackedWeight as above; without
// it 32 registers are too few.
template <class T, Scope kScope, int kPacks, bool kPackedWeight>
__global__ void __launch_bounds__(kScope == Scope::block ? 1024 : kMaxThreads,
                                  kPackedWeight ? (kScope == Scope::block ? 2 : 4) : 1)
    rms_norm_forward_staged(const ForwardArgs<T> args) {
  constexpr int kWidth = kPackWidth<T>;
  extern __shared__ uint4 staged[];
  __shared__ float slots[kSlots<kScope>];
  const RowGroup<kScope> group(args.width);
  group.begin();
  const Slice<T, true> slice{group.threads, group.member, static_cast<int>(args.cols)};
  const auto slot = [&](int k) { return staged + k * static_cast<int>(blockDim.x) + threadIdx.x; };

  const int64_t row = blockIdx.x >> group.shift();
  const T* x = args.x + row * args.x_row_stride;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) copy_async(slot(k), slice.at(x, k), slice.owns(k));
  commit_copies();
  wait_copies<0>();

  float even = 0.0f, odd = 0.0f;
#pragma unroll 2
  for (int k = 0; k < kPacks; ++k) {
    float v[kWidth];
    unpack<T>(*slot(k), v);
#pragma unroll
    for (int e = 0; e < kWidth; e += 2) {
      even = fmaf(v[e], v[e], even);
      odd = fmaf(v[e + 1], v[e + 1], odd);
    }
  }
  group.before_first_sum();
  const float rstd = rsqrtf(group.sum(even + odd, slots) * args.inverse_cols + args.eps);
  if (group.member == 0) args.rstd[row] = rstd;

  T* y = args.y + row * args.cols;
#pragma unroll 2
  for (int k = 0; k < kPacks; ++k) {
    float v[kWidth], gain[kWidth];
    unpack<T>(*slot(k), v);
    if constexpr (kPackedWeight) {
      uint4 weight = make_uint4(0, 0, 0, 0);
      if (slice.owns(k)) {
        weight = __ldg(static_cast<const uint4*>(slice.at(static_cast<const T*>(args.weight.data), k)));
      }
      unpack<T>(weight, gain);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) gain[e] += args.weight.offset;
    } else {
      load_gain<T, true>(args.weight, slice, k, gain);
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) v[e] *= rstd;
    if (args.round_before_weight) round_to<T>(v);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) v[e] *= gain[e];
    slice.store(y, k, pack<T>(v));
  }
}

// kWidth: columns a thread takes at a time, a whole pack (16-byte accesses) or 1.
template <class T, class Acc, int kWidth, bool kResidual>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_forward_looped(const ForwardArgs<T, Acc> args) {
  __shared__ Acc slots[2][32];
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kWidth;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kWidth;
  int parity = 0;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, parity ^= 1) {
    const T* x = args.x + row * args.x_row_stride;
    const T* residual = kResidual ? args.residual + row * args.residual_row_stride : nullptr;
    T* h = kResidual ? args.h + row * args.cols : nullptr;
    Acc sum = Acc(0);
#pragma unroll 4
    for (int64_t c = first; c < args.cols; c += step) {
      Acc v[kWidth];
      load_chunk<T, Acc, kWidth>(x + c, v);
      if constexpr (kResidual) {
        Acc other[kWidth];
        load_chunk<T, Acc, kWidth>(residual + c, other);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) v[e] = widen<Acc>(narrow<T>(v[e] + other[e]));
        store_chunk<T, Acc, kWidth>(h + c, v);
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += v[e] * v[e];
    }
    const Acc rstd = Acc(1) / sqrt(sum_block(sum, slots[parity]) * args.inverse_cols + args.eps);
    if (threadIdx.x == 0) args.rstd[row] = rstd;
    const T* source = kResidual ? h : x;
    T* y = args.y + row * args.cols;
#pragma unroll 4
    for (int64_t c = first; c < args.cols; c += step) {
      Acc v[kWidth], gain[kWidth];
      load_chunk<T, Acc, kWidth>(source + c, v);
      load_gain<T, Acc, kWidth>(args.weight, c, gain);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        v[e] *= rstd;
        if (args.round_before_weight) v[e] = widen<Acc>(narrow<T>(v[e]));
        v[e] *= gain[e];
      }
      store_chunk<T, Acc, kWidth>(y + c, v);
    }
  }
}

}  // namespace cuda
}  // namespace triptych
