// Host entry of vdn_delta_factors: T = diag(alpha) (I + a_scale A)^-1, J = b_scale B (I + a_scale A)^-1.
#pragma once

#include <jit_kernels/launch.cuh>
#include <jit_kernels/tensor.cuh>

#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "vdn_delta_factors/arguments.cuh"
#include "vdn_delta_factors/fp32.cuh"
#include "vdn_delta_factors/fp64_tensor.cuh"

namespace jit_kernels {

template <>
struct DTypeOf<int32_t> {
  static constexpr DLDataType value{kDLInt, 32, 1};
};

namespace vdn_delta_factors {

// The bytes between a tensor's first and last element, and how much of them one entry of its first dimension spans.
struct Extent {
  uintptr_t begin, end;
  int64_t step, span;

  explicit Extent(const TensorView& t) {
    const int64_t size = t.dtype().bits / 8;
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
};

inline bool overlap(const Extent& a, const Extent& b) {
  if (a.begin >= b.end || b.begin >= a.end) return false;
  if (a.step != b.step || a.step <= 0) return true;
  // Two tensors that take turns in one buffer, as T and J in one of shape [N, 2, d, d].
  const int64_t distance = static_cast<int64_t>(b.begin - a.begin) % a.step;
  const int64_t after = distance < 0 ? distance + a.step : distance;
  return after < a.span || a.step - after < b.span;
}

struct Operand {
  const char* name;
  TensorView tensor;
  Extent extent;

  Operand(const char* name, const TensorView& tensor) : name(name), tensor(tensor), extent(tensor) {}

  void refuse_overlap(const Operand& other) const {
    if (!overlap(extent, other.extent)) return;
    TVM_FFI_THROW(ValueError) << name << " overlaps " << other.name << " in memory: " << name << " is "
                              << describe(tensor) << " at " << tensor.data_ptr() << ", " << other.name << " is "
                              << describe(other.tensor) << " at " << other.tensor.data_ptr()
                              << "; give it memory of its own";
  }
};

inline bool allows_vectors(const TensorView& t) {
  bool ok = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int i = 0; i + 1 < t.ndim(); ++i) ok = ok && (t.size(i) <= 1 || t.stride(i) % 4 == 0);
  return ok;
}

enum class Precision { kFp64Tensor, kFp32 };

template <int kDim, Precision kPrecision>
struct VdnDeltaFactors {
  // T, J, A, B [..., kDim, kDim], alpha [..., kDim], info [count].
  static void run(TensorView T_given, TensorView J_given, TensorView A_given, TensorView B_given,
                  TensorView alpha_given, double a_scale, double b_scale, tvm::ffi::Optional<TensorView> info) {
    // 1. Validate.
    const Flattened<2> T_flat("T", T_given), J_flat("J", J_given), A_flat("A", A_given), B_flat("B", B_given);
    const Flattened<1> alpha_flat("alpha", alpha_given);
    const TensorView T = T_flat.view(), J = J_flat.view(), A = A_flat.view(), B = B_flat.view();
    const TensorView alpha = alpha_flat.view();
    const DLDevice device = A.device();
    Expect("A", A).on(device).dtype<float>().shape({Expect::kAny, kDim, kDim});
    const int64_t count = A.size(0);
    Expect("A", A).strides({Expect::kAny, Expect::kAny, 1}).aligned(4);
    Expect("B", B).on(device).dtype<float>().shape({count, kDim, kDim});
    Expect("B", B).strides({Expect::kAny, Expect::kAny, 1}).aligned(4);
    Expect("alpha", alpha).on(device).dtype<float>().shape({count, kDim}).aligned(4);
    Expect("T", T).on(device).dtype<float>().shape({count, kDim, kDim}).strides({Expect::kAny, kDim, 1}).aligned(4);
    Expect("J", J).on(device).dtype<float>().shape({count, kDim, kDim}).strides({Expect::kAny, kDim, 1}).aligned(4);
    if (info.has_value())
      Expect("info", info.value()).on(device).dtype<int32_t>().shape({count}).strides({1}).aligned(4);
    if (count == 0) return;
    if (count > std::numeric_limits<int32_t>::max())
      TVM_FFI_THROW(ValueError) << "A: expected at most 2147483647 matrices, got " << count;
    refuse_self_overlap("T", T);
    refuse_self_overlap("J", J);
    const Operand inputs[] = {{"A", A}, {"B", B}, {"alpha", alpha}}, outputs[] = {{"T", T}, {"J", J}};
    outputs[0].refuse_overlap(outputs[1]);
    for (const Operand& output : outputs)
      for (const Operand& input : inputs) output.refuse_overlap(input);
    if (info.has_value()) {
      const Operand operand("info", info.value());
      for (const Operand& input : inputs) operand.refuse_overlap(input);
      for (const Operand& output : outputs) operand.refuse_overlap(output);
    }

    Arguments args{};
    args.A = static_cast<const float*>(A.data_ptr());
    args.B = static_cast<const float*>(B.data_ptr());
    args.alpha = static_cast<const float*>(alpha.data_ptr());
    args.T = static_cast<float*>(T.data_ptr());
    args.J = static_cast<float*>(J.data_ptr());
    args.info = info.has_value() ? static_cast<int32_t*>(info.value().data_ptr()) : nullptr;
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
                   reinterpret_cast<uintptr_t>(alpha.data_ptr()) % 16 == 0;

    // 2. Device guard and stream.
    const DeviceGuard guard(device);

    // 3. Launch.
    if constexpr (kPrecision == Precision::kFp64Tensor) {
      launch_fp64_tensor<kDim>(args, device.device_id, guard.stream());
    } else {
      launch_fp32<kDim>(args, device.device_id, guard.stream());
    }
  }

 private:
  static void refuse_self_overlap(const char* name, const TensorView& t) {
    if (t.size(0) > 1 && t.stride(0) < int64_t{kDim} * kDim)
      TVM_FFI_THROW(ValueError) << name << ": expected matrices that don't overlap (batch stride of at least "
                                << kDim * kDim << "), got " << describe(t);
  }
};

}  // namespace vdn_delta_factors
}  // namespace jit_kernels
