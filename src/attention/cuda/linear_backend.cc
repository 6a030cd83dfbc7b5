// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/linear_backend.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>

#include "attention/cuda/backend_base.h"
#include "attention/cuda/layer.h"
#include "attention/cuda/linear_chunks.h"
#include "attention/validate/spec.h"
#include "core/check.h"
#include "kernels/cuda/portable/causal_conv/launch.h"
#include "kernels/cuda/portable/linear_plan/launch.h"
#include "kernels/cuda/portable/recurrence/launch.h"
#include "kernels/cuda/portable/selective_scan/launch.h"
#include "kernels/cuda/sm90/draft_products/launch.h"
#include "kernels/cuda/sm90/recurrent_decode/launch.h"
#include "kernels/cuda/sm90/recurrent_drafts/launch.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

constexpr int32_t kMaxFewTokens = 8;
static_assert(kMaxFewTokens <= cuda::DraftProducts::kMaxTokens);

cuda::StateType state_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return cuda::StateType::bf16;
    case DType::f16:
      return cuda::StateType::f16;
    default:
      return cuda::StateType::f32;
  }
}

cuda::RecurrentDecodeSetup decode_setup(const AttentionSpec& spec, const DeviceInfo& device,
                                        cuda::StateType states) {
  return {.kind = recurrence_of(spec),
          .rows = spec.linear.value_dim,
          .columns = spec.linear.key_dim,
          .state_type = states,
          .sm = device.sm,
          .multiprocessors = device.cores};
}

bool has_recurrence(const AttentionSpec& spec) { return spec.kind != AttentionKind::short_conv; }

// Returns the kernels that compute any batch token by token. The spec has a recurrence.
std::vector<gpu::KernelVariant> recurrent_variants(const AttentionSpec& spec, int sm) {
  return spec.kind == AttentionKind::mamba1
             ? cuda::selective_scan_variants(spec.linear.key_dim, sm)
             : cuda::recurrence_variants(recurrence_of(spec), spec.linear.key_dim, sm);
}

// True if the recurrence reads what the convolution of the same call wrote.
bool convolves_first(const AttentionSpec& spec) {
  return spec.linear.conv_width > 0 && !convolves_alone(spec.kind);
}

// Returns the first channel of replayed drafts that the recurrence reads, and the one behind the
// last: keys, and values unless slots keep changes.
std::pair<int32_t, int32_t> replayed_channels(const AttentionSpec& spec,
                                              const cuda::RecurrenceParams& params) {
  const LinearSpec& linear = spec.linear;
  const int32_t keys_end = params.in_at + linear.key_heads * linear.key_dim;
  if (draft_row(spec).changes > 0) return {params.in_at, keys_end};
  const int32_t values_end = params.values_at + linear.value_heads * linear.value_dim;
  return {std::min(params.in_at, params.values_at), std::max(keys_end, values_end)};
}

struct Buffers {
  cuda::StateSpan* spans = nullptr;   // [max_requests]
  cuda::DraftSpan* drafts = nullptr;  // [max_requests]
  int32_t* token_requests = nullptr;  // [max_tokens]
  int32_t* snapshot_slots = nullptr;  // [max_tokens]
  float* convolved = nullptr;         // [max_tokens, conv_dim], with convolves_first()
  void* chunked = nullptr;            // workspace of chunks, if there are any
};

Buffers carve_buffers(WorkspaceCarver& workspace, const AttentionSpec& spec,
                      const BatchLimits& limits, const DeviceInfo& device) {
  Buffers buffers;
  buffers.spans = workspace.take<cuda::StateSpan>(limits.max_requests);
  buffers.drafts = workspace.take<cuda::DraftSpan>(limits.max_requests);
  buffers.token_requests = workspace.take<int32_t>(limits.max_tokens);
  buffers.snapshot_slots = workspace.take<int32_t>(limits.max_tokens);
  if (convolves_first(spec)) {
    buffers.convolved = workspace.take<float>(int64_t{limits.max_tokens} * spec.linear.conv_dim());
  }
  if (computes_chunks(spec, device)) {
    const size_t bytes = cuda::ChunkPrefill::workspace_bytes(
        chunk_setup(spec, device), limits.max_tokens, limits.max_requests);
    buffers.chunked = workspace.take_bytes(bytes).data();
  }
  return buffers;
}

static_assert(sizeof(cuda::SlotMark) == sizeof(StateMark) &&
              offsetof(cuda::SlotMark, drafts) == offsetof(StateMark, drafts) &&
              offsetof(cuda::SlotMark, row) == offsetof(StateMark, row));

