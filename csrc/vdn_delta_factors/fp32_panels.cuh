// A step's panels in the fp32 kernel's sweep: the pivot block's factors, and Y and Z from them. See fp32.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp32_block.cuh"

namespace jit_kernels::vdn_delta_factors::fp32 {

// Pivot block k, M_SS = L D L^T, by one warp, two elements of it a lane: brought from the state before update k - 1 to
// the state after it, then factored.
template <int kDim>
__device__ __forceinline__ void factor(BlockMemory<kDim>& shared, int k, int lane) {
  auto& panels = shared.panels;
  const int row = lane / 4, col = lane % 4 * 2;
  float c[2] = {panels.raw[k & 1][col][8 * k + row], panels.raw[k & 1][col + 1][8 * k + row]};
  if (k > 0) {
    float sum[2];
#pragma unroll
    for (int p = 7; p >= 0; --p) {
      const float y = panels.Y[k - 1 & 1][p][8 * k + row];
      const float2 z = *reinterpret_cast<const float2*>(&panels.Z[k - 1 & 1][p][8 * k + col]);
      if (p == 7) {
        multiply(sum, y, z.x, z.y);
      } else {
        multiply_add(sum, y, z.x, z.y);
      }
    }
    add_kept(c[0], c[1], 1.0f, sum);
  }
  // What becomes of elements above the diagonal and of finished columns does not matter, so nothing is masked.
  float d[8], l[2];
  unsigned failed = 0;
#pragma unroll
  for (int p = 0; p < 8; ++p) {
    const float element = c[p & 1];
    const float pivot = __shfl_sync(~0u, element, 4 * p + p / 2);
    const float below = __shfl_sync(~0u, element, 4 * row + p / 2);
    const float beside[2] = {__shfl_sync(~0u, element, 4 * col + p / 2),
                             __shfl_sync(~0u, element, 4 * col + 4 + p / 2)};
    if (!(pivot > 0.0f)) failed |= 1u << p;
    d[p] = reciprocal(pivot);
    const float factor = __fmul_rn(below, d[p]);
    if (col / 2 == p / 2) l[p & 1] = factor;
#pragma unroll
    for (int e = 0; e < 2; ++e) c[e] = __fmaf_rn(-factor, beside[e], c[e]);
  }
  *reinterpret_cast<float2*>(&panels.pivot[row][col]) = make_float2(l[0], l[1]);
  if (lane == 0) {
#pragma unroll
    for (int p = 0; p < 8; p += 4) write4<true>(&panels.diagonal[p], d[p], d[p + 1], d[p + 2], d[p + 3]);
    if (k == 0 || (failed != 0 && shared.info == 0)) shared.info = failed == 0 ? 0 : 8 * k + __ffs(failed);
  }
}

// Panel k, one row of it a thread: brought from the state before update k - 1 to the state after it.
template <int kDim>
__device__ __forceinline__ void advance(const BlockMemory<kDim>& shared, float (&c)[8], int row, int k) {
  const auto& panels = shared.panels;
#pragma unroll
  for (int p = 0; p < 8; ++p) c[p] = panels.raw[k & 1][p][row];
  if (k > 0) {
    float sum[4][2];
#pragma unroll
    for (int p = 7; p >= 0; --p) {
      const float y = panels.Y[k - 1 & 1][p][row];
      const float4 lo = load4(&panels.Z[k - 1 & 1][p][8 * k]), hi = load4(&panels.Z[k - 1 & 1][p][8 * k + 4]);
      const float z[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        if (p == 7) {
          multiply(sum[h], y, z[2 * h], z[2 * h + 1]);
        } else {
          multiply_add(sum[h], y, z[2 * h], z[2 * h + 1]);
        }
      }
    }
    const float keep = row / 8 == k - 1 ? 0.0f : 1.0f;
#pragma unroll
    for (int h = 0; h < 4; ++h) add_kept(c[2 * h], c[2 * h + 1], keep, sum[h]);
  }
  if (row / 8 == k) {
#pragma unroll
    for (int p = 0; p < 8; ++p) c[p] = row % 8 == p ? -1.0f : 0.0f;
  }
}

// Y = C L^-T and Z = -Y D^-1 of that row.
template <int kDim>
__device__ __forceinline__ void substitute(BlockMemory<kDim>& shared, float (&c)[8], int row, int k) {
  auto& panels = shared.panels;
  float l[8][8], d[8];
#pragma unroll
  for (int r = 1; r < 8; ++r)
#pragma unroll
    for (int p = 0; p < r; p += 4) {
      const float4 v = load4(&panels.pivot[r][p]);
      l[r][p] = v.x, l[r][p + 1] = v.y, l[r][p + 2] = v.z, l[r][p + 3] = v.w;
    }
#pragma unroll
  for (int p = 0; p < 8; p += 4) {
    const float4 v = load4(&panels.diagonal[p]);
    d[p] = v.x, d[p + 1] = v.y, d[p + 2] = v.z, d[p + 3] = v.w;
  }
#pragma unroll
  for (int p = 0; p < 8; ++p) {
#pragma unroll
    for (int r = p + 1; r < 8; ++r) c[r] = __fmaf_rn(-l[r][p], c[p], c[r]);
    panels.Y[k & 1][p][row] = c[p];
    panels.Z[k & 1][p][row] = __fmul_rn(-c[p], d[p]);
  }
}

}  // namespace jit_kernels::vdn_delta_factors::fp32
