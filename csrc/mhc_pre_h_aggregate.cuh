// The mHC collapse: four residual streams into one hidden state, and its backward.
//
//   forward    out[t,h]             = bf16((p0*r0 + p1*r1) + (p2*r2 + p3*r3))
//   backward   grad_residual[t,i,h] = grad[t,h] * p_i
//              grad_pre[t,i]        = tree sum over h of grad[t,h] * r_i      p_i = pre[t,i], r_i = residual[t,i,h]
//
// Both are bound by memory: 10 bytes per (t,h) forward, 18 backward (bf16 grad_residual). Every product and sum is
// rounded by itself in fp32 (__fmul_rn, __fadd_rn: no contraction), so the bytes are those of the torch fallback.
//
// Who owns what. A row of H elements is cut into segments of 256; a warp owns a segment, a lane 8 of its elements:
//
//   vector path   lane l has elements 8l .. 8l+7             one 16-byte access per stream
//   scalar path   lane l has elements l, 32+l, ... 224+l     eight coalesced 2-byte accesses; any stride, any alignment
//
// Forward: a block is 2 or 4 neighbouring segments of one token; blocks are independent.
// Backward: a cluster of up to 8 blocks of 4 warps is one token: a segment a warp up to H = 8192, above it several.
// A warp leaves four sums, float4[segment] in the first block's shared memory, and a warp there adds them.
// Tokens lie along grid.x, offsets are 64 bits wide, and launch shapes are free: the sum's tree is not theirs.
//
// The tree adds neighbours, then pairs of neighbours, and so on: level k joins elements that differ in bit k of h.
// Bits 0-7 lie inside a segment (vector path: 0-2 in registers, 3-7 across lanes; scalar path: 0-4 across lanes, 5-7
// across the lane's own eight), bits 8-12 across the 32 segments a warp holds one per lane, and so on upwards.
// Missing elements count as -0.0, the one value that changes no sum's bits: the result depends on H alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <jit_kernels/grid.cuh>
#include <jit_kernels/launch.cuh>
#include <jit_kernels/tensor.cuh>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace jit_kernels::mhc_pre_h_aggregate {

constexpr int kStreams = 4;
constexpr int kLanes = 32;
constexpr int kWidth = 8;
constexpr int kSegment = kLanes * kWidth;

constexpr uint32_t kNanBf16 = 0x7FC0;

struct Residual {
  const uint16_t* data;
  int64_t token, stream, element;
};
struct Pre {
  const float* data;
  int64_t token, stream;
};
struct Grad {
  const uint16_t* data;
  int64_t token, element;
};

// ---- bits and floats

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

__device__ __forceinline__ float canonical(float x) { return is_nan(x) ? __uint_as_float(0x7FC00000u) : x; }

// Two floats to two bf16. The instruction's own NaN is 0x7FFF.
template <bool kCanonical>
__device__ __forceinline__ uint32_t narrow(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  const uint32_t word = *reinterpret_cast<const uint32_t*>(&pair);
  if constexpr (!kCanonical) return word;
  return (is_nan(low) ? kNanBf16 : word & 0xFFFFu) | (is_nan(high) ? kNanBf16 << 16 : word & 0xFFFF0000u);
}

// ---- memory: a lane's eight elements

template <bool kVector>
__device__ __forceinline__ int first_element(int segment, int lane) {
  return segment * kSegment + (kVector ? lane * kWidth : lane);
}

// Eight bf16 as they were loaded; widened only where they are used, so that no load waits for another.
template <bool kVector>
struct Eight {
  uint32_t words[kVector ? kWidth / 2 : kWidth];

  __device__ __forceinline__ float operator[](int k) const {
    if constexpr (kVector) return __uint_as_float(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
    return __uint_as_float(words[k] << 16);
  }
};

// A stride known to be 1 makes the scalar path's eight addresses one register and constant offsets.
struct Unit {
  __host__ __device__ constexpr operator int64_t() const { return 1; }
};

// Vector path: the eight lie inside the row. Scalar path: elements past the row's end read as 0.
// Plain loads: ld.global.nc would promise that no other kernel writes while this one runs, which it may not have
// waited for yet; and passing L1 by (L1::no_allocate) measured 4 % slower.
template <bool kVector, typename Stride>
__device__ __forceinline__ Eight<kVector> load(const uint16_t* row, Stride stride, int first, int hidden) {
  Eight<kVector> x;
  if constexpr (kVector) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + first);
    x.words[0] = v.x, x.words[1] = v.y, x.words[2] = v.z, x.words[3] = v.w;
  } else {
    const uint16_t* address = row + first * stride;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      x.words[k] = first + k * kLanes < hidden ? *address : 0;
      address += kLanes * stride;
      // One address at a time: 32 of them, worked out ahead, would spill.
      if constexpr (!std::is_same_v<Stride, Unit>) asm volatile("" : "+l"(address));
    }
  }
  return x;
}

