// Single instructions that the fp64 tensor-core kernel is made of.
#pragma once

#include <cuda_runtime.h>

namespace jit_kernels::vdn_delta_factors::fp64 {

// c (16 x 8) += a (16 x 8) b (8 x 8), in fp64. With g = lane / 4 and t = lane % 4:
//   c[2r + e] = C[g + 8r][2t + e],  a[2s + r] = A[g + 8r][slot s],  b[s] = B[slot s][g]
// where slot s of lane t is k = 4s + t. k is summed over, so any two distinct columns a lane will do, if A and B agree.
// (The form with k = 16 has the same rate, but ptxas copies its sixteen registers of A before every use.)
__device__ __forceinline__ void multiply_add(double (&c)[4], const double (&a)[4], double b0, double b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
}

// Within one unit in the last place, and 1 for 1.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A sign flip that stays out of the fp64 pipe, which the matrix products keep busy.
__device__ __forceinline__ double negated(double x) {
  return __hiloint2double(__double2hiint(x) ^ static_cast<int>(0x80000000u), __double2loint(x));
}

// All `threads` of the block, each warp from the branch it is in: bar.sync and __syncthreads want one and the same
// instruction of all of them.
__device__ __forceinline__ void barrier_meet(int threads) {
  asm volatile("barrier.sync 0, %0;" ::"r"(threads) : "memory");
}

// One warp waits for what the 32 threads of another have written. A barrier in shared memory, because racecheck loses
// count of bar.sync where only a part of the block meets.
class Handover {
 public:
  __device__ explicit Handover(void* shared)
      : address_(static_cast<unsigned>(__cvta_generic_to_shared(shared))) {}
  // By one thread, before all others go on.
  __device__ void open() const { asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(address_) : "memory"); }
  __device__ void signal() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_) : "memory");
  }
  // For the n-th signal, n = 0, 1, ..., when all before it have been waited for.
  __device__ void wait(int n) const {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(address_), "r"(n & 1)
        : "memory");
  }

 private:
  unsigned address_;
};

// The value, but unknown to the compiler: what is computed from it inside a loop stays there, out of the registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Global to shared memory, complete for this thread after copies_wait.
template <int kBytes>
__device__ __forceinline__ void copy_async(float* shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(shared))),
               "l"(global), "n"(kBytes)
               : "memory");
}
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace jit_kernels::vdn_delta_factors::fp64
