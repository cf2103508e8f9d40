// vdn_delta_factors on the fp64 tensor cores: T = diag(alpha) M^-1 and J = b_scale B M^-1, M = I + a_scale A.
//
// A block owns a matrix, a warp owns one of its row blocks of 16 rows. M lives as 16 x 16 fp64 tiles, the diagonal ones
// in shared memory, the others in registers in accumulator layout: warp w holds the tiles (w, w - d mod W),
// d = 1 ... W/2 - 1, and d = W/2 where w >= W/2. That is one tile of each pair {(i, j), (j, i)}, and the row block is
// the same for all tiles of a warp.
//
//   sweep k = 0 ... W - 1 (W = kDim / 16):           D = M_kk^-1, C = column k of M (the panel)
//     warps w != k:  W = C_w D;  M_wj -= W C_j^T;  M_wk = W;  then publish their part of panel k + 1
//     warp k + 1:    does its diagonal tile first and signals warp k
//     warp k:        inverts that tile, the chain that bounds the step; its own tiles M_kj = D C_j^T nobody needs
//                    soon, so it makes them one step later; M_kk is -D already, for that is how D is kept
//   M has become -M^-1 and goes to shared memory.
//   J: warp w computes 16 x 64 pieces of B M^-1, B straight from global memory, and writes its rows of T in between.
//
// Lanes: g = lane / 4, t = lane % 4. A lane holds rows g, g + 8 and columns 8h + 2t + e of a tile. With the k slots of
// the matrix instruction named the same way, a tile in accumulator layout is an A operand, and its transpose a B
// operand, as they stand: W and the tile under inversion never change their layout.
//
// The 16 x 16 inverse runs in fp32 (pairs of pivots) and is made an fp64 one by Newton steps on the tensor
// cores. Scalar fp64 arithmetic is avoided: it queues behind the matrix instructions.
//
// Shared memory (kDim = 128: 73 KB):  three panels, the diagonal, scratch | later, over them: M^-1 by tiles
//                                     first bad pivot
// kDim = 128, per matrix: 576 + 1024 matrix instructions of 2048 FMA (25.6 K cycles an SM), 262 KB of global traffic.
#pragma once

#include <cuda_runtime.h>

#include <jit_kernels/launch.cuh>

#include <algorithm>
#include <cstdint>

#include "arguments.cuh"
#include "dmma.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

constexpr int kTile = 16;
constexpr int kTileSize = kTile * kTile;

template <int kDim>
struct Layout {
  static constexpr int kWarps = kDim / kTile;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kHeld = kWarps / 2;  // tiles a warp in registers; the last one in the upper half of the warps only
  static constexpr int kTiles = kWarps * (kWarps + 1) / 2;
  static constexpr int kResident = kDim == 128 ? 2 : 4;  // blocks a multiprocessor

  static constexpr int kPanel = kWarps * kTileSize;  // in doubles
  static constexpr int kDiagonal = 3 * kPanel;
  static constexpr int kScratchTile = kDiagonal + kPanel;
  static constexpr int kSweep = kScratchTile + kTileSize;
  static constexpr int kInverse = kTiles * kTileSize;
  static constexpr int kBad = kSweep > kInverse ? kSweep : kInverse;
  static constexpr int kBytes = kBad * 8 + 16;
};

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

