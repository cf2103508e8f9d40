// The host side of the cuSOLVERDx peer: loads the cubin that was linked for it, and launches its kernel.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/string.h>

#include <cstdint>

#include <jit_kernels/launch.cuh>
#include <jit_kernels/tensor.cuh>

namespace jit_kernels::cusolverdx {

// A kernel that runs with so many bytes of shared memory on that device; it is never unloaded.
inline int64_t load(tvm::ffi::Bytes cubin, int64_t shared_bytes, int64_t device) {
  const DeviceGuard guard(DLDevice{kDLCUDA, static_cast<int32_t>(device)});
  cudaLibrary_t library;
  cudaKernel_t kernel;
  check(cudaLibraryLoadData(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cudaLibraryLoadData");
  check(cudaLibraryGetKernel(&kernel, library, "delta_factors"), "cudaLibraryGetKernel");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
  return reinterpret_cast<intptr_t>(kernel);
}

inline void forward(int64_t kernel, int64_t dim, int64_t threads, int64_t shared_bytes, TensorView T, TensorView J,
                    TensorView A, TensorView B, TensorView alpha) {
  const DLDevice device = A.device();
  const int64_t count = A.size(0);
  const auto matrices = [&](const char* name, const TensorView& t) {
    Expect(name, t).on(device).dtype<float>().shape({count, dim, dim}).strides({dim * dim, dim, 1});
  };
  matrices("A", A);
  matrices("B", B);
  matrices("T", T);
  matrices("J", J);
  Expect("alpha", alpha).on(device).dtype<float>().shape({count, dim}).strides({dim, 1});
  if (count == 0) return;
  const DeviceGuard guard(device);
  // The runtime takes a cudaKernel_t where it takes a kernel's address.
  using Kernel = void (*)(float*, float*, const float*, const float*, const float*);
  launch(reinterpret_cast<Kernel>(kernel), dim3(count), dim3(threads), shared_bytes, guard.stream(),
         static_cast<float*>(T.data_ptr()), static_cast<float*>(J.data_ptr()), static_cast<const float*>(A.data_ptr()),
         static_cast<const float*>(B.data_ptr()), static_cast<const float*>(alpha.data_ptr()));
}

}  // namespace jit_kernels::cusolverdx
