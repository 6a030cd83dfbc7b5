// SPDX-License-Identifier: Apache-2.0
// gpt-oss (arXiv:2508.10925): attention sinks, sliding windows on every other layer, YaRN
// positions, biases everywhere; a mixture of experts with a clamped SwiGLU whose gate and up
// columns alternate.
#include <array>

#include "model/architectures.h"
#include "model/from_config.h"

namespace fovea {
namespace {

MoeParts read_moe(const Config& config, const Weights& weights, int64_t hidden) {
  const int64_t experts = config.integer("num_local_experts", 1, kernels::kMaxExperts);
  const int64_t width = read_size(config, "intermediate_size");
  const Weights stack = weights["experts"];
  MoeParts parts;
  parts.router = weights.linear("router", experts, hidden, true);
  parts.routing.score = kernels::MoeScore::topk_softmax;
  parts.routing.top_k = static_cast<int32_t>(config.integer("num_experts_per_tok", 1, experts));
  const auto gate_biases = stack.vector("gate_up_proj_bias", {experts, 2 * width});
  const auto down_biases = stack.vector("down_proj_bias", {experts, hidden});
  const auto bound = [&](std::string_view field, float fallback) {
    constexpr double kLow = 1e-3, kHigh = 1e6;
    return static_cast<float>(config.number_or(field, fallback, kLow, kHigh));
  };
  const kernels::SwigluBounds usual;
  const kernels::SwigluBounds bounds = {bound("swiglu_alpha", usual.alpha),
                                        bound("swiglu_limit", usual.limit)};
  std::vector<MlpParts> mlps;
  for (int64_t e = 0; e < experts; ++e) {
    MlpParts& expert = mlps.emplace_back();
    expert.gate = stack.stacked("gate_up_proj", e, experts, hidden, 2 * width);
    expert.gate.bias = gate_biases.data() + e * 2 * width;
    expert.down = stack.stacked("down_proj", e, experts, width, hidden);
    expert.down.bias = down_biases.data() + e * hidden;
    expert.alternates = true;
    expert.activation = kernels::Activation::clamped_swiglu;
    expert.bounds = bounds;
  }
  parts.experts = weights.device().place(std::move(mlps), false);
  return parts;
}

}  // namespace

std::unique_ptr<Model> load_gpt_oss(const Config& config, Checkpoint checkpoint,
                                    std::shared_ptr<ModelDevice> device) {
  constexpr std::array kPattern = {kSlidingAttention, kFullAttention};
  constexpr RopeDefaults kRope = {
      .theta = 150000,
      .parameters = R"({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "truncate": false, "original_max_position_embeddings": 4096})"};
  require_text(config, "hidden_act", "silu");
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device));
  const int32_t hidden = parts.info.hidden;
  AttentionSpec full = read_attention(config, {.kv_heads = 8, .head_dim = 64});
  full.has_sinks = true;
  full.has_rope = rotates_in_backend(*parts.device);
  const Rotary rotary = make_rotary(read_rope(config, full.head_dim, kRope), parts);
  const auto specs = read_sliding_layers(config, full, kPattern, 128);

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    const AttentionSpec& spec = specs[static_cast<size_t>(i)];
    SelfAttentionParts attention =
        read_self_attention(config, weights["self_attn"], spec, {.bias_by_default = true});
    attention.slot = join_group(parts.info, i, spec);
    attention.rotate(rotary);
    attention.sinks = weights["self_attn"].vector("sinks", {spec.q_heads});

    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm(config, weights, "input_layernorm", hidden);
    layer.mixer = std::make_unique<SelfAttention>(std::move(attention));
    layer.feed_norm = read_norm(config, weights, "post_attention_layernorm", hidden);
    layer.feed = std::make_unique<Moe>(read_moe(config, weights["mlp"], hidden));
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