// The same for the tiles of the inverse. J reads them with t counting fours, as B's rows come from global memory, and
// has row r permuted by (r & 1) | ((r >> 2) & 3) << 1.
struct InverseLane {
  int row, column, quad, quad_column;
  __device__ explicit InverseLane(Lane lane) {
    const int g = lane.g, t = lane.t, permute = (g & 1) | ((g >> 2) << 1);
    row = g * kTile + 2 * (t ^ permute);
    column = 2 * t * kTile + 2 * ((g >> 1) ^ ((t >> 1) << 1)) + (g & 1);
    quad = g * kTile + 2 * ((2 * t) ^ permute);
    quad_column = 4 * t * kTile + 2 * ((g >> 1) ^ (t << 1)) + (g & 1);
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
    return (column ^ (8 * (r ^ h)) ^ (2 * e)) + kTile * (8 * h + e);
  }
  // (g + 8r, 4t + 2 pair) and (4t + s, g + 8r)
  __device__ int quad_at(int r, int pair) const { return (quad ^ (8 * r) ^ (2 * pair)) + 8 * kTile * r; }
  __device__ int quad_transposed(int r, int s) const { return (quad_column ^ (8 * r) ^ (2 * (s & 1))) + kTile * s; }
};

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
// through shared memory, which needs half the instructions of shuffles. m is first scaled by powers of two to a diagonal
// of about 1, so that no determinant of a pair overflows or vanishes. The values in a pivot's own column come out of
// the same update as the others, from a zero base and the coefficients of a unit vector.
__device__ __forceinline__ int invert_fp32(const double* m, float* scratch) {
  const int lane = threadIdx.x % 32, column = lane & 15, half = lane >> 4;
  const float scale = inverse_root_exponent(m[Lane::diagonal(column)]);
  scratch[kScales + column] = scale;
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

// Puts -m^-1 in place of the symmetric tile m in shared memory, and returns as invert_fp32 does. One Newton step squares
// the fp32 inverse's relative error, which is enough unless m is ill-conditioned: then its residual says so, and more
// steps follow.
__device__ __forceinline__ int invert(double* tile, float* scratch, Lane lane) {
  const Tile m = load_tile(tile, lane);
  const int bad = invert_fp32(tile, scratch);
  Tile y;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 v = *reinterpret_cast<const float2*>(scratch + kResult + (lane.g + 8 * r) * kResultRow + 8 * h + 2 * lane.t);
      y.c[h][2 * r] = static_cast<double>(v.x);
      y.c[h][2 * r + 1] = static_cast<double>(v.y);
    }

  bool again;
  Tile minus_inverse = refine(y, m, lane, again);
#pragma unroll 1
  for (int step = 0; again && step < 3; ++step) minus_inverse = refine(negated_tile(minus_inverse), m, lane, again);
  __syncwarp();
  store_tile(tile, minus_inverse, lane);
  return bad;
}

template <bool kVectors>
__device__ __forceinline__ float4 load_quad(const float* p) {
  if constexpr (kVectors) return __ldg(reinterpret_cast<const float4*>(p));
  return make_float4(__ldg(p), __ldg(p + 1), __ldg(p + 2), __ldg(p + 3));
}

template <bool kVectors>
__device__ __forceinline__ void store_pair(float* p, float x, float y) {
  if constexpr (kVectors) {
    *reinterpret_cast<float2*>(p) = make_float2(x, y);
  } else {
    p[0] = x;
    p[1] = y;
  }
}

template <bool kVectors>
__device__ __forceinline__ void store_quad(float* p, float4 v) {
  if constexpr (kVectors) {
    *reinterpret_cast<float4*>(p) = v;
  } else {
    p[0] = v.x;
    p[1] = v.y;
    p[2] = v.z;
    p[3] = v.w;
  }
}

template <int kDim, bool kVectors>
class Block {
  using L = Layout<kDim>;
  static constexpr int kWarps = L::kWarps;
  static constexpr int kHeld = L::kHeld;

 public:
  __device__ Block(const Arguments& args, double* shared, int64_t matrix)
      : args_(args),
        shared_(shared),
        bad_(reinterpret_cast<int*>(shared + L::kBad)),
        matrix_(matrix),
        warp_(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32) {}

  __device__ void run(int part, int parts, int64_t ahead) {
    const float* A = args_.A + matrix_ * args_.A_batch;
    const float* B = args_.B + matrix_ * args_.B_batch;
    Tile m[kHeld];
    sweep(m, A);

    const bool writes_info = args_.info != nullptr && part == 0 && threadIdx.x == 0;
    if (writes_info) args_.info[matrix_] = *bad_;
    if (*bad_ != 0) {
      fill_nan(part, parts);
      return;
    }
    publish_inverse(m);
    if (matrix_ + ahead < args_.count) prefetch(A + ahead * args_.A_batch, args_.A_row, true);
    sync();
    multiply(B, part, parts);
  }

 private:
  // Register tile d of this warp is (warp, column(d)).
  __device__ int column(int d) const { return (warp_ - 1 - d) & (kWarps - 1); }
  __device__ bool holds(int d) const { return d + 1 < kHeld || warp_ >= kWarps / 2; }
  __device__ double* panel(int k, int block) const { return shared_ + (k % 3) * L::kPanel + block * kTileSize; }
  __device__ double* diagonal(int block) const { return shared_ + L::kDiagonal + block * kTileSize; }
  __device__ double* inverse(int i, int j) const { return shared_ + (i * (i + 1) / 2 + j) * kTileSize; }

