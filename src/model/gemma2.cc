// SPDX-License-Identifier: Apache-2.0
// Gemma 2 (arXiv:2408.00118): norms in front of and behind each block, stored as weight - 1;
// embeddings times sqrt(hidden); soft caps on attention logits and on the final logits; sliding
// windows on every other layer; GELU-gated MLP.
#include <array>
#include <cmath>

#include "model/architectures.h"
#include "model/from_config.h"

namespace fovea {

std::unique_ptr<Model> load_gemma2(const Config& config, Checkpoint checkpoint,
                                   std::shared_ptr<ModelDevice> device) {
  constexpr std::array kPattern = {kSlidingAttention, kFullAttention};
  require_text(config, "hidden_activation", "gelu_pytorch_tanh");
  require_boolean(config, "use_bidirectional_attention", false);
  DecoderParts parts = read_decoder(config, std::move(checkpoint), std::move(device),
                                    {.tied_embeddings = true, .norms_plus_one = true});
  const int32_t hidden = parts.info.hidden;
  // The factor of a model that runs in fp32; one that runs in bf16 rounds it.
  parts.embedding_factor = std::sqrt(static_cast<float>(hidden));
  parts.logit_cap = read_cap(config, "final_logit_softcapping", 30);

  AttentionSpec full = read_attention(config, {.kv_heads = 4, .head_dim = 256});
  full.has_rope = rotates_in_backend(*parts.device);
  full.softmax_scale =
      1 / std::sqrt(static_cast<float>(read_size(config, "query_pre_attn_scalar")));
  full.logit_cap = read_cap(config, "attn_logit_softcapping", 50);
  const Rotary rotary = make_rotary(read_rope(config, full.head_dim), parts);
  const int32_t width = read_size(config, "intermediate_size");
  const auto specs = read_sliding_layers(config, full, kPattern, 4096);

  for (int32_t i = 0; i < parts.info.layers; ++i) {
    const Weights weights = parts.weights()["model.layers"][i];
    const AttentionSpec& spec = specs[static_cast<size_t>(i)];
    SelfAttentionParts attention = read_self_attention(config, weights["self_attn"], spec);
    attention.slot = join_group(parts.info, i, spec);
    attention.rotate(rotary);
    MlpParts mlp = read_mlp(weights["mlp"], hidden, width);
    mlp.activation = kernels::Activation::gelu_tanh;

    const auto norm = [&](std::string_view name) {
      return read_norm(config, weights, name, hidden, true);
    };
    DecoderLayer& layer = parts.layers.emplace_back();
    layer.mixer_norm = norm("input_layernorm");
    layer.mixer = std::make_unique<SelfAttention>(std::move(attention));
    layer.mixer_out_norm = norm("post_attention_layernorm");
    layer.feed_norm = norm("pre_feedforward_layernorm");
    layer.feed = std::make_unique<Mlp>(std::move(mlp));
    layer.feed_out_norm = norm("post_feedforward_layernorm");
  }
  return make_decoder(std::move(parts));
}

}  // namespace fovea
