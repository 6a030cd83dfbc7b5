// SPDX-License-Identifier: Apache-2.0
// Readers for fields and tensors that most architectures spell alike. They throw
// Error{corrupt_file} for fields outside their range, and Error{unsupported}, with the supported
// values, for options that are not implemented.
#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/decoder.h"
#include "model/json_object.h"
#include "model/read_rope.h"

namespace fovea {

inline constexpr std::string_view kEpsilonField = "rms_norm_eps";

// Reads sizes, context, eos tokens, the embedding, the final norm and the head. If `tied_field`
// (default: `tied_embeddings`) is true, the head is the embedding, unless the checkpoint stores a
// different head. The architecture reads layers and groups.
struct DecoderDefaults {
  bool tied_embeddings = false;
  bool norms_plus_one = false;
  // Factor of the logits, which is multiplied into the weights of the final norm because the head
  // is linear. Must not be combined with norms_plus_one.
  float logit_factor = 1;
  std::string_view context_field = "max_position_embeddings";  // empty: any context
  std::string_view epsilon_field = kEpsilonField;
  std::string_view tied_field = "tie_word_embeddings";
  std::string_view embedding = "model.embed_tokens", final_norm = "model.norm";
};
DecoderParts read_decoder(const JsonObject& config, Checkpoint checkpoint,
                          std::shared_ptr<ModelDevice> device,
                          const DecoderDefaults& defaults = {});

float read_epsilon(const JsonObject& config, std::string_view field = kEpsilonField);
// Reads NAME.weight, times `factor`, as a norm.
Norm read_norm(const JsonObject& config, const Weights& weights, std::string_view name, int64_t dim,
               bool plus_one = false, float factor = 1);

// Reads the heads of grouped-query attention with a causal mask only. A null num_key_value_heads
// means one per q head; a null head_dim means hidden_size / num_attention_heads. Missing fields get
// the architecture's default, where 0 stands for the same as null.
struct AttentionDefaults {
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
};
AttentionSpec read_attention(const JsonObject& config, const AttentionDefaults& defaults = {});

// The condition under which a projection has a bias.
enum class Bias : uint8_t {
  never,
  always,
  optional,    // if `attention_bias` is true
  by_default,  // unless `attention_bias` is false
};

// Reads q_proj, k_proj and v_proj, or qkv_proj with the rows of all three, and the last matrix. The
// architecture sets slot, norms and positions.
struct SelfAttentionOptions {
  Bias qkv_bias = Bias::optional;
  Bias o_bias = Bias::optional;
  bool has_output_gate = false;
  bool is_fused = false;
  int64_t inputs = 0;  // inputs of the first matrices; 0: hidden_size
  std::string_view out = "o_proj";
};
SelfAttentionParts read_self_attention(const JsonObject& config, const Weights& weights,
                                       const AttentionSpec& spec,
                                       const SelfAttentionOptions& options = {});

// Names of the matrices of an MLP. If `up` is empty, `gate` contains the rows of both. MLPs are cut
// down to the columns of the device's rank; attention is by shard().
struct MlpNames {
  std::string_view gate = "gate_proj", up = "up_proj", down = "down_proj";
};
MlpParts read_mlp(const Weights& weights, int64_t hidden, int64_t width, bool has_bias = false,
                  const MlpNames& names = {});
// Reads these matrices for the experts of the rank, under experts.0, experts.1, ...
std::vector<MlpParts> read_experts(const Weights& weights, int64_t count, int64_t hidden,
                                   int64_t width, const MlpNames& names = {});

// Adds a table of these frequencies to the model. With longrope, the default context ends where the
// short factors stop to apply.
Rotary make_rotary(const kernels::RopeSpec& spec, DecoderParts& parts,
                   kernels::RopeLayout layout = kernels::RopeLayout::half_split);

// Reads `layer_types`, each of which must be one of `known`. Without the field, `pattern` repeats.
std::vector<std::string> read_layer_types(const JsonObject& config,
                                          std::initializer_list<std::string_view> known,
                                          std::span<const std::string_view> pattern);

inline constexpr std::string_view kFullAttention = "full_attention";
inline constexpr std::string_view kSlidingAttention = "sliding_attention";

// Reads `sliding_window`. Null means none; a missing field means `fallback`.
std::optional<int32_t> read_window(const JsonObject& config, std::optional<int32_t> fallback);

// Reads the bound of a soft cap. Null means 0, which disables it; a missing field means `fallback`.
float read_cap(const JsonObject& config, std::string_view field, float fallback);

// Reads a number in [1e-6, 1e9].
double read_positive(const JsonObject& config, std::string_view field, double fallback);

// Throws unless the field is missing or has the only supported value.
void require_text(const JsonObject& config, std::string_view field, std::string_view value);
void require_boolean(const JsonObject& config, std::string_view field, bool value);

// The ranges exceed all known models but keep products of sizes inside their types.
int32_t read_layers(const JsonObject& config);                            // in [1, 2^14]
int32_t read_size(const JsonObject& config, std::string_view field);      // in [1, 2^24]
int32_t read_heads(const JsonObject& config, std::string_view field);     // in [1, 2^16]
int32_t read_head_dim(const JsonObject& config, std::string_view field);  // in [1, 1024]

}  // namespace fovea
