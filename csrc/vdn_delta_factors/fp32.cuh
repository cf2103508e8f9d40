// vdn_delta_factors in fp32 arithmetic alone: T = diag(alpha) (I + a A)^-1, J = b B (I + a A)^-1.
//
// First an 8-wide symmetric sweep over M = I + a A. Step k, with S = the 8 columns of block k, M_SS = L D L^T,
// C = M[:, S], and rows of -I put in place of C[S, :]:
//   Y = C L^-T,  Z = -Y D^-1             (Z negated, so that every update is an addition)
//   M_ij <- (i in S or j in S ? 0 : M_ij) + Y_i Z_j^T
// After the last step the inverse is -M. The rows of -I make the pivot rows, the pivot columns and the pivot block fall
// out of the same update as everything else. Each sum of 8 products is formed apart and added once: that halves the
// error of adding products one by one. Substitution with L, not a product with M_SS^-1, keeps strongly correlated keys
// accurate. Then J = b B times the inverse, one product after another. The order of all operations depends on kDim
// alone.
//
// Block: (kDim / 8)^2 threads of 128 registers, 16 warps a multiprocessor: two blocks of 256 for kDim 128, eight of 64
// for kDim 64. A block makes T and J of one matrix; where there are more blocks than matrices, two or four blocks each
// make all of the inverse and a part of T's and J's rows. A thread holds 8 columns (group j of G = kDim / 8):
//   M, in the sweep    half a tile: rows 8 i + 4 half .. + 3, and a piece of the wrapped tile     32 + 4 (kDim 64: 8)
//   J, in the product  8 rows 8 t .. 8 t + 7 (4 or 2 where blocks share)                          64
// Tiles of M, 8 x 8, are kept once: tile (i, j) with i = j + d mod G, d = 0 .. G/2 - 1; d = G/2 for j < G/2. A tile
// with i < j holds the mirror image. Lanes: j from lane bits 0 and 2, t from bits 1, 3 and 4, so that each 16-byte
// read of shared memory is shared by neighbouring lanes and costs two cycles.
//
// Step k of the sweep:
//   one warp, in turn:      pivot block k to the state after update k-1, factored
//   all warps:              M += Y_k-1 Z_k-1^T | raw panel k+1 to shared memory
//   the last kDim threads:  panel k, a row each, to the state after update k-1
//   barrier
//   the last kDim threads:  Y_k, Z_k by substitution, to shared memory
//   barrier
// The raw panel k+1 is written in step k, with updates up to k-1 in it; whoever reads it in step k+1 applies update k.
//
// The product: the inverse, whole, in shared memory; B a chunk of G columns at a time, transposed on its way through
// registers, the next chunk loaded during this one; an eighth of T's rows written before each chunk.
//
// Shared memory of a block, in floats: the inverse kDim^2 (before it, in the same place, the sweep's panels raw, Y, Z,
// [2][8][kDim] each, and the pivot block 72); B [2][G][kDim]; alpha kDim. 81 KB for kDim 128, 21 KB for kDim 64.
//
// A matrix of kDim 128: 3.15 M FMA with symmetry, 3.57 M fp32 operations as done here (upper halves of the diagonal
// tiles, the separate additions, the panels), 262 KB of traffic.
#pragma once

#include <cuda_runtime.h>
#include <jit_kernels/grid.cuh>
#include <jit_kernels/launch.cuh>

#include <algorithm>
#include <cstdint>

#include "arguments.cuh"
#include "fp32_block.cuh"
#include "fp32_product.cuh"
#include "fp32_sweep.cuh"

