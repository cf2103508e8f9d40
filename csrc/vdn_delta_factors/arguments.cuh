// What every variant of vdn_delta_factors is given.
#pragma once

#include <cstdint>

namespace jit_kernels::vdn_delta_factors {

// count matrices of kDim x kDim floats. Strides are in elements; the last dimension of every matrix has stride 1.
struct Arguments {
  const float* A;      // read below and on the diagonal only
  const float* B;
  const float* alpha;  // count x kDim
  float* T;            // diag(alpha) (I + a_scale A)^-1
  float* J;            // b_scale B (I + a_scale A)^-1
  int32_t* info;       // nullptr, or count values: 0, or the order of the first leading minor that is not positive
  int64_t count;
  int64_t A_batch, A_row;
  int64_t B_batch, B_row;
  int64_t alpha_batch, alpha_element;
  int64_t T_batch, J_batch;  // rows of the outputs are kDim apart
  float a_scale, b_scale;
  bool vectors;  // all five pointers and all strides of A, B, T, J allow 16-byte access
};

}  // namespace jit_kernels::vdn_delta_factors
