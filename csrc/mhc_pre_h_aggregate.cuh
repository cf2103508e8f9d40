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
#include <jit_kernels/grid.cuh>
#include <jit_kernels/launch.cuh>
#include <jit_kernels/tensor.cuh>

#include <algorithm>
#include <cstdint>

#include "mhc_pre_h_aggregate/backward.cuh"
#include "mhc_pre_h_aggregate/forward.cuh"

namespace jit_kernels::mhc_pre_h_aggregate {

constexpr int64_t kMaxBlocks = 0x7FFFFFFF;
// Backward keeps one float4 a segment in the 48 KB of shared memory that need no opt-in.
constexpr int64_t kMaxHidden = 2800 * kSegment;

inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Sixteen-byte accesses reach every row: base and row strides are multiples of eight elements.
template <typename Tensor>
bool rows_aligned(const Tensor& t) {
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

template <typename Tensor>
Residual view_residual(const Tensor& t) {
  return {static_cast<const uint16_t*>(t.data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}
inline Grad view_grad(const TensorView& t) {
  return {static_cast<const uint16_t*>(t.data_ptr()), t.stride(0), t.stride(1)};
}
template <typename Tensor>
Pre view_pre(const Tensor& t) {
  return {static_cast<const float*>(t.data_ptr()), t.stride(0), t.stride(1)};
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// out [..., H] bf16 contiguous; residual [..., 4, H] bf16 and pre [..., 4] fp32, any strides.
inline void forward(TensorView out_given, TensorView residual_given, TensorView pre_given) {
  const Flattened<2> residual("residual", residual_given);
  const Flattened<1> pre("pre", pre_given, residual), out("out", out_given, residual);
  const DLDevice device = residual_given.device();
  constexpr auto kAny = Expect::kAny;
  residual.expect().on(device).dtype<__nv_bfloat16>().shape({kAny, kStreams, kAny}).aligned(2);
  const int64_t tokens = residual.size(0), hidden = residual.size(2);
  pre.expect().on(device).dtype<float>().shape({tokens, kStreams}).aligned(4);
  out.expect().on(device).dtype<__nv_bfloat16>().shape({tokens, hidden}).strides({hidden, 1}).aligned(2);
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
  Expect("residual", residual).on(device).dtype<__nv_bfloat16>().shape({kAny, kStreams, kAny}).aligned(2);
  const int64_t tokens = residual.size(0), hidden = residual.size(2);
  Expect("pre", pre).on(device).dtype<float>().shape({tokens, kStreams}).aligned(4);
  Expect("grad", grad).on(device).dtype<__nv_bfloat16>().shape({tokens, hidden}).aligned(2);
  const bool want_residual = grad_residual.numel() != 0, want_pre = grad_pre.numel() != 0;
  const bool fp32 = same(grad_residual.dtype(), DTypeOf<float>::value);
  if (want_residual) {
    Expect expect("grad_residual", grad_residual);
    expect.on(device).shape({tokens, kStreams, hidden}).strides({kStreams * hidden, hidden, 1}).aligned(fp32 ? 4 : 2);
    if (!fp32) expect.dtype<__nv_bfloat16>();
  }
  if (want_pre)
    Expect("grad_pre", grad_pre).on(device).dtype<float>().shape({tokens, kStreams}).strides({kStreams, 1}).aligned(4);
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
