// SPDX-License-Identifier: Apache-2.0
// One forward pass: from tokens and leases to logits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/cache_set.h"
#include "engine/group_backends.h"
#include "fovea/engine.h"
#include "model/model.h"

namespace fovea {

// New tokens of one request, at positions [begin, begin + tokens). Its lease is extended to cover
// them. Logits are wanted of the last logit_rows of them, or with `sampling` only the token drawn
// from those of the last.
struct PassPart {
  std::span<const int32_t> tokens;
  int32_t begin = 0;
  const CacheLease* lease = nullptr;
  int32_t logit_rows = 0;
  const SamplingParams* sampling = nullptr;  // without logprobs; logit_rows is 1
};

struct RunnerStats {
  EngineMemory memory;       // all but weights and caches
  int32_t graphs = 0;        // captured decode steps
  int64_t shared_steps = 0;  // passes that named shared prefixes
};

class ModelRunner {
 public:
  virtual ~ModelRunner() = default;

  // Runs the parts as one batch within the limits. logits: [sum of logit_rows, vocabulary], in the
  // order of the parts. drawn: [parts], the token where one was drawn, by the rules of Sampler; -1
  // where the caller is to draw it: none was asked for, the runner leaves that to the caller, or
  // the logits are no distribution. Logits of a part with a token are unspecified.
  virtual void run(std::span<const PassPart> parts, std::span<float> logits,
                   std::span<int32_t> drawn) = 0;
  virtual RunnerStats stats() const = 0;
};

struct ModelRunnerOptions {
  BatchLimits limits;
  // On a GPU: decode steps of up to so many requests are padded to the sizes of graph_sizes.h.
  int32_t max_graph_requests = 0;
  bool cuda_graphs = true;  // they are replayed; else enqueued
  // Rows of a pass whose logits are computed at once, a decode step's at least; on a GPU a pass
  // with more gets them piece by piece.
  int32_t logit_rows = 1;
};

// For the device the model is on; model, caches and threads outlive the result. Everything is
// allocated here.
std::unique_ptr<ModelRunner> make_model_runner(Model& model, CacheSet& caches, ThreadPool& threads,
                                               const std::vector<GroupSelection>& selections,
                                               const ModelRunnerOptions& options);

// The backends of all groups and the model, reserved for batches within the limits.
class ReservedModel {
 public:
  ReservedModel(Model& model, CacheSet& caches, ThreadPool& threads,
                const std::vector<GroupSelection>& selections, const BatchLimits& limits);

  // Plans the batch and runs the model on it, but for its logits.
  void forward(const BatchView& batch, const ModelInputs& inputs);
  // Activations, attention and products.
  const EngineMemory& memory() const { return memory_; }
  Model& model() const { return model_; }

 private:
  Model& model_;
  std::vector<std::unique_ptr<AttentionBackend>> backends_;
  std::vector<AttentionBackend*> backend_pointers_;
  EngineMemory memory_;
};

// Bytes of the arrays of a batch and of the request table, on the CPU.
size_t host_batch_bytes(const BatchLimits& limits);

class SharedPrefixes;
std::unique_ptr<ModelRunner> make_cuda_model_runner(ReservedModel model, CacheSet& caches,
                                                    const SharedPrefixes& prefixes,
                                                    const ModelRunnerOptions& options);

}  // namespace fovea