// Returns what all layers of the spec have in common.
cuda::RecurrenceParams recurrence_params(const AttentionSpec& spec) {
  const LinearSpec& linear = spec.linear;
  const int32_t keys = linear.key_heads * linear.key_dim;
  const int32_t values = linear.value_heads * linear.value_dim;
  const bool is_mamba = spec.kind == AttentionKind::mamba2 || spec.kind == AttentionKind::mamba1;
  cuda::RecurrenceParams params{};
  if (!has_recurrence(spec)) return params;
  params.mixed_stride = linear.conv_dim();
  if (is_mamba) {
    params.values_at = 0;
    params.in_at = values;
    params.out_at = values + keys;
  } else {
    params.out_at = 0;
    params.in_at = keys;
    params.values_at = 2 * keys;
  }
  params.heads = linear.value_heads;
  params.key_group = linear.value_heads / linear.key_heads;
  params.rows = linear.value_dim;
  params.columns = linear.key_dim;
  params.scale = is_mamba ? 1 : softmax_scale(spec);
  if (spec.kind == AttentionKind::mamba1) {  // the channels of a group are the rows of a head
    params.heads = linear.key_heads;
    params.key_group = 1;
    params.rows = linear.value_heads / linear.key_heads;
  }
  return params;
}

class CudaLinear final : public CudaBackendBase {
 public:
  CudaLinear(std::string_view name, const BackendContext& context);
  ~CudaLinear() override { free_graphs(); }

 private:
  size_t count_bytes(const BatchLimits& limits) const override {
    return cuda_linear_workspace_bytes(spec(), limits, device_info());
  }
  void carve(WorkspaceCarver& workspace, const BatchLimits& limits) override {
    buffers_ = carve_buffers(workspace, spec(), limits, device_info());
  }
  void check_batch(const BatchView& batch) const override;
  void check_layer(const LayerTensors& tensors) const override {
    LayerTensors whole = tensors;
    whole.out.head_stride = 0;  // heads are dense, and may be as narrow as one channel
    validate_alignment(whole);
  }
  void plan_batch(const BatchView& batch, gpu::Launcher launcher) override;
  void run_layer(const LayerTensors& tensors, gpu::Launcher launcher) override;

  bool keeps_drafts() const { return states()->marks() != nullptr; }
  cuda::KeptInputs kept_inputs(const StateLayerView& state) const;
  cuda::TokensOfRequest tokens_of_request() const;
  bool has_few_tokens() const { return tokens_of_request() != cuda::TokensOfRequest::any; }
  // Return whether drafts_ or products_ compute the planned batch. Decodes are faster without the
  // latter.
  bool runs_drafts() const { return drafts_ && has_few_tokens() && !multiplies_drafts(); }
  bool multiplies_drafts() const {
    return products_ && tokens_of_request() == cuda::TokensOfRequest::few &&
           batch().linear.snapshot_slots.empty() && products_->is_faster(params_);
  }
  void convolve(const LinearTensors& linear, const StateLayerView& state, float* out,
                int64_t token_stride, gpu::Launcher launcher);
  cuda::ChunkPrefillBatch chunked_batch() const {
    return {.spans = buffers_.spans, .requests = batch().requests, .tokens = batch().tokens};
  }

  cuda::LinearPlanner planner_;
  cuda::CausalConv conv_;
  cuda::RecurrentKernels recurrence_;
  std::optional<cuda::RecurrentDecode> decode_;
  std::optional<cuda::RecurrentDrafts> drafts_;  // if slots keep drafts
  std::optional<cuda::DraftProducts> products_;  // if they do, and bits may depend on passes
  std::optional<cuda::ChunkPrefill> chunks_;
  cuda::RecurrenceParams params_;  // each pass and each layer add theirs
  std::vector<StateLayerView> layers_;
  Buffers buffers_;
  bool one_token_ = false;  // no request of the planned batch has more than one
  bool chunked_ = false;    // requests of the planned batch may be in chunks
};

