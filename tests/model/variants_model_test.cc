// SPDX-License-Identifier: Apache-2.0
// Options of configs that the checkpoints of testdata/models leave at their usual values. Each case
// changes a config and compares some logits with those that transformers 5.17 (models) and 5.24
// (goldens) compute from the same weights and config, in eager fp32.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <string>
#include <vector>

#include "model_driver.h"
#include "parity_limits.h"
#include "patched_model.h"
#include "support/reference_file.h"

namespace fovea {
namespace {

struct Variant {
  const char* name;
  const char* model;
  const char* patch;
  // Logits at the last token of prompt 2 for eight vocabulary entries: 100, 356, 612, ... of 2048
  // and 36, 100, 164, ... of 512.
  std::array<float, 8> logits;
};

void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }

class Variants : public testing::TestWithParam<Variant> {};

TEST_P(Variants, GiveTheReferenceLogits) {
  const Variant& variant = GetParam();
  const PatchedModel model(variant.model, nlohmann::json::parse(variant.patch));
  ThreadPool threads;
  ModelDriver driver(model.folder(), {.backend = "reference", .max_requests = 1}, threads);
  const std::vector<int32_t> tokens =
      values_of<int32_t>(reference_file(variant.model), "prompt_2.input_ids");
  const std::vector<ModelDriver::Work> work = {{driver.open(), tokens}};
  const std::span<const float> logits = driver.run(work, false);
  const size_t step = logits.size() / variant.logits.size();
  for (size_t i = 0; i < variant.logits.size(); ++i) {
    EXPECT_NEAR(logits[100 % step + step * i], variant.logits[i], ParityLimits{}.logit) << i;
  }
}

constexpr Variant kVariants[] = {
    {"Llama3Frequencies",
     "llama",
     R"({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}})",
     {-5.171464f, 2.482192f, -5.175011f, -0.669363f, -1.145381f, -0.021195f, 0.62634f, -2.477005f}},
    {"LinearFrequenciesInTheOlderSpelling",
     "llama",
     R"({"rope_parameters": null, "rope_theta": 10000.0,
         "rope_scaling": {"type": "linear", "factor": 4.0}})",
     {-5.103834f, 2.25496f, -5.657396f, -1.048139f, -1.269758f, -0.425151f, 0.583278f, -2.660483f}},
    {"WindowsOnSomeLayersOfQwen3",
     "qwen3",
     R"({"layer_types": ["sliding_attention", "full_attention", "full_attention",
                         "sliding_attention"], "sliding_window": 32, "use_sliding_window": true})",
     {-5.984063f, 1.179535f, -5.186357f, -2.210886f, -0.999767f, -0.895328f, -0.180144f,
      -1.720992f}},
    {"CapsAndScaleOfGemma2",
     "gemma2",
     R"({"layer_types": null, "sliding_window": 20, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 9.0, "query_pre_attn_scalar": 100})",
     {-5.39204f, 0.769508f, -3.942435f, -2.087304f, -1.456203f, -1.097096f, 0.645178f, -1.731176f}},
    {"TruncatedYarn",
     "gpt_oss",
     R"({"sliding_window": 48, "num_experts_per_tok": 3, "rope_parameters": {"truncate": null,
         "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
         "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.1}})",
     {-4.295444f, 1.919463f, -3.881775f, -1.723002f, -2.587826f, -0.998598f, -0.346126f,
      -1.269632f}},
    {"GroupsAndYarnOfDeepseek",
     "deepseek_v3",
     R"({"n_group": 4, "topk_group": 2, "norm_topk_prob": false, "num_experts_per_tok": 3,
         "routed_scaling_factor": 1.5, "rope_parameters": {"rope_type": "yarn", "factor": 8.0,
         "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5}})",
     {-7.111603f, 1.846153f, -6.36453f, -3.95174f, -1.218291f, 0.157502f, -0.109503f, -1.28795f}},
    {"HalfSplitPositionsOfDeepseek",
     "deepseek_v3",
     R"({"rope_interleave": false})",
     {-7.057027f, 3.689922f, -5.381349f, -1.908424f, -0.75077f, 0.562061f, 0.289919f, -1.483663f}},
    {"RoutingAndPositionsOfQwen3Next",
     "qwen3_next",
     R"({"norm_topk_prob": false, "num_experts_per_tok": 3,
         "rope_parameters": {"partial_rotary_factor": 0.5}})",
     {-4.016864f, 1.140539f, -3.781156f, -1.848754f, -1.570146f, -0.453037f, 0.683669f,
      -1.119763f}},
    {"TemperatureOfLlama4",
     "llama4_text",
     R"({"floor_scale": 16, "attn_scale": 0.5, "moe_layers": null, "no_rope_layers": [1, 0, 1, 0],
         "layer_types": null, "attention_chunk_size": 32, "num_experts_per_tok": 2})",
     {-7.69481f, 1.880464f, -3.981345f, -0.862074f, -2.834099f, -1.394868f, -1.352407f,
      -1.068873f}},
    {"Llama4WithoutNormOfQAndK",
     "llama4_text",
     R"({"use_qk_norm": false, "attn_temperature_tuning": false})",
     {-7.953959f, -0.088496f, -4.824151f, -3.3422f, -2.925592f, -0.515308f, 1.432305f, -1.133464f}},
    {"WindowlessMistral",
     "mistral",
     R"({"sliding_window": "null"})",
     {-1.757138f, 0.9768f, 0.051992f, -0.209591f, 2.550473f, -0.786472f, -0.811659f, 0.999809f}},
    {"WindowOfMixtral",
     "mixtral",
     R"({"sliding_window": 30, "num_experts_per_tok": 3})",
     {0.075525f, 1.815945f, 1.710857f, 1.260808f, 0.12006f, -0.413502f, 2.071238f, 0.902262f}},
    {"LayerTypesOfQwen2",
     "qwen2",
     R"({"layer_types": ["sliding_attention", "full_attention", "full_attention",
                         "sliding_attention"]})",
     {-0.217781f, 0.671414f, 1.686554f, 1.625729f, -3.536188f, 2.120789f, 1.931095f, 2.58812f}},
    {"UnnormalisedRoutingOfQwen3Moe",
     "qwen3_moe",
     R"({"norm_topk_prob": false, "use_sliding_window": false})",
     {-1.877153f, 0.366138f, -0.816146f, 1.046277f, 2.059102f, -0.69992f, 0.109632f, 0.271007f}},
    {"RopeByLayerTypeOfGemma3",
     "gemma3_text",
     R"({"rope_scaling": null, "rope_theta": null, "rope_local_base_freq": null,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0}},
         "final_logit_softcapping": 2.0,
         "layer_types": ["full_attention", "sliding_attention", "full_attention",
                         "sliding_attention"]})",
     {0.984262f, -1.093789f, 1.157181f, -0.362201f, -1.049594f, -1.699292f, 1.777135f, 1.248647f}},
    {"DefaultRopeOfGemma3",
     "gemma3_text",
     R"({"rope_scaling": null, "rope_theta": null, "rope_local_base_freq": null,
         "sliding_window_pattern": null})",
     {0.756248f, -0.387836f, -0.627036f, -0.086667f, 0.154096f, -1.838564f, 1.115569f, -0.400266f}},
    {"PlainRopeOfPhi3",
     "phi3",
     R"({"rope_scaling": "null", "partial_rotary_factor": 1.0})",
     {0.415885f, 0.317396f, -0.780753f, -0.228343f, -1.750637f, 1.542284f, 0.490311f, -0.158033f}},
    {"UnbiasedGlm4",
     "glm4",
     R"({"attention_bias": false})",
     {0.6146f, 0.038711f, 0.490698f, 1.319995f, 0.550923f, -1.416487f, 1.219616f, 1.771238f}},
    {"WindowsOfSmolLm3",
     "smollm3",
     R"({"use_sliding_window": true, "sliding_window": 25, "no_rope_layers": null,
         "no_rope_layer_interval": 2, "rope_theta": null})",
     {0.096776f, 4.352815f, 0.363996f, -2.365256f, 0.825366f, 0.334296f, 0.237209f, 0.411611f}},
    {"DefaultMultipliersOfGranite",
     "granite",
     R"({"embedding_multiplier": null, "residual_multiplier": null, "attention_multiplier": null,
         "logits_scaling": 2.0})",
     {-0.090037f, -0.07589f, -0.647361f, 1.374754f, 1.379822f, 0.792755f, -0.600432f, -0.206819f}},
    {"GreedyRoutingOfDeepseekV2",
     "deepseek_v2",
     R"({"topk_method": "greedy", "n_group": "null", "topk_group": "null",
         "num_experts_per_tok": 4, "rope_scaling": "null"})",
     {0.93548f, 2.744372f, -0.249019f, -1.83929f, -0.577238f, 0.409406f, 0.266009f, 0.357611f}},
    {"WidthAndLayerTypesOfLfm2",
     "lfm2",
     R"({"block_auto_adjust_ff_dim": false, "block_ff_dim": 144, "intermediate_size": 96,
         "layer_types": ["conv", "conv", "full_attention", "conv"], "full_attn_idxs": [0, 1]})",
     {3.448883f, 1.253742f, -0.719822f, -0.548745f, 0.7791f, -4.955297f, -2.688592f, 0.535679f}},
    {"Lfm2MoeWithoutBiasAndSum",
     "lfm2_moe",
     R"({"use_expert_bias": false, "norm_topk_prob": false})",
     {-1.563937f, 0.650165f, 2.554388f, -0.336964f, 2.814275f, -0.731259f, -3.009611f, -0.180529f}},
    {"EpsilonOfLfm2Moe",
     "lfm2_moe",
     R"({"routed_scaling_factor": null, "norm_eps": 1e-2})",
     {1.311459f, -1.21054f, 3.650223f, -0.897308f, 0.755724f, -4.046442f, -2.559267f, -1.94788f}},
};

