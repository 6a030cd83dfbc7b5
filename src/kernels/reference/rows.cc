// SPDX-License-Identifier: Apache-2.0
#include "kernels/reference/rows.h"

#include "core/float_types.h"

namespace fovea::kernels::reference {
namespace {

void load_scaled(const char* from, DType dtype, float scale, int32_t dim, double* to) {
  for (int32_t d = 0; d < dim; ++d) {
    to[d] = static_cast<double>(load_float(from, dtype, d)) * static_cast<double>(scale);
  }
}

void load_mla_fp8_row(const char* from, int32_t dim, double* to) {
  for (int32_t d = 0; d < dim && d < kMlaRowLatent; ++d) {
    const float scale = load_float(from + kMlaRowScaleOffset, DType::f32, d / kMlaRowScaleGroup);
    to[d] = static_cast<double>(load_float(from, DType::f8e4m3, d)) * static_cast<double>(scale);
  }
  for (int32_t d = kMlaRowLatent; d < dim; ++d) {
    to[d] = load_float(from + kMlaRowRopeOffset, DType::bf16, d - kMlaRowLatent);
  }
}

}  // namespace

void load_row(const HeadRows& rows, int64_t token, int64_t head, int32_t dim, double* to) {
  load_scaled(row_address(rows, token, head), rows.dtype, 1.0f, dim, to);
}

float row_scale(KvScale kind, const float* scales, const CacheRow& row) {
  switch (kind) {
    case KvScale::none:
      return 1.0f;
    case KvScale::per_tensor:
      return scales[0];
    case KvScale::per_head:
      return scales[row.head];
    case KvScale::per_token_head:
      return scales[row.slot * row.kv_heads + row.head];
  }
  return 1.0f;
}

void load_k_row(const KvLayerView& view, const CacheRow& row, int32_t dim, double* to) {
  const char* from = k_address(view, row.slot, row.head);
  if (view.layout == KvLayout::mla_fp8_rows) {
    load_mla_fp8_row(from, dim, to);
  } else {
    load_scaled(from, view.dtype, row_scale(view.scale, view.k_scale, row), dim, to);
  }
}

void load_v_row(const KvLayerView& view, const CacheRow& row, int32_t dim, double* to) {
  if (view.layout != KvLayout::mha) return load_k_row(view, row, dim, to);
  const float scale = row_scale(view.scale, view.v_scale, row);
  load_scaled(v_address(view, row.slot, row.head), view.dtype, scale, dim, to);
}

}  // namespace fovea::kernels::reference