// NaNs are rare: everything is stored as it comes, and a lane that saw one stores again with kCanonical.
template <bool kVector, bool kCanonical>
__device__ __forceinline__ void store(const float (&x)[kWidth], uint16_t* row, int first, int hidden) {
  if constexpr (kVector) {
    __stcs(reinterpret_cast<uint4*>(row + first),
           make_uint4(narrow<kCanonical>(x[0], x[1]), narrow<kCanonical>(x[2], x[3]), narrow<kCanonical>(x[4], x[5]),
                      narrow<kCanonical>(x[6], x[7])));
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (first + k * kLanes < hidden) row[first + k * kLanes] = narrow<kCanonical>(x[k], 0.0f);
  }
}

template <bool kVector, bool kCanonical>
__device__ __forceinline__ void store(const float (&x)[kWidth], float* row, int first, int hidden) {
  float v[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) v[k] = kCanonical ? canonical(x[k]) : x[k];
  if constexpr (kVector) {
#pragma unroll
    for (int k = 0; k < kWidth; k += 4)
      __stcs(reinterpret_cast<float4*>(row + first + k), make_float4(v[k], v[k + 1], v[k + 2], v[k + 3]));
  } else {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (first + k * kLanes < hidden) row[first + k * kLanes] = v[k];
  }
}

__device__ __forceinline__ bool any_nan(const float (&x)[kWidth]) {
  bool nan = false;
#pragma unroll
  for (int k = 0; k < kWidth; k += 2) nan |= is_nan(x[k]) | is_nan(x[k + 1]);
  return nan;
}

__device__ __forceinline__ void load_pre(float (&p)[kStreams], const Pre& pre, int64_t token) {
#pragma unroll
  for (int i = 0; i < kStreams; ++i) p[i] = pre.data[token * pre.token + i * pre.stream];
}

// Asks L2 for the lane's part of the four streams while the previous grid drains. Safe even if that grid still writes
// them: L2 is where memory is coherent, and the loads come after the wait.
__device__ __forceinline__ void prefetch(const Residual& residual, const uint16_t* row, int first, int hidden) {
  if (first >= hidden) return;
#pragma unroll
  for (int i = 0; i < kStreams; ++i)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i * residual.stream + first) : "memory");
}

// ---- forward

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

// ---- backward

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

// ---- host entries

constexpr int64_t kMaxBlocks = 0x7FFFFFFF;
// Backward keeps one float4 a segment in the 48 KB of shared memory that need no opt-in.
constexpr int64_t kMaxHidden = 2800 * kSegment;

inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Sixteen-byte accesses reach every row: base and row strides are multiples of eight elements.
inline bool rows_aligned(const TensorView& t) {
  bool ok = is_aligned(t.data_ptr()) && t.stride(t.ndim() - 1) == 1;
  for (int i = 0; i + 1 < t.ndim(); ++i) ok = ok && (t.size(i) <= 1 || t.stride(i) % kWidth == 0);
  return ok;
}

inline void expect_hidden(int64_t hidden) {
  if (hidden < 1 || hidden > kMaxHidden)
    TVM_FFI_THROW(ValueError) << "residual: expected a hidden size from 1 to " << kMaxHidden << ", got " << hidden;
}

inline void expect_blocks(int64_t tokens, int64_t per_token) {
  if (tokens > kMaxBlocks / per_token)
    TVM_FFI_THROW(ValueError) << "residual: expected at most " << kMaxBlocks / per_token
                              << " tokens of this hidden size, got " << tokens;
}

