// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/backend.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "attention/batch_mask.h"
#include "attention/cuda/cache.h"
#include "attention/cuda/prefixes.h"
#include "attention/validate/batch.h"
#include "attention/validate/layer.h"
#include "attention/validate/pool.h"
#include "attention/validate/spec.h"
#include "attention/workspace.h"
#include "core/check.h"
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

// New tokens up to which a request of a mixed batch is decode's while longer ones are prefill's; 0:
// one kernel serves any batch. Batch-invariant rows need one kernel for all.
int32_t most_decode_tokens(const CudaKernels& table, const cuda::AttentionSetup& setup) {
  const AttentionSpec& spec = setup.spec;
  const cuda::AttentionFamily* decode = table.decode_of(setup);
  if (decode == nullptr || spec.batch_invariant) return 0;
  return decode->row_tile / (spec.q_heads / spec.kv_heads);
}

Buffers carve(WorkspaceCarver& workspace, const CudaKernels& table,
              const cuda::AttentionSetup& setup, const BatchLimits& limits) {
  Buffers buffers;
  if (uses_kv_cache(setup.spec)) {
    buffers.pages = CudaCache::carve(workspace, setup.spec, setup.cache.page_size, limits);
  }
  const size_t prefill = table.prefill->workspace_bytes(setup, limits);
  const cuda::AttentionFamily* family = table.decode_of(setup);
  const size_t decode = family == nullptr ? 0 : family->workspace_bytes(setup, limits);
  const int32_t shortest = most_decode_tokens(table, setup);
  if (shortest > 0 && limits.max_q_len > shortest && limits.max_requests > 1) {
    buffers.prefill = workspace.take_bytes(prefill).data();
    buffers.decode = workspace.take_bytes(decode).data();
  } else {
    buffers.prefill = buffers.decode = workspace.take_bytes(std::max(prefill, decode)).data();
  }
  buffers.prefixes.carve(workspace, table, setup, limits);
  return buffers;
}

class CudaBackend final : public AttentionBackend {
 public:
  CudaBackend(const CudaKernels& table, const BackendContext& context);
  ~CudaBackend() override { context_.bind_to_free(); }

  std::string_view name() const override { return table_.name; }
  Device device() const override { return context_.info().device(); }
  const KvPool* kv() const override { return pool_; }
  size_t workspace_bytes(const BatchLimits& limits) const override;
  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override;
  void plan(const BatchView& batch, Stream stream) override;
  void forward(const LayerTensors& layer, Stream stream) override;

 private:
  const AttentionSpec& spec() const { return setup_.spec; }
  void plan_kernels(const BatchView& batch, cuda::PassPlan& pass);
  void expect_long_requests(const BatchView& batch, int32_t min_q_len);
  void launch_layer(const LayerTensors& tensors, Stream stream);

  gpu::Context context_;
  const CudaKernels& table_;
  cuda::AttentionSetup setup_;
  KvPool* pool_;
  BatchRules rules_;
  std::unique_ptr<cuda::AttentionKernel> prefill_, decode_;
  std::optional<cuda::Kernel> joint_plan_;
  int32_t most_decode_tokens_ = 0;
  CudaCache cache_;
  std::vector<CudaLayer> layers_;
  WorkspaceMemory own_memory_;
  Buffers buffers_;
  bool reserved_ = false;
  bool planned_ = false;
  BatchView batch_;
  // Of the planned batch: its kernel, or in a mixed one prefill_ and decode_ beside it.
  cuda::AttentionKernel* active_ = nullptr;
  cuda::AttentionKernel* beside_ = nullptr;
  bool cascades_ = false;           // its prefixes are looked at
  cuda::AttentionParams params_{};  // of the planned batch; each layer adds its tensors
  gpu::LaunchGroup plan_launches_;
  std::vector<gpu::LaunchGroup> layer_launches_;  // of each layer; one if there is no pool
};

