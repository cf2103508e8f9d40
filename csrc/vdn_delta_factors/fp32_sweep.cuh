// The first phase of the fp32 kernel: M = I + a A swept into -M^-1, in registers. See fp32.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp32_block.cuh"
#include "fp32_panels.cuh"

namespace jit_kernels::vdn_delta_factors::fp32 {

template <int kDim, bool kVectors>
struct Sweep {
  static constexpr int G = Shape<kDim>::kGroups, X = Shape<kDim>::kExtra;

  BlockMemory<kDim>& shared;
  Place<kDim> at = Place<kDim>::get();
  float M[4][8], E[X];

  explicit __device__ __forceinline__ Sweep(BlockMemory<kDim>& memory) : shared(memory) {}

  // What is loaded above the diagonal never reaches an element that is kept.
  __device__ __forceinline__ void load(const float* A, int64_t stride) {
    const int row = 8 * at.i + 4 * at.half, col = 8 * at.j;
    if (at.i >= at.j) {
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 8; c += 4) {
          const float4 v = read4<kVectors>(A + (row + r) * stride + col + c);
          M[r][c] = v.x, M[r][c + 1] = v.y, M[r][c + 2] = v.z, M[r][c + 3] = v.w;
        }
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float4 v = read4<kVectors>(A + (col + c) * stride + row);
        M[0][c] = v.x, M[1][c] = v.y, M[2][c] = v.z, M[3][c] = v.w;
      }
    }
    if (at.extra) {
#pragma unroll
      for (int c = 0; c < X; c += 4) {
        const float4 v = read4<kVectors>(A + (col + kDim / 2 + at.extra_row) * stride + col + at.extra_col + c);
        E[c] = v.x, E[c + 1] = v.y, E[c + 2] = v.z, E[c + 3] = v.w;
      }
    }
  }
  __device__ __forceinline__ void scale(float scale) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 8; ++c)
        M[r][c] = __fmaf_rn(scale, M[r][c], at.i == at.j && 4 * at.half + r == c ? 1.0f : 0.0f);
