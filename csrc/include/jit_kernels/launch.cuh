// The device guard, the caller's stream, and a launch that reports its errors.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
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

// What is asked of the driver once a device, and remembered: each question costs up to a microsecond of every call.
constexpr int kRemembered = 64;  // devices; of others it is asked again

inline int multiprocessors(int device) {
  static std::atomic<int> known[kRemembered];
  int count = device < kRemembered ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute(MultiProcessorCount)");
    if (device < kRemembered) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

// Raises a kernel's dynamic shared memory limit on the current device. Needed above 48 KB, before the first launch.
template <auto kKernel, size_t kBytes>
void allow_shared_memory(int device) {
  static std::atomic<bool> allowed[kRemembered];
  if (device < kRemembered && allowed[device].load(std::memory_order_relaxed)) return;
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
        "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
  if (device < kRemembered) allowed[device].store(true, std::memory_order_relaxed);
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
