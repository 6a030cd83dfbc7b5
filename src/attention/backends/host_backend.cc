// SPDX-License-Identifier: Apache-2.0
#include "attention/backends/host_backend.h"

#include "attention/validate_spec.h"
#include "core/check.h"

namespace fovea {
namespace {

void check_rows(const HeadRows& rows, DType dtype, std::string_view name) {
  check_argument(rows.data != nullptr, "{} is null", name);
  check_argument(rows.dtype == dtype, "{} is {}, the spec's q_dtype is {}", name,
                 dtype_name(rows.dtype), dtype_name(dtype));
}

void check_optional(const void* given, bool wanted, std::string_view name, std::string_view flag) {
  check_argument((given != nullptr) == wanted, "{} is {}, but the spec's {} is {}", name,
                 given != nullptr ? "given" : "null", flag, wanted);
}

}  // namespace

HostBackend::HostBackend(const HostKernels& kernels, const BackendContext& context)
    : shape_{&kernels, context.spec, {}, 1},
      pool_(context.kv),
      states_(context.state),
      threads_(context.threads) {
  const AttentionSpec& spec = context.spec;
  validate_spec(spec);
  check_argument(threads_ != nullptr, "threads is null, the backend runs on them");
  check_argument((pool_ != nullptr) == uses_kv_cache(spec), "kv is {}, these layers {} a KvPool",
                 pool_ != nullptr ? "given" : "null", uses_kv_cache(spec) ? "need" : "have no");
  check_argument((states_ != nullptr) == is_linear(spec.kind),
                 "state is {}, these layers {} a StatePool", states_ != nullptr ? "given" : "null",
                 is_linear(spec.kind) ? "need" : "have no");
  shape_.threads = threads_->size();
  rules_.spec = spec;
  if (pool_ != nullptr) {
    shape_.cache = pool_->spec();
    validate_cache(spec, shape_.cache);
    rules_.slots = pool_->slot_map().empty() ? pool_->pages() * shape_.cache.page_size
                                             : static_cast<int64_t>(pool_->slot_map().size());
  }
  if (states_ != nullptr) {
    validate_state(spec, states_->spec());
    rules_.state_slots = states_->slots();
  }
}

size_t HostBackend::workspace_bytes(const BatchLimits& limits) const {
  validate_limits(spec(), limits);
  return count_bytes(limits);
}

void HostBackend::reserve(const BatchLimits& limits, std::span<std::byte> workspace) {
  const size_t needed = workspace_bytes(limits);
  if (workspace.empty()) {
    own_memory_ = allocate_aligned(needed);
    workspace = {own_memory_.get(), needed};
  }
  if (workspace.size() < needed) {
    fail(ErrorCode::workspace_too_small, "workspace has {} bytes, backend '{}' needs {}",
         workspace.size(), name(), needed);
  }
  check_argument(reinterpret_cast<uintptr_t>(workspace.data()) % kWorkspaceAlignment == 0,
                 "workspace is at {}, must be aligned to {} bytes",
                 static_cast<const void*>(workspace.data()), kWorkspaceAlignment);
  WorkspaceCarver carver(workspace.data());
  rules_.limits = limits;
  carve(carver, limits);
  reserved_ = true;
  planned_ = false;
}

void HostBackend::plan(const BatchView& batch, Stream) {
  check_argument(reserved_, "plan() before reserve()");
  planned_ = false;
  validate_batch(batch, rules_);
  batch_ = batch;
  if (batch.mode == ForwardMode::idle) batch_.tokens = batch_.requests = 0;
  if (batch_.tokens > 0) plan_batch(batch_);
  planned_ = true;
}

void HostBackend::forward(const LayerTensors& layer, Stream) {
  check_argument(planned_, "forward() without a plan");
  if (batch_.tokens == 0) return;
  if (!is_linear(spec().kind)) check_tensors(layer);
  run_layer(layer);
}

void HostBackend::check_tensors(const LayerTensors& layer) const {
  const DType dtype = spec().q_dtype;
  const bool stores = layer.save_kv && layer.k;
  check_argument(layer.q || stores, "q is null and there is no k to store");
  if (stores || (spec().scope == AttentionScope::encoder && layer.q)) {
    check_rows(layer.k, dtype, "k");
    if (spec().kind != AttentionKind::mla || spec().rope_dim > 0) check_rows(layer.v, dtype, "v");
  }
  if (pool_ != nullptr && stores) {
    check_argument(batch_.out_slots != nullptr, "out_slots is null, storing k and v needs it");
  }
  if (!layer.q) return;
  check_rows(layer.q, dtype, "q");
  check_rows(layer.out, dtype, "out");
  if (layer.q_rope) check_rows(layer.q_rope, dtype, "q_rope");
  check_argument(layer.lse == nullptr || spec().needs_lse,
                 "lse is given, but the spec's needs_lse is false");
  check_optional(layer.sinks, spec().has_sinks, "sinks", "has_sinks");
  check_optional(layer.alibi_slopes, spec().has_alibi, "alibi_slopes", "has_alibi");
}

void HostBackend::store(const LayerTensors& layer, const KvLayerView& cache, int32_t k_dim,
                        int32_t v_dim) {
  if (!layer.save_kv || !layer.k) return;
  const std::span<const int64_t> slot_map = pool_->slot_map();
  kernels::KvWriteParams write;
  write.cache = cache;
  write.k = layer.k;
  write.v = layer.v;
  write.slots = batch_.out_slots;
  write.slot_map = slot_map.empty() ? nullptr : slot_map.data();
  write.tokens = batch_.tokens;
  write.kv_heads = spec().kv_heads;
  write.head_dim = k_dim;
  write.head_dim_v = v_dim;
  kernels().kv_write(write, *threads_);
}

kernels::AttentionMask HostBackend::mask() const {
  kernels::AttentionMask mask;
  mask.causal = spec().scope == AttentionScope::decoder;
  mask.window = spec().window;
  mask.chunk = spec().chunk;
  if (spec().scope == AttentionScope::decoder) mask.positions = batch_.positions;
  switch (spec().mask) {
    case MaskKind::none:
      break;
    case MaskKind::tree:
      mask.tree = batch_.tree_mask;
      break;
    case MaskKind::custom:
      mask.custom = batch_.custom_mask;
      mask.custom_indptr = batch_.custom_mask_indptr;
      break;
    case MaskKind::prefix_spans:
      mask.spans = batch_.spans;
      mask.span_indptr = batch_.span_indptr;
      break;
    case MaskKind::multi_item:
      mask.item_prefix_lens = batch_.item_prefix_lens;
      mask.token_pos_in_items = batch_.token_pos_in_items;
      mask.token_pos_in_items_stride = batch_.token_pos_in_items_stride;
      break;
  }
  return mask;
}

}  // namespace fovea
