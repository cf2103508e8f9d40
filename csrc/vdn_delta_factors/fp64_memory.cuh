// What the fp64 tensor-core kernels have in common: which block does what, and global memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "arguments.cuh"
#include "dmma.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

// The first `whole` matrices take a block each, the others `parts` blocks that all invert and share out J.
struct Split {
  int64_t whole;
  int parts;
};

// Plain loads: those of __ldg need not see what the grid before wrote, if this one began before that ended.
template <bool kVectors>
__device__ __forceinline__ float2 load_pair(const float* p) {
  if constexpr (kVectors) return *reinterpret_cast<const float2*>(p);
  return make_float2(p[0], p[1]);
}

template <bool kVectors>
__device__ __forceinline__ float4 load_quad(const float* p) {
  if constexpr (kVectors) return *reinterpret_cast<const float4*>(p);
  return make_float4(p[0], p[1], p[2], p[3]);
}

template <bool kVectors>
__device__ __forceinline__ void store_pair(float* p, float x, float y) {
  if constexpr (kVectors) {
    __stcs(reinterpret_cast<float2*>(p), make_float2(x, y));
  } else {
    p[0] = x;
    p[1] = y;
  }
}

template <bool kVectors>
__device__ __forceinline__ void store_quad(float* p, float4 v) {
  if constexpr (kVectors) {
    __stcs(reinterpret_cast<float4*>(p), v);
  } else {
    p[0] = v.x;
    p[1] = v.y;
    p[2] = v.z;
    p[3] = v.w;
  }
}

// The lines of a matrix or of its lower triangle, by all threads of a block.
template <int kDim, int kThreads>
__device__ __forceinline__ void prefetch(const float* rows, int64_t row_stride, bool lower) {
  constexpr int kLines = kDim / 32;
  for (int i = threadIdx.x; i < kDim * kLines; i += kThreads) {
    const int row = i / kLines, first = (i % kLines) * 32;
    if (!lower || first <= row) prefetch_l2(rows + row * row_stride + first);
  }
}

// T and J of a matrix that has no factor, by all threads of its `parts` blocks.
template <int kDim, int kThreads>
__device__ __forceinline__ void fill_nan(const Arguments& args, int64_t matrix, int part, int parts) {
  float* T = args.T + matrix * args.T_batch;
  float* J = args.J + matrix * args.J_batch;
  const float nan = __int_as_float(0x7fc00000);
  for (int i = part * kThreads + threadIdx.x; i < kDim * kDim; i += parts * kThreads) T[i] = J[i] = nan;
}

}  // namespace jit_kernels::vdn_delta_factors::fp64
