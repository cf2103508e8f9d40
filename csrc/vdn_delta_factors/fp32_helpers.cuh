// The helper warps of the fp32 kernel: the panels one step ahead, and the inputs of the next matrix. See fp32.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "arguments.cuh"
#include "fp32_team.cuh"

namespace jit_kernels::vdn_delta_factors::fp32 {

// By one warp.
template <int kDim>
__device__ __forceinline__ void fetch_B(TeamMemory<kDim>& shared, const Arguments& args, const Work& work, int lane) {
  const float* B = args.B + work.n * args.B_batch + work.row * args.B_row;
  const unsigned barrier = shared_address(&shared.arrived);
  const bool whole = args.B_row == kDim;
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(work.rows * kDim * 4)
                 : "memory");
  __syncwarp();
#pragma unroll 1
  for (int row = lane; row < (whole ? 1 : work.rows); row += 32)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared.B[row])),
                 "l"(B + row * args.B_row), "r"((whole ? work.rows : 1) * kDim * 4), "r"(barrier)
                 : "memory");
}

// By one warp, at step k: an eighth of the next A towards L2, and the next B once all compute threads hold their part
// of this one.
template <int kDim>
__device__ __forceinline__ void move_data(TeamMemory<kDim>& shared, const Arguments& args, const Plan& plan,
                                          int64_t next, int k, int lane) {
  asm volatile("" : "+l"(next));  // keeps addresses out of registers between steps
  if (next >= plan.turns) return;
  const Work work = plan.work<kDim>(next);
  if (lane == 0 && args.A_row == kDim)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(args.A + work.n * args.A_batch + 8 * k * kDim),
                 "r"(8 * kDim * 4) : "memory");
  if (k == 1) fetch_B<kDim>(shared, args, work, lane);
}

