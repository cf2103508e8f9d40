// The kernels on small inputs, through their host entries and without Python, for compute-sanitizer: under it a process
// that imports torch takes minutes. Every buffer is an allocation of its own, exact in size, so that a step outside is
// seen. Built once for each variant: with HEAD_DIM and PRECISION it holds vdn_delta_factors, without the collapse.
#include <cuda_runtime.h>
#include <dlpack/dlpack.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#ifdef HEAD_DIM
#include <vdn_delta_factors.cuh>
#else
#include <mhc_pre_h_aggregate.cuh>
#endif

namespace {

using jit_kernels::DTypeOf;
using tvm::ffi::TensorView;

float random_unit() {  // in (-0.5, 0.5), the same on every run
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 16777216.f - 0.5f;
}

// A contiguous tensor on device 0, `offset` elements into its allocation, which ends where it ends.
template <typename T>
class Buffer {
 public:
  Buffer(std::vector<int64_t> shape, int offset, const std::vector<T>* values = nullptr)
      : shape_(std::move(shape)), strides_(shape_.size()), offset_(offset) {
    for (size_t i = shape_.size(); i-- > 0; size_ *= shape_[i]) strides_[i] = size_;
    jit_kernels::check(cudaMalloc(&data_, (size_ + offset) * sizeof(T)), "cudaMalloc");
    // Poison where nothing else comes: NaN in every type. (initcheck knows nothing of what bulk copies write.)
    jit_kernels::check(cudaMemset(data_, 0xff, (size_ + offset) * sizeof(T)), "cudaMemset");
    if (values) copy(data_ + offset, values->data(), cudaMemcpyHostToDevice);
    tensor_ = {data_ + offset, {kDLCUDA, 0}, static_cast<int>(shape_.size()), DTypeOf<T>::value, shape_.data(),
               strides_.data(), 0};
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  TensorView view() { return TensorView(&tensor_); }

  std::vector<T> read() const {
    std::vector<T> values(size_);
    copy(values.data(), data_ + offset_, cudaMemcpyDeviceToHost);
    return values;
  }

 private:
  void copy(T* to, const T* from, cudaMemcpyKind kind) const {
    jit_kernels::check(cudaMemcpy(to, from, size_ * sizeof(T), kind), "cudaMemcpy");
  }

  std::vector<int64_t> shape_, strides_;
  int64_t size_ = 1;
  int offset_;
  T* data_ = nullptr;
  DLTensor tensor_{};
};

#ifdef HEAD_DIM

using namespace jit_kernels::vdn_delta_factors;

// T (I + A) = I and J (I + A) = B in the first and the last matrix; the second, where there are three, is indefinite.
bool run(int64_t count, int offset) {
  constexpr int64_t d = HEAD_DIM;
  std::vector<float> A(count * d * d), B(A.size()), alpha(count * d, 1.f);
  for (int64_t m = 0; m < count; ++m)
    for (int64_t i = 0; i < d; ++i)
      for (int64_t j = 0; j < d; ++j) {
        A[(m * d + i) * d + j] = i == j ? 10.f : j < i ? random_unit() : NAN;  // what stands above is not read
        B[(m * d + i) * d + j] = random_unit();
      }
  if (count > 2) A[d * d + 5 * d + 5] = -9.f;

  Buffer<float> dA({count, d, d}, offset, &A), dB({count, d, d}, offset, &B), dalpha({count, d}, offset, &alpha);
  Buffer<float> dT({count, d, d}, offset), dJ({count, d, d}, offset);
  Buffer<int32_t> dinfo({count}, 0);
  VdnDeltaFactors<d, Precision::PRECISION>::run(dT.view(), dJ.view(), dA.view(), dB.view(), dalpha.view(), 1.0, 1.0,
                                                tvm::ffi::Optional<TensorView>(dinfo.view()));
  const auto T = dT.read(), J = dJ.read();
  const auto info = dinfo.read();

  double worst = 0;
  for (int64_t m : {int64_t{0}, count - 1})
    for (int64_t i = 0; i < d; ++i)
      for (int64_t j = 0; j < d; ++j) {
        double t = i == j ? -1 : 0, b = -B[(m * d + i) * d + j];
        for (int64_t k = 0; k < d; ++k) {
          const double a = k == j ? 11.0 : A[(m * d + std::max(j, k)) * d + std::min(j, k)];
          t += T[(m * d + i) * d + k] * a;
          b += J[(m * d + i) * d + k] * a;
        }
        worst = std::fmax(worst, std::isfinite(t + b) ? std::fmax(std::fabs(t), std::fabs(b)) : INFINITY);
      }
  bool ok = worst < 1e-4;  // 128 products of about 1 in float32, over a matrix of condition below 10
  for (int64_t m = 0; m < count; ++m) ok = ok && info[m] == (count > 2 && m == 1 ? 6 : 0);
  for (size_t i = 0; i < T.size(); ++i) {  // no poison is left, and there is a NaN where it belongs
    const bool nan = count > 2 && i / (d * d) == 1;
    ok = ok && std::isnan(T[i]) == nan && std::isnan(J[i]) == nan;
  }
  std::printf("d=%ld N=%ld offset=%d: residual %.1e, %s\n", d, count, offset, worst, ok ? "ok" : "WRONG");
  return ok;
}

bool run_all() {
  std::vector<int64_t> counts{1, 7, 133};
  if (HEAD_DIM == 64) counts.push_back(265);  // from which on no two blocks share a matrix
  bool ok = true;
  for (int64_t count : counts)
    for (int offset : {0, 1}) ok = run(count, offset) && ok;
  return ok;
}

#else

float widened(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// With small integers every product and sum is exact, so the one right answer can be written down.
bool run(int64_t tokens, int64_t hidden, int offset) {
  auto small = [] { return std::floor(random_unit() * 8.f); };
  auto narrowed = [](float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    __nv_bfloat16_raw raw;
    raw.x = static_cast<uint16_t>(word >> 16);
    return __nv_bfloat16(raw);
  };
  auto bits = [](const __nv_bfloat16& value) { return static_cast<__nv_bfloat16_raw>(value).x; };
  std::vector<__nv_bfloat16> residual(tokens * 4 * hidden), grad(tokens * hidden);
  std::vector<float> pre(tokens * 4);
  for (auto& x : residual) x = narrowed(small());
  for (auto& x : grad) x = narrowed(small());
  for (auto& x : pre) x = small();

  Buffer<__nv_bfloat16> dresidual({tokens, 4, hidden}, offset, &residual), dgrad({tokens, hidden}, offset, &grad);
  Buffer<__nv_bfloat16> dout({tokens, hidden}, offset), dgrad_residual({tokens, 4, hidden}, offset);
  Buffer<float> dpre({tokens, 4}, offset, &pre), dgrad_pre({tokens, 4}, offset);
  jit_kernels::mhc_pre_h_aggregate::forward(dout.view(), dresidual.view(), dpre.view());
  jit_kernels::mhc_pre_h_aggregate::backward(dgrad_residual.view(), dgrad_pre.view(), dgrad.view(), dresidual.view(),
                                             dpre.view());
  const auto out = dout.read(), grad_residual = dgrad_residual.read();
  const auto grad_pre = dgrad_pre.read();

  int64_t wrong = 0;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < 4; ++i) {
      double sum = 0;
      for (int64_t h = 0; h < hidden; ++h) {
        const float g = widened(bits(grad[t * hidden + h])), p = pre[t * 4 + i];
        wrong += widened(bits(grad_residual[(t * 4 + i) * hidden + h])) != g * p;
        sum += g * widened(bits(residual[(t * 4 + i) * hidden + h]));
        if (i > 0) continue;
        float total = 0;
        for (int64_t s = 0; s < 4; ++s) total += pre[t * 4 + s] * widened(bits(residual[(t * 4 + s) * hidden + h]));
        wrong += widened(bits(out[t * hidden + h])) != total;
      }
      wrong += grad_pre[t * 4 + i] != static_cast<float>(sum);
    }
  std::printf("T=%ld H=%ld offset=%d: %ld wrong\n", tokens, hidden, offset, wrong);
  return wrong == 0;
}

bool run_all() {
  bool ok = true;
  for (int64_t hidden : {1, 65, 513, 4096, 7168})
    for (int64_t tokens : {1, 7, 133})
      for (int offset : {0, 1}) ok = run(tokens, hidden, offset) && ok;
  return ok;
}

#endif

}  // namespace

extern "C" __attribute__((visibility("default"))) int sanitize() {
  const bool ok = run_all();
  return ok && cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
