// The scheme of RL-Kernel's h_aggregate as its pull request describes it, written anew as a peer: one block of 512
// threads a token, two bfloat16 (4 bytes) of each stream a thread and step, every product and sum rounded by itself.
// Four steps are unrolled: their loads fly together, as the scheme's figures need.
#pragma once

#include <jit_kernels/launch.cuh>
#include <jit_kernels/tensor.cuh>

namespace jit_kernels::one_block_a_token {

constexpr int kThreads = 512, kStreams = 4;

__global__ void __launch_bounds__(kThreads)
    kernel(__nv_bfloat162* __restrict__ out, const __nv_bfloat162* __restrict__ residual,
           const float* __restrict__ pre, int64_t pairs) {
  const int64_t token = blockIdx.x;
  const float* p = pre + token * kStreams;
  const float p0 = p[0], p1 = p[1], p2 = p[2], p3 = p[3];
  const __nv_bfloat162* row = residual + token * kStreams * pairs;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < pairs; i += kThreads) {
    const float2 r0 = __bfloat1622float2(row[i]), r1 = __bfloat1622float2(row[pairs + i]);
    const float2 r2 = __bfloat1622float2(row[2 * pairs + i]), r3 = __bfloat1622float2(row[3 * pairs + i]);
    const float x = __fadd_rn(__fadd_rn(__fmul_rn(p0, r0.x), __fmul_rn(p1, r1.x)),
                              __fadd_rn(__fmul_rn(p2, r2.x), __fmul_rn(p3, r3.x)));
    const float y = __fadd_rn(__fadd_rn(__fmul_rn(p0, r0.y), __fmul_rn(p1, r1.y)),
                              __fadd_rn(__fmul_rn(p2, r2.y), __fmul_rn(p3, r3.y)));
    out[token * pairs + i] = __floats2bfloat162_rn(x, y);
  }
}

inline void forward(TensorView out, TensorView residual, TensorView pre) {
  const DLDevice device = residual.device();
  const int64_t tokens = residual.size(0), hidden = residual.size(2);
  if (hidden % 2 != 0) TVM_FFI_THROW(ValueError) << "hidden_size: expected an even number, got " << hidden;
  Expect("residual", residual).on(device).dtype<__nv_bfloat16>().shape({tokens, kStreams, hidden});
  Expect("residual", residual).strides({kStreams * hidden, hidden, 1}).aligned(4);
  Expect("pre", pre).on(device).dtype<float>().shape({tokens, kStreams}).strides({kStreams, 1});
  Expect("out", out).on(device).dtype<__nv_bfloat16>().shape({tokens, hidden}).strides({hidden, 1}).aligned(4);
  if (tokens == 0) return;
  const DeviceGuard guard(device);
  launch(kernel, dim3(tokens), dim3(kThreads), 0, guard.stream(), static_cast<__nv_bfloat162*>(out.data_ptr()),
         static_cast<const __nv_bfloat162*>(residual.data_ptr()), static_cast<const float*>(pre.data_ptr()),
         hidden / 2);
}

}  // namespace jit_kernels::one_block_a_token
