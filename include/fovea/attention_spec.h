// SPDX-License-Identifier: Apache-2.0
// The needs of a group of layers. Backend selection reads the whole spec before it
// allocates anything; a backend is bound to exactly one spec.
#pragma once

#include <cstdint>

#include "fovea/api.h"
#include "fovea/dtype.h"

namespace FOVEA_API fovea {

enum class AttentionKind : uint8_t {
  mha,              // softmax attention over K and V heads: MHA, GQA and MQA
  mla,              // multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)
  gated_delta_net,  // linear attention with a gated delta rule (arXiv:2412.06464)
  mamba2,           // state-space duality (arXiv:2405.21060)
  kda,              // Kimi delta attention: a gate for each channel of keys (arXiv:2510.26692)
  lightning,        // linear attention with a fixed decay for each head (arXiv:2401.04658)
  mamba1,           // selective scan: a decay for each value of the state (arXiv:2312.00752)
  short_conv,       // a causal convolution alone, as in LFM2
};

// True for the kinds that keep a recurrent state instead of a KV cache.
constexpr bool is_linear(AttentionKind kind) {
  return kind != AttentionKind::mha && kind != AttentionKind::mla;
}
// True for the linear kinds whose states forget what they hold for a key before they take it.
constexpr bool has_delta_rule(AttentionKind kind) {
  return kind == AttentionKind::gated_delta_net || kind == AttentionKind::kda;
}
// True for the linear kinds whose convolution is a forward() of its own: short_conv does nothing
// else, and models of kind mamba1 compute B, C and dt from its results.
constexpr bool convolves_alone(AttentionKind kind) {
  return kind == AttentionKind::mamba1 || kind == AttentionKind::short_conv;
}
// True for the linear kinds whose slots can keep drafts (StateCacheSpec::max_drafts). A token of
// mamba1 has two calls, of which the second would need what the model computes from the first.
constexpr bool can_keep_drafts(AttentionKind kind) {
  return is_linear(kind) && kind != AttentionKind::mamba1;
}

// The keys that a query may see before windows, chunks and masks narrow them.
enum class AttentionScope : uint8_t {
  decoder,        // causal over the request's own cache, aligned to its last token
  ragged,         // causal among the new tokens of the request; no cache, keys come with the layer
  encoder,        // all new tokens of the request see each other; no cache, as ragged
  encoder_cache,  // encoder self-attention whose keys are also written to a cache
  cross,          // every encoder token of the request, from a cache that is written once
};

// True if the layer's own k and v are the only keys, so that no cache holds them.
constexpr bool is_packed(AttentionScope scope) {
  return scope == AttentionScope::ragged || scope == AttentionScope::encoder;
}
// True if a token sees only itself and the tokens before it.
constexpr bool is_causal(AttentionScope scope) {
  return scope == AttentionScope::decoder || scope == AttentionScope::ragged;
}

// Masks whose content arrives with the batch (BatchView::masks). A mask combines with the window,
// the chunk and causality.
enum class MaskKind : uint8_t {
  none,
  tree,          // TreeMask: 64 ancestor bits per new token, for speculation
  custom,        // CustomMask: one byte per (query, key) pair
  prefix_spans,  // PrefixSpans: ranges inside which attention is bidirectional (PrefixLM, images)
  multi_item,    // MultiItemMask: items see the common prefix and themselves (rerankers)
};

// Dual chunk attention (ChunkLlama, arXiv:2402.17463; Qwen2.5-1M, arXiv:2501.15383). Positions are
// divided into chunks of length(). Keys are rotated by their position inside their chunk. Queries
// are rotated once for each chunk distance, so that no angle exceeds that of chunk_size. At
// position p
//   k                                       is rotated to p % length(),
//   q for keys of its own chunk             to p % length(),
//   q for keys of the chunk before (succ)   to min(p % length() + length(), chunk_size),
//   q for keys of older chunks (inter)      to min(2 * length() - 1, chunk_size).
// Out-of-order BatchView::positions can put a key in a later chunk; such keys are masked. The field
// names are those of checkpoints. Checkpoints may also scale the scores of long requests: the
// caller applies that factor to q and k.
struct DualChunk {
  int32_t chunk_size = 0;  // 0: off
  int32_t local_size = 0;  // less than chunk_size

  constexpr explicit operator bool() const { return chunk_size != 0; }
  constexpr int32_t length() const { return chunk_size - local_size; }
  bool operator==(const DualChunk&) const = default;
};

// How scores are made of products of q and k. Softmax kinds only.
struct ScoreSpec {
  // s = softmax_scale * q k, at most 1e6. 0: the default, 1 / sqrt(width of k); for mla the width
  // is nope_dim + rope_dim. Absorbed queries (nope_dim 0) hide that width, so they need a scale.
  float softmax_scale = 0;
  // Soft cap, s <- logit_cap * tanh(s / logit_cap) (arXiv:2408.00118), in [1e-6, 1e6]; 0: off.
  float logit_cap = 0;
  // One extra logit per head in the denominator (gpt-oss; after arXiv:2309.17453):
  // ScoreTensors::sinks.
  bool has_sinks = false;
  // s += slope[head] * (key position - query position) (arXiv:2108.12409):
  // ScoreTensors::alibi_slopes.
  bool has_alibi = false;

  bool operator==(const ScoreSpec&) const = default;
};

// Widths of multi-head latent attention. A cached row holds the latent, then the rotary key.
struct MlaSpec {
  int32_t kv_lora_rank = 0;  // width of the latent
  int32_t rope_dim = 0;      // width of the rotary key that all heads share; 0: none
  int32_t nope_dim = 0;      // q and k values per head without position; 0: q arrives absorbed
  int32_t v_dim = 0;         // values per head of out; 0 with absorbed q: out stays latent

