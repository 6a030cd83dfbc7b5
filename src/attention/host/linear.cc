// SPDX-License-Identifier: Apache-2.0
#include "attention/host/linear.h"

#include "attention/validate/spec.h"
#include "core/check.h"

namespace fovea {
namespace {

float* carve_convolved(WorkspaceCarver& workspace, const HostShape& shape,
                       const BatchLimits& limits) {
  if (shape.spec.linear.conv_width == 0) return nullptr;
  return workspace.take<float>(int64_t{limits.max_tokens} * shape.spec.linear.conv_dim());
}

class HostLinear final : public HostBackend {
 public:
  HostLinear(const HostKernels& kernels, const BackendContext& context)
      : HostBackend(kernels, context) {}

 private:
  size_t count_bytes(const BatchLimits& limits) const override {
    return host_linear_workspace_bytes(shape(), limits);
  }

  void carve(WorkspaceCarver& workspace, const BatchLimits& limits) override {
    convolved_ = carve_convolved(workspace, shape(), limits);
  }

  void plan_batch(const BatchView& batch) override {
    state_batch_ = {batch.requests, batch.q_indptr.data(), batch.kv_lens.data(),
                    batch.linear.state_slots.data(), batch.linear.snapshot_slots.data()};
  }

  void run_layer(const LayerTensors& layer) override {
    const StateLayerView state = states()->layer(layer.layer);
    const float* mixed = layer.linear.mixed;
    if (spec().linear.conv_width > 0) {
      convolve(layer.linear, state);
      mixed = convolved_;
    }
    switch (spec().kind) {
      case AttentionKind::mamba2:
        return run_mamba2(layer, mixed, state);
      case AttentionKind::kda:
        return run_kda(layer, mixed, state);
      case AttentionKind::lightning:
        return run_lightning(layer, mixed, state);
      default:
        return run_gated_delta_net(layer, mixed, state);
    }
  }

  void convolve(const LinearTensors& linear, const StateLayerView& state) {
    kernels::CausalConvParams conv;
    conv.batch = state_batch_;
    conv.x = linear.mixed;
    conv.weight = linear.conv_weight;
    conv.bias = linear.conv_bias;
    conv.state = state.conv;
    conv.state_slot_stride = state.conv_slot_stride;
    conv.y = convolved_;
    conv.dim = spec().linear.conv_dim();
    conv.width = spec().linear.conv_width;
    kernels().causal_conv(conv, threads());
  }

  // The parameters that kinds with q, k and v have in common.
  template <typename Params>
  Params qkv_params(const LayerTensors& layer, const float* mixed,
                    const StateLayerView& state) const {
    Params params;
    params.batch = state_batch_;
    params.qkv = mixed;
    params.log_decay = layer.linear.log_decay;
    params.state = state.state;
    params.state_dtype = states()->spec().dtype;
    params.state_slot_stride = state.state_slot_stride;
    params.out = static_cast<float*>(layer.out.data);
    params.out_token_stride = layer.out.token_stride;
    params.key_heads = spec().linear.key_heads;
    params.value_heads = spec().linear.value_heads;
    params.key_dim = spec().linear.key_dim;
    params.value_dim = spec().linear.value_dim;
    params.scale = softmax_scale(spec());
    return params;
  }

  void run_gated_delta_net(const LayerTensors& layer, const float* mixed,
                           const StateLayerView& state) {
    auto params = qkv_params<kernels::GatedDeltaNetParams>(layer, mixed, state);
    params.beta = layer.linear.beta;
    params.l2_normalise_qk = layer.linear.l2_normalise_qk;
    params.in_chunks = !spec().batch_invariant;
    kernels().gated_delta_net(params, threads());
  }

  void run_kda(const LayerTensors& layer, const float* mixed, const StateLayerView& state) {
    auto params = qkv_params<kernels::KdaParams>(layer, mixed, state);
    params.beta = layer.linear.beta;
    params.l2_normalise_qk = layer.linear.l2_normalise_qk;
    kernels().kda(params, threads());
  }

  void run_lightning(const LayerTensors& layer, const float* mixed, const StateLayerView& state) {
    auto params = qkv_params<kernels::LightningParams>(layer, mixed, state);
    params.in_chunks = !spec().batch_invariant;
    kernels().lightning(params, threads());
  }

  void run_mamba2(const LayerTensors& layer, const float* mixed, const StateLayerView& state) {
    kernels::Mamba2Params params;
    params.batch = state_batch_;
    params.xbc = mixed;
    params.log_decay = layer.linear.log_decay;
    params.dt = layer.linear.beta;
    params.skip = layer.linear.skip;
    params.state = state.state;
    params.state_dtype = states()->spec().dtype;
    params.state_slot_stride = state.state_slot_stride;
    params.out = static_cast<float*>(layer.out.data);
    params.out_token_stride = layer.out.token_stride;
    params.heads = spec().linear.value_heads;
    params.groups = spec().linear.key_heads;
    params.head_dim = spec().linear.value_dim;
    params.state_dim = spec().linear.key_dim;
    params.in_chunks = !spec().batch_invariant;
    kernels().mamba2(params, threads());
  }

  float* convolved_ = nullptr;  // [max_tokens, conv_dim]
  kernels::StateBatch state_batch_;
};

}  // namespace

size_t host_linear_workspace_bytes(const HostShape& shape, const BatchLimits& limits) {
  WorkspaceCarver counter(nullptr);
  carve_convolved(counter, shape, limits);
  return counter.bytes();
}

std::unique_ptr<AttentionBackend> make_host_linear(const HostKernels& kernels,
                                                   const BackendContext& context) {
  return std::make_unique<HostLinear>(kernels, context);
}

}  // namespace fovea
