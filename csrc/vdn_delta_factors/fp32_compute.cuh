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
  const Plan& plan;
  float M[4][8], E[X], J[8][8];

  __device__ __forceinline__ Compute(TeamMemory<kDim>& memory, const Arguments& arguments, const Plan& plan_of_all)
      : shared(memory), args(arguments), plan(plan_of_all) {}

  // What a thread holds. Worked out again for each phase: the sweep has no registers to remember it.
  struct Place {
    int thread, j, t, i, half;  // column group, rows of J, tile row and half of M
    int extra_row, extra_col;   // piece of the wrapped tile (j + G/2, j): its row, its first column
    bool extra;
  };
  __device__ __forceinline__ static int index() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - kHelperThreads;
  }
  __device__ __forceinline__ static int barrier(int index) {
    return 1 + (S::kTeams == 1 ? 0 : S::kBarriers * (index / S::kTeamThreads));
  }
  __device__ __forceinline__ static Place place() {
    const int all = index(), thread = all % S::kTeamThreads, warp = thread / 32, lane = thread % 32;
    const int team = all / S::kTeamThreads;
    const int lj = (lane & 1) | (lane >> 1 & 2), li = (lane >> 1 & 1) | (lane >> 2 & 6);
    Place at;
    at.thread = thread;
    // Warps that hold a piece of the wrapped tile are spread evenly over the four schedulers.
    at.j = 4 * (kDim == 128 ? warp >> 1 : warp ^ team >> 1) + lj;
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
  __device__ __forceinline__ bool first_thread() const { return place().thread == 0; }

  __device__ __forceinline__ void load_A(int64_t n) {
    const auto [thread, j, t, i, half, extra_row, extra_col, extra] = place();
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
  __device__ __forceinline__ void scale_A(const Place& at) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int c = 0; c < 8; ++c)
        M[r][c] = __fmaf_rn(args.a_scale, M[r][c], at.i == at.j && 4 * at.half + r == c ? 1.0f : 0.0f);
#pragma unroll
    for (int c = 0; c < X; ++c) E[c] *= args.a_scale;
  }

  template <int kRows>
  __device__ __forceinline__ void load_B(const Place& at, const float* B, int64_t row_stride) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < 8; c += 4) {
        const float4 v = read4<kVectors>(B + (kRows * at.t + r) * row_stride + 8 * at.j + c);
        J[r][c] = args.b_scale * v.x, J[r][c + 1] = args.b_scale * v.y;
        J[r][c + 2] = args.b_scale * v.z, J[r][c + 3] = args.b_scale * v.w;
      }
  }

  // The columns of block k, from the tiles below and left of the pivot block. The outer conditions are a warp's.
  __device__ __forceinline__ void publish_M(const Place& at, unsigned row_blocks, int k) {
    const auto& [thread, j, t, i, half, extra_row, extra_col, extra] = at;
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
  __device__ __forceinline__ void publish_J(const Place& at, int k) {
    const auto& [thread, j, t, i, half, extra_row, extra_col, extra] = at;
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
  template <int kRows, bool kDescending, typename Restart>
  __device__ __forceinline__ void update(float (*acc)[8], const Restart& restart, const float (&left)[8][kDim], int r0,
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
    const float keep = restart() ? 0.0f : 1.0f;
#pragma unroll
    for (int q = 0; q < kRows; ++q)
#pragma unroll
      for (int h = 0; h < 4; ++h) add_kept(acc[q][2 * h], acc[q][2 * h + 1], keep, sum[q][h]);
  }

  __device__ __forceinline__ void update_M(const Place& at, int k) {
    const auto& [thread, j, t, i, half, extra_row, extra_col, extra] = at;
    const auto& Y = shared.Y[k & 1];
    const auto& Z = shared.Z[k & 1];
    update<4, true>(M, [&] { return at.i == k || at.j == k; }, Y, 8 * i + 4 * half, Z, 8 * j);
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
    const auto [thread, j, t, i, half, extra_row, extra_col, extra] = place();
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
    const Place at = place();
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
        write4<kVectors>(out + (kRows * at.t + r) * kDim + 8 * at.j + c, J[r][c], J[r][c + 1], J[r][c + 2],
                         J[r][c + 3]);
  }

  __device__ __forceinline__ void sync_team() { barrier_sync(barrier(index()), S::kAll); }

  // The staging buffer, complete, leaves for `to` without holding anybody up.
  __device__ __forceinline__ void send(int row, int rows, float* to) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_sync(barrier(index()) + 1, S::kTeamThreads);
    if (first_thread()) store_stage(shared.stage[row], to, rows * kDim * 4);
  }
  __device__ __forceinline__ void wait_sent() {
    if (first_thread()) wait_stage_read();
    barrier_sync(barrier(index()) + 1, S::kTeamThreads);
  }

  // Where things are is worked out again where it is needed: the sweep has no registers to remember it.
  __device__ __forceinline__ Work work_of(uint32_t turn) const {
    asm volatile("" : "+r"(turn));
    return plan.work<kDim>(turn);
  }
  __device__ __forceinline__ void load_next(uint32_t turn) {
    asm volatile("" : "+r"(turn));
    if (turn < plan.turns) load_A(plan.work<kDim>(turn).n);
  }

  template <int kRows>
  __device__ __forceinline__ void sweep(uint32_t turn) {
    Place at = place();
    const unsigned row_blocks = kDim == 64 ? ~0u : __reduce_or_sync(~0u, 1u << at.i);  // of this warp's tiles
    scale_A(at);
    publish_M(at, row_blocks, 0);
    publish_M(at, row_blocks, 1);
    sync_team();
    if constexpr (kVectors) {
      wait_arrived(&shared.arrived, turn / (turns_a_round<kDim>()) & 1);
      load_B<kRows>(at, &shared.B[0][0], kDim);
    } else {
      const Work work = work_of(turn);
      load_B<kRows>(at, args.B + work.n * args.B_batch + work.row * args.B_row, args.B_row);
    }
    if constexpr (S::kHalves) sync_team();
    publish_J<kRows>(at, 0);
    sync_team();
#pragma unroll 1
    for (int k = 0; k < G; ++k) {
      if constexpr (kDim == 64) at = place();  // a register short otherwise
      update_M(at, k);
      if (k + 2 < G) publish_M(at, row_blocks, k + 2);
      if (k + 1 == G) {
        if constexpr (kVectors) {
          write_T(&shared.stage[0][0]);
          const Work work = work_of(shared.turn);
          send(work.row, work.rows, args.T + work.n * args.T_batch + work.row * kDim);
        } else {
          const Work work = work_of(shared.turn);
          if (work.row == 0) write_T(args.T + work.n * args.T_batch);
        }
        load_next(shared.turn + turns_a_round<kDim>());
      }
      if (S::kHalves && k + 1 < G) sync_team();
      update<kRows, false>(J, [&] { return (kDim == 64 ? place().j : at.j) == k; }, shared.J[k & 1], kRows * at.t,
                           shared.W[k & 1], 8 * at.j);
      if (k + 1 < G) {
        publish_J<kRows>(kDim == 64 ? place() : at, k + 1);
        // The J of the matrix before has left the staging buffer long ago.
        if (kVectors && k + 2 == G && first_thread()) wait_stage_read();
        sync_team();
      }
    }
    const Work work = work_of(shared.turn);
    float* out = args.J + work.n * args.J_batch + work.row * kDim;
    if constexpr (kVectors) {
      wait_sent();
      write_J<kRows>(&shared.stage[0][0]);
      send(0, work.rows, out);
    } else {
      write_J<kRows>(out);
    }
  }

  __device__ __forceinline__ void run(uint32_t first) {
    load_next(first);
#pragma unroll 1
    for (uint32_t turn = first; turn < plan.turns; turn = shared.turn + turns_a_round<kDim>()) {
      if (turn < plan.whole) {
        sweep<8>(turn);
      } else {
        sweep<4>(turn);
      }
    }
    if (kVectors && first_thread()) wait_stage_read();
  }
};

}  // namespace jit_kernels::vdn_delta_factors::fp32
