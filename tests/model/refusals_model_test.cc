// SPDX-License-Identifier: Apache-2.0
// Configs that do not fit their weights or request unsupported features are refused by name.
#include <gtest/gtest.h>

#include <ctime>
#include <ostream>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "model/model.h"
#include "patched_model.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

struct Refusal {
  const char* name;
  const char* model;
  const char* patch;
  ErrorCode code;
  const char* message;  // a part of it
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

class Refusals : public testing::TestWithParam<Refusal> {};

TEST_P(Refusals, NameTheField) {
  const Refusal& refusal = GetParam();
  const PatchedModel model(refusal.model, nlohmann::json::parse(refusal.patch));
  ThreadPool threads(1);
  test::expect_error(refusal.code, refusal.message, [&] { load_model(model.folder(), threads); });
}

constexpr ErrorCode kCorrupt = ErrorCode::corrupt_file, kUnsupported = ErrorCode::unsupported;

constexpr Refusal kRefusals[] = {
    {"UnknownArchitecture", "llama", R"({"architectures": ["RwkvForCausalLM"]})", kUnsupported,
     "the architecture is 'RwkvForCausalLM'; known are LlamaForCausalLM, MistralForCausalLM"},
    {"NoArchitecture", "llama", R"({"architectures": []})", kUnsupported, "the architecture is ''"},
    {"Quantised", "gpt_oss", R"({"quantization_config": {"quant_method": "mxfp4"}})", kUnsupported,
     "quantization_config"},
    {"DualChunk", "qwen3", R"({"dual_chunk_attention_config": {"chunk_size": 262144}})",
     kUnsupported, "dual_chunk_attention_config is set"},
    {"Activation", "llama", R"({"hidden_act": "relu"})", kUnsupported,
     "hidden_act is 'relu'; supported is 'silu'"},
    {"RopeType", "qwen3", R"({"rope_parameters": {"rope_type": "proportional"}})", kUnsupported,
     "rope_type is 'proportional'; supported are default, linear, dynamic, llama3, yarn, longrope"},
    {"RopeTypeNull", "llama", R"({"rope_parameters": {"rope_type": "null"}})", kCorrupt,
     "rope_parameters.rope_type is null"},
    {"RopeFactor", "gpt_oss", R"({"rope_parameters": {"factor": 0.0}})", kCorrupt, "factor is 0"},
    {"YarnWithoutFactor", "llama", R"({"rope_parameters": {"rope_type": "yarn"}})", kCorrupt,
     "rope_parameters.factor is missing, must be set"},
    {"LinearWithoutFactor", "llama", R"({"rope_parameters": {"rope_type": "linear"}})", kCorrupt,
     "rope_parameters.factor is missing, must be set"},
    {"LinearFactorNull", "llama", R"({"rope_scaling": {"rope_type": "linear", "factor": "null"}})",
     kCorrupt, "rope_scaling.factor is null"},
    {"DynamicWithoutFactor", "llama", R"({"rope_parameters": {"rope_type": "dynamic"}})", kCorrupt,
     "rope_parameters.factor is missing"},
    {"Llama3WithoutLowFactor", "llama",
     R"({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}})",
     kCorrupt, "rope_parameters.low_freq_factor is missing, must be set"},
    {"Llama3Factors", "llama",
     R"({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 1.0,
         "low_freq_factor": 1.0}})",
     kCorrupt,
     "rope_parameters.high_freq_factor is 1.0, must be above low_freq_factor, which is 1"},
    {"LongropeWithoutFactors", "llama",
     R"({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}})", kCorrupt,
     "rope_parameters.short_factor is an array of 1, must be an array of 32"},
    {"RopeByLayerType", "qwen3",
     R"({"rope_parameters": {"full_attention": {"rope_type": "default"}}})", kCorrupt,
     "rope_parameters.full_attention is an object, must be a value"},
    {"RopeThetaNull", "llama", R"({"rope_parameters": {"rope_theta": "null"}})", kCorrupt,
     "rope_parameters.rope_theta is null"},
    {"OlderRopeThetaNull", "llama", R"({"rope_parameters": null, "rope_theta": "null"})", kCorrupt,
     "config.json: rope_theta is null"},
    {"RopeThetaOfOne", "llama", R"({"rope_parameters": {"rope_theta": 1.0}})", kCorrupt,
     "rope_parameters.rope_theta is 1.0, must be a number from"},
    {"PartialRotation", "llama", R"({"partial_rotary_factor": 0.5})", kUnsupported,
     "partial_rotary_factor is 0.5; this architecture rotates whole heads"},
    {"WindowNull", "gemma2", R"({"sliding_window": "null"})", kCorrupt,
     "sliding_window is null, must be set, as some layers are sliding_attention"},
    {"WindowsWithoutTheSwitch", "qwen3",
     R"({"layer_types": ["sliding_attention", "full_attention", "full_attention",
                         "full_attention"], "sliding_window": 4, "use_sliding_window": false})",
     kCorrupt, "use_sliding_window is false, must be true, as layer_types holds sliding_attention"},
    {"Layers", "llama", R"({"num_hidden_layers": 16777216})", kCorrupt,
     "num_hidden_layers is 16777216, must be an integer from 1 to 16384"},
    {"Epsilon", "llama", R"({"rms_norm_eps": 1e300})", kCorrupt, "rms_norm_eps is 1e+300"},
    {"FinalCap", "gemma2", R"({"final_logit_softcapping": -30})", kCorrupt,
     "final_logit_softcapping is -30, must be a number from"},
    {"AttentionCap", "gemma2", R"({"attn_logit_softcapping": 0})", kCorrupt,
     "attn_logit_softcapping is 0"},
    {"SwigluLimit", "gpt_oss", R"({"swiglu_limit": -1.0})", kCorrupt, "swiglu_limit is -1.0"},
    {"LayerTypes", "gemma2", R"({"layer_types": ["full_attention"]})", kCorrupt,
     "config.json: layer_types is an array of 1, must be an array of 4"},
    {"LayerType", "qwen3_next", R"({"num_hidden_layers": 1, "layer_types": ["mamba"]})",
     kUnsupported, "layer_types holds 'mamba'"},
    {"HiddenSize", "llama", R"({"hidden_size": 256})", kCorrupt,
     "'model.embed_tokens.weight' has shape [2048, 128], must be [2048, 256]"},
    {"TooManyLayers", "llama", R"({"num_hidden_layers": 5})", kCorrupt,
     "'model.layers.4.self_attn.q_proj.weight' is missing"},
    {"NegativeSize", "llama", R"({"intermediate_size": -1})", kCorrupt, "intermediate_size is -1"},
    {"Groups", "llama", R"({"num_key_value_heads": 3})", kCorrupt,
     "num_attention_heads is 4, must be a multiple of num_key_value_heads, 3"},
    {"Bias", "llama", R"({"attention_bias": true})", kCorrupt,
     "'model.layers.0.self_attn.q_proj.bias' is missing"},
    {"Head", "gpt_oss", R"({"vocab_size": 1000})", kCorrupt, "must be [1000, 128]"},
    {"TopK", "gpt_oss", R"({"num_experts_per_tok": 5})", kCorrupt, "num_experts_per_tok is 5"},
    {"ExpertGroups", "deepseek_v3", R"({"n_group": 3})", kCorrupt,
     "n_routed_experts is 8, must be a multiple of n_group, 3"},
    {"LatentRank", "deepseek_v3", R"({"kv_lora_rank": 256})", kCorrupt,
     "'model.layers.0.self_attn.kv_a_proj_with_mqa.weight' has shape [576, 128], must be [320, "
     "128]"},
    {"QueryRank", "deepseek_v3", R"({"q_lora_rank": null})", kCorrupt, "q_lora_rank is missing"},
    {"ActivationOfMistral", "mistral", R"({"hidden_act": "gelu"})", kUnsupported,
     "hidden_act is 'gelu'; supported is 'silu'"},
    {"TopKOfMixtral", "mixtral", R"({"num_experts_per_tok": 5})", kCorrupt,
     "num_experts_per_tok is 5"},
    {"TwoCountsOfExperts", "qwen3_moe", R"({"num_local_experts": 4})", kCorrupt,
     "num_local_experts is 4, must be 8 as num_experts is"},
    {"SwitchedOffWindowsOfQwen2", "qwen2",
     R"({"use_sliding_window": false, "layer_types": ["sliding_attention", "full_attention",
         "full_attention", "full_attention"]})",
     kCorrupt, "use_sliding_window is false, must be true, as layer_types holds sliding_attention"},
    {"SwitchedOffWindowsOfSmolLm3", "smollm3",
     R"({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention",
         "full_attention", "full_attention"]})",
     kCorrupt, "use_sliding_window is missing, must be true"},
    {"WindowOfGemma3", "gemma3_text", R"({"sliding_window": "null"})", kCorrupt,
     "sliding_window is null, must be set, as some layers are sliding_attention"},
    {"BothWaysOfGemma3", "gemma3_text", R"({"use_bidirectional_attention": true})", kUnsupported,
     "use_bidirectional_attention is true; supported is false"},
    {"ActivationOfGemma3", "gemma3_text", R"({"hidden_activation": "gelu"})", kUnsupported,
     "hidden_activation is 'gelu'; supported is 'gelu_pytorch_tanh'"},
    {"PartOfAHeadOfGlm4", "glm4", R"({"partial_rotary_factor": 0.3})", kCorrupt,
     "partial_rotary_factor is 0.3"},
    {"ResidualMultiplier", "granite", R"({"residual_multiplier": 0.0})", kCorrupt,
     "residual_multiplier is 0"},
    {"LogitsScaling", "granite", R"({"logits_scaling": -8.0})", kCorrupt, "logits_scaling is -8"},
    {"MethodOfDeepseekV2", "deepseek_v2", R"({"topk_method": "noaux_tc"})", kUnsupported,
     "topk_method is 'noaux_tc'; supported are 'greedy' and 'group_limited_greedy'"},
    {"ScoresOfDeepseekV2", "deepseek_v2", R"({"scoring_func": "sigmoid"})", kUnsupported,
     "scoring_func is 'sigmoid'; supported is 'softmax'"},
    {"NormOfDeepseekV2", "deepseek_v2", R"({"norm_topk_prob": true})", kUnsupported,
     "norm_topk_prob is true; supported is false"},
    {"FrequencyOfMixtures", "deepseek_v2", R"({"moe_layer_freq": 2})", kUnsupported,
     "moe_layer_freq is 2; supported is 1"},
    {"GroupsOfDeepseekV2", "deepseek_v2", R"({"n_group": 3})", kCorrupt,
     "n_routed_experts is 8, must be a multiple of n_group, 3"},
    {"NotText", "llama4_text", R"({"model_type": "llama4"})", kUnsupported,
     "model_type is 'llama4'; supported is 'llama4_text'"},
    {"RopeLayers", "llama4_text", R"({"no_rope_layers": [1, 1]})", kCorrupt,
     "no_rope_layers is an array of 2, must be an array of 4"},
    {"Rotary", "qwen3_next", R"({"rope_parameters": {"partial_rotary_factor": 1.5}})", kCorrupt,
     "partial_rotary_factor is 1.5"},
    {"DeltaHeads", "qwen3_next", R"({"linear_num_key_heads": 3})", kCorrupt,
     "linear_num_value_heads is 4, must be a multiple of linear_num_key_heads, 3"},
    {"Convolution", "qwen3_next", R"({"linear_conv_kernel_dim": 3})", kCorrupt,
     "'model.layers.0.linear_attn.conv1d.weight' has shape [512, 1, 4], must be [512, 1, 3]"},
    {"Experts", "granitemoehybrid", R"({"num_local_experts": 4})", kUnsupported,
     "num_local_experts is 4; supported is 0"},
    {"MambaHeads", "granitemoehybrid", R"({"mamba_n_heads": 24})", kCorrupt,
     "mamba_n_heads is 24, must be a divisor of mamba_expand * hidden_size, 256"},
    {"MambaGroups", "granitemoehybrid", R"({"mamba_n_groups": 3})", kCorrupt,
     "mamba_n_heads is 16, must be a multiple of mamba_n_groups, 3"},
    {"MambaHeadDim", "granitemoehybrid", R"({"mamba_d_head": 32})", kCorrupt,
     "mamba_d_head is 32, must be mamba_expand * hidden_size / mamba_n_heads, 16"},
    {"TimeSteps", "granitemoehybrid", R"({"time_step_limit": [2.0, 1.0]})", kCorrupt,
     "time_step_limit is an array of 2, must be an array of two numbers, the smaller one first"},
    {"KimiPositions", "kimi_linear", R"({"mla_use_nope": false})", kUnsupported, "mla_use_nope"},
    {"KimiRouter", "kimi_linear", R"({"moe_router_activation_func": "softmax"})", kUnsupported,
     "moe_router_activation_func is 'softmax'"},
    {"KimiGroups", "kimi_linear", R"({"num_expert_group": 3})", kCorrupt,
     "num_experts is 8, must be a multiple of num_expert_group, 3"},
    {"KimiLayers", "kimi_linear",
     R"({"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3],
                                 "head_dim": 32, "num_heads": 8, "short_conv_kernel_size": 4}})",
     kCorrupt, "must be all layers that full_attn_layers does not list"},
    {"KimiLayerTwice", "kimi_linear",
     R"({"linear_attn_config": {"kda_layers": [1, 2, 3, 4], "full_attn_layers": [3],
                                 "head_dim": 32, "num_heads": 8, "short_conv_kernel_size": 4}})",
     kCorrupt, "full_attn_layers is an array of 1, must be without 3, listed before"},
    {"KimiLayerType", "kimi_linear",
     R"({"layer_types": ["mamba", "full_attention", "full_attention", "full_attention"]})",
     kUnsupported, "layer_types holds 'mamba'"},
    {"KimiFeeds", "kimi_linear", R"({"mlp_layer_types": ["dense"]})", kCorrupt,
     "mlp_layer_types is an array of 1, must be an array of 4 times dense or sparse"},
    {"MambaWidth", "mamba", R"({"intermediate_size": 128})", kCorrupt,
     "intermediate_size is 128, must be expand * hidden_size, 192"},
    {"MambaSteps", "mamba", R"({"time_step_rank": "full"})", kUnsupported,
     "time_step_rank is 'full'"},
    {"MambaStepRank", "mamba", R"({"time_step_rank": 8})", kCorrupt,
     "'backbone.layers.0.mixer.x_proj.weight' has shape [32, 192], must be [24, 192]"},
    {"MambaActivation", "mamba", R"({"hidden_act": "gelu"})", kUnsupported, "hidden_act is 'gelu'"},
    {"MambaEpsilon", "mamba", R"({"layer_norm_epsilon": 2.0})", kCorrupt,
     "layer_norm_epsilon is 2.0, must be a number from"},
    {"ConvolutionOfOneTap", "lfm2", R"({"conv_L_cache": 1})", kCorrupt,
     "conv_L_cache is 1, must be an integer from 2 to 64"},
    {"TapsOfLfm2", "lfm2", R"({"conv_L_cache": 3})", kCorrupt,
     "'model.layers.0.conv.conv.weight' has shape [128, 1, 4], must be [128, 1, 3]"},
    {"WidthOfLfm2", "lfm2", R"({"block_ff_dim": 1, "block_multiple_of": 1})", kCorrupt,
     "block_ff_dim is 1, must be in [1, 16777216] when block_auto_adjust_ff_dim has adjusted it"},
    {"WidthFactorOfLfm2", "lfm2", R"({"block_ffn_dim_multiplier": "null"})", kCorrupt,
     "block_ffn_dim_multiplier is null"},
    {"LayersOfLfm2", "lfm2", R"({"full_attn_idxs": [2, 4]})", kCorrupt, "full_attn_idxs"},
    {"LayerTypeOfLfm2", "lfm2_plain", R"({"layer_types": ["conv", "mamba", "conv"]})", kUnsupported,
     "layer_types holds 'mamba'; supported here are full_attention, conv"},
    {"LayerTypesOfLfm2Moe", "lfm2_moe", R"({"layer_types": null, "full_attn_idxs": [2]})", kCorrupt,
     "layer_types is missing, must be set"},
    {"TopKOfLfm2Moe", "lfm2_moe", R"({"num_experts_per_tok": 9})", kCorrupt,
     "num_experts_per_tok is 9"},
    {"ScalingOfLfm2Moe", "lfm2_moe", R"({"routed_scaling_factor": 0.0})", kCorrupt,
     "routed_scaling_factor is 0"},
    {"HybridPositions", "granitemoehybrid", R"({"position_embedding_type": "alibi"})", kUnsupported,
     "position_embedding_type is 'alibi'"},
};

