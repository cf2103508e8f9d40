// Kernels that do one thing as fast as the chip can: what the others are held against.
//
// multiply_add:        each thread 16 chains of fp32 fused multiply-adds in registers; operands from memory, so nothing folds.
// multiply_add_tensor: each warp 8 independent 16 x 8 fp64 tiles, one m16n8k16 after another into each.
// read:                16 bytes a thread and step, four steps in flight; a sum keeps the loads alive.
// empty:               what a launch costs.
#pragma once

#include <jit_kernels/launch.cuh>
#include <jit_kernels/tensor.cuh>

namespace jit_kernels::ceilings {

constexpr int kThreads = 256;
constexpr int kChains = 16, kTiles = 8;

inline __global__ void empty_kernel() {}

__global__ void __launch_bounds__(kThreads) multiply_add_kernel(float* out, const float* in, int64_t rounds) {
  const float x = in[0], y = in[1];
  float sums[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) sums[i] = in[2 + i] + static_cast<float>(threadIdx.x);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 8 * kChains; ++i) sums[i % kChains] = fmaf(sums[i % kChains], x, y);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum += sums[i];
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) multiply_add_tensor_kernel(float* out, const float* in, int64_t rounds) {
  double a[8], b[4], tiles[kTiles][4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] = in[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = in[8 + i];
  for (int64_t round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      double(&c)[4] = tiles[i];
#if __CUDA_ARCH__ >= 900
      asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, "
          "{%12,%13,%14,%15}, {%0,%1,%2,%3};"
          : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
          : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
            "d"(b[1]), "d"(b[2]), "d"(b[3]));
#endif
    }
  }
  double sum = 0;
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) sum += tiles[i / 4][i % 4];
  out[blockIdx.x * kThreads + threadIdx.x] = static_cast<float>(sum);
}

__global__ void __launch_bounds__(kThreads) read_kernel(float* out, const float4* in, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  float sum = 0;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const float4 value = in[i];
    sum += (value.x + value.y) + (value.z + value.w);
  }
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// out has a float for each thread: [blocks, 256]. `in` holds at least 18 random floats.
inline int64_t blocks_of(const TensorView& out) {
  Expect("out", out).on(out.device()).dtype<float>().shape({Expect::kAny, kThreads}).strides({kThreads, 1});
  return out.size(0);
}

inline const float* operands(const TensorView& in, DLDevice device) {
  Expect("in", in).on(device).dtype<float>().shape({Expect::kAny}).strides({1}).aligned(16);
  if (in.size(0) < 2 + kChains) TVM_FFI_THROW(ValueError) << "in: expected at least 18 floats, got " << in.size(0);
  return static_cast<const float*>(in.data_ptr());
}

inline void empty(TensorView out) {
  const DeviceGuard guard(out.device());
  launch(empty_kernel, dim3(1), dim3(32), 0, guard.stream());
}

inline void multiply_add(TensorView out, TensorView in, int64_t rounds) {
  const int64_t blocks = blocks_of(out);
  const float* operand = operands(in, out.device());
  const DeviceGuard guard(out.device());
  launch(multiply_add_kernel, dim3(blocks), dim3(kThreads), 0, guard.stream(), static_cast<float*>(out.data_ptr()),
         operand, rounds);
}

inline void multiply_add_tensor(TensorView out, TensorView in, int64_t rounds) {
  const int64_t blocks = blocks_of(out);
  const float* operand = operands(in, out.device());
  const DeviceGuard guard(out.device());
  launch(multiply_add_tensor_kernel, dim3(blocks), dim3(kThreads), 0, guard.stream(),
         static_cast<float*>(out.data_ptr()), operand, rounds);
}

inline void read(TensorView out, TensorView in) {
  const int64_t blocks = blocks_of(out);
  const float* data = operands(in, out.device());
  const DeviceGuard guard(out.device());
  launch(read_kernel, dim3(blocks), dim3(kThreads), 0, guard.stream(), static_cast<float*>(out.data_ptr()),
         reinterpret_cast<const float4*>(data), in.size(0) / 4);
}

}  // namespace jit_kernels::ceilings
