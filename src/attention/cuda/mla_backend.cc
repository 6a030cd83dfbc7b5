// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/mla_backend.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "attention/cuda/mla_cut.h"
#include "attention/cuda/mla_layer.h"
#include "attention/mla_forms.h"
#include "attention/row_views.h"
#include "attention/validate/batch.h"
#include "attention/validate/layer.h"
#include "attention/validate/pool.h"
#include "attention/validate/spec.h"
#include "attention/workspace.h"
#include "core/check.h"
#include "kernels/cuda/head_gemm.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

// New tokens of a request whose positions a window can be measured on: a bit each, as of drafts.
constexpr int32_t kMaxPlaced = 64;

class MlaBackend final : public AttentionBackend {
 public:
  MlaBackend(const MlaKernels& kernels, const BackendContext& context,
             const std::optional<MlaPrefillRoom>& room);
  ~MlaBackend() override { context_.bind_to_free(); }

  std::string_view name() const override { return setup_.kernels->name; }
  Device device() const override { return context_.info().device(); }
  const KvPool* kv() const override { return pool_; }
  size_t workspace_bytes(const BatchLimits& limits) const override;
  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override;
  void plan(const BatchView& batch, Stream stream) override;
  void forward(const LayerTensors& layer, Stream stream) override;

 private:
  struct Layer {
    cuda::KvWriteParams write{};
    cuda::MlaDecodeTensors cache;
  };

  const AttentionSpec& spec() const { return setup_.spec; }
  int64_t latent_values() const { return int64_t{heads_} * spec().mla.kv_lora_rank; }
  int32_t max_q_len(const BatchView& batch) const;
  void load_decodes(int32_t heads, std::vector<cuda::MlaDecode>& decodes) const;
  void launch_heads(const LayerTensors& tensors, const Layer& layer, Stream stream);
  void launch_layer(const LayerTensors& tensors, Stream stream);
  void attend(const LayerTensors& tensors, cuda::MlaDecodeTensors attention, Stream stream) const;
  void multiply(const cuda::HeadGemm& gemm, cuda::HeadGemmParams params, Stream stream) const;
  void absorb(const LayerTensors& tensors, Stream stream) const;
  void project(const LayerTensors& tensors, Stream stream) const;

  gpu::Context context_;
  const KvPool* pool_;
  MlaSetup setup_;
  BatchRules rules_;
  CudaCache cache_;
  std::vector<cuda::MlaDecode> decodes_;        // as mla_decode_setups()
  std::vector<cuda::MlaDecode> cut_decodes_;    // the same for cut_.heads, where those are fewer
  cuda::HeadGemm into_latent_, out_of_latent_;  // with weights
  std::optional<MlaPrefill> prefill_;           // where the spec allows it
  std::vector<Layer> layers_;
  WorkspaceMemory own_memory_;
  MlaCut cut_;
  MlaDeviceBuffers buffers_;
  bool reserved_ = false;
  bool planned_ = false;
  BatchView batch_;
  // Of the planned batch.
  const cuda::MlaDecode* active_ = nullptr;
  int32_t heads_ = 0;                           // that are computed at a time
  bool up_projects_ = false, absorbs_ = false;  // some requests, perhaps
  gpu::LaunchGroup plan_launches_;
  std::vector<gpu::LaunchGroup> layer_launches_;  // of each layer
};

MlaBackend::MlaBackend(const MlaKernels& kernels, const BackendContext& context,
                       const std::optional<MlaPrefillRoom>& room)
    : context_(context.device.index), pool_(context.kv) {
  setup_.kernels = &kernels;
  setup_.room = room;
  setup_.spec = context.spec;
  setup_.device = context_.info();
  validate_spec(spec());
  validate_pool(context);
  const KvPool& pool = *pool_;
  setup_.cache = pool.spec();
  rules_.spec = spec();
  rules_.page_size = setup_.cache.page_size;
  for (int32_t i = 0; i < setup_.cache.layers; ++i) {
    const KvLayerView view = pool.layer(i);
    layers_.push_back({mla_write(view, pool, spec()), mla_cache(view, spec())});
  }
  layer_launches_.resize(layers_.size());
  gpu::KernelStore& store = cuda::kernel_store();
  cache_ = CudaCache(spec(), pool, setup_.device.sm, store);
  load_decodes(spec().q_heads, decodes_);
  if (spec().mla.nope_dim > 0) {
    const auto load = [&](cuda::WeightOrder order) {
      return cuda::HeadGemm(mla_weights_setup(order, kernels, spec(), setup_.device), store);
    };
    into_latent_ = load(cuda::WeightOrder::kn);
    out_of_latent_ = load(cuda::WeightOrder::nk);
  }
  if (can_up_project(spec())) {
    prefill_.emplace(kernels, spec(), setup_.cache, setup_.device, store);
  }
}

void MlaBackend::load_decodes(int32_t heads, std::vector<cuda::MlaDecode>& decodes) const {
  for (const cuda::MlaDecodeSetup& decode : setup_.decode(heads)) {
    decodes.emplace_back(decode, cuda::kernel_store());
  }
}

