// d = 128: a block owns a matrix, a warp owns one of its n = 8 row blocks. M lives as 16 x 16 fp64 tiles, the diagonal
// ones in shared memory, the others in registers in accumulator layout: warp w holds the tiles (w, w - d mod n),
// d = 1 ... n/2 - 1, and d = n/2 where w >= n/2. That is one tile of each pair {(i, j), (j, i)}, and the row block is
// the same for all tiles of a warp, so that W below is made once a warp and step.
//
//   sweep, k = 0 ... n - 1:                          D = M_kk^-1, C = column k of M (the panel, in shared memory)
//     warps w != k:  W = C_w D;  M_wj -= W C_j^T;  M_wk = W;  then publish their part of panel k + 1
//     warp k + 1:    does its diagonal tile first and signals warp k
//     warp k:        inverts that tile into the next pivot, the chain that bounds the step; its own tiles
//                    M_kj = D C_j^T and M_kk = -D nobody needs soon, so it makes them one step later
//   M has become -M^-1 and goes to shared memory.
//   J: fp64_product.cuh.
//
// Shared memory (72 KB): three panels with their pivots (A on its way to the registers first), the diagonal, scratch;
//                        later, over them, M^-1 by tiles; the first bad pivot; a barrier.
// A matrix: 1670 products of 16 x 8 x 16 (26.7 K cycles an SM at the pipe's rate), 262 KB of global traffic. What
// bounds it and what was tried: NOTES.md.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "arguments.cuh"
#include "fp64_inverse.cuh"
#include "fp64_memory.cuh"
#include "fp64_pivot.cuh"
#include "fp64_product.cuh"
#include "fp64_tiles.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

template <bool kVectors>
class Block : Product<kVectors> {
  using P = Product<kVectors>;
  using P::args_, P::shared_, P::matrix_, P::warp_, P::lane_;
  using P::kDim, P::kWarps, P::store_inverse;

 public:
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kResident = 2;  // blocks a multiprocessor
  static constexpr bool kOverlapped = true;  // launched while the grid before drains

 private:
  static constexpr int kHeld = kWarps / 2;  // tiles a warp in registers; the last one in the upper half of the warps
  static constexpr int kPanel = kWarps * kTileSize;  // in doubles
  static constexpr int kDiagonal = 3 * kPanel;
  static constexpr int kScratchTile = kDiagonal + kPanel;
  static constexpr int kSweep = kScratchTile + kTileSize;
  static constexpr int kInverse = kWarps * (kWarps + 1) / 2 * kTileSize;
  static constexpr int kBad = kSweep > kInverse ? kSweep : kInverse;
  static_assert(kScratch * sizeof(float) <= kTileSize * sizeof(double));

 public:
  static constexpr int kBytes = kBad * 8 + 16;

  __device__ Block(const Arguments& args, double* shared, int64_t matrix)
      : P(args, shared, matrix), bad_(reinterpret_cast<int*>(shared + kBad)), handover_(shared + kBad + 1) {}

  __device__ void run(int part, int parts, int64_t ahead) {
    const float* A = args_.A + matrix_ * args_.A_batch;
    const float* B = args_.B + matrix_ * args_.B_batch;
    Tile m[kHeld] = {};
    sweep(m, A);

    const bool writes_info = args_.info != nullptr && part == 0 && threadIdx.x == 0;
    if (writes_info) args_.info[matrix_] = *bad_;
    if (*bad_ != 0) {
      fill_nan<kDim, kThreads>(args_, matrix_, part, parts);
      return;
    }
    publish_inverse(m);
    if (matrix_ + ahead < args_.count)
      prefetch<kDim, kThreads>(A + ahead * args_.A_batch, args_.A_row, true);
    __syncthreads();
    P::multiply(B, part, parts);
  }

  // Few matrices, or the last round of many: several blocks a matrix where multiprocessors would stand idle.
  static Split split(int64_t count, int multiprocessors) {
    if (4 * count <= multiprocessors) return {0, 4};
    if (2 * count <= multiprocessors) return {0, 2};
    const int64_t slots = kResident * multiprocessors, rest = count % slots;
    return {rest <= multiprocessors ? count : count - std::min(rest, slots - rest), 2};
  }

