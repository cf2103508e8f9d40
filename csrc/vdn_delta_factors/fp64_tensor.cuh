// vdn_delta_factors on the fp64 tensor cores: T = diag(alpha) M^-1 and J = b_scale B M^-1, M = I + a_scale A.
//
// A block takes a matrix: eight warps one of d = 128, one warp one of d = 64. Several blocks may share a matrix where
// there are places for more: each inverts, each makes a part of J. No element's arithmetic depends on that, on the
// batch or on the grid.
#pragma once

#include <cuda_runtime.h>

#include <jit_kernels/grid.cuh>
#include <jit_kernels/launch.cuh>

#include <cstdint>
#include <type_traits>

#include "arguments.cuh"
#include "fp64_block.cuh"
#include "fp64_warp.cuh"

namespace jit_kernels::vdn_delta_factors::fp64 {

template <int kDim, bool kVectors>
using Form = std::conditional_t<kDim == 128, Block<kVectors>, Warp<kVectors>>;

template <int kDim, bool kVectors>
__global__ void __launch_bounds__(Form<kDim, kVectors>::kThreads, Form<kDim, kVectors>::kResident)
    fp64_tensor_kernel(const __grid_constant__ Arguments args, Split split, int ahead) {
  extern __shared__ __align__(16) double shared[];
  if constexpr (Form<kDim, kVectors>::kOverlapped) wait_for_previous_grid();
  int64_t matrix = blockIdx.x;
  int part = 0, parts = 1;
  if (matrix >= split.whole) {
    parts = split.parts;
    const int64_t rest = matrix - split.whole;
    matrix = split.whole + rest / parts;
    part = static_cast<int>(rest % parts);
  }
  Form<kDim, kVectors>(args, shared, matrix).run(part, parts, ahead);
}

template <int kDim, bool kVectors>
void launch_kernel(const Arguments& args, int device, cudaStream_t stream) {
  using F = Form<kDim, kVectors>;
  const int processors = multiprocessors(device), ahead = F::kResident * processors;
  const Split split = F::split(args.count, processors);
  const int64_t blocks = split.whole + (args.count - split.whole) * split.parts;
  constexpr auto kernel = fp64_tensor_kernel<kDim, kVectors>;
  allow_shared_memory<kernel, F::kBytes>(device);
  if constexpr (F::kOverlapped) {
    launch_overlapped(kernel, blocks, F::kThreads, F::kBytes, 1, stream, args, split, ahead);
  } else {
    launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(F::kThreads), F::kBytes, stream, args, split, ahead);
  }
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
