// SPDX-License-Identifier: Apache-2.0
#include "attention/batch_mask.h"

namespace fovea {

kernels::AttentionMask batch_mask(const BatchView& batch, const AttentionSpec& spec) {
  kernels::AttentionMask mask;
  mask.causal = is_causal(spec.scope);
  mask.window = spec.window;
  mask.chunk = spec.chunk;
  if (spec.scope == AttentionScope::decoder) mask.positions = batch.positions;
  switch (spec.mask) {
    case MaskKind::none:
      break;
    case MaskKind::tree:
      mask.tree = batch.tree_mask;
      break;
    case MaskKind::custom:
      mask.custom = batch.custom_mask;
      mask.custom_indptr = batch.custom_mask_indptr;
      break;
    case MaskKind::prefix_spans:
      mask.spans = batch.spans;
      mask.span_indptr = batch.span_indptr;
      break;
    case MaskKind::multi_item:
      mask.item_prefix_lens = batch.item_prefix_lens;
      mask.token_pos_in_items = batch.token_pos_in_items;
      mask.token_pos_in_items_stride = batch.token_pos_in_items_stride;
      break;
  }
  return mask;
}

}  // namespace fovea
