// SPDX-License-Identifier: Apache-2.0
// gpt-oss (arXiv:2508.10925) has attention sinks, sliding windows on every other layer, YaRN
// positions and biases everywhere. Its mixture of experts has a clamped SwiGLU with alternating
// gate and up columns.
#include "model/architectures.h"
#include "model/plain_decoder.h"
#include "model/shard.h"

namespace fovea {
namespace {

std::unique_ptr<Block> read_moe(const PlainContext& context) {
  const JsonObject& config = context.config;
  const Weights weights = context.weights["mlp"];
  const int64_t hidden = read_size(config, "hidden_size");
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
  const ShardRange own = experts_of(experts, weights.device());
  for (int64_t e = own.begin; e < own.begin + own.count; ++e) {
    MlpParts& expert = mlps.emplace_back();
    expert.gate = stack.stacked("gate_up_proj", e, experts, hidden, 2 * width);
    expert.gate.bias = gate_biases.data() + e * 2 * width;
    expert.down = stack.stacked("down_proj", e, experts, width, hidden);
    expert.down.bias = down_biases.data() + e * hidden;
    expert.alternates = true;
    expert.activation = kernels::Activation::clamped_swiglu;
    expert.bounds = bounds;
    shard_expert(expert, weights.device());
  }
  parts.experts = weights.device().place(std::move(mlps), false);
  return std::make_unique<Moe>(std::move(parts));
}

constexpr PlainDecoder kGptOss = {
    .heads = {.kv_heads = 8, .head_dim = 64},
    .qkv_bias = Bias::by_default,
    .o_bias = Bias::by_default,
    .has_sinks = true,
    .rope = {.theta = 150000,
             .parameters = R"({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                               "beta_slow": 1.0, "truncate": false,
                               "original_max_position_embeddings": 4096})"},
    .windows = {.where = Windows::Where::between, .default_size = 128},
    .read_feed = read_moe,
};

}  // namespace

std::unique_ptr<Model> load_gpt_oss(const JsonObject& config, Checkpoint checkpoint,
                                    std::shared_ptr<ModelDevice> device) {
  return load_plain_decoder(kGptOss, config, std::move(checkpoint), std::move(device));
}

}  // namespace fovea