CudaBackend::CudaBackend(const CudaKernels& table, const BackendContext& context)
    : context_(context.device.index), table_(table), pool_(context.kv) {
  setup_.spec = context.spec;
  setup_.sm = context_.info().sm;
  setup_.multiprocessors = context_.info().cores;
  validate_spec(spec());
  validate_pool(context);
  gpu::KernelStore& store = cuda::kernel_store();
  rules_.spec = spec();
  if (pool_ != nullptr) {
    setup_.cache = pool_->spec();
    rules_.page_size = setup_.cache.page_size;
    for (int32_t i = 0; i < setup_.cache.layers; ++i) setup_.layers.push_back(pool_->layer(i));
    for (const KvLayerView& view : setup_.layers) layers_.push_back(cuda_layer(view, *pool_));
    cache_ = CudaCache(spec(), *pool_, setup_.sm, store);
  }
  layer_launches_.resize(std::max<size_t>(layers_.size(), 1));
  prefill_ = table.prefill->load(setup_, store);
  if (const auto* decode = table.decode_of(setup_)) decode_ = decode->load(setup_, store);
  if (table.plans_jointly) joint_plan_.emplace(cuda::pass_plan_variant(setup_.sm), store);
  most_decode_tokens_ = most_decode_tokens(table, setup_);

  params_.batch.q_heads = spec().q_heads;
  params_.batch.kv_heads = spec().kv_heads;
  params_.lse_token_stride = spec().q_heads;
  params_.head_dim = spec().head_dim;
  params_.head_dim_v = spec().head_dim_v;
  params_.scale = softmax_scale(spec());
  params_.logit_cap = spec().scores.logit_cap;
}

size_t CudaBackend::workspace_bytes(const BatchLimits& limits) const {
  validate_limits(spec(), limits);
  return cuda_workspace_bytes(table_, setup_, limits);
}

void CudaBackend::reserve(const BatchLimits& limits, std::span<std::byte> workspace) {
  const size_t needed = workspace_bytes(limits);
  context_.bind();
  WorkspaceCarver carver(own_memory_.given_or_own(workspace, needed, device(), name()).data());
  buffers_ = carve(carver, table_, setup_, limits);
  prefill_->reserve(limits, buffers_.prefill);
  if (decode_ != nullptr) decode_->reserve(limits, buffers_.decode);
  buffers_.prefixes.load(table_, setup_, cuda::kernel_store());
  for (CudaLayer& layer : layers_) {
    layer.keys.page_table = buffers_.pages.table;
    layer.keys.page_table_stride = buffers_.pages.stride;
  }
  rules_.limits = limits;
  reserved_ = true;
  planned_ = false;
}

// Host figures decide, so that a captured pass keeps its kernels whatever lengths it is replayed
// with. In a mixed batch every request goes to the kernel that suits its length, by the lengths on
// the device.
void CudaBackend::plan_kernels(const BatchView& batch, cuda::PassPlan& pass) {
  const int32_t most = most_decode_tokens_;
  int32_t longest = batch.hints.max_q_len > 0 ? batch.hints.max_q_len : rules_.limits.max_q_len;
  if (batch.mode == ForwardMode::decode) longest = 1;
  active_ = longest <= most ? decode_.get() : prefill_.get();
  beside_ = nullptr;
  cuda::BatchParams all = params_.batch;
  // Most requests of a mixed batch have one new token.
  if (active_ == decode_.get() && batch.mode != ForwardMode::mixed && !pass.has_prefixes() &&
      prefill_->outruns_decode(all)) {
    active_ = prefill_.get();
  }
  cuda::BatchParams few = all;
  if (batch.mode == ForwardMode::mixed && batch.requests > 1 && active_ == prefill_.get() &&
      most > 0) {
    beside_ = decode_.get();
    all.min_planned_q_len = most + 1;
    all.max_planned_q_len = std::numeric_limits<int32_t>::max();
    few.max_planned_q_len = most;
    few.max_q_len = 1;  // of nearly all of them
    const bool own_keys = uses_kv_cache(spec()) && spec().scope != AttentionScope::cross;
    if (!batch.hints.host_q_lens.empty() && own_keys) expect_long_requests(batch, most + 1);
  }
  active_->plan(all, batch.tokens, pass);
  if (beside_ != nullptr) beside_->plan(few, batch.tokens, pass);
}

// The kernel for many new tokens of a mixed batch attends to no others than these.
void CudaBackend::expect_long_requests(const BatchView& batch, int32_t min_q_len) {
  int32_t requests = 0, most_keys = 0;
  for (int32_t i = 0; i < batch.requests; ++i) {
    if (batch.hints.host_q_lens[i] < min_q_len) continue;
    ++requests;
    most_keys = std::max(most_keys, batch.hints.host_kv_lens[i]);
  }
  prefill_->expect_keys({batch.hints.prefix_written, most_keys, requests});
}

