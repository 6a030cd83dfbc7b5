// SPDX-License-Identifier: Apache-2.0
// What the configs and checkpoints of most architectures spell alike, read into parts. Fields that
// are outside their range are Error{corrupt_file}; options nothing here implements are
// Error{unsupported} with what is supported.
#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/decoder.h"
#include "model/read_rope.h"

namespace fovea {

// Reads sizes, context, eos tokens, the embedding, the final norm and the head. The head is the
// embedding where `tie_word_embeddings` (missing: `tied_embeddings`) says so, unless the checkpoint
// stores another one. Layers and groups are left to the architecture.
struct DecoderDefaults {
  bool tied_embeddings = false;
  bool norms_plus_one = false;
  // Multiplies the logits. The head is linear, so that the weights of the final norm take it;
  // not with norms_plus_one.
  float logit_factor = 1;
};
DecoderParts read_decoder(const Config& config, Checkpoint checkpoint,
                          std::shared_ptr<ModelDevice> device,
                          const DecoderDefaults& defaults = {});

float read_epsilon(const Config& config);  // rms_norm_eps
// NAME.weight, times `factor`, as a norm.
Norm read_norm(const Config& config, const Weights& weights, std::string_view name, int64_t dim,
               bool plus_one = false, float factor = 1);

// Reads the heads of grouped-query attention without masks but causality. A null
// num_key_value_heads means one per q head, a null head_dim hidden_size / num_attention_heads; a
// missing one means the default of the architecture, or the same as null where that is 0.
struct AttentionDefaults {
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
};
AttentionSpec read_attention(const Config& config, const AttentionDefaults& defaults = {});

// Whether a projection has a bias.
enum class Bias : uint8_t {
  never,
  always,
  optional,  // where `attention_bias` is true
  usual,     // unless `attention_bias` is false
};

// Reads q_proj, k_proj and v_proj, or qkv_proj with all their rows, and o_proj. Slot, norms and
// positions are left to the architecture.
struct SelfAttentionOptions {
  Bias qkv_bias = Bias::optional;
  Bias o_bias = Bias::optional;
  bool has_output_gate = false;
  bool is_fused = false;
};
SelfAttentionParts read_self_attention(const Config& config, const Weights& weights,
                                       const AttentionSpec& spec,
                                       const SelfAttentionOptions& options = {});

// The matrices of an MLP; without `up` the one named `gate` has the rows of both.
struct MlpNames {
  std::string_view gate = "gate_proj", up = "up_proj", down = "down_proj";
};
MlpParts read_mlp(const Weights& weights, int64_t hidden, int64_t width, bool has_bias = false,
                  const MlpNames& names = {});
// The same matrices of every expert, under experts.0, experts.1, ...
std::vector<MlpParts> read_experts(const Weights& weights, int64_t count, int64_t hidden,
                                   int64_t width, const MlpNames& names = {});

// Adds a table of these frequencies to the model. With longrope the default context ends where the
// short factors do.
Rotary make_rotary(const kernels::RopeSpec& spec, DecoderParts& parts,
                   kernels::RopeLayout layout = kernels::RopeLayout::half_split);

// `layer_types`, one of `known` for each layer; without the field `pattern`, repeated.
std::vector<std::string> read_layer_types(const Config& config,
                                          std::initializer_list<std::string_view> known,
                                          std::span<const std::string_view> pattern);

inline constexpr std::string_view kFullAttention = "full_attention";
inline constexpr std::string_view kSlidingAttention = "sliding_attention";

// Reads `sliding_window`: null means none, and a missing field means `fallback`.
std::optional<int32_t> read_window(const Config& config, std::optional<int32_t> fallback);

// Reads the bound of a soft cap: null means 0, which is off, and a missing field means `fallback`.
float read_cap(const Config& config, std::string_view field, float fallback);

// A number in [1e-6, 1e9].
double read_positive(const Config& config, std::string_view field, double fallback);

// The field is missing or has the one value that is implemented.
void require_text(const Config& config, std::string_view field, std::string_view value);
void require_boolean(const Config& config, std::string_view field, bool value);

// The ranges are far beyond what exists; they keep products of sizes inside their types.
int32_t read_layers(const Config& config);                            // in [1, 2^14]
int32_t read_size(const Config& config, std::string_view field);      // in [1, 2^24]
int32_t read_heads(const Config& config, std::string_view field);     // in [1, 2^16]
int32_t read_head_dim(const Config& config, std::string_view field);  // in [1, 1024]

}  // namespace fovea
