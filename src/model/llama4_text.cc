// SPDX-License-Identifier: Apache-2.0
// Llama 4, text part. Most layers rotate q and k (interleaved pairs), normalise them afterwards and
// attend inside aligned chunks. At intervals, a layer without positions sees all keys and scales
// its queries with their position (arXiv:2501.19399). Some layers are mixtures of experts with a
// shared expert; the router scales the experts' input.
#include "model/architectures.h"
#include "model/plain_decoder.h"
#include "model/shard.h"

namespace fovea {
namespace {

MoeParts read_moe(const JsonObject& config, const Weights& weights, int64_t hidden) {
  const int64_t experts = config.integer("num_local_experts", 1, kernels::kMaxExperts);
  const int64_t width = read_size(config, "intermediate_size");
  const Weights stack = weights["experts"];
  MoeParts parts;
  parts.router = weights.linear("router", experts, hidden);
  parts.routing.score = kernels::MoeScore::sigmoid;
  parts.routing.top_k = static_cast<int32_t>(config.integer("num_experts_per_tok", 1, experts));
  std::vector<MlpParts> mlps;
  const ShardRange own = experts_of(experts, weights.device());
  for (int64_t e = own.begin; e < own.begin + own.count; ++e) {
    MlpParts& expert = mlps.emplace_back();
    expert.gate = stack.stacked("gate_up_proj", e, experts, hidden, 2 * width);
    expert.down = stack.stacked("down_proj", e, experts, width, hidden);
    shard_expert(expert, weights.device());
  }
  parts.experts = weights.device().place(std::move(mlps), true);
  parts.shared = read_mlp(weights["shared_expert"], hidden, width);
  return parts;
}

// Reads which layers are mixtures: `moe_layers`, or every `interleave_moe_layer_step`-th.
std::vector<bool> read_moe_layers(const JsonObject& config) {
  const int32_t layers = read_layers(config);
  std::vector<bool> is_moe(static_cast<size_t>(layers));
  if (config.has("moe_layers")) {
    for (const int64_t i : config.integers("moe_layers", 0, layers - 1)) {
      is_moe[static_cast<size_t>(i)] = true;
    }
    return is_moe;
  }
  const int64_t step = config.integer_or("interleave_moe_layer_step", 1, 1, layers);
  for (int64_t i = step - 1; i < layers; i += step) is_moe[static_cast<size_t>(i)] = true;
  return is_moe;
}

int32_t read_chunk(const JsonObject& config) {
  constexpr int32_t kUsual = 8192;
  constexpr std::string_view kField = "attention_chunk_size";
  return config.contains(kField) ? read_size(config, kField) : kUsual;
}

std::unique_ptr<Block> read_feed(const PlainContext& context) {
  const JsonObject& config = context.config;
  const Weights weights = context.weights["feed_forward"];
  const int32_t hidden = read_size(config, "hidden_size");
  if (read_moe_layers(config)[static_cast<size_t>(context.layer)]) {
    return std::make_unique<Moe>(read_moe(config, weights, hidden));
  }
  return std::make_unique<Mlp>(
      read_mlp(weights, hidden, read_size(config, "intermediate_size_mlp")));
}

// Layers with positions attend inside chunks, unless `layer_types` says otherwise.
std::vector<PlainLayer> read_chunked_layers(const PlainDecoder&, const JsonObject& config) {
  constexpr std::string_view kChunked = "chunked_attention", kChunkSize = "attention_chunk_size";
  const std::vector<bool> has_rope = read_rope_layers(config);
  const bool has_chunks = config.has(kChunkSize) || !config.contains(kChunkSize);
  std::vector<std::string_view> pattern;
  for (const bool rotates : has_rope) {
    pattern.push_back(rotates && has_chunks ? kChunked : kFullAttention);
  }
  const auto types = read_layer_types(config, {kFullAttention, kChunked}, pattern);
  std::vector<PlainLayer> layers(has_rope.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].rotates = has_rope[i];
    if (types[i] == kChunked) layers[i].chunk = read_chunk(config);
  }
  return layers;
}

// Layers with rotation normalise q and k afterwards; other layers scale q with its position.
void add_head_steps(const PlainContext& context, SelfAttentionParts& parts) {
  const JsonObject& config = context.config;
  const bool rotates = static_cast<bool>(parts.q_steps.rotary);
  if (rotates && config.boolean_or("use_qk_norm", true)) {
    parts.q_steps.l2_epsilon = parts.k_steps.l2_epsilon = read_epsilon(config);
  }
  if (!rotates && config.boolean_or("attn_temperature_tuning", true)) {
    parts.q_steps.scale.factor = static_cast<float>(config.number_or("attn_scale", 0.1, 0, 1e3));
    parts.q_steps.scale.floor_scale =
        static_cast<float>(read_positive(config, "floor_scale", 8192));
  }
}

constexpr PlainDecoder kLlama4 = {
    .heads = {.kv_heads = 8, .head_dim = 128},
    .adjust_attention = add_head_steps,
    .rope = {.theta = 500000},
    .rope_layout = kernels::RopeLayout::interleaved,
    .read_layers = read_chunked_layers,
    .read_feed = read_feed,
};

}  // namespace

std::unique_ptr<Model> load_llama4_text(const JsonObject& config, Checkpoint checkpoint,
                                        std::shared_ptr<ModelDevice> device) {
  require_text(config, "model_type", "llama4_text");
  return load_plain_decoder(kLlama4, config, std::move(checkpoint), std::move(device));
}

}  // namespace fovea
