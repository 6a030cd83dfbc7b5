// SPDX-License-Identifier: Apache-2.0
// A decoder-only language model over attention backends, on one device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/attention_backend.h"
#include "fovea/kv_cache.h"
#include "model/device.h"
#include "model/json_object.h"
#include "model/safetensors.h"

namespace fovea {

// Layers with equal attention, which share a backend, a pool and one plan per pass.
struct LayerGroup {
  AttentionSpec spec;
  std::vector<int32_t> layers;  // model layers, in the order of their index in the pool
  StateCacheSpec state;         // for linear kinds only
  // Ranks that hold the context together, each with all kv heads; 1: each rank has its own heads.
  // `spec` then has the q heads of all ranks.
  int32_t context_ranks = 1;
};

// The longest context that the engine serves, independent of the model.
inline constexpr int32_t kLongestContext = 1 << 22;

struct ModelInfo {
  std::string architecture;  // as in config.json, for example "LlamaForCausalLM"
  int32_t layers = 0;
  int32_t hidden = 0;
  int32_t vocabulary = 0;
  int32_t max_context = 0;  // tokens that the model was trained for
  // Tokens served by default. Below max_context if longer contexts change the results of short ones
  // (longrope scaling).
  int32_t default_context = 0;
  std::vector<int32_t> eos_tokens;
  std::string note;  // says which of several checkpoint files are read; usually empty
  std::vector<LayerGroup> groups;
};

// The matrix that gives each token its first hidden states, on the model's device.
struct EmbeddingTable {
  const std::byte* rows = nullptr;  // [vocabulary, hidden]
  DType dtype = DType::f32;
  float factor = 1;  // multiplies the rows
};

// Features of tokens, which a model notes for a head that drafts: the residual streams before some
// layers, side by side, times a matrix (EAGLE-3, arXiv:2503.01840), or the result of the final norm
// (MTP, arXiv:2412.19437). The row of a token is that of its cache slot, so that tokens of cached
// prefixes have theirs.
struct FeatureTap {
  std::vector<int32_t> layers;  // each in [0, ModelInfo::layers); empty: the final norm
  Linear projection;            // [width, layers x hidden], with `layers`
  float* rows = nullptr;        // [slots, width] on the model's device; may be null until forward()
};

// Tokens of one pass, packed in batch order, in memory of the model's device. On a GPU the model
// does not check them.
struct ModelInputs {
  std::span<const int32_t> tokens;
  std::span<const int32_t> positions;   // [tokens]
  std::span<const int32_t> logit_rows;  // indices into `tokens` whose logits are wanted
  // For a model with a tap: [tokens] cache slots; negative ones are padding.
  std::span<const int64_t> slots = {};
  // For a head: [tokens] rows of its features, see EagleHead.
  std::span<const int32_t> features = {};
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;

  virtual ModelDevice& device() const = 0;

  virtual EmbeddingTable embedding() const = 0;
  // Returns the vocabulary head, on a rank of several its part.
  virtual Linear head() const = 0;
  // Lets all passes note features. Call it before reserve(), and again once the rows have memory.
  // Throws Error{unsupported} if the model has none.
  virtual void set_tap(FeatureTap tap) = 0;

  // Returns the bytes of weights on the device, or mapped from files.
  virtual size_t weight_bytes() const = 0;

  // Returns the bytes of activations for passes of up to max_tokens tokens.
  virtual size_t activation_bytes(int32_t max_tokens) const = 0;
  // Returns the bytes of position tables for requests of up to max_context tokens.
  virtual size_t position_bytes(int32_t max_context) const = 0;
  // Allocates both.
  virtual void reserve(int32_t max_tokens, int32_t max_context) = 0;

  // Runs one pass up to its last hidden states. backends[g] serves info().groups[g] and has planned
  // this batch. Allocates nothing. On a GPU all work is enqueued on device().stream(), which may be
  // capturing.
  virtual void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends) = 0;
  // Computes logits [rows, vocabulary] of the last pass on the device: the logit rows from
  // `first_row` on, as many as `logits` holds.
  virtual void logits(int64_t first_row, std::span<float> logits) = 0;
  // Runs forward() and computes all logits at once.
  void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends,
               std::span<float> logits);
};

// A row of the table of architectures.
struct ModelEntry {
  std::string_view architecture;
  std::unique_ptr<Model> (*load)(const JsonObject& config, Checkpoint checkpoint,
                                 std::shared_ptr<ModelDevice> device);
};

// Returns the list in models.cc.
std::span<const ModelEntry> models();

JsonObject read_config(
    const std::string& path);  // `path` is the file, or a folder with config.json

// Returns the entry of the first architecture that `config` names. Throws as load_model() does.
const ModelEntry& find_model(const JsonObject& config, const std::string& path);

// Seed of generated weights, see RandomWeights. `threads` must outlive the model.
struct RandomSource {
  uint64_t seed = 0;
  ThreadPool* threads = nullptr;
};

// Reads config.json and the weights from the folder `path`. With `random`, generates the weights;
// `path` may then be a config file. Throws Error{unsupported} for an unknown architecture, with a
// list of all known ones, and for one that does not run on the device, with the reason.
std::unique_ptr<Model> load_model(const std::string& path, std::shared_ptr<ModelDevice> device,
                                  const std::optional<RandomSource>& random = {});
// Loads the model on the CPU. `threads` must outlive it.
std::unique_ptr<Model> load_model(const std::string& folder, ThreadPool& threads);

}  // namespace fovea
