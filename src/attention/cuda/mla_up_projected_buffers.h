// SPDX-License-Identifier: Apache-2.0
// The workspace of the up-projected form of MLA on a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "attention/cuda/mla_kernels.h"
#include "core/workspace_carver.h"
#include "fovea/select_backend.h"
#include "kernels/cuda/attention_kernel.h"

namespace fovea {

// Columns of an up-projected key.
inline int32_t key_dim(const AttentionSpec& spec) { return spec.mla.nope_dim + spec.mla.rope_dim; }

// What is up-projected at a time.
struct MlaPrefillRoom {
  int32_t rows = 0;       // of latents; max_tokens at least
  int64_t head_rows = 0;  // of keys and values: (row, head) pairs; rows at least
};

// So much that 16 heads have all rows of 8x512 over 8k, which took 1655 us in two chunks and 1270
// in one (H100, 2026-11-27).
inline constexpr int64_t kMlaPrefillRoomBytes = int64_t{736} << 20;

// In batches within the limits: rows for 16 heads within so many bytes, max_tokens at least, or all
// that such a batch can have.
MlaPrefillRoom mla_prefill_room(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                                const DeviceInfo& device, const BatchLimits& limits,
                                int64_t bytes = kMlaPrefillRoomBytes);

// Bytes of what is up-projected at a time.
int64_t mla_prefill_bytes(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                          const DeviceInfo& device, const MlaPrefillRoom& room);

struct MlaPrefillBuffers {
  MlaPrefillRoom room;
  // [rows, kv_lora_rank + rope_dim] latents and rotary keys; with offsets, where latents are read
  // in their pages, [rows, rope_dim].
  std::byte* gathered = nullptr;
  int64_t* offsets = nullptr;  // [rows]
  // Of as many heads as the planned pass takes at a time:
  std::byte* keys = nullptr;              // [rows, heads, nope_dim], or with a rotary key for each
  std::byte* values = nullptr;            // [rows, heads, v_dim]
  float* lse = nullptr;                   // [max_tokens, q_heads]
  float* part_lse = nullptr;              // [max_tokens, q_heads]
  std::array<std::byte*, 2> attention{};  // of MlaKernels::attention: new tokens, chunks
  uint8_t* up_requests = nullptr;         // [max_requests]
  uint8_t* up_tokens = nullptr;           // [max_tokens]
  int32_t* new_lens = nullptr;            // [max_requests]
  int32_t* row_indptr = nullptr;          // [max_requests + 1]
  int32_t* live_rows = nullptr;           // [1]
  int32_t* chunk_begin = nullptr;         // [max_requests]
  int32_t* chunk_lens = nullptr;          // [max_requests]
  int32_t* chunk_indptr = nullptr;        // [max_requests + 1]
};

// Of limits that serve_up_projected().
MlaPrefillBuffers carve_mla_prefill(WorkspaceCarver& workspace, const MlaKernels& kernels,
                                    const AttentionSpec& spec, DType stored,
                                    const DeviceInfo& device, const BatchLimits& limits,
                                    const MlaPrefillRoom& room);

// Attention over keys and values of every head, packed; the rotary key once for all heads where it
// can read it so.
kernels::cuda::AttentionSetup mla_prefill_attention(const MlaKernels& kernels,
                                                    const AttentionSpec& spec,
                                                    const DeviceInfo& device);

}  // namespace fovea