template <int kDim, bool kVectors>
__device__ __forceinline__ void help(TeamMemory<kDim>& shared, const Arguments& args, const Plan& plan, int team,
                                     int thread, int64_t first, int64_t step) {
  using S = Shape<kDim>;
  constexpr int R = S::kHelperRows, G = S::kGroups;
  const int barriers = 1 + S::kBarriers * team, lane = thread % 32;
  if (kVectors && thread < 32 && first < plan.turns) fetch_B<kDim>(shared, args, plan.work<kDim>(first), lane);
#pragma unroll 1
  for (int64_t turn = first; turn < plan.turns; turn += step) {
    float y[R][8];
    barrier_sync(barriers, S::kAll);
#pragma unroll 1
    for (int k = 0; k < G; ++k) {
      if (kVectors && thread < 32) move_data<kDim>(shared, args, plan, turn + step, k, lane);
      float c[R][8];
#pragma unroll
      for (int q = 0; q < R; ++q)
#pragma unroll
        for (int p = 0; p < 8; ++p) c[q][p] = shared.raw[k & 1][p][thread + q * S::kHelpers];
      if (k > 0) {
        const auto& Z = shared.Z[k - 1 & 1];
        float sum[R][4][2];
#pragma unroll
        for (int p = 7; p >= 0; --p) {
          const float4 lo = load4(&Z[p][8 * k]), hi = load4(&Z[p][8 * k + 4]);
          const float z[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
          for (int q = 0; q < R; ++q)
#pragma unroll
            for (int h = 0; h < 4; ++h) {
              if (p == 7) {
                multiply(sum[q][h], y[q][p], z[2 * h], z[2 * h + 1]);
              } else {
                multiply_add(sum[q][h], y[q][p], z[2 * h], z[2 * h + 1]);
              }
            }
        }
#pragma unroll
        for (int q = 0; q < R; ++q) {
          const float keep = (thread + q * S::kHelpers) / 8 == k - 1 ? 0.0f : 1.0f;
#pragma unroll
          for (int h = 0; h < 4; ++h) add_kept(c[q][2 * h], c[q][2 * h + 1], keep, sum[q][h]);
        }
      }
      // M_SS = L D L^T, by the warp that holds the pivot rows.
      if (8 * k % S::kHelpers / 32 == thread / 32) {
        const int first_lane = 8 * k % 32;
        const bool lower = R == 1 || 8 * k < S::kHelpers;
        float v[8], d[8];
        int bad = 0;
#pragma unroll
        for (int p = 0; p < 8; ++p) v[p] = lower ? c[0][p] : c[R - 1][p];
#pragma unroll
        for (int p = 0; p < 8; ++p) {
          const float pivot = __shfl_sync(~0u, v[p], first_lane + p);
          if (!(pivot > 0.0f) && bad == 0) bad = 8 * k + p + 1;
          d[p] = reciprocal(pivot);
          const float l = __fmul_rn(v[p], d[p]);
#pragma unroll
          for (int e = p + 1; e < 8; ++e) v[e] = __fmaf_rn(-l, __shfl_sync(~0u, v[p], first_lane + e), v[e]);
          v[p] = l;
        }
        if (lane / 8 == k % 4) {
#pragma unroll
          for (int p = 0; p < 8; p += 4) write4<true>(&shared.pivot[lane % 8][p], v[p], v[p + 1], v[p + 2], v[p + 3]);
#pragma unroll
          for (int q = 0; q < R; ++q)
#pragma unroll
            for (int p = 0; p < 8; ++p)
              if (lower == (q == 0)) c[q][p] = lane % 8 == p ? -1.0f : 0.0f;
        }
        if (lane == 0) {
#pragma unroll
          for (int p = 0; p < 8; p += 4) write4<true>(&shared.diagonal[p], d[p], d[p + 1], d[p + 2], d[p + 3]);
          if (k == 0 || (bad != 0 && shared.info == 0)) shared.info = bad;
          if (k + 1 == G && args.info) args.info[plan.work<kDim>(turn).n] = shared.info;
        }
      }
      if constexpr (S::kHelpers > 32) {
        barrier_sync(barriers + 2, S::kHelpers);
      } else {
        __syncwarp();
      }
      float l[8][8], d[8];
#pragma unroll
      for (int r = 1; r < 8; ++r)
#pragma unroll
        for (int p = 0; p < r; p += 4) {
          const float4 v = load4(&shared.pivot[r][p]);
          l[r][p] = v.x, l[r][p + 1] = v.y, l[r][p + 2] = v.z, l[r][p + 3] = v.w;
        }
#pragma unroll
      for (int p = 0; p < 8; p += 4) {
        const float4 v = load4(&shared.diagonal[p]);
        d[p] = v.x, d[p + 1] = v.y, d[p + 2] = v.z, d[p + 3] = v.w;
      }
#pragma unroll
      for (int q = 0; q < R; ++q) {
        const int row = thread + q * S::kHelpers;
        float z[8];
#pragma unroll
        for (int p = 0; p < 8; ++p) {
#pragma unroll
          for (int r = p + 1; r < 8; ++r) c[q][r] = __fmaf_rn(-l[r][p], c[q][p], c[q][r]);
          y[q][p] = c[q][p];
          shared.Y[k & 1][p][row] = c[q][p];
          z[p] = __fmul_rn(-c[q][p], d[p]);
          shared.Z[k & 1][p][row] = z[p];
        }
#pragma unroll
        for (int p = 7; p >= 0; --p) {
#pragma unroll
          for (int e = 0; e < p; ++e) z[e] = __fmaf_rn(-l[p][e], z[p], z[e]);
          shared.W[k & 1][p][row] = z[p];
        }
        if (k == 0)
          shared.alpha[row] =
              __ldg(args.alpha + plan.work<kDim>(turn).n * args.alpha_batch + row * args.alpha_element);
      }
      barrier_sync(barriers, S::kAll);
    }
  }
}

}  // namespace jit_kernels::vdn_delta_factors::fp32
