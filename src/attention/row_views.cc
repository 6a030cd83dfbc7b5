// SPDX-License-Identifier: Apache-2.0
#include "attention/row_views.h"

namespace fovea {

HeadRows rows_from(const HeadRows& rows, int64_t token, int64_t dim) {
  HeadRows later = rows;
  later.data = row_address(rows, token, 0) + dim * static_cast<int64_t>(dtype_bytes(rows.dtype));
  return later;
}

HeadRows from_head(const HeadRows& rows, int64_t head) {
  HeadRows later = rows;
  later.data = row_address(rows, 0, head);
  return later;
}

HeadRows rotary_queries(const LayerTensors& layer, const AttentionSpec& spec) {
  if (spec.kind != AttentionKind::mla || !layer.q) return layer.q;
  return layer.mla.q_rope
             ? layer.mla.q_rope
             : rows_from(layer.q, 0,
                         spec.mla.nope_dim > 0 ? spec.mla.nope_dim : spec.mla.kv_lora_rank);
}

}  // namespace fovea
