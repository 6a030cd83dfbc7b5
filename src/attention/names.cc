// SPDX-License-Identifier: Apache-2.0
#include "attention/names.h"

namespace fovea {

std::string_view name_of(AttentionKind kind) {
  switch (kind) {
    case AttentionKind::mha:
      return "mha";
    case AttentionKind::mla:
      return "mla";
    case AttentionKind::gated_delta_net:
      return "gated_delta_net";
    case AttentionKind::mamba2:
      return "mamba2";
    case AttentionKind::kda:
      return "kda";
    case AttentionKind::lightning:
      return "lightning";
    case AttentionKind::mamba1:
      return "mamba1";
    case AttentionKind::short_conv:
      return "short_conv";
  }
  return "?";
}

std::string_view name_of(AttentionScope scope) {
  switch (scope) {
    case AttentionScope::decoder:
      return "decoder";
    case AttentionScope::ragged:
      return "ragged";
    case AttentionScope::encoder:
      return "encoder";
    case AttentionScope::encoder_cache:
      return "encoder_cache";
    case AttentionScope::cross:
      return "cross";
  }
  return "?";
}

std::string_view name_of(MaskKind mask) {
  switch (mask) {
    case MaskKind::none:
      return "none";
    case MaskKind::tree:
      return "tree";
    case MaskKind::custom:
      return "custom";
    case MaskKind::prefix_spans:
      return "prefix_spans";
    case MaskKind::multi_item:
      return "multi_item";
  }
  return "?";
}

std::string_view name_of(KvLayout layout) {
  switch (layout) {
    case KvLayout::mha:
      return "mha";
    case KvLayout::mla:
      return "mla";
    case KvLayout::mla_fp8_rows:
      return "mla_fp8_rows";
  }
  return "?";
}

std::string_view name_of(KvScale scale) {
  switch (scale) {
    case KvScale::none:
      return "none";
    case KvScale::per_tensor:
      return "per_tensor";
    case KvScale::per_head:
      return "per_head";
    case KvScale::per_token_head:
      return "per_token_head";
  }
  return "?";
}

}  // namespace fovea
