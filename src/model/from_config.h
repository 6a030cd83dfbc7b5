// SPDX-License-Identifier: Apache-2.0
// What the configs and checkpoints of most architectures spell alike, read into parts. Fields that
// are outside their range are Error{corrupt_file}; options nothing here implements are
// Error{unsupported} with what is supported.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/decoder.h"

namespace fovea {

// Sizes, context, eos tokens, the embedding, the final norm and the head: a matrix of its own, or
// the embedding where `tie_word_embeddings` (missing: `tied_embeddings`) says so. Layers and groups
// are left to the architecture.
struct DecoderDefaults {
  bool tied_embeddings = false;
  bool norms_plus_one = false;
};
DecoderParts read_decoder(const Config& config, Checkpoint checkpoint,
                          std::shared_ptr<ModelDevice> device,
                          const DecoderDefaults& defaults = {});

float read_epsilon(const Config& config);  // rms_norm_eps
// NAME.weight as a norm.
Norm read_norm(const Config& config, const Weights& weights, std::string_view name, int64_t dim,
               bool plus_one = false);

// Heads of grouped-query attention; head_dim defaults to hidden / heads. No masks but causality.
AttentionSpec read_attention(const Config& config);

// q_proj, k_proj, v_proj, o_proj, with biases where `attention_bias` says so. Slot, norms and
// positions are left to the architecture.
struct SelfAttentionOptions {
  bool bias_by_default = false;
  bool has_output_gate = false;
};
SelfAttentionParts read_self_attention(const Config& config, const Weights& weights,
                                       const AttentionSpec& spec,
                                       const SelfAttentionOptions& options = {});

// gate_proj, up_proj, down_proj.
MlpParts read_mlp(const Weights& weights, int64_t hidden, int64_t width, bool has_bias = false);
// The same matrices of every expert, under experts.0, experts.1, ...
std::vector<MlpParts> read_experts(const Weights& weights, int64_t count, int64_t hidden,
                                   int64_t width);

// Frequencies of `rope_parameters`, or of the older `rope_theta` and `rope_scaling`.
kernels::RopeSpec read_rope(const Config& config, int32_t rotary_dim);
Rotary make_rotary(const kernels::RopeSpec& spec, const DecoderParts& parts,
                   kernels::RopeLayout layout = kernels::RopeLayout::half_split);

// `layer_types`, one of `known` for each layer; without the field `pattern`, repeated.
std::vector<std::string> read_layer_types(const Config& config,
                                          std::initializer_list<std::string_view> known,
                                          std::span<const std::string_view> pattern);

inline constexpr std::string_view kFullAttention = "full_attention";
inline constexpr std::string_view kSlidingAttention = "sliding_attention";
// What each layer needs, by its type, where some have the config's window: `full` without it.
std::vector<AttentionSpec> read_sliding_layers(const Config& config, const AttentionSpec& full,
                                               std::span<const std::string_view> pattern);

// A number above 0.
double read_positive(const Config& config, std::string_view field, double fallback);

// The field is missing or has the one value that is implemented.
void require_text(const Config& config, std::string_view field, std::string_view value);
void require_boolean(const Config& config, std::string_view field, bool value);

// The ranges are far beyond what exists; they keep products of sizes inside their types.
int32_t read_size(const Config& config, std::string_view field);      // in [1, 2^24]
int32_t read_heads(const Config& config, std::string_view field);     // in [1, 2^16]
int32_t read_head_dim(const Config& config, std::string_view field);  // in [1, 1024]

}  // namespace fovea
