// SPDX-License-Identifier: Apache-2.0
// The absorbed form: MQA over the cached latents, in one pass for all its requests.
#pragma once

#include <span>

#include "attention/host/backend.h"
#include "attention/host/pages.h"

namespace fovea {

// The requests of one pass, in batch order. When every request of the batch is among them the
// arrays are the batch's own.
struct AbsorbedBatch {
  std::span<const int32_t> requests;  // their numbers in the batch
  bool whole_batch = true;
  int32_t tokens = 0;
  const int32_t* q_indptr = nullptr;
  const int32_t* kv_lens = nullptr;
  PageTable pages;  // one row per request of the pass
};

class HostAbsorbedMla {
 public:
  // For passes of max_tokens tokens of `heads` heads, or of fewer tokens of all heads.
  void carve(WorkspaceCarver& workspace, const HostShape& shape, const BatchLimits& limits,
             int32_t heads);
  // shape: has the heads of each run().
  void plan(const HostShape& shape, const BatchView& batch, const AbsorbedBatch& absorbed,
            const kernels::AttentionMask& mask);
  void run(const LayerTensors& layer, const KvLayerView& cache, ThreadPool& threads);

 private:
  bool has_weights() const { return shape_.spec.mla.nope_dim > 0; }
  HeadRows queries(const LayerTensors& layer, ThreadPool& threads);
  void absorb(const LayerTensors& layer, const HeadRows& q, ThreadPool& threads);
  void project_values(const LayerTensors& layer, ThreadPool& threads);
  void scatter(const HeadRows& from, const LayerTensors& layer, ThreadPool& threads);
  void scatter_lse(float* lse);

  HostShape shape_;
  BatchView batch_;
  AbsorbedBatch absorbed_;
  kernels::AttentionParams params_;
  HostKernels::Schedule schedule_;
  // Both hold inputs first and results later.
  float* queries_ = nullptr;  // [tokens, q_heads, lora + rope]; values [tokens, q_heads, v_dim]
  float* latents_ = nullptr;  // [tokens, q_heads, nope + rope] as f32; [tokens, q_heads, lora]
  float* lse_ = nullptr;      // [tokens, q_heads]
  std::span<std::byte> schedule_memory_;
};

}  // namespace fovea
