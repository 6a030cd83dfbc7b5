// SPDX-License-Identifier: Apache-2.0
#include "model/from_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "core/check.h"

namespace fovea {
namespace {

constexpr int32_t kMaxSize = 1 << 24, kMaxHeads = 1 << 16, kMaxHeadDim = 1024;
// Positions that are served at most; tables of rotary positions are this long.
constexpr int32_t kLongestContext = 1 << 18;

// Tokens that end a text, of config.json and of generation_config.json, which some checkpoints
// extend.
std::vector<int32_t> read_eos_tokens(const Config& config, const std::string& folder,
                                     int32_t vocabulary) {
  std::vector<int32_t> tokens;
  const auto append = [&](const Config& from) {
    if (!from.has("eos_token_id")) return;
    for (const int64_t token : from.integer_or_list("eos_token_id", 0, vocabulary - 1)) {
      const auto id = static_cast<int32_t>(token);
      if (std::find(tokens.begin(), tokens.end(), id) == tokens.end()) tokens.push_back(id);
    }
  };
  append(config);
  const std::filesystem::path generation = std::filesystem::path(folder) / "generation_config.json";
  if (std::filesystem::exists(generation)) append(Config::open(generation.string()));
  return tokens;
}

kernels::RopeScaling rope_scaling(std::string_view type) {
  if (type == "default") return kernels::RopeScaling::none;
  if (type == "linear") return kernels::RopeScaling::linear;
  if (type == "llama3") return kernels::RopeScaling::llama3;
  if (type == "yarn") return kernels::RopeScaling::yarn;
  fail(ErrorCode::unsupported, "rope_type is '{}'; supported are default, linear, llama3, yarn",
       type);
}

void read_scaling(const Config& config, kernels::RopeSpec& spec) {
  spec.factor = read_positive(config, "factor", spec.factor);
  if (spec.scaling == kernels::RopeScaling::linear) return;
  spec.original_max_positions = read_size(config, "original_max_position_embeddings");
  if (spec.scaling == kernels::RopeScaling::llama3) {
    spec.low_freq_factor = read_positive(config, "low_freq_factor", spec.low_freq_factor);
    spec.high_freq_factor = read_positive(config, "high_freq_factor", spec.high_freq_factor);
    return;
  }
  spec.beta_fast = read_positive(config, "beta_fast", spec.beta_fast);
  spec.beta_slow = read_positive(config, "beta_slow", spec.beta_slow);
  spec.truncate = config.boolean_or("truncate", true);
  spec.attention_factor = config.number_or("attention_factor", 0);
  spec.mscale = config.number_or("mscale", 0);
  spec.mscale_all_dim = config.number_or("mscale_all_dim", 0);
}

}  // namespace

double read_positive(const Config& config, std::string_view field, double fallback) {
  const double value = config.number_or(field, fallback);
  if (!(value > 0)) config.refuse(field, "positive");
  return value;
}

int32_t read_size(const Config& config, std::string_view field) {
  return static_cast<int32_t>(config.integer(field, 1, kMaxSize));
}

int32_t read_heads(const Config& config, std::string_view field) {
  return static_cast<int32_t>(config.integer(field, 1, kMaxHeads));
}

int32_t read_head_dim(const Config& config, std::string_view field) {
  return static_cast<int32_t>(config.integer(field, 1, kMaxHeadDim));
}

float read_epsilon(const Config& config) {
  config.number("rms_norm_eps");  // has no default: architectures differ
  return static_cast<float>(read_positive(config, "rms_norm_eps", 0));
}

Norm read_norm(const Config& config, const Weights& weights, std::string_view name, int64_t dim,
               bool plus_one) {
  return {.weight = weights[name].vector("weight", {dim}),
          .epsilon = read_epsilon(config),
          .plus_one = plus_one};
}

DecoderParts read_decoder(const Config& config, Checkpoint checkpoint,
                          std::shared_ptr<ModelDevice> device, const DecoderDefaults& defaults) {
  if (config.has("quantization_config")) {
    fail(ErrorCode::unsupported,
         "quantization_config is set; checkpoints with plain fp32, bf16 or fp16 weights are "
         "supported");
  }
  // Passed over, it would change what the model says of long texts.
  if (config.has("dual_chunk_attention_config")) {
    fail(ErrorCode::unsupported,
         "dual_chunk_attention_config is set; models are loaded with plain rotary positions only");
  }
  DecoderParts parts;
  ModelInfo& info = parts.info;
  info.architecture = config.texts("architectures").at(0);
  info.layers = read_size(config, "num_hidden_layers");
  info.hidden = read_size(config, "hidden_size");
  info.vocabulary = read_size(config, "vocab_size");
  info.max_context = std::min(read_size(config, "max_position_embeddings"), kLongestContext);
  info.eos_tokens = read_eos_tokens(config, checkpoint.folder(), info.vocabulary);

  parts.device = std::move(device);
  parts.checkpoint = std::make_unique<const Checkpoint>(std::move(checkpoint));
  const Weights weights = parts.weights();
  constexpr std::string_view kEmbedding = "model.embed_tokens.weight";
  parts.embedding = weights.matrix(kEmbedding, {info.vocabulary, info.hidden});
  parts.embedding_dtype = weights.tensor(kEmbedding, {info.vocabulary, info.hidden}).dtype;
  const bool tied = config.boolean_or("tie_word_embeddings", defaults.tied_embeddings);
  parts.head =
      weights.linear(tied ? "model.embed_tokens" : "lm_head", info.vocabulary, info.hidden);
  parts.final_norm =
      read_norm(config, weights["model"], "norm", info.hidden, defaults.norms_plus_one);
  return parts;
}

AttentionSpec read_attention(const Config& config) {
  const int32_t heads = read_heads(config, "num_attention_heads");
  const int32_t hidden = read_size(config, "hidden_size");
  AttentionSpec spec;
  spec.q_heads = heads;
  spec.kv_heads = static_cast<int32_t>(config.integer_or("num_key_value_heads", heads, 1, heads));
  spec.head_dim = static_cast<int32_t>(
      config.integer_or("head_dim", std::clamp(hidden / heads, 1, kMaxHeadDim), 1, kMaxHeadDim));
  spec.head_dim_v = spec.head_dim;
  if (heads % spec.kv_heads != 0) {
    config.refuse("num_attention_heads",
                  fmt::format("a multiple of num_key_value_heads, {}", spec.kv_heads));
  }
  return spec;
}

SelfAttentionParts read_self_attention(const Config& config, const Weights& weights,
                                       const AttentionSpec& spec,
                                       const SelfAttentionOptions& options) {
  const int64_t hidden = read_size(config, "hidden_size");
  const int64_t q_width = int64_t{spec.q_heads} * spec.head_dim;
  const int64_t kv_width = int64_t{spec.kv_heads} * spec.head_dim;
  const bool has_bias = config.boolean_or("attention_bias", options.bias_by_default);
  SelfAttentionParts parts;
  parts.spec = spec;
  parts.has_output_gate = options.has_output_gate;
  const int64_t q_rows = options.has_output_gate ? 2 * q_width : q_width;
  parts.q = weights.joined({{"q_proj", q_rows}, {"k_proj", kv_width}, {"v_proj", kv_width}}, hidden,
                           has_bias);
  if (!parts.q) {
    parts.q = weights.linear("q_proj", q_rows, hidden, has_bias);
    parts.k = weights.linear("k_proj", kv_width, hidden, has_bias);
    parts.v = weights.linear("v_proj", kv_width, hidden, has_bias);
  }
  parts.o = weights.linear("o_proj", hidden, q_width, has_bias);
  return parts;
}

MlpParts read_mlp(const Weights& weights, int64_t hidden, int64_t width, bool has_bias) {
  MlpParts parts;
  parts.gate = weights.joined({{"gate_proj", width}, {"up_proj", width}}, hidden, has_bias);
  if (!parts.gate) {
    parts.gate = weights.linear("gate_proj", width, hidden, has_bias);
    parts.up = weights.linear("up_proj", width, hidden, has_bias);
  }
  parts.down = weights.linear("down_proj", hidden, width, has_bias);
  return parts;
}

std::vector<MlpParts> read_experts(const Weights& weights, int64_t count, int64_t hidden,
                                   int64_t width) {
  std::vector<MlpParts> experts;
  for (int64_t e = 0; e < count; ++e) {
    experts.push_back(read_mlp(weights["experts"][e], hidden, width));
  }
  return experts;
}

kernels::RopeSpec read_rope(const Config& config, int32_t rotary_dim) {
  kernels::RopeSpec spec;
  spec.rotary_dim = rotary_dim;
  if (config.has("rope_parameters")) {
    const Config rope = config.object("rope_parameters");
    spec.theta = read_positive(rope, "rope_theta", spec.theta);
    spec.scaling = rope_scaling(rope.text_or("rope_type", "default"));
    if (spec.scaling != kernels::RopeScaling::none) read_scaling(rope, spec);
    return spec;
  }
  spec.theta = read_positive(config, "rope_theta", spec.theta);
  if (!config.has("rope_scaling")) return spec;
  const Config rope = config.object("rope_scaling");
  spec.scaling = rope_scaling(rope.text_or("rope_type", rope.text_or("type", "default")));
  if (spec.scaling != kernels::RopeScaling::none) read_scaling(rope, spec);
  return spec;
}

Rotary make_rotary(const kernels::RopeSpec& spec, const DecoderParts& parts,
                   kernels::RopeLayout layout) {
  kernels::RopeTable table = make_rope_table(spec, parts.info.max_context);
  kernels::RopeTableView view = table.view();
  view.cos = parts.device->place(std::move(table.cos)).data();
  view.sin = parts.device->place(std::move(table.sin)).data();
  return {view, layout};
}

std::vector<std::string> read_layer_types(const Config& config,
                                          std::initializer_list<std::string_view> known,
                                          std::span<const std::string_view> pattern) {
  const auto layers = static_cast<size_t>(read_size(config, "num_hidden_layers"));
  std::vector<std::string> types;
  if (config.has("layer_types")) {
    types = config.texts("layer_types");
  } else {
    for (size_t i = 0; i < layers; ++i) types.emplace_back(pattern[i % pattern.size()]);
  }
  if (types.size() != layers) config.refuse("layer_types", fmt::format("an array of {}", layers));
  for (const std::string& type : types) {
    if (std::find(known.begin(), known.end(), type) == known.end()) {
      fail(ErrorCode::unsupported, "layer_types holds '{}'; supported here are {}", type,
           fmt::join(known, ", "));
    }
  }
  return types;
}

std::vector<AttentionSpec> read_sliding_layers(const Config& config, const AttentionSpec& full,
                                               std::span<const std::string_view> pattern) {
  std::vector<AttentionSpec> specs;
  for (const std::string& type :
       read_layer_types(config, {kFullAttention, kSlidingAttention}, pattern)) {
    specs.push_back(full);
    if (type == kSlidingAttention) specs.back().window = read_size(config, "sliding_window");
  }
  return specs;
}

void require_text(const Config& config, std::string_view field, std::string_view value) {
  const std::string found = config.text_or(field, value);
  if (found != value) {
    fail(ErrorCode::unsupported, "{} is '{}'; supported is '{}'", field, found, value);
  }
}

void require_boolean(const Config& config, std::string_view field, bool value) {
  if (config.boolean_or(field, value) != value) {
    fail(ErrorCode::unsupported, "{} is {}; supported is {}", field, !value, value);
  }
}

}  // namespace fovea
