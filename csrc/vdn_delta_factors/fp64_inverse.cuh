// The inverse in shared memory, as J and T read it: its lower triangle by 16 x 16 fp64 tiles, row by row.
#pragma once

#include <cuda_runtime.h>

#include "fp64_tiles.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

// Where a lane finds its elements of a tile of the inverse. They come in accumulator layout or transposed, and J reads
// them with t counting fours, as B's rows come from global memory. This swizzle keeps all four free of bank conflicts.
struct InverseLane {
  int row, column, quad, quad_column;
  __device__ explicit InverseLane(Lane lane) {
    const int g = lane.g, t = lane.t;
    row = g * kTile + 2 * (t ^ swizzle(g));
    column = 2 * t * kTile + 2 * ((g >> 1) ^ swizzle(2 * t)) + (g & 1);
    quad = g * kTile + 2 * ((2 * t) ^ swizzle(g));
    quad_column = 4 * t * kTile + 2 * ((g >> 1) ^ swizzle(4 * t)) + (g & 1);
  }
  __device__ static int swizzle(int r) {
    return (r & 1) | (((r >> 2) & 1) << 1) | (((r ^ (r >> 1) ^ (r >> 3)) & 1) << 2);
  }
  __device__ InverseLane here() const {
    InverseLane lane = *this;
    lane.quad = opaque(quad);
    lane.quad_column = opaque(quad_column);
    return lane;
  }
  // (g + 8r, 8h + 2t) and (8h + 2t + e, g + 8r)
  __device__ int at(int r, int h) const { return (row ^ (8 * (r ^ h))) + 8 * kTile * r; }
  __device__ int transposed(int r, int h, int e) const {
    return (column ^ (8 * (r ^ h ^ e)) ^ (2 * e)) + kTile * (8 * h + e);
  }
  // (g + 8r, 4t + 2 pair) and (4t + s, g + 8r)
  __device__ int quad_at(int r, int pair) const { return (quad ^ (8 * r) ^ (2 * pair)) + 8 * kTile * r; }
  __device__ int quad_transposed(int r, int s) const { return (quad_column ^ (8 * r) ^ (2 * swizzle(s))) + kTile * s; }
};

class Inverse {
 protected:
  __device__ explicit Inverse(double* shared) : shared_(shared) {}

  // Tile (i, j), i >= j.
  __device__ double* inverse(int i, int j) const { return shared_ + (i * (i + 1) / 2 + j) * kTileSize; }

  __device__ void store_inverse(const Tile& m, int i, int j, InverseLane at) const {
    double* tile = inverse(max(i, j), min(i, j));
    if (i >= j) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          *reinterpret_cast<double2*>(tile + at.at(r, h)) = make_double2(m.c[h][2 * r], m.c[h][2 * r + 1]);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int q = 0; q < 4; ++q) tile[at.transposed(q >> 1, h, q & 1)] = m.c[h][q];
    }
  }

  // A right operand of J and, times alpha, four elements each of two rows of T:
  // right[half][pair][s] = inverse[16 nb + 8 half + g][16 kb + 4t + 2 pair + s].
  __device__ void load_right(double (&right)[2][2][2], int nb, int kb, InverseLane at) const {
    if (nb >= kb) {
      const double* tile = inverse(nb, kb);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const double2 v = *reinterpret_cast<const double2*>(tile + at.quad_at(half, pair));
          right[half][pair][0] = v.x;
          right[half][pair][1] = v.y;
        }
    } else {
      const double* tile = inverse(kb, nb);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int s = 0; s < 4; ++s) right[half][s / 2][s % 2] = tile[at.quad_transposed(half, s)];
    }
  }

  double* shared_;
};

}  // namespace jit_kernels::vdn_delta_factors::fp64
