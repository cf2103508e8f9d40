// What the phases of the fp32 kernel share: a block's shape, memory and work, a thread's place, arithmetic. See
// fp32.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "arguments.cuh"

namespace jit_kernels::vdn_delta_factors::fp32 {

template <int kDim>
struct Shape {
  static_assert(kDim == 64 || kDim == 128);
  static constexpr int kGroups = kDim / 8;
  static constexpr int kThreads = kGroups * kGroups;
  static constexpr int kBlocks = 512 / kThreads;  // on a multiprocessor: 128 registers a thread
  static constexpr int kExtra = 512 / kDim;       // elements of the wrapped tile a thread holds
};

template <int kDim>
struct alignas(128) BlockMemory {
  static constexpr int kGroups = Shape<kDim>::kGroups;
  union {
    struct {
      float raw[2][8][kDim];
      float Y[2][8][kDim];
      float Z[2][8][kDim];
      float pivot[8][8];  // L below the diagonal
      float diagonal[8];  // 1 / D
    } panels;
    float inverse[kDim][kDim];
  };
  float B[2][kGroups][kDim];  // by columns of B
  float alpha[kDim];
  int info;
};

// What a thread holds.
template <int kDim>
struct Place {
  int thread, j, t, i, half;  // column group, rows of J, tile row and half of M
  int extra_row, extra_col;   // piece of the wrapped tile (j + G/2, j): its row, its first column
  bool extra;

  __device__ __forceinline__ static Place get() {
    constexpr int G = Shape<kDim>::kGroups, X = Shape<kDim>::kExtra;
    Place at;
    // Read anew at each call: kept over the steps of the sweep, what follows from it would be spilled.
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(at.thread));
    const int warp = at.thread / 32, lane = at.thread % 32;
    const int lj = (lane & 1) | (lane >> 1 & 2), li = (lane >> 1 & 1) | (lane >> 2 & 6);
    at.j = 4 * (kDim == 128 ? warp >> 1 : warp) + lj;
    at.t = (kDim == 128 ? 8 * (warp & 1) : 0) + li;
    at.half = at.t & 1;
    // Columns j and j ^ 1 share their row tiles but one, so that neighbouring lanes share reads of Y.
    const int base = at.j & ~1, slot = at.t >> 1;
    at.i = slot > 0 ? (base + slot) % G : (at.j & 1) ? (base + G / 2) % G : at.j;
    at.extra = at.j < G / 2;
    at.extra_row = at.t * X / 8;
    at.extra_col = at.t * X % 8;
    return at;
  }
};

// Rows of the inverse in shared memory: 16-byte units permuted so that tiles and their mirror images are stored without
// bank conflicts. Where FFMA takes one column at a time, pairs are swapped: a product's three registers then never lie
// in the same register bank.
__device__ __forceinline__ int inverse_unit(int row, int col) { return col / 4 ^ (row / 4 & 7); }
#if __CUDA_ARCH__ >= 1000
constexpr int kSwap = 0;
#else
constexpr int kSwap = 1;
#endif

// Two adjacent columns at a time: one instruction on sm_100, two elsewhere, the same bits.
__device__ __forceinline__ void multiply(float (&d)[2], float a, float b0, float b1) {
#if __CUDA_ARCH__ >= 1000
  asm("{.reg .b64 a, b, d; mov.b64 a, {%2, %2}; mov.b64 b, {%3, %4}; mul.rn.f32x2 d, a, b; mov.b64 {%0, %1}, d;}"
      : "=f"(d[0]), "=f"(d[1]) : "f"(a), "f"(b0), "f"(b1));
#else
  d[0] = __fmul_rn(a, b0), d[1] = __fmul_rn(a, b1);
#endif
}
__device__ __forceinline__ void multiply_add(float (&d)[2], float a, float b0, float b1) {
#if __CUDA_ARCH__ >= 1000
  asm("{.reg .b64 a, b, d; mov.b64 a, {%2, %2}; mov.b64 b, {%3, %4}; mov.b64 d, {%0, %1};"
      " fma.rn.f32x2 d, a, b, d; mov.b64 {%0, %1}, d;}"
      : "+f"(d[0]), "+f"(d[1]) : "f"(a), "f"(b0), "f"(b1));
#else
  d[0] = __fmaf_rn(a, b0, d[0]), d[1] = __fmaf_rn(a, b1, d[1]);
#endif
}
// keep * d + b: the sum of d and b rounded once where keep is 1, b where keep is 0.
__device__ __forceinline__ void add_kept(float& d0, float& d1, float keep, const float (&b)[2]) {
#if __CUDA_ARCH__ >= 1000
  asm("{.reg .b64 k, b, d; mov.b64 k, {%2, %2}; mov.b64 b, {%3, %4}; mov.b64 d, {%0, %1};"
      " fma.rn.f32x2 d, d, k, b; mov.b64 {%0, %1}, d;}"
      : "+f"(d0), "+f"(d1) : "f"(keep), "f"(b[0]), "f"(b[1]));
#else
  d0 = __fmaf_rn(d0, keep, b[0]), d1 = __fmaf_rn(d1, keep, b[1]);
#endif
}

// Within an ulp of 1 / x for x from 2^-126 to 2^126, without the branch of the correctly rounded reciprocal.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

template <bool kVectors>
__device__ __forceinline__ float4 read4(const float* p) {
  if constexpr (kVectors) return load4(p);
  return make_float4(p[0], p[1], p[2], p[3]);
}
// kCount adjacent floats: 2 or a multiple of 4.
template <bool kVectors, int kCount>
__device__ __forceinline__ void read(float (&to)[kCount], const float* p) {
  if constexpr (!kVectors) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = p[i];
  } else if constexpr (kCount == 2) {
    const float2 v = *reinterpret_cast<const float2*>(p);
    to[0] = v.x, to[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = load4(p + i);
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  }
}
template <bool kVectors>
__device__ __forceinline__ void write4(float* p, float a, float b, float c, float d) {
  if constexpr (kVectors) {
    *reinterpret_cast<float4*>(p) = make_float4(a, b, c, d);
  } else {
    p[0] = a, p[1] = b, p[2] = c, p[3] = d;
  }
}

// Rows of a matrix, kDim floats each, towards L2, where they lie together: by one thread.
template <int kDim>
__device__ __forceinline__ void prefetch(const float* rows, int64_t stride, int count) {
  if (stride == kDim)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(rows), "r"(count * kDim * 4) : "memory");
}

// What one block does: the sweep of a matrix, and `rows` rows of its T and J.
struct Work {
  int64_t n;
  int row, rows;
};

// The first `whole` matrices have a block each, the rest `share` blocks each, which all sweep.
struct Plan {
  uint32_t whole, blocks;  // blocks = whole + share (count - whole)
  uint32_t share;
  uint32_t at_a_time;  // blocks that the device holds

  template <int kDim>
  __device__ __forceinline__ Work work(uint32_t block) const {
    asm volatile("" : "+r"(block));  // worked out anew at each call, as a thread's place is
    if (block < whole) return {block, 0, kDim};
    const uint32_t rest = block - whole, rows = kDim / share;
    return {static_cast<int64_t>(whole) + rest / share, static_cast<int>(rest % share * rows), static_cast<int>(rows)};
  }
};

}  // namespace jit_kernels::vdn_delta_factors::fp32