 private:
  // Register tile d of this warp is (warp, column(d)).
  __device__ int column(int d) const { return (warp_ - 1 - d) & (kWarps - 1); }
  __device__ bool holds(int d) const { return d + 1 < kHeld || warp_ >= kWarps / 2; }
  __device__ double* panel(int k, int block) const { return shared_ + (k % 3) * kPanel + block * kTileSize; }
  __device__ double* diagonal(int block) const { return shared_ + kDiagonal + block * kTileSize; }
  // -D of step k, where panel k has no tile of C.
  __device__ double* pivot(int k) const { return panel(k, k); }

  // A's lower triangle comes to the registers through shared memory, each lane's elements to a place of its own, so
  // that nobody waits for them earlier than they are used. The last warp uses its own after the first pivot: they lie
  // where the third panel will be.
  __device__ float* stage(int d) const {
    return reinterpret_cast<float*>(shared_ + kPanel + warp_ * (2 * kPanel / kWarps)) + d * kTileSize +
           8 * (threadIdx.x % 32);
  }

  __device__ void request(const float* A, int d) const {
    float* to = stage(d);
    const int i = warp_, j = column(d);
    const int row = kTile * i + lane_.g, col = kTile * j + 2 * lane_.t;
    if (i > j) {
      const float* p = A + row * args_.A_row + col;
#pragma unroll
      for (int r = 0; r < 2; ++r, p += 8 * args_.A_row)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if constexpr (kVectors) {
            copy_async<8>(to + 4 * h + 2 * r, p + 8 * h);
          } else {
            copy_async<4>(to + 4 * h + 2 * r, p + 8 * h);
            copy_async<4>(to + 4 * h + 2 * r + 1, p + 8 * h + 1);
          }
        }
    } else {
      const float* p = A + col * args_.A_row + row;
#pragma unroll
      for (int h = 0; h < 2; ++h, p += 8 * args_.A_row)
#pragma unroll
        for (int q = 0; q < 4; ++q) copy_async<4>(to + 4 * h + q, p + (q & 1) * args_.A_row + 8 * (q >> 1));
    }
  }

  // Diagonal tile i of M = I + a_scale A.
  __device__ void load_diagonal(const float* A, int i) const {
    const int row = kTile * i + lane_.g, col = kTile * i + 2 * lane_.t;
    Tile m;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int y = row + 8 * (q >> 1), x = col + 8 * h + (q & 1);
        m.c[h][q] = static_cast<double>(A[max(x, y) * args_.A_row + min(x, y)]);
      }
    if (args_.a_scale != 1.f) scale_by(m, args_.a_scale);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (lane_.g == 2 * lane_.t + e) m.c[h][2 * h + e] += 1.0;
    store_tile(diagonal(i), m, lane_);
  }

  __device__ void take(Tile (&m)[kHeld]) const {
    copies_wait();
#pragma unroll
    for (int d = 0; d < kHeld; ++d) {
      if (!holds(d)) continue;
      const float* from = stage(d);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 v = *reinterpret_cast<const float4*>(from + 4 * h);
        m[d].c[h][0] = v.x;
        m[d].c[h][1] = v.y;
        m[d].c[h][2] = v.z;
        m[d].c[h][3] = v.w;
      }
    }
    if (args_.a_scale != 1.f)
