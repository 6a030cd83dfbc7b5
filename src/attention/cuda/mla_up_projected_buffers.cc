// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/mla_up_projected_buffers.h"

#include <algorithm>
#include <limits>

#include "attention/cuda/mla_projection.h"
#include "attention/mla_forms.h"

namespace fovea {
namespace {

// Returns the elements that a chunk keeps of a row in addition to keys and values of every head:
// latent and rotary key, or, if the latent is read from its page, the rotary key and an 8-byte
// offset.
int64_t gathered_elements(const AttentionSpec& spec, bool gathers) {
  return gathers ? spec.mla.rope_dim + 4 : spec.mla.row_dim();
}

}  // namespace

kernels::cuda::AttentionSetup up_projected_attention(const MlaKernels& kernels,
                                                     const AttentionSpec& spec,
                                                     const DeviceInfo& device) {
  kernels::cuda::AttentionSetup setup;
  setup.spec.kind = AttentionKind::mha;
  setup.spec.scope = AttentionScope::encoder;
  setup.spec.q_heads = setup.spec.kv_heads = spec.q_heads;
  setup.spec.head_dim = key_dim(spec);
  setup.spec.head_dim_v = spec.mla.v_dim;
  setup.spec.q_dtype = spec.q_dtype;
  setup.sm = device.sm;
  setup.multiprocessors = device.cores;
  setup.shared_key_dims = spec.mla.rope_dim;
  if (kernels.attention->variants(setup).empty()) setup.shared_key_dims = 0;
  return setup;
}

namespace {

// Bytes of a row: its gathered elements, and its key and value for one head.
struct RowBytes {
  int64_t gathered = 0, head = 0;
};

RowBytes row_bytes(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                   const DeviceInfo& device) {
  const auto element = static_cast<int64_t>(dtype_bytes(spec.q_dtype));
  const int32_t shared = up_projected_attention(kernels, spec, device).shared_key_dims;
  return {element * gathered_elements(spec, MlaProjection::gathers(kernels, spec, stored, device)),
          element * (key_dim(spec) + spec.mla.v_dim - shared)};
}

}  // namespace

int64_t up_projected_bytes(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                           const DeviceInfo& device, const UpProjectedRoom& room) {
  const RowBytes bytes = row_bytes(kernels, spec, stored, device);
  return room.rows * bytes.gathered + room.head_rows * bytes.head;
}

UpProjectedRoom up_projected_room(const MlaKernels& kernels, const AttentionSpec& spec,
                                  DType stored, const DeviceInfo& device, const BatchLimits& limits,
                                  int64_t bytes) {
  // Bounds the gathered rows, and a layer's launches.
  constexpr int32_t kMinHeads = 16;
  const RowBytes row = row_bytes(kernels, spec, stored, device);
  const int64_t heads = std::min(spec.q_heads, kMinHeads);
  const int64_t fit =
      std::max<int64_t>(bytes / (row.gathered + heads * row.head), limits.max_tokens);
  const int64_t all = std::max<int64_t>(
      max_up_projected_rows(limits, std::numeric_limits<int32_t>::max()).all, limits.max_tokens);
  return {static_cast<int32_t>(std::min(fit, all)), std::min(fit * heads, all * spec.q_heads)};
}

UpProjectedBuffers carve_up_projected(WorkspaceCarver& workspace, const MlaKernels& kernels,
                                      const AttentionSpec& spec, DType stored,
                                      const DeviceInfo& device, const BatchLimits& limits,
                                      const UpProjectedRoom& room) {
  UpProjectedBuffers buffers{.room = room};
  const auto rows_of = [&](int64_t rows, int64_t width) {
    return workspace.take<std::byte>(rows * width *
                                     static_cast<int64_t>(dtype_bytes(spec.q_dtype)));
  };
  const kernels::cuda::AttentionSetup setup = up_projected_attention(kernels, spec, device);
  if (MlaProjection::gathers(kernels, spec, stored, device)) {
    buffers.gathered = rows_of(room.rows, spec.mla.rope_dim);
    buffers.offsets = workspace.take<int64_t>(room.rows);
  } else {
    buffers.gathered = rows_of(room.rows, spec.mla.row_dim());
  }
  buffers.keys = rows_of(room.head_rows, key_dim(spec) - setup.shared_key_dims);
  buffers.values = rows_of(room.head_rows, spec.mla.v_dim);
  buffers.lse = workspace.take<float>(int64_t{limits.max_tokens} * spec.q_heads);
  buffers.part_lse = workspace.take<float>(int64_t{limits.max_tokens} * spec.q_heads);
  for (std::byte*& attention : buffers.attention) {
    attention = workspace.take_bytes(kernels.attention->workspace_bytes(setup, limits)).data();
  }
  buffers.up_requests = workspace.take<uint8_t>(limits.max_requests);
  buffers.up_tokens = workspace.take<uint8_t>(limits.max_tokens);
  buffers.new_lens = workspace.take<int32_t>(limits.max_requests);
  buffers.row_indptr = workspace.take<int32_t>(int64_t{limits.max_requests} + 1);
  buffers.live_rows = workspace.take<int32_t>(1);
  buffers.chunk_begin = workspace.take<int32_t>(limits.max_requests);
  buffers.chunk_lens = workspace.take<int32_t>(limits.max_requests);
  buffers.chunk_indptr = workspace.take<int32_t>(int64_t{limits.max_requests} + 1);
  return buffers;
}

}  // namespace fovea
