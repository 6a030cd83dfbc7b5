// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/backend.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "attention/batch_mask.h"
#include "attention/cuda/backend_base.h"
#include "attention/cuda/prefixes.h"
#include "attention/validate/layer.h"
#include "attention/validate/spec.h"
#include "core/check.h"
#include "kernels/cuda/sm90/joint_plan/launch.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

struct Buffers {
  CudaPages pages;  // scopes with a cache
  // The same bytes, one plan being valid at a time, unless a mixed batch has both.
  std::byte* prefill = nullptr;
  std::byte* decode = nullptr;
  CudaPrefixes prefixes;
};

// New tokens up to which decode may serve a request; in a mixed batch it serves all of these. 0:
// prefill serves everything, since batch-invariant rows need one kernel for all requests.
int32_t max_decode_tokens(const CudaKernels& table, const cuda::AttentionSetup& setup) {
  const AttentionSpec& spec = setup.spec;
  const cuda::AttentionFamily* decode = table.decode_of(setup);
  if (decode == nullptr || spec.batch_invariant) return 0;
  return decode->row_tile / (spec.q_heads / spec.kv_heads);
}

// The bounds of the requests with at least `min_q_len` new tokens: the kernel for long requests of
// a mixed batch attends to no others.
cuda::ExpectedKeys keys_of_long_requests(const BatchView& batch, int32_t min_q_len) {
  cuda::ExpectedKeys keys{.prefix_written = batch.hints.prefix_written};
  for (int32_t i = 0; i < batch.requests; ++i) {
    if (batch.hints.host_q_lens[i] < min_q_len) continue;
    ++keys.requests;
    keys.max_kv_len = std::max(keys.max_kv_len, batch.hints.host_kv_lens[i]);
  }
  return keys;
}

Buffers carve_buffers(WorkspaceCarver& workspace, const CudaKernels& table,
                      const cuda::AttentionSetup& setup, const BatchLimits& limits) {
  Buffers buffers;
  if (uses_kv_cache(setup.spec)) {
    buffers.pages = CudaCache::carve(workspace, setup.spec, setup.cache.page_size, limits);
  }
  const size_t prefill = table.prefill->workspace_bytes(setup, limits);
  const cuda::AttentionFamily* family = table.decode_of(setup);
  const size_t decode = family == nullptr ? 0 : family->workspace_bytes(setup, limits);
  const int32_t shortest = max_decode_tokens(table, setup);
  if (shortest > 0 && limits.max_q_len > shortest && limits.max_requests > 1) {
    buffers.prefill = workspace.take_bytes(prefill).data();
    buffers.decode = workspace.take_bytes(decode).data();
  } else {
    buffers.prefill = buffers.decode = workspace.take_bytes(std::max(prefill, decode)).data();
  }
  buffers.prefixes.carve(workspace, table, setup, limits);
  return buffers;
}

class CudaBackend final : public CudaBackendBase {
 public:
  CudaBackend(const CudaKernels& table, const BackendContext& context);
  ~CudaBackend() override { free_graphs(); }

 private:
  // The kernels of a batch: one, or in a mixed batch two.
  struct Choice {
    cuda::AttentionKernel* main = nullptr;
    cuda::AttentionKernel* concurrent = nullptr;  // decode_ while main is prefill_
  };

  size_t count_bytes(const BatchLimits& limits) const override;
  void carve(WorkspaceCarver& workspace, const BatchLimits& limits) override;
  void check_layer(const LayerTensors& tensors) const override { validate_alignment(tensors); }
  void plan_batch(const BatchView& batch, gpu::Launcher launcher) override;
  void run_layer(const LayerTensors& tensors, gpu::Launcher launcher) override;

  Choice choose(const BatchView& batch) const;
  void plan_kernels(const BatchView& batch, cuda::PlanQueue& plans);
  void set_tensors(const LayerTensors& tensors);

  const CudaKernels& table_;
  cuda::AttentionSetup setup_;
  std::unique_ptr<cuda::AttentionKernel> prefill_, decode_;
  std::optional<cuda::Kernel> joint_plan_;
  int32_t max_decode_tokens_ = 0;  // as max_decode_tokens()
  int32_t max_decode_rows_ = 0;    // as CudaKernels::max_decode_rows
  std::vector<CudaLayer> layers_;
  Buffers buffers_;
  // The planned batch:
  Choice chosen_;
  bool cascades_ = false;           // it shares prefixes
  cuda::AttentionParams params_{};  // each layer adds its tensors
};

