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

// Returns the columns of an up-projected key.
inline int32_t key_dim(const AttentionSpec& spec) { return spec.mla.nope_dim + spec.mla.rope_dim; }

// The largest amount that is up-projected at a time.
struct UpProjectedRoom {
  int32_t rows = 0;       // rows of latents; at least max_tokens
  int64_t head_rows = 0;  // (row, head) pairs of keys and values; at least rows
};

// Holds all rows of 8x512 over 8k for 16 heads (chosen on H100, 2026-11-27: 23 % faster than two
// chunks).
inline constexpr int64_t kUpProjectedRoomBytes = int64_t{736} << 20;

// Returns the rows that fit `bytes` with 16 heads, at least max_tokens, or all rows that a batch
// within the limits can have.
UpProjectedRoom up_projected_room(const MlaKernels& kernels, const AttentionSpec& spec,
                                  DType stored, const DeviceInfo& device, const BatchLimits& limits,
                                  int64_t bytes = kUpProjectedRoomBytes);

// Returns the bytes of `room`.
int64_t up_projected_bytes(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                           const DeviceInfo& device, const UpProjectedRoom& room);

struct UpProjectedBuffers {
  UpProjectedRoom room;
  // [rows, kv_lora_rank + rope_dim] latents and rotary keys; [rows, rope_dim] with offsets, by
  // which latents are read from their pages.
  std::byte* gathered = nullptr;
  int64_t* offsets = nullptr;  // [rows]
  // `heads`: as many as the planned pass takes at a time.
  std::byte* keys = nullptr;              // [rows, heads, nope_dim], or with a rotary key for each
  std::byte* values = nullptr;            // [rows, heads, v_dim]
  float* lse = nullptr;                   // [max_tokens, q_heads]
  float* part_lse = nullptr;              // [max_tokens, q_heads]
  std::array<std::byte*, 2> attention{};  // workspaces of attention: new tokens, chunks
  uint8_t* up_requests = nullptr;         // [max_requests]
  uint8_t* up_tokens = nullptr;           // [max_tokens]
  int32_t* new_lens = nullptr;            // [max_requests]
  int32_t* row_indptr = nullptr;          // [max_requests + 1]
  int32_t* live_rows = nullptr;           // [1]
  int32_t* chunk_begin = nullptr;         // [max_requests]
  int32_t* chunk_lens = nullptr;          // [max_requests]
  int32_t* chunk_indptr = nullptr;        // [max_requests + 1]
};

// Takes the buffers. The limits serve_up_projected().
UpProjectedBuffers carve_up_projected(WorkspaceCarver& workspace, const MlaKernels& kernels,
                                      const AttentionSpec& spec, DType stored,
                                      const DeviceInfo& device, const BatchLimits& limits,
                                      const UpProjectedRoom& room);

// Returns the setup of attention over packed keys and values of every head. All heads share one
// rotary key if the family can read it so.
kernels::cuda::AttentionSetup up_projected_attention(const MlaKernels& kernels,
                                                     const AttentionSpec& spec,
                                                     const DeviceInfo& device);

}  // namespace fovea