inline Residual view_residual(const TensorView& t) {
  return {static_cast<const uint16_t*>(t.data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}
inline Grad view_grad(const TensorView& t) {
  return {static_cast<const uint16_t*>(t.data_ptr()), t.stride(0), t.stride(1)};
}
inline Pre view_pre(const TensorView& t) { return {static_cast<const float*>(t.data_ptr()), t.stride(0), t.stride(1)}; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// out [..., H] bf16 contiguous; residual [..., 4, H] bf16 and pre [..., 4] fp32, any strides.
inline void forward(TensorView out_given, TensorView residual_given, TensorView pre_given) {
  const Flattened<1> out_flat("out", out_given), pre_flat("pre", pre_given);
  const Flattened<2> residual_flat("residual", residual_given);
  const TensorView out = out_flat.view(), residual = residual_flat.view(), pre = pre_flat.view();
  const DLDevice device = residual.device();
  constexpr auto kAny = Expect::kAny;
  Expect("residual", residual).on(device).dtype<__nv_bfloat16>().shape({kAny, kStreams, kAny});
  const int64_t tokens = residual.size(0), hidden = residual.size(2);
  Expect("pre", pre).on(device).dtype<float>().shape({tokens, kStreams});
  Expect("out", out).on(device).dtype<__nv_bfloat16>().shape({tokens, hidden}).strides({hidden, 1});
  expect_hidden(hidden);
  const int64_t segments = ceil_div(hidden, kSegment);
  // Few tokens: two warps a block spread better, and memory has time to spare for a prefetch (at many it costs 8 %).
  const bool few = tokens * segments < 4096;
  const int64_t warps = std::min<int64_t>(segments, few ? 2 : kForwardWarps);
  const int64_t chunks = ceil_div(segments, warps);
  expect_blocks(tokens, chunks);
  if (tokens == 0) return;

  const DeviceGuard guard(device);

  const ForwardParams params{static_cast<uint16_t*>(out.data_ptr()), view_residual(residual), view_pre(pre),
                             static_cast<int>(hidden), few, Divider(static_cast<uint32_t>(chunks))};
  const bool vector = hidden % kWidth == 0 && rows_aligned(residual) && is_aligned(out.data_ptr());
  launch_overlapped(vector ? forward_kernel<true> : forward_kernel<false>, tokens * chunks, warps * kLanes, 0, 1,
                    guard.stream(), params);
}

// grad_residual [T, 4, H] bf16 or fp32 and grad_pre [T, 4] fp32, contiguous, either of them empty when not wanted;
// grad [T, H] bf16, residual [T, 4, H] bf16 and pre [T, 4] fp32, any strides, 0 included.
inline void backward(TensorView grad_residual, TensorView grad_pre, TensorView grad, TensorView residual,
                     TensorView pre) {
  const DLDevice device = residual.device();
  constexpr auto kAny = Expect::kAny;
  Expect("residual", residual).on(device).dtype<__nv_bfloat16>().shape({kAny, kStreams, kAny});
  const int64_t tokens = residual.size(0), hidden = residual.size(2);
  Expect("pre", pre).on(device).dtype<float>().shape({tokens, kStreams});
  Expect("grad", grad).on(device).dtype<__nv_bfloat16>().shape({tokens, hidden});
  const bool want_residual = grad_residual.numel() != 0, want_pre = grad_pre.numel() != 0;
  const bool fp32 = same(grad_residual.dtype(), DTypeOf<float>::value);
  if (want_residual) {
    Expect expect("grad_residual", grad_residual);
    expect.on(device).shape({tokens, kStreams, hidden}).strides({kStreams * hidden, hidden, 1});
    if (!fp32) expect.dtype<__nv_bfloat16>();
  }
  if (want_pre)
    Expect("grad_pre", grad_pre).on(device).dtype<float>().shape({tokens, kStreams}).strides({kStreams, 1});
  expect_hidden(hidden);
  expect_blocks(tokens, kMaxCluster);
  if (tokens == 0 || !(want_residual || want_pre)) return;

  const DeviceGuard guard(device);

  const bool vector = hidden % kWidth == 0 && rows_aligned(grad) && (!want_pre || rows_aligned(residual)) &&
                      (!want_residual || is_aligned(grad_residual.data_ptr()));
  const int64_t segments = ceil_div(hidden, kSegment);
  const int64_t warps = std::min<int64_t>(segments, kBackwardWarps);
  const int64_t cluster = std::min<int64_t>(ceil_div(segments, warps), kMaxCluster);
  int64_t sums = segments;
  for (int64_t n = segments; n > kLanes; sums += n) n = ceil_div(n, kLanes);
  const auto run = [&]<typename GradResidual, bool kWantResidual, bool kWantPre>() {
    const BackwardParams<GradResidual> params{static_cast<GradResidual*>(grad_residual.data_ptr()),
                                              static_cast<float*>(grad_pre.data_ptr()),
                                              view_grad(grad),
                                              view_residual(residual),
                                              view_pre(pre),
                                              static_cast<int>(hidden),
                                              Divider(static_cast<uint32_t>(cluster))};
    launch_overlapped(vector ? backward_kernel<true, GradResidual, kWantResidual, kWantPre>
                             : backward_kernel<false, GradResidual, kWantResidual, kWantPre>,
                      tokens * cluster, warps * kLanes, sums * sizeof(float4), static_cast<int>(cluster),
                      guard.stream(), params);
  };
  if (!want_residual) {
    run.template operator()<uint16_t, false, true>();
  } else if (fp32) {
    want_pre ? run.template operator()<float, true, true>() : run.template operator()<float, true, false>();
  } else {
    want_pre ? run.template operator()<uint16_t, true, true>() : run.template operator()<uint16_t, true, false>();
  }
}

}  // namespace jit_kernels::mhc_pre_h_aggregate
