// The compute warps of the fp32 kernel: M and J in registers, one interval of the sweep after another. See fp32.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "arguments.cuh"
#include "fp32_team.cuh"

namespace jit_kernels::vdn_delta_factors::fp32 {

template <int kDim, bool kVectors>
struct Compute {
  using S = Shape<kDim>;
  static constexpr int G = S::kGroups, X = S::kExtra;

  TeamMemory<kDim>& shared;
  const Arguments& args;
  int thread, barriers;
  int j, t, i, half;         // column group, rows of J, tile row and half of M
  int extra_row, extra_col;  // piece of the wrapped tile (j + G/2, j): its row, its first column
  bool extra;
  unsigned row_blocks;  // of this warp's tiles
  float M[4][8], E[X], J[8][8];

  __device__ __forceinline__ Compute(TeamMemory<kDim>& memory, const Arguments& arguments, int team, int team_thread)
      : shared(memory), args(arguments), thread(team_thread), barriers(1 + S::kBarriers * team) {
    const int warp = thread / 32, lane = thread % 32;
    const int lj = (lane & 1) | (lane >> 1 & 2), li = (lane >> 1 & 1) | (lane >> 2 & 6);
    // Warps that hold a piece of the wrapped tile are spread evenly over the four schedulers.
    j = 4 * (kDim == 128 ? warp >> 1 : warp ^ team >> 1) + lj;
    t = (kDim == 128 ? 8 * (warp & 1) : 0) + li;
    half = t & 1;
    // Columns j and j ^ 1 share their row tiles but one, so that neighbouring lanes share reads of Y.
    const int base = j & ~1, slot = t >> 1;
    i = slot > 0 ? (base + slot) % G : (j & 1) ? (base + G / 2) % G : j;
    extra = j < G / 2;
    extra_row = t * X / 8;
    extra_col = t * X % 8;
    row_blocks = __reduce_or_sync(~0u, 1u << i);
  }

  __device__ __forceinline__ void load_A(int64_t n) {
    const float* A = args.A + n * args.A_batch;
    const int row = 8 * i + 4 * half, col = 8 * j;
    if (i >= j) {
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 8; c += 4) {
          const float4 v = read4<kVectors>(A + (row + r) * args.A_row + col + c);
          M[r][c] = v.x, M[r][c + 1] = v.y, M[r][c + 2] = v.z, M[r][c + 3] = v.w;
        }
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float4 v = read4<kVectors>(A + (col + c) * args.A_row + row);
        M[0][c] = v.x, M[1][c] = v.y, M[2][c] = v.z, M[3][c] = v.w;
      }
    }
    if (extra) {
#pragma unroll
      for (int c = 0; c < X; c += 4) {
        const float4 v = read4<kVectors>(A + (col + kDim / 2 + extra_row) * args.A_row + col + extra_col + c);
        E[c] = v.x, E[c + 1] = v.y, E[c + 2] = v.z, E[c + 3] = v.w;
      }
    }
  }

  // What was loaded above the diagonal stays in registers whose values nothing reads.
  __device__ __forceinline__ void scale_A() {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 8; ++c)
        M[r][c] = __fmaf_rn(args.a_scale, M[r][c], i == j && 4 * half + r == c ? 1.0f : 0.0f);
