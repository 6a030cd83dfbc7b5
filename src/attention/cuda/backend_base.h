// SPDX-License-Identifier: Apache-2.0
// The base of all backends on a GPU: the device, the pool and its page tables, the workspace, the
// checks of a batch and of a layer's tensors, and the launch groups.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "attention/cuda/cache.h"
#include "attention/validate/batch.h"
#include "attention/workspace.h"
#include "fovea/attention_backend.h"
#include "fovea/select_backend.h"
#include "gpu/gpu.h"
#include "gpu/launch.h"

namespace fovea {

class CudaBackendBase : public AttentionBackend {
 public:
  std::string_view name() const final { return name_; }
  Device device() const final { return context_.info().device(); }
  const KvPool* kv() const final { return pool_; }
  const StatePool* state() const final { return states_; }
  size_t workspace_bytes(const BatchLimits& limits) const final;
  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) final;
  void plan(const BatchView& batch, Stream stream) final;
  void forward(const LayerTensors& layer, Stream stream) final;

 protected:
  CudaBackendBase(std::string_view name, const BackendContext& context);
  // For destructors of derived classes, before they unload kernels: frees the graphs that launch
  // them, and binds the device.
  void free_graphs() noexcept;

  virtual size_t count_bytes(const BatchLimits& limits) const = 0;
  // Loads the kernels that batches within the limits need besides those of the constructor, without
  // a change to what is in use: if it throws, the backend stays as it is.
  virtual void prepare(const BatchLimits& /*limits*/) {}
  // Takes all buffers for batches within the limits.
  virtual void carve(WorkspaceCarver& workspace, const BatchLimits& limits) = 0;
  // Throws Error{invalid_argument} for what validate_batch_shape() does not know.
  virtual void check_batch(const BatchView& /*batch*/) const {}
  virtual void check_layer(const LayerTensors& layer) const = 0;
  // The batch has tokens. Launches all kernels by `launcher`.
  virtual void plan_batch(const BatchView& batch, gpu::Launcher launcher) = 0;
  virtual void run_layer(const LayerTensors& layer, gpu::Launcher launcher) = 0;

  const DeviceInfo& device_info() const { return context_.info(); }
  const AttentionSpec& spec() const { return rules_.spec; }
  const BatchLimits& limits() const { return rules_.limits; }
  const BatchView& batch() const { return batch_; }
  const KvPool* pool() const { return pool_; }
  const StatePool* states() const { return states_; }  // linear kinds
  const CudaCache& cache() const { return cache_; }    // with a pool

 private:
  gpu::Context context_;
  std::string_view name_;
  const KvPool* pool_;
  const StatePool* states_;
  BatchRules rules_;
  CudaCache cache_;
  WorkspaceMemory own_memory_;
  bool reserved_ = false;
  bool planned_ = false;
  BatchView batch_;
  gpu::LaunchGroup plan_launches_;
  std::vector<gpu::LaunchGroup> layer_launches_;  // one per layer; a single one without a pool
};

}  // namespace fovea
