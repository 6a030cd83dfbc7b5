// SPDX-License-Identifier: Apache-2.0
// Views of memory somebody else owns.
#pragma once

#include <cstdint>

#include "fovea/dtype.h"

namespace fovea {

// Packed rows [token, head, dim]. dim is contiguous; strides are in elements and may be anything
// that keeps the rows apart. A null data pointer means "absent".
struct HeadRows {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

// HeadRows over a dense [tokens, heads, dim] array.
inline HeadRows dense_rows(void* data, DType dtype, int64_t heads, int64_t dim) {
  return {data, dtype, heads * dim, dim};
}

// Byte address of element 0 of (token, head). All address arithmetic is 64-bit.
inline char* row_address(const HeadRows& rows, int64_t token, int64_t head) {
  return static_cast<char*>(rows.data) + (token * rows.token_stride + head * rows.head_stride) *
                                             static_cast<int64_t>(dtype_bytes(rows.dtype));
}

}  // namespace fovea
