// SPDX-License-Identifier: Apache-2.0
// Qwen3 (arXiv:2505.09388): Llama with an RMSNorm over every head of q and k before the rotation,
// and optionally sliding windows on some layers.
#include <algorithm>

#include "model/architectures.h"
#include "model/from_config.h"

namespace fovea {

std::unique_ptr<Model> load_qwen3(const Config& config, Checkpoint checkpoint,
                                  std::shared_ptr<ModelDevice> device) {
  constexpr int32_t kWindow = 4096;  // without sliding_window
  require_text(config, "hidden_act", "silu");
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device));
  const AttentionSpec full = read_attention(config, {.kv_heads = 32, .head_dim = 128});
  const Rotary rotary = make_rotary(read_rope(config, full.head_dim), parts);
  const int32_t hidden = parts.info.hidden;
  const int32_t width = read_size(config, "intermediate_size");
  std::vector<std::string_view> pattern(static_cast<size_t>(parts.info.layers), kFullAttention);
  const bool has_windows = config.boolean_or("use_sliding_window", false);
  if (has_windows && read_window(config, kWindow)) {
    const int64_t first = config.integer_or("max_window_layers", 28, 0, 1 << 20);
    std::fill(pattern.begin() + std::min<int64_t>(first, parts.info.layers), pattern.end(),
              kSlidingAttention);
  }
  const auto specs = read_sliding_layers(config, full, pattern, kWindow);
  if (!has_windows && std::ranges::any_of(specs, &AttentionSpec::window)) {
    config.refuse("use_sliding_window", "true, as layer_types holds sliding_attention");
  }

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    const Weights attention_weights = weights["self_attn"];
    const AttentionSpec& spec = specs[static_cast<size_t>(i)];
    SelfAttentionParts attention = read_self_attention(config, attention_weights, spec);
    attention.slot = join_group(parts.info, i, spec);
    attention.rotate(rotary);
    attention.q_steps.norm = read_norm(config, attention_weights, "q_norm", spec.head_dim);
    attention.k_steps.norm = read_norm(config, attention_weights, "k_norm", spec.head_dim);

    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm(config, weights, "input_layernorm", hidden);
    layer.mixer = std::make_unique<SelfAttention>(std::move(attention));
    layer.feed_norm = read_norm(config, weights, "post_attention_layernorm", hidden);
    layer.feed = std::make_unique<Mlp>(read_mlp(weights["mlp"], hidden, width));
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
