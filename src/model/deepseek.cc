// SPDX-License-Identifier: Apache-2.0
// DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): multi-head latent attention. A number
// of dense layers precede mixtures of experts with shared experts. V2 routes by softmax scores; V3
// routes by sigmoid scores plus a bias that affects the choice only.
#include "core/check.h"
#include "core/quote.h"
#include "model/architectures.h"
#include "model/eagle_parts.h"
#include "model/from_config.h"
#include "model/latent_attention.h"
#include "model/shard.h"

namespace fovea {
namespace {

enum class Generation : uint8_t { v2, v3 };

bool has_mlp_bias(const JsonObject& config, Generation generation) {
  return generation == Generation::v2 && config.boolean_or("mlp_bias", false);
}

int64_t read_expert_count(const JsonObject& config) {
  return config.integer("n_routed_experts", 1, kernels::kMaxExperts);
}

void read_groups(const JsonObject& config, kernels::MoeRoutingParams& routing) {
  const auto experts = static_cast<int32_t>(read_expert_count(config));
  routing.groups = static_cast<int32_t>(config.integer("n_group", 1, experts));
  routing.top_groups = static_cast<int32_t>(config.integer("topk_group", 1, routing.groups));
  if (experts % routing.groups != 0) {
    config.refuse("n_routed_experts", fmt::format("a multiple of n_group, {}", routing.groups));
  }
}

// Sigmoid scores, and a bias that affects the choice only.
void read_v3_routing(const JsonObject& config, const Weights& weights, MoeParts& parts) {
  parts.choice_bias =
      weights["gate"].vector("e_score_correction_bias", {read_expert_count(config)});
  parts.routing.score = kernels::MoeScore::grouped_sigmoid;
  parts.routing.normalise = config.boolean_or("norm_topk_prob", true);
  parts.routing.factor = static_cast<float>(config.number("routed_scaling_factor", 1e-6, 1e6));
  read_groups(config, parts.routing);
}

// Softmax scores, over all experts or only those in the best groups.
void read_v2_routing(const JsonObject& config, MoeParts& parts) {
  const std::string method = config.text_or("topk_method", "greedy");
  parts.routing.factor =
      static_cast<float>(config.number_or("routed_scaling_factor", 1, 1e-6, 1e6));
  parts.routing.score = kernels::MoeScore::softmax;
  if (method == "greedy") return;
  if (method != "group_limited_greedy") {
    fail(ErrorCode::unsupported,
         "topk_method is {}; supported are 'greedy' and 'group_limited_greedy'", quote(method));
  }
  parts.routing.score = kernels::MoeScore::grouped_softmax;
  read_groups(config, parts.routing);
}

MoeParts read_moe(const JsonObject& config, const Weights& weights, Generation generation) {
  const int64_t hidden = read_size(config, "hidden_size");
  const int64_t experts = read_expert_count(config);
  const int64_t width = read_size(config, "moe_intermediate_size");
  MoeParts parts;
  parts.router = weights.linear("gate", experts, hidden);
  if (generation == Generation::v2) {
    read_v2_routing(config, parts);
  } else {
    read_v3_routing(config, weights, parts);
  }
  const int64_t reachable = experts / parts.routing.groups * parts.routing.top_groups;
  parts.routing.top_k = static_cast<int32_t>(config.integer("num_experts_per_tok", 1, reachable));
  parts.experts = weights.device().place(read_experts(weights, experts, hidden, width), false);
  const int64_t shared = config.integer("n_shared_experts", 0, kernels::kMaxExperts);
  if (shared > 0) {
    parts.shared = read_mlp(weights["shared_experts"], hidden, shared * width,
                            has_mlp_bias(config, generation));
  }
  return parts;
}

std::unique_ptr<Block> read_feed(const JsonObject& config, const Weights& weights, int64_t layer,
                                 Generation generation) {
  const int64_t layers = read_layers(config);
  const int64_t dense_layers = generation == Generation::v2
                                   ? config.integer_or("first_k_dense_replace", 0, 0, layers)
                                   : config.integer("first_k_dense_replace", 0, layers);
  if (layer >= dense_layers) {
    return std::make_unique<Moe>(read_moe(config, weights, generation));
  }
  return std::make_unique<Mlp>(read_mlp(weights, read_size(config, "hidden_size"),
                                        read_size(config, "intermediate_size"),
                                        has_mlp_bias(config, generation)));
}

kernels::RopeLayout rope_layout(const JsonObject& config, Generation generation) {
  const bool is_interleaved =
      generation == Generation::v2 || config.boolean_or("rope_interleave", true);
  return is_interleaved ? kernels::RopeLayout::interleaved : kernels::RopeLayout::half_split;
}

void refuse_unknown_options(const JsonObject& config, Generation generation) {
  require_text(config, "hidden_act", "silu");
  if (config.integer_or("moe_layer_freq", 1, 1, 1 << 20) != 1) {
    fail(ErrorCode::unsupported, "moe_layer_freq is {}; supported is 1",
         config.integer("moe_layer_freq", 1, 1 << 20));
  }
  if (generation == Generation::v2) {
    require_text(config, "scoring_func", "softmax");
    // The models' original code divides by the sum; transformers does not.
    require_boolean(config, "norm_topk_prob", false);
  } else {
    require_text(config, "scoring_func", "sigmoid");
    require_text(config, "topk_method", "noaux_tc");
  }
}

std::unique_ptr<Model> load_deepseek(const JsonObject& config, Checkpoint checkpoint,
                                     std::shared_ptr<ModelDevice> device, Generation generation) {
  refuse_unknown_options(config, generation);
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device));
  const int32_t hidden = parts.info.hidden;
  const kernels::RopeSpec rope = read_rope(config, read_head_dim(config, "qk_rope_head_dim"));
  AttentionSpec spec = read_latent_spec(config, rope);
  spec.has_rope = rotates_in_backend(*parts.device);
  const Rotary rotary = make_rotary(rope, parts, rope_layout(config, generation));

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    const LayerSlot slot = join_group(parts.info, i, shard_spec(spec, *parts.device));
    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm(config, weights, "input_layernorm", hidden);
    layer.mixer = read_latent_attention(config, weights["self_attn"], spec, slot, rotary);
    layer.feed_norm = read_norm(config, weights, "post_attention_layernorm", hidden);
    layer.feed = read_feed(config, weights["mlp"], i, generation);
  }
  return make_decoder(std::move(parts));
}

}  // namespace

