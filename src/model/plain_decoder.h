// SPDX-License-Identifier: Apache-2.0
// A plain decoder is a table of its parts: grouped-query attention and a gated MLP, or a mixture of
// them, each on its residual branch. One loader reads every architecture that such a table
// describes; plain_decoders.h holds the tables.
#pragma once

#include <memory>

#include "model/from_config.h"

namespace fovea {

// Names of the norms of a layer; an empty one is not there.
struct NormNames {
  std::string_view mixer = "input_layernorm";
  std::string_view mixer_out = {};
  std::string_view feed = "post_attention_layernorm";
  std::string_view feed_out = {};
};

// The norms `q_norm` and `k_norm` between projection and rotation.
enum class QkNorm : uint8_t {
  none,
  heads,  // over each head
  rows,   // over all heads together
};

// Values that differ between the layers of one decoder.
struct PlainLayer {
  int32_t window = 0, chunk = 0;  // as in AttentionSpec
  bool rotates = true;            // q and k have positions
};

// Which layers have the config's `sliding_window`. All but `everywhere` follow `layer_types` and
// say what holds without it.
struct Windows {
  enum class Where : uint8_t {
    nowhere,
    everywhere,
    between,    // all but every `period`-th layer
    behind,     // the layers from `max_window_layers` on
    unrotated,  // the layers without positions
  };
  Where where = Where::nowhere;
  int32_t default_size = 0;            // without the field; 0: no window
  bool has_switch = false;             // there are none unless `use_sliding_window` is true
  int32_t period = 2;                  // between
  std::string_view period_field = {};  // of the config, before `period`
};

// Routed experts, each with matrices of its own under `experts`, behind a router named `gate`.
// Their weights are a softmax over all experts.
struct Mixture {
  std::string_view block = {};                   // empty: every layer has an MLP
  std::string_view count_field = "num_experts";  // or num_local_experts
  std::string_view width_field = {};             // of one expert
  std::string_view normalise_field = {};         // missing: false; empty: the chosen sum to 1
  MlpNames names = {};
  bool has_dense_layers = false;  // as `decoder_sparse_step` and `mlp_only_layers` say
};

struct PlainDecoder;

// The sources of a part that only one architecture has.
struct PlainContext {
  const PlainDecoder& decoder;
  const Config& config;
  Weights weights;  // of the layer
  int32_t layer = 0;
};

std::unique_ptr<Block> read_plain_feed(const PlainContext& context);
std::vector<PlainLayer> read_plain_layers(const PlainDecoder& decoder, const Config& config);

// The defaults are Llama's.
struct PlainDecoder {
  // Embedding, residual stream and head.
  bool tied_by_default = false;    // without `tie_word_embeddings`
  bool scales_embeddings = false;  // embeddings times sqrt(hidden)
  // `embedding_multiplier`, `residual_multiplier`, `attention_multiplier`, `logits_scaling`.
  bool has_multipliers = false;
  bool has_logit_cap = false;   // `final_logit_softcapping`
  float default_logit_cap = 0;  // without the field; 0: none

  // Norms.
  NormNames norms = {};
  bool norms_plus_one = false;  // times (1 + weight)

  // Attention.
  AttentionDefaults heads = {};
  Bias qkv_bias = Bias::optional;
  Bias o_bias = Bias::optional;
  bool fuses_qkv = false;
  QkNorm qk_norm = QkNorm::none;
  bool has_sinks = false;
  bool has_attention_cap = false;     // `attn_logit_softcapping`
  float default_attention_cap = 0;    // without the field; 0: none
  std::string_view scale_field = {};  // its 1 / sqrt scales the scores; empty: head_dim does
  int32_t default_scale = 0;          // without the field
  // Changes the attention of a layer in what only one architecture has.
  void (*adjust_attention)(const PlainContext& context, SelfAttentionParts& parts) = nullptr;

  // Positions.
  RopeDefaults rope = {};
  bool rope_by_layer_type = false;  // layers with a window have `sliding_rope`
  RopeDefaults sliding_rope = {};
  kernels::RopeLayout rope_layout = kernels::RopeLayout::half_split;
  bool skips_rope = false;  // on the layers that `no_rope_layers` says

  // Layers.
  Windows windows = {};
  std::vector<PlainLayer> (*read_layers)(const PlainDecoder& decoder,
                                         const Config& config) = read_plain_layers;

  // Feed-forward block.
  std::string_view activation_field = "hidden_act";
  std::string_view activation_name = "silu";
  kernels::Activation activation = kernels::Activation::silu;
  bool has_mlp_bias = false;  // reads `mlp_bias`
  MlpNames mlp = {};
  Mixture mixture = {};
  std::unique_ptr<Block> (*read_feed)(const PlainContext& context) = read_plain_feed;

  // An option that transformers has and nothing here implements: it must be false.
  std::string_view refused_option = {};
};

std::unique_ptr<Model> load_plain_decoder(const PlainDecoder& decoder, const Config& config,
                                          Checkpoint checkpoint,
                                          std::shared_ptr<ModelDevice> device);

// The loader of one table, as ModelEntry::load.
template <const PlainDecoder& kDecoder>
std::unique_ptr<Model> load_plain(const Config& config, Checkpoint checkpoint,
                                  std::shared_ptr<ModelDevice> device) {
  return load_plain_decoder(kDecoder, config, std::move(checkpoint), std::move(device));
}

// `no_rope_layers` (1: this layer has positions), or all but every `no_rope_layer_interval`-th.
std::vector<bool> read_rope_layers(const Config& config);
// Whether a layer has an MLP where others have mixtures: all but every `decoder_sparse_step`-th,
// and `mlp_only_layers`.
bool is_dense_layer(const Config& config, int32_t layer);

}  // namespace fovea
