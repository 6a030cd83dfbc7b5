// SPDX-License-Identifier: Apache-2.0
// The attention layers of DeepSeek-V3 (arXiv:2412.19437) with all heads, and their cache.
#pragma once

#include "fovea/attention_spec.h"
#include "fovea/kv_cache.h"

namespace fovea::test {

inline AttentionSpec deepseek_spec() {
  return {.kind = AttentionKind::mla,
          .q_heads = 128,
          .kv_heads = 1,
          .mla = {.kv_lora_rank = 512, .rope_dim = 64, .nope_dim = 128, .v_dim = 128}};
}

inline KvCacheSpec deepseek_cache() {
  return {.layout = KvLayout::mla,
          .layers = 2,
          .kv_heads = 1,
          .head_dim = 576,
          .head_dim_v = 512,
          .page_size = 64};
}

}  // namespace fovea::test
