// What both directions of the collapse share: a row's segments, and a lane's eight elements in memory and registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace jit_kernels::mhc_pre_h_aggregate {

constexpr int kStreams = 4;
constexpr int kLanes = 32;
constexpr int kWidth = 8;
constexpr int kSegment = kLanes * kWidth;

constexpr uint32_t kNanBf16 = 0x7FC0;

struct Residual {
  const uint16_t* data;
  int64_t token, stream, element;
};
struct Pre {
  const float* data;
  int64_t token, stream;
};
struct Grad {
  const uint16_t* data;
  int64_t token, element;
};

// ---- bits and floats

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

__device__ __forceinline__ float canonical(float x) { return is_nan(x) ? __uint_as_float(0x7FC00000u) : x; }

// Two floats to two bf16. The instruction's own NaN is 0x7FFF.
template <bool kCanonical>
__device__ __forceinline__ uint32_t narrow(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  const uint32_t word = *reinterpret_cast<const uint32_t*>(&pair);
  if constexpr (!kCanonical) return word;
  return (is_nan(low) ? kNanBf16 : word & 0xFFFFu) | (is_nan(high) ? kNanBf16 << 16 : word & 0xFFFF0000u);
}

// ---- memory: a lane's eight elements

template <bool kVector>
__device__ __forceinline__ int first_element(int segment, int lane) {
  return segment * kSegment + (kVector ? lane * kWidth : lane);
}

// Eight bf16 as they were loaded; widened only where they are used, so that no load waits for another.
template <bool kVector>
struct Eight {
  uint32_t words[kVector ? kWidth / 2 : kWidth];

  __device__ __forceinline__ float operator[](int k) const {
    if constexpr (kVector) return __uint_as_float(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
    return __uint_as_float(words[k] << 16);
  }
};

// A stride known to be 1 makes the scalar path's eight addresses one register and constant offsets.
struct Unit {
  __host__ __device__ constexpr operator int64_t() const { return 1; }
};

// Vector path: the eight lie inside the row. Scalar path: elements past the row's end read as 0.
// Plain loads: ld.global.nc would promise that no other kernel writes while this one runs, which it may not have
// waited for yet; and passing L1 by (L1::no_allocate) measured 4 % slower.
template <bool kVector, typename Stride>
__device__ __forceinline__ Eight<kVector> load(const uint16_t* row, Stride stride, int first, int hidden) {
  Eight<kVector> x;
  if constexpr (kVector) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + first);
    x.words[0] = v.x, x.words[1] = v.y, x.words[2] = v.z, x.words[3] = v.w;
  } else {
    const uint16_t* address = row + first * stride;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      x.words[k] = first + k * kLanes < hidden ? *address : 0;
      address += kLanes * stride;
      // One address at a time: 32 of them, worked out ahead, would spill.
      if constexpr (!std::is_same_v<Stride, Unit>) asm volatile("" : "+l"(address));
    }
  }
  return x;
}

// NaNs are rare: everything is stored as it comes, and a lane that saw one stores again with kCanonical.
template <bool kVector, bool kCanonical>
__device__ __forceinline__ void store(const float (&x)[kWidth], uint16_t* row, int first, int hidden) {
  if constexpr (kVector) {
    __stcs(reinterpret_cast<uint4*>(row + first),
           make_uint4(narrow<kCanonical>(x[0], x[1]), narrow<kCanonical>(x[2], x[3]), narrow<kCanonical>(x[4], x[5]),
                      narrow<kCanonical>(x[6], x[7])));
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (first + k * kLanes < hidden) row[first + k * kLanes] = narrow<kCanonical>(x[k], 0.0f);
  }
}

template <bool kVector, bool kCanonical>
__device__ __forceinline__ void store(const float (&x)[kWidth], float* row, int first, int hidden) {
  float v[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) v[k] = kCanonical ? canonical(x[k]) : x[k];
  if constexpr (kVector) {
#pragma unroll
    for (int k = 0; k < kWidth; k += 4)
      __stcs(reinterpret_cast<float4*>(row + first + k), make_float4(v[k], v[k + 1], v[k + 2], v[k + 3]));
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (first + k * kLanes < hidden) row[first + k * kLanes] = v[k];
  }
}

__device__ __forceinline__ bool any_nan(const float (&x)[kWidth]) {
  bool nan = false;
#pragma unroll
  for (int k = 0; k < kWidth; k += 2) nan |= is_nan(x[k]) | is_nan(x[k + 1]);
  return nan;
}

__device__ __forceinline__ void load_pre(float (&p)[kStreams], const Pre& pre, int64_t token) {
#pragma unroll
  for (int i = 0; i < kStreams; ++i) p[i] = pre.data[token * pre.token + i * pre.stream];
}

// Asks L2 for the lane's part of the four streams while the previous grid drains. Safe even if that grid still writes
// them: L2 is where memory is coherent, and the loads come after the wait.
__device__ __forceinline__ void prefetch(const Residual& residual, const uint16_t* row, int first, int hidden) {
  if (first >= hidden) return;
#pragma unroll
  for (int i = 0; i < kStreams; ++i)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i * residual.stream + first) : "memory");
}

}  // namespace jit_kernels::mhc_pre_h_aggregate