void CudaBackend::plan(const BatchView& batch, Stream stream) {
  check_argument(reserved_, "plan() before reserve()");
  planned_ = false;
  validate_batch_shape(batch, rules_);
  check_argument(batch.positions.empty() || pool_ == nullptr || pool_->slot_map().empty(),
                 "positions are given: the layers may then look back to any key, but their pool "
                 "keeps a window of {}",
                 setup_.cache.window);
  context_.bind();
  batch_ = batch;
  if (batch.mode == ForwardMode::idle || batch.requests == 0) batch_.tokens = batch_.requests = 0;
  if (batch_.tokens > 0) {
    const bool cross = spec().scope == AttentionScope::cross;
    const bool cached = uses_kv_cache(spec());
    params_.batch.q_indptr = batch.q_indptr.data();
    params_.batch.kv_lens = !cached ? nullptr : (cross ? batch.cross.lens : batch.kv_lens).data();
    params_.batch.requests = batch.requests;
    for (cuda::AttentionKernel* kernel : {prefill_.get(), decode_.get()}) {
      if (kernel == nullptr) continue;
      kernel->expect_keys({.prefix_settled = batch.hints.prefix_written && cached && !cross,
                           .max_kv_len = cross ? 0 : batch.hints.max_kv_len});
    }
    params_.batch.max_q_len = batch.mode == ForwardMode::decode ? 1 : batch.hints.max_q_len;
    params_.batch.mask = batch_mask(batch, spec());
    cascades_ = buffers_.prefixes.serves(batch);
    cuda::PlanCompany company;
    if (pool_ != nullptr) {
      company.pages = cache_.page_table(batch, params_.batch.kv_lens, buffers_.pages);
    }
    if (cascades_) buffers_.prefixes.find_groups(batch, params_.batch, company);
    cuda::PassPlan pass(company);
    plan_kernels(batch, pass);
    const bool decodes = active_ == decode_.get();
    if (cascades_) buffers_.prefixes.plan(batch, params_.batch, decodes, pass);
    plan_launches_.submit(stream,
                          [&] { pass.launch(joint_plan_ ? &*joint_plan_ : nullptr, stream); });
  }
  planned_ = true;
}

void CudaBackend::forward(const LayerTensors& tensors, Stream stream) {
  check_argument(planned_, "forward() without a plan");
  if (batch_.tokens == 0) return;
  const bool cached = pool_ != nullptr;
  validate_layer(tensors, spec(), batch_, cached);
  validate_alignment(tensors);
  check_argument(
      !cached || (tensors.layer >= 0 && tensors.layer < static_cast<int64_t>(layers_.size())),
      "layer is {}, the pool has {}", tensors.layer, layers_.size());
  context_.bind();
  layer_launches_[cached ? static_cast<size_t>(tensors.layer) : 0].submit(
      stream, [&] { launch_layer(tensors, stream); });
}

void CudaBackend::launch_layer(const LayerTensors& tensors, Stream stream) {
  if (pool_ != nullptr) {
    const CudaLayer& layer = layers_[static_cast<size_t>(tensors.layer)];
    if (stores(tensors) || spec().has_rope) cache_.store(tensors, layer.write, batch_, stream);
    params_.keys = layer.keys;
  } else {
    params_.keys = packed_keys(tensors, batch_);
  }
  if (!tensors.q) return;
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
  // The kernel that needs few SMs first: the other fills those that are left.
  if (beside_ != nullptr) beside_->attend(params_, tensors.layer, stream);
  active_->attend(params_, tensors.layer, stream);
  if (!cascades_) return;
  buffers_.prefixes.attend(params_, tensors.layer, stream);
  buffers_.prefixes.join(params_, tensors.lse.data, stream);
}

}  // namespace

const cuda::AttentionFamily* CudaKernels::decode_of(const cuda::AttentionSetup& setup) const {
  return decode != nullptr && !decode->variants(setup).empty() ? decode : nullptr;
}

size_t cuda_workspace_bytes(const CudaKernels& table, const cuda::AttentionSetup& setup,
                            const BatchLimits& limits) {
  WorkspaceCarver counter(nullptr);
  carve(counter, table, setup, limits);
  return counter.bytes();
}

std::unique_ptr<AttentionBackend> make_cuda_backend(const CudaKernels& table,
                                                    const BackendContext& context) {
  return std::make_unique<CudaBackend>(table, context);
}

}  // namespace fovea
