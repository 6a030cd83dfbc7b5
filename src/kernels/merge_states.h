// SPDX-License-Identifier: Apache-2.0
// Merges attention over disjoint parts of the keys: O = sum O_i e^(lse_i - m) /
// sum e^(lse_i - m), LSE = m + ln of the denominator, m = max lse_i. An empty part is (0, -inf).
#pragma once

#include <cstdint>

namespace fovea::kernels {

struct MergeStatesParams {
  // Part p of row r, head h: o + p * o_part_stride + (r * heads + h) * dim, and lse likewise with
  // lse_part_stride. f32, natural log.
  const float* o = nullptr;
  const float* lse = nullptr;
  int64_t o_part_stride = 0, lse_part_stride = 0;
  int32_t parts = 0;
  int64_t rows = 0;
  int32_t heads = 0;
  int32_t dim = 0;
  const float* sinks = nullptr;  // [heads] or null: out is divided by 1 + e^(sink - LSE)
  float* out = nullptr;          // [rows, heads, dim]; may be part 0
  float* out_lse = nullptr;      // [rows, heads] or null; may be part 0
};

}  // namespace fovea::kernels
