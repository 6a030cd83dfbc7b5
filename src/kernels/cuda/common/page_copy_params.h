// SPDX-License-Identifier: Apache-2.0
// Parameter block of copies between pools with other pages, read by host and device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

// Arrays of a layer: keys, values, and the scales of both.
constexpr int kMaxPageArrays = 4;
// Pages of one launch and pool.
constexpr int kMaxCopiedPages = 256;

// Rows [page, token, head] in two pools; strides in bytes.
struct CopiedRows {
  const char* from;
  char* to;
  int64_t from_page, from_token, from_head;
  int64_t to_page, to_token, to_head;
  int32_t row_bytes;
  int32_t unit;  // bytes of one access, 16 or 4: divides addresses, strides and rows
};

// Tokens [first, first + tokens) of a request. The page lists begin with the page of the first one.
struct MovedTokens {
  int64_t first;
  int32_t tokens, heads;
  int32_t from_page_size, to_page_size;
  int32_t from_pages[kMaxCopiedPages], to_pages[kMaxCopiedPages];
};

struct PageCopyParams {
  CopiedRows arrays[kMaxPageArrays];  // one for each y of the grid
  MovedTokens moved;
};

// Rows whose values get another type or scale, as kernels/kv_write.h describes.
struct ConvertedRows {
  CopiedRows at;               // without row_bytes and unit
  const float* from_scales;    // [slots, heads]; null: 1
  float* to_scales;            // [slots, heads], computed; null: 1
  int32_t from_type, to_type;  // a Type
  int32_t values;              // a row has
};

struct PageConvertParams {
  ConvertedRows arrays[2];  // keys and values, one for each y of the grid
  MovedTokens moved;
};

}  // namespace fovea::kernels::cuda
