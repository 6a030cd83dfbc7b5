// SPDX-License-Identifier: Apache-2.0
// One forward pass: from tokens and leases to logits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/cache_set.h"
#include "engine/group_backends.h"
#include "model/model.h"

namespace fovea {

// New tokens of one request, at positions [begin, begin + tokens). Its lease is extended to cover
// them. Logits are wanted of the last logit_rows of them.
struct PassPart {
  std::span<const int32_t> tokens;
  int32_t begin = 0;
  const CacheLease* lease = nullptr;
  int32_t logit_rows = 0;
};

class ModelRunner {
 public:
  // model, caches and threads outlive this. Everything is allocated here.
  ModelRunner(Model& model, CacheSet& caches, ThreadPool& threads,
              const std::vector<GroupSelection>& selections, const BatchLimits& limits);

  // Runs the parts as one batch within the limits. logits: [sum of logit_rows, vocabulary], in the
  // order of the parts.
  void run(std::span<const PassPart> parts, std::span<float> logits);

  size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  void add(const PassPart& part);
  BatchView batch() const;

  Model& model_;
  CacheSet& caches_;
  std::vector<std::unique_ptr<AttentionBackend>> backends_;
  std::vector<AttentionBackend*> backend_pointers_;
  size_t workspace_bytes_ = 0;

  // The batch, rebuilt by every pass within its first capacity.
  std::vector<int32_t> tokens_, positions_, logit_rows_;
  std::vector<int64_t> out_slots_;
  std::vector<int32_t> q_indptr_, kv_lens_, rows_, state_slots_;
  int32_t max_q_len_ = 0, max_kv_len_ = 0, decodes_ = 0;
};

}  // namespace fovea
