// SPDX-License-Identifier: Apache-2.0
// Llama 4, text part. Most layers rotate q and k (interleaved pairs), normalise them afterwards and
// attend inside aligned chunks; every few layers there is one without positions that sees
// everything and scales its queries up with their position (arXiv:2501.19399). Every second layer
// or so is a mixture of experts whose router scales the expert's input, next to a shared expert.
#include "core/check.h"
#include "model/architectures.h"
#include "model/from_config.h"

namespace fovea {
namespace {

MoeParts read_moe(const Config& config, const Weights& weights, int64_t hidden) {
  const int64_t experts = config.integer("num_local_experts", 1, kernels::kMaxExperts);
  const int64_t width = read_size(config, "intermediate_size");
  const Weights stack = weights["experts"];
  MoeParts parts;
  parts.router = weights.linear("router", experts, hidden);
  parts.routing.score = kernels::MoeScore::sigmoid;
  parts.routing.top_k = static_cast<int32_t>(config.integer("num_experts_per_tok", 1, experts));
  std::vector<MlpParts> mlps;
  for (int64_t e = 0; e < experts; ++e) {
    MlpParts& expert = mlps.emplace_back();
    expert.gate = stack.stacked("gate_up_proj", e, experts, hidden, 2 * width);
    expert.down = stack.stacked("down_proj", e, experts, width, hidden);
  }
  parts.experts = weights.device().place(std::move(mlps), true);
  parts.shared = read_mlp(weights["shared_expert"], hidden, width);
  return parts;
}

// Which layers are mixtures: `moe_layers`, or every `interleave_moe_layer_step`-th.
std::vector<bool> read_moe_layers(const Config& config, int32_t layers) {
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

// Which layers rotate: `no_rope_layers` (1: this one does), or all but every fourth.
std::vector<bool> read_rope_layers(const Config& config, int32_t layers) {
  std::vector<bool> has_rope;
  if (!config.has("no_rope_layers") || config.integers("no_rope_layers", 0, 1).empty()) {
    const int64_t interval = config.integer_or("no_rope_layer_interval", 4, 1, 1 << 20);
    for (int32_t i = 0; i < layers; ++i) has_rope.push_back((i + 1) % interval != 0);
    return has_rope;
  }
  for (const int64_t rotates : config.integers("no_rope_layers", 0, 1)) {
    has_rope.push_back(rotates != 0);
  }
  if (has_rope.size() != static_cast<size_t>(layers)) {
    config.refuse("no_rope_layers", fmt::format("an array of {}", layers));
  }
  return has_rope;
}

int32_t read_chunk(const Config& config) {
  constexpr int32_t kUsual = 8192;
  constexpr std::string_view kField = "attention_chunk_size";
  return config.contains(kField) ? read_size(config, kField) : kUsual;
}

// Layers that rotate normalise q and k afterwards, the others scale q with its position.
void read_head_steps(const Config& config, SelfAttentionParts& parts) {
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

}  // namespace

std::unique_ptr<Model> load_llama4_text(const Config& config, Checkpoint checkpoint,
                                        std::shared_ptr<ModelDevice> device) {
  constexpr std::string_view kChunked = "chunked_attention";
  require_text(config, "model_type", "llama4_text");
  require_text(config, "hidden_act", "silu");
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device));
  const int32_t hidden = parts.info.hidden;
  const AttentionSpec full = read_attention(config, {.kv_heads = 8, .head_dim = 128});
  const Rotary rotary = make_rotary(read_rope(config, full.head_dim, {.theta = 500000}), parts,
                                    kernels::RopeLayout::interleaved);
  const std::vector<bool> has_rope = read_rope_layers(config, parts.info.layers);
  std::vector<std::string_view> pattern;
  constexpr std::string_view kChunkSize = "attention_chunk_size";
  const bool has_chunks = config.has(kChunkSize) || !config.contains(kChunkSize);
  for (const bool rotates : has_rope) {
    pattern.push_back(rotates && has_chunks ? kChunked : kFullAttention);
  }
  const auto types = read_layer_types(config, {kFullAttention, kChunked}, pattern);
  const std::vector<bool> is_moe = read_moe_layers(config, parts.info.layers);

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const auto index = static_cast<size_t>(i);
    const Weights weights = parts.weights()["model.layers"][i];
    AttentionSpec spec = full;
    if (types[index] == kChunked) spec.chunk = read_chunk(config);
    SelfAttentionParts attention = read_self_attention(config, weights["self_attn"], spec);
    attention.slot = join_group(parts.info, i, spec);
    if (has_rope[index]) attention.rotate(rotary);
    read_head_steps(config, attention);

    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm(config, weights, "input_layernorm", hidden);
    layer.mixer = std::make_unique<SelfAttention>(std::move(attention));
    layer.feed_norm = read_norm(config, weights, "post_attention_layernorm", hidden);
    const Weights feed = weights["feed_forward"];
    if (is_moe[index]) {
      layer.feed = std::make_unique<Moe>(read_moe(config, feed, hidden));
    } else {
      layer.feed =
          std::make_unique<Mlp>(read_mlp(feed, hidden, read_size(config, "intermediate_size_mlp")));
    }
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