size_t MlaBackend::workspace_bytes(const BatchLimits& limits) const {
  validate_limits(spec(), limits);
  return mla_workspace_bytes(*setup_.kernels, spec(), setup_.cache, setup_.device, limits,
                             setup_.room);
}

void MlaBackend::reserve(const BatchLimits& limits, std::span<std::byte> workspace) {
  const size_t needed = workspace_bytes(limits);
  context_.bind();
  const MlaCut cut = cut_mla(setup_, limits);
  std::vector<cuda::MlaDecode> cut_decodes;
  if (cut.heads < spec().q_heads) load_decodes(cut.heads, cut_decodes);
  WorkspaceCarver carver(own_memory_.given_or_own(workspace, needed, device(), name()).data());
  cut_ = cut;
  cut_decodes_ = std::move(cut_decodes);
  buffers_ = carve_mla(carver, setup_, limits, cut_);
  for (std::vector<cuda::MlaDecode>* decodes : {&decodes_, &cut_decodes_}) {
    for (cuda::MlaDecode& decode : *decodes) decode.reserve(limits, buffers_.work);
  }
  if (serves_up_projected(spec(), limits)) {
    prefill_->reserve(limits, buffers_.prefill, buffers_.scratch);
  }
  for (Layer& layer : layers_) {
    layer.cache.page_table = buffers_.pages.table;
    layer.cache.page_table_stride = buffers_.pages.stride;
  }
  rules_.limits = limits;
  reserved_ = true;
  planned_ = false;
}

int32_t MlaBackend::max_q_len(const BatchView& batch) const {
  if (batch.mode == ForwardMode::decode) return 1;
  return batch.hints.max_q_len > 0 ? batch.hints.max_q_len : rules_.limits.max_q_len;
}

// Host figures decide which kernels run, so that a captured pass keeps them whatever lengths it is
// replayed with. A row's bits are the same in both tiles when tiles are whole.
void MlaBackend::plan(const BatchView& batch, Stream stream) {
  check_argument(reserved_, "plan() before reserve()");
  planned_ = false;
  validate_batch_shape(batch, rules_);
  context_.bind();
  batch_ = batch;
  if (batch.mode == ForwardMode::idle || batch.requests == 0) batch_.tokens = batch_.requests = 0;
  if (batch_.tokens > 0) {
    cuda::BatchParams params{};
    params.q_indptr = batch.q_indptr.data();
    params.kv_lens = batch.kv_lens.data();
    params.requests = batch.requests;
    params.kv_heads = 1;
    params.mask.causal = 1;
    params.mask.tree = spec().mask == MaskKind::tree ? batch.masks.tree.ancestors.data() : nullptr;
    const int32_t longest = max_q_len(batch);
    if (spec().window > 0) {
      check_argument(batch.positions.empty() || longest <= kMaxPlaced,
                     "positions are given and max_q_len is {}: with a window of {} at most {}",
                     longest, spec().window, kMaxPlaced);
      params.mask.window = spec().window;
      params.mask.positions = batch.positions.data();
    }
    const int32_t most_keys =
        batch.hints.max_kv_len > 0 ? batch.hints.max_kv_len : rules_.limits.max_kv_len;
    const MlaFormBounds bounds =
        bound_mla_forms(spec(), batch, {batch.requests, batch.tokens, longest, most_keys},
                        serves_up_projected(spec(), rules_.limits) ? prefill_->max_context() : 0);
    up_projects_ = prefill_ && bounds.rows.all > 0;
    absorbs_ = bounds.max_absorbed > 0;
    heads_ = heads_of_pass(spec().q_heads, cut_.heads, rules_.limits.max_tokens, batch.tokens);
    params.q_heads = heads_;
    std::vector<cuda::MlaDecode>& decodes = heads_ < spec().q_heads ? cut_decodes_ : decodes_;
    const int64_t rows = int64_t{bounds.max_absorbed} * heads_;
    size_t chosen = 0;
    while (chosen + 1 < decodes.size() && rows > decodes[chosen].row_tile()) ++chosen;
    cuda::MlaDecode& kernel = decodes[chosen];
    plan_launches_.submit(stream, [&] {
      if (up_projects_) prefill_->plan(batch, bounds, heads_, stream);
      kernel.plan(params, {bounds.max_absorbed, batch.hints.max_kv_len, batch.hints.prefix_written},
                  {cache_.page_table(batch, batch.kv_lens.data(), buffers_.pages)}, stream,
                  up_projects_ ? prefill_->requests() : nullptr);
      if (up_projects_) prefill_->locate(layers_.front().cache, stream);
    });
    active_ = &kernel;
  }
  planned_ = true;
}

void MlaBackend::forward(const LayerTensors& tensors, Stream stream) {
  check_argument(planned_, "forward() without a plan");
  if (batch_.tokens == 0) return;
  validate_layer(tensors, spec(), batch_, true);
  validate_mla_layer(tensors, spec());
  context_.bind();
  check_argument(tensors.layer >= 0 && tensors.layer < static_cast<int64_t>(layers_.size()),
                 "layer is {}, the pool has {}", tensors.layer, layers_.size());
  layer_launches_[static_cast<size_t>(tensors.layer)].submit(
      stream, [&] { launch_layer(tensors, stream); });
}

