// The collapse, forward: a block is 2 or 4 neighbouring segments of one token; blocks are independent.
#pragma once

#include <jit_kernels/grid.cuh>

#include <cstdint>

#include "elements.cuh"

namespace jit_kernels::mhc_pre_h_aggregate {

struct ForwardParams {
  uint16_t* out;
  Residual residual;
  Pre pre;
  int hidden;
  bool prefetch;
  Divider chunks;
};

constexpr int kForwardWarps = 4;
// Left alone ptxas aims at 32 registers and loads two streams at a time; 12 blocks allow 40, and all four fly together.
// The scalar path's 32 loads take 64.
template <bool kVector>
__global__ void __launch_bounds__(kForwardWarps * kLanes, kVector ? 12 : 8)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  const uint32_t token = p.chunks.quotient(blockIdx.x);
  const int chunk = blockIdx.x - token * p.chunks.divisor;
  const int segment = chunk * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const int first = first_element<kVector>(segment, threadIdx.x % kLanes);
  if (first >= p.hidden) return;
  const uint16_t* row = p.residual.data + token * p.residual.token;
  if (kVector && p.prefetch) prefetch(p.residual, row, first, p.hidden);
  wait_for_previous_grid();

  float pre[kStreams];
  Eight<kVector> r[kStreams];
  const auto load_streams = [&](auto stride) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) r[i] = load<kVector>(row + i * p.residual.stream, stride, first, p.hidden);
  };
  if (kVector || p.residual.element == 1) {
    load_streams(Unit());
  } else {
    load_streams(p.residual.element);
  }
  load_pre(pre, p.pre, token);

  float out[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    out[k] = __fadd_rn(__fadd_rn(__fmul_rn(pre[0], r[0][k]), __fmul_rn(pre[1], r[1][k])),
                       __fadd_rn(__fmul_rn(pre[2], r[2][k]), __fmul_rn(pre[3], r[3][k])));
  uint16_t* out_row = p.out + int64_t{token} * p.hidden;
  store<kVector, false>(out, out_row, first, p.hidden);
  if (any_nan(out)) store<kVector, true>(out, out_row, first, p.hidden);
}

}  // namespace jit_kernels::mhc_pre_h_aggregate
