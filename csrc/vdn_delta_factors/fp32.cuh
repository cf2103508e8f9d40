// vdn_delta_factors in fp32 arithmetic alone: T = diag(alpha) (I + a A)^-1, J = b B (I + a A)^-1.
//
// An 8-wide symmetric sweep over M = I + a A, with J's rows swept along (no product with the inverse at the end).
// Step k, with S = the 8 columns of block k, M_SS = L D L^T, C = M[:, S], and rows of -I put in place of C[S, :]:
//   Y = C L^-T,  Z = -Y D^-1,  W = Z L^-1             (Z, W negated, so that every update is an addition)
//   M_ij <- (i in S or j in S ? 0 : M_ij) + Y_i Z_j^T     J_ij <- (j in S ? 0 : J_ij) + J_iS W_j^T
// After the last step the inverse is -M. The rows of -I make the pivot rows, the pivot columns and the pivot block fall
// out of the same update as everything else. Each sum of 8 products is formed apart and added once: that halves the
// error of adding products one by one. Substitution with L, not a product with M_SS^-1, keeps strongly correlated keys
// accurate. The order of all operations depends on kDim alone.
//
// Block: 384 threads, one a SM, persistent; warps 0-3 help, warps 4-11 compute. A team sweeps one matrix and is the
// whole block for kDim 128 (4 + 8 warps), a quarter of it for kDim 64 (1 + 2 warps, four independent teams). Where
// there is room for it, two teams share a matrix: both sweep M, each carries half the rows of J along and writes
// half of T.
//
// A compute thread holds 8 columns (group j of G = kDim / 8) of both matrices in registers:
//   J   8 rows 8 t .. 8 t + 7 (4 when two teams share)                                 64 registers
//   M   half a tile: rows 8 i + 4 half .. + 3, and a piece of the wrapped tile         32 + 4 (kDim 64: 8) registers
// Tiles of M, 8 x 8, are kept once: tile (i, j) with i = j + d mod G, d = 0 .. G/2 - 1; d = G/2 for j < G/2. A tile
// with i < j holds the mirror image. Lanes: j from lane bits 0 and 2, t from bits 1, 3 and 4, so that each 16-byte
// read of shared memory is shared by neighbouring lanes and costs two cycles.
//
// A helper lane owns one row of the panels Y, Z, W (kDim 64: two). The helpers run one step ahead: they bring panel k+1
// from the state before update k to the state after it themselves, so that the factorisation's latency hides under a
// whole step of the compute warps. The eight lanes that own the pivot rows factor the pivot block.
//
// Interval k, from one barrier of the team to the next:
//   compute:  M += Y_k Z_k^T | raw panel k+2 to shared memory | J += J_k W_k^T | J's panel k+1 to shared memory
//   helpers:  panel k+1 += update k | factor its pivot block | Y, Z, W of k+1 to shared memory
//
// Global memory, where 16-byte access is allowed: the next B arrives in shared memory by a bulk copy while this
// matrix is swept, the next A in L2; T and J leave through one staging buffer by bulk copies. Shared memory of a
// team, in floats: staging and B kDim^2 each, panels [8][kDim]: raw, Y, Z, W, J two each; pivot block 72, alpha
// kDim. 173 KB for kDim 128, 4 x 54 KB for kDim 64.
//
// A matrix of kDim 128: 3.15 M FMA with symmetry, 3.69 M fp32 operations as done here (upper halves of the diagonal
// tiles, the separate additions), 262 KB of traffic.
#pragma once

#include <cuda_runtime.h>
#include <jit_kernels/launch.cuh>

#include <algorithm>
#include <cstdint>

#include "arguments.cuh"
#include "fp32_compute.cuh"
#include "fp32_helpers.cuh"
#include "fp32_team.cuh"

namespace jit_kernels::vdn_delta_factors {
namespace fp32 {

template <int kDim, bool kVectors>
__global__ void __launch_bounds__(kThreads, 1)
    vdn_delta_factors_fp32(const __grid_constant__ Arguments args, const __grid_constant__ Plan plan) {
  using S = Shape<kDim>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto* teams = reinterpret_cast<TeamMemory<kDim>*>(memory);
  if (threadIdx.x < S::kTeams) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&teams[threadIdx.x].arrived))
                 : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  const int64_t step = static_cast<int64_t>(S::kTeams) * gridDim.x;
  // Registers move from the helpers to the compute warps: 2 x 208 + 88 = 2 x 200 + 104 = 3 x 168.
  if (threadIdx.x >= kHelperThreads) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kDim == 128 ? 208 : 200));
    const int thread = threadIdx.x - kHelperThreads, team = thread / S::kTeamThreads;
    Compute<kDim, kVectors>(teams[team], args, team, thread % S::kTeamThreads)
        .run(plan, static_cast<int64_t>(team) * gridDim.x + blockIdx.x, step);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kDim == 128 ? 88 : 104));
    const int team = threadIdx.x / S::kHelpers;
    help<kDim, kVectors>(teams[team], args, plan, team, threadIdx.x % S::kHelpers,
                         static_cast<int64_t>(team) * gridDim.x + blockIdx.x, step);
  }
}

}  // namespace fp32

template <int kDim, bool kVectors>
void launch_fp32(const Arguments& args, int device, cudaStream_t stream) {
  const int multiprocessors = jit_kernels::multiprocessors(device);
  // Matrices that would leave half of the multiprocessors idle or more are shared by two teams.
  const int64_t round = multiprocessors * (kDim == 128 ? 1 : int64_t{fp32::Shape<kDim>::kTeams});
  const int64_t rest = args.count % round;
  const int64_t whole = 2 * rest <= multiprocessors ? args.count - rest : args.count;
  const fp32::Plan plan{whole, whole + 2 * (args.count - whole)};
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(plan.turns, multiprocessors));
  constexpr auto kernel = fp32::vdn_delta_factors_fp32<kDim, kVectors>;
  constexpr size_t kBytes = sizeof(fp32::TeamMemory<kDim>) * fp32::Shape<kDim>::kTeams;
  allow_shared_memory<kernel, kBytes>(device);
  launch(kernel, dim3(blocks), dim3(fp32::kThreads), kBytes, stream, args, plan);
}

template <int kDim>
void launch_fp32(const Arguments& args, int device, cudaStream_t stream) {
  args.vectors ? launch_fp32<kDim, true>(args, device, stream) : launch_fp32<kDim, false>(args, device, stream);
}

}  // namespace jit_kernels::vdn_delta_factors
