// Between grids: programmatic dependent launch. Between a cluster's blocks: sums sent to the first one. sm_90 and up.
#pragma once

#include <cuda_runtime.h>
#include <jit_kernels/launch.cuh>

#include <cstddef>
#include <cstdint>

namespace jit_kernels {

// Programmatic dependent launch: the blocks are set up while the grid before this one drains, and wait here until its
// writes are visible; only then may the grid behind do the same. No load from global memory comes before this.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// quotient(n) = n / divisor for n < 2^31, without the division. A block's cluster is blockIdx.x / blocks: %clusterid
// would be worked out in float, which is exact only up to 2^24 blocks.
struct Divider {
  uint32_t divisor, multiplier, shift;
  explicit Divider(uint32_t d) : divisor(d), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d) / d + 1);
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// The cluster's blocks send their sums to the first block's shared memory; a transaction barrier there counts the
// bytes. A cluster barrier's release would also wait for every store to global memory.
struct Arrivals {
  uint64_t barrier;

  // Every thread of the cluster. Nobody may send before the first block runs and its barrier stands.
  __device__ __forceinline__ void open(bool first_block, int bytes) {
    const bool owner = first_block && threadIdx.x == 0;
    if (owner) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait;" ::: "memory");
    if (owner)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                   : "memory");
  }

  // `shared` and this are the sender's own addresses; the first block has the same layout.
  __device__ __forceinline__ void send(float* shared, float value) {
    asm volatile(
        "{\n\t.reg .u32 data, barrier;\n\t"
        "mapa.shared::cluster.u32 data, %0, 0;\n\t"
        "mapa.shared::cluster.u32 barrier, %1, 0;\n\t"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [data], %2, [barrier];\n\t}" ::"r"(
            shared_address(shared)),
        "r"(shared_address(&barrier)), "r"(__float_as_uint(value))
        : "memory");
  }

  __device__ __forceinline__ void wait() {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t"
        "@!done bra again;\n\t}" ::"r"(shared_address(&barrier))
        : "memory");
  }
};

// A launch that may start before the grid ahead of it in the stream has ended, in clusters of `cluster` blocks. It
// costs the host less, too.
template <typename... Params, typename... Args>
void launch_overlapped(void (*kernel)(Params...), int64_t blocks, int64_t threads, size_t shared_bytes, int cluster,
                       cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "kernel launch");
}

}  // namespace jit_kernels
