// Host entry of vdn_delta_factors: T = diag(alpha) (I + a_scale A)^-1, J = b_scale B (I + a_scale A)^-1.
#pragma once

#include <jit_kernels/launch.cuh>
#include <jit_kernels/tensor.cuh>

#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "vdn_delta_factors/arguments.cuh"
#include "vdn_delta_factors/fp32.cuh"
#include "vdn_delta_factors/fp64_tensor.cuh"

namespace jit_kernels {

template <>
struct DTypeOf<int32_t> {
  static constexpr DLDataType value{kDLInt, 32, 1};
};

namespace vdn_delta_factors {

// One of the call's tensors, and the bytes between its first and last element.
struct Operand {
  const char* name;
  const TensorView& tensor;
  uintptr_t begin, end;
  int64_t step, span;  // from one entry of the first dimension to the next, and how much of it an entry spans

  template <int kCore>
  explicit Operand(const Flattened<kCore>& t) : name(t.name()), tensor(t.view()) {
    const int64_t size = tensor.dtype().bits / 8;
    int64_t low = 0, high = 0;
    span = size;
    for (int i = 0; i < t.ndim(); ++i) {
      const int64_t reach = (t.size(i) - 1) * t.stride(i) * size;
      low += std::min<int64_t>(reach, 0);
      high += std::max<int64_t>(reach, 0);
      if (i > 0) span += std::max<int64_t>(reach, 0);
    }
    step = t.stride(0) * size;
    begin = reinterpret_cast<uintptr_t>(t.data_ptr()) + low;
    end = reinterpret_cast<uintptr_t>(t.data_ptr()) + high + size;
  }

  void refuse_overlap(const Operand& other) const {
    if (begin < other.end && other.begin < end && !takes_turns(other)) refuse(other);
  }

 private:
  // As T and J do in one buffer of shape [N, 2, d, d].
  bool takes_turns(const Operand& other) const {
    if (step != other.step || step <= 0) return false;
    const int64_t distance = static_cast<int64_t>(other.begin - begin) % step;
    const int64_t after = distance < 0 ? distance + step : distance;
    return after >= span && step - after >= other.span;
  }

  [[noreturn, gnu::cold, gnu::noinline]] void refuse(const Operand& other) const {
    TVM_FFI_THROW(ValueError) << name << " overlaps " << other.name << " in memory: " << name << " is "
                              << describe(tensor) << " at " << tensor.data_ptr() << ", " << other.name << " is "
                              << describe(other.tensor) << " at " << other.tensor.data_ptr()
                              << "; give it memory of its own";
    __builtin_unreachable();
  }
};

inline bool aligned_16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

inline bool allows_vectors(const Flattened<2>& t) {
  return aligned_16(t.data_ptr()) && (t.size(0) <= 1 || t.stride(0) % 4 == 0) && t.stride(1) % 4 == 0;
}

enum class Precision { kFp64Tensor, kFp32 };

template <int kDim, Precision kPrecision>
struct VdnDeltaFactors {
  // T, J, A, B [..., kDim, kDim], alpha [..., kDim], info [...].
  static void run(TensorView T_given, TensorView J_given, TensorView A_given, TensorView B_given,
                  TensorView alpha_given, double a_scale, double b_scale, tvm::ffi::Optional<TensorView> info) {
    // 1. Validate.
    const Flattened<2> A("A", A_given), B("B", B_given, A), T("T", T_given, A), J("J", J_given, A);
    const Flattened<1> alpha("alpha", alpha_given, A);
    const DLDevice device = A_given.device();
    const int64_t count = A.size(0);
    constexpr auto kAny = Expect::kAny;
    for (const Flattened<2>* input : {&A, &B})
      input->expect().on(device).dtype<float>().shape({count, kDim, kDim}).strides({kAny, kAny, 1}).aligned(4);
    for (const Flattened<2>* output : {&T, &J})
      output->expect().on(device).dtype<float>().shape({count, kDim, kDim}).strides({kAny, kDim, 1}).aligned(4);
    alpha.expect().on(device).dtype<float>().shape({count, kDim}).aligned(4);
    if (count == 0) return;
    if (count > std::numeric_limits<int32_t>::max()) A.expect().fail("at most 2147483647 matrices");
    for (const Flattened<2>* output : {&T, &J})
      if (count > 1 && output->stride(0) < int64_t{kDim} * kDim)
        output->expect().fail("matrices that don't overlap, a batch stride of at least " + std::to_string(kDim * kDim));
    const Operand operands[] = {Operand(T), Operand(J), Operand(A), Operand(B), Operand(alpha)};
    for (int output : {0, 1})
      for (int other = output + 1; other < 5; ++other) operands[output].refuse_overlap(operands[other]);
    int32_t* info_data = nullptr;
    if (info.has_value()) {
      const TensorView given = info.value();
      const Flattened<0> flat("info", given, A);
      flat.expect().on(device).dtype<int32_t>().strides({1}).aligned(4);
      const Operand operand(flat);
      for (const Operand& other : operands) operand.refuse_overlap(other);
      info_data = static_cast<int32_t*>(flat.data_ptr());
    }

    Arguments args{};
    args.A = static_cast<const float*>(A.data_ptr());
    args.B = static_cast<const float*>(B.data_ptr());
    args.alpha = static_cast<const float*>(alpha.data_ptr());
    args.T = static_cast<float*>(T.data_ptr());
    args.J = static_cast<float*>(J.data_ptr());
    args.info = info_data;
    args.count = count;
    args.A_batch = A.stride(0);
    args.A_row = A.stride(1);
    args.B_batch = B.stride(0);
    args.B_row = B.stride(1);
    args.alpha_batch = alpha.stride(0);
    args.alpha_element = alpha.stride(1);
    args.T_batch = T.stride(0);
    args.J_batch = J.stride(0);
    args.a_scale = static_cast<float>(a_scale);
    args.b_scale = static_cast<float>(b_scale);
    args.vectors = allows_vectors(A) && allows_vectors(B) && allows_vectors(T) && allows_vectors(J) &&
                   aligned_16(alpha.data_ptr());

    // 2. Device guard and stream.
    const DeviceGuard guard(device);

    // 3. Launch.
    if constexpr (kPrecision == Precision::kFp64Tensor) {
      launch_fp64_tensor<kDim>(args, device.device_id, guard.stream());
    } else {
      launch_fp32<kDim>(args, device.device_id, guard.stream());
    }
  }
};

}  // namespace vdn_delta_factors
}  // namespace jit_kernels
