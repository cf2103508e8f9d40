// The second phase of the fp32 kernel: T = diag(alpha) inverse, and J = b B inverse. See fp32.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp32_block.cuh"

namespace jit_kernels::vdn_delta_factors::fp32 {

// The inverse times alpha; the addition of +0 turns the -0 of an exactly zero element into +0.
__device__ __forceinline__ float transition(float alpha, float inverse, bool bad) {
  return bad ? __int_as_float(0x7fffffff) : __fmaf_rn(alpha, inverse, 0.0f);
}

// kRows rows of J a thread, 8 columns.
template <int kDim, bool kVectors, int kRows>
struct Product {
  static constexpr int G = Shape<kDim>::kGroups;

  BlockMemory<kDim>& shared;
  const Place<kDim> at = Place<kDim>::get();
  const float* B;  // this thread's columns of the first chunk
  float scale;
  float columns[kRows];
  float J[kRows][4][2];

  __device__ __forceinline__ Product(BlockMemory<kDim>& memory, const Arguments& args, const Work& work)
      : shared(memory), scale(args.b_scale) {
    B = args.B + work.n * args.B_batch + (work.row + at.thread % (kRows * G)) * args.B_row + first_column();
  }
  __device__ __forceinline__ int first_column() const { return at.thread / (kRows * G) * kRows; }

  // An eighth of the columns of B, kRows columns of one row a thread: from global memory, then to shared memory.
  __device__ __forceinline__ void load_B(int chunk) {
    read<kVectors>(columns, B + G * chunk);
  }
  __device__ __forceinline__ void store_B(int chunk) {
#pragma unroll
    for (int c = 0; c < kRows; ++c)
      shared.B[chunk & 1][first_column() + c][at.thread % (kRows * G)] = scale * columns[c];
  }

  // An eighth of this block's rows of T: between two chunks of the product, so that the stores spread.
  __device__ __forceinline__ void write_T(float* T, int first_row, int part) const {
    constexpr int kLanes = kDim / 4, kStep = Shape<kDim>::kThreads / kLanes, kPart = kRows * G / 8;
    const int lane = at.thread % kLanes;
    const bool bad = shared.info != 0;
#pragma unroll
    for (int i = 0; i < kPart; i += kStep) {
      if (kPart < kStep && at.thread / kLanes >= kPart) break;
      const int row = first_row + kPart * part + i + at.thread / kLanes;
      const float alpha = shared.alpha[row];
      const float4 v = load4(&shared.inverse[row][4 * inverse_unit(row, 4 * lane)]);
      const float a = kSwap ? v.y : v.x, b = kSwap ? v.x : v.y, c = kSwap ? v.w : v.z, d = kSwap ? v.z : v.w;
      write4<kVectors>(T + row * kDim + 4 * lane, transition(alpha, a, bad), transition(alpha, b, bad),
                       transition(alpha, c, bad), transition(alpha, d, bad));
    }
  }

  // The fences keep each operand's load one k ahead of its use. Left alone, ptxas renames the sums from k to k, and
  // their registers meet the operands' in the same bank.
  __device__ __forceinline__ void run(float* T, int first_row) {
    load_B(1);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int h = 0; h < 4; ++h) J[r][h][0] = J[r][h][1] = 0.0f;
    struct Operands {
      float r[kRows], c[8];
    } now, next;
#pragma unroll 1
    for (int chunk = 0; chunk < 8; ++chunk) {
      write_T(T, first_row, chunk);
      asm volatile("" ::: "memory");
      const float* left = &shared.B[chunk & 1][0][kRows * at.t];
      const float* inverse = &shared.inverse[G * chunk][0];
      const int unit = inverse_unit(G * chunk, 8 * at.j);
      const auto load = [&](Operands& to, int k) {
        read<true>(to.r, left + k * kDim);
        const float4 lo = load4(inverse + k * kDim + 4 * (unit ^ k / 4));
        const float4 hi = load4(inverse + k * kDim + 4 * (unit ^ k / 4 ^ 1));
        to.c[0] = lo.x, to.c[1] = lo.y, to.c[2] = lo.z, to.c[3] = lo.w;
        to.c[4] = hi.x, to.c[5] = hi.y, to.c[6] = hi.z, to.c[7] = hi.w;
      };
      const auto accumulate = [&](const Operands& from) {
#pragma unroll
        for (int q = 0; q < kRows; ++q)
#pragma unroll
          for (int h = 0; h < 4; ++h) multiply_add(J[q][h], from.r[q], from.c[2 * h], from.c[2 * h + 1]);
      };
      load(now, 0);
#pragma unroll
      for (int k = 0; k < G; k += 2) {
        load(next, k + 1);
        asm volatile("" ::: "memory");
        accumulate(now);
        if (k + 2 < G) load(now, k + 2);
        asm volatile("" ::: "memory");
        accumulate(next);
      }
      if (chunk + 1 < 8) {
        store_B(chunk + 1);
        __syncthreads();
        if (chunk + 2 < 8) load_B(chunk + 2);
      }
    }
  }

  // Neighbouring lanes exchange halves of their rows, so that together they write whole sectors of 32 bytes.
  __device__ __forceinline__ void store(float* out) {
    const bool bad = shared.info != 0, odd = at.j & 1;
    float* to = out + kRows * at.t * kDim + 8 * (at.j & ~1) + (odd ? 4 : 0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float v[2][4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float lo = bad ? __int_as_float(0x7fffffff) : J[r][c / 2][c % 2 ^ kSwap];
        const float hi = bad ? __int_as_float(0x7fffffff) : J[r][2 + c / 2][c % 2 ^ kSwap];
        const float other = __shfl_xor_sync(~0u, odd ? lo : hi, 1);
        v[0][c] = odd ? other : lo, v[1][c] = odd ? hi : other;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) write4<kVectors>(to + r * kDim + 8 * h, v[h][0], v[h][1], v[h][2], v[h][3]);
    }
  }
};

}  // namespace jit_kernels::vdn_delta_factors::fp32
