// SPDX-License-Identifier: Apache-2.0
// Copies rows between layouts and dtypes, without arithmetic except the conversion.
#pragma once

#include <cstdint>

#include "fovea/batch.h"
#include "fovea/kv_cache.h"
#include "fovea/tensor.h"
#include "fovea/thread_pool.h"

namespace fovea {

struct RowCopy {
  HeadRows from, to;
  int64_t tokens = 0;
  int32_t heads = 0;
  int32_t dim = 0;
};
void copy_rows(const RowCopy& copy, ThreadPool& threads);

// to[i, 0, dim) = the cached row of token first + i of table row `row` as f32; layouts mla and
// mla_fp8_rows.
struct LatentGather {
  KvLayerView cache;
  TokenTable table;
  int32_t row = 0;
  int64_t first = 0;
  int64_t rows = 0;
  int32_t dim = 0;
  float* to = nullptr;  // [rows, dim]
};
void gather_latents(const LatentGather& gather, ThreadPool& threads);

}  // namespace fovea
