// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/mla_backend.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "attention/cuda/backend_base.h"
#include "attention/cuda/mla_cut.h"
#include "attention/cuda/mla_layer.h"
#include "attention/mla_forms.h"
#include "attention/row_views.h"
#include "attention/validate/layer.h"
#include "core/check.h"
#include "kernels/cuda/head_gemm.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

// New tokens of a request for which a window can be measured on given positions: a bit each.
constexpr int32_t kMaxPlaced = 64;

class MlaBackend final : public CudaBackendBase {
 public:
  MlaBackend(const MlaKernels& kernels, const BackendContext& context,
             const std::optional<UpProjectedRoom>& room);
  ~MlaBackend() override { free_graphs(); }

 private:
  struct Layer {
    cuda::KvWriteParams write{};
    cuda::MlaDecodeTensors cache;
  };
  // How a workspace keeps to its budget, with the kernels for fewer heads that it needs.
  struct Reserved {
    MlaCut cut;
    std::vector<cuda::MlaDecode> decodes;  // for cut.heads, if these are not all heads
  };

  size_t count_bytes(const BatchLimits& limits) const override;
  void prepare(const BatchLimits& limits) override;
  void carve(WorkspaceCarver& workspace, const BatchLimits& limits) override;
  void check_layer(const LayerTensors& tensors) const override;
  void plan_batch(const BatchView& batch, gpu::Launcher launcher) override;
  void run_layer(const LayerTensors& tensors, gpu::Launcher launcher) override;

  int64_t latent_values() const { return int64_t{heads_} * spec().mla.kv_lora_rank; }
  int32_t max_q_len(const BatchView& batch) const;
  std::vector<cuda::MlaDecode> load_decodes(int32_t heads) const;
  cuda::MaskParams mask_params(const BatchView& batch) const;
  MlaFormBounds bound_forms(const BatchView& batch) const;
  cuda::MlaDecode& choose_decode(int32_t max_q_len);
  void run_heads(const LayerTensors& tensors, const Layer& layer, gpu::Launcher launcher);
  void attend(const LayerTensors& tensors, cuda::MlaDecodeTensors attention,
              gpu::Launcher launcher) const;
  void multiply(const cuda::HeadGemm& gemm, cuda::HeadGemmParams params,
                gpu::Launcher launcher) const;
  void absorb(const LayerTensors& tensors, gpu::Launcher launcher) const;
  void project(const LayerTensors& tensors, gpu::Launcher launcher) const;

  MlaSetup setup_;
  std::vector<cuda::MlaDecode> decodes_;        // as mla_decode_setups()
  cuda::HeadGemm into_latent_, out_of_latent_;  // with weights
  std::optional<CudaUpProjectedMla> prefill_;   // where the spec allows it
  std::vector<Layer> layers_;
  Reserved reserved_, prepared_;
  MlaDeviceBuffers buffers_;
  // The planned batch:
  const cuda::MlaDecode* active_ = nullptr;
  int32_t heads_ = 0;         // computed at a time
  bool up_projects_ = false;  // some requests may be up-projected
  bool absorbs_ = false;      // some requests may be absorbed
};