INSTANTIATE_TEST_SUITE_P(Models, Refusals, testing::ValuesIn(kRefusals),
                         [](const auto& test) { return std::string(test.param.name); });

// A list of ids of the maximal length.
TEST(ManyEosTokens, AreReadInTimeProportionalToTheList) {
  const auto load_time = [](int count) {
    std::vector<int> ids;
    for (int i = 0; i < count; ++i) ids.push_back(i % 2048);
    const PatchedModel model("llama", {{"eos_token_id", ids}});
    ThreadPool threads(1);
    const std::clock_t begin = std::clock();
    EXPECT_EQ(load_model(model.folder(), threads)->info().eos_tokens.size(), 2048u);
    return static_cast<double>(std::clock() - begin);
  };
  constexpr int kFew = 100'000, kTimes = 8;
  const double few = load_time(kFew);
  EXPECT_LT(load_time(kTimes * kFew), 3 * kTimes * few + CLOCKS_PER_SEC / 10.0);
}

class DamagedConfigs : public testing::TestWithParam<std::string> {};

// Replaces every field of a config in turn by invalid values: the model loads, or an Error explains
// why not.
TEST_P(DamagedConfigs, LoadOrThrowAnError) {
  const nlohmann::json values = {nullptr,
                                 -1,
                                 0,
                                 1,
                                 3,
                                 65536,
                                 1 << 24,
                                 1ll << 53,
                                 0.5,
                                 -1e300,
                                 true,
                                 "x",
                                 nlohmann::json::array(),
                                 {1, 2},
                                 nlohmann::json::object()};
  ThreadPool threads(1);
  // Short tables of rotary positions make loading cheap.
  nlohmann::json patch = {{"max_position_embeddings", 64}};
  const nlohmann::json config = PatchedModel(GetParam(), patch).config();
  int refused = 0;
  for (const auto& [field, original] : config.items()) {
    for (const nlohmann::json& value : values) {
      nlohmann::json damaged = patch;
      damaged[field] = value;
      const PatchedModel model(GetParam(), damaged);
      try {
        load_model(model.folder(), threads);
      } catch (const Error& error) {
        ++refused;
        EXPECT_GT(std::string(error.what()).size(), 10u);
      } catch (const std::exception& error) {
        ADD_FAILURE() << field << " = " << value << ": " << error.what();
      }
    }
  }
  EXPECT_GT(refused, 100);
}

INSTANTIATE_TEST_SUITE_P(Models, DamagedConfigs,
                         testing::Values("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3",
                                         "llama4_text", "qwen3_next"),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Goldens, DamagedConfigs, testing::ValuesIn(golden_models()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace fovea
