// The collapse, backward: a cluster of up to 8 blocks of 4 warps is one token; its sums meet in the first block.
#pragma once

#include <jit_kernels/grid.cuh>

#include <cstdint>

#include "elements.cuh"

namespace jit_kernels::mhc_pre_h_aggregate {

// Halves N values held by every lane: a lane keeps those whose lowest index bit equals its own `bit`, each plus the
// partner lane's. One tree level for all N at the price of N/2 shuffles.
template <int N, int kHeld>
__device__ __forceinline__ void fold(float (&v)[kHeld], int bit) {
  const bool odd = threadIdx.x & bit;
#pragma unroll
  for (int j = 0; j < N / 2; ++j) {
    const float kept = odd ? v[2 * j + 1] : v[2 * j];
    const float sent = odd ? v[2 * j] : v[2 * j + 1];
    v[j] = __fadd_rn(kept, __shfl_xor_sync(0xFFFFFFFFu, sent, bit));
  }
}

// After the folds lane l holds stream l % 4; the last three levels join lanes that differ in bits 2, 3 and 4.
__device__ __forceinline__ float join(float v) {
#pragma unroll
  for (int bit = 4; bit < kLanes; bit *= 2) v = __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFFu, v, bit));
  return v;
}

// Sums four streams over the 32 lanes; lane l gets stream l % 4.
__device__ __forceinline__ float sum_lanes(const float (&v)[kStreams]) {
  float held[kStreams] = {v[0], v[1], v[2], v[3]};
  fold<4>(held, 1);
  fold<2>(held, 2);
  return join(held[0]);
}

// Four streams of grad * residual over one segment; lane l gets stream l % 4.
template <bool kVector>
__device__ __forceinline__ float sum_segment(const Eight<kVector>& g, const Eight<kVector> (&r)[kStreams], int first,
                                             int hidden) {
  if constexpr (kVector) {
    float sums[kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      float v[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) v[k] = __fmul_rn(g[k], r[i][k]);
#pragma unroll
      for (int n = kWidth / 2; n > 0; n /= 2)
#pragma unroll
        for (int k = 0; k < n; ++k) v[k] = __fadd_rn(v[2 * k], v[2 * k + 1]);
      sums[i] = first < hidden ? v[0] : -0.0f;
    }
    return sum_lanes(sums);
  } else {
    float v[kWidth * kStreams];
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
#pragma unroll
      for (int i = 0; i < kStreams; ++i)
        v[k * kStreams + i] = first + k * kLanes < hidden ? __fmul_rn(g[k], r[i][k]) : -0.0f;
    fold<32>(v, 1);
    fold<16>(v, 2);
    fold<8>(v, 4);
    fold<4>(v, 8);
    fold<2>(v, 16);
    return join(v[0]);
  }
}

template <typename GradResidual>
struct BackwardParams {
  GradResidual* grad_residual;
  float* grad_pre;
  Grad grad;
  Residual residual;
  Pre pre;
  int hidden;
  Divider cluster;
};

constexpr int kBackwardWarps = 4;
constexpr int kMaxCluster = 8;

// Registers: 64 for the vector path (48 spill nothing yet cost 5 %), 80 for the scalar path with its 40 loads a lane.
template <bool kVector, typename GradResidual, bool kWantResidual, bool kWantPre>
__global__ void __launch_bounds__(kBackwardWarps * kLanes, kVector ? 8 : 6)
    backward_kernel(const __grid_constant__ BackwardParams<GradResidual> p) {
  extern __shared__ float4 partial[];
  const uint32_t token = p.cluster.quotient(blockIdx.x);
  const int blocks = p.cluster.divisor, rank = blockIdx.x - token * blocks;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, warps = blockDim.x / kLanes;
  const int segments = (p.hidden + kSegment - 1) / kSegment;
  const uint16_t* grad_row = p.grad.data + token * p.grad.token;
  const uint16_t* residual_row = p.residual.data + token * p.residual.token;

  __shared__ Arrivals arrivals;
  const bool clustered = kWantPre && blocks > 1;
  if (clustered) arrivals.open(rank == 0, segments * sizeof(float4));
  if constexpr (kVector && kWantPre)
    prefetch(p.residual, residual_row, first_element<kVector>(rank * warps + warp, lane), p.hidden);
  wait_for_previous_grid();

  float pre[kStreams];
  if constexpr (kWantResidual) load_pre(pre, p.pre, token);
  for (int segment = rank * warps + warp; segment < segments; segment += blocks * warps) {
    const int first = first_element<kVector>(segment, lane);
    // Lanes past the end load the row's start instead of branching: the loads of a warp stay together.
    const int from = kVector && first >= p.hidden ? 0 : first;
    Eight<kVector> g;
    Eight<kVector> r[kStreams];
    const auto load_rows = [&](auto grad_stride, auto residual_stride) {
      g = load<kVector>(grad_row, grad_stride, from, p.hidden);
      if constexpr (kWantPre) {
#pragma unroll
        for (int i = 0; i < kStreams; ++i)
          r[i] = load<kVector>(residual_row + i * p.residual.stream, residual_stride, from, p.hidden);
      }
    };
    if (kVector || (p.grad.element == 1 && p.residual.element == 1)) {
      load_rows(Unit(), Unit());
    } else {
      load_rows(p.grad.element, p.residual.element);
    }
    if constexpr (kWantPre) {
      // Sums first: their way to grad_pre is the longer one, and residual's registers are free for the products.
      const float sum = sum_segment<kVector>(g, r, first, p.hidden);
      if (lane < kStreams) {
        float* place = reinterpret_cast<float*>(partial + segment) + lane;
        if (clustered) {
          arrivals.send(place, sum);
        } else {
          *place = sum;
        }
      }
    }
    if constexpr (kWantResidual) {
      if (first < p.hidden) {
        GradResidual* row = p.grad_residual + int64_t{token} * kStreams * p.hidden;
        float out[kWidth];
        bool nan = false;
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) out[k] = __fmul_rn(g[k], pre[i]);
          store<kVector, false>(out, row + int64_t{i} * p.hidden, first, p.hidden);
          nan |= any_nan(out);
        }
        if (nan) {
#pragma unroll 1
          for (int i = 0; i < kStreams; ++i, row += p.hidden) {
            const float pre_i = p.pre.data[token * p.pre.token + i * p.pre.stream];
#pragma unroll
            for (int k = 0; k < kWidth; ++k) out[k] = __fmul_rn(g[k], pre_i);
            store<kVector, true>(out, row, first, p.hidden);
          }
        }
      }
    }
  }
  if constexpr (!kWantPre) return;

  if (clustered) {
    if (rank > 0) return;
    arrivals.wait();
  } else {
    __syncthreads();
  }
  float4* level = partial;
  for (int count = segments;;) {
    const int groups = (count + kLanes - 1) / kLanes;
    for (int group = warp; group < groups; group += warps) {
      const int index = group * kLanes + lane;
      const float4 v = index < count ? level[index] : make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
      const float sum = sum_lanes({v.x, v.y, v.z, v.w});
      if (lane < kStreams) {
        if (groups == 1) {
          p.grad_pre[int64_t{token} * kStreams + lane] = canonical(sum);
        } else {
          reinterpret_cast<float*>(level + count + group)[lane] = sum;
        }
      }
    }
    if (groups == 1) return;
    __syncthreads();
    level += count;
    count = groups;
  }
}

}  // namespace jit_kernels::mhc_pre_h_aggregate
