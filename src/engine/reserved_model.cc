// SPDX-License-Identifier: Apache-2.0
#include "engine/reserved_model.h"

namespace fovea {

ReservedModel::ReservedModel(Model& model, CacheSet& caches, ThreadPool& threads,
                             const std::vector<GroupSelection>& selections,
                             const BatchLimits& limits)
    : model_(model) {
  for (size_t g = 0; g < selections.size(); ++g) {
    BackendContext context{selections[g].request.spec, caches.kv(g), caches.state(g), &threads};
    context.device = selections[g].request.device.device();
    const GroupRanks ranks{model.info().groups[g].context_ranks, model.device().ranks(),
                           model.device().context_links(), limits};
    backends_.push_back(create_group_backend(selections[g], context, ranks));
    backend_pointers_.push_back(backends_.back().get());
    memory_.attention += backends_.back()->workspace_bytes(limits);
  }
  model.reserve(limits.max_tokens, limits.max_kv_len);
  memory_.activations = model.activation_bytes(limits.max_tokens);
  memory_.positions = model.position_bytes(limits.max_kv_len);
  memory_.products = model.device().product_bytes();
}

void ReservedModel::forward(const BatchView& batch, const ModelInputs& inputs) {
  const Stream stream = model_.device().stream();
  for (AttentionBackend* backend : backend_pointers_) backend->plan(batch, stream);
  model_.forward(inputs, backend_pointers_);
}

}  // namespace fovea
