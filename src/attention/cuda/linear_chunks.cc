// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/linear_chunks.h"

namespace fovea {

namespace cuda = kernels::cuda;
using cuda::RecurrenceKind;

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

bool computes_chunks(const AttentionSpec& spec, const DeviceInfo& device) {
  return spec.q_dtype == DType::bf16 && !spec.batch_invariant && spec.linear.conv_width > 0 &&
         !convolves_alone(spec.kind) && cuda::ChunkPrefill::serves(chunk_setup(spec, device));
}

cuda::ChunkPrefillSetup chunk_setup(const AttentionSpec& spec, const DeviceInfo& device) {
  const LinearSpec& linear = spec.linear;
  return {.kind = recurrence_of(spec),
          .key_heads = linear.key_heads,
          .value_heads = linear.value_heads,
          .key_dim = linear.key_dim,
          .value_dim = linear.value_dim,
          .min_tokens = kMinChunkedTokens,
          .sm = device.sm,
          .multiprocessors = device.cores};
}

cuda::ChunkPrefillTensors chunk_tensors(const cuda::RecurrenceParams& params,
                                        const uint16_t* convolved) {
  const int64_t token_stride = 2 * params.mixed_stride;  // rows are as long as those in f32
  return {.q = convolved + params.out_at,
          .k = convolved + params.in_at,
          .v = convolved + params.values_at,
          .q_token_stride = token_stride,
          .k_token_stride = token_stride,
          .v_token_stride = token_stride,
          .log_decay = params.log_decay,
          .strength = params.strength,
          .skip = params.skip,
          .state = params.state,
          .state_type = params.state_type,
          .state_slot_stride = params.state_slot_stride,
          .out = params.result,
          .out_token_stride = params.result_stride,
          .scale = params.scale,
          .l2_normalise_qk = params.l2_normalise != 0};
}

}  // namespace fovea
