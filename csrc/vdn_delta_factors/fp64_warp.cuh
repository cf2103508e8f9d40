// d = 64: a warp owns a matrix of 4 x 4 tiles, so that no warp waits for another: on a multiprocessor one matrix's
// chain of pivots runs beside another one's products.
//
// In each step of the sweep the blocks of M are counted from the pivot; afterwards the order turns by one, and what was
// the pivot is the last. With D = M_00^-1 and W_i = M_i0 D, a step is
//
//   M_ij -= W_i M_j0^T for 1 <= j <= i <= 3;  turned: M_(i-1)(j-1) is what was M_ij, M_3(i-1) is W_i^T, M_33 is -D
//
// After four steps the order is the old one and M has become -M^-1. The tiles below the diagonal are fp64 accumulators
// (96 registers), those on it lie in shared memory.
//
// Shared memory (20 KB): the lower triangle of M^-1 by tiles; in the sweep the diagonal, and where the other tiles will
// be, W^T and the inverse's scratch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "arguments.cuh"
#include "fp64_inverse.cuh"
#include "fp64_memory.cuh"
#include "fp64_pivot.cuh"
#include "fp64_tiles.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

template <bool kVectors>
class Warp : Inverse {
  static constexpr int kDim = 64;
  static constexpr int kBlocks = kDim / kTile;
  static constexpr int kHeld = kBlocks * (kBlocks - 1) / 2;  // tiles below the diagonal
  static_assert(kScratch * sizeof(float) <= kTileSize * sizeof(double));

 public:
  static constexpr int kThreads = 32;
  static constexpr int kResident = 8;  // warps, each a block, on a multiprocessor
  static constexpr int kBytes = (kBlocks + kHeld) * kTileSize * 8;
  static constexpr bool kOverlapped = false;  // a grid that comes early finds no even places: NOTES.md

  __device__ Warp(const Arguments& args, double* shared, int64_t matrix)
      : Inverse(shared), args_(args), matrix_(matrix), lane_(threadIdx.x) {}

  __device__ void run(int part, int parts, int64_t ahead) {
    const float* A = args_.A + matrix_ * args_.A_batch;
    const float* B = args_.B + matrix_ * args_.B_batch;
    Tile m[kHeld];
    load(m, A);
    prefetch<kDim, kThreads>(B, args_.B_row, false);
    if (matrix_ + ahead < args_.count) prefetch<kDim, kThreads>(A + ahead * args_.A_batch, args_.A_row, true);
    const int bad = sweep(m);
    if (args_.info != nullptr && part == 0 && threadIdx.x == 0) args_.info[matrix_] = bad;
    if (bad != 0) {
      fill_nan<kDim, kThreads>(args_, matrix_, part, parts);
      return;
    }
    publish(m);
    multiply(B, part * kBlocks / parts, (part + 1) * kBlocks / parts);
  }

  // Few matrices: as many blocks each as there are schedulers for.
  static Split split(int64_t count, int multiprocessors) {
    if (count <= multiprocessors) return {0, 4};
    if (count <= 2 * multiprocessors) return {0, 2};
    return {count, 1};
  }

 private:
  // Tile (i, j), i > j, of those in registers: column by column.
  __device__ static constexpr int held(int i, int j) { return j * (2 * kBlocks - j - 1) / 2 + i - j - 1; }
  __device__ double* diagonal(int i) const { return inverse(i % kBlocks, i % kBlocks); }
  // W_i^T: where it stands when the order has turned.
  __device__ double* turned(int i) const { return inverse(kBlocks - 1, i - 1); }
  __device__ float* scratch() const { return reinterpret_cast<float*>(inverse(kBlocks - 2, 0)); }

  __device__ Tile scaled(const float (&a)[2][4]) const {
    Tile m;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int q = 0; q < 4; ++q) m.c[h][q] = static_cast<double>(a[h][q]);
    if (args_.a_scale != 1.f) scale_by(m, args_.a_scale);
    return m;
  }

  // M = I + a_scale A, from A's lower triangle. All of it is asked for before any is used.
  __device__ void load(Tile (&m)[kHeld], const float* A) const {
    float own[kBlocks][2][4], others[kHeld][2][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int y = lane_.g + 8 * (q >> 1), x = 2 * lane_.t + 8 * h + (q & 1);
          own[i][h][q] = A[(kTile * i + max(x, y)) * args_.A_row + kTile * i + min(x, y)];
        }
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int i = j + 1; i < kBlocks; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float2 v = load_pair<kVectors>(A + (kTile * i + lane_.g + 8 * r) * args_.A_row + kTile * j +
                                                 2 * lane_.t + 8 * h);
            others[held(i, j)][h][2 * r] = v.x;
            others[held(i, j)][h][2 * r + 1] = v.y;
          }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      Tile d = scaled(own[i]);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (lane_.g == 2 * lane_.t + e) d.c[h][2 * h + e] += 1.0;
      store_tile(diagonal(i), d, lane_);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) m[i] = scaled(others[i]);
    __syncwarp();
  }

  // Returns the order of the first leading minor that is not positive, or 0.
  __device__ int sweep(Tile (&m)[kHeld]) const {
    int bad = 0;
#pragma unroll 1
    for (int k = 0; k < kBlocks; ++k) {
      int found;
      const Tile minus_d = minus_inverse(diagonal(k), scratch(), lane_, found);
      if (bad == 0 && found != 0) bad = k * kTile + found;
      store_tile(diagonal(k), minus_d, lane_);
#pragma unroll
      for (int i = 1; i < kBlocks; ++i) update(m, minus_d, k, i);
      turn(m);
    }
    return bad;
  }

  __device__ void update(Tile (&m)[kHeld], const Tile& minus_d, int k, int i) const {
    Tile w{};
    multiply_add_transposed(w, negated_left(m[held(i, 0)]), minus_d);
    store_transposed(turned(i), w, lane_);
    const Left minus_w = negated_left(w);
#pragma unroll
    for (int j = 1; j < i; ++j) multiply_add_transposed(m[held(i, j)], minus_w, m[held(j, 0)]);
    Tile own = load_tile(diagonal(k + i), lane_);
    multiply_add_transposed(own, minus_w, m[held(i, 0)]);
    store_tile(diagonal(k + i), own, lane_);
  }

  __device__ void turn(Tile (&m)[kHeld]) const {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kBlocks - 1; ++j)