void read_deepseek_mtp(const JsonObject& config, const Weights& layer, EagleParts& parts) {
  constexpr Generation kV3 = Generation::v3;
  refuse_unknown_options(config, kV3);
  const int64_t hidden = parts.info.hidden;
  parts.embedding_norm = read_norm(config, layer, "enorm", hidden);
  parts.hidden_norm = read_norm(config, layer, "hnorm", hidden);
  parts.join = layer.linear("eh_proj", hidden, 2 * hidden);
  parts.mixer_norm = read_norm(config, layer, "input_layernorm", hidden);
  parts.feed_norm = read_norm(config, layer, "post_attention_layernorm", hidden);
  parts.final_norm = read_norm(config, layer["shared_head"], "norm", hidden);

  const kernels::RopeSpec rope = read_rope(config, read_head_dim(config, "qk_rope_head_dim"));
  make_rope_table(rope, 1);  // throws if no table can be made
  AttentionSpec spec = read_latent_spec(config, rope);
  spec.has_rope = rotates_in_backend(*parts.device);
  spec.q_dtype = parts.device->activation_dtype();
  const LayerSlot slot = join_group(parts.info, 0, spec);
  parts.rotary = std::make_unique<RotaryTable>(RotaryTable{rope, {}});
  const Rotary rotary = {&parts.rotary->view, rope_layout(config, kV3)};
  parts.mixer = read_latent_attention(config, layer["self_attn"], spec, slot, rotary);
  parts.feed = read_feed(config, layer["mlp"], read_layers(config), kV3);
}

std::unique_ptr<Model> load_deepseek_v2(const JsonObject& config, Checkpoint checkpoint,
                                        std::shared_ptr<ModelDevice> device) {
  return load_deepseek(config, std::move(checkpoint), std::move(device), Generation::v2);
}

std::unique_ptr<Model> load_deepseek_v3(const JsonObject& config, Checkpoint checkpoint,
                                        std::shared_ptr<ModelDevice> device) {
  return load_deepseek(config, std::move(checkpoint), std::move(device), Generation::v3);
}

}  // namespace fovea
