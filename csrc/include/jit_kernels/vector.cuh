// 16-byte access to global memory. Both ends must be 16-byte aligned.
#pragma once

#include <cstdint>

namespace jit_kernels {

// kWidth elements that travel as one access (kWidth * sizeof(T) is 16, or kWidth is 1).
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T data[kWidth];
  __device__ T& operator[](int i) { return data[i]; }
  __device__ const T& operator[](int i) const { return data[i]; }
};

}  // namespace jit_kernels