#pragma unroll
    for (int c = 0; c < X; ++c) E[c] *= args.a_scale;
  }

  template <int kRows>
  __device__ __forceinline__ void load_B(const float* B, int64_t row_stride) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < 8; c += 4) {
        const float4 v = read4<kVectors>(B + (kRows * t + r) * row_stride + 8 * j + c);
        J[r][c] = args.b_scale * v.x, J[r][c + 1] = args.b_scale * v.y;
        J[r][c + 2] = args.b_scale * v.z, J[r][c + 3] = args.b_scale * v.w;
      }
  }

  // The columns of block k, from the tiles below and left of the pivot block. The outer conditions are a warp's.
  __device__ __forceinline__ void publish_M(int k) {
    auto& raw = shared.raw[k & 1];
    if (k >> 2 == j >> 2) {
      if (j == k) {
#pragma unroll
        for (int c = 0; c < 8; ++c)
          write4<true>(&raw[c][8 * i + 4 * half], M[0][c], M[1][c], M[2][c], M[3][c]);
        if (extra) {
#pragma unroll
          for (int c = 0; c < X; ++c) raw[extra_col + c][8 * j + kDim / 2 + extra_row] = E[c];
        }
      }
    }
    if (row_blocks >> k & 1) {
      if (i == k && j != k) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
          for (int c = 0; c < 8; c += 4)
            write4<true>(&raw[4 * half + r][8 * j + c], M[r][c], M[r][c + 1], M[r][c + 2], M[r][c + 3]);
      }
    }
    if (k - G / 2 >> 2 == j >> 2) {
      if (k - G / 2 == j) {
#pragma unroll
        for (int c = 0; c < X; c += 4)
          write4<true>(&raw[extra_row][8 * j + extra_col + c], E[c], E[c + 1], E[c + 2], E[c + 3]);
      }
    }
  }

  template <int kRows>
  __device__ __forceinline__ void publish_J(int k) {
    if (k >> 2 != j >> 2) return;
    if (j == k) {
      auto& panel = shared.J[k & 1];
#pragma unroll
      for (int c = 0; c < 8; ++c)
#pragma unroll
        for (int r = 0; r < kRows; r += 4)
          write4<true>(&panel[c][kRows * t + r], J[r][c], J[r + 1][c], J[r + 2][c], J[r + 3][c]);
    }
  }

  // Rows of one panel times the rows of another; the sum over the panels' 8 columns is added once, to nothing (keep 0)
  // in the rows and columns of the pivot block.
  template <int kRows, bool kDescending>
  __device__ __forceinline__ void update(float (*acc)[8], float keep, const float (&left)[8][kDim], int r0,
                                         const float (&right)[8][kDim], int c0) {
    float sum[kRows][4][2];
    struct Operands {
      float r[kRows], c[8];
    };
    const float* left_at = &left[kDescending ? 7 : 0][r0];
    const float* right_at = &right[kDescending ? 7 : 0][c0];
    constexpr int kStep = kDescending ? -kDim : kDim;
    const auto load = [&](Operands& to, int s) {
#pragma unroll
      for (int q = 0; q < kRows; q += 4) {
        const float4 v = load4(left_at + s * kStep + q);
        to.r[q] = v.x, to.r[q + 1] = v.y, to.r[q + 2] = v.z, to.r[q + 3] = v.w;
      }
#pragma unroll
      for (int q = 0; q < 8; q += 4) {
        const float4 v = load4(right_at + s * kStep + q);
        to.c[q] = v.x, to.c[q + 1] = v.y, to.c[q + 2] = v.z, to.c[q + 3] = v.w;
      }
    };
    const auto start = [&](const Operands& from) {
#pragma unroll
      for (int q = 0; q < kRows; ++q)
#pragma unroll
        for (int h = 0; h < 4; ++h) multiply(sum[q][h], from.r[q], from.c[2 * h], from.c[2 * h + 1]);
    };
    const auto accumulate = [&](const Operands& from) {
#pragma unroll
      for (int q = 0; q < kRows; ++q)
#pragma unroll
        for (int h = 0; h < 4; ++h) multiply_add(sum[q][h], from.r[q], from.c[2 * h], from.c[2 * h + 1]);
    };
    // A loop, not unrolled: ptxas spends 90 moves a step on the unrolled form.
    Operands now, next;
    load(now, 0);
    load(next, 1);
    start(now);
#pragma unroll 1
    for (int s = 0; s < 3; ++s) {
      load(now, 2);
      accumulate(next);
      load(next, 3);
      accumulate(now);
      left_at += 2 * kStep, right_at += 2 * kStep;
    }
    accumulate(next);
#pragma unroll
    for (int q = 0; q < kRows; ++q)
#pragma unroll
      for (int h = 0; h < 4; ++h) add_kept(acc[q][2 * h], acc[q][2 * h + 1], keep, sum[q][h]);
  }

  __device__ __forceinline__ void update_M(int k) {
    const auto& Y = shared.Y[k & 1];
    const auto& Z = shared.Z[k & 1];
    update<4, true>(M, i == k || j == k ? 0.0f : 1.0f, Y, 8 * i + 4 * half, Z, 8 * j);
    if (extra) {
      float sum[X / 2][2];
#pragma unroll
      for (int p = 7; p >= 0; --p) {
        const float y = Y[p][8 * j + kDim / 2 + extra_row];
#pragma unroll
        for (int c = 0; c < X; c += 4) {
          const float4 z = load4(&Z[p][8 * j + extra_col + c]);
          if (p == 7) {
            multiply(sum[c / 2], y, z.x, z.y);
            multiply(sum[c / 2 + 1], y, z.z, z.w);
          } else {
            multiply_add(sum[c / 2], y, z.x, z.y);
            multiply_add(sum[c / 2 + 1], y, z.z, z.w);
          }
        }
      }
#pragma unroll
      for (int c = 0; c < X; c += 2) add_kept(E[c], E[c + 1], j == k || j + G / 2 == k ? 0.0f : 1.0f, sum[c / 2]);
    }
  }

  // alpha * inverse; the addition of +0 turns the -0 of an exactly zero element into +0.
  __device__ __forceinline__ float transition(float alpha, float m, bool bad) {
    return bad ? __int_as_float(0x7fffffff) : __fmaf_rn(alpha, -m, 0.0f);
  }

  __device__ __forceinline__ void write_T(float* T) {
    const bool bad = shared.info != 0;
    const int row = 8 * i + 4 * half, col = 8 * j;
    if (i == j) {
      // The lower half of the tile is the matrix; its upper half is not kept up to date.
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = r + 1; c < 4; ++c) {
          if (half == 0) M[r][c] = M[c][r];
          M[r][c + 4] = M[c][r + 4];
        }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float alpha = shared.alpha[row + r];
      float v[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) v[c] = transition(alpha, M[r][c], bad);
      float* p = T + (row + r) * kDim + col;
      write4<kVectors>(p, v[0], v[1], v[2], v[3]);
      if (i != j || half) write4<kVectors>(p + 4, v[4], v[5], v[6], v[7]);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (i == j && (half == 0 || c >= 4)) continue;
      const float alpha = shared.alpha[col + c];
      write4<kVectors>(T + (col + c) * kDim + row, transition(alpha, M[0][c], bad), transition(alpha, M[1][c], bad),
                       transition(alpha, M[2][c], bad), transition(alpha, M[3][c], bad));
    }
    if (extra) {
      const int r = col + kDim / 2 + extra_row;
      const float alpha = shared.alpha[r];
#pragma unroll
      for (int c = 0; c < X; c += 4)
        write4<kVectors>(T + r * kDim + col + extra_col + c, transition(alpha, E[c], bad),
                         transition(alpha, E[c + 1], bad), transition(alpha, E[c + 2], bad),
                         transition(alpha, E[c + 3], bad));
#pragma unroll
      for (int c = 0; c < X; ++c)
        T[(col + extra_col + c) * kDim + r] = transition(shared.alpha[col + extra_col + c], E[c], bad);
    }
  }

  template <int kRows>
  __device__ __forceinline__ void write_J(float* out) {
    if (shared.info != 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int c = 0; c < 8; ++c) J[r][c] = __int_as_float(0x7fffffff);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < 8; c += 4)
        write4<kVectors>(out + (kRows * t + r) * kDim + 8 * j + c, J[r][c], J[r][c + 1], J[r][c + 2], J[r][c + 3]);
  }

  __device__ __forceinline__ void sync_team() { barrier_sync(barriers, S::kAll); }

  // The staging buffer, complete, leaves for `to` without holding anybody up.
  __device__ __forceinline__ void send(int row, int rows, float* to) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_sync(barriers + 1, S::kTeamThreads);
    if (thread == 0) store_stage(shared.stage[row], to, rows * kDim * 4);
  }
  __device__ __forceinline__ void wait_sent() {
    if (thread == 0) wait_stage_read();
    barrier_sync(barriers + 1, S::kTeamThreads);
  }

  template <int kRows>
  __device__ __forceinline__ void sweep(const Work& work, int64_t next, int parity) {
    float* T = args.T + work.n * args.T_batch;
    float* J_out = args.J + work.n * args.J_batch + work.row * kDim;
    scale_A();
    publish_M(0);
    publish_M(1);
    sync_team();
    if constexpr (kVectors) {
      wait_arrived(&shared.arrived, parity);
      load_B<kRows>(&shared.B[0][0], kDim);
    } else {
      load_B<kRows>(args.B + work.n * args.B_batch + work.row * args.B_row, args.B_row);
    }
    publish_J<kRows>(0);
    sync_team();
#pragma unroll 1
    for (int k = 0; k < G; ++k) {
      update_M(k);
      if (k + 2 < G) publish_M(k + 2);
      if (k + 1 == G) {
        if constexpr (kVectors) {
          write_T(&shared.stage[0][0]);
          send(work.row, work.rows, T + work.row * kDim);
        } else if (work.row == 0) {
          write_T(T);
        }
        if (next >= 0) load_A(next);
      }
      update<kRows, false>(J, j == k ? 0.0f : 1.0f, shared.J[k & 1], kRows * t, shared.W[k & 1], 8 * j);
      if (k + 1 < G) {
        publish_J<kRows>(k + 1);
        // The J of the matrix before has left the staging buffer long ago.
        if (kVectors && k + 2 == G && thread == 0) wait_stage_read();
        sync_team();
      }
    }
    if constexpr (kVectors) {
      wait_sent();
      write_J<kRows>(&shared.stage[0][0]);
      send(0, work.rows, J_out);
    } else {
      write_J<kRows>(J_out);
    }
  }

  __device__ __forceinline__ void run(const Plan& plan, int64_t first, int64_t step) {
    int parity = 0;
    if (first < plan.turns) load_A(plan.work<kDim>(first).n);
    for (int64_t turn = first; turn < plan.turns; turn += step, parity ^= 1) {
      const Work work = plan.work<kDim>(turn);
      const int64_t next = turn + step < plan.turns ? plan.work<kDim>(turn + step).n : -1;
      if (work.rows == kDim) {
        sweep<8>(work, next, parity);
      } else {
        sweep<4>(work, next, parity);
      }
    }
    if (kVectors && thread == 0) wait_stage_read();
  }
};

}  // namespace jit_kernels::vdn_delta_factors::fp32
