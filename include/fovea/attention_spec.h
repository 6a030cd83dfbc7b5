// SPDX-License-Identifier: Apache-2.0
// What a group of layers needs from attention. Selection sees all of it before anything is
// allocated; a backend is bound to exactly one.
#pragma once

#include <cstdint>

#include "fovea/dtype.h"

namespace fovea {

enum class AttentionKind : uint8_t {
  mha,              // softmax attention over K and V heads: MHA, GQA and MQA
  mla,              // multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)
  gated_delta_net,  // linear attention with a gated delta rule (arXiv:2412.06464)
  mamba2,           // state-space duality (arXiv:2405.21060)
};

// Which keys a query may see, before windows, chunks and masks narrow it.
enum class AttentionScope : uint8_t {
  decoder,        // causal over the request's own cache, aligned to its last token
  ragged,         // causal among the request's own new tokens; keys are the batch's own, uncached
  encoder,        // every token of the request sees every other; keys are the batch's own, uncached
  encoder_cache,  // encoder self-attention whose keys are also written to a cache
  cross,          // every encoder token of the request, from a cache written once
};

// Whether keys are the batch's own k and v, and no cache holds them.
constexpr bool is_packed(AttentionScope scope) {
  return scope == AttentionScope::ragged || scope == AttentionScope::encoder;
}
// Whether tokens see none behind them.
constexpr bool is_causal(AttentionScope scope) {
  return scope == AttentionScope::decoder || scope == AttentionScope::ragged;
}

// Masks whose content arrives with the batch. They combine with window, chunk and causality.
enum class MaskKind : uint8_t {
  none,
  tree,          // 64-bit ancestor mask per new token (speculation)
  custom,        // one byte per (query, key) pair
  prefix_spans,  // spans inside which attention is bidirectional (PrefixLM, images)
  multi_item,    // items see the common prefix and themselves (rerankers)
};

// Dual chunk attention (ChunkLlama, arXiv:2402.17463; Qwen2.5-1M, arXiv:2501.15383). Positions are
// cut into chunks of length(), keys are rotated by their place in their chunk, and queries once for
// each distance of chunks, so that no rotation turns by more than chunk_size. At position p
//   k                                      is rotated to p % length(),
//   q for keys of its own chunk            to p % length(),
//   q for those of the one before (succ)   to min(p % length() + length(), chunk_size),
//   q for those of older ones (inter)      to min(2 * length() - 1, chunk_size).
// Keys of later chunks, which odd BatchView::positions may give, are hidden. The names are those of
// checkpoints; the factor of theirs on the scores of long requests is for the caller to put on q
// and k.
struct DualChunk {
  int32_t chunk_size = 0;  // 0: off
  int32_t local_size = 0;  // below chunk_size

  constexpr explicit operator bool() const { return chunk_size != 0; }
  constexpr int32_t length() const { return chunk_size - local_size; }
  bool operator==(const DualChunk&) const = default;
};

struct AttentionSpec {
  AttentionKind kind = AttentionKind::mha;
  AttentionScope scope = AttentionScope::decoder;
  MaskKind mask = MaskKind::none;

  int32_t q_heads = 0;     // on this rank
  int32_t kv_heads = 0;    // divides q_heads; 1 for mla
  int32_t head_dim = 0;    // of q and k. mla: kv_lora_rank + rope_dim, what a cache row holds
  int32_t head_dim_v = 0;  // of v and out. mla: kv_lora_rank

  // mla only.
  int32_t kv_lora_rank = 0;  // width of the latent, 512
  int32_t rope_dim = 0;      // width of the shared rotary key, 64 (0: none)
  int32_t nope_dim = 0;      // per-head q/k width without position, 128; 0: q arrives absorbed
  int32_t v_dim = 0;         // per-head value width after up-projection, 128; 0: out stays latent

  // gated_delta_net and mamba2: q_heads are the key heads (mamba2: groups of B and C), kv_heads the
  // value heads, head_dim the key/state width, head_dim_v the value width.
  int32_t conv_width = 0;  // taps of the causal convolution in front; 0: none

  // Of q, of the new k and v, and of out. fp8 (kind mha, an e4m3 cache): of q alone; the others are
  // bf16. `flash` rounds weights to e4m3 too, and its products run at the rate of fp8.
  DType q_dtype = DType::f32;
  // s = softmax_scale * q k. 0: 1/sqrt(head_dim); mla: 1/sqrt(nope_dim + rope_dim), but absorbed
  // queries (nope_dim 0) do not tell theirs and need one. At most 1e6.
  float softmax_scale = 0;
  // Soft cap, s <- cap * tanh(s / cap) (arXiv:2408.00118), in [1e-6, 1e6]; 0: off.
  float logit_cap = 0;
  int32_t window = 0;  // a query sees the last `window` keys including itself; 0: off
  int32_t chunk = 0;   // a query sees keys of its own aligned chunk only (Llama 4); 0: off
  // mha, scopes decoder and ragged; not with chunk or mask prefix_spans.
  DualChunk dual_chunk = {};
  // One extra logit per head in the denominator (gpt-oss; after arXiv:2309.17453).
  bool has_sinks = false;
  bool has_alibi = false;  // s += slope[head] * (key position - query position) (arXiv:2108.12409)
  // q and k arrive without positions: forward() rotates q in place and k on its way to the cache.
  // mla: the rotary part of q, and the rotary key.
  bool has_rope = false;
  bool needs_lse = false;  // log-sum-exp is read by the caller
  // The bits of a row depend on that row's own tokens only: not on the rest of the batch, on the
  // chunking of its prompt, or on what was a prefix-cache hit.
  bool batch_invariant = false;

  bool operator==(const AttentionSpec&) const = default;
};

// Of the new k and v and of out.
constexpr DType activation_dtype(const AttentionSpec& spec) {
  return is_fp8(spec.q_dtype) ? DType::bf16 : spec.q_dtype;
}

// Linear kinds: channels of LinearTensors::mixed, which the convolution runs over.
constexpr int32_t conv_dim(const AttentionSpec& spec) {
  return 2 * spec.q_heads * spec.head_dim + spec.kv_heads * spec.head_dim_v;
}

}  // namespace fovea
