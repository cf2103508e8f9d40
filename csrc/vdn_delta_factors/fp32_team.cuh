// What the two roles of the fp32 kernel share: a team's shape, memory, work, arithmetic and barriers. See fp32.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jit_kernels::vdn_delta_factors::fp32 {

constexpr int kThreads = 384;
constexpr int kComputeThreads = 256;
constexpr int kHelperThreads = kThreads - kComputeThreads;

template <int kDim>
struct Shape {
  static_assert(kDim == 64 || kDim == 128);
  static constexpr int kGroups = kDim / 8;
  static constexpr int kTeamThreads = kGroups * kGroups;
  static constexpr int kTeams = kComputeThreads / kTeamThreads;
  static constexpr int kHelpers = kHelperThreads / kTeams;
  static constexpr int kHelperRows = kDim / kHelpers;
  static constexpr int kExtra = 512 / kDim;  // elements of the wrapped tile a thread holds
  static constexpr int kAll = kTeamThreads + kHelpers;
  // Named barriers: a team's, its compute warps', its helpers'.
  static constexpr int kBarriers = 3;
};

template <int kDim>
struct alignas(128) TeamMemory {
  float stage[kDim][kDim];
  float B[kDim][kDim];
  float raw[2][8][kDim];
  float Y[2][8][kDim];
  float Z[2][8][kDim];
  float W[2][8][kDim];
  float J[2][8][kDim];
  float pivot[8][8];  // L below the diagonal
  float diagonal[8];  // 1 / D
  float alpha[kDim];
  uint64_t arrived;  // B's mbarrier
  int info;
};

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

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

template <bool kVectors>
__device__ __forceinline__ float4 read4(const float* p) {
  if constexpr (kVectors) return load4(p);
  return make_float4(p[0], p[1], p[2], p[3]);
}
template <bool kVectors>
__device__ __forceinline__ void write4(float* p, float a, float b, float c, float d) {
  if constexpr (kVectors) {
    *reinterpret_cast<float4*>(p) = make_float4(a, b, c, d);
  } else {
    p[0] = a, p[1] = b, p[2] = c, p[3] = d;
  }
}

// Within an ulp of 1 / x for x from 2^-126 to 2^126, without the branch of the correctly rounded reciprocal.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

__device__ __forceinline__ void wait_arrived(const uint64_t* barrier, int parity) {
  int done;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (!done);
}

// One team's turn: a matrix and the rows of J that go with it, kDim or kDim / 2 of them.
struct Work {
  int64_t n;
  int row, rows;
};

// The first `whole` matrices are work for one team each, each of the rest is shared by two.
struct Plan {
  int64_t whole, turns;  // turns = whole + 2 (count - whole)

  template <int kDim>
  __device__ __forceinline__ Work work(int64_t turn) const {
    if (turn < whole) return {turn, 0, kDim};
    const int64_t rest = turn - whole;
    return {whole + rest / 2, static_cast<int>(rest & 1) * (kDim / 2), kDim / 2};
  }
};

__device__ __forceinline__ void store_stage(const void* stage, float* to, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
               "r"(shared_address(stage)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_stage_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace jit_kernels::vdn_delta_factors::fp32