#pragma unroll
      for (int i = j + 1; i < kBlocks; ++i)
        m[held(i, j)] = i == kBlocks - 1 ? load_tile(turned(j + 1), lane_) : m[held(i + 1, j + 1)];
  }

  // The inverse to shared memory. The upper triangles of the diagonal tiles become what the lower ones are, from which
  // their last bits may differ: T is symmetric to the bit before alpha.
  __device__ void publish(const Tile (&m)[kHeld]) const {
    const InverseLane at(lane_);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      Tile d = load_tile(diagonal(i), lane_);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const double mirrored = diagonal(i)[lane_.transposed(q >> 1, h, q & 1)];
          if (8 * h + 2 * lane_.t + (q & 1) > lane_.g + 8 * (q >> 1)) d.c[h][q] = mirrored;
        }
      __syncwarp();
      store_inverse(negated_tile(d), i, i, at);
    }
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int i = j + 1; i < kBlocks; ++i) store_inverse(negated_tile(m[held(i, j)]), i, j, at);
    __syncwarp();
  }

  // J by blocks of 16 rows, first ... last - 1, and T by as many columns meanwhile: J's right operands are its tiles.
  __device__ void multiply(const float* B, int first, int last) const {
    const InverseLane at(lane_);
    float alpha[kBlocks][2];
    const float* alpha_of = args_.alpha + matrix_ * args_.alpha_batch;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        alpha[i][half] = alpha_of[(kTile * i + 8 * half + lane_.g) * args_.alpha_element];
    const float* upper = B + (first * kTile + lane_.g) * args_.B_row + 4 * lane_.t;
    float4 x[kBlocks], y[kBlocks];
#pragma unroll
    for (int kb = 0; kb < kBlocks; ++kb) {
      x[kb] = load_quad<kVectors>(upper + kTile * kb);
      y[kb] = load_quad<kVectors>(upper + 8 * args_.B_row + kTile * kb);
    }
#pragma unroll 1
    for (int block = first; block < last; ++block) {
      double acc[2 * kBlocks][4] = {};
      upper += kTile * args_.B_row;
#pragma unroll
      for (int kb = 0; kb < kBlocks; ++kb) {
        const double left[2][4] = {{x[kb].x, y[kb].x, x[kb].y, y[kb].y}, {x[kb].z, y[kb].z, x[kb].w, y[kb].w}};
        if (block + 1 < last) {
          x[kb] = load_quad<kVectors>(upper + kTile * kb);
          y[kb] = load_quad<kVectors>(upper + 8 * args_.B_row + kTile * kb);
        }
        double right[kBlocks][2][2][2];
#pragma unroll
        for (int nb = 0; nb < kBlocks; ++nb) {
          load_right(right[nb], nb, kb, at);
#pragma unroll
          for (int pair = 0; pair < 2; ++pair)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              multiply_add(acc[2 * nb + half], left[pair], right[nb][half][pair][0], right[nb][half][pair][1]);
        }
        if (block == kb) store_T(kb, right, alpha);
      }
      float* J = args_.J + matrix_ * args_.J_batch + (block * kTile + lane_.g) * kDim + 2 * lane_.t;
      const float scale = args_.b_scale;
#pragma unroll
      for (int n = 0; n < 2 * kBlocks; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          store_pair<kVectors>(J + 8 * r * kDim + 8 * n, scale * static_cast<float>(acc[n][2 * r]),
                               scale * static_cast<float>(acc[n][2 * r + 1]));
    }
  }

  __device__ void store_T(int kb, const double (&right)[kBlocks][2][2][2], const float (&alpha)[kBlocks][2]) const {
    float* T = args_.T + matrix_ * args_.T_batch + lane_.g * kDim + 4 * lane_.t + kTile * kb;
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const double(&v)[2][2] = right[nb][half];
        const float a = alpha[nb][half];
        store_quad<kVectors>(T + (kTile * nb + 8 * half) * kDim,
                             make_float4(a * static_cast<float>(v[0][0]), a * static_cast<float>(v[0][1]),
                                         a * static_cast<float>(v[1][0]), a * static_cast<float>(v[1][1])));
      }
  }

  const Arguments& args_;
  int64_t matrix_;
  Lane lane_;
};

}  // namespace jit_kernels::vdn_delta_factors::fp64
