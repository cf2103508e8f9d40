// vdn_delta_factors on the fp64 tensor cores: T = diag(alpha) M^-1 and J = b_scale B M^-1, M = I + a_scale A.
//
// A block owns a matrix, a warp owns one of its n = kDim / 16 row blocks. M lives as 16 x 16 fp64 tiles, the diagonal
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
//   J: warp w computes 16 x 64 pieces of B M^-1, B straight from global memory, and writes its rows of T in between.
//
// Several blocks may share a matrix where there are more multiprocessors than matrices: each inverts, each makes a part
// of J. No element's arithmetic depends on that, on the batch or on the grid.
//
// Shared memory (kDim = 128: 72 KB):  three panels with their pivots (A on its way to the registers first), the
//                                     diagonal, scratch; later, over them, M^-1 by tiles; the first bad pivot; a barrier.
// kDim = 128, a matrix: 1670 products of 16 x 8 x 16 (26.7 K cycles an SM at the pipe's rate), 262 KB of global
// traffic. What bounds it and what was tried: NOTES.md.
#pragma once

#include <cuda_runtime.h>

#include <jit_kernels/launch.cuh>

#include <algorithm>
#include <cstdint>

#include "arguments.cuh"
#include "fp64_pivot.cuh"
#include "fp64_tiles.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

template <int kDim>
struct Layout {
  static constexpr int kWarps = kDim / kTile;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kHeld = kWarps / 2;  // tiles a warp in registers; the last one in the upper half of the warps
  static constexpr int kTiles = kWarps * (kWarps + 1) / 2;
  static constexpr int kResident = kDim == 128 ? 2 : 4;  // blocks a multiprocessor
  static constexpr int kPieceTiles = 4;                  // J: tile columns that a warp makes at a time

  static constexpr int kPanel = kWarps * kTileSize;  // in doubles
  static constexpr int kDiagonal = 3 * kPanel;
  static constexpr int kScratchTile = kDiagonal + kPanel;
  static constexpr int kSweep = kScratchTile + kTileSize;
  static constexpr int kInverse = kTiles * kTileSize;
  static constexpr int kBad = kSweep > kInverse ? kSweep : kInverse;
  static constexpr int kBytes = kBad * 8 + 16;
  static_assert(kScratch * sizeof(float) <= kTileSize * sizeof(double));
};

template <bool kVectors>
__device__ __forceinline__ float4 load_quad(const float* p) {
  if constexpr (kVectors) return __ldg(reinterpret_cast<const float4*>(p));
  return make_float4(__ldg(p), __ldg(p + 1), __ldg(p + 2), __ldg(p + 3));
}

template <bool kVectors>
__device__ __forceinline__ void store_pair(float* p, float x, float y) {
  if constexpr (kVectors) {
    __stcs(reinterpret_cast<float2*>(p), make_float2(x, y));
  } else {
    p[0] = x;
    p[1] = y;
  }
}

template <bool kVectors>
__device__ __forceinline__ void store_quad(float* p, float4 v) {
  if constexpr (kVectors) {
    __stcs(reinterpret_cast<float4*>(p), v);
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
        handover_(shared + L::kBad + 1),
        matrix_(matrix),
        warp_(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32) {}

  __device__ void run(int part, int parts, int64_t ahead) {
    const float* A = args_.A + matrix_ * args_.A_batch;
    const float* B = args_.B + matrix_ * args_.B_batch;
    Tile m[kHeld] = {};
    sweep(m, A);

    const bool writes_info = args_.info != nullptr && part == 0 && threadIdx.x == 0;
    if (writes_info) args_.info[matrix_] = *bad_;
    if (*bad_ != 0) {
      fill_nan(part, parts);
      return;
    }
    publish_inverse(m);
    if (matrix_ + ahead < args_.count) prefetch(A + ahead * args_.A_batch, args_.A_row, true);
    __syncthreads();
    multiply(B, part, parts);
  }

 private:
  // Register tile d of this warp is (warp, column(d)).
  __device__ int column(int d) const { return (warp_ - 1 - d) & (kWarps - 1); }
  __device__ bool holds(int d) const { return d + 1 < kHeld || warp_ >= kWarps / 2; }
  __device__ double* panel(int k, int block) const { return shared_ + (k % 3) * L::kPanel + block * kTileSize; }
  __device__ double* diagonal(int block) const { return shared_ + L::kDiagonal + block * kTileSize; }
  // -D of step k, where panel k has no tile of C.
  __device__ double* pivot(int k) const { return panel(k, k); }
  __device__ double* inverse(int i, int j) const { return shared_ + (i * (i + 1) / 2 + j) * kTileSize; }

  __device__ void prefetch(const float* rows, int64_t row_stride, bool lower) const {
    constexpr int kLines = kDim / 32;
    for (int i = threadIdx.x; i < kDim * kLines; i += L::kThreads) {
      const int row = i / kLines, first = (i % kLines) * 32;
      if (!lower || first <= row) prefetch_l2(rows + row * row_stride + first);
    }
  }

  // A's lower triangle comes to the registers through shared memory, each lane's elements to a place of its own, so
  // that nobody waits for them earlier than they are used. The last warp uses its own after the first pivot: they lie
  // where the third panel will be.
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

  // Diagonal tile i of M = I + a_scale A.
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
    const int bad = invert(pivot(k), diagonal(k), reinterpret_cast<float*>(shared_ + L::kScratchTile), lane_);
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
        barrier_meet(L::kThreads);
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
        barrier_meet(L::kThreads);
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

  // J in pieces of 16 rows by kPieceTiles tile columns. Two parts share the columns, four the rows too.
  __device__ void multiply(const float* B, int part, int parts) const {
    constexpr int kPieces = kWarps / L::kPieceTiles;
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
    double acc[2 * L::kPieceTiles][4] = {};
    const int row = row_block * kTile + lane_.g;
    const float* alpha_of = args_.alpha + matrix_ * args_.alpha_batch + row * args_.alpha_element;
    const float alpha[2] = {__ldg(alpha_of), __ldg(alpha_of + 8 * args_.alpha_element)};
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
      for (int n = 0; n < L::kPieceTiles; ++n) {
        const int nb = L::kPieceTiles * piece + n;
        double right[2][2][2];
        load_right(right, nb, kb, at);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            multiply_add(acc[2 * n + half], left[pair], right[half][pair][0], right[half][pair][1]);
      }
      if (row_block / L::kPieceTiles == piece) store_T(row_block, kb, alpha, at);
    }
    float* J = args_.J + matrix_ * args_.J_batch + row * kDim + L::kPieceTiles * kTile * piece + 2 * lane_.t;
    const float scale = args_.b_scale;
#pragma unroll
    for (int n = 0; n < 2 * L::kPieceTiles; ++n)
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
  Handover handover_;
  int64_t matrix_;
  int warp_;
  Lane lane_;
};

// The first `whole` matrices take a block each, the others `parts` blocks that all invert and share out J.
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

// Few matrices, or the last round of many: several blocks a matrix where multiprocessors would stand idle.
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
  const Split split = split_of<kDim>(args.count, multiprocessors(device));
  const int64_t blocks = split.whole + (args.count - split.whole) * split.parts;
  constexpr auto kernel = fp64_tensor_kernel<kDim, kVectors>;
  allow_shared_memory<kernel, Layout<kDim>::kBytes>(device);
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(Layout<kDim>::kThreads), Layout<kDim>::kBytes, stream, args,
         split, Layout<kDim>::kResident * multiprocessors(device));
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
