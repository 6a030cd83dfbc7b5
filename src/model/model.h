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
#include "model/config.h"
#include "model/device.h"
#include "model/safetensors.h"

namespace fovea {

// Layers with equal attention: one backend, one pool and one plan per pass.
struct LayerGroup {
  AttentionSpec spec;
  std::vector<int32_t> layers;  // model layers; their order is their index in the pool
  StateCacheSpec state;         // linear kinds only
};

// The longest context that is served, whatever a model was made for.
inline constexpr int32_t kLongestContext = 1 << 22;

struct ModelInfo {
  std::string architecture;  // "LlamaForCausalLM"
  int32_t layers = 0;
  int32_t hidden = 0;
  int32_t vocabulary = 0;
  int32_t max_context = 0;  // tokens the model was made for
  // Tokens that are served where nothing else is asked for. Fewer than max_context where longer
  // contexts change the results of short ones (the longrope scaling).
  int32_t default_context = 0;
  std::vector<int32_t> eos_tokens;
  std::string note;  // of the checkpoint: which of several files are read; else empty
  std::vector<LayerGroup> groups;
};

// Tokens of one pass, packed in batch order, in memory of the model's device. On a GPU nobody
// checks them but the caller.
struct ModelInputs {
  std::span<const int32_t> tokens;
  std::span<const int32_t> positions;   // [tokens]
  std::span<const int32_t> logit_rows;  // rows of `tokens` whose logits are wanted
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;

  virtual ModelDevice& device() const = 0;

  // On the device, or mapped from files.
  virtual size_t weight_bytes() const = 0;

  // Bytes of the activations of passes of up to max_tokens tokens.
  virtual size_t activation_bytes(int32_t max_tokens) const = 0;
  // Bytes of the tables of positions of requests of up to max_context tokens.
  virtual size_t position_bytes(int32_t max_context) const = 0;
  // Allocates both.
  virtual void reserve(int32_t max_tokens, int32_t max_context) = 0;

  // One pass but its logits. backends[g] serves info().groups[g] and has planned this batch.
  // Nothing is allocated. On a GPU everything is enqueued on device().stream(); that may be a
  // capture.
  virtual void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends) = 0;
  // Logits of the last pass, [rows, vocabulary] on the device: of as many of its logit_rows as fit
  // `logits`, from `first_row` on.
  virtual void logits(int64_t first_row, std::span<float> logits) = 0;
  // Both, with all logits at once.
  void forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends,
               std::span<float> logits);
};

// One row of the table of architectures.
struct ModelEntry {
  std::string_view architecture;
  std::unique_ptr<Model> (*load)(const Config& config, Checkpoint checkpoint,
                                 std::shared_ptr<ModelDevice> device);
  std::string_view not_on_gpus = {};  // why not; empty: it runs there
};

// models.cc: the list.
std::span<const ModelEntry> models();

Config read_config(const std::string& path);  // of a folder its config.json, else the file

// The entry of the architecture that `config` names first. Errors as of load_model.
const ModelEntry& find_model(const Config& config, const std::string& path, DeviceKind device);

// Weights made from a seed, see RandomWeights. `threads` outlives the model.
struct RandomSource {
  uint64_t seed = 0;
  ThreadPool* threads = nullptr;
};

// Reads config.json and the weights of the folder `path`. With `random`, weights are made instead
// of read, and `path` may be a config itself. An unknown architecture is Error{unsupported} that
// lists the known ones; so is one that does not run on the device, with the reason.
std::unique_ptr<Model> load_model(const std::string& path, std::shared_ptr<ModelDevice> device,
                                  const std::optional<RandomSource>& random = {});
// On the CPU. `threads` outlives the model.
std::unique_ptr<Model> load_model(const std::string& folder, ThreadPool& threads);

}  // namespace fovea
