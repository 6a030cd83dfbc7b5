// SPDX-License-Identifier: Apache-2.0
#include "attention/host/linear.h"

#include <optional>

#include "attention/host/kept_drafts.h"
#include "attention/validate/spec.h"
#include "core/check.h"

namespace fovea {
namespace {

struct Buffers {
  DraftTokens* drafts = nullptr;  // [max_requests]
  float* convolved = nullptr;     // [max_tokens, conv_dim], before a recurrence
};

Buffers carve_buffers(WorkspaceCarver& workspace, const HostShape& shape,
                      const BatchLimits& limits) {
  Buffers buffers;
  buffers.drafts = workspace.take<DraftTokens>(limits.max_requests);
  if (shape.spec.linear.conv_width > 0 && !convolves_alone(shape.spec.kind)) {
    buffers.convolved =
        workspace.take<float>(int64_t{limits.max_tokens} * shape.spec.linear.conv_dim());
  }
  return buffers;
}

// A part of a pass: requests, with the tensors and the states that their tokens and slots index.
struct LinearPart {
  kernels::StateBatch batch;
  LinearTensors linear;
  StateLayerView state;
  float* convolved = nullptr;  // with a convolution
  float* out = nullptr;
  int64_t out_token_stride = 0;
  bool in_chunks = false;

  // Returns `count` of its requests.
  LinearPart requests(int32_t first, int32_t count) const {
    LinearPart part = *this;
    part.batch.requests = count;
    part.batch.q_indptr += first;
    part.batch.kv_lens += first;
    part.batch.state_slots += first;
    return part;
  }
};

class HostLinear final : public HostBackend {
 public:
  HostLinear(const HostKernels& kernels, const BackendContext& context)
      : HostBackend(kernels, context) {
    if (states()->marks() != nullptr) kept_.emplace(spec(), *states());
  }

 private:
  size_t count_bytes(const BatchLimits& limits) const override {
    return host_linear_workspace_bytes(shape(), limits);
  }

  void carve(WorkspaceCarver& workspace, const BatchLimits& limits) override {
    buffers_ = carve_buffers(workspace, shape(), limits);
  }

  void plan_batch(const BatchView& batch) override {
    state_batch_ = {batch.requests, batch.q_indptr.data(), batch.kv_lens.data(),
                    batch.linear.state_slots.data(), batch.linear.snapshot_slots.data()};
    if (kept_) kept_->plan(batch, buffers_.drafts);
  }

  void run_layer(const LayerTensors& layer) override {
    const LinearPart whole = {.batch = state_batch_,
                              .linear = layer.linear,
                              .state = states()->layer(layer.layer),
                              .convolved = buffers_.convolved,
                              .out = static_cast<float*>(layer.out.data),
                              .out_token_stride = layer.out.token_stride,
                              .in_chunks = !spec().batch_invariant};
    if (!kept_) return run_part(whole);
    for (int32_t request = 0; request < whole.batch.requests; ++request) {
      const int32_t first = request;
      while (request < whole.batch.requests && !buffers_.drafts[request].any()) ++request;
      if (request > first) run_part(whole.requests(first, request - first));
      if (request < whole.batch.requests) {
        run_drafts(whole.requests(request, 1), buffers_.drafts[request]);
      }
    }
  }

  // One request: its replayed drafts, the tokens that its state takes in, then the drafts of this
  // pass, behind which the state is as before them.
  void run_drafts(LinearPart part, const DraftTokens& tokens) {
    part.in_chunks = false;
    const int32_t begin = part.batch.q_indptr[0], end = part.batch.q_indptr[1];
    const int32_t before = *part.batch.kv_lens - (end - begin), slot = *part.batch.state_slots;
    const int32_t certain = end - begin - tokens.drafts;
    if (tokens.replayed > 0) {
      LinearPart replayed = part;
      replayed.linear = kept_->gather(part.linear, part.state, slot, tokens);
      replayed.convolved = kept_->convolved();
      replayed.out = kept_->out();
      replayed.out_token_stride = int64_t{spec().linear.value_heads} * spec().linear.value_dim;
      replayed.batch.snapshot_slots = nullptr;
      run_tokens(replayed, 0, tokens.replayed, before);
    }
    if (certain > 0) run_tokens(part, begin, begin + certain, before + certain);
    if (tokens.drafts == 0) return;
    kept_->keep(part.linear, begin + certain, part.state, slot, tokens);
    kept_->save(part.state, slot, before + certain == 0);
    run_tokens(part, begin + certain, end, *part.batch.kv_lens);
    kept_->restore(part.state, slot);
  }

  // Tokens [first, last) of the part's only request, which then has kv_len tokens.
  void run_tokens(LinearPart part, int32_t first, int32_t last, int32_t kv_len) {
    const int32_t q_indptr[] = {first, last};
    part.batch.q_indptr = q_indptr;
    part.batch.kv_lens = &kv_len;
    run_part(part);
  }