#pragma unroll
      for (int d = 0; d < kHeld; ++d) scale_by(m[d], args_.a_scale);
  }

  // This warp's part of panel k: its tile of column k, or the transposes of its row if it is warp k.
  __device__ void publish(const Tile& tile, int d, int k, Lane lane) const {
    const int j = column(d);
    if (j == k) store_tile(panel(k, warp_), tile, lane);
    if (warp_ == k) store_transposed(panel(k, j), tile, lane);
  }

  // Row block k = warp after step k: M_kk = -D, M_kj = D C_j^T.
  __device__ void make_row(Tile (&m)[kHeld]) const {
    const Tile minus_d = load_tile(pivot(warp_), lane_);
    store_tile(diagonal(warp_), minus_d, lane_);
    const Left d_k = negated_left(minus_d);
#pragma unroll
    for (int d = 0; d < kHeld; ++d) {
      if (!holds(d)) continue;
      m[d] = Tile{};
      multiply_add_transposed(m[d], d_k, load_tile(panel(warp_, column(d)), lane_));
    }
  }

  __device__ void update(Tile (&m)[kHeld], int k) const {
    const Lane lane = lane_.here();
    Left minus_w;
    {
      Tile w{};
      multiply_add_transposed(w, negated_left(load_tile(panel(k, warp_), lane)), load_tile(pivot(k), lane));
      minus_w = negated_left(w);
    }
    {
      Tile own = load_tile(diagonal(warp_), lane);
      multiply_add_transposed(own, minus_w, load_tile(panel(k, warp_), lane));
      store_tile(diagonal(warp_), own, lane);
    }
    if (warp_ == k + 1) handover_.signal();
#pragma unroll
    for (int d = 0; d < kHeld; ++d) {
      if (!holds(d)) continue;
      if (column(d) == k) {
        m[d] = negated_tile(minus_w);
      } else {
        multiply_add_transposed(m[d], minus_w, load_tile(panel(k, column(d)), lane));
      }
      publish(m[d], d, k + 1, lane);
    }
  }

  __device__ void invert_pivot(int k) const {
    float* scratch = reinterpret_cast<float*>(shared_ + kScratchTile);
    int bad;
    store_tile(pivot(k), minus_inverse(diagonal(k), scratch, lane_, bad), lane_);
    if (k == 0 && threadIdx.x % 32 == 0) *bad_ = bad;
    if (k > 0 && bad != 0 && threadIdx.x % 32 == 0 && *bad_ == 0) *bad_ = k * kTile + bad;
  }

  // Where a warp's row is the pivot row its old tiles are dead, and only there does it invert: registers for both would
  // not do. Step -1 makes the first panel and the first D.
  __device__ void sweep(Tile (&m)[kHeld], const float* A) const {
    if (threadIdx.x == 0) handover_.open();
    __syncthreads();
    if (warp_ == 0) {
      load_diagonal(A, 0);
      handover_.signal();
    }
#pragma unroll
    for (int d = 0; d < kHeld; ++d)
      if (holds(d)) request(A, d);
#pragma unroll 1
    for (int k = -1; k < kWarps; ++k) {
      if (warp_ == (k & (kWarps - 1))) {
        if (k + 1 < kWarps) {
          handover_.wait(k + 1);
          invert_pivot(k + 1);
        }
        barrier_meet(kThreads);
        if (k < 0) {
          take(m);
        } else {
          make_row(m);
        }
      } else {
        if (k < 0) {
          load_diagonal(A, warp_ + 1);
          take(m);
#pragma unroll
          for (int d = 0; d < kHeld; ++d)
            if (holds(d)) publish(m[d], d, 0, lane_);
        } else {
          update(m, k);
        }
        barrier_meet(kThreads);
      }
      if (k == 0) prefetch<kDim, kThreads>(args_.B + matrix_ * args_.B_batch, args_.B_row, false);
    }
  }

  // The inverse to shared memory, over the panels. Of a diagonal tile the lower triangle counts, so that T is symmetric
  // to the bit before alpha; the last bit of the upper one may differ.
  __device__ void publish_inverse(Tile (&m)[kHeld]) const {
    const Tile own = negated_tile(load_tile(diagonal(warp_), lane_));
    __syncthreads();
    const InverseLane at(lane_);
    store_inverse(own, warp_, warp_, at);
#pragma unroll
    for (int d = 0; d < kHeld; ++d) {
      if (!holds(d)) continue;
      m[d] = negated_tile(m[d]);
      store_inverse(m[d], warp_, column(d), at);
    }
  }

  int* bad_;
  Handover handover_;
};

}  // namespace jit_kernels::vdn_delta_factors::fp64
