// SPDX-License-Identifier: Apache-2.0
// The prefill of gated delta net and of Kimi delta attention (KDA) on Hopper, in chunks of 64
// tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/kernel_pack.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/common/kda_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

struct GdnPrefillSetup {
  bool is_kda = false;  // decays are of columns of the state
  int32_t key_heads = 0, value_heads = 0;
  int32_t key_dim = 0, value_dim = 0;
  int32_t min_tokens = 1;  // tokens of the shortest request that is in_chunks
  int sm = 0;
  int32_t multiprocessors = 0;
};

// The requests of a batch. Those that are not in_chunks are left alone, their outputs included.
struct GdnPrefillBatch {
  const StateSpan* spans = nullptr;  // [requests], device memory; those in_chunks have a slot
  int32_t requests = 0;
  int32_t tokens = 0;  // maximum of all requests together
};

// Device memory. Strides count elements; those of q, k and v are multiples of 8, that of `out` is a
// multiple of 4.
struct GdnPrefillTensors {
  const void* q = nullptr;  // [tokens, key_heads, 128] bf16
  const void* k = nullptr;  // the same
  const void* v = nullptr;  // [tokens, value_heads, 128] bf16
  int64_t q_token_stride = 0, k_token_stride = 0, v_token_stride = 0;
  // ln(alpha), [tokens, value_heads]; KDA: [tokens, value_heads, 128], aligned to 16 bytes
  const float* log_decay = nullptr;
  const float* beta = nullptr;  // [tokens, value_heads]
  void* state = nullptr;        // [slots, value_heads, 128, 128]: rows of values
  StateType state_type = StateType::f32;
  int64_t state_slot_stride = 0;
  float* out = nullptr;  // [tokens, value_heads, 128]
  int64_t out_token_stride = 0;
  float scale = 1;
  bool l2_normalise_qk = false;
};

// The bits of a request depend on its own tokens and state only. A prompt in several pieces has the
// bits of the whole one if all pieces but the last have a multiple of 64 tokens.
class GdnPrefill {
 public:
  // Returns whether there are kernels for this setup.
  static bool serves(const GdnPrefillSetup& setup);
  // Returns what the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const GdnPrefillSetup& setup);
  // Returns the bytes that plan() and run() need at `workspace`, aligned to 16, for batches of up
  // to max_tokens tokens of up to max_requests requests.
  static size_t workspace_bytes(const GdnPrefillSetup& setup, int32_t max_tokens,
                                int32_t max_requests);

  GdnPrefill() = default;
  // Error{unsupported} as Kernel's constructor.
  GdnPrefill(const GdnPrefillSetup& setup, gpu::KernelStore& store);

  // Lists the chunks of a batch, once for all layers, from the spans. Legal in a capture, as run()
  // is.
  void plan(const GdnPrefillBatch& batch, void* workspace, gpu::Launcher launcher) const;
  // Enqueues a layer's recurrence for the planned batch.
  void run(const GdnPrefillBatch& batch, const GdnPrefillTensors& tensors, void* workspace,
           gpu::Launcher launcher) const;

 private:
  void run_gdn(const GdnPrefillBatch& batch, const GdnPrefillTensors& tensors, void* workspace,
               gpu::Launcher launcher) const;
  void run_kda(const GdnPrefillBatch& batch, const GdnPrefillTensors& tensors, void* workspace,
               gpu::Launcher launcher) const;
  // Launches the kernels of chunks and of states, of which `tasks` is the maximum for the former.
  template <typename Params>
  void launch(int64_t tasks, int32_t walks, const Params& params, gpu::Launcher launcher) const;

  GdnPrefillSetup setup_;
  Kernel plan_, chunks_, states_;
  mutable struct { gpu::RepeatedTensorMap q, k, v; } maps_;
};

}  // namespace fovea::kernels::cuda