  constexpr int32_t row_dim() const { return kv_lora_rank + rope_dim; }
  bool operator==(const MlaSpec&) const = default;
};

// Heads and widths of a linear layer. Its state is [value_heads, value_dim, key_dim]. short_conv
// has no state but the window of its value_heads * value_dim channels: key_heads and key_dim are 0.
struct LinearSpec {
  int32_t key_heads = 0;    // on this rank; divides value_heads. Mamba: groups of B and C
  int32_t value_heads = 0;  // on this rank. mamba1: channels
  int32_t key_dim = 0;      // values per head of q and k. Mamba: width of the state, of B and C
  int32_t value_dim = 0;    // values per head of v and out. mamba1: 1
  int32_t conv_width = 0;   // taps of the causal convolution before the recurrence; 0: none

  // Values of a token in LinearTensors::mixed. The convolution runs over conv_dim_of() of them.
  constexpr int32_t conv_dim() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  bool operator==(const LinearSpec&) const = default;
};

struct AttentionSpec {
  AttentionKind kind = AttentionKind::mha;
  AttentionScope scope = AttentionScope::decoder;
  MaskKind mask = MaskKind::none;

  // Heads on this rank. Linear kinds leave them 0.
  int32_t q_heads = 0;
  int32_t kv_heads = 0;  // divides q_heads; 1 for mla
  // Values per head of kind mha. The other kinds leave them 0: their widths are in `mla` and
  // `linear`.
  int32_t head_dim = 0;    // q and k
  int32_t head_dim_v = 0;  // v and out

  // Type of q, k, v and out; if fp8 (kind mha over an e4m3 cache), of q only, the others are bf16.
  // Tensors of linear kinds are f32; bf16 lets backends round q, k, v and states for products.
  DType q_dtype = DType::f32;  // with fp8, `flash` rounds softmax weights to e4m3, too

  int32_t window = 0;  // a query sees the last `window` keys including itself; 0: off
  int32_t chunk = 0;   // a query sees keys of its own aligned chunk only (Llama 4); 0: off
  // Kind mha, scopes decoder and ragged; not with `chunk` or mask prefix_spans.
  DualChunk dual_chunk = {};
  // q and k arrive without positions: forward() rotates q in place and k on its way to the cache,
  // after the norms that RotaryTensors may name.
  // For mla this concerns the rotary part of q and the rotary key.
  bool has_rope = false;
  bool needs_lse = false;  // layers ask for the log-sum-exp
  // The bits of a row depend on that row's own tokens only: not on the rest of the batch, on how
  // its prompt was chunked, or on which tokens came from the prefix cache.
  bool batch_invariant = false;

  ScoreSpec scores = {};
  MlaSpec mla = {};        // kind mla
  LinearSpec linear = {};  // linear kinds

  bool operator==(const AttentionSpec&) const = default;
};

// A draft's inputs as a state pool keeps them (StateCacheSpec::draft_inputs): `mixed`, log_decay
// and beta of LinearTensors, and what the delta rule adds to each row of the states, each from a
// multiple of four values on. With the latter a backend takes a draft into the states without the
// sums that led to it. short_conv has `mixed` only.
struct DraftRow {
  int32_t decays = 0, betas = 0, changes = 0;           // values of each
  int32_t decays_at = 0, betas_at = 0, changes_at = 0;  // where they begin
  int32_t size = 0;
};
constexpr DraftRow draft_row(const AttentionSpec& spec) {
  const auto padded = [](int32_t values) { return (values + 3) / 4 * 4; };
  const LinearSpec& linear = spec.linear;
  DraftRow row;
  const bool has_decays = spec.kind != AttentionKind::lightning &&  // they belong to the layer
                          spec.kind != AttentionKind::short_conv;
  if (has_decays) {
    row.decays = linear.value_heads * (spec.kind == AttentionKind::kda ? linear.key_dim : 1);
    row.betas = linear.value_heads;
  }
  if (spec.kind == AttentionKind::gated_delta_net || spec.kind == AttentionKind::kda) {
    row.changes = linear.value_heads * linear.value_dim;
  }
  row.decays_at = padded(linear.conv_dim());
  row.betas_at = row.decays_at + padded(row.decays);
  row.changes_at = row.betas_at + padded(row.betas);
  row.size = row.changes_at + padded(row.changes);
  return row;
}

// Type of the new k and v and of out.
constexpr DType activation_dtype(const AttentionSpec& spec) {
  return is_fp8(spec.q_dtype) ? DType::bf16 : spec.q_dtype;
}

// Channels of the causal convolution: all of LinearTensors::mixed, but mamba1 convolves x alone.
constexpr int32_t conv_dim_of(const AttentionSpec& spec) {
  return spec.kind == AttentionKind::mamba1 ? spec.linear.value_heads * spec.linear.value_dim
                                            : spec.linear.conv_dim();
}

// Widths of a cached row of K and of V: KvCacheSpec::head_dim and head_dim_v of such layers.
constexpr int32_t cached_key_dim(const AttentionSpec& spec) {
  return spec.kind == AttentionKind::mla ? spec.mla.row_dim() : spec.head_dim;
}
constexpr int32_t cached_value_dim(const AttentionSpec& spec) {
  return spec.kind == AttentionKind::mla ? spec.mla.kv_lora_rank : spec.head_dim_v;
}

}  // namespace fovea