MlaBackend::MlaBackend(const MlaKernels& kernels, const BackendContext& context,
                       const std::optional<UpProjectedRoom>& room)
    : CudaBackendBase(kernels.name, context) {
  setup_.kernels = &kernels;
  setup_.room = room;
  setup_.spec = spec();
  setup_.device = device_info();
  setup_.cache = pool()->spec();
  for (int32_t i = 0; i < setup_.cache.layers; ++i) {
    const KvLayerView view = pool()->layer(i);
    layers_.push_back({mla_write(view, *pool(), spec()), mla_cache(view, spec())});
  }
  gpu::KernelStore& store = cuda::kernel_store();
  decodes_ = load_decodes(spec().q_heads);
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

std::vector<cuda::MlaDecode> MlaBackend::load_decodes(int32_t heads) const {
  std::vector<cuda::MlaDecode> decodes;
  for (const cuda::MlaDecodeSetup& decode : setup_.decode(heads)) {
    decodes.emplace_back(decode, cuda::kernel_store());
  }
  return decodes;
}

size_t MlaBackend::count_bytes(const BatchLimits& limits) const {
  return mla_workspace_bytes(*setup_.kernels, spec(), setup_.cache, setup_.device, limits,
                             setup_.room);
}

void MlaBackend::prepare(const BatchLimits& limits) {
  prepared_ = {.cut = cut_mla(setup_, limits), .decodes = {}};
  const int32_t heads = prepared_.cut.heads;
  if (heads < spec().q_heads) prepared_.decodes = load_decodes(heads);
}

void MlaBackend::carve(WorkspaceCarver& workspace, const BatchLimits& limits) {
  reserved_ = std::move(prepared_);
  buffers_ = carve_mla(workspace, setup_, limits, reserved_.cut);
  for (std::vector<cuda::MlaDecode>* decodes : {&decodes_, &reserved_.decodes}) {
    for (cuda::MlaDecode& decode : *decodes) decode.reserve(limits, buffers_.work);
  }
  if (serves_up_projected(spec(), limits)) {
    prefill_->reserve(limits, buffers_.prefill, buffers_.scratch);
  }
  for (Layer& layer : layers_) {
    layer.cache.page_table = {buffers_.pages.table, buffers_.pages.stride};
  }
}

void MlaBackend::check_layer(const LayerTensors& tensors) const {
  validate_mla_layer(tensors, spec());
}

int32_t MlaBackend::max_q_len(const BatchView& batch) const {
  if (batch.mode == ForwardMode::decode) return 1;
  return batch.hints.max_q_len > 0 ? batch.hints.max_q_len : limits().max_q_len;
}

cuda::MaskParams MlaBackend::mask_params(const BatchView& batch) const {
  cuda::MaskParams mask{};
  mask.causal = 1;
  mask.tree = spec().mask == MaskKind::tree ? batch.masks.tree.ancestors.data() : nullptr;
  if (spec().window == 0) return mask;
  check_argument(batch.positions.empty() || max_q_len(batch) <= kMaxPlaced,
                 "positions are given and max_q_len is {}: with a window of {} at most {}",
                 max_q_len(batch), spec().window, kMaxPlaced);
  mask.window = spec().window;
  mask.positions = batch.positions.data();
  return mask;
}

MlaFormBounds MlaBackend::bound_forms(const BatchView& batch) const {
  const int32_t max_keys =
      batch.hints.max_kv_len > 0 ? batch.hints.max_kv_len : limits().max_kv_len;
  return bound_mla_forms(spec(), batch, {batch.requests, batch.tokens, max_q_len(batch), max_keys},
                         serves_up_projected(spec(), limits()) ? prefill_->max_context() : 0);
}

// The kernel with the smallest row tile that holds all rows of an absorbed request, or the last.
cuda::MlaDecode& MlaBackend::choose_decode(int32_t max_q_len) {
  std::vector<cuda::MlaDecode>& decodes = heads_ < spec().q_heads ? reserved_.decodes : decodes_;
  const int64_t rows = int64_t{max_q_len} * heads_;
  size_t chosen = 0;
  while (chosen + 1 < decodes.size() && rows > decodes[chosen].row_tile()) ++chosen;
  return decodes[chosen];
}

// Host figures decide which kernels run, so that a captured pass keeps them whatever lengths it is
// replayed with. A row's bits are the same in both tiles when tiles are whole.
void MlaBackend::plan_batch(const BatchView& batch, gpu::Launcher launcher) {
  cuda::BatchParams params{};
  params.q_indptr = batch.q_indptr.data();
  params.kv_lens = batch.kv_lens.data();
  params.requests = batch.requests;
  params.kv_heads = 1;
  params.mask = mask_params(batch);
  const MlaFormBounds bounds = bound_forms(batch);
  up_projects_ = prefill_ && bounds.rows.all > 0;
  absorbs_ = bounds.max_absorbed > 0;
  heads_ = heads_of_pass(spec().q_heads, reserved_.cut.heads, limits().max_tokens, batch.tokens);
  params.q_heads = heads_;
  cuda::MlaDecode& kernel = choose_decode(bounds.max_absorbed);
  if (up_projects_) prefill_->plan(batch, bounds, heads_, launcher);
  params.max_q_len = bounds.max_absorbed;
  cuda::PlanQueue plans({cache().page_table(batch, batch.kv_lens.data(), buffers_.pages)});
  kernel.plan({.batch = params,
               .tokens = batch.tokens,
               .keys = {.prefix_written = batch.hints.prefix_written,
                        .max_kv_len = batch.hints.max_kv_len}},
              plans, up_projects_ ? prefill_->requests() : nullptr);
  plans.launch(nullptr, launcher);
  if (up_projects_) prefill_->locate(layers_.front().cache, launcher);
  active_ = &kernel;
}

void MlaBackend::run_layer(const LayerTensors& tensors, gpu::Launcher launcher) {
  const Layer& layer = layers_[static_cast<size_t>(tensors.layer)];
  if (stores(tensors) || spec().has_rope) {
    cache().store(mla_written(tensors, spec(), setup_.cache.layout), layer.write, batch(),
                  launcher);
  }
  if (!tensors.q) return;
  for (int32_t head = 0; head < spec().q_heads; head += heads_) {
    run_heads(from_head(tensors, head, spec()), layer, launcher);
  }
}

// The first heads_ heads of `tensors`.
void MlaBackend::run_heads(const LayerTensors& tensors, const Layer& layer,
                           gpu::Launcher launcher) {
  // Either form writes the rows of its own requests alone.
  if (up_projects_) prefill_->attend(tensors, layer.cache, launcher);
  if (!absorbs_) return;
  if (spec().mla.nope_dim > 0) absorb(tensors, launcher);
  attend(tensors, layer.cache, launcher);
  if (spec().mla.nope_dim > 0) project(tensors, launcher);
}

void MlaBackend::attend(const LayerTensors& tensors, cuda::MlaDecodeTensors attention,
                        gpu::Launcher launcher) const {
  const bool has_weights = spec().mla.nope_dim > 0;
  const HeadRows rope = rotary_queries(tensors, spec());
  const int64_t token_stride = latent_values(), head_stride = spec().mla.kv_lora_rank;
  attention.q_rope = {rope.data, rope.token_stride, rope.head_stride};
  attention.tokens = batch().tokens;
  if (has_weights) {
    attention.q_latent = {buffers_.scratch.queries, token_stride, head_stride};
    attention.out = {buffers_.scratch.results, token_stride, head_stride, tensors.lse.data};
  } else {
    attention.q_latent = {tensors.q.data, tensors.q.token_stride, tensors.q.head_stride};
    attention.out = {tensors.out.data, tensors.out.token_stride, tensors.out.head_stride,
                     tensors.lse.data};
  }
  active_->attend(attention, launcher);
}

void MlaBackend::multiply(const cuda::HeadGemm& gemm, cuda::HeadGemmParams params,
                          gpu::Launcher launcher) const {
  params.live_tokens = batch().q_indptr.data() + batch().requests;
  params.skip = up_projects_ ? prefill_->tokens() : nullptr;
  params.tokens = batch().tokens;
  params.heads = heads_;
  gemm.run(params, launcher);
}

// queries = q_nope W_UK
void MlaBackend::absorb(const LayerTensors& tensors, gpu::Launcher launcher) const {
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
  multiply(into_latent_, params, launcher);
}

// out = latents W_UV
void MlaBackend::project(const LayerTensors& tensors, gpu::Launcher launcher) const {
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
  multiply(out_of_latent_, params, launcher);
}

}  // namespace

size_t mla_workspace_bytes(const MlaKernels& kernels, const AttentionSpec& spec,
                           const KvCacheSpec& cache, const DeviceInfo& device,
                           const BatchLimits& limits, const std::optional<UpProjectedRoom>& room) {
  const MlaSetup setup{&kernels, spec, cache, device, room};
  WorkspaceCarver counter(nullptr);
  carve_mla(counter, setup, limits, cut_mla(setup, limits));
  return counter.bytes();
}

std::unique_ptr<AttentionBackend> make_mla_backend(const MlaKernels& kernels,
                                                   const BackendContext& context,
                                                   const std::optional<UpProjectedRoom>& room) {
  return std::make_unique<MlaBackend>(kernels, context, room);
}

}  // namespace fovea
