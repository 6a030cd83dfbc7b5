// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/linear_chunks.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;
using cuda::RecurrenceKind;

template <typename Setup>
Setup setup_of(const AttentionSpec& spec, const DeviceInfo& device) {
  const LinearSpec& linear = spec.linear;
  return {.key_heads = linear.key_heads,
          .value_heads = linear.value_heads,
          .key_dim = linear.key_dim,
          .value_dim = linear.value_dim,
          .min_tokens = LinearChunks::kMinTokens,
          .sm = device.sm,
          .multiprocessors = device.cores};
}

cuda::GdnPrefillSetup gdn_setup(const AttentionSpec& spec, const DeviceInfo& device) {
  auto setup = setup_of<cuda::GdnPrefillSetup>(spec, device);
  setup.is_kda = spec.kind == AttentionKind::kda;
  return setup;
}
cuda::SsdPrefillSetup ssd_setup(const AttentionSpec& spec, const DeviceInfo& device) {
  return setup_of<cuda::SsdPrefillSetup>(spec, device);
}

// The fields that the tensors of both kernels have.
template <typename Tensors>
Tensors tensors_of(const cuda::RecurrenceParams& params, const uint16_t* convolved) {
  Tensors tensors;
  tensors.q = convolved + params.out_at;
  tensors.k = convolved + params.in_at;
  tensors.v = convolved + params.values_at;
  tensors.q_token_stride = tensors.k_token_stride = tensors.v_token_stride =
      2 * params.mixed_stride;  // rows are as long as those in f32
  tensors.log_decay = params.log_decay;
  tensors.scale = params.scale;
  tensors.state = params.state;
  tensors.state_type = params.state_type;
  tensors.state_slot_stride = params.state_slot_stride;
  tensors.out = params.result;
  tensors.out_token_stride = params.result_stride;
  return tensors;
}

}  // namespace

RecurrenceKind recurrence_of(const AttentionSpec& spec) {
  switch (spec.kind) {
    case AttentionKind::mamba2:
      return RecurrenceKind::mamba2;
    case AttentionKind::kda:
      return RecurrenceKind::kda;
    case AttentionKind::lightning:
      return RecurrenceKind::lightning;
    default:
      return RecurrenceKind::delta;
  }
}

bool LinearChunks::serves(const AttentionSpec& spec, const DeviceInfo& device) {
  if (spec.q_dtype != DType::bf16 || spec.batch_invariant || spec.linear.conv_width == 0) {
    return false;
  }
  return has_delta_rule(spec.kind) ? cuda::GdnPrefill::serves(gdn_setup(spec, device))
                                   : cuda::SsdPrefill::serves(ssd_setup(spec, device));
}

std::vector<gpu::KernelVariant> LinearChunks::variants(const AttentionSpec& spec,
                                                       const DeviceInfo& device) {
  return has_delta_rule(spec.kind) ? cuda::GdnPrefill::variants(gdn_setup(spec, device))
                                   : cuda::SsdPrefill::variants(ssd_setup(spec, device));
}

size_t LinearChunks::workspace_bytes(const AttentionSpec& spec, const DeviceInfo& device,
                                     int32_t max_tokens, int32_t max_requests) {
  return has_delta_rule(spec.kind)
             ? cuda::GdnPrefill::workspace_bytes(gdn_setup(spec, device), max_tokens, max_requests)
             : cuda::SsdPrefill::workspace_bytes(ssd_setup(spec, device), max_tokens, max_requests);
}

LinearChunks::LinearChunks(const AttentionSpec& spec, const DeviceInfo& device,
                           gpu::KernelStore& store)
    : log_decay_stride_(spec.kind == AttentionKind::lightning ? 0 : spec.linear.value_heads) {
  if (has_delta_rule(spec.kind)) {
    gdn_.emplace(gdn_setup(spec, device), store);
  } else {
    ssd_.emplace(ssd_setup(spec, device), store);
  }
}

void LinearChunks::plan(const ChunkedBatch& batch, void* workspace, gpu::Launcher launcher) const {
  if (gdn_) gdn_->plan({batch.spans, batch.requests, batch.tokens}, workspace, launcher);
  if (ssd_) ssd_->plan({batch.spans, batch.requests, batch.tokens}, workspace, launcher);
}

void LinearChunks::run(const ChunkedBatch& batch, const cuda::RecurrenceParams& params,
                       const uint16_t* convolved, void* workspace, gpu::Launcher launcher) const {
  if (gdn_) {
    auto tensors = tensors_of<cuda::GdnPrefillTensors>(params, convolved);
    tensors.beta = params.strength;
    tensors.l2_normalise_qk = params.l2_normalise != 0;
    gdn_->run({batch.spans, batch.requests, batch.tokens}, tensors, workspace, launcher);
    return;
  }
  auto tensors = tensors_of<cuda::SsdPrefillTensors>(params, convolved);
  tensors.log_decay_stride = log_decay_stride_;
  tensors.strength = params.strength;
  tensors.skip = params.skip;
  ssd_->run({batch.spans, batch.requests, batch.tokens}, tensors, workspace, launcher);
}

}  // namespace fovea