CudaLinear::CudaLinear(std::string_view name, const BackendContext& context)
    : CudaBackendBase(name, context), params_(recurrence_params(spec())) {
  gpu::KernelStore& store = cuda::kernel_store();
  const int sm = device_info().sm;
  planner_ = cuda::LinearPlanner(sm, store);
  if (has_recurrence(spec())) {
    recurrence_ = cuda::RecurrentKernels(recurrent_variants(spec(), sm), store);
  }
  if (spec().linear.conv_width > 0) {
    conv_ = cuda::CausalConv(cuda::causal_conv_variants(spec().linear.conv_width, sm),
                             device_info().cores, store);
  }
  if (computes_chunks(spec(), device_info())) {
    chunks_.emplace(chunk_setup(spec(), device_info()), store);
  }
  for (int32_t i = 0; i < states()->spec().layers; ++i) {
    layers_.push_back(states()->layer(i));
    check_state_alignment(layers_.back(), states()->spec().dtype, i);
  }
  params_.state_type = state_type(states()->spec().dtype);
  const cuda::RecurrentDecodeSetup decode = decode_setup(spec(), device_info(), params_.state_type);
  if (cuda::RecurrentDecode::serves(decode)) decode_.emplace(decode, store);
  if (!keeps_drafts()) return;
  if (cuda::RecurrentDrafts::serves(decode)) drafts_.emplace(decode, store);
  if (!spec().batch_invariant && states()->spec().max_drafts <= cuda::DraftProducts::kMaxTokens &&
      cuda::DraftProducts::serves(decode)) {
    products_.emplace(decode, store);
  }
}

void CudaLinear::check_batch(const BatchView& batch) const {
  if (batch.mode == ForwardMode::idle || batch.requests == 0) return;
  check_argument(!batch.kv_lens.empty(), "kv_lens is absent, the batch needs it");
  check_argument(!batch.linear.state_slots.empty(),
                 "linear.state_slots is absent, the batch needs it");
}

void CudaLinear::plan_batch(const BatchView& batch, gpu::Launcher launcher) {
  const int32_t hint = batch.hints.max_q_len;
  one_token_ = batch.mode == ForwardMode::decode || hint == 1;
  chunked_ = chunks_ && !one_token_ && (hint == 0 || hint >= kMinChunkedTokens) &&
             batch.tokens >= kMinChunkedTokens;
  const bool snapshots = !batch.linear.snapshot_slots.empty();
  cuda::LinearPlanParams plan{};
  plan.plan.spans = buffers_.spans;
  plan.plan.drafts = keeps_drafts() ? buffers_.drafts : nullptr;
  plan.plan.token_requests = buffers_.token_requests;
  plan.plan.snapshot_slots = snapshots ? buffers_.snapshot_slots : nullptr;
  plan.plan.token_count = batch.q_indptr.data() + batch.requests;
  plan.q_indptr = batch.q_indptr.data();
  plan.kv_lens = batch.kv_lens.data();
  plan.state_slots = batch.linear.state_slots.data();
  plan.snapshot_slots = batch.linear.snapshot_slots.data();
  plan.draft_counts = batch.linear.draft_counts.data();
  plan.marks = reinterpret_cast<cuda::SlotMark*>(states()->marks());
  plan.max_drafts = states()->spec().max_drafts;
  plan.slots = states()->slots();
  plan.tokens = batch.tokens;
  plan.min_chunked = chunked_ ? kMinChunkedTokens : 0;
  planner_.run(plan, batch.requests, launcher);
  params_.plan = plan.plan;
  params_.requests = batch.requests;
  if (chunked_) chunks_->plan(chunked_batch(), buffers_.chunked, launcher);
}

cuda::KeptInputs CudaLinear::kept_inputs(const StateLayerView& state) const {
  if (!keeps_drafts()) return {};
  const DraftRow row = draft_row(spec());
  return {.rows = state.drafts,
          .slot_stride = 2 * int64_t{states()->spec().max_drafts} * row.size,
          .size = row.size,
          .decays_at = row.decays_at,
          .betas_at = row.betas_at,
          .changes_at = row.changes_at};
}

cuda::TokensOfRequest CudaLinear::tokens_of_request() const {
  if (one_token_) return cuda::TokensOfRequest::one;
  // Passes of drafts name their width (draft_batch()).
  const int32_t hint = batch().hints.max_q_len;
  const bool is_few = hint > 0 && hint <= kMaxFewTokens;
  return is_few ? cuda::TokensOfRequest::few : cuda::TokensOfRequest::any;
}

