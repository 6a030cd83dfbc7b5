// SPDX-License-Identifier: Apache-2.0
#include "attention/batch_mask.h"

namespace fovea {

kernels::AttentionMask batch_mask(const BatchView& batch, const AttentionSpec& spec) {
  kernels::AttentionMask mask{};
  mask.causal = is_causal(spec.scope);
  mask.window = spec.window;
  mask.chunk = spec.chunk;
  if (spec.scope == AttentionScope::decoder) mask.positions = batch.positions.data();
  switch (spec.mask) {
    case MaskKind::none:
      break;
    case MaskKind::tree:
      mask.tree = batch.masks.tree.ancestors.data();
      break;
    case MaskKind::custom:
      mask.custom = batch.masks.custom.visible.data();
      mask.custom_indptr = batch.masks.custom.indptr.data();
      break;
    case MaskKind::prefix_spans:
      mask.spans = batch.masks.spans.bounds.data();
      mask.span_indptr = batch.masks.spans.indptr.data();
      break;
    case MaskKind::multi_item:
      mask.item_prefix_lens = batch.masks.items.prefix_lens.data();
      mask.token_pos_in_items = batch.masks.items.token_pos.data();
      mask.token_pos_in_items_stride = batch.masks.items.stride;
      break;
  }
  return mask;
}

}  // namespace fovea
