// SPDX-License-Identifier: Apache-2.0
// The base of all backends on the CPU: the workspace, the checks of a batch and of a layer's
// tensors.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "attention/host/kernels.h"
#include "attention/slot_set.h"
#include "attention/validate/batch.h"
#include "attention/workspace.h"
#include "fovea/attention_backend.h"
#include "fovea/select_backend.h"

namespace fovea {

// The layer and the processor, which decide the size of buffers together with the limits.
struct HostShape {
  const HostKernels* kernels = nullptr;
  AttentionSpec spec;
  KvCacheSpec cache;
  int32_t threads = 1;

  // Returns the shape of an attention kernel with the spec's q_heads.
  HostKernels::Shape attention(int32_t kv_heads, int32_t head_dim, int32_t head_dim_v) const {
    return {.isa = kernels->isa(),
            .threads = threads,
            .q_heads = spec.q_heads,
            .kv_heads = kv_heads,
            .head_dim = head_dim,
            .head_dim_v = head_dim_v};
  }
};

inline HostShape with_heads(HostShape shape, int32_t q_heads) {
  shape.spec.q_heads = q_heads;
  return shape;
}

// Takes room for dense rows [tokens, heads, dim].
HeadRows carve_rows(WorkspaceCarver& workspace, DType dtype, int64_t tokens, int64_t heads,
                    int64_t dim);

class HostBackend : public AttentionBackend {
 public:
  std::string_view name() const final { return shape_.kernels->name; }
  const KvPool* kv() const final { return pool_; }
  const StatePool* state() const final { return states_; }
  size_t workspace_bytes(const BatchLimits& limits) const final;
  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) final;
  void plan(const BatchView& batch, Stream stream) final;
  void forward(const LayerTensors& layer, Stream stream) final;

 protected:
  HostBackend(const HostKernels& kernels, const BackendContext& context);

  // Takes all buffers for batches within the limits.
  virtual void carve(WorkspaceCarver& workspace, const BatchLimits& limits) = 0;
  virtual size_t count_bytes(const BatchLimits& limits) const = 0;
  // The batch is valid and has tokens.
  virtual void plan_batch(const BatchView& batch) = 0;
  virtual void run_layer(const LayerTensors& layer) = 0;

  const HostKernels& kernels() const { return *shape_.kernels; }
  const HostShape& shape() const { return shape_; }
  const AttentionSpec& spec() const { return shape_.spec; }
  const BatchView& batch() const { return batch_; }
  KvPool* pool() const { return pool_; }
  StatePool* states() const { return states_; }
  ThreadPool& threads() const { return *threads_; }

  // Writes the layer's k and v (mla: latent and rotary key) to the batch's out_slots.
  void store(const LayerTensors& layer, const KvLayerView& cache);

 private:
  HostShape shape_;
  KvPool* pool_;
  StatePool* states_;
  ThreadPool* threads_;
  BatchRules rules_;
  SlotSet written_;
  WorkspaceMemory own_memory_;
  bool reserved_ = false;
  bool planned_ = false;
  BatchView batch_;
};

}  // namespace fovea