#pragma unroll
    for (int c = 0; c < X; ++c) E[c] *= scale;
  }

  // The columns of block k to shared memory, from the tiles below and left of the pivot block, and (publish_extra) from
  // the wrapped tiles. The outer conditions are a warp's.
  __device__ __forceinline__ void publish(unsigned row_blocks, int k) {
    auto& raw = shared.panels.raw[k & 1];
    if (k >> 2 == at.j >> 2) {
      if (at.j == k) {
#pragma unroll
        for (int c = 0; c < 8; ++c)
          write4<true>(&raw[c][8 * at.i + 4 * at.half], M[0][c], M[1][c], M[2][c], M[3][c]);
      }
    }
    if (row_blocks >> k & 1) {
      if (at.i == k && at.j != k) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
          for (int c = 0; c < 8; c += 4)
            write4<true>(&raw[4 * at.half + r][8 * at.j + c], M[r][c], M[r][c + 1], M[r][c + 2], M[r][c + 3]);
      }
    }
  }
  __device__ __forceinline__ void publish_extra(int k) {
    auto& raw = shared.panels.raw[k & 1];
    if (at.j == k) {
#pragma unroll
      for (int c = 0; c < X; ++c) raw[at.extra_col + c][8 * at.j + kDim / 2 + at.extra_row] = E[c];
    }
    if (at.j + G / 2 == k) {
#pragma unroll
      for (int c = 0; c < X; c += 4)
        write4<true>(&raw[at.extra_row][8 * at.j + at.extra_col + c], E[c], E[c + 1], E[c + 2], E[c + 3]);
    }
  }

  // M += Y Z^T, to nothing in the rows and columns of the pivot block. Each sum of 8 products is formed apart and added
  // once; the first pivot's product comes last.
  __device__ __forceinline__ void update(int k) {
    const auto& Y = shared.panels.Y[k & 1];
    const auto& Z = shared.panels.Z[k & 1];
    float sum[4][4][2];
    struct Operands {
      float r[4], c[8];
    };
    const float* left = &Y[7][8 * at.i + 4 * at.half];
    const float* right = &Z[7][8 * at.j];
    const auto load = [&](Operands& to, int s) {
      const float4 v = load4(left - s * kDim), lo = load4(right - s * kDim), hi = load4(right - s * kDim + 4);
      to = {{v.x, v.y, v.z, v.w}, {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}};
    };
    const auto accumulate = [&](const Operands& from) {
#pragma unroll
      for (int q = 0; q < 4; ++q)
#pragma unroll
        for (int h = 0; h < 4; ++h) multiply_add(sum[q][h], from.r[q], from.c[2 * h], from.c[2 * h + 1]);
    };
    // A loop, not unrolled: ptxas spends 90 moves a step on the unrolled form.
    Operands now, next;
    load(now, 0);
    load(next, 1);
#pragma unroll
    for (int q = 0; q < 4; ++q)
#pragma unroll
      for (int h = 0; h < 4; ++h) multiply(sum[q][h], now.r[q], now.c[2 * h], now.c[2 * h + 1]);
#pragma unroll 1
    for (int s = 0; s < 3; ++s) {
      load(now, 2);
      accumulate(next);
      load(next, 3);
      accumulate(now);
      left -= 2 * kDim, right -= 2 * kDim;
    }
    accumulate(next);
    const float keep = at.i == k || at.j == k ? 0.0f : 1.0f;
#pragma unroll
    for (int q = 0; q < 4; ++q)
#pragma unroll
      for (int h = 0; h < 4; ++h) add_kept(M[q][2 * h], M[q][2 * h + 1], keep, sum[q][h]);
  }
  __device__ __forceinline__ void update_extra(int k) {
    const auto& Y = shared.panels.Y[k & 1];
    const auto& Z = shared.panels.Z[k & 1];
    float sum[X / 2][2];
#pragma unroll
    for (int p = 7; p >= 0; --p) {
      const float y = Y[p][8 * at.j + kDim / 2 + at.extra_row];
#pragma unroll
      for (int c = 0; c < X; c += 4) {
        const float4 z = load4(&Z[p][8 * at.j + at.extra_col + c]);
        if (p == 7) {
          multiply(sum[c / 2], y, z.x, z.y);
          multiply(sum[c / 2 + 1], y, z.z, z.w);
        } else {
          multiply_add(sum[c / 2], y, z.x, z.y);
          multiply_add(sum[c / 2 + 1], y, z.z, z.w);
        }
      }
    }
    const float keep = at.j == k || at.j + G / 2 == k ? 0.0f : 1.0f;
#pragma unroll
    for (int c = 0; c < X; c += 2) add_kept(E[c], E[c + 1], keep, sum[c / 2]);
  }

  // All steps. Step k begins with the update left over from step k - 1, beside which its pivot block is factored.
  __device__ __forceinline__ void run() {
    at = Place<kDim>::get();
    constexpr int kFactorWarps = kDim == 128 ? 4 : 2;
    const unsigned row_blocks = kDim == 64 ? ~0u : __reduce_or_sync(~0u, 1u << at.i);  // of this warp's tiles
    const int warp = at.thread / 32, lane = at.thread % 32, row = at.thread - (Shape<kDim>::kThreads - kDim);
    publish(row_blocks, 0);
    publish(row_blocks, 1);
    if (at.extra) publish_extra(0), publish_extra(1);
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < G; ++k) {
      if (warp == k % kFactorWarps) factor(shared, k, lane);
      if (k > 0) {
        update(k - 1);
        publish(row_blocks, k + 1);
        if (at.extra) update_extra(k - 1), publish_extra(k + 1);
      }
      float c[8];
      if (row >= 0) advance(shared, c, row, k);
      __syncthreads();
      if (row >= 0) substitute(shared, c, row, k);
      __syncthreads();
    }
    update(G - 1);
    if (at.extra) update_extra(G - 1);
    __syncthreads();
  }

  // The inverse, whole, to shared memory. In a diagonal tile the lower half is the matrix; the upper half is not kept
  // up to date.
  __device__ __forceinline__ void store() {
    at = Place<kDim>::get();
    const int row = 8 * at.i + 4 * at.half, col = 8 * at.j;
    if (at.i == at.j) {
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = r + 1; c < 4; ++c) {
          if (at.half == 0) M[r][c] = M[c][r];
          M[r][c + 4] = M[c][r + 4];
        }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      store4(row + r, col, -M[r][0], -M[r][1], -M[r][2], -M[r][3]);
      if (at.i != at.j || at.half) store4(row + r, col + 4, -M[r][4], -M[r][5], -M[r][6], -M[r][7]);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (at.i == at.j && (at.half == 0 || c >= 4)) continue;
      store4(col + c, row, -M[0][c], -M[1][c], -M[2][c], -M[3][c]);
    }
    if (at.extra) {
      const int r = col + kDim / 2 + at.extra_row;
#pragma unroll
      for (int c = 0; c < X; c += 4) store4(r, col + at.extra_col + c, -E[c], -E[c + 1], -E[c + 2], -E[c + 3]);
#pragma unroll
      for (int c = 0; c < X; ++c) {
        const int to = col + at.extra_col + c;
        shared.inverse[to][inverse_unit(to, r) * 4 + (r ^ kSwap) % 4] = -E[c];
      }
    }
  }
  __device__ __forceinline__ void store4(int row, int col, float a, float b, float c, float d) {
    float* p = &shared.inverse[row][inverse_unit(row, col) * 4];
    if constexpr (kSwap) {
      write4<true>(p, b, a, d, c);
    } else {
      write4<true>(p, a, b, c, d);
    }
  }
};

}  // namespace jit_kernels::vdn_delta_factors::fp32