// Spellings of a config that are equivalent to another one, or nearly: two fields describe one
// fact, or a field is missing or null. Logits of transformers 5.24.
struct Spelling {
  const char* name;
  const char* model;
  const char* patch;
  std::array<float, 3> logits;  // for tokens 13, 269 and 260 after kSpelt
};

constexpr std::array<int32_t, 10> kSpelt = {0, 5, 7, 9, 100, 200, 300, 400, 500, 600};

void PrintTo(const Spelling& spelling, std::ostream* out) { *out << spelling.name; }

std::array<float, 3> spelt_logits(const std::string& folder) {
  ThreadPool threads;
  ModelDriver driver(folder, {.backend = "reference", .max_requests = 1, .max_context = 16},
                     threads);
  const std::vector<ModelDriver::Work> work = {{driver.open(), kSpelt}};
  const std::span<const float> logits = driver.run(work, false);
  return {logits[13], logits[269], logits[260]};
}

void expect_logits(const PatchedModel& model, const std::array<float, 3>& expected) {
  const std::array<float, 3> logits = spelt_logits(model.folder());
  for (size_t i = 0; i < logits.size(); ++i) EXPECT_NEAR(logits[i], expected[i], 1e-3) << i;
}

class Spellings : public testing::TestWithParam<Spelling> {};

