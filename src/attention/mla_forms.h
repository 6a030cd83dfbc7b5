// SPDX-License-Identifier: Apache-2.0
// The two ways to compute multi-head latent attention (arXiv:2405.04434), and when each is cheaper.
//
// Absorbed: scores are taken against the cached latent itself, with q_nope * W_UK as the query; the
// result is a latent that W_UV turns into values. Nothing is computed per cached token.
// Up-projected: K and V of every head are computed from the latents first; then it is plain MHA
// over much narrower heads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fovea/attention_backend.h"
#include "fovea/batch.h"

namespace fovea {

enum class MlaForm : uint8_t { automatic, absorbed, up_projected };

// Latents up-projected at a time: bounds the workspace at q_heads * (nope_dim + rope_dim + v_dim)
// floats each, whatever the context.
inline constexpr int32_t kMlaChunkRows = 512;

struct MlaOptions {
  MlaForm form = MlaForm::automatic;  // for specs that allow both
  int32_t chunk_rows = kMlaChunkRows;
};

// Whether the up-projected form exists for this spec: it needs the weights, and it knows no masks
// but the causal one. batch_invariant keeps to the absorbed form, in which a row's bits do not
// depend on how its prompt was chunked.
bool can_up_project(const AttentionSpec& spec);

// Multiply-adds of one head decide, from one request's lengths and the spec's dims alone:
//   absorbed:      pairs * (2 * kv_lora_rank + rope_dim) + q_len * projected
//   up-projected:  pairs * (nope_dim + rope_dim + v_dim) + kv_len * projected
// with projected = kv_lora_rank * (nope_dim + v_dim) and pairs = visible (query, key) pairs.
// Extends of fewer than kMinUpProjected tokens stay absorbed: they share one pass over the cache
// with the decodes.
inline constexpr int32_t kMinUpProjected = 16;
MlaForm choose_mla_form(const AttentionSpec& spec, int32_t q_len, int32_t kv_len);

// The longest context before q_len new tokens with which they are up-projected; -1: none. Grows
// with q_len; kLongContext: any.
inline constexpr int32_t kLongContext = 1 << 20;
int32_t most_up_projected_context(const AttentionSpec& spec, int32_t q_len);

// Rows of all requests of a batch that are up-projected, at most.
struct MlaRows {
  int64_t context = 0;  // tokens before the new ones
  int64_t all = 0;
};
// max_context: what stands before the new tokens of such a request.
MlaRows most_up_projected_rows(const BatchLimits& batch, int64_t max_context);

// What the host knows of a batch's forms by bounds of its lengths.
struct MlaFormBounds {
  // Only requests with as many new tokens are up-projected: all of them, if by_q_len, else those
  // for which choose_mla_form says so.
  int32_t least_q_len = kMinUpProjected;
  bool by_q_len = false;
  // Of the up-projected requests.
  MlaRows rows;
  int32_t requests = 0, max_q_len = 0, max_kv_len = 0;
  int32_t most_absorbed = 0;  // new tokens of an absorbed request; 0: there are none
};
// most: the batch's own bounds, none of them 0. by_q_len where BatchView::host_q_lens are given, no
// request that is cheaper absorbed has as many new tokens as one that is cheaper up-projected, and
// all context of the latter is at most max_context tokens.
MlaFormBounds bound_mla_forms(const AttentionSpec& spec, const BatchView& batch,
                              const BatchLimits& most, int64_t max_context);

// The weights with the strides between heads that 0 stands for.
MlaWeights with_head_strides(MlaWeights weights, const AttentionSpec& spec);

// The weights from a head on; their strides are not 0.
MlaWeights from_head(MlaWeights weights, int32_t head);

// The layer from a head on, but for its LSE.
LayerTensors from_head(const LayerTensors& tensors, int32_t head, const AttentionSpec& spec);

// The next smaller number of heads that divides q_heads; 0: there is none.
int32_t fewer_heads(int32_t q_heads, int32_t heads);

// Heads that a pass of `tokens` tokens is computed with at a time, where there is room for as many
// pairs of token and head as max_tokens tokens of `heads` heads have: all, or so many.
int32_t heads_of_pass(int32_t q_heads, int32_t heads, int32_t max_tokens, int32_t tokens);

// The choice in words, for explain(): from how many new tokens on. `context`: how much context a
// backend up-projects at a time.
std::string describe_mla_forms(const AttentionSpec& spec, std::string_view context);

}  // namespace fovea