namespace jit_kernels::vdn_delta_factors {
namespace fp32 {

// B's first columns, so that the product can begin as soon as the inverse is there.
template <int kDim, bool kVectors, int kRows>
__device__ __forceinline__ void prepare(BlockMemory<kDim>& shared, const Arguments& args, const Work& work) {
  Product<kDim, kVectors, kRows> product(shared, args, work);
  product.load_B(0);
  product.store_B(0);
}

template <int kDim, bool kVectors, int kRows>
__device__ __forceinline__ void finish(BlockMemory<kDim>& shared, const Arguments& args, const Work& work) {
  Product<kDim, kVectors, kRows> product(shared, args, work);
  product.run(args.T + work.n * args.T_batch, work.row);
  product.store(args.J + work.n * args.J_batch + work.row * kDim);
}

template <int kDim, bool kVectors>
__global__ void __launch_bounds__(Shape<kDim>::kThreads, Shape<kDim>::kBlocks)
    vdn_delta_factors_fp32(const __grid_constant__ Arguments args, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<BlockMemory<kDim>*>(memory);
  Sweep<kDim, kVectors> sweep(shared);
  wait_for_previous_grid();
  {
    const Work work = plan.work<kDim>(blockIdx.x);
    sweep.load(args.A + work.n * args.A_batch, args.A_row);
    if (threadIdx.x < kDim)
      shared.alpha[threadIdx.x] = args.alpha[work.n * args.alpha_batch + threadIdx.x * args.alpha_element];
    if (work.rows == kDim) {
      prepare<kDim, kVectors, 8>(shared, args, work);
    } else if (work.rows == kDim / 2) {
      prepare<kDim, kVectors, 4>(shared, args, work);
    } else {
      prepare<kDim, kVectors, 2>(shared, args, work);
    }
    if (kVectors && threadIdx.x == 0)
      prefetch<kDim>(args.B + work.n * args.B_batch + work.row * args.B_row, args.B_row, work.rows);
  }
  sweep.scale(args.a_scale);
  sweep.run();
  sweep.store();
  __syncthreads();
  const Work work = plan.work<kDim>(blockIdx.x);
  if (threadIdx.x == 0) {
    if (args.info && work.row == 0) args.info[work.n] = shared.info;
    if (kVectors && blockIdx.x + plan.at_a_time < plan.blocks)
      prefetch<kDim>(args.A + plan.work<kDim>(blockIdx.x + plan.at_a_time).n * args.A_batch, args.A_row, kDim);
  }
  if (work.rows == kDim) {
    finish<kDim, kVectors, 8>(shared, args, work);
  } else if (work.rows == kDim / 2) {
    finish<kDim, kVectors, 4>(shared, args, work);
  } else {
    finish<kDim, kVectors, 2>(shared, args, work);
  }
}

}  // namespace fp32

template <int kDim, bool kVectors>
void launch_fp32(const Arguments& args, int device, cudaStream_t stream) {
  // In the last round, few matrices are shared by two or four blocks each. Where they are so many that most blocks have
  // one, the blocks left over take halves.
  constexpr int kBlocks = fp32::Shape<kDim>::kBlocks;
  const int64_t multiprocessors = jit_kernels::multiprocessors(device);
  const int64_t round = multiprocessors * kBlocks, rest = args.count % round;
  const int64_t few = multiprocessors * std::max(1, kBlocks / 4);
  const int64_t share = 4 * rest <= few ? 4 : 2;
  const int64_t whole = args.count - (share * rest <= few ? rest : 2 * rest > round ? round - rest : 0);
  const fp32::Plan plan{static_cast<uint32_t>(whole), static_cast<uint32_t>(whole + share * (args.count - whole)),
                        static_cast<uint32_t>(share), static_cast<uint32_t>(round)};
  constexpr auto kernel = fp32::vdn_delta_factors_fp32<kDim, kVectors>;
  constexpr size_t kBytes = sizeof(fp32::BlockMemory<kDim>);
  allow_shared_memory<kernel, kBytes>(device);
  launch_overlapped(kernel, plan.blocks, fp32::Shape<kDim>::kThreads, kBytes, 1, stream, args, plan);
}

template <int kDim>
void launch_fp32(const Arguments& args, int device, cudaStream_t stream) {
  args.vectors ? launch_fp32<kDim, true>(args, device, stream) : launch_fp32<kDim, false>(args, device, stream);
}

}  // namespace jit_kernels::vdn_delta_factors