void CudaLinear::convolve(const LinearTensors& linear, const StateLayerView& state, float* out,
                          int64_t token_stride, gpu::Launcher launcher) {
  cuda::CausalConvKernelParams conv{};
  conv.plan = params_.plan;
  conv.x = linear.mixed;
  conv.weight = linear.conv_weight;
  conv.bias = linear.conv_bias;
  conv.state = state.conv;
  conv.state_slot_stride = state.conv_slot_stride;
  conv.kept = kept_inputs(state);
  conv.y = out;
  conv.y_token_stride = token_stride;
  conv.plain = linear.plain_conv;
  conv.dim = conv_dim_of(spec());
  if (convolves_first(spec())) {
    std::tie(conv.replayed_begin, conv.replayed_end) = replayed_channels(spec(), params_);
  }
  conv.width = spec().linear.conv_width;
  // A few blocks of drafts_ take all registers of a multiprocessor and have a fixed share of the
  // work. Where they start among blocks of the convolution, which leave gaps between the registers
  // of both, one may have to wait until another has ended. Blocks of products_ are short.
  conv.next_waits = runs_drafts();
  conv_.run(conv, batch().requests, batch().tokens, has_few_tokens(), launcher);
}

void CudaLinear::run_layer(const LayerTensors& tensors, gpu::Launcher launcher) {
  const StateLayerView& state = layers_[static_cast<size_t>(tensors.layer)];
  auto* const out = static_cast<float*>(tensors.out.data);
  if (convolves_alone(spec().kind) && tensors.linear.conv_weight != nullptr) {
    return convolve(tensors.linear, state, out, tensors.out.token_stride, launcher);
  }
  const bool convolves = convolves_first(spec());
  if (convolves) {
    convolve(tensors.linear, state, buffers_.convolved, spec().linear.conv_dim(), launcher);
  }
  params_.mixed = convolves ? buffers_.convolved : tensors.linear.mixed;
  params_.log_decay = tensors.linear.log_decay;
  params_.strength = tensors.linear.beta;
  params_.skip = tensors.linear.skip;
  params_.state = state.state;
  params_.state_slot_stride = state.state_slot_stride;
  params_.result = out;
  params_.result_stride = tensors.out.token_stride;
  params_.l2_normalise = tensors.linear.l2_normalise_qk;
  params_.state_is_ready = convolves;
  params_.kept = kept_inputs(state);
  params_.keeps_mixed = !convolves;
  if (decode_ && one_token_ && !keeps_drafts() && decode_->is_faster(params_)) {
    decode_->run(params_, launcher);
  } else if (runs_drafts()) {
    drafts_->run(params_, launcher);
  } else if (multiplies_drafts()) {
    products_->run(params_, launcher);
  } else {
    recurrence_.run(params_, batch().requests, tokens_of_request(), launcher);
  }
  if (chunked_) {
    const auto* const convolved = reinterpret_cast<const uint16_t*>(buffers_.convolved);
    chunks_->run(chunked_batch(), chunk_tensors(params_, convolved), buffers_.chunked, launcher);
  }
}

}  // namespace

size_t cuda_linear_workspace_bytes(const AttentionSpec& spec, const BatchLimits& limits,
                                   const DeviceInfo& device) {
  WorkspaceCarver counter(nullptr);
  carve_buffers(counter, spec, limits, device);
  return counter.bytes();
}

std::vector<gpu::KernelVariant> cuda_linear_variants(const AttentionSpec& spec,
                                                     const DeviceInfo& device) {
  const int sm = device.sm;
  std::vector<gpu::KernelVariant> needed;
  const auto add = [&](const std::vector<gpu::KernelVariant>& more) {
    needed.insert(needed.end(), more.begin(), more.end());
  };
  if (has_recurrence(spec)) add(recurrent_variants(spec, sm));
  // The request does not say of what type the pool's states are.
  for (const auto states : {cuda::StateType::f32, cuda::StateType::bf16, cuda::StateType::f16}) {
    const cuda::RecurrentDecodeSetup decode = decode_setup(spec, device, states);
    if (cuda::RecurrentDecode::serves(decode)) {
      needed.push_back(cuda::RecurrentDecode::variant(decode));
    }
    if (cuda::RecurrentDrafts::serves(decode)) add(cuda::RecurrentDrafts::variants(decode));
    if (!spec.batch_invariant && cuda::DraftProducts::serves(decode)) {
      needed.push_back(cuda::DraftProducts::variant(decode));
    }
  }
  needed.push_back(cuda::linear_plan_variant(sm));
  if (spec.linear.conv_width > 0) add(cuda::causal_conv_variants(spec.linear.conv_width, sm));
  if (computes_chunks(spec, device)) {
    add(cuda::ChunkPrefill::variants(chunk_setup(spec, device)));
  }
  return needed;
}

std::unique_ptr<AttentionBackend> make_cuda_linear(std::string_view name,
                                                   const BackendContext& context) {
  return std::make_unique<CudaLinear>(name, context);
}

}  // namespace fovea
