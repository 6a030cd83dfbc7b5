// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/backend_base.h"

#include "attention/validate/layer.h"
#include "attention/validate/pool.h"
#include "attention/validate/spec.h"
#include "core/check.h"
#include "kernels/cuda/store.h"

namespace fovea {

CudaBackendBase::CudaBackendBase(std::string_view name, const BackendContext& context)
    : context_(context.device.index), name_(name), pool_(context.kv), states_(context.state) {
  validate_spec(context.spec);
  validate_pool(context);
  validate_state_pool(context);
  rules_.spec = context.spec;
  size_t layers = 1;
  if (pool_ != nullptr) {
    rules_.page_size = pool_->spec().page_size;
    layers = static_cast<size_t>(pool_->spec().layers);
    cache_ = CudaCache(spec(), *pool_, device_info().sm, kernels::cuda::kernel_store());
  }
  if (states_ != nullptr) {
    layers = static_cast<size_t>(states_->spec().layers);
    rules_.max_drafts = states_->spec().max_drafts;
  }
  layer_launches_.resize(layers);
}

void CudaBackendBase::free_graphs() noexcept {
  context_.bind_to_free();
  layer_launches_.clear();
  plan_launches_ = {};
}

size_t CudaBackendBase::workspace_bytes(const BatchLimits& limits) const {
  validate_limits(spec(), limits);
  return count_bytes(limits);
}

void CudaBackendBase::reserve(const BatchLimits& limits, std::span<std::byte> workspace) {
  const size_t needed = workspace_bytes(limits);
  context_.bind();
  prepare(limits);
  WorkspaceCarver carver(own_memory_.given_or_own(workspace, needed, device(), name()).data());
  carve(carver, limits);
  rules_.limits = limits;
  reserved_ = true;
  planned_ = false;
}

void CudaBackendBase::plan(const BatchView& batch, Stream stream) {
  check_argument(reserved_, "plan() before reserve()");
  planned_ = false;
  validate_batch_shape(batch, rules_);
  check_batch(batch);
  context_.bind();
  batch_ = batch;
  if (batch.mode == ForwardMode::idle || batch.requests == 0) batch_.tokens = batch_.requests = 0;
  if (batch_.tokens > 0) {
    plan_batch(batch_, plan_launches_.collect(stream));
    plan_launches_.launch();
  }
  planned_ = true;
}

void CudaBackendBase::forward(const LayerTensors& layer, Stream stream) {
  check_argument(planned_, "forward() without a plan");
  if (batch_.tokens == 0) return;
  const bool cached = pool_ != nullptr || states_ != nullptr;
  if (is_linear(spec().kind)) {
    validate_linear_layer(layer, spec(), batch_);
  } else {
    validate_layer(layer, spec(), batch_, cached);
  }
  check_layer(layer);
  check_argument(
      !cached || (layer.layer >= 0 && layer.layer < static_cast<int64_t>(layer_launches_.size())),
      "layer is {}, the pool has {}", layer.layer, layer_launches_.size());
  context_.bind();
  gpu::LaunchGroup& launches = layer_launches_[cached ? static_cast<size_t>(layer.layer) : 0];
  run_layer(layer, launches.collect(stream));
  launches.launch();
}

}  // namespace fovea