TEST_P(Spellings, GiveTheReferenceLogits) {
  const Spelling& spelling = GetParam();
  expect_logits(PatchedModel(spelling.model, nlohmann::json::parse(spelling.patch)),
                spelling.logits);
}

constexpr std::array<float, 3> kLlama = {1.7155f, -0.9592f, 4.9527f};
constexpr std::array<float, 3> kLlamaAtTheta500000 = {1.6942f, -0.5451f, 5.4102f};
constexpr std::array<float, 3> kLlamaYarn = {1.8396f, -0.3894f, 5.5490f};
constexpr std::array<float, 3> kGemma2 = {2.7484f, 0.2460f, 3.4352f};
constexpr std::array<float, 3> kQwen3 = {2.3607f, 0.6947f, 3.1083f};
constexpr std::array<float, 3> kQwen3Yarn = {1.1857f, 0.8957f, 2.5037f};

constexpr Spelling kSpellings[] = {
    {"OlderThetaWithAType", "llama",
     R"({"rope_parameters": {"rope_type": "default", "rope_theta": null}, "rope_theta": 500000.0})",
     kLlamaAtTheta500000},
    {"OlderThetaAlone", "llama",
     R"({"rope_parameters": {"rope_type": null, "rope_theta": null}, "rope_theta": 500000.0})",
     kLlamaAtTheta500000},
    {"OlderThetaWithAnother", "llama", R"({"rope_theta": 500000.0})", kLlama},
    {"NullParameters", "llama", R"({"rope_parameters": "null", "rope_scaling": "null"})", kLlama},
    {"EmptyOlderScaling", "llama", R"({"rope_scaling": {}, "rope_theta": 500000.0})", kLlama},
    {"OlderScalingWithParameters", "qwen3",
     R"({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}})",
     kQwen3Yarn},
    {"YarnFactorIsNull", "llama",
     R"({"rope_parameters": {"rope_type": "yarn", "factor": "null",
         "original_max_position_embeddings": 64}, "max_position_embeddings": 256})",
     kLlamaYarn},
    {"YarnWithoutOriginalLength", "llama",
     R"({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64})",
     kLlamaYarn},
    {"YarnOfTheOuterOriginalLength", "llama",
     R"({"rope_parameters": {"rope_type": "yarn", "factor": 4.0,
         "original_max_position_embeddings": 8192}, "original_max_position_embeddings": 64})",
     kLlamaYarn},
    {"YarnDefaultsAsNullAndZero", "llama",
     R"({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0,
         "beta_slow": "null", "mscale": "null", "attention_factor": "null",
         "original_max_position_embeddings": 64}})",
     kLlamaYarn},
    {"DynamicWithinItsLength", "llama",
     R"({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}})", kLlama},
    {"YarnWithTruncateNull",
     "llama",
     R"({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": "null",
         "original_max_position_embeddings": 64}})",
     {1.8600f, -0.3363f, 5.5679f}},
    {"MscaleOfAnyTypeInDeepseek",
     "deepseek_v3",
     R"({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}})",
     {3.2658f, 3.0284f, 6.5375f}},
    {"OuterPartOfQwen3Next",
     "qwen3_next",
     R"({"rope_parameters": {"partial_rotary_factor": null}, "partial_rotary_factor": 0.5})",
     {-0.6803f, -0.8365f, 1.9791f}},
    {"OuterPartNullOfQwen3Next",
     "qwen3_next",
     R"({"rope_parameters": {"partial_rotary_factor": null}, "partial_rotary_factor": "null"})",
     {0.5273f, -0.2706f, 1.7804f}},
    {"NoPartOfQwen3Next",
     "qwen3_next",
     R"({"rope_parameters": {"partial_rotary_factor": null}, "partial_rotary_factor": null})",
     {-1.2838f, -1.0286f, 2.1038f}},
    {"NoChunksOfLlama4",
     "llama4_text",
     R"({"attention_chunk_size": "null", "layer_types": null})",
     {6.0459f, 1.1091f, 5.1836f}},
    {"AlphaOfSwiglu", "gpt_oss", R"({"swiglu_alpha": 1.0})", {5.2044f, 3.0777f, 4.7472f}},
    {"NoAttentionCap",
     "gemma2",
     R"({"attn_logit_softcapping": "null"})",
     {2.7474f, 0.2446f, 3.4293f}},
    {"NoFinalCap", "gemma2", R"({"final_logit_softcapping": "null"})", {2.7562f, 0.2460f, 3.4503f}},
    {"DefaultsOfGemma2", "gemma2",
     R"({"attn_logit_softcapping": null, "final_logit_softcapping": null, "head_dim": null,
         "tie_word_embeddings": null})",
     kGemma2},
    {"NoWindowOfQwen3", "qwen3",
     R"({"use_sliding_window": true, "sliding_window": "null", "max_window_layers": 2,
         "layer_types": null})",
     kQwen3},
    {"DefaultHeadDimOfQwen3", "qwen3", R"({"head_dim": null})", kQwen3},
    {"LimitOfSwiglu", "gpt_oss", R"({"swiglu_limit": 1.0})", {5.1977f, 3.2128f, 4.8806f}},
    {"DefaultTypeOfGptOss",
     "gpt_oss",
     R"({"rope_parameters": null, "rope_scaling": {"rope_type": "default"}})",
     {5.4117f, 3.2082f, 4.7789f}},
    {"DefaultParametersOfGptOss",
     "gpt_oss",
     R"({"rope_parameters": null})",
     {5.1637f, 3.0387f, 4.6246f}},
};

