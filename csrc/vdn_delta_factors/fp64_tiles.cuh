// 16 x 16 fp64 tiles in registers and in shared memory, and their product on the tensor cores.
//
// g = lane / 4, t = lane % 4. A lane holds rows g, g + 8 and columns 8h + 2t + e of a tile: accumulator layout. With
// the k slots of the matrix instruction named the same way, a tile's registers are the right operand for its transpose
// as they stand, and a left operand in another order.
#pragma once

#include <cuda_runtime.h>

#include "dmma.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

constexpr int kTile = 16;
constexpr int kTileSize = kTile * kTile;

struct Tile {
  double c[2][4];  // c[h][2r + e]: row g + 8r, column 8h + 2t + e
};

// Where a lane finds its elements of a tile in shared memory. A tile lies row by row, the eight 16-byte units of row r
// permuted by an exclusive or with swizzle(r), so that rows and columns are accessed free of bank conflicts.
struct Lane {
  int g, t;
  int row, column;  // (g, 2t) and (2t, g), in doubles
  __device__ explicit Lane(int lane) : g(lane >> 2), t(lane & 3) {
    row = g * kTile + 2 * (t ^ swizzle(g));
    column = 2 * t * kTile + 2 * ((g >> 1) ^ swizzle(2 * t)) + (g & 1);
  }
  // Offsets derived from these are computed where they are used, instead of being kept in registers round a loop.
  __device__ Lane here() const {
    Lane lane = *this;
    lane.row = opaque(row);
    lane.column = opaque(column);
    return lane;
  }
  __device__ static int swizzle(int r) { return (((r >> 1) & 1) << 1) | (((r ^ (r >> 2)) & 1) << 2); }
  // (g + 8r, 8h + 2t): swizzle(r + 8) == swizzle(r).
  __device__ int at(int r, int h) const { return (row ^ (8 * h)) + 8 * kTile * r; }
  __device__ static int diagonal(int i) { return i * kTile + 2 * ((i >> 1) ^ swizzle(i)) + (i & 1); }
  // (8h + 2t + e, g + 8r): swizzle(2t + 1) == swizzle(2t) ^ 4.
  __device__ int transposed(int r, int h, int e) const { return (column ^ (8 * (r ^ e))) + kTile * (8 * h + e); }
};

__device__ __forceinline__ double2 load_row_pair(const double* tile, int r, int h, Lane lane) {
  return *reinterpret_cast<const double2*>(tile + lane.at(r, h));
}

__device__ __forceinline__ Tile load_tile(const double* tile, Lane lane) {
  Tile m;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const double2 v = load_row_pair(tile, r, h, lane);
      m.c[h][2 * r] = v.x;
      m.c[h][2 * r + 1] = v.y;
    }
  return m;
}

__device__ __forceinline__ void store_tile(double* tile, const Tile& m, Lane lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      *reinterpret_cast<double2*>(tile + lane.at(r, h)) = make_double2(m.c[h][2 * r], m.c[h][2 * r + 1]);
}

__device__ __forceinline__ void store_transposed(double* tile, const Tile& m, Lane lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int q = 0; q < 4; ++q) tile[lane.transposed(q >> 1, h, q & 1)] = m.c[h][q];
}

// A tile as left operand. Its registers stand in another order than a tile's, so it is made once and kept: given the
// tile itself, ptxas would reorder it before every use.
struct Left {
  double a[2][4];  // a[h][2e + r]: row g + 8r, column 8h + 2t + e
};

__device__ __forceinline__ Left negated_left(const Tile& m) {
  Left left;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int q = 0; q < 4; ++q) left.a[h][2 * (q & 1) + (q >> 1)] = negated(m.c[h][q]);
  return left;
}

__device__ __forceinline__ Tile negated_tile(const Left& left) {
  Tile m;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int q = 0; q < 4; ++q) m.c[h][q] = negated(left.a[h][2 * (q & 1) + (q >> 1)]);
  return m;
}

// m += a b^T
__device__ __forceinline__ void multiply_add_transposed(Tile& m, const Left& a, const Tile& b) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < 2; ++n) multiply_add(m.c[n], a.a[h], b.c[h][2 * n], b.c[h][2 * n + 1]);
}

__device__ __forceinline__ Tile negated_tile(const Tile& m) {
  Tile out;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int q = 0; q < 4; ++q) out.c[h][q] = negated(m.c[h][q]);
  return out;
}

__device__ __forceinline__ void scale_by(Tile& m, float factor) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int q = 0; q < 4; ++q) m.c[h][q] *= static_cast<double>(factor);
}

}  // namespace jit_kernels::vdn_delta_factors::fp64