  __device__ void prefetch(const float* rows, int64_t row_stride, bool lower) const {
    constexpr int kLines = kDim / 32;
    for (int i = threadIdx.x; i < kDim * kLines; i += L::kThreads) {
      const int row = i / kLines, first = (i % kLines) * 32;
      if (!lower || first <= row) prefetch_l2(rows + row * row_stride + first);
    }
  }

  // A tile of A from its lower triangle on its way to the registers, through shared memory where the lane keeps its own
  // elements, so that nobody waits for it earlier than it is used.
  __device__ float* stage(int d) const {
    return reinterpret_cast<float*>(shared_ + L::kPanel + warp_ * (2 * L::kPanel / kWarps)) + d * kTileSize +
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

  __device__ void scale(Tile& m) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int q = 0; q < 4; ++q) m.c[h][q] *= static_cast<double>(args_.a_scale);
  }


  __device__ void load_diagonal(const float* A, int i) const {
    const int row = kTile * i + lane_.g, col = kTile * i + 2 * lane_.t;
    Tile m;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int y = row + 8 * (q >> 1), x = col + 8 * h + (q & 1);
        m.c[h][q] = static_cast<double>(__ldg(A + max(x, y) * args_.A_row + min(x, y)));
      }
    if (args_.a_scale != 1.f) scale(m);
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
      for (int d = 0; d < kHeld; ++d) scale(m[d]);
  }

  // This warp's part of panel k: its tile of column k, or the transposes of its row if it is warp k.
  __device__ void publish(const Tile& tile, int d, int k, Lane lane) const {
    const int j = column(d);
    if (j == k) store_tile(panel(k, warp_), tile, lane);
    if (warp_ == k) store_transposed(panel(k, j), tile, lane);
  }

  // Row block k = warp after step k: M_kj = D C_j^T.
  __device__ void make_row(Tile (&m)[kHeld]) const {
    const Left d_k = negated_left(load_tile(diagonal(warp_), lane_));
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
      multiply_add_transposed(w, negated_left(load_tile(panel(k, warp_), lane)), load_tile(diagonal(k), lane));
      minus_w = negated_left(w);
    }
    {
      Tile own = load_tile(diagonal(warp_), lane);
      multiply_add_transposed(own, minus_w, load_tile(panel(k, warp_), lane));
      store_tile(diagonal(warp_), own, lane);
    }
    if (warp_ == k + 1) barrier_arrive(1, 64);
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
    const int bad = invert(diagonal(k), reinterpret_cast<float*>(shared_ + L::kScratchTile), lane_);
    if (k == 0 && threadIdx.x % 32 == 0) *bad_ = bad;
    if (k > 0 && bad != 0 && threadIdx.x % 32 == 0 && *bad_ == 0) *bad_ = k * kTile + bad;
  }

  __device__ void sync() const { barrier_wait(0, L::kThreads); }

  // Where a warp's row is the pivot row its old tiles are dead, and only there does it invert: registers for both would
  // not do. Step -1 makes the first panel and the first D.
  __device__ void sweep(Tile (&m)[kHeld], const float* A) const {
    if (warp_ == 0) {
      load_diagonal(A, 0);
      barrier_arrive(1, 64);
    }
#pragma unroll
    for (int d = 0; d < kHeld; ++d)
      if (holds(d)) request(A, d);
#pragma unroll 1
    for (int k = -1; k < kWarps; ++k) {
      if (warp_ == (k & (kWarps - 1))) {
        if (k + 1 < kWarps) {
          barrier_wait(1, 64);
          invert_pivot(k + 1);
        }
        sync();
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
        sync();
      }
      if (k == 0) prefetch(args_.B + matrix_ * args_.B_batch, args_.B_row, false);
    }
  }

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

  // The inverse to shared memory, over the panels. Of a diagonal tile the lower triangle counts, so that T is symmetric
  // to the bit before alpha; the last bit of the upper one may differ.
  __device__ void publish_inverse(Tile (&m)[kHeld]) const {
    const Tile own = negated_tile(load_tile(diagonal(warp_), lane_));
    sync();
    const InverseLane at(lane_);
    store_inverse(own, warp_, warp_, at);
#pragma unroll
    for (int d = 0; d < kHeld; ++d) {
      if (!holds(d)) continue;
      m[d] = negated_tile(m[d]);
      store_inverse(m[d], warp_, column(d), at);
    }
  }

  // Pieces of J: 16 rows by 64 columns. Two parts share the columns, four the rows too.
  __device__ void multiply(const float* B, int part, int parts) const {
    constexpr int kPieces = kDim / 64;
    if (parts == 4 && warp_ / 4 != part >> 1) return;
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece)
      if (parts == 1 || (part & 1) == piece) multiply_piece(B, warp_, piece);
  }

  // inverse[16 kb + 4t + 2 pair + s][16 nb + 8 half + g]
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
          if (4 * lane_.t + s > lane_.g + 8 * half) v[half][s / 2][s % 2] = inverse(kb, nb)[at.quad_transposed(half, s)];
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
    double acc[8][4] = {};
    const float* alpha_of = args_.alpha + matrix_ * args_.alpha_batch + (row_block * kTile + lane_.g) * args_.alpha_element;
    const float alpha[2] = {__ldg(alpha_of), __ldg(alpha_of + 8 * args_.alpha_element)};
    const int row = row_block * kTile + lane_.g;
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
      for (int n = 0; n < 4; ++n) {
        const int nb = 4 * piece + n;
        double right[2][2][2];
        load_right(right, nb, kb, at);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            multiply_add(acc[2 * n + half], left[pair], right[half][pair][0], right[half][pair][1]);
      }
      if (row_block / 4 == piece) store_T(row_block, kb, alpha, at);
    }
    float* J = args_.J + matrix_ * args_.J_batch + row * kDim + 64 * piece + 2 * lane_.t;
    const float scale = args_.b_scale;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        store_pair<kVectors>(J + 8 * r * kDim + 8 * n, scale * static_cast<float>(acc[n][2 * r]),
                             scale * static_cast<float>(acc[n][2 * r + 1]));
  }

  __device__ void fill_nan(int part, int parts) const {
    float* T = args_.T + matrix_ * args_.T_batch;
    float* J = args_.J + matrix_ * args_.J_batch;
    const float nan = __int_as_float(0x7fc00000);
    for (int i = part * L::kThreads + threadIdx.x; i < kDim * kDim; i += parts * L::kThreads) T[i] = J[i] = nan;
  }

  const Arguments& args_;
  double* shared_;
  int* bad_;
  int64_t matrix_;
  int warp_;
  Lane lane_;
};