INSTANTIATE_TEST_SUITE_P(Models, Spellings, testing::ValuesIn(kSpellings),
                         [](const auto& test) { return std::string(test.param.name); });

// Rewrites model.safetensors of `folder` with one more tensor, or with one renamed.
class Checkpoints : public testing::Test {
 protected:
  struct Tensors {
    nlohmann::json header;
    std::string data;
  };

  static Tensors read(const PatchedModel& model) {
    std::ifstream file(model.folder() + "/model.safetensors", std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    return {nlohmann::json::parse(bytes.substr(sizeof(length), length)),
            bytes.substr(sizeof(length) + length)};
  }

  static void write(const PatchedModel& model, const Tensors& tensors) {
    const std::string path = model.folder() + "/model.safetensors";
    std::filesystem::remove(path);  // a link to the original
    const std::string header = tensors.header.dump();
    const uint64_t length = header.size();
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(&length), sizeof(length))
        .write(header.data(), static_cast<std::streamsize>(header.size()))
        .write(tensors.data.data(), static_cast<std::streamsize>(tensors.data.size()));
  }
};

// The frequencies of longrope, each divided by a factor of its own.
struct Longrope {
  const char* name;
  nlohmann::json parameters;  // in addition to the type and the factors
  nlohmann::json outer;       // next to rope_parameters
  std::array<float, 3> logits;
};

