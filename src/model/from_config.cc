// SPDX-License-Identifier: Apache-2.0
#include "model/from_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "core/check.h"
#include "core/quote.h"
#include "model/shard.h"

namespace fovea {
namespace {

constexpr int32_t kMaxSize = 1 << 24, kMaxHeads = 1 << 16, kMaxHeadDim = 1024;
constexpr int32_t kMaxLayers = 1 << 14;

// Reads the tokens that end a text from config.json and from generation_config.json, which adds
// some in a number of checkpoints.
std::vector<int32_t> read_eos_tokens(const JsonObject& config, const std::string& folder,
                                     int32_t vocabulary) {
  std::vector<int32_t> tokens;
  std::vector<bool> is_known(static_cast<size_t>(vocabulary));
  const auto append = [&](const JsonObject& from) {
    if (!from.has("eos_token_id")) return;
    for (const int64_t token : from.integer_or_list("eos_token_id", 0, vocabulary - 1)) {
      if (is_known[static_cast<size_t>(token)]) continue;
      is_known[static_cast<size_t>(token)] = true;
      tokens.push_back(static_cast<int32_t>(token));
    }
  };
  append(config);
  if (folder.empty()) return tokens;
  const std::filesystem::path generation = std::filesystem::path(folder) / "generation_config.json";
  std::error_code ignored;
  if (std::filesystem::exists(generation, ignored)) append(JsonObject::open(generation.string()));
  return tokens;
}

// Reads the embedding and the head, which are one matrix if `tied`. As in the reference, a
// checkpoint with two different ones keeps both, and one with only the head also uses it as the
// embedding.
void read_vocabulary_matrices(DecoderParts& parts, std::string_view own_embedding, bool tied) {
  constexpr std::string_view kHead = "lm_head";
  const int64_t rows = parts.info.vocabulary, columns = parts.info.hidden;
  const Weights weights = parts.weights();
  const auto stored = [&](std::string_view name) {
    return parts.checkpoint->find(fmt::format("{}.weight", name));
  };
  std::string_view embedding = own_embedding, head = kHead;
  if (tied) {
    const StoredTensor* const of_embedding = stored(own_embedding);
    const StoredTensor* const of_head = stored(kHead);
    if (of_head == nullptr) {
      head = own_embedding;
    } else if (of_embedding == nullptr) {
      embedding = kHead;
    } else if (of_head->dtype == of_embedding->dtype && of_head->shape == of_embedding->shape &&
               std::memcmp(of_head->data, of_embedding->data, of_head->bytes) == 0) {
      head = own_embedding;
    }
  }
  const Linear matrix = weights.linear(embedding, rows, columns);
  parts.embedding = matrix.weight;
  parts.embedding_dtype = matrix.dtype;
  parts.head = weights.located(head, rows, columns);
  const RankOf rank(*parts.device);
  if (rank.alone()) return;
  parts.head = parts.device->place_part(outputs_of(parts.head, rank.range(rows)));
}

bool has_bias(const JsonObject& config, Bias bias) {
  if (bias == Bias::never || bias == Bias::always) return bias == Bias::always;
  return config.boolean_or("attention_bias", bias == Bias::by_default);
}

}  // namespace

double read_positive(const JsonObject& config, std::string_view field, double fallback) {
  constexpr double kLow = 1e-6, kHigh = 1e9;
  return config.number_or(field, fallback, kLow, kHigh);
}

int32_t read_size(const JsonObject& config, std::string_view field) {
  return static_cast<int32_t>(config.integer(field, 1, kMaxSize));
}

int32_t read_layers(const JsonObject& config) {
  return static_cast<int32_t>(config.integer("num_hidden_layers", 1, kMaxLayers));
}

float read_cap(const JsonObject& config, std::string_view field, float fallback) {
  constexpr double kLow = 1e-3, kHigh = 1e6;
  if (!config.contains(field)) return fallback;
  return static_cast<float>(config.number_or(field, 0, kLow, kHigh));
}

std::optional<int32_t> read_window(const JsonObject& config, std::optional<int32_t> fallback) {
  if (!config.contains("sliding_window")) return fallback;
  if (!config.has("sliding_window")) return std::nullopt;
  return read_size(config, "sliding_window");
}

int32_t read_heads(const JsonObject& config, std::string_view field) {
  return static_cast<int32_t>(config.integer(field, 1, kMaxHeads));
}

int32_t read_head_dim(const JsonObject& config, std::string_view field) {
  return static_cast<int32_t>(config.integer(field, 1, kMaxHeadDim));
}

float read_epsilon(const JsonObject& config, std::string_view field) {
  constexpr double kLow = 1e-30, kHigh = 1;
  return static_cast<float>(config.number(field, kLow, kHigh));
}

Norm read_norm(const JsonObject& config, const Weights& weights, std::string_view name, int64_t dim,
               bool plus_one, float factor) {
  const InitialValues random = InitialValues::constant(plus_one ? 0 : 1);
  return {.weight = weights[name].vector("weight", {dim}, random, factor),
          .epsilon = read_epsilon(config),
          .plus_one = plus_one};
}

DecoderParts read_decoder(const JsonObject& config, Checkpoint checkpoint,
                          std::shared_ptr<ModelDevice> device, const DecoderDefaults& defaults) {
  // Random weights are never quantised.
  if (config.has("quantization_config") && !checkpoint.is_random()) {
    fail(ErrorCode::unsupported,
         "quantization_config is set; checkpoints with plain fp32, bf16 or fp16 weights are "
         "supported");
  }
  // Ignoring this field would change results for long texts.
  if (config.has("dual_chunk_attention_config")) {
    fail(ErrorCode::unsupported,
         "dual_chunk_attention_config is set; models are loaded with plain rotary positions only");
  }
  DecoderParts parts;
  ModelInfo& info = parts.info;
  info.architecture = config.texts("architectures").at(0);
  info.layers = read_layers(config);
  info.hidden = read_size(config, "hidden_size");
  info.vocabulary = read_size(config, "vocab_size");
  info.max_context =
      defaults.context_field.empty() ? kMaxSize : read_size(config, defaults.context_field);
  info.default_context = std::min(info.max_context, kLongestContext);
  info.eos_tokens = read_eos_tokens(config, checkpoint.folder(), info.vocabulary);

  parts.device = std::move(device);
  parts.checkpoint = std::make_unique<const Checkpoint>(std::move(checkpoint));
  info.note = parts.checkpoint->note();
  read_vocabulary_matrices(parts, defaults.embedding,
                           config.boolean_or(defaults.tied_field, defaults.tied_embeddings));
  const InitialValues random = InitialValues::constant(defaults.norms_plus_one ? 0 : 1);
  parts.final_norm = {.weight = parts.weights()[defaults.final_norm].vector(
                          "weight", {info.hidden}, random, defaults.logit_factor),
                      .epsilon = read_epsilon(config, defaults.epsilon_field),
                      .plus_one = defaults.norms_plus_one};
  return parts;
}

AttentionSpec read_attention(const JsonObject& config, const AttentionDefaults& defaults) {
  const int32_t heads = read_heads(config, "num_attention_heads");
  const int32_t hidden = read_size(config, "hidden_size");
  AttentionSpec spec;
  spec.q_heads = heads;
  const auto read = [&](std::string_view field, int32_t if_missing, int32_t if_null, int32_t high) {
    if (!config.contains(field) && if_missing > 0) return if_missing;
    return static_cast<int32_t>(config.integer_or(field, if_null, 1, high));
  };
  spec.kv_heads = read("num_key_value_heads", defaults.kv_heads, heads, heads);
  spec.head_dim =
      read("head_dim", defaults.head_dim, std::clamp(hidden / heads, 1, kMaxHeadDim), kMaxHeadDim);
  spec.head_dim_v = spec.head_dim;
  if (heads % spec.kv_heads != 0) {
    config.refuse("num_attention_heads",
                  fmt::format("a multiple of num_key_value_heads, {}", spec.kv_heads));
  }
  return spec;
}

SelfAttentionParts read_self_attention(const JsonObject& config, const Weights& weights,
                                       const AttentionSpec& spec,
                                       const SelfAttentionOptions& options) {
  const int64_t hidden = read_size(config, "hidden_size");
  const int64_t inputs = options.inputs > 0 ? options.inputs : hidden;
  const int64_t q_width = int64_t{spec.q_heads} * spec.head_dim;
  const int64_t kv_width = int64_t{spec.kv_heads} * spec.head_dim;
  const bool qkv_bias = has_bias(config, options.qkv_bias);
  SelfAttentionParts parts;
  parts.spec = spec;
  parts.has_output_gate = options.has_output_gate;
  const int64_t q_rows = options.has_output_gate ? 2 * q_width : q_width;
  if (options.is_fused) {
    parts.q = weights.located("qkv_proj", q_rows + 2 * kv_width, inputs, qkv_bias);
  } else {
    parts.q = weights.joined({{"q_proj", q_rows}, {"k_proj", kv_width}, {"v_proj", kv_width}},
                             inputs, qkv_bias);
  }
  if (!parts.q) {
    parts.q = weights.located("q_proj", q_rows, inputs, qkv_bias);
    parts.k = weights.located("k_proj", kv_width, inputs, qkv_bias);
    parts.v = weights.located("v_proj", kv_width, inputs, qkv_bias);
  }
  parts.o = weights.located(options.out, hidden, q_width, has_bias(config, options.o_bias));
  return parts;
}

namespace {

MlpParts locate_mlp(const Weights& weights, int64_t hidden, int64_t width, bool has_bias,
                    const MlpNames& names) {
  MlpParts parts;
  if (names.up.empty()) {
    parts.gate = weights.located(names.gate, 2 * width, hidden, has_bias);
  } else {
    parts.gate = weights.joined({{names.gate, width}, {names.up, width}}, hidden, has_bias);
  }
  if (!parts.gate) {
    parts.gate = weights.located(names.gate, width, hidden, has_bias);
    parts.up = weights.located(names.up, width, hidden, has_bias);
  }
  parts.down = weights.located(names.down, hidden, width, has_bias);
  return parts;
}

}  // namespace

MlpParts read_mlp(const Weights& weights, int64_t hidden, int64_t width, bool has_bias,
                  const MlpNames& names) {
  MlpParts parts = locate_mlp(weights, hidden, width, has_bias, names);
  shard(parts, weights.device());
  return parts;
}

std::vector<MlpParts> read_experts(const Weights& weights, int64_t count, int64_t hidden,
                                   int64_t width, const MlpNames& names) {
  std::vector<MlpParts> experts;
  const ShardRange own = experts_of(count, weights.device());
  for (int64_t e = own.begin; e < own.begin + own.count; ++e) {
    experts.push_back(locate_mlp(weights["experts"][e], hidden, width, false, names));
    shard_expert(experts.back(), weights.device());
  }
  return experts;
}

void RotaryTable::make(ModelDevice& device, int32_t positions) {
  kernels::RopeTable table = make_rope_table(spec, positions);
  view = table.view();
  view.cos = device.place(std::move(table.cos)).data();
  view.sin = device.place(std::move(table.sin)).data();
}

size_t RotaryTable::bytes(const ModelDevice& device, int32_t positions) const {
  const auto pairs = static_cast<size_t>(spec.rotary_dim / 2);
  return 2 * device.vector_bytes(pairs * static_cast<size_t>(positions));
}

Rotary make_rotary(const kernels::RopeSpec& spec, DecoderParts& parts, kernels::RopeLayout layout) {
  make_rope_table(spec, 1);  // throws if no table can be made
  if (spec.scaling == kernels::RopeScaling::longrope) {
    parts.info.default_context = std::min(parts.info.default_context, spec.original_max_positions);
  }
  parts.rotary_tables.push_back(std::make_unique<RotaryTable>(RotaryTable{spec, {}}));
  return {&parts.rotary_tables.back()->view, layout};
}

std::vector<std::string> read_layer_types(const JsonObject& config,
                                          std::initializer_list<std::string_view> known,
                                          std::span<const std::string_view> pattern) {
  const auto layers = static_cast<size_t>(read_layers(config));
  std::vector<std::string> types;
  if (config.has("layer_types")) {
    types = config.texts("layer_types");
  } else {
    for (size_t i = 0; i < layers; ++i) types.emplace_back(pattern[i % pattern.size()]);
  }
  if (types.size() != layers) config.refuse("layer_types", fmt::format("an array of {}", layers));
  for (const std::string& type : types) {
    if (std::find(known.begin(), known.end(), type) == known.end()) {
      fail(ErrorCode::unsupported, "layer_types holds {}; supported here are {}", quote(type),
           fmt::join(known, ", "));
    }
  }
  return types;
}

void require_text(const JsonObject& config, std::string_view field, std::string_view value) {
  const std::string found = config.text_or(field, value);
  if (found != value) {
    fail(ErrorCode::unsupported, "{} is {}; supported is {}", field, quote(found), quote(value));
  }
}

void require_boolean(const JsonObject& config, std::string_view field, bool value) {
  if (config.boolean_or(field, value) != value) {
    fail(ErrorCode::unsupported, "{} is {}; supported is {}", field, !value, value);
  }
}

}  // namespace fovea
