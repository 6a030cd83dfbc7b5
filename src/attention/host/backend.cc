// SPDX-License-Identifier: Apache-2.0
#include "attention/host/backend.h"

#include <utility>

#include "attention/validate/layer.h"
#include "attention/validate/pool.h"
#include "attention/validate/spec.h"
#include "core/check.h"
#include "core/memory_error.h"

namespace fovea {

HeadRows carve_rows(WorkspaceCarver& workspace, DType dtype, int64_t tokens, int64_t heads,
                    int64_t dim) {
  const int64_t bytes = tokens * heads * dim * static_cast<int64_t>(dtype_bytes(dtype));
  return dense_rows(workspace.take<std::byte>(bytes), dtype, heads, dim);
}

HostBackend::HostBackend(const HostKernels& kernels, const BackendContext& context)
    : shape_{&kernels, context.spec, {}, 1},
      pool_(context.kv),
      states_(context.state),
      threads_(context.threads) {
  const AttentionSpec& spec = context.spec;
  validate_spec(spec);
  check_argument(threads_ != nullptr, "threads is null, the backend runs on them");
  check_argument(context.device.kind == DeviceKind::cpu,
                 "device is {}, backend '{}' runs on the CPU", device_name(context.device),
                 kernels.name);
  validate_pool(context);
  validate_state_pool(context);
  shape_.threads = threads_->size();
  rules_.spec = spec;
  if (pool_ != nullptr) {
    shape_.cache = pool_->spec();
    rules_.slots = pool_slots(*pool_);
    rules_.page_size = shape_.cache.page_size;
    rules_.reserves_page_zero = pool_->reserves_page_zero();
    rules_.mapped_slots = pool_->pages() * shape_.cache.page_size;
  }
  if (states_ != nullptr) {
    rules_.state_slots = states_->slots();
    rules_.max_drafts = states_->spec().max_drafts;
    rules_.marks = states_->marks();
  }
}

size_t HostBackend::workspace_bytes(const BatchLimits& limits) const {
  validate_limits(spec(), limits);
  return count_bytes(limits);
}

void HostBackend::reserve(const BatchLimits& limits, std::span<std::byte> workspace) {
  const size_t needed = workspace_bytes(limits);
  // Everything that throws comes first, so that the backend stays as it is.
  SlotSet written(limits.max_tokens);
  WorkspaceCarver carver(own_memory_.given_or_own(workspace, needed, {}, name()).data());
  written_ = std::move(written);
  rules_.limits = limits;
  carve(carver, limits);
  reserved_ = true;
  planned_ = false;
}

void HostBackend::plan(const BatchView& batch, Stream) {
  check_argument(reserved_, "plan() before reserve()");
  planned_ = false;
  if (pool_ != nullptr) rules_.slot_map = pool_->slot_map();
  validate_batch(batch, rules_);
  if (pool_ != nullptr) check_out_slots_differ(batch, rules_, written_);
  batch_ = batch;
  if (batch.mode == ForwardMode::idle) batch_.tokens = batch_.requests = 0;
  if (batch_.tokens > 0) plan_batch(batch_);
  planned_ = true;
}

void HostBackend::forward(const LayerTensors& layer, Stream) {
  check_argument(planned_, "forward() without a plan");
  if (batch_.tokens == 0) return;
  if (is_linear(spec().kind)) {
    validate_linear_layer(layer, spec(), batch_);
  } else {
    validate_layer(layer, spec(), batch_, pool_ != nullptr);
  }
  // The kernels of `reference` allocate.
  name_memory([&] { run_layer(layer); }, "backend '{}' over {} tokens", name(), batch_.tokens);
}

void HostBackend::store(const LayerTensors& layer, const KvLayerView& cache) {
  if (!stores(layer)) return;
  const bool mla = spec().kind == AttentionKind::mla;
  const std::span<const int64_t> slot_map = pool_->slot_map();
  kernels::KvWriteParams write;
  write.cache = cache;
  write.k = mla ? layer.mla.latent : layer.k;
  write.v = mla ? layer.mla.k_rope : layer.v;
  write.slots = batch_.out_slots.data();
  write.slot_map = slot_map.empty() ? nullptr : slot_map.data();
  write.tokens = batch_.tokens;
  write.kv_heads = spec().kv_heads;
  write.head_dim = mla ? spec().mla.kv_lora_rank : spec().head_dim;
  write.head_dim_v = mla ? spec().mla.rope_dim : spec().head_dim_v;
  kernels().kv_write(write, *threads_);
}

}  // namespace fovea
