// d = 128: J = b_scale B M^-1 and T = diag(alpha) M^-1 from the inverse in shared memory. A warp makes 16 rows of J in
// pieces of 64 columns, B straight from global memory, and writes its rows of T in between.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "arguments.cuh"
#include "fp64_inverse.cuh"
#include "fp64_memory.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

template <bool kVectors>
class Product : protected Inverse {
 protected:
  static constexpr int kDim = 128;
  static constexpr int kWarps = kDim / kTile;
  static constexpr int kPieceTiles = 4;  // tile columns of J that a warp makes at a time

  __device__ Product(const Arguments& args, double* shared, int64_t matrix)
      : Inverse(shared),
        args_(args),
        matrix_(matrix),
        warp_(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32) {}

  // J in pieces of 16 rows by kPieceTiles tile columns. Two parts share the columns, four the rows too.
  __device__ void multiply(const float* B, int part, int parts) const {
    constexpr int kPieces = kWarps / kPieceTiles;
    if (parts == 4 && warp_ / 4 != part >> 1) return;
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece)
      if (parts == 1 || (part & 1) == piece) multiply_piece(B, warp_, piece);
  }

  // Tile (nb, kb) of T. Of a diagonal tile the lower triangle counts, so that T is symmetric to the bit before alpha.
  __device__ void store_T(int nb, int kb, const float (&alpha)[2], InverseLane at) const {
    double v[2][2][2];
    load_right(v, nb, kb, at);
    float* T = args_.T + matrix_ * args_.T_batch + (nb * kTile + lane_.g) * kDim + 4 * lane_.t + kb * kTile;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (nb == kb) {
#pragma unroll
        for (int s = 0; s < 4; ++s)
          if (4 * lane_.t + s > lane_.g + 8 * half)
            v[half][s / 2][s % 2] = inverse(kb, nb)[at.quad_transposed(half, s)];
      }
      store_quad<kVectors>(T + 8 * half * kDim,
                           make_float4(alpha[half] * static_cast<float>(v[half][0][0]),
                                       alpha[half] * static_cast<float>(v[half][0][1]),
                                       alpha[half] * static_cast<float>(v[half][1][0]),
                                       alpha[half] * static_cast<float>(v[half][1][1])));
    }
  }

  __device__ void multiply_piece(const float* B, int row_block, int piece) const {
    const InverseLane fixed(lane_);
    double acc[2 * kPieceTiles][4] = {};
    const int row = row_block * kTile + lane_.g;
    const float* alpha_of = args_.alpha + matrix_ * args_.alpha_batch + row * args_.alpha_element;
    const float alpha[2] = {alpha_of[0], alpha_of[8 * args_.alpha_element]};
    const float* upper = B + row * args_.B_row + 4 * lane_.t;
    const float* lower = upper + 8 * args_.B_row;
    float4 x = load_quad<kVectors>(upper), y = load_quad<kVectors>(lower);
#pragma unroll 1
    for (int kb = 0; kb < kWarps; ++kb) {
      const InverseLane at = fixed.here();
      const double left[2][4] = {{x.x, y.x, x.y, y.y}, {x.z, y.z, x.w, y.w}};
      if (kb + 1 < kWarps) {
        x = load_quad<kVectors>(upper + (kb + 1) * kTile);
        y = load_quad<kVectors>(lower + (kb + 1) * kTile);
      }
#pragma unroll
      for (int n = 0; n < kPieceTiles; ++n) {
        const int nb = kPieceTiles * piece + n;
        double right[2][2][2];
        load_right(right, nb, kb, at);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            multiply_add(acc[2 * n + half], left[pair], right[half][pair][0], right[half][pair][1]);
      }
      if (row_block / kPieceTiles == piece) store_T(row_block, kb, alpha, at);
    }
    float* J = args_.J + matrix_ * args_.J_batch + row * kDim + kPieceTiles * kTile * piece + 2 * lane_.t;
    const float scale = args_.b_scale;
#pragma unroll
    for (int n = 0; n < 2 * kPieceTiles; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        store_pair<kVectors>(J + 8 * r * kDim + 8 * n, scale * static_cast<float>(acc[n][2 * r]),
                             scale * static_cast<float>(acc[n][2 * r + 1]));
  }

  const Arguments& args_;
  int64_t matrix_;
  int warp_;
  Lane lane_;
};

}  // namespace jit_kernels::vdn_delta_factors::fp64
