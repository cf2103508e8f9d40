// The device guard, the caller's stream, and a launch that reports its errors.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstddef>

namespace jit_kernels {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorName(status) << ": " << cudaGetErrorString(status);
}

// Makes the tensors' device current while it lives, whatever the caller's current device is.
class DeviceGuard {
 public:
  explicit DeviceGuard(DLDevice device) : device_(device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device.device_id) check(cudaSetDevice(device.device_id), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (previous_ != device_.device_id) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  cudaStream_t stream() const {
    return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device_.device_type, device_.device_id));
  }

 private:
  DLDevice device_;
  int previous_ = 0;
};

// Raises a kernel's dynamic shared memory limit. Needed above 48 KB, on each device, before its first launch.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
}

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "kernel launch");
}

}  // namespace jit_kernels
