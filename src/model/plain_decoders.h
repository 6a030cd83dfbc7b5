// SPDX-License-Identifier: Apache-2.0
// Tables of the plain decoders. Each lists the differences from Llama 2 and 3 (arXiv:2302.13971,
// arXiv:2407.21783).
#pragma once

#include "model/plain_decoder.h"

namespace fovea {

inline constexpr PlainDecoder kLlama = {.has_mlp_bias = true};

// arXiv:2310.06825
inline constexpr PlainDecoder kMistral = {
    .heads = {.kv_heads = 8},
    .qkv_bias = Bias::never,
    .o_bias = Bias::never,
    .windows = {.where = Windows::Where::everywhere, .default_size = 4096},
};

// arXiv:2401.04088
inline constexpr PlainDecoder kMixtral = {
    .heads = {.kv_heads = 8},
    .qkv_bias = Bias::never,
    .o_bias = Bias::never,
    .rope = {.theta = 1e6},
    .windows = {.where = Windows::Where::everywhere},
    .mixture = {.block = "block_sparse_moe",
                .count_field = "num_local_experts",
                .width_field = "intermediate_size",
                .names = {.gate = "w1", .up = "w3", .down = "w2"}},
};

// arXiv:2407.10671
inline constexpr PlainDecoder kQwen2 = {
    .heads = {.kv_heads = 32},
    .qkv_bias = Bias::always,
    .o_bias = Bias::never,
    .windows = {.where = Windows::Where::upper_layers, .default_size = 4096, .has_switch = true},
};

// arXiv:2505.09388
inline constexpr PlainDecoder kQwen3 = {
    .heads = {.kv_heads = 32, .head_dim = 128},
    .qk_norm = QkNorm::heads,
    .windows = {.where = Windows::Where::upper_layers, .default_size = 4096, .has_switch = true},
};

inline constexpr PlainDecoder kQwen3Moe = {
    .heads = {.kv_heads = 4},
    .qk_norm = QkNorm::heads,
    .windows = {.where = Windows::Where::everywhere, .default_size = 4096, .has_switch = true},
    .mixture = {.block = "mlp",
                .width_field = "moe_intermediate_size",
                .normalise_field = "norm_topk_prob",
                .has_dense_layers = true},
};

// Gemma 2 and 3 have norms before and after each block.
inline constexpr NormNames kGemmaNorms = {.mixer_out = "post_attention_layernorm",
                                          .feed = "pre_feedforward_layernorm",
                                          .feed_out = "post_feedforward_layernorm"};

// arXiv:2408.00118
inline constexpr PlainDecoder kGemma2 = {
    .tied_by_default = true,
    .scales_embeddings = true,
    .has_logit_cap = true,
    .default_logit_cap = 30,
    .norms = kGemmaNorms,
    .norms_plus_one = true,
    .heads = {.kv_heads = 4, .head_dim = 256},
    .has_attention_cap = true,
    .default_attention_cap = 50,
    .scale_field = "query_pre_attn_scalar",
    .default_scale = 256,
    .windows = {.where = Windows::Where::between, .default_size = 4096},
    .activation_field = "hidden_activation",
    .activation_name = "gelu_pytorch_tanh",
    .activation = kernels::Activation::gelu_tanh,
    .refused_option = "use_bidirectional_attention",
};

// The text part of arXiv:2503.19786. Like transformers, ignores attn_logit_softcapping.
inline constexpr PlainDecoder kGemma3 = {
    .tied_by_default = true,
    .scales_embeddings = true,
    .has_logit_cap = true,
    .norms = kGemmaNorms,
    .norms_plus_one = true,
    .heads = {.kv_heads = 4, .head_dim = 256},
    .qk_norm = QkNorm::heads,
    .scale_field = "query_pre_attn_scalar",
    .default_scale = 256,
    .rope = {.theta = 1e6},
    .rope_by_layer_type = true,
    .sliding_rope = {.theta_field = "rope_local_base_freq", .has_rope_scaling = false},
    .windows = {.where = Windows::Where::between,
                .default_size = 4096,
                .period = 6,
                .period_field = "sliding_window_pattern"},
    .activation_field = "hidden_activation",
    .activation_name = "gelu_pytorch_tanh",
    .activation = kernels::Activation::gelu_tanh,
    .refused_option = "use_bidirectional_attention",
};

// arXiv:2404.14219
inline constexpr PlainDecoder kPhi3 = {
    .qkv_bias = Bias::never,
    .o_bias = Bias::never,
    .fuses_qkv = true,
    .rope = {.rotates_parts = true, .original_max_positions = 4096, .yarn_is_longrope = true},
    .windows = {.where = Windows::Where::everywhere},
    .mlp = {.gate = "gate_up_proj", .up = {}},
};

// arXiv:2501.00656
inline constexpr PlainDecoder kOlmo2 = {
    .norms = {.mixer = {},
              .mixer_out = "post_attention_layernorm",
              .feed = {},
              .feed_out = "post_feedforward_layernorm"},
    .qk_norm = QkNorm::rows,
};

// arXiv:2406.12793; GLM-4-0414 adds norms after the blocks.
inline constexpr PlainDecoder kGlm = {
    .heads = {.kv_heads = 2, .head_dim = 128},
    .qkv_bias = Bias::by_default,
    .o_bias = Bias::never,
    .rope = {.rotates_parts = true, .partial_rotary_factor = 0.5},
    .rope_layout = kernels::RopeLayout::interleaved,
    .mlp = {.gate = "gate_up_proj", .up = {}},
};
inline constexpr PlainDecoder kGlm4 = [] {
  PlainDecoder decoder = kGlm;
  decoder.norms.mixer_out = "post_self_attn_layernorm";
  decoder.norms.feed_out = "post_mlp_layernorm";
  return decoder;
}();

inline constexpr PlainDecoder kSmolLm3 = {
    .tied_by_default = true,
    .heads = {.kv_heads = 4},
    .rope = {.theta = 2e6},
    .skips_rope = true,
    .windows = {.where = Windows::Where::unrotated, .has_switch = true},
    .has_mlp_bias = true,
};

inline constexpr PlainDecoder kGranite = {.has_multipliers = true, .has_mlp_bias = true};

}  // namespace fovea