  void run_part(const LinearPart& part) {
    const float* mixed = part.linear.mixed;
    if (convolves_alone(spec().kind)) {
      if (part.linear.conv_weight != nullptr)
        return convolve(part, part.out, part.out_token_stride);
    } else if (spec().linear.conv_width > 0) {
      convolve(part, part.convolved, spec().linear.conv_dim());
      mixed = part.convolved;
    }
    switch (spec().kind) {
      case AttentionKind::mamba1:
        return run_mamba1(part, mixed);
      case AttentionKind::mamba2:
        return run_mamba2(part, mixed);
      case AttentionKind::kda:
        return run_kda(part, mixed);
      case AttentionKind::lightning:
        return run_lightning(part, mixed);
      default:
        return run_gated_delta_net(part, mixed);
    }
  }

  void convolve(const LinearPart& part, float* out, int64_t token_stride) {
    kernels::CausalConvParams conv;
    conv.batch = part.batch;
    conv.x = part.linear.mixed;
    conv.weight = part.linear.conv_weight;
    conv.bias = part.linear.conv_bias;
    conv.state = part.state.conv;
    conv.state_slot_stride = part.state.conv_slot_stride;
    conv.plain = part.linear.plain_conv;
    conv.y = out;
    conv.y_token_stride = token_stride;
    conv.dim = conv_dim_of(spec());
    conv.width = spec().linear.conv_width;
    kernels().causal_conv(conv, threads());
  }

  // The parameters that kinds with q, k and v have in common.
  template <typename Params>
  Params qkv_params(const LinearPart& part, const float* mixed) const {
    Params params;
    params.batch = part.batch;
    params.qkv = mixed;
    params.log_decay = part.linear.log_decay;
    params.state = part.state.state;
    params.state_dtype = states()->spec().dtype;
    params.state_slot_stride = part.state.state_slot_stride;
    params.out = part.out;
    params.out_token_stride = part.out_token_stride;
    params.key_heads = spec().linear.key_heads;
    params.value_heads = spec().linear.value_heads;
    params.key_dim = spec().linear.key_dim;
    params.value_dim = spec().linear.value_dim;
    params.scale = softmax_scale(spec());
    return params;
  }

  void run_gated_delta_net(const LinearPart& part, const float* mixed) {
    auto params = qkv_params<kernels::GatedDeltaNetParams>(part, mixed);
    params.beta = part.linear.beta;
    params.l2_normalise_qk = part.linear.l2_normalise_qk;
    params.in_chunks = part.in_chunks;
    kernels().gated_delta_net(params, threads());
  }

  void run_kda(const LinearPart& part, const float* mixed) {
    auto params = qkv_params<kernels::KdaParams>(part, mixed);
    params.beta = part.linear.beta;
    params.l2_normalise_qk = part.linear.l2_normalise_qk;
    kernels().kda(params, threads());
  }

  void run_lightning(const LinearPart& part, const float* mixed) {
    auto params = qkv_params<kernels::LightningParams>(part, mixed);
    params.in_chunks = part.in_chunks;
    kernels().lightning(params, threads());
  }

  // Returns what both kinds of Mamba have in common.
  template <typename Params>
  Params mamba_params(const LinearPart& part, const float* mixed) {
    Params params;
    params.batch = part.batch;
    params.xbc = mixed;
    params.dt = part.linear.beta;
    params.skip = part.linear.skip;
    params.state = part.state.state;
    params.state_dtype = states()->spec().dtype;
    params.state_slot_stride = part.state.state_slot_stride;
    params.out = part.out;
    params.out_token_stride = part.out_token_stride;
    params.groups = spec().linear.key_heads;
    params.state_dim = spec().linear.key_dim;
    return params;
  }

  void run_mamba2(const LinearPart& part, const float* mixed) {
    auto params = mamba_params<kernels::Mamba2Params>(part, mixed);
    params.log_decay = part.linear.log_decay;
    params.heads = spec().linear.value_heads;
    params.head_dim = spec().linear.value_dim;
    params.in_chunks = part.in_chunks;
    kernels().mamba2(params, threads());
  }

  void run_mamba1(const LinearPart& part, const float* mixed) {
    auto params = mamba_params<kernels::Mamba1Params>(part, mixed);
    params.a = part.linear.log_decay;
    params.channels = spec().linear.value_heads;
    kernels().mamba1(params, threads());
  }

  Buffers buffers_;
  kernels::StateBatch state_batch_;
  std::optional<KeptDrafts> kept_;  // over a pool that keeps drafts
};

}  // namespace

size_t host_linear_workspace_bytes(const HostShape& shape, const BatchLimits& limits) {
  WorkspaceCarver counter(nullptr);
  carve_buffers(counter, shape, limits);
  return counter.bytes();
}

std::unique_ptr<AttentionBackend> make_host_linear(const HostKernels& kernels,
                                                   const BackendContext& context) {
  return std::make_unique<HostLinear>(kernels, context);
}

}  // namespace fovea
