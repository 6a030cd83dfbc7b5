// SPDX-License-Identifier: Apache-2.0
// Llama 2 and 3 (arXiv:2302.13971, arXiv:2407.21783): the plain decoder. RMSNorm, grouped-query
// attention with rotary positions, SiLU-gated MLP.
#include "model/architectures.h"
#include "model/from_config.h"

namespace fovea {

std::unique_ptr<Model> load_llama(const Config& config, Checkpoint checkpoint,
                                  std::shared_ptr<ModelDevice> device) {
  require_text(config, "hidden_act", "silu");
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device));
  AttentionSpec spec = read_attention(config);
  spec.has_rope = rotates_in_backend(*parts.device);
  const Rotary rotary = make_rotary(read_rope(config, spec.head_dim), parts);
  const int32_t hidden = parts.info.hidden;
  const int32_t width = read_size(config, "intermediate_size");
  const bool mlp_bias = config.boolean_or("mlp_bias", false);

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    SelfAttentionParts attention = read_self_attention(config, weights["self_attn"], spec);
    attention.slot = join_group(parts.info, i, spec);
    attention.rotate(rotary);

    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = read_norm(config, weights, "input_layernorm", hidden);
    layer.mixer = std::make_unique<SelfAttention>(std::move(attention));
    layer.feed_norm = read_norm(config, weights, "post_attention_layernorm", hidden);
    layer.feed = std::make_unique<Mlp>(read_mlp(weights["mlp"], hidden, width, mlp_bias));
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