TEST(LongropeFrequencies, GiveTheReferenceLogits) {
  constexpr const char* kOriginal = "original_max_position_embeddings";
  std::vector<double> short_factors, long_factors;
  for (int i = 0; i < 32; ++i) {
    short_factors.push_back(1 + i / 8.0);
    long_factors.push_back(2 + i / 4.0);
  }
  constexpr std::array<float, 3> kLong = {1.2968f, 0.7173f, 3.7586f};
  for (const Longrope& longrope :
       {Longrope{"short", {{kOriginal, 64}}, {}, {1.9258f, -0.0684f, 5.9377f}},
        Longrope{"long", {{kOriginal, 8}}, {}, kLong},
        Longrope{"long by the outer length", {{kOriginal, 64}}, {{kOriginal, 8}}, kLong},
        Longrope{"factor", {{kOriginal, 64}, {"factor", 4.0}}, {}, {1.8428f, -0.4020f, 5.6138f}},
        Longrope{"attention factor",
                 {{kOriginal, 64}, {"attention_factor", 1.5}},
                 {},
                 {1.9224f, -0.0490f, 5.9592f}}}) {
    SCOPED_TRACE(longrope.name);
    nlohmann::json patch = {{"rope_parameters",
                             {{"rope_type", "longrope"},
                              {"short_factor", short_factors},
                              {"long_factor", long_factors}}}};
    patch["rope_parameters"].update(longrope.parameters);
    if (!longrope.outer.is_null()) patch.update(longrope.outer);
    expect_logits(PatchedModel("llama", patch), longrope.logits);
  }
}

constexpr const char *kEmbedding = "model.embed_tokens.weight", *kHead = "lm_head.weight";

// The checkpoint has an output head although its config ties the head to the embedding.
TEST_F(Checkpoints, KeepAHeadThatDiffersFromTheEmbedding) {
  const PatchedModel model("llama", nlohmann::json::object());
  Tensors tensors = read(model);
  nlohmann::json head = tensors.header.at(kEmbedding);
  const size_t begin = head.at("data_offsets")[0], end = head.at("data_offsets")[1];
  const size_t rows = head.at("shape")[0], row = (end - begin) / rows;
  head["data_offsets"] = {tensors.data.size(), tensors.data.size() + end - begin};
  for (size_t i = rows; i-- > 0;) tensors.data += tensors.data.substr(begin + i * row, row);
  tensors.header[kHead] = head;
  write(model, tensors);
  expect_logits(model, {-3.0174f, -2.7869f, 0.8851f});
}

TEST_F(Checkpoints, EmbedWithTheHeadWhereOnlyThatIsStored) {
  const PatchedModel model("llama", nlohmann::json::object());
  Tensors tensors = read(model);
  tensors.header[kHead] = tensors.header.at(kEmbedding);
  tensors.header.erase(kEmbedding);
  write(model, tensors);
  expect_logits(model, kLlama);
}

INSTANTIATE_TEST_SUITE_P(Models, Variants, testing::ValuesIn(kVariants),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace fovea
