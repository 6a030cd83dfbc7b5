// SPDX-License-Identifier: Apache-2.0
// The two ways to compute multi-head latent attention (arXiv:2405.04434), and when each is cheaper.
//
// Absorbed: q_nope * W_UK is the query and the cached latent is the key; the result is a latent
// that W_UV turns into values. This computes nothing per cached token. Up-projected: K and V of
// every head are computed from the latents first. The rest is MHA over much narrower heads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fovea/attention_backend.h"
#include "fovea/batch.h"

namespace fovea {

enum class MlaForm : uint8_t { automatic, absorbed, up_projected };

// Latents that are up-projected at a time. This bounds the workspace at any context length; a
// latent takes q_heads * (nope_dim + rope_dim + v_dim) floats.
inline constexpr int32_t kMlaChunkRows = 512;

struct MlaOptions {
  MlaForm form = MlaForm::automatic;  // for specs that allow both
  int32_t chunk_rows = kMlaChunkRows;
};

// Returns true if the spec allows the up-projected form. It needs the weights, supports only the
// causal mask, and excludes batch_invariant: only in the absorbed form the bits of a row do not
// depend on how its prompt was chunked.
bool can_up_project(const AttentionSpec& spec);

// Returns the form with fewer multiply-adds per head, by the request's lengths and the spec's dims:
//   absorbed:      pairs * (2 * kv_lora_rank + rope_dim) + q_len * projected
//   up-projected:  pairs * (nope_dim + rope_dim + v_dim) + kv_len * projected
// with projected = kv_lora_rank * (nope_dim + v_dim) and pairs = visible (query, key) pairs.
// Extends of fewer than kMinUpProjected tokens are always absorbed: they share one pass over the
// cache with decodes.
inline constexpr int32_t kMinUpProjected = 16;
MlaForm choose_mla_form(const AttentionSpec& spec, int32_t q_len, int32_t kv_len);

// Returns the longest context before q_len new tokens with which they are up-projected; -1: none,
// kLongContext: any. It grows with q_len.
inline constexpr int32_t kLongContext = 1 << 20;
int32_t max_up_projected_context(const AttentionSpec& spec, int32_t q_len);

// Upper bounds on the rows of all up-projected requests of a batch.
struct MlaRows {
  int64_t context = 0;  // tokens before the new ones
  int64_t all = 0;
};
// Returns these bounds for batches within the limits. max_context: tokens before the new tokens of
// an up-projected request.
MlaRows max_up_projected_rows(const BatchLimits& batch, int64_t max_context);

// Bounds on the forms of a batch, by bounds on its lengths.
struct MlaFormBounds {
  // Only requests with at least this many new tokens are up-projected: all of them if by_q_len,
  // else those for which choose_mla_form() returns it.
  int32_t min_q_len = kMinUpProjected;
  bool by_q_len = false;
  // Bounds on the up-projected requests.
  MlaRows rows;
  int32_t requests = 0, max_q_len = 0, max_kv_len = 0;
  int32_t max_absorbed = 0;  // new tokens of an absorbed request; 0: there are none
};
// Bounds the forms of a batch. `most` has the batch's own bounds, none of them 0. The result is
// by_q_len if BatchHints::host_q_lens are given, if every request that is cheaper absorbed has
// fewer new tokens than every request that is cheaper up-projected, and if all context of the
// latter is at most max_context tokens. Without host_q_lens, as in a captured pass, no request is
// up-projected unless max_q_len tokens are cheaper so after any context. With fewer tokens the form
// gains little, after short contexts alone, and its kernels would run in every pass.
MlaFormBounds bound_mla_forms(const AttentionSpec& spec, const BatchView& batch,
                              const BatchLimits& most, int64_t max_context);

// Returns the weights with the strides between heads that 0 stands for.
MlaWeights with_head_strides(MlaWeights weights, const AttentionSpec& spec);

// Returns the weights from a head on; their strides are not 0.
MlaWeights from_head(MlaWeights weights, int32_t head);

// Returns the layer from a head on, except for its LSE.
LayerTensors from_head(const LayerTensors& tensors, int32_t head, const AttentionSpec& spec);

// Returns the next smaller number of heads that divides q_heads; 0: there is none.
int32_t fewer_heads(int32_t q_heads, int32_t heads);

// Returns the heads that a pass of `tokens` tokens computes at a time, with memory for max_tokens *
// heads pairs of token and head: q_heads if they fit, else `heads`.
int32_t heads_of_pass(int32_t q_heads, int32_t heads, int32_t max_tokens, int32_t tokens);

// Describes the choice for explain(). `context` says how much context a backend up-projects at a
// time.
std::string describe_mla_forms(const AttentionSpec& spec, std::string_view context);

}  // namespace fovea
