// SPDX-License-Identifier: Apache-2.0
// Reads rows of any storage format as fp64.
#pragma once

#include <cstdint>

#include "fovea/kv_cache.h"
#include "fovea/tensor.h"
#include "kernels/mla_row.h"

namespace fovea::kernels::reference {

// to[0, dim) = row (token, head) of a packed tensor.
void load_row(const HeadRows& rows, int64_t token, int64_t head, int32_t dim, double* to);

// Reads one (slot, head) of a cache; kv_heads locates the entry of per-token scales.
struct CacheRow {
  int64_t slot = 0;
  int32_t head = 0;
  int32_t kv_heads = 1;
};
void load_k_row(const KvLayerView& view, const CacheRow& row, int32_t dim, double* to);
void load_v_row(const KvLayerView& view, const CacheRow& row, int32_t dim, double* to);

// Returns the scale of a row's stored values; `scales` is view.k_scale or view.v_scale.
float row_scale(KvScale kind, const float* scales, const CacheRow& row);

}  // namespace fovea::kernels::reference
