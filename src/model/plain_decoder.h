// SPDX-License-Identifier: Apache-2.0
// A plain decoder alternates grouped-query attention and a gated MLP or a mixture of experts, each
// on a residual branch. A table describes its parts; plain_decoders.h has the tables. One loader
// reads all such architectures.
#pragma once

#include <memory>

#include "model/from_config.h"

namespace fovea {

// Names of the norms of a layer. An empty name means that there is no such norm.
struct NormNames {
  std::string_view mixer = "input_layernorm";
  std::string_view mixer_out = {};
  std::string_view feed = "post_attention_layernorm";
  std::string_view feed_out = {};
};

// Position of the norms `q_norm` and `k_norm`, which precede rotation.
enum class QkNorm : uint8_t {
  none,
  heads,  // each head is normalised
  rows,   // all heads are normalised together
};

// Values that differ between the layers of one decoder.
struct PlainLayer {
  int32_t window = 0, chunk = 0;  // as in AttentionSpec
  bool rotates = true;            // applies positions to q and k
};

// Selects the layers that have the config's `sliding_window`. All values but `everywhere` are
// defaults for configs without `layer_types`.
struct Windows {
  enum class Where : uint8_t {
    nowhere,
    everywhere,
    between,       // all but every `period`-th layer
    upper_layers,  // the layers from `max_window_layers` on
    unrotated,     // layers without positions
  };
  Where where = Where::nowhere;
  int32_t default_size = 0;            // used without the field; 0 means no window
  bool has_switch = false;             // layers have windows only if `use_sliding_window` is true
  int32_t period = 2;                  // for `between`
  std::string_view period_field = {};  // config field that overrides `period`
};

// Routed experts, each with its own matrices under `experts`, and a router named `gate`. The expert
// weights are a softmax over all experts.
struct Mixture {
  std::string_view block = {};                   // empty for an MLP in every layer
  std::string_view count_field = "num_experts";  // also num_local_experts
  std::string_view width_field = {};             // width of one expert
  // A missing field means false; an empty name means that weights sum to 1.
  std::string_view normalise_field = {};
  MlpNames names = {};
  bool has_dense_layers = false;  // given by `decoder_sparse_step` and `mlp_only_layers`
};

struct PlainDecoder;

// Inputs for reading a part that only one architecture has.
struct PlainContext {
  const PlainDecoder& decoder;
  const JsonObject& config;
  Weights weights;  // weights of the layer
  int32_t layer = 0;
};

std::unique_ptr<Block> read_plain_feed(const PlainContext& context);
std::vector<PlainLayer> read_plain_layers(const PlainDecoder& decoder, const JsonObject& config);

// The defaults describe Llama.
struct PlainDecoder {
  // Embedding, residual stream and head.
  bool tied_by_default = false;    // if `tie_word_embeddings` is missing
  bool scales_embeddings = false;  // multiplies embeddings by sqrt(hidden)
  // `embedding_multiplier`, `residual_multiplier`, `attention_multiplier`, `logits_scaling`.
  bool has_multipliers = false;
  bool has_logit_cap = false;   // `final_logit_softcapping`
  float default_logit_cap = 0;  // if the field is missing; 0 disables it

  // Norms.
  NormNames norms = {};
  bool norms_plus_one = false;  // multiplies by (1 + weight)

  // Attention.
  AttentionDefaults heads = {};
  Bias qkv_bias = Bias::optional;
  Bias o_bias = Bias::optional;
  bool fuses_qkv = false;
  QkNorm qk_norm = QkNorm::none;
  bool has_sinks = false;
  bool has_attention_cap = false;   // `attn_logit_softcapping`
  float default_attention_cap = 0;  // if the field is missing; 0 disables it
  // Scores are divided by the square root of this field, or of head_dim if empty.
  std::string_view scale_field = {};
  int32_t default_scale = 0;  // if the field is missing
  // Changes what is special about the attention of one architecture.
  void (*adjust_attention)(const PlainContext& context, SelfAttentionParts& parts) = nullptr;

  // Positions.
  RopeDefaults rope = {};
  bool rope_by_layer_type = false;  // layers with a window use `sliding_rope`
  RopeDefaults sliding_rope = {};
  kernels::RopeLayout rope_layout = kernels::RopeLayout::half_split;
  bool skips_rope = false;  // some layers have no positions, see read_rope_layers()

  // Layers.
  Windows windows = {};
  std::vector<PlainLayer> (*read_layers)(const PlainDecoder& decoder,
                                         const JsonObject& config) = read_plain_layers;

  // Feed-forward block.
  std::string_view activation_field = "hidden_act";
  std::string_view activation_name = "silu";
  kernels::Activation activation = kernels::Activation::silu;
  bool has_mlp_bias = false;  // reads `mlp_bias`
  MlpNames mlp = {};
  Mixture mixture = {};
  std::unique_ptr<Block> (*read_feed)(const PlainContext& context) = read_plain_feed;

  // A boolean option of transformers that is not implemented and must be false.
  std::string_view refused_option = {};
};

std::unique_ptr<Model> load_plain_decoder(const PlainDecoder& decoder, const JsonObject& config,
                                          Checkpoint checkpoint,
                                          std::shared_ptr<ModelDevice> device);

// Loads the architecture of one table; used as ModelEntry::load.
template <const PlainDecoder& kDecoder>
std::unique_ptr<Model> load_plain(const JsonObject& config, Checkpoint checkpoint,
                                  std::shared_ptr<ModelDevice> device) {
  return load_plain_decoder(kDecoder, config, std::move(checkpoint), std::move(device));
}

// Reads `no_rope_layers` (1 means that the layer has positions). Without it, all layers have
// positions except every `no_rope_layer_interval`-th.
std::vector<bool> read_rope_layers(const JsonObject& config);
// Returns true if the layer has an MLP in a model with mixtures of experts: every layer except each
// `decoder_sparse_step`-th, and `mlp_only_layers`.
bool is_dense_layer(const JsonObject& config, int32_t layer);

}  // namespace fovea
