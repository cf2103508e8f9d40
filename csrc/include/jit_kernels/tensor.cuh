// Checks of the tensors a host entry receives: what came, and what is accepted, in one message.
//
//   Expect("residual", residual).on(device).dtype<__nv_bfloat16>().shape({tokens, 4, hidden});
//
// Python validates first and with friendlier words; these checks are for whoever calls the module itself.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

namespace jit_kernels {

using tvm::ffi::TensorView;

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DLDataType value{kDLFloat, 32, 1};
};
template <>
struct DTypeOf<double> {
  static constexpr DLDataType value{kDLFloat, 64, 1};
};
template <>
struct DTypeOf<__half> {
  static constexpr DLDataType value{kDLFloat, 16, 1};
};
template <>
struct DTypeOf<__nv_bfloat16> {
  static constexpr DLDataType value{kDLBfloat, 16, 1};
};

inline bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

inline std::string describe(DLDataType t) {
  const char* kind = t.code == kDLBfloat ? "bfloat" : t.code == kDLFloat ? "float" : t.code == kDLInt ? "int" : "type";
  return kind + std::to_string(t.bits);
}

inline std::string describe(const TensorView& t) {
  std::ostringstream out;
  out << describe(t.dtype()) << "[";
  for (int i = 0; i < t.ndim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << "] strides (";
  for (int i = 0; i < t.ndim(); ++i) out << (i ? ", " : "") << t.stride(i);
  out << ") on device " << t.device().device_type << ":" << t.device().device_id;
  return out.str();
}

// A tensor whose leading dimensions are taken as one, as they can be where they lie evenly in memory. Views of it live
// no longer than this.
template <int kCore>
class Flattened {
 public:
  Flattened(const char* name, const TensorView& t)
      : tensor_{t.data_ptr(), t.device(), kCore + 1, t.dtype(), shape_, strides_, 0} {
    const int batch = t.ndim() - kCore;
    if (batch < 0)
      TVM_FFI_THROW(ValueError) << name << ": expected at least " << kCore << " dimensions, got " << describe(t);
    for (int i = 0; i < kCore; ++i) {
      shape_[1 + i] = t.size(batch + i);
      strides_[1 + i] = t.stride(batch + i);
    }
    int64_t& count = shape_[0] = 1;
    int64_t& stride = strides_[0] = 0;
    for (int i = batch - 1; i >= 0; --i) {
      if (t.size(i) == 1) continue;
      if (count == 1) {
        stride = t.stride(i);
      } else if (count != 0 && t.size(i) != 0 && t.stride(i) != stride * count) {
        TVM_FFI_THROW(ValueError) << name << ": expected leading dimensions that lie evenly in memory, got "
                                  << describe(t);
      }
      count *= t.size(i);
    }
  }
  Flattened(const Flattened&) = delete;
  Flattened& operator=(const Flattened&) = delete;

  TensorView view() const { return TensorView(&tensor_); }

 private:
  int64_t shape_[kCore + 1], strides_[kCore + 1];
  DLTensor tensor_;
};

class Expect {
 public:
  static constexpr int64_t kAny = -1;

  Expect(const char* name, const TensorView& tensor) : name_(name), tensor_(tensor) {}

  Expect& on(DLDevice device) {
    const DLDevice d = tensor_.device();
    if (d.device_type != kDLCUDA) fail("a CUDA tensor");
    if (d.device_type != device.device_type || d.device_id != device.device_id)
      fail("a tensor on cuda:" + std::to_string(device.device_id));
    return *this;
  }

  template <typename T>
  Expect& dtype() {
    if (!same(tensor_.dtype(), DTypeOf<T>::value)) fail(describe(DTypeOf<T>::value));
    return *this;
  }

  // kAny leaves a dimension or a stride free.
  Expect& shape(std::initializer_list<int64_t> sizes) {
    bool ok = tensor_.ndim() == static_cast<int>(sizes.size());
    int i = 0;
    for (int64_t size : sizes) {
      ok = ok && (size == kAny || tensor_.size(i) == size);
      ++i;
    }
    if (!ok) fail("shape " + list(sizes));
    return *this;
  }

  // The stride of a dimension of size 0 or 1 is never used, so it is not checked.
  Expect& strides(std::initializer_list<int64_t> strides) {
    bool ok = tensor_.ndim() == static_cast<int>(strides.size());
    int i = 0;
    for (int64_t stride : strides) {
      ok = ok && (stride == kAny || tensor_.size(i) <= 1 || tensor_.stride(i) == stride);
      ++i;
    }
    if (!ok) fail("strides " + list(strides));
    return *this;
  }

  Expect& aligned(unsigned bytes) {
    if (reinterpret_cast<uintptr_t>(tensor_.data_ptr()) % bytes != 0)
      fail("data aligned to " + std::to_string(bytes) + " bytes");
    return *this;
  }

 private:
  static std::string list(std::initializer_list<int64_t> values) {
    std::ostringstream out;
    out << "[";
    bool first = true;
    for (int64_t v : values) {
      if (!first) out << ", ";
      first = false;
      if (v == kAny) {
        out << "*";
      } else {
        out << v;
      }
    }
    out << "]";
    return out.str();
  }

  [[noreturn]] void fail(const std::string& expected) const {
    TVM_FFI_THROW(ValueError) << name_ << ": expected " << expected << ", got " << describe(tensor_);
    __builtin_unreachable();
  }

  const char* name_;
  const TensorView& tensor_;
};

}  // namespace jit_kernels