// The first `whole` matrices take a block each, the others `parts` blocks that all invert and share J.
struct Split {
  int64_t whole;
  int parts;
};

template <int kDim, bool kVectors>
__global__ void __launch_bounds__(Layout<kDim>::kThreads, Layout<kDim>::kResident)
    fp64_tensor_kernel(const __grid_constant__ Arguments args, Split split, int ahead) {
  extern __shared__ __align__(16) double shared[];
  int64_t matrix = blockIdx.x;
  int part = 0, parts = 1;
  if (matrix >= split.whole) {
    parts = split.parts;
    const int64_t rest = matrix - split.whole;
    matrix = split.whole + rest / parts;
    part = static_cast<int>(rest % parts);
  }
  Block<kDim, kVectors>(args, shared, matrix).run(part, parts, ahead);
}

// How to fill `multiprocessors`; no matrix's bytes depend on it.
template <int kDim>
Split split_of(int64_t count, int multiprocessors) {
  if (kDim != 128) return {count, 1};
  if (4 * count <= multiprocessors) return {0, 4};
  if (2 * count <= multiprocessors) return {0, 2};
  const int64_t slots = Layout<kDim>::kResident * multiprocessors, rest = count % slots;
  return {rest <= multiprocessors ? count : count - std::min(rest, slots - rest), 2};
}

template <int kDim, bool kVectors>
void launch_kernel(const Arguments& args, int device, cudaStream_t stream) {
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute(MultiProcessorCount)");
  const Split split = split_of<kDim>(args.count, multiprocessors);
  const int64_t blocks = split.whole + (args.count - split.whole) * split.parts;
  const auto kernel = fp64_tensor_kernel<kDim, kVectors>;
  allow_shared_memory(kernel, Layout<kDim>::kBytes);
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Layout<kDim>::kThreads), Layout<kDim>::kBytes, stream, args,
         split, Layout<kDim>::kResident * multiprocessors);
}

}  // namespace jit_kernels::vdn_delta_factors::fp64

namespace jit_kernels::vdn_delta_factors {

template <int kDim>
void launch_fp64_tensor(const Arguments& args, int device, cudaStream_t stream) {
  if (args.vectors) {
    fp64::launch_kernel<kDim, true>(args, device, stream);
  } else {
    fp64::launch_kernel<kDim, false>(args, device, stream);
  }
}

}  // namespace jit_kernels::vdn_delta_factors
