// SPDX-License-Identifier: Apache-2.0
// The recurrences of linear layers over prompts on Hopper, in chunks of 64 tokens by tensor cores.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/kernel_pack.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/common/chunk_params.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/portable/recurrence/launch.h"

namespace fovea::kernels::cuda {

struct ChunkPrefillSetup {
  RecurrenceKind kind = RecurrenceKind::delta;
  int32_t key_heads = 0, value_heads = 0;
  int32_t key_dim = 0, value_dim = 0;
  int32_t min_tokens = 1;  // tokens of the shortest request that is in_chunks
  int sm = 0;
  int32_t multiprocessors = 0;
  bool cuts_short_requests = false;  // for tests: into segments, though that takes longer
};

// The requests of a batch. Those that are not in_chunks are left alone, their outputs included.
struct ChunkPrefillBatch {
  const StateSpan* spans = nullptr;  // [requests], device memory; those in_chunks have a slot
  int32_t requests = 0;
  int32_t tokens = 0;  // maximum of all requests together
};

// Device memory; RecurrenceParams has the operations, with k as `in` and q as `out`. Strides count
// elements; those of q, k and v are multiples of 8, that of `out` is a multiple of 4.
struct ChunkPrefillTensors {
  const void* q = nullptr;  // [tokens, key_heads, 128] bf16
  const void* k = nullptr;  // the same
  const void* v = nullptr;  // [tokens, value_heads, value_dim] bf16
  int64_t q_token_stride = 0, k_token_stride = 0, v_token_stride = 0;
  // ln, [tokens, value_heads]; lightning: [value_heads]; kda: [tokens, value_heads, 128], aligned
  // to 16 bytes
  const float* log_decay = nullptr;
  const float* strength = nullptr;  // [tokens, value_heads]; lightning: null, which is 1
  const float* skip = nullptr;      // mamba2: [value_heads]; null: 0
  void* state = nullptr;            // [slots, value_heads, value_dim, 128]: rows of values
  StateType state_type = StateType::f32;
  int64_t state_slot_stride = 0;
  float* out = nullptr;  // [tokens, value_heads, value_dim]
  int64_t out_token_stride = 0;
  float scale = 1;
  bool l2_normalise_qk = false;  // delta and kda
};

// The bits of a request depend on its own tokens and state only, unless it is cut into segments: a
// plan does that to long requests with few heads, depending on the batch, where multiprocessors
// would be idle otherwise. A prompt in several pieces that are not cut has the bits of the whole
// one if all pieces but the last have a multiple of 64 tokens.
class ChunkPrefill {
 public:
  // Returns whether there are kernels for this setup.
  static bool serves(const ChunkPrefillSetup& setup);
  // Returns what the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const ChunkPrefillSetup& setup);
  // Returns the bytes that plan() and run() need at `workspace`, aligned to 16, for batches of up
  // to max_tokens tokens of up to max_requests requests.
  static size_t workspace_bytes(const ChunkPrefillSetup& setup, int32_t max_tokens,
                                int32_t max_requests);

  ChunkPrefill() = default;
  // Error{unsupported} as Kernel's constructor.
  ChunkPrefill(const ChunkPrefillSetup& setup, gpu::KernelStore& store);

  // Lists the chunks of a batch, once for all layers, from the spans. Legal in a capture, as run()
  // is.
  void plan(const ChunkPrefillBatch& batch, void* workspace, gpu::Launcher launcher) const;
  // Enqueues a layer's recurrence for the planned batch.
  void run(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors, void* workspace,
           gpu::Launcher launcher) const;

 private:
  void run_delta(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                 void* workspace, gpu::Launcher launcher) const;
  void run_kda(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors, void* workspace,
               gpu::Launcher launcher) const;
  void run_sums(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors, void* workspace,
                gpu::Launcher launcher) const;
  template <typename Params>
  Params params_of(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                   const ChunkPlan& plan) const;
  template <typename Params>
  void encode_keys(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                   Params& params) const;
  // Returns the maximum of tasks of the kernel of states.
  int64_t tasks_of_states(int32_t walks) const;
  // Launches a block for each task, up to a number for each SM.
  template <typename Params>
  void launch(const Kernel& kernel, int64_t tasks, int32_t blocks_per_sm, const Params& params,
              gpu::Launcher launcher) const;

  ChunkPrefillSetup setup_;
  Kernel plan_, states_;
  Kernel chunks_;                     // empty for kinds without the delta rule
  Kernel cutting_plan_, cut_states_;  // for batches whose requests may be cut; empty if never
  mutable struct { gpu::RepeatedTensorMap q, k, v; } maps_;
};

}  // namespace fovea::kernels::cuda
