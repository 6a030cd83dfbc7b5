// SPDX-License-Identifier: Apache-2.0
// The prefill on Hopper, in chunks of 64 tokens, of states that only decay and add: Mamba2 and
// lightning attention.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/kernel_pack.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/common/ssd_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

struct SsdPrefillSetup {
  int32_t key_heads = 0, value_heads = 0;
  int32_t key_dim = 0, value_dim = 0;
  int32_t min_tokens = 1;  // tokens of the shortest request that is in_chunks
  int sm = 0;
  int32_t multiprocessors = 0;
};

// The requests of a batch. Those that are not in_chunks are left alone, their outputs included.
struct SsdPrefillBatch {
  const StateSpan* spans = nullptr;  // [requests], device memory; those in_chunks have a slot
  int32_t requests = 0;
  int32_t tokens = 0;  // maximum of all requests together
};

// Device memory. S = e^log_decay S + strength v k^T, o = scale S q + skip v. Strides count
// elements; those of q, k and v are multiples of 8, that of `out` is a multiple of 4.
struct SsdPrefillTensors {
  const void* q = nullptr;  // [tokens, key_heads, 128] bf16
  const void* k = nullptr;  // the same
  const void* v = nullptr;  // [tokens, value_heads, value_dim] bf16
  int64_t q_token_stride = 0, k_token_stride = 0, v_token_stride = 0;
  const float* log_decay = nullptr;  // [tokens, value_heads], or [value_heads] with a stride of 0
  int64_t log_decay_stride = 0;      // from token to token
  const float* strength = nullptr;   // [tokens, value_heads]; null: 1
  const float* skip = nullptr;       // [value_heads]; null: 0
  void* state = nullptr;             // [slots, value_heads, value_dim, 128]: rows of values
  StateType state_type = StateType::f32;
  int64_t state_slot_stride = 0;
  float* out = nullptr;  // [tokens, value_heads, value_dim]
  int64_t out_token_stride = 0;
  float scale = 1;
};

// The bits of a request depend on its own tokens and state only. A prompt in several pieces has the
// bits of the whole one if all pieces but the last have a multiple of 64 tokens.
class SsdPrefill {
 public:
  // Returns whether there are kernels for this setup.
  static bool serves(const SsdPrefillSetup& setup);
  // Returns what the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const SsdPrefillSetup& setup);
  // Returns the bytes that plan() and run() need at `workspace`, aligned to 16, for batches of up
  // to max_tokens tokens of up to max_requests requests.
  static size_t workspace_bytes(const SsdPrefillSetup& setup, int32_t max_tokens,
                                int32_t max_requests);

  SsdPrefill() = default;
  // Error{unsupported} as Kernel's constructor.
  SsdPrefill(const SsdPrefillSetup& setup, gpu::KernelStore& store);

  // Lists the chunks of a batch, once for all layers, from the spans. Legal in a capture, as run()
  // is.
  void plan(const SsdPrefillBatch& batch, void* workspace, gpu::Launcher launcher) const;
  // Enqueues a layer's recurrence for the planned batch.
  void run(const SsdPrefillBatch& batch, const SsdPrefillTensors& tensors, void* workspace,
           gpu::Launcher launcher) const;

 private:
  SsdPrefillSetup setup_;
  Kernel plan_, prefill_;
  mutable struct { gpu::RepeatedTensorMap q, k, v; } maps_;
};

}  // namespace fovea::kernels::cuda