CudaBackend::CudaBackend(const CudaKernels& table, const BackendContext& context)
    : CudaBackendBase(table.name, context), table_(table) {
  setup_.spec = spec();
  setup_.sm = device_info().sm;
  setup_.multiprocessors = device_info().cores;
  gpu::KernelStore& store = cuda::kernel_store();
  if (pool() != nullptr) {
    setup_.cache = pool()->spec();
    for (int32_t i = 0; i < setup_.cache.layers; ++i) setup_.layers.push_back(pool()->layer(i));
    for (const KvLayerView& view : setup_.layers) layers_.push_back(cuda_layer(view, *pool()));
  }
  prefill_ = table.prefill->load(setup_, store);
  if (const auto* decode = table.decode_of(setup_)) {
    decode_ = decode->load(setup_, store);
    max_decode_rows_ =
        table.max_decode_rows != nullptr ? table.max_decode_rows(setup_) : decode->row_tile;
  }
  if (table.plans_jointly) joint_plan_.emplace(cuda::joint_plan_variant(setup_.sm), store);
  max_decode_tokens_ = max_decode_tokens(table, setup_);

  params_.batch.q_heads = spec().q_heads;
  params_.batch.kv_heads = spec().kv_heads;
  params_.lse_token_stride = spec().q_heads;
  params_.head_dim = spec().head_dim;
  params_.head_dim_v = spec().head_dim_v;
  params_.scale = softmax_scale(spec());
  params_.logit_cap = spec().scores.logit_cap;
}

size_t CudaBackend::count_bytes(const BatchLimits& limits) const {
  return cuda_workspace_bytes(table_, setup_, limits);
}

void CudaBackend::carve(WorkspaceCarver& workspace, const BatchLimits& limits) {
  buffers_ = carve_buffers(workspace, table_, setup_, limits);
  prefill_->reserve(limits, buffers_.prefill);
  if (decode_ != nullptr) decode_->reserve(limits, buffers_.decode);
  buffers_.prefixes.load(table_, setup_, cuda::kernel_store());
  for (CudaLayer& layer : layers_) {
    layer.keys.page_table = buffers_.pages.table;
    layer.keys.page_table_stride = buffers_.pages.stride;
  }
}

// Host figures decide, so that a captured pass keeps its kernels whatever lengths it is replayed
// with.
CudaBackend::Choice CudaBackend::choose(const BatchView& batch) const {
  int32_t longest = batch.hints.max_q_len > 0 ? batch.hints.max_q_len : limits().max_q_len;
  if (batch.mode == ForwardMode::decode) longest = 1;
  const bool mixed = batch.mode == ForwardMode::mixed;
  if (longest <= max_decode_tokens_) {
    // Almost all requests of a mixed batch have one new token.
    const int64_t rows = int64_t{longest} * (spec().q_heads / spec().kv_heads);
    const bool decodes = mixed || cascades_ || rows <= max_decode_rows_;
    return {.main = decodes ? decode_.get() : prefill_.get()};
  }
  if (mixed && batch.requests > 1 && max_decode_tokens_ > 0) {
    return {.main = prefill_.get(), .concurrent = decode_.get()};
  }
  return {.main = prefill_.get()};
}

// In a mixed batch every request goes to the kernel that suits its length, by the lengths on the
// device.
void CudaBackend::plan_kernels(const BatchView& batch, cuda::PlanQueue& plans) {
  const bool cross = spec().scope == AttentionScope::cross;
  const bool own_keys = uses_kv_cache(spec()) && !cross;
  cuda::PlanRequest request = {.batch = params_.batch,
                               .tokens = batch.tokens,
                               .keys = {.prefix_written = batch.hints.prefix_written && own_keys,
                                        .max_kv_len = cross ? 0 : batch.hints.max_kv_len}};
  chosen_ = choose(batch);
  if (chosen_.concurrent == nullptr) return chosen_.main->plan(request, plans);

  request.role = cuda::PassRole::concurrent;
  cuda::PlanRequest long_requests = request;
  long_requests.batch.min_planned_q_len = max_decode_tokens_ + 1;
  long_requests.batch.max_planned_q_len = std::numeric_limits<int32_t>::max();
  if (!batch.hints.host_q_lens.empty() && own_keys) {
    long_requests.keys = keys_of_long_requests(batch, max_decode_tokens_ + 1);
  }
  chosen_.main->plan(long_requests, plans);
  request.batch.max_planned_q_len = max_decode_tokens_;
  request.batch.max_q_len = 1;  // almost all of these requests have one new token
  chosen_.concurrent->plan(request, plans);
}

