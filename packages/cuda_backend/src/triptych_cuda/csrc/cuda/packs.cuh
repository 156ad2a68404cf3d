// Elements, 16-byte packs of them, and which columns of a row one thread owns.
//
// A pack is 16 bytes: 4 float32 or 8 elements of a 16-bit type. Rows stay packed in registers between their two uses
// (half the registers of float32 for 16-bit types; widening again costs one instruction an element).
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace triptych {
namespace cuda {

template <class T>
constexpr int kPackWidth = 16 / static_cast<int>(sizeof(T));

// ---- one element -----------------------------------------------------------------------------------------------

template <class Acc, class T>
__device__ __forceinline__ Acc widen(T value) {
  if constexpr (sizeof(T) == 2) {
    if constexpr (std::is_same<T, __half>::value) {
      return static_cast<Acc>(__half2float(value));
    } else {
      return static_cast<Acc>(__bfloat162float(value));
    }
  } else {
    return static_cast<Acc>(value);
  }
}

template <class T, class Acc>
__device__ __forceinline__ T narrow(Acc value) {
  if constexpr (std::is_same<T, __half>::value) {
    return __float2half_rn(static_cast<float>(value));
  } else if constexpr (std::is_same<T, __nv_bfloat16>::value) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// ---- one pack --------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void unpack(const uint4& bits, float (&out)[kPackWidth<T>]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same<T, float>::value) {
      out[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same<T, __nv_bfloat16>::value) {
      // A bfloat16 is the upper half of a float32: a shift and a mask widen both without a conversion unit.
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      __half2_raw raw;
      raw.x = static_cast<unsigned short>(words[i] & 0xffffu);
      raw.y = static_cast<unsigned short>(words[i] >> 16);
      const float2 pair = __half22float2(__half2(raw));
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float (&in)[kPackWidth<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same<T, float>::value) {
      words[i] = __float_as_uint(in[i]);
    } else if constexpr (std::is_same<T, __nv_bfloat16>::value) {
      const __nv_bfloat162_raw raw = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
      words[i] = static_cast<uint32_t>(raw.x) | (static_cast<uint32_t>(raw.y) << 16);
    } else {
      const __half2_raw raw = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
      words[i] = static_cast<uint32_t>(raw.x) | (static_cast<uint32_t>(raw.y) << 16);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Rounds every element to T and widens it again.
template <class T>
__device__ __forceinline__ void round_to(float (&values)[kPackWidth<T>]) {
  if constexpr (!std::is_same<T, float>::value) unpack<T>(pack<T>(values), values);
}

// Read-only data. With L1::no_allocate, which would leave L1 to the weight, the forward ran at .92 of an H200's copy
// rate instead of .95: presumably L2 then gives the lines of x up first, and those of y pile up in it.
__device__ __forceinline__ uint4 load_pack(const void* address) { return __ldg(static_cast<const uint4*>(address)); }

// 16 bytes from global to shared memory, in the background. Each thread copies what it alone will read, so that it need
// only wait for itself.
__device__ __forceinline__ void copy_async(uint4* shared, const void* global, bool wanted) {
  // A source size of 0 fills the 16 bytes with zeros and reads nothing, so the address may lie outside.
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(wanted ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- the columns of one thread ---------------------------------------------------------------------------------

// `group` threads share a row. With kVector, pack k of a thread is 16 contiguous bytes, and neighbouring threads hold
// neighbouring packs; every pack is whole, because kVector needs N to be a multiple of the width. Without, element e
// of pack k lies `group` columns after element e - 1, so that a warp's single-element accesses are still contiguous.
template <class T, bool kVector>
struct Slice {
  static constexpr int kWidth = kPackWidth<T>;

  int group;
  int member;
  int cols;  // 0 for a thread whose row does not exist: it loads zeros and stores nothing

  __device__ __forceinline__ int column(int k, int e) const {
    return kVector ? (k * group + member) * kWidth + e : (k * kWidth + e) * group + member;
  }

  // Of pack k from the start of the row, with kVector. Unsigned and in bytes, so that an address costs one add: with a
  // signed element index the compiler redid a 64-bit multiplication for every pack.
  __device__ __forceinline__ uint32_t byte_offset(int k) const {
    return (static_cast<uint32_t>(k) * static_cast<uint32_t>(group) + static_cast<uint32_t>(member)) * 16u;
  }
  __device__ __forceinline__ const void* at(const T* row, int k) const {
    return reinterpret_cast<const char*>(row) + byte_offset(k);
  }
  __device__ __forceinline__ bool owns(int k) const { return column(k, 0) < cols; }

  // Zeros stand for columns outside the row: they add nothing to any sum.
  __device__ __forceinline__ uint4 load(const T* row, int k) const {
    uint4 bits = make_uint4(0, 0, 0, 0);
    if constexpr (kVector) {
      if (owns(k)) bits = load_pack(at(row, k));
    } else {
      using Raw = typename std::conditional<sizeof(T) == 2, unsigned short, unsigned int>::type;
      constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
      uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int c = column(k, e);
        if (c < cols) {
          const uint32_t raw = __ldg(reinterpret_cast<const Raw*>(row) + c);
          words[e / kPerWord] |= raw << (8 * static_cast<int>(sizeof(T)) * (e % kPerWord));
        }
      }
      bits = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return bits;
  }

  __device__ __forceinline__ void store(T* row, int k, const uint4& bits) const {
    if constexpr (kVector) {
      if (owns(k)) *reinterpret_cast<uint4*>(reinterpret_cast<char*>(row) + byte_offset(k)) = bits;
    } else {
      using Raw = typename std::conditional<sizeof(T) == 2, unsigned short, unsigned int>::type;
      constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
      const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int c = column(k, e);
        if (c < cols) {
          reinterpret_cast<Raw*>(row)[c] =
              static_cast<Raw>(words[e / kPerWord] >> (8 * static_cast<int>(sizeof(T)) * (e % kPerWord)));
        }
      }
    }
  }
};

// ---- chunks: contiguous columns, for the kernels that walk over a row ------------------------------------------

// Plain loads on purpose: the add variant reads back the h that the same thread has just written, which the
// read-only path (ld.global.nc) does not promise to see.
template <class T, class Acc, int kWidth>
__device__ __forceinline__ void load_chunk(const T* address, Acc (&out)[kWidth]) {
  if constexpr (kWidth == 1) {
    out[0] = widen<Acc>(*address);
  } else {
    unpack<T>(*reinterpret_cast<const uint4*>(address), out);
  }
}

template <class T, class Acc, int kWidth>
__device__ __forceinline__ void store_chunk(T* address, const Acc (&in)[kWidth]) {
  if constexpr (kWidth == 1) {
    *address = narrow<T>(in[0]);
  } else {
    *reinterpret_cast<uint4*>(address) = pack<T>(in);
  }
}

}  // namespace cuda
}  // namespace triptych
