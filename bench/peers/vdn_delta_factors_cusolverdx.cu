// The delta factors by cuSOLVERDx and cuBLASDx. NVRTC compiles this, and nvJitLink puts in the four functions that
// libmathdx generates. kDim, kLead and kThreads are defined on the command line.

// POTRF, of the lower triangle.
extern "C" __device__ void factor(float* matrix, int* info);
// TRSM: columns = root^-1 columns.
extern "C" __device__ void solve(const float* root, float* columns);
// The products c = alpha a b + beta c; `square` reads a as the transpose of what lies there.
extern "C" __device__ void square(float* alpha, float* a, float* b, float* beta, float* c);
extern "C" __device__ void multiply(float* alpha, float* a, float* b, float* beta, float* c);

// One block a matrix: I + A = L L^T, W = L^-1, the inverse is W^T W, and J is B times that. I + A is symmetric, so its
// rows pass for the columns that POTRF and TRSM want. TRSM gets the identity, which it overwrites with W.
extern "C" __global__ void __launch_bounds__(kThreads)
    delta_factors(float* __restrict__ T, float* __restrict__ J, const float* __restrict__ A,
                  const float* __restrict__ B, const float* __restrict__ alpha) {
  extern __shared__ __align__(16) float shared[];
  __shared__ int info;
  float* first = shared;                  // I + A, L, the inverse
  float* second = first + kDim * kLead;   // I, W, J
  float* values = second + kDim * kLead;  // B
  const long long offset = static_cast<long long>(blockIdx.x) * kDim * kDim;
  T += offset, J += offset, A += offset, B += offset, alpha += blockIdx.x * kDim;

#pragma unroll 8
  for (int i = threadIdx.x; i < kDim * kDim; i += kThreads) {
    const int row = i / kDim, column = i % kDim, place = row * kLead + column;
    const float identity = column == row ? 1.0f : 0.0f;
    first[place] = A[i] + identity;
    second[place] = identity;
    values[place] = B[i];
  }
  __syncthreads();
  factor(first, &info);
  __syncthreads();
  solve(first, second);
  __syncthreads();
  float one = 1.0f, zero = 0.0f;
  square(&one, second, second, &zero, first);
  __syncthreads();
#pragma unroll 8
  for (int i = threadIdx.x; i < kDim * kDim; i += kThreads) {
    const int row = i / kDim, column = i % kDim;
    T[i] = alpha[row] * first[row * kLead + column];
  }
  multiply(&one, values, first, &zero, second);
  __syncthreads();
#pragma unroll 8
  for (int i = threadIdx.x; i < kDim * kDim; i += kThreads) {
    J[i] = second[i / kDim * kLead + i % kDim];
  }
}
