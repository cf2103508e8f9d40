// Checks of the tensors a host entry receives: what came, and what is accepted, in one message.
//
//   Expect("residual", residual).on(device).dtype<__nv_bfloat16>().shape({tokens, 4, hidden});
//
// Python validates first and with friendlier words, but for the calls of its quick way: those rest on these checks, and
// so does whoever calls the module itself. They run in every call: sizes are read past TensorView's own bounds checks,
// and words are made out of line.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <algorithm>
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

class Expect {
 public:
  static constexpr int64_t kAny = -1;

  Expect(const char* name, const TensorView& tensor) : name_(name), tensor_(tensor) {}

  // Memory on this device. Torch has tensors without any, such as the zeros that its derivatives pass about.
  Expect& on(DLDevice device) {
    const DLDevice d = tensor_.device();
    if (d.device_type != kDLCUDA) fail("a CUDA tensor");
    if (d.device_type != device.device_type || d.device_id != device.device_id)
      fail("a tensor on cuda:" + std::to_string(device.device_id));
    if (tensor_.data_ptr() == nullptr && tensor_.numel() != 0) fail("a tensor with memory, not the null pointer");
    if (tensor_.byte_offset() != 0) fail("a tensor that begins at its data pointer, with a byte offset of 0");
    return *this;
  }

  template <typename T>
  Expect& dtype() {
    if (!same(tensor_.dtype(), DTypeOf<T>::value)) fail(describe(DTypeOf<T>::value));
    return *this;
  }

  // kAny leaves a dimension or a stride free.
  Expect& shape(std::initializer_list<int64_t> sizes) {
    const int64_t* size = tensor_.shape().data();
    bool ok = tensor_.ndim() == static_cast<int>(sizes.size());
    for (int64_t expected : sizes) {
      ok = ok && (expected == kAny || *size == expected);
      ++size;
    }
    if (!ok) fail("shape " + list(sizes));
    return *this;
  }

  // The stride of a dimension of size 0 or 1 is never used, so it is not checked.
  Expect& strides(std::initializer_list<int64_t> strides) {
    const int64_t *size = tensor_.shape().data(), *stride = tensor_.strides().data();
    bool ok = tensor_.ndim() == static_cast<int>(strides.size());
    for (int64_t expected : strides) {
      ok = ok && (expected == kAny || *size <= 1 || *stride == expected);
      ++size;
      ++stride;
    }
    if (!ok) fail("strides " + list(strides));
    return *this;
  }

  Expect& aligned(unsigned bytes) {
    if (reinterpret_cast<uintptr_t>(tensor_.data_ptr()) % bytes != 0)
      fail("data aligned to " + std::to_string(bytes) + " bytes");
    return *this;
  }

  [[noreturn, gnu::cold, gnu::noinline]] void fail(const std::string& expected) const {
    TVM_FFI_THROW(ValueError) << name_ << ": expected " << expected << ", got " << describe(tensor_);
    __builtin_unreachable();
  }

  static std::string list(tvm::ffi::ShapeView values) {
    std::ostringstream out;
    out << "[";
    for (size_t i = 0; i < values.size(); ++i) {
      if (i > 0) out << ", ";
      if (values[i] == kAny) {
        out << "*";
      } else {
        out << values[i];
      }
    }
    out << "]";
    return out.str();
  }

 private:
  const char* name_;
  const TensorView& tensor_;
};

// A tensor whose leading dimensions, its batch, are taken as one, as they can be where they lie evenly in memory. It
// lives no longer than the tensor that was given.
template <int kCore>
class Flattened {
 public:
  Flattened(const char* name, const TensorView& t)
      : name_(name), batch_(t.shape().data(), std::max(t.ndim() - kCore, 0)), view_(flatten(t)) {}

  // One whose batch has the dimensions of another's, not only as many entries.
  template <int kOther>
  Flattened(const char* name, const TensorView& t, const Flattened<kOther>& other) : Flattened(name, t) {
    const tvm::ffi::ShapeView theirs = other.batch();
    if (!std::equal(batch_.begin(), batch_.end(), theirs.begin(), theirs.end()))
      Expect(name, t).fail("leading dimensions " + Expect::list(theirs));
  }
  Flattened(const Flattened&) = delete;
  Flattened& operator=(const Flattened&) = delete;

  Expect expect() const { return Expect(name_, view_); }
  const char* name() const { return name_; }
  const TensorView& view() const { return view_; }
  tvm::ffi::ShapeView batch() const { return batch_; }
  static constexpr int ndim() { return kCore + 1; }
  int64_t size(int dim) const { return sizes_[dim]; }
  int64_t stride(int dim) const { return strides_[dim]; }
  void* data_ptr() const { return view_.data_ptr(); }

 private:
  TensorView flatten(const TensorView& t) {
    const int batch = t.ndim() - kCore;
    if (batch < 0) Expect(name_, t).fail("at least " + std::to_string(kCore) + " dimensions");
    const int64_t *sizes = t.shape().data(), *strides = t.strides().data();
    for (int i = 0; i < kCore; ++i) {
      sizes_[1 + i] = sizes[batch + i];
      strides_[1 + i] = strides[batch + i];
    }
    int64_t count = 1, stride = 0;
    for (int i = batch - 1; i >= 0; --i) {
      if (sizes[i] == 1) continue;
      if (count == 1) {
        stride = strides[i];
      } else if (count != 0 && sizes[i] != 0 && strides[i] != stride * count) {
        Expect(name_, t).fail("leading dimensions that lie evenly in memory");
      }
      count *= sizes[i];
    }
    sizes_[0] = count;
    strides_[0] = stride;
    const DLTensor flat{t.data_ptr(), t.device(), ndim(), t.dtype(), sizes_, strides_, t.byte_offset()};
    return TensorView(&flat);
  }

  const char* name_;
  tvm::ffi::ShapeView batch_;
  int64_t sizes_[kCore + 1], strides_[kCore + 1];
  TensorView view_;
};

}  // namespace jit_kernels