void CudaBackend::plan_batch(const BatchView& batch, gpu::Launcher launcher) {
  const bool cross = spec().scope == AttentionScope::cross;
  params_.batch.q_indptr = batch.q_indptr.data();
  params_.batch.kv_lens =
      uses_kv_cache(spec()) ? (cross ? batch.cross.lens : batch.kv_lens).data() : nullptr;
  params_.batch.requests = batch.requests;
  params_.batch.max_q_len = batch.mode == ForwardMode::decode ? 1 : batch.hints.max_q_len;
  params_.batch.mask = batch_mask(batch, spec());
  // Without positions the window itself hides what such a pool has dropped.
  const bool windowed = pool() != nullptr && !pool()->slot_map().empty();
  if (windowed && !batch.positions.empty()) params_.batch.mask.kept = setup_.cache.window;
  cascades_ = buffers_.prefixes.serves(batch);
  cuda::PlanTasks tasks;
  if (pool() != nullptr) {
    tasks.pages = cache().page_table(batch, params_.batch.kv_lens, buffers_.pages);
  }
  if (cascades_) buffers_.prefixes.find_groups(batch, params_.batch, tasks);
  cuda::PlanQueue plans(tasks);
  plan_kernels(batch, plans);
  if (cascades_) {
    buffers_.prefixes.plan(batch, params_.batch, chosen_.main == decode_.get(), plans);
  }
  plans.launch(joint_plan_ ? &*joint_plan_ : nullptr, launcher);
}

void CudaBackend::set_tensors(const LayerTensors& tensors) {
  params_.q = tensors.q.data;
  params_.q_token_stride = tensors.q.token_stride;
  params_.q_head_stride = tensors.q.head_stride;
  params_.q_scale = tensors.q_scale.data;
  params_.q_scale_token_stride = tensors.q_scale.token_stride;
  params_.q_scale_head_stride = tensors.q_scale.head_stride;
  params_.out = tensors.out.data;
  params_.out_token_stride = tensors.out.token_stride;
  params_.out_head_stride = tensors.out.head_stride;
  params_.lse = tensors.lse.data;
  params_.sinks = tensors.scores.sinks;
  params_.alibi_slopes = tensors.scores.alibi_slopes;
  if (cascades_ && params_.lse == nullptr) params_.lse = buffers_.prefixes.own_lse();
}

void CudaBackend::run_layer(const LayerTensors& tensors, gpu::Launcher launcher) {
  if (pool() != nullptr) {
    const CudaLayer& layer = layers_[static_cast<size_t>(tensors.layer)];
    if (stores(tensors) || spec().has_rope) cache().store(tensors, layer.write, batch(), launcher);
    params_.keys = layer.keys;
  } else {
    params_.keys = packed_keys(tensors, batch());
  }
  if (!tensors.q) return;
  set_tensors(tensors);
  // The kernel that needs few multiprocessors comes first: the other fills the rest.
  if (chosen_.concurrent != nullptr) chosen_.concurrent->attend(params_, tensors.layer, launcher);
  chosen_.main->attend(params_, tensors.layer, launcher);
  if (!cascades_) return;
  buffers_.prefixes.attend(params_, tensors.layer, launcher);
  buffers_.prefixes.join(params_, tensors.lse.data, launcher);
}

}  // namespace

const cuda::AttentionFamily* CudaKernels::decode_of(const cuda::AttentionSetup& setup) const {
  return decode != nullptr && !decode->variants(setup).empty() ? decode : nullptr;
}

size_t cuda_workspace_bytes(const CudaKernels& table, const cuda::AttentionSetup& setup,
                            const BatchLimits& limits) {
  WorkspaceCarver counter(nullptr);
  carve_buffers(counter, table, setup, limits);
  return counter.bytes();
}

std::unique_ptr<AttentionBackend> make_cuda_backend(const CudaKernels& table,
                                                    const BackendContext& context) {
  return std::make_unique<CudaBackend>(table, context);
}

}  // namespace fovea