void MlaBackend::launch_layer(const LayerTensors& tensors, Stream stream) {
  const Layer& layer = layers_[static_cast<size_t>(tensors.layer)];
  if (stores(tensors) || spec().has_rope) {
    cache_.store(mla_written(tensors, spec(), setup_.cache.layout), layer.write, batch_, stream);
  }
  if (!tensors.q) return;
  for (int32_t head = 0; head < spec().q_heads; head += heads_) {
    launch_heads(from_head(tensors, head, spec()), layer, stream);
  }
}

// The first heads_ heads of `tensors`.
void MlaBackend::launch_heads(const LayerTensors& tensors, const Layer& layer, Stream stream) {
  // Either form writes the rows of its own requests alone.
  if (up_projects_) prefill_->attend(tensors, layer.cache, stream);
  if (!absorbs_) return;
  if (spec().mla.nope_dim > 0) absorb(tensors, stream);
  attend(tensors, layer.cache, stream);
  if (spec().mla.nope_dim > 0) project(tensors, stream);
}

void MlaBackend::attend(const LayerTensors& tensors, cuda::MlaDecodeTensors attention,
                        Stream stream) const {
  const bool has_weights = spec().mla.nope_dim > 0;
  const HeadRows rope = rotary_queries(tensors, spec());
  attention.q_latent = has_weights ? buffers_.scratch.queries : tensors.q.data;
  attention.q_latent_token_stride = has_weights ? latent_values() : tensors.q.token_stride;
  attention.q_latent_head_stride = has_weights ? spec().mla.kv_lora_rank : tensors.q.head_stride;
  attention.q_rope = rope.data;
  attention.q_rope_token_stride = rope.token_stride;
  attention.q_rope_head_stride = rope.head_stride;
  attention.tokens = batch_.tokens;
  attention.out = has_weights ? buffers_.scratch.results : tensors.out.data;
  attention.out_token_stride = has_weights ? latent_values() : tensors.out.token_stride;
  attention.out_head_stride = has_weights ? spec().mla.kv_lora_rank : tensors.out.head_stride;
  attention.lse = tensors.lse.data;
  active_->decode(attention, stream);
}

void MlaBackend::multiply(const cuda::HeadGemm& gemm, cuda::HeadGemmParams params,
                          Stream stream) const {
  params.live_tokens = batch_.q_indptr.data() + batch_.requests;
  params.skip = up_projects_ ? prefill_->tokens() : nullptr;
  params.tokens = batch_.tokens;
  params.heads = heads_;
  gemm.run(params, stream);
}

// queries = q_nope W_UK
void MlaBackend::absorb(const LayerTensors& tensors, Stream stream) const {
  const MlaWeights weights = with_head_strides(tensors.mla.weights, spec());
  cuda::HeadGemmParams params{};
  params.x = tensors.q.data;
  params.x_token_stride = tensors.q.token_stride;
  params.x_head_stride = tensors.q.head_stride;
  params.weight = weights.w_uk;
  params.weight_head_stride = weights.w_uk_head_stride;
  params.weight_row_stride = spec().mla.kv_lora_rank;
  params.out = buffers_.scratch.queries;
  params.out_token_stride = latent_values();
  params.out_head_stride = spec().mla.kv_lora_rank;
  params.n = spec().mla.kv_lora_rank;
  params.k = spec().mla.nope_dim;
  multiply(into_latent_, params, stream);
}

// out = latents W_UV
void MlaBackend::project(const LayerTensors& tensors, Stream stream) const {
  const MlaWeights weights = with_head_strides(tensors.mla.weights, spec());
  cuda::HeadGemmParams params{};
  params.x = buffers_.scratch.results;
  params.x_token_stride = latent_values();
  params.x_head_stride = spec().mla.kv_lora_rank;
  params.weight = weights.w_uv;
  params.weight_head_stride = weights.w_uv_head_stride;
  params.weight_row_stride = spec().mla.kv_lora_rank;
  params.out = tensors.out.data;
  params.out_token_stride = tensors.out.token_stride;
  params.out_head_stride = tensors.out.head_stride;
  params.n = spec().mla.v_dim;
  params.k = spec().mla.kv_lora_rank;
  multiply(out_of_latent_, params, stream);
}

}  // namespace

size_t mla_workspace_bytes(const MlaKernels& kernels, const AttentionSpec& spec,
                           const KvCacheSpec& cache, const DeviceInfo& device,
                           const BatchLimits& limits, const std::optional<MlaPrefillRoom>& room) {
  const MlaSetup setup{&kernels, spec, cache, device, room};
  WorkspaceCarver counter(nullptr);
  carve_mla(counter, setup, limits, cut_mla(setup, limits));
  return counter.bytes();
}

std::unique_ptr<AttentionBackend> make_mla_backend(const MlaKernels& kernels,
                                                   const BackendContext& context,
                                                   const std::optional<MlaPrefillRoom>& room) {
  return std::make_unique<MlaBackend>(kernels, context, room);
}

}  // namespace fovea
