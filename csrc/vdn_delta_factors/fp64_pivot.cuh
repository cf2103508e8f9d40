// The inverse of a 16 x 16 symmetric positive definite tile by one warp, to fp64 accuracy: fp32 sweeps, then Newton
// steps on the tensor cores. Scalar fp64 arithmetic is avoided: it queues behind the matrix instructions.
#pragma once

#include <cuda_runtime.h>

#include "dmma.cuh"
#include "fp64_tiles.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

// About 1 / sqrt(x), a power of two.
__device__ __forceinline__ float inverse_root_exponent(double x) {
  const int exponent = ((__double2hiint(x) >> 20) & 0x7ff) - 1023;
  return __int_as_float((127 - (exponent >> 1)) << 23);
}

// Scratch of the fp32 inverse, in floats: the pivot rows, twice; the scales; the result, in rows padded against bank
// conflicts.
constexpr int kScales = 64;
constexpr int kResult = kScales + kTile;
constexpr int kResultRow = kTile + 4;
constexpr int kScratch = kResult + kTile * kResultRow;

// Writes m^-1 in fp32 to scratch + kResult, by a symmetric sweep over pairs of pivots. Returns the order of the first
// leading minor of m that is not positive, or 0. A lane holds eight rows of a column; the two pivot rows go round
// through shared memory, which takes 97 cycles a pair where shuffles take 160. m is first scaled by powers of two to a
// diagonal of about 1, so that no determinant of a pair overflows or vanishes. The values in a pivot's own column come
// out of the same update as the others, from a zero base and the coefficients of a unit vector.
__device__ __forceinline__ int invert_fp32(const double* m, float* scratch) {
  const int lane = threadIdx.x % 32, column = lane & 15, half = lane >> 4;
  const float scale = inverse_root_exponent(m[Lane::diagonal(column)]);
  if (half == 0) scratch[kScales + column] = scale;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const double2 v = *reinterpret_cast<const double2*>(
        m + column * kTile + 2 * ((4 * half + i / 2) ^ Lane::swizzle(column)));
    x[i] = static_cast<float>(v.x);
    x[i + 1] = static_cast<float>(v.y);
  }
  __syncwarp();
  float scales[8];
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(scratch + kScales + 8 * half + i);
    scales[i] = v.x * scale;
    scales[i + 1] = v.y * scale;
    scales[i + 2] = v.z * scale;
    scales[i + 3] = v.w * scale;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= scales[i];

  float first_minor = 1.f, second_minor = 1.f;  // lane i keeps the signs of the pair i's leading minors
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const int own_half = pair / 4, i = 2 * (pair % 4);
    float* rows = scratch + 32 * (pair & 1);  // rows[2 column + e]
    if (half == own_half) *reinterpret_cast<float2*>(rows + 2 * column) = make_float2(x[i], x[i + 1]);
    __syncwarp();
    const float4 d = *reinterpret_cast<const float4*>(rows + 4 * pair);
    const float2 own = *reinterpret_cast<const float2*>(rows + 2 * column);
    float left[8][2];
#pragma unroll
    for (int r = 0; r < 8; r += 2) {
      const float4 v = *reinterpret_cast<const float4*>(rows + 16 * half + 2 * r);
      left[r][0] = v.x;
      left[r][1] = v.y;
      left[r + 1][0] = v.z;
      left[r + 1][1] = v.w;
    }
    const float determinant = fmaf(d.x, d.w, -(d.y * d.y));
    const float inverse = reciprocal(determinant);
    if (lane == pair) {
      first_minor = d.x;
      second_minor = determinant;
    }
    const bool first = column == 2 * pair, second = column == 2 * pair + 1;
    const float u0 = first ? -1.f : second ? 0.f : own.x;
    const float u1 = first ? 0.f : second ? -1.f : own.y;
    const float i00 = d.w * inverse, i01 = -d.y * inverse, i11 = d.x * inverse;
    const float w0 = fmaf(u1, i01, u0 * i00);
    const float w1 = fmaf(u1, i11, u0 * i01);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const float base = first || second ? 0.f : x[r];
      x[r] = fmaf(-w1, left[r][1], fmaf(-w0, left[r][0], base));
    }
    if (half == own_half) {
      x[i] = w0;
      x[i + 1] = w1;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i += 4)
    *reinterpret_cast<float4*>(scratch + kResult + column * kResultRow + 8 * half + i) =
        make_float4(-x[i] * scales[i], -x[i + 1] * scales[i + 1], -x[i + 2] * scales[i + 2], -x[i + 3] * scales[i + 3]);
  __syncwarp();

  constexpr unsigned kAll = 0xffffffffu;
  const unsigned bad = __ballot_sync(kAll, !(first_minor > 0.f) || !(second_minor > 0.f));
  if (bad == 0) return 0;
  const int pair = __ffs(bad) - 1;
  return 2 * pair + (__shfl_sync(kAll, first_minor, pair) > 0.f ? 2 : 1);
}

// One Newton step from y towards m^-1, both symmetric. Returns -(y + (I - y m) y) and whether another one is needed.
__device__ __forceinline__ Tile refine(const Tile& y, const Tile& m, Lane lane, bool& again) {
  Tile residual{};
  residual.c[0][0] = residual.c[1][2] = lane.g == 2 * lane.t ? 1.0 : 0.0;
  residual.c[0][1] = residual.c[1][3] = lane.g == 2 * lane.t + 1 ? 1.0 : 0.0;
  multiply_add_transposed(residual, negated_left(y), m);
  Tile better = negated_tile(y);
  multiply_add_transposed(better, negated_left(residual), y);
  constexpr int kSmall = (1023 - 14) << 20;  // high word of 2^-14
  bool large = false;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int q = 0; q < 4; ++q) large |= (__double2hiint(residual.c[h][q]) & 0x7fffffff) > kSmall;
  again = __any_sync(0xffffffffu, large);
  return better;
}

// Minus the inverse of a symmetric tile in shared memory; `bad` is what invert_fp32 returns. One Newton step squares
// the fp32 inverse's relative error, which is enough unless m is ill-conditioned: then its residual says so, and more
// steps follow.
__device__ __forceinline__ Tile minus_inverse(const double* tile, float* scratch, Lane lane, int& bad) {
  const Tile m = load_tile(tile, lane);
  bad = invert_fp32(tile, scratch);
  Tile y;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 v =
          *reinterpret_cast<const float2*>(scratch + kResult + (lane.g + 8 * r) * kResultRow + 8 * h + 2 * lane.t);
      y.c[h][2 * r] = static_cast<double>(v.x);
      y.c[h][2 * r + 1] = static_cast<double>(v.y);
    }

  bool again;
  Tile minus = refine(y, m, lane, again);
#pragma unroll 1
  for (int step = 0; again && step < 3; ++step) minus = refine(negated_tile(minus), m, lane, again);
  return minus;
}

}  // namespace jit_kernels::vdn_delta_factors::fp64
