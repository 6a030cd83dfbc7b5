// SPDX-License-Identifier: Apache-2.0
// Views of memory that the caller owns.
#pragma once

#include <cstdint>

#include "fovea/api.h"
#include "fovea/dtype.h"

namespace FOVEA_API fovea {

// Rows [token, head, dim]. The values of a head are contiguous. Strides are in elements and may
// have any value for which rows do not overlap. A null data pointer means "absent".
struct HeadRows {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

// Returns HeadRows over a dense [tokens, heads, dim] array.
inline HeadRows dense_rows(void* data, DType dtype, int64_t heads, int64_t dim) {
  return {data, dtype, heads * dim, dim};
}

// Returns the byte address of element 0 of (token, head). All address arithmetic is 64-bit.
inline char* row_address(const HeadRows& rows, int64_t token, int64_t head) {
  return static_cast<char*>(rows.data) + (token * rows.token_stride + head * rows.head_stride) *
                                             static_cast<int64_t>(dtype_bytes(rows.dtype));
}

// Scales of an fp8 q: its values are q * data[token * token_stride + head * head_stride].
struct QueryScale {
  const float* data = nullptr;                // null: 1
  int64_t token_stride = 0, head_stride = 0;  // 0: tokens, or heads, share a scale
};

}  // namespace fovea
