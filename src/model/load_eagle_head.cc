// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/quote.h"
#include "model/eagle_parts.h"
#include "model/from_config.h"

namespace fovea {
namespace {

// Returns the layers before which the features are taken. Two public configs list layers: SpecForge
// and SGLang those after which, in eagle_config; vLLM those before which.
std::vector<int32_t> read_layers_of(const JsonObject& config, int32_t layers) {
  constexpr std::string_view kField = "eagle_aux_hidden_state_layer_ids";
  std::vector<int64_t> before;
  if (config.has("eagle_config") && config.object("eagle_config").has(kField)) {
    before = config.object("eagle_config").integers(kField, 0, kLongestContext);
    for (int64_t& layer : before) ++layer;
  } else if (config.has(kField)) {
    before = config.integers(kField, 0, kLongestContext);
  } else {
    before = {2, layers / 2, layers - 3};
  }
  std::vector<int32_t> result;
  for (const int64_t layer : before) {
    check_argument(layer >= 0 && layer < layers,
                   "speculate: the head reads the stream before layer {}, the model has {} layers",
                   layer, layers);
    result.push_back(static_cast<int32_t>(layer));
  }
  if (result.empty()) config.refuse(kField, "an array of layers");
  return result;
}

// Returns the column of each token of the model in the head's logits, -1 for none.
std::vector<int32_t> read_columns(const Checkpoint& checkpoint, int64_t vocabulary, int64_t part) {
  std::vector<int32_t> columns(static_cast<size_t>(vocabulary), -1);
  const int64_t shape[] = {part};
  std::vector<int64_t> offsets(static_cast<size_t>(part), 0);
  if (!checkpoint.is_random()) {
    const StoredTensor& stored = checkpoint.tensor("d2t", shape);
    if (stored.dtype != DType::i64) {
      fail(ErrorCode::unsupported, "tensor d2t is {}, must be {}", dtype_name(stored.dtype),
           dtype_name(DType::i64));
    }
    stored.read(0, std::as_writable_bytes(std::span(offsets)));
  }
  for (int64_t own = 0; own < part; ++own) {
    const int64_t offset = offsets[static_cast<size_t>(own)];
    if (offset < -own || offset >= vocabulary - own) {
      fail(ErrorCode::corrupt_file, "d2t[{}] is {}, must be in [{}, {})", own, offset, -own,
           vocabulary - own);
    }
    columns[static_cast<size_t>(own + offset)] = static_cast<int32_t>(own);
  }
  return columns;
}

constexpr std::string_view kDeepseek = "DeepseekV3ForCausalLM";
constexpr std::string_view kQwen3Next = "Qwen3NextForCausalLM";

// An MTP layer has the config of its model.
bool is_mtp(std::string_view architecture) {
  return architecture == kDeepseek || architecture == kQwen3Next;
}

std::string architecture_of(const JsonObject& config, const std::string& path) {
  const std::vector<std::string> names = config.texts("architectures");
  const std::string name = names.empty() ? "" : names[0];
  if (name == "LlamaForCausalLMEagle3" || name == "Eagle3LlamaForCausalLM" || is_mtp(name))
    return name;
  fail(ErrorCode::unsupported,
       "{}: the architecture is {}; heads are LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM and "
       "the MTP layers of {} and {}",
       printable(path), quote(name), kDeepseek, kQwen3Next);
}

void check_layers(const JsonObject& config, const ModelInfo& model, std::string_view architecture) {
  const int32_t layers = read_layers(config);
  if (!is_mtp(architecture)) {
    if (layers == 1) return;
    fail(ErrorCode::unsupported, "num_hidden_layers is {}; heads of one layer are supported",
         layers);
  }
  check_argument(layers == model.layers,
                 "speculate: the MTP layer follows {} layers, the model has {}", layers,
                 model.layers);
  // Public configs of Qwen3-Next do not mention its layer.
  const int64_t fallback = architecture == kQwen3Next ? 1 : 0;
  if (config.integer_or("num_nextn_predict_layers", fallback, 0, 64) == 0)
    config.refuse("num_nextn_predict_layers", "at least 1: there is no MTP layer");
}

void check_config(const JsonObject& config, const ModelInfo& model, std::string_view architecture) {
  const int32_t vocabulary = read_size(config, "vocab_size");
  check_argument(vocabulary == model.vocabulary,
                 "speculate: the head has a vocabulary of {} tokens, the model of {}", vocabulary,
                 model.vocabulary);
  const std::string_view width =
      config.has("target_hidden_size") ? "target_hidden_size" : "hidden_size";
  check_argument(read_size(config, width) == model.hidden,
                 "speculate: the head is made for a model whose hidden states have {} values, "
                 "those of the model have {}",
                 read_size(config, width), model.hidden);
  check_layers(config, model, architecture);
  require_text(config, "hidden_act", "silu");
  require_boolean(config, "norm_before_residual", false);
  if (config.has("quantization_config")) {
    fail(ErrorCode::unsupported, "quantization_config is set; heads have plain weights");
  }
}

// The head's own embeddings have its width. Those of the model must have it, too.
EmbeddingTable read_embedding(const Weights& weights, const ModelInfo& info, const Model& model) {
  constexpr std::string_view kName = "embed_tokens";
  if (weights.has("embed_tokens.weight")) {
    const Linear own = weights.linear(kName, info.vocabulary, info.hidden);
    return {own.weight, own.dtype, 1};
  }
  check_argument(info.hidden == model.info().hidden,
                 "speculate: the head has hidden states of {} values and no embed_tokens; the "
                 "model's have {}",
                 info.hidden, model.info().hidden);
  return model.embedding();
}

ModelInfo read_info(const JsonObject& config, const ModelInfo& model) {
  ModelInfo info;
  info.architecture = config.texts("architectures").at(0);
  info.layers = 1;
  info.hidden = read_size(config, "hidden_size");
  info.vocabulary = model.vocabulary;
  // Heads are trained on short texts; their positions are those of the model.
  info.max_context = model.max_context;
  info.default_context = model.default_context;
  return info;
}

// Reads attention, whose input is twice as wide as the residual stream, and the feed-forward block.
void read_layer(const JsonObject& config, const Weights& layer, EagleParts& parts) {
  const int64_t hidden = parts.info.hidden;
  AttentionSpec spec = read_attention(config);
  spec.has_rope = rotates_in_backend(*parts.device);
  spec.q_dtype = parts.device->activation_dtype();
  const LayerSlot slot = join_group(parts.info, 0, spec);
  SelfAttentionParts attention =
      read_self_attention(config, layer["self_attn"], spec, {.inputs = 2 * hidden});
  attention.slot = slot;
  const kernels::RopeSpec rope = read_rope(config, spec.head_dim);
  make_rope_table(rope, 1);  // throws if no table can be made
  parts.rotary = std::make_unique<RotaryTable>(RotaryTable{rope, {}});
  attention.prepare_heads({}, {}, {&parts.rotary->view, kernels::RopeLayout::half_split});
  parts.mixer = std::make_unique<SelfAttention>(std::move(attention));
  parts.feed =
      std::make_unique<Mlp>(read_mlp(layer["mlp"], hidden, read_size(config, "intermediate_size")));
}

void read_eagle(const JsonObject& config, const Model& model, EagleParts& parts) {
  const int64_t hidden = parts.info.hidden;
  const Weights weights(*parts.checkpoint, *parts.device);
  const Weights layer = weights["midlayer"];
  parts.tap.layers = read_layers_of(config, model.info().layers);
  parts.tap.projection = weights.linear(
      "fc", hidden, static_cast<int64_t>(parts.tap.layers.size()) * model.info().hidden);
  parts.embedding = read_embedding(weights, parts.info, model);
  parts.embedding_norm = read_norm(config, layer, "input_layernorm", hidden);
  parts.hidden_norm = read_norm(config, layer, "hidden_norm", hidden);
  parts.feed_norm = read_norm(config, layer, "post_attention_layernorm", hidden);
  parts.final_norm = read_norm(config, weights, "norm", hidden);
  read_layer(config, layer, parts);
  const int64_t part =
      config.integer_or("draft_vocab_size", parts.info.vocabulary, 1, parts.info.vocabulary);
  parts.head = weights.linear("lm_head", part, hidden);
  if (part < parts.info.vocabulary || weights.has("d2t")) {
    parts.columns =
        parts.device->place_ints(read_columns(*parts.checkpoint, parts.info.vocabulary, part));
  }
}

void read_mtp(const JsonObject& config, const Model& model, EagleParts& parts) {
  const bool is_deepseek = parts.info.architecture == kDeepseek;
  const Weights weights(*parts.checkpoint, *parts.device);
  const Weights layer = is_deepseek ? weights["model.layers"][model.info().layers] : weights["mtp"];
  parts.embedding = read_embedding(layer, parts.info, model);
  (is_deepseek ? read_deepseek_mtp : read_qwen3_next_mtp)(config, layer, parts);
  if (layer.has("shared_head.head.weight")) {
    parts.head = layer.linear("shared_head.head", parts.info.vocabulary, parts.info.hidden);
    return;
  }
  if (model.device().ranks() != nullptr) {
    fail(ErrorCode::unsupported,
         "the MTP layer has no shared_head.head, and of the model's head each rank has a part");
  }
  parts.head = model.head();
}

}  // namespace

std::unique_ptr<EagleHead> load_eagle_head(const std::string& path,
                                           std::shared_ptr<ModelDevice> device, const Model& model,
                                           const std::optional<RandomSource>& random) {
  const JsonObject config = read_config(path);
  const std::string architecture = architecture_of(config, path);
  check_config(config, model.info(), architecture);
  EagleParts parts;
  parts.info = read_info(config, model.info());
  parts.device = std::move(device);
  parts.checkpoint = std::make_unique<const Checkpoint>(
      random ? Checkpoint::random("", config, random->seed, *random->threads)
             : Checkpoint::open(path));
  (is_mtp(architecture) ? read_mtp : read_eagle)(config, model, parts);
  parts.checkpoint->check_intact();
  return make_eagle_head(std::move(parts));
}

}  // namespace fovea
